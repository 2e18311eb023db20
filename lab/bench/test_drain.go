package main

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// drainTrials are C: a backlog is there, a worker starts, and the clock runs from the first tenth on.
func drainTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name == "baseline" || p.settings == "notify" {
			continue
		}
		trials = append(trials, trial{
			test: "C", peer: p,
			prepare: func(ctx context.Context, r *room) error {
				_, err := r.fill(ctx, b.sizes.drained*11/10, false)
				return err
			},
			measure: func(ctx context.Context, r *room) ([]figure, error) {
				s, err := r.drain(ctx, drain{warm: b.sizes.drained / 10, total: b.sizes.drained * 11 / 10, limit: b.sizes.limit})
				return rateFigure("jobs/s", s), err
			},
		})
	}
	return trials
}

// rowTrials are D. Every peer's pool has 8 connections, River's 16, with which it is faster: ours opens some of its own
// beside the pool. Ours is also measured with pgxpool's default.
func rowTrials(b *bench) []trial {
	var trials []trial
	add := func(p peer, effect, variant string, conns int) {
		trials = append(trials, trial{
			test: "D", variant: variant, peer: p, conns: conns,
			prepare: func(ctx context.Context, r *room) error {
				_, err := r.fill(ctx, b.sizes.rows*11/10, false)
				return err
			},
			measure: func(ctx context.Context, r *room) ([]figure, error) {
				s, err := r.drain(ctx, drain{effect: effect, warm: b.sizes.rows / 10, total: b.sizes.rows * 11 / 10, limit: b.sizes.limit})
				return rateFigure("jobs/s", s), err
			},
		})
	}
	for _, p := range b.peers {
		if p.name == "baseline" || p.settings == "notify" || p.settings == "default" && p.name != "onceq" && p.name != "River" {
			continue
		}
		conns := 8
		if p.name == "River" {
			conns = 16
		}
		add(p, oneRow, "single", conns)
		add(p, rowsInBatch, "100 in one transaction", conns)
		if p.name == "onceq" {
			add(p, oneRow, "single, default pool", 0)
		}
	}
	return trials
}

// snapshotTrials are F: what the rate of the last jobs is after many went through, with and without a session whose
// snapshot keeps vacuum from removing them.
func snapshotTrials(b *bench) []trial {
	var trials []trial
	for _, held := range []bool{false, true} {
		variant := "no snapshot"
		if held {
			variant = "snapshot held"
		}
		for _, p := range b.peers {
			if p.name == "baseline" || p.name == "asynq" || p.name == "BullMQ" || p.settings == "default" && p.name != "onceq" || p.settings == "notify" {
				continue
			}
			total := b.sizes.passed + b.sizes.last
			trials = append(trials, trial{
				test: "F", variant: variant, peer: p,
				prepare: func(ctx context.Context, r *room) error {
					_, err := r.fill(ctx, total, false)
					return err
				},
				measure: func(ctx context.Context, r *room) ([]figure, error) {
					if held {
						release, err := holdSnapshot(ctx, r.url)
						if err != nil {
							return nil, err
						}
						defer release()
					}
					limit := 3 * b.sizes.limit
					if p.name == "by hand" {
						limit = b.sizes.limit // it never gets far
					}
					s, err := r.drain(ctx, drain{warm: b.sizes.passed, total: total, limit: limit})
					return rateFigure("jobs/s", s), err
				},
			})
		}
	}
	return trials
}

// holdSnapshot keeps vacuum from removing what dies from now on.
func holdSnapshot(ctx context.Context, url string) (release func(), err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	release = func() { _ = conn.Close(context.WithoutCancel(ctx)) }
	if _, err := conn.Exec(ctx, "begin isolation level repeatable read; select count(*) from pg_class"); err != nil {
		release()
		return nil, err
	}
	return release, nil
}
