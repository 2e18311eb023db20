// Package withbun enqueues, completes and takes fences inside a transaction of bun.
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

	ID       int64 `bun:",pk,autoincrement"`
	Email    string
	Welcomed bool
}

// SignUp stores a user and enqueues the welcome. An error of then, the rest of the request, undoes both.
func SignUp(ctx context.Context, db *bun.DB, q *onceq.Queue, email string, then func() error) error {
	return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		user := User{Email: email}
		if _, err := tx.NewInsert().Model(&user).Exec(ctx); err != nil {
			return err
		}
		// Use the *sql.Tx inside: bun's own methods replace question marks in the text by arguments.
		if _, err := q.Enqueue(ctx, onceqsql.Tx(tx.Tx), orm.Welcome.Job(orm.Mail{UserID: user.ID, Email: email})); err != nil {
			return err
		}
		return then()
	})
}

// SignUpOnce stores a user once for the key of a request, and returns the user's id to each repetition. An error of then
// undoes it, and the key is free again.
func SignUpOnce(ctx context.Context, db *bun.DB, q *onceq.Queue, key, email string, then func() error) (userID int64, err error) {
	err = db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		userID, err = orm.Once(ctx, q, onceqsql.Tx(tx.Tx), key, email, func() (int64, error) {
			user := User{Email: email}
			_, err := tx.NewInsert().Model(&user).Exec(ctx)
			return user.ID, err
		})
		if err != nil {
			return err
		}
		return then()
	})
	return userID, err
}

// Welcomed is for the handler of the welcome. It records the welcome and completes the job. An error of then, the rest of
// the handler, undoes both, and the handler must return it.
func Welcomed(ctx context.Context, db *bun.DB, l *onceq.Lease, m orm.Mail, then func() error) error {
	return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		if _, err := tx.NewUpdate().Model((*User)(nil)).Set("welcomed = true").Where("id = ?", m.UserID).Exec(ctx); err != nil {
			return err
		}
		if err := l.Complete(ctx, onceqsql.Tx(tx.Tx)); err != nil {
			return err
		}
		return then()
	})
}
