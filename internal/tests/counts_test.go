package tests

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// counts reads what was counted as if its minute were over.
func counts(t testing.TB, db *queuetest.DB, filter onceqops.CountFilter) []onceqops.Counts {
	t.Helper()
	sqlRun(t, db, `update onceq.job_counts set minute = minute - interval '10 minutes' where span = 1 and minute > now() - interval '5 minutes'`)
	all, err := onceqops.New(db.Queue).Counts(t.Context(), db.Pool, filter)
	require.NoError(t, err)
	return all
}

func TestCounts(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	hour := func(int, error) time.Duration { return time.Hour }
	plain := onceq.Kind[string]{Name: "plain", Backoff: hour}
	tx := onceq.Kind[string]{Name: "tx", Queue: "other", Backoff: hour}
	batch := onceq.Kind[string]{Name: "batch", Queue: "other"}
	for _, what := range []string{"done", "done", "fails", "dead", "snoozes", "completes itself"} {
		repairEnqueue(t, db, plain.Job(what))
	}
	for _, what := range []string{"done", "fails"} {
		repairEnqueue(t, db, tx.Job(what))
	}
	for range 3 {
		repairEnqueue(t, db, batch.Job(""))
	}
	outcome := func(what string) error {
		switch what {
		case "fails":
			return errors.New("no answer")
		case "dead":
			return onceq.Fatal(errors.New("no such address"))
		case "snoozes":
			return onceq.Snooze(time.Hour)
		}
		return nil
	}
	db.Drain(
		plain.Handle(func(ctx context.Context, l *onceq.Lease, what string) error {
			if what == "completes itself" {
				return l.Complete(ctx, nil)
			}
			time.Sleep(2 * time.Millisecond) // a duration that cannot be in the first range
			return outcome(what)
		}),
		tx.HandleTx(func(_ context.Context, _ pgx.Tx, _ *onceq.Lease, what string) error { return outcome(what) }),
		batch.HandleBatch(10, func(context.Context, pgx.Tx, []onceq.Item[string]) error { return nil }),
	)
	all := counts(t, db, onceqops.CountFilter{ByKind: true})
	require.Len(t, all, 3)
	require.Equal(t, []string{"default", "plain", "other", "batch", "other", "tx"},
		[]string{all[0].Queue, all[0].Kind, all[1].Queue, all[1].Kind, all[2].Queue, all[2].Kind})
	one := all[0].Last(60)
	require.Equal(t, []int{6, 3, 1, 1}, []int{one.Started, one.Completed, one.Failed, one.Dead})
	sum := 0
	for _, n := range one.Durations {
		sum += n
	}
	require.Equal(t, 5, sum)
	require.LessOrEqual(t, one.Durations[0], 1) // the one that completed itself
	require.Greater(t, one.Took, 8*time.Millisecond)
	require.Greater(t, one.Percentile(50), 2*time.Millisecond)
	require.Less(t, one.Percentile(100), 2*one.Took, "in ranges that are a quarter wide at most")
	sum = 0
	for _, n := range one.Waits {
		sum += n
	}
	require.Equal(t, 6, sum)
	require.Positive(t, one.WaitPercentile(95))
	one = all[1].Last(60)
	require.Equal(t, []int{3, 3, 0, 0}, []int{one.Started, one.Completed, one.Failed, one.Dead})
	one = all[2].Last(60)
	require.Equal(t, []int{2, 1, 1, 0}, []int{one.Started, one.Completed, one.Failed, one.Dead})

	// By queue, of one minute; and only what is asked for.
	all = counts(t, db, onceqops.CountFilter{Minutes: 15})
	require.Len(t, all, 2)
	require.Len(t, all[1].Minutes, 15)
	require.Equal(t, 4, all[1].Last(15).Completed)
	require.Zero(t, all[1].Last(5).Completed) // it was ten minutes ago
	require.Equal(t, all[1].From.Truncate(time.Minute), all[1].From)
	require.Len(t, counts(t, db, onceqops.CountFilter{Queue: "other"}), 1)
	require.Equal(t, 3, counts(t, db, onceqops.CountFilter{Kind: "batch"})[0].Last(60).Completed)
	require.Empty(t, counts(t, db, onceqops.CountFilter{Kind: "none"}))
	for _, wrong := range []onceqops.CountFilter{{Minutes: 1441}, {Minutes: -1}, {Minutes: 15, Step: 10}, {Minutes: 60 * 24 * 32, Step: 60}} {
		_, err := onceqops.New(db.Queue).Counts(t.Context(), db.Pool, wrong)
		require.ErrorContains(t, err, "CountFilter.Minutes")
	}
	_, err := onceqops.New(db.Queue).Counts(t.Context(), db.Pool, onceqops.CountFilter{Step: 2})
	require.ErrorContains(t, err, "CountFilter.Step")

	// What others count in the same minute is added. A day later a Reaper removes it, and a month later what was counted in the hour.
	sqlRun(t, db, `delete from onceq.job_counts`)
	for range 2 {
		for _, what := range []string{"done", "fails", "dead"} {
			repairEnqueue(t, db, plain.Job(what))
		}
		db.Drain(plain.Handle(func(_ context.Context, _ *onceq.Lease, what string) error { return outcome(what) }))
	}
	one = counts(t, db, onceqops.CountFilter{Kind: "plain"})[0].Last(60)
	require.Equal(t, []int{6, 2, 2, 2}, []int{one.Started, one.Completed, one.Failed, one.Dead})
	r := newReaper(t, db, onceq.ReaperConfig{Batch: 2})
	reap(t, r, onceq.Reaped{})
	rows := func(spans ...int) int {
		return sqlOne[int](t, db, `select count(*)::int from onceq.job_counts where span = any ($1)`, spans)
	}
	short, hours := rows(1, 10), rows(60)
	require.Positive(t, hours)
	db.Advance(26 * time.Hour)
	reap(t, r, onceq.Reaped{Counts: short})
	require.Equal(t, hours, rows(1, 10, 60))
	db.Advance(30 * 24 * time.Hour)
	reap(t, r, onceq.Reaped{Counts: hours})
}

// What is added to a minute is added to its ten minutes and to its hour, which are read once they are over.
func TestCounts_OfTenMinutesAndOfHours(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for range 3 {
		add(t, db, onceq.Job{})
		db.Drain(handle(func(context.Context, *onceq.Lease) error { return nil }))
	}
	for step, minutes := range map[int]int{10: 60, 60: 31 * 24 * 60} {
		sqlRun(t, db, `update onceq.job_counts set minute = minute - $1 * interval '1 minute' where span = $1`, step)
		all, err := onceqops.New(db.Queue).Counts(t.Context(), db.Pool, onceqops.CountFilter{Minutes: minutes, Step: step})
		require.NoError(t, err)
		require.Len(t, all, 1)
		require.Len(t, all[0].Minutes, minutes/step)
		require.Equal(t, time.Duration(step)*time.Minute, all[0].Step)
		require.Equal(t, all[0].From.Truncate(all[0].Step), all[0].From)
		sum := all[0].Last(minutes)
		require.Equal(t, []int{3, 3}, []int{sum.Started, sum.Completed})
		for _, ranges := range [][]int{sum.Durations, sum.Waits} {
			n := 0
			for _, one := range ranges {
				n += one
			}
			require.Equal(t, 3, n)
		}
	}
}

// A Reaper that runs counts what is due and since when, and not what somebody has or what comes later. It belongs to no kind.
func TestCounts_WhatIsDue(t *testing.T) {
	t.Parallel()
	long(t, "takes up to half a minute")
	db := queuetest.New(t)
	for range 5 {
		add(t, db, onceq.Job{Queue: "busy"})
	}
	add(t, db, onceq.Job{Queue: "busy", Delay: time.Hour})
	add(t, db, onceq.Job{Queue: "idle", Delay: time.Hour})
	_, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "busy", Limit: 2})
	require.NoError(t, err)
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 hour' where leased_until is null and run_at < now()`)
	r := newReaper(t, db, onceq.ReaperConfig{})
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = r.Run(ctx) })
	until(t, db, `(select count(*) >= 3 from onceq.job_counts)`)
	stop()
	running.Wait()
	all := counts(t, db, onceqops.CountFilter{})
	require.Len(t, all, 1)
	require.Equal(t, "busy", all[0].Queue)
	sum := all[0].Last(60)
	require.Equal(t, 3, sum.Due)
	require.Greater(t, sum.Oldest, time.Hour)
	require.Less(t, sum.Oldest, 2*time.Hour)
	require.Empty(t, counts(t, db, onceqops.CountFilter{ByKind: true}))
}

// The answer to a commit may be lost. The worker then writes a failure, which is refused if there was a commit: the job is completed.
func TestCounts_ACommitWhoseAnswerWasLost(t *testing.T) {
	t.Parallel()
	var armed, cut atomic.Bool
	db := queuetest.New(t, losingCommits(&armed, &cut, true))
	add(t, db, onceq.Job{})
	w := start(t, db, onceq.WorkerConfig{}, handleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease) error {
		_, err := tx.Exec(ctx, `select 1`)
		armed.Store(true)
		return err
	}))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.True(t, cut.Load())
	one := counts(t, db, onceqops.CountFilter{})[0].Last(60)
	require.Equal(t, []int{1, 1, 0, 0}, []int{one.Started, one.Completed, one.Failed, one.Dead})
}

// A worker writes what it has counted once a minute while it runs, and what it cannot write it writes later.
func TestCounts_AreWrittenWhileItRuns(t *testing.T) {
	t.Parallel()
	long(t, "takes more than a minute")
	db := queuetest.New(t)
	sqlRun(t, asOwner(t, db), `alter table job_counts rename to away`)
	var ran atomic.Int64
	w := start(t, db, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { ran.Add(1); return nil }))
	add(t, db, onceq.Job{Payload: 1})
	eventually(t, "the job", func() bool { return ran.Load() == 1 })
	require.Eventually(t, func() bool { return w.count(onceq.EventBackground) > 0 }, 2*time.Minute, 100*time.Millisecond)
	sqlRun(t, asOwner(t, db), `alter table away rename to job_counts`)
	require.NoError(t, w.stop())
	require.Equal(t, 1, counts(t, db, onceqops.CountFilter{})[0].Last(60).Completed)
}

// countsTracer records which connections listen, and which write counts.
type countsTracer struct {
	*statementHook
	mu                sync.Mutex
	listened, counted map[uint32]bool
}

func (c *countsTracer) saw(conn *pgx.Conn, sql string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if strings.HasPrefix(sql, "listen ") {
		c.listened[conn.PgConn().PID()] = true
	}
	if strings.Contains(sql, "add_counts") {
		c.counted[conn.PgConn().PID()] = true
	}
}

func (c *countsTracer) TraceQueryStart(ctx context.Context, conn *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	c.saw(conn, d.SQL)
	return ctx
}

func (c *countsTracer) TraceBatchQuery(_ context.Context, conn *pgx.Conn, d pgx.TraceBatchQueryData) {
	c.saw(conn, d.SQL)
}

// Writing counts waits for rows that other workers write, and for whoever locks the table. So it does not go through the
// session, where claims and looks would wait for it.
func TestCounts_AreNotWrittenThroughTheSession(t *testing.T) {
	t.Parallel()
	c := &countsTracer{statementHook: &statementHook{}, listened: make(map[uint32]bool), counted: make(map[uint32]bool)}
	db := queuetest.New(t)
	cfg := db.Pool.Config()
	cfg.ConnConfig.Tracer = c
	pool := must[*pgxpool.Pool](t)(pgxpool.NewWithConfig(context.Background(), cfg))
	t.Cleanup(pool.Close)
	traced := *db
	traced.Pool = pool
	other := start(t, &traced, onceq.WorkerConfig{}, kindHandler("other", "other", func(context.Context, *onceq.Lease) error { return nil }))
	w := start(t, &traced, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	until(t, db, `(select count(*) = 2 from onceq.waiters)`) // the session is open
	add(t, db, onceq.Job{})
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.NoError(t, other.stop())
	require.NotEmpty(t, c.listened)
	require.NotEmpty(t, c.counted)
	for pid := range c.counted {
		require.NotContains(t, c.listened, pid)
	}
}
