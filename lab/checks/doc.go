// Package checks holds the tests of onceq that need more than an example to be convincing: recorded histories
// that a linearizability checker goes over, random walks against a model, and every forced interleaving of two
// operations. It is in a module of its own, lab, so that what it needs stays out of the go.sum of those who import onceq.
package checks
