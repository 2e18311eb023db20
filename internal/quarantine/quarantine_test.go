package quarantine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type idle struct{}

func (idle) Rouse() {}

// Of two claimers that both see that a job in quarantine may start, one takes the turn.
func TestQuarantine_TheTurnIsTakenOnce(t *testing.T) {
	t.Parallel()
	turn := new(Turn)
	require.True(t, turn.Take(true))
	require.False(t, turn.Take(true), "nothing has ended well")
	turn.Start(nil, 1, time.Hour, false)
	require.False(t, turn.Take(true))
	turn.EndedWell()
	require.False(t, turn.Take(false), "it has to start alone")
	require.True(t, turn.Take(true))
	require.False(t, turn.Take(true), "one has ended well, not two")
	turn.Passed()
	turn.Narrow()
	require.False(t, turn.Take(true), "a lease was lost since")
	turn.Leave(nil, 1)
	turn.EndedWell()
	require.True(t, turn.Take(false))
	require.False(t, turn.Take(true), "the other has to start alone")
	turn.Passed()
	require.True(t, turn.Take(true))
}

// A pause empties the quarantine while a claim of some of its jobs is under way.
func TestQuarantine_PassesJobsThatAPauseHasTakenOut(t *testing.T) {
	var q List
	q.Saw([]Job{{1, 1}, {2, 1}, {3, 1}})
	q.Past(2)
	require.Equal(t, []int64{3}, q.IDs)
	q.Forget()
	q.Past(2)
	require.Empty(t, q.IDs)
}

// Each job that ends well lets one more start beside the others, until a lease is lost. One that has to start alone does, whatever
// started before and after it.
func TestQuarantine_WidensWhileJobsEndWell(t *testing.T) {
	turn, c := new(Turn), idle{}
	var token int64
	start := func() int64 {
		require.True(t, turn.Free(c, true))
		require.True(t, turn.Take(true))
		token++
		turn.Start(nil, token, time.Hour, false)
		return token
	}
	full := func() {
		t.Helper()
		require.False(t, turn.Free(c, true))
		require.False(t, turn.Take(true))
		require.False(t, turn.may(true))
	}
	end := func(token int64) {
		turn.EndedWell()
		turn.Leave(nil, token)
	}
	running := []int64{start()}
	for _, n := range []int{1, 2, 4, 8} {
		full()
		require.Len(t, running, n)
		for _, token := range running {
			end(token)
		}
		running = nil
		for range 2 * n {
			if running = append(running, start()); n == 8 {
				break
			}
		}
	}
	require.True(t, turn.Take(true), "there was room for fifteen")
	turn.Passed()
	require.False(t, turn.Free(c, false))
	full() // one that starts alone waits
	end(running[0])
	require.True(t, turn.Free(c, false))
	require.True(t, turn.Take(false))
	turn.Start(nil, 100, time.Hour, true)
	full()
	end(100)
	require.True(t, turn.Take(true))
	require.True(t, turn.Take(true))
	turn.Passed()
	turn.Narrow()
	full()
	turn.Passed()
	require.True(t, turn.may(true))

	var in List
	in.Saw([]Job{{5, 2}, {1, 1}, {2, 1}, {6, 3}})
	few, beside := in.Next()
	require.Equal(t, []int64{1, 2}, few)
	require.True(t, beside)
	in.Without(map[int64]bool{1: true, 6: true})
	few, beside = in.Next()
	require.Equal(t, []int64{2}, few)
	require.True(t, beside)
	in.Past(1)
	few, beside = in.Next()
	require.Equal(t, []int64{5}, few)
	require.False(t, beside)
}
