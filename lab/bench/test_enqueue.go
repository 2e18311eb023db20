package main

import (
	"context"
)

// bulkTrials are A and A2: one producer, 1,000 jobs a call.
func bulkTrials(b *bench, name string, keyed bool) []trial {
	var trials []trial
	for _, p := range b.peers {
		trials = append(trials, trial{
			test: name, peer: p,
			prepare: func(ctx context.Context, r *room) error {
				_, err := r.fill(ctx, b.sizes.bulk/20, keyed)
				return err
			},
			measure: func(ctx context.Context, r *room) ([]figure, error) {
				s, err := r.fill(ctx, b.sizes.bulk, keyed)
				return rateFigure("jobs/s", s), err
			},
		})
	}
	return trials
}

// transactionTrials are B: 8 clients, each with a connection.
func transactionTrials(b *bench) []trial {
	var trials []trial
	for _, how := range []string{unkeyed, keyed, oneBatch} {
		for _, p := range b.peers {
			if p.settings == "notify" || p.name == "baseline" && (p.settings != "no queue" || how == keyed) {
				continue // the same as another trial
			}
			trials = append(trials, trial{
				test: "B", variant: how, peer: p, conns: 8,
				prepare: func(ctx context.Context, r *room) error {
					_, err := r.transact(ctx, b.sizes.transactions/20, how)
					return err
				},
				measure: func(ctx context.Context, r *room) ([]figure, error) {
					s, err := r.transact(ctx, b.sizes.transactions, how)
					return rateFigure("tx/s", s), err
				},
			})
		}
	}
	return trials
}

// walTrials fill and drain after one checkpoint, so that only the work itself is counted and not the full pages that
// a checkpoint in between would cause.
func walTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.settings == "default" && p.name != "onceq" || p.settings == "notify" || p.name == "baseline" || p.name == "asynq" || p.name == "BullMQ" {
			continue
		}
		for _, withKeys := range []bool{false, true} {
			variant := unkeyed
			if withKeys {
				variant = keyed
			}
			trials = append(trials, trial{test: "WAL", variant: variant, peer: p, measure: func(ctx context.Context, r *room) ([]figure, error) {
				n := b.sizes.wal
				if p.name == "by hand" {
					n = min(n, 20_000)
				}
				var at [3]int64
				var err error
				if at[0], err = r.server.wal(ctx); err != nil {
					return nil, err
				}
				if _, err := r.fill(ctx, n, withKeys); err != nil {
					return nil, err
				}
				if at[1], err = r.server.wal(ctx); err != nil {
					return nil, err
				}
				enqueue := float64(at[1]-at[0]) / float64(n)
				figures := []figure{{variant: variant + ", enqueue", unit: "bytes/job", value: enqueue}}
				s, err := r.drain(ctx, drain{warm: n / 10, total: n, limit: 4 * b.sizes.limit})
				if err != nil {
					return nil, err
				}
				if at[2], err = r.server.wal(ctx); err != nil {
					return nil, err
				}
				drained := float64(at[2]-at[1]) / float64(s.all)
				return append(figures,
					figure{variant: variant + ", drain", unit: "bytes/job", value: drained},
					figure{variant: variant + ", both", unit: "bytes/job", value: enqueue + drained}), nil
			}})
		}
	}
	return trials
}
