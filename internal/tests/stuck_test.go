package tests

import (
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func TestHealth_AStuckGroupBehindAHundredOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	for range 100 {
		later := part.Job(1)
		later.Queue = "later"
		_, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{later}, whole.Job("x"))
		require.NoError(t, err)
	}
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, whole.Job("x"))
	require.NoError(t, err)
	require.NoError(t, laneClaimOne(t, q, g.Members[0].ID).Fail(ctx, onceq.Fatal(errors.New("no"))))
	require.Equal(t, 1, groupOf(t, db, g.Then.ID).Dead)
	health, err := onceqops.New(q).Health(ctx)
	require.NoError(t, err)
	for _, f := range health {
		t.Logf("%s: %s", f.What, f.Detail)
	}
	require.True(t, slices.ContainsFunc(health, func(f onceqops.Finding) bool { return f.What == "group" && f.JobID == g.Then.ID }))
}
