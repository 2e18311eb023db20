package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// riverPeers are River at the settings of its own benchmark with its fastest way to insert, and at its defaults.
func riverPeers() []peer {
	var peers []peer
	for _, s := range []struct{ settings, note string }{
		{"tuned", "as its own benchmark: FetchCooldown 2 ms, FetchPollInterval 20 ms, MaxWorkers 2,000; InsertManyFast"},
		{"default", "MaxWorkers 100, as in its documentation; InsertMany"},
	} {
		p := goPeer("River", "github.com/riverqueue/river", s.settings, s.note, func(ctx context.Context, pool *pgxpool.Pool) (queue, error) {
			migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: quiet})
			if err != nil {
				return nil, err
			}
			if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
				return nil, err
			}
			return joinRiver(ctx, pool, s.settings)
		})
		p.member, p.undone = goMember, "select count(*) from river_job where finalized_at is null"
		peers = append(peers, p)
	}
	return peers
}

type riverQueue struct {
	pool    *pgxpool.Pool
	driver  *riverpgxv5.Driver
	client  *river.Client[pgx.Tx] // inserts alone
	config  river.Config
	workers int
	fast    bool
}

// joinRiver opens a database that has the tables.
func joinRiver(_ context.Context, pool *pgxpool.Pool, settings string) (queue, error) {
	q := &riverQueue{pool: pool, driver: riverpgxv5.New(pool), config: river.Config{Logger: quiet}, workers: 100}
	if settings == "tuned" {
		q.config.FetchCooldown, q.config.FetchPollInterval = 2*time.Millisecond, 20*time.Millisecond
		q.workers, q.fast = 2000, true
	}
	var err error
	q.client, err = river.NewClient(q.driver, &river.Config{Logger: quiet})
	return q, err
}

type riverTask struct{ Task }

func (riverTask) Kind() string { return "noop" }

func riverOpts(keyed bool) *river.InsertOpts {
	if !keyed {
		return nil
	}
	return &river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}
}

func (q *riverQueue) close() {}

func (q *riverQueue) bulk(ctx context.Context, from, to int, keyed bool) error {
	params := make([]river.InsertManyParams, 0, to-from)
	for n := from; n < to; n++ {
		params = append(params, river.InsertManyParams{Args: riverTask{Task{n}}, InsertOpts: riverOpts(keyed)})
	}
	var err error
	if q.fast {
		_, err = q.client.InsertManyFast(ctx, params)
	} else {
		_, err = q.client.InsertMany(ctx, params)
	}
	return err
}

func (q *riverQueue) put(ctx context.Context, tx pgx.Tx, n int, keyed bool) error {
	var err error
	if tx != nil {
		_, err = q.client.InsertTx(ctx, tx, riverTask{Task{n}}, riverOpts(keyed))
	} else {
		_, err = q.client.Insert(ctx, riverTask{Task{n}}, riverOpts(keyed))
	}
	return err
}

type riverWorker struct {
	river.WorkerDefaults[riverTask]
	fn func(ctx context.Context, job *river.Job[riverTask]) error
}

func (w *riverWorker) Work(ctx context.Context, job *river.Job[riverTask]) error {
	return w.fn(ctx, job)
}

func (q *riverQueue) work(ctx context.Context, effect string, did func(n, jobs int)) (stop func(), err error) {
	if effect == rowsInBatch {
		return nil, errNotOffered
	}
	if effect == noEffect {
		return q.workIn(ctx, nil, did)
	}
	workers := min(q.workers, 100) // each wants a connection; 20, 200 and 2,000 gave no more
	return q.run(ctx, nil, workers, func(ctx context.Context, job *river.Job[riverTask]) error {
		err := pgx.BeginFunc(ctx, q.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, insertRow, job.Args.N); err != nil {
				return err
			}
			_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
			return err
		})
		did(job.Args.N, 1)
		return err
	})
}

func (q *riverQueue) putIn(ctx context.Context, queue string, n int) error {
	_, err := q.client.Insert(ctx, riverTask{Task{n}}, &river.InsertOpts{Queue: queue})
	return err
}

func (q *riverQueue) workIn(ctx context.Context, queues []string, did func(n, jobs int)) (stop func(), err error) {
	return q.run(ctx, queues, q.workers, func(_ context.Context, job *river.Job[riverTask]) error {
		did(job.Args.N, 1)
		return nil
	})
}

// run starts a client that works off some queues, or the default one.
func (q *riverQueue) run(ctx context.Context, queues []string, workers int, fn func(context.Context, *river.Job[riverTask]) error) (stop func(), err error) {
	config := q.config
	if len(queues) == 0 {
		queues = []string{river.QueueDefault}
	}
	config.Queues = make(map[string]river.QueueConfig)
	for _, name := range queues {
		config.Queues[name] = river.QueueConfig{MaxWorkers: workers}
	}
	config.Workers = river.NewWorkers()
	river.AddWorker(config.Workers, &riverWorker{fn: fn})
	client, err := river.NewClient(q.driver, &config)
	if err != nil {
		return nil, err
	}
	return func() { _ = client.Stop(context.WithoutCancel(ctx)) }, client.Start(ctx)
}
