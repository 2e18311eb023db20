package tests

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

type wrapMark struct{}

// Each form of handler is wrapped in the same way: it gets the jobs and a context and returns the error, and the last Wrap
// is outermost.
func TestWrap_EachSortOfHandler(t *testing.T) {
	t.Parallel()
	kind := onceq.Kind[int]{Name: "wrapped", MaxAttempts: 1}
	boom := errors.New("boom")
	body := func(ctx context.Context, n int) error {
		if ctx.Value(wrapMark{}) != "inner outer " {
			return fmt.Errorf("the context has %v", ctx.Value(wrapMark{}))
		}
		if n < 0 {
			return boom
		}
		return nil
	}
	for name, h := range map[string]onceq.Handler{
		"lease": kind.Handle(func(ctx context.Context, _ *onceq.Lease, n int) error { return body(ctx, n) }),
		"tx":    kind.HandleTx(func(ctx context.Context, _ pgx.Tx, _ *onceq.Lease, n int) error { return body(ctx, n) }),
		"batch": kind.HandleBatch(10, func(ctx context.Context, _ pgx.Tx, jobs []onceq.Item[int]) error {
			for _, j := range jobs {
				if err := body(ctx, j.Payload); err != nil {
					return err
				}
			}
			return nil
		}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			var order []string
			wrap := func(at string) func(context.Context, []*onceq.Lease, func(context.Context) error) error {
				return func(ctx context.Context, leases []*onceq.Lease, next func(context.Context) error) error {
					before, _ := ctx.Value(wrapMark{}).(string)
					err := next(context.WithValue(ctx, wrapMark{}, at+" "+before))
					order = append(order, fmt.Sprint(at, " ", len(leases), " ", leases[0].ID != 0, " ", err))
					return err
				}
			}
			_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
			require.NoError(t, err)
			h := h.Wrap(wrap("inner")).Wrap(wrap("outer"))
			require.Equal(t, onceq.StateCompleted, db.RunOne(h).State)
			require.Equal(t, []string{"inner 1 true <nil>", "outer 1 true <nil>"}, order)

			_, err = db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(-1))
			require.NoError(t, err)
			require.ErrorIs(t, db.RunOne(h).Err, boom)

			// The wrapping function's own error counts, even if it does not call the handler.
			_, err = db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
			require.NoError(t, err)
			ran := db.RunOne(h.Wrap(func(context.Context, []*onceq.Lease, func(context.Context) error) error { return boom }))
			require.ErrorIs(t, ran.Err, boom)
			require.Equal(t, onceq.StateDead, ran.State)
		})
	}
}

func TestWrap_BadInput(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "wrapped"}
	h := kind.Handle(func(context.Context, *onceq.Lease, int) error { return nil }).Wrap(nil)
	_, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, h)
	require.ErrorContains(t, err, "Wrap of the handler of \"wrapped\" has no function")
	pass := func(ctx context.Context, _ []*onceq.Lease, next func(context.Context) error) error { return next(ctx) }
	_, err = onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, onceq.Handler{}.Wrap(pass))
	require.ErrorContains(t, err, "a zero Handler")
}

// A panic passes through the wrapping function, and its stack names the place.
func TestWrap_PanicGoesThrough(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "wrapped", MaxAttempts: 1}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	seen := false
	ran := db.RunOne(kind.Handle(func(context.Context, *onceq.Lease, int) error { panicInHandler(); return nil }).Wrap(
		func(ctx context.Context, _ []*onceq.Lease, next func(context.Context) error) error {
			defer func() { seen = true }()
			return next(ctx)
		}))
	var panicked *onceq.PanicError
	require.ErrorAs(t, ran.Err, &panicked)
	require.Contains(t, string(panicked.Stack), "panicInHandler")
	require.True(t, seen)
}

//go:noinline
func panicInHandler() { panic("lost my way") }

type enqueueMark struct{}

// What BeforeEnqueue adds to the metadata arrives with the job and does not count when payloads are compared. Events get
// the context that it returns, and it is told how every call ends.
func TestBeforeEnqueue_AddsMetadataAndIsToldTheOutcome(t *testing.T) {
	t.Parallel()
	var calls []string
	var events []string
	n := 0
	db := queuetest.New(t, queuetest.Config(onceq.Config{
		Hook: onceq.HookFunc(func(ctx context.Context, e onceq.Event) {
			if mark, ok := ctx.Value(enqueueMark{}).(int); ok {
				events = append(events, fmt.Sprint(mark, " ", e.Type))
			}
		}),
		BeforeEnqueue: func(ctx context.Context, jobs []onceq.Job) (context.Context, func(error)) {
			n++
			call := n
			for i := range jobs {
				jobs[i].Metadata = map[string]string{"call": fmt.Sprint(call), "tenant": jobs[i].Metadata["tenant"]}
			}
			return context.WithValue(ctx, enqueueMark{}, call), func(err error) {
				calls = append(calls, fmt.Sprint(call, " ", len(jobs), " ", err != nil))
			}
		},
	}))
	ctx := t.Context()
	carried := map[string]string{"tenant": "acme"}
	job := onceq.Job{Kind: "k", Payload: 1, Key: "a", Metadata: carried}
	r, err := db.Queue.Enqueue(ctx, db.Pool, job)
	require.NoError(t, err)
	info, err := db.Queue.Get(ctx, db.Pool, r.ID)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"call": "1", "tenant": "acme"}, info.Metadata)
	require.Equal(t, map[string]string{"tenant": "acme"}, carried, "the caller's own map")

	again, err := db.Queue.EnqueueUnique(ctx, db.Pool, job)
	require.NoError(t, err, "the metadata differs, the payload does not")
	require.True(t, again.Duplicate)

	job.Payload = 2
	_, err = db.Queue.Enqueue(ctx, db.Pool, job)
	require.ErrorIs(t, err, onceq.ErrMismatch)

	_, err = db.Queue.Enqueue(ctx, db.Pool, onceq.Job{})
	require.Error(t, err)

	many := []onceq.Job{{Kind: "k", Metadata: carried}, {Kind: "k"}}
	_, err = db.Queue.EnqueueMany(ctx, db.Pool, many)
	require.NoError(t, err)
	require.Equal(t, carried, many[0].Metadata, "the caller's own slice")
	require.Nil(t, many[1].Metadata)
	_, err = db.Queue.EnqueueMany(ctx, nil, many)
	require.Error(t, err)

	require.Equal(t, []string{"1 1 false", "2 1 false", "3 1 true", "4 1 true", "5 2 false", "6 2 true"}, calls)
	require.Equal(t, []string{"1 enqueued", "2 duplicate", "3 mismatch", "5 enqueued", "5 enqueued"}, events)
}

// Too much metadata is refused as usual, wherever it comes from.
func TestBeforeEnqueue_CannotExceedTheLimits(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{
		BeforeEnqueue: func(ctx context.Context, jobs []onceq.Job) (context.Context, func(error)) {
			jobs[0].Metadata = map[string]string{"big": strings.Repeat("x", onceq.MaxMetadataBytes)}
			return ctx, func(error) {}
		},
	}))
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Delay: time.Hour})
	var invalid *onceq.InvalidError
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, "Metadata", invalid.Field)
}

func TestIsFailure(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	inFlight := &onceq.InFlightError{Key: "k"}
	for _, err := range []error{nil, onceq.Snooze(1), onceq.Reschedule(1), fmt.Errorf("later: %w", onceq.Snooze(1)), inFlight} {
		require.False(t, onceq.IsFailure(err), "%v", err)
	}
	for _, err := range []error{boom, onceq.Fatal(boom), onceq.Fatal(inFlight), onceq.Fatal(onceq.Snooze(1)), &onceq.PanicError{Value: onceq.Reschedule(1)}, onceq.RetryAfter(1, boom), onceq.ErrLeaseLost, &onceq.HeldError{}} {
		require.True(t, onceq.IsFailure(err), "%v", err)
	}
}
