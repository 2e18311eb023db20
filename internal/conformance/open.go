package conformance

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// The suites run in every mode in which the library may be used (scripts/matrix.sh). A test's pool is the
// application's, with its rights and no others. Owner has the rights of whoever set the database up.

// Owner returns a pool for what the application's role may not do, or cannot do by the name that a test uses. Its role
// may do everything, it bypasses any pooler, and it finds the queue's tables, sequence and functions without their
// schema.
func Owner(t testing.TB, db *queuetest.DB) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(db.URL)
	require.NoError(t, err)
	config.ConnConfig.RuntimeParams["search_path"] = "public, " + pgx.Identifier{db.Schema}.Sanitize()
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// handover is what another process needs in order to open a test's queue as the test does.
type handover struct {
	URL, Schema, Host, User string
	Port                    uint16
	Mode                    pgx.QueryExecMode
}

// HandOver returns the value of an environment variable with which TakeOver opens the queue in another process.
func HandOver(t testing.TB, db *queuetest.DB) string {
	t.Helper()
	c := db.Pool.Config().ConnConfig
	raw, err := json.Marshal(handover{db.URL, db.Schema, c.Host, c.User, c.Port, c.DefaultQueryExecMode})
	require.NoError(t, err)
	return string(raw)
}

// TakeOver opens the queue of another process's test.
func TakeOver(t testing.TB, raw string) (*pgxpool.Pool, *onceq.Queue) {
	t.Helper()
	var h handover
	require.NoError(t, json.Unmarshal([]byte(raw), &h))
	config, err := pgxpool.ParseConfig(h.URL)
	require.NoError(t, err)
	c := config.ConnConfig
	c.Host, c.User, c.Port, c.DefaultQueryExecMode = h.Host, h.User, h.Port, h.Mode
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	require.NoError(t, err)
	q, err := onceq.New(pool, &onceq.Config{Schema: h.Schema})
	require.NoError(t, err)
	return pool, q
}
