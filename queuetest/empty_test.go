package queuetest_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func TestEmpty(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"onceq", `we"ird onceq.`} {
		db := queuetest.New(t, queuetest.Schema(schema))
		ctx, q := t.Context(), db.Queue
		lane := onceq.Kind[int]{Name: "k", Lane: func(int) string { return "a" }}
		fill := func() (ids []int64) {
			for i := range 3 {
				r, err := q.Enqueue(ctx, db.Pool, lane.Job(i))
				require.NoError(t, err)
				ids = append(ids, r.ID)
			}
			r, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "keyed", Key: "x", Payload: 1, RunAt: time.Now().Add(time.Hour)})
			require.NoError(t, err)
			require.False(t, r.Duplicate, "the key is free")
			require.NoError(t, q.SetLimit(ctx, db.Pool, "l", onceq.Limit{AtOnce: 3}))
			require.NoError(t, q.PauseKind(ctx, db.Pool, "other", "a test"))
			_, err = onceqops.New(q).RecordAction(ctx, db.Pool, onceqops.Action{Who: "ada", What: "pause"})
			require.NoError(t, err)
			return append(ids, r.ID)
		}
		first := fill()
		db.Empty()
		// What a test leaves behind is gone, and whatever is left is of the tables' own.
		jobs, err := onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{})
		require.NoError(t, err)
		require.Empty(t, jobs)
		pauses, err := onceqops.New(q).Pauses(ctx, db.Pool)
		require.NoError(t, err)
		require.Empty(t, pauses)
		limits, err := onceqops.New(q).Limits(ctx, db.Pool, onceqops.LimitFilter{})
		require.NoError(t, err)
		require.Empty(t, limits)
		require.NoError(t, q.Check(ctx))

		require.Greater(t, fill()[0], first[3], "no id comes twice")
		ran := 0
		db.Drain(lane.Handle(func(context.Context, *onceq.Lease, int) error { ran++; return nil }))
		require.Equal(t, 3, ran)
	}
}

// Empty puts back what somebody has truncated, and knows each table of the newest migration.
func TestEmpty_AfterATruncate(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	var all []string
	rows, err := db.Pool.Query(t.Context(), `select c.relname::text from pg_class c where c.relkind = 'r' and c.relnamespace = 'onceq'::regnamespace`)
	require.NoError(t, err)
	for rows.Next() {
		var name string
		require.NoError(t, rows.Scan(&name))
		all = append(all, name)
		_, err := conformance.Owner(t, db).Exec(t.Context(), `truncate onceq.`+name)
		require.NoError(t, err)
	}
	require.NoError(t, rows.Err())
	require.ElementsMatch(t, append(queuetest.Emptied(), "meta", "lane_locks", "lane_calls", "queues", "workers", "waiters", "waiter_queues", "wakes"), all)
	require.ErrorContains(t, db.Queue.Check(t.Context()), "meta")
	for _, part := range []string{"lane_locks has 0 rows, and not 16", "lane_calls has no row without a lane", "meta has 0 rows, and not one"} {
		require.ErrorContains(t, db.Check(), part)
	}
	require.NoError(t, queuetest.Empty(t.Context(), conformance.Owner(t, db), db.Schema))
	require.NoError(t, db.Queue.Check(t.Context()))
	found, err := onceqops.New(db.Queue).Health(t.Context())
	require.NoError(t, err)
	require.Empty(t, found)
}
