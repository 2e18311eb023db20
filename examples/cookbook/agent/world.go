package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/onceq/onceq/examples/internal/example"
)

// world stands for the model, the shop and the mail server. The model takes money for every call that it answers.
type world struct {
	mu      sync.Mutex
	answers []answer
	steps   []string          // of the answers
	orders  map[string]string // by key
	calls   int               // of the shop
	mails   int
	lose    int // how many answers of the shop get lost
	full    int // how many model calls are refused
}

func (w *world) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var said any
	switch r.Method + " " + r.URL.Path {
	case "GET /completions":
		found := []answer{}
		for i, step := range w.steps {
			if step == r.FormValue("metadata") {
				found = append(found, w.answers[i])
			}
		}
		said = found
	case "POST /completions":
		if w.full > 0 {
			w.full--
			out.Header().Set("Retry-After", "30")
			http.Error(out, "too many calls", http.StatusTooManyRequests)
			return
		}
		var asked struct {
			Metadata string
			Messages []string
		}
		_ = json.NewDecoder(r.Body).Decode(&asked)
		a := script(asked.Messages)
		w.answers, w.steps = append(w.answers, a), append(w.steps, asked.Metadata)
		said = a
	case "POST /order":
		w.calls++
		if w.orders == nil {
			w.orders = map[string]string{}
		}
		key := r.Header.Get("Idempotency-Key")
		if w.orders[key] == "" {
			w.orders[key] = fmt.Sprint("order-", len(w.orders)+1)
		}
		if said = w.orders[key]; w.lose > 0 {
			w.lose--
			http.Error(out, "it was ordered, and then something failed", http.StatusInternalServerError)
			return
		}
	case "POST /mail":
		w.mails++
		said = "sent"
	}
	_ = json.NewEncoder(out).Encode(said)
}

// script is how the model answers.
func script(talk []string) answer {
	switch last := talk[len(talk)-1]; {
	case len(talk) == 1:
		return answer{Tool: "order", Text: "a red bicycle", Tokens: 900}
	case strings.HasPrefix(last, "order-"):
		return answer{Tool: "mail", Text: "your bicycle has the number " + last, Tokens: 1200}
	case last == "sent":
		return answer{Text: "It is ordered, and a mail says so.", Tokens: 1300}
	}
	return answer{Text: "Then I order nothing.", Tokens: 400}
}

// browse stands for a person who looks at the page, approves what the agent wants, and waits for the end.
func browse(task string) {
	res, err := http.Get(task + "/events")
	example.Check(err)
	defer func() { _ = res.Body.Close() }()
	for lines := bufio.NewScanner(res.Body); lines.Scan(); {
		data, isData := strings.CutPrefix(lines.Text(), "data: ")
		if !isData {
			continue
		}
		var v view
		example.Check(json.Unmarshal([]byte(data), &v))
		switch {
		case v.Turn != "":
			fmt.Println("a person approves:", v.Wants.Tool, v.Wants.Text)
			pressed, err := http.PostForm(task+"/"+v.Turn, url.Values{"yes": {"true"}})
			example.Check(err)
			example.Check(pressed.Body.Close())
		case v.State.Finished():
			fmt.Println("a person reads:", string(v.Answer))
		}
	}
}
