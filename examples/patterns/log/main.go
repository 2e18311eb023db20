// Log counts duplicates and replays separately: they are neither failures nor successes.
package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

var welcome = onceq.Kind[int]{Name: "welcome", Key: func(id int) string { return fmt.Sprintf("welcome:%d", id) }}

func main() {
	ctx := context.Background()
	pool, _ := example.Open(ctx, "")
	defer pool.Close()

	var mu sync.Mutex
	counts := map[onceq.EventType]int{}
	q, err := onceq.New(pool, &onceq.Config{Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
		mu.Lock()
		defer mu.Unlock()
		counts[e.Type]++
	})})
	example.Check(err)
	for range 3 {
		_, err := q.Enqueue(ctx, pool, welcome.Job(42))
		example.Check(err)
	}
	runs := 0
	example.Drain(ctx, q, welcome.Handle(func(ctx context.Context, l *onceq.Lease, id int) error {
		_, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (bool, error) { return true, nil })
		if runs++; runs == 1 && err == nil {
			return onceq.Snooze(time.Nanosecond) // the next run replays the mail
		}
		return err
	}))
	mu.Lock()
	defer mu.Unlock()
	fmt.Println("enqueued:", counts[onceq.EventEnqueued], "duplicates:", counts[onceq.EventDuplicate])
	fmt.Println("completed:", counts[onceq.EventCompleted], "replayed:", counts[onceq.EventReplayed], "failed:", counts[onceq.EventFailed])
}

// Output:
// enqueued: 1 duplicates: 2
// completed: 1 replayed: 1 failed: 0
