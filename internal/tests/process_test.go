//go:build unix

package tests

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

const (
	ledger = `
create table effects (job bigint, token bigint);
create table started (job bigint, token bigint);
create table ended (token bigint, error text);
create table gate (open bool)`
	processQueue  = "ONCEQ_TEST_WORKER_PROCESS"
	processLease  = "ONCEQ_TEST_WORKER_LEASE"
	processBeside = "ONCEQ_TEST_BESIDE" // a second schema that it works too
)

// ledgerHandlers write one row for each job that was done. In "quick", the effect and the completion commit in the worker's
// transaction. A job of "tx" or "own" that has never been lost waits in the handler for the gate: "tx" in the worker's
// transaction, "own" before it begins a transaction of its own.
func ledgerHandlers(pool *pgxpool.Pool) []onceq.Handler {
	effect := func(ctx context.Context, db onceq.DB, l *onceq.Lease) error {
		_, err := db.Exec(ctx, `insert into effects values ($1, $2)`, l.ID, l.Token)
		return err
	}
	pause := func(l *onceq.Lease) error {
		ctx := context.Background() // it ignores the loss of its lease
		if _, err := pool.Exec(ctx, `insert into started values ($1, $2)`, l.ID, l.Token); err != nil {
			return err
		}
		for open := l.Lost > 0; !open; {
			if err := pool.QueryRow(ctx, `select exists (select from gate), pg_sleep(0.01)::text`).Scan(&open, nil); err != nil {
				return err
			}
		}
		return nil
	}
	end := func(l *onceq.Lease, err error) error {
		_, _ = pool.Exec(context.Background(), `insert into ended values ($1, $2)`, l.Token, fmt.Sprint(err))
		return err
	}
	quick := onceq.Kind[int]{Name: "quick", MaxLost: 100}
	tx := onceq.Kind[int]{Name: "tx", Timeout: onceq.NoTimeout}
	own := onceq.Kind[int]{Name: "own"}
	return []onceq.Handler{
		quick.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error { return effect(ctx, tx, l) }),
		tx.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
			if err := effect(ctx, tx, l); err != nil {
				return end(l, err)
			}
			_ = pause(l)
			_, err := tx.Exec(context.Background(), `select 1`)
			return end(l, err)
		}),
		own.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
			ctx := context.Background()
			if err := pause(l); err != nil {
				return err
			}
			return end(l, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if err := effect(ctx, tx, l); err != nil {
					return err
				}
				return l.Complete(ctx, tx)
			}))
		}),
	}
}

// TestWorkerProcess tests nothing. The tests below start it as processes of their own.
func TestWorkerProcess(t *testing.T) {
	raw := os.Getenv(processQueue)
	if raw == "" {
		t.Skip("only as a process of another test")
	}
	pool, q := conformance.TakeOver(t, raw)
	handlers := append(ledgerHandlers(pool), poisonHandlers(pool, func(fn func(pgx.Tx) error) error {
		return pgx.BeginFunc(context.Background(), pool, fn)
	}, func() { os.Exit(1) })...)
	handlers = append(handlers, stamping.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
		at := time.Now().UnixMicro()
		_, err := pool.Exec(context.Background(), `insert into stamps values ($1, $2)`, at, l.Weight)
		return err
	}))
	lease, err := time.ParseDuration(os.Getenv(processLease))
	require.NoError(t, err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: lease}, handlers...)
	require.NoError(t, err)
	if schema := os.Getenv(processBeside); schema != "" {
		q, err := onceq.New(pool, &onceq.Config{Schema: schema})
		require.NoError(t, err)
		other, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: lease}, handlers...)
		require.NoError(t, err)
		go func() { _ = other.Run(context.Background()) }()
	}
	require.NoError(t, w.Run(context.Background()))
}

type process struct {
	t   testing.TB
	cmd *exec.Cmd
}

func startProcess(t testing.TB, db *queuetest.DB, lease time.Duration, env ...string) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestWorkerProcess$")
	cmd.Env = append(os.Environ(), processQueue+"="+conformance.HandOver(t, db), processLease+"="+lease.String())
	cmd.Env = append(cmd.Env, env...)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	p := &process{t, cmd}
	t.Cleanup(p.kill)
	return p
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func (p *process) signal(s syscall.Signal) { require.NoError(p.t, p.cmd.Process.Signal(s)) }

func TestProcesses_AgainstEachOtherAndKilledAgainAndAgain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, ledger)
	jobs := conformance.Sized(1500, 6000)
	addMany(t, db, jobs, onceq.Job{Kind: "quick", Key: "k"})
	workers := []*process{startProcess(t, db, time.Second), startProcess(t, db, time.Second)}
	for kill := 1; kill <= 4; kill++ {
		until(t, db, `(select count(*) from effects) >= $1::int`, kill*jobs/6)
		i := kill % 2
		workers[i].kill()
		workers[i] = startProcess(t, db, time.Second)
	}
	until(t, db, noJobs)
	require.Equal(t, jobs, sqlOne[int](t, db, `select count(*) from effects`))
	require.Equal(t, jobs, sqlOne[int](t, db, `select count(distinct job) from effects`))
	for _, w := range workers {
		w.kill()
	}
}

func TestProcesses_AStoppedOneThatContinuesCommitsNothing(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"tx", "own"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			sqlRun(t, db, ledger)
			id := add(t, db, onceq.Job{Kind: kind, Key: "k"})
			stopped := startProcess(t, db, steady)
			until(t, db, `exists (select from started)`)
			first := sqlOne[int64](t, db, `select min(token) from started`)
			stopped.signal(syscall.SIGSTOP)
			db.ExpireLease(id) // in a transaction: when the server has ended that
			start(t, db, onceq.WorkerConfig{Lease: time.Second}, ledgerHandlers(db.Pool)...)
			until(t, db, noJobs)
			second := sqlOne[int64](t, db, `select token from effects`)
			require.Greater(t, second, first)
			sqlRun(t, db, `insert into gate values (true)`)
			stopped.signal(syscall.SIGCONT)
			until(t, db, `exists (select from ended where token = $1)`, first)
			says := sqlOne[string](t, db, `select error from ended where token = $1`, first)
			require.NotEqual(t, "<nil>", says)
			if kind == "own" {
				require.Contains(t, says, "complete refused")
			}
			require.Equal(t, fmt.Sprint(id, second), sqlOne[string](t, db, `select string_agg(job || ' ' || token, ', ') from effects`))
		})
	}
}

// durableServer gives a queue on a server that belongs to the test and may be stopped at any moment.
func durableServer(t *testing.T) (*pgserver.Server, *pgxpool.Pool, *onceq.Queue) {
	t.Helper()
	server, err := pgserver.Start(t.Context(), pgserver.Options{Own: true, Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	_, err = conn.Exec(t.Context(), ledger)
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
	pool, err := pgxpool.New(context.Background(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	q, err := onceq.New(pool, nil)
	require.NoError(t, err)
	return server, pool, q
}

// withStandby is durableServer with a standby that follows it.
func withStandby(t *testing.T) (primary, standby *pgserver.Server, direct *pgxpool.Pool, q *onceq.Queue) {
	t.Helper()
	primary, direct, q = durableServer(t)
	if primary.BinDir() == "" {
		t.Skip("a standby needs the server's binaries on this machine")
	}
	standby, err := primary.Standby(t.Context(), "standby", nil, pgserver.Options{Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, standby.Stop()) })
	return primary, standby, direct, q
}

// moving returns a pool like direct whose address leads to another server when leadTo says so. Its sessions are called worker.
func moving(t *testing.T, direct *pgxpool.Pool, first *pgserver.Server) (pool *pgxpool.Pool, leadTo func(*pgserver.Server)) {
	t.Helper()
	var address atomic.Value
	leadTo = func(s *pgserver.Server) {
		u, err := url.Parse(s.URL())
		require.NoError(t, err)
		address.Store(u.Host)
	}
	leadTo(first)
	cfg := direct.Config()
	cfg.ConnConfig.RuntimeParams["application_name"] = "worker"
	cfg.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", address.Load().(string))
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool, leadTo
}

// A standby that had not got all of it is promoted while a handler has its transaction open. On the new primary the number of
// that transaction belongs to another one, which was committed. The handler did not commit, so its job runs again.
func TestHandleTx_ThePromotedServerGivesItsTransactionsNumberToAnother(t *testing.T) {
	t.Parallel()
	primary, standby, direct, q := withStandby(t)
	there, err := pgxpool.New(t.Context(), standby.URL())
	require.NoError(t, err)
	defer there.Close()
	db, promoted := &queuetest.DB{Pool: direct, Schema: "onceq"}, &queuetest.DB{Pool: there, Schema: "onceq"}
	pool, leadTo := moving(t, direct, primary)

	kind := onceq.Kind[int]{Name: "plain", Backoff: func(int, error) time.Duration { return 0 }}
	claimed, begin, begun, end := make(chan bool, 10), make(chan bool), make(chan uint64, 10), make(chan bool)
	start(t, &queuetest.DB{Pool: pool, Schema: "onceq"}, onceq.WorkerConfig{Lease: time.Minute}, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
		claimed <- true
		select {
		case <-begin:
		case <-ctx.Done():
			return ctx.Err()
		}
		var id uint64
		err := tx.QueryRow(ctx, `insert into effects values ($1, $2) returning pg_current_xact_id()`, l.ID, l.Token).Scan(&id)
		begun <- id
		<-end
		if err == nil {
			_, err = tx.Exec(ctx, `select`)
		}
		return err
	}))
	_, err = q.Enqueue(t.Context(), direct, kind.Job(1))
	require.NoError(t, err)
	receive(t, claimed)
	until(t, promoted, `exists (select from onceq.jobs where claims = 1)`)
	sqlRun(t, promoted, `select pg_promote()`)
	for range 100 { // the numbers here are ahead of those there
		sqlOne[uint64](t, db, `select pg_current_xact_id()`)
	}
	close(begin)
	id := receive(t, begun)
	for last := uint64(0); last < id; {
		last = sqlOne[uint64](t, promoted, `select pg_current_xact_id()`)
		require.LessOrEqual(t, last, id)
	}
	leadTo(standby)
	sqlRun(t, db, `select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'worker'`)
	time.Sleep(1100 * time.Millisecond) // the pool asks a connection that idled for a second whether it is alive
	close(end)
	until(t, promoted, `not exists (select from onceq.jobs)`)
	require.Equal(t, 1, sqlOne[int](t, promoted, `select count(*)::int from effects`))
	require.Zero(t, sqlOne[int](t, promoted, `select count(*)::int from onceq.job_history`))
}

// For a while the server's address leads to a standby that only reads. What handlers have done meanwhile does not run again, and
// soon after the address is right the worker is connected to the primary, although the standby has ended no connection.
func TestWorker_AnAddressThatLeadsToAStandbyForAWhile(t *testing.T) {
	t.Parallel()
	primary, standby, direct, q := withStandby(t)
	db := &queuetest.DB{Pool: direct, Schema: "onceq"}
	pool, leadTo := moving(t, direct, primary)

	plain := onceq.Kind[int]{Name: "plain"}
	lined := onceq.Kind[int]{Name: "lined", Lane: func(int) string { return "one" }}
	var runs sync.Map
	running, end := make(chan bool, 100), make(chan bool)
	handler := func(_ context.Context, l *onceq.Lease, n int) error {
		count, _ := runs.LoadOrStore(fmt.Sprint(l.Kind, n), new(atomic.Int32))
		if count.(*atomic.Int32).Add(1); n == 0 {
			running <- true
			<-end
		}
		return nil
	}
	w := start(t, &queuetest.DB{Pool: pool, Schema: "onceq"}, onceq.WorkerConfig{Lease: time.Minute}, plain.Handle(handler), lined.Handle(handler))
	enqueue := func(n int) {
		_, err := q.EnqueueMany(t.Context(), direct, []onceq.Job{plain.Job(n), lined.Job(n)})
		require.NoError(t, err)
	}
	enqueue(0)
	receive(t, running)
	receive(t, running)
	leadTo(standby)
	sqlRun(t, db, `select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'worker'`)
	close(end)
	refused := regexp.MustCompile(`onceq: finish: .*\(SQLSTATE (0A000|25006)\)`)
	eventually(t, "an outcome that the standby refuses", func() bool { return refused.MatchString(w.logged()) })
	there, err := pgxpool.New(t.Context(), standby.URL())
	require.NoError(t, err)
	defer there.Close()
	atStandby, err := onceq.New(there, nil)
	require.NoError(t, err)
	require.ErrorContains(t, atStandby.Check(t.Context()), "the server is a standby, which accepts no writes: connect to the primary: ")
	enqueue(1)
	leadTo(primary)
	until(t, db, `not exists (select from onceq.jobs union all select from onceq.job_waits)`)
	require.NoError(t, w.stop())
	require.NotContains(t, w.logged(), "cannot be stored")
	for _, job := range []string{"plain0", "plain1", "lined0", "lined1"} {
		count, ran := runs.Load(job)
		require.True(t, ran, job)
		require.EqualValues(t, 1, count.(*atomic.Int32).Load(), job)
	}
}

func TestWorker_SurvivesAnImmediateStopOfTheServer(t *testing.T) {
	t.Parallel()
	server, pool, q := durableServer(t)
	const jobs = 800
	many := make([]onceq.Job, jobs)
	for i := range many {
		many[i] = onceq.Job{Kind: "quick", Key: fmt.Sprint(i), Payload: i}
	}
	_, err := q.EnqueueMany(t.Context(), pool, many)
	require.NoError(t, err)
	kind := onceq.Kind[int]{Name: "quick", MaxLost: 100, Backoff: func(int, error) time.Duration { return 0 }}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: 5 * time.Second}, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
		_, err := tx.Exec(ctx, `insert into effects values ($1, $2)`, l.ID, l.Token)
		return err
	}))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	count := func(sql string) (n int) {
		if err := pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
			return -1
		}
		return n
	}
	eventually(t, "progress", func() bool { return count(`select count(*) from effects`) > 200 })
	require.NoError(t, server.Restart(true))
	eventually(t, "an empty queue", func() bool { return count(`select count(*) from onceq.jobs`) == 0 })
	cancel()
	require.NoError(t, <-ended)
	require.Equal(t, jobs, count(`select count(*) from effects`))
	require.Equal(t, jobs, count(`select count(distinct job) from effects`))
}

// What Enqueue has accepted survives an immediate stop of the server. An effect outside happens once for each job, because
// its provider deduplicates: an effect that was under way at the stop is uncertain and is sent again under the same key.
func TestOnce_AnImmediateStopOfTheServerLosesNoJobAndRepeatsNoEffect(t *testing.T) {
	t.Parallel()
	server, pool, q := durableServer(t)
	kind := onceq.Kind[int]{
		Name: "charge", MaxLost: 100, MaxAttempts: 1000, Key: func(n int) string { return fmt.Sprint(n) },
		Backoff: func(int, error) time.Duration { return 10 * time.Millisecond },
	}
	var mu sync.Mutex
	charges := make(map[string]int) // what was charged, by key
	calls := 0
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: 5 * time.Second}, kind.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
		_, err := onceq.Once(ctx, l, "charge", func(_ context.Context, key string) (string, error) {
			mu.Lock()
			defer mu.Unlock()
			calls++
			if of, known := charges[key]; known && of != n {
				t.Errorf("key %s for %d and %d", key, of, n)
			}
			charges[key] = n
			return key, nil
		}, onceq.EffectTimeout(5*time.Second))
		return err
	}))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()

	// Four clients retry until they have an answer, as clients do.
	const each = 60
	accepted := make(chan int64, 4*each)
	var clients sync.WaitGroup
	for c := range 4 {
		clients.Go(func() {
			for i := range each {
				for {
					r, err := q.Enqueue(ctx, pool, kind.Job(c*each+i))
					if err == nil {
						accepted <- r.ID
						break
					}
				}
			}
		})
	}
	done := func() (n int) {
		mu.Lock()
		defer mu.Unlock()
		return len(charges)
	}
	eventually(t, "progress", func() bool { return done() > each })
	require.NoError(t, server.Restart(true))
	clients.Wait()
	close(accepted)
	eventually(t, "an empty queue", func() bool {
		var n int
		return pool.QueryRow(ctx, `select count(*) from onceq.jobs`).Scan(&n) == nil && n == 0
	})
	cancel()
	require.NoError(t, <-ended)

	ids := make(map[int64]bool)
	for id := range accepted {
		require.False(t, ids[id], "one job for each key")
		ids[id] = true
	}
	require.Len(t, ids, 4*each)
	require.Len(t, charges, 4*each, "one charge for each job, in %d calls", calls)
	var completed int
	require.NoError(t, pool.QueryRow(t.Context(), `select count(*) from onceq.job_fences where class = 0 and state = 3`).Scan(&completed))
	require.Equal(t, 4*each, completed)
}
