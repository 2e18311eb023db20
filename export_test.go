package onceq

import (
	"context"
	"time"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/task"
)

// This is what the tests of package onceq_test may use of the unexported code: pure functions and limits.

// FailAll writes the outcomes of several leases at once, as a worker does, inside db.
func (q *Queue) FailAll(ctx context.Context, db DB, leases []*Lease, err error) error {
	var outcomes []finish.Outcome
	for _, l := range leases {
		outcomes = append(outcomes, l.failure(err))
	}
	_, _, failed := q.finish(ctx, db, pg.Hot, outcomes)
	return failed
}

// UnholdAll is what a worker does once a minute for the held jobs of its process.
func (q *Queue) UnholdAll(ctx context.Context) error {
	return q.held.All(unholdOne(ctx, q, q.store.Pool))
}

// ReaperPass makes a pass. grown then says whether so many keys have come since that the Reaper ends its rest.
func ReaperPass(ctx context.Context, r *Reaper) (grown func() bool, err error) {
	_, last, _, err := r.pass(ctx)
	return func() bool { return r.reaper.Grown(ctx, last) }, err
}

// CompleteNext completes a job in tx as a worker may do it: the next job of its lane is leased as well, for the time given.
func (l *Lease) CompleteNext(ctx context.Context, tx DB, lease time.Duration) error {
	args := []any{l.ID, l.hold.Claims, l.hold.Holder, "", true, lease.Microseconds(), hold.NewHolder(0), l.Queue, []string{l.Kind}}
	return l.completed(ctx, l.q.store.SendBare(ctx, tx, stmt.FinishNext, args, pg.NoRows))
}

// FinishAll completes jobs as a worker does, in one batch that waits so long for a lock, and returns those that are left.
func (q *Queue) FinishAll(ctx context.Context, db DB, patience time.Duration, leases []*Lease) (left []*Lease, err error) {
	batch := make([]finish.Outcome, len(leases))
	for i, l := range leases {
		batch[i] = finish.Outcome{Hold: &l.hold, State: table.StateCompleted}
	}
	_, open, err := q.finish(ctx, db, pg.Waiting(patience), batch)
	for _, o := range open {
		left = append(left, leaseOf(o.Hold))
	}
	return left, err
}

// ClaimAhead claims the jobs of some queues, of which each has so many free handlers, as a worker does. It returns of how many it
// has kept the payload.
func (q *Queue) ClaimAhead(ctx context.Context, kind string, queues []string, free []int64) (kept []int, err error) {
	var asks []*claimer.Ask
	for i, queue := range queues {
		asks = append(asks, &claimer.Ask{Queue: queue, Asked: cursor.Asked{From: cursor.FromStart(), Limit: 100}, Free: free[i]})
	}
	err = claimJobs(ctx, q, q.store.Pool, time.Minute, 1, []string{kind}, asks)
	for _, ask := range asks {
		kept = append(kept, 0)
		for _, l := range ask.Jobs.(leased) {
			if l.hold.TooMany == 0 && (l.Payload != nil || l.Bytes != nil) {
				kept[len(kept)-1]++
			}
		}
	}
	return kept, err
}

// SQLState is the code of an error of Postgres.
func SQLState(err error) string { return sqlstate.Of(err) }

// AskedNow has Claim ask for nothing in the next hour that it asks for once a second: whether there are lanes, and what is paused.
func (q *Queue) AskedNow() {
	at := int64(rhythm.Now() + time.Hour)
	q.lanes.Look.Store(at)
	q.lanes.Turn.Store(at)
	q.pauses.Take(time.Now().Add(time.Hour), nil, nil)
}

// WasQuiet reports whether Enqueue has ever found that nobody waits for the queue.
func (q *Queue) WasQuiet(queue string) bool {
	_, found := q.intake.Quiet.Load(queue)
	return found || q.intake.AllQuiet.Load() != 0
}

// Extend extends a lease as a worker over the same pool does in a beat, and returns when that has ended. The worker's leases last so
// long.
func (q *Queue) Extend(ctx context.Context, l *Lease, lease time.Duration) {
	own, err := pg.Connect(ctx, q.store.Pool)
	if err != nil {
		panic(err)
	}
	defer own.Disconnect(true)
	s := task.NewSet(task.Config{
		Store: q.store, DB: pg.Quick{Own: own, Patience: 100 * time.Millisecond}, Lease: lease, Ctx: ctx, Troubles: &q.troubles, Log: q.log,
	})
	s.Extend([]*task.Task{{Hold: &l.hold}})
}

// PromoteIn lets go on what was called, inside a transaction, and SweepIn looks there for the ends of members that nobody tells.
func (q *Queue) PromoteIn(ctx context.Context, tx DB) error {
	return q.store.Send(ctx, tx, pg.Hot, stmt.PromoteLines, []any{time.Time{}, 200, int64(0), int64(0), int64(0), int64(0), nil, nil}, pg.NoRows)
}

func (q *Queue) SweepIn(ctx context.Context, tx DB) error {
	return q.store.Send(ctx, tx, pg.Hot, stmt.SweepMembers, nil, pg.NoRows)
}
