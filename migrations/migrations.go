// Package migrations creates onceq's tables in a database, by itself or through the migration tool that the application
// already has. onceq never runs a migration unasked.
//
//	conn, err := pgx.Connect(ctx, url)                          // the role that owns the tables
//	err = migrations.Up(ctx, conn, "onceq")                     // once in each deploy
//	_, err = conn.Exec(ctx, migrations.Grants("onceq", "shop")) // the role that the application runs as
//
// # From Go
//
// [Up] creates the schema and brings it to the newest version. It may be called at every start, and by many processes at
// the same time. The role needs CREATE on the schema, and CREATE on the database if the schema is missing. The
// application's own role needs neither, and may call Up where there is nothing to do: see [Grants].
//
// # With another tool
//
// [SQL] returns each migration as plain SQL. Write it into the tool's own directory once for every new version of onceq, and have the
// tool run each in one transaction. Each notes its version in the table meta, which is all that Up reads: where the tool has applied
// every one, Up has nothing to do. The tool counts for itself, and does not see what Up applies: use one of the two in a schema.
// "onceq migrate sql --format" prints the files for the first three, and for flyway.
//
//   - goose: Up below "-- +goose Up", Down below "-- +goose Down", each between "-- +goose StatementBegin" and
//     "-- +goose StatementEnd";
//   - golang-migrate: Up into 0001_onceq.up.sql, Down into 0001_onceq.down.sql;
//   - atlas: Up into a file of the versioned directory, then "atlas migrate hash"; tell declarative runs to leave the
//     schema as it is with --exclude onceq;
//   - tern: the files of this directory are tern migrations. They take the schema as {{.schema}}, already quoted, and do not create
//     it: run "create schema onceq" first. tern and Up take the same lock.
//
// # New versions
//
// A migration after the first one only adds, so the application of before runs on while it migrates and afterwards: migrate
// first, then deploy. A release that takes something away says so, and comes after one that does without it. docs/run/deploys.md has
// the rule.
//
// # PgBouncer and replicas
//
// Each migration is one transaction with a lock that ends with it, so Up works through a pooler in transaction mode. It
// needs the primary.
package migrations

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/sqlstate"
)

//go:embed *.sql
var files embed.FS

// Version is the newest version that this package brings a schema to.
const Version = 1

// lock is the advisory lock that tern's own commands take, so that they and Up exclude each other.
const lock = int64(9628173550095224)

// Migration is one step of the schema.
type Migration struct {
	Version int    // counts from 1
	Name    string // the file's name: "001_onceq.sql"
	Up      string // SQL of the step; empty in the result of List
	Down    string // SQL that undoes the step and deletes its data; empty in the result of List
}

// VersionError is returned by Up if a newer onceq has migrated the schema and its tables do not work with this release any
// more. Nothing was changed. Update the application. DownTo returns it for every newer schema.
type VersionError struct {
	Schema   string
	Database int // the schema's version
	Code     int // the newest version that this package knows
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("migrations: schema %q is at version %d and this release of onceq knows %d at most: update onceq",
		e.Schema, e.Database, e.Code)
}

// ErrInTransaction is returned by Up on a connection with an open transaction, which Up would have to commit.
var ErrInTransaction = errors.New("the connection has an open transaction: give Up a connection without one")

// Up creates the schema if it is missing and brings it to Version. Each migration commits on its own: after an error the
// earlier ones stay, and the next call goes on from there. The settings of the connection's session are unchanged
// afterwards. Its time limits do not count, except lock_timeout for tables: Up waits until ctx ends while another process migrates.
//
// A migration of tables that are in use waits for each of their locks for a tenth of deadlock_timeout only, 100 milliseconds by
// default: while it waits with other locks in hand, the application may be waiting for these, and Postgres could end the
// application's transaction as the victim of a deadlock. Then Up gives back all locks and tries again, with a little more patience
// each time, until ctx ends.
//
// Up changes nothing in a schema that is newer than this package. If that schema still works with this release,
// as in the middle of a deploy or after a rollback of the code, there is nothing to do; otherwise the error is a
// *VersionError.
//
// Where there is nothing to do, a role with the rights of [Grants] is enough. Otherwise the error names the right that is missing.
func Up(ctx context.Context, conn *pgx.Conn, schema string) error {
	_, err := Apply(ctx, conn, schema)
	return err
}

// Apply is Up, and returns the migrations that this call has applied, in order and without their SQL; also with an error, those that stay.
// Of several calls at the same time each returns its own.
func Apply(ctx context.Context, conn *pgx.Conn, schema string) (applied []Migration, err error) {
	list, err := load(schema)
	if err != nil {
		return nil, err
	}
	return upTo(ctx, conn, schema, list)
}

func upTo(ctx context.Context, conn *pgx.Conn, schema string, list []Migration) (applied []Migration, err error) {
	for try := 0; ; {
		did, err := step(ctx, conn, schema, list, len(list), false, try)
		if errors.As(err, new(*lockError)) {
			try++
			select {
			case <-time.After(lockRest):
				continue
			case <-ctx.Done():
			}
		}
		if err != nil && try > 0 {
			err = fmt.Errorf("%w (transactions had its tables locked at %d tries: look for long ones in pg_stat_activity, or give Up more time)", err, try)
		}
		if err != nil || did == nil {
			return applied, in(schema, err)
		}
		applied = append(applied, Migration{Version: did.Version, Name: did.Name})
		try = 0
	}
}

// in says in which schema an error was.
func in(schema string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("migrations: schema %q: %w", schema, err)
}

// lockError is what a migration of tables in use failed with, because it did not get a lock in time, or was the victim of a deadlock.
type lockError struct{ error }

func (e *lockError) Unwrap() error { return e.error }

// lockRest is how long the application works on between two tries to get the locks of a migration.
const lockRest = 200 * time.Millisecond

// lockPatience is how long the given try waits for each lock, from 0 on: a tenth of deadlock_timeout, in the hope that all locks
// together do not take as long as that, and a fifth of it more each time.
const lockPatience = `
select pg_catalog.set_config('lock_timeout', greatest(1, setting::bigint * (5 + $1::int) / 50)::text, true) from pg_settings where name = 'deadlock_timeout'`

// place is what is known of a schema, and of the session.
type place struct {
	made           bool // the schema
	version        int  // 0 without tables
	oldest         int  // the lowest version of code that works with the tables
	role, database string
}

// look reads it from catalogs that every role may read, and from the row that each migration writes.
func look(ctx context.Context, conn *pgx.Conn, schema string) (p place, err error) {
	const catalogs = `
select n.oid is not null, m.oid is not null, current_user::text, current_database()::text
  from (values (1)) one
  left join pg_catalog.pg_namespace n on n.nspname = $1
  left join pg_catalog.pg_class m on m.relnamespace = n.oid and m.relname = 'meta'`
	var migrated bool
	if err = conn.QueryRow(ctx, catalogs, schema).Scan(&p.made, &migrated, &p.role, &p.database); err != nil || !migrated {
		return p, err
	}
	meta := pgx.Identifier{schema, "meta"}.Sanitize()
	err = conn.QueryRow(ctx, "select version, oldest_code from "+meta).Scan(&p.version, &p.oldest)
	if errors.Is(err, pgx.ErrNoRows) {
		err = fmt.Errorf("the table meta is empty: somebody has emptied the tables; if they are of version %d, as their owner: insert into %s (version) values (%[1]d)", Version, meta)
	} else if err != nil {
		err = fmt.Errorf("read meta: %w", err)
	}
	return p, err
}

// lacks adds to an error what the role needs for it, if Postgres has refused a right.
func (p *place) lacks(err error, schema string) error {
	if sqlstate.Of(err) != "42501" {
		return err
	}
	role, ident := pgx.Identifier{p.role}.Sanitize(), pgx.Identifier{schema}.Sanitize()
	switch {
	case !p.made:
		return fmt.Errorf("%w: role %s lacks CREATE on the database; as its owner: grant create on database %s to %[2]s, or: create schema %[4]s authorization %[2]s",
			err, role, pgx.Identifier{p.database}.Sanitize(), ident)
	case p.version < 1:
		return fmt.Errorf("%w: role %s lacks CREATE on the schema; as its owner: grant create on schema %s to %[2]s", err, role, ident)
	}
	return fmt.Errorf("%w: only the owner of the tables or a member of it may migrate them, with CREATE on the schema; this is role %s", err, role)
}

// step applies the next migration, or undoes the latest one, until the schema is at version to. It returns the migration, or nil if there is
// nothing to do. Other processes wait for its lock, and read the version after that.
func step(ctx context.Context, conn *pgx.Conn, schema string, list []Migration, to int, undo bool, try int) (did *Migration, err error) {
	tx, err := begin(ctx, conn)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // no effect after a commit
	p, err := look(ctx, conn, schema)
	version := p.version
	switch {
	case err != nil:
		return nil, err
	case version > len(list) && (undo || p.oldest > len(list)):
		return nil, &VersionError{Schema: schema, Database: version, Code: len(list)}
	case undo && version <= to, !undo && version >= to:
		return nil, nil
	case undo:
		did = &list[version-1]
		err = run(ctx, tx, did.Down)
	case version < 1:
		did = &list[0]
		sql := did.Up
		if !p.made {
			sql = "create schema " + pgx.Identifier{schema}.Sanitize() + ";\n" + sql
		}
		err = run(ctx, tx, sql)
	default:
		did = &list[version]
		if _, err = tx.Exec(ctx, lockPatience, try); err == nil {
			err = run(ctx, tx, did.Up)
		}
		if code := sqlstate.Of(err); code == "55P03" || code == "40P01" {
			err = &lockError{err}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", did.Name, p.lacks(err, schema))
	}
	return did, tx.Commit(ctx)
}

// run sends the commands one by one: Citus refuses several at once.
func run(ctx context.Context, tx pgx.Tx, sql string) error {
	for _, command := range commands(sql) {
		if _, err := tx.Exec(ctx, command); err != nil {
			return err
		}
	}
	return nil
}

// Current returns the version of a schema's tables, whatever tool has migrated them; 0 if there are none.
func Current(ctx context.Context, conn *pgx.Conn, schema string) (version int, err error) {
	if err := checkName(schema); err != nil {
		return 0, err
	}
	p, err := look(ctx, conn, schema)
	return p.version, in(schema, err)
}

// DownTo undoes migrations, down to a version, and deletes the data of what it removes: at version 0 no job, no key and
// no history is left. The schema itself stays. No worker may run meanwhile. As with Up, each migration commits on its own, and a
// schema that is newer than this package is a *VersionError.
func DownTo(ctx context.Context, conn *pgx.Conn, schema string, version int) error {
	list, err := load(schema)
	if err != nil {
		return err
	}
	if version < 0 || version > len(list) {
		return fmt.Errorf("migrations: there is no version %d; 0 to %d is possible", version, len(list))
	}
	return downTo(ctx, conn, schema, list, version)
}

func downTo(ctx context.Context, conn *pgx.Conn, schema string, list []Migration, version int) error {
	for {
		if did, err := step(ctx, conn, schema, list, version, true, 0); err != nil || did == nil {
			return in(schema, err)
		}
	}
}

// begin opens the transaction of one migration, once no other process migrates. Read committed takes a new snapshot for each
// statement, whatever the session's default is. The files name every table with its schema: the session's own search path must
// not matter. Nor may its time limits: another process may migrate for long, and ctx says how long this one waits. Its lock_timeout
// counts for tables.
func begin(ctx context.Context, conn *pgx.Conn) (pgx.Tx, error) {
	if conn.PgConn().TxStatus() != 'I' {
		return nil, ErrInTransaction
	}
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return nil, err
	}
	// Two statements: a statement_timeout goes on for the statement that turns it off.
	const settings = `
select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true), pg_catalog.set_config('statement_timeout', '0', true),
       case when pg_catalog.current_setting('transaction_timeout', true) <> '0' then pg_catalog.set_config('transaction_timeout', '0', true) end`
	const wait = `
with session as materialized (select pg_catalog.current_setting('lock_timeout') as patience)
select pg_catalog.set_config('lock_timeout', '0', true), pg_catalog.pg_advisory_xact_lock($1), pg_catalog.set_config('lock_timeout', patience, true) from session`
	if _, err = tx.Exec(ctx, settings); err == nil {
		_, err = tx.Exec(ctx, wait, lock)
	}
	if err != nil {
		_ = tx.Rollback(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("wait for other migrations: %w", err)
	}
	return tx, nil
}

// List returns the migrations in order, without their SQL.
func List() []Migration {
	list := read("onceq")
	for i := range list {
		list[i].Up, list[i].Down = "", ""
	}
	return list
}

// SQL returns the migrations in order, with their SQL for the schema. The first one creates the schema if it is
// missing. Remove that line if the schema exists and the role may not create schemas. Its Down ends with dropping the
// schema if nothing else is in it and the role may.
func SQL(schema string) ([]Migration, error) {
	list, err := load(schema)
	if err != nil {
		return nil, err
	}
	ident := pgx.Identifier{schema}.Sanitize()
	list[0].Up = "create schema if not exists " + ident + ";\n\n" + list[0].Up
	drop := "begin drop schema " + ident + "; exception when dependent_objects_still_exist or insufficient_privilege then null; end"
	list[0].Down += "do '" + strings.ReplaceAll(drop, "'", "''") + "';\n"
	return list, nil
}

var relation = regexp.MustCompile(`(?m)^create (?:unlogged )?(table|view) "onceq"\.(\w+)`)

// Grants returns the statements that give a role what onceq needs at run time, without DDL. Run them as the schema's
// owner after every migration; they may be repeated. The role reads and adds to the audit trail (actions), and cannot change or
// remove lines of it.
func Grants(schema, role string) string {
	ident, to := pgx.Identifier{schema}.Sanitize(), pgx.Identifier{role}.Sanitize()
	var written []string
	seen := []string{ident + ".meta"}
	for _, m := range read("onceq") {
		for _, found := range relation.FindAllStringSubmatch(m.Up, -1) {
			switch name := ident + "." + found[2]; {
			case found[1] == "view":
				seen = append(seen, name)
			case found[2] != "meta" && found[2] != "actions":
				written = append(written, name)
			}
		}
	}
	return strings.NewReplacer("$schema", ident, "$role", to, "$written", strings.Join(written, ", "), "$read", strings.Join(seen, ", ")).Replace(
		`grant usage on schema $schema to $role;
grant select on $read to $role;
grant select, insert, update, delete on $written to $role;
grant select, insert on $schema.actions to $role;
grant usage on all sequences in schema $schema to $role;
grant execute on all functions in schema $schema to $role;
`)
}

// ProducerGrants returns the statements that let a role enqueue jobs and emit events by the functions of the schema (docs/use/sql.md), and
// nothing else: it sees no job but by the answer to its own call. Run them as Grants.
func ProducerGrants(schema, role string) string {
	ident, to := pgx.Identifier{schema}.Sanitize(), pgx.Identifier{role}.Sanitize()
	return strings.NewReplacer("$schema", ident, "$role", to).Replace(
		`grant usage on schema $schema to $role;
grant execute on function $schema.enqueue(text, jsonb, text, jsonb) to $role;
grant execute on function $schema.enqueue_bytes(text, bytea, text, jsonb) to $role;
grant execute on function $schema.enqueue_many(jsonb) to $role;
grant execute on function $schema.emit(text, text, jsonb) to $role;
`)
}

// tag matches what begins and ends the text of a function that names the schema: rule_test.go compares it with the files.
var tag = regexp.MustCompile(`\$(add_counts|add_each|be_present|begin_await|call|call_families|cancel|cancel_followers|cancel_job|canonical|canonical_text|check_name|check_payload|citus|claim_fence|discard|emit|emit_event|enqueue|enqueue_bytes|enqueue_either|enqueue_jobs|enqueue_many|enqueue_one|finish|finish_next|follow|give_back|go_live|hand_over|hurry|insert_members|job|job_of|keep_history|mark_members|move|owe|pause|promote|rate_of|redrive|replace_jobs|request_cancels|rescan_turn|resolve_effects|resolve_fence|resume|revoke|set_limit|settle_limits|statistics|sweep_members|take_fence|take_slots|tell|wake)\$`)

// checkName refuses the names that Postgres would refuse, truncate or reserve, and those that may end the text of a function.
func checkName(schema string) error {
	switch {
	case schema == "":
		return errors.New("migrations: the schema's name is empty")
	case len(schema) > 63:
		return fmt.Errorf("migrations: schema name %q is longer than 63 bytes", schema)
	case strings.ContainsRune(schema, 0) || !utf8.ValidString(schema):
		return fmt.Errorf("migrations: schema name %q is not valid UTF-8 without NUL", schema)
	case strings.HasPrefix(schema, "pg_"):
		return fmt.Errorf("migrations: schema name %q: Postgres keeps names that begin with pg_ for itself", schema)
	case tag.MatchString(schema):
		return fmt.Errorf("migrations: schema name %q contains %q, which means something else in the functions of the schema", schema, tag.FindString(schema))
	}
	return nil
}
