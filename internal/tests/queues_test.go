package tests

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// manyQueues names queues.
func manyQueues(n int) (queues []string) {
	for i := range n {
		queues = append(queues, fmt.Sprintf("queue %04d", i))
	}
	return queues
}

// An idle worker sends one statement to look at all of its queues, and nothing else but renewals of its announcement. Kinds with
// lanes change nothing of that, and it holds one connection.
func TestQueues_AnIdleWorkerLooksAtAllInOneStatement(t *testing.T) {
	t.Parallel()
	for n, k := range map[int]onceq.Handler{
		1:    handle(func(context.Context, *onceq.Lease) error { return nil }),
		1000: handle(func(context.Context, *onceq.Lease) error { return nil }),
		2:    charges.Handle(func(context.Context, *onceq.Lease, charge) error { return nil }),
	} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			var counting atomic.Bool
			var mu sync.Mutex
			var looks, promotes, present int
			var others []string
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
				c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
					mu.Lock()
					defer mu.Unlock()
					switch {
					case !counting.Load():
					case strings.Contains(sql, asksNext):
						looks++
					case strings.Contains(sql, "'onceq_lanes.slots'"):
						promotes++
					case strings.Contains(sql, ".be_present("):
						present++ // once a minute
					case !strings.Contains(sql, announces):
						others = append(others, sql)
					}
				}}
			}))
			conn := owner(t, db)
			w := start(t, db, onceq.WorkerConfig{Also: manyQueues(n), PollInterval: 20 * time.Millisecond}, k)
			eventually(t, "announcements", func() bool {
				var all bool
				require.NoError(t, conn.QueryRow(t.Context(), `select exists (select from waiters where idle_until > now())
					and (select count(*) from waiter_queues) = $1 and (select count(*) from queues) = $1`, n+1).Scan(&all))
				return all
			})
			if n == 2 {
				name := db.Pool.Config().ConnConfig.RuntimeParams["application_name"]
				eventually(t, "one connection beside the pool's", func() bool { // those that are not used close after half a minute
					var n int
					require.NoError(t, conn.QueryRow(t.Context(), `select count(*) from pg_stat_activity where application_name = $1 and datname = current_database()`, name).Scan(&n))
					return n-int(db.Pool.Stat().TotalConns()) == 1
				})
			}
			began := time.Now()
			counting.Store(true)
			eventually(t, "ten looks in a row", func() bool {
				mu.Lock()
				defer mu.Unlock()
				if len(others) > 0 { // on a slow machine a look that was due before the worker waited
					looks, others = 0, nil
				}
				return looks >= 10
			})
			counting.Store(false)
			require.NoError(t, w.stop())
			mu.Lock()
			defer mu.Unlock()
			require.LessOrEqual(t, present, 1+int(time.Since(began)/time.Minute))
			require.LessOrEqual(t, promotes, 1, "the promoter may have looked before the worker waited")
		})
	}
}

// A job is found in any of a thousand queues, by a notification or a look, and a flood in one of them does not starve the
// others.
func TestQueues_AFloodInOneDoesNotStarveAThousandOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	queues := manyQueues(999)
	flood := make([]onceq.Job, 20_000)
	for i := range flood {
		flood[i] = work.Job(i)
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, flood)
	require.NoError(t, err)
	var jobs []onceq.Job
	for _, queue := range queues {
		jobs = append(jobs, onceq.Job{Kind: "k", Queue: queue, Payload: -1})
	}
	var others, before atomic.Int64 // jobs of the other queues; jobs of the flood until all of those ran
	found := make(chan struct{})
	hold := make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{Also: queues}, work.Handle(func(_ context.Context, l *onceq.Lease, n int) error {
		switch {
		case n >= 0 && before.Add(1) > 10_000:
			<-hold // half of the flood is still there when the last of the others runs
		case n < 0 && others.Add(1) == 999:
			close(found)
		}
		return nil
	}))
	_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	receive(t, found)
	close(hold)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// Drain goes over all queues, and so do the claims of several in one statement: each job runs once.
func TestQueues_DrainWorksThemAll(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	queues := manyQueues(250)
	var jobs []onceq.Job
	for i := range 1000 {
		jobs = append(jobs, onceq.Job{Kind: "k", Queue: queues[i%len(queues)], Payload: i, Priority: onceq.Priority(i%3 - 1)})
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	ran := make(chan string, 2000)
	drain := func(limit int) {
		w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Also: queues}, work.Handle(func(_ context.Context, l *onceq.Lease, n int) error {
			ran <- fmt.Sprint(l.Queue, n)
			return nil
		}))
		require.NoError(t, err)
		require.NoError(t, w.Drain(t.Context(), limit))
	}
	drain(7)
	require.Len(t, ran, 7)
	drain(0)
	close(ran)
	want := make(map[string]bool)
	for i := range jobs {
		want[fmt.Sprint(queues[i%len(queues)], i)] = true
	}
	for r := range ran {
		require.True(t, want[r], r)
		delete(want, r)
	}
	require.Empty(t, want)
}

// In a queue that the worker works besides those of its kinds, transactional handlers leave connections of the pool to the
// application too.
func TestQueues_OneOfAlsoLeavesConnections(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 4 }))
	began, hold := make(chan struct{}, 10), make(chan struct{})
	release := sync.OnceFunc(func() { close(hold) })
	t.Cleanup(release)
	w := start(t, db, onceq.WorkerConfig{Also: []string{"other"}}, work.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
		if _, err := tx.Exec(ctx, `select $1::int`, 1); err != nil { // takes the connection
			return err
		}
		began <- struct{}{}
		<-hold
		return nil
	}))
	var jobs []onceq.Job
	for range 10 {
		jobs = append(jobs, onceq.Job{Kind: work.Name, Queue: "other", Payload: 1})
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	for range 3 {
		receive(t, began)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for range 5 { // whoever waits for a connection gets it before those who come later
		require.NoError(t, db.Pool.Ping(ctx), "handlers have all connections")
	}
	require.Empty(t, began)
	release()
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// The handlers of one queue may use all connections that handlers can have. Drain asks the other queues as well.
func TestQueues_DrainReturnsWithAPoolThatOneQueueCanFill(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 4 }))
	var ran atomic.Int64
	count := func(context.Context, pgx.Tx, *onceq.Lease, int) error {
		ran.Add(1)
		return nil
	}
	other := onceq.Kind[int]{Name: "other", Queue: "other"}
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, work.HandleTx(count), other.HandleTx(count))
	require.NoError(t, err)
	add(t, db, work.Job(1))
	add(t, db, other.Job(1))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, w.Drain(ctx, 0))
	require.Equal(t, int64(2), ran.Load())
}

// Of two queues one has more jobs than handlers. The worker waits for the other one alone, and a job there starts at once.
func TestQueues_AFullOneDoesNotHideAnother(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	hold := make(chan struct{})
	ran := make(chan string, 300)
	cfg := onceq.WorkerConfig{Also: []string{"other"}, PollInterval: time.Hour, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}}}
	w := start(t, db, cfg, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.Queue
		if l.Queue == "default" {
			<-hold
		}
		return nil
	}))
	const waits = `exists (select from onceq.waiters where idle_until > statement_timestamp() and busy is not distinct from $1::text[])`
	until(t, db, waits, nil)
	addMany(t, db, 200, onceq.Job{})
	require.Equal(t, "default", receive(t, ran))
	for range 5 {
		add(t, db, onceq.Job{Queue: "other"})
		require.Equal(t, "other", receive(t, ran))
	}
	until(t, db, waits, []string{"default"})
	add(t, db, onceq.Job{Queue: "other"})
	require.Equal(t, "other", receive(t, ran))
	close(hold)
	until(t, db, noJobs)
	until(t, db, waits, nil)
	add(t, db, onceq.Job{})
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// A job is committed long after it has woken a worker that has announced itself anew since: what says that the worker was
// woken counts no more.
func TestQueues_AWakeThatIsCommittedAfterTheNextAnnouncement(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := make(chan int64, 10)
	w := start(t, db, onceq.WorkerConfig{Also: []string{"other"}, PollInterval: time.Hour}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.ID
		return nil
	}))
	const waits = `exists (select from onceq.waiters w where idle_until > statement_timestamp() and round > $1
		and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`
	until(t, db, waits, 0)
	for range 3 {
		round := sqlOne[int](t, db, `select round from onceq.waiters`)
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		late, err := db.Queue.Enqueue(t.Context(), tx, onceq.Job{Kind: "k"})
		require.NoError(t, err)
		require.Equal(t, add(t, db, onceq.Job{}), receive(t, ran))
		until(t, db, waits, round)
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(t, late.ID, receive(t, ran))
		require.Equal(t, add(t, db, onceq.Job{Queue: "other"}), receive(t, ran))
		until(t, db, waits, round+1)
	}
	require.NoError(t, w.stop())
}

// Whoever sees that a worker waits knows for which queues. In between, what was enqueued would wake nobody.
func TestQueues_AreNamedBeforeTheWorkerWaits(t *testing.T) {
	t.Parallel()
	var conn *pgxpool.Pool
	named := make(chan int, 100)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{after: func(sql string) {
			if strings.Contains(sql, announces) {
				var n int
				assert.NoError(t, conn.QueryRow(context.Background(), `select count(*) from waiter_queues`).Scan(&n))
				named <- n
			}
		}}
	}))
	conn = owner(t, db)
	w := start(t, db, onceq.WorkerConfig{Also: []string{"other"}}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	require.Equal(t, 2, receive(t, named))
	require.NoError(t, w.stop())
}

// All connections of a worker are lost just before and just after a claim. Nothing is lost, and the worker is woken again by
// notifications.
func TestQueues_TheSessionIsLostInTheMiddleOfAClaim(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before", "after"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			var armed atomic.Bool
			var conn *pgxpool.Pool // is not lost
			kill := func(sql string) {
				if strings.Contains(sql, "and leased_until is null and lost = 0") && strings.Contains(sql, "holder = ") && armed.CompareAndSwap(true, false) {
					_, err := conn.Exec(context.Background(), `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name = 'lost'`)
					assert.NoError(t, err)
				}
			}
			h := &statementHook{before: kill}
			if when == "after" {
				h = &statementHook{after: kill}
			}
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["application_name"] = "lost"
				c.ConnConfig.Tracer = h
			}))
			conn = owner(t, db)
			ran := make(chan int64, 100)
			w := start(t, db, onceq.WorkerConfig{Also: []string{"other"}, Lease: steady}, handle(func(_ context.Context, l *onceq.Lease) error {
				ran <- l.ID
				return nil
			}))
			waits := func() {
				eventually(t, "an announcement", func() bool {
					var is bool
					return conn.QueryRow(t.Context(), `select exists (select from waiters w where idle_until > statement_timestamp()
						and not exists (select from wakes x where x.worker = w.worker and x.round = w.round))`).Scan(&is) == nil && is
				})
			}
			for range 2 {
				waits()
				armed.Store(true)
				want := make(map[int64]bool)
				for i := range 20 {
					r, err := db.Queue.Enqueue(t.Context(), conn, onceq.Job{Kind: "k", Queue: []string{"default", "other"}[i%2]})
					require.NoError(t, err)
					want[r.ID] = true
				}
				for range 20 {
					id := receive(t, ran)
					require.True(t, want[id], id)
					delete(want, id)
				}
			}
			waits()
			require.NoError(t, w.stop())
		})
	}
}

// A worker of several queues: delayed jobs, claims from several of them at once, one that was committed late, one that has lost
// a lease, and some that were moved.
func TestCitus_AWorkerOfSeveralQueues(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := make(chan string, 100)
	w := start(t, db, onceq.WorkerConfig{Also: []string{"a", "b", "c"}}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.Queue
		return nil
	}))
	for range 3 {
		for _, queue := range []string{"a", "b", "default"} {
			add(t, db, onceq.Job{Queue: queue, Delay: 100 * time.Millisecond})
		}
	}
	for range 9 {
		receive(t, ran)
	}
	until(t, db, noJobs)
	for lost := range 2 {
		id := add(t, db, onceq.Job{Queue: "c", Delay: time.Hour})
		sqlRun(t, db, `update onceq.jobs set run_at = '2026-01-01', lost = $2::int where id = $1`, id, lost)
		require.Equal(t, "c", receive(t, ran))
	}
	id := add(t, db, onceq.Job{Queue: "elsewhere"})
	moved, err := onceqops.New(db.Queue).Move(t.Context(), db.Pool, id, "a")
	require.NoError(t, err)
	require.True(t, moved)
	require.Equal(t, "a", receive(t, ran))
	add(t, db, onceq.Job{Queue: "elsewhere"})
	n, err := onceqops.New(db.Queue).MoveMany(t.Context(), db.Pool, onceqops.Filter{Queue: "elsewhere"}, "b")
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, "b", receive(t, ran))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.NotContains(t, w.logged(), "level=WARN")
}

// On Citus a look takes so long that elsewhere a worker of many busy queues would look at what is new instead.
func TestCitus_AWorkerOfManyBusyQueues(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	queues := manyQueues(60)
	w := start(t, db, onceq.WorkerConfig{Also: queues}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	for range 30 {
		var jobs []onceq.Job
		for _, queue := range queues {
			jobs = append(jobs, onceq.Job{Kind: "k", Queue: queue})
		}
		_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
		require.NoError(t, err)
	}
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.NotContains(t, w.logged(), "looking for jobs that are due failed")
}

// A worker that would be woken all the time announces nothing and looks by itself. When it is calmer, it is woken again.
func TestQueues_AWorkerThatWouldBeWokenAllTheTimeLooksInstead(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	queues := manyQueues(60)
	var ran atomic.Int64
	w := start(t, db, onceq.WorkerConfig{Also: queues, PollInterval: time.Hour}, handle(func(context.Context, *onceq.Lease) error {
		ran.Add(1)
		return nil
	}))
	const waits = `exists (select from onceq.waiters where idle_until > statement_timestamp())`
	until(t, db, waits)
	sent := int64(0)
	eventually(t, "a worker that does not announce itself", func() bool {
		var jobs []onceq.Job
		for _, queue := range queues {
			jobs = append(jobs, onceq.Job{Kind: "k", Queue: queue})
		}
		_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
		require.NoError(t, err)
		sent += int64(len(jobs))
		return sqlOne[bool](t, db, `select not `+waits)
	})
	eventually(t, "all jobs", func() bool { return ran.Load() == sent })
	until(t, db, waits)
	add(t, db, onceq.Job{Queue: queues[0]})
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// A worker of so many queues that a look at all of them takes long, and that would be woken all the time, looks at what was
// enqueued last in between.
func TestQueues_ABusyWorkerOfManyLooksAtWhatIsNew(t *testing.T) {
	conformance.Quick(t, "jobs have to come while a worker looks at 3,000 queues, again and again")
	t.Parallel()
	var news atomic.Int64
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			if strings.Contains(sql, "order by id desc limit 1000") {
				news.Add(1)
			}
		}}
	}))
	queues := manyQueues(3000)
	var ran atomic.Int64
	w := start(t, db, onceq.WorkerConfig{Also: queues, PollInterval: time.Hour}, handle(func(context.Context, *onceq.Lease) error {
		ran.Add(1)
		return nil
	}))
	until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
	sent := int64(0)
	eventually(t, "looks at what is new", func() bool {
		var jobs []onceq.Job
		for i := range 60 {
			jobs = append(jobs, onceq.Job{Kind: "k", Queue: queues[(int(sent)+i)%len(queues)]})
		}
		_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
		require.NoError(t, err)
		sent += int64(len(jobs))
		return news.Load() > 5
	})
	eventually(t, "all jobs", func() bool { return ran.Load() == sent })
	require.NoError(t, w.stop())
	require.NotContains(t, w.logged(), "level=WARN")
}

// Metadata that somebody wrote by hand is read as well as it can be: its job runs, and so do those that were claimed with it.
func TestQueues_MetadataWrittenByHandStopsNoJob(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for _, queue := range []string{"a", "b", "c"} {
		add(t, db, onceq.Job{Queue: queue})
	}
	sqlRun(t, db, `update onceq.jobs set metadata = '{"tenant": 5, "name": "n", "more": {"a": [1]}}' where queue = 'a'`)
	sqlRun(t, db, `update onceq.jobs set metadata = '[1]' where queue = 'b'`)
	want := map[string]string{"tenant": "5", "name": "n", "more": `{"a": [1]}`}
	list, err := onceqops.New(db.Queue).List(t.Context(), db.Pool, onceqops.Filter{Queue: "a"})
	require.NoError(t, err)
	require.Equal(t, want, list[0].Metadata)
	ran := make(chan *onceq.Lease, 3)
	w := start(t, db, onceq.WorkerConfig{Also: []string{"a", "b", "c"}}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l
		return nil
	}))
	got := make(map[string]map[string]string)
	for range 3 {
		l := receive(t, ran)
		got[l.Queue] = l.Metadata
	}
	require.Equal(t, map[string]map[string]string{"a": want, "b": nil, "c": nil}, got)
	require.NoError(t, w.stop())
	require.NotContains(t, w.logged(), "level=WARN")
}

// The rescan of many queues that each have one long job reads no pages of them, so that it is cheap and comes often. A lease
// that has expired in one of them is found.
func TestQueues_TheRescanPassesOverQueuesWithOneLongJob(t *testing.T) {
	t.Parallel()
	const n = 200
	var trace trapTracer
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &trace }))
	queues := manyQueues(n)
	var jobs []onceq.Job
	for _, queue := range queues {
		jobs = append(jobs, onceq.Job{Kind: "k", Queue: queue, RunAt: time.Now().Add(-time.Hour)})
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	sqlRun(t, db, `update onceq.jobs set leased_until = statement_timestamp() + interval '1 hour', claims = 1, holder = 1`)
	ran := make(chan string, n)
	w := start(t, db, onceq.WorkerConfig{Also: queues, PollInterval: 20 * time.Millisecond}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.Queue
		return nil
	}))
	eventually(t, "two turns", func() bool { return trace.turns.Load() >= 2*n })
	require.Zero(t, trace.pages.Load())
	for _, queue := range []string{queues[0], queues[n-1]} {
		sqlRun(t, db, `update onceq.jobs set leased_until = statement_timestamp() where queue = $1`, queue)
		require.Equal(t, queue, receive(t, ran))
	}
	require.NoError(t, w.stop())
}

// A worker with so many queues that a look at all of them is several statements finds a lease that ran out, and a job that nobody
// announced.
func TestQueues_VeryManyAreSearchedForExpiredLeases(t *testing.T) {
	long(t, "the worker looks every few seconds")
	t.Parallel()
	const n = 3000
	var trace trapTracer
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &trace }))
	queues := manyQueues(n)
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{{Kind: "k", Queue: queues[n-2]}, {Kind: "k", Queue: queues[n-1]}})
	require.NoError(t, err)
	sqlRun(t, db, `update onceq.jobs set leased_until = statement_timestamp() + interval '1 hour', claims = 1, holder = 1`)
	ran := make(chan string, n)
	w := start(t, db, onceq.WorkerConfig{Also: queues}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.Queue
		return nil
	}))
	eventually(t, "a turn", func() bool { return trace.turns.Load() >= 2 })
	sqlRun(t, db, `update onceq.jobs set leased_until = statement_timestamp() where queue = '`+queues[n-1]+`'`)
	require.Equal(t, queues[n-1], receive(t, ran))
	sqlRun(t, db, `update onceq.jobs set leased_until = null where queue = '`+queues[n-2]+`'`)
	require.Equal(t, queues[n-2], receive(t, ran))
	require.NoError(t, w.stop())
}
