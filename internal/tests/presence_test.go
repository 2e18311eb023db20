package tests

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func workers(t testing.TB, db *queuetest.DB) []onceqops.WorkerInfo {
	t.Helper()
	all, err := onceqops.New(db.Queue).Workers(t.Context(), db.Pool)
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
	require.Equal(t, "v1.4.2", one.App)
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
	sqlRun(t, db, `insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
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

// A handler that ignores its context holds a slot. Other processes read that in the worker's row, and blame nobody else.
func TestWorkers_HandlersThatDoNotReturn(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	finish := make(chan struct{})
	kind := onceq.Kind[int]{Name: "stubborn", Timeout: 10 * time.Millisecond}
	w := start(t, db, onceq.WorkerConfig{
		Lease: 2 * time.Second, ShutdownTimeout: -1, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}},
	}, kind.Handle(func(context.Context, *onceq.Lease, int) error {
		<-finish
		return nil
	}))
	id, next := add(t, db, kind.Job(1)), add(t, db, kind.Job(2))
	eventually(t, "a slot that is held", func() bool {
		all := workers(t, db)
		return len(all) == 1 && len(all[0].Stuck) == 1
	})
	one := workers(t, db)[0]
	s := one.Stuck[0]
	require.Equal(t, []any{"default", "stubborn", 1, id}, []any{s.Queue, s.Kind, s.Slots, s.Job})
	require.False(t, s.Since.IsZero())
	require.Contains(t, one.String(), `1 slot of queue "default" is held since `)
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '5 minutes'`)
	handlers, waiting := findings(t, db, "handler"), findings(t, db, "waiting") // db.Queue is not the worker's
	require.Len(t, handlers, 1)
	require.True(t, handlers[0].Severe)
	require.Equal(t, "stubborn", handlers[0].Kind)
	require.Equal(t, s.Since, handlers[0].Since)
	require.Contains(t, handlers[0].Detail, `held since`)
	require.Len(t, waiting, 1)
	require.Contains(t, waiting[0].Detail, `1 slot is held by handlers of ["stubborn"] that do not return although their context has ended`)
	require.Contains(t, waiting[0].Advice, "end that process")
	e := must[onceqops.Explanation](t)(onceqops.New(db.Queue).Explain(t.Context(), db.Pool, next))
	require.Contains(t, e.String(), `1 slot is held by handlers of ["stubborn"] that do not return`)
	close(finish)
	eventually(t, "the other job", func() bool { return sqlOne[int](t, db, `select count(*) from onceq.jobs`) == 0 })
	require.NoError(t, w.stop())
}

// A worker whose pool allows no more jobs at once says so, and so do those that look.
func TestWorkers_APoolThatIsTooSmall(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "tx"}
	finish := make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{}, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
		_, err := tx.Exec(ctx, `select 1`)
		<-finish
		return err
	}))
	for i := range 30 {
		add(t, db, kind.Job(i))
	}
	eventually(t, "full", func() bool {
		all := workers(t, db)
		return len(all) == 1 && sqlOne[int](t, db, `select count(*) from onceq.jobs where leased_until is not null`) >= all[0].Queues["default"]
	})
	one := workers(t, db)[0]
	require.Equal(t, []string{"default"}, one.Pool.Bound)
	require.Greater(t, one.Pool.Conns, one.Queues["default"])
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '5 minutes' where leased_until is null`)
	waiting := findings(t, db, "waiting")
	require.Len(t, waiting, 1)
	require.Contains(t, waiting[0].Detail, "the workers' pool allows no more at once")
	require.Contains(t, waiting[0].Advice, "raise the pool's MaxConns")
	id := sqlOne[int64](t, db, `select max(id) from onceq.jobs where leased_until is null`)
	require.Contains(t, must[onceqops.Explanation](t)(onceqops.New(db.Queue).Explain(t.Context(), db.Pool, id)).String(), "raise the pools' MaxConns")

	// One that waits for connections all the time is a finding.
	sqlRun(t, db, `update onceq.workers set pool = jsonb_set(pool, '{wait}', '240000000000')`)
	pools := findings(t, db, "pool")
	require.Len(t, pools, 1)
	require.Contains(t, pools[0].Detail, "4m0s in the last minute, added up")
	close(finish)
	require.NoError(t, w.stop())
}

// Slots are free, and the processes of all workers wait for connections.
func TestWorkers_NoneHasAConnection(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	workerRow(t, db, 1, `{"default": 3}`, "k", "1 second")
	sqlRun(t, db, `update onceq.workers set pool = '{"conns": 4, "wait": 60000000000}'`)
	id := add(t, db, onceq.Job{})
	sqlRun(t, db, `update onceq.jobs set run_at = now() - interval '2 minutes'`)
	e := must[onceqops.Explanation](t)(onceqops.New(db.Queue).Explain(t.Context(), db.Pool, id))
	require.Equal(t, onceqops.CauseFull, e.Cause())
	const why = "their processes wait for connections of their pools"
	require.Contains(t, e.String(), why+", and handlers that need one do not start; raise the pool's MaxConns")
	waiting := findings(t, db, "waiting")
	require.Len(t, waiting, 1)
	require.Contains(t, waiting[0].Detail, "none is running although 1 worker serves the queue; "+why)
	require.Contains(t, waiting[0].Advice, "raise the pool's MaxConns")

	// One of two has some.
	workerRow(t, db, 2, `{"default": 3}`, "k", "1 second")
	require.NotContains(t, must[onceqops.Explanation](t)(onceqops.New(db.Queue).Explain(t.Context(), db.Pool, id)).String(), why)
}

// Handlers without a transaction, or the application itself, have all connections of the pool: the log warns of that, too, and the row
// of the worker says for how long somebody has waited.
func TestWorkers_WaitForConnections(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 2 }))
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	kind := onceq.Kind[int]{Name: "greedy", Timeout: 10 * time.Millisecond, MaxAttempts: 1}
	add(t, db, kind.Job(1))
	end := make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{Lease: 2 * time.Second}, kind.Handle(func(context.Context, *onceq.Lease, int) error {
		for range 2 {
			c, err := db.Pool.Acquire(context.Background())
			if err != nil {
				return err
			}
			defer c.Release()
		}
		<-end // it asks for a third one
		return nil
	}))
	eventually(t, "the warning", func() bool {
		return strings.Contains(w.logged(), "all connections of the pool are in use and none becomes free")
	})
	require.Regexp(t, `level=WARN msg="onceq: all connections of the pool are in use.*connections=2 "by handlers' transactions"=0`, w.logged())
	eventually(t, "a row that says so", func() bool { // it is written when the handler is given up, at the latest a minute later
		all, err := onceqops.New(db.Queue).Workers(t.Context(), conn)
		require.NoError(t, err)
		return len(all) == 1 && all[0].Pool.Wait > 0 && all[0].Pool.Conns == 2
	})
	close(end)
	require.NoError(t, w.stop())
}
