package onceq

import (
	"fmt"
	"slices"
	"time"
)

// task is the worker's side of one lease.
type task struct {
	lease     *Lease
	h         *Handler
	extended  time.Time       // just before the claim or the latest beat that found it alive
	ctx       *handlerContext // once it runs, or waits for a connection
	tx        *handlerTx      // the transaction that it runs in, nil for none
	since     time.Time       // when its handler was called
	lost      error           // why it must not run, or run on
	finishing bool            // its outcome is on the way: the row may be gone
	late      bool            // its handler did not return, and is not waited for any more
}

// suspect says whether the job has lost a lease: then it was claimed alone.
func (t *task) suspect() bool { return t.lease.Lost > 0 }

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

// ended reports whether a task's outcome is on its way or written.
func (l *run) ended(t *task) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return t.finishing || l.tasks[t.lease.Token] != t
}

// forget is for a task that has been dealt with: its outcome is written, or its lease lost. The caller holds mu.
func (l *run) forget(lease *Lease) {
	delete(l.tasks, lease.Token)
	if lease.Lost > 0 {
		l.q.suspects.leave(lease.Token)
	}
}

// lose gives a task up and says so once. The task stays in tasks until its handler has returned.
func (l *run) lose(t *task, op string, event EventType) {
	lost := t.lease.lostError(op)
	l.mu.Lock()
	first := t.lost == nil
	if first {
		t.lost = lost
	}
	ctx := t.ctx
	l.mu.Unlock()
	if ctx != nil {
		ctx.cancel(lost)
	}
	if first {
		e := t.lease.event(event)
		e.Err = lost
		l.q.emit(l.base, e)
	}
}

// abandoned names the jobs whose handlers ignore their context, and closes their transactions' connections.
func (r *run) abandoned() error {
	var kinds []string
	var open []*handlerTx
	n := 0
	r.mu.Lock()
	for _, t := range r.tasks {
		if t.ctx != nil && !t.finishing {
			n++
			kinds = append(kinds, t.lease.Kind)
			if t.tx != nil {
				open = append(open, t.tx)
			}
		}
	}
	r.mu.Unlock()
	for _, tx := range open {
		tx.giveUp()
	}
	slices.Sort(kinds)
	if n == 0 {
		return nil
	}
	return fmt.Errorf("onceq: %d handlers did not return after their context was cancelled (kinds %q); their leases run out", n, slices.Compact(kinds))
}
