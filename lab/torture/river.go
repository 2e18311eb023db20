package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"
)

// riverSystem is River, used as its documentation says: unique jobs, and an effect and JobCompleteTx in one transaction. A
// form that River does not have becomes the nearest one that it has. River has no fence for effects outside: its handlers
// call the provider with a key made from the job's id, and promise no more than "at least once". It has no token either:
// its attempts count failures, and a snoozed job has the same attempt twice.
type riverSystem struct{}

const riverTrail = `
create function torture.trail_river() returns trigger language plpgsql as $$
begin
  insert into torture.trail (what, job, key, work, op, token)
  values (case when tg_op = 'INSERT' then 'accepted' when new.state = 'running' then 'claimed' else 'gone' end,
          new.id << 36, case when new.args->>'keyed' = 'true' then new.args->>'work' else '' end, new.args->>'work',
          coalesce(new.metadata->>'op', ''), 0);
  return null;
end $$;
create trigger trail after insert on river_job for each row execute function torture.trail_river();
create trigger trail_states after update on river_job for each row
  when (old.state <> new.state and new.state in ('running', 'completed', 'discarded', 'cancelled')) execute function torture.trail_river();`

var quiet = slog.New(slog.DiscardHandler)

func (riverSystem) setup(ctx context.Context, conn *pgx.Conn) error {
	pool, err := pgxpool.New(ctx, conn.Config().ConnString())
	if err != nil {
		return err
	}
	defer pool.Close()
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: quiet})
	if err != nil {
		return err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return err
	}
	_, err = conn.Exec(ctx, riverTrail)
	return err
}

// riverArgs is one kind for all forms. work is its JSON.
type riverArgs struct{ work }

func (riverArgs) Kind() string { return "work" }

type riverEnqueuer struct {
	pool   *pgxpool.Pool
	client *river.Client[pgx.Tx]
}

func (riverSystem) enqueuer(pool *pgxpool.Pool) (enqueuer, error) {
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Logger: quiet})
	return &riverEnqueuer{pool, client}, err
}

func riverOpts(w work, op string) *river.InsertOpts {
	metadata, _ := json.Marshal(map[string]string{"op": op})
	o := &river.InsertOpts{Metadata: metadata, MaxAttempts: 1000}
	if w.Keyed {
		o.UniqueOpts.ByArgs = true
		// In River, for ever means as long as the row is there, and the rows stay.
		o.UniqueOpts.ByState = rivertype.JobStates()
	}
	if w.Form == formRecur {
		o.UniqueOpts.ByState = []rivertype.JobState{rivertype.JobStateAvailable, rivertype.JobStatePending, rivertype.JobStateRunning,
			rivertype.JobStateRetryable, rivertype.JobStateScheduled}
	}
	return o
}

func (e *riverEnqueuer) enqueue(ctx context.Context, tx pgx.Tx, op string, works []work) ([]answer, error) {
	many := make([]river.InsertManyParams, len(works))
	for i, w := range works {
		many[i] = river.InsertManyParams{Args: riverArgs{w}, InsertOpts: riverOpts(w, op)}
	}
	var results []*rivertype.JobInsertResult
	var err error
	if tx != nil {
		results, err = e.client.InsertManyTx(ctx, tx, many)
	} else {
		results, err = e.client.InsertMany(ctx, many)
	}
	var answers []answer
	for i, r := range results {
		answers = append(answers, answer{Work: works[i].Name, ID: r.Job.ID, Duplicate: r.UniqueSkippedAsDuplicate})
	}
	return answers, err
}

func (e *riverEnqueuer) pipeline(context.Context, string, string, []work) ([]answer, error) {
	return nil, errNotOffered
}

func (e *riverEnqueuer) cancel(ctx context.Context, id int64) error {
	_, err := e.client.JobCancel(ctx, id)
	return err
}

type riverWorker struct {
	river.WorkerDefaults[riverArgs]
	*child
	pool *pgxpool.Pool
}

func (riverSystem) worker(ctx context.Context, c *child, pool *pgxpool.Pool) error {
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverWorker{child: c, pool: pool})
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Logger:               quiet,
		Queues:               map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 8}},
		Workers:              workers,
		FetchPollInterval:    250 * time.Millisecond,
		JobTimeout:           lease * 5 / 2,
		RescueStuckJobsAfter: lease * 3, // it has no lease: a run may take JobTimeout, and then another worker takes over
		PollOnly:             c.Pooled,
		RetryPolicy:          riverRetry{},
		// The finished jobs are counted at the end.
		CompletedJobRetentionPeriod: -1, CancelledJobRetentionPeriod: -1, DiscardedJobRetentionPeriod: -1,
	})
	if err != nil {
		return err
	}
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	<-ctx.Done()
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := client.Stop(stopping); err != nil {
		return client.StopAndCancel(stopping)
	}
	return nil
}

type riverRetry struct{}

func (riverRetry) NextRetry(job *rivertype.JobRow) time.Time {
	return time.Now().Add(backoff(len(job.Errors) + 1))
}

func (w *riverWorker) Work(ctx context.Context, job *river.Job[riverArgs]) error {
	p := job.Args.work
	switch p.fate() {
	case fateFatal, fateAlien:
		return river.JobCancel(errors.New("this cannot be done"))
	case fateFlaky:
		if job.Attempt == 1 {
			return errors.New("not at the first attempt")
		}
	case fateLater:
		if rand.IntN(2) == 0 {
			return river.JobSnooze(20 * time.Millisecond)
		}
	}
	p.take(ctx)
	n := nonce()
	if outside(p.Form) {
		c := dial(ctx, w.Provider)
		defer c.close()
		var err error
		n, err = c.do(ctx, fmt.Sprint("river/", job.ID), order{Work: p.Name, Form: p.Form, Job: job.ID << 36})
		if err != nil || !transactional(p.Form) {
			return err
		}
	}
	ctx2, cancel := stubborn(ctx)
	defer cancel()
	return pgx.BeginFunc(ctx2, w.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx2, writeEffect, p.Name, p.Form, job.ID<<36, 0, n); err != nil {
			return err
		}
		_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx2, tx, job)
		return err
	})
}

func (riverSystem) live(ctx context.Context, pool *pgxpool.Pool) (n int, err error) {
	err = pool.QueryRow(ctx, `select count(*) from river_job where state not in ('completed', 'discarded', 'cancelled')`).Scan(&n)
	return n, err
}

func (riverSystem) settle(context.Context, *pgxpool.Pool, []call) (int, error) { return 0, nil }

func (riverSystem) leftovers(context.Context, *pgxpool.Pool) ([]doubt, string, error) {
	return nil, "", nil
}

func (riverSystem) ends(ctx context.Context, pool *pgxpool.Pool) ([]end, error) {
	rows, err := pool.Query(ctx, `
select id << 36, case when args->>'keyed' = 'true' then args->>'work' else '' end, args->>'work', args->>'form',
       case state when 'completed' then 'completed' when 'discarded' then 'dead' when 'cancelled' then 'cancelled' else 'unfinished' end,
       '', 0, false
  from river_job`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[end])
}
