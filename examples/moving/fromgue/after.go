// Package fromgue moves from gue. It has the code after the move, and a function that moves the waiting jobs.
package fromgue

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

type PrintName struct {
	Name string `json:"name"`
}

var Print = onceq.Kind[PrintName]{
	Name:  "PrintName",
	Queue: "name_printer",
}

func enqueueAfter(ctx context.Context, q *onceq.Queue, tx pgx.Tx) error {
	_, err := q.Enqueue(ctx, tx, Print.Job(PrintName{Name: "Ada"}))
	return err
}

func handler() onceq.Handler {
	return Print.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p PrintName) error {
		_, err := tx.Exec(ctx, `insert into greeted (name) values ($1)`, p.Name)
		return err
	})
}

// Move takes up to 1,000 jobs of a queue from gue, in one transaction, and returns how many it took. It skips the jobs that
// a worker of gue has locked.
func Move(ctx context.Context, pool interface {
	Begin(context.Context) (pgx.Tx, error)
}, q *onceq.Queue, queue string) (int, error) {
	const take = `
delete from gue_jobs where job_id in (
       select job_id from gue_jobs where queue = $1 order by run_at limit 1000 for update skip locked)
returning job_id, job_type, args, run_at`
	moved := 0
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, take, queue)
		if err != nil {
			return err
		}
		jobs, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (onceq.Job, error) {
			var id, kind string
			var args []byte
			var at time.Time
			err := row.Scan(&id, &kind, &args, &at)
			return onceq.Job{Kind: kind, Queue: queue, Payload: json.RawMessage(args), RunAt: at, Key: fmt.Sprint("gue:", id)}, err
		})
		if err != nil {
			return err
		}
		moved = len(jobs)
		_, err = q.EnqueueMany(ctx, tx, jobs)
		return err
	})
	return moved, err
}
