// Intent records a piece of work before it is done, so that nobody else begins it. The record does not mean that the work
// is done: if a process dies between the two, another one takes the work over under the same key. If the provider has
// forgotten that key by then, a person decides.
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	// dies claims the work, like a process that is killed before it makes the call. It returns the key of that call.
	dies := func(spec onceq.FenceSpec) string {
		fence, err := q.Fence(spec)
		example.Check(err)
		claim, err := fence.Claim(ctx, pool) // commits the claim
		example.Check(err)
		return claim.IdempotencyKey()
	}
	// try does the work as soon as nobody else is doing it.
	try := func(spec onceq.FenceSpec) (string, error) {
		for {
			key, err := onceq.Do(ctx, q, spec, func(_ context.Context, c *onceq.FenceLease) (string, error) {
				return c.IdempotencyKey(), nil // here the provider would be called
			})
			var busy *onceq.InFlightError
			if !errors.As(err, &busy) {
				return key, err
			}
			time.Sleep(busy.RetryAfter)
		}
	}

	invoice := onceq.FenceSpec{Scope: "invoices", Key: "order:7", Lease: 100 * time.Millisecond}
	intended := dies(invoice)
	for range 2 {
		sent, err := try(invoice)
		example.Check(err)
		fmt.Println("sent under the key that was intended:", sent == intended)
	}

	// This provider remembers keys only for a moment.
	letter := onceq.FenceSpec{Scope: "letters", Key: "order:7", Lease: 100 * time.Millisecond, Policy: onceq.RunAgain(time.Millisecond)}
	dies(letter)
	_, err := try(letter)
	fmt.Println("held:", errors.Is(err, onceq.ErrHeld))
	fence, err := q.Fence(letter)
	example.Check(err)
	example.Check(fence.Resolve(ctx, pool, onceq.NeverApplied())) // somebody has looked
	_, err = try(letter)
	fmt.Println("error after that:", err)
}

// Output:
// sent under the key that was intended: true
// sent under the key that was intended: true
// held: true
// error after that: <nil>
