package onceq

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/onceq/onceq/internal/sqlstate"
)

// Moving a job changes its queue, where nobody has it: a claim that is under way and a move meet in the lock of the job's
// row, and whoever comes second finds that its condition no longer holds. The effects of a job (Once) are found by its queue,
// so they move too, in the same statement. A job whose lease ran out stays where it is, because its former holder may be
// about to write an intent under the old queue: the next claim or Cancel settles that. An effect that is under way when its job
// is given back, and moves, finds its fence again (effectScope).

// moveJobs moves live jobs that nobody has had since they were last given back. Those that are due are due from now on, because
// the new queue's claims have passed the times before; since when they have been due stays known. A job that missed its slot
// stays late, so that it gets another one. It wakes a worker.
var moveJobs = `
with free as materialized (
  select id, queue, created_at, identity, case when ` + hasSlot + ` then ` + sqlSlotMissed + ` else statement_timestamp() end as due
    from onceq.jobs
   where id = any ($1::bigint[]) and leased_until is null and queue <> $2::text
   order by id
     for update skip locked
),
moved as (
  update onceq.jobs j set queue = $2::text, run_at = greatest(j.run_at, free.due), due_at = coalesce(j.due_at, case when j.run_at < free.due then j.run_at end)
    from free where j.id = any (array[free.id])
  returning j.id, j.queue, j.run_at
),` + moveEffects + `
select count(*), (select onceq.wake($2::text, n.due, $3::bigint, $4::bool)
                    from (select count(*) as due from moved where run_at <= statement_timestamp()) n
                   where n.due > 0 and exists (select from onceq.waiters w where w.idle_until > statement_timestamp()))
  from moved`

// moveWaits moves jobs that wait for their lane, their limit or other jobs. They keep their places there.
var moveWaits = `
with free as materialized (
  select id, queue, created_at, identity from onceq.job_waits
   where id = any ($1::bigint[]) and queue <> $2::text
   order by id
     for update skip locked
),
moved as (
  update onceq.job_waits w set queue = $2::text from free where w.id = any (array[free.id])
  returning 1
),` + moveEffects + `
select count(*) from moved`

var moveEffects = `
effect as (
  update onceq.job_fences f set scope = $2::text
    from free g
   where ` + effectsOf("g") + ` and ` + ofJob("g") + `
)`

// Move moves an unfinished job that nobody has into another queue, inside db, and reports whether it did: it is
// false for a job that runs or is finished, for one whose lease has just run out or whose row a transaction has
// locked, and for one that is in that queue already. The job stays the same: its id, key, priority, lane, limit and
// place there, attempts, and what is known of its effects. If it is due and waits for no lane, limit or other job,
// it comes after those that wait in the new queue: its RunAt is now. Since when it has been due (JobInfo.DueAt,
// QueueStats.Oldest) does not change. One that missed its slot of a rate gets another one. A worker of the new queue
// is woken; whether there is one is not checked (Workers). An unknown job is ErrNotFound; a bad name of a queue is
// an *InvalidError.
//
// The queue that a kind's jobs go to is in its code: jobs that are enqueued later are not moved.
func (q *Queue) Move(ctx context.Context, db DB, id int64, queue string) (moved bool, err error) {
	if err := checkName("queue", queue, MaxNameBytes); err != nil {
		return false, err
	}
	n, err := q.move(ctx, db, []int64{id}, queue)
	if err == nil && n == 0 {
		_, err = q.state(ctx, db, id)
	}
	return n > 0, err
}

func (q *Queue) move(ctx context.Context, db DB, ids []int64, queue string) (moved int, err error) {
	// A job that waits for its lane may become live in between, so those are tried first.
	var n int
	err = q.send(ctx, db, forCaller, moveWaits, []any{ids, queue}, row(&moved))
	if err == nil && moved < len(ids) {
		err = q.send(ctx, db, forCaller, moveJobs, []any{ids, queue, rand.Int64(), outside(db)}, row(&n, nil))
	}
	switch {
	case sqlstate.Of(err) == "23505": // another job that had the id has an effect of the same name there
		return moved, fmt.Errorf("%w: move: %w", ErrIDTaken, err)
	case err != nil:
		return moved, fmt.Errorf("onceq: move: %w", err)
	}
	return moved + n, nil
}

// movable are the states in which a job can be moved.
var movable = []State{StateWaiting, StateDelayed, StateRetrying}

// MoveMany moves the jobs that the filter chooses into another queue, newest first, 500 a statement, each as Move does, and
// returns how many. By default it chooses jobs in all of the states StateWaiting, StateDelayed and StateRetrying;
// Filter.States may name some of them. A filter without Queue, Kind, Scope, IDs and Group needs Filter.All. Filter.Limit is how many
// jobs are tried; 0 means all. With a pool as db each statement commits on its own, and the count is right even if there is
// an error.
func (q *Queue) MoveMany(ctx context.Context, db DB, filter Filter, queue string) (moved int, err error) {
	if err := checkName("queue", queue, MaxNameBytes); err != nil {
		return 0, err
	}
	if filter.States == nil {
		filter.States = movable
	}
	err = q.each(ctx, db, filter, movable, func(ids []int64) error {
		n, err := q.move(ctx, db, ids, queue)
		moved += n
		return err
	})
	return moved, err
}

// WouldMove says which jobs MoveMany would try with this filter: how many, and which.
func (q *Queue) WouldMove(ctx context.Context, db DB, filter Filter) (Choice, error) {
	if filter.States == nil {
		filter.States = movable
	}
	return q.choose(ctx, db, filter, movable)
}
