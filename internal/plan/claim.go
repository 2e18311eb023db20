package plan

import (
	"time"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/table"
)

// Claim claims jobs that have lost no lease, or for ClaimOne one of the only queue's Suspects.
type Claim struct {
	Purpose Purpose
	Parts   []Part
	New     *LookForNew // goes along; nil for none
}

// Part is what a claim asks of one queue.
type Part struct {
	Queue *Queue
	cursor.Asked
	Free    int64 // handlers; jobs beyond that are claimed ahead
	ByTurns bool  // it has its turn, where one is to be had
	Others  bool  // others claim there too, as far as is known: it waits for its turn

	look  cursor.Look
	alone bool // the statement claims from no other queue
}

// Got is what a claim got of one queue.
type Got struct {
	Jobs
	Now     time.Time // the database's clock just before the claim
	Turn    Turn
	AnyWait bool // some of the jobs wait for a slot
}

// Jobs are what a claim has got, in its order.
type Jobs interface {
	cursor.Taken
	Bytes() int64 // of all payloads
}

// Turn is what became of a claim's turn. The zero value is for a claim without one.
type Turn struct {
	With   bool // the claim was sent with one
	Missed bool // somebody else had it, and the claim did not wait
	InVain bool // it did not come in time
	Waited time.Duration
}

// round is what Claims decides in one go over the active queues.
type round struct {
	now  time.Time
	wait time.Duration // until it is to think again at the latest, if nothing happens
	some []Part        // are claimed in one statement
}

// What becomes of an active queue in a round.
type roundEnd int

const (
	staysActive roundEnd = iota
	hadTurn              // it is claimed, and comes after the others next time
	goesIdle
)

// Claims decides which claims are made now. It returns how long until it is to decide again at the latest, if
// nothing happens.
func (s *State) Claims(now time.Time, w Worker) (wait time.Duration) {
	if d := s.notBefore.Sub(now); d > 0 {
		return d
	}
	r := round{now: now, wait: rhythm.LongestNap}
	keep := s.active[:0]
	var last []*Queue // these have had their turn
	for _, q := range s.active {
		switch s.consider(q, w, &r) {
		case staysActive:
			keep = append(keep, q)
		case hadTurn:
			last = append(last, q)
		}
	}
	clear(s.active[len(keep):])
	s.active = append(keep, last...)
	if len(r.some) > 0 {
		s.claim(ClaimSome, r.some, now)
	}
	return r.wait
}

// consider has an active queue claimed, if there is something to claim and no answer to wait for.
func (s *State) consider(q *Queue, w Worker, r *round) roundEnd {
	purpose := q.purpose(r.now)
	one := s.quarantineDue(q, w)
	due := one || q.next.due || !q.next.again.IsZero() && !r.now.Before(q.next.again)
	switch {
	case q.paused && !q.busy:
		q.active, q.next.due, q.next.again = false, false, time.Time{}
		return goesIdle
	case q.busy || q.held || due && !one && (s.underWay[purpose] || len(r.some) >= perStatement): // an answer comes first
		return staysActive
	case due:
		return s.claimNow(q, w, r, purpose, one)
	case q.next.again.IsZero() && len(q.quarantine.IDs) == 0:
		q.active = false
		return goesIdle
	case !q.next.again.IsZero():
		r.wait = min(r.wait, q.next.again.Sub(r.now))
	}
	return staysActive
}

// purpose is for what a claim of a queue is sent.
func (q *Queue) purpose(now time.Time) Purpose {
	switch {
	case !q.next.backlog:
		return ClaimSome
	case now.Before(q.turns.others):
		return ClaimInTurn
	}
	return ClaimBacklog
}

// claimNow claims from a queue, by itself or together with others of the round, if there is room.
func (s *State) claimNow(q *Queue, w Worker, r *round, purpose Purpose, one bool) roundEnd {
	want := w.Want(q, one, r.now)
	q.next.noRoom = !want.Now
	part := Part{Queue: q, Asked: cursor.Asked{Limit: want.N}, Free: want.Free}
	switch {
	case !want.Now:
		r.wait = min(r.wait, want.Again)
		return staysActive
	case one:
		s.claimOne(q)
	case q.next.backlog:
		s.claim(purpose, []Part{part}, r.now)
	default:
		r.some = append(r.some, part)
		q.busy = true
	}
	return hadTurn
}

// claim claims from queues, from their cursors on, at most as many jobs as their parts say.
func (s *State) claim(p Purpose, parts []Part, now time.Time) {
	c := &Claim{Purpose: p, Parts: parts}
	for i := range parts {
		s.begin(&parts[i], len(parts), now)
	}
	if p == ClaimSome && s.looks.fresh.took > 0 && !s.underWay[Looking] {
		c.New = s.lookForNew(now)
	}
	s.start(p, c)
}

// begin says what a claim that begins now asks of a queue, one of several.
func (s *State) begin(p *Part, several int, now time.Time) {
	q := p.Queue
	q.busy, q.next.due, q.next.last, q.next.again = true, false, false, time.Time{}
	q.moves++
	q.quarantine.OthersTurn = false
	p.Limit = min(p.Limit, max(1, table.ChunkRows/several), s.Left)
	s.Left -= p.Limit
	p.From, p.look = q.cursor.Begin(now)
	p.alone, p.Others = several == 1, now.Before(q.turns.others)
	p.ByTurns = q.next.backlog && !now.Before(q.turns.from)
}

// ClaimFailed is for a claim that got nothing. With changed it was not sent, because something was paused or
// resumed, or it is another job's turn. Otherwise the next one is put off, the longer the more claims in a
// row have failed, at most by what is returned.
func (s *State) ClaimFailed(c *Claim, changed bool, now time.Time) (wait time.Duration) {
	if c.New != nil {
		s.wentAlong(c.New, nil, now)
	}
	if !changed {
		s.fails++
		wait = backOff(s.fails)
		s.notBefore, s.shaken = now.Add(wait/2+s.Rand(wait)), true
	}
	s.dueAgain(c)
	return wait
}

// dueAgain is for a claim that got nothing.
func (s *State) dueAgain(c *Claim) {
	for i := range c.Parts {
		s.Left += c.Parts[i].Limit
		c.Parts[i].Queue.busy = false
		s.isDue(c.Parts[i].Queue)
	}
}

// backOff is how long to wait after so many failures in a row.
func backOff(fails int) time.Duration { return min(5*time.Second, 50*time.Millisecond<<min(fails, 10)) }

// Claimed is for a claim that got this of its parts, and saw this of new jobs; nil if it did not look.
func (s *State) Claimed(c *Claim, got []Got, saw *SeenNew, began, ended time.Time) {
	s.fails = 0
	for i := range c.Parts {
		s.Left += c.Parts[i].Limit - got[i].Len()
	}
	if c.New != nil {
		s.wentAlong(c.New, saw, ended)
	}
	for i := range c.Parts {
		s.claimedOf(&c.Parts[i], &got[i], began, ended)
	}
	if c.New != nil && saw != nil {
		s.sawNew(c.New, saw, ended)
	}
}

// claimedOf takes what a claim returned for a queue, and decides what comes next for it.
func (s *State) claimedOf(p *Part, got *Got, began, ended time.Time) {
	q := p.Queue
	q.busy, q.latest.claimed = false, ended
	asked := p.Asked
	asked.Now = got.Now
	q.cursor.Claimed(asked, got.Jobs, p.look, began, ended, q.turns.learn(got.Turn, ended))
	if q.next.anew {
		q.cursor.Restart()
		q.next.anew, q.next.due = false, true
	}
	s.looks.claimed = true
	found := got.Len() > 0
	if found {
		q.pace.claimed(got.Jobs)
		s.ahead = s.ahead || got.AnyWait
		q.news.looking.jobs += got.Len()
	}
	s.sawEnd(q, p, ended)
	if found {
		often := ended.Sub(q.latest.found) < 50*time.Millisecond
		if !q.news.announced.IsZero() && (often || q.cursor.Full) {
			s.announcement.wanted = true
			s.unannounced(q)
		}
		q.latest.found, q.next.pause = ended, soonAgain
	}
	s.claimNext(q, found, ended)
}

// sawEnd takes whether a claim came to the end of the queue, or there is more than it was allowed to take.
func (s *State) sawEnd(q *Queue, p *Part, ended time.Time) {
	full := q.cursor.Full
	if !full && !q.next.due && !ended.Before(q.news.looking.until) {
		q.news.passOn = time.Time{}
	}
	since := time.Time{}
	if !full && !q.next.due && !q.paused && len(q.quarantine.IDs) == 0 {
		since = ended
	}
	s.setEmpty(q, since)
	q.next.backlog = full && (p.Limit >= perStatement || p.alone && q.Count*q.Width >= perStatement)
}

// claimNext decides when a queue is claimed, or looked at, after a claim that found some jobs or none.
func (s *State) claimNext(q *Queue, found bool, ended time.Time) {
	a, looking := &s.announcement, ended.Before(q.news.looking.until)
	late := q.mayComeLate(found, a.stir.lively || looking)
	if late && a.backed && !found {
		s.lookSoon(q, later(q.cursor.NextLook(), ended)) // a claim might take what others have been woken for
	}
	switch {
	case q.cursor.Full:
		s.isDue(q)
	case q.next.due: // a notification came in between
	case late && !a.backed && !looking:
		s.claimBack(q, ended)
	case a.stir.lively: // the next look is soon
	case looking:
		q.next.again = ended.Add(looksEvery)
		s.activate(q)
	case !q.news.announced.IsZero() && s.listens():
		s.lookSoon(q, q.latest.found.Add(rhythm.Moment)) // because of delayed jobs
	case ended.Sub(q.latest.found) < rhythm.Moment && !a.backed:
		q.claimSoon(ended)
		s.activate(q)
	default:
		s.settle(q, ended)
	}
}

// mayComeLate reports whether a job may have been committed late, behind a claim that went back only briefly:
// what told of it may not tell again. Where the queue is looked at anyway, that matters only after a claim
// that found nothing.
func (q *Queue) mayComeLate(found, looked bool) bool { return q.cursor.Brief && !(found && looked) }

// claimBack has a queue claimed soon, and from farther back when that is due. Producers need not wait for
// that to know that it is empty.
func (s *State) claimBack(q *Queue, ended time.Time) {
	q.claimSoon(ended)
	if look := q.cursor.NextLook(); look.Before(q.next.again) {
		q.next.again = later(look, ended)
	}
	s.activate(q)
	a := &s.announcement
	if q.news.announced.IsZero() && ended.Sub(q.latest.found) >= rhythm.Moment && s.Confirmed && !a.stir.lively {
		a.wanted = true
	}
}

// claimSoon has the queue claimed again, each time twice as late, and just when it has been quiet for long
// enough to be announced.
func (q *Queue) claimSoon(ended time.Time) {
	q.next.pause = max(q.next.pause, soonAgain)
	q.next.again = ended.Add(q.next.pause)
	if quiet := q.latest.found.Add(rhythm.Moment); ended.Before(quiet) && quiet.Before(q.next.again) {
		q.next.again = quiet
	}
	q.next.pause = min(2*q.next.pause, rhythm.Moment)
}

// quarantineDue reports whether a job in quarantine should be claimed before anything else. It alternates
// with the other jobs, so that neither sort waits for all of the other. After a failure the claim of other
// jobs shows when it is over, so that nobody waits for the turn while the database of another schema does not
// answer.
func (s *State) quarantineDue(q *Queue, w Worker) bool {
	if len(q.quarantine.IDs) == 0 || s.underWay[ClaimOne] || q.quarantine.OthersTurn || s.fails > 0 || s.Left == 0 {
		return false
	}
	if w.Room(q).Quarantined >= max(1, q.Count/2) { // half of the handlers are for other jobs
		return false
	}
	_, beside := q.quarantine.Next()
	return w.MayStart(beside && s.Besides)
}

// claimOne claims a job in quarantine. In any case other jobs are next.
func (s *State) claimOne(q *Queue) {
	q.quarantine.OthersTurn = true
	q.busy, q.next.due, q.next.again = true, false, time.Time{}
	q.moves++
	s.Left--
	s.start(ClaimOne, &Claim{Purpose: ClaimOne, Parts: []Part{{Queue: q, Asked: cursor.Asked{Limit: 1}}}})
}

// Suspects returns the jobs of a queue of which ClaimOne claims the first one that is free, without those
// that the worker has, and whether it may start beside others. If there are none, or it is another job's
// turn, ClaimFailed follows.
func (s *State) Suspects(q *Queue, held map[int64]bool) (few []int64, beside bool) {
	q.quarantine.Without(held)
	few, beside = q.quarantine.Next()
	return few, beside && s.Besides
}

// ClaimedOne is for ClaimOne that passed so many of Suspects, and got the last of these, or none.
func (s *State) ClaimedOne(c *Claim, passed int, got bool, now time.Time) {
	s.dueAgain(c)
	s.fails = 0
	q := c.Parts[0].Queue
	if q.quarantine.Past(passed); !got {
		q.quarantine.OthersTurn = false
		return
	}
	s.Left--
	q.latest.found = now
}
