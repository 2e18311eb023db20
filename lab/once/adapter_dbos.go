package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/dbos-inc/dbos-transact-golang/dbos"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// dbosAdapter makes each job a workflow in a queue, each write a transactional step, and each call a step. A key that is taken for
// longer than its job runs is the workflow's id.
//
// Without Conductor, which is a service, a process recovers at its start what the process of the same name has left. So the first
// name that no process has is the one to take, as in a StatefulSet.
type dbosAdapter struct {
	pool   *pgxpool.Pool
	client func() (dbos.Client, error)
}

func newDBOS(pool *pgxpool.Pool) (adapter, error) {
	return &dbosAdapter{pool, sync.OnceValues(func() (dbos.Client, error) {
		return dbos.NewClient(context.Background(), dbos.ClientConfig{AppName: "once", SystemDBPool: pool, Logger: quiet})
	})}, nil
}

func (a *dbosAdapter) setup(ctx context.Context) error {
	return cmp.Or(dbos.Migrate(ctx, os.Getenv(envURL), dbos.WithMigrateLogger(quiet)),
		dbos.MigrateDataSource(ctx, a.pool, dbos.WithMigrateLogger(quiet)))
}

// dbosInput is a workflow's input.
type dbosInput struct {
	N     int
	After []answer // of the workflows that end before
}

func (a *dbosAdapter) enqueue(ctx context.Context, tx pgx.Tx, jobs []job) (answers []answer, err error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	for _, j := range jobs {
		queue, in := j.queue(), dbosInput{N: j.N}
		opts := []dbos.EnqueueOption{dbos.WithEnqueueDelay(time.Duration(j.Delay) * time.Millisecond)}
		switch {
		case j.Key != "" && j.Life == untilDone:
			opts = append(opts, dbos.WithEnqueueDeduplicationID(j.Key))
		case j.Key != "":
			opts = append(opts, dbos.WithEnqueueWorkflowID(j.Key))
		}
		if j.kind() == "new" { // the second version has it, and its producers name the version
			opts = append(opts, dbos.WithEnqueueApplicationVersion("2"))
		}
		switch {
		case j.Lane != "":
			queue, opts = "lanes", append(opts, dbos.WithEnqueueQueuePartitionKey(j.Lane))
		case j.Limit+j.Rate != "":
			queue = j.Limit + j.Rate
		case j.Group != "":
			in.After = answers
		}
		if tx != nil {
			opts = append(opts, dbos.WithEnqueueTransaction(tx))
		}
		h, err := dbos.Enqueue[string](client, queue, j.kind(), in, opts...)
		if err != nil {
			return nil, err
		}
		told := answer{ID: h.GetWorkflowID()}
		if tx == nil && j.Key != "" {
			is, err := h.GetStatus()
			if err != nil {
				return nil, err
			}
			told.Duplicate = is.Status != dbos.WorkflowStatusEnqueued && is.Status != dbos.WorkflowStatusDelayed
			switch is.Status {
			case dbos.WorkflowStatusError:
				told.State = "dead"
			case dbos.WorkflowStatusSuccess:
				told.Result, _ = h.GetResult()
			}
		}
		answers = append(answers, told)
	}
	return answers, nil
}

func (a *dbosAdapter) work(ctx context.Context, c crew, handle func(context.Context, *run) error) (func(context.Context) error, error) {
	name, err := a.name(ctx)
	if err != nil {
		return nil, err
	}
	version := map[bool]string{false: "1", true: "2"}[slices.Contains(c.kinds(), "new")]
	d, err := dbos.NewContext(ctx, dbos.Config{AppName: "once", SystemDBPool: a.pool, ApplicationVersion: version, ExecutorID: name, Logger: quiet})
	if err != nil {
		return nil, err
	}
	source, err := dbos.NewDataSource(d, a.pool)
	if err != nil {
		return nil, err
	}
	flow := func(ctx dbos.Context, in dbosInput) (string, error) { return dbosFlow(ctx, source, in, handle) }
	flows := map[string]dbos.Workflow[dbosInput, string]{ // a function is registered once
		"work": func(ctx dbos.Context, in dbosInput) (string, error) { return flow(ctx, in) },
		"new":  func(ctx dbos.Context, in dbosInput) (string, error) { return flow(ctx, in) },
		"long": func(ctx dbos.Context, in dbosInput) (string, error) { return flow(ctx, in) },
	}
	for _, kind := range c.kinds() {
		dbos.RegisterWorkflow(d, flows[kind], dbos.WithWorkflowName(kind))
	}
	tick := func(ctx dbos.Context, _ dbos.ScheduledWorkflowInput) (any, error) { return flow(ctx, dbosInput{N: 1}) }
	dbos.RegisterWorkflow(d, tick, dbos.WithWorkflowName("tick"))
	queues := map[string]dbos.QueueOption{
		"lanes": dbos.WithPartitionConcurrency(1), "provider": dbos.WithGlobalConcurrency(2),
		"messages": dbos.WithRateLimiter(&dbos.RateLimiter{Limit: 4, Period: 3 * time.Second}),
	}
	for _, queue := range c.queues() {
		queues[queue] = dbos.WithWorkerConcurrency(c.AtOnce)
	}
	for queue, option := range queues {
		_, bad := dbos.RegisterQueue(d, queue, option)
		err = cmp.Or(err, bad)
	}
	if c.Every > 0 {
		err = cmp.Or(err, dbos.ApplySchedules(d, []dbos.ScheduleSpec{{
			ScheduleName: "tick", Schedule: fmt.Sprintf("*/%d * * * * *", c.Every), WorkflowName: "tick", AutomaticBackfill: true,
		}}))
	}
	if err = cmp.Or(err, dbos.Launch(d)); err != nil {
		return nil, err
	}
	return func(context.Context) error {
		return dbos.Shutdown(d, cmp.Or(time.Duration(c.StopWithin)*time.Millisecond, 10*time.Second))
	}, nil
}

// dbosFlow is every workflow.
func dbosFlow(flow dbos.Context, source *dbos.DataSource, in dbosInput, handle func(context.Context, *run) error) (result string, err error) {
	id, err := dbos.GetWorkflowID(flow)
	if err != nil {
		return "", err
	}
	for _, member := range in.After {
		if h, err := dbos.RetrieveWorkflow[string](flow, member.ID); err == nil {
			_, _ = h.GetResult() // it may have failed
		}
	}
	err = handle(flow, &run{
		n: in.N, attempt: 1,
		write: func(_ context.Context, n int) error {
			_, err := dbos.RunAsTransaction(flow, source, func(ctx context.Context, tx dbos.Tx) (int64, error) {
				_, err := tx.Exec(ctx, insertRow, n)
				return 0, err
			})
			return err
		},
		call: func(_ context.Context, name string, fn func(context.Context, string) (string, error)) error {
			_, err := dbos.RunAsStep(flow, func(ctx context.Context) (string, error) { return fn(ctx, id+"-"+name) }, dbos.WithStepName(name))
			return err
		},
		result: func(_ context.Context, r string) error { result = r; return nil },
	})
	return result, err
}

// name gives the first name that no process has. The process keeps it by a lock.
func (a *dbosAdapter) name(ctx context.Context) (string, error) {
	conn, err := a.pool.Acquire(ctx) // for good
	for n := 1; err == nil; n++ {
		var mine bool
		if err = conn.QueryRow(ctx, "select pg_try_advisory_lock(7, $1)", n).Scan(&mine); mine {
			return fmt.Sprint("executor-", n), nil
		}
	}
	return "", err
}

func (a *dbosAdapter) left(ctx context.Context) (n int, err error) {
	err = a.pool.QueryRow(ctx, "select count(*) from dbos.workflow_status where status in ('ENQUEUED', 'DELAYED', 'PENDING')").Scan(&n)
	return n, err
}

func (a *dbosAdapter) silence(context.Context) error { return nil } // nobody takes a process for dead
func (a *dbosAdapter) age(context.Context) error     { return nil } // workflows are kept

func (a *dbosAdapter) cancel(_ context.Context, id string) error {
	client, err := a.client()
	if err == nil {
		err = dbos.CancelWorkflow(client, id)
	}
	return err
}
