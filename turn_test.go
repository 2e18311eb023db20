package onceq_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// backlogged starts a worker, waits until it listens, takes the turn of the default queue as a stranger, and then enqueues
// more there than a few claims take. ran gets the queue of each job.
func backlogged(t *testing.T) (db *queuetest.DB, stranger pgx.Tx, ran chan string) {
	db = queuetest.New(t)
	ran = make(chan string, 10_000)
	kind := onceq.Kind[int]{Name: "k"}
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Also: []string{"other"}}, kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
		ran <- l.Queue
		return nil
	}))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	becomes(t, db.Pool, `select exists (select from `+pgx.Identifier{db.Schema, "waiters"}.Sanitize()+`)`)

	stranger, err = db.Pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = stranger.Rollback(context.Background()) })
	_, err = stranger.Exec(t.Context(), `select pg_advisory_xact_lock($1)`, onceq.TurnKey(db.Schema, onceq.DefaultQueue))
	require.NoError(t, err)
	jobs := make([]onceq.Job, 1000)
	for i := range jobs {
		jobs[i] = kind.Job(i)
	}
	_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	return db, stranger, ran
}

// becomes waits until a statement returns true.
func becomes(t *testing.T, pool *pgxpool.Pool, statement string) {
	t.Helper()
	require.Eventually(t, func() bool {
		var is bool
		require.NoError(t, pool.QueryRow(t.Context(), statement).Scan(&is))
		return is
	}, time.Minute, time.Millisecond, statement)
}

// A worker whose claim of a backlog waits for its turn works its other queues meanwhile.
func TestTurn_OfOneQueueDoesNotStopTheOthers(t *testing.T) {
	t.Parallel()
	db, stranger, ran := backlogged(t)
	const waits = `select exists (select from pg_locks where locktype = 'advisory' and not granted
		and database = (select oid from pg_database where datname = current_database()))`
	becomes(t, db.Pool, waits)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Queue: "other", Payload: 1})
	require.NoError(t, err)
	for <-ran != "other" {
	}
	require.NoError(t, stranger.Commit(t.Context()))
	becomes(t, db.Pool, `select not exists (select from `+pgx.Identifier{db.Schema, "jobs"}.Sanitize()+`)`)
}

// Whoever has the turn may be a process that stands still: the others go on without one.
func TestTurn_ThatNeverEndsStopsNobody(t *testing.T) {
	t.Parallel()
	db, _, _ := backlogged(t)
	becomes(t, db.Pool, `select not exists (select from `+pgx.Identifier{db.Schema, "jobs"}.Sanitize()+`)`)
}
