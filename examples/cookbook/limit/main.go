// Limit makes at most two calls to a provider at a time, in any number of processes. Each call holds one of two fences.
package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

const slots = 2

// withSlot calls fn while it holds a slot. If all slots are taken, the job runs again later and spends no attempt.
func withSlot(ctx context.Context, q *onceq.Queue, fn func(ctx context.Context) error) error {
	for _, slot := range rand.Perm(slots) {
		var failed error
		_, err := onceq.Do(ctx, q, onceq.FenceSpec{
			Scope:  "slots of the provider",
			Key:    fmt.Sprint(slot),
			Window: onceq.UntilFinished,           // the slot is free as soon as fn has returned
			Policy: onceq.RunAgain(onceq.Forever), // if its process died, it is free when the lease has run out
		}, func(ctx context.Context, _ *onceq.FenceLease) (struct{}, error) {
			failed = fn(ctx) // the slot becomes free either way; the job handles the error
			return struct{}{}, nil
		})
		if !errors.Is(err, onceq.ErrInFlight) {
			return errors.Join(err, failed)
		}
	}
	return onceq.Snooze(50*time.Millisecond + rand.N(50*time.Millisecond)) // seconds, in a real service
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	const jobs = 8
	lookup := onceq.Kind[int]{Name: "lookup", Queue: "provider"}
	for n := range jobs {
		_, err := q.Enqueue(ctx, pool, lookup.Job(n))
		example.Check(err)
	}
	p := &provider{}
	call := func(context.Context) error {
		if p.call() == jobs {
			stop()
		}
		return nil
	}
	var processes sync.WaitGroup
	for range 3 {
		processes.Go(func() {
			example.Work(ctx, q, lookup.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
				return withSlot(ctx, q, call)
			}))
		})
	}
	processes.Wait()
	fmt.Println("calls:", p.calls, "never more at a time than slots:", p.most <= slots)
}

// provider stands for a provider that can take two calls at a time.
type provider struct {
	mu               sync.Mutex
	now, most, calls int
}

func (p *provider) call() (calls int) {
	p.add(1)
	time.Sleep(20 * time.Millisecond) // the call takes a while
	return p.add(-1)
}

func (p *provider) add(n int) (calls int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now += n
	p.most = max(p.most, p.now)
	if n < 0 {
		p.calls++
	}
	return p.calls
}

// Output:
// calls: 8 never more at a time than slots: true
