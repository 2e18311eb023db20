// Package calls counts the requests of each run of an effect that may have reached a server. onceq puts the counter
// into the context that it gives the effect's function, and the HTTP client in onceqhttp counts.
package calls

import (
	"context"
	"sync/atomic"
)

type key struct{}

// With returns a context with a new counter.
func With(ctx context.Context) context.Context {
	return context.WithValue(ctx, key{}, new(atomic.Int64))
}

// From returns the innermost counter, or nil.
func From(ctx context.Context) *atomic.Int64 {
	n, _ := ctx.Value(key{}).(*atomic.Int64)
	return n
}
