package queuetest_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func scan[T any](t testing.TB, pool *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	var value T
	require.NoError(t, pool.QueryRow(t.Context(), sql, args...).Scan(&value))
	return value
}

func TestNew(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	require.Equal(t, "onceq", db.Schema)
	require.Equal(t, "onceq", db.Queue.Schema())
	require.NoError(t, db.Queue.Check(t.Context()))
	require.NoError(t, db.Check())
	require.Equal(t, t.Name(), scan[string](t, db.Pool, "select current_setting('application_name')"))
	require.Zero(t, scan[int](t, db.Pool, "select count(*) from onceq.jobs"))

	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	require.Equal(t, scan[string](t, db.Pool, "select current_database()"), conn.Config().Database)
	require.NoError(t, conn.Close(t.Context()))
}

func TestVersions(t *testing.T) {
	t.Parallel()
	require.Equal(t, onceq.SchemaVersion, migrations.Version)
}

func TestDatabasesAreIsolated(t *testing.T) {
	t.Parallel()
	for i := range 8 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			_, err := db.Pool.Exec(t.Context(), "create table mine (n int)")
			require.NoError(t, err)
		})
	}
}

func TestSchema(t *testing.T) {
	t.Parallel()
	const odd = `we"ird Schema.ä`
	db := queuetest.New(t, queuetest.Schema(odd))
	require.Equal(t, odd, db.Schema)
	require.NoError(t, db.Queue.Check(t.Context()))
	require.True(t, scan[bool](t, db.Pool, "select exists (select from pg_tables where schemaname = $1 and tablename = 'jobs')", odd))
	require.False(t, scan[bool](t, db.Pool, "select exists (select from pg_namespace where nspname = 'onceq')"))
}

func TestConfig(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Schema: "elsewhere"}))
	require.Equal(t, "elsewhere", db.Schema)
	require.NoError(t, db.Queue.Check(t.Context()))

	db = queuetest.New(t, queuetest.Config(onceq.Config{Schema: "elsewhere"}), queuetest.Schema("here"))
	require.Equal(t, "here", db.Schema)
}

func TestNoMigrations(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())
	require.False(t, scan[bool](t, db.Pool, "select exists (select from pg_namespace where nspname = 'onceq')"))
	require.Error(t, db.Queue.Check(t.Context()))
}

func TestPoolConfig(t *testing.T) {
	t.Parallel()
	require.EqualValues(t, 10, queuetest.New(t).Pool.Config().MaxConns)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.MaxConns = 3
		c.ConnConfig.RuntimeParams["search_path"] = ""
	}))
	require.EqualValues(t, 3, db.Pool.Config().MaxConns)
	require.Empty(t, scan[string](t, db.Pool, "select current_setting('search_path')"))
}

// fake is a test whose end the real test decides.
type fake struct {
	testing.TB
	ctx      context.Context
	mu       sync.Mutex
	cleanups []func()
	errors   []string
	told     func() // called when it reports an error, if not nil
}

func (f *fake) Context() context.Context { return f.ctx }
func (f *fake) Name() string             { return "fake" }
func (f *fake) Cleanup(fn func())        { f.cleanups = append(f.cleanups, fn) }
func (f *fake) Errorf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errors = append(f.errors, fmt.Sprintf(format, args...))
	if f.told != nil {
		f.told()
	}
}

func (f *fake) end() {
	for i := len(f.cleanups) - 1; i >= 0; i-- {
		f.cleanups[i]()
	}
}

func TestCleanupDropsDatabase(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	f := &fake{TB: t, ctx: ctx}
	db := queuetest.New(f)
	name := scan[string](t, db.Pool, "select current_database()")
	// A connection that the test forgot must not keep the database from being dropped.
	forgotten, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	cancel() // a test's context ends before its clean-up
	f.end()
	require.Empty(t, f.errors)
	require.Error(t, forgotten.Ping(t.Context()))

	other := queuetest.New(t)
	require.False(t, scan[bool](t, other.Pool, "select exists (select from pg_database where datname = $1)", name))
}

func TestCleanupTellsOfLeakedConnection(t *testing.T) {
	t.Parallel()
	f := &fake{TB: t, ctx: t.Context()}
	db := queuetest.New(f)
	conn, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	db.Impatient()
	f.told = conn.Release // so that the pool is closed after all, and leaves no goroutine
	f.end()
	require.Len(t, f.errors, 1)
	require.Contains(t, f.errors[0], "never given back")
}

func TestDropStale(t *testing.T) {
	queuetest.New(t) // starts this process's administrative session
	url := queuetest.URL(t)
	admin, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, admin.Close(context.Background())) })

	now, old := time.Now().Unix(), time.Now().Add(-2*time.Hour).Unix()
	databases := map[string]bool{ // name to whether it stays
		fmt.Sprintf("onceq_test_%d_deadprocess_1", old):                false,
		fmt.Sprintf("onceq_test_%d_deadprocess_1", now):                true, // its process may reconnect soon
		fmt.Sprintf("onceq_test_%d_%s_1000000", old, queuetest.Tag(t)): true, // its process is alive
		"onceq_test_results": true, // belongs to somebody else
	}
	for name := range databases {
		_, err := admin.Exec(t.Context(), "create database "+name)
		require.NoError(t, err)
		t.Cleanup(func() {
			_, err := admin.Exec(context.Background(), "drop database if exists "+name)
			require.NoError(t, err)
		})
	}
	queuetest.DropStale(t, url)
	for name, stays := range databases {
		var there bool
		require.NoError(t, admin.QueryRow(t.Context(), "select exists (select from pg_database where datname = $1)", name).Scan(&there))
		require.Equal(t, stays, there, name)
	}
}

// The administrative session outlives a long test, and one that died is replaced: it is also what keeps other processes from
// dropping this one's databases.
func TestAdministrativeSession(t *testing.T) {
	t.Parallel()
	found, err := pgserver.Start(t.Context(), pgserver.Options{Own: true, Settings: map[string]string{"idle_session_timeout": "1h"}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, found.Stop()) })
	tag, admin := queuetest.Admin(t, found)
	var first, second uint32
	require.NoError(t, admin(t.Context(), func(conn *pgx.Conn) error {
		first = conn.PgConn().PID()
		var timeout string
		err := conn.QueryRow(t.Context(), `show idle_session_timeout`).Scan(&timeout)
		require.Equal(t, "0", timeout)
		return err
	}))

	other, err := pgx.Connect(t.Context(), found.URL())
	require.NoError(t, err)
	var ended bool
	require.NoError(t, other.QueryRow(t.Context(), `select pg_terminate_backend($1, 60000)`, first).Scan(&ended))
	require.True(t, ended)
	require.NoError(t, admin(t.Context(), func(conn *pgx.Conn) error {
		second = conn.PgConn().PID()
		return conn.Ping(t.Context())
	}))
	var pids []uint32
	require.NoError(t, other.QueryRow(t.Context(), `select array_agg(pid) from pg_stat_activity where application_name = $1`, "onceq test "+tag).Scan(&pids))
	require.Equal(t, []uint32{second}, pids)
	require.NoError(t, other.Close(t.Context()))
}

// On a shared server a process leaves nothing behind, not even templates, even if it is killed.
func TestAKilledProcessLeavesNoDatabase(t *testing.T) {
	t.Parallel()
	const child = "ONCEQ_TEST_CHILD"
	if os.Getenv(child) != "" {
		db := queuetest.New(t)
		require.NoError(t, db.Queue.Check(t.Context()))
		fmt.Println(queuetest.Tag(t))
		select {}
	}
	if runtime.GOOS == "windows" {
		t.Skip("the next process drops them")
	}
	db := queuetest.New(t)
	program, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(program, "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), child+"=1", "ONCEQ_TEST_DATABASE_URL="+queuetest.URL(t))
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	tag, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	databases := func() int {
		return scan[int](t, db.Pool, `select count(*) from pg_database where split_part(datname, '_', 4) = $1`, strings.TrimSpace(tag))
	}
	require.Equal(t, 2, databases(), "a template and a copy")
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	for databases() > 0 { // ends by the time limit of the whole test run, if never before
		time.Sleep(20 * time.Millisecond)
	}
}

// The first New of a process may be aborted. Later ones must not find half a template.
func TestTemplateAfterGivenUpTest(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f := &fatal{fake: fake{TB: t, ctx: ctx}}
	require.PanicsWithError(t, errFatal.Error(), func() { queuetest.New(f, queuetest.Schema("given up")) })
	f.end()
	require.NoError(t, queuetest.New(t, queuetest.Schema("given up")).Queue.Check(t.Context()))
}

type fatal struct{ fake }

var errFatal = errors.New("fatal")

func (f *fatal) Fatalf(string, ...any) { panic(errFatal) }

func BenchmarkNew(b *testing.B) {
	queuetest.New(b) // makes the server and the template
	for b.Loop() {
		f := &fake{TB: b, ctx: b.Context()}
		db := queuetest.New(f)
		if err := db.Pool.Ping(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		f.end()
		b.StartTimer()
	}
}

// A handler's own completion is not yet the end of a run: the end of its transaction decides.
func TestRunOne_OfAHandlerThatCompletesAndRollsBack(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1})
	require.NoError(t, err)
	undo := true
	kind := onceq.Kind[any]{Name: "k"}
	handler := kind.Handle(func(ctx context.Context, l *onceq.Lease, _ any) error {
		tx, err := db.Pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if err := l.Complete(ctx, tx); err != nil {
			return err
		}
		if undo {
			return errors.New("undone")
		}
		return tx.Commit(ctx)
	})
	ran := db.RunOne(handler)
	require.Equal(t, onceq.StateRetrying, ran.State)
	require.ErrorContains(t, ran.Err, "undone")
	undo = false
	db.Advance(time.Hour)
	require.Equal(t, onceq.StateCompleted, db.RunOne(handler).State)
}

// Opening sessions is most of what a short run costs, so the worker's own, at most three without a listener, stay for the next
// run of the test.
func TestRunOne_OpensItsSessionsOnce(t *testing.T) {
	t.Parallel()
	var opened atomic.Int64
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { opened.Add(1); return nil }
	}))
	handler := onceq.Kind[int]{Name: "k"}.Handle(func(context.Context, *onceq.Lease, int) error { return nil })
	for range 5 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1})
		require.NoError(t, err)
		require.Equal(t, onceq.StateCompleted, db.RunOne(handler).State)
	}
	require.LessOrEqual(t, opened.Load()-1, int64(3), "without the pool's own one")
}

// The worker of a run has the configuration of the test's Queue.
func TestRunOne_WithTheConfigOfTheQueue(t *testing.T) {
	t.Parallel()
	for name, run := range map[string]func(*queuetest.DB, onceq.Handler){
		"RunOne":       func(db *queuetest.DB, h onceq.Handler) { db.RunOne(h) },
		"Drain":        func(db *queuetest.DB, h onceq.Handler) { db.Drain(h) },
		"DeliverTwice": func(db *queuetest.DB, h onceq.Handler) { db.DeliverTwice(h) },
		"Race":         func(db *queuetest.DB, h onceq.Handler) { db.Race(h) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			heard := make(map[onceq.EventType]bool)
			var log bytes.Buffer
			db := queuetest.New(t, queuetest.Config(onceq.Config{
				Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
				Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
					mu.Lock()
					defer mu.Unlock()
					heard[e.Type] = true
				}),
			}))
			_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1})
			require.NoError(t, err)
			kind := onceq.Kind[int]{Name: "k"}
			run(db, kind.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
			require.True(t, heard[onceq.EventClaimed] && heard[onceq.EventCompleted], "%v", heard)
			require.Contains(t, log.String(), string(onceq.EventClaimed))
		})
	}
}

// The event of a cancellation has no token. It ends the run in which the handler asked for it.
func TestRunOne_OfAHandlerThatCancelsItsJob(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "k"}
	handler := kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		if _, err := db.Queue.Cancel(ctx, db.Pool, l.ID); err != nil {
			return err
		}
		return errors.New("not wanted any more")
	})
	for range 2 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
		require.NoError(t, err)
	}
	require.Equal(t, onceq.StateCancelled, db.RunOne(handler).State)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	ran := db.Drain(handler)
	require.Len(t, ran, 2)
	for _, r := range ran {
		require.Equal(t, onceq.StateCancelled, r.State)
	}
}

// This workflow takes three days. Its handler reads times of the queue and of the application, and the database's clock.
func TestAdvance_AWorkflowOfThreeDays(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for _, sql := range []string{
		`create table users (id int primary key, created_at timestamptz not null default now(), said text[] not null default '{}')`,
		`insert into users (id) values (7)`,
	} {
		_, err := db.Pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	kind := onceq.Kind[int]{Name: "welcome"}
	handler := kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, user int) error {
		var created time.Time
		if err := tx.QueryRow(ctx, `select created_at from users where id = $1`, user).Scan(&created); err != nil {
			return err
		}
		now, err := l.Now(ctx)
		if err != nil {
			return err
		}
		age := now.Sub(created)
		if _, err := tx.Exec(ctx, `update users set said = said || $2::text where id = $1`, user, fmt.Sprint("day ", int(age.Hours()/24))); err != nil {
			return err
		}
		if age < 72*time.Hour {
			return onceq.Reschedule(24 * time.Hour)
		}
		return nil
	})
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(7))
	require.NoError(t, err)
	for range 3 {
		require.Equal(t, onceq.StateDelayed, db.RunOne(handler).State)
		require.Empty(t, db.Drain(handler), "before a day has passed")
		db.Advance(24*time.Hour, "users.created_at")
	}
	require.Equal(t, onceq.StateCompleted, db.RunOne(handler).State)
	require.Equal(t, []string{"day 0", "day 1", "day 2", "day 3"}, scan[[]string](t, db.Pool, `select said from users`))

	f := &fatal{fake: fake{TB: t, ctx: t.Context()}}
	other := queuetest.New(f)
	require.PanicsWithError(t, errFatal.Error(), func() { other.Advance(time.Hour, "created_at") })
	f.end()
}

// Advance makes a job older, but for its effect's provider it stays the same job.
// What the provider gets as the key of work outside of jobs stays the same, as a job's does, for as long as it is the same
// work; RunAgain's time passes all the same.
func TestAdvance_WorkOutsideOfJobsKeepsItsKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	var keys []string
	do := func(result error) error {
		_, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "invoice 7", Window: time.Hour}, func(_ context.Context, c *onceq.FenceLease) (string, error) {
			keys = append(keys, c.IdempotencyKey())
			return "", result
		})
		return err
	}
	lost := errors.New("the answer is lost")
	require.ErrorIs(t, do(lost), onceq.ErrUncertain)
	db.Advance(10 * time.Hour)
	require.ErrorIs(t, do(lost), onceq.ErrUncertain)
	db.Advance(10 * time.Hour)
	require.NoError(t, do(nil))
	require.Equal(t, keys[0], keys[1])
	require.Equal(t, keys[0], keys[2])

	db.Advance(2 * time.Hour) // the window is over: this is new work
	require.ErrorIs(t, do(lost), onceq.ErrUncertain)
	require.NotEqual(t, keys[0], keys[3])
	db.Advance(10 * time.Hour)
	require.ErrorIs(t, do(onceq.NotApplied(lost)), lost)
	db.Advance(10 * time.Hour)
	require.ErrorIs(t, do(lost), onceq.ErrUncertain)
	require.Equal(t, keys[3], keys[4])
	require.Equal(t, keys[3], keys[5])
	db.Advance(10 * time.Hour)
	require.ErrorIs(t, do(nil), onceq.ErrHeld)
}

func TestAdvance_MovesTheTimesOfErrors(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "pay", MaxAttempts: 2}
	handler := kind.Handle(func(context.Context, *onceq.Lease, int) error { return errors.New("refused") })
	res, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(7))
	require.NoError(t, err)
	for _, state := range []onceq.State{onceq.StateRetrying, onceq.StateDead} {
		require.Equal(t, state, db.RunOne(handler).State)
		before, err := db.Queue.Get(t.Context(), db.Pool, res.ID)
		require.NoError(t, err)
		db.Advance(48 * time.Hour)
		after, err := db.Queue.Get(t.Context(), db.Pool, res.ID)
		require.NoError(t, err)
		require.Len(t, after.Errors, len(before.Errors))
		for i := range before.Errors {
			require.Equal(t, 48*time.Hour, before.Errors[i].At.Sub(after.Errors[i].At))
			before.Errors[i].At = after.Errors[i].At
		}
		require.Equal(t, before.Errors, after.Errors)
	}
}

// A date cannot move by an hour. It moved by a day, each time.
func TestAdvance_MovesADateByWholeDaysOnly(t *testing.T) {
	t.Parallel()
	r := &recorder{TB: t}
	db := queuetest.New(r)
	_, err := db.Pool.Exec(t.Context(), `create table users (id int, born date); insert into users values (7, '2020-03-01')`)
	require.NoError(t, err)
	born := func() (s string) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select born::text from users`).Scan(&s))
		return s
	}
	db.Advance(48*time.Hour, "users.born")
	require.Equal(t, "2020-02-28", born())
	require.PanicsWithValue(t, r, func() { db.Advance(time.Hour, "users.born") })
	require.Equal(t, []string{"queuetest: Advance: users.born is a date, which moves by whole days only, and d is 1h0m0s"}, r.said)
	require.Equal(t, "2020-02-28", born())
}

func TestAdvance_AJobGrowsOld(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "pay", Backoff: func(int, error) time.Duration { return 24 * time.Hour }}
	keys := make(map[string]bool)
	days, calls := []int{}, 0
	handler := kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		now, err := l.Now(ctx)
		require.NoError(t, err)
		age := now.Sub(l.CreatedAt)
		days = append(days, int(age.Hours()/24))
		keys[l.IdempotencyKey("charge")] = true
		if _, err := onceq.Once(ctx, l, "charge", func(_ context.Context, key string) (string, error) {
			calls++
			keys[key] = true
			return "charged", nil
		}); err != nil {
			return err
		}
		if age < 72*time.Hour {
			return errors.New("not yet settled")
		}
		return onceq.Fatal(errors.New("given up after three days"))
	})
	res, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(7))
	require.NoError(t, err)
	for range 3 {
		require.Equal(t, onceq.StateRetrying, db.RunOne(handler).State)
		db.Advance(24 * time.Hour)
	}
	require.Equal(t, onceq.StateDead, db.RunOne(handler).State)
	require.Equal(t, []int{0, 1, 2, 3}, days)
	require.Equal(t, 1, calls, "the effect is the job's all the time")

	db.Advance(24 * time.Hour) // also for jobs in the history
	_, err = onceqops.New(db.Queue).Redrive(t.Context(), db.Pool, res.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDead, db.RunOne(handler).State)
	require.Equal(t, []int{0, 1, 2, 3, 4}, days)
	require.Equal(t, 1, calls)
	require.Len(t, keys, 1)
	effects, err := onceqops.New(db.Queue).Effects(t.Context(), db.Pool, res.ID)
	require.NoError(t, err)
	require.Len(t, effects, 1)
	require.Contains(t, keys, effects[0].IdempotencyKey)
	require.NoError(t, db.Check())
}

// recorder is a TB that keeps what a call reports, and ends the call as the end of a test does.
type recorder struct {
	testing.TB
	said []string
}

func (r *recorder) Errorf(f string, a ...any) { r.said = append(r.said, fmt.Sprintf(f, a...)) }
func (r *recorder) Fatal(a ...any)            { r.said = append(r.said, fmt.Sprint(a...)); panic(r) }
func (r *recorder) Fatalf(f string, a ...any) { r.Errorf(f, a...); panic(r) }
func (r *recorder) FailNow()                  { panic(r) }

func TestRunOne_SaysWhatIsThereIfNothingIsDue(t *testing.T) {
	t.Parallel()
	r := &recorder{TB: t}
	db := queuetest.New(r)
	handler := onceq.Kind[int]{Name: "mail"}.Handle(func(context.Context, *onceq.Lease, int) error { return nil })
	runOne := func(handlers ...onceq.Handler) []string {
		r.said = nil
		require.PanicsWithValue(t, r, func() { db.RunOne(handlers...) })
		return r.said
	}
	require.Equal(t, []string{"queuetest: RunOne: no job of these handlers is due"}, runOne(handler))
	for _, job := range []onceq.Job{{Kind: "mail", Delay: 48 * time.Hour}, {Kind: "mail", Delay: 72 * time.Hour}, {Kind: "mial"}, {Kind: "mial"}, {Kind: "wire", Delay: time.Hour}} {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
		require.NoError(t, err)
	}
	require.Regexp(t, `^queuetest: RunOne: no job of these handlers is due; the next one, of kind mail, in 17[0-9]{4} s \(see Advance\); due jobs of kinds without a handler: mial in queue default$`, runOne(handler)[0])
	said := runOne()
	require.Len(t, said, 1)
	require.Contains(t, said[0], "NewWorker needs at least one handler")
}

// Each event comes after its outcome was stored, from the goroutine that stored it: that of a job may come after that of one that
// its handler enqueued.
func TestDrain_RunsAreInTheOrderOfTheirClaims(t *testing.T) {
	t.Parallel()
	reported := make(chan struct{})
	db := queuetest.New(t, queuetest.Config(onceq.Config{Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
		switch {
		case e.Type == onceq.EventCompleted && e.Kind == "first":
			<-reported
		case e.Type == onceq.EventCompleted && e.Kind == "third":
			close(reported)
		}
	})}))
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "first"})
	require.NoError(t, err)
	then := func(kind, next string) onceq.Handler {
		k := onceq.Kind[any]{Name: kind}
		return k.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ any) error {
			if next == "" {
				return nil
			}
			_, err := db.Queue.Enqueue(ctx, tx, onceq.Job{Kind: next})
			return err
		})
	}
	var order []string
	for _, ran := range db.Drain(then("first", "second"), then("second", "third"), then("third", "")) {
		order = append(order, ran.Kind)
	}
	require.Equal(t, []string{"first", "second", "third"}, order)
}
