package onceq

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTrap_ALookGoesBackOverTheLatestJobsAndNowAndThenOverTheMargin(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	at := func(us int) time.Time { return noon.Add(time.Duration(us) * time.Microsecond) }
	passed := func(l *lane, priority Priority, from, to, now int) {
		for ; from < to; from += 1000 {
			l.full = true
			c := &claim{from: slices.Clone(l.at), now: at(now)}
			var leases []*Lease
			for n := from; n < min(to, from+1000); n++ {
				leases = append(leases, &Lease{ID: int64(n), Priority: priority, RunAt: at(n)})
			}
			l.advance(c, leases)
		}
	}
	start := func(l *lane, priority Priority, look, wide bool) position {
		from := l.lookFrom(look, wide)
		require.Equal(t, priority, from[priority-PriorityHigh].priority)
		return from[priority-PriorityHigh]
	}
	const window = 8 * trailStep

	l := &lane{at: fromStart()}
	passed(l, PriorityNormal, 1, window-trailStep, 2*window)
	require.Equal(t, position{PriorityNormal, at(window - trailStep - 1), window - trailStep - 1}, start(l, PriorityNormal, false, false))
	require.Equal(t, position{PriorityNormal, at(window - trailStep - 1).Add(-margin), 0}, start(l, PriorityNormal, true, false), "there were few")

	passed(l, PriorityNormal, window-trailStep, 10*window, 20*window)
	for _, look := range []bool{true, false} { // one that keeps up always looks
		l.through[PriorityNormal-PriorityHigh] = !look
		narrow := start(l, PriorityNormal, look, false)
		require.Zero(t, narrow.id, "not within one time")
		require.False(t, narrow.runAt.After(at(9*window+trailStep)), narrow)
		require.False(t, narrow.runAt.Before(at(9*window-trailStep)), narrow)
	}
	require.Equal(t, position{PriorityNormal, at(10*window - 1).Add(-margin), 0}, start(l, PriorityNormal, true, true))
	require.Equal(t, position{PriorityHigh, at(20 * window).Add(-margin), 0}, start(l, PriorityHigh, true, false), "another priority, empty")

	// Late ones, between others: the next look begins no later than with the first of them, until they are long gone.
	for n := range 100 {
		passed(l, PriorityNormal, 10*window+n*20, 10*window+n*20+20, 20*window)
		l.advance(&claim{from: slices.Clone(l.at), now: at(20 * window)}, []*Lease{{ID: 1, Priority: PriorityNormal, RunAt: at(n)}})
	}
	require.Equal(t, at(0), start(l, PriorityNormal, true, false).runAt)
	passed(l, PriorityNormal, 11*window, 12*window, 20*window)
	require.True(t, start(l, PriorityNormal, true, false).runAt.After(at(9*window)))

	// The clock was set back by more than a second: nothing that was claimed says where the next jobs are.
	now := -2_000_000
	l.advance(&claim{from: slices.Clone(l.at), now: at(now)}, nil)
	require.Equal(t, position{PriorityNormal, at(now).Add(-margin), 0}, start(l, PriorityNormal, true, false))

	// Due at the beginning of time.
	l = &lane{at: fromStart()}
	l.at[0] = position{PriorityHigh, beginning.Add(time.Second), 1}
	require.Equal(t, position{PriorityHigh, beginning, 0}, start(l, PriorityHigh, true, false))
}
