package orm_test

import (
	"database/sql"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/lib/pq"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqsql"
	"github.com/onceq/onceq/queuetest"
)

func openPQ(t *testing.T, db *queuetest.DB) *sql.DB { return openPQWith(t, db, "no") }

func openPQWith(t *testing.T, db *queuetest.DB, binary string) *sql.DB {
	t.Helper()
	u, err := url.Parse(db.URL)
	require.NoError(t, err)
	query := u.Query()
	query.Set("binary_parameters", binary)
	u.RawQuery = query.Encode()
	pool, err := sql.Open("postgres", u.String())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
	return pool
}

// These are onceqsql's own tests for pgx's stdlib driver, run with lib/pq. They are here because onceq's module does not
// depend on lib/pq.
func TestConformanceOfPQ(t *testing.T) {
	t.Parallel()
	t.Run("text", func(t *testing.T) {
		t.Parallel()
		conformance.RunSQL(t, openPQ)
	})
	t.Run("binary_parameters", func(t *testing.T) {
		t.Parallel()
		conformance.RunSQL(t, func(t *testing.T, db *queuetest.DB) *sql.DB { return openPQWith(t, db, "yes") })
	})
	t.Run("connection", func(t *testing.T) {
		t.Parallel()
		conformance.RunSQLConn(t, openPQ)
	})
}

func TestErrorsOfPQAreBothDrivers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	handle := onceqsql.DB(openPQ(t, db))
	_, err := handle.Exec(t.Context(), `create table users (email text constraint one_each unique)`)
	require.NoError(t, err)
	const insert = `insert into users values ($1)`
	_, err = handle.Exec(t.Context(), insert, "ada@example.com")
	require.NoError(t, err)
	_, err = handle.Exec(t.Context(), insert, "ada@example.com")
	var theirs *pq.Error
	require.ErrorAs(t, err, &theirs)
	var ours *pgconn.PgError
	require.ErrorAs(t, err, &ours)
	require.Equal(t, []string{"23505", "one_each", "users", "public", theirs.Message, theirs.Detail},
		[]string{ours.Code, ours.ConstraintName, ours.TableName, ours.SchemaName, ours.Message, ours.Detail})
	require.Equal(t, theirs.Error(), err.Error())
}
