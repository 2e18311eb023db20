// Agent is a loop of calls to a model and of the tools that the model asks for. It may be killed at any step: no call is paid
// twice, and no tool does its work twice. A person approves what costs money. A browser shows how far it is.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type task struct {
	ID     string `json:"id"`
	Ask    string `json:"ask"`
	Tokens int    `json:"tokens"` // what it may spend; then it stops
}

var agent = onceq.Kind[task]{
	Name:    "agent",
	Key:     func(t task) string { return t.ID },                             // a form that is sent twice is one task
	Limit:   func(task) string { return "model" },                            // the provider's tokens a minute,
	Weight:  func(t task) int { return t.Tokens },                            // what a run may spend
	Timeout: 10 * time.Minute,                                                // of one run; a person may take a day
	Backoff: func(int, error) time.Duration { return 10 * time.Millisecond }, // seconds, in a real service
	Keep:    7 * 24 * time.Hour,                                              // the page shows it for a week
	Window:  onceq.Forever,                                                   // approvals and answers belong to an id: it never comes again
}

const maxTokens, tokensPerMinute, maxTurns = 10_000, 200_000, 20

// A tool may need a person's approval. Its policy says what to do when nobody knows whether a call did its work.
type tool struct {
	approve bool
	unknown onceq.Policy
}

var tools = map[string]tool{
	"order": {approve: true, unknown: onceq.RunAgain(24 * time.Hour)}, // the shop recognises a key for a day
	"mail":  {unknown: onceq.Hold()},                                  // nothing recognises a mail: a person looks
}

// handler runs again from its beginning after a crash and after an approval. Once gives the answers that it already has, so
// the conversation is the same again, up to where it stopped.
func handler(o outside) onceq.Handler {
	return agent.Handle(func(ctx context.Context, l *onceq.Lease, t task) error {
		talk, spent, paid := []string{t.Ask}, 0, 0
		defer func() { _ = l.SetWeight(paid) }() // in this run: what earlier ones paid has counted then
		for turn := 1; turn <= maxTurns; turn++ {
			step := fmt.Sprintf("%s/%d", t.ID, turn)
			if err := say(ctx, l, turn, "asks the model"); err != nil {
				return err
			}
			next, err := onceq.Once(ctx, l, fmt.Sprint("model/", turn), func(ctx context.Context, _ string) (answer, error) {
				a, err := o.think(ctx, step, talk)
				paid += a.Tokens
				return a, err
			}, onceq.OnUncertain(onceq.Ask(func(ctx context.Context, _ string) (any, bool, error) {
				return o.thought(ctx, step) // a model does not recognise a repeated call, but it has a list of its answers
			})), onceq.EffectTimeout(2*time.Minute))
			if err != nil {
				return err
			}
			if spent += next.Tokens; spent > t.Tokens {
				return onceq.Fatal(fmt.Errorf("it has spent %d tokens, and may spend %d", spent, t.Tokens))
			}
			if next.Tool == "" {
				return l.SetResult(next.Text)
			}
			did, err := use(ctx, l, o, turn, step, next)
			if err != nil {
				return err
			}
			talk = append(talk, next.Tool+" "+next.Text, did)
		}
		return onceq.Fatal(errors.New("the model does not come to an end"))
	})
}

func use(ctx context.Context, l *onceq.Lease, o outside, turn int, step string, next answer) (string, error) {
	with, known := tools[next.Tool]
	if !known {
		return "there is no such tool", nil
	}
	if with.approve {
		yes, _, err := onceq.Await[bool](ctx, l, "approval", step, 24*time.Hour)
		if err != nil {
			return "", err // the handler runs again when somebody has pressed a button; until then it holds nothing
		}
		if !yes {
			return "a person has refused this", nil
		}
	}
	if err := say(ctx, l, turn, "begins to "+next.Tool+" "+next.Text); err != nil {
		return "", err
	}
	return onceq.Once(ctx, l, fmt.Sprint("tool/", turn), func(ctx context.Context, key string) (did string, err error) {
		err = o.call(ctx, http.MethodPost, "/"+next.Tool, key, next.Text, &did)
		return did, err
	}, onceq.OnUncertain(with.unknown))
}

// say shows on the page what comes now. Extend writes it at once, and ends a run that has lost its job before it pays.
func say(ctx context.Context, l *onceq.Lease, turn int, what string) error {
	if err := l.Progress(int64(turn), 0, what); err != nil {
		return err
	}
	return l.Extend(ctx, onceq.DefaultLease)
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	defer pool.Close()
	// A service sets a limit once, with its migrations. The runs that start in a minute spend at most tokensPerMinute together.
	const half = tokensPerMinute / 2
	example.Check(q.SetLimit(ctx, pool, "model", onceq.Limit{AtOnce: 20 * maxTokens, Rate: half, Burst: half, Per: time.Minute}))
	for range 2 { // a form that was sent twice
		_, err := q.Enqueue(ctx, pool, agent.Job(task{ID: "7", Ask: "a red bicycle, please", Tokens: maxTokens}))
		example.Check(err)
	}
	w := &world{lose: 1}
	provider, web := httptest.NewServer(w), httptest.NewServer(site(q, pool))
	defer provider.Close()
	defer web.Close()
	go func() {
		defer stop()
		browse(web.URL + "/7")
	}()
	example.Work(ctx, q, handler(outside{provider.Client(), provider.URL}))
	fmt.Printf("model calls: %d, orders: %d in %d calls, mails: %d\n", len(w.answers), len(w.orders), w.calls, w.mails)
}

// Output:
// a person approves: order a red bicycle
// a person reads: "It is ordered, and a mail says so."
// model calls: 3, orders: 1 in 2 calls, mails: 1
