package tests

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// A member that has lost leases runs alone, and waits for that in quarantine; the group waits too. When it has lost too many it is
// dead, and each rule treats it as one that died in its handler.
func TestGroup_AMemberInQuarantine(t *testing.T) {
	t.Parallel()
	for _, rule := range []onceq.DeadRule{onceq.DeadWait, onceq.DeadRun, onceq.DeadCancel} {
		for _, recovers := range []bool{true, false} {
			t.Run(rule.String()+map[bool]string{true: ", recovers", false: ", dies"}[recovers], func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 2)
				db := queuetest.New(t)
				ctx, q := t.Context(), db.Queue
				then := whole.Job("x")
				then.IfDead = rule
				g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1), part.Job(2)}, then)
				require.NoError(t, err)
				bad := g.Members[0].ID
				require.NoError(t, groupClaim(t, q)[g.Members[1].ID].Complete(ctx, nil))
				db.ExpireLease(bad) // its process is gone
				for lost := 1; lost < onceq.DefaultMaxLost-1 || !recovers && lost < onceq.DefaultMaxLost; lost++ {
					laneClaimOne(t, q, bad)
					db.ExpireLease(bad)
				}
				require.NoError(t, db.Check())
				require.Equal(t, 1, groupOf(t, db, g.Then.ID).Open)
				ran := 0
				wholes := whole.Handle(func(context.Context, *onceq.Lease, string) error { ran++; return nil })
				db.Drain(part.Handle(func(context.Context, *onceq.Lease, int) error { return nil }), wholes)
				require.NoError(t, db.Check())
				want := onceq.GroupInfo{ID: g.Then.ID, State: onceq.StateCompleted, Total: 2, Completed: 2}
				if !recovers {
					want.Completed, want.Dead = 1, 1
					want.Waits = rule == onceq.DeadWait
					want.State = map[onceq.DeadRule]onceq.State{onceq.DeadWait: onceq.StateWaiting, onceq.DeadRun: onceq.StateCompleted, onceq.DeadCancel: onceq.StateCancelled}[rule]
					if rule == onceq.DeadCancel {
						want.IfDead = rule
					}
				}
				require.Equal(t, want, groupOf(t, db, g.Then.ID))
				require.Equal(t, want.State == onceq.StateCompleted, ran == 1)
			})
		}
	}
}

// A job that waits for one that is held for a person goes on when that person has resolved its effect and it has ended.
func TestGroup_AHeldMemberThatIsResolved(t *testing.T) {
	t.Parallel()
	for _, rule := range []onceq.DeadRule{onceq.DeadWait, onceq.DeadRun, onceq.DeadCancel} {
		t.Run(rule.String(), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			then := whole.Job("x")
			then.IfDead = rule
			g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, then)
			require.NoError(t, err)
			held := g.Members[0].ID
			ran := 0
			handlers := []onceq.Handler{
				part.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
					receipt, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) {
						return "", errors.New("no answer")
					}, onceq.OnUncertain(onceq.Hold()))
					if err != nil {
						return err
					}
					return l.SetResult(receipt)
				}),
				whole.Handle(func(context.Context, *onceq.Lease, string) error { ran++; return nil }),
			}
			for range 2 { // the second run finds the effect uncertain
				db.Drain(handlers...)
				db.Advance(time.Hour)
			}
			require.Equal(t, onceq.StateHeld, membersOf(t, db, g.Then.ID)[held].State)
			require.Equal(t, 1, groupOf(t, db, g.Then.ID).Held)
			require.Zero(t, ran)
			require.NoError(t, db.Check())
			require.NoError(t, onceqops.New(q).Resolve(ctx, db.Pool, held, "charge", onceq.Applied("ch_1")))
			require.NoError(t, db.Check())
			require.Equal(t, 1, groupOf(t, db, g.Then.ID).Open)
			db.Drain(handlers...)
			require.Equal(t, 1, ran)
			require.Equal(t, onceq.Member{ID: held, State: onceq.StateCompleted, Result: json.RawMessage(`"ch_1"`)}, membersOf(t, db, g.Then.ID)[held])
			require.NoError(t, db.Check())
		})
	}
}

// Of a job that a worker had when somebody began to wait for it, nobody tells the end: the result is lost unless the job is
// kept. One that died and was discarded before a promoter looked counts as cancelled, like any other.
func TestAfter_WhatIsNotToldOfARunningJob(t *testing.T) {
	t.Parallel()
	follow := func(t *testing.T, db *queuetest.DB, first int64) int64 {
		then := whole.Job("x")
		then.After, then.IfDead = []onceq.JobRef{{ID: first}}, onceq.DeadCancel
		return add(t, db, then)
	}
	ran := func(t *testing.T, db *queuetest.DB, id, first int64, result json.RawMessage) {
		require.NoError(t, laneClaimOne(t, db.Queue, id).Complete(t.Context(), nil))
		require.Equal(t, onceq.Member{ID: first, State: onceq.StateCompleted, Result: result}, membersOf(t, db, id)[first])
		require.NoError(t, db.Check())
	}
	kept := part
	kept.Keep = time.Hour
	for name, test := range map[string]struct {
		kind   onceq.Kind[int]
		result json.RawMessage
	}{"not kept": {part, nil}, "kept": {kept, json.RawMessage(`7`)}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			first := add(t, db, part.Job(1))
			var id int64
			db.Drain(test.kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
				id = follow(t, db, first)
				return l.SetResult(7)
			}))
			ran(t, db, id, first, test.result)
		})
	}
	t.Run("dead and discarded", func(t *testing.T) {
		t.Parallel()
		db := queuetest.New(t)
		first := add(t, db, part.Job(1))
		l := laneClaimOne(t, db.Queue, first)
		id := follow(t, db, first)
		require.NoError(t, l.Fail(t.Context(), onceq.Fatal(errors.New("no"))))
		require.NoError(t, onceqops.New(db.Queue).Discard(t.Context(), db.Pool, first))
		require.Empty(t, laneClaim(t, db.Queue, 1))
		require.Equal(t, onceq.Member{ID: first, State: onceq.StateCancelled}, membersOf(t, db, id)[first])
		require.Equal(t, onceq.StateCancelled, groupOf(t, db, id).State)
		require.NoError(t, db.Check())
	})
}
