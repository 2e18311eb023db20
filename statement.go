package onceq

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/sqlstate"
)

// How the library's own statements are sent. In a caller's transaction a statement is sent as it is. Anywhere else it is
// sent in a transaction of its own, together with settings, in one round trip; how is called a way. There are five ways,
// and send is the only function that sends. Not sent by it are: a batch that belongs to the caller (EnqueueInBatch,
// CompleteInBatch), the transaction of a handler (tx.go), and LISTEN.
//
// Tricks that steer the planner, each with the test that fails without it:
//
//   - guardPlans: only index scans and nested loops. A plan may be made while the tables are empty and used when they hold
//     millions of rows. TestTrap_PlansScanNoTableWhateverTheStatistics; for reads TestTrapStatsReadsBoundedRangesOfIndexes;
//     that every handle gets them, TestTrap_AWrappedPoolKeepsThePlannerGuards.
//   - jit off, in guardPlans: a generic plan assumes that a limit that it does not know is a tenth of the rows, and with
//     some millions of jobs Postgres then spends 15 ms on compiling each claim of a millisecond.
//     TestTrap_PlansScanNoTableWhateverTheStatistics.
//   - plan_cache_mode, in hotPlans: with few jobs Postgres makes a new plan for each call, which takes four times as long
//     as running it. TestTrap_HotStatementsKeepTheirPlans.
//   - "= any (array[x])" instead of "= x" in joins to a table that is written: an equality that a merge join could use also
//     offers the planner the whole index in its order, which looks cheap while the table is empty. An index condition on
//     the class does the same, hence "class + 0 = 0". Both matter most in a caller's transaction, where there are no
//     guards. TestTrap_PlansScanNoTableWhateverTheStatistics.
//   - "materialized" before a part that locks: without it Postgres may run that part again for each row of the update, and
//     claim more than the limit. TestTrap_ClaimLimitIsExact_3Of2000.
//   - "offset 0" at the end of a lateral part: it keeps Postgres from joining the part in another order, which would read
//     the whole table. TestTrap_PlansScanNoTableWhateverTheStatistics.
//   - keepPlans and restorePlans: guards inside a transaction in which a user's statements follow.
//     TestTrap_AWrappedTransactionStaysTheCallers.
//
// noLimits steers no plan. TestDefaults_TheLibrarysOwnStatementsHaveNoLimitsAndTheApplicationsKeepThem fails without it.
//
// TestStatement_WhatIsSentForEveryJob compares what is sent for every job byte for byte.

// way is how a statement is sent if no transaction of a caller is open.
type way struct {
	begin    string        // "" for none: what is sent in one message is one transaction by itself, and works on a standby too
	options  pgx.TxOptions // the same as begin, for handles that send one statement at a time
	settings string        // what is sent before the statement; "" for none, and then no transaction is opened
	clock    *time.Time    // gets the database's time just before the statement, if the settings return it
}

var (
	// asIs is for statements that cannot get a bad plan, above all for Enqueue: one round trip, with the server's settings.
	asIs = way{}

	// hot is for the statements that run for every job, and for other statements whose plans do not depend on their values.
	hot = way{begin: beginOwn, options: ownOptions, settings: hotPlans + `, ` + noLimits}

	// rare is the same for statements whose plans do depend on their values.
	rare = way{begin: beginOwn, options: ownOptions, settings: guardPlans + `, ` + noLimits}

	// reading is for looking at large tables on behalf of people. It keeps the time limits of the role.
	reading = way{options: pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly}, settings: guardPlans}

	// checking is for reading the schema's version, before anything is known about it.
	checking = way{begin: beginOwn, options: ownOptions, settings: `select ` + noLimits}
)

var ownOptions = pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}

// beginOwn opens a transaction of the library's own, in the same round trip as its statement. The isolation level does not
// depend on the database's default.
const beginOwn = `begin isolation level read committed read write`

// noLimits removes, from a transaction of the library's own, the time limits that a role, a database or the pool gives to
// all. Background work must continue, and each such statement is short or ends with its context. The limits are for the
// application's statements, and those in a handler's transaction keep them. It is part of what is sent before the library's
// statements, so that it costs no round trip and ends with the transaction, behind a pooler too.
// idle_in_transaction_session_timeout cannot affect these transactions, because each is sent in one message. row_security
// stays as it is: if it is off, Postgres reports that a policy hides rows of these tables, which is better than missing
// them.
const noLimits = `set_config('statement_timeout', '0', true), set_config('lock_timeout', '0', true),
       case when current_setting('transaction_timeout', true) <> '0' then set_config('transaction_timeout', '0', true) end`

// guardPlans is sent before a statement of the library's own, in the same transaction and round trip. It also returns the
// database's time.
const guardPlans = `
select statement_timestamp(), set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
       set_config('enable_mergejoin', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('jit', 'off', true)`

// hotPlans is guardPlans with generic plans.
const hotPlans = guardPlans + `, set_config('plan_cache_mode', 'force_generic_plan', true)`

// keepPlans is guardPlans inside a transaction in which a user's statements follow, until restorePlans.
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

// What some handles on the database have in addition to DB.
type (
	batcher interface {
		SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	}
	beginner interface {
		Begin(ctx context.Context) (pgx.Tx, error)
	}
	txBeginner interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	}
)

// opener is the only test of whether onceq may open a transaction on db. It returns the handle that opens one, or nil if db
// is a transaction, has one open, or may be or have one. Pools are often wrapped, for tracing for example, so what counts
// is what a handle can do: a handle with Commit is a transaction, a connection knows whether it is in one, and only a pool
// or a connection has BeginTx.
func opener(db DB) txBeginner {
	if inTransaction(db) {
		return nil
	}
	begin, _ := db.(txBeginner)
	return begin
}

// inTransaction reports whether db is known to be a transaction, or to have one open.
func inTransaction(db DB) bool {
	switch db := db.(type) {
	case interface{ Commit(context.Context) error }:
		return true
	case interface{ PgConn() *pgconn.PgConn }: // *pgx.Conn
		return db.PgConn().TxStatus() != 'I'
	case interface{ Conn() *pgx.Conn }: // *pgxpool.Conn
		return db.Conn().PgConn().TxStatus() != 'I'
	}
	return false
}

// send sends a statement of this package to db, in one of the ways above, and calls read with its rows. A handle without
// BeginTx and Commit may be a pool or a transaction: it gets guards that are undone after the statement, and nothing else.
func (q *Queue) send(ctx context.Context, db DB, by way, statement string, args []any, read func(pgx.Rows) error) error {
	if by.settings == "" || inTransaction(db) {
		return q.told(query(ctx, db, q.sql(statement), args, read))
	}
	begin, batch := opener(db), &pgx.Batch{}
	switch sender, batches := db.(batcher); {
	case batches && begin != nil:
		if by.begin != "" {
			batch.Queue(by.begin)
		}
		settings := batch.Queue(by.settings)
		if by.clock != nil {
			settings.Query(func(rows pgx.Rows) error {
				if err := rows.Err(); err != nil {
					return err // rows that failed have no columns to ask for, and panic
				}
				columns := make([]any, len(rows.FieldDescriptions()))
				columns[0] = by.clock
				return row(columns...)(rows)
			})
		}
		batch.Queue(q.sql(statement), args...).Query(read)
		if by.begin != "" {
			batch.Queue("commit")
		}
		err := sender.SendBatch(ctx, batch).Close()
		if err != nil && by.begin != "" && !errors.Is(err, pgx.ErrNoRows) {
			rollBack(ctx, db)
		}
		return q.told(err)
	case batches:
		batch.Queue(keepPlans)
		batch.Queue(q.sql(statement), args...).Query(read)
		batch.Queue(restorePlans)
		return q.told(sender.SendBatch(ctx, batch).Close())
	case begin != nil:
		return atomically(ctx, db, by, func(db DB) error { return q.send(ctx, db, asIs, statement, args, read) })
	}
	either, ok := db.(beginner)
	if !ok {
		return q.send(ctx, db, asIs, statement, args, read)
	}
	tx, err := either.Begin(ctx) // a transaction, or a savepoint in one
	if err != nil {
		return fmt.Errorf("onceq: begin: %w", err)
	}
	return ending(ctx, tx, func() error {
		if _, err := tx.Exec(ctx, keepPlans); err != nil {
			return err
		}
		if err := q.send(ctx, tx, asIs, statement, args, read); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, restorePlans)
		return err
	})
}

// queryRow sends a statement as it is and scans its one row. No row is pgx.ErrNoRows.
func (q *Queue) queryRow(ctx context.Context, db DB, statement string, args []any, dest ...any) error {
	return q.send(ctx, db, asIs, statement, args, row(dest...))
}

// guarded sends a statement the hot way and scans its one row.
func (q *Queue) guarded(ctx context.Context, db DB, statement string, args []any, dest ...any) error {
	return q.send(ctx, db, hot, statement, args, row(dest...))
}

// atomically runs fn in one transaction: the caller's, if db is one, or a new one that begins with the way's settings.
func atomically(ctx context.Context, db DB, by way, fn func(DB) error) error {
	begin := opener(db)
	if begin == nil {
		return fn(db)
	}
	options := by.options
	if by.settings == "" {
		options = ownOptions
	}
	tx, err := begin.BeginTx(ctx, options)
	if err != nil {
		return fmt.Errorf("onceq: begin: %w", err)
	}
	return ending(ctx, tx, func() error {
		if by.settings != "" {
			if _, err := tx.Exec(ctx, by.settings); err != nil {
				return fmt.Errorf("onceq: settings: %w", err)
			}
		}
		return fn(tx)
	})
}

// ending runs fn, then commits the transaction, or rolls it back if fn returned an error.
func ending(ctx context.Context, tx pgx.Tx, fn func() error) error {
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if err := fn(); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("onceq: commit: %w", err)
	}
	return nil
}

// rollBack ends the transaction that a failed batch has left open on db, if db is a connection. A pool closes such a
// connection by itself. If db is a wrapped pool, the rollback goes to another connection, on which no transaction is open.
func rollBack(ctx context.Context, db DB) {
	if _, ok := db.(*pgxpool.Pool); ok {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	_, _ = db.Exec(ctx, "rollback")
}

// query runs a statement as it is and calls read with its rows.
func query(ctx context.Context, db DB, statement string, args []any, read func(pgx.Rows) error) error {
	rows, err := db.Query(ctx, statement, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	if err := read(rows); err != nil {
		return err
	}
	rows.Close()
	return rows.Err()
}

// row reads one row. No row is pgx.ErrNoRows.
func row(dest ...any) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		if rows.Next() {
			return rows.Scan(dest...)
		}
		if err := rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
}

// each reads all rows, one after the other.
func each(scan func(pgx.Rows) error) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		for rows.Next() {
			if err := scan(rows); err != nil {
				return err
			}
		}
		return rows.Err()
	}
}

// noRows is for a statement of which only the error counts.
func noRows(pgx.Rows) error { return nil }

// sql returns a statement of this package, in which the schema is written as onceq, with the real schema's name.
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

// told turns an error of Postgres into a *SchemaError if the tables are missing, and into an ErrIDTaken if a job cannot
// leave because of another job with its id.
func (q *Queue) told(err error) error {
	var schema *SchemaError
	if sqlstate.Of(err) == "OQ002" && !errors.Is(err, ErrIDTaken) {
		return fmt.Errorf("%w (%w)", ErrIDTaken, err)
	}
	if !noTables(err) || errors.As(err, &schema) {
		return err
	}
	return &tablesMissing{&SchemaError{Schema: q.schema, Want: SchemaVersion}, err}
}
