package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"
	"github.com/robfig/cron/v3"
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
	if err == nil {
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	}
	return err
}

// riverArgs are the arguments of every kind. Of these the key is compared.
type riverArgs struct {
	N    int    `json:"n"`
	Key  string `json:"key" river:"unique"`
	kind string
}

func (a riverArgs) Kind() string { return a.kind }

func (a *riverAdapter) enqueue(ctx context.Context, tx pgx.Tx, jobs []job) (answers []answer, err error) {
	params := make([]river.InsertManyParams, len(jobs))
	for i, j := range jobs {
		switch {
		case j.Lane != "":
			return nil, missing("sequences are in River Pro, which is paid")
		case j.Limit != "":
			return nil, missing("limits over several processes are in River Pro, which is paid")
		case j.Rate != "":
			return nil, missing(noRate)
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
		params[i] = river.InsertManyParams{Args: riverArgs{j.N, j.Key, j.kind()}, InsertOpts: opts}
	}
	var results []*rivertype.JobInsertResult
	if tx != nil {
		results, err = a.client.InsertManyTx(ctx, tx, params)
	} else {
		results, err = a.client.InsertMany(ctx, params)
	}
	for _, r := range results {
		told := answer{ID: strconv.FormatInt(r.Job.ID, 10), Duplicate: r.UniqueSkippedAsDuplicate, State: string(r.Job.State)}
		if output := r.Job.Output(); output != nil {
			if err := json.Unmarshal(output, &told.Result); err != nil {
				return nil, err
			}
		}
		answers = append(answers, told)
	}
	return answers, err
}

func (a *riverAdapter) work(ctx context.Context, c crew, handle func(context.Context, *run) error) (func(context.Context) error, error) {
	cfg := &river.Config{
		Logger: quiet, Workers: river.NewWorkers(), Queues: make(map[string]river.QueueConfig),
		SoftStopTimeout:             time.Duration(c.StopWithin) * time.Millisecond,
		CompletedJobRetentionPeriod: -1, CancelledJobRetentionPeriod: -1, DiscardedJobRetentionPeriod: -1, // a key is taken while its row is there
	}
	for _, name := range c.queues() {
		cfg.Queues[name] = river.QueueConfig{MaxWorkers: c.AtOnce}
	}
	for _, kind := range c.kinds() {
		w := &riverWorker{pool: a.pool, handle: handle}
		if kind == "long" {
			w.timeout = 3 * time.Hour
		}
		river.AddWorkerArgs(cfg.Workers, riverArgs{kind: kind}, w)
	}
	if c.Every > 0 {
		schedule, err := cron.NewParser(cron.Second | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow).Parse(fmt.Sprintf("*/%d * * * * *", c.Every))
		if err != nil {
			return nil, err
		}
		args := func() (river.JobArgs, *river.InsertOpts) { return riverArgs{N: 1, kind: "work"}, nil }
		cfg.PeriodicJobs = []*river.PeriodicJob{river.NewPeriodicJob(schedule, args, nil)}
	}
	client, err := river.NewClient(riverpgxv5.New(a.pool), cfg)
	if err != nil {
		return nil, err
	}
	return client.Stop, client.Start(ctx)
}

type riverWorker struct {
	river.WorkerDefaults[riverArgs]
	pool    *pgxpool.Pool
	handle  func(context.Context, *run) error
	timeout time.Duration // 0: the default, a minute
}

func (w *riverWorker) Timeout(*river.Job[riverArgs]) time.Duration { return w.timeout }

func (w *riverWorker) NextRetry(*river.Job[riverArgs]) time.Time {
	return time.Now().Add(50 * time.Millisecond)
}

func (w *riverWorker) Work(ctx context.Context, job *river.Job[riverArgs]) error {
	var tx pgx.Tx // of the effects and the completion
	err := w.handle(ctx, &run{
		n: job.Args.N, attempt: job.Attempt,
		write: func(ctx context.Context, n int) (err error) {
			if tx == nil {
				tx, err = w.pool.Begin(ctx)
			}
			if err == nil {
				_, err = tx.Exec(ctx, insertRow, n)
			}
			return err
		},
		call: func(ctx context.Context, name string, fn func(context.Context, string) (string, error)) error {
			_, err := fn(ctx, fmt.Sprint("river-", job.ID, "-", name))
			return err
		},
		result: func(_ context.Context, result string) error { return river.RecordOutput(ctx, result) },
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

func (a *riverAdapter) age(context.Context) error { return nil } // finished rows are kept

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
