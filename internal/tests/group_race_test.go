package tests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// A worker whose kinds have no lanes learns of followers from its looks, also if their calls are made by others.
func TestGroup_AnIdleWorkerLetsItGoOn(t *testing.T) {
	t.Parallel()
	asked := make(chan struct{}, 1)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{after: func(sql string) {
			if strings.Contains(sql, "unnest((select $1::text[])") && strings.Contains(sql, ".lane_calls") {
				select {
				case asked <- struct{}{}:
				default:
				}
			}
		}}
	}))
	running, finish, ran := make(chan struct{}), make(chan struct{}), make(chan string)
	start(t, db, onceq.WorkerConfig{}, part.Handle(func(context.Context, *onceq.Lease, int) error {
		close(running)
		<-finish
		return nil
	}), whole.Handle(func(_ context.Context, _ *onceq.Lease, name string) error {
		ran <- name
		return nil
	}))
	receive(t, asked)
	ctx, q := t.Context(), db.Queue
	first, err := q.Enqueue(ctx, db.Pool, part.Job(1))
	require.NoError(t, err)
	receive(t, running)
	then := whole.Job("after a job that was claimed before")
	then.After = []onceq.JobRef{{ID: first.ID}}
	_, err = q.Enqueue(ctx, db.Pool, then)
	require.NoError(t, err)
	close(finish)
	require.Equal(t, "after a job that was claimed before", receive(t, ran))
	_, err = q.EnqueueGroup(ctx, db.Pool, nil, whole.Job("no members"))
	require.NoError(t, err)
	require.Equal(t, "no members", receive(t, ran))
}

// A member that is redriven while its group is about to be cancelled because of it keeps the group alive.
func TestGroup_RedriveBesideDeadCancel(t *testing.T) {
	t.Parallel()
	hook := &statementHook{}
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = hook }))
	ctx, q := t.Context(), db.Queue
	job := whole.Job("x")
	job.IfDead = onceq.DeadCancel
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, job)
	require.NoError(t, err)
	require.NoError(t, laneClaimOne(t, q, g.Members[0].ID).Fail(ctx, onceq.Fatal(errors.New("no"))))
	var once atomic.Bool
	hook.after = func(sql string) {
		if strings.Contains(sql, ".promote(") && once.CompareAndSwap(false, true) { // its answer names the job
			_, err := onceqops.New(q).Redrive(ctx, db.Pool, g.Members[0].ID)
			require.NoError(t, err)
		}
	}
	require.Empty(t, groupClaim(t, q))
	require.True(t, once.Load())
	require.NoError(t, db.Check())
	require.NoError(t, laneClaimOne(t, q, g.Members[0].ID).Complete(ctx, nil))
	require.NoError(t, laneClaimOne(t, q, g.Then.ID).Complete(ctx, nil))
	require.NoError(t, db.Check())
}

// One that cannot be cancelled, because after the sequence of ids was set back a dead job has its id, keeps no other from being
// cancelled, and no lane from going on. It is tried again a minute later.
func TestGroup_OneThatCannotBeCancelled(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
	ctx, q := t.Context(), db.Queue
	then := whole.Job("x")
	then.IfDead = onceq.DeadCancel
	var ids []int64
	for range 3 {
		g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, then)
		require.NoError(t, err)
		ids = append(ids, g.Then.ID)
	}
	for _, l := range groupClaim(t, q) {
		require.NoError(t, l.Fail(ctx, onceq.Fatal(errors.New("no"))))
	}
	sqlRun(t, db, `insert into onceq.job_history (id, run_at, created_at, finished_at, claims, lost, attempts, max_attempts, priority, state, queue, kind, payload)
		select $1, now(), now(), now(), 1, 0, 1, 1, 0, 6, 'default', 'old', '1'`, ids[1])
	laned := laneEnqueue(t, q, db.Pool, charges.Job(charge{1, 1}))[0]
	require.NoError(t, laneClaimOne(t, q, laned).Complete(ctx, nil))
	for i, want := range []onceq.State{onceq.StateCancelled, onceq.StateWaiting, onceq.StateCancelled} {
		info, err := q.Get(ctx, db.Pool, ids[i])
		require.NoError(t, err)
		require.Equal(t, want, info.State)
	}
	require.Contains(t, log.String(), fmt.Sprintf("job=%d", ids[1]))
	require.True(t, sqlOne[bool](t, db, `select bool_and(due > statement_timestamp() + interval '2 seconds') from onceq.lane_calls where lane = E'\x1f' || lpad($1::text, 19, '0')`, fmt.Sprint(ids[1])))

	sqlRun(t, db, `delete from onceq.job_history where id = $1`, ids[1])
	db.Advance(time.Minute)
	require.Empty(t, groupClaim(t, q))
	info, err := q.Get(ctx, db.Pool, ids[1])
	require.NoError(t, err)
	require.Equal(t, onceq.StateCancelled, info.State)
}

// A member that somebody deletes by hand counts as cancelled after a pass of a Reaper, and one that waits there does not.
func TestGroup_AMemberThatIsDeletedByHand(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	ctx, q := t.Context(), db.Queue
	laned := part
	laned.Lane = func(int) string { return "a" }
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1), laned.Job(2), laned.Job(3), part.Job(4)}, whole.Job("x"))
	require.NoError(t, err)
	leases := groupClaim(t, q)
	maps.Copy(leases, groupClaim(t, q)) // the lane goes on after the first
	require.Len(t, leases, 3)
	sqlRun(t, db, `delete from onceq.jobs where id = $1`, g.Members[0].ID)
	r := newReaper(t, db, onceq.ReaperConfig{Batch: 1}) // one page for each member
	reap(t, r, onceq.Reaped{})
	require.Empty(t, groupClaim(t, q))
	require.Equal(t, onceq.GroupInfo{ID: g.Then.ID, State: onceq.StateWaiting, Waits: true, Total: 4, Open: 3, Cancelled: 1}, groupOf(t, db, g.Then.ID))
	require.NoError(t, leases[g.Members[1].ID].Complete(ctx, nil))
	laneClaimOne(t, q, g.Members[2].ID)
	sqlRun(t, db, `delete from onceq.jobs where id = $1`, g.Members[2].ID)
	require.NoError(t, leases[g.Members[3].ID].Fail(ctx, onceq.Fatal(errors.New("no"))))
	sqlRun(t, db, `delete from onceq.job_history where id = $1`, g.Members[3].ID)
	reap(t, r, onceq.Reaped{})
	groupClaim(t, q)
	require.Equal(t, 0, groupOf(t, db, g.Then.ID).Open)
	require.False(t, groupOf(t, db, g.Then.ID).Waits)
}

// A drain ends with nothing left that its own handlers have enqueued, whatever the new job waits for.
func TestGroup_DrainRunsWhatWaitsForARunningJob(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	q, ctx := db.Queue, t.Context()
	var followed atomic.Int64
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		part.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			follower := whole.Job("x")
			follower.After = []onceq.JobRef{{ID: l.ID}}
			if _, err := q.Enqueue(ctx, db.Pool, follower); err != nil {
				return err
			}
			until(t, db, `not exists (select from onceq.lane_calls where slot >= 0)`) // a look of the drain has taken the call
			return nil
		}),
		whole.Handle(func(context.Context, *onceq.Lease, string) error {
			followed.Add(1)
			return nil
		}))
	require.NoError(t, err)
	for n := range 5 {
		laneEnqueue(t, q, db.Pool, part.Job(n))
		require.NoError(t, w.Drain(ctx, 0))
		require.EqualValues(t, n+1, followed.Load())
	}
}
