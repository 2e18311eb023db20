package executor

import (
	"slices"
	"sync"
	"time"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/slot"
	"github.com/onceq/onceq/internal/task"
)

// unit is what one handler call gets: one task, or the tasks of a batch.
type unit struct {
	tasks []*task.Task
	since time.Time // when it began to wait for a slot
}

// tooLate reports whether the slot of one of the tasks is too long ago for it to start.
func (u unit) tooLate(far *slot.Distance) bool {
	return slices.ContainsFunc(u.tasks, func(t *task.Task) bool { return far.Late(t.Hold) })
}

// slots are where the handlers of one queue run. A slot is no goroutine: one begins when there is work for a
// slot, and ends when nothing waits.
type slots struct {
	claimer.Slots
	far  *slot.Distance
	keep int64 // how long history is kept if the kind does not say, as in finish.Outcome.Keep

	mu      sync.Mutex // guards what follows
	waiting []unit     // what was claimed and waits for a slot
	late    []unit     // what waited too long for the rate of a limit, and needs a new time (late.go)
	asking  bool       // a goroutine asks for new times
	running int        // goroutines, one for each slot that is in use
}

// put adds units that wait, behind the others or first, and returns how many goroutines are to begin for
// them.
func (s *slots) put(units []unit, first bool) (begin int) {
	now := time.Now()
	for i := range units {
		units[i].since = now
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if first {
		s.waiting = append(units, s.waiting...)
	} else {
		s.waiting = append(s.waiting, units...)
	}
	begin = min(s.Count-s.running, len(s.waiting))
	s.running += begin
	return begin
}

// take returns the unit that has waited longest. If none waits, the goroutine that asks has to end. If ask is
// true, another one has to begin, which asks for new times for what is late.
func (s *slots) take() (u unit, ok, ask bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) > 0 && s.waiting[0].tooLate(s.far) {
		// The others that are late ask together with the first one.
		s.waiting = slices.DeleteFunc(s.waiting, func(u unit) bool {
			late := u.tooLate(s.far)
			if late {
				s.late = append(s.late, u)
			}
			return late
		})
		ask = !s.asking
		s.asking = true
	}
	if len(s.waiting) == 0 {
		s.waiting = nil
		s.running--
		return u, false, ask
	}
	u, s.waiting[0] = s.waiting[0], unit{}
	s.waiting = s.waiting[1:]
	return u, true, ask
}

// takeIf returns the units that wait and for which this holds.
func (s *slots) takeIf(this func(unit) bool) (taken []unit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting = slices.DeleteFunc(s.waiting, func(u unit) bool {
		ok := this(u)
		if ok {
			taken = append(taken, u)
		}
		return ok
	})
	return taken
}

// takeLate returns all units that need a new time. If there are none, the goroutine that asks for them has to
// end.
func (s *slots) takeLate() []unit {
	s.mu.Lock()
	defer s.mu.Unlock()
	late := s.late
	s.late, s.asking = nil, len(late) > 0
	return late
}

// takeAll returns all units that wait.
func (s *slots) takeAll() []unit {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := append(s.waiting, s.late...)
	s.waiting, s.late = nil, nil
	return all
}

// anyWait reports whether anything waits for a slot.
func (s *slots) anyWait() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waiting) > 0
}
