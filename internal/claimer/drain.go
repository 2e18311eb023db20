package claimer

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/plan"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Drain claims, as Loop does, until this many jobs were claimed, or until nothing is due in any queue and nothing runs: a job of one
// queue may enqueue for another. Each turn begins at the beginning of the queues. After one that found nothing, the next one first lets
// jobs into their lanes. It claims after that, because what another promoter has let in is due then. cutShort says that ctx ended with
// work left.
func (c *Claimer) Drain(ctx context.Context, most int) (cutShort bool, err error) {
	c.plan.Left = most
	err = c.fillQuarantine(ctx, table.ChunkRows)
	// While handlers run it asks again for what they enqueue: soon at first, and more rarely while nothing
	// changes.
	const first = 2 * time.Millisecond
	for rest, looks := first, false; c.plan.Left > 0 && ctx.Err() == nil; {
		idle, left, more := c.Worker.HoldsNone(), c.plan.Left, true
		if err == nil && looks {
			more, err = c.Promoter.Drain(ctx, idle)
		}
		if err == nil {
			err = c.claimAll(ctx)
		}
		last := err == nil && idle && !more && c.plan.Left == left
		if last {
			err = c.fillQuarantine(ctx, math.MaxInt32)
		}
		switch {
		case err != nil && ctx.Err() == nil && !errors.Is(err, pg.ErrSilent): // otherwise there are new connections
			return false, err
		case last && err == nil && !slices.ContainsFunc(c.plan.Queues, (*plan.Queue).HasMore):
			return false, nil
		case idle && !looks && c.plan.Left == left:
			looks = true
			continue
		case c.plan.Left < left:
			rest = first
		}
		err, looks = nil, c.plan.Left == left
		nap.For(ctx, rest, c.wake)
		rest = min(2*rest, 100*time.Millisecond)
	}
	return c.plan.Left > 0, nil
}

// claimAll claims from all queues, from the beginning, until they have come to their end or there is no room.
func (c *Claimer) claimAll(ctx context.Context) error {
	c.plan.Restart()
	for c.failed = nil; c.failed == nil && c.plan.Left > 0 && ctx.Err() == nil; {
		c.obey(c.Paused.Latest.Load())
		c.plan.Facts = c.facts()
		c.plan.Claims(time.Now(), c)
		if c.act(ctx); !c.answered() {
			break
		}
	}
	return c.failed
}

// fillQuarantine is the rescan of Drain, among the first jobs of each priority, while nothing runs here: for the lease of a job of this
// drain may seem to be lost. As the rescan does, it warns of kinds without a handler.
func (c *Claimer) fillQuarantine(ctx context.Context, among int) error {
	return c.Store.Send(ctx, c.DB, pg.Hot, stmt.FindLost, []any{plan.Names(c.plan.Queues), c.plan.Open, among}, pg.Each(func(rows pgx.Rows) error {
		var n int
		var ids []int64
		var lost []int32
		var unknown []string
		if err := rows.Scan(&n, &ids, &lost, &unknown); err != nil {
			return err
		}
		if q := c.plan.Queues[n-1]; q.Lost(quarantine.Jobs(ids, lost)) {
			c.warnOf(q, unknown)
		}
		return nil
	}))
}
