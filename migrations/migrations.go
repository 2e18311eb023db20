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
// # With tern's command line
//
// The files of this directory are tern migrations. They take the schema as {{.schema}}, already quoted, and do not create
// it:
//
//	[database]
//	version_table = onceq.schema_version
//
//	[data]
//	schema = "onceq"
//
// Run "create schema onceq" first. Up and tern share the lock and the version table, so either one goes on where the other
// stopped.
//
// # With goose, golang-migrate, atlas and others
//
// [SQL] returns each migration as plain SQL. Write it into the tool's own directory once for every new version of onceq.
// The tool then counts the versions: do not use Up in the same schema.
//
//   - goose: Up below "-- +goose Up", Down below "-- +goose Down", each between "-- +goose StatementBegin" and
//     "-- +goose StatementEnd";
//   - golang-migrate: Up into 0001_onceq.up.sql, Down into 0001_onceq.down.sql;
//   - atlas: Up into a file of the versioned directory, then "atlas migrate hash"; tell declarative runs to leave the
//     schema as it is with --exclude onceq.
//
// # New versions
//
// A migration after the first one only adds, so the application of before runs on while it migrates and afterwards: migrate
// first, then deploy. A release that takes something away says so, and comes after one that does without it. docs/deploys.md has
// the rule.
//
// # PgBouncer and replicas
//
// Each migration is one transaction with a lock that ends with it, so Up works through a pooler in transaction mode. It
// needs the primary.
package migrations

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"regexp"
	"slices"
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
var ErrInTransaction = errors.New("migrations: the connection has an open transaction: give Up a connection without one")

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
	steps, err := load(schema)
	if err != nil {
		return nil, err
	}
	if conn.PgConn().TxStatus() != 'I' {
		return nil, ErrInTransaction
	}
	return upTo(ctx, conn, schema, steps)
}

func upTo(ctx context.Context, conn *pgx.Conn, schema string, steps []Migration) (applied []Migration, err error) {
	for try := 0; ; {
		did, err := step(ctx, conn, schema, steps, try)
		if errors.As(err, new(*lockError)) {
			try++
			select {
			case <-time.After(lockRest):
				continue
			case <-ctx.Done():
			}
		}
		if err != nil && try > 0 {
			return applied, fmt.Errorf("migrations: schema %q: %w (transactions had its tables locked at %d tries: look for long ones in pg_stat_activity, or give Up more time)", schema, err, try)
		}
		if err != nil {
			return applied, fmt.Errorf("migrations: schema %q: %w", schema, err)
		}
		if did == nil {
			return applied, nil
		}
		applied = append(applied, Migration{Version: did.Version, Name: did.Name})
		try = 0
	}
}

// lockError is what a migration of tables in use failed with, because it did not get a lock in time, or was the victim of a deadlock.
type lockError struct{ error }

func (e *lockError) Unwrap() error { return e.error }

// lockRest is how long the application works on between two tries to get the locks of a migration.
const lockRest = 200 * time.Millisecond

// lockPatience is how long the given try waits for each lock, from 0 on: a tenth of deadlock_timeout, in the hope that all locks
// together do not take as long as that, and a fifth more each time.
const lockPatience = `
select pg_catalog.set_config('lock_timeout', greatest(1, setting::float8 / 10::float8 * 1.2::float8 ^ $1::int::float8)::int::text, true) from pg_settings where name = 'deadlock_timeout'`

// place is what is known of a schema and of the session's role there.
type place struct {
	schema    string // quoted
	hasSchema bool
	hasTable  bool // schema_version
	hasMeta   bool
	mayRead   bool // schema_version
	mayCreate bool // in the schema, or the schema itself if it is missing
	owns      bool // schema_version, as a member of its owner too; true if it is missing
	owner     string
	role      string
	database  string
}

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// look reads that from catalogs, which every role may read.
func look(ctx context.Context, db querier, schema string) (p place, err error) {
	const read = `
select n.oid is not null, c.oid is not null, m.oid is not null, coalesce(pg_catalog.has_table_privilege(c.oid, 'select'), false),
       case when n.oid is null then pg_catalog.has_database_privilege(current_database(), 'create')
            else pg_catalog.has_schema_privilege(n.oid, 'create') end,
       coalesce(pg_catalog.pg_has_role(c.relowner, 'usage'), true), coalesce(pg_catalog.pg_get_userbyid(c.relowner)::text, ''),
       current_user::text, current_database()::text
  from (values (1)) one
  left join pg_catalog.pg_namespace n on n.nspname = $1
  left join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = 'schema_version'
  left join pg_catalog.pg_class m on m.relnamespace = n.oid and m.relname = 'meta'`
	p.schema = pgx.Identifier{schema}.Sanitize()
	err = db.QueryRow(ctx, read, schema).
		Scan(&p.hasSchema, &p.hasTable, &p.hasMeta, &p.mayRead, &p.mayCreate, &p.owns, &p.owner, &p.role, &p.database)
	return p, err
}

// version reads the version that Up or tern has noted; 0 if neither has. The role of an application may not read their table,
// and finds the version in meta.
func (p *place) version(ctx context.Context, db querier) (version int, err error) {
	table := "schema_version"
	switch {
	case !p.hasTable, !p.mayRead && !p.hasMeta:
		return 0, nil
	case !p.mayRead:
		table = "meta"
	}
	err = db.QueryRow(ctx, "select version from "+p.schema+"."+table).Scan(&version)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, fmt.Errorf("%s is empty: somebody has emptied the tables; if they are of version %d, as their owner: insert into %s.%s (version) values (%[2]d)",
			table, Version, p.schema, table)
	case err != nil:
		return 0, fmt.Errorf("read %s: %w", table, err)
	}
	return version, nil
}

// rights names the right that the role lacks for a migration.
func (p *place) rights() error {
	role := pgx.Identifier{p.role}.Sanitize()
	switch {
	case !p.owns:
		return fmt.Errorf("the tables belong to role %q, and only it or a member of it may migrate them; this is role %q", p.owner, p.role)
	case p.mayCreate:
		return nil
	case p.hasSchema:
		return fmt.Errorf("there is a migration to apply, and role %q lacks CREATE on the schema; as its owner: grant create on schema %s to %s",
			p.role, p.schema, role)
	}
	database := pgx.Identifier{p.database}.Sanitize()
	return fmt.Errorf("create the schema: role %q lacks CREATE on the database; as its owner: grant create on database %s to %s, or: create schema %s authorization %[3]s",
		p.role, database, role, p.schema)
}

// step applies the next migration and returns it, or nil if there is none to apply. Other processes wait for its lock, and read the
// version after that.
func step(ctx context.Context, conn *pgx.Conn, schema string, steps []Migration, try int) (did *Migration, err error) {
	tx, err := begin(ctx, conn)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // no effect after a commit

	p, err := look(ctx, tx, schema)
	if err != nil {
		return nil, err
	}
	version, err := p.version(ctx, tx)
	if err != nil {
		return nil, err
	}
	if version > len(steps) {
		oldest := version
		if err := tx.QueryRow(ctx, "select oldest_code from "+p.schema+".meta").Scan(&oldest); err != nil {
			return nil, fmt.Errorf("read meta: %w", err)
		}
		if oldest > len(steps) {
			return nil, &VersionError{Schema: schema, Database: version, Code: len(steps)}
		}
	}
	if version >= len(steps) {
		return nil, tx.Commit(ctx)
	}

	if err := p.rights(); err != nil {
		return nil, err
	}
	table := p.schema + ".schema_version"
	if !p.hasSchema {
		if _, err := tx.Exec(ctx, "create schema "+p.schema); err != nil {
			return nil, fmt.Errorf("create the schema: %w", err)
		}
	}
	if !p.hasTable {
		for _, command := range []string{"create table " + table + " (version integer not null primary key)", "insert into " + table + " values (0)"} {
			if _, err := tx.Exec(ctx, command); err != nil {
				return nil, fmt.Errorf("create schema_version: %w", err)
			}
		}
	}
	if version > 0 {
		if _, err := tx.Exec(ctx, lockPatience, min(try, 25)); err != nil { // 1.2^25 is a hundred
			return nil, fmt.Errorf("set lock_timeout: %w", err)
		}
	}
	next := &steps[version]
	for _, command := range commands(next.Up) {
		if _, err := tx.Exec(ctx, command); err != nil {
			if state := sqlstate.Of(err); version > 0 && (state == "55P03" || state == "40P01") {
				err = &lockError{err}
			}
			return nil, fmt.Errorf("%s: %w", next.Name, err)
		}
	}
	if _, err := tx.Exec(ctx, "update "+table+" set version = $1", next.Version); err != nil {
		return nil, fmt.Errorf("write schema_version: %w", err)
	}
	return next, tx.Commit(ctx)
}

// Current returns the version to which Up, or tern, has brought a schema; 0 if neither has worked there. It knows nothing of
// other migration tools: Queue.Check does.
func Current(ctx context.Context, conn *pgx.Conn, schema string) (version int, err error) {
	if err := checkName(schema); err != nil {
		return 0, err
	}
	p, err := look(ctx, conn, schema)
	if err == nil {
		version, err = p.version(ctx, conn)
	}
	if err != nil {
		return 0, fmt.Errorf("migrations: schema %q: %w", schema, err)
	}
	return version, nil
}

// DownTo undoes what Up has done, down to a version, and deletes the data of what it removes: at version 0 no job, no key and
// no history is left. The schema itself stays. No worker may run meanwhile. As with Up, each migration commits on its own, and a
// schema that is newer than this package is a *VersionError.
func DownTo(ctx context.Context, conn *pgx.Conn, schema string, version int) error {
	steps, err := load(schema)
	if err != nil {
		return err
	}
	if version < 0 || version > len(steps) {
		return fmt.Errorf("migrations: there is no version %d; 0 to %d is possible", version, len(steps))
	}
	if conn.PgConn().TxStatus() != 'I' {
		return ErrInTransaction
	}
	for {
		done, err := stepDown(ctx, conn, schema, steps, version)
		if err != nil {
			return fmt.Errorf("migrations: schema %q: %w", schema, err)
		}
		if done {
			return nil
		}
	}
}

// stepDown undoes the latest migration, or reports that there is none to undo.
func stepDown(ctx context.Context, conn *pgx.Conn, schema string, steps []Migration, to int) (done bool, err error) {
	tx, err := begin(ctx, conn)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // no effect after a commit
	version, err := Current(ctx, conn, schema)
	switch {
	case err != nil:
		return false, err
	case version > len(steps):
		return false, &VersionError{Schema: schema, Database: version, Code: len(steps)}
	case version <= to:
		return true, nil
	}
	if p, err := look(ctx, tx, schema); err != nil || !p.owns {
		return false, cmp.Or(err, p.rights())
	}
	last := steps[version-1]
	for _, command := range commands(last.Down) {
		if _, err := tx.Exec(ctx, command); err != nil {
			return false, fmt.Errorf("%s: %w", last.Name, err)
		}
	}
	if _, err := tx.Exec(ctx, "update "+pgx.Identifier{schema}.Sanitize()+".schema_version set version = $1", version-1); err != nil {
		return false, fmt.Errorf("write schema_version: %w", err)
	}
	return false, tx.Commit(ctx)
}

// begin opens the transaction of one migration, once no other process migrates. Read committed takes a new snapshot for each
// statement, whatever the session's default is. The files name every table with its schema: the session's own search path must
// not matter. Nor may its time limits: another process may migrate for long, and ctx says how long this one waits. Its lock_timeout
// counts for tables.
func begin(ctx context.Context, conn *pgx.Conn) (pgx.Tx, error) {
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return nil, err
	}
	const settings = `
select pg_catalog.current_setting('lock_timeout'), pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true), pg_catalog.set_config('statement_timeout', '0', true),
       case when pg_catalog.current_setting('transaction_timeout', true) <> '0' then pg_catalog.set_config('transaction_timeout', '0', true) end`
	const wait = `select pg_catalog.set_config('lock_timeout', '0', true), pg_catalog.pg_advisory_xact_lock($1), pg_catalog.set_config('lock_timeout', $2, true)`
	var patience string
	if err = tx.QueryRow(ctx, settings).Scan(&patience, nil, nil, nil); err == nil {
		if _, err = tx.Exec(ctx, wait, lock, patience); err == nil {
			return tx, nil
		}
		err = fmt.Errorf("wait for other migrations: %w", err)
	}
	_ = tx.Rollback(context.WithoutCancel(ctx))
	return nil, err
}

// List returns the migrations in order, without their SQL.
func List() []Migration {
	list, err := SQL("onceq")
	if err != nil {
		panic(err) // the files are part of this package, and its tests load them
	}
	for i := range list {
		list[i].Up, list[i].Down = "", ""
	}
	return list
}

// SQL returns the migrations in order, with their SQL for the schema. The first one creates the schema if it is
// missing. Remove that line if the schema exists and the role may not create schemas.
func SQL(schema string) ([]Migration, error) {
	list, err := load(schema)
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].Up += "\n"
		list[i].Down += "\n"
	}
	list[0].Up = "create schema if not exists " + pgx.Identifier{schema}.Sanitize() + ";\n\n" + list[0].Up
	return list, nil
}

// Grants returns the statements that give a role what onceq needs at run time, without DDL. Run them as the schema's
// owner after every migration; they may be repeated. The role reads and adds to the audit trail (actions), and cannot change or
// remove lines of it.
func Grants(schema, role string) string {
	ident, to := pgx.Identifier{schema}.Sanitize(), pgx.Identifier{role}.Sanitize()
	written := make([]string, 0, 8)
	for _, table := range tables() {
		if table != "meta" && table != "actions" {
			written = append(written, ident+"."+table)
		}
	}
	read := []string{ident + ".meta"}
	for _, view := range views() {
		read = append(read, ident+"."+view)
	}
	return strings.NewReplacer("$schema", ident, "$role", to, "$written", strings.Join(written, ", "), "$read", strings.Join(read, ", ")).Replace(
		`grant usage on schema $schema to $role;
grant select on $read to $role;
grant select, insert, update, delete on $written to $role;
grant select, insert on $schema.actions to $role;
grant usage on all sequences in schema $schema to $role;
grant execute on all functions in schema $schema to $role;
`)
}

var (
	tablePattern = regexp.MustCompile(`(?m)^(create|drop)(?: unlogged)? table (?:if (?:not )?exists )?"onceq"\.(\w+)`)
	viewPattern  = regexp.MustCompile(`(?m)^(create|drop)(?: or replace)? view (?:if exists )?"onceq"\.(\w+)`)
)

// tables returns the names of the tables that exist after all migrations, in the order of their creation.
// schema_version is not among them: it belongs to the tool that runs the migrations.
func tables() []string { return after(tablePattern) }

// views does the same for views.
func views() []string { return after(viewPattern) }

func after(pattern *regexp.Regexp) []string {
	steps, err := load("onceq")
	if err != nil {
		panic(err) // the files are part of this package, and its tests load them
	}
	var names []string
	for _, s := range steps {
		for _, match := range pattern.FindAllStringSubmatch(s.Up, -1) {
			names = slices.DeleteFunc(names, func(name string) bool { return name == match[2] })
			if match[1] == "create" {
				names = append(names, match[2])
			}
		}
	}
	return names
}

// load reads the files for a schema, after checking its name.
func load(schema string) ([]Migration, error) {
	if err := checkName(schema); err != nil {
		return nil, err
	}
	return read(files, schema)
}

// tag matches what begins and ends the text of a function that names the schema: rule_test.go compares it with the files.
var tag = regexp.MustCompile(`\$(begin_await|call|cancel|citus|emit|finish|finish_next|follow|give_back|hand_over|keep_history|statistics|take_fence|tell|wake)\$`)

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
