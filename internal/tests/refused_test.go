package tests

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// A wish for another run beside a failure is a failure: it spends an attempt, and leaves a trace.
func TestFailure_AWishJoinedWithAnErrorIsAFailure(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, err := range map[string]error{
		"snooze":            errors.Join(boom, onceq.Snooze(1)),
		"snooze first":      errors.Join(onceq.Snooze(1), boom),
		"reschedule":        errors.Join(boom, onceq.Reschedule(time.Hour)),
		"two verbs":         fmt.Errorf("%w after %w", boom, onceq.Snooze(1)),
		"in flight":         errors.Join(boom, &onceq.InFlightError{RetryAfter: time.Millisecond}),
		"joined and joined": errors.Join(errors.Join(onceq.Snooze(1)), fmt.Errorf("more: %w", boom)),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.True(t, onceq.IsFailure(err))
			db := queuetest.New(t)
			sqlRun(t, db, ledger)
			kind := onceq.Kind[int]{Name: "k", MaxAttempts: 1}
			id := add(t, db, kind.Job(1))
			db.RunOne(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
				_, failed := tx.Exec(ctx, `insert into effects values (1, 1)`)
				return errors.Join(failed, err)
			}))
			info, got := db.Queue.Get(t.Context(), db.Pool, id)
			require.NoError(t, got)
			require.Equal(t, onceq.StateDead, info.State)
			require.Len(t, info.Errors, 1)
			require.Contains(t, info.Errors[0].Error, "boom")
			require.Zero(t, sqlOne[int](t, db, `select count(*) from effects`))
		})
	}
	for name, err := range map[string]error{
		"one":    onceq.Snooze(1),
		"two":    errors.Join(onceq.Snooze(1), onceq.Snooze(time.Hour)),
		"nested": fmt.Errorf("later: %w", errors.Join(onceq.Snooze(1))),
	} {
		require.False(t, onceq.IsFailure(err), name)
	}
}

// A pool whose sessions may only read is no reason to refuse a job.
func TestEnqueue_SettingsOfTheServerThatForbidIt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	cfg, err := pgxpool.ParseConfig(db.URL)
	require.NoError(t, err)
	cfg.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
	cfg.MaxConns = 1
	readOnly, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(readOnly.Close)
	r, err := db.Queue.Enqueue(t.Context(), readOnly, onceq.Job{Kind: "k", Payload: 1})
	require.NoError(t, err)
	require.NotZero(t, r.ID)
	r, err = db.Queue.Enqueue(t.Context(), readOnly, onceq.Job{Kind: "k", Payload: 1, Key: "a"})
	require.NoError(t, err)
	require.False(t, r.Duplicate)
	many, err := db.Queue.EnqueueMany(t.Context(), readOnly, []onceq.Job{{Kind: "k", Payload: 1}, {Kind: "k", Payload: 2}})
	require.NoError(t, err)
	require.Len(t, many, 2)
	// The caller's own transaction keeps its settings.
	tx, err := readOnly.Begin(t.Context())
	require.NoError(t, err)
	_, err = db.Queue.Enqueue(t.Context(), tx, onceq.Job{Kind: "k", Payload: 1})
	require.ErrorContains(t, err, "25006")
	require.NoError(t, tx.Rollback(t.Context()))
}

// A worker whose pool has no connection for a transaction gives the job to one that has.
func TestWorker_AnExhaustedPoolKeepsNoJob(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "k", MaxAttempts: 1, MaxLost: 100}
	handler := kind.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, int) error { return nil })
	cfg, err := pgxpool.ParseConfig(db.URL)
	require.NoError(t, err)
	cfg.MaxConns = 1
	small, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(small.Close)
	q, err := onceq.New(small, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: 2 * time.Second, ShutdownTimeout: -1}, handler)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	defer func() {
		cancel()
		require.NoError(t, receive(t, ended))
	}()
	until(t, db, `exists (select from onceq.waiters)`) // it works
	taken, err := small.Acquire(t.Context())           // the application keeps the only connection
	require.NoError(t, err)
	defer taken.Release()

	id := add(t, db, kind.Job(1))
	until(t, db, `exists (select from onceq.jobs where id = $1 and leased_until is not null)`, id) // the worker has claimed it
	start(t, db, onceq.WorkerConfig{Lease: steady}, handler)
	until(t, db, noJobs)
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.job_history`), "completed, and not dead")
}

// A server that ends idle sessions does not end the one that listens.
func TestWorker_ListensOnAServerThatEndsIdleSessions(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	cfg, err := pgxpool.ParseConfig(db.URL)
	require.NoError(t, err)
	cfg.ConnConfig.RuntimeParams["idle_session_timeout"] = "500ms"
	cfg.ConnConfig.RuntimeParams["application_name"] = "listens"
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{PollInterval: time.Minute}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	defer func() {
		cancel()
		require.NoError(t, receive(t, ended))
	}()
	until(t, db, `exists (select from onceq.waiters)`) // it listens
	until(t, asOwner(t, db), `exists (select from pg_stat_activity
                       where datname = current_database() and application_name = 'listens' and state = 'idle'
                       and clock_timestamp() - state_change > interval '1500 ms')`)
}

// A trigger of the application refuses the next job of a lane. The outcome of the job before it cannot be stored meanwhile. Health names
// the trigger, and nothing is lost: once it is gone, both jobs end well.
func TestLane_ANextJobThatPostgresRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ limited, inTx bool }{
		"in a lease":          {},
		"in a lease, limited": {limited: true},
		"in a transaction":    {inTx: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			sqlRun(t, db, ledger)
			sqlRun(t, asOwner(t, db), `
create function public.refuse() returns trigger language plpgsql as $$
begin
  raise exception 'no % today', new.kind;
end $$`)
			sqlRun(t, asOwner(t, db), `
create trigger refuse before insert on jobs
  for each row when (new.kind = 'b') execute function public.refuse()`)
			require.Contains(t, findings(t, db, "trigger")[0].Detail, `"refuse"`)
			a := onceq.Kind[charge]{Name: "a", LaneFamily: "f", Lane: charges.Lane, Keep: time.Hour, Backoff: func(int, error) time.Duration { return time.Second }}
			if c.limited {
				a.Limit = func(c charge) string { return fmt.Sprint("of ", c.Customer) }
			}
			b := a
			b.Name = "b"
			with := func(k onceq.Kind[charge]) onceq.Handler {
				if !c.inTx {
					return k.Handle(func(context.Context, *onceq.Lease, charge) error { return nil })
				}
				return k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ charge) error {
					_, err := tx.Exec(ctx, `insert into effects values ($1, 1)`, l.ID)
					return err
				})
			}
			ids := []int64{add(t, db, a.Job(charge{1, 1})), add(t, db, b.Job(charge{1, 2}))}
			w := start(t, db, onceq.WorkerConfig{Lease: steady}, with(a), with(b))
			eventually(t, "a report", func() bool { return strings.Contains(w.logged(), "no b today") })
			require.True(t, sqlOne[bool](t, db, `select exists (select from onceq.job_waits where id = $1)`, ids[1]))
			sqlRun(t, asOwner(t, db), `drop function public.refuse cascade`)
			until(t, db, noJobs+` and not exists (select from onceq.job_waits)`)
			require.NoError(t, w.stop())
			for _, id := range ids {
				info, err := db.Queue.Get(t.Context(), db.Pool, id)
				require.NoError(t, err)
				require.Equal(t, onceq.StateCompleted, info.State)
			}
			require.Equal(t, c.inTx, sqlOne[bool](t, db, `select count(*) = 2 and count(distinct job) = 2 from effects`))
			require.NoError(t, db.Check())
		})
	}
}
