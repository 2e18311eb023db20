package orm_test

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

// The program prints the text after "// Output:" at its end. The page about database/sql shows parts of it word for word.
func TestOnlySQL(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("onlysql/main.go")
	require.NoError(t, err)
	program, want, ok := strings.Cut(string(source), "\n// Output:\n")
	require.True(t, ok)
	bin := filepath.Join(t.TempDir(), "onlysql")
	out, err := exec.Command("go", "build", "-o", bin, "./onlysql").CombinedOutput()
	require.NoError(t, err, "%s", out)
	cmd := exec.Command(bin)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+queuetest.New(t, queuetest.NoMigrations()).URL)
	var log strings.Builder
	cmd.Stderr = &log
	got, err := cmd.Output()
	require.NoError(t, err, "%s\n%s", got, &log)
	want = regexp.MustCompile(`(?m)^// ?`).ReplaceAllString(want, "")
	require.Equal(t, strings.TrimSpace(want), strings.TrimSpace(string(got)))

	page, err := os.ReadFile("../../docs/use/database-sql.md")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)<!-- examples/orm/onlysql/main.go -->\n```go\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	require.Len(t, blocks, strings.Count(string(page), "```go"), "every block of the page says that it is from the program")
	for _, block := range blocks {
		require.Contains(t, program, strings.TrimSpace(block[1]))
	}
}
