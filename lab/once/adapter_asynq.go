package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// asynqAdapter uses task ids as keys. A finished task stays for its Retention, and keeps its id.
type asynqAdapter struct {
	pool      *pgxpool.Pool
	opt       asynq.RedisClientOpt
	redis     *redis.Client
	client    *asynq.Client
	inspector *asynq.Inspector
}

func newAsynq(pool *pgxpool.Pool) (adapter, error) {
	opt := asynq.RedisClientOpt{Network: "unix", Addr: os.Getenv(envRedis)}
	return &asynqAdapter{
		pool, opt, redis.NewClient(&redis.Options{Network: opt.Network, Addr: opt.Addr}), asynq.NewClient(opt), asynq.NewInspector(opt),
	}, nil
}

func (a *asynqAdapter) noTransactions() string {
	return "its jobs are in Redis, in no transaction with the application's rows"
}

func (a *asynqAdapter) setup(context.Context) error { return nil }

func (a *asynqAdapter) enqueue(ctx context.Context, _ pgx.Tx, jobs []job) (answers []answer, err error) {
	for _, j := range jobs {
		switch {
		case j.Lane != "":
			return nil, missing("it has no order for one customer's jobs")
		case j.Limit != "":
			return nil, missing("it has no limit over several processes")
		case j.Rate != "":
			return nil, missing(noRate)
		case j.Group != "":
			return nil, missing("it has no jobs that wait for others")
		}
		opts := []asynq.Option{asynq.Queue(j.queue())}
		if j.Delay > 0 {
			opts = append(opts, asynq.ProcessIn(time.Duration(j.Delay)*time.Millisecond))
		}
		if j.Attempts > 0 {
			opts = append(opts, asynq.MaxRetry(j.Attempts-1))
		}
		if j.kind() == "long" {
			opts = append(opts, asynq.Timeout(3*time.Hour))
		}
		if j.Key != "" {
			retention := map[life]time.Duration{aDay: 24 * time.Hour, forEver: 100 * 365 * 24 * time.Hour}[j.Life]
			opts = append(opts, asynq.TaskID(j.Key), asynq.Retention(retention))
		}
		payload, err := json.Marshal(j.N)
		if err != nil {
			return nil, err
		}
		info, err := a.client.EnqueueContext(ctx, asynq.NewTask(j.kind(), payload), opts...)
		if err != nil { // ErrTaskIDConflict for a duplicate
			return nil, err
		}
		answers = append(answers, answer{ID: info.ID})
	}
	return answers, nil
}

func (a *asynqAdapter) work(_ context.Context, c crew, handle func(context.Context, *run) error) (func(context.Context) error, error) {
	queues := make(map[string]int)
	for _, name := range c.queues() {
		queues[name] = 1
	}
	server := asynq.NewServer(a.opt, asynq.Config{
		Concurrency: c.AtOnce, Queues: queues, LogLevel: asynq.FatalLevel, ShutdownTimeout: time.Duration(c.StopWithin) * time.Millisecond,
		RetryDelayFunc:           func(int, error, *asynq.Task) time.Duration { return 50 * time.Millisecond },
		DelayedTaskCheckInterval: 200 * time.Millisecond, TaskCheckInterval: 100 * time.Millisecond,
	})
	mux := asynq.NewServeMux()
	for _, kind := range c.kinds() {
		mux.HandleFunc(kind, func(ctx context.Context, t *asynq.Task) error {
			id, _ := asynq.GetTaskID(ctx)
			retried, _ := asynq.GetRetryCount(ctx)
			r := &run{attempt: retried + 1}
			if err := json.Unmarshal(t.Payload(), &r.n); err != nil {
				return err
			}
			r.write = func(ctx context.Context, n int) error { _, err := a.pool.Exec(ctx, insertRow, n); return err }
			r.call = func(ctx context.Context, name string, fn func(context.Context, string) (string, error)) error {
				_, err := fn(ctx, "asynq-"+id+"-"+name)
				return err
			}
			return handle(ctx, r)
		})
	}
	if c.Every > 0 {
		payload, err := json.Marshal(1)
		if err != nil {
			return nil, err
		}
		scheduler := asynq.NewScheduler(a.opt, &asynq.SchedulerOpts{LogLevel: asynq.FatalLevel})
		if _, err := scheduler.Register(fmt.Sprintf("@every %ds", c.Every), asynq.NewTask("work", payload)); err != nil {
			return nil, err
		}
		if err := scheduler.Start(); err != nil {
			return nil, err
		}
	}
	return func(context.Context) error { server.Shutdown(); return nil }, server.Start(mux)
}

func (a *asynqAdapter) left(context.Context) (n int, err error) {
	names, err := a.inspector.Queues()
	for _, name := range names {
		q, err := a.inspector.GetQueueInfo(name)
		if err != nil {
			return 0, err
		}
		n += q.Pending + q.Active + q.Scheduled + q.Retry
	}
	return n, err
}

// silence is a lease of 30 seconds, and as much again, which a worker waits when it looks for those that have run out. Who is
// alive extends his leases every five seconds.
func (a *asynqAdapter) silence(ctx context.Context) error {
	names, err := a.inspector.Queues()
	for _, name := range names {
		key := "asynq:{" + name + "}:lease"
		ids, err := a.redis.ZRange(ctx, key, 0, -1).Result()
		if err != nil {
			return err
		}
		for _, id := range ids {
			if err := a.redis.ZIncrBy(ctx, key, -100, id).Err(); err != nil {
				return err
			}
		}
	}
	time.Sleep(6 * time.Second)
	return err
}

func (a *asynqAdapter) age(context.Context) error { return nil } // keys that are taken for ever have no end that could be moved

func (a *asynqAdapter) cancel(_ context.Context, id string) error {
	return a.inspector.DeleteTask("default", id)
}
