package onceqcron_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/queuetest"
)

// A process without the application's code asks a worker that has it, whatever the queue of that worker's ticks is.
func TestAsk(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	owner := scheduler(t, db, onceqcron.Config{Owner: "shop", Queue: "ticks of the shop"}, nightly())
	require.NoError(t, owner.Register(ctx))
	tool := scheduler(t, db, onceqcron.Config{})

	_, err := tool.Fire(ctx, nil, "nightly")
	require.ErrorIs(t, err, onceqcron.ErrElsewhere)
	id, err := tool.Ask(ctx, nil, "nightly", onceqcron.AskFire())
	require.NoError(t, err)
	require.Positive(t, id)
	db.Drain(owner.Handlers()...)
	require.Len(t, fired(t, db), 1)
	require.Equal(t, []string{"fired 1"}, outcomes(t, owner, "nightly"))

	end := now(t, db)
	_, err = tool.Ask(ctx, nil, "nightly", onceqcron.AskBackfill(end.Add(-48*time.Hour), end))
	require.NoError(t, err)
	db.Drain(owner.Handlers()...)
	require.Len(t, fired(t, db), 3)

	require.NoError(t, tool.Pause(ctx, nil, "nightly"))
	require.ErrorIs(t, tool.Resume(ctx, nil, "nightly"), onceqcron.ErrElsewhere)
	_, err = tool.Ask(ctx, nil, "nightly", onceqcron.AskResume())
	require.NoError(t, err)
	db.Drain(owner.Handlers()...)
	list, err := tool.List(ctx, nil)
	require.NoError(t, err)
	require.True(t, list[0].Paused.IsZero())
	require.True(t, list[0].Next.After(end))

	// What is impossible is a dead job that says why.
	id, err = tool.Ask(ctx, nil, "nightly", onceqcron.AskBackfill(end, end.Add(48*time.Hour)))
	require.NoError(t, err)
	db.Drain(owner.Handlers()...)
	job, err := db.Queue.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDead, job.State)
	require.Contains(t, job.Errors[0].Error, "is still to come")

	_, err = tool.Ask(ctx, nil, "none", onceqcron.AskFire())
	require.ErrorIs(t, err, onceqcron.ErrNotFound)
	var bad *onceq.InvalidError
	_, err = tool.Ask(ctx, nil, "nightly", onceqcron.Request{})
	require.ErrorAs(t, err, &bad)
	table := nightly()
	table.Name = "in the table"
	require.NoError(t, tool.Put(ctx, nil, table))
	_, err = tool.Ask(ctx, nil, "in the table", onceqcron.AskFire())
	require.ErrorAs(t, err, &bad)
}
