package stmt

// AnyCalls asks whether calls have been due since $1.
var AnyCalls = `select ` + callsDue("$1")

// callsDue is an expression for that.
func callsDue(since string) string {
	return `exists (select from pg_catalog.generate_series(-1, 15) as s(slot)
                cross join lateral (
                      select due from onceq.lane_calls
                       where slot = s.slot::smallint and due > ` + since + `::timestamptz and due <= statement_timestamp()
                       order by due limit 1) c)`
}

// PromoteLines calls the function of the schema that looks for calls and lets jobs in, whose comment says
// how. The job that it has leased comes last.
const PromoteLines = `
select f.looked, f.due, f.mine, f.next, f.families, f.calls, f.upto, f.jobs, f.queues, f.cancel,
       ` + claimedJob + `, 0, ` + cancelSince + `, false, j.lane, j.lane_rule
  from onceq.promote($1::timestamptz, $2::int, $3::bigint, $4::bigint, $5::bigint, $6::bigint, $7::text, $8::text[]) f
  left join lateral (select (f.leased).* offset 0) j on true`

// LockLanes locks all slots, so that nobody counts.
const LockLanes = `select count(*) from (select slot from onceq.lane_locks order by slot for update) l`

// CallFamilies and SettleLimits call functions of the schema.
const (
	CallFamilies = `select f.called, f.settle from onceq.call_families($1::int) f`
	SettleLimits = `select 1 from onceq.settle_limits() f`
)
