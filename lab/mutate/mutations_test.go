package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every mutation can be made in the code as it is, and changes it.
func TestMutations_FitTheCode(t *testing.T) {
	all, err := read("mutations.txt")
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(all), 60)
	names := make(map[string]bool)
	for _, m := range all {
		require.False(t, names[m.name], "two mutations are called %q", m.name)
		names[m.name] = true
		text, err := os.ReadFile(filepath.Join("../..", m.file))
		require.NoError(t, err, m.name)
		mutated, err := m.apply(text)
		require.NoError(t, err, m.name)
		require.NotEqual(t, string(text), string(mutated), m.name)
	}
}
