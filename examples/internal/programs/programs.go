// Package programs runs the example programs in tests.
package programs

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

// Test builds and runs the programs of the test's folder, "<name>/main.go", each on its own empty database. A program
// must print the text after "// Output:" at its end; programs without one are left out. Test returns the names of the
// programs that it runs.
func Test(t *testing.T) (names []string) {
	t.Helper()
	files, err := filepath.Glob("*/main.go")
	require.NoError(t, err)
	outputs := map[string]string{}
	bin := t.TempDir()
	build := []string{"build", "-ldflags=-s -w", "-o", bin + "/"}
	for _, file := range files {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		if _, output, ok := strings.Cut(string(source), "\n// Output:\n"); ok {
			name := filepath.Dir(file)
			outputs[name] = regexp.MustCompile(`(?m)^// ?`).ReplaceAllString(output, "")
			names, build = append(names, name), append(build, "./"+name)
		}
	}
	out, err := exec.Command("go", build...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(filepath.Join(bin, name))
			cmd.Env = append(os.Environ(), "DATABASE_URL="+queuetest.New(t, queuetest.NoMigrations()).URL)
			var log strings.Builder
			cmd.Stderr = &log
			got, err := cmd.Output()
			require.NoError(t, err, "%s\n%s", got, &log)
			require.Equal(t, strings.TrimSpace(outputs[name]), strings.TrimSpace(string(got)))
		})
	}
	return names
}
