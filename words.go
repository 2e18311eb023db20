package onceq

import "fmt"

// numbered is a number with its words, for texts that people read.
func numbered(n int, one, many string) string { return fmt.Sprint(n, " ", either(n, one, many)) }

func either(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}
