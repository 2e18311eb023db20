package stmt

import "github.com/onceq/onceq/internal/table"

// liveState is table.JobState for a job of the fence f, also if it waits for its lane.
const liveState = `case when j.id is null and f.state = ` + table.Queued + `
            then (select ` + table.WaitState + ` from onceq.job_waits w where w.id = f.job_id) else ` + table.JobState + ` end`

// InsertFence takes a key that is absent, if the fence is not a job's ($1 = 0) or if the job's lease still
// holds. It reads that without a lock: the handler's own transaction, on another connection, has the job's
// row locked. It is claim_fence, written out.
const InsertFence = `
with ok as materialized (
  select where $1::bigint = 0
      or exists (select from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint)
),
mine as (
  insert into onceq.job_fences (class, scope, key, state, job_id, token, holder, leased_until, created_at, lifetime, fingerprint)
  select $4::smallint, $5::text, $6::text, ` + table.Claimed + `, nullif($1::bigint, 0), pg_catalog.nextval('onceq.ids') << ` + table.TokenBitsSQL + `, $7::bigint,
         statement_timestamp() + $8::bigint::float8 * interval '1 microsecond', statement_timestamp(), $9::bigint, $10::bytea
    from ok
  on conflict do nothing
  returning token, leased_until, created_at, identity
)
select exists (select from ok), m.token, m.leased_until, m.created_at, m.identity
  from (select) one left join mine m on true`

// TakeFence takes over a fence that, under the token that was read ($11), is still free or still in doubt
// ($12), or that is an effect of another job or round ($14): see claim_fence.
const TakeFence = `
select f.holds, f.token, f.until, f.since, f.identity
  from onceq.claim_fence('onceq.ids', $1::bigint, $2::int, $3::bigint, $4::smallint, $5::text, $6::text, $7::bigint, $8::bigint, $9::bigint, $10::bytea,
                         $11::bigint, $12::bool, $13::text, $14::bool, null) f`

const ReadFence = `
select f.state, f.token, f.leased_until, f.created_at, f.identity, f.fingerprint, coalesce(f.result::text, ''), coalesce(f.detail, ''),
       coalesce(` + table.FenceFree + `, false), statement_timestamp(), coalesce(f.job_id, 0), f.finished_at
  from onceq.job_fences f
 where f.class = $1::smallint and f.scope = $2::text and f.key = $3::text`

// HoldFence makes a fence wait for a person if it is still in doubt under the token that was read.
const HoldFence = `
update onceq.job_fences f set state = ` + table.Held + `, detail = coalesce(f.detail, $5::text)
 where f.class = $1::smallint and f.scope = $2::text and f.key = $3::text and f.token = $4::bigint and ` + table.InDoubt + `
returning f.token`
