package main

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// Limits are set, listed with the jobs that wait for them, and removed.
func TestLimits(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	call := onceq.Kind[int]{Name: "call", Limit: func(int) string { return "provider" }}
	require.Equal(t, "No limit is set, and no job waits for one.\n", fine(t, db.URL, "limits", "list"))
	const unused = " No job has limit \"provider\" now: is that its name?\n"
	require.Equal(t, "The limit is 20 at once, 10 in 1s, in bursts of 2 now; it was 1 at once."+unused,
		fine(t, db.URL, "limits", "set", "provider", "--at-once", "20", "--rate", "10", "--why", "they said so"))
	require.Regexp(t, `NEXT SLOT\nprovider +20 at once, 10 in 1s, in bursts of 2 .* \d{4}-\d\d-\d\d`, fine(t, db.URL, "limits", "list"))
	require.Equal(t, "The limit is 0 at once now; it was 20 at once, 10 in 1s, in bursts of 2.\n", fine(t, db.URL, "limits", "set", "provider", "--at-once", "0"))
	unsaid := do(t, db.URL, "limits", "set", "provider")
	require.Equal(t, codeUsage, unsaid.code)
	require.Contains(t, unsaid.err, "--at-once 0 lets no more jobs start")
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, call.Job(1))
	require.NoError(t, err)
	require.Regexp(t, `provider +0 at once +0 +1 `, fine(t, db.URL, "limits", "list"))
	page := asJSON(t, db.URL, "limits", "list")
	require.EqualValues(t, 1, page["limits"].([]any)[0].(map[string]any)["waiting"])
	require.Equal(t, "The limit is 1 at once now; it was 0 at once.\n", fine(t, db.URL, "limits", "remove", "provider"))
	require.Regexp(t, `provider +1 at once \(not set itself\) +0 +1 .* -\n`, fine(t, db.URL, "limits", "list"))

	// There is nothing to remove: a limit that nobody has set, a name that is spelt wrong, one whose family alone is set.
	lines := fine(t, db.URL, "actions")
	require.Equal(t, "Nobody has set limit \"provider\". Nothing was changed: it is 1 at once.\n", fine(t, db.URL, "limits", "remove", "provider"))
	require.Equal(t, "Nobody has set limit \"provdier/\". Nothing was changed: it is 1 at once.\n", fine(t, db.URL, "limits", "remove", "provdier/"))
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "smtp/", onceq.Limit{AtOnce: 3}))
	require.Equal(t, "Nobody has set limit \"smtp/a\". Nothing was changed: it is 3 at once.\n", fine(t, db.URL, "limits", "remove", "smtp/a"))
	require.Equal(t, false, asJSON(t, db.URL, "limits", "remove", "smtp/a")["set"])
	require.Equal(t, lines, fine(t, db.URL, "actions"))
	require.Equal(t, "The limit is 1 at once now; it was 3 at once.\n", fine(t, db.URL, "limits", "remove", "smtp/"))
	require.NotEqual(t, lines, fine(t, db.URL, "actions"))
	require.Contains(t, fine(t, db.URL, "limits", "set", "any", "--max", "10", "--per", "1m"),
		"The limit is at most 10 in any 1m0s now; it was 1 at once.")
	require.Contains(t, fine(t, db.URL, "limits", "list"), "at most 10 in any 1m0s")
	require.Contains(t, do(t, db.URL, "limits", "set", "any", "--max", "10", "--rate", "8").err, "set Max, or Rate and Burst")
}

// A job that waits says for what: for its lane, its limit, or other jobs.
func TestJobsThatWait(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	both := onceq.Kind[int]{Name: "both", Queue: "calls", Lane: func(int) string { return "a" }, Limit: func(int) string { return "provider" }}
	call := onceq.Kind[int]{Name: "call", Queue: "calls", Limit: func(int) string { return "provider" }}
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "provider", onceq.Limit{}))
	add := func(job onceq.Job) int64 {
		r, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
		require.NoError(t, err)
		return r.ID
	}
	limited := add(call.Job(0))
	first, second := add(both.Job(1)), add(both.Job(2))
	after := call.Job(3)
	after.After = []onceq.JobRef{{ID: limited}}
	last := add(after)
	db.Drain(call.Handle(nothing), both.Handle(nothing)) // lets the lane's first job go on to its limit

	list := fine(t, db.URL, "jobs", "list")
	for _, c := range []struct {
		id                   int64
		waits, in, show, not string
	}{
		{limited, "limit", "waits for limit provider, due ", `\nlimit +provider, for which it waits\n`, `(?m)^(lane|after) `},
		{first, "limit", "waits for limit provider, due ", `\nlane +both/a\nlimit +provider, for which it waits\n`, `(?m)^after `},
		{second, "lane", "in lane both/a, due ", `\nlane +both/a, for which it waits\nlimit +provider\n`, `(?m)^after `},
		{last, "jobs", "waits for others, due ", fmt.Sprintf(`\nlimit +provider\nafter +others, for which it waits; onceq groups show %d\n`, last), `(?m)^lane `},
	} {
		require.Regexp(t, fmt.Sprintf(`(?m)^ *%d .* %s`, c.id, c.in), list)
		id := fmt.Sprint(c.id)
		require.Regexp(t, c.show, fine(t, db.URL, "jobs", "show", id))
		require.NotRegexp(t, c.not, fine(t, db.URL, "jobs", "show", id))
		require.Equal(t, c.waits, asJSON(t, db.URL, "jobs", "show", id)["waits_for"])
	}
}

func nothing(context.Context, *onceq.Lease, int) error { return nil }
