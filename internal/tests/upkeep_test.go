package tests

import (
	"context"
	"errors"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

func TestCheck_SaysThatTheSequenceIsBehindTheIDsInUse(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	require.NoError(t, db.Queue.Check(t.Context()), "before the first job")
	for range 3 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k"})
		require.NoError(t, err)
	}
	require.NoError(t, db.Queue.Check(t.Context()))
	_, err := owner(t, db).Exec(t.Context(), `select setval('ids', 1)`)
	require.NoError(t, err)
	require.ErrorIs(t, db.Queue.Check(t.Context()), onceq.ErrIDTaken)
}

func TestCheck_RefusesADatabaseThatIsNotUTF8(t *testing.T) {
	t.Parallel()
	pool := upkeepDatabase(t, `encoding 'LATIN1' lc_collate 'C' lc_ctype 'C'`)
	q, err := onceq.New(pool, nil)
	require.NoError(t, err)
	require.ErrorContains(t, q.Check(t.Context()), "needs UTF8")
}

// upkeepDatabase returns a pool on a database of its own, made with options and migrated.
func upkeepDatabase(t *testing.T, options string) *pgxpool.Pool {
	t.Helper()
	db := queuetest.New(t, queuetest.NoMigrations())
	var name string
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select current_database() || '_other'`).Scan(&name))
	_, err := db.Pool.Exec(t.Context(), `create database `+name+` `+options+` template template0`)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := db.Pool.Exec(context.Background(), `drop database `+name+` with (force)`)
		require.NoError(t, err)
	})
	u, err := url.Parse(db.URL)
	require.NoError(t, err)
	u.Path = "/" + name
	pool, err := pgxpool.New(t.Context(), u.String())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error { return migrations.Up(t.Context(), c.Conn(), "onceq") }))
	return pool
}

// upkeepEvents collects the types of events.
type upkeepEvents struct {
	mu   sync.Mutex
	seen []onceq.EventType
}

func (e *upkeepEvents) Event(_ context.Context, event onceq.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seen = append(e.seen, event.Type)
}

func (e *upkeepEvents) count(t onceq.EventType) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, seen := range e.seen {
		if seen == t {
			n++
		}
	}
	return n
}

// A crash leaves nobody who could report the claim. Whoever takes it over reports it.
func TestEvents_ATakenOverClaimIsReportedUncertain(t *testing.T) {
	t.Parallel()
	var events upkeepEvents
	db := queuetest.New(t, queuetest.Config(onceq.Config{Hook: &events}))
	spec := onceq.FenceSpec{Key: "k"}
	f, err := db.Queue.Fence(spec)
	require.NoError(t, err)
	_, err = f.Claim(t.Context(), nil)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.job_fences set leased_until = leased_until - interval '1 hour'`)
	require.NoError(t, err)
	require.Zero(t, events.count(onceq.EventUncertain))
	_, err = onceq.Do(t.Context(), db.Queue, spec, func(context.Context, *onceq.FenceLease) (int, error) { return 1, nil })
	require.NoError(t, err)
	require.Equal(t, 1, events.count(onceq.EventUncertain))
}

// Once it has lost an effect's fence, a run no longer decides about it: it neither marks it uncertain nor sends that event.
func TestOnce_AnErrorAfterATakeOverIsALostLease(t *testing.T) {
	t.Parallel()
	var events upkeepEvents
	db := queuetest.New(t, queuetest.Config(onceq.Config{Hook: &events}))
	broken := errors.New("time-out")
	_, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "k"}, func(context.Context, *onceq.FenceLease) (int, error) {
		_, err := db.Pool.Exec(t.Context(), `update onceq.job_fences set token = token + 1, holder = 0`)
		require.NoError(t, err)
		return 0, broken
	})
	require.ErrorIs(t, err, onceq.ErrLeaseLost)
	require.ErrorIs(t, err, broken)
	require.Zero(t, events.count(onceq.EventUncertain))
}

func TestExtend_ReportsALostLease(t *testing.T) {
	t.Parallel()
	var events upkeepEvents
	db := queuetest.New(t, queuetest.Config(onceq.Config{Hook: &events}))
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k"})
	require.NoError(t, err)
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
	require.NoError(t, err)
	db.ExpireLease(leases[0].ID)
	_, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
	require.NoError(t, err)
	require.ErrorIs(t, leases[0].Extend(t.Context(), time.Minute), onceq.ErrLeaseLost)
	require.Equal(t, 1, events.count(onceq.EventLeaseLost))
}

// A job that finds another run's effect in flight costs a claim each time it asks. So it asks less often than a request
// does.
func TestOnce_InFlightWaitsLongerThanARequest(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k"})
	require.NoError(t, err)
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
	require.NoError(t, err)
	_, err = onceq.Once(t.Context(), leases[0], "charge", func(ctx context.Context, _ string) (int, error) {
		db.ExpireLease(leases[0].ID)
		second, err := db.Queue.Claim(ctx, onceq.ClaimOptions{})
		require.NoError(t, err)
		_, err = onceq.Once(ctx, second[0], "charge", func(context.Context, string) (int, error) { return 0, nil })
		var busy *onceq.InFlightError
		require.ErrorAs(t, err, &busy)
		require.Greater(t, busy.RetryAfter, 10*time.Second)
		require.Less(t, busy.RetryAfter, 20*time.Second)
		return 1, nil
	})
	require.NoError(t, err)
}

// ⚠ With arrays of few elements Postgres makes a new plan for each call, and planning takes longer than running.
func TestTrap_HotStatementsKeepTheirPlans(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"), queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
	}))
	for range 10 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k"})
		require.NoError(t, err)
		leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
		require.NoError(t, err)
		require.NoError(t, leases[0].Release(t.Context()))
	}
	var statements, custom int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `
		select count(*), sum(custom_plans) from pg_prepared_statements
		 where statement like '%.jobs%' and (statement like '%for update skip locked%' or statement like '%ready as (%')
		   and statement not like '%pg_prepared_statements%' and statement not like '%lane_calls%'`).Scan(&statements, &custom))
	require.Equal(t, 2, statements, "the claim and the release")
	require.Zero(t, custom)
}
