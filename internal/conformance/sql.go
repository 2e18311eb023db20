package conformance

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/onceqsql"
	"github.com/onceq/onceq/queuetest"
)

// RunSQL runs every test on the handles of a database/sql driver, with a *sql.DB outside a transaction.
func RunSQL(t *testing.T, open func(*testing.T, *queuetest.DB) *sql.DB, opts ...queuetest.Option) {
	Run(t, func(t *testing.T, db *queuetest.DB) Handles {
		pool := open(t, db)
		return Handles{DB: onceqsql.DB(pool), Begin: beginSQL(pool)}
	}, opts...)
}

// RunSQLConn is RunSQL with a *sql.Conn.
func RunSQLConn(t *testing.T, open func(*testing.T, *queuetest.DB) *sql.DB) {
	Run(t, func(t *testing.T, db *queuetest.DB) Handles {
		pool := open(t, db)
		return Handles{DB: onceqsql.Conn(connect(t, pool)), Begin: beginSQL(pool)}
	})
	t.Run("connWithATransactionBegunByHand", func(t *testing.T) {
		t.Parallel()
		db := queuetest.New(t)
		ctx, conn := t.Context(), connect(t, open(t, db))
		_, err := conn.ExecContext(ctx, `begin`)
		require.NoError(t, err)
		_, err = db.Queue.Enqueue(ctx, onceqsql.Conn(conn), onceq.Job{Kind: "k"}) // one statement, in the transaction if one is open
		require.NoError(t, err)
		_, err = db.Queue.EnqueueMany(ctx, onceqsql.Conn(conn), []onceq.Job{{Kind: "k", Key: "a"}})
		require.NoError(t, err)
		_, err = onceqops.New(db.Queue).List(ctx, onceqsql.Conn(conn), onceqops.Filter{})
		require.NoError(t, err)
		f, err := db.Queue.Fence(onceq.FenceSpec{Key: "fence"})
		require.NoError(t, err)
		_, err = f.Claim(ctx, onceqsql.Conn(conn))
		require.NoError(t, err)
		_, err = conn.ExecContext(ctx, `rollback`) // the caller can still end it
		require.NoError(t, err)
		jobs := func() (n int) {
			require.NoError(t, db.Pool.QueryRow(ctx, `select count(*) from onceq.jobs`).Scan(&n))
			return n
		}
		require.Zero(t, jobs())
		_, err = f.Claim(ctx, nil)
		require.NoError(t, err)
		_, err = db.Queue.EnqueueMany(ctx, onceqsql.Conn(conn), []onceq.Job{{Kind: "k", Key: "a"}})
		require.NoError(t, err)
		require.Equal(t, 1, jobs())
	})
}

func connect(t *testing.T, pool *sql.DB) *sql.Conn {
	t.Helper()
	conn, err := pool.Conn(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return conn
}

func beginSQL(pool *sql.DB) func(context.Context, pgx.TxIsoLevel) (Tx, error) {
	levels := map[pgx.TxIsoLevel]sql.IsolationLevel{
		pgx.ReadCommitted: sql.LevelReadCommitted, pgx.RepeatableRead: sql.LevelRepeatableRead, pgx.Serializable: sql.LevelSerializable,
	}
	return func(ctx context.Context, level pgx.TxIsoLevel) (Tx, error) {
		tx, err := pool.BeginTx(ctx, &sql.TxOptions{Isolation: levels[level]})
		if err != nil {
			return Tx{}, err
		}
		return Tx{
			DB:       onceqsql.Tx(tx),
			Commit:   func(context.Context) error { return tx.Commit() },
			Rollback: func(context.Context) error { return tx.Rollback() },
		}, nil
	}
}
