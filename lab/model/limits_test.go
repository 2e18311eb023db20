package model

import (
	"slices"
	"strings"
	"testing"
)

// This file is the model of a limit that the jobs of several lanes share. A job waits for its lane, then, with the place of
// its lane, for the limit; then it is live. It explores every order of the steps of completions, promoters of the lanes and of
// the limit, failures, lost leases, redrives, and changes of the limit. How a lane's promoter and a completion meet in
// one lane is explored in lanes_test.go; here each of these is one step for a lane, and two for the limit, where they meet.

const limitJobs = 4 // two in each of two lanes

// limitVariant is a mistake that the checks must find, or a way in which a limit is declared.
type limitVariant struct {
	cap     int8
	changes int8 // how often the limit changes
	rated   bool // completions leave the limit to its promoter

	leavesLaneOnRetry  bool // a job that waits for its next attempt does not keep the place in its lane
	laneTakesBoth      bool // the lane's promoter makes a job live without asking the limit
	passesOnSilently   bool // a job that moves on to the limit's line leaves no call
	handsOverAboveCap  bool // completions hand over although the limit was lowered
	handsOverRated     bool // completions hand over although there is a rate
	handsOverTwice     bool // the freed place goes to the first in line and to the lane's successor
	retriesWithoutSlot bool // a failed job stays live and starts again without a slot
	lateStarts         bool // a job that missed its slot starts without a new one
}

type limitPlace int8

const (
	inLane limitPlace = iota
	inLine            // has its lane's place, waits for the limit
	isLive
	runs
	isDone
)

type limitJob struct {
	place  limitPlace
	failed bool
	slot   bool // has a slot that it has not used
	late   bool // which is long ago
}

type limitState struct {
	jobs       [limitJobs]limitJob
	cap        int8
	high       int8
	lowered    bool
	epoch      int8
	laneCalled [2]bool
	called     bool
	// One transaction that completes a job is open.
	open   bool
	gone   int8    // its job, + 1
	next   [2]int8 // jobs that become live with it, + 1
	on     int8    // the job that moves on to the line, + 1
	call   bool
	slots  int8 // that were given
	starts int8
	broken string
}

func (s *limitState) live() (n int8) {
	for _, j := range s.jobs {
		if j.place == isLive || j.place == runs {
			n++
		}
	}
	return n
}

// held is how many jobs have places of a lane.
func (s *limitState) held(v limitVariant, lane int) (n int8) {
	for _, j := range s.jobs[2*lane : 2*lane+2] {
		if j.place == isLive || j.place == runs || j.place == inLine && !(v.leavesLaneOnRetry && j.failed) {
			n++
		}
	}
	return n
}

// busy says whether an open transaction has a job's row.
func (s *limitState) busy(k int8) bool {
	return s.open && (s.gone == k+1 || s.next[0] == k+1 || s.next[1] == k+1 || s.on == k+1)
}

func (s *limitState) first(lane int) int8 {
	for k := int8(2 * lane); k < int8(2*lane+2); k++ {
		if s.jobs[k].place == inLane {
			return k + 1
		}
	}
	return 0
}

func (s *limitState) inLine() int8 {
	for k := range s.jobs {
		if s.jobs[k].place == inLine && !s.busy(int8(k)) {
			return int8(k + 1)
		}
	}
	return 0
}

func (s *limitState) admit(v limitVariant, k int8) {
	s.jobs[k].place = isLive
	if v.rated && !s.jobs[k].slot {
		s.jobs[k].slot = true
		s.slots++
	}
}

func (v limitVariant) next(s limitState) (all []move[limitState]) {
	step := func(name string, do func(*limitState)) {
		n := s
		do(&n)
		if n.high = max(n.high, n.cap); n.broken == "" && n.live() > n.high {
			n.broken = "more jobs of a limit are live than it allows"
		}
		n.high = max(n.cap, min(n.high, n.live()))
		for lane := range 2 {
			places := int8(0)
			for _, j := range n.jobs[2*lane : 2*lane+2] {
				if j.place > inLane && j.place < isDone {
					places++
				}
			}
			if places > 1 && n.broken == "" {
				n.broken = "a job was overtaken in its lane"
			}
		}
		if v.rated && n.starts > n.slots && n.broken == "" {
			n.broken = "more jobs started than there were slots"
		}
		all = append(all, move[limitState]{name, n})
	}
	for lane := range 2 {
		k := s.first(lane)
		if s.laneCalled[lane] && (k == 0 || !s.busy(k-1)) {
			step("a promoter looks at a lane", func(n *limitState) {
				n.laneCalled[lane] = false
				if k > 0 && n.held(v, lane) < 1 {
					if v.laneTakesBoth {
						n.admit(v, k-1)
						return
					}
					n.jobs[k-1].place, n.called = inLine, n.called || !v.passesOnSilently
				}
			})
		}
	}
	if s.called {
		step("a promoter looks at the limit", func(n *limitState) {
			n.called = false
			if k := n.inLine(); k > 0 && n.live() < n.cap {
				n.admit(v, k-1)
				n.called = true // there may be more
			} else if k == 0 && n.open {
				n.called = true // those that wait are locked
			}
		})
	}
	if s.epoch < v.changes {
		step("the limit changes", func(n *limitState) {
			n.lowered = 3-n.cap < n.cap
			n.cap = 3 - n.cap
			n.epoch++
			n.called = true
		})
	}
	if s.lowered && !s.open && s.live() <= s.cap {
		step("completions hand over again", func(n *limitState) { n.lowered = false })
	}
	for i := range s.jobs {
		j, k, lane := s.jobs[i], int8(i), i/2
		if s.busy(k) {
			continue
		}
		switch j.place {
		case isLive:
			if v.rated && j.slot && !j.late {
				step("a slot passes", func(n *limitState) { n.jobs[i].late = true })
			}
			step("a job starts", func(n *limitState) {
				p := &n.jobs[i]
				if v.rated && p.late && !v.lateStarts {
					p.late = false // another slot
					n.slots++
				}
				if p.late && v.lateStarts {
					n.broken = "a job started long after its slot"
				}
				p.place, p.slot, p.late = runs, false, false
				n.starts++
			})
		case runs:
			if !j.failed {
				step("a job fails", func(n *limitState) {
					p := &n.jobs[i]
					p.failed = true
					switch {
					case v.retriesWithoutSlot:
						p.place = isLive
					default:
						p.place, n.called = inLine, true
						if v.leavesLaneOnRetry {
							n.laneCalled[lane] = true
						}
					}
				})
			}
			if !s.open {
				step("a completion runs", func(n *limitState) {
					n.open, n.gone = true, k+1
					hand := (!v.rated || v.handsOverRated) && (!n.lowered || v.handsOverAboveCap)
					if hand {
						n.next[0] = n.inLine()
					}
					if next := n.first(lane); next > 0 {
						if hand && (n.next[0] == 0 || v.handsOverTwice) {
							n.next[1] = next
						} else {
							n.on = next
						}
					}
					n.call = n.next == [2]int8{} || n.on > 0
				})
			}
		}
	}
	if s.open {
		step("the completion commits", func(n *limitState) {
			n.jobs[n.gone-1].place = isDone
			if n.lowered && n.live() >= n.cap && n.next != [2]int8{} && v.handsOverAboveCap {
				n.broken = "a limit above its lowered value was filled again"
			}
			for _, k := range n.next {
				if k > 0 {
					if n.jobs[k-1].place = isLive; v.rated {
						n.jobs[k-1].slot = false // it got none
					}
				}
			}
			if n.on > 0 {
				n.jobs[n.on-1].place = inLine
			}
			n.called = n.called || n.call && !(v.passesOnSilently && n.on > 0)
			n.open, n.gone, n.next, n.on, n.call = false, 0, [2]int8{}, 0, false
		})
		step("the completion is rolled back", func(n *limitState) {
			n.open, n.gone, n.next, n.on, n.call = false, 0, [2]int8{}, 0, false
		})
	}
	return all
}

func (s limitState) wrong(v limitVariant) string {
	switch {
	case s.broken != "":
		return s.broken
	case s.open:
	case !s.called && s.inLine() > 0 && s.live() < s.cap:
		return "a limit with waiting jobs and room stays still"
	}
	for lane := range 2 {
		if !s.open && !s.laneCalled[lane] && s.first(lane) > 0 && s.held(v, lane) < 1 {
			return "a lane with waiting jobs and room stays still"
		}
	}
	return ""
}

func (v limitVariant) explore() (states int, wrong string) {
	first := limitState{cap: v.cap, high: v.cap, laneCalled: [2]bool{true, true}}
	return explore(first, v.next, func(s limitState) string { return s.wrong(v) }, func(s limitState) bool {
		return !slices.ContainsFunc(s.jobs[:], func(j limitJob) bool { return j.place != isDone })
	}, "from here the jobs cannot be finished any more")
}

func TestLimits(t *testing.T) {
	t.Parallel()
	for name, v := range map[string]limitVariant{
		"one at a time":        {cap: 1},
		"two at a time":        {cap: 2},
		"the limit is lowered": {cap: 2, changes: 2},
		"the limit is raised":  {cap: 1, changes: 2},
		"with a rate":          {cap: 2, rated: true},
	} {
		t.Run(name, func(t *testing.T) {
			states, wrong := v.explore()
			t.Logf("%d states", states)
			if wrong != "" {
				t.Fatal(wrong)
			}
			if states < 500 {
				t.Fatalf("only %d states: steps that should be possible are not", states)
			}
		})
	}
}

// This tests the checks themselves: they must find each mistake.
func TestLimits_FindsMistakes(t *testing.T) {
	t.Parallel()
	const over, slots = "more jobs of a limit are live than it allows", "more jobs started than there were slots"
	for name, c := range map[string]struct {
		v    limitVariant
		want string
	}{
		"the lane's promoter does not ask the limit":     {limitVariant{cap: 1, laneTakesBoth: true}, over},
		"who moves on to the limit's line calls nobody":  {limitVariant{cap: 1, passesOnSilently: true}, "a limit with waiting jobs and room stays still"},
		"a freed place is given twice":                   {limitVariant{cap: 1, handsOverTwice: true}, over},
		"completions hand over above a lowered limit":    {limitVariant{cap: 2, changes: 1, handsOverAboveCap: true}, "a limit above its lowered value was filled again"},
		"completions hand over in spite of a rate":       {limitVariant{cap: 1, rated: true, handsOverRated: true}, slots},
		"a retry starts without a slot":                  {limitVariant{cap: 1, rated: true, retriesWithoutSlot: true}, slots},
		"a job starts although it has missed its slot":   {limitVariant{cap: 1, rated: true, lateStarts: true}, "a job started long after its slot"},
		"a job that failed leaves the place in its lane": {limitVariant{cap: 2, leavesLaneOnRetry: true}, "a job was overtaken in its lane"},
	} {
		t.Run(name, func(t *testing.T) {
			_, wrong := c.v.explore()
			t.Log(wrong)
			if !strings.HasPrefix(wrong, c.want) {
				t.Fatalf("found: %q", wrong)
			}
		})
	}
}
