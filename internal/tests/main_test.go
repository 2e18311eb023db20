package tests

import "github.com/onceq/onceq/internal/leaks"

// Each test that has a database fails when it leaves a goroutine.
func init() { leaks.On.Store(true) }
