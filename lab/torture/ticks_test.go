package main

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// soundTicks adds schedules to a history: one that fired two ticks, was paused for two, of which one was back-filled, and fired one; one that
// fired one and missed two; and one that fired one, was removed, and fired another.
func soundTicks() *history {
	h := sound()
	fired := func(schedule string, n int, job int64) {
		h.Ticks = append(h.Ticks, tickRow{Schedule: schedule, At: second(n), Until: second(n), Ticks: 1, Outcome: "fired", DoneAt: second(n)})
		name := tickName(schedule, second(n))
		h.Trail = append(h.Trail, step{What: "accepted", Job: job, Work: name})
		h.Ends = append(h.Ends, end{Job: job, Work: name, Form: formTick, State: "completed"})
		h.Ledger = append(h.Ledger, entry{Work: name, Form: formTick, Job: job})
	}
	fired(everyTick, 10, 11<<36)
	fired(everyTick, 11, 12<<36)
	fired(latestTick, 10, 13<<36)
	h.Ticks = append(h.Ticks, tickRow{Schedule: latestTick, At: second(12), Until: second(14), Ticks: 2, Outcome: "missed"},
		tickRow{Schedule: everyTick, At: second(12), Until: second(12), Ticks: 1, Outcome: "paused", DoneAt: second(14).Add(-1)})
	fired(everyTick, 13, 15<<36)
	h.Ticks[5].Note = "back-filled"
	fired(everyTick, 14, 16<<36)
	h.Ticks[6].DoneAt = second(14).Add(1)
	fired(goneTick, 9, 17<<36)
	h.Ticks = h.Ticks[:7] // with its schedule
	fired(goneTick, 11, 18<<36)
	h.Tended = []tended{
		{What: "removed", Schedule: goneTick, At: second(10)},
		{What: "paused", Schedule: everyTick, At: second(12).Add(-1), Since: second(12).Add(-1)},
		{What: "backfilled", Schedule: everyTick, At: second(13), Since: second(13), Until: second(13)},
		{What: "resumed", Schedule: everyTick, At: second(14), Since: second(12).Add(-1)},
	}
	return h
}

func TestCheckTicks_ASoundLedgerHasNoViolation(t *testing.T) {
	v := check(soundTicks())
	require.Empty(t, v.Violations)
	require.Equal(t, []int{7, 1, 2, 1, 3}, []int{v.Ticks, v.Backfilled, v.Missed, v.Paused, v.Tended})
}

// What was overdue when a pause began is made up for at its end, and not before.
func TestCheckTicks_OverdueAtAPause(t *testing.T) {
	overdue := func() *history {
		h := soundTicks()
		h.Ticks[1].DoneAt = second(14).Add(-1) // it was due a second before the pause
		return h
	}
	require.Empty(t, check(overdue()).Violations)
	h := overdue()
	h.Ticks[1].Outcome = "missed" // by a back-fill in the pause
	h.Trail = slices.DeleteFunc(h.Trail, func(s step) bool { return s.Work == tickName(everyTick, second(11)) })
	h.Ends = slices.DeleteFunc(h.Ends, func(e end) bool { return e.Work == tickName(everyTick, second(11)) })
	h.Ledger = slices.DeleteFunc(h.Ledger, func(e entry) bool { return e.Work == tickName(everyTick, second(11)) })
	require.Empty(t, check(h).Violations)
	h = overdue()
	h.Tended[3].At = second(14 + 11) // long before the end of the pause
	require.NotEmpty(t, check(h).Violations[vTick])
}

func TestCheckTicks_FindsEachViolation(t *testing.T) {
	for name, spoil := range map[string]func(h *history){
		"a tick that was fired twice": func(h *history) {
			name := tickName(everyTick, second(11))
			h.Trail = append(h.Trail, step{What: "accepted", Job: 14 << 36, Work: name})
			h.Ends = append(h.Ends, end{Job: 14 << 36, Work: name, Form: formTick, State: "dead"})
		},
		"a tick that never was":                  func(h *history) { h.Ticks[1].At, h.Ticks[1].Until = second(12), second(12) },
		"a job that the ledger lacks":            func(h *history) { h.Ticks = append(h.Ticks[:1:1], h.Ticks[2:]...) },
		"a line without its job":                 func(h *history) { h.Ticks[3].Outcome = "fired" },
		"a missed tick of those for all":         func(h *history) { h.Ticks[1].Outcome = "missed" },
		"a refused tick":                         func(h *history) { h.Ticks[1].Outcome = "refused" },
		"a tick in two lines":                    func(h *history) { h.Ticks[3].At, h.Ticks[3].Ticks = second(10), 3 },
		"a wrong count":                          func(h *history) { h.Ticks[3].Ticks = 3 },
		"a paused tick outside of pauses":        func(h *history) { h.Tended = slices.Delete(h.Tended, 1, 2) },
		"a tick that is paused after the pause":  func(h *history) { h.Ticks[4].DoneAt = second(15) },
		"a tick in a pause":                      func(h *history) { h.Ticks[5].Note = "" },
		"a tick before the end of a pause":       func(h *history) { h.Ticks[6].DoneAt = second(14).Add(-1) },
		"a pause whose ticks the ledger lacks":   func(h *history) { h.Ticks = slices.Delete(h.Ticks, 4, 5) },
		"a back-filled range with a paused tick": func(h *history) { h.Tended[2].Since = second(12) },
		"a back-filled tick that had happened": func(h *history) {
			h.Trail = append(h.Trail, step{What: "accepted", Job: 19 << 36, Work: tickName(everyTick, second(13))})
		},
		"a tick that happened before and after": func(h *history) {
			h.Trail = append(h.Trail, step{What: "accepted", Job: 19 << 36, Work: tickName(goneTick, second(9))})
		},
		"a forgotten tick of a schedule that is here": func(h *history) { h.Tended[0].At = second(8) },
		"a schedule that stands still":                func(h *history) { h.Still = []string{everyTick} },
	} {
		h := soundTicks()
		spoil(h)
		v := check(h)
		require.NotEmpty(t, v.Violations[vTick], name)
	}
}
