package claimer

import (
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/pg"
)

// Slots count a queue's jobs that are in a slot, where a handler runs, or on their way to one: the claimer adds, and
// the executor subtracts. The claimer alone writes the last three.
type Slots struct {
	Queue  string
	Count  int
	Width  int    // jobs that one slot takes at once
	Pooled bool   // the queue has transactional kinds: each of their running handlers holds a connection of the pool
	Conns  int    // how many such connections all of the worker's queues may hold together
	Signal func() // tells the claimer that there may be room

	Outstanding atomic.Int64              // jobs that are claimed or about to be, and whose handler has not returned
	Quarantined atomic.Int32              // slots that jobs in quarantine occupy
	Busy        atomic.Int32              // slots that run handlers
	Returned    atomic.Int64              // jobs whose handlers have ever returned
	Worked      atomic.Int64              // nanoseconds that they took, added up
	end         atomic.Pointer[time.Time] // when the claim ended that found no more jobs; nil: there may be some
	low         atomic.Int64              // when outstanding falls to this, the claimer wants a signal
	reserved    int64                     // the part of Outstanding that is for the claim under way; the claimer's
}

// Left is for n jobs that no longer occupy a place.
func (s *Slots) Left(n int64) {
	if s.Outstanding.Add(-n) <= s.low.Load() {
		s.Signal()
	}
}

// setEmpty says since when there are no more jobs, as far as is known; zero: there may be some.
func (s *Slots) setEmpty(since time.Time) {
	if since.IsZero() {
		s.end.Store(nil)
	} else {
		s.end.Store(&since)
	}
}

// FoundEnd reports whether, as far as is known, no job waits to be claimed. A claim looks again now and then.
func (s *Slots) FoundEnd() bool {
	at := s.end.Load()
	return at != nil && time.Since(*at) < 200*time.Millisecond
}

// Used is how many slots are in use, or have jobs claimed for them.
func (s *Slots) Used() int {
	jobs := int(s.Outstanding.Load())
	return min(s.Count, max((jobs+s.Width-1)/s.Width, int(s.Busy.Load())))
}

// Reserve takes a place for one job, if a handler is free for it and no other queue waits for a connection. own are the
// places of the caller's that are about to become free.
func (s *Slots) Reserve(c *pg.Shares, own int64) bool {
	take := func(usable int) bool {
		for {
			n := s.Outstanding.Load()
			if n-own >= int64(usable*s.Width) {
				return false
			}
			if s.Outstanding.CompareAndSwap(n, n+1) {
				return true
			}
		}
	}
	if s.Pooled {
		return c.Reserve(s, take)
	}
	return take(s.Count)
}

// How the queue shares the pool's connections: see pg.Shares.

func (s *Slots) Most() int { return s.Count }

func (s *Slots) MayHold() int { return s.Conns }

func (s *Slots) Rouse() { s.Signal() }
