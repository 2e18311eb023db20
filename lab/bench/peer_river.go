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
	return []peer{
		goPeer("River", "github.com/riverqueue/river", "tuned",
			"as its own benchmark: FetchCooldown 2 ms, FetchPollInterval 20 ms, MaxWorkers 2,000; InsertManyFast",
			func(ctx context.Context, pool *pgxpool.Pool) (queue, error) {
				return openRiver(ctx, pool, river.Config{FetchCooldown: 2 * time.Millisecond, FetchPollInterval: 20 * time.Millisecond}, 2000, true)
			}),
		goPeer("River", "github.com/riverqueue/river", "default", "MaxWorkers 100, as in its documentation; InsertMany",
			func(ctx context.Context, pool *pgxpool.Pool) (queue, error) {
				return openRiver(ctx, pool, river.Config{}, 100, false)
			}),
	}
}

type riverQueue struct {
	pool    *pgxpool.Pool
	driver  *riverpgxv5.Driver
	client  *river.Client[pgx.Tx] // inserts alone
	config  river.Config
	workers int
	fast    bool
}

func openRiver(ctx context.Context, pool *pgxpool.Pool, config river.Config, workers int, fast bool) (queue, error) {
	q := &riverQueue{pool: pool, driver: riverpgxv5.New(pool), config: config, workers: workers, fast: fast}
	q.config.Logger = quiet
	migrator, err := rivermigrate.New(q.driver, &rivermigrate.Config{Logger: quiet})
	if err != nil {
		return nil, err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return nil, err
	}
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
	config, workers := q.config, q.workers
	if effect == oneRow {
		workers = min(workers, 100) // each wants a connection; 20, 200 and 2,000 gave no more
	}
	config.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: workers}}
	config.Workers = river.NewWorkers()
	river.AddWorker(config.Workers, &riverWorker{fn: func(ctx context.Context, job *river.Job[riverTask]) error {
		var err error
		if effect == oneRow {
			err = pgx.BeginFunc(ctx, q.pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, insertRow, job.Args.N); err != nil {
					return err
				}
				_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
				return err
			})
		}
		did(job.Args.N, 1)
		return err
	}})
	client, err := river.NewClient(q.driver, &config)
	if err != nil {
		return nil, err
	}
	return func() { _ = client.Stop(context.WithoutCancel(ctx)) }, client.Start(ctx)
}
