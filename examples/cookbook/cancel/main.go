// Cancel ends the jobs of a user in the transaction that deletes the user. Waiting jobs end at once, and running ones as
// soon as their worker is told.
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
	"github.com/onceq/onceq/onceqops"
)

type work struct {
	UserID int    `json:"user_id"`
	What   string `json:"what"`
}

// The scope of a job's key says to whom the job belongs.
func scope(w work) string { return fmt.Sprintf("user:%d", w.UserID) }

var (
	export = onceq.Kind[work]{Name: "export", Scope: scope, Key: func(w work) string { return "export:" + w.What }}
	remind = onceq.Kind[work]{Name: "remind", Scope: scope, Key: func(w work) string { return "remind:" + w.What }}
)

func deleteUser(ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue, id int) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `delete from users where id = $1`, id); err != nil {
			return err
		}
		cancelled, running, err := onceqops.New(q).CancelMany(ctx, tx, onceqops.Filter{Scope: fmt.Sprintf("user:%d", id)})
		fmt.Println("cancelled:", cancelled, "told to end:", running)
		return err
	})
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, `create table users (id int primary key); insert into users values (7), (8)`)
	defer pool.Close()

	running, err := q.Enqueue(ctx, pool, export.Job(work{7, "photos"}))
	example.Check(err)
	for _, user := range []int{7, 8} {
		job := remind.Job(work{user, "invoice"})
		job.Delay = 24 * time.Hour
		_, err := q.Enqueue(ctx, pool, job)
		example.Check(err)
	}

	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: 15 * time.Second}, // a running handler is told within a third of this
		export.Handle(func(ctx context.Context, l *onceq.Lease, w work) error {
			example.Check(deleteUser(context.WithoutCancel(ctx), pool, q, w.UserID)) // somebody else, in the meantime
			<-ctx.Done()                                                             // a long export watches ctx, and so do the calls that it makes
			fmt.Println("the export ends, cancelled:", errors.Is(context.Cause(ctx), onceq.ErrCancelled))
			stop()
			return ctx.Err()
		}),
		// This handler may begin while the user is being deleted, so it checks in its own transaction.
		remind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, w work) error {
			var there bool
			err := tx.QueryRow(ctx, `select exists (select from users where id = $1)`, w.UserID).Scan(&there)
			if err != nil || !there {
				return err
			}
			return nil // remind
		}))
	example.Check(err)
	example.Check(w.Run(ctx))

	ctx = context.Background()
	info, err := q.Get(ctx, pool, running.ID)
	example.Check(err)
	fmt.Println("export:", info.State)
	left, err := onceqops.New(q).List(ctx, pool, onceqops.Filter{Kind: remind.Name, States: []onceq.State{onceq.StateDelayed}})
	example.Check(err)
	fmt.Println("reminders of others:", len(left))
}

// Output:
// cancelled: 1 told to end: 1
// the export ends, cancelled: true
// export: cancelled
// reminders of others: 1
