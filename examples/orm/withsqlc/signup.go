// Package withsqlc enqueues inside the transaction of queries that sqlc generated.
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

// SignUp stores a user and enqueues his welcome. An error of then, the rest of the request, undoes both.
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
