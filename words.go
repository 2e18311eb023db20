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

// andOthers goes on after those that stand before a job with how many others do.
func andOthers(n int) string {
	if n == 0 {
		return ""
	}
	return ", and " + atLeast(n, "other", "others")
}

func either(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}
