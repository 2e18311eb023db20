//go:build unix

package pgserver_test

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/pgserver"
)

// What the primary confirmed while it waited for its standby is there after the standby has taken over.
func TestStandby_TakesOver(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: starts several servers that write to the disk")
	}
	primary := start(t, pgserver.Options{Durable: true})
	if primary.BinDir() == "" {
		_, err := primary.Standby(t.Context(), "standby", nil, pgserver.Options{})
		require.ErrorContains(t, err, "binaries")
		return
	}
	standby, err := primary.Standby(t.Context(), "standby", nil, pgserver.Options{Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, standby.Stop()) })
	require.NotEqual(t, primary.URL(), standby.URL())
	config, err := pgx.ParseConfig(standby.URL())
	require.NoError(t, err)
	require.NotContains(t, arguments(t), config.Password, "the password is in a command line, which everybody can see")

	run := func(server *pgserver.Server, statements ...string) {
		t.Helper()
		conn, err := pgx.Connect(t.Context(), server.URL())
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close(t.Context())) }()
		for _, sql := range statements {
			_, err = conn.Exec(t.Context(), sql)
			require.NoError(t, err)
		}
	}
	run(primary, `alter system set synchronous_standby_names = 'standby'`, `select pg_reload_conf()`)
	require.Eventually(t, func() bool { return setting(t, primary.URL(), "synchronous_standby_names") == "standby" }, 5*time.Minute, 10*time.Millisecond)
	run(primary, `create table there (n int)`, `insert into there values (1)`)
	require.NoError(t, primary.Stop())
	run(standby, `select pg_promote()`, `alter system reset synchronous_standby_names`, `select pg_reload_conf()`,
		`insert into there select 1 / count(*) from there`)
}

// The data of a tablespace is copied to the given directory while the primary goes on writing.
func TestStandby_HasTheTablespaces(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: starts several servers that write to the disk")
	}
	primary := start(t, pgserver.Options{Durable: true})
	if primary.BinDir() == "" {
		t.Skip("a standby needs the server's binaries on this machine")
	}
	// Next to the server's own directories, which its user can enter.
	there, here := besideData(t, primary, "there"), besideData(t, primary, "here")
	ctx := t.Context()
	conn, err := pgx.Connect(ctx, primary.URL())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.WithoutCancel(ctx))) })
	for _, sql := range []string{
		`create tablespace other location '` + there + `'`, `create table rows (n int) tablespace other`,
		`insert into rows select generate_series(1, 10000)`,
	} {
		_, err = conn.Exec(ctx, sql)
		require.NoError(t, err)
	}
	_, err = primary.Standby(ctx, "standby", nil, pgserver.Options{Durable: true})
	require.ErrorContains(t, err, there, "no directory was named for it")

	standby, err := primary.Standby(ctx, "standby", map[string]string{there: here}, pgserver.Options{Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, standby.Stop()) })
	_, err = conn.Exec(ctx, `insert into rows select generate_series(10001, 20000)`)
	require.NoError(t, err)
	following, err := pgx.Connect(ctx, standby.URL())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, following.Close(context.WithoutCancel(ctx))) })
	require.Eventually(t, func() bool {
		var n int
		return following.QueryRow(ctx, `select count(distinct n) from rows`).Scan(&n) == nil && n == 20000
	}, 5*time.Minute, 10*time.Millisecond)
	left, err := filepath.Glob(filepath.Join(here, "*"))
	require.NoError(t, err)
	require.NotEmpty(t, left)
}

// besideData creates an empty directory that belongs to the owner of the server's data.
func besideData(t *testing.T, server *pgserver.Server, name string) string {
	t.Helper()
	data := setting(t, server.URL(), "data_directory")
	info, err := os.Stat(data)
	require.NoError(t, err)
	dir := filepath.Join(filepath.Dir(data), name)
	require.NoError(t, os.Mkdir(dir, 0o700))
	if owner, ok := info.Sys().(*syscall.Stat_t); ok && os.Geteuid() == 0 {
		require.NoError(t, os.Chown(dir, int(owner.Uid), int(owner.Gid)))
	}
	return dir
}
