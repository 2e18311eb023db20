package onceqsql_test

import (
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqsql"
	"github.com/onceq/onceq/queuetest"
)

func openStdlib(t *testing.T, db *queuetest.DB, mode pgx.QueryExecMode) *sql.DB {
	t.Helper()
	config, err := pgx.ParseConfig(db.URL)
	require.NoError(t, err)
	config.DefaultQueryExecMode = mode
	pool := stdlib.OpenDB(*config)
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
	return pool
}

// pgx's stdlib driver in every query mode. examples/orm has the same for lib/pq.
func TestConformance(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe,
		pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			conformance.Run(t, func(t *testing.T, db *queuetest.DB) conformance.Handles {
				pool := openStdlib(t, db, mode)
				return conformance.SQL(pool, onceqsql.DB(pool))
			})
		})
	}
	t.Run("connection", func(t *testing.T) {
		t.Parallel()
		conformance.Run(t, func(t *testing.T, db *queuetest.DB) conformance.Handles {
			pool := openStdlib(t, db, pgx.QueryExecModeCacheStatement)
			conn, err := pool.Conn(t.Context())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, conn.Close()) })
			return conformance.SQL(pool, onceqsql.Conn(conn))
		})
	})
}
