package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// eventLog is both a hook and the handler of a logger. It keeps what it gets as either.
type eventLog struct {
	mu     sync.Mutex
	events []onceq.Event
	log    bytes.Buffer
}

func (e *eventLog) Event(_ context.Context, event onceq.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.events = append(e.events, event)
}

func (e *eventLog) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.log.Write(p)
}

// take returns the events since the last call, and requires that the log said the same, each at its level.
func (e *eventLog) take(t *testing.T) (types []string, events []onceq.Event) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	var logged []string
	for line := range strings.Lines(e.log.String()) {
		var entry struct{ Level, Msg string }
		require.NoError(t, json.Unmarshal([]byte(line), &entry), line)
		name, ok := strings.CutPrefix(entry.Msg, "onceq: ")
		require.True(t, ok, line)
		if level, known := eventLevels[onceq.EventType(name)]; known {
			require.Equal(t, level.String(), entry.Level, line)
			logged = append(logged, name)
		}
	}
	for _, event := range e.events {
		types = append(types, string(event.Type))
	}
	require.ElementsMatch(t, types, logged, "the hook and the log disagree")
	events, e.events = e.events, nil
	e.log.Reset()
	return types, events
}

func (e *eventLog) want(t *testing.T, want ...onceq.EventType) []onceq.Event {
	t.Helper()
	types, events := e.take(t)
	var names []string
	for _, w := range want {
		names = append(names, string(w))
	}
	require.Equal(t, names, types)
	return events
}

var eventLevels = map[onceq.EventType]slog.Level{
	onceq.EventEnqueued: slog.LevelDebug, onceq.EventClaimed: slog.LevelDebug, onceq.EventCompleted: slog.LevelDebug, onceq.EventSnoozed: slog.LevelDebug,
	onceq.EventDuplicate: slog.LevelDebug, onceq.EventReplayed: slog.LevelDebug, onceq.EventReaped: slog.LevelInfo, onceq.EventCancelled: slog.LevelInfo,
	onceq.EventDeferred: slog.LevelInfo, onceq.EventReleased: slog.LevelDebug,
	onceq.EventMismatch: slog.LevelWarn, onceq.EventFailed: slog.LevelWarn, onceq.EventLeaseLost: slog.LevelWarn, onceq.EventStale: slog.LevelWarn, onceq.EventUncertain: slog.LevelWarn, onceq.EventBackground: slog.LevelWarn,
	onceq.EventDead: slog.LevelError, onceq.EventHeld: slog.LevelError,
}

func eventDB(t *testing.T) (*queuetest.DB, *eventLog) {
	e := new(eventLog)
	return queuetest.New(t, queuetest.Config(onceq.Config{Hook: e, Logger: slog.New(slog.NewJSONHandler(e, &slog.HandlerOptions{Level: slog.LevelDebug}))})), e
}

// A kind may say at which levels its attempts are logged: also louder than the default, and if it panics, at the default.
func TestEvents_AKindHasLevelsOfItsOwn(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	handler := slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelInfo})
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(handler)}))
	kind := onceq.Kind[string]{Name: "k", MaxAttempts: 2, Backoff: func(int, error) time.Duration { return 0 }}
	kind.LogLevel = func(t onceq.EventType) slog.Level {
		switch t {
		case onceq.EventCompleted:
			return slog.LevelInfo
		case onceq.EventFailed:
			return slog.LevelDebug
		}
		panic("only the default is left for " + t)
	}
	for _, how := range []string{"done", "by itself", "failed"} {
		add(t, db, kind.Job(how))
	}
	db.Drain(kind.Handle(func(ctx context.Context, l *onceq.Lease, how string) error {
		switch how {
		case "by itself":
			return l.Complete(ctx, nil)
		case "failed":
			return errors.New("no")
		}
		return nil
	}))
	require.Equal(t, 2, strings.Count(log.String(), `level=INFO msg="onceq: completed"`), log.String())
	require.NotContains(t, log.String(), "onceq: failed")
	require.Equal(t, 1, strings.Count(log.String(), `level=ERROR msg="onceq: dead"`), log.String())
}

func TestEvents_EachIsSentOnceInTimeAndAtItsLevel(t *testing.T) {
	t.Parallel()
	db, seen := eventDB(t)
	ctx, q := t.Context(), db.Queue
	job := onceq.Job{Kind: "k", Key: "key", Scope: "scope", Payload: 1, MaxAttempts: 2}
	claim := func() *onceq.Lease {
		t.Helper()
		leases, err := q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{"k"}})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		return leases[0]
	}

	r, err := q.Enqueue(ctx, db.Pool, job)
	require.NoError(t, err)
	e := seen.want(t, onceq.EventEnqueued)[0]
	require.Equal(t, onceq.Event{Type: onceq.EventEnqueued, Queue: "default", Kind: "k", JobID: r.ID, Scope: "scope", Key: "key"}, e)

	// A duplicate is an event of its own in each form, and never an error.
	_, err = q.Enqueue(ctx, db.Pool, job)
	require.NoError(t, err)
	require.NoError(t, seen.want(t, onceq.EventDuplicate)[0].Err)
	strict, other := job, job
	strict.Strict, other.Payload = true, 2
	_, err = q.Enqueue(ctx, db.Pool, strict)
	require.ErrorIs(t, err, onceq.ErrDuplicate)
	require.NoError(t, seen.want(t, onceq.EventDuplicate)[0].Err)
	_, err = q.Enqueue(ctx, db.Pool, other)
	require.ErrorIs(t, err, onceq.ErrMismatch)
	require.ErrorIs(t, seen.want(t, onceq.EventMismatch)[0].Err, onceq.ErrMismatch)
	_, err = q.EnqueueMany(ctx, db.Pool, []onceq.Job{job, {Kind: "later", Delay: time.Hour}})
	require.NoError(t, err)
	seen.want(t, onceq.EventDuplicate, onceq.EventEnqueued)
	b := &pgx.Batch{}
	pending, err := q.EnqueueInBatch(b, job)
	require.NoError(t, err)
	require.NoError(t, db.Pool.SendBatch(ctx, b).Close())
	seen.want(t)
	_, err = pending.Result(ctx, db.Pool)
	require.NoError(t, err)
	seen.want(t, onceq.EventDuplicate)

	l := claim()
	e = seen.want(t, onceq.EventClaimed)[0]
	require.Equal(t, l.Token, e.Token)
	require.Equal(t, 1, e.Attempt)
	require.Less(t, e.Wait, time.Minute)
	require.NoError(t, l.Extend(ctx, time.Minute)) // not an event
	require.NoError(t, l.Snooze(ctx, 1))
	seen.want(t, onceq.EventSnoozed)
	l = claim()
	require.NoError(t, l.Fail(ctx, errors.New("first")))
	events := seen.want(t, onceq.EventClaimed, onceq.EventFailed)
	require.ErrorContains(t, events[1].Err, "first")
	db.Advance(time.Hour)
	require.NoError(t, claim().Fail(ctx, errors.New("second")))
	seen.want(t, onceq.EventClaimed, onceq.EventDead)

	_, err = onceqops.New(q).Redrive(ctx, db.Pool, r.ID)
	require.NoError(t, err)
	stale := claim()
	db.ExpireLease(r.ID)
	l = claim()
	seen.want(t, onceq.EventClaimed, onceq.EventClaimed)
	require.ErrorIs(t, stale.Complete(ctx, nil), onceq.ErrLeaseLost)
	e = seen.want(t, onceq.EventStale)[0]
	require.ErrorIs(t, e.Err, onceq.ErrLeaseLost)
	require.Equal(t, stale.Token, e.Token)
	require.ErrorIs(t, stale.Fail(ctx, errors.New("late")), onceq.ErrLeaseLost)
	seen.want(t, onceq.EventLeaseLost)
	require.NoError(t, l.Complete(ctx, nil))
	seen.want(t, onceq.EventCompleted)

	// Effects and fences.
	id := func() int64 {
		r, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k"})
		require.NoError(t, err)
		return r.ID
	}()
	l = claim()
	seen.want(t, onceq.EventEnqueued, onceq.EventClaimed)
	charge := func(err error) error {
		_, err = onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 1, err })
		return err
	}
	require.ErrorIs(t, charge(errors.New("reset")), onceq.ErrUncertain)
	e = seen.want(t, onceq.EventUncertain)[0]
	require.Equal(t, "charge", e.Name)
	require.Equal(t, id, e.JobID)
	require.NoError(t, charge(nil))
	seen.want(t)
	require.ErrorIs(t, charge(nil), onceq.ErrNameUsed)
	require.NoError(t, l.Release(ctx))
	l = claim()
	seen.want(t, onceq.EventReleased, onceq.EventClaimed)
	require.NoError(t, charge(nil))
	e = seen.want(t, onceq.EventReplayed)[0]
	require.Equal(t, "charge", e.Name)
	_, err = onceq.Once(ctx, l, "wire", func(context.Context, string) (int, error) { return 0, errors.New("reset") })
	require.ErrorIs(t, err, onceq.ErrUncertain)
	seen.want(t, onceq.EventUncertain)
	_, err = onceq.Once(ctx, l, "wire", func(context.Context, string) (int, error) { return 0, nil }, onceq.OnUncertain(onceq.Hold()))
	require.ErrorIs(t, err, onceq.ErrHeld)
	require.Equal(t, "wire", seen.want(t, onceq.EventHeld)[0].Name)
	require.NoError(t, l.Fail(ctx, err))
	e = seen.want(t, onceq.EventHeld)[0]
	require.Equal(t, id, e.JobID)
	require.Empty(t, e.Name)

	canceled, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "c", Window: onceq.UntilFinished})
	require.NoError(t, err)
	_, err = q.Cancel(ctx, db.Pool, canceled.ID)
	require.NoError(t, err)
	_, err = q.Cancel(ctx, db.Pool, canceled.ID)
	require.NoError(t, err)
	seen.want(t, onceq.EventEnqueued, onceq.EventCancelled)

	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{Grace: time.Millisecond})
	require.NoError(t, err)
	db.Advance(time.Second)
	_, err = reaper.RunOnce(ctx)
	require.NoError(t, err)
	e = seen.want(t, onceq.EventReaped)[0]
	require.Equal(t, 1, e.Count)
	require.Equal(t, "fences", e.Kind)
	_, err = reaper.RunOnce(ctx) // nothing is left to prune, so there is no event
	require.NoError(t, err)
	seen.want(t)
}

// A worker's events say exactly once that a job was claimed, and once that it was completed, with each form of handler and
// each kind of retry.
func TestEvents_OfAWorker(t *testing.T) {
	t.Parallel()
	db, seen := eventDB(t)
	ctx := t.Context()
	var handlers []onceq.Handler
	ids := map[int64]string{}
	for _, form := range []string{"lease", "tx", "batch"} {
		k := onceq.Kind[int]{Name: form, Backoff: func(int, error) time.Duration { return 0 }}
		fail := func(l *onceq.Lease) error {
			if l.Attempt == 1 {
				return errors.New("first")
			}
			return nil
		}
		switch form {
		case "lease":
			handlers = append(handlers, k.Handle(func(_ context.Context, l *onceq.Lease, _ int) error { return fail(l) }))
		case "tx":
			handlers = append(handlers, k.HandleTx(func(_ context.Context, _ pgx.Tx, l *onceq.Lease, _ int) error { return fail(l) }))
		case "batch":
			handlers = append(handlers, k.HandleBatch(2, func(_ context.Context, _ pgx.Tx, jobs []onceq.Item[int]) (err error) {
				for _, j := range jobs {
					err = errors.Join(err, fail(j.Lease))
				}
				return err
			}))
		}
		for range 3 {
			r, err := db.Queue.Enqueue(ctx, db.Pool, k.Job(1))
			require.NoError(t, err)
			ids[r.ID] = form
		}
	}
	seen.take(t)
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, handlers...)
	require.NoError(t, err)
	require.NoError(t, w.Drain(ctx, 0))
	_, events := seen.take(t)
	got := map[string]int{}
	for _, e := range events {
		got[fmt.Sprintf("%s %s %d", ids[e.JobID], e.Type, e.Attempt)]++
		require.Equal(t, ids[e.JobID], e.Kind)
		require.NotZero(t, e.Token)
	}
	want := map[string]int{}
	for _, form := range []string{"lease", "tx", "batch"} {
		for _, e := range []string{"claimed 1", "failed 1", "claimed 2", "completed 2"} {
			want[form+" "+e] = 3
		}
	}
	require.Equal(t, want, got)
}

// Events tell apart why a job runs later: an error (also one that names a delay), a wish, or a job that was given back.
func TestEvents_DeferredSnoozedReleased(t *testing.T) {
	t.Parallel()
	db, seen := eventDB(t)
	ctx := t.Context()
	start := time.Now()
	late := errors.New("come back later")
	k := onceq.Kind[int]{Name: "k"}
	ends := map[string]struct {
		err  error
		want onceq.EventType
	}{
		"retry after":    {onceq.RetryAfter(time.Hour, late), onceq.EventFailed},
		"snooze":         {onceq.Snooze(time.Hour), onceq.EventSnoozed},
		"snooze, short":  {onceq.Snooze(1), onceq.EventSnoozed},
		"reschedule":     {onceq.Reschedule(time.Hour), onceq.EventSnoozed},
		"somebody's":     {&onceq.InFlightError{RetryAfter: time.Hour}, onceq.EventSnoozed},
		"a plain error":  {late, onceq.EventFailed},
		"a fatal one":    {onceq.Fatal(late), onceq.EventDead},
		"nothing to say": {nil, onceq.EventCompleted},
	}
	for name, end := range ends {
		again := 0 // a job that is due at once must not run for ever
		handle := func(context.Context, *onceq.Lease, int) error {
			if again++; again > 1 {
				return onceq.Snooze(time.Hour)
			}
			return end.err
		}
		for form, h := range map[string]onceq.Handler{
			"lease": k.Handle(handle),
			"tx": k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
				return errors.Join(func() error { _, err := tx.Exec(ctx, "select 1"); return err }(), handle(ctx, l, 0))
			}),
		} {
			again = 0
			sqlRun(t, db, `delete from onceq.jobs`)
			add(t, db, onceq.Job{Kind: "k", Payload: 1})
			seen.take(t)
			w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, h)
			require.NoError(t, err)
			require.NoError(t, w.Drain(ctx, 0))
			types, events := seen.take(t)
			first := slices.IndexFunc(types, func(typ string) bool { return typ != string(onceq.EventClaimed) }) // the event of the next claim may come first
			require.Positive(t, first, name)
			require.Equal(t, string(end.want), types[first], "%s %s", name, form)
			require.Positive(t, events[first].Run, "%s %s", name, form)
			require.Less(t, events[first].Run, time.Since(start))
			require.Equal(t, end.err == nil, events[first].Err == nil)
		}
	}

	// With a lease that no worker holds.
	sqlRun(t, db, `delete from onceq.jobs`)
	add(t, db, onceq.Job{Kind: "k"})
	seen.take(t)
	l := takeOne(t, db)
	require.NoError(t, l.Fail(ctx, onceq.RetryAfter(0, late)))
	e := seen.want(t, onceq.EventClaimed, onceq.EventFailed)[1]
	require.ErrorIs(t, e.Err, late)
	require.Positive(t, e.Run, "since the claim")
	require.Less(t, e.Run, time.Since(start))
	require.NoError(t, takeOne(t, db).Release(ctx))
	require.Zero(t, seen.want(t, onceq.EventClaimed, onceq.EventReleased)[1].Run)

	// With a worker that ends.
	ctx, stop := context.WithCancel(ctx)
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{ShutdownTimeout: -1}, k.Handle(func(ctx context.Context, _ *onceq.Lease, _ int) error {
		stop()
		<-ctx.Done()
		return ctx.Err()
	}))
	require.NoError(t, err)
	add(t, db, onceq.Job{Kind: "k", Payload: 1, Priority: onceq.PriorityHigh})
	seen.take(t)
	_ = w.Run(ctx)
	_, events := seen.take(t)
	released := 0
	for _, e := range events {
		require.Contains(t, []onceq.EventType{onceq.EventClaimed, onceq.EventReleased}, e.Type)
		if e.Type == onceq.EventReleased {
			released++
		}
	}
	require.Positive(t, released)
}

// Jobs that Complete and CompleteInBatch complete are reported once, with the time since the claim, or in a worker since
// the handler's call. A refused one is reported as stale. If the batch fails before the completion, nothing is reported.
func TestEvents_CompletedByHand(t *testing.T) {
	t.Parallel()
	db, seen := eventDB(t)
	ctx := t.Context()
	start := time.Now()
	batch := func(before string, l *onceq.Lease) error {
		b := &pgx.Batch{}
		b.Queue("begin")
		b.Queue(before)
		require.NoError(t, l.CompleteInBatch(b))
		b.Queue("commit")
		return db.Pool.SendBatch(ctx, b).Close()
	}
	for _, job := range []onceq.Job{{Kind: "k"}, {Kind: "k", Key: "key"}} {
		id := add(t, db, job)
		old := takeOne(t, db)
		db.ExpireLease(id)
		l := takeOne(t, db)
		seen.take(t)
		err := batch("select 1", old)
		require.True(t, onceq.LeaseLost(err), "%v", err)
		e := seen.want(t, onceq.EventStale)[0]
		require.ErrorIs(t, e.Err, onceq.ErrLeaseLost)
		require.Equal(t, old.Token, e.Token)
		require.Error(t, batch("select 1/0", l))
		seen.want(t)
		require.NoError(t, batch("select 1", l))
		e = seen.want(t, onceq.EventCompleted)[0]
		require.Equal(t, l.Token, e.Token)
		require.Positive(t, e.Run)
		require.Less(t, e.Run, time.Since(start))
	}

	// A caller that reads the results one by one gets the same result as before.
	add(t, db, onceq.Job{Kind: "k"})
	b := &pgx.Batch{}
	require.NoError(t, takeOne(t, db).CompleteInBatch(b))
	r := db.Pool.SendBatch(ctx, b)
	seen.take(t)
	tag, err := r.Exec()
	require.NoError(t, err)
	require.True(t, tag.Select())
	require.NoError(t, r.Close())
	seen.want(t)

	// In a worker, only the handler's own completion is reported. The time in which a claimed job waits for its handler,
	// here because of a hook, does not count as run time.
	const wait = 20 * time.Millisecond
	var claimed, ended time.Time
	q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema, Hook: onceq.HookFunc(func(ctx context.Context, e onceq.Event) {
		switch e.Type {
		case onceq.EventClaimed:
			for began := time.Now(); time.Since(began) < wait; {
				runtime.Gosched()
			}
			claimed = time.Now()
		default:
			ended = time.Now()
		}
		seen.Event(ctx, e)
	}), Logger: slog.New(slog.NewJSONHandler(seen, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	require.NoError(t, err)
	own := onceq.Kind[int]{Name: "own"}
	for _, c := range []struct {
		h    onceq.Handler
		want onceq.EventType
	}{
		{own.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error { return l.Complete(ctx, nil) }), onceq.EventCompleted},
		{own.Handle(func(_ context.Context, l *onceq.Lease, _ int) error { return batch("select 1", l) }), onceq.EventCompleted},
		{own.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, int) error { return onceq.Reschedule(time.Hour) }), onceq.EventSnoozed},
	} {
		add(t, db, onceq.Job{Kind: "own", Payload: 1})
		seen.take(t)
		w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, c.h)
		require.NoError(t, err)
		require.NoError(t, w.Drain(ctx, 0))
		e := seen.want(t, onceq.EventClaimed, c.want)[1]
		require.Positive(t, e.Run)
		require.LessOrEqual(t, e.Run, ended.Sub(claimed))
	}

	// The batch refuses a fence's completion.
	f, err := db.Queue.Fence(onceq.FenceSpec{Scope: "s", Key: "k", Lease: time.Minute})
	require.NoError(t, err)
	c, err := f.Claim(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, c.Release(ctx, nil))
	b = &pgx.Batch{}
	require.NoError(t, c.CompleteInBatch(b, 1))
	seen.take(t)
	require.True(t, onceq.LeaseLost(db.Pool.SendBatch(ctx, b).Close()))
	require.Equal(t, c.Token, seen.want(t, onceq.EventStale)[0].Token)
}

// A worker that was frozen reports "lease_lost" once: when it learns of the loss, and not again when it finishes.
func TestEvents_LeaseLostOnceInAWorker(t *testing.T) {
	t.Parallel()
	db, seen := eventDB(t)
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1})
	require.NoError(t, err)
	k := onceq.Kind[int]{Name: "k"}
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Lease: steady}, k.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		var other []*onceq.Lease
		for len(other) == 0 { // a beat may come first
			db.ExpireLease(l.ID)
			var err error
			if other, err = db.Queue.Claim(context.WithoutCancel(ctx), onceq.ClaimOptions{}); err != nil {
				return onceq.Fatal(err)
			}
		}
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, onceq.ErrLeaseLost) {
			t.Errorf("cause %v", cause)
		}
		return errors.Join(ctx.Err(), other[0].Complete(context.Background(), nil))
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 1))
	types, events := seen.take(t)
	require.Equal(t, []string{"enqueued", "claimed", "claimed"}, types[:3])
	require.ElementsMatch(t, []string{"lease_lost", "completed"}, types[3:]) // the handler may end before the event is sent
	lost := events[slices.Index(types, "lease_lost")]
	require.Equal(t, r.ID, lost.JobID)
	require.Less(t, lost.Token, events[2].Token)
}

// Payloads and results are private: they are in no event and in no line of the log, at any level.
func TestEvents_NoPayloadOrResultInTheLog(t *testing.T) {
	t.Parallel()
	const secret = "s3cr3t-of-a-customer"
	var log eventLog
	quiet := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: quiet, Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
		_, _ = fmt.Fprintf(&log, "%+v %v\n", e, e.Err)
	})}))
	ctx, q := t.Context(), db.Queue
	type payload struct{ Secret string }
	k := onceq.Kind[payload]{Name: "k", Key: func(payload) string { return "key" }, MaxAttempts: 1}
	for _, p := range []payload{{secret}, {secret}, {secret + "2"}} {
		_, _ = q.Enqueue(ctx, db.Pool, k.Job(p))
		_, _ = q.EnqueueMany(ctx, db.Pool, []onceq.Job{k.Job(p)})
	}
	for i, wrong := range []any{secret, []byte(secret), map[string]int{"Secret": 1}, json.RawMessage(`{"Secret":{"x":"` + secret + `"}}`)} {
		_, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: fmt.Sprint(i), Payload: wrong})
		require.NoError(t, err)
	}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, k.Handle(func(ctx context.Context, l *onceq.Lease, p payload) error {
		_, err := onceq.Once(ctx, l, "effect", func(context.Context, string) (string, error) { return p.Secret, nil })
		return errors.Join(err, l.SetResult(p))
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(ctx, 0))
	r, err := q.Enqueue(ctx, db.Pool, k.Job(payload{secret}))
	require.NoError(t, err)
	require.Contains(t, string(r.Output), secret)
	_, err = q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "key", Payload: payload{secret}, Strict: true})
	require.ErrorIs(t, err, onceq.ErrDuplicate)
	require.NotContains(t, err.Error(), secret)
	lines := slices.Collect(strings.Lines(log.log.String()))
	require.Greater(t, len(lines), 20)
	for _, line := range lines {
		require.NotContains(t, line, secret)
	}
}

// A job's wait counts from when it was due, whatever held it, and Stats knows how long it has waited for that.
func TestEvents_AWaitCountsFromWhenTheJobWasDue(t *testing.T) {
	t.Parallel()
	const waits = 27 * time.Minute
	for name, c := range map[string]struct {
		jobs func(first int64) []onceq.Job // the second
		job  onceq.Job
		by   string
	}{
		"a lane":               {job: onceq.Job{Lane: "f/x"}, by: "lane"},
		"a limit":              {job: onceq.Job{Limit: "l"}, by: "limit"},
		"a lane and a limit":   {job: onceq.Job{Lane: "f/x", Limit: "l"}, by: "limit"},
		"another job":          {jobs: func(id int64) []onceq.Job { return []onceq.Job{{After: []onceq.JobRef{{ID: id}}}} }, by: "after"},
		"another job and lane": {jobs: func(id int64) []onceq.Job { return []onceq.Job{{After: []onceq.JobRef{{ID: id}}, Lane: "f/x"}} }, by: "lane"},
		"a worker":             {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 2)
			db := queuetest.New(t)
			seen := &eventLog{}
			q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema, Hook: seen})
			require.NoError(t, err)
			c.job.Kind = "k"
			first := must[onceq.Result](t)(q.Enqueue(t.Context(), db.Pool, c.job))
			second := []onceq.Job{c.job}
			if c.jobs != nil {
				second = c.jobs(first.ID)
				second[0].Kind = "k"
			}
			must[[]onceq.Result](t)(q.EnqueueMany(t.Context(), db.Pool, second))
			leases := must[[]*onceq.Lease](t)(q.Claim(t.Context(), onceq.ClaimOptions{Lease: 2 * waits}))
			require.Len(t, leases, 1)
			db.Advance(waits)
			stats := must[[]onceqops.QueueStats](t)(onceqops.New(q).Stats(t.Context()))
			require.NoError(t, leases[0].Complete(t.Context(), nil))
			runs := 0
			w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, onceq.Kind[any]{Name: "k"}.Handle(func(context.Context, *onceq.Lease, any) error {
				if runs++; runs == 1 {
					return onceq.RetryAfter(time.Hour, errors.New("once more"))
				}
				return nil
			}))
			require.NoError(t, err)
			require.NoError(t, w.Drain(t.Context(), 0))
			db.Advance(time.Hour)
			require.NoError(t, w.Drain(t.Context(), 0))
			require.Equal(t, 2, runs)
			var claims []onceq.Event
			for _, e := range seen.events {
				if e.Type == onceq.EventClaimed {
					claims = append(claims, e)
				}
			}
			require.Len(t, claims, 3)
			require.GreaterOrEqual(t, claims[1].Wait, waits)
			require.Equal(t, c.by, claims[1].HeldBy)
			ages := map[string]time.Duration{"lane": stats[0].OldestInLane, "limit": stats[0].OldestInLimit, "after": stats[0].OldestAfter}
			if c.by == "" {
				require.Zero(t, claims[1].Held)
				require.GreaterOrEqual(t, stats[0].Oldest, waits)
			} else {
				require.GreaterOrEqual(t, claims[1].Held, waits)
				require.LessOrEqual(t, claims[1].Held, claims[1].Wait)
				require.Zero(t, stats[0].Oldest)
			}
			waiting := time.Duration(0) // for one of the three, and only for one
			for _, age := range ages {
				waiting += age
			}
			require.Equal(t, c.by != "", waiting >= waits, "%v", ages)
			// What it waited for before its first attempt does not count for the second.
			require.Equal(t, 2, claims[2].Attempt)
			require.Less(t, claims[2].Wait, waits)
		})
	}
}
