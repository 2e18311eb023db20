// Package tests is what looks at package onceq from outside, on a real Postgres. The tests of a file of onceq are in the
// file of its name here: enqueue_test.go has those of enqueue.go. The other files are scenarios: traps that were found by
// trying, processes, roles, clocks, PgBouncer, the patterns of docs/patterns.md. Beside the code itself are the examples,
// and the few tests that need what it does not export: inside_test.go.
//
// All of it is one package, because each package starts a server of its own.
package tests

import "github.com/onceq/onceq/internal/leaks"

// Each test that has a database fails when it leaves a goroutine.
func init() { leaks.On.Store(true) }
