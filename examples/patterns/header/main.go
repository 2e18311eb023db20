// Header uses the Idempotency-Key of an HTTP request as the key of the job that does the request's work. The scope keeps
// the clients' keys apart. A client that tries again gets the first job. A client that uses its key for something else gets
// a conflict.
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

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<16))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		result, err := q.EnqueueUnique(r.Context(), pool, onceq.Job{
			Kind:    "outreach",
			Payload: json.RawMessage(body),
			Scope:   "client:" + r.Header.Get("X-Client"), // a real service gets the client from its authentication
			Key:     r.Header.Get("Idempotency-Key"),
		})
		var invalid *onceq.InvalidError
		switch {
		case errors.As(err, &invalid):
			http.Error(w, err.Error(), http.StatusBadRequest)
		case errors.Is(err, onceq.ErrMismatch):
			http.Error(w, "this key was used for another request", http.StatusConflict)
		case err != nil:
			http.Error(w, "try again", http.StatusServiceUnavailable)
		default:
			w.WriteHeader(http.StatusAccepted)
			fmt.Fprintf(w, "%s, duplicate: %t", result.State, result.Duplicate)
		}
	}))
	defer server.Close()

	post := func(client, key, body string) {
		r, err := http.NewRequest("POST", server.URL, strings.NewReader(body))
		example.Check(err)
		r.Header.Set("X-Client", client)
		r.Header.Set("Idempotency-Key", key)
		response, err := http.DefaultClient.Do(r)
		example.Check(err)
		text, err := io.ReadAll(response.Body)
		example.Check(err)
		response.Body.Close()
		fmt.Println(response.StatusCode, strings.TrimSpace(string(text)))
	}
	post("acme", "k-1", `{"contact": "cid_123"}`)
	post("acme", "k-1", `{"contact":"cid_123"}`) // the same JSON
	post("acme", "k-1", `{"contact": "cid_999"}`)
	post("zeta", "k-1", `{"contact": "cid_123"}`) // somebody else's key
	post("acme", "", `{}`)
}

// Output:
// 202 waiting, duplicate: false
// 202 waiting, duplicate: true
// 409 this key was used for another request
// 202 waiting, duplicate: false
// 400 onceq: Key is empty, and each job of kind "outreach" has one (Kind.Key, EnqueueUnique)
