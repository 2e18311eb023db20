package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// rolePool connects to the test's database as a new role that has only the rights that grant gives it.
func rolePool(t *testing.T, db *queuetest.DB, grant func(role string), change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	ctx := context.Background()
	role := fmt.Sprintf("onceq_runtime_%d", rand.Int64())
	may := owner(t, db)
	run := func(sql string) {
		t.Helper()
		_, err := may.Exec(ctx, sql)
		require.NoError(t, err, sql)
	}
	run(`create role ` + role + ` login password 'runtime' nosuperuser nocreatedb nocreaterole noinherit`)
	t.Cleanup(func() {
		run(`drop owned by ` + role)
		run(`drop role ` + role)
	})
	schema := pgx.Identifier{db.Schema}.Sanitize()
	run(`revoke execute on all functions in schema ` + schema + ` from public`)
	run(`revoke all on schema public from public`)
	run(`do $$ begin execute format('revoke all on database %I from public', current_database());
		execute format('grant connect on database %I to ` + role + `, %I', current_database(), '` + db.Pool.Config().ConnConfig.User + `'); end $$`)
	grant(role)
	config, err := pgxpool.ParseConfig(db.URL)
	require.NoError(t, err)
	config.ConnConfig.User, config.ConnConfig.Password = role, "runtime"
	if change != nil {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// The main paths work under a role with the published grants and nothing else, with an empty search_path, and in a schema
// whose name needs quoting.
func TestRole_TheGrantsAreEnoughForEverythingAtRunTime(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema(`Run"time 'x.y`))
	pool := rolePool(t, db, func(role string) {
		_, err := owner(t, db).Exec(t.Context(), migrations.Grants(db.Schema, role))
		require.NoError(t, err)
		_, err = db.Pool.Exec(t.Context(), `create schema app; create table app.effects (job bigint, name text);
			grant usage on schema app to `+role+`; grant select, insert on app.effects to `+role)
		require.NoError(t, err)
	}, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = "" })
	mainPaths(t, db, pool)

	_, err := pool.Exec(t.Context(), `create table "Run""time 'x.y".mine (n int)`)
	require.ErrorContains(t, err, "permission denied")
	_, err = pool.Exec(t.Context(), `update "Run""time 'x.y".meta set version = 2`)
	require.ErrorContains(t, err, "permission denied")

	// The audit trail grows, and whoever is in it cannot change it.
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	_, err = onceqops.New(q).RecordAction(t.Context(), pool, onceqops.Action{Who: "ada", What: "cancel"})
	require.NoError(t, err)
	trail, err := onceqops.New(q).Actions(t.Context(), pool, onceqops.ActionFilter{})
	require.NoError(t, err)
	require.Len(t, trail, 1)
	for _, statement := range []string{`update actions set who = 'eve'`, `delete from actions`, `truncate actions`} {
		_, err = pool.Exec(t.Context(), strings.Replace(statement, "actions", `"Run""time 'x.y".actions`, 1))
		require.ErrorContains(t, err, "permission denied", statement)
	}
}

// The main paths work where the database's default is another isolation level and callers have no transaction of their own.
func TestIsolation_MainPathsWhateverTheDefault(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["default_transaction_isolation"] = level
			}))
			_, err := db.Pool.Exec(t.Context(), `create schema app; create table app.effects (job bigint, name text)`)
			require.NoError(t, err)
			mainPaths(t, db, db.Pool)
		})
	}
}

// mainPaths does everything that an application does at run time, over the given pool. It needs a table app.effects (job,
// name).
func mainPaths(t *testing.T, db *queuetest.DB, pool *pgxpool.Pool) {
	t.Helper()
	ctx := t.Context()
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	require.NoError(t, q.Check(ctx))
	job := func(key string) onceq.Job { return onceq.Job{Kind: "k", Key: key, Payload: 1} }
	enqueue := func(in onceq.DB, j onceq.Job) onceq.Result {
		t.Helper()
		r, err := q.Enqueue(ctx, in, j)
		require.NoError(t, err)
		return r
	}
	inTx := func(fn func(tx pgx.Tx)) {
		t.Helper()
		require.NoError(t, pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error { fn(tx); return nil }))
	}
	claim := func(id int64) *onceq.Lease {
		t.Helper()
		leases, err := q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{"k"}})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		require.Equal(t, id, leases[0].ID)
		return leases[0]
	}

	// Enqueue in all forms.
	first := enqueue(pool, job("a"))
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, enqueue(pool, job("a")))
	inTx(func(tx pgx.Tx) {
		strict, other, blank := job("a"), job("a"), job(" ")
		strict.Strict, other.Payload = true, 2
		_, err := q.Enqueue(ctx, tx, strict)
		require.ErrorIs(t, err, onceq.ErrDuplicate)
		_, err = q.Enqueue(ctx, tx, other)
		require.ErrorIs(t, err, onceq.ErrMismatch)
		_, err = q.EnqueueUnique(ctx, tx, blank)
		require.Error(t, err)
		enqueue(tx, onceq.Job{Kind: "later", Payload: []byte{0}, Delay: time.Hour, Metadata: map[string]string{"a": "b"}})
		enqueue(tx, onceq.Job{Kind: "later", RunAt: time.Now().Add(time.Hour), Priority: onceq.PriorityLow})
		results, err := q.EnqueueMany(ctx, tx, []onceq.Job{{Kind: "later", Key: "m", Delay: time.Hour}, {Kind: "later", Delay: time.Hour}})
		require.NoError(t, err)
		require.Len(t, results, 2)
		b := &pgx.Batch{}
		pending, err := q.EnqueueInBatch(b, onceq.Job{Kind: "later", Key: "b", Delay: time.Hour})
		require.NoError(t, err)
		dup, err := q.EnqueueInBatch(b, job("a"))
		require.NoError(t, err)
		require.NoError(t, tx.SendBatch(ctx, b).Close())
		r, err := pending.Result(ctx, tx)
		require.NoError(t, err)
		require.Equal(t, onceq.StateDelayed, r.State)
		r, err = dup.Result(ctx, tx)
		require.NoError(t, err)
		require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, r)
	})
	many, err := q.EnqueueMany(ctx, pool, []onceq.Job{{Kind: "later", Key: "m", Delay: time.Hour}, {Kind: "later", Key: "m2", Delay: time.Hour}})
	require.NoError(t, err)
	require.True(t, many[0].Duplicate)
	require.False(t, many[1].Duplicate)

	// Drive the loop by hand.
	l := claim(first.ID)
	require.NoError(t, l.Extend(ctx, time.Minute))
	require.NoError(t, l.SetResult("done"))
	require.NoError(t, l.Complete(ctx, nil))
	require.ErrorIs(t, l.Complete(ctx, nil), onceq.ErrLeaseLost)
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateCompleted, Output: []byte(`"done"`)}, enqueue(pool, job("a")))
	again := job("again")
	again.Window = onceq.UntilFinished
	id := enqueue(pool, again).ID
	l = claim(id)
	require.NoError(t, l.Release(ctx))
	l = claim(id)
	require.NoError(t, l.Snooze(ctx, 1))
	l = claim(id)
	inTx(func(tx pgx.Tx) { require.NoError(t, l.Complete(ctx, tx)) })
	id = enqueue(pool, again).ID
	require.NotEqual(t, l.ID, id)
	l = claim(id)
	inTx(func(tx pgx.Tx) {
		b := &pgx.Batch{}
		require.NoError(t, l.CompleteInBatch(b))
		require.NoError(t, tx.SendBatch(ctx, b).Close())
	})
	many, err = q.EnqueueMany(ctx, pool, []onceq.Job{again})
	require.NoError(t, err)
	l = claim(many[0].ID)
	require.NoError(t, l.Fail(ctx, errors.New("failed")))
	state, err := onceqops.New(q).Retry(ctx, pool, l.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateRetrying, state)
	l = claim(l.ID)
	require.NoError(t, l.Fail(ctx, onceq.Fatal(errors.New("fatal"))))

	// Repair and inspect.
	state, err = onceqops.New(q).Redrive(ctx, pool, l.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateWaiting, state)
	state, err = q.Cancel(ctx, pool, l.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateCancelled, state)
	redriven, _, err := onceqops.New(q).RedriveMany(ctx, pool, onceqops.Filter{All: true, States: []onceq.State{onceq.StateCancelled}})
	require.NoError(t, err)
	require.Equal(t, 1, redriven)
	require.NoError(t, claim(l.ID).Fail(ctx, onceq.Fatal(errors.New("fatal"))))
	require.NoError(t, onceqops.New(q).Discard(ctx, pool, l.ID))
	_, err = onceqops.New(q).DiscardMany(ctx, pool, onceqops.Filter{All: true})
	require.NoError(t, err)
	_, err = q.Get(ctx, pool, l.ID)
	require.ErrorIs(t, err, onceq.ErrNotFound)
	info, err := q.GetByKey(ctx, pool, "later", "m")
	require.NoError(t, err)
	require.Equal(t, onceq.StateDelayed, info.State)
	info, err = q.Get(ctx, pool, info.ID)
	require.NoError(t, err)
	require.Equal(t, "m", info.Key)
	list, err := onceqops.New(q).List(ctx, pool, onceqops.Filter{Queue: "default", States: []onceq.State{onceq.StateDelayed}})
	require.NoError(t, err)
	require.Len(t, list, 6)
	stats, err := onceqops.New(q).Stats(ctx)
	require.NoError(t, err)
	require.Len(t, stats, 1)
	require.Equal(t, 6, stats[0].Delayed)

	// Do and fences.
	spec := onceq.FenceSpec{Scope: "tenant", Key: "import", Payload: 1}
	for range 2 {
		out, err := onceq.Do(ctx, q, spec, func(context.Context, *onceq.FenceLease) (string, error) { return "imported", nil })
		require.NoError(t, err)
		require.Equal(t, "imported", out)
	}
	_, err = onceq.Do(ctx, q, onceq.FenceSpec{Key: "refused"}, func(context.Context, *onceq.FenceLease) (int, error) {
		return 0, onceq.NotApplied(errors.New("refused"))
	})
	require.ErrorContains(t, err, "refused")
	_, err = onceq.Do(ctx, q, onceq.FenceSpec{Key: "held"}, func(context.Context, *onceq.FenceLease) (int, error) { return 0, errors.New("reset") })
	require.ErrorIs(t, err, onceq.ErrUncertain)
	f, err := q.Fence(onceq.FenceSpec{Key: "held", Policy: onceq.Hold()})
	require.NoError(t, err)
	_, err = f.Claim(ctx, nil)
	require.ErrorIs(t, err, onceq.ErrHeld)
	require.NoError(t, f.Resolve(ctx, nil, onceq.NeverApplied()))
	c, err := f.Claim(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, c.Extend(ctx, time.Minute))
	_, err = f.Claim(ctx, nil)
	require.ErrorIs(t, err, onceq.ErrInFlight)
	inTx(func(tx pgx.Tx) { require.NoError(t, c.Complete(ctx, tx, 1)) })

	// A worker with the three handler forms; each job fails once.
	var mu sync.Mutex
	charged := map[string]int{}
	once := func(l *onceq.Lease) error {
		_, err := onceq.Once(ctx, l, "charge", func(_ context.Context, key string) (string, error) {
			mu.Lock()
			defer mu.Unlock()
			charged[key]++
			return key, nil
		})
		if err == nil && l.Attempt == 1 {
			err = errors.New("the first attempt fails")
		}
		return err
	}
	effect := func(tx pgx.Tx, l *onceq.Lease, name string) error {
		_, err := tx.Exec(ctx, `insert into app.effects values ($1::bigint, $2::text)`, l.ID, name)
		return err
	}
	soon := func(int, error) time.Duration { return time.Millisecond }
	lease := onceq.Kind[int]{Name: "lease", Backoff: soon, Keep: time.Hour}
	tx := onceq.Kind[int]{Name: "tx", Backoff: soon}
	batch := onceq.Kind[int]{Name: "batch", Backoff: soon}
	for i := range 5 {
		for _, k := range []onceq.Kind[int]{lease, tx, batch} {
			k.Key = func(p int) string { return fmt.Sprintf("%s:%d", k.Name, p) }
			enqueue(pool, k.Job(i))
		}
	}
	held := enqueue(pool, onceq.Job{Kind: "held", Payload: 1, Key: "held"})
	longID := enqueue(pool, onceq.Job{Kind: "long", Payload: 1}).ID
	running := make(chan struct{})
	heldKind, long := onceq.Kind[int]{Name: "held", Backoff: soon}, onceq.Kind[int]{Name: "long"}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{
		Lease: steady, PollInterval: 50 * time.Millisecond, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 3}},
	},
		lease.Handle(func(ctx context.Context, l *onceq.Lease, p int) error {
			return errors.Join(l.SetResult(p), once(l))
		}),
		tx.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
			return errors.Join(effect(tx, l, "tx"), once(l))
		}),
		batch.HandleBatch(3, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) (err error) {
			for _, j := range jobs {
				err = errors.Join(err, effect(tx, j.Lease, "batch"), once(j.Lease))
			}
			return err
		}),
		heldKind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			_, err := onceq.Once(ctx, l, "wire", func(context.Context, string) (int, error) { return 0, errors.New("reset") }, onceq.OnUncertain(onceq.Hold()))
			return err
		}),
		long.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			close(running)
			<-ctx.Done()
			return context.Cause(ctx)
		}))
	require.NoError(t, err)
	work, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- w.Run(work) }()
	await := func(what string, ok func() bool) {
		t.Helper()
		require.Eventually(t, ok, patience, 10*time.Millisecond, what)
	}
	<-running
	state, err = q.Cancel(ctx, pool, longID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateRunning, state)
	stateOf := func(id int64) onceq.State {
		info, err := q.Get(ctx, pool, id)
		if errors.Is(err, onceq.ErrNotFound) {
			return 0
		}
		require.NoError(t, err)
		return info.State
	}
	await("the cancelled job", func() bool { return stateOf(longID) == onceq.StateCancelled })
	await("the held job", func() bool { return stateOf(held.ID) == onceq.StateHeld })
	effects, err := onceqops.New(q).Effects(ctx, pool, held.ID)
	require.NoError(t, err)
	require.Len(t, effects, 1)
	require.NoError(t, onceqops.New(q).Resolve(ctx, pool, held.ID, "wire", onceq.Applied(7)))
	await("everything", func() bool {
		list, err := onceqops.New(q).List(ctx, pool, onceqops.Filter{States: []onceq.State{onceq.StateWaiting, onceq.StateRunning, onceq.StateRetrying, onceq.StateDead, onceq.StateHeld}})
		require.NoError(t, err)
		return len(list) == 0
	})
	stop()
	require.NoError(t, <-ended)
	require.Len(t, charged, 15)
	for key, n := range charged {
		require.Equal(t, 1, n, key)
	}
	rows, err := db.Pool.Query(ctx, `select name || ' ' || count(*) || ' ' || count(distinct job) from app.effects group by name order by name`)
	require.NoError(t, err)
	counts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"batch 5 5", "tx 5 5"}, counts)
	require.Equal(t, json.RawMessage(`3`), enqueue(pool, func() onceq.Job {
		lease.Key = func(p int) string { return fmt.Sprintf("lease:%d", p) }
		return lease.Job(3)
	}()).Output)

	r, err := onceq.NewReaper(q, onceq.ReaperConfig{Grace: time.Millisecond})
	require.NoError(t, err)
	db.Advance(25 * time.Hour)
	reaped, err := r.RunOnce(ctx)
	require.NoError(t, err)
	require.NotZero(t, reaped.Fences)
	require.NotZero(t, reaped.History)
	require.NoError(t, db.Check())
}
