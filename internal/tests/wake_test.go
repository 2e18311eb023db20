package tests

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

// A process that was killed or frozen after it had announced itself is woken once. That job waits for a poll of the other
// worker, and no later one does.
func TestWake_ADeadWorkerIsWokenOnce(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := make(chan int64, 100)
	w := start(t, db, onceq.WorkerConfig{}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.ID
		return nil
	}))
	until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
	// It is the first of the order half of the time, and of the same set of queues.
	for _, dead := range []int64{1, 1 << 62} {
		sqlRun(t, db, `insert into onceq.waiters (worker, serves, round, room, idle_until)
			select $1::bigint, serves, 1, 100, now() + interval '1 hour' from onceq.waiters where worker > 1 limit 1`, dead)
	}
	for range 30 {
		id := add(t, db, onceq.Job{})
		require.Equal(t, id, receive(t, ran))
		until(t, db, noJobs)
	}
	require.LessOrEqual(t, sqlOne[int](t, db, `select count(*) from onceq.wakes where worker in (1, $1)`, int64(1<<62)), 2)
	require.NoError(t, w.stop())
}

// A worker that was woken while many others wait takes the job and waits again: it does not ask whether there are more,
// which would take them away from the others.
func TestWake_OneOfManyClaimsOnce(t *testing.T) {
	t.Parallel()
	var claims atomic.Int64
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			if strings.Contains(sql, "set leased_until = statement_timestamp() +") && strings.Contains(sql, "for update skip locked") {
				claims.Add(1)
			}
		}}
	}))
	const workers, jobs = 12, 30
	for range workers {
		start(t, db, onceq.WorkerConfig{PollInterval: time.Hour, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 5}}}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	}
	all := fmt.Sprintf(`%d = (select count(*) from onceq.waiters w where idle_until > statement_timestamp()
	                            and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`, workers)
	until(t, db, all)
	for _, w := range sqlOne[[]int64](t, db, `select array_agg(worker) from onceq.waiters`) { // each knows of the others once it has been woken
		sqlRun(t, db, `with woken as (insert into onceq.wakes (worker, round, queue) select worker, round, 'default' from onceq.waiters where worker = $1)
			select pg_notify('onceq_' || $1, 'default')`, w)
		until(t, db, all)
	}
	claims.Store(0)
	for range jobs {
		add(t, db, onceq.Job{})
		until(t, db, noJobs)
		until(t, db, all)
	}
	require.GreaterOrEqual(t, claims.Load(), int64(jobs))
	require.Less(t, claims.Load(), int64(2*jobs))
}

// Where very many wait, most of them only poll: their sessions do not listen, because a notification wakes each one that does. Who finds
// a job by polling watches from then on, if those that watched are busy. When it is calm, few watch again.
func TestWake_MostOfVeryManyOnlyPoll(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	listens := make(map[string]bool)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			how, channel, ok := strings.Cut(sql, " onceq_")
			if ok && strings.HasSuffix(how, "listen") {
				mu.Lock()
				defer mu.Unlock()
				listens[channel] = how == "listen"
			}
		}}
	}))
	listening := func() (n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, l := range listens {
			if l {
				n++
			}
		}
		return n
	}
	waiting := func() []int64 {
		return sqlOne[[]int64](t, db, `select coalesce(array_agg(worker), '{}') from onceq.waiters w where idle_until > statement_timestamp()
			and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round)`)
	}
	const workers, slots = 24, 2
	var holds atomic.Bool
	started, end := make(chan int, workers*slots), make(chan struct{})
	release := sync.OnceFunc(func() { close(end) })
	defer release()
	all := make([]*working, workers)
	for i := range workers {
		all[i] = start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: slots}}},
			handle(func(context.Context, *onceq.Lease) error {
				if holds.Load() {
					started <- i
					<-end
				}
				return nil
			}))
	}
	few := func() bool { return len(waiting()) == watchers && listening() == watchers }
	eventually(t, "few that watch", few)
	for range 20 { // jobs that come alone do not change that
		add(t, db, onceq.Job{})
		until(t, db, noJobs)
	}
	eventually(t, "few that watch", few)

	t.Log("a burst")
	holds.Store(true)
	for range workers * slots {
		add(t, db, onceq.Job{})
	}
	busy := make([]int, workers)
	for range workers * slots {
		busy[receive(t, started)]++
	}
	for _, n := range busy {
		require.Equal(t, slots, n, busy)
	}
	holds.Store(false)
	release()
	until(t, db, noJobs)
	eventually(t, "few that watch", few)

	t.Log("all that watch have ended, but for the last worker if it does")
	for i := 0; i < workers-1 && len(waiting()) > 0; i++ {
		require.NoError(t, all[i].stop())
	}
	add(t, db, onceq.Job{})
	until(t, db, noJobs)
	eventually(t, "the one that found the job watches", func() bool { return len(waiting()) > 0 && listening() >= len(waiting()) })
}

// Nobody only polls because of others that have room for fewer jobs. A queue that is paused makes no difference: all know that it is.
func TestWake_WhoOnlyPolls(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	waiting := func(more string) int {
		return sqlOne[int](t, db, `select count(*) from onceq.waiters where idle_until > statement_timestamp()`+more)
	}
	worker := func(slots int) {
		queues := map[string]onceq.QueueConfig{"default": {Concurrency: slots}, "b": {Concurrency: slots}}
		start(t, db, onceq.WorkerConfig{Also: []string{"b"}, Queues: queues}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	}
	const small = 14
	for range small {
		worker(1)
	}
	eventually(t, "few that wait", func() bool { return waiting(``) == watchers })
	worker(100)
	few := func() bool {
		return waiting(` and room = 100`) == 1 && (waiting(``) == watchers || waiting(``) == watchers+1)
	}
	eventually(t, "few that wait, and one with more room", few)
	require.NoError(t, db.Queue.PauseQueue(t.Context(), db.Pool, "b", ""))
	eventually(t, "all know of the pause", func() bool { return waiting(` and busy = '{b}'`) == waiting(``) })
	for range 10 {
		time.Sleep(400 * time.Millisecond)
		require.True(t, few())
	}
}

// Where many wait, most of them look less often, and a delayed job that becomes due is claimed by those that watch, also if the first of
// these are dead.
func TestWake_FewClaimADelayedJob(t *testing.T) {
	t.Parallel()
	for name, dead := range map[string]int{"all live": 0, "the first are dead": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var claims, claimed, looks atomic.Int64
			isClaim := func(sql string) bool {
				return strings.Contains(sql, "set leased_until = statement_timestamp() +") && strings.Contains(sql, "for update skip locked")
			}
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
				c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
					switch {
					case isClaim(sql):
						claims.Add(1)
					case strings.Contains(sql, "with recent as"):
						looks.Add(1)
					}
				}, wrote: func(sql string, rows int64) {
					if isClaim(sql) {
						claimed.Add(rows)
					}
				}}
			}))
			const workers, jobs = 24, 20
			for range workers {
				start(t, db, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
			}
			until(t, db, fmt.Sprintf(`%d <= (select count(*) from onceq.waiters)`, watchers))
			sqlRun(t, db, `insert into onceq.waiters (worker, serves, round, room, kinds, idle_until)
				select -n, serves, 1, 100, kinds, now() + interval '1 hour' from onceq.waiters, generate_series(1, $1::int) n where worker = (select max(worker) from onceq.waiters)`, dead)
			sqlRun(t, db, `insert into onceq.wakes (worker, queue, round, at) select worker, 'default', 1, now() - interval '1 hour' from onceq.waiters where worker < 0`)
			all := fmt.Sprintf(`%d <= (select count(*) from onceq.waiters w where idle_until > statement_timestamp() and worker > 0
			                            and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`, watchers)
			until(t, db, all)
			for range 3 * workers { // a worker that was woken knows of the others
				add(t, db, onceq.Job{})
				until(t, db, noJobs)
				until(t, db, all)
			}
			sqlRun(t, db, `delete from onceq.wakes where worker < 0`)
			delayed := make([]onceq.Job, jobs)
			for i := range delayed {
				delayed[i] = onceq.Job{Kind: "k", Payload: i, Delay: 8*time.Second + time.Duration(i)*100*time.Millisecond}
			}
			claimed.Store(0)
			_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, delayed)
			require.NoError(t, err)
			looks.Store(0)
			began := time.Now()
			until(t, db, `exists (select from onceq.jobs where run_at < now() + interval '500 ms')`)
			each := float64(looks.Load()) / workers / time.Since(began).Seconds()
			claims.Store(0)
			looks.Store(0)
			until(t, db, noJobs)
			t.Logf("%.2f looks a second each; %d claims and %d looks for %d jobs", each, claims.Load(), looks.Load(), jobs)
			require.Less(t, each, 0.7)
			require.EqualValues(t, jobs, claimed.Load(), "jobs that these claims took; a late one takes two")
			require.Less(t, claims.Load(), int64(workers*jobs/2))
		})
	}
}

// Where many wait and jobs come one soon after the other, those that are woken look for a while, and nobody is woken meanwhile. No job
// waits for a poll for that. One of a transaction that commits when nobody looks any longer is found all the same.
func TestWake_JobsInQuickSuccessionShareWakes(t *testing.T) {
	long(t, "jobs have to come in quick succession, which a busy machine does not do")
	t.Parallel()
	f := newFleet(t)
	f.shares(t, func() { add(t, f.db, onceq.Job{}) })
	f.shares(t, func() { f.inTx(t, func() {}) })
	for _, late := range []time.Duration{20 * time.Millisecond, 200 * time.Millisecond, time.Second, 4 * time.Second} {
		f.inTx(t, func() {
			for range 20 {
				f.inTx(t, func() {})
			}
			until(t, f.db, noJobs)
			time.Sleep(late)
		})
		until(t, f.db, noJobs)
	}
}

// shares checks that jobs share wakes. one enqueues a job.
func (f *fleet) shares(t *testing.T, one func()) {
	const jobs = 300
	for quick, try := 0, 0; ; try++ {
		require.Less(t, quick, 3, "rounds in which jobs came quickly, and wakes were not shared")
		if try == 6 {
			t.Skip("this machine has too much other work for jobs in quick succession, and wakes somebody for each")
		}
		took := f.enqueue(t, jobs, one)
		t.Logf("%d jobs in %s: %d wakes", jobs, took, f.wakes.Load())
		if f.wakes.Load() < jobs*3/4 {
			return
		}
		if took < jobs*5*time.Millisecond {
			quick++
		}
	}
}

// inTx enqueues a job in a transaction and calls then before it commits.
func (f *fleet) inTx(t *testing.T, then func()) {
	tx, err := f.db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = f.db.Queue.Enqueue(t.Context(), tx, onceq.Job{Kind: "k"})
	require.NoError(t, err)
	then()
	require.NoError(t, tx.Commit(t.Context()))
}

// watchers is how many workers watch at the default interval; the others only poll.
const watchers = 9

// fleet is a number of workers that all wait, and know of each other.
type fleet struct {
	all    string // true when all workers wait
	db     *queuetest.DB
	wakes  atomic.Int64 // notifications
	passed chan string  // gets what is notified to "passed"
}

func newFleet(t *testing.T) *fleet {
	f := &fleet{db: queuetest.New(t), passed: make(chan string, 10)}
	const workers = watchers
	for range workers {
		start(t, f.db, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	}
	f.all = fmt.Sprintf(`%d = (select count(*) from onceq.waiters w where idle_until > statement_timestamp()
	                            and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`, workers)
	until(t, f.db, f.all)
	for range 3 * workers { // a worker that was woken knows of the others
		add(t, f.db, onceq.Job{})
		until(t, f.db, noJobs)
		until(t, f.db, f.all)
	}
	conn, err := pgx.ConnectConfig(t.Context(), f.db.Pool.Config().ConnConfig.Copy())
	require.NoError(t, err)
	rows, err := f.db.Pool.Query(t.Context(), `select worker from onceq.waiters`)
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "listen passed")
	require.NoError(t, err)
	for _, id := range ids {
		_, err := conn.Exec(t.Context(), fmt.Sprintf("listen onceq_%d", id))
		require.NoError(t, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			n, err := conn.WaitForNotification(ctx)
			switch {
			case err != nil:
				return
			case n.Channel == "passed":
				f.passed <- n.Payload
			default:
				f.wakes.Add(1)
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		_ = conn.Close(context.Background())
	})
	return f
}

// enqueue enqueues jobs a few milliseconds apart, counts their notifications, and returns when all are done. It took that long
// until the last one was enqueued.
func (f *fleet) enqueue(t *testing.T, jobs int, one func()) (took time.Duration) {
	pass := func() { // notifications come in the order of commits
		sqlRun(t, f.db, `select pg_notify('passed', '')`)
		receive(t, f.passed)
	}
	pass()
	f.wakes.Store(0)
	began := time.Now()
	for range jobs {
		one()
		time.Sleep(2 * time.Millisecond)
	}
	took = time.Since(began)
	until(t, f.db, noJobs)
	pass()
	return took
}

// All workers of a process over one pool share their connections, whatever their schemas, and one of these listens.
func TestConnections_WorkersOfOnePoolShareThem(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	owner := owner(t, db)
	cfg := db.Pool.Config()
	name := fmt.Sprintf("shared %d", time.Now().UnixNano())
	cfg.ConnConfig.RuntimeParams["application_name"] = name
	cfg.MaxConns = 3
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	schemas, jobs := conformance.Sized(6, 64), 20
	ran := make(chan int, schemas*jobs) // gets the schema of each job
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, schemas)
	var queues []*onceq.Queue
	conn, err := pgx.ConnectConfig(t.Context(), owner.Config().ConnConfig)
	require.NoError(t, err)
	for i := range schemas {
		schema := fmt.Sprintf("shared_%d", i)
		require.NoError(t, migrations.Up(t.Context(), conn, schema))
		_, err = conn.Exec(t.Context(), migrations.Grants(schema, cfg.ConnConfig.User))
		require.NoError(t, err)
		q, err := onceq.New(pool, &onceq.Config{Schema: schema})
		require.NoError(t, err)
		queues = append(queues, q)
		w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error {
			ran <- i
			return nil
		}))
		require.NoError(t, err)
		go func() { ended <- w.Run(ctx) }()
	}
	require.NoError(t, conn.Close(t.Context()))
	waiting := func() {
		for i := range schemas {
			eventually(t, "an announcement", func() bool {
				var idle bool
				err := owner.QueryRow(t.Context(), fmt.Sprintf(`select exists (select from shared_%d.waiters where idle_until > statement_timestamp())`, i)).Scan(&idle)
				return err == nil && idle
			})
		}
	}
	own := func() (n int) {
		require.NoError(t, owner.QueryRow(t.Context(), `select count(*) from pg_stat_activity where application_name = $1`, name).Scan(&n))
		return n - int(pool.Stat().TotalConns())
	}
	waiting()
	require.LessOrEqual(t, own(), 4)
	for range jobs {
		for _, q := range queues {
			_, err := q.Enqueue(t.Context(), owner, onceq.Job{Kind: "k"})
			require.NoError(t, err)
		}
	}
	done := make([]int, schemas)
	for range schemas * jobs {
		done[receive(t, ran)]++
		require.LessOrEqual(t, own(), 4)
	}
	for _, n := range done {
		require.Equal(t, jobs, n, done)
	}
	// Those that are not used close by themselves, which takes half a minute, and the session stays.
	eventually(t, "one connection", func() bool { return own() == 1 })
	cancel()
	for range schemas {
		require.NoError(t, receive(t, ended))
	}
	eventually(t, "no connection", func() bool { return own() == 0 })
}

// A worker that was woken and ends before it waits again wakes another one: it may not have seen the job.
func TestWake_AWorkerThatEndsPassesOn(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	listens, err := pgx.ConnectConfig(t.Context(), db.Pool.Config().ConnConfig.Copy())
	require.NoError(t, err)
	defer func() { _ = listens.Close(context.Background()) }()
	hears := func() bool { // whether somebody was woken
		sqlRun(t, db, `select pg_notify('passed', '')`)
		for woken := false; ; woken = true {
			n, err := listens.WaitForNotification(t.Context())
			require.NoError(t, err)
			if n.Channel == "passed" {
				return woken
			}
		}
	}
	_, err = listens.Exec(t.Context(), `listen passed`)
	require.NoError(t, err)
	start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	until(t, db, `1 = (select count(*) from onceq.waiters where idle_until > statement_timestamp())`)
	stays := sqlOne[int64](t, db, `select worker from onceq.waiters`)
	_, err = listens.Exec(t.Context(), fmt.Sprintf(`listen onceq_%d`, stays))
	require.NoError(t, err)
	ends := func(woken bool) bool {
		until(t, db, fmt.Sprintf(`1 = (select count(*) from onceq.waiters w where worker = %d and idle_until > statement_timestamp()
		                                  and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`, stays))
		hears()
		w := start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, handle(func(context.Context, *onceq.Lease) error { return nil }))
		until(t, db, `2 = (select count(*) from onceq.waiters where idle_until > statement_timestamp())`)
		if woken { // as far as producers know
			sqlRun(t, db, `insert into onceq.wakes (worker, round, queue) select worker, round, 'default' from onceq.waiters where worker <> $1`, stays)
		}
		require.NoError(t, w.stop())
		return hears()
	}
	require.False(t, ends(false))
	require.True(t, ends(true))
}

// A burst spreads over the workers that wait: nobody takes more of it than it has handlers for while others sleep. What the one that was
// woken for it has no room for waits for another one's look.
func TestWake_ABurstSpreadsOverIdleWorkers(t *testing.T) {
	long(t, "eight bursts, each beside a dozen workers")
	t.Parallel()
	one := func(ctx context.Context, db *queuetest.DB, jobs []onceq.Job) (err error) {
		for i := 0; i < len(jobs) && err == nil; i++ {
			_, err = db.Queue.Enqueue(ctx, db.Pool, jobs[i])
		}
		return err
	}
	for name, enqueue := range map[string]func(context.Context, *queuetest.DB, []onceq.Job) error{
		"one by one": one,
		"at once": func(ctx context.Context, db *queuetest.DB, jobs []onceq.Job) error {
			errs := make(chan error, len(jobs))
			for i := range jobs {
				go func() { errs <- one(ctx, db, jobs[i:i+1]) }()
			}
			var all []error
			for range jobs {
				all = append(all, <-errs)
			}
			return errors.Join(all...)
		},
		"in one transaction": func(ctx context.Context, db *queuetest.DB, jobs []onceq.Job) error {
			return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) (err error) {
				for i := 0; i < len(jobs) && err == nil; i++ {
					_, err = db.Queue.Enqueue(ctx, tx, jobs[i])
				}
				return err
			})
		},
		"in one call": func(ctx context.Context, db *queuetest.DB, jobs []onceq.Job) error {
			_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
			return err
		},
	} {
		for _, known := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", known to be quick ", known), func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t)
				const workers, slots = 12, 10
				var holds atomic.Bool
				started, end := make(chan int, workers*slots), make(chan struct{})
				release := sync.OnceFunc(func() { close(end) })
				defer release()
				for i := range workers {
					start(t, db, onceq.WorkerConfig{PollInterval: time.Second, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: slots}}},
						handle(func(context.Context, *onceq.Lease) error {
							if holds.Load() {
								started <- i
								<-end
							}
							return nil
						}))
				}
				all := fmt.Sprintf(`%d = (select count(*) from onceq.waiters w where idle_until > statement_timestamp()
				                            and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`, workers)
				until(t, db, all)
				if known {
					for range 3 * workers {
						add(t, db, onceq.Job{})
						until(t, db, noJobs)
						until(t, db, all)
					}
				}
				holds.Store(true)
				jobs := make([]onceq.Job, workers*slots)
				for i := range jobs {
					jobs[i] = work.Job(i)
				}
				require.NoError(t, enqueue(t.Context(), db, jobs))
				running := make([]int, workers)
				for range jobs {
					running[receive(t, started)]++
				}
				for _, n := range running {
					require.Equal(t, slots, n, running)
				}
				release()
				until(t, db, noJobs)
			})
		}
	}
}
