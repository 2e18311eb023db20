// Package sql shows services in other languages beside one in Go: node/orders.mjs and python/orders.py enqueue jobs by the functions of
// the schema (docs/use/sql.md), with the keys that Go has, and the handlers are here.
package sql

import (
	"fmt"

	"github.com/onceq/onceq"
)

// Order is what the jobs carry.
type Order struct {
	Order  int `json:"order"`
	Amount int `json:"amount"`
}

// Charge is the kind that all three languages enqueue.
var Charge = onceq.Kind[Order]{
	Name: "charge",
	Key:  func(o Order) string { return fmt.Sprintf("order %d", o.Order) },
}
