package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
)

// WelcomeMail is what the job carries.
type WelcomeMail struct {
	UserID int    `json:"user_id"`
	Email  string `json:"email"`
}

// Welcome is declared once, for the code that enqueues it and the code that runs it. The key says what makes
// the work unique: one welcome mail for each user.
var Welcome = onceq.Kind[WelcomeMail]{
	Name: "welcome",
	Key:  func(m WelcomeMail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
}

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	check(err)
	defer pool.Close()

	// Do this once per deploy, where your migrations run.
	check(pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return migrations.Up(ctx, c.Conn(), "onceq") }))

	q, err := onceq.New(pool, nil)
	check(err)

	// Enqueue inside your own transaction: the job exists if and only if the user does.
	for range 2 { // the client submits twice
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// insert into users …
			res, err := q.Enqueue(ctx, tx, Welcome.Job(WelcomeMail{UserID: 42, Email: "ada@example.com"}))
			if err == nil {
				fmt.Println("enqueued, duplicate:", res.Duplicate)
			}
			return err
		}))
	}

	// There may be any number of workers, in any number of processes. A service calls Run, which works until ctx
	// ends. Drain returns when nothing is due.
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		Welcome.Handle(func(ctx context.Context, l *onceq.Lease, m WelcomeMail) error {
			fmt.Println("sending to", m.Email, "in attempt", l.Attempt)
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Output:
// enqueued, duplicate: false
// enqueued, duplicate: true
// sending to ada@example.com in attempt 1
