package claimer

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/plan"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// rescan does what a rescan sends.
func (c *Claimer) rescan(ctx context.Context, a plan.Action) {
	switch a := a.(type) {
	case *plan.MakeKnown:
		c.makeKnown(ctx)
	case *plan.AskTurn:
		c.askForTurn(ctx, a)
	case *plan.Glance:
		c.glance(ctx, a)
	case *plan.RescanPage:
		c.rescanPage(ctx, a)
	case *plan.LeaveTo:
		c.leaveTo(ctx, a)
	case *plan.Quiet:
		c.Troubles.Works(c.ID, watch.Rescan, "")
		for _, q := range a.Queues {
			c.Troubles.Works(c.ID, watch.Rescan, q.Name)
		}
	}
}

// rescanWorks reports how a statement for these queues ended. It returns false if it failed.
func (c *Claimer) rescanWorks(ctx context.Context, queues []*plan.Queue, err error) bool {
	if err == nil {
		c.works(watch.Rescan, queues)
	} else if ctx.Err() == nil {
		c.Troubles.Fails(c.ID, watch.Rescan, theOnly(queues), err)
	}
	return err == nil
}

// makeKnown adds this worker's queues to the table.
func (c *Claimer) makeKnown(ctx context.Context) {
	c.send(ctx, plan.Upkeep, func() func() {
		err := c.Store.Send(ctx, c.DB, pg.Hot, stmt.AddQueues, []any{plan.Names(c.plan.Queues)}, pg.NoRows)
		return func() { c.plan.Known(c.rescanWorks(ctx, c.plan.Queues, err), time.Now()) }
	})
}

// askForTurn asks in which queues it is this worker's turn.
func (c *Claimer) askForTurn(ctx context.Context, a *plan.AskTurn) {
	args := []any{plan.Names(a.Queues), a.Every.Microseconds(), c.plan.Open}
	c.send(ctx, plan.Upkeep, func() func() {
		var mine []*plan.Queue
		err := c.Store.Send(ctx, c.DB, pg.Hot, stmt.RescanTurn, args, pg.Each(func(rows pgx.Rows) error {
			var queue string
			if err := rows.Scan(&queue); err != nil {
				return err
			}
			mine = append(mine, c.plan.Queue(queue))
			return nil
		}))
		return func() {
			c.rescanWorks(ctx, a.Queues, err)
			c.plan.Granted(a, mine, time.Now())
		}
	})
}

// glance looks at queues, and leaves those out in which there is nothing to do.
func (c *Claimer) glance(ctx context.Context, a *plan.Glance) {
	args := []any{plan.Names(a.Queues), a.RunAts[0], a.IDs[0], a.RunAts[1], a.IDs[1], a.RunAts[2], a.IDs[2]}
	c.send(ctx, plan.Upkeep, func() func() {
		var some []*plan.Queue
		began := time.Now()
		err := c.Store.Send(ctx, c.DB, pg.Hot, stmt.RescanFirst, args, pg.Each(func(rows pgx.Rows) error {
			var n int
			if err := rows.Scan(&n); err != nil {
				return err
			}
			some = append(some, a.Queues[n-1])
			return nil
		}))
		took := time.Since(began)
		return func() { c.plan.Glanced(a, some, !c.rescanWorks(ctx, a.Queues, err), took) }
	})
}

// rescanPage goes over the next jobs of a queue.
func (c *Claimer) rescanPage(ctx context.Context, a *plan.RescanPage) {
	args := []any{
		a.Queue.Name, a.To.Priority, a.From.RunAt, a.From.ID, a.To.RunAt, a.To.ID, c.plan.Open, table.ChunkRows,
	}
	c.send(ctx, plan.Upkeep, func() func() {
		var p plan.Page
		var unknown []string // kinds without a handler
		var ids []int64      // for the quarantine
		var lost []int32
		began := time.Now()
		err := c.Store.Guarded(ctx, c.DB, stmt.RescanPage, args, &p.Last, &p.LastID, &p.Moved, &unknown, &p.Left, &ids, &lost)
		took := time.Since(began)
		return func() {
			page := &p
			if c.rescanWorks(ctx, []*plan.Queue{a.Queue}, err) {
				c.warnOf(a.Queue, unknown)
				p.Lost = quarantine.Jobs(ids, lost)
			} else {
				page = nil
			}
			c.plan.Rescanned(a, page, took, time.Now())
		}
	})
}

// leaveTo says in which kinds of other workers there is something to do.
func (c *Claimer) leaveTo(ctx context.Context, a *plan.LeaveTo) {
	c.send(ctx, plan.Upkeep, func() func() {
		err := c.Store.Send(ctx, c.DB, pg.Hot, stmt.RescanLeft, []any{a.Queue.Name, a.Kinds}, pg.NoRows)
		return func() { c.rescanWorks(ctx, []*plan.Queue{a.Queue}, err) }
	})
}

// warnOf logs one warning for each kind without a handler.
func (c *Claimer) warnOf(q *plan.Queue, unknown []string) {
	for _, kind := range unknown {
		of := [2]string{q.Name, kind}
		if !c.warned[of] && !slices.Contains(c.Kinds, kind) { // a kind with a handler is paused
			c.warned[of] = true
			c.Log.Warn("onceq: jobs of a kind for which this worker has no handler are left to other workers; if no other worker has one, give this worker a handler, or correct Kind.Name if it is misspelt",
				slog.String("queue", q.Name), slog.String("kind", kind), slog.Any("kinds with a handler", c.Kinds))
		}
	}
}
