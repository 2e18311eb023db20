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
