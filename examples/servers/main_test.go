package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqweb"
	"github.com/onceq/onceq/queuetest"
)

var withTables = queuetest.Setup("tables", queuetest.SQL(tables))

// TestMoveProcess is the process that moves a tenant, which a test below kills. Otherwise it is skipped.
func TestMoveProcess(t *testing.T) {
	servers := os.Getenv("MOVE_SERVERS")
	if servers == "" {
		t.Skip("it is a process of another test")
	}
	f, err := open(t.Context(), strings.Fields(servers)...)
	require.NoError(t, err)
	_, err = f.move(t.Context(), "acme", f.named["a"], f.named["b"])
	require.NoError(t, err)
}

// A tenant's jobs move while orders come in and come again, and the process that moves them is killed between two of them. Each
// order is shipped once.
func TestMove(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	dbs := map[string]*queuetest.DB{"a": queuetest.New(t, withTables), "b": queuetest.New(t, withTables)}
	servers := []string{"a=" + dbs["a"].URL, "b=" + dbs["b"].URL}
	f, err := open(ctx, servers...)
	require.NoError(t, err)
	t.Cleanup(f.close)
	a, b := f.named["a"], f.named["b"]
	require.NoError(t, f.signUp(ctx, "acme", a))
	require.NoError(t, f.signUp(ctx, "globex", b))
	place := func(tenant string, id int, duplicate bool) {
		t.Helper()
		res, err := f.place(ctx, order{tenant, id})
		require.NoError(t, err)
		require.Equal(t, duplicate, res.Duplicate, "%s %d", tenant, id)
	}
	place("acme", 0, false)
	require.Equal(t, onceq.StateCompleted, dbs["a"].RunOne(a.ships()).State)
	place("acme", 1, false)
	failing := ship.Handle(func(context.Context, *onceq.Lease, order) error { return fmt.Errorf("no stock") })
	require.Equal(t, onceq.StateRetrying, dbs["a"].RunOne(failing).State) // it has begun
	for id := 2; id < 20; id++ {
		place("acme", id, false)
	}
	place("globex", 0, false)

	// The move comes to order 10 and waits for this transaction, in which somebody enqueues the same.
	tx, err := b.pool.Begin(ctx)
	require.NoError(t, err)
	_, err = b.queue.Enqueue(ctx, tx, ship.Job(order{"acme", 10}))
	require.NoError(t, err)
	mover := exec.Command(os.Args[0], "-test.run=^TestMoveProcess$")
	mover.Env = append(os.Environ(), "MOVE_SERVERS="+strings.Join(servers, " "))
	mover.Stdout, mover.Stderr = os.Stdout, os.Stderr
	require.NoError(t, mover.Start())
	kill := func() { _, _ = mover.Process.Kill(), mover.Wait() }
	t.Cleanup(kill)
	waits := func() (n int) {
		require.NoError(t, b.pool.QueryRow(ctx, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock'`).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return waits() == 1 }, 5*time.Minute, 10*time.Millisecond)
	kill()
	_, err = b.pool.Exec(ctx, `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`)
	require.NoError(t, err) // its statement would go on without it
	require.Eventually(t, func() bool { return waits() == 0 }, 5*time.Minute, 10*time.Millisecond)
	require.NoError(t, tx.Rollback(ctx))

	for id := range 10 { // two were begun on the first server, and the others have come to the second
		place("acme", id, true)
	}
	place("acme", 15, false) // it is on neither, but written down
	place("acme", 100, false)
	begun, err := f.move(ctx, "acme", a, b)
	require.NoError(t, err)
	require.Equal(t, 1, begun)
	for id := range 20 {
		place("acme", id, true)
	}
	place("acme", 100, true)
	_, err = f.move(ctx, "acme", b, a)
	require.ErrorContains(t, err, "lately")

	dbs["a"].Advance(time.Hour) // the retry
	for _, s := range f.servers {
		dbs[s.name].Drain(s.ships())
	}
	require.Equal(t, []int{0, 1}, shipped(t, a, "acme"))
	require.Equal(t, []int{2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 100}, shipped(t, b, "acme"))
	require.Equal(t, []int{0}, shipped(t, b, "globex"))

	// When the windows are over, it may go back.
	_, err = b.pool.Exec(ctx, `update tenants set came_from = null`)
	require.NoError(t, err)
	_, err = f.move(ctx, "acme", b, a)
	require.NoError(t, err)
	place("acme", 100, true) // b still knows it
	place("acme", 101, false)
	dbs["a"].Drain(a.ships())
	require.Equal(t, []int{0, 1, 101}, shipped(t, a, "acme"))
}

// One page has all servers, for those who may see it.
func TestSite(t *testing.T) {
	t.Parallel()
	f, err := open(t.Context(), "a="+queuetest.New(t, withTables).URL, "b="+queuetest.New(t, withTables).URL)
	require.NoError(t, err)
	t.Cleanup(f.close)
	require.NoError(t, f.signUp(t.Context(), "acme", f.named["b"]))
	_, err = f.place(t.Context(), order{"acme", 7})
	require.NoError(t, err)
	get := func(viewer func(*http.Request) (onceqweb.Viewer, error), path string) (int, string) {
		site, err := f.site(viewer)
		require.NoError(t, err)
		defer site.Close()
		w := httptest.NewRecorder()
		site.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w.Code, w.Body.String()
	}
	_, sum := get(onceqweb.Everybody, "/")
	require.Contains(t, sum, `<a href="./a/">a</a>`)
	require.Contains(t, sum, `<a href="./b/jobs?state=waiting">1</a>`)
	_, page := get(onceqweb.Everybody, "/b/jobs")
	require.Contains(t, page, "ship:7")
	nobody := func(*http.Request) (onceqweb.Viewer, error) { return onceqweb.Viewer{}, fmt.Errorf("no") }
	for _, path := range []string{"/", "/b/jobs"} {
		status, text := get(nobody, path)
		require.Equal(t, http.StatusForbidden, status)
		require.NotContains(t, text, "waiting")
	}
}

func shipped(t *testing.T, s *server, tenant string) []int {
	rows, err := s.pool.Query(t.Context(), `select id from shipped where tenant = $1 order by id`, tenant)
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int])
	require.NoError(t, err)
	return ids
}
