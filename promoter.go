package onceq

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	promoteChunk  = 200                    // calls of one slot that one statement takes
	promoteMargin = 10 * time.Second       // calls may become visible that much later than they were due
	promoteBack   = 10                     // rest between two looks that go back by promoteMargin, while calls come all the time: so many times as long as it took, up to briefLongest
	promoteRescan = 2 * time.Second        // how often all calls are looked for, also those that come later still
	promoteLate   = 30 * time.Second       // the same where such a look takes long
	promoteRest   = 20 * time.Millisecond  // longest pause while there was work a moment ago; the shortest while the worker does not wait, so that Enqueue does not wake it, and
	promoteShare  = 50                     // so many times as long as asking for calls takes
	promoteFull   = 250 * time.Millisecond // longest pause that grows while no slot is free and no handler returns
	promoteOld    = 3                      // rest after a look for old calls that let nothing go on: so many times as long as it took, and
	promoteOldMax = 500 * time.Millisecond // no longer
	promoteIdle   = time.Minute            // how often a worker looks none of whose kinds has lanes
	promoteMet    = 10 * time.Minute       // how long it is woken for lanes since it has let in a job of its queues
	promoteAgain  = 100 * time.Millisecond // how soon a lane is looked at again whose next job is locked

	sqlPromoteSoon = `20000`   // microseconds: how soon a limit is looked at again whose rate or whose unclaimed jobs leave no room
	sqlPromoteFull = `2000000` // the longest until that, if nobody claims the jobs
)

// promoter lets jobs into lanes that have room. Any number of workers may have one; only its loop's goroutine, or that of
// Drain, uses it, except the fields that say otherwise. While the worker waits, the claimer's looks ask whether there are
// calls, so that the promoter needs no connection.
type promoter struct {
	q        *Queue
	id       int64         // of the run
	db       *pgxpool.Pool // the worker's own
	listener *listener
	woken    func(queue string)     // called for each queue with a job that became live
	exec     *executor              // starts what is leased at once; nil for Claim
	laned    bool                   // a kind of the worker has lanes
	kinds    []string               // of the worker
	wake     chan struct{}          // holds one: look for calls. Anybody may send
	seen     atomic.Bool            // there were calls, so there are lanes here
	met      atomic.Int64           // when a job of the worker's queues was last let in, since processStart: those that it is woken for may be in lanes. Its loop sets it
	anew     atomic.Bool            // the next look is for all calls. Anybody may set it
	heard    atomic.Pointer[string] // the queue that the worker was woken for, until a look has taken it. Anybody may set it
	again    time.Duration          // how soon a lane is looked at again whose next job is locked
	sees     bool                   // a look sees first whether there are calls, as Claim and Drain need it

	waited bool             // the worker had announced that it waits when this last looked
	looked time.Time        // when it last looked for all calls, or for those of late, by the database's clock
	wide   time.Time        // the same of looks that were not brief; earlier, by promoteMargin at most, if one met another promoter
	onward time.Time        // old calls, which looks have left because there were more than a chunk, are due from this time on; zero: there are none
	old    bool             // the next look is for those
	took   time.Duration    // its latest look
	back   pass             // the latest look for calls of late that was not brief
	came   bool             // the latest look for all calls, or for those of late, found some
	owes   bool             // it found none and was brief: one that is not comes soon
	rescan time.Time        // when it looks for all calls again
	found  time.Time        // when it last found calls
	pause  time.Duration    // how long it rests next while there was work a moment ago; 0 for the shortest
	asked  [2]time.Duration // what it took the latest two times to ask whether there are calls

	doubts  []*successor // what looks whose answers were lost may have leased
	settled time.Time    // when that was last not given back

	full     time.Duration // how long it does not ask while no slot is free and no handler returns
	returned int64         // how many jobs' handlers had ever returned when it last asked
}

func newPromoter(w *Worker, id int64, db *pgxpool.Pool, l *listener, woken func(string)) *promoter {
	p := &promoter{q: w.q, id: id, db: db, listener: l, woken: woken, kinds: w.kinds, wake: make(chan struct{}, 1), again: promoteAgain}
	for _, h := range w.handlers {
		p.laned = p.laned || h.laned
	}
	return p
}

// lately reports whether it has let in a job of its worker's queues in the latest minutes.
func (p *promoter) lately() bool {
	met := p.met.Load()
	return met > 0 && time.Since(processStart)-time.Duration(met) < promoteMet
}

// expects reports whether what the worker is woken for may be in a lane: a kind of it has lanes, or it has met such jobs lately. The
// first job with a lane of its own (Job.Lane) is not expected, and waits for a look.
func (p *promoter) expects() bool { return p.laned || p.lately() }

// rouse ends the promoter's present nap, or the next one. queue is what the worker was woken for, or "". Anybody may call it.
func (p *promoter) rouse(queue string) {
	if !p.expects() {
		return
	}
	if queue != "" {
		p.heard.Store(&queue)
	}
	p.called(false)
}

// first returns what leases the job that the worker was woken for, if it comes into a lane, or nil if that is left to a claim.
func (p *promoter) first() *successor {
	queue := p.heard.Swap(nil)
	if queue == nil || p.exec == nil {
		return nil
	}
	name, looks := moreOf(*queue)
	if n := p.exec.first(*queue); n != nil || looks == 0 {
		return n
	}
	return p.exec.first(name)
}

// called is rouse after a look of the claimer has seen a call. all says that it looked for all calls, also for those that
// came late. Anybody may call it.
func (p *promoter) called(all bool) {
	if all {
		p.anew.Store(true)
	}
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// follows reports whether a look at some feeds asks for calls too: if it is one for what was enqueued just before the worker
// announced that it waits, which may be in a lane.
func (p *promoter) follows(feeds []*feed) bool {
	return p.expects() && slices.ContainsFunc(feeds, func(f *feed) bool { return f.follows })
}

// told is called after the end of jobs that others wait for. Anybody may call it.
func (p *promoter) told() {
	p.seen.Store(true)
	p.called(false)
}

// promoted is what one look found.
type promoted struct {
	calls    int           // that were handled
	jobs     int           // that became live
	busy     bool          // another promoter is at work on some of the calls
	next     time.Duration // until the next call is due; 0: there is none
	more     bool          // there may be calls that were due long ago
	families bool          // a whole family of lanes has to be looked at
	lacks    bool          // rows are missing that are always there (rowsLack)
	cancel   []int64       // jobs that are to be cancelled, because another one that they wait for is dead
}

// loop promotes until ctx ends. Without lanes it begins with what the claimer's first look says: to plan these statements costs
// more than anything else that a worker begins with.
func (p *promoter) loop(ctx context.Context) {
	if !p.laned && !p.hears(ctx, 0) {
		return
	}
	for fails := 0; ; {
		did, err := p.promote(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			wait := min(5*time.Second, 50*time.Millisecond<<min(fails, 10))
			fails++
			p.q.fails(p.id, workPromote, "", err, slog.Duration("next_try_in", wait))
			if !sleep(ctx, wait/2+rand.N(wait), nil) {
				return
			}
			continue
		}
		fails = 0
		p.q.works(p.id, workPromote, "")
		if did.calls > 0 {
			p.seen.Store(true)
			if p.found = time.Now(); did.jobs > 0 {
				p.pause = 0
				continue
			}
		}
		if !p.rest(ctx, did) {
			return
		}
	}
}

// hears waits until the claimer's looks have seen calls, or the worker does not wait after a minute: then the looks may be
// rare. next is when a call is due that it knows of, or 0. It returns false if ctx has ended.
func (p *promoter) hears(ctx context.Context, next time.Duration) bool {
	due := time.Now().Add(next + time.Millisecond)
	for {
		wait := promoteIdle*9/10 + rand.N(promoteIdle/5)
		if next > 0 {
			wait = min(wait, time.Until(due))
		}
		timer := time.NewTimer(wait)
		select {
		case <-p.wake:
			timer.Stop()
			return true
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-timer.C:
			if !p.listener.waits.Load() || next > 0 && !time.Now().Before(due) {
				return true
			}
		}
	}
}

// rest waits until there may be calls. Enqueue wakes a worker that waits for the job's queue, and with it the promoter; a
// look of the claimer finds what nobody was woken for. Where calls let nothing go on, there are often many of them, as when the
// members of a large group end one by one: then they gather for up to promoteRest, whoever wakes it.
func (p *promoter) rest(ctx context.Context, did promoted) bool {
	waits := p.listener.confirmed.Load() && p.listener.waits.Load()
	before := p.waited
	p.waited = waits
	wait := promoteIdle
	switch {
	case did.busy || did.more || p.owes || time.Since(p.found) < 2*promoteRest:
		wake := p.wake
		if did.calls > 0 {
			wake = nil
		}
		pause := max(p.pause, time.Millisecond)
		p.pause = min(2*pause, promoteRest)
		if did.more && !p.old && !sleep(ctx, min(promoteOld*p.took, promoteOldMax), p.wake) { // what it is woken for comes next
			return false
		}
		return sleep(ctx, pause, wake)
	case !p.laned && !p.seen.Load() && len(p.doubts) == 0:
		p.pause = 0
		return p.hears(ctx, did.next) // the looks ask for calls, over a connection that is open
	case !p.laned && !p.seen.Load():
		if waits {
			wait = longestNap
		}
	case p.listener.confirmed.Load() && !waits:
		p.pause = 0
		return p.restBusy(ctx, did)
	case waits && !before:
		wait = 2 * quietFor // a job may have been committed just before the announcement
	default:
		wait = longestNap
	}
	if p.pause = 0; len(p.doubts) > 0 {
		wait = min(wait, time.Second)
	}
	wait = wait*9/10 + rand.N(max(1, wait/5))
	if did.next > 0 {
		wait = min(wait, did.next+time.Millisecond)
	}
	return sleep(ctx, wait, p.wake)
}

// anyCalls asks whether calls have been due since $1.
var anyCalls = `select ` + callsDue("$1")

// callsDue is an expression for that.
func callsDue(since string) string {
	return `exists (select from pg_catalog.generate_series(-1, 15) as s(slot)
                cross join lateral (
                      select due from onceq.lane_calls
                       where slot = s.slot::smallint and due > ` + since + `::timestamptz and due <= statement_timestamp()
                       order by due limit 1) c)`
}

// restBusy is rest while the worker is busy, so that nobody is woken and the claimer looks at nothing: it asks at short
// intervals whether there are calls. While no slot is free and no handler returns, nothing that it lets in could start here, so the
// intervals grow, until it is called or a handler has returned.
func (p *promoter) restBusy(ctx context.Context, did promoted) bool {
	latest := time.Now()
	next := latest.Add(did.next)
	for {
		wait := min(time.Second, max(promoteRest, promoteShare*min(p.asked[0], p.asked[1])))
		wait = wait*9/10 + rand.N(max(1, wait/5))
		if did.next > 0 {
			wait = min(wait, time.Until(next)+time.Millisecond)
		}
		called := false
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-p.wake:
			called = true
		case <-ctx.Done():
			timer.Stop()
			return false
		}
		timer.Stop()
		began := time.Now()
		if did.next > 0 && !began.Before(next) || p.anew.Load() || !began.Before(p.rescan) || p.listener.waits.Load() {
			return true
		}
		full, returned := p.exec.taken()
		switch {
		case called || !full || returned != p.returned:
			p.full = 0
		case began.Sub(latest) < p.full:
			continue
		}
		p.returned, latest, p.full = returned, began, min(max(promoteRest, 2*p.full), promoteFull)
		var due bool
		if err := p.q.queryRow(ctx, p.db, anyCalls, []any{p.wide.Add(-promoteMargin)}, &due); err != nil || due {
			p.full = 0
			return true
		}
		p.asked[0], p.asked[1] = time.Since(began), p.asked[0]
	}
}

// lockCalls finds the slots with calls that are due since $1, and locks those that no other promoter has. It keeps them in a
// setting of the transaction, for promoteCalls. It must be a statement of its own: the lock may have been released between
// this statement's snapshot and its lock, and who counted in this snapshot would count too few.
//
// It returns how many slots have calls and how many it locked, the microseconds until the next call is due, and whether a
// whole family has to be looked at. If $2 is false it locks none.
const lockCalls = `
with due as materialized (
  select s.slot
    from pg_catalog.generate_series(-1, 15) as s(slot)
   cross join lateral (
         select from onceq.lane_calls
          where slot = s.slot::smallint and due > $1::timestamptz and due <= statement_timestamp()
          limit 1) c
),
mine as materialized (
  select l.slot
    from due d cross join lateral (
         select slot from onceq.lane_locks where slot = d.slot::smallint and $2::bool for update skip locked) l
),
next as materialized (
  select pg_catalog.min(c.due) as due
    from pg_catalog.generate_series(-1, 15) as s(slot)
   cross join lateral (
         select due from onceq.lane_calls
          where slot = s.slot::smallint and due > statement_timestamp()
          order by due limit 1) c
)
select pg_catalog.set_config('onceq_lanes.slots', coalesce((select pg_catalog.string_agg(slot::text, ',') from mine), ''), true),
       (select count(*) from due where slot >= 0), (select count(*) from mine),
       coalesce((select extract(epoch from due - statement_timestamp()) * 1e6 from next where due < 'infinity'), 0)::bigint,
       exists (select from due where slot = -1)`

// callsOf deletes the calls of the slots that are due since $1, up to $2 of each.
func callsOf(slots string) string {
	return `call as materialized (
  select c.place, c.lane, s.slot, c.due
    from pg_catalog.unnest(` + slots + `) as s(slot)
   cross join lateral (
         select ctid as place, lane, due from onceq.lane_calls
          where slot = s.slot and due > $1::timestamptz and due <= statement_timestamp()
          order by due
          limit $2::int) c
),
heard as (
  delete from onceq.lane_calls where ctid = any (array(select place from call))
)`
}

// lettingIn has the parts of promoteCalls that choose, for the lanes and limits in called, what goes on there (ours), and lock it.
func lettingIn(called string) string {
	return roomIn(called) + headInLanes + turnsOfLimits + `ours as materialized (
  select ` + oursOfLanes + `  union all
  select ` + oursOfLimits + `
)`
}

// These are its parts: how many jobs the lanes and limits have room for, the next ones in lanes, and of limits, and what is locked of both.
func roomIn(called string) string {
	return `room as materialized (
  select l.lane, least(1000, o.n - live.n) as n
    from ` + called + ` l
   cross join lateral (select ` + limitOf("l.lane") + ` as n offset 0) o
   cross join lateral ` + liveCount("l.lane", "o.n") + ` live
),
`
}

var (
	headInLanes = `head as materialized (
  select w.id, r.lane, r.n
    from (select lane, n from room
           where n > 0 and lane not like '/%' and not exists (select from ` + stopsOf("room.lane") + ` offset 0) offset 0) r` + laneHead + `
),
`
	turnsOfLimits = rates + `,
turn as materialized (
  select w.*, r.lane, r.gap, r.burst, r.kept, r.debt, r.rested
    from (select * from rate where n > 0 offset 0) r` + limitHead + `
),
`
	oursOfLanes = `h.id, h.lane, w.priority, w.run_at, null::timestamptz as slot, w.path is not null as goes_on from head h cross join lateral (
         select path, priority, run_at from onceq.job_waits where id = h.id and lane is not distinct from h.lane and run_at <= statement_timestamp() and not ` + twin("h.id") + ` for update skip locked) w
`
	oursOfLimits = `t.id, t.lane, t.priority, t.run_at, case when t.gap is not null then ` + slotOf + ` end, false
    from (select *, row_number() over (partition by lane order by priority, run_at, id) - 1 as i from turn) t`
)

// What promoteCalls writes of it: how much of each rate is used, and the new calls of lanes, and of limits.
var (
	paidRows = `lane, statement_timestamp() + pg_catalog.ceil(pg_catalog.max(debt) + count(*)::float8 * pg_catalog.max(gap)) * interval '1 microsecond', pg_catalog.max(gap)
    from turn
   where gap is not null
   group by lane`
	againRows = laneSlot("h.lane") + `, statement_timestamp() + case when h.got < h.wanted then $4::bigint else 0 end::float8 * interval '1 microsecond', h.lane
    from (select lane, pg_catalog.count(n) as wanted, count(*) - pg_catalog.count(n) as got
            from (select lane, n from head union all select lane, null from ours) h group by lane) h
   where h.got < h.wanted or h.wanted = 1000`
	laterRows = laneSlot("l.lane") + `, l.due, l.lane
    from (select t.lane, statement_timestamp() + case when t.taken = 1000 then 0 when t.gap is null or t.taken < t.n then $4::bigint
                         when t."full" then least(` + sqlPromoteFull + `, greatest(` + sqlPromoteSoon + `, t.ready::float8 * t.gap / 2::float8, t.idle / 2::float8))
                         when t.rested and t.taken::float8 < t.burst then ` + sqlPromoteSoon + `
                         else greatest(` + sqlPromoteSoon + `, t.debt + ((t.taken + 1)::float8 - (t.burst - t.kept)) * t.gap - ` + sqlSlotAhead + ` / 2::float8) end::float8 * interval '1 microsecond' as due
            from (select lane, pg_catalog.max(room) as room, pg_catalog.max(n) as n, pg_catalog.max(gap) as gap, pg_catalog.max(burst) as burst, pg_catalog.max(kept) as kept, pg_catalog.max(ready) as ready,
                         pg_catalog.max(debt) as debt, pg_catalog.max(idle) as idle, pg_catalog.bool_or(rested) as rested, pg_catalog.bool_or("full") as "full", pg_catalog.count(id) as taken
                    from (select lane, room, n, gap, burst, kept, ready, debt, idle, rested, "full", null::bigint as id from rate
                          union all
                          select lane, null, null, null, null, null, null, null, null, null, null, id from turn) u
                   group by lane) t
           where (t.taken < t.room or t.taken = 1000)
             and t.taken < (select count(*) from (select w.id from ` + dueIn("t.lane", "t.taken + 1") + `) w)) l
   where not exists (select from onceq.lane_calls c
                      where c.slot = ` + laneSlot("l.lane") + ` and c.due > statement_timestamp() and c.due <= l.due and c.lane = l.lane offset 0)`
)

// promoteCalls deletes the calls of the slots that lockCalls locked, and admits up to n minus the live jobs of their lanes.
// Where the next job is locked, or there may be more of them than it takes, it leaves a new call. It returns how many calls
// it handled, how many jobs became live and in which queues, and until when all calls are handled that it was to look for, if
// there may be more.
//
// If one job alone becomes live, and it is of queue $7 and of one of the kinds $8, it is leased for $5 microseconds to holder $6.
// With a null for $7 none is.
var promoteCalls = `
with ` + callsOf(`pg_catalog.string_to_array(pg_catalog.current_setting('onceq_lanes.slots', true), ',')::smallint[]`) + `,
` + lettingIn(`(select distinct lane from call where not `+isFollowLine("lane")+` order by lane)`) + `,
paid as (
  insert into onceq.limit_rates (lane, free_at, gap)
  select ` + paidRows + `
  on conflict (lane) do update set free_at = excluded.free_at, gap = excluded.gap
),` + admitLines(`w.lost = 0 and o.slot is null and w.queue = $7::text and w.kind = any ($8::text[]) and (select count(*) from ours) = 1`, "$5", "$6") + `,
again as (
  insert into onceq.lane_calls (slot, due, lane)
  select ` + againRows + `
),
later as (
  insert into onceq.lane_calls (slot, due, lane)
  select ` + laterRows + `
),
onward as (
  insert into onceq.lane_calls (slot, due, lane)
  select distinct ` + laneSlot("lane") + `, statement_timestamp(), lane from passed
)
select (select count(*) from call), (select count(*) from ours), (select pg_catalog.array_agg(distinct queue) from job where leased_until is null), ` + wakeAll("job where leased_until is null", "$3", "true") + `,
       coalesce(f.went, 0), f.live_queues, f.cancel,
       (select pg_catalog.min(e.due) from (select pg_catalog.max(due) as due from call group by slot having count(*) = $2::int) e),
       case when not exists (select from job where leased_until is not null) then ` + commitSoon + ` end,
       ` + claimedJob + `, 0, ` + cancelSince + `, false, j.lane, j.lane_rule
  from (select pg_catalog.array_agg(distinct lane) as lanes from call where ` + isFollowLine("lane") + `) c
  left join lateral onceq.follow(c.lanes, $3::bigint, $4::bigint) f on true
  left join job j on j.leased_until is not null`

// promote looks once: for all calls, for those that became due lately, or for the old ones that such looks have left, because
// there were more than a chunk. The latter two take turns, so that a lane that has just been called does not wait for a million
// that were called more than promoteMargin ago.
//
// A look steps over the calls that were handled since the time from which it looks, where vacuum has not come by. That is much while
// calls come all the time, above all while somebody holds an old snapshot. So then most looks are brief.
func (p *promoter) promote(ctx context.Context) (did promoted, err error) {
	defer p.settle(ctx)
	began := time.Now()
	full := p.anew.Swap(false) || !began.Before(p.rescan) || p.looked.IsZero()
	old := full || p.old && !p.onward.IsZero()
	brief := !old && p.isBrief(began)
	from := p.onward
	switch {
	case full:
		from = time.Time{}
	case brief:
		from = p.looked.Add(-briefly)
	case !old:
		from = p.wide.Add(-promoteMargin)
	}
	did, now, left, err := p.look(ctx, from, full)
	if err != nil {
		return did, err
	}
	if p.took = time.Since(began); full || !old {
		p.looked, p.came, p.owes = now, did.calls > 0, brief && did.calls == 0
		switch {
		case brief:
		case !did.busy:
			p.wide = now
		case p.wide.Before(now.Add(-promoteMargin)): // the other promoter may not look back as far
			p.wide = now.Add(-promoteMargin)
		}
	}
	if !old && !brief {
		p.back = pass{ended: time.Now(), took: p.took}
	}
	if old || p.onward.IsZero() || !left.IsZero() && left.Before(p.onward) {
		p.onward = left
	}
	p.old = !old
	did.more = !p.onward.IsZero()
	if err := p.q.cancelFollowers(ctx, p.db, did.cancel); err != nil {
		return did, err
	}
	if did.lacks {
		if err := putBack(ctx, p.q, p.db, rare); err != nil {
			return did, err
		}
		did.calls++ // look again, for all calls
		p.called(true)
	}
	if full {
		p.rescan = began.Add(min(max(promoteRescan, 20*time.Since(began)), promoteLate))
	}
	if did.families && ctx.Err() == nil {
		n, err := p.q.lookAtFamilies(ctx, p.db)
		if did.calls += n; err != nil {
			return did, err
		}
	}
	return did, nil
}

// isBrief reports whether a look for calls of late that begins now goes back briefly. One that found no calls is followed
// by one that goes back by promoteMargin.
func (p *promoter) isBrief(began time.Time) bool {
	return p.came && began.Sub(p.back.ended) < min(promoteBack*p.back.took, briefLongest)
}

// promoteInTurn promotes for Claim once a second, whatever it finds: while one lane goes on by itself, others would never begin.
func (q *Queue) promoteInTurn(ctx context.Context) error {
	last, now := q.laneTurn.Load(), int64(time.Since(processStart))
	if last > 0 && now-last < int64(time.Second) || !q.laneTurn.CompareAndSwap(last, now) || last == 0 {
		return nil
	}
	_, err := q.promoteFor(ctx)
	return err
}

// promoteFor promotes for Claim, which has no loop: until no call is left, and at most once a second as long as this process
// knows of no lanes. It returns how many jobs became live.
func (q *Queue) promoteFor(ctx context.Context) (jobs int, err error) {
	last, now := q.laneLook.Load(), int64(time.Since(processStart))
	if last > 0 && now-last < int64(time.Second) {
		return 0, nil
	}
	p := &promoter{q: q, db: q.pool, woken: func(string) {}, again: promoteAgain, sees: true}
	used := last < 0
	for try := 0; try < settleTries; try++ {
		did, err := p.promote(ctx)
		if err != nil {
			return jobs, err
		}
		jobs += did.jobs
		if used = used || did.calls > 0; did.calls == 0 && !did.more {
			break
		}
	}
	if used {
		now = -1
	}
	q.laneLook.Store(now)
	return jobs, nil
}

// commitSoon has a transaction of promoters wait for no disk and no standby. If a crash undoes it, the calls are there again, and
// so are the waiting jobs. It is never undone alone: the claim of such a job waits for its own commit, and so for all before it.
// A transaction that has leased a job waits itself: or a token could come twice.
const commitSoon = `pg_catalog.set_config('synchronous_commit', 'off', true)`

// look takes the calls that are due since from, up to promoteChunk of each slot. If sweeping, it also looks for the ends of jobs that nobody
// tells. It returns the database's time, and from when on calls are left, if there may be more.
func (p *promoter) look(ctx context.Context, from time.Time, sweeping bool) (did promoted, now, left time.Time, err error) {
	if p.q.citus.Load() == citusYes {
		return p.lookInParts(ctx, from, sweeping)
	}
	if p.sees && !p.came {
		var due int
		switch did, due, now, err = p.see(ctx, from, sweeping); {
		case p.q.foundCitus(ctx, p.db, err):
			return p.lookInParts(ctx, from, sweeping)
		case err != nil:
			return promoted{}, now, left, fmt.Errorf("onceq: promote: %w", p.q.told(err))
		case due == 0:
			return did, now, left, nil
		}
		sweeping = false
	}
	var end *time.Time
	var due, mine int
	var next int64
	var followers int
	var queues, live []string
	// The shutdown does not end this at once, and its client cannot either: all of it is one message.
	unbroken, cancel := outlast(ctx, 30*time.Second)
	defer cancel()
	first := p.first()
	defer func() {
		if first.end(err == nil); first != nil && err != nil {
			p.doubts = append(p.doubts, first)
		}
	}()
	var lease, holder int64
	var leases *string
	if first != nil {
		lease, holder, leases = first.x.lease.Microseconds(), first.holder, &first.queue
	}
	batch := p.looking(sweeping, &now, &did)
	batch.Queue(p.q.sql(lockCalls), from, true).Query(row(nil, &due, &mine, &next, &did.families))
	answer := &nextAnswer{n: first, before: []any{&did.calls, &did.jobs, &queues, nil, &followers, &live, &did.cancel, &end, nil}}
	batch.Queue(p.q.sql(promoteCalls), from, promoteChunk, rand.Int64(), p.again.Microseconds(), lease, holder, leases, p.kinds).Query(row(answer))
	batch.Queue("commit")
	switch err := p.db.SendBatch(unbroken, batch).Close(); {
	case p.q.foundCitus(unbroken, p.db, err):
		return p.lookInParts(ctx, from, sweeping)
	case err != nil:
		return promoted{}, now, left, fmt.Errorf("onceq: promote: %w", p.q.told(err))
	}
	if end != nil {
		left = end.Add(-time.Microsecond) // many calls may be due at one time
	}
	did.busy, did.next = due > mine, time.Duration(next)*time.Microsecond
	did.jobs += followers
	for _, queue := range queues {
		if p.exec != nil && p.exec.slots[queue] != nil {
			p.met.Store(int64(time.Since(processStart)))
		}
	}
	for _, queue := range append(queues, live...) {
		p.woken(queue)
	}
	return did, now, left, nil
}

// looking begins the message of a look: its transaction, and what a sweep does.
func (p *promoter) looking(sweeping bool, now *time.Time, did *promoted) *pgx.Batch {
	batch := &pgx.Batch{}
	batch.Queue(beginOwn)
	batch.Queue(hotPlans + `, ` + noLimits).Query(func(rows pgx.Rows) error {
		if err := rows.Err(); err != nil {
			return err // rows that failed have no columns to ask for, and panic
		}
		columns := make([]any, len(rows.FieldDescriptions()))
		if len(columns) > 0 {
			columns[0] = now
		}
		return row(columns...)(rows)
	})
	if sweeping {
		batch.Queue(p.q.sql(sweepMembers))
		batch.Queue(p.q.sql(lacksRows)).Query(row(&did.lacks))
	}
	return batch
}

// see is a look that locks nothing. It returns how many slots have calls that are due. To plan promoteCalls
// takes tens of milliseconds: loop begins when calls have been seen, but Claim and Drain look at once.
func (p *promoter) see(ctx context.Context, from time.Time, sweeping bool) (did promoted, due int, now time.Time, err error) {
	unbroken, cancel := outlast(ctx, 30*time.Second)
	defer cancel()
	var next int64
	batch := p.looking(sweeping, &now, &did)
	batch.Queue(p.q.sql(lockCalls), from, false).Query(row(nil, &due, nil, &next, &did.families))
	batch.Queue("commit")
	err = p.db.SendBatch(unbroken, batch).Close()
	did.next = time.Duration(next) * time.Microsecond
	return did, due, now, err
}

// lockLanes locks all slots, so that nobody counts.
const lockLanes = `select count(*) from (select slot from onceq.lane_locks order by slot for update) l`

// callLanes answers the calls for whole families: each of their lanes that has waiting jobs gets a call, $1
// of them at a time. It locks no slots, because a call says only that somebody has to look. What is left
// gets a call of the family that has the last of these lanes behind a separator, in the same commit, so any
// promoter goes on from there. The end of a family is looked at after the limit of 1: within it, a family
// without waiting jobs would step over all those of the families after it. The family without a name is that
// of all lines (putBack).
//
// It returns how many lanes it has called, and whether settleLimits has something to do.
var callLanes = `
with recursive heard as materialized (
  select ctid as place, lane from onceq.lane_calls
   where slot = -1 and due <= statement_timestamp() and lane not in ('', '?')
   order by due limit 1000 for update skip locked
),
gone as (
  delete from onceq.lane_calls where ctid = any (array(select place from heard))
),
family as materialized (
  select first, pg_catalog.min(after) as after, case when first <> '' then (pg_catalog.left(first, -1) || '0') collate "C" end as last
    from (select pg_catalog.split_part(lane, ` + sqlSep + `, 1) as first,
                 case when pg_catalog.strpos(lane, ` + sqlSep + `) > 0 then pg_catalog.substr(lane, pg_catalog.strpos(lane, ` + sqlSep + `) + 1) else lane end as after
            from heard) h
   where first = '' or ` + isFamilyLine("first") + `
   group by first
),
lane (lane, first, last) as (
  select w.lane, f.first, f.last
    from family f cross join lateral (
         select lane from onceq.job_waits where lane > f.after order by lane limit 1) w
   where f.last is null or w.lane < f.last
  union all
  select w.lane, l.first, l.last
    from lane l cross join lateral (
         select lane from onceq.job_waits where lane > l.lane order by lane limit 1) w
   where l.last is null or w.lane < l.last
),
page as materialized (
  select lane, first from lane limit $1::int
),
calls as (
  insert into onceq.lane_calls (slot, due, lane) select distinct ` + laneSlot("lane") + `, statement_timestamp(), lane from page
  returning 1
),
onward as (
  insert into onceq.lane_calls (slot, due, lane)
  select -1, statement_timestamp(), f.first || ` + sqlSep + ` || coalesce(p.last, f.after)
    from family f left join (select first, pg_catalog.max(lane) as last from page group by first) p on p.first = f.first
   where (select count(*) from page) = $1::int
)
select (select count(*) from calls),
       exists (select from onceq.lane_calls where slot = -1 and due <= statement_timestamp() and lane = '?')`

// settleLimits lets completions hand over again where a limit was lowered and no more jobs are live than it allows. Where a lowered
// limit is still exceeded, this is asked again in a second.
var settleLimits = `
with heard as (
  delete from onceq.lane_calls where slot = -1 and due <= statement_timestamp() and lane = '?'
),
low as materialized (
  select l.lane, coalesce(l.n, case when ` + isFamilyLine("l.lane") + ` then 1 else ` + limitOf("l.lane") + ` end) as n
    from (select lane, n from onceq.lane_limits where lowered order by lane for update skip locked) l
),
reached as materialized (
  select low.lane
    from low
   where case when ` + isFamilyLine("low.lane") + `
              then not exists (select from onceq.lane_places p
                                where p.lane > low.lane and p.lane < pg_catalog.left(low.lane, -1) || '0' and ` + isLive + `
                                  and not exists (select from onceq.lane_limits o where o.lane = p.lane and o.n is not null)
                                group by p.lane having count(*) > low.n)
              else ` + liveCount("low.lane", "low.n") + ` <= low.n end
),
kept as (
  update onceq.lane_limits l set lowered = false from reached r where l.lane = any (array[r.lane]) and l.n is not null
),
removed as (
  delete from onceq.lane_limits l using reached r where l.lane = any (array[r.lane]) and l.n is null
),
again as (
  insert into onceq.lane_calls (slot, due, lane)
  select -1, statement_timestamp() + interval '1 second', '?'
   where exists (select from onceq.lane_limits where lowered and lane not in (select lane from reached))
     and not exists (select from onceq.lane_calls where slot = -1 and lane = '?' and due > statement_timestamp())
)
select 1`

// familyPage is how many lanes of families are called at a time: no more than a look takes (promoteChunk for each slot), so that a
// lane which has just been called does not wait for all of a family.
const familyPage = 2000

// lookAtFamilies answers the calls for whole families, a page at a time, and ends the time in which completions leave lanes to
// the promoters because a limit was lowered. It returns how many lanes it has called.
func (q *Queue) lookAtFamilies(ctx context.Context, db *pgxpool.Pool) (n int, err error) {
	if q.citus.Load() == citusYes {
		return q.lookAtFamiliesInParts(ctx, db)
	}
	var settle bool
	inOne := func(statements func(*pgx.Batch)) error {
		unbroken, cancel := outlast(ctx, time.Minute)
		defer cancel()
		batch := &pgx.Batch{}
		batch.Queue(beginOwn)
		batch.Queue(guardPlans + `, ` + noLimits)
		statements(batch)
		batch.Queue("commit")
		if err := db.SendBatch(unbroken, batch).Close(); err != nil {
			return fmt.Errorf("onceq: promote: %w", q.told(err))
		}
		return nil
	}
	err = inOne(func(batch *pgx.Batch) {
		batch.Queue(q.sql(callLanes), familyPage).Query(row(&n, &settle))
	})
	if err != nil || !settle {
		return n, err
	}
	err = inOne(func(batch *pgx.Batch) {
		batch.Queue(q.sql(lockLanes))
		batch.Queue(q.sql(settleLimits))
	})
	return n, err
}
