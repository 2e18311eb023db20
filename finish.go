package onceq

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/jsonb"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
)

// outcome is how one run of a job ended. A finished state takes the job out of jobs; otherwise the job is made ready to run
// again after delay.
type outcome struct {
	hold   *hold.Hold
	state  State  // StateCompleted, StateDead, StateCancelled, StateHeld; or StateWaiting: run again
	result string // encoded; "" for none
	err    string // appended to the job's errors; "" for none
	delay  time.Duration
	spend  bool          // an attempt was spent
	reset  bool          // count attempts from 0 again
	wait   *waitFor      // what it is given back for: the database says how long; nil for none
	keep   int64         // milliseconds in history; 0: not at all, -1: until somebody decides
	unsure bool          // it may already be written, so a guard that does not hold means nothing
	locked time.Time     // when it was found that it waits for somebody else's lock; zero if it does not
	doubt  *successor    // what a completion before this try may have leased; nil for nothing
	own    bool          // held because of an effect of its own
	full   time.Duration // for how long its limit is to be paused (LimitFull)
	asked  bool          // the handler came to its end and did not finish the job; otherwise the job is given back

	tried bool          // unsure because of a commit that completed the job, if there was one
	late  error         // what the handler returned after it had completed the job itself
	cause error         // for events
	run   time.Duration // for events
}

// SetResult stores a result with the completion: a duplicate of the same key inside its window gets it. v is encoded as
// JSON now, an empty json.RawMessage as null; the limit is MaxResultBytes. A job that waits for this one reads it as Member.Result (Lease.Members). Else, without
// a key, it can be read only from the history (Kind.Keep, Queue.Get).
func (l *Lease) SetResult(v any) error {
	raw, err := encodeResult(v)
	if err != nil {
		return err
	}
	l.hold.Result = raw
	return nil
}

// SetWeight says how often the job has counted in its limit in truth, where Job.Weight was a guess: the
// tokens that a model has used. It is for limits with Max or Rate: with the end of this attempt, in the same
// commit, the jobs after it wait as much longer or shorter. 0 means that it did not count at all. It is 0 to
// MaxWeight. The last call in the attempt counts, also if a transaction of the handler is rolled back. The
// next attempt weighs what the job was enqueued with, and so does one whose lease is lost. For a job without
// such a limit it changes nothing.
func (l *Lease) SetWeight(n int) error {
	if n < 0 || n > MaxWeight {
		return invalid("SetWeight", "got %d; 0 to 1,000,000,000 is possible", n)
	}
	l.hold.Heavier.Store(int64(n - l.Weight))
	return nil
}

// heavierArg is what the ends of jobs say of SetWeight: how much more each of them weighed, by id; nil for
// nothing.
func heavierArg(outcomes []outcome) any {
	var all map[int64]int64
	for _, o := range outcomes {
		if n := o.hold.Heavier.Load(); n != 0 && o.hold.Slotted() {
			if all == nil {
				all = make(map[int64]int64)
			}
			all[o.hold.ID] = n
		}
	}
	if all == nil {
		return nil
	}
	text, _ := json.Marshal(all) // a map of numbers always encodes
	return string(text)
}

func encodeResult(v any) (string, error) { return encodeJSON("result", v) }

// encodeJSON takes an empty json.RawMessage for null, as encodePayload does: a provider's answer without a body is one.
func encodeJSON(field string, v any) (string, error) {
	raw, ok := v.(json.RawMessage)
	if !ok {
		var err error
		if raw, err = marshalled(field, v, json.Marshal); err != nil {
			if isPanic(err) {
				return "", err
			}
			return "", invalid(field, "does not encode as JSON: %s", marshalFault(err))
		}
	}
	if len(raw) == 0 {
		raw = json.RawMessage("null")
	}
	if len(raw) > MaxResultBytes {
		return "", invalid(field, "has %d bytes; at most %d: store it elsewhere and return a reference", len(raw), MaxResultBytes)
	}
	if _, err := jsonb.Scan(raw, false, nil); err != nil {
		return "", invalid(field, "%v", err)
	}
	return string(raw), nil
}

// errInTx is the error for a handler that ends its job itself although the worker does so. The two would wait for each
// other, because the worker's transaction has the job's row locked.
var errInTx = errors.New("onceq: the worker ends this job with the handler's transaction: return nil to complete it, or an error (see Fatal, RetryAfter, Snooze, Reschedule)")

// Complete finishes the job inside db. In a transaction the completion commits together with everything else that the
// transaction wrote. If the lease is lost, the statement raises an error, so that a commit after it in the same pipeline
// fails, and Complete returns a *LeaseError. With a nil db it runs in a transaction of its own. EventCompleted is reported
// when the statement has run: the caller's transaction may still roll back, and the job then runs again.
//
// A refusal must end the whole transaction. In a savepoint it ends that alone: a caller that rolls back to the savepoint, drops the
// error and commits the outer transaction commits the writes of a worker that has lost its job, beside those of the next one. So
// call Complete outside of savepoints, or return its error. With HandleTx and HandleBatch this cannot happen.
//
// Postgres may want the transaction run again (IsRetryable), because of this statement or of what follows it up to the
// commit. If the handler returns that error, the worker soon runs the handler again, up to thirty times, before it counts
// as an error. At repeatable read and serializable this happens whenever the worker has extended the lease after the
// transaction's snapshot, because that changes the job's row; it does so every third of the lease. The worker then leaves
// the row alone for twice the time that the handler has taken, so that the next run succeeds; if the worker's process dies
// meanwhile, the job comes back that much later. With Lock as the transaction's first statement there is no such conflict.
func (l *Lease) Complete(ctx context.Context, db DB) error {
	if db == nil {
		db = l.db
	}
	if l.hold.InTx {
		return errInTx
	}
	statement, args := l.completion()
	err := l.q.store.SendBare(ctx, db, statement, args, pg.NoRows)
	if pg.OverLimit(err) && pg.Own(db) != nil && ctx.Err() == nil { // otherwise the job would run again
		err = l.q.store.Send(ctx, db, pg.Hot, statement, args, pg.NoRows)
	}
	return l.completed(ctx, err)
}

// CompleteInBatch adds the completion to the caller's own batch. If the lease is lost, it raises SQLSTATE OQ001, and what
// follows it in the batch's transaction, such as a commit, does not happen. Use LeaseLost to recognise the batch's error.
//
// EventCompleted or EventStale is reported when closing the batch's results reaches this statement. What follows it may
// still fail, and the job then runs again. If the application reads this result itself, with BatchResults.Exec, no event is
// reported.
//
// The transaction of HandleTx and HandleBatch completes the job itself: there CompleteInBatch returns an error and adds
// nothing.
func (l *Lease) CompleteInBatch(batch *pgx.Batch) error {
	if l.hold.InTx {
		return errInTx
	}
	l.hold.ByHandler.Store(true)
	statement, args := l.completion()
	if l.q.store.Citus.Load() == pg.CitusYes {
		statement = l.q.store.OnNode(statement)
	}
	batch.Queue(l.q.store.SQL(statement), args...).Fn = func(results pgx.BatchResults) error {
		_, err := results.Exec()
		_ = l.completed(context.Background(), err)
		return err // unchanged: the caller looks for its SQLSTATE
	}
	return nil
}

// LeaseLost reports whether err, an error of the caller's own batch, means that Postgres refused a completion because its
// lease is lost.
func LeaseLost(err error) bool { return errors.Is(err, ErrLeaseLost) || leaseLost(err) }

func (l *Lease) completed(ctx context.Context, err error) error {
	switch {
	case err == nil:
		l.hold.ByHandler.Store(true)
		l.hold.Accepted.Store(true)
		l.q.waits.ended(l.ID)
		if level := l.level(EventCompleted); l.q.watched(level) {
			e := l.event(EventCompleted)
			e.Run = time.Since(l.hold.Began)
			l.q.emitAt(ctx, level, e)
		}
		return nil
	case leaseLost(err):
		lost := l.lostError("complete")
		if lost.Completed = l.hold.Accepted.Load(); lost.Completed {
			return lost
		}
		e := l.event(EventStale)
		e.Err = lost
		l.q.emit(ctx, e)
		return lost
	}
	l.conflicted(ctx, err)
	return fmt.Errorf("onceq: complete: %w", l.q.store.Told(err))
}

// completion gives the statement that completes the job, which raises an error if its guard does not hold.
func (l *Lease) completion() (string, []any) {
	h := &l.hold
	if !h.Plain(h.Keep) {
		return stmt.FinishJobs, finishArgs([]outcome{{hold: h, state: StateCompleted, result: h.Result, keep: h.Keep}}, true)
	}
	return shortly(h)
}

// shortly gives the statement for a job that is not kept and has no lane and no limit. It tells nobody.
func shortly(h *hold.Hold) (string, []any) {
	if !h.Keyed {
		return stmt.CompleteOneUnkeyed, []any{h.ID, h.Claims, h.Holder}
	}
	return stmt.CompleteOne, []any{h.ID, h.Claims, h.Holder, h.Token, h.Result}
}

// Fail ends this attempt: the job runs again after the default backoff, or in a worker its kind's, or is dead when its attempts
// are spent. err decides
// as it does when a handler returns it: see Fatal, RetryAfter, Snooze and Reschedule.
func (l *Lease) Fail(ctx context.Context, err error) error {
	if err == nil {
		return invalid("Fail", "needs an error; use Complete for a job that has none")
	}
	return l.end(ctx, "fail", l.failure(tame(err)))
}

// Snooze gives the job back, to run again after d. It spends no attempt. A d of 0 or less counts as a second.
func (l *Lease) Snooze(ctx context.Context, d time.Duration) error {
	return l.end(ctx, "snooze", l.failure(Snooze(d)))
}

// Release gives the job back at once, as if it had not been claimed. It spends no attempt.
func (l *Lease) Release(ctx context.Context) error {
	return l.end(ctx, "release", outcome{hold: &l.hold, state: StateWaiting})
}

func (l *Lease) end(ctx context.Context, op string, o outcome) error {
	if l.hold.InTx {
		return errInTx
	}
	stale, _, err := l.q.finish(ctx, l.db, pg.Hot, []outcome{o})
	if err != nil {
		return err
	}
	if len(stale) > 0 {
		return l.lostError(op)
	}
	return nil
}

func completeArgs(outcomes []outcome, raise bool) []any {
	n := len(outcomes)
	ids, claims, holders, results := make([]int64, n), make([]int32, n), make([]int64, n), make([]string, n)
	for i, o := range outcomes {
		ids[i], claims[i], holders[i], results[i] = o.hold.ID, o.hold.Claims, o.hold.Holder, o.result
	}
	return []any{ids, claims, holders, results, raise}
}

func finishArgs(outcomes []outcome, raise bool) []any {
	n := len(outcomes)
	ids, claims, holders := make([]int64, n), make([]int32, n), make([]int64, n)
	states, results, errs := make([]int16, n), make([]string, n), make([]string, n)
	spent, keeps := make([]int32, n), make([]int64, n)
	for i, o := range outcomes {
		ids[i], claims[i], holders[i] = o.hold.ID, o.hold.Claims, o.hold.Holder
		states[i], results[i], errs[i], keeps[i] = int16(o.state), o.result, o.err, o.keep
		if o.spend {
			spent[i] = 1
		}
	}
	return []any{ids, claims, holders, states, results, errs, spent, keeps, raise, heavierArg(outcomes)}
}

func retryArgs(outcomes []outcome, raise bool) []any {
	n := len(outcomes)
	ids, claims, holders := make([]int64, n), make([]int32, n), make([]int64, n)
	errs, spent, resets, delays, most := make([]string, n), make([]int32, n), make([]bool, n), make([]int64, n), make([]int32, n)
	for i, o := range outcomes {
		ids[i], claims[i], holders[i] = o.hold.ID, o.hold.Claims, o.hold.Holder
		errs[i], resets[i], delays[i], most[i] = o.err, o.reset, o.delay.Microseconds(), o.lostFrom()
		if o.spend {
			spent[i] = 1
		}
	}
	return []any{ids, claims, holders, errs, spent, resets, delays, most, raise}
}

// lostFrom is the number from which the job's lost leases count on, if there were more. A handler that came to its end did
// not end its process. After a failure one stays, so that the job goes on running alone (package quarantine): one that now fails and
// now ends its process would otherwise take the same jobs beside it with it each time. A job that is only given back keeps all.
func (o *outcome) lostFrom() int32 {
	switch {
	case o.asked && o.spend:
		return 1
	case o.asked:
		return 0
	}
	return maxMaxLost
}

// toldArgs are those of stmt.TellMembers for the completed jobs that others wait for.
func toldArgs(outcomes []outcome) []any {
	var ids []int64
	var states []int16
	var results []string
	for _, o := range outcomes {
		if o.hold.Member {
			ids, states, results = append(ids, o.hold.ID), append(states, int16(StateCompleted)), append(results, o.result)
		}
	}
	return []any{ids, states, results}
}

// giveBackArgs also says what the jobs wait for, and sets how long one is given back for if Emit has the row of its wait.
func giveBackArgs(outcomes []outcome, raise bool) []any {
	scopes, keys := make([]*string, len(outcomes)), make([]*string, len(outcomes))
	for i, o := range outcomes {
		if o.wait != nil {
			scopes[i], keys[i], outcomes[i].delay = &o.wait.scope, &o.wait.key, emitPause
		}
	}
	return append(retryArgs(outcomes, raise), scopes, keys, heavierArg(outcomes))
}

// finish writes outcomes, at most one for each lease, and returns the leases whose guard did not hold. Each of the
// kinds of statement commits on its own. After an error, left are the outcomes that may not have been written.
func (q *Queue) finish(ctx context.Context, db DB, by pg.Way, outcomes []outcome) (stale []*hold.Hold, left []outcome, err error) {
	slices.SortFunc(outcomes, func(a, b outcome) int { return cmp.Compare(a.hold.ID, b.hold.ID) })
	plain, ended, again, back := byStatement(outcomes, q.store.Citus.Load() == pg.CitusYes)
	pauseFull(ctx, q, db, by, back)
	var cancelled, held []int64
	locks := 0
	var done, asked []int64 // of one part
	for _, part := range []struct {
		outcomes  []outcome
		statement string
		args      func([]outcome, bool) []any
		answer    []any
	}{
		{plain, stmt.CompleteJobs, completeArgs, []any{nil, &done}},
		{ended, stmt.FinishJobs, finishArgs, []any{&done}},
		{again, stmt.RetryJobs, retryArgs, []any{nil, &done, &asked}},
		{back, stmt.GiveBackJobs, giveBackArgs, []any{&done, &asked}},
	} {
		if len(part.outcomes) == 0 {
			continue
		}
		// A lock is the trouble of one part alone. But a whole table may be locked, and then each part would wait.
		if err != nil && (!pg.LockedOut(err) || locks > 1) {
			left = append(left, part.outcomes...)
			continue
		}
		done, asked = nil, nil
		failed := q.store.Send(ctx, db, by, part.statement, part.args(part.outcomes, false), pg.Row(part.answer...))
		if failed != nil {
			err = fmt.Errorf("onceq: finish: %w", failed)
			left = append(left, part.outcomes...)
			locks++
			continue
		}
		slices.Sort(done)
		cancelled = append(cancelled, asked...)
		for _, o := range part.outcomes {
			_, ok := slices.BinarySearch(done, o.hold.Token)
			if !ok {
				stale = append(stale, o.hold)
			}
			q.wrote(ctx, o, ok)
			if o.own && (ok || o.unsure) {
				held = append(held, o.hold.ID)
			}
		}
	}
	q.heed(ctx, db, cancelled)
	q.unhold(ctx, db, held)
	return stale, left, err
}

// byStatement parts outcomes by the statement that writes them.
func byStatement(outcomes []outcome, citus bool) (plain, ended, again, back []outcome) {
	for _, o := range outcomes {
		switch {
		case o.state == StateCompleted && o.hold.Plain(o.keep):
			plain = append(plain, o)
		case o.state.Finished():
			ended = append(ended, o)
		case o.wait == nil && !o.hold.Lined() && !citus: // Citus refuses an update with the time
			again = append(again, o)
		default:
			back = append(back, o)
		}
	}
	return plain, ended, again, back
}

// wrote reports an outcome after its statement. ok says that the guard held.
func (q *Queue) wrote(ctx context.Context, o outcome, ok bool) {
	switch {
	case ok || !o.unsure:
		q.finished(ctx, o, !ok)
	case o.late != nil:
		q.log.WarnContext(ctx, "onceq: a handler returned an error after it had completed its job; the job stays completed",
			slog.Int64("job", o.hold.ID), slog.String("kind", o.hold.Kind), slog.Any("error", o.late))
	}
}

// finished reports an outcome.
func (q *Queue) finished(ctx context.Context, o outcome, stale bool) {
	t := EventCompleted
	switch {
	case stale && o.state == StateCompleted:
		t = EventStale
	case stale:
		t = EventLeaseLost
	case o.state == StateDead:
		t = EventDead
	case o.state == StateCancelled:
		t = EventCancelled
	case o.state == StateHeld:
		t = EventHeld
	case o.spend:
		t = EventFailed
	case o.err != "":
		t = EventDeferred
	case o.asked:
		t = EventSnoozed
	case o.state == StateWaiting:
		t = EventReleased
	}
	q.waits.ended(o.hold.ID) // or the job runs again
	level := leaseOf(o.hold).level(t)
	if !q.watched(level) {
		return
	}
	e := leaseOf(o.hold).event(t)
	e.Run, e.Err = o.run, o.cause
	if e.Err == nil && o.err != "" {
		e.Err = errors.New(o.err)
	}
	if stale {
		e.Err = leaseOf(o.hold).lostError("finish")
	}
	q.emitAt(ctx, level, e)
}

// maxErrorBytes is how much of an error's text is kept.
const maxErrorBytes = 8 << 10

// errorText shortens a text and makes it safe for jsonb.
func errorText(s string) string {
	if len(s) > maxErrorBytes {
		s = s[:maxErrorBytes]
		for len(s) > 0 && !utf8.RuneStart(s[len(s)-1]) {
			s = s[:len(s)-1]
		}
		s += " …"
	}
	s = strings.ToValidUTF8(s, "\uFFFD")
	if s = strings.ReplaceAll(s, "\x00", "\uFFFD"); s == "" {
		s = "error without a text"
	}
	return s
}

// badData reports whether Postgres refused a statement because of one of its values, or a trigger did, so that splitting the batch
// finds that value. It is false for everything that may pass: a lost connection, a standby, a server that does not let this role in,
// that only reads or has no space, a conflict, a lock, what a pooler, a person or a migration has done, missing tables and rights.
func badData(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.SeverityUnlocalized != "ERROR" || noTables(err) {
		return false
	}
	switch pgErr.Code[:min(2, len(pgErr.Code))] {
	case "08", "0A", "25", "26", "28", "3D", "40", "53", "55", "57", "58", "XX":
		return false
	default:
		return pgErr.Code != "42501" && pgErr.Code != "42P05"
	}
}
