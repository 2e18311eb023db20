//go:build unix

package onceqhttp_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
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
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

const processQueue = "ONCEQHTTP_TEST_SERVER_PROCESS"

// stuck is a ResponseWriter whose answer is never sent.
type stuck struct {
	http.ResponseWriter
	pool *pgxpool.Pool
}

func (s stuck) WriteHeader(int) {
	_, _ = s.pool.Exec(context.Background(), `insert into reached values ('answer')`)
	select {}
}

// TestServerProcess is not a test of its own: the tests below start it as a process. A request with X-Hang hangs for
// ever: in its handler, after its work is done, or between the commit and the answer.
func TestServerProcess(t *testing.T) {
	raw := os.Getenv(processQueue)
	if raw == "" {
		t.Skip("only as a process of another test")
	}
	pool, q := conformance.TakeOver(t, raw)
	work := func(ctx context.Context, db onceq.DB, r *http.Request) error {
		if _, err := db.Exec(ctx, `insert into effects values ($1)`, onceqhttp.FromContext(ctx).Lease.IdempotencyKey()); err != nil {
			return err
		}
		if r.Header.Get("X-Hang") == "handler" {
			if _, err := pool.Exec(ctx, `insert into reached values ('handler')`); err != nil {
				return err
			}
			select {}
		}
		return nil
	}
	plain := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := work(r.Context(), pool, r); err != nil {
			panic(err)
		}
		w.WriteHeader(201)
		_, _ = fmt.Fprint(w, "done by ", os.Getpid())
	})
	tx := func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		err := work(r.Context(), tx, r)
		if err == nil {
			_, err = q.Enqueue(r.Context(), tx, onceq.Job{Kind: "ship", Payload: 1, Key: onceqhttp.FromContext(r.Context()).Key})
		}
		w.WriteHeader(201)
		_, _ = fmt.Fprint(w, "done by ", os.Getpid())
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /again", middleware(t, q, onceqhttp.Config{Lease: 10 * time.Second}).Handler(plain))
	mux.Handle("POST /hold", middleware(t, q, onceqhttp.Config{Lease: 10 * time.Second, Policy: onceq.Hold()}).Handler(plain))
	mux.Handle("POST /tx", middleware(t, q, onceqhttp.Config{}).HandlerTx(pool, tx))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	fmt.Println("listening:", listener.Addr())
	require.NoError(t, http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Hang") == "answer" {
			w = stuck{w, pool}
		}
		mux.ServeHTTP(w, r)
	})))
}

type process struct {
	cmd *exec.Cmd
	url string
}

func startServer(t testing.TB, db *queuetest.DB) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestServerProcess$")
	cmd.Env = append(os.Environ(), processQueue+"="+conformance.HandOver(t, db))
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	p := &process{cmd: cmd}
	t.Cleanup(p.kill)
	for lines := bufio.NewScanner(out); p.url == ""; {
		require.True(t, lines.Scan(), "the server did not come up")
		if addr, ok := strings.CutPrefix(lines.Text(), "listening: "); ok {
			p.url = "http://" + addr
		}
	}
	return p
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func TestProcess_KilledAtAnyPointRunsOnceOrReplays(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		route, point string
		effects      int // after the crash
		jobs         int
		answer       int // in the end
		code         string
		again        bool // the second process does the work
	}{
		{"/tx", "handler", 0, 0, 201, "", true},
		{"/tx", "answer", 1, 1, 201, "", false},
		{"/again", "handler", 1, 0, 201, "", true},
		{"/again", "answer", 1, 0, 201, "", false},
		{"/hold", "handler", 1, 0, 409, onceqhttp.CodeHeld, false},
		{"/hold", "answer", 1, 0, 201, "", false},
	} {
		t.Run(c.route[1:]+" in the "+c.point, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			sqlRun(t, db, effects)
			sqlRun(t, db, `create table reached (point text)`)
			first := startServer(t, db)
			gone := make(chan error, 1)
			go func() {
				_, err := ask(t, "POST", first.url+c.route, "k", "{}", "X-Hang", c.point)
				gone <- err
			}()
			until(t, db, `exists (select from reached where point = $1)`, c.point)
			first.kill()
			require.Error(t, receive(t, gone), "the client has no answer")
			until(t, db, `not exists (select from pg_stat_activity where application_name <> $1 and state like 'idle in transaction%' and datname = current_database())`, t.Name())
			require.Equal(t, c.effects, sqlOne[int](t, db, `select count(*) from effects`))
			require.Equal(t, c.jobs, sqlOne[int](t, db, `select count(*) from onceq.jobs`))

			second := startServer(t, db)
			a := post(t, second.url+c.route, "k", "{}")
			if c.point == "handler" && c.route != "/tx" {
				// Nobody can know that the process has died before the lease has expired.
				for ; a.status == 409 && a.problem(t).Code == onceqhttp.CodeInFlight; a = post(t, second.url+c.route, "k", "{}") {
					time.Sleep(50 * time.Millisecond)
				}
			}
			require.Equal(t, c.answer, a.status, a.body)
			if c.code != "" {
				refused(t, a, c.answer, c.code)
				return
			}
			require.Equal(t, !c.again, a.replayed())
			by := first
			if c.again {
				by = second
			}
			require.Equal(t, fmt.Sprint("done by ", by.cmd.Process.Pid), a.body)
			// If the same effect was sent twice, both had the same downstream key.
			require.Equal(t, 1, sqlOne[int](t, db, `select count(distinct what) from effects`))
			if c.route == "/tx" {
				require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from effects`))
				require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
			}
			again := post(t, second.url+c.route, "k", "{}")
			require.True(t, again.replayed())
			require.Equal(t, a.body, again.body)
		})
	}
}
