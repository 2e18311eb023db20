package onceq

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"
)

// announcement is what the claimer knows of its row in waiters, by which producers know for which queues this run waits. A
// notification uses up the queue's part of it, until it is announced anew. Before that the feed is asked at short intervals for a while, unless
// others watch too and jobs come seldom: the next job wakes one of these, and a claim would take it away from that one.
type announcement struct {
	wanted    bool             // producers do not know of a feed that is idle, or that one is busy
	written   time.Time        // when the row was last written, or that was tried
	took      [4]time.Duration // how long the latest four writes took
	rest      time.Duration    // the least until it is written again
	waits     bool             // the row says that the run waits for some queue
	backed    bool             // others watched the same queues when the row was last written
	notBefore time.Time        // the row is not written before this time, because that failed
	era       int              // how often everything was forgotten
	polls     bool             // enough others watch: the run has no row, and only polls

	// Postgres commits transactions that notify one after the other. When jobs come often, in many queues, the run announces
	// nothing, and looks at all queues at short intervals instead.
	lively bool
	count  int       // notifications, and feeds in which looks found something,
	since  time.Time // since then
}

// found counts feeds in which there is something, and decides whether the run is lively.
func (c *claimer) found(n int, now time.Time) {
	a := &c.announcement
	a.count += n
	if now.Sub(a.since) < briefly {
		return
	}
	was, enough := a.lively, livelyFrom
	if was {
		enough /= 2
	}
	a.lively = a.count >= enough
	a.count, a.since = 0, now
	if a.lively != was {
		c.forget()
		a.wanted = true
		c.looks.at = now
	}
}

// settle has a feed announced that has become idle, or asked again until it may be.
func (c *claimer) settle(f *feed, now time.Time) {
	a := &c.announcement
	if a.lively {
		return
	}
	if !c.listener.confirmed.Load() || !f.announced.IsZero() || now.Before(a.notBefore) {
		c.lookSoon(f, now)
		return
	}
	if a.wanted = true; now.Sub(a.written) < a.rest {
		f.again = now.Add(shortly / 2)
		c.activate(f)
	}
}

// unannounced records that producers do not know that this run waits for a feed's jobs.
func (c *claimer) unannounced(f *feed) {
	f.announced = time.Time{}
	if c.listener.waits.Swap(false) {
		c.promoter.rouse("") // as the listener does: from now on nobody wakes it for calls
	}
}

// forget assumes that nobody knows of the announcement, and has all idle feeds announced.
func (c *claimer) forget() {
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
func (a *announcement) wait(now time.Time, deaf bool) time.Duration {
	at := a.written.Add(announceAgain)
	switch {
	case a.wanted:
		at = a.written.Add(a.rest)
	case a.polls && deaf:
		return longestNap
	case a.polls: // it ceases to listen then
		at = a.written.Add(confirmWithin)
	}
	return later(at, a.notBefore).Sub(now)
}

// startAnnouncement announces all feeds that are not busy, if it is time for that.
func (c *claimer) startAnnouncement(ctx context.Context, now time.Time) bool {
	a := &c.announcement
	if !c.listener.confirmed.Load() || a.wait(now, c.listener.deaf.Load()) > 0 {
		return false
	}
	if a.polls && !a.wanted {
		a.written = now
		c.send(&c.keeps, func() func() {
			_ = c.listener.hear(ctx, false) // or a while later
			return func() {}
		})
		return true
	}
	a.wanted, a.written = false, now
	var waiting []*feed
	var heard []int
	var full, busy []string
	unpaused := 0
	for _, f := range c.feeds {
		if !f.paused {
			unpaused++
		}
		switch {
		case f.cursor.full && !f.paused:
			full = append(full, f.queue)
		case f.paused || f.due || now.Sub(f.found) < shortly && !a.backed:
			busy = append(busy, f.queue)
		default:
			waiting, heard = append(waiting, f), append(heard, f.heard)
			continue
		}
		if !f.announced.IsZero() {
			if c.unannounced(f); f.idle() {
				f.again = now.Add(shortly)
				c.activate(f)
			}
		}
	}
	if a.lively || len(full) > many { // so many cannot be named
		waiting = nil
	}
	if len(waiting) == 0 && !a.waits {
		c.setWaits()
		return false
	}
	if busy = append(full, busy...); len(busy) > many {
		busy = busy[:many]
	}
	if len(waiting) == 0 {
		busy = nil
	}
	era, may := a.era, c.listener.polls && len(waiting) == unpaused
	c.send(&c.keeps, func() func() {
		backed, waited, polls, err := c.listener.announce(ctx, len(waiting) > 0, may, busy)
		return func() {
			joins := a.polls && !polls
			if polls && !a.polls { // they look one after the other, also if all have begun together
				c.looks.at = time.Now().Add(rand.N(4 * pollListening))
			}
			a.backed, a.polls = backed, polls
			c.announced(waiting, heard, joins || !waited, era, err)
		}
	})
	return true
}

// announced takes that these feeds were announced. heard is what their counts were before that. follows says that until then there may have
// been nobody to wake.
func (c *claimer) announced(feeds []*feed, heard []int, follows bool, era int, err error) {
	a, now := &c.announcement, time.Now()
	if err != nil { // announce has reported it
		a.waits, a.notBefore = true, now.Add(announceAgain)
		c.forget()
		return
	}
	copy(a.took[1:], a.took[:])
	a.took[0] = now.Sub(a.written)
	a.rest = min(briefly, max(shortly, aTwentieth*slices.Min(a.took[:]))) // a commit may have waited for the disk
	if a.waits = len(feeds) > 0 && !a.polls; era != a.era {
		return
	}
	for i, f := range feeds {
		if f.announced.IsZero() && f.heard == heard[i] {
			if f.announced = now; !f.cursor.brief { // otherwise a claim looks back soon
				f.again = time.Time{}
			}
			if f.follows = follows || !f.lookUntil.IsZero(); f.follows { // a job may have been committed just before
				c.lookSoon(f, now)
			}
			f.lookUntil = time.Time{}
		}
	}
	c.setWaits()
}

// setWaits tells the promoter whether it is woken for jobs of each queue.
func (c *claimer) setWaits() {
	c.listener.waits.Store(!slices.ContainsFunc(c.feeds, func(f *feed) bool { return !f.paused && f.announced.IsZero() }))
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, notified := range c.heard {
		if notified {
			c.listener.waits.Store(false) // hear has not taken it yet
		}
	}
}
