package finish

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Canceller cancels jobs that nobody holds, and asks the holders of others to stop. Its statements lock in
// the order of all others: jobs or history by id, then fences.
type Canceller struct {
	Store  *pg.Store
	Window int64 // milliseconds: how long a cancelled job stays

	// Gone is told of each job that is cancelled.
	Gone func(ctx context.Context, id int64, queue, kind, scope, key string)
}

// Jobs cancels the jobs that nobody holds and, if running, asks the holders of the others to stop. With keep,
// keys stay taken for their windows.
func (c Canceller) Jobs(ctx context.Context, db pg.DB, ids []int64, running, keep bool) (cancelled, asked int, err error) {
	gone, err := c.free(ctx, db, pg.ForCaller, ids, false, keep)
	if err != nil || !running || len(gone) == len(ids) {
		return len(gone), 0, err
	}
	cancelled = len(gone)
	ids = slices.DeleteFunc(slices.Clone(ids), func(id int64) bool { return slices.Contains(gone, id) })
	// The others are held. Once the requests are written, look whether one of the jobs was given back in between:
	// its former holder may have looked for a request just before.
	if err := c.Store.Send(ctx, db, pg.ForCaller, stmt.RequestCancels, []any{ids}, pg.Row(&asked)); err != nil {
		return cancelled, 0, fmt.Errorf("onceq: cancel: %w", err)
	}
	gone, err = c.free(ctx, db, pg.ForCaller, ids, false, keep)
	return cancelled + len(gone), asked - len(gone), err
}

// free cancels those of the jobs that nobody holds, and returns them. With noted it takes only those that
// somebody asked to cancel before: these keep their keys, because Cancel said that they run.
func (c Canceller) free(ctx context.Context, db pg.DB, by pg.Way, ids []int64, noted, keep bool) (gone []int64, err error) {
	least := int32(0)
	if noted || keep {
		least = 1
	}
	return c.send(ctx, db, by, stmt.CancelJobs, ids, c.Window, noted, least)
}

// send sends one of the statements that cancel jobs, and tells of those that it has cancelled.
func (c Canceller) send(ctx context.Context, db pg.DB, by pg.Way, statement string, args ...any) (gone []int64, err error) {
	var queues, kinds, scopes, keys []string
	err = c.Store.Send(ctx, db, by, statement, args, pg.Row(&gone, &queues, &kinds, &scopes, &keys))
	if err != nil {
		return nil, fmt.Errorf("onceq: cancel: %w", err)
	}
	for i, id := range gone {
		c.Gone(ctx, id, queues[i], kinds[i], scopes[i], keys[i])
	}
	return gone, nil
}

// Heed cancels jobs that were given back just now although somebody had asked to cancel them: the holder did
// not hear of it in time.
func (c Canceller) Heed(ctx context.Context, db pg.DB, given []int64) error {
	_, err := c.free(ctx, db, pg.Hot, given, true, true)
	return err
}

// HeedAll cancels the jobs that somebody asked to cancel and that nobody holds. Each worker does it once a
// minute. One that cannot be cancelled keeps no other from it. slow is for what may meet rows that are locked.
func (c Canceller) HeedAll(ctx context.Context, db, slow pg.DB) (failed error) {
	for last, more := int64(0), true; more; {
		var ids []int64
		if err := c.Store.Guarded(ctx, db, stmt.Unheeded, []any{table.RepairChunk, last}, &ids); err != nil {
			return fmt.Errorf("onceq: cancel: %w", err)
		}
		more = len(ids) == table.RepairChunk
		if len(ids) == 0 {
			break
		}
		last = slices.Max(ids)
		_, err := c.free(ctx, slow, pg.Brief, ids, true, true)
		if err == nil {
			continue
		}
		if !pg.LockedOut(err) && !pg.BadData(err) {
			return err
		}
		for _, id := range ids {
			_, err := c.free(ctx, slow, pg.Brief, []int64{id}, true, true)
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

// Followers cancels the followers that the promoter has found to end with a dead member. One that cannot be
// cancelled keeps no other from it; it is tried again in a minute.
func (c Canceller) Followers(ctx context.Context, db pg.DB, ids []int64, log *slog.Logger) error {
	if len(ids) == 0 {
		return nil
	}
	_, err := c.send(ctx, db, pg.Hot, stmt.CancelDead, ids, c.Window)
	if pg.BadData(err) {
		for _, id := range ids {
			if _, err = c.send(ctx, db, pg.Hot, stmt.CancelDead, []int64{id}, c.Window); pg.BadData(err) {
				log.WarnContext(ctx, "onceq: a job that waits for dead ones cannot be cancelled; it is tried again in a minute", slog.Int64("job", id), slog.Any("error", err))
				err = c.Store.Send(ctx, db, pg.Hot, stmt.CallLater, []any{id}, pg.NoRows)
			}
			if err != nil {
				break
			}
		}
	}
	if err != nil {
		return fmt.Errorf("onceq: cancelling jobs that wait for dead ones: %w", c.Store.Told(err))
	}
	return nil
}

// Redrive runs jobs again that are in these states. It adds to led the groups of which members came back.
func Redrive(ctx context.Context, store *pg.Store, db pg.DB, by pg.Way, ids []int64, states []int16, window int64,
	led map[int64]bool) (r table.Redriven, err error) {
	var came, groups []int64
	for _, id := range ids {
		if led[id] {
			came = append(came, id)
		}
	}
	for range table.SettleTries { // an EnqueueMany makes absent fences first: two may meet in a deadlock
		all := pg.Row(&r.Back, &r.Taken, &r.Held, &r.Early, &groups, &r.UsedUp)
		if err = store.Send(ctx, db, by, stmt.RedriveJobs, []any{ids, states, window, came}, all); !sqlstate.Retryable(err) || !pg.Outside(db) {
			break
		}
	}
	for _, id := range groups {
		led[id] = true
	}
	if err != nil {
		return table.Redriven{}, fmt.Errorf("onceq: redrive: %w", store.Told(err))
	}
	return r, nil
}
