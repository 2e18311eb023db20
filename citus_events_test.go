package onceq_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// What Emit, Await and Sleep send in parts on Citus does the same on every server.
func TestCitus_EventsInPartsDoTheSame(t *testing.T) {
	t.Parallel()
	inPartsDoTheSame(t, eventPaths)
}

// inPartsDoTheSame compares what do hears where statements are whole and where they are in parts.
func inPartsDoTheSame(t *testing.T, do func(*testing.T, *queuetest.DB, func(format string, args ...any))) {
	t.Helper()
	var heard [2][]string
	for i := range heard {
		t.Run(fmt.Sprintf("parts %t", i == 1), func(t *testing.T) {
			db := queuetest.New(t)
			if i == 1 {
				db.Queue.TakeApart()
			}
			do(t, db, func(format string, args ...any) { heard[i] = append(heard[i], fmt.Sprintf(format, args...)) })
			require.NoError(t, db.Check())
		})
	}
	require.Equal(t, heard[0], heard[1])
}

func eventPaths(t *testing.T, db *queuetest.DB, say func(format string, args ...any)) {
	ctx, q := t.Context(), db.Queue
	emit := func(to onceq.DB, key string, payload any) {
		first, err := q.Emit(ctx, to, "paid", key, payload)
		say("emit %s: %t, %v", key, first, err)
	}
	event := func(key string) {
		payload, emitted, err := q.Event(ctx, db.Pool, "paid", key)
		say("event %s: %s, %t, %v", key, payload, emitted, err)
	}
	flow := onceq.Kind[string]{Name: "flow", Keep: time.Hour}
	run := func(n int, handle func(ctx context.Context, l *onceq.Lease, key string) error) {
		ran := db.Drain(flow.Handle(func(ctx context.Context, l *onceq.Lease, key string) error {
			err := handle(ctx, l, key)
			say("job %s, attempt %d: %v", key, l.Attempt, err)
			return err
		}))
		for _, r := range ran {
			say("ran %s, %v", r.State, r.Err)
		}
		require.Len(t, ran, n)
	}
	await := func(timeout time.Duration) func(ctx context.Context, l *onceq.Lease, key string) error {
		return func(ctx context.Context, l *onceq.Lease, key string) error {
			text, ok, err := onceq.Await[string](ctx, l, "paid", key, timeout)
			say("await %s: %q, %t", key, text, ok)
			return err
		}
	}
	enqueue := func(key string) int64 {
		r, err := q.Enqueue(ctx, db.Pool, flow.Job(key))
		require.NoError(t, err)
		return r.ID
	}

	// Before, in a transaction that is rolled back, while a job waits, and after the time-out.
	emit(db.Pool, "before", "a")
	emit(db.Pool, "before", "b")
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	emit(tx, "undone", "c")
	require.NoError(t, tx.Rollback(ctx))
	event("before")
	event("undone")
	enqueue("before")
	run(1, await(time.Hour))
	enqueue("meanwhile")
	run(1, await(time.Hour))
	event("meanwhile")
	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { emit(tx, "meanwhile", nil); return nil }))
	run(1, await(time.Hour))
	enqueue("late")
	run(1, await(time.Minute))
	run(0, nil)
	db.Advance(2 * time.Minute)
	run(1, await(time.Minute))
	emit(db.Pool, "late", "d")
	enqueue("now")
	run(1, await(0))

	// A job that failed after its answer hears it again. One that waits is cancelled, comes back, and is discarded.
	enqueue("again")
	emit(db.Pool, "again", "e")
	run(1, func(ctx context.Context, l *onceq.Lease, key string) error {
		return errors.Join(await(time.Hour)(ctx, l, key), onceq.RetryAfter(time.Minute, errors.New("not yet")))
	})
	db.Advance(2 * time.Minute)
	run(1, await(time.Hour))
	id := enqueue("cancelled")
	run(1, await(time.Hour))
	state, err := q.Cancel(ctx, db.Pool, id)
	say("cancel: %s, %v", state, err)
	emit(db.Pool, "cancelled", "f")
	state, err = q.Redrive(ctx, db.Pool, id)
	say("redrive: %s, %v", state, err)
	run(1, await(time.Hour))
	say("discard: %v", q.Discard(ctx, db.Pool, id))

	// Sleeps, in another round too.
	id = enqueue("sleeps")
	rounds := 0
	sleeps := func(ctx context.Context, l *onceq.Lease, _ string) error {
		if err := onceq.Sleep(ctx, l, "nap", time.Hour); err != nil {
			return err
		}
		if rounds++; rounds == 1 {
			return onceq.Reschedule(0)
		}
		return nil
	}
	run(1, sleeps)
	why, err := q.Explain(ctx, db.Pool, id)
	require.NoError(t, err)
	say("explained: %v", why.Cause())
	db.Advance(61 * time.Minute)
	run(2, sleeps)
	db.Advance(61 * time.Minute)
	run(1, sleeps)

	// After its window an event is another one.
	db.Advance(onceq.EventWindow)
	event("before")
	emit(db.Pool, "before", "g")
}
