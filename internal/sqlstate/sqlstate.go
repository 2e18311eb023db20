// Package sqlstate reads the SQLSTATE of an error of Postgres, whatever driver it comes from.
package sqlstate

import "errors"

// Of is the code of an error of Postgres; "" for any other.
func Of(err error) string {
	if err == nil {
		return "" // what follows is an allocation
	}
	var pgErr interface{ SQLState() string }
	if !errors.As(err, &pgErr) {
		return ""
	}
	return pgErr.SQLState()
}

// Retryable reports whether Postgres asks for the whole transaction to be run again: a serialization failure (40001) or a
// deadlock (40P01).
func Retryable(err error) bool {
	state := Of(err)
	return state == "40001" || state == "40P01"
}

// NoTables reports whether Postgres says that a table or its schema does not exist.
func NoTables(err error) bool {
	state := Of(err)
	return state == "42P01" || state == "3F000"
}

// LeaseLost reports whether a guard did not hold: it is the exception of onceq.lease_lost.
func LeaseLost(err error) bool { return Of(err) == "OQ001" }
