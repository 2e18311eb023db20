package main

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// The service says so if the tables are missing, works if they exist, and ends well when it is told to.
func TestService(t *testing.T) {
	t.Parallel()
	bin := filepath.Join(t.TempDir(), "service")
	out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	with := func(url string) *exec.Cmd {
		cmd := exec.Command(bin)
		cmd.Env = append(os.Environ(), "DATABASE_URL="+url, "PROBES=localhost:0")
		return cmd
	}
	out, err = with(queuetest.New(t, queuetest.NoMigrations()).URL).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "migrat")

	db := queuetest.New(t)
	_, err = db.Pool.Exec(t.Context(), `create table receipts (n int)`)
	require.NoError(t, err)
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, mail.Job(receipt{7}))
	require.NoError(t, err)
	cmd := with(db.URL)
	log, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill() }()
	lines := bufio.NewScanner(log)
	for left := 1; left > 0; time.Sleep(10 * time.Millisecond) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select 1 - count(*) from receipts`).Scan(&left))
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	var said strings.Builder
	for lines.Scan() {
		said.WriteString(lines.Text() + "\n")
	}
	require.NoError(t, cmd.Wait(), said.String())
}
