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
					measure: func(ctx context.Context, r *room) ([]figure, error) { return expired(ctx, r, b.sizes, n) },
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
func expired(ctx context.Context, r *room, s sizes, n int) ([]figure, error) {
	q, names := ours(r), queueNames(n)
	started := make(chan time.Time, 1)
	kind := onceq.Kind[Task]{Name: "noop"}
	stop, err := q.run(ctx, onceq.WorkerConfig{Also: names, Without: []string{onceq.DefaultQueue}}, kind.Handle(func(context.Context, *onceq.Lease, Task) error {
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
	return []figure{latencyFigure(expiredName(n), all)}, nil
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
	m, err := r.server.newMeter(ctx, nil, ms.pids())
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
	name := queuesName(n)
	return []figure{
		{variant: name + statementsName, unit: "a second", value: rate},
		{variant: name + cpuName, unit: "% of a core", value: 100 * (client + server) / took},
	}, err
}
