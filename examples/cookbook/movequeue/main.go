// Movequeue moves a kind to a queue of its own in a deploy, while jobs of the previous version still wait in the old queue.
package main

import (
	"context"
	"fmt"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
	"github.com/onceq/onceq/onceqops"
)

func key(to string) string { return "mail:" + to }

var (
	before = onceq.Kind[string]{Name: "mail", Key: key}                 // in the queue "default"
	after  = onceq.Kind[string]{Name: "mail", Key: key, Queue: "mails"} // what the deploy changes
)

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	_, err := q.Enqueue(ctx, pool, before.Job("ada"))
	example.Check(err)

	// The new version enqueues. The keys are the same, because they belong to the kind and not to the queue.
	for _, to := range []string{"ada", "bob"} {
		res, err := q.Enqueue(ctx, pool, after.Job(to))
		example.Check(err)
		fmt.Println(to, "duplicate:", res.Duplicate)
	}

	// The new version's workers serve the old queue too, until Stats shows that it is empty.
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{
		Also:   []string{onceq.DefaultQueue},
		Queues: map[string]onceq.QueueConfig{"mails": {Concurrency: 20}},
	}, after.Handle(func(ctx context.Context, l *onceq.Lease, to string) error { return nil }))
	example.Check(err)
	stats(ctx, q)
	example.Check(w.Drain(ctx, 0))
	stats(ctx, q)
}

func stats(ctx context.Context, q *onceq.Queue) {
	all, err := onceqops.New(q).Stats(ctx, onceq.DefaultQueue, "mails")
	example.Check(err)
	for _, s := range all {
		fmt.Println("waiting in", s.Queue+":", s.Waiting+s.Delayed+s.Retrying+s.Leased)
	}
}

// Output:
// ada duplicate: true
// bob duplicate: false
// waiting in default: 1
// waiting in mails: 1
// waiting in default: 0
// waiting in mails: 0
