package tests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/queuetest"
)

// leased counts the jobs that came to jobs with a lease, and those that came without one.
func leased(t *testing.T, db *queuetest.DB) (with, without int) {
	t.Helper()
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) filter (where leased), count(*) filter (where not leased) from public.came`).Scan(&with, &without))
	return with, without
}

// watchLeases records how jobs come to jobs from now on.
func watchLeases(t *testing.T, db *queuetest.DB) {
	t.Helper()
	for _, s := range []string{`create table public.came (id bigint, leased boolean)`, `grant all on public.came to public`, `
create function public.came() returns trigger language plpgsql as $$
begin
  insert into public.came values (new.id, new.leased_until is not null);
  return null;
end $$`, `create trigger came after insert on ` + pgx.Identifier{db.Schema, "jobs"}.Sanitize() + ` for each row execute function public.came()`} {
		must[pgconn.CommandTag](t)(conformance.Owner(t, db).Exec(t.Context(), s))
	}
}

// ran keeps the order in which jobs ran.
type ran struct {
	mu  sync.Mutex
	all []int
}

func (r *ran) add(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, n)
}

func (r *ran) list() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all)
}

func inLane(t *testing.T, db *queuetest.DB, kind onceq.Kind[charge], customer, from, n int) {
	t.Helper()
	jobs := make([]onceq.Job, n)
	for i := range jobs {
		jobs[i] = kind.Job(charge{customer, from + i})
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
}

// withLimit is a kind of lanes whose jobs have a limit, too.
func withLimit(t *testing.T, db *queuetest.DB, atOnce int) onceq.Kind[charge] {
	t.Helper()
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "provider", onceq.Limit{AtOnce: atOnce}))
	kind := charges
	kind.Limit = func(charge) string { return "provider" }
	return kind
}

// A completion leases the next job of the lane, in both kinds of handlers, for jobs with keys, with a limit, and with neither, and the
// jobs run once and in order.
func TestSuccessor_IsLeasedWithTheCompletion(t *testing.T) {
	t.Parallel()
	n := conformance.Sized(60, 300)
	keyed := charges
	keyed.Key = func(c charge) string { return fmt.Sprint(c.N) }
	for name, kind := range map[string]onceq.Kind[charge]{"keyed": keyed, "unkeyed": charges, "limited": charges} {
		for _, inTx := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", in a transaction ", inTx), func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 2)
				db := queuetest.New(t)
				watchLeases(t, db)
				kind := kind
				if name == "limited" {
					kind = withLimit(t, db, 5)
				}
				inLane(t, db, kind, 1, 0, n)
				var r ran
				h := kind.Handle(func(_ context.Context, l *onceq.Lease, c charge) error { r.add(c.N); return l.SetResult(c.N) })
				if inTx {
					h = kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, c charge) error {
						r.add(c.N)
						_, err := tx.Exec(ctx, `select 1`)
						return errors.Join(err, l.SetResult(c.N))
					})
				}
				w := start(t, db, onceq.WorkerConfig{}, h)
				until(t, db, noJobs+` and not exists (select from onceq.job_waits)`)
				require.NoError(t, w.stop())
				require.Len(t, r.list(), n)
				require.True(t, slices.IsSorted(r.list()))
				require.Equal(t, n, w.count(onceq.EventClaimed))
				require.Equal(t, n, w.count(onceq.EventCompleted))
				require.Zero(t, w.count(onceq.EventStale)+w.count(onceq.EventLeaseLost))
				with, _ := leased(t, db)
				require.Positive(t, with)
				if name == "keyed" {
					require.Equal(t, n, sqlOne[int](t, db, `select count(*)::int from onceq.job_fences where state = 3 and result::text = key`))
				}
				require.NoError(t, db.Check())
			})
		}
	}
}

// Where a limit is full, the next one is the first that waits for it, of whatever lane, and takes turns with those of the other
// lanes. What was leased after a lost answer is given back there, too: the lanes do not stand still for an hour.
func TestSuccessor_OfAFullLimit(t *testing.T) {
	t.Parallel()
	n := conformance.Sized(60, 200)
	for i := range 4 {
		inTx, loses := i%2 == 1, i/2 == 1
		t.Run(fmt.Sprint("in a transaction ", inTx, ", answers are lost ", loses), func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 2)
			var armed, cut atomic.Bool
			db := queuetest.New(t, losingCommits(&armed, &cut, true))
			watchLeases(t, db)
			kind := withLimit(t, db, 1)
			for customer := range 3 {
				inLane(t, db, kind, customer, 0, n)
			}
			var all [3]ran
			var order []charge
			var early []int64 // the jobs that ran while no lane could have ended
			var running atomic.Int32
			run := func(l *onceq.Lease, c charge) {
				if running.Add(1) > 1 {
					t.Error("two at once")
				}
				all[c.Customer].add(c.N)
				if order = append(order, c); len(order) < n {
					early = append(early, l.ID)
				}
				armed.Store(loses && c.N%20 == 19)
				running.Add(-1)
			}
			h := kind.Handle(func(_ context.Context, l *onceq.Lease, c charge) error { run(l, c); return nil })
			if inTx {
				h = kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, c charge) error {
					_, err := tx.Exec(ctx, `select 1`)
					run(l, c)
					return err
				})
			}
			w := start(t, db, onceq.WorkerConfig{Lease: time.Hour}, h)
			until(t, db, noJobs+` and not exists (select from onceq.job_waits)`)
			require.NoError(t, w.stop())
			for customer := range all {
				require.Len(t, all[customer].list(), n)
				require.True(t, slices.IsSorted(all[customer].list()))
			}
			require.Equal(t, loses, cut.Load())
			turns := 0
			for i := range order[1:n] {
				if order[i].Customer != order[i+1].Customer {
					turns++
				}
			}
			require.Greater(t, turns, n/2, "the lanes take turns")
			require.Positive(t, sqlOne[int](t, db, `select count(*)::int from public.came where leased and id = any ($1)`, early))
			require.NoError(t, db.Check())
		})
	}
}

// A completion leases a job of another lane, and the next one of its own lane moves on to another limit: a promoter is told of it, and
// does not wait until there is nothing to lease any more.
func TestSuccessor_APromoterIsToldOfTheOthers(t *testing.T) {
	t.Parallel()
	const n = 5000
	db := queuetest.New(t)
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "other", onceq.Limit{AtOnce: 1}))
	kind := withLimit(t, db, 1)
	kind.Limit = func(c charge) string { return []string{"provider", "other"}[max(0, c.Customer-9)] }
	inLane(t, db, kind, 1, 0, n)
	inLane(t, db, kind, 2, 0, n)
	kind.Lane = func(c charge) string { return fmt.Sprint(min(c.Customer, 9)) }
	inLane(t, db, kind, 9, 0, 1)
	inLane(t, db, kind, 10, 0, 1)
	var r ran
	other := make(chan int, 1)
	w := start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, kind.Handle(func(_ context.Context, _ *onceq.Lease, c charge) error {
		if c.Customer == 10 {
			other <- len(r.list())
		}
		r.add(c.N)
		return nil
	}))
	require.Less(t, receive(t, other), n)
	require.NoError(t, w.stop())
}

// It is left to a claim if a claim would not have taken it: of another queue, of a kind without a handler here, after a lost
// lease.
func TestSuccessor_OnlyWhatAClaimWouldTake(t *testing.T) {
	t.Parallel()
	other := charges
	other.Name, other.LaneFamily = "other", "charge"
	for name, change := range map[string]string{
		"queue": `update onceq.job_waits set queue = 'elsewhere'`,
		"kind":  `update onceq.job_waits set kind = 'other'`,
		"lost":  `update onceq.job_waits set lost = 1, claims = 1`,
	} {
		for _, limited := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", limited ", limited), func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 2)
				db := queuetest.New(t)
				kind := charges
				if limited {
					kind = withLimit(t, db, 5)
				}
				inLane(t, db, kind, 1, 0, 2)
				first := laneClaim(t, db.Queue, 1)
				require.Len(t, first, 1)
				second := sqlOne[int64](t, db, `select id from onceq.job_waits`)
				sqlRun(t, db, change)
				watchLeases(t, db)
				require.NoError(t, first[0].Release(t.Context()))
				w := start(t, db, onceq.WorkerConfig{}, kind.Handle(func(context.Context, *onceq.Lease, charge) error { return nil }))
				until(t, db, `exists (select from public.came where id = $1)`, second)
				with, _ := leased(t, db) // with a limit, the first one has come again as well
				require.Zero(t, with)
				require.NoError(t, w.stop())
			})
		}
	}
}

// A lane with jobs without end does not keep the only handler from the other jobs of its queue, and a pause ends it.
func TestSuccessor_OthersHaveTheirTurn(t *testing.T) {
	conformance.Quick(t, "a completion leases the next job of a lane only if the machine is quick enough for that to be worth it")
	t.Parallel()
	for _, inTx := range []bool{false, true} {
		t.Run(fmt.Sprint("in a transaction ", inTx), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			watchLeases(t, db)
			inLane(t, db, charges, 1, 0, 10_000)
			started := make(chan int, 1)
			var r ran
			h := charges.Handle(func(_ context.Context, _ *onceq.Lease, c charge) error { r.add(c.N); return nil })
			if inTx {
				h = charges.HandleTx(func(_ context.Context, _ pgx.Tx, _ *onceq.Lease, c charge) error { r.add(c.N); return nil })
			}
			start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}}}, h,
				work.Handle(func(context.Context, *onceq.Lease, int) error { started <- len(r.list()); return nil }))
			eventually(t, "a leased successor", func() bool { with, _ := leased(t, db); return with > 20 })
			add(t, db, work.Job(1))
			require.Less(t, receive(t, started), 9_000)
			require.NoError(t, db.Queue.PauseQueue(t.Context(), db.Pool, "default", "test"))
			var before int
			eventually(t, "an end of the runs", func() bool {
				n := len(r.list())
				same := n == before && n > 0
				before = n
				return same && sqlOne[bool](t, db, `select not exists (select from onceq.jobs where leased_until is not null)`)
			})
			require.Positive(t, sqlOne[int](t, db, `select count(*)::int from onceq.job_waits`))
		})
	}
}

// A kind is paused while one of its jobs runs. The job's completion does not start the next one of the lane, although other
// kinds go on.
func TestSuccessor_NoneOfAPausedKind(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	inLane(t, db, charges, 1, 0, 2)
	began, others, finish := make(chan int, 2), make(chan int, 10), make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{}, charges.Handle(func(_ context.Context, _ *onceq.Lease, c charge) error {
		began <- c.N
		<-finish
		return nil
	}), work.Handle(func(_ context.Context, _ *onceq.Lease, n int) error { others <- n; return nil }))
	require.Equal(t, 0, receive(t, began))
	require.NoError(t, db.Queue.PauseKind(t.Context(), db.Pool, charges.Name, "test"))
	for i := range 2 { // the first claim hears of the pause
		time.Sleep(600 * time.Millisecond) // what claims know of pauses is half a second old at most; here time itself is the condition
		add(t, db, work.Job(i))
		require.Equal(t, i, receive(t, others))
	}
	close(finish) // soon after a claim has found no more
	until(t, db, `not exists (select from onceq.lane_places p join onceq.jobs j on j.id = p.id where j.leased_until is not null)`)
	add(t, db, work.Job(2))
	require.Equal(t, 2, receive(t, others))
	require.Empty(t, began)
	resumed, err := db.Queue.ResumeKind(t.Context(), db.Pool, charges.Name)
	require.NoError(t, err)
	require.True(t, resumed)
	require.Equal(t, 1, receive(t, began))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// Run ends in the middle of a lane: what its last completions leased is given back, so that it need not run out.
func TestSuccessor_ShutdownLeavesNoLease(t *testing.T) {
	t.Parallel()
	for n := range 4 {
		inTx, limited := n%2 == 1, n/2 == 1
		t.Run(fmt.Sprint("in a transaction ", inTx, ", limited ", limited), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			watchLeases(t, db)
			charges := charges
			if limited {
				charges = withLimit(t, db, 5)
			}
			inLane(t, db, charges, 1, 0, conformance.Sized(4_000, 100_000))
			var r ran
			for range conformance.Sized(2, 15) {
				from := len(r.list())
				h := charges.Handle(func(_ context.Context, _ *onceq.Lease, c charge) error { r.add(c.N); return nil })
				if inTx {
					h = charges.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, c charge) error {
						r.add(c.N)
						_, err := tx.Exec(ctx, `select 1`)
						return err
					})
				}
				w := start(t, db, onceq.WorkerConfig{Lease: 10 * time.Minute}, h)
				eventually(t, "some runs", func() bool { return len(r.list()) > from+20 })
				require.NoError(t, w.stop())
				require.Zero(t, sqlOne[int](t, db, `select count(*)::int from onceq.jobs where leased_until is not null`), w.logged())
			}
			all := r.list()
			require.True(t, slices.IsSorted(all))
			require.Len(t, slices.Compact(all), len(r.list()), "jobs that ran twice")
			with, _ := leased(t, db)
			require.Positive(t, with)
			require.NoError(t, db.Check())
		})
	}
}

// The guard decides about the successor too: a completion under a lost lease lets nothing into the lane.
func TestSuccessor_OfALostLease(t *testing.T) {
	t.Parallel()
	for _, inTx := range []bool{false, true} {
		t.Run(fmt.Sprint("in a transaction ", inTx), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			inLane(t, db, charges, 1, 0, 3)
			var r ran
			run := func(ctx context.Context, c charge) error {
				if r.add(c.N); len(r.list()) > 1 {
					return nil
				}
				_, err := db.Pool.Exec(ctx, `update onceq.jobs set holder = 0, leased_until = statement_timestamp(), claims = claims + 1`)
				return err
			}
			h := charges.Handle(func(ctx context.Context, _ *onceq.Lease, c charge) error { return run(ctx, c) })
			if inTx { // it never opens the transaction
				h = charges.HandleTx(func(ctx context.Context, _ pgx.Tx, _ *onceq.Lease, c charge) error { return run(ctx, c) })
			}
			w := start(t, db, onceq.WorkerConfig{Lease: 10 * time.Minute}, h)
			until(t, db, noJobs+` and not exists (select from onceq.job_waits)`)
			require.NoError(t, w.stop())
			require.Equal(t, []int{0, 0, 1, 2}, r.list())
			require.Equal(t, 1, w.count(onceq.EventStale)+w.count(onceq.EventLeaseLost))
		})
	}
}

// eventContexts are what the hook got with each claim: the error of its context, and the lease in it.
type eventContexts struct {
	mu  sync.Mutex
	bad []string
}

func (c *eventContexts) Event(ctx context.Context, e onceq.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := onceq.LeaseFromContext(ctx); e.Type == onceq.EventClaimed && (ctx.Err() != nil || l != nil) {
		c.bad = append(c.bad, fmt.Sprint(e.JobID, ctx.Err(), l != nil))
	}
}

// The event of a claim gets a context that goes on and that belongs to no handler.
func TestSuccessor_EventsContext(t *testing.T) {
	t.Parallel()
	for _, inTx := range []bool{false, true} {
		t.Run(fmt.Sprint("in a transaction ", inTx), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			watchLeases(t, db)
			inLane(t, db, charges, 1, 0, 300)
			h := charges.Handle(func(context.Context, *onceq.Lease, charge) error { return nil })
			if inTx {
				h = charges.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, charge) error { return nil })
			}
			var c eventContexts
			q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema, Hook: &c})
			require.NoError(t, err)
			w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, h)
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- w.Run(ctx) }()
			until(t, db, noJobs+` and not exists (select from onceq.job_waits)`)
			cancel()
			require.NoError(t, receive(t, ended))
			with, _ := leased(t, db)
			require.Positive(t, with)
			require.Empty(t, c.bad)
		})
	}
}

// What a completion leases while Run ends is given back at once too, if handlers of a batch hold its slot.
func TestSuccessor_ShutdownBehindABatch(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	watchLeases(t, db)
	batch := onceq.Kind[int]{Name: "batch", Queue: "default"}
	inLane(t, db, charges, 1, 0, 10_000)
	inLane(t, db, charges, 1, 10_000, 10_000)
	inLane(t, db, charges, 1, 20_000, 10_000)
	started, end := make(chan struct{}), make(chan struct{})
	gate := begin(t, db)
	sqlRun(t, asOwner(t, db), `
create function public.gate() returns trigger language plpgsql as $$
begin
  if old.lane is not null then perform pg_advisory_xact_lock_shared(17); end if;
  return null;
end $$`)
	sqlRun(t, asOwner(t, db), `create trigger gate after delete on jobs for each row execute function public.gate()`)
	w := start(t, db, onceq.WorkerConfig{Lease: 10 * time.Minute, ShutdownTimeout: time.Hour, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}}},
		charges.Handle(func(context.Context, *onceq.Lease, charge) error { return nil }),
		batch.HandleBatch(10, func(context.Context, pgx.Tx, []onceq.Item[int]) error {
			started <- struct{}{}
			<-end
			return nil
		}))
	const stuck = `exists (select from pg_locks where locktype = 'advisory' and objid = 17 and not granted
		and database = (select oid from pg_database where datname = current_database()))`
	for next := false; !next; {
		before, _ := leased(t, db)
		eventually(t, "a leased successor", func() bool { with, _ := leased(t, db); return with > before })
		must[pgconn.CommandTag](t)(gate.Exec(t.Context(), `select pg_advisory_lock(17)`))
		until(t, db, stuck)
		// The statement that waits is one that leases, or it is not.
		next = sqlOne[bool](t, db, `select exists (select from pg_stat_activity where datname = current_database() and wait_event = 'advisory' and query like '%finish_next(%')`)
		if !next {
			must[pgconn.CommandTag](t)(gate.Exec(t.Context(), `select pg_advisory_unlock(17)`))
		}
	}
	add(t, db, onceq.Job{Kind: "batch"})
	receive(t, started)
	w.cancel()
	eventually(t, "the end of claims", func() bool { return sqlOne[bool](t, db, `select not exists (select from onceq.waiters)`) })
	must[pgconn.CommandTag](t)(gate.Exec(t.Context(), `select pg_advisory_unlock(17)`))
	eventually(t, "only the batch's lease", func() bool {
		return sqlOne[bool](t, db, `select not exists (select from onceq.jobs where leased_until is not null and lane is not null)`)
	})
	close(end)
	require.NoError(t, w.stop())
	commit(t, gate)
}

// idleLanes runs a worker, and enqueues jobs into lanes of their own for it, each after it has announced that it waits, until
// enough says so.
func idleLanes(t *testing.T, db *queuetest.DB, cfg onceq.WorkerConfig, r *ran, enough func(jobs int) bool, handlers ...onceq.Handler) (w *working, jobs int) {
	t.Helper()
	w = start(t, db, cfg, handlers...)
	for ; !enough(jobs); jobs++ {
		until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp() and busy is null
			and not exists (select from onceq.wakes x where x.worker = waiters.worker and x.round = waiters.round))`)
		inLane(t, db, charges, jobs, jobs, 1)
		eventually(t, "the job", func() bool { return len(r.list()) == jobs+1 })
	}
	until(t, db, noJobs)
	return w, jobs
}

// A promoter leases the job that the worker was woken for, if it comes into an idle lane. One of a worker whose kinds name no lanes
// does it as well, once it has let such a job in: it started at the next look, a second later. Nothing of that is lost in a crash, so its
// commit waits for the disk: otherwise two runs could have one token.
func TestFirst_IsLeasedByThePromoter(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"a lease", "a transaction", "a kind that names no lane"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["synchronous_commit"] = "local" }))
			watchLeases(t, db)
			sqlRun(t, asOwner(t, db), `
alter table public.came add durable text default current_setting('synchronous_commit')`)
			var r ran
			charges := charges
			if how == "a kind that names no lane" { // its jobs do
				charges.Lane = nil
			}
			h := charges.Handle(func(_ context.Context, l *onceq.Lease, c charge) error { r.add(c.N); return oneClaim(l) })
			if how == "a transaction" {
				h = charges.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, c charge) error {
					r.add(c.N)
					_, err := tx.Exec(ctx, `select 1`)
					return errors.Join(err, oneClaim(l))
				})
			}
			w, n := idleLanes(t, db, onceq.WorkerConfig{}, &r, func(jobs int) bool { with, _ := leased(t, db); return with >= 10 || jobs == 200 }, h)
			require.NoError(t, w.stop())
			require.Less(t, n, 200)
			require.Len(t, r.list(), n)
			require.Equal(t, n, w.count(onceq.EventClaimed))
			require.Equal(t, n, w.count(onceq.EventCompleted))
			require.Zero(t, w.count(onceq.EventStale)+w.count(onceq.EventLeaseLost)+w.count(onceq.EventFailed))
			require.Zero(t, sqlOne[int](t, db, `select count(*)::int from public.came where leased and durable <> 'local'`))
			require.NoError(t, db.Check())
		})
	}
}

// oneClaim refuses a job that was not claimed once.
func oneClaim(l *onceq.Lease) error {
	if l.Token != l.ID<<20|1 || l.Attempt != 1 || l.Lost != 0 || l.Lane == "" {
		return onceq.Fatal(fmt.Errorf("%+v", l))
	}
	return nil
}

// The answer of a promoter is lost that has leased a job. The job is given back, so that it does not wait for the end of a lease that
// nobody knows of, and has not lost one.
func TestFirst_ALostAnswer(t *testing.T) {
	t.Parallel()
	for _, whole := range []bool{false, true} {
		t.Run(fmt.Sprint("all of it ", whole), func(t *testing.T) {
			t.Parallel()
			var armed, cut atomic.Bool
			db := queuetest.New(t, losingCommitsOf(&armed, &cut, whole, func(answer []byte) bool { // with a job, and not of a claim
				return bytes.Contains(answer, []byte(`"Customer"`)) && !bytes.Contains(answer, []byte("UPDATE "))
			}))
			watchLeases(t, db)
			apart, err := pgxpool.New(t.Context(), db.URL)
			require.NoError(t, err)
			defer apart.Close()
			var r ran
			w := start(t, db, onceq.WorkerConfig{Lease: time.Hour}, charges.Handle(func(_ context.Context, l *onceq.Lease, c charge) error {
				if l.Lost > 0 {
					t.Errorf("job %d has lost a lease", l.ID)
				}
				r.add(c.N)
				return nil
			}))
			for n := 0; !cut.Load(); n++ {
				until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp() and busy is null
					and not exists (select from onceq.wakes x where x.worker = waiters.worker and x.round = waiters.round))`)
				armed.Store(true)
				laneEnqueue(t, db.Queue, apart, charges.Job(charge{n, n}))
				eventually(t, "the job", func() bool { return len(r.list()) == n+1 })
			}
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.NoError(t, db.Check())
		})
	}
}

// It leaves to a claim what would take the last slot, what comes with others, and what comes while anything is paused. The commit of
// what it lets in then waits for no disk.
func TestFirst_LeavesOthersToClaims(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		slots, together int
		batches         bool
		pause           string
	}{
		"the last slot":             {slots: 1},
		"the last slot, of batches": {slots: 1, batches: true},
		"several at once":           {slots: 10, together: 3},
		"something is paused":       {slots: 10, pause: "another"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["synchronous_commit"] = "local" }))
			watchLeases(t, db)
			sqlRun(t, asOwner(t, db), `
alter table public.came add durable text default current_setting('synchronous_commit')`)
			if c.pause != "" {
				require.NoError(t, db.Queue.PauseQueue(t.Context(), db.Pool, c.pause, ""))
			}
			var r ran
			h := charges.Handle(func(_ context.Context, l *onceq.Lease, c charge) error { r.add(c.N); return oneClaim(l) })
			cfg := onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: c.slots}}}
			handlers := []onceq.Handler{h}
			if c.batches {
				batch := onceq.Kind[int]{Name: "batch"}
				handlers = append(handlers, batch.HandleBatch(10, func(context.Context, pgx.Tx, []onceq.Item[int]) error { return nil }))
			}
			w, n := idleLanes(t, db, cfg, &r, func(jobs int) bool { return jobs == 10 }, handlers...)
			if c.together > 0 {
				sqlRun(t, db, `truncate public.came`)
				jobs := make([]onceq.Job, c.together)
				for i := range jobs {
					jobs[i] = charges.Job(charge{1000 + i, 1000 + i})
				}
				must[[]onceq.Result](t)(db.Queue.EnqueueMany(t.Context(), db.Pool, jobs))
				n += c.together
				eventually(t, "all jobs", func() bool { return len(r.list()) == n })
			}
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.Len(t, r.list(), n)
			require.Zero(t, w.count(onceq.EventFailed))
			with, without := leased(t, db)
			require.Zero(t, with)
			require.Positive(t, without)
			require.Zero(t, sqlOne[int](t, db, `select count(*)::int from public.came where durable <> 'off'`), "nothing waited for the disk")
		})
	}
}

// The answer of a completion is lost. What it leased is given back as soon as the completion is known to be written, so that the
// lane does not stand still for a lease, and no job is charged for one.
func TestSuccessor_ALostAnswer(t *testing.T) {
	t.Parallel()
	for i := range 12 {
		inTx, whole, limited := i%2 == 1, i/2%2 == 1, []string{"none", "all", "every second"}[i/4]
		t.Run(fmt.Sprint("in a transaction ", inTx, ", all of it ", whole, ", limited ", limited), func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 4)
			var armed, cut atomic.Bool
			db := queuetest.New(t, losingCommits(&armed, &cut, whole))
			n, charges := conformance.Sized(100, 400), charges
			if limited != "none" {
				charges = withLimit(t, db, 5)
			}
			if limited == "every second" { // that of a job with a limit leases one without
				n = 160
				charges.Limit = func(c charge) string { return []string{"provider", ""}[c.N%2] }
			}
			inLane(t, db, charges, 1, 0, n)
			var r ran
			var again atomic.Int32 // jobs that were claimed twice: leased by a completion whose answer was lost
			run := func(l *onceq.Lease, c charge) {
				r.add(c.N)
				if l.Token&(1<<20-1) > 1 {
					again.Add(1)
				}
				if l.Lost > 0 {
					t.Errorf("job %d has lost a lease", l.ID)
				}
				armed.Store(c.N%20 == 18)
			}
			h := charges.Handle(func(_ context.Context, l *onceq.Lease, c charge) error { run(l, c); return nil })
			if inTx {
				h = charges.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, c charge) error {
					_, err := tx.Exec(ctx, `select 1`)
					run(l, c)
					return err
				})
			}
			w := start(t, db, onceq.WorkerConfig{Lease: time.Hour}, h)
			jobs := n
			eventually(t, "a job that was leased by a completion whose answer was lost", func() bool {
				until(t, db, noJobs+` and not exists (select from onceq.job_waits)`)
				if again.Load() > 0 {
					return true
				}
				inLane(t, db, charges, 1, jobs, n)
				jobs += n
				return false
			})
			require.NoError(t, w.stop())
			require.True(t, cut.Load())
			require.Len(t, r.list(), jobs)
			require.True(t, slices.IsSorted(r.list()))
		})
	}
}

// loseCommits is a connection that closes, once it is armed, in place of the next answer to a commit, or of the whole of what
// comes with it.
type loseCommits struct {
	net.Conn
	armed, cut  *atomic.Bool
	whole, over bool
	this        func(answer []byte) bool
}

// losingCommits makes all connections such ones.
func losingCommits(armed, cut *atomic.Bool, whole bool) queuetest.Option {
	return losingCommitsOf(armed, cut, whole, func([]byte) bool { return true })
}

// losingCommitsOf is the same for answers of which this holds.
func losingCommitsOf(armed, cut *atomic.Bool, whole bool, this func(answer []byte) bool) queuetest.Option {
	return queuetest.PoolConfig(func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return &loseCommits{Conn: conn, armed: armed, cut: cut, whole: whole, this: this}, err
		}
	})
}

func (c *loseCommits) Read(b []byte) (int, error) {
	if c.over {
		return 0, io.EOF
	}
	n, err := c.Conn.Read(b)
	if i := bytes.Index(b[:n], []byte("COMMIT\x00")); i >= 0 && c.this(b[:n]) && c.armed.CompareAndSwap(true, false) {
		c.over = true
		c.cut.Store(true)
		if i -= 5; c.whole || i <= 0 { // before it: the message's kind and length
			return 0, io.EOF
		}
		return i, nil
	}
	return n, err
}

// The next job is locked by somebody's transaction: the lane goes on when that ends.
func TestSuccessor_ThatIsLocked(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	inLane(t, db, charges, 1, 0, 5)
	first := laneClaim(t, db.Queue, 1)
	require.Len(t, first, 1)
	require.NoError(t, first[0].Release(t.Context()))
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `select from onceq.job_waits where id = (select min(id) from onceq.job_waits) for update`)
	require.NoError(t, err)
	var r ran
	w := start(t, db, onceq.WorkerConfig{}, charges.Handle(func(_ context.Context, _ *onceq.Lease, c charge) error { r.add(c.N); return nil }))
	until(t, db, noJobs)
	require.Equal(t, []int{0}, r.list())
	require.NoError(t, tx.Rollback(t.Context()))
	until(t, db, noJobs+` and not exists (select from onceq.job_waits)`)
	require.NoError(t, w.stop())
	require.Equal(t, []int{0, 1, 2, 3, 4}, r.list())
}
