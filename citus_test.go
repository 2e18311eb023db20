package onceq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// What may come between two parts. Another session sees what was committed before it, and may be sent something in between.

// between is a transaction that calls before with each statement before it is sent.
type between struct {
	pgx.Tx
	before func(sql string)
}

func (b between) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	b.before(sql)
	return b.Tx.Query(ctx, sql, args...)
}

// before calls fn once, before a statement with these texts.
func before(fn func(), texts ...string) func(string) {
	done := false
	return func(sql string) {
		if !done && !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(sql, text) }) {
			done = true
			fn()
		}
	}
}

func inPartsDB(t *testing.T) (*queuetest.DB, *onceq.Queue) {
	t.Helper()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	db.Queue.TakeApart()
	return db, db.Queue
}

func promoteOnce(t *testing.T, db *queuetest.DB) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return db.Queue.PromoteIn(t.Context(), tx) }))
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
			q.TakeApart()
		}
		ctx := t.Context()
		j, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: 1, Lane: "x"})
		require.NoError(t, err)
		promoter, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		require.NoError(t, q.PromoteIn(ctx, promoter))
		tx, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		var l *onceq.Lease
		_, err = q.Cancel(ctx, between{tx, before(func() {
			require.NoError(t, promoter.Commit(ctx))
			l = claimOf(t, q, j.ID)
		}, "onceq.request_cancels(")}, j.ID)
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
	_, err = q.Enqueue(ending, between{tx, before(end, "onceq.enqueue_one(")}, onceq.Job{Kind: "k", Key: "a"})
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
		r, err := q.Enqueue(t.Context(), bare{db.Pool}, onceq.Job{Kind: "k", Key: "a"})
		require.NoError(t, err)
		require.Equal(t, again, r.Duplicate)
	}
}

// bare is a DB in no transaction, of a type without BeginTx.
type bare struct{ onceq.DB }

// Whoever completes a job in a batch whose lease is lost is reported, whichever part notices.
func TestCitus_AStaleCompletionInABatchIsReported(t *testing.T) {
	t.Parallel()
	for _, lane := range []string{"", "x"} {
		db := queuetest.New(t, queuetest.Schema("onceq"))
		ctx := t.Context()
		var events []onceq.EventType
		q, err := onceq.New(db.Pool, &onceq.Config{Hook: hook(func(e onceq.Event) { events = append(events, e.Type) })})
		require.NoError(t, err)
		q.TakeApart()
		m, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: 1, Lane: lane})
		require.NoError(t, err)
		_, err = q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "f", Payload: 1, After: []onceq.JobRef{{ID: m.ID}}})
		require.NoError(t, err)
		require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return q.PromoteIn(ctx, tx) }))
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

type hook func(onceq.Event)

func (h hook) Event(_ context.Context, e onceq.Event) { h(e) }

// A job that stopped its lane and comes back to wait for others no longer stops it: the lane is called.
func TestRedrive_AFollowerThatStoppedItsLane(t *testing.T) {
	t.Parallel()
	for _, apart := range []bool{false, true} {
		db := queuetest.New(t, queuetest.Schema("onceq"))
		q, ctx := db.Queue, t.Context()
		if apart {
			q.TakeApart()
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
				db.Queue.TakeApart()
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
