package main

import (
	"context"
	"fmt"
	"time"

	"github.com/onceq/onceq"
)

// reaperTrials show that one Reaper keeps up: with keys that are free soon, at the highest rate that the machine gives, and
// what a pass costs beside fences that stay and with as many that go.
func reaperTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name != "onceq" {
			continue
		}
		trials = append(trials,
			trial{test: "reaper", variant: "keys taken for seconds", peer: p, measure: func(ctx context.Context, r *room) ([]figure, error) {
				return keepUp(ctx, r, b.sizes.reaping)
			}},
			trial{
				test: "reaper", variant: "pass", peer: p,
				prepare: func(ctx context.Context, r *room) error {
					if err := addFences(ctx, ours(r), b.sizes.fences, time.Hour); err != nil {
						return err
					}
					_, err := ours(r).pool.Exec(ctx, "vacuum onceq.job_fences")
					return err
				},
				measure: func(ctx context.Context, r *room) ([]figure, error) { return passes(ctx, r, b.sizes.fences) },
			})
	}
	return trials
}

// addFences adds completed keys whose window is over after left.
func addFences(ctx context.Context, q *onceqQueue, n int, left time.Duration) error {
	const add = `
insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, finished_at, lifetime)
select 0, 'noop', $3::text || n, 3, -n, 1, now(), now() - interval '1 day', 86400000 + $2::bigint from generate_series(1, $1::bigint) n`
	_, err := q.pool.Exec(ctx, add, n, left.Milliseconds(), left.String())
	return err
}

// keepUp enqueues and drains keyed jobs at once, with one Reaper. A key is free a second after its window of two.
func keepUp(ctx context.Context, r *room, took time.Duration) ([]figure, error) {
	q := ours(r)
	kind := keyedKind
	kind.Window = 2 * time.Second
	reaper, err := onceq.NewReaper(q.Queue, onceq.ReaperConfig{Every: took / 30, Grace: time.Second})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- reaper.Run(ctx) }()
	end := func() error { cancel(); return <-ended }
	var sizes []figure
	rate, err := q.steady(ctx, kind, took, 6, func(part int) error {
		const read = `
select pg_table_size(t) / 1048576.0, pg_indexes_size(t) / 1048576.0, (select count(*) from onceq.job_fences)
  from (select 'onceq.job_fences'::regclass as t) t`
		var heap, indexes, rows float64
		if err := q.pool.QueryRow(ctx, read).Scan(&heap, &indexes, &rows); err != nil {
			return err
		}
		at := fmt.Sprintf("after %s", (took * time.Duration(part) / 6).Round(time.Second))
		sizes = append(sizes, figure{variant: at + ": table", unit: "MiB", value: heap}, figure{variant: at + ": index", unit: "MiB", value: indexes},
			figure{variant: at + ": keys", unit: "rows", value: rows})
		return nil
	})
	if stopped := end(); err == nil {
		err = stopped
	}
	return append([]figure{{variant: "keys taken for seconds", unit: "jobs/s", value: rate}}, sizes...), err
}

// passes measures a pass that finds nothing to remove among n fences, and one that removes a tenth as many.
func passes(ctx context.Context, r *room, n int) ([]figure, error) {
	q := ours(r)
	reaper, err := onceq.NewReaper(q.Queue, onceq.ReaperConfig{Grace: time.Millisecond})
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if _, err := reaper.RunOnce(ctx); err != nil {
		return nil, err
	}
	looked := time.Since(began)
	if err := addFences(ctx, q, n/10, -time.Hour); err != nil {
		return nil, err
	}
	began = time.Now()
	sum, err := reaper.RunOnce(ctx)
	if err != nil {
		return nil, err
	}
	took := time.Since(began)
	return []figure{
		{variant: "a pass over " + count(n) + " fences that stay", unit: "s", value: looked.Seconds()},
		{variant: "the wait after it", unit: "s", value: 100 * looked.Seconds()},
		{variant: "a pass that removes a tenth as many", unit: "keys/s", value: float64(sum.Fences) / took.Seconds()},
	}, nil
}
