package onceq

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/finish"
)

// Cancel ends a job, inside db, and returns its state after that. A job that nobody holds becomes StateCancelled: it stays
// in the history for 24 hours at least. If no worker ever had it, its key is free at once, whatever its window: the next
// Enqueue of the key is a new job, in the same transaction too. If a worker had it, as one that failed or was snoozed,
// something of it may have happened, and the key stays taken for its window. Ops.CancelMany with KeepKeys (package onceqops) keeps every
// key taken for its window.
//
// A job that somebody holds is still StateRunning: when its lease is next extended, the handler's context ends with
// ErrCancelled. The job is then cancelled, and kept in the same way, with its key, unless it finishes first. If it was given
// back meanwhile, or only a transaction had its row, a worker cancels it when it would run next, or within a minute; for a
// job whose row is locked StateRunning is returned, too. While the outcome of one of its effects (Once) is unknown, it stays
// in the history for longer, until the effect is resolved (Resolve) or the job is redriven or discarded. Cancel does not
// change a finished job. A job that is unknown, or that completed and was not kept, is ErrNotFound. Cancel never waits for
// a handler's transaction, but for an open one that cancels the same held job.
func (q *Queue) Cancel(ctx context.Context, db DB, id int64) (State, error) {
	cancelled, _, err := q.canceller().Jobs(ctx, db, []int64{id}, true, false)
	switch {
	case err != nil:
		return 0, err
	case cancelled > 0:
		return StateCancelled, nil
	}
	state, err := q.state(ctx, db, id)
	if err == nil && !state.Finished() {
		state = StateRunning
	}
	return state, err
}

func (q *Queue) canceller() finish.Canceller {
	gone := func(ctx context.Context, id int64, queue, kind, scope, key string) {
		q.waits.Ended(id)
		q.emit(ctx, Event{Type: EventCancelled, JobID: id, Queue: queue, Kind: kind, Scope: scope, Key: key})
	}
	return finish.Canceller{Store: q.store, Window: DefaultWindow.Milliseconds(), Gone: gone}
}

// heed cancels jobs that were given back just now although somebody had asked to cancel them.
func (q *Queue) heed(ctx context.Context, db DB, given []int64) {
	if len(given) == 0 {
		return
	}
	if err := q.canceller().Heed(ctx, db, given); err != nil {
		q.log.WarnContext(ctx, "onceq: cancelling jobs failed; a worker does it within a minute", "jobs", given, "error", err)
	}
}

// state reads a job's state. The error is ErrNotFound if the job is neither live nor in the history.
func (q *Queue) state(ctx context.Context, db DB, id int64) (State, error) {
	k, err := q.job(ctx, db, id, false, nil, nil)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, noJob(id)
	case err != nil:
		return 0, fmt.Errorf("onceq: reading the state of job %d: %w", id, err)
	}
	return k.job.State, nil
}
