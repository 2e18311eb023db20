package tests

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// The calls of this file are for people who look at what went wrong, and decide.

func TestKeys(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	keys := func(scope, key string) []onceqops.KeyInfo {
		t.Helper()
		return must[[]onceqops.KeyInfo](t)(onceqops.New(q).Keys(ctx, db.Pool, scope, key))
	}
	require.Empty(t, keys("", "a"))

	first := repairEnqueue(t, db, onceq.Job{Key: "a", Scope: "s", Window: time.Hour})
	repairEnqueue(t, db, onceq.Job{Key: "a", Scope: "t", Window: onceq.Forever})
	fence := must[*onceq.Fence](t)(q.Fence(onceq.FenceSpec{Scope: "s", Key: "a"}))
	lease := must[*onceq.FenceLease](t)(fence.Claim(ctx, nil))

	all := keys("", "a")
	require.Len(t, all, 3)
	require.Equal(t, []string{"s job queued", "s application in_flight", "t job queued"},
		[]string{all[0].Scope + " " + all[0].Class.String() + " " + all[0].State, all[1].Scope + " " + all[1].Class.String() + " " + all[1].State, all[2].Scope + " " + all[2].Class.String() + " " + all[2].State})
	require.Equal(t, first, all[0].JobID)
	require.Empty(t, all[0].IdempotencyKey)
	require.Equal(t, lease.IdempotencyKey(), all[1].IdempotencyKey)
	require.True(t, lease.Until.Equal(all[1].Until))
	require.Len(t, keys("t", "a"), 1)
	require.Empty(t, keys("", "b"))

	for range 2 {
		l := repairClaim(t, db)
		require.NoError(t, l.SetResult(map[string]int{"n": 1}))
		require.NoError(t, l.Complete(ctx, nil))
	}
	require.NoError(t, lease.Uncertain(ctx, nil, errors.New("cut off")))
	all = keys("", "a")
	require.Equal(t, "completed", all[0].State)
	require.JSONEq(t, `{"n":1}`, string(all[0].Result))
	require.Equal(t, time.Hour, all[0].FreeAt.Sub(all[0].FinishedAt))
	require.Equal(t, "uncertain", all[1].State)
	require.Contains(t, all[1].Detail, "cut off")
	require.True(t, all[2].FreeAt.IsZero(), "taken for ever")
	db.Advance(time.Hour)
	all = keys("s", "a")
	require.True(t, all[0].Free)
	text, err := json.Marshal(all[0])
	require.NoError(t, err)
	require.Contains(t, string(text), `"class":"job"`)

	var bad *onceq.InvalidError
	_, err = onceqops.New(q).Keys(ctx, db.Pool, "", "\x00")
	require.ErrorAs(t, err, &bad)
	_, err = onceqops.New(q).Keys(ctx, nil, "", "a")
	require.ErrorAs(t, err, &bad)
}

func TestDoubts_AndAskAgain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	var policy onceq.Policy
	var happened bool
	kind := onceq.Kind[int]{Name: "charge", MaxAttempts: 2, Backoff: func(int, error) time.Duration { return 0 }}
	calls := 0
	handle := kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		_, err := onceq.Once(ctx, l, "card/charge", func(context.Context, string) (int, error) {
			calls++
			return 0, errors.New("reset by peer")
		}, onceq.OnUncertain(policy), onceq.EffectTimeout(time.Millisecond))
		return err
	})
	doubts := func(f onceqops.Filter) []onceqops.Doubt {
		t.Helper()
		d, next, err := onceqops.New(q).Doubts(ctx, db.Pool, f)
		require.NoError(t, err)
		require.Zero(t, next)
		return d
	}
	require.Empty(t, doubts(onceqops.Filter{}))

	policy = onceq.Hold()
	first := must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, kind.Job(1)))
	second := must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, kind.Job(2)))
	plain := must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "plain", Payload: 1}))
	db.Drain(handle)
	db.Drain(handle)
	found := doubts(onceqops.Filter{})
	require.Len(t, found, 2)
	require.Equal(t, []int64{second.ID, first.ID}, []int64{found[0].Job.ID, found[1].Job.ID})
	effect := must[[]onceqops.EffectInfo](t)(onceqops.New(q).Effects(ctx, db.Pool, first.ID))[0]
	require.Equal(t, effect, found[1].Effect)
	require.Equal(t, "held", effect.State)
	require.Equal(t, "card/charge", effect.Name)
	require.NotEmpty(t, effect.IdempotencyKey)

	// A page of jobs, and the next one.
	page, next, err := onceqops.New(q).Doubts(ctx, db.Pool, onceqops.Filter{Limit: 1})
	require.NoError(t, err)
	require.Len(t, page, 1)
	require.Equal(t, second.ID, next)
	require.Equal(t, first.ID, doubts(onceqops.Filter{Limit: 10, After: next})[0].Job.ID)
	require.Empty(t, doubts(onceqops.Filter{Kind: "other"}))

	// The policy decides again: it still is Hold, and then a deploy makes it Ask.
	require.NoError(t, onceqops.New(q).Resolve(ctx, db.Pool, first.ID, "card/charge", onceq.AskAgain()))
	require.Equal(t, onceq.StateWaiting, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, first.ID)).State)
	live := doubts(onceqops.Filter{States: []onceq.State{onceq.StateWaiting}})
	require.Len(t, live, 1)
	require.Equal(t, "uncertain", live[0].Effect.State)
	require.Equal(t, effect.Detail, live[0].Effect.Detail, "what was known stays known")
	db.Drain(handle)
	require.Len(t, doubts(onceqops.Filter{}), 2)

	happened = true
	policy = onceq.Ask(func(_ context.Context, key string) (any, bool, error) {
		require.Contains(t, []string{found[0].Effect.IdempotencyKey, found[1].Effect.IdempotencyKey}, key)
		return 7, happened, nil
	})
	resolved, redriven, err := onceqops.New(q).ResolveMany(ctx, db.Pool, onceqops.Filter{All: true}, "", onceq.AskAgain())
	require.NoError(t, err)
	require.Equal(t, []int{2, 2}, []int{resolved, redriven})
	db.Advance(time.Minute) // past the leases of the earlier calls, and the grace time
	before := calls
	db.Drain(handle)
	require.Equal(t, before, calls, "the provider said that it had happened")
	require.Empty(t, doubts(onceqops.Filter{}))
	_, err = q.Get(ctx, db.Pool, first.ID)
	require.ErrorIs(t, err, onceq.ErrNotFound, "completed")
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, plain.ID))
}

func TestFence_AskAgain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	spec := onceq.FenceSpec{Key: "k", Policy: onceq.Hold(), Lease: time.Second}
	fence := must[*onceq.Fence](t)(q.Fence(spec))
	lease := must[*onceq.FenceLease](t)(fence.Claim(ctx, nil))
	require.NoError(t, lease.Uncertain(ctx, nil, errors.New("cut off")))
	_, err := fence.Claim(ctx, nil)
	require.ErrorIs(t, err, onceq.ErrHeld)
	require.NoError(t, fence.Resolve(ctx, nil, onceq.AskAgain()))
	key := must[[]onceqops.KeyInfo](t)(onceqops.New(q).Keys(ctx, db.Pool, "default", "k"))[0]
	require.Equal(t, "uncertain", key.State)
	require.True(t, key.FinishedAt.IsZero())

	spec.Policy = onceq.RunAgain(time.Hour)
	again := must[*onceq.FenceLease](t)(must[*onceq.Fence](t)(q.Fence(spec)).Claim(ctx, nil))
	require.Equal(t, lease.IdempotencyKey(), again.IdempotencyKey())
	require.NoError(t, again.Complete(ctx, nil, 1))
}

func TestActions(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	record := func(a onceqops.Action) int64 {
		t.Helper()
		return must[int64](t)(onceqops.New(q).RecordAction(ctx, db.Pool, a))
	}
	actions := func(f onceqops.ActionFilter) (ids []int64) {
		t.Helper()
		for _, a := range must[[]onceqops.Action](t)(onceqops.New(q).Actions(ctx, db.Pool, f)) {
			ids = append(ids, a.ID)
		}
		return ids
	}
	require.Empty(t, actions(onceqops.ActionFilter{}))
	full := onceqops.Action{Who: "ada", What: "redrive", JobID: 7, About: "a", Why: "the provider is back", Outcome: "waiting"}
	a, b, c := record(full), record(onceqops.Action{Who: "bob", What: "cancel", JobID: 8}), record(onceqops.Action{Who: "bob", What: "reap"})
	require.Equal(t, []int64{c, b, a}, actions(onceqops.ActionFilter{}))
	require.Equal(t, []int64{c, b}, actions(onceqops.ActionFilter{Limit: 2}))
	require.Equal(t, []int64{a}, actions(onceqops.ActionFilter{After: b}))
	require.Equal(t, []int64{a}, actions(onceqops.ActionFilter{JobID: 7}))
	require.Equal(t, []int64{c, b}, actions(onceqops.ActionFilter{Who: "bob"}))
	require.Equal(t, []int64{b}, actions(onceqops.ActionFilter{Who: "bob", What: "cancel"}))
	require.Empty(t, actions(onceqops.ActionFilter{Who: "ada", What: "cancel"}))
	got := must[[]onceqops.Action](t)(onceqops.New(q).Actions(ctx, db.Pool, onceqops.ActionFilter{JobID: 7}))[0]
	second := must[[]onceqops.Action](t)(onceqops.New(q).Actions(ctx, db.Pool, onceqops.ActionFilter{JobID: 8}))[0]
	require.Equal(t, []int64{c, b}, actions(onceqops.ActionFilter{Since: second.At}))
	require.Equal(t, []int64{c}, actions(onceqops.ActionFilter{Since: second.At.Add(time.Microsecond)}))
	require.False(t, got.At.IsZero())
	full.ID, full.At = got.ID, got.At
	require.Equal(t, full, got)

	// It is part of the caller's transaction.
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	_, err = onceqops.New(q).RecordAction(ctx, tx, full)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(ctx))
	require.Equal(t, []int64{c, b, a}, actions(onceqops.ActionFilter{}))

	var bad *onceq.InvalidError
	for _, a := range []onceqops.Action{{}, {Who: "ada"}, {What: "cancel"}, {Who: "\x00", What: "cancel"}, {Who: "ada", What: "cancel", Why: strings.Repeat("x", 4097)}} {
		_, err := onceqops.New(q).RecordAction(ctx, db.Pool, a)
		require.ErrorAs(t, err, &bad, "%+v", a)
	}
	for _, f := range []onceqops.ActionFilter{{Limit: 1001}, {Who: "\x00"}, {What: "\xff"}} {
		_, err = onceqops.New(q).Actions(ctx, db.Pool, f)
		require.ErrorAs(t, err, &bad, "%+v", f)
	}
}
