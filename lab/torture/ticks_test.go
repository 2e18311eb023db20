package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// soundTicks adds schedules to a history: one that fired two ticks, and one that fired one and missed two.
func soundTicks() *history {
	h := sound()
	fired := func(schedule string, n int, job int64) {
		h.Ticks = append(h.Ticks, tickRow{Schedule: schedule, At: second(n), Until: second(n), Ticks: 1, Outcome: "fired"})
		name := tickName(schedule, second(n))
		h.Trail = append(h.Trail, step{What: "accepted", Job: job, Work: name})
		h.Ends = append(h.Ends, end{Job: job, Work: name, Form: formTick, State: "completed"})
		h.Ledger = append(h.Ledger, entry{Work: name, Form: formTick, Job: job})
	}
	fired(everyTick, 10, 11<<36)
	fired(everyTick, 11, 12<<36)
	fired(latestTick, 10, 13<<36)
	h.Ticks = append(h.Ticks, tickRow{Schedule: latestTick, At: second(12), Until: second(14), Ticks: 2, Outcome: "missed"})
	return h
}

func TestCheckTicks_ASoundLedgerHasNoViolation(t *testing.T) {
	v := check(soundTicks())
	require.Empty(t, v.Violations)
	require.Equal(t, []int{3, 2}, []int{v.Ticks, v.Missed})
}

func TestCheckTicks_FindsEachViolation(t *testing.T) {
	for name, spoil := range map[string]func(h *history){
		"a tick that was fired twice": func(h *history) {
			name := tickName(everyTick, second(11))
			h.Trail = append(h.Trail, step{What: "accepted", Job: 14 << 36, Work: name})
			h.Ends = append(h.Ends, end{Job: 14 << 36, Work: name, Form: formTick, State: "dead"})
		},
		"a tick that never was":          func(h *history) { h.Ticks[1].At, h.Ticks[1].Until = second(12), second(12) },
		"a job that the ledger lacks":    func(h *history) { h.Ticks = append(h.Ticks[:1:1], h.Ticks[2:]...) },
		"a line without its job":         func(h *history) { h.Ticks[3].Outcome = "fired" },
		"a missed tick of those for all": func(h *history) { h.Ticks[1].Outcome = "missed" },
		"a refused tick":                 func(h *history) { h.Ticks[1].Outcome = "refused" },
		"a tick in two lines":            func(h *history) { h.Ticks[3].At, h.Ticks[3].Ticks = second(10), 3 },
		"a wrong count":                  func(h *history) { h.Ticks[3].Ticks = 3 },
		"a schedule that stands still":   func(h *history) { h.Still = []string{everyTick} },
	} {
		h := soundTicks()
		spoil(h)
		v := check(h)
		require.NotEmpty(t, v.Violations[vTick], name)
	}
}
