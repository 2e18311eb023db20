package tests

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
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
	for _, table := range []string{"jobs", "job_fences", "job_history", "waiters", "queues", "job_cancels", "workers", "job_counts"} {
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

// The time limits of a role, a database or the pool are meant for the application's statements. The library's statements
// set their own, and the application's keep theirs.
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
			const own, users = "0 0 read committed", "30min 31min serializable"

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
			require.Equal(t, []string{own}, spied(t, db, "job_history INSERT"))
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
			require.Equal(t, []string{"30min 31min read committed"}, spied(t, db, "mine INSERT"))
			const outcome = "0 1s read committed" // see outbox.go
			require.ElementsMatch(t, []string{own, outcome}, spied(t, db, "jobs UPDATE"), "claims, retries")
			require.ElementsMatch(t, []string{own, outcome, "30min 31min read committed"}, spied(t, db, "jobs DELETE"), "completions, the handler's own among them")
			require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from onceq.job_fences where key = $1 and state = 3`, "lost"))
			require.NotContains(t, w.logged(), "SQLSTATE", "background work that a limit has ended")
			require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.job_history where id = $1`, lost))

			n, err := onceq.Do(ctx, q, onceq.FenceSpec{Key: "one"}, func(context.Context, *onceq.FenceLease) (int, error) { return 7, nil })
			require.NoError(t, err)
			require.Equal(t, 7, n)
			require.ElementsMatch(t, []string{own, users}, spied(t, db, "job_fences INSERT"))

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

// A limit that ends the application's statements, for good reasons, does not end the library's.
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

func TestDefaults_ALockTimeoutEndsNoCompletion(t *testing.T) {
	t.Parallel()
	const limit = 200 * time.Millisecond
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
	_, err = db.Queue.Retry(t.Context(), db.Pool, id)
	require.NoError(t, err)
	const blocked = `(select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'
		and statement_timestamp() - query_start > $1::text::interval and query like $2)`
	until(t, db, blocked+` > 0`, (5 * limit).String(), "%job_fences%")
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
	background := func() (all []onceq.Finding) {
		found, err := q.Health(t.Context())
		require.NoError(t, err)
		for _, f := range found {
			if f.What == "background" {
				all = append(all, f)
			}
		}
		return all
	}
	shown := func(text string) (f onceq.Finding) {
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
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{Every: time.Millisecond})
	require.NoError(t, err)
	go func() { ended <- reaper.Run(ctx) }()
	shown(`reaping has failed`)
	breakIt("queues", "insert or update")
	add(t, db, onceq.Job{Kind: "of another worker"}) // is due, and so a reason to rescan
	shown(`looking for expired leases`)

	// When the database cannot be reached, Health still tells of it.
	gone, leave := context.WithCancel(t.Context())
	leave()
	found, err := q.Health(gone)
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
