package plan

import (
	"math"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/rhythm"
)

// looks are the looks at queues: at all of them at intervals, and at some soon after they have become idle,
// or were announced. A look at many is several statements, so that none holds the session for long.
type looks struct {
	at       time.Time        // when to look at all
	took     [2]time.Duration // by the latest two looks at all
	each     [2]time.Duration // by the latest two statements, for one queue
	claimed  bool             // claims were made since
	whole    rhythm.Pass      // the latest look over the whole overlap
	all      lookAtAll        // under way
	soon     []*Queue         // those with lookAt
	some     rhythm.Pass      // the latest look at some
	fails    int              // in a row
	notAgain time.Time        // no look before this time, because the latest failed
	nextDue  time.Time        // the earliest Queue.delayed; zero if there is none
	fresh    lookAtNew        // while the run is lively
	calls    lookAtCalls      // with looks at all
}

// lookAtAll is a look at all queues.
type lookAtAll struct {
	left   []*Queue // at these it has not looked yet
	calls  bool     // its next statement asks for the promoter's calls
	behind bool     // it asks in which of them any job is due, and
	found  []*Queue // these are
	recent bool     // some queue was rescanned lately
	how    cursor.Look
	took   time.Duration
}

// lookAtCalls is what looks at all know of the promoter's calls. As the promoter does, they look for all of
// them at intervals, and else for those that have become due lately, because under an old snapshot there are
// many dead ones.
type lookAtCalls struct {
	looked time.Time // when the latest did, by the database's clock
	all    time.Time // when one looks for all again
}

// lookAtNew is a look at the jobs that were enqueued last. It goes along with claims of several queues, so
// that while jobs come, there is a round trip for each claim and none for looks. Most of them go back by some
// hundredths of a second, because a job is committed later than its id is drawn. At intervals one goes back
// by a quarter to half of a second. What comes later still is seen by the looks at all.
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

// After an announcement a queue is looked at again, each time three times as late: a producer may just have
// seen that nobody waits, and so may a transaction that is still open. Where polls are seldom this goes on
// for longer, because a commit may stall. lookFollowsUntil is how long.
func (s *State) lookFollowsUntil() time.Duration {
	return max(lookEnough, min(s.Poll/10, lookStalled))
}

// lookAfterAnnouncement has a queue looked at once more, after a look that began at this time.
func (s *State) lookAfterAnnouncement(q *Queue, began time.Time) {
	last := s.lookFollowsUntil()
	for d := lookFollows; ; d = min(3*d, last) {
		if at := q.news.announced.Add(d); began.Before(at) {
			s.lookSoon(q, at)
			return
		}
		if d == last {
			return
		}
	}
}

// lookForLeft has a queue looked at once more, each time three times as late, for jobs that were left to this
// run and whose transactions were still open. Others that are woken meanwhile look for later ones.
func (s *State) lookForLeft(q *Queue, now time.Time) {
	for d := lookEnough; d < lookStalled; d *= 3 {
		if at := q.news.left.Add(d); now.Before(at) {
			s.lookSoon(q, at)
			return
		}
	}
}

// lookSoon has a queue looked at, at this time or earlier.
func (s *State) lookSoon(q *Queue, at time.Time) {
	if q.lookAt.IsZero() {
		s.looks.soon = append(s.looks.soon, q)
	} else if at.After(q.lookAt) {
		return
	}
	q.lookAt = at
}

// looksAtNew reports whether the run is lively and looks at all take long: they are seldom then, and looks at
// what is new come in between. On Citus there are none of these, because the sequence and the jobs are on
// different servers.
func (s *State) looksAtNew() bool {
	took := min(s.looks.took[0], s.looks.took[1])
	return s.announcement.stir.lively && rhythm.Fifth*took > livelyLook && !s.Citus
}

// lookInterval is the time between two looks at all. PollInterval is kept to, unless looking took the half of
// it.
func (s *State) lookInterval() time.Duration {
	took := min(s.looks.took[0], s.looks.took[1])
	switch {
	case s.looksAtNew():
		return min(lookLongest, rhythm.Twentieth*took)
	case s.announcement.stir.lively:
		return max(livelyLook, min(lookLongest, rhythm.Fifth*took))
	case s.Poll > 0:
		return max(s.Poll, 2*took)
	case s.listens():
		least, page := pollListening, s.looks.page(true)
		if s.leavesNow() {
			least = pollLeaving
		}
		statements := (len(s.Queues) + page - 1) / page
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
	for _, q := range l.soon {
		if soon := later(q.lookAt, l.some.Ended.Add(rhythm.Twentieth*l.some.Took)); soon.Before(at) {
			at = soon
		}
	}
	return later(at, l.notAgain).Sub(now)
}

// page is at how many queues one statement looks.
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

// nextLook decides on a look at what is new, at all queues, or at those that are to be looked at soon.
func (s *State) nextLook(now time.Time) Action {
	l := &s.looks
	if now.Before(l.notAgain) {
		return nil
	}
	if !s.looksAtNew() {
		l.fresh = lookAtNew{}
	} else if !now.Before(l.fresh.at) {
		return s.lookForNew(now)
	}
	rescan := s.rescans.due(now)
	if len(l.all.left) == 0 && (!now.Before(l.at) || l.claimed && rescan) {
		l.all = lookAtAll{left: s.Queues, calls: true, behind: rescan, how: cursor.Recent}
		if now.Sub(l.whole.Ended) > max(time.Second, rhythm.Fiftieth*l.whole.Took) {
			l.all.how = cursor.Whole
		}
		interval := s.lookInterval()
		l.at, l.claimed = now.Add(interval*9/10+s.Rand(max(1, interval/5))), false
	}
	if all := &l.all; len(all.left) > 0 {
		n := min(len(all.left), l.page(all.behind))
		queues := all.left[:n]
		all.left = all.left[n:]
		for _, q := range queues {
			q.lookAt = time.Time{}
		}
		l.soon = slices.DeleteFunc(l.soon, func(q *Queue) bool { return q.lookAt.IsZero() })
		return s.look(queues, all, now)
	}
	if queues := s.lookNow(now); len(queues) > 0 {
		return s.look(queues, nil, now)
	}
	return nil
}

// lookNow returns the queues whose time it is, if it is time for another look at some.
func (s *State) lookNow(now time.Time) (queues []*Queue) {
	l := &s.looks
	if now.Before(l.some.Ended.Add(rhythm.Twentieth * l.some.Took)) {
		return nil
	}
	most := l.page(false)
	l.soon = slices.DeleteFunc(l.soon, func(q *Queue) bool {
		if q.lookAt.After(now) || len(queues) == most {
			return false
		}
		if q.lookAt = (time.Time{}); q.idle() { // otherwise claims come first
			queues = append(queues, q)
		}
		return true
	})
	return queues
}

// LookForNew looks at the jobs that were enqueued last: after this id.
type LookForNew struct {
	From  int64
	began time.Time
}

// SeenNew is what such a look saw.
type SeenNew struct {
	Last   int64 // id that was drawn
	Queues []string
}

// lookForNew begins one.
func (s *State) lookForNew(now time.Time) *LookForNew {
	n := &s.looks.fresh
	back := n.near
	if now.Sub(n.widened) >= 50*time.Millisecond { // wide ones are rare: they see again what near ones saw
		back, n.widened = n.wide, now
	}
	from := back.from
	if back.mark == 0 {
		from = math.MaxInt64
	}
	n.at = now.Add(time.Second) // it is under way
	return &LookForNew{From: from, began: now}
}

// wentAlong takes how long one took that went along with a claim. Without an answer it was not sent, or
// failed.
func (s *State) wentAlong(l *LookForNew, saw *SeenNew, ended time.Time) {
	n := &s.looks.fresh
	if saw == nil {
		n.took, n.at, n.widened = 0, ended, time.Time{}
		return
	}
	n.took = min(n.took, ended.Sub(l.began)) // one by itself may have met a pause of this process
}

// SawNew is for a look at the jobs that were enqueued last that was sent by itself.
func (s *State) SawNew(l *LookForNew, saw *SeenNew, ended time.Time) {
	s.looks.fresh.took = ended.Sub(l.began)
	s.sawNew(l, saw, ended)
}

// sawNew takes what one saw.
func (s *State) sawNew(l *LookForNew, saw *SeenNew, ended time.Time) {
	n := &s.looks.fresh
	n.near.saw(saw.Last, l.began, ended, rhythm.Moment)
	n.wide.saw(saw.Last, l.began, ended, rhythm.Briefly)
	found := 0
	n.rests = min(n.rests+1, rhythm.Fifth)
	for _, queue := range saw.Queues {
		if q := s.byName[queue]; q != nil && !q.paused {
			n.rests = 1
			if q.idle() {
				s.isDue(q)
				found++
			}
		}
	}
	n.at = ended.Add(max(livelyHold, time.Duration(n.rests)*n.took))
	s.found(found, ended)
}

// Look looks at queues.
type Look struct {
	Queues  []*Queue
	Starts  [3][]time.Time // where it begins in each queue, by priority
	Horizon time.Duration  // the next look at all sees what is due later
	Behind  bool           // it asks in which queues any job is due that claims no longer find
	Rescans time.Duration  // the time between two of them
	Calls   bool           // it asks for the promoter's calls, too: for all of them, or
	Since   time.Time      // for those that have become due since then; zero for all

	moves []int      // of the queues
	all   *lookAtAll // that it is a part of; nil for none
}

// Seen is what a look saw.
type Seen struct {
	Now    time.Time // the database's
	Recent bool      // some queue was rescanned lately
	Behind []int64   // queues that may have jobs that claims no longer find: their places in Look.Queues, from 1 on
	Next   []int64   // those with a job that is due soon or now
	In     []int64   // how many microseconds it takes until it is
}

// look looks at queues. all is the look at all that they are a part of, or nil.
func (s *State) look(queues []*Queue, all *lookAtAll, now time.Time) *Look {
	l := &Look{Queues: queues, Horizon: 2*s.lookInterval() + time.Second, Rescans: s.rescans.interval(), all: all, moves: make([]int, len(queues))}
	how := cursor.Recent
	if all != nil {
		how, l.Behind = all.how, all.behind
	}
	for i, q := range queues {
		l.moves[i] = q.moves
		back := how
		if q.cursor.Full { // it is claimed anyway, and others may have done very many jobs before the position
			back = cursor.Onward
		}
		for n, p := range q.cursor.From(back) {
			l.Starts[n] = append(l.Starts[n], p.RunAt)
		}
	}
	s.askForCalls(l, now)
	return l
}

// askForCalls decides whether a look asks for the promoter's calls too: one statement of each look at all
// does, and a look at some that follows an announcement, if it is one for what was enqueued just before that,
// which may be in a lane.
func (s *State) askForCalls(l *Look, now time.Time) {
	if l.all != nil {
		l.Calls, l.all.calls = l.all.calls, false
	} else {
		l.Calls = s.Lanes && slices.ContainsFunc(l.Queues, func(q *Queue) bool { return q.news.follows })
	}
	if l.Calls && now.Before(s.looks.calls.all) {
		l.Since = s.looks.calls.looked.Add(-rhythm.CallMargin)
	}
}

// Looked is for a look that saw this.
func (s *State) Looked(l *Look, saw *Seen, began, ended time.Time, w Worker) {
	s.looked(l, saw, began, ended)
	took := ended.Sub(began)
	if l.Calls {
		calls := &s.looks.calls
		if calls.looked = saw.Now; l.Since.IsZero() {
			calls.all = ended.Add(min(max(2*rhythm.RescanEvery, rhythm.Twentieth*took), rhythm.AllCallsEvery))
		}
	}
	if n := len(l.Queues); n >= perStatement {
		s.looks.each[0], s.looks.each[1] = took/time.Duration(n), s.looks.each[0]
	}
	all := l.all
	if all == nil {
		s.looks.some = rhythm.Pass{Ended: ended, Took: took}
		return
	}
	all.took += took
	all.recent = all.recent || saw.Recent
	for _, n := range saw.Behind {
		all.found = append(all.found, l.Queues[n-1])
	}
	if len(all.left) == 0 {
		s.lookedAtAll(rhythm.Pass{Ended: ended, Took: all.took}, w)
	}
}

// lookedAtAll ends a look at all.
func (s *State) lookedAtAll(p rhythm.Pass, w Worker) {
	l := &s.looks
	if l.all.behind {
		s.lookedBehind(l.all.found, l.all.recent, p, w)
	} else {
		l.took[0], l.took[1] = p.Took, l.took[0]
	}
	if l.all.how == cursor.Whole {
		l.whole = p
	}
}

// LookFailed is for a look, and for reading what is paused. The next one is put off, at most by what is
// returned.
func (s *State) LookFailed(now time.Time) (wait time.Duration) {
	l := &s.looks
	l.fails++
	wait = backOff(l.fails)
	s.shaken = true
	l.notAgain = now.Add(wait/2 + s.Rand(wait))
	l.at, l.all, l.fresh.at = l.notAgain, lookAtAll{}, time.Time{}
	return wait
}

// looked takes what a look saw, of queues from which nothing was claimed meanwhile.
func (s *State) looked(l *Look, saw *Seen, began, ended time.Time) {
	s.looks.fails = 0
	queues := l.Queues
	still := func(i int) bool { return queues[i].moves == l.moves[i] && queues[i].idle() }
	for _, q := range queues {
		q.delayed = time.Time{}
	}
	due, found, leaves := make([]bool, len(queues)), 0, s.leavesNow()
	for i, n := range saw.Next {
		q := queues[n-1]
		if saw.In[i] > 0 {
			if leaves {
				continue
			}
			q.delayed = began.Add(time.Duration(saw.In[i])*time.Microsecond + time.Millisecond)
		} else if due[n-1] = true; still(int(n-1)) && !q.paused {
			s.isDue(q)
			found++
		}
	}
	for i, q := range queues {
		q.next.last = q.moves == l.moves[i] && !due[i]
		if still(i) && !due[i] {
			q.cursor.ReachedEnd(saw.Now)
		}
		if q.news.follows {
			s.lookAfterAnnouncement(q, began)
		}
		s.lookForLeft(q, began)
	}
	s.found(found, ended)
	s.setNextDue()
}

func (s *State) setNextDue() {
	s.looks.nextDue = time.Time{}
	for _, q := range s.Queues {
		if !q.delayed.IsZero() && (s.looks.nextDue.IsZero() || q.delayed.Before(s.looks.nextDue)) {
			s.looks.nextDue = q.delayed
		}
	}
}

// becomeDue has those queues claimed whose delayed jobs have become due. It returns how long it takes until
// the next does.
func (s *State) becomeDue(now time.Time) time.Duration {
	l := &s.looks
	if !l.nextDue.IsZero() && !now.Before(l.nextDue) {
		for _, q := range s.Queues {
			if !q.delayed.IsZero() && !now.Before(q.delayed) {
				q.delayed = time.Time{}
				s.isDue(q)
			}
		}
		s.setNextDue()
	}
	if l.nextDue.IsZero() {
		return rhythm.LongestNap
	}
	return l.nextDue.Sub(now)
}
