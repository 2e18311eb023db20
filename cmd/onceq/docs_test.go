package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// Every command of the page for people on call is one that there is, with flags that there are, and every statement runs and only
// reads.
func TestOperationsPage(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	text, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	commands := regexp.MustCompile(`(?m)^(?:    |\$ )onceq (.*)$`).FindAllStringSubmatch(string(text), -1)
	require.Greater(t, len(commands), 20)
	for _, c := range commands {
		line, _, _ := strings.Cut(c[1], "  #")
		line, _, _ = strings.Cut(line, " | ")
		if strings.HasPrefix(line, "top") || strings.HasPrefix(line, "ui") || strings.HasPrefix(line, "migrate") || strings.HasPrefix(line, "completion") {
			continue
		}
		args := split(line)
		if strings.Contains(line, "resolve") || strings.Contains(line, "groups cancel") || strings.Contains(line, "jobs cancel") || strings.Contains(line, "jobs discard") || strings.Contains(line, "jobs redrive") || strings.Contains(line, "jobs move") {
			args = append(args, "--dry-run")
		}
		a := do(t, db.URL, args...)
		require.NotContains(t, []int{codeUsage, codeFailed, codeUnreachable, codeSchema}, a.code, "%s: %s", line, a.err)
	}
	for _, b := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		require.NoError(t, pgx.BeginTxFunc(t.Context(), db.Pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), b[1])
			return err
		}), b[1])
	}
}

// split splits a line as a shell would, as far as the page needs it.
func split(line string) (args []string) {
	for _, m := range regexp.MustCompile(`'([^']*)'|"([^"]*)"|(\S+)`).FindAllStringSubmatch(line, -1) {
		args = append(args, m[1]+m[2]+m[3])
	}
	return args
}
