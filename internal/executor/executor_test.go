package executor

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/paused"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/slot"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/task"
	"github.com/onceq/onceq/internal/watch"
)

// keeps is a Face that keeps outcomes.
type keeps struct {
	Face
	mu  sync.Mutex
	all []finish.Outcome
}

func (k *keeps) Finish(_ context.Context, _ pg.DB, _ pg.Way, outcomes []finish.Outcome) (stale []*hold.Hold,
	left []finish.Outcome, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all = append(k.all, outcomes...)
	return nil, nil, nil
}

func executorFor(t *testing.T, face Face, slots int, call func(context.Context, pgx.Tx, []*hold.Hold) error) *Executor {
	known := paused.New()
	known.Latest.Store(&paused.Set{At: time.Now().Add(time.Hour)})
	return New(t.Context(), Config{
		Face: face, Store: pg.New(nil, "onceq", nil, nil), Troubles: new(watch.Troubles), Paused: known,
		Far: new(slot.Distance), Own: new(pg.Conns), Lease: time.Minute,
		Handlers: map[string]*task.Handler{"k": {Kind: "k", MaxLost: 5, Size: 1, Call: call}},
		Queues:   []Queue{{Name: "mail", Count: slots}},
	}, task.Config{})
}

// A claim that was under way when the run ended may still bring jobs. They are given back, and no handler runs.
func TestExecutor_GivesBackWhatComesWhenItStops(t *testing.T) {
	t.Parallel()
	given := new(keeps)
	x := executorFor(t, given, 1, func(context.Context, pgx.Tx, []*hold.Hold) error { t.Error("a handler runs"); return nil })
	x.slots["mail"].Signal = func() {}
	x.outbox.Start()
	x.Stop()
	x.Accept("mail", []*hold.Hold{{ID: 1, Kind: "k"}}, time.Now())
	x.Wait()
	x.outbox.Close()
	require.Len(t, given.all, 1)
	require.Equal(t, table.StateWaiting, given.all[0].State)
	require.False(t, given.all[0].Spend)
}

// What a promoter lets in gets a slot if another one is free for a claim.
func TestExecutor_FirstLeavesASlot(t *testing.T) {
	t.Parallel()
	x := executorFor(t, nil, 2, nil)
	n := x.First("mail")
	require.NotNil(t, n)
	queue, _, _, _ := n.Asks()
	require.Equal(t, "mail", queue)
	require.True(t, x.First("mail") == nil, "the other slot is for a claim")
	require.True(t, x.First("another") == nil)
}
