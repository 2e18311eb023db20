package onceq

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var cursorNoon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func cursorAt(us int) time.Time { return cursorNoon.Add(time.Duration(us) * time.Microsecond) }

// tellMany tells a cursor of claimed jobs of one priority, due a microsecond apart: a thousand in each claim, and each
// claim got as many as it asked for.
func tellMany(c *cursor, priority Priority, from, to, now int) {
	for ; from < to; from += 1000 {
		var leases []*Lease
		for n := from; n < min(to, from+1000); n++ {
			leases = append(leases, &Lease{ID: int64(n), Priority: priority, RunAt: cursorAt(n)})
		}
		tell(c, len(leases), now, leases...)
	}
}

func tell(c *cursor, limit, now int, leases ...*Lease) {
	from := make([]position, 0, len(c.places))
	for _, p := range c.places {
		from = append(from, p.position)
	}
	c.claimed(&claim{from: from, limit: limit, now: cursorAt(now)}, leases, lookOnward, time.Time{}, time.Time{})
}

func TestTrap_ALookGoesBackOverTheRecentJobsAndNowAndThenOverTheWholeOverlap(t *testing.T) {
	t.Parallel()
	start := func(c *cursor, priority Priority, how look) position {
		from := c.from(how)
		require.Equal(t, priority, from[priority-PriorityHigh].priority)
		return from[priority-PriorityHigh]
	}
	const window = 8 * recentStep

	c := newCursor()
	tellMany(&c, PriorityNormal, 1, window-recentStep, 2*window)
	require.Equal(t, position{PriorityNormal, cursorAt(window - recentStep - 1), window - recentStep - 1}, start(&c, PriorityNormal, lookOnward))
	require.Equal(t, position{PriorityNormal, cursorAt(window - recentStep - 1).Add(-overlap), 0}, start(&c, PriorityNormal, lookRecent), "there were few")

	tellMany(&c, PriorityNormal, window-recentStep, 10*window, 20*window)
	for _, how := range []look{lookRecent, lookOnward} { // a priority that is caught up always looks
		c.place(PriorityNormal).caughtUp = how == lookOnward
		narrow := start(&c, PriorityNormal, how)
		require.Zero(t, narrow.id, "not within one time")
		require.False(t, narrow.runAt.After(cursorAt(9*window+recentStep)), narrow)
		require.False(t, narrow.runAt.Before(cursorAt(9*window-recentStep)), narrow)
	}
	require.Equal(t, position{PriorityNormal, cursorAt(10*window - 1).Add(-overlap), 0}, start(&c, PriorityNormal, lookWhole))
	require.Equal(t, position{PriorityHigh, cursorAt(20 * window).Add(-overlap), 0}, start(&c, PriorityHigh, lookRecent), "another priority, empty")

	// Among other jobs, late ones arrive. The next look begins no later than with the first of them, until they are long
	// past.
	for n := range 100 {
		tellMany(&c, PriorityNormal, 10*window+n*20, 10*window+n*20+20, 20*window)
		tell(&c, 1, 20*window, &Lease{ID: 1, Priority: PriorityNormal, RunAt: cursorAt(n)})
	}
	require.Equal(t, cursorAt(0), start(&c, PriorityNormal, lookRecent).runAt)
	tellMany(&c, PriorityNormal, 11*window, 12*window, 20*window)
	require.True(t, start(&c, PriorityNormal, lookRecent).runAt.After(cursorAt(9*window)))

	// The clock was set back by more than a second: what was claimed does not say where the next jobs are.
	now := -2_000_000
	tell(&c, 1, now)
	require.Equal(t, position{PriorityNormal, cursorAt(now).Add(-overlap), 0}, start(&c, PriorityNormal, lookRecent))

	// These jobs are due at the earliest time there is.
	c = newCursor()
	c.places[0].position = position{PriorityHigh, beginning.Add(time.Second), 1}
	require.Equal(t, position{PriorityHigh, beginning, 0}, start(&c, PriorityHigh, lookRecent))
}

func TestCursor_MovesBehindWhatWasClaimedOrToTheClockAtTheEndOfAPriority(t *testing.T) {
	t.Parallel()
	c := newCursor()
	high := &Lease{ID: 7, Priority: PriorityHigh, RunAt: cursorAt(100)}
	normal := &Lease{ID: 9, Priority: PriorityNormal, RunAt: cursorAt(50)}

	// The claim got as many as it asked for, and the last one has normal priority. So high came to its end, and low was not
	// looked at.
	tell(&c, 2, 1000, high, normal)
	require.True(t, c.full)
	require.Equal(t, position{PriorityHigh, cursorAt(1000), 0}, c.place(PriorityHigh).position)
	require.True(t, c.place(PriorityHigh).caughtUp)
	require.Equal(t, position{PriorityNormal, cursorAt(50), 9}, c.place(PriorityNormal).position)
	require.False(t, c.place(PriorityNormal).caughtUp)
	require.Equal(t, position{PriorityLow, beginning, 0}, c.place(PriorityLow).position)

	// The claim got fewer: all priorities came to their ends.
	tell(&c, 2, 2000, &Lease{ID: 10, Priority: PriorityNormal, RunAt: cursorAt(50)})
	require.False(t, c.full)
	for _, p := range c.places {
		require.True(t, p.caughtUp)
		require.Equal(t, cursorAt(2000), p.runAt)
	}

	// A job from the overlap does not move the position back. A clock that is a little behind does not either.
	tell(&c, 2, 1500, &Lease{ID: 3, Priority: PriorityLow, RunAt: cursorAt(20)})
	require.Equal(t, position{PriorityLow, cursorAt(2000), 0}, c.place(PriorityLow).position)

	// A rescan brings a job forward to the position. The next claim begins with the first id of the position's time,
	// whether it looks back or not.
	tell(&c, 1, 3000, &Lease{ID: 12, Priority: PriorityHigh, RunAt: cursorAt(3000)})
	require.Equal(t, position{PriorityHigh, cursorAt(3000), 12}, c.from(lookOnward)[0])
	c.broughtForward(PriorityHigh)
	require.Equal(t, position{PriorityHigh, cursorAt(3000), 0}, c.from(lookOnward)[0])

	c.restart()
	require.Equal(t, fromStart(), c.from(lookOnward))
}

func TestCursor_WhenAClaimLooksBack(t *testing.T) {
	t.Parallel()
	c, now := newCursor(), cursorNoon
	ends := func(how look, took time.Duration, full bool) {
		limit := 1
		if full {
			limit = 0 // the claim got as many as it asked for
		}
		c.claimed(&claim{from: fromStart(), limit: limit, now: now}, nil, how, now, now.Add(took))
		now = now.Add(took)
	}
	_, how := c.begin(now)
	require.Equal(t, lookWhole, how, "the first one")
	ends(how, 40*time.Millisecond, false)
	_, how = c.begin(now)
	require.Equal(t, lookRecent, how, "keeping up, and the whole overlap was just looked at")
	ends(how, 10*time.Millisecond, true)

	// With a backlog, the interval is 50 times what a look takes.
	now = now.Add(499 * time.Millisecond)
	_, how = c.begin(now)
	require.Equal(t, lookOnward, how)
	now = now.Add(2 * time.Millisecond)
	_, how = c.begin(now)
	require.Equal(t, lookRecent, how)
	now = now.Add(2 * time.Second) // 50 times 40 ms
	_, how = c.begin(now)
	require.Equal(t, lookWhole, how)
	c.rescanned = pass{ended: now}
	_, how = c.begin(now)
	require.Equal(t, lookRecent, how, "a rescan saw it all")

	// Every eighth claim begins with the lowest priority.
	var lowest []int
	for n := range 16 {
		if from, _ := c.begin(now); from[0].priority == PriorityLow {
			lowest = append(lowest, n)
		}
	}
	require.Len(t, lowest, 2)
	require.Equal(t, lowestEvery, lowest[1]-lowest[0])

	require.Equal(t, rescanEvery, c.rescanInterval())
	c.rescanned.took = time.Second
	require.Equal(t, 20*time.Second, c.rescanInterval())
}
