package tests

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// The error of a newcomer's mistake says what to do.
func TestMistakes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)

	var bad *onceq.InvalidError
	_, err := db.Queue.Enqueue(t.Context(), nil, onceq.Job{Kind: "k"})
	require.ErrorAs(t, err, &bad)
	require.ErrorContains(t, err, "pass the transaction")
	_, err = db.Queue.EnqueueMany(t.Context(), nil, []onceq.Job{{Kind: "k"}})
	require.ErrorAs(t, err, &bad)

	// So does each call that takes no pool by itself, and every error names the library once.
	for name, call := range callsIn(t.Context(), db.Queue, nil) {
		err := call()
		if name == "Workers" || name == "Pauses" || name == "Limits" || name == "Busy" { // what metrics read goes through the queue's own pool
			require.NoError(t, err, name)
			continue
		}
		require.ErrorAs(t, err, &bad, name)
		require.ErrorContains(t, err, "db is nil; pass the transaction", name)
		require.Equal(t, 1, strings.Count(err.Error(), "onceq: "), "%s: %v", name, err)
	}
	conn, err := pgx.ConnectConfig(t.Context(), db.Pool.Config().ConnConfig.Copy())
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
	for name, call := range callsIn(t.Context(), db.Queue, conn) {
		err := call()
		require.ErrorContains(t, err, "conn closed", name)
		require.Equal(t, 1, strings.Count(err.Error(), "onceq: "), "%s: %v", name, err)
	}

	kind := onceq.Kind[int]{Name: "k"}
	for _, h := range []onceq.Handler{kind.Handle(nil), kind.HandleTx(nil), kind.HandleBatch(1, nil)} {
		_, err = onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, h)
		require.ErrorAs(t, err, &bad)
		require.ErrorContains(t, err, `of "k" has no function`)
	}

	h := kind.Handle(func(context.Context, *onceq.Lease, int) error { return nil })
	_, err = onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, h, h)
	require.ErrorContains(t, err, `two handlers for kind "k"; a worker has one handler for each kind: remove one`)
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Key: strings.Repeat("k", 600)})
	require.ErrorContains(t, err, "Key has 600 bytes; at most 512: use a hash of it")
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: strings.Repeat("k", 600)})
	require.ErrorContains(t, err, "Kind has 600 bytes; at most 128: choose a shorter one")
}

// In a transaction that has failed, Postgres does not say why. The error says where to look, once, and is still Postgres's.
func TestMistakes_InAFailedTransaction(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	_, err = tx.Exec(ctx, `select 1/0`)
	require.Error(t, err)
	calls := callsIn(ctx, q, tx)
	calls["Enqueue"] = func() error { _, err := q.Enqueue(ctx, tx, onceq.Job{Kind: "k"}); return err }
	calls["Enqueue, key"] = func() error { _, err := q.Enqueue(ctx, tx, onceq.Job{Kind: "k", Key: "a"}); return err }
	calls["EnqueueMany"] = func() error { _, err := q.EnqueueMany(ctx, tx, []onceq.Job{{Kind: "k"}, {Kind: "k"}}); return err }
	for name, call := range calls {
		err := call()
		var pg *pgconn.PgError
		require.ErrorAs(t, err, &pg, name)
		require.Equal(t, "25P02", pg.Code, name)
		require.Equal(t, 1, strings.Count(err.Error(), "an earlier statement of this transaction failed: look at the error"), "%s: %v", name, err)
		require.Equal(t, 1, strings.Count(err.Error(), "onceq: "), "%s: %v", name, err)
	}
}

// callsIn is each call that takes a database and no lease.
func callsIn(ctx context.Context, q *onceq.Queue, in onceq.DB) map[string]func() error {
	all := onceqops.Filter{Kind: "k"}
	return map[string]func() error{
		"Get":      func() error { _, err := q.Get(ctx, in, 1); return err },
		"GetByKey": func() error { _, err := q.GetByKey(ctx, in, "k", "k"); return err },
		"List":     func() error { _, err := onceqops.New(q).List(ctx, in, all); return err },
		"Count":    func() error { _, err := onceqops.New(q).Count(ctx, in, all); return err },
		"Explain":  func() error { _, err := onceqops.New(q).Explain(ctx, in, 1); return err },
		"WithMember": func() error {
			_, err := onceqops.New(q).WithMember(ctx, in, []int64{1}, "payload.a = 1")
			return err
		},
		"Busy":        func() error { _, err := onceqops.New(q).Busy(ctx, in, onceqops.WorkerInfo{}); return err },
		"Workers":     func() error { _, err := onceqops.New(q).Workers(ctx, in); return err },
		"Pauses":      func() error { _, err := onceqops.New(q).Pauses(ctx, in); return err },
		"ResumeKind":  func() error { _, err := q.ResumeKind(ctx, in, "k"); return err },
		"Effects":     func() error { _, err := onceqops.New(q).Effects(ctx, in, 1); return err },
		"Cancel":      func() error { _, err := q.Cancel(ctx, in, 1); return err },
		"CancelMany":  func() error { _, _, err := onceqops.New(q).CancelMany(ctx, in, all); return err },
		"Retry":       func() error { _, err := onceqops.New(q).Retry(ctx, in, 1); return err },
		"Redrive":     func() error { _, err := onceqops.New(q).Redrive(ctx, in, 1); return err },
		"RedriveMany": func() error { _, _, err := onceqops.New(q).RedriveMany(ctx, in, all); return err },
		"RetryMany":   func() error { _, err := onceqops.New(q).RetryMany(ctx, in, all); return err },
		"Discard":     func() error { return onceqops.New(q).Discard(ctx, in, 1) },
		"DiscardMany": func() error { _, err := onceqops.New(q).DiscardMany(ctx, in, all); return err },
		"WouldCancel": func() error { _, err := onceqops.New(q).WouldCancel(ctx, in, all); return err },
		"Resolve":     func() error { return onceqops.New(q).Resolve(ctx, in, 1, "a", onceq.NeverApplied()) },
		"ResolveMany": func() error {
			_, _, err := onceqops.New(q).ResolveMany(ctx, in, all, "a", onceq.NeverApplied())
			return err
		},

		"RecordAction": func() error {
			_, err := onceqops.New(q).RecordAction(ctx, in, onceqops.Action{Who: "ann", What: "look"})
			return err
		},
		"Actions":       func() error { _, err := onceqops.New(q).Actions(ctx, in, onceqops.ActionFilter{}); return err },
		"Emit":          func() error { _, err := q.Emit(ctx, in, "s", "k", 1); return err },
		"Event":         func() error { _, _, err := q.Event(ctx, in, "s", "k"); return err },
		"AwaitEvent":    func() error { _, err := q.AwaitEvent(ctx, in, "s", "k"); return err },
		"WouldRetry":    func() error { _, err := onceqops.New(q).WouldRetry(ctx, in, all); return err },
		"WouldRedrive":  func() error { _, err := onceqops.New(q).WouldRedrive(ctx, in, all); return err },
		"WouldDiscard":  func() error { _, err := onceqops.New(q).WouldDiscard(ctx, in, all); return err },
		"WouldResolve":  func() error { _, err := onceqops.New(q).WouldResolve(ctx, in, all); return err },
		"WouldMove":     func() error { _, err := onceqops.New(q).WouldMove(ctx, in, all); return err },
		"Counts":        func() error { _, err := onceqops.New(q).Counts(ctx, in, onceqops.CountFilter{}); return err },
		"EnqueueUnique": func() error { _, err := q.EnqueueUnique(ctx, in, onceq.Job{Kind: "k", Key: "a"}); return err },
		"EnqueueGroup": func() error {
			_, err := q.EnqueueGroup(ctx, in, []onceq.Job{{Kind: "k"}}, onceq.Job{Kind: "k"})
			return err
		},
		"Members":         func() error { _, err := listed(onceqops.New(q).Members(ctx, in, 1)); return err },
		"Group":           func() error { _, err := q.Group(ctx, in, 1); return err },
		"Groups":          func() error { _, err := onceqops.New(q).Groups(ctx, in, 0, 0); return err },
		"GroupsOf":        func() error { _, err := onceqops.New(q).GroupsOf(ctx, in, 1); return err },
		"CancelGroup":     func() error { _, _, err := onceqops.New(q).CancelGroup(ctx, in, 1); return err },
		"Page":            func() error { _, _, err := onceqops.New(q).Page(ctx, in, all); return err },
		"Keys":            func() error { _, err := onceqops.New(q).Keys(ctx, in, "s", "k"); return err },
		"SetLaneLimit":    func() error { return q.SetLaneLimit(ctx, in, "k", "a", 1) },
		"RemoveLaneLimit": func() error { return q.RemoveLaneLimit(ctx, in, "k", "a") },
		"LaneLimit":       func() error { _, err := q.LaneLimit(ctx, in, "k", "a"); return err },
		"Lanes":           func() error { _, err := onceqops.New(q).Lanes(ctx, in, onceqops.LaneFilter{}); return err },
		"SetLimit":        func() error { return q.SetLimit(ctx, in, "p", onceq.Limit{AtOnce: 1}) },
		"SetLimit, all":   func() error { return q.SetLimit(ctx, in, "p/", onceq.Limit{AtOnce: 1}) },
		"RemoveLimit":     func() error { return q.RemoveLimit(ctx, in, "p") },
		"Limits":          func() error { _, err := onceqops.New(q).Limits(ctx, in, onceqops.LimitFilter{}); return err },
		"Limit":           func() error { _, err := onceqops.New(q).Limit(ctx, in, "p"); return err },
		"Move":            func() error { _, err := onceqops.New(q).Move(ctx, in, 1, "other"); return err },
		"MoveMany":        func() error { _, err := onceqops.New(q).MoveMany(ctx, in, all, "other"); return err },
		"PauseQueue":      func() error { return q.PauseQueue(ctx, in, "default", "") },
		"PauseKind":       func() error { return q.PauseKind(ctx, in, "k", "") },
		"ResumeQueue":     func() error { _, err := q.ResumeQueue(ctx, in, "default"); return err },
		"Doubts":          func() error { _, _, err := onceqops.New(q).Doubts(ctx, in, all); return err },
	}
}

// Without tables every call fails with an error that says so and says what to do.
func TestMistakes_NoTablesIsSaidByEveryCall(t *testing.T) {
	t.Parallel()
	// The leases and claims are from a time when there were tables.
	db := queuetest.New(t, queuetest.NoCheck())
	ctx, q := t.Context(), db.Queue
	_, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{{Kind: "k"}, {Kind: "k"}})
	require.NoError(t, err)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 2})
	require.NoError(t, err)
	l := leases[0]
	spec := onceq.FenceSpec{Key: "k"}
	f, err := q.Fence(spec)
	require.NoError(t, err)
	c, err := f.Claim(ctx, nil)
	require.NoError(t, err)
	kind := onceq.Kind[int]{Name: "k"}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, kind.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	require.NoError(t, err)
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{})
	require.NoError(t, err)
	_, err = conformance.Owner(t, db).Exec(ctx, "drop schema "+pgx.Identifier{db.Schema}.Sanitize()+" cascade")
	require.NoError(t, err)

	in := db.Pool
	job := onceq.Job{Kind: "k", Key: "k"}
	plain := onceq.Job{Kind: "k"}
	for name, call := range map[string]func() error{
		"Check":               func() error { return q.Check(ctx) },
		"Enqueue":             func() error { _, err := q.Enqueue(ctx, in, plain); return err },
		"Enqueue, key":        func() error { _, err := q.Enqueue(ctx, in, job); return err },
		"EnqueueMany":         func() error { _, err := q.EnqueueMany(ctx, in, []onceq.Job{plain, plain}); return err },
		"EnqueueMany, keys":   func() error { _, err := q.EnqueueMany(ctx, in, []onceq.Job{plain, job}); return err },
		"EnqueueMany, chunks": func() error { _, err := q.EnqueueMany(ctx, in, many(job, 2001)); return err },
		"Claim":               func() error { _, err := q.Claim(ctx, onceq.ClaimOptions{}); return err },
		"Get":                 func() error { _, err := q.Get(ctx, in, 1); return err },
		"GetByKey":            func() error { _, err := q.GetByKey(ctx, in, "k", "k"); return err },
		"List":                func() error { _, err := onceqops.New(q).List(ctx, in, onceqops.Filter{}); return err },
		"Count":               func() error { _, err := onceqops.New(q).Count(ctx, in, onceqops.Filter{}); return err },
		"Stats":               func() error { _, err := onceqops.New(q).Stats(ctx); return err },
		"Health":              func() error { _, err := onceqops.New(q).Health(ctx); return err },
		"Cancel":              func() error { _, err := q.Cancel(ctx, in, 1); return err },
		"CancelMany":          func() error { _, _, err := onceqops.New(q).CancelMany(ctx, in, onceqops.Filter{Kind: "k"}); return err },
		"Retry":               func() error { _, err := onceqops.New(q).Retry(ctx, in, 1); return err },
		"Redrive":             func() error { _, err := onceqops.New(q).Redrive(ctx, in, 1); return err },
		"RetryMany":           func() error { _, err := onceqops.New(q).RetryMany(ctx, in, onceqops.Filter{Kind: "k"}); return err },
		"RedriveMany": func() error {
			_, _, err := onceqops.New(q).RedriveMany(ctx, in, onceqops.Filter{All: true})
			return err
		},
		"Discard":              func() error { return onceqops.New(q).Discard(ctx, in, 1) },
		"DiscardMany":          func() error { _, err := onceqops.New(q).DiscardMany(ctx, in, onceqops.Filter{All: true}); return err },
		"Resolve":              func() error { return onceqops.New(q).Resolve(ctx, in, 1, "a", onceq.NeverApplied()) },
		"Effects":              func() error { _, err := onceqops.New(q).Effects(ctx, in, 1); return err },
		"Fence.Claim":          func() error { _, err := f.Claim(ctx, nil); return err },
		"Fence.Resolve":        func() error { return f.Resolve(ctx, nil, onceq.NeverApplied()) },
		"FenceLease.Complete":  func() error { return c.Complete(ctx, nil, 1) },
		"FenceLease.Release":   func() error { return c.Release(ctx, nil) },
		"FenceLease.Uncertain": func() error { return c.Uncertain(ctx, nil, errors.New("reset")) },
		"FenceLease.Extend":    func() error { return c.Extend(ctx, time.Minute) },
		"Do": func() error {
			_, err := onceq.Do(ctx, q, spec, func(context.Context, *onceq.FenceLease) (int, error) { return 1, nil })
			return err
		},
		"Once": func() error {
			_, err := onceq.Once(ctx, l, "a", func(context.Context, string) (int, error) { return 1, nil })
			return err
		},
		"Lease.Complete": func() error { return l.Complete(ctx, in) },
		"Lease.Lock": func() error {
			return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return l.Lock(ctx, tx) })
		},
		"Lease.Extend":   func() error { return l.Extend(ctx, time.Minute) },
		"Lease.Fail":     func() error { return l.Fail(ctx, errors.New("no")) },
		"Lease.Release":  func() error { return l.Release(ctx) },
		"Lease.Snooze":   func() error { return l.Snooze(ctx, time.Minute) },
		"Worker.Run":     func() error { return w.Run(ctx) },
		"Worker.Drain":   func() error { return w.Drain(ctx, 0) },
		"Reaper.RunOnce": func() error { _, err := reaper.RunOnce(ctx); return err },
	} {
		err := call()
		var schema *onceq.SchemaError
		if !errors.As(err, &schema) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		require.ErrorContains(t, err, "migrations.Up", name)
		require.Equal(t, 1, strings.Count(err.Error(), "onceq: "), "%s: %v", name, err)
	}
}

// Where one table is gone, the error names it, and does not say that there are none.
func TestMistakes_OneTableIsMissing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	ctx := t.Context()
	table := pgx.Identifier{db.Schema, "job_waits"}.Sanitize()
	_, err := conformance.Owner(t, db).Exec(ctx, "drop table "+table+" cascade")
	require.NoError(t, err)
	lane := onceq.Kind[int]{Name: "k", Lane: func(int) string { return "a" }}
	for name, call := range map[string]func() error{
		"Check":   func() error { return db.Queue.Check(ctx) },
		"Enqueue": func() error { _, err := db.Queue.Enqueue(ctx, db.Pool, lane.Job(1)); return err },
	} {
		var schema *onceq.SchemaError
		err := call()
		require.ErrorAs(t, err, &schema, name)
		require.ErrorContains(t, err, "job_waits", name)
		require.NotContains(t, err.Error(), "no onceq tables", name)
	}
}

func many(job onceq.Job, n int) (jobs []onceq.Job) {
	for i := range n {
		j := job
		j.Key = fmt.Sprint(i)
		jobs = append(jobs, j)
	}
	return jobs
}
