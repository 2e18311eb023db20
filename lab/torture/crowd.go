package main

import (
	"context"
	"sync"
	"syscall"
	"time"
)

// crowd is a dozen worker processes that come and go together, as with a deploy or an autoscaler. One wave of them follows the
// other.
type crowd struct {
	places []place

	started, stopped, killed, fallen int      // processes of all waves, and how they ended
	panics                           []string // places of those that ended by a panic
}

// churn lets waves come until ctx ends. By then the last one has gone.
func (c *chaos) churn(ctx context.Context, l *lane) {
	for ctx.Err() == nil {
		f := l.next()
		c.say("crowd: %s", f.Kind)
		c.count(f.Kind, c.crowd.wave(ctx, f))
		pause(ctx, f.Then)
	}
}

// wave starts all processes at once. After some seconds it ends some by SIGTERM, which lets them finish their jobs, and the
// others by SIGKILL. One that ends before that is started again.
func (c *crowd) wave(ctx context.Context, f fault) (err error) {
	var here []*slot
	for _, p := range c.places {
		var s *slot
		if s, err = startSlot(p); err != nil {
			break
		}
		here = append(here, s)
	}
	pause(ctx, f.seconds(lease.Seconds(), 4*lease.Seconds()))
	var ending sync.WaitGroup
	for i, s := range here {
		sig := syscall.SIGTERM
		if f.Target>>(i%20)&1 == 1 {
			sig = syscall.SIGKILL
		}
		ending.Go(func() { s.end(sig, 30*time.Second) })
	}
	ending.Wait()
	for _, s := range here {
		c.started += s.starts
		c.fallen += s.fallen
		switch {
		case s.starts == s.fallen+s.panics: // it had just ended by itself
		case s.killed:
			c.killed++
		default:
			c.stopped++
		}
		for range s.panics {
			c.panics = append(c.panics, s.Slot)
		}
	}
	return err
}
