package recovery

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
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

// start starts a server of the test's own, which can be copied and promoted.
func start(t *testing.T, settings map[string]string) *pgserver.Server {
	t.Helper()
	s, err := pgserver.Start(t.Context(), pgserver.Options{Own: true, Settings: settings})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Stop()) })
	if s.BinDir() == "" {
		t.Skip("a server in a container cannot be copied by pgserver")
	}
	return s
}

func connect(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func open(t *testing.T, url string) (*onceq.Queue, *pgxpool.Pool) {
	t.Helper()
	pool := connect(t, url)
	q, err := onceq.New(pool, nil)
	require.NoError(t, err)
	return q, pool
}

func migrate(t *testing.T, url string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
}

func run(t *testing.T, pool *pgxpool.Pool, statements ...string) {
	t.Helper()
	for _, s := range statements {
		_, err := pool.Exec(t.Context(), s)
		require.NoError(t, err, s)
	}
}

func job(key string) onceq.Job { return onceq.Job{Kind: key, Key: key} }

func enqueue(t *testing.T, q *onceq.Queue, pool *pgxpool.Pool, key string) onceq.Result {
	t.Helper()
	r, err := q.Enqueue(t.Context(), pool, job(key))
	require.NoError(t, err)
	return r
}

func claim(t *testing.T, q *onceq.Queue, kind string) *onceq.Lease {
	t.Helper()
	leases, err := q.Claim(t.Context(), onceq.ClaimOptions{Kinds: []string{kind}, Lease: time.Hour})
	require.NoError(t, err)
	require.Len(t, leases, 1, kind)
	return leases[0]
}

func state(t *testing.T, q *onceq.Queue, pool *pgxpool.Pool, key string) string {
	t.Helper()
	info, err := q.GetByKey(t.Context(), pool, key, key)
	if errors.Is(err, onceq.ErrNotFound) {
		return "absent"
	}
	require.NoError(t, err)
	return info.State.String()
}

func sound(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	require.NoError(t, queuetest.Invariants(t.Context(), pool, "onceq"))
}

// setBack ends with a server that has all commits up to those of "kept", and none of "lost".
var setBack = map[string]func(t *testing.T, kept, lost func(url string)) (url string){
	"a standby that is behind takes over": func(t *testing.T, kept, lost func(string)) string {
		primary := start(t, nil)
		standby := stand(t, primary, nil)
		kept(primary.URL())
		follows(t, primary, standby)
		second := connect(t, standby.URL())
		run(t, second, `alter system set primary_conninfo = ''`, `select pg_reload_conf()`)
		conformance.Becomes(t, second, `select not exists (select from pg_stat_wal_receiver)`)
		lost(primary.URL())
		require.NoError(t, primary.Stop())
		run(t, second, `select pg_promote()`)
		return standby.URL()
	},
	"a restore to a point in time": func(t *testing.T, kept, lost func(string)) string {
		primary := start(t, nil)
		copied := stand(t, primary, map[string]string{"recovery_target_name": "here", "recovery_target_action": "promote"})
		kept(primary.URL())
		run(t, connect(t, primary.URL()), `select pg_create_restore_point('here')`)
		lost(primary.URL())
		conformance.Becomes(t, connect(t, copied.URL()), `select not pg_is_in_recovery()`)
		return copied.URL()
	},
}

func stand(t *testing.T, primary *pgserver.Server, settings map[string]string) *pgserver.Server {
	t.Helper()
	s, err := primary.Standby(t.Context(), "standby", nil, pgserver.Options{Settings: settings})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Stop()) })
	return s
}

// follows waits until the standby has all that the primary has.
func follows(t *testing.T, primary, standby *pgserver.Server) {
	t.Helper()
	var at string
	require.NoError(t, connect(t, primary.URL()).QueryRow(t.Context(), `select pg_current_wal_insert_lsn()::text`).Scan(&at))
	conformance.Becomes(t, connect(t, standby.URL()), `select pg_last_wal_replay_lsn() >= '`+at+`'`)
}

// What a database forgets that is set back is what onceq forgets, and nothing else: the state of each job and key is one
// that it has had. A job that was accepted is gone, and its key is free. One that was completed runs again, under the same
// idempotency key. Who holds a forgotten lease is refused, even if somebody else gets the same token.
func TestSetBack(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: starts several servers")
	}
	for name, way := range setBack {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			var returned, forgotten, again *onceq.Lease
			var gone onceq.Result
			provider := make(map[string]int) // calls by their idempotency key
			charge := func(l *onceq.Lease) error {
				_, err := onceq.Once(ctx, l, "charge", func(_ context.Context, key string) (int, error) {
					provider[key]++
					return 1, nil
				})
				return err
			}
			url := way(t, func(url string) {
				migrate(t, url)
				q, pool := open(t, url)
				for _, key := range []string{"completed", "waiting", "returned"} {
					enqueue(t, q, pool, key)
				}
				require.NoError(t, claim(t, q, "completed").Complete(ctx, nil))
				returned = claim(t, q, "returned")
			}, func(url string) {
				q, pool := open(t, url)
				require.NoError(t, returned.Release(ctx))
				again = claim(t, q, "returned")
				forgotten = claim(t, q, "waiting")
				require.NoError(t, charge(forgotten))
				require.NoError(t, forgotten.Complete(ctx, nil))
				run(t, pool, `select nextval('onceq.ids') from generate_series(1, 40)`) // Postgres writes 32 values of a sequence ahead
				gone = enqueue(t, q, pool, "gone")
				enqueue(t, q, pool, "accepted")
			})

			q, pool := open(t, url)
			require.NoError(t, q.Check(ctx), "the sequence of ids is never behind ids in use")
			sound(t, pool)
			require.Equal(t, "completed", state(t, q, pool, "completed"))
			require.True(t, enqueue(t, q, pool, "completed").Duplicate)
			require.Equal(t, "running", state(t, q, pool, "returned"), "until the lease is over that was given back")
			require.Equal(t, "waiting", state(t, q, pool, "waiting"))

			// What was accepted is absent, and its key is free. The ids may come again.
			require.Equal(t, "absent", state(t, q, pool, "accepted"))
			_, err := q.Get(ctx, pool, gone.ID)
			require.ErrorIs(t, err, onceq.ErrNotFound)
			r := enqueue(t, q, pool, "accepted")
			require.False(t, r.Duplicate)
			require.Less(t, r.ID, gone.ID, "an id that was lost comes again")

			// A completed job runs again. Its provider gets the same key, and so does nothing.
			now := claim(t, q, "waiting")
			require.Equal(t, forgotten.Token, now.Token, "a token that was lost comes again")
			require.ErrorIs(t, forgotten.Complete(ctx, pool), onceq.ErrLeaseLost, "the holder counts, and not the token alone")
			require.NoError(t, charge(now))
			require.Equal(t, map[string]int{now.IdempotencyKey("charge"): 2}, provider)
			require.NoError(t, now.Complete(ctx, nil))

			require.ErrorIs(t, again.Complete(ctx, pool), onceq.ErrLeaseLost)
			run(t, pool, `update onceq.jobs set leased_until = statement_timestamp() where kind = 'returned'`)
			require.NoError(t, claim(t, q, "returned").Complete(ctx, nil))
			sound(t, pool)
		})
	}
}

// A dump has all of one moment, but for the sequence, which is of a later one and so never behind. A job that ran then has
// its lease in the copy until that ends. Its effect is in doubt there, and held once the copy has a name of its own.
func TestDump_OfALiveDatabase(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: starts a server")
	}
	ctx := t.Context()
	server := start(t, nil)
	dump := filepath.Join(server.BinDir(), "pg_dump")
	if _, err := exec.LookPath(dump); err != nil {
		t.Skip("these binaries of Postgres are without pg_dump")
	}
	migrate(t, server.URL())
	q, pool := open(t, server.URL())
	for _, key := range []string{"completed", "running", "waiting"} {
		enqueue(t, q, pool, key)
	}
	require.NoError(t, claim(t, q, "completed").Complete(ctx, nil))
	running := claim(t, q, "running")
	var original string
	_, err := onceq.Once(ctx, running, "charge", func(_ context.Context, key string) (int, error) {
		original = key

		// The moment of the dump: the provider has been called, and has not answered.
		tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(ctx)) }()
		var snapshot string
		require.NoError(t, tx.QueryRow(ctx, `select pg_export_snapshot()`).Scan(&snapshot))

		// What goes on meanwhile is not in it.
		require.NoError(t, claim(t, q, "waiting").Complete(ctx, nil))
		enqueue(t, q, pool, "later")
		run(t, pool, `create database copy`)
		command := exec.CommandContext(ctx, "sh", "-c", `set -e; "$0/pg_dump" -Fc --snapshot "$1" -d "$2" | "$0/pg_restore" -e -d "$3"`,
			server.BinDir(), snapshot, server.URL(), server.DatabaseURL("copy"))
		out, err := command.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return 1, nil
	})
	require.NoError(t, err)
	require.NoError(t, running.Complete(ctx, nil))

	copied, copies := open(t, server.DatabaseURL("copy"))
	require.NoError(t, copied.Check(ctx))
	sound(t, copies)
	for key, want := range map[string]string{"completed": "completed", "running": "running", "waiting": "waiting", "later": "absent"} {
		require.Equal(t, want, state(t, copied, copies, key), key)
	}
	require.ErrorIs(t, running.Complete(ctx, pool), onceq.ErrLeaseLost)
	_, err = copied.NewInstallation(ctx)
	require.Error(t, err, "a lease has not run out")
	run(t, copies, `update onceq.jobs set leased_until = statement_timestamp() where kind = 'running'`,
		`update onceq.job_fences set leased_until = statement_timestamp() where leased_until is not null`)
	n, err := copied.NewInstallation(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, n, "the effect that was under way is held")
	copied, copies = open(t, server.DatabaseURL("copy"))
	l := claim(t, copied, "running")
	require.NotEqual(t, original, l.IdempotencyKey("charge"))
	_, err = onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 0, errors.New("called again") })
	require.ErrorIs(t, err, onceq.ErrHeld)
	sound(t, copies)
}

// Logical replication copies every table and no sequence. Check says so, until it is set; then the queue goes on where it
// was, and whoever held a lease on the old server completes on the new one. ONCEQ_TEST_PGBIN_NEWER has the binaries of a
// newer version, for an upgrade.
func TestLogicalReplication_SwitchOver(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: starts several servers")
	}
	ctx := t.Context()
	old := start(t, map[string]string{"wal_level": "logical"})
	migrate(t, old.URL())
	q, pool := open(t, old.URL())
	enqueue(t, q, pool, "before")
	newer := newServer(t)
	migrate(t, newer.URL())
	target := connect(t, newer.URL())
	run(t, target, `truncate onceq.meta, onceq.lane_locks, onceq.lane_calls`) // a copy of the schema alone has none of their rows
	run(t, pool, `create publication onceq for tables in schema onceq`)
	run(t, target, `create subscription onceq connection '`+old.URL()+`' publication onceq`)

	// Every sort of change goes through.
	lane := job("lane")
	lane.Lane = "a"
	for _, key := range []string{"1", "2"} {
		lane.Key = key
		_, err := q.Enqueue(ctx, pool, lane)
		require.NoError(t, err)
	}
	require.NoError(t, claim(t, q, "lane").Complete(ctx, nil))
	require.NoError(t, claim(t, q, "before").Fail(ctx, onceq.Fatal(errors.New("no"))))
	enqueue(t, q, pool, "running")
	running := claim(t, q, "running")

	// Nobody writes any more. The new server has seen all that was written.
	var at string
	require.NoError(t, pool.QueryRow(ctx, `select pg_current_wal_insert_lsn()::text`).Scan(&at))
	conformance.Becomes(t, target, `select count(*) > 0 and bool_and(srsubstate = 'r') from pg_subscription_rel`)
	conformance.Becomes(t, pool, `select count(*) = 1 and bool_and(confirmed_flush_lsn >= '`+at+`') from pg_replication_slots`)
	run(t, target, `drop subscription onceq`)
	require.NoError(t, old.Stop())

	q, pool = open(t, newer.URL())
	require.ErrorIs(t, q.Check(ctx), onceq.ErrIDTaken, "no sequence is replicated")
	run(t, pool, `select setval('onceq.ids', greatest((select max(id) from onceq.jobs), (select max(id) from onceq.job_waits),
(select max(id) from onceq.job_history), (select max(token >> 20) from onceq.job_fences)))`)
	require.NoError(t, q.Check(ctx))
	sound(t, pool)
	require.NoError(t, running.Complete(ctx, pool))
	second := claim(t, q, "lane")
	require.Equal(t, "2", second.Key)
	require.NoError(t, second.Complete(ctx, nil))
	require.Equal(t, "dead", state(t, q, pool, "before"))
	require.True(t, enqueue(t, q, pool, "running").Duplicate)
	require.False(t, enqueue(t, q, pool, "new").Duplicate)
	sound(t, pool)
}

// newServer is of the version that ONCEQ_TEST_PGBIN_NEWER has, or of the same one.
func newServer(t *testing.T) *pgserver.Server {
	t.Helper()
	if bin := os.Getenv("ONCEQ_TEST_PGBIN_NEWER"); bin != "" {
		t.Setenv(pgserver.EnvBin, bin)
	}
	return start(t, nil)
}
