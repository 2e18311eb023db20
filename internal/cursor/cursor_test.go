package cursor

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/rhythm"
)

type jobs []Position

func (j jobs) Len() int          { return len(j) }
func (j jobs) At(i int) Position { return j[i] }

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func at(us int) time.Time { return noon.Add(time.Duration(us) * time.Microsecond) }

// tellMany tells a cursor of claimed jobs of one priority, due a microsecond apart: a thousand in each claim, and each
// claim got as many as it asked for.
func tellMany(c *Cursor, priority int16, from, to, now int) {
	for ; from < to; from += 1000 {
		var claimed []Position
		for n := from; n < min(to, from+1000); n++ {
			claimed = append(claimed, Position{priority, at(n), int64(n)})
		}
		tell(c, len(claimed), now, claimed...)
	}
}

func tell(c *Cursor, limit, now int, claimed ...Position) {
	from := make([]Position, 0, len(c.Places))
	for _, p := range c.Places {
		from = append(from, p.Position)
	}
	c.Claimed(Asked{from, limit, at(now)}, jobs(claimed), Onward, time.Time{}, time.Time{}, 0)
}

func TestTrap_ALookGoesBackOverTheRecentJobsAndNowAndThenOverTheWholeOverlap(t *testing.T) {
	t.Parallel()
	start := func(c *Cursor, priority int16, how Look) Position {
		from := c.From(how)
		require.Equal(t, priority, from[priority-high].Priority)
		return from[priority-high]
	}
	const window = 8 * recentStep

	c := New()
	tellMany(&c, normal, 1, window-recentStep, 2*window)
	require.Equal(t, Position{normal, at(window - recentStep - 1), window - recentStep - 1}, start(&c, normal, Onward))
	require.Equal(t, Position{normal, at(window - recentStep - 1).Add(-Overlap), 0}, start(&c, normal, Recent), "there were few")

	tellMany(&c, normal, window-recentStep, 10*window, 20*window)
	for _, how := range []Look{Recent, Onward} { // a priority that is caught up always looks
		c.place(normal).caughtUp = how == Onward
		narrow := start(&c, normal, how)
		require.Zero(t, narrow.ID, "not within one time")
		require.False(t, narrow.RunAt.After(at(9*window+recentStep)), narrow)
		require.False(t, narrow.RunAt.Before(at(9*window-recentStep)), narrow)
	}
	require.Equal(t, Position{normal, at(10*window - 1).Add(-Overlap), 0}, start(&c, normal, Whole))
	require.Equal(t, Position{high, at(20 * window).Add(-Overlap), 0}, start(&c, high, Recent), "another priority, empty")
	require.Equal(t, Position{high, at(20 * window).Add(-rhythm.Briefly), 0}, start(&c, high, Brief))
	require.Equal(t, start(&c, normal, Recent), start(&c, normal, Brief), "very many were claimed meanwhile")

	// Among other jobs, late ones arrive. The next look begins no later than with the first of them, until they are long
	// past.
	for n := range 100 {
		tellMany(&c, normal, 10*window+n*20, 10*window+n*20+20, 20*window)
		tell(&c, 1, 20*window, Position{normal, at(n), 1})
	}
	require.Equal(t, at(0), start(&c, normal, Recent).RunAt)
	tellMany(&c, normal, 11*window, 12*window, 20*window)
	require.True(t, start(&c, normal, Recent).RunAt.After(at(9*window)))

	// The clock was set back by more than a second: what was claimed does not say where the next jobs are.
	now := -2_000_000
	tell(&c, 1, now)
	require.Equal(t, Position{normal, at(now).Add(-Overlap), 0}, start(&c, normal, Recent))

	// These jobs are due at the earliest time there is.
	c = New()
	c.Places[0].Position = Position{high, Beginning.Add(time.Second), 1}
	require.Equal(t, Position{high, Beginning, 0}, start(&c, high, Recent))
}

func TestCursor_MovesBehindWhatWasClaimedOrToTheClockAtTheEndOfAPriority(t *testing.T) {
	t.Parallel()
	c := New()
	first := Position{high, at(100), 7}
	second := Position{normal, at(50), 9}

	// The claim got as many as it asked for, and the last one has normal priority. So high came to its end, and low was not
	// looked at.
	tell(&c, 2, 1000, first, second)
	require.True(t, c.Full)
	require.Equal(t, Position{high, at(1000), 0}, c.place(high).Position)
	require.True(t, c.place(high).caughtUp)
	require.Equal(t, Position{normal, at(50), 9}, c.place(normal).Position)
	require.False(t, c.place(normal).caughtUp)
	require.Equal(t, Position{low, Beginning, 0}, c.place(low).Position)

	// The claim got fewer: all priorities came to their ends.
	tell(&c, 2, 2000, Position{normal, at(50), 10})
	require.False(t, c.Full)
	for _, p := range c.Places {
		require.True(t, p.caughtUp)
		require.Equal(t, at(2000), p.RunAt)
	}

	// A job from the overlap does not move the position back. A clock that is a little behind does not either.
	tell(&c, 2, 1500, Position{low, at(20), 3})
	require.Equal(t, Position{low, at(2000), 0}, c.place(low).Position)
	require.Equal(t, Position{low, at(2000).Add(-Overlap), 0}, c.From(Whole)[2], "a claim that looks back does")

	// A rescan brings a job forward to the position. The next claim begins with the first id of the position's time,
	// whether it looks back or not.
	tell(&c, 1, 3000, Position{high, at(3000), 12})
	require.Equal(t, Position{high, at(3000), 12}, c.From(Onward)[0])
	c.BroughtForward(high)
	require.Equal(t, Position{high, at(3000), 0}, c.From(Onward)[0])

	c.Restart()
	require.Equal(t, FromStart(), c.From(Onward))
}

func TestCursor_WhenAClaimLooksBack(t *testing.T) {
	t.Parallel()
	c, now := New(), noon
	ends := func(how Look, took time.Duration, full bool) {
		limit := 1
		if full {
			limit = 0 // the claim got as many as it asked for
		}
		c.Claimed(Asked{FromStart(), limit, now}, jobs{}, how, now, now.Add(took), 0)
		now = now.Add(took)
	}
	_, how := c.Begin(now)
	require.Equal(t, Whole, how, "the first one")
	ends(how, 40*time.Millisecond, false)

	// Without a backlog, the interval is four times what a look takes, and in between claims look back briefly.
	for range 3 {
		_, how = c.Begin(now)
		require.Equal(t, Brief, how, "the whole overlap was just looked at")
		ends(how, 50*time.Millisecond, false)
	}
	now = now.Add(11 * time.Millisecond)
	_, how = c.Begin(now)
	require.Equal(t, Recent, how, "and so is 50 times what that took")
	ends(how, 10*time.Millisecond, true)

	// With a backlog, the interval is 50 times what a look takes.
	now = now.Add(499 * time.Millisecond)
	_, how = c.Begin(now)
	require.Equal(t, Onward, how)
	now = now.Add(2 * time.Millisecond)
	_, how = c.Begin(now)
	require.Equal(t, Recent, how)
	now = now.Add(2 * time.Second) // 50 times 40 ms
	_, how = c.Begin(now)
	require.Equal(t, Whole, how)
	c.Rescanned = now
	_, how = c.Begin(now)
	require.Equal(t, Recent, how, "a rescan saw it all")

	// What it waited for its turn is no cost, and no cost puts off the next look for more than a second.
	next := func(took, waited time.Duration) time.Duration {
		c.Claimed(Asked{FromStart(), 1, now}, jobs{}, Recent, now.Add(-took), now, waited)
		return c.NextLook().Sub(now)
	}
	require.Equal(t, 40*time.Millisecond, next(60*time.Millisecond, 50*time.Millisecond))

	// Without a backlog, the interval is longer if a look takes much more than a brief claim.
	ends(Brief, 2*time.Millisecond, false)
	require.Equal(t, 8*time.Millisecond, next(2*time.Millisecond, 0))
	require.Equal(t, 150*time.Millisecond, next(5*time.Millisecond, 0))
	require.Equal(t, time.Second, next(time.Minute, 0))

	// The clock was set back: a brief claim would begin after what is due.
	for i := range c.Places {
		c.Places[i].RunAt = now.Add(time.Minute)
	}
	ends(Brief, time.Millisecond, false)
	_, how = c.Begin(now)
	require.GreaterOrEqual(t, how, Recent)

	// Every eighth claim begins with the lowest priority or with the middle one, in turns.
	c.claims = 0
	for n := 1; n <= 4*lowestEvery; n++ {
		want := []int16{high, normal, low}
		switch n {
		case lowestEvery, 3 * lowestEvery:
			want = []int16{low, normal, high}
		case 2 * lowestEvery, 4 * lowestEvery:
			want = []int16{normal, low, high}
		}
		from, _ := c.Begin(now)
		require.Equal(t, want, []int16{from[0].Priority, from[1].Priority, from[2].Priority})
	}

	// A look that sees nothing moves all positions, and does not move them back.
	c.ReachedEnd(now)
	for _, p := range c.Places {
		require.True(t, p.caughtUp)
		require.Equal(t, now, p.RunAt)
	}
	c.ReachedEnd(now.Add(-time.Millisecond))
	require.Equal(t, now, c.place(normal).RunAt)
	c.ReachedEnd(now.Add(-time.Minute))
	require.Equal(t, now.Add(-time.Minute), c.place(normal).RunAt, "the clock was set back")
}

// A look back in turn costs what it takes after its turn has come. With the wait it still comes twice in each overlap.
func TestCursor_WhatAWaitForATurnCosts(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ took, waited, rest time.Duration }{
		"at least":            {time.Millisecond, 0, 100 * time.Millisecond},
		"without a wait":      {10 * time.Millisecond, 0, 500 * time.Millisecond},
		"a short wait counts": {10 * time.Millisecond, 6 * time.Millisecond, 500 * time.Millisecond},
		"a long one not all":  {time.Second, 990 * time.Millisecond, Overlap / 2},
		"the look does":       {time.Second, 200 * time.Millisecond, 40 * time.Second},
	} {
		require.Equal(t, test.rest, restAfter(rhythm.Pass{Took: test.took, Waited: test.waited}, 100*time.Millisecond), name)
	}
}
