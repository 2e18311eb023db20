package onceq

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// A handler that awaits an event, or sleeps, stops there: Await or Sleep returns an error, the handler returns that, and the
// job is given back until the time-out. When it runs again it comes to the same place, and goes on. What came of each is a
// row of job_awaits, so that every later run hears the same answer.
//
// No wake-up is lost, because the two sides always meet in a row. Who begins to wait writes the event's fence, which Emit
// writes first: one of them sees the other's commit. Who gives the job back has the row of job_awaits locked until that is
// committed; Emit writes the row, and only then looks for jobs that were given back. If Emit has it, the job is given back
// for a moment only. So nobody waits for the transaction that emits, except Await for a short time. lab/model/events_test.go
// explores all of this.

// EventWindow is how long an event stays after Emit. Who begins to wait later does not find it, and it can be emitted again.
const EventWindow = 30 * 24 * time.Hour

// awaitState is what came of an Await or a Sleep, as job_awaits.state stores it.
type awaitState int16

const (
	awaitOpen     awaitState = iota // it still waits; of a sleep, always
	awaitCame                       // the event came
	awaitTimedOut                   // the time-out came first
)

// Emit records that an event happened, inside db, and makes the jobs run that wait for it (Await). The event is named by
// its scope and key, such as "order paid" and "4711", of at most MaxScopeBytes and MaxKeyBytes, and those who wait for it get
// the payload, which is encoded as JSON, at most MaxResultBytes of it. A nil payload, or an empty json.RawMessage, is null. Bad input is an *InvalidError,
// before anything is sent. The first Emit counts: after it first is false, nothing was written, and the first payload stays.
//
// An event may be emitted before anybody waits for it. It stays for EventWindow; after that it can be emitted again.
//
// Emit commits and rolls back with the caller's transaction. It waits while another open transaction emits the same event,
// or cancels or retries a job that waits for it; it does not wait for handlers. Above READ COMMITTED Postgres may answer
// 40001 when a job began to wait after the caller's snapshot (IsRetryable).
func (q *Queue) Emit(ctx context.Context, db DB, scope, key string, payload any) (first bool, err error) {
	raw, err := encodeJSON("payload", payload)
	if err := cmp.Or(err, checkEvent(scope, key)); err != nil {
		return false, err
	}
	if db == nil {
		return false, errNoDB
	}
	args := []any{scope, key, raw, EventWindow.Milliseconds(), rand.Int64(), pg.Outside(db)}
	if err := q.store.SendBare(ctx, db, stmt.EmitEvent, args, pg.Row(&first)); err != nil {
		return false, fmt.Errorf("onceq: emit: %w", q.store.Told(err))
	}
	return first, nil
}

// Event returns the payload of an event, as JSON, if it was emitted within the last EventWindow, whoever waits for it.
// Otherwise emitted is false and err is nil.
func (q *Queue) Event(ctx context.Context, db DB, scope, key string) (payload json.RawMessage, emitted bool, err error) {
	if err := checkEvent(scope, key); err != nil {
		return nil, false, err
	}
	var raw string
	var state table.FenceState
	var free bool
	switch err := q.store.QueryRow(ctx, db, stmt.ReadFence, []any{int16(classEvent), scope, key}, &state, nil, nil, nil, nil, nil, &raw, nil, &free, nil, nil, nil); {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, false, nil
	case err != nil:
		return nil, false, fmt.Errorf("onceq: reading an event: %w", err)
	case state != table.FenceCompleted || free:
		return nil, false, nil
	}
	return json.RawMessage(raw), true, nil
}

// AwaitEvent waits for an event outside of handlers, and returns its payload, as JSON. It asks as Event does, again after 20 ms,
// then ever more rarely, down to twice a second. When ctx ends, the error wraps ctx's; any other error ends it at once. It holds no
// connection while it waits. db is the pool: a transaction above READ COMMITTED would not see what is emitted later.
func (q *Queue) AwaitEvent(ctx context.Context, db DB, scope, key string) (json.RawMessage, error) {
	for rest := 20 * time.Millisecond; ; rest = min(2*rest, 500*time.Millisecond) {
		payload, emitted, err := q.Event(ctx, db, scope, key)
		if err != nil || emitted {
			return payload, err
		}
		if !nap.For(ctx, rest, nil) {
			return nil, fmt.Errorf("onceq: awaiting event %q in scope %q: %w", key, scope, ctx.Err())
		}
	}
}

func checkEvent(scope, key string) error {
	return cmp.Or(checkName("Scope", scope, MaxScopeBytes), checkName("Key", key, MaxKeyBytes))
}

// Await waits in a handler for an event, and returns its payload. The event is named by scope and key, and may have been
// emitted before (Emit). If it has not come within timeout, counted from the first time that the job asks for it, ok is
// false and err is nil. With timeout 0 the answer comes at once; with Forever the job waits for as long as it takes. If
// a transaction that emits the event is open, Await waits for it for at most a second, and then the job is given back for one.
//
// While the event is awaited Await returns an error, which the handler must return, as it is or wrapped. The job is then given
// back, without spending an attempt, until the event or the time-out; no slot and no transaction is held. When it runs
// again, everything before the Await runs again too: put what must happen once into Once. What a handler's transaction
// wrote before is rolled back, as with Snooze. A handler that does not return the error goes on as if nothing had been
// asked, and runs again only as its own outcome says.
//
// The answer is recorded, and every later run of the job gets the same one, also after a crash or a redrive, and even if
// the event is emitted after the time-out was answered. After Reschedule the job waits anew. So a second Await for the same event in
// one run, after a time-out, as in a loop that reminds somebody each day, would not wait; it is refused with ErrNameUsed. That holds
// after a timeout of 0, too: ask with Queue.Event before you wait.
//
// Each time that the job runs again is one of the about a million claims that it has: see Snooze.
//
// A job waits for one thing at a time. In a lane it keeps its place as one that is snoozed does (Overtake).
//
// Other errors that Await returns are an *InvalidError for bad input or a negative timeout, a *LeaseError if the job's lease is
// lost before the job could begin to wait or the time-out could be recorded, and one that is Fatal for a payload that does not
// decode into P, as encoding/json does it.
func Await[P any](ctx context.Context, l *Lease, scope, key string, timeout time.Duration) (payload P, ok bool, err error) {
	raw, ok, err := l.await(ctx, scope, key, timeout)
	if err != nil || !ok {
		return payload, false, err
	}
	var p P
	if err := protect(func() error { return json.Unmarshal([]byte(raw), &p) }); err != nil {
		return payload, false, Fatal(fmt.Errorf("onceq: the payload of event %q in scope %q does not decode into %T: %w", key, scope, p, &decodeError{err}))
	}
	return p, true, nil
}

// Await is the function Await for an event whose payload does not matter. ok says that it came.
func (l *Lease) Await(ctx context.Context, scope, key string, timeout time.Duration) (ok bool, err error) {
	_, ok, err = l.await(ctx, scope, key, timeout)
	return ok, err
}

// Sleep stops a handler for d, counted from the first time that the job asks for it. Until then it returns an error, which
// the handler must return: the job is given back, without spending an attempt, and no slot is held. When the job runs again
// after that time, the same call returns nil. The rest is as in Await.
//
// The name says which sleep of the job it is, in at most MaxNameBytes. One that is over is over for every later run, so a
// second sleep with the same name in one run, usually in a loop, would not sleep; it is refused with ErrNameUsed. After
// Reschedule the job sleeps anew.
func Sleep(ctx context.Context, l *Lease, name string, d time.Duration) error {
	if err := checkName("name", name, MaxNameBytes); err != nil {
		return err
	}
	leave, err := l.use("sleep\x00"+name, name)
	if err != nil {
		return err
	}
	over := false
	defer func() { leave(over) }()
	state, err := l.wait(ctx, finish.Wait{Key: name}, d)
	switch {
	case err != nil:
		return err
	case state.left > 0:
		return l.stopAt(finish.Wait{Key: name}, state.left)
	}
	over = true
	return nil
}

// await is Await without decoding.
func (l *Lease) await(ctx context.Context, scope, key string, timeout time.Duration) (payload string, ok bool, err error) {
	if err := checkEvent(scope, key); err != nil {
		return "", false, err
	}
	w := finish.Wait{Scope: scope, Key: key}
	for range table.SettleTries {
		a, err := l.wait(ctx, w, timeout)
		switch {
		case err != nil:
			return "", false, err
		case a.state == awaitCame:
			return a.payload, true, nil
		case a.state == awaitTimedOut:
			return "", false, l.timedOut(w)
		case a.left > 0:
			return "", false, l.stopAt(w, a.left)
		}
		switch decided, err := l.timeOut(ctx, w); {
		case err != nil:
			return "", false, err
		case decided:
			return "", false, l.timedOut(w)
		}
		if a, err = l.readAwait(ctx, w); err == nil && a != nil && a.state == awaitOpen {
			return "", false, Snooze(finish.Pause) // the event is just being emitted
		}
	}
	return "", false, fmt.Errorf("%w (event %q in scope %q)", ErrKeyUnsettled, key, scope)
}

// stopAt returns the error that the handler must return until what it waits for has come, and records it for goesOn.
func (l *Lease) stopAt(w finish.Wait, left time.Duration) error {
	l.stopped.Store(&stop{l.calls.Load(), w})
	return &retryAfter{d: left, wait: &w}
}

// goesOn warns of a handler that has returned no error although an Await or a Sleep had returned one in this run.
func (l *Lease) goesOn() {
	stopped := l.stopped.Load()
	if stopped == nil || stopped.call != l.calls.Load() {
		return
	}
	l.q.log.Warn("onceq: a handler was to wait, and returned no error, so its job does not wait: return the error of Await and Sleep, as it is or wrapped with %w",
		slog.String("kind", l.Kind), slog.Int64("job", l.ID), slog.String("waits_for", stopped.waits.String()))
}

// timedOut records that this run has heard that the event did not come in time. That stays so, and so the next Await for it, usually
// in a loop, would not wait: it is refused.
func (l *Lease) timedOut(w finish.Wait) error {
	leave, err := l.use("await\x00"+w.Scope+"\x00"+w.Key, w.Key)
	if err != nil {
		return fmt.Errorf("%w: the time-out of %s was answered in this run, and that answer stays, so this call would not wait; "+
			"wait for an event of another key, or Sleep and ask with Queue.Event", ErrNameUsed, w)
	}
	leave(true)
	return nil
}

// awaited is a row of job_awaits.
type awaited struct {
	state   awaitState
	left    time.Duration // until the time-out, or the end of the sleep; not above 0 if that is past
	payload string
}

// wait reads what came of a wait, and begins it if the job asks for the first time.
func (l *Lease) wait(ctx context.Context, w finish.Wait, d time.Duration) (*awaited, error) {
	switch {
	case d == Forever || d > table.MaxDelay:
		d = table.MaxDelay
	case d < 0 && w.Scope != "":
		return nil, invalid("timeout", "is negative; use 0 to ask without waiting, or Forever")
	case d < 0:
		return nil, invalid("d", "is negative")
	}
	for range table.SettleTries {
		if a, err := l.readAwait(ctx, w); a != nil || err != nil {
			return a, err
		}
		if a, err := l.beginAwait(ctx, w, d); a != nil || err != nil {
			return a, err
		}
	}
	return nil, fmt.Errorf("%w (%s)", ErrKeyUnsettled, w)
}

// sendAwait sends a statement that commits by itself, on a connection that does not depend on the handler's transaction.
func (l *Lease) sendAwait(ctx context.Context, w finish.Wait, statement string, args []any, dest ...any) error {
	ctx, cancel := context.WithTimeout(ctx, pg.AnswerWithin)
	defer cancel()
	var err error
	for range table.SettleTries {
		err = l.q.store.Send(ctx, pg.ForEffects{Pool: l.q.store.Pool, DB: l.db}, meeting, statement, append([]any{l.ID, w.Scope, w.Key, l.identity}, args...), pg.Row(dest...))
		if !IsRetryable(err) {
			break
		}
	}
	if err != nil && !errors.Is(err, pgx.ErrNoRows) && !pg.LockedOut(err) {
		return fmt.Errorf("onceq: waiting for %s: %w", w, l.q.store.Told(err))
	}
	return err
}

// meeting is for where Await may meet an Emit that is open.
var meeting = pg.Waiting(pg.BriefWait)

// readAwait returns nil if there is no row of this round.
func (l *Lease) readAwait(ctx context.Context, w finish.Wait) (*awaited, error) {
	const read = `
select a.state, (extract(epoch from a.until - statement_timestamp()) * 1e6)::bigint, coalesce(a.payload::text, '')
  from onceq.job_awaits a
 where ` + stmt.ThisAwait
	var a awaited
	var left int64
	err := l.sendAwait(ctx, w, read, nil, &a.state, &left, &a.payload)
	a.left = time.Duration(left) * time.Microsecond
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return &a, err
}

func (l *Lease) beginAwait(ctx context.Context, w finish.Wait, d time.Duration) (*awaited, error) {
	var holds bool
	var state *awaitState
	a := awaited{left: d}
	err := l.sendAwait(ctx, w, stmt.BeginAwait, []any{l.hold.Claims, l.hold.Holder, d.Microseconds()}, &holds, &state, &a.payload)
	switch {
	case pg.LockedOut(err):
		return nil, Snooze(finish.Pause) // a transaction that emits the event is open
	case err != nil:
		return nil, err
	case !holds:
		return nil, l.lostError(w.String())
	case state == nil:
		return nil, nil
	}
	a.state = *state
	return &a, nil
}

func (l *Lease) timeOut(ctx context.Context, w finish.Wait) (decided bool, err error) {
	var holds bool
	err = l.sendAwait(ctx, w, stmt.EndAwait, []any{l.hold.Claims, l.hold.Holder}, &holds, &decided)
	if err == nil && !holds {
		err = l.lostError(w.String())
	}
	return decided, err
}
