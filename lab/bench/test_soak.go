package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// soakTrials keep a load up for long, over two worker processes, while another session holds a snapshot for the middle
// third.
func soakTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.fleetPeers(2, true) {
		if p.settings == "default" && p.name == "River" {
			continue // cannot keep up with the load
		}
		trials = append(trials, trial{
			test: "soak", variant: unkeyed, peer: p, conns: producers,
			measure: func(ctx context.Context, r *room) ([]figure, error) {
				return soak(ctx, r, b.sizes.soak, unkeyed, order{}, func(ctx context.Context, n int) error {
					return r.session.(enqueuer).put(ctx, nil, n, false)
				})
			},
		})
	}
	return trials
}

// soakKeyedTrials are the same with keyed jobs, of which the Reaper has as much to remove as is added.
func soakKeyedTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.fleetPeers(2, true) {
		if p.name != "onceq" {
			continue
		}
		trials = append(trials, trial{
			test: soakKeyed, variant: keyed, peer: p, conns: producers,
			measure: func(ctx context.Context, r *room) ([]figure, error) {
				q := ours(r)
				return soak(ctx, r, b.sizes.soak, keyed, order{Reap: true}, func(ctx context.Context, n int) error {
					job := jobOf(n, true)
					job.Window = 5 * time.Second
					_, err := q.Enqueue(ctx, q.pool, job)
					return err
				})
			},
		})
	}
	return trials
}

const soakKeyed = "soak-keyed"

// soakRate is the load, in jobs a second.
const soakRate = 3000

// minute is a sixtieth of a soak: a minute of an hour.
type minute struct {
	At        float64 `json:"at"` // minutes since the start
	P50       float64 `json:"p50"`
	P99       float64 `json:"p99"`    // milliseconds, of the jobs that started in it
	Behind    int     `json:"behind"` // jobs that are enqueued and not started
	Size      float64 `json:"size"`   // MiB, of all tables and indexes but the application's
	Dead      int     `json:"dead"`   // rows, by the server's own count
	Memory    float64 `json:"memory"` // MiB, resident, of the larger process
	ClientCPU float64 `json:"cpu"`    // % of a core, of the worker processes and the producer
	ServerCPU float64 `json:"server_cpu"`
}

var thirds = []string{"first third", "snapshot held", "last third"}

func thirdName(variant string, third int) string { return variant + ", " + thirds[third] }

func soak(ctx context.Context, r *room, took time.Duration, variant string, o order, put func(ctx context.Context, n int) error) ([]figure, error) {
	conn, err := pgx.Connect(ctx, r.url)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(ctx) }()
	var mu sync.Mutex // between the load and the minutes; guards these two
	var inThird, inMinute []time.Duration
	l := newLoad(soakRate, took, func(_ int, latency time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		inThird, inMinute = append(inThird, latency), append(inMinute, latency)
	})
	o.Starts = true
	ms, err := r.join(ctx, 2, o, l.hear)
	if err != nil {
		return nil, err
	}
	defer ms.stop()
	if err := pause(ctx, settled(2)); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	began := time.Now()
	var load sync.WaitGroup
	load.Go(func() {
		if err := l.run(ctx, ms, put); err != nil {
			ms.fail(err)
		}
	})
	defer load.Wait()
	defer cancel()

	var figures []figure
	var minutes []minute
	release := func() {}
	defer func() { release() }()
	for third := range thirds {
		if third == 1 {
			if release, err = holdSnapshot(ctx, r.url); err != nil {
				return nil, err
			}
		}
		var last minute
		for i := 20 * third; i < 20*(third+1); i++ {
			m, err := r.server.newMeter(ctx, nil, ms.pids())
			if err != nil {
				return nil, err
			}
			from := time.Now()
			select {
			case <-time.After(time.Until(began.Add(took * time.Duration(i+1) / 60))):
			case err := <-ms.failed:
				return nil, err
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			mu.Lock()
			latency := latencyFigure("", inMinute)
			inMinute = nil
			mu.Unlock()
			last = minute{At: time.Since(began).Minutes(), P50: latency.value, P99: latency.p99, Behind: l.behind()}
			if _, last.ClientCPU, last.ServerCPU, err = m.stop(ctx); err != nil {
				return nil, err
			}
			last.ClientCPU *= 100 / time.Since(from).Seconds()
			last.ServerCPU *= 100 / time.Since(from).Seconds()
			for _, pid := range ms.pids() {
				last.Memory = max(last.Memory, memoryOf(pid, "VmRSS"))
			}
			const sizes = `
select coalesce(sum(pg_total_relation_size(relid)) / 1048576.0, 0)::float8, coalesce(sum(n_dead_tup), 0)::bigint
  from pg_stat_user_tables where relname <> 'app_rows'`
			if err := conn.QueryRow(ctx, sizes).Scan(&last.Size, &last.Dead); err != nil {
				return nil, err
			}
			minutes = append(minutes, last)
			fmt.Fprintf(os.Stderr, "soak %s %s, %5.1f min: p50 %8.2f p99 %8.2f ms, behind %d, %.1f MiB, %d dead, %.1f MiB a process, CPU %.0f + %.0f%%\n",
				r.peer, variant, last.At, last.P50, last.P99, last.Behind, last.Size, last.Dead, last.Memory, last.ClientCPU, last.ServerCPU)
		}
		release()
		release = func() {}
		mu.Lock()
		all := slices.Clone(inThird)
		inThird = inThird[:0]
		mu.Unlock()
		name := thirdName(variant, third)
		figures = append(figures, latencyFigure(name, all),
			figure{variant: name + ": behind at its end", unit: "jobs", value: float64(last.Behind)},
			figure{variant: name + ": tables at its end", unit: "MiB", value: last.Size},
			figure{variant: name + ": dead rows at its end", unit: "rows", value: float64(last.Dead)},
			figure{variant: name + ": a process at its end", unit: "MiB", value: last.Memory})
	}
	figures[0].minutes = minutes
	reached := float64(l.enqueued.Load()) / time.Since(began).Seconds()
	return append(figures, figure{variant: variant + ": rate reached", unit: "jobs/s", value: reached}), nil
}
