package claimer

import (
	"context"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/watch"
)

// looks are the claimer's looks at feeds: at all of them at intervals, and at some soon after they have become idle, or
// were announced. A look at many is several statements, so that none holds the session for long.
type looks struct {
	at       time.Time        // when to look at all
	took     [2]time.Duration // by the latest two looks at all
	each     [2]time.Duration // by the latest two statements, for one feed
	claimed  bool             // claims were made since
	whole    rhythm.Pass      // the latest look over the whole overlap
	all      lookAtAll        // under way
	soon     []*feed          // those with lookAt
	some     rhythm.Pass      // the latest look at some
	fails    int              // in a row
	notAgain time.Time        // no look before this time, because the latest failed
	nextDue  time.Time        // the earliest feed.next; zero if there is none
	fresh    lookAtNew        // while the run is lively
	calls    lookAtCalls      // with looks at all
}

// lookAtAll is a look at all feeds.
type lookAtAll struct {
	left   []*feed // at these it has not looked yet
	calls  bool    // its next statement asks for the promoter's calls
	behind bool    // it asks in which of them any job is due, and
	found  []*feed // these are
	recent bool    // some queue was rescanned lately
	how    cursor.Look
	took   time.Duration
}

// lookAtCalls is what looks at all know of the promoter's calls. As the promoter does, they look for all of them at
// intervals, and else for those that have become due lately, because under an old snapshot there are many dead ones.
type lookAtCalls struct {
	looked time.Time // when the latest did, by the database's clock
	all    time.Time // when one looks for all again
}

// lookAtNew is a look at the jobs that were enqueued last. It goes along with claims of several queues, so that while jobs come,
// there is a round trip for each claim and none for looks. Most of them go back by some hundredths of a second, because a job is
// committed later than its id is drawn. At intervals one goes back by a quarter to half of a second. What comes later still is
// seen by the looks at all.
type lookAtNew struct {
	at         time.Time     // when to look; zero: looks at all are cheap enough
	took       time.Duration // by the latest one that was sent by itself, or less; zero: the next one is, too
	near, wide lookBack
	widened    time.Time // when the latest wide one began
	rests      int       // the next one comes after so many times what one takes: more after each one that saw nothing
}

// lookBack is where a look begins that goes back by a time, to twice that time.
type lookBack struct {
	from   int64 // after this id
	mark   int64 // the latest id at the time marked; 0 before the first look
	marked time.Time
}

// saw records the latest id, which was read between these times.
func (b *lookBack) saw(last int64, began, ended time.Time, back time.Duration) {
	if b.mark == 0 {
		b.from, b.mark, b.marked = last, last, ended
	} else if began.Sub(b.marked) > back {
		b.from, b.mark, b.marked = b.mark, last, ended
	}
}

// After an announcement a feed is looked at again, each time three times as late: a producer may just have
// seen that nobody waits, and so may a transaction that is still open. Where polls are seldom this goes on
// for longer, because a commit may stall. lookFollowsUntil is how long.
func (c *Claimer) lookFollowsUntil() time.Duration {
	return max(lookEnough, min(c.Poll/10, lookStalled))
}

// lookAfterAnnouncement has a feed looked at once more, after a look that began at this time.
func (c *Claimer) lookAfterAnnouncement(f *feed, began time.Time) {
	last := c.lookFollowsUntil()
	for d := lookFollows; ; d = min(3*d, last) {
		if at := f.news.announced.Add(d); began.Before(at) {
			c.lookSoon(f, at)
			return
		}
		if d == last {
			return
		}
	}
}

// lookForLeft has a feed looked at once more, each time three times as late, for jobs that were left to this run and whose transactions
// were still open. Others that are woken meanwhile look for later ones.
func (c *Claimer) lookForLeft(f *feed, now time.Time) {
	for d := lookEnough; d < lookStalled; d *= 3 {
		if at := f.news.left.Add(d); now.Before(at) {
			c.lookSoon(f, at)
			return
		}
	}
}

// lookSoon has a feed looked at, at this time or earlier.
func (c *Claimer) lookSoon(f *feed, at time.Time) {
	if f.lookAt.IsZero() {
		c.looks.soon = append(c.looks.soon, f)
	} else if at.After(f.lookAt) {
		return
	}
	f.lookAt = at
}

// looksAtNew reports whether the run is lively and looks at all take long: they are seldom then, and looks at what is new come in
// between. On Citus there are none of these, because the sequence and the jobs are on different servers.
func (c *Claimer) looksAtNew() bool {
	took := min(c.looks.took[0], c.looks.took[1])
	return c.announcement.stir.lively && rhythm.Fifth*took > livelyLook && c.Store.Citus.Load() != pg.CitusYes
}

// interval is the time between two looks at all. PollInterval is kept to, unless looking took the half of it.
func (c *Claimer) lookInterval() time.Duration {
	took := min(c.looks.took[0], c.looks.took[1])
	switch {
	case c.looksAtNew():
		return min(lookLongest, rhythm.Twentieth*took)
	case c.announcement.stir.lively:
		return max(livelyLook, min(lookLongest, rhythm.Fifth*took))
	case c.Poll > 0:
		return max(c.Poll, 2*took)
	case c.listens():
		least, page := pollListening, c.looks.page(true)
		if c.Listener.leavesNow() {
			least = pollLeaving
		}
		statements := (len(c.feeds) + page - 1) / page
		return max(least, min(lookLongest, max(rhythm.Hundredth*took, time.Duration(statements)*pollListening)))
	}
	return max(rhythm.Briefly, min(lookLongest, rhythm.Hundredth*took))
}

// wait is how long it takes until the next look.
func (l *looks) wait(now time.Time) time.Duration {
	at := l.at
	if len(l.all.left) > 0 {
		at = time.Time{}
	}
	if !l.fresh.at.IsZero() && l.fresh.at.Before(at) {
		at = l.fresh.at
	}
	for _, f := range l.soon {
		if soon := later(f.lookAt, l.some.Ended.Add(rhythm.Twentieth*l.some.Took)); soon.Before(at) {
			at = soon
		}
	}
	return later(at, l.notAgain).Sub(now)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// page is at how many feeds one statement looks.
func (l *looks) page(behind bool) int {
	each := min(l.each[0], l.each[1])
	if each == 0 {
		return 10 * perStatement // it is not known yet what they cost
	}
	if behind {
		each *= 2
	}
	hold := rhythm.Moment
	if !l.fresh.at.IsZero() {
		hold = livelyHold
	}
	return max(perStatement, int(hold/each))
}

// startLook looks at all feeds if it is time for that, or at those that are to be looked at soon.
func (c *Claimer) startLook(ctx context.Context, now time.Time) bool {
	l := &c.looks
	if now.Before(l.notAgain) {
		return false
	}
	if !c.looksAtNew() {
		l.fresh = lookAtNew{}
	} else if !now.Before(l.fresh.at) {
		c.lookAtNew(ctx, now)
		return true
	}
	rescan := c.rescans.due(now)
	if len(l.all.left) == 0 && (!now.Before(l.at) || l.claimed && rescan) {
		l.all = lookAtAll{left: c.feeds, calls: true, behind: rescan, how: cursor.Recent}
		if now.Sub(l.whole.Ended) > max(time.Second, rhythm.Fiftieth*l.whole.Took) {
			l.all.how = cursor.Whole
		}
		interval := c.lookInterval()
		l.at, l.claimed = now.Add(interval*9/10+rand.N(max(1, interval/5))), false
	}
	if all := &l.all; len(all.left) > 0 {
		n := min(len(all.left), l.page(all.behind))
		feeds := all.left[:n]
		all.left = all.left[n:]
		for _, f := range feeds {
			f.lookAt = time.Time{}
		}
		l.soon = slices.DeleteFunc(l.soon, func(f *feed) bool { return f.lookAt.IsZero() })
		c.look(ctx, feeds, all)
		return true
	}
	return !now.Before(l.some.Ended.Add(rhythm.Twentieth*l.some.Took)) && c.lookAtSome(ctx, now)
}

// lookAtSome looks at the feeds whose time it is.
func (c *Claimer) lookAtSome(ctx context.Context, now time.Time) bool {
	l := &c.looks
	var feeds []*feed
	most := l.page(false)
	l.soon = slices.DeleteFunc(l.soon, func(f *feed) bool {
		if f.lookAt.After(now) || len(feeds) == most {
			return false
		}
		if f.lookAt = (time.Time{}); f.idle() { // otherwise claims come first
			feeds = append(feeds, f)
		}
		return true
	})
	if len(feeds) == 0 {
		return false
	}
	c.look(ctx, feeds, nil)
	return true
}

// lookAtNew looks at the jobs that were enqueued last.
func (c *Claimer) lookAtNew(ctx context.Context, began time.Time) {
	l := c.newLook(began)
	c.send(&c.looking, func() func() {
		err := c.Store.Send(ctx, c.DB, pg.Hot, stmt.LookForNew, l.args, l.read)
		return func() {
			ended := time.Now()
			if err != nil {
				c.looks.fresh.at = ended
				c.lookFailed(ctx, err)
				return
			}
			c.looks.fresh.took = ended.Sub(began)
			c.sawNew(l, ended)
		}
	})
}

// newLook is a look at the jobs that were enqueued last.
type newLook struct {
	began  time.Time
	args   []any
	done   bool // the server has answered
	last   int64
	queues []string
}

// newLook begins one.
func (c *Claimer) newLook(began time.Time) *newLook {
	n := &c.looks.fresh
	back := n.near
	if began.Sub(n.widened) >= 50*time.Millisecond { // wide ones are rare: they see again what near ones saw
		back, n.widened = n.wide, began
	}
	from := back.from
	if back.mark == 0 {
		from = math.MaxInt64
	}
	n.at = began.Add(time.Second) // it is under way
	return &newLook{began: began, args: []any{from, c.kinds}}
}

func (l *newLook) read(rows pgx.Rows) error {
	l.done = true
	return pg.Row(&l.last, &l.queues)(rows)
}

// wentAlong takes how long one took that went along with a claim, or that it was not sent or failed.
func (c *Claimer) wentAlong(l *newLook, ended time.Time, err error) {
	n := &c.looks.fresh
	if err != nil || !l.done {
		n.took, n.at, n.widened = 0, ended, time.Time{}
		return
	}
	n.took = min(n.took, ended.Sub(l.began)) // one by itself may have met a pause of this process
}

// sawNew takes what one saw.
func (c *Claimer) sawNew(l *newLook, ended time.Time) {
	n := &c.looks.fresh
	n.near.saw(l.last, l.began, ended, rhythm.Moment)
	n.wide.saw(l.last, l.began, ended, rhythm.Briefly)
	found := 0
	n.rests = min(n.rests+1, rhythm.Fifth)
	for _, queue := range l.queues {
		if f := c.byName[queue]; f != nil && !f.paused {
			n.rests = 1
			if f.idle() {
				c.isDue(f)
				found++
			}
		}
	}
	n.at = ended.Add(max(livelyHold, time.Duration(n.rests)*n.took))
	c.found(found, ended)
}

// seen is the answer of a look.
type seen struct {
	now    time.Time
	recent bool    // some queue was rescanned lately
	behind []int64 // the feeds that may have jobs that claims no longer find: their places in what was asked, from 1 on
	next   []int64 // the feeds with a job that is due soon or now
	in     []int64 // how many microseconds it takes until it is

	paused, names []string // what is paused

	calls bool // the promoter has something to do
}

// look looks at feeds. all is the look at all that they are a part of, or nil.
func (c *Claimer) look(ctx context.Context, feeds []*feed, all *lookAtAll) {
	how, behind := cursor.Recent, false
	if all != nil {
		how, behind = all.how, all.behind
	}
	horizon := 2*c.lookInterval() + time.Second // the next look at all sees what is due later
	queues, starts, moves := make([]string, len(feeds)), [3][]time.Time{}, make([]int, len(feeds))
	for i, f := range feeds {
		queues[i], moves[i] = f.queue, f.moves
		back := how
		if f.cursor.Full { // it is claimed anyway, and others may have done very many jobs before the position
			back = cursor.Onward
		}
		for n, p := range f.cursor.From(back) {
			starts[n] = append(starts[n], p.RunAt)
		}
	}
	args := []any{
		queues, starts[0], starts[1], starts[2], c.kinds, horizon.Microseconds(), behind, c.rescans.interval().Microseconds(),
	}
	began := time.Now()
	var s seen
	statement, read := stmt.LookForJobs, []any{&s.now, &s.recent, &s.behind, &s.next, &s.in, &s.paused, &s.names}
	asks, allCalls, since := c.asksForCalls(feeds, all, began)
	if asks {
		statement, args, read = stmt.LookForCalls, append(args, since), append(read, &s.calls)
	}
	c.send(&c.looking, func() func() {
		err := c.Store.Send(ctx, c.DB, pg.Hot, statement, args, pg.Row(read...))
		ended := time.Now()
		return func() {
			if err != nil {
				c.lookFailed(ctx, err)
				return
			}
			c.Paused.Take(began, s.paused, s.names)
			c.looked(feeds, moves, &s, began)
			took := ended.Sub(began)
			if asks {
				c.sawCalls(&s, allCalls, ended, took)
			}
			if len(feeds) >= perStatement {
				c.looks.each[0], c.looks.each[1] = took/time.Duration(len(feeds)), c.looks.each[0]
			}
			if all == nil {
				c.looks.some = rhythm.Pass{Ended: ended, Took: took}
				return
			}
			all.took += took
			all.recent = all.recent || s.recent
			for _, n := range s.behind {
				all.found = append(all.found, feeds[n-1])
			}
			if len(all.left) == 0 {
				c.lookedAtAll(rhythm.Pass{Ended: ended, Took: all.took})
			}
		}
	})
}

// asksForCalls decides whether a look asks for the promoter's calls too, for all of them, and else since
// when: one statement of each look at all does, and a look at some that follows an announcement.
func (c *Claimer) asksForCalls(feeds []*feed, all *lookAtAll, began time.Time) (asks, allCalls bool, since time.Time) {
	switch {
	case all == nil && !c.follows(feeds), all != nil && !all.calls:
		return false, false, since
	case all != nil:
		all.calls = false
	}
	if allCalls = !began.Before(c.looks.calls.all); !allCalls {
		since = c.looks.calls.looked.Add(-CallMargin)
	}
	return true, allCalls, since
}

// follows reports whether a look at some feeds asks for calls too: if it is one for what was enqueued just before the worker
// announced that it waits, which may be in a lane.
func (c *Claimer) follows(feeds []*feed) bool {
	return c.Promoter.Expects() && slices.ContainsFunc(feeds, func(f *feed) bool { return f.news.follows })
}

// sawCalls takes what a look saw of calls.
func (c *Claimer) sawCalls(s *seen, allCalls bool, ended time.Time, took time.Duration) {
	calls := &c.looks.calls
	if calls.looked = s.now; allCalls {
		calls.all = ended.Add(min(max(2*rhythm.RescanEvery, rhythm.Twentieth*took), AllCallsEvery))
	}
	if s.calls {
		c.Promoter.Called(allCalls)
	}
}

// lookedAtAll ends a look at all.
func (c *Claimer) lookedAtAll(p rhythm.Pass) {
	l := &c.looks
	if l.all.behind {
		c.lookedBehind(l.all.found, l.all.recent, p)
	} else {
		l.took[0], l.took[1] = p.Took, l.took[0]
	}
	if l.all.how == cursor.Whole {
		l.whole = p
	}
}

func (c *Claimer) lookFailed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	l := &c.looks
	l.fails++
	wait := min(5*time.Second, 50*time.Millisecond<<min(l.fails, 10))
	c.Troubles.Fails(c.ID, watch.Look, "", err, slog.Duration("next_try_in", wait))
	c.shaken = true
	l.notAgain = time.Now().Add(wait/2 + rand.N(wait))
	l.at, l.all = l.notAgain, lookAtAll{}
}

// looked takes what a look saw, of feeds from which nothing was claimed meanwhile.
func (c *Claimer) looked(feeds []*feed, moves []int, s *seen, began time.Time) {
	c.looks.fails = 0
	c.works(watch.Look, nil)
	still := func(i int) bool { return feeds[i].moves == moves[i] && feeds[i].idle() }
	for _, f := range feeds {
		f.delayed = time.Time{}
	}
	due, found, leaves := make([]bool, len(feeds)), 0, c.Listener.leavesNow()
	for i, n := range s.next {
		f := feeds[n-1]
		if s.in[i] > 0 {
			if leaves {
				continue
			}
			f.delayed = began.Add(time.Duration(s.in[i])*time.Microsecond + time.Millisecond)
		} else if due[n-1] = true; still(int(n-1)) && !f.paused {
			c.isDue(f)
			found++
		}
	}
	for i, f := range feeds {
		f.plan.last = f.moves == moves[i] && !due[i]
		if still(i) && !due[i] {
			f.cursor.ReachedEnd(s.now)
		}
		if f.news.follows {
			c.lookAfterAnnouncement(f, began)
		}
		c.lookForLeft(f, began)
	}
	c.found(found, time.Now())
	c.setNextDue()
}

func (c *Claimer) setNextDue() {
	c.looks.nextDue = time.Time{}
	for _, f := range c.feeds {
		if !f.delayed.IsZero() && (c.looks.nextDue.IsZero() || f.delayed.Before(c.looks.nextDue)) {
			c.looks.nextDue = f.delayed
		}
	}
}

// becomeDue has those feeds claimed whose delayed jobs have become due. It returns how long it takes until the next does.
func (c *Claimer) becomeDue(now time.Time) time.Duration {
	l := &c.looks
	if !l.nextDue.IsZero() && !now.Before(l.nextDue) {
		for _, f := range c.feeds {
			if !f.delayed.IsZero() && !now.Before(f.delayed) {
				f.delayed = time.Time{}
				c.isDue(f)
			}
		}
		c.setNextDue()
	}
	if l.nextDue.IsZero() {
		return rhythm.LongestNap
	}
	return l.nextDue.Sub(now)
}
