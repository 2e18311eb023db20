package onceq

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/pg"
)

// slots are where the handlers of one queue run. They count the queue's jobs that are in a slot or on their way to one: the
// claimer adds, and the executor subtracts. A slot is no goroutine: one begins when there is work for a slot, and ends when
// nothing waits.
type slots struct {
	queue   string
	keep    int64 // how long history is kept if the kind does not say, as in outcome.keep
	count   int
	width   int    // jobs that one slot takes at once
	pooled  bool   // the queue has transactional kinds: each of their running handlers holds a connection of the pool
	mayHold int    // how many such connections all of the worker's queues may hold together
	signal  func() // tells the claimer that there may be room

	mu      sync.Mutex // guards what follows
	waiting []unit     // what was claimed and waits for a slot
	late    []unit     // what waited too long for the rate of a limit, and needs a new time (rate.go)
	asking  bool       // a goroutine asks for new times
	running int        // goroutines, one for each slot that is in use

	outstanding atomic.Int64              // jobs that are claimed or about to be, and whose handler has not returned; the claimer adds, the executor subtracts
	quarantined atomic.Int32              // slots that jobs in quarantine occupy; the claimer adds, the executor subtracts
	busy        atomic.Int32              // slots that run handlers; written by the executor
	returned    atomic.Int64              // jobs whose handlers have ever returned; written by the executor
	worked      atomic.Int64              // nanoseconds that they took, added up; written by the executor
	end         atomic.Pointer[time.Time] // when the claim ended that found no more jobs; nil: there may be some. Written by the claimer
	low         atomic.Int64              // when outstanding falls to this, the claimer wants a signal; written by the claimer
}

func newSlots(w *Worker, queue string, c QueueConfig, signal func()) *slots {
	s := &slots{
		queue: queue, keep: w.keeps[queue], count: c.Concurrency, width: 1, pooled: w.pooledIn[queue], mayHold: w.mayHold, signal: signal,
	}
	for _, h := range w.handlers {
		s.width = max(s.width, h.size)
	}
	return s
}

// put adds units that wait, behind the others or first, and returns how many goroutines are to begin for them.
func (s *slots) put(units []unit, first bool) (begin int) {
	now := time.Now()
	for i := range units {
		units[i].since = now
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if first {
		s.waiting = append(units, s.waiting...)
	} else {
		s.waiting = append(s.waiting, units...)
	}
	begin = min(s.count-s.running, len(s.waiting))
	s.running += begin
	return begin
}

// take returns the unit that has waited longest. If none waits, the goroutine that asks has to end. If ask is true, another
// one has to begin, which asks for new times for what is late.
func (s *slots) take() (u unit, ok, ask bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) > 0 && s.waiting[0].tooLate() {
		// The others that are late ask together with the first one.
		s.waiting = slices.DeleteFunc(s.waiting, func(u unit) bool {
			late := u.tooLate()
			if late {
				s.late = append(s.late, u)
			}
			return late
		})
		ask = !s.asking
		s.asking = true
	}
	if len(s.waiting) == 0 {
		s.waiting = nil
		s.running--
		return u, false, ask
	}
	u, s.waiting[0] = s.waiting[0], unit{}
	s.waiting = s.waiting[1:]
	return u, true, ask
}

// takeIf returns the units that wait and for which this holds.
func (s *slots) takeIf(this func(unit) bool) (taken []unit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting = slices.DeleteFunc(s.waiting, func(u unit) bool {
		ok := this(u)
		if ok {
			taken = append(taken, u)
		}
		return ok
	})
	return taken
}

// takeLate returns all units that need a new time. If there are none, the goroutine that asks for them has to end.
func (s *slots) takeLate() []unit {
	s.mu.Lock()
	defer s.mu.Unlock()
	late := s.late
	s.late, s.asking = nil, len(late) > 0
	return late
}

// takeAll returns all units that wait.
func (s *slots) takeAll() []unit {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := append(s.waiting, s.late...)
	s.waiting, s.late = nil, nil
	return all
}

// foundEnd reports whether, as far as is known, no job of the queue waits to be claimed.
func (s *slots) foundEnd() bool {
	at := s.end.Load()
	return at != nil && time.Since(*at) < nextFor
}

// anyWait reports whether anything waits for a slot.
func (s *slots) anyWait() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waiting) > 0
}

// Used is how many slots are in use, or have jobs claimed for them.
func (s *slots) Used() int {
	jobs := int(s.outstanding.Load())
	return min(s.count, max((jobs+s.width-1)/s.width, int(s.busy.Load())))
}

// reserve takes a place for one job, if a handler is free for it and no other queue waits for a connection. own are the
// places of the caller's that are about to become free.
func (s *slots) reserve(c *pg.Shares, own int64) bool {
	take := func(usable int) bool {
		for {
			n := s.outstanding.Load()
			if n-own >= int64(usable*s.width) {
				return false
			}
			if s.outstanding.CompareAndSwap(n, n+1) {
				return true
			}
		}
	}
	if s.pooled {
		return c.Reserve(s, take)
	}
	return take(s.count)
}

// How the queue shares the pool's connections: see pg.Shares.

func (s *slots) Most() int { return s.count }

func (s *slots) MayHold() int { return s.mayHold }

func (s *slots) Rouse() { s.signal() }

// poolWatch logs a warning when all connections of the pool are in use and none becomes free, while handlers run or wait for one: a
// handler that asks the pool for one more may then wait for handlers that do the same, or for ever if the application gives none back.
type poolWatch struct {
	q       *Queue
	tasks   *taskSet
	conns   *pg.Shares
	crowded atomic.Bool  // that is so now; the executor says so in errors
	from    atomic.Int64 // since when, in nanoseconds since processStart

	// Only the beats' goroutine uses these.
	acquired int64 // how many connections the pool had ever given out at the last look
	since    time.Time
	said     time.Time
}

// full says for how long all connections have been in use without any that became free.
func (p *poolWatch) full() time.Duration {
	if !p.crowded.Load() {
		return 0
	}
	return time.Since(processStart) - time.Duration(p.from.Load())
}

// look is called on every beat.
func (p *poolWatch) look() {
	const sayAgain = time.Minute
	stat, now := p.q.store.Pool.Stat(), time.Now()
	held := p.conns.Held.Load()
	if stat.AcquiredConns() < stat.MaxConns() || stat.AcquireCount() != p.acquired || held == 0 && !p.tasks.run() {
		p.acquired, p.since = stat.AcquireCount(), now
		p.crowded.Store(false)
		return
	}
	p.from.Store(int64(p.since.Sub(processStart)))
	p.crowded.Store(true)
	if now.Sub(p.said) < sayAgain {
		return
	}
	p.said = now
	oldest, count := make(map[string]time.Duration), make(map[string]int)
	p.tasks.mu.Lock()
	for _, t := range p.tasks.all {
		if t.ctx != nil && !t.since.IsZero() && t.h.inTx {
			count[t.lease.Kind]++
			oldest[t.lease.Kind] = max(oldest[t.lease.Kind], now.Sub(t.since))
		}
	}
	p.tasks.mu.Unlock()
	var kinds []string
	for kind, n := range count {
		kinds = append(kinds, fmt.Sprintf("%d of kind %q for up to %s", n, kind, oldest[kind].Round(time.Millisecond)))
	}
	slices.Sort(kinds)
	p.q.log.Warn("onceq: all connections of the pool are in use and none becomes free; a handler that asks the pool for one waits."+
		" Inside HandleTx use its tx; give back what the application has acquired; raise the pool's MaxConns, or lower QueueConfig.Concurrency",
		slog.Int("connections", int(stat.MaxConns())), slog.Int("by handlers' transactions", int(held)),
		slog.String("handlers", strings.Join(kinds, ", ")), slog.Duration("for", now.Sub(p.since)))
}
