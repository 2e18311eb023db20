// Package calls counts, for each run of an effect, the requests that may have reached somebody: onceq begins the count in the
// context that it gives the effect's function, and the HTTP client in onceqhttp keeps it.
package calls

import (
	"context"
	"sync/atomic"
)

type key struct{}

// With begins a count of its own.
func With(ctx context.Context) context.Context {
	return context.WithValue(ctx, key{}, new(atomic.Int64))
}

// From gives the innermost count, or nil.
func From(ctx context.Context) *atomic.Int64 {
	n, _ := ctx.Value(key{}).(*atomic.Int64)
	return n
}
