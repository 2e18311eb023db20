// Package withgorm enqueues, completes and takes fences inside a transaction of GORM.
package withgorm

import (
	"context"
	"errors"

	"gorm.io/gorm"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/orm"
	"github.com/onceq/onceq/onceqsql"
)

// User is a row of users.
type User struct {
	ID       int64
	Email    string
	Welcomed bool
}

// handle returns a handle on the transaction that tx is in.
func handle(tx *gorm.DB) (onceq.DB, error) {
	in, ok := tx.Statement.ConnPool.(onceqsql.Transaction)
	if !ok {
		return nil, errors.New("this *gorm.DB is in no transaction")
	}
	return onceqsql.Tx(in), nil
}

// SignUp stores a user and enqueues the welcome. An error of then, the rest of the request, undoes both.
func SignUp(ctx context.Context, db *gorm.DB, q *onceq.Queue, email string, then func() error) error {
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		user := User{Email: email}
		if err := tx.Create(&user).Error; err != nil {
			return err
		}
		in, err := handle(tx)
		if err != nil {
			return err
		}
		if _, err := q.Enqueue(ctx, in, orm.Welcome.Job(orm.Mail{UserID: user.ID, Email: email})); err != nil {
			return err
		}
		return then()
	})
}

// SignUpOnce stores a user once for the key of a request, and returns the user's id to each repetition. An error of then
// undoes it, and the key is free again.
func SignUpOnce(ctx context.Context, db *gorm.DB, q *onceq.Queue, key, email string, then func() error) (userID int64, err error) {
	err = db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		in, err := handle(tx)
		if err != nil {
			return err
		}
		userID, err = orm.Once(ctx, q, in, key, email, func() (int64, error) {
			user := User{Email: email}
			err := tx.Create(&user).Error
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
func Welcomed(ctx context.Context, db *gorm.DB, l *onceq.Lease, m orm.Mail, then func() error) error {
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		in, err := handle(tx)
		if err != nil {
			return err
		}
		if err := tx.Model(&User{ID: m.UserID}).Update("welcomed", true).Error; err != nil {
			return err
		}
		if err := l.Complete(ctx, in); err != nil {
			return err
		}
		return then()
	})
}
