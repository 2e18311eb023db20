package tests

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// Jobs of a lane or a limit that are due are counted, and named by Health, also behind a thousand delayed ones of a higher priority.
func TestLimits_DueJobsBehindDelayedOnes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	for _, j := range []onceq.Job{{Kind: "k", Payload: 1, Limit: "provider"}, {Kind: "k", Payload: 1, Lane: "a"}} {
		live := add(t, db, j)
		later := j
		later.Priority, later.Delay = onceq.PriorityHigh, 24*time.Hour
		many := make([]onceq.Job, onceqops.StatsCap)
		for i := range many {
			many[i] = later
		}
		_, err := q.EnqueueMany(ctx, db.Pool, many)
		require.NoError(t, err)
		laneClaimOne(t, q, live)
		for range 5 {
			add(t, db, j)
		}
	}
	db.Advance(time.Hour)
	limit, err := onceqops.New(q).Limit(ctx, db.Pool, "provider")
	require.NoError(t, err)
	t.Logf("%s: waiting %d, delayed %d, oldest %s", limit, limit.Waiting, limit.Delayed, limit.Oldest)
	lanes, err := onceqops.New(q).Lanes(ctx, db.Pool, onceqops.LaneFilter{})
	require.NoError(t, err)
	require.Len(t, lanes, 1)
	t.Logf("%s: waiting %d, delayed %d, oldest %s", lanes[0], lanes[0].Waiting, lanes[0].Delayed, lanes[0].Oldest)
	health, err := onceqops.New(q).Health(ctx)
	require.NoError(t, err)
	unset := false
	for _, f := range health {
		t.Logf("%s: %s", f.What, f.Detail)
		unset = unset || f.What == "limit"
	}
	require.Equal(t, 5, limit.Waiting)
	require.Equal(t, 5, lanes[0].Waiting)
	require.Greater(t, limit.Oldest, 59*time.Minute)
	require.True(t, unset)
}
