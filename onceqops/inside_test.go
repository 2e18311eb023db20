package onceqops_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/internal/leaks"
	"github.com/onceq/onceq/internal/plans"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// These tests need unexported code, which export_test.go lends them: the limits of Health, and statements. All others are
// in internal/tests.

// Each test that has a database fails if it leaves a goroutine behind.
func init() { leaks.On.Store(true) }

func TestExplain_NamesAnOldSnapshot(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	r, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: 1})
	require.NoError(t, err)
	_, err = db.Pool.Exec(ctx, strings.ReplaceAll(`insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values (1, 1, now(), now(), 1, 1, 'h', 'v', '{"default": 1}', '{k}')`, "onceq.", pgx.Identifier{db.Schema}.Sanitize()+"."))
	require.NoError(t, err)
	tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	var pid int
	require.NoError(t, tx.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid))
	db.Advance(time.Minute)
	e, err := onceqops.New(db.Queue).ExplainAt(ctx, db.Pool, r.ID, time.Microsecond)
	require.NoError(t, err)
	require.Equal(t, onceqops.CauseSnapshot, e.Cause(), "%s", e)
	require.NoError(t, tx.Rollback(ctx))
	e, err = onceqops.New(db.Queue).ExplainAt(ctx, db.Pool, r.ID, time.Hour)
	require.NoError(t, err)
	require.Equal(t, onceqops.CauseReady, e.Cause(), "%s", e)
}

// A vacuum has a snapshot too, and keeps no other one from its work. To end it would do harm.
func TestHealth_AVacuumIsNoOldSnapshot(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	snapshots := func() (details string) {
		found, err := onceqops.New(db.Queue).HealthAt(ctx, time.Microsecond, 1<<40, 1<<40, time.Hour)
		require.NoError(t, err)
		for _, f := range found {
			if f.What == "snapshot" {
				details += f.Detail
			}
		}
		return details
	}
	_, err := db.Pool.Exec(ctx, `create table large with (autovacuum_enabled = off) as select n, repeat('x', 1000) as text from generate_series(1, 20000) n; delete from large`)
	require.NoError(t, err)
	conn, err := db.Pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	var pid int
	require.NoError(t, conn.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid))
	done := make(chan error, 1)
	go func() {
		_, err := conn.Exec(ctx, `set vacuum_cost_delay = 100; set vacuum_cost_limit = 1`)
		if err == nil {
			_, err = conn.Exec(ctx, `vacuum large`)
		}
		done <- err
	}()
	require.Eventually(t, func() bool {
		var has bool
		err := db.Pool.QueryRow(ctx, `select exists (select from pg_stat_activity where pid = $1 and backend_xmin is not null and query like 'vacuum%')
			and exists (select from pg_stat_progress_vacuum where pid = $1)`, pid).Scan(&has)
		return err == nil && has
	}, 5*time.Minute, time.Millisecond)
	vacuum := fmt.Sprintf("session %d ", pid)
	require.NotContains(t, snapshots(), vacuum)
	tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	var other int
	require.NoError(t, tx.QueryRow(ctx, `select pg_backend_pid()`).Scan(&other))
	require.Contains(t, snapshots(), fmt.Sprintf("session %d ", other))
	require.NoError(t, tx.Rollback(ctx))
	_, err = db.Pool.Exec(ctx, `select pg_cancel_backend($1)`, pid)
	require.NoError(t, err)
	require.Error(t, <-done, "the vacuum was still at work")
}

func TestHealth_NamesWhatSlowsAQueueDown(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema(`we"ird`))
	find := func(what string) onceqops.Finding {
		t.Helper()
		var found []onceqops.Finding
		require.Eventually(t, func() bool { // the server's statistics arrive a little later
			var err error
			found, err = onceqops.New(db.Queue).HealthAt(t.Context(), time.Microsecond, 100, 1, time.Microsecond)
			require.NoError(t, err)
			return slices.ContainsFunc(found, func(f onceqops.Finding) bool { return f.What == what })
		}, 5*time.Minute, 50*time.Millisecond, "no %s", what)
		i := slices.IndexFunc(found, func(f onceqops.Finding) bool { return f.What == what })
		require.NotEmpty(t, found[i].Advice)
		return found[i]
	}

	tx, err := db.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	var pid int
	require.NoError(t, tx.QueryRow(t.Context(), `select pg_backend_pid()`).Scan(&pid))
	require.Contains(t, find("snapshot").Detail, t.Name())

	_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Queue: "late"})
	require.NoError(t, err)
	require.Contains(t, find("waiting").Detail, `"late"`)

	jobs := make([]onceq.Job, 500)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k"}
	}
	_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `delete from "we""ird".jobs`)
	require.NoError(t, err)
	require.Contains(t, find("dead_rows").Detail, "jobs has")
	require.Contains(t, find("index_bloat").Detail, "0 MB for 0 rows") // empty, and larger than the limit, which is one byte
	require.NoError(t, tx.Rollback(t.Context()))

	_, err = conformance.Owner(t, db).Exec(t.Context(), `alter table jobs set (autovacuum_enabled = 'no')`)
	require.NoError(t, err)
	require.Contains(t, find("autovacuum").Detail, "jobs is not vacuumed")
}

// At READ COMMITTED a session that has written and idles has no snapshot, and keeps vacuum from its work all the same. One that has
// only read does not.
func TestHealth_ASessionThatHasWrittenAndIdles(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	snapshots := func() (all []onceqops.Finding) {
		found, err := onceqops.New(db.Queue).HealthAt(ctx, time.Microsecond, 1<<40, 1<<40, time.Hour)
		require.NoError(t, err)
		for _, f := range found {
			if f.What == "snapshot" {
				all = append(all, f)
			}
		}
		return all
	}
	tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	var pid int
	var since time.Time
	require.NoError(t, tx.QueryRow(ctx, `select pg_backend_pid(), now()`).Scan(&pid, &since))
	_, err = tx.Exec(ctx, `select 1`) // whose message closes the portal of the statement before, which has a snapshot
	require.NoError(t, err)
	require.Empty(t, snapshots())
	_, err = tx.Exec(ctx, `select pg_current_xact_id()`)
	require.NoError(t, err)
	all := snapshots()
	require.Len(t, all, 1)
	require.Contains(t, all[0].Detail, fmt.Sprintf("session %d ", pid))
	require.WithinDuration(t, since, all[0].Since, 0)
}

// Somebody has a table locked. Health names the session before everything else, and returns what it finds without that table.
func TestHealth_ATableThatIsLocked(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, `lock table `+pgx.Identifier{db.Schema}.Sanitize()+`.jobs in access exclusive mode`)
	require.NoError(t, err)
	who := fmt.Sprintf("session %d (", tx.Conn().PgConn().PID())
	names := func(found []onceqops.Finding) bool {
		return len(found) > 0 && found[0].What == "lock" && found[0].Severe && !found[0].Since.IsZero() && strings.HasPrefix(found[0].Detail, who+`user "`) &&
			strings.Contains(found[0].Detail, "has locked jobs (AccessExclusiveLock), in a transaction that began at ")
	}
	require.Eventually(t, func() bool { // a lock that lasts less than a second is named if it keeps a question from an answer
		found, err := onceqops.New(db.Queue).HealthWithin(ctx, 100*time.Millisecond)
		require.NoError(t, err)
		return names(found)
	}, 3*time.Minute, time.Millisecond)

	// Who waits for such a lock keeps others waiting, too.
	require.NoError(t, tx.Rollback(ctx))
	reader, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = reader.Rollback(ctx) }()
	_, err = reader.Exec(ctx, `select from `+pgx.Identifier{db.Schema}.Sanitize()+`.jobs`)
	require.NoError(t, err)
	waits, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		_, _ = db.Pool.Exec(waits, `do $$ begin lock table `+pgx.Identifier{db.Schema}.Sanitize()+`.jobs; end $$`)
	}()
	require.Eventually(t, func() bool {
		found, err := onceqops.New(db.Queue).HealthWithin(ctx, time.Second)
		require.NoError(t, err)
		return len(found) > 0 && found[0].What == "lock" &&
			strings.Contains(found[0].Detail, fmt.Sprintf("waits to lock jobs (AccessExclusiveLock), for session %d", reader.Conn().PgConn().PID()))
	}, 3*time.Minute, time.Millisecond)
}

// A server that crashed has forgotten how many rows there are. A large index of many rows is not bloated.
func TestHealth_LostStatisticsAreNoBloat(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	jobs := make([]onceq.Job, 2000)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k", Key: fmt.Sprint(i)}
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	_, err = conformance.Owner(t, db).Exec(t.Context(), `vacuum analyze`)
	require.NoError(t, err)
	rows := func() (n int) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select n_live_tup from pg_stat_user_tables where relid = $1::regclass`, pgx.Identifier{db.Schema, "jobs"}.Sanitize()).Scan(&n))
		return n
	}
	var found []onceqops.Finding
	require.Eventually(t, func() bool { // a connection may report to the server only now what it did
		_, err := conformance.Owner(t, db).Exec(t.Context(), `
select pg_stat_reset_single_table_counters(oid) from pg_class
 where relname in ('jobs', 'job_fences', 'job_history') and relnamespace = (select oid from pg_namespace where nspname = $1)`, db.Schema)
		require.NoError(t, err)
		before := rows()
		found, err = onceqops.New(db.Queue).HealthAt(t.Context(), time.Hour, 1_000_000, 64<<10, time.Hour)
		require.NoError(t, err)
		return before == 0 && rows() == 0
	}, 5*time.Minute, 50*time.Millisecond)
	require.Empty(t, found)
}

// Health read the whole waiting room once for each lane or limit of 0, and all jobs of a family that are delayed.
func TestHealth_ReadsFewJobsForALimitOf0(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	kind := onceq.Kind[int]{Name: "later", Lane: func(n int) string { return fmt.Sprint(n % 2) }}
	jobs := make([]onceq.Job, 3000)
	for i := range jobs {
		jobs[i] = kind.Job(i)
		jobs[i].Delay = time.Hour
	}
	_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
	require.NoError(t, err)
	for _, lane := range []string{"", "1", "2", "3"} {
		require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "earlier", lane, 0))
		require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "later", lane, 0))
	}
	_, err = conformance.Owner(t, db).Exec(ctx, `vacuum analyze onceq.job_waits, onceq.lane_limits`)
	require.NoError(t, err)
	plan, err := onceqops.New(db.Queue).PlanOf(ctx, db.Pool, onceqops.ReadStill, 0)
	require.NoError(t, err)
	read, looks := plans.Read(plan, "job_waits")
	require.LessOrEqual(t, read, 1000.0, "of the family of delayed jobs")
	require.GreaterOrEqual(t, looks, 3.0*8, "one for each priority of each limit")
}

// Each page of a group read all members.
func TestList_APageOfAGroupReadsNoOtherMembers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"), queuetest.NoCheck())
	ctx := t.Context()
	for _, fill := range []string{
		`insert into onceq.job_members (group_id, job_id, state, told) select 1, g, 0, true from generate_series(1, 3000) g`,
		`insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload)
		 select g, now(), now(), 1, 0, 'default', 'k', '1' from generate_series(1, 3000, 3) g`,
		`insert into onceq.job_waits (id, run_at, created_at, max_attempts, priority, lane_rule, lane, queue, kind, payload)
		 select g, now(), now(), 1, 0, 4, '/limit', 'default', 'k', '1' from generate_series(2, 3000, 3) g`,
		`insert into onceq.job_history (id, run_at, created_at, finished_at, claims, lost, attempts, max_attempts, priority, state, queue, kind)
		 select g, now(), now(), now(), 1, 0, 1, 1, 0, 6, 'default', 'k' from generate_series(3, 3000, 3) g`,
	} {
		_, err := conformance.Owner(t, db).Exec(ctx, fill)
		require.NoError(t, err)
	}
	for _, queue := range []string{"", "default"} {
		f := onceqops.Filter{Group: 1, Queue: queue, Limit: 10, After: 2000}
		page, err := onceqops.New(db.Queue).List(ctx, db.Pool, f)
		require.NoError(t, err)
		require.Len(t, page, 10)
		for i, j := range page {
			require.EqualValues(t, 1999-i, j.ID)
		}
		statement, args := onceqops.ListStatement(f)
		plan, err := onceqops.New(db.Queue).PlanOf(ctx, db.Pool, statement, args...)
		require.NoError(t, err)
		read, _ := plans.Read(plan, "job_members")
		require.LessOrEqual(t, read, 11.0)
		for _, table := range []string{"jobs", "job_waits", "job_history"} {
			read, _ = plans.Read(plan, table)
			require.LessOrEqual(t, read, 11.0, table)
		}
	}
}

// Explain read all delayed jobs of a lane and of a limit.
func TestExplain_ReadsNoDelayedJobs(t *testing.T) {
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
	results, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
	require.NoError(t, err)

	for statement, args := range map[string][]any{
		onceqops.ReadLane:    {"k/lane", results[len(results)-1].ID, 1000, 1, time.Now().Add(time.Hour)},
		onceqops.ReadLimitOf: {"/rate", results[len(results)-2].ID, 100, 0, time.Now().Add(time.Hour)},
	} {
		plan, err := onceqops.New(db.Queue).PlanOf(ctx, db.Pool, statement, args...)
		require.NoError(t, err)
		require.Less(t, plans.Pages(plan, "job_waits"), 100.0)
	}
}
