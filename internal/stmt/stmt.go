// Package stmt has the statements that the root sends, each whole, with what it does and what its arguments
// and its answer are. When it is sent, and what follows from the answer, the root says in the file of the
// same name. It imports table.
package stmt
