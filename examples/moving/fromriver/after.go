package fromriver

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/onceq/onceq"
)

type WelcomeMail struct {
	UserID int `json:"user_id"`
}

var Welcome = onceq.Kind[WelcomeMail]{
	Name:  "welcome",
	Queue: "mail",
	Key:   func(m WelcomeMail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
}

func handlerAfter(mail Mailer) onceq.Handler {
	return Welcome.Handle(func(ctx context.Context, l *onceq.Lease, m WelcomeMail) error {
		_, err := onceq.Once(ctx, l, "mail", func(ctx context.Context, key string) (bool, error) {
			return true, mail(ctx, m.UserID, key)
		})
		return err
	})
}

func enqueueAfter(ctx context.Context, q *onceq.Queue, tx pgx.Tx, m WelcomeMail) error {
	_, err := q.Enqueue(ctx, tx, Welcome.Job(m))
	return err
}

// Bridge replaces WelcomeWorker while both run.
type Bridge struct {
	river.WorkerDefaults[WelcomeArgs]
	Pool interface {
		Begin(context.Context) (pgx.Tx, error)
	}
	Queue *onceq.Queue
}

// Work hands a job over. River's job is completed in the transaction in which onceq's is accepted.
func (b *Bridge) Work(ctx context.Context, job *river.Job[WelcomeArgs]) error {
	return pgx.BeginFunc(ctx, b.Pool, func(tx pgx.Tx) error {
		if _, err := b.Queue.Enqueue(ctx, tx, Welcome.Job(WelcomeMail(job.Args))); err != nil {
			return err
		}
		_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
		return err
	})
}
