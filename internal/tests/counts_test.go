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
	"github.com/onceq/onceq/queuetest"
)

// counts reads what was counted as if its minute were over.
func counts(t testing.TB, db *queuetest.DB, filter onceq.CountFilter) []onceq.Counts {
	t.Helper()
	sqlRun(t, db, `update onceq.job_counts set minute = minute - interval '10 minutes' where minute > now() - interval '5 minutes'`)
	all, err := db.Queue.Counts(t.Context(), db.Pool, filter)
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
	all := counts(t, db, onceq.CountFilter{ByKind: true})
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
	require.GreaterOrEqual(t, one.Percentile(50), 3*time.Millisecond)
	one = all[1].Last(60)
	require.Equal(t, []int{3, 3, 0, 0}, []int{one.Started, one.Completed, one.Failed, one.Dead})
	one = all[2].Last(60)
	require.Equal(t, []int{2, 1, 1, 0}, []int{one.Started, one.Completed, one.Failed, one.Dead})

	// By queue, of one minute; and only what is asked for.
	all = counts(t, db, onceq.CountFilter{Minutes: 15})
	require.Len(t, all, 2)
	require.Len(t, all[1].Minutes, 15)
	require.Equal(t, 4, all[1].Last(15).Completed)
	require.Zero(t, all[1].Last(5).Completed) // it was ten minutes ago
	require.Equal(t, all[1].From.Truncate(time.Minute), all[1].From)
	require.Len(t, counts(t, db, onceq.CountFilter{Queue: "other"}), 1)
	require.Equal(t, 3, counts(t, db, onceq.CountFilter{Kind: "batch"})[0].Last(60).Completed)
	require.Empty(t, counts(t, db, onceq.CountFilter{Kind: "none"}))
	_, err := db.Queue.Counts(t.Context(), db.Pool, onceq.CountFilter{Minutes: 1441})
	require.ErrorContains(t, err, "CountFilter.Minutes")

	// What others count in the same minute is added, and a day later a Reaper removes it.
	sqlRun(t, db, `delete from onceq.job_counts`)
	for range 2 {
		for _, what := range []string{"done", "fails", "dead"} {
			repairEnqueue(t, db, plain.Job(what))
		}
		db.Drain(plain.Handle(func(_ context.Context, _ *onceq.Lease, what string) error { return outcome(what) }))
	}
	one = counts(t, db, onceq.CountFilter{Kind: "plain"})[0].Last(60)
	require.Equal(t, []int{6, 2, 2, 2}, []int{one.Started, one.Completed, one.Failed, one.Dead})
	r := newReaper(t, db, onceq.ReaperConfig{Batch: 2})
	reap(t, r, onceq.Reaped{})
	var rows int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from `+pgx.Identifier{db.Schema}.Sanitize()+`.job_counts`).Scan(&rows))
	db.Advance(26 * time.Hour)
	reap(t, r, onceq.Reaped{Counts: rows})
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
	one := counts(t, db, onceq.CountFilter{})[0].Last(60)
	require.Equal(t, []int{1, 1, 0, 0}, []int{one.Started, one.Completed, one.Failed, one.Dead})
}

// A worker writes what it has counted once a minute while it runs, and what it cannot write it writes later.
func TestCounts_AreWrittenWhileItRuns(t *testing.T) {
	t.Parallel()
	long(t, "takes more than a minute")
	db := queuetest.New(t)
	sqlRun(t, db, `alter table onceq.job_counts rename to away`)
	var ran atomic.Int64
	w := start(t, db, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { ran.Add(1); return nil }))
	add(t, db, onceq.Job{Payload: 1})
	eventually(t, "the job", func() bool { return ran.Load() == 1 })
	require.Eventually(t, func() bool { return w.count(onceq.EventBackground) > 0 }, 2*time.Minute, 100*time.Millisecond)
	sqlRun(t, db, `alter table onceq.away rename to job_counts`)
	require.NoError(t, w.stop())
	require.Equal(t, 1, counts(t, db, onceq.CountFilter{})[0].Last(60).Completed)
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
