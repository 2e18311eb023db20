package main

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// soundCaps is a trail without a violation. Two jobs of a limit are live, which its own row allows; one of them leaves, and the
// row is removed, so that what the family allows counts: one.
func soundCaps() []laneStep {
	const inCap = "/" + capFamily + "0"
	return []laneStep{
		{What: "limiting", Lane: "/" + capFamily, N: 1, At: second(1)},
		{What: "limited", Lane: "/" + capFamily, N: 1, At: second(1)},
		{What: "limiting", Lane: inCap, N: 2, At: second(1)},
		{What: "limited", Lane: inCap, N: 2, At: second(2)},
		{What: "waits", Lane: inCap, Job: jobA, Due: second(1), Xact: 10},
		{What: "waits", Lane: inCap, Job: jobB, Due: second(1), Xact: 10},
		{What: "live", Lane: inCap, Job: jobB, Xact: 11, Began: second(3), At: second(3), Seen: "11:11:"}, // there is no order
		{What: "live", Lane: inCap, Job: jobA, Xact: 12, Began: second(3), At: second(3), Seen: "12:12:"},
		{What: "limiting", Lane: inCap, N: removed, At: second(4)},
		{What: "limited", Lane: inCap, N: removed, At: second(5)},
		{What: "gone", Lane: inCap, Job: jobA, Xact: 13},
		{What: "waits", Lane: inCap, Job: jobA, Due: second(1), Xact: 13}, // it failed
		{What: "gone", Lane: inCap, Job: jobB, Xact: 14},
		{What: "live", Lane: inCap, Job: jobA, Xact: 15, Began: second(6), At: second(6), Seen: "15:15:"},
	}
}

// rated is what handlers of a rate say that start at these times, in milliseconds.
func rated(at ...int64) (all []event) {
	for i, ms := range at {
		all = append(all, event{Type: saidStarted, Token: int64(i + 1), At: ms * 1000})
	}
	return all
}

func TestCheckLimits_WhatIsRightIsNoViolation(t *testing.T) {
	h := sound()
	h.Lanes = append(soundCaps(), laneStep{What: "limiting", Lane: line(rateLimit), N: noRate, At: time.UnixMilli(100_000)})
	h.Events = rated(0, 0, 0, 250, 500, 3000, 3000, 3000, 3000)
	h.Events = append(h.Events, h.Events...) // Postgres made them run again
	for range 20 {
		h.Events = append(h.Events, event{Type: saidStarted, Token: 99, At: 200_000_000}) // there is no rate any more
	}
	v := check(h)
	require.Empty(t, v.Violations)
	require.Equal(t, []int{3, 2, 3, 9}, []int{v.Admitted, v.MostLive, v.Limits, v.Starts})
}

func TestCheckLimits_FindsEachViolation(t *testing.T) {
	for name, spoil := range map[string]func(h *history){
		"one too many":                      func(h *history) { h.Lanes[3].N, h.Lanes[2].N = 1, 1 },
		"as if the row were still there":    func(h *history) { h.Lanes = slices.Delete(h.Lanes, 12, 13) },
		"a place that was given away twice": func(h *history) { h.Lanes[7].Xact, h.Lanes[2].N, h.Lanes[3].N = 11, 1, 1 },
		"all at once after an outage":       func(h *history) { h.Events = rated(make([]int64, 12)...) },
		"too many for a while": func(h *history) {
			for i := range 100 {
				h.Events = append(h.Events, event{Type: saidStarted, Token: int64(i + 1), At: int64(i) * 200_000})
			}
		},
	} {
		h := sound()
		h.Lanes = soundCaps()
		spoil(h)
		v := check(h)
		require.NotEmpty(t, v.Violations[vLimit], name)
		require.Len(t, v.Violations, 1, name)
	}
}
