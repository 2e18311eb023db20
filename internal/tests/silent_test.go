package tests

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

const asksWhoWorks = "wait_event_type is distinct from 'Client'" // is in what asks about a connection without an answer

// The network swallows all connections of a process, and new ones work. The worker finds that out, whatever the deadline of its
// context and whatever its handlers need, and says so.
func TestSilent_AWorkerGoesOnOverNewConnections(t *testing.T) {
	t.Parallel()
	ran := make(chan int64, 10)
	plain := handle(func(_ context.Context, l *onceq.Lease) error { ran <- l.ID; return nil })
	inTx := handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
		_, err := tx.Exec(ctx, `select 1`)
		ran <- l.ID
		return err
	})
	for name, c := range map[string]struct {
		deadline time.Duration
		handler  onceq.Handler
	}{
		"no deadline": {0, plain},
		"a deadline":  {time.Hour, plain},
		"transaction": {time.Hour, inTx},
	} {
		t.Run(name, func(t *testing.T) {
			db := queuetest.New(t)
			behind, silence := goingSilent(t, db)
			w := &working{t: t, db: behind}
			q, err := onceq.New(behind.Pool, &onceq.Config{Schema: db.Schema, Logger: slog.New(slog.NewTextHandler(w, nil)), Hook: w})
			require.NoError(t, err)
			worker, err := onceq.NewWorker(q, onceq.WorkerConfig{}, c.handler)
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(context.Background())
			if c.deadline > 0 {
				ctx, cancel = context.WithTimeout(context.Background(), c.deadline)
			}
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- worker.Run(ctx) }()
			const waits = `exists (select from onceq.waiters where idle_until > statement_timestamp())`
			until(t, db, waits)
			require.NoError(t, behind.Pool.Ping(t.Context())) // the application has a connection too
			silence()
			require.Equal(t, add(t, db, onceq.Job{}), receive(t, ran))
			until(t, db, noJobs)
			require.Contains(t, w.logged(), "the network between them has lost it without a word")
			cancel()
			require.NoError(t, receive(t, ended))
		})
	}
}

// The same in the middle of a Drain, which goes on, too.
func TestSilent_ADrainGoesOn(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	behind, silence := goingSilent(t, db)
	q, err := onceq.New(behind.Pool, &onceq.Config{Schema: db.Schema, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	var calls atomic.Int32
	worker, err := onceq.NewWorker(q, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error {
		if calls.Add(1) == 1 {
			silence()
			until(t, db, `not exists (select from pg_stat_activity where datname = current_database() and state = 'active' and pid <> pg_backend_pid())`)
			add(t, db, onceq.Job{}) // no claim whose answer is lost has it
		}
		return nil
	}))
	require.NoError(t, err)
	add(t, db, onceq.Job{})
	require.NoError(t, worker.Drain(t.Context(), 2))
	require.EqualValues(t, 2, calls.Load())
	until(t, db, noJobs)
}

// A statement that takes long, because somebody has locked the table, keeps its connection: the server is asked about it, again and
// again, and works.
func TestSilent_AStatementThatTakesLongIsLeftAlone(t *testing.T) {
	t.Parallel()
	asked := make(chan struct{}, 100)
	db := queuetest.New(t, queuetest.PoolConfig(func(cfg *pgxpool.Config) {
		cfg.ConnConfig.Tracer = &statementHook{after: func(sql string) {
			if strings.Contains(sql, asksWhoWorks) {
				asked <- struct{}{}
			}
		}}
	}))
	ran := make(chan int64, 1)
	w := start(t, db, onceq.WorkerConfig{}, handle(func(_ context.Context, l *onceq.Lease) error { ran <- l.ID; return nil }))
	until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
	lock, err := owner(t, db).Begin(t.Context())
	require.NoError(t, err)
	_, err = lock.Exec(t.Context(), `lock table onceq.jobs in access exclusive mode`)
	require.NoError(t, err)
	const blocked = `select array_agg(pid order by pid) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`
	receive(t, asked)
	before := sqlOne[[]int32](t, db, blocked)
	require.NotEmpty(t, before)
	receive(t, asked) // the first one had no consequences
	require.Subset(t, sqlOne[[]int32](t, db, blocked), before)
	require.NoError(t, lock.Rollback(t.Context()))
	require.Equal(t, add(t, db, onceq.Job{}), receive(t, ran))
	require.NotContains(t, w.logged(), "without a word")
}
