package onceq

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// Part is a part of a service that Serve runs: a *Worker, a *Reaper, what onceqhttp.Part makes of an
// http.Server, or one of the application's own. Run returns nil when ctx has ended and the part has.
type Part interface {
	Run(ctx context.Context) error
}

// Serve runs the parts of a service until the process gets SIGTERM or an interrupt, or ctx ends. Then it
// ends all of them, waits until they have ended, and returns their errors. If a part ends by itself, with
// an error or without, Serve ends the others and returns an error: a *PanicError if it panicked. A second
// signal ends the process at once.
func Serve(ctx context.Context, parts ...Part) error {
	if len(parts) == 0 {
		return invalid("Serve", "has no parts; give it a Worker and a Reaper")
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // from then on a signal does what it does without Serve
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	ended := make([]error, len(parts))
	for i, part := range parts {
		running.Go(func() {
			defer cancel()
			ended[i] = fmt.Errorf("onceq: Serve: a %T has ended its goroutine", part) // if it does
			err := protect(func() error { return part.Run(ctx) })
			if err == nil && ctx.Err() == nil {
				err = fmt.Errorf("onceq: Serve: a %T has ended by itself", part)
			}
			ended[i] = err
		})
	}
	running.Wait()
	return errors.Join(ended...)
}

// Ready returns nil while the worker takes jobs: Run has found the database and tables that fit this code,
// is not shutting down, and what the worker last asked of the database was answered. Otherwise the error
// says what is missing. Ready sends nothing, so it may be called often; a database that is lost shows after
// some five seconds. onceqhttp.Probes answers readiness probes with it.
func (w *Worker) Ready() error {
	r := w.now.Load()
	switch {
	case r == nil:
		return errors.New("onceq: the worker does not run: it has not reached the database yet, or has ended")
	case r.exec.Stopping():
		return errors.New("onceq: the worker is shutting down")
	}
	found := w.q.troubles.List(r.id, watch.Claim, watch.Look, watch.Finish)
	if len(found) > 0 {
		return fmt.Errorf("onceq: %s", found[0].Detail)
	}
	return nil
}

// Alive returns nil unless a restart of the process would help: a handler has not returned for a lease
// since its context ended, and holds its slot, or the worker's loop should have gone on 30 seconds ago. A
// database that is lost is no such reason, nor is a worker that does not run, or shuts down.
// onceqhttp.Probes answers liveness probes with it.
func (w *Worker) Alive() error {
	r := w.now.Load()
	if r == nil || r.exec.Stopping() {
		return nil
	}
	if stuck := r.exec.Set.Given(); len(stuck) > 0 {
		var all []string
		for _, s := range stuck {
			all = append(all, s.String())
		}
		return fmt.Errorf("onceq: %s", strings.Join(all, "; "))
	}
	if next := r.claimer.Next.Load(); next != nil && time.Since(*next) > 30*time.Second {
		return fmt.Errorf("onceq: the worker's loop should have gone on at %s and stands still", table.Stamp(*next))
	}
	return nil
}
