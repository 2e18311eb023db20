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
	place := map[S]int32{first: 0}       // in all
	from, by := []int32{0}, []string{""} // how a state was reached first
	before := [][]int32{nil}             // from where a state can be reached
	trace := func(s int32, what string) string {
		var steps []string
		for ; s != 0; s = from[s] {
			steps = append(steps, by[s])
		}
		slices.Reverse(steps)
		return strings.Join(append([]string{what}, steps...), "\n\t")
	}
	var ends []int32
	for i := int32(0); int(i) < len(all); i++ {
		s := all[i]
		if what := wrong(s); what != "" {
			return len(all), trace(i, what)
		}
		if over(s) {
			ends = append(ends, i)
		}
		for _, m := range next(s) {
			at, ok := place[m.to]
			if !ok {
				at = int32(len(all))
				place[m.to] = at
				all, from, by, before = append(all, m.to), append(from, i), append(by, m.name), append(before, nil)
			}
			before[at] = append(before[at], i)
		}
	}
	can := make([]bool, len(all))
	for len(ends) > 0 {
		s := ends[len(ends)-1]
		ends = ends[:len(ends)-1]
		if !can[s] {
			can[s] = true
			ends = append(ends, before[s]...)
		}
	}
	if s := slices.Index(can, false); s >= 0 {
		return len(all), trace(int32(s), stuck)
	}
	return len(all), ""
}
