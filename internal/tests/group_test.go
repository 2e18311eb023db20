package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

var (
	part  = onceq.Kind[int]{Name: "part"}
	whole = onceq.Kind[string]{Name: "whole"}
)

func groupClaim(t testing.TB, q *onceq.Queue) map[int64]*onceq.Lease {
	t.Helper()
	byID := map[int64]*onceq.Lease{}
	for _, l := range laneClaim(t, q, 100) {
		byID[l.ID] = l
	}
	return byID
}

func groupOf(t testing.TB, db *queuetest.DB, id int64) onceq.GroupInfo {
	t.Helper()
	g, err := db.Queue.Group(context.Background(), db.Pool, id)
	require.NoError(t, err)
	g.Oldest = 0
	return g
}

// listed gives what an iterator yields, up to its error.
func listed[T any](all iter.Seq2[T, error]) (list []T, err error) {
	for one, err := range all {
		if err != nil {
			return list, err
		}
		list = append(list, one)
	}
	return list, nil
}

func membersOf(t testing.TB, db *queuetest.DB, id int64) map[int64]onceq.Member {
	t.Helper()
	all := map[int64]onceq.Member{}
	for after := int64(0); ; {
		page, err := listed(onceqops.New(db.Queue).Members(context.Background(), db.Pool, id, onceqops.Filter{After: after, Limit: 2}))
		require.NoError(t, err)
		for _, m := range page {
			require.Greater(t, m.ID, after)
			after, all[m.ID] = m.ID, m
		}
		if len(page) == 0 {
			return all
		}
	}
}

// The job that waits runs once, after all others, however they are handled, and reads what they returned page by page.
func TestGroup_RunsOnceWhenAllAreDone(t *testing.T) {
	t.Parallel()
	const n = 25
	lane, limit, key := part, part, part
	lane.Lane = func(i int) string { return fmt.Sprint(i % 3) }
	limit.Limit = func(int) string { return "provider" }
	key.Key = func(i int) string { return fmt.Sprint(i) }
	kept := key
	kept.Keep = time.Hour
	both := lane
	both.Limit, both.Key = limit.Limit, key.Key
	for name, kind := range map[string]onceq.Kind[int]{"plain": part, "lane": lane, "limit": limit, "key": key, "kept": kept, "all": both} {
		for how, handle := range map[string]func(*onceq.Kind[int]) onceq.Handler{
			"lease": func(k *onceq.Kind[int]) onceq.Handler {
				return k.Handle(func(_ context.Context, l *onceq.Lease, i int) error { return l.SetResult(i) })
			},
			"transaction": func(k *onceq.Kind[int]) onceq.Handler {
				return k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, i int) error {
					_, err := tx.Exec(ctx, `select 1`)
					return errors.Join(err, l.SetResult(i))
				})
			},
			"silent": func(k *onceq.Kind[int]) onceq.Handler {
				return k.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
					_, err := tx.Exec(ctx, `select 1`)
					return err
				})
			},
			"batch": func(k *onceq.Kind[int]) onceq.Handler {
				return k.HandleBatch(7, func(ctx context.Context, tx pgx.Tx, items []onceq.Item[int]) error {
					for _, i := range items {
						if err := i.SetResult(i.Payload); err != nil {
							return err
						}
					}
					return nil
				})
			},
		} {
			t.Run(name+", "+how, func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 4)
				db := queuetest.New(t)
				ctx, q := t.Context(), db.Queue
				jobs := make([]onceq.Job, n)
				for i := range jobs {
					jobs[i] = kind.Job(i)
				}
				g, err := q.EnqueueGroup(ctx, db.Pool, jobs, whole.Job("x"))
				require.NoError(t, err)
				require.Len(t, g.Members, n)
				total := n * (n - 1) / 2
				if how == "silent" {
					total = 0
				}
				require.NoError(t, db.Check())
				require.Equal(t, onceq.GroupInfo{ID: g.Then.ID, State: onceq.StateWaiting, Waits: true, Total: n, Open: n}, groupOf(t, db, g.Then.ID))
				runs := 0
				db.Drain(handle(&kind), whole.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
					runs++
					sum, count := 0, 0
					for m, err := range l.Members(ctx) {
						if err != nil {
							return err
						}
						var i int
						if how == "silent" {
							if m.Result != nil {
								t.Errorf("%+v", m)
							}
						} else if err := json.Unmarshal(m.Result, &i); err != nil {
							return fmt.Errorf("%d: %q: %w", m.ID, m.Result, err)
						}
						if m.State != onceq.StateCompleted {
							t.Errorf("%+v", m)
						}
						sum, count = sum+i, count+1
					}
					counts, err := l.Group(ctx)
					if count != n || sum != total || counts.Completed != n {
						t.Errorf("%d members, sum %d, counted %+v, %v", count, sum, counts, err)
					}
					return nil
				}))
				require.Equal(t, 1, runs)
				require.NoError(t, db.Check())
				require.Equal(t, onceq.GroupInfo{ID: g.Then.ID, State: onceq.StateCompleted, Total: n, Completed: n}, groupOf(t, db, g.Then.ID))
			})
		}
	}
}

// A job waits for others that exist: unclaimed, leased, delayed, in a lane, dead, cancelled, held back by a lock, done and gone.
func TestAfter_JobsThatExist(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	laned := part
	laned.Lane = func(int) string { return "a" }
	keyed := part
	keyed.Name, keyed.Key = "keyed", func(i int) string { return fmt.Sprint(i) }
	for name, test := range map[string]struct {
		job    onceq.Job
		before func(t *testing.T, db *queuetest.DB, id int64) *onceq.Lease // returns a lease to complete
		want   onceq.State
		waits  bool
	}{
		"unclaimed": {job: part.Job(1), waits: true, want: onceq.StateCompleted},
		"leased": {job: part.Job(1), waits: true, want: onceq.StateCompleted, before: func(t *testing.T, db *queuetest.DB, id int64) *onceq.Lease {
			return laneClaimOne(t, db.Queue, id)
		}},
		"in a lane": {job: laned.Job(1), waits: true, want: onceq.StateCompleted},
		"keyed":     {job: keyed.Job(1), waits: true, want: onceq.StateCompleted},
		"done": {job: part.Job(1), want: onceq.StateCompleted, before: func(t *testing.T, db *queuetest.DB, id int64) *onceq.Lease {
			require.NoError(t, laneClaimOne(t, db.Queue, id).Complete(ctx, nil))
			return nil
		}},
		"dead": {job: part.Job(1), waits: true, want: onceq.StateDead, before: func(t *testing.T, db *queuetest.DB, id int64) *onceq.Lease {
			require.NoError(t, laneClaimOne(t, db.Queue, id).Fail(ctx, onceq.Fatal(errors.New("no"))))
			return nil
		}},
		"cancelled": {job: part.Job(1), want: onceq.StateCancelled, before: func(t *testing.T, db *queuetest.DB, id int64) *onceq.Lease {
			_, err := db.Queue.Cancel(ctx, db.Pool, id)
			require.NoError(t, err)
			return nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			q := db.Queue
			first, err := q.Enqueue(ctx, db.Pool, test.job)
			require.NoError(t, err)
			var lease *onceq.Lease
			if test.before != nil {
				lease = test.before(t, db, first.ID)
			}
			job := whole.Job("x")
			job.After = []onceq.JobRef{{ID: first.ID}}
			then, err := q.Enqueue(ctx, db.Pool, job)
			require.NoError(t, err)
			require.False(t, then.Duplicate)
			require.NoError(t, db.Check())
			if test.waits {
				for id, l := range groupClaim(t, q) {
					require.Equal(t, first.ID, id)
					lease = l
				}
				if lease != nil {
					require.NoError(t, lease.Complete(ctx, nil))
				} else {
					require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, first.ID))
					test.want = onceq.StateCancelled
				}
				require.NoError(t, db.Check())
			}
			require.Equal(t, test.want, membersOf(t, db, then.ID)[first.ID].State)
			leases := groupClaim(t, q)
			require.Len(t, leases, 1)
			members, err := listed(leases[then.ID].Members(ctx))
			require.NoError(t, err)
			require.Len(t, members, 1)
			require.Equal(t, onceq.Member{ID: first.ID, State: test.want, Kind: members[0].Kind}, members[0])
			require.NoError(t, leases[then.ID].Complete(ctx, nil))
			require.NoError(t, db.Check())
		})
	}
}

// What a dead member means is declared; a cancelled one counts as finished. A redriven or discarded member lets the job go on.
func TestGroup_DeadMembers(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	scene := func(t *testing.T, rule onceq.DeadRule) (db *queuetest.DB, bad int64, then int64) {
		db = queuetest.New(t)
		job := whole.Job("x")
		job.IfDead = rule
		g, err := db.Queue.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1), part.Job(2)}, job)
		require.NoError(t, err)
		leases := groupClaim(t, db.Queue)
		require.Len(t, leases, 2)
		bad = g.Members[0].ID
		require.NoError(t, leases[bad].Fail(ctx, onceq.Fatal(errors.New("no"))))
		require.NoError(t, db.Check())
		require.Empty(t, groupClaim(t, db.Queue))
		require.Equal(t, onceq.GroupInfo{ID: g.Then.ID, State: onceq.StateWaiting, Waits: true, IfDead: rule, Total: 2, Open: 1, Dead: 1}, groupOf(t, db, g.Then.ID))
		require.Equal(t, rule == onceq.DeadWait, strings.HasSuffix(groupOf(t, db, g.Then.ID).String(), fmt.Sprintf("1 of 2 members are finished, 1 dead, and so job %d waits until that is redriven, resolved or discarded (DeadWait)", g.Then.ID)))
		require.NoError(t, leases[g.Members[1].ID].Complete(ctx, nil))
		require.NoError(t, db.Check())
		return db, bad, g.Then.ID
	}
	finish := func(t *testing.T, db *queuetest.DB, id int64) {
		t.Helper()
		leases := groupClaim(t, db.Queue)
		require.Len(t, leases, 1)
		require.Contains(t, leases, id)
		require.NoError(t, leases[id].Complete(ctx, nil))
		require.NoError(t, db.Check())
	}
	t.Run("wait, redriven", func(t *testing.T) {
		t.Parallel()
		db, bad, then := scene(t, onceq.DeadWait)
		require.Empty(t, groupClaim(t, db.Queue))
		_, err := onceqops.New(db.Queue).Redrive(ctx, db.Pool, bad)
		require.NoError(t, err)
		require.NoError(t, db.Check())
		finish(t, db, bad)
		finish(t, db, then)
	})
	t.Run("wait, discarded", func(t *testing.T) {
		t.Parallel()
		db, bad, then := scene(t, onceq.DeadWait)
		require.Empty(t, groupClaim(t, db.Queue))
		require.NoError(t, onceqops.New(db.Queue).Discard(ctx, db.Pool, bad))
		require.NoError(t, db.Check())
		finish(t, db, then)
	})
	t.Run("run", func(t *testing.T) {
		t.Parallel()
		db, bad, then := scene(t, onceq.DeadRun)
		require.Equal(t, onceq.StateDead, membersOf(t, db, then)[bad].State)
		finish(t, db, then)
	})
	t.Run("cancel", func(t *testing.T) {
		t.Parallel()
		db, bad, then := scene(t, onceq.DeadCancel)
		require.Empty(t, groupClaim(t, db.Queue))
		info := groupOf(t, db, then)
		require.Equal(t, onceq.GroupInfo{ID: then, State: onceq.StateCancelled, IfDead: onceq.DeadCancel, Total: 2, Completed: 1, Dead: 1}, info)
		require.Equal(t, fmt.Sprintf("group %d: 2 of 2 members are finished, 1 dead, and so job %[1]d was cancelled (DeadCancel)", then), info.String())
		require.Contains(t, explained(t, db, then, onceqops.CauseCancelled)[0].Text, "with the error: a job that it waited for is dead or was cancelled (DeadCancel)")
		require.NoError(t, db.Check())
		// Both come back: the one that waits does so again.
		for _, id := range []int64{bad, then} {
			_, err := onceqops.New(db.Queue).Redrive(ctx, db.Pool, id)
			require.NoError(t, err)
			require.NoError(t, db.Check())
		}
		finish(t, db, bad)
		_, err := db.Queue.Cancel(ctx, db.Pool, then)
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("group %d: 2 of 2 members are finished", then), groupOf(t, db, then).String(), "now it was somebody else")
		_, err = onceqops.New(db.Queue).Redrive(ctx, db.Pool, then)
		require.NoError(t, err)
		finish(t, db, then)
	})
}

// Members that have not completed say of which kind they are and what their last error was, wherever they are.
func TestMembers_KindAndError(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	kept := onceq.Kind[int]{Name: "kept", Keep: time.Hour}
	laned := onceq.Kind[int]{Name: "laned", Lane: func(int) string { return "a" }}
	jobs := []onceq.Job{part.Job(0), part.Job(1), part.Job(2), part.Job(3), kept.Job(4), laned.Job(5), laned.Job(6)}
	jobs[5].Delay, jobs[6].Delay = time.Hour, time.Hour // in the waiting room
	g, err := q.EnqueueGroup(ctx, db.Pool, jobs, whole.Job("x"))
	require.NoError(t, err)
	var again atomic.Int64
	run := func(_ context.Context, _ *onceq.Lease, i int) error {
		switch {
		case i == 0:
			return onceq.Fatal(errors.New("torn"))
		case i == 1:
			return onceq.RetryAfter(time.Hour, errors.New("no route"))
		case i == 4 && again.Add(1) == 1:
			return onceq.RetryAfter(time.Nanosecond, errors.New("not yet"))
		}
		return nil
	}
	_, err = q.Cancel(ctx, db.Pool, g.Members[3].ID)
	require.NoError(t, err)
	for again.Load() < 2 {
		db.Drain(part.Handle(run), kept.Handle(run))
	}
	check := func(i int, want onceq.Member) {
		t.Helper()
		want.ID = g.Members[i].ID
		require.Equal(t, want, membersOf(t, db, g.Then.ID)[want.ID])
	}
	check(0, onceq.Member{Kind: "part", State: onceq.StateDead, Error: "torn"})
	check(1, onceq.Member{Kind: "part", State: onceq.StateRetrying, Error: "no route"})
	check(2, onceq.Member{State: onceq.StateCompleted})
	check(3, onceq.Member{Kind: "part", State: onceq.StateCancelled})
	check(4, onceq.Member{State: onceq.StateCompleted})
	check(5, onceq.Member{Kind: "laned", State: onceq.StateDelayed})
	_, err = onceqops.New(q).Redrive(ctx, db.Pool, g.Members[0].ID)
	require.NoError(t, err)
	check(0, onceq.Member{Kind: "part", State: onceq.StateWaiting, Error: "torn"})
	db.Drain(part.Handle(run))
	require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, g.Members[0].ID))
	check(0, onceq.Member{State: onceq.StateCancelled})
}

// A handler adds members to its group together with its completion, and a job that waits may be a member itself.
func TestGroup_AddMembersAndNested(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	inner, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(3)}, whole.Job("inner"))
	require.NoError(t, err)
	outer := whole.Job("outer")
	outer.After = []onceq.JobRef{{ID: inner.Then.ID}}
	last, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(2)}, outer)
	require.NoError(t, err)
	require.NoError(t, db.Check())
	var failed atomic.Bool
	var order []string
	db.Drain(part.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
		for range min(n, 2) {
			if _, err := l.AddMembers(ctx, tx, part.Job(n-1)); err != nil {
				return err
			}
		}
		if n == 3 && failed.CompareAndSwap(false, true) {
			return onceq.RetryAfter(0, errors.New("what was added is rolled back"))
		}
		return nil
	}), whole.Handle(func(_ context.Context, _ *onceq.Lease, name string) error {
		order = append(order, name)
		return nil
	}))
	require.Equal(t, []string{"inner", "outer"}, order)
	require.Equal(t, onceq.GroupInfo{ID: inner.Then.ID, State: onceq.StateCompleted, Total: 11, Completed: 11}, groupOf(t, db, inner.Then.ID))
	require.Equal(t, onceq.GroupInfo{ID: last.Then.ID, State: onceq.StateCompleted, Total: 6, Completed: 6}, groupOf(t, db, last.Then.ID))
	require.NoError(t, db.Check())
}

// A member whose group is gone still adds jobs, for which nobody waits.
func TestGroup_AddMembersOfAGroupThatIsGone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, whole.Job("x"))
	require.NoError(t, err)
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, g.Then.ID))
	require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, g.Then.ID))
	flowReap(t, db)
	require.Zero(t, repairCount(t, db, `select count(*) from onceq.job_members`))
	for l := laneClaimOne(t, q, g.Members[0].ID); ; { // what it adds may add others
		results, err := l.AddMembers(ctx, db.Pool, part.Job(2))
		require.NoError(t, err)
		require.NoError(t, l.Complete(ctx, nil))
		require.NoError(t, db.Check())
		if l.ID != g.Members[0].ID {
			break
		}
		l = laneClaimOne(t, q, results[0].ID)
	}
	require.Zero(t, repairCount(t, db, `select count(*) from onceq.job_members`))
}

// A worker that has lost its lease tells nobody anything, and adds nothing.
func TestGroup_AStaleCompletionTellsNothing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, whole.Job("x"))
	require.NoError(t, err)
	stale := laneClaimOne(t, q, g.Members[0].ID)
	db.Advance(time.Hour)
	fresh := laneClaimOne(t, q, g.Members[0].ID)
	require.ErrorIs(t, stale.Complete(ctx, nil), onceq.ErrLeaseLost)
	_, err = stale.AddMembers(ctx, db.Pool, part.Job(2))
	require.ErrorIs(t, err, onceq.ErrLeaseLost)
	require.Equal(t, 1, groupOf(t, db, g.Then.ID).Open)
	require.Empty(t, groupClaim(t, q))
	require.NoError(t, fresh.Complete(ctx, nil))
	require.NoError(t, laneClaimOne(t, q, g.Then.ID).Complete(ctx, nil))
	require.NoError(t, db.Check())
}

// A member whose end was told is not told again: nobody looks at its group because its row in the history is discarded.
func TestGroup_AnEndIsToldOnce(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	kept := part
	kept.Keep = time.Hour
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{kept.Job(1), part.Job(2)}, whole.Job("x"))
	require.NoError(t, err)
	ran := db.RunOne(kept.Handle(func(_ context.Context, l *onceq.Lease, _ int) error { return l.SetResult("done") }))
	require.Equal(t, onceq.StateCompleted, ran.State)
	first := g.Members[0].ID
	leases := groupClaim(t, q)
	const called = `select count(*) from onceq.lane_calls where starts_with(lane, E'\x1f')`
	before := sqlOne[int](t, db, called)
	require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, first))
	require.Equal(t, before, sqlOne[int](t, db, called))
	require.JSONEq(t, `"done"`, string(membersOf(t, db, g.Then.ID)[first].Result))
	require.NoError(t, leases[g.Members[1].ID].Complete(ctx, nil))
	require.NoError(t, laneClaimOne(t, q, g.Then.ID).Complete(ctx, nil))
}

// Bad input is an error before anything is written. A job that waits and whose key is taken is a duplicate, and nothing is
// written; a member whose key is taken is the job that has it.
func TestGroup_BadInputAndDuplicates(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	keyed := func(key string, after ...onceq.JobRef) onceq.Job {
		return onceq.Job{Kind: "k", Key: key, Payload: 1, After: after}
	}
	by := func(key string) onceq.JobRef { return onceq.JobRef{Scope: "k", Key: key} }
	first, err := q.Enqueue(ctx, db.Pool, keyed("a"))
	require.NoError(t, err)
	says := map[string]string{
		"itself":      `After[0] names key "b" in scope "k", which is that of the job itself; a job cannot wait for itself`,
		"a later one": `[0].After[0] names key "c" in scope "k", which is that of a later one in this call (the one with index 1); put that one before`,
		"no key":      `After[0] has the Scope "keyless" and no Key; Ref is for kinds that have a Key, so set the ID of the job instead`,
	}
	keyless := onceq.Kind[int]{Name: "keyless"}
	for name, jobs := range map[string][]onceq.Job{
		"unknown key":        {keyed("b", by("nobody"))},
		"unknown id":         {keyed("b", onceq.JobRef{ID: 1 << 40})},
		"negative id":        {keyed("b", onceq.JobRef{ID: -1})},
		"nothing":            {keyed("b", onceq.JobRef{})},
		"both":               {keyed("b", onceq.JobRef{ID: first.ID, Scope: "k", Key: "a"})},
		"no key":             {keyed("b", keyless.Ref(1))},
		"no scope":           {keyed("b", onceq.JobRef{Key: "a"})},
		"itself":             {keyed("b", by("b"))},
		"a later one":        {keyed("b", by("c")), keyed("c")},
		"a rule without any": {{Kind: "k", IfDead: onceq.DeadRun}},
		"a bad rule":         {{Kind: "k", IfDead: 7, After: []onceq.JobRef{by("a")}}},
		"replace":            {{Kind: "k", Key: "b", Replace: onceq.ReplaceTime, After: []onceq.JobRef{by("a")}}},
	} {
		err := pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			_, err := q.EnqueueMany(ctx, tx, jobs)
			var bad *onceq.InvalidError
			refused := func() {
				t.Helper()
				require.ErrorAs(t, err, &bad, name)
				require.ErrorContains(t, err, says[name], name)
			}
			refused()
			if len(jobs) == 1 {
				_, err = q.Enqueue(ctx, tx, jobs[0])
				refused()
			}
			_, err = q.EnqueueGroup(ctx, tx, jobs, whole.Job("x"))
			refused()
			_, err = tx.Exec(ctx, `select 1`)
			return err
		})
		require.NoError(t, err, name)
	}
	_, err = q.EnqueueGroup(ctx, db.Pool, []onceq.Job{keyed("b")}, keyed("b"))
	require.ErrorContains(t, err, "members[0].Key")
	_, err = q.EnqueueInBatch(&pgx.Batch{}, keyed("b", by("a")))
	require.ErrorContains(t, err, "After")
	all, err := onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{})
	require.NoError(t, err)
	require.Len(t, all, 1)

	// A chain in one call, and all of it again.
	chain := []onceq.Job{keyed("b", by("a")), keyed("c", by("b"), by("a"))}
	made, err := q.EnqueueMany(ctx, db.Pool, chain)
	require.NoError(t, err)
	again, err := q.EnqueueMany(ctx, db.Pool, chain)
	require.NoError(t, err)
	for i, r := range again {
		require.Equal(t, onceq.Result{ID: made[i].ID, Duplicate: true, State: onceq.StateWaiting}, r)
	}
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1), keyed("a"), keyed("c", by("b"), by("a"))}, keyed("group"))
	require.NoError(t, err)
	require.Equal(t, []bool{false, true, true}, []bool{g.Members[0].Duplicate, g.Members[1].Duplicate, g.Members[2].Duplicate})
	before := groupOf(t, db, g.Then.ID)
	require.Equal(t, 3, before.Open)
	twice, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(9)}, keyed("group"))
	require.NoError(t, err)
	require.Equal(t, onceq.Group{Then: onceq.Result{ID: g.Then.ID, Duplicate: true, State: onceq.StateWaiting}}, twice)
	require.Equal(t, before, groupOf(t, db, g.Then.ID))
	require.NoError(t, db.Check())
	var order []int64
	db.Drain(part.Handle(func(context.Context, *onceq.Lease, int) error { return nil }),
		onceq.Kind[int]{Name: "k"}.Handle(func(_ context.Context, l *onceq.Lease, _ int) error { order = append(order, l.ID); return nil }))
	require.Equal(t, []int64{first.ID, made[0].ID, made[1].ID, g.Then.ID}, order)
}

// A group without members is its last job, which starts at once.
func TestGroup_WithoutMembers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	job := whole.Job("x")
	job.IfDead = onceq.DeadCancel
	g, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, nil, job)
	require.NoError(t, err)
	info := groupOf(t, db, g.Then.ID)
	require.Equal(t, onceq.GroupInfo{ID: g.Then.ID, State: onceq.StateWaiting}, info)
	require.Equal(t, "group 1: job 1 waits for no others", info.String())
	_, _, err = onceqops.New(db.Queue).CancelGroup(t.Context(), db.Pool, g.Then.ID)
	require.ErrorIs(t, err, onceq.ErrNotFound)
	require.NoError(t, db.Check())
}

// Jobs that would wait for each other are refused before anything is written, and the transaction stays usable.
func TestGroup_NobodyWaitsInACircle(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	keyed := func(key string, after ...onceq.JobRef) onceq.Job {
		return onceq.Job{Kind: "k", Key: key, Payload: 1, After: after}
	}
	by := func(key string) onceq.JobRef { return onceq.JobRef{Scope: "k", Key: key} }
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, keyed("group"))
	require.NoError(t, err)
	more, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{keyed("next", by("group")), keyed("last", by("next")), keyed("free")})
	require.NoError(t, err)
	member := laneClaim(t, q, 1)[0]
	require.Equal(t, g.Members[0].ID, member.ID)
	rows := func() int {
		return sqlOne[int](t, db, `select (select count(*) from onceq.jobs)::int + (select count(*) from onceq.job_waits)::int + (select count(*) from onceq.job_members)::int`)
	}
	before := rows()
	for name, test := range map[string]struct {
		jobs []onceq.Job
		ids  []int64
	}{
		"the one that waits":             {[]onceq.Job{part.Job(2), keyed("group")}, []int64{g.Then.ID}},
		"one that waits for it":          {[]onceq.Job{part.Job(2), keyed("next")}, []int64{more[0].ID, g.Then.ID}},
		"one that waits for that":        {[]onceq.Job{keyed("last")}, []int64{more[1].ID, g.Then.ID}},
		"a new one that waits for it":    {[]onceq.Job{keyed("new", by("group"))}, []int64{g.Then.ID}},
		"a new one, by id":               {[]onceq.Job{keyed("new", onceq.JobRef{ID: more[1].ID})}, []int64{more[1].ID, g.Then.ID}},
		"through one of the same call":   {[]onceq.Job{keyed("a", by("next")), keyed("b", by("a"))}, []int64{more[0].ID}},
		"the second of what it may name": {[]onceq.Job{keyed("a", by("free"), by("last"))}, []int64{more[1].ID}},
	} {
		require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			_, err := member.AddMembers(ctx, tx, test.jobs...)
			var bad *onceq.InvalidError
			require.ErrorAs(t, err, &bad, name)
			for _, id := range test.ids {
				require.ErrorContains(t, err, fmt.Sprint("job ", id), name)
			}
			_, err = tx.Exec(ctx, `select 1`)
			return err
		}))
		require.Equal(t, before, rows(), name)
	}
	var bad *onceq.InvalidError
	_, err = q.EnqueueGroup(ctx, db.Pool, []onceq.Job{keyed("new", by("other"))}, keyed("other"))
	require.ErrorAs(t, err, &bad)
	require.Contains(t, err.Error(), "members[0].After[0]")

	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
		_, err := member.AddMembers(ctx, tx, keyed("free"), keyed("new", by("free")))
		return errors.Join(err, member.Complete(ctx, tx))
	}))
	ran := 0
	db.Drain(onceq.Kind[int]{Name: "k"}.Handle(func(context.Context, *onceq.Lease, int) error { ran++; return nil }))
	require.Equal(t, 5, ran)
	require.NoError(t, db.Check())
}

// Outside a transaction, the events of a group's jobs come when they are committed: whoever is told can read them.
func TestGroup_EventsComeAfterTheCommit(t *testing.T) {
	t.Parallel()
	var db *queuetest.DB
	var told []int64
	db = queuetest.New(t, queuetest.Config(onceq.Config{Hook: onceq.HookFunc(func(ctx context.Context, e onceq.Event) {
		if e.Type == onceq.EventEnqueued {
			_, err := db.Queue.Get(ctx, db.Pool, e.JobID)
			require.NoError(t, err, "%s", e.Kind)
			told = append(told, e.JobID)
		}
	})}))
	ctx, q := t.Context(), db.Queue
	keyed := func(key string, payload int) onceq.Job { return onceq.Job{Kind: "k", Key: key, Payload: payload} }
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1), keyed("a", 1)}, keyed("group", 1))
	require.NoError(t, err)
	require.Equal(t, []int64{g.Then.ID, g.Members[0].ID, g.Members[1].ID}, told)
	told = nil
	results, err := groupClaim(t, q)[g.Members[0].ID].AddMembers(ctx, db.Pool, keyed("a", 1), part.Job(2))
	require.NoError(t, err)
	require.Equal(t, []int64{results[1].ID}, told)
	told = nil
	for _, jobs := range [][]onceq.Job{{keyed("b", 1)}, {keyed("b", 1), keyed("a", 2)}} { // a duplicate, and other work under a key
		_, err := q.EnqueueGroup(ctx, db.Pool, jobs, keyed(map[int]string{1: "group", 2: "other"}[len(jobs)], 1))
		require.Equal(t, len(jobs) == 2, err != nil)
	}
	require.Empty(t, told)
}
