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
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Drain claims, as Loop does, until this many jobs were claimed, or until nothing is due in any queue and nothing runs: a job of one
// queue may enqueue for another. Each turn begins at the beginning of the queues. After one that found nothing, the next one first lets
// jobs into their lanes. It claims after that, because what another promoter has let in is due then. cutShort says that ctx ended with
// work left.
func (c *Claimer) Drain(ctx context.Context, most int) (cutShort bool, err error) {
	c.left = most
	err = c.fillQuarantine(ctx, table.ChunkRows)
	// While handlers run it asks again for what they enqueue: soon at first, and more rarely while nothing
	// changes.
	const first = 2 * time.Millisecond
	for rest, looks := first, false; c.left > 0 && ctx.Err() == nil; {
		idle, left, more := c.Worker.HoldsNone(), c.left, true
		if err == nil && looks {
			more, err = c.Promoter.Drain(ctx, idle)
		}
		if err == nil {
			err = c.claimAll(ctx)
		}
		last := err == nil && idle && !more && c.left == left
		if last {
			err = c.fillQuarantine(ctx, math.MaxInt32)
		}
		switch {
		case err != nil && ctx.Err() == nil && !errors.Is(err, pg.ErrSilent): // otherwise there are new connections
			return false, err
		case last && err == nil && !slices.ContainsFunc(c.feeds, (*feed).hasMore):
			return false, nil
		case idle && !looks && c.left == left:
			looks = true
			continue
		case c.left < left:
			rest = first
		}
		err, looks = nil, c.left == left
		nap.For(ctx, rest, c.wake)
		rest = min(2*rest, 100*time.Millisecond)
	}
	return c.left > 0, nil
}

func (f *feed) hasMore() bool { return f.plan.due || len(f.quarantine.IDs) > 0 }

// claimAll claims from all feeds, from the beginning, until they have come to their end or there is no room.
func (c *Claimer) claimAll(ctx context.Context) error {
	for _, f := range c.feeds {
		f.cursor.Restart()
		c.isDue(f)
	}
	for c.failed = nil; c.failed == nil && c.left > 0 && ctx.Err() == nil; {
		c.obey(c.Paused.Latest.Load())
		if c.startClaims(ctx, time.Now()); !c.answered() {
			break
		}
	}
	return c.failed
}

// fillQuarantine is the rescan of Drain, among the first jobs of each priority, while nothing runs here: for the lease of a job of this
// drain may seem to be lost. As the rescan does, it warns of kinds without a handler.
func (c *Claimer) fillQuarantine(ctx context.Context, among int) error {
	return c.Store.Send(ctx, c.DB, pg.Hot, stmt.FindLost, []any{names(c.feeds), c.kinds, among}, pg.Each(func(rows pgx.Rows) error {
		var n int
		var ids []int64
		var lost []int32
		var unknown []string
		if err := rows.Scan(&n, &ids, &lost, &unknown); err != nil {
			return err
		}
		f := c.feeds[n-1]
		if f.paused {
			return nil
		}
		c.warnOf(f, unknown)
		f.quarantine.Saw(quarantine.Jobs(ids, lost))
		return nil
	}))
}
