package onceq

import (
	"context"
	"slices"
	"sync"
	"time"
)

// A job that has lost a lease is in quarantine: it may be what ended its process, or it only ran beside. So that one that ends
// its process every time is found out and takes nobody with it, a worker claims these jobs one by one and only when they
// start at once: the claim is the mark that it was started, and no job is charged with a lease that it did not use.
// They go in the order of how often they were lost, so that those that ran beside are done before the one that did it.
//
// The next one starts when the one before has been dealt with, or has run for as long as probation says: the fewer lives it
// has left, the longer no other starts. One that hangs so keeps the others for a while and not for ever. At most half of a
// queue's handlers run jobs in quarantine. Those that wait hold nothing: other workers may have them.

// quarantine has the jobs of one queue that were seen by a rescan and have lost a lease. Only its claimer's goroutine uses it.
type quarantine struct {
	ids        []int64 // those first that lost one least often
	othersTurn bool    // one of them was claimed, and nothing else was looked for since
}

// lostJob is a job that has lost leases.
type lostJob struct {
	id   int64
	lost int // how often
}

const (
	maxQuarantine = 10_000 // jobs that a claimer keeps in mind
	fewQuarantine = 100    // that one claim chooses from
)

// saw takes down which jobs are in quarantine.
func (q *quarantine) saw(all []lostJob) {
	slices.SortStableFunc(all, func(a, b lostJob) int { return a.lost - b.lost })
	q.ids = q.ids[:0]
	for _, j := range all[:min(len(all), maxQuarantine)] {
		q.ids = append(q.ids, j.id)
	}
}

// probation is how long a job in quarantine runs before the next one may start beside it: 1 s, and 16 s, 81 s and 256 s for one with
// three, two and one life left.
func probation(left int) time.Duration {
	k := max(1, DefaultMaxLost-left)
	return time.Duration(k*k*k*k) * time.Second
}

// quarantineTurn is the right to start a job that is in quarantine: one for all workers of a Queue, because a process that
// ends takes all of them with it.
type quarantineTurn struct {
	mu      sync.Mutex // guards what follows
	taken   bool
	token   int64 // of the one that started last; 0 while it is being claimed
	over    *time.Timer
	waiting map[*claimer]bool
}

// free says whether one may start. If not, the claimer is roused when one may.
func (t *quarantineTurn) free(c *claimer) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.taken {
		if t.waiting == nil {
			t.waiting = make(map[*claimer]bool)
		}
		t.waiting[c] = true
	}
	return !t.taken
}

func (t *quarantineTurn) take() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.taken
	t.taken = true
	return !was
}

func (t *quarantineTurn) start(token int64, d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.token = token
	t.over = time.AfterFunc(d, func() { t.leave(token) })
}

// leave ends a turn, if it is still its own.
func (t *quarantineTurn) leave(token int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.taken || t.token != token {
		return
	}
	if t.over != nil {
		t.over.Stop()
	}
	t.taken, t.token, t.over = false, 0, nil
	for c := range t.waiting {
		c.rouse()
	}
	clear(t.waiting)
}

// quarantineDue says whether a job in quarantine is to be claimed before anything else: in turn with the others, so that
// neither waits for all of the other sort.
func (c *claimer) quarantineDue(f *feed) bool {
	return len(f.quarantine.ids) > 0 && !f.quarantine.othersTurn && int(f.slots.quarantined.Load()) < max(1, f.slots.count/2) && c.q.quarantine.free(c)
}

// claimQuarantined claims the first job of those in quarantine that can be had, and starts it.
func (c *claimer) claimQuarantined(ctx context.Context) (int, error) {
	f, in := c.feed, &c.feed.quarantine
	in.othersTurn = true
	if !c.q.quarantine.take() {
		return 0, nil
	}
	few := in.ids[:min(len(in.ids), fewQuarantine)]
	ask := claim{queue: f.queue, lease: c.w.lease}
	unbroken, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.w.lease)
	leases, err := c.q.claim(unbroken, c.db, &ask, claimOne, few)
	cancel()
	if err != nil || len(leases) == 0 {
		c.q.quarantine.leave(0)
		if err == nil {
			in.ids = in.ids[len(few):]
			in.othersTurn = false
		}
		return 0, err
	}
	one := leases[0]
	in.ids = in.ids[slices.Index(few, one.ID)+1:]
	f.found = time.Now()
	c.q.quarantine.start(one.Token, probation(c.w.handlers[one.Kind].maxLost-one.Lost))
	f.slots.quarantined.Add(1)
	f.slots.outstanding.Add(int64(f.slots.width - 1)) // it has a slot for itself
	c.exec.accept(f.slots, leases, ask.began)
	return 1, nil
}
