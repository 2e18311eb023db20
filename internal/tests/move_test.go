package tests

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func moved(t testing.TB, want bool) func(bool, error) {
	return func(got bool, err error) {
		t.Helper()
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
}

// A moved job is the same job: its key, priority, attempts and what is known of its effects go with it.
func TestMove(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	charges, again := 0, true
	k := onceq.Kind[int]{Name: "charge", Queue: "old", Key: func(int) string { return "4711" }, Backoff: func(int, error) time.Duration { return time.Hour }}
	h := func(in string) onceq.Handler {
		k := k
		k.Queue = in
		return k.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { charges++; return charges, nil })
			if again {
				again = false
				return errors.Join(err, errors.New("afterwards"))
			}
			return err
		})
	}
	job := k.Job(1)
	job.Priority = onceq.PriorityLow
	id := repairEnqueue(t, db, job)
	db.Drain(h("old"))
	require.Equal(t, 1, charges)
	before := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
	require.Equal(t, onceq.StateRetrying, before.State)

	moved(t, true)(onceqops.New(q).Move(ctx, db.Pool, id, "new"))
	moved(t, false)(onceqops.New(q).Move(ctx, db.Pool, id, "new"))
	after := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
	require.Equal(t, "new", after.Queue)
	after.Queue = before.Queue
	require.Equal(t, before, after)
	effects := must[[]onceqops.EffectInfo](t)(onceqops.New(q).Effects(ctx, db.Pool, id))
	require.Len(t, effects, 1)
	dup := must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, k.Job(1)))
	require.True(t, dup.Duplicate)
	require.Equal(t, id, dup.ID)

	// Its place is behind what the new queue's workers have passed, so it is due from now on.
	must[onceq.State](t)(onceqops.New(q).Retry(ctx, db.Pool, id))
	moved(t, true)(onceqops.New(q).Move(ctx, db.Pool, id, "new again"))
	require.Empty(t, db.Drain(h("new")))
	require.Len(t, db.Drain(h("new again")), 1)
	require.Equal(t, 1, charges, "the effect was replayed")
	_, err := onceqops.New(q).Move(ctx, db.Pool, id, "new")
	require.ErrorIs(t, err, onceq.ErrNotFound)
	require.NoError(t, db.Check())

	var bad *onceq.InvalidError
	for _, name := range []string{"", " ", "\xff"} {
		_, err := onceqops.New(q).Move(ctx, db.Pool, id, name)
		require.ErrorAs(t, err, &bad)
	}
	_, err = onceqops.New(q).MoveMany(ctx, db.Pool, onceqops.Filter{}, "new")
	require.ErrorAs(t, err, &bad)
	_, err = onceqops.New(q).MoveMany(ctx, db.Pool, onceqops.Filter{Kind: "k", States: []onceq.State{onceq.StateRunning}}, "new")
	require.ErrorAs(t, err, &bad)
}

// What somebody has, or may still be about to write for, stays.
func TestMove_LeavesWhatSomebodyHas(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{Payload: 1})
	must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{}))
	moved(t, false)(onceqops.New(q).Move(ctx, db.Pool, id, "new"))
	db.Advance(time.Hour)
	moved(t, false)(onceqops.New(q).Move(ctx, db.Pool, id, "new")) // its lease ran out, and nobody has claimed it again
	l := must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{}))[0]
	require.NoError(t, l.Release(ctx))
	moved(t, true)(onceqops.New(q).Move(ctx, db.Pool, id, "new"))
	require.ErrorIs(t, l.Release(ctx), onceq.ErrLeaseLost)
	l = must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "new"}))[0]
	require.Equal(t, id, l.ID)
	require.NoError(t, l.Fail(ctx, onceq.Fatal(errors.New("no"))))
	moved(t, false)(onceqops.New(q).Move(ctx, db.Pool, id, "newer"))
	require.Equal(t, "new", must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)).Queue)
}

// A job may be given back and moved while a goroutine of its handler has an effect under way. The outcome of the effect is recorded
// all the same, in the new queue.
func TestMove_WhileAnEffectIsUnderWay(t *testing.T) {
	t.Parallel()
	for name, outcome := range map[string]struct {
		err   error
		want  string // the effect's state afterwards
		calls int    // of the effect in all, when the job has run again
	}{
		"success":     {nil, "completed", 1},
		"not applied": {onceq.NotApplied(errors.New("refused")), "", 2},
		"in doubt":    {errors.New("time-out"), "uncertain", 2},
	} {
		for _, open := range []bool{false, true} { // the move is not committed yet when the outcome comes
			t.Run(fmt.Sprint(name, " ", open), func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t)
				ctx, q := t.Context(), db.Queue
				k := onceq.Kind[int]{Name: "k", Queue: "old"}
				id := add(t, db, k.Job(1))
				add(t, db, onceq.Job{Kind: "another", Queue: "old"})
				l := must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "old", Kinds: []string{"k"}}))[0]
				calls := 0
				began, end := make(chan bool), make(chan bool)
				once := background(func() (int, error) {
					return onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) {
						calls++
						close(began)
						<-end
						return calls, outcome.err
					})
				})
				<-began
				require.NoError(t, l.Release(ctx))
				tx := begin(t, db)
				moved(t, true)(onceqops.New(q).Move(ctx, tx, id, "new"))
				if !open {
					commit(t, tx)
				}
				close(end)
				if open {
					waitBlocked(t, db)
					commit(t, tx)
				}
				_, err := once()
				require.NotErrorIs(t, err, onceq.ErrLeaseLost)
				effects := must[[]onceqops.EffectInfo](t)(onceqops.New(q).Effects(ctx, db.Pool, id))
				if outcome.want == "" {
					require.Empty(t, effects)
				} else {
					require.Equal(t, outcome.want, effects[0].State)
				}
				k.Queue = "new"
				db.Drain(k.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
					_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { calls++; return calls, nil })
					return err
				}))
				require.Equal(t, outcome.calls, calls)
			})
		}
	}
}

// A move and what else happens to a job meet in its row: one of them comes first, and the other finds that it is too late.
func TestMove_Interleaved(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			open := func() pgx.Tx {
				tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
				require.NoError(t, err)
				t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
				return tx
			}
			queueOf := func(id int64) string { return must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)).Queue }

			// While a move is not committed, nobody claims or cancels the job, or waits for it.
			id := add(t, db, onceq.Job{Payload: 1})
			tx := open()
			moved(t, true)(onceqops.New(q).Move(ctx, tx, id, "new"))
			require.Empty(t, must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{})))
			require.Empty(t, must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "new"})))
			moved(t, false)(onceqops.New(q).Move(ctx, db.Pool, id, "other"))
			require.NoError(t, tx.Rollback(ctx))
			require.Equal(t, "default", queueOf(id))
			tx = open()
			moved(t, true)(onceqops.New(q).Move(ctx, tx, id, "new"))
			require.Equal(t, onceq.StateRunning, must[onceq.State](t)(q.Cancel(ctx, db.Pool, id)), "asked to end, because the row is locked")
			require.NoError(t, tx.Commit(ctx))
			require.Equal(t, "new", queueOf(id))
			require.Empty(t, must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{})))
			must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "new"})) // which heeds the request
			require.Equal(t, onceq.StateCancelled, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)).State)

			// While a completion, in the handler's transaction, or a cancellation is not committed, it is not moved.
			id = add(t, db, onceq.Job{Payload: 1})
			l := must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{}))[0]
			tx = open()
			require.NoError(t, l.Complete(ctx, tx))
			moved(t, false)(onceqops.New(q).Move(ctx, db.Pool, id, "new"))
			require.NoError(t, tx.Commit(ctx))
			_, err := onceqops.New(q).Move(ctx, db.Pool, id, "new")
			require.ErrorIs(t, err, onceq.ErrNotFound)
			id = add(t, db, onceq.Job{Payload: 1})
			tx = open()
			must[onceq.State](t)(q.Cancel(ctx, tx, id))
			moved(t, false)(onceqops.New(q).Move(ctx, db.Pool, id, "new"))
			require.NoError(t, tx.Rollback(ctx))

			// A claim between a transaction's snapshot and its move: the move does not take the job away from its holder.
			tx = open()
			_, err = tx.Exec(ctx, `select 1 from onceq.jobs`)
			require.NoError(t, err)
			l = must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{}))[0]
			got, err := onceqops.New(q).Move(ctx, tx, l.ID, "new")
			require.False(t, got)
			if level == pgx.ReadCommitted || err != nil {
				require.Equal(t, level != pgx.ReadCommitted, onceq.IsRetryable(err), err)
			}
			require.NoError(t, tx.Rollback(ctx))
			require.NoError(t, l.Complete(ctx, nil))
			require.NoError(t, db.Check())
		})
	}
}

// Jobs of a lane keep their places, wherever they wait.
func TestMoveMany_JobsOfALane(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	k := onceq.Kind[int]{Name: "book", Queue: "old", Lane: func(int) string { return "7" }}
	var ids []int64
	for n := range 5 {
		ids = append(ids, repairEnqueue(t, db, k.Job(n)))
	}
	choice := must[onceqops.Choice](t)(onceqops.New(q).WouldMove(ctx, db.Pool, onceqops.Filter{Queue: "old", Limit: 3}))
	require.Equal(t, onceqops.Choice{Count: 3, IDs: []int64{ids[4], ids[3], ids[2]}}, choice)
	n, err := onceqops.New(q).MoveMany(ctx, db.Pool, onceqops.Filter{Queue: "old", Limit: 3}, "new")
	require.NoError(t, err)
	require.Equal(t, 3, n)
	n, err = onceqops.New(q).MoveMany(ctx, db.Pool, onceqops.Filter{Kind: "book"}, "new")
	require.NoError(t, err)
	require.Equal(t, 2, n)
	k.Queue = "new"
	var order []int
	db.Drain(k.Handle(func(_ context.Context, _ *onceq.Lease, n int) error {
		order = append(order, n)
		return nil
	}))
	require.Equal(t, []int{0, 1, 2, 3, 4}, order)
	require.NoError(t, db.Check())
}

// A worker that waits for the new queue is woken for a job that is due, and for no other.
func TestMove_WakesAWorker(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, `insert into onceq.waiter_queues (queue, serves) values ('default', 1)`)
	sqlRun(t, db, `insert into onceq.waiters (worker, serves, round, room, idle_until) values (1, 1, 1, 100, now() + interval '1 hour')`)
	for _, j := range []onceq.Job{{Delay: time.Hour}, {}} {
		j.Payload, j.Queue = 1, "nobody's"
		id := add(t, db, j)
		if j.Delay == 0 {
			sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 day' where id = $1`, id)
		}
		moved(t, true)(onceqops.New(db.Queue).Move(t.Context(), db.Pool, id, "default"))
		require.Equal(t, j.Delay == 0, sqlOne[bool](t, db, `select exists (select from onceq.wakes where worker = 1)`))
		require.True(t, sqlOne[bool](t, db, `select run_at > now() - interval '12 hours' from onceq.jobs where id = $1`, id), "due from now on")
	}
}

// A moved job is as old as before: in lists, counts, findings and what is counted of its wait.
func TestMove_KeepsTheAge(t *testing.T) {
	t.Parallel()
	seen := &eventLog{}
	db := queuetest.New(t, queuetest.Config(onceq.Config{Hook: seen}))
	ctx, q := t.Context(), db.Queue
	ids := []int64{add(t, db, onceq.Job{Queue: "imagse", Payload: 1}), add(t, db, onceq.Job{Queue: "imagse", Payload: 1, Lane: "a"}), add(t, db, onceq.Job{Queue: "imagse", Payload: 1, Lane: "a"})}
	laned, waiting := ids[1], ids[2]
	later := add(t, db, onceq.Job{Queue: "imagse", Payload: 1, Delay: time.Hour})
	leases := must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "nothing"})) // lets the first of the lane in
	require.Empty(t, leases)
	until(t, db, `exists (select from onceq.jobs where id = $1)`, laned)
	const ago = 27 * time.Minute
	db.Advance(ago)
	before := make(map[int64]onceq.JobInfo)
	for _, id := range append(ids, later) {
		before[id] = must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
	}
	oldest := func(queue string) onceqops.QueueStats {
		t.Helper()
		all := must[[]onceqops.QueueStats](t)(onceqops.New(q).Stats(ctx, queue))
		require.Len(t, all, 1)
		return all[0]
	}
	was := oldest("imagse")
	require.Greater(t, was.Oldest, ago)
	young := add(t, db, onceq.Job{Queue: "images", Payload: 1}) // claims take it first
	n, err := onceqops.New(q).MoveMany(ctx, db.Pool, onceqops.Filter{Queue: "imagse"}, "images")
	require.NoError(t, err)
	require.Equal(t, 4, n)

	is := oldest("images")
	require.GreaterOrEqual(t, is.Oldest, was.Oldest)
	require.GreaterOrEqual(t, is.OldestInLane, was.OldestInLane)
	listed := make(map[int64]onceq.JobInfo)
	for _, j := range must[[]onceq.JobInfo](t)(onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{Queue: "images"})) {
		listed[j.ID] = j
	}
	for id, b := range before {
		require.Equal(t, b.DueAt, listed[id].DueAt, "job %d", id)
	}
	require.Equal(t, before[later].RunAt, listed[later].RunAt)
	require.Equal(t, before[waiting].RunAt, listed[waiting].RunAt)
	require.True(t, listed[laned].RunAt.After(before[laned].RunAt))
	require.True(t, sqlOne[time.Time](t, db, `select oldest_due from onceq.v_queues where queue = 'images'`).Equal(before[ids[0]].DueAt))
	var found onceqops.Finding
	for _, f := range findings(t, db, "waiting") {
		found = f
	}
	require.Equal(t, "images", found.Queue)
	require.WithinDuration(t, before[ids[0]].DueAt, found.Since, time.Second)

	require.Equal(t, young, must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "images"}))[0].ID)
	moved(t, true)(onceqops.New(q).Move(ctx, db.Pool, ids[0], "again"))
	require.Equal(t, before[ids[0]].DueAt, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, ids[0])).DueAt)
	require.Len(t, must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "again"})), 1)
	claims := 0
	for _, e := range seen.events {
		if e.Type == onceq.EventClaimed && e.JobID != young {
			claims++
			require.GreaterOrEqual(t, e.Wait, ago)
		}
	}
	require.Equal(t, 1, claims)
}
