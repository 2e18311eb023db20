package tests

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// After the sequence of ids was set back, a job without a lane may get the id of one that waits for its lane, which nothing refuses. The
// one that waits goes on when the other is gone. Until then it keeps no other lane from going on, and no job from completing.
func TestTwins_OfAJobThatWaitsForItsLane(t *testing.T) {
	t.Parallel()
	for name, limit := range map[string]string{"lane": "", "lane and limit": "provider"} {
		t.Run(name, func(t *testing.T) {
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			in := func(lane string) onceq.Job { return onceq.Job{Kind: "k", Lane: lane, Limit: limit, Payload: 1} }
			if limit != "" {
				setLimit(t, db, limit, onceq.Limit{AtOnce: 10})
			}
			first, waits := add(t, db, in("a")), add(t, db, in("a"))
			require.Equal(t, first, laneClaimOne(t, q, first).ID)
			_, err := db.Pool.Exec(ctx, `update onceq.jobs set leased_until = null, holder = null`)
			require.NoError(t, err)
			sqlRun(t, asOwner(t, db), `select setval('ids', $1, false)`, waits)
			require.Equal(t, waits, add(t, db, onceq.Job{Kind: "plain", Delay: time.Hour}))
			other := add(t, db, in("b"))

			ran := make(chan int64, 10)
			note := func(_ context.Context, l *onceq.Lease, _ int) error {
				ran <- l.ID
				return nil
			}
			kind, plain := onceq.Kind[int]{Name: "k"}, onceq.Kind[int]{Name: "plain"}
			start(t, db, onceq.WorkerConfig{}, kind.Handle(note), plain.Handle(note))
			require.ElementsMatch(t, []int64{first, other}, []int64{receive(t, ran), receive(t, ran)})
			until(t, db, `(select count(*) from onceq.jobs) = 1`)
			require.Empty(t, ran)
			_, err = onceqops.New(q).Retry(ctx, db.Pool, waits)
			require.NoError(t, err)
			require.Equal(t, waits, receive(t, ran))
			require.Equal(t, waits, receive(t, ran))
			until(t, db, noJobs)
		})
	}
}

// One that fails stays where it is, because its place among those that wait is taken.
func TestTwins_OfAJobThatFails(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 10})
	first := add(t, db, onceq.Job{Kind: "k", Lane: "b"})
	fails := add(t, db, onceq.Job{Kind: "k", Limit: "provider"})
	leases := make(map[int64]*onceq.Lease)
	for len(leases) < 2 {
		for _, l := range laneClaim(t, q, 10) {
			leases[l.ID] = l
		}
	}
	sqlRun(t, asOwner(t, db), `select setval('ids', $1, false)`, fails)
	require.Equal(t, fails, add(t, db, onceq.Job{Kind: "k", Lane: "b"}))
	require.NoError(t, leases[fails].Fail(ctx, onceq.RetryAfter(time.Hour, context.DeadlineExceeded)))
	require.NoError(t, leases[first].Complete(ctx, nil))
	require.Equal(t, 1, repairCount(t, db, `select count(*) from onceq.jobs where attempts = 1`))
	require.Empty(t, laneClaim(t, q, 10))

	sqlRun(t, db, `update onceq.jobs set run_at = now()`)
	for _, limit := range []string{"provider", ""} { // one after the other
		var got []*onceq.Lease
		eventually(t, "the next one", func() bool {
			got = laneClaim(t, q, 10)
			return len(got) > 0
		})
		require.Len(t, got, 1)
		require.Equal(t, fails, got[0].ID)
		require.Equal(t, limit, got[0].Limit)
		require.NoError(t, got[0].Complete(ctx, nil))
	}
	until(t, db, noJobs)
}

// waitingTwin makes a job that runs and one that waits for its lane, of the same id.
func waitingTwin(t *testing.T, db *queuetest.DB) (runs *onceq.Lease, id int64) {
	t.Helper()
	first := add(t, db, onceq.Job{Kind: "waits", Lane: "a"})
	id = add(t, db, onceq.Job{Kind: "waits", Lane: "a"})
	laneClaimOne(t, db.Queue, first)
	sqlRun(t, asOwner(t, db), `select setval('ids', $1, false)`, id)
	require.Equal(t, id, add(t, db, onceq.Job{Kind: "runs"}))
	return laneClaimOne(t, db.Queue, id), id
}

// Cancel ends the one that waits, and that one goes to the history.
func TestTwins_CancelEndsTheOneThatWaits(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	runs, id := waitingTwin(t, db)
	wantState(t, onceq.StateCancelled)(db.Queue.Cancel(t.Context(), db.Pool, id))
	require.Equal(t, "waits", sqlOne[string](t, db, `select kind from onceq.job_history where id = $1`, id))
	require.Equal(t, "runs", sqlOne[string](t, db, `select kind from onceq.jobs where id = $1`, id))
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.job_waits where id = $1`, id))
	require.NoError(t, runs.Complete(t.Context(), nil))
}

// One that ends dead while the other is just being cancelled is not lost: it meets the record of that one, and stays.
func TestTwins_ADeadOneMeetsTheCancelOfTheOther(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	runs, id := waitingTwin(t, db)
	tx := begin(t, db)
	wantState(t, onceq.StateCancelled)(db.Queue.Cancel(t.Context(), tx, id))
	failed := make(chan error, 1)
	go func() { failed <- runs.Fail(context.Background(), onceq.Fatal(context.DeadlineExceeded)) }()
	until(t, db, `exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`)
	commit(t, tx)
	require.ErrorIs(t, receive(t, failed), onceq.ErrIDTaken)
	require.Equal(t, "runs", sqlOne[string](t, db, `select kind from onceq.jobs where id = $1`, id))
	require.Equal(t, "waits", sqlOne[string](t, db, `select kind from onceq.job_history where id = $1`, id))
	require.NoError(t, onceqops.New(db.Queue).Discard(t.Context(), db.Pool, id)) // as the error says
	require.NoError(t, runs.Fail(t.Context(), onceq.Fatal(context.DeadlineExceeded)))
	require.Equal(t, "runs", sqlOne[string](t, db, `select kind from onceq.job_history where id = $1`, id))
}

// One that waits for others goes on when the other one is gone, and keeps none from going on.
func TestTwins_OfAJobThatWaitsForOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	kind, plain := onceq.Kind[int]{Name: "k"}, onceq.Kind[int]{Name: "plain"}
	var then [2]int64
	for i := range then {
		g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{kind.Job(1)}, kind.Job(2))
		require.NoError(t, err)
		then[i] = g.Then.ID
	}
	sqlRun(t, asOwner(t, db), `select setval('ids', $1, false)`, then[0])
	require.Equal(t, then[0], add(t, db, onceq.Job{Kind: "plain", Delay: time.Hour, Payload: 1}))
	sqlRun(t, asOwner(t, db), `select setval('ids', 100)`)
	ran := make(chan int64, 10)
	note := func(_ context.Context, l *onceq.Lease, n int) error {
		if n == 2 || l.Kind == "plain" {
			ran <- l.ID
		}
		return nil
	}
	start(t, db, onceq.WorkerConfig{}, kind.Handle(note), plain.Handle(note))
	require.Equal(t, then[1], receive(t, ran))
	until(t, db, `(select count(*) from onceq.jobs) = 1 and (select count(*) from onceq.job_waits) = 1`)
	if _, err := onceqops.New(q).Retry(ctx, db.Pool, then[0]); err != nil {
		require.ErrorIs(t, err, onceq.ErrNotFound, "both may have run already")
	}
	require.Equal(t, then[0], receive(t, ran))
	require.Equal(t, then[0], receive(t, ran))
	until(t, db, noJobs)
}

// A job that replaces a completed one in the history has not that one's lane.
func TestTwins_InTheHistory(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	kind := onceq.Kind[int]{Name: "k", Keep: time.Hour, LaneRule: onceq.StopLane, Lane: func(n int) string { return "a"[:n] }}
	complete := kind.Handle(func(context.Context, *onceq.Lease, int) error { return nil })
	refuse := kind.Handle(func(context.Context, *onceq.Lease, int) error { return onceq.Fatal(context.DeadlineExceeded) })
	id := add(t, db, kind.Job(1))
	require.Equal(t, onceq.StateCompleted, db.RunOne(complete).State)
	setBack(t, db)
	require.Equal(t, id, add(t, db, kind.Job(0)))
	require.Equal(t, onceq.StateDead, db.RunOne(refuse).State)
	require.NoError(t, db.Check())
	info, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Empty(t, info.Lane)
	wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
	require.Equal(t, onceq.StateDead, db.RunOne(refuse).State)
}
