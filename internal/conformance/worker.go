package conformance

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
)

// In these tests a worker, which claims through pgx, runs a handler that writes and completes its job in a transaction
// of the tested handle.

var charge = onceq.Kind[int]{Name: "charge", Key: func(int) string { return "charge" }}

// charging returns a handler that charges and completes in one transaction, with a result. finish ends the transaction.
func charging(e *env, finish func(ctx context.Context, l *onceq.Lease, tx Tx) error) onceq.Handler {
	return chargingAt(e, pgx.ReadCommitted, finish)
}

func chargingAt(e *env, level pgx.TxIsoLevel, finish func(ctx context.Context, l *onceq.Lease, tx Tx) error) onceq.Handler {
	return charge.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		tx, err := e.Begin(ctx, level)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
		if _, err := tx.DB.Exec(ctx, `insert into charges values ($1)`, l.Attempt); err != nil {
			return err
		}
		if err := l.SetResult("charged"); err != nil {
			return err
		}
		return finish(ctx, l, tx)
	})
}

func completeAndCommit(ctx context.Context, l *onceq.Lease, tx Tx) error {
	if err := l.Complete(ctx, tx.DB); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// run lets a worker claim one job, and returns what it reported about the job after the claim.
func (e *env) run(h onceq.Handler) []onceq.EventType {
	e.t.Helper()
	var mu sync.Mutex
	var events []onceq.EventType
	q, err := onceq.New(e.Pool, &onceq.Config{
		Schema: e.Schema,
		Logger: slog.New(slog.DiscardHandler),
		Hook: onceq.HookFunc(func(_ context.Context, event onceq.Event) {
			mu.Lock()
			defer mu.Unlock()
			if event.Type != onceq.EventClaimed {
				events = append(events, event.Type)
			}
		}),
	})
	require.NoError(e.t, err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, h)
	require.NoError(e.t, err)
	require.NoError(e.t, w.Drain(e.t.Context(), 1))
	return events
}

// charged enqueues the job again. It returns the answer, and which attempts have charged.
func (e *env) charged() (onceq.Result, []int) {
	e.t.Helper()
	return e.enqueue(e.Handles.DB, charge.Job(1)), get[[]int](e.t, e.Pool, `select coalesce(array_agg(attempt order by attempt), '{}') from charges`)
}

func workerCompletesInTheHandlersTransaction(t *testing.T, set setup) {
	e := set(t, `create table charges (attempt int)`)
	id := e.enqueue(e.Handles.DB, charge.Job(1)).ID
	inside := false
	events := e.run(charging(e, func(ctx context.Context, l *onceq.Lease, tx Tx) error {
		if err := l.Complete(ctx, tx.DB); err != nil {
			return err
		}
		info, err := e.q.Get(ctx, e.Pool, l.ID) // invisible to others before the commit
		inside = err == nil && info.State == onceq.StateRunning
		return errors.Join(err, tx.Commit(ctx))
	}))
	require.Equal(t, []onceq.EventType{onceq.EventCompleted}, events)
	require.True(t, inside)
	r, attempts := e.charged()
	require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: onceq.StateCompleted, Output: r.Output}, r)
	require.JSONEq(t, `"charged"`, string(r.Output))
	require.Equal(t, []int{1}, attempts)
	require.Zero(t, e.jobs())
}

// A rollback undoes the completion too, and the handler's error decides what happens to the job.
func workerRunsAgainWhatTheHandlerRolledBack(t *testing.T, set setup) {
	e := set(t, `create table charges (attempt int)`)
	e.enqueue(e.Handles.DB, charge.Job(1))
	events := e.run(charging(e, func(ctx context.Context, l *onceq.Lease, tx Tx) error {
		return errors.Join(l.Complete(ctx, tx.DB), tx.Rollback(ctx), errors.New("the card was refused"))
	}))
	require.Equal(t, []onceq.EventType{onceq.EventCompleted, onceq.EventFailed}, events) // the first one inside the transaction
	r, attempts := e.charged()
	require.Equal(t, onceq.StateRetrying, r.State)
	require.Empty(t, attempts)
	e.Advance(time.Minute)
	require.Equal(t, []onceq.EventType{onceq.EventCompleted}, e.run(charging(e, completeAndCommit)))
	r, attempts = e.charged()
	require.Equal(t, onceq.StateCompleted, r.State)
	require.Equal(t, []int{2}, attempts)
}

// A handler whose lease is lost commits nothing, however it treats the error.
func workerThatLostTheLeaseCommitsNothing(t *testing.T, set setup) {
	e := set(t, `create table charges (attempt int)`)
	for _, heeds := range []bool{true, false} {
		exec(t, e.Pool, `truncate charges`)
		job := charge.Job(1)
		job.Window = onceq.UntilFinished
		e.enqueue(e.Handles.DB, job)
		var next []*onceq.Lease
		var lost, committed error
		events := e.run(charging(e, func(ctx context.Context, l *onceq.Lease, tx Tx) error {
			e.ExpireLease(l.ID)
			var err error
			if next, err = e.q.Claim(ctx, onceq.ClaimOptions{}); err != nil {
				return err
			}
			lost = l.Complete(ctx, tx.DB)
			if heeds && lost != nil {
				return lost
			}
			committed = tx.Commit(ctx)
			return nil
		}))
		last := onceq.EventStale // the worker's own completion, if the handler returns nil
		if heeds {
			last = onceq.EventLeaseLost
		}
		require.Equal(t, []onceq.EventType{onceq.EventStale, last}, events)
		require.ErrorIs(t, lost, onceq.ErrLeaseLost)
		if !heeds {
			require.Error(t, committed)
		}
		require.Zero(t, get[int](t, e.Pool, `select count(*)::int from charges`))
		tx := e.begin(pgx.ReadCommitted)
		require.Len(t, next, 1)
		require.NoError(t, completeAndCommit(t.Context(), next[0], tx))
		require.Zero(t, e.jobs())
	}
}

// After the completion nobody can claim the job, however late its transaction commits.
func workerKeepsTheJobFromItsCompletionOn(t *testing.T, set setup) {
	e := set(t, `create table charges (attempt int)`)
	e.enqueue(e.Handles.DB, charge.Job(1))
	var others []*onceq.Lease
	events := e.run(charging(e, func(ctx context.Context, l *onceq.Lease, tx Tx) error {
		e.ExpireLease(l.ID)
		if err := l.Complete(ctx, tx.DB); err != nil {
			return err
		}
		var err error
		others, err = e.q.Claim(ctx, onceq.ClaimOptions{})
		return errors.Join(err, tx.Commit(ctx))
	}))
	require.Empty(t, others)
	require.Equal(t, []onceq.EventType{onceq.EventCompleted}, events)
	r, attempts := e.charged()
	require.Equal(t, onceq.StateCompleted, r.State)
	require.Equal(t, []int{1}, attempts)
}

// If a beat extends the lease after the snapshot of the handler's transaction, that costs a run and no attempt.
func workerRunsAgainWhatConflictsWithABeat(t *testing.T, set setup) {
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		e := set(t, `create table charges (attempt int)`)
		job := charge.Job(1)
		job.MaxAttempts = 1
		e.enqueue(e.Handles.DB, job)
		runs := 0
		var refused error
		events := e.run(chargingAt(e, level, func(ctx context.Context, l *onceq.Lease, tx Tx) error {
			if runs++; runs > 1 {
				return completeAndCommit(ctx, l, tx)
			}
			if err := l.Extend(ctx, time.Hour); err != nil {
				return err
			}
			refused = completeAndCommit(ctx, l, tx)
			return refused
		}))
		require.True(t, onceq.IsRetryable(refused), "%v", refused)
		require.Equal(t, []onceq.EventType{onceq.EventCompleted}, events)
		r, attempts := e.charged()
		require.Equal(t, onceq.StateCompleted, r.State)
		require.Equal(t, []int{1}, attempts)
	}
}

// A transaction that begins with Lock does not conflict with beats, and nobody else can claim its job.
func workerLocksFirst(t *testing.T, set setup) {
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		e := set(t, `create table charges (attempt int)`)
		e.enqueue(e.Handles.DB, charge.Job(1))
		var others []*onceq.Lease
		var refused, outside error
		events := e.run(charge.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			outside = l.Lock(ctx, e.Handles.DB)
			tx, err := e.Begin(ctx, level)
			if err != nil {
				return err
			}
			defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
			e.ExpireLease(l.ID)
			if err := l.Lock(ctx, tx.DB); err != nil {
				return err
			}
			refused = l.Extend(ctx, time.Hour)
			if others, err = e.q.Claim(ctx, onceq.ClaimOptions{}); err != nil {
				return err
			}
			if _, err := tx.DB.Exec(ctx, `insert into charges values ($1)`, l.Attempt); err != nil {
				return err
			}
			return completeAndCommit(ctx, l, tx)
		}))
		require.NoError(t, refused)
		require.Empty(t, others)
		var invalid *onceq.InvalidError
		require.ErrorAs(t, outside, &invalid)
		require.Equal(t, []onceq.EventType{onceq.EventCompleted}, events)
		r, attempts := e.charged()
		require.Equal(t, onceq.StateCompleted, r.State)
		require.Equal(t, []int{1}, attempts)
	}
}
