package stmt

// LookForJobs asks of several queues at once which of them have something to claim after the given places,
// one place for each priority, and which have a delayed job that is due within $6. It changes nothing and is
// sent as it is: one statement and one round trip. Each priority costs one descent of the index, which ends
// at the first job that counts.
//
// It has no settings that guard its plan. Instead, the planner sees that a few entries of the index suffice,
// whatever it believes about the jobs: of a "case" it assumes that every second row passes. And it does not
// see how many queues there are (each array is a select), because for thousands of them it would compile the
// plan.
//
// It also returns what is paused.
//
// With $7 it also says in which of them any job has been due for a second, the shortest lease, if no worker
// has rescanned them within $8, or one has left jobs of these kinds: there may be expired leases, and jobs
// before the places.
const LookForJobs = `
with recent as materialized (
  select queue from onceq.queues
   where $7::bool and rescanned_at > statement_timestamp() - $8::bigint::float8 * interval '1 microsecond'
     and rescanned_at <= statement_timestamp() + interval '1 second'
     and not coalesce(left_kinds operator(pg_catalog.&&) $5::text[], false)
),
seen as materialized (
  select q.n,
         least((select run_at from onceq.jobs
                 where queue = q.queue and priority = -1::smallint and run_at >= q.high
                   and case when run_at > statement_timestamp() then true else leased_until is null and lost = 0 and kind = any ($5::text[]) end
                 order by run_at, id
                 limit 1),
               (select run_at from onceq.jobs
                 where queue = q.queue and priority = 0::smallint and run_at >= q.normal
                   and case when run_at > statement_timestamp() then true else leased_until is null and lost = 0 and kind = any ($5::text[]) end
                 order by run_at, id
                 limit 1),
               (select run_at from onceq.jobs
                 where queue = q.queue and priority = 1::smallint and run_at >= q.low
                   and case when run_at > statement_timestamp() then true else leased_until is null and lost = 0 and kind = any ($5::text[]) end
                 order by run_at, id
                 limit 1)) as next,
         case when not $7::bool then false
              when q.queue in (select queue from recent) then null
              else coalesce((select run_at from onceq.jobs where queue = q.queue and priority = -1::smallint order by run_at, id limit 1) <= statement_timestamp() - interval '1 second', false) or
                   coalesce((select run_at from onceq.jobs where queue = q.queue and priority = 0::smallint order by run_at, id limit 1) <= statement_timestamp() - interval '1 second', false) or
                   coalesce((select run_at from onceq.jobs where queue = q.queue and priority = 1::smallint order by run_at, id limit 1) <= statement_timestamp() - interval '1 second', false) end as behind
    from unnest((select $1::text[]), (select $2::timestamptz[]), (select $3::timestamptz[]), (select $4::timestamptz[])) with ordinality as q(queue, high, normal, low, n)
)
select statement_timestamp(), exists (select from seen where behind is null), array(select n from seen where behind),
       array(select n from seen where next <= statement_timestamp() + $6::bigint::float8 * interval '1 microsecond'),
       array(select greatest(0, extract(epoch from next - statement_timestamp()) * 1e6)::bigint
               from seen where next <= statement_timestamp() + $6::bigint::float8 * interval '1 microsecond'),
       array(select what from onceq.pauses where ` + claimedOf + ` order by name, what),
       array(select name from onceq.pauses where ` + claimedOf + ` order by name, what)`

// LookForCalls is LookForJobs that also asks whether the promoter has calls that have
// been due since $9, and if it asks for all of them, whether there are ends that nobody tells (SweepMembers).
var LookForCalls = LookForJobs + `,
       ` + callsDue("$9") + `
       or $9::timestamptz < '1970-01-01' and exists (select from onceq.job_members where not told)`

// LookForNew asks which queues the jobs are of that were enqueued last, after the id $1, and that can be
// claimed. It costs the same for any number of queues. It also returns the latest id that was drawn.
const LookForNew = `
with new as materialized (
  select queue, kind, run_at, leased_until, lost from onceq.jobs where id > $1::bigint order by id desc limit 1000
)
select coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0),
       array(select distinct queue from new
              where run_at <= statement_timestamp() and leased_until is null and lost = 0 and kind = any ($2::text[]))`
