// Package guard calls functions that the application gave. A panic in one of them must not end the process, nor the goroutine of the
// library's that calls it: other jobs depend on that goroutine.
package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Panic is what a function panicked with, and where.
type Panic struct {
	Value any
	Stack []byte
}

// Call calls fn and returns its panic, or nil.
func Call(fn func()) (p *Panic) {
	defer func() {
		if v := recover(); v != nil {
			p = &Panic{v, debug.Stack()}
		}
	}()
	fn()
	return nil
}

// Tame calls what errors.Is and errors.As call of err, which may panic, as on a nil pointer that was returned as
// an error. An error whose text is longer than most is wrapped, with the text cut.
func Tame(err error, most int, cut func(string) string) (tame error, p *Panic) {
	var text string
	p = Call(func() {
		text = err.Error()
		var long *longError
		_ = errors.Is(err, context.Canceled) || errors.As(err, &long)
	})
	if p == nil && len(text) > most {
		return &longError{cut(text), err}, nil
	}
	return err, p
}

// longError is an error whose text was cut.
type longError struct {
	text string
	err  error
}

func (e *longError) Error() string { return e.text }

func (e *longError) Unwrap() error { return e.err }

// apart is Call in a goroutine of its own, which fn may end: nothing stops that. It takes half a microsecond.
func apart(fn func()) *Panic {
	p := &Panic{Value: "it ended its goroutine, by runtime.Goexit, which a test's FailNow calls"}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p = Call(fn)
	}()
	<-ended
	return p
}

// Guard calls functions whose panics nobody would hear of, and logs them. The first panic of each function is logged, and then the
// second, the fourth and so on: a Hook that always panics does so at each event.
type Guard struct {
	log    *slog.Logger
	counts sync.Map // name of the function → *atomic.Int64
}

// New returns a Guard that logs to log, which must be a Logger of this package.
func New(log *slog.Logger) *Guard { return &Guard{log: log} }

// Call calls fn, the function with that name, in a goroutine of its own, and returns its panic, or nil.
func (g *Guard) Call(name string, fn func()) *Panic {
	p := apart(fn)
	if p == nil {
		return nil
	}
	count, _ := g.counts.LoadOrStore(name, new(atomic.Int64))
	if n := count.(*atomic.Int64).Add(1); n&(n-1) == 0 {
		g.log.LogAttrs(context.Background(), slog.LevelError, "onceq: a function of the application panicked; it is called again the next time",
			slog.String("function", name), slog.Int64("times", n), slog.String("panic", p.text()), slog.String("stack", string(p.Stack)))
	}
	return p
}

// text is the value as a text, of a length that a log can take.
func (p *Panic) text() string {
	s := fmt.Sprint(p.Value) // which survives a String or an Error that panics
	const most = 8 << 10
	return s[:min(len(s), most)]
}

// Logger returns a logger whose handler cannot panic, nor its Handle end the goroutine that logs. A record
// with which it would is lost. The first time, that is said on standard error, because there is nowhere else.
func Logger(log *slog.Logger) *slog.Logger {
	if _, ok := log.Handler().(*handler); ok {
		return log
	}
	return slog.New(&handler{log.Handler()})
}

type handler struct{ slog.Handler }

var said sync.Once

func (h *handler) call(fn func()) { h.check(Call(fn)) }

func (h *handler) check(p *Panic) {
	if p != nil {
		said.Do(func() {
			fmt.Fprintf(os.Stderr, "onceq: the application's slog.Handler %T panicked, and log records are lost: %s\n\n%s", h.Handler, p.text(), p.Stack)
		})
	}
}

func (h *handler) Enabled(ctx context.Context, level slog.Level) (enabled bool) {
	h.call(func() { enabled = h.Handler.Enabled(ctx, level) })
	return enabled
}

func (h *handler) Handle(ctx context.Context, r slog.Record) (err error) {
	h.check(apart(func() { err = h.Handler.Handle(ctx, r) }))
	return err
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	inner := h.Handler
	h.call(func() { inner = h.Handler.WithAttrs(attrs) })
	return &handler{inner}
}

func (h *handler) WithGroup(name string) slog.Handler {
	inner := h.Handler
	h.call(func() { inner = h.Handler.WithGroup(name) })
	return &handler{inner}
}
