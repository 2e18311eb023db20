// Package pairs tries every public call of onceq and onceqops beside an open transaction with every other one, and holds
// docs/work/locks.md, which says who waits for whom.
package pairs
