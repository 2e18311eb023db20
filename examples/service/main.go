// Service is the main function of a worker in production. It checks the tables, serves until it is told to stop, prunes,
// and tells an operator about problems.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

type receipt struct {
	Order int `json:"order"`
}

var mail = onceq.Kind[receipt]{Name: "receipt", Key: func(r receipt) string { return fmt.Sprint("receipt:", r.Order) }}

func main() {
	// SIGTERM is what a deploy sends. A second one ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	context.AfterFunc(ctx, stop)
	if err := run(ctx); err != nil {
		slog.Error("the service ends", "error", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()

	// Events are logged anyway. The hook is for those that a person should see.
	q, err := onceq.New(pool, &onceq.Config{Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
		switch e.Type {
		case onceq.EventDead, onceq.EventHeld:
			page(e) // page must not block
		}
	})})
	if err != nil {
		return err
	}
	// Check that the tables exist and fit this code. The application's migrations run before.
	if err := q.Check(ctx); err != nil {
		return err
	}
	worker, err := onceq.NewWorker(q, onceq.WorkerConfig{}, mail.HandleTx(send))
	if err != nil {
		return err
	}
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{})
	if err != nil {
		return err
	}

	// If the worker or the Reaper ends by itself, the other one ends too, and the process exits with an error.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	var ended [3]error
	for i, part := range []func(context.Context) error{worker.Run, reaper.Run, func(ctx context.Context) error { return watch(ctx, q) }} {
		running.Go(func() {
			defer cancel()
			ended[i] = part(ctx)
		})
	}
	slog.Info("ready")
	running.Wait() // Run returns when its handlers have ended or have given their jobs back
	return errors.Join(ended[:]...)
}

func send(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, r receipt) error {
	_, err := tx.Exec(ctx, `insert into receipts values ($1)`, r.Order)
	return err
}

// watch reports what slows the queue down before its users notice.
func watch(ctx context.Context, q *onceq.Queue) error {
	minute := time.NewTicker(time.Minute)
	defer minute.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-minute.C:
		}
		found, err := q.Health(ctx)
		if err != nil && ctx.Err() == nil {
			slog.Warn("health is not known", "error", err)
		}
		for _, f := range found {
			slog.Warn("health", "what", f.What, "detail", f.Detail, "advice", f.Advice)
		}
	}
}

// page stands for a call that wakes somebody up.
func page(e onceq.Event) {
	slog.Error("somebody is needed", "event", e.Type, "kind", e.Kind, "job", e.JobID)
}
