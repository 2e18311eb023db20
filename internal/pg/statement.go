// Package pg is how a statement reaches the server: over which connection, in which transaction, with which
// settings. It knows no table and no job. It imports lazytx, nap and sqlstate.
package pg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/sqlstate"
)

// How the library's own statements are sent. On a pool, and on a connection that is in no transaction, a
// statement is sent in a transaction of its own, together with settings, in one round trip; how is called a
// way. On every other handle it is sent as it is, by itself: only the caller knows what the handle is. It may
// be a transaction, or a pool that follows a transaction in the context, and then a commit or a setting of
// onceq's would be the caller's too. Background work needs nothing else, because it runs on the pool that New
// was given. A call of several statements (EnqueueMany with keys, a job that waits for others, Resolve,
// ResolveMany) needs a transaction: see Opener.
//
// All of this is in Send and InOne. Three things are sent without them: a batch that belongs to the caller
// (EnqueueInBatch, CompleteInBatch), the transaction of a handler (internal/executor), and LISTEN with its UNLISTEN
// (package claimer).
//
// Tricks that steer the planner, each with the test that fails without it:
//
//   - GuardPlans: only index scans and nested loops. A plan may be made while the tables are empty and used when they hold
//     millions of rows. TestTrap_PlansScanNoTableWhateverTheStatistics; for reads TestTrapStatsReadsBoundedRangesOfIndexes;
//     which handles get them, TestTrap_OnlyPgxsOwnHandlesGetThePlannerGuards.
//   - jit off, in GuardPlans: a generic plan assumes that a limit that it does not know is a tenth of the rows, and with
//     some millions of jobs Postgres then spends 15 ms on compiling each claim of a millisecond.
//     TestTrap_PlansScanNoTableWhateverTheStatistics.
//   - plan_cache_mode, in HotPlans: with few jobs Postgres makes a new plan for each call, which takes four times as long
//     as running it. TestTrap_HotStatementsKeepTheirPlans.
//   - "= any (array[x])" instead of "= x" in joins to a table that is written: an equality that a merge join could use also
//     offers the planner the whole index in its order, which looks cheap while the table is empty. An index condition on
//     the class does the same, hence "class + 0 = 0". Both matter most in a caller's transaction, where there are no
//     guards. TestTrap_PlansScanNoTableWhateverTheStatistics.
//   - "materialized" before a part that locks: without it Postgres may run that part again for each row of the update, and
//     claim more than the limit. TestTrap_ClaimLimitIsExact_3Of2000.
//   - "offset 0" at the end of a lateral part: it keeps Postgres from joining the part in another order, which would read
//     the whole table. TestTrap_PlansScanNoTableWhateverTheStatistics.
//   - KeepPlans and RestorePlans: guards inside a handler's transaction, in which the handler's statements follow.
//     TestTrap_AHandlersTransactionKeepsItsPlans.
//
// noLimits steers no plan. TestDefaults_TheLibrarysOwnStatementsHaveNoLimitsAndTheApplicationsKeepThem fails
// without it.
//
// TestStatement_WhatIsSentForEveryJob compares what is sent for every job byte for byte.

// DB is where a statement runs: see onceq.DB, whose methods it has.
type DB = interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Way is how a statement is sent on a pool, or on a connection that is in no transaction.
type Way struct {
	begin    string     // "" for none: what is sent in one message is one transaction by itself, and works on a standby too
	settings string     // what is sent before the statement; "" for none, and then no transaction is opened
	Clock    *time.Time // gets the database's time just before the statement, if the settings return it
	Turn     *Turn      // what the statement takes or waits for, once the settings are made; nil for nothing. Only in quickly
	Along    *Along     // sent after the statement, in the same message; nil for none

	Patience time.Duration // how long the settings let it wait for a lock; 0: there is no limit
}

// Along is a small statement that is sent in the message of another one, and what reads its rows. It is not
// sent where a statement is sent by itself.
type Along struct {
	Statement string
	Args      []any
	Read      func(pgx.Rows) error
}

var (
	// AsIs is for statements that cannot get a bad plan, above all for Enqueue: one round trip, with the
	// server's settings.
	AsIs = Way{}

	// Hot is for the statements that run for every job, and for other statements whose plans do not depend on
	// their values.
	Hot = Way{begin: BeginOwn, settings: HotPlans + `, ` + noLimits}

	// Brief is the same for what waits for nobody: who has a row locked is left alone until the next time.
	Brief = Waiting(100 * time.Millisecond)

	// Rare is the same for statements whose plans do depend on their values.
	Rare = Way{begin: BeginOwn, settings: GuardPlans + `, ` + noLimits}

	// ForCaller and ForCallerRare are Hot and Rare for what somebody asks for and waits for. Like AsIs and
	// Reading, they keep the time limits of the role, the database and the pool: who sets them wants nobody
	// to wait for longer.
	ForCaller     = Way{begin: BeginOwn, settings: HotPlans}
	ForCallerRare = Way{begin: BeginOwn, settings: GuardPlans}

	// Reading is for looking at large tables, and at the server, on a standby too.
	Reading = Way{settings: GuardPlans}
)

// BeginOwn opens a transaction of the library's own, in the same round trip as its statement. The isolation
// level does not depend on the database's default.
const BeginOwn = `begin isolation level read committed read write`

// noLimits removes, from a transaction of the library's own, the time limits that a role, a database or the
// pool gives to all. Background work must continue, and what becomes of a lease must not get lost; each such
// statement is short or ends with its context. The limits are for the application's statements: those in a
// handler's transaction keep them, and so does what the application calls and waits for (ForCaller). It is
// part of what is sent before the library's statements, so that it costs no round trip and ends with the
// transaction. idle_in_transaction_session_timeout cannot affect these transactions, because each is sent in
// one message. row_security stays as it is: if it is off, Postgres reports that a policy hides rows of these
// tables, which is better than missing them.
const noLimits = `pg_catalog.set_config('statement_timeout', '0', true), pg_catalog.set_config('lock_timeout', '0', true),
       case when pg_catalog.current_setting('transaction_timeout', true) <> '0' then pg_catalog.set_config('transaction_timeout', '0', true) end`

// GuardPlans is sent before a statement of the library's own, in the same transaction and round trip. It also
// returns the database's time.
const GuardPlans = `
select statement_timestamp(), pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),
       pg_catalog.set_config('enable_mergejoin', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true), pg_catalog.set_config('jit', 'off', true)`

// HotPlans is GuardPlans with generic plans.
const HotPlans = GuardPlans + `, pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true)`

// KeepPlans is GuardPlans inside a handler's transaction (internal/executor), until RestorePlans.
const KeepPlans = `
select pg_catalog.set_config('onceq.plans', pg_catalog.concat_ws(',', pg_catalog.current_setting('enable_seqscan'), pg_catalog.current_setting('enable_hashjoin'),
                  pg_catalog.current_setting('enable_mergejoin'), pg_catalog.current_setting('enable_bitmapscan'), pg_catalog.current_setting('jit')), true),
       pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),
       pg_catalog.set_config('enable_mergejoin', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true), pg_catalog.set_config('jit', 'off', true)`

const RestorePlans = `
select pg_catalog.set_config('enable_seqscan', pg_catalog.split_part(p, ',', 1), true), pg_catalog.set_config('enable_hashjoin', pg_catalog.split_part(p, ',', 2), true),
       pg_catalog.set_config('enable_mergejoin', pg_catalog.split_part(p, ',', 3), true), pg_catalog.set_config('enable_bitmapscan', pg_catalog.split_part(p, ',', 4), true),
       pg_catalog.set_config('jit', pg_catalog.split_part(p, ',', 5), true)
  from pg_catalog.current_setting('onceq.plans') as p`

type (
	TxBeginner interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	}
	ownable interface {
		TxBeginner
		SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	}
)

// Own returns db if onceq may send a begin and a commit of its own there, and nil otherwise. Only types of
// pgx count: nobody knows what a wrapper around one does with a statement.
func Own(db DB) ownable {
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

// Outside reports whether db is certainly in no transaction of the caller's.
func Outside(db DB) bool {
	_, never := db.(interface{ NeverInTransaction() }) // onceqsql.DB
	return never || Own(db) != nil
}

// Opener returns what opens a transaction on db, or nil if a transaction is open or db cannot open one. If db
// has BeginTx but is not known, Postgres says whether a transaction is open where db sends its statements;
// that takes two round trips.
func Opener(ctx context.Context, db DB) (TxBeginner, error) {
	begin, ok := db.(TxBeginner)
	switch db.(type) {
	case *pgx.Conn, *pgxpool.Conn:
		ok = Outside(db)
	}
	if !ok {
		return nil, nil
	}
	if Outside(db) {
		return begin, nil
	}
	if open, err := Inside(ctx, db); open || err != nil {
		return nil, err
	}
	return begin, nil
}

// Inside asks Postgres whether a transaction is open where db sends its statements.
func Inside(ctx context.Context, db DB) (open bool, err error) {
	// A setting that is local to its transaction is still there if the next statement is in the same one.
	const set, read = `select pg_catalog.set_config('onceq.open', 'on', true) = 'on'`, `select coalesce(pg_catalog.current_setting('onceq.open', true), '') = 'on'`
	for _, statement := range []string{set, read} {
		if err := Query(ctx, db, statement, nil, Row(&open)); err != nil {
			return false, fmt.Errorf("onceq: asking whether db is in a transaction: %w", err)
		}
	}
	return open, nil
}

// Store is where the tables of a Queue are, and what is known of their server.
type Store struct {
	Pool   *pgxpool.Pool
	Schema string // as the user wrote it
	names  *strings.Replacer

	Version string // of the application; "" if it is not known

	means func(schema string, err error) error // what an error means to the caller
	parts Parts

	statements sync.Map     // statement as written in Go → statement with the schema's name
	Citus      atomic.Int32 // whether the server has Citus
}

// New returns the store of a schema, to which the statements' replacements on Citus are given, and what an
// error of Postgres means to the caller.
func New(pool *pgxpool.Pool, schema string, means func(schema string, err error) error, parts Parts) *Store {
	ident := pgx.Identifier{schema}.Sanitize()
	return &Store{Pool: pool, Schema: schema, means: means, parts: parts, names: strings.NewReplacer(
		"'onceq.", "'"+strings.ReplaceAll(ident, "'", "''")+".",
		"onceq.", ident+".",
	)}
}

// Parts is what a server with Citus gets in place of some statements.
type Parts interface {
	Draws(statement string) bool // ids are drawn before it
	Draw(ctx context.Context, q *Store, db DB, statement string, args []any) (instead string, with []any, err error)
	OnNode(statement string) string
}

// OnNode is what Citus gets in place of a statement that is sent by other means.
func (q *Store) OnNode(statement string) string { return q.parts.OnNode(statement) }

// OnCitus reports whether the server has Citus, and asks it once. Its error is for the text of another one.
func (q *Store) OnCitus(ctx context.Context, db DB) (bool, error) {
	switch q.Citus.Load() {
	case citusNo:
		return false, nil
	case CitusYes:
		return true, nil
	}
	var is bool
	if err := Query(ctx, db, askCitus, nil, Row(&is)); err != nil {
		return false, fmt.Errorf("asking whether the server has Citus: %w", err)
	}
	q.Learn(is)
	return is, nil
}

const askCitus = `select pg_catalog.current_setting('citus.version', true) is not null`

// Learn records whether the server has Citus, if that is not known yet.
func (q *Store) Learn(citus bool) {
	is := int32(citusNo)
	if citus {
		is = CitusYes
	}
	q.Citus.CompareAndSwap(CitusUnknown, is)
}

// The values of Store.Citus.
const (
	CitusUnknown = iota
	citusNo
	CitusYes
)

// lockTimeout sets on the node how long a transaction waits for a lock there. Citus does not pass on what is
// set on the coordinator.
const lockTimeout = `select pg_catalog.set_config('lock_timeout', $1::text, true) from onceq.meta`

// Send sends a statement of the library to db, in one of the ways above, and calls read with its rows.
func (q *Store) Send(ctx context.Context, db DB, by Way, statement string, args []any, read func(pgx.Rows) error) error {
	if k, ok := db.(Quick); ok {
		return q.quickly(ctx, k, by, statement, args, read)
	}
	if e, ok := db.(ForEffects); ok {
		db = e.DB
		if conn := e.acquire(ctx); conn != nil {
			defer conn.Release()
			db = conn
		}
	}
	if db != nil && q.Citus.Load() != citusNo && q.parts.Draws(statement) {
		citus, err := q.OnCitus(ctx, db)
		if citus {
			statement, args, err = q.parts.Draw(ctx, q, db, statement, args)
		}
		if err != nil {
			return q.Told(err)
		}
	}
	if q.Citus.Load() == CitusYes {
		statement = q.parts.OnNode(statement)
		if more, ok := strings.CutPrefix(by.settings, HotPlans); ok {
			by.settings = Reading.settings + more
		}
	}
	own := Own(db)
	if by.settings == "" || own == nil {
		return by.told(q, Query(ctx, db, q.SQL(statement), args, read))
	}
	err := own.SendBatch(ctx, q.batch(by, statement, args, read)).Close()
	if err != nil && by.begin != "" && !errors.Is(err, pgx.ErrNoRows) {
		rollBack(ctx, db)
	}
	return by.told(q, err)
}

// batch is one message with a statement, its settings, and all else that goes along.
func (q *Store) batch(by Way, statement string, args []any, read func(pgx.Rows) error) *pgx.Batch {
	batch := &pgx.Batch{}
	if by.begin != "" {
		batch.Queue(by.begin)
	}
	settings := batch.Queue(by.settings)
	if by.Clock != nil {
		settings.Query(func(rows pgx.Rows) error {
			if err := rows.Err(); err != nil {
				return err // rows that failed have no columns to ask for, and panic
			}
			columns := make([]any, len(rows.FieldDescriptions()))
			columns[0] = by.Clock
			return Row(columns...)(rows)
		})
	}
	if by.Turn != nil {
		by.Turn.queue(batch, by.Clock)
	}
	if by.Patience > 0 && q.Citus.Load() == CitusYes {
		batch.Queue(q.SQL(lockTimeout), by.limit())
	}
	batch.Queue(q.SQL(statement), args...).Query(read)
	if by.Along != nil {
		batch.Queue(q.SQL(by.Along.Statement), by.Along.Args...).Query(by.Along.Read)
	}
	if by.begin != "" {
		batch.Queue("commit")
	}
	return batch
}

// told is Store.Told, and says of a time limit that is not the way's own what to do.
func (w Way) told(q *Store, err error) error {
	err = q.Told(err)
	switch {
	case w.Patience > 0 || !OverLimit(err) || hinted(err):
		return err
	case LockedOut(err):
		return &hint{err, lockLimit}
	}
	return &hint{err, timeLimit}
}

// Told says of an error of Postgres what it means to the caller, and of a transaction that has failed before
// what to do.
func (q *Store) Told(err error) error {
	switch {
	case err == nil:
		return nil
	case sqlstate.Of(err) == "25P02" && !hinted(err):
		return &hint{err, aborted}
	}
	return q.means(q.Schema, err)
}

func hinted(err error) bool {
	var h *hint
	return errors.As(err, &h)
}

// OverLimit reports whether Postgres ended a statement because of a time limit.
func OverLimit(err error) bool {
	state := sqlstate.Of(err)
	return state == "55P03" || state == "57014"
}

// QueryRow sends a statement as it is and scans its one row. No row is pgx.ErrNoRows.
func (q *Store) QueryRow(ctx context.Context, db DB, statement string, args []any, dest ...any) error {
	return q.Send(ctx, db, AsIs, statement, args, Row(dest...))
}

// SendBare sends a statement as it is, which is a transaction by itself on a pool. If that fails there
// because a database, a role or the pool makes all transactions read-only, or gives them another isolation
// level, it is sent again with its own settings. To send them always would cost a round trip's worth of work
// for every job.
func (q *Store) SendBare(ctx context.Context, db DB, statement string, args []any, take func(pgx.Rows) error) error {
	err := q.Send(ctx, db, AsIs, statement, args, take)
	state := sqlstate.Of(err)
	if (state == "25006" || state == "40001") && Own(db) != nil && ctx.Err() == nil {
		err = q.Send(ctx, db, ForCaller, statement, args, take)
	}
	return err
}

// Guarded sends a statement the hot way and scans its one row.
func (q *Store) Guarded(ctx context.Context, db DB, statement string, args []any, dest ...any) error {
	return q.Send(ctx, db, Hot, statement, args, Row(dest...))
}

// Atomically runs fn in one transaction: a new one, which begins with the way's settings, or the caller's, if
// Opener has none to offer.
func Atomically(ctx context.Context, db DB, by Way, fn func(DB) error) error {
	begin, err := Opener(ctx, db)
	if err != nil {
		return err
	}
	return InOne(ctx, begin, db, by, fn)
}

// InOne is Atomically for a caller that has asked Opener.
func InOne(ctx context.Context, begin TxBeginner, db DB, by Way, fn func(DB) error) error {
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

// rollBack ends the transaction that a failed batch has left open on db, if db is a connection. A pool closes
// such a connection by itself.
func rollBack(ctx context.Context, db DB) {
	if _, ok := db.(*pgxpool.Pool); ok {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), EndWithin)
	defer cancel()
	_, _ = db.Exec(ctx, "rollback")
}

// Query runs a statement as it is and calls read with its rows.
func Query(ctx context.Context, db DB, statement string, args []any, read func(pgx.Rows) error) error {
	if db == nil {
		return ErrNoDB
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

// SameID reports that a job with the id exists. Citus names a part of the table, and that in the message alone.
func SameID(err *pgconn.PgError) bool {
	return err.Code == "23505" && (err.ConstraintName == "jobs_pkey" || err.ConstraintName == "" && strings.Contains(err.Message, `"jobs_pkey_`))
}

// ErrNoDB is the error of a statement for a db that is nil.
var ErrNoDB = errors.New("db is nil")

// Row reads one row. No row is pgx.ErrNoRows.
func Row(dest ...any) func(pgx.Rows) error {
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

// Leading reads the first columns of a row.
type Leading []any

// ScanRow makes it a pgx.RowScanner.
func (l Leading) ScanRow(rows pgx.Rows) error {
	return rows.Scan(append(slices.Clip(l), make([]any, len(rows.FieldDescriptions())-len(l))...)...)
}

// Each reads all rows, one after the other.
func Each(scan func(pgx.Rows) error) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		for rows.Next() {
			if err := scan(rows); err != nil {
				return err
			}
		}
		return rows.Err()
	}
}

// NoRows is for a statement of which only the error counts.
func NoRows(pgx.Rows) error { return nil }

// SQL returns a statement of the library, in which the schema is written as onceq, with the real schema's
// name.
func (q *Store) SQL(statement string) string {
	if q.Schema == "onceq" {
		return statement
	}
	if s, ok := q.statements.Load(statement); ok {
		return s.(string)
	}
	s := q.names.Replace(statement)
	q.statements.Store(statement, s)
	return s
}

// Outlast returns a context for what should not end in its midst because ctx ends: it lasts for limit, and
// after the end of ctx for as long as a cancelled handler has.
func Outlast(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	unbroken, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	stop := context.AfterFunc(ctx, func() {
		nap.Within(unbroken.Done(), EndWithin)
		cancel()
	})
	return unbroken, func() { stop(); cancel() }
}

// LockedOut reports whether a statement ended because it has waited long enough for a lock.
func LockedOut(err error) bool { return sqlstate.Of(err) == "55P03" }

// BadData reports whether Postgres refused a statement because of one of its values, or a trigger did, so that
// splitting the batch finds that value. It is false for everything that may pass: a lost connection, a standby, a
// server that does not let this role in, that only reads or has no space, a conflict, a lock, what a pooler, a
// person or a migration has done, missing tables and rights.
func BadData(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.SeverityUnlocalized != "ERROR" || sqlstate.NoTables(err) {
		return false
	}
	switch pgErr.Code[:min(2, len(pgErr.Code))] {
	case "08", "0A", "25", "26", "28", "3D", "40", "53", "55", "57", "58", "XX":
		return false
	default:
		return pgErr.Code != "42501" && pgErr.Code != "42P05"
	}
}

// Waiting is the hot way with a limit for waiting for a lock.
func Waiting(patience time.Duration) Way {
	w := Way{begin: BeginOwn, Patience: patience}
	w.settings = Hot.settings + fmt.Sprintf(`, pg_catalog.set_config('lock_timeout', '%s', true)`, w.limit())
	return w
}

// limit is the patience as Postgres reads it.
func (w Way) limit() string { return fmt.Sprintf("%dms", max(1, w.Patience.Milliseconds())) }

// hint is an error of Postgres with what to do about it, which Postgres does not say.
type hint struct {
	error
	advice string
}

func (e *hint) Error() string { return e.error.Error() + e.advice }

func (e *hint) Unwrap() error { return e.error }

// Of a time limit that is not onceq's Postgres names the limit, and of a transaction that has failed not why.
const (
	lockLimit = ": somebody has locked what this needs for longer than lock_timeout allows (onceq doctor and pg_locks name" +
		" the session); run it again, in a new transaction if this one is yours, or end that session"
	timeLimit = ": it took or waited longer than statement_timeout allows, or was cancelled; look for a lock first (onceq" +
		" doctor and pg_locks name the session), and run it again, in a new transaction if this one is yours"
	aborted = "; an earlier statement of this transaction failed: look at the error that it returned, and roll the" +
		" transaction back, or to a savepoint before that statement"
)
