package onceqops

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/table"
)

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
func (q *Ops) Move(ctx context.Context, db onceq.DB, id int64, queue string) (moved bool, err error) {
	if err := checkName("queue", queue, onceq.MaxNameBytes); err != nil {
		return false, err
	}
	n, err := q.move(ctx, db, []int64{id}, queue)
	if err == nil && n == 0 {
		_, err = q.state(ctx, db, id)
	}
	return n > 0, err
}

func (q *Ops) move(ctx context.Context, db onceq.DB, ids []int64, queue string) (moved int, err error) {
	err = q.store.Send(ctx, db, pg.ForCaller, table.MoveJobs, []any{ids, queue, rand.Int64(), pg.Outside(db)}, pg.Row(&moved))
	switch {
	case sqlstate.Of(err) == "23505": // another job that had the id has an effect of the same name there
		return 0, fmt.Errorf("%w: move: %w", onceq.ErrIDTaken, err)
	case err != nil:
		return 0, fmt.Errorf("onceq: move: %w", err)
	}
	return moved, nil
}

// movable are the states in which a job can be moved.
var movable = []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRetrying}

// MoveMany moves the jobs that the filter chooses into another queue, newest first, 500 a statement, each as Move does, and
// returns how many. By default it chooses jobs in all of the states StateWaiting, StateDelayed and StateRetrying;
// Filter.States may name some of them. A filter without Queue, Kind, Scope, IDs and Group needs Filter.All. Filter.Limit is how many
// jobs are tried; 0 means all. With a pool as db each statement commits on its own, and the count is right even if there is
// an error.
func (q *Ops) MoveMany(ctx context.Context, db onceq.DB, filter Filter, queue string) (moved int, err error) {
	if err := checkName("queue", queue, onceq.MaxNameBytes); err != nil {
		return 0, err
	}
	filter.byDefault(movable...)
	err = q.each(ctx, db, filter, movable, func(ids []int64) error {
		n, err := q.move(ctx, db, ids, queue)
		moved += n
		return err
	})
	return moved, err
}

// WouldMove says which jobs MoveMany would try with this filter: how many, and which.
func (q *Ops) WouldMove(ctx context.Context, db onceq.DB, filter Filter) (Choice, error) {
	filter.byDefault(movable...)
	return q.choose(ctx, db, filter, movable)
}
