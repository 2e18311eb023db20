// Package moving is the code of the pages docs/moving-from-….md, which a test compares with it word for word.
package moving
