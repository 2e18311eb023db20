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
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// lose marks waiting jobs as having lost n leases.
func lose(t testing.TB, db *queuetest.DB, ids []int64, n int) {
	t.Helper()
	sqlRun(t, db, `update onceq.jobs set lost = $2 where id = any ($1)`, ids, n)
}

const quarantineHeld = `(select count(*) from onceq.jobs where kind = 'lost' and leased_until is not null)`

// Jobs that wait in quarantine hold no slot and no lease. One that hangs does not keep other jobs, and does not keep others
// in quarantine for long.
func TestQuarantine_BlocksNobody(t *testing.T) {
	t.Parallel()
	for _, lost := range []int{1, 2} {
		t.Run(fmt.Sprint(lost), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			kind := onceq.Kind[int]{Name: "lost", Timeout: onceq.NoTimeout}
			ids := addMany(t, db, 20, onceq.Job{Kind: "lost"})
			lose(t, db, ids, lost)
			started, finish, fresh := make(chan int64, 100), make(chan struct{}), make(chan int64, 100)
			w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 8}}},
				kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
					started <- l.ID
					<-finish
					return nil
				}),
				handle(func(_ context.Context, l *onceq.Lease) error { fresh <- l.ID; return nil }))
			beside := func(held int) {
				t.Helper()
				id := add(t, db, onceq.Job{})
				require.Equal(t, id, receive(t, fresh))
				until(t, db, quarantineHeld+` = $1`, held)
			}
			require.Equal(t, ids[0], receive(t, started))
			if lost == 2 {
				beside(1)
				require.Empty(t, started, "one at a time")
			} else {
				for i := 1; i < 4; i++ {
					require.Equal(t, ids[i], receive(t, started), "the one before hangs")
				}
				beside(4) // half of the slots
			}
			close(finish)
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.Len(t, started, 20-map[int]int{1: 4, 2: 1}[lost])
		})
	}
}

// The jobs of a process that was killed start more and more at once while they end well, and each one sooner than a second after the
// one before, which still runs.
func TestQuarantine_WidensWhileJobsEndWell(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "lost"}
	var latest atomic.Int64
	var running, together atomic.Int32
	w := start(t, db, onceq.WorkerConfig{}, kind.Handle(func(context.Context, *onceq.Lease, int) error {
		defer running.Add(-1)
		now := time.Now().UnixNano()
		if before := latest.Swap(now); running.Add(1) > 1 && now-before < int64(time.Second) {
			together.Add(1)
		}
		time.Sleep(300 * time.Millisecond) // its work
		return nil
	}))
	for together.Load() < 3 { // the machine may be slow
		lose(t, db, addMany(t, db, 20, onceq.Job{Kind: "lost", Delay: time.Hour}), 1)
		sqlRun(t, db, `update onceq.jobs set run_at = now()`)
		until(t, db, noJobs)
	}
	require.NoError(t, w.stop())
}

// The next job in quarantine starts only when the outcome of the one before is written. Otherwise it could take that
// outcome with it.
func TestQuarantine_StartsAJobAfterTheOutcomeOfTheOneBefore(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ids := addMany(t, db, 2, onceq.Job{Kind: "lost"})
	lose(t, db, ids, 2)
	kind := onceq.Kind[int]{Name: "lost"}
	started, finish, fresh := make(chan int64, 100), make(chan struct{}, 2), make(chan int64, 100)
	w := start(t, db, onceq.WorkerConfig{},
		kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
			started <- l.ID
			<-finish
			return nil
		}),
		handle(func(_ context.Context, l *onceq.Lease) error { fresh <- l.ID; return nil }))
	require.Equal(t, ids[0], receive(t, started))
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(t.Context(), `select from onceq.jobs where id = $1 for update`, ids[0])
	require.NoError(t, err)
	finish <- struct{}{}
	waitBlocked(t, db)
	require.Equal(t, add(t, db, onceq.Job{}), receive(t, fresh))
	require.Empty(t, started)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, ids[1], receive(t, started))
	finish <- struct{}{}
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// Where there is one slot, jobs in quarantine and other jobs take turns.
func TestQuarantine_TakesTurnsWithOtherJobs(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ids := addMany(t, db, 30, onceq.Job{})
	lose(t, db, ids[:10], 3)
	ran := make(chan *onceq.Lease, 100)
	w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 1}}},
		handle(func(_ context.Context, l *onceq.Lease) error {
			ran <- l
			time.Sleep(30 * time.Millisecond) // longer than the time that a worker claims ahead for
			return nil
		}))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	close(ran)
	lost, others, last := 10, 20, 0
	for l := range ran {
		if l.Lost > 0 {
			lost--
			require.False(t, last > 0 && others > 0, "two of the quarantine in a row, and %d others wait", others)
		} else {
			others--
		}
		last = l.Lost
	}
	require.Zero(t, lost+others)
}

// A job that was claimed and never started keeps its count, however often the process beside it ends.
func TestQuarantine_ClaimsNoJobBeforeItCanStart(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ids := addMany(t, db, 3, onceq.Job{})
	lose(t, db, ids, 4) // with one more they are dead
	started, finish := make(chan int64, 10), make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{}, handle(func(_ context.Context, l *onceq.Lease) error {
		started <- l.ID
		<-finish
		return nil
	}))
	require.Equal(t, ids[0], receive(t, started))
	db.ExpireLease(ids[0])
	other := start(t, db, onceq.WorkerConfig{}, handle(func(_ context.Context, l *onceq.Lease) error { started <- l.ID; return nil }))
	until(t, db, `not exists (select from onceq.jobs where id <> $1)`, ids[0])
	until(t, db, noJobs)
	close(finish)
	require.NoError(t, w.stop())
	require.NoError(t, other.stop())
	require.Equal(t, [2]int{1, 0}, [2]int{other.count(onceq.EventDead) + w.count(onceq.EventDead), sqlOne[int](t, db, `select count(*) from onceq.job_history where id <> $1`, ids[0])})
}

// The poison job's process takes the jobs beside it with it. After five crashes the poison job is dead, and no other job
// is.
func TestProcesses_APoisonJobDiesAloneAfterFiveCrashes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, ledger)
	honest := addMany(t, db, 5, onceq.Job{Kind: "honest"})
	poison := add(t, db, onceq.Job{Kind: "poison"})
	honest = append(honest, addMany(t, db, 5, onceq.Job{Kind: "honest"})...)
	crashes := -1
	for done := false; !done; crashes++ {
		p := startProcess(t, db, steady)
		exited := make(chan struct{})
		go func() { _ = p.cmd.Wait(); close(exited) }()
		for running := true; running && !done; {
			select {
			case <-exited:
				running = false
				sqlRun(t, db, `update onceq.jobs set leased_until = statement_timestamp() where leased_until is not null`) // nobody has them any more
			case <-time.After(20 * time.Millisecond):
				done = sqlOne[bool](t, db, "select "+noJobs)
			}
		}
		if done {
			_ = p.cmd.Process.Kill()
			<-exited
		}
	}
	require.Equal(t, 5, crashes)
	require.Equal(t, poison, sqlOne[int64](t, db, `select id from onceq.job_history where state = 6`), "dead")
	require.Equal(t, len(honest), sqlOne[int](t, db, `select count(*) from effects`))
	require.Equal(t, len(honest), sqlOne[int](t, db, `select count(distinct job) from effects`))
	require.LessOrEqual(t, sqlOne[int](t, db, `select max(n) from (select count(*) as n from started where job <> $1 group by job) s`, poison), 3)
}

func poisonHandlers(pool onceq.DB, begin func(func(pgx.Tx) error) error, exit func()) []onceq.Handler {
	note := func(ctx context.Context, l *onceq.Lease) error {
		_, err := pool.Exec(ctx, `insert into started values ($1, $2)`, l.ID, l.Token)
		return err
	}
	honest := onceq.Kind[int]{Name: "honest"}
	poison := onceq.Kind[int]{Name: "poison"}
	return []onceq.Handler{
		honest.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			if err := note(ctx, l); err != nil {
				return err
			}
			time.Sleep(2 * time.Second) // its work
			return begin(func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, `insert into effects values ($1, $2)`, l.ID, l.Token); err != nil {
					return err
				}
				return l.Complete(ctx, tx)
			})
		}),
		poison.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			_ = note(ctx, l)
			time.Sleep(300 * time.Millisecond)
			exit()
			return nil
		}),
	}
}

// A claim of a job in quarantine that hangs keeps no other queue waiting.
func TestQuarantine_AClaimThatHangsKeepsNoOtherQueue(t *testing.T) {
	t.Parallel()
	hangs, goOn := make(chan bool, 100), make(chan struct{})
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			if strings.Contains(sql, "unnest($3::bigint[]) with ordinality as u(id, n)") {
				hangs <- true
				<-goOn
			}
		}}
	}))
	lose(t, db, []int64{add(t, db, onceq.Job{Queue: "a"})}, 1)
	ran := make(chan string, 2)
	w := start(t, db, onceq.WorkerConfig{Also: []string{"a"}}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l.Queue
		return nil
	}))
	receive(t, hangs)
	add(t, db, onceq.Job{})
	require.Equal(t, onceq.DefaultQueue, receive(t, ran))
	close(goOn)
	require.Equal(t, "a", receive(t, ran))
	require.NoError(t, w.stop())
}

// A claim of a job in quarantine takes no job that has been moved since the rescan, or that is of another kind now, as when the
// sequence of ids was set back.
func TestQuarantine_AClaimTakesOnlyTheJobsOfItsQueueAndKinds(t *testing.T) {
	t.Parallel()
	var hold atomic.Bool
	hold.Store(true)
	held, goOn := make(chan bool, 100), make(chan struct{})
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			if strings.Contains(sql, "unnest($3::bigint[]) with ordinality as u(id, n)") && hold.Load() {
				held <- true
				<-goOn
			}
		}}
	}))
	ids := addMany(t, db, 3, onceq.Job{})
	sqlRun(t, db, `update onceq.jobs set claims = 1, lost = 1`)
	ran := make(chan *onceq.Lease, 10)
	w := start(t, db, onceq.WorkerConfig{}, handle(func(_ context.Context, l *onceq.Lease) error {
		ran <- l
		return nil
	}))
	receive(t, held)
	moved, err := onceqops.New(db.Queue).Move(t.Context(), db.Pool, ids[0], "elsewhere")
	require.NoError(t, err)
	require.True(t, moved)
	sqlRun(t, db, `update onceq.jobs set kind = 'other' where id = $1`, ids[1])
	hold.Store(false)
	close(goOn)
	require.Equal(t, ids[2], receive(t, ran).ID)
	until(t, db, `(select count(*) = 2 and bool_and(claims = 1) from onceq.jobs)`)
	require.NoError(t, w.stop())
}

// A rescan takes a job for lost whose handler's transaction has locked its row for longer than a lease. The worker that has the
// job leaves it out, and claims others at once, not only after its next look.
func TestQuarantine_AJobThatItsOwnWorkerHoldsKeepsNoOthers(t *testing.T) {
	t.Parallel()
	var expired, rescanned atomic.Bool
	var pages, handling atomic.Int32
	running, finish := make(chan int64, 100), make(chan struct{}, 100)
	next := make(chan string, 100) // what comes after a rescan
	var db *queuetest.DB
	db = queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			what := ""
			switch {
			case strings.Contains(sql, "rescan_turn("):
				pages.Store(0)
			case strings.Contains(sql, "left_kinds operator(pg_catalog.&&) $5::text[]"):
				what = "look"
			case strings.Contains(sql, "claims = least("):
				what = "claim"
			}
			if what != "" && rescanned.CompareAndSwap(true, false) {
				next <- what
			}
		}, after: func(sql string) {
			// The last page of a rescan is one of the lowest priority. Meanwhile both handlers end.
			if !strings.Contains(sql, "(select count(*) from forward)") || pages.Add(1) != 3 || !expired.Load() {
				return
			}
			// One of them may be gone already, as the claimer rescans before it claims for a handler that has returned.
			before := sqlOne[int](t, db, `select count(*) from onceq.jobs`)
			finish <- struct{}{}
			finish <- struct{}{}
			eventually(t, "both handlers end", func() bool {
				return handling.Load() == 0 || sqlOne[int](t, db, `select count(*) from onceq.jobs`) <= before-2
			})
			rescanned.Store(true)
		}}
	}))
	long := onceq.Kind[int]{Name: "long", Timeout: onceq.NoTimeout}
	started, end := make(chan int64, 1), make(chan struct{})
	endAll := sync.OnceFunc(func() { expired.Store(false); close(end) })
	defer endAll()
	w := start(t, db, onceq.WorkerConfig{Lease: steady, Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 3}}},
		long.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
			_, err := tx.Exec(ctx, `select 1`)
			started <- l.ID
			<-end
			return err
		}),
		handle(func(_ context.Context, l *onceq.Lease) error {
			handling.Add(1)
			defer handling.Add(-1)
			running <- l.ID
			select {
			case <-finish:
			case <-end:
			}
			return nil
		}))
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, long.Job(1))
	require.NoError(t, err)
	id := receive(t, started)
	until(t, db, `exists (select from onceq.jobs where id = $1 and leased_until < statement_timestamp())`, id)
	addMany(t, db, 100, onceq.Job{})
	receive(t, running)
	receive(t, running)
	expired.Store(true)
	what := ""
	for returned := 0; what == ""; returned++ {
		require.Less(t, returned, 90, "no rescan")
		finish <- struct{}{} // a worker that is full rescans when a handler has returned, if it was not done a moment ago
		receive(t, running)
		select {
		case what = <-next:
		case <-time.After(2 * time.Second):
		}
	}
	for range 2 { // on a slow machine a look may have been due, too
		if what != "claim" {
			receive(t, running)
			receive(t, running)
			what = receive(t, next)
		}
	}
	require.Equal(t, "claim", what)
	endAll()
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Zero(t, w.count(onceq.EventLeaseLost))
}

// A process that works several schemas ends with the jobs of all of them, so they take turns: a job that ends it every time is found
// out whatever schema it is in.
func TestProcesses_APoisonJobDiesAloneBesideOtherSchemas(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, ledger)
	other := beside(t, db, "beside")
	poison, honest := add(t, db, onceq.Job{Kind: "poison"}), add(t, other, onceq.Job{Kind: "honest"})
	crashes := 0
	for done := false; !done; {
		p := startProcess(t, db, steady, processBeside+"=beside")
		exited := make(chan struct{})
		go func() { _ = p.cmd.Wait(); close(exited) }()
		for running := true; running && !done; {
			select {
			case <-exited:
				running = false
				crashes++
				sqlRun(t, db, `update onceq.jobs set leased_until = statement_timestamp() where leased_until is not null`) // nobody has them any more
				sqlRun(t, db, `update beside.jobs set leased_until = statement_timestamp() where leased_until is not null`)
			case <-time.After(20 * time.Millisecond):
				done = sqlOne[bool](t, db, `select not exists (select from onceq.jobs) and not exists (select from beside.jobs)`)
			}
		}
		if done {
			_ = p.cmd.Process.Kill()
			<-exited
		}
	}
	require.Equal(t, 5, crashes)
	require.Equal(t, poison, sqlOne[int64](t, db, `select id from onceq.job_history where state = 6`), "dead")
	require.Zero(t, sqlOne[int](t, db, `select count(*) from beside.job_history`))
	require.Equal(t, honest, sqlOne[int64](t, db, `select job from effects`))
}
