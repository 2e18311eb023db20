package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// laner is a session that can put jobs into lanes of which each runs one job at a time, in order. Jobs take turns among the
// lanes.
type laner interface {
	fillLanes(ctx context.Context, n, lanes int) (stretch, error)
}

// Names of what the tests lanes, rate and fair measure.
const (
	plainJobs     = "as many jobs without lanes"
	oneLane       = "one lane, handlers on a lease"
	oneLaneTx     = "one lane, handlers in transactions"
	intoIdleLane  = "a job into an idle lane"
	intoNoLane    = "the same without a lane"
	besideNone    = "plain jobs beside none that wait"
	besideWaiting = "plain jobs beside those that wait"
	pagesName     = ": pages for each job"
)

func lanesName(lanes int) string { return fmt.Sprintf("%s lanes of %d", count(lanes), laneLength) }

const laneLength = 10 // jobs of each lane, where there are many

// laneKind puts job n into lane n modulo the number of lanes.
func laneKind(lanes int) onceq.Kind[Task] {
	return onceq.Kind[Task]{Name: "noop", Lane: func(t Task) string { return fmt.Sprint("lane-", t.N%lanes) }}
}

func (q *onceqQueue) bulkLanes(ctx context.Context, from, to, lanes int) error {
	kind := laneKind(lanes)
	return q.enqueue(ctx, from, to, func(n int) onceq.Job { return kind.Job(Task{n}) })
}

func (s *goSession) fillLanes(ctx context.Context, n, lanes int) (stretch, error) {
	q, ok := s.queue.(interface {
		bulkLanes(ctx context.Context, from, to, lanes int) error
	})
	if !ok {
		return stretch{}, errNotOffered
	}
	return s.timed(n, func(first int) error { return q.bulkLanes(ctx, first, first+n, lanes) })
}

// lanesTrials are about jobs that wait for each other, beside those that do not.
func lanesTrials(b *bench) []trial {
	var trials []trial
	add := func(p peer, variant string, effect string, jobs, lanes int) {
		trials = append(trials, trial{
			test: "lanes", variant: variant, peer: p,
			prepare: func(ctx context.Context, r *room) (err error) {
				switch s, ok := r.session.(laner); {
				case lanes == 0:
					_, err = r.fill(ctx, jobs, false)
				case ok:
					_, err = s.fillLanes(ctx, jobs, lanes)
				default:
					return errNotOffered
				}
				return err
			},
			measure: func(ctx context.Context, r *room) ([]figure, error) {
				d := drain{effect: effect, warm: jobs / 10, total: jobs, limit: b.sizes.limit}
				if jobs > b.sizes.drained {
					d.limit *= 3
				}
				if p.name == "onceq" && lanes == 1 {
					s, err := ours(r).drainInOrder(ctx, d)
					return rateFigure("jobs/s", s), err
				}
				s, err := r.drain(ctx, d)
				return rateFigure("jobs/s", s), err
			},
		})
	}
	for _, p := range b.peers {
		switch {
		case p.name != "onceq" && p.name != "graphile-worker" && p.name != "pg-boss", p.settings == "notify":
			continue
		}
		if p.name == "onceq" || p.settings == "tuned" {
			add(p, lanesName(b.sizes.lanes/10), noEffect, b.sizes.lanes/10*laneLength, b.sizes.lanes/10)
		}
		add(p, oneLane, noEffect, b.sizes.lane, 1) // what is best for many lanes may be the worst for one
		if p.name != "onceq" {
			continue // the others' handlers have no transaction that completes a job
		}
		add(p, plainJobs, noEffect, b.sizes.lanes*laneLength, 0)
		add(p, lanesName(b.sizes.lanes), noEffect, b.sizes.lanes*laneLength, b.sizes.lanes)
		add(p, oneLaneTx, oneRow, b.sizes.lane, 1)
		trials = append(trials, b.idleLane(p), b.besideLanes(p, 0), b.besideLanes(p, b.sizes.waiting))
	}
	return trials
}

// drainInOrder works off one lane, whose jobs must start in the order of their numbers.
func (q *onceqQueue) drainInOrder(ctx context.Context, d drain) (stretch, error) {
	var last, wrong atomic.Int64
	last.Store(-1)
	start := func(n int) {
		if last.Swap(int64(n)) != int64(n)-1 {
			wrong.Add(1)
		}
	}
	t := newTracker(d)
	kind := onceq.Kind[Task]{Name: "noop"}
	handler := kind.Handle(func(_ context.Context, _ *onceq.Lease, task Task) error {
		start(task.N)
		t.count(1)
		return nil
	})
	if d.effect == oneRow {
		handler = kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, task Task) error {
			start(task.N)
			_, err := tx.Exec(ctx, insertRow, task.N)
			t.count(1)
			return err
		})
	}
	stop, err := q.run(ctx, onceq.WorkerConfig{}, handler)
	if err != nil {
		return stretch{}, err
	}
	s, err := t.wait(ctx, stop)
	if n := wrong.Load(); err == nil && n > 0 {
		err = fmt.Errorf("%d jobs of the lane did not start in order", n)
	}
	return s, err
}

// idleLane enqueues jobs without a lane and with one of its own in turn, for a worker that has nothing to do.
func (b *bench) idleLane(p peer) trial {
	return trial{test: "lanes", variant: intoIdleLane, peer: p, repeated: true, measure: func(ctx context.Context, r *room) ([]figure, error) {
		q, kind := ours(r), laneKind(1<<30)
		started := make(chan time.Time, 1)
		stop, err := q.run(ctx, onceq.WorkerConfig{}, kind.Handle(func(context.Context, *onceq.Lease, Task) error {
			started <- time.Now()
			return nil
		}))
		if err != nil {
			return nil, err
		}
		defer stop()
		if err := pause(ctx, time.Second); err != nil { // until the worker listens
			return nil, err
		}
		var all [2][]time.Duration
		for i := range 2 * (b.sizes.idleJobs + warmLatencies) {
			if err := pause(ctx, gap(i/2)); err != nil {
				return nil, err
			}
			job := plainKind.Job(Task{i})
			if i%2 == 1 {
				job = kind.Job(Task{i})
			}
			began := time.Now()
			if _, err := q.Enqueue(ctx, q.pool, job); err != nil {
				return nil, err
			}
			select {
			case at := <-started:
				if i >= 2*warmLatencies {
					all[i%2] = append(all[i%2], at.Sub(began))
				}
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		return []figure{latencyFigure(intoNoLane, all[0]), latencyFigure(intoIdleLane, all[1])}, nil
	}}
}

// besideLanes drains plain jobs while others wait for a lane that stands still. Statements are counted, so that the pages
// show what the rates may hide.
func (b *bench) besideLanes(p peer, waiting int) trial {
	variant := besideNone
	if waiting > 0 {
		variant = besideWaiting
	}
	jobs := b.sizes.drained
	return trial{
		test: "lanes", variant: variant, peer: p, repeated: true, counted: true,
		prepare: func(ctx context.Context, r *room) error {
			q := ours(r)
			if err := q.SetLaneLimit(ctx, q.pool, "noop", "", 0); err != nil {
				return err
			}
			if err := q.bulkLanes(ctx, 0, waiting, 1); err != nil {
				return err
			}
			// Otherwise autovacuum takes a share of the machine, once, for a million rows that came at once.
			if _, err := q.pool.Exec(ctx, "vacuum analyze onceq.job_waits"); err != nil {
				return err
			}
			_, err := r.fill(ctx, jobs, false)
			return err
		},
		measure: func(ctx context.Context, r *room) ([]figure, error) {
			o, err := r.observe(ctx)
			if err != nil {
				return nil, err
			}
			defer o.close()
			s, err := r.drain(ctx, drain{warm: jobs / 10, total: jobs, limit: b.sizes.limit})
			if err != nil {
				return nil, err
			}
			pages, err := o.pages(ctx)
			return []figure{
				{variant: variant, unit: "jobs/s", value: s.rate(), all: s.all},
				{variant: variant + pagesName, unit: "pages", value: float64(pages) / float64(s.all)},
			}, err
		},
	}
}
