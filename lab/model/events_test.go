package model

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// This file is the model of one job that awaits one event: two workers, of which one may have lost its lease, an emitter
// whose transaction may be rolled back, and the time-out. It explores every order of their steps. A statement that waits for
// a row is a step that is not possible yet.

// eventVariant is a mistake that the checks must find.
type eventVariant struct {
	beginsAlone  bool // who begins to wait looks for the event and writes its row, and does not meet the emitter at the fence
	givesBlindly bool // who gives the job back does not lock the row of the wait
	oneSnapshot  bool // the emitter looks for the job in the snapshot in which it began to mark the row
	forgets      bool // a time-out is answered and not recorded
	staleNotes   bool // a stale worker's note replaces a later one
}

type eventWorker struct {
	phase  int8 // 0 has no job; 1 runs; 2 has the fence and begins to wait; 3 was told to wait; 4 has the row, or left it, and gives back
	claim  int8
	paused bool // found the row locked
	came   bool // found that the event had come
	locks  bool
}

type eventEmitter struct {
	phase      int8 // 0 idle; 1 has written the fence; 2 has marked the row; 3 has looked for the job
	saw        bool // the job was given back when the marking began
	mark, wake bool
}

// eventState is everything. It is a map key.
type eventState struct {
	holder, claims int8 // of the job
	due, done      bool
	row            bool
	state, noted   int8 // of the row
	locked         int8 // the row: 1 the emitter, 2 and 3 a worker
	fence          int8 // the same for the fence
	event, timeUp  bool
	emits          int8 // transactions of the emitter so far
	workers        [2]eventWorker
	emitter        eventEmitter
	answer         int8 // what a run was told: 1 came, 2 timed out
	broken         string
}

const eventClaims = 3

func (s *eventState) tell(answer int8) {
	if s.answer != 0 && s.answer != answer {
		s.broken = "two runs heard different answers"
	}
	s.answer = answer
}

func (v eventVariant) next(s eventState) (all []move[eventState]) {
	step := func(name string, do func(*eventState)) {
		n := s
		do(&n)
		all = append(all, move[eventState]{name, n})
	}
	for i, w := range s.workers {
		me, lock := int8(i+1), int8(i+2)
		holds := s.holder == me && s.claims == w.claim
		does := func(what string, do func(n *eventState, w *eventWorker)) {
			step("worker "+string(rune('0'+i))+" "+what, func(n *eventState) { do(n, &n.workers[i]) })
		}
		if w.phase > 0 {
			does("crashes", func(n *eventState, w *eventWorker) {
				if n.locked == lock {
					n.locked = 0
				}
				if n.fence == lock {
					n.fence = 0
				}
				*w = eventWorker{}
			})
		}
		switch w.phase {
		case 0:
			if s.holder == 0 && s.due && !s.done && s.claims < eventClaims && !s.emitter.wake {
				does("claims", func(n *eventState, w *eventWorker) {
					n.claims++
					n.holder = me
					*w = eventWorker{phase: 1, claim: n.claims}
				})
			}
		case 1:
			switch {
			case !s.row && v.beginsAlone:
				if holds {
					does("begins to wait", func(n *eventState, w *eventWorker) {
						w.phase, w.came = 2, n.event
					})
				}
			case !s.row && s.fence == 0 && holds:
				does("writes the fence", func(n *eventState, w *eventWorker) { n.fence, w.phase, w.came = lock, 2, n.event })
			case !s.row && s.fence == 1 && holds:
				does("does not wait for the emitter", func(n *eventState, w *eventWorker) { w.phase = 4; w.paused = true })
			case s.row && s.state > 0:
				does("hears", func(n *eventState, w *eventWorker) {
					if holds {
						n.tell(n.state)
						n.done = true
						n.holder = 0
					}
					*w = eventWorker{}
				})
			case s.row && s.timeUp && holds:
				if s.locked == 0 {
					does("decides the time-out", func(n *eventState, w *eventWorker) {
						if !v.forgets {
							n.state = 2
						}
						n.tell(2)
					})
				} else {
					does("leaves the time-out to the emitter", func(n *eventState, w *eventWorker) { w.phase = 4; w.paused = true })
				}
			case s.row && !s.timeUp:
				does("is told to wait", func(n *eventState, w *eventWorker) { w.phase = 3 })
			}
		case 2:
			does("writes its row", func(n *eventState, w *eventWorker) {
				n.row, n.state, n.noted = true, 0, 0
				if w.came {
					n.state = 1
				}
				if n.fence == lock {
					n.fence = 0
				}
				w.phase, w.came = 1, false
			})
		case 3:
			does("looks at its row", func(n *eventState, w *eventWorker) {
				w.phase, w.came = 4, n.state == 1
				switch {
				case v.givesBlindly:
				case n.locked == 0:
					n.locked, w.locks = lock, true
				default:
					w.paused = true
				}
			})
		case 4:
			does("gives back", func(n *eventState, w *eventWorker) {
				if n.holder == me && n.claims == w.claim {
					n.holder, n.due = 0, w.paused || w.came || n.timeUp
				}
				if !w.paused && n.row {
					if n.noted = max(n.noted, w.claim); v.staleNotes {
						n.noted = w.claim
					}
				}
				if w.locks {
					n.locked = 0
				}
				*w = eventWorker{}
			})
		}
	}
	if s.holder > 0 {
		step("the lease runs out", func(n *eventState) { n.holder, n.due = 0, true })
	}
	if !s.timeUp {
		step("the time is over", func(n *eventState) { n.timeUp, n.due = true, true })
	}
	given := s.holder == 0 && !s.due && !s.done
	e := s.emitter
	does := func(what string, do func(n *eventState, e *eventEmitter)) {
		step("the emitter "+what, func(n *eventState) { do(n, &n.emitter) })
	}
	switch {
	case e.phase == 0 && !s.event && s.emits < 2 && (s.fence == 0 || v.beginsAlone):
		does("writes the fence", func(n *eventState, e *eventEmitter) {
			n.emits++
			e.phase = 1
			if !v.beginsAlone {
				n.fence = 1
			}
			e.saw = given && n.noted == n.claims
		})
	case e.phase == 1 && s.locked == 0:
		does("marks the row", func(n *eventState, e *eventEmitter) {
			e.phase = 2
			if n.row && n.state == 0 {
				n.locked, e.mark = 1, true
			}
		})
	case e.phase == 2:
		does("looks for the job", func(n *eventState, e *eventEmitter) {
			e.phase = 3
			sees := given && n.noted == n.claims
			if v.oneSnapshot {
				sees = e.saw && given
			}
			e.wake = e.mark && sees
		})
	}
	if e.phase > 0 {
		does("is rolled back", func(n *eventState, e *eventEmitter) {
			if n.locked == 1 {
				n.locked = 0
			}
			if n.fence == 1 {
				n.fence = 0
			}
			*e = eventEmitter{}
		})
	}
	if e.phase == 3 {
		does("commits", func(n *eventState, e *eventEmitter) {
			n.event = true
			if e.mark {
				n.state = 1
			}
			n.due = n.due || e.wake
			if n.locked == 1 {
				n.locked = 0
			}
			if n.fence == 1 {
				n.fence = 0
			}
			*e = eventEmitter{}
		})
	}
	return all
}

func (s eventState) wrong() string {
	open := s.emitter.phase > 0
	for _, w := range s.workers {
		open = open || w.phase > 0
	}
	switch {
	case s.broken != "":
		return s.broken
	case !open && s.event && s.holder == 0 && !s.due && !s.done:
		return "the event came, and the job sleeps on"
	case !open && s.event && s.row && s.state == 0 && !s.done:
		return "the event came, and the job's row does not say so"
	}
	return ""
}

// explore visits every reachable state. It returns how many there are, and the shortest path to a wrong one.
func (v eventVariant) explore() (states int, wrong string) {
	return explore(eventState{due: true}, v.next, eventState.wrong, func(s eventState) bool { return s.done || s.claims == eventClaims }, "from here the job cannot be finished any more")
}

// No order of steps loses a wake-up or gives two answers.
func TestEvents(t *testing.T) {
	t.Parallel()
	states, wrong := eventVariant{}.explore()
	require.Empty(t, wrong)
	require.Greater(t, states, 1000)
	t.Log(states, "states")
}

// The checks find each mistake.
func TestEvents_FindsMistakes(t *testing.T) {
	t.Parallel()
	const sleeps = "the event came, and the job sleeps on"
	for name, c := range map[string]struct {
		v    eventVariant
		want string
	}{
		"begins alone":                {eventVariant{beginsAlone: true}, "the event came, and the job's row does not say so"},
		"gives back blindly":          {eventVariant{givesBlindly: true}, sleeps},
		"looks in one snapshot":       {eventVariant{oneSnapshot: true}, sleeps},
		"forgets a time-out":          {eventVariant{forgets: true}, "two runs heard different answers"},
		"takes a stale worker's note": {eventVariant{staleNotes: true}, sleeps},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, wrong := c.v.explore()
			t.Log(wrong)
			if !strings.HasPrefix(wrong, c.want) {
				t.Fatalf("found: %q", wrong)
			}
		})
	}
}
