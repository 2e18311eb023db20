package onceq_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// Nobody else has the job, so a second completion may not say that somebody has.
func TestComplete_ASecondOneSaysThatThereWasAFirst(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "k"} {
		db, seen := eventDB(t)
		add(t, db, onceq.Job{Key: key})
		l := takeOne(t, db)
		require.NoError(t, l.Complete(t.Context(), nil))
		err := l.Complete(t.Context(), nil)
		var again *onceq.LeaseError
		require.ErrorAs(t, err, &again)
		require.True(t, again.Completed)
		require.ErrorContains(t, err, "has been completed under token")
		seen.want(t, onceq.EventEnqueued, onceq.EventClaimed, onceq.EventCompleted)
	}
}

// One that was rolled back is as if it had not been, whoever comes first.
func TestComplete_AfterARollback(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{Key: "k"})
	l := takeOne(t, db)
	undone := errors.New("undone")
	require.ErrorIs(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		require.NoError(t, l.Complete(t.Context(), tx))
		return undone
	}), undone)
	require.NoError(t, l.Complete(t.Context(), nil))
}

// The worker completes the job of a transactional handler. A second completion in its transaction takes the job away from
// the worker's, and the handler would fail however well it went.
func TestCompleteInBatch_IsRefusedWhereTheWorkerCompletes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, `create table effects (n int)`)
	kind := onceq.Kind[int]{Name: "k", MaxAttempts: 1}
	id := add(t, db, onceq.Job{MaxAttempts: 1})
	var refused error
	db.Drain(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
		b := &pgx.Batch{}
		b.Queue(`insert into effects values (1)`)
		refused = l.CompleteInBatch(b)
		return tx.SendBatch(ctx, b).Close()
	}))
	require.ErrorContains(t, refused, "return nil to complete it")
	require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from effects`))
	_, err := db.Queue.Get(t.Context(), db.Pool, id)
	require.ErrorIs(t, err, onceq.ErrNotFound, "it is completed")
}

// What a handler returns after it has completed its job changes nothing, and is said.
func TestHandle_AnErrorAfterTheCompletionIsLogged(t *testing.T) {
	t.Parallel()
	db, seen := eventDB(t)
	kind := onceq.Kind[int]{Name: "k"}
	id := add(t, db, onceq.Job{})
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		require.NoError(t, l.Complete(ctx, nil))
		return errors.New("the receipt was not mailed")
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	_, err = db.Queue.Get(t.Context(), db.Pool, id)
	require.ErrorIs(t, err, onceq.ErrNotFound, "it is completed")
	seen.mu.Lock()
	defer seen.mu.Unlock()
	require.Contains(t, seen.log.String(), "a handler returned an error after it had completed its job")
	require.Contains(t, seen.log.String(), "the receipt was not mailed")
}
