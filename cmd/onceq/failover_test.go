//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/migrations"
)

// The primary dies and its standby takes over. Top, the page and a worker have both addresses. They come back by themselves, and the worker
// does what was enqueued before and after.
func TestFailover(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: it starts a primary and a standby")
	}
	t.Parallel()
	primary, err := pgserver.Start(t.Context(), pgserver.Options{Own: true, Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, primary.Stop()) })
	if primary.BinDir() == "" {
		t.Skip("a standby needs the server's binaries on this machine")
	}
	conn, err := pgx.Connect(t.Context(), primary.URL())
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	standby, err := primary.Standby(t.Context(), "standby", nil, pgserver.Options{Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, standby.Stop()) })
	_, err = conn.Exec(t.Context(), `alter system set synchronous_standby_names = 'standby'`) // so that it has what was committed
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), `select pg_reload_conf()`)
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))

	first, err := url.Parse(primary.URL())
	require.NoError(t, err)
	second, err := url.Parse(standby.URL())
	require.NoError(t, err)
	first.Host += "," + second.Host
	values := first.Query()
	values.Set("target_session_attrs", "read-write")
	values.Set("connect_timeout", "30")
	first.RawQuery = values.Encode()
	both := first.String()

	pool, err := pgxpool.New(t.Context(), both)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	kind := onceq.Kind[string]{Name: "k", Queue: "billing"}
	done := make(chan string, 10)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, kind.Handle(func(_ context.Context, _ *onceq.Lease, name string) error {
		done <- name
		return nil
	}))
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()

	begin := func(args ...string) (*exec.Cmd, io.Reader) {
		c := command(t, both, args...)
		pipe, err := c.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		return c, pipe
	}
	top, out := begin("top", "--json", "--every", "500ms")
	looks := json.NewDecoder(out)
	topUntil := func(what string) {
		t.Helper()
		for {
			var line map[string]any
			require.NoError(t, looks.Decode(&line))
			if line[what] != nil {
				return
			}
		}
	}
	ui, out := begin("ui")
	address, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	behind := func() bool {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, strings.TrimSpace(address), nil)
		require.NoError(t, err)
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		defer func() { _ = answer.Body.Close() }()
		text, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, answer.StatusCode, "%s", text)
		return strings.Contains(string(text), "These figures are")
	}
	_, err = q.Enqueue(t.Context(), pool, kind.Job("before"))
	require.NoError(t, err)
	require.Equal(t, "before", <-done)
	later := kind.Job("late")
	later.Delay = time.Second
	_, err = q.Enqueue(t.Context(), pool, later) // due when there may be no server
	require.NoError(t, err)
	topUntil("queues")
	require.Eventually(t, func() bool { return !behind() }, 5*time.Minute, 50*time.Millisecond)

	require.NoError(t, primary.Stop())
	topUntil("error")
	require.Eventually(t, behind, 5*time.Minute, 50*time.Millisecond)
	conn, err = pgx.Connect(t.Context(), standby.URL())
	require.NoError(t, err)
	for _, statement := range []string{`alter system reset synchronous_standby_names`, `select pg_reload_conf()`, `select pg_promote()`} {
		_, err = conn.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	require.NoError(t, conn.Close(t.Context()))
	topUntil("queues")
	require.Eventually(t, func() bool { return !behind() }, 5*time.Minute, 50*time.Millisecond)
	require.Eventually(t, func() bool {
		_, err = q.Enqueue(t.Context(), pool, kind.Job("after"))
		return err == nil
	}, 5*time.Minute, 50*time.Millisecond)
	for seen := map[string]bool{}; !seen["after"] || !seen["late"]; seen[<-done] = true {
	}

	stop()
	require.NoError(t, <-ended)
	for _, c := range []*exec.Cmd{top, ui} {
		require.NoError(t, c.Process.Signal(os.Interrupt))
	}
	_, _ = io.Copy(io.Discard, looks.Buffered())
	require.NoError(t, top.Wait())
	require.NoError(t, ui.Wait())
}
