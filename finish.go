package onceq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/jsonb"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/table"
)

// SetResult stores a result with the completion: a duplicate of the same key inside its window gets it. v is encoded as
// JSON now, an empty json.RawMessage as null; the limit is MaxResultBytes. A job that waits for this one reads it as Member.Result (Lease.Members). Else, without
// a key, it can be read only from the history (Kind.Keep, Queue.Get).
func (l *Lease) SetResult(v any) error {
	raw, err := encodeResult(v)
	if err != nil {
		return err
	}
	l.hold.Result = raw
	return nil
}

// SetWeight says how often the job has counted in its limit in truth, where Job.Weight was a guess: the
// tokens that a model has used. It is for limits with Max or Rate: with the end of this attempt, in the same
// commit, the jobs after it wait as much longer or shorter. 0 means that it did not count at all. It is 0 to
// MaxWeight. The last call in the attempt counts, also if a transaction of the handler is rolled back. The
// next attempt weighs what the job was enqueued with, and so does one whose lease is lost. For a job without
// such a limit it changes nothing.
func (l *Lease) SetWeight(n int) error {
	if n < 0 || n > MaxWeight {
		return invalid("SetWeight", "got %d; 0 to 1,000,000,000 is possible", n)
	}
	l.hold.Heavier.Store(int64(n - l.Weight))
	return nil
}

func encodeResult(v any) (string, error) { return encodeJSON("result", v) }

// encodeJSON takes an empty json.RawMessage for null, as encodePayload does: a provider's answer without a body is one.
func encodeJSON(field string, v any) (string, error) {
	raw, ok := v.(json.RawMessage)
	if !ok {
		var err error
		if raw, err = marshalled(field, v, json.Marshal); err != nil {
			if isPanic(err) {
				return "", err
			}
			return "", invalid(field, "does not encode as JSON: %s", jsonb.Fault(err))
		}
	}
	if len(raw) == 0 {
		raw = json.RawMessage("null")
	}
	if len(raw) > MaxResultBytes {
		return "", invalid(field, "has %d bytes; at most %d: store it elsewhere and return a reference", len(raw), MaxResultBytes)
	}
	if _, err := jsonb.Scan(raw, false, nil); err != nil {
		return "", invalid(field, "%v", err)
	}
	return string(raw), nil
}

// errInTx is the error for a handler that ends its job itself although the worker does so. The two would wait for each
// other, because the worker's transaction has the job's row locked.
var errInTx = errors.New("onceq: the worker ends this job with the handler's transaction: return nil to complete it, or an error (see Fatal, RetryAfter, Snooze, Reschedule)")

// Complete finishes the job inside db. In a transaction the completion commits together with everything else that the
// transaction wrote. If the lease is lost, the statement raises an error, so that a commit after it in the same pipeline
// fails, and Complete returns a *LeaseError. With a nil db it runs in a transaction of its own. EventCompleted is reported
// when the statement has run: the caller's transaction may still roll back, and the job then runs again.
//
// A refusal must end the whole transaction. In a savepoint it ends that alone: a caller that rolls back to the savepoint, drops the
// error and commits the outer transaction commits the writes of a worker that has lost its job, beside those of the next one. So
// call Complete outside of savepoints, or return its error. With HandleTx and HandleBatch this cannot happen.
//
// Postgres may want the transaction run again (IsRetryable), because of this statement or of what follows it up to the
// commit. If the handler returns that error, the worker soon runs the handler again, up to thirty times, before it counts
// as an error. At repeatable read and serializable this happens whenever the worker has extended the lease after the
// transaction's snapshot, because that changes the job's row; it does so every third of the lease. The worker then leaves
// the row alone for twice the time that the handler has taken, so that the next run succeeds; if the worker's process dies
// meanwhile, the job comes back that much later. With Lock as the transaction's first statement there is no such conflict.
func (l *Lease) Complete(ctx context.Context, db DB) error {
	if db == nil {
		db = l.db
	}
	if l.hold.InTx {
		return errInTx
	}
	statement, args := finish.Completion(&l.hold)
	err := l.q.store.SendBare(ctx, db, statement, args, pg.NoRows)
	if pg.OverLimit(err) && pg.Own(db) != nil && ctx.Err() == nil { // otherwise the job would run again
		err = l.q.store.Send(ctx, db, pg.Hot, statement, args, pg.NoRows)
	}
	return l.completed(ctx, err)
}

// CompleteInBatch adds the completion to the caller's own batch. If the lease is lost, it raises SQLSTATE OQ001, and what
// follows it in the batch's transaction, such as a commit, does not happen. Use LeaseLost to recognise the batch's error.
//
// EventCompleted or EventStale is reported when closing the batch's results reaches this statement. What follows it may
// still fail, and the job then runs again. If the application reads this result itself, with BatchResults.Exec, no event is
// reported.
//
// The transaction of HandleTx and HandleBatch completes the job itself: there CompleteInBatch returns an error and adds
// nothing.
func (l *Lease) CompleteInBatch(batch *pgx.Batch) error {
	if l.hold.InTx {
		return errInTx
	}
	l.hold.ByHandler.Store(true)
	statement, args := finish.Completion(&l.hold)
	if l.q.store.Citus.Load() == pg.CitusYes {
		statement = l.q.store.OnNode(statement)
	}
	batch.Queue(l.q.store.SQL(statement), args...).Fn = func(results pgx.BatchResults) error {
		_, err := results.Exec()
		_ = l.completed(context.Background(), err)
		return err // unchanged: the caller looks for its SQLSTATE
	}
	return nil
}

// LeaseLost reports whether err, an error of the caller's own batch, means that Postgres refused a completion because its
// lease is lost.
func LeaseLost(err error) bool { return errors.Is(err, ErrLeaseLost) || sqlstate.LeaseLost(err) }

func (l *Lease) completed(ctx context.Context, err error) error {
	switch {
	case err == nil:
		l.hold.ByHandler.Store(true)
		l.hold.Accepted.Store(true)
		l.q.waits.Ended(l.ID)
		if level := l.level(EventCompleted); l.q.watched(level) {
			e := l.event(EventCompleted)
			e.Run = time.Since(l.hold.Began)
			l.q.emitAt(ctx, level, e)
		}
		return nil
	case sqlstate.LeaseLost(err):
		lost := l.lostError("complete")
		if lost.Completed = l.hold.Accepted.Load(); lost.Completed {
			return lost
		}
		e := l.event(EventStale)
		e.Err = lost
		l.q.emit(ctx, e)
		return lost
	}
	l.conflicted(ctx, err)
	return fmt.Errorf("onceq: complete: %w", l.q.store.Told(err))
}

// Fail ends this attempt: the job runs again after the default backoff, or in a worker its kind's, or is dead when its attempts
// are spent. err decides
// as it does when a handler returns it: see Fatal, RetryAfter, Snooze and Reschedule.
func (l *Lease) Fail(ctx context.Context, err error) error {
	if err == nil {
		return invalid("Fail", "needs an error; use Complete for a job that has none")
	}
	return l.end(ctx, "fail", l.failure(tame(err)))
}

// Snooze gives the job back, to run again after d. It spends no attempt. A d of 0 or less counts as a second.
func (l *Lease) Snooze(ctx context.Context, d time.Duration) error {
	return l.end(ctx, "snooze", l.failure(Snooze(d)))
}

// Release gives the job back at once, as if it had not been claimed. It spends no attempt.
func (l *Lease) Release(ctx context.Context) error {
	return l.end(ctx, "release", finish.Outcome{Hold: &l.hold, State: table.StateWaiting})
}

func (l *Lease) end(ctx context.Context, op string, o finish.Outcome) error {
	if l.hold.InTx {
		return errInTx
	}
	stale, _, err := l.q.finish(ctx, l.db, pg.Hot, []finish.Outcome{o})
	if err != nil {
		return err
	}
	if len(stale) > 0 {
		return l.lostError(op)
	}
	return nil
}

// finish writes outcomes, at most one for each lease, and returns the leases whose guard did not hold. After an
// error, left are the outcomes that may not have been written.
func (q *Queue) finish(ctx context.Context, db DB, by pg.Way, outcomes []finish.Outcome) (stale []*hold.Hold,
	left []finish.Outcome, err error) {
	pauseFull(ctx, q, db, by, outcomes)
	var held []int64
	stale, cancelled, left, err := finish.Write(ctx, q.store, db, by, outcomes, func(o finish.Outcome, ok bool) {
		q.wrote(ctx, o, ok)
		if o.Own && (ok || o.Unsure) {
			held = append(held, o.Hold.ID)
		}
	})
	q.heed(ctx, db, cancelled)
	q.unhold(ctx, db, held)
	return stale, left, err
}

// wrote reports an outcome after its statement. ok says that the guard held.
func (q *Queue) wrote(ctx context.Context, o finish.Outcome, ok bool) {
	switch {
	case ok || !o.Unsure:
		q.finished(ctx, o, !ok)
	case o.Late != nil:
		q.log.WarnContext(ctx, "onceq: a handler returned an error after it had completed its job; the job stays completed",
			slog.Int64("job", o.Hold.ID), slog.String("kind", o.Hold.Kind), slog.Any("error", o.Late))
	}
}

// finished reports an outcome.
func (q *Queue) finished(ctx context.Context, o finish.Outcome, stale bool) {
	t := EventCompleted
	switch {
	case stale && o.State == table.StateCompleted:
		t = EventStale
	case stale:
		t = EventLeaseLost
	case o.State == table.StateDead:
		t = EventDead
	case o.State == table.StateCancelled:
		t = EventCancelled
	case o.State == table.StateHeld:
		t = EventHeld
	case o.Spend:
		t = EventFailed
	case o.Err != "":
		t = EventDeferred
	case o.Asked:
		t = EventSnoozed
	case o.State == table.StateWaiting:
		t = EventReleased
	}
	q.waits.Ended(o.Hold.ID) // or the job runs again
	level := leaseOf(o.Hold).level(t)
	if !q.watched(level) {
		return
	}
	e := leaseOf(o.Hold).event(t)
	e.Run, e.Err = o.Run, o.Cause
	if e.Err == nil && o.Err != "" {
		e.Err = errors.New(o.Err)
	}
	if stale {
		e.Err = leaseOf(o.Hold).lostError("finish")
	}
	q.emitAt(ctx, level, e)
}
