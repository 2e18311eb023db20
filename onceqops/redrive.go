package onceqops

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// ErrUnfinished: a job that is not finished cannot be discarded. Cancel it first.
var ErrUnfinished = errors.New("onceq: job is not finished; cancel it before discarding it")

// redrivable are the states from which a job can be redriven.
var redrivable = []onceq.State{onceq.StateDead, onceq.StateCancelled, onceq.StateHeld}

func (q *Ops) redrive(ctx context.Context, db onceq.DB, ids []int64, states []onceq.State,
	led map[int64]bool) (table.Redriven, error) {
	_, past := (&Filter{States: states}).states()
	return root.Redrive(ctx, q.q, db, ids, past, led)
}

// Redrive runs a dead, held or cancelled job again, inside db, and returns its state after that:
// StateWaiting. It is the same job: it keeps its id, its key, its errors and the outcomes of its effects, and
// its tokens go on growing. Its attempts and lost leases count from 0. If it has a lane, it gets back the
// place that it had there when it was enqueued. A delayed job that was cancelled before any worker had it
// runs no earlier than at its time: it is StateDelayed until then. In any other state nothing is changed. An
// unknown job is ErrNotFound. A job with a held effect would be held again at once: the error is then
// ErrHeld, nothing is changed, and Resolve is the method to use. A job that is dead because it was claimed
// about a million times (Snooze) would be dead again at once, and is refused too.
//
// A job that somebody cancelled while it waited for others (Job.After) waits for them again, as at first: for
// those that are unfinished or held, and Job.IfDead says what dead and cancelled ones mean. So redrive the
// others before it. A job that its DeadCancel has cancelled runs, unless some of the others are unfinished by
// now: then it waits for them, and DeadCancel holds again. A job that had gone on before it was cancelled,
// died or was held has done its waiting: only if some of the others are unfinished again it waits for these,
// and then runs even if one is dead.
//
// If a later job has taken the key, the error is a *DuplicateError that describes that job, and nothing is
// changed. If a Reaper has removed the job's fence, Redrive takes the key again, with DefaultWindow. It does
// so even if a later job had the key and finished; the tokens of that job were larger.
func (q *Ops) Redrive(ctx context.Context, db onceq.DB, id int64) (onceq.State, error) {
	for range table.SettleTries {
		r, err := q.redrive(ctx, db, []int64{id}, redrivable, map[int64]bool{})
		switch {
		case err != nil:
			return 0, err
		case len(r.UsedUp) > 0:
			return 0, fmt.Errorf("onceq: job %d was claimed as often as its tokens can count and would be dead again at once; enqueue a new job for its work, after a Discard if that is to have its key", id)
		case len(r.Held) > 0:
			return 0, fmt.Errorf("%w: job %d has a held effect and would be held again at once; settle it with Ops.Resolve, which runs the job again (Ops.Effects lists what is held)", onceq.ErrHeld, id)
		case len(r.Early) > 0:
			return onceq.StateDelayed, nil
		case len(r.Back) > 0:
			return onceq.StateWaiting, nil
		case len(r.Taken) == 0:
			return q.state(ctx, db, id)
		}
		k, err := q.job(ctx, db, id, false, nil, nil)
		dup := onceq.DuplicateError{Scope: k.job.Scope, Key: k.job.Key}
		if err == nil {
			dup.Existing, err = root.Taken(ctx, q.q, db, dup.Scope, dup.Key)
		}
		switch {
		case errors.Is(err, pgx.ErrNoRows), err == nil && dup.Existing.ID == id:
			continue // removed or discarded in between
		case err != nil:
			return 0, fmt.Errorf("onceq: redrive: %w", err)
		}
		return 0, &dup
	}
	return 0, fmt.Errorf("%w (job %d)", onceq.ErrKeyUnsettled, id)
}

// readFollowers gives the jobs, whether each waits for others, or did, and the groups that it is a member of.
const readFollowers = `
select u.id, exists (select from onceq.job_members where group_id = u.id offset 0),
       array(select group_id from onceq.job_members where job_id + 0 = u.id order by group_id)
  from pg_catalog.unnest($1::bigint[]) with ordinality as u(id, n)
 order by u.n`

// membersFirst sorts followers, of which each has its groups: one that waits for another one comes after it.
func membersFirst(ids []int64, groups map[int64][]int64) []int64 {
	sorted, seen := make([]int64, 0, len(ids)), make(map[int64]bool, len(ids))
	var visit func(ids []int64)
	visit = func(ids []int64) {
		for _, id := range ids {
			if _, ours := groups[id]; ours && !seen[id] {
				seen[id] = true
				visit(groups[id])
				sorted = append(sorted, id)
			}
		}
	}
	visit(ids)
	slices.Reverse(sorted)
	return sorted
}

// RedriveMany redrives the jobs that the filter chooses, newest first, 500 a statement, and then those of
// them that waited for others, each after the ones that it waits for, so that it waits for them again. Each
// is redriven as by Redrive, so a job that was cancelled before its time waits for that, and one that was
// cancelled while it waited for others keeps its Job.IfDead. By default it chooses dead jobs; Filter.States
// may name StateDead, StateHeld and StateCancelled. A filter without Queue, Kind, Scope, IDs and Group needs
// Filter.All. Filter.Limit is how many jobs are tried; 0 means all. Jobs whose key a later job has taken stay
// as they are and are counted in taken. Jobs with a held effect would be held again at once and also stay: if
// there are any, the error is ErrHeld, and the other jobs are redriven; see ResolveMany. So do jobs that were
// claimed too often: the error says how many. With a pool as db each statement commits on its own, and the
// counts are right even if there is an error.
func (q *Ops) RedriveMany(ctx context.Context, db onceq.DB, filter Filter) (redriven, taken int, err error) {
	held, usedUp, tried := 0, 0, 0
	led := make(map[int64]bool)
	filter.byDefault(onceq.StateDead)
	redrive := func(ids []int64) error {
		r, err := q.redrive(ctx, db, ids, filter.States, led)
		redriven, taken, held, usedUp = redriven+len(r.Back), taken+len(r.Taken), held+len(r.Held), usedUp+len(r.UsedUp)
		return err
	}
	last, groups := []int64(nil), make(map[int64][]int64) // the followers
	progress := filter.Progress
	if progress != nil {
		filter.Progress = func(n int) error { tried = n - len(last); return progress(tried) }
	}
	err = q.each(ctx, db, filter, redrivable, func(ids []int64) error {
		err := q.store.Send(ctx, db, pg.ForCaller, readFollowers, []any{ids}, pg.Each(func(rows pgx.Rows) error {
			var id int64
			var follows bool
			var of []int64
			err := rows.Scan(&id, &follows, &of)
			if follows {
				last, groups[id] = append(last, id), of
			}
			return err
		}))
		if err != nil {
			return fmt.Errorf("onceq: redrive: %w", err)
		}
		return redrive(slices.DeleteFunc(slices.Clone(ids), func(id int64) bool { _, follows := groups[id]; return follows }))
	})
	if err == nil {
		for ids := range slices.Chunk(membersFirst(last, groups), table.RepairChunk) {
			if err = redrive(ids); err == nil && progress != nil {
				tried += len(ids)
				err = progress(tried)
			}
			if err != nil {
				break
			}
		}
	}
	if err == nil && held > 0 {
		err = fmt.Errorf("%w: %d jobs have a held effect and would be held again at once, and stay; settle them with Ops.ResolveMany", onceq.ErrHeld, held)
	}
	if (err == nil || errors.Is(err, onceq.ErrHeld)) && usedUp > 0 {
		err = errors.Join(err, fmt.Errorf("onceq: %d jobs were claimed as often as their tokens can count and would be dead again at once, and stay; enqueue new jobs for their work", usedUp))
	}
	return redriven, taken, err
}

// WouldRedrive says which jobs RedriveMany would try with this filter: how many, and which. Those among them
// whose key is taken or that have a held effect would stay.
func (q *Ops) WouldRedrive(ctx context.Context, db onceq.DB, filter Filter) (Choice, error) {
	return q.choose(ctx, db, filter, redrivable)
}

func (q *Ops) discard(ctx context.Context, db onceq.DB, ids []int64,
	states []onceq.State) (n int, err error) {
	_, past := (&Filter{States: states}).states()
	if err = q.store.Send(ctx, db, pg.ForCaller, table.DiscardJobs, []any{ids, past}, pg.Row(&n)); err != nil {
		return 0, fmt.Errorf("onceq: discard: %w", err)
	}
	return n, nil
}

// Discard removes a finished job from the history, inside db. The recorded outcomes of its effects are
// deleted too, and its key is free at once, whatever its window, unless a later job has taken it. A job that
// is not finished is ErrUnfinished; a job that is not in the history is ErrNotFound.
func (q *Ops) Discard(ctx context.Context, db onceq.DB, id int64) error {
	n, err := q.discard(ctx, db, []int64{id}, discardable)
	if err != nil || n > 0 {
		return err
	}
	if _, err := q.state(ctx, db, id); err != nil {
		return err
	}
	return fmt.Errorf("%w (job %d)", ErrUnfinished, id)
}

var discardable = []onceq.State{onceq.StateCompleted, onceq.StateDead, onceq.StateCancelled, onceq.StateHeld}

// DiscardMany discards the finished jobs that the filter chooses, newest first, 500 a statement, and returns
// how many. By default it chooses dead jobs; Filter.States may name StateCompleted, StateDead, StateCancelled
// and StateHeld. A filter without Queue, Kind, Scope, IDs and Group needs Filter.All. Filter.Limit is how
// many jobs are tried; 0 means all. With a pool as db each statement commits on its own, and the count is
// right even if there is an error.
func (q *Ops) DiscardMany(ctx context.Context, db onceq.DB, filter Filter) (discarded int, err error) {
	filter.byDefault(onceq.StateDead)
	err = q.each(ctx, db, filter, discardable, func(ids []int64) error {
		n, err := q.discard(ctx, db, ids, filter.States)
		discarded += n
		return err
	})
	return discarded, err
}

// WouldDiscard says which jobs DiscardMany would discard with this filter: how many, and which.
func (q *Ops) WouldDiscard(ctx context.Context, db onceq.DB, filter Filter) (Choice, error) {
	return q.choose(ctx, db, filter, discardable)
}
