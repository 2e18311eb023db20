// Package handlertest shows how to test a handler: run it twice against a real database. The handler is in welcome.go, and
// its test in welcome_test.go.
package handlertest

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// Mailer sends mail.
type Mailer interface {
	Send(ctx context.Context, to, messageID string) error
}

// WelcomeMail is what the job carries.
type WelcomeMail struct {
	UserID int    `json:"user_id"`
	Email  string `json:"email"`
}

// Welcome sends the welcome mail and records it in email_log.
var Welcome = onceq.Kind[WelcomeMail]{Name: "welcome"}

// SignUp is the code that enqueues: the mail goes out if tx commits.
func SignUp(ctx context.Context, q *onceq.Queue, tx pgx.Tx, user int, email string) error {
	_, err := q.Enqueue(ctx, tx, Welcome.Job(WelcomeMail{user, email}))
	return err
}

// Handler sends one welcome mail, however often its job is delivered. A fence protects the sending, and the record commits
// with the job's completion.
func Handler(m Mailer) onceq.Handler {
	return Welcome.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, w WelcomeMail) error {
		_, err := onceq.Once(ctx, l, "send", func(ctx context.Context, key string) (bool, error) {
			return true, m.Send(ctx, w.Email, key+"@mail.example.com")
		})
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `insert into email_log (user_id, template) values ($1, 'welcome')`, w.UserID)
		return err
	})
}
