package onceq

import (
	"context"
	"log/slog"
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// claimer decides what is claimed for one queue, and when. One goroutine runs it, by loop or by drain, and only that
// goroutine uses the fields, except wake.
//
// One claimer could serve all queues of a process, because the cursor, the pace and the quarantine of a queue are data in
// its feed, and slots, executor, outbox and beats do not know the claimer. It would have a list of feeds. One query would
// ask for all of them whether something is due and when the next delayed job is. One statement would claim from those that
// are due and have room, beginning with another feed each time, and tell each feed's cursor its part. The turn to rescan,
// the announcement and the quarantine's turn would be one for all queues, and Drain would need no lock.
type claimer struct {
	q        *Queue
	w        *Worker // its handlers' kinds, lease and poll interval
	id       int64   // of the run, by which waiters knows it
	db       quick
	exec     *executor // gets what was claimed
	listener *listener

	feed      *feed
	announced announcement
	fails     int           // failed claims in a row
	wake      chan struct{} // holds one: look for jobs again. Anybody may send
}

// feed is what a claimer knows about its queue. Only the claimer's goroutine uses it, except the counts in slots.
type feed struct {
	queue      string
	kinds      []string // those that are not paused; see look
	slots      *slots
	reserved   int64 // the part of slots.outstanding that is for the claim under way
	pace       pace
	cursor     cursor
	quarantine quarantine
	claimedAt  time.Time       // when the latest claim ended
	found      time.Time       // when the latest claim that found something ended
	unknown    map[string]bool // kinds without a handler that the log has named
}

func newClaimer(w *Worker, id int64, db quick, exec *executor, listener *listener, s *slots) *claimer {
	f := &feed{queue: s.queue, kinds: w.kinds, slots: s, pace: pace{ahead: w.ahead}, cursor: newCursor(), unknown: make(map[string]bool)}
	for _, h := range w.handlers {
		if h.maxLost == 1 {
			f.pace.ahead = 0 // the first lost lease makes the job dead, so only a job that was started may lose one
		}
	}
	return &claimer{q: w.q, w: w, id: id, db: db, exec: exec, listener: listener, feed: f, wake: make(chan struct{}, 1)}
}

// loop claims and hands out until ctx ends.
func (c *claimer) loop(ctx context.Context) {
	pause := time.Millisecond
	for {
		n, one := c.waitRoom(ctx)
		var found int
		err := c.look(ctx, c.feed)
		switch {
		case err != nil || c.feed.paused():
		case one:
			found, err = c.claimQuarantined(ctx)
		case n > 0:
			found, err = c.claim(ctx, n)
		}
		c.unreserve()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			c.fails++
			wait := min(5*time.Second, 50*time.Millisecond<<min(c.fails, 10))
			c.q.fails(c.id, workClaim, c.feed.queue, err, slog.Duration("next_try_in", wait))
			c.announced.at = time.Time{}
			if !sleep(ctx, wait/2+rand.N(wait), nil) {
				return
			}
			continue
		}
		c.fails = 0
		c.q.works(c.id, workClaim, c.feed.queue)
		if c.feed.paused() {
			waitPaused(ctx)
			continue
		}
		if found > 0 {
			pause = time.Millisecond
		}
		if one {
			continue
		}
		if moved := c.rescan(ctx); moved || c.feed.cursor.full {
			continue
		}
		woken := c.rest(ctx, pause)
		if ctx.Err() != nil {
			return
		}
		if pause *= 2; woken {
			pause = time.Millisecond
		}
	}
}

// want is what is worth claiming for a queue.
type want struct {
	n     int           // how many jobs, or the room that one in quarantine takes
	one   bool          // one job in quarantine, before anything else
	low   int64         // a claim is worth it only when at most this many jobs are outstanding
	again time.Duration // if not now, decide again after this time at the latest
	now   bool
}

// want decides how many jobs to claim for a feed, and reserves them if its handlers hold connections. While there are more
// jobs than the feed can take, it waits until a quarter of its limit is free, or claims every few milliseconds.
func (c *claimer) want(f *feed) want {
	const patience = 5 * time.Millisecond
	s := f.slots
	w := want{one: c.quarantineDue(f)}
	now := time.Now()
	prefetch := f.pace.prefetch(s, now)
	usable := s.count
	if s.pooled {
		c.q.connections.mu.Lock()
		defer c.q.connections.mu.Unlock()
		usable = c.q.connections.allow(s)
	}
	limit, need := int64(usable*s.width)+prefetch, int64(1)
	waited := now.Sub(f.claimedAt)
	switch {
	case w.one:
		limit, need = int64((usable-1)*s.width), 0 // the job gets the next slot for itself
	case f.cursor.full && waited < patience:
		need = max(1, limit/4)
	}
	free := limit - s.outstanding.Load()
	w.low = limit - need
	if w.n = int(min(free, maxPrefetch)); w.one {
		w.n = s.width
	}
	if w.now = free >= need; w.now && s.pooled {
		f.reserved = int64(w.n)
		s.outstanding.Add(f.reserved)
	}
	switch {
	case s.pooled:
		w.again = 20 * time.Millisecond // nothing tells when the application gives a connection back
	case need <= 1:
		w.again = time.Second
	default:
		w.again = max(time.Millisecond, patience-waited)
	}
	return w
}

// waitRoom waits until it is worth claiming, and returns how many jobs to claim, or that it is the turn of a job in
// quarantine. It returns 0 when ctx has ended.
func (c *claimer) waitRoom(ctx context.Context) (n int, one bool) {
	s := c.feed.slots
	for {
		if ctx.Err() != nil {
			return 0, false
		}
		w := c.want(c.feed)
		if w.now {
			return w.n, w.one
		}
		s.low.Store(w.low)
		if s.outstanding.Load() > w.low {
			sleep(ctx, w.again, s.room)
		}
		s.low.Store(-1)
	}
}

// unreserve gives back what want reserved: by now, what was claimed counts as outstanding.
func (c *claimer) unreserve() {
	if n := c.feed.reserved; n > 0 {
		c.feed.reserved = 0
		c.feed.slots.outstanding.Add(-n)
		c.q.connections.wake()
	}
}

// pace is how fast a queue's handlers return, and so how many jobs are worth claiming before a slot is free for them.
type pace struct {
	ahead      time.Duration // how long they may wait for a slot
	rate       float64       // how many handlers return in a second
	counted    int64         // slots.returned when rate was last measured
	countedAt  time.Time
	workedOn   int64 // jobs, and
	workedUpTo int64 // nanoseconds, that no longer count
}

// prefetch is how many jobs to claim in addition to those that have a slot.
func (p *pace) prefetch(s *slots, now time.Time) int64 {
	if d := now.Sub(p.countedAt); d > 2*time.Millisecond {
		returned := s.returned.Load()
		p.rate = (p.rate + float64(returned-p.counted)/d.Seconds()) / 2
		p.counted, p.countedAt = returned, now
	}
	return min(maxPrefetch, int64(min(p.rate, p.could(s))*p.ahead.Seconds()))
}

// could is how many handlers could return in a second if they took as long as they have on average. Without it, a few long
// handlers that end together would look like a high rate.
func (p *pace) could(s *slots) float64 {
	worked, returned := s.worked.Load(), s.returned.Load()
	if returned < 100 {
		return 0 // too few to tell
	}
	// Only recent handlers count.
	if returned-p.workedOn > 1000 {
		p.workedUpTo, p.workedOn = p.workedUpTo+(worked-p.workedUpTo)/2, p.workedOn+(returned-p.workedOn)/2
	}
	return float64(s.count) * float64(returned-p.workedOn) / (time.Duration(worked-p.workedUpTo) + 1).Seconds()
}

// claim claims up to n jobs that have lost no lease, from the cursor on.
func (c *claimer) claim(ctx context.Context, n int) (int, error) {
	f, s := c.feed, c.feed.slots
	f.quarantine.othersTurn = false
	began := time.Now()
	from, how := f.cursor.begin(began)
	ask := claim{queue: f.queue, kinds: f.kinds, limit: n, lease: c.w.lease, by: c.id, from: from}
	// The shutdown does not end this: a claim that commits while nobody waits for its answer leaves leases that have to run
	// out.
	unbroken, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.w.lease)
	leases, err := c.q.claim(unbroken, c.db, &ask, claimJobs, append(ask.args(), max(0, int64(s.count*s.width)-s.outstanding.Load()+f.reserved))...)
	cancel()
	f.claimedAt = time.Now()
	if err != nil {
		return 0, err
	}
	f.cursor.claimed(&ask, leases, how, began, f.claimedAt)
	if len(leases) == 0 {
		return 0, nil
	}
	c.exec.accept(s, leases, ask.began)
	if f.cursor.full || f.claimedAt.Sub(f.found) < 50*time.Millisecond {
		if !c.announced.at.IsZero() && c.listener.unannounce(ctx, []string{f.queue}) == nil {
			c.announced.at = time.Time{}
		}
	}
	f.found = f.claimedAt
	return len(leases), nil
}

// rest waits for work: a few short pauses first, because jobs rarely come one at a time; then it announces that it waits,
// looks once more, and waits for a notification, the next delayed job or the poll interval. It reports whether a
// notification ended the wait.
func (c *claimer) rest(ctx context.Context, pause time.Duration) bool {
	if time.Since(c.feed.found) < quietBefore {
		return c.nap(ctx, min(pause, quietBefore))
	}
	listening := c.listener.confirmed.Load()
	if listening && (!c.listener.waits.Load() || time.Since(c.announced.at) > announceAgain) {
		if time.Since(c.announced.tried) < c.announced.rest {
			return c.nap(ctx, quietBefore/2)
		}
		c.announced.tried = time.Now()
		err := c.listener.announce(ctx, []string{c.feed.queue})
		c.announced.at = time.Now() // if it failed, not again with every poll
		c.announced.rest = min(announceRest, max(quietBefore, announceShare*c.announced.at.Sub(c.announced.tried)))
		if err == nil {
			return false // a job may have been committed just before the announcement
		}
	}
	poll := c.w.poll
	if poll == 0 {
		if poll = pollListening; !listening || c.listener.notOfTx.Load() {
			poll = pollUnheard
		}
	}
	wait := poll*9/10 + rand.N(max(1, poll/5))
	// Soon after the announcement it looks again: a producer may just have seen that nobody waits, and so may a transaction
	// that is still open.
	for _, look := range [...]time.Duration{quietFor + time.Millisecond, 3 * quietFor, 9 * quietFor} {
		if announced := time.Since(c.announced.at); announced < look {
			wait = min(wait, look-announced)
			break
		}
	}
	if wait > 9*quietFor {
		if due, ok := c.nextDue(ctx); ok {
			wait = min(wait, due)
		}
	}
	return c.nap(ctx, wait)
}

func (c *claimer) nap(ctx context.Context, d time.Duration) (woken bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-c.wake:
		return true
	}
	return false
}

// rouse ends the claimer's present nap, or the next one. Anybody may call it.
func (c *claimer) rouse() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// nextDue is how long it takes until the next delayed job is due. It looks at the jobs that were not due when the last
// claim began, because one of them may have become due since.
func (c *claimer) nextDue(ctx context.Context) (time.Duration, bool) {
	const next = `
select (extract(epoch from min(j.run_at) - statement_timestamp()) * 1000000)::bigint
  from unnest($2::smallint[]) as p(priority)
 cross join lateral (
       select run_at from onceq.jobs
        where queue = $1::text and priority = p.priority and run_at > $3::timestamptz
        order by run_at limit 1) j`
	var due *int64
	cursor := &c.feed.cursor
	priorities := make([]int16, 0, len(cursor.places))
	for _, p := range cursor.places {
		priorities = append(priorities, int16(p.priority))
	}
	switch err := c.q.guarded(ctx, c.db, next, []any{c.feed.queue, priorities, cursor.upTo}, &due); {
	case err == nil:
		c.q.works(c.id, workNextDue, c.feed.queue)
	case ctx.Err() == nil:
		c.q.fails(c.id, workNextDue, c.feed.queue, err)
	}
	if due == nil {
		return 0, false
	}
	return time.Duration(*due)*time.Microsecond + time.Millisecond, true
}

// draining is what the claimers of one Drain share. Each holds mu while it claims, so that they claim one at a time and
// know what the others found.
type draining struct {
	promoter *promoter         // used under mu
	mu       sync.Mutex        // guards what follows, and is held while a claimer claims
	budget   int               // how many jobs may still be claimed
	claimers int               // those that have not failed
	resting  map[*claimer]bool // those that found nothing since the last time that any found something or a handler ran
	cutShort bool              // the context ended with work left
}

func newDraining(limit, claimers int, p *promoter) *draining {
	return &draining{promoter: p, budget: limit, claimers: claimers, resting: make(map[*claimer]bool)}
}

// drain claims and hands out until the budget is used up, or until nothing is due in any queue and nothing runs: a job of
// one queue may enqueue for another.
func (c *claimer) drain(ctx context.Context, d *draining) error {
	for {
		n, one := c.waitRoom(ctx)
		d.mu.Lock()
		if d.budget == 0 || n == 0 {
			d.cutShort = d.cutShort || d.budget > 0 // by ctx
			d.mu.Unlock()
			c.unreserve()
			return nil
		}
		idle := c.exec.tasks.holdsNone()
		found, err := c.drainSome(ctx, min(n, d.budget), one)
		if err == nil && found == 0 {
			idle, err = d.promote(ctx, idle)
		}
		c.unreserve()
		d.budget -= found
		switch {
		case err != nil:
			d.claimers--
			delete(d.resting, c)
			if ctx.Err() != nil {
				d.cutShort = true // the error comes from a statement that the end of ctx cut off
			}
		case found > 0 || !idle || len(c.feed.quarantine.ids) > 0:
			clear(d.resting)
		default:
			d.resting[c] = true
		}
		done := len(d.resting) == d.claimers
		if done {
			d.budget = 0 // for the others as well
		}
		d.mu.Unlock()
		switch {
		case err != nil && ctx.Err() == nil:
			return err
		case done:
			return nil
		case found == 0:
			sleep(ctx, 2*time.Millisecond, c.feed.slots.room)
		}
	}
}

// promote lets jobs into their lanes, and reports whether there is certainly no more work: idle says that nothing runs.
func (d *draining) promote(ctx context.Context, idle bool) (bool, error) {
	did, err := d.promoter.promote(ctx)
	return idle && did.calls == 0 && !did.busy, err
}

// drainSome claims for drain: a job in quarantine, if there is one that may start, or up to n other jobs.
func (c *claimer) drainSome(ctx context.Context, n int, one bool) (found int, err error) {
	f, s := c.feed, c.feed.slots
	if err := c.look(ctx, f); err != nil || f.paused() {
		return 0, err
	}
	if !one && len(f.quarantine.ids) == 0 {
		if err := c.fillQuarantine(ctx, rescanRows); err != nil {
			return 0, err
		}
		one = c.quarantineDue(f) && s.outstanding.Load()-f.reserved <= int64((s.count-1)*s.width)
	}
	if one {
		return c.claimQuarantined(ctx)
	}
	f.cursor.restart()
	if found, err = c.claim(ctx, n); err == nil && found == 0 && len(f.quarantine.ids) == 0 {
		err = c.fillQuarantine(ctx, math.MaxInt32)
	}
	return found, err
}

// findLost looks for jobs that have lost a lease, among the first $3 due jobs of each priority, and for kinds that are not
// in $2.
const findLost = `
select array_agg(j.id) filter (where j.kind = any ($2::text[])), array_agg(j.lost) filter (where j.kind = any ($2::text[])),
       array_agg(distinct j.kind) filter (where j.kind <> all ($2::text[]))
  from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select id, kind, leased_until, lost + (leased_until is not null)::int as lost
         from onceq.jobs
        where queue = $1::text and priority = p.priority and run_at <= statement_timestamp()
        order by run_at, id
        limit $3::bigint) j
 where (j.leased_until is null or j.leased_until <= statement_timestamp()) and (j.lost > 0 or j.kind <> all ($2::text[]))`

// fillQuarantine is the rescan of Drain, whose claims all begin at the beginning. It looks among the first jobs of each
// priority, or among all jobs when there is nothing else. As the rescan does, it warns of kinds without a handler.
func (c *claimer) fillQuarantine(ctx context.Context, among int) error {
	var ids []int64
	var lost []int32
	var unknown []string
	err := c.q.guarded(ctx, c.db, findLost, []any{c.feed.queue, c.feed.kinds, among}, &ids, &lost, &unknown)
	if err != nil {
		return err
	}
	c.warnOf(unknown)
	seen := make([]lostJob, len(ids))
	for i, id := range ids {
		seen[i] = lostJob{id, int(lost[i])}
	}
	c.feed.quarantine.saw(seen)
	return nil
}
