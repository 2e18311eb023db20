package onceqsql_test

import (
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqsql"
	"github.com/onceq/onceq/queuetest"
)

func openStdlib(t *testing.T, db *queuetest.DB) *sql.DB {
	t.Helper()
	pool := stdlib.OpenDB(*db.Pool.Config().ConnConfig)
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
	return pool
}

// This runs with pgx's stdlib driver in every query mode. examples/orm runs the same tests with lib/pq.
func TestConformance(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe,
		pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			if testing.Short() && mode != pgx.QueryExecModeCacheStatement {
				t.Skip("make check runs it: the same in another query mode")
			}
			conformance.RunSQL(t, openStdlib, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }))
		})
	}
	t.Run("connection", func(t *testing.T) {
		t.Parallel()
		if testing.Short() {
			t.Skip("make check runs it: the same on a connection")
		}
		conformance.RunSQLConn(t, openStdlib)
	})
}

func TestNothingToRunOnIsSaid(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for name, handle := range map[string]onceq.DB{
		"Tx": onceqsql.Tx(nil), "Tx of a nil": onceqsql.Tx((*sql.Tx)(nil)), "DB": onceqsql.DB(nil), "Conn": onceqsql.Conn(nil),
	} {
		var invalid *onceq.InvalidError
		_, err := db.Queue.Enqueue(t.Context(), handle, onceq.Job{Kind: "k"})
		require.ErrorAs(t, err, &invalid, name)
		_, err = db.Queue.EnqueueMany(t.Context(), handle, []onceq.Job{{Kind: "k"}})
		require.ErrorAs(t, err, &invalid, name)
		_, err = db.Queue.Cancel(t.Context(), handle, 1)
		require.ErrorAs(t, err, &invalid, name)
		fence, err := db.Queue.Fence(onceq.FenceSpec{Key: "k"})
		require.NoError(t, err)
		_, err = fence.Claim(t.Context(), handle) // not on the queue's own pool
		require.ErrorAs(t, err, &invalid, name)
	}
}

func TestADatabaseIsNoTransaction(t *testing.T) {
	t.Parallel()
	for _, no := range []any{(*sql.DB)(nil), (*sql.Conn)(nil)} {
		_, ok := no.(onceqsql.Transaction)
		require.False(t, ok, "%T", no)
	}
}

func TestAnArgumentOfNoTypeOfPostgresIsRefusedBeforeItIsSent(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	tx, err := openStdlib(t, db).BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback()) }()
	_, err = onceqsql.Tx(tx).Query(t.Context(), `select $1::text, $2::text`, "a", struct{}{})
	require.ErrorContains(t, err, "$2")
	_, err = onceqsql.Tx(tx).Exec(t.Context(), `select 1`)
	require.NoError(t, err)
}
