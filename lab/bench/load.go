package main

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// load is jobs that are enqueued at a steady rate, and when they started.
type load struct {
	rate     int
	enqueued atomic.Int64
	began    []atomic.Int64 // of each job, microseconds since 1970, from just before the enqueueing call

	mu      sync.Mutex
	started int
	seen    []bool
	heard   func(n int, latency time.Duration) // called with mu held, for each job
}

// newLoad is a load for some time; heard gets each job's time from the enqueueing call to the handler.
func newLoad(rate int, took time.Duration, heard func(n int, latency time.Duration)) *load {
	n := int(float64(rate) * took.Seconds())
	return &load{rate: rate, began: make([]atomic.Int64, n), seen: make([]bool, n), heard: heard}
}

// producers are the clients of a load, of which each waits for its enqueueing call to return.
const producers = 12

// run enqueues until the time is over. It returns early where a member failed.
func (l *load) run(ctx context.Context, ms *members, put func(ctx context.Context, n int) error) error {
	return paced(ctx, len(l.began), producers, l.rate, func(n int) error {
		l.began[n].Store(time.Now().UnixMicro())
		if err := put(ctx, n); err != nil {
			return err
		}
		l.enqueued.Add(1)
		return ms.err()
	})
}

// hear takes what members say. A job that is run again counts once.
func (l *load) hear(s said, _ int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, start := range s.Starts {
		n := int(start[0])
		if n < 0 || n >= len(l.seen) || l.seen[n] {
			continue
		}
		l.seen[n] = true
		l.started++
		l.heard(n, time.Duration(math.Round(start[1]*1000))*time.Microsecond-time.Duration(l.began[n].Load())*time.Microsecond)
	}
}

// behind is how many jobs are enqueued and not started.
func (l *load) behind() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return max(0, int(l.enqueued.Load())-l.started)
}

// wait returns when all that was enqueued has started.
func (l *load) wait(ctx context.Context, ms *members, limit time.Duration) error {
	for end := time.Now().Add(limit); l.behind() > 0; {
		if time.Now().After(end) {
			return fmt.Errorf("%d of %d jobs were not started", l.behind(), l.enqueued.Load())
		}
		if err := ms.err(); err != nil {
			return err
		}
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// steadyLatency measures a rate over n members: the times from the enqueueing call to the handler, but for those of the
// first tenth, in which the members begin to work.
func (r *room) steadyLatency(ctx context.Context, variant string, n int, o order, rate int, took time.Duration, put func(ctx context.Context, n int) error) ([]figure, error) {
	var all []time.Duration
	l := newLoad(rate, took, nil)
	l.heard = func(n int, latency time.Duration) {
		if n >= len(l.began)/10 {
			all = append(all, latency)
		}
	}
	o.Starts = true
	ms, err := r.join(ctx, n, o, l.hear)
	if err != nil {
		return nil, err
	}
	defer ms.stop()
	if err := pause(ctx, settled(n)); err != nil {
		return nil, err
	}
	began := time.Now()
	if err := l.run(ctx, ms, put); err != nil {
		return nil, err
	}
	reached := float64(len(l.began)) / time.Since(began).Seconds()
	if err := l.wait(ctx, ms, 2*time.Minute); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return []figure{latencyFigure(variant, all), {variant: variant + ": rate reached", unit: "jobs/s", value: reached}}, nil
}

// settled is how long n members need until they listen and have nothing to do. Where onceq has many, most become dormant, which takes
// until they have announced themselves twice.
func settled(n int) time.Duration {
	d := 2*time.Second + time.Duration(n)*20*time.Millisecond
	if n >= 10 {
		d += 24 * time.Second
	}
	return d
}
