package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/onceq/onceq"
)

// answer is what the model says: the name of a tool and what to do with it, or a text for the user.
type answer struct {
	Tool   string `json:"tool,omitempty"`
	Text   string `json:"text"`
	Tokens int    `json:"tokens"`
}

// outside is a client of the model and of the tools.
type outside struct {
	client *http.Client
	url    string
}

// think makes a model call. Its metadata says for which step it is.
func (o outside) think(ctx context.Context, step string, talk []string) (a answer, err error) {
	request := map[string]any{"metadata": step, "store": true, "messages": talk}
	err = o.call(ctx, http.MethodPost, "/completions", "", request, &a)
	return a, err
}

// thought asks the model's provider whether it has an answer for a step. Several providers keep answers with metadata: for
// OpenAI that is "store", and a list of completions that is filtered by metadata.
func (o outside) thought(ctx context.Context, step string) (a any, made bool, err error) {
	var found []answer
	err = o.call(ctx, http.MethodGet, "/completions?metadata="+url.QueryEscape(step), "", nil, &found)
	if err != nil || len(found) == 0 {
		return nil, false, err
	}
	return found[0], true, nil
}

// call says what each status means for the job. What it returns without a mark leaves the outcome unknown.
func (o outside) call(ctx context.Context, method, path, key string, body, into any) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return onceq.Fatal(onceq.NotApplied(err))
	}
	r, err := http.NewRequestWithContext(ctx, method, o.url+path, bytes.NewReader(raw))
	if err != nil {
		return onceq.Fatal(onceq.NotApplied(err))
	}
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	res, err := o.client.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	status := fmt.Errorf("%s %s: %s", method, path, res.Status)
	switch {
	case res.StatusCode == http.StatusTooManyRequests: // all tasks wait for as long as the provider says
		seconds, _ := strconv.Atoi(res.Header.Get("Retry-After"))
		return onceq.LimitFull(time.Duration(cmp.Or(seconds, 10))*time.Second, onceq.NotApplied(status))
	case res.StatusCode >= 500:
		return status
	case res.StatusCode >= 400:
		return onceq.Fatal(onceq.NotApplied(status))
	}
	return json.NewDecoder(res.Body).Decode(into)
}
