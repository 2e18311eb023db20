package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/queuetest"
)

// Each command has two examples at least, and they do what they are for. Those that stay on the terminal, or need
// another queue to import from, are only read.
func TestExamples(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	_, err := db.Pool.Exec(t.Context(), `select setval('onceq.ids', 4710)`)
	require.NoError(t, err)
	kill(t, db, 1) // job 4711
	for _, name := range []string{"nightly-report", "hourly-import"} {
		s, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{})
		require.NoError(t, err)
		require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			return s.Put(t.Context(), tx, onceqcron.Schedule{Name: name, Spec: "0 3 * * *", Job: mails.Job(mail{7})})
		}))
	}
	fine(t, db.URL, "migrate", "up", "--schema", "tenant_7")
	stay := []string{"onceq top", "onceq ui", "onceq mcp", "onceq jobs watch"}
	run := 0
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, below := range c.Commands() {
			walk(below)
		}
		if c.HasSubCommands() || !c.Runnable() {
			return
		}
		lines := strings.Split(strings.TrimSuffix(c.Example, "\n"), "\n")
		require.GreaterOrEqual(t, len(lines), 2, c.CommandPath())
		for _, line := range lines {
			line, _, _ = strings.Cut(line, "  # ")
			line, _, _ = strings.Cut(line, " | ")
			line, _, _ = strings.Cut(line, " > ")
			args := split(strings.TrimSpace(line))[1:]
			found, rest, err := (&app{}).command().Find(args)
			require.NoError(t, err, line)
			require.Equal(t, c.CommandPath(), found.CommandPath(), line)
			require.NoError(t, found.ParseFlags(rest), line)
			require.NoError(t, found.ValidateArgs(found.Flags().Args()), line)
			if path := c.CommandPath(); slices.Contains(stay, path) || strings.HasPrefix(path, "onceq import ") {
				continue
			}
			if changing(c) {
				args = append(args, "--yes")
			}
			a := do(t, db.URL, args...)
			require.NotContains(t, []int{codeUsage, codeFailed, codeUnreachable, codeSchema}, a.code, "%s: %s", line, a.err)
			run++
		}
	}
	walk((&app{}).command())
	require.Greater(t, run, 80)
}
