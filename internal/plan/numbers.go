package plan

import (
	"time"

	"github.com/onceq/onceq/internal/rhythm"
)

// The numbers that somebody has chosen, each with its reason.

// Who waits for jobs, and how soon it hears of them (announce.go, look.go).
const (
	AnnounceAgain = 20 * time.Second        // an announcement is renewed, and counts for three times as long
	pollListening = 1100 * time.Millisecond // with these renewals not more than a statement a second
	pollLeaving   = 4 * pollListening       // where many others wait that look too
	lookFollows   = rhythm.QuietFor + time.Millisecond
	lookEnough    = 9 * lookFollows // nearly all transactions have ended that began before an announcement
	lookStalled   = 3 * time.Second // a poll finds what took longer to commit
	DormantFrom   = 9               // workers that wait: one more makes no job start sooner (BOUNDS.md, wake)

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

// Claims, looks and rescans (claim.go, queue.go, look.go, rescan.go).
const (
	perStatement = 100                    // queues or jobs in one statement: with more the way there hardly counts
	lookLongest  = 10 * time.Second       // between two looks at all queues, whatever they cost
	soonAgain    = time.Millisecond       // the first pause before a queue is asked again
	prefetchTime = 25 * time.Millisecond  // jobs for so long are claimed ahead: a claim takes less
	aheadLongest = time.Second            // what was claimed ahead waits no longer for a slot, and
	aheadBacklog = 15 * time.Second       // no longer than this where it would come behind a backlog
	turnAtOnce   = 200 * time.Microsecond // a turn that came sooner was not waited for
)
