// Tenants gives each tenant a schema with its own tables and its own queue, and one process works all of them. On Citus with
// citus.enable_schema_based_sharding each schema is on one node, and so is each transaction of this program. Nothing here has
// to know of that: see docs/run/growing.md.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
	"github.com/onceq/onceq/migrations"
)

type order struct {
	ID int `json:"id"`
}

// tenant is a schema: its queue, and the names of its tables.
type tenant struct {
	name  string
	queue *onceq.Queue
	table string
}

var ship = onceq.Kind[order]{
	Name: "ship",
	Key:  func(o order) string { return fmt.Sprintf("ship:%d", o.ID) },
}

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	example.Check(err)
	defer pool.Close()

	var tenants []*tenant
	for _, name := range []string{"acme", "globex", "initech", "umbrella"} {
		t, err := open(ctx, pool, name)
		example.Check(err)
		tenants = append(tenants, t)
	}
	for n, t := range tenants {
		for id := range n + 1 {
			example.Check(t.place(ctx, pool, order{id}))
			example.Check(t.place(ctx, pool, order{id})) // a client that asks again
		}
	}
	example.Check(work(ctx, tenants))
	for _, t := range tenants {
		var shipped int
		example.Check(pool.QueryRow(ctx, "select count(*) from "+t.table+" where shipped").Scan(&shipped))
		fmt.Println(t.name, "shipped", shipped)
	}
}

// open makes the tenant's schema and tables if they are missing. In a service a deploy does this for all tenants, and the
// sign-up for a new one.
func open(ctx context.Context, pool *pgxpool.Pool, name string) (*tenant, error) {
	t := &tenant{name: name, table: pgx.Identifier{name, "orders"}.Sanitize()}
	err := pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return migrations.Up(ctx, c.Conn(), name) })
	if err != nil {
		return nil, err
	}
	if _, err := pool.Exec(ctx, "create table if not exists "+t.table+" (id int primary key, shipped boolean not null default false)"); err != nil {
		return nil, err
	}
	t.queue, err = onceq.New(pool, &onceq.Config{Schema: name, Logger: slog.New(slog.DiscardHandler)})
	return t, err
}

// place stores an order and the job for it in one transaction: both are in the tenant's schema.
func (t *tenant) place(ctx context.Context, pool *pgxpool.Pool, o order) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "insert into "+t.table+" (id) values ($1) on conflict do nothing", o.ID); err != nil {
			return err
		}
		_, err := t.queue.EnqueueUnique(ctx, tx, ship.Job(o))
		return err
	})
}

// work runs one worker for each tenant until nothing is due. A service calls Run instead of Drain. All workers use one pool.
func work(ctx context.Context, tenants []*tenant) error {
	var running sync.WaitGroup
	failed := make([]error, len(tenants))
	for i, t := range tenants {
		handler := ship.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, o order) error {
			_, err := tx.Exec(ctx, "update "+t.table+" set shipped = true where id = $1", o.ID)
			return err
		})
		worker, err := onceq.NewWorker(t.queue, onceq.WorkerConfig{}, handler)
		if err != nil {
			return err
		}
		running.Go(func() { failed[i] = worker.Drain(ctx, 0) })
	}
	running.Wait()
	if i := slices.IndexFunc(failed, func(err error) bool { return err != nil }); i >= 0 {
		return fmt.Errorf("tenant %s: %w", tenants[i].name, failed[i])
	}
	return nil
}

// Output:
// acme shipped 1
// globex shipped 2
// initech shipped 3
// umbrella shipped 4
