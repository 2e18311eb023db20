package onceq

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

const rescanRows = 2000 // in one page

// rescanTurn returns a row to the one worker that may rescan a queue now.
const rescanTurn = `
insert into onceq.queues as q (queue, swept_at) values ($1::text, statement_timestamp())
on conflict (queue) do update set swept_at = excluded.swept_at
 where q.swept_at <= statement_timestamp() - $2::bigint * interval '1 microsecond'
returning 1`

// rescanPage looks at one page of a priority before a position ($5, $6), starting after ($3, $4). Jobs there that nobody
// holds, because they were committed long after they were due, are moved to the position, where the claims of all workers
// find them. It returns the last place of the page (null for the last page), how many jobs were moved, the kinds that are
// not in $7, and the jobs for the quarantine, which have lost a lease or whose lease has expired, with how many they have
// lost.
const rescanPage = `
with page as materialized (
  select id, run_at, leased_until, lost, kind, row_number() over (order by run_at, id) as n
    from onceq.jobs
   where queue = $1::text and priority = $2::smallint
     and (run_at, id) > ($3::timestamptz, $4::bigint) and (run_at, id) < ($5::timestamptz, $6::bigint)
   order by run_at, id
   limit $8::int
),
ready as materialized (
  select j.id
    from page p
   cross join lateral (
         select id from onceq.jobs
          where id = p.id and leased_until is null
            for no key update skip locked) j
   where p.leased_until is null and p.lost = 0 and p.kind = any ($7::text[])
   order by j.id
),
forward as (
  update onceq.jobs j set run_at = $5::timestamptz
    from ready where j.id = any (array[ready.id])
  returning j.id
),
lost as materialized (
  select id, lost + (leased_until is not null)::int as lost
    from page
   where (leased_until <= statement_timestamp() or leased_until is null and lost > 0) and kind = any ($7::text[])
   order by n
)
select (select run_at from page where n = $8::int), coalesce((select id from page where n = $8::int), 0),
       (select count(*) from forward),
       array(select distinct kind from page where kind <> all ($7::text[])),
       (select array_agg(id) from lost), (select array_agg(lost) from lost)`

// rescan looks at the jobs that claims no longer find because they are before this worker's position (see cursor). It runs
// at intervals of a second or of twenty times what it costs, in one worker of a queue at a time. It reports whether it
// moved jobs to the position.
func (c *claimer) rescan(ctx context.Context) (moved bool) {
	f, cursor := c.feed, &c.feed.cursor
	every := cursor.rescanInterval()
	if time.Since(cursor.rescanAsked) < every {
		return false
	}
	cursor.rescanAsked = time.Now()
	var turn int
	if err := c.q.guarded(ctx, c.db, rescanTurn, []any{f.queue, every.Microseconds()}, &turn); err != nil {
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			c.q.works(c.id, workRescan, f.queue)
		case ctx.Err() == nil:
			c.q.fails(c.id, workRescan, f.queue, err)
		}
		// Usually it is not this worker's turn. It asks again at another time of the interval, so that no worker is always
		// too late: only this worker may have a handler for the kinds that wait there.
		cursor.rescanAsked = cursor.rescanAsked.Add(-rand.N(every))
		return false
	}
	var seen []lostJob
	for i := range cursor.places {
		n, lost, err := c.rescanPriority(ctx, cursor.places[i].position)
		if n > 0 {
			cursor.broughtForward(cursor.places[i].priority)
			moved = true
		}
		if err != nil {
			if ctx.Err() == nil {
				c.q.fails(c.id, workRescan, f.queue, err)
			}
			return moved
		}
		seen = append(seen, lost...)
	}
	c.q.works(c.id, workRescan, f.queue)
	f.quarantine.saw(seen)
	ended := time.Now()
	cursor.rescanned = pass{ended, ended.Sub(cursor.rescanAsked)}
	return moved
}

// rescanPriority goes over one priority up to a position, page by page. It returns how many jobs it moved there, and those
// for the quarantine.
func (c *claimer) rescanPriority(ctx context.Context, to position) (moved int, seen []lostJob, err error) {
	f := c.feed
	at := position{to.priority, beginning, 0}
	for ctx.Err() == nil {
		var last *time.Time
		var n int
		var unknown []string
		var ids []int64
		var lost []int32
		err := c.q.guarded(ctx, c.db, rescanPage, []any{f.queue, int16(to.priority), at.runAt, at.id, to.runAt, to.id, c.w.kinds, rescanRows},
			&last, &at.id, &n, &unknown, &ids, &lost)
		if err != nil {
			return moved, seen, err
		}
		moved += n
		for j, id := range ids {
			seen = append(seen, lostJob{id, int(lost[j])})
		}
		c.warnOf(unknown)
		if last == nil {
			break
		}
		at.runAt = *last
	}
	return moved, seen, nil
}

// warnOf logs one warning for each kind without a handler.
func (c *claimer) warnOf(unknown []string) {
	f := c.feed
	for _, kind := range unknown {
		if !f.unknown[kind] {
			f.unknown[kind] = true
			c.q.log.Warn("onceq: jobs of a kind for which this worker has no handler are left to other workers; if no other worker has one, give this worker a handler, or correct Kind.Name if it is misspelt",
				slog.String("queue", f.queue), slog.String("kind", kind), slog.Any("kinds with a handler", c.w.kinds))
		}
	}
}
