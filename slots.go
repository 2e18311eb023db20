package onceq

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/slot"
	"github.com/onceq/onceq/internal/stmt"
)

// slots are where the handlers of one queue run. A slot is no goroutine: one begins when there is work for a slot, and ends when
// nothing waits.
type slots struct {
	claimer.Slots
	far  *slot.Distance
	keep int64 // how long history is kept if the kind does not say, as in outcome.keep

	mu      sync.Mutex // guards what follows
	waiting []unit     // what was claimed and waits for a slot
	late    []unit     // what waited too long for the rate of a limit, and needs a new time (rate.go)
	asking  bool       // a goroutine asks for new times
	running int        // goroutines, one for each slot that is in use
}

func newSlots(w *Worker, queue string, c QueueConfig) *slots {
	s := &slots{
		far: &w.q.far, keep: w.keeps[queue], Slots: claimer.Slots{Queue: queue, Count: c.Concurrency, Width: 1, Pooled: w.pooledIn[queue], Conns: w.mayHold},
	}
	for _, h := range w.handlers {
		s.Width = max(s.Width, h.size)
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
	begin = min(s.Count-s.running, len(s.waiting))
	s.running += begin
	return begin
}

// take returns the unit that has waited longest. If none waits, the goroutine that asks has to end. If ask is true, another
// one has to begin, which asks for new times for what is late.
func (s *slots) take() (u unit, ok, ask bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) > 0 && s.waiting[0].tooLate(s.far) {
		// The others that are late ask together with the first one.
		s.waiting = slices.DeleteFunc(s.waiting, func(u unit) bool {
			late := u.tooLate(s.far)
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

// anyWait reports whether anything waits for a slot.
func (s *slots) anyWait() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waiting) > 0
}

// What the claimer asks of the executor: see claimer.Worker.

func (x *executor) Claim(ctx context.Context, db pg.Quick, kinds []string, asks []*claimer.Ask) error {
	return claimJobs(ctx, x.q, db, x.lease, x.id, kinds, asks)
}

func (x *executor) ClaimOne(ctx context.Context, db pg.Quick, kinds []string, ask *claimer.Ask, few []int64) (gone int, err error) {
	err = x.q.claim(ctx, db, x.lease, x.id, []*claimer.Ask{ask}, stmt.ClaimOne, few, ask.Queue, kinds)
	if ask.Got() > 0 {
		one := ask.Jobs.(leased)[0]
		gone = DefaultMaxLost - x.handlers[one.Kind].maxLost + one.Lost
	}
	return gone, err
}

func (x *executor) Accept(queue string, jobs claimer.Jobs, began time.Time) (anyWait bool) {
	s := x.slots[queue]
	leases := jobs.(leased)
	for _, l := range leases {
		x.w.takes(l)
	}
	x.accept(s, holdsOf(leases), began)
	return s.anyWait()
}

// GiveBack leaves out jobs in quarantine, which have a slot.
func (x *executor) GiveBack(queue string, this func(kind string, since time.Time) bool) (some, anyWait bool) {
	s := x.slots[queue]
	for _, u := range s.takeIf(func(u unit) bool { return !u.tasks[0].quarantined() && this(u.tasks[0].h.kind, u.since) }) {
		x.giveBack(u.tasks)
		x.left(s, u.tasks)
		some = true
	}
	return some, s.anyWait()
}

func (x *executor) Held() map[int64]bool { return x.tasks.held() }

func (x *executor) HoldsNone() bool { return x.tasks.holdsNone() }

// poolWatch logs a warning when all connections of the pool are in use and none becomes free, while handlers run or wait for one: a
// handler that asks the pool for one more may then wait for handlers that do the same, or for ever if the application gives none back.
type poolWatch struct {
	q       *Queue
	tasks   *taskSet
	conns   *pg.Shares
	crowded atomic.Bool  // that is so now; the executor says so in errors
	from    atomic.Int64 // since when, in nanoseconds, by rhythm.Now

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
	return rhythm.Now() - time.Duration(p.from.Load())
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
	p.from.Store(int64(rhythm.At(p.since)))
	p.crowded.Store(true)
	if now.Sub(p.said) < sayAgain {
		return
	}
	p.said = now
	oldest, count := make(map[string]time.Duration), make(map[string]int)
	p.tasks.mu.Lock()
	for _, t := range p.tasks.all {
		if t.ctx != nil && !t.since.IsZero() && t.h.inTx {
			count[t.hold.Kind]++
			oldest[t.hold.Kind] = max(oldest[t.hold.Kind], now.Sub(t.since))
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
