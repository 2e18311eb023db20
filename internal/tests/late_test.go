package tests

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// leasesPass waits for longer than a lease. The time itself is what the test is about.
func leasesPass(t testing.TB, pool *pgxpool.Pool, d time.Duration) {
	_, err := pool.Exec(context.Background(), `select pg_sleep($1::float8)`, d.Seconds())
	require.NoError(t, err)
}

// When a client idles in a handler's transaction for longer than a lease, the server takes it for frozen. A handler that is
// alive may idle for longer, whatever it has open.
func TestHandleTx_MayIdleForLongerThanALease(t *testing.T) {
	t.Parallel()
	idle := func(t testing.TB, db *queuetest.DB) { leasesPass(t, db.Pool, steady*3/2) }
	forms := map[string]func(t testing.TB, ctx context.Context, db *queuetest.DB, tx pgx.Tx) error{
		"nothing": func(t testing.TB, ctx context.Context, db *queuetest.DB, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `insert into effects values (1, 1)`); err != nil {
				return err
			}
			idle(t, db)
			var one int
			return tx.QueryRow(ctx, `select 1`).Scan(&one)
		},
		"rows": func(t testing.TB, ctx context.Context, db *queuetest.DB, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `select 1`); err != nil {
				return err
			}
			rows, err := tx.Query(ctx, `select n from generate_series(1, 3) n where $1::int = 1`, 1)
			if err != nil {
				return err
			}
			defer rows.Close()
			sum := 0
			for rows.Next() {
				var n int
				if err := rows.Scan(&n); err != nil {
					return err
				}
				if sum += n; n == 1 {
					idle(t, db)
				}
			}
			if sum != 6 || rows.Err() != nil {
				return errors.Join(rows.Err(), errors.New("other rows"))
			}
			_, err = tx.Exec(ctx, `insert into effects values (1, 1)`)
			return err
		},
		"the rows of the opening": func(t testing.TB, ctx context.Context, db *queuetest.DB, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, `insert into effects select 1, n from generate_series(1, $1::int) n returning token`, 1)
			if err != nil {
				return err
			}
			idle(t, db)
			tokens, err := pgx.CollectRows(rows, pgx.RowTo[int64])
			if len(tokens) != 1 {
				return errors.Join(err, errors.New("other rows"))
			}
			return err
		},
		"a batch": func(t testing.TB, ctx context.Context, db *queuetest.DB, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `select 1`); err != nil {
				return err
			}
			b := &pgx.Batch{}
			b.Queue(`insert into effects values ($1, 1)`, 1)
			b.Queue(`select 2`)
			r := tx.SendBatch(ctx, b)
			if _, err := r.Exec(); err != nil {
				return err
			}
			idle(t, db)
			var two int
			if err := r.QueryRow().Scan(&two); err != nil {
				return err
			}
			return r.Close()
		},
		"an aborted savepoint": func(t testing.TB, ctx context.Context, db *queuetest.DB, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `insert into effects values (1, 1)`); err != nil {
				return err
			}
			s, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if _, err := s.Exec(ctx, `select 1 / 0`); err == nil {
				return errors.New("no error")
			}
			idle(t, db)
			return s.Rollback(ctx)
		},
		"the connection": func(t testing.TB, ctx context.Context, db *queuetest.DB, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `insert into effects values (1, 1)`); err != nil {
				return err
			}
			s, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			_ = s.Conn()
			if err := s.Rollback(ctx); err != nil { // a savepoint's rollback must not bring back the limit from before it
				return err
			}
			idle(t, db)
			_, err = tx.Conn().Exec(ctx, `select 1`)
			return err
		},
		"the connection at once": func(t testing.TB, ctx context.Context, db *queuetest.DB, tx pgx.Tx) error {
			conn := tx.Conn()
			if _, err := conn.Exec(ctx, `insert into effects values (1, 1)`); err != nil {
				return err
			}
			idle(t, db)
			_, err := conn.Exec(ctx, `select 1`)
			return err
		},
	}
	for name, use := range forms {
		for _, timeout := range []time.Duration{onceq.NoTimeout, time.Hour} {
			if testing.Short() && (timeout != onceq.NoTimeout || name != "rows" && name != "the connection at once") {
				continue // each takes more than a lease
			}
			t.Run(name+" "+timeout.String(), func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t)
				sqlRun(t, db, ledger)
				kind := onceq.Kind[int]{Name: "k", Timeout: timeout, MaxAttempts: 1}
				w := start(t, db, onceq.WorkerConfig{Lease: steady}, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
					return use(t, ctx, db, tx)
				}))
				add(t, db, kind.Job(1))
				until(t, db, noJobs)
				require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from effects`), w.logged())
			})
		}
	}
}

// A handler that does not return keeps its job for a stated time only. Then its lease runs out, its transaction ends, and
// the log and Health say so.
func TestWorker_AHandlerThatIgnoresItsContextLosesItsJob(t *testing.T) {
	t.Parallel()
	kind := onceq.Kind[int]{Name: "stubborn", Timeout: time.Millisecond, MaxLost: 2}
	insert := func(tx pgx.Tx) error {
		_, err := tx.Exec(context.Background(), `insert into effects values (1, 1)`)
		return err
	}
	forms := map[string]func(finish chan struct{}) onceq.Handler{
		"lease": func(finish chan struct{}) onceq.Handler {
			return kind.Handle(func(context.Context, *onceq.Lease, int) error {
				<-finish
				return nil
			})
		},
		"idle in its transaction": func(finish chan struct{}) onceq.Handler {
			return kind.HandleTx(func(_ context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
				err := insert(tx)
				<-finish
				return err
			})
		},
		"batch": func(finish chan struct{}) onceq.Handler {
			return kind.HandleBatch(10, func(_ context.Context, tx pgx.Tx, _ []onceq.Item[int]) error {
				err := insert(tx)
				<-finish
				return err
			})
		},
		"transaction not opened": func(finish chan struct{}) onceq.Handler {
			return kind.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, int) error {
				<-finish
				return nil
			})
		},
		"in a statement": func(finish chan struct{}) onceq.Handler {
			return kind.HandleTx(func(_ context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
				_, err := tx.Exec(context.Background(), `insert into effects select 1, 1 from pg_sleep(36000)`)
				<-finish
				return err
			})
		},
	}
	for name, form := range forms {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			sqlRun(t, db, ledger)
			finish := make(chan struct{})
			w := start(t, db, onceq.WorkerConfig{Lease: 6 * time.Second, ShutdownTimeout: -1}, form(finish))
			id := add(t, db, kind.Job(1))
			until(t, db, `exists (select from onceq.job_history where id = $1 and state = $2 and lost = 2 and attempts = 0)`, id, onceq.StateDead)
			require.Equal(t, 2, strings.Count(w.logged(), "a handler does not return although its context has ended"))
			require.Contains(t, w.logged(), fmt.Sprintf("kind=stubborn job=%d running=", id))
			findings := func() (n int) {
				found, err := onceqops.New(w.q).Health(context.Background())
				require.NoError(t, err)
				for _, f := range found {
					if f.What == "handler" {
						n++
					}
				}
				return n
			}
			require.Equal(t, 2, findings())
			until(t, db, `not exists (select from pg_stat_activity where query like '%pg_sleep(36000)%' and state = 'active' and pid <> pg_backend_pid() and datname = current_database())`)
			close(finish)
			eventually(t, "no finding of handlers that have returned", func() bool { return findings() == 0 })
			require.Zero(t, sqlOne[int](t, db, `select count(*) from effects`))
			require.NoError(t, w.stop())
		})
	}
}

// Run returns in bounded time, whatever a handler that does not return waits for, and whatever other outcomes wait for.
func TestShutdown_IsBoundedBesideHandlersThatIgnoreIt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	running, locked, returned := make(chan struct{}, 3), make(chan struct{}), make(chan error, 1)
	finish := make(chan struct{})
	good, stubborn, tx := onceq.Kind[int]{Name: "good"}, onceq.Kind[int]{Name: "stubborn"}, onceq.Kind[int]{Name: "tx"}
	w := start(t, db, onceq.WorkerConfig{Lease: time.Hour, ShutdownTimeout: -1},
		good.Handle(func(context.Context, *onceq.Lease, int) error {
			running <- struct{}{}
			<-locked
			return nil
		}),
		stubborn.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
			running <- struct{}{}
			<-locked
			err := l.Complete(context.Background(), nil) // uses one of the worker's own connections
			returned <- err
			return err
		}),
		tx.HandleTx(func(_ context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
			_, err := tx.Exec(context.Background(), `select 1`)
			running <- struct{}{}
			<-finish
			return err
		}))
	add(t, db, good.Job(1))
	add(t, db, stubborn.Job(1))
	add(t, db, tx.Job(1))
	for range 3 {
		receive(t, running)
	}
	lock, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = lock.Exec(t.Context(), `select from onceq.jobs where kind <> 'tx' for update`)
	require.NoError(t, err)
	close(locked)
	until(t, db, `(select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()) >= 2`)
	w.cancel()
	err = receive(t, w.ended)
	w.ended <- err
	require.ErrorContains(t, err, `2 handlers did not return`)
	until(t, db, `exists (select from onceq.jobs where kind = 'tx' for update skip locked)`)
	close(finish)
	require.NoError(t, lock.Rollback(t.Context()))
	require.NoError(t, receive(t, returned))
}

// A handler's transaction that is still committing when cancelled handlers have had their time is waited for, and what becomes of it
// is stored.
func TestShutdown_WaitsForACommitUnderWay(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	must[pgconn.CommandTag](t)(owner(t, db).Exec(t.Context(), `
		create function refuse() returns trigger language plpgsql as $$ begin
			perform set_config('lock_timeout', '0', true);
			perform pg_advisory_xact_lock(1);
			raise exception 'refused';
			end $$;
		create constraint trigger refuse after delete on jobs deferrable initially deferred for each row execute function refuse()`))
	gate := begin(t, db)
	must[pgconn.CommandTag](t)(gate.Exec(t.Context(), `select pg_advisory_xact_lock(1)`))
	add(t, db, onceq.Job{})
	w := start(t, db, onceq.WorkerConfig{Lease: time.Minute, ShutdownTimeout: -1}, handleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease) error {
		_, err := tx.Exec(ctx, `select 1`)
		return err
	}))
	until(t, db, `exists (select from pg_stat_activity where datname = current_database() and wait_event = 'advisory')`)
	w.cancel()
	select {
	case err := <-w.ended:
		w.ended <- err
		t.Error("Run has returned: ", err)
	case <-time.After(8 * time.Second): // cancelled handlers have 5 s
	}
	commit(t, gate)
	require.NoError(t, w.stop())
	require.True(t, sqlOne[bool](t, db, `select leased_until is null and lost = 0 and attempts = 0 from onceq.jobs`), w.logged())
}

// A row that a stranger has locked holds up the outcome of its own job and no other, and nothing runs a second time: neither when
// the lock lasts longer than a lease, nor because others' outcomes went with it.
func TestOutcomes_ALockedRowHoldsUpItsOwnJobOnly(t *testing.T) {
	t.Parallel()
	for name, locks := range map[string]struct {
		sql  string
		left int
	}{
		"two jobs'":   {`select from onceq.jobs where key = '7' or key = '8' for update`, 2},
		"two fences'": {`select from onceq.job_fences where key = '7' or key = '8' for update`, 2},
		"all jobs'":   {`select from onceq.jobs for update`, conformance.Sized(30, 100)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.Schema("onceq"))
			jobs := conformance.Sized(30, 100)
			var runs atomic.Int32
			started, end := make(chan bool, 2*jobs), make(chan bool)
			w := start(t, db, onceq.WorkerConfig{Lease: steady, Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: jobs}}}, handle(func(context.Context, *onceq.Lease) error {
				runs.Add(1)
				started <- true
				<-end
				return nil
			}))
			all := make([]onceq.Job, jobs)
			for i := range all {
				all[i] = onceq.Job{Kind: "k", Key: fmt.Sprint(i), Payload: i}
			}
			_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, all)
			require.NoError(t, err)
			for range jobs {
				receive(t, started)
			}
			tx, err := db.Pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(context.Background()) }()
			_, err = tx.Exec(t.Context(), locks.sql)
			require.NoError(t, err)
			close(end) // many outcomes at once

			until(t, db, `(select count(*) from onceq.jobs) = $1`, locks.left)
			eventually(t, "a report", func() bool { return strings.Contains(w.logged(), "another transaction has locked the row of job") })
			leasesPass(t, db.Pool, steady*3/2)
			require.EqualValues(t, jobs, runs.Load())
			require.NoError(t, tx.Commit(t.Context()))
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.EqualValues(t, jobs, runs.Load())
		})
	}
}

// A worker has the outcome of a job, whose lease has run out because somebody had locked its row, and the row is free before the
// outcome is tried again. A rescan by this worker does not take the job for lost.
func TestOutcomes_WhatAWorkerHasIsNotLost(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	conn := owner(t, db)
	exec := func(statement string) {
		_, err := conn.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	// Nothing extends a lease, and no outcome is stored.
	exec(`create function stay() returns trigger language plpgsql as $$ begin return null; end $$;
	      create trigger stay before update on jobs for each row when (old.claims = new.claims and new.leased_until > old.leased_until) execute function stay();
	      create function refuse() returns trigger language plpgsql as $$ begin raise 'locked' using errcode = '55P03'; end $$;
	      create trigger refuse before delete on jobs for each row when (old.kind = 'k') execute function refuse()`)
	var runs atomic.Int32
	ran, lost := make(chan bool), onceq.Kind[any]{Name: "lost"}
	w := start(t, db, onceq.WorkerConfig{Lease: steady},
		handle(func(context.Context, *onceq.Lease) error { runs.Add(1); return nil }),
		lost.Handle(func(context.Context, *onceq.Lease, any) error { ran <- true; return nil }))
	id := add(t, db, onceq.Job{Kind: "k"})
	eventually(t, "a run", func() bool { return runs.Load() == 1 })
	sqlRun(t, db, `update onceq.jobs set leased_until = statement_timestamp() where id = $1`, id)
	for range 2 { // after the first one, a rescan has seen the job
		other := add(t, db, onceq.Job{Kind: "lost", RunAt: time.Now().Add(time.Hour)})
		sqlRun(t, db, `update onceq.jobs set claims = 1, lost = 1, run_at = (select run_at from onceq.jobs where id = $2) where id = $1`, other, id)
		receive(t, ran)
	}
	require.EqualValues(t, 1, runs.Load())
	exec(`drop trigger refuse on jobs`)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.EqualValues(t, 1, runs.Load())
}

// Two workers over one pool, and of each a job whose row is locked: the connections for outcomes are not both kept waiting.
func TestOutcomes_LockedRowsOfTwoWorkersLeaveAConnection(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	block, started := make(chan struct{}), make(chan struct{}, 100)
	first, second := onceq.Kind[int]{Name: "first", Queue: "first"}, onceq.Kind[int]{Name: "second", Queue: "second"}
	handler := func(_ context.Context, _ *onceq.Lease, n int) error {
		if started <- struct{}{}; n == 0 {
			<-block
		}
		return nil
	}
	cfg := onceq.WorkerConfig{Lease: time.Hour}
	start(t, db, cfg, first.Handle(handler))
	start(t, db, cfg, second.Handle(handler))
	for _, kind := range []string{"first", "second"} {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: kind, Queue: kind, Payload: 0})
		require.NoError(t, err)
		receive(t, started)
	}
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select from onceq.jobs for update`)
	require.NoError(t, err)
	close(block)
	until(t, db, `exists (select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database())`)
	for n := range 20 {
		kind := []string{"first", "second"}[n%2]
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: kind, Queue: kind, Payload: 1})
		require.NoError(t, err)
	}
	until(t, db, `2 = (select count(*) from onceq.jobs)`)
	require.NoError(t, tx.Rollback(t.Context()))
	until(t, db, noJobs)
}

// A worker that ends waits for such rows no longer than a lease, and neither does Drain.
func TestOutcomes_LockedRowsDoNotKeepAWorkerFromEnding(t *testing.T) {
	t.Parallel()
	for _, drains := range []bool{false, true} {
		t.Run(fmt.Sprint("drains ", drains), func(t *testing.T) {
			t.Parallel()
			jobs := conformance.Sized(30, 100)
			db := queuetest.New(t, queuetest.Schema("onceq"))
			addMany(t, db, jobs, onceq.Job{})
			started, end := make(chan bool, jobs), make(chan bool)
			log := &working{}
			q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema, Logger: slog.New(slog.NewTextHandler(log, nil))})
			require.NoError(t, err)
			w, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: steady}, handle(func(context.Context, *onceq.Lease) error {
				started <- true
				<-end
				return nil
			}))
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() {
				if drains {
					ended <- w.Drain(ctx, jobs)
				} else {
					ended <- w.Run(ctx)
				}
			}()
			for range jobs {
				receive(t, started)
			}
			tx, err := db.Pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(context.Background()) }()
			_, err = tx.Exec(t.Context(), `select from onceq.jobs for update`)
			require.NoError(t, err)
			close(end)
			eventually(t, "a warning", func() bool { return strings.Contains(log.logged(), "another transaction has locked the row of job") })
			if !drains {
				cancel()
			}
			require.NoError(t, receive(t, ended))
			require.Contains(t, log.logged(), "it is not known whether outcomes were stored")
		})
	}
}

// ⚠ No beat can extend a lease while a handler's transaction has the job's row locked. When a long one ended without a commit and the
// worker went on with its jobs, their leases had run out, and until the next beat another worker took them for lost.
func TestTrap_LeasesOutlastALongTransactionThatIsRolledBack(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		size int // of a batch; 0 for none
		err  error
		ends string
	}{
		"a batch that fails":              {3, errors.New("bad day"), `select 1`},
		"a batch that ends its goroutine": {3, nil, `select 1`},
		"a batch in a conflict":           {3, nil, `do $$ begin raise 'again' using errcode = 'serialization_failure'; end $$`},
		"a conflict":                      {0, nil, `do $$ begin raise 'again' using errcode = 'deadlock_detected'; end $$`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var beats, calls atomic.Int64
			db, _ := hooked(t, &statementHook{after: func(sql string) {
				if strings.Contains(sql, "select n from extended") {
					beats.Add(1)
				}
			}})
			first := func(ctx context.Context, tx pgx.Tx) error {
				// As if this had taken a lease. It ends when the rows are locked, so that nobody takes the jobs for lost before that.
				sqlRun(t, db, `update onceq.jobs set leased_until = statement_timestamp() + interval '3 seconds'`)
				if _, err := tx.Exec(ctx, `select 1`); err != nil {
					return err
				}
				for from := beats.Load(); beats.Load() < from+2 || !sqlOne[bool](t, db, `select bool_and(leased_until < clock_timestamp()) from onceq.jobs`); {
					time.Sleep(time.Millisecond)
				}
				_, err := tx.Exec(ctx, c.ends)
				if err = errors.Join(err, c.err); err == nil {
					runtime.Goexit()
				}
				return err
			}
			run := func(ctx context.Context, tx pgx.Tx) error {
				if calls.Add(1) == 1 {
					return first(ctx, tx)
				}
				assert.True(t, sqlOne[bool](t, db, `select bool_and(leased_until > clock_timestamp()) from onceq.jobs`))
				return nil
			}
			kind := onceq.Kind[int]{Name: "k", MaxAttempts: 1, MaxLost: 1, Timeout: onceq.NoTimeout}
			handler := kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error { return run(ctx, tx) })
			if c.size > 0 {
				handler = kind.HandleBatch(c.size, func(ctx context.Context, tx pgx.Tx, _ []onceq.Item[int]) error { return run(ctx, tx) })
			}
			addMany(t, db, max(1, c.size), onceq.Job{Payload: 1})
			w := start(t, db, onceq.WorkerConfig{Lease: steady}, handler)
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.Greater(t, calls.Load(), int64(1))
			require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.job_history`))
		})
	}
}

// For a while the role may not log in. What a handler has done meanwhile does not run again.
func TestOutcomes_ARoleThatMayNotLogInForAWhile(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	may := asOwner(t, db)
	role := pgx.Identifier{"role_" + db.Pool.Config().ConnConfig.Database}.Sanitize()
	password := rand.Text()
	sqlRun(t, may, `create role `+role+` login superuser password '`+password+`' valid until '`+time.Now().Add(time.Hour).UTC().Format(time.RFC3339)+`'`)
	cfg := db.Pool.Config()
	cfg.ConnConfig.User, cfg.ConnConfig.Password = "role_"+cfg.ConnConfig.Database, password
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		pool.Close()
		sqlRun(t, may, `drop role `+role)
	})
	behind := *db
	behind.Pool = pool
	var runs atomic.Int32
	running, end := make(chan bool), make(chan bool)
	w := start(t, &behind, onceq.WorkerConfig{Lease: time.Minute}, handle(func(context.Context, *onceq.Lease) error {
		if runs.Add(1) == 1 {
			running <- true
			<-end
		}
		return nil
	}))
	add(t, db, onceq.Job{})
	receive(t, running)
	sqlRun(t, may, `alter role `+role+` nologin`)
	out := regexp.MustCompile(`\(SQLSTATE 28000\)`)
	eventually(t, "no connection of the role, nor one that is on its way", func() bool {
		n := sqlOne[int](t, may, `select count(pg_terminate_backend(pid)) from pg_stat_activity where usename = $1`, cfg.ConnConfig.User)
		return n == 0 && out.MatchString(w.logged())
	})
	close(end)
	refused := regexp.MustCompile(`onceq: finish: .*\(SQLSTATE 28000\)`)
	eventually(t, "an outcome that could not be stored", func() bool { return refused.MatchString(w.logged()) })
	sqlRun(t, may, `alter role `+role+` login`)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.EqualValues(t, 1, runs.Load())
}

// An outcome is on its way over a connection that goes silent. It is stored over another one while the lease lasts.
func TestOutcomes_AConnectionThatGoesSilent(t *testing.T) {
	t.Parallel()
	var silence atomic.Pointer[func()]
	db := queuetest.New(t, queuetest.PoolConfig(func(cfg *pgxpool.Config) {
		cfg.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			if f := silence.Load(); f != nil && strings.Contains(sql, "u(id, claims, holder, result)") && silence.CompareAndSwap(f, nil) {
				(*f)()
			}
		}}
	}))
	behind, f := goingSilent(t, db)
	var runs atomic.Int32
	w := start(t, behind, onceq.WorkerConfig{Lease: 30 * time.Second}, handle(func(context.Context, *onceq.Lease) error {
		runs.Add(1)
		return nil
	}))
	until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
	silence.Store(&f)
	add(t, db, onceq.Job{})
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.EqualValues(t, 1, runs.Load())
}
