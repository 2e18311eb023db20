// Package quarantine decides when a job may start that has lost a lease.
//
// A job that has lost a lease is in quarantine: it may have ended its process, or it only ran in the same process. A worker
// claims these jobs one by one, and only when they start at once. So a job that ends its process every time is found out
// and takes no other job with it: the claim marks that the job was started, and no job is charged for a lease that it did
// not use. They are claimed in the order of how many leases they have lost, so that the innocent ones are done before the
// one that is at fault. A job leaves the quarantine when its handler asks for another run, and stays there when that fails.
//
// The next job starts when the one before has been dealt with, or has run for as long as Probation says: the fewer leases a
// job may still lose, the longer no other starts. So a job that hangs delays the others for a while and not for ever. At
// most half of a queue's handlers run jobs in quarantine. Jobs that wait are not claimed: other workers may take them.
//
// A process that is killed leaves all of its jobs here, and most likely none of them was the reason. So for each one that ends
// while its lease lasts, one more may start beside the others, until a lease is lost again. That is for jobs that have lost one lease.
// If one of these is a poison job after all, the others lose a second one with it, and from then on each of them starts alone.
//
// A job with the rate of a limit has missed its slot when a rescan finds it. The executor gets it another one, and a timer has the
// claimer claim it then: a rescan would find it too late once more.
package quarantine

import (
	"slices"
	"sync"
	"time"
)

// The numbers that somebody has chosen.
const (
	remembered = 10_000           // jobs that a claimer remembers
	widthLasts = 10 * time.Second // so long it counts for others that a job ended well
)

// List holds the jobs of one queue that a rescan found and that have lost a lease. Only the claimer's goroutine uses
// it.
type List struct {
	IDs        []int64 // those that have lost the fewest leases first
	once       int     // how many of them have lost one lease
	OthersTurn bool    // one of them was claimed, and since then no claim for other jobs was made
}

// Job is a job that has lost leases.
type Job struct {
	ID   int64
	Lost int // how many
}

// Jobs gives jobs from two columns.
func Jobs(ids []int64, lost []int32) []Job {
	all := make([]Job, len(ids))
	for i, id := range ids {
		all[i] = Job{id, int(lost[i])}
	}
	return all
}

// Saw replaces the jobs in quarantine.
func (q *List) Saw(all []Job) {
	slices.SortStableFunc(all, func(a, b Job) int { return a.Lost - b.Lost })
	q.IDs, q.once = q.IDs[:0], 0
	for _, j := range all[:min(len(all), remembered)] {
		if q.IDs = append(q.IDs, j.ID); j.Lost == 1 {
			q.once++
		}
	}
}

// SlotCame puts a job before the others that have lost as many leases. No claim may be under way.
func (q *List) SlotCame(job Job) {
	if job.Lost > 1 {
		q.IDs = slices.Insert(q.IDs, q.once, job.ID)
		return
	}
	q.IDs = slices.Insert(q.IDs, 0, job.ID)
	q.once++
}

// Forget is for a pause, and its end.
func (q *List) Forget() { q.IDs, q.once = q.IDs[:0], 0 }

// Next gives the jobs from which the next claim chooses, and says whether they may start beside each other.
func (q *List) Next() (few []int64, beside bool) {
	const most = 100
	if n := min(q.once, most); n > 0 {
		return q.IDs[:n], true
	}
	return q.IDs[:min(len(q.IDs), most)], false
}

// Without leaves out jobs.
func (q *List) Without(jobs map[int64]bool) {
	is := func(id int64) bool { return jobs[id] }
	once := slices.DeleteFunc(slices.Clone(q.IDs[:q.once]), is)
	more := slices.DeleteFunc(q.IDs[q.once:], is)
	q.IDs, q.once = slices.Concat(once, more), len(once)
}

// Past leaves out the first n jobs, which a claim has passed. Meanwhile something may have been paused or resumed, and then
// there are none.
func (q *List) Past(n int) {
	q.once = max(0, q.once-n)
	q.IDs = q.IDs[min(n, len(q.IDs)):]
}

// Probation is how long a job in quarantine runs before the next one may start beside it: 1 s, or 16 s, 81 s
// and 256 s if two, three or four are gone of the leases that a job may usually lose until it is dead.
func Probation(gone int) time.Duration {
	k := max(1, gone)
	return time.Duration(k*k*k*k) * time.Second
}

// Turn is the right to start a job in quarantine. There is one for all workers of a process, whatever their schemas and
// databases, because a process that ends takes all of them with it. Nobody keeps it for long: a claim ends after pg.SessionLimit at
// the latest, and a claimer whose claims fail asks for no turn.
type Turn struct {
	mu       sync.Mutex // guards what follows; nothing is waited for under it
	claiming int        // turns that were taken for claims that are under way
	started  map[job]*time.Timer
	more     int       // how many may start beside the first
	alone    bool      // a job that has to start alone waits or has started: no other starts until none is left
	latest   time.Time // when one ended well
	waiting  map[waiter]bool
}

// waiter is a claimer that waits until a job may start. Rouse must not wait.
type waiter interface{ Rouse() }

// job is one that has started and was not dealt with, and whose probation is not over.
type job struct {
	schema any   // the handle on it, and
	token  int64 // which is unique in it
}

// Process is that of this process.
var Process Turn

// may reports whether a job may start, or with beside one that may do so beside others. The caller holds mu.
func (t *Turn) may(beside bool) bool {
	n := t.claiming + len(t.started)
	return n == 0 || beside && !t.alone && n <= t.more
}

// Free reports whether a job may start now, with beside one that may do so beside others. If none may, the claimer is roused when
// one may.
func (t *Turn) Free(c waiter, beside bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.may(beside) {
		return true
	}
	if t.alone = t.alone || !beside; t.waiting == nil {
		t.waiting = make(map[waiter]bool)
	}
	t.waiting[c] = true
	return false
}

// Take takes a turn for a claim, if a job may start.
func (t *Turn) Take(beside bool) bool {
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

// Start is for who took the turn and has started a job. d is its probation. alone says that no other may start beside it
// meanwhile: it may have lost another lease since the rescan.
func (t *Turn) Start(schema any, token int64, d time.Duration, alone bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.started == nil {
		t.started = make(map[job]*time.Timer)
	}
	t.claiming--
	t.alone = t.alone || alone
	t.started[job{schema, token}] = time.AfterFunc(d, func() { t.Leave(schema, token) })
}

// Passed is for who took the turn and started no job.
func (t *Turn) Passed() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.claiming--
	t.left()
}

// Leave ends the turn of the job with this token, if that job still has one.
func (t *Turn) Leave(schema any, token int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	job := job{schema, token}
	over := t.started[job]
	if over == nil {
		return
	}
	over.Stop()
	delete(t.started, job)
	t.left()
}

// left rouses those that wait. The caller holds mu.
func (t *Turn) left() {
	if t.claiming+len(t.started) == 0 {
		t.alone = false
	}
	for c := range t.waiting {
		c.Rouse()
	}
	clear(t.waiting)
}

// EndedWell is for a job that has come to an end while its lease lasted.
func (t *Turn) EndedWell() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.more++
	t.latest = time.Now()
}

// Narrow is for a lease that was lost.
func (t *Turn) Narrow() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.more = 0
}
