// Package example is what the example programs share: a connection, the tables, and no error handling.
package example

import (
	"context"
	"log"
	"log/slog"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
)

// Open connects to DATABASE_URL, makes sure that onceq's tables and those of ddl are there, and returns a queue.
func Open(ctx context.Context, ddl string) (*pgxpool.Pool, *onceq.Queue) {
	url := os.Getenv("DATABASE_URL")
	if url == "" {
		log.Fatal("set DATABASE_URL to a database for trying things out, such as postgres://localhost/scratch")
	}
	pool, err := pgxpool.New(ctx, url)
	Check(err)
	Check(pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return migrations.Up(ctx, c.Conn(), "onceq") }))
	_, err = pool.Exec(ctx, ddl)
	Check(err)
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	Check(err)
	return pool, q
}

// Check ends the program on an error.
func Check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Work runs a worker with the handlers until stop is called.
func Work(ctx context.Context, q *onceq.Queue, handlers ...onceq.Handler) {
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, handlers...)
	Check(err)
	Check(w.Run(ctx))
}

// Drain runs a worker with the handlers until nothing is due.
func Drain(ctx context.Context, q *onceq.Queue, handlers ...onceq.Handler) {
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, handlers...)
	Check(err)
	Check(w.Drain(ctx, 0))
}
