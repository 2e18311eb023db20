package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/internal/jsonb"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// enqNew is queuetest.New with a log that does not show thousands of duplicates.
func enqNew(t *testing.T, opts ...queuetest.Option) *queuetest.DB {
	t.Helper()
	quiet := queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	return queuetest.New(t, append([]queuetest.Option{quiet}, opts...)...)
}

// enqGet reads one value.
func enqGet[T any](t *testing.T, db onceq.DB, sql string, args ...any) T {
	t.Helper()
	rows, err := db.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	require.NoError(t, err, sql)
	return v
}

func enqExec(t *testing.T, db onceq.DB, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

func enqJobs(t *testing.T, db onceq.DB) int {
	t.Helper()
	return enqGet[int](t, db, `select count(*)::int from onceq.jobs`)
}

func enqOne(t *testing.T, db *queuetest.DB, in onceq.DB, job onceq.Job) onceq.Result {
	t.Helper()
	r, err := db.Queue.Enqueue(t.Context(), in, job)
	require.NoError(t, err)
	return r
}

func enqBegin(t *testing.T, db *queuetest.DB, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// enqBlocked waits until n sessions of this database wait for a lock.
func enqBlocked(t *testing.T, db *queuetest.DB, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		return enqGet[int](t, db.Pool, `select count(*)::int from `+activity(t, db)+`
			where datname = current_database() and wait_event_type = 'Lock'`) >= n
	}, patience, 2*time.Millisecond, "nobody waits for a lock")
}

// enqClaim claims the one job that is due.
func enqClaim(t *testing.T, db *queuetest.DB) *onceq.Lease {
	t.Helper()
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	return leases[0]
}

// enqFinish completes the one job that is due, with a result.
func enqFinish(t *testing.T, db *queuetest.DB, result any) int64 {
	t.Helper()
	l := enqClaim(t, db)
	if result != nil {
		require.NoError(t, l.SetResult(result))
	}
	require.NoError(t, l.Complete(t.Context(), nil))
	return l.ID
}

// enqExpire ends the windows of all finished keys.
func enqExpire(t *testing.T, db *queuetest.DB) {
	t.Helper()
	enqExec(t, db.Pool, `update onceq.job_fences set finished_at = finished_at - interval '10 years' where finished_at is not null`)
}

func TestEnqueue_StoresEveryField(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	r := enqOne(t, db, db.Pool, onceq.Job{
		Kind: "welcome", Payload: map[string]any{"user": 42}, Queue: "mail", Key: "welcome:42", Scope: "workspace 1",
		Window: time.Hour, Delay: time.Hour, Priority: onceq.PriorityHigh, MaxAttempts: 3, Metadata: map[string]string{"trace": "é'\\"},
	})
	require.Equal(t, onceq.StateDelayed, r.State)
	require.False(t, r.Duplicate)
	require.Equal(t, fmt.Sprintf(`[%d, "welcome", "mail", "workspace 1", "welcome:42", -1, 3, {"user": 42}, {"trace": "é'\\"}, true]`, r.ID),
		enqGet[string](t, db.Pool, `select jsonb_build_array(id, kind, queue, scope, key, priority, max_attempts, payload, metadata,
			run_at between now() + interval '59 minutes' and now() + interval '61 minutes')::text from onceq.jobs`))
	require.EqualValues(t, time.Hour.Milliseconds(), enqGet[int64](t, db.Pool, `select lifetime from onceq.job_fences where scope = 'workspace 1'`))

	plain := enqOne(t, db, db.Pool, onceq.Job{Kind: "k"})
	require.Equal(t, onceq.StateWaiting, plain.State)
	require.Greater(t, plain.ID, r.ID)
	require.Equal(t, fmt.Sprintf(`[%d, "k", "default", null, null, 0, 25, null, null, true]`, plain.ID),
		enqGet[string](t, db.Pool, `select jsonb_build_array(id, kind, queue, scope, key, priority, max_attempts, payload, metadata,
			run_at <= statement_timestamp())::text from onceq.jobs where id = $1`, plain.ID))
	require.Equal(t, 1, enqGet[int](t, db.Pool, `select count(*)::int from onceq.job_fences`))
}

func TestEnqueue_WithoutKeyEachIsAJobOfItsOwn(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	for range 3 {
		require.False(t, enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Payload: 1}).Duplicate)
	}
	require.Equal(t, 3, enqJobs(t, db.Pool))
}

func TestEnqueue_RunAt(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	for _, key := range []string{"", "k"} {
		at := time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
		r := enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: key, RunAt: at})
		require.Equal(t, onceq.StateDelayed, r.State)
		require.WithinDuration(t, at, enqGet[time.Time](t, db.Pool, `select run_at from onceq.jobs where id = $1`, r.ID), time.Millisecond)
	}
	rs, err := db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{
		{Kind: "k", RunAt: time.Now().Add(time.Hour)}, {Kind: "k"}, {Kind: "k", Delay: time.Hour}, {Kind: "k", RunAt: time.Now().Add(-time.Hour)},
	})
	require.NoError(t, err)
	states := make([]onceq.State, len(rs))
	for i, r := range rs {
		states[i] = r.State
	}
	require.Equal(t, []onceq.State{onceq.StateDelayed, onceq.StateWaiting, onceq.StateDelayed, onceq.StateWaiting}, states)
}

// Claims go on from what they have seen, and never look before 1970. A job that was due before that would be found late or
// not at all.
func TestTrap_EnqueueARunAtInThePastIsDueNowAndNotBehindTheClaims(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	old := time.Date(1, 1, 2, 0, 0, 0, 0, time.UTC)
	for _, key := range []string{"", "k"} {
		require.Equal(t, onceq.StateWaiting, enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: key, RunAt: old}).State)
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{{Kind: "k", RunAt: old}, {Kind: "k", Key: "many", RunAt: old}})
	require.NoError(t, err)
	require.Equal(t, 4, enqGet[int](t, db.Pool, `select count(*)::int from onceq.jobs where run_at = created_at`))
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 10})
	require.NoError(t, err)
	require.Len(t, leases, 4)
}

func TestEnqueue_WindowsDecideWhenAKeyIsFreeAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name             string
		window           time.Duration
		free, afterYears bool
	}{
		{"until finished", onceq.UntilFinished, true, true},
		{"default", 0, false, true},
		{"a duration", time.Minute, false, true},
		{"for ever", onceq.Forever, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := enqNew(t)
			job := onceq.Job{Kind: "k", Key: "a", Window: c.window}
			first := enqOne(t, db, db.Pool, job)
			require.True(t, enqOne(t, db, db.Pool, job).Duplicate)
			enqFinish(t, db, nil)
			again := enqOne(t, db, db.Pool, job)
			require.Equal(t, c.free, !again.Duplicate)
			if c.free {
				require.Greater(t, again.ID, first.ID)
				enqFinish(t, db, nil)
			} else {
				require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateCompleted}, again)
			}
			enqExpire(t, db)
			last := enqOne(t, db, db.Pool, job)
			require.Equal(t, c.afterYears, !last.Duplicate)
		})
	}
}

func TestEnqueue_Mismatch(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	type deployed struct {
		User  int
		Email string `json:",omitempty"`
		Added string `json:",omitempty"` // by a later deploy
	}
	users := []string{"User"}
	for i, c := range []struct {
		name          string
		first, second onceq.Job
		equal         bool
	}{
		{"another payload", onceq.Job{Payload: 1}, onceq.Job{Payload: 2}, false},
		{"another kind in the same scope", onceq.Job{Scope: "s"}, onceq.Job{Scope: "s", Kind: "other"}, false},
		{"another kind, payload ignored", onceq.Job{Scope: "s", Payload: 1, IgnorePayload: true}, onceq.Job{Scope: "s", Kind: "other", Payload: 1, IgnorePayload: true}, false},
		{"another kind in the scope of the first, by default", onceq.Job{Payload: 1, IgnorePayload: true}, onceq.Job{Kind: "other", Scope: "k", Payload: 1}, false},
		{"another kind in the scope of the second, by default", onceq.Job{Kind: "other", Scope: "k", Payload: 1}, onceq.Job{Payload: 1}, false},
		{"bytes and JSON", onceq.Job{Payload: []byte("1")}, onceq.Job{Payload: 1}, false},
		{"other bytes", onceq.Job{Payload: []byte("a")}, onceq.Job{Payload: []byte("b")}, false},
		{"same bytes", onceq.Job{Payload: []byte("a")}, onceq.Job{Payload: []byte("a")}, true},
		{"1.0 and 1", onceq.Job{Payload: json.RawMessage(`{"n":1.0}`)}, onceq.Job{Payload: json.RawMessage(`{"n":1}`)}, true},
		{"1e0 and 1", onceq.Job{Payload: json.RawMessage(`[1e0]`)}, onceq.Job{Payload: json.RawMessage(`[1]`)}, true},
		{"order, space and escapes", onceq.Job{Payload: json.RawMessage(`{"a": "\u0041", "b": 1}`)}, onceq.Job{Payload: json.RawMessage(`{"b":1,"a":"A"}`)}, true},
		{"a new field in a deploy", onceq.Job{Payload: deployed{User: 1}}, onceq.Job{Payload: deployed{User: 1, Added: "x"}}, false},
		{"a new field in a deploy, with Fields", onceq.Job{Payload: deployed{User: 1}, Fields: users}, onceq.Job{Payload: deployed{User: 1, Added: "x"}, Fields: users}, true},
		{"another value in Fields", onceq.Job{Payload: deployed{User: 1}, Fields: users}, onceq.Job{Payload: deployed{User: 2}, Fields: users}, false},
		{"ignored by the first", onceq.Job{Payload: 1, IgnorePayload: true}, onceq.Job{Payload: 2}, true},
		{"ignored by the second", onceq.Job{Payload: 1}, onceq.Job{Payload: 2, IgnorePayload: true}, true},
		{"another queue, priority and delay", onceq.Job{Payload: 1}, onceq.Job{Payload: 1, Queue: "q", Priority: onceq.PriorityLow, Delay: time.Hour}, true},
		{"other metadata", onceq.Job{Payload: 1}, onceq.Job{Payload: 1, Metadata: map[string]string{"a": "b"}}, true},
	} {
		for _, job := range []*onceq.Job{&c.first, &c.second} {
			job.Key = fmt.Sprint(i)
			if job.Kind == "" {
				job.Kind = "k"
			}
		}
		first := enqOne(t, db, db.Pool, c.first)
		second, err := db.Queue.Enqueue(t.Context(), db.Pool, c.second)
		require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, second, c.name)
		if c.equal {
			require.NoError(t, err, c.name)
		} else {
			require.ErrorIs(t, err, onceq.ErrMismatch, c.name)
		}
	}
}

// When a deploy moves a kind to another queue, its keys stay the same. Two kinds of one queue never share a key.
func TestEnqueue_AKeyBelongsToItsKindAndNotToItsQueue(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	key := func(order int) string { return fmt.Sprintf("order:%d", order) }
	charge := onceq.Kind[int]{Name: "charge", Key: key, Window: onceq.Forever}
	first := enqOne(t, db, db.Pool, charge.Job(7))
	charge.Queue = "payments"
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, enqOne(t, db, db.Pool, charge.Job(7)))

	enqFinish(t, db, "receipt")
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateCompleted, Output: json.RawMessage(`"receipt"`)}, enqOne(t, db, db.Pool, charge.Job(7)))
	info, err := db.Queue.GetByKey(t.Context(), db.Pool, "charge", "order:7")
	require.NoError(t, err)
	require.Equal(t, first.ID, info.ID)

	mail := onceq.Kind[int]{Name: "mail", Key: key, Queue: "payments"}
	require.False(t, enqOne(t, db, db.Pool, mail.Job(7)).Duplicate)
}

// The error says what differs: the kinds, or the place in the payload. It never shows a value.
func TestEnqueue_AMismatchSaysWhatDiffers(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx := t.Context()
	raw := func(s string) json.RawMessage { return json.RawMessage(s) }
	for i, c := range []struct {
		name          string
		first, second any
		fields        []string
		differ        []string
		detail        string
	}{
		{"a member", raw(`{"a": 1, "amount": 1}`), raw(`{"a": 1.0, "amount": 2}`), nil, []string{"$.amount"}, ""},
		{"deep and in lists", raw(`{"lines": [{"sku": "x", "price": 1}, {"price": 5}]}`), raw(`{"lines": [{"sku": "x", "price": 2}, {"price": "5"}]}`), nil, []string{"$.lines[0].price", "$.lines[1].price"}, ""},
		{"one more and one less", raw(`{"a": null, "c": {}}`), raw(`{"b": null, "c": {"d": 1}}`), nil, []string{"$.a", "$.b", "$.c.d"}, ""},
		{"the end of a list", raw(`[1, 2, 3]`), raw(`[1, 3, 3, 4, 5]`), nil, []string{"$[1]", "$[3]"}, ""},
		{"odd names", raw(`{"a b": 1, "\"": 1, "": 1, "é": 1}`), raw(`{"a b": 2, "\"": 2, "": 2, "é": 2}`), nil, []string{`$.""`, `$."\""`, `$."a b"`, `$."é"`}, ""},
		{"all of it", 1, "1", nil, []string{"$"}, ""},
		{"an object and a list", raw(`{}`), raw(`[]`), nil, []string{"$"}, ""},
		{"fields alone", raw(`{"a": 1, "b": 1}`), raw(`{"a": 2, "b": 2}`), []string{"a"}, []string{"$.a"}, ""},
		{"no object, with fields", 1, raw(`{"a": 2}`), []string{"a"}, []string{"$"}, ""},
		{"other fields", raw(`{"a": 1, "b": 1}`), raw(`{"a": 1, "b": 2}`), []string{"a"}, nil, "they agree in the members that are compared now, but others were compared when the first job was enqueued"},
		{"many", []int{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, []int{2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}, nil,
			[]string{"$[0]", "$[1]", "$[2]", "$[3]", "$[4]", "$[5]", "$[6]", "$[7]", "$[8]", "$[9]"}, "and in other members"},
		{"a long name", map[string]int{strings.Repeat("é", 100): 1}, map[string]int{strings.Repeat("é", 100): 2}, nil, []string{`$."` + strings.Repeat("é", 30) + `…"`}, ""},
		{"bytes", []byte("a"), []byte("b"), nil, nil, "their bytes differ"},
		{"bytes, then JSON", []byte("1"), 1, nil, nil, "one is bytes and the other JSON"},
		{"JSON, then bytes", 1, []byte("1"), nil, nil, "one is bytes and the other JSON"},
	} {
		key := fmt.Sprint(i)
		job := onceq.Job{Kind: "k", Key: key, Payload: c.first}
		if c.name == "fields alone" {
			job.Fields = c.fields
		}
		first := enqOne(t, db, db.Pool, job)
		second := onceq.Job{Kind: "k", Key: key, Payload: c.second, Fields: c.fields}
		_, err := db.Queue.Enqueue(ctx, db.Pool, second)
		var mismatch *onceq.MismatchError
		require.ErrorAs(t, err, &mismatch, c.name)
		require.Equal(t, c.differ, mismatch.Differ, c.name)
		require.Equal(t, c.detail, mismatch.Detail, c.name)
		require.ErrorContains(t, err, fmt.Sprintf("was used by job %d of kind \"k\" (waiting) with another payload: ", first.ID))
		for _, path := range mismatch.Differ {
			require.ErrorContains(t, err, path)
			if first, ok := c.first.(json.RawMessage); ok && path != "$" { // Postgres can evaluate the path
				require.NotEqual(t, enqGet[string](t, db.Pool, `select coalesce(jsonb_path_query_array($1::text::jsonb, $2::text::jsonpath)::text, '')`, string(first), path),
					enqGet[string](t, db.Pool, `select coalesce(jsonb_path_query_array($1::text::jsonb, $2::text::jsonpath)::text, '')`, string(c.second.(json.RawMessage)), path), path)
			}
		}
	}

	// A finished job in the history still has its payload. Without history nobody knows the payload.
	job := onceq.Job{Kind: "k", Key: "done", Scope: "s", Payload: map[string]any{"a": 1, "secret": "hunter2"}, Queue: "done"}
	other := onceq.Job{Kind: "k", Key: "done", Scope: "s", Payload: map[string]any{"a": 1, "secret": "hunter3"}}
	third := onceq.Job{Kind: "third", Key: "done", Scope: "s", Payload: 1, IgnorePayload: true}
	id := enqOne(t, db, db.Pool, job).ID
	leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "done"})
	require.NoError(t, err)
	require.NoError(t, leases[0].Fail(ctx, onceq.Fatal(errors.New("no"))))
	_, err = db.Queue.Enqueue(ctx, db.Pool, other)
	require.EqualError(t, err, fmt.Sprintf(`onceq: key "done" in scope "s" was used by job %d of kind "k" (dead) with another payload: they differ in $.secret; use another key, or list in Fields the members that must be equal, or set IgnorePayload if none must`, id))
	_, err = db.Queue.Enqueue(ctx, db.Pool, third)
	require.EqualError(t, err, fmt.Sprintf(`onceq: key "done" in scope "s" was used by job %d of kind "k" (dead), and this job is of kind "third"; give each kind a scope or keys of its own`, id))

	_, err = onceqops.New(db.Queue).Redrive(ctx, db.Pool, id)
	require.NoError(t, err)
	leases, err = db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "done"})
	require.NoError(t, err)
	require.NoError(t, leases[0].Complete(ctx, db.Pool))
	_, err = db.Queue.Enqueue(ctx, db.Pool, other)
	require.EqualError(t, err, fmt.Sprintf(`onceq: key "done" in scope "s" was used by job %d of kind "k" (completed) with another payload: the first job is finished and was not kept, so only a fingerprint of its payload is left; with Kind.Keep this error says what differs, and Ops.Keys says until when the key is taken; use another key, or list in Fields the members that must be equal, or set IgnorePayload if none must`, id))
	_, err = db.Queue.EnqueueMany(ctx, db.Pool, []onceq.Job{third, {Kind: "k", Key: "0", Payload: raw(`{"amount": 3}`)}})
	require.ErrorContains(t, err, fmt.Sprintf(`job %d of kind "k" (completed), and this job is of kind "third"`, id), "the kind's name outlives the job")
	require.ErrorContains(t, err, "they differ in $.a, $.amount;")

	// A key that a redrive has taken again knows its kind.
	enqExec(t, db.Pool, `delete from onceq.job_fences where key = 'done'`)
	id = enqOne(t, db, db.Pool, job).ID
	leases, err = db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "done"})
	require.NoError(t, err)
	require.NoError(t, leases[0].Fail(ctx, onceq.Fatal(errors.New("no"))))
	enqExec(t, db.Pool, `delete from onceq.job_fences where key = 'done'`)
	_, err = onceqops.New(db.Queue).Redrive(ctx, db.Pool, id)
	require.NoError(t, err)
	require.True(t, enqOne(t, db, db.Pool, other).Duplicate)
	_, err = db.Queue.Enqueue(ctx, db.Pool, third)
	require.ErrorContains(t, err, `of kind "k" (waiting), and this job is of kind "third"`)
}

func TestTrap_EnqueueAFingerprintOfAnUnknownVersionCountsAsEqual(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: "a", Payload: 1})
	enqExec(t, db.Pool, `update onceq.job_fences set fingerprint = '\x02' || substr(fingerprint, 2)`)
	require.True(t, enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: "a", Payload: 2}).Duplicate)
}

// These handles exist only in pgx. The other ones are in internal/conformance.
func TestEnqueue_ATransactionBegunByHandAndASavepointAreTheCallers(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx := t.Context()
	conn, err := db.Pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	enqExec(t, conn, `begin`)
	_, err = db.Queue.EnqueueMany(ctx, conn, []onceq.Job{{Kind: "k"}})
	require.NoError(t, err)
	_, err = db.Queue.EnqueueMany(ctx, conn.Conn(), []onceq.Job{{Kind: "k"}})
	require.NoError(t, err)
	enqExec(t, conn, `rollback`)
	require.Zero(t, enqJobs(t, db.Pool))

	tx := enqBegin(t, db, pgx.ReadCommitted)
	enqOne(t, db, tx, onceq.Job{Kind: "k", Key: "outside"})
	sp, err := tx.Begin(ctx)
	require.NoError(t, err)
	enqOne(t, db, sp, onceq.Job{Kind: "k", Key: "inside"})
	require.NoError(t, sp.Rollback(ctx))
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, 1, enqJobs(t, db.Pool))
}

func TestEnqueueInBatch(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx := t.Context()
	enqExec(t, db.Pool, `create table users (id int primary key)`)
	queue := func(b *pgx.Batch, job onceq.Job) *onceq.Pending {
		t.Helper()
		p, err := db.Queue.EnqueueInBatch(b, job)
		require.NoError(t, err)
		return p
	}

	b := &pgx.Batch{}
	b.Queue(`begin`)
	b.Queue(`insert into users values (1)`)
	keyed := queue(b, onceq.Job{Kind: "k", Key: "a", Payload: 1})
	again := queue(b, onceq.Job{Kind: "k", Key: "a", Payload: 1})
	other := queue(b, onceq.Job{Kind: "k", Key: "a", Payload: 2})
	plain := queue(b, onceq.Job{Kind: "k", Delay: time.Hour})
	b.Queue(`commit`)
	_, err := keyed.Result(ctx, db.Pool)
	require.ErrorContains(t, err, "before the batch")
	require.NoError(t, db.Pool.SendBatch(ctx, b).Close())
	first, err := keyed.Result(ctx, db.Pool)
	require.NoError(t, err)
	require.Equal(t, onceq.Result{ID: first.ID, State: onceq.StateWaiting}, first)
	for range 2 {
		r, err := again.Result(ctx, db.Pool)
		require.NoError(t, err)
		require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, r)
		r, err = other.Result(ctx, db.Pool)
		require.ErrorIs(t, err, onceq.ErrMismatch)
		require.Equal(t, first.ID, r.ID)
	}
	r, err := plain.Result(ctx, db.Pool)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDelayed, r.State)
	require.Equal(t, 2, enqJobs(t, db.Pool))

	// The answer comes inside the caller's transaction, before the commit.
	tx := enqBegin(t, db, pgx.ReadCommitted)
	b = &pgx.Batch{}
	own := queue(b, onceq.Job{Kind: "k", Key: "b"})
	dup := queue(b, onceq.Job{Kind: "k", Key: "b", Strict: true})
	require.NoError(t, tx.SendBatch(ctx, b).Close())
	mine, err := own.Result(ctx, tx)
	require.NoError(t, err)
	_, err = dup.Result(ctx, tx)
	var dupErr *onceq.DuplicateError
	require.ErrorAs(t, err, &dupErr)
	require.Equal(t, mine.ID, dupErr.Existing.ID)
	require.NoError(t, tx.Rollback(ctx))
	require.Equal(t, 2, enqJobs(t, db.Pool))

	_, err = db.Queue.EnqueueInBatch(b, onceq.Job{Kind: "k", Key: " "})
	var invalid *onceq.InvalidError
	require.ErrorAs(t, err, &invalid)
}

// When a batch failed, asking it for the answer must not enqueue the job.
func TestTrap_EnqueueInBatchThatFailedHasNoAnswerAndEnqueuesNothing(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	for _, key := range []string{"", "a"} {
		b := &pgx.Batch{}
		b.Queue(`select 1 / 0`)
		p, err := db.Queue.EnqueueInBatch(b, onceq.Job{Kind: "k", Key: key})
		require.NoError(t, err)
		results := db.Pool.SendBatch(t.Context(), b)
		require.Error(t, results.Close())
		_, err = p.Result(t.Context(), db.Pool)
		require.Error(t, err)
	}
	owner := owner(t, db)
	enqExec(t, owner, `create function no() returns trigger language plpgsql as $$ begin raise 'no'; end $$`)
	for _, key := range []string{"", "a"} {
		enqExec(t, owner, `create trigger no before insert on jobs for each row execute function no()`)
		b := &pgx.Batch{}
		p, err := db.Queue.EnqueueInBatch(b, onceq.Job{Kind: "k", Key: key})
		require.NoError(t, err)
		require.Error(t, db.Pool.SendBatch(t.Context(), b).Close())
		enqExec(t, owner, `drop trigger no on jobs`)
		_, err = p.Result(t.Context(), db.Pool)
		require.Error(t, err)
	}
	require.Zero(t, enqJobs(t, db.Pool))
}

// A batch that was rolled back is sent again: what it answered then does not count.
func TestEnqueueInBatch_SentAgain(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx := t.Context()
	b := &pgx.Batch{}
	p, err := db.Queue.EnqueueInBatch(b, onceq.Job{Kind: "k", Key: "a"})
	require.NoError(t, err)
	tx := begin(t, db)
	require.NoError(t, tx.SendBatch(ctx, b).Close())
	_, err = p.Result(ctx, tx)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(ctx))
	other := enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: "a"})
	require.NoError(t, db.Pool.SendBatch(ctx, b).Close())
	r, err := p.Result(ctx, db.Pool)
	require.NoError(t, err)
	require.Equal(t, onceq.Result{ID: other.ID, Duplicate: true, State: onceq.StateWaiting}, r)
}

// The caller may use a buffer again for the next job of a batch.
func TestEnqueueInBatch_KeepsItsBytes(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	b := &pgx.Batch{}
	buffer := []byte("first")
	for _, text := range []string{"first", "later"} {
		copy(buffer, text)
		_, err := db.Queue.EnqueueInBatch(b, onceq.Job{Kind: "k", Payload: buffer, Key: text})
		require.NoError(t, err)
	}
	require.NoError(t, db.Pool.SendBatch(t.Context(), b).Close())
	for _, text := range []string{"first", "later"} {
		require.Equal(t, text, string(enqClaim(t, db).Bytes))
	}
}

func TestEnqueueInBatch_TakesAnExpiredKeyInTheBatchItself(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	job := onceq.Job{Kind: "k", Key: "a", Window: onceq.UntilFinished}
	first := enqOne(t, db, db.Pool, job)
	enqFinish(t, db, 1)
	b := &pgx.Batch{}
	p, err := db.Queue.EnqueueInBatch(b, job)
	require.NoError(t, err)
	require.NoError(t, db.Pool.SendBatch(t.Context(), b).Close())
	require.Equal(t, 1, enqJobs(t, db.Pool))
	r, err := p.Result(t.Context(), nil) // sends nothing
	require.NoError(t, err)
	require.False(t, r.Duplicate)
	require.Greater(t, r.ID, first.ID)
}

func TestEnqueueUnique(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	kind := onceq.Kind[int]{Name: "k", Key: func(n int) string { return strings.Repeat(" ", n) }}
	for _, job := range []onceq.Job{
		{Kind: "k"}, {Kind: "k", Key: " "}, {Kind: "k", Key: "\t\n\u00a0\u2003"}, {Kind: "k", Scope: "s"}, kind.Job(0), kind.Job(3),
	} {
		_, err := db.Queue.EnqueueUnique(t.Context(), db.Pool, job)
		var invalid *onceq.InvalidError
		require.ErrorAs(t, err, &invalid, "%q", job.Key)
		require.Equal(t, "Key", invalid.Field)
	}
	for n := range 3 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(n))
		require.ErrorContains(t, err, "Key")
		_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{{Kind: "k"}, kind.Job(n)})
		require.ErrorContains(t, err, "jobs[1].Key")
	}
	require.Zero(t, enqJobs(t, db.Pool))
	r, err := db.Queue.EnqueueUnique(t.Context(), db.Pool, onceq.Job{Kind: "k", Key: "a"})
	require.NoError(t, err)
	require.False(t, r.Duplicate)
}

// Keys whose window is over are taken over in a second statement, with the ids that the first one drew.
func TestEnqueueMany_IdsGrowInInputOrderAlsoOverExpiredKeysAndDuplicates(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	var jobs []onceq.Job
	for i := range 4500 {
		jobs = append(jobs, onceq.Job{Kind: "k", Key: fmt.Sprintf("key %d", 5000-i), Window: time.Minute})
	}
	old, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs[1000:3000])
	require.NoError(t, err)
	enqExec(t, db.Pool, `with gone as (delete from onceq.jobs where id % 2 = 0 returning id)
		update onceq.job_fences set state = 3, finished_at = now() - interval '1 hour', token = token + 1, result = '1' from gone where job_id = id`)
	results, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	last, duplicates := int64(0), 0
	for i, r := range results {
		if r.Duplicate {
			duplicates++
			require.Equal(t, old[i-1000].ID, r.ID)
			continue
		}
		require.Greater(t, r.ID, last)
		last = r.ID
	}
	require.Equal(t, 1000, duplicates)
	require.Equal(t, 4500, enqJobs(t, db.Pool))
}

// A call that is rolled back sends no events: they would tell of jobs that never existed.
func TestEnqueueMany_EventsOnlyOfWhatWasEnqueued(t *testing.T) {
	t.Parallel()
	var seen []string
	db := enqNew(t, queuetest.Config(onceq.Config{Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
		seen = append(seen, fmt.Sprintf("%s %s", e.Type, e.Key))
	})}))
	enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: "a"})
	enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: "a"})
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{{Kind: "k", Key: "b"}, {Kind: "k", Key: "a", Payload: 2}})
	require.ErrorIs(t, err, onceq.ErrMismatch)
	_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{{Kind: "k", Key: "b"}, {Kind: "k", Key: "a"}})
	require.NoError(t, err)
	require.Equal(t, []string{"enqueued a", "duplicate a", "mismatch a", "duplicate a", "enqueued b"}, seen)
}

func TestTrap_EnqueueManyOfLargePayloadsIsSentInSeveralStatements(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	jobs := make([]onceq.Job, 40)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k", Key: fmt.Sprint(i), Payload: make([]byte, onceq.MaxPayloadBytes)}
	}
	results, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	require.True(t, slices.IsSortedFunc(results, func(a, b onceq.Result) int { return int(a.ID - b.ID) }))
	require.Equal(t, 3, enqGet[int](t, db.Pool, `select count(distinct created_at)::int from onceq.jobs`))
}

func TestEnqueue_AHandlerThatEnqueuesItsOwnKeyIsToldToReschedule(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	own := onceq.Job{Kind: "k", Key: "a", Window: onceq.UntilFinished}
	kind := onceq.Kind[any]{Name: "k"}
	enqOne(t, db, db.Pool, own)
	ran := make(chan error, 10)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, kind.Handle(func(ctx context.Context, _ *onceq.Lease, _ any) error {
		defer cancel()
		_, err := db.Queue.Enqueue(ctx, db.Pool, own)
		ran <- err
		rs, err := db.Queue.EnqueueMany(ctx, db.Pool, []onceq.Job{{Kind: "other"}, own})
		ran <- err
		if len(rs) != 2 || rs[0].ID != 0 || !rs[1].Duplicate {
			ran <- fmt.Errorf("results of the call that was rolled back: %+v", rs)
		}
		tx, err := db.Pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		_, err = db.Queue.EnqueueMany(ctx, tx, []onceq.Job{{Kind: "other"}, own})
		ran <- err
		if _, err := db.Queue.Enqueue(ctx, tx, onceq.Job{Kind: "other", Key: "b"}); err != nil {
			ran <- err
		}
		return tx.Commit(ctx)
	}))
	require.NoError(t, err)
	require.NoError(t, w.Run(ctx))
	close(ran)
	n := 0
	for err := range ran {
		n++
		require.ErrorIs(t, err, onceq.ErrOwnKey)
		require.ErrorContains(t, err, "Reschedule")
	}
	require.Equal(t, 3, n)
	require.Equal(t, 2, enqGet[int](t, db.Pool, `select count(*)::int from onceq.jobs where kind = 'other'`))
}

// A handler may enqueue with a context that is not the worker's. Its transaction still tells whose key it is.
func TestEnqueue_AHandlersOwnKeyIsKnownInAnyContext(t *testing.T) {
	t.Parallel()
	for _, keep := range []time.Duration{0, time.Hour} {
		t.Run(keep.String(), func(t *testing.T) {
			t.Parallel()
			db := enqNew(t)
			ctx := t.Context()
			kind := onceq.Kind[int]{Name: "k", Key: func(int) string { return "a" }, Keep: keep}
			own := kind.Job(1)
			enqOne(t, db, db.Pool, own)
			ran := make(chan error, 10)
			w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
				_, err := db.Queue.Enqueue(context.Background(), tx, own)
				ran <- err
				sp, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				_, err = db.Queue.Enqueue(context.Background(), sp, own)
				ran <- err
				// Through a wrapped handle on the same transaction, and outside the transaction, the answer is the one that
				// everybody gets.
				for _, in := range []onceq.DB{struct{ onceq.DB }{sp}, db.Pool} {
					r, err := db.Queue.Enqueue(context.Background(), in, own)
					if err == nil && (!r.Duplicate || r.State != onceq.StateRunning) {
						err = fmt.Errorf("the answer in %T: %+v", in, r)
					}
					if err != nil {
						return err
					}
				}
				return sp.Commit(ctx)
			}))
			require.NoError(t, err)
			require.NoError(t, w.Drain(ctx, 0))
			close(ran)
			n := 0
			for err := range ran {
				n++
				require.ErrorIs(t, err, onceq.ErrOwnKey)
				require.ErrorContains(t, err, "Reschedule")
			}
			require.NotZero(t, n)
			require.Equal(t, onceq.StateCompleted, enqOne(t, db, db.Pool, own).State)
		})
	}
}

func TestTrap_EnqueueChecksLimitsBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx := t.Context()
	tx := enqBegin(t, db, pgx.ReadCommitted)
	deep := func(n int) json.RawMessage {
		return json.RawMessage(strings.Repeat("[", n) + strings.Repeat("]", n))
	}
	raw := func(s string) json.RawMessage { return json.RawMessage(s) }
	k := onceq.Job{Kind: "k", Key: "key"}
	with := func(change func(*onceq.Job)) onceq.Job {
		job := k
		change(&job)
		return job
	}
	for i, c := range []struct {
		field string
		job   onceq.Job
	}{
		{"Kind", onceq.Job{}},
		{"Kind", onceq.Job{Kind: "\n"}},
		{"Kind", onceq.Job{Kind: strings.Repeat("k", onceq.MaxNameBytes+1)}},
		{"Kind", onceq.Job{Kind: "a\x00b"}},
		{"Queue", with(func(j *onceq.Job) { j.Queue = strings.Repeat("q", onceq.MaxNameBytes+1) })},
		{"Queue", with(func(j *onceq.Job) { j.Queue = "\xff" })},
		{"Queue", with(func(j *onceq.Job) { j.Queue = " " })},
		{"Key", with(func(j *onceq.Job) { j.Key = strings.Repeat("k", onceq.MaxKeyBytes+1) })},
		{"Key", with(func(j *onceq.Job) { j.Key = strings.Repeat("k", 3000) })},
		{"Key", with(func(j *onceq.Job) { j.Key = "a\x00" })},
		{"Key", with(func(j *onceq.Job) { j.Key = "\xc3\x28" })},
		{"Key", with(func(j *onceq.Job) { j.Key = "\xed\xa0\x80" })},
		{"Key", with(func(j *onceq.Job) { j.Key = "\u3000" })},
		{"Scope", with(func(j *onceq.Job) { j.Scope = strings.Repeat("s", onceq.MaxScopeBytes+1) })},
		{"Scope", with(func(j *onceq.Job) { j.Scope = "\x00" })},
		{"Scope", onceq.Job{Kind: "k", Scope: "s"}},
		{"Payload", with(func(j *onceq.Job) { j.Payload = strings.Repeat("x", onceq.MaxPayloadBytes) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = make([]byte, onceq.MaxPayloadBytes+1) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = make(chan int) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = math.NaN() })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = "a\x00b" })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw(`"\u0000"`) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw(`{"\u0000":1}`) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw(`"\ud800"`) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw(`"\udc00\ud800"`) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw("\"\xff\"") })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw(`1e1000000`) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw(`1e-1000000`) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw(strings.Repeat("9", 200_000)) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw(`[1e9999` + strings.Repeat(`,1e9999`, 100_000) + `]`) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = deep(100_000) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw(`{"a":1`) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload = raw(` `) })},
		{"Payload", with(func(j *onceq.Job) { j.Payload, j.Fields = raw(`[]`), []string{"a"} })},
		{"Fields", with(func(j *onceq.Job) { j.Payload, j.Fields = []byte(`{}`), []string{"a"} })},
		{"Metadata", with(func(j *onceq.Job) { j.Metadata = map[string]string{"a": strings.Repeat("x", onceq.MaxMetadataBytes)} })},
		{"Metadata", with(func(j *onceq.Job) { j.Metadata = map[string]string{"a": "\x00"} })},
		{"Metadata", with(func(j *onceq.Job) { j.Metadata = map[string]string{"a": "\xff"} })},
		{"Metadata", with(func(j *onceq.Job) { j.Metadata = map[string]string{"\xff": ""} })},
		{"RunAt", with(func(j *onceq.Job) { j.RunAt = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) })},
		{"RunAt", with(func(j *onceq.Job) { j.RunAt = time.Date(9999, 12, 31, 23, 59, 59, 0, time.FixedZone("west", -5*60*60)) })},
		{"RunAt", with(func(j *onceq.Job) { j.RunAt = time.Date(1, 1, 1, 0, 0, 0, 0, time.FixedZone("east", 5*60*60)) })},
		{"RunAt", with(func(j *onceq.Job) { j.RunAt = time.Date(-5000, 1, 1, 0, 0, 0, 0, time.UTC) })},
		{"RunAt", with(func(j *onceq.Job) { j.RunAt, j.Delay = time.Now(), 1 })},
		{"Delay", with(func(j *onceq.Job) { j.Delay = -1 })},
		{"Priority", with(func(j *onceq.Job) { j.Priority = 2 })},
		{"Priority", with(func(j *onceq.Job) { j.Priority = -2 })},
		{"MaxAttempts", with(func(j *onceq.Job) { j.MaxAttempts = -1 })},
		{"MaxAttempts", with(func(j *onceq.Job) { j.MaxAttempts = math.MaxInt16 + 1 })},
		{"Window", with(func(j *onceq.Job) { j.Window = -3 })},
	} {
		name := fmt.Sprintf("case %d, %s", i, c.field)
		var invalid *onceq.InvalidError
		_, err := db.Queue.Enqueue(ctx, tx, c.job)
		require.ErrorAs(t, err, &invalid, name)
		require.Equal(t, c.field, invalid.Field, name)
		_, err = db.Queue.EnqueueMany(ctx, tx, []onceq.Job{{Kind: "k"}, c.job})
		require.ErrorAs(t, err, &invalid, name)
		require.Equal(t, "jobs[1]."+c.field, invalid.Field, name)
		b := &pgx.Batch{}
		_, err = db.Queue.EnqueueInBatch(b, c.job)
		require.ErrorAs(t, err, &invalid, name)
		require.Zero(t, b.Len(), name)
		require.Zero(t, enqJobs(t, tx), name)
	}

	// Jobs just within the limits are accepted, in the same transaction.
	_, err := db.Queue.EnqueueMany(ctx, tx, []onceq.Job{
		{
			Kind: strings.Repeat("k", onceq.MaxNameBytes), Queue: strings.Repeat("é", onceq.MaxNameBytes/2), MaxAttempts: math.MaxInt16,
			Key: strings.Repeat("k", onceq.MaxKeyBytes), Scope: strings.Repeat("s", onceq.MaxScopeBytes), Window: onceq.Forever - 1,
			Metadata: map[string]string{"a": strings.Repeat("x", onceq.MaxMetadataBytes-len(`{"a":""}`))}, Delay: math.MaxInt64,
		},
		{Kind: "k", Key: "1", Payload: strings.Repeat("x", onceq.MaxPayloadBytes-2)},
		{Kind: "k", Key: "2", Payload: make([]byte, onceq.MaxPayloadBytes)},
		{Kind: "k", Key: "3", Payload: deep(jsonb.MaxDepth)},
		{Kind: "k", Key: "4", Payload: raw(strings.Repeat("9", jsonb.MaxNumberLength-5) + "e9999")},
		{Kind: "k", Key: "5", Payload: raw("0." + strings.Repeat("9", jsonb.MaxNumberLength-8) + "e-9999")},
		{Kind: "k", Key: "6", Payload: raw(`[1e9999` + strings.Repeat(`,1e9999`, jsonb.MaxExponents/jsonb.MaxExponent-1) + `]`)},
		{Kind: "k", RunAt: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)},
		{Kind: "k", RunAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.FixedZone("east", 5*60*60))},
		{Kind: "k", RunAt: time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC)},
	})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(ctx))
	leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 100})
	require.NoError(t, err)
	require.Len(t, leases, 7)
}

// numeric writes 1e9999 with all its zeros. A megabyte of such numbers becomes a text that Postgres refuses to build, and
// then every claim of that queue would fail.
func TestTrap_EnqueueRefusesNumbersThatAClaimCouldNotReadBack(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	numbers := `[1e9999` + strings.Repeat(`,1e9999`, 120_000) + `]`
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: json.RawMessage(numbers)})
	var invalid *onceq.InvalidError
	require.ErrorAs(t, err, &invalid)
	if testing.Short() {
		return // the server takes seconds to refuse it
	}
	_, err = db.Pool.Exec(t.Context(), `select ($1::text::jsonb)::text`, numbers)
	require.Error(t, err)
}

func TestEnqueue_ManyProducersOfOneKeyGiveOneJob(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	second, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	require.NoError(t, second.Check(t.Context())) // on Citus a batch has to know
	const producers = 40
	for round := range 5 {
		key := fmt.Sprint("key ", round)
		if round%2 == 1 { // an expired key exists
			enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: key, Window: onceq.UntilFinished})
			enqFinish(t, db, nil)
		}
		var wg sync.WaitGroup
		results := make([]onceq.Result, producers)
		errs := make([]error, producers)
		start := make(chan struct{})
		for i := range producers {
			wg.Go(func() {
				<-start
				q := db.Queue
				if i%2 == 1 {
					q = second
				}
				job := onceq.Job{Kind: "k", Key: key, Window: onceq.UntilFinished, Delay: time.Duration(i%3) * time.Hour}
				switch i % 3 {
				case 0:
					results[i], errs[i] = q.Enqueue(t.Context(), db.Pool, job)
				case 1:
					var rs []onceq.Result
					if rs, errs[i] = q.EnqueueMany(t.Context(), db.Pool, []onceq.Job{job, {Kind: "k", Key: fmt.Sprint(key, i), Delay: time.Hour}}); errs[i] == nil {
						results[i] = rs[0]
					}
				case 2:
					b := &pgx.Batch{}
					var p *onceq.Pending
					if p, errs[i] = q.EnqueueInBatch(b, job); errs[i] == nil {
						if errs[i] = db.Pool.SendBatch(t.Context(), b).Close(); errs[i] == nil {
							results[i], errs[i] = p.Result(t.Context(), db.Pool)
						}
					}
				}
			})
		}
		close(start)
		wg.Wait()
		fresh := 0
		for i, r := range results {
			require.NoError(t, errs[i])
			require.Equal(t, results[0].ID, r.ID)
			if !r.Duplicate {
				fresh++
			}
		}
		require.Equal(t, 1, fresh)
		enqExec(t, db.Pool, `with gone as (delete from onceq.jobs returning id)
			update onceq.job_fences f set state = 3, finished_at = statement_timestamp() from gone where f.job_id = gone.id`)
	}
}

// enqBetween is a database handle that calls a function before the nth query.
type enqBetween struct {
	onceq.DB
	n  int
	do func()
}

func (b *enqBetween) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if b.n--; b.n == 0 {
		b.do()
	}
	return b.DB.Query(ctx, sql, args...)
}

func TestTrap_EnqueueTriesAgainWhenTheKeyIsPrunedBetweenInsertAndRead(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	job := onceq.Job{Kind: "k", Key: "a"}
	first := enqOne(t, db, db.Pool, job)
	enqFinish(t, db, nil)
	in := &enqBetween{DB: db.Pool, n: 2, do: func() { enqExec(t, db.Pool, `delete from onceq.job_fences`) }}
	r := enqOne(t, db, in, job)
	require.False(t, r.Duplicate)
	require.Greater(t, r.ID, first.ID)
	require.Equal(t, 1, enqJobs(t, db.Pool))
	enqFinish(t, db, nil)
	in = &enqBetween{DB: db.Pool, n: 2, do: func() { enqExec(t, db.Pool, `delete from onceq.job_fences`) }}
	rs, err := db.Queue.EnqueueMany(t.Context(), in, []onceq.Job{{Kind: "k"}, job})
	require.NoError(t, err)
	require.False(t, rs[1].Duplicate)
}

// The same in a transaction of EnqueueMany's own, however many statements it takes until the key is read.
func TestTrap_EnqueueTriesAgainInATransactionWhenTheKeyIsPruned(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	job := onceq.Job{Kind: "k", Key: "a"}
	last := enqOne(t, db, db.Pool, job)
	for _, jobs := range [][]onceq.Job{{job}, {{Kind: "k"}, job}} {
		enqFinish(t, db, nil)
		gated := gatedPool{db.Pool, "as u(scope, key, n)", make(chan struct{}), make(chan struct{}), new(atomic.Bool)}
		many := background(func() ([]onceq.Result, error) { return db.Queue.EnqueueMany(t.Context(), gated, jobs) })
		receive(t, gated.comes)
		enqExec(t, db.Pool, `delete from onceq.job_fences`)
		close(gated.goes)
		results, err := many()
		require.NoError(t, err)
		r := results[len(jobs)-1]
		require.False(t, r.Duplicate)
		require.Greater(t, r.ID, last.ID)
		last = r
	}
}

func TestTrap_EnqueueGivesUpWhenRowSecurityHidesTheKey(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx := t.Context()
	enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: "a"})
	owner, schema := owner(t, db), pgx.Identifier{db.Schema}.Sanitize()
	role := fmt.Sprintf("enq_%d", time.Now().UnixNano())
	enqExec(t, owner, `create role `+role)
	t.Cleanup(func() {
		_, err := owner.Exec(context.Background(), `drop owned by `+role+`; drop role `+role)
		require.NoError(t, err)
	})
	enqExec(t, owner, `grant usage on schema `+schema+` to `+role)
	enqExec(t, owner, `grant all on all tables in schema `+schema+` to `+role)
	enqExec(t, owner, `grant all on all sequences in schema `+schema+` to `+role)
	enqExec(t, owner, `alter table job_fences enable row level security`)
	t.Cleanup(func() { // so that the check at the end sees every row again
		_, err := owner.Exec(context.Background(), `alter table job_fences disable row level security`)
		require.NoError(t, err)
	})
	enqExec(t, owner, `create policy look on job_fences for select using (job_id > 1)`)
	enqExec(t, owner, `create policy take on job_fences for insert with check (true)`)
	tx, err := owner.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	enqExec(t, tx, `set local role `+role)
	_, err = db.Queue.Enqueue(ctx, tx, onceq.Job{Kind: "k", Key: "b"})
	require.NoError(t, err)
	_, err = db.Queue.Enqueue(ctx, tx, onceq.Job{Kind: "k", Key: "a"})
	require.ErrorIs(t, err, onceq.ErrKeyUnsettled)
	require.ErrorContains(t, err, `"a"`)
	_, err = db.Queue.EnqueueMany(ctx, tx, []onceq.Job{{Kind: "k", Key: "a"}, {Kind: "k", Key: "c"}})
	require.ErrorIs(t, err, onceq.ErrKeyUnsettled)
	require.Equal(t, 1, enqGet[int](t, tx, `select 1`))
}

func TestTrap_EnqueueManyTakesKeysInSortedOrder(t *testing.T) {
	t.Parallel()
	for _, n := range []int{300, 4500} { // in one statement, and in several
		for _, expired := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d, expired %t", n, expired), func(t *testing.T) {
				t.Parallel()
				db := enqNew(t)
				forward := make([]onceq.Job, n)
				for i := range forward {
					forward[i] = onceq.Job{Kind: "k", Key: fmt.Sprintf("%s%d", []string{"a", "B", "é", "_"}[i%4], i), Window: onceq.UntilFinished}
				}
				backward := slices.Clone(forward)
				slices.Reverse(backward)
				for range conformance.Sized(1, 3) {
					if expired {
						_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, forward)
						require.NoError(t, err)
						enqExec(t, db.Pool, `delete from onceq.jobs; update onceq.job_fences set state = 3, finished_at = now()`)
					} else {
						enqExec(t, db.Pool, `delete from onceq.jobs; delete from onceq.job_fences`)
					}
					var wg sync.WaitGroup
					errs := make([]error, 4)
					for i := range errs {
						wg.Go(func() {
							_, errs[i] = db.Queue.EnqueueMany(t.Context(), db.Pool, [][]onceq.Job{forward, backward}[i%2])
						})
					}
					wg.Wait()
					require.NoError(t, errors.Join(errs...))
					require.Equal(t, n, enqJobs(t, db.Pool))
				}
			})
		}
	}
}

// gatedPool gives transactions that wait once before a statement that contains a text.
type gatedPool struct {
	*pgxpool.Pool
	text        string
	comes, goes chan struct{}
	met         *atomic.Bool
}

func (g gatedPool) BeginTx(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error) {
	tx, err := g.Pool.BeginTx(ctx, o)
	return gatedTx{tx, g}, err
}

type gatedTx struct {
	pgx.Tx
	g gatedPool
}

func (t gatedTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if strings.Contains(sql, t.g.text) && !t.g.met.Swap(true) {
		close(t.g.comes)
		<-t.g.goes
	}
	return t.Tx.Query(ctx, sql, args...)
}

// Expired keys are taken after absent ones, whatever the order of the keys. A transaction of EnqueueMany's own that is in a deadlock
// for that reason runs again.
func TestTrap_EnqueueManyRunsAgainAfterADeadlock(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx := t.Context()
	job := func(key string) onceq.Job { return onceq.Job{Kind: "k", Key: key, Window: onceq.UntilFinished} }
	expired := enqOne(t, db, db.Pool, job("a"))
	enqExec(t, db.Pool, `update onceq.job_fences set state = 3, finished_at = now()`)
	enqExec(t, db.Pool, `delete from onceq.jobs`)

	gated := gatedPool{db.Pool, ".enqueue_jobs(", make(chan struct{}), make(chan struct{}), new(atomic.Bool)}
	many := background(func() ([]onceq.Result, error) {
		return db.Queue.EnqueueMany(ctx, gated, []onceq.Job{job("a"), job("b")})
	})
	receive(t, gated.comes) // it has b
	tx := enqBegin(t, db, pgx.ReadCommitted)
	a := enqOne(t, db, tx, job("a"))
	close(gated.goes)
	waitBlocked(t, db)
	_, err := db.Queue.Enqueue(ctx, tx, job("b"))
	if err == nil {
		require.NoError(t, tx.Commit(ctx))
	} else { // a slow machine: Postgres has chosen this one
		require.True(t, onceq.IsRetryable(err), err)
		require.NoError(t, tx.Rollback(ctx))
	}
	got, failed := many()
	require.NoError(t, failed)
	require.Len(t, got, 2)
	if err == nil {
		require.Equal(t, onceq.Result{ID: a.ID, Duplicate: true, State: onceq.StateWaiting}, got[0])
		require.True(t, got[1].Duplicate)
	}
	require.NotEqual(t, expired.ID, got[0].ID)
	require.Equal(t, 2, enqJobs(t, db.Pool))
}

// What Enqueue of a taken key waits for, as its documentation says.
func TestEnqueue_WaitsForWhoChangesTheKeysJob(t *testing.T) {
	t.Parallel()
	job := onceq.Job{Kind: "k", Key: "a"}
	for name, c := range map[string]struct {
		dead   bool
		change func(ctx context.Context, q *onceq.Queue, tx pgx.Tx, id int64) error
	}{
		"cancel": {false, func(ctx context.Context, q *onceq.Queue, tx pgx.Tx, id int64) error {
			_, err := q.Cancel(ctx, tx, id)
			return err
		}},
		"replace": {false, func(ctx context.Context, q *onceq.Queue, tx pgx.Tx, id int64) error {
			_, err := q.Enqueue(ctx, tx, onceq.Job{Kind: "k", Key: "a", Payload: 2, Replace: onceq.ReplacePayload})
			return err
		}},
		"redrive": {true, func(ctx context.Context, q *onceq.Queue, tx pgx.Tx, id int64) error {
			_, err := onceqops.New(q).Redrive(ctx, tx, id)
			return err
		}},
		"discard": {true, func(ctx context.Context, q *onceq.Queue, tx pgx.Tx, id int64) error {
			return onceqops.New(q).Discard(ctx, tx, id)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := enqNew(t)
			ctx, q := t.Context(), db.Queue
			id := enqOne(t, db, db.Pool, job).ID
			if c.dead {
				require.NoError(t, enqClaim(t, db).Fail(ctx, onceq.Fatal(errors.New("no"))))
			}
			tx := enqBegin(t, db, pgx.ReadCommitted)
			require.NoError(t, c.change(ctx, q, tx, id))
			waits := background(func() (onceq.Result, error) { return q.Enqueue(ctx, db.Pool, job) })
			enqBlocked(t, db, 1)
			require.NoError(t, tx.Rollback(ctx))
			r, err := waits()
			require.NoError(t, err)
			require.True(t, r.Duplicate)
			require.Equal(t, id, r.ID)
		})
	}
}

// This proves the order in which keys are taken, without luck. The key in the middle is held by another session. The keys
// that are taken by then must be those that sort before it, by bytes.
func TestTrap_EnqueueManyTakesKeysInTheOrderOfTheirBytes(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	keys := []string{"é", "b", "a", "_", "B", "m"}
	hold := enqBegin(t, db, pgx.ReadCommitted)
	enqOne(t, db, hold, onceq.Job{Kind: "k", Key: "a"})
	var jobs []onceq.Job
	for _, key := range keys {
		jobs = append(jobs, onceq.Job{Kind: "k", Key: key})
	}
	done := make(chan error, 1)
	ctx := t.Context()
	go func() {
		_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
		done <- err
	}()
	enqBlocked(t, db, 1)
	probe := func(key string) bool { // reports whether it is taken
		tx := enqBegin(t, db, pgx.ReadCommitted)
		defer func() { require.NoError(t, tx.Rollback(ctx)) }()
		enqExec(t, tx, `set local lock_timeout = '50ms'`)
		_, err := db.Queue.Enqueue(ctx, tx, onceq.Job{Kind: "k", Key: key})
		var pgErr *pgconn.PgError
		return errors.As(err, &pgErr) && pgErr.Code == "55P03"
	}
	for key, taken := range map[string]bool{"B": true, "_": true, "b": false, "m": false, "é": false} {
		require.Equal(t, taken, probe(key), key)
	}
	require.NoError(t, hold.Rollback(ctx))
	require.NoError(t, <-done)
}

// Keys are taken in the order of their bytes whatever the database's collation is, by every statement for many jobs. A row of a
// table in which nothing was deleted has its place by when it was written, so the places of the fences show the order.
func TestTrap_KeysAreTakenInTheOrderOfTheirBytesWhateverTheCollation(t *testing.T) {
	t.Parallel()
	pool := upkeepDatabase(t, `encoding 'UTF8' lc_collate 'C' lc_ctype 'C' locale_provider icu icu_locale 'en'`)
	require.True(t, enqGet[bool](t, pool, `select 'a' < 'B'`), "the database's collation orders by bytes, and the test shows nothing")
	q, err := onceq.New(pool, nil)
	require.NoError(t, err)
	for name, change := range map[string]func(i int, job *onceq.Job){
		"of one kind":   func(int, *onceq.Job) {},
		"of many kinds": func(i int, job *onceq.Job) { job.Kind += fmt.Sprint(i) },
		"of a lane":     func(_ int, job *onceq.Job) { job.Lane = "f/n" },
	} {
		for _, again := range []bool{false, true} { // then the keys are free again, and are taken over
			var jobs []onceq.Job
			for i, key := range []string{"é", "b", "a", "_", "B", "m"} {
				job := onceq.Job{Kind: "k", Scope: name, Key: key, Window: onceq.UntilFinished}
				change(i, &job)
				jobs = append(jobs, job)
			}
			_, err = q.EnqueueMany(t.Context(), pool, jobs)
			require.NoError(t, err)
			require.Equal(t, []string{"B", "_", "a", "b", "m", "é"},
				enqGet[[]string](t, pool, `select array_agg(key order by ctid) from onceq.job_fences where scope = $1`, name), "%s, again %t", name, again)
			enqExec(t, pool, `update onceq.job_fences set state = 3, finished_at = now() where scope = $1`, name)
		}
	}
}

// enqEveryForm goes through every form of enqueueing and every answer.
func enqEveryForm(t *testing.T, db *queuetest.DB) { conformance.EveryForm(t, db, db.Pool) }

func TestTrap_EnqueueInEveryQueryMode(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			enqEveryForm(t, enqNew(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = mode
			})))
		})
	}
}

func TestEnqueue_AnySchemaNameAndAnEmptySearchPath(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"onceq", `We"ird 'sch$1ema$$ é`, "Select"} {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
			t.Run(schema+"/"+mode.String(), func(t *testing.T) {
				t.Parallel()
				enqEveryForm(t, enqNew(t, queuetest.Schema(schema), queuetest.PoolConfig(func(c *pgxpool.Config) {
					c.ConnConfig.RuntimeParams["search_path"] = ""
					c.ConnConfig.DefaultQueryExecMode = mode
				})))
			})
		}
	}
}

func TestTrap_EnqueueWakesOneThatWaits(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx := t.Context()
	conn, err := pgx.Connect(ctx, db.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	workers := rand.Int64() // other tests use the database's server, and channels are the database's
	channel := func(worker int64) string { return fmt.Sprintf("onceq_%d", workers+worker) }
	for worker := range int64(10) {
		enqExec(t, conn, `listen `+channel(worker))
	}

	// heard gives the workers that what fn did has woken, and for which queue: all that come before one of the test's own.
	heard := func(fn func()) (payloads []string) {
		t.Helper()
		fn()
		enqExec(t, db.Pool, `select pg_notify($1, 'end')`, channel(0))
		for {
			n, err := conn.WaitForNotification(ctx)
			require.NoError(t, err)
			if n.Payload == "end" {
				slices.Sort(payloads)
				return payloads
			}
			for worker := range int64(10) {
				if channel(worker) == n.Channel {
					payloads = append(payloads, fmt.Sprintf("%d %s", worker, n.Payload))
				}
			}
		}
	}
	waits := func(worker, room int64, until string, queues ...string) {
		enqExec(t, db.Pool, `insert into onceq.waiters (worker, serves, round, room, idle_until) values ($1, $2, 1, $3, now() + $4::text::interval)
			on conflict (worker) do update set round = waiters.round + 1, room = excluded.room`, workers+worker, int64(len(strings.Join(queues, ""))), room, until)
		enqExec(t, db.Pool, `insert into onceq.waiter_queues select u, $1 from unnest($2::text[]) u on conflict do nothing`, int64(len(strings.Join(queues, ""))), queues)
	}
	n := 0
	forms := []func(onceq.Job){
		func(job onceq.Job) { enqOne(t, db, db.Pool, job) },
		func(job onceq.Job) {
			_, err := db.Queue.EnqueueMany(ctx, db.Pool, []onceq.Job{job})
			require.NoError(t, err)
		},
		func(job onceq.Job) {
			b := &pgx.Batch{}
			_, err := db.Queue.EnqueueInBatch(b, job)
			require.NoError(t, err)
			require.NoError(t, db.Pool.SendBatch(ctx, b).Close())
		},
	}
	fresh := func(job onceq.Job) onceq.Job {
		if n++; n%2 == 0 {
			job.Key = fmt.Sprint(n)
		}
		job.Kind = "k"
		return job
	}
	twice := func(job onceq.Job) func() {
		return func() {
			for _, form := range forms {
				form(fresh(job))
				form(fresh(job))
			}
		}
	}
	one := func(job onceq.Job) func() { return func() { enqOne(t, db, db.Pool, fresh(job)) } }
	require.Empty(t, heard(twice(onceq.Job{})), "nobody waits")
	waits(1, 100, "1 hour", "other")
	waits(2, 100, "-1 second", "default")
	require.Empty(t, heard(twice(onceq.Job{})), "nobody waits for this queue any more")
	waits(3, 100, "1 hour", "default")
	require.Eventually(t, func() bool { return slices.Equal(heard(one(onceq.Job{})), []string{"3 default"}) }, patience, time.Millisecond,
		"it was seen a moment ago that nobody waits, and that is believed for a while")
	for _, form := range forms {
		// It was woken, and is woken again only when it waits again. What else is seen is believed for a while.
		require.Empty(t, heard(twice(onceq.Job{})))
		waits(3, 100, "1 hour", "default")
		require.Eventually(t, func() bool { return slices.Equal(heard(func() { form(fresh(onceq.Job{})) }), []string{"3 default"}) }, patience, time.Millisecond)
	}
	// More of them: every job wakes another one, until all are awake.
	again := func() {
		waits(3, 1, "1 hour", "default")
		waits(4, 1, "1 hour", "default")
		waits(5, 100, "1 hour", "default", "other")
		waits(6, 2, "1 hour", "default", "other")
		time.Sleep(20 * time.Millisecond) // for so long it may be believed that nobody waits
	}
	all := []string{"3 default", "4 default", "5 default", "6 default"}
	for _, job := range []onceq.Job{{}, {Delay: time.Second}, {RunAt: time.Now().Add(-time.Hour)}} {
		again()
		require.Equal(t, all, heard(twice(job)))
		again()
		require.Len(t, heard(one(job)), 1)
	}
	again()
	require.Empty(t, heard(twice(onceq.Job{Delay: time.Hour})), "nothing to do for an hour")
	require.Empty(t, heard(twice(onceq.Job{RunAt: time.Now().Add(time.Hour)})), "nothing to do for an hour")
	same := onceq.Job{Kind: "k", Key: "same"}
	require.Len(t, heard(func() { enqOne(t, db, db.Pool, same) }), 1)
	require.Empty(t, heard(func() {
		for _, form := range forms {
			form(same)
		}
	}), "duplicates are no work")
	// Many jobs wake as many as have room for them.
	many := func(n int, queues ...string) func() {
		return func() {
			var jobs []onceq.Job
			for _, queue := range queues {
				for range n {
					jobs = append(jobs, onceq.Job{Kind: "k", Queue: queue})
				}
			}
			_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
			require.NoError(t, err)
		}
	}
	again()
	require.Equal(t, all, heard(many(200, "default")))
	waits(3, 1, "1 hour", "default")
	waits(4, 1, "1 hour", "default")
	require.Len(t, heard(many(2, "default")), 2)
	waits(5, 100, "1 hour", "default", "other")
	require.Equal(t, []string{"5 default"}, heard(many(1, "default", "third")))
	enqExec(t, db.Pool, `delete from onceq.waiters where worker = $1`, workers+1)
	require.Equal(t, []string{"5 other"}, heard(many(1, "other")), "it is woken once for each queue")
	waits(6, 2, "1 hour", "default", "other")
	enqExec(t, db.Pool, `update onceq.waiters set busy = '{default}' where worker = $1`, workers+6)
	require.Empty(t, heard(many(1, "default")), "it has no room for that queue")
	require.Equal(t, []string{"6 other"}, heard(many(1, "other")))

	waits(3, 1, "1 hour", "default")
	require.Empty(t, heard(func() {
		tx := enqBegin(t, db, pgx.ReadCommitted)
		enqOne(t, db, tx, onceq.Job{Kind: "k"})
		require.NoError(t, tx.Rollback(ctx))
	}), "rolled back")
	// While one transaction has woken a worker and is open, another one waits for nothing.
	waits(4, 1, "1 hour", "default")
	tx := enqBegin(t, db, pgx.ReadCommitted)
	enqOne(t, db, tx, onceq.Job{Kind: "k"})
	require.Len(t, heard(func() {
		many(2, "default")()
	}), 2)
	require.NoError(t, tx.Commit(ctx))
}

// After a failover to a standby that was not a physical replica, a sequence may have lost its latest values.
func TestTrap_EnqueueWithTheSequenceSetBack_AKeyTakenAgainGetsALargerID(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx := t.Context()
	owner := owner(t, db)
	keys := []string{"one", "many", "batch"}
	taken := make(map[string]int64)
	for range 50 {
		enqGet[int64](t, owner, `select nextval('ids')`)
	}
	for _, key := range keys {
		enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: key, Window: onceq.UntilFinished})
		taken[key] = enqFinish(t, db, nil)
	}
	enqExec(t, db.Pool, `update onceq.job_fences set token = token + 5`) // as if it had been claimed a few times more
	for i, key := range keys {
		enqExec(t, owner, `select setval('ids', 1)`)
		job := onceq.Job{Kind: "k", Key: key, Window: onceq.UntilFinished}
		var r onceq.Result
		switch i {
		case 0:
			r = enqOne(t, db, db.Pool, job)
		case 1:
			rs, err := db.Queue.EnqueueMany(ctx, db.Pool, []onceq.Job{{Kind: "k", Delay: time.Hour}, job, {Kind: "k", Delay: time.Hour}})
			require.NoError(t, err)
			r = rs[1]
		case 2:
			b := &pgx.Batch{}
			p, err := db.Queue.EnqueueInBatch(b, job)
			require.NoError(t, err)
			require.NoError(t, db.Pool.SendBatch(ctx, b).Close())
			r, err = p.Result(ctx, db.Pool)
			require.NoError(t, err)
		}
		require.False(t, r.Duplicate)
		require.Greater(t, r.ID, taken[key])
		l := enqClaim(t, db)
		require.Greater(t, l.Token>>20, taken[key])
		require.NoError(t, l.Complete(ctx, nil))
	}
}

func TestTrap_EnqueueWithTheSequenceSetBack_AnIDInUseIsANamedError(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx := t.Context()
	enqOne(t, db, db.Pool, onceq.Job{Kind: "k"})
	owner := owner(t, db)
	back := func() { enqExec(t, owner, `select setval('ids', 1, false)`) }
	for _, key := range []string{"", "a"} {
		back()
		_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: key})
		require.ErrorIs(t, err, onceq.ErrIDTaken)
		require.False(t, onceq.IsRetryable(err))
		back()
		_, err = db.Queue.EnqueueMany(ctx, db.Pool, []onceq.Job{{Kind: "k", Key: key}})
		require.ErrorIs(t, err, onceq.ErrIDTaken)
		back()
		b := &pgx.Batch{}
		_, err = db.Queue.EnqueueInBatch(b, onceq.Job{Kind: "k", Key: key})
		require.NoError(t, err)
		require.ErrorIs(t, db.Pool.SendBatch(ctx, b).Close(), onceq.ErrIDTaken)
	}
	require.Equal(t, 1, enqJobs(t, db.Pool))
	// The repair that ErrIDTaken names.
	enqExec(t, owner, `select setval('ids', greatest((select max(id) from jobs), (select max(id) from job_history),
		(select max(token >> 20) from job_fences)))`)
	enqOne(t, db, db.Pool, onceq.Job{Kind: "k"})
}

// Somebody sets the sequence back between two ids of one statement, as a sequence that begins again does here. Each job has the id
// that its caller is told.
func TestTrap_EnqueueManyWhileTheSequenceIsSetBack_EachJobHasTheIDThatItsCallerIsTold(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]func(i int) onceq.Job{
		"plain": func(i int) onceq.Job { return onceq.Job{Kind: "k"} },
		"keyed": func(i int) onceq.Job { return onceq.Job{Kind: "k", Key: fmt.Sprint(i)} },
		"mixed": func(i int) onceq.Job { return onceq.Job{Kind: fmt.Sprint("k", i), Key: strings.Repeat("a", i%2)} },
		"lanes": func(i int) onceq.Job { return onceq.Job{Kind: "k", Lane: fmt.Sprint(i)} },
		"taken": func(i int) onceq.Job {
			return onceq.Job{Kind: "k", Key: fmt.Sprint("free", i), Window: onceq.UntilFinished}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := enqNew(t)
			owner := owner(t, db)
			if name == "taken" { // and free again, by a second statement
				for i := range 4 {
					enqOne(t, db, db.Pool, of(i))
					enqFinish(t, db, nil)
				}
			}
			enqExec(t, owner, `alter sequence ids minvalue 1000 maxvalue 1009 start 1000 restart 1008 cycle`)
			jobs := make([]onceq.Job, 4)
			for i := range jobs {
				jobs[i] = of(i)
				jobs[i].Payload = i
			}
			results, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
			require.NoError(t, err)
			fell := false
			for i, r := range results {
				require.False(t, r.Duplicate)
				require.Equal(t, i, enqGet[int](t, owner, `
					select payload::int from (select id, payload from jobs union all select id, payload from job_waits) j where id = $1`, r.ID))
				fell = fell || i > 0 && r.ID < results[i-1].ID
			}
			require.True(t, fell, "the sequence was not set back between two ids")
			enqExec(t, owner, `alter sequence ids no minvalue no maxvalue no cycle; select setval('ids', 2000)`)
		})
	}
}

// The patterns of docs/use/patterns.md that concern enqueueing, written as a user of the library writes them. See
// patterns_test.go.

// docs/use/patterns.md, "A deterministic id at enqueueing" (seed 000).
func TestPattern_ADeterministicKeyMakesAResubmissionASilentNoOp(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	type contact struct{ ContactID, CampaignID string }
	outreach := onceq.Kind[contact]{
		Name: "outreach", Queue: "outreach",
		Key: func(c contact) string { return fmt.Sprintf("outreach:%s:%s", c.CampaignID, c.ContactID) },
	}
	first, err := db.Queue.Enqueue(t.Context(), db.Pool, outreach.Job(contact{"cid_123", "cmp_456"}))
	require.NoError(t, err)
	require.False(t, first.Duplicate)
	second, err := db.Queue.Enqueue(t.Context(), db.Pool, outreach.Job(contact{"cid_123", "cmp_456"}))
	require.NoError(t, err)
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, second)
	require.Equal(t, "outreach:cmp_456:cid_123", enqGet[string](t, db.Pool, `select key from onceq.jobs`))
}

// docs/use/patterns.md, "A batch with keys" (seed 000).
func TestPattern_InABatchEachJobHasItsKeyAndResubmissionIsANoOp(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	var jobs []onceq.Job
	for _, id := range []string{"cid_001", "cid_002", "cid_003"} {
		jobs = append(jobs, onceq.Job{Kind: "outreach", Key: "outreach:cmp_456:" + id, Payload: map[string]string{"contactId": id}})
	}
	first, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	require.Len(t, first, len(jobs))
	second, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	for i, r := range second {
		require.Equal(t, onceq.Result{ID: first[i].ID, Duplicate: true, State: onceq.StateWaiting}, r)
	}
	require.Equal(t, 3, enqJobs(t, db.Pool))
}

// docs/use/patterns.md, "A batch with keys" (seed 000).
func TestPattern_ABatchRefusesAKeyThatRepeats(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{{Kind: "k", Key: "a"}, {Kind: "k", Key: "b"}, {Kind: "k", Key: "a"}})
	require.ErrorContains(t, err, "jobs[0]")
	require.ErrorContains(t, err, "jobs[2]")
	require.Zero(t, enqJobs(t, db.Pool))
}

// docs/use/patterns.md, "Strict" (seed 000).
func TestPattern_AConflictOfAStrictJobCanBeTreatedAsSuccess(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	job := onceq.Job{Kind: "outreach", Key: "outreach:cmp_456:cid_123", Payload: map[string]string{"contactId": "cid_123"}, Strict: true}
	first, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
	require.NoError(t, err)
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, job)
	var conflict *onceq.DuplicateError
	require.ErrorAs(t, err, &conflict)
	require.Equal(t, first.ID, conflict.Existing.ID)
	require.Equal(t, onceq.StateWaiting, conflict.Existing.State)
}

// docs/use/patterns.md, "A client's Idempotency-Key" (seed 000).
func TestPattern_AScopeForEachWorkspaceKeepsKeysApart(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	type sent struct{ Workspace, Contact string }
	kind := onceq.Kind[sent]{
		Name: "outreach", Scope: func(s sent) string { return s.Workspace }, Key: func(s sent) string { return s.Contact },
	}
	for _, workspace := range []string{"w1", "w2"} {
		require.False(t, enqOne(t, db, db.Pool, kind.Job(sent{workspace, "cid_1"})).Duplicate)
		require.True(t, enqOne(t, db, db.Pool, kind.Job(sent{workspace, "cid_1"})).Duplicate)
	}
	require.Equal(t, 2, enqJobs(t, db.Pool))
}

// docs/use/patterns.md, "A client's Idempotency-Key" (seed 000).
func TestPattern_TheClientsIdempotencyKeyIsTheJobsKey(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	handle := func(idempotencyKey, body string) (onceq.Result, error) {
		return db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "outreach", Key: idempotencyKey, Payload: json.RawMessage(body)})
	}
	first, err := handle("8e03978e-40d5-43dd-bc93-6894a57f9324", `{"contactId": "cid_1"}`)
	require.NoError(t, err)
	retried, err := handle("8e03978e-40d5-43dd-bc93-6894a57f9324", `{"contactId":"cid_1"}`)
	require.NoError(t, err)
	require.Equal(t, first.ID, retried.ID)
	_, err = handle("8e03978e-40d5-43dd-bc93-6894a57f9324", `{"contactId":"cid_2"}`)
	require.ErrorIs(t, err, onceq.ErrMismatch)
	require.Equal(t, 1, enqJobs(t, db.Pool))
}

// docs/use/patterns.md, "A replay window" (seed 000).
func TestPattern_OneWelcomeMailForEachUserEver(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	job := onceq.Job{Kind: "welcome-email", Key: "welcome:42", Window: onceq.Forever, Payload: map[string]int{"userId": 42}}
	first := enqOne(t, db, db.Pool, job)
	enqFinish(t, db, map[string]bool{"sent": true})
	enqExpire(t, db)
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateCompleted, Output: json.RawMessage(`{"sent": true}`)}, enqOne(t, db, db.Pool, job))
}

// docs/use/patterns.md, "A replay window" (seed 000).
func TestPattern_AReplayWindowOf24Hours(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	job := onceq.Job{Kind: "k", Key: "a"}
	enqOne(t, db, db.Pool, job)
	enqFinish(t, db, nil)
	enqExec(t, db.Pool, `update onceq.job_fences set finished_at = now() - interval '23 hours 59 minutes'`)
	require.True(t, enqOne(t, db, db.Pool, job).Duplicate)
	enqExec(t, db.Pool, `update onceq.job_fences set finished_at = now() - interval '24 hours 1 second'`)
	require.False(t, enqOne(t, db, db.Pool, job).Duplicate)
}

// docs/use/patterns.md, "A deterministic id at enqueueing" (seed 001).
func TestPattern_AClientThatEnqueuesAgainAddsNoJob(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	enqExec(t, db.Pool, `create table users (id int primary key)`)
	signUp := func() onceq.Result {
		tx := enqBegin(t, db, pgx.ReadCommitted)
		enqExec(t, tx, `insert into users values (42) on conflict do nothing`)
		r := enqOne(t, db, tx, onceq.Job{Kind: "send-welcome-email", Key: "welcome-42", Payload: map[string]int{"userId": 42}})
		require.NoError(t, tx.Commit(t.Context()))
		return r
	}
	first := signUp()
	for range 5 {
		require.Equal(t, first.ID, signUp().ID)
	}
	require.Equal(t, 1, enqJobs(t, db.Pool))
}

// docs/use/patterns.md, "The job's id as a stable key, and a lock" (seed 001).
func TestPattern_TheJobsIDIsStableAcrossRetries(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	id := enqOne(t, db, db.Pool, onceq.Job{Kind: "report", Key: "report:7"}).ID
	for range 3 {
		l := enqClaim(t, db)
		require.Equal(t, id, l.ID)
		require.NoError(t, l.Fail(t.Context(), errors.New("no")))
		_, err := onceqops.New(db.Queue).Retry(t.Context(), db.Pool, id)
		require.NoError(t, err)
	}
	// Two jobs for the same report are two jobs.
	require.NotEqual(t, id, enqOne(t, db, db.Pool, onceq.Job{Kind: "report", Key: "report:8"}).ID)
}

// docs/use/patterns.md, "A deterministic id at enqueueing" (seed 002).
func TestPattern_EveryProducerGetsTheSameIDImmediateOrDelayed(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	for _, delays := range [][2]time.Duration{{0, 0}, {time.Hour, time.Hour}, {0, time.Hour}, {time.Hour, 0}} {
		key := fmt.Sprint("welcome:user:", delays)
		// Each producer has a pool and a Queue of its own, like two processes.
		var ids []int64
		for i, delay := range delays {
			pool, err := pgxpool.NewWithConfig(t.Context(), db.Pool.Config())
			require.NoError(t, err)
			q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema})
			require.NoError(t, err)
			r, err := q.EnqueueUnique(t.Context(), pool, onceq.Job{Kind: "welcome", Key: key, Delay: delay, Payload: map[string]int{"user": 42}})
			require.NoError(t, err)
			require.Equal(t, i == 1, r.Duplicate)
			ids = append(ids, r.ID)
			pool.Close()
		}
		require.Equal(t, ids[0], ids[1])
	}
	require.Equal(t, 4, enqJobs(t, db.Pool))
}

// docs/use/patterns.md, "A deterministic id at enqueueing" (seed 002).
func TestPattern_EnqueueUniqueRequiresAKeyAndRefusesABlankOne(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	for _, key := range []string{"", " ", "\t\r\n"} {
		_, err := db.Queue.EnqueueUnique(t.Context(), db.Pool, onceq.Job{Kind: "welcome", Key: key})
		var invalid *onceq.InvalidError
		require.ErrorAs(t, err, &invalid)
	}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "welcome"}) // the key is optional here
	require.NoError(t, err)
}

// docs/use/patterns.md, "A deterministic id at enqueueing" (seed 002).
func TestPattern_ADelayedJobRunsOnceAlsoWhenRetriedEarly(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	job := onceq.Job{Kind: "welcome", Key: "welcome:user:42", Delay: time.Hour}
	first := enqOne(t, db, db.Pool, job)
	_, err := onceqops.New(db.Queue).Retry(t.Context(), db.Pool, first.ID) // it becomes due at once
	require.NoError(t, err)
	require.Equal(t, first.ID, enqOne(t, db, db.Pool, job).ID)
	enqFinish(t, db, nil)
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateCompleted}, enqOne(t, db, db.Pool, job))
}

// docs/use/patterns.md, "A deterministic id at enqueueing" (seed 002).
func TestPattern_KeysOutliveAnyCacheOfRecentOnes(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	first := enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: "the first of many"})
	for n := range 4 {
		jobs := make([]onceq.Job, 5000)
		for i := range jobs {
			jobs[i] = onceq.Job{Kind: "k", Key: fmt.Sprintf("%d/%d", n, i)}
		}
		_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
		require.NoError(t, err)
	}
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: "the first of many"}))
}

// A batch takes over an expired key by itself, with every lifetime, as Enqueue does. It does not wait until it is asked for
// the answer.
func TestEnqueueInBatch_WindowsDecideWhenAKeyIsFreeAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name                string
		window              time.Duration
		finished, afterward bool
	}{
		{"until finished", onceq.UntilFinished, true, true},
		{"a duration", time.Minute, false, true},
		{"for ever", onceq.Forever, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := enqNew(t)
			accepts := func() bool {
				before := enqJobs(t, db.Pool)
				b := &pgx.Batch{}
				_, err := db.Queue.EnqueueInBatch(b, onceq.Job{Kind: "k", Key: "a", Window: c.window})
				require.NoError(t, err)
				require.NoError(t, db.Pool.SendBatch(t.Context(), b).Close())
				return enqJobs(t, db.Pool) > before
			}
			require.True(t, accepts())
			require.False(t, accepts(), "while it waits")
			first := enqFinish(t, db, nil)
			require.Equal(t, c.finished, accepts(), "when it is finished")
			if c.finished {
				second := enqFinish(t, db, nil)
				require.Greater(t, second, first)
			}
			enqExpire(t, db)
			require.Equal(t, c.afterward, accepts(), "after the window")
		})
	}
}

// A batch meets an old key just before the Reaper prunes it. The key is free, so the batch must accept the job.
func TestEnqueueInBatch_MeetsAReaper(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	job := onceq.Job{Kind: "k", Key: "a", Window: time.Minute}
	enqOne(t, db, db.Pool, job)
	enqFinish(t, db, nil)
	enqExpire(t, db)
	reaper := enqBegin(t, db, pgx.ReadCommitted)
	enqExec(t, reaper, `select from onceq.job_fences for update`)
	b := &pgx.Batch{}
	p, err := db.Queue.EnqueueInBatch(b, job)
	require.NoError(t, err)
	sent := make(chan error, 1)
	go func() { sent <- db.Pool.SendBatch(t.Context(), b).Close() }()
	enqBlocked(t, db, 1)
	enqExec(t, reaper, `delete from onceq.job_fences`)
	require.NoError(t, reaper.Commit(t.Context()))
	require.NoError(t, <-sent)
	require.Equal(t, 1, enqJobs(t, db.Pool))
	r, err := p.Result(t.Context(), db.Pool)
	require.NoError(t, err)
	require.False(t, r.Duplicate)
}
