package onceq

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

const (
	finishChunk = 2000  // outcomes in one statement
	maxPending  = 10000 // outcomes that wait before handlers do
)

// finisher collects outcomes: while one batch is being written, the next one gathers. So a single completion
// goes out at once and many go out together, without anybody waiting for a clock.
type finisher struct {
	mu      sync.Mutex
	ready   sync.Cond // something to write, or closed
	room    sync.Cond // fewer than maxPending
	pending []outcome
	closed  bool
}

func (f *finisher) add(o outcome) {
	f.mu.Lock()
	for len(f.pending) >= maxPending {
		f.room.Wait()
	}
	f.pending = append(f.pending, o)
	f.mu.Unlock()
	f.ready.Signal()
}

func (f *finisher) close() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.ready.Broadcast()
}

// take waits for outcomes; none when closed and drained.
func (f *finisher) take() []outcome {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.pending) == 0 && !f.closed {
		f.ready.Wait()
	}
	n := min(len(f.pending), finishChunk)
	batch := append(make([]outcome, 0, n), f.pending[:n]...)
	f.pending = append(f.pending[:0], f.pending[n:]...)
	clear(f.pending[len(f.pending):min(cap(f.pending), len(f.pending)+n)])
	f.room.Broadcast()
	return batch
}

func (r *run) finishLoop() {
	for {
		batch := r.finisher.take()
		if len(batch) == 0 {
			return
		}
		r.write(batch)
		r.q.works(r, workFinish, "") // or was given up
		r.mu.Lock()
		for _, o := range batch {
			r.forget(o.lease)
		}
		r.mu.Unlock()
	}
}

// write writes outcomes. A lost connection is waited out for as long as the leases last, and until Run has waited enough; a value that Postgres
// refuses is found by halving, so that it cannot keep the others from being written.
func (r *run) write(batch []outcome) {
	began := time.Now()
	replaced := false // the outcome that Postgres refused, by a failure that says so
	for try := 0; len(batch) > 0; try++ {
		ctx, cancel := context.WithTimeout(r.writing, r.lease)
		_, left, err := r.q.finish(ctx, r.side, batch)
		cancel()
		switch {
		case err == nil:
			return
		case badData(err) && len(left) > 1:
			r.write(left[:len(left)/2])
			r.write(left[len(left)/2:])
			return
		case badData(err):
			if replaced {
				r.q.log.Error("onceq: the outcome of a job cannot be stored; its lease runs out and it runs again",
					slog.Int64("job", left[0].lease.ID), slog.Any("error", err))
				return
			}
			replaced = true
			batch = []outcome{left[0].lease.failure(fmt.Errorf("onceq: storing the outcome: %w", err), nil)}
			batch[0].unsure = left[0].unsure
			continue
		case time.Since(began) > r.lease || r.writing.Err() != nil:
			r.q.log.Error("onceq: outcomes could not be stored while their leases lasted; these jobs run again",
				slog.Int("jobs", len(left)), slog.Any("error", err))
			return
		}
		r.q.fails(r, workFinish, "", err, slog.Int("jobs", len(left)))
		for i := range left {
			left[i].unsure = true // it may have been stored, and only the answer lost
		}
		batch = left
		wait := min(2*time.Second, 20*time.Millisecond<<min(try, 10))
		sleep(r.writing, wait/2+rand.N(wait), nil)
	}
}
