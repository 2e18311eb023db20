package onceq

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"
)

// lane is one queue of a run: one claimer, and slots goroutines that run handlers.
type lane struct {
	*run
	queue     string
	slots     *slots
	startsAll bool          // nothing is claimed ahead: a kind's first lost lease is its last, and only what was started may lose one
	wake      chan struct{} // a notification

	// Owned by the claimer.
	reserved   int64      // of outstanding: for the claim that is on its way
	suspects   []int64    // jobs seen that have lost a lease, those first that did so least often
	othersTurn bool       // a suspect was claimed, and nothing else was looked for since
	at         []position // how far it has claimed, by priority
	trails     [PriorityLow - PriorityHigh + 1]trail
	through    [PriorityLow - PriorityHigh + 1]bool // the latest look at that priority came to its end
	round      int
	full       bool      // the last claim was: there is more
	rate       float64   // handlers that return in a second
	workedOn   int64     // jobs and
	workedUpTo int64     // nanoseconds that do not count any more
	counted    int64     // returned, when rate was last taken
	countedAt  time.Time //
	claimedAt  time.Time
	claimedTo  time.Time     // the database's clock just before that
	lookedAt   time.Time     // last claim that looked
	lookTook   time.Duration // and what it cost
	widelyAt   time.Time     // last one over the whole margin
	wideTook   time.Duration
	sweptAt    time.Time
	sweepEnded time.Time
	sweepTook  time.Duration
	found      time.Time // last claim that found something
	announced  time.Time // zero: not announced
	announcing time.Time // the latest try
	unknown    map[string]bool
	claimFails int
}

func newLane(r *run, s *slots) *lane {
	l := &lane{run: r, queue: s.queue, slots: s, at: fromStart(), wake: make(chan struct{}, 1), unknown: make(map[string]bool)}
	for _, h := range r.handlers {
		l.startsAll = l.startsAll || h.maxLost == 1
	}
	return l
}

// loop claims and hands out until ctx ends.
func (l *lane) loop(ctx context.Context) {
	pause := time.Millisecond
	for {
		n, suspect := l.waitRoom(ctx)
		var found int
		var err error
		switch {
		case suspect:
			found, err = l.claimSuspect(ctx)
		case n > 0:
			found, err = l.claimSome(ctx, n)
		}
		l.unreserve()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			l.claimFails++
			wait := min(5*time.Second, 50*time.Millisecond<<min(l.claimFails, 10))
			l.q.fails(l.id, workClaim, l.queue, err, slog.Duration("next_try_in", wait))
			l.announced = time.Time{}
			if !sleep(ctx, wait/2+rand.N(wait), nil) {
				return
			}
			continue
		}
		l.claimFails = 0
		l.q.works(l.id, workClaim, l.queue)
		if found > 0 {
			pause = time.Millisecond
		}
		if suspect {
			continue
		}
		if moved := l.lookBehind(ctx); moved || l.full {
			continue
		}
		woken := l.rest(ctx, pause)
		if ctx.Err() != nil {
			return
		}
		if pause *= 2; woken {
			pause = time.Millisecond
		}
	}
}

// waitRoom waits until it is worth claiming and gives how many jobs, or that it is the turn of a suspect; 0 when ctx has
// ended. While there is more than it can take, it claims for a quarter of its room at a time, or every few milliseconds.
func (l *lane) waitRoom(ctx context.Context) (n int, suspect bool) {
	const patience = 5 * time.Millisecond
	for {
		if ctx.Err() != nil {
			return 0, false
		}
		suspect = l.suspectDue()
		now := time.Now()
		if d := now.Sub(l.countedAt); d > 2*time.Millisecond {
			returned := l.slots.returned.Load()
			rate := float64(returned-l.counted) / d.Seconds()
			l.rate = (l.rate + rate) / 2
			l.counted, l.countedAt = returned, now
		}
		prefetch := min(maxPrefetch, int64(min(l.rate, l.could())*l.ahead.Seconds()))
		if l.startsAll {
			prefetch = 0
		}
		slots := l.slots.count
		if l.slots.pooled {
			l.q.connections.mu.Lock()
			slots = l.q.connections.allow(l.slots)
		}
		limit, need := int64(slots*l.slots.width)+prefetch, int64(1)
		waited := now.Sub(l.claimedAt)
		switch {
		case suspect:
			limit, need = int64((slots-1)*l.slots.width), 0 // the next slot is the suspect's
		case l.full && waited < patience:
			need = max(1, limit/4)
		}
		free := limit - l.slots.outstanding.Load()
		if n = int(min(free, maxPrefetch)); suspect {
			n = l.slots.width
		}
		enough := free >= need
		if l.slots.pooled {
			if enough {
				l.reserved = int64(n)
				l.slots.outstanding.Add(l.reserved)
			}
			l.q.connections.mu.Unlock()
		}
		if enough {
			return n, suspect
		}
		l.slots.low.Store(limit - need)
		timer := time.NewTimer(max(time.Millisecond, patience-waited))
		switch {
		case l.slots.pooled:
			timer.Reset(20 * time.Millisecond) // the application gives connections back without a word
		case need <= 1:
			timer.Reset(time.Second)
		}
		if limit-l.slots.outstanding.Load() < need {
			select {
			case <-l.slots.room:
			case <-timer.C:
			case <-ctx.Done():
			}
		}
		timer.Stop()
		l.slots.low.Store(-1)
	}
}

// could is how many handlers could return in a second, as long as they took so far on average: some long ones that end
// together are no reason to claim ahead.
func (l *lane) could() float64 {
	worked, returned := l.slots.worked.Load(), l.slots.returned.Load()
	if returned < 100 {
		return 0 // too few to say
	}
	// Of late only.
	if returned-l.workedOn > 1000 {
		l.workedUpTo, l.workedOn = l.workedUpTo+(worked-l.workedUpTo)/2, l.workedOn+(returned-l.workedOn)/2
	}
	return float64(l.slots.count) * float64(returned-l.workedOn) / (time.Duration(worked-l.workedUpTo) + 1).Seconds()
}

// unreserve gives back what waitRoom reserved: what was claimed is outstanding by now.
func (l *lane) unreserve() {
	if n := l.reserved; n > 0 {
		l.reserved = 0
		l.slots.outstanding.Add(-n)
		l.q.connections.wake()
	}
}

func (l *lane) claimSome(ctx context.Context, n int) (int, error) {
	l.othersTurn = false
	began := time.Now()
	look := !l.full || began.Sub(l.lookedAt) > max(100*time.Millisecond, 50*l.lookTook)
	wide := look && began.Sub(l.sweepEnded) > 2*sweepEvery && began.Sub(l.widelyAt) > max(time.Second, 50*l.wideTook)
	from := l.lookFrom(look, wide)
	if l.round++; l.round%lowestEvery == 0 {
		slices.Reverse(from)
	}
	c := claim{queue: l.queue, kinds: l.kinds, limit: n, lease: l.lease, from: from}
	// Not cut off by the shutdown: a claim that commits while nobody listens leaves leases to run out.
	unbroken, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.lease)
	leases, err := l.q.claim(unbroken, l.side, &c, claimJobs, append(c.args(), max(0, int64(l.slots.count*l.slots.width)-l.slots.outstanding.Load()+l.reserved))...)
	cancel()
	l.claimedAt = time.Now()
	if err != nil {
		return 0, err
	}
	l.claimedTo = c.now
	if look {
		l.lookedAt, l.lookTook = l.claimedAt, l.claimedAt.Sub(began)
	}
	if wide {
		l.widelyAt, l.wideTook = l.claimedAt, l.claimedAt.Sub(began)
	}
	l.full = len(leases) == n
	l.advance(&c, leases)
	if len(leases) == 0 {
		return 0, nil
	}
	l.exec.accept(l.slots, leases, c.began)
	if l.full || l.claimedAt.Sub(l.found) < 50*time.Millisecond {
		l.unannounce(ctx)
	}
	l.found = l.claimedAt
	return len(leases), nil
}

// rest waits for work: a few short pauses first, because work rarely comes alone; then it announces that it
// waits, looks once more, and waits for a notification, the next delayed job or the poll interval. It says
// whether a notification ended it.
func (l *lane) rest(ctx context.Context, pause time.Duration) bool {
	if time.Since(l.found) < quietBefore {
		return l.nap(ctx, min(pause, quietBefore))
	}
	listening := l.listening.Load()
	if listening && time.Since(l.announced) > announceAgain {
		if time.Since(l.announcing) < announceRest {
			return l.nap(ctx, quietBefore/2)
		}
		l.announcing = time.Now()
		if err := l.announce(ctx); err == nil {
			return false // a job may have been committed just before the announcement
		} else if ctx.Err() == nil {
			l.q.fails(l.id, workAnnounce, l.queue, err)
			l.announced = time.Now() // not with every poll
		}
	}
	poll := l.poll
	if poll == 0 {
		if poll = pollListening; !listening || l.silent.Load() {
			poll = pollDeaf
		}
	}
	wait := poll*9/10 + rand.N(max(1, poll/5))
	// Soon after the announcement: for producers that had just seen that nobody waits, and for transactions that had.
	for _, look := range [...]time.Duration{quietFor + time.Millisecond, 3 * quietFor, 9 * quietFor} {
		if announced := time.Since(l.announced); announced < look {
			wait = min(wait, look-announced)
			break
		}
	}
	if wait > 9*quietFor {
		if due, ok := l.nextDue(ctx); ok {
			wait = min(wait, due)
		}
	}
	return l.nap(ctx, wait)
}

func (l *lane) nap(ctx context.Context, d time.Duration) (woken bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-l.wake:
		return true
	}
	return false
}

// rouse ends the lane's nap, or the next one.
func (l *lane) rouse() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// nextDue is how long it takes until the next delayed job is due, of those that were not due yet when the last claim
// began: one may have become so since.
func (l *lane) nextDue(ctx context.Context) (time.Duration, bool) {
	const next = `
select (extract(epoch from min(j.run_at) - statement_timestamp()) * 1000000)::bigint
  from unnest($2::smallint[]) as p(priority)
 cross join lateral (
       select run_at from onceq.jobs
        where queue = $1::text and priority = p.priority and run_at > $3::timestamptz
        order by run_at limit 1) j`
	var due *int64
	priorities := make([]int16, 0, len(l.at))
	for _, p := range l.at {
		priorities = append(priorities, int16(p.priority))
	}
	switch err := l.q.guarded(ctx, l.side, next, []any{l.queue, priorities, l.claimedTo}, &due); {
	case err == nil:
		l.q.works(l.id, workNextDue, l.queue)
	case ctx.Err() == nil:
		l.q.fails(l.id, workNextDue, l.queue, err)
	}
	if due == nil {
		return 0, false
	}
	return time.Duration(*due)*time.Microsecond + time.Millisecond, true
}
