package onceq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// ⚠ Without a materialized subquery Postgres may run it again for each row and claim more than the limit.
func TestTrap_ClaimLimitIsExact_3Of2000(t *testing.T) {
	t.Parallel()
	for _, analyzed := range []bool{false, true} {
		db := queuetest.New(t)
		addMany(t, db, 2000, onceq.Job{})
		if analyzed {
			_, err := owner(t, db).Exec(t.Context(), `analyze jobs`)
			require.NoError(t, err)
		}
		for claims := 1; claims <= 3; claims++ {
			require.Len(t, take(t, db, 3), 3)
			require.Equal(t, 3*claims, sqlOne[int](t, db, `select count(*) from onceq.jobs where leased_until is not null`))
		}
	}
}

// ⚠ An index on anything that a claim changes would make each claim write to every index.
func TestTrap_ClaimsAreHeapOnly(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 1 }))
	addMany(t, db, 500, onceq.Job{})
	require.Len(t, take(t, db, 500), 500)
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select pg_stat_force_next_flush()`).Scan(nil))
	// All but the few for which a page that was filled at once has no second place left.
	require.Greater(t, sqlOne[int](t, db, `select n_tup_hot_upd from pg_stat_user_tables where relname = 'jobs'`), 400)
}

// ⚠ Beats that wait for a row let all other leases of the process run out, and beats that wait while they hold
// other rows deadlock with completions.
func TestTrap_BeatsNeitherWaitForALockedRowNorDeadlock(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ids := addMany(t, db, 2, onceq.Job{})
	running, end := make(chan struct{}, 2), make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{Lease: steady}, handle(func(ctx context.Context, l *onceq.Lease) error {
		running <- struct{}{}
		select {
		case <-end:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}))
	receive(t, running)
	receive(t, running)
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(t.Context(), `select from onceq.jobs where id = $1 for update`, ids[1])
	require.NoError(t, err)
	// The other one is extended, again and again, until the locked one has run out by the clock.
	until(t, db, `(select leased_until from onceq.jobs where id = $1) > (select leased_until + interval '2 seconds' from onceq.jobs where id = $2)`, ids[0], ids[1])
	until(t, db, `(select leased_until < statement_timestamp() from onceq.jobs where id = $1)`, ids[1])
	require.Empty(t, take(t, db, 10), "locked means alive")
	_, err = tx.Exec(t.Context(), `set local lock_timeout = '5min'`)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select from onceq.jobs where id = $1 for update`, ids[0])
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	close(end)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Equal(t, 2, w.count(onceq.EventCompleted))
	require.Zero(t, w.count(onceq.EventLeaseLost))
}

// ⚠ A handler above READ COMMITTED that is longer than a beat can never finish when beats change its job's row.
func TestTrap_ASnapshotHandlerLongerThanSeveralBeatsFinishes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{MaxAttempts: 1})
	kind := onceq.Kind[int]{Name: "k", Serializable: true}
	runs, end := make(chan struct{}, 10), make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{Lease: steady}, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
		_, err := tx.Exec(ctx, `select 1`)
		runs <- struct{}{}
		<-end
		return err
	}))
	receive(t, runs)
	until(t, db, `(select leased_until < statement_timestamp() from onceq.jobs)`)
	require.Empty(t, take(t, db, 1), "locked means alive, expired or not")
	close(end)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Empty(t, runs)
	require.Equal(t, 1, w.count(onceq.EventCompleted))
}

// ⚠ One outcome that Postgres refuses failed a thousand others, again and again.
func TestTrap_OneRefusedOutcomeDoesNotKeepTheOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, `
create function refuse() returns trigger language plpgsql as $$
begin
  if new.state = 3 and new.key = 'k7' then raise exception 'not this one'; end if;
  return new;
end $$`)
	_, err := owner(t, db).Exec(t.Context(), `create trigger refuse before update on job_fences for each row execute function refuse()`)
	require.NoError(t, err)
	ids := addMany(t, db, 200, onceq.Job{Key: "k"})
	ran := db.Drain(handle(func(context.Context, *onceq.Lease) error { return nil }))
	require.Len(t, ran, 200)
	for _, r := range ran {
		if r.JobID == ids[7] {
			require.Equal(t, onceq.StateRetrying, r.State)
			require.ErrorContains(t, r.Err, "not this one")
		} else {
			require.Equal(t, onceq.StateCompleted, r.State)
		}
	}
	require.Equal(t, ids[7], sqlOne[int64](t, db, `select id from onceq.jobs`))
}

// ⚠ now() is the start of the transaction: a long one would cut its job's window short.
func TestTrap_AWindowCountsFromTheCompletingStatement(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{Key: "k"})
	l := takeOne(t, db)
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `create table began as select now() as at, pg_sleep(0.05)::text`); err != nil {
			return err
		}
		return l.Complete(t.Context(), tx)
	}))
	require.True(t, sqlOne[bool](t, db, `select f.finished_at >= b.at + interval '50 milliseconds' from onceq.job_fences f, began b`))
}

// ⚠ A key may belong to a later job by now: what becomes of the older one must not touch the fence.
func TestTrap_AFenceIsOnlyChangedByItsOwnJob(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	old := add(t, db, onceq.Job{Key: "k", Window: onceq.UntilFinished})
	l := takeOne(t, db)
	// The key is another job's by now, whatever the way there.
	sqlRun(t, db, `update onceq.job_fences set job_id = job_id + 1000, token = token + (1000::bigint << 20)`)
	before := sqlOne[string](t, db, `select f::text from onceq.job_fences f`)
	require.NoError(t, l.Complete(t.Context(), nil))
	require.Equal(t, before, sqlOne[string](t, db, `select f::text from onceq.job_fences f`))
	sqlRun(t, db, `delete from onceq.job_fences`)
	require.NotZero(t, old)
}

// ⚠ A commit that answers ROLLBACK looks like success.
func TestTrap_ACommitThatAnswersRollbackIsAnError(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, `create table effects (n int unique deferrable initially deferred)`)
	add(t, db, onceq.Job{})
	for name, fn := range map[string]func(context.Context, pgx.Tx) error{
		"aborted": func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Exec(ctx, `select 1/0`); return nil },
		"deferred": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `insert into effects values (1), (1)`)
			return err
		},
	} {
		ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error { return fn(ctx, tx) }))
		require.Equal(t, onceq.StateRetrying, ran.State, name)
		require.Error(t, ran.Err, name)
		db.Advance(time.Hour)
	}
	require.Zero(t, sqlOne[int](t, db, `select count(*) from effects`))
}

var parameters = regexp.MustCompile(`\$(\d+)`)

// ⚠ Statistics lie about a queue: plans are made for an empty table and run on a full one.
func TestTrap_PlansScanNoTableWhateverTheStatistics(t *testing.T) {
	t.Parallel()
	fill := []string{
		`insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, scope, key, payload)
		 select nextval('onceq.ids'), now(), now(), 25, 0, 'default', 'k', 's', g::text, '1' from generate_series(1, 100000) g`,
		`insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime)
		 select 0, scope, key, 0, id, id << 20, now(), 1000 from onceq.jobs`,
	}
	empty := []string{`delete from onceq.jobs`, `delete from onceq.job_fences`}
	for name, setup := range map[string][]string{
		"never analyzed":              nil,
		"analyzed while empty":        {`vacuum analyze`},
		"tiny":                        {`insert into onceq.job_cancels values (1, now())`, `vacuum analyze`, `delete from onceq.job_cancels`},
		"full and never analyzed":     fill,
		"full":                        append(append([]string{}, fill...), `vacuum analyze`),
		"all leased":                  append(append([]string{}, fill...), `update onceq.jobs set leased_until = now() + interval '1 hour', holder = 1, claims = 1`, `vacuum analyze`),
		"all for later":               append(append([]string{}, fill...), `update onceq.jobs set run_at = now() + interval '1 hour'`, `vacuum analyze`),
		"all in another queue":        append(append([]string{}, fill...), `update onceq.jobs set queue = 'older'`, `vacuum analyze`),
		"drained and vacuumed":        append(append(append([]string{}, fill...), empty...), `vacuum`),
		"full, drained and vacuumed":  append(append(append(append([]string{}, fill...), `analyze`), empty...), `vacuum`),
		"drained, vacuumed, analyzed": append(append(append([]string{}, fill...), empty...), `vacuum analyze`),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.Schema("onceq")) // as the statements have it
			conn, err := owner(t, db).Acquire(t.Context())
			require.NoError(t, err)
			for _, s := range setup {
				_, err := conn.Exec(t.Context(), s)
				require.NoError(t, err)
			}
			defer conn.Release()
			var compiles bool
			require.NoError(t, conn.QueryRow(t.Context(), `select pg_jit_available()`).Scan(&compiles))
			if !compiles {
				t.Log("this server compiles no plans: that ours would not be is not seen here")
			}
			plan := func(what, statement, guard string) {
				tx, err := conn.Begin(t.Context())
				require.NoError(t, err)
				_, err = tx.Exec(t.Context(), `set local jit_above_cost = 1000`) // what plans for some million rows cost is far beyond it
				require.NoError(t, err)
				_, err = tx.Exec(t.Context(), guard)
				require.NoError(t, err)
				_, err = tx.Exec(t.Context(), `set local plan_cache_mode = force_generic_plan`)
				require.NoError(t, err)
				_, err = tx.Exec(t.Context(), `prepare p as `+statement)
				require.NoError(t, err, what)
				n := 0
				for _, m := range parameters.FindAllStringSubmatch(statement, -1) {
					var k int
					_, err := fmt.Sscan(m[1], &k)
					require.NoError(t, err)
					n = max(n, k)
				}
				var raw string
				require.NoError(t, tx.QueryRow(t.Context(), `explain (format json) execute p(`+strings.TrimSuffix(strings.Repeat("null, ", n), ", ")+`)`).Scan(&raw))
				_, err = tx.Exec(t.Context(), `deallocate p`)
				require.NoError(t, err)
				require.NoError(t, tx.Rollback(t.Context()))
				var plan any
				require.NoError(t, json.Unmarshal([]byte(raw), &plan))
				require.NoError(t, indexScansOnly(plan), "%s:\n%s", what, raw)
				require.NotContains(t, raw, `"JIT"`, what)
				if what == "claim" {
					// One descent for each priority: everything but the lease and the kind is the index's to find, in its order.
					require.Regexp(t, `"Index Cond": "\(\(queue = \$3\) AND \(priority = p(_1)?\.priority\) AND \(ROW\(run_at, id\) > ROW\(p(_1)?\.run_at, p(_1)?\.id\)\) AND \(run_at <= statement_timestamp\(\)\)\)"`, raw)
					require.NotContains(t, raw, `Sort"`)
				}
			}
			for what, statement := range onceq.HotStatements {
				plan(what, statement, onceq.GuardPlans)
			}
			for what, statement := range onceq.UserStatements {
				plan(what, statement, "")
			}
		})
	}
}

// indexScansOnly walks a plan.
func indexScansOnly(node any) error {
	switch node := node.(type) {
	case []any:
		for _, n := range node {
			if err := indexScansOnly(n); err != nil {
				return err
			}
		}
	case map[string]any:
		switch kind := node["Node Type"]; kind {
		case "Seq Scan", "Bitmap Heap Scan", "Hash Join", "Merge Join":
			if node["Relation Name"] == "waiters" {
				return nil // a row for each idle worker
			}
			if kind != "Bitmap Heap Scan" { // which is as good as the index scan below it
				return fmt.Errorf("%v of %v", kind, node["Relation Name"])
			}
		case "Index Scan", "Index Only Scan", "Bitmap Index Scan":
			column := map[any]string{"jobs_pkey": "id = ", "jobs_claim": "queue = ", "job_fences_pkey": "key = ", "job_cancels_pkey": "job_id = "}[node["Index Name"]]
			if cond, _ := node["Index Cond"].(string); column == "" || !strings.Contains(cond, column) {
				return fmt.Errorf("all of %v", node["Index Name"])
			}
		}
		var all []error
		for _, n := range node {
			all = append(all, indexScansOnly(n))
		}
		return errors.Join(all...)
	}
	return nil
}

// ⚠ What is behind the position costs a claim nothing, also while a snapshot keeps it from being removed, nor does what is
// due later.
func TestTrap_AClaimReadsWhatItTakesWhateverIsBesideIt(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]string{"never analyzed": `select`, "analyzed while empty": `vacuum analyze onceq.jobs`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.Schema("onceq")) // as the statement has it
			pool := owner(t, db)
			ctx := t.Context()
			run := func(statement string) {
				_, err := pool.Exec(ctx, statement)
				require.NoError(t, err)
			}
			run(before)
			fill := func(n int, due, queue string) {
				run(fmt.Sprintf(`insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload)
select nextval('onceq.ids'), %s, now(), 25, 0, '%s', 'k', '1' from generate_series(1, %d) g`, due, queue, n))
			}
			fill(100_000, `now() - interval '1 hour' + g * interval '1 microsecond'`, "default")
			snapshot, err := pool.Begin(ctx)
			require.NoError(t, err)
			defer func() { _ = snapshot.Rollback(ctx) }()
			_, err = snapshot.Exec(ctx, `set transaction isolation level repeatable read`)
			require.NoError(t, err)
			_, err = snapshot.Exec(ctx, `select count(*) from onceq.jobs`)
			require.NoError(t, err)
			run(`delete from onceq.jobs where id % 5 <> 0`)
			run(`update onceq.jobs set leased_until = now() + interval '1 hour', holder = 1, claims = 1`)
			fill(100_000, `now() + interval '1 hour'`, "default")
			fill(50_000, `now() - interval '1 minute' + g * interval '1 microsecond'`, "before")
			fill(50_000, `now() - interval '1 minute' + g * interval '1 microsecond'`, "default")

			tx, err := pool.Begin(ctx)
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(ctx) }()
			for _, statement := range []string{onceq.GuardPlans, `set local plan_cache_mode = force_generic_plan`, `prepare p as ` + onceq.HotStatements["claim"]} {
				_, err = tx.Exec(ctx, statement)
				require.NoError(t, err)
			}
			var raw []byte
			require.NoError(t, tx.QueryRow(ctx, `explain (analyze, buffers, format json) execute p(1000000, 7, 'default', '{0}', array[now() - interval '2 minutes'], '{0}', '{k}', 10, 5)`).Scan(&raw))
			var plan []struct {
				Plan struct {
					Rows float64 `json:"Actual Rows"`
					Hit  int     `json:"Shared Hit Blocks"`
					Read int     `json:"Shared Read Blocks"`
				}
			}
			require.NoError(t, json.Unmarshal(raw, &plan))
			require.EqualValues(t, 10, plan[0].Plan.Rows)
			require.NotZero(t, plan[0].Plan.Hit)
			require.Less(t, plan[0].Plan.Hit+plan[0].Plan.Read, 200, "%s", raw)
		})
	}
}
