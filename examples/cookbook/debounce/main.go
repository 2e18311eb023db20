// Debounce indexes a product some seconds after it was changed, once for all changes in that time. A change that comes
// while the index is being written is not lost.
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

const pause = 50 * time.Millisecond // seconds, in a real service

// index does not carry the product's name: that would be the name after the first change. The handler reads the current
// one.
var index = onceq.Kind[int]{
	Name:   "index",
	Key:    func(product int) string { return fmt.Sprint(product) },
	Window: onceq.UntilFinished, // the next change is a new job
}

// change writes first and then enqueues, in one transaction.
func change(ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue, product int, name string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `update products set name = $2, version = version + 1 where id = $1`, product, name)
		if err != nil {
			return err
		}
		job := index.Job(product)
		job.Delay = pause // from the first change on; with job.Replace from the last, which a job with a Lane or a Limit cannot have
		res, err := q.Enqueue(ctx, tx, job)
		fmt.Println("changed to", name+", duplicate:", res.Duplicate)
		return err
	})
}

func handler(pool *pgxpool.Pool, write func(name string) error) onceq.Handler {
	const read = `select name, version from products where id = $1`
	return index.Handle(func(ctx context.Context, l *onceq.Lease, product int) error {
		var name string
		var version, latest int
		if err := pool.QueryRow(ctx, read, product).Scan(&name, &version); err != nil {
			return err
		}
		if err := write(name); err != nil {
			return err
		}
		// The job is done if nothing has changed in the meantime. This locks the row before the key, as change does. So a
		// change either waits for the end of this transaction and finds the key free, or comes first and is seen here.
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := tx.QueryRow(ctx, read+` for update`, product).Scan(&name, &latest); err != nil {
				return err
			}
			if latest != version {
				return onceq.Reschedule(pause)
			}
			return l.Complete(ctx, tx)
		})
	})
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, `
		create table products (id int primary key, name text not null, version int not null default 1);
		insert into products values (7, 'tea')`)
	defer pool.Close()

	for _, name := range []string{"green tea", "Green Tea"} {
		example.Check(change(ctx, pool, q, 7, name))
	}
	writes := 0
	example.Work(ctx, q, handler(pool, func(name string) error {
		fmt.Println("index:", name)
		if writes++; writes == 1 {
			return change(ctx, pool, q, 7, "Sencha") // somebody else, in the meantime
		}
		stop()
		return nil
	}))
}

// Output:
// changed to green tea, duplicate: false
// changed to Green Tea, duplicate: true
// index: Green Tea
// changed to Sencha, duplicate: true
// index: Sencha
