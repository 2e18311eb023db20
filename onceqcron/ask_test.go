package onceqcron_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
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

// The queue of the jobs that tick is the owner's, whoever lets a schedule go on, and follows Config.Queue when that changes.
func TestQueue_IsTheOwners(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	queues := func() (queues []string) {
		t.Helper()
		require.NoError(t, db.Pool.QueryRow(ctx, `select array(select queue from `+db.Schema+`.jobs where kind like 'onceqcron%' order by 1)`).Scan(&queues))
		return queues
	}
	owner := scheduler(t, db, onceqcron.Config{Owner: "shop", Queue: "ticks"})
	table := nightly()
	require.NoError(t, owner.Put(ctx, nil, table))
	require.Equal(t, []string{"ticks"}, queues())

	tool := scheduler(t, db, onceqcron.Config{Owner: "shop"})
	require.NoError(t, tool.Pause(ctx, nil, table.Name))
	_, _, err := onceqops.New(db.Queue).CancelMany(ctx, db.Pool, onceqops.Filter{Queue: "ticks"}) // or the job has seen the pause, and ended
	require.NoError(t, err)
	require.NoError(t, tool.Resume(ctx, nil, table.Name))
	require.Equal(t, []string{"ticks"}, queues())

	require.NoError(t, tool.Put(ctx, nil, table)) // now as the owner's code after a deploy
	require.Equal(t, []string{"onceqcron"}, queues())
	require.NoError(t, tool.Put(ctx, nil, table))
	require.Equal(t, []string{"onceqcron"}, queues())

	code := scheduler(t, db, onceqcron.Config{Owner: "web", Queue: "a"}, func() onceqcron.Schedule { s := nightly(); s.Name = "of the code"; return s }())
	require.NoError(t, code.Register(ctx))
	require.Equal(t, []string{"a", "onceqcron"}, queues())
	code = scheduler(t, db, onceqcron.Config{Owner: "web", Queue: "b"}, func() onceqcron.Schedule { s := nightly(); s.Name = "of the code"; return s }())
	require.NoError(t, code.Register(ctx))
	require.Equal(t, []string{"b", "onceqcron"}, queues())

	// One that runs meanwhile moves when it has.
	running, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "b"})
	require.NoError(t, err)
	if len(running) == 0 {
		_, err = db.Pool.Exec(ctx, `update `+db.Schema+`.jobs set run_at = statement_timestamp() where queue = 'b'`)
		require.NoError(t, err)
		running, err = db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "b"})
		require.NoError(t, err)
	}
	require.Len(t, running, 1)
	deployed := scheduler(t, db, onceqcron.Config{Owner: "web", Queue: "c"}, func() onceqcron.Schedule { s := nightly(); s.Name = "of the code"; return s }())
	require.NoError(t, deployed.Register(ctx))
	require.Equal(t, []string{"b", "onceqcron"}, queues())
	require.NoError(t, running[0].Release(ctx))
	db.Drain(code.Handlers()...)
	db.Drain(deployed.Handlers()...)
	require.Equal(t, []string{"c", "onceqcron"}, queues())
}
