// Http shows the whole chain: a client's Idempotency-Key, the stored answer to its request, the key of the job that the
// request enqueues, the job's effect, and the key that the provider gets.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
	"github.com/onceq/onceq/onceqhttp"
)

type payment struct {
	OrderID int `json:"order_id"`
	Amount  int `json:"amount"`
}

var charge = onceq.Kind[payment]{
	Name:    "charge",
	Backoff: func(attempt int, err error) time.Duration { return 10 * time.Millisecond },
}

// shop takes orders. The order, the job that charges for it and the answer commit together.
func shop(pool *pgxpool.Pool, q *onceq.Queue) http.Handler {
	m, err := onceqhttp.New(q, onceqhttp.Config{
		// A real service gets it from its authentication.
		Principal: func(r *http.Request) (string, error) {
			user, _, ok := r.BasicAuth()
			if !ok {
				return "", errors.New("nobody has logged in")
			}
			return user, nil
		},
	})
	example.Check(err)
	mux := http.NewServeMux()
	mux.Handle("POST /orders", m.HandlerTx(pool, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		ctx := r.Context()
		var p payment
		if err := json.NewDecoder(r.Body).Decode(&p); err != nil {
			http.Error(w, "no JSON", http.StatusBadRequest)
			return nil
		}
		if err := tx.QueryRow(ctx, `insert into orders (amount) values ($1) returning id`, p.Amount).Scan(&p.OrderID); err != nil {
			return err
		}
		job := charge.Job(p)
		in := onceqhttp.FromContext(ctx)
		job.Scope, job.Key = in.Scope, in.Key // the client's key is the job's
		enqueued, err := q.Enqueue(ctx, tx, job)
		if err != nil {
			return err
		}
		if enqueued.Duplicate { // an earlier request's job, whose answer is past its window: this order would never be charged
			return errors.New("the key has a job already")
		}
		w.WriteHeader(http.StatusCreated)
		return json.NewEncoder(w).Encode(p)
	}))
	return mux
}

// provider stands for a provider that takes an Idempotency-Key, as most do. Its first answer gets lost after the charge.
type provider struct {
	calls   int
	charges map[string]string // by key
}

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.calls++
	key := r.Header.Get("Idempotency-Key")
	if _, known := p.charges[key]; !known {
		p.charges[key] = fmt.Sprintf("ch_%d", len(p.charges)+1)
	}
	if p.calls == 1 {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	_, _ = io.WriteString(w, p.charges[key])
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, `create table orders (id int generated always as identity, amount int)`)
	defer pool.Close()
	server := httptest.NewServer(shop(pool, q))
	defer server.Close()
	p := &provider{charges: make(map[string]string)}
	bank := httptest.NewServer(p)
	defer bank.Close()

	order := func(key, body string) {
		r, err := http.NewRequest("POST", server.URL+"/orders", strings.NewReader(body))
		example.Check(err)
		r.SetBasicAuth("ada", "secret")
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Idempotency-Key", key)
		resp, err := http.DefaultClient.Do(r)
		example.Check(err)
		defer resp.Body.Close()
		var answer struct {
			payment
			Code string
		}
		example.Check(json.NewDecoder(resp.Body).Decode(&answer))
		if answer.Code != "" {
			fmt.Println(resp.StatusCode, answer.Code)
			return
		}
		fmt.Println(resp.StatusCode, "order:", answer.OrderID, "replayed:", resp.Header.Get("Idempotent-Replayed") == "true")
	}
	order(`"8e03978e-40d5"`, `{"amount": 4200}`)
	order(`"8e03978e-40d5"`, `{"amount": 4200}`) // the client tries again
	order(`8e03978e-40d5`, `{"amount":4200.0}`)  // and again, with another library
	order(`"8e03978e-40d5"`, `{"amount": 9999}`)

	client := &http.Client{Transport: &onceqhttp.Transport{}} // it adds the effect's key
	example.Work(ctx, q, charge.Handle(func(ctx context.Context, l *onceq.Lease, pay payment) error {
		id, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (string, error) {
			r, err := http.NewRequestWithContext(ctx, "POST", bank.URL, strings.NewReader(fmt.Sprint(pay.Amount)))
			if err != nil {
				return "", onceq.NotApplied(err)
			}
			resp, err := client.Do(r)
			if err != nil {
				return "", err
			}
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return "", errors.New(resp.Status)
			}
			id, err := io.ReadAll(resp.Body)
			return string(id), err
		})
		if err != nil {
			fmt.Println("attempt", l.Attempt, "uncertain:", errors.Is(err, onceq.ErrUncertain))
			return err
		}
		fmt.Println("attempt", l.Attempt, "charged order", pay.OrderID, "as", id)
		stop()
		return nil
	}))
	var orders int
	example.Check(pool.QueryRow(context.Background(), `select count(*) from orders`).Scan(&orders))
	fmt.Println("orders:", orders, "calls:", p.calls, "charges:", len(p.charges))
}

// Output:
// 201 order: 1 replayed: false
// 201 order: 1 replayed: true
// 201 order: 1 replayed: true
// 422 IDEMPOTENCY_MISMATCH
// attempt 1 uncertain: true
// attempt 2 charged order 1 as ch_1
// orders: 1 calls: 2 charges: 1
