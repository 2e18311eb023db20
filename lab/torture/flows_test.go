package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// soundFlows adds three flows to a sound history: A heard of the first of two events, twice; B of a time-out, and its event
// came after that; C was cancelled while it waited.
func soundFlows() *history {
	h := &history{
		Emits: []emitRow{{"flow/1", "p", true}, {"flow/1", "q", false}, {"flow/3", "r", true}},
		Heard: []heardRow{{jobA, "flow/1", "p"}, {jobA, "flow/1", "p"}, {jobB, "flow/3", timedOut}},
	}
	for _, f := range []struct {
		job                 int64
		work, state, result string
		steps               []string
	}{
		{jobA, "flow/1", "completed", "p", []string{stepBegin, stepCame}},
		{jobB, "flow/3", "completed", timedOut, []string{stepBegin, stepLate}},
		{jobC, "flow/4", "cancelled", "", []string{stepBegin}},
	} {
		token := idOf(f.job)<<20 | 1
		h.Trail = append(h.Trail, step{What: "accepted", Job: f.job, Work: f.work}, step{What: "claimed", Job: f.job, Work: f.work, Token: token})
		h.Ends = append(h.Ends, end{Job: f.job, Work: f.work, Form: formFlow, State: f.state, Result: f.result})
		if f.result != "" {
			h.Ledger = append(h.Ledger, entry{Work: f.work, Form: formFlow, Job: f.job, Token: token, Nonce: f.result})
		}
		for _, s := range f.steps {
			h.Calls = append(h.Calls, call{order: order{Work: f.work + "#" + s, Form: formFlow, Job: f.job}, Key: f.work + s, What: "applied"})
		}
	}
	return h
}

func TestCheckFlows_ASoundHistoryHasNoViolation(t *testing.T) {
	v := check(soundFlows())
	require.Empty(t, v.Violations)
	require.Equal(t, []int{2, 1, 1}, []int{v.Emitted, v.Came, v.TimedOut})
}

func TestCheckFlows_FindsEachViolation(t *testing.T) {
	for name, spoil := range map[string]func(h *history){
		"the second event counts": func(h *history) {
			h.Heard[0].Answer, h.Heard[1].Answer, h.Ends[0].Result, h.Ledger[0].Nonce = "q", "q", "q", "q"
		},
		"two events are first":         func(h *history) { h.Emits[1].First = true },
		"no event is first":            func(h *history) { h.Emits[2].First = false },
		"two answers":                  func(h *history) { h.Heard[0].Answer = timedOut },
		"an event that nobody emitted": func(h *history) { h.Emits = h.Emits[2:] },
		"a time-out after the event":   func(h *history) { h.Before = map[int64]bool{jobB: true} },
		"a time-out of one that waits": func(h *history) { h.Heard[2].Work = "flow/4" },
		"the other branch":             func(h *history) { h.Calls[3].Work = "flow/3#" + stepCame },
		"both branches": func(h *history) {
			h.Calls = append(h.Calls, call{order: order{Work: "flow/1#" + stepLate, Form: formFlow, Job: jobA}, Key: "k", What: "applied"})
		},
		"the wrong order":               func(h *history) { h.Calls[0], h.Calls[1] = h.Calls[1], h.Calls[0] },
		"the end without the beginning": func(h *history) { h.Calls = h.Calls[1:] },
		"a cancelled one had gone on":   func(h *history) { h.Calls[4].Work = "flow/4#" + stepCame },
		"a result that it did not hear": func(h *history) { h.Ends[1].Result, h.Ledger[1].Nonce = "r", "r" },
	} {
		h := soundFlows()
		spoil(h)
		v := check(h)
		require.NotEmpty(t, v.Violations[vFlow], name)
		require.Len(t, v.Violations, 1, name)
	}
	h := soundFlows()
	h.Calls = append(h.Calls, h.Calls[0])
	require.NotEmpty(t, check(h).Violations[vCall], "an effect twice")
}
