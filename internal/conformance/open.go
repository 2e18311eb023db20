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

// The suites run in every way in which the library may be used (scripts/matrix.sh): a test's pool is the application's,
// with what that may do and nothing more. Owner is who set it up.

// Owner gives a pool for what the runtime may not do, or not by the name that a test has for it: as the role that may do
// everything, past any pooler, and with the queue's tables, their sequence and functions found without their schema.
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

// handover is what another process needs to open a test's queue as the test does.
type handover struct {
	URL, Schema, Host, User string
	Port                    uint16
	Mode                    pgx.QueryExecMode
}

// HandOver gives another process, by an environment variable, what TakeOver wants.
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
