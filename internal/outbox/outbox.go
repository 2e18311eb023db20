// Package outbox writes the outcomes of jobs. While one batch of them is being written, the next one gathers:
// a single completion is written at once, many are written together, and nobody waits for a timer.
//
// A row that a person or another program has locked, perhaps for hours, may hold up the outcome of its own
// job and no other. So no batch waits for long: whose row it is, halving finds out. A half waits for a tenth
// of the time. If halving takes too long, because very many rows are locked, or the table is, all that is
// left counts as locked. What is locked is on a list that is tried once a second.
package outbox

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
	"github.com/onceq/onceq/internal/task"
	"github.com/onceq/onceq/internal/watch"
)

// The numbers that somebody has chosen.
const (
	maxPending = 10_000 // outcomes that wait, the locked ones too; with more, handlers do
	halvesFor  = 3      // halving takes as long as so many batches wait for a lock
)

// Config is what an outbox works with. The rest is in the set's.
type Config struct {
	Worker Worker
	Set    *task.Set
	Tally  *count.Tally
	DB     *pgxpool.Pool               // the worker's own
	Drains bool                        // a Drain waits for what is locked no longer than a lease
	Next   func(o finish.Outcome) Next // leases the next job of the lane of one that completes; nil: a claim does
	Live   func(queue string)          // called after jobs with a lane: the next one may be live
	Told   func()                      // called after the end of jobs that others wait for
}

// Worker ends jobs.
type Worker interface {
	// Finish writes outcomes. It returns the leases whose guard did not hold and, after an error, what may not have
	// been written.
	Finish(ctx context.Context, db pg.DB, by pg.Way, outcomes []finish.Outcome) (stale []*hold.Hold,
		left []finish.Outcome, err error)
	// Failure is the outcome of a job whose handler returned err.
	Failure(h *hold.Hold, err error) finish.Outcome
}

// Next writes the outcome of a job, and leases the next one of its lane.
type Next interface {
	finish.Doubt
	Finish(ctx context.Context, db pg.DB, by pg.Way, o finish.Outcome) (stale []*hold.Hold, left []finish.Outcome, err error)
	End(ok bool) (leased bool) // starts the job, if it was leased. ok says that the outcome was written
}

// Outbox holds the outcomes that are to be written. The executor adds them, and two goroutines write them.
type Outbox struct {
	Config
	patience, try time.Duration
	whole, half   pg.Way // how a batch is written, and a part of one in which a row is locked
	writing       sync.WaitGroup

	mu       sync.Mutex // guards what follows; ready and room wait with it
	ready    sync.Cond  // something to write, or closed
	room     sync.Cond  // fewer than maxPending
	pending  []finish.Outcome
	locked   []finish.Outcome // their rows are locked
	trying   bool             // these are tried, now or later
	refused  error            // what a try of them met
	reported time.Time        // when that was last reported
	closed   bool
	ending   int // writers that start a next job, which may add its outcome
}

// New returns one that Start starts.
func New(cfg Config) *Outbox {
	o := &Outbox{Config: cfg}
	// Shorter than Postgres's deadlock_timeout: a caller who has locked what a batch waits for is no victim.
	o.patience = min(pg.BriefWait/2, cfg.Set.Lease/4)
	// The network may swallow a try, so the first one has a quarter of the lease beside what it waits for
	// locks. Each further one has twice as much, because the server may only be slow.
	o.try = max(pg.BriefWait, min(cfg.Set.Lease/4, pg.AnswerWithin))
	o.whole, o.half = pg.Waiting(o.patience), pg.Waiting(o.patience/10)
	o.ready.L, o.room.L = &o.mu, &o.mu
	return o
}

// Add waits for room, but not while a writer starts a next job: that one may be the caller, and only the
// writers make room.
func (o *Outbox) Add(out finish.Outcome) {
	o.mu.Lock()
	for len(o.pending)+len(o.locked) >= maxPending && o.ending == 0 {
		o.room.Wait()
	}
	o.pending = append(o.pending, out)
	o.mu.Unlock()
	o.ready.Signal()
}

// Close returns when all outcomes are written, or given up. No more may come.
func (o *Outbox) Close() {
	o.mu.Lock()
	o.closed = true
	o.mu.Unlock()
	o.ready.Broadcast()
	o.writing.Wait()
}

// take waits for outcomes. It returns none when the outbox is closed and empty.
func (o *Outbox) take() []finish.Outcome {
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

// Start starts the goroutines that write.
func (o *Outbox) Start() {
	o.writing.Go(o.loop)
	o.writing.Go(o.loop)
}

func (o *Outbox) loop() {
	for batch := o.take(); len(batch) > 0; batch = o.take() {
		o.write(batch, o.whole, time.Time{})
		o.Set.Troubles.Works(o.Set.ID, watch.Finish, "") // or it was given up
	}
}

// tryLocked writes outcomes whose rows were locked.
func (o *Outbox) tryLocked() {
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
	report := left > 0 && time.Since(o.reported) > o.Set.Lease
	if report {
		o.reported = time.Now()
	}
	o.tryLater()
	o.mu.Unlock()
	o.room.Broadcast()
	switch {
	case left == 0:
		o.Set.Troubles.Works(o, watch.Finish, "") // not the writers' trouble, which ends with what they write
	case report:
		o.Set.Troubles.Fails(o, watch.Finish, "", refused, slog.Int("jobs", left))
	}
}

// tryLater has what is locked tried after a rest. The caller holds mu.
func (o *Outbox) tryLater() {
	if !o.trying && len(o.locked) > 0 {
		o.trying = true
		o.writing.Add(1)
		time.AfterFunc(o.patience, o.tryLocked)
	}
}

// leave puts outcomes on the list of those that are locked, because of err. It returns those that have had
// enough time. A part that was not halved to its end is the first to be tried again.
func (o *Outbox) leave(batch []finish.Outcome, err error) (over []finish.Outcome) {
	var stay []finish.Outcome
	o.mu.Lock()
	defer o.mu.Unlock()
	o.refused = fmt.Errorf("another transaction has locked the row of job %d, or its lane's, limit's or key's; the outcome is stored when that ends: %w", batch[0].Hold.ID, err)
	for _, out := range batch {
		if out.Locked.IsZero() {
			out.Locked = time.Now()
		}
		if (o.closed || o.Drains) && time.Since(out.Locked) >= o.Set.Lease {
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
func (o *Outbox) end(next Next, ok bool) (leased bool) {
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

// write writes outcomes. After a lost connection, and over other connections after one that has gone silent,
// it tries again, for as long as the leases last and until Run has waited long enough. A value that Postgres
// refuses, or a row that is locked, is found by halving the batch, so that it cannot keep the others from
// being written. For locked rows that goes on until halve, or for a time if that is zero.
func (o *Outbox) write(batch []finish.Outcome, by pg.Way, halve time.Time) {
	began := time.Now()
	replaced := false // the outcome that Postgres refused was replaced by a failure that says so
	for try := 0; len(batch) > 0; try++ {
		left, next, err := o.once(batch, by, o.limit(by, try, began))
		switch {
		case err == nil || o.writeHalves(left, by, halve, err):
			return
		case pg.BadData(err) && replaced:
			o.Set.Log.Error("onceq: the outcome of a job cannot be stored; its lease runs out and it runs again",
				slog.Int64("job", left[0].Hold.ID), slog.Any("error", err))
			o.Set.Forget(left)
			return
		case pg.BadData(err):
			replaced = true
			batch = []finish.Outcome{o.Worker.Failure(left[0].Hold, fmt.Errorf("onceq: storing the outcome: %w", err))}
			batch[0].Unsure, batch[0].Doubt, batch[0].Locked = left[0].Unsure, left[0].Doubt, left[0].Locked
			continue
		case pg.LockedOut(err) && o.Set.Ctx.Err() == nil:
			left = o.leave(left, err)
			fallthrough
		case time.Since(began) > o.Set.Lease || o.Set.Ctx.Err() != nil:
			o.giveUp(left, err)
			return
		}
		o.Set.Troubles.Fails(o.Set.ID, watch.Finish, "", err, slog.Int("jobs", len(left)))
		for i := range left {
			left[i].Unsure = true // it may have been stored, and only the answer lost
			if next != nil {
				left[i].Doubt = next
			}
		}
		batch = left
		wait := min(2*time.Second, 20*time.Millisecond<<min(try, 10))
		nap.For(o.Set.Ctx, wait/2+rand.N(wait), nil)
	}
}

// once tries to write outcomes. next is what was to be leased with the only one.
func (o *Outbox) once(batch []finish.Outcome, by pg.Way, limit time.Duration) (left []finish.Outcome, next Next, err error) {
	ctx, cancel := context.WithTimeout(o.Set.Ctx, limit)
	if len(batch) == 1 && batch[0].Locked.IsZero() {
		next = o.Next(batch[0])
	}
	var stale []*hold.Hold
	if next != nil {
		stale, left, err = next.Finish(ctx, o.DB, by, batch[0])
	} else {
		stale, left, err = o.Worker.Finish(ctx, o.DB, by, batch)
	}
	late := ctx.Err() != nil && o.Set.Ctx.Err() == nil
	cancel()
	if late && err != nil {
		o.DB.Reset() // the other connections may be as dead
	}
	batch = without(batch, left)
	o.Tally.Ended(batch, stale)
	o.written(batch, o.end(next, err == nil))
	return left, next, err
}

// writeHalves writes each half of a batch, if that can find the row or the value that Postgres refused.
func (o *Outbox) writeHalves(batch []finish.Outcome, by pg.Way, until time.Time, err error) bool {
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
func (o *Outbox) giveUp(left []finish.Outcome, err error) {
	if len(left) > 0 {
		o.Set.Log.Error("onceq: it is not known whether outcomes were stored before their leases ran out; a job whose outcome was not stored runs again",
			slog.Int("jobs", len(left)), slog.Any("error", err))
		o.Set.Forget(left)
	}
}

// limit is how long a try may take. There are two waits for locks in one (finish).
func (o *Outbox) limit(by pg.Way, try int, began time.Time) time.Duration {
	return max(o.try, min(o.try<<min(try, 10), o.Set.Lease-time.Since(began))) + 2*by.Patience
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
func (o *Outbox) written(batch []finish.Outcome, leased bool) {
	told := false
	for _, out := range batch {
		if out.Hold.Lined() && !leased {
			o.Live(out.Hold.Queue)
		}
		if out.Doubt != nil {
			out.Doubt.Unheard(o.Set.Ctx, out.Hold)
		}
		told = told || out.Hold.Member && (out.State.Finished() || out.Unsure) // or the handler has ended it
	}
	if told {
		o.Told()
	}
	o.Set.Forget(batch)
}
