package executor

import (
	"context"
	"log/slog"
	"maps"
	"slices"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/task"
)

// renew gets new slots for the tasks that missed theirs while they waited for a handler, for all of a limit
// in one round trip: if each asked when its turn came, the others would miss theirs meanwhile. So would those
// of the first limits if they waited for the answers of the others. Those that may start now wait in front of
// all others. The rest is given back.
func (x *Executor) renew(s *slots) {
	for units := s.takeLate(); len(units) > 0; units = s.takeLate() {
		for _, part := range byLimit(units) {
			x.begin(s, s.put(x.renewed(s, part), true))
			if x.stopping.Load() {
				x.giveBackAll(s)
			}
		}
	}
}

// byLimit parts units by the limit of their first jobs. A batch may have jobs of several limits, and waits
// for all of them.
func byLimit(units []unit) (parts [][]unit) {
	place := make(map[string]int)
	for _, u := range units {
		limit := u.tasks[0].Hold.Limit
		if slices.ContainsFunc(u.tasks, func(t *task.Task) bool { return t.Hold.Limit != limit }) {
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
func (x *Executor) renewed(s *slots, units []unit) (ready []unit) {
	var tasks []*task.Task
	for _, u := range units {
		tasks = append(tasks, u.tasks...)
	}
	start := x.newSlots(tasks, x.Far.Late)
	for _, u := range units {
		stay := slices.DeleteFunc(slices.Clone(u.tasks), func(t *task.Task) bool { return !start[t] })
		if leave := slices.DeleteFunc(u.tasks, func(t *task.Task) bool { return start[t] }); len(leave) > 0 {
			x.left(s, leave)
		}
		if len(stay) > 0 {
			ready = append(ready, unit{tasks: stay, since: u.since})
		}
	}
	return ready
}

// newSlots gets new slots for those of the tasks that need them. It ends those that cannot start now: they
// have been given back until their slots, or are given back if they got none, because of an error.
func (x *Executor) newSlots(tasks []*task.Task, needs func(*hold.Hold) bool) (start map[*task.Task]bool) {
	start = make(map[*task.Task]bool)
	asked := make(map[*hold.Hold]*task.Task)
	for _, t := range tasks {
		if start[t] = !needs(t.Hold); !start[t] {
			asked[t.Hold] = t
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(x.base), x.Lease)
	defer cancel()
	now, later, err := x.Far.Take(ctx, x.Store, x.Own.Outcomes, slices.Collect(maps.Keys(asked)))
	for _, l := range now {
		start[asked[l]] = true
		delete(asked, l)
	}
	for _, l := range later {
		x.Set.Forget([]finish.Outcome{{Hold: l}})
		if asked[l].Quarantined() && !x.Far.Late(l) {
			x.Suspended(l)
		}
		delete(asked, l)
		x.Live(l.Queue)
	}
	if err != nil {
		x.Log.Warn("onceq: jobs that missed their slots got no new ones, and are given back", slog.Int("jobs", len(asked)), slog.Any("error", err))
	}
	for _, t := range asked {
		x.end(t, finish.Outcome{Hold: t.Hold, State: table.StateWaiting})
	}
	return start
}

// mayRunAlone reports whether a task of a batch may run by itself now. The rate of its limit counts that as
// another start if the batch was called: then it needs a new slot. A task that may not is ended.
func (x *Executor) mayRunAlone(t *task.Task, called bool) bool {
	if !t.Hold.Slotted() || !called && !x.Far.Late(t.Hold) {
		return true
	}
	return x.newSlots([]*task.Task{t}, (*hold.Hold).Slotted)[t]
}
