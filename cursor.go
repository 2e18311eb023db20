package onceq

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// A cursor says where the next claim of a queue begins. The jobs of one priority are in the order of (due time, id):
//
//	beginning               position - overlap          position            now
//	    |---------------------- rescan ---------------------|
//	                                 |------ overlap -------|---- claims ------|
//
// Claims take what is due after the position and move the position forward. So the dead entries of claimed jobs cost
// nothing, even while an old snapshot keeps vacuum from removing them. Jobs before the position that nobody holds are found
// again:
//
//   - A job is due from its Enqueue statement and not from its commit, so jobs appear in the overlap. A claim that looks
//     back begins at the start of the overlap. In a priority that is caught up (the latest claim came to its end) every
//     claim looks back; in one that is not (there is a backlog), claims look back at intervals of at least 50 times what
//     that costs.
//   - While an old snapshot is held, looking back steps over every job that was done in the overlap. So it goes no further
//     back than the recent jobs. The whole overlap is searched at intervals of a second or of 50 times what that costs,
//     unless this worker has just rescanned everything.
//   - The rescan finds jobs that were committed even later, and expired leases. At intervals one worker of the
//     queue brings jobs that nobody holds to the position, and finds those for the quarantine (quarantine.go).
//
// Only these move a position:
//
//   - claimed: to the last job that the claim took, or in a priority whose end it reached, to the database's time just
//     before the claim.
//   - broughtForward: to the first id of its due time, where the rescan has put jobs.
//   - a claim that finds the database's clock set back by more than a second: back to that time, because what is due is
//     before the old position.
//   - restart, for Drain: to the beginning.
//
// What always holds:
//
//   - Every due job after the position is found by the next claim that is large enough.
//   - A claim that looks back begins at the first job of a due time and never within one, because jobs that were brought
//     forward are the first at their due time.
//   - The overlap is never longer than the constant overlap, and shorter only if there are many recent jobs.
//   - A position is never later than the database's clock by more than a second.
//
// The cursor is plain data. Only its claimer's goroutine uses it.
type cursor struct {
	places [PriorityLow - PriorityHigh + 1]place // by priority, highest first
	claims int                                   // how many claims have begun
	full   bool                                  // the latest claim took as many jobs as it was allowed: there are more
	upTo   time.Time                             // the database's clock just before the latest claim

	looked, lookedWhole, rescanned pass

	rescanAsked time.Time // when this worker asked for the turn to rescan, or counts as having asked
}

// place is how far a claimer has come within one priority.
type place struct {
	position
	recent   recentJobs
	caughtUp bool // the latest claim came to the end of the priority
}

// position is a point in the order of one priority's jobs: a claim begins after it.
type position struct {
	priority Priority
	runAt    time.Time
	id       int64
}

func (p position) after(q position) bool {
	return p.runAt.After(q.runAt) || p.runAt.Equal(q.runAt) && p.id > q.id
}

// pass is the latest run of something that is repeated, by this process's clock.
type pass struct {
	ended time.Time
	took  time.Duration
}

// beginning is not after any due time that Enqueue accepts.
var beginning = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)

func fromStart() []position {
	p := make([]position, 0, PriorityLow-PriorityHigh+1)
	for prio := PriorityHigh; prio <= PriorityLow; prio++ {
		p = append(p, position{priority: prio, runAt: beginning})
	}
	return p
}

func newCursor() (c cursor) {
	c.restart()
	return c
}

// restart moves all positions to the beginning.
func (c *cursor) restart() {
	for i, p := range fromStart() {
		c.places[i].position = p
	}
}

const (
	// overlap is how far before the position claims look back.
	overlap = 5 * time.Second

	// lowestEvery: one in so many claims begins with the lowest priority, so that this does not starve.
	lowestEvery = 8

	rescanEvery = time.Second
)

// look is how far back a claim begins.
type look int

const (
	lookOnward look = iota // from the position, except in a priority that is caught up
	lookRecent             // from the recent jobs
	lookWhole              // from the start of the whole overlap
)

// begin returns where a claim that begins now starts in each priority, in the order in which it searches them.
func (c *cursor) begin(now time.Time) (from []position, how look) {
	if !c.full || now.Sub(c.looked.ended) > max(100*time.Millisecond, 50*c.looked.took) {
		how = lookRecent
		if now.Sub(c.rescanned.ended) > 2*rescanEvery && now.Sub(c.lookedWhole.ended) > max(time.Second, 50*c.lookedWhole.took) {
			how = lookWhole
		}
	}
	from = c.from(how)
	if c.claims++; c.claims%lowestEvery == 0 {
		slices.Reverse(from)
	}
	return from, how
}

// from returns where a claim starts in each priority, highest first.
func (c *cursor) from(how look) []position {
	from := make([]position, len(c.places))
	for i := range c.places {
		at, p := &c.places[i], &from[i]
		*p = at.position
		if how == lookOnward && !at.caughtUp {
			continue
		}
		if p.id = 0; p.runAt.After(beginning) {
			p.runAt = p.runAt.Add(-overlap)
			if start := at.recent.start(); how != lookWhole && start.After(p.runAt) {
				p.runAt = start
			}
		}
	}
	return from
}

// claimed records what a claim returned that ran from began to ended.
func (c *cursor) claimed(ask *claim, leases []*Lease, how look, began, ended time.Time) {
	c.upTo, c.full = ask.now, len(leases) == ask.limit
	if how >= lookRecent {
		c.looked = pass{ended, ended.Sub(began)}
	}
	if how == lookWhole {
		c.lookedWhole = c.looked
	}
	c.advance(ask, leases)
}

// advance moves the positions past what was claimed. In a priority that was searched to its end, the position moves to the
// database's time just before the claim.
func (c *cursor) advance(ask *claim, leases []*Lease) {
	complete := len(ask.from) // how many of the priorities were searched to their end
	if c.full {
		complete = 0
		if len(leases) > 0 {
			last := leases[len(leases)-1]
			complete = slices.IndexFunc(ask.from, func(p position) bool { return p.priority == last.Priority })
		}
	}
	to := func(p position) *place {
		at := c.place(p.priority)
		if p.after(at.position) {
			at.position = p
		}
		return at
	}
	for _, lease := range leases {
		to(position{lease.Priority, lease.RunAt, lease.ID}).recent.add(lease.RunAt)
	}
	for i, p := range ask.from {
		switch {
		case i < complete:
			to(position{p.priority, ask.now, 0}).caughtUp = true
		case i == complete:
			c.place(p.priority).caughtUp = false
		}
	}
	// If the database's clock was set back, or another server with another clock took over, what is due is before the
	// position.
	for i := range c.places {
		if at := &c.places[i]; at.runAt.Sub(ask.now) > time.Second {
			at.runAt, at.id = ask.now, 0
			at.recent = recentJobs{}
		}
	}
}

func (c *cursor) place(p Priority) *place { return &c.places[p-PriorityHigh] }

// broughtForward records that the rescan has moved jobs to the due time of the position: the next claim begins with them,
// whether it looks back or not.
func (c *cursor) broughtForward(p Priority) { c.place(p).id = 0 }

// rescanInterval is the interval between the rescans of a queue, by any worker.
func (c *cursor) rescanInterval() time.Duration { return max(rescanEvery, 20*c.rescanned.took) }

// recentJobs remembers the due times of the latest jobs that were claimed in a priority, in steps.
type recentJobs struct {
	first [8]time.Time // the earliest due time of each of the latest steps
	count int
}

const recentStep = 4096 // jobs

func (r *recentJobs) add(runAt time.Time) {
	first := &r.first[r.count/recentStep%len(r.first)]
	if r.count%recentStep == 0 || first.After(runAt) {
		*first = runAt
	}
	r.count++
}

// start is the earliest due time of the latest 7 to 8 steps, and zero while there were fewer.
func (r *recentJobs) start() time.Time { return slices.MinFunc(r.first[:], time.Time.Compare) }

const rescanRows = 2000 // in one page

// rescanTurn returns a row to the one worker that may rescan a queue now.
const rescanTurn = `
insert into onceq.queues as q (queue, rescanned_at) values ($1::text, statement_timestamp())
on conflict (queue) do update set rescanned_at = excluded.rescanned_at
 where q.rescanned_at <= statement_timestamp() - $2::bigint * interval '1 microsecond'
returning 1`

// rescanPage looks at one page of a priority before a position ($5, $6), starting after ($3, $4). Jobs there that nobody
// holds, because they were committed long after they were due, are moved to the position, where the claims of all workers
// find them. It returns the last place of the page (null for the last page), how many jobs were moved, the kinds that are
// not in $7, and the jobs for the quarantine, which have lost a lease or whose lease has expired, with how many they have
// lost.
const rescanPage = `
with page as materialized (
  select id, run_at, leased_until, lost, kind, row_number() over (order by run_at, id) as n
    from onceq.jobs
   where queue = $1::text and priority = $2::smallint
     and (run_at, id) > ($3::timestamptz, $4::bigint) and (run_at, id) < ($5::timestamptz, $6::bigint)
   order by run_at, id
   limit $8::int
),
ready as materialized (
  select j.id
    from page p
   cross join lateral (
         select id from onceq.jobs
          where id = p.id and leased_until is null
            for no key update skip locked) j
   where p.leased_until is null and p.lost = 0 and p.kind = any ($7::text[])
   order by j.id
),
forward as (
  update onceq.jobs j set run_at = $5::timestamptz
    from ready where j.id = any (array[ready.id])
  returning j.id
),
lost as materialized (
  select id, lost + (leased_until is not null)::int as lost
    from page
   where (leased_until <= statement_timestamp() or leased_until is null and lost > 0) and kind = any ($7::text[])
   order by n
)
select (select run_at from page where n = $8::int), coalesce((select id from page where n = $8::int), 0),
       (select count(*) from forward),
       array(select distinct kind from page where kind <> all ($7::text[])),
       (select array_agg(id) from lost), (select array_agg(lost) from lost)`

// rescan looks at the jobs that claims no longer find because they are before this worker's position (see cursor). It runs
// at intervals of a second or of twenty times what it costs, in one worker of a queue at a time. It reports whether it
// moved jobs to the position.
func (c *claimer) rescan(ctx context.Context) (moved bool) {
	f, cursor := c.feed, &c.feed.cursor
	every := cursor.rescanInterval()
	if time.Since(cursor.rescanAsked) < every {
		return false
	}
	cursor.rescanAsked = time.Now()
	var turn int
	if err := c.q.guarded(ctx, c.db, rescanTurn, []any{f.queue, every.Microseconds()}, &turn); err != nil {
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			c.q.works(c.id, workRescan, f.queue)
		case ctx.Err() == nil:
			c.q.fails(c.id, workRescan, f.queue, err)
		}
		// Usually it is not this worker's turn. It asks again at another time of the interval, so that no worker is always
		// too late: only this worker may have a handler for the kinds that wait there.
		cursor.rescanAsked = cursor.rescanAsked.Add(-rand.N(every))
		return false
	}
	var seen []lostJob
	for i := range cursor.places {
		n, lost, err := c.rescanPriority(ctx, cursor.places[i].position)
		if n > 0 {
			cursor.broughtForward(cursor.places[i].priority)
			moved = true
		}
		if err != nil {
			if ctx.Err() == nil {
				c.q.fails(c.id, workRescan, f.queue, err)
			}
			return moved
		}
		seen = append(seen, lost...)
	}
	c.q.works(c.id, workRescan, f.queue)
	f.quarantine.saw(seen)
	ended := time.Now()
	cursor.rescanned = pass{ended, ended.Sub(cursor.rescanAsked)}
	return moved
}

// rescanPriority goes over one priority up to a position, page by page. It returns how many jobs it moved there, and those
// for the quarantine.
func (c *claimer) rescanPriority(ctx context.Context, to position) (moved int, seen []lostJob, err error) {
	f := c.feed
	at := position{to.priority, beginning, 0}
	for ctx.Err() == nil {
		var last *time.Time
		var n int
		var unknown []string
		var ids []int64
		var lost []int32
		err := c.q.guarded(ctx, c.db, rescanPage, []any{f.queue, int16(to.priority), at.runAt, at.id, to.runAt, to.id, f.kinds, rescanRows},
			&last, &at.id, &n, &unknown, &ids, &lost)
		if err != nil {
			return moved, seen, err
		}
		moved += n
		for j, id := range ids {
			seen = append(seen, lostJob{id, int(lost[j])})
		}
		c.warnOf(unknown)
		if last == nil {
			break
		}
		at.runAt = *last
	}
	return moved, seen, nil
}

// warnOf logs one warning for each kind without a handler.
func (c *claimer) warnOf(unknown []string) {
	f := c.feed
	for _, kind := range unknown {
		if !f.unknown[kind] && c.w.handlers[kind] == nil { // a kind with a handler is paused
			f.unknown[kind] = true
			c.q.log.Warn("onceq: jobs of a kind for which this worker has no handler are left to other workers; if no other worker has one, give this worker a handler, or correct Kind.Name if it is misspelt",
				slog.String("queue", f.queue), slog.String("kind", kind), slog.Any("kinds with a handler", c.w.kinds))
		}
	}
}
