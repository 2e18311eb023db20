package onceq_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/queuetest"
)

func TestHealth_FindsNothingInAQuietDatabase(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	found, err := db.Queue.Health(t.Context())
	require.NoError(t, err)
	require.Empty(t, found)
}

func TestHealth_NamesWhatSlowsAQueueDown(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema(`we"ird`))
	find := func(what string) onceq.Finding {
		t.Helper()
		var found []onceq.Finding
		require.Eventually(t, func() bool { // the server's statistics come a little later
			var err error
			found, err = db.Queue.HealthAt(t.Context(), time.Microsecond, 100, 1, time.Microsecond)
			require.NoError(t, err)
			return slices.ContainsFunc(found, func(f onceq.Finding) bool { return f.What == what })
		}, 5*time.Minute, 50*time.Millisecond, "no %s", what)
		i := slices.IndexFunc(found, func(f onceq.Finding) bool { return f.What == what })
		require.NotEmpty(t, found[i].Advice)
		return found[i]
	}

	tx, err := db.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	var pid int
	require.NoError(t, tx.QueryRow(t.Context(), `select pg_backend_pid()`).Scan(&pid))
	require.Contains(t, find("snapshot").Detail, t.Name())

	_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Queue: "late"})
	require.NoError(t, err)
	require.Contains(t, find("waiting").Detail, `"late"`)

	jobs := make([]onceq.Job, 500)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k"}
	}
	_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `delete from "we""ird".jobs`)
	require.NoError(t, err)
	require.Contains(t, find("dead_rows").Detail, "jobs has")
	require.Contains(t, find("index_bloat").Detail, "0 MB for 0 rows") // empty, and larger than the limit of a byte
	require.NoError(t, tx.Rollback(t.Context()))

	_, err = conformance.Owner(t, db).Exec(t.Context(), `alter table jobs set (autovacuum_enabled = 'no')`)
	require.NoError(t, err)
	require.Contains(t, find("autovacuum").Detail, "jobs is not vacuumed")
}

// A server that crashed has forgotten how many rows there are, and an index of many is no bloat.
func TestHealth_LostStatisticsAreNoBloat(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	jobs := make([]onceq.Job, 2000)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k", Key: fmt.Sprint(i)}
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	_, err = conformance.Owner(t, db).Exec(t.Context(), `vacuum analyze`)
	require.NoError(t, err)
	rows := func() (n int) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select n_live_tup from pg_stat_user_tables where relid = 'onceq.jobs'::regclass`).Scan(&n))
		return n
	}
	var found []onceq.Finding
	require.Eventually(t, func() bool { // a connection may tell the server only now what it did
		_, err := conformance.Owner(t, db).Exec(t.Context(), `select pg_stat_reset_single_table_counters(c) from unnest(array['jobs'::regclass, 'job_fences'::regclass, 'job_history'::regclass]) c`)
		require.NoError(t, err)
		before := rows()
		found, err = db.Queue.HealthAt(t.Context(), time.Hour, 1_000_000, 64<<10, time.Hour)
		require.NoError(t, err)
		return before == 0 && rows() == 0
	}, 5*time.Minute, 50*time.Millisecond)
	require.Empty(t, found)
}

func TestStats_TellsLeasedFromRunning(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "k"}
	jobs := make([]onceq.Job, 500)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k", Payload: i}
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	blocked, release := make(chan struct{}), make(chan struct{})
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Lease: 12 * time.Second, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}}},
		kind.Handle(func(_ context.Context, _ *onceq.Lease, n int) error {
			if n == 200 {
				close(blocked)
				<-release
			}
			return nil
		}))
	require.NoError(t, err)
	onceq.ClaimAhead(w, time.Hour) // as a machine would that is fast enough
	done := make(chan error, 1)
	go func() { done <- w.Drain(t.Context(), 0) }()
	<-blocked
	for { // until the first beat
		stats, err := db.Queue.Stats(t.Context(), "default")
		require.NoError(t, err)
		s := stats[0]
		require.Greater(t, s.Leased, 1, "%+v", s)
		require.LessOrEqual(t, s.Running, 1, "%+v", s)
		if s.Running == 1 {
			break
		}
	}
	close(release)
	require.NoError(t, <-done)
}
