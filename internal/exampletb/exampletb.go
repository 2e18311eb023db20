// Package exampletb lets an example on pkg.go.dev use queuetest, as a test does: an example gets no *testing.T.
package exampletb

import (
	"context"
	"log"
	"testing"
)

// TB is the part of testing.TB that queuetest needs. A failure panics, so that the example fails.
type TB struct {
	testing.TB
	cleanup []func()
}

// New returns a TB. The example calls its Done at the end.
func New() *TB { return &TB{} }

// Done runs the clean-ups, the latest first.
func (t *TB) Done() {
	for i := len(t.cleanup) - 1; i >= 0; i-- {
		t.cleanup[i]()
	}
}

// The following methods do what testing.TB says.

func (t *TB) Helper()                   {}
func (t *TB) Name() string              { return "example" }
func (t *TB) Context() context.Context  { return context.Background() }
func (t *TB) Cleanup(fn func())         { t.cleanup = append(t.cleanup, fn) }
func (t *TB) Failed() bool              { return false }
func (t *TB) Logf(f string, a ...any)   { log.Printf(f, a...) }
func (t *TB) Errorf(f string, a ...any) { log.Panicf(f, a...) }
func (t *TB) Fatalf(f string, a ...any) { log.Panicf(f, a...) }
func (t *TB) Skipf(f string, a ...any)  { log.Panicf(f, a...) }
func (t *TB) Error(a ...any)            { log.Panic(a...) }
func (t *TB) Fatal(a ...any)            { log.Panic(a...) }
func (t *TB) FailNow()                  { log.Panic("the example failed") }
