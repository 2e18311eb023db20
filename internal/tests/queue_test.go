package tests

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// Rows that migrations insert and that somebody has deleted are named by Health and Explain. Check puts back those of lanes, and names
// the statement for that of meta.
func TestCheck_RowsThatAreAlwaysThere(t *testing.T) {
	t.Parallel()
	var log logBuffer
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: log.logger()}), queuetest.NoCheck())
	ctx, q, may := t.Context(), db.Queue, owner(t, db)
	own := func(statement string) {
		t.Helper()
		_, err := may.Exec(ctx, statement)
		require.NoError(t, err)
	}
	workerRow(t, db, 1, `{"default": 3}`, "k", "1 second")
	waits := map[onceqops.Cause]int64{
		onceqops.CauseLane:  add(t, db, onceq.Job{Lane: "a"}),
		onceqops.CauseLimit: add(t, db, onceq.Job{Limit: "l"}),
		onceqops.CauseAfter: add(t, db, onceq.Job{After: []onceq.JobRef{{ID: add(t, db, onceq.Job{})}}}),
	}
	said := len(log.String())
	for _, emptied := range []string{
		`delete from onceq.lane_locks`, `delete from onceq.lane_locks where slot = 7`, `delete from onceq.lane_calls where slot = -1`,
		`with l as (delete from onceq.lane_locks) delete from onceq.lane_calls`,
	} {
		require.Empty(t, findings(t, db, "missing_rows"), emptied)
		own(emptied)
		for cause, id := range waits {
			require.Contains(t, explained(t, db, id, onceqops.CauseRows, cause)[0].Advice, "Queue.Check puts the rows back")
		}
		found := findings(t, db, "missing_rows")
		require.Len(t, found, 1)
		require.True(t, found[0].Severe)
		require.NoError(t, q.Check(ctx))
		require.Contains(t, log.String()[said:], "they were put back")
		said = len(log.String())
		require.NoError(t, q.Check(ctx))
		require.Len(t, log.String(), said, "nothing was missing")
		require.Equal(t, 16, sqlOne[int](t, db, `select count(*) from onceq.lane_locks`))
		require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from onceq.lane_calls where slot = -1 and lane = ''`))
	}

	own(`delete from onceq.meta`)
	own(`delete from onceq.lane_locks`)
	back := `insert into ` + pgx.Identifier{db.Schema}.Sanitize() + `.meta (version) values (1)`
	if db.Schema == "onceq" {
		back = `insert into onceq.meta (version) values (1)`
	}
	found := findings(t, db, "missing_rows")
	require.Len(t, found, 2)
	require.Contains(t, found[0].Advice, back)
	other, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	k := onceq.Kind[int]{Name: "k"}
	w, err := onceq.NewWorker(other, onceq.WorkerConfig{}, k.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	require.NoError(t, err)
	owner, err := onceq.New(conformance.Owner(t, db), &onceq.Config{Schema: db.Schema}) // who may write meta
	require.NoError(t, err)
	_, newErr := owner.NewInstallation(ctx)
	for _, err := range []error{q.Check(ctx), newErr, w.Run(ctx)} {
		require.ErrorContains(t, err, "is empty: somebody has emptied the tables, or copied them without data")
		require.ErrorContains(t, err, back)
	}
	own(back)
	require.NoError(t, q.Check(ctx))
	require.Empty(t, findings(t, db, "missing_rows"))
}

// Who may not write there learns what is missing, and the statements that put it back.
func TestCheck_RowsThatCannotBePutBack(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"), queuetest.NoCheck())
	pool := rolePool(t, db, func(role string) {
		_, err := owner(t, db).Exec(t.Context(), `grant usage on schema onceq to `+role+`; grant select on all tables in schema onceq to `+role+`; grant usage on sequence onceq.ids to `+role)
		require.NoError(t, err)
	}, nil)
	q, err := onceq.New(pool, nil)
	require.NoError(t, err)
	require.NoError(t, q.Check(t.Context()))
	_, err = owner(t, db).Exec(t.Context(), `delete from onceq.lane_locks`)
	require.NoError(t, err)
	err = q.Check(t.Context())
	require.ErrorContains(t, err, "could not be put back: ERROR: permission denied for table lane_locks")
	require.ErrorContains(t, err, "insert into onceq.lane_locks select pg_catalog.generate_series(0, 15)")
}

// A worker that runs while somebody empties all tables, as a suite of tests may between two tests, goes on afterwards: with lanes, with
// jobs that have lost their leases, and it says so.
func TestWorker_TablesThatAreEmptiedMeanwhile(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	may := owner(t, db)
	var ran atomic.Int64
	kind := onceq.Kind[int]{Name: "k", Lane: func(int) string { return "a" }}
	plain := onceq.Kind[int]{Name: "plain"}
	count := func(context.Context, *onceq.Lease, int) error { ran.Add(1); return nil }
	w := start(t, db, onceq.WorkerConfig{Lease: time.Second}, kind.Handle(count), plain.Handle(count))
	add(t, db, kind.Job(1))
	eventually(t, "the first job", func() bool { return ran.Load() == 1 })
	until(t, db, noJobs)
	until(t, db, `exists (select from onceq.queues)`)

	for _, table := range []string{"lane_locks", "lane_calls", "queues", "workers", "waiters", "waiter_queues", "wakes", "turns"} {
		_, err := may.Exec(t.Context(), `delete from onceq.`+table)
		require.NoError(t, err)
	}
	add(t, db, kind.Job(2))
	add(t, db, plain.Job(3))
	eventually(t, "the others", func() bool { return ran.Load() == 3 })
	require.Contains(t, w.logged(), "they were put back")

	sqlRun(t, asOwner(t, db), `
insert into jobs (id, run_at, created_at, leased_until, holder, claims, max_attempts, priority, queue, kind, payload)
values (nextval('ids'), now() - interval '1 hour', now() - interval '1 hour', now() - interval '1 minute', 1, 1, 3, 0, 'default', 'plain', '4')`)
	eventually(t, "the job whose lease ran out before", func() bool { return ran.Load() == 4 })
}
