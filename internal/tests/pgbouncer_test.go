package tests

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/queuetest"
)

// pgbouncer starts a PgBouncer in transaction mode in front of the test's database and returns its port. It has fewer
// server connections than clients, so that code which relies on a session soon meets somebody else's. It has more of them
// than handlers, because each handler may hold one in its transaction while Once needs another.
func pgbouncer(t *testing.T, db *queuetest.DB) uint16 {
	t.Helper()
	bin := os.Getenv("ONCEQ_TEST_PGBOUNCER") // scripts/pgbouncer.sh
	if bin == "" {
		for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} {
			if path, err := exec.LookPath(name); err == nil {
				bin = path
			}
		}
	}
	if bin == "" {
		t.Skip("no pgbouncer on this machine; make test installs it")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := uint16(listener.Addr().(*net.TCPAddr).Port)
	require.NoError(t, listener.Close())

	to := db.Pool.Config().ConnConfig
	dir, err := os.MkdirTemp("", "onceq-pgbouncer-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	auth := "scram-sha-256"
	if to.Password == "" {
		auth = "trust" // as the server does
	}
	ini, users := filepath.Join(dir, "pgbouncer.ini"), filepath.Join(dir, "users")
	require.NoError(t, os.WriteFile(ini, []byte(fmt.Sprintf(`
[databases]
%[1]s = host=%[2]s port=%[3]d dbname=%[1]s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %[4]d
unix_socket_dir =
auth_type = %[6]s
auth_file = %[5]s
pool_mode = transaction
default_pool_size = 6
max_client_conn = 100
ignore_startup_parameters = search_path
`, to.Database, to.Host, to.Port, port, users, auth)), 0o600))
	require.NoError(t, os.WriteFile(users, fmt.Appendf(nil, "%q %q\n", to.User, to.Password), 0o600))
	require.NoError(t, pgserver.ToNobody(dir)) // the user it runs as
	args := []string{ini}
	if os.Getuid() == 0 {
		args = []string{"-u", "nobody", ini}
	}
	var log bytes.Buffer // read only after the process has ended
	cmd := exec.Command(bin, args...)
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	exited := make(chan struct{})
	go func() { defer close(exited); _ = cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGKILL)
		<-exited
		if t.Failed() {
			t.Logf("pgbouncer: %s", log.String())
		}
	})
	require.Eventually(t, func() bool {
		c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), patience)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, patience, 10*time.Millisecond, "pgbouncer does not answer")
	return port
}

// Everything works behind PgBouncer in transaction mode, in those modes of pgx that pgx itself supports there with any
// version of PgBouncer: no prepared statement outlives its transaction.
func TestPgBouncer_MainPathsInTransactionMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			_, err := db.Pool.Exec(t.Context(), `create schema app; create table app.effects (job bigint, name text)`)
			require.NoError(t, err)
			port := pgbouncer(t, db)
			config := db.Pool.Config()
			config.ConnConfig.Host, config.ConnConfig.Port, config.ConnConfig.Fallbacks = "127.0.0.1", port, nil
			config.ConnConfig.TLSConfig = nil
			config.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(context.Background(), config)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			mainPaths(t, db, pool)
		})
	}
}
