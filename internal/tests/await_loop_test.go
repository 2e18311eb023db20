package tests

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// A handler that reminds each day until the event comes: a time-out stays, and so the second Await in one run would not wait.
func TestAwait_ATimeOutInALoop(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	reminders := 0
	h := flow.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		for day := 1; day <= 14; day++ {
			paid, err := l.Await(ctx, "paid", "4711", 24*time.Hour)
			if err != nil || paid {
				return err
			}
			if _, err := onceq.Once(ctx, l, fmt.Sprint("reminder-", day), func(context.Context, string) (any, error) { reminders++; return nil, nil }); err != nil {
				return err
			}
		}
		return nil
	})
	flowEnqueue(t, db)
	require.Equal(t, onceq.StateDelayed, db.RunOne(h).State)
	db.Advance(24 * time.Hour)
	ran := db.RunOne(h)
	require.Equal(t, 1, reminders)
	require.ErrorIs(t, ran.Err, onceq.ErrNameUsed)
}

// A handler that drops the error of an Await or a Sleep is named in the log, and one that returns it is not.
func TestAwait_AHandlerThatGoesOnIsNamed(t *testing.T) {
	t.Parallel()
	for _, inTx := range []bool{false, true} {
		var log bytes.Buffer // slog writes under a lock, and RunOne has returned before it is read
		db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
		drop := true
		waits := func(ctx context.Context, l *onceq.Lease) error {
			_, err := l.Await(ctx, "paid", "4711", time.Hour)
			require.Error(t, err)
			if drop {
				return nil
			}
			return fmt.Errorf("wrapped: %w", err)
		}
		h := flow.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error { return waits(ctx, l) })
		if inTx {
			h = flow.HandleTx(func(ctx context.Context, _ pgx.Tx, l *onceq.Lease, _ string) error { return waits(ctx, l) })
		}
		id := flowEnqueue(t, db)
		require.Equal(t, onceq.StateCompleted, db.RunOne(h).State)
		require.Contains(t, log.String(), "return the error of Await and Sleep")
		require.Contains(t, log.String(), fmt.Sprintf(`job=%d waits_for="event \"4711\" in scope \"paid\""`, id))
		drop, said := false, len(log.String())
		flowEnqueue(t, db)
		require.Equal(t, onceq.StateDelayed, db.RunOne(h).State)
		require.NotContains(t, log.String()[said:], "return the error")
	}
}

// The same with a look that does not wait first.
func TestAwait_ALookBeforeTheWait(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	h := flow.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		if paid, err := l.Await(ctx, "paid", "4711", 0); err != nil || paid {
			return err
		}
		_, err := l.Await(ctx, "paid", "4711", 72*time.Hour)
		return err
	})
	flowEnqueue(t, db)
	require.ErrorIs(t, db.RunOne(h).Err, onceq.ErrNameUsed)
}
