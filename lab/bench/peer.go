package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/lab/peers"
)

// peer is one queue with one choice of settings.
type peer struct {
	name     string
	version  string
	settings string // "default", "tuned", …
	note     string // what that means
	open     func(ctx context.Context, e env) (session, error)
	missing  string   // why it cannot run here
	only     []string // the tests that it is for; nil for all

	// Those that can work in several processes: the program that member.go talks to, and the SQL that counts the jobs
	// that are not done.
	member func(url string) *exec.Cmd
	undone string
}

func (p peer) String() string { return p.name + " " + p.settings }

// moduleVersion gives the version of a dependency that this program was built with.
func moduleVersion(path string) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == path {
				return m.Version
			}
		}
	}
	return "unknown"
}

// env is what a peer is opened on.
type env struct {
	url   string       // an empty database
	redis *peers.Redis // nil where there is none
	conns int          // connections of the pool; 0 for the peer's default
}

// session is a peer over an empty database. A method that the peer has nothing for returns errNotOffered.
type session interface {
	// fill enqueues n jobs in bulk, 1,000 a call.
	fill(ctx context.Context, n int, keyed bool) (stretch, error)

	// transact runs n transactions that write a row of the application's and enqueue a job, over 8 connections.
	transact(ctx context.Context, n int, how string) (stretch, error)

	// drain runs one worker until d.total jobs are done.
	drain(ctx context.Context, d drain) (stretch, error)

	// latency enqueues n jobs, one after the other, for an idle worker, and gives the times from the call to the
	// start of the handler. It ends early after limit.
	latency(ctx context.Context, n int, limit time.Duration) ([]time.Duration, error)

	// process is the process that does the work; 0 for this one.
	process() int
	close()
}

var errNotOffered = errors.New("not offered")

// How transactions of test B enqueue.
const (
	unkeyed  = "unkeyed"
	keyed    = "keyed"
	oneBatch = "keyed, one batch" // begin, row, enqueue and commit in one round trip
)

// What handlers do.
const (
	noEffect    = ""
	oneRow      = "row"       // one row of the application's, in the completion's transaction
	rowsInBatch = "row batch" // the same for 100 jobs in one transaction
)

// drain says how much to work and which part of it counts.
type drain struct {
	effect string
	warm   int           // jobs done before the clock starts
	total  int           // jobs done when it stops
	limit  time.Duration // the clock stops then, with fewer jobs
	more   bool          // jobs are left behind: the clock stops when the handler of the last that counts returns
}

// stretch is a measured piece of work.
type stretch struct {
	jobs  int // that count
	took  time.Duration
	all   int // with the warm-up: what WAL and CPU time were spent on
	ticks []tick
}

func (s stretch) rate() float64 { return float64(s.jobs) / s.took.Seconds() }

// tick says how many jobs were done at a time, from the start of the worker.
type tick struct {
	At   float64 `json:"at"` // seconds
	Done int     `json:"done"`
}

// tracker counts jobs as handlers return.
type tracker struct {
	drain
	done     atomic.Int64
	began    time.Time
	once     sync.Once
	warmAt   time.Time // written by the handler of the last warm-up job
	warmed   atomic.Bool
	finished chan struct{}
}

func newTracker(d drain) *tracker {
	t := &tracker{drain: d, began: time.Now(), finished: make(chan struct{})}
	t.warmAt = t.began // where there is no warm-up
	t.warmed.Store(d.warm == 0)
	return t
}

func (t *tracker) count(jobs int) {
	now := t.done.Add(int64(jobs))
	if before := now - int64(jobs); before < int64(t.warm) && now >= int64(t.warm) {
		t.warmAt = time.Now()
		t.warmed.Store(true)
	}
	if now >= int64(t.total) {
		t.once.Do(func() { close(t.finished) })
	}
}

// wait returns when all is done or time is up. stop ends the worker and returns when everything is stored: then the
// clock stops.
func (t *tracker) wait(ctx context.Context, stop func()) (stretch, error) {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	limit := time.NewTimer(t.limit)
	defer limit.Stop()
	var ticks []tick
	for waiting := true; waiting; {
		select {
		case now := <-ticker.C:
			ticks = append(ticks, tick{now.Sub(t.began).Seconds(), int(t.done.Load())})
		case <-t.finished:
			waiting = false
		case <-limit.C:
			waiting = false
		case <-ctx.Done():
			stop()
			return stretch{}, ctx.Err()
		}
	}
	done, end := int(t.done.Load()), time.Now()
	stop()
	if took := time.Since(end); took > 200*time.Millisecond {
		fmt.Fprintf(os.Stderr, "bench: the worker took %s to stop after %s of work\n", took.Round(time.Millisecond), end.Sub(t.began).Round(time.Millisecond))
	}
	if done >= t.total && !t.more {
		end = time.Now()
	}
	return measured(t.drain, t.began, t.warmAt, end, done, t.warmed.Load(), ticks)
}

// measured takes the counting part out of a drain. One that ended before its warm-up is judged by its last second half.
func measured(d drain, began, warmAt, end time.Time, done int, warmed bool, ticks []tick) (stretch, error) {
	s := stretch{jobs: done - d.warm, took: end.Sub(warmAt), all: done, ticks: ticks}
	if warmed && s.jobs > 0 {
		return s, nil
	}
	half := tick{}
	for _, t := range ticks {
		if t.At <= end.Sub(began).Seconds()/2 {
			half = t
		}
	}
	s.jobs, s.took = done-half.Done, end.Sub(began)-time.Duration(half.At*float64(time.Second))
	if done == 0 {
		return s, errors.New("no job was done in time")
	}
	return s, nil
}

// inParallel spreads the numbers 0 to n-1 over clients goroutines.
func inParallel(n, clients int, fn func(i int) error) error {
	var next atomic.Int64
	var failed atomic.Pointer[error]
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(n) && failed.Load() == nil; i = next.Add(1) - 1 {
				if err := fn(int(i)); err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// paced is inParallel with a time for each number: rate of them a second.
func paced(ctx context.Context, n, clients, rate int, fn func(i int) error) error {
	began := time.Now()
	return inParallel(n, clients, func(i int) error {
		if err := pause(ctx, time.Until(began.Add(time.Duration(i)*time.Second/time.Duration(rate)))); err != nil {
			return err
		}
		return fn(i)
	})
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
