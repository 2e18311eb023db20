// Result runs work under a key outside any job. Everybody who asks again gets the first answer, which the fence has stored.
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type report struct {
	URL string `json:"url"`
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	renders := 0
	render := func(payload string, fn func(context.Context, *onceq.FenceLease) (report, error)) {
		r, err := onceq.Do(ctx, q, onceq.FenceSpec{
			Scope: "reports", Key: "2026-05", Payload: payload, Window: 24 * time.Hour,
		}, fn)
		var inFlight *onceq.InFlightError
		switch {
		case err == nil:
			fmt.Println(r.URL)
		case errors.As(err, &inFlight):
			fmt.Println("in progress, ask again in a moment:", inFlight.RetryAfter > 0)
		case errors.Is(err, onceq.ErrMismatch):
			fmt.Println("that key is taken by another report")
		default:
			fmt.Println(err)
		}
	}
	work := func(ctx context.Context, c *onceq.FenceLease) (report, error) {
		renders++
		return report{"https://files.example.com/2026-05.pdf"}, nil
	}
	failing := func(context.Context, *onceq.FenceLease) (report, error) {
		return report{}, onceq.NotApplied(errors.New("no disk space: nothing was written"))
	}
	asking := func(ctx context.Context, c *onceq.FenceLease) (report, error) {
		render("all regions", work) // somebody else asks in the meantime
		return work(ctx, c)
	}
	render("all regions", failing) // the key is released: the next caller may try
	render("all regions", asking)
	render("all regions", work) // the stored answer
	render("eu-west", work)
	fmt.Println("rendered:", renders)
}

// Output:
// no disk space: nothing was written
// in progress, ask again in a moment: true
// https://files.example.com/2026-05.pdf
// https://files.example.com/2026-05.pdf
// that key is taken by another report
// rendered: 1
