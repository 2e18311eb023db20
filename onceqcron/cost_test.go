package onceqcron_test

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/queuetest"
)

// traffic counts what a pool sends: statements, and messages that wait for an answer. It leaves out with what Drain asks whether
// there is more, because it asks more often on a slower machine.
type traffic struct{ statements, trips atomic.Int64 }

func asks(sql string) bool {
	return strings.Contains(sql, "skip locked") || strings.Contains(sql, "rescan_turn(") || strings.Contains(sql, ".pauses") || strings.Contains(sql, "as q(queue, n)")
}

func (c *traffic) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	if !asks(d.SQL) {
		c.statements.Add(1)
		c.trips.Add(1)
	}
	return ctx
}
func (c *traffic) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (c *traffic) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	if !slices.ContainsFunc(d.Batch.QueuedQueries, func(q *pgx.QueuedQuery) bool { return asks(q.SQL) }) {
		c.statements.Add(int64(d.Batch.Len()))
		c.trips.Add(1)
	}
	return ctx
}
func (c *traffic) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (c *traffic) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// many gives a database n schedules that are due in an hour, and counts what is sent there.
func many(t testing.TB, n int) (*queuetest.DB, *onceqcron.Scheduler, *traffic) {
	sent := new(traffic)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = sent }))
	s, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{})
	require.NoError(t, err)
	ctx := context.Background()
	require.NoError(t, s.Put(ctx, nil, onceqcron.Schedule{Name: "s0", Spec: "@every 1h", Job: report.Job("all")}))
	_, err = db.Pool.Exec(ctx, `
with s as (
  insert into onceq.schedules (name, owner, spec, zone, missed, job, queue, next_at)
  select 's' || g, owner, spec, zone, missed, job, queue, next_at from onceq.schedules cross join generate_series(1, `+strconv.Itoa(n-1)+`) g
  returning name
),
j as (
  insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, scope, key, payload)
  select nextval('onceq.ids'), run_at, created_at, max_attempts, priority, queue, kind, scope, s.name, to_jsonb(s.name)
    from onceq.jobs cross join s
  returning id, scope, key
)
insert into onceq.job_fences (job_id, token, created_at, lifetime, class, state, scope, key, fingerprint)
select j.id, j.id << 20, created_at, lifetime, class, state, j.scope, j.key, fingerprint
  from j cross join onceq.job_fences`)
	require.NoError(t, err)
	return db, s, sent
}

// due makes the next n schedules due a second ago.
func due(t testing.TB, db *queuetest.DB, n int) {
	t.Helper()
	_, err := db.Pool.Exec(context.Background(), `
with s as (
  update onceq.schedules set next_at = statement_timestamp() - interval '1 second'
   where name in (select name from onceq.schedules where next_at > statement_timestamp() limit `+strconv.Itoa(n)+`)
  returning name
)
update onceq.jobs set run_at = statement_timestamp() - interval '1 second' where key in (select name from s) and kind = 'onceqcron'`)
	require.NoError(t, err)
}

// Ten thousand schedules cost no statement between their ticks, and a tick costs a fixed number: it is read, enqueued, noted and
// moved, and finished, with one message for each, and shares the claim with others.
func TestCost_StatementsOfTicks(t *testing.T) {
	t.Parallel()
	const ticks = 1000
	one, s1, sent1 := many(t, 2)
	all, s, sent := many(t, 10_000)
	drain := func(db *queuetest.DB, s *onceqcron.Scheduler, sent *traffic) (statements, trips int) {
		sent.statements.Store(0)
		sent.trips.Store(0)
		db.Drain(s.Handlers()...)
		return int(sent.statements.Load()), int(sent.trips.Load())
	}
	_, _ = drain(one, s1, sent1) // the first one also asks what server this is
	_, _ = drain(all, s, sent)
	few, fewTrips := drain(one, s1, sent1)
	many, manyTrips := drain(all, s, sent)
	require.Equal(t, few, many, "statements between the ticks of 2 and of 10,000 schedules")
	require.Equal(t, fewTrips, manyTrips)

	due(t, all, ticks)
	fired, firedTrips := drain(all, s, sent)
	require.Len(t, firedJobs(t, all), ticks)
	require.LessOrEqual(t, firedTrips-manyTrips, ticks*9/2, "messages of %d ticks", ticks)
	require.LessOrEqual(t, fired-many, ticks*11, "statements of %d ticks", ticks)
}

func firedJobs(t *testing.T, db *queuetest.DB) (ids []int64) {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), `select job_id from onceq.schedule_ticks where outcome = 'fired'`)
	require.NoError(t, err)
	ids, err = pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(t, err)
	return ids
}

// A process that starts with the schedules that are there already sends one statement for all of them.
func TestCost_RegisterOfWhatIsThere(t *testing.T) {
	t.Parallel()
	sent := new(traffic)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = sent }))
	var schedules []onceqcron.Schedule
	for i := range 50 {
		schedules = append(schedules, onceqcron.Schedule{Name: "s" + strconv.Itoa(i), Spec: "@daily", Job: report.Job("all")})
	}
	register := func(code ...onceqcron.Schedule) int64 {
		sent.statements.Store(0)
		require.NoError(t, scheduler(t, db, onceqcron.Config{}, code...).Register(t.Context()))
		return sent.statements.Load()
	}
	register(schedules...)
	require.EqualValues(t, 3, register(schedules...), "begin, the look, commit")

	// A change is written, and so is a job that is missing.
	schedules[7].Spec = "@hourly"
	require.Greater(t, register(schedules...), int64(3))
	require.EqualValues(t, 3, register(schedules...))
	var id int64
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select id from onceq.jobs where key = 's9'`).Scan(&id))
	_, err := db.Queue.Cancel(t.Context(), db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, 49, live(t, db))
	register(schedules...)
	require.Equal(t, 50, live(t, db))
	var spec string
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select spec from onceq.schedules where name = 's7'`).Scan(&spec))
	require.Equal(t, "@hourly", spec)
}

// BenchmarkTicks fires a thousand schedules that are due at one second, with a worker's defaults.
func BenchmarkTicks(b *testing.B) {
	db, s, sent := many(b, 10_000)
	for b.Loop() {
		b.StopTimer()
		_, err := db.Pool.Exec(context.Background(), `delete from onceq.jobs where kind = 'report'; delete from onceq.schedule_ticks;
update onceq.schedules set next_at = now() + interval '1 hour' where next_at < now()`)
		require.NoError(b, err)
		due(b, db, 1000)
		sent.trips.Store(0)
		b.StartTimer()
		began := time.Now()
		db.Drain(s.Handlers()...)
		b.ReportMetric(time.Since(began).Seconds(), "s/1000-ticks")
		b.ReportMetric(float64(sent.trips.Load())/1000, "trips/tick")
	}
}
