package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// panics has all functions and values of the application's whose code the library runs, by the names of the fields and parameters that
// take them, and what shows what becomes of a panic in them: a part of TestPanics, or a test of another package. A reason in
// parentheses says why there is nothing to show.
var panics = map[string]string{
	"Config.Logger":        "logger",
	"Config.Hook":          "hook",
	"HookFunc":             "hook",
	"Hook":                 "hook",
	"Config.BeforeEnqueue": "before enqueue",

	"Kind.Key":         "functions of a kind",
	"Kind.Scope":       "functions of a kind",
	"Kind.Lane":        "functions of a kind",
	"Kind.Limit":       "functions of a kind",
	"Kind.Weight":      "functions of a kind",
	"Kind.Backoff":     "backoff",
	"Kind.LogLevel":    "log level",
	"Kind.Handle":      "handlers",
	"Kind.HandleTx":    "handlers",
	"Kind.HandleBatch": "handlers",
	"Handler.Wrap":     "handlers",

	"Job.Payload":                "encodings",
	"FenceSpec.Payload":          "encodings",
	"Queue.Emit":                 "encodings",
	"Applied":                    "encodings",
	"FenceLease.Complete":        "encodings",
	"FenceLease.CompleteInBatch": "encodings",
	"Lease.SetResult":            "results",

	"Part":  "(its Run is called by Serve: parts)",
	"Serve": "parts",

	"Once": "effects",
	"Do":   "effects",
	"Ask":  "ask",

	"Lease.Fail":           "errors",
	"FenceLease.Uncertain": "errors",
	"Fatal":                "(wraps an error that comes back from a handler: errors)",
	"RetryAfter":           "(wraps an error that comes back from a handler: errors)",
	"LimitFull":            "(wraps an error that comes back from a handler: errors)",
	"NotApplied":           "(wraps an error that comes back from fn: effects)",
	"IsFailure":            "(asks about an error in the caller's goroutine, and calls nothing else)",
	"IsRetryable":          "(asks about an error in the caller's goroutine, and calls nothing else)",
	"LeaseLost":            "(asks about an error in the caller's goroutine, and calls nothing else)",

	"EffectOption":      "(only this package can write one that does something)",
	"PanicError.Value":  "(what a function panicked with)",
	"DuplicateError.Is": isReason, "HeldError.Is": isReason, "InFlightError.Is": isReason, "LeaseError.Is": isReason, "MismatchError.Is": isReason, "UncertainError.Is": isReason,

	"onceqops.Filter.Progress": "progress of many",

	"onceqhttp.Config.Principal":      "onceqhttp.TestPanics",
	"onceqhttp.Config.Route":          "onceqhttp.TestPanics",
	"onceqhttp.Config.Fingerprint":    "onceqhttp.TestPanics",
	"onceqhttp.Config.Outcome":        "onceqhttp.TestPanics",
	"onceqhttp.Config.StoredHeader":   "onceqhttp.TestPanics",
	"onceqhttp.Config.Logger":         "onceqhttp.TestPanics",
	"onceqhttp.Middleware.Handler":    "onceqhttp.TestPanics",
	"onceqhttp.Middleware.HandlerTx":  "onceqhttp.TestPanics",
	"onceqhttp.TxHandler":             "onceqhttp.TestPanics",
	"onceqhttp.Transport.Base":        "(runs in the goroutine that makes the request, which is fn's of Once: effects)",
	"onceqcron.Schedule.JobFor":       "onceqcron.TestPanics",
	"onceqcron.Timetable":             "onceqcron.TestPanics",
	"onceqcron.Schedule.Timetable":    "onceqcron.TestPanics",
	"onceqweb.Config.Viewer":          "onceqweb.TestPanics",
	"onceqweb.Config.Mask":            "onceqweb.TestPanics",
	"onceqweb.Config.Logger":          "onceqweb.TestPanics",
	"onceqotel.Config.TracerProvider": "(its tracers run in a Hook, in BeforeEnqueue and in Wrap)",
	"onceqotel.Config.Propagator":     "(it runs in BeforeEnqueue and in Wrap)",
	"onceqotel.Config.MeterProvider":  "(its instruments run in a Hook; New and the reader call the rest in goroutines of the application's)",
	"onceqsql.Transaction":            "(a handle on the database, in the caller's goroutine)",
	"onceqsql.Tx":                     "(a handle on the database, in the caller's goroutine)",
}

const isReason = "(compares an error of the library's with another one)"

// what a function panics with.
type boom struct{}

func (boom) String() string { return "boom!" }

// badJSON encodes only by a panic, and badError has no text but a panic: a nil pointer of such a type is easily returned.
type badJSON struct{ N int }

func (badJSON) MarshalJSON() ([]byte, error) { panic(boom{}) }
func (*badJSON) UnmarshalJSON([]byte) error  { panic(boom{}) }

type badError struct{ text string }

func (e *badError) Error() string { return e.text }

func (e *badError) Unwrap() error { return errors.New(e.text) }

// logBuffer is a log that tests read.
type logBuffer struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.String()
}

func (b *logBuffer) logger() *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }

// badHandler is a slog.Handler that panics in whatever it is asked.
type badHandler struct{ slog.Handler }

func (badHandler) Enabled(context.Context, slog.Level) bool { panic(boom{}) }

func (badHandler) Handle(context.Context, slog.Record) error { panic(boom{}) }

// halfBad panics only when it gets a record.
type halfBad struct{ slog.Handler }

func (halfBad) Handle(context.Context, slog.Record) error { panic(boom{}) }

// isPanic requires that err says that boom was panicked with, and where.
func isPanic(t *testing.T, err error) {
	t.Helper()
	var p *onceq.PanicError
	require.ErrorAs(t, err, &p)
	require.Equal(t, boom{}, p.Value)
	require.Contains(t, string(p.Stack), "panic_test.go")
}

// A panic in a function of the application's is an error, whoever calls the function: it does not end the process, and no worker loses
// a lease by it.
func TestPanics(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(t *testing.T){
		"logger":              panicsInLogger,
		"hook":                panicsInHook,
		"before enqueue":      panicsInBeforeEnqueue,
		"functions of a kind": panicsInKind,
		"backoff":             panicsInBackoff,
		"log level":           panicsInLogLevel,
		"handlers":            panicsInHandlers,
		"encodings":           panicsInEncodings,
		"results":             panicsInResults,
		"progress of many":    panicsInProgress,
		"effects":             panicsInEffects,
		"ask":                 panicsInAsk,
		"errors":              panicsInErrors,
		"parts":               panicsInParts,
	} {
		require.Contains(t, slices.Collect(maps.Values(panics)), name)
		t.Run(name, test)
	}
}

func panicsInLogger(t *testing.T) {
	t.Parallel()
	for _, h := range []slog.Handler{badHandler{slog.DiscardHandler}, halfBad{slog.NewTextHandler(&logBuffer{}, nil)}} {
		db := queuetest.New(t, queuetest.Config(onceq.Config{
			Logger: slog.New(h),
			Hook:   onceq.HookFunc(func(context.Context, onceq.Event) { panic(boom{}) }), // which is to be logged
		}))
		kind := onceq.Kind[int]{Name: "k", MaxAttempts: 2, Backoff: func(int, error) time.Duration { return 0 }}
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
		require.NoError(t, err)
		ran := db.Drain(kind.Handle(func(context.Context, *onceq.Lease, int) error { return errors.New("a warning") }))
		require.Len(t, ran, 2)
		db.Queue.Logger().With("a", 1).WithGroup("g").Error("one more")
	}
}

func panicsInHook(t *testing.T) {
	t.Parallel()
	var log logBuffer
	db := queuetest.New(t, queuetest.Config(onceq.Config{
		Logger: log.logger(),
		Hook:   onceq.HookFunc(func(context.Context, onceq.Event) { panic(boom{}) }),
	}))
	kind := onceq.Kind[int]{Name: "k", Key: func(int) string { return "one" }}
	for n := range 2 {
		r, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
		require.NoError(t, err)
		require.Equal(t, n == 1, r.Duplicate)
	}
	for _, ran := range db.Drain(kind.Handle(func(context.Context, *onceq.Lease, int) error { return nil })) {
		require.Equal(t, onceq.StateCompleted, ran.State)
	}
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
	require.Contains(t, log.String(), "function=Config.Hook times=1 panic=boom!")
	require.Contains(t, log.String(), "panic_test.go")
	require.LessOrEqual(t, strings.Count(log.String(), "function=Config.Hook"), 4) // of Enqueue's Queue, and of the worker's
}

// A Hook or a log handler that ends its goroutine, as a test's FailNow does, ends none of the library's: the worker, the Reaper and those
// that enqueue go on.
func TestGoexit_EndsNoGoroutineOfTheLibrary(t *testing.T) {
	t.Parallel()
	var log logBuffer
	exit := onceq.HookFunc(func(context.Context, onceq.Event) { runtime.Goexit() })
	for name, cfg := range map[string]onceq.Config{
		"hook":   {Logger: log.logger(), Hook: exit},
		"logger": {Logger: slog.New(exitHandler{slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})})},
	} {
		t.Run(name, func(t *testing.T) {
			db := queuetest.New(t, queuetest.Config(cfg))
			kind := onceq.Kind[int]{Name: "k", Backoff: func(int, error) time.Duration { return 0 }}
			w := start(t, db, onceq.WorkerConfig{}, kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
				if l.Attempt == 1 {
					return errors.New("again")
				}
				return nil
			}))
			for n := range 3 {
				_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(n))
				require.NoError(t, err)
				until(t, db, noJobs)
			}
			require.NoError(t, w.stop())
			sqlRun(t, db, `insert into onceq.waiters (worker, serves, round, room, idle_until) values (2, 2, 1, 1, now() - interval '1 day')`)
			reaped, err := newReaper(t, db, onceq.ReaperConfig{}).RunOnce(t.Context())
			require.NoError(t, err)
			require.Equal(t, 1, reaped.Waiters)
		})
	}
	require.Contains(t, log.String(), `function=Config.Hook times=1 panic="it ended its goroutine, by runtime.Goexit`)
}

// exitHandler is a slog.Handler that ends the goroutine in which it gets a record.
type exitHandler struct{ slog.Handler }

func (exitHandler) Handle(context.Context, slog.Record) error { runtime.Goexit(); return nil }

func panicsInBeforeEnqueue(t *testing.T) {
	t.Parallel()
	var log logBuffer
	early := true
	db := queuetest.New(t, queuetest.Config(onceq.Config{
		Logger: log.logger(),
		BeforeEnqueue: func(ctx context.Context, _ []onceq.Job) (context.Context, func(error)) {
			if early {
				panic(boom{})
			}
			return ctx, func(error) { panic(boom{}) }
		},
	}))
	job := onceq.Job{Kind: "k"}
	calls := []func() error{
		func() error { _, err := db.Queue.Enqueue(t.Context(), db.Pool, job); return err },
		func() error { _, err := db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{job}); return err },
		func() error { _, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, nil, job); return err },
	}
	for _, call := range calls {
		isPanic(t, call())
	}
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
	early = false
	for _, call := range calls {
		require.NoError(t, call())
	}
	require.Equal(t, 3, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
	require.Contains(t, log.String(), `function="done of Config.BeforeEnqueue" times=1 panic=boom!`)
}

func panicsInKind(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	bad := func(int) string { panic(boom{}) }
	key := func(int) string { return "key" }
	for name, kind := range map[string]onceq.Kind[int]{
		"Kind.Key":    {Name: "k", Key: bad},
		"Kind.Scope":  {Name: "k", Key: key, Scope: bad},
		"Kind.Lane":   {Name: "k", Lane: bad},
		"Kind.Limit":  {Name: "k", Limit: bad},
		"Kind.Weight": {Name: "k", Limit: key, Weight: func(int) int { panic(boom{}) }},
	} {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
		isPanic(t, err)
		require.ErrorContains(t, err, name+` of kind "k" panicked`)
		_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{{Kind: "other"}, kind.Job(1)})
		isPanic(t, err)
		_, err = db.Queue.EnqueueInBatch(&pgx.Batch{}, kind.Job(1))
		isPanic(t, err)
	}
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
}

func panicsInBackoff(t *testing.T) {
	t.Parallel()
	var log logBuffer
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: log.logger()}))
	kind := onceq.Kind[int]{Name: "k", Backoff: func(int, error) time.Duration { panic(boom{}) }}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	ran := db.RunOne(kind.Handle(func(context.Context, *onceq.Lease, int) error { return errors.New("again") }))
	require.Equal(t, onceq.StateRetrying, ran.State)
	require.Equal(t, 1, strings.Count(log.String(), `function="Kind.Backoff of k" times=1 panic=boom!`), log.String())
}

func panicsInLogLevel(t *testing.T) {
	t.Parallel()
	var log logBuffer
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: log.logger()}))
	kind := onceq.Kind[int]{Name: "k", LogLevel: func(onceq.EventType) slog.Level { panic(boom{}) }}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	ran := db.RunOne(kind.Handle(func(context.Context, *onceq.Lease, int) error { return errors.New("again") }))
	require.Equal(t, onceq.StateRetrying, ran.State)
	require.Contains(t, log.String(), `function="Kind.LogLevel of k" times=1 panic=boom!`)
	require.Contains(t, log.String(), `level=WARN msg="onceq: failed"`, "at the level of other kinds")
}

func panicsInHandlers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "k"}
	bad := onceq.Kind[badJSON]{Name: "k"}
	around := func(context.Context, []*onceq.Lease, func(context.Context) error) error { panic(boom{}) }
	for _, h := range []onceq.Handler{
		kind.Handle(func(context.Context, *onceq.Lease, int) error { panic(boom{}) }),
		kind.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, int) error { panic(boom{}) }),
		kind.HandleBatch(1, func(context.Context, pgx.Tx, []onceq.Item[int]) error { panic(boom{}) }),
		kind.Handle(func(context.Context, *onceq.Lease, int) error { return nil }).Wrap(around),
		bad.Handle(func(context.Context, *onceq.Lease, badJSON) error { return nil }),
	} {
		r, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
		require.NoError(t, err)
		ran := db.RunOne(h)
		require.Equal(t, onceq.StateRetrying, ran.State)
		isPanic(t, ran.Err)
		require.Zero(t, sqlOne[int](t, db, `select lost from onceq.jobs where id = $1`, r.ID))
	}
	checks, err := onceqops.New(db.Queue).CheckPayloads(t.Context(), bad.Handle(func(context.Context, *onceq.Lease, badJSON) error { return nil }))
	require.NoError(t, err)
	require.Len(t, checks, 1)
	require.Equal(t, checks[0].Jobs, checks[0].Failed)
}

func panicsInEncodings(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	fence, err := q.Fence(onceq.FenceSpec{Key: "one"})
	require.NoError(t, err)
	c, err := fence.Claim(ctx, nil)
	require.NoError(t, err)
	for name, call := range map[string]func() error{
		"Enqueue": func() error { _, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Payload: badJSON{}}); return err },
		"EnqueueMany": func() error {
			_, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{{Kind: "k"}, {Kind: "k", Payload: badJSON{}}})
			return err
		},
		"Emit":            func() error { _, err := q.Emit(ctx, db.Pool, "s", "k", badJSON{}); return err },
		"Fence":           func() error { _, err := q.Fence(onceq.FenceSpec{Key: "two", Payload: badJSON{}}); return err },
		"Complete":        func() error { return c.Complete(ctx, nil, badJSON{}) },
		"CompleteInBatch": func() error { return c.CompleteInBatch(&pgx.Batch{}, badJSON{}) },
		"Applied":         func() error { return fence.Resolve(ctx, db.Pool, onceq.Applied(badJSON{})) },
	} {
		t.Run(name, func(t *testing.T) { isPanic(t, call()) })
	}
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
	require.NoError(t, c.Complete(ctx, nil, 1))
}

func panicsInResults(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "k"}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	ran := db.RunOne(kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error { return l.SetResult(badJSON{}) }))
	isPanic(t, ran.Err)
	require.Equal(t, onceq.StateRetrying, ran.State)
}

func panicsInProgress(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k"})
	require.NoError(t, err)
	n, _, err := onceqops.New(db.Queue).CancelMany(t.Context(), db.Pool, onceqops.Filter{All: true, Progress: func(int) error { panic(boom{}) }})
	isPanic(t, err)
	require.Equal(t, 1, n)
}

// The outcome of the effect is unknown, and the panic goes on to whoever called Once or Do. A result that cannot be encoded undoes
// nothing.
func panicsInEffects(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "k", Backoff: func(int, error) time.Duration { return 0 }}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	fn := func(context.Context, string) (int, error) { panic(boom{}) }
	ran := db.RunOne(kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		_, err := onceq.Once(ctx, l, "charge", fn, onceq.OnUncertain(onceq.Hold()))
		return err
	}))
	isPanic(t, ran.Err)
	effects, err := onceqops.New(db.Queue).Effects(t.Context(), db.Pool, ran.JobID)
	require.NoError(t, err)
	require.Len(t, effects, 1)
	require.Equal(t, "uncertain", effects[0].State)
	ran = db.RunOne(kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		_, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (badJSON, error) { return badJSON{}, nil })
		return err
	}))
	require.Equal(t, onceq.StateDead, ran.State)
	require.ErrorContains(t, ran.Err, "recorded as completed")
	require.PanicsWithValue(t, boom{}, func() {
		_, _ = onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "do"}, func(context.Context, *onceq.FenceLease) (int, error) { panic(boom{}) })
	})
	_, err = onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "do", Policy: onceq.Hold()}, func(context.Context, *onceq.FenceLease) (int, error) { return 1, nil })
	require.ErrorIs(t, err, onceq.ErrHeld)
	_, err = onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "stored"}, func(context.Context, *onceq.FenceLease) (int, error) { return 1, nil })
	require.NoError(t, err)
	_, err = onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "stored"}, func(context.Context, *onceq.FenceLease) (badJSON, error) { return badJSON{}, nil })
	isPanic(t, err)
}

func panicsInAsk(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	spec := onceq.FenceSpec{Key: "one", Lease: time.Millisecond, Policy: onceq.Ask(func(context.Context, string) (any, bool, error) { panic(boom{}) })}
	fail := func(context.Context, *onceq.FenceLease) (int, error) { return 0, errors.New("timeout") }
	_, err := onceq.Do(t.Context(), db.Queue, spec, fail)
	require.ErrorIs(t, err, onceq.ErrUncertain)
	eventually(t, "somebody may ask", func() bool {
		db.Advance(time.Minute)
		_, err = onceq.Do(t.Context(), db.Queue, spec, fail)
		return !errors.Is(err, onceq.ErrInFlight)
	})
	require.ErrorIs(t, err, onceq.ErrUncertain)
	isPanic(t, err)
}

// An error whose methods panic, such as a nil pointer in an interface, fails the attempt and no more, and one of 20 MiB is cut.
func panicsInErrors(t *testing.T) {
	t.Parallel()
	var log logBuffer
	var mu sync.Mutex
	longest := 0
	db := queuetest.New(t, queuetest.Config(onceq.Config{
		Logger: log.logger(),
		Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
			mu.Lock()
			defer mu.Unlock()
			if e.Err != nil {
				longest = max(longest, len(e.Err.Error()))
			}
		}),
	}))
	kind := onceq.Kind[int]{Name: "k", Backoff: func(int, error) time.Duration { return 0 }}
	job, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	var none *badError
	huge := errors.New(strings.Repeat("x", 20<<20))
	for _, h := range []onceq.Handler{
		kind.Handle(func(context.Context, *onceq.Lease, int) error { return none }),
		kind.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, int) error { return onceq.RetryAfter(0, none) }),
		kind.HandleBatch(1, func(context.Context, pgx.Tx, []onceq.Item[int]) error { return errors.Join(none, huge) }),
	} {
		ran := db.RunOne(h)
		require.Equal(t, onceq.StateRetrying, ran.State)
		var p *onceq.PanicError
		require.ErrorAs(t, ran.Err, &p)
		require.ErrorContains(t, ran.Err, "a method of the error, a ")
	}
	ran := db.RunOne(kind.Handle(func(context.Context, *onceq.Lease, int) error { return huge }))
	require.ErrorIs(t, ran.Err, huge)
	ran = db.RunOne(kind.Handle(func(context.Context, *onceq.Lease, int) error { panic(huge) }))
	require.ErrorIs(t, ran.Err, huge)
	ran = db.RunOne(kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 0, huge })
		require.ErrorIs(t, err, huge)
		return err
	}))
	require.ErrorIs(t, ran.Err, huge)

	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
	require.NoError(t, err)
	require.NoError(t, leases[0].Fail(t.Context(), none))
	sqlRun(t, db, `update onceq.jobs set run_at = statement_timestamp()`)
	leases, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
	require.NoError(t, err)
	require.NoError(t, leases[0].Fail(t.Context(), huge))

	fence, err := db.Queue.Fence(onceq.FenceSpec{Key: "one"})
	require.NoError(t, err)
	for _, cause := range []error{none, huge} {
		c, err := fence.Claim(t.Context(), nil)
		require.NoError(t, err)
		require.NoError(t, c.Uncertain(t.Context(), nil, cause))
	}
	info, err := db.Queue.Get(t.Context(), db.Pool, job.ID)
	require.NoError(t, err)
	require.Len(t, info.Errors, 8)
	require.Less(t, len(log.String()), 1<<20)
	mu.Lock()
	defer mu.Unlock()
	require.Less(t, longest, 100<<10)
}

// A part of a service that panics, or ends its goroutine, ends the service, and the others end as they should: handlers that run keep
// their leases until they have returned.
func panicsInParts(t *testing.T) {
	t.Parallel()
	for name, ends := range map[string]func(){"panic": func() { panic(boom{}) }, "goexit": runtime.Goexit} {
		db := queuetest.New(t)
		kind := onceq.Kind[int]{Name: "k"}
		running := make(chan bool)
		w := must[*onceq.Worker](t)(onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, kind.Handle(func(ctx context.Context, _ *onceq.Lease, _ int) error {
			close(running)
			time.Sleep(100 * time.Millisecond) // its work
			return ctx.Err()
		})))
		must[onceq.Result](t)(db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1)))
		err := onceq.Serve(t.Context(), w, partFunc(func(context.Context) error {
			<-running
			ends()
			return nil
		}))
		if name == "panic" {
			isPanic(t, err)
		}
		require.ErrorContains(t, err, map[string]string{"panic": "boom!", "goexit": "a tests.partFunc has ended its goroutine"}[name])
		require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
	}
}

// Whatever a new field or parameter brings of the application's code is in the table, and the tests that it names are there.
func TestPanics_TheTableIsComplete(t *testing.T) {
	t.Parallel()
	const root = "../../"
	left := maps.Clone(panics)
	for _, pkg := range []string{"", "onceqops", "onceqhttp", "onceqcron", "onceqweb", "onceqotel", "onceqsql", "migrations"} {
		for _, name := range calledIn(t, root, pkg) {
			if _, known := panics[name]; !known {
				t.Errorf("%s is not in the table: what becomes of a panic in it?", name)
			}
			delete(left, name)
		}
	}
	require.Empty(t, left, "there is nothing of that name")
	for name, shown := range panics {
		if pkg, test, ok := strings.Cut(shown, "."); ok && strings.HasPrefix(test, "Test") {
			files, err := filepath.Glob(root + pkg + "/*_test.go")
			require.NoError(t, err)
			require.True(t, slices.ContainsFunc(files, func(file string) bool {
				text, err := os.ReadFile(file)
				require.NoError(t, err)
				return bytes.Contains(text, []byte("func "+test+"("))
			}), "%s: there is no %s", name, shown)
		}
	}
}

// foreign matches types whose values may bring code: functions, interfaces that applications implement, values that are encoded.
// Handles on the database and contexts are not among them: they run in the caller's goroutine.
var foreign = regexp.MustCompile(`^(\.\.\.)?(any|error|Hook|Part|Timetable|Transaction|\*slog\.Logger|http\.Handler|http\.RoundTripper|\w+\.(Tracer|Meter)Provider|\w+\.TextMapPropagator|TxHandler)$`)

// calledIn gives the names of the exported fields and the functions of a package that take code of the application's.
func calledIn(t *testing.T, root, pkg string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(root + pkg + "/*.go")
	require.NoError(t, err)
	add := func(name string) {
		if pkg != "" {
			name = pkg + "." + name
		}
		names = append(names, name)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, name, text, 0)
		require.NoError(t, err)
		brings := func(e ast.Expr) bool {
			found := false
			ast.Inspect(e, func(n ast.Node) bool {
				_, is := n.(*ast.FuncType)
				found = found || is
				return !found
			})
			return found || foreign.Match(text[files.Position(e.Pos()).Offset:files.Position(e.End()).Offset])
		}
		for _, d := range file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				of := receiver(d)
				if d.Name.IsExported() && (of == "" || ast.IsExported(of)) && slices.ContainsFunc(d.Type.Params.List, func(p *ast.Field) bool { return brings(p.Type) }) {
					add(strings.TrimPrefix(of+"."+d.Name.Name, "."))
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					if s, ok := s.(*ast.TypeSpec); ok && s.Name.IsExported() {
						eachField(s, brings, add)
					}
				}
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// receiver names the type of a method, without a star and type parameters.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	e := d.Recv.List[0].Type
	for {
		switch x := e.(type) {
		case *ast.StarExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

// eachField names the fields of a struct that bring code, and a type that is itself code.
func eachField(s *ast.TypeSpec, brings func(ast.Expr) bool, add func(string)) {
	switch u := s.Type.(type) {
	case *ast.FuncType:
		add(s.Name.Name)
	case *ast.InterfaceType:
		if foreign.MatchString(s.Name.Name) {
			add(s.Name.Name)
		}
	case *ast.StructType:
		for _, f := range u.Fields.List {
			id, ok := f.Type.(*ast.Ident)
			if ok && id.Name == "error" || !brings(f.Type) {
				continue // an error in a field is one that the library gives
			}
			for _, n := range f.Names {
				if n.IsExported() {
					add(s.Name.Name + "." + n.Name)
				}
			}
		}
	}
}

var _ json.Marshaler = badJSON{}
