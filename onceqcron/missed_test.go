package onceqcron

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// counted counts how often its Timetable is asked.
type counted struct {
	Timetable
	steps *int
	after func(steps int)
}

func (c counted) Next(after time.Time) time.Time {
	if *c.steps++; c.after != nil {
		c.after(*c.steps)
	}
	return c.Timetable.Next(after)
}

// The last ticks of a time are those that a walk over all of it finds.
func TestLatest_IsWhatAWalkFinds(t *testing.T) {
	t.Parallel()
	until := time.Date(2026, 3, 29, 4, 0, 0, 0, time.UTC) // Berlin's clocks have just changed
	for _, c := range []struct {
		spec, zone string
		back       time.Duration
	}{
		{"* * * * * *", "", 20 * time.Hour},
		{"@every 7m", "", 90 * 24 * time.Hour},
		{"*/20 * * * *", "Europe/Berlin", 300 * 24 * time.Hour},
		{"30 2 * * *", "Europe/Berlin", 9000 * 24 * time.Hour},
		{"0-30 3 28 3 *", "Europe/Berlin", 9000 * 24 * time.Hour}, // none for long, then many
		{"0 0 29 2 *", "", 9000 * 24 * time.Hour},
	} {
		table, err := parse(c.spec, c.zone)
		require.NoError(t, err)
		first := table.Next(until.Add(-c.back))
		var all []time.Time
		for at := first; !at.After(until); at = table.Next(at) {
			all = append(all, at)
		}
		for range 20 {
			n, from := 1+rand.IntN(50), all[rand.IntN(len(all))]
			var want []time.Time
			for _, at := range all[max(0, len(all)-n):] {
				if !at.Before(from) {
					want = append(want, at)
				}
			}
			got := latest(table, from, until, n)
			require.Len(t, got, len(want), "%s: %d of those from %s on", c.spec, n, from)
			for i := range want {
				require.True(t, got[i].Equal(want[i]), "%s: %s, want %s", c.spec, got[i], want[i])
			}
		}
	}
}

// A year of seconds is computed, whatever the rule for missed ticks is.
func TestPlan_LooksAtFewTicks(t *testing.T) {
	t.Parallel()
	seconds, err := parse("* * * * * *", "Europe/Berlin")
	require.NoError(t, err)
	until := time.Date(2026, 11, 29, 8, 0, 0, 500, time.UTC)
	first, now := until.AddDate(-1, 0, 0).Truncate(time.Second), until.Add(time.Minute)
	last := until.Truncate(time.Second)
	changed := first.AddDate(0, 1, 0)
	for _, c := range []struct {
		missed Missed
		fires  int
	}{{Skip(), 1}, {Latest(24 * time.Hour), 1}, {Latest(24 * 1000 * time.Hour), 1}, {All(1), 1}, {All(10), 10}, {All(maxTicks), maxTicks}, {none, 0}} {
		for _, change := range []*time.Time{nil, &changed} {
			steps := 0
			p, err := c.missed.plan(t.Context(), counted{Timetable: seconds, steps: &steps}, first, change, until, until.Add(time.Second))
			require.NoError(t, err)
			require.Less(t, steps, 1_000_000, c.missed)
			require.Len(t, p.fire, c.fires, c.missed)
			require.Equal(t, maxTicks, p.missed, "nobody counts more")
			require.True(t, p.first.Equal(first))
			require.True(t, p.next.Equal(last.Add(time.Second)), p.next)
			if len(p.fire) > 0 {
				require.True(t, p.fire[len(p.fire)-1].Equal(last))
			}
			require.True(t, p.last.Equal(last.Add(-time.Duration(len(p.fire))*time.Second)), "%s: %s", c.missed, p.last)
		}
	}
	p, err := Latest(time.Hour).plan(t.Context(), every(time.Second), first, nil, until, now)
	require.NoError(t, err)
	require.True(t, p.fire[0].Equal(last), "in the step of its first tick")

	// Who waits for it can end it, however long a Timetable thinks.
	ctx, cancel := context.WithCancelCause(t.Context())
	asked := 0
	stop := errors.New("enough")
	_, err = All(10).plan(ctx, counted{seconds, &asked, func(n int) {
		if n == 100 {
			cancel(stop)
		}
	}}, first, nil, until, now)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 100, asked)
}
