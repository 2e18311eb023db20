package onceqhttp_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

const effects = `create table effects (what text)`

// tenant reads from a test's request who sends it.
func tenant(r *http.Request) (string, error) {
	return r.Header.Get("X-Tenant"), nil
}

func middleware(t testing.TB, q *onceq.Queue, cfg onceqhttp.Config) *onceqhttp.Middleware {
	t.Helper()
	if cfg.Principal == nil {
		cfg.Principal = tenant
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	m, err := onceqhttp.New(q, cfg)
	require.NoError(t, err)
	return m
}

// serve is a real server on a real port.
func serve(t testing.TB, pattern string, h http.Handler) *httptest.Server {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(pattern, h)
	s := httptest.NewUnstartedServer(mux)
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0) // panics are part of the tests
	s.Start()
	t.Cleanup(s.Close)
	return s
}

type answer struct {
	status int
	header http.Header
	body   string
}

func (a answer) replayed() bool { return a.header.Get("Idempotent-Replayed") == "true" }

func (a answer) problem(t testing.TB) onceqhttp.Problem {
	t.Helper()
	require.Equal(t, "application/problem+json", a.header.Get("Content-Type"), a.body)
	var p onceqhttp.Problem
	require.NoError(t, json.Unmarshal([]byte(a.body), &p))
	require.Equal(t, a.status, p.Status)
	require.NotEmpty(t, p.Title)
	return p
}

// ask sends one request of tenant "t". headers are pairs that replace the defaults; an empty key sends none.
func ask(t testing.TB, method, url, key, body string, headers ...string) (answer, error) {
	t.Helper()
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	require.NoError(t, err)
	r.Header.Set("X-Tenant", "t")
	r.Header.Set("Content-Type", "application/json")
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(got)}, err
}

func post(t testing.TB, url, key, body string, headers ...string) answer {
	t.Helper()
	a, err := ask(t, "POST", url, key, body, headers...)
	require.NoError(t, err)
	return a
}

// refused requires a problem with a code.
func refused(t testing.TB, a answer, status int, code string) {
	t.Helper()
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, code, a.problem(t).Code)
	require.False(t, a.replayed())
}

func sqlOne[T any](t testing.TB, db *queuetest.DB, sql string, args ...any) (v T) {
	t.Helper()
	require.NoError(t, db.Pool.QueryRow(context.Background(), sql, args...).Scan(&v), sql)
	return v
}

func sqlRun(t testing.TB, db *queuetest.DB, sql string, args ...any) {
	t.Helper()
	_, err := db.Pool.Exec(context.Background(), sql, args...)
	require.NoError(t, err, sql)
}

// patience is how long tests wait for what must happen, however slow the machine is.
const patience = 5 * time.Minute

func until(t testing.TB, db *queuetest.DB, condition string, args ...any) {
	t.Helper()
	eventually(t, condition, func() bool { return sqlOne[bool](t, db, "select "+condition, args...) })
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(patience)
	for pause := time.Millisecond; !ok(); pause = min(2*pause, 40*time.Millisecond) {
		select {
		case <-time.After(pause):
		case <-deadline:
			t.Fatalf("waited in vain for: %s", what)
		}
	}
}

func receive[T any](t testing.TB, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		t.Fatal("waited in vain")
		panic("unreachable")
	}
}

// runs counts the calls of a handler. Each answer contains the number of its call.
type runs struct{ n chan int }

func newRuns() *runs {
	r := &runs{make(chan int, 1)}
	r.n <- 0
	return r
}

func (r *runs) next() int {
	n := <-r.n + 1
	r.n <- n
	return n
}

func (r *runs) count() int {
	n := <-r.n
	r.n <- n
	return n
}

// answering counts and answers with status and a body.
func (r *runs) answering(status int) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, in *http.Request) {
		body, _ := io.ReadAll(in.Body)
		n := r.next()
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(status)
		if status != http.StatusNoContent && status != http.StatusNotModified {
			_, _ = w.Write(append([]byte{'0' + byte(n), ':'}, bytes.TrimSpace(body)...))
		}
	})
}
