package fromasynq

import (
	"context"
	"testing"

	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// A task that asynq delivers twice, and that a new producer enqueues as well, is one job.
func TestBothSideBySide(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	bridge := Bridge(db.Queue, db.Pool)
	task := asynq.NewTask("welcome", []byte(`{"user_id": 42}`))
	for range 2 {
		require.NoError(t, bridge(ctx, task))
	}
	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return enqueueAfter(ctx, db.Queue, tx) }))
	require.ErrorIs(t, bridge(ctx, asynq.NewTask("welcome", []byte(`{`))), asynq.SkipRetry)

	sent := 0
	send := func(_ context.Context, user int, _ string) error {
		require.Equal(t, 42, user)
		sent++
		return nil
	}
	require.Len(t, db.Drain(handler(send)), 1)
	require.Equal(t, 1, sent)

	require.NoError(t, muxBefore(send).ProcessTask(ctx, task))
	require.Equal(t, 2, sent)
	_ = enqueueBefore // wants a Redis
}
