package fromasynq

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

var Welcome = onceq.Kind[WelcomeMail]{
	Name:  "welcome",
	Queue: "mail",
	Key:   func(m WelcomeMail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
}

func enqueueAfter(ctx context.Context, q *onceq.Queue, tx pgx.Tx) error {
	_, err := q.Enqueue(ctx, tx, Welcome.Job(WelcomeMail{UserID: 42}))
	return err
}

func handler(mail Mailer) onceq.Handler {
	return Welcome.Handle(func(ctx context.Context, l *onceq.Lease, m WelcomeMail) error {
		_, err := onceq.Once(ctx, l, "mail", func(ctx context.Context, key string) (bool, error) {
			return true, mail(ctx, m.UserID, key)
		})
		return err
	})
}

// Bridge hands asynq's tasks over, in place of the handler. Asynq may deliver one again; its key is accepted once.
func Bridge(q *onceq.Queue, db onceq.DB) asynq.HandlerFunc {
	return func(ctx context.Context, t *asynq.Task) error {
		var m WelcomeMail
		if err := json.Unmarshal(t.Payload(), &m); err != nil {
			return fmt.Errorf("%w: %w", err, asynq.SkipRetry)
		}
		_, err := q.Enqueue(ctx, db, Welcome.Job(m))
		return err
	}
}
