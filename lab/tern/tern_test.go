// Package tern shows that tern and migrations.Up can run the same files on the same database, one after the other and at
// the same time. It uses tern as a library; tern's command line only calls that.
package tern

import (
	"context"
	"io/fs"
	"os"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/tern/v2/migrate"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

// files are the files that onceq embeds. With next there is one more, as in a later release.
func files(t *testing.T, next bool) fs.FS {
	t.Helper()
	dir := os.DirFS("../../migrations")
	all := fstest.MapFS{}
	for _, m := range migrations.List() {
		text, err := fs.ReadFile(dir, m.Name)
		require.NoError(t, err)
		all[m.Name] = &fstest.MapFile{Data: text}
	}
	if next {
		all["002_later.sql"] = &fstest.MapFile{Data: []byte("create table {{.schema}}.later ();\n---- create above / drop below ----\ndrop table {{.schema}}.later;")}
	}
	return all
}

// connect returns one more connection to a test's database.
func connect(t *testing.T, db *queuetest.DB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.Background())) })
	return conn
}

func empty(t *testing.T) (*queuetest.DB, *pgx.Conn) {
	t.Helper()
	db := queuetest.New(t, queuetest.NoMigrations())
	return db, connect(t, db)
}

// migrator is tern, set up as the package comment of migrations says.
func migrator(t *testing.T, conn *pgx.Conn, files fs.FS) *migrate.Migrator {
	t.Helper()
	m, err := migrate.NewMigrator(t.Context(), conn, "onceq.schema_version")
	require.NoError(t, err)
	m.Data["schema"] = `"onceq"`
	require.NoError(t, m.LoadMigrations(files))
	return m
}

func exec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql)
	require.NoError(t, err)
}

func version(t *testing.T, conn *pgx.Conn) (v int) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(), `select version from onceq.schema_version`).Scan(&v))
	return v
}

// Up and SQL read from the files exactly what tern runs.
func TestTheSameSQL(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"onceq", `we"ird {{.schema}}`} {
		m, err := migrate.NewMigrator(t.Context(), nil, "")
		require.NoError(t, err)
		m.Data["schema"] = pgx.Identifier{schema}.Sanitize()
		require.NoError(t, m.LoadMigrations(files(t, false)))
		list, err := migrations.SQL(schema)
		require.NoError(t, err)
		require.Len(t, m.Migrations, len(list))
		for i, theirs := range m.Migrations {
			up := theirs.UpSQL + "\n"
			if i == 0 {
				up = "create schema if not exists " + pgx.Identifier{schema}.Sanitize() + ";\n\n" + up
			}
			require.Equal(t, migrations.Migration{Version: int(theirs.Sequence), Name: theirs.Name, Up: up, Down: theirs.DownSQL + "\n"}, list[i])
		}
	}
}

func TestTernGoesOnWhereUpStopped(t *testing.T) {
	t.Parallel()
	_, conn := empty(t)
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	var ran []string
	tern := migrator(t, conn, files(t, true))
	tern.OnStart = func(_ int32, name, direction, _ string) { ran = append(ran, name+" "+direction) }
	require.NoError(t, tern.Migrate(t.Context()))
	require.Equal(t, []string{"002_later.sql up"}, ran)
	require.Equal(t, migrations.Version+1, version(t, conn))

	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"), "the newer tables bear this release")
	require.Equal(t, migrations.Version+1, version(t, conn))
	require.NoError(t, tern.MigrateTo(t.Context(), migrations.Version))
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	require.NoError(t, tern.MigrateTo(t.Context(), 0))
	require.Equal(t, 0, version(t, conn))
}

func TestUpGoesOnWhereTernStopped(t *testing.T) {
	t.Parallel()
	_, conn := empty(t)
	exec(t, conn, "create schema onceq")
	tern := migrator(t, conn, files(t, false)) // makes the version table
	require.Equal(t, 0, version(t, conn))
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	require.Equal(t, migrations.Version, version(t, conn))
	require.NoError(t, tern.Migrate(t.Context()))
	require.NoError(t, tern.MigrateTo(t.Context(), 0))
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	require.NoError(t, tern.MigrateTo(t.Context(), 0))
	require.NoError(t, tern.Migrate(t.Context()))
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	require.Equal(t, migrations.Version, version(t, conn))
}

// waiting waits until a session of the database waits for an advisory lock.
func waiting(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	require.Eventually(t, func() bool {
		var n int
		require.NoError(t, conn.QueryRow(t.Context(), `
			select count(*) from pg_locks
			 where locktype = 'advisory' and not granted and database = (select oid from pg_database where datname = current_database())`).Scan(&n))
		return n == 1
	}, 5*time.Minute, 10*time.Millisecond)
}

func TestUpWaitsForTern(t *testing.T) {
	t.Parallel()
	db, conn := empty(t)
	exec(t, conn, "create schema onceq")
	tern := migrator(t, conn, files(t, false))
	inside, goOn := make(chan struct{}), make(chan struct{})
	tern.OnStart = func(int32, string, string, string) {
		close(inside)
		<-goOn
	}
	ternDone, upDone := make(chan error, 1), make(chan error, 1)
	go func() { ternDone <- tern.Migrate(t.Context()) }()
	<-inside
	ours := connect(t, db)
	go func() { upDone <- migrations.Up(t.Context(), ours, "onceq") }()
	waiting(t, connect(t, db))
	close(goOn)
	require.NoError(t, <-ternDone)
	require.NoError(t, <-upDone)
	require.Equal(t, migrations.Version, version(t, conn))
}

func TestTernWaitsForUp(t *testing.T) {
	t.Parallel()
	db, conn := empty(t)
	exec(t, conn, "create schema onceq")
	tern := migrator(t, conn, files(t, false))
	// Up waits for a table of its first file that another session is about to make.
	other := connect(t, db)
	exec(t, other, "begin; create table onceq.meta ()")
	ours := connect(t, db)
	ternDone, upDone := make(chan error, 1), make(chan error, 1)
	go func() { upDone <- migrations.Up(t.Context(), ours, "onceq") }()
	look := connect(t, db)
	require.Eventually(t, func() bool {
		var blocked bool
		require.NoError(t, look.QueryRow(t.Context(), `select $2 = any (pg_blocking_pids($1))`, ours.PgConn().PID(), other.PgConn().PID()).Scan(&blocked))
		return blocked
	}, 5*time.Minute, 10*time.Millisecond)
	go func() { ternDone <- tern.Migrate(t.Context()) }()
	waiting(t, look)
	exec(t, other, "rollback")
	require.NoError(t, <-upDone)
	require.NoError(t, <-ternDone)
	require.Equal(t, migrations.Version, version(t, conn))
}
