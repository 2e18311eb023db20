// Limit makes at most two calls to a provider at a time, and at most fifty a second, in any number of processes and whoever asks. A
// customer has at most one of them.
package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type question struct{ Customer, N int }

var lookup = onceq.Kind[question]{
	Name:  "lookup",
	Lane:  func(c question) string { return fmt.Sprint("customer-", c.Customer) },
	Limit: func(question) string { return "provider" },
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	const atOnce, jobs = 2, 12
	// A service sets a limit once, with its migrations: an operator may change it later.
	example.Check(q.SetLimit(ctx, pool, "provider", onceq.Limit{AtOnce: atOnce, Max: 50}))
	for n := range jobs {
		_, err := q.Enqueue(ctx, pool, lookup.Job(question{Customer: n % 4, N: n}))
		example.Check(err)
	}
	p := &provider{}
	var processes sync.WaitGroup
	for range 3 {
		processes.Go(func() {
			example.Work(ctx, q, lookup.Handle(func(ctx context.Context, l *onceq.Lease, c question) error {
				if p.call() == jobs {
					stop()
				}
				return nil
			}))
		})
	}
	processes.Wait()
	fmt.Println("calls:", p.calls, "never more at a time:", p.most <= atOnce)
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
// calls: 12 never more at a time: true
