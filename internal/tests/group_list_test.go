package tests

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// groupWith makes a group of n members, kills the first of them, and completes the others except the last open ones.
func groupWith(t *testing.T, db *queuetest.DB, rule onceq.DeadRule, n, dead, open int) onceq.Group {
	t.Helper()
	jobs := make([]onceq.Job, n)
	for i := range jobs {
		jobs[i] = part.Job(i)
	}
	then := whole.Job("x")
	then.IfDead = rule
	g, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, jobs, then)
	require.NoError(t, err)
	leases := groupClaim(t, db.Queue)
	for i, m := range g.Members {
		switch l := leases[m.ID]; {
		case i < dead:
			require.NoError(t, l.Fail(t.Context(), onceq.Fatal(errors.New("no such picture"))))
		case i < n-open:
			require.NoError(t, l.Complete(t.Context(), nil))
		default:
			require.NoError(t, l.Release(t.Context()))
		}
	}
	return g
}

// A job that waits for others says which of them are unfinished, and which are dead and what that means.
func TestExplain_WaitsForOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	workerRow(t, db, 1, `{"default": 1}`, "part,whole", "0 s")
	g := groupWith(t, db, onceq.DeadWait, 4, 1, 2)
	id, dead := g.Then.ID, g.Members[0].ID
	r := explained(t, db, id, onceqops.CauseAfter)[0]
	require.Equal(t, []any{2, []int64{g.Members[2].ID, g.Members[3].ID}, []int64{dead}}, []any{r.Before, r.Ahead, r.Dead})
	require.Contains(t, r.Text, fmt.Sprintf("it waits for 2 of 4 jobs: the first of them are [%d %d]; 1 dead and 0 held, the first of them [%d]", g.Members[2].ID, g.Members[3].ID, dead))
	require.Contains(t, r.Text, "DeadWait")
	require.Contains(t, r.Advice, fmt.Sprintf("onceq groups show %d", id))

	for _, l := range laneClaim(t, db.Queue, 10) {
		require.NoError(t, l.Complete(t.Context(), nil))
	}
	laneClaim(t, db.Queue, 10) // nothing: it waits for the dead one
	r = explained(t, db, id, onceqops.CauseAfter)[0]
	require.Equal(t, []any{0, []int64{}, []int64{dead}}, []any{r.Before, r.Ahead, r.Dead})
	require.Contains(t, r.Text, "all 4 jobs that it waits for are finished; 1 dead")
	require.Contains(t, r.Advice, "redrive them, resolve their effects, or discard them")
	require.NoError(t, onceqops.New(db.Queue).Discard(t.Context(), db.Pool, dead))
	r = explained(t, db, id, onceqops.CauseAfter)[0]
	require.Contains(t, r.Text, "a worker lets it go on within a poll")

	// Its time comes after that, and other rules say something else.
	for rule, want := range map[onceq.DeadRule]string{onceq.DeadRun: "do not keep it from running", onceq.DeadCancel: "it is cancelled when all are finished"} {
		require.Contains(t, explained(t, db, groupWith(t, db, rule, 2, 1, 1).Then.ID, onceqops.CauseAfter)[0].Text, want)
	}
	later := whole.Job("later")
	later.Delay, later.After = time.Hour, []onceq.JobRef{{ID: add(t, db, part.Job(1))}}
	explained(t, db, add(t, db, later), onceqops.CauseAfter, onceqops.CauseScheduled)
}

// Lists, counts, lanes, limits and views show a job that waits for others as a waiting one, and never its line. It can be moved,
// and its members can be listed, counted, redriven and cancelled by their group.
func TestGroup_IsSeen(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx, q := t.Context(), db.Queue
	g := groupWith(t, db, onceq.DeadWait, 4, 1, 2)
	id, dead := g.Then.ID, g.Members[0].ID
	other := add(t, db, part.Job(9))

	info := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
	require.Equal(t, []any{onceq.StateWaiting, true, "", ""}, []any{info.State, info.Blocked, info.Lane, info.Limit})
	require.Empty(t, must[[]onceqops.LaneInfo](t)(onceqops.New(q).Lanes(ctx, db.Pool, onceqops.LaneFilter{})))
	require.Empty(t, must[[]onceqops.LaneInfo](t)(onceqops.New(q).Lanes(ctx, db.Pool, onceqops.LaneFilter{After: "\x02"})))
	require.Empty(t, must[[]onceqops.LimitInfo](t)(onceqops.New(q).Limits(ctx, db.Pool, onceqops.LimitFilter{})))
	require.Equal(t, 1, must[[]onceqops.QueueStats](t)(onceqops.New(q).Stats(ctx))[0].Blocked)
	require.Equal(t, []int64{id}, must[[]int64](t)(onceqops.New(q).GroupsOf(ctx, db.Pool, dead)))
	require.Empty(t, must[[]int64](t)(onceqops.New(q).GroupsOf(ctx, db.Pool, id)))
	var line string
	require.NoError(t, db.Pool.QueryRow(ctx, `select concat_ws(' ', if_dead, total, unfinished, completed, dead, cancelled, held) from onceq.v_groups where group_id = $1`, id).Scan(&line))
	require.Equal(t, "wait 4 2 1 1 0 0", line)
	require.NoError(t, db.Pool.QueryRow(ctx, `select string_agg(state, ' ' order by job_id) from onceq.v_members where group_id = $1`, id).Scan(&line))
	require.Equal(t, "dead completed unfinished unfinished", line)
	require.NoError(t, db.Pool.QueryRow(ctx, `select state from onceq.v_jobs where id = $1`, id).Scan(&line))
	require.Equal(t, "waiting", line)

	ids := func(jobs []onceq.JobInfo, err error) (all []int64) {
		t.Helper()
		require.NoError(t, err)
		for _, j := range jobs {
			all = append(all, j.ID)
		}
		return all
	}
	open := []int64{g.Members[3].ID, g.Members[2].ID}
	require.Equal(t, append(open, dead), ids(onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{Group: id})))
	require.Equal(t, []int64{dead}, ids(onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{Group: id, States: []onceq.State{onceq.StateDead}})))
	page, next, err := onceqops.New(q).Page(ctx, db.Pool, onceqops.Filter{Group: id, Kind: "part", Limit: 2})
	require.Equal(t, open, ids(page, err))
	page, next, err = onceqops.New(q).Page(ctx, db.Pool, onceqops.Filter{Group: id, Kind: "part", Limit: 2, After: next})
	require.Equal(t, []int64{dead}, ids(page, err))
	require.Zero(t, next)
	require.Equal(t, 2, must[onceqops.Choice](t)(onceqops.New(q).WouldCancel(ctx, db.Pool, onceqops.Filter{Group: id})).Count)

	require.True(t, must[bool](t)(onceqops.New(q).Move(ctx, db.Pool, id, "elsewhere")))
	require.Equal(t, "elsewhere", must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)).Queue)
	require.True(t, must[bool](t)(onceqops.New(q).Move(ctx, db.Pool, id, "default")))
	require.NoError(t, db.Check())

	// The whole group ends. The job that waited does not run because the others are gone, and others stay.
	running := laneClaim(t, q, 1)[0]
	cancelled, asked, err := onceqops.New(q).CancelGroup(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, []int{2, 1}, []int{cancelled, asked})
	require.NoError(t, running.Complete(ctx, nil)) // it finishes first
	require.NoError(t, db.Check())
	require.Equal(t, onceq.StateCancelled, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)).State)
	require.Equal(t, onceq.GroupInfo{ID: id, State: onceq.StateCancelled, Total: 4, Completed: 2, Dead: 1, Cancelled: 1}, groupOf(t, db, id))
	require.Equal(t, other, laneClaimOne(t, q, other).ID)
	_, _, err = onceqops.New(q).CancelGroup(ctx, db.Pool, other)
	require.ErrorIs(t, err, onceq.ErrNotFound)
}

// Groups are listed by id, also where ids get a digit more, and pages go on behind the last one.
func TestGroups_AreInOrder(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	ids := make([]int64, 6)
	first := add(t, db, part.Job(1))
	for i, at := range []int64{8, 9, 98, 99, 998, 999} {
		sqlRun(t, asOwner(t, db), `select setval('ids', $1)`, at)
		then := whole.Job("x")
		then.After = []onceq.JobRef{{ID: first}}
		ids[i] = add(t, db, then)
		require.Equal(t, at+1, ids[i])
	}
	require.NoError(t, db.Check())
	var listed []int64
	for after := int64(0); ; after = listed[len(listed)-1] {
		page := must[[]onceq.GroupInfo](t)(onceqops.New(q).Groups(ctx, db.Pool, after, 2))
		if len(page) == 0 {
			break
		}
		for _, g := range page {
			listed = append(listed, g.ID)
		}
	}
	require.Equal(t, ids, listed)
	require.NoError(t, laneClaimOne(t, q, first).Complete(ctx, nil))
	require.Len(t, laneClaim(t, q, 10), 6)
	require.NoError(t, db.Check())
}

// Health names a job that waits for dead members, once there is nothing else that it waits for.
func TestHealth_AGroupThatWaitsForDeadMembers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	found := func() (all []onceqops.Finding) {
		t.Helper()
		for _, f := range must[[]onceqops.Finding](t)(onceqops.New(db.Queue).Health(t.Context())) {
			if f.What == "group" {
				all = append(all, f)
			}
		}
		return all
	}
	groupWith(t, db, onceq.DeadRun, 3, 1, 0)
	g := groupWith(t, db, onceq.DeadWait, 3, 1, 1)
	require.Empty(t, found(), "others are unfinished, or a dead one does not matter")
	for _, l := range laneClaim(t, db.Queue, 10) {
		if l.Kind == part.Name {
			require.NoError(t, l.Complete(t.Context(), nil))
		}
	}
	require.Len(t, found(), 1)
	f := found()[0]
	require.Equal(t, []any{g.Then.ID, true}, []any{f.JobID, f.Severe})
	require.Contains(t, f.Detail, fmt.Sprintf("1 of them, the first [%d]", g.Members[0].ID))
	require.NoError(t, onceqops.New(db.Queue).Discard(t.Context(), db.Pool, g.Members[0].ID))
	require.Empty(t, found())
}

// The Reaper removes what is known of groups whose waiting job is gone, by pages, and of no others.
func TestReaper_Groups(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	kept := whole
	kept.Keep = time.Hour
	group := func(then onceq.Job) int64 {
		t.Helper()
		g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1), part.Job(2), part.Job(3)}, then)
		require.NoError(t, err)
		return g.Then.ID
	}
	gone := []int64{group(whole.Job("a")), group(whole.Job("b"))}
	stay := group(kept.Job("c"))
	handle := func(context.Context, *onceq.Lease, string) error { return nil }
	db.Drain(part.Handle(func(context.Context, *onceq.Lease, int) error { return nil }), kept.Handle(handle))
	require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, gone[0]))
	require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, gone[1]))
	waits := group(whole.Job("d"))

	r := newReaper(t, db, onceq.ReaperConfig{Batch: 2})
	require.Equal(t, 6, must[onceq.Reaped](t)(r.RunOnce(ctx)).Members)
	require.Zero(t, must[onceq.Reaped](t)(r.RunOnce(ctx)).Members)
	for _, id := range gone {
		require.Empty(t, membersOf(t, db, id))
	}
	for _, id := range []int64{stay, waits} {
		require.Len(t, membersOf(t, db, id), 3)
	}
	require.NoError(t, db.Check())
}
