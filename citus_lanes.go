package onceq

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Lanes, limits and rates on Citus. What ends a job there hands over to none: it gives back the job's places and leaves calls,
// as it does above READ COMMITTED, and only promoters let jobs in, under the lock of the lane's slot. That is slower for a lane whose
// jobs run one after the other, and leaves nothing to go wrong between the parts:
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
	case completeOneLaned, completeOneLimited:
		return completeLinedInParts
	case endLaned, endLimited:
		return endLinedInParts
	case retryLaned, retryLimited:
		return retryLinedInParts
	case cancelWaits:
		return cancelWaitsInParts
	case hurryWaits:
		return hurryWaitsInParts
	case discardJobs:
		return discardInParts
	case setLimit:
		return setLimitInParts(setApart)
	case removeLimit:
		return setLimitInParts(removeApart)
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

const (
	// leaveApart gives back places.
	leaveApart = `
delete from onceq.lane_places p using unnest($1::text[], $2::bigint[]) as u(lane, id) where p.lane = any (array[u.lane]) and p.id = u.id`

	// stopApart stops lanes.
	stopApart = `
insert into onceq.lane_stops (lane, id)
select u.lane, u.id from onceq.meta, unnest($1::text[], $2::bigint[]) as u(lane, id)
on conflict do nothing`
)

// callApart leaves a call without an answer to wait for: the coordinator says the time.
var callApart = `insert into onceq.lane_calls (slot, due, lane) values (` + laneSlot("$1::text") + `, statement_timestamp(), $1::text)`

// leaving are the places that jobs give back, and the lanes that they stop.
type leaving struct {
	lines, stopped []string
	ids, stoppers  []int64
}

func (l *leaving) add(id int64, lines ...string) {
	for _, line := range lines {
		l.lines, l.ids = append(l.lines, line), append(l.ids, id)
	}
}

// end adds a job that leaves jobs in a finished state.
func (l *leaving) end(id int64, path string, rule int16, state State) {
	l.add(id, linesOf(path)...)
	lane, _, _ := splitPath(path)
	if lane != "" && LaneRule(rule)&StopLane != 0 && (state == StateDead || state == StateHeld) {
		l.stopped, l.stoppers = append(l.stopped, lane), append(l.stoppers, id)
	}
}

// send gives the places back, and tells the promoters.
func (l *leaving) send(p *parts) error {
	if len(l.lines) == 0 {
		return nil
	}
	if err := p.send(leaveApart, []any{l.lines, l.ids}, noRows); err != nil {
		return err
	}
	if len(l.stopped) > 0 {
		if err := p.send(stopApart, []any{l.stopped, l.stoppers}, noRows); err != nil {
			return err
		}
	}
	return p.call(p.now, l.lines...)
}

// leaveParts are the same for one job that is completed, where no part waits for an answer.
func leaveParts(id int64, lines []string) (all []part) {
	if len(lines) == 0 {
		return nil
	}
	ids := make([]int64, len(lines))
	for i, line := range lines {
		ids[i] = id
		all = append(all, part{callApart, []any{line}})
	}
	return append(all, part{leaveApart, []any{lines, ids}})
}

// completionParts are the parts of the job's completion before completeOne, where no part waits for an answer.
func (l *Lease) completionParts(args []any) (all []part) {
	switch {
	case l.member:
		all = toldParts(args)
	case l.keep != 0:
		all = keptParts(args)
	}
	var lines []string
	if l.Lane != "" {
		lines = append(lines, l.Lane)
	}
	if l.Limit != "" {
		lines = append(lines, "/"+l.Limit)
	}
	if len(all) == 0 && len(lines) > 0 {
		all = []part{{lockHeld, []any{[]int64{l.ID}, []int32{args[1].(int32)}, []int64{args[2].(int64)}}}} // before its places
	}
	return append(all, leaveParts(l.ID, lines)...)
}

// lockHeld locks the rows of leased jobs by their guards, and reads what their ends need to know. readHeld does not lock them: they are
// locked by the transaction that is to end them, and it is asked from outside.
const (
	lockHeld = readHeldFrom + `
          for update) j`
	readHeld = readHeldFrom + `
       offset 0) j`

	readHeldFrom = `
with u as materialized (
  select * from unnest($1::bigint[], $2::int[], $3::bigint[]) with ordinality as u(id, claims, holder, n)
)
select u.n, u.id, j.attempts, coalesce(j.lane, ''), coalesce(j.lane_rule, 0), j.created_at, j.identity,
       exists (select from onceq.job_waits w where w.id = u.id), statement_timestamp()
  from u cross join lateral (
       select attempts, lane, lane_rule, created_at, identity from onceq.jobs
        where id = u.id and claims = u.claims and holder = u.holder`
)

// heldJob is one that these have found.
type heldJob struct {
	n, attempts int // n: its place in what was asked, from 0
	id          int64
	path        string
	rule        int16
	created     time.Time
	identity    *int64
	twin        bool // another job with its id is in job_waits
}

// held reads the rows of lockHeld and readHeld, and sets the time.
func (p *parts) held(found *[]heldJob) func(pgx.Rows) error {
	return each(func(rows pgx.Rows) error {
		var h heldJob
		err := rows.Scan(&h.n, &h.id, &h.attempts, &h.path, &h.rule, &h.created, &h.identity, &h.twin, &p.now)
		h.n--
		*found = append(*found, h)
		return err
	})
}

// completeLinedInParts ends one job as many.
func completeLinedInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	end := []any{[]int64{args[0].(int64)}, []int32{args[1].(int32)}, []int64{args[2].(int64)}, []int16{int16(StateCompleted)},
		[]string{args[4].(string)}, []string{""}, []int32{0}, []int64{args[5].(int64)}, true}
	if err := endInParts(p, end, noRows); err != nil {
		return err
	}
	return p.send(`select null`, nil, read)
}

func endLinedInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	var done []int64
	if err := endInParts(p, args[:9], row(nil, &done, nil)); err != nil {
		return err
	}
	return p.send(`select null, $1::bigint[], null, null`, []any{done}, read)
}

// endLined is endTx for jobs of which some have lanes or limits. It asks db for their lanes, because their rows are locked.
func (q *Queue) endLined(ctx context.Context, db DB, end part) (all []part, last part, err error) {
	args := end.args
	told := end.statement == completeOneLimitedTold || end.statement == endLimitedTold
	one := end.statement == completeOneLaned || end.statement == completeOneLimited || end.statement == completeOneLimitedTold
	guard := args[:3]
	if one {
		guard = []any{[]int64{args[0].(int64)}, []int32{args[1].(int32)}, []int64{args[2].(int64)}}
	}
	p := &parts{ctx: ctx, q: q, db: db}
	var jobs []heldJob
	if err := p.send(readHeld, guard, p.held(&jobs)); err != nil {
		return nil, part{}, err
	}
	if end.statement == retryLaned || end.statement == retryLimited {
		return q.retryTx(ctx, db, p.now, args, jobs)
	}
	locked := []part{{lockHeld, guard}} // before their places
	for _, j := range jobs {
		all = append(all, leaveParts(j.id, linesOf(j.path))...)
	}
	if one {
		switch {
		case told:
			all = append(toldParts(args), all...)
		case args[5].(int64) != 0:
			all = append(keptParts(args), all...)
		}
		return append(locked, all...), part{completeOne, args[:5]}, nil
	}
	ended := part{endJobs, args[:9]}
	if told {
		ended.statement = endTold
	}
	kept, last, err := q.endTx(ctx, db, ended)
	return slices.Concat(locked, kept, all), last, err
}

// backApart puts jobs that are not finished into job_waits, and goneBackApart takes these out of jobs.
const (
	backApart = `
insert into onceq.job_waits (id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                             payload, payload_bytes, metadata, errors, identity, lane, lane_rule, path, due_at)
select j.id, u.run_at, j.created_at, j.claims, least(j.lost, u.most)::smallint, (case when u.reset then 0 else j.attempts + u.spent end)::smallint,
       j.max_attempts, j.priority, j.queue, j.kind, j.scope, j.key, j.payload, j.payload_bytes, j.metadata,
       case when u.error = '' then j.errors else
         case when pg_catalog.jsonb_array_length(j.errors) >= 10 then j.errors - 0 else coalesce(j.errors, '[]') end || u.error::jsonb end,
       u.identity, u.line, j.lane_rule, nullif(u.path, ''), case when u.run_at < statement_timestamp() then statement_timestamp() end
  from onceq.jobs j
  join unnest($1::bigint[], $2::int[], $3::bigint[], $4::timestamptz[], $5::int[], $6::bool[], $7::int[], $8::text[], $9::bigint[], $10::text[], $11::text[])
    as u(id, claims, holder, run_at, most, reset, spent, error, identity, line, path) on u.id = j.id and u.claims = j.claims and u.holder = j.holder`

	goneBackApart = `
with gone as (
  delete from onceq.jobs j using unnest($1::bigint[], $2::int[], $3::bigint[]) as u(id, claims, holder)
   where ` + heldByEach + `
  returning j.id
)
select case when (select count(*) from gone) < pg_catalog.cardinality($1::bigint[]) then onceq.lease_lost(($1::bigint[])[1]) end`

	// askedApart is the answer for jobs that were given back, with the tokens $3.
	askedApart = `
select null, $3::bigint[],
       (select pg_catalog.array_agg(x.job_id)
          from unnest($1::bigint[], $2::timestamptz[]) as u(id, created_at)
         cross join lateral (select job_id from onceq.job_cancels where job_id = u.id and requested_at >= u.created_at offset 0) x), null`
)

// goingBack are jobs that are given back: those that wait again, and the places in what was asked of those that stay in jobs.
type goingBack struct {
	ids, holders      []int64
	claims            []int32
	runAt             []time.Time
	most, spent       []int32
	reset             []bool
	errs, lines, path []string
	identity          []int64

	leave  leaving
	calls  laneCalls
	stay   []int
	asked  []int64 // all of them, with
	since  []time.Time
	tokens []int64
}

// goBack says what retryLaned and retryLimited do with the jobs.
func goBack(now time.Time, args []any, jobs []heldJob) (b goingBack, err error) {
	claims, holders, errs, spent := args[1].([]int32), args[2].([]int64), args[3].([]string), args[4].([]int32)
	resets, delays, most := args[5].([]bool), args[6].([]int64), args[7].([]int32)
	for _, j := range jobs {
		n := j.n
		b.asked, b.since, b.tokens = append(b.asked, j.id), append(b.since, j.created), append(b.tokens, j.id<<tokenBits|int64(claims[n]))
		lane, limit, _ := splitPath(j.path)
		overtaken := LaneRule(j.rule)&Overtake != 0 && delays[n] > 0
		if limit == "" && !overtaken || j.twin {
			b.stay = append(b.stay, n)
			continue
		}
		runAt := j.created
		if limit == "" || delays[n] > 0 {
			runAt = now.Add(time.Duration(delays[n]) * time.Microsecond)
		}
		line, path, lines := lane, withoutSlot(j.path), linesOf(j.path)
		if lane == "" || !overtaken {
			line, lines = "/"+limit, lines[len(lines)-1:]
		}
		identity := j.created.UnixMicro()
		if j.identity != nil {
			identity = *j.identity
		}
		if resets[n] {
			identity++
		}
		note, err := errorNote(now, j.attempts, errs[n])
		if err != nil {
			return b, err
		}
		b.ids, b.claims, b.holders = append(b.ids, j.id), append(b.claims, claims[n]), append(b.holders, holders[n])
		b.runAt, b.most, b.spent, b.reset = append(b.runAt, runAt), append(b.most, most[n]), append(b.spent, spent[n]), append(b.reset, resets[n])
		b.errs, b.lines, b.path, b.identity = append(b.errs, note), append(b.lines, line), append(b.path, path), append(b.identity, identity)
		b.leave.add(j.id, lines...)
		if runAt.Before(now.Add(longestCalled)) {
			b.calls.add(line, latest(runAt, now))
		}
	}
	return b, nil
}

// longestCalled is sqlForever.
const longestCalled = 36000 * 24 * time.Hour

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// waiting are the parts that put those that wait again into job_waits, and take them out of jobs.
func (b *goingBack) waiting() []part {
	if len(b.ids) == 0 {
		return nil
	}
	return []part{
		{backApart, []any{b.ids, b.claims, b.holders, b.runAt, b.most, b.reset, b.spent, b.errs, b.identity, b.lines, b.path}},
		{goneBackApart, []any{b.ids, b.claims, b.holders}},
	}
}

// staying are the arguments of retryJobs for those that stay.
func (b *goingBack) staying(args []any) []any {
	return []any{chosen(args[0].([]int64), b.stay), chosen(args[1].([]int32), b.stay), chosen(args[2].([]int64), b.stay), chosen(args[3].([]string), b.stay),
		chosen(args[4].([]int32), b.stay), chosen(args[5].([]bool), b.stay), chosen(args[6].([]int64), b.stay), chosen(args[7].([]int32), b.stay), args[8]}
}

// chosen gives the elements at the places.
func chosen[T any](all []T, places []int) []T {
	these := make([]T, len(places))
	for i, n := range places {
		these[i] = all[n]
	}
	return these
}

func retryLinedInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	var jobs []heldJob
	if err := p.send(lockHeld, args[:3], p.held(&jobs)); err != nil {
		return err
	}
	if ids := args[0].([]int64); args[8].(bool) && len(jobs) < len(ids) {
		return p.send(`select onceq.lease_lost($1::bigint)`, []any{ids[0]}, row(nil))
	}
	b, err := goBack(p.now, args, jobs)
	if err != nil {
		return err
	}
	for _, s := range b.waiting() {
		if err := p.send(s.statement, s.args, noRows); err != nil {
			return err
		}
	}
	if len(b.stay) > 0 {
		if err := p.send(retryJobs, b.staying(args), noRows); err != nil {
			return err
		}
	}
	if err := b.calls.send(p); err != nil {
		return err
	}
	if err := b.leave.send(p); err != nil {
		return err
	}
	return p.send(askedApart, []any{b.asked, b.since, b.tokens}, read)
}

// retryTx is that at the end of a handler's transaction.
func (q *Queue) retryTx(ctx context.Context, db DB, now time.Time, args []any, jobs []heldJob) (all []part, last part, err error) {
	b, err := goBack(now, args, jobs)
	if err != nil {
		return nil, part{}, err
	}
	if ids := args[0].([]int64); len(jobs) < len(ids) {
		return nil, part{`select onceq.lease_lost($1::bigint)`, []any{ids[0]}}, nil
	}
	all = b.waiting()
	if len(b.stay) > 0 {
		statement, more, err := q.onOneNode(ctx, db, retryJobs, b.staying(args))
		if err != nil {
			return nil, part{}, err
		}
		all = append(all, part{statement, more})
	}
	if len(b.calls.lanes) > 0 {
		all = append(all, part{callsApart, []any{b.calls.lanes, b.calls.due}})
	}
	for i, line := range b.leave.lines {
		all = append(all, leaveParts(b.leave.ids[i], []string{line})...)
	}
	return all, part{askedApart, []any{b.asked, b.since, b.tokens}}, nil
}

// historyOfWaits is historyApart for jobs that wait.
var historyOfWaits = strings.NewReplacer("from onceq.jobs j", "from onceq.job_waits j", "lane, lane_rule)\nselect", "lane, lane_rule, if_dead)\nselect",
	"j.lane, j.lane_rule\n", "nullif(coalesce(j.path, j.lane), ''), j.lane_rule, j.if_dead\n").Replace(historyApart)

// cancelledWaits is cancelledApart for jobs that wait.
var cancelledWaits = strings.Replace(cancelledApart, "delete from onceq.jobs", "delete from onceq.job_waits", 1)

func cancelWaitsInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	const lock = `
select id, lane, coalesce(path, ''), ` + isMember + `, statement_timestamp() from onceq.job_waits
 where id = any ($1::bigint[]) and (not $2::bool or id in (select job_id from onceq.job_cancels))
 order by id
   for update skip locked`
	h := history{p: p, statement: historyOfWaits}
	var l leaving
	var told ends
	err := p.send(lock, []any{args[0], args[2]}, each(func(rows pgx.Rows) error {
		var id int64
		var line, path string
		var member bool
		if err := rows.Scan(&id, &line, &path, &member, &p.now); err != nil {
			return err
		}
		if member {
			told.add(id, int16(StateCancelled), "")
		}
		if lane, _, _ := splitPath(path); lane != "" && strings.HasPrefix(line, "/") {
			l.add(id, lane)
		}
		return h.add(id, int16(StateCancelled), "", "", 0, args[1].(int64), 0)
	}))
	if err == nil {
		err = h.write()
	}
	if err == nil {
		err = l.send(p)
	}
	if err == nil {
		err = p.tell(told)
	}
	if err != nil {
		return err
	}
	return p.send(cancelledWaits, []any{h.ids, args[3]}, read)
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

// callLimit leaves the calls of a limit that was set.
const callLimit = `
insert into onceq.lane_calls (slot, due, lane)
select u.slot, $3::timestamptz, u.lane from onceq.meta, unnest(array[$2::smallint, -1], array[$1::text, '?']) as u(slot, lane)`

func setLimitInParts(limit string) inParts {
	return func(p *parts, args []any, read func(pgx.Rows) error) error {
		if _, err := p.draw(0); err != nil {
			return err
		}
		own := []any{args[0]}
		if limit == setApart {
			own = append(own, args[2:]...)
		}
		if err := p.send(limit, own, noRows); err != nil {
			return err
		}
		if err := p.send(callLimit, []any{args[0], args[1], p.now}, noRows); err != nil {
			return err
		}
		return p.send(`select 1`, nil, read)
	}
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

// callsOthers reports whether the job's end lets nobody in, and the promoter has to be told.
func (l *Lease) callsOthers() bool { return l.lined() && l.q.citus.Load() == citusYes }
