package conformance

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
)

// Every public operation that takes a DB runs inside a caller's transaction, at each isolation level, with a snapshot that
// is new enough. The operation works, every refusal leaves the transaction usable, and it commits and rolls back with the
// caller's transaction.
func everyOperationInATransaction(t *testing.T, set setup) {
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			e := set(t)
			ctx, q := t.Context(), e.q
			enqueue := func(j onceq.Job) int64 {
				t.Helper()
				j.Kind = "k"
				return e.enqueue(e.Handles.DB, j).ID
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
			e.ExpireLease(stale.ID)
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
				return e.fence(onceq.FenceSpec{Key: key, Payload: payload, Policy: p})
			}
			claimed, err := fence("claimed", 1, onceq.Policy{}).Claim(ctx, nil)
			require.NoError(t, err)
			released, err := fence("released", 1, onceq.Policy{}).Claim(ctx, nil)
			require.NoError(t, err)
			doubtful, err := fence("doubtful", 1, onceq.Policy{}).Claim(ctx, nil)
			require.NoError(t, err)
			require.NoError(t, doubtful.Uncertain(ctx, nil, errors.New("reset")))
			require.NoError(t, q.Check(ctx))

			everything := func(tx Tx) {
				usable := func(what string, err, want error) {
					t.Helper()
					if want == nil {
						require.NoError(t, err, what)
					} else {
						require.ErrorIs(t, err, want, what)
					}
					_, err = tx.DB.Exec(ctx, `select 1`)
					require.NoError(t, err, "after %s", what)
				}
				_, err := q.Enqueue(ctx, tx.DB, onceq.Job{Kind: "k", Key: "new"})
				usable("Enqueue", err, nil)
				r, err := q.Enqueue(ctx, tx.DB, onceq.Job{Kind: "k", Key: "waiting"})
				usable("Enqueue, duplicate", err, nil)
				require.Equal(t, onceq.Result{ID: waiting, Duplicate: true, State: r.State}, r)
				_, err = q.Enqueue(ctx, tx.DB, onceq.Job{Kind: "k", Key: "waiting", Strict: true})
				usable("Enqueue, strict", err, onceq.ErrDuplicate)
				_, err = q.Enqueue(ctx, tx.DB, onceq.Job{Kind: "k", Key: "waiting", Payload: "other"})
				usable("Enqueue, mismatch", err, onceq.ErrMismatch)
				r, err = q.Enqueue(ctx, tx.DB, expired)
				usable("Enqueue, expired", err, nil)
				require.False(t, r.Duplicate)
				_, err = q.EnqueueUnique(ctx, tx.DB, onceq.Job{Kind: "k"})
				var invalid *onceq.InvalidError
				require.ErrorAs(t, err, &invalid)
				usable("EnqueueUnique", nil, nil)
				many, err := q.EnqueueMany(ctx, tx.DB, []onceq.Job{{Kind: "k", Key: "waiting"}, {Kind: "k"}, {Kind: "k", Key: "new2"}, expired2})
				usable("EnqueueMany", err, nil)
				require.Equal(t, []bool{true, false, false, false}, []bool{many[0].Duplicate, many[1].Duplicate, many[2].Duplicate, many[3].Duplicate})
				_, err = q.EnqueueMany(ctx, tx.DB, []onceq.Job{{Kind: "k", Key: "waiting", Payload: "other"}})
				usable("EnqueueMany, mismatch", err, onceq.ErrMismatch)
				if sender, ok := tx.DB.(batches); ok {
					b := &pgx.Batch{}
					pending, err := q.EnqueueInBatch(b, onceq.Job{Kind: "k", Key: "delayed"})
					require.NoError(t, err)
					require.NoError(t, running2.CompleteInBatch(b))
					usable("SendBatch", sender.SendBatch(ctx, b).Close(), nil)
					r, err = pending.Result(ctx, tx.DB)
					usable("Pending.Result", err, nil)
					require.Equal(t, onceq.Result{ID: delayed, Duplicate: true, State: onceq.StateDelayed}, r)
				}

				usable("Lease.Complete", running.Complete(ctx, tx.DB), nil)
				// A stale completion must stop the transaction: only a savepoint avoids that.
				exec(t, tx.DB, `savepoint stale`)
				require.ErrorIs(t, stale.Complete(ctx, tx.DB), onceq.ErrLeaseLost)
				exec(t, tx.DB, `rollback to savepoint stale`)
				usable("Lease.Complete, stale", nil, nil)

				_, err = q.Get(ctx, tx.DB, waiting)
				usable("Get", err, nil)
				_, err = q.Get(ctx, tx.DB, 1<<40)
				usable("Get, unknown", err, onceq.ErrNotFound)
				_, err = q.GetByKey(ctx, tx.DB, "k", "died")
				usable("GetByKey", err, nil)
				list, err := onceqops.New(q).List(ctx, tx.DB, onceqops.Filter{States: []onceq.State{onceq.StateDead}})
				usable("List", err, nil)
				require.Len(t, list, 3)
				state, err := q.Cancel(ctx, tx.DB, delayed)
				usable("Cancel", err, nil)
				require.Equal(t, onceq.StateCancelled, state)
				state, err = q.Cancel(ctx, tx.DB, live.ID)
				usable("Cancel, running", err, nil)
				require.Equal(t, onceq.StateRunning, state)
				cancelled, asked, err := onceqops.New(q).CancelMany(ctx, tx.DB, onceqops.Filter{Kind: "k", States: []onceq.State{onceq.StateRunning}, Limit: 1})
				usable("CancelMany", err, nil)
				require.Equal(t, [2]int{0, 1}, [2]int{cancelled, asked})
				_, err = onceqops.New(q).Retry(ctx, tx.DB, waiting)
				usable("Retry", err, nil)
				_, err = onceqops.New(q).Redrive(ctx, tx.DB, died)
				usable("Redrive", err, nil)
				_, err = onceqops.New(q).Redrive(ctx, tx.DB, 1<<40)
				usable("Redrive, unknown", err, onceq.ErrNotFound)
				usable("Discard", onceqops.New(q).Discard(ctx, tx.DB, died2), nil)
				usable("Discard, unfinished", onceqops.New(q).Discard(ctx, tx.DB, waiting), onceqops.ErrUnfinished)
				n, taken, err := onceqops.New(q).RedriveMany(ctx, tx.DB, onceqops.Filter{All: true})
				usable("RedriveMany", err, nil)
				require.Equal(t, []int{1, 0}, []int{n, taken}, "%d", died3)
				n, err = onceqops.New(q).DiscardMany(ctx, tx.DB, onceqops.Filter{All: true, States: []onceq.State{onceq.StateCancelled}})
				usable("DiscardMany", err, nil)
				require.Equal(t, 1, n)
				effects, err := onceqops.New(q).Effects(ctx, tx.DB, heldJob)
				usable("Effects", err, nil)
				require.Len(t, effects, 1)
				usable("Resolve, nothing", onceqops.New(q).Resolve(ctx, tx.DB, heldJob, "other", onceq.NeverApplied()), onceq.ErrNotFound)
				usable("Resolve", onceqops.New(q).Resolve(ctx, tx.DB, heldJob, "wire", onceq.Applied(1)), nil)

				c, err := fence("fresh", nil, onceq.Policy{}).Claim(ctx, tx.DB)
				usable("Fence.Claim", err, nil)
				usable("FenceLease.Complete", c.Complete(ctx, tx.DB, 1), nil)
				c, err = fence("fresh", nil, onceq.Policy{}).Claim(ctx, tx.DB)
				usable("Fence.Claim, replayed", err, nil)
				require.True(t, c.Replayed)
				_, err = fence("claimed", 1, onceq.Policy{}).Claim(ctx, tx.DB)
				usable("Fence.Claim, in flight", err, onceq.ErrInFlight)
				_, err = fence("claimed", 2, onceq.Policy{}).Claim(ctx, tx.DB)
				usable("Fence.Claim, mismatch", err, onceq.ErrMismatch)
				ask := onceq.Ask(func(context.Context, string) (any, bool, error) { return nil, false, nil })
				_, err = fence("doubtful", 1, ask).Claim(ctx, tx.DB)
				usable("Fence.Claim, uncertain", err, onceq.ErrUncertain)
				_, err = fence("doubtful", 1, onceq.Hold()).Claim(ctx, tx.DB)
				usable("Fence.Claim, held", err, onceq.ErrHeld)
				usable("Fence.Resolve", fence("doubtful", 1, onceq.Hold()).Resolve(ctx, tx.DB, onceq.NeverApplied()), nil)
				usable("FenceLease.Complete", claimed.Complete(ctx, tx.DB, 1), nil)
				usable("FenceLease.Release", released.Release(ctx, tx.DB), nil)
			}
			snapshot := func() string {
				return get[string](t, e.Pool, `select concat_ws(E'\n', (select string_agg(j::text, E'\n' order by id) from onceq.jobs j),
					(select string_agg(f::text, E'\n' order by class, scope, key) from onceq.job_fences f),
					(select string_agg(h::text, E'\n' order by id) from onceq.job_history h), (select string_agg(c::text, E'\n') from onceq.job_cancels c))`)
			}
			before := snapshot()
			for _, commit := range []bool{false, true} {
				tx := e.begin(level)
				exec(t, tx.DB, `select count(*) from onceq.job_fences`) // the snapshot
				everything(tx)
				if commit {
					require.NoError(t, tx.Commit(ctx))
					require.NoError(t, e.Check())
				} else {
					require.NoError(t, tx.Rollback(ctx))
					require.Equal(t, before, snapshot())
				}
			}
			require.NoError(t, live.Complete(ctx, nil))
		})
	}
}

// Postgres may report a conflict only at the commit, whose error passes through no handle of onceq.
func conflictAtTheCommitIsRecognised(t *testing.T, set setup) {
	e := set(t, `create table stock (id int, n int)`, `insert into stock values (1, 1), (2, 1)`)
	ctx := t.Context()
	first, second := e.begin(pgx.Serializable), e.begin(pgx.Serializable)
	for id, tx := range []Tx{first, second} { // each reads both rows and writes one
		require.Equal(t, 2, get[int](t, tx.DB, `select sum(n)::int from stock`))
		exec(t, tx.DB, `update stock set n = 0 where id = $1`, id+1)
	}
	require.NoError(t, first.Commit(ctx))
	err := second.Commit(ctx)
	require.ErrorContains(t, err, "could not serialize access")
	require.True(t, onceq.IsRetryable(err), "%T: %v", err, err)
	require.True(t, onceq.IsRetryable(fmt.Errorf("moving stock: %w", err)))
	require.False(t, onceq.IsRetryable(errors.New("could not serialize access")))
	require.Equal(t, 1, get[int](t, e.Pool, `select sum(n)::int from stock`))
}

// A call whose context ends while it waits reports that, whatever error the driver returns.
func contextThatEndsIsRecognised(t *testing.T, set setup) {
	e := set(t)
	first := e.begin(pgx.ReadCommitted)
	job := onceq.Job{Kind: "k", Key: "taken"}
	e.enqueue(first.DB, job)
	wait := func(ctx context.Context, in onceq.DB) <-chan error {
		c := make(chan error, 1)
		go func() {
			_, err := e.q.Enqueue(ctx, in, job)
			c <- err
		}()
		return c
	}
	cancelled, cancel := context.WithCancel(t.Context())
	defer cancel()
	waiting := wait(cancelled, e.begin(pgx.ReadCommitted).DB)
	e.blocked()
	cancel()
	require.ErrorIs(t, <-waiting, context.Canceled)

	late, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer stop()
	require.ErrorIs(t, <-wait(late, e.begin(pgx.ReadCommitted).DB), context.DeadlineExceeded)
	require.ErrorIs(t, <-wait(late, e.begin(pgx.ReadCommitted).DB), context.DeadlineExceeded, "before it is sent")
	late, stop = context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer stop()
	require.ErrorIs(t, <-wait(late, e.Handles.DB), context.DeadlineExceeded)
	require.NoError(t, first.Commit(t.Context()))
}
