package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// The program prints the text after "// Output:" at its end.
func TestExample(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("main.go")
	require.NoError(t, err)
	_, want, _ := strings.Cut(string(source), "\n// Output:\n")
	bin := filepath.Join(t.TempDir(), "example")
	out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	cmd := exec.Command(bin)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+queuetest.New(t, queuetest.NoMigrations()).URL)
	var log strings.Builder
	cmd.Stderr = &log
	got, err := cmd.Output()
	require.NoError(t, err, "%s\n%s", got, &log)
	require.Equal(t, strings.ReplaceAll("\n"+want, "\n// ", "\n"), "\n"+string(got))
}
