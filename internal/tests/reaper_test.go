package tests

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func newReaper(t *testing.T, db *queuetest.DB, cfg onceq.ReaperConfig) *onceq.Reaper {
	t.Helper()
	return must[*onceq.Reaper](t)(onceq.NewReaper(db.Queue, cfg))
}

func reap(t *testing.T, r *onceq.Reaper, want onceq.Reaped) {
	t.Helper()
	if got := must[onceq.Reaped](t)(r.RunOnce(t.Context())); got != want {
		t.Fatalf("reaped %+v, want %+v", got, want)
	}
}

// ago moves ends of jobs and claims into the past.
func ago(t *testing.T, db *queuetest.DB, interval string) {
	t.Helper()
	repairExec(t, db, `update onceq.job_fences set finished_at = finished_at - $1::text::interval, leased_until = leased_until - $1::text::interval`, interval)
	repairExec(t, db, `update onceq.job_history set finished_at = finished_at - $1::text::interval, keep_until = keep_until - $1::text::interval`, interval)
}

// The Reaper is tried on every state with every lifetime, just before and just after window and grace time.
func TestReaperRemovesOnlyFencesThatAreFree(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	r := newReaper(t, db, onceq.ReaperConfig{Grace: time.Hour})
	repairExec(t, db, `
		insert into onceq.job_fences (class, scope, key, state, token, created_at, finished_at, lifetime, holder, leased_until)
		select 1, 's', format('%s %s %s', state, lifetime, minutes), state, 1, now() - interval '1 year',
		       now() - minutes * interval '1 min', lifetime, 1, now() - interval '1 year'
		  from generate_series(0, 6) state, unnest(array[-1, 0, 3600000]) lifetime, unnest(array[50, 70, 110, 130]) minutes`)
	reap(t, r, onceq.Reaped{Fences: 3 * (3 + 1)})
	reap(t, r, onceq.Reaped{})
	rows, err := db.Pool.Query(t.Context(), `select key from onceq.job_fences where state in (3, 4, 5) order by key`)
	if err != nil {
		t.Fatal(err)
	}
	kept := must[[]string](t)(pgx.CollectRows(rows, pgx.RowTo[string]))
	var want []string
	for state := 3; state <= 5; state++ {
		for _, rest := range []string{"-1 110", "-1 130", "-1 50", "-1 70", "0 50", "3600000 110", "3600000 50", "3600000 70"} {
			want = append(want, fmt.Sprint(state, " ", rest))
		}
	}
	if fmt.Sprint(kept) != fmt.Sprint(want) {
		t.Fatalf("kept %q, want %q", kept, want)
	}
	if n := repairCount(t, db, `select count(*) from onceq.job_fences`); n != len(want)+4*3*4 {
		t.Fatalf("%d fences in all", n)
	}
}

func TestReaperLeavesWhatIsUnfinished(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	r := newReaper(t, db, onceq.ReaperConfig{})
	dead := repairDead(t, db, onceq.Job{Key: "dead"})
	repairDead(t, db, onceq.Job{Key: "for ever", Window: onceq.Forever})
	repairEnqueue(t, db, onceq.Job{Key: "leased", Window: onceq.UntilFinished})
	repairClaim(t, db)
	repairEnqueue(t, db, onceq.Job{Key: "delayed", Window: onceq.UntilFinished, Delay: time.Hour})
	reap(t, r, onceq.Reaped{})
	ago(t, db, "1 year")
	reap(t, r, onceq.Reaped{Fences: 1}) // of the dead job, whose window is over; the job itself stays
	if i := must[onceq.JobInfo](t)(db.Queue.Get(t.Context(), db.Pool, dead)); i.State != onceq.StateDead {
		t.Fatal(i.State)
	}
	// While the dead job stays, the invariants want a fence for it only if its key is taken.
	wantState(t, onceq.StateWaiting)(onceqops.New(db.Queue).Redrive(t.Context(), db.Pool, dead))
}

// A fence is made permanent after the Reaper's statement saw it and before its turn comes. A trigger on the row before
// stops the statement there. A naive statement deletes the fence.
func TestTrapReaperDeletesAFenceJustMadePermanent(t *testing.T) {
	t.Parallel()
	const naive = `delete from onceq.job_fences f using (
		select class, scope, key from onceq.job_fences where state = 3 and lifetime >= 0 and finished_at < now() - interval '1 day' order by key) d
		where f.class = d.class and f.scope = d.scope and f.key = d.key`
	for name, run := range map[string]func(ctx context.Context, db *queuetest.DB, r *onceq.Reaper) error{
		"naive": func(ctx context.Context, db *queuetest.DB, _ *onceq.Reaper) error {
			_, err := db.Pool.Exec(ctx, naive)
			return err
		},
		"reaper": func(ctx context.Context, _ *queuetest.DB, r *onceq.Reaper) error {
			_, err := r.RunOnce(ctx)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			r := newReaper(t, db, onceq.ReaperConfig{})
			must[pgconn.CommandTag](t)(owner(t, db).Exec(t.Context(), `
				create function stop() returns trigger language plpgsql as $$ begin
					if old.key = 'a' then perform pg_advisory_xact_lock(1); end if; return old; end $$;
				create trigger stop before delete on job_fences for each row execute function stop()`))
			repairExec(t, db, `
				insert into onceq.job_fences (class, scope, key, state, token, created_at, finished_at, lifetime)
				select 1, 's', k, 3, 1, now() - interval '1 year', now() - interval '1 year', 0 from unnest(array['a', 'b']) k`)
			gate := begin(t, db)
			if _, err := gate.Exec(t.Context(), `select pg_advisory_xact_lock(1)`); err != nil {
				t.Fatal(err)
			}
			pass := background(func() (int, error) { return 0, run(t.Context(), db, r) })
			waitBlocked(t, db)
			type answer struct {
				n   int64
				err error
			}
			permanent := make(chan answer, 1)
			go func() {
				tag, err := db.Pool.Exec(t.Context(), `update onceq.job_fences set lifetime = -1 where key = 'b'`)
				permanent <- answer{tag.RowsAffected(), err}
			}()
			// The update either succeeds at once, or waits for the Reaper.
			for len(permanent) == 0 && repairCount(t, db, `select count(*) from pg_stat_activity
				where datname = current_database() and wait_event_type = 'Lock'`) < 2 {
			}
			commit(t, gate)
			if _, err := pass(); err != nil {
				t.Fatal(err)
			}
			a := <-permanent
			if a.err != nil {
				t.Fatal(a.err)
			}
			lost := int(a.n) > repairCount(t, db, `select count(*) from onceq.job_fences where key = 'b'`)
			if lost != (name == "naive") {
				t.Fatalf("made permanent and then removed: %t", lost)
			}
		})
	}
}

// A later job is taking over a free key. The Reaper passes over its fence while that transaction is open, and the fence is
// live afterwards.
func TestReaperMeetsATakeover(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	r := newReaper(t, db, onceq.ReaperConfig{Grace: time.Millisecond})
	repairDead(t, db, onceq.Job{Key: "a", Window: onceq.UntilFinished})
	ago(t, db, "1 day")
	tx := begin(t, db)
	later := must[onceq.Result](t)(db.Queue.Enqueue(t.Context(), tx, onceq.Job{Kind: "mail", Key: "a"}))
	reap(t, r, onceq.Reaped{}) // locked, so it is passed over
	commit(t, tx)
	reap(t, r, onceq.Reaped{})
	if i := must[onceq.JobInfo](t)(db.Queue.GetByKey(t.Context(), db.Pool, "mail", "a")); i.ID != later.ID || i.State != onceq.StateWaiting {
		t.Fatalf("%+v", i)
	}
}

// A client uses its key just when the key would be forgotten. The key stays, in the state that the client gave it.
func TestReaperMeetsAClientThatComesBack(t *testing.T) {
	t.Parallel()
	for name, work := range map[string]func(ctx context.Context, tx pgx.Tx, f *onceq.Fence, c *onceq.FenceLease) error{
		"taken over": func(ctx context.Context, tx pgx.Tx, f *onceq.Fence, _ *onceq.FenceLease) error {
			_, err := f.Claim(ctx, tx)
			return err
		},
		"late success": func(ctx context.Context, tx pgx.Tx, _ *onceq.Fence, c *onceq.FenceLease) error {
			return c.Complete(ctx, tx, 1)
		},
		"resolved": func(ctx context.Context, tx pgx.Tx, f *onceq.Fence, _ *onceq.FenceLease) error {
			return f.Resolve(ctx, tx, onceq.Applied(1))
		},
	} {
		for _, commits := range []bool{true, false} {
			db := queuetest.New(t)
			r := newReaper(t, db, onceq.ReaperConfig{Grace: time.Millisecond})
			f := fenceOf(t, db, onceq.FenceSpec{Class: onceq.ClassRequest, Key: "k", Policy: onceq.RunAgain(30 * 24 * time.Hour)})
			c := fenceClaim(t, f, nil)
			ago(t, db, "32 days")
			tx := begin(t, db)
			fenceOK(t, name, work(t.Context(), tx, f, c))
			reap(t, r, onceq.Reaped{}) // locked, so it is passed over
			if commits {
				commit(t, tx)
				reap(t, r, onceq.Reaped{})
				continue
			}
			fenceOK(t, "rollback", tx.Rollback(t.Context()))
			reap(t, r, onceq.Reaped{Unknown: 1})
			fenceWant(t, "late success", c.Complete(t.Context(), nil, 1), onceq.ErrLeaseLost)
		}
	}
}

// What one transaction has locked, and keeps, holds up no pass: here an Emit that wrote the row of a job that gave up waiting,
// and rows that workers write.
func TestReaperWaitsForNoOpenTransaction(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	r := newReaper(t, db, onceq.ReaperConfig{})
	repairExec(t, db, `insert into onceq.waiter_queues values ('q', 2)`)
	repairExec(t, db, `insert into onceq.wakes values (2, 1, 'q')`)
	repairExec(t, db, `insert into onceq.turns (queue, kinds, priority, run_at, id, at) values ('q', 1, 0, now(), 1, now() - interval '2 hours')`)
	repairExec(t, db, `insert into onceq.job_counts (minute, took, started, completed, failed, dead, queue, kind, durations) values (now() - interval '2 days', 0, 0, 0, 0, 0, 'q', 'k', '{}')`)
	work := onceq.Kind[int]{Name: "k"}
	must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, work.Job(1)))
	db.Drain(work.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		if _, _, err := onceq.Await[int](ctx, l, "s", "e", time.Hour); err == nil {
			t.Error("the event is there already")
		}
		return nil
	}))
	tx := begin(t, db)
	must[bool](t)(db.Queue.Emit(ctx, tx, "s", "e", 1))
	for _, table := range []string{"waiter_queues", "wakes", "turns", "job_counts"} {
		must[pgconn.CommandTag](t)(tx.Exec(ctx, `select from onceq.`+table+` for update`))
	}
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if got := must[onceq.Reaped](t)(r.RunOnce(limited)); got != (onceq.Reaped{}) {
		t.Fatalf("reaped %+v of what is locked", got)
	}
	fenceOK(t, "rollback", tx.Rollback(ctx))
	reap(t, r, onceq.Reaped{Awaits: 1, Counts: 1})
	if n := repairCount(t, db, `select (select count(*) from onceq.waiter_queues) + (select count(*) from onceq.wakes) + (select count(*) from onceq.turns)`); n != 0 {
		t.Fatalf("%d rows of workers are left", n)
	}
}

func TestReaperKeepsTokensGrowing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	r := newReaper(t, db, onceq.ReaperConfig{})
	repairEnqueue(t, db, onceq.Job{Key: "a", Window: onceq.UntilFinished})
	l := repairClaim(t, db)
	if err := l.Complete(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	reap(t, r, onceq.Reaped{}) // free, but still in the grace time
	repairEnqueue(t, db, onceq.Job{Key: "a", Window: onceq.UntilFinished})
	if next := repairClaim(t, db); next.Token <= l.Token {
		t.Fatalf("token %d after %d", next.Token, l.Token)
	}
}

func TestReaperEffects(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	r := newReaper(t, db, onceq.ReaperConfig{})
	effect := func(id int64) {
		repairExec(t, db, `insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, detail)
			select 3, 'default', $1::bigint || '/' || s, s, $1, $1 << 20, now(), 3600000, 'why' from unnest(array[2, 3, 6]) s`, id)
	}
	left := func() int { return repairCount(t, db, `select count(*) from onceq.job_fences where class = 3`) }
	dead := repairDead(t, db, onceq.Job{})
	effect(dead)
	id := repairEnqueue(t, db, onceq.Job{})
	effect(id)
	l := repairClaim(t, db)
	for range 2 {
		reap(t, r, onceq.Reaped{})
		ago(t, db, "1 year")
	}
	if err := l.Complete(ctx, nil); err != nil {
		t.Fatal(err)
	}
	reap(t, r, onceq.Reaped{}) // the window begins
	ago(t, db, "119 min")
	reap(t, r, onceq.Reaped{})
	ago(t, db, "2 min")
	reap(t, r, onceq.Reaped{Effects: 3})
	if n := left(); n != 3 {
		t.Fatalf("%d effects are left: all of the dead job", n)
	}
	repairExec(t, db, `update onceq.job_fences set state = 2 where state = 6`) // a held effect would prevent the redrive
	wantState(t, onceq.StateWaiting)(onceqops.New(db.Queue).Redrive(ctx, db.Pool, dead))
	reap(t, r, onceq.Reaped{})
	ago(t, db, "1 year")
	reap(t, r, onceq.Reaped{})
	if n := left(); n != 3 {
		t.Fatalf("%d effects are left", n)
	}
}

func TestReaperFreesKeysOfMissingJobs(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	r := newReaper(t, db, onceq.ReaperConfig{})
	repairEnqueue(t, db, onceq.Job{Key: "a"})
	repairExec(t, db, `delete from onceq.jobs`)
	for range 2 {
		reap(t, r, onceq.Reaped{}) // notes when it first saw them
	}
	ago(t, db, "61 min")
	reap(t, r, onceq.Reaped{Missing: 1})
	if r := must[onceq.Result](t)(db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "mail", Key: "a"})); !r.Duplicate || r.State != onceq.StateCancelled {
		t.Fatalf("%+v", r)
	}
	ago(t, db, "24 h")
	repairEnqueue(t, db, onceq.Job{Key: "a"})
}

func TestReaperHistoryCancelsAndWaiters(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := make(map[string]int)
	db := queuetest.New(t, queuetest.Config(onceq.Config{Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
		if e.Type == onceq.EventReaped {
			mu.Lock()
			seen[e.Kind] += e.Count
			mu.Unlock()
		}
	})}))
	ctx := t.Context()
	r := newReaper(t, db, onceq.ReaperConfig{Batch: 2})
	repairDead(t, db, onceq.Job{})
	for range 5 {
		wantState(t, onceq.StateCancelled)(db.Queue.Cancel(ctx, db.Pool, repairEnqueue(t, db, onceq.Job{})))
	}
	done := repairEnqueue(t, db, onceq.Job{})
	live := repairEnqueue(t, db, onceq.Job{})
	leases := must[[]*onceq.Lease](t)(db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 2}))
	wantState(t, onceq.StateRunning)(db.Queue.Cancel(ctx, db.Pool, done))
	wantState(t, onceq.StateRunning)(db.Queue.Cancel(ctx, db.Pool, live))
	if err := leases[0].Complete(ctx, nil); err != nil {
		t.Fatal(err)
	}
	repairExec(t, db, `insert into onceq.waiters (worker, serves, round, room, idle_until) values (1, 1, 1, 1, now() - interval '59 min'), (2, 2, 1, 1, now() - interval '61 min')`)
	repairExec(t, db, `insert into onceq.waiter_queues values ('q', 1), ('q', 2)`)
	repairExec(t, db, `insert into onceq.wakes values (1, 0, 'q'), (1, 1, 'q'), (2, 1, 'q')`)
	reap(t, r, onceq.Reaped{Cancels: 1, Waiters: 1})
	reap(t, r, onceq.Reaped{})
	if n := repairCount(t, db, `select (select count(*) from onceq.waiter_queues where serves = 1) * 10 + (select count(*) from onceq.waiter_queues) * 100 + (select count(*) from onceq.wakes)`); n != 111 {
		t.Fatalf("%d, want the set of the worker that is there, and its present round", n)
	}
	ago(t, db, "25 h")
	reap(t, r, onceq.Reaped{History: 5})
	if n := repairCount(t, db, `select count(*) from onceq.job_history`); n != 1 {
		t.Fatalf("%d in history, want the dead one", n)
	}
	if want := map[string]int{"cancels": 1, "waiters": 1, "history": 5}; fmt.Sprint(seen) != fmt.Sprint(want) {
		t.Fatalf("events %v, want %v", seen, want)
	}
}

func TestReapersAtTheSameTime(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	const n = 30_000 // fills several ranges of pages
	repairExec(t, db, `
		insert into onceq.job_fences (class, scope, key, state, token, created_at, finished_at, lifetime)
		select 1, 's', 'key ' || i, 3, 1, now(), now() - interval '1 day', case when i % 3 = 0 then -1 else 0 end from generate_series(1, $1::int) i`, n)
	var wg sync.WaitGroup
	var mu sync.Mutex
	sum := 0
	for range 3 {
		wg.Add(1)
		r := newReaper(t, db, onceq.ReaperConfig{Batch: 700})
		go func() {
			defer wg.Done()
			got, err := r.RunOnce(t.Context())
			mu.Lock()
			defer mu.Unlock()
			if sum += got.Fences; err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	left := repairCount(t, db, `select count(*) from onceq.job_fences`)
	if sum+left != n || left < n/3 {
		t.Fatalf("%d removed, %d left, of %d", sum, left, n)
	}
	// A fence that one Reaper passed over, because another had it locked, is gone too.
	if left != n/3 {
		t.Fatalf("%d left, want %d", left, n/3)
	}
}

func TestReaperRun(t *testing.T) {
	t.Parallel()
	reaped := make(chan int, 1)
	db := queuetest.New(t, queuetest.Config(onceq.Config{Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
		if e.Type == onceq.EventReaped {
			reaped <- e.Count
		}
	})}))
	repairExec(t, db, `insert into onceq.waiters (worker, serves, round, room, idle_until) values (2, 2, 1, 1, now() - interval '1 day')`)
	r := newReaper(t, db, onceq.ReaperConfig{Every: 100 * time.Millisecond})
	ctx, cancel := context.WithCancel(t.Context())
	run := background(func() (int, error) { return 0, r.Run(ctx) })
	if n := <-reaped; n != 1 {
		t.Fatalf("%d reaped", n)
	}
	cancel()
	if _, err := run(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.RunOnce(ctx); err == nil {
		t.Fatal("a pass under an ended context succeeded")
	}
}

// It would log an error once a minute for ever otherwise.
func TestReaperRun_EndsWhenThePoolIsClosed(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	pool, err := pgxpool.NewWithConfig(t.Context(), db.Pool.Config())
	require.NoError(t, err)
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	r, err := onceq.NewReaper(q, onceq.ReaperConfig{Every: 100 * time.Millisecond})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(t.Context()) }()
	pool.Close()
	require.ErrorContains(t, receive(t, ended), "the pool was closed while a Reaper was running")
}

func TestReaperConfig(t *testing.T) {
	t.Parallel()
	for _, cfg := range []onceq.ReaperConfig{{Every: -1}, {Every: 1}, {Batch: -1}, {Batch: 1e6}, {Grace: -1}} {
		var bad *onceq.InvalidError
		if _, err := onceq.NewReaper(new(onceq.Queue), cfg); !errors.As(err, &bad) {
			t.Errorf("%+v: error %v", cfg, err)
		}
	}
	if _, err := onceq.NewReaper(nil, onceq.ReaperConfig{}); err == nil {
		t.Error("no error without a queue")
	}
}

// A client's key of unknown outcome ends when nobody has asked for it for 30 days, or for its window if that is longer.
// Effects and the application's own keys wait until somebody decides.
func TestReaperForgetsClientsKeysOfUnknownOutcome(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	r := newReaper(t, db, onceq.ReaperConfig{})
	repairExec(t, db, `
		insert into onceq.job_fences (class, scope, key, state, token, created_at, lifetime, holder, leased_until, job_id, detail)
		select class, 's', format('%s/%s %s %s', class, state, lifetime, days), state, 1, now() - interval '1 year', lifetime, 1,
		       now() - days * interval '1 day', case when class = 3 then 1 end, 'why'
		  from generate_series(1, 3) class, unnest(array[1, 2, 6]) state, unnest(array[-1, 0, 3600000, 40 * 86400000::bigint]) lifetime,
		       unnest(array[-1, 0, 29, 31, 41]) days`)
	reap(t, r, onceq.Reaped{Unknown: 3 * (2*2 + 1)})
	reap(t, r, onceq.Reaped{})
	if n := repairCount(t, db, `select count(*) from onceq.job_fences where class = 2 and leased_until < now() - interval '30 days'`); n != 3*(2+1) {
		t.Fatalf("%d are left: those for ever, and that whose window is longer", n)
	}
	if n := repairCount(t, db, `select count(*) from onceq.job_fences where class <> 2`); n != 2*3*4*5 {
		t.Fatalf("%d of others are left", n)
	}
}

// A client that keeps asking keeps hearing that the outcome is unknown. Its key never becomes free in between.
func TestReaperForgetsNoKeyThatSomebodyAsksFor(t *testing.T) {
	t.Parallel()
	for name, policy := range map[string]onceq.Policy{"again": {}, "hold": onceq.Hold(),
		"ask": onceq.Ask(func(context.Context, string) (any, bool, error) { return nil, false, errors.New("asked") })} {
		for _, died := range []bool{false, true} {
			db := queuetest.New(t)
			r := newReaper(t, db, onceq.ReaperConfig{Grace: time.Millisecond})
			f := fenceOf(t, db, onceq.FenceSpec{Class: onceq.ClassRequest, Key: "k", Policy: policy})
			c := fenceClaim(t, f, nil)
			if !died {
				fenceOK(t, "Uncertain", c.Uncertain(t.Context(), nil, errors.New("reset by peer")))
			}
			db.Advance(29 * 24 * time.Hour)
			for range 3 {
				_, err := f.Claim(t.Context(), nil)
				if !errors.Is(err, onceq.ErrHeld) && !errors.Is(err, onceq.ErrUncertain) {
					t.Fatalf("%s: %v", name, err)
				}
				db.Advance(29 * 24 * time.Hour)
				reap(t, r, onceq.Reaped{})
			}
			db.Advance(2 * 24 * time.Hour)
			reap(t, r, onceq.Reaped{Unknown: 1})
			fenceClaim(t, f, nil)
		}
	}
}

// If a request could run again for longer than its key stays, it would run under another idempotency key.
// Who asks is noted once a day only. The Reaper counts the 30 days, or the window if that is longer, from no earlier than the latest
// question all the same.
func TestReaperForgetsNoKeyTooEarly(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	for window, stays := range map[time.Duration]time.Duration{time.Hour: 30 * day, 40 * day: 40 * day} {
		db, shift := trapStoppedClock(t)
		r := newReaper(t, db, onceq.ReaperConfig{})
		f := fenceOf(t, db, onceq.FenceSpec{Class: onceq.ClassRequest, Key: "k", Policy: onceq.Hold(), Window: window})
		fenceOK(t, "Uncertain", fenceClaim(t, f, nil).Uncertain(t.Context(), nil, errors.New("reset by peer")))
		shift(day - time.Minute)
		_, err := f.Claim(t.Context(), nil)
		fenceWant(t, "asked", err, onceq.ErrHeld)
		shift(day - time.Minute + stays)
		reap(t, r, onceq.Reaped{})
		shift(day + time.Minute + stays)
		reap(t, r, onceq.Reaped{Unknown: 1})
	}
}

func TestFence_ARequestRunsAgainNoLongerThanItsKeyStays(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	const day = 24 * time.Hour
	for _, c := range []struct {
		spec onceq.FenceSpec
		ok   bool
	}{
		{onceq.FenceSpec{Class: onceq.ClassRequest}, true},
		{onceq.FenceSpec{Class: onceq.ClassRequest, Policy: onceq.RunAgain(30 * day)}, true},
		{onceq.FenceSpec{Class: onceq.ClassRequest, Policy: onceq.RunAgain(31 * day)}, false},
		{onceq.FenceSpec{Class: onceq.ClassRequest, Policy: onceq.RunAgain(31 * day), Window: 31 * day}, true},
		{onceq.FenceSpec{Class: onceq.ClassRequest, Policy: onceq.RunAgain(onceq.Forever), Window: 31 * day}, false},
		{onceq.FenceSpec{Class: onceq.ClassRequest, Policy: onceq.RunAgain(onceq.Forever), Window: onceq.Forever}, true},
		{onceq.FenceSpec{Class: onceq.ClassRequest, Policy: onceq.Hold(), Window: onceq.UntilFinished}, true},
		{onceq.FenceSpec{Policy: onceq.RunAgain(onceq.Forever)}, true},
	} {
		c.spec.Key = "k"
		_, err := db.Queue.Fence(c.spec)
		var invalid *onceq.InvalidError
		if (err == nil) != c.ok || !c.ok && (!errors.As(err, &invalid) || invalid.Field != "Policy") {
			t.Errorf("%+v: %v", c.spec, err)
		}
	}
}

// What waits for rows that somebody deleted by hand goes on after a pass of a Reaper, and what waits for others does not.
func TestReaper_WhatRowsDeletedByHandLeaveBehind(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	r := newReaper(t, db, onceq.ReaperConfig{Batch: 1})
	first, next := make(map[string]int64), make(map[string]int64)
	for _, name := range []string{"a", "b"} {
		for line, job := range map[string]onceq.Job{"lane ": {Kind: "k", Lane: name}, "limit ": {Kind: "k", Limit: name}} {
			first[line+name] = add(t, db, job)
			next[line+name] = add(t, db, job)
		}
		member := add(t, db, onceq.Job{Kind: "k"})
		first["group "+name] = member
		next["group "+name] = add(t, db, onceq.Job{Kind: "k", After: []onceq.JobRef{{ID: member}}})
	}
	claim := func() (ids []int64) {
		for leases := laneClaim(t, db.Queue, 100); len(leases) > 0; leases = laneClaim(t, db.Queue, 100) {
			for _, l := range leases {
				ids = append(ids, l.ID)
			}
		}
		return ids
	}
	require.Len(t, claim(), 6)
	for _, line := range []string{"lane a", "limit a", "group a"} {
		sqlRun(t, db, `delete from onceq.jobs where id = $1`, first[line])
	}
	reap(t, r, onceq.Reaped{})
	require.ElementsMatch(t, []int64{next["lane a"], next["limit a"], next["group a"]}, claim())
	reap(t, r, onceq.Reaped{})
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.lane_calls where lane <> ''`))

	sqlRun(t, db, `update onceq.job_members set state = 5 where group_id = $1`, next["group b"]) // and its call was deleted
	for _, line := range []string{"lane b", "limit b", "group b"} {
		sqlRun(t, db, `delete from onceq.jobs where id = $1`, first[line])
	}
	sqlRun(t, db, `update onceq.job_waits set run_at = now() + interval '1 hour' where id = $1`, next["lane b"])
	reap(t, r, onceq.Reaped{})
	require.ElementsMatch(t, []int64{next["limit b"], next["group b"]}, claim())
}
