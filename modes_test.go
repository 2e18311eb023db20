package onceq_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/queuetest"
)

// The suite runs in every way in which the library may be used (scripts/matrix.sh): db.Pool is the application's, with
// what it may do and nothing more; owner is who set it up.
var owner = conformance.Owner

// handover is what another process needs to open the test's queue as the test does.
type handover struct {
	URL, Schema, Host, User string
	Port                    uint16
	Mode                    pgx.QueryExecMode
}

func handOver(t testing.TB, db *queuetest.DB) string {
	t.Helper()
	c := db.Pool.Config().ConnConfig
	raw, err := json.Marshal(handover{db.URL, db.Schema, c.Host, c.User, c.Port, c.DefaultQueryExecMode})
	require.NoError(t, err)
	return string(raw)
}

func takeOver(t testing.TB, raw string) (*pgxpool.Pool, *onceq.Queue) {
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
