package onceq

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"sync"
	"syscall"
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
