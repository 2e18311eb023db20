package onceq

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
)

// While handlers run, Drain asks again for what they enqueue: soon at first, and more and more rarely while nothing changes. Then it
// looks among all due jobs for those that have lost a lease so rarely, or more rarely if that takes long: there may be very many.
const (
	drainRest    = 2 * time.Millisecond
	drainLongest = 100 * time.Millisecond
	drainLook    = time.Second
)

// drain claims and hands out until limit jobs were claimed, or until nothing is due in any queue and nothing runs: a job of
// one queue may enqueue for another. When it finds nothing it lets jobs into their lanes. Its claims begin at the beginning
// of the queues, and it sends one statement at a time. cutShort says that ctx ended with work left.
func (c *claimer) drain(ctx context.Context, limit int, p *promoter) (cutShort bool, err error) {
	quiet := false // there was nothing to claim, and then no call
	began, rest := time.Now(), drainRest
	for limit > 0 {
		idle := c.exec.tasks.holdsNone()
		if idle { // this may be the last turn
			for _, f := range c.feeds {
				f.scanAt = time.Time{}
			}
		}
		found, more, err := c.drainOnce(ctx, limit)
		limit -= found
		var lanes promoted
		if err == nil && found == 0 {
			// What is locked by a job of this drain that still runs comes at the next look, and not after the drain has ended.
			if p.again = 0; idle {
				p.again = promoteAgain
			}
			if lanes, err = p.promote(ctx); lanes.busy {
				p.anew.Store(true) // the other promoter may leave some of these calls, also old ones
			}
			if lanes.calls > 0 || lanes.busy {
				p.seen.Store(true)
			}
		}
		switch {
		case errors.Is(err, errSilent) && ctx.Err() == nil: // there are new connections
			quiet = false
			continue
		case err != nil && ctx.Err() == nil:
			return false, err
		case ctx.Err() != nil:
			return limit > 0, nil
		case found > 0 || lanes.jobs > 0:
			quiet, rest = false, drainRest
			continue
		case !idle || more || lanes.calls > 0 || lanes.more || lanes.busy:
			quiet = false
		case quiet || !p.laned && !p.seen.Load() && time.Since(began) < promoteMargin:
			return false, nil
		default:
			// Another promoter may have answered calls between the claim and the look, and its jobs are due now. The last look is for
			// all calls, because a handler may have committed some late, and for the ends of jobs that nobody tells.
			p.anew.Store(true)
			quiet = true
			continue
		}
		timer := time.NewTimer(rest)
		select {
		case <-timer.C:
			rest = min(2*rest, drainLongest)
		case <-c.wake:
			rest = drainRest
		case <-ctx.Done():
		}
		timer.Stop()
	}
	return false, nil
}

// drainOnce goes once over all feeds that have room. It returns how many jobs it claimed, and whether there may be more: it
// could not ask some feed, or some feed has jobs in quarantine.
func (c *claimer) drainOnce(ctx context.Context, limit int) (found int, more bool, err error) {
	p, err := c.q.pausedNow(ctx, c.db, pausesOld)
	if err != nil {
		return 0, true, err
	}
	c.obey(p)
	var several []*feed
	var wants []want
	sum := 0
	flush := func() error {
		feeds, ws := several, wants
		several, wants, sum = nil, nil, 0
		n, err := c.drainSome(ctx, feeds, ws)
		found += n
		for _, f := range feeds {
			more = more || len(f.quarantine.ids) > 0
		}
		return err
	}
	for _, f := range c.feeds {
		if ctx.Err() != nil || found == limit {
			break
		}
		if found+sum == limit || len(several) == together {
			if err := flush(); err != nil {
				return found, true, err
			}
		}
		if f.paused {
			continue
		}
		w := c.wantNow(f)
		if !w.now && len(several) > 0 { // what these reserved may be all connections
			if err := flush(); err != nil {
				return found, true, err
			}
			if found == limit {
				break
			}
			w = c.wantNow(f)
		}
		if w.now && w.one {
			n, err := c.drainQuarantined(ctx, f)
			if found += n; err != nil {
				return found, true, err
			}
			more = true
			continue
		}
		if w.n = min(w.n, limit-found-sum); w.now && w.n > 0 {
			several, wants, sum = append(several, f), append(wants, w), sum+w.n
		} else {
			c.unreserve(f)
			more = true
		}
	}
	if err := flush(); err != nil {
		return found, true, err
	}
	return found, more, nil
}

// drainSome claims from feeds. First it looks among the first of their jobs for those that have lost a lease or, if it
// found nothing to claim, among all of those feeds for which it is time.
func (c *claimer) drainSome(ctx context.Context, feeds []*feed, wants []want) (found int, err error) {
	if len(feeds) == 0 {
		return 0, nil
	}
	if err := c.fillQuarantine(ctx, feeds, rescanRows); err != nil {
		for _, f := range feeds {
			c.unreserve(f)
		}
		return 0, err
	}
	asks := make([]*claim, len(feeds))
	began := time.Now()
	for i, f := range feeds {
		f.cursor.restart()
		asks[i], _ = c.ask(f, wants[i].n, len(feeds), began)
	}
	if err = c.sendClaims(ctx, c.kinds, asks); !c.claimed(feeds, err) {
		return 0, err
	}
	ended := time.Now()
	for i, f := range feeds {
		f.busy = false
		f.claimedAt = ended
		f.cursor.claimed(asks[i], lookWhole, began, ended, 0)
		if n := len(asks[i].leases); n > 0 {
			f.pace.claimed(asks[i].leases)
			c.exec.accept(f.slots, asks[i].leases, asks[i].began)
			found += n
		}
		c.unreserve(f)
	}
	if found > 0 {
		return found, nil
	}
	var due []*feed
	for _, f := range feeds {
		if !ended.Before(f.scanAt) {
			due = append(due, f)
		}
	}
	err = c.fillQuarantine(ctx, due, math.MaxInt32)
	now := time.Now()
	for _, f := range due {
		f.scanAt = now.Add(max(drainLook, lookSomeRest*now.Sub(ended)))
	}
	return 0, err
}

// drainQuarantined claims a job in quarantine.
func (c *claimer) drainQuarantined(ctx context.Context, f *feed) (int, error) {
	q := c.askQuarantined(f)
	if q == nil {
		return 0, nil
	}
	err := q.send(ctx)
	c.startQuarantined(q, err)
	return len(q.ask.leases), err
}

// findLost looks for jobs that have lost a lease, among the first $3 due jobs of each priority of each queue, and for kinds
// that are not in $2. It returns the places of the queues from 1 on.
const findLost = `
select q.n, j.ids, j.lost, j.unknown
  from pg_catalog.unnest($1::text[]) with ordinality as q(queue, n)
 cross join lateral (
       select pg_catalog.array_agg(j.id) filter (where j.kind = any ($2::text[])) as ids, pg_catalog.array_agg(j.lost) filter (where j.kind = any ($2::text[])) as lost,
              pg_catalog.array_agg(distinct j.kind) filter (where j.kind <> all ($2::text[])) as unknown
         from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
        cross join lateral (
              select id, kind, leased_until, lost + (leased_until is not null)::int as lost
                from onceq.jobs
               where queue = q.queue and priority = p.priority and run_at <= statement_timestamp()
               order by run_at, id
               limit $3::bigint) j
        where (j.leased_until is null or j.leased_until <= statement_timestamp()) and (j.lost > 0 or j.kind <> all ($2::text[]))) j
 where j.ids is not null or j.unknown is not null`

// fillQuarantine is the rescan of Drain, for feeds that have no job in quarantine. It looks among the first jobs of each
// priority. As the rescan does, it warns of kinds without a handler.
func (c *claimer) fillQuarantine(ctx context.Context, feeds []*feed, among int) error {
	var empty []*feed
	for _, f := range feeds {
		if len(f.quarantine.ids) == 0 {
			empty = append(empty, f)
		}
	}
	if len(empty) == 0 {
		return nil
	}
	return c.q.send(ctx, c.db, hot, findLost, []any{names(empty), c.kinds, among}, each(func(rows pgx.Rows) error {
		var n int
		var ids []int64
		var lost []int32
		var unknown []string
		if err := rows.Scan(&n, &ids, &lost, &unknown); err != nil {
			return err
		}
		f := empty[n-1]
		c.warnOf(f, unknown)
		seen := make([]lostJob, len(ids))
		for i, id := range ids {
			seen[i] = lostJob{id, int(lost[i])}
		}
		f.quarantine.saw(seen)
		return nil
	}))
}
