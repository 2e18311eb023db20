package tests

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// A job that is redriven together with those that it waits for waits for them again.
func TestRedriveMany_AGroupWithItsMembers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1), part.Job(2)}, whole.Job("x"))
	require.NoError(t, err)
	_, _, err = q.CancelGroup(ctx, db.Pool, g.Then.ID)
	require.NoError(t, err)
	n, taken, err := q.RedriveMany(ctx, db.Pool, onceq.Filter{All: true, States: []onceq.State{onceq.StateCancelled}})
	require.NoError(t, err)
	require.Equal(t, []int{3, 0}, []int{n, taken})
	leases := groupClaim(t, q)
	require.Len(t, leases, 2)
	require.NotContains(t, leases, g.Then.ID)
	require.Equal(t, 2, groupOf(t, db, g.Then.ID).Open)
	for _, l := range leases {
		require.NoError(t, l.Complete(ctx, nil))
	}
	require.NoError(t, laneClaimOne(t, q, g.Then.ID).Complete(ctx, nil))
	require.NoError(t, db.Check())
}

// So do those of a chain that is longer than what one statement redrives.
func TestRedriveMany_AChain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	const n = 1100
	chain := make([]onceq.Job, n)
	for i := range chain {
		if chain[i] = part.Job(i); i > 0 {
			chain[i].After = []onceq.JobRef{{Scope: part.Name, Key: fmt.Sprint(i - 1)}}
		}
		chain[i].Key = fmt.Sprint(i)
	}
	results, err := q.EnqueueMany(ctx, db.Pool, chain)
	require.NoError(t, err)
	_, _, err = q.CancelMany(ctx, db.Pool, onceq.Filter{All: true})
	require.NoError(t, err)
	var tried []int
	redriven, taken, err := q.RedriveMany(ctx, db.Pool, onceq.Filter{All: true, States: []onceq.State{onceq.StateCancelled}, Progress: func(n int) error {
		tried = append(tried, n)
		return nil
	}})
	require.NoError(t, err)
	require.Equal(t, []int{n, 0}, []int{redriven, taken})
	live, waiting := laneLive(t, db)
	require.Equal(t, []int{1, n - 1}, []int{live, waiting})
	require.Equal(t, []int{0, 0, 1, 501, 1001, n}, tried)
	for i := range 3 {
		require.NoError(t, laneClaimOne(t, q, results[i].ID).Complete(ctx, nil))
	}
	require.NoError(t, db.Check())
}

// Redrive undoes the Cancel of a job whose time is still to come: the job does not start before.
func TestRedrive_BeforeItsTime(t *testing.T) {
	t.Parallel()
	for name, job := range map[string]onceq.Job{
		"plain":           part.Job(1),
		"lane":            charges.Job(charge{1, 1}),
		"limit":           limitedAlone.Job(charge{1, 1}),
		"lane and limit":  limitedInLane.Job(charge{1, 1}),
		"waits for a job": whole.Job("x"),
	} {
		for _, many := range []bool{false, true} {
			t.Run(fmt.Sprint(name, many), func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t)
				ctx, q := t.Context(), db.Queue
				job := job
				job.Delay = time.Hour
				var first int64
				if job.Kind == whole.Name {
					first = add(t, db, part.Job(2))
					job.After = []onceq.JobRef{{ID: first}}
				}
				id := add(t, db, job)
				before := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
				wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
				if many {
					n, taken, err := q.RedriveMany(ctx, db.Pool, onceq.Filter{All: true, States: []onceq.State{onceq.StateCancelled}})
					require.NoError(t, err)
					require.Equal(t, []int{1, 0}, []int{n, taken})
				} else {
					wantState(t, onceq.StateDelayed)(q.Redrive(ctx, db.Pool, id))
				}
				i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
				require.Equal(t, onceq.StateDelayed, i.State)
				require.True(t, i.RunAt.Equal(before.RunAt))
				if first != 0 {
					require.NoError(t, laneClaimOne(t, q, first).Complete(ctx, nil))
				}
				require.Empty(t, laneClaim(t, q, 10))
				require.NoError(t, db.Check())
				db.Advance(time.Hour)
				require.NoError(t, laneClaimOne(t, q, id).Complete(ctx, nil))
				require.NoError(t, db.Check())
			})
		}
	}

	// One that has missed its time starts at once, and so does one that waits for its next attempt.
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	job := part.Job(1)
	job.Delay = time.Hour
	id := add(t, db, job)
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
	db.Advance(time.Hour)
	wantState(t, onceq.StateWaiting)(q.Redrive(ctx, db.Pool, id))
	require.NoError(t, laneClaimOne(t, q, id).Fail(ctx, onceq.RetryAfter(time.Hour, errors.New("later"))))
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
	wantState(t, onceq.StateWaiting)(q.Redrive(ctx, db.Pool, id))
	laneClaimOne(t, q, id)
	require.NoError(t, db.Check())
}
