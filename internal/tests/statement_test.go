package tests

import (
	"context"
	"testing"

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
