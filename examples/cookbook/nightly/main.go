// Nightly does something every night, once, in any number of processes, and makes up for nights that were missed.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
	"github.com/onceq/onceq/onceqcron"
)

var rollup = onceq.Kind[struct{}]{Name: "rollup"}

// schedules are what every process of the application knows.
func schedules(pool *pgxpool.Pool, q *onceq.Queue) (*onceqcron.Scheduler, error) {
	return onceqcron.New(q, pool, onceqcron.Config{Owner: "shop"}, onceqcron.Schedule{
		Name: "rollup", Spec: "0 2 * * *", Zone: "Europe/Berlin",
		Job:    rollup.Job(struct{}{}),
		Missed: onceqcron.All(7), // after an outage each of the last seven nights gets its job
	})
}

func handlers(cron *onceqcron.Scheduler) []onceq.Handler {
	return append(cron.Handlers(),
		rollup.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ struct{}) error {
			night, _ := onceqcron.ScheduledAt(l) // not the time of this run: it may be late, or a retry
			_, err := tx.Exec(ctx, `insert into rollups values ($1)`, night)
			return err
		}))
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, `create table rollups (night timestamptz)`)
	defer pool.Close()

	var cron *onceqcron.Scheduler
	for range 3 { // three processes start
		var err error
		cron, err = schedules(pool, q)
		example.Check(err)
		example.Check(cron.Register(ctx))
	}

	// The nights before the schedule was there. Asked twice, each night gets one job.
	berlin, err := time.LoadLocation("Europe/Berlin")
	example.Check(err)
	from, to := time.Date(2026, 3, 28, 0, 0, 0, 0, berlin), time.Date(2026, 3, 31, 0, 0, 0, 0, berlin)
	for range 2 {
		n, err := cron.Backfill(ctx, nil, "rollup", from, to)
		example.Check(err)
		fmt.Println("back-filled:", n)
	}
	example.Drain(ctx, q, handlers(cron)...)

	rows, err := pool.Query(ctx, `select night from rollups order by night`)
	example.Check(err)
	var night time.Time
	_, err = pgx.ForEachRow(rows, []any{&night}, func() error {
		fmt.Println("rollup of", night.In(berlin).Format("2006-01-02 15:04 MST"))
		return nil
	})
	example.Check(err)
	list, err := cron.List(ctx, nil)
	example.Check(err)
	// On one day a year the clocks go from 02:00 to 03:00, and it is 03:00 that comes after 01:59.
	fmt.Println("next: after", list[0].Next.Add(-time.Minute).In(berlin).Format("15:04"))
}

// Output:
// back-filled: 3
// back-filled: 0
// rollup of 2026-03-28 02:00 CET
// rollup of 2026-03-29 03:00 CEST
// rollup of 2026-03-30 02:00 CEST
// next: after 01:59
