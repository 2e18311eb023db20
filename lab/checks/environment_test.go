package checks

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// What a worker does by itself in databases whose settings differ from those of the other tests.

const (
	patience = 2 * time.Minute      // for what a worker does within seconds
	pace     = 5 * time.Millisecond // between two reads of a table
)

// running lets a worker work until the test ends.
func running(t *testing.T, q *onceq.Queue, c onceq.WorkerConfig, handlers ...onceq.Handler) {
	t.Helper()
	w, err := onceq.NewWorker(q, c, handlers...)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
}

func within[T any](t *testing.T, c <-chan T, what string) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		t.Fatalf("in vain: %s", what)
	}
	return v
}

// In a database where all transactions are read-only by default, a worker finds an expired lease before its cursor, does
// effects and work outside jobs, and announces that it is idle.
func TestEnvironment_AWorkerWorksWhereADefaultIsToRead(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	q := otherwise(t, db, readOnly)
	ctx := t.Context()
	// Another process has the job and dies. The job was due long ago, so the worker's cursor has passed it when its lease
	// expires.
	old, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", RunAt: time.Now().Add(-time.Hour)})
	require.NoError(t, err)
	leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Lease: time.Hour})
	require.NoError(t, err)
	require.Len(t, leases, 1)

	type run struct {
		id  int64
		err error
	}
	runs := make(chan run, 10)
	kind := onceq.Kind[any]{Name: "k"}
	running(t, q, onceq.WorkerConfig{}, kind.Handle(func(ctx context.Context, l *onceq.Lease, _ any) error {
		_, err := onceq.Once(ctx, l, "effect", func(context.Context, string) (int, error) { return 1, nil })
		if err == nil {
			_, err = onceq.Do(ctx, q, onceq.FenceSpec{Key: "k"}, func(context.Context, *onceq.FenceLease) (int, error) { return 1, nil })
		}
		runs <- run{l.ID, err}
		return err
	}))
	fresh, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k"})
	require.NoError(t, err)
	got := within(t, runs, "the worker runs a new job")
	require.NoError(t, got.err)
	require.Equal(t, fresh.ID, got.id)

	db.ExpireLease(old.ID)
	got = within(t, runs, "the worker finds a lease that ran out behind it")
	require.NoError(t, got.err)
	require.Equal(t, old.ID, got.id)

	announced := make(chan struct{})
	go func() {
		defer close(announced)
		for n := 0; n == 0 && ctx.Err() == nil; time.Sleep(pace) {
			_ = db.Pool.QueryRow(ctx, schema(db, `select count(*) from onceq.waiters`)).Scan(&n)
		}
	}()
	within(t, announced, "the worker says that it is idle")
}
