package onceq

import (
	"slices"
	"time"
)

// position is how far a worker has claimed within one priority: the next look begins behind it.
type position struct {
	priority Priority
	runAt    time.Time
	id       int64
}

func (p position) after(q position) bool {
	return p.runAt.After(q.runAt) || p.runAt.Equal(q.runAt) && p.id > q.id
}

// beginning is no later than any due time that Enqueue accepts.
var beginning = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)

func fromStart() []position {
	p := make([]position, 0, PriorityLow-PriorityHigh+1)
	for prio := PriorityHigh; prio <= PriorityLow; prio++ {
		p = append(p, position{priority: prio, runAt: beginning})
	}
	return p
}

// The margin: jobs whose transaction was open for a while appear behind the position, because a job is due
// from the moment of its statement on and not from its commit. Claims look this far back: always in a priority
// that the worker keeps up with, and at intervals of at least 50 times what it costs where there is a backlog. What
// comes later still is found by lookBehind.
//
// While somebody's snapshot is held, a look steps over every job that was done there. So it goes no further back than the
// trail. It goes over the whole margin at intervals of a second or of 50 times what that costs, unless this worker has just
// looked behind everything.
const margin = 5 * time.Second

// trail knows from which due time on the latest jobs were that a lane claimed in a priority.
type trail struct {
	first  [8]time.Time // of each step of jobs, in turn
	passed int
}

const trailStep = 4096 // jobs

func (t *trail) pass(runAt time.Time) {
	first := &t.first[t.passed/trailStep%len(t.first)]
	if t.passed%trailStep == 0 || first.After(runAt) {
		*first = runAt
	}
	t.passed++
}

// start is that of the latest 7 to 8 steps, zero while there were fewer.
func (t *trail) start() time.Time { return slices.MinFunc(t.first[:], time.Time.Compare) }

// lookFrom gives where a claim begins in each priority, highest first. Where it looks it begins with a due time and never
// within one: jobs that lookBehind has brought forward are the first at theirs.
func (l *lane) lookFrom(look, wide bool) []position {
	from := slices.Clone(l.at)
	for i := range from {
		p := &from[i]
		if !look && !l.through[i] {
			continue
		}
		if p.id = 0; p.runAt.After(beginning) {
			p.runAt = p.runAt.Add(-margin)
			if start := l.trails[i].start(); !wide && start.After(p.runAt) {
				p.runAt = start
			}
		}
	}
	return from
}

// lowestEvery is how often a claim begins with the lowest priority.
const lowestEvery = 8

// advance moves the positions behind what was claimed. Where a priority was looked through to its end, that
// is up to the database's clock just before the claim.
func (l *lane) advance(c *claim, leases []*Lease) {
	exhausted := len(c.from)
	if l.full {
		exhausted = 0
		if len(leases) > 0 {
			last := leases[len(leases)-1]
			exhausted = slices.IndexFunc(c.from, func(p position) bool { return p.priority == last.Priority })
		}
	}
	to := func(p position) {
		at := &l.at[p.priority-PriorityHigh]
		if p.after(*at) {
			*at = p
		}
	}
	for _, lease := range leases {
		to(position{lease.Priority, lease.RunAt, lease.ID})
		l.trails[lease.Priority-PriorityHigh].pass(lease.RunAt)
	}
	for i, p := range c.from {
		switch {
		case i < exhausted:
			to(position{p.priority, c.now, 0})
			l.through[p.priority-PriorityHigh] = true
		case i == exhausted:
			l.through[p.priority-PriorityHigh] = false
		}
	}
	// The database's clock was set back, or another server with another clock took over: what is due is behind.
	for i := range l.at {
		if l.at[i].runAt.Sub(c.now) > time.Second {
			l.at[i].runAt, l.at[i].id = c.now, 0
			l.trails[i] = trail{}
		}
	}
}
