// Deliver sends webhooks to the endpoints of customers: signed, one after the other for each endpoint, again for three days,
// and none while an endpoint says that it is busy. A customer has a page of them, and can have one sent again.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

const tables = `create table endpoints (
  id int primary key, customer text not null, url text not null, secrets text[] not null, gone bool not null default false)`

type delivery struct {
	Endpoint int             `json:"endpoint"`
	Event    string          `json:"event"` // its id, without a full stop: every attempt and every replay has it
	Body     json.RawMessage `json:"body"`
}

func endpoint(d delivery) string { return fmt.Sprint("endpoint/", d.Endpoint) }

// The pauses between attempts are those that the specification recommends: https://www.standardwebhooks.com
var pauses = []time.Duration{
	5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour, 10 * time.Hour, 14 * time.Hour,
	20 * time.Hour, 24 * time.Hour,
}

const patience = 76 * time.Hour // all pauses together, and some

var deliver = onceq.Kind[delivery]{
	Name:  "deliver",
	Queue: "webhooks",
	Key:   func(d delivery) string { return d.Event },
	Scope: endpoint, // an event is one job for each endpoint, and a page shows the jobs of one

	Lane:     endpoint, // one at a time, in order
	LaneRule: onceq.Overtake,
	Limit:    endpoint, // what an endpoint that is busy pauses

	MaxAttempts: len(pauses) + 1,
	Backoff: func(attempt int, _ error) time.Duration {
		pause := pauses[min(attempt, len(pauses))-1]
		return pause + rand.N(pause/10)
	},
	Window: 30 * 24 * time.Hour,
	Keep:   30 * 24 * time.Hour, // for the page
}

// publish is called in the transaction in which the event happens.
func publish(ctx context.Context, tx pgx.Tx, q *onceq.Queue, customer, event string, body any) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	rows, err := tx.Query(ctx, `select id from endpoints where customer = $1 and not gone order by id`, customer)
	if err != nil {
		return err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		return err
	}
	var jobs []onceq.Job
	for _, id := range ids {
		jobs = append(jobs, deliver.Job(delivery{id, event, raw}))
	}
	_, err = q.EnqueueMany(ctx, tx, jobs)
	return err
}

// handler makes one attempt. There is no Once around the request: a receiver has to recognise the event's id anyway, and the
// job's completion is the record that it has answered.
func handler(pool *pgxpool.Pool, client *http.Client) onceq.Handler {
	return deliver.Handle(func(ctx context.Context, l *onceq.Lease, d delivery) error {
		var url string
		var secrets []string
		var gone bool
		const read = `select url, secrets, gone from endpoints where id = $1`
		if err := pool.QueryRow(ctx, read, d.Endpoint).Scan(&url, &secrets, &gone); err != nil {
			return err
		}
		if gone {
			return onceq.Fatal(errors.New("the endpoint is gone"))
		}
		now, err := l.Now(ctx)
		if err != nil {
			return err
		}
		age := now.Sub(l.CreatedAt)
		status, pause, err := send(ctx, client, url, secrets, d)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil: // the worker is shut down, or the lease is lost
			return err
		case age > patience:
			return onceq.Fatal(err)
		case status == 0, status == 429, status == 502, status == 503, status == 504:
			// The endpoint is busy, or away. All its deliveries wait for as long as it says, or else for as long again as this one
			// has waited so far.
			pause = cmp.Or(pause, max(age, pauses[0]))
			return onceq.LimitFull(min(pause, 24*time.Hour), err)
		case status == http.StatusGone:
			_, err := pool.Exec(ctx, `update endpoints set gone = true where id = $1`, d.Endpoint)
			return cmp.Or(err, onceq.Fatal(errors.New("410: the endpoint wants no more")))
		}
		return err // it does not want this event, for now: the others overtake it
	})
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, tables)
	defer pool.Close()
	// Each endpoint gets one request at a time. A service sets that once, with its migrations.
	example.Check(q.SetLimit(ctx, pool, "endpoint/", onceq.Limit{AtOnce: 1}))
	well, busy, gone := &receiver{}, &receiver{first: []int{503}, pause: "1"}, &receiver{first: []int{410}}
	for i, r := range []*receiver{well, busy, gone} {
		server := httptest.NewServer(r)
		defer server.Close()
		_, err := pool.Exec(ctx, `insert into endpoints values ($1, 'acme', $2, array[$3])`, i+1, server.URL, secret)
		example.Check(err)
	}
	for n := range 3 {
		example.Check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			return publish(ctx, tx, q, "acme", fmt.Sprint("evt_", n+1), map[string]any{"type": "invoice.paid", "invoice": n + 1})
		}))
	}
	web := httptest.NewServer(page(q, pool))
	defer web.Close()
	go func() {
		defer stop()
		settle(ctx, q, pool)
		example.Check(press(web.URL+"/endpoints/1", first(ctx, q, pool, "endpoint/1")))
		settle(ctx, q, pool)
	}()
	example.Work(ctx, q, handler(pool, client))
	for i, r := range []*receiver{well, busy, gone} {
		fmt.Printf("endpoint %d: requests %d, events %s\n", i+1, r.requests, r.events)
	}
}

// Output:
// endpoint 1: requests 4, events [evt_1 evt_2 evt_3]
// endpoint 2: requests 4, events [evt_1 evt_2 evt_3]
// endpoint 3: requests 1, events []
