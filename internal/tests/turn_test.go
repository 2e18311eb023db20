package tests

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/queuetest"
)

// Jobs that are committed long after they were due come before the rest of a backlog, which several processes work off: all
// of them go back to these jobs, not only the one that has found them.
func TestTurn_LateJobsDoNotWaitForTheEndOfABacklog(t *testing.T) {
	conformance.Quick(t, "a backlog of 30,000, which a busy machine is done with before the late jobs come")
	t.Parallel()
	db := queuetest.New(t)
	const processes, backlog, late = 4, 30_000, 1000
	var mu sync.Mutex
	var order []int
	kind := onceq.Kind[int]{Name: "k"}
	enqueue := func(from, n int) {
		for i := 0; i < n; i += 1000 {
			jobs := make([]onceq.Job, min(1000, n-i))
			for k := range jobs {
				jobs[k] = kind.Job(from + i + k)
			}
			_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
			require.NoError(t, err)
		}
	}
	enqueue(0, backlog)
	for range processes {
		pool, err := pgxpool.NewWithConfig(t.Context(), db.Pool.Config())
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		start(t, &queuetest.DB{Pool: pool, Schema: db.Schema}, onceq.WorkerConfig{}, kind.Handle(func(ctx context.Context, _ *onceq.Lease, n int) error {
			select {
			case <-time.After(40 * time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
			mu.Lock()
			defer mu.Unlock()
			order = append(order, n)
			return nil
		}))
	}
	done := func() []int {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(order)
	}
	eventually(t, "a third of the backlog", func() bool { return len(done()) > backlog/3 })
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	jobs := make([]onceq.Job, late)
	for k := range jobs {
		jobs[k] = kind.Job(backlog + k)
	}
	results, err := db.Queue.EnqueueMany(t.Context(), tx, jobs)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `update onceq.jobs set run_at = (select min(run_at) from onceq.jobs) - interval '1 second' where id between $1 and $2`, results[0].ID, results[late-1].ID)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	before := len(done())
	eventually(t, "the end", func() bool { return len(done()) >= backlog+late })
	first, last := -1, 0
	for i, n := range done() {
		if n >= backlog {
			if last = i; first < 0 {
				first = i
			}
		}
	}
	t.Logf("the first late job was number %d, the last one %d, of %d after they were committed", first-before, last-before, backlog+late-before)
	if backlog+late-before < 10*late {
		t.Skip("this machine has too much other work: the backlog was almost done when the late jobs came")
	}
	// How soon the first one is found depends on what a look back costs here. From there on 1,000 to 2,500 come until the last one,
	// and about half of all if each goes on where it is.
	require.Less(t, last-first, (backlog+late-before)*2/5)
}
