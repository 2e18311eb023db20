package tests

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func TestProgress_ABeatWritesTheLatestReport(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	step, reported := make(chan int64), make(chan error, 1)
	w := start(t, db, onceq.WorkerConfig{Lease: steady}, handle(func(_ context.Context, l *onceq.Lease) error {
		for n := range step {
			reported <- l.Progress(n, 10, "rows")
		}
		return nil
	}))
	eventually(t, "the worker's row", func() bool { return len(workers(t, db)) == 1 })
	id := add(t, db, onceq.Job{Payload: 1})
	for _, n := range []int64{3, 7} {
		step <- n - 1
		require.NoError(t, receive(t, reported))
		step <- n
		require.NoError(t, receive(t, reported))
		eventually(t, "the report", func() bool {
			p := must[onceq.JobInfo](t)(db.Queue.Get(ctx, db.Pool, id)).Progress
			return p != nil && p.Done == n
		})
	}
	p := must[onceq.JobInfo](t)(db.Queue.Get(ctx, db.Pool, id)).Progress
	require.Equal(t, [3]any{int64(7), int64(10), "rows"}, [3]any{p.Done, p.Total, p.Note})
	r := explained(t, db, id, onceqops.CauseRunning)[0]
	require.Contains(t, r.Text, "7 of 10")
	require.True(t, r.Since.Before(r.Beat), "%s, %s: a beat has been", r.Since, r.Beat)
	require.False(t, p.At.Before(r.Since))
	list := must[[]onceq.JobInfo](t)(onceqops.New(db.Queue).List(ctx, db.Pool, onceqops.Filter{}))
	require.Equal(t, int64(7), list[0].Progress.Done)
	close(step)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

func TestProgress_OfTheLatestRunOnly(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{Payload: 1})
	claim := func() *onceq.Lease {
		leases, err := q.Claim(ctx, onceq.ClaimOptions{})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		return leases[0]
	}
	progress := func() *onceq.Progress { return must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)).Progress }
	l := claim()
	now := sqlOne[time.Time](t, db, `select now()`)
	require.NoError(t, l.Extend(ctx, time.Minute))
	require.Nil(t, progress())
	require.NoError(t, l.Progress(1, 0, ""))
	require.Nil(t, progress(), "a report sends nothing")
	require.NoError(t, l.Extend(ctx, 2*time.Minute))
	require.Equal(t, int64(1), progress().Done)
	require.WithinDuration(t, now, progress().At, time.Minute)
	written := sqlOne[string](t, db, `select progress::text from onceq.jobs where id = $1`, id)
	require.NoError(t, l.Extend(ctx, 3*time.Minute))
	require.Equal(t, written, sqlOne[string](t, db, `select progress::text from onceq.jobs where id = $1`, id))

	require.NoError(t, l.Release(ctx))
	require.NotNil(t, progress(), "until the job is claimed again")
	l = claim()
	require.Nil(t, progress())
	require.True(t, explained(t, db, id, onceqops.CauseRunning)[0].Since.IsZero(), "an earlier run's time is not this one's")

	var bad *onceq.InvalidError
	require.ErrorAs(t, l.Progress(-1, 0, ""), &bad)
	require.ErrorAs(t, l.Progress(1, -1, ""), &bad)
	require.ErrorAs(t, l.Progress(1, 1, strings.Repeat("x", onceq.MaxProgressBytes+1)), &bad)
	require.ErrorAs(t, l.Progress(1, 1, "\x00"), &bad)
	require.NoError(t, l.Complete(ctx, nil))
}

func TestProgress_NotInAWorkersTransaction(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{Payload: 1})
	kind := onceq.Kind[int]{Name: "k"}
	var err error
	db.Drain(kind.HandleTx(func(_ context.Context, _ pgx.Tx, l *onceq.Lease, _ int) error {
		err = l.Progress(1, 2, "")
		return nil
	}))
	require.ErrorContains(t, err, "use Handle")
}
