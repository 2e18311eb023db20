// Package executor runs the handlers of a worker. It has each job from its claim until its outcome is stored:
//
//	claimed -> slots, a goroutine for each that is in use -> outbox, two goroutines
//	              ^ beats, one goroutine; pings, one
//
// What a handler's error means, and what is reported, its Face decides.
package executor

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/outbox"
	"github.com/onceq/onceq/internal/paused"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/slot"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/task"
	"github.com/onceq/onceq/internal/watch"
)

// The numbers that somebody has chosen.
const (
	conflictTries = 30 // runs of a handler whose transaction Postgres wants run again
	nextFew       = 20 // jobs that run, with a limit: with more, claims are faster
)

// Why handlers' contexts end.
var (
	ErrShutdown   = errors.New("onceq: the worker is shutting down")
	ErrPoolClosed = errors.New("onceq: the pool was closed while a worker was running; stop workers before you close it")
)

// Face is the library around an executor: it knows the public leases, errors and events.
type Face interface {
	task.Observer
	outbox.Worker
	// Decides reports whether err says what becomes of the job, and whether it is Reschedule.
	Decides(err error) (decides, again bool)
	// Wrote reports an outcome after its statement. ok says that the guard held.
	Wrote(ctx context.Context, o finish.Outcome, ok bool)
	// Heed cancels jobs that were given back and that somebody wants cancelled.
	Heed(ctx context.Context, db pg.DB, ids []int64)
	// Read reads the job that n has leased from a row, behind other columns.
	Read(rows pgx.Rows, n *Next, before []any) (*hold.Hold, error)
	// Claimed reports that a job was leased without a claim.
	Claimed(ctx context.Context, h *hold.Hold)
}

// Config is what an executor works with.
type Config struct {
	Face     Face
	Store    *pg.Store
	Troubles *watch.Troubles
	Log      *slog.Logger
	Paused   *paused.Known
	Far      *slot.Distance
	Own      *pg.Conns // the worker's own connections

	ID        int64 // of the run
	Handlers  map[string]*task.Handler
	Kinds     []string // of these
	Careful   bool     // one of them has MaxLost 1
	Lease     time.Duration
	Pipelines bool // see lazytx.Pipelines
	Drains    bool // it is a Drain's
	Queues    []Queue

	Live      func(queue string)      // called after jobs with a lane: the next one may be live
	Told      func()                  // called after the end of jobs that others wait for
	Suspended func(*hold.Hold)        // called for a job in quarantine that was given back until its slot
	Halt      context.CancelCauseFunc // ends the run as the end of its context does, and says why
}

// Queue is one that the worker works.
type Queue struct {
	Name    string
	Count   int   // how many handlers run at once
	Pooled  bool  // it has transactional kinds
	MayHold int   // how many connections handlers' transactions of all queues may hold together
	Keep    int64 // how long history is kept if the kind does not say, as in finish.Outcome.Keep
}

// Executor runs the handlers of one run, for all of its queues.
type Executor struct {
	Config
	Set   *task.Set
	Tally *count.Tally

	slots  map[string]*slots // by queue
	outbox *outbox.Outbox
	conns  *pg.Shares // of the application's pool, for the transactions of handlers

	base    context.Context         // of all handlers
	cancel  context.CancelCauseFunc // of base
	giveUp  context.CancelFunc      // of writing outcomes, and of beats
	beating sync.WaitGroup
	ended   chan struct{} // closed when the beats are to end

	ending   sync.Mutex     // guards the change of stopping: handling grows before it, or in goroutines that it counts
	stopping atomic.Bool    // no handler is started any more; set once
	handling sync.WaitGroup // goroutines that run handlers
}

// New returns an executor that Start starts. ctx gives values to the contexts of handlers, and does not end
// them. The functions of cfg, and those of set but its Stuck, are called from Start on.
func New(ctx context.Context, cfg Config, set task.Config) *Executor {
	x := &Executor{Config: cfg, slots: make(map[string]*slots), conns: &cfg.Own.Shares, ended: make(chan struct{})}
	writing, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	x.giveUp = giveUp
	x.base, x.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	set.Store, set.Troubles, set.Log, set.Observer = cfg.Store, cfg.Troubles, cfg.Log, cfg.Face
	set.ID, set.Lease, set.Base, set.Ctx = cfg.ID, cfg.Lease, x.base, writing
	set.DB = pg.Quick{Own: cfg.Own, Patience: pg.Brief.Patience} // leases run out meanwhile
	x.Set = task.NewSet(set)
	x.Tally = count.NewTally(cfg.Store, cfg.Own.Outcomes)
	x.outbox = outbox.New(outbox.Config{
		Worker: cfg.Face, Next: x.Next, Set: x.Set, Tally: x.Tally, DB: cfg.Own.Outcomes, Drains: cfg.Drains,
		Live: cfg.Live, Told: cfg.Told,
	})
	for _, q := range cfg.Queues {
		s := &slots{keep: q.Keep, far: cfg.Far}
		s.Queue, s.Count, s.Width, s.Pooled, s.Conns = q.Name, q.Count, 1, q.Pooled, q.MayHold
		for _, h := range cfg.Handlers {
			s.Width = max(s.Width, h.Size)
		}
		x.slots[q.Name] = s
	}
	return x
}

// Slots are those of each queue.
func (x *Executor) Slots() (all []*claimer.Slots) {
	for _, s := range x.slots {
		all = append(all, &s.Slots)
	}
	return all
}

// Start starts the goroutines that write outcomes and extend leases.
func (x *Executor) Start() {
	x.outbox.Start()
	x.beating.Go(func() { x.Set.Tick(x.ended, x.Set.Beat) })
	pings := false
	for _, s := range x.slots {
		if s.Pooled {
			x.conns.Join(&s.Slots)
			pings = true
		}
	}
	if pings {
		x.beating.Go(func() { x.Set.Tick(x.ended, x.Set.Ping) })
	}
}

// Wait returns when no handler runs, and nothing waits for one.
func (x *Executor) Wait() { x.handling.Wait() }

// Stop begins the end of the run: from now on no handler is started.
func (x *Executor) Stop() {
	x.ending.Lock()
	defer x.ending.Unlock()
	x.stopping.Store(true)
}

// Stopping reports whether that has begun.
func (x *Executor) Stopping() bool { return x.stopping.Load() }

// End gives back what was claimed ahead, even if slow handlers hold all slots, and waits for handlers. It
// cancels the contexts of those that run at the time given, and names those that did not return.
func (x *Executor) End(at time.Time) (left error) {
	for _, s := range x.slots {
		x.giveBackAll(s)
	}
	returned := make(chan struct{})
	go func() {
		x.handling.Wait()
		close(returned)
	}()
	if nap.Within(returned, max(0, time.Until(at))) {
		return nil
	}
	x.cancel(ErrShutdown)
	if nap.Within(returned, pg.EndWithin) {
		return nil
	}
	left, committing := x.Set.Abandon(false)
	for until := time.Now().Add(x.Lease + pg.EndWithin); left == nil && committing; { // a commit may take as long as a lease
		if nap.Within(returned, time.Second) {
			break
		}
		left, committing = x.Set.Abandon(time.Now().After(until))
	}
	if left != nil {
		time.AfterFunc(pg.EndWithin, x.giveUp)
	}
	return left
}

// Close stores the outcomes and the counts, and then ends the beats, because leases must last until their
// outcomes are stored.
func (x *Executor) Close() {
	x.outbox.Close()
	var counting sync.WaitGroup
	counting.Go(func() { _ = x.Tally.Write() })
	close(x.ended)
	x.beating.Wait()
	counting.Wait()
	for _, s := range x.slots {
		if s.Pooled {
			x.conns.Leave(&s.Slots)
		}
	}
	x.giveUp()
	x.cancel(ErrShutdown)
}

// Accept gets what was claimed for a queue, with leases from began on, and has each job run as soon as a slot
// is free. It reports whether any job waits for one.
func (x *Executor) Accept(queue string, holds []*hold.Hold, began time.Time) (anyWait bool) {
	s := x.slots[queue]
	x.accept(s, holds, began)
	return s.anyWait()
}

func (x *Executor) accept(s *slots, holds []*hold.Hold, began time.Time) {
	s.Outstanding.Add(int64(len(holds)))
	tasks, all := make([]task.Task, len(holds)), make([]*task.Task, len(holds))
	for i, h := range holds {
		t := &tasks[i]
		all[i] = t
		t.Hold, t.Handler = h, x.Handlers[h.Kind]
		if h.Keep = t.Handler.Keep; h.Keep == math.MinInt64 {
			h.Keep = s.keep
		}
	}
	x.Set.Add(all, began)
	units := make([]unit, 0, len(tasks))
	var batches map[*task.Handler][]*task.Task
	for i, t := range all {
		if done := finish.Exhausted(t.Hold, t.Handler.MaxLost); done != nil {
			x.left(s, all[i:i+1])
			x.end(t, *done)
			continue
		}
		if t.Hold.TooMany > 0 {
			x.left(s, all[i:i+1])
			x.giveBack(all[i : i+1])
			continue
		}
		if t.Handler.Size == 1 || t.Quarantined() {
			units = append(units, unit{tasks: all[i : i+1 : i+1]})
			continue
		}
		if batches == nil {
			batches = make(map[*task.Handler][]*task.Task)
		}
		b := append(batches[t.Handler], t)
		if len(b) == t.Handler.Size {
			units = append(units, unit{tasks: b})
			b = nil
		}
		batches[t.Handler] = b
	}
	for _, b := range batches {
		if len(b) > 0 {
			units = append(units, unit{tasks: b})
		}
	}
	x.begin(s, s.put(units, false))
}

// begin begins n goroutines that run handlers.
func (x *Executor) begin(s *slots, n int) {
	for range n {
		x.handling.Go(func() { x.work(s) })
	}
}

// work runs handlers until nothing waits.
func (x *Executor) work(s *slots) {
	for {
		u, ok, ask := s.take()
		if ask {
			x.handling.Go(func() { x.renew(s) })
		}
		if !ok {
			return
		}
		x.workOn(s, u.tasks, false)
	}
}

var errGoexit = errors.New("onceq: the handler ended its goroutine (by runtime.Goexit, which a test's FailNow calls);" +
	" it must return instead")

// workOn runs the handler of tasks, of each by itself if alone says so.
func (x *Executor) workOn(s *slots, tasks []*task.Task, alone bool) {
	s.Busy.Add(1)
	began := time.Now()
	returned := false
	defer func() {
		if !returned {
			// This is not a panic, because panics have become errors by now. This goroutine ends here, and
			// another one takes its place.
			var rest []*task.Task
			tasks, rest = x.exited(tasks)
			x.handling.Go(func() {
				if len(rest) > 0 {
					x.workOn(s, rest, true)
				}
				x.work(s)
			})
		}
		s.Worked.Add(int64(time.Since(began)))
		s.Returned.Add(int64(len(tasks)))
		s.Busy.Add(-1)
		if len(tasks) > 0 {
			x.left(s, tasks)
		}
		x.Set.Returned(tasks)
	}()
	h := tasks[0].Handler
	switch {
	case alone:
		x.runAlone(tasks, h, true)
	case x.stopping.Load():
		x.giveBack(tasks)
	case !h.InTx:
		x.Tally.Started(tasks[0].Hold)
		x.runLease(tasks[0])
	default:
		for _, t := range tasks {
			x.Tally.Started(t.Hold)
		}
		x.runTx(tasks, h)
	}
	returned = true
}

// exited is for a handler that ended its goroutine. A task that it was called for alone ends, as those do
// that have ended already. If it was called for several, each of them runs by itself, as after a panic, and
// so does the rest of a batch.
func (x *Executor) exited(tasks []*task.Task) (ended, rest []*task.Task) {
	ended, called, rest := x.Set.Exited(tasks)
	if len(called) != 1 {
		return ended, append(called, rest...)
	}
	x.end(called[0], x.Face.Failure(called[0].Hold, errGoexit))
	return append(ended, called[0]), rest
}

// left records that tasks no longer occupy a slot.
func (x *Executor) left(s *slots, tasks []*task.Task) {
	n := len(tasks)
	if tasks[0].Quarantined() {
		n = s.Width
		s.Quarantined.Add(-1)
	}
	s.Left(int64(n))
	if s.Pooled {
		x.conns.Wake()
	}
}

// end passes an outcome to the outbox, unless the lease is known to be lost.
func (x *Executor) end(t *task.Task, o finish.Outcome) {
	if x.Set.Finish(t) {
		x.outbox.Add(o)
	}
}

// giveBack ends tasks that were not started, as if they had not been claimed.
func (x *Executor) giveBack(tasks []*task.Task) {
	for _, t := range tasks {
		x.end(t, finish.Outcome{Hold: t.Hold, State: table.StateWaiting})
	}
}

// giveBackAll does that to all that wait for a slot.
func (x *Executor) giveBackAll(s *slots) {
	for _, u := range s.takeAll() {
		x.giveBack(u.tasks)
	}
}

// GiveBack gives back jobs that have waited for a slot since then and for which this holds. It leaves out
// jobs in quarantine, which have a slot.
func (x *Executor) GiveBack(queue string, this func(kind string, since time.Time) bool) (some, anyWait bool) {
	s := x.slots[queue]
	taken := s.takeIf(func(u unit) bool { return !u.tasks[0].Quarantined() && this(u.tasks[0].Handler.Kind, u.since) })
	for _, u := range taken {
		x.giveBack(u.tasks)
		x.left(s, u.tasks)
	}
	return len(taken) > 0, s.anyWait()
}

// Held and HoldsNone say which jobs the worker has, as far as it knows.
func (x *Executor) Held() map[int64]bool { return x.Set.Held() }
func (x *Executor) HoldsNone() bool      { return x.Set.HoldsNone() }

// Has reports whether the worker works a queue.
func (x *Executor) Has(queue string) bool { return x.slots[queue] != nil }

// Taken reports whether no slot is free, and how many jobs' handlers have ever returned. Anybody may call it.
func (x *Executor) Taken() (all bool, returned int64) {
	all = true
	for _, s := range x.slots {
		all = all && s.Outstanding.Load() >= int64(s.Count)*int64(s.Width)
		returned += s.Returned.Load()
	}
	return all, returned
}
