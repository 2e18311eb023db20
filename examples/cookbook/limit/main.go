// Limit makes at most two calls to a provider at a time, in any number of processes: each call holds one of two fences.
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

// withSlot calls fn while it holds a slot. Where all are taken, the job comes back later and spends no attempt.
func withSlot(ctx context.Context, q *onceq.Queue, fn func(ctx context.Context) error) error {
	for _, slot := range rand.Perm(slots) {
		var failed error
		_, err := onceq.Do(ctx, q, onceq.FenceSpec{
			Scope:  "slots of the provider",
			Key:    fmt.Sprint(slot),
			Window: onceq.UntilFinished,           // free as soon as fn has returned
			Policy: onceq.RunAgain(onceq.Forever), // free after a lease where its process has died
		}, func(ctx context.Context, _ *onceq.FenceLease) (struct{}, error) {
			failed = fn(ctx) // whether it went well is the job's business: the slot is free in any case
			return struct{}{}, nil
		})
		if !errors.Is(err, onceq.ErrInFlight) {
			return errors.Join(err, failed)
		}
	}
	return onceq.Snooze(50*time.Millisecond + rand.N(50*time.Millisecond)) // seconds, really
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

// provider stands for one that bears two calls at a time.
type provider struct {
	mu               sync.Mutex
	now, most, calls int
}

func (p *provider) call() (calls int) {
	p.add(1)
	time.Sleep(20 * time.Millisecond) // it takes its time
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
