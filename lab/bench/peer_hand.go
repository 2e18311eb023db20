package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const pgxModule = "github.com/jackc/pgx/v5"

// handPeer is the loop that people write by hand; gue works like it.
func handPeer() peer {
	p := goPeer("by hand", pgxModule, "8 loops", "begin; select … order by run_at, id for update skip locked limit 1; delete; commit, on 8 connections",
		func(ctx context.Context, pool *pgxpool.Pool) (queue, error) {
			_, err := pool.Exec(ctx, `
create table jobs (
  id bigint generated always as identity primary key, run_at timestamptz not null default now(),
  queue text not null, kind text not null, payload jsonb not null
);
create index on jobs (queue, run_at, id)`)
			return &handQueue{pool}, err
		})
	open := p.open
	p.open = func(ctx context.Context, e env) (session, error) {
		e.conns = 8
		return open(ctx, e)
	}
	return p
}

type handQueue struct{ pool *pgxpool.Pool }

func (q *handQueue) close() {}

func (q *handQueue) bulk(ctx context.Context, from, to int, keyed bool) error {
	if keyed {
		return errNotOffered
	}
	_, err := q.pool.Exec(ctx, "insert into jobs (queue, kind, payload) select 'default', 'noop', p::jsonb from unnest($1::text[]) p", payloads(from, to))
	return err
}

// payloads are texts: reading a jsonb[] moves the end of the server process's heap with each element, as its memory happens
// to lie, and takes twice the time then.
func payloads(from, to int) []string {
	all := make([]string, 0, to-from)
	for n := from; n < to; n++ {
		all = append(all, fmt.Sprintf(`{"n": %d}`, n))
	}
	return all
}

func (q *handQueue) put(ctx context.Context, tx pgx.Tx, n int, keyed bool) error {
	if keyed || tx == nil {
		return errNotOffered
	}
	_, err := tx.Exec(ctx, "insert into jobs (queue, kind, payload) values ('default', 'noop', $1)", Task{n})
	return err
}

func (q *handQueue) work(ctx context.Context, effect string, did func(n, jobs int)) (stop func(), err error) {
	if effect == rowsInBatch {
		return nil, errNotOffered
	}
	ctx, cancel := context.WithCancel(ctx)
	var loops sync.WaitGroup
	for range 8 {
		loops.Go(func() {
			for {
				n, err := q.one(ctx, effect)
				if err != nil { // nothing left, as a rule
					return
				}
				did(n, 1)
			}
		})
	}
	return func() { cancel(); loops.Wait() }, nil
}

func (q *handQueue) one(ctx context.Context, effect string) (n int, err error) {
	const take = "select id, payload from jobs where queue = 'default' and run_at <= now() order by run_at, id for update skip locked limit 1"
	err = pgx.BeginFunc(ctx, q.pool, func(tx pgx.Tx) error {
		var id int64
		var task Task
		if err := tx.QueryRow(ctx, take).Scan(&id, &task); err != nil {
			return err
		}
		n = task.N
		if effect == oneRow {
			if _, err := tx.Exec(ctx, insertRow, n); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, "delete from jobs where id = $1", id)
		return err
	})
	return n, err
}

// basePeers are no queues: what the server does without one. The rows are ours, less what only a queue needs.
func basePeers() []peer {
	open := func(copies, indexed bool) func(ctx context.Context, pool *pgxpool.Pool) (queue, error) {
		return func(ctx context.Context, pool *pgxpool.Pool) (queue, error) {
			_, err := pool.Exec(ctx, `
create table plain (
  id bigint generated always as identity primary key,
  run_at timestamptz not null, created_at timestamptz not null, max_attempts smallint not null, priority smallint not null,
  queue text collate "C" not null, kind text collate "C" not null, payload jsonb not null
);
create table plain_keyed (
  id bigint generated always as identity,
  run_at timestamptz not null, created_at timestamptz not null, max_attempts smallint not null, priority smallint not null,
  queue text collate "C" not null, kind text collate "C" not null, key text collate "C" primary key, payload jsonb not null
)`)
			if err == nil && indexed {
				_, err = pool.Exec(ctx, "alter table plain set (fillfactor = 45); create index on plain (queue, priority, run_at, id)")
			}
			return &noQueue{pool, copies, indexed}, err
		}
	}
	return []peer{
		goPeer("baseline", pgxModule, "no queue", "A: insert … select unnest of the same rows into a plain table; B: the same transactions without an enqueue", open(false, false)),
		goPeer("baseline", pgxModule, "COPY", "the same rows by COPY into a plain table", open(true, false)),
		goPeer("baseline", pgxModule, sameIndexes, "the first into a table with the fillfactor and the two indexes of ours", open(false, true)),
	}
}

// sameIndexes is what bounds A for any layout that finds jobs by an index and deletes them by another.
const sameIndexes = "our indexes"

type noQueue struct {
	pool            *pgxpool.Pool
	copies, indexed bool
}

func (q *noQueue) close() {}

func (q *noQueue) bulk(ctx context.Context, from, to int, keyed bool) error {
	const (
		plain = `insert into plain (run_at, created_at, max_attempts, priority, queue, kind, payload)
select now(), now(), 25, 0, 'default', 'noop', p::jsonb from unnest($1::text[]) p`
		once = `insert into plain_keyed (run_at, created_at, max_attempts, priority, queue, kind, key, payload)
select now(), now(), 25, 0, 'default', 'noop', k, p::jsonb from unnest($1::text[], $2::text[]) u(p, k) on conflict do nothing`
	)
	var err error
	switch {
	case keyed && (q.copies || q.indexed):
		return errNotOffered
	case q.copies:
		now := time.Now()
		rows := pgx.CopyFromSlice(to-from, func(i int) ([]any, error) {
			return []any{now, now, 25, 0, "default", "noop", Task{from + i}}, nil
		})
		_, err = q.pool.CopyFrom(ctx, pgx.Identifier{"plain"}, []string{"run_at", "created_at", "max_attempts", "priority", "queue", "kind", "payload"}, rows)
	case keyed:
		keys := make([]string, 0, to-from)
		for n := from; n < to; n++ {
			keys = append(keys, keyOf(n))
		}
		_, err = q.pool.Exec(ctx, once, payloads(from, to), keys)
	default:
		_, err = q.pool.Exec(ctx, plain, payloads(from, to))
	}
	return err
}

func (q *noQueue) put(context.Context, pgx.Tx, int, bool) error { return nil }

func (q *noQueue) putInBatch(context.Context, *pgx.Batch, int) (func() error, error) {
	return func() error { return nil }, nil
}

func (q *noQueue) work(context.Context, string, func(n, jobs int)) (func(), error) {
	return nil, errNotOffered
}
