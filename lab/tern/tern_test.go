// Package tern shows that tern can run the files, that migrations.Up goes on from there, and that it waits while tern runs.
// It uses tern as a library; tern's command line only calls that.
package tern

import (
	"context"
	"io/fs"
	"os"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/tern/v2/migrate"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

// files are the files that onceq embeds.
func files(t *testing.T) fs.FS {
	t.Helper()
	dir := os.DirFS("../../migrations")
	all := fstest.MapFS{}
	for _, m := range migrations.List() {
		text, err := fs.ReadFile(dir, m.Name)
		require.NoError(t, err)
		all[m.Name] = &fstest.MapFile{Data: text}
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

// Up and SQL read from the files exactly what tern runs.
func TestTheSameSQL(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"onceq", `we"ird {{.schema}}`} {
		m, err := migrate.NewMigrator(t.Context(), nil, "")
		require.NoError(t, err)
		m.Data["schema"] = pgx.Identifier{schema}.Sanitize()
		require.NoError(t, m.LoadMigrations(files(t)))
		list, err := migrations.SQL(schema)
		require.NoError(t, err)
		require.Len(t, m.Migrations, len(list))
		for i, theirs := range m.Migrations {
			up, down := theirs.UpSQL+"\n", theirs.DownSQL+"\n"
			if i == 0 {
				up = "create schema if not exists " + pgx.Identifier{schema}.Sanitize() + ";\n\n" + up
				require.Contains(t, list[i].Down, "drop schema "+pgx.Identifier{schema}.Sanitize(), "tern leaves that to whoever has made it")
				list[i].Down, _, _ = strings.Cut(list[i].Down, "do '")
			}
			require.Equal(t, migrations.Migration{Version: int(theirs.Sequence), Name: theirs.Name, Up: up, Down: down}, list[i])
		}
	}
}

func TestUpGoesOnWhereTernStopped(t *testing.T) {
	t.Parallel()
	_, conn := empty(t)
	exec(t, conn, "create schema onceq")
	tern := migrator(t, conn, files(t))
	require.NoError(t, tern.Migrate(t.Context()))
	applied, err := migrations.Apply(t.Context(), conn, "onceq")
	require.NoError(t, err)
	require.Empty(t, applied)
	require.NoError(t, tern.MigrateTo(t.Context(), 0))
	require.NoError(t, tern.Migrate(t.Context()))
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
	tern := migrator(t, conn, files(t))
	inside, goOn := make(chan struct{}), make(chan struct{})
	tern.OnStart = func(int32, string, string, string) {
		close(inside)
		<-goOn
	}
	ternDone, upDone := make(chan error, 1), make(chan error, 1)
	var applied []migrations.Migration
	go func() { ternDone <- tern.Migrate(t.Context()) }()
	<-inside
	ours := connect(t, db)
	go func() {
		var err error
		applied, err = migrations.Apply(t.Context(), ours, "onceq")
		upDone <- err
	}()
	waiting(t, connect(t, db))
	close(goOn)
	require.NoError(t, <-ternDone)
	require.NoError(t, <-upDone)
	require.Empty(t, applied)
}
