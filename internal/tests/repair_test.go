package tests

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// Helpers for the tests of reaper.go, inspect.go, cancel.go and of package onceqops.

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func repairExec(t *testing.T, db *queuetest.DB, sql string, args ...any) int64 {
	t.Helper()
	tag, err := db.Pool.Exec(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	return tag.RowsAffected()
}

func repairCount(t *testing.T, db *queuetest.DB, sql string, args ...any) (n int) {
	t.Helper()
	if err := db.Pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func repairEnqueue(t *testing.T, db *queuetest.DB, job onceq.Job) int64 {
	t.Helper()
	if job.Kind == "" {
		job.Kind = "mail"
	}
	r := must[onceq.Result](t)(db.Queue.Enqueue(t.Context(), db.Pool, job))
	if r.Duplicate {
		t.Fatalf("job with key %q is a duplicate of %d", job.Key, r.ID)
	}
	return r.ID
}

func repairClaim(t *testing.T, db *queuetest.DB) *onceq.Lease {
	t.Helper()
	leases := must[[]*onceq.Lease](t)(db.Queue.Claim(t.Context(), onceq.ClaimOptions{}))
	if len(leases) != 1 {
		t.Fatalf("%d leases, want 1", len(leases))
	}
	return leases[0]
}

// repairDead enqueues a job and makes it dead.
func repairDead(t *testing.T, db *queuetest.DB, job onceq.Job) int64 {
	t.Helper()
	id := repairEnqueue(t, db, job)
	l := repairClaim(t, db)
	if l.ID != id {
		t.Fatalf("claimed job %d, want %d", l.ID, id)
	}
	if err := l.Fail(t.Context(), onceq.Fatal(errors.New("broken"))); err != nil {
		t.Fatal(err)
	}
	return id
}

func wantState(t *testing.T, want onceq.State) func(onceq.State, error) {
	return func(got onceq.State, err error) {
		t.Helper()
		if err != nil || got != want {
			t.Fatalf("state %s, error %v; want %s", got, err, want)
		}
	}
}

func wantError(t *testing.T, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Fatalf("error %v, want %v", got, want)
	}
}

// background starts fn and returns a function that waits for its answer.
func background[T any](fn func() (T, error)) func() (T, error) {
	type answer struct {
		v   T
		err error
	}
	c := make(chan answer, 1)
	go func() {
		v, err := fn()
		c <- answer{v, err}
	}()
	return func() (T, error) { a := <-c; return a.v, a.err }
}

// waitBlocked waits until a session of the test's database waits for a lock.
func waitBlocked(t *testing.T, db *queuetest.DB) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		if repairCount(t, db, `select count(*) from `+activity(t, db)+` where datname = current_database() and wait_event_type = 'Lock'`) > 0 {
			return
		}
	}
	t.Fatal("nobody waits for a lock")
}

// activity is the view of all sessions, which on Citus are those of the nodes too.
func activity(t *testing.T, db *queuetest.DB) string {
	t.Helper()
	return sqlOne[string](t, db, `select coalesce(to_regclass('citus_stat_activity'), 'pg_stat_activity')::text`)
}

func begin(t *testing.T, db *queuetest.DB) pgx.Tx {
	t.Helper()
	tx := must[pgx.Tx](t)(db.Pool.Begin(t.Context()))
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func commit(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestCancel(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue

	_, err := q.Cancel(ctx, db.Pool, 1)
	wantError(t, err, onceq.ErrNotFound)

	id := repairEnqueue(t, db, onceq.Job{Key: "a"})
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
	if i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)); i.KeepUntil.Sub(i.FinishedAt) != 24*time.Hour {
		t.Fatalf("kept until %s, finished %s", i.KeepUntil, i.FinishedAt)
	}

	id = repairEnqueue(t, db, onceq.Job{})
	l := repairClaim(t, db)
	wantState(t, onceq.StateRunning)(q.Cancel(ctx, db.Pool, id))
	wantError(t, l.Extend(ctx, time.Minute), onceq.ErrCancelled)
	if err := l.Fail(ctx, errors.New("some error")); err != nil {
		t.Fatal(err)
	}
	// The job does not run again.
	if i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)); i.State != onceq.StateCancelled {
		t.Fatalf("state %s", i.State)
	}

	id = repairEnqueue(t, db, onceq.Job{Key: "b"})
	repairClaim(t, db)
	repairExec(t, db, `update onceq.jobs set leased_until = now() - interval '1 s'`)
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
	r := must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "mail", Key: "b"}))
	if !r.Duplicate || r.ID != id || r.State != onceq.StateCancelled {
		t.Fatalf("the key of a cancelled job whose lease was lost: %+v", r)
	}
}

func TestTrapCancelDoesNotWaitForAHandlersTransaction(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	id := repairEnqueue(t, db, onceq.Job{Key: "a"})
	l := repairClaim(t, db)
	repairExec(t, db, `update onceq.jobs set leased_until = now() - interval '1 s'`)
	tx := begin(t, db)
	if _, err := tx.Exec(ctx, `select from onceq.jobs where id = $1 for update`, id); err != nil {
		t.Fatal(err)
	}
	wantState(t, onceq.StateRunning)(db.Queue.Cancel(ctx, db.Pool, id))
	if err := l.Complete(ctx, tx); err != nil {
		t.Fatal(err)
	}
	wantState(t, onceq.StateRunning)(db.Queue.Cancel(ctx, db.Pool, id))
	commit(t, tx)
	_, err := db.Queue.Cancel(ctx, db.Pool, id)
	wantError(t, err, onceq.ErrNotFound)
	if i := must[onceq.JobInfo](t)(db.Queue.GetByKey(ctx, db.Pool, "mail", "a")); i.State != onceq.StateCompleted {
		t.Fatalf("state %s", i.State)
	}
}

func TestTrapCancelMeetsAClaim(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := repairEnqueue(t, db, onceq.Job{Key: "a"})
	tx := begin(t, db)
	wantState(t, onceq.StateCancelled)(db.Queue.Cancel(t.Context(), tx, id))
	for range 2 {
		if l := must[[]*onceq.Lease](t)(db.Queue.Claim(t.Context(), onceq.ClaimOptions{})); len(l) > 0 {
			t.Fatal("claimed a job that is being cancelled")
		}
		if tx != nil {
			commit(t, tx)
			tx = nil
		}
	}
}

// The holder looks for a request and gives the job back just before the request is written.
func TestTrapCancelMeetsARelease(t *testing.T) {
	t.Parallel()
	var l *onceq.Lease
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			if held := l; held != nil && strings.Contains(sql, "request_cancels(") {
				l = nil
				require.NoError(t, held.Release(t.Context()))
			}
		}}
	}))
	id := repairEnqueue(t, db, onceq.Job{})
	l = repairClaim(t, db)
	wantState(t, onceq.StateCancelled)(db.Queue.Cancel(t.Context(), db.Pool, id))
	require.Nil(t, l)
	wantState(t, onceq.StateCancelled)(stateOf(db.Queue.Get(t.Context(), db.Pool, id)))
}

func TestTrapCancelMeetsACompletion(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := repairEnqueue(t, db, onceq.Job{Key: "a"})
	l := repairClaim(t, db)
	repairExec(t, db, `update onceq.jobs set leased_until = now() - interval '1 s'`)
	tx := begin(t, db)
	wantState(t, onceq.StateCancelled)(db.Queue.Cancel(t.Context(), tx, id))
	complete := background(func() (int, error) { return 0, l.Complete(t.Context(), nil) })
	waitBlocked(t, db)
	commit(t, tx)
	_, err := complete()
	wantError(t, err, onceq.ErrLeaseLost)
	wantState(t, onceq.StateCancelled)(db.Queue.Cancel(t.Context(), db.Pool, id))
}

func TestRetry(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	_, err := onceqops.New(q).Retry(ctx, db.Pool, 1)
	wantError(t, err, onceq.ErrNotFound)

	id := repairEnqueue(t, db, onceq.Job{Delay: time.Hour})
	wantState(t, onceq.StateWaiting)(onceqops.New(q).Retry(ctx, db.Pool, id))
	l := repairClaim(t, db)
	wantState(t, onceq.StateRunning)(onceqops.New(q).Retry(ctx, db.Pool, id))
	if err := l.Fail(ctx, errors.New("no")); err != nil {
		t.Fatal(err)
	}
	wantState(t, onceq.StateRetrying)(onceqops.New(q).Retry(ctx, db.Pool, id))
	if err := repairClaim(t, db).Fail(ctx, onceq.Fatal(errors.New("no"))); err != nil {
		t.Fatal(err)
	}
	wantState(t, onceq.StateDead)(onceqops.New(q).Retry(ctx, db.Pool, id))
}

func TestRedrive(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]string{
		"own fence":    `select`,
		"pruned fence": `delete from onceq.job_fences`,
		"free fence":   `update onceq.job_fences set finished_at = now() - interval '30 days'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// Until it is redriven, a dead job without its fence violates the invariants.
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			_, err := onceqops.New(q).Redrive(ctx, db.Pool, 1)
			wantError(t, err, onceq.ErrNotFound)

			id := repairDead(t, db, onceq.Job{Key: "a", Payload: 1, Metadata: map[string]string{"m": "1"}})
			before := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
			repairExec(t, db, `insert into onceq.job_cancels values ($1, now())`, id)
			repairExec(t, db, prepare)
			wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
			wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
			if r := must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "mail", Key: "a", Payload: 1})); !r.Duplicate || r.ID != id {
				t.Fatalf("the key of a redriven job: %+v", r)
			}
			l := repairClaim(t, db)
			if l.ID != id || l.Token <= before.Token || l.Attempt != 1 || l.Lost != 0 || l.Metadata["m"] != "1" || !l.CreatedAt.Equal(before.CreatedAt) {
				t.Fatalf("%+v after %+v", l, before)
			}
			// The request to cancel was for the earlier run.
			if err := l.Extend(ctx, time.Minute); err != nil {
				t.Fatal(err)
			}
			if i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)); len(i.Errors) != 1 || i.Errors[0].Error != "broken" {
				t.Fatalf("errors %v", i.Errors)
			}
			if err := l.Complete(ctx, nil); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// A job that was claimed as often as its token can count is dead, and would be again after a redrive.
func TestRedrive_AJobWhoseClaimsAreUsedUp(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	work := onceq.Kind[int]{Name: "k", Key: func(int) string { return "a" }}
	dead := repairDead(t, db, onceq.Job{})
	id := add(t, db, work.Job(1))
	repairExec(t, db, `update onceq.jobs set claims = 1048573 where kind = 'k'`)
	runs := 0
	h := work.Handle(func(context.Context, *onceq.Lease, int) error { runs++; return onceq.Reschedule(0) })
	db.RunOne(h)
	must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{"k"}}))
	i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
	if runs != 1 || i.State != onceq.StateDead {
		t.Fatalf("%d runs, %s", runs, i.State)
	}
	_, err := onceqops.New(q).Redrive(ctx, db.Pool, id)
	if err == nil || errors.Is(err, onceq.ErrHeld) || !strings.Contains(err.Error(), "enqueue a new job") {
		t.Fatal(err)
	}
	n, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{All: true})
	if n != 1 || taken != 0 || err == nil || errors.Is(err, onceq.ErrHeld) {
		t.Fatal(n, taken, err)
	}
	if s := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, dead)).State; s != onceq.StateWaiting {
		t.Fatal(s)
	}
	if s := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)).State; s != onceq.StateDead {
		t.Fatal(s)
	}
	fenceOK(t, "Discard", onceqops.New(q).Discard(ctx, db.Pool, id))
	if r := must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, work.Job(1))); r.Duplicate {
		t.Fatalf("%+v", r)
	}
}

func TestTrapRedriveOfAJobWhoseKeyALaterJobHas(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	old := repairDead(t, db, onceq.Job{Key: "a", Window: onceq.UntilFinished})
	later := repairEnqueue(t, db, onceq.Job{Key: "a", Window: onceq.UntilFinished})
	refused := func(want onceq.State) {
		t.Helper()
		_, err := onceqops.New(q).Redrive(ctx, db.Pool, old)
		var dup *onceq.DuplicateError
		if !errors.As(err, &dup) || dup.Existing.ID != later || dup.Existing.State != want || dup.Key != "a" {
			t.Fatalf("error %v, want the facts of job %d, %s", err, later, want)
		}
		if i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, old)); i.State != onceq.StateDead {
			t.Fatalf("changed to %s", i.State)
		}
	}
	refused(onceq.StateWaiting)
	if err := repairClaim(t, db).Complete(ctx, nil); err != nil {
		t.Fatal(err)
	}
	refused(onceq.StateCompleted) // its key is free, but its work is done under a larger token

	n, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{All: true})
	if err != nil || n != 0 || taken != 1 {
		t.Fatalf("%d redriven, %d taken, error %v", n, taken, err)
	}
}

func TestTrapRedriveMeetsAnEnqueue(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]string{"free fence": `select`, "pruned fence": `delete from onceq.job_fences`} {
		t.Run("enqueue first/"+name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			old := repairDead(t, db, onceq.Job{Key: "a", Window: onceq.UntilFinished})
			repairExec(t, db, prepare)
			tx := begin(t, db)
			r := must[onceq.Result](t)(db.Queue.Enqueue(t.Context(), tx, onceq.Job{Kind: "mail", Key: "a"}))
			if r.Duplicate {
				t.Fatalf("%+v", r)
			}
			redrive := background(func() (onceq.State, error) { return onceqops.New(db.Queue).Redrive(t.Context(), db.Pool, old) })
			waitBlocked(t, db)
			commit(t, tx)
			_, err := redrive()
			var dup *onceq.DuplicateError
			if !errors.As(err, &dup) || dup.Existing.ID != r.ID {
				t.Fatalf("error %v, want that of a duplicate of %d", err, r.ID)
			}
		})
		t.Run("redrive first/"+name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			old := repairDead(t, db, onceq.Job{Key: "a", Window: onceq.UntilFinished})
			repairExec(t, db, prepare)
			tx := begin(t, db)
			wantState(t, onceq.StateWaiting)(onceqops.New(db.Queue).Redrive(t.Context(), tx, old))
			enqueue := background(func() (onceq.Result, error) {
				return db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "mail", Key: "a"})
			})
			waitBlocked(t, db)
			commit(t, tx)
			if r := must[onceq.Result](t)(enqueue()); !r.Duplicate || r.ID != old || r.State != onceq.StateWaiting {
				t.Fatalf("%+v, want a duplicate of %d", r, old)
			}
		})
	}
}

func TestTrapDiscardMeetsARedrive(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := repairDead(t, db, onceq.Job{Key: "a"})

	tx := begin(t, db)
	wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, tx, id))
	discard := background(func() (int, error) { return 0, onceqops.New(q).Discard(ctx, db.Pool, id) })
	waitBlocked(t, db)
	commit(t, tx)
	_, err := discard()
	wantError(t, err, onceqops.ErrUnfinished)

	if err := repairClaim(t, db).Fail(ctx, onceq.Fatal(errors.New("no"))); err != nil {
		t.Fatal(err)
	}
	tx = begin(t, db)
	if err := onceqops.New(q).Discard(ctx, tx, id); err != nil {
		t.Fatal(err)
	}
	redrive := background(func() (onceq.State, error) { return onceqops.New(q).Redrive(ctx, db.Pool, id) })
	waitBlocked(t, db)
	commit(t, tx)
	_, err = redrive()
	wantError(t, err, onceq.ErrNotFound)
}

func TestDiscard(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	wantError(t, onceqops.New(q).Discard(ctx, db.Pool, 1), onceq.ErrNotFound)

	id := repairDead(t, db, onceq.Job{Key: "a", Window: onceq.Forever})
	// Effects of this job, and of a job whose id begins with the same digits.
	repairExec(t, db, `insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, detail)
		select 3, 'default', i || '/charge', s, i, i << 20, now(), 0, 'why' from unnest(array[$1::bigint, $1 * 10]) i, generate_series(2, 2) s`, id)
	token := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)).Token
	if err := onceqops.New(q).Discard(ctx, db.Pool, id); err != nil {
		t.Fatal(err)
	}
	wantError(t, onceqops.New(q).Discard(ctx, db.Pool, id), onceq.ErrNotFound)
	if n := repairCount(t, db, `select count(*) from onceq.job_fences where class = 3 and job_id = $1`, id*10); n != 1 {
		t.Fatal("an effect of another job is gone")
	}
	if n := repairCount(t, db, `select count(*) from onceq.job_fences where class = 3`); n != 1 {
		t.Fatalf("%d effects", n)
	}
	if n := repairCount(t, db, `select count(*) from onceq.job_fences where class = 0 and token = $1`, token); n != 1 {
		t.Fatal("the fence's token is forgotten")
	}
	later := repairEnqueue(t, db, onceq.Job{Key: "a", Payload: "another"})
	wantError(t, onceqops.New(q).Discard(ctx, db.Pool, later), onceqops.ErrUnfinished)
	if l := repairClaim(t, db); l.Token <= token {
		t.Fatalf("token %d after %d", l.Token, token)
	}
}

func TestCancelMany(t *testing.T) {
	t.Parallel()
	var cancelled atomic.Int64
	hook := onceq.HookFunc(func(_ context.Context, e onceq.Event) {
		if e.Type == onceq.EventCancelled && e.Kind == "send" && e.Queue == "bulk" && e.Scope == "campaign 1" {
			cancelled.Add(1)
		}
	})
	db := queuetest.New(t, queuetest.Schema(`o'ne"ceq.x`), queuetest.Config(onceq.Config{Hook: hook, Logger: slog.New(slog.DiscardHandler)}))
	ctx, q := t.Context(), db.Queue
	const n = 1203
	jobs := make([]onceq.Job, n)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "send", Queue: "bulk", Key: fmt.Sprint(i), Scope: "campaign 1", Delay: time.Duration(i%2) * time.Hour}
	}
	must[[]onceq.Result](t)(q.EnqueueMany(ctx, db.Pool, jobs))
	other := repairEnqueue(t, db, onceq.Job{Kind: "send", Key: "1", Scope: "campaign 2"})
	leases := must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "bulk", Limit: 3}))
	cancel := func(in onceq.DB, f onceqops.Filter, want, wantAsked int) {
		t.Helper()
		if got, asked, err := onceqops.New(q).CancelMany(ctx, in, f); err != nil || got != want || asked != wantAsked {
			t.Fatalf("%d cancelled, %d asked, error %v; want %d and %d", got, asked, err, want, wantAsked)
		}
	}
	var bad *onceq.InvalidError
	for _, f := range []onceqops.Filter{{}, {Limit: 1, States: []onceq.State{onceq.StateWaiting}}, {Kind: "send", States: []onceq.State{onceq.StateDead}}, {Kind: "send", Limit: -1}, {Kind: "\xff"}} {
		if _, _, err := onceqops.New(q).CancelMany(ctx, db.Pool, f); !errors.As(err, &bad) {
			t.Errorf("%+v: %v", f, err)
		}
	}
	mine := onceqops.Filter{Kind: "send", Queue: "bulk", Scope: "campaign 1"}
	some := mine
	some.Limit, some.States = 510, []onceq.State{onceq.StateDelayed}
	cancel(db.Pool, some, 510, 0)

	// In the caller's transaction a rollback undoes it, and the locks of another transaction do not stop it.
	tx := begin(t, db)
	cancel(tx, mine, n-510-3, 3)
	if err := tx.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	tx = begin(t, db)
	if _, err := tx.Exec(ctx, `select from `+pgx.Identifier{db.Schema}.Sanitize()+`.jobs where id = $1 for update`, leases[0].ID); err != nil {
		t.Fatal(err)
	}
	before := cancelled.Load()
	cancel(db.Pool, mine, n-510-3, 3)
	cancel(db.Pool, mine, 0, 3)
	commit(t, tx)
	if got := cancelled.Load() - before; got != n-510-3 {
		t.Errorf("%d events", got)
	}
	if err := leases[0].Release(ctx); err != nil { // Release finds the request to cancel
		t.Fatal(err)
	}
	if err := leases[1].Complete(ctx, nil); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[int64]onceq.State{leases[0].ID: onceq.StateCancelled, leases[2].ID: onceq.StateRunning, other: onceq.StateWaiting} {
		if i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)); i.State != want {
			t.Errorf("job %d is %s, want %s", id, i.State, want)
		}
	}
	if got, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{Scope: "campaign 1", States: []onceq.State{onceq.StateCancelled}}); err != nil || got != n-2 || taken != 0 {
		t.Errorf("%d redriven, %d taken, error %v", got, taken, err)
	}
}

func TestRedriveAndDiscardMany(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema(`o'ne"ceq.x`))
	ctx, q := t.Context(), db.Queue
	const n = 1203
	jobs := make([]onceq.Job, n)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: fmt.Sprint("kind", i%2), Key: fmt.Sprint("k", i), Scope: "tenant", Window: onceq.UntilFinished}
	}
	must[[]onceq.Result](t)(q.EnqueueMany(ctx, db.Pool, jobs))
	fatal := func() {
		t.Helper()
		for {
			leases := must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Limit: 2000}))
			if len(leases) == 0 {
				return
			}
			for _, l := range leases {
				if err := l.Fail(ctx, onceq.Fatal(errors.New("no"))); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	fatal()
	repairEnqueue(t, db, onceq.Job{Kind: "kind0", Key: "k0", Scope: "tenant", Delay: time.Hour})
	redrive := func(f onceqops.Filter, want, wantTaken int) {
		t.Helper()
		if got, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, f); err != nil || got != want || taken != wantTaken {
			t.Fatalf("%d redriven, %d taken, error %v; want %d and %d", got, taken, err, want, wantTaken)
		}
	}
	redrive(onceqops.Filter{All: true, Limit: 510}, 510, 0)
	redrive(onceqops.Filter{All: true, States: []onceq.State{onceq.StateHeld}}, 0, 0)
	redrive(onceqops.Filter{Queue: "none"}, 0, 0)
	redrive(onceqops.Filter{Kind: "kind0"}, 346, 1) // there are 602 of that kind, and 255 of them were among the first
	redrive(onceqops.Filter{Scope: "tenant"}, n-510-346-1, 1)
	fatal()
	enough := errors.New("enough")
	var tried []int
	stop := func(n int) error {
		tried = append(tried, n)
		if n >= 1000 {
			return enough
		}
		return nil
	}
	if got, err := onceqops.New(q).DiscardMany(ctx, db.Pool, onceqops.Filter{All: true, Progress: stop}); !errors.Is(err, enough) || got != 1000 || fmt.Sprint(tried) != "[500 1000]" {
		t.Fatalf("%d discarded, progress %v, error %v", got, tried, err)
	}
	if got, err := onceqops.New(q).DiscardMany(ctx, db.Pool, onceqops.Filter{All: true}); err != nil || got != n-1000 {
		t.Fatalf("%d discarded, error %v", got, err)
	}
	var bad *onceq.InvalidError
	if _, _, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{All: true, States: []onceq.State{onceq.StateCompleted}}); !errors.As(err, &bad) {
		t.Fatalf("error %v", err)
	}
	if _, err := onceqops.New(q).DiscardMany(ctx, db.Pool, onceqops.Filter{All: true, States: []onceq.State{onceq.StateWaiting}}); !errors.As(err, &bad) {
		t.Fatalf("error %v", err)
	}
}

// RetryMany hurries what failed before, and delayed jobs only if they are named.
func TestRetryMany(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	failed := repairEnqueue(t, db, onceq.Job{})
	if err := must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{}))[0].Fail(ctx, onceq.RetryAfter(time.Hour, errors.New("no"))); err != nil {
		t.Fatal(err)
	}
	delayed := repairEnqueue(t, db, onceq.Job{Delay: time.Hour})
	repairEnqueue(t, db, onceq.Job{Kind: "sms", Delay: time.Hour})
	if n := must[int](t)(onceqops.New(q).RetryMany(ctx, db.Pool, onceqops.Filter{Kind: "mail"})); n != 1 {
		t.Fatalf("%d retried", n)
	}
	if i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, failed)); i.RunAt.After(time.Now().Add(time.Minute)) {
		t.Fatalf("due at %v", i.RunAt)
	}
	wantState(t, onceq.StateDelayed)(stateOf(q.Get(ctx, db.Pool, delayed)))
	if n := must[int](t)(onceqops.New(q).RetryMany(ctx, db.Pool, onceqops.Filter{Queue: "default", States: []onceq.State{onceq.StateDelayed}})); n != 2 {
		t.Fatalf("%d retried", n)
	}
	wantState(t, onceq.StateWaiting)(stateOf(q.Get(ctx, db.Pool, delayed)))
	if n := must[int](t)(onceqops.New(q).RetryMany(ctx, db.Pool, onceqops.Filter{Queue: "default", States: []onceq.State{onceq.StateRetrying}})); n != 0 {
		t.Fatalf("%d of those that are due were retried", n)
	}
	var bad *onceq.InvalidError
	for _, f := range []onceqops.Filter{{}, {Kind: "mail", States: []onceq.State{onceq.StateDead}}} {
		if _, err := onceqops.New(q).RetryMany(ctx, db.Pool, f); !errors.As(err, &bad) {
			t.Fatalf("error %v", err)
		}
	}
}

func stateOf(i onceq.JobInfo, err error) (onceq.State, error) { return i.State, err }

// Every statement of repair, inspection and reaping works in every query mode, in a schema whose name needs quoting and
// with an empty search_path.
func TestRepairInEveryQueryMode(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.Schema(`o'ne"ceq.x`), queuetest.PoolConfig(func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = mode
				c.ConnConfig.RuntimeParams["search_path"] = ""
			}))
			ctx, q := t.Context(), db.Queue
			id := repairDead(t, db, onceq.Job{Key: "a", Metadata: map[string]string{"m": "1"}})
			repairEnqueue(t, db, onceq.Job{Payload: []byte{0}, Delay: time.Hour})
			if l := must[[]onceq.JobInfo](t)(onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{Queue: "default", States: []onceq.State{onceq.StateDead, onceq.StateDelayed}})); len(l) != 2 ||
				len(l[0].Bytes) != 1 || l[1].Metadata["m"] != "1" || len(l[1].Errors) != 1 {
				t.Fatalf("%+v", l)
			}
			if s := must[[]onceqops.QueueStats](t)(onceqops.New(q).Stats(ctx)); len(s) != 1 || s[0].Dead != 1 || s[0].Delayed != 1 {
				t.Fatalf("%+v", s)
			}
			wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
			wantState(t, onceq.StateWaiting)(onceqops.New(q).Retry(ctx, db.Pool, id))
			wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
			tx := begin(t, db)
			if n, taken, err := onceqops.New(q).RedriveMany(ctx, tx, onceqops.Filter{States: []onceq.State{onceq.StateCancelled}, Scope: "mail", Kind: "mail"}); err != nil || n != 1 || taken != 0 {
				t.Fatal(n, taken, err)
			}
			commit(t, tx)
			wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
			if err := onceqops.New(q).Discard(ctx, db.Pool, id); err != nil {
				t.Fatal(err)
			}
			i := must[onceq.JobInfo](t)(q.GetByKey(ctx, db.Pool, "mail", "a"))
			if i.ID != id || i.State != onceq.StateCancelled {
				t.Fatalf("%+v", i)
			}
			reap(t, newReaper(t, db, onceq.ReaperConfig{Grace: time.Millisecond}), onceq.Reaped{Fences: 1})
		})
	}
}

// All four calls for many jobs refuse the same filters, and each has a call that says what it would try.
func TestManyJobs_AFilterThatNamesNothing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	var ids []int64
	for range 103 {
		ids = append(ids, repairEnqueue(t, db, onceq.Job{Queue: "later", Delay: time.Hour}))
	}
	dead := repairDead(t, db, onceq.Job{})
	slices.Reverse(ids)
	type call struct {
		would func(onceqops.Filter) (onceqops.Choice, error)
		does  func(onceqops.Filter) (int, error)
	}
	calls := map[string]call{
		"cancel": {func(f onceqops.Filter) (onceqops.Choice, error) { return onceqops.New(q).WouldCancel(ctx, db.Pool, f) },
			func(f onceqops.Filter) (int, error) {
				n, _, err := onceqops.New(q).CancelMany(ctx, db.Pool, f)
				return n, err
			}},
		"retry": {func(f onceqops.Filter) (onceqops.Choice, error) { return onceqops.New(q).WouldRetry(ctx, db.Pool, f) },
			func(f onceqops.Filter) (int, error) { return onceqops.New(q).RetryMany(ctx, db.Pool, f) }},
		"redrive": {func(f onceqops.Filter) (onceqops.Choice, error) { return onceqops.New(q).WouldRedrive(ctx, db.Pool, f) },
			func(f onceqops.Filter) (int, error) {
				n, _, err := onceqops.New(q).RedriveMany(ctx, db.Pool, f)
				return n, err
			}},
		"discard": {func(f onceqops.Filter) (onceqops.Choice, error) { return onceqops.New(q).WouldDiscard(ctx, db.Pool, f) },
			func(f onceqops.Filter) (int, error) { return onceqops.New(q).DiscardMany(ctx, db.Pool, f) }},
		"resolve": {func(f onceqops.Filter) (onceqops.Choice, error) { return onceqops.New(q).WouldResolve(ctx, db.Pool, f) },
			func(f onceqops.Filter) (int, error) {
				n, _, err := onceqops.New(q).ResolveMany(ctx, db.Pool, f, "", onceq.NeverApplied())
				return n, err
			}},
	}
	for name, c := range calls {
		for _, f := range []onceqops.Filter{{}, {Limit: 1}, {CreatedBefore: time.Now()}, {Kind: "mail", Limit: -1}, {Kind: "mail", States: []onceq.State{0}}} {
			var bad *onceq.InvalidError
			if _, err := c.would(f); !errors.As(err, &bad) {
				t.Errorf("would %s with %+v: %v", name, f, err)
			}
			if _, err := c.does(f); !errors.As(err, &bad) {
				t.Errorf("%s with %+v: %v", name, f, err)
			}
		}
	}
	for _, x := range []struct {
		name   string
		filter onceqops.Filter
		count  int
		ids    []int64
	}{
		{"resolve", onceqops.Filter{All: true}, 0, nil},
		{"retry", onceqops.Filter{All: true}, 0, nil},
		{"redrive", onceqops.Filter{Kind: "mail"}, 1, []int64{dead}},
		{"discard", onceqops.Filter{IDs: []int64{dead, ids[0]}}, 1, []int64{dead}},
		{"cancel", onceqops.Filter{All: true, Limit: 2}, 2, ids[:2]},
		{"cancel", onceqops.Filter{All: true}, 103, ids[:100]},
	} {
		got, err := calls[x.name].would(x.filter)
		if err != nil || got.Count != x.count || !slices.Equal(got.IDs, x.ids) {
			t.Errorf("would %s: %+v, error %v; want %d: %d", x.name, got, err, x.count, x.ids)
		}
	}
	if n, err := calls["cancel"].does(onceqops.Filter{All: true}); err != nil || n != 103 {
		t.Fatalf("%d cancelled, %v", n, err)
	}
}

// A job that is claimed after CancelMany has chosen it as a waiting one runs on: running jobs were not chosen.
// A state that is named four times is not all four.
func TestCancelMany_AStateNamedAgain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	waits := repairEnqueue(t, db, onceq.Job{Kind: "send", Queue: "q"})
	later := repairEnqueue(t, db, onceq.Job{Kind: "send", Queue: "q", Delay: time.Hour})
	f := onceqops.Filter{Queue: "q", States: []onceq.State{onceq.StateDelayed, onceq.StateDelayed, onceq.StateDelayed, onceq.StateDelayed}}
	require.Equal(t, 1, must[int](t)(onceqops.New(q).Count(ctx, db.Pool, f)))
	n, asked, err := onceqops.New(q).CancelMany(ctx, db.Pool, f)
	require.NoError(t, err)
	require.Equal(t, []int{1, 0}, []int{n, asked})
	require.Equal(t, onceq.StateWaiting, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, waits)).State)
	require.Equal(t, onceq.StateCancelled, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, later)).State)
}

func TestCancelMany_AsksNoRunningJobThatItDidNotChoose(t *testing.T) {
	t.Parallel()
	var other *onceq.Queue
	claimed := make(chan error, 1)
	var once sync.Once
	db, pool := hooked(t, &statementHook{before: func(sql string) {
		if strings.Contains(sql, ".cancel(") {
			once.Do(func() {
				leases, err := other.Claim(context.Background(), onceq.ClaimOptions{Limit: 1})
				if len(leases) != 1 {
					err = errors.Join(err, errors.New("it claimed nothing"))
				}
				claimed <- err
			})
		}
	}})
	var err error
	other, err = onceq.New(pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k"})
	require.NoError(t, err)
	n, asked, err := onceqops.New(db.Queue).CancelMany(t.Context(), db.Pool, onceqops.Filter{Kind: "k", States: []onceq.State{onceq.StateWaiting}})
	require.NoError(t, err)
	require.NoError(t, receive(t, claimed))
	require.Equal(t, []int{0, 0}, []int{n, asked})
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.job_cancels`))
}

// One of two calls in transactions of the caller's has cancelled a job that somebody had asked for before, and is about to
// ask for another one, which runs. The second call asks for both, and waits for no note of the first one.
func TestCancelMany_TwoThatAskForTheSameJobs(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	reached, goOn := make(chan struct{}), make(chan struct{})
	cfg := db.Pool.Config()
	cfg.ConnConfig.Tracer = &statementHook{before: func(sql string) {
		if strings.Contains(sql, "request_cancels(") {
			close(reached)
			<-goOn
		}
	}}
	held, err := pgxpool.NewWithConfig(ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(held.Close)
	running, free := repairEnqueue(t, db, onceq.Job{}), repairEnqueue(t, db, onceq.Job{})
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 1, Lease: time.Hour})
	require.NoError(t, err)
	require.Equal(t, running, leases[0].ID)
	repairExec(t, db, `insert into onceq.job_cancels values ($1, now())`, free)

	type answer struct {
		cancelled, asked int
		err              error
	}
	cancel := func(pool *pgxpool.Pool) (pid uint32, to chan answer) {
		tx, err := pool.Begin(ctx)
		require.NoError(t, err)
		t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
		to = make(chan answer, 1)
		go func() {
			var a answer
			a.cancelled, a.asked, a.err = onceqops.New(q).CancelMany(ctx, tx, onceqops.Filter{IDs: []int64{running, free}})
			a.err = cmp.Or(a.err, tx.Commit(ctx))
			to <- a
		}()
		return tx.Conn().PgConn().PID(), to
	}
	_, first := cancel(held)
	<-reached
	pid, second := cancel(db.Pool)
	eventually(t, "the second one has ended, or waits", func() bool {
		return len(second) > 0 || sqlOne[bool](t, db, `select exists (select from pg_locks where pid = $1 and not granted)`, pid)
	})
	close(goOn)
	require.Equal(t, answer{cancelled: 1, asked: 1}, receive(t, first))
	require.Equal(t, answer{asked: 2}, receive(t, second))
}

// Calls for many jobs in transactions of the caller's keep to one order, whatever each of them chooses. first is a call that has
// more than one part; it stands between two parts until then, of another transaction, waits or has ended. before is what that
// transaction has done already.
type meeting struct {
	first        func(ctx context.Context, tx pgx.Tx, filter onceqops.Filter) error
	before, then func(ctx context.Context, tx pgx.Tx) error
	filter       onceqops.Filter
}

func TestRepairs_ForManyLockInOneOrder(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	const many = 600 // a part has 500
	enqueued := func(kind string) (ids []int64) {
		jobs := make([]onceq.Job, many)
		for i := range jobs {
			jobs[i] = onceq.Job{Kind: kind, Payload: 1}
		}
		for _, r := range must[[]onceq.Result](t)(q.EnqueueMany(ctx, db.Pool, jobs)) {
			ids = append(ids, r.ID)
		}
		return ids
	}
	cancelled := func(ids ...int64) []int64 {
		_, _, err := onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{IDs: ids})
		require.NoError(t, err)
		return ids
	}
	past := func(ids ...int64) onceqops.Filter {
		return onceqops.Filter{IDs: ids, States: []onceq.State{onceq.StateDead, onceq.StateCancelled}}
	}
	redrive := func(ctx context.Context, tx pgx.Tx, filter onceqops.Filter) error {
		_, _, err := onceqops.New(q).RedriveMany(ctx, tx, filter)
		return err
	}
	discard := func(ctx context.Context, tx pgx.Tx, filter onceqops.Filter) error {
		_, err := onceqops.New(q).DiscardMany(ctx, tx, filter)
		return err
	}
	resolve := func(ctx context.Context, tx pgx.Tx, filter onceqops.Filter) error {
		_, _, err := onceqops.New(q).ResolveMany(ctx, tx, filter, "", onceq.NeverApplied())
		return err
	}
	cancel := func(ctx context.Context, tx pgx.Tx, filter onceqops.Filter) error {
		_, _, err := onceqops.New(q).CancelMany(ctx, tx, filter)
		return err
	}
	// The oldest of the jobs, and some that belong to the newest part of them.
	oldest := func(ids []int64) []int64 { return ids[:many-450] }
	same := func(ids []int64, filter func(...int64) onceqops.Filter, call func(context.Context, pgx.Tx, onceqops.Filter) error) meeting {
		return meeting{filter: filter(ids...), first: call, then: func(ctx context.Context, tx pgx.Tx) error { return call(ctx, tx, filter(oldest(ids)...)) }}
	}

	running := enqueued("runs")
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{"runs"}, Limit: many, Lease: time.Hour})
	require.NoError(t, err)
	require.Len(t, leases, many)

	// One that waited for others is redriven after them, though its id is between theirs.
	alone := func(j onceq.Job) int64 {
		j.Kind, j.Payload = "k", 1
		return must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, j)).ID
	}
	member := alone(onceq.Job{})
	follower := alone(onceq.Job{After: []onceq.JobRef{{ID: member}}})
	newer := alone(onceq.Job{})
	cancelled(follower)
	cancelled(member, newer)

	// Parts go newest first: they would come to the later key first, and to the later one of two that wait.
	waited := enqueued("waited")
	a, b := alone(onceq.Job{}), alone(onceq.Job{})
	y := alone(onceq.Job{Key: "y"})
	between := enqueued("between")
	z := alone(onceq.Job{Key: "z"})
	cancelled(append(append([]int64{y}, between...), z)...)
	enqueue := func(key string) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := q.Enqueue(ctx, tx, onceq.Job{Kind: "k", Payload: 1, Key: key})
			return err
		}
	}
	_ = alone(onceq.Job{After: []onceq.JobRef{{ID: waited[0]}, {ID: a}}})
	_ = alone(onceq.Job{After: []onceq.JobRef{{ID: waited[many-1]}, {ID: b}}})
	cancelled(append(waited, a, b)...)
	// The first of them has somebody waiting, and the last one is in the next part: that locks the key of the latter.
	var named []int64
	for i := range many {
		named = append(named, alone(onceq.Job{Key: fmt.Sprintf("named %03d", i)}))
	}
	c := alone(onceq.Job{})
	_ = alone(onceq.Job{After: []onceq.JobRef{{ID: named[0]}, {ID: c}}})
	cancelled(append(named, c)...)
	// Two generations of the same keys, in opposite orders, without fences: a redrive makes them.
	keyed := func(reverse bool) []int64 {
		jobs := make([]onceq.Job, many)
		for i := range jobs {
			jobs[i] = onceq.Job{Kind: "k", Payload: 1, Key: fmt.Sprintf("absent %03d", i)}
		}
		if reverse {
			slices.Reverse(jobs)
		}
		var ids []int64
		for _, j := range jobs {
			ids = append(ids, must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, j)).ID)
		}
		return cancelled(ids...)
	}
	forth, back := keyed(false), keyed(true)
	_, err = owner(t, db).Exec(ctx, `delete from onceq.job_fences where key like 'absent %'`)
	require.NoError(t, err)
	redriveBack := func(ctx context.Context, tx pgx.Tx) error { return redrive(ctx, tx, past(back...)) }
	redriveOne := func(id int64) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error { _, err := onceqops.New(q).Redrive(ctx, tx, id); return err }
	}

	for name, m := range map[string]meeting{
		"RedriveMany": same(cancelled(enqueued("redriven")...), past, redrive),
		"DiscardMany": same(cancelled(enqueued("discarded")...), past, discard),
		"ResolveMany": same(cancelled(enqueued("resolved")...), past, resolve),
		"CancelMany":  same(running, func(ids ...int64) onceqops.Filter { return onceqops.Filter{IDs: ids} }, cancel),
		"that follow": {filter: past(member, follower, newer), first: redrive, then: func(ctx context.Context, tx pgx.Tx) error { return discard(ctx, tx, past(follower, newer)) }},
		"their keys":  {filter: past(append(append([]int64{y}, between...), z)...), first: redrive, before: enqueue("y"), then: enqueue("z")},
		"key, wait":   {filter: past(named...), first: redrive, before: enqueue(fmt.Sprintf("named %03d", many-1)), then: redriveOne(c)},
		"made keys":   {filter: past(forth...), first: redrive, then: redriveBack},
		"who waits":   {filter: past(waited...), first: redrive, before: redriveOne(a), then: redriveOne(b)},
	} {
		t.Run(name, func(t *testing.T) { m.hold(t, db) })
	}
}

// One call has locked the fence of a key, and is to make another one. A second call makes that, and asks for
// the first key, which is not its job's any more. It does not wait for it.
func TestRedriveMany_WaitsForNoKeyOfAnothersJob(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	generation := func(keys ...string) (ids []int64) {
		for _, key := range keys {
			job := onceq.Job{Kind: "k", Payload: 1, Key: key}
			ids = append(ids, must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, job)).ID)
		}
		_, _, err := onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{IDs: ids})
		require.NoError(t, err)
		return ids
	}
	older, newer := generation("absent", "b"), generation("absent", "b", "c")
	_, err := owner(t, db).Exec(ctx, `delete from onceq.job_fences where key = 'absent'`)
	require.NoError(t, err)
	lock, err := owner(t, db).Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = lock.Rollback(context.Background()) }()
	_, err = lock.Exec(ctx, `select from onceq.job_fences where key = 'c' for update`)
	require.NoError(t, err)

	type answer struct {
		redriven, taken int
		err             error
	}
	redrive := func(ids []int64) chan answer {
		to := make(chan answer, 1)
		go func() {
			var a answer
			chosen := onceqops.Filter{IDs: ids, States: []onceq.State{onceq.StateCancelled}}
			a.redriven, a.taken, a.err = onceqops.New(q).RedriveMany(ctx, db.Pool, chosen)
			to <- a
		}()
		return to
	}
	waiting := func(n int) bool {
		return sqlOne[bool](t, db, `
select count(*) = $1 from pg_stat_activity
 where datname = current_database() and wait_event_type = 'Lock'`, n)
	}
	first := redrive(newer)
	eventually(t, "the first call has b and waits for c", func() bool { return waiting(1) })
	second := redrive(older)
	eventually(t, "the second one has ended, or waits", func() bool { return len(second) > 0 || waiting(2) })
	require.NoError(t, lock.Rollback(ctx))
	require.Equal(t, answer{redriven: 1, taken: 1}, receive(t, second))
	require.Equal(t, answer{redriven: 2, taken: 1}, receive(t, first))
}

// EnqueueMany makes fences that are absent before it takes those that are there, and RedriveMany after that. The latter
// runs again where Postgres ends it for the deadlock.
func TestRedriveMany_RunsAgainAfterADeadlock(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	var jobs []onceq.Job
	for _, key := range []string{"absent", "b", "c"} {
		jobs = append(jobs, onceq.Job{Kind: "k", Payload: 1, Key: key})
	}
	_, err := q.EnqueueMany(ctx, db.Pool, jobs)
	require.NoError(t, err)
	_, _, err = onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{All: true})
	require.NoError(t, err)
	_, err = owner(t, db).Exec(ctx, `delete from onceq.job_fences where key = 'absent'`)
	require.NoError(t, err)
	begin := func(statement string) pgx.Tx {
		tx, err := owner(t, db).Begin(ctx)
		require.NoError(t, err)
		t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
		_, err = tx.Exec(ctx, statement)
		require.NoError(t, err)
		return tx
	}
	lock := begin(`select from onceq.job_fences where key = 'c' for update`)
	other := begin(`set local deadlock_timeout = '1h'`) // Postgres ends the redrive, and not this one
	may := asOwner(t, db)
	waiting := func(n int) bool {
		return sqlOne[bool](t, may, `
select count(*) = $1 from pg_stat_activity
 where datname = current_database() and wait_event_type = 'Lock'`, n)
	}
	redriven, enqueued := make(chan [2]int, 1), make(chan error, 1)
	failed := make(chan error, 1)
	go func() {
		chosen := onceqops.Filter{All: true, States: []onceq.State{onceq.StateCancelled}}
		n, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, chosen)
		redriven <- [2]int{n, taken}
		failed <- err
	}()
	eventually(t, "the redrive has b and waits for c", func() bool { return waiting(1) })
	go func() {
		_, err := q.EnqueueMany(ctx, other, jobs[:2])
		enqueued <- cmp.Or(err, other.Commit(ctx))
	}()
	eventually(t, "the other call waits", func() bool { return waiting(2) })
	require.NoError(t, lock.Rollback(ctx))
	require.NoError(t, receive(t, enqueued))
	require.NoError(t, receive(t, failed))
	require.Equal(t, [2]int{1, 2}, receive(t, redriven))
}

// hold lets the two meet.
func (m meeting) hold(t *testing.T, db *queuetest.DB) {
	ctx, end := context.WithTimeout(t.Context(), patience)
	defer end()
	begin := func() (pgx.Tx, uint32) {
		tx, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		return tx, tx.Conn().PgConn().PID()
	}
	one, firstPID := begin()
	other, otherPID := begin()
	defer func() { _ = one.Rollback(context.Background()) }()
	defer func() { _ = other.Rollback(context.Background()) }()
	waits := func(pid uint32) bool {
		return sqlOne[bool](t, db, `select exists (select from pg_locks where pid = $1 and not granted)`, pid)
	}
	if m.before != nil {
		require.NoError(t, m.before(ctx, other))
	}
	between, goOn := make(chan struct{}), make(chan struct{})
	reached := sync.OnceFunc(func() { close(between) })
	m.filter.Progress = func(int) error { reached(); <-goOn; return nil }
	first, then := make(chan error, 1), make(chan error, 1)
	go func() {
		first <- cmp.Or(m.first(ctx, one, m.filter), one.Commit(ctx))
	}()
	eventually(t, "the first one is between two parts, or waits", func() bool {
		select {
		case <-between:
			return true
		default:
			return waits(firstPID)
		}
	})
	go func() {
		then <- cmp.Or(m.then(ctx, other), other.Commit(ctx))
	}()
	eventually(t, "the other one waits, or has ended", func() bool { return len(then) > 0 || waits(otherPID) })
	close(goOn)
	require.NoError(t, receive(t, first))
	require.NoError(t, receive(t, then))
}
