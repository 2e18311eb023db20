package tests

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
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

func TestStats(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	if s := must[[]onceqops.QueueStats](t)(onceqops.New(q).Stats(ctx)); len(s) != 0 {
		t.Fatalf("%+v", s)
	}
	repairDead(t, db, onceq.Job{})
	repairDead(t, db, onceq.Job{})
	repairExec(t, db, `update onceq.job_history set state = 8 where id = 1`)
	for range 3 {
		repairEnqueue(t, db, onceq.Job{Delay: time.Hour})
	}
	for _, o := range []func(*onceq.Lease) error{
		func(l *onceq.Lease) error { return l.Fail(ctx, onceq.RetryAfter(time.Hour, errors.New("later"))) },
		func(l *onceq.Lease) error { return l.Snooze(ctx, 1) },
	} {
		repairEnqueue(t, db, onceq.Job{Priority: onceq.PriorityHigh})
		if err := o(repairClaim(t, db)); err != nil {
			t.Fatal(err)
		}
	}
	repairExec(t, db, `update onceq.jobs set run_at = now() + interval '1 h' where attempts > 0`)
	repairExec(t, db, `update onceq.jobs set lost = 1 where attempts = 0 and priority = -1`) // due, and its state is retrying
	repairEnqueue(t, db, onceq.Job{Priority: onceq.PriorityLow})
	repairEnqueue(t, db, onceq.Job{Priority: onceq.PriorityLow})
	repairExec(t, db, `update onceq.jobs set run_at = now() - interval '1 min' where priority = 1`)
	repairEnqueue(t, db, onceq.Job{Priority: onceq.PriorityHigh, Queue: "x"})
	must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "x"}))
	repairExec(t, db, `insert into onceq.queues values ('idle', now())`)

	got := must[[]onceqops.QueueStats](t)(onceqops.New(q).Stats(ctx))
	if len(got) != 3 || got[0].Oldest < time.Minute || got[0].Oldest > time.Hour {
		t.Fatalf("%+v", got)
	}
	got[0].Oldest = 0
	want := []onceqops.QueueStats{
		{Queue: "default", Waiting: 2, Retrying: 2, Delayed: 3, Dead: 1, Held: 1},
		{Queue: "idle"},
		{Queue: "x", Leased: 1, Running: 1},
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("got %+v, want %+v", got[i], want[i])
		}
	}
	named := must[[]onceqops.QueueStats](t)(onceqops.New(q).Stats(ctx, "x", "none"))
	if len(named) != 2 || named[0] != (onceqops.QueueStats{Queue: "none"}) || named[1] != want[2] {
		t.Errorf("%+v", named)
	}
}

// seen is a tracer that remembers the latest statement of a pool, and whether other statements stood before it in a batch:
// there the library sets which plans may be made.
type seen struct {
	statement string
	args      []any
	guarded   bool

	guardedOnes []seen // of a test that sets it to an empty slice: the statements that find jobs
}

func (s *seen) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.statement, s.args, s.guarded = data.SQL, data.Args, false
	return ctx
}
func (s *seen) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (s *seen) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (s *seen) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	s.statement, s.args, s.guarded = data.SQL, data.Args, true
	if s.guardedOnes != nil && strings.HasPrefix(data.SQL, "\nwith recursive") && !strings.HasPrefix(data.SQL, "\nwith recursive line") {
		s.guardedOnes = append(s.guardedOnes, seen{statement: data.SQL, args: data.Args})
	}
}
func (s *seen) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (s *seen) option() queuetest.Option {
	return queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = s })
}

// wantNoScan explains the latest statement, with custom and with generic plans. No plan may read all of a table, or all of
// an index range.
func (s *seen) wantNoScan(t *testing.T, db *queuetest.DB) {
	t.Helper()
	last := *s
	for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
		err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			settings := "set local plan_cache_mode = " + mode
			if last.guarded {
				settings += "; set local enable_seqscan = off; set local enable_hashjoin = off; set local enable_mergejoin = off; set local enable_bitmapscan = off"
			}
			if _, err := tx.Exec(t.Context(), settings); err != nil {
				return err
			}
			rows, err := tx.Query(t.Context(), "explain (costs off) "+last.statement, last.args...)
			if err != nil {
				return err
			}
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			plan := strings.Join(lines, "\n")
			for _, table := range []string{"jobs", "job_history", "job_fences"} {
				if strings.Contains(plan, "Seq Scan on "+table) || strings.Contains(plan, "Bitmap Heap Scan on "+table) {
					t.Errorf("%s reads all of %s:\n%s", mode, table, plan)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// fillJobs and fillHistory add n rows to each of the queues q0 and q1 without updating the planner's statistics.
func fillJobs(t *testing.T, db *queuetest.DB, n int) {
	t.Helper()
	must[pgconn.CommandTag](t)(owner(t, db).Exec(t.Context(), `insert into jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload)
		select nextval('ids'), now() - i * interval '1 ms', now(), 25, i % 2, q, 'mail', '{}' from generate_series(1, $1::int) i, unnest(array['q0', 'q1']) q`, n))
}

func fillHistory(t *testing.T, db *queuetest.DB, n int) {
	t.Helper()
	must[pgconn.CommandTag](t)(owner(t, db).Exec(t.Context(), `insert into job_history (id, run_at, created_at, finished_at, claims, lost, attempts, max_attempts, priority, state, queue, kind, payload)
		select nextval('ids'), now(), now(), now(), 1, 0, 1, 25, 0, case i % 3 when 0 then 6 else 5 end, q, 'mail', '{}' from generate_series(1, $1::int) i, unnest(array['q0', 'q1']) q`, n))
}

func TestTrapStatsReadsBoundedRangesOfIndexes(t *testing.T) {
	t.Parallel()
	look := new(seen)
	db := queuetest.New(t, look.option())
	ctx := t.Context()
	fillJobs(t, db, 30_000)
	fillHistory(t, db, 60_000)
	got := must[[]onceqops.QueueStats](t)(onceqops.New(db.Queue).Stats(ctx))
	if len(got) != 2 || got[0].Waiting != onceqops.StatsCap || got[0].Dead != onceqops.StatsCap || !got[0].Capped || got[1].Queue != "q1" {
		t.Fatalf("%+v", got)
	}
	look.wantNoScan(t, db)
	must[pgconn.CommandTag](t)(owner(t, db).Exec(ctx, `analyze jobs, job_history`))
	must[[]onceqops.QueueStats](t)(onceqops.New(db.Queue).Stats(ctx, "q0"))
	look.wantNoScan(t, db)
}

func TestHealth_FindsNothingInAQuietDatabase(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	found, err := onceqops.New(db.Queue).Health(t.Context())
	require.NoError(t, err)
	require.Empty(t, found)
}

// rowsRead explains the latest statement as it ran, and returns how many rows the scans of tables read, with those that a
// condition threw away.
func (s *seen) rowsRead(t *testing.T, db *queuetest.DB) (n int) {
	t.Helper()
	last := *s
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "set local enable_seqscan = off; set local enable_hashjoin = off; set local enable_mergejoin = off; set local enable_bitmapscan = off"); err != nil {
			return err
		}
		var text []byte
		if err := tx.QueryRow(t.Context(), "explain (analyze, timing off, format json) "+last.statement, last.args...).Scan(&text); err != nil {
			return err
		}
		var plans []struct{ Plan planNode }
		if err := json.Unmarshal(text, &plans); err != nil {
			return err
		}
		n = int(plans[0].Plan.read())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

type planNode struct {
	Relation string     `json:"Relation Name"`
	Rows     float64    `json:"Actual Rows"`
	Removed  float64    `json:"Rows Removed by Filter"`
	Loops    float64    `json:"Actual Loops"`
	Plans    []planNode `json:"Plans"`
}

func (p planNode) read() (n float64) {
	if p.Relation != "" {
		n = (p.Rows + p.Removed) * p.Loops
	}
	for _, inner := range p.Plans {
		n += inner.read()
	}
	return n
}

// With 200,000 jobs of which the first are leased, Stats sees both the leased and the waiting ones, and reads few rows.
func TestTrapStatsReadsFewRowsOfManyJobs(t *testing.T) {
	t.Parallel()
	look := new(seen)
	db := queuetest.New(t, look.option())
	ctx := t.Context()
	fillJobs(t, db, 100_000)
	fillHistory(t, db, 10_000)
	must[pgconn.CommandTag](t)(owner(t, db).Exec(ctx, `update jobs set leased_until = now() + interval '1 h', claims = 1, holder = 1
		where queue = 'q0' and run_at < (select max(run_at) from jobs) - interval '98 s'`))
	must[pgconn.CommandTag](t)(owner(t, db).Exec(ctx, `update jobs set run_at = run_at + interval '1 h' where queue = 'q1' and run_at > (select max(run_at) from jobs) - interval '50 s'`))
	must[pgconn.CommandTag](t)(owner(t, db).Exec(ctx, `vacuum analyze jobs`))
	got := must[[]onceqops.QueueStats](t)(onceqops.New(db.Queue).Stats(ctx))
	if n := look.rowsRead(t, db); n > 20_000 {
		t.Errorf("Stats read %d rows", n)
	}
	require.Len(t, got, 2)
	for _, s := range got {
		require.True(t, s.More && s.Capped, "%+v", s)
		require.Equal(t, onceqops.StatsCap, s.Waiting)
		require.Equal(t, onceqops.StatsCap, s.Dead)
	}
	require.Equal(t, onceqops.StatsCap, got[0].Leased)
	require.Equal(t, 0, got[1].Leased)
	require.Equal(t, onceqops.StatsCap, got[1].Delayed)
	require.Greater(t, got[0].Oldest, time.Minute) // behind the leased ones, in front of what the last jobs say
}

// Of delayed jobs, Stats reads no more than it counts, over all priorities together: the next ones.
func TestTrapStatsReadsTheNextOfManyDelayedJobs(t *testing.T) {
	t.Parallel()
	look := new(seen)
	db := queuetest.New(t, look.option())
	ctx := t.Context()
	must[pgconn.CommandTag](t)(owner(t, db).Exec(ctx, `insert into jobs (id, run_at, created_at, max_attempts, attempts, priority, queue, kind, payload)
		select nextval('ids'), now() + i * interval '1 s' + interval '1 h', now(), 25, (p = 1 and i <= 10)::int, p, 'q0', 'mail', '{}'
		  from generate_series(1, 5000) i, generate_series(-1, 1) p`))
	must[pgconn.CommandTag](t)(owner(t, db).Exec(ctx, `vacuum analyze jobs`))
	got := must[[]onceqops.QueueStats](t)(onceqops.New(db.Queue).Stats(ctx))
	require.Equal(t, []onceqops.QueueStats{{Queue: "q0", Delayed: 991, Retrying: 10, More: true, Capped: true}}, got)
	if n := look.rowsRead(t, db); n > 1_100 {
		t.Errorf("Stats read %d rows", n)
	}
}

// A count that stopped says so, although all jobs were looked at.
func TestStats_SaysThatACountStopped(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	must[pgconn.CommandTag](t)(owner(t, db).Exec(t.Context(), `insert into jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload)
		select nextval('ids'), now() - i * interval '1 s', now(), 25, p, 'q0', 'mail', '{}' from generate_series(1, 400) i, generate_series(-1, 1) p`))
	got := must[[]onceqops.QueueStats](t)(onceqops.New(db.Queue).Stats(t.Context()))[0]
	require.Equal(t, onceqops.StatsCap, got.Waiting)
	require.True(t, got.Capped && !got.More, "%+v", got)
}

func TestHealth_TakesStatsThatAreGiven(t *testing.T) {
	t.Parallel()
	look := new(seen)
	db := queuetest.New(t, look.option())
	ctx := t.Context()
	fillJobs(t, db, 10)
	must[pgconn.CommandTag](t)(owner(t, db).Exec(ctx, `update jobs set run_at = now() - interval '1 h'`))
	stats := must[[]onceqops.QueueStats](t)(onceqops.New(db.Queue).Stats(ctx))
	look.guardedOnes = []seen{}
	of := func(stats ...onceqops.QueueStats) (queues []string) {
		for _, f := range must[[]onceqops.Finding](t)(onceqops.New(db.Queue).Health(ctx, stats...)) {
			if f.What == "waiting" {
				queues = append(queues, f.Queue)
			}
		}
		return queues
	}
	require.Equal(t, []string{"q0", "q1"}, of(stats...))
	require.Equal(t, []string{"q1"}, of(stats[1:]...))
	require.Empty(t, look.guardedOnes)
	require.Equal(t, []string{"q0", "q1"}, of())
	require.Len(t, look.guardedOnes, 1)
}
