package onceq

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// The rescan finds the jobs that claims no longer find because they are before this worker's position (see cursor), and
// those for the quarantine. It begins with a look that says in which queues any job is due: usually in none, and that is all.
// Otherwise one worker at a time takes these queues, and a second one if that leaves something to kinds of its own: a glance at several leaves those out in which all jobs run, and it goes
// over the others in pages, so that claims come in between.
//
// What a rescan finds is for the worker that does it, so one without a free handler leaves the turn to others. Where no worker has
// one, what a rescan would find has to wait anyway, and who has a free handler again rescans within a second or two.
type rescans struct {
	known   time.Time        // when the table queues was last made to have this worker's queues; zero: it may not
	asked   time.Time        // when this worker looked whether any job is due, or counts as having looked
	looks   [2]time.Duration // what the latest two looks took that said in which queues any job is due
	pages   [2]time.Duration // what the glances and pages of the latest two rescans took, without the waits between them
	spent   time.Duration    // and of the one under way
	feeds   []*feed          // still to be gone over
	granted bool             // it is this worker's turn in these
	glanced int              // at so many of them, the first ones
	notYet  time.Time        // the queues are not made known before this time, because that failed

	// Where the rescan of the first of feeds is.
	priority int // index of cursor.places
	at       position
	lost     []lostJob // found there
	others   []string  // kinds of other workers that have something to do there
}

// interval is the time between two rescans, by any of the workers that take turns. One that was slow may have had to wait for
// something, so what counts is the faster one of two.
func (r *rescans) interval() time.Duration {
	return max(rescanEvery, aHundredth*min(r.looks[0], r.looks[1]), aTwentieth*min(r.pages[0], r.pages[1]))
}

// due reports whether this worker may rescan, if no other one has.
func (r *rescans) due(now time.Time) bool {
	return len(r.feeds) == 0 && now.Sub(r.asked) >= r.interval()
}

// addQueues makes queues known: to those who ask for all (Stats), and to those who take turns.
const addQueues = `
insert into onceq.queues (queue, rescanned_at)
select u.queue, 'epoch' from onceq.meta, pg_catalog.unnest($1::text[]) as u(queue) order by u.queue collate "C"
on conflict do nothing`

// rescanTurn returns those of the given queues that this worker may rescan now, for some interval and these kinds: see rescan_turn.
const rescanTurn = `select q from onceq.rescan_turn($1::text[], $2::bigint, $3::text[]) r cross join pg_catalog.unnest(r) q`

// rescanLeft says for which kinds that this worker does not have there is something to do. Without it, a kind that few of many
// workers have would wait until the turn comes to one of these.
const rescanLeft = `
update onceq.queues set left_kinds = $2::text[] where queue = $1::text
   and coalesce(left_kinds operator(pg_catalog.<>) $2::text[], (left_kinds is null) <> ($2::text[] is null))`

// rescanFirst says in which of several queues there may be something for the rescan: among the first jobs of a priority before
// the position is one that nobody holds or whose lease has expired, or there are more than these. It returns the places of the
// queues from 1 on.
const rescanFirst = `
select q.n
  from unnest($1::text[], $2::timestamptz[], $3::bigint[], $4::timestamptz[], $5::bigint[], $6::timestamptz[], $7::bigint[])
       with ordinality as q(queue, high_at, high_id, normal_at, normal_id, low_at, low_id, n)
 where exists (
       select from (values (-1::smallint, q.high_at, q.high_id), (0::smallint, q.normal_at, q.normal_id), (1::smallint, q.low_at, q.low_id))
              as p(priority, run_at, id)
        cross join lateral (
              select count(*) as n, pg_catalog.bool_or(leased_until is null or leased_until <= statement_timestamp()) as found
                from (select leased_until
                        from onceq.jobs
                       where queue = q.queue and priority = p.priority and (run_at, id) < (p.run_at, p.id)
                       order by run_at, id
                       limit 100) j) first
        where first.found or first.n = 100)
 order by q.n`

// rescanPage looks at one page of a priority before a position ($5, $6), starting after ($3, $4). Jobs there that nobody
// holds, because they were committed long after they were due, are moved to the position, where this worker's next
// claim finds them, and other workers' where they begin. It returns the last place of the page (null for the last page), how many
// jobs were moved, the kinds that are not in $7 and those of them with jobs for the quarantine, and the jobs for this worker's
// quarantine, which have lost a lease or whose lease has expired, with how many they have lost.
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
  select j.id, case when j.slotted then least($5::timestamptz, ` + table.SlotMissed + `) else $5::timestamptz end as due
    from page p
   cross join lateral (
         select id, run_at, (` + table.HasSlot + `) is true as slotted
           from onceq.jobs
          where id = p.id and leased_until is null
            for no key update skip locked) j
   where p.leased_until is null and p.lost = 0 and p.kind = any ($7::text[])
     and (not j.slotted or j.run_at < least($5::timestamptz, ` + table.SlotMissed + `) - interval '1 second')
   order by j.id
),
forward as (
  update onceq.jobs j set run_at = ready.due
    from ready
   where j.id = any (array[ready.id])
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
       array(select distinct kind from page
              where kind <> all ($7::text[]) and (leased_until <= statement_timestamp() or leased_until is null and lost > 0)),
       (select pg_catalog.array_agg(id) from lost), (select pg_catalog.array_agg(lost) from lost)`

// lookedBehind takes what a look at all saw of queues in which any job is due. recent says that some other one was rescanned
// lately.
func (c *claimer) lookedBehind(behind []*feed, recent bool, took pass) {
	r := &c.rescans
	r.asked = took.ended.Add(-took.took)
	r.looks[1], r.looks[0] = r.looks[0], took.took
	if recent {
		r.asked = r.asked.Add(-rand.N(r.interval())) // see askForTurn
	}
	r.feeds = slices.DeleteFunc(slices.Clone(behind), func(f *feed) bool { return f.paused || !f.hasRoom() })
	if !r.known.IsZero() {
		c.q.troubles.Works(c.id, watch.Rescan, "")
		is := make(map[*feed]bool, len(r.feeds))
		for _, f := range r.feeds {
			is[f] = true
		}
		for _, f := range c.feeds {
			if !is[f] { // there is nothing to do, or another worker does it
				c.q.troubles.Works(c.id, watch.Rescan, f.queue)
			}
		}
	}
	r.granted, r.glanced, r.spent = false, 0, 0
	r.first()
}

// first goes to the beginning of the first feed.
func (r *rescans) first() {
	r.priority, r.at, r.lost, r.others = 0, position{runAt: beginning}, nil, nil
}

// next ends the first feed.
func (r *rescans) next() {
	r.feeds, r.glanced = r.feeds[1:], r.glanced-1
	r.first()
	r.ended()
}

// ended records what the rescan took if there is no feed left.
func (r *rescans) ended() {
	if len(r.feeds) == 0 {
		r.pages[1], r.pages[0] = r.pages[0], r.spent
	}
}

// startRescan asks for the turn, or looks at the next page.
func (c *claimer) startRescan(ctx context.Context) bool {
	r := &c.rescans
	switch {
	case r.known.IsZero() && !time.Now().Before(r.notYet):
		c.makeKnown(ctx)
		return true
	case len(r.feeds) == 0:
		return false
	case !r.granted:
		c.askForTurn(ctx)
		return true
	case r.glanced == 0:
		c.glance(ctx)
		return true
	}
	f := r.feeds[0]
	if f.paused {
		f.held = false
		r.next()
		return false
	}
	if f.busy {
		f.held = true // the answer comes first
		return false
	}
	f.busy, f.held = true, false
	f.moves++
	moves := f.moves
	to := f.cursor.places[r.priority].position
	args := []any{f.queue, int16(to.priority), r.at.runAt, r.at.id, to.runAt, to.id, c.kinds, chunkRows}
	c.send(&c.keeps, func() func() {
		var p page
		began := time.Now()
		err := c.q.store.Guarded(ctx, c.db, rescanPage, args, &p.last, &p.lastID, &p.moved, &p.unknown, &p.left, &p.ids, &p.lost)
		took := time.Since(began)
		return func() {
			f.busy = false
			r.spent += took
			works := c.rescanWorks(ctx, []*feed{f}, err)
			if !works || f.moves != moves { // something was paused or resumed
				r.feeds = nil
				c.activate(f)
				return
			}
			c.rescanned(ctx, f, to, &p)
		}
	})
	return true
}

// makeKnown adds this worker's queues to the table.
func (c *claimer) makeKnown(ctx context.Context) {
	c.send(&c.keeps, func() func() {
		err := c.q.store.Send(ctx, c.db, pg.Hot, addQueues, []any{names(c.feeds)}, pg.NoRows)
		return func() {
			if c.rescanWorks(ctx, c.feeds, err) {
				c.rescans.known = time.Now()
			} else {
				c.rescans.notYet = time.Now().Add(rescanEvery + rand.N(rescanEvery))
			}
		}
	})
}

// rescanWorks reports how a statement for these feeds ended. It returns false if it failed.
func (c *claimer) rescanWorks(ctx context.Context, feeds []*feed, err error) bool {
	name := ""
	if len(feeds) == 1 {
		name = feeds[0].queue
	}
	if err == nil {
		c.works(watch.Rescan, feeds)
	} else if ctx.Err() == nil {
		c.q.troubles.Fails(c.id, watch.Rescan, name, err)
	}
	return err == nil
}

// hasRoom reports whether a handler of the feed is free, or some have returned since the look before: quick ones are rarely free when
// somebody looks. Those that returned may all have begun long jobs since. Then what this worker finds waits for its next handler, or
// until others rescan.
func (f *feed) hasRoom() bool {
	s := f.slots
	returned := s.returned.Load()
	some := returned != f.returned
	f.returned = returned
	return some || s.outstanding.Load() <= int64((s.count-1)*s.width)
}

// askForTurn asks in which queues it is this worker's turn.
func (c *claimer) askForTurn(ctx context.Context) {
	r := &c.rescans
	every, feeds := r.interval(), r.feeds
	args := []any{names(feeds), every.Microseconds(), c.kinds}
	c.send(&c.keeps, func() func() {
		var mine []*feed
		err := c.q.store.Send(ctx, c.db, pg.Hot, rescanTurn, args, pg.Each(func(rows pgx.Rows) error {
			var queue string
			if err := rows.Scan(&queue); err != nil {
				return err
			}
			mine = append(mine, c.byName[queue])
			return nil
		}))
		return func() {
			c.rescanWorks(ctx, feeds, err)
			r.granted, r.feeds = true, mine
			if len(mine) == 0 && time.Since(r.known) > c.w.lease {
				r.known = time.Time{} // others have the turn, or somebody has emptied the table
			}
			if len(mine) < len(feeds) {
				// Some other worker asks earlier. This one asks at another time of the interval from now on, so that no
				// worker is always too late.
				r.asked = r.asked.Add(-rand.N(every))
			}
		}
	})
}

// glance looks at the next feeds, and leaves those out in which there is nothing to do.
func (c *claimer) glance(ctx context.Context) {
	r := &c.rescans
	feeds := r.feeds[:min(len(r.feeds), perStatement/2)]
	runAts, ids := [3][]time.Time{}, [3][]int64{}
	for _, f := range feeds {
		for n, p := range f.cursor.places {
			runAts[n], ids[n] = append(runAts[n], p.runAt), append(ids[n], p.id)
		}
	}
	args := []any{names(feeds), runAts[0], ids[0], runAts[1], ids[1], runAts[2], ids[2]}
	c.send(&c.keeps, func() func() {
		var some []*feed
		began := time.Now()
		err := c.q.store.Send(ctx, c.db, pg.Hot, rescanFirst, args, pg.Each(func(rows pgx.Rows) error {
			var n int
			if err := rows.Scan(&n); err != nil {
				return err
			}
			some = append(some, feeds[n-1])
			return nil
		}))
		took := time.Since(began)
		return func() {
			r.spent += took
			if !c.rescanWorks(ctx, feeds, err) {
				r.feeds = nil
				return
			}
			r.glanced = len(some)
			r.feeds = append(some, r.feeds[len(feeds):]...)
			r.ended()
		}
	})
}

// page is what the rescan found in one page of a priority.
type page struct {
	last    *time.Time // where the page ends; nil for the last one
	lastID  int64
	moved   int // how many jobs were moved to the position
	unknown []string
	left    []string // of these, those that have something to do
	ids     []int64  // for the quarantine
	lost    []int32
}

// rescanned takes what a page of a feed's priority before a position has.
func (c *claimer) rescanned(ctx context.Context, f *feed, to position, p *page) {
	r := &c.rescans
	for i, id := range p.ids {
		r.lost = append(r.lost, lostJob{id, int(p.lost[i])})
	}
	c.warnOf(f, p.unknown)
	r.others = append(r.others, p.left...)
	if p.moved > 0 {
		f.cursor.broughtForward(to.priority)
		c.isDue(f)
	}
	if p.last != nil {
		r.at = position{to.priority, *p.last, p.lastID}
		return
	}
	r.at = position{runAt: beginning}
	if r.priority++; r.priority < len(f.cursor.places) {
		return
	}
	f.quarantine.saw(r.lost)
	c.activate(f)
	f.cursor.rescanned = time.Now()
	others := slices.Compact(slices.Sorted(slices.Values(r.others)))
	r.next()
	if len(others) > 0 {
		c.leaveTo(ctx, f, others)
	}
}

// leaveTo says in which kinds of other workers there is something to do.
func (c *claimer) leaveTo(ctx context.Context, f *feed, kinds []string) {
	c.send(&c.keeps, func() func() {
		err := c.q.store.Send(ctx, c.db, pg.Hot, rescanLeft, []any{f.queue, kinds}, pg.NoRows)
		return func() { c.rescanWorks(ctx, []*feed{f}, err) }
	})
}

// warnOf logs one warning for each kind without a handler.
func (c *claimer) warnOf(f *feed, unknown []string) {
	for _, kind := range unknown {
		if !f.unknown[kind] && c.w.handlers[kind] == nil { // a kind with a handler is paused
			f.unknown[kind] = true
			c.q.log.Warn("onceq: jobs of a kind for which this worker has no handler are left to other workers; if no other worker has one, give this worker a handler, or correct Kind.Name if it is misspelt",
				slog.String("queue", f.queue), slog.String("kind", kind), slog.Any("kinds with a handler", c.w.kinds))
		}
	}
}
