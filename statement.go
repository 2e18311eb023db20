package onceq

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// beginOwn opens a transaction of the library's own, in the same round trip as what it does: the isolation level
// does not depend on the database's default.
const beginOwn = `begin isolation level read committed read write`

// noLimits takes the time limits away from a transaction of the library's own that a role, a database or the pool gives to
// all: what goes on in the background must go on, and each such statement is short, or ends with its context. The limits
// are for the application's statements, and those of a handler's transaction keep them. It stands in what goes
// before the library's statements, so that it costs no round trip and ends with the transaction, behind a pooler
// too. idle_in_transaction_session_timeout meets none of them: they come in one message, and row_security stays as it is:
// where it is off, Postgres says that a policy hides rows of these tables, which is better than to miss them.
const noLimits = `set_config('statement_timeout', '0', true), set_config('lock_timeout', '0', true),
       case when current_setting('transaction_timeout', true) <> '0' then set_config('transaction_timeout', '0', true) end`

// guardPlans goes before a statement of the library's own, in the same transaction and round trip, and brings
// the database's clock. Plans of these statements may be made while the tables are empty and used when they
// hold millions of rows: nothing but index scans and nested loops stays good for both. Joins to a table that is
// written say "= any (array[x])" in place of "= x": an equality that a merge join could use also offers the planner
// the whole index in its order, which looks cheap while the table is empty. So does an index condition on the class.
// Nor are plans compiled: a generic plan takes a limit that it does not know for a tenth of the rows, and beside some
// millions of jobs that is worth 15 ms of compiling to Postgres, for each claim of a millisecond.
const guardPlans = `
select statement_timestamp(), set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
       set_config('enable_mergejoin', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('jit', 'off', true)`

// hotPlans is guardPlans for the statements that run for every job. Their plans need no second thought: otherwise
// Postgres makes a new one for each call with few jobs, which takes four times as long as running it.
const hotPlans = guardPlans + `, set_config('plan_cache_mode', 'force_generic_plan', true)`

// What goes first in a transaction of the library's own.
const (
	guardOwn = guardPlans + `, ` + noLimits
	hotOwn   = hotPlans + `, ` + noLimits
)

// keepPlans is guardPlans inside of a transaction in which a user's statements follow, up to restorePlans.
const keepPlans = `
select set_config('onceq.plans', concat_ws(',', current_setting('enable_seqscan'), current_setting('enable_hashjoin'),
                  current_setting('enable_mergejoin'), current_setting('enable_bitmapscan'), current_setting('jit')), true),
       set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
       set_config('enable_mergejoin', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('jit', 'off', true)`

const restorePlans = `
select set_config('enable_seqscan', split_part(p, ',', 1), true), set_config('enable_hashjoin', split_part(p, ',', 2), true),
       set_config('enable_mergejoin', split_part(p, ',', 3), true), set_config('enable_bitmapscan', split_part(p, ',', 4), true),
       set_config('jit', split_part(p, ',', 5), true)
  from current_setting('onceq.plans') as p`

// sender is what a statement of the library's own needs: a connection or a pool, outside of a transaction.
type sender interface {
	DB
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// runs runs a statement of which nothing but its error counts.
func runs(ctx context.Context, db DB, statement string, args ...any) error {
	rows, err := db.Query(ctx, statement, args...)
	if err == nil {
		rows.Close()
		err = rows.Err()
	}
	return err
}

// sql returns a statement of this package, in which the schema is written as onceq, for the real schema.
func (q *Queue) sql(statement string) string {
	if q.schema == "onceq" {
		return statement
	}
	if s, ok := q.statements.Load(statement); ok {
		return s.(string)
	}
	s := q.names.Replace(statement)
	q.statements.Store(statement, s)
	return s
}

// queryRow runs a statement of this package and scans its one row. No row is pgx.ErrNoRows.
func (q *Queue) queryRow(ctx context.Context, db DB, statement string, args []any, dest ...any) (err error) {
	defer func() { err = q.told(err) }()
	rows, err := db.Query(ctx, q.sql(statement), args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	if !rows.Next() {
		if err := rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := rows.Scan(dest...); err != nil {
		return err
	}
	rows.Close()
	return rows.Err()
}

// told makes a *SchemaError of what Postgres says of a statement of this package where the tables are missing, and an
// ErrIDTaken where a job cannot leave because of another one with its id.
func (q *Queue) told(err error) error {
	var schema *SchemaError
	if sqlState(err) == "OQ002" && !errors.Is(err, ErrIDTaken) {
		return fmt.Errorf("%w (%w)", ErrIDTaken, err)
	}
	if !noTables(err) || errors.As(err, &schema) {
		return err
	}
	return &tablesMissing{&SchemaError{Schema: q.schema, Want: SchemaVersion}, err}
}

// guarded runs a statement of the library's own and scans its one row: on a pool in a transaction of its own
// behind hotOwn, elsewhere as it is.
func (q *Queue) guarded(ctx context.Context, db DB, statement string, args []any, dest ...any) error {
	pool, ok := db.(*pgxpool.Pool)
	if !ok {
		return q.queryRow(ctx, db, statement, args, dest...)
	}
	return q.own(ctx, pool, hotOwn, statement, args, dest...)
}

// own runs a statement in a transaction of the library's own, behind what that begins with, and scans its one row.
func (q *Queue) own(ctx context.Context, pool *pgxpool.Pool, first, statement string, args []any, dest ...any) error {
	b := &pgx.Batch{}
	b.Queue(beginOwn)
	b.Queue(first)
	b.Queue(q.sql(statement), args...).QueryRow(func(row pgx.Row) error { return row.Scan(dest...) })
	b.Queue("commit")
	return q.told(pool.SendBatch(ctx, b).Close())
}

// rows runs a statement that reads from large tables: behind guardPlans where db takes batches outside of a
// transaction, else as it is.
func (q *Queue) rows(ctx context.Context, db DB, statement string, args []any, scan func(pgx.Rows) error) (err error) {
	defer func() { err = q.told(err) }()
	if s, ok := db.(sender); ok && beginner(db) != nil {
		b := &pgx.Batch{}
		b.Queue(guardPlans)
		b.Queue(q.sql(statement), args...).Query(scan)
		return s.SendBatch(ctx, b).Close()
	}
	rows, err := db.Query(ctx, q.sql(statement), args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	return scan(rows)
}

// txBeginner opens a transaction.
type txBeginner interface {
	BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error)
}

// beginner gives what opens a transaction, nil where db is one already.
func beginner(db DB) txBeginner {
	switch db := db.(type) {
	case *pgxpool.Conn:
		if db.Conn().PgConn().TxStatus() != 'I' {
			return nil
		}
	case *pgx.Conn:
		if db.PgConn().TxStatus() != 'I' {
			return nil
		}
	}
	b, _ := db.(txBeginner)
	return b
}

// atomically runs fn in one transaction: the caller's, where db is one, else a new one.
func atomically(ctx context.Context, db DB, fn func(DB) error) error {
	begin := beginner(db)
	if begin == nil {
		return fn(db)
	}
	tx, err := begin.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return fmt.Errorf("onceq: begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if err := fn(tx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("onceq: commit: %w", err)
	}
	return nil
}
