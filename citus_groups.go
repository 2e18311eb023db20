package onceq

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Groups in parts. The functions tell and follow (citus_lanes.go) send one statement after the other, and these are the parts. Each sees what
// was committed before it, as there, and locks in the same order: the jobs, then the rows of those who wait for them if one comes
// back, then job_members. So what decides is still that a job's row is locked by who ends it and by who marks it, and that a
// promoter locks a follower in an earlier part than the one in which it looks at the members.

// groupsApart is apart for the statements of groups.
func groupsApart(statement string) inParts {
	switch statement {
	case readRefs:
		return refsInParts
	case sweepMembers:
		return sweepInParts
	case insertMembers:
		return membersInParts
	case sayDead:
		return sayDeadInParts
	case callLater:
		return callLaterInParts
	}
	return nil
}

// refsApart is readRefs with what the sequence says, which is on the coordinator.
var refsApart = strings.Replace(readRefs, "coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0)", "$3::bigint", 1)

func refsInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	const sequence = `select coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0)`
	var last int64
	if err := p.send(sequence, nil, row(&last)); err != nil {
		return err
	}
	return p.send(refsApart, append(slices.Clone(args), last), read)
}

// membersApart is insertMembers without the insert: it marks the jobs, and returns the rows. rowsApart inserts them.
var (
	membersApart = insertMembers[:strings.Index(insertMembers, ",\nmember as (")] + `
select group_id, job_id, 0, true, null::text from asked where fresh
union all
select group_id, job_id, state, told, result::text
  from (select ` + between(insertMembers, "union all\n  select ", "\n    from seen") + `
          from seen) as s(group_id, job_id, state, told, result)`

	rowsApart = `
insert into onceq.job_members (group_id, job_id, state, told, result)
select group_id, job_id, state, told, nullif(result, '')::jsonb
  from onceq.meta, unnest($1::bigint[], $2::bigint[], $3::smallint[], $4::bool[], $5::text[]) as u(group_id, job_id, state, told, result)
    on conflict do nothing`
)

// between gives what stands between two texts.
func between(s, before, after string) string {
	_, s, _ = strings.Cut(s, before)
	s, _, found := strings.Cut(s, after)
	if !found {
		panic("onceq: there is no " + after)
	}
	return s
}

func membersInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	var groups, jobs []int64
	var states []int16
	var told []bool
	var results []string
	err := p.send(membersApart, args, each(func(rows pgx.Rows) error {
		var group, job int64
		var state int16
		var tells bool
		var result *string
		err := rows.Scan(&group, &job, &state, &tells, &result)
		groups, jobs, states = append(groups, group), append(jobs, job), append(states, state)
		told, results = append(told, tells), append(results, orZero(result))
		return err
	}))
	if err == nil {
		err = p.send(rowsApart, []any{groups, jobs, states, told, results}, noRows)
	}
	if err != nil {
		return err
	}
	return p.send(`select $1::bigint`, []any{len(groups)}, read)
}

// ends are jobs whose ends are told, or that come back, with state 0.
type ends struct {
	ids     []int64
	states  []int16
	results []string
}

func (e *ends) add(id int64, state int16, result string) {
	e.ids, e.states, e.results = append(e.ids, id), append(e.states, state), append(e.results, result)
}

// tell calls the function tell.
func (p *parts) tell(e ends) error {
	if len(e.ids) == 0 {
		return nil
	}
	return p.send(tellMembers, []any{e.ids, e.states, e.results}, noRows)
}

// sweepApart is sweepMembers without the calls, whose lines it returns.
var sweepApart = sweepMembers[:strings.Index(sweepMembers, "),\ncall as (")] + `)
select pg_catalog.array_agg(distinct ` + followLine("group_id") + `), statement_timestamp() from found where state <> 0`

func sweepInParts(p *parts, _ []any, _ func(pgx.Rows) error) error {
	var lines []string
	if err := p.send(sweepApart, nil, row(&lines, &p.now)); err != nil {
		return err
	}
	return p.call(p.now, lines...)
}

// noteDead is sayDead, with the times as JSON.
const noteDead = `
update onceq.job_history h
   set errors = coalesce(h.errors, '[]') || ('[{"at": ' || u.at || ', "attempt": ' || h.attempts::text || ', "error": "a job that it waited for is dead or was cancelled (DeadCancel)"}]')::jsonb,
       if_dead = ` + sqlDeadEnded + `
  from unnest($1::bigint[], $2::text[]) as u(id, at)
 where h.id = any (array[u.id]) and h.state = ` + sqlJobCancelled

func sayDeadInParts(p *parts, args []any, _ func(pgx.Rows) error) error {
	const read = `select id, finished_at from onceq.job_history where id = any ($1::bigint[]) and state = ` + sqlJobCancelled + ` order by id for update`
	var ids []int64
	var times []string
	err := p.send(read, args, each(func(rows pgx.Rows) error {
		var id int64
		var at time.Time
		if err := rows.Scan(&id, &at); err != nil {
			return err
		}
		text, err := json.Marshal(at.Format(time.RFC3339Nano))
		ids, times = append(ids, id), append(times, string(text))
		return err
	}))
	if err != nil {
		return err
	}
	return p.send(noteDead, []any{ids, times}, noRows)
}

// putOffCall is callLater.
var putOffCall = `
update onceq.lane_calls set due = $2::timestamptz
 where slot = ` + laneSlot("$1::text") + ` and due <= $3::timestamptz and lane = $1::text`

func callLaterInParts(p *parts, args []any, _ func(pgx.Rows) error) error {
	if _, err := p.draw(0); err != nil {
		return err
	}
	return p.send(putOffCall, []any{followLineOf(args[0].(int64)), p.now.Add(time.Minute), p.now.Add(time.Second)}, noRows)
}

// toldOfApart locks jobs in the history and returns those whose end others hear of: see discardJobs.
var toldOfApart = `
select id, case when state = ` + sqlJobCompleted + ` then state else ` + sqlJobCancelled + ` end::smallint, coalesce(result::text, ''),
       coalesce(` + isMember + `, false) or exists (select from onceq.job_members m where m.job_id = h.id and not m.told offset 0)
  from onceq.job_history h
 where id = any ($1::bigint[]) and state = any ($2::smallint[])
 order by id
   for update of h`

// tellDiscarded tells the ends of the jobs that discardJobs is to remove.
func (p *parts) tellDiscarded(args []any) (locked []int64, err error) {
	var e ends
	err = p.send(toldOfApart, args, each(func(rows pgx.Rows) error {
		var id int64
		var state int16
		var result string
		var hears bool
		err := rows.Scan(&id, &state, &result, &hears)
		if locked = append(locked, id); hears {
			e.add(id, state, result)
		}
		return err
	}))
	if err != nil {
		return nil, err
	}
	return locked, p.tell(e)
}

// tellBack tells that jobs of the history come back.
func (p *parts) tellBack(ids []int64) error {
	const members = `select id from onceq.job_history where id = any ($1::bigint[]) and ` + isMember + ` order by id`
	back, err := p.ids(members, ids)
	if err != nil {
		return err
	}
	return p.tell(ends{back, make([]int16, len(back)), make([]string, len(back))})
}
