package tests

import (
	"context"
	"errors"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// limiting are the defaults of the databases in these tests. They are long enough that no test runs into them. The spy
// shows for each statement which limit would have held for it.
var limiting = map[string]string{
	"default_transaction_read_only": "on", "default_transaction_isolation": "serializable", "row_security": "off",
	"statement_timeout": "30min", "lock_timeout": "31min", "idle_in_transaction_session_timeout": "32min",
}

// spy records the limits that hold when sessions of other roles than the owner write to the tables.
const spy = `
create table public.spied (what text, statement text, lock text, idle text, isolation text);
create function public.spy() returns trigger language plpgsql as $$
begin
  insert into public.spied values (tg_table_name || ' ' || tg_op, current_setting('statement_timeout'), current_setting('lock_timeout'),
         current_setting('idle_in_transaction_session_timeout'), current_setting('transaction_isolation'));
  return null;
end $$;
grant all on public.spied to public;
create table public.mine (n int);
grant all on public.mine to public;`

func spyOn(t *testing.T, db *queuetest.DB) {
	conn := owner(t, db)
	exec := func(statement string) {
		_, err := conn.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	exec(spy)
	exec(`create trigger spy after insert on public.mine for each row execute function public.spy()`)
	for _, table := range []string{"jobs", "job_fences", "job_history", "job_waits", "waiters", "queues", "job_cancels", "workers", "job_counts", "lane_limits", "pauses", "actions", "meta"} {
		exec(`create trigger spy after insert or update or delete on ` + pgx.Identifier{db.Schema, table}.Sanitize() + ` for each row execute function public.spy()`)
	}
}

func spied(t *testing.T, db *queuetest.DB, what string) (all []string) {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), `select distinct concat_ws(' ', statement, lock, isolation) from public.spied where what = $1 order by 1`, what)
	require.NoError(t, err)
	all, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// write runs fn in a transaction that says that it writes. An application with such defaults has to do so.
func write(t *testing.T, db *queuetest.DB, fn func(tx pgx.Tx)) {
	t.Helper()
	require.NoError(t, pgx.BeginTxFunc(t.Context(), db.Pool, pgx.TxOptions{AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		fn(tx)
		return nil
	}))
}

// The time limits of a role, a database or the pool are meant for the application's statements, and for what it calls and waits for.
// What workers do has its own.
func TestDefaults_TheLibrarysOwnStatementsHaveNoLimitsAndTheApplicationsKeepThem(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"database", "pool"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
				if by == "pool" {
					for name, value := range limiting {
						c.ConnConfig.RuntimeParams[name] = value
					}
				}
			}))
			spyOn(t, db)
			if by == "database" {
				conn := owner(t, db)
				for name, value := range limiting {
					_, err := conn.Exec(t.Context(), `alter database `+pgx.Identifier{conn.Config().ConnConfig.Database}.Sanitize()+` set `+name+` = '`+value+`'`)
					require.NoError(t, err)
				}
				db.Pool.Reset()
			}
			ctx, q := t.Context(), db.Queue
			const own, users, callers = "0 0 read committed", "30min 31min serializable", "30min 31min read committed"

			var lost, cancelled int64
			write(t, db, func(tx pgx.Tx) {
				for _, j := range []onceq.Job{
					{Kind: "k", Payload: 1, Key: "lost"}, {Kind: "tx", Payload: 1, Key: "tx"}, {Kind: "retry", Payload: 1}, {Kind: "cancelled", Payload: 1, Key: "cancelled"},
				} {
					r, err := q.Enqueue(ctx, tx, j)
					require.NoError(t, err)
					switch j.Kind {
					case "k":
						lost = r.ID
					case "cancelled":
						cancelled = r.ID
					}
				}
			})
			require.Equal(t, []string{users}, spied(t, db, "jobs INSERT"))
			require.Equal(t, []string{users}, spied(t, db, "job_fences INSERT"))
			_, err := q.Cancel(ctx, db.Pool, cancelled)
			require.NoError(t, err)
			require.Equal(t, []string{callers}, spied(t, db, "job_history INSERT"), "see TestDefaults_WhatACallerWaitsForKeepsTheLimits")
			// A process ends without finishing its jobs.
			leases, err := q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{"k"}, Lease: time.Millisecond})
			require.NoError(t, err)
			require.Len(t, leases, 1)

			retry, inTx := onceq.Kind[int]{Name: "retry"}, onceq.Kind[int]{Name: "tx", Timeout: time.Minute}
			ran, tries := make(chan error, 10), make(chan int, 10)
			within := make(chan [4]string, 10)
			w := start(t, db, onceq.WorkerConfig{},
				handle(func(ctx context.Context, l *onceq.Lease) error {
					_, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (int, error) { return 1, nil })
					ran <- err
					return l.Extend(ctx, time.Minute)
				}),
				retry.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
					tries <- l.Attempt
					if l.Attempt == 1 {
						return onceq.RetryAfter(time.Millisecond, context.Canceled)
					}
					return nil
				}),
				inTx.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
					var s [4]string
					if err := tx.QueryRow(ctx, `select current_setting('statement_timeout'), current_setting('lock_timeout'),
						current_setting('idle_in_transaction_session_timeout'), current_setting('transaction_isolation')`).Scan(&s[0], &s[1], &s[2], &s[3]); err != nil {
						return err
					}
					within <- s
					_, err := tx.Exec(ctx, `insert into public.mine values (1)`)
					return err
				}))
			require.NoError(t, receive(t, ran))
			require.Equal(t, 1, receive(t, tries))
			require.Equal(t, 2, receive(t, tries))
			require.Equal(t, [4]string{"30min", "31min", "30s", "read committed"}, receive(t, within), "a handler's transaction")
			until(t, db, noJobs)
			eventually(t, "an announcement", func() bool { return slices.Equal(spied(t, db, "waiters INSERT"), []string{own}) })
			require.NoError(t, w.stop())
			for _, what := range []string{"queues INSERT", "waiters DELETE"} {
				require.Equal(t, []string{own}, spied(t, db, what), what)
			}
			require.Equal(t, []string{callers}, spied(t, db, "mine INSERT"))
			const outcome = "0 500ms read committed" // see internal/outbox
			require.ElementsMatch(t, []string{own, outcome}, spied(t, db, "jobs UPDATE"), "claims, retries")
			require.ElementsMatch(t, []string{outcome, callers}, spied(t, db, "jobs DELETE"), "completions, the handler's own among them, and what was cancelled")
			require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from onceq.job_fences where key = $1 and state = 3`, "lost"))
			require.NotContains(t, w.logged(), "SQLSTATE", "background work that a limit has ended")
			require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.job_history where id = $1`, lost))

			n, err := onceq.Do(ctx, q, onceq.FenceSpec{Key: "one"}, func(context.Context, *onceq.FenceLease) (int, error) { return 7, nil })
			require.NoError(t, err)
			require.Equal(t, 7, n)
			require.ElementsMatch(t, []string{own, users, callers}, spied(t, db, "job_fences INSERT"))

			write(t, db, func(tx pgx.Tx) {
				_, err := tx.Exec(ctx, `delete from public.spied`)
				require.NoError(t, err)
				_, err = tx.Exec(ctx, `insert into onceq.waiters (worker, serves, round, room, idle_until) values (1, 1, 1, 1, now() - interval '1 day')`)
				require.NoError(t, err)
				_, err = q.Enqueue(ctx, tx, onceq.Job{Kind: "gone", Key: "gone", Window: time.Millisecond, Payload: 1})
				require.NoError(t, err)
			})
			leases, err = q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{"gone"}})
			require.NoError(t, err)
			require.NoError(t, leases[0].Complete(ctx, nil))
			reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{Grace: time.Millisecond})
			require.NoError(t, err)
			eventually(t, "the fence is gone", func() bool {
				_, err := reaper.RunOnce(ctx)
				require.NoError(t, err)
				return slices.Equal(spied(t, db, "job_fences DELETE"), []string{own})
			})
			require.Equal(t, []string{own}, spied(t, db, "waiters DELETE"))

			// None of the library's settings stay on the connections.
			for _, c := range db.Pool.AcquireAllIdle(ctx) {
				var all string
				require.NoError(t, c.QueryRow(ctx, `select concat_ws(' ', current_setting('statement_timeout'), current_setting('lock_timeout'), current_setting('enable_seqscan'))`).Scan(&all))
				c.Release()
				require.Equal(t, "30min 31min on", all)
			}
		})
	}
}

// A job is replaced on a pool as it is enqueued there.
func TestDefaults_Replace(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		for name, value := range limiting {
			c.ConnConfig.RuntimeParams[name] = value
		}
	}))
	job := onceq.Job{Kind: "k", Key: "a", Payload: 1, Delay: time.Hour, Replace: onceq.ReplacePayload}
	first, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
	require.NoError(t, err)
	job.Payload = 2
	again, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
	require.NoError(t, err)
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, Replaced: true, State: onceq.StateDelayed}, again)
}

// A limit that ends the application's statements, for good reasons, does not end what workers do.
func TestDefaults_ALockTimeoutEndsNoCompletion(t *testing.T) {
	t.Parallel()
	const limit = 20 * time.Millisecond
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["lock_timeout"] = limit.String()
	}))
	add(t, db, onceq.Job{Key: "a"})
	w := start(t, db, onceq.WorkerConfig{Lease: 10 * time.Minute}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	until(t, db, noJobs)
	until(t, db, `exists (select from onceq.queues)`)

	// Another session holds the rows for longer than that limit.
	holder := owner(t, db)
	tx, err := holder.Begin(t.Context())
	require.NoError(t, err)
	jobs := pgx.Identifier{db.Schema}.Sanitize()
	id := add(t, db, onceq.Job{Key: "b", Delay: time.Hour})
	_, err = tx.Exec(t.Context(), `select from `+jobs+`.job_fences where key = 'b' for update`)
	require.NoError(t, err)
	_, err = onceqops.New(db.Queue).Retry(t.Context(), db.Pool, id)
	require.NoError(t, err)
	const blocked = `(select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'
		and statement_timestamp() - query_start > $1::text::interval and query like $2)`
	until(t, db, blocked+` > 0`, (3 * limit).String(), "%gone as (%") // an outcome waits for a second, and for 100 ms when it is tried again
	require.NoError(t, tx.Commit(t.Context()))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Zero(t, w.count(onceq.EventBackground), w.logged())
	require.NotContains(t, w.logged(), "failed")
}

// Background work that fails is logged, counted, and shown until it works again.
func TestHealth_ShowsBackgroundWorkThatFails(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	w := &working{t: t, db: db}
	q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema, Hook: w})
	require.NoError(t, err)
	conn := owner(t, db)
	exec := func(statement string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	exec(`create function public.broken() returns trigger language plpgsql as $$ begin raise exception 'broken on purpose' using errcode = '55P03'; end $$`)
	tables := pgx.Identifier{db.Schema}.Sanitize()
	breakIt := func(table, what string) {
		exec(`create trigger broken before ` + what + ` on ` + tables + `.` + table + ` for each statement execute function public.broken()`)
	}
	mend := func(table string) { exec(`drop trigger broken on ` + tables + `.` + table) }
	background := func() (all []onceqops.Finding) {
		found, err := onceqops.New(q).Health(t.Context())
		require.NoError(t, err)
		for _, f := range found {
			if f.What == "background" {
				all = append(all, f)
			}
		}
		return all
	}
	shown := func(text string) (f onceqops.Finding) {
		t.Helper()
		eventually(t, text, func() bool {
			for _, f = range background() {
				if strings.Contains(f.Detail, text) {
					return true
				}
			}
			return false
		})
		return f
	}
	failures := func(name string) (n int) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, e := range w.events {
			if e.Type == onceq.EventBackground && e.Name == name {
				require.Positive(t, e.Count)
				require.Error(t, e.Err)
				n++
			}
		}
		return n
	}

	done := make(chan struct{})
	worker, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: steady}, handle(func(ctx context.Context, _ *onceq.Lease) error {
		select {
		case <-done:
		case <-ctx.Done():
		}
		return nil
	}))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	breakIt("queues", "insert or update")
	go func() { ended <- worker.Run(ctx) }()
	f := shown(`looking for expired leases of queue "default" has failed`)
	require.Contains(t, f.Detail, "broken on purpose")
	require.Contains(t, f.Detail, "since 20")
	require.Contains(t, f.Advice, "pg_locks")
	require.Positive(t, failures("rescan"))
	mend("queues")
	eventually(t, "it works again", func() bool { return len(background()) == 0 })

	breakIt("jobs", "update")
	add(t, db, onceq.Job{})
	shown(`claiming jobs of queue "default" has failed`)
	require.Positive(t, failures("claim"))
	mend("jobs")
	eventually(t, "it works again", func() bool { return len(background()) == 0 })
	until(t, db, `exists (select from onceq.jobs where leased_until is not null)`)

	breakIt("jobs", "update or delete")
	shown(`extending leases has failed`)
	close(done)
	mend("jobs")
	until(t, db, noJobs)
	eventually(t, "it works again", func() bool { return len(background()) == 0 })
	require.Positive(t, failures("extend"))

	breakIt("jobs", "delete")
	add(t, db, onceq.Job{})
	shown(`storing outcomes has failed`)
	mend("jobs")
	until(t, db, noJobs)
	eventually(t, "it works again", func() bool { return len(background()) == 0 })

	breakIt("job_fences", "delete")
	exec(`insert into ` + tables + `.job_fences (class, scope, key, state, token, created_at, finished_at, lifetime) values (1, 's', 'k', 5, 1, now(), now() - interval '1 day', 0)`)
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{Every: 100 * time.Millisecond})
	require.NoError(t, err)
	go func() { ended <- reaper.Run(ctx) }()
	shown(`reaping has failed`)
	breakIt("queues", "insert or update")
	add(t, db, onceq.Job{Kind: "of another worker"}) // is due, and so a reason to rescan
	shown(`looking for expired leases`)

	// When the database cannot be reached, Health still tells of it.
	gone, leave := context.WithCancel(t.Context())
	leave()
	found, err := onceqops.New(q).Health(gone)
	require.Error(t, err)
	require.Len(t, found, 2)

	// Work that has ended no longer counts as failing.
	mend("queues")
	mend("job_fences")
	cancel()
	for range 2 {
		require.NoError(t, receive(t, ended))
	}
	require.Empty(t, background())
}

// After the sequence was set back, a new job may get the id of an earlier one whose key, and whose request to cancel, are
// still there.
func TestGetByKey_AnotherJobThatHasTheIDIsAStranger(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	ctx, q := t.Context(), db.Queue
	first := add(t, db, onceq.Job{Key: "mine"})
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	require.NoError(t, leases[0].Complete(ctx, nil))
	setBack(t, db)
	require.Equal(t, first, add(t, db, onceq.Job{Key: "other"}))
	i, err := q.GetByKey(ctx, db.Pool, "k", "mine")
	require.NoError(t, err)
	require.Equal(t, []any{"mine", onceq.StateCompleted, first}, []any{i.Key, i.State, i.ID})
	i, err = q.GetByKey(ctx, db.Pool, "k", "other")
	require.NoError(t, err)
	require.Equal(t, onceq.StateWaiting, i.State)
}

func TestCancel_ARequestForAnEarlierJobWithTheIDCancelsNothing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	ctx, q := t.Context(), db.Queue
	claim := func() *onceq.Lease {
		t.Helper()
		leases, err := q.Claim(ctx, onceq.ClaimOptions{})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		return leases[0]
	}
	requested := func() int { return sqlOne[int](t, db, `select count(*) from onceq.job_cancels`) }
	first := add(t, db, onceq.Job{})
	l := claim()
	state, err := q.Cancel(ctx, db.Pool, first)
	require.NoError(t, err)
	require.Equal(t, onceq.StateRunning, state)
	require.NoError(t, l.Complete(ctx, nil)) // before anybody has seen the request
	require.Equal(t, 1, requested())

	setBack(t, db)
	require.Equal(t, first, add(t, db, onceq.Job{}))
	l = claim() // the claim does not see the old request,
	require.Equal(t, first, l.ID)
	require.NoError(t, l.Extend(ctx, time.Minute)) // neither does the beat,
	require.NoError(t, l.Release(ctx))             // nor does the release
	require.Equal(t, onceq.StateWaiting, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, first)).State)
	l = claim()
	// The Reaper sees that nobody needs the request, and removes it.
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{})
	require.NoError(t, err)
	require.Equal(t, 1, must[onceq.Reaped](t)(reaper.RunOnce(ctx)).Cancels)
	require.NoError(t, l.Complete(ctx, nil))

	// A request for the new job takes effect although an old one is still there.
	setBack(t, db)
	sqlRun(t, db, `insert into onceq.job_cancels values ($1, now() - interval '1 day')`, first)
	require.Equal(t, first, add(t, db, onceq.Job{}))
	l = claim()
	state, err = q.Cancel(ctx, db.Pool, first)
	require.NoError(t, err)
	require.Equal(t, onceq.StateRunning, state)
	require.ErrorIs(t, l.Extend(ctx, time.Minute), onceq.ErrCancelled)
	require.NoError(t, l.Release(ctx))
	require.Equal(t, onceq.StateCancelled, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, first)).State)
}

// A call that somebody waits for. reads says that it writes nothing, and unlimited what it may write without limits.
type inCallersTime struct {
	do        func(ctx context.Context, q *onceq.Queue, db onceq.DB) error
	reads     bool
	unlimited string
}

// inCallersTimeCalls are all public methods of Queue, Ops and Fence that send statements, and Do. What workers do is not among
// them: Claim, and what is done with a lease.
func inCallersTimeCalls(t *testing.T, db *queuetest.DB) map[string]inCallersTime {
	ctx := t.Context()
	fails := errors.New("reset")
	claim := func(kind string) *onceq.Lease {
		leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Kinds: []string{kind}, Lease: time.Hour})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		return leases[0]
	}
	live := func() int64 { return add(t, db, onceq.Job{}) }
	delayed := func() int64 { return add(t, db, onceq.Job{Delay: time.Hour}) }
	running := func() int64 { return add(t, db, onceq.Job{Kind: "runs"}) }()
	claim("runs")
	dead := func() int64 {
		id := add(t, db, onceq.Job{Kind: "dies"})
		require.NoError(t, claim("dies").Fail(ctx, onceq.Fatal(fails)))
		return id
	}
	held := func() int64 {
		id := add(t, db, onceq.Job{Kind: "holds"})
		for range 2 {
			l := claim("holds")
			_, err := onceq.Once(ctx, l, "e", func(context.Context, string) (int, error) { return 0, fails }, onceq.OnUncertain(onceq.Hold()))
			require.Error(t, err)
			if errors.Is(err, onceq.ErrHeld) {
				require.NoError(t, l.Fail(ctx, err))
				continue
			}
			require.NoError(t, l.Release(ctx))
		}
		return id
	}
	fence := func(q *onceq.Queue, key string) *onceq.Fence {
		f, err := q.Fence(onceq.FenceSpec{Key: key})
		require.NoError(t, err)
		return f
	}
	doubtful, err := fence(db.Queue, "doubtful").Claim(ctx, db.Pool)
	require.NoError(t, err)
	require.NoError(t, doubtful.Uncertain(ctx, nil, fails))
	j := func(key string) onceq.Job { return onceq.Job{Kind: "k", Key: key, Payload: 1} }
	add(t, db, onceq.Job{Key: "replaced", Delay: time.Hour})
	these := func(id int64) onceqops.Filter { return onceqops.Filter{IDs: []int64{id}} }
	all := onceqops.Filter{All: true}
	group, err := db.Queue.EnqueueGroup(ctx, db.Pool, []onceq.Job{j("member")}, j("then"))
	require.NoError(t, err)

	_, err = db.Queue.Emit(ctx, db.Pool, "s", "here", 1)
	require.NoError(t, err)
	require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "removed", onceq.Limit{AtOnce: 2}))
	require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "k", "removed", 2))
	require.NoError(t, db.Queue.PauseQueue(ctx, db.Pool, "resumed", ""))
	require.NoError(t, db.Queue.PauseKind(ctx, db.Pool, "resumed", ""))

	calls := make(map[string]inCallersTime)
	write := func(name string, do func(ctx context.Context, q *onceq.Queue, db onceq.DB) error) {
		calls[name] = inCallersTime{do: do}
	}
	read := func(name string, do func(ctx context.Context, q *onceq.Queue, db onceq.DB) error) {
		calls[name] = inCallersTime{do: do, reads: true}
	}
	onID := func(name string, id int64, do func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error) {
		write(name, func(ctx context.Context, q *onceq.Queue, db onceq.DB) error { return do(ctx, q, db, id) })
	}

	write("Enqueue", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.Enqueue(ctx, db, onceq.Job{Kind: "k", Payload: 1})
		return err
	})
	write("Enqueue, in a lane", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.Enqueue(ctx, db, onceq.Job{Kind: "k", Payload: 1, Lane: "a"})
		return err
	})
	write("Enqueue, replacing", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.Enqueue(ctx, db, onceq.Job{Kind: "k", Key: "replaced", Payload: 2, Replace: onceq.ReplacePayload})
		return err
	})
	write("EnqueueUnique", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.EnqueueUnique(ctx, db, j("unique"))
		return err
	})
	write("EnqueueMany", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.EnqueueMany(ctx, db, []onceq.Job{j("many"), j("more")})
		return err
	})
	write("EnqueueGroup", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.EnqueueGroup(ctx, db, []onceq.Job{j("a member")}, j("a follower"))
		return err
	})
	write("Emit", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.Emit(ctx, db, "s", "k", 1)
		return err
	})
	onID("Cancel", live(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, err := q.Cancel(ctx, db, id)
		return err
	})
	onID("Cancel, of one that runs", running, func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, err := q.Cancel(ctx, db, id)
		return err
	})
	onID("CancelMany", live(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, _, err := onceqops.New(q).CancelMany(ctx, db, these(id))
		return err
	})
	write("CancelGroup", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, _, err := onceqops.New(q).CancelGroup(ctx, db, group.Then.ID)
		return err
	})
	onID("Retry", delayed(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, err := onceqops.New(q).Retry(ctx, db, id)
		return err
	})
	onID("RetryMany", delayed(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, err := onceqops.New(q).RetryMany(ctx, db, onceqops.Filter{IDs: []int64{id}, States: []onceq.State{onceq.StateDelayed}})
		return err
	})
	onID("Move", live(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, err := onceqops.New(q).Move(ctx, db, id, "other")
		return err
	})
	onID("MoveMany", live(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, err := onceqops.New(q).MoveMany(ctx, db, these(id), "other")
		return err
	})
	onID("Redrive", dead(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, err := onceqops.New(q).Redrive(ctx, db, id)
		return err
	})
	onID("RedriveMany", dead(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, _, err := onceqops.New(q).RedriveMany(ctx, db, these(id))
		return err
	})
	onID("Discard", dead(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		return onceqops.New(q).Discard(ctx, db, id)
	})
	onID("DiscardMany", dead(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, err := onceqops.New(q).DiscardMany(ctx, db, these(id))
		return err
	})
	onID("Resolve", held(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		return onceqops.New(q).Resolve(ctx, db, id, "e", onceq.NeverApplied())
	})
	onID("ResolveMany", held(), func(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) error {
		_, _, err := onceqops.New(q).ResolveMany(ctx, db, these(id), "", onceq.NeverApplied())
		return err
	})
	write("SetLimit", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		return q.SetLimit(ctx, db, "l", onceq.Limit{AtOnce: 2})
	})
	write("RemoveLimit", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error { return q.RemoveLimit(ctx, db, "removed") })
	write("SetLaneLimit", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		return q.SetLaneLimit(ctx, db, "k", "a", 2)
	})
	write("RemoveLaneLimit", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		return q.RemoveLaneLimit(ctx, db, "k", "removed")
	})
	write("EnsureLimit", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.EnsureLimit(ctx, db, "ensured", onceq.Limit{AtOnce: 2})
		return err
	})
	write("Pause", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		return q.Pause(ctx, db, onceq.Pause{Limit: "p"})
	})
	write("Resume", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.Resume(ctx, db, onceq.Pause{Limit: "p"})
		return err
	})
	write("PauseQueue", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error { return q.PauseQueue(ctx, db, "p", "") })
	write("ResumeQueue", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.ResumeQueue(ctx, db, "resumed")
		return err
	})
	write("PauseKind", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error { return q.PauseKind(ctx, db, "p", "") })
	write("ResumeKind", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.ResumeKind(ctx, db, "resumed")
		return err
	})
	write("RecordAction", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).RecordAction(ctx, db, onceqops.Action{Who: "me", What: "look"})
		return err
	})
	write("NewInstallation", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.NewInstallation(ctx)
		return err
	})
	write("Fence.Claim", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := fence(q, "claimed").Claim(ctx, db)
		return err
	})
	write("Fence.Claim, of a key of unknown outcome", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		f, err := q.Fence(onceq.FenceSpec{Key: "doubtful", Policy: onceq.Hold()})
		if err == nil {
			_, err = f.Claim(ctx, nil)
		}
		if errors.Is(err, onceq.ErrHeld) {
			return nil
		}
		return err
	})
	write("Fence.Resolve", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		return fence(q, "doubtful").Resolve(ctx, nil, onceq.Applied(1))
	})
	calls["Do"] = inCallersTime{unlimited: "job_fences UPDATE", do: func(ctx context.Context, q *onceq.Queue, _ onceq.DB) error {
		_, err := onceq.Do(ctx, q, onceq.FenceSpec{Key: "do"}, func(context.Context, *onceq.FenceLease) (int, error) { return 1, nil })
		return err
	}}

	choose := func(would func(*onceq.Queue) func(context.Context, onceq.DB, onceqops.Filter) (onceqops.Choice, error)) func(context.Context, *onceq.Queue, onceq.DB) error {
		return func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
			_, err := would(q)(ctx, db, all)
			return err
		}
	}
	read("WouldCancel", choose(func(q *onceq.Queue) func(context.Context, onceq.DB, onceqops.Filter) (onceqops.Choice, error) {
		return onceqops.New(q).WouldCancel
	}))
	read("WouldRetry", choose(func(q *onceq.Queue) func(context.Context, onceq.DB, onceqops.Filter) (onceqops.Choice, error) {
		return onceqops.New(q).WouldRetry
	}))
	read("WouldMove", choose(func(q *onceq.Queue) func(context.Context, onceq.DB, onceqops.Filter) (onceqops.Choice, error) {
		return onceqops.New(q).WouldMove
	}))
	read("WouldRedrive", choose(func(q *onceq.Queue) func(context.Context, onceq.DB, onceqops.Filter) (onceqops.Choice, error) {
		return onceqops.New(q).WouldRedrive
	}))
	read("WouldDiscard", choose(func(q *onceq.Queue) func(context.Context, onceq.DB, onceqops.Filter) (onceqops.Choice, error) {
		return onceqops.New(q).WouldDiscard
	}))
	read("WouldResolve", choose(func(q *onceq.Queue) func(context.Context, onceq.DB, onceqops.Filter) (onceqops.Choice, error) {
		return onceqops.New(q).WouldResolve
	}))
	read("Event", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, _, err := q.Event(ctx, db, "s", "k")
		return err
	})
	read("AwaitEvent", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.AwaitEvent(ctx, db, "s", "here")
		return err
	})
	read("Actions", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Actions(ctx, db, onceqops.ActionFilter{})
		return err
	})
	read("CheckPayloads", func(ctx context.Context, q *onceq.Queue, _ onceq.DB) error {
		_, err := onceqops.New(q).CheckPayloads(ctx)
		return err
	})
	read("Check", func(ctx context.Context, q *onceq.Queue, _ onceq.DB) error { return q.Check(ctx) })
	read("Counts", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Counts(ctx, db, onceqops.CountFilter{})
		return err
	})
	read("Explain", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Explain(ctx, db, running)
		return err
	})
	read("Members", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := listed(onceqops.New(q).Members(ctx, db, group.Then.ID, onceqops.Filter{Limit: 1}))
		return err
	})
	read("Group", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.Group(ctx, db, group.Then.ID)
		return err
	})
	read("Groups", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Groups(ctx, db, 0, 1)
		return err
	})
	read("GroupsOf", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).GroupsOf(ctx, db, running)
		return err
	})
	read("Get", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.Get(ctx, db, running)
		return err
	})
	read("GetByKey", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.GetByKey(ctx, db, "k", "replaced")
		return err
	})
	read("List", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).List(ctx, db, onceqops.Filter{})
		return err
	})
	read("Page", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, _, err := onceqops.New(q).Page(ctx, db, onceqops.Filter{})
		return err
	})
	read("Count", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Count(ctx, db, onceqops.Filter{})
		return err
	})
	read("Stats", func(ctx context.Context, q *onceq.Queue, _ onceq.DB) error {
		_, err := onceqops.New(q).Stats(ctx)
		return err
	})
	read("Keys", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Keys(ctx, db, "k", "replaced")
		return err
	})
	read("LaneLimit", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := q.LaneLimit(ctx, db, "k", "a")
		return err
	})
	read("Lanes", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Lanes(ctx, db, onceqops.LaneFilter{})
		return err
	})
	read("Limit", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Limit(ctx, db, "l")
		return err
	})
	read("Limits", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Limits(ctx, db, onceqops.LimitFilter{})
		return err
	})
	read("Pauses", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Pauses(ctx, db)
		return err
	})
	read("Workers", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Workers(ctx, db)
		return err
	})
	read("WithMember", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).WithMember(ctx, db, []int64{running}, "payload.a = 1")
		return err
	})
	read("Busy", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Busy(ctx, db, onceqops.WorkerInfo{Queues: map[string]int{"q": 1}})
		return err
	})
	read("Effects", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, err := onceqops.New(q).Effects(ctx, db, running)
		return err
	})
	read("Doubts", func(ctx context.Context, q *onceq.Queue, db onceq.DB) error {
		_, _, err := onceqops.New(q).Doubts(ctx, db, onceqops.Filter{})
		return err
	})
	read("Wait", func(ctx context.Context, q *onceq.Queue, _ onceq.DB) error {
		if _, err := q.Wait(ctx, onceq.JobRef{Scope: "k", Key: "never"}); !errors.Is(err, onceq.ErrNotFound) {
			return err
		}
		return nil
	})
	read("Health", func(ctx context.Context, q *onceq.Queue, _ onceq.DB) error {
		_, err := onceqops.New(q).Health(ctx)
		return err
	})
	return calls
}

// The time limits that somebody has given to a role end what the application calls and waits for, and the error says what to
// do. A request would wait for ever behind a forgotten transaction otherwise.
func TestDefaults_WhatACallerWaitsForKeepsTheLimits(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	calls := inCallersTimeCalls(t, db)
	known := map[string]bool{"Claim": true, "EnqueueInBatch": true, "Fence": true, "Schema": true, "Logger": true, "Fence.String": true, "Do": true}
	for name := range calls {
		name, _, _ = strings.Cut(name, ",")
		known[name] = true
	}
	for _, of := range []reflect.Type{reflect.TypeFor[*onceq.Queue](), reflect.TypeFor[*onceqops.Ops](), reflect.TypeFor[*onceq.Fence]()} {
		for i := range of.NumMethod() {
			name := of.Method(i).Name
			if of == reflect.TypeFor[*onceq.Fence]() {
				name = "Fence." + name
			}
			require.True(t, known[name], "%s is not among the calls that keep the limits", name)
		}
	}
	with := func(params map[string]string) (*pgxpool.Pool, *onceq.Queue) {
		c := db.Pool.Config()
		server, err := pgx.ParseConfig(db.URL) // PgBouncer refuses such parameters
		require.NoError(t, err)
		c.ConnConfig.Host, c.ConnConfig.Port = server.Host, server.Port
		maps.Copy(c.ConnConfig.RuntimeParams, params)
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // preparing would meet the locks before the statements do
		c.MaxConns = 4
		pool, err := pgxpool.NewWithConfig(t.Context(), c)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema})
		require.NoError(t, err)
		return pool, q
	}

	// What each of them writes is written under the limits.
	spyOn(t, db)
	pool, q := with(limiting)
	names := slices.Sorted(maps.Keys(calls))
	for _, name := range names {
		if name == "NewInstallation" { // is refused while a job runs
			continue
		}
		c := calls[name]
		write(t, db, func(tx pgx.Tx) {
			_, err := tx.Exec(t.Context(), `delete from public.spied`)
			require.NoError(t, err)
		})
		require.NoError(t, c.do(t.Context(), q, pool), name)
		wrote := sqlOne[int](t, db, `select count(*) from public.spied`)
		require.True(t, c.reads == (wrote == 0), "%s wrote %d times", name, wrote)
		require.Empty(t, sqlOne[string](t, db, `select coalesce(string_agg(distinct concat_ws(' ', what, statement, lock), ', '), '') from public.spied
			where (statement <> '30min' or lock <> '31min') and what <> $1`, c.unlimited), name)
	}

	// Somebody locks the tables, and forgets it.
	tx, err := owner(t, db).Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), lockTables)
	require.NoError(t, err)
	t.Run("locked", func(t *testing.T) {
		for limit, state := range map[string]string{"lock_timeout": "55P03", "statement_timeout": "57014"} {
			pool, q := with(map[string]string{limit: "25ms"})
			for _, name := range names {
				t.Run(limit+", "+name, func(t *testing.T) {
					t.Parallel()
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					err := calls[name].do(ctx, q, pool)
					if name == "Health" && err == nil { // it names the session
						return
					}
					require.Equal(t, state, sqlstate.Of(err), "%v", err)
					require.Contains(t, err.Error(), limit)
					require.Contains(t, err.Error(), "onceq doctor")
				})
			}
		}
	})
}

// lockTables locks all tables that calls need after they have read which installation it is.
const lockTables = `
do $$
declare
  r record;
begin
  for r in select oid::regclass as name from pg_class
            where relnamespace = (select relnamespace from pg_class where oid = 'jobs'::regclass) and relkind = 'r' and relname <> 'meta'
            order by relname
  loop
    execute 'lock table ' || r.name || ' in access exclusive mode';
  end loop;
end $$`
