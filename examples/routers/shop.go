// Package routers has one small shop for two routers. Its orders are rows of the database, in one transaction with their
// answers. Its charges and refunds are a provider's, outside the transaction. The packages below serve it with echo
// and gin.
package routers

import (
	"context"
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"
)

// Order is what a client sends to /orders, and gets back.
type Order struct {
	ID     int `json:"id"`
	Amount int `json:"amount"`
}

// Charge is what a client gets from /orders/{id}/charges.
type Charge struct {
	ID string `json:"id"`
}

// Shop is what the handlers do.
type Shop struct {
	Place  func(ctx context.Context, tx pgx.Tx, order *Order) error
	Charge func(ctx context.Context, order string) (Charge, error)
	Refund func(ctx context.Context, order string) error
}

// ErrNoOrder is answered with 404.
var ErrNoOrder = errors.New("no such order")

// User names who is asking. A real service gets it from its authentication.
func User(r *http.Request) (string, error) {
	user, _, ok := r.BasicAuth()
	if !ok {
		return "", errors.New("nobody has logged in")
	}
	return user, nil
}
