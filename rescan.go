package onceq

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	sweepEvery = time.Second
	sweepPage  = 2000
)

// sweepTurn gives a row to the one worker that may look behind the positions now.
const sweepTurn = `
insert into onceq.queues as q (queue, swept_at) values ($1::text, statement_timestamp())
on conflict (queue) do update set swept_at = excluded.swept_at
 where q.swept_at <= statement_timestamp() - $2::bigint * interval '1 microsecond'
returning 1`

// sweepSome looks at one page of a priority behind a position ($5, $6), from ($3, $4) on. Jobs that nobody
// holds there, because they were committed long after they were due, are brought to the position, where the claims of all
// workers find them. It gives the last place of the page (null for the last page), how many were brought forward, the
// kinds seen that are not in $7, and the suspects: jobs that have lost a lease, or whose lease is over, with how often.
const sweepSome = `
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

// lookBehind looks at what claims no longer see, because it is behind this worker's position: at intervals of
// a second or of twenty times what it costs, by one worker a queue at a time. It says whether it brought
// something forward.
func (l *lane) lookBehind(ctx context.Context) bool {
	every := max(sweepEvery, 20*l.sweepTook)
	if time.Since(l.sweptAt) < every {
		return false
	}
	l.sweptAt = time.Now()
	var turn int
	if err := l.q.guarded(ctx, l.side, sweepTurn, []any{l.queue, every.Microseconds()}, &turn); err != nil {
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			l.q.works(l.id, workSuspects, l.queue)
		case ctx.Err() == nil:
			l.q.fails(l.id, workSuspects, l.queue, err)
		}
		// Not this worker's turn, mostly. It asks again at another time of the second, so
		// that no worker is too late for ever: only this one may have the kinds that wait there.
		l.sweptAt = l.sweptAt.Add(-rand.N(every))
		return false
	}
	moved := 0
	var seen []suspect
	for i, p := range l.at {
		at := position{p.priority, beginning, 0}
		for ctx.Err() == nil {
			var last *time.Time
			var n int
			var unknown []string
			var ids []int64
			var lost []int32
			err := l.q.guarded(ctx, l.side, sweepSome, []any{l.queue, int16(p.priority), at.runAt, at.id, p.runAt, p.id, l.kinds, sweepPage},
				&last, &at.id, &n, &unknown, &ids, &lost)
			if err != nil {
				if ctx.Err() == nil {
					l.q.fails(l.id, workSuspects, l.queue, err)
				}
				return moved > 0
			}
			if moved += n; n > 0 {
				l.at[i].id = 0 // the first ones at this place: the next claim begins with them, whether it looks or not
			}
			for j, id := range ids {
				seen = append(seen, suspect{id, int(lost[j])})
			}
			for _, kind := range unknown {
				if !l.unknown[kind] {
					l.unknown[kind] = true
					l.q.log.Warn("onceq: jobs of a kind that this worker has no handler for are left to others",
						slog.String("queue", l.queue), slog.String("kind", kind))
				}
			}
			if last == nil {
				break
			}
			at.runAt = *last
		}
	}
	l.q.works(l.id, workSuspects, l.queue)
	l.saw(seen)
	l.sweepEnded = time.Now()
	l.sweepTook = l.sweepEnded.Sub(l.sweptAt)
	return moved > 0
}
