package onceq

import (
	"context"
	"log/slog"
	"maps"
	"slices"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
)

// renew gets new slots for the tasks that missed theirs while they waited for a handler, for all of a limit in one round trip: if
// each asked when its turn came, the others would miss theirs meanwhile. So would those of the first limits if they waited for the
// answers of the others. Those that may start now wait in front of all others. The rest is given back.
func (x *executor) renew(s *slots) {
	for units := s.takeLate(); len(units) > 0; units = s.takeLate() {
		for _, part := range byLimit(units) {
			x.begin(s, s.put(x.renewed(s, part), true))
			if x.stopping.Load() {
				for _, u := range s.takeAll() {
					x.giveBack(u.tasks)
				}
			}
		}
	}
}

// byLimit parts units by the limit of their first jobs. A batch may have jobs of several limits, and waits for all of them.
func byLimit(units []unit) (parts [][]unit) {
	place := make(map[string]int)
	for _, u := range units {
		limit := u.tasks[0].hold.Limit
		if slices.ContainsFunc(u.tasks, func(t *task) bool { return t.hold.Limit != limit }) {
			parts = append(parts, []unit{u})
			continue
		}
		i, ok := place[limit]
		if !ok {
			i = len(parts)
			place[limit], parts = i, append(parts, nil)
		}
		parts[i] = append(parts[i], u)
	}
	return parts
}

// renewed returns those of the units that may start now.
func (x *executor) renewed(s *slots, units []unit) (ready []unit) {
	var tasks []*task
	for _, u := range units {
		tasks = append(tasks, u.tasks...)
	}
	start := x.newSlots(tasks, x.q.far.Late)
	for _, u := range units {
		stay := slices.DeleteFunc(slices.Clone(u.tasks), func(t *task) bool { return !start[t] })
		if leave := slices.DeleteFunc(u.tasks, func(t *task) bool { return start[t] }); len(leave) > 0 {
			x.left(s, leave)
		}
		if len(stay) > 0 {
			ready = append(ready, unit{tasks: stay, since: u.since})
		}
	}
	return ready
}

// newSlots gets new slots for those of the tasks that need them. It ends those that cannot start now: they have been given back until
// their slots, or are given back if they got none, because of an error.
func (x *executor) newSlots(tasks []*task, needs func(*hold.Hold) bool) (start map[*task]bool) {
	start = make(map[*task]bool)
	asked := make(map[*hold.Hold]*task)
	for _, t := range tasks {
		if start[t] = !needs(t.hold); !start[t] {
			asked[t.hold] = t
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(x.base), x.lease)
	defer cancel()
	now, later, err := x.q.far.Take(ctx, x.q.store, x.db, slices.Collect(maps.Keys(asked)))
	for _, l := range now {
		start[asked[l]] = true
		delete(asked, l)
	}
	for _, l := range later {
		x.tasks.mu.Lock()
		x.tasks.forget(l)
		x.tasks.mu.Unlock()
		if asked[l].quarantined() && !x.q.far.Late(l) {
			x.suspended(l)
		}
		delete(asked, l)
		x.woken(l.Queue)
	}
	if err != nil {
		x.q.log.Warn("onceq: jobs that missed their slots got no new ones, and are given back", slog.Int("jobs", len(asked)), slog.Any("error", err))
	}
	for _, t := range asked {
		x.end(t, finish.Outcome{Hold: t.hold, State: finish.Waiting})
	}
	return start
}

// mayRunAlone reports whether a task of a batch may run by itself now. The rate of its limit counts that as another start if
// the batch was called: then it needs a new slot. A task that may not is ended.
func (x *executor) mayRunAlone(t *task, called bool) bool {
	if !t.hold.Slotted() || !called && !x.q.far.Late(t.hold) {
		return true
	}
	return x.newSlots([]*task{t}, (*hold.Hold).Slotted)[t]
}
