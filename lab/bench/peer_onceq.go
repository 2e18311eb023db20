package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
)

// Task is the payload of every job in every peer.
type Task struct {
	N int `json:"n"`
}

var (
	plainKind = onceq.Kind[Task]{Name: "noop"}
	keyedKind = onceq.Kind[Task]{Name: "noop", Key: func(t Task) string { return keyOf(t.N) }}
)

func keyOf(n int) string { return fmt.Sprintf("task:%09d", n) }

func jobOf(n int, keyed bool) onceq.Job {
	if keyed {
		return keyedKind.Job(Task{n})
	}
	return plainKind.Job(Task{n})
}

var quiet = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))

// onceqPeer is this project with all settings at their defaults.
func onceqPeer() peer {
	p := goPeer("onceq", "", "default", "WorkerConfig{}, one Kind with a typed handler", func(ctx context.Context, pool *pgxpool.Pool) (queue, error) {
		err := pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return migrations.Up(ctx, c.Conn(), "onceq") })
		if err != nil {
			return nil, err
		}
		return joinOnceq(ctx, pool)
	})
	p.version = "of this tree"
	if commit, err := exec.CommandContext(context.Background(), "git", "rev-parse", "--short", "HEAD").Output(); err == nil {
		p.version = "at " + strings.TrimSpace(string(commit))
	}
	p.member, p.undone = goMember, "select count(*) from onceq.jobs"
	return p
}

// sqlPeer is this project as a service in another language enqueues: by the functions of the schema. Its workers are onceq's.
func sqlPeer() peer {
	p := onceqPeer()
	join := p.open
	p.name, p.note = "onceq from SQL", "onceq.enqueue, and onceq.enqueue_many with 1,000 jobs"
	p.only, p.member, p.undone = []string{"A", "A2", "B", "E"}, nil, ""
	p.open = func(ctx context.Context, e env) (session, error) {
		s, err := join(ctx, e)
		if err != nil {
			return nil, err
		}
		s.(*goSession).queue = sqlQueue{s.(*goSession).queue, s.(*goSession).pool}
		return s, nil
	}
	return p
}

type sqlQueue struct {
	queue
	pool *pgxpool.Pool
}

func (q sqlQueue) bulk(ctx context.Context, from, to int, keyed bool) error {
	type job struct {
		Kind    string `json:"kind"`
		Payload Task   `json:"payload"`
		Key     string `json:"key,omitempty"`
	}
	jobs := make([]job, 0, to-from)
	for n := from; n < to; n++ {
		j := job{Kind: "noop", Payload: Task{n}}
		if keyed {
			j.Key = keyOf(n)
		}
		jobs = append(jobs, j)
	}
	raw, err := json.Marshal(jobs)
	if err == nil {
		_, err = q.pool.Exec(ctx, "select * from onceq.enqueue_many($1)", string(raw))
	}
	return err
}

func (q sqlQueue) put(ctx context.Context, tx pgx.Tx, n int, keyed bool) (err error) {
	payload, _ := json.Marshal(Task{n})
	args := []any{string(payload), nil}
	if keyed {
		args[1] = keyOf(n)
	}
	const call = "select * from onceq.enqueue('noop', $1, $2)"
	if tx != nil {
		_, err = tx.Exec(ctx, call, args...)
	} else {
		_, err = q.pool.Exec(ctx, call, args...)
	}
	return err
}

// joinOnceq opens a database that has the tables.
func joinOnceq(_ context.Context, pool *pgxpool.Pool) (queue, error) {
	q, err := onceq.New(pool, &onceq.Config{Logger: quiet})
	return &onceqQueue{pool, q}, err
}

type onceqQueue struct {
	pool *pgxpool.Pool
	*onceq.Queue
}

// ours is the queue of a trial of onceq's own.
func ours(r *room) *onceqQueue { return r.session.(*goSession).queue.(*onceqQueue) }

func (q *onceqQueue) close() {}

func (q *onceqQueue) bulk(ctx context.Context, from, to int, keyed bool) error {
	return q.enqueue(ctx, from, to, func(n int) onceq.Job { return jobOf(n, keyed) })
}

func (q *onceqQueue) enqueue(ctx context.Context, from, to int, job func(n int) onceq.Job) error {
	for ; from < to; from += 1000 {
		jobs := make([]onceq.Job, 0, 1000)
		for n := from; n < min(to, from+1000); n++ {
			jobs = append(jobs, job(n))
		}
		if _, err := q.EnqueueMany(ctx, q.pool, jobs); err != nil {
			return err
		}
	}
	return nil
}

func (q *onceqQueue) put(ctx context.Context, tx pgx.Tx, n int, keyed bool) error {
	var db onceq.DB = q.pool
	if tx != nil {
		db = tx
	}
	_, err := q.Enqueue(ctx, db, jobOf(n, keyed))
	return err
}

func (q *onceqQueue) putInBatch(ctx context.Context, b *pgx.Batch, n int) (func() error, error) {
	pending, err := q.EnqueueInBatch(b, jobOf(n, true))
	return func() error {
		_, err := pending.Result(ctx, q.pool)
		return err
	}, err
}

func (q *onceqQueue) work(ctx context.Context, effect string, did func(n, jobs int)) (stop func(), err error) {
	kind := onceq.Kind[Task]{Name: "noop"}
	switch effect {
	case oneRow:
		return q.run(ctx, onceq.WorkerConfig{}, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, t Task) error {
			_, err := tx.Exec(ctx, insertRow, t.N)
			did(t.N, 1)
			return err
		}))
	case rowsInBatch:
		return q.run(ctx, onceq.WorkerConfig{}, kind.HandleBatch(100, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[Task]) error {
			ns := make([]int64, len(jobs))
			for i, job := range jobs {
				ns[i] = int64(job.Payload.N)
			}
			_, err := tx.Exec(ctx, insertRows, ns)
			did(jobs[0].Payload.N, len(jobs))
			return err
		}))
	}
	return q.workIn(ctx, nil, did)
}

func (q *onceqQueue) putIn(ctx context.Context, queue string, n int) error {
	job := jobOf(n, false)
	job.Queue = queue
	_, err := q.Enqueue(ctx, q.pool, job)
	return err
}

func (q *onceqQueue) workIn(ctx context.Context, queues []string, did func(n, jobs int)) (stop func(), err error) {
	cfg := onceq.WorkerConfig{Also: queues}
	if len(queues) > 0 {
		cfg.Without = []string{onceq.DefaultQueue}
	}
	return q.run(ctx, cfg, plainKind.Handle(func(_ context.Context, _ *onceq.Lease, t Task) error {
		did(t.N, 1)
		return nil
	}))
}

// run runs a worker and gives what stops it and returns when everything is written.
func (q *onceqQueue) run(ctx context.Context, cfg onceq.WorkerConfig, handlers ...onceq.Handler) (stop func(), err error) {
	w, err := onceq.NewWorker(q.Queue, cfg, handlers...)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := w.Run(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "bench: onceq's worker:", err)
		}
	}()
	return func() { cancel(); <-done }, nil
}
