package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// queuesTrials run one worker process that serves many queues: idle, and with a trickle of jobs in each of them.
func queuesTrials(b *bench) []trial {
	var trials []trial
	each := func(n int, measure func(p peer) trial) {
		for _, p := range b.peers {
			// River asks for each queue by itself: with 1,000 it shows what 5,000 would take.
			if p.name == "onceq" || p.name == "River" && p.settings == "default" && n <= 1000 {
				trials = append(trials, measure(p))
			}
		}
	}
	for _, n := range b.sizes.queues {
		each(n, func(p peer) trial {
			return trial{
				test: "queues", variant: queuesName(n), peer: p, counted: true,
				measure: func(ctx context.Context, r *room) ([]figure, error) { return idleQueues(ctx, r, b.sizes, n) },
			}
		})
	}
	for _, p := range b.peers {
		if p.name == "onceq" {
			for _, n := range []int{1, b.sizes.queues[len(b.sizes.queues)-1]} {
				trials = append(trials, trial{
					test: "queues", variant: expiredName(n), peer: p,
					measure: func(ctx context.Context, r *room) ([]figure, error) {
						return expired(ctx, r, b.sizes, n, onceq.WorkerConfig{}, expiredName(n))
					},
				})
			}
		}
	}
	most := b.sizes.queues[0]
	for _, n := range b.sizes.queues {
		if n <= 1000 {
			most = n
		}
	}
	for _, n := range []int{1, most} {
		each(n, func(p peer) trial {
			return trial{
				test: "queues", variant: trickleName(n), peer: p, conns: producers,
				measure: func(ctx context.Context, r *room) ([]figure, error) {
					names := queueNames(n)
					q := r.session.(*goSession).queue.(named)
					return r.steadyLatency(ctx, trickleName(n), 1, order{Queues: names}, 1000, b.sizes.loaded, func(ctx context.Context, n int) error {
						return q.putIn(ctx, names[n%len(names)], n)
					})
				},
			}
		})
	}
	return trials
}

func queuesName(n int) string {
	if n == 1 {
		return "1 idle queue"
	}
	return count(n) + " idle queues"
}

func expiredName(n int) string {
	return "a lease runs out in " + strings.Replace(queuesName(n), " idle", "", 1) + ", until the job runs again"
}

// expired measures how long it takes until a worker that is idle finds a job whose lease has run out in one of n queues.
func expired(ctx context.Context, r *room, s sizes, n int, cfg onceq.WorkerConfig, name string) ([]figure, error) {
	q, names := ours(r), queueNames(n)
	started := make(chan time.Time, 1)
	kind := onceq.Kind[Task]{Name: "noop"}
	cfg.Also, cfg.Without = names, []string{onceq.DefaultQueue}
	stop, err := q.run(ctx, cfg, kind.Handle(func(context.Context, *onceq.Lease, Task) error {
		started <- time.Now()
		return nil
	}))
	if err != nil {
		return nil, err
	}
	defer stop()
	if err := pause(ctx, settled(1)); err != nil {
		return nil, err
	}
	const lease = 3 * time.Second // the worker is idle again before that
	var all []time.Duration
	for i := range s.samples / 5 {
		if err := pause(ctx, gap(i)); err != nil {
			return nil, err
		}
		job := kind.Job(Task{i})
		job.Queue = names[i*7919%n]
		err := pgx.BeginFunc(ctx, q.pool, func(tx pgx.Tx) error {
			res, err := q.Enqueue(ctx, tx, job)
			if err == nil {
				_, err = tx.Exec(ctx, `update onceq.jobs set claims = 1, holder = 1, leased_until = statement_timestamp() + $2::bigint * interval '1 microsecond' where id = $1`,
					res.ID, lease.Microseconds())
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		ends := time.Now().Add(lease)
		select {
		case at := <-started:
			all = append(all, at.Sub(ends))
		case <-time.After(lease + s.limit):
			return nil, fmt.Errorf("a job whose lease ran out did not run again within %s", s.limit)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return []figure{latencyFigure(name, all)}, nil
}

func trickleName(n int) string {
	return "1,000 jobs/s in " + strings.Replace(queuesName(n), " idle", "", 1)
}

func queueNames(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("queue_%04d", i)
	}
	return names
}

// idleQueues says what a process costs that serves n empty queues.
func idleQueues(ctx context.Context, r *room, s sizes, n int) ([]figure, error) {
	o, err := r.observe(ctx)
	if err != nil {
		return nil, err
	}
	defer o.close()
	ms, err := r.join(ctx, 1, order{Queues: queueNames(n)}, nil)
	if err != nil {
		return nil, err
	}
	defer ms.stop()
	if err := pause(ctx, settled(1)+s.rest); err != nil {
		return nil, err
	}
	return idleFigures(ctx, r, o, s, ms.pids(), queuesName(n))
}

// silences are how long an idle worker may be silent; 0 is what it is without PollInterval.
var silences = []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, 0, 2200 * time.Millisecond, 4400 * time.Millisecond, 10 * time.Second}

// silenceTrials say what an idle worker costs, and how late it finds a job whose lease has run out, by how long it may be silent.
func silenceTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name != "onceq" {
			continue
		}
		for _, silence := range silences {
			cfg := onceq.WorkerConfig{PollInterval: silence}
			name := "by default"
			if silence != 0 {
				name = "silent for " + silence.String()
			}
			trials = append(trials, trial{
				test: "silence", variant: name, peer: p, counted: true,
				measure: func(ctx context.Context, r *room) ([]figure, error) {
					figures, err := silent(ctx, r, b.sizes, cfg, name)
					if err != nil {
						return nil, err
					}
					late, err := expired(ctx, r, b.sizes, 1, cfg, name+": a lease runs out, until the job runs again")
					return append(figures, late...), err
				},
			})
		}
	}
	return trials
}

// silent says what a worker of this process costs that has nothing to do.
func silent(ctx context.Context, r *room, s sizes, cfg onceq.WorkerConfig, name string) ([]figure, error) {
	o, err := r.observe(ctx)
	if err != nil {
		return nil, err
	}
	defer o.close()
	kind := onceq.Kind[Task]{Name: "noop"}
	stop, err := ours(r).run(ctx, cfg, kind.Handle(func(context.Context, *onceq.Lease, Task) error { return nil }))
	if err != nil {
		return nil, err
	}
	defer stop()
	if err := pause(ctx, settled(1)); err != nil {
		return nil, err
	}
	return idleFigures(ctx, r, o, s, nil, name)
}

// idleFigures counts the statements and the CPU time for a while, of the server and of the client processes beside this one.
func idleFigures(ctx context.Context, r *room, o *observer, s sizes, clients []int, name string) ([]figure, error) {
	m, err := r.server.newMeter(ctx, nil, clients)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	rate, err := o.rate(ctx, s.idle)
	if err != nil {
		return nil, err
	}
	_, client, server, err := m.stop(ctx)
	took := time.Since(began).Seconds()
	return []figure{
		{variant: name + statementsName, unit: "a second", value: rate},
		{variant: name + cpuName, unit: "% of a core", value: 100 * (client + server) / took},
	}, err
}
