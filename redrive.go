package onceq

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// redriveJobs brings jobs back from the history.
const redriveJobs = `
select r.back, r.taken, r.held, r.early, r.led, r.used_up from onceq.redrive($1::bigint[], $2::smallint[], $3::bigint, $4::bigint[]) r`

// redrivable are the states from which a job can be redriven.
var redrivable = []State{StateDead, StateCancelled, StateHeld}

// redriven says what became of the jobs of one statement: see redriveJobs.
type redriven struct{ back, taken, held, early, usedUp []int64 }

func (q *Queue) redrive(ctx context.Context, db DB, ids []int64, states []State) (redriven, error) {
	return q.redriveBy(ctx, db, forCaller, ids, states, map[int64]bool{})
}

// redriveBy adds to led the groups of which members came back.
func (q *Queue) redriveBy(ctx context.Context, db DB, by way, ids []int64, states []State, led map[int64]bool) (r redriven, err error) {
	_, past := (&Filter{States: states}).states()
	var came, groups []int64
	for _, id := range ids {
		if led[id] {
			came = append(came, id)
		}
	}
	for range settleTries { // an EnqueueMany makes absent fences first: two may meet in a deadlock
		if err = q.send(ctx, db, by, redriveJobs, []any{ids, past, DefaultWindow.Milliseconds(), came}, row(&r.back, &r.taken, &r.held, &r.early, &groups, &r.usedUp)); !IsRetryable(err) || !outside(db) {
			break
		}
	}
	for _, id := range groups {
		led[id] = true
	}
	if err != nil {
		return redriven{}, fmt.Errorf("onceq: redrive: %w", q.told(err))
	}
	return r, nil
}

// Redrive runs a dead, held or cancelled job again, inside db, and returns its state after that: StateWaiting. It is the
// same job: it keeps its id, its key, its errors and the outcomes of its effects, and its tokens go on growing. Its attempts
// and lost leases count from 0. If it has a lane, it gets back the place that it had there when it was enqueued. A delayed
// job that was cancelled before any worker had it runs no earlier than at its time: it is StateDelayed until then. In any
// other state nothing is changed. An unknown job is ErrNotFound. A job with a held effect would be held again at once: the
// error is then ErrHeld, nothing is changed, and Resolve is the method to use. A job that is dead because it was claimed about a
// million times (Snooze) would be dead again at once, and is refused too.
//
// A job that somebody cancelled while it waited for others (Job.After) waits for them again, as at first: for those that are
// unfinished or held, and Job.IfDead says what dead and cancelled ones mean. So redrive the others before it. A job that its
// DeadCancel has cancelled runs, unless some of the others are unfinished by now: then it waits for them, and DeadCancel holds
// again. A job that had gone on before it was cancelled, died or was held has done its waiting: only if some of the others are
// unfinished again it waits for these, and then runs even if one is dead.
//
// If a later job has taken the key, the error is a *DuplicateError that describes that job, and nothing is changed. If a
// Reaper has removed the job's fence, Redrive takes the key again, with DefaultWindow. It does so even if a later job had
// the key and finished; the tokens of that job were larger.
func (q *Queue) Redrive(ctx context.Context, db DB, id int64) (State, error) {
	for range settleTries {
		r, err := q.redrive(ctx, db, []int64{id}, redrivable)
		switch {
		case err != nil:
			return 0, err
		case len(r.usedUp) > 0:
			return 0, fmt.Errorf("onceq: job %d was claimed as often as its tokens can count and would be dead again at once; enqueue a new job for its work, after a Discard if that is to have its key", id)
		case len(r.held) > 0:
			return 0, fmt.Errorf("%w: job %d has a held effect and would be held again at once; settle it with Queue.Resolve, which runs the job again (Queue.Effects lists what is held)", ErrHeld, id)
		case len(r.early) > 0:
			return StateDelayed, nil
		case len(r.back) > 0:
			return StateWaiting, nil
		case len(r.taken) == 0:
			return q.state(ctx, db, id)
		}
		var dup DuplicateError
		var state fenceState
		var result *string
		var live *int16
		k, err := q.job(ctx, db, id, false, nil, nil)
		if err == nil {
			dup.Scope, dup.Key = k.job.Scope, k.job.Key
			err = q.queryRow(ctx, db, readTaken, []any{[]string{dup.Scope}, []string{dup.Key}}, nil, &dup.Existing.ID, &state, nil, &result, nil, nil, &live)
		}
		switch {
		case errors.Is(err, pgx.ErrNoRows), err == nil && dup.Existing.ID == id:
			continue // removed or discarded in between
		case err != nil:
			return 0, fmt.Errorf("onceq: redrive: %w", err)
		}
		dup.Existing.Duplicate, dup.Existing.State = true, state.job(live)
		if result != nil {
			dup.Existing.Output = []byte(*result)
		}
		return 0, &dup
	}
	return 0, fmt.Errorf("%w (job %d)", ErrKeyUnsettled, id)
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

// RedriveMany redrives the jobs that the filter chooses, newest first, 500 a statement, and then those of them that waited for
// others, each after the ones that it waits for, so that it waits for them again. Each is redriven as by Redrive, so a job that
// was cancelled before its time waits for that, and one that was cancelled while it waited for others keeps its Job.IfDead. By
// default it chooses dead jobs; Filter.States may name StateDead, StateHeld and StateCancelled. A filter
// without Queue, Kind, Scope, IDs and Group needs Filter.All. Filter.Limit is how many jobs are tried; 0 means all.
// Jobs whose key a later job has taken stay as they are and are counted in taken. Jobs with a held effect would be held
// again at once and also stay: if there are any, the error is ErrHeld, and the other jobs are redriven; see ResolveMany. So do jobs
// that were claimed too often: the error says how many.
// With a pool as db each statement commits on its own, and the counts are right even if there is an error.
func (q *Queue) RedriveMany(ctx context.Context, db DB, filter Filter) (redriven, taken int, err error) {
	held, usedUp, tried := 0, 0, 0
	led := make(map[int64]bool)
	filter.byDefault(StateDead)
	redrive := func(ids []int64) error {
		r, err := q.redriveBy(ctx, db, forCaller, ids, filter.States, led)
		redriven, taken, held, usedUp = redriven+len(r.back), taken+len(r.taken), held+len(r.held), usedUp+len(r.usedUp)
		return err
	}
	last, groups := []int64(nil), make(map[int64][]int64) // the followers
	progress := filter.Progress
	if progress != nil {
		filter.Progress = func(n int) error { tried = n - len(last); return progress(tried) }
	}
	err = q.each(ctx, db, filter, redrivable, func(ids []int64) error {
		err := q.send(ctx, db, forCaller, readFollowers, []any{ids}, each(func(rows pgx.Rows) error {
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
			return fmt.Errorf("onceq: redrive: %w", q.told(err))
		}
		return redrive(slices.DeleteFunc(slices.Clone(ids), func(id int64) bool { _, follows := groups[id]; return follows }))
	})
	if err == nil {
		for ids := range slices.Chunk(membersFirst(last, groups), repairChunk) {
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
		err = fmt.Errorf("%w: %d jobs have a held effect and would be held again at once, and stay; settle them with Queue.ResolveMany", ErrHeld, held)
	}
	if (err == nil || errors.Is(err, ErrHeld)) && usedUp > 0 {
		err = errors.Join(err, fmt.Errorf("onceq: %d jobs were claimed as often as their tokens can count and would be dead again at once, and stay; enqueue new jobs for their work", usedUp))
	}
	return redriven, taken, err
}

// WouldRedrive says which jobs RedriveMany would try with this filter: how many, and which. Those among them whose key is taken
// or that have a held effect would stay.
func (q *Queue) WouldRedrive(ctx context.Context, db DB, filter Filter) (Choice, error) {
	return q.choose(ctx, db, filter, redrivable)
}

// discardJobs removes finished jobs from the history and returns how many.
const discardJobs = `select n from onceq.discard($1::bigint[], $2::smallint[]) n`

func (q *Queue) discard(ctx context.Context, db DB, ids []int64, states []State) (n int, err error) {
	_, past := (&Filter{States: states}).states()
	if err = q.send(ctx, db, forCaller, discardJobs, []any{ids, past}, row(&n)); err != nil {
		return 0, fmt.Errorf("onceq: discard: %w", err)
	}
	return n, nil
}

// Discard removes a finished job from the history, inside db. The recorded outcomes of its effects are deleted too, and its
// key is free at once, whatever its window, unless a later job has taken it. A job that is not finished is ErrUnfinished; a
// job that is not in the history is ErrNotFound.
func (q *Queue) Discard(ctx context.Context, db DB, id int64) error {
	n, err := q.discard(ctx, db, []int64{id}, discardable)
	if err != nil || n > 0 {
		return err
	}
	if _, err := q.state(ctx, db, id); err != nil {
		return err
	}
	return fmt.Errorf("%w (job %d)", ErrUnfinished, id)
}

var discardable = []State{StateCompleted, StateDead, StateCancelled, StateHeld}

// DiscardMany discards the finished jobs that the filter chooses, newest first, 500 a statement, and returns how many. By
// default it chooses dead jobs; Filter.States may name StateCompleted, StateDead, StateCancelled and StateHeld. A filter
// without Queue, Kind, Scope, IDs and Group needs Filter.All. Filter.Limit is how many jobs are tried; 0 means all. With a pool as
// db each statement commits on its own, and the count is right even if there is an error.
func (q *Queue) DiscardMany(ctx context.Context, db DB, filter Filter) (discarded int, err error) {
	filter.byDefault(StateDead)
	err = q.each(ctx, db, filter, discardable, func(ids []int64) error {
		n, err := q.discard(ctx, db, ids, filter.States)
		discarded += n
		return err
	})
	return discarded, err
}

// WouldDiscard says which jobs DiscardMany would discard with this filter: how many, and which.
func (q *Queue) WouldDiscard(ctx context.Context, db DB, filter Filter) (Choice, error) {
	return q.choose(ctx, db, filter, discardable)
}
