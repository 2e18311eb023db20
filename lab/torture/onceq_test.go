package main

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// tortured returns a database with the library's tables and those of the harness.
func tortured(t *testing.T) *queuetest.DB {
	db := queuetest.New(t)
	conn, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), harnessTables)
	require.NoError(t, err)
	require.NoError(t, onceqSystem{}.setup(t.Context(), conn.Conn()))
	return db
}

// After the sequence of ids was set back, a new job may get the id of a held job. The held job must then leave the history,
// and its effect stays in doubt. It is not lost. An effect in doubt whose job nobody knows is lost.
func TestLeftovers_AnEffectInDoubtOfAJobThatLeftTheHistoryIsNotLost(t *testing.T) {
	db, ctx := tortured(t), t.Context()

	hold := func(ctx context.Context, l *onceq.Lease, _ work) error {
		_, err := onceq.Once(ctx, l, "call", func(context.Context, string) (string, error) {
			return "", errors.New("the answer was lost")
		}, onceq.OnUncertain(onceq.Hold()))
		return err
	}
	enqueue := func(form, name string) int64 {
		r, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: form, Payload: work{Name: name, Form: form}})
		require.NoError(t, err)
		return r.ID
	}
	id := enqueue(formHold, "hold/1")
	db.Drain(kind(formHold).Handle(hold))
	_, err := db.Pool.Exec(ctx, `update onceq.jobs set run_at = now()`)
	require.NoError(t, err)
	db.Drain(kind(formHold).Handle(hold)) // the second run finds the doubt
	held, err := db.Queue.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateHeld, held.State)

	_, err = db.Pool.Exec(ctx, `select setval('onceq.ids', $1, false)`, id)
	require.NoError(t, err)
	require.Equal(t, id, enqueue(formTx, "tx/2"), "the id comes again")
	_, err = db.Pool.Exec(ctx, forgetTwins)
	require.NoError(t, err)
	_, err = db.Pool.Exec(ctx, `delete from onceq.jobs`) // like a job that ends without history
	require.NoError(t, err)

	doubts, _, err := onceqSystem{}.leftovers(ctx, db.Pool)
	require.NoError(t, err)
	require.Empty(t, doubts)

	_, err = db.Pool.Exec(ctx, `delete from torture.twins`)
	require.NoError(t, err)
	doubts, _, err = onceqSystem{}.leftovers(ctx, db.Pool)
	require.NoError(t, err)
	require.Len(t, doubts, 1, "nobody knows the job")
}

// If a job has the id of one that is completed, its record replaces that one's, and if it has that of a dead one, it leaves none of its
// own. The checker knows the results of all.
func TestEnds_TwoJobsWithOneID(t *testing.T) {
	db, ctx := tortured(t), t.Context()
	id := int64(0)
	run := func(name string, fails error) {
		_, err := db.Pool.Exec(ctx, `select setval('onceq.ids', greatest(1, $1::bigint), false)`, id)
		require.NoError(t, err)
		r, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: formFlow, Payload: work{Name: name, Form: formFlow}})
		require.NoError(t, err)
		if id == 0 {
			id = r.ID
		}
		require.Equal(t, id, r.ID, "the id comes again")
		db.Drain(kind(formFlow).Handle(func(_ context.Context, l *onceq.Lease, _ work) error {
			return errors.Join(l.SetResult("of "+name), fails)
		}))
	}
	ends := func() map[string]string {
		all, err := onceqSystem{}.ends(ctx, db.Pool)
		require.NoError(t, err)
		states := map[string]string{}
		for _, e := range all {
			require.NotContains(t, states, e.Work, "twice")
			states[e.Work] = e.State + " " + e.Result
		}
		return states
	}
	run("flow/1", nil)
	run("flow/2", nil)
	run("flow/3", onceq.Fatal(errors.New("this cannot be done")))
	run("flow/4", nil)
	require.Equal(t, map[string]string{"flow/1": "completed of flow/1", "flow/2": "completed of flow/2", "flow/3": "dead ", "flow/4": "completed of flow/4"}, ends())
}

// A group waits for a dead member whose record was forgotten, because another job has its id now and is dead, too. Nobody redrives that
// one, so it is forgotten as well.
func TestForgetTwins_ADeadMemberWhoseIDAnotherDeadJobHas(t *testing.T) {
	db, ctx := tortured(t), t.Context()
	fails := func(context.Context, *onceq.Lease, work) error { return onceq.Fatal(errors.New("this cannot be done")) }
	job := func(form string) onceq.Job {
		return onceq.Job{Kind: form, Payload: work{Name: form + "/1", Form: form}}
	}
	g, err := db.Queue.EnqueueGroup(ctx, db.Pool, []onceq.Job{job(formPart)}, job(formJoin))
	require.NoError(t, err)
	id := g.Members[0].ID
	db.Drain(kind(formPart).Handle(fails))
	_, err = db.Pool.Exec(ctx, `select setval('onceq.ids', $1, false)`, id)
	require.NoError(t, err)
	r, err := db.Queue.Enqueue(ctx, db.Pool, job(formFlow))
	require.NoError(t, err)
	require.Equal(t, id, r.ID, "the id comes again")
	for range 2 {
		_, err = db.Pool.Exec(ctx, forgetTwins)
		require.NoError(t, err)
		db.Drain(kind(formFlow).Handle(fails))
	}
	_, err = db.Queue.Get(ctx, db.Pool, id)
	require.ErrorIs(t, err, onceq.ErrNotFound)
	all, err := onceqSystem{}.ends(ctx, db.Pool)
	require.NoError(t, err)
	require.Len(t, all, 3)
}
