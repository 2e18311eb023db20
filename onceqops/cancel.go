package onceqops

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// cancellable are the states in which a job can be cancelled.
var cancellable = []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRunning, onceq.StateRetrying}

// CancelMany cancels the unfinished jobs that the filter chooses, newest first, 500 a statement, each as
// Cancel does. It returns how many jobs were cancelled because nobody held them, and how many running jobs
// were asked to end, which they do unless they finish first. By default it chooses unfinished jobs in every
// state; Filter.States may name StateWaiting, StateDelayed, StateRunning and StateRetrying. A filter without
// Queue, Kind, Scope, IDs and Group needs Filter.All. Filter.Limit is how many jobs are tried; 0 means all.
// With Filter.KeepKeys the keys of all of them stay taken for their windows. With a pool as db each statement
// commits on its own, and the counts are right even if there is an error. Jobs that are enqueued while it
// runs are not cancelled.
func (q *Ops) CancelMany(ctx context.Context, db onceq.DB, filter Filter) (cancelled, asked int, err error) {
	filter.byDefault(cancellable...)
	keep := filter.KeepKeys
	filter.KeepKeys = false
	err = q.each(ctx, db, filter, cancellable, func(ids []int64) error {
		c, a, err := root.Cancel(ctx, q.q, db, ids, slices.Contains(filter.States, onceq.StateRunning), keep)
		cancelled, asked = cancelled+c, asked+a
		return err
	})
	return cancelled, asked, err
}

// Retry makes a job run now that waits for its time: a delayed job, or one that failed and waits for its next
// attempt. It returns the job's state after that, and changes nothing in any other state. A job whose row a
// transaction has locked is left as it is. An unknown job is ErrNotFound. Use Redrive for a dead job.
func (q *Ops) Retry(ctx context.Context, db onceq.DB, id int64) (onceq.State, error) {
	n, err := q.hurry(ctx, db, []int64{id})
	if err != nil {
		return 0, err
	}
	state, err := q.state(ctx, db, id)
	if n > 0 && errors.Is(err, onceq.ErrNotFound) { // it has run since, and nothing was kept
		return onceq.StateWaiting, nil
	}
	return state, err
}

func (q *Ops) hurry(ctx context.Context, db onceq.DB, ids []int64) (n int, err error) {
	if err = q.store.Send(ctx, db, pg.ForCaller, table.HurryJobs, []any{ids}, pg.Row(&n)); err != nil {
		return 0, fmt.Errorf("onceq: retry: %w", err)
	}
	return n, nil
}

// RetryMany makes the jobs run now that the filter chooses and that wait for their time, newest first, 500 a
// statement, each as Retry does, and returns how many. By default it chooses jobs that failed before;
// Filter.States may name StateRetrying and StateDelayed. Use it when a provider is back after an outage, for
// example. A filter without Queue, Kind, Scope, IDs and Group needs Filter.All. Filter.Limit is how many jobs
// are tried; 0 means all. With a pool as db each statement commits on its own, and the count is right even if
// there is an error.
func (q *Ops) RetryMany(ctx context.Context, db onceq.DB, filter Filter) (retried int, err error) {
	filter.byDefault(onceq.StateRetrying)
	err = q.each(ctx, db, filter, hurriable, func(ids []int64) error {
		n, err := q.hurry(ctx, db, ids)
		retried += n
		return err
	})
	return retried, err
}

// hurriable are the states in which a job can be made to run now.
var hurriable = []onceq.State{onceq.StateRetrying, onceq.StateDelayed}

// WouldRetry says which jobs RetryMany would try with this filter: how many, and which. Those among them that
// are due already would not change.
func (q *Ops) WouldRetry(ctx context.Context, db onceq.DB, filter Filter) (Choice, error) {
	filter.byDefault(onceq.StateRetrying)
	return q.choose(ctx, db, filter, hurriable)
}

// WouldCancel says which jobs CancelMany would try with this filter: how many, and which.
func (q *Ops) WouldCancel(ctx context.Context, db onceq.DB, filter Filter) (Choice, error) {
	filter.byDefault(cancellable...)
	filter.KeepKeys = false
	return q.choose(ctx, db, filter, cancellable)
}
