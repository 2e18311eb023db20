// Package withbun enqueues inside a transaction of bun.
package withbun

import (
	"context"

	"github.com/uptrace/bun"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/orm"
	"github.com/onceq/onceq/onceqsql"
)

// User is a row of users.
type User struct {
	bun.BaseModel `bun:"table:users"`

	ID    int64 `bun:",pk,autoincrement"`
	Email string
}

// SignUp stores a user and enqueues his welcome. An error of then, the rest of the request, undoes both.
func SignUp(ctx context.Context, db *bun.DB, q *onceq.Queue, email string, then func() error) error {
	return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		user := User{Email: email}
		if _, err := tx.NewInsert().Model(&user).Exec(ctx); err != nil {
			return err
		}
		// The *sql.Tx inside: bun's own methods put arguments into the text in place of question marks.
		if _, err := q.Enqueue(ctx, onceqsql.Tx(tx.Tx), orm.Welcome.Job(orm.Mail{UserID: user.ID, Email: email})); err != nil {
			return err
		}
		return then()
	})
}
