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
//   - A job is due from its Enqueue statement and not from its commit, so jobs appear in the overlap. A claim that looks
//     back begins at the start of the overlap. While there is a backlog (the latest claim took as many jobs as it was
//     allowed), claims look back at intervals of at least 50 times what that costs, but each does in a priority that is
//     caught up (a claim came to its end). In a queue without a backlog the interval is four times what it costs, or 50 times
//     what it costs more than looking back briefly, which is much while an old snapshot is held. The claims in between do
//     that, for a second at most: most jobs are committed soon. A brief claim that found nothing is followed by one that
//     looks back, or by a look.
//   - While an old snapshot is held, looking back steps over every job that was done in the overlap. So it goes no further
//     back than the recent jobs. The whole overlap is searched at intervals of a second or of 50 times what that costs,
//     unless this worker has just rescanned everything.
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
//   - A claim that looks back begins at the first job of a due time and never within one, because jobs that were brought
//     forward are the first at their due time.
//   - The overlap is never longer than the constant overlap, and shorter only if there are many recent jobs.
//   - A position is never later than the database's clock by more than a second.
//
// While workers wait for each other's claims, one may begin where the latest of all workers ended, in place of its own
// worker's position (stmt.ClaimInTurn).
//
// The cursor is plain data. Only its claimer's goroutine uses it.
type cursor struct {
	places [PriorityLow - PriorityHigh + 1]place // by priority, highest first
	claims int                                   // how many claims have begun
	full   bool                                  // the latest claim took as many jobs as it was allowed: there are more
	brief  bool                                  // it did not, and looked back briefly

	looked, lookedWhole pass
	briefTook           time.Duration // by the latest claim that looked back briefly
	rescanned           time.Time     // when this worker's latest rescan ended
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
	ended  time.Time
	took   time.Duration
	waited time.Duration // of that, for its turn
}

// rest is how long not to look back again: 50 times what it costs. Where many workers take turns each of them waits for the
// others, and so all of them together look back little more often than one.
func (p pass) rest(least time.Duration) time.Duration {
	return max(least, aFiftieth*(p.took-p.waited), min(aFiftieth*p.took, overlap/2))
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
	lookOnward look = iota // from the position, except in a priority that is caught up, which is looked at as by lookRecent
	lookBrief              // from shortly before the position
	lookRecent             // from the recent jobs
	lookWhole              // from the start of the whole overlap
)

// begin returns where a claim that begins now starts in each priority, in the order in which it searches them.
func (c *cursor) begin(now time.Time) (from []position, how look) {
	if !c.full {
		how = lookBrief
	}
	if !now.Before(c.nextLook()) {
		how = lookRecent
		if now.Sub(c.rescanned) > 2*rescanEvery && now.Sub(c.lookedWhole.ended) > c.lookedWhole.rest(time.Second) {
			how = lookWhole
		}
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

// nextLook is when a claim looks back again.
func (c *cursor) nextLook() time.Time {
	took := c.looked.took - c.looked.waited
	rest := min(max(4*took, aFiftieth*(took-c.briefTook)), briefLongest)
	if c.full {
		rest = c.looked.rest(100 * time.Millisecond)
	}
	return c.looked.ended.Add(rest)
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
			back := overlap
			if how == lookBrief {
				back = briefly
			}
			p.runAt = p.runAt.Add(-back)
			if start := at.recent.start(); how != lookWhole && start.After(p.runAt) {
				p.runAt = start
			}
		}
	}
	return from
}

// claimed records what a claim returned that ran from began to ended, and waited for its turn in that time.
func (c *cursor) claimed(ask *claim, how look, began, ended time.Time, waited time.Duration) {
	c.full = len(ask.leases) == ask.limit
	c.brief = how == lookBrief && !c.full
	if how == lookBrief {
		c.briefTook = ended.Sub(began) - waited
	}
	if how >= lookRecent {
		c.looked = pass{ended, ended.Sub(began), waited}
	}
	if how == lookWhole {
		c.lookedWhole = c.looked
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
		c.to(position{lease.Priority, lease.RunAt, lease.ID}).recent.add(lease.RunAt)
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
			at.recent = recentJobs{}
			c.looked = pass{}
		}
	}
}

func (c *cursor) place(p Priority) *place { return &c.places[p-PriorityHigh] }

// broughtForward records that the rescan has moved jobs to the due time of the position: the next claim begins with them,
// whether it looks back or not.
func (c *cursor) broughtForward(p Priority) { c.place(p).id = 0 }

// recentJobs remembers the due times of the latest jobs that were claimed in a priority, in steps.
type recentJobs struct {
	first [8]time.Time // the earliest due time of each of the latest steps
	count int
}

func (r *recentJobs) add(runAt time.Time) {
	first := &r.first[r.count/recentStep%len(r.first)]
	if r.count%recentStep == 0 || first.After(runAt) {
		*first = runAt
	}
	r.count++
}

// start is the earliest due time of the latest 7 to 8 steps, and zero while there were fewer.
func (r *recentJobs) start() time.Time { return slices.MinFunc(r.first[:], time.Time.Compare) }
