package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// growthTrials measure our own rates beside what piles up: a backlog, completed fences, jobs for later, leases in
// flight, and statistics that the planner believes although they are no longer true.
func growthTrials(b *bench) []trial {
	var trials []trial
	add := func(name string, withKeys bool, arrange func(ctx context.Context, q *onceqQueue) error) {
		for _, p := range b.peers {
			if p.name != "onceq" {
				continue
			}
			trials = append(trials, trial{
				test: "growth", variant: name, peer: p, stale: true,
				prepare: func(ctx context.Context, r *room) error { return arrange(ctx, ours(r)) },
				measure: func(ctx context.Context, r *room) ([]figure, error) {
					enqueued, err := r.fill(ctx, b.sizes.growth, withKeys)
					if err != nil {
						return nil, err
					}
					if err := r.server.settle(ctx, r.url, false); err != nil {
						return nil, err
					}
					n := b.sizes.growth
					drained, err := r.drain(ctx, drain{warm: n / 5, total: n, limit: b.sizes.limit, more: true})
					return []figure{
						{variant: "enqueue: " + name, unit: "jobs/s", value: enqueued.rate()},
						{variant: "drain: " + name, unit: "jobs/s", value: drained.rate()},
					}, err
				},
			})
		}
	}
	fill := func(n int, withKeys bool) func(ctx context.Context, q *onceqQueue) error {
		return func(ctx context.Context, q *onceqQueue) error {
			return q.enqueue(ctx, -n, 0, func(n int) onceq.Job { return jobOf(n, withKeys) })
		}
	}
	for _, n := range b.sizes.backlogs {
		add(backlogName(n), false, fill(n, false))
	}
	small, big := b.sizes.backlogs[0], b.sizes.backlogs[len(b.sizes.backlogs)-1]
	add(keyedBase, true, fill(small, true))
	add(count(b.sizes.fences)+" completed fences", true, func(ctx context.Context, q *onceqQueue) error {
		const fences = `
insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, finished_at, lifetime)
select 0, 'noop', 'done:' || n, 3, -n, 1, now(), now(), 86400000 from generate_series(1, $1::bigint) n`
		if _, err := q.pool.Exec(ctx, fences, b.sizes.fences); err != nil {
			return err
		}
		return fill(small, true)(ctx, q)
	})
	add(count(b.sizes.scheduled)+" scheduled for later", false, func(ctx context.Context, q *onceqQueue) error {
		err := q.enqueue(ctx, 0, b.sizes.scheduled, func(n int) onceq.Job {
			job := jobOf(n, false)
			job.Delay = time.Hour
			return job
		})
		if err != nil {
			return err
		}
		return fill(small, false)(ctx, q)
	})
	add("20k leases in flight", false, func(ctx context.Context, q *onceqQueue) error {
		if err := fill(small+20_000, false)(ctx, q); err != nil {
			return err
		}
		return q.lease(ctx, 20_000)
	})
	add("statistics of an empty table", false, func(ctx context.Context, q *onceqQueue) error {
		if _, err := q.pool.Exec(ctx, noAutovacuum+"; analyze onceq.jobs"); err != nil {
			return err
		}
		return fill(small, false)(ctx, q)
	})
	add("statistics of an all-leased table", false, func(ctx context.Context, q *onceqQueue) error {
		if err := fill(10_000, false)(ctx, q); err != nil {
			return err
		}
		if err := q.lease(ctx, 10_000); err != nil {
			return err
		}
		if _, err := q.pool.Exec(ctx, noAutovacuum+"; analyze onceq.jobs"); err != nil {
			return err
		}
		return fill(small, false)(ctx, q)
	})
	// Postgres knows then how much a plan would cost whose limit it does not know.
	add("statistics of "+count(big)+" jobs", false, func(ctx context.Context, q *onceqQueue) error {
		if err := fill(big, false)(ctx, q); err != nil {
			return err
		}
		_, err := q.pool.Exec(ctx, "analyze onceq.jobs")
		return err
	})
	add("a queue newer than the statistics", false, func(ctx context.Context, q *onceqQueue) error {
		err := q.enqueue(ctx, 0, small, func(n int) onceq.Job {
			job := jobOf(n, false)
			job.Queue = "older"
			return job
		})
		if err != nil {
			return err
		}
		if _, err := q.pool.Exec(ctx, noAutovacuum+"; analyze onceq.jobs"); err != nil {
			return err
		}
		return fill(small, false)(ctx, q)
	})
	return trials
}

const (
	noAutovacuum = "alter table onceq.jobs set (autovacuum_enabled = off)"
	keyedBase    = "keyed"
)

func backlogName(n int) string { return "backlog " + count(n) }

// count writes round numbers as people do.
func count(n int) string {
	switch {
	case n >= 1_000_000 && n%100_000 == 0:
		return fmt.Sprintf("%gM", float64(n)/1e6)
	case n >= 1000 && n%100 == 0:
		return fmt.Sprintf("%gk", float64(n)/1e3)
	}
	return fmt.Sprint(n)
}

// lease takes n jobs and keeps them.
func (q *onceqQueue) lease(ctx context.Context, n int) error {
	for n > 0 {
		leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: min(n, 10_000), Lease: time.Hour})
		if err != nil {
			return err
		}
		if len(leases) == 0 {
			return fmt.Errorf("%w: %d jobs could not be leased", pgx.ErrNoRows, n)
		}
		n -= len(leases)
	}
	return nil
}
