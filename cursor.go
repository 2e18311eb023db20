package onceq

import (
	"slices"
	"time"
)

// A cursor says where the next claim of a queue begins. The jobs of one priority are in the order of (due time, id):
//
//	beginning               position - overlap          position            now
//	    |---------------------- rescan ---------------------|
//	                                 |------ overlap -------|---- claims ------|
//	                                                |-brief-|
//
// Claims take what is due after the position and move the position forward. So the dead entries of claimed jobs cost
// nothing, even while an old snapshot keeps vacuum from removing them. Jobs before the position that nobody holds are found
// again:
//
//   - A job is due from its Enqueue statement and not from its commit, so jobs appear in the overlap. Most are committed soon, so a claim
//     goes back briefly. It goes back far, to the start of the overlap, at intervals of what that costs (lookback). A brief claim that found
//     nothing is followed by one that goes back far, or by a look.
//   - While there is a backlog (the latest claim took as many jobs as it was allowed), claims go on from the position, and briefly back in a
//     priority that is caught up (a claim came to its end). They go back far at intervals, too.
//   - The rescan finds jobs that were committed even later, and expired leases. At intervals one worker of those
//     with the same queues brings jobs that nobody holds to the position, and finds those for the quarantine (quarantine.go).
//
// Only these move a position:
//
//   - claimed: to the last job that the claim took, or in a priority whose end it reached, to the database's time just
//     before the claim.
//   - reachedEnd: to the database's time of a look (look.go) that saw nothing to claim.
//   - broughtForward: to the first id of its due time, where the rescan has put jobs.
//   - a claim that finds the database's clock set back by more than a second: back to that time, because what is due is
//     before the old position.
//   - restart, for Drain: to the beginning.
//
// What always holds:
//
//   - Every due job after the position is found by the next claim that is large enough.
//   - A claim that goes back begins at the first job of a due time and never within one, because jobs that were brought
//     forward are the first at their due time.
//   - A position is never later than the database's clock by more than a second.
//
// While workers wait for each other's claims, one may begin where the latest of all workers ended, in place of its own
// worker's position (claimInTurn).
//
// The cursor is plain data. Only its claimer's goroutine uses it.
type cursor struct {
	places [PriorityLow - PriorityHigh + 1]place // by priority, highest first
	claims int                                   // how many claims have begun
	full   bool                                  // the latest claim took as many jobs as it was allowed: there are more
	brief  bool                                  // it did not, and went back briefly
	back   lookback
}

// place is how far a claimer has come within one priority.
type place struct {
	position
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

// lookback says when a claim, a look or a promoter goes far back again, which mostly goes back briefly. To go far back is to step over all
// that was done since, which is much while an old snapshot is held.
type lookback struct {
	far    pass
	waited time.Duration // of what that took, for its turn
	brief  time.Duration // what the latest one took that went back briefly
}

// next is when that is. Without a backlog the interval is four times what it takes, or 50 times what it takes more than going back briefly.
// With one it is 50 times what it takes: where many workers take turns, each of them waits for the others, and so all of them together
// look back little more often than one.
func (b lookback) next(backlog bool) time.Time {
	took := b.far.took - b.waited
	rest := min(max(4*took, 50*(took-b.brief)), overlap/2)
	if backlog {
		rest = max(overlap/50, 50*took, min(50*b.far.took, overlap/2))
	}
	return b.far.ended.Add(rest)
}

// took records how long one took that ended just now.
func (b *lookback) took(far bool, ended time.Time, took, waited time.Duration) {
	if !far {
		b.brief = took - waited
		return
	}
	b.far, b.waited = pass{ended, took}, waited
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

// look is how far back a claim begins.
type look int

const (
	lookOnward look = iota // from the position, except in a priority that is caught up
	lookBrief              // from shortly before the position
	lookFar                // from the start of the overlap
)

// begin returns where a claim that begins now starts in each priority, in the order in which it searches them.
func (c *cursor) begin(now time.Time) (from []position, how look) {
	switch {
	case !now.Before(c.nextLook()):
		how = lookFar
	case !c.full:
		how = lookBrief
	}
	from = c.from(how)
	switch c.claims++; c.claims % (2 * lowestEvery) {
	case lowestEvery:
		slices.Reverse(from)
	case 0:
		from = append(from[1:], from[0])
	}
	return from, how
}

// nextLook is when a claim goes far back again.
func (c *cursor) nextLook() time.Time { return c.back.next(c.full) }

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
			back := briefly
			if how == lookFar {
				back = overlap
			}
			p.runAt = p.runAt.Add(-back)
		}
	}
	return from
}

// claimed records what a claim returned that ran from began to ended, and waited for its turn in that time.
func (c *cursor) claimed(ask *claim, how look, began, ended time.Time, waited time.Duration) {
	c.full = len(ask.leases) == ask.limit
	c.brief = how == lookBrief && !c.full
	if how != lookOnward {
		c.back.took(how == lookFar, ended, ended.Sub(began), waited)
	}
	c.advance(ask)
}

// advance moves the positions past what was claimed. In a priority that was searched to its end, the position moves to the
// database's time just before the claim.
func (c *cursor) advance(ask *claim) {
	leases := ask.leases
	complete := len(ask.from) // how many of the priorities were searched to their end
	if c.full {
		complete = 0
		if len(leases) > 0 {
			last := leases[len(leases)-1]
			complete = slices.IndexFunc(ask.from, func(p position) bool { return p.priority == last.Priority })
		}
	}
	for _, lease := range leases {
		c.to(position{lease.Priority, lease.RunAt, lease.ID})
	}
	for i, p := range ask.from {
		switch {
		case i < complete:
			c.to(position{p.priority, ask.now, 0}).caughtUp = true
		case i == complete:
			c.place(p.priority).caughtUp = false
		}
	}
	c.notAfter(ask.now)
}

// reachedEnd records that a look at the database's time now saw nothing to claim.
func (c *cursor) reachedEnd(now time.Time) {
	for i := range c.places {
		c.to(position{c.places[i].priority, now, 0}).caughtUp = true
	}
	c.notAfter(now)
}

// to moves the position of a priority, if p is after it.
func (c *cursor) to(p position) *place {
	at := c.place(p.priority)
	if p.after(at.position) {
		at.position = p
	}
	return at
}

// notAfter moves the positions back if the database's clock was set back, or another server with another clock took over:
// what is due is before the old position then.
func (c *cursor) notAfter(now time.Time) {
	for i := range c.places {
		if at := &c.places[i]; at.runAt.Sub(now) > time.Second {
			at.runAt, at.id = now, 0
			c.back = lookback{}
		}
	}
}

func (c *cursor) place(p Priority) *place { return &c.places[p-PriorityHigh] }

// broughtForward records that the rescan has moved jobs to the due time of the position: the next claim begins with them,
// whether it looks back or not.
func (c *cursor) broughtForward(p Priority) { c.place(p).id = 0 }
