// Package frompgboss moves from pg-boss. It has the code after the move, and a function that moves the waiting jobs.
package frompgboss

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// Mailer sends the mail. key goes into its Idempotency-Key header.
type Mailer func(ctx context.Context, userID int, key string) error

type WelcomeMail struct {
	UserID int `json:"userId"`
}

var Welcome = onceq.Kind[WelcomeMail]{
	Name:   "welcome",
	Key:    func(m WelcomeMail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
	Window: onceq.UntilFinished, // like a singletonKey; by default the key stays for 24 h longer
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

// Move takes up to 1,000 jobs of a queue from pg-boss, in one transaction, and returns how many it took. It skips the jobs
// that pg-boss's workers are running.
func Move(ctx context.Context, pool interface {
	Begin(context.Context) (pgx.Tx, error)
}, q *onceq.Queue) (int, error) {
	const take = `
delete from pgboss.job
 where name = 'welcome' and id in (
       select id from pgboss.job
        where name = 'welcome' and state in ('created', 'retry') and not blocked
        order by created_on limit 1000 for update skip locked)
returning data, start_after`
	moved := 0
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, take)
		if err != nil {
			return err
		}
		seen := make(map[string]bool)
		var jobs []onceq.Job
		for rows.Next() {
			var data []byte
			var at time.Time
			var m WelcomeMail
			if err := rows.Scan(&data, &at); err != nil {
				return err
			}
			if err := json.Unmarshal(data, &m); err != nil {
				return err
			}
			moved++
			job := Welcome.Job(m)
			job.RunAt = at
			if !seen[job.Key] { // pg-boss may hold the same work more than once
				jobs, seen[job.Key] = append(jobs, job), true
			}
		}
		if err := rows.Err(); err != nil {
			return err
		}
		_, err = q.EnqueueMany(ctx, tx, jobs)
		return err
	})
	return moved, err
}
