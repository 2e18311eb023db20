package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/bridge"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// What may come between two parts. Another session sees what was committed before it, and may be sent something in between.

func storeOf(q *onceq.Queue) *pg.Store {
	return bridge.Root.(interface {
		Store(q *onceq.Queue) *pg.Store
	}).Store(q)
}

// takeApart makes q send its statements as on Citus.
func takeApart(q *onceq.Queue) { storeOf(q).Citus.Store(pg.CitusYes) }

// promoteIn lets go on what was called, inside a transaction.
func promoteIn(ctx context.Context, q *onceq.Queue, tx onceq.DB) error {
	args := []any{time.Time{}, 200, int64(0), int64(0), int64(0), int64(0), nil, nil}
	return storeOf(q).Send(ctx, tx, pg.Hot, stmt.PromoteLines, args, pg.NoRows)
}

func inPartsDB(t *testing.T) (*queuetest.DB, *onceq.Queue) {
	t.Helper()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	takeApart(db.Queue)
	return db, db.Queue
}

func promoteOnce(t *testing.T, db *queuetest.DB) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return promoteIn(t.Context(), db.Queue, tx) }))
}

func claimOf(t *testing.T, q *onceq.Queue, id int64) *onceq.Lease {
	t.Helper()
	leases, err := q.Claim(t.Context(), onceq.ClaimOptions{Limit: 10})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	require.Equal(t, id, leases[0].ID)
	return leases[0]
}

// Each lane of a call is called for its first job, also where a later one of the lane is delayed.
func TestCitus_EachLaneOfACallIsCalledInTime(t *testing.T) {
	t.Parallel()
	db, q := inPartsDB(t)
	job := func(lane string, delay time.Duration) onceq.Job {
		return onceq.Job{Kind: "k", Payload: 1, Lane: lane, Delay: delay}
	}
	for _, jobs := range [][]onceq.Job{{job("b", 0), job("b", time.Hour)}, {job("c", 0), job("d", 0), job("c", time.Hour)}} {
		_, err := q.EnqueueMany(t.Context(), db.Pool, jobs)
		require.NoError(t, err)
	}
	require.NoError(t, db.Check())
	promoteOnce(t, db)
	leases, err := q.Claim(t.Context(), onceq.ClaimOptions{Limit: 10})
	require.NoError(t, err)
	require.Len(t, leases, 3)
}

// The call of a job in a batch is not due before the job: a promoter would take it in vain, and nobody would come again.
func TestCitus_TheCallOfABatchIsNotBeforeTheJob(t *testing.T) {
	t.Parallel()
	db, q := inPartsDB(t)
	for _, key := range []string{"", "a"} {
		for _, delay := range []time.Duration{0, time.Hour} {
			batch := &pgx.Batch{}
			job := onceq.Job{Kind: "k", Payload: 1, Lane: fmt.Sprint(key, delay), Delay: delay}
			if key != "" {
				job.Key = job.Lane
			}
			p, err := q.EnqueueInBatch(batch, job)
			require.NoError(t, err)
			require.NoError(t, db.Pool.SendBatch(t.Context(), batch).Close())
			r, err := p.Result(t.Context(), db.Pool)
			require.NoError(t, err)
			require.False(t, r.Duplicate)
			require.Equal(t, delay > 0, r.State == onceq.StateDelayed)
			var early int
			const read = `select count(*) from onceq.job_waits w join onceq.lane_calls c on c.lane = w.lane where w.id = $1 and c.due < w.run_at`
			require.NoError(t, db.Pool.QueryRow(t.Context(), read, r.ID).Scan(&early))
			require.Zero(t, early)
		}
	}
	again := &pgx.Batch{}
	p, err := q.EnqueueInBatch(again, onceq.Job{Kind: "k", Payload: 1, Lane: "a1h0m0s", Key: "a1h0m0s"})
	require.NoError(t, err)
	require.NoError(t, db.Pool.SendBatch(t.Context(), again).Close())
	r, err := p.Result(t.Context(), db.Pool)
	require.NoError(t, err)
	require.True(t, r.Duplicate)
	require.NoError(t, db.Check())
}

// A request to cancel a job is noted wherever a promoter that commits meanwhile puts it.
func TestCitus_ARequestMeetsAPromoter(t *testing.T) {
	t.Parallel()
	for _, apart := range []bool{false, true} {
		db := queuetest.New(t, queuetest.Schema("onceq"))
		q := db.Queue
		if apart {
			takeApart(q)
		}
		ctx := t.Context()
		j, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: 1, Lane: "x"})
		require.NoError(t, err)
		promoter, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		require.NoError(t, promoteIn(ctx, q, promoter))
		tx, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		var l *onceq.Lease
		_, err = q.Cancel(ctx, &between{tx, "onceq.request_cancels(", func() {
			require.NoError(t, promoter.Commit(ctx))
			l = claimOf(t, q, j.ID)
		}}, j.ID)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(ctx))
		require.NotNil(t, l)
		var noted bool
		require.NoError(t, db.Pool.QueryRow(ctx, `select exists (select from onceq.job_cancels where job_id = $1)`, j.ID).Scan(&noted))
		require.True(t, noted, "in parts: %v", apart)
		_ = l.Complete(ctx, nil)
	}
}

// If the context ends after the id was drawn, nothing is written, and the caller's transaction stays usable.
func TestCitus_AContextThatEndsAfterTheDraw(t *testing.T) {
	t.Parallel()
	db, q := inPartsDB(t)
	ctx := t.Context()
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	ending, end := context.WithCancel(ctx)
	_, err = q.Enqueue(ending, &between{tx, "onceq.enqueue_one(", end}, onceq.Job{Kind: "k", Key: "a"})
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, tx.Commit(ctx))
	r, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "a"})
	require.NoError(t, err)
	require.False(t, r.Duplicate)
	require.NoError(t, db.Check())
}

// What writes is one statement, so it needs no transaction of the caller's.
func TestCitus_ADBWithoutATransaction(t *testing.T) {
	t.Parallel()
	db, q := inPartsDB(t)
	for _, again := range []bool{false, true} {
		r, err := q.Enqueue(t.Context(), outside{db.Pool}, onceq.Job{Kind: "k", Key: "a"})
		require.NoError(t, err)
		require.Equal(t, again, r.Duplicate)
	}
}

// outside is a DB in no transaction, of a type without BeginTx.
type outside struct{ onceq.DB }

// Whoever completes a job in a batch whose lease is lost is reported, whichever part notices.
func TestCitus_AStaleCompletionInABatchIsReported(t *testing.T) {
	t.Parallel()
	for _, lane := range []string{"", "x"} {
		db := queuetest.New(t, queuetest.Schema("onceq"))
		ctx := t.Context()
		var events []onceq.EventType
		q, err := onceq.New(db.Pool, &onceq.Config{Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) { events = append(events, e.Type) })})
		require.NoError(t, err)
		takeApart(q)
		m, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: 1, Lane: lane})
		require.NoError(t, err)
		_, err = q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "f", Payload: 1, After: []onceq.JobRef{{ID: m.ID}}})
		require.NoError(t, err)
		require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return promoteIn(ctx, q, tx) }))
		l := claimOf(t, q, m.ID)
		db.ExpireLease(m.ID)
		claimOf(t, q, m.ID)
		events = nil
		batch := &pgx.Batch{}
		require.NoError(t, l.CompleteInBatch(batch))
		require.True(t, onceq.LeaseLost(db.Pool.SendBatch(ctx, batch).Close()))
		require.Equal(t, []onceq.EventType{onceq.EventStale}, events)
	}
}

// A job that stopped its lane and comes back to wait for others no longer stops it: the lane is called.
func TestRedrive_AFollowerThatStoppedItsLane(t *testing.T) {
	t.Parallel()
	for _, apart := range []bool{false, true} {
		db := queuetest.New(t, queuetest.Schema("onceq"))
		q, ctx := db.Queue, t.Context()
		if apart {
			takeApart(q)
		}
		m, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "m", Payload: 1})
		require.NoError(t, err)
		f, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: 1, Lane: "x", LaneRule: onceq.StopLane, After: []onceq.JobRef{{ID: m.ID}}, IfDead: onceq.DeadRun})
		require.NoError(t, err)
		require.NoError(t, claimOf(t, q, m.ID).Fail(ctx, onceq.Fatal(errors.New("no"))))
		for range 3 {
			promoteOnce(t, db)
		}
		require.NoError(t, claimOf(t, q, f.ID).Fail(ctx, onceq.Fatal(errors.New("no"))))
		behind, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: 2, Lane: "x"})
		require.NoError(t, err)
		promoteOnce(t, db)
		_, err = onceqops.New(q).Redrive(ctx, db.Pool, m.ID)
		require.NoError(t, err)
		require.NoError(t, claimOf(t, q, m.ID).Release(ctx))
		_, err = onceqops.New(q).Redrive(ctx, db.Pool, f.ID)
		require.NoError(t, err)
		require.NoError(t, db.Check(), "in parts: %v", apart)
		promoteOnce(t, db)
		leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 10})
		require.NoError(t, err)
		ids := map[int64]bool{}
		for _, l := range leases {
			ids[l.ID] = true
		}
		require.Equal(t, map[int64]bool{m.ID: true, behind.ID: true}, ids)
	}
}

// Cancel in parts frees the key of a job that no worker had, and keeps it if it is to stay taken.
func TestCancelInParts_FreesTheKeyOfAJobThatNeverStarted(t *testing.T) {
	t.Parallel()
	db, q := inPartsDB(t)
	ctx := t.Context()
	for _, job := range []onceq.Job{{Key: "live"}, {Key: "waits", Lane: "l"}, {Key: "delayed", Delay: time.Hour}} {
		for _, keep := range []bool{false, true} {
			job.Kind = fmt.Sprint("k", keep)
			first, err := q.Enqueue(ctx, db.Pool, job)
			require.NoError(t, err)
			n, asked, err := onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{IDs: []int64{first.ID}, KeepKeys: keep})
			require.NoError(t, err)
			require.Equal(t, [2]int{1, 0}, [2]int{n, asked})
			second, err := q.Enqueue(ctx, db.Pool, job)
			require.NoError(t, err)
			require.Equal(t, keep, second.Duplicate, "%s: %+v", job.Key, second)
			if !keep {
				_, err = onceqops.New(q).Redrive(ctx, db.Pool, first.ID)
				require.ErrorIs(t, err, onceq.ErrDuplicate)
				_, err = q.Cancel(ctx, db.Pool, second.ID)
				require.NoError(t, err)
				first = second
			}
			_, err = onceqops.New(q).Redrive(ctx, db.Pool, first.ID)
			require.NoError(t, err)
			_, err = q.Cancel(ctx, db.Pool, first.ID)
			require.NoError(t, err)
			second, err = q.Enqueue(ctx, db.Pool, job)
			require.NoError(t, err)
			require.False(t, second.Duplicate, job.Key)
			_, err = q.Cancel(ctx, db.Pool, second.ID)
			require.NoError(t, err)
		}
	}
}

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
				takeApart(db.Queue)
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
	state, err = onceqops.New(q).Redrive(ctx, db.Pool, id)
	say("redrive: %s, %v", state, err)
	run(1, await(time.Hour))
	say("discard: %v", onceqops.New(q).Discard(ctx, db.Pool, id))

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
	why, err := onceqops.New(q).Explain(ctx, db.Pool, id)
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

// What jobs that wait for others, and their ends, send in parts on Citus does the same on every server.
func TestCitus_GroupsInPartsDoTheSame(t *testing.T) {
	t.Parallel()
	inPartsDoTheSame(t, groupPaths)
}

func groupPaths(t *testing.T, db *queuetest.DB, say func(format string, args ...any)) {
	ctx, q := t.Context(), db.Queue
	whole := onceq.Kind[string]{Name: "whole", Keep: time.Hour}
	plain := onceq.Kind[int]{Name: "plain"}
	keyed := onceq.Kind[int]{Name: "keyed", Key: func(n int) string { return fmt.Sprint(n) }}
	kept := onceq.Kind[int]{Name: "kept", Keep: time.Hour}
	inTx := onceq.Kind[int]{Name: "tx", Keep: time.Hour}
	batch := onceq.Kind[int]{Name: "batch"}
	keptBatch := onceq.Kind[int]{Name: "keptbatch", Keep: time.Hour}
	kinds := []*onceq.Kind[int]{&plain, &keyed, &kept, &inTx, &batch, &keptBatch}

	group := func(id int64) {
		g, err := q.Group(ctx, db.Pool, id)
		g.ID, g.Oldest = 0, 0
		say("group %+v, %v", g, err)
		members, err := listed(onceqops.New(q).Members(ctx, db.Pool, id))
		require.NoError(t, err)
		for _, m := range members {
			say("member %s %s %s %s", m.State, m.Kind, m.Error, m.Result)
		}
	}
	var mu sync.Mutex
	var heard []string
	var handlers []onceq.Handler
	ends := func(l *onceq.Lease, n int) error {
		if n < 0 {
			return onceq.Fatal(errors.New("no"))
		}
		return l.SetResult(n)
	}
	for _, k := range kinds {
		switch k.Name {
		case "tx":
			handlers = append(handlers, k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
				if n > 100 { // it adds members, which fail
					if _, err := l.AddMembers(ctx, tx, plain.Job(n/100), plain.Job(-1)); err != nil {
						return err
					}
				}
				if n == 50 { // no result
					_, err := tx.Exec(ctx, `select 1`)
					return err
				}
				return ends(l, n)
			}))
		case "batch", "keptbatch":
			handlers = append(handlers, k.HandleBatch(5, func(ctx context.Context, tx pgx.Tx, items []onceq.Item[int]) error {
				for _, i := range items {
					if err := ends(i.Lease, i.Payload); err != nil {
						return err
					}
				}
				return nil
			}))
		default:
			handlers = append(handlers, k.Handle(func(_ context.Context, l *onceq.Lease, n int) error { return ends(l, n) }))
		}
	}
	wholeRuns := func(ctx context.Context, l *onceq.Lease, name string) error {
		members, err := listed(l.Members(ctx))
		if err != nil {
			return err
		}
		sum := 0
		states := map[onceq.State]int{}
		for _, m := range members {
			var n int
			if m.Result != nil {
				if err := json.Unmarshal(m.Result, &n); err != nil {
					return err
				}
			}
			sum += n
			states[m.State]++
		}
		mu.Lock()
		defer mu.Unlock()
		heard = append(heard, fmt.Sprintf("%s runs after %v, sum %d", name, states, sum))
		return nil
	}
	handlers = append(handlers, whole.Handle(wholeRuns))
	drain := func() {
		heard = nil
		db.Drain(handlers...)
		slices.Sort(heard)
		say("%s", heard)
		require.NoError(t, db.Check())
	}
	enqueue := func(j onceq.Job) int64 {
		r, err := q.Enqueue(ctx, db.Pool, j)
		require.NoError(t, err)
		return r.ID
	}
	enqueueGroup := func(rule onceq.DeadRule, name string, members ...onceq.Job) int64 {
		then := whole.Job(name)
		then.IfDead = rule
		g, err := q.EnqueueGroup(ctx, db.Pool, members, then)
		require.NoError(t, err)
		for _, r := range append(g.Members, g.Then) {
			say("enqueued %t %s", r.Duplicate, r.State)
		}
		require.NoError(t, db.Check())
		return g.Then.ID
	}

	// Every way to complete.
	var all []onceq.Job
	for i, k := range kinds {
		for n := range 3 {
			all = append(all, k.Job(10*i+n))
		}
	}
	id := enqueueGroup(onceq.DeadWait, "all", append(all, inTx.Job(50))...)
	group(id)
	drain()
	group(id)

	// By hand: in a transaction, in a batch, cancelled and discarded.
	id = enqueueGroup(onceq.DeadRun, "by hand", plain.Job(1), kept.Job(2), keyed.Job(70), plain.Job(4))
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 3})
	require.NoError(t, err)
	require.NoError(t, leases[0].SetResult(1))
	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return leases[0].Complete(ctx, tx) }))
	b := &pgx.Batch{}
	require.NoError(t, leases[1].SetResult(2))
	require.NoError(t, leases[1].CompleteInBatch(b))
	require.NoError(t, db.Pool.SendBatch(ctx, b).Close())
	require.NoError(t, leases[2].Complete(ctx, nil))
	require.ErrorIs(t, leases[2].Complete(ctx, nil), onceq.ErrLeaseLost)
	members, err := listed(onceqops.New(q).Members(ctx, db.Pool, id))
	require.NoError(t, err)
	state, err := q.Cancel(ctx, db.Pool, members[3].ID)
	say("cancelled: %s, %v", state, err)
	group(id)
	drain()

	// A dead member: the job waits until it is redriven, or discarded; runs; is cancelled, and comes back with the member.
	for _, rule := range []onceq.DeadRule{onceq.DeadWait, onceq.DeadRun, onceq.DeadCancel} {
		id := enqueueGroup(rule, fmt.Sprint("rule ", rule), plain.Job(1), plain.Job(-1), kept.Job(-1))
		drain()
		db.Advance(2 * time.Second)
		drain()
		group(id)
		members, err := listed(onceqops.New(q).Members(ctx, db.Pool, id))
		require.NoError(t, err)
		say("discard: %v", onceqops.New(q).Discard(ctx, db.Pool, members[1].ID))
		state, err := onceqops.New(q).Redrive(ctx, db.Pool, members[2].ID)
		say("redrive: %s, %v", state, err)
		state, err = onceqops.New(q).Redrive(ctx, db.Pool, id)
		say("redrive: %s, %v", state, err)
		group(id)
		leases, err := q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{"kept"}})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		require.NoError(t, leases[0].Complete(ctx, nil))
		drain()
		db.Advance(2 * time.Second)
		drain()
		group(id)
	}

	// Members that add others, and jobs that wait for jobs that wait.
	id = enqueueGroup(onceq.DeadRun, "adds", inTx.Job(300))
	next := whole.Job("next")
	next.After = []onceq.JobRef{{ID: id}}
	last := enqueue(next)
	drain()
	group(id)
	group(last)

	// Jobs that exist: one that is leased, one that waits, one that is dead, one that is gone, and a key in the same call.
	leased := enqueue(plain.Job(1))
	leases, err = q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	dead := enqueue(kept.Job(-1))
	enqueue(keyed.Job(80))
	drain()
	free := enqueue(plain.Job(2))
	after := whole.Job("after")
	after.IfDead = onceq.DeadRun
	after.After = []onceq.JobRef{{ID: leased}, {ID: dead}, {ID: free}, keyed.Ref(80), keyed.Ref(81), {ID: last}}
	results, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{keyed.Job(81), after})
	require.NoError(t, err)
	id = results[1].ID
	require.NoError(t, db.Check())
	group(id)
	drain()
	group(id)
	require.NoError(t, leases[0].Complete(ctx, nil))
	drain()
	group(id)
	_, err = q.Enqueue(ctx, db.Pool, func() onceq.Job { j := whole.Job("never"); j.After = []onceq.JobRef{{ID: 1 << 40}}; return j }())
	say("an id that was not drawn: %t", err != nil)

	// A group is cancelled, while one member runs, and comes back.
	id = enqueueGroup(onceq.DeadWait, "cancelled", plain.Job(1), plain.Job(2), plain.Job(3))
	leases, err = q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	cancelled, asked, err := onceqops.New(q).CancelGroup(ctx, db.Pool, id)
	say("group cancelled: %d, %d, %v", cancelled, asked, err)
	group(id)
	require.NoError(t, leases[0].Release(ctx))
	group(id)
	redriven, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{IDs: append(groupIDs(t, q, db, id), id), States: []onceq.State{onceq.StateCancelled}})
	say("redriven: %d, %d, %v", redriven, taken, err)
	group(id)
	groups, err := onceqops.New(q).Groups(ctx, db.Pool, 0, 0)
	say("%d groups wait, %v", len(groups), err)
	why, err := onceqops.New(q).Explain(ctx, db.Pool, id)
	require.NoError(t, err)
	say("explained: %v", why.Cause())
	drain()
	group(id)
}

// groupIDs gives the ids of the members of a group.
func groupIDs(t *testing.T, q *onceq.Queue, db *queuetest.DB, id int64) (ids []int64) {
	t.Helper()
	members, err := listed(onceqops.New(q).Members(t.Context(), db.Pool, id))
	require.NoError(t, err)
	for _, m := range members {
		ids = append(ids, m.ID)
	}
	return ids
}

// What is sent in parts on Citus does the same on every server: the answers, and the rows that both leave. On a cluster
// (ONCEQ_TEST_DATABASE_URL) both are in parts, and Citus takes the parts.
func TestCitus_StatementsInPartsDoTheSame(t *testing.T) {
	t.Parallel()
	var seen [2][]string
	for i := range seen {
		t.Run(fmt.Sprintf("parts %t", i == 1), func(t *testing.T) {
			db := queuetest.New(t)
			if i == 1 {
				takeApart(db.Queue)
			}
			seen[i] = partPaths(t, db)
			require.NoError(t, db.Check())
		})
	}
	require.Equal(t, seen[0], seen[1])
}

// partPaths does what writes, and returns what it heard.
func partPaths(t *testing.T, db *queuetest.DB) (heard []string) {
	ctx, q := t.Context(), db.Queue
	say := func(format string, args ...any) { heard = append(heard, fmt.Sprintf(format, args...)) }
	enqueue := func(db onceq.DB, j onceq.Job) int64 {
		r, err := q.Enqueue(ctx, db, j)
		say("enqueued: duplicate %t, %s, %s, %v", r.Duplicate, r.State, r.Output, err)
		return r.ID
	}
	kind := onceq.Kind[int]{Name: "k", MaxAttempts: 2, Keep: time.Hour, Backoff: func(int, error) time.Duration { return 0 }}
	with := func(n int, key string) onceq.Job {
		j := kind.Job(n)
		j.Key = key
		return j
	}

	// One by one, in a transaction, many, and in a batch.
	later := with(1, "")
	later.Delay = time.Hour
	cancelled := enqueue(db.Pool, later)
	later.Key, later.Metadata = "later", map[string]string{"a": "b"}
	cancelledKeyed := enqueue(db.Pool, later)
	enqueue(db.Pool, with(2, ""))
	raw := with(0, "raw")
	raw.Kind, raw.Payload = "raw", []byte("{ }")
	enqueue(db.Pool, raw)
	for range 2 {
		enqueue(db.Pool, with(3, "three"))
	}
	enqueue(db.Pool, with(3, "never"))
	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
		enqueue(tx, with(4, "four"))
		return nil
	}))
	many := []onceq.Job{with(5, "five"), with(6, ""), with(4, "four")}
	for range 2 {
		results, err := q.EnqueueMany(ctx, db.Pool, many)
		require.NoError(t, err)
		for _, r := range results {
			say("one of many: duplicate %t, %s", r.Duplicate, r.State)
		}
	}
	for range 2 {
		batch := &pgx.Batch{}
		var pending []*onceq.Pending
		for _, j := range []onceq.Job{with(7, ""), with(8, "eight"), with(3, "three")} {
			p, err := q.EnqueueInBatch(batch, j)
			require.NoError(t, err)
			pending = append(pending, p)
		}
		require.NoError(t, db.Pool.SendBatch(ctx, batch).Close())
		for _, p := range pending {
			r, err := p.Result(ctx, db.Pool)
			say("in a batch: duplicate %t, %s, %v", r.Duplicate, r.State, err)
		}
	}

	// Handlers that succeed, fail, and end for good, with and without a transaction, with an effect.
	dead := map[string]int64{}
	var mu sync.Mutex
	handler := func(ctx context.Context, l *onceq.Lease, n int) error {
		if l.Key != "" {
			paid, err := onceq.Once(ctx, l, "pay", func(context.Context, string) (string, error) { return "paid", nil })
			if err != nil {
				return err
			}
			if err := l.SetResult(paid); err != nil {
				return err
			}
		}
		switch {
		case n == 3:
			mu.Lock()
			defer mu.Unlock()
			dead[l.Key] = l.ID
			return onceq.Fatal(errors.New("never"))
		case n%2 == 0 && l.Attempt == 1:
			return errors.New("not yet")
		}
		return nil
	}
	bytes := onceq.Kind[[]byte]{Name: "raw"}
	drain := func(handlers ...onceq.Handler) {
		w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, handlers...)
		require.NoError(t, err)
		require.NoError(t, w.Drain(ctx, 0))
	}
	drain(kind.Handle(handler), bytes.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, b []byte) error { return nil }))
	enqueue(db.Pool, with(5, "five")) // is completed and has a result
	enqueue(db.Pool, with(9, "nine"))
	drain(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
		if l.Attempt == 1 {
			return errors.New("not in the first transaction")
		}
		return nil
	}))

	kept := onceq.Kind[int]{Name: "kept", Keep: time.Hour}
	for n := range 3 {
		enqueue(db.Pool, kept.Job(n))
	}
	drain(kept.HandleBatch(10, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) error { return nil }))
	again := onceq.Kind[int]{Name: "again"}
	enqueue(db.Pool, again.Job(1))
	runs := 0
	for runs < 2 {
		drain(again.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
			if runs++; runs == 1 {
				return onceq.Reschedule(0)
			}
			return nil
		}))
	}
	say("ran %d times", runs)

	// A key that is free again.
	db.Advance(48 * time.Hour)
	enqueue(db.Pool, with(5, "five"))
	batch := &pgx.Batch{}
	p, err := q.EnqueueInBatch(batch, with(9, "nine"))
	require.NoError(t, err)
	require.NoError(t, db.Pool.SendBatch(ctx, batch).Close())
	r, err := p.Result(ctx, db.Pool)
	say("in a batch: duplicate %t, %s, %v", r.Duplicate, r.State, err)

	// What people do.
	for _, id := range []int64{cancelled, cancelledKeyed} {
		state, err := q.Cancel(ctx, db.Pool, id)
		say("cancelled: %s, %v", state, err)
	}
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 10})
	require.NoError(t, err)
	for _, l := range leases {
		state, err := q.Cancel(ctx, db.Pool, l.ID)
		say("asked to end: %s, %v", state, err)
		require.NoError(t, l.Release(ctx))
	}
	state, err := onceqops.New(q).Redrive(ctx, db.Pool, dead["three"])
	say("redriven: %s, %v", state, err)
	state, err = onceqops.New(q).Redrive(ctx, db.Pool, cancelledKeyed)
	say("redriven: %s, %v", state, err)
	err = onceqops.New(q).Discard(ctx, db.Pool, cancelled)
	say("discarded: %v", err)
	for range 2 { // with its key and its effect
		err = onceqops.New(q).Discard(ctx, db.Pool, dead["never"])
		say("discarded: %t, %t", err == nil, errors.Is(err, onceq.ErrNotFound))
	}
	effects, err := onceqops.New(q).Effects(ctx, db.Pool, dead["never"])
	say("%d effects, %v", len(effects), err)
	enqueue(db.Pool, with(3, "never"))
	later.Key = "moved"
	moved, err := onceqops.New(q).Move(ctx, db.Pool, enqueue(db.Pool, later), "other")
	say("moved: %t, %v", moved, err)
	n, err := onceqops.New(q).MoveMany(ctx, db.Pool, onceqops.Filter{All: true}, "another")
	say("moved: %d, %v", n, err)
	_, err = onceqops.New(q).Counts(ctx, db.Pool, onceqops.CountFilter{}) // of a minute that is not over
	require.NoError(t, err)
	rows, err := db.Pool.Query(ctx, `select kind, sum(started), sum(completed), sum(failed), sum(dead) from onceq.job_counts where span = 1 group by kind order by kind`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		var kind string
		var started, completed, failed, dead int
		err := row.Scan(&kind, &started, &completed, &failed, &dead)
		return fmt.Sprint(kind, started, completed, failed, dead), err
	})
	say("counted: %q, %v", all, err)

	// Outside of jobs.
	for range 2 {
		n, err := onceq.Do(ctx, q, onceq.FenceSpec{Scope: "s", Key: "do"}, func(context.Context, *onceq.FenceLease) (int, error) { return 7, nil })
		say("done: %d, %v", n, err)
	}
	_, err = onceq.Do(ctx, q, onceq.FenceSpec{Scope: "s", Key: "not"}, func(context.Context, *onceq.FenceLease) (int, error) {
		return 0, onceq.NotApplied(errors.New("no"))
	})
	say("not done: %v", err)
	for n := range 2 { // the second one takes over what is uncertain
		n, err := onceq.Do(ctx, q, onceq.FenceSpec{Scope: "s", Key: "unknown"}, func(context.Context, *onceq.FenceLease) (int, error) {
			if n == 0 {
				return 0, errors.New("reset")
			}
			return n, nil
		})
		say("done after a failure: %d, %v", n, err)
	}

	infos, err := onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{})
	require.NoError(t, err)
	for _, i := range infos {
		var errs []string
		for _, e := range i.Errors {
			errs = append(errs, fmt.Sprint(e.Attempt, e.Error))
		}
		say("%s %s %q %s %s, %d attempts, %v, %s", i.Queue, i.Kind, i.Key, i.State, i.Payload, i.Attempts, errs, i.Result)
	}
	return heard
}

// So do lanes, limits and rates. A worker on a plain server is woken and hands over, so only what comes out is compared.
func TestCitus_LanesInPartsDoTheSame(t *testing.T) {
	t.Parallel()
	var seen [2][]string
	for i := range seen {
		t.Run(fmt.Sprintf("parts %t", i == 1), func(t *testing.T) {
			db := queuetest.New(t, queuetest.Schema("onceq"))
			if i == 1 {
				takeApart(db.Queue)
			}
			seen[i] = lanePaths(t, db)
			require.NoError(t, db.Check())
		})
	}
	require.Equal(t, seen[0], seen[1])
}

// A promoter lets jobs go on that wait for others, in parts too. Who enqueues them here, and ends those that they wait for, does it as on
// a plain server.
func TestCitus_FollowersGoOnInParts(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	apart, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	takeApart(apart)
	enqueue := func(j onceq.Job) int64 {
		j.Kind, j.Payload = "k", 1
		r, err := q.Enqueue(ctx, db.Pool, j)
		require.NoError(t, err)
		return r.ID
	}
	claim := func(q *onceq.Queue, n int) (all []*onceq.Lease) {
		for end := time.Now().Add(time.Minute); len(all) < n && time.Now().Before(end); {
			some, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 10})
			require.NoError(t, err)
			all = append(all, some...)
		}
		require.GreaterOrEqual(t, len(all), n)
		return all
	}
	completes, dies := enqueue(onceq.Job{}), enqueue(onceq.Job{})
	var follow []int64
	for _, j := range []onceq.Job{{}, {Lane: "x"}, {Lane: "x", Limit: "y"}, {Limit: "y"}} {
		j.After = []onceq.JobRef{{ID: completes}}
		follow = append(follow, enqueue(j))
	}
	cancelled := enqueue(onceq.Job{After: []onceq.JobRef{{ID: completes}, {ID: dies}}, IfDead: onceq.DeadCancel})
	waits := enqueue(onceq.Job{After: []onceq.JobRef{{ID: dies}}})
	for _, l := range claim(q, 2) {
		if l.ID == completes {
			require.NoError(t, l.Complete(ctx, db.Pool))
		} else {
			require.NoError(t, l.Fail(ctx, onceq.Fatal(errors.New("dead"))))
		}
	}
	var went []int64
	for len(went) < len(follow) {
		for _, l := range claim(apart, 1) {
			went = append(went, l.ID)
			require.NoError(t, l.Complete(ctx, db.Pool))
		}
	}
	require.ElementsMatch(t, follow, went)
	state := func(id int64) onceq.State {
		info, err := q.Get(ctx, db.Pool, id)
		require.NoError(t, err)
		return info.State
	}
	require.Eventually(t, func() bool {
		_, err := apart.Claim(ctx, onceq.ClaimOptions{})
		require.NoError(t, err)
		return state(cancelled) == onceq.StateCancelled
	}, 5*time.Minute, 10*time.Millisecond)
	require.Equal(t, onceq.StateWaiting, state(waits))
}

// lanePaths does what lanes and limits are there for, and returns what it heard.
func lanePaths(t *testing.T, db *queuetest.DB) (heard []string) {
	ctx, q := t.Context(), db.Queue
	say := func(format string, args ...any) { heard = append(heard, fmt.Sprintf(format, args...)) }
	list := func() {
		infos, err := onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{})
		require.NoError(t, err)
		for _, i := range infos {
			var errs []string
			for _, e := range i.Errors {
				errs = append(errs, fmt.Sprint(e.Attempt, e.Error))
			}
			say("%s %q %q %q %s %s, %d attempts, %v", i.Kind, i.Key, i.Lane, i.Limit, i.State, i.Payload, i.Attempts, errs)
		}
		var places, stops string
		require.NoError(t, db.Pool.QueryRow(ctx, `select coalesce(string_agg(lane, ' ' order by lane), '') from onceq.lane_places`).Scan(&places))
		require.NoError(t, db.Pool.QueryRow(ctx, `select coalesce(string_agg(lane, ' ' order by lane), '') from onceq.lane_stops`).Scan(&stops))
		say("places %q, stops %q", places, stops)
	}
	job := func(n int, lane, limit string) onceq.Job {
		return onceq.Job{Kind: "k", Payload: n, Lane: lane, Limit: limit, MaxAttempts: 2}
	}
	keyed := func(j onceq.Job, key string) onceq.Job {
		j.Key = key
		return j
	}
	enqueue := func(db onceq.DB, j onceq.Job) int64 {
		r, err := q.Enqueue(ctx, db, j)
		say("enqueued: duplicate %t, %s, %t", r.Duplicate, r.State, err == nil) // the error names the job by its id
		return r.ID
	}
	require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "k", "two", 2))
	require.NoError(t, q.SetLimit(ctx, db.Pool, "shared", onceq.Limit{AtOnce: 2}))
	require.NoError(t, q.SetLimit(ctx, db.Pool, "gone", onceq.Limit{AtOnce: 2}))
	require.NoError(t, q.RemoveLimit(ctx, db.Pool, "gone"))

	// One by one, in a transaction, many, and in a batch.
	for n := range 3 {
		enqueue(db.Pool, job(n, "a", ""))
		enqueue(db.Pool, job(10+n, "a", "shared"))
		enqueue(db.Pool, job(20+n, "", "shared"))
		enqueue(db.Pool, keyed(job(30+n, "two", ""), fmt.Sprint("two", n/2)))
	}
	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
		enqueue(tx, keyed(job(40, "b", "gone"), "forty"))
		return nil
	}))
	for range 2 {
		results, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{keyed(job(42, "b", ""), "b2"), keyed(job(41, "b", "shared"), "b1"), job(43, "", "")})
		require.NoError(t, err)
		for _, r := range results {
			say("one of many: duplicate %t, %s", r.Duplicate, r.State)
		}
	}
	for range 2 {
		batch := &pgx.Batch{}
		var pending []*onceq.Pending
		for _, j := range []onceq.Job{job(50, "c", ""), keyed(job(51, "c", "shared"), "c1"), keyed(job(52, "c", ""), "b1")} {
			p, err := q.EnqueueInBatch(batch, j)
			require.NoError(t, err)
			pending = append(pending, p)
		}
		require.NoError(t, db.Pool.SendBatch(ctx, batch).Close())
		for _, p := range pending {
			r, err := p.Result(ctx, db.Pool)
			say("in a batch: duplicate %t, %s, %t", r.Duplicate, r.State, err == nil)
		}
	}
	later := job(60, "d", "")
	later.Delay = time.Hour
	delayed := enqueue(db.Pool, later)

	// In order, and no more at once than may be.
	var mu sync.Mutex
	order, live := make(map[string][]string), make(map[string]int)
	enter := func(l *onceq.Lease, n int) func() {
		mu.Lock()
		defer mu.Unlock()
		order[l.Lane] = append(order[l.Lane], fmt.Sprint(n, "/", l.Attempt))
		most := map[string]int{"k/two": 2, "shared": 2}
		lines := slices.DeleteFunc([]string{l.Lane, l.Limit}, func(s string) bool { return s == "" })
		for _, line := range lines {
			live[line]++
			require.LessOrEqual(t, live[line], max(1, most[line]), line)
		}
		return func() {
			mu.Lock()
			defer mu.Unlock()
			for _, line := range lines {
				live[line]--
			}
		}
	}
	kind := onceq.Kind[int]{Name: "k", Backoff: func(int, error) time.Duration { return time.Millisecond }}
	drain := func(h onceq.Handler) {
		clear(order)
		w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, h)
		require.NoError(t, err)
		for left := true; left; { // also those that come back in a moment
			require.NoError(t, w.Drain(ctx, 0))
			const soon = `select exists (select from onceq.jobs where run_at < now() + interval '1 second') or exists (select from onceq.job_waits where run_at < now() + interval '1 second')`
			require.NoError(t, db.Pool.QueryRow(ctx, soon).Scan(&left))
		}
		for _, lane := range []string{"k/a", "k/b", "k/c", "k/d"} {
			say("%s: %v", lane, order[lane])
		}
	}
	fails := func(l *onceq.Lease, n int) error {
		if n%10 == 1 && l.Attempt == 1 {
			return errors.New("not yet")
		}
		return nil
	}
	drain(kind.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
		defer enter(l, n)()
		return fails(l, n)
	}))
	list()

	// In transactions, alone and together, kept, and once more.
	fill := func() {
		for n := range 2 {
			enqueue(db.Pool, job(n, "a", ""))
			enqueue(db.Pool, job(10+n, "b", "shared"))
			enqueue(db.Pool, job(20+n, "", "shared"))
			j := keyed(job(n, "c", "shared"), fmt.Sprint("c", n, " ", len(heard)))
			j.LaneRule = onceq.Overtake
			enqueue(db.Pool, j)
		}
	}
	fill()
	kind.Keep = time.Hour
	drain(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
		defer enter(l, n)()
		return fails(l, n)
	}))
	list()
	fill()
	drain(kind.HandleBatch(10, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) error { return nil }))
	again := make(map[int64]bool)
	fill()
	drain(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
		defer enter(l, n)()
		if !again[l.ID] {
			mu.Lock()
			defer mu.Unlock()
			again[l.ID] = true
			return onceq.Reschedule(time.Duration(n%2) * 10 * time.Millisecond)
		}
		return nil
	}))
	list()

	// By hand, and a lane that stops.
	stops := job(70, "stop", "shared")
	stops.LaneRule, stops.MaxAttempts = onceq.StopLane, 1
	first := enqueue(db.Pool, stops)
	second := enqueue(db.Pool, job(71, "stop", "shared"))
	third := enqueue(db.Pool, job(72, "stop", ""))
	claim := func() (all []*onceq.Lease) {
		for len(all) == 0 {
			var err error
			all, err = q.Claim(ctx, onceq.ClaimOptions{Limit: 10})
			require.NoError(t, err)
		}
		for _, l := range all {
			say("claimed %s of %q and %q", l.Payload, l.Lane, l.Limit)
		}
		return all
	}
	leases := claim()
	require.Len(t, leases, 1)
	require.NoError(t, leases[0].Fail(ctx, errors.New("dead")))
	list()
	state, err := onceqops.New(q).Redrive(ctx, db.Pool, first)
	say("redriven: %s, %v", state, err)
	leases = claim()
	require.NoError(t, leases[0].Release(ctx))
	leases = claim()
	state, err = q.Cancel(ctx, db.Pool, leases[0].ID)
	say("asked to end: %s, %v", state, err)
	require.NoError(t, leases[0].Complete(ctx, db.Pool))
	leases = claim()
	require.Equal(t, second, leases[0].ID)
	batch := &pgx.Batch{}
	require.NoError(t, leases[0].CompleteInBatch(batch))
	require.NoError(t, db.Pool.SendBatch(ctx, batch).Close())
	leases = claim()
	require.Equal(t, third, leases[0].ID)
	fourth := enqueue(db.Pool, job(73, "stop", "shared"))
	state, err = q.Cancel(ctx, db.Pool, fourth)
	say("cancelled: %s, %v", state, err)
	state, err = onceqops.New(q).Redrive(ctx, db.Pool, fourth)
	say("redriven: %s, %v", state, err)
	db.Advance(time.Hour) // the lease of the third has run out
	state, err = q.Cancel(ctx, db.Pool, third)
	say("cancelled: %s, %v", state, err)
	list()
	require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, third))
	later.Payload = 61
	delayed = max(delayed, enqueue(db.Pool, later))
	state, err = onceqops.New(q).Retry(ctx, db.Pool, delayed)
	say("retried: %s, %v", state, err)
	require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "k", "", 3))
	drain(kind.Handle(func(ctx context.Context, l *onceq.Lease, n int) error { return nil }))

	// At a rate.
	require.NoError(t, q.SetLimit(ctx, db.Pool, "rate", onceq.Limit{Rate: 100, Burst: 11}))
	for n := range 40 {
		_, err := q.Enqueue(ctx, db.Pool, job(n, fmt.Sprint(n%20), "rate"))
		require.NoError(t, err)
	}
	var starts []time.Time
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, kind.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
		mu.Lock()
		defer mu.Unlock()
		if l.Limit == "rate" { // others have waited
			starts = append(starts, time.Now())
		}
		return nil
	}))
	require.NoError(t, err)
	for end := time.Now().Add(time.Minute); len(starts) < 40 && time.Now().Before(end); time.Sleep(time.Millisecond) {
		require.NoError(t, w.Drain(ctx, 0)) // what is due
	}
	require.Len(t, starts, 40)
	slices.SortFunc(starts, time.Time.Compare)
	for i, at := range starts[21:] {
		require.GreaterOrEqual(t, at.Sub(starts[i]), 100*time.Millisecond, "of %d jobs", 22)
	}
	lanes, err := onceqops.New(q).Lanes(ctx, db.Pool, onceqops.LaneFilter{})
	say("%v, %v", lanes, err)
	limits, err := onceqops.New(q).Limits(ctx, db.Pool, onceqops.LimitFilter{})
	for _, l := range limits {
		say("%q %s", l.Name, l.Limit)
	}
	say("%v", err)
	list()
	return heard
}
