package onceqhttp_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
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

// order writes a row and enqueues a job, under the client's key, and then does what after says.
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

// left counts what a request has left in the database: rows, jobs, and keys of requests.
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
		status int // 0 if the connection is closed
		code   string
		left   [3]int
		runs   int // how often one request ran
	}{
		"created":                             {created, 201, "", all, 1},
		"a 4xx commits what it did":           {status(409), 409, "", all, 1},
		"a 4xx behind a savepoint":            {declined(false), 402, "", all, 1},
		"a savepoint whose context has ended": {declined(true), 402, "", all, 1},
		"one in another": {func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			outer, err := tx.Begin(r.Context())
			if err != nil {
				return err
			}
			ctx, cancel := context.WithCancel(r.Context())
			defer cancel()
			inner, err := outer.Begin(ctx)
			if err != nil {
				return err
			}
			_, err = inner.Exec(ctx, `insert into effects values ('undone')`)
			cancel()
			if err != nil || inner.Commit(ctx) == nil { // it may not be committed any more, and the outer one undoes it
				return errors.Join(err, errors.New("no error"))
			}
			w.WriteHeader(402)
			return outer.Rollback(r.Context())
		}, 402, "", all, 1},
		"a savepoint that cannot be committed": {func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			ctx, cancel := context.WithCancel(r.Context())
			cancel()
			sub, err := tx.Begin(r.Context())
			if err != nil {
				return err
			}
			if sub.Commit(ctx) == nil {
				return errors.New("no error")
			}
			return created(w, r, tx)
		}, 500, onceqhttp.CodeRolledBack, nothing, 1},
		"a savepoint that cannot be undone": {func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			sub, err := tx.Begin(r.Context())
			if err != nil {
				return err
			}
			rows, err := sub.Query(r.Context(), `insert into effects values ('undone') returning what`)
			if err != nil {
				return err
			}
			err = sub.Rollback(r.Context()) // the connection is busy
			rows.Close()
			if err == nil {
				return errors.New("no error")
			}
			return created(w, r, tx)
		}, 500, onceqhttp.CodeRolledBack, nothing, 1},
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

// declined undoes what it wrote by a savepoint, and answers 402. If ends is set, the savepoint's context ends before that.
func declined(ends bool) func(http.ResponseWriter, *http.Request, pgx.Tx) error {
	return func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		refusal := errors.New("declined")
		err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `insert into effects values ('undone')`); err != nil {
				return err
			}
			if ends {
				cancel()
			}
			return refusal
		})
		w.WriteHeader(402)
		if !errors.Is(err, refusal) {
			return errors.Join(err, errors.New("not declined"))
		}
		return nil
	}
}

func status(code int) func(http.ResponseWriter, *http.Request, pgx.Tx) error {
	return func(w http.ResponseWriter, _ *http.Request, _ pgx.Tx) error {
		w.WriteHeader(code)
		return nil
	}
}

// If a handler has ended the transaction with a statement of its own, nobody knows what it did. It does not run again,
// and the client is not told that nothing was done.
func TestHandlerTx_EndsTheTransactionByAStatement(t *testing.T) {
	t.Parallel()
	const (
		insert = `insert into effects values ('later')`
		closes = `select pg_terminate_backend(pg_backend_pid())`
		again  = `do $$ begin raise exception 'x' using errcode = '40001'; end $$`
	)
	for name, c := range map[string]struct {
		statements []string
		after      func(w http.ResponseWriter, err error) error
		status     int // 0 if the connection is closed
		code       string
		effects    int
	}{
		"commit, then an error":                      {[]string{`commit`}, fails, 409, onceqhttp.CodeHeld, 1},
		"commit, then a 502":                         {[]string{`commit`}, answers(502), 409, onceqhttp.CodeHeld, 1},
		"commit, then a 201":                         {[]string{`commit`}, answers(201), 409, onceqhttp.CodeHeld, 1},
		"commit, then a panic":                       {[]string{`commit`}, func(http.ResponseWriter, error) error { panic("bad day") }, 0, "", 1},
		"commit, then a lost connection":             {[]string{`commit`, closes}, answers(201), 409, onceqhttp.CodeHeld, 1},
		"commit, then a serialization failure":       {[]string{`commit`, `begin`, again}, passes, 409, onceqhttp.CodeHeld, 1},
		"commit and begin, then an error":            {[]string{`commit`, `begin`, insert}, fails, 409, onceqhttp.CodeHeld, 1},
		"commit and begin, then a 502":               {[]string{`commit and chain`, insert}, answers(502), 409, onceqhttp.CodeHeld, 1},
		"commit and begin, then a failed statement":  {[]string{`commit`, `begin`, `select 1/0`}, answers(201), 409, onceqhttp.CodeHeld, 1},
		"commit and begin, then a failed commit":     {[]string{`commit`, `begin`, `insert into later values (1), (1)`}, answers(201), 409, onceqhttp.CodeHeld, 1},
		"commit and begin, then a lost connection":   {[]string{`commit`, `begin`, closes}, fails, 409, onceqhttp.CodeHeld, 1},
		"commit and begin, then a panic":             {[]string{`commit`, `begin`, insert}, func(http.ResponseWriter, error) error { panic("bad day") }, 0, "", 1},
		"commit and begin":                           {[]string{`commit`, `begin`, insert}, answers(201), 201, "", 2},
		"rollback, then an effect":                   {[]string{`rollback`, insert}, answers(201), 409, onceqhttp.CodeHeld, 1},
		"rollback, then an effect and an error":      {[]string{`rollback`, insert}, fails, 409, onceqhttp.CodeHeld, 1},
		"rollback, then an effect and a panic":       {[]string{`rollback`, insert}, func(http.ResponseWriter, error) error { panic("bad day") }, 0, "", 1},
		"rollback and begin, undone with everything": {[]string{`rollback`, `begin`, insert}, answers(201), 500, onceqhttp.CodeRolledBack, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			sqlRun(t, db, effects)
			sqlRun(t, db, `create table later (n int unique deferrable initially deferred)`)
			ran := newRuns()
			m := middleware(t, db.Queue, onceqhttp.Config{})
			s := serve(t, "POST /", m.HandlerTx(db.Pool, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
				ran.next()
				_, err := tx.Exec(r.Context(), `insert into effects values ('first')`)
				assert.NoError(t, err)
				for _, s := range c.statements {
					_, err = tx.Exec(r.Context(), s)
				}
				return c.after(w, err)
			}))
			first, err := ask(t, "POST", s.URL, "k", "")
			require.Equal(t, c.status == 0, err != nil)
			require.Equal(t, c.status, first.status, first.body)
			require.Equal(t, c.effects, sqlOne[int](t, db, `select count(*) from effects`))
			require.Equal(t, 1, ran.count())
			sqlRun(t, db, `update onceq.job_fences set leased_until = statement_timestamp()`) // the lease expires
			second, err := ask(t, "POST", s.URL, "k", "")
			require.NoError(t, err)
			switch {
			case c.code == onceqhttp.CodeRolledBack:
				refused(t, first, c.status, c.code)
				require.Equal(t, 2, ran.count(), "the key is free")
				return
			case c.status == 201:
				require.True(t, second.replayed())
			default:
				if c.status != 0 {
					refused(t, first, c.status, c.code)
				}
				refused(t, second, 409, onceqhttp.CodeHeld)
			}
			require.Equal(t, c.effects, sqlOne[int](t, db, `select count(*) from effects`))
			require.Equal(t, 1, ran.count())
		})
	}
}

func passes(_ http.ResponseWriter, err error) error { return err }

func fails(http.ResponseWriter, error) error { return errors.New("bad day") }

func answers(status int) func(http.ResponseWriter, error) error {
	return func(w http.ResponseWriter, _ error) error {
		w.WriteHeader(status)
		return nil
	}
}

// Without a key a repeated request runs again. So no client is told to repeat one that may have been carried out, and
// the answer does not mention a key.
func TestHandlerTx_WithoutAKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	sqlRun(t, db, dropsConnection)
	ran := newRuns()
	s := serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{Optional: true}).HandlerTx(db.Pool, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		ran.next()
		statements := strings.Split(r.URL.Query().Get("run"), ";")
		for _, s := range statements {
			if _, err := tx.Exec(r.Context(), s); err != nil {
				return err
			}
		}
		return nil
	}))
	for statements, code := range map[string]string{
		`insert into dropped values (1)`:                      onceqhttp.CodeUnknown, // its commit is lost
		`insert into effects values ('1');commit`:             onceqhttp.CodeUnknown,
		`rollback;insert into effects values ('2')`:           onceqhttp.CodeUnknown,
		`insert into effects values ('3');commit;select 1/0`:  onceqhttp.CodeUnknown,
		`insert into effects values ('4');select 1/0`:         onceqhttp.CodeRolledBack,
		`insert into effects values ('5');select pg_sleep(0)`: "",
	} {
		for _, method := range []string{"POST", "GET"} {
			a, err := ask(t, method, s.URL+"/?run="+url.QueryEscape(statements), "", "")
			require.NoError(t, err)
			if code == "" {
				require.Equal(t, 200, a.status, a.body)
				continue
			}
			refused(t, a, 500, code)
			require.Empty(t, a.header.Get("Retry-After"))
			p := a.problem(t)
			require.NotContains(t, strings.ToLower(p.Title+p.Detail), "key")
			require.NotContains(t, p.Detail, "Repeat")
			require.Equal(t, code == onceqhttp.CodeRolledBack, strings.Contains(p.Detail, "Nothing was done"), statements)
		}
	}
	require.Equal(t, 12, ran.count())
	require.Equal(t, "1,1,2,2,3,3,5,5", sqlOne[string](t, db, `select string_agg(what, ',' order by what) from effects`))
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.job_fences`))

	pool, err := pgxpool.New(t.Context(), db.URL)
	require.NoError(t, err)
	s = serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{Optional: true}).HandlerTx(pool, func(http.ResponseWriter, *http.Request, pgx.Tx) error { panic("runs") }))
	pool.Close()
	a := post(t, s.URL, "", "")
	refused(t, a, 503, onceqhttp.CodeUnavailable)
	require.Equal(t, "1", a.header.Get("Retry-After"), "nothing was done, so it can be repeated")
	require.NotContains(t, strings.ToLower(a.problem(t).Title+a.problem(t).Detail), "key")
}

// The server disconnects a frozen process, with a key and without one.
func TestHandlerTx_LimitsIdling(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for timeout, want := range map[time.Duration]string{0: "30s", 20 * time.Second: "20s", 100 * 24 * time.Hour: "2147483647ms", onceq.NoTimeout: "0"} {
		s := serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{Timeout: timeout, Optional: true}).HandlerTx(db.Pool, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			var idle string
			err := tx.QueryRow(r.Context(), `show idle_in_transaction_session_timeout`).Scan(&idle)
			_, _ = io.WriteString(w, idle)
			return err
		}))
		for _, key := range []string{"k" + want, ""} {
			require.Equal(t, want, post(t, s.URL, key, "").body, "key %q", key)
		}
		a, err := ask(t, "GET", s.URL, "", "")
		require.NoError(t, err)
		require.Equal(t, want, a.body)
	}
	require.Equal(t, "0", sqlOne[string](t, db, `show idle_in_transaction_session_timeout`), "of the transaction alone")
}

// A limit of the role's or the pool's that is shorter than the Timeout stays.
func TestHandlerTx_KeepsAShorterLimitOfIdling(t *testing.T) {
	t.Parallel()
	for own, want := range map[string]string{"5s": "5s", "1500ms": "1500ms", "19999": "19999ms", "1min": "20s", "2h": "20s", "0": "20s"} {
		db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = own
		}))
		s := serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{Timeout: 20 * time.Second}).HandlerTx(db.Pool, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			var idle string
			err := tx.QueryRow(r.Context(), `show idle_in_transaction_session_timeout`).Scan(&idle)
			_, _ = io.WriteString(w, idle)
			return err
		}))
		require.Equal(t, want, post(t, s.URL, "k", "").body, own)
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
	open := sync.OnceFunc(func() { close(gate) }) // even if the test fails: the server waits for its handlers
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
	open := sync.OnceFunc(func() { close(gate) }) // even if the test fails: the server waits for its handlers
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
	pool, err := pgxpool.NewWithConfig(t.Context(), db.Pool.Config())
	require.NoError(t, err)
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(pool, func(http.ResponseWriter, *http.Request, pgx.Tx) error {
		panic("runs")
	}))
	pool.Close()
	refused(t, post(t, s.URL, "k", ""), 503, onceqhttp.CodeUnavailable)
}

// dropsConnection creates a trigger that runs inside the commit and ends the session there.
const dropsConnection = `
create table dropped (n int);
create function drop_connection() returns trigger language plpgsql as $$
begin
  perform pg_terminate_backend(pg_backend_pid());
  perform pg_sleep(60);
  return null;
end $$;
create constraint trigger t after insert on dropped deferrable initially deferred for each row execute function drop_connection()`

// The answer to a commit is lost. The client is told to ask again, and then gets the truth.
func TestHandlerTx_LostCommitIsSaidToBeUncertain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	sqlRun(t, db, dropsConnection)
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

// A commit that was never sent leaves no doubt. This holds without a key too, although nothing notices earlier that the
// time is up.
func TestHandlerTx_TimeIsUpBeforeTheCommit(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	config := onceqhttp.Config{Optional: true, Timeout: 10 * time.Second} // enough time to begin, even on a busy machine
	s := serve(t, "POST /", middleware(t, db.Queue, config).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		<-r.Context().Done()
		return nil
	})))
	refused(t, post(t, s.URL, "", "o-1"), 500, onceqhttp.CodeRolledBack)
	refused(t, post(t, s.URL, "k", "o-1"), 500, onceqhttp.CodeRolledBack)
	require.Equal(t, [3]int{0, 0, 0}, left(t, db))
}

func TestHandlerTx_AFrozenHandlerDoesNotKeepTheKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	ran, gate := newRuns(), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) }) // even if the test fails: the server waits for its handlers
	defer open()
	entered := make(chan struct{}, 1)
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Timeout: 10 * time.Second}).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		if ran.next() == 1 {
			entered <- struct{}{}
			<-gate // and ignores its context
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
	open := sync.OnceFunc(func() { close(gate) }) // even if the test fails: the server waits for its handlers
	defer open()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(db.Pool, order(db.Queue, func(w http.ResponseWriter, r *http.Request, _ pgx.Tx) error {
		entered <- r
		<-gate
		_, _ = io.WriteString(w, "done")
		return nil
	})))
	r := leave(t, s, entered)
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

// A key with an unknown outcome is held once and stays held: the transaction that found it commits the hold.
func TestHandlerTx_HoldsOnce(t *testing.T) {
	t.Parallel()
	held := make(chan onceq.Event, 10)
	db := queuetest.New(t, queuetest.Config(onceq.Config{Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
		if e.Type == onceq.EventHeld {
			held <- e
		}
	})}))
	m := middleware(t, db.Queue, onceqhttp.Config{Policy: onceq.Hold()})
	before := serve(t, "POST /", m.Handler(newRuns().answering(500)))
	after := serve(t, "POST /", m.HandlerTx(db.Pool, status(200)))
	post(t, before.URL, "k", "")
	for range 3 {
		refused(t, post(t, after.URL, "k", ""), 409, onceqhttp.CodeHeld)
	}
	require.Equal(t, 6, sqlOne[int](t, db, `select state from onceq.job_fences where key = 'k'`))
	require.Equal(t, "k", receive(t, held).Key)
	require.Empty(t, held)
}

// watched calls seen before an answer is sent.
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
	pool, err := pgxpool.NewWithConfig(t.Context(), db.Pool.Config())
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

// The key of a route that Handler served before a deploy and HandlerTx serves after it.
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

// Clients that send slowly hold no connection, and what they send is limited in size, with a key and without one.
func TestHandlerTx_SlowAndLargeBodiesWithoutAKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, effects)
	config := db.Pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = 1, 0, 0
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	// No time limit: if a slow client held a connection, it would hold it for ever.
	m := middleware(t, db.Queue, onceqhttp.Config{Optional: true, MaxRequest: 10, Timeout: onceq.NoTimeout})
	s := serve(t, "/", m.HandlerTx(pool, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		if r.ContentLength != int64(len(body)) {
			return errors.New("another length")
		}
		_, err = tx.Exec(r.Context(), `insert into effects values ($1)`, string(body))
		return err
	}))
	for _, method := range []string{"POST", "GET"} {
		conn, err := net.Dial("tcp", s.Listener.Addr().String())
		require.NoError(t, err)
		defer conn.Close()
		_, err = io.WriteString(conn, method+" / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
		require.NoError(t, err)
		answers := bufio.NewReader(conn)
		line, err := answers.ReadString('\n') // the middleware has begun to read
		require.NoError(t, err)
		require.Equal(t, "HTTP/1.1 100 Continue\r\n", line)
		require.Equal(t, 200, post(t, s.URL, "", "quick").status, "the only connection is free")
		_, err = io.WriteString(conn, "4\r\nslow\r\n0\r\n\r\n")
		require.NoError(t, err)
		rest, err := io.ReadAll(answers)
		require.NoError(t, err)
		require.Contains(t, string(rest), "HTTP/1.1 200 ")

		a, err := ask(t, method, s.URL, "", "12345678901")
		require.NoError(t, err)
		refused(t, a, 413, onceqhttp.CodeRequestTooLarge)
		require.NotContains(t, strings.ToLower(a.problem(t).Detail), "key")
		a, err = ask(t, method, s.URL, "", "1234567890")
		require.NoError(t, err)
		require.Equal(t, 200, a.status, a.body)
	}
	require.Equal(t, "1234567890,1234567890,quick,quick,slow,slow", sqlOne[string](t, db, `select string_agg(what, ',' order by what) from effects`))
}
