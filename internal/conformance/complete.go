package conformance

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
)

func completeBelongsToTheTransaction(t *testing.T, set setup) {
	e := set(t)
	ctx := t.Context()
	job := onceq.Job{Kind: "k", Key: "k"}
	e.enqueue(e.Handles.DB, job)
	l := e.claim()
	require.NoError(t, l.SetResult(map[string]int{"n": 1}))
	tx := e.begin(pgx.ReadCommitted)
	const show = `select concat_ws(' ', current_setting('enable_seqscan'), current_setting('enable_hashjoin'))`
	exec(t, tx.DB, `set local enable_hashjoin = off`)
	before := get[string](t, tx.DB, show)
	require.NoError(t, l.Complete(ctx, tx.DB))
	require.Equal(t, before, get[string](t, tx.DB, show), "the caller's settings stay")
	require.NoError(t, tx.Rollback(ctx))
	require.Equal(t, 1, e.jobs())
	tx = e.begin(pgx.ReadCommitted)
	require.NoError(t, l.Complete(ctx, tx.DB))
	require.NoError(t, tx.Commit(ctx))
	r := e.enqueue(e.Handles.DB, job)
	require.True(t, r.Duplicate)
	require.Equal(t, onceq.StateCompleted, r.State)
	require.JSONEq(t, `{"n": 1}`, string(r.Output))
}

func completeOutsideOfATransaction(t *testing.T, set setup) {
	e := set(t)
	for _, key := range []string{"", "k"} {
		e.enqueue(e.Handles.DB, onceq.Job{Kind: "k", Key: key})
		l := e.claim()
		require.NoError(t, l.Complete(t.Context(), e.Handles.DB))
		var lost *onceq.LeaseError
		require.ErrorAs(t, l.Complete(t.Context(), e.Handles.DB), &lost)
		require.Equal(t, onceq.LeaseError{Op: "complete", JobID: l.ID, Token: l.Token, Completed: true}, *lost)
	}
	require.Zero(t, e.jobs())
}

// A completion under a token that is no longer valid raises an error, so that nothing of its transaction is committed.
func completeStaleEndsTheTransaction(t *testing.T, set setup) {
	e := set(t)
	exec(t, e.Pool, `create table effects (n int)`)
	ctx := t.Context()
	for _, key := range []string{"", "k"} {
		id := e.enqueue(e.Handles.DB, onceq.Job{Kind: "k", Key: key}).ID
		stale := e.claim()
		e.ExpireLease(id)
		holder := e.claim()
		for _, l := range []*onceq.Lease{stale, holder} {
			tx := e.begin(pgx.ReadCommitted)
			exec(t, tx.DB, `insert into effects values (1)`)
			if err := l.Complete(ctx, tx.DB); l == holder {
				require.NoError(t, err)
				require.NoError(t, tx.Commit(ctx))
			} else {
				require.ErrorIs(t, err, onceq.ErrLeaseLost)
				require.Error(t, tx.Commit(ctx))
			}
		}
	}
	require.Equal(t, 2, get[int](t, e.Pool, `select count(*)::int from effects`))
	require.Zero(t, e.jobs())
}
