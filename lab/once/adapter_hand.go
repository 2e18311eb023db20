package main

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// handAdapter is the loop that people write by hand: one transaction locks the job, has the handler's writes, and deletes
// the job. A unique index on the key makes a second insert do nothing.
type handAdapter struct{ pool *pgxpool.Pool }

func newHand(pool *pgxpool.Pool) (adapter, error) { return &handAdapter{pool}, nil }

func (a *handAdapter) setup(ctx context.Context) error {
	_, err := a.pool.Exec(ctx, `
create table hand_jobs (
  id bigint generated always as identity primary key, run_at timestamptz not null, queue text not null, kind text not null,
  n int not null, key text unique, attempts int not null default 0, max_attempts int not null
);
create index on hand_jobs (queue, run_at, id)`)
	return err
}

func (a *handAdapter) enqueue(ctx context.Context, tx pgx.Tx, jobs []job) (answers []answer, err error) {
	if tx == nil {
		err = pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error {
			answers, err = a.enqueue(ctx, tx, jobs)
			return err
		})
		return answers, err
	}
	for _, j := range jobs {
		if j.Lane+j.Limit+j.Rate+j.Group != "" {
			return nil, missing("a loop by hand has no order or limit of its own")
		}
		var key *string
		if j.Key != "" {
			key = &j.Key
		}
		if j.Attempts == 0 {
			j.Attempts = 25
		}
		var id int64
		err := tx.QueryRow(ctx, `
insert into hand_jobs (run_at, queue, kind, n, key, max_attempts) values (now() + $1 * interval '1 ms', $2, $3, $4, $5, $6)
on conflict (key) do nothing returning id`, j.Delay, j.queue(), j.kind(), j.N, key, j.Attempts).Scan(&id)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			answers = append(answers, answer{Duplicate: true})
		case err != nil:
			return nil, err
		default:
			answers = append(answers, answer{ID: strconv.FormatInt(id, 10)})
		}
	}
	return answers, nil
}

func (a *handAdapter) work(ctx context.Context, c crew, handle func(context.Context, *run) error) (func(context.Context) error, error) {
	if c.Every > 0 {
		return nil, missing("a loop by hand has no schedules of its own")
	}
	running, stop := context.WithCancel(ctx)
	var loops sync.WaitGroup
	for range c.AtOnce {
		loops.Go(func() {
			for running.Err() == nil {
				if err := a.one(running, c, handle); err != nil {
					select {
					case <-time.After(50 * time.Millisecond):
					case <-running.Done():
					}
				}
			}
		})
	}
	return func(context.Context) error { stop(); loops.Wait(); return nil }, nil
}

// one runs a job; the error may be that there is none.
func (a *handAdapter) one(ctx context.Context, c crew, handle func(context.Context, *run) error) error {
	var id int64
	failed := false
	work := context.WithoutCancel(ctx)
	err := pgx.BeginFunc(work, a.pool, func(tx pgx.Tx) error {
		r := &run{}
		err := tx.QueryRow(work, `
select id, n, attempts + 1 from hand_jobs
 where queue = any($1) and kind = any($2) and run_at <= now() and attempts < max_attempts
 order by run_at, id for update skip locked limit 1`, c.queues(), c.kinds()).Scan(&id, &r.n, &r.attempt)
		if err != nil {
			return err
		}
		r.write = func(ctx context.Context, n int) error { _, err := tx.Exec(ctx, insertRow, n); return err }
		r.call = func(ctx context.Context, name string, fn func(context.Context, string) (string, error)) error {
			_, err := fn(ctx, "hand-"+strconv.FormatInt(id, 10)+"-"+name)
			return err
		}
		r.end = func(ctx context.Context) error { _, err := tx.Exec(ctx, "commit"); return err }
		if err := handle(ctx, r); err != nil {
			failed = true
			return err
		}
		_, err = tx.Exec(work, "delete from hand_jobs where id = $1", id)
		return err
	})
	if failed {
		_, _ = a.pool.Exec(work, "update hand_jobs set attempts = attempts + 1, run_at = now() + interval '50 ms' where id = $1", id)
	}
	return err
}

func (a *handAdapter) left(ctx context.Context) (n int, err error) {
	err = a.pool.QueryRow(ctx, "select count(*) from hand_jobs where attempts < max_attempts").Scan(&n)
	return n, err
}

func (a *handAdapter) silence(context.Context) error { return nil } // it knows of no time

func (a *handAdapter) age(context.Context) error { return nil } // what is finished is gone

func (a *handAdapter) cancel(ctx context.Context, id string) error {
	tag, err := a.pool.Exec(ctx, "delete from hand_jobs where id = $1::text::bigint", id)
	if err == nil && tag.RowsAffected() == 0 {
		err = errors.New("not cancelled: it is gone")
	}
	return err
}
