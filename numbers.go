package onceq

import (
	"time"
)

// The numbers that somebody has chosen, each with its reason. A number of a format stands with the format
// (state.go, payload.go, limit.go). A number that is used once, and that nobody would look for, stands where
// it is used. Packages rhythm and table have those that several packages use.

// Claims and successors.
const (
	turnWritten = 50 * time.Millisecond // so long a turn says where the claim before it ended
	nextFew     = 20                    // jobs that run, with a limit: with more, claims are faster
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
)
