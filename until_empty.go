package onceq

import (
	"context"
	"math"
	"sync"
	"time"
)

// draining is what the claimers of one Drain share. Each holds mu while it claims, so that they claim one at a time and
// know what the others found.
type draining struct {
	mu       sync.Mutex        // guards what follows, and is held while a claimer claims
	budget   int               // how many jobs may still be claimed
	claimers int               // those that have not failed
	resting  map[*claimer]bool // those that found nothing since the last time that any found something or a handler ran
	cutShort bool              // the context ended with work left
}

func newDraining(limit, claimers int) *draining {
	return &draining{budget: limit, claimers: claimers, resting: make(map[*claimer]bool)}
}

// drain claims and hands out until the budget is used up, or until nothing is due in any queue and nothing runs: a job of
// one queue may enqueue for another.
func (c *claimer) drain(ctx context.Context, d *draining) error {
	for {
		n, one := c.waitRoom(ctx)
		d.mu.Lock()
		if d.budget == 0 || n == 0 {
			d.cutShort = d.cutShort || d.budget > 0 // by ctx
			d.mu.Unlock()
			c.unreserve()
			return nil
		}
		idle := c.exec.tasks.holdsNone()
		found, err := c.drainSome(ctx, min(n, d.budget), one)
		c.unreserve()
		d.budget -= found
		switch {
		case err != nil:
			d.claimers--
			delete(d.resting, c)
			if ctx.Err() != nil {
				d.cutShort = true // the error comes from a statement that the end of ctx cut off
			}
		case found > 0 || !idle || len(c.feed.quarantine.ids) > 0:
			clear(d.resting)
		default:
			d.resting[c] = true
		}
		done := len(d.resting) == d.claimers
		if done {
			d.budget = 0 // for the others as well
		}
		d.mu.Unlock()
		switch {
		case err != nil && ctx.Err() == nil:
			return err
		case done:
			return nil
		case found == 0:
			sleep(ctx, 2*time.Millisecond, c.feed.slots.room)
		}
	}
}

// drainSome claims for drain: a job in quarantine, if there is one that may start, or up to n other jobs.
func (c *claimer) drainSome(ctx context.Context, n int, one bool) (found int, err error) {
	f, s := c.feed, c.feed.slots
	if !one && len(f.quarantine.ids) == 0 {
		if err := c.fillQuarantine(ctx, rescanRows); err != nil {
			return 0, err
		}
		one = c.quarantineDue(f) && s.outstanding.Load()-f.reserved <= int64((s.count-1)*s.width)
	}
	if one {
		return c.claimQuarantined(ctx)
	}
	f.cursor.restart()
	if found, err = c.claim(ctx, n); err == nil && found == 0 && len(f.quarantine.ids) == 0 {
		err = c.fillQuarantine(ctx, math.MaxInt32)
	}
	return found, err
}

// findLost looks for jobs that have lost a lease, among the first $3 due jobs of each priority, and for kinds that are not
// in $2.
const findLost = `
select array_agg(j.id) filter (where j.kind = any ($2::text[])), array_agg(j.lost) filter (where j.kind = any ($2::text[])),
       array_agg(distinct j.kind) filter (where j.kind <> all ($2::text[]))
  from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select id, kind, leased_until, lost + (leased_until is not null)::int as lost
         from onceq.jobs
        where queue = $1::text and priority = p.priority and run_at <= statement_timestamp()
        order by run_at, id
        limit $3::bigint) j
 where (j.leased_until is null or j.leased_until <= statement_timestamp()) and (j.lost > 0 or j.kind <> all ($2::text[]))`

// fillQuarantine is the rescan of Drain, whose claims all begin at the beginning. It looks among the first jobs of each
// priority, or among all jobs when there is nothing else. As the rescan does, it warns of kinds without a handler.
func (c *claimer) fillQuarantine(ctx context.Context, among int) error {
	var ids []int64
	var lost []int32
	var unknown []string
	err := c.q.guarded(ctx, c.db, findLost, []any{c.feed.queue, c.w.kinds, among}, &ids, &lost, &unknown)
	if err != nil {
		return err
	}
	c.warnOf(unknown)
	seen := make([]lostJob, len(ids))
	for i, id := range ids {
		seen[i] = lostJob{id, int(lost[i])}
	}
	c.feed.quarantine.saw(seen)
	return nil
}
