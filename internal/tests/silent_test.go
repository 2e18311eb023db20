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

// All handlers of a worker wait in their transactions for answers over connections that the network swallows, and the connections of the
// pool that are idle are lost, too. The worker goes on over new ones, however long a handler may take.
func TestSilent_HandlersTransactions(t *testing.T) {
	t.Parallel()
	for name, busy := range map[string]bool{"all are busy": true, "all are idle": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			behind, silence := goingSilent(t, db)
			q, err := onceq.New(behind.Pool, &onceq.Config{Schema: db.Schema, Logger: slog.New(slog.DiscardHandler)})
			require.NoError(t, err)
			n := int(behind.Pool.Config().MaxConns)
			var silent atomic.Bool
			began := make(chan bool, n)
			kind := onceq.Kind[int]{Name: "k", Timeout: onceq.NoTimeout}
			worker, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: time.Hour, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: n}}},
				kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
					for first := true; ; first = false {
						if _, err := tx.Exec(ctx, `select pg_sleep(0.1)`); err != nil {
							return err
						}
						if silent.Load() {
							return nil
						}
						if first {
							began <- true
						}
					}
				}))
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error, 1)
			go func() { ended <- worker.Run(ctx) }()
			until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
			if busy {
				addMany(t, db, n, onceq.Job{})
				for range n {
					<-began
				}
			} else {
				var all []*pgxpool.Conn
				for range n {
					all = append(all, must[*pgxpool.Conn](t)(behind.Pool.Acquire(t.Context())))
				}
				for _, c := range all {
					c.Release()
				}
				time.Sleep(1100 * time.Millisecond) // the pool asks those that were idle for longer than a second
			}
			silence()
			silent.Store(true)
			addMany(t, db, n, onceq.Job{})
			until(t, db, noJobs)
			cancel()
			require.NoError(t, receive(t, ended))
		})
	}
}

// A handler's statement that takes long keeps its connection, and so does one for which the handler still sends rows.
func TestSilent_AHandlersTransactionThatTakesLongIsLeftAlone(t *testing.T) {
	t.Parallel()
	long(t, "it waits until the server was asked twice about a connection: eight seconds")
	asked := make(chan struct{}, 100)
	db := queuetest.New(t, queuetest.PoolConfig(func(cfg *pgxpool.Config) {
		cfg.ConnConfig.Tracer = &statementHook{after: func(sql string) {
			if strings.Contains(sql, asksWhoWorks) {
				asked <- struct{}{}
			}
		}}
	}))
	may := owner(t, db)
	_, err := may.Exec(t.Context(), `create table public.locked (); create table public.copied (n int); grant all on public.locked, public.copied to public`)
	require.NoError(t, err)
	lock, err := may.Begin(t.Context())
	require.NoError(t, err)
	_, err = lock.Exec(t.Context(), `lock table public.locked`)
	require.NoError(t, err)
	more := make(chan bool)
	w := start(t, db, onceq.WorkerConfig{},
		handleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease) error {
			_, err := tx.Exec(ctx, `select from public.locked`)
			return err
		}),
		onceq.Kind[int]{Name: "copies"}.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"public", "copied"}, []string{"n"}, pgx.CopyFromFunc(func() ([]any, error) {
				if <-more {
					return []any{1}, nil
				}
				return nil, nil
			}))
			return err
		}))
	add(t, db, onceq.Job{})
	add(t, db, onceq.Job{Kind: "copies"})
	more <- true
	receive(t, asked)
	receive(t, asked)
	more <- true
	close(more)
	require.NoError(t, lock.Rollback(t.Context()))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Equal(t, 2, w.count(onceq.EventCompleted))
	require.Zero(t, w.count(onceq.EventFailed))
	require.NotContains(t, w.logged(), "without a word")
}

// Work outside of jobs keeps its lease over a new connection.
func TestSilent_DoKeepsItsLease(t *testing.T) {
	t.Parallel()
	long(t, "an extension is given five seconds")
	db := queuetest.New(t)
	behind, silence := goingSilent(t, db)
	q, err := onceq.New(behind.Pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	n, err := onceq.Do(t.Context(), q, onceq.FenceSpec{Key: "one", Lease: 45 * time.Second}, func(ctx context.Context, _ *onceq.FenceLease) (int, error) {
		const until = `select leased_until from onceq.job_fences where key = 'one'`
		first := sqlOne[time.Time](t, db, until)
		silence()
		eventually(t, "an extension", func() bool { return ctx.Err() != nil || sqlOne[time.Time](t, db, until).After(first) })
		return 1, ctx.Err()
	})
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

// A Reaper goes on over a new connection.
func TestSilent_AReaperGoesOn(t *testing.T) {
	t.Parallel()
	long(t, "a statement of the Reaper is given half a minute")
	db := queuetest.New(t)
	behind, silence := goingSilent(t, db)
	q, err := onceq.New(behind.Pool, &onceq.Config{Schema: db.Schema, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	require.NoError(t, behind.Pool.Ping(t.Context()))
	silence()
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{Every: 100 * time.Millisecond})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- reaper.Run(ctx) }()
	sqlRun(t, db, `insert into onceq.waiters (worker, serves, round, room, idle_until) values (2, 2, 1, 1, now() - interval '1 day')`)
	until(t, db, `not exists (select from onceq.waiters)`)
	cancel()
	require.NoError(t, receive(t, ended))
}
