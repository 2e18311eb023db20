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

// What promoters do on Citus, and how a job gets a new slot of a rate. citus_lanes.go says how the parts keep to the bounds.

// alone runs parts in one transaction that holds locks for which others wait, or which they pass over.
func (q *Queue) alone(ctx context.Context, db DB, fn func(p *parts) error) error {
	const settings = `select pg_catalog.set_config('idle_in_transaction_session_timeout', '10s', true)`
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
var lockApart = lockCalls[:strings.Index(lockCalls, "select pg_catalog.set_config(")] + `select array(select slot from mine),
       (select count(*) from due where slot >= 0), (select count(*) from mine),
       coalesce((select extract(epoch from due - statement_timestamp()) * 1e6 from next where due < 'infinity'), 0)::bigint,
       exists (select from due where slot = -1), statement_timestamp()`

// takeCalls deletes the calls that are due since $1 in the slots $3, up to $2 of each, and returns them.
var takeCalls = `
with ` + callsOf("$3::smallint[]") + `
select slot, lane, due from call order by due`

// chooseInLanes and chooseOfLimits choose what goes on in the lanes $1, or in the limits, as promoteCalls does, and lock it. They return the
// jobs that become live, those that go on to the line of their limit, how much of each rate is used, and the calls that are to be left.
// $2 is $4 of promoteCalls. They are two because to plan them takes longer than anything else, on the coordinator and on the node.
var (
	chooseInLanes  = chooseApart(headInLanes, oursOfLanes, noRates, againRows)
	chooseOfLimits = chooseApart(turnsOfLimits, oursOfLimits, paidRows, laterRows)
)

const noRates = `null::text, null::timestamptz, null::float8 where false`

func chooseApart(next, ours, paid, again string) string {
	live, at := inOrder("live")
	goes, then := inOrder("goes")
	return `
with ` + roomIn(`(select distinct lane from pg_catalog.unnest($1::text[]) as u(lane))`) + next + `ours (id, lane, priority, run_at, slot, goes_on) as materialized (
  select ` + ours + `),
live as materialized (select * from ours where not goes_on),
goes as materialized (select * from ours where goes_on)
select statement_timestamp(), l.*, g.*, p.*, c.*
  from (select pg_catalog.array_agg(id), pg_catalog.array_agg(queue), pg_catalog.array_agg(path), pg_catalog.array_agg(at), pg_catalog.array_agg(slotted)
          from (select o.id, w.queue, coalesce(w.path, w.lane) as path, case when o.slot > statement_timestamp() then o.slot else o.at end as at, o.slot is not null as slotted
                  from (select id, slot, ` + at + ` as at from ` + live + `) o
                 cross join lateral (select queue, lane, path from onceq.job_waits where id = o.id offset 0) w) o) l
 cross join (select pg_catalog.array_agg(id), pg_catalog.array_agg(path), pg_catalog.array_agg(at)
               from (select o.id, w.path, o.at
                       from (select id, ` + then + ` as at from ` + goes + `) o
                      cross join lateral (select path from onceq.job_waits where id = o.id offset 0) w) o) g
 cross join (select pg_catalog.array_agg(lane), pg_catalog.array_agg(free_at), pg_catalog.array_agg(gap) from (select ` + paid + `) p (lane, free_at, gap)) p
 cross join (select pg_catalog.array_agg(lane), pg_catalog.array_agg(due) from (select ` + strings.ReplaceAll(again, "$4", "$2") + `) a (slot, due, lane)) c`
}

const (
	// liveApart makes jobs live that wait, from the times $2 on, which are slots of a rate where $3 says so.
	liveApart = `
insert into onceq.jobs (id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                        payload, payload_bytes, metadata, errors, identity, lane, lane_rule, due_at)
select w.id, u.at, w.created_at, w.claims, w.lost, w.attempts, w.max_attempts, w.priority, w.queue, w.kind, w.scope, w.key,
       w.payload, w.payload_bytes, w.metadata, w.errors, w.identity,
       case when w.path = '' then null when w.path is null then w.lane when u.slotted then w.path || ` + sqlSep + ` || '` + slotMark + `' else w.path end,
       nullif(w.lane_rule, case when w.path = '' then 0 end), coalesce(w.due_at, w.run_at)
  from onceq.job_waits w join unnest($1::bigint[], $2::timestamptz[], $3::bool[]) as u(id, at, slotted) on u.id = w.id`

	wentApart = `delete from onceq.job_waits where id = any ($1::bigint[])`

	// moveOnApart moves jobs that wait to other lines.
	moveOnApart = `
update onceq.job_waits w set lane = u.line, path = u.path, if_dead = null, run_at = u.at, due_at = coalesce(w.due_at, w.run_at)
  from unnest($1::bigint[], $2::text[], $3::text[], $4::timestamptz[]) as u(id, line, path, at)
 where w.id = any (array[u.id])`

	placesApart = `
insert into onceq.lane_places (lane, id)
select u.lane, u.id from onceq.meta, unnest($1::text[], $2::bigint[]) as u(lane, id)
on conflict do nothing`

	paidApart = `
insert into onceq.limit_rates (lane, free_at, gap)
select u.lane, u.free_at, u.gap from onceq.meta, unnest($1::text[], $2::timestamptz[], $3::float8[]) as u(lane, free_at, gap)
on conflict (lane) do update set free_at = excluded.free_at, gap = excluded.gap`
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
		err = p.send(paidApart, []any{a.rates, a.free, a.gaps}, noRows)
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
func (p *promoter) lookInParts(ctx context.Context, from time.Time, sweeping bool) (did promoted, now, left time.Time, err error) {
	unbroken, cancel := outlast(ctx, 30*time.Second)
	defer cancel()
	var queues []string
	err = p.q.alone(unbroken, p.db, func(a *parts) error {
		did, left, queues = promoted{}, time.Time{}, nil
		var slots []int16
		var due, mine int
		var next int64
		if sweeping {
			if err := a.sweep(); err != nil {
				return err
			}
			if err := a.send(lacksRows, nil, row(&did.lacks)); err != nil {
				return err
			}
		}
		if err := a.send(lockApart, []any{from, true}, row(&slots, &due, &mine, &next, &did.families, &now)); err != nil {
			return err
		}
		a.now = now
		did.busy, did.next = due > mine, time.Duration(next)*time.Microsecond
		if len(slots) == 0 {
			return nil
		}
		lanes, calls, end, err := a.takeCalls(from, slots)
		if err != nil || calls == 0 {
			return err
		}
		left, did.calls = end, calls
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
select w.id from pg_catalog.unnest($1::text[]) as u(lane) cross join lateral (select id from onceq.job_waits where lane = u.lane for update skip locked) w`

	notLocked = `
select u.lane from pg_catalog.unnest($1::text[]) as u(lane) cross join lateral (select id from onceq.job_waits where lane = u.lane offset 0) w
 where coalesce(w.id <> all ($2::bigint[]), true)`
)

var lookAtMembers = `
select u.id, w.lane, coalesce(w.path, ''), w.queue, w.run_at, statement_timestamp(),
       case when s.held or s.dead and w.if_dead = 0 then 'waits'
            when (s.dead or s.cancelled) and w.if_dead = ` + sqlDeadCancel + ` then 'ends'
            when w.path = '' and ` + twin("u.id") + ` then 'blocked'
            when w.path = '' then 'lives'
            else 'queues' end
  from pg_catalog.unnest($1::bigint[]) as u(id)
 cross join lateral (select lane, path, queue, run_at, if_dead from onceq.job_waits where id = u.id offset 0) w
 cross join lateral (
       select pg_catalog.bool_or(state = ` + sqlJobHeld + `) as held, pg_catalog.bool_or(state = ` + sqlJobDead + `) as dead, pg_catalog.bool_or(state = ` + sqlJobCancelled + `) as cancelled
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

// takeCalls takes calls of the slots, and returns their lanes, how many they were, and until when all are taken, if there may be more.
func (p *parts) takeCalls(from time.Time, slots []int16) (lanes []string, calls int, left time.Time, err error) {
	count, last := make(map[int16]int), make(map[int16]time.Time)
	err = p.send(takeCalls, []any{from, promoteChunk, slots}, each(func(rows pgx.Rows) error {
		var slot int16
		var lane string
		var due time.Time
		if err := rows.Scan(&slot, &lane, &due); err != nil {
			return err
		}
		lanes = append(lanes, lane)
		count[slot]++
		last[slot] = due
		return nil
	}))
	for slot, n := range count {
		if end := last[slot].Add(-time.Microsecond); n == promoteChunk && (left.IsZero() || end.Before(left)) {
			left = end // many calls may be due at one time
		}
	}
	calls = len(lanes)
	slices.Sort(lanes)
	return slices.Compact(lanes), calls, left, err
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
select pg_catalog.array_agg(lane), statement_timestamp() from heard`

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
select -1, $1::timestamptz, u.lane from onceq.meta, pg_catalog.unnest($2::text[]) as u(lane)`

	familiesLeft = `select exists (select from onceq.lane_calls where slot = -1 and due <= statement_timestamp() and lane = '?')`

	settleApart = settleLimits[:strings.Index(settleLimits, ",\nagain as (")] + `
select exists (select from onceq.lane_limits where lowered and lane not in (select lane from reached))
       and not exists (select from onceq.lane_calls where slot = -1 and lane = '?' and due > statement_timestamp()), statement_timestamp()`
)

// callLanes is the statement callLanes.
func (p *parts) callLanes(page int) (n int, settle bool, err error) {
	var heard []string
	if err := p.send(hearApart, nil, row(&heard, &p.now)); err != nil {
		return 0, false, err
	}
	var firsts, afters []string
	var lasts []*string
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
	}
	return n, settle, p.send(familiesLeft, nil, row(&settle))
}

// settleLimits is what follows it.
func (p *parts) settleLimits() (err error) {
	var again bool
	if err = p.send(lockLanes, nil, noRows); err == nil {
		err = p.send(settleApart, nil, row(&again, &p.now))
	}
	if err == nil && again {
		err = p.send(onwardApart, []any{p.now.Add(time.Second), []string{"?"}}, noRows)
	}
	return err
}

// lookAtFamiliesInParts is lookAtFamilies on Citus.
func (q *Queue) lookAtFamiliesInParts(ctx context.Context, db *pgxpool.Pool) (n int, err error) {
	ctx, cancel := outlast(ctx, time.Minute)
	defer cancel()
	var settle bool
	err = q.alone(ctx, db, func(p *parts) error {
		n, settle, err = p.callLanes(familyPage)
		return err
	})
	if err == nil && settle {
		err = q.alone(ctx, db, (*parts).settleLimits)
	}
	if err != nil {
		return n, fmt.Errorf("onceq: promote: %w", q.told(err))
	}
	return n, nil
}

// reslotApart is reslotJobs without what it writes, which it returns: when the burst is there again, the gap, and the jobs
// that get later slots. laterApart gives them these.
var reslotApart = reslotJobs[:strings.Index(reslotJobs, "paid as (")] +
	reslotJobs[strings.Index(reslotJobs, "slot as materialized ("):strings.Index(reslotJobs, ",\nlater as (")] +
	reslotJobs[strings.Index(reslotJobs, "\nselect array(select id from slot"):] + `,
       (select statement_timestamp() + pg_catalog.ceil(debt + gap * (select count(*)::float8 from mine)) * interval '1 microsecond' from rate), (select gap from rate),
       array(select coalesce(other, id) from change order by id), array(select statement_timestamp() + ahead::float8 * interval '1 microsecond' from change order by id)`

const laterApart = `
update onceq.jobs j set run_at = u.at, leased_until = null, holder = null
  from unnest($1::bigint[], $2::timestamptz[]) as u(id, at) where j.id = any (array[u.id])`

// reslotInParts sends lockLine and reslotJobs on Citus. It returns when the slots were computed, at the earliest.
func (q *Queue) reslotInParts(ctx context.Context, db *pgxpool.Pool, args []any, dest ...any) (began time.Time, err error) {
	err = q.alone(ctx, db, func(p *parts) error {
		if err := p.send(lockLine, args[:1], noRows); err != nil {
			return err
		}
		var free *time.Time
		var gap *float64
		var later []int64
		var at []time.Time
		began = time.Now()
		if err := p.send(reslotApart, args, row(slices.Concat(dest, []any{&free, &gap, &later, &at})...)); err != nil {
			return err
		}
		if free != nil {
			if err := p.send(paidApart, []any{[]string{args[0].(string)}, []time.Time{*free}, []float64{*gap}}, noRows); err != nil {
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
