// Package moving is the code of the pages docs/move, which a test compares with it word for word.
package moving
