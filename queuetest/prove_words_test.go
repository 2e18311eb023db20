package queuetest

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// Prove knows statements by their texts, so a statement that says something else, or has become a function, is one that it no
// longer knows: it would take a promotion for a step of the handler's, or miss a completion.
func TestProve_KnowsTheStatementsThatThereAre(t *testing.T) {
	t.Parallel()
	all, err := os.ReadFile("../internal/tests/testdata/statements.sql")
	require.NoError(t, err)
	require.Greater(t, len(onceqs), 40)
	for _, o := range onceqs {
		require.Contains(t, string(all), o.part, "no statement of onceq contains what %q is known by", o.words)
	}
}
