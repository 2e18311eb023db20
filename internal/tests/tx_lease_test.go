package tests

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// A transactional handler that runs for longer than its lease: a beat cannot extend the lease, because the row is locked.
func TestExplain_TransactionsLongerThanTheirLeases(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	k := onceq.Kind[int]{Name: "slow", Timeout: time.Hour}
	stop := make(chan struct{})
	defer close(stop)
	start(t, db, onceq.WorkerConfig{Lease: time.Second}, k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
		_, err := tx.Exec(ctx, "select 1")
		select {
		case <-stop:
		case <-ctx.Done():
		}
		return err
	}))
	var ids []int64
	for i := range 20 {
		r, err := db.Queue.Enqueue(ctx, db.Pool, k.Job(i))
		require.NoError(t, err)
		ids = append(ids, r.ID)
	}
	require.Eventually(t, func() bool {
		var n int
		err := db.Pool.QueryRow(ctx, `select count(*) from onceq.jobs where leased_until < statement_timestamp()`).Scan(&n)
		return err == nil && n == 8
	}, 5*time.Minute, 50*time.Millisecond)
	var e onceqops.Explanation
	eventually(t, "the worker has said that it is full", func() bool {
		var err error
		e, err = onceqops.New(db.Queue).Explain(ctx, db.Pool, ids[19])
		require.NoError(t, err)
		return e.Cause() == onceqops.CauseFull
	})
	require.Equal(t, 8, e.Reasons[0].Running)
	require.Equal(t, 11, e.Reasons[1].Before)
	var found []onceqops.Finding
	var err error
	eventually(t, "Health sees what waits", func() bool { // a rescan brings them to where claims are, with the time of the job there
		sqlRun(t, db, `update onceq.jobs set run_at = statement_timestamp() - interval '2 minutes' where id = any ($1)`, ids[8:])
		found, err = onceqops.New(db.Queue).Health(ctx)
		require.NoError(t, err)
		return len(found) > 0
	})
	require.Len(t, found, 1)
	require.Contains(t, found[0].Detail, "12 wait for their first attempt, and 8 are with workers")
	require.False(t, found[0].Severe)
}
