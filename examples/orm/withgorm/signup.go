// Package withgorm enqueues inside a transaction of GORM.
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
	ID    int64
	Email string
}

// SignUp stores a user and enqueues his welcome. An error of then, the rest of the request, undoes both.
func SignUp(ctx context.Context, db *gorm.DB, q *onceq.Queue, email string, then func() error) error {
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		user := User{Email: email}
		if err := tx.Create(&user).Error; err != nil {
			return err
		}
		in, ok := tx.Statement.ConnPool.(onceqsql.Transaction)
		if !ok {
			return errors.New("this *gorm.DB is in no transaction")
		}
		if _, err := q.Enqueue(ctx, onceqsql.Tx(in), orm.Welcome.Job(orm.Mail{UserID: user.ID, Email: email})); err != nil {
			return err
		}
		return then()
	})
}
