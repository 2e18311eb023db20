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
	for range workers { // with room for so few jobs that none goes on looking for those that come soon
		start(t, db, onceq.WorkerConfig{PollInterval: time.Hour, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 5}}}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	}
	all := fmt.Sprintf(`%d = (select count(*) from onceq.waiters w where idle_until > statement_timestamp()
	                            and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`, workers)
	until(t, db, all)
	for _, w := range sqlOne[[]int64](t, db, `select array_agg(worker) from onceq.waiters`) { // each knows of the others once it has been woken
		sqlRun(t, db, `with woken as (insert into onceq.wakes (worker, round, queue, looks) select worker, round, 'default', 0 from onceq.waiters where worker = $1)
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

// Where very many wait, most are dormant: their sessions do not listen, because a notification wakes each one that does. They come when
// those that wait are woken, or are no longer there, and then they listen.
func TestWake_MostOfVeryManyAreDormant(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	listens := make(map[string]bool)
	var early []string // were announced before their sessions listened
	var db *queuetest.DB
	db = queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			how, channel, ok := strings.Cut(sql, " onceq_")
			if !ok || !strings.HasSuffix(how, "listen") {
				return
			}
			var announced bool
			err := db.Pool.QueryRow(context.Background(), `select exists (select from onceq.waiters where worker::text = $1)`, channel).Scan(&announced)
			mu.Lock()
			defer mu.Unlock()
			if listens[channel] = how == "listen"; listens[channel] && (announced || err != nil) {
				early = append(early, fmt.Sprint(channel, err))
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
	eventually(t, "few that wait", func() bool { return len(waiting()) == awake && listening() == awake })
	for range 20 { // jobs that come alone do not change that
		add(t, db, onceq.Job{})
		until(t, db, noJobs)
	}
	eventually(t, "few that wait", func() bool { return len(waiting()) == awake && listening() == awake })

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
	eventually(t, "more that wait", func() bool { return len(waiting()) > awake && listening() >= len(waiting()) })
	now := sqlOne[time.Time](t, db, `select statement_timestamp()`)
	eventually(t, "that they announce themselves anew", func() bool { // they are awake for a minute, and do so after 20 s
		return sqlOne[bool](t, db, `select bool_and(idle_until > $1::timestamptz + interval '60 seconds') from onceq.waiters`, now)
	})
	require.Greater(t, len(waiting()), awake, "there may be another burst")

	t.Log("most have ended")
	for _, w := range all[:workers-2] {
		require.NoError(t, w.stop())
	}
	add(t, db, onceq.Job{})
	until(t, db, noJobs)
	eventually(t, "those that are left wait", func() bool { return len(waiting()) == 2 && listening() == 2 })
	mu.Lock()
	defer mu.Unlock()
	require.Empty(t, early)
}

// Nobody becomes dormant because of others that have room for fewer jobs. A queue that is paused makes no difference: all know that it is.
func TestWake_WhoBecomesDormant(t *testing.T) {
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
	eventually(t, "few that wait", func() bool { return waiting(``) == awake })
	worker(100)
	few := func() bool {
		return waiting(` and room = 100`) == 1 && (waiting(``) == awake || waiting(``) == awake+1)
	}
	eventually(t, "few that wait, and one with more room", few)
	require.NoError(t, db.Queue.PauseQueue(t.Context(), db.Pool, "b", ""))
	eventually(t, "all know of the pause", func() bool { return waiting(` and busy = '{b}'`) == waiting(``) })
	for range 10 { // for longer than dormant workers wait until they ask
		time.Sleep(400 * time.Millisecond)
		require.True(t, few())
	}
}

// Where many wait, they look less often, and a delayed job that becomes due is claimed by few of them, also if the few that come
// first are dead.
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
			until(t, db, fmt.Sprintf(`%d <= (select count(*) from onceq.waiters)`, awake))
			sqlRun(t, db, `insert into onceq.waiters (worker, serves, round, room, kinds, looks, idle_until)
				select -n, serves, 1, 100, kinds, 15, now() + interval '1 hour' from onceq.waiters, generate_series(1, $1::int) n where worker = (select max(worker) from onceq.waiters)`, dead)
			sqlRun(t, db, `insert into onceq.wakes (worker, queue, round) select worker, 'default', 1 from onceq.waiters where worker < 0`)
			all := fmt.Sprintf(`%d <= (select count(*) from onceq.waiters w where idle_until > statement_timestamp() and worker > 0
			                            and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`, awake)
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

// Where many wait and jobs come one soon after the other, the worker that is woken goes on looking for a while, and nobody else
// is woken meanwhile. No job waits for a poll for that, as long as the handlers stay quick.
func TestWake_QuickJobsInQuickSuccessionShareAWake(t *testing.T) {
	conformance.Quick(t, "jobs have to come in quick succession, which a busy machine does not do")
	t.Parallel()
	f := newFleet(t, time.Hour, func(context.Context, *onceq.Lease) error { return nil })
	f.shares(t, f.more.Load, func() { add(t, f.db, onceq.Job{}) })

	// What a transaction enqueues wakes somebody for each job: it may commit late, and the next poll is in an hour.
	until(t, f.db, f.all)
	f.enqueue(t, 40, func() { f.inTx(t, func() {}) })
	require.Zero(t, f.more.Load())
	require.Positive(t, f.plain.Load()) // not one each: there may have been nobody left to wake
}

// Where workers poll at the default interval, jobs of transactions share wakes too. One whose transaction commits when nobody looks
// any longer is found all the same.
func TestWake_JobsOfTransactionsShareAWake(t *testing.T) {
	conformance.Quick(t, "jobs have to come in quick succession, which a busy machine does not do")
	t.Parallel()
	f := newFleet(t, 0, func(context.Context, *onceq.Lease) error { return nil })
	f.shares(t, f.long.Load, func() { add(t, f.db, onceq.Job{}) })
	f.shares(t, f.long.Load, func() { f.inTx(t, func() {}) })
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

// shares checks that jobs share wakes, and that some are of a sort. one enqueues a job.
func (f *fleet) shares(t *testing.T, some func() int64, one func()) {
	const jobs = 300
	shared := false
	for try, quick := 0, 0; !shared; try++ {
		require.Less(t, quick, 3, "rounds in which jobs came quickly, and wakes were not shared")
		if try == 6 {
			t.Skip("this machine has too much other work for jobs in quick succession, and wakes somebody for each")
		}
		took := f.enqueue(t, jobs, one)
		wakes, more, long := f.plain.Load()+f.more.Load(), f.more.Load(), f.long.Load()
		t.Logf("%d jobs in %s: %d wakes, %d of them to look for more, %d of these for long", jobs, took, wakes, more, long)
		if shared = wakes < jobs*3/4 && some() > 0; took < jobs*5*time.Millisecond {
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

// Who is woken for a job, and for how long that one gets the jobs of a queue alone. All is said at one time of the server.
func TestWake_WhoGetsTheJobsOfAWhile(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	const waiter = `insert into onceq.waiter_queues values ('default', 1), ('default', 2);
		insert into onceq.waiters (worker, serves, round, room, kinds, looks, polls, idle_until) values (1, 1, 1, 100, 7, 100, true, statement_timestamp() + interval '1 hour');`
	woken := func(queue string, looks int, polls bool, ago string) string {
		return fmt.Sprintf(`insert into onceq.wakes values (3, 1, '%s', %d, %t, statement_timestamp() - interval '%s');`, queue, looks, polls, ago)
	}
	for name, c := range map[string]struct {
		before string
		own    bool
		want   string // the worker, and for how many milliseconds
	}{
		"nobody was woken lately":                                          {"", true, "1 for 0"},
		"somebody was":                                                     {woken("default", 0, true, "20 ms"), true, "1 for 100"},
		"somebody was a little earlier":                                    {woken("default", 0, true, "40 ms"), true, "1 for 0"},
		"somebody was for another queue":                                   {woken("other", 100, true, "20 ms"), true, "1 for 0"},
		"somebody gets them now":                                           {woken("default", 100, true, "90 ms"), true, ""},
		"somebody gets them briefly":                                       {woken("default", 15, false, "10 ms"), true, ""},
		"but not those of transactions":                                    {woken("default", 100, false, "90 ms"), false, "1 for 100"},
		"those of transactions too":                                        {woken("default", 100, true, "90 ms"), false, ""},
		"somebody got them until just now":                                 {woken("default", 100, true, "110 ms"), true, "1 for 100"},
		"somebody got them until a while ago":                              {woken("default", 100, true, "140 ms"), true, "1 for 0"},
		"somebody got them briefly until just now":                         {woken("default", 15, true, "20 ms"), true, "1 for 100"},
		"the clock was set back since":                                     {woken("default", 100, true, "-1 hour"), true, "1 for 0"},
		"a worker with other kinds waits for them":                         {woken("default", 0, true, "20 ms") + `insert into onceq.waiters (worker, serves, round, room, kinds, busy, idle_until) values (2, 2, 1, 100, 8, '{default}', statement_timestamp() + interval '1 hour');`, true, "1 for 0"},
		"the announcement of the one with other kinds ended":               {woken("default", 0, true, "20 ms") + `insert into onceq.waiters (worker, serves, round, room, kinds, busy, idle_until) values (2, 2, 1, 100, 8, '{default}', statement_timestamp());`, true, "1 for 100"},
		"a transaction's job, for a worker that polls at its own interval": {woken("default", 0, true, "20 ms") + `update onceq.waiters set polls = false;`, false, "1 for 0"},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := db.Pool.Acquire(t.Context())
			require.NoError(t, err)
			defer conn.Release()
			results, err := conn.Conn().PgConn().Exec(t.Context(), strings.ReplaceAll(`begin;`+waiter+c.before+fmt.Sprintf(`select onceq.wake('default', 1, 0, %t);
				select coalesce(string_agg(worker || ' for ' || looks, ', '), '') from onceq.wakes where worker < 3;
				rollback`, c.own), "onceq.", pgx.Identifier{db.Schema}.Sanitize()+".")).ReadAll()
			require.NoError(t, err)
			require.Equal(t, c.want, string(results[len(results)-2].Rows[0][0]))
			require.Equal(t, "1", string(results[len(results)-3].Rows[0][0]), "there is somebody for the job")
		})
	}
}

// Handlers that take their time are spread over the workers: each job wakes another one.
func TestWake_SlowJobsInQuickSuccessionWakeOneEach(t *testing.T) {
	t.Parallel()
	f := newFleet(t, time.Hour, func(ctx context.Context, _ *onceq.Lease) error {
		select {
		case <-time.After(30 * time.Millisecond):
		case <-ctx.Done():
		}
		return nil
	})
	f.enqueue(t, 60, func() { add(t, f.db, onceq.Job{}) })
	require.Zero(t, f.more.Load())
}

// A worker that was told to look for more, and is dead, keeps no job longer than until another one polls.
func TestWake_ADeadWorkerThatWasToLookForMore(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	var ran atomic.Int64
	w := start(t, db, onceq.WorkerConfig{PollInterval: 200 * time.Millisecond}, handle(func(context.Context, *onceq.Lease) error {
		ran.Add(1)
		return nil
	}))
	until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
	sqlRun(t, db, `insert into onceq.waiters (worker, serves, round, room, kinds, looks, idle_until)
		select n, serves, 1, 100, kinds, 15, now() + interval '1 hour' from onceq.waiters, generate_series(1, 20) n where worker > 20`)
	const jobs = 50
	for range jobs {
		add(t, db, onceq.Job{})
	}
	until(t, db, noJobs)
	require.Equal(t, int64(jobs), ran.Load())
	eventually(t, "a dead worker that was to look for more", func() bool { // two jobs within 30 ms are needed for that
		sqlRun(t, db, `delete from onceq.wakes where worker <= 20`) // each is woken only once
		add(t, db, onceq.Job{})
		add(t, db, onceq.Job{})
		return sqlOne[bool](t, db, `select exists (select from onceq.wakes where worker <= 20 and looks > 0)`)
	})
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// awake is how many workers wait at the default interval; more of them are dormant.
const awake = 9

// fleet is a number of workers that all wait, and know of each other and of their handlers.
type fleet struct {
	all               string // true when all workers wait
	db                *queuetest.DB
	plain, more, long atomic.Int64 // notifications, those that ask to look for more, and those of them that ask for a tenth of a second
	passed            chan string  // gets what is notified to "passed"
}

func newFleet(t *testing.T, poll time.Duration, handler func(context.Context, *onceq.Lease) error) *fleet {
	f := &fleet{db: queuetest.New(t), passed: make(chan string, 10)}
	workers := 12
	if poll == 0 {
		workers = awake
	}
	for range workers {
		start(t, f.db, onceq.WorkerConfig{PollInterval: poll}, handle(handler))
	}
	f.all = fmt.Sprintf(`%d = (select count(*) from onceq.waiters w where idle_until > statement_timestamp()
	                            and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`, workers)
	until(t, f.db, f.all)
	for range 3 * workers { // a worker that was woken knows of the others, and how long its handlers take
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
			case strings.HasPrefix(n.Payload, "\x1f"):
				if f.more.Add(1); strings.HasPrefix(n.Payload, "\x1f100\x1f") {
					f.long.Add(1)
				}
			default:
				f.plain.Add(1)
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
	f.plain.Store(0)
	f.more.Store(0)
	f.long.Store(0)
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

// A worker that becomes full tells another one of the jobs that only it was told of, and that one the next.
func TestWake_AFullWorkerPassesOn(t *testing.T) {
	t.Parallel()
	for name, notify := range map[string]string{
		"one notification": `select pg_notify('onceq_' || min(worker), 'default') from onceq.waiters`,
		"it was to get the jobs of a while alone": `with it as (select worker, round from onceq.waiters order by worker limit 1),
			woken as (insert into onceq.wakes (worker, round, queue, looks) select worker, round, 'default', 30000 from it)
			select pg_notify('onceq_' || worker, chr(31) || 30000 || chr(31) || 'default') from it`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			aFullWorkerPassesOn(t, notify)
		})
	}
}

func aFullWorkerPassesOn(t *testing.T, notify string) {
	db := queuetest.New(t)
	const workers, slots = 3, 2
	started, end := make(chan int64, workers*slots+1), make(chan struct{})
	release := sync.OnceFunc(func() { close(end) })
	defer release()
	for range workers {
		start(t, db, onceq.WorkerConfig{PollInterval: time.Hour, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: slots}}},
			handle(func(_ context.Context, l *onceq.Lease) error {
				started <- l.ID
				<-end
				return nil
			}))
	}
	until(t, db, fmt.Sprintf(`%d = (select count(*) from onceq.waiters where idle_until > statement_timestamp() and idle_until < statement_timestamp() + interval '56 seconds')`, workers))
	sqlRun(t, asOwner(t, db), `
insert into jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload)
select nextval('ids'), now(), now(), 3, 0, 'default', 'k', '1' from generate_series(1, $1)`, workers*slots+1) // this wakes nobody
	sqlRun(t, db, notify)
	for range workers * slots {
		receive(t, started)
	}
	release()
	until(t, db, noJobs)
}

// A worker that was to get the jobs of a while alone, and ends meanwhile, wakes another one for them.
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
	ends := func(looks int) bool {
		until(t, db, fmt.Sprintf(`1 = (select count(*) from onceq.waiters w where worker = %d and idle_until > statement_timestamp()
		                                  and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`, stays))
		hears()
		w := start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, handle(func(context.Context, *onceq.Lease) error { return nil }))
		until(t, db, `2 = (select count(*) from onceq.waiters where idle_until > statement_timestamp())`)
		if looks > 0 {
			sqlRun(t, db, `with woken as (insert into onceq.wakes (worker, round, queue, looks) select worker, round, 'default', $2 from onceq.waiters where worker <> $1)
				select pg_notify('onceq_' || worker, chr(31) || $2 || chr(31) || 'default') from onceq.waiters where worker <> $1`, stays, looks)
		}
		require.NoError(t, w.stop())
		return hears()
	}
	require.False(t, ends(0), "nobody was to look for more")
	require.True(t, ends(30000))
}

// Nobody gets the jobs of a while alone where others wait that have other kinds: the jobs may be theirs.
func TestWake_OthersOfOtherKindsAreWokenToo(t *testing.T) {
	conformance.Quick(t, "jobs have to come in quick succession, which a busy machine does not do")
	t.Parallel()
	f := newFleet(t, 0, func(context.Context, *onceq.Lease) error { return nil })
	f.shares(t, f.long.Load, func() { add(t, f.db, onceq.Job{}) })
	sqlRun(t, f.db, `with one as (
			insert into onceq.waiters (worker, serves, round, room, kinds, idle_until)
			select 1, serves, 1, 100, kinds + 1, now() + interval '1 hour' from onceq.waiters limit 1 returning worker)
		insert into onceq.wakes (worker, round, queue) select worker, 1, 'default' from one`) // so it is never chosen
	f.enqueue(t, 300, func() { add(t, f.db, onceq.Job{}) })
	require.Zero(t, f.more.Load())
	require.Positive(t, f.plain.Load())
}

// A burst spreads over the workers that wait: nobody takes more of it than it has handlers for while others sleep. No poll is needed for
// that, except where many producers wake the same worker at the same moment, or one that is known to be quick is trusted with the jobs
// of a while and its handlers take long: what it has no room for waits for another one's look.
func TestWake_ABurstSpreadsOverIdleWorkers(t *testing.T) {
	conformance.Quick(t, "bursts and no poll for an hour, which a machine that stands still for seconds may need")
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
				const workers, slots = 12, 10 // with so many a worker may be trusted with the jobs of a while
				var holds atomic.Bool
				started, end := make(chan int, workers*slots), make(chan struct{})
				release := sync.OnceFunc(func() { close(end) })
				defer release()
				for i := range workers {
					start(t, db, onceq.WorkerConfig{PollInterval: time.Hour, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: slots}}},
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
				// They look again for three seconds after they have announced themselves.
				until(t, db, all+` and (select max(idle_until) < statement_timestamp() + interval '56 seconds' from onceq.waiters)`)
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
