package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq"
)

// storageTrials are what chose the tables' storage parameters: keyed jobs are enqueued and drained at the same time, with
// some thousands waiting, at other fillfactors and with other ways to vacuum.
func storageTrials(b *bench) []trial {
	var trials []trial
	add := func(variant string, took time.Duration, change string) {
		for _, p := range b.peers {
			if p.name != "onceq" {
				continue
			}
			trials = append(trials, trial{
				test: "storage", variant: variant, peer: p,
				prepare: func(ctx context.Context, r *room) error {
					_, err := ours(r).pool.Exec(ctx, change)
					return err
				},
				measure: func(ctx context.Context, r *room) ([]figure, error) { return stored(ctx, r, variant, took) },
			})
		}
	}
	jobs := func(params string) string { return "alter table onceq.jobs set (" + params + ")" }
	fences := func(params string) string { return "alter table onceq.job_fences set (" + params + ")" }
	short, long := b.sizes.loaded, 9*b.sizes.loaded // autovacuum looks once a minute
	add("as migrated", short, "select")
	for _, n := range []int{100, 80, 60, 45, 30} {
		add(fmt.Sprintf("jobs: fillfactor %d", n), short, jobs(fmt.Sprintf("fillfactor = %d", n)))
	}
	for _, n := range []int{100, 80, 60, 50} {
		add(fmt.Sprintf("fences: fillfactor %d", n), short, fences(fmt.Sprintf("fillfactor = %d", n)))
	}
	add("as migrated, for long", long, "select")
	add("not vacuumed, for long", long, jobs("autovacuum_enabled = off")+"; "+fences("autovacuum_enabled = off"))
	add("vacuumed without delay, for long", long, jobs("autovacuum_vacuum_cost_delay = 0")+"; "+fences("autovacuum_vacuum_cost_delay = 0"))
	return trials
}

// steady enqueues and drains jobs with keys at the same time, perSecond of them or, if that is 0, as many as the machine takes,
// and calls sample after each of the parts of the time. It returns the jobs done in a second.
func (q *onceqQueue) steady(ctx context.Context, kind onceq.Kind[Task], perSecond int, took time.Duration, parts int, sample func(part int) error) (float64, error) {
	const waiting = 20_000
	var done atomic.Int64
	stop, err := q.run(ctx, onceq.WorkerConfig{}, kind.Handle(func(context.Context, *onceq.Lease, Task) error {
		done.Add(1)
		return nil
	}))
	if err != nil {
		return 0, err
	}
	defer stop()
	began, n := time.Now(), 0
	for part := 1; part <= parts && err == nil; {
		switch spent := time.Since(began); {
		case spent >= took*time.Duration(part)/time.Duration(parts):
			err = sample(part)
			part++
		case n-int(done.Load()) > waiting, perSecond > 0 && float64(n) >= float64(perSecond)*spent.Seconds():
			err = pause(ctx, time.Millisecond)
		default:
			err = q.enqueue(ctx, n, n+1000, func(n int) onceq.Job { return kind.Job(Task{n}) })
			n += 1000
		}
	}
	return float64(done.Load()) / time.Since(began).Seconds(), err
}

// stored measures what is written and how large the tables get while jobs are enqueued and drained at the same time.
func stored(ctx context.Context, r *room, variant string, took time.Duration) ([]figure, error) {
	q := ours(r)
	before, err := r.server.wal(ctx)
	if err != nil {
		return nil, err
	}
	rate, err := q.steady(ctx, keyedKind, 0, took, 1, func(int) error { return nil })
	if err != nil {
		return nil, err
	}
	after, err := r.server.wal(ctx)
	if err != nil {
		return nil, err
	}
	// Sessions report what they did a second late.
	if err := pause(ctx, 2*time.Second); err != nil {
		return nil, err
	}
	figures := []figure{
		{variant: variant, unit: "jobs/s", value: rate},
		{variant: variant + ": WAL", unit: "bytes/job", value: float64(after-before) / (rate * took.Seconds())},
	}
	for _, table := range []string{"jobs", "job_fences"} {
		var heap, indexes, hot float64
		const read = `
select pg_table_size(relid) / 1048576.0, pg_indexes_size(relid) / 1048576.0, 100.0 * n_tup_hot_upd / greatest(1, n_tup_upd)
  from pg_stat_all_tables where relid = ('onceq.' || $1::text)::regclass`
		if err := q.pool.QueryRow(ctx, read, table).Scan(&heap, &indexes, &hot); err != nil {
			return nil, err
		}
		figures = append(figures,
			figure{variant: variant + ": " + table + ", heap-only updates", unit: "%", value: hot},
			figure{variant: variant + ": " + table + ", table", unit: "MiB", value: heap},
			figure{variant: variant + ": " + table + ", indexes", unit: "MiB", value: indexes})
	}
	return figures, nil
}
