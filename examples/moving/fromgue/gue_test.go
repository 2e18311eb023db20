package fromgue

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// Waiting jobs in gue's table (of migration version 6) are moved once. Jobs that a worker has locked stay.
func TestMove(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	_, err := db.Pool.Exec(ctx, `
create table greeted (name text primary key);
create table gue_jobs (
  job_id text not null primary key, priority smallint not null, run_at timestamptz not null, job_type text not null,
  args bytea not null, error_count integer not null default 0, last_error text, queue text not null,
  created_at timestamptz not null, updated_at timestamptz not null);
insert into gue_jobs (job_id, priority, run_at, job_type, args, queue, created_at, updated_at)
select 'j' || n, 0, now() + case when n = 3 then interval '1 hour' else interval '0' end, 'PrintName',
       convert_to(format('{"name": "n%s"}', n), 'UTF8'), 'name_printer', now(), now()
  from generate_series(1, 4) n`)
	require.NoError(t, err)

	// A worker of gue has locked the fourth job.
	held, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	_, err = held.Exec(ctx, `select from gue_jobs where job_id = 'j4' for update`)
	require.NoError(t, err)
	moved, err := Move(ctx, db.Pool, db.Queue, "name_printer")
	require.NoError(t, err)
	require.Equal(t, 3, moved)
	_, err = held.Exec(ctx, `delete from gue_jobs where job_id = 'j4'`)
	require.NoError(t, err)
	require.NoError(t, held.Commit(ctx))
	moved, err = Move(ctx, db.Pool, db.Queue, "name_printer")
	require.NoError(t, err)
	require.Zero(t, moved)

	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return enqueueAfter(ctx, db.Queue, tx) }))
	db.Drain(handler())
	names := func() (all []string) {
		require.NoError(t, db.Pool.QueryRow(ctx, `select array_agg(name order by name) from greeted`).Scan(&all))
		return all
	}
	require.Equal(t, []string{"Ada", "n1", "n2"}, names())
	db.Advance(3700e9)
	db.Drain(handler())
	require.Equal(t, []string{"Ada", "n1", "n2", "n3"}, names())
}
