package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
)

const (
	dueTicks  = 1000 // of the schedules are due at one second, and the others once a year
	jobsStart = ", until their jobs start"
	lastTick  = ", until the last is in the ledger"
)

func ticksName(schedules, conns int) string {
	return fmt.Sprintf("%s of %s schedules at one second, a pool of %d", count(dueTicks), count(schedules), conns)
}

// ticksPools are sizes of the worker's pool: three quarters of its connections fire ticks. Four is pgxpool's default here.
var ticksPools = []int{4, 10}

// ticksTrials have a thousand schedules due at one second, for one worker at default settings.
func ticksTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name == "onceq" {
			for _, conns := range ticksPools {
				trials = append(trials, ticksTrial(b, p, conns))
			}
		}
	}
	return trials
}

func ticksTrial(b *bench, p peer, conns int) trial {
	name := ticksName(b.sizes.schedules, conns)
	kind := onceq.Kind[Task]{Name: "noop"}
	put := func(ctx context.Context, s *onceqcron.Scheduler, n int, spec string) error {
		return s.Put(ctx, nil, onceqcron.Schedule{Name: fmt.Sprint("schedule-", n), Spec: spec, Job: kind.Job(Task{n})})
	}
	return trial{
		test: "ticks", variant: name, peer: p,
		prepare: func(ctx context.Context, r *room) error {
			s, err := onceqcron.New(ours(r).Queue, ours(r).pool, onceqcron.Config{})
			for n := 0; n < b.sizes.schedules && err == nil; n++ {
				err = put(ctx, s, n, "@yearly")
			}
			return err
		},
		measure: func(ctx context.Context, r *room) ([]figure, error) {
			cfg, err := pgxpool.ParseConfig(r.url)
			if err != nil {
				return nil, err
			}
			cfg.MaxConns = int32(conns)
			pool, err := pgxpool.NewWithConfig(ctx, cfg)
			if err != nil {
				return nil, err
			}
			defer pool.Close()
			q, err := onceq.New(pool, nil)
			if err != nil {
				return nil, err
			}
			at := time.Now().Add(15 * time.Second).Truncate(time.Second).UTC()
			s, err := onceqcron.New(q, pool, onceqcron.Config{})
			for n := 0; n < dueTicks && err == nil; n++ {
				err = put(ctx, s, n, at.Format("5 4 15 2 1 *"))
			}
			if err != nil {
				return nil, err
			}
			late := make(chan time.Duration, dueTicks)
			stop, err := (&onceqQueue{Queue: q, pool: pool}).run(ctx, onceq.WorkerConfig{}, append(s.Handlers(), kind.Handle(func(context.Context, *onceq.Lease, Task) error {
				late <- time.Since(at)
				return nil
			}))...)
			if err != nil {
				return nil, err
			}
			defer stop()
			if time.Until(at) < 3*time.Second {
				return nil, fmt.Errorf("putting them took until %s before the second", time.Until(at))
			}
			all := make([]time.Duration, 0, dueTicks)
			for timeout := time.After(time.Until(at) + b.sizes.limit); len(all) < dueTicks; {
				select {
				case d := <-late:
					all = append(all, d)
				case <-timeout:
					return nil, fmt.Errorf("%d of %d jobs started", len(all), dueTicks)
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
			var last float64
			err = pool.QueryRow(ctx, `select 1000 * extract(epoch from max(done_at) - $1)::float8 from onceq.schedule_ticks where outcome = 'fired'`, at).Scan(&last)
			return []figure{latencyFigure(name+jobsStart, all), {variant: name + lastTick, unit: "ms", value: last}}, err
		},
	}
}
