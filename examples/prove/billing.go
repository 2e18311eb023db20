// Package prove shows how to prove a handler. queuetest.Prove lets its process die, freeze and lose its connections at
// every possible place, and checks that the customer is charged once. The handler is in billing.go, and the proof in
// billing_test.go.
package prove

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// Order is what the job carries.
type Order struct {
	ID    int `json:"id"`
	Cents int `json:"cents"`
}

// Charge charges an order, once.
var Charge = onceq.Kind[Order]{
	Name: "charge",
	Key:  func(o Order) string { return fmt.Sprintf("charge:%d", o.ID) },
}

// Handler charges the order at the payment provider and records the charge. A fence protects the call, so it has the same
// key however often it is made. The record commits with the job's completion.
func Handler(client *http.Client) onceq.Handler {
	return Charge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o Order) error {
		_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
			return true, charge(ctx, client, o, key)
		})
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `insert into charges (order_id, cents) values ($1, $2)`, o.ID, o.Cents)
		return err
	})
}

func charge(ctx context.Context, client *http.Client, o Order, key string) error {
	form := url.Values{"amount": {strconv.Itoa(o.Cents)}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://api.pay.example/v1/charges", strings.NewReader(form.Encode()))
	if err != nil {
		return onceq.NotApplied(err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode >= 300 {
		return fmt.Errorf("charge: %s", res.Status)
	}
	return nil
}
