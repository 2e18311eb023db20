package onceq

import "time"

// The numbers that somebody has chosen, each with its reason. A number of a format stands with the format
// (state.go, payload.go, limit.go). A number that is used once, and that nobody would look for, stands where
// it is used. Packages rhythm and table have those that several packages use.

const turnWritten = 50 * time.Millisecond // so long a turn says where the claim before it ended

// Workers and effects (worker.go, replay.go).
const (
	defaultConcurrency = 100
	defaultShutdown    = 20 * time.Second

	// From the end of fn's context to that of its fence's lease, and from there to asking the provider.
	effectGrace = 5 * time.Second
)

// What is refused because a larger number is a mistake, and how long things are kept.
const (
	remembered    = 1000                   // quiet queues, or held jobs, that a process remembers
	maxLease      = 7 * 24 * time.Hour     // a longer one would keep the work of a process that died
	maxRetryAfter = 500 * time.Millisecond // for a fence outside jobs: its work may end at any time
)
