package onceq

import (
	"time"

	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/table"
)

// The numbers that somebody has chosen, each with its reason. A number of a format stands with the format
// (state.go, payload.go, limit.go). A number that is used once, and that nobody would look for, stands where
// it is used. Packages rhythm and table have those that several packages use.

const (
	chunkRows  = table.ChunkRows
	chunkBytes = table.ChunkBytes
	moment     = rhythm.Moment
)

// Who waits for jobs, and how soon it hears of them (listen.go, announce.go, look.go).
const (
	announceAgain = 20 * time.Second        // an announcement is renewed, and counts for three times as long
	pollListening = 1100 * time.Millisecond // with these renewals not more than a statement a second
	pollLeaving   = 4 * pollListening       // where many others wait that look too
	quietFor      = 10 * time.Millisecond   // Enqueue does not ask who waits: that costs its rate a tenth
	lookFollows   = quietFor + time.Millisecond
	lookEnough    = 9 * lookFollows // nearly all transactions have ended that began before an announcement
	lookStalled   = 3 * time.Second // a poll finds what took longer to commit
	dormantFrom   = 9               // workers that wait: one more makes no job start sooner (BOUNDS.md, wake)
	awakeFor      = time.Minute     // after a burst: there may be another one
	firstOnes     = 2               // of many that wait, that start delayed jobs at their time

	// A worker gets the jobs of a while alone where they come one soon after the other.
	looksBriefly = 15 * time.Millisecond  // so long it goes on looking, as producers see it,
	looksLong    = 100 * time.Millisecond // or so long where it found one each
	looksLongFor = 10 * time.Millisecond  // before; not longer than wake counts on
	looksOn      = 5 * time.Millisecond   // so much longer does it look
	looksEvery   = 3 * time.Millisecond   // between two claims meanwhile
	quickHandler = 5 * time.Millisecond   // its handlers take no longer on average, and
	quickRoom    = 10                     // it has room for so many jobs

	// A worker is lively where jobs come often, in many queues.
	livelyFrom = 25                   // notifications within briefly
	livelyLook = 5 * time.Millisecond // between two looks
	livelyHold = 2 * time.Millisecond // so long one holds the session, for which claims wait
)

// Claims (claimer.go, feed.go, rescan.go, pause.go).
const (
	perStatement = 100                    // queues or jobs in one statement: with more the way there hardly counts
	lookLongest  = 10 * time.Second       // between two looks at all queues, whatever they cost
	soonAgain    = time.Millisecond       // the first pause before a queue is asked again
	prefetchTime = 25 * time.Millisecond  // jobs for so long are claimed ahead: a claim takes less
	aheadLongest = time.Second            // what was claimed ahead waits no longer for a slot, and
	aheadBacklog = 15 * time.Second       // no longer than this where it would come behind a backlog
	turnPatience = time.Second            // a claim waits no longer for its turn; as in awaitTurn
	turnAtOnce   = 200 * time.Microsecond // a turn that came sooner was not waited for
	turnWritten  = 50 * time.Millisecond  // how long it stands where a claim ended
)

// Promoters and successors.
const (
	promoteChunk  = 200                    // calls of one slot that one statement takes
	promoteMargin = 10 * time.Second       // so much later than they were due calls may become visible
	promoteLate   = 30 * time.Second       // between two looks for all calls, whatever these cost
	promoteIdle   = time.Minute            // between two looks of a worker none of whose kinds has lanes
	promoteAgain  = 100 * time.Millisecond // before a lane is looked at again whose next job is locked
	nextFor       = 200 * time.Millisecond // after a claim that found no more, completions lease the next job
	nextFew       = 20                     // jobs that run, with a limit: with more, claims are faster
)

// Handlers and their outcomes (worker.go, executor.go, outbox.go, replay.go).
const (
	defaultConcurrency = 100
	defaultShutdown    = 20 * time.Second
	conflictTries      = 30                     // runs of a handler whose transaction Postgres wants run again
	maxPending         = 10_000                 // outcomes that wait, the locked ones too; with more, handlers do
	halvesFor          = 3                      // halving takes as long as so many batches wait for a lock
	lockedEvery        = 5 * time.Second        // between two reports of outcomes whose rows are locked
	beatPatience       = 100 * time.Millisecond // of a beat for the session: leases run out meanwhile

	// From the end of fn's context to that of its fence's lease, and from there to asking the provider.
	effectGrace = 5 * time.Second
)

// What is refused because a larger number is a mistake, and how long things are kept.
const (
	remembered    = 1000                   // quiet queues, or held jobs, that a process remembers
	maxLease      = 7 * 24 * time.Hour     // a longer one would keep the work of a process that died
	maxRetryAfter = 500 * time.Millisecond // for a fence outside jobs: its work may end at any time
	dueRows       = 100_000                // jobs of a queue and priority that a Reaper looks at for Count.Due
)
