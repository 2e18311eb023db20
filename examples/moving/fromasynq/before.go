// Package fromasynq moves from asynq. It has the code before, the code after, and what both use while both run.
package fromasynq

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/hibiken/asynq"
)

// Mailer sends the mail. key goes into its Idempotency-Key header.
type Mailer func(ctx context.Context, userID int, key string) error

type WelcomeMail struct {
	UserID int `json:"user_id"`
}

func enqueueBefore(ctx context.Context, client *asynq.Client, m WelcomeMail) error {
	payload, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_, err = client.EnqueueContext(ctx, asynq.NewTask("welcome", payload),
		asynq.Queue("mail"), asynq.TaskID(fmt.Sprintf("welcome:%d", m.UserID)), asynq.Retention(24*time.Hour))
	return err
}

func muxBefore(mail Mailer) *asynq.ServeMux {
	mux := asynq.NewServeMux()
	mux.HandleFunc("welcome", func(ctx context.Context, t *asynq.Task) error {
		var m WelcomeMail
		if err := json.Unmarshal(t.Payload(), &m); err != nil {
			return fmt.Errorf("%w: %w", err, asynq.SkipRetry)
		}
		return mail(ctx, m.UserID, "")
	})
	return mux
}
