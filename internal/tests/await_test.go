package tests

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

var flow = onceq.Kind[string]{Name: "flow", Keep: onceq.Forever}

type approval struct {
	By string `json:"by"`
}

// steps is a handler that says where it came.
type flowSteps struct{ at []string }

func (s *flowSteps) handler(do func(ctx context.Context, l *onceq.Lease, say func(string)) error) onceq.Handler {
	return flow.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		s.at = nil
		return do(ctx, l, func(text string) { s.at = append(s.at, text) })
	})
}

func (s *flowSteps) took(t *testing.T, want ...string) {
	t.Helper()
	require.Equal(t, want, s.at)
	s.at = nil
}

func flowEnqueue(t *testing.T, db *queuetest.DB) int64 {
	t.Helper()
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, flow.Job("x"))
	require.NoError(t, err)
	return r.ID
}

func flowReap(t *testing.T, db *queuetest.DB) onceq.Reaped {
	t.Helper()
	r, err := onceq.NewReaper(db.Queue, onceq.ReaperConfig{})
	require.NoError(t, err)
	sum, err := r.RunOnce(t.Context())
	require.NoError(t, err)
	return sum
}

// The event comes before the job asks, while it waits, after its time-out; and nothing of it costs an attempt.
func TestAwait_TheAnswerStays(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	var s flowSteps
	h := s.handler(func(ctx context.Context, l *onceq.Lease, say func(string)) error {
		a, ok, err := onceq.Await[approval](ctx, l, "approved", l.Metadata["order"], 72*time.Hour)
		if err != nil {
			say("waits")
			return errors.Join(err) // wrapped as well as bare
		}
		if !ok {
			say("nobody")
		} else {
			say(a.By)
		}
		return errors.New("fails, and runs again")
	})
	enqueue := func(order string) int64 {
		j := flow.Job("x")
		j.Metadata = map[string]string{"order": order}
		r, err := q.Enqueue(ctx, db.Pool, j)
		require.NoError(t, err)
		return r.ID
	}
	emit := func(order, by string) bool {
		first, err := q.Emit(ctx, db.Pool, "approved", order, approval{by})
		require.NoError(t, err)
		return first
	}
	again := func(id int64) {
		_, err := onceqops.New(q).Retry(ctx, db.Pool, id)
		require.NoError(t, err)
	}

	require.True(t, emit("before", "ann"))
	require.False(t, emit("before", "bob"))
	id := enqueue("before")
	db.RunOne(h)
	s.took(t, "ann")
	_, err := q.Cancel(ctx, db.Pool, id)
	require.NoError(t, err)

	id = enqueue("meanwhile")
	require.Equal(t, onceq.StateDelayed, db.RunOne(h).State)
	s.took(t, "waits")
	again(id)
	require.Equal(t, onceq.StateDelayed, db.RunOne(h).State)
	s.took(t, "waits")
	require.True(t, emit("meanwhile", "cid"))
	db.RunOne(h)
	s.took(t, "cid")
	db.Advance(onceq.EventWindow + 2*time.Hour) // the event is gone, and the job still knows it
	flowReap(t, db)
	again(id)
	db.RunOne(h)
	s.took(t, "cid")
	info, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, 2, info.Attempts)
	require.Zero(t, info.Lost)
	_, err = q.Cancel(ctx, db.Pool, id)
	require.NoError(t, err)

	id = enqueue("late")
	db.RunOne(h)
	s.took(t, "waits")
	db.Advance(73 * time.Hour)
	flowReap(t, db) // of the others
	db.RunOne(h)
	s.took(t, "nobody")
	require.True(t, emit("late", "dan"))
	again(id)
	db.RunOne(h)
	s.took(t, "nobody")
	_, err = q.Cancel(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Zero(t, flowReap(t, db).Awaits, "it may be redriven")
	_, err = onceqops.New(q).Redrive(ctx, db.Pool, id)
	require.NoError(t, err)
	db.RunOne(h)
	s.took(t, "nobody")

	_, err = q.Cancel(ctx, db.Pool, id)
	require.NoError(t, err)
	require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, id))
	require.Positive(t, flowReap(t, db).Awaits)
}

// Many jobs wait for one event, in and out of transactions, and two events let one job go on.
func TestAwait_ManyJobsAndManyEvents(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	var heard atomic.Int64 // Drain runs several at once
	h := flow.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ string) error {
		if _, err := tx.Exec(ctx, `select 1`); err != nil {
			return err
		}
		for _, key := range []string{"a", "b"} {
			if _, ok, err := onceq.Await[int](ctx, l, "e", key, onceq.Forever); err != nil {
				return err
			} else if !ok {
				return onceq.Fatal(errors.New("a time-out of a wait for ever"))
			}
		}
		heard.Add(1)
		return nil
	})
	const n = 20
	for range n {
		flowEnqueue(t, db)
	}
	for _, key := range []string{"b", "a"} {
		// A job that met the others at the event's row for too long asks again in a second.
		eventually(t, "all wait for the first event", func() bool {
			db.Drain(h)
			return sqlOne[int](t, db, `select count(*) from onceq.job_awaits where state = 0`) == n
		})
		require.Zero(t, heard.Load())
		require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			first, err := q.Emit(ctx, tx, "e", key, 1)
			require.True(t, first)
			return err
		}))
	}
	eventually(t, "all have heard", func() bool { db.Drain(h); return heard.Load() == n })
	require.Equal(t, 2*n, flowReap(t, db).Awaits)
}

// Sleep by its name: over once is over for every later run; in a loop it is refused.
func TestSleep(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	var s flowSteps
	end := errors.New("fails")
	h := s.handler(func(ctx context.Context, l *onceq.Lease, say func(string)) error {
		say("first")
		if err := onceq.Sleep(ctx, l, "one", time.Hour); err != nil {
			return err
		}
		say("second")
		if err := onceq.Sleep(ctx, l, "two", 24*time.Hour); err != nil {
			return err
		}
		require.ErrorIs(t, onceq.Sleep(ctx, l, "one", time.Hour), onceq.ErrNameUsed)
		say("third")
		return end
	})
	id := flowEnqueue(t, db)
	require.Equal(t, onceq.StateDelayed, db.RunOne(h).State)
	s.took(t, "first")
	why, err := onceqops.New(q).Explain(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceqops.CauseSleep, why.Cause(), why)
	require.Equal(t, "one", why.Reasons[0].Key)
	require.InDelta(t, time.Hour, time.Until(why.Reasons[0].Until), float64(10*time.Minute))
	db.Advance(59 * time.Minute)
	require.Empty(t, db.Drain(h))
	db.Advance(time.Minute)
	db.RunOne(h)
	s.took(t, "first", "second")
	db.Advance(25 * time.Hour)
	db.RunOne(h)
	s.took(t, "first", "second", "third")
	end = onceq.Reschedule(0) // another round, with sleeps of its own
	db.Advance(time.Minute)
	require.Zero(t, flowReap(t, db).Awaits, "of a round that goes on")
	db.RunOne(h)
	s.took(t, "first", "second", "third")
	db.RunOne(h)
	s.took(t, "first")
	require.Equal(t, 1, flowReap(t, db).Awaits, "the second sleep of the round before")
	require.Zero(t, flowReap(t, db).Awaits)
	info, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDelayed, info.State)
	require.InDelta(t, time.Hour, time.Until(info.RunAt), float64(10*time.Minute))
}

// A handler that does not return the error of Await does no harm.
func TestAwait_ASwallowedErrorDoesNoHarm(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	outcome := errors.New("something else")
	h := flow.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		_, _, err := onceq.Await[int](ctx, l, "e", "k", time.Hour)
		require.Error(t, err)
		require.Contains(t, err.Error(), "return this error from the handler")
		return outcome
	})
	id := flowEnqueue(t, db)
	require.Equal(t, onceq.StateRetrying, db.RunOne(h).State)
	before, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	outcome = onceq.Snooze(time.Hour)
	db.Advance(time.Minute)
	db.RunOne(h)
	outcome = nil
	_, err = q.Emit(ctx, db.Pool, "e", "other", nil)
	require.NoError(t, err)
	after, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, 1, before.Attempts)
	require.InDelta(t, time.Hour, time.Until(after.RunAt), float64(10*time.Minute))
	why, err := onceqops.New(q).Explain(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceqops.CauseRetry, why.Cause(), "it waits for what its handler returned")
	_, err = onceqops.New(q).Retry(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateCompleted, db.RunOne(h).State)
	_, err = q.Emit(ctx, db.Pool, "e", "k", 1)
	require.NoError(t, err)
	require.Empty(t, db.Drain(h))
}

// An Emit does not shorten a backoff: it moves only a job that was given back to wait for that event.
func TestEmit_LeavesABackoffAlone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	fails := false
	h := flow.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		if fails {
			return onceq.RetryAfter(time.Hour, errors.New("no"))
		}
		_, _, err := onceq.Await[int](ctx, l, "e", "k", 24*time.Hour)
		return err
	})
	id := flowEnqueue(t, db)
	db.RunOne(h)
	fails = true
	_, err := onceqops.New(q).Retry(ctx, db.Pool, id)
	require.NoError(t, err)
	db.RunOne(h)
	_, err = q.Emit(ctx, db.Pool, "e", "k", 1)
	require.NoError(t, err)
	info, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.InDelta(t, time.Hour, time.Until(info.RunAt), float64(10*time.Minute))
}

// Nor does it hurry a job whose time-out came and that has a slot of a rate by then.
func TestEmit_LeavesASlotAlone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	setLimit(t, db, "provider", onceq.Limit{Rate: 100})
	limited := flow
	limited.Limit = func(string) string { return "provider" }
	waits := limited.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		_, _, err := onceq.Await[int](ctx, l, "e", "k", 24*time.Hour)
		return err
	})
	id := add(t, db, limited.Job("x"))
	db.RunOne(waits)
	_, err := onceqops.New(q).Retry(ctx, db.Pool, id) // as if the time-out came
	require.NoError(t, err)
	_, err = q.Claim(ctx, onceq.ClaimOptions{Queue: "another"}) // lets it in
	require.NoError(t, err)
	require.EqualValues(t, 1, repairExec(t, db, `update onceq.jobs set run_at = now() + interval '1 hour' where id = $1 and right(lane, 2) = E'\x1f@'`, id))
	_, err = q.Emit(ctx, db.Pool, "e", "k", 1)
	require.NoError(t, err)
	info, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.InDelta(t, time.Hour, time.Until(info.RunAt), float64(10*time.Minute))
	db.Advance(time.Hour)
	db.RunOne(waits)
	require.NoError(t, db.Check())
}

// A worker that has lost its lease neither begins a wait nor decides one, and what it gives back wakes nobody and keeps
// nobody from being woken.
func TestAwait_AStaleWorker(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := flowEnqueue(t, db)
	claim := func() *onceq.Lease {
		leases, err := q.Claim(ctx, onceq.ClaimOptions{})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		return leases[0]
	}
	await := func(l *onceq.Lease, key string) error {
		_, _, err := onceq.Await[int](ctx, l, "e", key, time.Hour)
		return err
	}
	stale := claim()
	old := await(stale, "k")
	require.False(t, onceq.IsFailure(old))
	db.ExpireLease(id)
	now := claim()
	require.ErrorIs(t, await(stale, "other"), onceq.ErrLeaseLost)
	require.NoError(t, now.Fail(ctx, await(now, "k")))
	require.ErrorIs(t, stale.Fail(ctx, old), onceq.ErrLeaseLost)
	_, err := q.Emit(ctx, db.Pool, "e", "k", 1)
	require.NoError(t, err)
	now = claim()
	require.NoError(t, await(now, "k"))
	require.NoError(t, now.Complete(ctx, nil))

	id = flowEnqueue(t, db)
	stale = claim()
	require.Error(t, await(stale, "never"))
	db.ExpireLease(id)
	db.Advance(2 * time.Hour)
	now = claim()
	require.ErrorIs(t, await(stale, "never"), onceq.ErrLeaseLost)
	require.NoError(t, now.Complete(ctx, nil))
}

// The time-out is being decided while an Emit is open: the job comes again in a moment, and the Emit decides.
func TestAwait_TheTimeOutMeetsAnOpenEmit(t *testing.T) {
	t.Parallel()
	for _, commit := range []bool{true, false} {
		db := queuetest.New(t)
		ctx, q := t.Context(), db.Queue
		heard := ""
		h := flow.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
			text, ok, err := onceq.Await[string](ctx, l, "e", "k", time.Hour)
			if err == nil {
				heard = text
				if !ok {
					heard = "nobody"
				}
			}
			return err
		})
		flowEnqueue(t, db)
		db.RunOne(h)
		db.Advance(2 * time.Hour)
		tx, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		_, err = q.Emit(ctx, tx, "e", "k", "just in time")
		require.NoError(t, err)
		require.Equal(t, onceq.StateDelayed, db.RunOne(h).State)
		require.Empty(t, heard)
		want := "just in time"
		if commit {
			require.NoError(t, tx.Commit(ctx))
		} else {
			require.NoError(t, tx.Rollback(ctx))
			want = "nobody"
		}
		db.Advance(time.Second)
		require.Equal(t, onceq.StateCompleted, db.RunOne(h).State)
		require.Equal(t, want, heard)
	}
}

// In a lane a job that waits keeps its place, or with Overtake lets the others by and comes back when the event does.
func TestAwait_InALane(t *testing.T) {
	t.Parallel()
	for _, rule := range []onceq.LaneRule{0, onceq.Overtake} {
		db := queuetest.New(t)
		ctx, q := t.Context(), db.Queue
		kind := onceq.Kind[int]{Name: "flow", Lane: func(int) string { return "a" }, LaneRule: rule}
		var order []int
		h := kind.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
			if n == 1 {
				if _, _, err := onceq.Await[int](ctx, l, "e", "k", time.Hour); err != nil {
					return err
				}
			}
			order = append(order, n)
			return nil
		})
		var first int64
		for n := 1; n <= 2; n++ {
			r, err := q.Enqueue(ctx, db.Pool, kind.Job(n))
			require.NoError(t, err)
			if n == 1 {
				first = r.ID
			}
		}
		db.Drain(h)
		why, err := onceqops.New(q).Explain(ctx, db.Pool, first)
		require.NoError(t, err)
		require.Equal(t, onceqops.CauseEvent, why.Cause(), why)
		_, err = q.Emit(ctx, db.Pool, "e", "k", nil)
		require.NoError(t, err)
		require.NoError(t, db.Check())
		db.Drain(h)
		want := []int{1, 2}
		if rule == onceq.Overtake {
			want = []int{2, 1}
		}
		require.Equal(t, want, order)
	}
}

// A job that waits for as long as it takes leaves nothing behind that promoters would find in a hundred years.
func TestAwait_ForeverLeavesNoCall(t *testing.T) {
	t.Parallel()
	lane := func(int) string { return "a" }
	for _, kind := range []onceq.Kind[int]{
		{Name: "flow", Lane: lane, LaneRule: onceq.Overtake},
		{Name: "flow", Limit: lane},
		{Name: "flow", Lane: lane, Limit: lane, LaneRule: onceq.Overtake},
	} {
		db := queuetest.New(t)
		ctx, q := t.Context(), db.Queue
		ran := 0
		h := kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			if _, _, err := onceq.Await[int](ctx, l, "e", "k", onceq.Forever); err != nil {
				return err
			}
			ran++
			return nil
		})
		_, err := q.Enqueue(ctx, db.Pool, kind.Job(1))
		require.NoError(t, err)
		db.Drain(h)
		require.Zero(t, ran)
		_, err = q.Emit(ctx, db.Pool, "e", "k", nil)
		require.NoError(t, err)
		db.Drain(h)
		require.Equal(t, 1, ran)
		require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.lane_calls where due > statement_timestamp() + interval '1 day' and lane <> ''`))
	}
}

// The SQL of docs/use/flows.md finds the jobs that wait, also those that wait for their limits meanwhile, and for what they wait now.
func TestAwait_TheSQLForPeople(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	page, err := os.ReadFile("../../docs/use/flows.md")
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(page), "Which jobs wait, and for what, in SQL:\n\n")
	require.True(t, ok)
	waiting, _, ok := strings.Cut(rest, ";\n")
	require.True(t, ok)
	limited := onceq.Kind[int]{Name: "limited", Limit: func(int) string { return "provider" }}
	plain := flowEnqueue(t, db)
	withLimit := add(t, db, limited.Job(1))
	await := func(ctx context.Context, l *onceq.Lease) error {
		_, err := l.Await(ctx, "paid", l.Kind, time.Hour)
		return err
	}
	start(t, db, onceq.WorkerConfig{}, flow.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		if err := onceq.Sleep(ctx, l, "nap", time.Millisecond); err != nil {
			return err
		}
		return await(ctx, l)
	}),
		limited.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error { return await(ctx, l) }))
	found := func() (all []string) {
		rows, err := db.Pool.Query(t.Context(), "select scope || ' ' || key || ' ' || id || ' ' || kind from ("+waiting+") w order by id")
		require.NoError(t, err)
		all, err = pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return all
	}
	until(t, db, `(select count(*) from onceq.job_awaits where claims > 0) = 3 and exists (select from onceq.job_waits where id = $1)`, withLimit)
	require.Equal(t, []string{fmt.Sprint("paid flow ", plain, " flow"), fmt.Sprint("paid limited ", withLimit, " limited")}, found())

	// What is cancelled waits for nothing.
	for _, id := range []int64{plain, withLimit} {
		_, err := db.Queue.Cancel(t.Context(), db.Pool, id)
		require.NoError(t, err)
	}
	until(t, db, `(select count(*) from onceq.job_history) = 2`)
	require.Empty(t, found())
}

// Cancelled while it waits; and an Emit that meets the open cancellation waits for it.
func TestAwait_Cancelled(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	h := flow.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		_, _, err := onceq.Await[int](ctx, l, "e", "k", time.Hour)
		return err
	})
	for _, commit := range []bool{true, false} {
		id := flowEnqueue(t, db)
		db.RunOne(h)
		tx, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		state, err := q.Cancel(ctx, tx, id)
		require.NoError(t, err)
		require.Equal(t, onceq.StateCancelled, state)
		done := make(chan error, 1)
		go func() { _, err := q.Emit(ctx, db.Pool, "e", "k", 1); done <- err }()
		until(t, db, `exists (select from `+activity(t, db)+` where datname = current_database() and wait_event_type = 'Lock')`)
		if commit {
			require.NoError(t, tx.Commit(ctx))
			require.NoError(t, <-done)
			require.Empty(t, db.Drain(h))
			db.Advance(onceq.EventWindow) // it can be emitted again
		} else {
			require.NoError(t, tx.Rollback(ctx))
			require.NoError(t, <-done)
			require.Equal(t, onceq.StateCompleted, db.RunOne(h).State)
		}
	}
}

// An Emit forbids no two-phase commit, and a job does not wait for a prepared one with a slot.
func TestEmit_InAPreparedTransaction(t *testing.T) {
	t.Parallel()
	server, err := pgserver.Start(t.Context(), pgserver.Options{Own: true, Settings: map[string]string{"max_prepared_transactions": "5"}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return migrations.Up(ctx, c.Conn(), "onceq") }))
	q, err := onceq.New(pool, nil)
	require.NoError(t, err)
	h := flow.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		_, _, err := onceq.Await[int](ctx, l, "e", "k", time.Hour)
		return err
	})
	_, err = q.Enqueue(ctx, pool, flow.Job("x"))
	require.NoError(t, err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, h)
	require.NoError(t, err)
	require.NoError(t, w.Drain(ctx, 0))
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = q.Emit(ctx, tx, "e", "k", 1)
	require.NoError(t, err)
	_, err = tx.Exec(ctx, `prepare transaction 'emit'`)
	require.NoError(t, err)
	_ = tx.Rollback(ctx)                         // it is prepared, so this only gives the connection back
	_, err = q.Enqueue(ctx, pool, flow.Job("y")) // begins to wait now
	require.NoError(t, err)
	require.NoError(t, w.Drain(ctx, 1))
	_, err = pool.Exec(ctx, `commit prepared 'emit'`)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		require.NoError(t, w.Drain(ctx, 0))
		n, err := onceqops.New(q).Count(ctx, pool, onceqops.Filter{States: []onceq.State{onceq.StateCompleted}})
		return err == nil && n == 2
	}, patience, 20*time.Millisecond)
}

// Outside of handlers an event is awaited until it comes, was emitted before, or the context ends.
func TestAwaitEvent(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	type answer struct {
		payload string
		err     error
	}
	answers := make(chan answer, 1)
	var asked atomic.Int64
	q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	go func() {
		payload, err := q.AwaitEvent(ctx, countingDB{db.Pool, &asked}, "s", "k")
		answers <- answer{string(payload), err}
	}()
	eventually(t, "it has asked twice", func() bool { return asked.Load() >= 2 })
	require.Empty(t, answers)
	_, err = q.Emit(ctx, db.Pool, "s", "k", "by mail")
	require.NoError(t, err)
	require.Equal(t, answer{payload: `"by mail"`}, receive(t, answers))
	payload, err := q.AwaitEvent(ctx, db.Pool, "s", "k")
	require.NoError(t, err)
	require.JSONEq(t, `"by mail"`, string(payload))

	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err = q.AwaitEvent(short, db.Pool, "s", "other")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = q.AwaitEvent(ctx, db.Pool, "s", "")
	require.ErrorAs(t, err, new(*onceq.InvalidError))
}

// countingDB counts queries.
type countingDB struct {
	*pgxpool.Pool
	n *atomic.Int64
}

func (c countingDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	c.n.Add(1)
	return c.Pool.Query(ctx, sql, args...)
}

func TestAwait_RefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	flowEnqueue(t, db)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	l := leases[0]
	var bad *onceq.InvalidError
	for _, c := range []struct{ scope, key string }{{"", "k"}, {"s", " "}, {"s\x00", "k"}, {"s", strings.Repeat("k", onceq.MaxKeyBytes+1)}} {
		_, _, err := onceq.Await[int](ctx, l, c.scope, c.key, time.Hour)
		require.ErrorAs(t, err, &bad)
		_, _, err = q.Event(ctx, db.Pool, c.scope, c.key)
		require.ErrorAs(t, err, &bad)
	}
	_, _, err = onceq.Await[int](ctx, l, "s", "k", -1)
	require.ErrorAs(t, err, &bad)
	require.ErrorAs(t, onceq.Sleep(ctx, l, "n", -1), &bad)
	require.ErrorAs(t, onceq.Sleep(ctx, l, "", time.Hour), &bad)
	_, err = q.Emit(ctx, db.Pool, "s", "k", "no number")
	require.NoError(t, err)
	_, _, err = onceq.Await[int](ctx, l, "s", "k", time.Hour)
	require.ErrorContains(t, err, "does not decode into int")
	_, ok, err := onceq.Await[int](ctx, l, "s", "other", 0)
	require.NoError(t, err)
	require.False(t, ok, "asked without waiting")
	require.NoError(t, l.Complete(ctx, nil))
	keys, err := onceqops.New(q).Keys(ctx, db.Pool, "", "k")
	require.NoError(t, err)
	require.Len(t, keys, 1)
	require.Equal(t, "event", keys[0].Class.String())
	keys, err = onceqops.New(q).Keys(ctx, db.Pool, "", "other")
	require.NoError(t, err)
	require.Empty(t, keys)
}
