package onceq

import (
	"context"
	"math"
	"time"
)

// drain claims and hands out until the budget is used up, or nothing is due in any lane and nothing runs: what runs for
// one lane may enqueue for another.
func (l *lane) drain(ctx context.Context) error {
	for {
		n, suspect := l.waitRoom(ctx)
		l.draining.Lock()
		if l.budget == 0 || n == 0 {
			l.cutShort.Store(l.cutShort.Load() || l.budget > 0) // by ctx
			l.draining.Unlock()
			l.unreserve()
			return nil
		}
		idle := l.exec.tasks.holdsNone()
		found, err := l.drainSome(ctx, min(n, l.budget), suspect)
		l.unreserve()
		l.budget -= found
		switch {
		case err != nil:
			l.drainers--
			delete(l.resting, l)
			if ctx.Err() != nil {
				l.cutShort.Store(true) // the error is that of a statement which it ended
			}
		case found > 0 || !idle || len(l.suspects) > 0:
			clear(l.resting)
		default:
			l.resting[l] = true
		}
		done := len(l.resting) == l.drainers
		if done {
			l.budget = 0 // for the others as well
		}
		l.draining.Unlock()
		switch {
		case err != nil && ctx.Err() == nil:
			return err
		case done:
			return nil
		case found == 0:
			sleep(ctx, 2*time.Millisecond, l.slots.room)
		}
	}
}

// drainSome claims for drain: a suspect, where there is one that may start, or up to n other jobs.
func (l *lane) drainSome(ctx context.Context, n int, suspect bool) (found int, err error) {
	if !suspect && len(l.suspects) == 0 {
		if err := l.lookForSuspects(ctx, false); err != nil {
			return 0, err
		}
		suspect = l.suspectDue() && l.slots.outstanding.Load()-l.reserved <= int64((l.slots.count-1)*l.slots.width)
	}
	if suspect {
		return l.claimSuspect(ctx)
	}
	l.at = fromStart()
	if found, err = l.claimSome(ctx, n); err == nil && found == 0 && len(l.suspects) == 0 {
		err = l.lookForSuspects(ctx, true)
	}
	return found, err
}

// findSuspects looks for them among the first $3 jobs of each priority that are due.
const findSuspects = `
select array_agg(j.id), array_agg(j.lost)
  from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select id, kind, leased_until, lost + (leased_until is not null)::int as lost
         from onceq.jobs
        where queue = $1::text and priority = p.priority and run_at <= statement_timestamp()
        order by run_at, id
        limit $3::bigint) j
 where j.lost > 0 and (j.leased_until is null or j.leased_until <= statement_timestamp()) and j.kind = any ($2::text[])`

// lookForSuspects is lookBehind for Drain, whose claims all begin at the start: among the first jobs, or among all when there
// is nothing else.
func (l *lane) lookForSuspects(ctx context.Context, all bool) error {
	limit := sweepPage
	if all {
		limit = math.MaxInt32
	}
	var ids []int64
	var lost []int32
	err := l.q.guarded(ctx, l.side, findSuspects, []any{l.queue, l.kinds, limit}, &ids, &lost)
	if err != nil {
		return err
	}
	seen := make([]suspect, len(ids))
	for i, id := range ids {
		seen[i] = suspect{id, int(lost[i])}
	}
	l.saw(seen)
	return nil
}
