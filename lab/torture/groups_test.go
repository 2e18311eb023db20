package main

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
)

const (
	idJoin, idPart       = 100, 101 // the parts have the ids from 101 on
	jobJoin        int64 = idJoin << 36
	joinName             = "join/7"
)

func partJob(i int) int64 { return int64(idPart+i) << 36 }

// soundGroups adds a group to a sound history: all its parts ended, the last of them dead under DeadRun, and then the job that
// waited ran and was told of them.
func soundGroups(t *testing.T) *history {
	h := sound()
	join := work{Name: joinName, Form: formJoin}
	parts := join.members()
	step := func(what string, member int64, state onceq.State, at int) {
		h.Groups = append(h.Groups, groupStep{What: what, Group: idJoin, Member: member, State: state, Rule: onceq.DeadRun, At: second(at)})
	}
	h.Trail = append(h.Trail, stepOf("accepted", jobJoin, joinName))
	step("waits", 0, 0, 1)
	names := make([]string, len(parts)+1) // the last one is added, and can never be done
	for i, p := range parts {
		names[i] = p.Name
	}
	for names[len(parts)] = "part/7/0+0"; !(work{Name: names[len(parts)], Form: formPart}).hopeless(); names[len(parts)] += "0" {
	}
	for i, name := range names {
		h.Trail = append(h.Trail, stepOf("accepted", partJob(i), name), stepOf("claimed", partJob(i), name), stepOf("gone", partJob(i), name))
		step("member", int64(idPart+i), 0, 1)
		e, state := end{Job: partJob(i), Work: name, Form: formPart, State: "completed"}, onceq.StateCompleted
		row := joinedRow{Job: jobJoin, Member: int64(idPart + i), State: state, Result: "n"}
		if i == len(parts) {
			e.State, row.State, row.Result = "dead", onceq.StateDead, ""
		} else {
			h.Ledger = append(h.Ledger, entry{Work: name, Form: formPart, Job: partJob(i), Nonce: "n"})
		}
		step("member", int64(idPart+i), row.State, 2)
		h.Ends, h.Joined = append(h.Ends, e), append(h.Joined, row)
	}
	step("left", 0, 0, 3)
	h.Trail = append(h.Trail, stepOf("claimed", jobJoin, joinName), stepOf("gone", jobJoin, joinName))
	h.Ends = append(h.Ends, end{Job: jobJoin, Work: joinName, Form: formJoin, State: "completed"})
	h.Ledger = append(h.Ledger, entry{Work: joinName, Form: formJoin, Job: jobJoin, Nonce: "j"})
	require.NotEmpty(t, parts)
	return h
}

func stepOf(what string, job int64, name string) step { return step{What: what, Job: job, Work: name} }

func TestCheckGroups_ASoundGroupHasNoViolation(t *testing.T) {
	v := check(soundGroups(t))
	require.Empty(t, v.Violations)
	require.Equal(t, 1, v.Joins)
	require.Equal(t, len(work{Name: joinName, Form: formJoin}.members())+1, v.Joined)
}

// A group is enqueued again after the job that waits was cancelled. Its parts are older then, and nobody need tell their results.
func TestCheckGroups_ResultsOfPartsThatAnEarlierGroupHad(t *testing.T) {
	h := soundGroups(t)
	h.Joined[0].Result = ""
	found := func() int {
		return len(check(h).Violations[vGroup])
	}
	require.Equal(t, 1, found())
	h.Ends = append(h.Ends, end{Job: 99 << 36, Work: joinName, Form: formJoin, State: "cancelled"})
	require.Zero(t, found())
}

func TestCheckGroups_FindsEachViolation(t *testing.T) {
	last := func(h *history) *groupStep { return &h.Groups[len(h.Groups)-2] }
	for name, spoil := range map[string]func(h *history){
		"a member is unfinished": func(h *history) { last(h).State = 0 },
		"a member is held":       func(h *history) { last(h).State = onceq.StateHeld },
		"a dead one is waited for": func(h *history) {
			for i := range h.Groups {
				h.Groups[i].Rule = onceq.DeadWait
			}
		},
		"one that is to be cancelled": func(h *history) {
			for i := range h.Groups {
				h.Groups[i].Rule = onceq.DeadCancel
			}
		},
		"a member ends too late": func(h *history) {
			at := slices.IndexFunc(h.Trail, func(s step) bool { return s.What == "gone" && s.Job == partJob(0) })
			gone := h.Trail[at]
			h.Trail = append(slices.Delete(h.Trail, at, at+1), gone)
		},
		"it waits too long":              func(h *history) { h.Groups[len(h.Groups)-1].At = second(100) },
		"it waits for ever":              func(h *history) { h.Groups, last(h).State = h.Groups[:len(h.Groups)-1], onceq.StateCompleted },
		"a wrong result":                 func(h *history) { h.Joined[0].Result = "m" },
		"a lost result":                  func(h *history) { h.Joined[0].Result = "" },
		"a wrong state":                  func(h *history) { h.Joined[0].State = onceq.StateCancelled },
		"a dead one that ran":            func(h *history) { h.Joined[len(h.Joined)-1].State = onceq.StateCompleted },
		"told of a member twice":         func(h *history) { h.Joined = append(h.Joined, h.Joined[0]) },
		"not told of a member":           func(h *history) { h.Joined = h.Joined[1:] },
		"not told of one that was added": func(h *history) { h.Joined = h.Joined[:len(h.Joined)-1] },
	} {
		h := soundGroups(t)
		spoil(h)
		v := check(h)
		require.NotEmpty(t, v.Violations[vGroup], name)
		require.Len(t, v.Violations, 1, name)
	}
}
