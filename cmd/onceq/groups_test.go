package main

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// A group with a dead member: doctor names it, groups show says which one, a redrive of the group's dead ones lets it go on, and
// another group is cancelled.
func TestGroups(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	scan := onceq.Kind[int]{Name: "scan"}
	report := onceq.Kind[string]{Name: "report"}
	add := func(name string) string {
		t.Helper()
		g, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, []onceq.Job{scan.Job(1), scan.Job(2), scan.Job(3)}, report.Job(name))
		require.NoError(t, err)
		return fmt.Sprint(g.Then.ID)
	}
	drain := func(broken bool) {
		db.Drain(scan.Handle(func(_ context.Context, l *onceq.Lease, n int) error {
			if n == 2 && broken {
				return onceq.Fatal(errors.New("the page is torn"))
			}
			return l.SetResult(n)
		}), report.Handle(func(context.Context, *onceq.Lease, string) error { return nil }))
	}
	require.Equal(t, "No job waits for others.\n", fine(t, db.URL, "groups", "list"))
	id := add("may")
	require.Contains(t, fine(t, db.URL, "groups", "list"), "wait     goes on")
	drain(true)
	require.Contains(t, fine(t, db.URL, "groups", "list"), "waits for dead or held members")
	list := asJSON(t, db.URL, "groups", "list", "--limit", "1")
	require.Equal(t, id, fmt.Sprint(list["next"]))
	one := list["groups"].([]any)[0].(map[string]any)
	require.Equal(t, []any{3.0, 0.0, 2.0, 1.0, "wait"}, []any{one["total"], one["open"], one["completed"], one["dead"], one["if_dead"]})
	require.Equal(t, "No job waits for others.\n", fine(t, db.URL, "groups", "list", "--after", id))
	shown := fine(t, db.URL, "groups", "show", id)
	require.Contains(t, shown, "Group "+id+": 3 of 3 members are finished, 1 dead, and so job "+id+" waits until that is redriven, resolved or discarded (DeadWait). 0 open. Job "+id+" waits; if one is dead: wait.")
	require.Contains(t, shown, "the page is torn")
	require.Regexp(t, `\d+  completed +1\n`, shown)
	require.Regexp(t, `Members:(.|\n)*\d+  dead       scan  the page is torn\n`, shown)
	page := asJSON(t, db.URL, "groups", "show", id, "--limit", "2")
	require.Len(t, page["members"], 2)
	require.Len(t, page["dead_or_held"], 1)
	require.Len(t, asJSON(t, db.URL, "groups", "show", id, "--after", fmt.Sprint(page["next"]))["members"], 1)
	a := do(t, db.URL, "doctor")
	require.Equal(t, codeFindings, a.code)
	require.Contains(t, a.out, "bad      group: job "+id+" waits for dead or held jobs")
	require.Contains(t, a.out, "onceq jobs redrive --group "+id)
	require.Contains(t, fine(t, db.URL, "jobs", "explain", id), "all 3 jobs that it waits for are finished; 1 dead")
	require.Contains(t, fine(t, db.URL, "jobs", "list", "--kind", "report"), "waits for others, due ")
	dead := fmt.Sprint(page["dead_or_held"].([]any)[0].(map[string]any)["id"])
	require.Contains(t, fine(t, db.URL, "jobs", "show", dead), "member      of group "+id)
	require.Contains(t, fine(t, db.URL, "jobs", "redrive", "--group", id, "--yes"), "1 job run again.")
	drain(false)
	require.Equal(t, "No job waits for others.\n", fine(t, db.URL, "groups", "list"))

	id = add("june")
	require.Equal(t, codeRefused, do(t, db.URL, "groups", "cancel", id).code)
	require.Equal(t, map[string]any{"open": 3.0, "dry_run": true}, asJSON(t, db.URL, "groups", "cancel", id, "--dry-run"))
	require.Contains(t, fine(t, db.URL, "groups", "cancel", id, "--yes", "--why", "nobody wants it"), "4 jobs cancelled. 0 running jobs told to stop.")
	require.Contains(t, fine(t, db.URL, "actions"), "nobody wants it")
	require.Contains(t, fine(t, db.URL, "groups", "show", id), "3 cancelled. 0 open. Job "+id+" is cancelled.")
	require.Equal(t, codeNotFound, do(t, db.URL, "groups", "show", "999999").code)
	require.Equal(t, codeUsage, do(t, db.URL, "groups", "show", "x").code)
	require.Equal(t, codeUsage, do(t, db.URL, "groups", "list", "--limit", "0").code)
}
