// Report renders the same report for two jobs. Each job is a unit of work of its own: its lease is the lock, its effects
// have stable keys of their own, and a redelivery gets the upload of the first run.
package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

var report = onceq.Kind[string]{Name: "report", Backoff: func(int, error) time.Duration { return 0 }}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	keys, tokens := map[string]bool{}, map[int64]bool{}
	uploads := 0
	var urls []string
	for range 2 {
		_, err := q.Enqueue(ctx, pool, report.Job("r-7"))
		example.Check(err)
	}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}}},
		report.Handle(func(ctx context.Context, l *onceq.Lease, id string) error {
			url, err := onceq.Once(ctx, l, "upload", func(context.Context, string) (string, error) {
				uploads++
				return fmt.Sprintf("https://files.example.com/%s-%d.pdf", id, uploads), nil
			})
			if err != nil {
				return err
			}
			keys[l.IdempotencyKey("upload")], tokens[l.Token] = true, true
			if l.Attempt == 1 {
				return errors.New("crashes after the upload, the first time")
			}
			urls = append(urls, url)
			return l.SetResult(url)
		}))
	example.Check(err)
	example.Check(w.Drain(ctx, 0))
	slices.Sort(urls) // the jobs' second runs come in any order
	fmt.Println(urls)
	fmt.Println("uploads:", uploads, "keys:", len(keys), "tokens:", len(tokens))
}

// Output:
// [https://files.example.com/r-7-1.pdf https://files.example.com/r-7-2.pdf]
// uploads: 2 keys: 2 tokens: 4
