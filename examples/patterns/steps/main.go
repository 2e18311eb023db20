// Steps splits a job that does many things into jobs that do one thing each. The first job enqueues the others in the
// transaction of its completion: all of them, once, or none.
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type step struct {
	Order string `json:"order"`
	What  string `json:"what"`
}

var (
	order = onceq.Kind[string]{
		Name: "order", Key: func(id string) string { return "order:" + id },
		Backoff: func(int, error) time.Duration { return 0 },
	}
	single = onceq.Kind[step]{
		Name: "step", Queue: "steps",
		Key: func(s step) string { return s.Order + "/" + s.What },
	}
)

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, `create table done (what text not null)`)
	defer pool.Close()

	_, err := q.Enqueue(ctx, pool, order.Job("o-1"))
	example.Check(err)
	example.Drain(ctx, q,
		order.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, id string) error {
			var jobs []onceq.Job
			for _, what := range []string{"charge", "invoice", "ship"} {
				jobs = append(jobs, single.Job(step{id, what}))
			}
			if _, err := q.EnqueueMany(ctx, tx, jobs); err != nil {
				return err
			}
			if l.Attempt == 1 {
				return errors.New("fails after enqueueing, the first time")
			}
			return nil
		}),
		single.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, s step) error {
			_, err := tx.Exec(ctx, `insert into done values ($1)`, s.What)
			return err
		}))
	var done []string
	example.Check(pool.QueryRow(ctx, `select array_agg(what order by what) from done`).Scan(&done))
	fmt.Println(done)
}

// Output:
// [charge invoice ship]
