package claimer

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/plan"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/watch"
)

// look looks at queues.
func (c *Claimer) look(ctx context.Context, a *plan.Look) {
	var s plan.Seen
	var whats, names []string // what is paused
	var calls bool            // the promoter has something to do
	statement, read := stmt.LookForJobs, []any{&s.Now, &s.Recent, &s.Behind, &s.Next, &s.In, &whats, &names}
	args := []any{
		plan.Names(a.Queues), a.Starts[0], a.Starts[1], a.Starts[2], c.plan.Open, a.Horizon.Microseconds(), a.Behind, a.Rescans.Microseconds(),
	}
	if a.Calls {
		statement, args, read = stmt.LookForCalls, append(args, a.Since), append(read, &calls)
	}
	began := time.Now()
	c.send(ctx, plan.Looking, func() func() {
		err := c.Store.Send(ctx, c.DB, pg.Hot, statement, args, pg.Row(read...))
		ended := time.Now()
		return func() {
			if err != nil {
				c.lookFailed(ctx, err)
				return
			}
			c.Paused.Take(began, whats, names)
			c.works(watch.Look, nil)
			c.plan.Looked(a, &s, began, ended, c)
			if calls {
				c.Promoter.Called(a.Since.IsZero())
			}
		}
	})
}

// newLook is a look at the jobs that were enqueued last.
type newLook struct {
	args []any
	done bool // the server has answered
	seen plan.SeenNew
}

func (l *newLook) read(rows pgx.Rows) error {
	l.done = true
	return pg.Row(&l.seen.Last, &l.seen.Queues)(rows)
}

// saw is what it saw; nil for nothing.
func (l *newLook) saw() *plan.SeenNew {
	if l == nil || !l.done {
		return nil
	}
	return &l.seen
}

// lookForNew looks at the jobs that were enqueued last.
func (c *Claimer) lookForNew(ctx context.Context, a *plan.LookForNew) {
	l := &newLook{args: []any{a.From, c.plan.Open}}
	c.send(ctx, plan.Looking, func() func() {
		err := c.Store.Send(ctx, c.DB, pg.Hot, stmt.LookForNew, l.args, l.read)
		ended := time.Now()
		return func() {
			if err != nil {
				c.lookFailed(ctx, err)
				return
			}
			c.plan.SawNew(a, &l.seen, ended)
		}
	})
}

// lookFailed reports a look that failed, but for the end of the run.
func (c *Claimer) lookFailed(ctx context.Context, err error) {
	if ctx.Err() == nil {
		c.Troubles.Fails(c.ID, watch.Look, "", err, slog.Duration("next_try_in", c.plan.LookFailed(time.Now())))
	}
}
