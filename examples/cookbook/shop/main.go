// Shop charges its customers' orders: one charge at a time for each customer, in the order in which they came, no
// more calls than the provider takes, none while it is busy, and each order once, also if an answer of the provider
// is lost. The page that took an order waits for its receipt.
package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type order struct{ ID, Customer, Cents int }

var charge = onceq.Kind[order]{
	Name:    "charge",
	Key:     func(o order) string { return fmt.Sprint("order-", o.ID) },
	Lane:    func(o order) string { return fmt.Sprint("customer-", o.Customer) },
	Limit:   func(order) string { return "provider" },
	Backoff: func(int, error) time.Duration { return 20 * time.Millisecond }, // seconds, in a real service
	Window:  onceq.Forever,                                                   // no order is charged again, however late its form comes

	MaxAttempts: 10, // the customer's other orders wait for them
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	// The contract says three calls at once, and sixty in any second. What an operator has set stays.
	_, err := q.EnsureLimit(ctx, pool, "provider", onceq.Limit{AtOnce: 3, Max: 60})
	example.Check(err)
	p := &provider{charges: map[string]int{}, at: map[int]bool{}, charged: map[int][]int{}}
	ended := make(chan error)
	// Three processes, in a real service. Each has a Reaper and probes, too: examples/service.
	go func() { ended <- onceq.Serve(ctx, worker(q, p), worker(q, p), worker(q, p)) }()

	const customers, each = 4, 5
	for range 2 { // a form that was sent twice
		for id := range customers * each {
			_, err := q.Enqueue(ctx, pool, charge.Job(order{ID: id, Customer: id % customers, Cents: 100}))
			example.Check(err)
		}
	}
	receipts := map[string]bool{}
	for id := range customers * each { // the page that says thank you
		job, err := q.Wait(ctx, charge.Ref(order{ID: id}))
		example.Check(err)
		receipts[string(job.Result)] = true
	}
	stop()
	example.Check(<-ended)
	for customer := range customers {
		fmt.Println("customer", customer, "was charged for", p.charged[customer])
	}
	fmt.Println("receipts:", len(receipts), "charges:", len(p.charges), "answers lost:", p.lost)
	fmt.Println("two at once for one customer:", p.overlap, "more than three at once:", p.most > 3)
}

func worker(q *onceq.Queue, p *provider) *onceq.Worker {
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, charge.Handle(func(ctx context.Context, l *onceq.Lease, o order) error {
		receipt, err := onceq.Once(ctx, l, "charge", func(_ context.Context, key string) (int, error) { return p.charge(key, o) })
		switch {
		case errors.Is(err, errBusy):
			return onceq.LimitFull(50*time.Millisecond, err) // nobody calls it for so long; no attempt is spent
		case err != nil:
			return err // it runs again, with the same key; the customer's next order waits for it
		}
		return l.SetResult(receipt)
	}))
	example.Check(err)
	return w
}

var errBusy = errors.New("429, Retry-After: 0.05")

// provider stands for a payment provider that takes an idempotency key. Now and then its answer is lost, and once it is busy.
type provider struct {
	mu               sync.Mutex
	charges          map[string]int // receipts by key
	charged          map[int][]int  // orders by customer
	at               map[int]bool   // customers with a call
	now, most, lost  int
	overlap, refused bool
}

func (p *provider) charge(key string, o order) (receipt int, err error) {
	p.mu.Lock()
	p.now++
	p.most = max(p.most, p.now)
	p.overlap = p.overlap || p.at[o.Customer]
	p.at[o.Customer] = true
	p.mu.Unlock()
	time.Sleep(10 * time.Millisecond) // the call takes a while
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now--
	p.at[o.Customer] = false
	if len(p.charges) == 7 && !p.refused {
		p.refused = true
		return 0, onceq.NotApplied(errBusy)
	}
	if _, known := p.charges[key]; !known {
		p.charges[key] = len(p.charges) + 1
		p.charged[o.Customer] = append(p.charged[o.Customer], o.ID)
		if o.ID%7 == 3 {
			p.lost++
			return 0, errors.New("time-out") // after the charge
		}
	}
	return p.charges[key], nil
}

// Output:
// customer 0 was charged for [0 4 8 12 16]
// customer 1 was charged for [1 5 9 13 17]
// customer 2 was charged for [2 6 10 14 18]
// customer 3 was charged for [3 7 11 15 19]
// receipts: 20 charges: 20 answers lost: 3
// two at once for one customer: false more than three at once: false
