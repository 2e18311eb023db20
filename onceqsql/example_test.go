package onceqsql_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/exampletb"
	"github.com/onceq/onceq/onceqsql"
	"github.com/onceq/onceq/queuetest"
)

// database gives an example its own database. A program opens its database with sql.Open, and makes its queue over a
// pgxpool.Pool, on which its workers run.
func database() (ctx context.Context, db *sql.DB, q *onceq.Queue, done func()) {
	t := exampletb.New()
	test := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	db, err := sql.Open("pgx", test.URL)
	check(err)
	t.Cleanup(func() { check(db.Close()) })
	return t.Context(), db, test.Queue, t.Done
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// The user and the job are stored in one transaction of database/sql: both, or neither.
func ExampleTx() {
	ctx, db, q, done := database()
	defer done()
	_, err := db.ExecContext(ctx, `create table users (id int primary key)`)
	check(err)

	signUp := func(id int) (onceq.Result, error) {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return onceq.Result{}, err
		}
		defer tx.Rollback() //nolint:errcheck // nothing to undo after Commit
		if _, err := tx.ExecContext(ctx, `insert into users values ($1)`, id); err != nil {
			return onceq.Result{}, err
		}
		res, err := q.Enqueue(ctx, onceqsql.Tx(tx), onceq.Job{Kind: "welcome", Key: fmt.Sprintf("welcome:%d", id)})
		if err != nil {
			return onceq.Result{}, err
		}
		return res, tx.Commit()
	}
	res, err := signUp(42)
	fmt.Println(res.State, err)
	_, err = signUp(42)
	fmt.Println("the user is there already:", err != nil)
	// Output:
	// waiting <nil>
	// the user is there already: true
}

// Outside a transaction each call commits on its own.
func ExampleDB() {
	ctx, db, q, done := database()
	defer done()

	_, err := q.EnqueueMany(ctx, onceqsql.DB(db), []onceq.Job{{Kind: "ping", Key: "a"}, {Kind: "ping", Key: "b"}})
	check(err)
	info, err := q.GetByKey(ctx, onceqsql.DB(db), "ping", "b")
	check(err)
	fmt.Println(info.Kind, info.Key, info.State)
	// Output: ping b waiting
}
