// Fanout splits work into parts that run side by side, and collects the results when the last part is done.
package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type part struct {
	Report string `json:"report"`
	N      int    `json:"n"`
}

var (
	split   = onceq.Kind[string]{Name: "split", Key: func(report string) string { return report }}
	compute = onceq.Kind[part]{Name: "compute", Key: func(p part) string { return fmt.Sprintf("%s:%d", p.Report, p.N) }}
	collect = onceq.Kind[string]{Name: "collect", Key: func(report string) string { return report }}
)

const tables = `
	create table reports (id text primary key, parts_left int not null);
	create table parts (report text references reports, n int, result int not null, primary key (report, n))`

func handlers(q *onceq.Queue) []onceq.Handler {
	return []onceq.Handler{
		// The number of parts commits together with the parts.
		split.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, report string) error {
			var jobs []onceq.Job
			for n := range 10 {
				jobs = append(jobs, compute.Job(part{report, n}))
			}
			if _, err := tx.Exec(ctx, `insert into reports values ($1, $2)`, report, len(jobs)); err != nil {
				return err
			}
			_, err := q.EnqueueMany(ctx, tx, jobs)
			return err
		}),
		// A part counts itself as done in the transaction of its completion: once, whatever crashes. The last part enqueues
		// the job that collects.
		compute.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p part) error {
			result := p.N * p.N // the work; do long work before the first use of tx
			if _, err := tx.Exec(ctx, `insert into parts values ($1, $2, $3)`, p.Report, p.N, result); err != nil {
				return err
			}
			var left int
			err := tx.QueryRow(ctx, `
				update reports set parts_left = parts_left - 1 where id = $1
				returning parts_left`, p.Report).Scan(&left)
			if err != nil || left > 0 {
				return err
			}
			_, err = q.Enqueue(ctx, tx, collect.Job(p.Report))
			return err
		}),
		collect.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, report string) error {
			var parts, sum int
			err := tx.QueryRow(ctx, `select count(*), sum(result) from parts where report = $1`, report).Scan(&parts, &sum)
			fmt.Println(report, "parts:", parts, "sum:", sum)
			return err
		}),
	}
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, tables)
	defer pool.Close()

	_, err := q.Enqueue(ctx, pool, split.Job("2026-05"))
	example.Check(err)
	example.Drain(ctx, q, handlers(q)...)
}

// Output:
// 2026-05 parts: 10 sum: 285
