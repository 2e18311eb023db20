// Nightly shows two ways to do something every night, once, in any number of processes. A job that comes back by
// Reschedule needs nothing else. Where a cron exists already, it enqueues a job under the day's key, on as many machines as
// it likes.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

var (
	// cleanup is one job for ever. Its payload is empty, so that a later version of the program means the same job.
	cleanup = onceq.Kind[struct{}]{Name: "cleanup", Key: func(struct{}) string { return "cleanup" }}

	// rollup is one job for each day. Its window is longer than any cron fires late.
	rollup = onceq.Kind[string]{Name: "rollup", Key: func(day string) string { return day }, Window: 7 * 24 * time.Hour}
)

// untilTwo is how long it is until the next two o'clock, by a clock on the wall that may change for summer. At least an hour:
// a run that began a little early does not come back at once.
func untilTwo(now time.Time, where *time.Location) time.Duration {
	soonest := now.In(where).Add(time.Hour)
	two := time.Date(soonest.Year(), soonest.Month(), soonest.Day(), 2, 0, 0, 0, where)
	if two.Before(soonest) {
		two = time.Date(soonest.Year(), soonest.Month(), soonest.Day()+1, 2, 0, 0, 0, where)
	}
	return two.Sub(now)
}

// start is called by every process when it starts. The job is there once.
func start(ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue) error {
	res, err := q.Enqueue(ctx, pool, cleanup.Job(struct{}{}))
	if err == nil && res.State == onceq.StateDead { // it has failed too often, and would not come back by itself
		_, err = q.Redrive(ctx, pool, res.ID)
	}
	return err
}

func handlers() []onceq.Handler {
	return []onceq.Handler{
		cleanup.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ struct{}) error {
			if _, err := tx.Exec(ctx, `delete from sessions where ends < now()`); err != nil {
				return err
			}
			now, err := l.Now(ctx) // the database's clock, which decides when the job is due
			if err != nil {
				return err
			}
			return onceq.Reschedule(untilTwo(now, time.UTC)) // commits what was deleted
		}),
		rollup.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, day string) error {
			_, err := tx.Exec(ctx, `insert into rollups values ($1)`, day)
			return err
		}),
	}
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, `create table sessions (ends timestamptz); create table rollups (day date)`)
	defer pool.Close()

	for range 3 { // three processes start
		example.Check(start(ctx, pool, q))
	}
	for range 2 { // cron fires on two machines: 30 2 * * * app rollup "$(date -u -d yesterday +%F)"
		_, err := q.Enqueue(ctx, pool, rollup.Job("2026-05-08"))
		example.Check(err)
	}
	example.Drain(ctx, q, handlers()...)

	next, err := q.GetByKey(ctx, pool, cleanup.Name, "cleanup")
	example.Check(err)
	fmt.Println("cleanup:", next.State, "until", next.RunAt.UTC().Format("15:04"))
	var rollups int
	example.Check(pool.QueryRow(ctx, `select count(*) from rollups`).Scan(&rollups))
	fmt.Println("rollups:", rollups)
}

// Output:
// cleanup: delayed until 02:00
// rollups: 1
