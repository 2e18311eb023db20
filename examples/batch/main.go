// Batch enqueues many jobs with their keys in one statement. Each job has its key with it, so the two cannot get out of
// step. Submitting the batch again does nothing. A key that stands twice in one batch is refused.
package main

import (
	"context"
	"fmt"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type outreach struct {
	Campaign string `json:"campaign"`
	Contact  string `json:"contact"`
}

var send = onceq.Kind[outreach]{
	Name:  "outreach",
	Queue: "outreach",
	Scope: func(o outreach) string { return o.Campaign },
	Key:   func(o outreach) string { return "outreach:" + o.Contact },
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	var jobs []onceq.Job
	for _, contact := range []string{"cid_001", "cid_002", "cid_003"} {
		jobs = append(jobs, send.Job(outreach{"cmp_456", contact}))
	}
	for range 2 {
		results, err := q.EnqueueMany(ctx, pool, jobs)
		example.Check(err)
		for i, r := range results {
			fmt.Println(jobs[i].Key, "duplicate:", r.Duplicate)
		}
	}
	_, err := q.EnqueueMany(ctx, pool, append(jobs, jobs[1]))
	fmt.Println(err)
}

// Output:
// outreach:cid_001 duplicate: false
// outreach:cid_002 duplicate: false
// outreach:cid_003 duplicate: false
// outreach:cid_001 duplicate: true
// outreach:cid_002 duplicate: true
// outreach:cid_003 duplicate: true
// onceq: jobs[3].Key "outreach:cid_002" repeats that of jobs[1]
