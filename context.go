package onceq

import (
	"context"
	"sync"
	"time"
)

// handlerContext is the context of one run of a handler. What it needs to be cancelled and to have a deadline is made only
// when somebody asks for it: for jobs of a few microseconds that would be half of the work.
type handlerContext struct {
	base     context.Context // of all handlers
	leases   []*Lease
	one      [1]*Lease // where leases points if there is one job
	deadline time.Time // zero for none

	mu    sync.Mutex // guards what follows
	full  context.Context
	stop  context.CancelCauseFunc // of full
	ended bool
	at    time.Time
	cause error // why it ended, if not because of base or the deadline
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

// until sets the deadline, before the handler gets the context. A context that was made earlier served only to wait for a
// connection.
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
	if key == (leaseKey{}) {
		return c.leases
	}
	return c.made().Value(key)
}
