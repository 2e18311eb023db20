package onceq

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
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
	case putOff:
		return putOffInParts
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
                             payload, payload_bytes, metadata, errors, identity, lane, lane_rule, path)
select j.id, u.run_at, j.created_at, j.claims, least(j.lost, u.most)::smallint, (case when u.reset then 0 else j.attempts + u.spent end)::smallint,
       j.max_attempts, j.priority, j.queue, j.kind, j.scope, j.key, j.payload, j.payload_bytes, j.metadata,
       case when u.error = '' then j.errors else
         case when jsonb_array_length(j.errors) >= 10 then j.errors - 0 else coalesce(j.errors, '[]') end || u.error::jsonb end,
       u.identity, u.line, j.lane_rule, nullif(u.path, '')
  from onceq.jobs j
  join unnest($1::bigint[], $2::int[], $3::bigint[], $4::timestamptz[], $5::int[], $6::bool[], $7::int[], $8::text[], $9::bigint[], $10::text[], $11::text[])
    as u(id, claims, holder, run_at, most, reset, spent, error, identity, line, path) on u.id = j.id and u.claims = j.claims and u.holder = j.holder`

	goneBackApart = `
with gone as (
  delete from onceq.jobs j using unnest($1::bigint[], $2::int[], $3::bigint[]) as u(id, claims, holder)
   where ` + heldByEach + `
  returning j.id
)
select case when (select count(*) from gone) < cardinality($1::bigint[]) then onceq.lease_lost(($1::bigint[])[1]) end`

	// askedApart is the answer for jobs that were given back, with the tokens $3.
	askedApart = `
select null, $3::bigint[],
       (select array_agg(x.job_id)
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
	return p.send(cancelledWaits, []any{h.ids}, read)
}

// hurryApart is hurryWaits without the calls, whose lanes it returns.
var hurryApart = hurryWaits[:strings.Index(hurryWaits, ",\ncall as (")] + `
select count(*), array_agg(distinct lane), statement_timestamp() from hurried`

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

// putOffApart is putOff without the new call. It returns whether that is wanted.
var putOffApart = putOff[:strings.Index(putOff, "\ninsert into")] + `
select exists (select from due) and not ` + calledSoon("$1::text") + `, statement_timestamp()`

func putOffInParts(p *parts, args []any, _ func(pgx.Rows) error) error {
	var call bool
	err := p.send(putOffApart, args, row(&call, &p.now))
	if err == nil && call {
		err = p.call(p.now.Add(time.Minute), args[0].(string))
	}
	return err
}

// readBack says of jobs in the history, which are locked, how they come back. $2 is as $4 of redriveJobs. ledApart gives the groups that
// they are members of.
const ledApart = `select distinct m.group_id from unnest($1::bigint[]) as u(id) cross join lateral (select group_id from onceq.job_members where job_id + 0 = u.id offset 0) m`

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

// alone runs parts in one transaction that holds locks for which others wait, or which they pass over.
func (q *Queue) alone(ctx context.Context, db DB, fn func(p *parts) error) error {
	const settings = `select set_config('idle_in_transaction_session_timeout', '10s', true)`
	return atomically(ctx, db, way{settings: settings}, func(db DB) error {
		p := &parts{ctx: ctx, q: q, db: db}
		if err := p.send(guardNode, nil, noRows); err != nil {
			return err
		}
		return fn(p)
	})
}

// guardNode is guardPlans for the node, whose transaction it begins. What is set on the coordinator is not passed on.
const guardNode = guardPlans + ` from onceq.meta`

// lockApart is lockCalls for slots that are returned.
var lockApart = lockCalls[:strings.Index(lockCalls, "select set_config(")] + `select array(select slot from mine),
       (select count(*) from due where slot >= 0), (select count(*) from mine),
       coalesce((select extract(epoch from due - statement_timestamp()) * 1000000 from next where due < 'infinity'), 0)::bigint,
       exists (select from due where slot = -1), statement_timestamp()`

// takeCalls deletes the calls that are due since $1 in the slots $3, up to $2 of each, and returns them.
const takeCalls = `
with call as materialized (
  select c.place, c.lane, s.slot, c.due
    from unnest($3::smallint[]) as s(slot)
   cross join lateral (
         select ctid as place, lane, due from onceq.lane_calls
          where slot = s.slot and due > $1::timestamptz and due <= statement_timestamp()
          order by due
          limit $2::int) c
),
heard as (
  delete from onceq.lane_calls where ctid = any (array(select place from call))
)
select slot, lane, due from call order by due`

// chooseInLanes and chooseOfLimits choose what goes on in the lanes $1, or in the limits, as promoteCalls does, and lock it. They return the
// jobs that become live, those that go on to the line of their limit, how much of each rate is used, and the calls that are to be left.
// $2 is $4 of promoteCalls. They are two because to plan them takes longer than anything else, on the coordinator and on the node.
var (
	chooseInLanes  = chooseApart(headInLanes, oursOfLanes, noRates, againRows)
	chooseOfLimits = chooseApart(turnsOfLimits, oursOfLimits, paidRows, laterRows)
)

const noRates = `null::text, null::timestamptz, null::float8, null::timestamptz where false`

func chooseApart(next, ours, paid, again string) string {
	by := leasing{many: true}
	live, at := by.inOrder("live")
	goes, then := by.inOrder("goes")
	return `
with ` + roomIn(`(select distinct lane from unnest($1::text[]) as u(lane))`) + next + `ours (id, lane, priority, run_at, slot, goes_on) as materialized (
  select ` + ours + `),
live as materialized (select * from ours where not goes_on),
goes as materialized (select * from ours where goes_on)
select statement_timestamp(), l.*, g.*, p.*, c.*
  from (select array_agg(id), array_agg(queue), array_agg(path), array_agg(at), array_agg(slotted)
          from (select o.id, w.queue, coalesce(w.path, w.lane) as path, case when o.slot > statement_timestamp() then o.slot else o.at end as at, o.slot is not null as slotted
                  from (select id, slot, ` + at + ` as at from ` + live + `) o
                 cross join lateral (select queue, lane, path from onceq.job_waits where id = o.id offset 0) w) o) l
 cross join (select array_agg(id), array_agg(path), array_agg(at)
               from (select o.id, w.path, o.at
                       from (select id, ` + then + ` as at from ` + goes + `) o
                      cross join lateral (select path from onceq.job_waits where id = o.id offset 0) w) o) g
 cross join (select array_agg(lane), array_agg(free_at), array_agg(gap) from (select ` + paid + `) p (lane, free_at, gap, paid_at)) p
 cross join (select array_agg(lane), array_agg(due) from (select ` + strings.ReplaceAll(again, "$4", "$2") + `) a (slot, due, lane)) c`
}

const (
	// liveApart makes jobs live that wait, from the times $2 on, which are slots of a rate where $3 says so.
	liveApart = `
insert into onceq.jobs (id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                        payload, payload_bytes, metadata, errors, identity, lane, lane_rule)
select w.id, u.at, w.created_at, w.claims, w.lost, w.attempts, w.max_attempts, w.priority, w.queue, w.kind, w.scope, w.key,
       w.payload, w.payload_bytes, w.metadata, w.errors, w.identity,
       case when w.path = '' then null when w.path is null then w.lane when u.slotted then w.path || ` + sqlSep + ` || '` + slotMark + `' else w.path end,
       nullif(w.lane_rule, case when w.path = '' then 0 end)
  from onceq.job_waits w join unnest($1::bigint[], $2::timestamptz[], $3::bool[]) as u(id, at, slotted) on u.id = w.id`

	wentApart = `delete from onceq.job_waits where id = any ($1::bigint[])`

	// moveOnApart moves jobs that wait to other lines.
	moveOnApart = `
update onceq.job_waits w set lane = u.line, path = u.path, if_dead = null, run_at = u.at
  from unnest($1::bigint[], $2::text[], $3::text[], $4::timestamptz[]) as u(id, line, path, at)
 where w.id = any (array[u.id])`

	placesApart = `
insert into onceq.lane_places (lane, id)
select u.lane, u.id from onceq.meta, unnest($1::text[], $2::bigint[]) as u(lane, id)
on conflict do nothing`

	paidApart = `
insert into onceq.limit_rates (lane, free_at, gap, paid_at)
select u.lane, u.free_at, u.gap, $4::timestamptz from onceq.meta, unnest($1::text[], $2::timestamptz[], $3::float8[]) as u(lane, free_at, gap)
on conflict (lane) do update set free_at = excluded.free_at, gap = excluded.gap, paid_at = excluded.paid_at`
)

// admitted is what one of these has chosen.
type admitted struct {
	ids           []int64
	queues, paths []string
	at            []time.Time
	slotted       []bool

	goIDs   []int64
	goPaths []string
	goAt    []time.Time

	rates []string
	free  []time.Time
	gaps  []float64

	calls laneCalls
}

// admit lets jobs into the lanes and limits, as promoteCalls does. pause is how soon a lane is looked at again whose next job is locked.
func (p *parts) admit(lines []string, pause time.Duration) (jobs int, queues []string, err error) {
	var lanes, limits []string
	for _, line := range lines {
		switch {
		case strings.HasPrefix(line, lineSep): // for follow
		case strings.HasPrefix(line, "/"):
			limits = append(limits, line)
		default:
			lanes = append(lanes, line)
		}
	}
	for _, some := range []struct {
		statement string
		lines     []string
	}{{chooseInLanes, lanes}, {chooseOfLimits, limits}} {
		if len(some.lines) == 0 {
			continue
		}
		var a admitted
		err := p.send(some.statement, []any{some.lines, pause.Microseconds()}, row(&p.now, &a.ids, &a.queues, &a.paths, &a.at, &a.slotted,
			&a.goIDs, &a.goPaths, &a.goAt, &a.rates, &a.free, &a.gaps, &a.calls.lanes, &a.calls.due))
		if err == nil {
			err = a.write(p)
		}
		if err != nil {
			return 0, nil, err
		}
		jobs, queues = jobs+len(a.ids)+len(a.goIDs), append(queues, a.queues...)
	}
	return jobs, queues, nil
}

// write writes what was chosen.
func (a *admitted) write(p *parts) (err error) {
	var places leaving
	for i, id := range a.ids {
		places.add(id, linesOf(a.paths[i])...)
	}
	lines := make([]string, len(a.goIDs))
	for i, id := range a.goIDs {
		both := linesOf(a.goPaths[i])
		places.add(id, both[0])
		lines[i] = both[1]
		a.calls.add(both[1], p.now)
	}
	if len(a.goIDs) > 0 {
		err = p.send(moveOnApart, []any{a.goIDs, lines, a.goPaths, a.goAt}, noRows)
	}
	if err == nil {
		err = p.live(a.ids, a.at, a.slotted)
	}
	if err == nil && len(places.ids) > 0 {
		err = p.send(placesApart, []any{places.lines, places.ids}, noRows)
	}
	if err == nil && len(a.rates) > 0 {
		err = p.send(paidApart, []any{a.rates, a.free, a.gaps, p.now}, noRows)
	}
	if err == nil {
		err = a.calls.send(p)
	}
	return err
}

// live makes jobs live that wait and are locked.
func (p *parts) live(ids []int64, at []time.Time, slotted []bool) error {
	if len(ids) == 0 {
		return nil
	}
	if err := p.send(liveApart, []any{ids, at, slotted}, noRows); err != nil {
		return err
	}
	return p.send(wentApart, []any{ids}, noRows)
}

// lookInParts is look on Citus.
func (p *promoter) lookInParts(ctx context.Context, from time.Time, sweeping bool, part *some) (did promoted, now, left time.Time, err error) {
	unbroken, cancel := outlast(ctx, 30*time.Second)
	defer cancel()
	var queues []string
	part.locked, part.due, part.lane = false, 0, ""
	err = p.q.alone(unbroken, p.db, func(a *parts) error {
		did, left, queues = promoted{}, time.Time{}, nil
		var slots []int16
		var due, mine int
		var next int64
		if sweeping {
			if err := a.sweep(); err != nil {
				return err
			}
		}
		if err := a.send(lockApart, []any{from}, row(&slots, &due, &mine, &next, &did.families, &now)); err != nil {
			return err
		}
		a.now = now
		part.locked, did.busy, did.next = true, due > mine, time.Duration(next)*time.Microsecond
		if part.slot != anySlot {
			slots = slices.DeleteFunc(slots, func(slot int16) bool { return int(slot) != part.slot })
		}
		if len(slots) == 0 {
			return nil
		}
		lanes, end, err := a.takeCalls(from, part, slots)
		if err != nil || part.due == 0 {
			return err
		}
		left, did.calls = end, part.due
		if did.jobs, queues, err = a.admit(lanes, p.again); err != nil {
			return err
		}
		went, live, cancel, err := a.follow(lanes, p.again)
		did.jobs, queues, did.cancel = did.jobs+went, append(queues, live...), cancel
		return err
	})
	if err != nil {
		return promoted{}, now, time.Time{}, fmt.Errorf("onceq: promote: %w", p.q.told(err))
	}
	slices.Sort(queues)
	for _, queue := range slices.Compact(queues) {
		if p.exec != nil && p.exec.slots[queue] != nil {
			p.met.Store(int64(time.Since(processStart)))
		}
		p.woken(queue)
	}
	return did, now, left, nil
}

// What the function follow does, in parts: lockFollowing locks the jobs that wait for others, notLocked finds those that somebody has
// locked, and lookAtMembers says of the others that have no unfinished member what becomes of them.
const (
	lockFollowing = `
select w.id from unnest($1::text[]) as u(lane) cross join lateral (select id from onceq.job_waits where lane = u.lane for update skip locked) w`

	notLocked = `
select u.lane from unnest($1::text[]) as u(lane) cross join lateral (select id from onceq.job_waits where lane = u.lane offset 0) w
 where coalesce(w.id <> all ($2::bigint[]), true)`
)

var lookAtMembers = `
select u.id, w.lane, coalesce(w.path, ''), w.queue, w.run_at, statement_timestamp(),
       case when s.held or s.dead and w.if_dead = 0 then 'waits'
            when (s.dead or s.cancelled) and w.if_dead = ` + sqlDeadCancel + ` then 'ends'
            when w.path = '' and ` + twin("u.id") + ` then 'blocked'
            when w.path = '' then 'lives'
            else 'queues' end
  from unnest($1::bigint[]) as u(id)
 cross join lateral (select lane, path, queue, run_at, if_dead from onceq.job_waits where id = u.id offset 0) w
 cross join lateral (
       select bool_or(state = ` + sqlJobHeld + `) as held, bool_or(state = ` + sqlJobDead + `) as dead, bool_or(state = ` + sqlJobCancelled + `) as cancelled
         from onceq.job_members where group_id = u.id) s
 where not ` + isOpen("u.id")

// follow is the function follow: it lets jobs go on that wait for others, in those of the lines that are theirs.
func (p *parts) follow(lines []string, pause time.Duration) (went int, queues []string, cancel []int64, err error) {
	lines = slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return !strings.HasPrefix(line, lineSep) })
	if len(lines) == 0 {
		return 0, nil, nil, nil
	}
	if _, err = p.draw(0); err != nil {
		return 0, nil, nil, err
	}
	ids, err := p.ids(lockFollowing, lines)
	if err != nil {
		return 0, nil, nil, err
	}
	var c laneCalls
	err = p.send(notLocked, []any{lines, ids}, each(func(rows pgx.Rows) error {
		var line string
		err := rows.Scan(&line)
		c.add(line, p.now.Add(pause))
		return err
	}))
	if err != nil {
		return 0, nil, nil, err
	}
	var live, pass []int64
	var liveAt, passAt []time.Time
	var passLines []string
	var passPaths []*string
	err = p.send(lookAtMembers, []any{ids}, each(func(rows pgx.Rows) error {
		var id int64
		var line, path, queue, what string
		var runAt time.Time
		if err := rows.Scan(&id, &line, &path, &queue, &runAt, &p.now, &what); err != nil {
			return err
		}
		runAt = latest(runAt, p.now)
		switch what {
		case "lives":
			live, liveAt, queues = append(live, id), append(liveAt, runAt), append(queues, queue)
		case "queues":
			next, full := lineOf(path)
			pass, passAt, passLines, passPaths = append(pass, id), append(passAt, runAt), append(passLines, next), append(passPaths, full)
			c.add(next, runAt)
		case "ends":
			cancel = append(cancel, id)
			c.add(line, p.now.Add(time.Second))
		case "blocked": // another job has its id
			c.add(line, p.now.Add(time.Second))
		}
		return nil
	}))
	if err == nil {
		err = p.live(live, liveAt, make([]bool, len(live)))
	}
	if err == nil && len(pass) > 0 {
		err = p.send(moveOnApart, []any{pass, passLines, passPaths, passAt}, noRows)
	}
	if err == nil {
		err = c.send(p)
	}
	return len(live), queues, cancel, err
}

// takeCalls takes calls of the slots, and returns their lanes, and until when all are taken, if there may be more.
func (p *parts) takeCalls(from time.Time, part *some, slots []int16) (lanes []string, left time.Time, err error) {
	count, last := make(map[int16]int), make(map[int16]time.Time)
	err = p.send(takeCalls, []any{from, part.n, slots}, each(func(rows pgx.Rows) error {
		var slot int16
		var lane string
		var due time.Time
		if err := rows.Scan(&slot, &lane, &due); err != nil {
			return err
		}
		if part.due++; part.due == 1 {
			part.lane = lane
		}
		lanes = append(lanes, lane)
		count[slot]++
		last[slot] = due
		return nil
	}))
	for slot, n := range count {
		if end := last[slot].Add(-time.Microsecond); n == part.n && (left.IsZero() || end.Before(left)) {
			left = end // many calls may be due at one time
		}
	}
	slices.Sort(lanes)
	return slices.Compact(lanes), left, err
}

var (
	// hearApart takes calls of whole families.
	hearApart = `
with heard as materialized (
  select ctid as place, lane from onceq.lane_calls
   where slot = -1 and due <= statement_timestamp() and lane not in ('', '?')
   order by due limit 1000 for update skip locked
),
gone as (
  delete from onceq.lane_calls where ctid = any (array(select place from heard))
)
select array_agg(lane), statement_timestamp() from heard`

	// pageApart finds the first $1 lanes of families that have waiting jobs.
	pageApart = `
with recursive lane (lane, first, last) as (
  select w.lane, f.first, f.last
    from unnest($2::text[], $3::text[], $4::text[]) as f(first, after, last)
   cross join lateral (
         select lane from onceq.job_waits where lane > f.after order by lane limit 1) w
   where f.last is null or w.lane < f.last
  union all
  select w.lane, l.first, l.last
    from lane l cross join lateral (
         select lane from onceq.job_waits where lane > l.lane order by lane limit 1) w
   where l.last is null or w.lane < l.last
)
select lane, first from lane limit $1::int`

	onwardApart = `
insert into onceq.lane_calls (slot, due, lane)
select -1, $1::timestamptz, u.lane from onceq.meta, unnest($2::text[]) as u(lane)`

	putOffAll = `
with put_off as (
  update onceq.lane_calls set due = due + $1::bigint * interval '1 microsecond'
   where slot = -1 and lane = '' and due > statement_timestamp()
)
select 1`

	familiesLeft = `select exists (select from onceq.lane_calls where slot = -1 and due <= statement_timestamp() and lane in ('', '?'))`

	settleApart = settleLimits[:strings.Index(settleLimits, ",\nagain as (")] + `
select exists (select from onceq.lane_limits where lowered and lane not in (select lane from reached))
       and not exists (select from onceq.lane_calls where slot = -1 and lane = '?' and due > statement_timestamp()), statement_timestamp()`

	callAllApart = callAll[:strings.Index(callAll, ",\ncall as (")] + `
select exists (select from due), statement_timestamp()`
)

// callLanes is the statement callLanes.
func (p *parts) callLanes(page int) (n int, settle bool, err error) {
	began := time.Now()
	var heard []string
	if err := p.send(hearApart, nil, row(&heard, &p.now)); err != nil {
		return 0, false, err
	}
	var firsts, afters []string
	var lasts []*string
	all := false
	for _, lane := range heard {
		first, after, further := strings.Cut(lane, lineSep)
		if !further {
			after = lane
		}
		if first != "" && !isFamily(first) {
			continue
		}
		if i := slices.Index(firsts, first); i >= 0 {
			afters[i] = min(afters[i], after)
			continue
		}
		var last *string
		if first != "" {
			end := first[:len(first)-1] + "0"
			last = &end
		}
		firsts, afters, lasts = append(firsts, first), append(afters, after), append(lasts, last)
		all = all || first == ""
	}
	if len(firsts) > 0 {
		lanes := make(map[string]bool)
		reached := slices.Clone(afters)
		read := 0
		err := p.send(pageApart, []any{page, firsts, afters, lasts}, each(func(rows pgx.Rows) error {
			var lane, first string
			err := rows.Scan(&lane, &first)
			i := slices.Index(firsts, first)
			reached[i], lanes[lane] = max(reached[i], lane), true
			read++
			return err
		}))
		if err != nil {
			return 0, false, err
		}
		n = len(lanes)
		var c laneCalls
		for lane := range lanes {
			c.lanes, c.due = append(c.lanes, lane), append(c.due, p.now)
		}
		if err := c.send(p); err != nil {
			return 0, false, err
		}
		if read == page {
			for i := range reached {
				reached[i] = firsts[i] + lineSep + reached[i]
			}
			if err := p.send(onwardApart, []any{p.now, reached}, noRows); err != nil {
				return 0, false, err
			}
		}
		if all && n > 0 {
			if err := p.send(immutable(putOffAll), []any{100 * time.Since(began).Microseconds()}, noRows); err != nil {
				return 0, false, err
			}
		}
	}
	return n, settle, p.send(familiesLeft, nil, row(&settle))
}

// settleLimits is what follows it. It returns whether all lanes were called.
func (p *parts) settleLimits() (all bool, err error) {
	var again bool
	if err = p.send(lockLanes, nil, noRows); err == nil {
		err = p.send(settleApart, nil, row(&again, &p.now))
	}
	if err == nil && again {
		err = p.send(onwardApart, []any{p.now.Add(time.Second), []string{"?"}}, noRows)
	}
	if err == nil {
		err = p.send(forgetStops, nil, noRows)
	}
	if err == nil {
		err = p.send(callAllApart, nil, row(&all, &p.now))
	}
	if err == nil && all {
		err = p.send(onwardApart, []any{p.now, []string{lineSep}}, noRows)
	}
	return all, err
}

// lookAtFamiliesInParts is lookAtFamilies on Citus.
func (q *Queue) lookAtFamiliesInParts(ctx context.Context, db *pgxpool.Pool) (n int, err error) {
	ctx, cancel := outlast(ctx, time.Minute)
	defer cancel()
	var settle, all bool
	err = q.alone(ctx, db, func(p *parts) error {
		n, settle, err = p.callLanes(familyPage)
		return err
	})
	if err == nil && settle {
		err = q.alone(ctx, db, func(p *parts) error {
			all, err = p.settleLimits()
			return err
		})
	}
	if all {
		q.missing.begin()
		n++ // look again, for the call that is there now
	}
	if err != nil {
		return n, fmt.Errorf("onceq: promote: %w", q.told(err))
	}
	return n, nil
}

// reslotApart is reslotJobs without what it writes, which it returns: when the burst is there again, the gap, the time of both, and the
// jobs that get later slots. laterApart gives them these.
var reslotApart = reslotJobs[:strings.Index(reslotJobs, "paid as (")] +
	reslotJobs[strings.Index(reslotJobs, "slot as materialized ("):strings.Index(reslotJobs, ",\nlater as (")] +
	reslotJobs[strings.Index(reslotJobs, "\nselect array(select id from slot"):] + `,
       (select base + ceil(debt + gap * (select count(*) from mine)) * interval '1 microsecond' from rate), (select gap from rate), (select base from rate),
       array(select coalesce(other, id) from change order by id), array(select statement_timestamp() + ahead * interval '1 microsecond' from change order by id)`

const laterApart = `
update onceq.jobs j set run_at = u.at, leased_until = null, holder = null
  from unnest($1::bigint[], $2::timestamptz[]) as u(id, at) where j.id = any (array[u.id])`

// reslotInParts sends lockLine and reslotJobs on Citus. It returns when the slots were computed, at the earliest.
func (q *Queue) reslotInParts(ctx context.Context, db *pgxpool.Pool, args []any, dest ...any) (began time.Time, err error) {
	err = q.alone(ctx, db, func(p *parts) error {
		if err := p.send(lockLine, args[:1], noRows); err != nil {
			return err
		}
		var free, base *time.Time
		var gap *float64
		var later []int64
		var at []time.Time
		began = time.Now()
		if err := p.send(reslotApart, args, row(slices.Concat(dest, []any{&free, &gap, &base, &later, &at})...)); err != nil {
			return err
		}
		if base != nil {
			if err := p.send(paidApart, []any{[]string{args[0].(string)}, []time.Time{*free}, []float64{*gap}, *base}, noRows); err != nil {
				return err
			}
		}
		if len(later) == 0 {
			return nil
		}
		return p.send(laterApart, []any{later, at}, noRows)
	})
	return began, err
}

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
