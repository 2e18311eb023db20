package onceq

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	finishChunk = 2000  // outcomes in one statement
	maxPending  = 10000 // how many outcomes may wait; with more, handlers wait
)

// outbox holds the outcomes that are to be written. While one batch of them is being written, the next one gathers: a
// single completion is written at once, many are written together, and nobody waits for a timer. The executor adds
// outcomes, and two goroutines write them.
type outbox struct {
	q     *Queue
	id    int64           // of the run
	db    *pgxpool.Pool   // the worker's own
	lease time.Duration   // how long writing is tried
	ctx   context.Context // for writing: ends when Run has waited long enough
	tasks *taskSet
	tally *tally
	woken func(queue string) // called after jobs with a lane: the next one may be live
	told  func()             // called after the end of jobs that others wait for
	next  func(outcome) *successor

	mu      sync.Mutex // guards pending and closed; ready and room wait with it
	ready   sync.Cond  // something to write, or closed
	room    sync.Cond  // fewer than maxPending
	pending []outcome
	closed  bool
	ending  int // writers that start a next job, which may add its outcome
}

func newOutbox(q *Queue, id int64, db *pgxpool.Pool, lease time.Duration, ctx context.Context, tasks *taskSet, tally *tally) *outbox {
	o := &outbox{q: q, id: id, db: db, lease: lease, ctx: ctx, tasks: tasks, tally: tally}
	o.ready.L, o.room.L = &o.mu, &o.mu
	return o
}

// add waits for room, but not while a writer starts a next job: that one may be the caller, and only the writers make room.
func (o *outbox) add(out outcome) {
	o.mu.Lock()
	for len(o.pending) >= maxPending && o.ending == 0 {
		o.room.Wait()
	}
	o.pending = append(o.pending, out)
	o.mu.Unlock()
	o.ready.Signal()
}

func (o *outbox) close() {
	o.mu.Lock()
	o.closed = true
	o.mu.Unlock()
	o.ready.Broadcast()
}

// take waits for outcomes. It returns none when the outbox is closed and empty.
func (o *outbox) take() []outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.pending) == 0 && !o.closed {
		o.ready.Wait()
	}
	n := min(len(o.pending), finishChunk)
	batch := append(make([]outcome, 0, n), o.pending[:n]...)
	o.pending = append(o.pending[:0], o.pending[n:]...)
	clear(o.pending[len(o.pending):min(cap(o.pending), len(o.pending)+n)])
	o.room.Broadcast()
	return batch
}

// loop writes until the outbox is closed and empty.
func (o *outbox) loop() {
	for {
		batch := o.take()
		if len(batch) == 0 {
			return
		}
		o.write(batch)
		o.q.works(o.id, workFinish, "") // or it was given up
		o.tasks.mu.Lock()
		for _, done := range batch {
			o.tasks.forget(done.lease)
		}
		o.tasks.mu.Unlock()
	}
}

// end is next.end for a writer.
func (o *outbox) end(next *successor, ok bool) (leased bool) {
	if next == nil {
		return false
	}
	o.mu.Lock()
	o.ending++
	o.mu.Unlock()
	leased = next.end(ok)
	o.mu.Lock()
	o.ending--
	o.mu.Unlock()
	return leased
}

// write writes outcomes. After a lost connection it tries again, for as long as the leases last and until Run has waited
// long enough. A value that Postgres refuses is found by halving the batch, so that it cannot keep the others from being
// written.
func (o *outbox) write(batch []outcome) {
	began := time.Now()
	replaced := false // the outcome that Postgres refused was replaced by a failure that says so
	for try := 0; len(batch) > 0; try++ {
		ctx, cancel := context.WithTimeout(o.ctx, o.lease)
		var next *successor
		if len(batch) == 1 {
			next = o.next(batch[0])
		}
		var stale []*Lease
		var left []outcome
		var err error
		if next != nil {
			stale, left, err = next.finish(ctx, o.db, batch[0])
		} else {
			stale, left, err = o.q.finish(ctx, o.db, batch)
		}
		cancel()
		o.tally.ended(batch, stale, left)
		leased := o.end(next, err == nil)
		switch {
		case err == nil:
			told := false
			for _, out := range batch {
				if out.lease.lined() && !leased {
					o.woken(out.lease.Queue)
				}
				out.doubt.unheard(o.ctx, out.lease.Lane)
				told = told || out.lease.member && (out.state.Finished() || out.unsure) // or the handler has ended it
			}
			if told {
				o.told()
			}
			return
		case badData(err) && len(left) > 1:
			o.write(left[:len(left)/2])
			o.write(left[len(left)/2:])
			return
		case badData(err):
			if replaced {
				o.q.log.Error("onceq: the outcome of a job cannot be stored; its lease runs out and it runs again",
					slog.Int64("job", left[0].lease.ID), slog.Any("error", err))
				return
			}
			replaced = true
			batch = []outcome{left[0].lease.failure(fmt.Errorf("onceq: storing the outcome: %w", err))}
			batch[0].unsure = left[0].unsure
			continue
		case time.Since(began) > o.lease || o.ctx.Err() != nil:
			o.q.log.Error("onceq: it is not known whether outcomes were stored before their leases ran out; a job whose outcome was not stored runs again",
				slog.Int("jobs", len(left)), slog.Any("error", err))
			return
		}
		o.q.fails(o.id, workFinish, "", err, slog.Int("jobs", len(left)))
		for i := range left {
			left[i].unsure = true // it may have been stored, and only the answer lost
			if next != nil {
				left[i].doubt = next
			}
		}
		batch = left
		wait := min(2*time.Second, 20*time.Millisecond<<min(try, 10))
		sleep(o.ctx, wait/2+rand.N(wait), nil)
	}
}
