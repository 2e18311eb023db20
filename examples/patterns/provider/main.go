// Provider sends through an HTTP API that takes an Idempotency-Key. The API answers a repetition with its first answer,
// says if a call with the key is still running, and refuses the key with another body.
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

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type mail struct {
	UserID int    `json:"user_id"`
	Body   string `json:"body"`
}

var welcome = onceq.Kind[mail]{
	Name: "welcome",
	Key:  func(m mail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
}

// send makes one call and says what its answer means for the job.
func send(ctx context.Context, url, key, body string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader(body))
	if err != nil {
		return "", onceq.NotApplied(err)
	}
	r.Header.Set("Idempotency-Key", key)
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return "", err // uncertain: it may have been sent
	}
	defer response.Body.Close()
	var answer struct{ ID, Code string }
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return "", err
	}
	switch {
	case response.StatusCode < 300:
		return answer.ID, nil
	case answer.Code == "IDEMPOTENCY_IN_FLIGHT":
		return "", onceq.RetryAfter(500*time.Millisecond, errors.New("an earlier call is still running"))
	case answer.Code == "IDEMPOTENCY_MISMATCH":
		return "", onceq.Fatal(errors.New("the provider knows this key with another body"))
	}
	return "", fmt.Errorf("the provider answered %s", response.Status)
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()
	provider := httptest.NewServer(&api{bodies: make(map[string]string)})
	defer provider.Close()

	for id, body := range []string{"Hello!", "busy", "Hello again!"} {
		_, err := q.Enqueue(ctx, pool, welcome.Job(mail{id, body}))
		example.Check(err)
	}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}}},
		welcome.Handle(func(ctx context.Context, l *onceq.Lease, m mail) error {
			id, err := onceq.Once(ctx, l, "mail", func(ctx context.Context, key string) (string, error) {
				return send(ctx, provider.URL, key, m.Body)
			})
			var uncertain *onceq.UncertainError
			if errors.As(err, &uncertain) {
				fmt.Println(m.Body, "→", uncertain.Err)
			} else {
				fmt.Println(m.Body, "→", id, err)
			}
			return err
		}))
	example.Check(err)
	ctx, stop := context.WithCancel(ctx)
	go func() { // stops when all three jobs are decided
		defer stop()
		for done := 0; done < 3; time.Sleep(10 * time.Millisecond) {
			done = 0
			for id := range 3 {
				info, err := q.GetByKey(ctx, pool, welcome.Name, fmt.Sprintf("welcome:%d", id))
				example.Check(err)
				if info.State.Finished() {
					done++
				}
			}
		}
	}()
	example.Check(w.Run(ctx))
}

// api stands for the provider.
type api struct {
	bodies map[string]string
	busy   bool
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	raw, _ := io.ReadAll(r.Body)
	body, key := string(raw), r.Header.Get("Idempotency-Key")
	if body == "Hello again!" {
		a.bodies[key] = "something else"
	}
	if body == "busy" && !a.busy {
		a.busy = true
		w.WriteHeader(http.StatusConflict)
		fmt.Fprint(w, `{"code":"IDEMPOTENCY_IN_FLIGHT"}`)
		return
	}
	if known, ok := a.bodies[key]; ok && known != body {
		w.WriteHeader(http.StatusConflict)
		fmt.Fprint(w, `{"code":"IDEMPOTENCY_MISMATCH"}`)
		return
	}
	a.bodies[key] = body
	fmt.Fprintf(w, `{"id":"m_%d"}`, len(a.bodies))
}

// Output:
// Hello! → m_1 <nil>
// busy → an earlier call is still running
// Hello again! → the provider knows this key with another body
// busy → m_3 <nil>
