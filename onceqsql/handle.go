package onceqsql

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/onceq/onceq"
)

// runner is what *sql.Tx, *sql.DB and *sql.Conn have in common.
type runner interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// Transaction is a *sql.Tx, or a type that passes statements on to one unchanged: a *sqlx.Tx, an *ent.Tx with the
// feature sql/execquery, or the Statement.ConnPool of a GORM transaction. For a bun.Tx, pass the Tx inside it. Commit
// and Rollback are in the interface so that a *sql.DB does not fit.
type Transaction interface {
	runner
	Commit() error
	Rollback() error
}

// Tx returns a handle on the caller's transaction. What onceq does through it commits and rolls back with the
// transaction. The caller ends the transaction.
func Tx(tx Transaction) onceq.DB { return over("Tx", tx) }

// DB returns a handle on a database. Each statement commits on its own. A call that needs several opens a transaction
// for them.
func DB(db *sql.DB) onceq.DB {
	if db == nil {
		return over("DB", nil)
	}
	return database{opener{over("DB", db), db.BeginTx}}
}

// Conn returns a handle on one connection; it works as DB does. If a transaction was begun on the connection by hand, what
// onceq does commits and rolls back with it. Use Tx for one that was begun with BeginTx.
func Conn(conn *sql.Conn) onceq.DB {
	if conn == nil {
		return over("Conn", nil)
	}
	return opener{over("Conn", conn), conn.BeginTx}
}

// handle is an onceq.DB over database/sql.
type handle struct {
	runner
	err error // returned by every call if the handle is unusable
}

func over(name string, r runner) handle {
	if v := reflect.ValueOf(r); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return handle{err: &onceq.InvalidError{Field: "db", Reason: "is onceqsql." + name + "(nil); pass an open one"}}
	}
	return handle{runner: r}
}

func (h handle) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	if h.err != nil {
		return pgconn.CommandTag{}, h.err
	}
	args, err := encode(pgtype.NewMap(), args)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	result, err := h.ExecContext(ctx, query, args...)
	if err != nil {
		return pgconn.CommandTag{}, recognisable(ctx, err)
	}
	n, err := result.RowsAffected()
	return pgconn.NewCommandTag(fmt.Sprintf("UPDATE %d", n)), err
}

func (h handle) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	if h.err != nil {
		return &rows{err: h.err}, h.err
	}
	types := pgtype.NewMap()
	args, err := encode(types, args)
	if err != nil {
		return &rows{err: err}, err
	}
	found, err := h.QueryContext(ctx, query, args...)
	if err != nil {
		err = recognisable(ctx, err)
		return &rows{err: err}, err
	}
	return open(ctx, found, types)
}

// opener is a handle that opens transactions. Before onceq calls BeginTx, it asks Postgres whether a transaction is open: a
// second one would end the caller's in pgx, and break the connection in lib/pq.
type opener struct {
	handle
	begin func(context.Context, *sql.TxOptions) (*sql.Tx, error)
}

var levels = map[pgx.TxIsoLevel]sql.IsolationLevel{
	pgx.ReadUncommitted: sql.LevelReadUncommitted,
	pgx.ReadCommitted:   sql.LevelReadCommitted,
	pgx.RepeatableRead:  sql.LevelRepeatableRead,
	pgx.Serializable:    sql.LevelSerializable,
}

// database is an opener on which no transaction is ever open.
type database struct{ opener }

// NeverInTransaction tells onceq that it need not ask.
func (database) NeverInTransaction() {}

// BeginTx opens a transaction. It has Exec, Query, Commit and Rollback, which is all that onceq needs.
func (o opener) BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error) {
	if o.err != nil {
		return nil, o.err
	}
	tx, err := o.begin(ctx, &sql.TxOptions{Isolation: levels[opts.IsoLevel], ReadOnly: opts.AccessMode == pgx.ReadOnly})
	if err != nil {
		return nil, recognisable(ctx, err)
	}
	return &transaction{handle: over("Tx", tx), tx: tx}, nil
}

// pgxOnly supplies the methods of a pgx.Tx that have no counterpart in database/sql. They are never called.
type pgxOnly struct{ pgx.Tx }

type transaction struct {
	handle
	pgxOnly
	tx *sql.Tx
}

func (t *transaction) Commit(ctx context.Context) error { return recognisable(ctx, t.tx.Commit()) }

func (t *transaction) Rollback(ctx context.Context) error { return recognisable(ctx, t.tx.Rollback()) }
