package stmt

import "github.com/onceq/onceq/internal/table"

// CompleteOne completes one job by its guard, and raises an error if the guard does not hold. The fence must
// still be this job's: another job may have taken the key of a dead one.
const CompleteOne = `
with gone as (
  delete from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint
  returning id, scope, key
),
fence as (
  update onceq.job_fences f
     set state = 3, token = $4::bigint, finished_at = statement_timestamp(), result = nullif($5::text, '')::jsonb
    from gone g
   where f.key = any (array[g.key]) and f.scope = g.scope and f.class + 0 = 0 and f.job_id = g.id
)
select case when not exists (select from gone) then onceq.lease_lost($1::bigint) end`

// What the statements below, and others that are not written out, have in common: the guard of one lease; the
// guards of the leases in u; and the fences f of the jobs in g that left, each of which must still be its
// job's. internal/pg/statement.go explains "= any (array[x])" and "+ 0".
const (
	HeldByOne   = `id = $1::bigint and claims = $2::int and holder = $3::bigint`
	HeldByEach  = `j.id = any (array[u.id]) and j.claims = u.claims and j.holder = u.holder`
	FenceOfGone = `f.key = any (array[g.key]) and f.scope = g.scope and f.class + 0 = ` + table.OfJob + ` and f.job_id = g.id`
)

// CompleteOneUnkeyed is the same for a job without a fence.
const CompleteOneUnkeyed = `
with gone as (
  delete from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint
  returning id
)
select case when not exists (select from gone) then onceq.lease_lost($1::bigint) end`

// CompleteJobs completes many jobs by their guards and returns the tokens of those whose guard held. The
// caller sorts them by id, and their rows are locked in this order. With $5 it raises an error if a guard did
// not hold.
const CompleteJobs = `
with u as materialized (
  select * from unnest($1::bigint[], $2::int[], $3::bigint[], $4::text[]) as u(id, claims, holder, result)
),
gone as (
  delete from onceq.jobs j using u
   where j.id = any (array[u.id]) and j.claims = u.claims and j.holder = u.holder
  returning j.id, j.claims, j.scope, j.key, u.result
),
fence as (
  update onceq.job_fences f
     set state = 3, token = g.id << 20 | g.claims::bigint, finished_at = statement_timestamp(), result = nullif(g.result, '')::jsonb
    from gone g
   where g.key is not null and f.key = any (array[g.key]) and f.scope = g.scope and f.class + 0 = 0 and f.job_id = g.id
)
select case when $5::bool and (select count(*) from gone) < pg_catalog.cardinality($1::bigint[]) then onceq.lease_lost(($1::bigint[])[1]) end,
       (select pg_catalog.array_agg(id << 20 | claims::bigint) from gone)`

// FinishJobs ends jobs of any kind in any finished state, and GiveBackJobs gives jobs back that have a lane
// or a limit, or that wait for an event: functions of the schema, whose comments say how. They return the
// tokens of the jobs whose guard held, GiveBackJobs also the ids of those among them that somebody wants
// cancelled.
const (
	FinishJobs = `
select f.tokens
  from onceq.finish($1::bigint[], $2::int[], $3::bigint[], $4::smallint[], $5::text[], $6::text[], $7::int[], $8::bigint[], $9::bool, $10::text::jsonb) as f(tokens)`
	GiveBackJobs = `
select b.tokens, b.cancelled
  from onceq.give_back($1::bigint[], $2::int[], $3::bigint[], $4::text[], $5::int[], $6::bool[], $7::bigint[], $8::int[], $9::bool, $10::text[], $11::text[],
                       $12::text::jsonb) b`

	// TellMembers tells those that wait for jobs how these ended. It follows a short statement that ends them
	// in a handler's transaction.
	TellMembers = `select t.calls from onceq.tell($1::bigint[], $2::smallint[], $3::text[]) as t(calls)`
)

// appendError adds an error (finish.Outcome.note) to a job, of which the latest ten are kept, with its time
// and its attempt.
const appendError = `case when error = '' then errors else
 case when pg_catalog.jsonb_array_length(errors) >= 10 then errors - 0 else coalesce(errors, '[]') end
 || (error::jsonb || pg_catalog.jsonb_build_object('at', statement_timestamp(), 'attempt', attempts + 1)) end`

// RetryJobs makes jobs ready to run again. It returns the tokens of those whose guard held, and the ids of
// those among them that somebody wants cancelled. $8 is how many lost leases at most go on counting
// (lostFrom). With $9 it raises an error if a guard did not hold.
var RetryJobs = `
with u as materialized (
  select * from unnest($1::bigint[], $2::int[], $3::bigint[], $4::text[], $5::int[], $6::bool[], $7::bigint[], $8::int[])
      as u(id, claims, holder, error, spent, reset, delay, most)
),
ready as (
  update onceq.jobs j
     set run_at = statement_timestamp() + u.delay::float8 * interval '1 microsecond', due_at = null, leased_until = null, holder = null,
         attempts = case when u.reset then 0 else attempts + u.spent end,
         lost     = least(lost, u.most),
         identity = case when u.reset then ` + table.IdentityOf("j") + ` + 1 else identity end,
         errors   = ` + appendError + `
    from u
   where ` + HeldByEach + `
  returning j.id, j.claims, j.created_at
)
select case when $9::bool and count(*) < pg_catalog.cardinality($1::bigint[]) then onceq.lease_lost(($1::bigint[])[1]) end,
       pg_catalog.array_agg(ready.id << ` + table.TokenBitsSQL + ` | ready.claims::bigint), pg_catalog.array_agg(x.job_id) filter (where x.job_id is not null)
  from ready left join lateral (select job_id from onceq.job_cancels x where x.job_id = ready.id and x.requested_at >= ready.created_at offset 0) x on true`
