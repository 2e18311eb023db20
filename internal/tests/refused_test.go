package tests

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
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
	until(t, db, `exists (select from pg_stat_activity where datname = current_database() and application_name = 'listens' and state = 'idle'
                       and clock_timestamp() - state_change > interval '1500 ms')`)
}

// refuseKind has Postgres refuse that jobs of a kind come into jobs.
func refuseKind(t *testing.T, db *queuetest.DB, kind string) {
	t.Helper()
	sqlRun(t, db, `create sequence public.refusals; grant all on sequence public.refusals to public`)
	sqlRun(t, db, `
create function public.refuse() returns trigger language plpgsql as $$
begin
  if new.kind = tg_argv[0] then
    perform nextval('public.refusals'); -- counts what is rolled back, too
    raise exception 'no % today', new.kind;
  end if;
  return new;
end $$`)
	sqlRun(t, db, fmt.Sprintf(`create trigger refuse before insert on %s.jobs for each row execute function public.refuse('%s')`, db.Schema, kind))
}

// A trigger of the application refuses the next job of a lane. That is no fault of the job before it, which ends as its handler says,
// and no reason for other lanes to stand still.
func TestLane_ANextJobThatPostgresRefuses(t *testing.T) {
	t.Parallel()
	limited := func(k onceq.Kind[charge]) onceq.Kind[charge] {
		k.Limit = func(c charge) string { return fmt.Sprint("of ", c.Customer) }
		return k
	}
	a := onceq.Kind[charge]{Name: "a", LaneFamily: "f", Lane: charges.Lane, MaxAttempts: 1, Keep: time.Hour}
	unkept := a
	unkept.Keep = 0
	type run func(context.Context, *onceq.Lease) error
	inLease := func(k onceq.Kind[charge], r run) onceq.Handler {
		return k.Handle(func(ctx context.Context, l *onceq.Lease, _ charge) error { return r(ctx, l) })
	}
	inTx := func(k onceq.Kind[charge], r run) onceq.Handler {
		return k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ charge) error {
			_, err := tx.Exec(ctx, `insert into effects values ($1, 1)`, l.ID)
			return errors.Join(err, r(ctx, l))
		})
	}
	inBatch := func(k onceq.Kind[charge], r run) onceq.Handler {
		return k.HandleBatch(10, func(ctx context.Context, tx pgx.Tx, items []onceq.Item[charge]) error {
			var errs []error
			for _, i := range items {
				_, err := tx.Exec(ctx, `insert into effects values ($1, 1)`, i.Lease.ID)
				errs = append(errs, err, r(ctx, i.Lease))
			}
			return errors.Join(errs...)
		})
	}
	completes := func(ctx context.Context, l *onceq.Lease) error { return nil }
	for name, c := range map[string]struct {
		kind  onceq.Kind[charge]
		with  func(onceq.Kind[charge], run) onceq.Handler
		run   run
		runs  int // of the handler, at most
		state onceq.State
	}{
		"completed":                     {a, inLease, completes, 1, onceq.StateCompleted},
		"completed, limited":            {limited(a), inLease, completes, 1, onceq.StateCompleted},
		"completed, not kept":           {unkept, inLease, completes, 1, 0},
		"completed, not kept, limited":  {limited(unkept), inLease, completes, 1, 0},
		"completed by itself":           {a, inLease, func(ctx context.Context, l *onceq.Lease) error { return l.Complete(ctx, nil) }, 1, onceq.StateCompleted},
		"in a transaction":              {a, inTx, completes, 2, onceq.StateCompleted},
		"in a transaction, limited":     {limited(a), inTx, completes, 2, onceq.StateCompleted},
		"in a transaction, not kept":    {unkept, inTx, completes, 2, 0},
		"in a batch":                    {a, inBatch, completes, 3, onceq.StateCompleted},
		"in a batch, limited, not kept": {limited(unkept), inBatch, completes, 3, 0},
		"dead":                          {a, inLease, func(context.Context, *onceq.Lease) error { return errors.New("no") }, 1, onceq.StateDead},
		"dead, in a transaction":        {a, inTx, func(context.Context, *onceq.Lease) error { return errors.New("no") }, 1, onceq.StateDead},
		"dead, limited":                 {limited(a), inLease, func(context.Context, *onceq.Lease) error { return errors.New("no") }, 1, onceq.StateDead},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 4)
			db := queuetest.New(t)
			sqlRun(t, db, ledger)
			refuseKind(t, db, "b")
			b := c.kind
			b.Name = "b"
			first := add(t, db, c.kind.Job(charge{1, 1}))
			waits := add(t, db, b.Job(charge{1, 2}))
			var r ran
			w := start(t, db, onceq.WorkerConfig{Lease: steady}, c.with(c.kind, func(ctx context.Context, l *onceq.Lease) error {
				if l.ID == first {
					r.add(1)
				}
				return c.run(ctx, l)
			}), inLease(b, completes))
			until(t, db, `not exists (select from onceq.jobs where id = $1 union all select from onceq.job_waits where id = $1)`, first)
			for customer := 2; customer < 40; customer++ { // those that share a slot of promoters with the first lane, too
				add(t, db, c.kind.Job(charge{customer, 1}))
				add(t, db, c.kind.Job(charge{customer, 2}))
			}
			until(t, db, noJobs+` and not exists (select from onceq.job_waits where kind = 'a')`)
			eventually(t, "a report", func() bool { return strings.Contains(w.logged(), "no b today") })
			const nothingDue = `not exists (select from onceq.lane_calls where due <= statement_timestamp())`
			until(t, db, nothingDue)
			refusals := func() int { return sqlOne[int](t, db, `select last_value from public.refusals`) }
			before := refusals()
			for customer := range 5 { // what comes behind the refused job is put off with it, and leaves no calls of its own
				add(t, db, b.Job(charge{1, 3 + customer}))
				until(t, db, nothingDue)
			}
			require.LessOrEqual(t, sqlOne[int](t, db, `select coalesce(max(n), 0) from (select count(*) as n from onceq.lane_calls group by lane) c`), 2)
			require.Less(t, refusals()-before, 20, "it is tried again each minute, and not for each job that comes")
			require.NoError(t, w.stop())
			require.NotEmpty(t, r.list())
			require.LessOrEqual(t, len(r.list()), c.runs)
			if c.state != 0 {
				info, err := db.Queue.Get(t.Context(), db.Pool, first)
				require.NoError(t, err)
				require.Equal(t, c.state, info.State)
				require.LessOrEqual(t, len(info.Errors), 1)
				for _, e := range info.Errors {
					require.Equal(t, "no", e.Error)
				}
			}
			require.Zero(t, w.count(onceq.EventLeaseLost)+w.count(onceq.EventStale))
			require.True(t, sqlOne[bool](t, db, `select exists (select from onceq.job_waits where id = $1)`, waits))
			e, err := db.Queue.Explain(t.Context(), db.Pool, waits)
			require.NoError(t, err)
			require.True(t, slices.ContainsFunc(e.Reasons, func(r onceq.Reason) bool { return strings.Contains(r.Advice, "Postgres refuses") }), e)
			require.NoError(t, db.Check())

			sqlRun(t, db, `drop function public.refuse cascade`)
			sqlRun(t, db, `update onceq.lane_calls set due = statement_timestamp() where due < 'infinity' and lane <> ''`) // the minute is over
			start(t, db, onceq.WorkerConfig{Lease: steady}, inLease(b, completes))
			until(t, db, noJobs+` and not exists (select from onceq.job_waits)`)
		})
	}
}
