package stmt

// FinishNext completes a job of a lane and leases the next one, for $6 microseconds to holder $7, if it is of
// queue $8 and of one of the kinds $9: a function of the schema, whose comment says how. The answer has the
// id of the job that completed, or null if its guard did not hold, whether lines were called of which nobody
// hears otherwise, and the job that was leased.
const FinishNext = `
select f.done, f.calls,
       ` + claimedJob + `, 0, ` + cancelSince + `, false, j.lane, j.lane_rule
  from onceq.finish_next($1::bigint, $2::int, $3::bigint, $4::text, $5::bool, $6::bigint, $7::bigint, $8::text, $9::text[]) f
  left join lateral (select (f.leased).* offset 0) j on true`

// GiveBackNext gives back a job of one of the lanes and limits $1 that a completion has leased to holder $2.
const GiveBackNext = `
update onceq.jobs j set leased_until = null, holder = null
  from onceq.lane_places p
 where p.lane = any ($1::text[]) and j.id = any (array[p.id]) and j.holder = $2::bigint`

// GiveBackFirst gives back a job of queue $1 that a promoter has leased to holder $3 in the latest $2
// microseconds. Nobody knows its lane.
const GiveBackFirst = `
update onceq.jobs j set leased_until = null, holder = null
  from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select id from onceq.jobs
        where queue = $1::text and priority = p.priority and run_at > statement_timestamp() - $2::bigint::float8 * interval '1 microsecond'
          and run_at <= statement_timestamp() and holder = $3::bigint
       offset 0) f
 where j.id = any (array[f.id]) and j.holder = $3::bigint`
