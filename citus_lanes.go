package onceq

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Lanes, limits and rates on Citus. What ends a job is a function there as everywhere. What promoters do is in parts, under the lock of the
// lane's slot:
//
//   - Each part sees what was committed before it. So a promoter first takes the calls, and then looks: what is committed in between
//     has left a call that it has not taken. One part counts what is live, and chooses and locks what comes next. After that
//     others can only take jobs away.
//   - Rows are locked in the order of the whole statements: jobs, or what waits, by id, then fences, then what belongs to lanes.
//   - All parts are one transaction on one node, so nobody sees a job without its place, or a place that was left without the call.
//
// A promoter, and who wants a new slot, holds locks between two parts. If its process freezes there, the server ends its
// transaction (alone).

// linesApart is apart for the statements of lanes and limits.
func linesApart(statement string) inParts {
	switch statement {
	case insertManyLaned, insertManyLanedTaking:
		return enqueueManyInParts(statement == insertManyLanedTaking)
	case hurryWaits:
		return hurryWaitsInParts
	case discardJobs:
		return discardInParts
	case replaceWaits:
		return replaceInParts
	}
	return nil
}

// callsApart leaves calls of lanes and limits.
var callsApart = `
insert into onceq.lane_calls (slot, due, lane)
select ` + laneSlot("u.lane") + `, u.due, u.lane from onceq.meta, unnest($1::text[], $2::timestamptz[]) as u(lane, due)`

// call leaves a call of each of the lanes.
func (p *parts) call(due time.Time, lanes ...string) error {
	var c laneCalls
	for _, lane := range lanes {
		c.add(lane, due)
	}
	return c.send(p)
}

// laneCalls are calls that are to be left, each once.
type laneCalls struct {
	lanes []string
	due   []time.Time
}

func (c *laneCalls) add(lane string, due time.Time) {
	for i := range c.lanes {
		if c.lanes[i] == lane && c.due[i].Equal(due) {
			return
		}
	}
	c.lanes, c.due = append(c.lanes, lane), append(c.due, due)
}

func (c *laneCalls) send(p *parts) error {
	if len(c.lanes) == 0 {
		return nil
	}
	return p.send(callsApart, []any{c.lanes, c.due}, noRows)
}

// linesOf gives the lane and the limit in a path, those that there are.
func linesOf(path string) (lines []string) {
	lane, rest, _ := strings.Cut(path, lineSep)
	limit, _, _ := strings.Cut(rest, lineSep)
	return slices.DeleteFunc([]string{lane, limit}, func(line string) bool { return line == "" })
}

// withoutSlot is a path as job_waits has it: empty for a lane alone. It is unslotted for one that was read.
func withoutSlot(path string) string {
	if !strings.Contains(path, lineSep) {
		return ""
	}
	return strings.TrimSuffix(path, lineSep+slotMark)
}

// leaving are places of jobs in lines.
type leaving struct {
	lines []string
	ids   []int64
}

func (l *leaving) add(id int64, lines ...string) {
	for _, line := range lines {
		l.lines, l.ids = append(l.lines, line), append(l.ids, id)
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// hurryApart is hurryWaits without the calls, whose lanes it returns.
var hurryApart = hurryWaits[:strings.Index(hurryWaits, ",\ncall as (")] + `
select count(*), pg_catalog.array_agg(distinct lane), statement_timestamp() from hurried`

func hurryWaitsInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	var n int
	var lanes []string
	if err := p.send(hurryApart, args, row(&n, &lanes, &p.now)); err != nil {
		return err
	}
	if err := p.call(p.now, lanes...); err != nil {
		return err
	}
	return p.send(`select $1::bigint`, []any{n}, read)
}

func discardInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	if _, err := p.draw(0); err != nil {
		return err
	}
	locked, err := p.tellDiscarded(args) // one that ends after this part is not in it
	if err != nil {
		return err
	}
	args = append([]any{locked}, args[1:]...)
	var n int
	var lanes []string
	if err := p.send(discardJobs, args, row(&n, &lanes)); err != nil {
		return err
	}
	if err := p.call(p.now, lanes...); err != nil {
		return err
	}
	return p.send(`select $1::bigint, null`, []any{n}, read)
}

// readBack says of jobs in the history, which are locked, how they come back. $2 is as $4 of redriveJobs. ledApart gives the groups that
// they are members of.
const ledApart = `select distinct m.group_id from pg_catalog.unnest($1::bigint[]) as u(id) cross join lateral (select group_id from onceq.job_members where job_id + 0 = u.id offset 0) m`

var readBack = `
select d.id, d.run_at, d.created_at, coalesce(d.lane, ''), d.if_dead,
       coalesce(d.if_dead < ` + sqlDeadEnded + `, false) or ` + isOpen("d.id") + ` or coalesce(d.id = any ($2::bigint[]), false),
       ` + beforeItsTime + ` and d.run_at > statement_timestamp()
  from onceq.job_history d where d.id = any ($1::bigint[])`

// waitsBack inserts jobs from the history into job_waits.
const waitsBack = `
insert into onceq.job_waits (id, run_at, created_at, claims, max_attempts, priority, queue, kind, scope, key,
                             payload, payload_bytes, metadata, errors, identity, lane, lane_rule, path, if_dead)
select d.id, u.run_at, d.created_at, d.claims, d.max_attempts, d.priority, d.queue, d.kind, d.scope, d.key,
       d.payload, d.payload_bytes, d.metadata, d.errors, d.identity, u.line, coalesce(d.lane_rule, 0), u.path, u.if_dead
  from onceq.job_history d join unnest($1::bigint[], $2::timestamptz[], $3::text[], $4::text[], $5::smallint[]) as u(id, run_at, line, path, if_dead) on u.id = d.id`

const unstopApart = `
delete from onceq.lane_stops s using unnest($1::text[], $2::bigint[]) as u(lane, id) where s.lane = any (array[u.lane]) and s.id = u.id`

// comeBack puts jobs of the history that have a lane or a limit, or wait for others, into job_waits. It returns the other ones, those
// of these that come back delayed, and the groups of which members come back.
func (p *parts) comeBack(back, came []int64) (free, early, led []int64, err error) {
	if led, err = p.ids(ledApart, back); err != nil {
		return nil, nil, nil, err
	}
	var w struct {
		ids       []int64
		runAt     []time.Time
		lines     []string
		paths     []*string
		ifDead    []*int16
		stopped   []string
		stoppedBy []int64
	}
	var c laneCalls
	err = p.send(readBack, []any{back, slices.Concat(led, came)}, each(func(rows pgx.Rows) error {
		var id int64
		var runAt, created time.Time
		var lane string
		var ifDead *int16
		var follows, delayed bool
		if err := rows.Scan(&id, &runAt, &created, &lane, &ifDead, &follows, &delayed); err != nil {
			return err
		}
		if lane == "" && !follows {
			free = append(free, id)
			return nil
		}
		if !delayed {
			runAt = created
		} else {
			early = append(early, id)
		}
		path := withoutSlot(lane)
		line, due := "", latest(runAt, p.now)
		if lines := linesOf(lane); len(lines) > 0 {
			line = lines[0]
		}
		if own, _, _ := splitPath(lane); own != "" {
			if w.stopped, w.stoppedBy = append(w.stopped, own), append(w.stoppedBy, id); follows {
				c.add(own, p.now)
			}
		}
		var rule *int16
		full := &path
		switch {
		case follows:
			path = strings.TrimSuffix(lane, lineSep+slotMark)
			line, due = followLineOf(id), p.now
			dead := int16(DeadRun)
			if ifDead != nil {
				dead = min(*ifDead, int16(DeadCancel))
			}
			rule = &dead
		case path == "":
			full = nil
		}
		w.ids, w.runAt, w.lines = append(w.ids, id), append(w.runAt, runAt), append(w.lines, line)
		w.paths, w.ifDead = append(w.paths, full), append(w.ifDead, rule)
		c.add(line, due)
		return nil
	}))
	if err == nil && len(w.ids) > 0 {
		err = p.send(waitsBack, []any{w.ids, w.runAt, w.lines, w.paths, w.ifDead}, noRows)
	}
	if err == nil && len(w.stopped) > 0 {
		err = p.send(unstopApart, []any{w.stopped, w.stoppedBy}, noRows)
	}
	if err == nil {
		err = c.send(p)
	}
	return free, early, led, err
}

// followLineOf is followLine for an id that is known.
func followLineOf(id int64) string { return fmt.Sprintf("%s%019d", lineSep, id) }

// replaceApart is replaceWaits without the calls, which it returns.
var replaceApart = strings.NewReplacer(callsOfReplaced, "", "statement_timestamp() from changed", "statement_timestamp(), timed, run_at, line from changed").Replace(replaceWaits)

func replaceInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	var ids []int64
	var delays []bool
	var called laneCalls
	err := p.send(replaceApart, args, each(func(rows pgx.Rows) error {
		var id int64
		var delayed, timed bool
		var due time.Time
		var line string
		err := rows.Scan(&id, &delayed, &timed, &due, &line)
		if ids, delays = append(ids, id), append(delays, delayed); timed {
			called.add(line, due) // a call may be of a time that is past
		}
		return err
	}))
	if err == nil {
		err = called.send(p)
	}
	if err != nil {
		return err
	}
	const answer = `select * from unnest($1::bigint[], $2::bool[])`
	return p.send(answer, []any{ids, delays}, read)
}

// newWaits is what enqueueManyInParts is told of the jobs that wait. Without lanes none does.
type newWaits struct {
	lanes, paths []string // by job
	rules        []int16  // by header
	ifDead       []*int16
	since        *time.Time // when the call began, if that was said
}

func waitingFor(args []any) (w newWaits) {
	if len(args) > 17 {
		w.lanes, w.rules, w.paths, w.ifDead, w.since = args[17].([]string), args[18].([]int16), args[19].([]string), args[20].([]*int16), args[21].(*time.Time)
	}
	return w
}

// follows reports whether jobs with that header wait for others.
func (w *newWaits) follows(header int) bool { return w.ifDead != nil && w.ifDead[header] != nil }

// line gives the line in which a job begins to wait, and its path there; "" for a job that does not wait.
func (w *newWaits) line(i, header int, id int64) (line string, path *string) {
	if w.lanes == nil || w.lanes[i] == "" {
		return "", nil
	}
	if w.paths != nil {
		path = &w.paths[i]
	}
	switch {
	case w.follows(header):
		return followLineOf(id), path
	case path != nil && *path == "":
		path = nil
	}
	return w.lanes[i], path
}

// foundCitus reports whether a statement failed because the server has Citus, which was not known. It is then sent again, in parts.
func (q *Queue) foundCitus(ctx context.Context, db DB, err error) bool {
	if err == nil || q.citus.Load() != citusUnknown {
		return false
	}
	citus, _ := q.onCitus(ctx, db)
	return citus
}
