package onceq

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/executor"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/presence"
	"github.com/onceq/onceq/internal/stmt"
)

// face is what a run's executor asks of this package, which alone knows leases, errors and events: see
// executor.Face.
type face struct {
	w      *Worker
	db     DB // for what handlers do without a transaction
	limits presence.Limits
}

func (f *face) Lost(h *hold.Hold, op string) error {
	if h == nil {
		return fmt.Errorf("%w: of a job in the batch", ErrLeaseLost)
	}
	return leaseOf(h).lostError(op)
}

func (f *face) Loses(ctx context.Context, h *hold.Hold, stale bool, err error) {
	e := leaseOf(h).event(EventLeaseLost)
	if stale {
		e.Type = EventStale
	}
	e.Err = err
	f.w.q.emit(ctx, e)
}

func (f *face) Failure(h *hold.Hold, err error) finish.Outcome { return leaseOf(h).failure(err) }
func (f *face) Decides(err error) (decides, again bool) {
	return !decidesNothing(err), reschedules(err)
}

func (f *face) Finish(ctx context.Context, db pg.DB, by pg.Way, outcomes []finish.Outcome) (stale []*hold.Hold,
	left []finish.Outcome, err error) {
	return f.w.q.finish(ctx, db, by, outcomes)
}

func (f *face) Wrote(ctx context.Context, o finish.Outcome, ok bool) { f.w.q.wrote(ctx, o, ok) }
func (f *face) Heed(ctx context.Context, db pg.DB, ids []int64)      { f.w.q.heed(ctx, db, ids) }

func (f *face) Read(rows pgx.Rows, n *executor.Next, before []any) (*hold.Hold, error) {
	l := &Lease{
		Queue: n.Queue, origin: origin{q: f.w.q, db: f.db},
		hold: hold.Hold{Queue: n.Queue, Holder: n.Holder, Began: n.Began},
	}
	var place int64
	var cut bool
	if err := l.read(rows, time.Time{}, f.w.lease, &place, &cut, before...); err != nil {
		return nil, err
	}
	f.takes(l)
	return &l.hold, nil
}

func (f *face) Claimed(ctx context.Context, h *hold.Hold) {
	if f.w.q.watched(EventClaimed.Level()) {
		l := leaseOf(h)
		f.w.q.claimed(ctx, l, l.RunAt)
	}
}

// takes prepares a lease for a handler of the worker.
func (f *face) takes(l *Lease) {
	l.h = f.w.handlers[l.Kind]
	l.hold.Timeout = l.timeoutFor(l.h.runs.Timeout)
	if l.Limit != "" {
		f.limits.Meet(l.Limit)
	}
}

// claims is what a run's claimer asks: see claimer.Worker.
type claims struct {
	*executor.Executor
	face *face
}

func (c claims) Claim(ctx context.Context, db pg.Quick, kinds []string, asks []*claimer.Ask) error {
	return claimJobs(ctx, c.face.w.q, db, c.Lease, c.ID, kinds, asks)
}

func (c claims) ClaimOne(ctx context.Context, db pg.Quick, kinds []string, ask *claimer.Ask,
	few []int64) (gone int, err error) {
	all := []*claimer.Ask{ask}
	err = c.face.w.q.claim(ctx, db, c.Lease, c.ID, all, stmt.ClaimOne, few, ask.Queue, kinds)
	if ask.Got() > 0 {
		one := ask.Jobs.(leased)[0]
		gone = DefaultMaxLost - c.face.w.handlers[one.Kind].runs.MaxLost + one.Lost
	}
	return gone, err
}

func (c claims) Accept(queue string, jobs claimer.Jobs, began time.Time) (anyWait bool) {
	holds := make([]*hold.Hold, jobs.Len())
	for i, l := range jobs.(leased) {
		c.face.takes(l)
		holds[i] = &l.hold
	}
	return c.Executor.Accept(queue, holds, began)
}
