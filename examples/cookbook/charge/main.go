// Charge charges a card once through a provider that takes no idempotency key. The provider keeps a list of charges by the
// merchant's own reference. When nobody knows whether a charge was made, it is asked.
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type order struct {
	ID    int `json:"id"`
	Cents int `json:"cents"`
}

var charge = onceq.Kind[order]{
	Name:    "charge",
	Key:     func(o order) string { return fmt.Sprintf("charge:%d", o.ID) },
	Backoff: func(attempt int, err error) time.Duration { return 0 },
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, `create table receipts (order_id int primary key, receipt text not null)`)
	defer pool.Close()
	p := &provider{charges: make(map[string]string)}

	_, err := q.Enqueue(ctx, pool, charge.Job(order{ID: 7, Cents: 4200}))
	example.Check(err)
	example.Work(ctx, q, charge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o order) error {
		reference := fmt.Sprintf("order-%d", o.ID)
		ask := func(ctx context.Context, key string) (result any, applied bool, err error) {
			receipt, found := p.charges[reference]
			fmt.Println("asked for", reference+", found:", found)
			return receipt, found, nil
		}
		receipt, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (string, error) {
			fmt.Println("charging", reference)
			return p.charge(reference, o.Cents)
		},
			onceq.OnUncertain(onceq.Ask(ask)),         // if nobody could be asked: onceq.Hold()
			onceq.EffectTimeout(100*time.Millisecond)) // Ask waits until ten seconds after this, because the call may still be under way
		if err != nil {
			return err // the job runs again; no transaction has begun yet
		}
		defer stop()
		// This commits together with the job's completion.
		_, err = tx.Exec(ctx, `insert into receipts values ($1, $2)`, o.ID, receipt)
		return err
	}))
	var receipt string
	example.Check(pool.QueryRow(context.Background(), `select receipt from receipts where order_id = 7`).Scan(&receipt))
	fmt.Println("receipt:", receipt, "charges:", p.calls)
}

// provider stands for the payment provider. It makes the charge, and its answer gets lost.
type provider struct {
	charges map[string]string // receipts by reference
	calls   int
}

func (p *provider) charge(reference string, _ int) (string, error) {
	p.calls++
	p.charges[reference] = fmt.Sprintf("r-%d", p.calls)
	return "", errors.New("time-out")
}

// Output:
// charging order-7
// asked for order-7, found: true
// receipt: r-1 charges: 1
