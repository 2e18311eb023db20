package patterns

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// Each pattern is a program of its own. It must print what stands behind "// Output:" at its end.
func TestPrograms(t *testing.T) {
	t.Parallel()
	programs, err := filepath.Glob("*/main.go")
	require.NoError(t, err)
	require.Len(t, programs, 10)
	bin := t.TempDir()
	out, err := exec.Command("go", "build", "-ldflags=-s -w", "-o", bin+"/", "./...").CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, program := range programs {
		source, err := os.ReadFile(program)
		require.NoError(t, err)
		_, want, ok := strings.Cut(string(source), "\n// Output:\n")
		require.True(t, ok, "%s says nothing about its output", program)
		name := filepath.Dir(program)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(filepath.Join(bin, name))
			cmd.Env = append(os.Environ(), "DATABASE_URL="+queuetest.New(t, queuetest.NoMigrations()).URL)
			var log strings.Builder
			cmd.Stderr = &log
			got, err := cmd.Output()
			require.NoError(t, err, "%s\n%s", got, &log)
			want := regexp.MustCompile(`(?m)^// ?`).ReplaceAllString(want, "")
			require.Equal(t, strings.TrimSpace(want), strings.TrimSpace(string(got)))
		})
	}
}
