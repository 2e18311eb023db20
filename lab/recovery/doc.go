// Package recovery sets a database back, copies it while it is used, and moves it to another server, and holds what
// docs/run/growing.md says of each: nothing else may happen to a queue.
package recovery
