package onceq_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// Every public operation that takes a DB, inside a caller's transaction at each isolation level whose snapshot is older
// than nothing of what it meets: it works, every refusal leaves the transaction usable, and it commits and rolls back
// with the caller's.
func TestPromise2_EveryOperationInTransactionsOfEachIsolationLevel(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
			ctx, q := t.Context(), db.Queue
			enqueue := func(j onceq.Job) int64 {
				t.Helper()
				j.Kind = "k"
				r, err := q.Enqueue(ctx, db.Pool, j)
				require.NoError(t, err)
				return r.ID
			}
			claim := func(id int64) *onceq.Lease {
				t.Helper()
				for {
					leases, err := q.Claim(ctx, onceq.ClaimOptions{})
					require.NoError(t, err)
					require.Len(t, leases, 1)
					if leases[0].ID == id {
						return leases[0]
					}
					require.NoError(t, leases[0].Snooze(ctx, time.Hour))
				}
			}
			dead := func(j onceq.Job) int64 {
				t.Helper()
				id := enqueue(j)
				require.NoError(t, claim(id).Fail(ctx, onceq.Fatal(errors.New("fatal"))))
				return id
			}
			waiting := enqueue(onceq.Job{Key: "waiting"})
			delayed := enqueue(onceq.Job{Key: "delayed", Delay: time.Hour})
			died, died2, died3 := dead(onceq.Job{Key: "died"}), dead(onceq.Job{Key: "died2"}), dead(onceq.Job{Key: "died3"})
			expired := onceq.Job{Kind: "k", Key: "expired", Window: onceq.UntilFinished}
			require.NoError(t, claim(enqueue(expired)).Complete(ctx, nil))
			expired2 := expired
			expired2.Key = "expired2"
			require.NoError(t, claim(enqueue(expired2)).Complete(ctx, nil))
			running, running2, stale := claim(enqueue(onceq.Job{Key: "running"})), claim(enqueue(onceq.Job{})), claim(enqueue(onceq.Job{}))
			db.ExpireLease(stale.ID)
			live := claim(stale.ID)
			heldJob := enqueue(onceq.Job{Key: "held"})
			held := claim(heldJob)
			hold := func() error {
				_, err := onceq.Once(ctx, held, "wire", func(context.Context, string) (int, error) { return 0, errors.New("reset") }, onceq.OnUncertain(onceq.Hold()))
				return err
			}
			require.ErrorIs(t, hold(), onceq.ErrUncertain)
			require.NoError(t, held.Fail(ctx, hold()))
			fence := func(key string, payload any, p onceq.Policy) *onceq.Fence {
				f, err := q.Fence(onceq.FenceSpec{Key: key, Payload: payload, Policy: p})
				require.NoError(t, err)
				return f
			}
			claimed, err := fence("claimed", 1, onceq.Policy{}).Claim(ctx, nil)
			require.NoError(t, err)
			released, err := fence("released", 1, onceq.Policy{}).Claim(ctx, nil)
			require.NoError(t, err)
			doubtful, err := fence("doubtful", 1, onceq.Policy{}).Claim(ctx, nil)
			require.NoError(t, err)
			require.NoError(t, doubtful.Uncertain(ctx, nil, errors.New("reset")))
			require.NoError(t, q.Check(ctx))

			everything := func(tx pgx.Tx) {
				usable := func(what string, err, want error) {
					t.Helper()
					if want == nil {
						require.NoError(t, err, what)
					} else {
						require.ErrorIs(t, err, want, what)
					}
					var one int
					require.NoError(t, tx.QueryRow(ctx, `select 1`).Scan(&one), "after %s", what)
				}
				_, err := q.Enqueue(ctx, tx, onceq.Job{Kind: "k", Key: "new"})
				usable("Enqueue", err, nil)
				r, err := q.Enqueue(ctx, tx, onceq.Job{Kind: "k", Key: "waiting"})
				usable("Enqueue, duplicate", err, nil)
				require.Equal(t, onceq.Result{ID: waiting, Duplicate: true, State: r.State}, r)
				_, err = q.Enqueue(ctx, tx, onceq.Job{Kind: "k", Key: "waiting", Strict: true})
				usable("Enqueue, strict", err, onceq.ErrDuplicate)
				_, err = q.Enqueue(ctx, tx, onceq.Job{Kind: "k", Key: "waiting", Payload: "other"})
				usable("Enqueue, mismatch", err, onceq.ErrMismatch)
				r, err = q.Enqueue(ctx, tx, expired)
				usable("Enqueue, expired", err, nil)
				require.False(t, r.Duplicate)
				_, err = q.EnqueueUnique(ctx, tx, onceq.Job{Kind: "k"})
				var invalid *onceq.InvalidError
				require.ErrorAs(t, err, &invalid)
				usable("EnqueueUnique", nil, nil)
				many, err := q.EnqueueMany(ctx, tx, []onceq.Job{{Kind: "k", Key: "waiting"}, {Kind: "k"}, {Kind: "k", Key: "new2"}, expired2})
				usable("EnqueueMany", err, nil)
				require.Equal(t, []bool{true, false, false, false}, []bool{many[0].Duplicate, many[1].Duplicate, many[2].Duplicate, many[3].Duplicate})
				_, err = q.EnqueueMany(ctx, tx, []onceq.Job{{Kind: "k", Key: "waiting", Payload: "other"}})
				usable("EnqueueMany, mismatch", err, onceq.ErrMismatch)
				b := &pgx.Batch{}
				pending, err := q.EnqueueInBatch(b, onceq.Job{Kind: "k", Key: "delayed"})
				require.NoError(t, err)
				running2.CompleteInBatch(b)
				usable("SendBatch", tx.SendBatch(ctx, b).Close(), nil)
				r, err = pending.Result(ctx, tx)
				usable("Pending.Result", err, nil)
				require.Equal(t, onceq.Result{ID: delayed, Duplicate: true, State: onceq.Delayed}, r)

				usable("Lease.Complete", running.Complete(ctx, tx), nil)
				// A stale completion is meant to stop the transaction: only a savepoint gets around it.
				inner, err := tx.Begin(ctx)
				require.NoError(t, err)
				require.ErrorIs(t, stale.Complete(ctx, inner), onceq.ErrLeaseLost)
				usable("Lease.Complete, stale", inner.Rollback(ctx), nil)

				_, err = q.Get(ctx, tx, waiting)
				usable("Get", err, nil)
				_, err = q.Get(ctx, tx, 1<<40)
				usable("Get, unknown", err, onceq.ErrNotFound)
				_, err = q.GetByKey(ctx, tx, "default", "died")
				usable("GetByKey", err, nil)
				list, err := q.List(ctx, tx, onceq.Filter{States: []onceq.State{onceq.Dead}})
				usable("List", err, nil)
				require.Len(t, list, 3)
				state, err := q.Cancel(ctx, tx, delayed)
				usable("Cancel", err, nil)
				require.Equal(t, onceq.Cancelled, state)
				state, err = q.Cancel(ctx, tx, live.ID)
				usable("Cancel, running", err, nil)
				require.Equal(t, onceq.Running, state)
				_, err = q.Retry(ctx, tx, waiting)
				usable("Retry", err, nil)
				_, err = q.Redrive(ctx, tx, died)
				usable("Redrive", err, nil)
				_, err = q.Redrive(ctx, tx, 1<<40)
				usable("Redrive, unknown", err, onceq.ErrNotFound)
				usable("Discard", q.Discard(ctx, tx, died2), nil)
				usable("Discard, unfinished", q.Discard(ctx, tx, waiting), onceq.ErrUnfinished)
				n, taken, err := q.RedriveMany(ctx, tx, onceq.Filter{})
				usable("RedriveMany", err, nil)
				require.Equal(t, []int{1, 0}, []int{n, taken}, "%d", died3)
				n, err = q.DiscardMany(ctx, tx, onceq.Filter{States: []onceq.State{onceq.Cancelled}})
				usable("DiscardMany", err, nil)
				require.Equal(t, 1, n)
				effects, err := q.Effects(ctx, tx, heldJob)
				usable("Effects", err, nil)
				require.Len(t, effects, 1)
				usable("Resolve, nothing", q.Resolve(ctx, tx, heldJob, "other", onceq.NeverApplied()), onceq.ErrNotFound)
				usable("Resolve", q.Resolve(ctx, tx, heldJob, "wire", onceq.Applied(1)), nil)

				c, err := fence("fresh", nil, onceq.Policy{}).Claim(ctx, tx)
				usable("Fence.Claim", err, nil)
				usable("Claim.Complete", c.Complete(ctx, tx, 1), nil)
				c, err = fence("fresh", nil, onceq.Policy{}).Claim(ctx, tx)
				usable("Fence.Claim, replayed", err, nil)
				require.True(t, c.Replayed)
				_, err = fence("claimed", 1, onceq.Policy{}).Claim(ctx, tx)
				usable("Fence.Claim, in flight", err, onceq.ErrInFlight)
				_, err = fence("claimed", 2, onceq.Policy{}).Claim(ctx, tx)
				usable("Fence.Claim, mismatch", err, onceq.ErrMismatch)
				ask := onceq.Ask(func(context.Context, string) (any, bool, error) { return nil, false, nil })
				_, err = fence("doubtful", 1, ask).Claim(ctx, tx)
				usable("Fence.Claim, uncertain", err, onceq.ErrUncertain)
				_, err = fence("doubtful", 1, onceq.Hold()).Claim(ctx, tx)
				usable("Fence.Claim, held", err, onceq.ErrHeld)
				usable("Fence.Resolve", fence("doubtful", 1, onceq.Hold()).Resolve(ctx, tx, onceq.NeverApplied()), nil)
				usable("Claim.Complete", claimed.Complete(ctx, tx, 1), nil)
				usable("Claim.Release", released.Release(ctx, tx), nil)
			}
			snapshot := func() string {
				return enqGet[string](t, db.Pool, `select concat_ws(E'\n', (select string_agg(j::text, E'\n' order by id) from onceq.jobs j),
					(select string_agg(f::text, E'\n' order by class, scope, key) from onceq.job_fences f),
					(select string_agg(h::text, E'\n' order by id) from onceq.job_history h), (select string_agg(c::text, E'\n') from onceq.job_cancels c))`)
			}
			before := snapshot()
			for _, commit := range []bool{false, true} {
				tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
				require.NoError(t, err)
				_, err = tx.Exec(ctx, `select count(*) from onceq.job_fences`) // the snapshot
				require.NoError(t, err)
				everything(tx)
				if commit {
					require.NoError(t, tx.Commit(ctx))
					require.NoError(t, db.Check())
				} else {
					require.NoError(t, tx.Rollback(ctx))
					require.Equal(t, before, snapshot())
				}
			}
			require.NoError(t, live.Complete(ctx, nil))
		})
	}
}

// The application's own transaction above READ COMMITTED, longer than several beats: it completes first, which locks the
// row, and beats no longer change it.
func TestPromise5_ASnapshotTransactionOfTheCallersOutlivesBeatsWhenItCompletesFirst(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	_, err := db.Pool.Exec(t.Context(), `create table effects (n int)`)
	require.NoError(t, err)
	k := onceq.Kind[int]{Name: "k", MaxAttempts: 1}
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, k.Job(1))
	require.NoError(t, err)
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Lease: time.Second}, k.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
		return pgx.BeginTxFunc(ctx, db.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
			if err := l.Complete(ctx, tx); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `insert into effects select $1 from pg_sleep(2)`, n)
			return err
		})
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	_, err = db.Queue.Get(t.Context(), db.Pool, r.ID)
	require.ErrorIs(t, err, onceq.ErrNotFound) // completed; a dead one would be there
	require.Equal(t, 1, enqGet[int](t, db.Pool, `select count(*)::int from effects`))
}

// A deploy: the old version knows kind a, the new one a and b, on one queue. Each job is run once, by one that knows it,
// also those whose worker died.
func TestPromise1_TwoVersionsOfAWorkerOnOneQueue(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	ctx := t.Context()
	_, err := db.Pool.Exec(ctx, `create table effects (job bigint primary key, version int, kind text)`)
	require.NoError(t, err)
	a, b := onceq.Kind[int]{Name: "a"}, onceq.Kind[int]{Name: "b"}
	version := func(n int, kinds ...onceq.Kind[int]) *onceq.Worker {
		var handlers []onceq.Handler
		for _, k := range kinds {
			handlers = append(handlers, k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
				_, err := tx.Exec(ctx, `insert into effects values ($1, $2, $3)`, l.ID, n, l.Kind)
				return err
			}))
		}
		w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{PollInterval: 20 * time.Millisecond}, handlers...)
		require.NoError(t, err)
		return w
	}
	enqueue := func(n int) {
		jobs := make([]onceq.Job, n)
		for i := range jobs {
			k := []onceq.Kind[int]{a, b}[i%2]
			jobs[i] = k.Job(i)
		}
		_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
		require.NoError(t, err)
	}
	enqueue(40)
	// A worker that died has some of both kinds.
	died, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 10, Lease: 500 * time.Millisecond})
	require.NoError(t, err)
	require.Len(t, died, 10)
	work, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 2)
	run := func(w *onceq.Worker) { go func() { ended <- w.Run(work) }() }
	run(version(1, a))
	require.Eventually(t, func() bool {
		return enqGet[int](t, db.Pool, `select count(*)::int from effects`) == 20 // also the five of the dead one's
	}, 20*time.Second, 10*time.Millisecond)
	require.Equal(t, 20, enqGet[int](t, db.Pool, `select count(*)::int from onceq.jobs where kind = 'b'`))
	run(version(2, a, b))
	enqueue(40)
	require.Eventually(t, func() bool { return enqJobs(t, db.Pool) == 0 }, 20*time.Second, 10*time.Millisecond)
	stop()
	require.NoError(t, <-ended)
	require.NoError(t, <-ended)
	require.Equal(t, 80, enqGet[int](t, db.Pool, `select count(*)::int from effects`))
	require.Zero(t, enqGet[int](t, db.Pool, `select count(*)::int from effects where kind = 'b' and version = 1`))
}
