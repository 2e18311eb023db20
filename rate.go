package onceq

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// slotted reports whether the job must start at its slot.
func (l *Lease) slotted() bool { return !l.slot.IsZero() }

// tooLate reports whether the job's slot is too long ago for it to start.
func (l *Lease) tooLate() bool {
	return l.slotted() && time.Since(l.slot) > table.SlotLate+l.q.far.least()
}

// distance is how long the messages take that bring slots. What it knows of a slot's time is when its message was sent, so
// where each takes as long as a job may be late, all would be, and none would ever start. One that is slow by itself, as in a
// process that was frozen, counts for nothing.
type distance struct {
	mu   sync.Mutex
	sent time.Time        // the latest message
	took [8]time.Duration // by the latest ones
	n    int              // how many there were
	low  atomic.Int64     // the shortest of them, if that is much of table.SlotLate; else 0
}

// saw records that an answer has come to the message that was sent at this time. It may be called for each lease in it.
func (d *distance) saw(sent time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if sent.Equal(d.sent) {
		return
	}
	d.sent, d.took[d.n%len(d.took)] = sent, time.Since(sent)
	if d.n++; d.n < len(d.took) {
		return
	}
	low := slices.Min(d.took[:])
	if low < table.SlotLate/2 {
		low = 0
	}
	d.low.Store(int64(low))
}

// least is how much later jobs may start because of it.
func (d *distance) least() time.Duration { return time.Duration(d.low.Load()) }

// reslot gets new slots for leases that start too late, and returns those that may start at once, and those that were given
// back until their slots. Each limit is one message, so that the line is not locked while this process is slow.
func reslot(ctx context.Context, q *Queue, db *pgxpool.Pool, leases []*Lease) (now, later []*Lease, err error) {
	byLimit := make(map[string][]*Lease)
	for _, l := range leases {
		byLimit[l.Limit] = append(byLimit[l.Limit], l)
	}
	for limit, leases := range byLimit {
		slices.SortFunc(leases, func(a, b *Lease) int { return cmp.Compare(a.ID, b.ID) })
		ids, claims, holders := guards(leases)
		var start, taken, back, ahead []int64
		var waited int64 // microseconds from when the message arrived to the slots
		began := time.Now()
		err = q.store.Send(ctx, db, pg.Rare, stmt.TakeSlots, []any{"/" + limit, ids, claims, holders}, pg.Row(&start, &taken, &waited, &back, &ahead))
		if err != nil {
			return now, later, fmt.Errorf("onceq: a new slot: %w", err)
		}
		q.far.saw(began)
		for _, l := range leases {
			switch at := began.Add(time.Duration(waited) * time.Microsecond); {
			case slices.Contains(start, l.ID):
				l.slot = at
			case slices.Contains(taken, l.ID):
				l.slot = at.Add(-table.SlotLate / 2) // at the earliest
			default:
				if i, ok := slices.BinarySearch(back, l.ID); ok {
					l.slot = time.Now().Add(time.Duration(ahead[i]) * time.Microsecond) // at the latest
				}
				later = append(later, l)
				continue
			}
			now = append(now, l)
		}
	}
	return now, later, nil
}

// onlyOnTime returns those of the leases that Claim may return: it gives back those that missed their slots, and start later.
func onlyOnTime(ctx context.Context, q *Queue, leases []*Lease) ([]*Lease, error) {
	var late []*Lease
	for _, l := range leases {
		if l.tooLate() {
			late = append(late, l)
		}
	}
	if len(late) == 0 {
		return leases, nil
	}
	start, _, err := reslot(ctx, q, q.store.Pool, late)
	leases = slices.DeleteFunc(leases, func(l *Lease) bool { return slices.Contains(late, l) && !slices.Contains(start, l) })
	if err != nil && len(leases) > 0 { // these are the caller's; the leases of the others run out
		q.log.WarnContext(ctx, "onceq: jobs that missed their slots got no new ones, and their leases run out", slog.Int("jobs", len(late)-len(start)), slog.Any("error", err))
		return leases, nil
	}
	return leases, err
}

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
		limit := u.tasks[0].lease.Limit
		if slices.ContainsFunc(u.tasks, func(t *task) bool { return t.lease.Limit != limit }) {
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
	start := x.newSlots(tasks, (*Lease).tooLate)
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
func (x *executor) newSlots(tasks []*task, needs func(*Lease) bool) (start map[*task]bool) {
	start = make(map[*task]bool)
	asked := make(map[*Lease]*task)
	for _, t := range tasks {
		if start[t] = !needs(t.lease); !start[t] {
			asked[t.lease] = t
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(x.base), x.lease)
	defer cancel()
	now, later, err := reslot(ctx, x.q, x.db, slices.Collect(maps.Keys(asked)))
	for _, l := range now {
		start[asked[l]] = true
		delete(asked, l)
	}
	for _, l := range later {
		x.tasks.mu.Lock()
		x.tasks.forget(l)
		x.tasks.mu.Unlock()
		if asked[l].quarantined() && !l.tooLate() {
			x.suspended(l)
		}
		delete(asked, l)
		x.woken(l.Queue)
	}
	if err != nil {
		x.q.log.Warn("onceq: jobs that missed their slots got no new ones, and are given back", slog.Int("jobs", len(asked)), slog.Any("error", err))
	}
	for _, t := range asked {
		x.end(t, outcome{lease: t.lease, state: StateWaiting})
	}
	return start
}

// mayRunAlone reports whether a task of a batch may run by itself now. The rate of its limit counts that as another start if
// the batch was called: then it needs a new slot. A task that may not is ended.
func (x *executor) mayRunAlone(t *task, called bool) bool {
	if !t.lease.slotted() || !called && !t.lease.tooLate() {
		return true
	}
	return x.newSlots([]*task{t}, (*Lease).slotted)[t]
}
