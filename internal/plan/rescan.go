package plan

import (
	"slices"
	"time"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/rhythm"
)

// The rescan finds the jobs that claims no longer find because they are before this worker's position
// (package cursor), and those for the quarantine. It begins with a look that says in which queues any job is
// due: usually in none, and that is all. Otherwise one worker at a time takes these queues, and a second one
// if that leaves something to kinds of its own: a glance at several leaves those out in which all jobs run,
// and it goes over the others in pages, so that claims come in between.
//
// What a rescan finds is for the worker that does it, so one without a free handler leaves the turn to
// others. Where no worker has one, what a rescan would find has to wait anyway, and who has a free handler
// again rescans within a second or two.
type rescans struct {
	known   time.Time        // when the table queues was last made to have this worker's queues; zero: it may not
	asked   time.Time        // when this worker looked whether any job is due, or counts as having looked
	looks   [2]time.Duration // what the latest two looks took that said in which queues any job is due
	pages   [2]time.Duration // what the glances and pages of the latest two rescans took, without the waits between them
	spent   time.Duration    // and of the one under way
	queues  []*Queue         // still to be gone over
	granted bool             // it is this worker's turn in these
	glanced int              // at so many of them, the first ones
	notYet  time.Time        // the queues are not made known before this time, because that failed
	leave   *LeaveTo         // comes first; nil for nothing

	// Where the rescan of the first of queues is.
	priority int // index of cursor.places
	at       cursor.Position
	lost     []quarantine.Job // found there
	others   []string         // kinds of other workers that have something to do there
}

// What a rescan sends.
type (
	// MakeKnown adds this worker's queues to the table.
	MakeKnown struct{}
	// AskTurn asks in which queues it is this worker's turn.
	AskTurn struct {
		Queues []*Queue
		Every  time.Duration
	}
	// Glance looks at queues, and leaves those out in which there is nothing to do.
	Glance struct {
		Queues []*Queue
		RunAts [3][]time.Time // and
		IDs    [3][]int64     // of the position in each, by priority
	}
	// RescanPage goes over the next jobs of a queue from one position to another.
	RescanPage struct {
		Queue    *Queue
		From, To cursor.Position
		moves    int
	}
	// LeaveTo says in which kinds of other workers there is something to do.
	LeaveTo struct {
		Queue *Queue
		Kinds []string
	}
	// Quiet says that there is nothing to rescan in these queues, or another worker does it.
	Quiet struct{ Queues []*Queue }
)

// Page is what the rescan found in one page of a priority.
type Page struct {
	Last   *time.Time // where the page ends; nil for the last one
	LastID int64
	Moved  int              // how many jobs were moved to the position
	Left   []string         // kinds of other workers that have something to do
	Lost   []quarantine.Job // for the quarantine
}

// interval is the time between two rescans, by any of the workers that take turns. One that was slow may have
// had to wait for something, so what counts is the faster one of two.
func (r *rescans) interval() time.Duration {
	return max(rhythm.RescanEvery, rhythm.Hundredth*min(r.looks[0], r.looks[1]), rhythm.Twentieth*min(r.pages[0], r.pages[1]))
}

// due reports whether this worker may rescan, if no other one has.
func (r *rescans) due(now time.Time) bool {
	return len(r.queues) == 0 && now.Sub(r.asked) >= r.interval()
}

// lookedBehind takes what a look at all saw of queues in which any job is due. recent says that some other
// one was rescanned lately.
func (s *State) lookedBehind(behind []*Queue, recent bool, p rhythm.Pass, w Worker) {
	r := &s.rescans
	r.asked = p.Ended.Add(-p.Took)
	r.looks[1], r.looks[0] = r.looks[0], p.Took
	if recent {
		r.asked = r.asked.Add(-s.Rand(r.interval())) // see Granted
	}
	r.queues = slices.DeleteFunc(slices.Clone(behind), func(q *Queue) bool { return q.paused || !q.hasRoom(w.Room(q)) })
	if !r.known.IsZero() {
		is := make(map[*Queue]bool, len(r.queues))
		for _, q := range r.queues {
			is[q] = true
		}
		quiet := slices.DeleteFunc(slices.Clone(s.Queues), func(q *Queue) bool { return is[q] })
		s.actions = append(s.actions, &Quiet{quiet})
	}
	r.granted, r.glanced, r.spent = false, 0, 0
	r.first()
}

// first goes to the beginning of the first queue.
func (r *rescans) first() {
	r.priority, r.at, r.lost, r.others = 0, cursor.Position{RunAt: cursor.Beginning}, nil, nil
}

// next ends the first queue.
func (r *rescans) next() {
	r.queues, r.glanced = r.queues[1:], r.glanced-1
	r.first()
	r.ended()
}

// ended records what the rescan took if there is no queue left.
func (r *rescans) ended() {
	if len(r.queues) == 0 {
		r.pages[1], r.pages[0] = r.pages[0], r.spent
	}
}

// rescan asks for the turn, or looks at the next page.
func (s *State) rescan(now time.Time) Action {
	r := &s.rescans
	switch {
	case r.leave != nil:
		leave := r.leave
		r.leave = nil
		return leave
	case r.known.IsZero() && !now.Before(r.notYet):
		return &MakeKnown{}
	case len(r.queues) == 0:
		return nil
	case !r.granted:
		return &AskTurn{Queues: r.queues, Every: r.interval()}
	case r.glanced == 0:
		return r.glance()
	}
	q := r.queues[0]
	if q.paused {
		q.held = false
		r.next()
		return nil
	}
	if q.busy {
		q.held = true // the answer comes first
		return nil
	}
	q.busy, q.held = true, false
	q.moves++
	return &RescanPage{Queue: q, From: r.at, To: q.cursor.Places[r.priority].Position, moves: q.moves}
}

// glance looks at the next queues.
func (r *rescans) glance() *Glance {
	g := &Glance{Queues: r.queues[:min(len(r.queues), perStatement/2)]}
	for _, q := range g.Queues {
		for n, p := range q.cursor.Places {
			g.RunAts[n], g.IDs[n] = append(g.RunAts[n], p.RunAt), append(g.IDs[n], p.ID)
		}
	}
	return g
}

// Known is for MakeKnown.
func (s *State) Known(works bool, now time.Time) {
	if works {
		s.rescans.known = now
	} else {
		s.rescans.notYet = now.Add(rhythm.RescanEvery + s.Rand(rhythm.RescanEvery))
	}
}

// Granted is for AskTurn: these queues are this worker's.
func (s *State) Granted(a *AskTurn, mine []*Queue, now time.Time) {
	r := &s.rescans
	r.granted, r.queues = true, mine
	if len(mine) == 0 && now.Sub(r.known) > s.Lease {
		r.known = time.Time{} // others have the turn, or somebody has emptied the table
	}
	if len(mine) < len(a.Queues) {
		// Some other worker asks earlier. This one asks at another time of the interval from now on, so that
		// no worker is always too late.
		r.asked = r.asked.Add(-s.Rand(a.Every))
	}
}

// Glanced is for Glance, which took so long: in these queues there is something to do. If it failed the
// rescan ends.
func (s *State) Glanced(g *Glance, some []*Queue, failed bool, took time.Duration) {
	r := &s.rescans
	if r.spent += took; failed {
		r.queues = nil
		return
	}
	r.glanced = len(some)
	r.queues = append(some, r.queues[len(g.Queues):]...)
	r.ended()
}

// Rescanned is for a page; nil for one that failed.
func (s *State) Rescanned(a *RescanPage, p *Page, took time.Duration, now time.Time) {
	r, q := &s.rescans, a.Queue
	q.busy = false
	r.spent += took
	if p == nil || q.moves != a.moves { // something was paused or resumed
		r.queues = nil
		s.activate(q)
		return
	}
	r.lost = append(r.lost, p.Lost...)
	r.others = append(r.others, p.Left...)
	if p.Moved > 0 {
		q.cursor.BroughtForward(a.To.Priority)
		s.isDue(q)
	}
	if p.Last != nil {
		r.at = cursor.Position{Priority: a.To.Priority, RunAt: *p.Last, ID: p.LastID}
		return
	}
	r.at = cursor.Position{RunAt: cursor.Beginning}
	if r.priority++; r.priority < len(q.cursor.Places) {
		return
	}
	q.quarantine.Saw(r.lost)
	s.activate(q)
	q.cursor.Rescanned = now
	if others := slices.Compact(slices.Sorted(slices.Values(r.others))); len(others) > 0 {
		r.leave = &LeaveTo{q, others}
	}
	r.next()
}
