package onceq_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/internal/leaks"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

// Each test that has a database fails when it leaves a goroutine.
func init() { leaks.On.Store(true) }

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
			conn, err := conformance.Owner(t, db).Acquire(t.Context())
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
			pool := conformance.Owner(t, db)
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

// The function that takes a key for a batch has the condition of everything else.
func TestMigration_TakeFenceSaysFreeAsTheLibraryDoes(t *testing.T) {
	t.Parallel()
	list, err := migrations.SQL("onceq")
	require.NoError(t, err)
	space := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	require.Contains(t, space(list[0].Up), space(strings.Trim(onceq.FenceFree, "()")))
}
