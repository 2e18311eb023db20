package model

import (
	"slices"
	"strings"
)

// move is a step that leads to a state.
type move[S comparable] struct {
	name string
	to   S
}

// explore visits every state that can be reached from the first one, those with the fewest steps first. It returns how many
// there are, and what is wrong with the first one that is, with the shortest path to it. If no state is wrong by itself,
// nothing may get stuck: from each of them one that is over must be reachable, and stuck says what it means if not.
func explore[S comparable](first S, next func(S) []move[S], wrong func(S) string, over func(S) bool, stuck string) (states int, what string) {
	all := []S{first}
	place := map[S]int32{first: 0} // in all
	from := []int32{0}             // how a state was reached first
	var to []int32                 // where the moves lead, those of one state behind those of the one before
	var end []int                  // of a state's moves in to
	trace := func(s int32, what string) string {
		var steps []string
		for ; s != 0; s = from[s] {
			moves := next(all[from[s]])
			steps = append(steps, moves[slices.IndexFunc(moves, func(m move[S]) bool { return m.to == all[s] })].name)
		}
		slices.Reverse(steps)
		return strings.Join(append([]string{what}, steps...), "\n\t")
	}
	var can []bool // whether an end can be reached
	for i := int32(0); int(i) < len(all); i++ {
		s := all[i]
		if what := wrong(s); what != "" {
			return len(all), trace(i, what)
		}
		can = append(can, over(s))
		for _, m := range next(s) {
			at, ok := place[m.to]
			if !ok {
				at = int32(len(all))
				place[m.to] = at
				all, from = append(all, m.to), append(from, i)
			}
			to = append(to, at)
		}
		end = append(end, len(to))
	}
	for again := true; again; { // most moves lead onward, so a few rounds from the back are enough
		again = false
		for i, last := len(all)-1, len(to); i >= 0; i-- {
			first := 0
			if i > 0 {
				first = end[i-1]
			}
			if !can[i] && slices.ContainsFunc(to[first:last], func(s int32) bool { return can[s] }) {
				can[i], again = true, true
			}
			last = first
		}
	}
	if s := slices.Index(can, false); s >= 0 {
		return len(all), trace(int32(s), stuck)
	}
	return len(all), ""
}
