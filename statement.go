package onceq

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/sqlstate"
)

// How the library's own statements are sent. On a pool, and on a connection that is in no transaction, a statement is sent
// in a transaction of its own, together with settings, in one round trip; how is called a way. On every other handle it is
// sent as it is, by itself: only the caller knows what the handle is. It may be a transaction, or a pool that follows a
// transaction in the context, and then a commit or a setting of onceq's would be the caller's too. Background work needs
// nothing else, because it runs on the pool that New was given. A call of several statements (EnqueueMany with keys, a job
// that waits for others, Resolve, ResolveMany) needs a transaction: see opener.
//
// All of this is in send and inOne. Three things are sent without them: a batch that belongs to the caller (EnqueueInBatch,
// CompleteInBatch), the transaction of a handler (tx.go), and LISTEN with its UNLISTEN (listen.go).
//
// Tricks that steer the planner, each with the test that fails without it:
//
//   - guardPlans: only index scans and nested loops. A plan may be made while the tables are empty and used when they hold
//     millions of rows. TestTrap_PlansScanNoTableWhateverTheStatistics; for reads TestTrapStatsReadsBoundedRangesOfIndexes;
//     which handles get them, TestTrap_OnlyPgxsOwnHandlesGetThePlannerGuards.
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
//   - keepPlans and restorePlans: guards inside a handler's transaction, in which the handler's statements follow.
//     TestTrap_AHandlersTransactionKeepsItsPlans.
//
// noLimits steers no plan. TestDefaults_TheLibrarysOwnStatementsHaveNoLimitsAndTheApplicationsKeepThem fails without it.
//
// TestStatement_WhatIsSentForEveryJob compares what is sent for every job byte for byte.

// way is how a statement is sent on a pool, or on a connection that is in no transaction.
type way struct {
	begin    string     // "" for none: what is sent in one message is one transaction by itself, and works on a standby too
	settings string     // what is sent before the statement; "" for none, and then no transaction is opened
	clock    *time.Time // gets the database's time just before the statement, if the settings return it
	turn     *turn      // what the statement takes or waits for, once the settings are made; nil for nothing. Only in quickly
	along    *along     // sent after the statement, in the same message; nil for none

	patience time.Duration // how long the settings let it wait for a lock; 0: there is no limit
}

// along is a small statement that is sent in the message of another one, and what reads its rows. It is not sent where a
// statement is sent by itself.
type along struct {
	statement string
	args      []any
	read      func(pgx.Rows) error
}

var (
	// asIs is for statements that cannot get a bad plan, above all for Enqueue: one round trip, with the server's settings.
	asIs = way{}

	// hot is for the statements that run for every job, and for other statements whose plans do not depend on their values.
	hot = way{begin: beginOwn, settings: hotPlans + `, ` + noLimits}

	// brief is the same for what waits for nobody: who has a row locked is left alone until the next time.
	brief = waiting(100 * time.Millisecond)

	// rare is the same for statements whose plans do depend on their values.
	rare = way{begin: beginOwn, settings: guardPlans + `, ` + noLimits}

	// forCaller and forCallerRare are hot and rare for what somebody asks for and waits for. Like asIs and
	// reading, they keep the time limits of the role, the database and the pool: who sets them wants nobody to
	// wait for longer.
	forCaller     = way{begin: beginOwn, settings: hotPlans}
	forCallerRare = way{begin: beginOwn, settings: guardPlans}

	// reading is for looking at large tables, and at the server, on a standby too.
	reading = way{settings: guardPlans}
)

// beginOwn opens a transaction of the library's own, in the same round trip as its statement. The isolation level does not
// depend on the database's default.
const beginOwn = `begin isolation level read committed read write`

// noLimits removes, from a transaction of the library's own, the time limits that a role, a database or the pool gives to
// all. Background work must continue, and what becomes of a lease must not get lost; each such statement is
// short or ends with its context. The limits are for the application's statements: those in a handler's
// transaction keep them, and so does what the application calls and waits for (forCaller). It is part of what is
// sent before the library's statements, so that it costs no round trip and ends with the transaction.
// idle_in_transaction_session_timeout cannot affect these transactions, because each is sent in one message. row_security
// stays as it is: if it is off, Postgres reports that a policy hides rows of these tables, which is better than missing
// them.
const noLimits = `pg_catalog.set_config('statement_timeout', '0', true), pg_catalog.set_config('lock_timeout', '0', true),
       case when pg_catalog.current_setting('transaction_timeout', true) <> '0' then pg_catalog.set_config('transaction_timeout', '0', true) end`

// guardPlans is sent before a statement of the library's own, in the same transaction and round trip. It also returns the
// database's time.
const guardPlans = `
select statement_timestamp(), pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),
       pg_catalog.set_config('enable_mergejoin', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true), pg_catalog.set_config('jit', 'off', true)`

// hotPlans is guardPlans with generic plans.
const hotPlans = guardPlans + `, pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true)`

// keepPlans is guardPlans inside a handler's transaction (tx.go), until restorePlans.
const keepPlans = `
select pg_catalog.set_config('onceq.plans', pg_catalog.concat_ws(',', pg_catalog.current_setting('enable_seqscan'), pg_catalog.current_setting('enable_hashjoin'),
                  pg_catalog.current_setting('enable_mergejoin'), pg_catalog.current_setting('enable_bitmapscan'), pg_catalog.current_setting('jit')), true),
       pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),
       pg_catalog.set_config('enable_mergejoin', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true), pg_catalog.set_config('jit', 'off', true)`

const restorePlans = `
select pg_catalog.set_config('enable_seqscan', pg_catalog.split_part(p, ',', 1), true), pg_catalog.set_config('enable_hashjoin', pg_catalog.split_part(p, ',', 2), true),
       pg_catalog.set_config('enable_mergejoin', pg_catalog.split_part(p, ',', 3), true), pg_catalog.set_config('enable_bitmapscan', pg_catalog.split_part(p, ',', 4), true),
       pg_catalog.set_config('jit', pg_catalog.split_part(p, ',', 5), true)
  from pg_catalog.current_setting('onceq.plans') as p`

type (
	txBeginner interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	}
	ownable interface {
		txBeginner
		SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	}
)

// own returns db if onceq may send a begin and a commit of its own there, and nil otherwise. Only types of pgx count:
// nobody knows what a wrapper around one does with a statement.
func own(db DB) ownable {
	switch db := db.(type) {
	case *pgxpool.Pool:
		return db
	case *pgxpool.Conn:
		if db.Conn().PgConn().TxStatus() == 'I' {
			return db
		}
	case *pgx.Conn:
		if db.PgConn().TxStatus() == 'I' {
			return db
		}
	}
	return nil
}

// outside reports whether db is certainly in no transaction of the caller's.
func outside(db DB) bool {
	_, never := db.(interface{ NeverInTransaction() }) // onceqsql.DB
	return never || own(db) != nil
}

// opener returns what opens a transaction on db, or nil if a transaction is open or db cannot open one. If db has BeginTx but
// is not known, Postgres says whether a transaction is open where db sends its statements; that takes two round trips.
func opener(ctx context.Context, db DB) (txBeginner, error) {
	begin, ok := db.(txBeginner)
	switch db.(type) {
	case *pgx.Conn, *pgxpool.Conn:
		ok = outside(db)
	}
	if !ok {
		return nil, nil
	}
	if outside(db) {
		return begin, nil
	}
	if open, err := inside(ctx, db); open || err != nil {
		return nil, err
	}
	return begin, nil
}

// mustOpen is opener for what may not commit in parts: for example, a job that waits for others would go on before they are known. It refuses
// a db that is in no transaction and has no BeginTx.
func mustOpen(ctx context.Context, db DB) (txBeginner, error) {
	begin, err := opener(ctx, db)
	if begin != nil || err != nil {
		return begin, err
	}
	switch db.(type) {
	case pgx.Tx, txBeginner: // it is open
		return nil, nil
	}
	if open, err := inside(ctx, db); open || err != nil {
		return nil, err
	}
	return nil, invalid("db", "is in no transaction and has no BeginTx, and this takes more than one statement, which must not commit one by one; pass a transaction, or give the type a BeginTx")
}

// inside asks Postgres whether a transaction is open where db sends its statements.
func inside(ctx context.Context, db DB) (open bool, err error) {
	// A setting that is local to its transaction is still there if the next statement is in the same one.
	const set, read = `select pg_catalog.set_config('onceq.open', 'on', true) = 'on'`, `select coalesce(pg_catalog.current_setting('onceq.open', true), '') = 'on'`
	for _, statement := range []string{set, read} {
		if err := query(ctx, db, statement, nil, row(&open)); err != nil {
			return false, fmt.Errorf("onceq: asking whether db is in a transaction: %w", err)
		}
	}
	return open, nil
}

// store is where the tables of a Queue are, and what is known of their server.
type store struct {
	pool   *pgxpool.Pool
	schema string // as the user wrote it
	names  *strings.Replacer

	statements sync.Map     // statement as written in this package → statement with the schema's name
	citus      atomic.Int32 // whether the server has Citus: see citus.go
}

// send sends a statement of this package to db, in one of the ways above, and calls read with its rows.
func (q *store) send(ctx context.Context, db DB, by way, statement string, args []any, read func(pgx.Rows) error) error {
	if k, ok := db.(quick); ok {
		return q.quickly(ctx, k, by, statement, args, read)
	}
	if e, ok := db.(forEffects); ok {
		db = e.DB
		if conn := e.acquire(ctx); conn != nil {
			defer conn.Release()
			db = conn
		}
	}
	if db != nil && q.citus.Load() != citusNo && drawnAs[statement] != "" {
		citus, err := q.onCitus(ctx, db)
		if citus {
			args, err = q.drawn(ctx, db, statement, args)
			statement = drawnAs[statement]
		}
		if err != nil {
			return q.told(err)
		}
	}
	if q.citus.Load() == citusYes {
		statement = onNode(statement)
		if more, ok := strings.CutPrefix(by.settings, hotPlans); ok {
			by.settings = reading.settings + more
		}
	}
	own := own(db)
	if by.settings == "" || own == nil {
		return by.told(q, query(ctx, db, q.sql(statement), args, read))
	}
	err := own.SendBatch(ctx, q.batch(by, statement, args, read)).Close()
	if err != nil && by.begin != "" && !errors.Is(err, pgx.ErrNoRows) {
		rollBack(ctx, db)
	}
	return by.told(q, err)
}

// batch is one message with a statement, its settings, and all else that goes along.
func (q *store) batch(by way, statement string, args []any, read func(pgx.Rows) error) *pgx.Batch {
	batch := &pgx.Batch{}
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
	if by.turn != nil {
		by.turn.queue(batch, by.clock)
	}
	if by.patience > 0 && q.citus.Load() == citusYes {
		batch.Queue(q.sql(lockTimeout), by.limit())
	}
	batch.Queue(q.sql(statement), args...).Query(read)
	if by.along != nil {
		batch.Queue(q.sql(by.along.statement), by.along.args...).Query(by.along.read)
	}
	if by.begin != "" {
		batch.Queue("commit")
	}
	return batch
}

// told is store.told, and says of a time limit that is not the way's own what to do.
func (w way) told(q *store, err error) error {
	var limit *limitError
	if err = q.told(err); w.patience == 0 && overLimit(err) && !errors.As(err, &limit) {
		return &limitError{err}
	}
	return err
}

// overLimit reports whether Postgres ended a statement because of a time limit.
func overLimit(err error) bool {
	state := sqlstate.Of(err)
	return state == "55P03" || state == "57014"
}

// queryRow sends a statement as it is and scans its one row. No row is pgx.ErrNoRows.
func (q *store) queryRow(ctx context.Context, db DB, statement string, args []any, dest ...any) error {
	return q.send(ctx, db, asIs, statement, args, row(dest...))
}

// sendBare sends a statement as it is, which is a transaction by itself on a pool. If that fails there because
// a database, a role or the pool makes all transactions read-only, or gives them another isolation level, it is
// sent again with its own settings. To send them always would cost a round trip's worth of work for every job.
func (q *store) sendBare(ctx context.Context, db DB, statement string, args []any, take func(pgx.Rows) error) error {
	err := q.send(ctx, db, asIs, statement, args, take)
	state := sqlstate.Of(err)
	if (state == "25006" || state == "40001") && own(db) != nil && ctx.Err() == nil {
		err = q.send(ctx, db, forCaller, statement, args, take)
	}
	return err
}

// guarded sends a statement the hot way and scans its one row.
func (q *store) guarded(ctx context.Context, db DB, statement string, args []any, dest ...any) error {
	return q.send(ctx, db, hot, statement, args, row(dest...))
}

// atomically runs fn in one transaction: a new one, which begins with the way's settings, or the caller's, if opener has
// none to offer.
func atomically(ctx context.Context, db DB, by way, fn func(DB) error) error {
	begin, err := opener(ctx, db)
	if err != nil {
		return err
	}
	return inOne(ctx, begin, db, by, fn)
}

// inOne is atomically for a caller that has asked opener.
func inOne(ctx context.Context, begin txBeginner, db DB, by way, fn func(DB) error) error {
	if begin == nil {
		return fn(db)
	}
	tx, err := begin.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return fmt.Errorf("onceq: begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if by.settings != "" {
		if _, err := tx.Exec(ctx, by.settings); err != nil {
			return fmt.Errorf("onceq: settings: %w", err)
		}
	}
	if err := fn(tx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("onceq: commit: %w", err)
	}
	return nil
}

// rollBack ends the transaction that a failed batch has left open on db, if db is a connection. A pool closes such a
// connection by itself.
func rollBack(ctx context.Context, db DB) {
	if _, ok := db.(*pgxpool.Pool); ok {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endWithin)
	defer cancel()
	_, _ = db.Exec(ctx, "rollback")
}

// query runs a statement as it is and calls read with its rows.
func query(ctx context.Context, db DB, statement string, args []any, read func(pgx.Rows) error) error {
	if db == nil {
		return noDB{}
	}
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
func (q *store) sql(statement string) string {
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

// told turns an error of Postgres into a *SchemaError if the tables are missing, and into an ErrIDTaken if another job with
// the same id is in the way. Of a transaction that has failed before it says what to do.
func (q *store) told(err error) error {
	var schema *SchemaError
	var aborted *abortedError
	if sqlstate.Of(err) == "25P02" && !errors.As(err, &aborted) {
		return &abortedError{err}
	}
	var pgErr *pgconn.PgError
	isTaken := errors.As(err, &pgErr) && (pgErr.Code == "OQ002" || sameID(pgErr))
	if isTaken && !errors.Is(err, ErrIDTaken) {
		return fmt.Errorf("%w (%w)", ErrIDTaken, err)
	}
	if !noTables(err) || errors.As(err, &schema) {
		return err
	}
	return &tablesMissing{&SchemaError{Schema: q.schema, Want: SchemaVersion}, err}
}

// sameID reports that a job with the id exists. Citus names a part of the table, and that in the message alone.
func sameID(err *pgconn.PgError) bool {
	return err.Code == "23505" && (err.ConstraintName == "jobs_pkey" || err.ConstraintName == "" && strings.Contains(err.Message, `"jobs_pkey_`))
}
