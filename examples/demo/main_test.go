//go:build unix

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A small run of the demonstration must show all faults, and every user must get one e-mail and one charge.
func TestDemo(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "demo")
	out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput()
	require.NoError(t, err, string(out))

	demo := exec.Command(binary, "-signups", "60", "-seed", "7", "-duration", "15m")
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "DATABASE_URL=") {
			demo.Env = append(demo.Env, variable)
		}
	}
	out, err = demo.CombinedOutput()
	require.NoError(t, err, string(out))
	for _, line := range []string{
		`(?m)^  workers killed +[1-9]\d*, [1-9]\d* in the middle of an effect$`,
		`(?m)^  workers stopped, continued +[1-9]\d*, [1-9]\d* with a job taken over in the meantime$`,
		`(?m)^  duplicate jobs suppressed +[1-9]`,
		`(?m)^  redeliveries +\d+ claims of a job beyond its first: [1-9]\d* after a lost lease`,
		`(?m)^  stale completions refused +[1-9]`,
		`(?m)^  uncertain effects +[1-9]`,
		`(?m)^  e-mails per user +min 1, max 1$`,
		`(?m)^  charges per user +min 1, max 1$`,
		`(?m)^  receipts per user +min 1, max 1$`,
	} {
		require.Regexp(t, regexp.MustCompile(line), string(out))
	}
}
