package claimer

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// The rescan finds the jobs that claims no longer find because they are before this worker's position (package cursor), and
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
	at       cursor.Position
	lost     []quarantine.Job // found there
	others   []string         // kinds of other workers that have something to do there
}

// interval is the time between two rescans, by any of the workers that take turns. One that was slow may have had to wait for
// something, so what counts is the faster one of two.
func (r *rescans) interval() time.Duration {
	return max(rhythm.RescanEvery, rhythm.Hundredth*min(r.looks[0], r.looks[1]), rhythm.Twentieth*min(r.pages[0], r.pages[1]))
}

// due reports whether this worker may rescan, if no other one has.
func (r *rescans) due(now time.Time) bool {
	return len(r.feeds) == 0 && now.Sub(r.asked) >= r.interval()
}

// lookedBehind takes what a look at all saw of queues in which any job is due. recent says that some other one was rescanned
// lately.
func (c *Claimer) lookedBehind(behind []*feed, recent bool, took rhythm.Pass) {
	r := &c.rescans
	r.asked = took.Ended.Add(-took.Took)
	r.looks[1], r.looks[0] = r.looks[0], took.Took
	if recent {
		r.asked = r.asked.Add(-rand.N(r.interval())) // see askForTurn
	}
	r.feeds = slices.DeleteFunc(slices.Clone(behind), func(f *feed) bool { return f.paused || !f.hasRoom() })
	if !r.known.IsZero() {
		c.Troubles.Works(c.ID, watch.Rescan, "")
		is := make(map[*feed]bool, len(r.feeds))
		for _, f := range r.feeds {
			is[f] = true
		}
		for _, f := range c.feeds {
			if !is[f] { // there is nothing to do, or another worker does it
				c.Troubles.Works(c.ID, watch.Rescan, f.queue)
			}
		}
	}
	r.granted, r.glanced, r.spent = false, 0, 0
	r.first()
}

// first goes to the beginning of the first feed.
func (r *rescans) first() {
	r.priority, r.at, r.lost, r.others = 0, cursor.Position{RunAt: cursor.Beginning}, nil, nil
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
func (c *Claimer) startRescan(ctx context.Context) bool {
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
	to := f.cursor.Places[r.priority].Position
	args := []any{f.queue, to.Priority, r.at.RunAt, r.at.ID, to.RunAt, to.ID, c.kinds, table.ChunkRows}
	c.send(&c.keeps, func() func() {
		var p page
		began := time.Now()
		err := c.Store.Guarded(ctx, c.DB, stmt.RescanPage, args, &p.last, &p.lastID, &p.moved, &p.unknown, &p.left, &p.ids, &p.lost)
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
func (c *Claimer) makeKnown(ctx context.Context) {
	c.send(&c.keeps, func() func() {
		err := c.Store.Send(ctx, c.DB, pg.Hot, stmt.AddQueues, []any{names(c.feeds)}, pg.NoRows)
		return func() {
			if c.rescanWorks(ctx, c.feeds, err) {
				c.rescans.known = time.Now()
			} else {
				c.rescans.notYet = time.Now().Add(rhythm.RescanEvery + rand.N(rhythm.RescanEvery))
			}
		}
	})
}

// rescanWorks reports how a statement for these feeds ended. It returns false if it failed.
func (c *Claimer) rescanWorks(ctx context.Context, feeds []*feed, err error) bool {
	if err == nil {
		c.works(watch.Rescan, feeds)
	} else if ctx.Err() == nil {
		c.Troubles.Fails(c.ID, watch.Rescan, theOnly(feeds), err)
	}
	return err == nil
}

// hasRoom reports whether a handler of the feed is free, or some have returned since the look before: quick ones are rarely free when
// somebody looks. Those that returned may all have begun long jobs since. Then what this worker finds waits for its next handler, or
// until others rescan.
func (f *feed) hasRoom() bool {
	s := f.slots
	returned := s.Returned.Load()
	some := returned != f.latest.returned
	f.latest.returned = returned
	return some || s.Outstanding.Load() <= int64((s.Count-1)*s.Width)
}

// askForTurn asks in which queues it is this worker's turn.
func (c *Claimer) askForTurn(ctx context.Context) {
	r := &c.rescans
	every, feeds := r.interval(), r.feeds
	args := []any{names(feeds), every.Microseconds(), c.kinds}
	c.send(&c.keeps, func() func() {
		var mine []*feed
		err := c.Store.Send(ctx, c.DB, pg.Hot, stmt.RescanTurn, args, pg.Each(func(rows pgx.Rows) error {
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
			if len(mine) == 0 && time.Since(r.known) > c.Lease {
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
func (c *Claimer) glance(ctx context.Context) {
	r := &c.rescans
	feeds := r.feeds[:min(len(r.feeds), perStatement/2)]
	runAts, ids := [3][]time.Time{}, [3][]int64{}
	for _, f := range feeds {
		for n, p := range f.cursor.Places {
			runAts[n], ids[n] = append(runAts[n], p.RunAt), append(ids[n], p.ID)
		}
	}
	args := []any{names(feeds), runAts[0], ids[0], runAts[1], ids[1], runAts[2], ids[2]}
	c.send(&c.keeps, func() func() {
		var some []*feed
		began := time.Now()
		err := c.Store.Send(ctx, c.DB, pg.Hot, stmt.RescanFirst, args, pg.Each(func(rows pgx.Rows) error {
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
func (c *Claimer) rescanned(ctx context.Context, f *feed, to cursor.Position, p *page) {
	r := &c.rescans
	r.lost = append(r.lost, quarantine.Jobs(p.ids, p.lost)...)
	c.warnOf(f, p.unknown)
	r.others = append(r.others, p.left...)
	if p.moved > 0 {
		f.cursor.BroughtForward(to.Priority)
		c.isDue(f)
	}
	if p.last != nil {
		r.at = cursor.Position{Priority: to.Priority, RunAt: *p.last, ID: p.lastID}
		return
	}
	r.at = cursor.Position{RunAt: cursor.Beginning}
	if r.priority++; r.priority < len(f.cursor.Places) {
		return
	}
	f.quarantine.Saw(r.lost)
	c.activate(f)
	f.cursor.Rescanned = time.Now()
	others := slices.Compact(slices.Sorted(slices.Values(r.others)))
	r.next()
	if len(others) > 0 {
		c.leaveTo(ctx, f, others)
	}
}

// leaveTo says in which kinds of other workers there is something to do.
func (c *Claimer) leaveTo(ctx context.Context, f *feed, kinds []string) {
	c.send(&c.keeps, func() func() {
		err := c.Store.Send(ctx, c.DB, pg.Hot, stmt.RescanLeft, []any{f.queue, kinds}, pg.NoRows)
		return func() { c.rescanWorks(ctx, []*feed{f}, err) }
	})
}

// warnOf logs one warning for each kind without a handler.
func (c *Claimer) warnOf(f *feed, unknown []string) {
	for _, kind := range unknown {
		if !f.unknown[kind] && !slices.Contains(c.Kinds, kind) { // a kind with a handler is paused
			f.unknown[kind] = true
			c.Log.Warn("onceq: jobs of a kind for which this worker has no handler are left to other workers; if no other worker has one, give this worker a handler, or correct Kind.Name if it is misspelt",
				slog.String("queue", f.queue), slog.String("kind", kind), slog.Any("kinds with a handler", c.Kinds))
		}
	}
}
