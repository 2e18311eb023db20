package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq"
)

// fairnessTrials: what a small queue sees beside a large one, and high priority beside low.
func fairnessTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name != "onceq" {
			continue
		}
		add := func(name string, big onceq.Kind[Task], n int, small onceq.Kind[Task]) {
			trials = append(trials, trial{
				test: "fairness", variant: name, peer: p,
				prepare: func(ctx context.Context, r *room) error {
					return ours(r).enqueue(ctx, 0, n, func(n int) onceq.Job { return big.Job(Task{n}) })
				},
				measure: func(ctx context.Context, r *room) ([]figure, error) {
					return beside(ctx, ours(r), name, big, n, small)
				},
			})
		}
		add("a queue of 10 jobs beside one of "+count(b.sizes.big), onceq.Kind[Task]{Name: "big", Queue: "big"}, b.sizes.big,
			onceq.Kind[Task]{Name: "small", Queue: "small"})
		add("high priority beside "+count(b.sizes.big)+" of low", onceq.Kind[Task]{Name: "big", Priority: onceq.PriorityLow}, b.sizes.big,
			onceq.Kind[Task]{Name: "small", Priority: onceq.PriorityHigh})
		trials = append(trials, lowTrial(b, p))
	}
	return trials
}

// beside works off the big backlog, puts 10 small jobs beside it every now and then, and measures when they start.
func beside(ctx context.Context, q *onceqQueue, name string, big onceq.Kind[Task], n int, small onceq.Kind[Task]) ([]figure, error) {
	var bigDone atomic.Int64
	started := make(chan time.Time, 10)
	stop, err := q.run(ctx, onceq.WorkerConfig{},
		big.Handle(func(context.Context, *onceq.Lease, Task) error { bigDone.Add(1); return nil }),
		small.Handle(func(context.Context, *onceq.Lease, Task) error { started <- time.Now(); return nil }))
	if err != nil {
		return nil, err
	}
	defer stop()
	var all []time.Duration
	for bigDone.Load() < int64(n)*9/10 && len(all) < 2000 {
		if err := pause(ctx, gap(len(all)/10)/2); err != nil {
			return nil, err
		}
		jobs := make([]onceq.Job, 10)
		for i := range jobs {
			jobs[i] = small.Job(Task{i})
		}
		began := time.Now()
		if _, err := q.EnqueueMany(ctx, q.pool, jobs); err != nil {
			return nil, err
		}
		for range jobs {
			select {
			case at := <-started:
				all = append(all, at.Sub(began))
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
	return []figure{latencyFigure(name, all)}, nil
}

// lowTrial counts how many jobs of low priority run while there are plenty of high priority.
func lowTrial(b *bench, p peer) trial {
	low := onceq.Kind[Task]{Name: "low", Priority: onceq.PriorityLow}
	high := onceq.Kind[Task]{Name: "high", Priority: onceq.PriorityHigh}
	n := b.sizes.big / 5
	return trial{
		test: "fairness", variant: "low priority jobs for 100 of high", peer: p,
		prepare: func(ctx context.Context, r *room) error {
			err := ours(r).enqueue(ctx, 0, n, func(n int) onceq.Job { return low.Job(Task{n}) })
			if err != nil {
				return err
			}
			return ours(r).enqueue(ctx, 0, n, func(n int) onceq.Job { return high.Job(Task{n}) })
		},
		measure: func(ctx context.Context, r *room) ([]figure, error) {
			t := newTracker(drain{total: n / 2, limit: b.sizes.limit, more: true})
			var lows, highs, before atomic.Int64
			stop, err := ours(r).run(ctx, onceq.WorkerConfig{},
				low.Handle(func(context.Context, *onceq.Lease, Task) error { lows.Add(1); return nil }),
				high.Handle(func(context.Context, *onceq.Lease, Task) error {
					if highs.Add(1) == int64(n/2) {
						before.Store(lows.Load())
					}
					t.count(1)
					return nil
				}))
			if err != nil {
				return nil, err
			}
			if _, err := t.wait(ctx, stop); err != nil {
				return nil, err
			}
			return []figure{{unit: "jobs", value: 100 * float64(before.Load()) / float64(n/2)}}, nil
		},
	}
}
