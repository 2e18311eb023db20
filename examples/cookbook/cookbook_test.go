package cookbook

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/examples/internal/programs"
)

// Each recipe is a program of its own.
func TestPrograms(t *testing.T) {
	t.Parallel()
	require.Len(t, programs.Test(t), 22)
}
