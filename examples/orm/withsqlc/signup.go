// Package withsqlc enqueues, completes and takes fences inside the transaction of queries that sqlc generated.
package withsqlc

import (
	"context"
	"database/sql"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/orm"
	"github.com/onceq/onceq/examples/orm/withsqlc/users"
	"github.com/onceq/onceq/onceqsql"
)

//go:generate go run github.com/sqlc-dev/sqlc/cmd/sqlc@v1.31.1 generate

// SignUp stores a user and enqueues the welcome. An error of then, the rest of the request, undoes both.
func SignUp(ctx context.Context, db *sql.DB, q *onceq.Queue, email string, then func() error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	user, err := users.New(db).WithTx(tx).CreateUser(ctx, email)
	if err != nil {
		return err
	}
	if _, err := q.Enqueue(ctx, onceqsql.Tx(tx), orm.Welcome.Job(orm.Mail{UserID: user.ID, Email: user.Email})); err != nil {
		return err
	}
	if err := then(); err != nil {
		return err
	}
	return tx.Commit()
}

// SignUpOnce stores a user once for the key of a request, and returns the user's id to each repetition. An error of then
// undoes it, and the key is free again.
func SignUpOnce(ctx context.Context, db *sql.DB, q *onceq.Queue, key, email string, then func() error) (userID int64, err error) {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback() }()
	userID, err = orm.Once(ctx, q, onceqsql.Tx(tx), key, email, func() (int64, error) {
		user, err := users.New(db).WithTx(tx).CreateUser(ctx, email)
		return user.ID, err
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
func Welcomed(ctx context.Context, db *sql.DB, l *onceq.Lease, m orm.Mail, then func() error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := users.New(db).WithTx(tx).SetWelcomed(ctx, m.UserID); err != nil {
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
