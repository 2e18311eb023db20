package count

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Workers count what becomes of their jobs, so that people can see rates without a monitoring system. A
// worker counts in memory, where it handles outcomes anyway, and adds what it has counted to three rows for
// each queue and kind, which all workers share: that of the minute that is over, of its ten minutes and of
// its hour. So a job costs no statement, and the table grows with kinds and not with workers. A worker that
// is killed loses what it has counted since the last full minute. If the connection breaks in the moment of
// that statement, a minute may be counted twice. Nothing depends on these rows.

// Of says of which jobs a Count is. What a Reaper counts has no kind.
type Of struct{ Queue, Kind string }

// Tally is what one run of a worker has counted and not written yet. Anybody may call its methods.
type Tally struct {
	store *pg.Store
	db    pg.DB // the worker's own for outcomes: this waits for locks

	mu  sync.Mutex // guards all
	all map[Of]*Count
}

// NewTally returns one that writes over db.
func NewTally(store *pg.Store, db pg.DB) *Tally {
	return &Tally{store: store, db: db, all: make(map[Of]*Count)}
}

// of returns the counter of a queue and kind. The caller holds mu.
func (t *Tally) of(key Of) *Count {
	c := t.all[key]
	if c == nil {
		c = new(Count)
		t.all[key] = c
	}
	return c
}

// Started counts a job that a handler gets now.
func (t *Tally) Started(h *hold.Hold) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.of(Of{h.Queue, h.Kind})
	if c.Started++; h.Waited >= 0 {
		AddTo(&c.Waits, RangeOf(h.Waited+time.Since(h.Began)), 1)
	}
}

// Ended counts outcomes that are written. Those of stale leases are not, unless an earlier try has written them,
// or the handler or the commit of its transaction has completed the job.
func (t *Tally) Ended(outcomes []finish.Outcome, stale []*hold.Hold) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range outcomes {
		state := o.State
		if len(stale) > 0 && slices.Contains(stale, o.Hold) {
			if !o.Unsure {
				continue
			}
			if o.Hold.ByHandler.Load() || o.Tried {
				state = table.StateCompleted
			}
		}
		c := t.of(Of{o.Hold.Queue, o.Hold.Kind})
		switch {
		case state == table.StateCompleted:
			c.Completed++
		case state == table.StateDead:
			c.Dead++
		case state == table.StateWaiting && o.Spend:
			c.Failed++
		default:
			continue
		}
		if o.Run > 0 {
			AddTo(&c.Durations, RangeOf(o.Run), 1)
			c.Took += o.Run
		}
	}
}

// Write writes what was counted. What it cannot write stays. Nothing ends it early: it would not be known
// whether the counts were written.
func (t *Tally) Write() error {
	ctx, cancel := context.WithTimeout(context.Background(), pg.EndWithin)
	defer cancel()
	t.mu.Lock()
	now := t.all
	t.all = make(map[Of]*Count)
	t.mu.Unlock()
	err := Write(ctx, t.store, t.db, now)
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, c := range now {
		t.of(key).Add(*c)
	}
	return err
}

// Write adds counts to the rows, and removes from all what it has written.
func Write(ctx context.Context, store *pg.Store, db pg.DB, all map[Of]*Count) error {
	keys := make([]Of, 0, len(all))
	for key := range all {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b Of) int {
		return cmp.Or(strings.Compare(a.Queue, b.Queue), strings.Compare(a.Kind, b.Kind))
	})
	for chunk := range slices.Chunk(keys, table.ChunkRows) {
		if err := store.Guarded(ctx, db, stmt.WriteCounts, args(chunk, all), nil); err != nil {
			return err
		}
		for _, key := range chunk {
			delete(all, key)
		}
	}
	return nil
}

// dueRows is how many jobs of a queue and priority Due looks at.
const dueRows = 100_000

// Due counts how many jobs of each queue are due, and writes that.
func Due(ctx context.Context, store *pg.Store) error {
	all := make(map[Of]*Count)
	err := store.Send(ctx, store.Pool, pg.Reading, stmt.ReadDue, []any{dueRows}, pg.Each(func(rows pgx.Rows) error {
		var queue string
		var c Count
		var oldest int64
		err := rows.Scan(&queue, &c.Due, &oldest)
		c.Oldest = time.Duration(oldest) * time.Microsecond
		all[Of{Queue: queue}] = &c
		return err
	}))
	if err != nil {
		return err
	}
	return Write(ctx, store, store.Pool, all)
}

func args(keys []Of, of map[Of]*Count) []any {
	n := len(keys)
	queues, kinds, durations, waits := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	var numbers [5][]int32
	for i := range numbers {
		numbers[i] = make([]int32, n)
	}
	took, oldest := make([]int64, n), make([]int64, n)
	for i, key := range keys {
		c := of[key]
		queues[i], kinds[i], took[i], oldest[i] = key.Queue, key.Kind, c.Took.Microseconds(), c.Oldest.Microseconds()
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
