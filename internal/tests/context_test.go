package tests

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// A handler's context is made when somebody first asks for it. It behaves as if it had been there from the start.
func TestHandle_Context(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{Key: "k"})
	var after context.Context
	var inside, child, derived *onceq.Lease
	ran := db.RunOne(handle(func(ctx context.Context, l *onceq.Lease) error {
		after, inside = ctx, onceq.LeaseFromContext(ctx)
		until, ok := ctx.Deadline()
		require.True(t, ok)
		require.WithinDuration(t, time.Now().Add(time.Minute), until, 30*time.Second)
		require.NoError(t, ctx.Err())
		require.NoError(t, context.Cause(ctx))
		c, cancel := context.WithCancel(ctx)
		child = onceq.LeaseFromContext(c)
		cancel()
		require.NoError(t, ctx.Err())
		derived = onceq.LeaseFromContext(context.WithoutCancel(ctx))
		return nil
	}))
	require.Equal(t, onceq.StateCompleted, ran.State)
	for _, l := range []*onceq.Lease{inside, child, derived} {
		require.Equal(t, id, l.ID)
	}
	<-after.Done()
	require.ErrorIs(t, after.Err(), context.Canceled)
}

// A context that nobody asked for while the handler ran has ended as well, and so have the contexts that are made from it
// later.
func TestHandle_ContextFirstAskedAfterTheEnd(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{})
	var after context.Context
	ran := db.RunOne(handle(func(ctx context.Context, l *onceq.Lease) error {
		after = ctx
		return nil
	}))
	require.Equal(t, onceq.StateCompleted, ran.State)
	late, cancel := context.WithCancel(after)
	defer cancel()
	<-late.Done()
	require.ErrorIs(t, after.Err(), context.Canceled)
	require.ErrorIs(t, context.Cause(late), context.Canceled)
}

// A handler that asks only after its lease is lost gets the cause, and so do the contexts that it makes from its own.
func TestHandle_ContextTellsTheCauseToALateCaller(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{})
	running, ask, asked := make(chan struct{}), make(chan struct{}), make(chan error, 3)
	w := start(t, db, onceq.WorkerConfig{Lease: steady}, handle(func(ctx context.Context, l *onceq.Lease) error {
		if l.Lost > 0 {
			return nil
		}
		close(running)
		<-ask
		<-ctx.Done()
		c, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		asked <- context.Cause(ctx)
		asked <- context.Cause(c)
		return ctx.Err()
	}))
	receive(t, running)
	sqlRun(t, db, `update onceq.jobs set holder = 0, leased_until = statement_timestamp(), claims = claims + 1 where id = $1`, id)
	eventually(t, "the loss", func() bool { return w.count(onceq.EventLeaseLost) == 1 })
	close(ask)
	require.ErrorIs(t, receive(t, asked), onceq.ErrLeaseLost)
	require.ErrorIs(t, receive(t, asked), onceq.ErrLeaseLost)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}
