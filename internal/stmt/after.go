package stmt

import "github.com/onceq/onceq/internal/table"

// ReadRefs reads the jobs that keys belong to, and the last id that was drawn.
var ReadRefs = refsFrom(lastID)

const lastID = `coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0)`

const ReadSequence = `select ` + lastID

func refsFrom(last string) string {
	return `
select u.n, f.job_id, f.state, coalesce(f.result::text, ''), ` + last + `
  from (select 0::bigint as n, null::text as scope, null::text as key
        union all
        select n, scope, key from unnest($1::text[], $2::text[]) with ordinality as u(scope, key, n)) u
  left join lateral (
       select job_id, state, result from onceq.job_fences f
        where f.class = ` + table.OfJob + ` and f.scope = u.scope and f.key = u.key offset 0) f on true`
}

// InsertMembers writes rows of job_members: of jobs that were enqueued in this transaction, with the mark,
// and of others.
const InsertMembers = `select from onceq.insert_members($1::bigint[], $2::bigint[], $3::bool[], $4::smallint[], $5::text[]) m`

// SweepMembers looks for the ends of members that nobody tells.
const SweepMembers = `select from onceq.sweep_members() m`

// CancelDead cancels followers that end with a dead member.
const CancelDead = `select c.cancelled, c.queues, c.kinds, c.scopes, c.keys from onceq.cancel_followers($1::bigint[], $2::bigint) c`

// CallLater puts off the call that onceq.follow has just written for a follower.
var CallLater = `
update onceq.lane_calls set due = statement_timestamp() + interval '1 minute'
 where slot = ` + table.LaneSlot(table.FollowLine("$1::bigint")) + ` and due <= statement_timestamp() + interval '1 second'
   and lane = ` + table.FollowLine("$1::bigint")
