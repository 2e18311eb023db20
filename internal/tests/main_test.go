// Package tests tests the packages onceq and onceqops from outside, on a real Postgres. The tests of a file are in the file of the
// same name here: enqueue_test.go has those of enqueue.go. The other files are scenarios: traps that were found by trying,
// processes, roles, clocks, PgBouncer, the patterns of docs/use/patterns.md. The examples, and the few tests that need
// unexported names (inside_test.go, unit_test.go), are beside the code itself.
//
// All of it is one package, because each package starts a server of its own.
package tests

import "github.com/onceq/onceq/internal/leaks"

// Each test that has a database fails if it leaves a goroutine behind.
func init() { leaks.On.Store(true) }
