package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func enqueueEveryForm(t *testing.T, set setup) {
	e := set(t)
	EveryForm(t, e.DB, e.Handles.DB)
}

// EveryForm checks every form of enqueueing and every answer, in a database of any schema.
func EveryForm(t *testing.T, db *queuetest.DB, in onceq.DB) {
	ctx := t.Context()
	one := func(job onceq.Job) onceq.Result {
		t.Helper()
		r, err := db.Queue.Enqueue(ctx, in, job)
		require.NoError(t, err)
		return r
	}
	jobs := []onceq.Job{
		{Kind: "k", Payload: map[string]any{"a": `é'"\`}},
		{Kind: "k", Payload: []byte{0, 1, 255, '\'', '\\'}, Metadata: map[string]string{"m": `'\"`}},
		{Kind: "k", Key: `key '"\ $1`, Scope: `s"'`, Payload: json.RawMessage(`[1.0]`), Window: onceq.UntilFinished},
		{Kind: "k", Key: "bytes", Payload: []byte{}, Delay: time.Hour},
		{Kind: "k", Key: "ignored", IgnorePayload: true, RunAt: time.Now().Add(time.Hour)},
	}
	for _, job := range jobs {
		first := one(job)
		require.False(t, first.Duplicate)
		if job.Key == "" {
			continue
		}
		second := one(job)
		require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: first.State}, second)
	}
	for _, part := range [][]onceq.Job{jobs[:1], jobs[:2], jobs} {
		rs, err := db.Queue.EnqueueMany(ctx, in, part)
		require.NoError(t, err)
		require.Len(t, rs, len(part))
	}
	_, err := db.Queue.Enqueue(ctx, in, onceq.Job{Kind: "k", Key: jobs[2].Key, Scope: jobs[2].Scope, Payload: 2})
	require.ErrorIs(t, err, onceq.ErrMismatch)

	leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 100})
	require.NoError(t, err)
	require.Len(t, leases, 8)
	for _, l := range leases {
		if l.Payload == nil {
			require.Equal(t, jobs[1].Payload, l.Bytes)
			require.Equal(t, jobs[1].Metadata, l.Metadata)
		}
		require.NoError(t, l.SetResult(map[string]int{"n": 1}))
		require.NoError(t, l.Complete(ctx, in))
	}
	// Each form in turn takes over the expired key.
	for i := range 3 {
		var r onceq.Result
		switch i {
		case 0:
			r = one(jobs[2])
		case 1:
			rs, err := db.Queue.EnqueueMany(ctx, in, jobs[1:3])
			require.NoError(t, err)
			r = rs[1]
		case 2:
			sender, ok := in.(batches)
			if !ok {
				continue
			}
			b := &pgx.Batch{}
			var pending []*onceq.Pending
			for _, job := range jobs {
				p, err := db.Queue.EnqueueInBatch(b, job)
				require.NoError(t, err)
				pending = append(pending, p)
			}
			require.NoError(t, sender.SendBatch(ctx, b).Close())
			for i, p := range pending {
				got, err := p.Result(ctx, in)
				require.NoError(t, err)
				require.Equal(t, i > 2, got.Duplicate)
				if i == 2 {
					r = got
				}
			}
		}
		require.False(t, r.Duplicate)
		leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 100})
		require.NoError(t, err)
		for _, l := range leases {
			require.NoError(t, l.Complete(ctx, in))
		}
	}
	strict := jobs[3]
	strict.Strict = true
	_, err = db.Queue.Enqueue(ctx, in, strict)
	require.ErrorIs(t, err, onceq.ErrDuplicate)
}

func enqueueDuplicateInEveryState(t *testing.T, set setup) {
	e := set(t)
	ctx, in := t.Context(), e.Handles.DB
	job := onceq.Job{Kind: "k", Key: "a", Payload: 1, MaxAttempts: 2}
	same := func(id int64, state onceq.State, output string) {
		t.Helper()
		want := onceq.Result{ID: id, Duplicate: true, State: state}
		if output != "" {
			want.Output = json.RawMessage(output)
		}
		require.Equal(t, want, e.enqueue(in, job))
		many, err := e.q.EnqueueMany(ctx, in, []onceq.Job{job})
		require.NoError(t, err)
		require.Equal(t, []onceq.Result{want}, many)
		if sender, ok := in.(batches); ok {
			b := &pgx.Batch{}
			p, err := e.q.EnqueueInBatch(b, job)
			require.NoError(t, err)
			require.NoError(t, sender.SendBatch(ctx, b).Close())
			got, err := p.Result(ctx, in)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
		strict := job
		strict.Strict = true
		_, err = e.q.Enqueue(ctx, in, strict)
		var dup *onceq.DuplicateError
		require.ErrorAs(t, err, &dup)
		require.ErrorIs(t, err, onceq.ErrDuplicate)
		require.Equal(t, &onceq.DuplicateError{Scope: "k", Key: "a", Existing: want}, dup)
	}

	job.Delay = time.Hour
	id := e.enqueue(in, job).ID
	same(id, onceq.StateDelayed, "")
	_, err := onceqops.New(e.q).Retry(ctx, in, id)
	require.NoError(t, err)
	same(id, onceq.StateWaiting, "")
	l := e.claim()
	same(id, onceq.StateRunning, "")
	require.NoError(t, l.Fail(ctx, errors.New("no")))
	same(id, onceq.StateRetrying, "")
	_, err = onceqops.New(e.q).Retry(ctx, in, id)
	require.NoError(t, err)
	require.NoError(t, e.claim().Fail(ctx, errors.New("no")))
	same(id, onceq.StateDead, "")
	require.NoError(t, onceqops.New(e.q).Discard(ctx, in, id))

	id = e.enqueue(in, job).ID
	_, _, err = onceqops.New(e.q).CancelMany(ctx, in, onceqops.Filter{IDs: []int64{id}, KeepKeys: true}) // it was never claimed
	require.NoError(t, err)
	same(id, onceq.StateCancelled, "")
	require.NoError(t, onceqops.New(e.q).Discard(ctx, in, id))

	job.Delay = 0
	id = e.enqueue(in, job).ID
	e.finish(map[string]any{"message": "m1"})
	same(id, onceq.StateCompleted, `{"message": "m1"}`)
}

func enqueueRefusedLeavesTheTransactionUsable(t *testing.T, set setup) {
	e := set(t)
	first := e.enqueue(e.Handles.DB, onceq.Job{Kind: "k", Key: "a", Payload: 1})
	tx := e.begin(pgx.ReadCommitted)
	_, err := e.q.Enqueue(t.Context(), tx.DB, onceq.Job{Kind: "k", Key: "a", Payload: 1, Strict: true})
	var dup *onceq.DuplicateError
	require.ErrorAs(t, err, &dup)
	require.Equal(t, first.ID, dup.Existing.ID)
	_, err = e.q.Enqueue(t.Context(), tx.DB, onceq.Job{Kind: "k", Key: "a", Payload: 2})
	var mismatch *onceq.MismatchError
	require.ErrorAs(t, err, &mismatch)
	require.Equal(t, &onceq.MismatchError{
		Scope: "k", Key: "a", Existing: onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting},
		Kind: "k", ExistingKind: "k", Differ: []string{"$"},
	}, mismatch)

	// What cannot be stored is refused before anything is sent.
	var invalid *onceq.InvalidError
	for field, job := range map[string]onceq.Job{
		"Key":     {Kind: "k", Key: string(make([]byte, 3000))},
		"Payload": {Kind: "k", Payload: json.RawMessage(`"\u0000"`)},
		"Queue":   {Kind: "k", Queue: "\xff"},
	} {
		_, err = e.q.Enqueue(t.Context(), tx.DB, job)
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, field, invalid.Field)
	}
	_, err = e.q.EnqueueMany(t.Context(), tx.DB, []onceq.Job{{Kind: "k"}, {Kind: "k", Key: "b"}, {Kind: "k", Key: "b", Scope: "other"}, {Kind: "k", Key: "b"}})
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, "jobs[3].Key", invalid.Field)
	require.Contains(t, err.Error(), "jobs[1]")
	_, err = e.q.EnqueueMany(t.Context(), tx.DB, []onceq.Job{{Kind: "k", Key: "twice"}, {Kind: "k", Key: "twice", Scope: "other"}})
	require.NoError(t, err)

	require.Equal(t, 3, get[int](t, tx.DB, `select count(*)::int from onceq.jobs`))
	e.enqueue(tx.DB, onceq.Job{Kind: "k", Key: "b"})
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, 4, e.jobs())
}

func enqueueBelongsToTheTransaction(t *testing.T, set setup) {
	e := set(t)
	ctx, in := t.Context(), e.Handles.DB
	for _, key := range []string{"", "a"} {
		tx := e.begin(pgx.ReadCommitted)
		r := e.enqueue(tx.DB, onceq.Job{Kind: "k", Key: key})
		require.Equal(t, onceq.StateWaiting, r.State)
		_, err := e.q.EnqueueMany(ctx, tx.DB, []onceq.Job{{Kind: "k"}, {Kind: "k", Key: key + "many"}})
		require.NoError(t, err)
		require.Zero(t, e.jobs())
		require.NoError(t, tx.Rollback(ctx))
		require.Zero(t, get[int](t, e.Pool, `select (select count(*) from onceq.jobs)::int + (select count(*) from onceq.job_fences)::int`))
	}

	require.False(t, e.enqueue(in, onceq.Job{Kind: "k", Key: "a"}).Duplicate)
	rs, err := e.q.EnqueueMany(ctx, in, []onceq.Job{{Kind: "k", Key: "a"}, {Kind: "k"}})
	require.NoError(t, err)
	require.True(t, rs[0].Duplicate)
	require.Equal(t, 2, e.jobs())

	tx := e.begin(pgx.ReadCommitted)
	e.enqueue(tx.DB, onceq.Job{Kind: "k", Key: "outside"})
	exec(t, tx.DB, `savepoint s`)
	e.enqueue(tx.DB, onceq.Job{Kind: "k", Key: "inside"})
	exec(t, tx.DB, `rollback to savepoint s`)
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, 3, e.jobs())
}

func enqueueWaitsForTheFirstProducer(t *testing.T, set setup) {
	for _, commit := range []bool{false, true} {
		for _, expired := range []bool{false, true} {
			t.Run(fmt.Sprintf("commit %t, expired %t", commit, expired), func(t *testing.T) {
				t.Parallel()
				e := set(t)
				job := onceq.Job{Kind: "k", Key: "a", Window: onceq.UntilFinished}
				if expired {
					e.enqueue(e.Handles.DB, job)
					e.finish(nil)
				}
				a := e.begin(pgx.ReadCommitted)
				first := e.enqueue(a.DB, job)
				b := e.enqueueAsync(e.Handles.DB, job)
				e.blocked()
				if commit {
					require.NoError(t, a.Commit(t.Context()))
				} else {
					require.NoError(t, a.Rollback(t.Context()))
				}
				r := <-b
				require.NoError(t, r.err)
				require.Equal(t, commit, r.Duplicate)
				require.Equal(t, commit, r.ID == first.ID)
				require.Equal(t, 1, e.jobs())
			})
		}
	}
}

// While a completing handler's transaction is open, enqueueing its key again waits for the outcome and then returns it.
func enqueueWaitsForACompletionThatFreesTheKey(t *testing.T, set setup) {
	e := set(t)
	job := onceq.Job{Kind: "k", Key: "a", Window: onceq.UntilFinished}
	e.enqueue(e.Handles.DB, job)
	l := e.claim()
	tx := e.begin(pgx.ReadCommitted)
	require.NoError(t, l.Complete(t.Context(), tx.DB))
	// In the same transaction the key is already free again.
	next := e.enqueue(tx.DB, job)
	require.False(t, next.Duplicate)
	require.Greater(t, next.ID, l.ID)
	other := e.enqueueAsync(e.Handles.DB, job)
	e.blocked()
	require.NoError(t, tx.Commit(t.Context()))
	r := <-other
	require.NoError(t, r.err)
	require.Equal(t, onceq.Result{ID: next.ID, Duplicate: true, State: onceq.StateWaiting}, r.Result)
}

func enqueueAboveReadCommitted(t *testing.T, set setup) {
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			e := set(t)
			ctx, in := t.Context(), e.Handles.DB
			old := e.enqueue(in, onceq.Job{Kind: "k", Key: "old"})
			expired := onceq.Job{Kind: "k", Key: "expired", Queue: "q", Scope: "s", Window: onceq.UntilFinished}
			e.enqueue(in, expired)
			exec(t, e.Pool, `delete from onceq.jobs where key = 'expired'`)
			exec(t, e.Pool, `update onceq.job_fences set state = 3, finished_at = now() where key = 'expired'`)

			// A key that was taken before the snapshot is an ordinary duplicate, or an ordinary takeover.
			tx := e.begin(level)
			require.Equal(t, string(level), get[string](t, tx.DB, `select current_setting('transaction_isolation')`))
			require.Equal(t, onceq.Result{ID: old.ID, Duplicate: true, State: onceq.StateWaiting}, e.enqueue(tx.DB, onceq.Job{Kind: "k", Key: "old"}))
			require.False(t, e.enqueue(tx.DB, onceq.Job{Kind: "k", Key: "new"}).Duplicate)
			require.False(t, e.enqueue(tx.DB, expired).Duplicate)
			require.NoError(t, tx.Rollback(ctx))

			// A key that was taken after it is a serialization failure.
			for _, many := range []bool{false, true} {
				for _, key := range []string{"later", "expired"} {
					job := onceq.Job{Kind: "k", Key: key, Scope: "s", Window: onceq.UntilFinished}
					tx := e.begin(level)
					get[int](t, tx.DB, `select count(*)::int from onceq.job_fences`)
					e.enqueue(in, job)
					var err error
					if many {
						_, err = e.q.EnqueueMany(ctx, tx.DB, []onceq.Job{job})
					} else {
						_, err = e.q.Enqueue(ctx, tx.DB, job)
					}
					require.Error(t, err)
					require.True(t, onceq.IsRetryable(err), "%v", err)
					require.NoError(t, tx.Rollback(ctx))
					exec(t, e.Pool, `delete from onceq.jobs where key = $1`, key)
					exec(t, e.Pool, `update onceq.job_fences set state = 3, finished_at = now() where key = $1`, key)
				}
			}
		})
	}
}

func enqueueDeadlockIsRecognised(t *testing.T, set setup) {
	e := set(t)
	ctx := t.Context()
	x, y := e.begin(pgx.ReadCommitted), e.begin(pgx.ReadCommitted)
	e.enqueue(x.DB, onceq.Job{Kind: "k", Key: "a"})
	e.enqueue(y.DB, onceq.Job{Kind: "k", Key: "b"})
	waits := e.enqueueAsync(x.DB, onceq.Job{Kind: "k", Key: "b"})
	e.blocked()
	_, err := e.q.Enqueue(ctx, y.DB, onceq.Job{Kind: "k", Key: "a"})
	if err == nil {
		err = (<-waits).err
		require.NoError(t, x.Rollback(ctx))
	} else {
		require.NoError(t, y.Rollback(ctx))
		require.NoError(t, (<-waits).err)
	}
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "40P01", pgErr.Code)
	require.True(t, onceq.IsRetryable(err))
}

func enqueueManyOfAnyNumber(t *testing.T, set setup) {
	e := set(t)
	in := e.Handles.DB
	for _, n := range []int{0, 1, 2, 1999, 2000, 2001, 5000} {
		jobs := make([]onceq.Job, n)
		for i := range jobs {
			jobs[i] = onceq.Job{Kind: "k", Payload: i}
			switch i % 3 {
			case 1:
				jobs[i].Key = fmt.Sprintf("%d of %d", n-i, n) // mostly descending
			case 2:
				jobs[i].Payload = []byte(fmt.Sprint(i))
			}
		}
		results, err := e.q.EnqueueMany(t.Context(), in, jobs)
		require.NoError(t, err)
		require.Len(t, results, n)
		ids := make([]int64, n)
		for i, r := range results {
			ids[i] = r.ID
			require.Equal(t, onceq.Result{ID: r.ID, State: onceq.StateWaiting}, r)
			require.True(t, i == 0 || ids[i-1] < r.ID, "ids grow in the order of the input")
		}
		require.Equal(t, n, get[int](t, e.Pool, `select count(*)::int
			  from unnest($1::bigint[]) with ordinality u(id, n) join onceq.jobs j using (id)
			 where u.n - 1 = coalesce(j.payload #>> '{}', convert_from(j.payload_bytes, 'UTF8'))::int
			   and (j.key is null) = ((u.n - 1) % 3 <> 1)
			   and (j.key is null or exists (select from onceq.job_fences f where f.key = j.key and f.job_id = j.id))`, ids))

		again, err := e.q.EnqueueMany(t.Context(), in, jobs)
		require.NoError(t, err)
		for i, r := range again {
			require.Equal(t, i%3 == 1, r.Duplicate)
			if r.Duplicate {
				require.Equal(t, results[i].ID, r.ID)
			}
		}
	}
}

func enqueueManyOfDifferentJobs(t *testing.T, set setup) {
	e := set(t)
	jobs := []onceq.Job{
		{Kind: "a", Queue: "q1", Priority: onceq.PriorityHigh, Payload: 1},
		{Kind: "b", Queue: "q2", Priority: onceq.PriorityLow, MaxAttempts: 7, Payload: []byte{0, 255}, Key: "x", Window: onceq.Forever},
		{Kind: "c", Delay: time.Hour, Metadata: map[string]string{"a": "b"}, Key: "x"},
		{Kind: "a", Queue: "q1", Priority: onceq.PriorityHigh, Payload: "two", Key: "y", Scope: "s", Window: time.Second, IgnorePayload: true},
	}
	results, err := e.q.EnqueueMany(t.Context(), e.Handles.DB, jobs)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDelayed, results[2].State)
	rows, err := e.Pool.Query(t.Context(), `select concat_ws(' ', j.kind, j.queue, j.priority, j.max_attempts, j.payload, j.payload_bytes, j.metadata,
		j.scope, j.key, f.lifetime, length(f.fingerprint), j.run_at > now() + interval '59 minutes')
		from onceq.jobs j left join onceq.job_fences f using (scope, key) order by j.id`)
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{
		`a q1 -1 25 1 f`,
		`b q2 1 7 \x00ff b x -1 18 f`,
		`c default 0 25 null {"a": "b"} c x 86400000 18 t`,
		`a q1 -1 25 "two" s y 1000 3 f`,
	}, got)
}

func enqueueManyRefusedInATransaction(t *testing.T, set setup) {
	e := set(t)
	in := e.Handles.DB
	first := e.enqueue(in, onceq.Job{Kind: "k", Key: "a", Payload: 1})
	second := e.enqueue(in, onceq.Job{Kind: "k", Key: "b", Payload: 1})
	jobs := []onceq.Job{
		{Kind: "k", Key: "new"}, {Kind: "k", Key: "a", Payload: 2}, {Kind: "k"}, {Kind: "k", Key: "b", Payload: 1, Strict: true}, {Kind: "k", Key: "a", Scope: "s"},
	}
	check := func(err error) {
		t.Helper()
		var mismatch *onceq.MismatchError
		var dup *onceq.DuplicateError
		require.ErrorAs(t, err, &mismatch)
		require.ErrorAs(t, err, &dup)
		require.Equal(t, first.ID, mismatch.Existing.ID)
		require.Equal(t, second.ID, dup.Existing.ID)
	}
	results, err := e.q.EnqueueMany(t.Context(), in, jobs)
	check(err)
	require.Equal(t, []onceq.Result{
		{}, {ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, {}, {ID: second.ID, Duplicate: true, State: onceq.StateWaiting}, {},
	}, results, "rolled back: no result may claim a job")
	require.Equal(t, 2, e.jobs())

	tx := e.begin(pgx.ReadCommitted)
	results, err = e.q.EnqueueMany(t.Context(), tx.DB, jobs)
	check(err)
	for i, r := range results {
		require.NotZero(t, r.ID)
		require.Equal(t, i == 1 || i == 3, r.Duplicate)
	}
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, 5, e.jobs())
}

func enqueueManyIsAllOrNothing(t *testing.T, set setup) {
	e := set(t)
	in := e.Handles.DB
	e.enqueue(in, onceq.Job{Kind: "k", Key: "3000", Payload: "first"})
	jobs := make([]onceq.Job, 4100)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k", Key: fmt.Sprint(i)}
	}
	results, err := e.q.EnqueueMany(t.Context(), in, jobs)
	require.ErrorIs(t, err, onceq.ErrMismatch)
	require.Zero(t, results[0])
	require.Equal(t, 1, e.jobs())
	owner := Owner(t, e.DB)
	exec(t, owner, `create function no() returns trigger language plpgsql as $$ begin raise 'no'; end $$`)
	exec(t, owner, `create trigger no before insert on jobs for each row when (new.key = '4099') execute function no()`)
	jobs[3000].IgnorePayload = true
	results, err = e.q.EnqueueMany(t.Context(), in, jobs)
	require.Error(t, err)
	require.Nil(t, results)
	require.Equal(t, 1, e.jobs())
}

// The library's own transaction does not depend on the database's default.
func enqueueManyOpensItsTransactionAtReadCommitted(t *testing.T, set setup) {
	e := set(t,
		`do $$ begin execute format('alter database %I set default_transaction_isolation = serializable', current_database()); end $$`,
		`create function level() returns trigger language plpgsql as $$
		 begin new.metadata = to_jsonb(current_setting('transaction_isolation')); return new; end $$`,
		`create trigger level before insert on jobs for each row execute function level()`)
	level := func() string {
		return get[string](t, e.Pool, `with gone as (delete from onceq.jobs returning metadata) select metadata #>> '{}' from gone`)
	}
	e.enqueue(e.Handles.DB, onceq.Job{Kind: "k"})
	require.Equal(t, "serializable", level(), "the default")
	_, err := e.q.EnqueueMany(t.Context(), e.Handles.DB, []onceq.Job{{Kind: "k", Key: "a"}})
	require.NoError(t, err)
	require.Equal(t, "read committed", level())
	exec(t, e.Pool, `delete from onceq.job_fences`)
}

func enqueueNamesWhatIsWrongWithTheTables(t *testing.T, set setup) {
	e := set(t)
	ctx, in := t.Context(), e.Handles.DB
	e.enqueue(in, onceq.Job{Kind: "k"})
	owner := Owner(t, e.DB)
	for _, key := range []string{"", "a"} {
		exec(t, owner, `select setval('ids', 1, false)`)
		_, err := e.q.Enqueue(ctx, in, onceq.Job{Kind: "k", Key: key})
		require.ErrorIs(t, err, onceq.ErrIDTaken)
		require.False(t, onceq.IsRetryable(err))
		exec(t, owner, `select setval('ids', 1, false)`)
		_, err = e.q.EnqueueMany(ctx, in, []onceq.Job{{Kind: "k", Key: key}})
		require.ErrorIs(t, err, onceq.ErrIDTaken)
	}
	require.Equal(t, 1, e.jobs())

	elsewhere, err := onceq.New(e.Pool, &onceq.Config{Schema: "nowhere"})
	require.NoError(t, err)
	var schema *onceq.SchemaError
	_, err = elsewhere.Enqueue(ctx, in, onceq.Job{Kind: "k"})
	require.ErrorAs(t, err, &schema)
	require.Equal(t, "nowhere", schema.Schema)
}

func bytesComeBack(t *testing.T, set setup) {
	e := set(t)
	in := e.Handles.DB
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	e.enqueue(in, onceq.Job{Kind: "k", Payload: json.RawMessage(` {"b": 1.50, "a": "é\u00e9"} `)})
	l := e.claim()
	require.Equal(t, `{"a": "éé", "b": 1.50}`, string(l.Payload))
	require.Nil(t, l.Bytes)
	for _, raw := range [][]byte{every, {}, []byte(`{"b": 1, "a": 2} `), []byte(`\x00`)} {
		id := e.enqueue(in, onceq.Job{Kind: "k", Payload: raw}).ID
		info, err := e.q.Get(t.Context(), in, id)
		require.NoError(t, err)
		require.Nil(t, info.Payload)
		require.Equal(t, raw, append([]byte{}, info.Bytes...))
		l := e.claim()
		require.Nil(t, l.Payload)
		require.NotNil(t, l.Bytes)
		require.Equal(t, raw, append([]byte{}, l.Bytes...))
		_, err = e.q.EnqueueMany(t.Context(), in, []onceq.Job{{Kind: "k", Payload: raw}})
		require.NoError(t, err)
		require.Equal(t, raw, append([]byte{}, e.claim().Bytes...))
	}
}
