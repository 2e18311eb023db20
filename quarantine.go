package onceq

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
)

// A job that has lost a lease is in quarantine: it may have ended its process, or it only ran in the same process. A worker
// claims these jobs one by one, and only when they start at once. So a job that ends its process every time is found out
// and takes no other job with it: the claim marks that the job was started, and no job is charged for a lease that it did
// not use. They are claimed in the order of how many leases they have lost, so that the innocent ones are done before the
// one that is at fault. A job leaves the quarantine when its handler asks for another run, and stays there when that fails.
//
// The next job starts when the one before has been dealt with, or has run for as long as probation says: the fewer leases a
// job may still lose, the longer no other starts. So a job that hangs delays the others for a while and not for ever. At
// most half of a queue's handlers run jobs in quarantine. Jobs that wait are not claimed: other workers may take them.
//
// A process that is killed leaves all of its jobs here, and most likely none of them was the reason. So for each one that ends
// while its lease lasts, one more may start beside the others, until a lease is lost again. That is for jobs that have lost one lease.
// If one of these is a poison job after all, the others lose a second one with it, and from then on each of them starts alone.
//
// A job with the rate of a limit has missed its slot when a rescan finds it. The executor gets it another one, and a timer has the
// claimer claim it then: a rescan would find it too late once more.

// quarantine holds the jobs of one queue that a rescan found and that have lost a lease. Only the claimer's goroutine uses
// it.
type quarantine struct {
	ids        []int64 // those that have lost the fewest leases first
	once       int     // how many of them have lost one lease
	othersTurn bool    // one of them was claimed, and since then no claim for other jobs was made
}

// lostJob is a job that has lost leases.
type lostJob struct {
	id   int64
	lost int // how many
}

// saw replaces the jobs in quarantine.
func (q *quarantine) saw(all []lostJob) {
	slices.SortStableFunc(all, func(a, b lostJob) int { return a.lost - b.lost })
	q.ids, q.once = q.ids[:0], 0
	for _, j := range all[:min(len(all), maxQuarantine)] {
		if q.ids = append(q.ids, j.id); j.lost == 1 {
			q.once++
		}
	}
}

// slotCame puts a job before the others that have lost as many leases. No claim may be under way.
func (q *quarantine) slotCame(id int64, lost int) {
	if lost > 1 {
		q.ids = slices.Insert(q.ids, q.once, id)
		return
	}
	q.ids = slices.Insert(q.ids, 0, id)
	q.once++
}

// forget is for a pause, and its end.
func (q *quarantine) forget() { q.ids, q.once = q.ids[:0], 0 }

// next gives the jobs from which the next claim chooses, and says whether they may start beside each other.
func (q *quarantine) next() (few []int64, beside bool) {
	if n := min(q.once, perStatement); n > 0 {
		return q.ids[:n], true
	}
	return q.ids[:min(len(q.ids), perStatement)], false
}

// without leaves out jobs.
func (q *quarantine) without(jobs map[int64]bool) {
	is := func(id int64) bool { return jobs[id] }
	once := slices.DeleteFunc(slices.Clone(q.ids[:q.once]), is)
	more := slices.DeleteFunc(q.ids[q.once:], is)
	q.ids, q.once = slices.Concat(once, more), len(once)
}

// past leaves out the first n jobs, which a claim has passed. Meanwhile something may have been paused or resumed, and then
// there are none.
func (q *quarantine) past(n int) {
	q.once = max(0, q.once-n)
	q.ids = q.ids[min(n, len(q.ids)):]
}

// probation is how long a job in quarantine runs before the next one may start beside it: 1 s, or 16 s, 81 s and 256 s if
// three, two or one more lost leases would make it dead.
func probation(left int) time.Duration {
	k := max(1, DefaultMaxLost-left)
	return time.Duration(k*k*k*k) * time.Second
}

// quarantineTurn is the right to start a job in quarantine. There is one for all workers of a process, whatever their schemas and
// databases, because a process that ends takes all of them with it. Nobody keeps it for long: a claim ends after pg.SessionLimit at
// the latest, and a claimer whose claims fail asks for no turn.
type quarantineTurn struct {
	mu       sync.Mutex // guards what follows; nothing is waited for under it
	claiming int        // turns that were taken for claims that are under way
	started  map[quarantineJob]*time.Timer
	more     int       // how many may start beside the first
	alone    bool      // a job that has to start alone waits or has started: no other starts until none is left
	latest   time.Time // when one ended well
	waiting  map[*claimer]bool
}

// quarantineJob is a job that has started and was not dealt with, and whose probation is not over.
type quarantineJob struct {
	queue *Queue
	token int64 // unique in its schema
}

// processTurn is that of this process.
var processTurn quarantineTurn

// may reports whether a job may start, or with beside one that may do so beside others. The caller holds mu.
func (t *quarantineTurn) may(beside bool) bool {
	n := t.claiming + len(t.started)
	return n == 0 || beside && !t.alone && n <= t.more
}

// free is may for a claimer, which is roused when a job may start if none may now.
func (t *quarantineTurn) free(c *claimer, beside bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.may(beside) {
		return true
	}
	if t.alone = t.alone || !beside; t.waiting == nil {
		t.waiting = make(map[*claimer]bool)
	}
	t.waiting[c] = true
	return false
}

func (t *quarantineTurn) take(beside bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.may(beside) {
		return false
	}
	if t.claiming+len(t.started) == 0 {
		if t.alone = !beside; time.Since(t.latest) > widthLasts {
			t.more = 0
		}
	}
	t.claiming++
	return true
}

// start is for who took the turn and has started a job of a queue. d is its probation. alone says that no other may start beside it
// meanwhile: it may have lost another lease since the rescan.
func (t *quarantineTurn) start(q *Queue, token int64, d time.Duration, alone bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.started == nil {
		t.started = make(map[quarantineJob]*time.Timer)
	}
	t.claiming--
	t.alone = t.alone || alone
	t.started[quarantineJob{q, token}] = time.AfterFunc(d, func() { t.leave(q, token) })
}

// passed is for who took the turn and started no job.
func (t *quarantineTurn) passed() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.claiming--
	t.left()
}

// leave ends the turn of the job of a queue with this token, if that job still has one.
func (t *quarantineTurn) leave(q *Queue, token int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	job := quarantineJob{q, token}
	over := t.started[job]
	if over == nil {
		return
	}
	over.Stop()
	delete(t.started, job)
	t.left()
}

// left rouses those that wait. The caller holds mu.
func (t *quarantineTurn) left() {
	if t.claiming+len(t.started) == 0 {
		t.alone = false
	}
	for c := range t.waiting {
		c.rouse()
	}
	clear(t.waiting)
}

// endedWell is for a job that has come to an end while its lease lasted.
func (t *quarantineTurn) endedWell() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.more++
	t.latest = time.Now()
}

// narrow is for a lease that was lost.
func (t *quarantineTurn) narrow() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.more = 0
}

// quarantineDue reports whether a job in quarantine should be claimed before anything else. It alternates with the other
// jobs, so that neither sort waits for all of the other. After a failure the claim of other jobs shows when it is over, so that nobody
// waits for the turn while the database of another schema does not answer.
func (c *claimer) quarantineDue(f *feed) bool {
	if len(f.quarantine.ids) == 0 || c.claimsLost || f.quarantine.othersTurn || c.fails > 0 || int(f.slots.quarantined.Load()) >= f.mayQuarantine() {
		return false
	}
	_, beside := f.quarantine.next()
	return c.q.quarantine.free(c, beside && c.w.besides)
}

// mayQuarantine is how many of a feed's handlers may run jobs in quarantine.
func (f *feed) mayQuarantine() int { return max(1, f.slots.count/2) }

// claimQuarantined claims the first job in quarantine that is free, and starts it.
func (c *claimer) claimQuarantined(ctx context.Context, f *feed) {
	q := c.askQuarantined(f)
	if q == nil {
		c.rouse() // no answer comes, and no handler that ends tells
		return
	}
	c.send(&c.claimsLost, func() func() {
		err := q.send(ctx)
		return func() { c.startQuarantined(q, err) }
	})
}

// quarantineClaim is a claim of one of a feed's jobs in quarantine.
type quarantineClaim struct {
	c   *claimer
	f   *feed
	few []int64 // the jobs from which it chooses
	ask claim

	kinds []string // that are not paused
}

// askQuarantined prepares a claim, or returns nil if it is another job's turn, or if this worker has them all. In any case other
// jobs are next.
func (c *claimer) askQuarantined(f *feed) *quarantineClaim {
	in := &f.quarantine
	in.othersTurn = true
	in.without(c.exec.tasks.held())
	few, beside := in.next()
	if len(few) == 0 || c.left == 0 || !c.q.quarantine.take(beside && c.w.besides) {
		c.unreserve(f)
		c.isDue(f)
		return nil
	}
	f.busy, f.due, f.again = true, false, time.Time{}
	f.moves++
	c.left--
	return &quarantineClaim{c: c, f: f, kinds: c.kinds, few: few, ask: claim{queue: f.queue, limit: 1}}
}

// send sends the claim, which the shutdown does not end at once: see claimer.sendClaims.
func (q *quarantineClaim) send(ctx context.Context) error {
	lease := q.c.w.lease
	unbroken, cancel := pg.Outlast(ctx, min(lease, pg.SessionLimit))
	defer cancel()
	if err := q.c.maySend(unbroken, q.kinds, []*claim{&q.ask}); err != nil {
		return err
	}
	return q.c.q.claim(unbroken, q.c.db, lease, q.c.id, []*claim{&q.ask}, stmt.ClaimOne, q.few, q.f.queue, q.kinds)
}

// startQuarantined starts what was claimed.
func (c *claimer) startQuarantined(q *quarantineClaim, err error) {
	f, in := q.f, &q.f.quarantine
	c.left += 1 - len(q.ask.leases)
	if err != nil || len(q.ask.leases) == 0 {
		c.q.quarantine.passed()
	}
	if !c.claimed([]*feed{f}, err) {
		return
	}
	f.busy = false
	defer c.unreserve(f)
	c.isDue(f)
	if len(q.ask.leases) == 0 {
		in.past(len(q.few))
		in.othersTurn = false
		return
	}
	one := q.ask.leases[0]
	in.past(slices.Index(q.few, one.ID) + 1)
	f.found = time.Now()
	c.q.quarantine.start(c.q, one.Token, probation(c.w.handlers[one.Kind].maxLost-one.Lost), one.Lost > 1)
	f.slots.quarantined.Add(1)
	f.slots.outstanding.Add(int64(f.slots.width - 1)) // the job has a slot for itself
	c.exec.accept(f.slots, q.ask.leases, q.ask.began)
}
