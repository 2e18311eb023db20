package tests

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// An application's own transaction above READ COMMITTED may take longer than several beats if it completes the job first.
// That locks the row, and beats no longer change it.
func TestPromise5_ASnapshotTransactionOfTheCallersOutlivesBeatsWhenItCompletesFirst(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	_, err := db.Pool.Exec(t.Context(), `create table effects (n int)`)
	require.NoError(t, err)
	k := onceq.Kind[int]{Name: "k", MaxAttempts: 1}
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, k.Job(1))
	require.NoError(t, err)
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Lease: time.Second}, k.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
		return pgx.BeginTxFunc(ctx, db.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
			if err := l.Complete(ctx, tx); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `insert into effects select $1 from pg_sleep(2)`, n)
			return err
		})
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	_, err = db.Queue.Get(t.Context(), db.Pool, r.ID)
	require.ErrorIs(t, err, onceq.ErrNotFound) // the job is completed; a dead one would be found
	require.Equal(t, 1, enqGet[int](t, db.Pool, `select count(*)::int from effects`))
}

// During a deploy, the old version knows kind a, and the new one kinds a and b, on one queue. Each job runs once, in a
// worker that knows its kind. That includes jobs whose worker died.
func TestPromise1_TwoVersionsOfAWorkerOnOneQueue(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	ctx := t.Context()
	_, err := db.Pool.Exec(ctx, `create table effects (job bigint primary key, version int, kind text)`)
	require.NoError(t, err)
	a, b := onceq.Kind[int]{Name: "a"}, onceq.Kind[int]{Name: "b"}
	version := func(n int, kinds ...onceq.Kind[int]) *onceq.Worker {
		var handlers []onceq.Handler
		for _, k := range kinds {
			handlers = append(handlers, k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
				_, err := tx.Exec(ctx, `insert into effects values ($1, $2, $3)`, l.ID, n, l.Kind)
				return err
			}))
		}
		w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{PollInterval: 20 * time.Millisecond}, handlers...)
		require.NoError(t, err)
		return w
	}
	enqueue := func(n int) {
		jobs := make([]onceq.Job, n)
		for i := range jobs {
			k := []onceq.Kind[int]{a, b}[i%2]
			jobs[i] = k.Job(i)
		}
		_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
		require.NoError(t, err)
	}
	enqueue(40)
	// A worker that died holds some jobs of both kinds.
	died, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 10, Lease: 500 * time.Millisecond})
	require.NoError(t, err)
	require.Len(t, died, 10)
	work, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 2)
	run := func(w *onceq.Worker) { go func() { ended <- w.Run(work) }() }
	run(version(1, a))
	require.Eventually(t, func() bool {
		return enqGet[int](t, db.Pool, `select count(*)::int from effects`) == 20 // with the five of the dead worker
	}, patience, 10*time.Millisecond)
	require.Equal(t, 20, enqGet[int](t, db.Pool, `select count(*)::int from onceq.jobs where kind = 'b'`))
	run(version(2, a, b))
	enqueue(40)
	require.Eventually(t, func() bool { return enqJobs(t, db.Pool) == 0 }, patience, 10*time.Millisecond)
	stop()
	require.NoError(t, <-ended)
	require.NoError(t, <-ended)
	require.Equal(t, 80, enqGet[int](t, db.Pool, `select count(*)::int from effects`))
	require.Zero(t, enqGet[int](t, db.Pool, `select count(*)::int from effects where kind = 'b' and version = 1`))
}
