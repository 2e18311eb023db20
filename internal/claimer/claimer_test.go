package claimer

import (
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/paused"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/plan"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/watch"
)

// nobody claims, runs and promotes nothing.
type nobody struct {
	Worker
	Promoter
	roused *int
}

func (nobody) GiveBack(string, func(string, time.Time) bool) (some, anyWait bool) { return }
func (nobody) Expects() bool                                                      { return false }
func (n nobody) Rouse(string)                                                     { *n.roused++ }

func newTest(queues ...string) *Claimer {
	var all []*Slots
	for _, name := range queues {
		all = append(all, &Slots{Queue: name, Count: 100, Width: 1})
	}
	c := New(Config{
		Config: plan.Config{Kinds: []string{"k"}, Lease: time.Minute},
		Store:  new(pg.Store), Troubles: &watch.Troubles{Log: slog.Default()}, Log: slog.Default(), Paused: paused.New(),
		Turn: new(quarantine.Turn), Worker: nobody{}, ID: 1,
	}, all, nil)
	c.Promoter = nobody{roused: new(int)}
	return c
}

func TestMoreOf(t *testing.T) {
	t.Parallel()
	for payload, want := range map[string]struct {
		queue string
		looks time.Duration
	}{
		"default":                          {},
		"":                                 {},
		"\x1f15\x1fdefault":                {"default", 15 * time.Millisecond},
		"\x1f100\x1fdefault":               {"default", 100 * time.Millisecond},
		"\x1f100\x1f\x1f15\x1fa":           {"\x1f15\x1fa", 100 * time.Millisecond},
		"\x1f100\x1f":                      {"", 100 * time.Millisecond},
		"\x1fdefault":                      {},
		"\x1f\x1fdefault":                  {},
		"\x1f-1\x1fdefault":                {},
		"\x1f0\x1fdefault":                 {"default", 0},
		"\x1f99999999999999999999\x1fsome": {},
	} {
		queue, looks := MoreOf(payload)
		require.Equal(t, want.queue, queue, "%q", payload)
		require.Equal(t, want.looks, looks, "%q", payload)
	}
}

// What the claimer's goroutine has not heard yet counts: a notification says that a queue is no longer announced.
func TestClaimer_TellsNobodyThatItWaitsForAQueueThatWasNotified(t *testing.T) {
	t.Parallel()
	c := newTest("a", "b")
	roused := c.Promoter.(nobody).roused
	c.tell(true)
	require.True(t, c.Listener.Waits.Load())
	c.Heard("a", false)
	c.tell(true)
	require.True(t, c.Listener.Waits.Load(), "this used up no announcement")
	c.Heard("a", true)
	c.tell(true)
	require.False(t, c.Listener.Waits.Load())
	c.hear(time.Now())
	c.tell(true)
	require.True(t, c.Listener.Waits.Load())
	require.Zero(t, *roused)
	c.tell(false)
	c.tell(false)
	require.False(t, c.Listener.Waits.Load())
	require.Equal(t, 1, *roused, "from now on nobody wakes the promoter for calls")
}

// A job in quarantine whose slot has come is claimed when no other claim is under way.
func TestClaimer_SuspendedUntilItsSlot(t *testing.T) {
	t.Parallel()
	c := newTest("a")
	c.Suspended("a", quarantine.Job{ID: 8, Lost: 1}, time.Now())
	<-c.wake
	require.False(t, c.plan.Queue("a").HasMore())
	c.hear(time.Now())
	require.True(t, c.plan.Queue("a").HasMore())
	require.Empty(t, c.came)
}

// An executor that frees the last place that a claim wants between the decision and the wish for a signal is not missed.
func TestClaimer_AsksForASignalWithoutRoom(t *testing.T) {
	t.Parallel()
	c := newTest("a")
	s, q := c.slots[0], c.plan.Queue("a")
	s.Outstanding.Store(100)
	require.False(t, c.Want(q, false, time.Now()).Now)
	require.Empty(t, c.wake)
	s.Left(1)
	<-c.wake
	require.True(t, c.Want(q, false, time.Now()).Now)
	s.Left(1)
	require.Empty(t, c.wake, "nobody waits for room")
}

// What the plan says of the end of a queue the executor sees.
func TestClaimer_SaysThatAQueueIsEmpty(t *testing.T) {
	t.Parallel()
	c := newTest("a")
	s := c.slots[0]
	require.False(t, s.FoundEnd())
	s.setEmpty(time.Now().Add(time.Hour))
	require.True(t, s.FoundEnd())
	s.setEmpty(time.Now().Add(-time.Hour))
	require.False(t, s.FoundEnd(), "that was long ago")
	s.setEmpty(time.Now().Add(time.Hour))
	s.setEmpty(time.Time{})
	require.False(t, s.FoundEnd())
}

// A completion that wants a place for the next job of its lane does not make its queue one that waits for connections: nobody
// asks again for it, and the other queues would stay narrowed.
func TestConnections_AReservedPlaceNarrowsNoOtherQueue(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none?pool_max_conns=8")
	require.NoError(t, err)
	defer pool.Close()
	c := &pg.Shares{Pool: pool}
	queue := func() *Slots {
		return &Slots{Count: 6, Width: 1, Pooled: true, Conns: 6, Signal: func() {}}
	}
	lane, other := queue(), queue()
	c.Join(lane)
	c.Join(other)
	lane.Outstanding.Store(1)
	other.Outstanding.Store(5)
	require.True(t, lane.Reserve(c, 1))
	lane.Outstanding.Add(-1)
	other.Outstanding.Store(4)
	require.Equal(t, 5, c.Allow(other))

	lane.Outstanding.Store(6)
	other.Outstanding.Store(0)
	require.Zero(t, c.Allow(other))
	require.False(t, lane.Reserve(c, 1), "the other queue waits for a connection")
	c.WantNone(other)
	require.True(t, lane.Reserve(c, 1), "it is paused")
	lane.Outstanding.Add(-1)
	require.Zero(t, c.Allow(other))
	require.False(t, lane.Reserve(c, 1))
	c.Leave(other)
	require.True(t, lane.Reserve(c, 1))
	require.False(t, lane.Reserve(c, 1), "only one of the places that become free is the caller's")
}
