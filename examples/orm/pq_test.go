package orm_test

import (
	"database/sql"
	"net/url"
	"testing"

	_ "github.com/lib/pq"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqsql"
	"github.com/onceq/onceq/queuetest"
)

func openPQ(t *testing.T, db *queuetest.DB, params ...string) *sql.DB {
	t.Helper()
	u, err := url.Parse(db.URL)
	require.NoError(t, err)
	query := u.Query()
	for i := 0; i < len(params); i += 2 {
		query.Set(params[i], params[i+1])
	}
	u.RawQuery = query.Encode()
	pool, err := sql.Open("postgres", u.String())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
	return pool
}

func TestConformanceOfPQ(t *testing.T) {
	t.Parallel()
	for name, params := range map[string][]string{"text": nil, "binary": {"binary_parameters", "yes"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Run(t, func(t *testing.T, db *queuetest.DB) conformance.Handles {
				pool := openPQ(t, db, params...)
				return conformance.SQL(pool, onceqsql.DB(pool))
			})
		})
	}
	t.Run("connection", func(t *testing.T) {
		t.Parallel()
		conformance.Run(t, func(t *testing.T, db *queuetest.DB) conformance.Handles {
			pool := openPQ(t, db)
			conn, err := pool.Conn(t.Context())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, conn.Close()) })
			return conformance.SQL(pool, onceqsql.Conn(conn))
		})
	})
}
