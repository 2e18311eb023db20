package onceq

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Wait waits until a job is finished or held, and returns it with its State, and with its Result or its Errors. ref names the
// job by its id, as Enqueue returns it, or by its key (Kind.Ref). If ctx ends first, Wait returns the job as it was then, and
// the context's error: an HTTP handler with a time limit answers 202 then.
//
// Where the kind keeps no history (Kind.Keep), the result is that of the job's key, as long as the key is taken. A job
// without a key and a history leaves nothing when it completes: of one that Wait has seen, Wait returns StateCompleted without
// a Result, and of one that was completed before, ErrNotFound.
//
// Wait looks after 25 ms, and each time twice as late, up to a second. It holds no connection between two looks.
func (q *Queue) Wait(ctx context.Context, ref JobRef) (JobInfo, error) {
	if (ref.ID != 0) == (ref.Key != "") {
		return JobInfo{}, invalid("JobRef", "must name a job by its ID, or by its Scope and Key, and not by both")
	}
	var job JobInfo // as the latest look saw it
	for pause := 25 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		now, err := q.waited(ctx, ref, job)
		switch {
		case err != nil && ctx.Err() != nil:
			return job, ctx.Err()
		case err != nil:
			return job, err
		case now.State.Finished():
			return now, nil
		}
		job = now
		if !sleep(ctx, pause, nil) {
			return job, ctx.Err()
		}
	}
}

// waited is one look of Wait at a job that the look before saw as it is in seen.
func (q *Queue) waited(ctx context.Context, ref JobRef, seen JobInfo) (JobInfo, error) {
	if seen.ID == 0 && ref.ID == 0 {
		return q.GetByKey(ctx, q.pool, ref.Scope, ref.Key)
	}
	id := max(ref.ID, seen.ID)
	switch k, err := q.job(ctx, q.pool, id, false, nil, nil); {
	case err == nil && k.job.State.Finished():
		return q.Get(ctx, q.pool, id) // with its result
	case err == nil:
		return k.job, nil
	case !errors.Is(err, pgx.ErrNoRows):
		return JobInfo{}, fmt.Errorf("onceq: wait: %w", err)
	case seen.ID == 0:
		return JobInfo{}, noJob(id)
	}
	if seen.Key != "" {
		job, err := q.GetByKey(ctx, q.pool, seen.Scope, seen.Key)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return JobInfo{}, err
		}
		if err == nil && job.ID == id && job.State.Finished() {
			return job, nil
		}
	}
	seen.State = StateCompleted // every other end leaves the job in the history
	return seen, nil
}
