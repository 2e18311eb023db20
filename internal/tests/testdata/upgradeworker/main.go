// Command upgradeworker enqueues and works, for a test that runs the one of an earlier commit beside the present one on the same
// tables. It may use only what both have. It works until its standard input ends.
//
//	upgradeworker URL NAME
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

const lanes = 5

// These kinds have a key that both programs ask for; one job of a lane at a time; two of a lane, with jobs that overtake; two of a limit;
// a group; and an event that the other program may emit.
var kinds = []onceq.Kind[int]{
	{Name: "keyed", Key: func(n int) string { return fmt.Sprint(n) }},
	{Name: "ordered", Lane: func(n int) string { return fmt.Sprint(n % lanes) }},
	{Name: "pairs", Lane: func(n int) string { return fmt.Sprint(n % lanes) }, LaneRule: onceq.Overtake},
	{Name: "limited", Limit: func(int) string { return "provider" }},
	{Name: "joins"},
}

// flow waits for its event.
var flow = onceq.Kind[string]{Name: "flow"}

func main() {
	ctx, cancel := context.WithCancel(context.Background())
	pool, err := pgxpool.New(ctx, os.Args[1])
	check(err)
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	check(err)
	check(q.Check(ctx))

	handle := func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
		if n%7 == 0 && l.Attempt == 1 {
			return fmt.Errorf("not at the first attempt")
		}
		_, err := tx.Exec(ctx, `
insert into effects (kind, job, who, live) values ($1, $2, $3, (select count(*) from onceq.jobs where case when $1 = 'limited' then kind = $1 else lane = $4 end))`,
			l.Kind, l.ID, os.Args[2], l.Lane)
		return err
	}
	var handlers []onceq.Handler
	for _, k := range kinds {
		k.Backoff = func(int, error) time.Duration { return 10 * time.Millisecond }
		handlers = append(handlers, k.HandleTx(handle))
	}
	handlers = append(handlers, flow.Handle(func(ctx context.Context, l *onceq.Lease, key string) error {
		if _, ok, err := onceq.Await[int](ctx, l, "flow", key, time.Hour); err != nil || !ok {
			return err
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `insert into effects (kind, job, who, live) values ($1, $2, $3, 1)`, l.Kind, l.ID, os.Args[2]); err != nil {
				return err
			}
			return l.Complete(ctx, tx)
		})
	}))
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{Every: 100 * time.Millisecond})
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 4}}}, handlers...)
	check(err)

	var all sync.WaitGroup
	all.Go(func() { check(w.Run(ctx)) })
	all.Go(func() { check(reaper.Run(ctx)) })
	all.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			var many bool // the other program enqueues too, and a slow machine must come to the end of it
			err := pool.QueryRow(ctx, `select (select count(*) from onceq.jobs) + (select count(*) from onceq.job_waits) > 100`).Scan(&many)
			if many || ctx.Err() != nil {
				time.Sleep(5 * time.Millisecond)
				n--
				continue
			}
			check(err)
			switch n % 5 {
			case 0:
				if n%2 == 0 {
					_, err = q.Enqueue(ctx, pool, kinds[0].Job(n))
				} else { // as another language does it; the other program may have enqueued the key from Go
					_, err = pool.Exec(ctx, `select from onceq.enqueue('keyed', to_jsonb($1::int), $1::text)`, n)
				}
			case 1:
				_, err = q.EnqueueMany(ctx, pool, []onceq.Job{kinds[1].Job(n), kinds[2].Job(n), kinds[0].Job(n)})
			case 2:
				err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					_, err := q.Enqueue(ctx, tx, kinds[1].Job(n))
					if err == nil {
						_, err = q.Enqueue(ctx, tx, kinds[2].Job(n))
					}
					return err
				})
			case 3:
				if _, err = q.EnqueueGroup(ctx, pool, []onceq.Job{kinds[1].Job(n), kinds[3].Job(n)}, kinds[4].Job(n)); err == nil {
					_, err = q.Enqueue(ctx, pool, kinds[3].Job(n))
				}
			case 4:
				key := fmt.Sprint(os.Args[2], n)
				if _, err = q.Enqueue(ctx, pool, flow.Job(key)); err == nil {
					_, err = q.Emit(ctx, pool, "flow", key, n)
				}
			}
			if ctx.Err() == nil {
				check(err)
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel()
	all.Wait()
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
