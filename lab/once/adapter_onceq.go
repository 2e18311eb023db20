package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
)

// onceqAdapter uses HandleTx and Once, with a lease of two seconds in place of thirty.
type onceqAdapter struct {
	pool *pgxpool.Pool
	q    *onceq.Queue
}

type onceqPayload struct {
	N int `json:"n"`
}

var quiet = slog.New(slog.DiscardHandler)

func newOnceq(pool *pgxpool.Pool) (adapter, error) {
	q, err := onceq.New(pool, &onceq.Config{Logger: quiet})
	return &onceqAdapter{pool, q}, err
}

func (a *onceqAdapter) setup(ctx context.Context) error {
	return a.pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return migrations.Up(ctx, c.Conn(), "onceq") })
}

func (a *onceqAdapter) enqueue(ctx context.Context, tx pgx.Tx, jobs []job) (answers []answer, err error) {
	var db onceq.DB = a.pool
	if tx != nil {
		db = tx
	}
	many := make([]onceq.Job, len(jobs))
	for i, j := range jobs {
		many[i] = onceq.Job{
			Kind: j.kind(), Payload: onceqPayload{j.N}, Queue: j.Queue, Key: j.Key, Delay: time.Duration(j.Delay) * time.Millisecond,
			MaxAttempts: j.Attempts, Lane: j.Lane, Limit: j.Limit + j.Rate,
		}
		if j.Key != "" {
			many[i].Window = map[life]time.Duration{untilDone: onceq.UntilStarted, aDay: 24 * time.Hour, forEver: onceq.Forever}[j.Life]
		}
		for name, limit := range map[string]onceq.Limit{j.Limit: {AtOnce: 2}, j.Rate: {Max: 4, Per: 3 * time.Second}} {
			if name == "" {
				continue
			}
			if err := a.q.SetLimit(ctx, db, name, limit); err != nil {
				return nil, err
			}
		}
	}
	var results []onceq.Result
	if last := len(jobs) - 1; jobs[last].Group != "" {
		many[last].IfDead = onceq.DeadCancel
		var g onceq.Group
		g, err = a.q.EnqueueGroup(ctx, db, many[:last], many[last])
		results = append(g.Members, g.Then)
	} else if last == 0 {
		results = make([]onceq.Result, 1)
		results[0], err = a.q.Enqueue(ctx, db, many[0])
	} else {
		results, err = a.q.EnqueueMany(ctx, db, many)
	}
	if err != nil {
		return nil, err
	}
	for _, r := range results {
		told := answer{ID: strconv.FormatInt(r.ID, 10), Duplicate: r.Duplicate, State: r.State.String()}
		if r.Output != nil {
			if err := json.Unmarshal(r.Output, &told.Result); err != nil {
				return nil, err
			}
		}
		answers = append(answers, told)
	}
	return answers, nil
}

func (a *onceqAdapter) work(ctx context.Context, c crew, handle func(context.Context, *run) error) (func(context.Context) error, error) {
	cfg := onceq.WorkerConfig{Lease: 2 * time.Second, Queues: make(map[string]onceq.QueueConfig), ShutdownTimeout: time.Duration(c.StopWithin) * time.Millisecond}
	for _, name := range c.queues() {
		cfg.Queues[name] = onceq.QueueConfig{Concurrency: c.AtOnce}
		if name != onceq.DefaultQueue {
			cfg.Also = append(cfg.Also, name)
		}
	}
	// A call may take a second, so that its outcome is known to be unknown a few seconds after a crash, in place of 35.
	once := []onceq.EffectOption{onceq.EffectTimeout(time.Second)}
	if c.Unsure {
		once = append(once, onceq.OnUncertain(onceq.Hold()))
	}
	var handlers []onceq.Handler
	for _, name := range c.kinds() {
		kind := onceq.Kind[onceqPayload]{Name: name, Backoff: func(int, error) time.Duration { return 50 * time.Millisecond }}
		handlers = append(handlers, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p onceqPayload) error {
			return handle(ctx, &run{
				n: p.N, attempt: l.Attempt,
				write: func(ctx context.Context, n int) error { _, err := tx.Exec(ctx, insertRow, n); return err },
				call: func(ctx context.Context, name string, fn func(context.Context, string) (string, error)) error {
					_, err := onceq.Once(ctx, l, name, fn, once...)
					return err
				},
				result: func(_ context.Context, result string) error { return l.SetResult(result) },
				end:    func(ctx context.Context) error { _, err := tx.Conn().Exec(ctx, "commit"); return err },
			})
		}))
	}
	if c.Every > 0 {
		cron, err := onceqcron.New(a.q, a.pool, onceqcron.Config{}, onceqcron.Schedule{
			Name: "tick", Spec: fmt.Sprintf("*/%d * * * * *", c.Every), Job: onceq.Job{Kind: "work", Payload: onceqPayload{1}},
		})
		if err == nil {
			err = cron.Register(ctx)
		}
		if err != nil {
			return nil, err
		}
		handlers = append(handlers, cron.Handlers()...)
	}
	w, err := onceq.NewWorker(a.q, cfg, handlers...)
	if err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- w.Run(running) }()
	return func(ctx context.Context) error {
		stop()
		select {
		case err := <-ended:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}, nil
}

func (a *onceqAdapter) left(ctx context.Context) (int, error) {
	return onceqops.New(a.q).Count(ctx, a.pool, onceqops.Filter{States: []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRunning, onceq.StateRetrying}})
}

func (a *onceqAdapter) silence(context.Context) error { return nil } // the lease

func (a *onceqAdapter) age(ctx context.Context) error {
	_, err := a.pool.Exec(ctx, `
update onceq.job_fences set finished_at = finished_at - interval '30 days' where finished_at is not null;
update onceq.job_history set finished_at = finished_at - interval '30 days', keep_until = keep_until - interval '30 days'`)
	if err != nil {
		return err
	}
	r, err := onceq.NewReaper(a.q, onceq.ReaperConfig{Grace: time.Millisecond})
	if err != nil {
		return err
	}
	_, err = r.RunOnce(ctx)
	return err
}

func (a *onceqAdapter) cancel(ctx context.Context, id string) error {
	n, err := strconv.ParseInt(id, 10, 64)
	if err != nil {
		return err
	}
	state, err := a.q.Cancel(ctx, a.pool, n)
	if err == nil && state != onceq.StateCancelled {
		err = errors.New("not cancelled: it is " + state.String())
	}
	return err
}
