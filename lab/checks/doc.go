// Package checks tests onceq where examples are not convincing enough: recorded histories for a linearizability
// checker, random walks against a model, and every forced interleaving of two operations. It is in a module of its own,
// so that its dependencies stay out of the go.sum of onceq's users.
package checks
