package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// latencyFigure gives median and 99th percentile in milliseconds.
func latencyFigure(variant string, all []time.Duration) figure {
	slices.Sort(all)
	f := figure{variant: variant, unit: "ms"}
	if len(all) > 0 {
		at := func(share float64) float64 {
			return all[int(share*float64(len(all)-1)+0.5)].Seconds() * 1000
		}
		f.value, f.p99 = at(0.5), at(0.99)
	}
	return f
}

// latencyTrials are E: one job after the other for a worker that has nothing else to do, mostly at default settings.
func latencyTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name == "baseline" || p.name == "by hand" || p.settings == "tuned" && p.name != "River" {
			continue // those have the latency of their defaults, or of notify
		}
		trials = append(trials, trial{test: "E", peer: p, measure: func(ctx context.Context, r *room) ([]figure, error) {
			all, err := r.latency(ctx, b.sizes.samples, b.sizes.limit)
			return []figure{latencyFigure("", all)}, err
		}})
	}
	return trials
}

// loadedTrials are E2: producers whose transactions are open for a while, so that jobs become visible out of order.
func loadedTrials(b *bench) []trial {
	const producers, rate = 12, 1000
	var trials []trial
	for _, p := range b.peers {
		if p.name != "onceq" && p.name != "River" {
			continue
		}
		conns := producers + 4
		if p.name == "River" {
			conns += 8 // ours opens up to 7 of its own beside the pool
		}
		trials = append(trials, trial{test: "E2", peer: p, conns: conns, measure: func(ctx context.Context, r *room) ([]figure, error) {
			s := r.session.(*goSession)
			n := int(rate * b.sizes.loaded.Seconds())
			committed, started := make([]time.Time, n), make([]time.Time, n)
			var done atomic.Int64
			stop, err := s.work(ctx, noEffect, func(i, _ int) {
				started[i] = time.Now()
				done.Add(1)
			})
			if err != nil {
				return nil, err
			}
			defer stop()
			if err := pause(ctx, time.Second); err != nil {
				return nil, err
			}
			notifications, stopListening, err := countNotifications(ctx, r.url, p.name)
			if err != nil {
				return nil, err
			}
			defer stopListening()
			before := notifications() // of workers that were idle
			began := time.Now()
			err = paced(ctx, n, producers, rate, func(i int) error {
				return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
					if err := s.put(ctx, tx, i, false); err != nil {
						return err
					}
					err := pause(ctx, time.Millisecond+time.Duration(i*7919%19000)*time.Microsecond)
					committed[i] = time.Now() // the commit itself counts
					return err
				})
			})
			if err != nil {
				return nil, err
			}
			took := time.Since(began)
			for end := time.Now().Add(30 * time.Second); done.Load() < int64(n); {
				if time.Now().After(end) {
					return nil, fmt.Errorf("%d of %d jobs were started", done.Load(), n)
				}
				time.Sleep(10 * time.Millisecond)
			}
			var all []time.Duration
			for i := n / 10; i < n; i++ {
				all = append(all, started[i].Sub(committed[i]))
			}
			return []figure{
				latencyFigure("", all),
				{variant: "rate reached", unit: "jobs/s", value: float64(n) / took.Seconds()},
				{variant: "notifications", unit: "count", value: float64(notifications() - before)},
			}, nil
		}})
	}
	return trials
}

// countNotifications counts what workers are told from now on: the rows of wakes for ours, which are as many; for others it
// listens where the worker does, as pg_stat_activity tells.
func countNotifications(ctx context.Context, url, peer string) (count func() int64, stop func(), err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, nil, err
	}
	if peer == "onceq" {
		return func() (n int64) {
			_ = pause(ctx, 2*time.Second) // a session reports its counts after a second of rest
			_ = conn.QueryRow(ctx, "select n_tup_ins from pg_stat_user_tables where relname = 'wakes'").Scan(&n)
			return n
		}, func() { _ = conn.Close(ctx) }, nil
	}
	var listen string
	err = conn.QueryRow(ctx, "select query from pg_stat_activity where datname = current_database() and query ilike 'listen %' limit 1").Scan(&listen)
	if err == nil {
		_, err = conn.Exec(ctx, listen)
	}
	if err != nil {
		_ = conn.Close(ctx)
		return nil, nil, fmt.Errorf("no worker listens: %w", err)
	}
	var n atomic.Int64
	waiting, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			if _, err := conn.WaitForNotification(waiting); err != nil {
				return
			}
			n.Add(1)
		}
	})
	return n.Load, func() {
		cancel()
		wg.Wait()
		_ = conn.Close(ctx)
	}, nil
}
