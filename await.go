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

	"github.com/onceq/onceq/internal/fence"
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

// Emit records that an event happened, inside db, and makes the jobs run that wait for it (Await). The event is named by
// its scope and key, such as "order paid" and "4711", of at most MaxScopeBytes and MaxKeyBytes, and those who wait for it get
// the payload, which is encoded as JSON, at most MaxResultBytes of it. A nil payload, or an empty json.RawMessage, is null. Bad input is an *InvalidError,
// before anything is sent. The first Emit counts: after it first is false, nothing was written, and the first payload stays.
//
// An event may be emitted before anybody waits for it. It stays for EventWindow; after that it can be emitted again.
//
// Emit commits and rolls back with the caller's transaction. It waits while another open transaction emits the same event,
// or cancels, retries or moves a job that waits for it; it does not wait for handlers. Above READ COMMITTED Postgres may answer
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
	if d < 0 {
		return invalid("d", "is negative")
	}
	w := l.waits(finish.Wait{Key: name})
	a, err := w.Begin(ctx, d)
	if err = l.heard(w, a, err); err == nil && a.Left > 0 {
		return l.stopAt(w.Wait, a.Left)
	}
	over = err == nil
	return err
}

// await is Await without decoding.
func (l *Lease) await(ctx context.Context, scope, key string, timeout time.Duration) (payload string, ok bool, err error) {
	if err := checkEvent(scope, key); err != nil {
		return "", false, err
	}
	if timeout < 0 {
		return "", false, invalid("timeout", "is negative; use 0 to ask without waiting, or Forever")
	}
	w := l.waits(finish.Wait{Scope: scope, Key: key})
	a, err := w.Event(ctx, timeout)
	switch err = l.heard(w, a, err); {
	case err != nil:
		return "", false, err
	case a.State == fence.AwaitCame:
		return a.Payload, true, nil
	case a.State == fence.AwaitTimedOut:
		return "", false, l.timedOut(w.Wait)
	}
	return "", false, l.stopAt(w.Wait, a.Left)
}

func (l *Lease) waits(w finish.Wait) *fence.Wait {
	return &fence.Wait{Wait: w, Store: l.q.store, DB: l.alone(), Job: &l.hold, Identity: l.identity}
}

// heard makes an error of what a wait says of the job itself.
func (l *Lease) heard(w *fence.Wait, a *fence.Awaited, err error) error {
	switch {
	case err != nil:
		return err
	case a.Lost:
		return l.lostError(w.String())
	case a.Busy:
		return Snooze(finish.Pause) // a transaction that emits the event is open
	}
	return nil
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
