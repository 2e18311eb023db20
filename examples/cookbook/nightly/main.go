// Nightly shows two ways to do something once every night, in any number of processes. A job that repeats itself with
// Reschedule needs nothing else. If you have a cron already, let it enqueue a job under the day's key, on as many machines
// as you like.
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
	// cleanup is one job that never ends. Its payload is empty, so a later version of the program means the same job.
	cleanup = onceq.Kind[struct{}]{Name: "cleanup", Key: func(struct{}) string { return "cleanup" }}

	// rollup is one job for each day. Its window is longer than any delay of cron.
	rollup = onceq.Kind[string]{Name: "rollup", Key: func(day string) string { return day }, Window: 7 * 24 * time.Hour}
)

// untilTwo returns the time until the next two o'clock on a wall clock, which may have summer time. It is at least an hour,
// so that a run that began a little early does not run again at once.
func untilTwo(now time.Time, where *time.Location) time.Duration {
	soonest := now.In(where).Add(time.Hour)
	two := time.Date(soonest.Year(), soonest.Month(), soonest.Day(), 2, 0, 0, 0, where)
	if two.Before(soonest) {
		two = time.Date(soonest.Year(), soonest.Month(), soonest.Day()+1, 2, 0, 0, 0, where)
	}
	return two.Sub(now)
}

// Every process calls start when it starts. The job exists only once.
func start(ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue) error {
	res, err := q.Enqueue(ctx, pool, cleanup.Job(struct{}{}))
	if err == nil && res.State == onceq.StateDead { // it failed too often and would not run again by itself
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
			now, err := l.Now(ctx) // the database's clock decides when the job is due
			if err != nil {
				return err
			}
			return onceq.Reschedule(untilTwo(now, time.UTC)) // commits the deletion
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
