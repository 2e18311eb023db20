package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// observer counts what the sessions of a room's database do; its own statements do not count.
type observer struct {
	conn   *pgx.Conn
	before int // sessions that were there
}

// observe begins in a room whose statements are counted, before the members join. Connections are those that come from
// now on.
func (r *room) observe(ctx context.Context) (*observer, error) {
	cfg, err := pgx.ParseConfig(r.url)
	if err != nil {
		return nil, err
	}
	if r.server.counts || r.server.statements {
		cfg.RuntimeParams["pg_stat_statements.track"] = "none"
	}
	o := &observer{}
	if o.conn, err = pgx.ConnectConfig(ctx, cfg); err != nil {
		return nil, err
	}
	_, err = o.conn.Exec(ctx, "create extension if not exists pg_stat_statements; select pg_stat_statements_reset()")
	if err == nil {
		o.before, err = o.connections(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("statements cannot be counted: %w", err), o.conn.Close(ctx))
	}
	return o, nil
}

func (o *observer) close() { _ = o.conn.Close(context.Background()) }

// connections counts the others' sessions.
func (o *observer) connections(ctx context.Context) (n int, err error) {
	err = o.conn.QueryRow(ctx, `
select count(*) from pg_stat_activity
 where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()`).Scan(&n)
	return n - o.before, err
}

// statements counts the others' statements so far, as pg_stat_statements does: begin, commit and settings too.
func (o *observer) statements(ctx context.Context) (n int64, err error) {
	err = o.conn.QueryRow(ctx, `
select coalesce(sum(calls), 0)::bigint from pg_stat_statements(false) s join pg_database d on d.oid = s.dbid
 where d.datname = current_database()`).Scan(&n)
	return n, err
}

// pages counts the pages that the others' statements have looked at so far, as often as they did.
func (o *observer) pages(ctx context.Context) (n int64, err error) {
	err = o.conn.QueryRow(ctx, `
select coalesce(sum(shared_blks_hit + shared_blks_read), 0)::bigint from pg_stat_statements(false) s join pg_database d on d.oid = s.dbid
 where d.datname = current_database()`).Scan(&n)
	return n, err
}

// calls counts the statements so far whose text is like a pattern.
func (o *observer) calls(ctx context.Context, like string) (n int64, err error) {
	err = o.conn.QueryRow(ctx, `
select coalesce(sum(calls), 0)::bigint from pg_stat_statements s join pg_database d on d.oid = s.dbid
 where d.datname = current_database() and s.query like $1`, like).Scan(&n)
	return n, err
}

// rate counts statements for a while, a second.
func (o *observer) rate(ctx context.Context, took time.Duration) (float64, error) {
	before, err := o.statements(ctx)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if err := pause(ctx, took); err != nil {
		return 0, err
	}
	after, err := o.statements(ctx)
	return float64(after-before) / time.Since(began).Seconds(), err
}

// none waits until nothing is left of what an SQL text counts.
func (o *observer) none(ctx context.Context, undone string, limit time.Duration) error {
	for end := time.Now().Add(limit); ; {
		var n int
		if err := o.conn.QueryRow(ctx, undone).Scan(&n); err != nil || n == 0 {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("%d jobs were not done after %s", n, limit)
		}
		if err := pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}
