package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// queue is what a peer has to offer that runs in this process; goSession makes the tests' operations of it. Jobs are
// numbered, and a job's number is its payload. What a peer does not have returns errNotOffered.
type queue interface {
	// bulk enqueues jobs from to to-1 in one call.
	bulk(ctx context.Context, from, to int, keyed bool) error

	enqueuer

	// work runs a worker that calls did with a job's number when its handler has done its effect, for a batch with
	// the first one's and how many there are. stop returns when everything is stored.
	work(ctx context.Context, effect string, did func(n, jobs int)) (stop func(), err error)

	close()
}

// batcher is a queue that can enqueue as a part of the caller's own pipeline.
type batcher interface {
	putInBatch(ctx context.Context, b *pgx.Batch, n int) (answer func() error, err error)
}

// enqueuer is a queue or session that enqueues one job, in tx or on its own where that is nil.
type enqueuer interface {
	put(ctx context.Context, tx pgx.Tx, n int, keyed bool) error
}

// named is a queue whose workers choose among queues by name.
type named interface {
	// putIn enqueues one job into a queue.
	putIn(ctx context.Context, queue string, n int) error

	// workIn is work with noEffect, on these queues or, where there are none, on the default one.
	workIn(ctx context.Context, queues []string, did func(n, jobs int)) (stop func(), err error)
}

// goSession is the session of a queue in this process.
type goSession struct {
	queue
	pool   *pgxpool.Pool // nil for those on Redis
	filled int
}

// goPeer opens a queue with a pool over a fresh database, in which the application has its table.
func goPeer(name, module, settings, note string, open func(ctx context.Context, pool *pgxpool.Pool) (queue, error)) peer {
	return peer{
		name: name, version: moduleVersion(module), settings: settings, note: note,
		open: func(ctx context.Context, e env) (session, error) {
			pool, err := newPool(ctx, e.url, e.conns)
			if err != nil {
				return nil, err
			}
			q, err := open(ctx, pool)
			if err != nil {
				pool.Close()
				return nil, err
			}
			return &goSession{queue: q, pool: pool}, nil
		},
	}
}

// newPool makes a pool of conns connections, or pgxpool's default number, and the application's table.
func newPool(ctx context.Context, url string, conns int) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	if conns > 0 {
		cfg.MaxConns = int32(conns)
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	_, err = pool.Exec(ctx, "create table app_rows (id bigint generated always as identity primary key, n bigint not null, note text not null)")
	return pool, err
}

const (
	insertRow  = "insert into app_rows (n, note) values ($1, 'written by the application')"
	insertRows = "insert into app_rows (n, note) select n, 'written by the application' from unnest($1::bigint[]) n"
)

func (s *goSession) process() int { return 0 }

func (s *goSession) close() {
	s.queue.close()
	if s.pool != nil {
		s.pool.Close()
	}
}

// timed measures n jobs, which fn gets the first number of.
func (s *goSession) timed(n int, fn func(first int) error) (stretch, error) {
	first := s.filled
	s.filled += n
	began := time.Now()
	err := fn(first)
	return stretch{jobs: n, all: n, took: time.Since(began)}, err
}

func (s *goSession) fill(ctx context.Context, n int, keyed bool) (stretch, error) {
	return s.timed(n, func(first int) error {
		for from := first; from < first+n; from += 1000 {
			if err := s.bulk(ctx, from, min(from+1000, first+n), keyed); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *goSession) transact(ctx context.Context, n int, how string) (stretch, error) {
	b, batches := s.queue.(batcher)
	if s.pool == nil || how == oneBatch && !batches {
		return stretch{}, errNotOffered
	}
	return s.timed(n, func(first int) error {
		return inParallel(n, 8, func(i int) error {
			if how == oneBatch {
				return s.pipeline(ctx, b, first+i)
			}
			return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, insertRow, first+i); err != nil {
					return err
				}
				return s.put(ctx, tx, first+i, how == keyed)
			})
		})
	})
}

// pipeline is the whole transaction in one round trip.
func (s *goSession) pipeline(ctx context.Context, q batcher, n int) error {
	b := &pgx.Batch{}
	b.Queue("begin")
	b.Queue(insertRow, n)
	answer, err := q.putInBatch(ctx, b, n)
	if err != nil {
		return err
	}
	b.Queue("commit")
	if err := s.pool.SendBatch(ctx, b).Close(); err != nil {
		return err
	}
	return answer()
}

func (s *goSession) drain(ctx context.Context, d drain) (stretch, error) {
	t := newTracker(d)
	stop, err := s.work(ctx, d.effect, func(_, jobs int) { t.count(jobs) })
	if err != nil {
		return stretch{}, err
	}
	return t.wait(ctx, stop)
}

func (s *goSession) latency(ctx context.Context, n int, limit time.Duration) ([]time.Duration, error) {
	started := make(chan time.Time, 1)
	stop, err := s.work(ctx, noEffect, func(int, int) { started <- time.Now() })
	if err != nil {
		return nil, err
	}
	defer stop()
	if err := pause(ctx, time.Second); err != nil { // until the worker listens
		return nil, err
	}
	var all []time.Duration
	for i, end := 0, time.Now().Add(limit); i < n+warmLatencies && time.Now().Before(end); i++ {
		if err := pause(ctx, gap(i)); err != nil {
			return nil, err
		}
		began := time.Now()
		if err := s.put(ctx, nil, i, false); err != nil {
			return nil, err
		}
		select {
		case at := <-started:
			if i >= warmLatencies {
				all = append(all, at.Sub(began))
			}
		case <-time.After(time.Minute):
			return nil, errors.New("a job was not started within a minute")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return all, nil
}

const warmLatencies = 2 // jobs that do not count

// gap is the pause before a job: 40 to 140 ms, spread evenly, the same for every peer.
func gap(i int) time.Duration { return 40*time.Millisecond + time.Duration(i*37%101)*time.Millisecond }
