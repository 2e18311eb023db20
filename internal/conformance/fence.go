package conformance

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
)

func (e *env) fence(spec onceq.FenceSpec) *onceq.Fence {
	e.t.Helper()
	f, err := e.q.Fence(spec)
	require.NoError(e.t, err)
	return f
}

// mine claims a fence that must be free.
func (e *env) mine(f *onceq.Fence, in onceq.DB) *onceq.FenceLease {
	e.t.Helper()
	c, err := f.Claim(e.t.Context(), in)
	require.NoError(e.t, err)
	require.False(e.t, c.Replayed)
	return c
}

// lapse lets the lease of every claim expire, and with it the grace time before asking.
func (e *env) lapse() {
	e.t.Helper()
	exec(e.t, e.Pool, `update onceq.job_fences set leased_until = leased_until - interval '1 hour' where class > 0`)
}

func fenceEveryAnswer(t *testing.T, set setup) {
	e := set(t)
	ctx, in := t.Context(), e.Handles.DB
	spec := onceq.FenceSpec{Key: "k", Payload: map[string]int{"a": 1}}
	f := e.fence(spec)
	c := e.mine(f, in)
	require.InDelta(t, 30, get[float64](t, e.Pool, `select extract(epoch from $1::timestamptz - created_at)::float8 from onceq.job_fences`, c.Until), 1, "the default lease")

	_, err := f.Claim(ctx, in)
	var inFlight *onceq.InFlightError
	require.ErrorAs(t, err, &inFlight)
	require.Positive(t, inFlight.RetryAfter)
	require.LessOrEqual(t, inFlight.RetryAfter, 500*time.Millisecond)
	require.True(t, inFlight.Until.Equal(c.Until))
	other := spec
	other.Payload = map[string]int{"a": 2}
	_, err = e.fence(other).Claim(ctx, in)
	require.ErrorIs(t, err, onceq.ErrMismatch, "in flight")
	other.Payload = nil
	_, err = e.fence(other).Claim(ctx, in)
	require.ErrorIs(t, err, onceq.ErrInFlight, "payload not compared")

	require.NoError(t, c.Uncertain(ctx, in, errors.New(`connection's "\ reset`)))
	other = spec
	other.Policy = onceq.Ask(func(context.Context, string) (any, bool, error) { panic("Claim must not ask") })
	_, err = e.fence(other).Claim(ctx, in)
	var uncertain *onceq.UncertainError
	require.ErrorAs(t, err, &uncertain)
	require.Equal(t, `connection's "\ reset`, uncertain.Detail)
	again := e.mine(f, in) // RunAgain
	require.Greater(t, again.Token, c.Token)
	require.Equal(t, c.IdempotencyKey(), again.IdempotencyKey())
	require.True(t, again.Since.Equal(c.Since), "the time of the first intent")
	e.lapse() // an expired lease is uncertain too
	_, err = e.fence(other).Claim(ctx, in)
	require.ErrorIs(t, err, onceq.ErrUncertain)
	other.Policy = onceq.Hold()
	_, err = e.fence(other).Claim(ctx, in)
	require.ErrorIs(t, err, onceq.ErrHeld)
	_, err = f.Claim(ctx, in)
	require.ErrorIs(t, err, onceq.ErrHeld, "held stays held under another policy")

	require.NoError(t, again.Complete(ctx, in, map[string]any{"it's": `"\`}), "late, of a held claim")
	require.NoError(t, again.Complete(ctx, in, []int{2}), "repeated")
	done, err := f.Claim(ctx, in)
	require.NoError(t, err)
	require.True(t, done.Replayed)
	require.Equal(t, `{"it's": "\"\\"}`, string(done.Result))
	require.Equal(t, again.Token, done.Token)
	other = spec
	other.Payload = map[string]int{"a": 2}
	_, err = e.fence(other).Claim(ctx, in)
	require.ErrorIs(t, err, onceq.ErrMismatch, "completed")
	other.Class = onceq.ClassRequest
	require.NotEqual(t, done.IdempotencyKey(), e.mine(e.fence(other), in).IdempotencyKey(), "of another class")
	other.Scope = "tenant"
	e.mine(e.fence(other), in)
}

func fenceInATransactionMakesOthersWait(t *testing.T, set setup) {
	for _, commit := range []bool{true, false} {
		e := set(t)
		f := e.fence(onceq.FenceSpec{Key: "k"})
		tx := e.begin(pgx.ReadCommitted)
		c := e.mine(f, tx.DB)
		answer := make(chan error)
		go func() {
			_, err := f.Claim(context.Background(), e.Handles.DB)
			answer <- err
		}()
		e.blocked()
		if commit {
			require.NoError(t, c.Complete(t.Context(), tx.DB, "done"))
			require.NoError(t, tx.Commit(t.Context()))
			require.NoError(t, <-answer) // replayed
			done, err := f.Claim(t.Context(), e.Handles.DB)
			require.NoError(t, err)
			require.True(t, done.Replayed)
		} else {
			require.NoError(t, tx.Rollback(t.Context()))
			require.NoError(t, <-answer) // its own
			_, err := f.Claim(t.Context(), e.Handles.DB)
			require.ErrorIs(t, err, onceq.ErrInFlight)
			require.ErrorIs(t, c.Complete(t.Context(), e.Handles.DB, nil), onceq.ErrLeaseLost, "a claim that was rolled back")
		}
	}
}

func fenceRefusedLeavesTheTransactionUsable(t *testing.T, set setup) {
	e := set(t)
	c := e.mine(e.fence(onceq.FenceSpec{Key: "k"}), e.Handles.DB)
	tx := e.begin(pgx.ReadCommitted)
	for _, policy := range []onceq.Policy{{}, onceq.Hold()} {
		_, err := e.fence(onceq.FenceSpec{Key: "k", Policy: policy}).Claim(t.Context(), tx.DB)
		require.ErrorIs(t, err, onceq.ErrInFlight)
		get[int](t, tx.DB, `select 1`)
	}
	require.NoError(t, c.Uncertain(t.Context(), e.Handles.DB, errors.New("?")))
	_, err := e.fence(onceq.FenceSpec{Key: "k", Policy: onceq.Hold()}).Claim(t.Context(), tx.DB)
	require.ErrorIs(t, err, onceq.ErrHeld)
	get[int](t, tx.DB, `select 1`)
	require.NoError(t, tx.Rollback(t.Context()))
	e.mine(e.fence(onceq.FenceSpec{Key: "k"}), e.Handles.DB) // the hold was rolled back too
}

func fenceAboveReadCommitted(t *testing.T, set setup) {
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		e := set(t)
		ctx := t.Context()
		begin := func() Tx {
			tx := e.begin(level)
			get[int](t, tx.DB, `select count(*)::int from onceq.job_fences`) // the snapshot
			return tx
		}
		f := e.fence(onceq.FenceSpec{Key: "k"})
		tx := begin()
		c := e.mine(f, tx.DB)
		require.NoError(t, c.Complete(ctx, tx.DB, 1))
		require.NoError(t, tx.Commit(ctx))

		tx = begin() // visible: an ordinary answer
		done, err := f.Claim(ctx, tx.DB)
		require.NoError(t, err, level)
		require.True(t, done.Replayed)
		require.NoError(t, tx.Commit(ctx))

		f = e.fence(onceq.FenceSpec{Key: "later"})
		tx = begin() // taken after the snapshot: 40001, recognisable
		e.mine(f, e.Handles.DB)
		_, err = f.Claim(ctx, tx.DB)
		require.True(t, onceq.IsRetryable(err), "%s: %v", level, err)
		require.NoError(t, tx.Rollback(ctx))
	}
}

func fenceStaleAndFinishedClaimsAreRefused(t *testing.T, set setup) {
	e := set(t)
	ctx, in := t.Context(), e.Handles.DB
	f := e.fence(onceq.FenceSpec{Key: "k"})
	refused := func(c *onceq.FenceLease, complete bool) {
		t.Helper()
		if complete {
			require.ErrorIs(t, c.Complete(ctx, in, 1), onceq.ErrLeaseLost)
		}
		require.ErrorIs(t, c.Release(ctx, in), onceq.ErrLeaseLost)
		require.ErrorIs(t, c.Uncertain(ctx, in, errors.New("x")), onceq.ErrLeaseLost)
		require.ErrorIs(t, c.Extend(ctx, time.Minute), onceq.ErrLeaseLost)
	}
	released := e.mine(f, in)
	require.NoError(t, released.Release(ctx, in))
	refused(released, true)
	stale := e.mine(f, in)
	refused(released, true)
	e.lapse()
	require.NoError(t, stale.Extend(ctx, time.Minute), "before anybody took it")
	e.lapse()
	c := e.mine(f, in)
	refused(stale, true)
	require.NoError(t, c.Complete(ctx, in, 1))
	refused(c, false)
	refused(stale, true)

	f = e.fence(onceq.FenceSpec{Key: "wrongly resolved"})
	c = e.mine(f, in)
	e.lapse()
	require.NoError(t, f.Resolve(ctx, in, onceq.NeverApplied()))
	require.NoError(t, c.Complete(ctx, in, 1), "late")
	done, err := f.Claim(ctx, in)
	require.NoError(t, err)
	require.True(t, done.Replayed, "the late success kept its window")
	var invalid *onceq.InvalidError
	require.ErrorAs(t, c.Complete(ctx, in, func() {}), &invalid)
}

// now() is the start of the transaction, which may be long past.
func fenceWindowCountsFromTheCompletion(t *testing.T, set setup) {
	e := set(t)
	tx := e.begin(pgx.ReadCommitted)
	get[int](t, tx.DB, `select 1`)
	c := e.mine(e.fence(onceq.FenceSpec{Key: "k"}), tx.DB)
	require.NoError(t, c.Complete(t.Context(), tx.DB, 1))
	require.True(t, get[bool](t, tx.DB, `select finished_at > now() and leased_until > now() + interval '30 seconds' from onceq.job_fences`))
	require.NoError(t, tx.Commit(t.Context()))
}
