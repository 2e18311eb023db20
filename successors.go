package onceq

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/promoter"
	"github.com/onceq/onceq/internal/stmt"
)

// A lane whose jobs run one after the other would need a claim for each of them. So the completion of one leases the next
// one as well, and the executor starts it: the lane needs one round trip for each job. This is a claim like any other, made
// in the statement that lets the job into the lane, and it gives nobody a turn that a claim would have given to another job:
//
//   - The latest claim of the queue found no more jobs, and nothing has been heard of others since. After 200 ms a claim
//     looks again. Meanwhile the claimer's other looks go on as always.
//   - A handler is free, and no other queue waits for its connection. No kind of the worker has MaxLost 1: a lease that nobody
//     knows of, because the answer was lost, must not make a job dead.
//   - Nothing is paused, as far as is known since paused.Old, and the run does not end.
//   - The next job is of the same queue and has lost no lease: others become live without a lease, and are claimed.
//
// It is for single jobs that are completed and not kept. What completes many at once leaves claims to gather. With a limit, which
// has a place for any lane, the next job may be of another one.
//
// A promoter does the same for a job that comes into an idle lane, and for which the worker was woken, so that it starts after
// one round trip instead of two. It must be the only one that the promoter lets in. It leaves another slot free, for what the claim
// finds that was woken together with the promoter: nobody knows yet whether there is more.
type successor struct {
	x      *executor
	s      *slots
	own    int64 // 1 if the slot of the job that completes is still in use, and else 0
	queue  string
	holder int64
	began  time.Time
	hold   *hold.Hold
	calls  bool // its statement has left a call of which nobody else knows
	known  bool // its statement's answer has come, and that of the commit
}

// successor returns what leases the next job of the lane of a job that completes, or nil if that is left to a claim. own is
// 1 if the slot of the job that completes is still in use, and else 0.
func (x *executor) successor(o finish.Outcome, own int64) *successor {
	h := o.Hold
	if o.State != finish.Completed || o.Keep != 0 || o.Unsure || x.careful || h.Lane == "" || h.Weight > 1 || h.Slotted() || h.Member || x.q.store.Citus.Load() == pg.CitusYes {
		return nil
	}
	s := x.slots[h.Queue]
	if s == nil || !s.FoundEnd() || h.Limit != "" && s.Outstanding.Load() > nextFew {
		return nil
	}
	return x.reserve(s, own, 0)
}

// First returns what leases the job that a promoter lets into a lane, or nil if that is left to a claim.
func (x *executor) First(queue string) promoter.Next {
	s := x.slots[queue]
	if s == nil || x.careful {
		return nil
	}
	if n := x.reserve(s, 0, int64(s.Width)); n != nil {
		return n
	}
	return nil
}

// Has reports whether the worker works a queue.
func (x *executor) Has(queue string) bool { return x.slots[queue] != nil }

// Asks says what the statement is to lease.
func (n *successor) Asks() (queue string, holder int64, began time.Time, lease time.Duration) {
	return n.queue, n.holder, n.began, n.x.lease
}

// reserve reserves a place in s for a job that is leased without a claim, and leaves so many others free. It returns nil if there
// is none.
func (x *executor) reserve(s *slots, own, others int64) *successor {
	if !x.q.pauses.None() {
		return nil
	}
	x.ending.Lock()
	defer x.ending.Unlock()
	if x.stopping.Load() || !s.Reserve(x.conns, own-others) {
		return nil
	}
	x.handling.Add(1)
	return &successor{x: x, s: s, own: own, queue: s.Queue, holder: newHolder(x.id), began: time.Now()}
}

// args are those of stmt.FinishNext.
func (n *successor) args(o finish.Outcome, raise bool) []any {
	return []any{o.Hold.ID, o.Hold.Claims, o.Hold.Holder, o.Result, raise, n.x.lease.Microseconds(), n.holder, n.queue, n.x.kinds}
}

// nextAnswer reads the one row of a statement that may lease the next job. It is a pgx.RowScanner, because the columns of that
// job are null if there is none.
type nextAnswer struct {
	n      *successor
	before pg.Leading // for the columns before those of the next job
}

// completed is for stmt.FinishNext. done becomes the job's id, or nil if its guard did not hold.
func (n *successor) completed(done **int64) pgx.RowScanner { return n.Answer(done, &n.calls) }

// Answer is for a statement with these columns before those of the next job.
func (n *successor) Answer(before ...any) pgx.RowScanner { return nextAnswer{n, before} }

// ScanRow reads the row.
func (a nextAnswer) ScanRow(rows pgx.Rows) error {
	n := a.n
	n.known = true
	if rows.RawValues()[len(a.before)] == nil {
		return a.before.ScanRow(rows)
	}
	var err error
	n.hold, err = n.x.w.readNext(rows, n.x.db, n.queue, n.holder, n.began, slices.Clip(a.before))
	return err
}

// finish writes the outcome, as Queue.finish does.
func (n *successor) finish(ctx context.Context, db DB, by pg.Way, o finish.Outcome) (stale []*hold.Hold, left []finish.Outcome, err error) {
	var done *int64
	err = n.x.q.store.Send(ctx, db, by, stmt.FinishNext, n.args(o, false), pg.Row(n.completed(&done)))
	if err != nil {
		return nil, []finish.Outcome{o}, fmt.Errorf("onceq: finish: %w", err)
	}
	if done == nil {
		stale = []*hold.Hold{o.Hold}
	}
	n.x.q.wrote(ctx, o, done != nil)
	return stale, nil, nil
}

// End starts the next job, if it was leased, and gives back its place. ok says that the completion was committed.
func (n *successor) End(ok bool) (leased bool) {
	if n == nil {
		return false
	}
	n.known = n.known && ok // of what came before the answer was lost nothing is started
	switch leased = ok && n.hold != nil; {
	case leased && n.s.Outstanding.Load()-n.own > int64(n.s.Count*n.s.Width): // a claim came in between
		n.x.outbox.add(finish.Outcome{Hold: n.hold, State: finish.Waiting})
	case leased:
		if n.x.q.watched(EventClaimed.Level()) {
			l := leaseOf(n.hold)
			n.x.q.claimed(n.x.base, l, l.RunAt)
		}
		n.x.accept(n.s, []*hold.Hold{n.hold}, n.began)
		if n.x.stopping.Load() { // Run may have taken what waits before that
			for _, u := range n.s.takeAll() {
				n.x.giveBack(u.tasks)
			}
		}
	}
	n.s.Left(1)
	n.x.conns.Wake()
	if leased && n.calls { // otherwise there is a claim next, which tells the promoter
		n.x.told()
	}
	n.x.handling.Done()
	return leased
}

// Unheard gives back what the completion has leased if its answer was lost: nobody knows of that lease, and the lane would stand
// still until it ends. It comes after the completion is known to be committed, or to have failed.
func (n *successor) Unheard(ctx context.Context, after *hold.Hold) {
	if n.known {
		return
	}
	lines := []string{after.Lane, "/" + after.Limit} // the next job may be of another lane, or have no limit
	ctx, cancel := context.WithTimeout(ctx, n.x.lease)
	defer cancel()
	if err := n.x.q.store.Send(ctx, n.x.db, pg.Hot, stmt.GiveBackNext, []any{lines, n.holder}, pg.NoRows); err != nil {
		n.x.q.log.WarnContext(ctx, "onceq: a completion's answer was lost, and it is not known whether it leased the next job of its lane; that lease runs out",
			slog.String("lane", after.Lane), slog.Any("error", err))
	}
	n.x.woken(n.queue)
}
