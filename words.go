package onceq

import "fmt"

// numbered is a number with its words, for texts that people read.
func numbered(n int, one, many string) string { return fmt.Sprint(n, " ", either(n, one, many)) }

// atLeast is numbered for a count that stops at StatsCap.
func atLeast(n int, one, many string) string {
	if n >= StatsCap {
		return fmt.Sprintf("%d or more %s", n, many)
	}
	return numbered(n, one, many)
}

func either(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}
