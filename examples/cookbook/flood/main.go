// Flood makes reports, four at once. One tenant orders two hundred of them, and another one five. Those five do not wait until the
// two hundred are made.
package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type report struct {
	Tenant string
	N      int
}

var create = onceq.Kind[report]{
	Name:  "report",
	Lane:  func(r report) string { return r.Tenant }, // tenants take turns at the limit
	Limit: func(report) string { return "reports" },
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	const atOnce, many, few = 4, 200, 5
	example.Check(q.SetLimit(ctx, pool, "reports", onceq.Limit{AtOnce: atOnce}))
	example.Check(q.SetLaneLimit(ctx, pool, create.Name, "", atOnce)) // a tenant that is alone may have all of it
	order := func(tenant string, n int) {
		jobs := make([]onceq.Job, n)
		for i := range jobs {
			jobs[i] = create.Job(report{tenant, i})
		}
		_, err := q.EnqueueMany(ctx, pool, jobs)
		example.Check(err)
	}
	order("big", many)

	var mu sync.Mutex
	made := map[string]int{}
	example.Work(ctx, q, create.Handle(func(ctx context.Context, l *onceq.Lease, r report) error {
		time.Sleep(20 * time.Millisecond) // making a report takes a while
		mu.Lock()
		defer mu.Unlock()
		made[r.Tenant]++
		switch {
		case r.Tenant == "big" && made["big"] == 20:
			order("small", few)
		case r.Tenant == "small" && made["small"] == few:
			fmt.Println("the small tenant has its reports, and most of the big one's are still to come:", made["big"] < many/2)
		}
		if made["big"]+made["small"] == many+few {
			stop()
		}
		return nil
	}))
	fmt.Println("reports:", made)
}

// Output:
// the small tenant has its reports, and most of the big one's are still to come: true
// reports: map[big:200 small:5]
