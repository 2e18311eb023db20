// Window shows how long a key stays taken. By default it stays for a day after the work is finished, and everybody who asks
// again gets the stored result. It can also be taken until the work is finished, or for ever.
package main

import (
	"context"
	"fmt"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

var rollup = onceq.Kind[string]{
	Name: "rollup",
	Key:  func(day string) string { return "rollup:eu-west:" + day },
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	runs := 0
	work := rollup.Handle(func(_ context.Context, l *onceq.Lease, day string) error {
		runs++
		return l.SetResult(fmt.Sprintf("%s, run %d", day, runs))
	})
	job := rollup.Job("2026-05-08")
	_, err := q.Enqueue(ctx, pool, job)
	example.Check(err)
	example.Drain(ctx, q, work)

	again, err := q.Enqueue(ctx, pool, job)
	example.Check(err)
	fmt.Println("duplicate:", again.Duplicate, "state:", again.State, "result:", string(again.Output))
	example.Drain(ctx, q, work)
	fmt.Println("runs:", runs)

	job = rollup.Job("2026-05-09")
	job.Window = onceq.UntilFinished // at most one at a time; a new one as soon as it is done
	for range 2 {
		_, err = q.Enqueue(ctx, pool, job)
		example.Check(err)
		again, err = q.Enqueue(ctx, pool, job)
		example.Check(err)
		fmt.Println("duplicate:", again.Duplicate, "state:", again.State)
		example.Drain(ctx, q, work)
	}
	fmt.Println("runs:", runs)

	// A Reaper removes keys whose window is over, and nothing else.
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{})
	example.Check(err)
	reaped, err := reaper.RunOnce(ctx)
	example.Check(err)
	fmt.Println("reaped:", reaped.Fences)
}

// Output:
// duplicate: true state: completed result: "2026-05-08, run 1"
// runs: 1
// duplicate: true state: waiting
// duplicate: true state: waiting
// runs: 3
// reaped: 0
