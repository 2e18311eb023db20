package tests

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

func workers(t testing.TB, db *queuetest.DB) []onceq.WorkerInfo {
	t.Helper()
	all, err := db.Queue.Workers(t.Context(), db.Pool)
	require.NoError(t, err)
	return all
}

func TestWorkers_ARowWhileItRuns(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	batch := onceq.Kind[int]{Name: "batch", Queue: "bulk"}
	w := start(t, db, onceq.WorkerConfig{
		Lease:  7 * time.Second,
		Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 3}, "bulk": {Concurrency: 2}},
	}, handle(func(context.Context, *onceq.Lease) error { return nil }),
		batch.HandleBatch(5, func(context.Context, pgx.Tx, []onceq.Item[int]) error { return nil }))
	eventually(t, "the worker's row", func() bool { return len(workers(t, db)) == 1 })
	one := workers(t, db)[0]
	host, err := os.Hostname()
	require.NoError(t, err)
	require.Equal(t, host, one.Host)
	require.Equal(t, os.Getpid(), one.Process)
	require.NotEmpty(t, one.Version)
	require.Equal(t, onceq.SchemaVersion, one.Schema)
	require.Equal(t, 7*time.Second, one.Lease)
	require.Equal(t, []string{"batch", "k"}, one.Kinds)
	require.Equal(t, 10, one.Queues["bulk"])
	require.Contains(t, one.Queues, "default")
	require.False(t, one.Stale)
	require.Equal(t, one.Started, one.Seen)
	require.NoError(t, w.stop())
	require.Empty(t, workers(t, db))
	require.Zero(t, w.count(onceq.EventBackground), w.logged())
}

func TestWorkers_AShortDrainLeavesNoRow(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{Payload: 1})
	db.Drain(handle(func(context.Context, *onceq.Lease) error {
		require.Empty(t, workers(t, db))
		return nil
	}))
	require.Empty(t, workers(t, db))
}

// The row of a worker that was killed is recognised, and reaped later. The row of a live worker never is.
func TestWorkers_StaleRowsAreReaped(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	start(t, db, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	eventually(t, "the worker's row", func() bool { return len(workers(t, db)) == 1 })
	live := workers(t, db)[0].ID
	sqlRun(t, db, `insert into onceq.workers
select n, lease, now() - interval '1 day', now() - n * interval '1 minute', process, schema_version, 'z' || n, version, queues, kinds
  from onceq.workers, unnest(array[2, 4, 70]) n`)
	var stale []int64
	for _, w := range workers(t, db) {
		if w.Stale {
			stale = append(stale, w.ID)
		}
	}
	require.Equal(t, []int64{4, 70}, stale)
	r := newReaper(t, db, onceq.ReaperConfig{})
	reap(t, r, onceq.Reaped{Workers: 1})
	r = newReaper(t, db, onceq.ReaperConfig{Grace: time.Millisecond})
	reap(t, r, onceq.Reaped{Workers: 1})
	left := []int64{}
	for _, w := range workers(t, db) {
		left = append(left, w.ID)
	}
	require.ElementsMatch(t, []int64{live, 2}, left, "a live worker's row stays, whatever the grace time")
}
