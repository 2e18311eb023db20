package stmt

// FindLost looks for jobs that have lost a lease, among the first $3 due jobs of each priority of each queue,
// and for kinds that are not in $2. It returns the places of the queues from 1 on.
const FindLost = `
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
