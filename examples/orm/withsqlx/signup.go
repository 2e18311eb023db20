// Package withsqlx enqueues inside a transaction of sqlx.
package withsqlx

import (
	"context"

	"github.com/jmoiron/sqlx"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/orm"
	"github.com/onceq/onceq/onceqsql"
)

// User is a row of users.
type User struct {
	ID    int64
	Email string
}

// SignUp stores a user and enqueues his welcome. An error of then, the rest of the request, undoes both.
func SignUp(ctx context.Context, db *sqlx.DB, q *onceq.Queue, email string, then func() error) error {
	tx, err := db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	var user User
	if err := tx.GetContext(ctx, &user, `insert into users (email) values ($1) returning id, email`, email); err != nil {
		return err
	}
	if _, err := q.Enqueue(ctx, onceqsql.Tx(tx), orm.Welcome.Job(orm.Mail{UserID: user.ID, Email: email})); err != nil {
		return err
	}
	if err := then(); err != nil {
		return err
	}
	return tx.Commit()
}
