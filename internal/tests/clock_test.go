package tests

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// trapClock gives a database whose clock the test moves: the library's statements find a statement_timestamp() of the
// test's before they find that of Postgres, and so do the functions of the schema.
func trapClock(t *testing.T) (*queuetest.DB, func(time.Duration)) {
	t.Helper()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["search_path"] = "clock, pg_catalog"
	}))
	for _, sql := range []string{
		`create schema clock`,
		`create table clock.shift (by interval)`,
		`insert into clock.shift values ('0')`,
		`grant usage on schema clock to public; grant all on clock.shift to public`,
		`create function clock.statement_timestamp() returns timestamptz stable language sql as
		 'select pg_catalog.statement_timestamp() + (select by from clock.shift)'`,
		`do $$
		declare f text;
		begin
		  for f in select oid::regprocedure::text from pg_proc where pronamespace = (select relnamespace from pg_class where relname = 'jobs' and relkind = 'r') loop
		    execute 'alter function ' || f || ' set search_path = clock, pg_catalog, pg_temp';
		  end loop;
		end $$`,
	} {
		sqlRun(t, asOwner(t, db), sql)
	}
	db.Pool.Reset()
	return db, func(d time.Duration) {
		t.Helper()
		_, err := db.Pool.Exec(t.Context(), `update clock.shift set by = $1::bigint * interval '1 microsecond'`, d.Microseconds())
		require.NoError(t, err)
	}
}

// trapStoppedClock is trapClock with a clock that starts later and stands still until the test sets it. What depends on the
// time between two statements then does not depend on how slow the machine is.
func trapStoppedClock(t *testing.T) (*queuetest.DB, func(time.Duration)) {
	t.Helper()
	db, set := trapClock(t)
	for _, sql := range []string{
		`alter table clock.shift add start timestamptz not null default pg_catalog.now()`,
		`create or replace function clock.statement_timestamp() returns timestamptz stable language sql as
		 'select start + by from clock.shift'`,
	} {
		sqlRun(t, asOwner(t, db), sql)
	}
	db.Pool.Reset()
	return db, set
}

// A server's clock may be ahead for a moment: a step of NTP, a resumed machine, a failover to a host with another clock.
// Workers must not be left with a position that due jobs reach only an hour later.
func TestTrap_AClockSetBackDoesNotStallTheWorkers(t *testing.T) {
	t.Parallel()
	db, shift := trapClock(t)
	ran := make(chan int64, 10)
	w := start(t, db, onceq.WorkerConfig{}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.ID
		return nil
	}))
	run := func(when string) {
		t.Helper()
		r, err := db.Queue.Enqueue(t.Context(), db.Pool, work.Job(1))
		require.NoError(t, err)
		require.Equal(t, onceq.StateWaiting, r.State)
		select {
		case id := <-ran:
			require.Equal(t, r.ID, id)
			// It must be completed before the clock moves. Otherwise its lease runs out and it rightly runs again.
			require.Eventually(t, func() bool { return sqlOne[int](t, db, `select count(*)::int from onceq.jobs`) == 0 }, patience, time.Millisecond)
		case <-time.After(patience):
			var due string
			_ = db.Pool.QueryRow(t.Context(), `select (run_at - statement_timestamp())::text from onceq.jobs`).Scan(&due)
			t.Errorf("%s: the job does not run; it is due in %s", when, due)
		}
	}
	run("before")
	shift(time.Hour)
	run("an hour ahead")
	shift(0)
	run("set back")
	require.NoError(t, w.stop())
}

// A handler of a batch that enqueues the key of one of its own jobs is told to reschedule, as any other handler is.
func TestTrap_ABatchHandlerThatEnqueuesItsOwnKeyIsToldToReschedule(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	k := onceq.Kind[int]{Name: "k", Key: func(n int) string { return fmt.Sprint(n) }, MaxAttempts: 1}
	for n := range 2 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, k.Job(n))
		require.NoError(t, err)
	}
	var sizes []int
	db.Drain(k.HandleBatch(2, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) error {
		sizes = append(sizes, len(jobs))
		_, err := db.Queue.Enqueue(ctx, tx, k.Job(jobs[len(jobs)-1].Payload))
		if !errors.Is(err, onceq.ErrOwnKey) {
			t.Errorf("%d jobs: %v", len(jobs), err)
		}
		return nil
	}))
	require.Equal(t, []int{2}, sizes)
}

// How old an intent is that a clock dated which was ahead, nobody knows: the provider may have forgotten its key.
func TestRunAgain_AfterAClockThatWasAhead(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		ahead  time.Duration
		policy onceq.Policy
		runs   bool
	}{
		"by days":                 {48 * time.Hour, onceq.RunAgain(24 * time.Hour), false},
		"by days, by default":     {48 * time.Hour, onceq.Policy{}, false},
		"and it never forgets":    {48 * time.Hour, onceq.RunAgain(onceq.Forever), true},
		"as clocks may always be": {30 * time.Second, onceq.RunAgain(24 * time.Hour), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, shift := trapStoppedClock(t)
			ctx := t.Context()
			f := fenceOf(t, db, onceq.FenceSpec{Key: "k", Policy: c.policy})
			shift(c.ahead)
			require.NoError(t, fenceClaim(t, f, nil).Uncertain(ctx, nil, errors.New("time-out")))
			shift(0)
			if c.runs {
				fenceClaim(t, f, nil)
				return
			}
			for _, later := range []time.Duration{0, c.ahead + time.Hour} {
				shift(later)
				_, err := f.Claim(ctx, nil)
				require.ErrorIs(t, err, onceq.ErrHeld)
			}
		})
	}
}
