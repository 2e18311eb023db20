package onceq

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/lazytx"
)

// task is what a worker knows about one lease.
type task struct {
	lease *Lease
	h     *Handler

	// Guarded by taskSet.mu.
	extended  time.Time       // just before the claim, or before the latest beat that found the lease alive
	ctx       *handlerContext // set once it runs or waits for a connection
	tx        *lazytx.Tx      // the transaction that it runs in, nil for none
	since     time.Time       // when its handler was called
	lost      error           // why it must not start or continue
	finishing bool            // its outcome is being written: the row may be gone
	late      bool            // its handler did not return and was given up
}

// quarantined says whether the job has lost a lease; it was then claimed by itself.
func (t *task) quarantined() bool { return t.lease.Lost > 0 }

// unit is what one handler call gets: one task, or the tasks of a batch.
type unit struct {
	one  *task
	many []*task
}

func (u unit) tasks() []*task {
	if u.one != nil {
		return []*task{u.one}
	}
	return u.many
}

// taskSet holds all tasks of one Run, each from its claim until its outcome is written or its lease is lost. The executor
// adds and finishes them, the beats extend them, and the outbox removes them.
type taskSet struct {
	q       *Queue
	base    context.Context // of all handlers, for events
	anyLate atomic.Bool     // some handler was given up at some time; set by the beats

	mu  sync.Mutex      // guards all, and the fields of task that say so
	all map[int64]*task // by token
}

// holdsNone reports whether no job is held.
func (s *taskSet) holdsNone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.all) == 0
}

// ended reports whether a task's outcome is being written, or is written.
func (s *taskSet) ended(t *task) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return t.finishing || s.all[t.lease.Token] != t
}

// forget removes a task that has been dealt with: its outcome is written, or its lease is lost. The caller holds mu.
func (s *taskSet) forget(lease *Lease) {
	delete(s.all, lease.Token)
	if lease.Lost > 0 {
		s.q.quarantine.leave(lease.Token)
	}
}

// lose records that a task's lease is lost, ends its handler's context, and reports the event once. The task stays in the
// set until its handler has returned.
func (s *taskSet) lose(t *task, op string, event EventType) {
	lost := t.lease.lostError(op)
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
		e := t.lease.event(event)
		e.Err = lost
		s.q.emit(s.base, e)
	}
}

// abandon is for the end of Run: it closes the connections of transactions whose handlers ignore their context, and names
// their kinds.
func (s *taskSet) abandon() error {
	var kinds []string
	var open []*lazytx.Tx
	n := 0
	s.mu.Lock()
	for _, t := range s.all {
		if t.ctx != nil && !t.finishing {
			n++
			kinds = append(kinds, t.lease.Kind)
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
		return nil
	}
	return fmt.Errorf("onceq: %d handlers did not return after their context was cancelled (kinds %q); their leases run out, and their jobs run again", n, slices.Compact(kinds))
}
