package main

import (
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
	require.Equal(t, "The limit is 20 at once, 10 in 1s, in bursts of 2 now; it was 1 at once.\n",
		fine(t, db.URL, "limits", "set", "provider", "--at-once", "20", "--rate", "10", "--why", "they said so"))
	require.Equal(t, "The limit is none at all now; it was 20 at once, 10 in 1s, in bursts of 2.\n", fine(t, db.URL, "limits", "set", "provider"))
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, call.Job(1))
	require.NoError(t, err)
	require.Regexp(t, `provider +none at all +0 +1 `, fine(t, db.URL, "limits", "list"))
	page := asJSON(t, db.URL, "limits", "list")
	require.EqualValues(t, 1, page["limits"].([]any)[0].(map[string]any)["waiting"])
	require.Equal(t, "The limit is 1 at once now; it was none at all.\n", fine(t, db.URL, "limits", "remove", "provider"))
}
