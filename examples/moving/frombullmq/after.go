// Package frombullmq moves from BullMQ. It has the code after the move, and an endpoint through which Node hands jobs over.
package frombullmq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// Mailer sends the mail. key goes into its Idempotency-Key header.
type Mailer func(ctx context.Context, userID int, key string) error

type WelcomeMail struct {
	UserID int `json:"userId"`
}

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

// Accept takes jobs from producers in Node, and from a worker of BullMQ that empties its queue. Only a 2xx says that the
// job is stored. After anything else the caller may try again, because the key is accepted once.
func Accept(q *onceq.Queue, db onceq.DB) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var m WelcomeMail
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, onceq.MaxPayloadBytes)).Decode(&m); err != nil {
			http.Error(w, "the body is not a welcome mail", http.StatusBadRequest)
			return
		}
		switch _, err := q.Enqueue(r.Context(), db, Welcome.Job(m)); {
		case errors.Is(err, onceq.ErrMismatch):
			http.Error(w, err.Error(), http.StatusConflict)
		case err != nil:
			http.Error(w, "try again", http.StatusServiceUnavailable)
		default:
			w.WriteHeader(http.StatusAccepted)
		}
	}
}
