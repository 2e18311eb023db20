// Package plan decides what a worker claims of its queues, and when it looks again. It is data and functions
// of that data: it has no clock, no connection and no goroutine, and chance is passed in. Package claimer
// tells it what happens and what time it is, and does what it says.
//
//	notification, look, room  ->  due  ->  claim  ->  executor
//	                                         |  nothing more
//	                                       idle: announced, and looked at together with all other idle queues
//
// docs/work/plan.md has the states of a queue drawn, the events and the actions.
package plan

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/rhythm"
)

// State is what a worker knows of its queues and has decided. One goroutine uses it. Events change it: the
// methods that are named after what happened. Plan and Claims decide what comes next, and Actions returns
// what there is to do.
type State struct {
	Config
	Facts

	Open   []string // kinds that are not paused
	Queues []*Queue // in the order of their names
	byName map[string]*Queue
	active []*Queue // those for which something is to be done soon, in the order of their turns

	Left     int            // jobs that may still be claimed
	underWay [purposes]bool // of the statements for each purpose, whether one is under way
	actions  []Action       // that nobody has taken yet

	holdsBack bool      // something of this worker is paused
	readAgain time.Time // when what is paused is to be read again, if no look has done so

	fails     int       // claims in a row that failed
	notBefore time.Time // no claim before this time, because the latest of these failed

	looks        looks
	rescans      rescans
	announcement announcement
	shaken       bool      // since something failed, it is not known who knows of the announcement
	ahead        bool      // jobs of some queue may wait for a slot
	gaveBack     time.Time // when it was last seen to that jobs that wait too long for a slot are given back
}

// Config is what stays as it is.
type Config struct {
	Kinds   []string // that have handlers
	Lease   time.Duration
	Poll    time.Duration // 0 for the default
	Careful bool          // one lost lease makes some job dead, so only what was started may lose one
	Besides bool          // jobs that have lost one lease may start beside each other: each may lose some more

	Rand func(below time.Duration) time.Duration // a random time, at least 0 and below this one
}

// Facts are what others decide. They are set before each event, and before Plan.
type Facts struct {
	Confirmed bool // notifications arrive
	NotOfTx   bool // but none for jobs that were enqueued in a transaction
	Waits     bool // producers know that the run waits for jobs of each open queue, or it is dormant
	Lanes     bool // what the worker is woken for may be in a lane
	Citus     bool
}

// Worker is what Plan asks while it decides. What it answers is measured at that moment.
type Worker interface {
	Room(q *Queue) Room
	// Want returns q.Want with the room that there is, and reserves what that takes.
	Want(q *Queue, one bool, now time.Time) Want
	// MayStart reports whether a job in quarantine may start in this process, with beside one that may do so
	// beside others. If none may, the claimer is roused when one may.
	MayStart(beside bool) bool
}

// Purpose is what a statement is for. At most one for each is under way, so that none waits for another.
type Purpose int

// The purposes.
const (
	ClaimSome    Purpose = iota // claims of all queues without a backlog, of several in one statement
	ClaimBacklog                // claims of a queue with a backlog, one queue at a time and the queues in turns
	ClaimInTurn                 // the same where others claim too: such a claim waits for its turn (pg.Turn)
	ClaimOne                    // of one job in quarantine
	Looking
	Upkeep // rescans, announcements
	purposes
)

// Action is what is to be done: a pointer to Claim, Look, LookForNew, Announce, PassOn, ReadPauses,
// MakeKnown, AskTurn, Glance, RescanPage or LeaveTo, which are statements, or to Told, Empty or Quiet, which
// are for others in the process.
type Action any

// Told says whether producers know that the run waits for jobs of each open queue.
type Told struct{ All bool }

// Empty says since when a queue has no more jobs, as far as is known. With zero there may be some.
type Empty struct {
	Queue *Queue
	Since time.Time
}

// New returns the state of a worker that knows nothing yet.
func New(cfg Config, queues []*Queue) *State {
	s := &State{Config: cfg, Open: cfg.Kinds, Queues: queues, Left: math.MaxInt, byName: make(map[string]*Queue)}
	slices.SortFunc(queues, func(a, b *Queue) int { return strings.Compare(a.Name, b.Name) })
	for n, q := range queues {
		q.N, q.cursor, q.pace = n, cursor.New(), pace{careful: cfg.Careful}
		s.byName[q.Name] = q
	}
	return s
}

// Queue returns the queue of this name, or nil.
func (s *State) Queue(name string) *Queue { return s.byName[name] }

// Plan decides what is to be done now. It returns how long until it is to decide again at the latest, if
// nothing happens.
func (s *State) Plan(now time.Time, w Worker) (wait time.Duration) {
	return min(s.becomeDue(now), s.aheadFor(now), s.Claims(now, w), s.upkeep(now, w))
}

// Actions returns what there is to do since it was last called.
func (s *State) Actions() []Action {
	all := s.actions
	s.actions = nil
	return all
}

// start has a statement sent for a purpose.
func (s *State) start(p Purpose, a Action) {
	s.underWay[p] = true
	s.actions = append(s.actions, a)
}

// Answered is for a statement that has ended, before the event that says how.
func (s *State) Answered(p Purpose) { s.underWay[p] = false }

// UnderWay reports whether any statement is.
func (s *State) UnderWay() bool { return slices.Contains(s.underWay[:], true) }

// Works is for a statement that ended well.
func (s *State) Works(now time.Time) {
	if s.shaken {
		s.shaken = false
		s.forget(now)
	}
}

// Hears is for notifications that begin to arrive.
func (s *State) Hears(now time.Time) {
	s.looks.at = now
	s.announcement.notBefore = time.Time{}
	s.forget(now)
}

// HasJobs is for jobs of a queue, of which a notification may have told. It may be the queue of another
// worker.
func (s *State) HasJobs(queue string, notified bool, now time.Time) {
	q := s.byName[queue]
	if q == nil {
		return
	}
	if notified {
		s.found(1, now)
		q.news.heard++
		s.unannounced(q)
		if q.news.passOn.IsZero() || !q.next.due && q.news.passOn.Before(now) {
			q.news.passOn = now.Add(rhythm.Moment)
		}
	}
	s.isDue(q)
}

// LooksOn is for a notification that asks the worker to go on looking at a queue for this time.
func (s *State) LooksOn(queue string, looks time.Duration, notified bool, now time.Time) {
	if q := s.byName[queue]; q != nil {
		if q.news.looking.until.IsZero() {
			q.news.looking.from, q.news.looking.jobs = now, 0
		}
		q.news.looking.until = now.Add(looks + looksOn)
		s.HasJobs(queue, notified, now)
	}
}

// SlotCame is for a job in quarantine whose slot has come. It returns false if that has to wait for a claim's
// answer.
func (s *State) SlotCame(queue string, job quarantine.Job) bool {
	q := s.byName[queue]
	if q.busy {
		return false
	}
	q.quarantine.SlotCame(job)
	s.activate(q)
	return true
}

// Paused is for what is paused now: which kinds are open, and which queues are not. A queue of which
// something was resumed begins anew, because such jobs are before the cursor. It returns the queues for which
// something changed.
func (s *State) Paused(kinds []string, queues map[string]bool, readAgain time.Time) (changed []*Queue) {
	differ := !slices.Equal(kinds, s.Open)
	resumed := slices.ContainsFunc(kinds, func(kind string) bool { return !slices.Contains(s.Open, kind) })
	s.Open, s.readAgain = kinds, readAgain
	s.holdsBack = len(kinds) < len(s.Kinds)
	for _, q := range s.Queues {
		paused := len(kinds) == 0 || queues[q.Name]
		s.holdsBack = s.holdsBack || paused
		if differ || paused != q.paused {
			s.pausedIn(q, paused, resumed || q.paused && !paused)
			changed = append(changed, q)
		}
	}
	return changed
}

// pausedIn takes for one queue that it is paused or open. again says that something of it was resumed.
func (s *State) pausedIn(q *Queue, paused, again bool) {
	q.paused, q.next.anew = paused, q.busy && (q.next.anew || again)
	q.moves++
	q.quarantine.Forget()
	if again {
		q.cursor.Restart()
	}
	if !paused {
		s.isDue(q)
	}
}

// GivesBack reports whether jobs that were claimed ahead and wait too long for a slot are given back now, for others
// to start: those of each queue that have waited for longer than MayWait, and then GaveBack says what came of it.
// Usually they wait for some hundredths of a second, unless handlers suddenly take much longer.
func (s *State) GivesBack(now time.Time) bool {
	if s.aheadFor(now) > 0 {
		return false
	}
	s.ahead, s.gaveBack = false, now
	return true
}

// MayWait is how long jobs that were claimed ahead may wait for a slot.
func (q *Queue) MayWait() time.Duration {
	if q.cursor.Full && !q.next.last {
		return aheadBacklog // they come after all that are due already
	}
	return aheadLongest
}

// aheadFor is how long it takes until that is looked at again.
func (s *State) aheadFor(now time.Time) time.Duration {
	if !s.ahead {
		return rhythm.LongestNap
	}
	return aheadLongest - now.Sub(s.gaveBack)
}

// GaveBack is for what was claimed ahead: whether some jobs were given back, and any still waits.
func (s *State) GaveBack(q *Queue, some, anyWait bool, now time.Time) {
	if s.ahead = s.ahead || anyWait; some {
		q.next.again = now.Add(rhythm.Moment) // until then they are written
		q.news.passOn = q.next.again
		s.activate(q)
	}
}

// Restart has all queues claimed from the beginning, for Drain.
func (s *State) Restart() {
	for _, q := range s.Queues {
		q.cursor.Restart()
		s.isDue(q)
	}
}

// isDue records that there is something to claim, as far as is known.
func (s *State) isDue(q *Queue) {
	q.next.due = true
	s.setEmpty(q, time.Time{})
	s.activate(q)
}

func (s *State) setEmpty(q *Queue, since time.Time) {
	if q.empty != since {
		q.empty = since
		s.actions = append(s.actions, &Empty{q, since})
	}
}

func (s *State) activate(q *Queue) {
	if !q.active {
		q.active = true
		s.active = append(s.active, q)
	}
}

// listens reports whether notifications arrive for each job of a queue that is announced.
func (s *State) listens() bool { return s.Confirmed && !s.NotOfTx }

// upkeep decides what else is to be done, and returns how long until there is more.
func (s *State) upkeep(now time.Time, w Worker) time.Duration {
	s.found(0, now)
	wait := rhythm.LongestNap
	if !s.underWay[Upkeep] {
		passOn := s.passOnIn(now)
		if a := s.nextUpkeep(now, w, passOn); a != nil {
			s.start(Upkeep, a)
		} else {
			wait = min(passOn, s.upkeepIn(now))
		}
	}
	if !s.underWay[Looking] {
		if a := s.nextLook(now); a != nil {
			s.start(Looking, a)
		} else {
			wait = min(wait, s.looks.wait(now))
		}
	}
	return wait
}

// ReadPauses reads what is paused, because no look has done so lately.
type ReadPauses struct{}

func (s *State) nextUpkeep(now time.Time, w Worker, passOn time.Duration) Action {
	switch {
	case s.holdsBack && !now.Before(later(s.readAgain, s.looks.notAgain)):
		return &ReadPauses{}
	case passOn <= 0:
		return s.passOn(now)
	}
	if a := s.announce(now, w); a != nil {
		return a
	}
	return s.rescan(now)
}

// upkeepIn is how long it takes until any of it is due, but for passing on.
func (s *State) upkeepIn(now time.Time) time.Duration {
	wait := rhythm.LongestNap
	if s.Confirmed { // otherwise nothing is announced; that it is confirmed rouses the claimer
		wait = min(wait, s.announcement.wait(now))
	}
	if s.holdsBack {
		wait = min(wait, later(s.readAgain, s.looks.notAgain).Sub(now))
	}
	if s.rescans.known.IsZero() {
		wait = min(wait, rhythm.RescanEvery)
	}
	return wait
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Names returns the names of queues.
func Names(queues []*Queue) []string {
	all := make([]string, len(queues))
	for i, q := range queues {
		all[i] = q.Name
	}
	return all
}
