// Transaction stores a user and enqueues the work that follows in one transaction. A worker does that work and completes
// the job in one transaction. Nothing is lost and nothing happens twice, wherever a crash comes.
package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type signUp struct {
	UserID int `json:"user_id"`
}

var account = onceq.Kind[signUp]{
	Name: "open-account",
	Key:  func(s signUp) string { return fmt.Sprintf("open-account:%d", s.UserID) },
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, `
		create table users (id int primary key, name text not null);
		create table accounts (user_id int primary key references users, balance int not null)`)
	defer pool.Close()

	register := func(id int, name string, fail bool) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `insert into users values ($1, $2)`, id, name); err != nil {
				return err
			}
			if _, err := q.Enqueue(ctx, tx, account.Job(signUp{UserID: id})); err != nil {
				return err
			}
			if fail {
				return errors.New("the request was cut off")
			}
			return nil
		})
	}
	fmt.Println("Ada:", register(1, "Ada", false))
	fmt.Println("Bob:", register(2, "Bob", true)) // neither a user nor a job

	example.Work(ctx, q, account.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, s signUp) error {
		// This commits together with the job's completion, or not at all.
		defer stop()
		_, err := tx.Exec(ctx, `insert into accounts values ($1, 100)`, s.UserID)
		return err
	}))

	var users, accounts int
	example.Check(pool.QueryRow(context.Background(), `select (select count(*) from users), (select count(*) from accounts)`).Scan(&users, &accounts))
	fmt.Println("users:", users, "accounts:", accounts)
}

// Output:
// Ada: <nil>
// Bob: the request was cut off
// users: 1 accounts: 1
