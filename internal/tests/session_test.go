package tests

import (
	"bytes"
	"context"
	"net"
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
	"github.com/onceq/onceq/queuetest"
)

// Two serializable transactions that only enqueue, and wake the same worker, conflict in nothing.
func TestWake_SerializableProducersDoNotConflict(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, `insert into onceq.waiter_queues (queue, serves) values ('default', 1)`)
	sqlRun(t, db, `insert into onceq.waiters (worker, serves, round, room, idle_until) values (1, 1, 1, 100, now() + interval '1 hour')`)
	serializable := func() pgx.Tx {
		tx, err := db.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
		require.NoError(t, err)
		t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
		return tx
	}
	first, second := serializable(), serializable()
	for _, tx := range []pgx.Tx{first, second} {
		_, err := db.Queue.Enqueue(t.Context(), tx, onceq.Job{Kind: "k"})
		require.NoError(t, err)
	}
	require.NoError(t, first.Commit(t.Context()))
	require.NoError(t, second.Commit(t.Context()))
}

// The application's connections that are idle take a while to be ready, if the database is far away. An effect does not
// break them because of that.
func TestConnections_EffectsBreakNoneOfThePool(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	cfg := db.Pool.Config()
	cfg.MaxConns = 8
	acquires := &acquires{}
	cfg.ConnConfig.Tracer = acquires
	var late atomic.Int32 // the machine stood still for longer than an effect waits
	var pool *pgxpool.Pool
	cfg.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
		_, err := conn.Exec(ctx, `select pg_sleep(0.03)`)
		if a := acquires.of(ctx); err != nil && a.pool == pool && time.Since(a.began) > 900*time.Millisecond {
			late.Add(1)
		}
		return err == nil, nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	const jobs = 5
	addMany(t, db, jobs, onceq.Job{})
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, handle(func(ctx context.Context, l *onceq.Lease) error {
		_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 1, nil })
		return err
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	eventually(t, "no connection that is still being opened", func() bool { return pool.Stat().ConstructingConns() == 0 })
	require.EqualValues(t, pool.Stat().NewConnsCount()-int64(late.Load()), pool.Stat().TotalConns())
}

// acquires tells whoever has the context of an Acquire of which pool it is, and when it began.
type acquires struct{}

type acquiring struct {
	pool  *pgxpool.Pool
	began time.Time
}

func (*acquires) of(ctx context.Context) acquiring { return ctx.Value(acquires{}).(acquiring) }

func (*acquires) TraceAcquireStart(ctx context.Context, pool *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	return context.WithValue(ctx, acquires{}, acquiring{pool, time.Now()})
}

func (*acquires) TraceAcquireEnd(context.Context, *pgxpool.Pool, pgxpool.TraceAcquireEndData) {}

func (*acquires) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (*acquires) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// behindPgBouncer gives a database through PgBouncer. afterConnect, if it is not nil, prepares each connection.
func behindPgBouncer(t *testing.T, db *queuetest.DB, afterConnect func(context.Context, *pgx.Conn) error) *queuetest.DB {
	t.Helper()
	cfg := db.Pool.Config()
	cfg.ConnConfig.Host, cfg.ConnConfig.Port, cfg.ConnConfig.Fallbacks = "127.0.0.1", pgbouncer(t, db), nil
	cfg.ConnConfig.TLSConfig = nil
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	if afterConnect != nil {
		cfg.AfterConnect = afterConnect
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	behind := *db
	behind.Pool = pool
	return &behind
}

// A statement of the worker that somebody's lock blocks does not keep leases from being extended, behind a pooler either,
// where there is no session.
func TestBeats_ABlockedStatementOfTheWorkerDoesNotBlockThem(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	behind := behindPgBouncer(t, db, nil)
	id := add(t, db, onceq.Job{})
	running, end := make(chan bool, 10), make(chan bool)
	w := start(t, behind, onceq.WorkerConfig{Lease: steady}, handle(func(ctx context.Context, l *onceq.Lease) error {
		running <- true
		select {
		case <-end:
		case <-ctx.Done():
		}
		return ctx.Err()
	}))
	receive(t, running)
	tx := begin(t, db)
	_, err := tx.Exec(t.Context(), `lock table onceq.queues in share mode`)
	require.NoError(t, err)
	eventually(t, "a blocked statement", func() bool {
		return sqlOne[bool](t, db, `select exists (select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database())`)
	})
	at := sqlOne[time.Time](t, db, `select leased_until from onceq.jobs where id = $1`, id)
	until(t, db, `(select leased_until <= statement_timestamp() or leased_until > $2::timestamptz + interval '20 seconds' from onceq.jobs where id = $1)`, id, at)
	require.True(t, sqlOne[bool](t, db, `select leased_until > $2::timestamptz + interval '20 seconds' from onceq.jobs where id = $1`, id, at), w.logged())
	require.NoError(t, tx.Rollback(t.Context()))
	close(end)
	until(t, db, noJobs)
}

// Behind a pooler a connection gets notifications of channels to which others have listened there before. They do not make it
// a session: its settings would be anybody's, and claims would go without them.
func TestSession_ANotificationOfOthersConfirmsNone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	behind := behindPgBouncer(t, db, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "listen others; notify others") // one message: the notification comes with its answer
		return err
	})
	w := start(t, behind, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	eventually(t, "that it does not listen", func() bool { return strings.Contains(w.logged(), "not listening for new jobs") })
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.waiters`))
}

// through gives a database over a way on which forward has each piece of what is sent passed on, or not, or a part of it. The
// connections are counted from 1 on, in made.
func through(t testing.TB, db *queuetest.DB, name string, made *atomic.Int64, forward func(n int64, piece []byte, pass func([]byte))) *queuetest.DB {
	to := db.Pool.Config().ConnConfig
	proxy, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = proxy.Close() })
	go func() {
		for {
			client, err := proxy.Accept()
			if err != nil {
				return
			}
			network, address := pgconn.NetworkAddress(to.Host, to.Port)
			server, err := net.Dial(network, address)
			if err != nil {
				_ = client.Close()
				return
			}
			n := made.Add(1)
			pass := func(to, from net.Conn) {
				defer to.Close()
				b := make([]byte, 1<<16)
				for {
					size, err := from.Read(b)
					if err != nil {
						return
					}
					forward(n, b[:size], func(piece []byte) { _, _ = to.Write(piece) })
				}
			}
			go pass(client, server)
			go pass(server, client)
		}
	}()
	cfg := db.Pool.Config()
	addr := proxy.Addr().(*net.TCPAddr)
	cfg.ConnConfig.Host, cfg.ConnConfig.Port, cfg.ConnConfig.Fallbacks = "127.0.0.1", uint16(addr.Port), nil
	cfg.ConnConfig.TLSConfig = nil
	cfg.ConnConfig.RuntimeParams["application_name"] = name
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	behind := *db
	behind.Pool = pool
	return &behind
}

// goingSilent gives a database over a way on which all connections that are open fall silent when silence is called: what is sent
// vanishes, and nobody is told.
func goingSilent(t testing.TB, db *queuetest.DB) (behind *queuetest.DB, silence func()) {
	var made, dead atomic.Int64
	behind = through(t, db, "silent "+db.Pool.Config().ConnConfig.Database, &made, func(n int64, piece []byte, pass func([]byte)) {
		if n > dead.Load() {
			pass(piece)
		}
	})
	return behind, func() { dead.Store(made.Load()) }
}

// A connection whose other end has vanished without a word does not keep the session from being opened again.
func TestSession_OpensAgainBesideAConnectionThatIsDead(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	var made, dead atomic.Int64 // connections that were made, and the last one that is dead
	name := "dead " + db.Pool.Config().ConnConfig.Database
	behind := through(t, db, name, &made, func(n int64, piece []byte, pass func([]byte)) {
		if n > dead.Load() {
			pass(piece)
		}
	})
	start(t, behind, onceq.WorkerConfig{PollInterval: time.Hour}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	const waits = `exists (select from onceq.waiters where idle_until > statement_timestamp() and round > $1)`
	until(t, db, waits, 0)
	time.Sleep(2 * time.Second) // after a second a pool asks an idle connection whether it is alive
	round := sqlOne[int](t, db, `select max(round) from onceq.waiters`)
	dead.Store(made.Load())
	sqlRun(t, db, `select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1 and query not like '%pg_notify%' and query <> 'commit'`, name)
	until(t, db, waits, round)
}

// A statement that somebody's lock blocks holds the session. Meanwhile jobs are found and claimed through another
// connection, and a worker that joins is listened for as soon as the session is free.
func TestSession_ABlockedStatementHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := make(chan int64, 10)
	handler := handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.ID
		return nil
	})
	start(t, db, onceq.WorkerConfig{}, handler)
	const waits = `$1 = (select count(*) from onceq.waiters w where idle_until > statement_timestamp()
		and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`
	until(t, db, waits, 1)
	other := owner(t, db)
	tx, err := other.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `lock table waiters in share mode`)
	require.NoError(t, err)
	require.Equal(t, add(t, db, onceq.Job{}), receive(t, ran))
	// The next announcement, of which the server shows the first kilobyte.
	const blocked = `exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like '%near as materialized%')`
	until(t, db, blocked)
	id := add(t, db, onceq.Job{})
	require.Equal(t, id, receive(t, ran))
	require.True(t, sqlOne[bool](t, db, `select `+blocked))
	start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, handler)
	until(t, db, `(select count(*) = 2 and min(now() - started_at) > interval '3 seconds' from onceq.workers)`)
	require.NoError(t, tx.Rollback(t.Context()))
	until(t, db, waits, 2)
}

// A connection dies in the middle of a message that locks all lanes. The server has done nothing of it, in those of pgx's modes in
// which messages have the text of statements and of values, so nobody waits until it notices.
func TestSession_AMessageThatArrivesInPartLocksNothing(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			var made atomic.Int64
			var once sync.Once
			cut := make(chan struct{})
			behind := through(t, db, "cut "+db.Pool.Config().ConnConfig.Database, &made, func(_ int64, piece []byte, pass func([]byte)) {
				lock := bytes.Index(piece, []byte(".settle_limits("))
				if next := bytes.LastIndex(piece, []byte("commit")); lock >= 0 && next > lock {
					pass(piece[:next])
					once.Do(func() { close(cut) })
					return
				}
				pass(piece)
			})
			config := behind.Pool.Config()
			config.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			behind.Pool = pool
			start(t, behind, onceq.WorkerConfig{}, charges.Handle(func(context.Context, *onceq.Lease, charge) error { return nil }))
			for _, n := range []int{2, 1} { // where a limit was lowered, somebody looks whether that many are live
				require.NoError(t, db.Queue.SetLaneLimit(t.Context(), db.Pool, charges.Name, "", n))
			}
			receive(t, cut)
			time.Sleep(time.Second) // the server has what it gets
			require.Equal(t, 16, sqlOne[int](t, db, `select count(*) from (select from onceq.lane_locks for update skip locked) l`))
		})
	}
}

// Neither the database's settings nor the pool's keep a worker in mode exec from using the simple protocol.
func TestSession_WholeMessagesWhateverTheSettings(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	cfg := db.Pool.Config()
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	cfg.ConnConfig.RuntimeParams["standard_conforming_strings"] = "off"
	cfg.ConnConfig.RuntimeParams["client_encoding"] = "LATIN1"
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	behind := *db
	behind.Pool = pool
	add(t, db, onceq.Job{})
	w := start(t, &behind, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// A claim whose connection has gone silent does not keep a worker with a long lease from claiming through another one, also where
// it was for a job in quarantine.
func TestSession_ASilentClaimDoesNotLastForALease(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		claims string
		lost   int
	}{
		"first run":  {claimsJobs, 0},
		"quarantine": {"unnest($3::bigint[]) with ordinality as u(id, n)", 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var silence atomic.Pointer[func()]
			db := queuetest.New(t, queuetest.PoolConfig(func(cfg *pgxpool.Config) {
				cfg.ConnConfig.Tracer = &statementHook{before: func(sql string) {
					if f := silence.Load(); f != nil && strings.Contains(sql, c.claims) && silence.CompareAndSwap(f, nil) {
						(*f)()
					}
				}}
			}))
			behind, f := goingSilent(t, db)
			w := start(t, behind, onceq.WorkerConfig{Lease: time.Hour}, handle(func(context.Context, *onceq.Lease) error { return nil }))
			until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
			silence.Store(&f)
			r, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1, Delay: time.Hour})
			require.NoError(t, err)
			sqlRun(t, db, `update onceq.jobs set run_at = now(), claims = $2::int, lost = $2::int where id = $1`, r.ID, c.lost)
			eventually(t, "a claim", func() bool { return silence.Load() == nil })
			until(t, db, noJobs)
			require.NoError(t, w.stop())
		})
	}
}
