package claimer

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/watch"
)

// announcement is what the claimer knows of its row in waiters, by which producers know for which queues this run waits. A
// notification uses up the queue's part of it: the feed is then asked at short intervals until it is announced anew. If others
// wait, it is not asked: the next job wakes one of these, and a claim would take it away from that one.
type announcement struct {
	wanted    bool             // producers do not know of a feed that is idle, or that one is busy
	written   time.Time        // when the row was last written, or that was tried
	took      [4]time.Duration // how long the latest four writes took
	rest      time.Duration    // the least until it is written again
	waits     bool             // the row says that the run waits for some queue
	backed    bool             // others waited for the same queues when the row was last written, and
	many      bool             // so many that one more makes no difference
	looks     time.Duration    // for how long it may get the jobs of a queue alone where its handlers are quick
	quick     bool             // the handlers that returned before that took no longer than quickHandler on average
	returned  int64            // how many they were, of all queues, and
	worked    int64            // how long they took
	notBefore time.Time        // the row is not written before this time, because that failed
	notYet    time.Time        // the same, because so many others wait that it can come after the end of a single job that the run was woken for
	era       int              // how often everything was forgotten
	dormant   bool             // the run is dormant
	asks      time.Duration    // how long it then waits until it asks whether it is needed
	came      bool             // it was dormant until the row was last written
	awake     time.Time        // it does not become dormant before this time
	stir      stir
}

// stir is how much comes. Postgres commits transactions that notify one after the other. When jobs come often, in
// many queues, the run announces nothing, and looks at all queues at short intervals instead.
type stir struct {
	lively bool      // it does so
	count  int       // notifications, and feeds in which looks found something,
	since  time.Time // since then
}

// found counts feeds in which there is something, and decides whether the run is lively.
func (c *Claimer) found(n int, now time.Time) {
	a := &c.announcement
	a.stir.count += n
	if now.Sub(a.stir.since) < rhythm.Briefly {
		return
	}
	was, enough := a.stir.lively, livelyFrom
	if was {
		enough /= 2
	}
	a.stir.lively = a.stir.count >= enough
	a.stir.count, a.stir.since = 0, now
	if a.stir.lively != was {
		c.forget()
		a.wanted = true
		c.looks.at = now
	}
}

// settle has a feed announced that has become idle, or asked again until it may be.
func (c *Claimer) settle(f *feed, now time.Time) {
	a := &c.announcement
	if a.stir.lively {
		return
	}
	if !c.Listener.Confirmed.Load() || !f.news.announced.IsZero() || now.Before(a.notBefore) {
		c.lookSoon(f, now)
		return
	}
	if a.many && !a.wanted && f.news.looking.until.IsZero() {
		a.notYet = now.Add(rhythm.Moment)
	}
	if a.wanted = true; now.Sub(a.written) < a.rest && !a.many {
		f.plan.again = now.Add(rhythm.Moment / 2)
		c.activate(f)
	}
}

// unannounced records that producers do not know that this run waits for a feed's jobs.
func (c *Claimer) unannounced(f *feed) {
	f.news.announced = time.Time{}
	if c.Listener.Waits.Swap(false) {
		c.Promoter.Rouse("") // as the listener does: from now on nobody wakes it for calls
	}
}

// forget assumes that nobody knows of the announcement, and has all idle feeds announced.
func (c *Claimer) forget() {
	c.announcement.era++
	c.announcement.written = time.Time{}
	for _, f := range c.feeds {
		c.unannounced(f)
	}
	for _, f := range c.feeds {
		if f.idle() {
			c.settle(f, time.Now())
		}
	}
}

// wait is how long it takes until the row is to be written.
func (a *announcement) wait(now time.Time) time.Duration {
	at := a.written.Add(announceAgain)
	switch {
	case a.dormant:
		at = a.written.Add(a.asks)
	case a.wanted:
		at = a.written.Add(a.rest)
	}
	return later(later(at, a.notBefore), a.notYet).Sub(now)
}

// newRow is what the row says next: which feeds wait, and which are busy.
type newRow struct {
	waiting []*feed
	heard   []int         // their counts of notifications
	all     bool          // each feed waits that is not paused
	busy    []string      // queues
	looking []string      // queues of which this run gets the jobs alone
	looks   time.Duration // so long it may get them; 0: no notification has asked for that
}

// startAnnouncement announces all feeds that are not busy, if it is time for that.
func (c *Claimer) startAnnouncement(ctx context.Context, now time.Time) bool {
	a := &c.announcement
	if !c.Listener.Confirmed.Load() || a.wait(now) > 0 {
		return false
	}
	a.wanted, a.written = false, now
	r := c.newRow(now)
	if len(r.waiting) == 0 && !a.waits {
		c.setWaits()
		return false
	}
	if r.looks > 0 {
		a.looks = r.looks
	}
	era, looks := a.era, c.looksFor()
	may := c.Listener.polls && !now.Before(a.awake) && r.all
	c.send(&c.keeps, func() func() {
		others, before, err := c.Listener.announce(ctx, len(r.waiting) > 0, may, looks, r.busy, r.looking)
		return func() {
			a.backed, a.many = err == nil && others > 0, err == nil && others+1 >= dormantFrom
			c.takeDormant()
			c.leave(a.dormant || a.many && before >= 2 && c.Poll == 0)
			c.announced(r.waiting, r.heard, era, err)
		}
	})
	return true
}

// newRow decides what the row says. What is busy is no longer announced.
func (c *Claimer) newRow(now time.Time) (r newRow) {
	var full []string
	r.all = true
	for _, f := range c.feeds {
		if !f.paused {
			r.looks = max(r.looks, f.news.looking.next(now))
		}
		if now.Before(f.news.looking.until) {
			r.looking = append(r.looking, f.queue)
		}
		switch {
		case f.cursor.Full && !f.paused:
			full = append(full, f.queue)
		case f.paused || f.plan.due || now.Sub(f.latest.found) < rhythm.Moment && !c.announcement.backed || now.Before(f.news.looking.until):
			r.busy = append(r.busy, f.queue)
		default:
			r.waiting, r.heard = append(r.waiting, f), append(r.heard, f.news.heard)
			continue
		}
		r.all = r.all && f.paused
		c.isBusy(f, now)
	}
	if c.announcement.stir.lively || len(full) > perStatement { // so many cannot be named
		r.waiting, r.all = nil, false
	}
	r.busy = append(full, r.busy...)
	if r.busy = r.busy[:min(len(r.busy), perStatement)]; len(r.waiting) == 0 {
		r.busy = nil
	}
	return r
}

// isBusy has a feed that does not wait asked again later, when it may be announced.
func (c *Claimer) isBusy(f *feed, now time.Time) {
	if !f.news.announced.IsZero() {
		if c.unannounced(f); f.idle() {
			f.plan.again = now.Add(rhythm.Moment)
			c.activate(f)
		}
	}
	if f.idle() && !f.paused && now.Before(f.news.looking.until) {
		f.plan.again = f.news.looking.until // it is announced after that
		c.activate(f)
	}
}

// takeDormant takes whether the run is dormant after an announcement.
func (c *Claimer) takeDormant() {
	a := &c.announcement
	was := a.dormant
	a.dormant = c.Listener.dormant
	if a.came = was && !a.dormant; a.came {
		a.awake = time.Now().Add(time.Minute) // there may be another burst
	}
	a.asks = pollListening + rand.N(2*pollListening) // with the looks not more than a statement a second
}

// leave decides whether what becomes due while this run waits is left to others. Otherwise each delayed job would be claimed, in
// vain, by all that wait. Two of them start it. Should these be dead, or have become busy, the looks of all others find it, one
// after the other, until they announce themselves anew and know it.
func (c *Claimer) leave(leaves bool) {
	now, did := time.Now(), c.Listener.leaves.Swap(leaves)
	switch {
	case did && !leaves:
		c.looks.at = now
	case !did && leaves: // they look one after the other, also if all have begun together
		c.looks.at = now.Add(rand.N(pollLeaving))
	}
}

// looksFor is for how long this run may get the jobs of a queue alone. Where few wait, that is for workers whose looks find soon
// what a dead one was left, and which have no lanes: a claim does not see the calls of these.
func (c *Claimer) looksFor() time.Duration {
	a := &c.announcement
	switch quick := c.isQuick(); {
	case !quick || !a.backed || c.Listener.room < quickRoom:
		return 0
	case c.Listener.polls && !c.Promoter.Expects():
		return max(a.looks, looksBriefly)
	case a.many:
		return looksBriefly
	}
	return 0
}

// isQuick reports whether the handlers that returned since the last announcement, or else before it, were quick.
func (c *Claimer) isQuick() bool {
	a := &c.announcement
	var returned, worked int64
	for _, f := range c.feeds {
		returned, worked = returned+f.slots.Returned.Load(), worked+f.slots.Worked.Load()
	}
	if n := returned - a.returned; n > 0 {
		a.quick = time.Duration((worked-a.worked)/n) <= quickHandler
		a.returned, a.worked = returned, worked
	}
	return a.quick
}

// announced takes that these feeds were announced. heard is what their counts were before that.
func (c *Claimer) announced(feeds []*feed, heard []int, era int, err error) {
	a, now := &c.announcement, time.Now()
	if err != nil { // announce has reported it
		a.waits, a.notBefore = true, now.Add(announceAgain)
		c.forget()
		return
	}
	copy(a.took[1:], a.took[:])
	a.took[0] = now.Sub(a.written)
	a.rest = min(rhythm.Briefly, max(rhythm.Moment, rhythm.Twentieth*slices.Min(a.took[:]))) // a commit may have waited for the disk
	if a.waits = len(feeds) > 0 && !a.dormant; era != a.era {
		return
	}
	for i, f := range feeds {
		if (f.news.announced.IsZero() || a.came) && f.news.heard == heard[i] {
			c.announcedOne(f, now)
		}
	}
	c.setWaits()
}

// announcedOne is announced for a feed of which nothing was heard meanwhile.
func (c *Claimer) announcedOne(f *feed, now time.Time) {
	a := &c.announcement
	if f.news.announced = now; !f.cursor.Brief { // otherwise a claim looks back soon
		f.plan.again = time.Time{}
	}
	f.news.follows = !a.backed || a.came || !f.news.looking.until.IsZero()
	switch {
	case !a.backed || a.came: // otherwise there was always somebody to wake; and it came because there are jobs
		c.lookSoon(f, now) // a job may have been committed just before the announcement
	case !f.news.looking.until.IsZero(): // but for jobs that were left to this run, and whose commit was slow
		c.lookSoon(f, now.Add(lookEnough))
	}
	if !f.news.looking.until.IsZero() && c.Listener.polls {
		f.news.left = now
	}
	c.lookForLeft(f, now)
	f.news.looking.until = time.Time{}
}

// setWaits tells the promoter whether it is woken for jobs of each queue.
func (c *Claimer) setWaits() {
	c.Listener.Waits.Store(!slices.ContainsFunc(c.feeds, func(f *feed) bool { return !f.paused && f.news.announced.IsZero() }))
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, notified := range c.heard {
		if notified {
			c.Listener.Waits.Store(false) // hear has not taken it yet
		}
	}
}

// passOnIn is how long it takes until another worker is woken for the jobs of some feed. A notification tells of a job, and several
// producers may send one to the same worker, which may also have been left the jobs of a while (wake). If its handlers then suddenly
// take long and it becomes full, nobody else knows of the rest.
func (c *Claimer) passOnIn(now time.Time) time.Duration {
	wait := rhythm.LongestNap
	if c.announcement.stir.lively || !c.Listener.Confirmed.Load() || c.Store.Citus.Load() == pg.CitusYes {
		return wait
	}
	for _, f := range c.active {
		if f.passesOn(now) {
			wait = min(wait, f.news.passOn.Sub(now))
		}
	}
	return wait
}

func (f *feed) passesOn(now time.Time) bool {
	return f.plan.noRoom && !f.busy && !f.news.passOn.IsZero() && (f.plan.due || !f.plan.again.IsZero() && !now.Before(f.plan.again))
}

// startPassingOn does that for one feed. Who is woken and becomes full as well does the same.
func (c *Claimer) startPassingOn(ctx context.Context, now time.Time, wait time.Duration) bool {
	if wait > 0 {
		return false
	}
	i := slices.IndexFunc(c.active, func(f *feed) bool { return f.passesOn(now) && !f.news.passOn.After(now) })
	if i < 0 {
		return false
	}
	f := c.active[i]
	f.news.passOn = time.Time{}
	c.send(&c.keeps, func() func() {
		err := c.Store.Guarded(ctx, c.DB, stmt.WakeOther, []any{f.queue, rand.Int64(), c.ID}, nil)
		return func() {
			switch {
			case err == nil:
				c.Troubles.Works(c.ID, watch.Announce, "")
			case ctx.Err() == nil:
				f.news.passOn = time.Now().Add(rhythm.Briefly)
				c.Troubles.Fails(c.ID, watch.Announce, "", err)
			}
		}
	})
	return true
}
