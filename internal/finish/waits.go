package finish

import (
	"slices"
	"sync"
	"sync/atomic"
)

// Waits are the calls of Wait, by their jobs. There is no notification, because a job is mostly claimed
// before somebody waits for it: its completion would have to look who does, and every job would pay (BOUNDS.md).
type Waits struct {
	count atomic.Int32 // of all
	mu    sync.Mutex   // guards calls, and is held for no longer than that takes
	calls map[int64][]chan struct{}
}

// Add has the end of a job send to a channel that has room for one value. remove ends that.
func (w *Waits) Add(id int64, ended chan struct{}) (remove func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.calls == nil {
		w.calls = make(map[int64][]chan struct{})
	}
	w.calls[id] = append(w.calls[id], ended)
	w.count.Add(1)
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.count.Add(-1)
		w.calls[id] = slices.DeleteFunc(w.calls[id], func(c chan struct{}) bool { return c == ended })
		if len(w.calls[id]) == 0 {
			delete(w.calls, id)
		}
	}
}

// Ended says that an attempt at a job has ended, or does so when a transaction commits.
func (w *Waits) Ended(id int64) {
	if w.count.Load() == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, ended := range w.calls[id] {
		select {
		case ended <- struct{}{}:
		default:
		}
	}
}
