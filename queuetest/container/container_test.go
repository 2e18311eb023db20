package container_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/queuetest"
	_ "github.com/onceq/onceq/queuetest/container"
)

const childVariable = "ONCEQ_CONTAINER_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(pgserver.EnvImage) == "" {
		_ = os.Setenv(pgserver.EnvImage, "postgres:18-alpine") // these tests are about containers, whatever other servers there are
	}
	_ = os.Unsetenv(pgserver.EnvBin)
	_ = os.Unsetenv(pgserver.EnvURL)
	if os.Getenv(childVariable) != "" {
		server, err := pgserver.Start(context.Background(), pgserver.Options{})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(server.URL())
		select {}
	}
	os.Exit(m.Run())
}

// docker gives a server in a container. scripts/container-test.sh provides a Docker daemon and an image.
func docker(t *testing.T, opts pgserver.Options) *pgserver.Server {
	t.Helper()
	server, err := pgserver.Start(t.Context(), opts)
	if errors.Is(err, pgserver.ErrNoDocker) {
		t.Skip("no Docker daemon answers; make test-container starts one")
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	return server
}

// This runs in a process of its own, because testcontainers looks up the daemon's address only once.
func TestWithoutDockerTheErrorSaysWhatToDo(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	child := exec.CommandContext(t.Context(), self)
	child.Env = append(os.Environ(), childVariable+"=1", "DOCKER_HOST=unix://"+t.TempDir()+"/none.sock")
	said, err := child.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(said), pgserver.ErrNoDocker.Error())
	require.Contains(t, string(said), pgserver.EnvURL)
}

func TestQueuetestUsesTheContainer(t *testing.T) {
	docker(t, pgserver.Options{})
	db := queuetest.New(t)
	var directory string
	require.NoError(t, db.Pool.QueryRow(t.Context(), "show data_directory").Scan(&directory))
	require.Equal(t, "/dev/shm/onceq", directory)
}

// A restarted server has the same URL and everything that was committed.
func TestRestart(t *testing.T) {
	server := docker(t, pgserver.Options{Durable: true})
	ctx := t.Context()
	connect := func() *pgx.Conn {
		conn, err := pgx.Connect(ctx, server.URL())
		require.NoError(t, err)
		return conn
	}
	conn := connect()
	_, err := conn.Exec(ctx, "create table kept (n int)")
	require.NoError(t, err)
	for i, immediate := range []bool{false, true} {
		_, err = conn.Exec(ctx, "insert into kept values ($1)", i)
		require.NoError(t, err)
		require.NoError(t, server.Restart(immediate))
		require.Error(t, conn.Ping(ctx))
		conn = connect()
		var n int
		require.NoError(t, conn.QueryRow(ctx, "select count(*) from kept").Scan(&n))
		require.Equal(t, i+1, n)
	}
	require.NoError(t, conn.Close(ctx))
	require.NoError(t, server.Stop())
	require.NoError(t, server.Stop())
	require.Error(t, server.Restart(true))
}

// A killed process runs no clean-up. Its container must not stay all the same.
func TestKilledProcessLeavesNothing(t *testing.T) {
	docker(t, pgserver.Options{})
	self, err := os.Executable()
	require.NoError(t, err)
	child := exec.CommandContext(t.Context(), self)
	child.Env = append(os.Environ(), childVariable+"=1")
	child.Stderr = os.Stderr
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	line := bufio.NewScanner(out)
	require.True(t, line.Scan(), "the child said nothing: %v", line.Err())
	u, err := url.Parse(line.Text())
	require.NoError(t, err)
	require.NoError(t, child.Process.Kill())
	require.Error(t, child.Wait())
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", u.Host)
		if err == nil {
			_ = conn.Close()
		}
		return err != nil
	}, 5*time.Minute, 20*time.Millisecond, "the container is still there")
}
