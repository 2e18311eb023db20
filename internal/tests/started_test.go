package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/queuetest"
)

// asks enqueues in one of the ways that there are.
type asks func(ctx context.Context, db onceq.DB, j onceq.Job) (onceq.Result, error)

func waysToEnqueue(q *onceq.Queue) map[string]asks {
	return map[string]asks{
		"Enqueue": q.Enqueue,
		"EnqueueMany": func(ctx context.Context, db onceq.DB, j onceq.Job) (onceq.Result, error) {
			all, err := q.EnqueueMany(ctx, db, []onceq.Job{{Kind: "beside"}, j})
			if len(all) < 2 {
				return onceq.Result{}, err
			}
			return all[1], err
		},
		"SQL": func(ctx context.Context, db onceq.DB, j onceq.Job) (r onceq.Result, err error) {
			payload, err := json.Marshal(j.Payload)
			if err != nil {
				return r, err
			}
			options := map[string]any{"window": "until_started"}
			if j.Replace > 0 {
				options["replace"] = []string{"payload"}
			}
			if j.Scope != "" {
				options["scope"] = j.Scope
			}
			rows, err := db.Query(ctx, `select id, duplicate from onceq.enqueue($1, $2, $3, $4)`, j.Kind, payload, j.Key, options)
			if err != nil {
				return r, err
			}
			_, err = pgx.ForEachRow(rows, []any{&r.ID, &r.Duplicate}, func() error { return nil })
			return r, err
		},
	}
}

// indexJobs claims all jobs that are due, returns those of the kind index, and completes the others.
func indexJobs(t *testing.T, db *queuetest.DB) (found []*onceq.Lease) {
	t.Helper()
	for leases := []*onceq.Lease{nil}; len(leases) > 0; {
		var err error
		leases, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 10})
		require.NoError(t, err)
		for _, l := range leases {
			if l.Kind == "index" {
				found = append(found, l)
			} else {
				require.NoError(t, l.Complete(t.Context(), db.Pool))
			}
		}
	}
	return found
}

// A job that runs has its key until the next one asks for it: with the same payload or with another, and never with that of
// another kind. One that waits for its next attempt has its key. The first job's end leaves the second one's key alone.
func TestUntilStarted(t *testing.T) {
	t.Parallel()
	for name := range waysToEnqueue(nil) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			enqueue := waysToEnqueue(q)[name]
			index := func(version int) onceq.Job {
				return onceq.Job{Kind: "index", Key: "42", Payload: version, Window: onceq.UntilStarted, Queue: "default"}
			}
			ask := func(j onceq.Job) onceq.Result {
				t.Helper()
				r, err := enqueue(ctx, db.Pool, j)
				require.NoError(t, err)
				return r
			}
			claim := func(id int64) *onceq.Lease {
				t.Helper()
				all := indexJobs(t, db)
				require.Len(t, all, 1)
				require.Equal(t, id, all[0].ID)
				return all[0]
			}
			first := ask(index(1))
			require.False(t, first.Duplicate)
			require.Equal(t, first.ID, ask(index(1)).ID)
			_, err := enqueue(ctx, db.Pool, index(2))
			require.Error(t, err) // it waits, and has another payload

			running := claim(first.ID)
			other := index(1)
			other.Kind, other.Scope = "other", "index"
			_, err = enqueue(ctx, db.Pool, other)
			require.Error(t, err)
			_, err = q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "index", Key: "42", Payload: 2})
			require.ErrorIs(t, err, onceq.ErrMismatch) // who does not say UntilStarted waits for its end

			// What is rolled back leaves the key to the first job.
			tx, err := db.Pool.Begin(ctx)
			require.NoError(t, err)
			r, err := enqueue(ctx, tx, index(2))
			require.NoError(t, err)
			require.False(t, r.Duplicate)
			require.NoError(t, tx.Rollback(ctx))
			r, err = q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "index", Key: "42", Payload: 1})
			require.NoError(t, err)
			require.Equal(t, first.ID, r.ID)

			second := ask(index(2))
			require.False(t, second.Duplicate)
			require.Greater(t, second.ID, first.ID)
			require.Equal(t, second.ID, ask(index(2)).ID)
			require.NoError(t, running.Complete(ctx, db.Pool))
			require.Equal(t, second.ID, ask(index(2)).ID)

			running = claim(second.ID)
			require.NoError(t, running.Fail(ctx, fmt.Errorf("fails")))
			r = ask(index(2))
			require.True(t, r.Duplicate)
			require.Equal(t, second.ID, r.ID)
			require.NoError(t, queuetest.Invariants(ctx, db.Pool, "onceq"))
		})
	}
}

// With Replace a job that waits keeps its key and is changed, and one that runs leaves its key unchanged.
// Workers leave a changed job alone until the transaction that asked has ended: it sees what that one wrote.
func TestUntilStarted_Replace(t *testing.T) {
	t.Parallel()
	for name := range waysToEnqueue(nil) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			enqueue := waysToEnqueue(q)[name]
			ask := func(db onceq.DB, version int) (id int64, duplicate bool) {
				t.Helper()
				r, err := enqueue(ctx, db, onceq.Job{
					Kind: "index", Key: "42", Payload: version, Queue: "default",
					Window: onceq.UntilStarted, Replace: onceq.ReplacePayload,
				})
				require.NoError(t, err)
				return r.ID, r.Duplicate
			}
			first, _ := ask(db.Pool, 1)
			tx, err := db.Pool.Begin(ctx)
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(ctx) }()
			for version := range 3 {
				id, duplicate := ask(tx, 2+version)
				require.True(t, duplicate)
				require.Equal(t, first, id)
			}
			require.Empty(t, indexJobs(t, db))
			require.NoError(t, tx.Commit(ctx))
			require.NoError(t, queuetest.Invariants(ctx, db.Pool, "onceq"))

			running := indexJobs(t, db)
			require.Len(t, running, 1)
			require.JSONEq(t, "4", string(running[0].Payload))
			second, duplicate := ask(db.Pool, 5)
			require.False(t, duplicate)
			id, duplicate := ask(db.Pool, 6)
			require.True(t, duplicate)
			require.Equal(t, second, id)
			info, err := q.Get(ctx, db.Pool, first)
			require.NoError(t, err)
			require.JSONEq(t, "4", string(info.Payload))
			require.NoError(t, running[0].Complete(ctx, db.Pool))
			require.NoError(t, queuetest.Invariants(ctx, db.Pool, "onceq"))
		})
	}
}

// A job that nobody has is not started before the transaction that asks for its key again ends, whether it waits, has failed once, or
// waits in a lane. So its handler sees what that transaction has written.
func TestUntilStarted_SeesWhatCommitsLater(t *testing.T) {
	t.Parallel()
	for name := range waysToEnqueue(nil) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			enqueue := waysToEnqueue(q)[name]
			job := onceq.Job{Kind: "index", Key: "42", Payload: 1, Window: onceq.UntilStarted}
			first := add(t, db, job)
			for range 2 { // first it waits, then it has failed
				tx := begin(t, db)
				r, err := enqueue(ctx, tx, job)
				require.NoError(t, err)
				require.Equal(t, first, r.ID)
				require.True(t, r.Duplicate)
				require.Empty(t, indexJobs(t, db))
				commit(t, tx)
				running := indexJobs(t, db)
				require.Len(t, running, 1)
				require.NoError(t, running[0].Fail(ctx, fmt.Errorf("fails")))
				sqlRun(t, db, `update onceq.jobs set run_at = statement_timestamp() where id = $1`, first)
			}

			// Two ask while it runs. The second one waits for the first one's commit, and the new job for the second one's.
			running := indexJobs(t, db)
			require.Len(t, running, 1)
			one, two := begin(t, db), begin(t, db)
			made, err := enqueue(ctx, one, job)
			require.NoError(t, err)
			require.False(t, made.Duplicate)
			met := make(chan onceq.Result, 1)
			go func() {
				r, err := enqueue(ctx, two, job)
				if err != nil {
					t.Error(err)
				}
				met <- r
			}()
			until(t, db, `exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`)
			commit(t, one)
			require.Equal(t, made.ID, (<-met).ID)
			require.NoError(t, running[0].Complete(ctx, db.Pool))
			require.Empty(t, indexJobs(t, db))
			commit(t, two)
			running = indexJobs(t, db)
			require.Len(t, running, 1)
			require.Equal(t, made.ID, running[0].ID)
			require.NoError(t, running[0].Complete(ctx, db.Pool))
			require.NoError(t, queuetest.Invariants(ctx, db.Pool, "onceq"))
		})
	}
}

// Customers change while workers index them, in transactions that ask for the key. In the end each has been indexed as he is.
func TestUntilStarted_NoChangeIsMissed(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	must[pgconn.CommandTag](t)(owner(t, db).Exec(ctx, `
		create table public.customers (id int primary key, version int not null default 0, indexed int not null default 0);
		insert into public.customers (id) select generate_series(1, 3); grant all on public.customers to public`))
	index := onceq.Kind[int]{Name: "index", Key: func(id int) string { return fmt.Sprint(id) }, Window: onceq.UntilStarted}
	w := start(t, db, onceq.WorkerConfig{}, index.Handle(func(ctx context.Context, _ *onceq.Lease, id int) error {
		var version int
		if err := db.Pool.QueryRow(ctx, `select version from public.customers where id = $1`, id).Scan(&version); err != nil {
			return err
		}
		_, err := db.Pool.Exec(ctx, `update public.customers set indexed = greatest(indexed, $2) where id = $1`, id, version)
		return err
	}))
	var changing sync.WaitGroup
	for n := range 6 {
		changing.Go(func() {
			for k := range conformance.Sized(40, 400) {
				id := 1 + (n+k)%3
				err := pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
					if _, err := db.Queue.Enqueue(ctx, tx, index.Job(id)); err != nil {
						return err
					}
					_, err := tx.Exec(ctx, `update public.customers set version = version + 1 where id = $1`, id)
					return err
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	changing.Wait()
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Equal(t, 3, sqlOne[int](t, db, `select count(*) from public.customers where indexed = version`))
	require.NoError(t, queuetest.Invariants(ctx, db.Pool, "onceq"))
}

// The same for a job that waits in a lane: a promoter does not let it in before that.
func TestUntilStarted_SeesWhatCommitsLaterInALane(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	job := onceq.Job{Kind: "index", Key: "42", Payload: 1, Window: onceq.UntilStarted, Lane: "a"}
	add(t, db, onceq.Job{Kind: "index", Lane: "a"})
	waits := add(t, db, job)
	ahead, err := q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	require.Len(t, ahead, 1)
	tx := begin(t, db)
	r, err := q.Enqueue(ctx, tx, job)
	require.NoError(t, err)
	require.Equal(t, waits, r.ID)
	require.NoError(t, ahead[0].Complete(ctx, db.Pool))
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	require.Empty(t, leases)
	commit(t, tx)
	eventually(t, "the lane goes on", func() bool {
		leases, err = q.Claim(ctx, onceq.ClaimOptions{})
		require.NoError(t, err)
		return len(leases) == 1
	})
	require.Equal(t, waits, leases[0].ID)
	require.NoError(t, leases[0].Complete(ctx, db.Pool))
}

// A handler may enqueue its own job's key in its transaction: the next run of what goes on for ever.
func TestUntilStarted_AHandlerEnqueuesItsOwnKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	again := onceq.Kind[int]{Name: "again", Key: func(int) string { return "one" }, Window: onceq.UntilStarted}
	runs := 0
	handler := again.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, n int) error {
		runs++
		if n == 3 {
			return nil
		}
		r, err := db.Queue.Enqueue(ctx, tx, again.Job(n+1))
		if err == nil && r.Duplicate {
			err = fmt.Errorf("job %d is a duplicate", r.ID)
		}
		return err
	})
	add(t, db, again.Job(1))
	for _, ran := range db.Drain(handler) {
		require.NoError(t, ran.Err)
	}
	require.Equal(t, 3, runs)
	require.NoError(t, queuetest.Invariants(t.Context(), db.Pool, "onceq"))
}

// The enqueue that takes the key waits for the end of the job that it met running, and then takes the key as that of a finished job.
func TestUntilStarted_BesideTheEnd(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	job := onceq.Job{Kind: "index", Key: "42", Payload: 1, Window: onceq.UntilStarted}
	first := add(t, db, job)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 1})
	require.NoError(t, err)
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	require.NoError(t, leases[0].Complete(ctx, tx))
	job.Payload = 2
	got := make(chan onceq.Result, 1)
	go func() {
		r, err := q.Enqueue(ctx, db.Pool, job)
		if err != nil {
			t.Error(err)
		}
		got <- r
	}()
	until(t, db, `exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`)
	require.NoError(t, tx.Commit(ctx))
	r := <-got
	require.False(t, r.Duplicate)
	require.Greater(t, r.ID, first)
	require.NoError(t, queuetest.Invariants(ctx, db.Pool, "onceq"))
}

// The end of a job waits for a transaction that has taken its key, and leaves that key alone.
func TestUntilStarted_TheEndWaits(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	job := onceq.Job{Kind: "index", Key: "42", Payload: 1, Window: onceq.UntilStarted}
	add(t, db, job)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 1})
	require.NoError(t, err)
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	job.Payload = 2
	second, err := q.Enqueue(ctx, tx, job)
	require.NoError(t, err)
	require.False(t, second.Duplicate)
	ended := make(chan error, 1)
	go func() { ended <- leases[0].Complete(ctx, db.Pool) }()
	until(t, db, `exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`)
	require.NoError(t, tx.Commit(ctx))
	require.NoError(t, <-ended)
	r, err := q.Enqueue(ctx, db.Pool, job)
	require.NoError(t, err)
	require.Equal(t, second.ID, r.ID)
	require.NoError(t, queuetest.Invariants(ctx, db.Pool, "onceq"))
}

// Outside of jobs nothing is claimed ahead of its work, so the word has no meaning there.
func TestUntilStarted_IsForJobs(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	var bad *onceq.InvalidError
	_, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Scope: "s", Key: "k", Window: onceq.UntilStarted},
		func(context.Context, *onceq.FenceLease) (int, error) { return 0, nil })
	require.ErrorAs(t, err, &bad)
	require.Equal(t, "Window", bad.Field)
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Window: onceq.UntilStarted})
	require.ErrorAs(t, err, &bad)
	require.Equal(t, "Window", bad.Field)
}

// Some change jobs, and others ask for them after their commit. All lock the jobs in one order, whatever they want of each.
func TestUntilStarted_BesideReplaceLocksInOneOrder(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	job := func(key string, payload int) onceq.Job { return onceq.Job{Kind: "index", Key: key, Payload: payload} }
	after, changed := job("x", 1), job("x", 2)
	after.Window, changed.Replace = onceq.UntilStarted, onceq.ReplacePayload
	of := func(j onceq.Job, key string) onceq.Job { j.Key = key; return j }
	var ids []int64
	for _, key := range []string{"x", "y", "z"} {
		ids = append(ids, add(t, db, job(key, 1)))
	}
	stranger, one, two := begin(t, db), begin(t, db), begin(t, db)
	must[pgconn.CommandTag](t)(stranger.Exec(ctx, `select from onceq.jobs where id = $1 for update`, ids[2]))
	ended := make(chan error, 2)
	enqueue := func(tx pgx.Tx, jobs ...onceq.Job) {
		go func() {
			_, err := db.Queue.EnqueueMany(ctx, tx, jobs)
			ended <- errors.Join(err, tx.Commit(ctx))
		}()
	}
	waits := func(n int) string {
		return fmt.Sprintf(`%d = (select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`, n)
	}
	enqueue(one, changed, of(after, "y"), of(changed, "z"))
	until(t, db, waits(1))
	enqueue(two, after, of(changed, "y"), of(changed, "z"))
	until(t, db, waits(2))
	commit(t, stranger)
	require.NoError(t, receive(t, ended))
	require.NoError(t, receive(t, ended))
}
