package queuetest

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/leaks"
	"github.com/onceq/onceq/internal/pgserver"
)

// Each test with a database fails if it leaves a goroutine behind.
func init() { leaks.On.Store(true) }

// Impatient shortens the wait at the end of a test that leaks a connection.
func (db *DB) Impatient() { db.returnTimeout = time.Second }

// Tag returns the mark of the databases on the server that New uses.
func Tag(t *testing.T) string {
	t.Helper()
	s, err := processServer()
	require.NoError(t, err)
	return s.tag
}

// URL is the maintenance database of the server that New uses.
func URL(t *testing.T) string {
	t.Helper()
	s, err := processServer()
	require.NoError(t, err)
	return s.URL()
}

// DropStale does to the server of connString what the first New of a process does to ONCEQ_TEST_DATABASE_URL.
func DropStale(t *testing.T, connString string) {
	t.Helper()
	t.Setenv(pgserver.EnvURL, connString)
	found, err := pgserver.Start(context.Background(), pgserver.Options{})
	require.NoError(t, err)
	require.False(t, found.Ours())
	_, err = newServer(context.Background(), found)
	require.NoError(t, err)
}

// Admin is how a process works on a server: the tag of its sessions, and what runs SQL in one of them.
func Admin(t *testing.T, found *pgserver.Server) (tag string, admin func(context.Context, func(*pgx.Conn) error) error) {
	t.Helper()
	s, err := newServer(context.Background(), found)
	require.NoError(t, err)
	return s.tag, s.admin
}

// Emptied are the tables that Empty empties whole.
func Emptied() []string { return slices.Clone(emptied) }
