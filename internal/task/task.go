// Package task has the jobs that a worker holds, each from its claim until its outcome is written or its
// lease is lost. It extends their leases, tells handlers whose lease is lost or whose job somebody wants
// cancelled, and gives up handlers that do not return.
package task

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// Handler runs the jobs of one kind.
type Handler struct {
	Kind         string
	Timeout      time.Duration // 0 for none
	MaxLost      int
	Keep         int64 // milliseconds; 0: not at all, -1: until somebody decides, math.MinInt64: as the queue says
	Serializable bool
	InTx         bool // it gets a transaction, which commits with the jobs' completions
	Size         int  // how many jobs it gets at most

	// Call neither panics nor returns an error that does.
	Call func(ctx context.Context, tx pgx.Tx, holds []*hold.Hold) error
}

// Task is one job that the worker holds.
type Task struct {
	Hold    *hold.Hold
	Handler *Handler
	Doubt   finish.Doubt // as in finish.Outcome; its handler's goroutine uses these two
	Tried   bool

	// Guarded by Set.mu.
	extended  time.Time  // just before the claim, or before the latest beat that found the lease alive
	ctx       *Context   // set once it runs or waits for a connection
	locked    bool       // the latest beat did not extend it, most likely because its transaction has the row locked
	tx        *lazytx.Tx // the transaction that it runs in, nil for none
	since     time.Time  // when its handler was called
	lost      error      // why it must not start or continue
	finishing bool       // its outcome is being written: the row may be gone
	commits   bool       // its transaction is being committed, with its outcome
	late      bool       // its handler did not return and was given up
}

// Quarantined says whether the job has lost a lease; it was then claimed by itself.
func (t *Task) Quarantined() bool { return t.Hold.Lost > 0 }

// Observer hears of lost leases.
type Observer interface {
	Lost(h *hold.Hold, op string) error                             // the error for it; h is nil for one of a batch
	Loses(ctx context.Context, h *hold.Hold, stale bool, err error) // reports it; stale: a completion was refused
}

// Config is what a Set works with.
type Config struct {
	Store     *pg.Store
	Troubles  *watch.Troubles
	Log       *slog.Logger
	Turn      *quarantine.Turn
	Observer  Observer
	ID        int64 // of the run
	DB        pg.Quick
	Lease     time.Duration   // how long leases are extended for
	Base      context.Context // of all handlers
	Ctx       context.Context // of beats: ends when the run has waited long enough
	Cancelled error           // why the context of a handler ends whose job somebody wants cancelled
	Late      *sync.Map       // token → Late: handlers that do not return, of all workers of the process
	Stuck     func()          // called when handlers were given up, or one of those has returned
	Emptied   func()          // called when the last task is removed; nil for nobody
}

// Set holds all tasks of one run. The executor adds and finishes them, and the beats extend them. The outbox
// removes them, and so does the executor if it has committed the outcome itself or the lease is lost.
type Set struct {
	Config
	anyLate atomic.Bool // some handler was given up at some time; set by the beats
	pool    poolWatch

	mu  sync.Mutex      // guards all, and the fields of Task that say so. No statement is sent under it
	all map[int64]*Task // by token
}

// NewSet returns an empty one.
func NewSet(cfg Config) *Set { return &Set{Config: cfg, all: make(map[int64]*Task)} }

// Add adds tasks whose leases last from began on.
func (s *Set) Add(tasks []*Task, began time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range tasks {
		t.extended = began
		s.all[t.Hold.Token] = t
	}
}

// HoldsNone reports whether no job is held.
func (s *Set) HoldsNone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.all) == 0
}

// Held gives the jobs that this worker has as far as it knows: they run, or their outcomes are still to be
// written. Somebody may have locked their rows for longer than a lease, so that a rescan takes them for lost.
func (s *Set) Held() map[int64]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := make(map[int64]bool, len(s.all))
	for _, t := range s.all {
		if t.finishing || t.lost == nil && !t.late && !t.Hold.ByHandler.Load() {
			held[t.Hold.ID] = true
		}
	}
	return held
}

// Start gives tasks the context of a handler that is about to run. It returns false if a lease is lost. If
// the process stood still for longer than a lease, and no beat has said so yet, all of them are. With atOnce
// the handler is called now.
func (s *Set) Start(tasks []*Task, ctx *Context, began time.Time, atOnce bool) bool {
	if began.Sub(tasks[0].Hold.Began) >= s.Lease { // otherwise no lease can have passed since the claim
		for _, t := range s.overdue(tasks, began) {
			s.Lose(t, "start", false)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range tasks {
		if t.lost != nil {
			ctx.Cancel(t.lost)
			return false
		}
	}
	for _, t := range tasks {
		if t.ctx = ctx; atOnce {
			t.since, t.Hold.Began = began, began
		}
	}
	return true
}

// overdue returns those of the tasks whose leases have not been extended for a lease, and that do not count
// as lost yet.
func (s *Set) overdue(tasks []*Task, now time.Time) (overdue []*Task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range tasks {
		if t.lost == nil && now.Sub(t.extended) >= s.Lease {
			overdue = append(overdue, t)
		}
	}
	return overdue
}

// Called records that the handler of a transaction is called now.
func (s *Set) Called(tasks []*Task, began time.Time, tx *lazytx.Tx) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range tasks {
		t.since, t.Hold.Began, t.tx = began, began, tx
	}
}

// Rest is for tasks whose transaction was rolled back and whose handler runs again later. Until then they have
// no context, for a handler that rests is none that does not return. If the transaction was so long that a beat
// found the rows locked, the leases may have run out, and now that the rows are free, others may take the jobs for
// lost. So the leases are extended before anything else.
func (s *Set) Rest(tasks []*Task) {
	var behind []*Task
	soon := time.Now().Add(-s.Lease / 3)
	s.mu.Lock()
	for _, t := range tasks {
		if t.ctx, t.tx = nil, nil; t.locked && !t.late && t.lost == nil {
			behind = append(behind, t)
			if t.extended.After(soon) {
				t.extended = soon // if this fails, the next tick tries again
			}
		}
	}
	s.mu.Unlock()
	s.Extend(behind)
}

// Returned is called for tasks whose handler has returned.
func (s *Set) Returned(tasks []*Task) {
	back := false
	if s.anyLate.Load() {
		for _, t := range tasks {
			_, late := s.Late.LoadAndDelete(t.Hold.Token)
			back = back || late
		}
	}
	if back {
		s.Stuck()
	}
}

// Exited parts the tasks of a handler that ended its goroutine: those that have ended, those that it was
// called for, and the rest of a batch. It ends the handler's context.
func (s *Set) Exited(tasks []*Task) (ended, called, rest []*Task) {
	var ctx *Context
	s.mu.Lock()
	for _, t := range tasks {
		switch {
		case t.finishing || s.all[t.Hold.Token] != t:
			ended = append(ended, t)
		case t.ctx != nil || len(tasks) == 1:
			called, ctx = append(called, t), t.ctx
		default:
			rest = append(rest, t)
		}
	}
	s.mu.Unlock()
	if ctx != nil {
		ctx.Cancel(nil)
	}
	return ended, called, rest
}

// Finish records that the outcome of a task is about to be written. It returns false if its lease is known to
// be lost, and then the task is removed.
func (s *Set) Finish(t *Task) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	t.finishing = true
	if t.lost != nil && !errors.Is(t.lost, s.Cancelled) {
		s.forget(t.Hold)
		return false
	}
	return true
}

// Commit records that the transaction of tasks is being committed, together with their outcomes.
func (s *Set) Commit(tasks []*Task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range tasks {
		t.finishing, t.commits = true, true
	}
}

// Committed records that it was, or else was not.
func (s *Set) Committed(tasks []*Task, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range tasks {
		if t.finishing, t.commits = ok, false; ok {
			s.forget(t.Hold)
		}
	}
}

// Forget removes tasks that have been dealt with: their outcomes are written, or their leases are lost.
func (s *Set) Forget(outcomes []finish.Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range outcomes {
		s.forget(o.Hold)
	}
}

// forget removes one. The caller holds mu.
func (s *Set) forget(h *hold.Hold) {
	t := s.all[h.Token]
	delete(s.all, h.Token)
	if len(s.all) == 0 && s.Emptied != nil {
		s.Emptied()
	}
	if h.Lost > 0 {
		if t != nil && !t.since.IsZero() && t.lost == nil && !t.late {
			s.Turn.EndedWell()
		}
		s.Turn.Leave(s.Store, h.Token)
	}
}

// Lose records that a task's lease is lost, ends its handler's context, and reports the event once. The task
// stays in the set until its handler has returned.
func (s *Set) Lose(t *Task, op string, stale bool) {
	lost := s.Observer.Lost(t.Hold, op)
	s.mu.Lock()
	first := t.lost == nil
	if first {
		t.lost = lost
	}
	running := t.ctx
	s.mu.Unlock()
	if running != nil {
		running.Cancel(lost)
	}
	if first {
		s.Turn.Narrow()
		s.Observer.Loses(s.Base, t.Hold, stale, lost)
	}
}

// busy reports whether a handler runs, or waits for a connection.
func (s *Set) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.all {
		if t.ctx != nil && !t.finishing {
			return true
		}
	}
	return false
}

// Given says which slots are held by handlers that were given up and have not returned.
func (s *Set) Given() []table.Stuck {
	all := make(map[count.Of]*table.Stuck)
	seen := make(map[*Context]bool) // a batch handler has many tasks and one slot
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.all {
		if !t.late || t.finishing || t.ctx == nil || seen[t.ctx] {
			continue
		}
		seen[t.ctx] = true
		key := count.Of{Queue: t.Hold.Queue, Kind: t.Hold.Kind}
		h, over := all[key], t.ctx.over()
		if h == nil {
			h = &table.Stuck{Queue: key.Queue, Kind: key.Kind, Job: t.Hold.ID, Since: over}
			all[key] = h
		}
		if h.Slots++; over.Before(h.Since) {
			h.Job, h.Since = t.Hold.ID, over
		}
	}
	var list []table.Stuck
	for _, h := range all {
		list = append(list, *h)
	}
	slices.SortFunc(list, func(a, b table.Stuck) int { return a.Since.Compare(b.Since) })
	return list
}

// Abandon is for the end of a run: it closes the connections of transactions whose handlers ignore their
// context, and names their kinds. With commits it does the same to transactions that are being committed.
func (s *Set) Abandon(commits bool) (left error, committing bool) {
	var kinds []string
	var open []*lazytx.Tx
	n := 0
	s.mu.Lock()
	for _, t := range s.all {
		committing = committing || t.commits
		if t.ctx != nil && (!t.finishing || commits && t.commits) {
			n++
			kinds = append(kinds, t.Hold.Kind)
			if t.tx != nil {
				open = append(open, t.tx)
			}
		}
	}
	s.mu.Unlock()
	for _, tx := range open {
		tx.GiveUp()
	}
	slices.Sort(kinds)
	kinds = slices.Compact(kinds)
	switch {
	case n == 0:
		return nil, committing
	case commits:
		return fmt.Errorf("onceq: the transactions of %d handlers could not be committed in time (kinds %q);"+
			" it is not known whether they were, and if not, their leases run out, and their jobs run again", n, kinds), committing
	}
	return fmt.Errorf("onceq: %d handlers did not return after their context was cancelled (kinds %q);"+
		" their leases run out, and their jobs run again", n, kinds), committing
}
