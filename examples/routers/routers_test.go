package routers_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/routers"
	"github.com/onceq/onceq/examples/routers/withecho"
	"github.com/onceq/onceq/examples/routers/withgin"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

func TestMain(m *testing.M) {
	gin.SetMode(gin.ReleaseMode)
	// Panics and refusals are part of the tests.
	gin.DefaultErrorWriter = io.Discard
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

var all = map[string]struct {
	serve   func(*pgxpool.Pool, *onceq.Queue, routers.Shop) (http.Handler, error)
	pattern string // the pattern of the charges' route
}{
	"echo": {withecho.New, "/orders/:id/charges"},
	"gin":  {withgin.New, "/orders/:id/charges"},
}

// shop is the shop of one test, served by one router on a real port.
type shop struct {
	*queuetest.DB
	url     string
	charges atomic.Int64
	refunds atomic.Int64
	charge  func(ctx context.Context, order string) error // what happens before a charge is made
	place   func() error                                  // after an order is written
}

// each runs a test with each router.
func each(t *testing.T, test func(t *testing.T, s *shop, pattern string)) {
	t.Parallel()
	for name, router := range all {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &shop{DB: queuetest.New(t)}
			_, err := s.Pool.Exec(t.Context(), `create table orders (id int generated always as identity, amount int check (amount > 0))`)
			require.NoError(t, err)
			h, err := router.serve(s.Pool, s.Queue, routers.Shop{
				Place: func(ctx context.Context, tx pgx.Tx, o *routers.Order) error {
					err := tx.QueryRow(ctx, `insert into orders (amount) values ($1) returning id`, o.Amount).Scan(&o.ID)
					if err == nil && s.place != nil {
						err = s.place()
					}
					return err
				},
				Charge: func(ctx context.Context, order string) (routers.Charge, error) {
					s.charges.Add(1)
					if s.charge != nil {
						if err := s.charge(ctx, order); err != nil {
							return routers.Charge{}, err
						}
					}
					return routers.Charge{ID: onceqhttp.FromContext(ctx).Lease.IdempotencyKey()}, nil
				},
				Refund: func(context.Context, string) error {
					s.refunds.Add(1)
					return nil
				},
			})
			require.NoError(t, err)
			server := httptest.NewServer(h)
			t.Cleanup(server.Close)
			s.url = server.URL
			test(t, s, router.pattern)
		})
	}
}

type answer struct {
	status int
	header http.Header
	body   string
}

// ask sends a user's request over a connection of its own. An empty key sends none.
func (s *shop) ask(t *testing.T, user, path, key, body string) answer {
	t.Helper()
	a, err := s.try(user, path, key, body)
	require.NoError(t, err)
	return a
}

func (s *shop) try(user, path, key, body string) (answer, error) {
	r, err := http.NewRequest("POST", s.url+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	r.SetBasicAuth(user, "secret")
	r.Header.Set("Content-Type", "application/json")
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 2 * time.Minute}).Do(r)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	resp.Header.Del("Date")
	return answer{resp.StatusCode, resp.Header, string(got)}, err
}

// replayed requires that again is the first answer, with each header and byte, and says that it is a replay.
func replayed(t *testing.T, first, again answer) {
	t.Helper()
	require.Empty(t, first.header.Get("Idempotent-Replayed"))
	require.Equal(t, "true", again.header.Get("Idempotent-Replayed"), "%+v", again)
	again.header.Del("Idempotent-Replayed")
	require.Equal(t, first, again)
}

func refused(t *testing.T, a answer, status int, code string) {
	t.Helper()
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, "application/problem+json", a.header.Get("Content-Type"))
	var p onceqhttp.Problem
	require.NoError(t, json.Unmarshal([]byte(a.body), &p))
	require.Equal(t, code, p.Code)
}

func (s *shop) count(t *testing.T, from string) (n int) {
	t.Helper()
	require.NoError(t, s.Pool.QueryRow(t.Context(), "select count(*) from "+from).Scan(&n))
	return n
}

func TestRouters_TheFirstAnswerIsReplayed(t *testing.T) {
	each(t, func(t *testing.T, s *shop, _ string) {
		s.charge = func(_ context.Context, order string) error {
			switch order {
			case "404":
				return routers.ErrNoOrder
			}
			return nil
		}
		for path, want := range map[string]int{"/orders/1/charges": 201, "/orders/404/charges": 404, "/orders/1/refunds": 204} {
			first := s.ask(t, "ada", path, "k"+path, "{}")
			require.Equal(t, want, first.status, first.body)
			require.Equal(t, want == 204, first.body == "")
			for range 2 {
				replayed(t, first, s.ask(t, "ada", path, "k"+path, " { } "))
			}
		}
		require.EqualValues(t, 2, s.charges.Load())
		require.EqualValues(t, 1, s.refunds.Load())
	})
}

func TestRouters_Refusals(t *testing.T) {
	each(t, func(t *testing.T, s *shop, _ string) {
		for _, path := range []string{"/orders", "/orders/1/charges"} {
			refused(t, s.ask(t, "ada", path, "", `{"amount":1}`), 400, onceqhttp.CodeKeyMissing)
			refused(t, s.ask(t, "ada", path, `"open`, `{"amount":1}`), 400, onceqhttp.CodeKeyInvalid)
			refused(t, s.ask(t, "", path, "k", `{"amount":1}`), 403, onceqhttp.CodeNoPrincipal)
			require.Zero(t, s.count(t, "onceq.job_fences where scope like '% "+path+"%'"))
			require.Equal(t, 201, s.ask(t, "ada", path, "k", `{"amount":1}`).status)
			refused(t, s.ask(t, "ada", path, "k", `{"amount":2}`), 422, onceqhttp.CodeMismatch)
		}
		require.EqualValues(t, 1, s.charges.Load())
		require.Equal(t, 1, s.count(t, "orders"))
	})
}

func TestRouters_InFlight(t *testing.T) {
	each(t, func(t *testing.T, s *shop, _ string) {
		entered, gate := make(chan struct{}, 1), make(chan struct{})
		open := sync.OnceFunc(func() { close(gate) })
		defer open() // the server waits for its handlers
		wait := func() error {
			entered <- struct{}{}
			<-gate
			return nil
		}
		s.charge = func(context.Context, string) error { return wait() }
		s.place = wait
		for _, path := range []string{"/orders/1/charges", "/orders"} {
			first := make(chan answer, 1)
			go func() {
				a, err := s.try("ada", path, "k", `{"amount":1}`)
				if err != nil {
					a.body = err.Error()
				}
				first <- a
			}()
			receive(t, entered)
			again := s.ask(t, "ada", path, "k", `{"amount":1}`)
			refused(t, again, 409, onceqhttp.CodeInFlight)
			require.Equal(t, "1", again.header.Get("Retry-After"))
			if path == "/orders" {
				open()
			} else {
				gate <- struct{}{}
			}
			a := receive(t, first)
			require.Equal(t, 201, a.status, a.body)
			replayed(t, a, s.ask(t, "ada", path, "k", `{"amount":1}`))
		}
		require.EqualValues(t, 1, s.charges.Load())
		require.Equal(t, 1, s.count(t, "orders"))
	})
}

func receive[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(5 * time.Minute):
		t.Fatal("waited in vain")
		panic("unreachable")
	}
}

// A key belongs to its sender and to its route, which is the router's pattern and not the path.
func TestRouters_AKeyIsBoundToPrincipalAndRoute(t *testing.T) {
	each(t, func(t *testing.T, s *shop, pattern string) {
		seen := map[string]bool{}
		for _, c := range []struct{ user, path string }{{"ada", "/orders/1/charges"}, {"bob", "/orders/1/charges"}, {"ada", "/orders/1/refunds"}} {
			first := s.ask(t, c.user, c.path, "k", "{}")
			require.Less(t, first.status, 300)
			require.False(t, seen[first.body])
			seen[first.body] = true
			replayed(t, first, s.ask(t, c.user, c.path, "k", "{}"))
		}
		refused(t, s.ask(t, "ada", "/orders/2/charges", "k", "{}"), 422, onceqhttp.CodeMismatch)
		require.EqualValues(t, 2, s.charges.Load())
		require.EqualValues(t, 1, s.refunds.Load())
		require.Equal(t, 2, s.count(t, "onceq.job_fences where scope like 'POST "+pattern+" %'"))
	})
}

// The router's own Recoverer answers a panic, over the real connection. The key is left as it is elsewhere: uncertain
// without a transaction, free with one.
func TestRouters_PanicsMeetTheRecoverer(t *testing.T) {
	each(t, func(t *testing.T, s *shop, _ string) {
		var calm atomic.Bool
		bad := func() error {
			if !calm.Load() {
				panic("bad day")
			}
			return nil
		}
		s.charge, s.place = func(context.Context, string) error { return bad() }, bad
		for _, path := range []string{"/orders/1/charges", "/orders"} {
			calm.Store(false)
			a := s.ask(t, "ada", path, "k", `{"amount":1}`)
			require.Equal(t, 500, a.status, "%+v", a)
			require.NotContains(t, a.body, "IDEMPOTENCY", "it is the Recoverer's")
			if path == "/orders" {
				require.Zero(t, s.count(t, "orders"))
				require.Equal(t, 1, s.count(t, "onceq.job_fences"), "that of the charge")
			} else {
				require.Equal(t, 1, s.count(t, "onceq.job_fences where state = 2"), "uncertain")
			}
			calm.Store(true)
			first := s.ask(t, "ada", path, "k", `{"amount":1}`)
			require.Equal(t, 201, first.status, first.body)
			replayed(t, first, s.ask(t, "ada", path, "k", `{"amount":1}`))
		}
		require.EqualValues(t, 2, s.charges.Load())
		require.Equal(t, 1, s.count(t, "orders"))
	})
}

// Nobody knows what the provider did. So the client gets the router's answer, and the next request runs, with the same key
// for the provider.
func TestRouters_ErrorsOfTheHandler(t *testing.T) {
	each(t, func(t *testing.T, s *shop, _ string) {
		var key []string
		s.charge = func(ctx context.Context, _ string) error {
			key = append(key, onceqhttp.FromContext(ctx).Lease.IdempotencyKey())
			if len(key) == 1 {
				return errors.New("reset by peer")
			}
			return nil
		}
		a := s.ask(t, "ada", "/orders/1/charges", "k", "{}")
		require.Equal(t, 502, a.status)
		require.Contains(t, a.body, "it did not work")
		first := s.ask(t, "ada", "/orders/1/charges", "k", "{}")
		require.Equal(t, 201, first.status)
		require.Equal(t, key[0], key[1])
		replayed(t, first, s.ask(t, "ada", "/orders/1/charges", "k", "{}"))
	})
}

// The order, its key and the answer commit together or not at all.
func TestRouters_InATransaction(t *testing.T) {
	each(t, func(t *testing.T, s *shop, _ string) {
		first := s.ask(t, "ada", "/orders", "k", `{"amount":5}`)
		require.Equal(t, 201, first.status, first.body)
		require.JSONEq(t, `{"id":1,"amount":5}`, first.body)
		replayed(t, first, s.ask(t, "ada", "/orders", "k", `{"amount":5}`))
		require.Equal(t, 1, s.count(t, "orders"))

		// An answer that refuses a request is an answer too.
		first = s.ask(t, "ada", "/orders", "none", `{"amount":`)
		require.Equal(t, 400, first.status, first.body)
		replayed(t, first, s.ask(t, "ada", "/orders", "none", `{"amount":`))

		// The database fails; then the application fails after it has written.
		s.place = func() error { return errors.New("out of stock") }
		for range 2 {
			refused(t, s.ask(t, "ada", "/orders", "zero", `{"amount":0}`), 500, onceqhttp.CodeRolledBack)
			refused(t, s.ask(t, "ada", "/orders", "stock", `{"amount":1}`), 500, onceqhttp.CodeRolledBack)
		}
		require.Equal(t, 1, s.count(t, "orders"))
		require.Equal(t, 2, s.count(t, "onceq.job_fences"), "the other keys are free")

		// If Postgres asks for it, the transaction runs again.
		tries := 0
		s.place = func() error {
			if tries++; tries < 3 {
				return &pgconn.PgError{Code: "40001"}
			}
			return nil
		}
		again := s.ask(t, "ada", "/orders", "conflict", `{"amount":7}`)
		require.Equal(t, 201, again.status, again.body)
		require.Equal(t, 3, tries)
		replayed(t, again, s.ask(t, "ada", "/orders", "conflict", `{"amount":7}`))
		require.Equal(t, 2, s.count(t, "orders"))
	})
}
