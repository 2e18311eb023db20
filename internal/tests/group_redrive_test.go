package tests

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// A job that is redriven together with those that it waits for waits for them again.
func TestRedriveMany_AGroupWithItsMembers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1), part.Job(2)}, whole.Job("x"))
	require.NoError(t, err)
	_, _, err = onceqops.New(q).CancelGroup(ctx, db.Pool, g.Then.ID)
	require.NoError(t, err)
	n, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{All: true, States: []onceq.State{onceq.StateCancelled}})
	require.NoError(t, err)
	require.Equal(t, []int{3, 0}, []int{n, taken})
	leases := groupClaim(t, q)
	require.Len(t, leases, 2)
	require.NotContains(t, leases, g.Then.ID)
	require.Equal(t, 2, groupOf(t, db, g.Then.ID).Open)
	for _, l := range leases {
		require.NoError(t, l.Complete(ctx, nil))
	}
	require.NoError(t, laneClaimOne(t, q, g.Then.ID).Complete(ctx, nil))
	require.NoError(t, db.Check())
}

// Also if the member dies again before the statement that brings the job back: the rule that has cancelled it cancels it again.
func TestRedriveMany_AMemberThatDiesMeanwhile(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	then := whole.Job("x")
	then.IfDead = onceq.DeadCancel
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, then)
	require.NoError(t, err)
	member := g.Members[0].ID
	refuse := func() {
		t.Helper()
		require.NoError(t, laneClaimOne(t, q, member).Fail(ctx, onceq.Fatal(errors.New("refused"))))
	}
	cancelled := func() {
		t.Helper()
		eventually(t, "cancelled", func() bool {
			require.Empty(t, groupClaim(t, q))
			return groupOf(t, db, g.Then.ID).State == onceq.StateCancelled
		})
	}
	refuse()
	cancelled()
	again := 0
	n, _, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{IDs: []int64{g.Then.ID, member}, States: []onceq.State{onceq.StateDead, onceq.StateCancelled}, Progress: func(int) error {
		if again++; again == 1 {
			refuse()
		}
		return nil
	}})
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Greater(t, again, 1)
	cancelled()
	require.NoError(t, db.Check())
}

// So do those of a chain that is longer than what one statement redrives.
func TestRedriveMany_AChain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	const n = 1100
	chain := make([]onceq.Job, n)
	for i := range chain {
		if chain[i] = part.Job(i); i > 0 {
			chain[i].After = []onceq.JobRef{{Scope: part.Name, Key: fmt.Sprint(i - 1)}}
		}
		chain[i].Key = fmt.Sprint(i)
	}
	results, err := q.EnqueueMany(ctx, db.Pool, chain)
	require.NoError(t, err)
	_, _, err = onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{All: true})
	require.NoError(t, err)
	var tried []int
	redriven, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{All: true, States: []onceq.State{onceq.StateCancelled}, Progress: func(n int) error {
		tried = append(tried, n)
		return nil
	}})
	require.NoError(t, err)
	require.Equal(t, []int{n, 0}, []int{redriven, taken})
	live, waiting := laneLive(t, db)
	require.Equal(t, []int{1, n - 1}, []int{live, waiting})
	require.Equal(t, []int{0, 0, 1, 501, 1001, n}, tried)
	for i := range 3 {
		require.NoError(t, laneClaimOne(t, q, results[i].ID).Complete(ctx, nil))
	}
	require.NoError(t, db.Check())
}

var deadRules = []onceq.DeadRule{onceq.DeadWait, onceq.DeadRun, onceq.DeadCancel}

// ofFollowers are jobs that are enqueued with an After: what they wait for after the others is not what they wait for now.
var ofFollowers = map[string]func() onceq.Job{
	"plain":          func() onceq.Job { return whole.Job("x") },
	"lane":           func() onceq.Job { return charges.Job(charge{1, 1}) },
	"lane and limit": func() onceq.Job { return limitedInLane.Job(charge{1, 1}) },
}

// A group that was cancelled and is redriven is as it was before: a member that dies then means what the job's IfDead says. So it
// is again if that has ended the job and both are redriven.
func TestRedriveMany_AGroupKeepsItsRule(t *testing.T) {
	t.Parallel()
	for _, rule := range deadRules {
		for name, job := range ofFollowers {
			t.Run(rule.String()+", "+name, func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 3)
				db := queuetest.New(t)
				ctx, q := t.Context(), db.Queue
				require.NoError(t, q.SetLimit(ctx, db.Pool, "provider", onceq.Limit{AtOnce: 1}))
				then := job()
				then.IfDead = rule
				g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, then)
				require.NoError(t, err)
				member, id := g.Members[0].ID, g.Then.ID
				waiting := onceq.GroupInfo{ID: id, State: onceq.StateWaiting, Waits: true, IfDead: rule, Total: 1, Open: 1}
				back := func(want int, states ...onceq.State) {
					t.Helper()
					n, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{IDs: []int64{id, member}, States: states})
					require.NoError(t, err)
					require.Equal(t, []int{want, 0}, []int{n, taken})
					require.Equal(t, waiting, groupOf(t, db, id))
					require.NoError(t, db.Check())
				}
				for range 2 { // what came back can be cancelled again
					_, _, err = onceqops.New(q).CancelGroup(ctx, db.Pool, id)
					require.NoError(t, err)
					require.NoError(t, db.Check())
					require.Equal(t, fmt.Sprintf("group %d: 1 of 1 member is finished, 1 cancelled", id), groupOf(t, db, id).String(), "its rule has not ended it")
					back(2, onceq.StateCancelled)
				}
				refuse := func() {
					t.Helper()
					require.NoError(t, laneClaimOne(t, q, member).Fail(ctx, onceq.Fatal(errors.New("refused"))))
					require.NoError(t, db.Check())
				}
				refuse()
				if rule == onceq.DeadRun {
					require.NoError(t, laneClaimOne(t, q, id).Complete(ctx, nil))
					require.NoError(t, db.Check())
					return
				}
				for range 2 {
					require.Empty(t, groupClaim(t, q), "beside the dead member")
					want := onceq.GroupInfo{ID: id, State: onceq.StateWaiting, Waits: true, IfDead: rule, Total: 1, Dead: 1}
					if rule == onceq.DeadCancel {
						want.State, want.Waits = onceq.StateCancelled, false
					}
					require.Equal(t, want, groupOf(t, db, id))
					require.NoError(t, db.Check())
					back(map[onceq.DeadRule]int{onceq.DeadWait: 1, onceq.DeadCancel: 2}[rule], onceq.StateDead, onceq.StateCancelled)
					refuse()
				}
				require.Empty(t, groupClaim(t, q))
				back(map[onceq.DeadRule]int{onceq.DeadWait: 1, onceq.DeadCancel: 2}[rule], onceq.StateDead, onceq.StateCancelled)
				require.NoError(t, laneClaimOne(t, q, member).Complete(ctx, nil))
				require.NoError(t, laneClaimOne(t, q, id).Complete(ctx, nil))
				require.NoError(t, db.Check())
			})
		}
	}
}

// A job that somebody cancelled while it waited for others, and that is redriven alone, waits again as at first, whatever has become
// of the others.
func TestRedrive_AFollowerKeepsItsRule(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	end := map[string]func(t *testing.T, db *queuetest.DB, id int64){
		"completed": func(t *testing.T, db *queuetest.DB, id int64) {
			require.NoError(t, laneClaimOne(t, db.Queue, id).Complete(ctx, nil))
		},
		"dead": func(t *testing.T, db *queuetest.DB, id int64) {
			require.NoError(t, laneClaimOne(t, db.Queue, id).Fail(ctx, onceq.Fatal(errors.New("refused"))))
		},
		"cancelled": func(t *testing.T, db *queuetest.DB, id int64) {
			wantState(t, onceq.StateCancelled)(db.Queue.Cancel(ctx, db.Pool, id))
		},
		"held": func(t *testing.T, db *queuetest.DB, id int64) {
			for range 2 { // the second run finds the effect uncertain
				l := laneClaimOne(t, db.Queue, id)
				_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) { return "", errors.New("no answer") }, onceq.OnUncertain(onceq.Hold()))
				require.NoError(t, l.Fail(ctx, err))
				db.Advance(time.Hour)
			}
		},
	}
	// What a job does by its rule when one of those that it waits for has ended so, and the other has completed.
	const runs, waits, ends = "runs", "waits", "is cancelled"
	want := map[string][]string{
		"completed": {runs, runs, runs},
		"dead":      {waits, runs, ends},
		"cancelled": {runs, runs, ends},
		"held":      {waits, waits, waits},
	}
	for how, end := range end {
		for _, rule := range deadRules {
			for name, job := range ofFollowers {
				for _, late := range []bool{false, true} { // it is cancelled and redriven when the others have ended
					want := want[how][rule]
					if late && want != waits {
						continue // it would not wait any more
					}
					t.Run(fmt.Sprintf("%s, %s, %s, late %t", how, rule, name, late), func(t *testing.T) {
						t.Parallel()
						conformance.Few(t, 4)
						db := queuetest.New(t)
						q := db.Queue
						require.NoError(t, q.SetLimit(ctx, db.Pool, "provider", onceq.Limit{AtOnce: 1}))
						then := job()
						then.IfDead = rule
						second := part.Job(2)
						second.Queue = "other"
						g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1), second}, then)
						require.NoError(t, err)
						one, other, id := g.Members[0].ID, g.Members[1].ID, g.Then.ID
						again := func() {
							t.Helper()
							wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
							require.NoError(t, db.Check())
							wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
							require.NoError(t, db.Check())
							info := groupOf(t, db, id)
							require.True(t, info.Waits)
							require.Equal(t, rule, info.IfDead)
							explained(t, db, id, onceqops.CauseAfter, onceqops.CauseNoWorker)
						}
						end(t, db, one)
						require.Equal(t, how, membersOf(t, db, id)[one].State.String())
						if !late {
							again()
						}
						require.Empty(t, groupClaim(t, q))
						leases, err := q.Claim(ctx, onceq.ClaimOptions{Queue: "other"})
						require.NoError(t, err)
						require.Equal(t, other, leases[0].ID)
						require.NoError(t, leases[0].Complete(ctx, nil))
						if late {
							require.Empty(t, groupClaim(t, q))
							again()
						}
						switch want {
						case runs:
							require.NoError(t, laneClaimOne(t, q, id).Complete(ctx, nil))
						case waits:
							require.Empty(t, groupClaim(t, q))
							require.True(t, groupOf(t, db, id).Waits)
							require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, one))
							if rule == onceq.DeadCancel { // what was discarded counts as cancelled
								require.Empty(t, groupClaim(t, q))
								break
							}
							require.NoError(t, laneClaimOne(t, q, id).Complete(ctx, nil))
						case ends:
							require.Empty(t, groupClaim(t, q))
							info := groupOf(t, db, id)
							require.Equal(t, []any{onceq.StateCancelled, onceq.DeadCancel}, []any{info.State, info.IfDead})
							require.Contains(t, explained(t, db, id, onceqops.CauseCancelled)[0].Text, "(DeadCancel)")
							// Its rule has had its say. Who redrives it now, and nothing else, wants it to run.
							wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
							require.NoError(t, db.Check())
							require.NoError(t, laneClaimOne(t, q, id).Complete(ctx, nil))
						}
						require.NoError(t, db.Check())
					})
				}
			}
		}
	}
}

// A job that went on has done its waiting: redriven, it waits for what is unfinished, and for no dead one.
func TestRedrive_AFollowerThatHasRun(t *testing.T) {
	t.Parallel()
	for _, rule := range deadRules {
		t.Run(rule.String(), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			then := whole.Job("x")
			then.IfDead = rule
			g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, then)
			require.NoError(t, err)
			member, id := g.Members[0].ID, g.Then.ID
			require.NoError(t, laneClaimOne(t, q, member).Complete(ctx, nil))
			require.NoError(t, laneClaimOne(t, q, id).Fail(ctx, onceq.Fatal(errors.New("no"))))
			sqlRun(t, db, `update onceq.job_members set state = $1`, onceq.StateDead) // a completed one cannot die: this stands for one that was cancelled, came back and died
			wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
			require.NoError(t, laneClaimOne(t, q, id).Complete(ctx, nil))
			require.NoError(t, db.Check())
		})
	}
}

// Redrive undoes the Cancel of a job whose time is still to come: the job does not start before.
func TestRedrive_BeforeItsTime(t *testing.T) {
	t.Parallel()
	for name, job := range map[string]onceq.Job{
		"plain":           part.Job(1),
		"lane":            charges.Job(charge{1, 1}),
		"limit":           limitedAlone.Job(charge{1, 1}),
		"lane and limit":  limitedInLane.Job(charge{1, 1}),
		"waits for a job": whole.Job("x"),
	} {
		for _, many := range []bool{false, true} {
			t.Run(fmt.Sprint(name, many), func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 3)
				db := queuetest.New(t)
				ctx, q := t.Context(), db.Queue
				job := job
				job.Delay = time.Hour
				var first int64
				if job.Kind == whole.Name {
					first = add(t, db, part.Job(2))
					job.After = []onceq.JobRef{{ID: first}}
				}
				id := add(t, db, job)
				before := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
				wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
				if many {
					n, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{All: true, States: []onceq.State{onceq.StateCancelled}})
					require.NoError(t, err)
					require.Equal(t, []int{1, 0}, []int{n, taken})
				} else {
					wantState(t, onceq.StateDelayed)(onceqops.New(q).Redrive(ctx, db.Pool, id))
				}
				i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
				require.Equal(t, onceq.StateDelayed, i.State)
				require.True(t, i.RunAt.Equal(before.RunAt))
				if first != 0 {
					require.NoError(t, laneClaimOne(t, q, first).Complete(ctx, nil))
				}
				require.Empty(t, laneClaim(t, q, 10))
				require.NoError(t, db.Check())
				db.Advance(time.Hour)
				require.NoError(t, laneClaimOne(t, q, id).Complete(ctx, nil))
				require.NoError(t, db.Check())
			})
		}
	}

	// One that has missed its time starts at once, and so does one that waits for its next attempt.
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	job := part.Job(1)
	job.Delay = time.Hour
	id := add(t, db, job)
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
	db.Advance(time.Hour)
	wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
	require.NoError(t, laneClaimOne(t, q, id).Fail(ctx, onceq.RetryAfter(time.Hour, errors.New("later"))))
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
	wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
	laneClaimOne(t, q, id)
	require.NoError(t, db.Check())
}
