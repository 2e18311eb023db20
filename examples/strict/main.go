// Strict tells a real duplicate from a new submission, and both from other work that uses the same key.
package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type order struct {
	ID     string `json:"id"`
	Amount int    `json:"amount"`
}

var ship = onceq.Kind[order]{Name: "ship"}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	enqueue := func(o order) {
		job := ship.Job(o)
		job.Key = "ship:" + o.ID // the caller's own key would do as well
		job.Strict = true
		_, err := q.EnqueueUnique(ctx, pool, job)
		var duplicate *onceq.DuplicateError
		switch {
		case err == nil:
			fmt.Println("accepted")
		case errors.As(err, &duplicate):
			fmt.Println("409: already", duplicate.Existing.State)
		case errors.Is(err, onceq.ErrMismatch):
			fmt.Println("409: another order has this key")
		default:
			fmt.Println("400:", err)
		}
	}
	enqueue(order{"o-1", 10})
	enqueue(order{"o-1", 10})
	enqueue(order{"o-1", 99})

	job := ship.Job(order{"o-2", 10})
	job.Key = "  "
	_, err := q.EnqueueUnique(ctx, pool, job)
	fmt.Println("400:", err)
}

// Output:
// accepted
// 409: already waiting
// 409: another order has this key
// 400: onceq: Key is only white space
