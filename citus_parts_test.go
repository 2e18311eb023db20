package onceq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
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
		}, "insert into onceq.job_cancels", "from onceq.job_waits")}, j.ID)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(ctx))
		require.NotNil(t, l)
		var noted bool
		require.NoError(t, db.Pool.QueryRow(ctx, `select exists (select from onceq.job_cancels where job_id = $1)`, j.ID).Scan(&noted))
		require.True(t, noted, "in parts: %v", apart)
		_ = l.Complete(ctx, nil)
	}
}

// If the context ends between two parts, the caller's transaction cannot commit half of them.
func TestCitus_AContextThatEndsBetweenTwoParts(t *testing.T) {
	t.Parallel()
	db, q := inPartsDB(t)
	ctx := t.Context()
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	ending, end := context.WithCancel(ctx)
	_, err = q.Enqueue(ending, between{tx, before(end, "onceq.enqueue_one(")}, onceq.Job{Kind: "k", Key: "a"})
	require.ErrorIs(t, err, context.Canceled)
	require.Error(t, tx.Commit(ctx))
	r, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "a"})
	require.NoError(t, err)
	require.False(t, r.Duplicate)
	require.NoError(t, db.Check())
}

// Parts that would commit one by one are refused.
func TestCitus_ADBWithoutATransactionIsRefused(t *testing.T) {
	t.Parallel()
	db, q := inPartsDB(t)
	_, err := q.Enqueue(t.Context(), bare{db.Pool}, onceq.Job{Kind: "k", Key: "a"})
	var bad *onceq.InvalidError
	require.ErrorAs(t, err, &bad)
	require.ErrorContains(t, err, "has no BeginTx")
	r, err := q.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Key: "a"})
	require.NoError(t, err)
	require.False(t, r.Duplicate)
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
		_, err = q.Redrive(ctx, db.Pool, m.ID)
		require.NoError(t, err)
		require.NoError(t, claimOf(t, q, m.ID).Release(ctx))
		_, err = q.Redrive(ctx, db.Pool, f.ID)
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
			n, asked, err := q.CancelMany(ctx, db.Pool, onceq.Filter{IDs: []int64{first.ID}, KeepKeys: keep})
			require.NoError(t, err)
			require.Equal(t, [2]int{1, 0}, [2]int{n, asked})
			second, err := q.Enqueue(ctx, db.Pool, job)
			require.NoError(t, err)
			require.Equal(t, keep, second.Duplicate, "%s: %+v", job.Key, second)
			if !keep {
				_, err = q.Redrive(ctx, db.Pool, first.ID)
				require.ErrorIs(t, err, onceq.ErrDuplicate)
				_, err = q.Cancel(ctx, db.Pool, second.ID)
				require.NoError(t, err)
				first = second
			}
			_, err = q.Redrive(ctx, db.Pool, first.ID)
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
