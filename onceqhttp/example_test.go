package onceqhttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/exampletb"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

// database gives an example its own database with onceq's tables. A program makes its own pool with pgxpool.New and its
// queue with onceq.New(pool, nil).
func database() (ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue, done func()) {
	t := exampletb.New()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	return t.Context(), db.Pool, db.Queue, t.Done
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// submit sends a request as a client does, and prints the answer.
func submit(h http.Handler, path, key, body string) {
	r := httptest.NewRequest("POST", path, strings.NewReader(body))
	r.SetBasicAuth("ada", "secret")
	r.Header.Set("Content-Type", "application/json")
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	answer := strings.TrimSpace(w.Body.String())
	if strings.HasPrefix(w.Header().Get("Content-Type"), "application/problem+json") {
		_, answer, _ = strings.Cut(answer, `"code":"`)
		answer, _, _ = strings.Cut(answer, `"`)
	}
	fmt.Println(w.Code, answer)
}

// user returns who has logged in. It is a Config.Principal.
func user(r *http.Request) (string, error) {
	name, _, ok := r.BasicAuth()
	if !ok {
		return "", errors.New("nobody has logged in")
	}
	return name, nil
}

// The order and the answer commit together. A client that asks again gets the same answer, and there is one order.
func ExampleMiddleware_HandlerTx() {
	ctx, pool, q, done := database()
	defer done()
	_, err := pool.Exec(ctx, `create table orders (id int generated always as identity, item text)`)
	check(err)

	m, err := onceqhttp.New(q, onceqhttp.Config{Principal: user})
	check(err)
	mux := http.NewServeMux()
	mux.Handle("POST /orders", m.HandlerTx(pool, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		item, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		var id int
		if err := tx.QueryRow(r.Context(), `insert into orders (item) values ($1) returning id`, string(item)).Scan(&id); err != nil {
			return err
		}
		w.WriteHeader(http.StatusCreated)
		_, err = fmt.Fprintf(w, "order %d", id)
		return err
	}))

	submit(mux, "/orders", "8e03978e", `{"item": "tea"}`)
	submit(mux, "/orders", "8e03978e", `{"item": "tea"}`)    // the client tries again
	submit(mux, "/orders", "8e03978e", `{"item": "coffee"}`) // another request under the same key
	submit(mux, "/orders", "", `{"item": "tea"}`)
	var orders int
	check(pool.QueryRow(ctx, `select count(*) from orders`).Scan(&orders))
	fmt.Println("orders:", orders)
	// Output:
	// 201 order 1
	// 201 order 1
	// 422 IDEMPOTENCY_MISMATCH
	// 400 IDEMPOTENCY_KEY_MISSING
	// orders: 1
}

// A handler with an effect outside the database. Its answer is stored after it has returned.
func ExampleMiddleware_Handler() {
	_, _, q, done := database()
	defer done()

	m, err := onceqhttp.New(q, onceqhttp.Config{
		Principal: user,
		Policy:    onceq.Hold(), // nobody can find out whether a fax went out
	})
	check(err)
	faxes := 0
	mux := http.NewServeMux()
	mux.Handle("POST /faxes", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		faxes++
		if faxes > 1 {
			http.Error(w, "the line went dead", http.StatusBadGateway)
			return
		}
		_, _ = io.WriteString(w, "sent")
	})))

	submit(mux, "/faxes", "1", `"hello"`)
	submit(mux, "/faxes", "1", `"hello"`)
	submit(mux, "/faxes", "2", `"hello"`)
	submit(mux, "/faxes", "2", `"hello"`) // it may have been sent: see Middleware.Fence
	fmt.Println("calls:", faxes)
	// Output:
	// 200 sent
	// 200 sent
	// 502 the line went dead
	// 409 IDEMPOTENCY_HELD
	// calls: 2
}

// A person has found out that the fax was sent, and says what answer the client gets.
func ExampleMiddleware_Fence() {
	ctx, _, q, done := database()
	defer done()

	m, err := onceqhttp.New(q, onceqhttp.Config{Principal: user, Policy: onceq.Hold()})
	check(err)
	mux := http.NewServeMux()
	mux.Handle("POST /faxes", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "the line went dead", http.StatusBadGateway)
	})))
	submit(mux, "/faxes", "1", `"hello"`)

	fence, err := m.Fence("ada", "POST", "POST /faxes", "1")
	check(err)
	check(fence.Resolve(ctx, nil, onceq.Applied(onceqhttp.Response{Status: 200, Body: []byte("sent")})))
	submit(mux, "/faxes", "1", `"hello"`)
	// Output:
	// 502 the line went dead
	// 200 sent
}

// The client of a provider sends the effect's key. When the job runs again, the provider gets the same one.
func ExampleTransport() {
	ctx, pool, q, done := database()
	defer done()
	keys := map[string]int{}
	bank := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys[r.Header.Get("Idempotency-Key")]++
		if len(keys) == 1 && keys[r.Header.Get("Idempotency-Key")] == 1 {
			w.WriteHeader(http.StatusBadGateway) // after it has charged
		}
	}))
	defer bank.Close()

	client := &http.Client{Transport: &onceqhttp.Transport{}}
	charge := onceq.Kind[int]{Name: "charge", Backoff: func(int, error) time.Duration { return 0 }}
	_, err := q.Enqueue(ctx, pool, charge.Job(4200))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		charge.Handle(func(ctx context.Context, l *onceq.Lease, cents int) error {
			_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (bool, error) {
				req, err := http.NewRequestWithContext(ctx, "POST", bank.URL, strings.NewReader(fmt.Sprint(cents)))
				if err != nil {
					return false, onceq.NotApplied(err)
				}
				resp, err := client.Do(req) // with Idempotency-Key
				if err != nil {
					return false, err
				}
				defer resp.Body.Close() //nolint:errcheck // nothing to do about an error
				if resp.StatusCode != http.StatusOK {
					return false, errors.New(resp.Status)
				}
				return true, nil
			})
			return err
		}))
	check(err)
	check(w.Drain(ctx, 0))
	for key, calls := range keys {
		fmt.Println("calls under one key:", calls, "characters:", len(key))
	}
	// Output: calls under one key: 2 characters: 43
}

// A key is the same with and without quotes.
func ExampleParseKey() {
	for _, value := range []string{`"8e03978e-40d5"`, `8e03978e-40d5`, `"8e03978e`} {
		key, err := onceqhttp.ParseKey(http.Header{"Idempotency-Key": {value}})
		fmt.Printf("%q refused: %t\n", key, err != nil)
	}
	// Output:
	// "8e03978e-40d5" refused: false
	// "8e03978e-40d5" refused: false
	// "" refused: true
}
