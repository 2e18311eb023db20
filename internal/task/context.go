package task

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/onceq/onceq/internal/hold"
)

// ErrTimeout is why a context ends at its deadline.
var ErrTimeout = errors.New("timeout")

// Context is the context of one run of a handler. What it needs to be cancelled and to have a deadline is
// made only when somebody asks for it: for jobs of a few microseconds that would be half of the work.
type Context struct {
	base  context.Context // of all handlers
	Holds []*hold.Hold
	one   [1]*hold.Hold // where Holds points if there is one job

	mu       sync.Mutex // guards what follows
	deadline time.Time  // zero for none
	full     context.Context
	stop     context.CancelCauseFunc // of full
	ended    bool
	at       time.Time
	cause    error // why it ended, if not because of base or the deadline
}

// String keeps formatting from reading fields that change under the lock.
func (c *Context) String() string { return "onceq.handlerContext" }

// NewContext returns the context of a handler that gets these tasks.
func NewContext(base context.Context, tasks []*Task) *Context {
	c := &Context{base: base}
	c.Holds = append(c.one[:0], tasks[0].Hold)
	for _, t := range tasks[1:] {
		c.Holds = append(c.Holds, t.Hold)
	}
	return c
}

func (c *Context) made() context.Context {
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
			timed, stop := context.WithDeadlineCause(ctx, c.deadline, ErrTimeout)
			c.full, c.stop = timed, func(cause error) { cancel(cause); stop() }
		}
	}
	return c.full
}

// Until sets the deadline, before the handler gets the context. A context that exists before that was used
// only to wait for a connection.
func (c *Context) Until(deadline time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = deadline
	if c.full != nil {
		c.stop(nil)
		c.full, c.stop = nil, nil
	}
}

// Cancel ends the context; the first cause stays.
func (c *Context) Cancel(cause error) {
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

// Why is context.Cause, without making the full context.
func (c *Context) Why() error {
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
		return ErrTimeout
	}
	return nil
}

// over gives the time at which the context ended, unless base ended it. It is zero while the context has not
// ended.
func (c *Context) over() time.Time {
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

func (c *Context) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }
func (c *Context) Done() <-chan struct{}       { return c.made().Done() }
func (c *Context) Err() error                  { return c.made().Err() }

// Value gives the holds to hold.From. Package context asks for other values with keys of its own.
func (c *Context) Value(key any) any {
	if key == (hold.Key{}) {
		return c.Holds
	}
	return c.made().Value(key)
}
