package conformance

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqsql"
)

// SQL gives the handles of a driver of database/sql, with outside as the one outside of a transaction.
func SQL(pool *sql.DB, outside onceq.DB) Handles {
	levels := map[pgx.TxIsoLevel]sql.IsolationLevel{
		pgx.ReadCommitted: sql.LevelReadCommitted, pgx.RepeatableRead: sql.LevelRepeatableRead, pgx.Serializable: sql.LevelSerializable,
	}
	return Handles{DB: outside, Begin: func(ctx context.Context, level pgx.TxIsoLevel) (Tx, error) {
		tx, err := pool.BeginTx(context.WithoutCancel(ctx), &sql.TxOptions{Isolation: levels[level]})
		if err != nil {
			return Tx{}, err
		}
		return Tx{
			DB:       onceqsql.Tx(tx),
			Commit:   func(context.Context) error { return tx.Commit() },
			Rollback: func(context.Context) error { return tx.Rollback() },
		}, nil
	}}
}
