package onceqweb_test

import "github.com/onceq/onceq/internal/leaks"

// Each test with a database fails if it leaves a goroutine behind.
func init() { leaks.On.Store(true) }
