package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
	"github.com/onceq/onceq/onceqops"
)

const secret = "whsec_b25jZXEgc2hvd3MgaG93IHRvIHNpZ24gaXQ="

// receiver stands for a customer's endpoint. It checks signatures with the specification's own library, and an event that it
// has, by its id, is nothing new.
type receiver struct {
	mu       sync.Mutex
	first    []int // the statuses of its first answers
	requests int
	events   []string
	pause    string // its Retry-After; "" for none
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests++
	body, err := io.ReadAll(req.Body)
	example.Check(err)
	hook, err := standardwebhooks.NewWebhook(secret)
	example.Check(err)
	if err := hook.Verify(body, req.Header); err != nil {
		http.Error(w, err.Error(), http.StatusUnauthorized)
		return
	}
	if len(r.first) > 0 {
		status := r.first[0]
		r.first = r.first[1:]
		w.Header().Set("Retry-After", r.pause)
		w.WriteHeader(status)
		return
	}
	if id := req.Header.Get("webhook-id"); !slices.Contains(r.events, id) {
		r.events = append(r.events, id)
	}
}

// settle waits until no delivery is left.
func settle(ctx context.Context, q *onceq.Queue, pool *pgxpool.Pool) {
	live := []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRunning, onceq.StateRetrying}
	for {
		n, err := onceqops.New(q).Count(ctx, pool, onceqops.Filter{Kind: deliver.Name, States: live})
		example.Check(err)
		if n == 0 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// first returns the id of the first delivery to an endpoint.
func first(ctx context.Context, q *onceq.Queue, pool *pgxpool.Pool, endpoint string) int64 {
	job, err := q.GetByKey(ctx, pool, endpoint, "evt_1")
	example.Check(err)
	return job.ID
}

// press presses the button of a delivery.
func press(endpoint string, job int64) error {
	res, err := http.Post(fmt.Sprint(endpoint, "/", job), "", nil)
	if err != nil {
		return err
	}
	return res.Body.Close()
}
