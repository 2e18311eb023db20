// Tokens keeps to a model's tokens a minute, in any number of processes. A job's tokens are guessed when it
// is enqueued. Its handler says how many it used, and the jobs after it start that much earlier or later.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type prompt struct{ Text string }

var answer = onceq.Kind[prompt]{
	Name:   "answer",
	Limit:  func(prompt) string { return "model" },
	Weight: func(p prompt) int { return len(p.Text)/4 + 500 }, // about one goes in for 4 bytes, and at most 500 come out
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	example.Check(q.SetLimit(ctx, pool, "model", onceq.Limit{AtOnce: 5_000, Max: 90_000, Per: time.Minute}))
	r, err := q.Enqueue(ctx, pool, answer.Job(prompt{Text: "Why is the sky blue?"}))
	example.Check(err)
	j, err := q.Get(ctx, pool, r.ID)
	example.Check(err)
	fmt.Println("guessed:", j.Weight)

	example.Drain(ctx, q, answer.Handle(func(ctx context.Context, l *onceq.Lease, p prompt) error {
		text, used, err := ask(ctx, p.Text)
		if err != nil {
			return err
		}
		if err := l.SetWeight(used); err != nil {
			return err
		}
		fmt.Println("used:", used)
		return l.SetResult(text)
	}))
}

// ask stands for a call of a model, whose answer says how many tokens it has cost.
func ask(context.Context, string) (text string, tokens int, err error) {
	return "Air scatters blue light the most.", 14, nil
}

// Output:
// guessed: 505
// used: 14
