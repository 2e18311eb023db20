package onceq_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqsql"
	"github.com/onceq/onceq/queuetest"
)

// Handles as applications make them around a pool or a transaction, for tracing mostly. What they have beside Exec and
// Query is all that onceq knows of them.
type (
	wrapped     struct{ onceq.DB }
	withPool    struct{ *pgxpool.Pool }
	withTx      struct{ pgx.Tx }
	withBatches struct {
		wrapped
		batches
	}
	withBegin struct {
		wrapped
		begins
	}
	withBeginTx struct {
		wrapped
		beginsTx
	}
	withAll struct {
		wrapped
		batches
		begins
		beginsTx
	}
	batches interface {
		SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
	}
	begins interface {
		Begin(context.Context) (pgx.Tx, error)
	}
	beginsTx interface {
		BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error)
	}
)

const planSpy = `
create table public.plans (what text, seqscan text, hashjoin text, jit text);
grant all on public.plans to public;
create function public.plan_spy() returns trigger language plpgsql as $$
begin
  insert into public.plans values (tg_table_name, current_setting('enable_seqscan'), current_setting('enable_hashjoin'), current_setting('jit'));
  return null;
end $$;`

// changing are calls that change rows of the tables, one after the other.
func changing(t *testing.T, db *queuetest.DB, handle onceq.DB) {
	t.Helper()
	ctx, q := t.Context(), db.Queue
	r, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "key"})
	require.NoError(t, err)
	_, err = conformance.Owner(t, db).Exec(ctx, `delete from public.plans`) // what Enqueue did
	require.NoError(t, err)
	state, err := q.Cancel(ctx, handle, r.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateCancelled, state)
	state, err = q.Redrive(ctx, handle, r.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateWaiting, state)
	_, err = q.Cancel(ctx, handle, r.ID)
	require.NoError(t, err)
	require.NoError(t, q.Discard(ctx, handle, r.ID))
	f, err := q.Fence(onceq.FenceSpec{Key: "fence"})
	require.NoError(t, err)
	c, err := f.Claim(ctx, handle)
	require.NoError(t, err)
	require.NoError(t, c.Complete(ctx, handle, 1))
	again, err := f.Claim(ctx, handle)
	require.NoError(t, err)
	require.True(t, again.Replayed)
}

// However a pool is wrapped: what onceq sends through it is planned as on the pool, for tables of any size.
func TestTrap_AWrappedPoolKeepsThePlannerGuards(t *testing.T) {
	t.Parallel()
	for name, wrap := range map[string]func(*testing.T, *pgxpool.Pool) onceq.DB{
		"pool":         func(_ *testing.T, p *pgxpool.Pool) onceq.DB { return p },
		"embedded":     func(_ *testing.T, p *pgxpool.Pool) onceq.DB { return withPool{p} },
		"with all":     func(_ *testing.T, p *pgxpool.Pool) onceq.DB { return withAll{wrapped{p}, p, p, p} },
		"with BeginTx": func(_ *testing.T, p *pgxpool.Pool) onceq.DB { return withBeginTx{wrapped{p}, p} },
		"with Begin":   func(_ *testing.T, p *pgxpool.Pool) onceq.DB { return withBegin{wrapped{p}, p} },
		"with batches": func(_ *testing.T, p *pgxpool.Pool) onceq.DB { return withBatches{wrapped{p}, p} },
		"database/sql": func(t *testing.T, p *pgxpool.Pool) onceq.DB {
			db := stdlib.OpenDBFromPool(p)
			t.Cleanup(func() { require.NoError(t, db.Close()) })
			return onceqsql.DB(db)
		},
		"connection": func(t *testing.T, p *pgxpool.Pool) onceq.DB {
			conn, err := p.Acquire(t.Context())
			require.NoError(t, err)
			t.Cleanup(conn.Release)
			return conn
		},
		"raw connection": func(t *testing.T, p *pgxpool.Pool) onceq.DB {
			conn, err := p.Acquire(t.Context())
			require.NoError(t, err)
			t.Cleanup(conn.Release)
			return conn.Conn()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			conn := conformance.Owner(t, db)
			_, err := conn.Exec(t.Context(), planSpy)
			require.NoError(t, err)
			for _, table := range []string{"jobs", "job_fences", "job_history"} {
				_, err := conn.Exec(t.Context(), `create trigger spy after insert or update or delete on `+pgx.Identifier{db.Schema, table}.Sanitize()+` for each row execute function public.plan_spy()`)
				require.NoError(t, err)
			}
			changing(t, db, wrap(t, db.Pool))
			rows, err := conn.Query(t.Context(), `select distinct concat_ws(' ', what, seqscan, hashjoin, jit) from public.plans order by 1`)
			require.NoError(t, err)
			got, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			require.Equal(t, []string{"job_fences off off off", "job_history off off off", "jobs off off off"}, got)
		})
	}
}

// However a transaction is wrapped: onceq's statements are part of it, it stays open, and its settings stay its own.
func TestTrap_AWrappedTransactionStaysTheCallers(t *testing.T) {
	t.Parallel()
	for name, wrap := range map[string]func(pgx.Tx) onceq.DB{
		"transaction":  func(tx pgx.Tx) onceq.DB { return tx },
		"embedded":     func(tx pgx.Tx) onceq.DB { return withTx{tx} },
		"with Begin":   func(tx pgx.Tx) onceq.DB { return withBegin{wrapped{tx}, tx} },
		"with batches": func(tx pgx.Tx) onceq.DB { return withBatches{wrapped{tx}, tx} },
		"with nothing": func(tx pgx.Tx) onceq.DB { return wrapped{tx} },
		"connection":   func(tx pgx.Tx) onceq.DB { return tx.Conn() },
		"wrapped connection": func(tx pgx.Tx) onceq.DB {
			return struct{ *pgx.Conn }{tx.Conn()}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx := t.Context()
			const settings = `select concat_ws(' ', current_setting('enable_seqscan'), current_setting('enable_hashjoin'), current_setting('enable_mergejoin'),
				current_setting('enable_bitmapscan'), current_setting('jit'), current_setting('plan_cache_mode'), current_setting('statement_timeout'), pg_current_xact_id())`
			r, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "key"})
			require.NoError(t, err)
			tx, err := db.Pool.Begin(ctx)
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(ctx) }()
			_, err = tx.Exec(ctx, `set local statement_timeout = '29min'; set local enable_hashjoin = off`)
			require.NoError(t, err)
			var before, after string
			require.NoError(t, tx.QueryRow(ctx, settings).Scan(&before))
			handle := wrap(tx)
			state, err := db.Queue.Cancel(ctx, handle, r.ID)
			require.NoError(t, err)
			require.Equal(t, onceq.StateCancelled, state)
			f, err := db.Queue.Fence(onceq.FenceSpec{Key: "fence"})
			require.NoError(t, err)
			_, err = f.Claim(ctx, handle)
			require.NoError(t, err)
			_, err = f.Claim(ctx, handle)
			require.ErrorIs(t, err, onceq.ErrInFlight)
			info, err := db.Queue.Get(ctx, handle, r.ID)
			require.NoError(t, err)
			require.Equal(t, onceq.StateCancelled, info.State)
			_, err = db.Queue.List(ctx, handle, onceq.Filter{})
			require.NoError(t, err)
			require.NoError(t, tx.QueryRow(ctx, settings).Scan(&after))
			require.Equal(t, before, after)
			require.NoError(t, tx.Rollback(ctx))
			info, err = db.Queue.Get(ctx, db.Pool, r.ID)
			require.NoError(t, err)
			require.Equal(t, onceq.StateWaiting, info.State)
			_, err = f.Claim(ctx, nil)
			require.NoError(t, err)
		})
	}
}

// sentTracer keeps what goes to the server: each round trip's statements.
type sentTracer struct {
	mu   sync.Mutex
	sent [][]string
}

func (s *sentTracer) add(one []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, one)
}

func (s *sentTracer) take() [][]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	sent := s.sent
	s.sent = nil
	return sent
}

func (s *sentTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	s.add([]string{d.SQL})
	return ctx
}
func (*sentTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (s *sentTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	var one []string
	for _, query := range d.Batch.QueuedQueries {
		one = append(one, query.SQL)
	}
	s.add(one)
	return ctx
}
func (*sentTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*sentTracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// What stands around the statements that run for every job, byte for byte, and how many round trips each is.
func TestStatement_WhatIsSentForEveryJob(t *testing.T) {
	t.Parallel()
	const begin, commit = `begin isolation level read committed read write`, `commit`
	const hot = `
select statement_timestamp(), set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
       set_config('enable_mergejoin', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true), set_config('statement_timeout', '0', true), set_config('lock_timeout', '0', true),
       case when current_setting('transaction_timeout', true) <> '0' then set_config('transaction_timeout', '0', true) end`
	own := func(statement string) [][]string { return [][]string{{begin, hot, statement, commit}} }
	tracer := new(sentTracer)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer }))
	ctx, q := t.Context(), db.Queue
	named := func(statement string) string {
		return strings.NewReplacer("'onceq.", "'"+pgx.Identifier{db.Schema}.Sanitize()+".", "onceq.", pgx.Identifier{db.Schema}.Sanitize()+".").Replace(statement)
	}
	if db.Schema == "onceq" {
		named = func(statement string) string { return statement }
	}
	_, err := q.Claim(ctx, onceq.ClaimOptions{}) // reads the installation's id once
	require.NoError(t, err)
	tracer.take()

	_, err = q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k"})
	require.NoError(t, err)
	sent := tracer.take()
	require.Len(t, sent, 1)
	require.Len(t, sent[0], 1)
	require.Contains(t, sent[0][0], "insert into")
	for i := range 3 {
		_, err = q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: fmt.Sprint(i)})
		require.NoError(t, err)
	}
	require.Len(t, tracer.take(), 3)

	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 10})
	require.NoError(t, err)
	require.Len(t, leases, 4)
	require.Equal(t, own(named(onceq.HotStatements["claim any"])), tracer.take())
	require.NoError(t, leases[0].Complete(ctx, nil))
	require.Equal(t, [][]string{{named(onceq.UserStatements["complete unkeyed"])}}, tracer.take())
	require.NoError(t, leases[1].Complete(ctx, nil))
	require.Equal(t, [][]string{{named(onceq.UserStatements["complete one"])}}, tracer.take())
	require.NoError(t, leases[2].Extend(ctx, time.Minute))
	require.Equal(t, own(named(onceq.HotStatements["extend"])), tracer.take())
	require.NoError(t, leases[2].Snooze(ctx, 0))
	require.Equal(t, own(named(onceq.HotStatements["retry"])), tracer.take())
	require.NoError(t, leases[3].Fail(ctx, onceq.Fatal(context.Canceled)))
	require.Equal(t, own(named(onceq.HotStatements["end"])), tracer.take())

	// A worker: its claim, and what its batch of outcomes is.
	kind := onceq.Kind[any]{Name: "k"}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, kind.Handle(func(context.Context, *onceq.Lease, any) error { return nil }))
	require.NoError(t, err)
	require.NoError(t, w.Drain(ctx, 1))
	sent = tracer.take()
	for _, name := range []string{"claim", "complete"} {
		want := own(named(onceq.HotStatements[name]))[0]
		require.True(t, slices.ContainsFunc(sent, func(one []string) bool { return slices.Equal(one, want) }), "%s: %q", name, sent)
	}
}
