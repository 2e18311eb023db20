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
	text, err := os.ReadFile("../../docs/run/operations.md")
	require.NoError(t, err)
	commands := regexp.MustCompile(`(?m)^(?:    |\$ )onceq (.*)$`).FindAllStringSubmatch(string(text), -1)
	require.Greater(t, len(commands), 20)
	for _, c := range commands {
		line, _, _ := strings.Cut(c[1], "  #")
		line, _, _ = strings.Cut(line, " | ")
		if strings.HasPrefix(line, "top") || strings.HasPrefix(line, "ui") || strings.HasPrefix(line, "mcp") || strings.HasPrefix(line, "jobs watch") || strings.HasPrefix(line, "migrate") || strings.HasPrefix(line, "completion") {
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

// What the page says about old transactions finds one that has written and idles at READ COMMITTED, which has no snapshot.
func TestOperationsPage_FindsAnOldTransaction(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	text, err := os.ReadFile("../../docs/run/operations.md")
	require.NoError(t, err)
	statement := regexp.MustCompile("(?s)```sql\n([^`]* as open_for\n.*?)```").FindStringSubmatch(string(text))
	require.NotNil(t, statement)
	tx, err := db.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	var pid uint32
	require.NoError(t, tx.QueryRow(t.Context(), `select pg_backend_pid(), pg_current_xact_id()`).Scan(&pid, nil))
	rows, err := db.Pool.Query(t.Context(), strings.Replace(statement[1], "limit 5", "", 1)) // other tests have sessions, too
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (any, error) {
		values, err := row.Values()
		return values[0], err
	})
	require.NoError(t, err)
	require.Contains(t, found, int32(pid)) // #nosec G115 -- a process's id
}

// split splits a line as a shell would, as far as the page needs it.
func split(line string) (args []string) {
	for _, m := range regexp.MustCompile(`'([^']*)'|"([^"]*)"|(\S+)`).FindAllStringSubmatch(line, -1) {
		args = append(args, m[1]+m[2]+m[3])
	}
	return args
}
