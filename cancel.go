package onceq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// The statements of this file lock in the order of all others: jobs or history by id, then fences.

// CancelledKeep is how long a cancelled job stays in the history at least. From there it can be redriven.
const CancelledKeep = 24 * time.Hour

// cancelJobs is the function cancel of the schema, whose comment says what it does.
const cancelJobs = `
select c.cancelled, c.queues, c.kinds, c.scopes, c.keys from onceq.cancel($1::bigint[], $2::bigint, $3::bool, $4::int) c`

// requestCancels leaves notes for the holders of those of the jobs that are live, and returns how many.
const requestCancels = `select n from onceq.request_cancels($1::bigint[]) n`

// Cancel ends a job, inside db, and returns its state after that. A job that nobody holds becomes StateCancelled: it stays
// in the history for CancelledKeep. If no worker ever had it, its key is free at once, whatever its window: the next
// Enqueue of the key is a new job, in the same transaction too. If a worker had it, as one that failed or was snoozed,
// something of it may have happened, and the key stays taken for its window. CancelMany with Filter.KeepKeys keeps every
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
func (q *Queue) cancel(ctx context.Context, db DB, ids []int64, running, keep bool) (cancelled, asked int, err error) {
	gone, err := q.cancelFree(ctx, db, forCaller, ids, false, keep)
	if err != nil || !running || len(gone) == len(ids) {
		return len(gone), 0, err
	}
	cancelled = len(gone)
	ids = slices.DeleteFunc(slices.Clone(ids), func(id int64) bool { return slices.Contains(gone, id) })
	// The others are held. Once the requests are written, check whether one of the jobs was given back in between: its
	// former holder may have looked for a request just before.
	if err := q.send(ctx, db, forCaller, requestCancels, []any{ids}, row(&asked)); err != nil {
		return cancelled, 0, fmt.Errorf("onceq: cancel: %w", err)
	}
	gone, err = q.cancelFree(ctx, db, forCaller, ids, false, keep)
	return cancelled + len(gone), asked - len(gone), err
}

// cancelFree cancels those of the jobs that nobody holds, and returns them. With noted it takes only those that somebody asked
// to cancel before: these keep their keys, because Cancel said that they run.
func (q *Queue) cancelFree(ctx context.Context, db DB, by way, ids []int64, noted, keep bool) (gone []int64, err error) {
	least := int32(0)
	if noted || keep {
		least = 1
	}
	return q.cancelBy(ctx, db, by, cancelJobs, ids, CancelledKeep.Milliseconds(), noted, least)
}

// cancelBy sends one of the statements that cancel jobs, and tells of those that it has cancelled.
func (q *Queue) cancelBy(ctx context.Context, db DB, by way, statement string, args ...any) (gone []int64, err error) {
	var queues, kinds, scopes, keys []string
	err = q.send(ctx, db, by, statement, args, row(&gone, &queues, &kinds, &scopes, &keys))
	if err != nil {
		return nil, fmt.Errorf("onceq: cancel: %w", err)
	}
	for i, id := range gone {
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
	if _, err := q.cancelFree(ctx, db, hot, given, true, true); err != nil {
		q.log.WarnContext(ctx, "onceq: cancelling jobs failed; a worker does it within a minute", "jobs", given, "error", err)
	}
}

// unheeded gives jobs after $2 that somebody asked to cancel and that nobody holds, at most $1 of them. A holder cannot see a request
// that is not committed yet when it gives its job back, and a row that a transaction has locked may turn out to be one that
// nobody runs.
const unheeded = `
select pg_catalog.array_agg(job_id)
  from (select x.job_id from onceq.job_cancels x
         where x.job_id > $2::bigint
           and (exists (select from onceq.jobs j
                         where j.id = x.job_id and j.created_at <= x.requested_at
                           and (j.leased_until is null or j.leased_until <= statement_timestamp()) offset 0)
             or exists (select from onceq.job_waits w where w.id = x.job_id and w.created_at <= x.requested_at offset 0))
         order by x.job_id
         limit $1::int) x`

// heedAll cancels the jobs that somebody asked to cancel and that nobody holds. Each worker does it once a minute. One that cannot be
// cancelled keeps no other from it. slow is for what may meet rows that somebody has locked.
func (q *Queue) heedAll(ctx context.Context, db, slow DB) (failed error) {
	for last, more := int64(0), true; more; {
		var ids []int64
		if err := q.guarded(ctx, db, unheeded, []any{repairChunk, last}, &ids); err != nil {
			return fmt.Errorf("onceq: cancel: %w", err)
		}
		more = len(ids) == repairChunk
		if len(ids) == 0 {
			break
		}
		last = slices.Max(ids)
		_, err := q.cancelFree(ctx, slow, brief, ids, true, true)
		if err == nil {
			continue
		}
		if !lockedOut(err) && !badData(err) {
			return err
		}
		for _, id := range ids {
			_, err := q.cancelFree(ctx, slow, brief, []int64{id}, true, true)
			switch {
			case err == nil, lockedOut(err): // that one waits for the next time
			case badData(err):
				failed = err
			default:
				return err
			}
		}
	}
	return failed
}

// cancellable are the states in which a job can be cancelled.
var cancellable = []State{StateWaiting, StateDelayed, StateRunning, StateRetrying}

// CancelMany cancels the unfinished jobs that the filter chooses, newest first, 500 a statement, each as Cancel does. It
// returns how many jobs were cancelled because nobody held them, and how many running jobs were asked to end, which they do
// unless they finish first. By default it chooses unfinished jobs in every state; Filter.States may name StateWaiting,
// StateDelayed, StateRunning and StateRetrying. A filter without Queue, Kind, Scope, IDs and Group needs Filter.All. Filter.Limit
// is how many jobs are tried; 0 means all. With Filter.KeepKeys the keys of all of them stay taken for their windows. With a
// pool as db each statement commits on its own, and the counts are right even if there is an error. Jobs that are enqueued
// while it runs are not cancelled.
func (q *Queue) CancelMany(ctx context.Context, db DB, filter Filter) (cancelled, asked int, err error) {
	filter.byDefault(cancellable...)
	keep := filter.KeepKeys
	filter.KeepKeys = false
	err = q.each(ctx, db, filter, cancellable, func(ids []int64) error {
		c, a, err := q.cancel(ctx, db, ids, slices.Contains(filter.States, StateRunning), keep)
		cancelled, asked = cancelled+c, asked+a
		return err
	})
	return cancelled, asked, err
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

// hurryJobs makes jobs due that wait for their time, and returns how many.
const hurryJobs = `select n from onceq.hurry($1::bigint[]) n`

// Retry makes a job run now that waits for its time: a delayed job, or one that failed and waits for its next attempt. It
// returns the job's state after that, and changes nothing in any other state. A job whose row a transaction has locked is left as it
// is. An unknown job is ErrNotFound. Use Redrive for a dead job.
func (q *Queue) Retry(ctx context.Context, db DB, id int64) (State, error) {
	n, err := q.hurry(ctx, db, []int64{id})
	if err != nil {
		return 0, err
	}
	state, err := q.state(ctx, db, id)
	if n > 0 && errors.Is(err, ErrNotFound) { // it has run since, and nothing was kept
		return StateWaiting, nil
	}
	return state, err
}

func (q *Queue) hurry(ctx context.Context, db DB, ids []int64) (n int, err error) {
	if err = q.send(ctx, db, forCaller, hurryJobs, []any{ids}, row(&n)); err != nil {
		return 0, fmt.Errorf("onceq: retry: %w", err)
	}
	return n, nil
}

// RetryMany makes the jobs run now that the filter chooses and that wait for their time, newest first, 500 a statement, each as Retry
// does, and returns how many. By default it chooses jobs that failed before; Filter.States may name StateRetrying and StateDelayed.
// Use it when a provider is back after an outage, for example. A filter without Queue, Kind, Scope, IDs and Group needs
// Filter.All. Filter.Limit is how many jobs are tried; 0 means all. With a pool as db each statement commits on its own,
// and the count is right even if there is an error.
func (q *Queue) RetryMany(ctx context.Context, db DB, filter Filter) (retried int, err error) {
	filter.byDefault(StateRetrying)
	err = q.each(ctx, db, filter, hurriable, func(ids []int64) error {
		n, err := q.hurry(ctx, db, ids)
		retried += n
		return err
	})
	return retried, err
}

// hurriable are the states in which a job can be made to run now.
var hurriable = []State{StateRetrying, StateDelayed}

// WouldRetry says which jobs RetryMany would try with this filter: how many, and which. Those among them that are due already
// would not change.
func (q *Queue) WouldRetry(ctx context.Context, db DB, filter Filter) (Choice, error) {
	filter.byDefault(StateRetrying)
	return q.choose(ctx, db, filter, hurriable)
}

// repairs checks a filter for many jobs that are to be changed. Those that are dead are, unless the caller has said otherwise.
func (f *Filter) repairs(allowed []State) error {
	f.byDefault(StateDead)
	if err := f.check(); err != nil {
		return err
	}
	if f.Limit < 0 {
		return invalid("Filter.Limit", "is negative")
	}
	if !f.All && f.Queue == "" && f.Kind == "" && f.Scope == "" && f.IDs == nil && f.Group == 0 {
		return invalid("Filter", "names no Queue, Kind, Scope, IDs or Group, and would choose the jobs of all of them; name one, or set All if that is meant")
	}
	for _, s := range f.States {
		if !slices.Contains(allowed, s) {
			return invalid("Filter.States", "has %s; possible here: %s", s, allowed)
		}
	}
	return nil
}

// Choice says which jobs a call for many jobs would try. WouldCancel, WouldRetry, WouldRedrive, WouldMove, WouldDiscard and
// WouldResolve return it. They change nothing, and refuse what CancelMany, RetryMany, RedriveMany, MoveMany, DiscardMany and
// ResolveMany refuse.
type Choice struct {
	Count int     `json:"count"` // how many; at most Filter.Limit
	IDs   []int64 `json:"ids"`   // the first hundred, in the order in which they would be tried: newest first
}

// choose counts the jobs that each would go through. It reads the row of every one.
func (q *Queue) choose(ctx context.Context, db DB, filter Filter, allowed []State) (c Choice, err error) {
	if err := filter.repairs(allowed); err != nil {
		return Choice{}, err
	}
	if c.Count, err = q.Count(ctx, db, filter); err != nil {
		return Choice{}, err
	}
	if filter.Limit = 100; c.Count > 0 {
		filter.Limit = min(filter.Limit, c.Count)
		c.IDs, err = q.ids(ctx, db, filter)
	}
	return c, err
}

// WouldCancel says which jobs CancelMany would try with this filter: how many, and which.
func (q *Queue) WouldCancel(ctx context.Context, db DB, filter Filter) (Choice, error) {
	filter.byDefault(cancellable...)
	filter.KeepKeys = false
	return q.choose(ctx, db, filter, cancellable)
}

// each calls do with the ids of the jobs that the filter chooses, part by part: newest first, where each part
// commits on its own. Parts that commit together lock in the order of a single statement, or two calls would
// meet in a deadlock: all ids are read before. Finished jobs are locked, and go in the order of their keys,
// as absent fences have to; of two with one key the newer gets it. Of live jobs the oldest go first.
func (q *Queue) each(ctx context.Context, db DB, filter Filter, allowed []State, do func(ids []int64) error) error {
	if err := filter.repairs(allowed); err != nil {
		return err
	}
	tried := 0
	part := func(ids []int64) error {
		if err := do(ids); err != nil {
			return err
		}
		if tried += len(ids); filter.Progress == nil {
			return nil
		}
		return protect(func() error { return filter.Progress(tried) })
	}
	if outside(db) {
		return filter.pages(ctx, q, db, part)
	}
	var all []int64
	err := filter.pages(ctx, q, db, func(ids []int64) error { all = append(all, ids...); return nil })
	if err != nil {
		return err
	}
	slices.Sort(all)
	if _, past := filter.states(); len(past) > 0 && len(all) > 0 {
		if err := q.queryRow(ctx, db, lockPast, []any{all}, &all, nil); err != nil {
			return fmt.Errorf("onceq: locking jobs: %w", err)
		}
	}
	for ids := range slices.Chunk(all, repairChunk) {
		if err := part(ids); err != nil {
			return err
		}
	}
	return nil
}

// lockPast locks jobs of the history by id, then the fences of their keys by scope and key, and then the jobs
// that wait for them by id: what parts of one call lock. It returns the jobs in the order of their keys.
var lockPast = `
with h as materialized (
  select id, scope, key from onceq.job_history where id = any ($1::bigint[]) order by id for update
),
fence as materialized (
  select from (select * from h where key is not null order by scope, key) s cross join lateral (
         select from onceq.job_fences f where f.key = any (array[s.key]) and f.scope = s.scope
            and f.class + 0 = ` + sqlOfJob + ` and f.job_id = s.id for update) f
),
follower as materialized (
  select from (select distinct ` + followLine("m.group_id") + ` as lane from h cross join lateral (
                      select group_id from onceq.job_members where job_id + 0 = any (array[h.id])) m
                order by 1) g cross join lateral (
         select from onceq.job_waits where lane = any (array[g.lane]) for no key update) w
)
select array(select id from h order by scope, key, id desc),
       (select count(*) from fence) + (select count(*) from follower)`

// pages calls do with the ids of the jobs that the filter chooses, newest first.
func (f *Filter) pages(ctx context.Context, q *Queue, db DB, do func(ids []int64) error) error {
	page := *f
	for left := f.Limit; ; {
		if page.Limit = repairChunk; left > 0 {
			page.Limit = min(left, repairChunk)
		}
		ids, err := q.ids(ctx, db, page)
		if err != nil || len(ids) == 0 {
			return err
		}
		page.After = ids[len(ids)-1]
		if err := do(ids); err != nil {
			return err
		}
		if left > 0 {
			if left -= len(ids); left <= 0 {
				return nil
			}
		}
	}
}

func (q *Queue) ids(ctx context.Context, db DB, filter Filter) ([]int64, error) {
	filter.WithoutPayloads = true
	statement, args := filter.statement()
	var ids []int64
	err := q.send(ctx, db, reading, `select id from (`+statement+`) page`, args, func(rows pgx.Rows) (err error) {
		ids, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("onceq: list: %w", err)
	}
	return ids, nil
}
