// Service is the main function of a worker in production. It serves until it is told to stop, prunes, answers probes,
// and tells an operator about problems.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/onceqops"
)

type receipt struct {
	Order int `json:"order"`
}

var mail = onceq.Kind[receipt]{Name: "receipt", Key: func(r receipt) string { return fmt.Sprint("receipt:", r.Order) }}

func main() {
	if err := run(context.Background()); err != nil {
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
	worker, err := onceq.NewWorker(q, onceq.WorkerConfig{}, mail.HandleTx(send))
	if err != nil {
		return err
	}
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{})
	if err != nil {
		return err
	}
	probes := &http.Server{Addr: os.Getenv("PROBES"), Handler: onceqhttp.Probes(worker), ReadHeaderTimeout: 5 * time.Second}
	return onceq.Serve(ctx, worker, reaper, watch{q}, onceqhttp.Part(probes, 0))
}

func send(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, r receipt) error {
	_, err := tx.Exec(ctx, `insert into receipts values ($1)`, r.Order)
	return err
}

// watch reports what slows the queue down before its users notice.
type watch struct{ *onceq.Queue }

func (w watch) Run(ctx context.Context) error {
	minute := time.NewTicker(time.Minute)
	defer minute.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-minute.C:
		}
		found, err := onceqops.New(w.Queue).Health(ctx)
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
