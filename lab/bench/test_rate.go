package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq"
)

// What the test rate asks for.
const (
	ratePerSecond = 1000
	rateProcesses = 8
	rateBurst     = 101 // the default
	lowRate       = 10
	setBurst      = 3
	rateReached   = "of the rate, once all processes work"
	burstSeen     = "burst that the starts need"
	slowAsks      = "4 handlers of 20 ms: asks for new slots, by starts"
	slowRate      = "4 handlers of 20 ms: starts"
)

// smallBurst names what is found with a burst that is set.
func smallBurst(rate int, what string) string {
	return fmt.Sprintf("%s a second, burst %d: %s", count(rate), setBurst, what)
}

// rateTrials let 8 processes start jobs of one limit at 1,000 a second, of which there are always more; then with a small burst, of
// which all but one job is kept for late starts, and at a rate for which that burst is more than needed.
func rateTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name != "onceq" {
			continue
		}
		trials = append(trials, rateTrial(b, p, onceq.Limit{Rate: ratePerSecond}, rateReached, burstSeen), slowTrial(b, p))
		for _, rate := range []int{ratePerSecond, lowRate} {
			trials = append(trials, rateTrial(b, p, onceq.Limit{Rate: rate, Burst: setBurst}, smallBurst(rate, rateReached), smallBurst(rate, burstSeen)))
		}
	}
	return trials
}

// rateTrial says how much of the limit's rate is reached, and which burst the starts need.
func rateTrial(b *bench, p peer, limit onceq.Limit, reached, burst string) trial {
	jobs := int(float64(limit.Rate) * b.sizes.limited.Seconds())
	return trial{
		test: "rate", variant: reached, peer: p,
		prepare: func(ctx context.Context, r *room) error {
			q := ours(r)
			if err := q.SetLimit(ctx, q.pool, "provider", limit); err != nil {
				return err
			}
			kind := onceq.Kind[Task]{Name: "noop", Limit: func(Task) string { return "provider" }}
			return q.enqueue(ctx, 0, jobs*2, func(n int) onceq.Job { return kind.Job(Task{n}) })
		},
		measure: func(ctx context.Context, r *room) ([]figure, error) {
			var mu sync.Mutex
			var starts []float64 // milliseconds
			enough := make(chan struct{})
			ms, err := r.join(ctx, rateProcesses, order{Starts: true}, func(s said, _ int) {
				mu.Lock()
				defer mu.Unlock()
				for _, start := range s.Starts {
					if starts = append(starts, start[1]); len(starts) == jobs {
						close(enough)
					}
				}
			})
			if err != nil {
				return nil, err
			}
			defer ms.stop()
			select {
			case <-enough:
			case <-time.After(2*b.sizes.limited + b.sizes.limit):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			mu.Lock()
			defer mu.Unlock()
			if err := ms.err(); err != nil {
				return nil, err
			}
			slices.Sort(starts)
			return []figure{
				{variant: reached, unit: "%", value: 100 * steady(starts) / float64(limit.Rate), ticks: tenths(starts)},
				{variant: burst, unit: "jobs", value: burstOf(starts, float64(limit.Rate))},
			}, nil
		},
	}
}

// slowTrial has handlers that are slower than the rate, so that jobs miss their slots, and counts how often they ask for new
// ones.
func slowTrial(b *bench, p peer) trial {
	kind := onceq.Kind[Task]{Name: "noop", Limit: func(Task) string { return "provider" }}
	return trial{
		test: "rate", variant: slowAsks, peer: p, counted: true,
		prepare: func(ctx context.Context, r *room) error {
			q := ours(r)
			if err := q.SetLimit(ctx, q.pool, "provider", onceq.Limit{Rate: ratePerSecond}); err != nil {
				return err
			}
			return q.enqueue(ctx, 0, int(ratePerSecond*b.sizes.limited.Seconds()), func(n int) onceq.Job { return kind.Job(Task{n}) })
		},
		measure: func(ctx context.Context, r *room) ([]figure, error) {
			o, err := r.observe(ctx)
			if err != nil {
				return nil, err
			}
			defer o.close()
			var started atomic.Int64
			cfg := onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 4}}}
			stop, err := ours(r).run(ctx, cfg, kind.Handle(func(ctx context.Context, _ *onceq.Lease, _ Task) error {
				started.Add(1)
				return pause(ctx, 20*time.Millisecond)
			}))
			if err != nil {
				return nil, err
			}
			err = pause(ctx, b.sizes.limited)
			stop()
			if err != nil {
				return nil, err
			}
			asks, err := o.calls(ctx, "%with ordinality as u(id, claims, holder, n)%")
			return []figure{
				{variant: slowAsks, unit: "messages", value: float64(asks) / float64(max(1, started.Load()))},
				{variant: slowRate, unit: "jobs/s", value: float64(started.Load()) / b.sizes.limited.Seconds()},
			}, err
		},
	}
}

// tenths counts the starts, in milliseconds, by tenths of a second.
func tenths(starts []float64) (ticks []tick) {
	for i, at := range starts {
		for at-starts[0] >= 100*float64(len(ticks)) {
			ticks = append(ticks, tick{At: float64(len(ticks)) / 10, Done: i})
		}
	}
	return ticks
}

// steady is how many jobs started in a second, without the first and the last tenth of them.
func steady(starts []float64) float64 {
	first, last := len(starts)/10, len(starts)*9/10
	if last <= first {
		return 0
	}
	return 1000 * float64(last-first) / (starts[last] - starts[first])
}

// burstOf is the smallest burst with which no window of time has more of the starts, in milliseconds, than the burst and what
// the rate allows in the window.
func burstOf(starts []float64, rate float64) (burst float64) {
	least := math.Inf(1)
	for i, at := range starts {
		allowed := rate * at / 1000
		least = min(least, float64(i)-allowed)
		burst = max(burst, float64(i+1)-allowed-least)
	}
	return burst
}

// fairTrials put ten jobs of one tenant behind very many of another, again and again, and measure until the ten are done.
func fairTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		switch {
		case p.name == "onceq":
			trials = append(trials, fairTrial(b, p, 1), fairTrial(b, p, tenantShare))
		case p.name == "pg-boss" && p.settings != "default":
			trials = append(trials, boundedTrial(b, p, 1), boundedTrial(b, p, tenantShare/2))
		}
	}
	return trials
}

// fairTrial has a lane for each tenant, and turns among them.
func fairTrial(b *bench, p peer, each int) trial {
	name := fairName(each)
	kind := onceq.Kind[Task]{
		Name:  "noop",
		Lane:  func(t Task) string { return []string{"large", "small"}[t.N] },
		Limit: func(Task) string { return "machine" },
	}
	return trial{
		test: "fair", variant: name, peer: p,
		prepare: func(ctx context.Context, r *room) error {
			q := ours(r)
			if err := q.SetLimit(ctx, q.pool, "machine", onceq.Limit{AtOnce: tenantShare}); err != nil {
				return err
			}
			if err := q.SetLaneLimit(ctx, q.pool, "noop", "", each); err != nil {
				return err
			}
			return q.enqueue(ctx, 0, b.sizes.big, func(int) onceq.Job { return kind.Job(Task{0}) })
		},
		measure: func(ctx context.Context, r *room) ([]figure, error) {
			return tenBehind(ctx, ours(r), name, kind, b.sizes.limit, b.sizes.big)
		},
	}
}

// boundedTrial is for a peer that has no turns. What it has is a bound for each tenant, which leaves a part of the workers to others.
func boundedTrial(b *bench, p peer, each int) trial {
	type bounded interface {
		fillLarge(ctx context.Context, n int) (stretch, error)
		tenBehind(ctx context.Context, each, large int, limit time.Duration) ([]time.Duration, float64, error)
	}
	return trial{
		test: "fair", variant: fairName(each), peer: p,
		prepare: func(ctx context.Context, r *room) error {
			_, err := r.session.(bounded).fillLarge(ctx, b.sizes.big)
			return err
		},
		measure: func(ctx context.Context, r *room) ([]figure, error) {
			all, rate, err := r.session.(bounded).tenBehind(ctx, each, b.sizes.big, b.sizes.limit)
			return fairFigures(fairName(each), all, rate), err
		},
	}
}

func fairFigures(name string, all []time.Duration, rate float64) []figure {
	return []figure{latencyFigure(name, all), {variant: name + ": the other's jobs", unit: "jobs/s", value: rate}}
}

// tenantShare is how many jobs of all tenants run at once, and how many of each.
const tenantShare = 100

func fairName(each int) string {
	return fmt.Sprintf("10 jobs of one tenant, %d at once of each", each)
}

// tenBehind works off the large tenant's jobs, and enqueues ten of the small one's every now and then.
func tenBehind(ctx context.Context, q *onceqQueue, name string, kind onceq.Kind[Task], limit time.Duration, large int) ([]figure, error) {
	var others atomic.Int64
	done := make(chan time.Time, 10)
	stop, err := q.run(ctx, onceq.WorkerConfig{}, kind.Handle(func(_ context.Context, _ *onceq.Lease, t Task) error {
		if t.N == 1 {
			done <- time.Now()
		} else {
			others.Add(1)
		}
		return nil
	}))
	if err != nil {
		return nil, err
	}
	defer stop()
	if err := pause(ctx, time.Second); err != nil {
		return nil, err
	}
	var all []time.Duration
	began, before := time.Now(), others.Load()
	for i := 0; time.Since(began) < limit && others.Load() < int64(large)*9/10; i++ {
		if err := pause(ctx, gap(i)); err != nil {
			return nil, err
		}
		jobs := make([]onceq.Job, 10)
		for i := range jobs {
			jobs[i] = kind.Job(Task{1})
		}
		enqueued := time.Now()
		if _, err := q.EnqueueMany(ctx, q.pool, jobs); err != nil {
			return nil, err
		}
		var last time.Time
		for range jobs {
			select {
			case last = <-done:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		all = append(all, last.Sub(enqueued))
	}
	rate := float64(others.Load()-before) / time.Since(began).Seconds()
	return fairFigures(name, all, rate), nil
}
