package onceqcron_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/queuetest"
)

// deadlines counts the statements that read a schedule for its tick, and those of them that must end at some time.
type deadlines struct{ all, some atomic.Int64 }

func (d *deadlines) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, "schedules where name = $1") && strings.Contains(q.SQL, "for update") {
		d.all.Add(1)
		if _, ok := ctx.Deadline(); ok {
			d.some.Add(1)
		}
	}
	return ctx
}
func (d *deadlines) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A tick that has very many to fire may take as long as it needs.
func TestTick_HasNoTimeLimit(t *testing.T) {
	t.Parallel()
	d := new(deadlines)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = d }))
	s := scheduler(t, db, onceqcron.Config{}, nightly())
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "nightly", now(t, db).Add(-time.Second))
	d.all.Store(0)
	d.some.Store(0)
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	require.Len(t, fired(t, db), 1)
	require.EqualValues(t, 1, d.all.Load())
	require.Zero(t, d.some.Load())
}

// prunes keeps the statement that moves a schedule and prunes its ledger, with its values.
type prunes struct {
	query atomic.Pointer[pgx.QueuedQuery]
}

func (p *prunes) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (p *prunes) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (p *prunes) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	for _, q := range d.Batch.QueuedQueries {
		if strings.Contains(q.SQL, "delete from") && strings.Contains(q.SQL, "schedule_ticks") {
			p.query.Store(q)
		}
	}
	return ctx
}
func (p *prunes) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (p *prunes) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// A tick reads the lines of the ledger that it prunes, and not those that it keeps.
func TestTick_PrunesWithoutReadingTheLedger(t *testing.T) {
	t.Parallel()
	p := new(prunes)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = p }))
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "n", Spec: "@every 1h", Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	_, err := db.Pool.Exec(t.Context(), `
		insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome, done_at)
		select 'n', at, at, 1, 'fired', at from (select statement_timestamp() - g * interval '1 minute' as at from generate_series(1, 20000) g) x`)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `analyze onceq.schedule_ticks`)
	require.NoError(t, err)
	overdue(t, db, "n", now(t, db).Add(-time.Second))
	db.RunOne(s.Handlers()...)
	query := p.query.Load()
	require.NotNil(t, query)

	_, err = db.Pool.Exec(t.Context(), `
		insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome, done_at)
		select 'n', at, at, 1, 'fired', at from (select statement_timestamp() - interval '91 days' - g * interval '1 minute' as at from generate_series(1, 5) g) x`)
	require.NoError(t, err)
	conn, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
		const reads = `select seq_tup_read + idx_tup_fetch, n_tup_del from pg_stat_xact_user_tables where relid = 'onceq.schedule_ticks'::regclass`
		var before, read, deletedBefore, deleted int
		require.NoError(t, tx.QueryRow(t.Context(), reads).Scan(&before, &deletedBefore))
		_, err := tx.Exec(t.Context(), query.SQL, query.Arguments...)
		require.NoError(t, err)
		require.NoError(t, tx.QueryRow(t.Context(), reads).Scan(&read, &deleted))
		require.Equal(t, 5, deleted-deletedBefore)
		require.Less(t, read-before, 100)
		return nil
	}))
}
