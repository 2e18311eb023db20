package onceq

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/slot"
	"github.com/onceq/onceq/internal/table"
)

// task is what a worker knows about one lease.
type task struct {
	hold  *hold.Hold
	h     *Handler
	doubt finish.Doubt // as in finish.Outcome; its handler's goroutine uses these two
	tried bool

	// Guarded by taskSet.mu.
	extended  time.Time       // just before the claim, or before the latest beat that found the lease alive
	ctx       *handlerContext // set once it runs or waits for a connection
	locked    bool            // the latest beat did not extend its lease, most likely because the handler's transaction has the row locked
	tx        *lazytx.Tx      // the transaction that it runs in, nil for none
	since     time.Time       // when its handler was called
	lost      error           // why it must not start or continue
	finishing bool            // its outcome is being written: the row may be gone
	commits   bool            // its transaction is being committed, with its outcome
	late      bool            // its handler did not return and was given up
}

// quarantined says whether the job has lost a lease; it was then claimed by itself.
func (t *task) quarantined() bool { return t.hold.Lost > 0 }

// unit is what one handler call gets: one task, or the tasks of a batch.
type unit struct {
	tasks []*task
	since time.Time // when it began to wait for a slot
}

// tooLate reports whether the slot of one of the tasks is too long ago for it to start.
func (u unit) tooLate(far *slot.Distance) bool {
	return slices.ContainsFunc(u.tasks, func(t *task) bool { return far.Late(t.hold) })
}

// taskSet holds all tasks of one Run, each from its claim until its outcome is written or its lease is lost. The executor
// adds and finishes them, and the beats extend them. The outbox removes them, and so does the executor if it has committed the
// outcome itself or the lease is lost.
type taskSet struct {
	q            *Queue
	base         context.Context // of all handlers, for events
	anyLate      atomic.Bool     // some handler was given up at some time; set by the beats
	emptied      func()          // called when the last one is removed; nil for Run
	stuckChanged func()          // called when handlers were given up, or one of those has returned

	mu  sync.Mutex      // guards all, and the fields of task that say so
	all map[int64]*task // by token
}

// holdsNone reports whether no job is held.
func (s *taskSet) holdsNone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.all) == 0
}

// held gives the jobs that this worker has as far as it knows: they run, or their outcomes are still to be written. Somebody may
// have locked their rows for longer than a lease, so that a rescan takes them for lost.
func (s *taskSet) held() map[int64]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := make(map[int64]bool, len(s.all))
	for _, t := range s.all {
		if t.finishing || t.lost == nil && !t.late && !t.hold.ByHandler.Load() {
			held[t.hold.ID] = true
		}
	}
	return held
}

// overdue returns those of the tasks whose leases have not been extended for a lease, and that do not count as lost yet.
func (s *taskSet) overdue(tasks []*task, now time.Time, lease time.Duration) (overdue []*task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range tasks {
		if t.lost == nil && now.Sub(t.extended) >= lease {
			overdue = append(overdue, t)
		}
	}
	return overdue
}

// forget removes a task that has been dealt with: its outcome is written, or its lease is lost. The caller holds mu.
func (s *taskSet) forget(h *hold.Hold) {
	t := s.all[h.Token]
	delete(s.all, h.Token)
	if len(s.all) == 0 && s.emptied != nil {
		s.emptied()
	}
	if h.Lost > 0 {
		if t != nil && !t.since.IsZero() && t.lost == nil && !t.late {
			s.q.quarantine.EndedWell()
		}
		s.q.quarantine.Leave(s.q.store, h.Token)
	}
}

// lose records that a task's lease is lost, ends its handler's context, and reports the event once. The task stays in the
// set until its handler has returned.
func (s *taskSet) lose(t *task, op string, event EventType) {
	lost := leaseOf(t.hold).lostError(op)
	s.mu.Lock()
	first := t.lost == nil
	if first {
		t.lost = lost
	}
	running := t.ctx
	s.mu.Unlock()
	if running != nil {
		running.cancel(lost)
	}
	if first {
		s.q.quarantine.Narrow()
		e := leaseOf(t.hold).event(event)
		e.Err = lost
		s.q.emit(s.base, e)
	}
}

// run reports whether a handler runs, or waits for a connection.
func (s *taskSet) run() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.all {
		if t.ctx != nil && !t.finishing {
			return true
		}
	}
	return false
}

// stuck says which slots are held by handlers that were given up and have not returned.
func (s *taskSet) stuck() []table.Stuck {
	all := make(map[count.Of]*table.Stuck)
	seen := make(map[*handlerContext]bool) // a batch handler has many tasks and one slot
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.all {
		if !t.late || t.finishing || t.ctx == nil || seen[t.ctx] {
			continue
		}
		seen[t.ctx] = true
		key := count.Of{Queue: t.hold.Queue, Kind: t.hold.Kind}
		h, over := all[key], t.ctx.over()
		if h == nil {
			h = &table.Stuck{Queue: key.Queue, Kind: key.Kind, Job: t.hold.ID, Since: over}
			all[key] = h
		}
		if h.Slots++; over.Before(h.Since) {
			h.Job, h.Since = t.hold.ID, over
		}
	}
	var list []table.Stuck
	for _, h := range all {
		list = append(list, *h)
	}
	slices.SortFunc(list, func(a, b table.Stuck) int { return a.Since.Compare(b.Since) })
	return list
}

// abandon is for the end of Run: it closes the connections of transactions whose handlers ignore their context, and names
// their kinds. With commits it does the same to transactions that are being committed.
func (s *taskSet) abandon(commits bool) (left error, committing bool) {
	var kinds []string
	var open []*lazytx.Tx
	n := 0
	s.mu.Lock()
	for _, t := range s.all {
		committing = committing || t.commits
		if t.ctx != nil && (!t.finishing || commits && t.commits) {
			n++
			kinds = append(kinds, t.hold.Kind)
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
	if n == 0 {
		return nil, committing
	}
	if commits {
		return fmt.Errorf("onceq: the transactions of %d handlers could not be committed in time (kinds %q); it is not known whether they were, and if not, their leases run out, and their jobs run again", n, slices.Compact(kinds)), committing
	}
	return fmt.Errorf("onceq: %d handlers did not return after their context was cancelled (kinds %q); their leases run out, and their jobs run again", n, slices.Compact(kinds)), committing
}

// handlerContext is the context of one run of a handler. What it needs to be cancelled and to have a deadline is made only
// when somebody asks for it: for jobs of a few microseconds that would be half of the work.
type handlerContext struct {
	base  context.Context // of all handlers
	holds []*hold.Hold
	one   [1]*hold.Hold // where holds points if there is one job

	mu       sync.Mutex // guards what follows
	deadline time.Time  // zero for none
	full     context.Context
	stop     context.CancelCauseFunc // of full
	ended    bool
	at       time.Time
	cause    error // why it ended, if not because of base or the deadline
}

// String keeps formatting from reading fields that change under the lock.
func (c *handlerContext) String() string { return "onceq.handlerContext" }

func (c *handlerContext) made() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.full == nil {
		base := c.base
		if c.ended {
			base = context.WithoutCancel(base) // base may have ended since, and that is not the cause
		}
		ctx, cancel := context.WithCancelCause(base)
		c.full, c.stop = ctx, cancel
		switch {
		case c.ended:
			cancel(c.cause)
		case !c.deadline.IsZero():
			timed, stop := context.WithDeadlineCause(ctx, c.deadline, errTimeout)
			c.full, c.stop = timed, func(cause error) { cancel(cause); stop() }
		}
	}
	return c.full
}

// until sets the deadline, before the handler gets the context. A context that exists before that was used only to wait for
// a connection.
func (c *handlerContext) until(deadline time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = deadline
	if c.full != nil {
		c.stop(nil)
		c.full, c.stop = nil, nil
	}
}

// cancel ends the context; the first cause stays.
func (c *handlerContext) cancel(cause error) {
	c.mu.Lock()
	stop := c.stop
	if c.ended {
		stop = nil
	} else {
		c.ended, c.at, c.cause = true, time.Now(), cause
	}
	c.mu.Unlock()
	if stop != nil {
		stop(cause)
	}
}

// why is context.Cause, without making the full context.
func (c *handlerContext) why() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.full != nil:
		return context.Cause(c.full)
	case c.ended && c.cause == nil:
		return context.Canceled
	case c.ended:
		return c.cause
	case c.base.Err() != nil:
		return context.Cause(c.base)
	case !c.deadline.IsZero() && !time.Now().Before(c.deadline):
		return errTimeout
	}
	return nil
}

// over gives the time at which the context ended, unless base ended it. It is zero while the context has not ended.
func (c *handlerContext) over() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.ended && (c.deadline.IsZero() || c.at.Before(c.deadline)):
		return c.at
	case !c.deadline.IsZero() && !time.Now().Before(c.deadline):
		return c.deadline
	}
	return time.Time{}
}

func (c *handlerContext) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }
func (c *handlerContext) Done() <-chan struct{}       { return c.made().Done() }
func (c *handlerContext) Err() error                  { return c.made().Err() }

// Value gives the leases to Enqueue and to LeaseFromContext. Package context asks for other values with keys of its own.
func (c *handlerContext) Value(key any) any {
	if key == (holdKey{}) {
		return c.holds
	}
	return c.made().Value(key)
}
