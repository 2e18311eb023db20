package onceq

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/bridge"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// The statements of all this lock in the order of all others: jobs or history by id, then fences.

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
// a handler's transaction.
func (q *Queue) Cancel(ctx context.Context, db DB, id int64) (State, error) {
	cancelled, _, err := q.cancel(ctx, db, []int64{id}, true, false)
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

// cancel cancels the jobs that nobody holds and, if running, asks the holders of the others to stop. With keep, keys stay taken
// for their windows.
func (q *Queue) cancel(ctx context.Context, db DB, ids []int64,
	running, keep bool) (cancelled, asked int, err error) {
	gone, err := cancelFree(ctx, q, db, pg.ForCaller, ids, false, keep)
	if err != nil || !running || len(gone) == len(ids) {
		return len(gone), 0, err
	}
	cancelled = len(gone)
	ids = slices.DeleteFunc(slices.Clone(ids), func(id int64) bool { return slices.Contains(gone, id) })
	// The others are held. Once the requests are written, check whether one of the jobs was given back in between: its
	// former holder may have looked for a request just before.
	if err := q.store.Send(ctx, db, pg.ForCaller, stmt.RequestCancels, []any{ids}, pg.Row(&asked)); err != nil {
		return cancelled, 0, fmt.Errorf("onceq: cancel: %w", err)
	}
	gone, err = cancelFree(ctx, q, db, pg.ForCaller, ids, false, keep)
	return cancelled + len(gone), asked - len(gone), err
}

// cancelFree cancels those of the jobs that nobody holds, and returns them. With noted it takes only those that somebody asked
// to cancel before: these keep their keys, because Cancel said that they run.
func cancelFree(ctx context.Context, q *Queue, db DB, by pg.Way, ids []int64,
	noted, keep bool) (gone []int64, err error) {
	least := int32(0)
	if noted || keep {
		least = 1
	}
	return q.cancelBy(ctx, db, by, stmt.CancelJobs, ids, DefaultWindow.Milliseconds(), noted, least)
}

// cancelBy sends one of the statements that cancel jobs, and tells of those that it has cancelled.
func (q *Queue) cancelBy(ctx context.Context, db DB, by pg.Way, statement string,
	args ...any) (gone []int64, err error) {
	var queues, kinds, scopes, keys []string
	err = q.store.Send(ctx, db, by, statement, args, pg.Row(&gone, &queues, &kinds, &scopes, &keys))
	if err != nil {
		return nil, fmt.Errorf("onceq: cancel: %w", err)
	}
	for i, id := range gone {
		q.waits.ended(id)
		q.emit(ctx, Event{Type: EventCancelled, JobID: id, Queue: queues[i], Kind: kinds[i], Scope: scopes[i], Key: keys[i]})
	}
	return gone, nil
}

// heed cancels jobs that were given back just now although somebody had asked to cancel them: the holder did not hear of it in
// time.
func (q *Queue) heed(ctx context.Context, db DB, given []int64) {
	if len(given) == 0 {
		return
	}
	if _, err := cancelFree(ctx, q, db, pg.Hot, given, true, true); err != nil {
		q.log.WarnContext(ctx, "onceq: cancelling jobs failed; a worker does it within a minute", "jobs", given, "error", err)
	}
}

// heedAll cancels the jobs that somebody asked to cancel and that nobody holds. Each worker does it once a minute. One that cannot be
// cancelled keeps no other from it. slow is for what may meet rows that somebody has locked.
func heedAll(ctx context.Context, q *Queue, db, slow DB) (failed error) {
	for last, more := int64(0), true; more; {
		var ids []int64
		if err := q.store.Guarded(ctx, db, stmt.Unheeded, []any{table.RepairChunk, last}, &ids); err != nil {
			return fmt.Errorf("onceq: cancel: %w", err)
		}
		more = len(ids) == table.RepairChunk
		if len(ids) == 0 {
			break
		}
		last = slices.Max(ids)
		_, err := cancelFree(ctx, q, slow, pg.Brief, ids, true, true)
		if err == nil {
			continue
		}
		if !pg.LockedOut(err) && !pg.BadData(err) {
			return err
		}
		for _, id := range ids {
			_, err := cancelFree(ctx, q, slow, pg.Brief, []int64{id}, true, true)
			switch {
			case err == nil, pg.LockedOut(err): // that one waits for the next time
			case pg.BadData(err):
				failed = err
			default:
				return err
			}
		}
	}
	return failed
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

// redriveBy runs jobs again that are in these states. It adds to led the groups of which members came back.
func (q *Queue) redriveBy(ctx context.Context, db DB, by pg.Way, ids []int64, states []int16,
	led map[int64]bool) (r bridge.Redriven, err error) {
	var came, groups []int64
	for _, id := range ids {
		if led[id] {
			came = append(came, id)
		}
	}
	for range table.SettleTries { // an EnqueueMany makes absent fences first: two may meet in a deadlock
		if err = q.store.Send(ctx, db, by, stmt.RedriveJobs, []any{ids, states, DefaultWindow.Milliseconds(), came}, pg.Row(&r.Back, &r.Taken, &r.Held, &r.Early, &groups, &r.UsedUp)); !IsRetryable(err) || !pg.Outside(db) {
			break
		}
	}
	for _, id := range groups {
		led[id] = true
	}
	if err != nil {
		return bridge.Redriven{}, fmt.Errorf("onceq: redrive: %w", q.store.Told(err))
	}
	return r, nil
}
