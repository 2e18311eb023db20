package fromriver

import (
	"context"
	"log/slog"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// Jobs that old producers insert and jobs that new ones enqueue are the same work: each mail goes out once.
func TestBothSideBySide(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	quiet := slog.New(slog.DiscardHandler)
	driver := riverpgxv5.New(db.Pool)
	migrator, err := rivermigrate.New(driver, &rivermigrate.Config{Logger: quiet})
	require.NoError(t, err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	require.NoError(t, err)

	workers := river.NewWorkers()
	river.AddWorker(workers, &Bridge{Pool: db.Pool, Queue: db.Queue})
	client, err := river.NewClient(driver, &river.Config{
		Logger: quiet, Workers: workers, Queues: map[string]river.QueueConfig{"mail": {MaxWorkers: 10}},
	})
	require.NoError(t, err)
	completed, unsubscribe := client.Subscribe(river.EventKindJobCompleted)
	defer unsubscribe()

	// An old producer, and a new one for the same user.
	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return insertBefore(ctx, client, tx) }))
	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return enqueueAfter(ctx, db.Queue, tx) }))
	_, err = client.Insert(ctx, WelcomeArgs{UserID: 7}, nil)
	require.NoError(t, err)

	require.NoError(t, client.Start(ctx))
	for range 2 {
		event := <-completed
		require.Equal(t, "welcome", event.Job.Kind)
	}
	require.NoError(t, client.Stop(ctx))

	var mu sync.Mutex
	sent := map[int]int{}
	send := func(_ context.Context, user int, _ string) error {
		mu.Lock()
		defer mu.Unlock()
		sent[user]++
		return nil
	}
	for _, ran := range db.Drain(handler(send)) {
		require.Equal(t, onceq.Completed, ran.State)
	}
	require.Equal(t, map[int]int{42: 1, 7: 1}, sent)

	// As it was before, so that this page's code of before is known to run.
	require.NoError(t, (&WelcomeWorker{Mail: send}).Work(ctx, &river.Job[WelcomeArgs]{Args: WelcomeArgs{UserID: 1}}))
	require.Equal(t, 1, sent[1])
}
