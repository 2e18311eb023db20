package fromasynq

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

var Welcome = onceq.Kind[WelcomeMail]{
	Name:  "welcome",
	Queue: "mail",
	Key:   func(m WelcomeMail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
}

func enqueueAfter(ctx context.Context, q *onceq.Queue, tx pgx.Tx, m WelcomeMail) error {
	_, err := q.Enqueue(ctx, tx, Welcome.Job(m))
	return err
}

func handlerAfter(mail Mailer) onceq.Handler {
	return Welcome.Handle(func(ctx context.Context, l *onceq.Lease, m WelcomeMail) error {
		_, err := onceq.Once(ctx, l, "mail", func(ctx context.Context, key string) (bool, error) {
			return true, mail(ctx, m.UserID, key)
		})
		return err
	})
}
