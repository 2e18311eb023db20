// Webhook receives events from a sender that delivers each event at least once. It checks the signature, stores the event
// as a job under the event's id, and answers. A worker does the work, once for each event.
package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
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
)

type event struct {
	ID    string `json:"id"`
	Type  string `json:"type"`
	Order int    `json:"order"`
}

// received keeps the body byte for byte, as the sender signed it. Its key is only the id: a second delivery of an event may
// contain another time.
var received = onceq.Kind[[]byte]{
	Name:          "webhook",
	Queue:         "webhooks",
	IgnorePayload: true,
	Window:        30 * 24 * time.Hour, // longer than the sender retries
}

var secret = []byte("shared with the sender")

func sign(body []byte) string {
	mac := hmac.New(sha256.New, secret)
	mac.Write(body)
	return hex.EncodeToString(mac.Sum(nil))
}

func receive(pool *pgxpool.Pool, q *onceq.Queue) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, onceq.MaxPayloadBytes))
		if err != nil {
			http.Error(w, "the body is too large or ended early", http.StatusBadRequest)
			return
		}
		if !hmac.Equal([]byte(r.Header.Get("X-Signature")), []byte(sign(body))) {
			http.Error(w, "the signature is wrong", http.StatusUnauthorized)
			return
		}
		var e event
		if err := json.Unmarshal(body, &e); err != nil {
			http.Error(w, "not an event", http.StatusBadRequest)
			return
		}
		job := received.Job(body)
		job.Key = e.ID
		var invalid *onceq.InvalidError
		switch _, err := q.EnqueueUnique(r.Context(), pool, job); {
		case errors.As(err, &invalid): // an event without an id, or with one that no key can be: it would be refused each time
			http.Error(w, "not an event", http.StatusBadRequest)
			return
		case err != nil:
			http.Error(w, "try again", http.StatusServiceUnavailable) // nothing is stored, so the sender delivers it again
			return
		}
		w.WriteHeader(http.StatusAccepted) // it is stored, now or by an earlier delivery
	}
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, `create table paid (order_id int)`)
	defer pool.Close()
	server := httptest.NewServer(receive(pool, q))
	defer server.Close()

	deliver := func(body, signature string) {
		r, err := http.NewRequest("POST", server.URL, strings.NewReader(body))
		example.Check(err)
		r.Header.Set("X-Signature", signature)
		resp, err := http.DefaultClient.Do(r)
		example.Check(err)
		example.Check(resp.Body.Close())
		fmt.Println(resp.Status)
	}
	body := `{"id": "evt_1", "type": "paid", "order": 7, "sent": "09:00"}`
	again := `{"id": "evt_1", "type": "paid", "order": 7, "sent": "09:05"}`
	deliver(body, sign([]byte(body)))
	deliver(again, sign([]byte(again)))
	deliver(body, "forged")
	deliver(`{"type": "ping"}`, sign([]byte(`{"type": "ping"}`)))

	example.Drain(ctx, q, received.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, body []byte) error {
		var e event
		if err := json.Unmarshal(body, &e); err != nil {
			return onceq.Fatal(err)
		}
		_, err := tx.Exec(ctx, `insert into paid values ($1)`, e.Order)
		return err
	}))
	var n int
	example.Check(pool.QueryRow(ctx, `select count(*) from paid`).Scan(&n))
	fmt.Println("paid:", n)
}

// Output:
// 202 Accepted
// 202 Accepted
// 401 Unauthorized
// 400 Bad Request
// paid: 1
