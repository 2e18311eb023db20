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

// rescanTurn gives a row to the one worker that may rescan a queue now.
const rescanTurn = `
insert into onceq.queues as q (queue, swept_at) values ($1::text, statement_timestamp())
on conflict (queue) do update set swept_at = excluded.swept_at
 where q.swept_at <= statement_timestamp() - $2::bigint * interval '1 microsecond'
returning 1`

// rescanPage looks at one page of a priority behind a position ($5, $6), from ($3, $4) on. Jobs that nobody
// holds there, because they were committed long after they were due, are brought to the position, where the claims of all
// workers find them. It gives the last place of the page (null for the last page), how many were brought forward, the
// kinds seen that are not in $7, and jobs for the quarantine: those that have lost a lease, or whose lease is over, with how often.
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

// rescan looks at what claims no longer see, because it is before this worker's position (see cursor): at intervals of
// a second or of twenty times what it costs, by one worker a queue at a time. It says whether it brought something forward.
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
		// Not this worker's turn, mostly. It asks again at another time of the second, so
		// that no worker is too late for ever: only this one may have the kinds that wait there.
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

// rescanPriority goes over one priority up to a position, page by page. It gives how many jobs it brought there, and those
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
		for _, kind := range unknown {
			if !f.unknown[kind] {
				f.unknown[kind] = true
				c.q.log.Warn("onceq: jobs of a kind that this worker has no handler for are left to others",
					slog.String("queue", f.queue), slog.String("kind", kind))
			}
		}
		if last == nil {
			break
		}
		at.runAt = *last
	}
	return moved, seen, nil
}
