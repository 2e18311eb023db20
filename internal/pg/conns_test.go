package pg_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/internal/leaks"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/queuetest"
)

// Each test that has a database fails if it leaves a goroutine behind.
func init() { leaks.On.Store(true) }

// spareOf returns the spare connection of the workers over a pool, as a pool.
func spareOf(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	own, err := pg.Connect(t.Context(), pool)
	require.NoError(t, err)
	t.Cleanup(func() { own.Disconnect(true) })
	return own.Spare()
}

// Each run of queuetest begins with connections that live. One that somebody had at that moment was left out,
// and the run met it.
func TestKeep_ClosesADeadConnectionThatSomebodyHas(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	keep := func() {
		release, err := pg.Keep(t.Context(), db.Pool)
		require.NoError(t, err)
		t.Cleanup(release)
	}
	keep()
	spare := spareOf(t, db.Pool)
	held, err := spare.Acquire(t.Context())
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `select pg_terminate_backend($1, 10000)`, held.Conn().PgConn().PID())
	require.NoError(t, err)
	time.AfterFunc(100*time.Millisecond, held.Release)
	for began := time.Now(); ; began = time.Now() {
		if keep(); time.Since(began) < 900*time.Millisecond { // else it may have given up, within a second, while this process stood still
			break
		}
	}
	_, err = spare.Exec(t.Context(), `select 1`)
	require.NoError(t, err)
}

// silent is a connection on which nothing is heard any more once its other end has vanished, and whose end
// nobody is told.
type silent struct {
	net.Conn
	gone *atomic.Bool
}

func (s silent) Write(b []byte) (int, error) {
	if s.gone.Load() {
		return len(b), nil
	}
	return s.Conn.Write(b)
}

func (s silent) Read(b []byte) (n int, err error) {
	for {
		if n, err = s.Conn.Read(b); err != nil || !s.gone.Load() {
			return n, err
		}
	}
}

// One of the worker's own connections that has gone silent under a statement makes room for another one, and
// the server is told to end the statement. The room was taken for 15 s more, which a beat cannot wait for.
func TestConnections_ASilentOneMakesRoom(t *testing.T) {
	t.Parallel()
	var gone atomic.Pointer[atomic.Bool] // of the connections that are made now
	gone.Store(new(atomic.Bool))
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return silent{conn, gone.Load()}, nil
		}
	}))
	release, err := pg.Keep(t.Context(), db.Pool)
	require.NoError(t, err)
	t.Cleanup(release)
	spare := spareOf(t, db.Pool)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := spare.Exec(ctx, `select pg_sleep(3600)`)
		failed <- err
	}()
	owner := conformance.Owner(t, db)
	const sleeps = `exists (select from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep')`
	conformance.Becomes(t, owner, `select `+sleeps)
	gone.Swap(new(atomic.Bool)).Store(true)
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err = spare.Exec(soon, `select 1`)
	require.NoError(t, err)
	conformance.Becomes(t, owner, `select not `+sleeps)
}

// A claim or a beat gets whichever of the worker's own connections is free first. One waited for the
// connections for outcomes alone, because the spare one was in use at that moment, and ended neither with the
// shutdown nor for as long as a lease.
func TestTrap_AStatementWaitsForWhicheverConnectionIsFreeFirst(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	pool := func(conns int32) *pgxpool.Pool {
		cfg, err := pgxpool.ParseConfig(db.URL)
		require.NoError(t, err)
		cfg.MaxConns = conns
		p, err := pgxpool.NewWithConfig(t.Context(), cfg)
		require.NoError(t, err)
		t.Cleanup(p.Close)
		return p
	}
	spare, outcomes := pool(1), pool(2)
	take := func(p *pgxpool.Pool) *pgxpool.Conn {
		conn, err := p.Acquire(t.Context())
		require.NoError(t, err)
		return conn
	}
	for _, first := range []*pgxpool.Pool{spare, outcomes} {
		held := []*pgxpool.Conn{take(spare), take(outcomes), take(outcomes)}
		type got struct {
			conn *pgxpool.Conn
			err  error
		}
		free := make(chan got, 1)
		go func() {
			conn, err := pg.FreeConn(t.Context(), spare, outcomes, 5*time.Millisecond)
			free <- got{conn, err}
		}()
		select {
		case <-free:
			t.Fatal("all are held")
		case <-time.After(50 * time.Millisecond):
		}
		if first == spare {
			held[0].Release()
			held = held[1:]
		} else {
			held[2].Release()
			held = held[:2]
		}
		select {
		case g := <-free:
			require.NoError(t, g.err)
			g.conn.Release()
		case <-time.After(5 * time.Minute):
			t.Fatal("it waits for the other ones")
		}
		for _, conn := range held {
			conn.Release()
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, conn := range []*pgxpool.Conn{take(spare), take(outcomes), take(outcomes)} {
		defer conn.Release()
	}
	_, err := pg.FreeConn(ended, spare, outcomes, time.Hour)
	require.ErrorIs(t, err, context.Canceled)
}
