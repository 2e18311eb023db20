// Upsert sets a state instead of adding to it, so it may run as often as it likes. In a transaction with the job's
// completion even adding is safe: both happen or neither.
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

type product struct {
	ID int `json:"id"`
}

var index = onceq.Kind[product]{
	Name: "index", Queue: "search",
	Backoff: func(int, error) time.Duration { return 0 },
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, `
		create table products (id int primary key, name text not null);
		insert into products values (7, 'chair');
		create table search_index (id int primary key, name text not null);
		create table log (id int not null)`)
	defer pool.Close()

	for _, id := range []int{7, 7, 7, 8} { // without a key, each is a job of its own
		_, err := q.Enqueue(ctx, pool, index.Job(product{id}))
		example.Check(err)
	}
	example.Drain(ctx, q, index.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p product) error {
		indexed, err := tx.Exec(ctx, `
			insert into search_index select id, name from products where id = $1
			on conflict (id) do update set name = excluded.name`, p.ID)
		if err != nil {
			return err
		}
		if indexed.RowsAffected() == 0 {
			return nil // deleted after it was enqueued: nothing to do
		}
		if _, err = tx.Exec(ctx, `insert into log values ($1)`, p.ID); err != nil {
			return err
		}
		if l.Attempt == 1 {
			return errors.New("fails after both statements, the first time")
		}
		return nil
	}))
	var rows, log int
	example.Check(pool.QueryRow(ctx, `select (select count(*) from search_index), (select count(*) from log)`).Scan(&rows, &log))
	fmt.Println("jobs: 4, attempts: 7, rows:", rows, "log:", log)
}

// Output:
// jobs: 4, attempts: 7, rows: 1 log: 3
