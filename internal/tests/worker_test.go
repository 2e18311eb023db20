package tests

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/bridge"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

// working is a worker that runs, and what it reported.
type working struct {
	t      testing.TB
	db     *queuetest.DB
	q      *onceq.Queue
	cancel context.CancelFunc
	ended  chan error

	mu     sync.Mutex
	events []onceq.Event
	log    bytes.Buffer
}

func (w *working) Event(_ context.Context, e onceq.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
}

func (w *working) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(p)
}

func (w *working) logged() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.String()
}

func (w *working) count(e onceq.EventType) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, seen := range w.events {
		if seen.Type == e {
			n++
		}
	}
	return n
}

// start runs a worker until stop is called or the test ends.
func start(t testing.TB, db *queuetest.DB, cfg onceq.WorkerConfig, handlers ...onceq.Handler) *working {
	t.Helper()
	w := &working{t: t, db: db, ended: make(chan error, 1)}
	q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema, Version: "v1.4.2", Hook: w, Logger: slog.New(slog.NewTextHandler(w, nil))})
	require.NoError(t, err)
	bridge.Alone(q)
	w.q = q
	worker, err := onceq.NewWorker(q, cfg, handlers...)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	go func() { w.ended <- worker.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case <-w.ended:
		case <-time.After(patience):
			t.Error("the worker does not stop")
		}
		if t.Failed() {
			t.Log(w.logged())
		}
	})
	return w
}

// stop ends the worker and returns what Run returned.
func (w *working) stop() error {
	w.cancel()
	err := <-w.ended
	w.ended <- err
	return err
}

// patience is how long a test waits for what must happen, however slow the machine is.
const patience = 5 * time.Minute

// steady is a lease that beats extend in time even on a machine that stands still for seconds.
const steady = 10 * time.Second

// long leaves a test out of make test, which runs with -short. why says what it takes.
func long(t testing.TB, why string) {
	t.Helper()
	if testing.Short() {
		t.Skip("make check runs it: " + why)
	}
}

// until waits for a condition in the database.
func until(t testing.TB, db *queuetest.DB, condition string, args ...any) {
	t.Helper()
	eventually(t, condition, func() bool { return sqlOne[bool](t, db, "select "+condition, args...) })
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(patience)
	for pause := time.Millisecond; !ok(); pause = min(2*pause, 40*time.Millisecond) { // the other tests need the machine too
		select {
		case <-time.After(pause):
		case <-deadline:
			t.Fatalf("waited in vain for: %s", what)
		}
	}
}

func receive[T any](t testing.TB, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		t.Fatal("waited in vain")
		panic("unreachable")
	}
}

const noJobs = `not exists (select from onceq.jobs)`

var work = onceq.Kind[int]{Name: "k"}

// retriedLater is work that runs again an hour after it failed: never within the test, however slow the machine is.
var retriedLater = onceq.Kind[int]{Name: "k", Backoff: func(int, error) time.Duration { return time.Hour }}

func handle(fn func(context.Context, *onceq.Lease) error) onceq.Handler {
	return work.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error { return fn(ctx, l) })
}

func handleTx(fn func(context.Context, pgx.Tx, *onceq.Lease) error) onceq.Handler {
	return work.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error { return fn(ctx, tx, l) })
}

func TestHandleTx_WritesAndCompletionCommitTogether(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, `create table effects (job bigint)`)
	write := func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
		_, err := tx.Exec(ctx, `insert into effects values ($1)`, l.ID)
		return err
	}
	for name, c := range map[string]struct {
		handler func(context.Context, pgx.Tx, *onceq.Lease) error
		state   onceq.State
		effects int
		says    string
	}{
		"completes": {write, onceq.StateCompleted, 1, ""},
		"reschedules": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			return errors.Join(write(ctx, tx, l), onceq.Reschedule(time.Hour))
		}, onceq.StateDelayed, 1, "run again"},
		"snoozes": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			return errors.Join(write(ctx, tx, l), onceq.Snooze(time.Hour))
		}, onceq.StateDelayed, 0, "snoozed"},
		"fails": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			return errors.Join(write(ctx, tx, l), errors.New("bad day"))
		}, onceq.StateRetrying, 0, "bad day"},
		"panics": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			panic("bad day")
		}, onceq.StateRetrying, 0, "worker_test.go"},
		"panics in the middle of rows": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			_, _ = tx.Query(ctx, `select generate_series(1, 100000)`)
			panic("bad day")
		}, onceq.StateRetrying, 0, "bad day"},
		"swallows an error of a statement": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			_, _ = tx.Exec(ctx, `select 1/0`)
			return nil
		}, onceq.StateRetrying, 0, "returned no error"},
		"ends the transaction by a statement": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			_, err := tx.Exec(ctx, `rollback`)
			return err
		}, onceq.StateRetrying, 0, "rolled the worker's transaction back"},
		"fatal around a reschedule": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			return onceq.Fatal(onceq.Reschedule(time.Hour))
		}, onceq.StateDead, 0, "run again in"},
		"panics with a reschedule": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			panic(onceq.Reschedule(time.Hour))
		}, onceq.StateRetrying, 0, "panic"},
		"loses its connection": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			var pid int
			_ = tx.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid)
			_, _ = db.Pool.Exec(ctx, `select pg_terminate_backend($1, 10000)`, pid)
			_, _ = tx.Exec(ctx, `select 1`)
			return nil
		}, onceq.StateRetrying, 0, "connection"},
		"commits": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			return tx.Commit(ctx)
		}, onceq.StateRetrying, 0, "the worker ends this transaction"},
		"completes by itself": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			return l.Complete(ctx, tx)
		}, onceq.StateRetrying, 0, "the worker ends this job"},
		"completes by itself elsewhere": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			return l.Complete(ctx, nil)
		}, onceq.StateRetrying, 0, "the worker ends this job"},
		"fails by itself": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_ = write(ctx, tx, l)
			return l.Fail(ctx, errors.New("x"))
		}, onceq.StateRetrying, 0, "the worker ends this job"},
		"returns another work's lost lease": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			return &onceq.LeaseError{Op: "complete", Key: "some fence"}
		}, onceq.StateRetrying, 0, "some fence"},
		"rolls a savepoint back": {func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_ = write(ctx, tx, l)
				_, err := tx.Exec(ctx, `select 1/0`)
				return err
			})
			if err == nil {
				return errors.New("no error")
			}
			return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return write(ctx, tx, l) })
		}, onceq.StateCompleted, 1, ""},
	} {
		id := add(t, db, onceq.Job{Key: name})
		ran := db.RunOne(handleTx(c.handler))
		require.Equal(t, id, ran.JobID)
		require.Equal(t, c.state, ran.State, "%s: %v", name, ran.Err)
		if c.says != "" {
			require.ErrorContains(t, ran.Err, c.says, name)
		}
		require.Equal(t, c.effects, sqlOne[int](t, db, `select count(*) from effects where job = $1`, id), name)
		if c.state == onceq.StateDelayed {
			require.Equal(t, 0, sqlOne[int](t, db, `select attempts from onceq.jobs where id = $1 and key = $2`, id, name))
		}
		sqlRun(t, db, `update onceq.jobs set run_at = run_at + interval '1 year' where id = $1`, id)
	}
}

func TestHandle_PlansOfTheHandlersOwnStatementsAreLeftAlone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	settings := func(ctx context.Context, db onceq.DB) (string, error) {
		rows, err := db.Query(ctx, `select string_agg(name || ' ' || setting, ', ' order by name) from pg_settings
			where name = 'plan_cache_mode' or name like 'enable%' or name like 'jit%'`)
		if err != nil {
			return "", err
		}
		return pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	}
	want, err := settings(t.Context(), db.Pool)
	require.NoError(t, err)
	check := func(ctx context.Context, tx pgx.Tx) error {
		if got, err := settings(ctx, tx); err != nil || got != want {
			return fmt.Errorf("%s, %v", got, err)
		}
		return nil
	}
	for range 2 {
		add(t, db, onceq.Job{})
	}
	one := handleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease) error { return check(ctx, tx) })
	many := work.HandleBatch(2, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) error {
		require.Len(t, jobs, 2)
		return check(ctx, tx)
	})
	ran := db.Drain(many)
	require.Len(t, ran, 2)
	add(t, db, onceq.Job{})
	for _, r := range append(ran, db.RunOne(one)) {
		require.Equal(t, onceq.StateCompleted, r.State, "%v", r.Err)
	}
}

func TestHandle_OutcomesOfErrors(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	patient := onceq.Kind[int]{Name: "k", MaxAttempts: 2, Backoff: func(attempt int, err error) time.Duration {
		return time.Duration(attempt) * time.Hour
	}}
	hasty := patient
	hasty.Timeout = 50 * time.Millisecond
	for name, c := range map[string]struct {
		fn    func(context.Context) error
		state onceq.State
		says  string
	}{
		"plain": {func(context.Context) error { return errors.New("bad day") }, onceq.StateRetrying, "bad day"},
		"fatal": {func(context.Context) error { return fmt.Errorf("so: %w", onceq.Fatal(errors.New("bad day"))) }, onceq.StateDead, "so: bad day"},
		"panic": {func(context.Context) error { panic("bad day") }, onceq.StateRetrying, "TestHandle_OutcomesOfErrors"},
		"times out": {func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}, onceq.StateRetrying, "its kind's Timeout"},
		"ignores the time-out": {func(ctx context.Context) error {
			<-ctx.Done()
			return nil
		}, onceq.StateCompleted, ""},
	} {
		kind := patient
		if strings.Contains(name, "time") {
			kind = hasty
		}
		id := add(t, db, kind.Job(1))
		began := sqlOne[time.Time](t, db, `select clock_timestamp()`)
		ran := db.RunOne(kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error { return c.fn(ctx) }))
		require.Equal(t, c.state, ran.State, "%s: %v", name, ran.Err)
		if c.says != "" {
			require.ErrorContains(t, ran.Err, c.says)
		}
		if c.state != onceq.StateRetrying {
			continue
		}
		require.True(t, sqlOne[bool](t, db, `select run_at - interval '1 hour' between $2 and clock_timestamp() from onceq.jobs where id = $1`, id, began), name)
		db.Advance(time.Hour)
		ran = db.RunOne(kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error { return c.fn(ctx) }))
		require.Equal(t, onceq.StateDead, ran.State)
		require.Equal(t, 2, ran.Attempt)
		info, err := db.Queue.Get(t.Context(), db.Pool, id)
		require.NoError(t, err)
		require.Len(t, info.Errors, 2)
	}
}

func TestHandleBatch_OneBadJobFailsAlone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, `create table effects (n int)`)
	ids := addMany(t, db, 20, onceq.Job{})
	ran := db.Drain(retriedLater.HandleBatch(8, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) error {
		for _, j := range jobs {
			if _, err := tx.Exec(ctx, `insert into effects values ($1)`, j.Payload); err != nil {
				return err
			}
			if j.Payload == 7 {
				return errors.New("seven is bad")
			}
			if err := j.SetResult(j.Payload); err != nil {
				return err
			}
		}
		return nil
	}))
	require.Len(t, ran, 20)
	for _, r := range ran {
		if r.JobID == ids[7] {
			require.Equal(t, onceq.StateRetrying, r.State)
		} else {
			require.Equal(t, onceq.StateCompleted, r.State)
		}
	}
	require.Equal(t, 19, sqlOne[int](t, db, `select count(distinct n) from effects`))
	require.Equal(t, 19, sqlOne[int](t, db, `select count(*) from effects`))
}

func TestHandleTx_ConflictsRunAgainWithoutAnAttempt(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"40001", "40P01"} {
		db := queuetest.New(t)
		add(t, db, onceq.Job{MaxAttempts: 1})
		runs := 0
		ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			if runs++; runs < 4 {
				_, err := tx.Exec(ctx, `do $$ begin raise 'conflict' using errcode = '`+code+`'; end $$`)
				return fmt.Errorf("wrapped: %w", err)
			}
			return nil
		}))
		require.Equal(t, onceq.StateCompleted, ran.State, "%v", ran.Err)
		require.Equal(t, 4, runs)

		// It does not run again for ever.
		add(t, db, onceq.Job{MaxAttempts: 1})
		runs = 0
		ran = db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			runs++
			_, err := tx.Exec(ctx, `do $$ begin raise 'conflict' using errcode = '`+code+`'; end $$`)
			return err
		}))
		require.Equal(t, onceq.StateDead, ran.State)
		require.Equal(t, 30, runs)

		// A statement that is sent through the connection makes no difference.
		add(t, db, onceq.Job{MaxAttempts: 1})
		runs = 0
		ran = db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			if runs++; runs > 1 {
				return nil
			}
			_, err := tx.Conn().Exec(ctx, `do $$ begin raise 'conflict' using errcode = '`+code+`'; end $$`)
			return err
		}))
		require.Equal(t, onceq.StateCompleted, ran.State, "%v", ran.Err)
		require.Equal(t, 2, runs)

		// A conflict counts as the transaction's even if a savepoint has undone it, and even if the handler did not return
		// it.
		for _, end := range []func(error) error{func(err error) error { return err }, func(error) error { return nil }} {
			add(t, db, onceq.Job{MaxAttempts: 1})
			runs = 0
			ran = db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
				if runs++; runs > 1 {
					return nil
				}
				err := end(nil)
				if end(context.Canceled) != nil {
					err = pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
						var n int
						return tx.QueryRow(ctx, `do $$ begin raise 'conflict' using errcode = '`+code+`'; end $$`).Scan(&n)
					})
				} else {
					_, _ = tx.Exec(ctx, `do $$ begin raise 'conflict' using errcode = '`+code+`'; end $$`)
				}
				return err
			}))
			require.Equal(t, onceq.StateCompleted, ran.State, "%v", ran.Err)
			require.Equal(t, 2, runs)
		}
	}
}

// A conflict of another database, or one that the handler has decided about, is an error like any other. Such a job once
// ran again for ever, and spent no attempt.
func TestHandleTx_ConflictsOfOthersSpendAnAttempt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	elsewhere := &pgconn.PgError{Code: "40001"}
	own := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `do $$ begin raise 'conflict' using errcode = '40001'; end $$`)
		return err
	}
	for name, c := range map[string]struct {
		handler func(context.Context, pgx.Tx) error
		state   onceq.State
		spent   int
		again   bool // the handler runs again at once, as after any conflict of its own transaction
	}{
		"elsewhere": {func(context.Context, pgx.Tx) error { return elsewhere }, onceq.StateRetrying, 1, false},
		"elsewhere, after statements here": {func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `select $1::int`, 1)
			return errors.Join(err, elsewhere)
		}, onceq.StateRetrying, 1, false},
		"elsewhere, with another error here": {func(ctx context.Context, tx pgx.Tx) error {
			return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_, err := tx.Conn().Exec(ctx, `select 1/0`)
				return errors.Join(err, elsewhere)
			})
		}, onceq.StateRetrying, 1, false},
		"elsewhere, inside of Fatal": {func(context.Context, pgx.Tx) error { return onceq.Fatal(elsewhere) }, onceq.StateDead, 1, false},
		"inside of Fatal":            {func(ctx context.Context, tx pgx.Tx) error { return onceq.Fatal(own(ctx, tx)) }, onceq.StateDead, 1, false},
		"inside of RetryAfter":       {func(ctx context.Context, tx pgx.Tx) error { return onceq.RetryAfter(time.Hour, own(ctx, tx)) }, onceq.StateRetrying, 1, false},
		"and a snooze":               {func(ctx context.Context, tx pgx.Tx) error { return errors.Join(own(ctx, tx), onceq.Snooze(time.Hour)) }, onceq.StateRetrying, 1, true},
	} {
		id := add(t, db, onceq.Job{})
		runs := 0
		ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			runs++
			return c.handler(ctx, tx)
		}))
		require.Equal(t, c.state, ran.State, "%s: %v", name, ran.Err)
		require.Equal(t, c.again, runs > 1, "%s: %d runs", name, runs)
		require.Equal(t, c.spent, sqlOne[int](t, db, `select coalesce((select attempts from onceq.jobs where id = $1), (select attempts from onceq.job_history where id = $1))`, id), name)
		sqlRun(t, db, `delete from onceq.jobs`)
	}
}

// Handlers that conflict run again, and one after the other they get through, also where each takes long.
func TestHandleTx_SerializableKindsSerialize(t *testing.T) {
	t.Parallel()
	for _, takes := range []time.Duration{0, 100 * time.Millisecond} {
		t.Run(takes.String(), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			sqlRun(t, db, `create table counter (n int)`)
			sqlRun(t, db, `insert into counter values (0)`)
			addMany(t, db, 20, onceq.Job{})
			kind := onceq.Kind[int]{Name: "k", Serializable: true}
			w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 4}}},
				kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
					var n int
					if err := tx.QueryRow(ctx, `select n from counter`).Scan(&n); err != nil {
						return err
					}
					time.Sleep(takes)
					_, err := tx.Exec(ctx, `update counter set n = $1`, n+1)
					return err
				}))
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.Equal(t, 20, sqlOne[int](t, db, `select n from counter`))
			require.Zero(t, w.count(onceq.EventFailed))
		})
	}
}

func TestHandle_CompletesInATransactionOfItsOwn(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end   func(*onceq.Lease, pgx.Tx, context.Context) error
		left  int
		event onceq.EventType
	}{
		"committed": {func(l *onceq.Lease, tx pgx.Tx, ctx context.Context) error { return tx.Commit(ctx) }, 0, onceq.EventCompleted},
		"committed, then an error": {func(l *onceq.Lease, tx pgx.Tx, ctx context.Context) error {
			return errors.Join(tx.Commit(ctx), errors.New("late"))
		}, 0, onceq.EventCompleted},
		"rolled back":   {func(l *onceq.Lease, tx pgx.Tx, ctx context.Context) error { return tx.Rollback(ctx) }, 1, onceq.EventFailed},
		"not committed": {func(l *onceq.Lease, tx pgx.Tx, ctx context.Context) error { return tx.Conn().Close(ctx) }, 1, onceq.EventFailed},
	} {
		db := queuetest.New(t)
		add(t, db, onceq.Job{Key: "k"})
		ended := make(chan struct{}, 1)
		w := start(t, db, onceq.WorkerConfig{}, handle(func(ctx context.Context, l *onceq.Lease) error {
			defer func() { ended <- struct{}{} }()
			tx, err := db.Pool.Begin(ctx)
			if err != nil {
				return err
			}
			defer tx.Rollback(context.Background())
			if err := l.Complete(ctx, tx); err != nil {
				return err
			}
			return c.end(l, tx, ctx)
		}))
		receive(t, ended)
		eventually(t, name, func() bool { return w.count(c.event) > 0 })
		require.NoError(t, w.stop())
		require.Zero(t, w.count(onceq.EventLeaseLost)+w.count(onceq.EventStale), name)
		require.Equal(t, c.left, sqlOne[int](t, db, `select count(*) from onceq.jobs`), name)
	}
}

// A handler that completes its job by itself and goes on has not lost its lease, even if the database then does not answer.
func TestHandle_GoesOnAfterItsOwnCompletion(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{})
	completed, end := make(chan struct{}), make(chan struct{})
	var cause error
	const lease = steady
	w := start(t, db, onceq.WorkerConfig{Lease: lease}, handle(func(ctx context.Context, l *onceq.Lease) error {
		if err := l.Complete(ctx, nil); err != nil {
			return err
		}
		close(completed)
		<-end
		cause = context.Cause(ctx)
		return nil
	}))
	receive(t, completed)
	begun := time.Now()
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `lock table onceq.jobs in access exclusive mode`)
	require.NoError(t, err)
	eventually(t, "more than a lease", func() bool { return time.Since(begun) > lease+lease/3 })
	require.NoError(t, tx.Rollback(t.Context()))
	close(end)
	require.NoError(t, w.stop())
	require.NoError(t, cause)
	require.Zero(t, w.count(onceq.EventLeaseLost))
}

func TestLost_EndsTheHandlersContextOnce(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{})
	running, causes := make(chan struct{}, 5), make(chan error, 5)
	w := start(t, db, onceq.WorkerConfig{Lease: steady}, handle(func(ctx context.Context, l *onceq.Lease) error {
		running <- struct{}{}
		if l.Lost > 0 {
			return nil
		}
		<-ctx.Done()
		causes <- context.Cause(ctx)
		return ctx.Err()
	}))
	receive(t, running)
	sqlRun(t, db, `update onceq.jobs set holder = 0, leased_until = statement_timestamp(), claims = claims + 1 where id = $1`, id)
	cause := receive(t, causes)
	var lost *onceq.LeaseError
	require.ErrorAs(t, cause, &lost)
	require.ErrorIs(t, cause, onceq.ErrLeaseLost)
	require.Equal(t, id, lost.JobID)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Equal(t, 1, w.count(onceq.EventLeaseLost))
	require.Zero(t, w.count(onceq.EventStale))
	require.Zero(t, w.count(onceq.EventFailed))
	require.Equal(t, 1, w.count(onceq.EventCompleted))
}

// A worker that has heard nothing from the database for a whole lease gives up its jobs.
func TestLost_NoBeatForAWholeLease(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{})
	running, causes := make(chan struct{}, 5), make(chan error, 5)
	var second atomic.Bool
	w := start(t, db, onceq.WorkerConfig{Lease: time.Second}, handle(func(ctx context.Context, l *onceq.Lease) error {
		running <- struct{}{}
		if second.Swap(true) {
			return nil
		}
		<-ctx.Done()
		causes <- context.Cause(ctx)
		return ctx.Err()
	}))
	receive(t, running)
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `lock table onceq.jobs in access exclusive mode`)
	require.NoError(t, err)
	require.ErrorIs(t, receive(t, causes), onceq.ErrLeaseLost)
	require.NoError(t, tx.Rollback(t.Context()))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

func TestExpired_IsTakenByARunningWorkerWithoutARescuer(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{})
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 hour'`)
	l := takeOne(t, db)
	first := make(chan int64, 10)
	w := start(t, db, onceq.WorkerConfig{}, handle(func(ctx context.Context, l *onceq.Lease) error {
		first <- l.ID
		return nil
	}))
	other := add(t, db, onceq.Job{}) // the worker's position is now far past the expired job
	require.Equal(t, other, receive(t, first))
	db.ExpireLease(id)
	require.Equal(t, id, receive(t, first))
	until(t, db, noJobs)
	require.ErrorIs(t, l.Complete(t.Context(), nil), onceq.ErrLeaseLost)
	require.NoError(t, w.stop())
}

// Where one worker at a time rescans a queue, a kind that it does not have waits for no turn: it leaves word, and whoever has the
// kind rescans at once.
func TestRescan_LeavesWordOfKindsThatItDoesNotHave(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	rare := onceq.Kind[int]{Name: "rare"}
	id := add(t, db, onceq.Job{Kind: "rare"})
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 hour'`)
	takeOne(t, db)
	add(t, db, onceq.Job{Kind: "nobody's"}) // while nothing is due, nobody looks behind
	others := start(t, db, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	first := make(chan int64, 10)
	w := start(t, db, onceq.WorkerConfig{}, rare.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
		first <- l.ID
		return nil
	}))
	last := add(t, db, onceq.Job{Kind: "rare"}) // the worker's position is now far past the expired job
	require.Equal(t, last, receive(t, first))
	until(t, db, `exists (select from onceq.queues)`)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil { // it is always others' turn
			_, _ = db.Pool.Exec(ctx, `update onceq.queues set rescanned_at = statement_timestamp()`)
			time.Sleep(20 * time.Millisecond)
		}
	}()
	db.ExpireLease(id)
	sqlRun(t, db, `update onceq.queues set left_kinds = '{rare}'`) // as TestRescan_SaysWhichKindsItLeaves
	require.Equal(t, id, receive(t, first))
	until(t, db, `(select left_kinds is null from onceq.queues)`)
	cancel()
	<-ended
	require.NoError(t, errors.Join(w.stop(), others.stop()))
}

// After the database's clock was set back, the time of the latest rescan lies ahead, for as long as it was set back.
func TestRescan_AfterTheClockWasSetBack(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{})
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 hour'`)
	takeOne(t, db)
	first := make(chan int64, 10)
	w := start(t, db, onceq.WorkerConfig{}, handle(func(_ context.Context, l *onceq.Lease) error {
		first <- l.ID
		return nil
	}))
	last := add(t, db, onceq.Job{}) // the worker's position is now far past the expired job
	require.Equal(t, last, receive(t, first))
	until(t, db, `exists (select from onceq.queues)`)
	sqlRun(t, db, `update onceq.queues set rescanned_at = statement_timestamp() + interval '1 hour'`)
	db.ExpireLease(id)
	require.Equal(t, id, receive(t, first))
	require.NoError(t, w.stop())
}

// traced is the same database with a pool of its own, which counts rescans.
func traced(t *testing.T, db *queuetest.DB) (*queuetest.DB, *trapTracer) {
	trace := new(trapTracer)
	cfg := db.Pool.Config()
	cfg.ConnConfig.Tracer = trace
	pool := must[*pgxpool.Pool](t)(pgxpool.NewWithConfig(context.Background(), cfg))
	t.Cleanup(pool.Close)
	own := *db
	own.Pool = pool
	return &own, trace
}

// oneHandler is a worker that is full with one job, and looks often.
var oneHandler = onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 1}}, PollInterval: 10 * time.Millisecond}

// What a rescan finds starts in the worker that does it. Workers without a free handler leave the turn to one that has one.
// Where there is none, who is free again rescans.
func TestRescan_IsForWorkersWithAFreeHandler(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	full, fulls := traced(t, db)
	free, frees := traced(t, db)
	expired := addMany(t, db, 2, onceq.Job{})
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 hour'`)
	require.Len(t, must[[]*onceq.Lease](t)(db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 2, Lease: time.Hour})), 2)

	started, end := make(chan int64, 10), make(chan bool)
	long := handle(func(ctx context.Context, l *onceq.Lease) error {
		started <- l.ID
		select {
		case <-end:
		case <-ctx.Done():
		}
		return nil
	})
	var workers []*working
	for range 3 {
		workers = append(workers, start(t, full, oneHandler, long))
		add(t, db, onceq.Job{})
		receive(t, started)
	}
	ran := make(chan int64, 10)
	w := start(t, free, onceq.WorkerConfig{}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.ID
		return nil
	}))
	last := add(t, db, onceq.Job{}) // the worker's position is now far past the expired jobs
	require.Equal(t, last, receive(t, ran))

	wasFull := fulls.asked.Load()
	eventually(t, "a turn of the one that is free", func() bool { return frees.turns.Load() > 0 })
	db.ExpireLease(expired[0])
	require.Equal(t, expired[0], receive(t, ran))
	require.NoError(t, w.stop())

	db.ExpireLease(expired[1])
	require.Equal(t, wasFull, fulls.asked.Load(), "those that are not free do not ask")
	end <- true
	require.Equal(t, expired[1], receive(t, started))
	close(end)
	until(t, db, noJobs)
	for _, w := range workers {
		require.NoError(t, w.stop())
	}
}

func TestRescan_SaysWhichKindsItLeaves(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	expired, runs := add(t, db, onceq.Job{Kind: "rare"}), add(t, db, onceq.Job{Kind: "busy"})
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 hour'`)
	require.Len(t, must[[]*onceq.Lease](t)(db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 2, Lease: time.Hour})), 2)
	w := start(t, db, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	add(t, db, onceq.Job{})
	db.ExpireLease(expired)
	until(t, db, `exists (select from onceq.queues where left_kinds = '{rare}')`)
	db.ExpireLease(runs)
	until(t, db, `exists (select from onceq.queues where left_kinds = '{busy,rare}')`)
	require.NoError(t, w.stop())
}

func TestClaims_CommittedLongAfterTheyWereDue(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := make(chan int64, 10)
	w := start(t, db, onceq.WorkerConfig{}, handle(func(ctx context.Context, l *onceq.Lease) error {
		ran <- l.ID
		return nil
	}))
	require.Equal(t, add(t, db, onceq.Job{}), receive(t, ran))
	late := add(t, db, onceq.Job{Delay: time.Hour})
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 day' where id = $1`, late)
	require.Equal(t, late, receive(t, ran))
	require.NoError(t, w.stop())
}

func TestUnknownKinds_AreLeftWithOneWarningForAnotherWorker(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ids := addMany(t, db, 3, onceq.Job{Kind: "later", RunAt: time.Now().Add(-time.Hour)})
	add(t, db, onceq.Job{})
	w := start(t, db, onceq.WorkerConfig{PollInterval: 10 * time.Millisecond}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	eventually(t, "a warning", func() bool { return strings.Contains(w.logged(), "kind=later") })
	before := sqlOne[time.Time](t, db, `select rescanned_at from onceq.queues`)
	until(t, db, `exists (select from onceq.queues where rescanned_at > $1)`, before)
	until(t, db, `(select count(*) from onceq.jobs) = 3`)
	require.Equal(t, 1, strings.Count(w.logged(), "kind=later"))
	require.Contains(t, w.logged(), `kind=later "kinds with a handler"=[k]`)
	require.Zero(t, sqlOne[int](t, db, `select sum(claims) from onceq.jobs`))
	later := onceq.Kind[int]{Name: "later"}
	got := make(chan int64, 3)
	other := start(t, db, onceq.WorkerConfig{}, later.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
		got <- l.ID
		return nil
	}))
	require.ElementsMatch(t, ids, []int64{receive(t, got), receive(t, got), receive(t, got)})
	require.NoError(t, errors.Join(w.stop(), other.stop()))
}

func TestDrain_WarnsOnceOfAKindWithoutAHandler(t *testing.T) {
	t.Parallel()
	log := &working{}
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.NewTextHandler(log, nil))}))
	addMany(t, db, 3, onceq.Job{Kind: "kk"})
	add(t, db, onceq.Job{Kind: "in an hour", Delay: time.Hour})
	add(t, db, onceq.Job{})
	w := must[*onceq.Worker](t)(onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil })))
	require.NoError(t, w.Drain(t.Context(), 0))
	require.Equal(t, 1, strings.Count(log.logged(), "level=WARN"))
	require.Contains(t, log.logged(), `correct Kind.Name if it is misspelt" queue=default kind=kk "kinds with a handler"=[k]`)
}

func TestPriorities_NoneStarves(t *testing.T) {
	t.Parallel()
	for one, others := range map[onceq.Priority][]onceq.Priority{
		onceq.PriorityLow:    {onceq.PriorityHigh},
		onceq.PriorityNormal: {onceq.PriorityHigh, onceq.PriorityLow},
	} {
		t.Run(fmt.Sprint(one), func(t *testing.T) {
			t.Parallel()
			noneStarves(t, one, others)
		})
	}
}

func noneStarves(t *testing.T, one onceq.Priority, always []onceq.Priority) {
	db := queuetest.New(t)
	low := add(t, db, onceq.Job{Priority: one})
	for _, p := range always {
		addMany(t, db, 100, onceq.Job{Priority: p})
	}
	done := make(chan struct{})
	var others atomic.Int64
	start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 1}}},
		handle(func(ctx context.Context, l *onceq.Lease) error {
			if l.ID == low {
				close(done)
			} else {
				others.Add(1)
				_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: 1, Priority: l.Priority}) // there is always more of the other priorities
				return err
			}
			return nil
		}))
	receive(t, done)
}

func TestCancel_EndsARunningJob(t *testing.T) {
	t.Parallel()
	for form, keep := range map[string]time.Duration{"lease": 0, "lease, kept for longer": 48 * time.Hour, "tx": time.Hour} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			id := add(t, db, onceq.Job{Key: "k"})
			running, causes := make(chan struct{}, 1), make(chan error, 1)
			fn := func(ctx context.Context, _ *onceq.Lease) error {
				running <- struct{}{}
				<-ctx.Done()
				causes <- context.Cause(ctx)
				return ctx.Err()
			}
			kind := onceq.Kind[int]{Name: "k", Keep: keep}
			h := kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error { return fn(ctx, l) })
			if form == "tx" {
				h = kind.HandleTx(func(ctx context.Context, _ pgx.Tx, l *onceq.Lease, _ int) error { return fn(ctx, l) })
			}
			w := start(t, db, onceq.WorkerConfig{Lease: steady}, h)
			receive(t, running)
			state, err := db.Queue.Cancel(t.Context(), db.Pool, id)
			require.NoError(t, err)
			require.Equal(t, onceq.StateRunning, state)
			require.ErrorIs(t, receive(t, causes), onceq.ErrCancelled)
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.Equal(t, 1, w.count(onceq.EventCancelled))
			info, err := db.Queue.Get(t.Context(), db.Pool, id)
			require.NoError(t, err)
			require.Equal(t, onceq.StateCancelled, info.State)
			require.Equal(t, max(keep, 24*time.Hour), info.KeepUntil.Sub(info.FinishedAt))
		})
	}
}

const nothingSpent = `not exists (select from onceq.jobs where leased_until is not null or holder is not null or attempts <> 0 or lost <> 0)`

func TestShutdown_WaitsThenCancelsAndGivesBack(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ids := addMany(t, db, 10, onceq.Job{})
	running := make(chan int64, 10)
	finish := make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{
		Queues:          map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 2}},
		ShutdownTimeout: 5 * time.Second,
	}, handle(func(ctx context.Context, l *onceq.Lease) error {
		running <- l.ID
		if l.ID == ids[0] {
			<-finish // it ends within the time that it has
			return ctx.Err()
		}
		<-ctx.Done()
		return ctx.Err()
	}))
	receive(t, running)
	receive(t, running)
	w.cancel()
	close(finish)
	add(t, db, onceq.Job{}) // no longer claimed
	require.NoError(t, w.stop())
	require.Equal(t, 10, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
	require.True(t, sqlOne[bool](t, db, "select "+nothingSpent))
	require.Equal(t, 1, w.count(onceq.EventCompleted))
	require.Empty(t, running)
}

func TestShutdown_NamesHandlersThatIgnoreItAndGivesThePrefetchedBack(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	const quick = 3000
	addMany(t, db, quick, onceq.Job{Priority: onceq.PriorityHigh})
	kind := onceq.Kind[int]{Name: "stubborn", Timeout: onceq.NoTimeout}
	running, finish := make(chan struct{}), make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{
		Queues:          map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 1}},
		ShutdownTimeout: -1,
	}, handle(func(ctx context.Context, l *onceq.Lease) error {
		return nil
	}), kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		close(running)
		<-finish
		return nil
	}))
	until(t, db, `(select count(*) from onceq.jobs) < 2900`) // fast enough by now to prefetch
	add(t, db, kind.Job(1))
	sqlRun(t, db, `update onceq.jobs set priority = -1, run_at = statement_timestamp() - interval '4 seconds' where kind = 'stubborn'`)
	receive(t, running)
	err := w.stop()
	close(finish)
	require.ErrorContains(t, err, `1 handlers did not return`)
	require.ErrorContains(t, err, `"stubborn"`)
	require.True(t, sqlOne[bool](t, db, `select not exists (select from onceq.jobs where leased_until is not null and kind <> 'stubborn')`))
}

func TestShutdown_LeaksNoGoroutine(t *testing.T) {
	db := queuetest.New(t)
	stacks := func() (own int, all string) {
		buf := make([]byte, 1<<20)
		all = string(buf[:runtime.Stack(buf, true)])
		for _, g := range strings.Split(all, "\n\n") {
			if regexp.MustCompile(`onceq\.\(\*(Worker|run|claimer|listener|executor|outbox|beats)\)`).MatchString(g) {
				own++
			}
		}
		return own, all
	}
	before, _ := stacks()
	require.Zero(t, before)
	addMany(t, db, 200, onceq.Job{})
	kind := onceq.Kind[int]{Name: "tx"}
	for range 3 {
		w := start(t, db, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }),
			kind.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, int) error { return nil }))
		add(t, db, kind.Job(1))
		until(t, db, noJobs)
		require.NoError(t, w.stop())
	}
	eventually(t, "no goroutine of a worker", func() bool { n, _ := stacks(); return n == 0 })
	until(t, db, `(select count(*) from pg_stat_activity where datname = current_database() and query like 'listen%') = 0`)
}

func TestRun_SaysWhatItCannotDo(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, handle(nil))
	require.NoError(t, err)
	var missing *onceq.SchemaError
	require.ErrorAs(t, w.Run(t.Context()), &missing)
	for _, bad := range [][]onceq.Handler{nil, {{}}, {handle(nil), handle(nil)}, {onceq.Kind[int]{}.Handle(nil)},
		{onceq.Kind[int]{Name: "a", MaxLost: 1 << 15}.Handle(nil)}, {work.HandleBatch(0, nil)}} {
		_, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, bad...)
		require.Error(t, err)
	}
	for _, cfg := range []onceq.WorkerConfig{{Lease: time.Millisecond}, {PollInterval: -1}, {Queues: map[string]onceq.QueueConfig{"a": {Concurrency: -1}}}} {
		_, err := onceq.NewWorker(db.Queue, cfg, handle(nil))
		require.Error(t, err)
	}
}

func TestWorker_SurvivesTheLossOfAllItsConnections(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, `create table effects (job bigint)`)
	const jobs = 2000
	addMany(t, db, jobs, onceq.Job{MaxAttempts: 1000, Key: "k"})
	kind := onceq.Kind[int]{Name: "k", Backoff: func(int, error) time.Duration { return 0 }, MaxLost: 1000}
	watch, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	defer watch.Close(context.Background())
	var ran atomic.Int64
	w := start(t, db, onceq.WorkerConfig{Lease: time.Second}, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
		ran.Add(1)
		_, err := tx.Exec(ctx, `insert into effects values ($1)`, l.ID)
		return err
	}))
	for kill := int64(1); kill <= 5; kill++ {
		eventually(t, "progress", func() bool { return ran.Load() >= kill*200 })
		_, err := watch.Exec(t.Context(), `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()`)
		require.NoError(t, err)
	}
	eventually(t, "an empty queue", func() bool {
		var n int
		require.NoError(t, watch.QueryRow(t.Context(), `select count(*) from onceq.jobs`).Scan(&n))
		return n == 0
	})
	require.NoError(t, w.stop())
	var n, distinct int
	require.NoError(t, watch.QueryRow(t.Context(), `select count(*), count(distinct job) from effects`).Scan(&n, &distinct))
	require.Equal(t, [2]int{jobs, jobs}, [2]int{n, distinct})
}

func TestWake_NotificationsOnlyWhileSomebodyWaits(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := make(chan int64, 10)
	w := start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, handle(func(ctx context.Context, l *onceq.Lease) error {
		ran <- l.ID
		return nil
	}))
	until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
	// From here on, for an hour, only a notification wakes it.
	for range 3 {
		id := add(t, db, onceq.Job{})
		require.Equal(t, id, receive(t, ran))
		until(t, db, noJobs)
	}
	due := add(t, db, onceq.Job{Delay: 300 * time.Millisecond})
	require.Equal(t, due, receive(t, ran))
	require.NoError(t, w.stop())
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.waiters`))
}

// statementHook is called for each statement, or batch of statements, before it is sent and after its answer.
type statementHook struct {
	before, after func(sql string)
	wrote         func(sql string, rows int64)
}

type hookedSQL struct{}

func (h *statementHook) start(ctx context.Context, sql string) context.Context {
	if h.before != nil {
		h.before(sql)
	}
	return context.WithValue(ctx, hookedSQL{}, sql)
}

func (h *statementHook) end(ctx context.Context) {
	if sql, ok := ctx.Value(hookedSQL{}).(string); ok && h.after != nil {
		h.after(sql)
	}
}

func (h *statementHook) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	return h.start(ctx, d.SQL)
}

func (h *statementHook) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryEndData) {
	h.end(ctx)
	if sql, ok := ctx.Value(hookedSQL{}).(string); ok && h.wrote != nil {
		h.wrote(sql, d.CommandTag.RowsAffected())
	}
}

func (h *statementHook) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	var all strings.Builder
	for _, q := range d.Batch.QueuedQueries {
		all.WriteString(q.SQL)
	}
	return h.start(ctx, all.String())
}

func (h *statementHook) TraceBatchQuery(_ context.Context, _ *pgx.Conn, d pgx.TraceBatchQueryData) {
	if h.wrote != nil {
		h.wrote(d.SQL, d.CommandTag.RowsAffected())
	}
}

func (h *statementHook) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchEndData) {
	h.end(ctx)
}

// These are parts of the worker's statements.
const (
	announces  = "waiters (worker, serves, round, room, kinds, looks, polls, busy, idle_until)"
	asksNext   = "from seen where next <="
	claimsJobs = "and leased_until is null and lost = 0"
)

func hooked(t *testing.T, h *statementHook) (*queuetest.DB, *pgxpool.Pool) {
	t.Helper()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = h }))
	return db, owner(t, db)
}

// Nothing that enqueueing does prevents a two-phase commit. On a server that allows two-phase commits, an idle worker
// still finds the job in time.
func TestWake_TwoPhaseCommit(t *testing.T) {
	t.Parallel()
	server, err := pgserver.Start(t.Context(), pgserver.Options{Own: true, Settings: map[string]string{"max_prepared_transactions": "5"}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	q, err := onceq.New(pool, nil)
	require.NoError(t, err)
	ran := make(chan int64, 10)
	run := func(poll time.Duration) (stop func()) {
		w, err := onceq.NewWorker(q, onceq.WorkerConfig{PollInterval: poll}, handle(func(_ context.Context, l *onceq.Lease) error {
			ran <- l.ID
			return nil
		}))
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- w.Run(ctx) }()
		eventually(t, "an announcement", func() bool {
			var idle bool
			require.NoError(t, pool.QueryRow(ctx, `select exists (select from onceq.waiters where idle_until > statement_timestamp())`).Scan(&idle))
			return idle
		})
		return func() { cancel(); require.NoError(t, receive(t, ended)) }
	}
	job := onceq.Job{Kind: "k", Payload: 1}
	enqueue := map[string]func(pgx.Tx) (int64, error){
		"one": func(tx pgx.Tx) (int64, error) {
			r, err := q.Enqueue(t.Context(), tx, job)
			return r.ID, err
		},
		"many": func(tx pgx.Tx) (int64, error) {
			r, err := q.EnqueueMany(t.Context(), tx, []onceq.Job{job})
			return r[0].ID, err
		},
		"in a batch": func(tx pgx.Tx) (int64, error) {
			b := &pgx.Batch{}
			p, err := q.EnqueueInBatch(b, job)
			if err == nil {
				err = tx.SendBatch(t.Context(), b).Close()
			}
			if err != nil {
				return 0, err
			}
			r, err := p.Result(t.Context(), tx)
			return r.ID, err
		},
	}
	stop := run(0)
	for name, enqueue := range enqueue {
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		id, err := enqueue(tx)
		require.NoError(t, err, name)
		_, err = tx.Exec(t.Context(), `prepare transaction 'one'`)
		require.NoError(t, err, name)
		_, err = conn.Exec(t.Context(), `commit prepared 'one'`)
		require.NoError(t, err, name)
		require.Equal(t, id, receive(t, ran), name)
	}
	stop()
	// Outside a caller's transaction there is no two-phase commit to prevent. Only a notification wakes this worker.
	stop = run(time.Hour)
	defer stop()
	for name, enqueue := range map[string]func() (int64, error){
		"pool": func() (int64, error) { r, err := q.Enqueue(t.Context(), pool, job); return r.ID, err },
		"conn": func() (int64, error) { r, err := q.Enqueue(t.Context(), conn, job); return r.ID, err },
		"many": func() (int64, error) {
			r, err := q.EnqueueMany(t.Context(), pool, []onceq.Job{{Kind: "k", Payload: 1, Key: "key"}})
			return r[0].ID, err
		},
		"member": func() (int64, error) {
			g, err := q.EnqueueGroup(t.Context(), pool, []onceq.Job{job}, onceq.Job{Kind: "other", Payload: 1})
			require.NoError(t, err)
			return g.Members[0].ID, err
		},
	} {
		eventually(t, "an announcement", func() bool {
			var idle bool
			require.NoError(t, pool.QueryRow(t.Context(), `select exists (select from onceq.waiters w where idle_until > statement_timestamp()
				and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`).Scan(&idle))
			return idle
		})
		time.Sleep(20 * time.Millisecond) // a producer may believe for 10 that nobody waits; then a commit that stalls waits for a poll
		id, err := enqueue()
		require.NoError(t, err, name)
		require.Equal(t, id, receive(t, ran), name)
	}
}

// A delayed job becomes due after a claim has looked, and before the worker asks what is due next.
func TestWake_AJobThatBecomesDueBetweenLooks(t *testing.T) {
	t.Parallel()
	var armed atomic.Bool
	var tables *pgxpool.Pool
	var db *queuetest.DB
	db, tables = hooked(t, &statementHook{before: func(sql string) {
		if strings.Contains(sql, asksNext) && armed.CompareAndSwap(true, false) {
			_, err := tables.Exec(context.Background(), `update jobs set run_at = clock_timestamp() where run_at > now()`)
			assert.NoError(t, err)
		}
	}})
	ran := make(chan int64, 10)
	w := start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.ID
		return nil
	}))
	delayed := add(t, db, onceq.Job{Delay: time.Hour})
	armed.Store(true)
	now := add(t, db, onceq.Job{})
	require.ElementsMatch(t, []int64{now, delayed}, []int64{receive(t, ran), receive(t, ran)}) // an earlier look may have come in between
	require.NoError(t, w.stop())
}

// A producer asks which workers wait, just before a worker announces itself. It gets the answer long after that worker came
// to rest.
func TestWake_AProducerThatLearnsLateThatNobodyWaited(t *testing.T) {
	t.Parallel()
	var asked, announced, rested atomic.Bool
	release := make(chan struct{})
	db, _ := hooked(t, &statementHook{
		before: func(sql string) {
			announced.CompareAndSwap(false, strings.Contains(sql, announces))
			rested.CompareAndSwap(false, announced.Load() && strings.Contains(sql, asksNext))
		},
		after: func(sql string) {
			if strings.Contains(sql, ".enqueue_one(") && asked.CompareAndSwap(false, true) {
				<-release
			}
		},
	})
	first := make(chan error, 1)
	go func() {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k"})
		first <- err
	}()
	eventually(t, "the answer", asked.Load)
	ran := make(chan int64, 10)
	w := start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.ID
		return nil
	}))
	receive(t, ran)
	eventually(t, "a worker at rest", rested.Load)
	close(release)
	require.NoError(t, <-first)
	require.Equal(t, add(t, db, onceq.Job{}), receive(t, ran))
	require.NoError(t, w.stop())
}

// A producer has seen that nobody waits, and its commit stalls for longer than a worker's first looks after its announcement
// take. Also a worker that polls once an hour finds the job.
func TestWake_ACommitThatStalls(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for try := range 5 {
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		late, err := db.Queue.Enqueue(t.Context(), tx, onceq.Job{Kind: "k"})
		require.NoError(t, err)
		ran := make(chan int64, 1)
		w := start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, handle(func(_ context.Context, l *onceq.Lease) error {
			ran <- l.ID
			return nil
		}))
		until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
		announced := sqlOne[time.Time](t, db, `select min(idle_until) - interval '60 seconds' from onceq.waiters where idle_until > statement_timestamp()`)
		time.Sleep(300 * time.Millisecond) // here time itself is the fault; the worker looks for ten times as long
		require.NoError(t, tx.Commit(t.Context()))
		if took := sqlOne[time.Time](t, db, `select statement_timestamp()`).Sub(announced); try < 4 && took > 2*time.Second {
			t.Logf("the commit came %s after the announcement: too late on this machine", took)
			require.NoError(t, w.stop())
			_, err := db.Pool.Exec(t.Context(), `delete from onceq.jobs`)
			require.NoError(t, err)
			continue
		}
		require.Equal(t, late.ID, receive(t, ran))
		require.NoError(t, w.stop())
		return
	}
}

// The announcement takes long. A job that was enqueued before it is committed after the first look that follows it.
func TestWake_ASlowAnnouncement(t *testing.T) {
	t.Parallel()
	var armed, announced, committed atomic.Bool
	var late atomic.Int64
	var tx pgx.Tx
	var tables *pgxpool.Pool
	var db *queuetest.DB
	db, tables = hooked(t, &statementHook{
		before: func(sql string) {
			if strings.Contains(sql, announces) && armed.CompareAndSwap(true, false) {
				var err error
				tx, err = tables.Begin(context.Background())
				if !assert.NoError(t, err) {
					return
				}
				r, err := db.Queue.Enqueue(context.Background(), tx, onceq.Job{Kind: "k"})
				assert.NoError(t, err)
				late.Store(r.ID)
				time.Sleep(120 * time.Millisecond) // a network so slow that the worker has looked again by then; here time itself is the fault
				announced.Store(true)
			}
		},
		after: func(sql string) {
			if strings.Contains(sql, asksNext) && announced.Load() && committed.CompareAndSwap(false, true) {
				assert.NoError(t, tx.Commit(context.Background()))
			}
		},
	})
	armed.Store(true)
	ran := make(chan int64, 10)
	w := start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.ID
		return nil
	}))
	got := receive(t, ran)
	require.Equal(t, late.Load(), got)
	require.NoError(t, w.stop())
}

func TestWake_ABusyQueueAsksForNoNotification(t *testing.T) {
	t.Parallel()
	var listens atomic.Bool
	db, _ := hooked(t, &statementHook{after: func(sql string) {
		if strings.HasPrefix(sql, "unlisten ") { // the first notification has come back
			listens.Store(true)
		}
	}})
	addMany(t, db, 2000, onceq.Job{})
	hold := make(chan struct{})
	running := make(chan struct{}, 2000)
	w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 1}}}, handle(func(ctx context.Context, l *onceq.Lease) error {
		running <- struct{}{}
		<-hold
		return nil
	}))
	receive(t, running)
	eventually(t, "a confirmed listener", listens.Load)
	// On a slow machine the first announcement came before the answer to the first claim; then it is taken back.
	until(t, db, `not exists (select from onceq.waiters where idle_until > statement_timestamp())`)
	close(hold)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// The library's own statements find a connection even if handlers hold all those of the pool.
func TestPool_HandlersCannotStarveTheWorker(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 2 }))
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	addMany(t, db, 6, onceq.Job{})
	beside := onceq.Kind[int]{Name: "beside", Queue: "beside"}
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, beside.Job(1))
	require.NoError(t, err)
	running, end := make(chan struct{}, 10), make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{Lease: steady, Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 6}}},
		handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			_, err := tx.Exec(ctx, `select 1`)
			running <- struct{}{}
			<-end
			return err
		}),
		beside.Handle(func(context.Context, *onceq.Lease, int) error {
			running <- struct{}{}
			<-end
			return nil
		}))
	for range 3 {
		receive(t, running)
	}
	require.Contains(t, w.logged(), "queue=default concurrency=6 connections=2")
	eventually(t, "two extensions", func() bool {
		var n int
		require.NoError(t, conn.QueryRow(t.Context(), `select count(*) from onceq.jobs where kind = 'beside' and leased_until > run_at + interval '16 seconds'`).Scan(&n))
		return n == 1
	})
	eventually(t, "a word about it", func() bool { return strings.Contains(w.logged(), "all connections of the pool are in use") })
	require.Contains(t, w.logged(), `2 of kind \"k\" for up to`)
	close(end)
	eventually(t, "an empty queue", func() bool { return sqlOne[bool](t, db, "select "+noJobs) })
	require.NoError(t, w.stop())
	require.Zero(t, w.count(onceq.EventLeaseLost))
}

// A handler's time begins when it has its connection. Waiting for one spends no attempt.
func TestPool_WaitingForAConnectionIsNotTheHandlersTime(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 2 }))
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	kind := onceq.Kind[int]{Name: "k", Timeout: 5 * time.Second, MaxAttempts: 1}
	w := start(t, db, onceq.WorkerConfig{Lease: steady}, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
		_, err := tx.Exec(ctx, `select 1`)
		return err
	}))
	until(t, db, `exists (select from onceq.queues)`) // the worker works
	var busy [2]*pgxpool.Conn                         // connections that the application holds
	for i := range busy {
		busy[i], err = db.Pool.Acquire(t.Context())
		require.NoError(t, err)
		defer busy[i].Release()
	}
	for n := range 5 {
		_, err = db.Queue.Enqueue(t.Context(), conn, kind.Job(n))
		require.NoError(t, err)
	}
	var most int
	eventually(t, "two extensions of the one that waits, for longer than a handler may take", func() bool {
		var n, leased int
		require.NoError(t, conn.QueryRow(t.Context(), `select count(*) filter (where leased_until > run_at + interval '16 seconds'), count(leased_until) from onceq.jobs`).Scan(&n, &leased))
		most = max(most, leased)
		return n == 1
	})
	require.Equal(t, 1, most, "no more than one waits in line")
	for _, c := range busy {
		c.Release()
	}
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Equal(t, 5, w.count(onceq.EventCompleted))
	require.Zero(t, w.count(onceq.EventFailed)+w.count(onceq.EventDead)+w.count(onceq.EventDeferred))
}

// Queues with transactional kinds share the pool. A worker holds no more jobs than it has connections for, each queue gets
// its share, and a second worker gets the rest. One connection stays free for what handlers ask of the pool.
func TestPool_AWorkerLeasesWhatItsConnectionsCanRun(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 4 }))
	a, b := onceq.Kind[int]{Name: "a", Queue: "a"}, onceq.Kind[int]{Name: "b", Queue: "b"}
	for n := range 12 {
		_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{a.Job(n), b.Job(n)})
		require.NoError(t, err)
	}
	running, end := make(chan string, 100), make(chan struct{}, 100)
	hold := func(pool *pgxpool.Pool) func(context.Context, pgx.Tx, *onceq.Lease, int) error {
		return func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
			if _, err := tx.Exec(ctx, `select 1`); err != nil {
				return err
			}
			running <- l.Queue
			<-end
			_, err := pool.Exec(ctx, `select 1`)
			return err
		}
	}
	first := start(t, db, onceq.WorkerConfig{}, a.HandleTx(hold(db.Pool)), b.HandleTx(hold(db.Pool)))
	held := make(map[string]int)
	for range 3 {
		held[receive(t, running)]++
	}
	for held["a"] == 0 || held["b"] == 0 { // the other queue gets its turn when the first job ends
		end <- struct{}{}
		held[receive(t, running)]++
	}
	before := first.count(onceq.EventClaimed)
	second := *db
	config := db.Pool.Config()
	var err error
	second.Pool, err = pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(second.Pool.Close)
	other := start(t, &second, onceq.WorkerConfig{}, a.HandleTx(hold(second.Pool)), b.HandleTx(hold(second.Pool)))
	for range 3 {
		receive(t, running)
	}
	require.Equal(t, before, first.count(onceq.EventClaimed))
	until(t, db, `(select count(*) from onceq.jobs where leased_until is not null) = 6`)
	close(end)
	until(t, db, noJobs)
	require.NoError(t, errors.Join(first.stop(), other.stop()))
	require.Equal(t, 24, first.count(onceq.EventCompleted)+other.count(onceq.EventCompleted))
}

// Jobs that have lost a lease, or whose lease has expired, count as others do, and nothing is left in the end. Two queues share the limit.
func TestDrain_CountsJobsThatHaveLostALease(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	other := onceq.Kind[int]{Name: "other", Queue: "other"}
	var ran atomic.Int64
	drain := func(limit int) int64 {
		before := ran.Load()
		w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{},
			handle(func(context.Context, *onceq.Lease) error { ran.Add(1); return nil }),
			other.HandleBatch(3, func(_ context.Context, _ pgx.Tx, jobs []onceq.Item[int]) error { ran.Add(int64(len(jobs))); return nil }))
		require.NoError(t, err)
		require.NoError(t, w.Drain(t.Context(), limit))
		return ran.Load() - before
	}
	addMany(t, db, 12, onceq.Job{})
	addMany(t, db, 12, other.Job(1))
	for _, lost := range []string{`lost = 1, claims = 1 where id % 4 = 0`, `leased_until = now() - interval '1 second', holder = 1, claims = 1 where id % 4 = 1`} {
		_, err := owner(t, db).Exec(t.Context(), `update onceq.jobs set `+lost)
		require.NoError(t, err)
	}
	for range 3 {
		require.EqualValues(t, 5, drain(5))
	}
	require.EqualValues(t, 9, drain(0))
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
}

func TestDrain_SaysThatItsContextEndedWithWorkLeft(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	addMany(t, db, 2, onceq.Job{})
	ctx, cancel := context.WithCancel(t.Context())
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 1}}},
		handle(func(context.Context, *onceq.Lease) error { cancel(); return nil }))
	require.NoError(t, err)
	require.ErrorIs(t, w.Drain(ctx, 0), context.Canceled)
	require.True(t, sqlOne[bool](t, db, "select "+nothingSpent))
	require.ErrorIs(t, w.Drain(ctx, 0), context.Canceled)

	deploy := errors.New("a deploy")
	ctx, stop := context.WithCancelCause(t.Context())
	w, err = onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { stop(deploy); return onceq.Snooze(1) }))
	require.NoError(t, err)
	err = w.Drain(ctx, 0)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, deploy)

	w, err = onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
}

func TestNewWorker_QueuesTuneAndWhatIsLeftOutIsSaid(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	billing, mail := onceq.Kind[int]{Name: "bill", Queue: "billing"}, onceq.Kind[int]{Name: "mail"}
	nothing := func(context.Context, *onceq.Lease, int) error { return nil }
	handlers := []onceq.Handler{billing.Handle(nothing), mail.Handle(nothing)}
	for _, job := range []onceq.Job{billing.Job(1), mail.Job(1), {Kind: "mail", Queue: "bulk", Payload: 1}} {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
		require.NoError(t, err)
	}
	tuned := map[string]onceq.QueueConfig{"billing": {Concurrency: 2}}
	left := func(cfg onceq.WorkerConfig) string {
		w, err := onceq.NewWorker(db.Queue, cfg, handlers...)
		require.NoError(t, err)
		require.NoError(t, w.Drain(t.Context(), 0))
		return sqlOne[string](t, db, `select coalesce(string_agg(queue, ' ' order by queue), '') from onceq.jobs`)
	}
	require.Equal(t, "billing bulk", left(onceq.WorkerConfig{Without: []string{"billing"}}))
	require.Equal(t, "bulk", left(onceq.WorkerConfig{Queues: tuned}), "named queues are tuned, and the others worked")
	require.Equal(t, "", left(onceq.WorkerConfig{Queues: tuned, Also: []string{"bulk"}}))
	for says, cfg := range map[string]onceq.WorkerConfig{
		`names queue "biling", which this worker does not work. Its queues are ["billing" "default"]`: {Queues: map[string]onceq.QueueConfig{"biling": {}}},
		`names queue "bulk", which is the queue of no handler's kind`:                                 {Without: []string{"bulk"}},
		`leaves the worker no queue`:                             {Without: []string{"billing", "default"}},
		`names queue "billing", which this worker does not work`: {Without: []string{"billing"}, Queues: tuned},
		`and so does Without; remove it from one of them`:        {Without: []string{"billing"}, Also: []string{"billing"}},
		`WorkerConfig.Also is empty`:                             {Also: []string{""}},
	} {
		_, err := onceq.NewWorker(db.Queue, cfg, handlers...)
		require.ErrorContains(t, err, says)
	}
}

// A queue with a transactional kind does not limit the other queues.
func TestPool_OtherQueuesAreNotNarrowed(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 2 }))
	tx, plain := onceq.Kind[int]{Name: "tx", Queue: "tx"}, onceq.Kind[int]{Name: "plain"}
	addMany(t, db, 50, onceq.Job{Kind: "plain"})
	running, end := make(chan struct{}, 100), make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{}, tx.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, int) error { return nil }),
		plain.Handle(func(context.Context, *onceq.Lease, int) error {
			running <- struct{}{}
			<-end
			return nil
		}))
	for range 50 {
		receive(t, running)
	}
	close(end)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

func TestWorker_HandlerThatEndsItsGoroutineFailsItsAttempt(t *testing.T) {
	t.Parallel()
	soon := func(int, error) time.Duration { return 0 }
	lease := onceq.Kind[int]{Name: "lease", Backoff: soon}
	tx := onceq.Kind[int]{Name: "tx", Backoff: soon}
	batch := onceq.Kind[int]{Name: "batch", Backoff: soon}
	db := queuetest.New(t)
	for _, job := range []onceq.Job{lease.Job(1), tx.Job(1), batch.Job(1), batch.Job(2)} {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
		require.NoError(t, err)
	}
	var exits atomic.Int32
	once := func(l *onceq.Lease) error {
		if l.Attempt == 1 {
			exits.Add(1)
			runtime.Goexit()
		}
		return nil
	}
	states := map[onceq.State]int{}
	for _, ran := range db.Drain(
		lease.Handle(func(_ context.Context, l *onceq.Lease, _ int) error { return once(l) }),
		tx.HandleTx(func(_ context.Context, _ pgx.Tx, l *onceq.Lease, _ int) error { return once(l) }),
		batch.HandleBatch(10, func(_ context.Context, _ pgx.Tx, items []onceq.Item[int]) error { return once(items[0].Lease) }),
	) {
		states[ran.State]++
	}
	require.Equal(t, map[onceq.State]int{onceq.StateRetrying: 4, onceq.StateCompleted: 4}, states)
	require.GreaterOrEqual(t, exits.Load(), int32(3))
}

// ⚠ One job of a batch ended the goroutine, and all jobs of the batch failed, each time together, until all of them were dead. As after
// a panic, each runs by itself then, and only that one fails.
func TestTrap_AJobThatEndsItsGoroutineFailsNoOtherOfItsBatch(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "k", MaxAttempts: 1}
	ids := make([]int64, 20)
	for n := range ids {
		ids[n] = add(t, db, onceq.Job{Payload: n, MaxAttempts: 1})
	}
	var calls, running, most atomic.Int32
	handler := kind.HandleBatch(len(ids), func(_ context.Context, _ pgx.Tx, items []onceq.Item[int]) error {
		calls.Add(1)
		most.Store(max(most.Load(), running.Add(1)))
		defer running.Add(-1)
		if slices.ContainsFunc(items, func(i onceq.Item[int]) bool { return i.Payload == 7 || i.Payload == 9 }) {
			runtime.Goexit()
		}
		return nil
	})
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}}}, handler)
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	require.Equal(t, []int64{ids[7], ids[9]}, sqlOne[[]int64](t, db, `select array_agg(id order by id) from onceq.job_history`), "only these are dead")
	require.EqualValues(t, 21, calls.Load())
	require.EqualValues(t, 1, most.Load(), "they have one slot")
}

// A kind's Backoff may panic or end its goroutine as well. The default counts then, whoever asks, and the slot is free for the next job.
func TestRetry_ABackoffThatDoesNotReturnLeavesTheDefault(t *testing.T) {
	t.Parallel()
	for name, backoff := range map[string]func(int, error) time.Duration{
		"panics": func(int, error) time.Duration { panic("no") },
		"exits":  func(int, error) time.Duration { runtime.Goexit(); return 0 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			kind := onceq.Kind[int]{Name: "k", Backoff: backoff}
			w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}}}, kind.Handle(func(_ context.Context, _ *onceq.Lease, n int) error {
				if n == 1 {
					return nil // Postgres refuses that, and the outbox asks
				}
				return errors.New("no")
			}))
			_, err := owner(t, db).Exec(t.Context(), `
create function refuse() returns trigger language plpgsql as $$ begin raise 'refused' using errcode = 'data_exception'; end $$;
create trigger refuse before delete on jobs for each row execute function refuse()`)
			require.NoError(t, err)
			for n := range 3 {
				add(t, db, onceq.Job{Payload: n})
			}
			until(t, db, `(select count(*) from onceq.jobs where attempts > 0) = 3`)
			require.NoError(t, w.stop())
		})
	}
}

// A kind's Backoff is asked once for each attempt that fails, with or without a transaction: it may count.
func TestRetry_BackoffIsAskedOnceForEachFailure(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]func(k *onceq.Kind[int], fail error) onceq.Handler{
		"lease": func(k *onceq.Kind[int], fail error) onceq.Handler {
			return k.Handle(func(context.Context, *onceq.Lease, int) error { return fail })
		},
		"tx": func(k *onceq.Kind[int], fail error) onceq.Handler {
			return k.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, int) error { return fail })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			var asked atomic.Int64
			k := onceq.Kind[int]{Name: "k", Backoff: func(int, error) time.Duration {
				asked.Add(1)
				return time.Hour
			}}
			add(t, db, onceq.Job{})
			require.Len(t, db.Drain(of(&k, errors.New("no"))), 1)
			require.EqualValues(t, 1, asked.Load())
		})
	}
}

// For a moment, producers believe that nobody waits (quietFor). A worker that has just announced itself must find what they
// enqueue in that moment without a notification. No poll helps it here.
func TestWorker_NoJobIsMissedByNotificationsAlone(t *testing.T) {
	conformance.Quick(t, "400 jobs one by one and no poll for an hour, which a machine that stands still for seconds may need")
	t.Parallel()
	db := queuetest.New(t)
	const n = 400
	done := make(chan int64, n)
	w := start(t, db, onceq.WorkerConfig{PollInterval: time.Hour},
		handle(func(_ context.Context, l *onceq.Lease) error { done <- l.ID; return nil }))
	require.Eventually(t, func() bool {
		return sqlOne[int](t, db, `select count(*)::int from onceq.waiters where idle_until > now()`) == 1
	}, patience, time.Millisecond)
	left := n
	for left > 0 {
		burst := min(left, 1+left%3)
		for range burst {
			_, err := db.Queue.Enqueue(t.Context(), db.Pool, work.Job(left))
			require.NoError(t, err)
		}
		for range burst {
			receive(t, done)
		}
		left -= burst
		if left%20 < 3 { // now and then long enough for the worker to come to rest
			require.Eventually(t, func() bool {
				return sqlOne[int](t, db, `select count(*)::int from onceq.waiters where idle_until > now()`) == 1
			}, patience, time.Millisecond)
		}
	}
	require.NoError(t, w.stop())
}

// A worker also runs what a handler enqueues for another of its queues, whichever queue it looked at first.
func TestDrain_FollowsJobsIntoOtherQueues(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	second := onceq.Kind[int]{Name: "second", Queue: "b"}
	first := onceq.Kind[int]{Name: "first", Queue: "a", Backoff: func(int, error) time.Duration { return 0 }}
	for n := range conformance.Sized(5, 30) {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, first.Job(n))
		require.NoError(t, err)
		var ran atomic.Int32
		w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{},
			first.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
				if l.Attempt == 1 {
					return errors.New("fails the first time")
				}
				_, err := db.Queue.Enqueue(ctx, tx, second.Job(n))
				return err
			}),
			second.Handle(func(context.Context, *onceq.Lease, int) error { ran.Add(1); return nil }))
		require.NoError(t, err)
		require.NoError(t, w.Drain(t.Context(), 0))
		require.EqualValues(t, 1, ran.Load())
	}
}

// The library's own transactions set what they need. In a database whose transactions are read only by default, a worker
// announces itself, rescans and records effects, and the Reaper prunes.
func TestWorker_DefaultsOfTheDatabase(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `set default_transaction_read_only = on; set default_transaction_isolation = 'serializable'`)
			return err
		}
	}))
	enqueue := func() (id int64) {
		require.NoError(t, pgx.BeginTxFunc(t.Context(), db.Pool, pgx.TxOptions{AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			r, err := db.Queue.Enqueue(t.Context(), tx, onceq.Job{Kind: "k", Payload: 1})
			id = r.ID
			return err
		}))
		return id
	}
	ran := make(chan error, 10)
	w := start(t, db, onceq.WorkerConfig{}, handle(func(ctx context.Context, l *onceq.Lease) error {
		_, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (int, error) { return 1, nil })
		ran <- err
		return nil
	}))
	until(t, db, `exists (select from onceq.waiters) and exists (select from onceq.queues)`)
	enqueue()
	require.NoError(t, receive(t, ran))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.waiters`))
	n, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "one"}, func(context.Context, *onceq.FenceLease) (int, error) { return 7, nil })
	require.NoError(t, err)
	require.Equal(t, 7, n)
	reaper, err := onceq.NewReaper(db.Queue, onceq.ReaperConfig{})
	require.NoError(t, err)
	_, err = reaper.RunOnce(t.Context())
	require.NoError(t, err)
}

// uncancelled is a connection that swallows a request to cancel a statement.
type uncancelled struct{ net.Conn }

func (c uncancelled) Write(b []byte) (int, error) {
	if len(b) == 16 && binary.BigEndian.Uint32(b[4:]) == 80877102 { // CancelRequest
		return len(b), c.Close()
	}
	return c.Conn.Write(b)
}

// The commit of an outcome takes longer than the lease, and no request to cancel it arrives. The outcome is stored although its
// writer has given up.
func TestOutcome_StoredAfterItsWriterGaveUp(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			return uncancelled{conn}, err
		}
	}))
	must[pgconn.CommandTag](t)(owner(t, db).Exec(t.Context(), `
		create function slow() returns trigger language plpgsql as $$ begin
			perform set_config('lock_timeout', '0', true);
			perform pg_advisory_xact_lock(1); return null;
			end $$;
		create constraint trigger slow after delete on jobs deferrable initially deferred for each row execute function slow()`))
	gate := begin(t, db)
	must[pgconn.CommandTag](t)(gate.Exec(t.Context(), `select pg_advisory_xact_lock(1)`))
	add(t, db, onceq.Job{})
	w := start(t, db, onceq.WorkerConfig{Lease: time.Second}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	eventually(t, "a commit that waits", func() bool {
		return sqlOne[int](t, db, `select count(*) from pg_locks where locktype = 'advisory' and objid = 1 and not granted
			and database = (select oid from pg_database where datname = current_database())`) == 1
	})
	eventually(t, "an error in the log", func() bool { return strings.Contains(w.logged(), "level=ERROR") })
	require.Contains(t, w.logged(), "not known whether outcomes were stored")
	claims := w.count(onceq.EventClaimed) // more than one if a writer gave up before its commit
	commit(t, gate)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Equal(t, claims, w.count(onceq.EventClaimed))
}

// A pool that is closed under a running worker never comes back, so Run ends. Nothing is lost, and nothing runs twice.
func TestRun_EndsWithAnErrorWhenItsPoolIsClosed(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	pool := must[*pgxpool.Pool](t)(pgxpool.NewWithConfig(t.Context(), db.Pool.Config()))
	own := *db
	own.Pool = pool
	var ran sync.Map // how often each id ran
	began, leave := make(chan int64, 1), make(chan struct{})
	handler := handleTx(func(_ context.Context, _ pgx.Tx, l *onceq.Lease) error {
		n, _ := ran.LoadOrStore(l.ID, new(atomic.Int32))
		n.(*atomic.Int32).Add(1)
		select {
		case began <- l.ID:
			<-leave
		default:
		}
		return nil
	})
	w := start(t, &own, onceq.WorkerConfig{Lease: steady}, handler)
	first := add(t, db, onceq.Job{})
	eventually(t, "the first job", func() bool { return len(began) == 1 })
	closed := make(chan struct{})
	go func() { pool.Close(); close(closed) }()
	eventually(t, "the pool is closed", func() bool {
		conn, err := pool.Acquire(t.Context())
		if err == nil {
			conn.Release()
		}
		return err != nil
	})
	second := add(t, db, onceq.Job{})
	eventually(t, "the second job finds the pool closed", func() bool { return w.count(onceq.EventDeferred) > 0 })
	close(leave)
	err := receive(t, w.ended)
	w.ended <- err
	require.EqualError(t, err, "onceq: the pool was closed while a worker was running; stop workers before you close it")
	receive(t, closed)
	require.Equal(t, second, sqlOne[int64](t, db, `select id from onceq.jobs where attempts = 0 and leased_until is null`))
	db.Advance(time.Minute)
	db.RunOne(handler)
	for _, id := range []int64{first, second} {
		n, _ := ran.Load(id)
		require.EqualValues(t, 1, n.(*atomic.Int32).Load())
	}
}

// ⚠ While a handler ran, Drain asked every two milliseconds whether there is more, and each time it read all jobs that were due, those
// of other programs' kinds as well: twice, because it looked among all of them for those that had lost leases.
func TestTrap_DrainRestsWhileAHandlerRuns(t *testing.T) {
	t.Parallel()
	var claims, looks atomic.Int64
	db, _ := hooked(t, &statementHook{before: func(sql string) {
		switch {
		case strings.Contains(sql, "least(j.claims + 1, 1048575)"):
			claims.Add(1)
		case strings.Contains(sql, "j.unknown is not null"):
			looks.Add(1)
		}
	}})
	add(t, db, onceq.Job{})
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error {
		began, claimed, looked := time.Now(), claims.Load(), looks.Load()
		eventually(t, "claims", func() bool { return claims.Load() >= claimed+20 })
		assert.Greater(t, time.Since(began), time.Second, "each claim rests longer than the one before, up to a limit")
		claimed, looked = claims.Load()-claimed, looks.Load()-looked
		assert.Less(t, looked, claimed*3/2, "before a claim it looks among the first jobs, and now and then among all") // not after each claim
		return nil
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
}

// beside makes another schema in a test's database, with a Queue over the same pool.
func beside(t testing.TB, db *queuetest.DB, schema string) *queuetest.DB {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), owner(t, db).Config().ConnConfig)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	require.NoError(t, migrations.Up(t.Context(), conn, schema))
	_, err = conn.Exec(t.Context(), migrations.Grants(schema, db.Pool.Config().ConnConfig.User))
	require.NoError(t, err)
	other := *db
	other.Schema = schema
	other.Queue, err = onceq.New(db.Pool, &onceq.Config{Schema: schema})
	require.NoError(t, err)
	return &other
}

// All workers of a process over one pool share its connections, whatever their schemas. The one of a second schema takes no job
// while those of the first one hold all that handlers may have, and gets its share when the first of them ends.
func TestPool_WorkersOfAllSchemasShareTheConnections(t *testing.T) {
	t.Parallel()
	a := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 4 }))
	b := beside(t, a, "b")
	kind := onceq.Kind[int]{Name: "k"}
	for _, db := range []*queuetest.DB{a, b} {
		addMany(t, db, 8, onceq.Job{})
	}
	running, end := make(chan string, 100), make(chan struct{}, 100)
	endAll := sync.OnceFunc(func() { close(end) })
	defer endAll()
	hold := func(schema string) onceq.Handler {
		return kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
			if _, err := tx.Exec(ctx, `select 1`); err != nil {
				return err
			}
			running <- schema
			<-end
			_, err := a.Pool.Exec(ctx, `select 1`)
			return err
		})
	}
	first := start(t, a, onceq.WorkerConfig{}, hold("a"))
	for range 3 {
		require.Equal(t, "a", receive(t, running))
	}
	second := start(t, b, onceq.WorkerConfig{}, hold("b"))
	// It has looked at its jobs, and then for a rescan.
	apart := owner(t, a)
	eventually(t, "a rescan", func() (ok bool) {
		require.NoError(t, apart.QueryRow(t.Context(), `select exists (select from b.queues where rescanned_at > 'epoch')`).Scan(&ok))
		return ok
	})
	require.Zero(t, second.count(onceq.EventClaimed))
	require.Empty(t, running)
	end <- struct{}{}
	require.Equal(t, "b", receive(t, running), "the first schema has more than its share")
	require.Equal(t, 3, first.count(onceq.EventClaimed))
	endAll()
	until(t, a, noJobs)
	until(t, a, `not exists (select from b.jobs)`)
	require.NoError(t, errors.Join(first.stop(), second.stop()))
	require.Equal(t, 16, first.count(onceq.EventCompleted)+second.count(onceq.EventCompleted))
}

// A pool that the application closes ends a worker, also one whose handlers need no connection of it. So it does a Drain.
func TestWorker_EndsWhenThePoolIsClosed(t *testing.T) {
	t.Parallel()
	nothing := func(context.Context, *onceq.Lease) error { return nil }
	for name, h := range map[string]onceq.Handler{
		"plain":       handle(nothing),
		"transaction": handleTx(func(context.Context, pgx.Tx, *onceq.Lease) error { return nil }),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			pool, err := pgxpool.NewWithConfig(t.Context(), db.Pool.Config())
			require.NoError(t, err)
			behind := *db
			behind.Pool = pool
			w := start(t, &behind, onceq.WorkerConfig{PollInterval: time.Hour}, h)
			const waits = `exists (select from onceq.waiters where idle_until > statement_timestamp())`
			until(t, db, waits)
			pool.Close()
			err = receive(t, w.ended)
			w.ended <- err
			require.ErrorContains(t, err, "the pool was closed while a worker was running")
			until(t, db, `not exists (select from onceq.workers)`)
		})
	}
}

// The context of a Run ends while it starts. It was to end, so that is no error; for a Drain, which has left its work, it is one.
func TestWorker_AContextThatEndsWhileItStarts(t *testing.T) {
	t.Parallel()
	for name, statement := range map[string]string{"check": "pg_sequence_last_value", "identify": "select installation::text"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var end atomic.Pointer[context.CancelFunc]
			db := queuetest.New(t, queuetest.PoolConfig(func(cfg *pgxpool.Config) {
				cfg.ConnConfig.Tracer = &statementHook{before: func(sql string) {
					if cancel := end.Load(); cancel != nil && strings.Contains(sql, statement) {
						(*cancel)()
					}
				}}
			}))
			for _, drains := range []bool{false, true} {
				q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema, Logger: slog.New(slog.DiscardHandler)})
				require.NoError(t, err)
				worker, err := onceq.NewWorker(q, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
				require.NoError(t, err)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				end.Store(&cancel)
				if drains {
					require.ErrorIs(t, worker.Drain(ctx, 0), context.Canceled)
				} else {
					require.NoError(t, worker.Run(ctx))
				}
				require.Error(t, ctx.Err())
			}
		})
	}
}

// A job's own time-out counts in place of its kind's, shorter or none, in each form of handler, and travels with the metadata.
func TestWorker_AJobHasATimeoutOfItsOwn(t *testing.T) {
	t.Parallel()
	kind := onceq.Kind[string]{Name: "k", Timeout: 24 * time.Hour}
	handle := func(ctx context.Context, l *onceq.Lease, how string) error {
		end, ends := ctx.Deadline()
		switch {
		case how == "short":
			<-ctx.Done()
			return ctx.Err()
		case ends != (how != "none"), how == "long" && time.Until(end) < 25*time.Hour, how == "odd" && time.Until(end) > 25*time.Hour:
			return fmt.Errorf("%s ends: %v, %v", how, ends, end)
		case how == "long" && l.Metadata["a"] != "b":
			return fmt.Errorf("metadata %v", l.Metadata)
		}
		return nil
	}
	for name, h := range map[string]onceq.Handler{
		"lease": kind.Handle(handle),
		"tx":    kind.HandleTx(func(ctx context.Context, _ pgx.Tx, l *onceq.Lease, how string) error { return handle(ctx, l, how) }),
		"batch": kind.HandleBatch(1, func(ctx context.Context, _ pgx.Tx, all []onceq.Item[string]) error {
			return handle(ctx, all[0].Lease, all[0].Payload)
		}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			long := add(t, db, onceq.Job{Kind: "k", Payload: "long", Timeout: 48 * time.Hour, Metadata: map[string]string{"a": "b"}})
			none := add(t, db, onceq.Job{Kind: "k", Payload: "none", Timeout: onceq.NoTimeout})
			odd := add(t, db, onceq.Job{Kind: "k", Payload: "odd", Metadata: map[string]string{"onceq-timeout": "soon"}})
			short := add(t, db, onceq.Job{Kind: "k", Payload: "short", Timeout: time.Millisecond})
			db.Drain(h)
			job, err := db.Queue.Get(t.Context(), db.Pool, short)
			require.NoError(t, err)
			require.Equal(t, onceq.StateRetrying, job.State)
			require.Contains(t, job.Errors[0].Error, "handler ran longer than 1ms, its job's Timeout")
			for _, id := range []int64{long, none, odd} {
				_, err := db.Queue.Get(t.Context(), db.Pool, id)
				require.ErrorIs(t, err, onceq.ErrNotFound, "job %d was not completed", id)
			}
		})
	}
	db := queuetest.New(t)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Timeout: -2})
	require.ErrorContains(t, err, "Timeout is negative")
}
