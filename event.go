package onceq

import (
	"context"
	"log/slog"
	"time"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/guard"
	"github.com/onceq/onceq/internal/watch"
)

// EventType names what happened.
type EventType string

// The events. Those of Enqueue are reported when its statement has run: the caller's transaction may still roll back. So
// are those of Lease.Complete.
const (
	EventEnqueued  EventType = "enqueued"
	EventDuplicate EventType = "duplicate" // a key was taken by the same work; not an error
	EventMismatch  EventType = "mismatch"  // a key was taken by another kind or with another payload
	EventClaimed   EventType = "claimed"
	EventCompleted EventType = "completed"
	EventFailed    EventType = "failed"   // an attempt failed; the job will run again
	EventDeferred  EventType = "deferred" // no transaction could be opened for the handler; the job will run again, and no attempt was spent
	EventSnoozed   EventType = "snoozed"  // the job will run again without having failed: after Snooze, Reschedule or an *InFlightError
	EventReleased  EventType = "released" // the job was given back as if it had not been claimed: by Release, or by a worker that shuts down
	EventDead      EventType = "dead"
	EventCancelled EventType = "cancelled"
	EventHeld      EventType = "held"             // a job, or an effect with its Name, waits for a person; a job whose effect is held reports both
	EventLeaseLost EventType = "lease_lost"       // a holder learned that its lease is lost
	EventStale     EventType = "stale_completion" // a completion under an outdated token was refused
	EventReplayed  EventType = "replayed"         // a stored outcome was returned instead of running again
	EventUncertain EventType = "uncertain"
	EventReaped    EventType = "reaped"

	// EventBackground: work in the background failed and will be tried again. Name says which work: claim, look, rescan,
	// promote, extend, finish, announce, listen, presence, count or reap. Count says how often it has failed in a row. Ops.Health
	// shows the work that is still failing.
	EventBackground EventType = "background_error"
)

// Event is one thing that happened. Fields that do not apply are zero. An event never carries a payload or a result.
type Event struct {
	Type    EventType
	Queue   string
	Kind    string
	JobID   int64
	Scope   string
	Key     string
	Name    string        // of an effect or of background work
	Token   int64         // 0 before a claim
	Attempt int           // 1 for the first
	Wait    time.Duration // claimed: how long the job had been due, whatever held it, by the database's clock
	Held    time.Duration // claimed: the part of Wait in which the job waited for its lane, its limit or other jobs
	HeldBy  string        // claimed: what that was last: "lane", "limit" or "after" (other jobs; a Move, too); empty if Held is 0
	Run     time.Duration // completed, failed, …: how long the handler took; without a worker, the time since the claim
	Count   int           // reaped: rows; background_error: failures in a row
	Err     error
}

// Hook receives events, synchronously and from many goroutines: it must be quick and must not block. Each
// call has a goroutine of its own, and may end it, as a test's FailNow does: that costs one event.
type Hook interface {
	Event(ctx context.Context, e Event)
}

// HookFunc makes a function a Hook.
type HookFunc func(ctx context.Context, e Event)

// guardedHook is a Hook that neither panics nor ends its caller.
type guardedHook struct {
	hook  Hook
	guard *guard.Guard
}

func (h guardedHook) Event(ctx context.Context, e Event) {
	h.guard.Call("Config.Hook", func() { h.hook.Event(ctx, e) })
}

// Event calls f.
func (f HookFunc) Event(ctx context.Context, e Event) { f(ctx, e) }

// Level is the level at which the event is logged: Debug for ordinary events, duplicates among them, and replays, of which each
// run of a flow has many; Info for what an operator may want to count; Warn for what somebody should look at; Error for a job
// that needs a person.
func (t EventType) Level() slog.Level {
	switch t {
	case EventReaped, EventCancelled, EventDeferred:
		return slog.LevelInfo
	case EventMismatch, EventFailed, EventLeaseLost, EventStale, EventUncertain, EventBackground:
		return slog.LevelWarn
	case EventDead, EventHeld:
		return slog.LevelError
	default:
		return slog.LevelDebug
	}
}

// observer is who hears what happens.
type observer struct {
	log      *slog.Logger
	guard    *guard.Guard   // calls the application's functions
	hook     Hook           // nil for none
	troubles watch.Troubles // background work that fails
	waits    finish.Waits   // calls of Wait
}

// level is the level at which an event that ends an attempt is logged: see Kind.LogLevel.
func (l *Lease) level(t EventType) slog.Level {
	level := t.Level()
	if l.h != nil && l.h.level != nil {
		l.q.guard.Call("Kind.LogLevel of "+l.Kind, func() { level = l.h.level(t) })
	}
	return level
}

// watched reports whether a hook or the log would get an event of this level, so that the hot path builds no event for
// nobody.
func (q *observer) watched(level slog.Level) bool {
	return q.hook != nil || q.log.Enabled(context.Background(), level)
}

func (q *observer) emit(ctx context.Context, e Event) { q.emitAt(ctx, e.Type.Level(), e) }

func (q *observer) emitAt(ctx context.Context, level slog.Level, e Event) {
	if q.hook != nil {
		q.hook.Event(ctx, e)
	}
	if !q.log.Enabled(ctx, level) {
		return
	}
	attrs := make([]slog.Attr, 0, 12)
	text := func(name, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(name, value))
		}
	}
	text("queue", e.Queue)
	text("kind", e.Kind)
	if e.JobID != 0 {
		attrs = append(attrs, slog.Int64("job", e.JobID))
	}
	text("scope", e.Scope)
	text("key", e.Key)
	text("effect", e.Name)
	if e.Token != 0 {
		attrs = append(attrs, slog.Int64("token", e.Token))
	}
	if e.Attempt != 0 {
		attrs = append(attrs, slog.Int("attempt", e.Attempt))
	}
	if e.Wait != 0 {
		attrs = append(attrs, slog.Duration("wait", e.Wait))
	}
	if e.Run != 0 {
		attrs = append(attrs, slog.Duration("run", e.Run))
	}
	if e.Count != 0 {
		attrs = append(attrs, slog.Int("count", e.Count))
	}
	if e.Err != nil {
		attrs = append(attrs, slog.String("error", e.Err.Error()))
	}
	q.log.LogAttrs(ctx, level, "onceq: "+string(e.Type), attrs...)
}
