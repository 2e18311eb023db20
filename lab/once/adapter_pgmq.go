package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// pgmqAdapter has a queue for each kind of job, and one for customers' jobs, which are message groups. pgmq is SQL, so a message is
// deleted in the transaction of the handler's writes. If it is gone by then, that transaction is rolled back.
type pgmqAdapter struct{ pool *pgxpool.Pool }

func newPgmq(pool *pgxpool.Pool) (adapter, error) { return &pgmqAdapter{pool}, nil }

// pgmqLanes is the queue of customers' jobs.
const pgmqLanes = "lanes"

func (a *pgmqAdapter) setup(ctx context.Context) error {
	file, _, err := sqlFile("pgmq")
	if err != nil {
		return err
	}
	text, err := os.ReadFile(file)
	if err == nil {
		_, err = a.pool.Exec(ctx, string(text))
	}
	for _, queue := range []string{"work", "new", "long", pgmqLanes} {
		if err == nil {
			_, err = a.pool.Exec(ctx, "select pgmq.create($1)", queue)
		}
	}
	return err
}

// pgmqMessage is a message. pgmq counts its reads, and leaves it to the application how many are enough.
type pgmqMessage struct {
	N        int `json:"n"`
	Attempts int `json:"attempts"`
}

func (a *pgmqAdapter) enqueue(ctx context.Context, tx pgx.Tx, jobs []job) (answers []answer, err error) {
	if tx == nil {
		err = pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error {
			answers, err = a.enqueue(ctx, tx, jobs)
			return err
		})
		return answers, err
	}
	for _, j := range jobs {
		queue, headers := j.kind(), map[string]string{}
		switch {
		case j.Key != "":
			return nil, missing("it has no keys: its documentation says that it does not deduplicate")
		case j.Lane != "":
			queue, headers["x-pgmq-group"] = pgmqLanes, j.Lane
		case j.Limit != "":
			return nil, missing("it has no limit over several processes")
		case j.Rate != "":
			return nil, missing(noRate)
		case j.Group != "":
			return nil, missing("it has no jobs that wait for others")
		}
		var id int64
		err := tx.QueryRow(ctx, "select pgmq.send($1::text, $2::jsonb, $3::jsonb, clock_timestamp() + $4 * interval '1 ms')",
			queue, pgmqMessage{j.N, j.Attempts}, headers, j.Delay).Scan(&id)
		if err != nil {
			return nil, err
		}
		answers = append(answers, answer{ID: fmt.Sprint(queue, "/", id)})
	}
	return answers, nil
}

func (a *pgmqAdapter) work(ctx context.Context, c crew, handle func(context.Context, *run) error) (func(context.Context) error, error) {
	if c.Every > 0 {
		return nil, missing("it has no schedules")
	}
	running, stop := context.WithCancel(ctx)
	var loops sync.WaitGroup
	for _, queue := range append(c.kinds(), pgmqLanes) {
		loops.Go(func() {
			for busy := make(chan struct{}, c.AtOnce); running.Err() == nil; {
				work := context.WithoutCancel(running)
				messages, _ := a.read(work, queue, cap(busy)-len(busy)) // after an error it reads again
				for _, m := range messages {
					busy <- struct{}{}
					loops.Go(func() {
						a.one(work, queue, m, handle)
						<-busy
					})
				}
				select {
				case <-time.After(50 * time.Millisecond):
				case <-running.Done():
				}
			}
		})
	}
	return func(context.Context) error { stop(); loops.Wait(); return nil }, nil
}

// pgmqRead is a message that was read.
type pgmqRead struct {
	ID    int64
	Reads int
	Body  pgmqMessage
}

// read reads up to so many messages.
func (a *pgmqAdapter) read(ctx context.Context, queue string, qty int) ([]pgmqRead, error) {
	read, timeout := "read", 10
	switch queue {
	case pgmqLanes:
		read = "read_grouped_head"
	case "long": // longer than the handler takes, as its documentation recommends
		timeout = 3 * 60 * 60
	}
	rows, err := a.pool.Query(ctx, "select msg_id, read_ct, message from pgmq."+read+"($1::text, $2::integer, $3::integer)", queue, timeout, qty)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[pgmqRead])
}

// one handles a message.
func (a *pgmqAdapter) one(ctx context.Context, queue string, m pgmqRead, handle func(context.Context, *run) error) {
	if m.Body.Attempts > 0 && m.Reads > m.Body.Attempts {
		_, _ = a.pool.Exec(ctx, "select pgmq.archive($1::text, $2::bigint)", queue, m.ID)
		return
	}
	failed := false
	_ = pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error {
		err := handle(ctx, &run{
			n: m.Body.N, attempt: m.Reads,
			write: func(ctx context.Context, n int) error { _, err := tx.Exec(ctx, insertRow, n); return err },
			call: func(ctx context.Context, name string, fn func(context.Context, string) (string, error)) error {
				_, err := fn(ctx, fmt.Sprintf("pgmq-%s-%d-%s", queue, m.ID, name))
				return err
			},
			end: func(ctx context.Context) error { _, err := tx.Exec(ctx, "commit"); return err },
		})
		if err != nil {
			failed = true
			return err
		}
		var deleted bool
		err = tx.QueryRow(ctx, "select pgmq.delete($1::text, $2::bigint)", queue, m.ID).Scan(&deleted)
		if err == nil && !deleted {
			err = errors.New("the message is gone: somebody else has finished or deleted it")
		}
		return err
	})
	if failed { // it may come again at once
		_, _ = a.pool.Exec(ctx, "select pgmq.set_vt($1::text, $2::bigint, 0)", queue, m.ID)
	}
}

func (a *pgmqAdapter) left(ctx context.Context) (n int, err error) {
	err = a.pool.QueryRow(ctx, "select coalesce(sum(queue_length), 0)::bigint from pgmq.metrics_all()").Scan(&n)
	return n, err
}

func (a *pgmqAdapter) silence(context.Context) error { return nil } // the visibility timeout

func (a *pgmqAdapter) age(context.Context) error { return nil } // what is finished is gone

func (a *pgmqAdapter) cancel(ctx context.Context, id string) error {
	queue, number, _ := strings.Cut(id, "/")
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil {
		return err
	}
	var archived bool
	err = a.pool.QueryRow(ctx, "select pgmq.archive($1::text, $2::bigint)", queue, n).Scan(&archived)
	if err == nil && !archived {
		err = errors.New("not cancelled: it is gone")
	}
	return err
}
