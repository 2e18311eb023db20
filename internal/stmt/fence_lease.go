package stmt

import "github.com/onceq/onceq/internal/table"

// Each statement on behalf of a claim has this guard, whatever the fence's state. If the guard does not hold,
// the statement raises an error, so that a commit after it in the same pipeline fails.
const fenceGuard = `
   where f.class = $2::smallint and f.scope = $3::text and f.key = $4::text and f.token = $5::bigint and f.holder = $6::bigint`

// fenceClock makes the time a column: Citus allows no function of it in a case.
const fenceClock = `
    from (select statement_timestamp() as now) clock`

const fenceRaise = `
  returning 1)
select case when not exists (select from done) then onceq.lease_lost($1::bigint) end`

// CompleteFence completes a fence in any state: a late success counts as long as nobody has taken the fence
// over. A fence that is already completed stays as it is, so that the statement can be repeated after a lost
// answer. $8 says why there is no result although there should be one. $9 is the lifetime, and $10 that of a
// fence whose lease has run out, or which was uncertain or held, or resolved as never applied: others may
// have been told so, and are to find the result when they come back.
const CompleteFence = `
with done as (
  update onceq.job_fences f
     set state = ` + table.Completed + `,
         result = case when f.state = ` + table.Completed + ` then f.result else nullif($7::text, '')::jsonb end,
         detail = case when f.state = ` + table.Completed + ` then f.detail else nullif($8::text, '') end,
         finished_at = case when f.state = ` + table.Completed + ` then f.finished_at when f.class <> ` + table.OfEffect + ` then clock.now end,
         lifetime = case when f.state = ` + table.Completed + ` then f.lifetime
                         when f.state = ` + table.Claimed + ` and (f.leased_until <= clock.now) is not true then $9::bigint else $10::bigint end` + fenceClock + fenceGuard + fenceRaise

// ReleaseFence frees a fence, or makes it uncertain again if it was uncertain when it was claimed.
const ReleaseFence = `
with done as (
  update onceq.job_fences f
     set state = case when f.detail is null then ` + table.Cancelled + ` else ` + table.Uncertain + ` end, holder = null,
         finished_at = case when f.detail is null then clock.now end,
         lifetime = case when f.detail is null then 0 else f.lifetime end` + fenceClock + fenceGuard + ` and f.state = ` + table.Claimed + fenceRaise

const DoubtFence = `
with done as (
  update onceq.job_fences f set state = ` + table.Uncertain + `, detail = $7::text` + fenceGuard + ` and f.state in (` + table.Claimed + `, ` + table.Uncertain + `)` + fenceRaise

// ExtendFence extends the lease; with $8 it also clears the earlier doubt.
const ExtendFence = `
with done as (
  update onceq.job_fences f
     set leased_until = statement_timestamp() + $7::bigint::float8 * interval '1 microsecond',
         detail = case when not $8::bool then f.detail end` + fenceGuard + ` and f.state = ` + table.Claimed + fenceRaise

// EffectScope finds an effect whose job was moved to another queue while the effect was under way (Move). The
// random holder excludes the effect of another job that has the same id in another queue.
const EffectScope = `
select f.scope from onceq.job_fences f
 where f.class = ` + table.OfEffect + ` and f.key = $1::text and f.token = $2::bigint and f.holder = $3::bigint`
