package main

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// Somebody holds the locks that a migration and a Reaper need. Neither waits for ever, and nobody waits behind them.
func TestLocksOfOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema(), queuetest.NoMigrations())
	fine(t, db.URL, "migrate", "up")
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), `lock table onceq.schema_version, onceq.job_cancels`)
	require.NoError(t, err)
	pid := tx.Conn().PgConn().PID()

	a := do(t, db.URL, "migrate", "up")
	require.Equal(t, codeFailed, a.code, a.err)
	require.Contains(t, a.err, "A lock was not free within 5s")
	require.Contains(t, a.err, fmt.Sprintf("Locks are held by session %d (", pid))
	a = do(t, db.URL, "reap", "--timeout", "20s")
	require.Equal(t, codeFailed, a.code, a.err)
	require.Contains(t, a.out, "Removed 0 keys")
	require.Contains(t, a.err, "A statement took longer than --timeout 20s")

	require.NoError(t, tx.Rollback(t.Context()))
	fine(t, db.URL, "migrate", "up")
	fine(t, db.URL, "reap")
}
