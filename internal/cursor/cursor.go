// Package cursor decides where the next claim of a queue begins, and how far it looks back.
package cursor

import (
	"slices"
	"time"

	"github.com/onceq/onceq/internal/rhythm"
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
//     with the same queues brings jobs that nobody holds to the position, and finds those for package quarantine.
//
// Only these move a position:
//
//   - Claimed: to the last job that the claim took, or in a priority whose end it reached, to the database's time just
//     before the claim.
//   - ReachedEnd: to the database's time of a look that saw nothing to claim.
//   - BroughtForward: to the first id of its due time, where the rescan has put jobs.
//   - a claim that finds the database's clock set back by more than a second: back to that time, because what is due is
//     before the old position.
//   - Restart, for Drain: to the beginning.
//
// What always holds:
//
//   - Every due job after the position is found by the next claim that is large enough.
//   - A claim that looks back begins at the first job of a due time and never within one, because jobs that were brought
//     forward are the first at their due time.
//   - The overlap is never longer than the constant Overlap, and shorter only if there are many recent jobs.
//   - A position is never later than the database's clock by more than a second.
//
// While workers wait for each other's claims, one may begin where the latest of all workers ended, in place of its own
// worker's position (stmt.ClaimInTurn).
//
// The cursor is plain data. Only its claimer's goroutine uses it.
type Cursor struct {
	Places [low - high + 1]place // by priority, highest first
	claims int                   // how many claims have begun
	Full   bool                  // the latest claim took as many jobs as it was allowed: there are more
	Brief  bool                  // it did not, and looked back briefly

	looked, lookedWhole rhythm.Pass
	briefTook           time.Duration // by the latest claim that looked back briefly
	Rescanned           time.Time     // when this worker's latest rescan ended
}

// place is how far a claimer has come within one priority.
type place struct {
	Position
	recent   recentJobs
	caughtUp bool // the latest claim came to the end of the priority
}

// Position is a point in the order of one priority's jobs: a claim begins after it.
type Position struct {
	Priority int16
	RunAt    time.Time
	ID       int64
}

func (p Position) after(q Position) bool {
	return p.RunAt.After(q.RunAt) || p.RunAt.Equal(q.RunAt) && p.ID > q.ID
}

// restAfter is how long not to look back again: 50 times what it costs. Where many workers take turns each of them waits for the
// others, and so all of them together look back little more often than one.
func restAfter(p rhythm.Pass, least time.Duration) time.Duration {
	return max(least, rhythm.Fiftieth*(p.Took-p.Waited), min(rhythm.Fiftieth*p.Took, Overlap/2))
}

// The numbers that somebody has chosen.
const (
	Overlap     = 5 * time.Second // claims look back so far, and others that claim count for as long; rescans find the rest
	recentStep  = 4096            // jobs of one of the eight steps that are recent
	lowestEvery = 8               // one in so many claims begins with a lower priority: none starves
)

// The priorities, as the tables have them.
const (
	high = iota - 1
	normal
	low
)

// Beginning is not after any due time that Enqueue accepts.
var Beginning = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)

// FromStart has the beginning of each priority.
func FromStart() []Position {
	p := make([]Position, 0, low-high+1)
	for prio := int16(high); prio <= low; prio++ {
		p = append(p, Position{Priority: prio, RunAt: Beginning})
	}
	return p
}

// New returns one at the beginning.
func New() (c Cursor) {
	c.Restart()
	return c
}

// Restart moves all positions to the beginning.
func (c *Cursor) Restart() {
	for i, p := range FromStart() {
		c.Places[i].Position = p
	}
}

// Look is how far back a claim begins.
type Look int

const (
	Onward Look = iota // from the position, except in a priority that is caught up, which is looked at as by Recent
	Brief              // from shortly before the position
	Recent             // from the recent jobs
	Whole              // from the start of the whole overlap
)

// Begin returns where a claim that begins now starts in each priority, in the order in which it searches them.
func (c *Cursor) Begin(now time.Time) (from []Position, how Look) {
	if !c.Full {
		how = Brief
	}
	if !now.Before(c.NextLook()) {
		how = Recent
		if now.Sub(c.Rescanned) > 2*rhythm.RescanEvery && now.Sub(c.lookedWhole.Ended) > restAfter(c.lookedWhole, time.Second) {
			how = Whole
		}
	}
	from = c.From(how)
	switch c.claims++; c.claims % (2 * lowestEvery) {
	case lowestEvery:
		slices.Reverse(from)
	case 0:
		from = append(from[1:], from[0])
	}
	return from, how
}

// NextLook is when a claim looks back again.
func (c *Cursor) NextLook() time.Time {
	took := c.looked.Took - c.looked.Waited
	rest := min(max(4*took, rhythm.Fiftieth*(took-c.briefTook)), rhythm.BriefLongest)
	if c.Full {
		rest = restAfter(c.looked, 100*time.Millisecond)
	}
	return c.looked.Ended.Add(rest)
}

// From returns where a claim starts in each priority, highest first.
func (c *Cursor) From(how Look) []Position {
	from := make([]Position, len(c.Places))
	for i := range c.Places {
		at, p := &c.Places[i], &from[i]
		*p = at.Position
		if how == Onward && !at.caughtUp {
			continue
		}
		if p.ID = 0; p.RunAt.After(Beginning) {
			back := Overlap
			if how == Brief {
				back = rhythm.Briefly
			}
			p.RunAt = p.RunAt.Add(-back)
			if start := at.recent.start(); how != Whole && start.After(p.RunAt) {
				p.RunAt = start
			}
		}
	}
	return from
}

// Asked is what a claim has asked for, and when.
type Asked struct {
	From  []Position // one for each priority, in the order in which these are searched
	Limit int        // of jobs
	Now   time.Time  // the database's clock just before the claim
}

// taken are the jobs that it got, in their order.
type Taken interface {
	Len() int
	At(i int) Position
}

// Claimed records what a claim returned that ran from began to ended, and waited for its turn in that time.
func (c *Cursor) Claimed(ask Asked, jobs Taken, how Look, began, ended time.Time, waited time.Duration) {
	c.Full = jobs.Len() == ask.Limit
	c.Brief = how == Brief && !c.Full
	if how == Brief {
		c.briefTook = ended.Sub(began) - waited
	}
	if how >= Recent {
		c.looked = rhythm.Pass{Ended: ended, Took: ended.Sub(began), Waited: waited}
	}
	if how == Whole {
		c.lookedWhole = c.looked
	}
	c.advance(ask, jobs)
}

// advance moves the positions past what was claimed. In a priority that was searched to its end, the position moves to the
// database's time just before the claim.
func (c *Cursor) advance(ask Asked, jobs Taken) {
	complete := len(ask.From) // how many of the priorities were searched to their end
	if c.Full {
		complete = 0
		if n := jobs.Len(); n > 0 {
			last := jobs.At(n - 1)
			complete = slices.IndexFunc(ask.From, func(p Position) bool { return p.Priority == last.Priority })
		}
	}
	for i := range jobs.Len() {
		job := jobs.At(i)
		c.to(job).recent.add(job.RunAt)
	}
	for i, p := range ask.From {
		switch {
		case i < complete:
			c.to(Position{p.Priority, ask.Now, 0}).caughtUp = true
		case i == complete:
			c.place(p.Priority).caughtUp = false
		}
	}
	c.notAfter(ask.Now)
}

// ReachedEnd records that a look at the database's time now saw nothing to claim.
func (c *Cursor) ReachedEnd(now time.Time) {
	for i := range c.Places {
		c.to(Position{c.Places[i].Priority, now, 0}).caughtUp = true
	}
	c.notAfter(now)
}

// to moves the position of a priority, if p is after it.
func (c *Cursor) to(p Position) *place {
	at := c.place(p.Priority)
	if p.after(at.Position) {
		at.Position = p
	}
	return at
}

// notAfter moves the positions back if the database's clock was set back, or another server with another clock took over:
// what is due is before the old position then.
func (c *Cursor) notAfter(now time.Time) {
	for i := range c.Places {
		if at := &c.Places[i]; at.RunAt.Sub(now) > time.Second {
			at.RunAt, at.ID = now, 0
			at.recent = recentJobs{}
			c.looked = rhythm.Pass{}
		}
	}
}

func (c *Cursor) place(p int16) *place { return &c.Places[p-high] }

// BroughtForward records that the rescan has moved jobs to the due time of the position: the next claim begins with them,
// whether it looks back or not.
func (c *Cursor) BroughtForward(p int16) { c.place(p).ID = 0 }

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
