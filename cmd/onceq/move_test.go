package main

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// Jobs in a queue whose name is spelt wrong go where somebody works them.
func TestMove(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	var first int64
	for n := range 3 {
		r, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "resize", Queue: "imagse", Payload: n})
		require.NoError(t, err)
		if n == 0 {
			first = r.ID
		}
	}
	a := do(t, db.URL, "jobs", "move", "--queue", "imagse")
	require.Equal(t, codeUsage, a.code)
	require.Contains(t, a.err, "to which queue?")
	a = do(t, db.URL, "jobs", "move", "--queue", "imagse", "--to", "images")
	require.Equal(t, codeRefused, a.code, "there is no terminal to ask on")
	require.Contains(t, a.err, `Move 3 jobs: waiting or delayed or retrying, queue "imagse". They go to queue "images", WHICH NO WORKER SERVES NOW`)
	require.Contains(t, a.err, fmt.Sprintf("%d waiting resize in queue imagse", first))
	require.Equal(t, fmt.Sprintf("job %d: moved to queue \"images\"\n", first), fine(t, db.URL, "jobs", "move", fmt.Sprint(first), "--to", "images"))
	require.Contains(t, fine(t, db.URL, "jobs", "move", fmt.Sprint(first), "--to", "images"), "already")
	require.Equal(t, "2 jobs moved to queue \"images\".\n", fine(t, db.URL, "jobs", "move", "--queue", "imagse", "--to", "images", "--yes", "--why", "misspelt"))
	require.EqualValues(t, 0, asJSON(t, db.URL, "jobs", "move", "--queue", "imagse", "--to", "images", "--yes")["matched"])
	require.Contains(t, fine(t, db.URL, "actions"), "misspelt")

	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "images", Limit: 1})
	require.NoError(t, err)
	a = do(t, db.URL, "jobs", "move", fmt.Sprint(leases[0].ID), "--to", "imagse")
	require.Equal(t, codeRefused, a.code)
	require.Contains(t, a.err, "is with a worker")
	require.Equal(t, codeNotFound, do(t, db.URL, "jobs", "move", "999", "--to", "imagse").code)
	require.Equal(t, codeUsage, do(t, db.URL, "jobs", "move", "999", "--to", " ").code)
}
