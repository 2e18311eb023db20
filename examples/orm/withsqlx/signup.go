// Package withsqlx enqueues, completes and takes fences inside a transaction of sqlx.
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

// SignUp stores a user and enqueues the welcome. An error of then, the rest of the request, undoes both.
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

// SignUpOnce stores a user once for the key of a request, and returns the user's id to each repetition. An error of then
// undoes it, and the key is free again.
func SignUpOnce(ctx context.Context, db *sqlx.DB, q *onceq.Queue, key, email string, then func() error) (userID int64, err error) {
	tx, err := db.BeginTxx(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback() }()
	userID, err = orm.Once(ctx, q, onceqsql.Tx(tx), key, email, func() (int64, error) {
		var id int64
		err := tx.GetContext(ctx, &id, `insert into users (email) values ($1) returning id`, email)
		return id, err
	})
	if err != nil {
		return 0, err
	}
	if err := then(); err != nil {
		return 0, err
	}
	return userID, tx.Commit()
}

// Welcomed is for the handler of the welcome. It records the welcome and completes the job. An error of then, the rest of
// the handler, undoes both, and the handler must return it.
func Welcomed(ctx context.Context, db *sqlx.DB, l *onceq.Lease, m orm.Mail, then func() error) error {
	tx, err := db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(ctx, `update users set welcomed = true where id = $1`, m.UserID); err != nil {
		return err
	}
	if err := l.Complete(ctx, onceqsql.Tx(tx)); err != nil {
		return err
	}
	if err := then(); err != nil {
		return err
	}
	return tx.Commit()
}
