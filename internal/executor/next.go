package executor

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/outbox"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/promoter"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Next is a job that is leased without a claim. A lane whose jobs run one after the other would need a claim
// for each of them. So the completion of one leases the next one as well, and the executor starts it: the
// lane needs one round trip for each job. This is a claim like any other, made in the statement that lets the
// job into the lane, and it gives nobody a turn that a claim would have given to another job:
//
//   - The latest claim of the queue found no more jobs, and nothing has been heard of others since. After 200 ms a claim
//     looks again. Meanwhile the claimer's other looks go on as always.
//   - A handler is free, and no other queue waits for its connection. No kind of the worker has MaxLost 1: a lease that nobody
//     knows of, because the answer was lost, must not make a job dead.
//   - Nothing is paused, as far as is known since paused.Old, and the run does not end.
//   - The next job is of the same queue and has lost no lease: others become live without a lease, and are claimed.
//
// It is for single jobs that are completed and not kept. What completes many at once leaves claims to gather.
// With a limit, which has a place for any lane, the next job may be of another one.
//
// A promoter does the same for a job that comes into an idle lane, and for which the worker was woken, so
// that it starts after one round trip instead of two. It must be the only one that the promoter lets in. It
// leaves another slot free, for what the claim finds that was woken together with the promoter: nobody knows
// yet whether there is more.
type Next struct {
	Queue  string
	Holder int64
	Began  time.Time

	x     *Executor
	s     *slots
	own   int64      // 1 if the slot of the job that completes is still in use, and else 0
	hold  *hold.Hold // once it is leased
	calls bool       // its statement has left a call of which nobody else knows
	known bool       // its statement's answer has come, and that of the commit
}

// Next returns what leases the next job of the lane of one that the outbox completes, or nil if that is left
// to a claim.
func (x *Executor) Next(o finish.Outcome) outbox.Next {
	if n := x.next(o, 0); n != nil {
		return n
	}
	return nil
}

// next is the same. own is 1 if the slot of the job that completes is still in use, and else 0.
func (x *Executor) next(o finish.Outcome, own int64) *Next {
	h := o.Hold
	plain := o.State == table.StateCompleted && o.Keep == 0 && !o.Unsure && !h.Member
	if !plain || h.Lane == "" || h.Weight > 1 || h.Slotted() || x.Careful || x.Drains || x.Store.Citus.Load() == pg.CitusYes {
		return nil
	}
	s := x.slots[h.Queue]
	if s == nil || !s.FoundEnd() || h.Limit != "" && s.Outstanding.Load() > nextFew {
		return nil
	}
	return x.reserve(s, own, 0)
}

// First returns what leases the job that a promoter lets into a lane, or nil if that is left to a claim.
func (x *Executor) First(queue string) promoter.Next {
	s := x.slots[queue]
	if s == nil || x.Careful || x.Drains {
		return nil
	}
	if n := x.reserve(s, 0, int64(s.Width)); n != nil {
		return n
	}
	return nil
}

// Asks says what the statement is to lease.
func (n *Next) Asks() (queue string, holder int64, began time.Time, lease time.Duration) {
	return n.Queue, n.Holder, n.Began, n.x.Lease
}

// reserve reserves a place in s for a job that is leased without a claim, and leaves so many others free. It
// returns nil if there is none.
func (x *Executor) reserve(s *slots, own, others int64) *Next {
	if !x.Paused.None() {
		return nil
	}
	x.ending.Lock()
	defer x.ending.Unlock()
	if x.stopping.Load() || !s.Reserve(x.conns, own-others) {
		return nil
	}
	x.handling.Add(1)
	return &Next{x: x, s: s, own: own, Queue: s.Queue, Holder: hold.NewHolder(x.ID), Began: time.Now()}
}

// args are those of stmt.FinishNext.
func (n *Next) args(o finish.Outcome, raise bool) []any {
	h, lease := o.Hold, n.x.Lease.Microseconds()
	return []any{h.ID, h.Claims, h.Holder, o.Result, raise, lease, n.Holder, n.Queue, n.x.Kinds}
}

// nextAnswer reads the one row of a statement that may lease the next job. It is a pgx.RowScanner, because
// the columns of that job are null if there is none.
type nextAnswer struct {
	n      *Next
	before pg.Leading // for the columns before those of the next job
}

// completed is for stmt.FinishNext. done becomes the job's id, or nil if its guard did not hold.
func (n *Next) completed(done **int64) pgx.RowScanner { return n.Answer(done, &n.calls) }

// Answer is for a statement with these columns before those of the next job.
func (n *Next) Answer(before ...any) pgx.RowScanner { return nextAnswer{n, before} }

// ScanRow reads the row.
func (a nextAnswer) ScanRow(rows pgx.Rows) error {
	n := a.n
	n.known = true
	if rows.RawValues()[len(a.before)] == nil {
		return a.before.ScanRow(rows)
	}
	h, err := n.x.Face.Read(rows, n, slices.Clip(a.before))
	n.hold = h
	return err
}

// Finish writes the outcome of the job before.
func (n *Next) Finish(ctx context.Context, db pg.DB, by pg.Way, o finish.Outcome) (stale []*hold.Hold,
	left []finish.Outcome, err error) {
	var done *int64
	err = n.x.Store.Send(ctx, db, by, stmt.FinishNext, n.args(o, false), pg.Row(n.completed(&done)))
	if err != nil {
		return nil, []finish.Outcome{o}, fmt.Errorf("onceq: finish: %w", err)
	}
	if done == nil {
		stale = []*hold.Hold{o.Hold}
	}
	n.x.Face.Wrote(ctx, o, done != nil)
	return stale, nil, nil
}

// End starts the next job, if it was leased, and gives back its place. ok says that the completion was
// committed.
func (n *Next) End(ok bool) (leased bool) {
	n.known = n.known && ok // of what came before the answer was lost nothing is started
	switch leased = ok && n.hold != nil; {
	case leased && n.s.Outstanding.Load()-n.own > int64(n.s.Count*n.s.Width): // a claim came in between
		n.x.outbox.Add(finish.Outcome{Hold: n.hold, State: table.StateWaiting})
	case leased:
		n.x.Face.Claimed(n.x.base, n.hold)
		n.x.accept(n.s, []*hold.Hold{n.hold}, n.Began)
		if n.x.stopping.Load() { // Run may have taken what waits before that
			n.x.giveBackAll(n.s)
		}
	}
	n.s.Left(1)
	n.x.conns.Wake()
	if leased && n.calls { // otherwise there is a claim next, which tells the promoter
		n.x.Told()
	}
	n.x.handling.Done()
	return leased
}

// Unheard gives back what the completion has leased if its answer was lost: nobody knows of that lease, and
// the lane would stand still until it ends. It comes after the completion is known to be committed, or to
// have failed.
func (n *Next) Unheard(ctx context.Context, after *hold.Hold) {
	if n.known {
		return
	}
	lines := []string{after.Lane, "/" + after.Limit} // the next job may be of another lane, or have no limit
	ctx, cancel := context.WithTimeout(ctx, n.x.Lease)
	defer cancel()
	if err := n.x.Store.Send(ctx, n.x.Own.Outcomes, pg.Hot, stmt.GiveBackNext, []any{lines, n.Holder}, pg.NoRows); err != nil {
		n.x.Log.WarnContext(ctx, "onceq: a completion's answer was lost, and it is not known whether it leased the next"+
			" job of its lane; that lease runs out",
			slog.String("lane", after.Lane), slog.Any("error", err))
	}
	n.x.Live(n.Queue)
}
