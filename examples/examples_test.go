package examples

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/examples/internal/programs"
)

// Each example is a program of its own.
func TestPrograms(t *testing.T) {
	t.Parallel()
	require.ElementsMatch(t, []string{"batch", "effect", "first", "http", "result", "strict", "tenants", "transaction"}, programs.Test(t))
}

// The first program of the README is examples/first, word for word.
func TestFirstProgramOfTheReadme(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	source, err := os.ReadFile("first/main.go")
	require.NoError(t, err)
	program, _, _ := strings.Cut(string(source), "\n// Output:\n")
	block := regexp.MustCompile("(?s)```go\n(package main.*?)```").FindSubmatch(readme)
	require.NotNil(t, block, "the README has no program")
	require.Equal(t, strings.TrimSpace(program), strings.TrimSpace(string(block[1])))
}
