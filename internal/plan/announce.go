package plan

import (
	"math"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/rhythm"
)

// announcement is what the plan knows of the run's row in waiters, by which producers know for which queues
// this run waits. A notification uses up the queue's part of it: the queue is then asked at short intervals
// until it is announced anew. If others wait, it is not asked: the next job wakes one of these, and a claim
// would take it away from that one.
type announcement struct {
	wanted    bool             // producers do not know of a queue that is idle, or that one is busy
	written   time.Time        // when the row was last written, or that was tried
	took      [4]time.Duration // how long the latest four writes took
	rest      time.Duration    // the least until it is written again
	waits     bool             // the row says that the run waits for some queue
	backed    bool             // others waited for the same queues when the row was last written, and
	many      bool             // so many that one more makes no difference
	looks     time.Duration    // for how long it may get the jobs of a queue alone where its handlers are quick
	handlers  handlers
	notBefore time.Time     // the row is not written before this time, because that failed
	notYet    time.Time     // the same, because so many others wait that it can come after the end of a single job that the run was woken for
	era       int           // how often everything was forgotten
	dormant   bool          // the run is dormant
	leaves    bool          // while it waits, what becomes due is left to others that wait
	asks      time.Duration // how long it then waits until it asks whether it is needed
	came      bool          // it was dormant until the row was last written
	awake     time.Time     // it does not become dormant before this time
	stir      stir
}

// handlers is how long handlers took.
type handlers struct {
	quick    bool  // those that returned before the latest announcement took no longer than quickHandler on average
	returned int64 // how many they were, of all queues, and
	worked   int64 // how long they took
}

// stir is how much comes. Postgres commits transactions that notify one after the other. When jobs come
// often, in many queues, the run announces nothing, and looks at all queues at short intervals instead.
type stir struct {
	lively bool      // it does so
	count  int       // notifications, and queues in which looks found something,
	since  time.Time // since then
}

// found counts queues in which there is something, and decides whether the run is lively.
func (s *State) found(n int, now time.Time) {
	a := &s.announcement
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
		s.forget(now)
		a.wanted = true
		s.looks.at = now
	}
}

// settle has a queue announced that has become idle, or asked again until it may be.
func (s *State) settle(q *Queue, now time.Time) {
	a := &s.announcement
	if a.stir.lively {
		return
	}
	if !s.Confirmed || !q.news.announced.IsZero() || now.Before(a.notBefore) {
		s.lookSoon(q, now)
		return
	}
	if a.many && !a.wanted && q.news.looking.until.IsZero() {
		a.notYet = now.Add(rhythm.Moment)
	}
	if a.wanted = true; now.Sub(a.written) < a.rest && !a.many {
		q.next.again = now.Add(rhythm.Moment / 2)
		s.activate(q)
	}
}

// unannounced records that producers do not know that this run waits for a queue's jobs.
func (s *State) unannounced(q *Queue) {
	if q.news.announced = (time.Time{}); s.Waits {
		s.tell(false)
	}
}

func (s *State) tell(all bool) {
	s.Waits = all
	s.actions = append(s.actions, &Told{all})
}

// forget assumes that nobody knows of the announcement, and has all idle queues announced.
func (s *State) forget(now time.Time) {
	s.announcement.era++
	s.announcement.written = time.Time{}
	for _, q := range s.Queues {
		s.unannounced(q)
	}
	for _, q := range s.Queues {
		if q.idle() {
			s.settle(q, now)
		}
	}
}

// wait is how long it takes until the row is to be written.
func (a *announcement) wait(now time.Time) time.Duration {
	at := a.written.Add(AnnounceAgain)
	switch {
	case a.dormant:
		at = a.written.Add(a.asks)
	case a.wanted:
		at = a.written.Add(a.rest)
	}
	return later(later(at, a.notBefore), a.notYet).Sub(now)
}

// Announce writes the run's row in waiters.
type Announce struct {
	Waits    bool          // for some queue
	Busy     []string      // queues that do not wait
	Looks    time.Duration // so long a run that is woken may get the jobs of a queue alone
	Looking  []string      // queues of which it gets them now
	MayLeave bool          // it may become dormant instead

	waiting []*Queue
	heard   []int // their counts of notifications
	era     int
}

// Written is what came of it.
type Written struct {
	Failed  bool
	Others  int  // that wait for the same queues
	Before  int  // of these, those that come before this run
	Dormant bool // there is no row, because enough others wait
}

// announce announces all queues that are not busy, if it is time for that.
func (s *State) announce(now time.Time, w Worker) Action {
	a := &s.announcement
	if !s.Confirmed || a.wait(now) > 0 {
		return nil
	}
	a.wanted, a.written = false, now
	row, all, looks := s.newRow(now)
	if len(row.waiting) == 0 && !a.waits {
		s.setWaits()
		return nil
	}
	if looks > 0 {
		a.looks = looks
	}
	row.Waits, row.Looks, row.era = len(row.waiting) > 0, s.looksFor(w), a.era
	row.MayLeave = s.Poll == 0 && !now.Before(a.awake) && all
	return row
}

// newRow decides what the row says: which queues wait, and which are busy. What is busy is no longer
// announced. all says that each queue waits that is not paused, and looks how long the run may get jobs
// alone; 0: no notification has asked for that.
func (s *State) newRow(now time.Time) (row *Announce, all bool, looks time.Duration) {
	row, all = &Announce{}, true
	var full []string
	for _, q := range s.Queues {
		looking := now.Before(q.news.looking.until)
		if !q.paused {
			looks = max(looks, q.news.looking.next(now))
		}
		if looking {
			row.Looking = append(row.Looking, q.Name)
		}
		switch {
		case q.cursor.Full && !q.paused:
			full = append(full, q.Name)
		case q.paused || q.next.due || now.Sub(q.latest.found) < rhythm.Moment && !s.announcement.backed || looking:
			row.Busy = append(row.Busy, q.Name)
		default:
			row.waiting, row.heard = append(row.waiting, q), append(row.heard, q.news.heard)
			continue
		}
		all = all && q.paused
		s.isBusy(q, now)
	}
	if s.announcement.stir.lively || len(full) > perStatement { // so many cannot be named
		row.waiting, all = nil, false
	}
	row.Busy = append(full, row.Busy...)
	if row.Busy = row.Busy[:min(len(row.Busy), perStatement)]; len(row.waiting) == 0 {
		row.Busy = nil
	}
	return row, all, looks
}

// isBusy has a queue that does not wait asked again later, when it may be announced.
func (s *State) isBusy(q *Queue, now time.Time) {
	if !q.news.announced.IsZero() {
		if s.unannounced(q); q.idle() {
			q.next.again = now.Add(rhythm.Moment)
			s.activate(q)
		}
	}
	if q.idle() && !q.paused && now.Before(q.news.looking.until) {
		q.next.again = q.news.looking.until // it is announced after that
		s.activate(q)
	}
}

// Announced is for the row that was to be written.
func (s *State) Announced(row *Announce, as Written, now time.Time) {
	a := &s.announcement
	a.backed, a.many = !as.Failed && as.Others > 0, !as.Failed && as.Others+1 >= DormantFrom
	s.becomeDormant(as.Dormant, now)
	s.leave(a.dormant || a.many && as.Before >= 2 && s.Poll == 0, now)
	if as.Failed {
		a.waits, a.notBefore = true, now.Add(AnnounceAgain)
		s.forget(now)
		return
	}
	copy(a.took[1:], a.took[:])
	a.took[0] = now.Sub(a.written)
	a.rest = min(rhythm.Briefly, max(rhythm.Moment, rhythm.Twentieth*slices.Min(a.took[:]))) // a commit may have waited for the disk
	if a.waits = len(row.waiting) > 0 && !a.dormant; row.era != a.era {
		return
	}
	for i, q := range row.waiting {
		if (q.news.announced.IsZero() || a.came) && q.news.heard == row.heard[i] {
			s.announced(q, now)
		}
	}
	s.setWaits()
}

// becomeDormant takes whether the run is dormant after an announcement.
func (s *State) becomeDormant(dormant bool, now time.Time) {
	a := &s.announcement
	was := a.dormant
	a.dormant = dormant
	if a.came = was && !a.dormant; a.came {
		a.awake = now.Add(time.Minute) // there may be another burst
	}
	a.asks = pollListening + s.Rand(2*pollListening) // with the looks not more than a statement a second
}

// leave decides whether what becomes due while this run waits is left to others. Otherwise each delayed job
// would be claimed, in vain, by all that wait. Two of them start it. Should these be dead, or have become
// busy, the looks of all others find it, one after the other, until they announce themselves anew and know
// it.
func (s *State) leave(leaves bool, now time.Time) {
	did := s.announcement.leaves
	s.announcement.leaves = leaves
	switch {
	case did && !leaves:
		s.looks.at = now
	case !did && leaves: // they look one after the other, also if all have begun together
		s.looks.at = now.Add(s.Rand(pollLeaving))
	}
}

// leavesNow reports whether what becomes due is left to others.
func (s *State) leavesNow() bool { return s.Waits && s.announcement.leaves }

// announced is for a queue of which nothing was heard while it was announced.
func (s *State) announced(q *Queue, now time.Time) {
	a := &s.announcement
	if q.news.announced = now; !q.cursor.Brief { // otherwise a claim looks back soon
		q.next.again = time.Time{}
	}
	q.news.follows = !a.backed || a.came || !q.news.looking.until.IsZero()
	switch {
	case !a.backed || a.came: // otherwise there was always somebody to wake; and it came because there are jobs
		s.lookSoon(q, now) // a job may have been committed just before the announcement
	case !q.news.looking.until.IsZero(): // but for jobs that were left to this run, and whose commit was slow
		s.lookSoon(q, now.Add(lookEnough))
	}
	if !q.news.looking.until.IsZero() && s.Poll == 0 {
		q.news.left = now
	}
	s.lookForLeft(q, now)
	q.news.looking.until = time.Time{}
}

// setWaits decides whether the promoter is woken for jobs of each queue.
func (s *State) setWaits() {
	s.tell(!slices.ContainsFunc(s.Queues, func(q *Queue) bool { return !q.paused && q.news.announced.IsZero() }))
}

// looksFor is for how long this run may get the jobs of a queue alone. Where few wait, that is for workers
// whose looks find soon what a dead one was left, and which have no lanes: a claim does not see the calls of
// these.
func (s *State) looksFor(w Worker) time.Duration {
	a, room := &s.announcement, math.MaxInt
	for _, q := range s.Queues {
		room = min(room, q.Count)
	}
	switch quick := s.isQuick(w); {
	case !quick || !a.backed || room < quickRoom:
		return 0
	case s.Poll == 0 && !s.Lanes:
		return max(a.looks, looksBriefly)
	case a.many:
		return looksBriefly
	}
	return 0
}

// isQuick reports whether the handlers that returned since the last announcement, or else before it, were
// quick.
func (s *State) isQuick(w Worker) bool {
	h := &s.announcement.handlers
	var returned, worked int64
	for _, q := range s.Queues {
		room := w.Room(q)
		returned, worked = returned+room.Returned, worked+room.Worked
	}
	if n := returned - h.returned; n > 0 {
		h.quick = time.Duration((worked-h.worked)/n) <= quickHandler
		h.returned, h.worked = returned, worked
	}
	return h.quick
}

// passOnIn is how long it takes until another worker is woken for the jobs of some queue. A notification
// tells of a job, and several producers may send one to the same worker, which may also have been left the
// jobs of a while (wake). If its handlers then suddenly take long and it becomes full, nobody else knows of
// the rest.
func (s *State) passOnIn(now time.Time) time.Duration {
	wait := rhythm.LongestNap
	if s.announcement.stir.lively || !s.Confirmed || s.Citus {
		return wait
	}
	for _, q := range s.active {
		if q.passesOn(now) {
			wait = min(wait, q.news.passOn.Sub(now))
		}
	}
	return wait
}

func (q *Queue) passesOn(now time.Time) bool {
	return q.next.noRoom && !q.busy && !q.news.passOn.IsZero() && (q.next.due || !q.next.again.IsZero() && !now.Before(q.next.again))
}

// PassOn wakes another worker for the jobs of a queue. Who is woken and becomes full as well does the same.
type PassOn struct{ Queue *Queue }

// passOn does that for one queue whose time has come.
func (s *State) passOn(now time.Time) Action {
	i := slices.IndexFunc(s.active, func(q *Queue) bool { return q.passesOn(now) && !q.news.passOn.After(now) })
	s.active[i].news.passOn = time.Time{}
	return &PassOn{s.active[i]}
}

// PassOnFailed has it tried again.
func (s *State) PassOnFailed(q *Queue, now time.Time) { q.news.passOn = now.Add(rhythm.Briefly) }
