package promoter

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/rhythm"
)

// worker works these queues, and has room.
type worker []string

func (w worker) Has(queue string) bool { return slices.Contains(w, queue) }
func (w worker) Taken() (bool, int64)  { return false, 0 }
func (w worker) First(queue string) Next {
	if w.Has(queue) {
		return next{queue: queue}
	}
	return nil
}

type next struct {
	Next
	queue string
}

func (n next) Asks() (queue string, holder int64, began time.Time, lease time.Duration) {
	return n.queue, 0, time.Time{}, 0
}

// A promoter whose worker waits leaves it to the looks whether there are calls, but for one that it knows of.
func TestPromoter_WaitsForTheCallThatItKnowsOf(t *testing.T) {
	t.Parallel()
	p := New(Config{Listener: &claimer.Listener{}})
	p.Listener.Waits.Store(true)
	began := time.Now()
	require.True(t, p.hears(t.Context(), 50*time.Millisecond))
	require.GreaterOrEqual(t, time.Since(began), 50*time.Millisecond)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.False(t, p.hears(ended, 10*time.Minute))
	p.Called(false)
	require.True(t, p.hears(t.Context(), 10*time.Minute))
}

// While calls come, looks are brief for ten times as long as one took that was not, and never longer than a second.
func TestPromoter_LooksBackBrieflyOnlyWhileCallsCome(t *testing.T) {
	t.Parallel()
	now := time.Now()
	p := &Promoter{}
	require.False(t, p.isBrief(now))
	p.came = true
	require.False(t, p.isBrief(now), "it has not gone back by the margin")
	p.back = rhythm.Pass{Ended: now, Took: 20 * time.Millisecond}
	require.True(t, p.isBrief(now.Add(199*time.Millisecond)))
	require.False(t, p.isBrief(now.Add(200*time.Millisecond)))
	p.back.Took = time.Minute
	require.True(t, p.isBrief(now.Add(999*time.Millisecond)))
	require.False(t, p.isBrief(now.Add(time.Second)))
	p.came = false
	require.False(t, p.isBrief(now), "the latest look found no calls")
}

// A brief look that found no calls is soon followed by one that is not brief, however long ago calls were found.
func TestPromoter_RestsBrieflyWhileItOwesALook(t *testing.T) {
	t.Parallel()
	p := New(Config{Listener: &claimer.Listener{}, Laned: true})
	p.Listener.Confirmed.Store(true)
	p.Listener.Waits.Store(true)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	p.rest(ended, promoted{})
	require.Zero(t, p.pause, "it rests for long")
	p.owes = true
	p.rest(ended, promoted{})
	require.NotZero(t, p.pause, "it rests for long")
}

// A notification names a queue, after a mark and a time or not, and a queue may have a name that begins like that. One look takes it.
func TestPromoter_KnowsWhichQueueItWasWokenFor(t *testing.T) {
	t.Parallel()
	const mark = "\x1f"
	const more = mark + "15" + mark
	p := New(Config{Worker: worker{"mail", mark + "odd"}, Laned: true})
	for heard, queue := range map[string]string{"mail": "mail", more + "mail": "mail", mark + "odd": mark + "odd", more + mark + "odd": mark + "odd"} {
		p.Rouse(heard)
		p.Rouse("") // of a wake-up that names none
		n := p.first()
		require.NotNil(t, n, "%q", heard)
		asks, _, _, _ := n.Asks()
		require.Equal(t, queue, asks)
		require.Nil(t, p.first(), "taken")
	}
	p.Rouse("another")
	require.Nil(t, p.first())
}
