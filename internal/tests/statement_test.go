package tests

import (
	"context"
	"database/sql"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/onceqsql"
	"github.com/onceq/onceq/queuetest"
)

// These are handles that applications make around a pool or a transaction, mostly for tracing.
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

type txKey struct{}

// following is a pool whose statements, but not its batches, are sent in the transaction that the context carries.
type following struct{ *pgxpool.Pool }

func (p following) at(ctx context.Context) onceq.DB {
	if tx, ok := ctx.Value(txKey{}).(pgx.Tx); ok {
		return tx
	}
	return p.Pool
}

func (p following) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return p.at(ctx).Query(ctx, sql, args...)
}

func (p following) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return p.at(ctx).Exec(ctx, sql, args...)
}

// followingBatches is a pool whose batches are sent there too.
type followingBatches struct{ following }

func (p followingBatches) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return p.at(ctx).(batches).SendBatch(ctx, b)
}

// followingBegin is a pool without batches, whose BeginTx opens a savepoint in the transaction.
type followingBegin struct {
	wrapped
	pool *pgxpool.Pool
}

func (p followingBegin) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	if tx, ok := ctx.Value(txKey{}).(pgx.Tx); ok {
		return tx.Begin(ctx)
	}
	return p.pool.BeginTx(ctx, options)
}

// poolHandles are the ways to wrap a pool.
var poolHandles = map[string]func(*pgxpool.Pool) onceq.DB{
	"embedded":                   func(p *pgxpool.Pool) onceq.DB { return withPool{p} },
	"with all":                   func(p *pgxpool.Pool) onceq.DB { return withAll{wrapped{p}, p, p, p} },
	"with BeginTx":               func(p *pgxpool.Pool) onceq.DB { return withBeginTx{wrapped{p}, p} },
	"following":                  func(p *pgxpool.Pool) onceq.DB { return following{p} },
	"following with batches":     func(p *pgxpool.Pool) onceq.DB { return followingBatches{following{p}} },
	"following with a savepoint": func(p *pgxpool.Pool) onceq.DB { return followingBegin{wrapped{following{p}}, p} },
}

// txHandles are the ways to wrap a transaction. Handles that follow the context find the transaction there.
var txHandles = map[string]func(*pgxpool.Pool, pgx.Tx) onceq.DB{
	"transaction":                func(_ *pgxpool.Pool, tx pgx.Tx) onceq.DB { return tx },
	"embedded":                   func(_ *pgxpool.Pool, tx pgx.Tx) onceq.DB { return withTx{tx} },
	"with Begin":                 func(_ *pgxpool.Pool, tx pgx.Tx) onceq.DB { return withBegin{wrapped{tx}, tx} },
	"with batches":               func(_ *pgxpool.Pool, tx pgx.Tx) onceq.DB { return withBatches{wrapped{tx}, tx} },
	"with nothing":               func(_ *pgxpool.Pool, tx pgx.Tx) onceq.DB { return wrapped{tx} },
	"connection":                 func(_ *pgxpool.Pool, tx pgx.Tx) onceq.DB { return tx.Conn() },
	"wrapped connection":         func(_ *pgxpool.Pool, tx pgx.Tx) onceq.DB { return struct{ *pgx.Conn }{tx.Conn()} },
	"following":                  func(p *pgxpool.Pool, _ pgx.Tx) onceq.DB { return poolHandles["following"](p) },
	"following with batches":     func(p *pgxpool.Pool, _ pgx.Tx) onceq.DB { return poolHandles["following with batches"](p) },
	"following with a savepoint": func(p *pgxpool.Pool, _ pgx.Tx) onceq.DB { return poolHandles["following with a savepoint"](p) },
}

// begun opens a transaction of the caller's. The returned context carries it.
func begun(t *testing.T, db *queuetest.DB, options pgx.TxOptions) (context.Context, pgx.Tx) {
	t.Helper()
	tx, err := db.Pool.BeginTx(t.Context(), options)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return context.WithValue(t.Context(), txKey{}, tx), tx
}

// messages notes what is sent: a single statement, or a whole batch.
type messages struct {
	mu   sync.Mutex
	sent []string
}

func (m *messages) add(sql string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sent = append(m.sent, sql)
}

func (m *messages) take() (sent []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	sent, m.sent = m.sent, nil
	return sent
}

func (m *messages) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	m.add(d.SQL)
	return ctx
}
func (*messages) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (m *messages) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	var all []string
	for _, query := range d.Batch.QueuedQueries {
		all = append(all, query.SQL)
	}
	m.add(strings.Join(all, ";"))
	return ctx
}
func (*messages) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*messages) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

const planSpy = `
create table public.plans (what text, seqscan text, hashjoin text, jit text, query text);
grant all on public.plans to public;
create function public.plan_spy() returns trigger language plpgsql as $$
begin
  insert into public.plans values (tg_table_name, current_setting('enable_seqscan'), current_setting('enable_hashjoin'), current_setting('jit'), current_query());
  return null;
end $$;`

// changing makes the calls that change rows of the tables, one after the other.
func changing(t *testing.T, db *queuetest.DB, handle onceq.DB) {
	t.Helper()
	ctx, q := t.Context(), db.Queue
	r, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "key"})
	require.NoError(t, err)
	_, err = conformance.Owner(t, db).Exec(ctx, `delete from public.plans`) // Enqueue noted its plans too
	require.NoError(t, err)
	state, err := q.Cancel(ctx, handle, r.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateCancelled, state)
	state, err = onceqops.New(q).Redrive(ctx, handle, r.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateWaiting, state)
	_, err = q.Cancel(ctx, handle, r.ID)
	require.NoError(t, err)
	require.NoError(t, onceqops.New(q).Discard(ctx, handle, r.ID))
	f, err := q.Fence(onceq.FenceSpec{Key: "fence"})
	require.NoError(t, err)
	c, err := f.Claim(ctx, handle)
	require.NoError(t, err)
	require.NoError(t, c.Complete(ctx, handle, 1))
	again, err := f.Claim(ctx, handle)
	require.NoError(t, err)
	require.True(t, again.Replayed)
}

// On pgx's own handles, onceq's statements are planned for tables of any size. On every other handle they are sent as they
// are: onceq does not begin, commit or set anything there. A function of the schema, as cancel, has settings of its own on any handle.
func TestTrap_OnlyPgxsOwnHandlesGetThePlannerGuards(t *testing.T) {
	t.Parallel()
	type handle struct {
		guarded bool
		make    func(*testing.T, *pgxpool.Pool) onceq.DB
	}
	handles := map[string]handle{
		"pool": {true, func(_ *testing.T, p *pgxpool.Pool) onceq.DB { return p }},
		"connection": {true, func(t *testing.T, p *pgxpool.Pool) onceq.DB {
			conn, err := p.Acquire(t.Context())
			require.NoError(t, err)
			t.Cleanup(conn.Release)
			return conn
		}},
		"raw connection": {true, func(t *testing.T, p *pgxpool.Pool) onceq.DB {
			conn, err := p.Acquire(t.Context())
			require.NoError(t, err)
			t.Cleanup(conn.Release)
			return conn.Conn()
		}},
		"database/sql": {false, func(t *testing.T, p *pgxpool.Pool) onceq.DB { return onceqsql.DB(openSQL(t, p)) }},
		"a connection of database/sql": {false, func(t *testing.T, p *pgxpool.Pool) onceq.DB {
			conn, err := openSQL(t, p).Conn(t.Context())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, conn.Close()) })
			return onceqsql.Conn(conn)
		}},
	}
	for name, wrap := range poolHandles {
		handles[name] = handle{false, func(_ *testing.T, p *pgxpool.Pool) onceq.DB { return wrap(p) }}
	}
	for name, handle := range handles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 2)
			tracer := new(messages)
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer }))
			conn := conformance.Owner(t, db)
			_, err := conn.Exec(t.Context(), planSpy)
			require.NoError(t, err)
			for _, table := range []string{"jobs", "job_fences", "job_history"} {
				_, err := conn.Exec(t.Context(), `create trigger spy after insert or update or delete on `+pgx.Identifier{db.Schema, table}.Sanitize()+` for each row execute function public.plan_spy()`)
				require.NoError(t, err)
			}
			handled := handle.make(t, db.Pool)
			_, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{}) // reads the installation's id, once
			require.NoError(t, err)
			tracer.take()
			changing(t, db, handled)
			for _, message := range tracer.take() {
				if (strings.Contains(message, "insert into") || strings.Contains(message, ".enqueue_")) && !strings.Contains(message, "set_config") && handle.guarded {
					continue // that is Enqueue
				}
				require.Equal(t, handle.guarded, strings.Contains(message, "set_config"), message)
				require.Equal(t, handle.guarded, strings.HasPrefix(message, "begin") && strings.HasSuffix(message, "commit"), message)
			}
			rows, err := conn.Query(t.Context(), `select distinct what from public.plans where (seqscan, hashjoin, jit) = ('off', 'off', 'off') and query not like '%.cancel(%' order by 1`)
			require.NoError(t, err)
			got, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			if handle.guarded {
				require.Equal(t, []string{"job_fences", "job_history", "jobs"}, got)
			} else {
				require.Empty(t, got)
			}
		})
	}
}

func openSQL(t *testing.T, p *pgxpool.Pool) *sql.DB {
	db := stdlib.OpenDBFromPool(p)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return db
}

// However a transaction is wrapped or found, onceq's statements are part of it, it stays open, and it keeps its own
// settings.
func TestTrap_AWrappedTransactionStaysTheCallers(t *testing.T) {
	t.Parallel()
	for name, wrap := range txHandles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 2)
			db := queuetest.New(t)
			const settings = `select concat_ws(' ', current_setting('enable_seqscan'), current_setting('enable_hashjoin'), current_setting('enable_mergejoin'),
				current_setting('enable_bitmapscan'), current_setting('jit'), current_setting('plan_cache_mode'), current_setting('statement_timeout'),
				current_setting('lock_timeout'), pg_current_xact_id())`
			r, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Key: "key"})
			require.NoError(t, err)
			held, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "held"})
			require.NoError(t, err)
			leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Kinds: []string{"held"}})
			require.NoError(t, err)
			require.Len(t, leases, 1)
			ctx, tx := begun(t, db, pgx.TxOptions{})
			_, err = tx.Exec(ctx, `set local statement_timeout = '29min'; set local enable_hashjoin = off`)
			require.NoError(t, err)
			var before, after string
			require.NoError(t, tx.QueryRow(ctx, settings).Scan(&before))
			handle := wrap(db.Pool, tx)
			require.NoError(t, leases[0].Lock(ctx, handle))
			state, err := db.Queue.Cancel(ctx, handle, r.ID)
			require.NoError(t, err)
			require.Equal(t, onceq.StateCancelled, state)
			f, err := db.Queue.Fence(onceq.FenceSpec{Key: "fence"})
			require.NoError(t, err)
			claimed, err := f.Claim(ctx, handle)
			require.NoError(t, err)
			_, err = f.Claim(ctx, handle)
			require.ErrorIs(t, err, onceq.ErrInFlight)
			require.NoError(t, claimed.Complete(ctx, handle, 1))
			info, err := db.Queue.Get(ctx, handle, r.ID)
			require.NoError(t, err)
			require.Equal(t, onceq.StateCancelled, info.State)
			_, err = onceqops.New(db.Queue).List(ctx, handle, onceqops.Filter{})
			require.NoError(t, err)
			_, err = db.Queue.EnqueueMany(ctx, handle, []onceq.Job{{Kind: "many", Key: "a"}, {Kind: "many", Key: "b"}})
			require.NoError(t, err)
			require.NoError(t, leases[0].Complete(ctx, handle))
			require.NoError(t, tx.QueryRow(ctx, settings).Scan(&after))
			require.Equal(t, before, after)
			require.NoError(t, tx.Rollback(ctx))
			info, err = db.Queue.Get(t.Context(), db.Pool, r.ID)
			require.NoError(t, err)
			require.Equal(t, onceq.StateWaiting, info.State)
			info, err = db.Queue.Get(t.Context(), db.Pool, held.ID)
			require.NoError(t, err)
			require.Equal(t, onceq.StateRunning, info.State)
			many, err := onceqops.New(db.Queue).List(t.Context(), db.Pool, onceqops.Filter{Kind: "many"})
			require.NoError(t, err)
			require.Empty(t, many)
			again, err := f.Claim(t.Context(), nil)
			require.NoError(t, err)
			require.False(t, again.Replayed)
		})
	}
}

// However a transaction is wrapped or found, what a stale holder wrote in it is not committed.
func TestTrap_AStaleHolderAbortsAWrappedTransaction(t *testing.T) {
	t.Parallel()
	for name, wrap := range txHandles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 2)
			db := queuetest.New(t)
			_, err := conformance.Owner(t, db).Exec(t.Context(), `create table public.app (i int); grant all on public.app to public`)
			require.NoError(t, err)
			f, err := db.Queue.Fence(onceq.FenceSpec{Key: "a"})
			require.NoError(t, err)
			stale, err := f.Claim(t.Context(), nil)
			require.NoError(t, err)
			db.Advance(time.Hour)
			_, err = f.Claim(t.Context(), nil) // another holder took it over
			require.NoError(t, err)
			ctx, tx := begun(t, db, pgx.TxOptions{})
			_, err = tx.Exec(ctx, `insert into public.app values (1)`)
			require.NoError(t, err)
			require.ErrorIs(t, stale.Complete(ctx, wrap(db.Pool, tx), 1), onceq.ErrLeaseLost)
			require.Error(t, tx.Commit(ctx))
			require.Zero(t, sqlOne[int](t, db, `select count(*) from public.app`))
		})
	}
}

// onceq sends only a transaction of its own again. When Postgres refuses a completion in the caller's transaction, that
// transaction has failed.
func TestTrap_ACompletionInAWrappedTransactionIsNotSentAgain(t *testing.T) {
	t.Parallel()
	for name, wrap := range txHandles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 2)
			db := queuetest.New(t)
			_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Key: "a"})
			require.NoError(t, err)
			leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
			require.NoError(t, err)
			require.Len(t, leases, 1)
			ctx, tx := begun(t, db, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
			_, err = tx.Exec(ctx, `select from pg_class limit 1`) // takes the snapshot
			require.NoError(t, err)
			require.NoError(t, leases[0].Extend(t.Context(), time.Hour))
			err = leases[0].Complete(ctx, wrap(db.Pool, tx))
			require.True(t, onceq.IsRetryable(err), err)
			require.Error(t, tx.Commit(ctx))
			jobs, err := onceqops.New(db.Queue).List(t.Context(), db.Pool, onceqops.Filter{})
			require.NoError(t, err)
			require.Len(t, jobs, 1)
		})
	}
}

// Outside a transaction, EnqueueMany is all or nothing through a wrapped pool too, and Lock is refused.
func TestTrap_AWrappedPoolIsAskedWhetherItIsInATransaction(t *testing.T) {
	t.Parallel()
	for name, wrap := range poolHandles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx, handle := t.Context(), wrap(db.Pool)
			_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "a", Payload: 1})
			require.NoError(t, err)
			_, err = db.Queue.EnqueueMany(ctx, handle, []onceq.Job{{Kind: "k", Key: "a", Payload: 2}, {Kind: "k", Key: "b"}})
			require.ErrorIs(t, err, onceq.ErrMismatch)
			leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 2})
			require.NoError(t, err)
			require.Len(t, leases, 1)
			var invalid *onceq.InvalidError
			require.ErrorAs(t, leases[0].Lock(ctx, handle), &invalid)
		})
	}
}

// A job that waits for others is refused, before anything is written, where its statements would commit one by one: it would
// go on before they are known. In a transaction, and where one can be opened, any handle will do.
func TestTrap_AJobThatWaitsForOthersNeedsATransaction(t *testing.T) {
	t.Parallel()
	run := func(t *testing.T, handle func(db *queuetest.DB) (context.Context, onceq.DB), check func(error)) {
		t.Helper()
		db := queuetest.New(t)
		q, bg := db.Queue, t.Context()
		then := whole.Job("then")
		g, err := q.EnqueueGroup(bg, db.Pool, []onceq.Job{part.Job(1)}, then)
		require.NoError(t, err)
		l := laneClaimOne(t, q, g.Members[0].ID)
		ctx, h := handle(db)
		after := whole.Job("after")
		after.After = []onceq.JobRef{{ID: l.ID}}
		_, err = q.Enqueue(ctx, h, after)
		check(err)
		_, err = q.EnqueueMany(ctx, h, []onceq.Job{after, after})
		check(err)
		_, err = q.EnqueueGroup(ctx, h, []onceq.Job{part.Job(1), part.Job(2)}, then)
		check(err)
		_, err = l.AddMembers(ctx, h, part.Job(3))
		check(err)
		if tx, ok := ctx.Value(txKey{}).(pgx.Tx); ok {
			require.NoError(t, tx.Rollback(bg))
		} else if err == nil {
			return
		}
		live, waiting := laneLive(t, db)
		require.Equal(t, []int{1, 1}, []int{live, waiting}, "nothing else was written")
	}
	for name, wrap := range txHandles {
		t.Run("in a transaction: "+name, func(t *testing.T) {
			t.Parallel()
			run(t, func(db *queuetest.DB) (context.Context, onceq.DB) {
				ctx, tx := begun(t, db, pgx.TxOptions{})
				return ctx, wrap(db.Pool, tx)
			}, func(err error) { require.NoError(t, err) })
		})
	}
	for name, wrap := range poolHandles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, func(db *queuetest.DB) (context.Context, onceq.DB) { return t.Context(), wrap(db.Pool) }, func(err error) { require.NoError(t, err) })
		})
	}
	t.Run("without BeginTx", func(t *testing.T) {
		t.Parallel()
		run(t, func(db *queuetest.DB) (context.Context, onceq.DB) { return t.Context(), wrapped{db.Pool} }, func(err error) {
			var bad *onceq.InvalidError
			require.ErrorAs(t, err, &bad)
			require.Equal(t, "db", bad.Field)
			require.Contains(t, bad.Reason, "is in no transaction and has no BeginTx")
		})
	})
}

// The statement that locks a batch's jobs has the planner guards. The handler's own statements are planned as usual.
func TestTrap_AHandlersTransactionKeepsItsPlans(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	const plans = `select concat_ws(' ', current_setting('enable_seqscan'), current_setting('enable_hashjoin'), current_setting('enable_mergejoin'),
		current_setting('enable_bitmapscan'), current_setting('jit'))`
	before := sqlOne[string](t, db, plans)
	kind := onceq.Kind[int]{Name: "k"}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{kind.Job(1), kind.Job(2)})
	require.NoError(t, err)
	var batches []int
	var inside string
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, kind.HandleBatch(2, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) error {
		batches = append(batches, len(jobs))
		return tx.QueryRow(ctx, plans).Scan(&inside)
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 2))
	require.Equal(t, []int{2}, batches)
	require.Equal(t, before, inside)
}
