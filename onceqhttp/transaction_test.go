package onceqhttp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

// order writes a row and enqueues a job, under the client's key, then does what after says.
func order(q *onceq.Queue, after func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error) onceqhttp.TxHandler {
	return func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(r.Context(), `insert into effects values ($1)`, string(body)); err != nil {
			return err
		}
		in := onceqhttp.FromContext(r.Context())
		job := onceq.Job{Kind: "ship", Payload: string(body)}
		if in != nil {
			job.Scope, job.Key = in.Scope, in.Key
		}
		if _, err := q.Enqueue(r.Context(), tx, job); err != nil {
			return err
		}
		return after(w, r, tx)
	}
}

// left counts what a request has left in the database: rows, jobs, keys of requests.
func left(t testing.TB, db *queuetest.DB) [3]int {
	t.Helper()
	return [3]int{
		sqlOne[int](t, db, `select count(*) from effects`),
		sqlOne[int](t, db, `select count(*) from onceq.jobs`),
		sqlOne[int](t, db, `select count(*) from onceq.job_fences where class = 2`),
	}
}

func TestHandlerTx_EverythingCommitsTogetherOrNothing(t *testing.T) {
	t.Parallel()
	created := func(w http.ResponseWriter, _ *http.Request, _ pgx.Tx) error {
		w.WriteHeader(201)
		_, err := io.WriteString(w, "created")
		return err
	}
	all, nothing := [3]int{1, 1, 1}, [3]int{}
	for name, c := range map[string]struct {
		after  func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error
		status int // 0: the connection is closed
		code   string
		left   [3]int
		runs   int // of one request
	}{
		"created":                   {created, 201, "", all, 1},
		"a 4xx commits what it did": {status(409), 409, "", all, 1},
		"a 4xx behind a savepoint": {func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			err := pgx.BeginFunc(r.Context(), tx, func(tx pgx.Tx) error {
				_, _ = tx.Exec(r.Context(), `insert into effects values ('undone')`)
				return errors.New("declined")
			})
			w.WriteHeader(402)
			if err == nil {
				return errors.New("no error")
			}
			return nil
		}, 402, "", all, 1},
		"a 5xx":    {status(502), 502, "", nothing, 1},
		"too many": {status(429), 429, "", nothing, 1},
		"an error": {func(http.ResponseWriter, *http.Request, pgx.Tx) error { return errors.New("bad day") }, 500, onceqhttp.CodeRolledBack, nothing, 1},
		"a panic":  {func(http.ResponseWriter, *http.Request, pgx.Tx) error { panic("bad day") }, 0, "", nothing, 1},
		"too large": {func(w http.ResponseWriter, _ *http.Request, _ pgx.Tx) error {
			_, _ = w.Write(make([]byte, 200<<10))
			return nil
		}, 500, onceqhttp.CodeResponseTooLarge, nothing, 1},
		"large headers": {func(w http.ResponseWriter, _ *http.Request, _ pgx.Tx) error {
			w.Header().Set("X", strings.Repeat("x", 300<<10))
			return nil
		}, 500, onceqhttp.CodeResponseTooLarge, nothing, 1},
		"commits by itself": {func(_ http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			return tx.Commit(r.Context())
		}, 500, onceqhttp.CodeRolledBack, nothing, 1},
		"rolls back by itself": {func(_ http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			return tx.Rollback(r.Context())
		}, 500, onceqhttp.CodeRolledBack, nothing, 1},
		"ends the transaction by a statement": {func(_ http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			_, err := tx.Exec(r.Context(), `rollback`)
			return err
		}, 500, onceqhttp.CodeRolledBack, nothing, 1},
		"swallows an error": {func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			_, _ = tx.Exec(r.Context(), `select 1/0`)
			return created(w, r, tx)
		}, 500, onceqhttp.CodeRolledBack, nothing, 1},
		"fails at the commit": {func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			_, err := tx.Exec(r.Context(), `insert into later values (1), (1)`)
			return errors.Join(err, created(w, r, tx))
		}, 500, onceqhttp.CodeRolledBack, nothing, 1},
		"a deadlock each time": {func(_ http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			_, err := tx.Exec(r.Context(), `do $$ begin raise exception 'x' using errcode = '40P01'; end $$`)
			return err
		}, 500, onceqhttp.CodeRolledBack, nothing, 3},
		"loses its connection": {func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			_, _ = tx.Exec(r.Context(), `select pg_terminate_backend(pg_backend_pid())`)
			return created(w, r, tx)
		}, 500, onceqhttp.CodeRolledBack, nothing, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			sqlRun(t, db, effects)
			sqlRun(t, db, `create table later (n int unique deferrable initially deferred)`)
			ran := newRuns()
			s := serve(t, "POST /orders", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
				ran.next()
				return c.after(w, r, tx)
			})))
			for try := 1; try <= 2; try++ {
				a, err := ask(t, "POST", s.URL+"/orders", "k", "o-1")
				require.Equal(t, c.status == 0, err != nil)
				require.Equal(t, c.status, a.status, a.body)
				if c.code != "" {
					refused(t, a, c.status, c.code)
				}
				require.Equal(t, c.left, left(t, db))
				if c.left == all {
					require.Equal(t, try > 1, a.replayed())
					require.Equal(t, 1, ran.count())
				} else {
					require.Equal(t, try*c.runs, ran.count(), "the key is free")
				}
			}
		})
	}
}

func status(code int) func(http.ResponseWriter, *http.Request, pgx.Tx) error {
	return func(w http.ResponseWriter, _ *http.Request, _ pgx.Tx) error {
		w.WriteHeader(code)
		return nil
	}
}

func TestHandlerTx_RunsAgainWherePostgresAsksForIt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	ran := newRuns()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		_, _ = io.WriteString(w, "attempt")
		if ran.next() < 3 {
			_, err := tx.Exec(r.Context(), `do $$ begin raise exception 'x' using errcode = '40001'; end $$`)
			return err
		}
		return nil
	})))
	a := post(t, s.URL, "k", "o-1")
	require.Equal(t, 200, a.status)
	require.Equal(t, "attempt", a.body, "of the last one")
	require.Equal(t, [3]int{1, 1, 1}, left(t, db))
	require.Equal(t, "o-1", sqlOne[string](t, db, `select what from effects`), "the body is there each time")
}

func TestHandlerTx_ConcurrentDuplicatesRunOnce(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	entered, gate := make(chan struct{}, 1), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) }) // also where the test fails: the server waits for its handlers
	defer open()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		var lockTimeout string
		assert.NoError(t, tx.QueryRow(r.Context(), `show lock_timeout`).Scan(&lockTimeout))
		assert.Equal(t, "0", lockTimeout, "the handler's own statements wait as ever")
		entered <- struct{}{}
		<-gate
		w.WriteHeader(201)
		return nil
	})))
	const clients = 6
	answers := make(chan answer, clients)
	inFlight := make(chan struct{}, clients)
	for range clients {
		go func() {
			for told := false; ; {
				a, err := ask(t, "POST", s.URL, "k", "o-1")
				if err == nil && a.status == http.StatusConflict {
					assert.Equal(t, onceqhttp.CodeInFlight, a.problem(t).Code)
					assert.Equal(t, "1", a.header.Get("Retry-After"))
					if !told {
						told = true
						inFlight <- struct{}{}
					}
					continue
				}
				answers <- a
				return
			}
		}()
	}
	receive(t, entered)
	for range clients - 1 {
		receive(t, inFlight)
	}
	open()
	first := 0
	for range clients {
		a := receive(t, answers)
		require.Equal(t, 201, a.status, a.body)
		if !a.replayed() {
			first++
		}
	}
	require.Equal(t, 1, first)
	require.Equal(t, [3]int{1, 1, 1}, left(t, db))
}

func TestHandlerTx_ADuplicateRunsWhenTheFirstIsRolledBack(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	ran, entered, gate := newRuns(), make(chan struct{}, 1), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) }) // also where the test fails: the server waits for its handlers
	defer open()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		if ran.next() == 1 {
			entered <- struct{}{}
			<-gate
			return errors.New("bad day")
		}
		return nil
	})))
	first := make(chan answer, 1)
	go func() {
		a, _ := ask(t, "POST", s.URL, "k", "o-1")
		first <- a
	}()
	receive(t, entered)
	refused(t, post(t, s.URL, "k", "o-1"), 409, onceqhttp.CodeInFlight)
	open()
	refused(t, receive(t, first), 500, onceqhttp.CodeRolledBack)
	require.Equal(t, 200, post(t, s.URL, "k", "o-1").status)
	require.Equal(t, [3]int{1, 1, 1}, left(t, db))
}

func TestHandlerTx_RefusesAndLetsThroughAsHandlerDoes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	s := serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(db.Pool, order(db.Queue, status(200))))
	refused(t, post(t, s.URL, "", "a"), 400, onceqhttp.CodeKeyMissing)
	refused(t, post(t, s.URL, "k", "a", "X-Tenant", ""), 403, onceqhttp.CodeNoPrincipal)
	require.Equal(t, [3]int{}, left(t, db))
	require.Equal(t, 200, post(t, s.URL, "k", "a").status)
	refused(t, post(t, s.URL, "k", "b"), 422, onceqhttp.CodeMismatch)
	require.Equal(t, [3]int{1, 1, 1}, left(t, db))

	optional := serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{Optional: true}).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		if r.Header.Get("X-Fail") != "" {
			return errors.New("bad day")
		}
		return nil
	})))
	for range 2 {
		require.Equal(t, 200, post(t, optional.URL, "", "a").status)
	}
	require.Equal(t, [3]int{3, 3, 1}, left(t, db))
	refused(t, post(t, optional.URL, "", "a", "X-Fail", "1"), 500, onceqhttp.CodeRolledBack)
	require.Equal(t, [3]int{3, 3, 1}, left(t, db))
}

func TestHandlerTx_WithoutTheDatabaseNothingRuns(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	pool, err := pgxpool.New(t.Context(), db.URL)
	require.NoError(t, err)
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(pool, func(http.ResponseWriter, *http.Request, pgx.Tx) error {
		panic("runs")
	}))
	pool.Close()
	refused(t, post(t, s.URL, "k", ""), 503, onceqhttp.CodeUnavailable)
}

// The answer to a commit is lost: the client is told to ask again, and gets whatever is true.
func TestHandlerTx_LostCommitIsSaidToBeUncertain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	// The trigger runs inside of the commit and ends the session there.
	sqlRun(t, db, `
create table dropped (n int);
create function drop_connection() returns trigger language plpgsql as $$
begin
  perform pg_terminate_backend(pg_backend_pid());
  perform pg_sleep(60);
  return null;
end $$;
create constraint trigger t after insert on dropped deferrable initially deferred for each row execute function drop_connection()`)
	ran := newRuns()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		if ran.next() == 1 {
			_, err := tx.Exec(r.Context(), `insert into dropped values (1)`)
			return err
		}
		w.WriteHeader(201)
		return nil
	})))
	a := post(t, s.URL, "k", "o-1")
	refused(t, a, 503, onceqhttp.CodeUncertain)
	require.Equal(t, "1", a.header.Get("Retry-After"))
	require.Equal(t, 201, post(t, s.URL, "k", "o-1").status)
	require.Equal(t, [3]int{1, 1, 1}, left(t, db))
}

func TestHandlerTx_AFrozenHandlerDoesNotKeepTheKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	ran, gate := newRuns(), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) }) // also where the test fails: the server waits for its handlers
	defer open()
	entered := make(chan struct{}, 1)
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Timeout: 300 * time.Millisecond}).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		if ran.next() == 1 {
			entered <- struct{}{}
			<-gate // and does not look at its context
		}
		return nil
	})))
	first := make(chan answer, 1)
	go func() {
		a, _ := ask(t, "POST", s.URL, "k", "o-1")
		first <- a
	}()
	receive(t, entered)
	eventually(t, "the key to be free", func() bool { return post(t, s.URL, "k", "o-1").status == 200 })
	require.Equal(t, 2, ran.count())
	open()
	require.NotEqual(t, 200, receive(t, first).status)
	require.Equal(t, [3]int{1, 1, 1}, left(t, db))
}

func TestHandlerTx_GoesOnWhenTheClientLeaves(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	entered, gate := make(chan *http.Request, 1), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) }) // also where the test fails: the server waits for its handlers
	defer open()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, _ pgx.Tx) error {
		entered <- r
		<-gate
		_, _ = io.WriteString(w, "done")
		return nil
	})))
	// The server's own context of the request tells when it has noticed that the client has left.
	outer := make(chan context.Context, 1)
	inner := s.Config.Handler
	s.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case outer <- r.Context():
		default:
		}
		inner.ServeHTTP(w, r)
	})
	conn, err := net.Dial("tcp", s.Listener.Addr().String())
	require.NoError(t, err)
	_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: t\r\nIdempotency-Key: k\r\nContent-Length: 0\r\nContent-Type: application/json\r\n\r\n")
	require.NoError(t, err)
	r := receive(t, entered)
	require.NoError(t, conn.Close())
	receive(t, receive(t, outer).Done())
	require.NoError(t, r.Context().Err())
	_, ok := r.Context().Deadline()
	require.True(t, ok)
	open()
	until(t, db, `exists (select from onceq.job_fences where class = 2 and state = 3)`)
	a := post(t, s.URL, "k", "")
	require.Equal(t, "done", a.body)
	require.True(t, a.replayed())
	require.Equal(t, [3]int{1, 1, 1}, left(t, db))
}

// watched calls seen before an answer goes out.
type watched struct {
	http.ResponseWriter
	seen func()
}

func (w watched) WriteHeader(status int) {
	w.seen()
	w.ResponseWriter.WriteHeader(status)
}

// A client that is slow to read keeps neither a transaction nor a connection.
func TestHandlerTx_AnswersWhenItsTransactionHasEnded(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	pool, err := pgxpool.New(t.Context(), db.URL)
	require.NoError(t, err)
	defer pool.Close()
	m := middleware(t, db.Queue, onceqhttp.Config{MaxResponse: 10})
	h := m.HandlerTx(pool, func(w http.ResponseWriter, r *http.Request, _ pgx.Tx) error {
		body, err := io.ReadAll(r.Body)
		switch string(body) {
		case "error":
			return errors.New("bad day")
		case "5xx":
			w.WriteHeader(502)
		case "large":
			_, _ = io.WriteString(w, "12345678901")
		}
		return err
	})
	s := serve(t, "POST /", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(watched{w, func() { assert.Zero(t, pool.Stat().AcquiredConns()) }}, r)
	}))
	require.Equal(t, 200, post(t, s.URL, "k", "").status)
	require.True(t, post(t, s.URL, "k", "").replayed())
	refused(t, post(t, s.URL, "k", "other"), 422, onceqhttp.CodeMismatch)
	refused(t, post(t, s.URL, "error", "error"), 500, onceqhttp.CodeRolledBack)
	require.Equal(t, 502, post(t, s.URL, "5xx", "5xx").status)
	refused(t, post(t, s.URL, "large", "large"), 500, onceqhttp.CodeResponseTooLarge)
}

func TestHandlerTx_HeadKeepsItsLength(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(db.Pool, func(w http.ResponseWriter, r *http.Request, _ pgx.Tx) error {
		if r.URL.Path == "/named" {
			w.Header().Set("Content-Length", "1234")
			return nil
		}
		_, err := io.WriteString(w, "four")
		return err
	}))
	for path, length := range map[string]string{"/named": "1234", "/written": "4"} {
		a, err := ask(t, "HEAD", s.URL+path, "", "")
		require.NoError(t, err)
		require.Equal(t, length, a.header.Get("Content-Length"), path)
	}
}

// The key of a route that was served by Handler before a deploy, by HandlerTx after it.
func TestHandlerTx_UnderstandsTheKeysOfHandler(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	m := middleware(t, db.Queue, onceqhttp.Config{Policy: onceq.Hold()})
	before := serve(t, "POST /", m.Handler(newRuns().answering(201)))
	after := serve(t, "POST /", m.HandlerTx(db.Pool, order(db.Queue, status(200))))
	first := post(t, before.URL, "k", "o-1")
	again := post(t, after.URL, "k", "o-1")
	require.True(t, again.replayed())
	require.Equal(t, first.body, again.body)
	failing := serve(t, "POST /", m.Handler(newRuns().answering(500)))
	post(t, failing.URL, "held", "o-1")
	refused(t, post(t, after.URL, "held", "o-1"), 409, onceqhttp.CodeHeld)
	require.Equal(t, 2, left(t, db)[2])
	require.Zero(t, left(t, db)[0])
}
