// Onlysql is an application with a *sql.DB and no pgxpool.Pool. Its worker completes jobs in transactions of the *sql.DB.
package main

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"log/slog"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/orm"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqsql"
)

// withPQ is for an application that uses lib/pq. The pool gets the same connection string. It opens connections only when
// it needs them, and never more than pool_max_conns, which may be part of its connection string.
func withPQ(ctx context.Context, url string) (*sql.DB, *pgxpool.Pool, error) {
	db, err := sql.Open("postgres", url)
	if err != nil {
		return nil, nil, err
	}
	pool, err := pgxpool.New(ctx, url)
	return db, pool, err
}

// withPGX is for an application that uses pgx's stdlib driver. Both share the pool's connections.
func withPGX(ctx context.Context, url string) (*sql.DB, *pgxpool.Pool, error) {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return nil, nil, err
	}
	return stdlib.OpenDBFromPool(pool), pool, nil
}

func main() {
	ctx := context.Background()
	for i, open := range []func(context.Context, string) (*sql.DB, *pgxpool.Pool, error){withPQ, withPGX} {
		db, pool, err := open(ctx, os.Getenv("DATABASE_URL"))
		check(err)
		check(pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return migrations.Up(ctx, c.Conn(), "onceq") }))
		_, err = db.ExecContext(ctx, `create table if not exists mails (user_id bigint, attempt int)`)
		check(err)
		q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
		check(err)

		mail := orm.Mail{UserID: int64(42 + i), Email: "ada@example.com"}
		for range 2 {
			check(signUp(ctx, db, q, mail))
		}
		w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, handler(db))
		check(err)
		check(w.Drain(ctx, 0))
		var mails int
		check(db.QueryRowContext(ctx, `select count(*) from mails where user_id = $1`, mail.UserID).Scan(&mails))
		fmt.Printf("%T: %d mail\n", db.Driver(), mails)
		check(db.Close())
		pool.Close()
	}
}

func signUp(ctx context.Context, db *sql.DB, q *onceq.Queue, mail orm.Mail) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	// insert into users …
	if _, err := q.Enqueue(ctx, onceqsql.Tx(tx), orm.Welcome.Job(mail)); err != nil {
		return err
	}
	return tx.Commit()
}

func handler(db *sql.DB) onceq.Handler {
	return orm.Welcome.Handle(func(ctx context.Context, l *onceq.Lease, m orm.Mail) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if _, err := tx.ExecContext(ctx, `insert into mails values ($1, $2)`, m.UserID, l.Attempt); err != nil {
			return err
		}
		if err := l.Complete(ctx, onceqsql.Tx(tx)); err != nil {
			return err
		}
		return tx.Commit()
	})
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Output:
// *pq.Driver: 1 mail
// *stdlib.Driver: 1 mail
