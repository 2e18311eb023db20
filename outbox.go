package onceq

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// outbox holds the outcomes that are to be written. While one batch of them is being written, the next one gathers: a
// single completion is written at once, many are written together, and nobody waits for a timer. The executor adds
// outcomes, and two goroutines write them. Those whose rows somebody else has locked are on a list that is tried once a second.
type outbox struct {
	q     *Queue
	id    int64           // of the run
	db    *pgxpool.Pool   // the worker's own
	lease time.Duration   // how long writing is tried
	ctx   context.Context // for writing: ends when Run has waited long enough
	tasks *taskSet
	tally *count.Tally
	woken func(queue string) // called after jobs with a lane: the next one may be live
	told  func()             // called after the end of jobs that others wait for
	next  func(finish.Outcome) *successor

	patience, try time.Duration
	whole, half   pg.Way // how a batch is written, and a part of one in which a row is locked
	writing       *sync.WaitGroup

	mu       sync.Mutex // guards what follows; ready and room wait with it
	ready    sync.Cond  // something to write, or closed
	room     sync.Cond  // fewer than maxPending
	pending  []finish.Outcome
	locked   []finish.Outcome // their rows are locked
	trying   bool             // these are tried, now or later
	refused  error            // what a try of them met
	reported time.Time        // when that was last reported
	closed   bool
	drains   bool // a Drain waits for what is locked no longer than a lease
	ending   int  // writers that start a next job, which may add its outcome
}

// A row that a person or another program has locked, perhaps for hours, may hold up the outcome of its own
// job and no other. So no batch waits for long: whose row it is, halving finds out. A half waits for a tenth
// of the time. If halving takes too long, because very many rows are locked, or the table is, all that is
// left counts as locked.

func newOutbox(q *Queue, id int64, db *pgxpool.Pool, lease time.Duration, ctx context.Context, tasks *taskSet, tally *count.Tally) *outbox {
	o := &outbox{q: q, id: id, db: db, lease: lease, ctx: ctx, tasks: tasks, tally: tally}
	// Shorter than Postgres's deadlock_timeout: a caller who has locked what a batch waits for is no victim.
	o.patience = min(pg.BriefWait/2, lease/4)
	// The network may swallow a try, so the first one has a quarter of the lease beside what it waits for locks. Each further one has
	// twice as much, because the server may only be slow.
	o.try = max(pg.BriefWait, min(lease/4, pg.AnswerWithin))
	o.whole, o.half = pg.Waiting(o.patience), pg.Waiting(o.patience/10)
	o.ready.L, o.room.L = &o.mu, &o.mu
	return o
}

// add waits for room, but not while a writer starts a next job: that one may be the caller, and only the writers make room.
func (o *outbox) add(out finish.Outcome) {
	o.mu.Lock()
	for len(o.pending)+len(o.locked) >= maxPending && o.ending == 0 {
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
func (o *outbox) take() []finish.Outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.pending) == 0 && !o.closed {
		o.ready.Wait()
	}
	n := min(len(o.pending), table.ChunkRows)
	batch := append(make([]finish.Outcome, 0, n), o.pending[:n]...)
	o.pending = append(o.pending[:0], o.pending[n:]...)
	clear(o.pending[len(o.pending):min(cap(o.pending), len(o.pending)+n)])
	o.room.Broadcast()
	return batch
}

// start starts the goroutines that write, and end when the outbox is closed and empty.
func (o *outbox) start(writing *sync.WaitGroup, drains bool) {
	o.writing, o.drains = writing, drains
	writing.Go(o.loop)
	writing.Go(o.loop)
}

func (o *outbox) loop() {
	for batch := o.take(); len(batch) > 0; batch = o.take() {
		o.write(batch, o.whole, time.Time{})
		o.q.troubles.Works(o.id, watch.Finish, "") // or it was given up
	}
}

// tryLocked writes outcomes whose rows were locked.
func (o *outbox) tryLocked() {
	defer o.writing.Done()
	o.mu.Lock()
	n := min(len(o.locked), table.ChunkRows)
	batch := slices.Clone(o.locked[:n])
	o.locked = slices.Delete(o.locked, 0, n)
	o.mu.Unlock()
	o.write(batch, o.half, time.Now().Add(halvesFor*o.patience))
	o.mu.Lock()
	o.trying = false
	left, refused := len(o.locked), o.refused
	report := left > 0 && time.Since(o.reported) > lockedEvery
	if report {
		o.reported = time.Now()
	}
	o.tryLater()
	o.mu.Unlock()
	o.room.Broadcast()
	switch {
	case left == 0:
		o.q.troubles.Works(o, watch.Finish, "") // not the writers' trouble, which ends with what they write
	case report:
		o.q.troubles.Fails(o, watch.Finish, "", refused, slog.Int("jobs", left))
	}
}

// tryLater has what is locked tried after a rest. The caller holds mu.
func (o *outbox) tryLater() {
	if !o.trying && len(o.locked) > 0 {
		o.trying = true
		o.writing.Add(1)
		time.AfterFunc(o.patience, o.tryLocked)
	}
}

// leave puts outcomes on the list of those that are locked, because of err. It returns those that have had enough time. A part that
// was not halved to its end is the first to be tried again.
func (o *outbox) leave(batch []finish.Outcome, err error) (over []finish.Outcome) {
	var stay []finish.Outcome
	o.mu.Lock()
	defer o.mu.Unlock()
	o.refused = fmt.Errorf("another transaction has locked the row of job %d, or its lane's, limit's or key's; the outcome is stored when that ends: %w", batch[0].Hold.ID, err)
	for _, out := range batch {
		if out.Locked.IsZero() {
			out.Locked = time.Now()
		}
		if (o.closed || o.drains) && time.Since(out.Locked) >= o.lease {
			over = append(over, out)
		} else {
			stay = append(stay, out)
		}
	}
	if len(batch) > 1 {
		o.locked = append(stay, o.locked...)
	} else {
		o.locked = append(o.locked, stay...)
	}
	o.tryLater()
	return over
}

// end is next.End for a writer.
func (o *outbox) end(next *successor, ok bool) (leased bool) {
	if next == nil {
		return false
	}
	o.mu.Lock()
	o.ending++
	o.mu.Unlock()
	leased = next.End(ok)
	o.mu.Lock()
	o.ending--
	o.mu.Unlock()
	return leased
}

// write writes outcomes. After a lost connection, and over other connections after one that has gone silent, it tries again, for as
// long as the leases last and until Run has waited long enough. A value that Postgres refuses, or a row that is locked, is found by
// halving the batch, so that it cannot keep the others from being written. For locked rows that goes on until halve, or for a time
// if that is zero.
func (o *outbox) write(batch []finish.Outcome, by pg.Way, halve time.Time) {
	began := time.Now()
	replaced := false // the outcome that Postgres refused was replaced by a failure that says so
	for try := 0; len(batch) > 0; try++ {
		left, next, err := o.once(batch, by, o.limit(by, try, began))
		switch {
		case err == nil || o.writeHalves(left, by, halve, err):
			return
		case pg.BadData(err) && replaced:
			o.q.log.Error("onceq: the outcome of a job cannot be stored; its lease runs out and it runs again",
				slog.Int64("job", left[0].Hold.ID), slog.Any("error", err))
			o.forget(left)
			return
		case pg.BadData(err):
			replaced = true
			batch = []finish.Outcome{leaseOf(left[0].Hold).failure(fmt.Errorf("onceq: storing the outcome: %w", err))}
			batch[0].Unsure, batch[0].Doubt, batch[0].Locked = left[0].Unsure, left[0].Doubt, left[0].Locked
			continue
		case pg.LockedOut(err) && o.ctx.Err() == nil:
			left = o.leave(left, err)
			fallthrough
		case time.Since(began) > o.lease || o.ctx.Err() != nil:
			o.giveUp(left, err)
			return
		}
		o.q.troubles.Fails(o.id, watch.Finish, "", err, slog.Int("jobs", len(left)))
		for i := range left {
			left[i].Unsure = true // it may have been stored, and only the answer lost
			if next != nil {
				left[i].Doubt = next
			}
		}
		batch = left
		wait := min(2*time.Second, 20*time.Millisecond<<min(try, 10))
		nap.For(o.ctx, wait/2+rand.N(wait), nil)
	}
}

// once tries to write outcomes. next is what was to be leased with the only one.
func (o *outbox) once(batch []finish.Outcome, by pg.Way, limit time.Duration) (left []finish.Outcome, next *successor, err error) {
	ctx, cancel := context.WithTimeout(o.ctx, limit)
	if len(batch) == 1 && batch[0].Locked.IsZero() {
		next = o.next(batch[0])
	}
	var stale []*hold.Hold
	if next != nil {
		stale, left, err = next.finish(ctx, o.db, by, batch[0])
	} else {
		stale, left, err = o.q.finish(ctx, o.db, by, batch)
	}
	late := ctx.Err() != nil && o.ctx.Err() == nil
	cancel()
	if late && err != nil {
		o.db.Reset() // the other connections may be as dead
	}
	o.tally.Ended(batch, stale, left)
	o.written(without(batch, left), o.end(next, err == nil))
	return left, next, err
}

// writeHalves writes each half of a batch, if that can find the row or the value that Postgres refused.
func (o *outbox) writeHalves(batch []finish.Outcome, by pg.Way, until time.Time, err error) bool {
	if pg.LockedOut(err) {
		if by = o.half; until.IsZero() {
			until = time.Now().Add(halvesFor * o.patience)
		}
		if !time.Now().Before(until) {
			return false
		}
	} else if !pg.BadData(err) {
		return false
	}
	if len(batch) < 2 {
		return false
	}
	o.write(batch[:len(batch)/2], by, until)
	o.write(batch[len(batch)/2:], by, until)
	return true
}

// giveUp is for outcomes that may not have been stored before their leases ran out.
func (o *outbox) giveUp(left []finish.Outcome, err error) {
	if len(left) > 0 {
		o.q.log.Error("onceq: it is not known whether outcomes were stored before their leases ran out; a job whose outcome was not stored runs again",
			slog.Int("jobs", len(left)), slog.Any("error", err))
		o.forget(left)
	}
}

// limit is how long a try may take. There are two waits for locks in one (finish).
func (o *outbox) limit(by pg.Way, try int, began time.Time) time.Duration {
	return max(o.try, min(o.try<<min(try, 10), o.lease-time.Since(began))) + 2*by.Patience
}

// without returns the outcomes of a batch that are not in left.
func without(batch, left []finish.Outcome) []finish.Outcome {
	if len(left) == 0 {
		return batch
	}
	return slices.DeleteFunc(slices.Clone(batch), func(a finish.Outcome) bool {
		return slices.ContainsFunc(left, func(b finish.Outcome) bool { return a.Hold == b.Hold })
	})
}

// written is called after outcomes were written. leased says that a next job was started with them.
func (o *outbox) written(batch []finish.Outcome, leased bool) {
	told := false
	for _, out := range batch {
		if out.Hold.Lined() && !leased {
			o.woken(out.Hold.Queue)
		}
		if out.Doubt != nil {
			out.Doubt.Unheard(o.ctx, out.Hold)
		}
		told = told || out.Hold.Member && (out.State.Finished() || out.Unsure) // or the handler has ended it
	}
	if told {
		o.told()
	}
	o.forget(batch)
}

func (o *outbox) forget(batch []finish.Outcome) {
	o.tasks.mu.Lock()
	for _, done := range batch {
		o.tasks.forget(done.Hold)
	}
	o.tasks.mu.Unlock()
}
