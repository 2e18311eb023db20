// Package withent enqueues inside a transaction of ent.
package withent

import (
	"context"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/orm"
	"github.com/onceq/onceq/examples/orm/withent/ent"
	"github.com/onceq/onceq/onceqsql"
)

//go:generate go run -mod=mod entgo.io/ent/cmd/ent generate --feature sql/execquery --target ./ent ./schema

// SignUp stores a user and enqueues his welcome. An error of then, the rest of the request, undoes both.
func SignUp(ctx context.Context, db *ent.Client, q *onceq.Queue, email string, then func() error) error {
	tx, err := db.Tx(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	user, err := tx.User.Create().SetEmail(email).Save(ctx)
	if err != nil {
		return err
	}
	// The feature sql/execquery gives the transaction ExecContext and QueryContext.
	if _, err := q.Enqueue(ctx, onceqsql.Tx(tx), orm.Welcome.Job(orm.Mail{UserID: user.ID, Email: email})); err != nil {
		return err
	}
	if err := then(); err != nil {
		return err
	}
	return tx.Commit()
}
