package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
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
	"github.com/onceq/onceq/queuetest"
)

// While top and the page look, the server restarts, well and badly, and all connections are cut again and again. Both say that they are
// behind and come back. Neither ever holds a lock that a worker waits for, or a transaction in which nothing happens.
func TestRestarts(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: it restarts a server, again and again")
	}
	t.Parallel()
	server, err := pgserver.Start(t.Context(), pgserver.Options{Own: true, Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	require.NoError(t, conn.Close(t.Context()))
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	q, err := onceq.New(pool, nil)
	require.NoError(t, err)
	// What is only a warning wakes nobody at night. (Other tests' servers are not safe from crashes, which is worse.)
	require.Equal(t, codeFindings, do(t, server.URL(), "doctor").code, "no worker is there")
	require.NotContains(t, fine(t, server.URL(), "doctor", "--level", "bad"), "warning ")
	require.Equal(t, true, asJSON(t, server.URL(), "doctor", "--level", "bad")["ok"])

	_, err = q.Enqueue(t.Context(), pool, onceq.Job{Kind: "k", Queue: "billing", Payload: 1})
	require.NoError(t, err)

	p, url := newProxy(t, &queuetest.DB{URL: server.URL()})
	begin := func(args ...string) (c *exec.Cmd, out io.Reader) {
		c = command(t, url, args...)
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
	page := func() string {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, strings.TrimSpace(address), nil)
		require.NoError(t, err)
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		defer func() { _ = answer.Body.Close() }()
		text, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, answer.StatusCode, "%s", text)
		require.Contains(t, string(text), "billing")
		return string(text)
	}
	behind := func() bool { return strings.Contains(page(), "These figures are") }
	back := func() {
		t.Helper()
		topUntil("queues")
		require.Eventually(t, func() bool { return !behind() }, 5*time.Minute, 50*time.Millisecond)
	}
	back()

	for _, immediate := range []bool{false, true} {
		seen := make(chan bool) // top may stand still over a whole restart
		restarted := make(chan error, 1)
		go func() {
			for {
				if err := server.Restart(immediate); err != nil {
					restarted <- err
					return
				}
				select {
				case <-seen:
					restarted <- nil
					return
				case <-time.After(5 * time.Second):
				}
			}
		}()
		topUntil("error")
		close(seen)
		require.NoError(t, <-restarted)
		back()
	}

	p.down()
	topUntil("error")
	require.Eventually(t, behind, 5*time.Minute, 50*time.Millisecond)
	p.up()
	back()

	// Cut while they look. What they hold is what a reader holds.
	watch := func(ctx context.Context) {
		var n int
		require.NoError(t, pool.QueryRow(ctx, `
select count(*)
  from pg_stat_activity a left join pg_locks l on l.pid = a.pid and l.granted
 where a.application_name = 'onceq'
   and (a.state like 'idle in%' and a.state_change < statement_timestamp() - interval '1 second'
        or l.locktype in ('relation', 'tuple', 'transactionid', 'advisory') and l.mode <> 'AccessShareLock')`).Scan(&n))
		require.Zero(t, n)
	}
	pool.Reset()
	cuts := 0
	for began := time.Now(); cuts < 10 && time.Since(began) < 5*time.Minute; {
		page()
		watch(t.Context())
		var n int
		require.NoError(t, pool.QueryRow(t.Context(), `select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = 'onceq'`).Scan(&n))
		cuts += n
	}
	require.GreaterOrEqual(t, cuts, 10)
	back()
	for _, c := range []*exec.Cmd{top, ui} {
		require.NoError(t, c.Process.Signal(os.Interrupt))
	}
	_, _ = io.Copy(io.Discard, looks.Buffered())
	require.NoError(t, top.Wait())
	require.NoError(t, ui.Wait())
}
