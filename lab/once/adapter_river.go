package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"
)

// riverAdapter uses unique jobs, and JobCompleteTx in the transaction of the effect. Its times are River's defaults.
type riverAdapter struct {
	pool   *pgxpool.Pool
	client *river.Client[pgx.Tx] // inserts alone
}

func newRiver(pool *pgxpool.Pool) (adapter, error) {
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Logger: quiet})
	return &riverAdapter{pool, client}, err
}

func (a *riverAdapter) setup(ctx context.Context) error {
	migrator, err := rivermigrate.New(riverpgxv5.New(a.pool), &rivermigrate.Config{Logger: quiet})
	if err != nil {
		return err
	}
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return err
}

// riverArgs are the arguments of every kind. Of these the key is compared.
type riverArgs struct {
	N   int    `json:"n"`
	Key string `json:"key" river:"unique"`
}

type (
	riverWork riverArgs
	riverNew  riverArgs
	riverLong riverArgs
)

func (riverWork) Kind() string { return "work" }
func (riverNew) Kind() string  { return "new" }
func (riverLong) Kind() string { return "long" }

func (a riverWork) n() int { return a.N }
func (a riverNew) n() int  { return a.N }
func (a riverLong) n() int { return a.N }

func (a *riverAdapter) enqueue(ctx context.Context, tx pgx.Tx, jobs []job) (answers []answer, err error) {
	params := make([]river.InsertManyParams, len(jobs))
	for i, j := range jobs {
		switch {
		case j.Lane != "":
			return nil, missing("sequences are in River Pro, which is paid")
		case j.Limit != "":
			return nil, missing("limits over several processes are in River Pro, which is paid")
		case j.Group != "":
			return nil, missing("workflows are in River Pro, which is paid")
		}
		opts := &river.InsertOpts{MaxAttempts: j.Attempts, Queue: j.Queue}
		if j.Delay > 0 {
			opts.ScheduledAt = time.Now().Add(time.Duration(j.Delay) * time.Millisecond)
		}
		if j.Key != "" {
			opts.UniqueOpts = river.UniqueOpts{ByArgs: true} // of those that are unfinished or completed
			switch j.Life {
			case untilDone:
				opts.UniqueOpts.ByState = []rivertype.JobState{rivertype.JobStateAvailable, rivertype.JobStatePending,
					rivertype.JobStateRunning, rivertype.JobStateRetryable, rivertype.JobStateScheduled}
			case forEver:
				opts.UniqueOpts.ByState = rivertype.JobStates()
			}
		}
		args := riverArgs{j.N, j.Key}
		params[i].InsertOpts = opts
		params[i].Args = map[string]river.JobArgs{"work": riverWork(args), "new": riverNew(args), "long": riverLong(args)}[j.kind()]
	}
	var results []*rivertype.JobInsertResult
	if tx != nil {
		results, err = a.client.InsertManyTx(ctx, tx, params)
	} else {
		results, err = a.client.InsertMany(ctx, params)
	}
	for _, r := range results {
		answers = append(answers, answer{
			ID: strconv.FormatInt(r.Job.ID, 10), Duplicate: r.UniqueSkippedAsDuplicate, State: string(r.Job.State),
		})
	}
	return answers, err
}

func (a *riverAdapter) work(ctx context.Context, c crew, handle func(context.Context, *run) error) (func(context.Context) error, error) {
	cfg := &river.Config{
		Logger: quiet, Workers: river.NewWorkers(), Queues: make(map[string]river.QueueConfig), RetryPolicy: riverRetry{},
		SoftStopTimeout: time.Duration(c.StopWithin) * time.Millisecond,
		// A key is taken while its row is there.
		CompletedJobRetentionPeriod: -1, CancelledJobRetentionPeriod: -1, DiscardedJobRetentionPeriod: -1,
	}
	for _, name := range c.queues() {
		cfg.Queues[name] = river.QueueConfig{MaxWorkers: c.AtOnce}
	}
	for _, kind := range c.kinds() {
		switch kind {
		case "work":
			addRiver[riverWork](cfg.Workers, a.pool, handle, 0)
		case "new":
			addRiver[riverNew](cfg.Workers, a.pool, handle, 0)
		case "long":
			addRiver[riverLong](cfg.Workers, a.pool, handle, 3*time.Hour)
		}
	}
	client, err := river.NewClient(riverpgxv5.New(a.pool), cfg)
	if err != nil {
		return nil, err
	}
	return client.Stop, client.Start(ctx)
}

type riverRetry struct{}

func (riverRetry) NextRetry(*rivertype.JobRow) time.Time {
	return time.Now().Add(50 * time.Millisecond)
}

type riverJob interface {
	river.JobArgs
	n() int
}

type riverWorker[T riverJob] struct {
	river.WorkerDefaults[T]
	pool    *pgxpool.Pool
	handle  func(context.Context, *run) error
	timeout time.Duration // 0: the default, a minute
}

func addRiver[T riverJob](workers *river.Workers, pool *pgxpool.Pool, handle func(context.Context, *run) error, timeout time.Duration) {
	river.AddWorker(workers, &riverWorker[T]{pool: pool, handle: handle, timeout: timeout})
}

func (w *riverWorker[T]) Timeout(*river.Job[T]) time.Duration { return w.timeout }

func (w *riverWorker[T]) Work(ctx context.Context, job *river.Job[T]) error {
	var tx pgx.Tx // of the effects and the completion
	err := w.handle(ctx, &run{
		n: job.Args.n(), attempt: job.Attempt,
		write: func(ctx context.Context, n int) (err error) {
			if tx == nil {
				if tx, err = w.pool.Begin(ctx); err != nil {
					return err
				}
			}
			_, err = tx.Exec(ctx, insertRow, n)
			return err
		},
		call: func(ctx context.Context, name string, fn func(context.Context, string) (string, error)) error {
			_, err := fn(ctx, fmt.Sprint("river-", job.ID, "-", name))
			return err
		},
		end: func(ctx context.Context) error {
			err := tx.Commit(ctx)
			tx = nil
			return err
		},
	})
	if tx == nil {
		return err
	}
	ctx = context.WithoutCancel(ctx) // as the steps
	defer func() { _ = tx.Rollback(ctx) }()
	if err == nil {
		_, err = river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
	}
	if err == nil {
		err = tx.Commit(ctx)
	}
	return err
}

func (a *riverAdapter) left(ctx context.Context) (n int, err error) {
	err = a.pool.QueryRow(ctx, "select count(*) from river_job where state not in ('completed', 'cancelled', 'discarded')").Scan(&n)
	return n, err
}

// silence is RescueStuckJobsAfter, and the leader's term. Who leads next looks for stuck jobs at once.
func (a *riverAdapter) silence(ctx context.Context) error {
	_, err := a.pool.Exec(ctx, "update river_job set attempted_at = attempted_at - interval '2 hours' where state = 'running'; delete from river_leader")
	return err
}

func (a *riverAdapter) age(ctx context.Context) error {
	_, err := a.pool.Exec(ctx, "update river_job set finalized_at = finalized_at - interval '30 days' where finalized_at is not null")
	return err
}

func (a *riverAdapter) cancel(ctx context.Context, id string) error {
	n, err := strconv.ParseInt(id, 10, 64)
	if err != nil {
		return err
	}
	job, err := a.client.JobCancel(ctx, n)
	if err == nil && job.State != rivertype.JobStateCancelled {
		err = fmt.Errorf("not cancelled: it is %s", job.State)
	}
	return err
}
