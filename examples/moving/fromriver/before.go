// Package fromriver moves from River. It has the code before, the code after, and the bridge between them.
package fromriver

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
)

// Mailer sends the mail. key goes into its Idempotency-Key header.
type Mailer func(ctx context.Context, userID int, key string) error

type WelcomeArgs struct {
	UserID int `json:"user_id"`
}

func (WelcomeArgs) Kind() string { return "welcome" }

func (WelcomeArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: "mail", UniqueOpts: river.UniqueOpts{ByArgs: true}}
}

type WelcomeWorker struct {
	river.WorkerDefaults[WelcomeArgs]
	Mail Mailer
}

func (w *WelcomeWorker) Work(ctx context.Context, job *river.Job[WelcomeArgs]) error {
	return w.Mail(ctx, job.Args.UserID, "")
}

func insertBefore(ctx context.Context, client *river.Client[pgx.Tx], tx pgx.Tx, args WelcomeArgs) error {
	_, err := client.InsertTx(ctx, tx, args, nil)
	return err
}
