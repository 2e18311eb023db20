// Effect charges a card through a provider outside the database. The intent is committed before the call, and the outcome
// after it. After a crash or a time-out, another run sends the same idempotency key, and the provider gives its first
// answer.
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type payment struct {
	OrderID string `json:"order_id"`
	Amount  int    `json:"amount"`
}

var charge = onceq.Kind[payment]{
	Name:    "charge",
	Key:     func(p payment) string { return "charge:" + p.OrderID },
	Backoff: func(attempt int, err error) time.Duration { return 10 * time.Millisecond },
}

// provider stands for a provider that takes an Idempotency-Key, as most do.
type provider struct {
	charges map[string]string // by key
	calls   int
}

func (p *provider) charge(key string, amount int) (string, error) {
	p.calls++
	if _, known := p.charges[key]; !known {
		p.charges[key] = fmt.Sprintf("ch_%d", len(p.charges)+1)
	}
	if p.calls == 1 {
		return "", errors.New("time-out") // after the charge
	}
	return p.charges[key], nil
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	defer pool.Close()
	p := &provider{charges: make(map[string]string)}

	_, err := q.Enqueue(ctx, pool, charge.Job(payment{"o-1", 4200}))
	example.Check(err)

	example.Work(ctx, q, charge.Handle(func(ctx context.Context, l *onceq.Lease, pay payment) error {
		id, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (string, error) {
			return p.charge(key, pay.Amount)
		})
		if err != nil {
			fmt.Println("attempt", l.Attempt, "uncertain:", errors.Is(err, onceq.ErrUncertain))
			return err // the job runs again; an error marked with onceq.NotApplied would be certain
		}
		fmt.Println("attempt", l.Attempt, "charged as", id)

		if l.Attempt == 2 {
			return errors.New("the database of the shop is away") // every later run replays the stored outcome
		}
		stop()
		return l.SetResult(id)
	}))
	fmt.Println("calls:", p.calls, "charges:", len(p.charges))
}

// Output:
// attempt 1 uncertain: true
// attempt 2 charged as ch_1
// attempt 3 charged as ch_1
// calls: 2 charges: 1
