package stmt

import "github.com/onceq/onceq/internal/table"

const EmitEvent = `select e.first from onceq.emit($1::text, $2::text, $3::text::jsonb, $4::bigint, $5::bigint, $6::bool) as e(first)`

const ThisAwait = `a.job_id = $1::bigint and a.scope = $2::text and a.key = $3::text and a.identity = $4::bigint`

// leaseHolds is not empty if the lease holds. It reads without a lock, as InsertFence.
const leaseHolds = `
with ok as materialized (
  select from onceq.jobs where id = $1::bigint and claims = $5::int and holder = $6::bigint
),`

// BeginAwait is the function begin_await of the schema, whose comment says what it does.
const BeginAwait = `
select b.holds, b.state, b.payload from onceq.begin_await($1::bigint, $2::text, $3::text, $4::bigint, $5::int, $6::bigint, $7::bigint) b`

// EndAwait records that the time-out came before the event, unless Emit has the row.
const EndAwait = leaseHolds + `
free as materialized (
  select a.job_id from onceq.job_awaits a
   where ` + ThisAwait + ` and a.state = ` + table.AwaitOpen + `
     for update skip locked
),
mine as (
  update onceq.job_awaits a set state = ` + table.AwaitTimedOut + `
    from ok, free
   where ` + ThisAwait + `
  returning a.state
)
select exists (select from ok), exists (select from mine)`
