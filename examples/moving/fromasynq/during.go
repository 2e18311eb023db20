package fromasynq

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/onceq/onceq"
)

// Fenced sends the mail once, even if both queues have work for it.
func Fenced(q *onceq.Queue, mail Mailer) Mailer {
	return func(ctx context.Context, userID int, _ string) error {
		_, err := onceq.Do(ctx, q, onceq.FenceSpec{Scope: "mail", Key: fmt.Sprintf("welcome:%d", userID), Window: 30 * 24 * time.Hour},
			func(ctx context.Context, c *onceq.FenceLease) (bool, error) {
				return true, mail(ctx, userID, c.IdempotencyKey())
			})
		return err
	}
}

func muxDuring(q *onceq.Queue, mail Mailer) *asynq.ServeMux { return muxBefore(Fenced(q, mail)) }

var configDuring = asynq.Config{
	Queues:    map[string]int{"mail": 1},
	IsFailure: onceq.IsFailure, // an error because the other queue is sending spends no retry
}

func handlerDuring(q *onceq.Queue, mail Mailer) onceq.Handler {
	fenced := Fenced(q, mail)
	return Welcome.Handle(func(ctx context.Context, _ *onceq.Lease, m WelcomeMail) error {
		return fenced(ctx, m.UserID, "")
	})
}

// Bridge hands asynq's tasks over instead of handling them. Asynq may deliver a task again, but its key is accepted once.
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
