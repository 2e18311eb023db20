package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// wakeTrials give one job after the other to processes that are idle.
func wakeTrials(b *bench) []trial {
	var trials []trial
	for _, n := range b.sizes.wakers {
		for _, p := range b.fleetPeers(n, false) {
			trials = append(trials, trial{
				test: "wake", variant: idleName(n), peer: p, counted: true,
				measure: func(ctx context.Context, r *room) ([]figure, error) { return wake(ctx, r, b.sizes, n) },
			})
		}
	}
	return trials
}

// wake measures from just before a commit to the handler, and counts the statements until the job is gone and until all is
// quiet again. The producer's begin and commit do not count.
func wake(ctx context.Context, r *room, s sizes, n int) ([]figure, error) {
	const (
		rest = 250 * time.Millisecond // until all is quiet again
		own  = 2                      // begin and commit
	)
	o, err := r.observe(ctx)
	if err != nil {
		return nil, err
	}
	defer o.close()
	pool, err := pgxpool.New(ctx, r.url)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	started := make(chan time.Time, 1)
	ms, err := r.join(ctx, n, order{Starts: true}, func(s said, _ int) {
		for _, start := range s.Starts {
			started <- time.UnixMicro(int64(start[1] * 1000))
		}
	})
	if err != nil {
		return nil, err
	}
	defer ms.stop()
	if err := pause(ctx, settled(n)); err != nil {
		return nil, err
	}
	idle, err := o.rate(ctx, s.idle/2)
	if err != nil {
		return nil, err
	}
	var all []time.Duration
	var gone, quiet float64            // statements more than when idle
	warm := warmLatencies * min(n, 10) // each that may be woken has been, before it counts
	for i := range s.samples + warm {
		if err := pause(ctx, gap(i)); err != nil {
			return nil, err
		}
		before, err := o.statements(ctx)
		if err != nil {
			return nil, err
		}
		began := time.Now()
		var committed time.Time
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			err := r.session.(enqueuer).put(ctx, tx, i, false)
			committed = time.Now() // the commit itself counts
			return err
		})
		if err != nil {
			return nil, err
		}
		var at time.Time
		select {
		case at = <-started:
		case err := <-ms.failed:
			return nil, err
		case <-time.After(time.Minute):
			return nil, errors.New("a job was not started within a minute")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if err := o.none(ctx, r.peer.undone, time.Minute); err != nil {
			return nil, err
		}
		after, err := o.statements(ctx)
		if err != nil {
			return nil, err
		}
		goneAfter := time.Since(began)
		if err := pause(ctx, rest); err != nil {
			return nil, err
		}
		then, err := o.statements(ctx)
		if err != nil {
			return nil, err
		}
		if i >= warm {
			all = append(all, at.Sub(committed))
			gone += float64(after-before-own) - idle*goneAfter.Seconds()
			quiet += float64(then-before-own) - idle*time.Since(began).Seconds()
		}
	}
	samples := float64(len(all))
	return []figure{
		latencyFigure(idleName(n), all),
		{variant: idleName(n) + goneName, unit: "count", value: max(0, gone) / samples},
		{variant: idleName(n) + ": statements until all is quiet", unit: "count", value: max(0, quiet) / samples},
	}, nil
}
