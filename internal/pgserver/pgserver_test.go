package pgserver_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/pgserver"
)

// childVariable makes this test binary start a server, say where, and wait to be killed.
const childVariable = "ONCEQ_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) == "" {
		os.Exit(m.Run())
	}
	server, err := pgserver.Start(context.Background(), pgserver.Options{Own: true})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(server.URL())
	select {}
}

func start(t *testing.T, opts pgserver.Options) *pgserver.Server {
	t.Helper()
	opts.Own = true
	begin := time.Now()
	server, err := pgserver.Start(t.Context(), opts)
	require.NoError(t, err)
	t.Logf("version %d started in %v", server.Version(), time.Since(begin).Round(time.Millisecond))
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	return server
}

func setting(t *testing.T, connString, name string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), connString)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(t.Context())) }()
	var value string
	require.NoError(t, conn.QueryRow(t.Context(), "select current_setting($1)", name).Scan(&value))
	return value
}

func TestStart(t *testing.T) {
	t.Parallel()
	server := start(t, pgserver.Options{Settings: map[string]string{"max_connections": "50", "application_name": "it's a test"}})
	require.Positive(t, server.Version())
	require.True(t, server.Ours())
	require.Equal(t, "off", setting(t, server.URL(), "fsync"))
	require.Equal(t, "50", setting(t, server.URL(), "max_connections"))
	require.Equal(t, "UTF8", setting(t, server.URL(), "server_encoding"))
	require.Equal(t, "off", setting(t, server.DatabaseURL("template1"), "synchronous_commit"))
}

// Every account on the machine can reach the port, and must not get in: a superuser runs programs as the server's user
// (copy … from program).
func TestStart_TheServerWantsAPassword(t *testing.T) {
	t.Parallel()
	server := start(t, pgserver.Options{})
	for _, password := range []string{"", "postgres"} {
		config, err := pgx.ParseConfig(server.URL())
		require.NoError(t, err)
		require.NotEmpty(t, config.Password)
		require.NotContains(t, arguments(t), config.Password, "the password is in a command line, which everybody can see")
		config.Password = password
		_, err = pgx.ConnectConfig(t.Context(), config)
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "28P01", refused.Code)
	}
}

// arguments are the command lines of all processes; "" where the system has no way of showing them.
func arguments(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	var all []byte
	for _, file := range files {
		line, _ := os.ReadFile(file) // fails for a process that has ended
		all = append(all, line...)
	}
	return string(all)
}

func TestDurable(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: starts several servers that write to the disk")
	}
	t.Parallel()
	server := start(t, pgserver.Options{Durable: true})
	for _, name := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
		require.Equal(t, "on", setting(t, server.URL(), name), name)
	}
}

func TestRestart(t *testing.T) {
	t.Parallel()
	server := start(t, pgserver.Options{Durable: true})
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "create table kept (n int)")
	require.NoError(t, err)

	for _, immediate := range []bool{true, false, true} {
		_, err = conn.Exec(t.Context(), "insert into kept values (1)")
		require.NoError(t, err)
		require.NoError(t, server.Restart(immediate))
		require.Error(t, conn.Ping(t.Context()), "a connection survived the restart")
		conn, err = pgx.Connect(t.Context(), server.URL())
		require.NoError(t, err)
	}
	var n int
	require.NoError(t, conn.QueryRow(t.Context(), "select count(*) from kept").Scan(&n))
	require.Equal(t, 3, n)
	require.NoError(t, conn.Close(t.Context()))
}

func TestStopEndsServerAndIsRepeatable(t *testing.T) {
	t.Parallel()
	server := start(t, pgserver.Options{})
	require.NoError(t, server.Stop())
	require.NoError(t, server.Stop())
	_, err := pgx.Connect(t.Context(), server.URL())
	require.Error(t, err)
	require.Error(t, server.Restart(true))
}

// A killed process runs no clean-up, and yet neither the server nor its data may stay.
func TestKilledProcessLeavesNothing(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	// Not t.TempDir: the user that runs the server may be unable to enter it.
	temp, err := os.MkdirTemp("", "onceq-killed-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(temp)) })
	require.NoError(t, os.Chmod(temp, 0o777))

	child := exec.CommandContext(t.Context(), self)
	child.Env = append(os.Environ(), childVariable+"=1", "TMPDIR="+temp)
	child.Stderr = os.Stderr
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	line := bufio.NewScanner(out)
	require.True(t, line.Scan(), "the child said nothing: %v", line.Err())
	connString := line.Text()
	data := setting(t, connString, "data_directory")

	require.NoError(t, child.Process.Kill())
	require.Error(t, child.Wait())

	u, err := url.Parse(connString)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", u.Host)
		if err == nil {
			_ = conn.Close()
			return false
		}
		left, err := filepath.Glob(filepath.Join(temp, "*"))
		if err != nil || len(left) > 0 {
			return false
		}
		_, err = os.Stat(data)
		return errors.Is(err, fs.ErrNotExist)
	}, 5*time.Minute, 20*time.Millisecond, "the server or its directory is still there")
}

func TestSettingThatServerRefuses(t *testing.T) {
	t.Parallel()
	if os.Getenv(pgserver.EnvImage) != "" {
		t.Skip("a container that does not come up is noticed by its silence alone, after a minute")
	}
	_, err := pgserver.Start(t.Context(), pgserver.Options{Own: true, Settings: map[string]string{"no_such_setting": "1"}})
	require.ErrorContains(t, err, "no_such_setting")
}

func TestBinDirectoryWithoutServer(t *testing.T) {
	t.Setenv(pgserver.EnvBin, t.TempDir())
	_, err := pgserver.Start(t.Context(), pgserver.Options{Own: true})
	require.ErrorContains(t, err, pgserver.EnvBin)
}

func TestDatabaseURL(t *testing.T) {
	t.Parallel()
	const odd = `it's a "name"\ %/?`
	for _, connString := range []string{
		"postgres://user:pw@host:5432/old?sslmode=disable",
		"postgresql://user:pw@host:5432?sslmode=disable",
		"postgres://user:pw@host:5432/?dbname=old&sslmode=disable",
		"host=host port=5432 user=user password=pw dbname=old sslmode=disable",
	} {
		config, err := pgx.ParseConfig(pgserver.WithDatabase(connString, odd))
		require.NoError(t, err, connString)
		require.Equal(t, odd, config.Database, connString)
		require.Equal(t, "user", config.User, connString)
		require.Equal(t, "host", config.Host, connString)
		require.EqualValues(t, 5432, config.Port, connString)
	}
}

// pgx and libpq take a '+' of a connection string for itself, and not for a space.
func TestDatabaseURL_KeepsTheOtherSettings(t *testing.T) {
	t.Parallel()
	server := start(t, pgserver.Options{})
	u := server.URL() + "&dbname=gone&application_name=a+b&options=-c%20search_path%3D"
	require.Empty(t, setting(t, pgserver.WithDatabase(u, "template1"), "search_path"))
	require.Equal(t, "a+b", setting(t, pgserver.WithDatabase(u, "template1"), "application_name"))
}

// An application's connection string may say how large its pool is. A single connection refuses that.
func TestStart_ConnectionStringOfAPool(t *testing.T) {
	own := start(t, pgserver.Options{})
	config, err := pgx.ParseConfig(own.URL())
	require.NoError(t, err)
	for _, connString := range []string{
		own.URL() + "&pool_max_conns=5&application_name=app&pool_min_conns=1",
		fmt.Sprintf(`pool_max_conns=5 host=%s port=%d user=%s password='%s' pool_max_conn_lifetime = '1 h' dbname=%s application_name='app' pool_min_conns=1`,
			config.Host, config.Port, config.User, config.Password, config.Database),
	} {
		t.Setenv(pgserver.EnvURL, connString)
		server, err := pgserver.Start(t.Context(), pgserver.Options{})
		require.NoError(t, err)
		require.False(t, server.Ours())
		require.Equal(t, "app", setting(t, server.DatabaseURL("template1"), "application_name"))
	}
}

func TestWithoutPool(t *testing.T) {
	t.Parallel()
	for _, connString := range []string{
		"postgres://user:pw@host/db",
		"postgres://user:pw@host/db?options=-c%20pool_x%3D1&application_name=a+b",
		`host=host password='it\'s pool_max_conns=1' application_name = a\ pool_min_conns=1`,
	} {
		require.Equal(t, connString, pgserver.WithoutPool(connString))
	}
}
