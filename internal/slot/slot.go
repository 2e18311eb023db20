// Package slot knows when a job must start whose limit has a rate: at its slot, and never much later, because
// the jobs behind it keep their own slots. One that is too late gets another slot.
package slot

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Distance is how long the messages take that bring slots. What it knows of a slot's time is when its message
// was sent, so where each takes as long as a job may be late, all would be, and none would ever start. One
// that is slow by itself, as in a process that was frozen, counts for nothing.
type Distance struct {
	mu   sync.Mutex
	sent time.Time        // the latest message
	took [8]time.Duration // by the latest ones
	n    int              // how many there were
	low  atomic.Int64     // the shortest of them, if that is much of table.SlotLate; else 0
}

// Saw records that an answer has come to the message that was sent at this time. It may be called for each
// lease in it.
func (d *Distance) Saw(sent time.Time) {
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

// Late reports whether the job's slot is too long ago for it to start.
func (d *Distance) Late(h *hold.Hold) bool {
	return h.Slotted() && time.Since(h.Slot) > table.SlotLate+time.Duration(d.low.Load())
}

// Take gets new slots for leases that start too late, and returns those that may start at once, and those
// that were given back until their slots. Each limit is one message, so that the line is not locked while
// this process is slow.
func (d *Distance) Take(ctx context.Context, store *pg.Store, db pg.DB, holds []*hold.Hold) (now,
	later []*hold.Hold, err error) {
	byLimit := make(map[string][]*hold.Hold)
	for _, h := range holds {
		byLimit[h.Limit] = append(byLimit[h.Limit], h)
	}
	for limit, holds := range byLimit {
		slices.SortFunc(holds, func(a, b *hold.Hold) int { return cmp.Compare(a.ID, b.ID) })
		ids, claims, holders := hold.Guards(holds)
		var start, taken, back, ahead []int64
		var waited int64 // microseconds from when the message arrived to the slots
		began := time.Now()
		args := []any{"/" + limit, ids, claims, holders}
		err = store.Send(ctx, db, pg.Rare, stmt.TakeSlots, args, pg.Row(&start, &taken, &waited, &back, &ahead))
		if err != nil {
			return now, later, fmt.Errorf("onceq: a new slot: %w", err)
		}
		d.Saw(began)
		for _, h := range holds {
			switch at := began.Add(time.Duration(waited) * time.Microsecond); {
			case slices.Contains(start, h.ID):
				h.Slot = at
			case slices.Contains(taken, h.ID):
				h.Slot = at.Add(-table.SlotLate / 2) // at the earliest
			default:
				if i, ok := slices.BinarySearch(back, h.ID); ok {
					h.Slot = time.Now().Add(time.Duration(ahead[i]) * time.Microsecond) // at the latest
				}
				later = append(later, h)
				continue
			}
			now = append(now, h)
		}
	}
	return now, later, nil
}
