package frompgboss

import (
	"context"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// What waits in pg-boss's table (the columns of version 12 that count here) is moved, once per key.
func TestMove(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	_, err := db.Pool.Exec(ctx, `
create schema pgboss;
create type pgboss.job_state as enum ('created', 'retry', 'active', 'completed', 'cancelled', 'failed');
create table pgboss.job (
  id uuid not null default gen_random_uuid(), name text not null, data jsonb, state pgboss.job_state not null default 'created',
  start_after timestamptz not null default now(), created_on timestamptz not null default now(), blocked boolean not null default false,
  primary key (name, id)) partition by list (name);
create table pgboss.job_welcome partition of pgboss.job for values in ('welcome');
insert into pgboss.job (name, data, state) values
  ('welcome', '{"userId": 1}', 'created'), ('welcome', '{"userId": 1}', 'created'), ('welcome', '{"userId": 2}', 'retry'),
  ('welcome', '{"userId": 3}', 'active'), ('welcome', '{"userId": 4}', 'completed')`)
	require.NoError(t, err)
	moved, err := Move(ctx, db.Pool, db.Queue)
	require.NoError(t, err)
	require.Equal(t, 3, moved)
	moved, err = Move(ctx, db.Pool, db.Queue)
	require.NoError(t, err)
	require.Zero(t, moved)

	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return enqueueAfter(ctx, db.Queue, tx) }))
	var mu sync.Mutex
	sent := map[int]int{}
	db.Drain(Welcome.HandleTx(func(_ context.Context, _ pgx.Tx, _ *onceq.Lease, m WelcomeMail) error {
		mu.Lock()
		defer mu.Unlock()
		sent[m.UserID]++
		return nil
	}))
	require.Equal(t, map[int]int{1: 1, 2: 1, 42: 1}, sent)
}
