package fence

import (
	"maps"
	"sync"
	"time"

	"github.com/onceq/onceq/internal/table"
)

// HeldJobs are jobs that this process has written as held. An effect is held, and reported, before its handler
// ends, so somebody may have settled it when the job was not held yet, or settle it in a transaction that is
// open now. So the process looks at once whether one of its effects is still held, and then once a minute for
// ten minutes.
type HeldJobs struct {
	mu    sync.Mutex
	until map[int64]time.Time
}

// Add notes that jobs were written as held just now.
func (h *HeldJobs) Add(ids []int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(h.until, func(_ int64, until time.Time) bool { return now.After(until) })
	for _, id := range ids {
		if h.until == nil {
			h.until = make(map[int64]time.Time)
		}
		if len(h.until) < table.Remembered {
			h.until[id] = now.Add(10 * time.Minute)
		}
	}
}

// All looks again at the jobs.
func (h *HeldJobs) All(look func(id int64) (decided bool, err error)) (failed error) {
	h.mu.Lock()
	looked := maps.Clone(h.until)
	h.mu.Unlock()
	for id, until := range looked {
		if time.Now().Before(until) {
			if err := h.Look(id, look); err != nil {
				failed = err
			}
		}
	}
	return failed
}

// Look looks at a job, and forgets it if that has decided.
func (h *HeldJobs) Look(id int64, look func(id int64) (decided bool, err error)) error {
	h.mu.Lock()
	looked := h.until[id]
	h.mu.Unlock()
	decided, err := look(id)
	h.mu.Lock()
	defer h.mu.Unlock()
	if decided && h.until[id].Equal(looked) { // else it ran and was held again since
		delete(h.until, id)
	}
	return err
}
