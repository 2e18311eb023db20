package onceq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/internal/leaks"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/plans"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// These tests need unexported code, which export_test.go lends them: the statements, the limits of Health, and how long a
// worker claims ahead. All others are in internal/tests.

// hotStatements are the statements that run for every job, by name.
var hotStatements = map[string]string{
	"claim":     stmt.ClaimJobs,
	"in turn":   stmt.ClaimInTurn,
	"claims":    stmt.ClaimManyJobs,
	"claim any": stmt.ClaimAny,
	"claim one": stmt.ClaimOne,
	"look":      stmt.LookForJobs,
	"find lost": stmt.FindLost,
	"extend":    stmt.ExtendLeases,
	"lengthen":  stmt.LengthenLease,
	"lock":      stmt.LockJobs,
	"complete":  stmt.CompleteJobs,
	"retry":     stmt.RetryJobs,

	"await":           stmt.BeginAwait,
	"await, time-out": stmt.EndAwait,
	"rescan":          stmt.RescanPage,
	"rescan, first":   stmt.RescanFirst,

	"complete, next":  stmt.FinishNext,
	"finish":          stmt.FinishJobs,
	"give back":       stmt.GiveBackJobs,
	"give next back":  stmt.GiveBackNext,
	"give first back": stmt.GiveBackFirst,
	"reslot":          stmt.TakeSlots,
	"promote":         stmt.PromoteLines,
}

// userStatements run in a user's transactions, and so without such settings.
var userStatements = map[string]string{
	"lock one":         stmt.LockJob,
	"complete one tx":  stmt.InTx[stmt.CompleteOne],
	"unkeyed in tx":    stmt.InTx[stmt.CompleteOneUnkeyed],
	"complete one":     stmt.CompleteOne,
	"complete unkeyed": stmt.CompleteOneUnkeyed,
	"enqueue":          stmt.InsertKeyed,
	"enqueue, general": stmt.EnqueueOne,
	"enqueue, many":    stmt.EnqueueJobs,
	"what waits":       stmt.ReadRefs,
}

// Each test that has a database fails if it leaves a goroutine behind.
func init() { leaks.On.Store(true) }

var parameters = regexp.MustCompile(`\$(\d+)`)

// ⚠ Statistics are wrong about a queue: a plan is made for an empty table and runs on a full one.
func TestTrap_PlansScanNoTableWhateverTheStatistics(t *testing.T) {
	t.Parallel()
	rows := fmt.Sprint(conformance.Sized(30_000, 100_000))
	fill := []string{
		`insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, scope, key, payload, lane, lane_rule)
		 select nextval('onceq.ids'), now(), now(), 25, 0, 'default', 'k', 's', g::text, '1', 'k/' || g % 1000, 6 from generate_series(1, ` + rows + `) g`,
		`insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime)
		 select 0, scope, key, 0, id, id << 20, now(), 1000 from onceq.jobs`,
		`insert into onceq.job_waits (id, run_at, created_at, max_attempts, priority, queue, kind, payload, lane, lane_rule)
		 select nextval('onceq.ids'), now(), now(), 25, 0, 'default', 'k', '1', 'k/' || g % 1000, 0 from generate_series(1, ` + rows + `) g`,
		`insert into onceq.lane_limits (lane, n, lowered) values ('k/', 1000, false)`,
		`insert into onceq.lane_limits (lane, n, rate, per, burst, lowered) select '/' || g, 1000, 1000, 1000, 10, false from generate_series(1, 10000) g`,
		`insert into onceq.limit_rates (lane, free_at, gap) select '/' || g, now(), 10 from generate_series(1, 10000) g`,
		`insert into onceq.lane_places (lane, id) select lane, id from onceq.jobs`,
		`insert into onceq.job_history (id, run_at, created_at, finished_at, claims, lost, attempts, max_attempts, priority, state, queue, kind, payload, lane, lane_rule)
		 select nextval('onceq.ids'), now(), now(), now(), 1, 0, 1, 1, 0, 6, 'default', 'k', '1', 's/' || g, 2 from generate_series(1, 20000) g`,
		`insert into onceq.lane_stops (lane, id) select lane, id from onceq.job_history`,
		`insert into onceq.lane_calls (slot, due, lane) select g % 16, now(), 'k/' || g % 1000 from generate_series(1, ` + rows + `) g`,
		`insert into onceq.job_members (group_id, job_id, state, told) select id % 100, id, 0, true from onceq.jobs`,
	}
	empty := []string{`delete from onceq.jobs`, `delete from onceq.job_fences`, `delete from onceq.job_waits`, `delete from onceq.lane_calls where lane <> ''`, `delete from onceq.lane_places`, `delete from onceq.lane_stops`, `delete from onceq.job_history`, `delete from onceq.job_members`}
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
			if testing.Short() && !slices.Contains([]string{"never analyzed", "full", "full, drained and vacuumed"}, name) {
				t.Skip("make check runs it: other statistics")
			}
			db := queuetest.New(t, queuetest.Schema("onceq")) // the schema in the statements
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
				_, err = tx.Exec(t.Context(), `set local jit_above_cost = 10000`) // a tenth of the default; a plan that reads the table for each queue costs 200,000 here
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
				require.NoError(t, tx.QueryRow(t.Context(), `explain (format json) execute p `+strings.TrimSuffix(strings.Repeat("(null, ", min(n, 1))+strings.Repeat("null, ", max(0, n-1)), ", ")+strings.Repeat(")", min(n, 1))).Scan(&raw))
				_, err = tx.Exec(t.Context(), `deallocate p`)
				require.NoError(t, err)
				require.NoError(t, tx.Rollback(t.Context()))
				var plan any
				require.NoError(t, json.Unmarshal([]byte(raw), &plan))
				require.NoError(t, indexScansOnly(plan), "%s:\n%s", what, raw)
				require.NotContains(t, raw, `"JIT"`, what)
				if what == "claim" || what == "in turn" {
					// There is one descent for each priority. The index finds all rows in its order; only the lease and the
					// kind are filtered.
					require.Regexp(t, `"Index Cond": "\(\(queue = \$3\) AND \(priority = p(_1)?\.priority\) AND \(ROW\(run_at, id\) > ROW\(p(_1)?\.run_at, p(_1)?\.id\)\) AND \(run_at <= statement_timestamp\(\)\)\)"`, raw)
				}
				if what == "claim" {
					require.NotContains(t, raw, `Sort"`)
				}
			}
			for what, statement := range hotStatements {
				plan(what, statement, pg.GuardPlans)
			}
			for what, statement := range userStatements {
				plan(what, statement, "")
			}
			plansOfFunctions(t, db)
		})
	}
}

// plansOfFunctions looks at the plans of what the functions of the schema send, which they make for themselves, in a transaction of the caller's.
func plansOfFunctions(t *testing.T, db *queuetest.DB) {
	t.Helper()
	for call, steps := range map[string]int{ // how many plans it has at least
		`select onceq.finish('{-2,-1}', '{1,1}', '{7,7}', '{6,5}', '{"",""}', '{"{\"error\":1}",""}', '{1,0}', '{-1,0}', true)`:                                               8,
		`select from onceq.finish_next(-1, 1, 7, '', true, 1000, 8, 'default', '{k}')`:                                                                                        8,
		`select from onceq.give_back('{-3,-2}', '{1,1}', '{7,7}', '{"{\"error\":1}",""}', '{1,0}', '{false,true}', '{0,1000000}', '{1,1}', true, '{null,"e"}', '{null,"e"}')`: 8,
		`select from onceq.cancel('{-4,-11}', 1000, false, 0)`:                                                                                                                8,
		`select onceq.promote('-infinity', 200, 5, 1000, 1000, 8, 'default', '{k}')`:                                                                                          8,
		`select onceq.redrive('{-7,-6,-5}', '{6}', 1000, '{}')`:                                                                                                               10,
		`select onceq.discard('{-7,-6,-5}', '{6}')`:                                                                                                                           5,
		`select onceq.hurry('{-11,-4}')`:                                                                                                                                      3,
		`select onceq.replace_jobs('{-19,-8,-1}', '{s,s,s}', '{of 19,of 8,of 1}', '{1,1,1}', '{null,null,null}', '{"","",""}', '{a,a,a}', '{3,7,4}', '{0,0,0}', '{0,0,0}', '{k/2,"",k/1}', '{null,null,null}')`: 9,
		`select onceq.sweep_members()`: 6,
		`select onceq.insert_members('{-100,-100,-100,-100}', '{-3,-4,-5,-12}', '{false,false,true,false}', '{0,0,0,0}', '{null,null,null,null}')`: 5,
		`select onceq.take_slots('/1', '{-2,-1}', '{1,1}', '{7,7}')`:                                                                               3,
		`select onceq.emit('e', 'e', '1', 1000, 5, true)`:                                                                                          4,
		`select onceq.begin_await(-1, 'f', 'f', 0, 1, 7, 1000)`:                                                                                    3,
	} {
		plans := nestedPlans(t, db, call, nil,
			`insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, scope, key, lane, lane_rule, claims, holder, leased_until)
			 select -g, now(), now(), 25, 0, 'default', 'k', 's', 'of ' || g, 'k/1' || E'\x1f/1', 7, 1, 7, case when g < 4 then now() + interval '1 hour' end from generate_series(1, 4) g`,
			`insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime) select 0, 's', 'of ' || g, 0, -g, -g, now(), 1000 from generate_series(1, 4) g`,
			`insert into onceq.job_members (group_id, job_id, state, told) select -100, -g, 0, g <> 4 from generate_series(1, 4) g`,
			`insert into onceq.job_waits (id, run_at, created_at, max_attempts, priority, queue, kind, lane, path, lane_rule)
			 select -g, now() - interval '1 hour', now(), 25, -1, 'default', 'k', case when g < 15 then 'k/1' else '/1' end, case when g < 15 then 'k/1' end || E'\x1f/1', 0 from generate_series(11, 18) g`,
			`insert into onceq.job_history (id, run_at, created_at, finished_at, claims, lost, attempts, max_attempts, priority, state, queue, kind, scope, key, lane, lane_rule)
			 select -g, now(), now(), now(), 1, 0, 1, 25, 0, 6, 'default', 'k', 's', 'past ' || g, case when g > 5 then 'k/1' end, 4 from generate_series(5, 7) g`,
			`insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, scope, key) values (-8, now(), now(), 25, 0, 'default', 'k', 's', 'of 8')`,
			`insert into onceq.job_waits (id, run_at, created_at, max_attempts, priority, queue, kind, scope, key, lane, lane_rule) values (-19, now(), now(), 25, -1, 'default', 'k', 's', 'of 19', 'k/2', 0)`,
			`insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime) select 0, 's', 'of ' || g, 0, -g, -g, now(), 1000 from unnest('{8,19}'::int[]) g`,
			`update onceq.lane_limits set rate = null where lane = '/1'`,
			`insert into onceq.lane_calls (slot, due, lane) select get_byte(sha256(l::bytea), 0) & 15, now(), l from unnest('{k/1,/1}'::text[]) l`,
			`insert into onceq.job_awaits (job_id, identity, created_at, until, claims, state, scope, key) values (-2, 0, now(), now() + interval '1 hour', 1, 0, 'e', 'e')`)
		if plans == nil {
			return
		}
		require.GreaterOrEqual(t, len(plans), steps, "%s: too few plans for its steps: %s", call, plans)
		for _, plan := range plans {
			require.NoError(t, indexScansOnly(plan), "%s:\n%v", call, plan)
		}
	}
}

// nestedPlans gives the plans of all statements that a call sends, with what they read, and takes back what it and the statements before it
// did. They are nil on a server that cannot show them.
func nestedPlans(t *testing.T, db *queuetest.DB, call string, args []any, before ...string) (plans []any) {
	t.Helper()
	ctx := t.Context()
	cfg := conformance.Owner(t, db).Config().ConnConfig
	cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if _, raw, ok := strings.Cut(n.Message, "plan:\n"); ok {
			var plan any
			assert.NoError(t, json.Unmarshal([]byte(raw), &plan))
			plans = append(plans, plan)
		}
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	if _, err := conn.Exec(ctx, `load 'auto_explain'`); err != nil {
		t.Log("this server does not show the plans of functions:", err)
		return nil
	}
	tx, err := conn.Begin(ctx)
	require.NoError(t, err)
	for _, s := range append(before, `set local auto_explain.log_min_duration = 0`, `set local auto_explain.log_nested_statements = on`, `set local auto_explain.log_analyze = on`,
		`set local auto_explain.log_timing = off`, `set local auto_explain.log_buffers = on`, `set local auto_explain.log_format = 'json'`, `set local auto_explain.log_level = 'notice'`) {
		_, err := tx.Exec(ctx, s)
		require.NoError(t, err, s)
	}
	_, err = tx.Exec(ctx, call, args...)
	require.NoError(t, err, call)
	require.NoError(t, tx.Rollback(ctx))
	return plans
}

// indexScansOnly returns an error for a plan that reads a whole table, or an index without the condition that bounds it.
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
			switch node["Relation Name"] {
			case "waiters", "queues", "pauses", "lane_locks":
				return nil // have one row for each idle worker, for each queue, for each pause, or 16
			}
			if kind != "Bitmap Heap Scan" { // as good as the index scan below it
				return fmt.Errorf("%v of %v", kind, node["Relation Name"])
			}
		case "Limit":
			if below, _ := node["Plans"].([]any); len(below) == 1 {
				scan, _ := below[0].(map[string]any)
				cond, _ := scan["Index Cond"].(string)
				if scan["Index Name"] == "jobs_claim" && strings.HasPrefix(cond, "(queue > ") && scan["Filter"] == nil {
					return nil // the first entry of the next queue
				}
			}
		case "Index Scan", "Index Only Scan", "Bitmap Index Scan":
			column := map[any]string{"jobs_pkey": "id = ", "jobs_claim": "queue = ", "job_fences_pkey": "key = ", "job_cancels_pkey": "job_id = ",
				"job_waits_pkey": "id = ", "job_waits_lane": "lane = ", "lane_places_pkey": "lane = ", "lane_stops_pkey": "lane = ", "lane_calls_due": "slot = ",
				"job_awaits_pkey": "job_id = ", "job_awaits_event": "key = ", "job_history_pkey": "id = ", "job_members_pkey": "group_id = ", "job_members_job": "(job_id + 0) = ", "lane_limits_pkey": "lane = ", "lane_limits_lowered": "lane = ", "limit_rates_pkey": "lane = ", "lane_locks_pkey": "slot = ", "turns_pkey": "queue = ", "queues_pkey": "queue = "}[node["Index Name"]]
			if slices.Contains([]any{"waiters_pkey", "pauses_pkey", "job_members_untold"}, node["Index Name"]) {
				break // as above; the third has only rows that are looked for
			}
			cond, _ := node["Index Cond"].(string)
			if filter, _ := node["Filter"].(string); strings.Contains(cond+filter, "= ANY (NULL") { // which implies the condition of any index
				return fmt.Errorf("%v for no rows at all, of which the planner may read all instead", node["Index Name"])
			}
			if node["Index Name"] == "job_fences_pkey" && strings.Contains(cond, "(key >= ") && strings.Contains(cond, "(key < ") {
				break // the effects of a job
			}
			if column == "" || !strings.Contains(cond, column) {
				return fmt.Errorf("all of %v", node["Index Name"])
			}
			if node["Index Name"] == "job_waits_lane" && strings.Contains(cond, "run_at") && !strings.Contains(cond, "(priority = ") {
				return fmt.Errorf("all delayed jobs of a lane: run_at bounds nothing without the priority: %s", cond)
			}
			second := map[any]string{"job_fences_pkey": "(scope = ", "lane_places_pkey": "(id = ", "lane_stops_pkey": "(id = ", "job_members_pkey": "(job_id = "}[node["Index Name"]]
			if filter, _ := node["Filter"].(string); second != "" && strings.Contains(filter, second) {
				return fmt.Errorf("all of a limit's places, of what stops a lane, of a group's members, or of one key's scopes, to find one: %v with the filter %s", node["Index Name"], filter)
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

// ⚠ A failover that loses a claim makes two leases of one job with the same count of claims, and only their holders differ. Each statement
// on behalf of a lease compares both the claims and the holder, and one on behalf of a fence both the token and the holder.
func TestTrap_EachStatementOfALeaseComparesClaimsAndHolder(t *testing.T) {
	t.Parallel()
	type leases struct {
		ids     []int64
		claims  []int32
		holders []int64
	}
	one := func(more ...any) func(leases) []any {
		return func(l leases) []any { return append([]any{l.ids[0], l.claims[0], l.holders[0]}, more...) }
	}
	many := func(more ...func(n int) any) func(leases) []any {
		return func(l leases) []any {
			args := []any{l.ids, l.claims, l.holders}
			for _, m := range more {
				args = append(args, m(len(l.ids)))
			}
			return args
		}
	}
	texts := func(n int) any { return make([]string, n) }
	nulls := func(n int) any { return make([]*string, n) }
	ints := func(n int) any { return make([]int32, n) }
	bigints := func(n int) any { return make([]int64, n) }
	bools := func(n int) any { return make([]bool, n) }
	hours := func(n int) any { return slices.Repeat([]int64{time.Hour.Microseconds()}, n) }
	no := func(int) any { return false }
	nothing := func(int) any { return nil }
	fence := func(more ...any) func(leases) []any {
		return func(l leases) []any {
			return append([]any{l.ids[0], int16(3), "s", "claimed", int64(l.claims[0]), l.holders[0]}, more...)
		}
	}
	await := func(more ...any) func(leases) []any {
		return func(l leases) []any {
			return append([]any{l.ids[0], "s", more[0], int64(0), l.claims[0], l.holders[0]}, more[1:]...)
		}
	}
	second := time.Second.Microseconds()
	args := map[string]func(leases) []any{
		"CompleteOne":             one(int64(1<<20), ""),
		"CompleteOneUnkeyed":      one(),
		"InTx completeOne":        one(int64(1<<20), "", nil),
		"InTx completeOneUnkeyed": one(nil),
		"FinishNext":              one("", false, second, int64(8), "default", []string{"k"}),
		"LengthenLease":           one(time.Hour.Microseconds()),
		"GroupsOf":                one(),
		"InsertFence":             one(int16(3), "s", "new", int64(8), second, int64(1000), nil),
		"TakeFence":               one(int16(3), "s", "free", int64(8), second, int64(1000), nil, int64(1), false, "", false),
		"CompleteJobs":            many(texts, no),
		"FinishJobs":              many(func(n int) any { return slices.Repeat([]int16{int16(onceq.StateDead)}, n) }, texts, texts, ints, bigints, no, nothing),
		"RetryJobs":               many(texts, ints, bools, hours, ints, no),
		"GiveBackJobs":            many(texts, ints, bools, hours, ints, no, nulls, nulls, nothing),
		"ExtendLeases":            many(func(int) any { return time.Hour.Microseconds() }, bools, func(int) any { return nil }),
		"TakeSlots":               func(l leases) []any { return []any{"/1", l.ids, l.claims, l.holders} },
		"LockJobs":                func(l leases) []any { return []any{"", l.ids, l.claims, l.holders} },
		"LockJob":                 func(l leases) []any { return []any{"", l.ids[0], l.claims[0], l.holders[0]} },
		"BeginAwait":              await("new", second),
		"EndAwait":                await("open"),
		"CompleteFence":           fence("", "", int64(0), int64(0)),
		"ReleaseFence":            fence(),
		"DoubtFence":              fence("why"),
		"ExtendFence":             fence(second, false),
		"EffectScope":             func(l leases) []any { return []any{"claimed", int64(l.claims[0]), l.holders[0]} },
	}

	// None is left out.
	listed, err := os.ReadFile("internal/tests/testdata/statements.sql")
	require.NoError(t, err)
	guards := regexp.MustCompile(`(claims|token) = \S+ and (\w\.)?holder = `)
	functions := regexp.MustCompile(`onceq\.(begin_await|claim_fence|finish|finish_next|give_back|take_slots)\(`)
	statements := make(map[string]string)
	for block := range strings.SplitSeq(string(listed), "\n\n-- ") {
		head, text, _ := strings.Cut(block, "\n")
		if _, name, _ := strings.Cut(head, ": "); !strings.HasPrefix(head, "citus") && (guards.MatchString(text) || functions.MatchString(text)) {
			statements[name] = strings.TrimSuffix(strings.TrimSpace(text), ";")
		}
	}
	require.ElementsMatch(t, slices.Collect(maps.Keys(statements)), slices.Collect(maps.Keys(args)))

	db := queuetest.New(t, queuetest.Schema("onceq"))
	defer db.Empty()
	for _, s := range []string{
		`insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, scope, key, lane, lane_rule, claims, holder, leased_until)
		 select g, now(), now(), 25, 0, 'default', 'k', 's', 'of ' || g, 'k/1' || E'\x1f/1', 7, 3, 7, now() + interval '1 minute' from generate_series(1, 2) g`,
		`insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime) select 0, 's', 'of ' || g, 0, g, g, now(), 1000 from generate_series(1, 2) g`,
		`insert into onceq.job_fences (class, scope, key, state, job_id, token, holder, leased_until, created_at, lifetime) values (3, 's', 'claimed', 1, 1, 3, 7, now() + interval '1 minute', now(), 0)`,
		`insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, finished_at, lifetime) values (3, 's', 'free', 5, 1, 1, now(), now(), 0)`,
		`insert into onceq.job_awaits (job_id, identity, created_at, until, claims, state, scope, key) values (1, 0, now(), now(), 0, 0, 's', 'open')`,
		`insert into onceq.job_members (group_id, job_id, state, told) select 100, g, 0, true from generate_series(1, 2) g`,
		`insert into onceq.lane_places (lane, id) select l, g from generate_series(1, 2) g, unnest('{k/1,/1}'::text[]) l`,
		`insert into onceq.lane_limits (lane, n, rate, per, burst, lowered) values ('/1', 10, 1, 1000000, 1, false)`,
	} {
		_, err := db.Pool.Exec(t.Context(), s)
		require.NoError(t, err, s)
	}
	// send returns the answer, and what there is then of the jobs from the id first on.
	send := func(name string, args []any, first int64) (answer, rows string) {
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
		answers, _ := tx.Query(t.Context(), statements[name], args...) // its error is that of the rows
		for answers.Next() {
			for i, column := range answers.FieldDescriptions() {
				if column.Name != "waited" { // that is a time
					answer += fmt.Sprintf("%q ", answers.RawValues()[i])
				}
			}
		}
		if err := answers.Err(); err != nil {
			require.True(t, onceq.LeaseLost(err), "%s: %v", name, err)
			return "lost", ""
		}
		require.NoError(t, tx.QueryRow(t.Context(), `
			select concat((select jsonb_agg(j order by id) from onceq.jobs j where id >= $1), (select jsonb_agg(f order by key) from onceq.job_fences f where job_id >= $1),
			              (select jsonb_agg(a order by key) from onceq.job_awaits a where job_id >= $1), (select jsonb_agg(w order by id) from onceq.job_waits w where id >= $1),
			              (select jsonb_agg(h order by id) from onceq.job_history h where id >= $1), (select jsonb_agg(p order by lane, id) from onceq.lane_places p where id >= $1),
			              (select jsonb_agg(m order by job_id) from onceq.job_members m where job_id >= $1))`, first).Scan(&rows))
		return answer, rows
	}
	_, all := send("LockJob", []any{"", int64(1), int32(3), int64(7)}, 1)
	_, last := send("LockJob", []any{"", int64(1), int32(3), int64(7)}, 2)
	for name, args := range args {
		right := leases{[]int64{1, 2}, []int32{3, 3}, []int64{7, 7}}
		held, _ := send(name, args(right), 1)
		right = leases{right.ids[:1], right.claims[:1], right.holders[:1]}
		first, _ := send(name, args(right), 1)
		for what, wrong := range map[string]leases{
			"another holder": {claims: []int32{3}, holders: []int64{8}},
			"earlier claims": {claims: []int32{2}, holders: []int64{7}},
			"later claims":   {claims: []int32{4}, holders: []int64{7}},
		} {
			what = name + ", " + what
			for n := 1; n <= 2; n++ { // of one job, and of two
				answer, rows := send(name, args(leases{[]int64{1, 2}[:n], slices.Repeat(wrong.claims, n), slices.Repeat(wrong.holders, n)}), 1)
				neither, _ := send(name, args(leases{[]int64{1, 2}[:n], slices.Repeat([]int32{4}, n), slices.Repeat([]int64{8}, n)}), 1)
				require.Equal(t, neither, answer, what)
				require.NotEqual(t, first, answer, what)
				if answer != "lost" {
					require.Equal(t, all, rows, what)
				}
			}
			// Beside one that holds.
			answer, rows := send(name, args(leases{[]int64{1, 2}, append([]int32{3}, wrong.claims...), append([]int64{7}, wrong.holders...)}), 2)
			switch _, array := args(right)[0].([]int64); {
			case !array: // it is for one
			case answer != "lost":
				require.Equal(t, last, rows, what)
				require.NotEqual(t, held, answer, what)
			}
		}
	}
}

// Each statement that claims takes what is free and due, of its queue and its kinds, and no more than its limit. A worker that is woken
// only when something is due hides a claim that takes what is not.
func TestClaim_EachStatementTakesOnlyWhatIsFreeAndDue(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	defer db.Empty()
	ctx := t.Context()
	_, err := db.Pool.Exec(ctx, `
		insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload, claims, lost, leased_until)
		select id, now() + due * interval '1 minute', now(), 25, priority, queue, kind, '1', 0, lost, now() + until * interval '1 minute'
		  from (values (1, 1, -9, 'default', 'k', 0, null), (2, 0, -8, 'default', 'k', 0, null), (3, 0, -7, 'default', 'k', 0, null), (4, -1, -6, 'default', 'k', 0, null),
		               (11, 0, 9, 'default', 'k', 0, null), (12, 0, -9, 'other', 'k', 0, null), (13, 0, -9, 'default', 'other', 0, null),
		               (14, 0, -9, 'default', 'k', 0, 9), (15, 0, -9, 'default', 'k', 0, null),
		               (21, 1, -1, 'default', 'k', 0, -9), (22, 1, -1, 'default', 'k', 1, null), (23, 1, 9, 'default', 'k', 1, null)) as j(id, priority, due, queue, kind, lost, until)`)
	require.NoError(t, err)
	holder, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, holder.Rollback(ctx)) }()
	_, err = holder.Exec(ctx, `select from onceq.jobs where id = 15 for update`) // by somebody else
	require.NoError(t, err)

	const second, queue = int64(1e6), "default"
	kinds, start := []string{"k"}, time.Unix(0, 0)
	starts, zeros := []time.Time{start, start, start}, []int64{0, 0, 0}
	priorities := []int16{-1, 0, 1}
	run := func(name string, want []int64, args ...any) {
		t.Helper()
		tx, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(ctx)) }()
		_, err = tx.Exec(ctx, `set local lock_timeout to '5s'`)
		require.NoError(t, err)
		rows, err := tx.Query(ctx, hotStatements[name], args...)
		require.NoError(t, err, name)
		var got []int64
		for rows.Next() {
			values, err := rows.Values()
			require.NoError(t, err, name)
			got = append(got, values[0].(int64))
		}
		require.NoError(t, rows.Err(), name)
		require.ElementsMatch(t, want, got, name)
		var leased []int64
		require.NoError(t, tx.QueryRow(ctx, `select coalesce(array_agg(id), '{}') from onceq.jobs where holder = 7`).Scan(&leased))
		require.ElementsMatch(t, want, leased, name)
	}
	for limit, want := range map[int64][]int64{1: {4}, 3: {4, 2, 3}, 10: {4, 2, 3, 1}} {
		run("claim", want, second, 7, queue, priorities, starts, zeros, kinds, limit, limit)
		run("in turn", want, second, 7, queue, priorities, starts, zeros, kinds, limit, limit, 1, second)
		run("claims", want, second, 7, []string{queue}, []int64{limit}, []int64{limit}, priorities[:1], starts[:1], zeros[:1],
			priorities[1:2], starts[:1], zeros[:1], priorities[2:], starts[:1], zeros[:1], kinds)
		run("claim any", want, second, 7, queue, priorities, starts, zeros, kinds, limit)
	}
	for _, id := range []int64{1, 11, 12, 13, 14, 15, 21, 22, 23} {
		var want []int64
		if id == 21 || id == 22 {
			want = []int64{id}
		}
		run("claim one", want, second, 7, []int64{id}, queue, kinds)
	}
}

// ⚠ What a claim has already passed costs it nothing, even while a snapshot keeps the dead rows from being removed. What is
// due later costs it nothing either.
func TestTrap_AClaimReadsWhatItTakesWhateverIsBesideIt(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]string{"never analyzed": `select`, "analyzed while empty": `vacuum analyze onceq.jobs`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "never analyzed" && testing.Short() {
				t.Skip("make check runs it: the same with other statistics")
			}
			db := queuetest.New(t, queuetest.Schema("onceq")) // the schema in the statement
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
			for _, statement := range []string{pg.GuardPlans, `set local plan_cache_mode = force_generic_plan`, `prepare p as ` + hotStatements["claim"]} {
				_, err = tx.Exec(ctx, statement)
				require.NoError(t, err)
			}
			var raw []byte
			require.NoError(t, tx.QueryRow(ctx, `explain (analyze, buffers, format json) execute p(1000000, 7, 'default', '{0}', array[now() - interval '30 minutes'], '{0}', '{k}', 10, 5)`).Scan(&raw))
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

// The SQL function that takes a key for a batch uses the same condition as all other statements.
func TestMigration_TakeFenceSaysFreeAsTheLibraryDoes(t *testing.T) {
	t.Parallel()
	list, err := migrations.SQL("onceq")
	require.NoError(t, err)
	space := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	free := space(strings.ReplaceAll(strings.Trim(table.FenceFree, "()"), "pg_catalog.", ""))
	const until, plain = `timezone('UTC', timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond')`, `f.finished_at + f.lifetime::float8 * interval '1 millisecond'`
	require.Contains(t, free, until)
	require.Contains(t, space(list[0].Up), strings.ReplaceAll(free, until, plain), "take_fence")
	require.Contains(t, space(list[0].Up), strings.ReplaceAll(free, "statement_timestamp()", "now"), "claim_fence")
}

// A worker marks what it has claimed ahead, as some of the first jobs of a backlog always are. Those are leased, and do not run.
func TestStats_TellsLeasedFromRunning(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	jobs := make([]onceq.Job, 500)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k", Payload: i}
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	// What the worker marks is noted as it happens: it may give such a job back before anybody looks.
	table := pgx.Identifier{db.Schema, "jobs"}.Sanitize()
	_, err = db.Pool.Exec(t.Context(), `create table public.marked (id bigint); grant all on public.marked to public;
		create function public.mark() returns trigger language plpgsql as $$ begin insert into public.marked values (new.id); return null; end $$;
		create trigger mark after update of ahead on `+table+` for each row when (new.ahead and new.leased_until is not null) execute function public.mark()`)
	require.NoError(t, err)
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}}},
		onceq.Kind[int]{Name: "k"}.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	var marked int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(distinct id) from public.marked`).Scan(&marked))
	require.Positive(t, marked)

	_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, jobs[:3])
	require.NoError(t, err)
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 3})
	require.NoError(t, err)
	require.Len(t, leases, 3)
	_, err = db.Pool.Exec(t.Context(), `update `+table+` set ahead = true where id <> $1`, leases[0].ID)
	require.NoError(t, err)
	stats, err := onceqops.New(db.Queue).Stats(t.Context(), "default")
	require.NoError(t, err)
	require.Equal(t, 3, stats[0].Leased)
	require.Equal(t, 1, stats[0].Running)
}

// sentTracer keeps what is sent to the server: the statements of each round trip.
type sentTracer struct {
	mu   sync.Mutex
	sent [][]string
}

func (s *sentTracer) add(one []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, one)
}

func (s *sentTracer) take() [][]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	sent := s.sent
	s.sent = nil
	return sent
}

func (s *sentTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	s.add([]string{d.SQL})
	return ctx
}
func (*sentTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (s *sentTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	var one []string
	for _, query := range d.Batch.QueuedQueries {
		one = append(one, query.SQL)
	}
	s.add(one)
	return ctx
}
func (*sentTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*sentTracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// The statements around those that run for every job are pinned byte for byte, and so is the number of round trips.
func TestStatement_WhatIsSentForEveryJob(t *testing.T) {
	t.Parallel()
	const begin, commit = `begin isolation level read committed read write`, `commit`
	const hot = `
select statement_timestamp(), pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),
       pg_catalog.set_config('enable_mergejoin', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true), pg_catalog.set_config('jit', 'off', true), pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true), pg_catalog.set_config('statement_timeout', '0', true), pg_catalog.set_config('lock_timeout', '0', true),
       case when pg_catalog.current_setting('transaction_timeout', true) <> '0' then pg_catalog.set_config('transaction_timeout', '0', true) end`
	own := func(statement string) [][]string { return [][]string{{begin, hot, statement, commit}} }
	tracer := new(sentTracer)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer }))
	ctx, q := t.Context(), db.Queue
	named := func(statement string) string {
		return strings.NewReplacer("'onceq.", "'"+pgx.Identifier{db.Schema}.Sanitize()+".", "onceq.", pgx.Identifier{db.Schema}.Sanitize()+".").Replace(statement)
	}
	if db.Schema == "onceq" {
		named = func(statement string) string { return statement }
	}
	_, err := q.Claim(ctx, onceq.ClaimOptions{}) // reads the installation's id, once
	require.NoError(t, err)
	tracer.take()

	_, err = q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k"})
	require.NoError(t, err)
	sent := tracer.take()
	require.Len(t, sent, 1)
	require.Len(t, sent[0], 1)
	require.Contains(t, sent[0][0], named("onceq.enqueue_one("))
	for i := range 3 {
		_, err = q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: fmt.Sprint(i)})
		require.NoError(t, err)
	}
	require.Len(t, tracer.take(), 3)

	q.AskedNow()
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 10})
	require.NoError(t, err)
	require.Len(t, leases, 4)
	require.Equal(t, own(named(hotStatements["claim any"])), tracer.take())
	require.NoError(t, leases[0].Complete(ctx, nil))
	require.Equal(t, [][]string{{named(userStatements["complete unkeyed"])}}, tracer.take())
	require.NoError(t, leases[1].Complete(ctx, nil))
	require.Equal(t, [][]string{{named(userStatements["complete one"])}}, tracer.take())
	require.NoError(t, leases[2].Extend(ctx, time.Minute))
	require.Equal(t, own(named(hotStatements["extend"])), tracer.take())
	require.NoError(t, leases[2].Snooze(ctx, 1))
	require.Equal(t, own(named(hotStatements["retry"])), tracer.take())
	require.NoError(t, leases[3].Fail(ctx, onceq.Fatal(context.Canceled)))
	require.Equal(t, own(named(hotStatements["finish"])), tracer.take())

	// This is what a worker sends: its claim, and its batch of outcomes.
	kind := onceq.Kind[any]{Name: "k"}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, kind.Handle(func(context.Context, *onceq.Lease, any) error { return nil }))
	require.NoError(t, err)
	require.NoError(t, w.Drain(ctx, 1))
	sent = tracer.take()
	for _, name := range []string{"claim", "complete"} {
		want := own(named(hotStatements[name]))[0]
		if name == "complete" {
			want[1] += `, pg_catalog.set_config('lock_timeout', '500ms', true)` // see internal/outbox
		}
		require.True(t, slices.ContainsFunc(sent, func(one []string) bool {
			one = slices.DeleteFunc(slices.Clone(one), func(s string) bool { return strings.HasPrefix(s, "select what, name from ") }) // once a second
			return slices.Equal(one, want)
		}), "%s: %q", name, sent)
	}
}

// Enqueue does not ask again for a while after it has found that nobody waits: for this queue, or for any. What a transaction
// with an old snapshot saw says nothing about now.
func TestEnqueue_AsksAgainOnlyWhereSomebodyMayWait(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	exec := func(in onceq.DB, statement string) {
		_, err := in.Exec(ctx, strings.ReplaceAll(statement, "onceq.", pgx.Identifier{db.Schema}.Sanitize()+"."))
		require.NoError(t, err)
	}
	finds := func(in onceq.DB, queue string) bool { // that nobody waits, with an Enqueue into the queue one
		q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema})
		require.NoError(t, err)
		_, err = q.Enqueue(ctx, in, onceq.Job{Kind: "k", Queue: "one", Payload: 1})
		require.NoError(t, err)
		return q.WasQuiet(queue)
	}
	old, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { _ = old.Rollback(ctx) }()
	exec(old, `select from onceq.waiters`)

	require.True(t, finds(db.Pool, "one"))
	require.True(t, finds(db.Pool, "two"), "nobody waits for any queue")
	exec(db.Pool, `insert into onceq.waiters (worker, serves, round, room, idle_until) values (1, 2, 1, 10, now() + interval '1 hour')`)
	exec(db.Pool, `insert into onceq.waiter_queues (queue, serves) values ('two', 2)`)
	require.True(t, finds(db.Pool, "one"))
	require.False(t, finds(db.Pool, "two"), "somebody waits for it")
	require.False(t, finds(old, "one"), "what it sees is old")
	require.False(t, finds(old, "two"), "what it sees is old")
}

// A worker that announces itself while Enqueue waits for somebody's key is woken.
func TestEnqueue_WakesWhoCameWhileItWaitedForAKey(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	named := func(statement string) string {
		return strings.ReplaceAll(statement, "onceq.", pgx.Identifier{db.Schema}.Sanitize()+".")
	}
	job := onceq.Job{Kind: "k", Key: "a"}
	other, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = other.Rollback(ctx) }()
	_, err = db.Queue.Enqueue(ctx, other, job)
	require.NoError(t, err)
	q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema}) // that has not asked who waits
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := q.Enqueue(ctx, db.Pool, job)
		done <- err
	}()
	conformance.Becomes(t, db.Pool, `select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`)
	_, err = db.Pool.Exec(ctx, named(`insert into onceq.waiter_queues (queue, serves) values ('default', 2)`))
	require.NoError(t, err)
	_, err = db.Pool.Exec(ctx, named(`insert into onceq.waiters (worker, serves, round, room, idle_until) values (1, 2, 1, 10, now() + interval '1 hour')`))
	require.NoError(t, err)
	require.NoError(t, other.Rollback(ctx))
	require.NoError(t, <-done)
	var woken int
	require.NoError(t, db.Pool.QueryRow(ctx, named(`select count(*) from onceq.wakes where worker = 1 and queue = 'default'`)).Scan(&woken))
	require.Equal(t, 1, woken)
}

// alongTracer counts the claims that bring along a look at what was enqueued last.
type alongTracer struct {
	pgx.QueryTracer
	claims atomic.Int64
}

func (a *alongTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	looks, claims := false, false
	for _, query := range d.Batch.QueuedQueries {
		looks = looks || strings.Contains(query.SQL, "pg_sequence_last_value")
		claims = claims || strings.Contains(query.SQL, "skip locked")
	}
	if looks && claims {
		a.claims.Add(1)
	}
	return ctx
}
func (*alongTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*alongTracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// Where jobs come often in very many queues, claims bring looks along, and no job is left.
func TestClaim_BringsALookAlong(t *testing.T) {
	t.Parallel()
	conformance.Quick(t, "jobs have to come often, which they do not on a busy machine")
	ctx := context.Background()
	tracer := &alongTracer{QueryTracer: new(sentTracer)}
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer }))
	queues := make([]string, 2000)
	for i := range queues {
		queues[i] = fmt.Sprint("q", i)
	}
	var done atomic.Int64
	kind := onceq.Kind[int]{Name: "k"}
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Also: queues}, kind.Handle(func(context.Context, *onceq.Lease, int) error { done.Add(1); return nil }))
	require.NoError(t, err)
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- w.Run(running) }()
	added := int64(0)
	jobs := make([]onceq.Job, 20) // at once, so that they come often on a slow machine too
	for end := time.Now().Add(2 * time.Minute); tracer.claims.Load() < 20 && time.Now().Before(end); {
		for i := range jobs {
			jobs[i] = onceq.Job{Kind: "k", Queue: queues[added*7%2000], Payload: 1}
			added++
		}
		_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
		require.NoError(t, err)
	}
	require.GreaterOrEqual(t, tracer.claims.Load(), int64(20))
	require.Eventually(t, func() bool { return done.Load() == added }, 5*time.Minute, 10*time.Millisecond)
	stop()
	require.NoError(t, <-ended)
}

// What an outcome needs may be locked. The others of its batch are written.
func TestFinish_ALockStopsItsPartOnly(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	claim := func(lanes bool) []*onceq.Lease {
		for n := range 4 {
			j := onceq.Job{Kind: "k", Payload: n}
			if lanes {
				j.Lane = fmt.Sprint(n)
			}
			_, err := db.Queue.Enqueue(t.Context(), db.Pool, j)
			require.NoError(t, err)
		}
		leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 10})
		require.NoError(t, err)
		require.Len(t, leases, 4)
		return leases
	}
	plain, laned := claim(false), claim(true)
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	for _, l := range plain {
		_, err := tx.Exec(t.Context(), `select from `+pgx.Identifier{db.Schema, "jobs"}.Sanitize()+` where id = $1 for update`, l.ID)
		require.NoError(t, err)
	}
	left, err := db.Queue.FinishAll(t.Context(), db.Pool, 100*time.Millisecond, append(slices.Clone(plain), laned...))
	require.Equal(t, "55P03", onceq.SQLState(err))
	require.Equal(t, plain, left)
	require.NoError(t, tx.Rollback(t.Context()))
	left, err = db.Queue.FinishAll(t.Context(), db.Pool, 100*time.Millisecond, plain)
	require.NoError(t, err)
	require.Empty(t, left)
	var jobs int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from `+pgx.Identifier{db.Schema, "jobs"}.Sanitize()).Scan(&jobs))
	require.Zero(t, jobs)
}

// A job that somebody changes while a completion waits for its own job's row is let in as it is then.
func TestFinish_LetsInAJobThatWasJustChanged(t *testing.T) {
	t.Parallel()
	for n, complete := range map[int]func(*onceq.Queue, pgx.Tx, []*onceq.Lease) error{
		1: func(_ *onceq.Queue, tx pgx.Tx, all []*onceq.Lease) error {
			return all[0].CompleteNext(t.Context(), tx, time.Minute)
		},
		2: func(q *onceq.Queue, tx pgx.Tx, all []*onceq.Lease) error {
			_, err := q.FinishAll(t.Context(), tx, time.Minute, all)
			return err
		},
	} {
		db := queuetest.New(t, queuetest.Schema("onceq"))
		ctx, q := t.Context(), db.Queue
		require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "k", "a", n))
		job := func(key int) onceq.Job {
			return onceq.Job{Kind: "k", Key: fmt.Sprint(key), Window: onceq.UntilFinished, Lane: "a", Payload: key}
		}
		var ids []int64
		for i := range 2 * n {
			r, err := q.Enqueue(ctx, db.Pool, job(i))
			require.NoError(t, err)
			ids = append(ids, r.ID)
		}
		count := func(sql string, args ...any) (n int) {
			require.NoError(t, db.Pool.QueryRow(ctx, `select count(*) from `+sql, args...).Scan(&n))
			return n
		}
		var leases []*onceq.Lease
		for end := time.Now().Add(time.Minute); len(leases) < n || count(`onceq.lane_calls where lane <> ''`) > 0; {
			require.True(t, time.Now().Before(end))
			more, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 10, Lease: time.Hour})
			require.NoError(t, err)
			leases = append(leases, more...)
			time.Sleep(10 * time.Millisecond) // other tests need the machine too
		}
		require.Len(t, leases, n)

		lock, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		defer func() { _ = lock.Rollback(ctx) }()
		_, err = lock.Exec(ctx, `select from onceq.jobs where id = $1 for update`, leases[0].ID)
		require.NoError(t, err)
		ended := make(chan error, 1)
		go func() {
			ended <- pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return complete(q, tx, leases) })
		}()
		for end := time.Now().Add(time.Minute); count(`pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`) == 0; {
			require.True(t, time.Now().Before(end), "the completion waits")
			time.Sleep(10 * time.Millisecond)
		}
		changed := job(n)
		changed.Payload, changed.Replace = "new", onceq.ReplacePayload
		r, err := q.Enqueue(ctx, db.Pool, changed)
		require.NoError(t, err)
		require.True(t, r.Replaced)
		require.NoError(t, lock.Rollback(ctx))
		require.NoError(t, <-ended)
		require.Equal(t, n, count(`onceq.jobs where id = any ($1)`, ids[n:]))
		require.Equal(t, 1, count(`onceq.jobs where id = $1 and payload = '"new"'`, ids[n]))
		require.Zero(t, count(`onceq.lane_calls where lane = 'k/a'`))
		require.NoError(t, db.Check())
	}
}

// ⚠ On a machine that was slow, or beside many keys that stay, looking alone decided how long the Reaper rests, and keys that were
// free soon piled up: 560,000 in five minutes, with passes that should have been ten seconds apart.
func TestTrap_TheReaperEndsItsRestWhenManyKeysHaveCome(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	r, err := onceq.NewReaper(db.Queue, onceq.ReaperConfig{})
	require.NoError(t, err)
	add := func(name string, n int) {
		const completed = `
with added as (
  insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, finished_at, lifetime)
  select 0, 'k', $1::text || n, 3, -n, 1, now(), now(), 86400000 from generate_series(1, $2::int) n
)
select pg_stat_force_next_flush()`
		_, err = db.Pool.Exec(ctx, completed, name, n)
		require.NoError(t, err)
	}
	add("first", 20_000)
	var pages int
	require.NoError(t, db.Pool.QueryRow(ctx, `select pg_relation_size($1::regclass) / 8192`, pgx.Identifier{db.Schema, "job_fences"}.Sanitize()).Scan(&pages))
	grown, err := onceq.ReaperPass(ctx, r)
	require.NoError(t, err)
	require.False(t, grown())
	add("few", 4*pages)
	require.False(t, grown())
	add("many", 2*pages)
	require.Eventually(t, grown, 5*time.Minute, 10*time.Millisecond, "the server's statistics come a moment after the commit")
}

// A job that missed its slot takes that of another one that nobody has claimed, if that has just come: whoever is slower than the
// rate would otherwise ask again and again, and lose a slot each time.
func TestReslot_TakesASlotThatNobodyUses(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	const line = "/provider"
	require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "provider", onceq.Limit{Rate: 100, Burst: 12}))
	kind := onceq.Kind[int]{Name: "k", Limit: func(int) string { return "provider" }}
	for n := range 5 {
		_, err := db.Queue.Enqueue(ctx, db.Pool, kind.Job(n))
		require.NoError(t, err)
	}
	leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 2}) // which lets all of them in
	require.NoError(t, err)
	require.Len(t, leases, 2)
	late, leased := leases[0].ID, leases[1].ID
	var ids []int64
	require.NoError(t, db.Pool.QueryRow(ctx, `select array_agg(id order by id) from onceq.jobs where leased_until is null`).Scan(&ids))
	require.Len(t, ids, 3)
	present, missed, unslotted := ids[0], ids[1], ids[2]
	_, err = db.Pool.Exec(ctx, `update onceq.jobs set lane = left(lane, -2) where id = $1`, unslotted)
	require.NoError(t, err)

	var start, taken []int64
	for range 100 { // until the message takes less time than the slot is good for
		batch := &pgx.Batch{}
		batch.Queue(`select slot from onceq.lane_locks for update`)
		batch.Queue(`update onceq.limit_rates set free_at = now() + interval '1 hour' where lane = $1`, line)
		batch.Queue(`update onceq.jobs set run_at = statement_timestamp() - case id when $1 then interval '1 minute' else interval '0' end`, missed)
		batch.Queue(hotStatements["reslot"], line, []int64{late}, []int32{1}, []int64{holderOf(t, db, late)}).QueryRow(func(row pgx.Row) error {
			return row.Scan(&start, &taken, nil, nil, nil)
		})
		require.NoError(t, db.Pool.SendBatch(ctx, batch).Close())
		require.Empty(t, start)
		if len(taken) > 0 {
			break
		}
		_, err := db.Pool.Exec(ctx, `update onceq.jobs j set leased_until = o.leased_until, holder = $2 from onceq.jobs o where j.id = $1 and o.id = $3`, late, leases[0].Token, leased)
		require.NoError(t, err)
	}
	require.Equal(t, []int64{late}, taken)
	var held, later []int64
	require.NoError(t, db.Pool.QueryRow(ctx, `
select array_agg(id order by id) filter (where leased_until is not null), array_agg(id) filter (where run_at > now() + interval '50 minutes') from onceq.jobs`).Scan(&held, &later))
	require.Equal(t, []int64{late, leased}, held)
	require.Equal(t, []int64{present}, later, "the other one gets the new slot, and not one that missed its own, has none or runs")
}

// A worker that looks whether the effects of held jobs were settled waits for nobody, and forgets none that somebody has locked.
func TestUnhold_WaitsForNobody(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx, q := t.Context(), db.Queue
	job, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "charge", Payload: 1})
	require.NoError(t, err)
	kind := onceq.Kind[int]{Name: "charge"}
	done := 0
	charge := kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) { return "", errors.New("no answer") }, onceq.OnUncertain(onceq.Hold()))
		if err == nil {
			done++
		}
		return err
	})
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, charge)
	require.NoError(t, err)
	for range 2 { // the first run leaves the effect uncertain
		require.NoError(t, w.Drain(ctx, 0))
		db.Advance(time.Hour)
	}
	state := func() onceq.State {
		info, err := q.Get(ctx, db.Pool, job.ID)
		require.NoError(t, err)
		return info.State
	}
	require.Equal(t, onceq.StateHeld, state())
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	require.NoError(t, onceqops.New(q).Resolve(ctx, tx, job.ID, "charge", onceq.Applied("ch_1")))
	require.NoError(t, q.UnholdAll(ctx)) // and comes back while the transaction is open
	require.NoError(t, tx.Rollback(ctx))
	require.NoError(t, q.UnholdAll(ctx))
	require.Equal(t, onceq.StateHeld, state())
	tag, err := db.Pool.Exec(ctx, `update onceq.job_fences set state = 3, result = '"ch_1"', detail = null where class = 3`)
	require.NoError(t, err)
	require.Equal(t, int64(1), tag.RowsAffected())
	require.NoError(t, q.UnholdAll(ctx))
	require.Equal(t, onceq.StateWaiting, state())
	require.NoError(t, w.Drain(ctx, 0))
	require.Equal(t, 1, done)
}

func holderOf(t *testing.T, db *queuetest.DB, id int64) (holder int64) {
	t.Helper()
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select holder from onceq.jobs where id = $1`, id).Scan(&holder))
	return holder
}

// TestStatements_WorkGrowsWithTheLanesAndNotWithTheirSquare finishes jobs of many lanes in one statement, and lets jobs into
// as many.
func TestStatements_WorkGrowsWithTheLanesAndNotWithTheirSquare(t *testing.T) {
	t.Parallel()
	const lanes = 300
	for _, limit := range []string{"", "shared"} {
		t.Run("limit "+limit, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.Schema("onceq"))
			ctx := t.Context()
			require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "shared", onceq.Limit{AtOnce: lanes}))
			kind := onceq.Kind[int]{Name: "k", Lane: func(n int) string { return fmt.Sprint(n % lanes) }, Limit: func(int) string { return limit }}
			jobs := make([]onceq.Job, 3*lanes)
			for i := range jobs {
				jobs[i] = kind.Job(i)
			}
			_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
			require.NoError(t, err)
			for _, plan := range nestedPlans(t, db, hotStatements["promote"], []any{time.Time{}, lanes, 0, 100_000, 1_000_000, 1, "default", []string{"k"}}) {
				require.Less(t, rowsIn(plan), float64(lanes*lanes/2), plan)
			}
			leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: lanes})
			require.NoError(t, err)
			require.Len(t, leases, lanes)

			var ids, holders []int64
			var claims []int32
			require.NoError(t, db.Pool.QueryRow(ctx, `
select array_agg(id order by id), array_agg(claims order by id), array_agg(holder order by id) from onceq.jobs`).Scan(&ids, &claims, &holders))
			none, completed := make([]string, lanes), slices.Repeat([]int16{int16(onceq.StateCompleted)}, lanes)
			args := []any{ids, claims, holders, completed, none, none, make([]int32, lanes), make([]int64, lanes), true, nil}
			for _, plan := range nestedPlans(t, db, hotStatements["finish"], args) {
				require.Less(t, rowsIn(plan), float64(lanes*lanes/2), plan)
			}
			_, err = db.Pool.Exec(ctx, hotStatements["finish"], args...)
			require.NoError(t, err)
			leases, err = db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: lanes})
			require.NoError(t, err)
			require.Len(t, leases, lanes)
		})
	}
}

// TestStatements_WorkGrowsWithTheRatesAndNotWithTheirSquare lets jobs of many limits with rates in, in one statement.
func TestStatements_WorkGrowsWithTheRatesAndNotWithTheirSquare(t *testing.T) {
	t.Parallel()
	const limits = 300
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "each/", onceq.Limit{Rate: 10, Burst: 2}))
	kind := onceq.Kind[int]{Name: "k", Limit: func(n int) string { return fmt.Sprint("each/", n%limits) }}
	jobs := make([]onceq.Job, 3*limits)
	for i := range jobs {
		jobs[i] = kind.Job(i)
	}
	_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
	require.NoError(t, err)
	var rows float64
	for _, plan := range nestedPlans(t, db, hotStatements["promote"], []any{time.Time{}, limits, 0, 100_000, 1_000_000, 1, "default", []string{"k"}}) {
		rows += rowsIn(plan)
	}
	require.Less(t, rows, float64(limits*limits/2))
	for claimed := 0; claimed < limits; { // some may miss their slots, and get others
		leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 3 * limits})
		require.NoError(t, err)
		claimed += len(leases)
	}
}

// A call for a family without waiting jobs read all those of the families after it: half a second beside a million, with all
// lanes locked.
func TestStatements_ACallForAFamilyReadsNoOtherFamilysJobs(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	kind := onceq.Kind[int]{Name: "later", Lane: func(int) string { return "one" }}
	require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "later", "", 0))
	jobs := make([]onceq.Job, 1000)
	for i := range jobs {
		jobs[i] = kind.Job(i)
	}
	_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
	require.NoError(t, err)
	require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "earlier", "", 5))
	sent := nestedPlans(t, db, `select * from onceq.call_families(2000)`, nil)
	if sent == nil {
		t.Skip("this server does not show the plans of functions")
	}
	read, looks := plans.Read(sent, "job_waits")
	require.GreaterOrEqual(t, looks, 2.0, "one for each family that was called")
	require.Less(t, read, 20.0)
}

// promoteArgs are those of a look for all calls.
var promoteArgs = []any{time.Time{}, 200, 0, 100_000, 1_000_000, 1, nil, nil}

// A look at a limit read all its delayed jobs to see whether more are due.
func TestStatements_ALookReadsNoDelayedJobs(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "rate", onceq.Limit{Rate: 10, Burst: 2}))
	_, err := conformance.Owner(t, db).Exec(ctx, `
insert into onceq.job_waits (id, run_at, created_at, max_attempts, priority, lane_rule, lane, path, queue, kind, payload)
select nextval('onceq.ids'), now() + interval '1 day', now(), 25, g % 2 - 1, 0, lane, path, 'default', 'k', '1'
  from generate_series(1, 40000) g, (values ('/rate', E'\x1f/rate'), ('k/lane', null)) l (lane, path)`)
	require.NoError(t, err)
	jobs := slices.Repeat([]onceq.Job{{Kind: "k", Limit: "rate"}, {Kind: "k", Lane: "lane", Priority: onceq.PriorityLow}}, 20)
	_, err = db.Queue.EnqueueMany(ctx, db.Pool, jobs)
	require.NoError(t, err)
	require.Less(t, plans.Pages(nestedPlans(t, db, hotStatements["promote"], promoteArgs), "job_waits"), 100.0)
}

// A look at a rate read all its live jobs twice, and each of them that completed caused one.
func TestStatements_ALookAtARateReadsFewLiveJobs(t *testing.T) {
	t.Parallel()
	const live = 3000
	for name, c := range map[string]struct {
		setup string
		jobs  int
		takes int
	}{
		"nothing waits":            {`select`, 0, 0},
		"slots are given for long": {`insert into onceq.limit_rates (lane, free_at, gap) values ('/rate', now() + interval '1 hour', 10000)`, 10, 0},
		"many are unclaimed":       {`update onceq.jobs set leased_until = null, holder = null where id > 2900`, 10, 0},
		"a job comes":              {`select`, 1, 1}, // the one look that has to know how many are unclaimed
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.Schema("onceq"))
			ctx := t.Context()
			require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "rate", onceq.Limit{Rate: 100, Burst: 20}))
			for _, fill := range []string{
				`insert into onceq.jobs (id, run_at, created_at, leased_until, holder, claims, max_attempts, priority, queue, kind, payload, lane, lane_rule)
				 select nextval('onceq.ids'), now(), now(), now() + interval '1 hour', 1, 1, 25, 0, 'default', 'k', '1', E'\x1f/rate\x1f@', 0 from generate_series(1, 3000)`,
				`insert into onceq.lane_places (lane, id) select '/rate', id from onceq.jobs`,
				c.setup,
			} {
				_, err := conformance.Owner(t, db).Exec(ctx, fill)
				require.NoError(t, err)
			}
			for range c.jobs {
				_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Limit: "rate"})
				require.NoError(t, err)
			}
			most := 200.0
			if c.takes > 0 {
				most = live + 200
			}
			read, _ := plans.Read(nestedPlans(t, db, hotStatements["promote"], promoteArgs), "lane_places")
			require.LessOrEqual(t, read, most)
			tx, err := db.Pool.Begin(ctx)
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(ctx) }()
			require.NoError(t, db.Queue.PromoteIn(ctx, tx))
			var took int
			require.NoError(t, tx.QueryRow(ctx, `select count(*) from onceq.jobs where id > 3000`).Scan(&took))
			require.Equal(t, c.takes, took)
		})
	}
}

// Each limit that was set had all of them read, with all slots locked.
func TestStatements_ALoweredLimitReadsNoOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	_, err := db.Pool.Exec(ctx, `insert into onceq.lane_limits (lane, n, lowered) select '/' || g, 1, g = 7 from generate_series(1, 3000) g`)
	require.NoError(t, err)
	read, _ := plans.Read(nestedPlans(t, db, `select onceq.settle_limits()`, nil), "lane_limits")
	require.Less(t, read, 20.0)
}

// In a call in which no two jobs have their header in common, no list is compared with another each with each.
func TestTrap_EnqueueManyWithAHeaderForEachJobStaysLinear(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	const n = 2000
	headers, ids := make([]int32, n), make([]int64, n)
	keys, texts, numbers, times := make([]string, n), make([]string, n), make([]int32, n), make([]int64, n)
	for i := range n {
		headers[i], ids[i], keys[i], texts[i] = int32(i+1), int64(i+1), fmt.Sprint(i), "1"
	}
	args := []any{headers, texts, make([][]byte, n), keys, make([][]byte, n), ids, texts, texts, texts, texts, numbers, numbers, times, times, times, 0, false,
		keys, make([]int16, n), nil, make([]*int16, n), nil, true}
	for _, before := range [][]string{nil, {`insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, finished_at, lifetime)
		select 0, '1', g, 3, 0, 0, now(), now(), 0 from generate_series(0, 1999) g`}} {
		plans := nestedPlans(t, db, userStatements["enqueue, many"], args, before...)
		if plans == nil {
			t.Skip("this server does not show the plans of functions")
		}
		rows := planRows(plans)
		require.Greater(t, rows, float64(n))
		require.Less(t, rows, 100.0*n)
	}
}

// planRows counts the rows that the nodes of a plan returned or threw away.
func planRows(node any) (n float64) {
	switch node := node.(type) {
	case []any:
		for _, inner := range node {
			n += planRows(inner)
		}
	case map[string]any:
		loops, _ := node["Actual Loops"].(float64)
		for _, count := range []string{"Actual Rows", "Rows Removed by Join Filter", "Rows Removed by Filter"} {
			rows, _ := node[count].(float64)
			n += rows * loops
		}
		for _, inner := range node {
			n += planRows(inner)
		}
	}
	return n
}

// rowsIn is how many rows a statement with this plan reads from its own parts and from arrays.
func rowsIn(plan any) (n float64) {
	plans.Each(plan, func(node map[string]any) {
		if node["Node Type"] == "CTE Scan" || node["Node Type"] == "Function Scan" {
			removed, _ := node["Rows Removed by Filter"].(float64)
			n += (node["Actual Rows"].(float64) + removed) * node["Actual Loops"].(float64)
		}
	})
	return n
}

// A beat that gets no answer has the session, and a third of a lease may be long. Meanwhile the worker announces itself, and half a
// minute later the beat gives up.
func TestSession_ABeatWithoutAnAnswerHoldsUpNothing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	named := func(statement string) string {
		return strings.ReplaceAll(statement, "onceq.", pgx.Identifier{db.Schema}.Sanitize()+".")
	}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Queue: "other"})
	require.NoError(t, err)
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "other", Limit: 1, Lease: time.Hour})
	require.NoError(t, err)
	kind := onceq.Kind[int]{Name: "k"}
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Lease: time.Hour}, kind.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	owner := conformance.Owner(t, db)
	conformance.Becomes(t, owner, named(`select exists (select from onceq.waiters where idle_until > statement_timestamp())`))
	lock, err := owner.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = lock.Rollback(context.Background()) }()
	_, err = lock.Exec(t.Context(), named(`lock table onceq.jobs in exclusive mode`)) // to the worker this is like a network that has swallowed the answer
	require.NoError(t, err)
	extended := make(chan bool)
	go func() {
		db.Queue.Extend(context.WithoutCancel(t.Context()), leases[0], time.Hour)
		close(extended)
	}()
	const waits = `exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`
	conformance.Becomes(t, owner, `select `+waits)
	var round int64
	require.NoError(t, owner.QueryRow(t.Context(), named(`select round from onceq.waiters`)).Scan(&round))
	conformance.Becomes(t, owner, named(fmt.Sprintf(`select round > %d from onceq.waiters`, round)))
	var still bool
	require.NoError(t, owner.QueryRow(t.Context(), `select `+waits).Scan(&still))
	require.True(t, still, "the announcement came before the beat has ended")
	select {
	case <-extended:
	case <-time.After(5 * time.Minute):
		t.Error("the beat waits for as long as a third of a lease")
	}
	require.NoError(t, lock.Rollback(context.Background()))
	<-extended
	stop()
	require.NoError(t, <-ended)
}

// Outcomes that are written together take several statements. Each of them tells of the jobs that somebody wants cancelled.
func TestFinish_HeedsCancelsOfEachStatement(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	plain, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: 1})
	require.NoError(t, err)
	laned, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: 1, Lane: "a"})
	require.NoError(t, err)
	var leases []*onceq.Lease
	for len(leases) < 2 { // the lane lets its job in meanwhile
		more, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 2, Lease: time.Hour})
		require.NoError(t, err)
		leases = append(leases, more...)
	}
	state, err := q.Cancel(ctx, db.Pool, plain.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateRunning, state)
	require.NoError(t, q.FailAll(ctx, db.Pool, leases, onceq.Snooze(24*time.Hour)))
	for id, want := range map[int64]onceq.State{plain.ID: onceq.StateCancelled, laned.ID: onceq.StateDelayed} {
		job, err := q.Get(ctx, db.Pool, id)
		require.NoError(t, err)
		require.Equal(t, want, job.State)
	}
}

// A worker may rescan a queue where no other one has lately, or where one has left jobs of its kinds.
func TestRescanTurn(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	check := func(what string, want bool, stays []string, ago time.Duration, left []string) {
		t.Helper()
		tx, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(ctx) }()
		_, err = tx.Exec(ctx, `insert into onceq.queues (queue, rescanned_at, left_kinds) values ('q', statement_timestamp() - $1::bigint * interval '1 microsecond', $2)`, ago.Microseconds(), left)
		require.NoError(t, err)
		rows, err := tx.Query(ctx, stmt.RescanTurn, []string{"q"}, time.Second.Microseconds(), []string{"k"})
		require.NoError(t, err)
		got, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Equal(t, want, len(got) > 0, what)
		var after []string
		require.NoError(t, tx.QueryRow(ctx, `select left_kinds from onceq.queues where queue = 'q'`).Scan(&after))
		require.Equal(t, stays, after, what)
	}
	check("after long", true, nil, time.Minute, nil)
	check("another one has lately", false, nil, -time.Millisecond, nil)
	check("word of its kind", true, []string{"other"}, -time.Millisecond, []string{"k", "other"})
	check("word of another kind", false, []string{"other"}, -time.Millisecond, []string{"other"})
	check("the clock was set back", true, nil, -time.Hour, nil)
}

// Of what a claim brings ahead it keeps 16 MiB of payloads, beside those that handlers are free for: in each queue, for its own.
// An empty payload of bytes is one that a handler gets.
func TestClaim_KeepsWhatHandlersAreFreeFor(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	payload := strings.Repeat("x", 1<<20-10)
	for name, test := range map[string]struct {
		free []int64
		kept []int
	}{
		"no handler":      {[]int64{0, 0, 0}, []int{16, 0, 1}},
		"of one queue":    {[]int64{4, 0, 0}, []int{20, 0, 1}},
		"of all":          {[]int64{20, 20, 0}, []int{20, 20, 1}},
		"of the second":   {[]int64{0, 20, 0}, []int{16, 20, 1}},
		"not all of them": {[]int64{18, 7, 0}, []int{20, 20, 1}},
	} {
		queues := []string{name + " 1", name + " 2", name + " 3"}
		jobs := []onceq.Job{{Kind: "k", Queue: queues[2], Payload: []byte{}}}
		for _, queue := range queues[:2] {
			jobs = append(jobs, slices.Repeat([]onceq.Job{{Kind: "k", Queue: queue, Payload: payload}}, 20)...)
		}
		_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
		require.NoError(t, err)
		kept, err := db.Queue.ClaimAhead(t.Context(), "k", queues, test.free)
		require.NoError(t, err)
		require.Equal(t, test.kept, kept, name)
	}

	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, slices.Repeat([]onceq.Job{{Kind: "k", Payload: payload}}, 20))
	require.NoError(t, err)
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 20})
	require.NoError(t, err)
	require.Len(t, leases, 20)
	for _, l := range leases {
		require.Len(t, l.Payload, len(payload)+2, "whoever claims for himself gets all")
	}
}
