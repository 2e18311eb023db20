package onceq

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// Workers count what becomes of their jobs, so that people can see rates without a monitoring system. A
// worker counts in memory, where it handles outcomes anyway, and adds what it has counted to three rows for
// each queue and kind, which all workers share: that of the minute that is over, of its ten minutes and of
// its hour. So a job costs no statement, and the table grows with kinds and not with workers. A worker that
// is killed loses what it has counted since the last full minute. If the connection breaks in the moment of
// that statement, a minute may be counted twice. Nothing depends on these rows.

// tally is what one run has counted and not written yet.
type tally struct {
	q  *Queue
	db DB // the worker's own for outcomes: this waits for locks

	mu  sync.Mutex // guards all
	all map[tallied]*count.Count
}

type tallied struct{ queue, kind string }

// of returns the counter of a queue and kind. The caller holds mu.
func (t *tally) of(key tallied) *count.Count {
	c := t.all[key]
	if c == nil {
		if t.all == nil {
			t.all = make(map[tallied]*count.Count)
		}
		c = new(count.Count)
		t.all[key] = c
	}
	return c
}

// started counts jobs that a handler gets now.
func (t *tally) started(tasks []*task) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, one := range tasks {
		c := t.of(tallied{one.hold.Queue, one.hold.Kind})
		if c.Started++; one.hold.Waited >= 0 {
			count.AddTo(&c.Waits, count.RangeOf(one.hold.Waited+now.Sub(one.hold.Began)), 1)
		}
	}
}

// ended counts outcomes that are written, which those in left are not. Those of stale leases are not either,
// unless an earlier try has written them, or the handler or the commit of its transaction has completed the
// job.
func (t *tally) ended(outcomes []finish.Outcome, stale []*hold.Hold, left []finish.Outcome) {
	var unwritten map[*hold.Hold]bool
	if len(left) > 0 {
		unwritten = make(map[*hold.Hold]bool, len(left))
		for _, o := range left {
			unwritten[o.Hold] = true
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range outcomes {
		if unwritten[o.Hold] {
			continue
		}
		state := o.State
		if len(stale) > 0 && slices.Contains(stale, o.Hold) {
			if !o.Unsure {
				continue
			}
			if o.Hold.ByHandler.Load() || o.Tried {
				state = finish.Completed
			}
		}
		c := t.of(tallied{o.Hold.Queue, o.Hold.Kind})
		switch {
		case state == finish.Completed:
			c.Completed++
		case state == finish.Dead:
			c.Dead++
		case state == finish.Waiting && o.Spend:
			c.Failed++
		default:
			continue
		}
		if o.Run > 0 {
			count.AddTo(&c.Durations, count.RangeOf(o.Run), 1)
			c.Took += o.Run
		}
	}
}

// writeAll writes what was counted. Nothing ends it early: it would not be known whether the counts were
// written.
func (t *tally) writeAll() error {
	ctx, cancel := context.WithTimeout(context.Background(), pg.EndWithin)
	defer cancel()
	return t.write(ctx)
}

// write adds what was counted since the last time. What it cannot write stays.
func (t *tally) write(ctx context.Context) error {
	t.mu.Lock()
	now := t.all
	t.all = nil
	t.mu.Unlock()
	keys := make([]tallied, 0, len(now))
	for key := range now {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b tallied) int {
		return cmp.Or(strings.Compare(a.queue, b.queue), strings.Compare(a.kind, b.kind))
	})
	var err error
	for chunk := range slices.Chunk(keys, table.ChunkRows) {
		if err == nil {
			err = t.q.store.Guarded(ctx, t.db, stmt.WriteCounts, countArgs(chunk, now), nil)
		}
		if err != nil {
			t.mu.Lock()
			for _, key := range chunk {
				t.of(key).Add(*now[key])
			}
			t.mu.Unlock()
		}
	}
	return err
}

func countArgs(keys []tallied, of map[tallied]*count.Count) []any {
	n := len(keys)
	queues, kinds, durations, waits := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	var numbers [5][]int32
	for i := range numbers {
		numbers[i] = make([]int32, n)
	}
	took, oldest := make([]int64, n), make([]int64, n)
	for i, key := range keys {
		c := of[key]
		queues[i], kinds[i], took[i], oldest[i] = key.queue, key.kind, c.Took.Microseconds(), c.Oldest.Microseconds()
		for k, n := range [...]int{c.Started, c.Completed, c.Failed, c.Dead, c.Due} {
			numbers[k][i] = int32(n) // #nosec G115 -- of a minute
		}
		durations[i], waits[i] = listed(c.Durations), listed(c.Waits)
	}
	return []any{queues, kinds, numbers[0], numbers[1], numbers[2], numbers[3], took, numbers[4], oldest, durations, waits}
}

// listed writes numbers with commas in between.
func listed(ranges []int) string {
	return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(ranges)), ","), "[]")
}

// countDue writes how many jobs of each queue are due, twice a minute until ctx ends, and less often where
// that takes more than a hundredth of the time. Such rows have no kind.
func (r *Reaper) countDue(ctx context.Context) {
	for owner, wait := new(Reaper), rand.N(table.PresentEvery/2); nap.For(ctx, wait, nil); {
		began := time.Now()
		now := make(map[tallied]*count.Count)
		err := r.q.store.Send(ctx, r.q.store.Pool, pg.Reading, stmt.ReadDue, []any{dueRows}, pg.Each(func(rows pgx.Rows) error {
			var queue string
			var c count.Count
			var oldest int64
			err := rows.Scan(&queue, &c.Due, &oldest)
			c.Oldest = time.Duration(oldest) * time.Microsecond
			now[tallied{queue: queue}] = &c
			return err
		}))
		wait = max(table.PresentEvery/2, rhythm.Hundredth*time.Since(began))
		if err == nil {
			err = (&tally{q: r.q, db: r.q.store.Pool, all: now}).write(ctx)
		}
		switch {
		case err == nil:
			r.q.troubles.Works(owner, watch.Count, "")
		case ctx.Err() == nil:
			r.q.troubles.Fails(owner, watch.Count, "", err)
		}
	}
}
