package onceqops

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/table"
)

// What Health says of kinds whose handlers fail.

// readFailing reads the queues and kinds of which, in the last hour and since the last minute in which more attempts were completed than
// failed, at least $1 have failed, or all, which are three or more: how many, how many were completed, and the commonest of their jobs'
// latest errors. Numbers in errors do not make them different. It looks for errors at 300 jobs of each priority that are due, at 300 that
// come next, and at 300 dead ones. A kind of which nothing has ended for ten minutes, and of which no error is found, is left out.
const readFailing = `
with counted as materialized (
  select queue, kind, minute, completed, failed + dead as bad,
         pg_catalog.max(minute) filter (where completed > failed + dead) over (partition by queue, kind) as good
    from onceq.job_counts
   where span = 1 and minute >= statement_timestamp() - interval '1 hour'
),
failing as materialized (
  select queue, kind, pg_catalog.min(minute) filter (where bad > 0) as since, pg_catalog.max(minute) as latest, pg_catalog.sum(bad)::bigint as bad, pg_catalog.sum(completed)::bigint as completed
    from counted
   where good is null or minute > good
   group by queue, kind
  having pg_catalog.sum(bad) >= case when pg_catalog.sum(completed) = 0 then 3 else $1::int end
   order by pg_catalog.sum(bad) desc, queue, kind
   limit 20
)
select f.queue, f.kind, f.since, f.bad, f.completed, coalesce(e.text, ''), coalesce(e.n, 0), coalesce(e.looked, 0)
  from failing f
  left join lateral (
       select pg_catalog.min(text) as text, count(*) as n, pg_catalog.sum(count(*)) over ()::bigint as looked
         from (select pg_catalog.left(j.errors -> -1 ->> 'error'::text, 300) as text
                 from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                cross join lateral (
                      (select kind, errors from onceq.jobs
                        where queue = f.queue and priority = p.priority and run_at > statement_timestamp() order by run_at, id limit 300)
                      union all
                      (select kind, errors from onceq.jobs
                        where queue = f.queue and priority = p.priority and run_at <= statement_timestamp() order by run_at, id limit 300)) j
                where j.kind = f.kind
               union all
               select pg_catalog.left(h.errors -> -1 ->> 'error'::text, 300)
                 from (select kind, errors from onceq.job_history
                        where queue = f.queue and state = ` + table.JobDead + ` order by id desc limit 300) h
                where h.kind = f.kind) e
        where text <> ''
        group by pg_catalog.regexp_replace(text, '[0-9]+', '#', 'g')
        order by 2 desc, 1
        limit 1) e on true
 where e.n > 0 or f.latest >= statement_timestamp() - interval '10 minutes'
 order by f.bad desc, f.queue, f.kind`

// failing looks for kinds of which half of the attempts fail, or more.
func (x *examination) failing(ctx context.Context) error {
	return x.each(ctx, readFailing, []any{failingFrom}, func(rows pgx.Rows) error {
		f := Finding{What: "failing", Advice: "mend what the error says; the jobs then run when their next attempt is due, and Retry makes that now. Dead ones need a redrive"}
		var bad, done, n, looked int
		if err := rows.Scan(&f.Queue, &f.Kind, &f.Since, &bad, &done, &f.Error, &n, &looked); err != nil {
			return err
		}
		f.Since = f.Since.Truncate(time.Minute)
		f.Detail = fmt.Sprintf("of %d attempts at jobs of kind %q in queue %q since %s, %d have failed (%d%%)",
			bad+done, f.Kind, f.Queue, table.Stamp(f.Since), bad, 100*bad/(bad+done))
		if done == 0 {
			f.Detail, f.Severe = f.Detail+", and none was completed", bad >= failingFrom
		}
		if n > 0 {
			f.Detail += fmt.Sprintf("; the commonest error, of %d of %d jobs that were looked at: %s", n, looked, f.Error)
		}
		x.found = append(x.found, f)
		return nil
	})
}
