package stmt

import "github.com/onceq/onceq/internal/table"

// WriteCounts calls add_counts, whose comment says what it does.
const WriteCounts = `
select 1 from onceq.add_counts($1::text[], $2::text[], $3::int[], $4::int[], $5::int[], $6::int[], $7::bigint[],
       $8::int[], $9::bigint[], $10::text[], $11::text[]) c`

// ReadDue counts, for each queue, the due jobs that nobody has among the first $1 of each priority, and says
// for how many microseconds the oldest has been due.
const ReadDue = `
with recursive` + table.LiveQueues + `
given as (select $1::int)
select l.queue, pg_catalog.sum(x.due)::bigint,
       pg_catalog.floor(extract(epoch from statement_timestamp() - pg_catalog.min(x.oldest)) * 1e6)::bigint
  from live l
 cross join (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select count(*) as due, pg_catalog.min(j.due_at) as oldest
         from (select coalesce(due_at, run_at) as due_at, leased_until
                 from onceq.jobs
                where queue = l.queue and priority = p.priority and run_at <= statement_timestamp()
                order by run_at, id
                limit $1::int) j
        where j.leased_until is null or j.leased_until <= statement_timestamp()) x
 where l.queue is not null
 group by l.queue
having pg_catalog.sum(x.due) > 0::numeric`
