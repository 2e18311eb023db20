package queuetest

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// emptied are the tables that Empty empties, in the order in which onceq locks their rows. Those of running
// workers (workers, waiters, waiter_queues, wakes) stay, and so do meta and lane_locks.
var emptied = []string{
	"jobs", "job_waits", "job_history", "job_fences", "job_members", "job_cancels", "job_awaits", "lane_places",
	"lane_stops", "lane_limits", "limit_rates", "pauses", "schedules", "schedule_ticks", "job_counts", "turns", "actions",
}

// standing empties tables of which some rows stay, and puts back rows that are always there.
var standing = []string{
	"delete from onceq.lane_calls where not (slot = -1 and lane = '')",
	"delete from onceq.queues q where not exists (select from onceq.workers w where w.queues ? q.queue)",
	fmt.Sprintf("insert into onceq.meta (version) values (%d) on conflict do nothing", onceq.SchemaVersion),
	"insert into onceq.lane_locks select generate_series(0, 15) on conflict do nothing",
	`insert into onceq.lane_calls (due, slot, lane) select 'infinity'::timestamptz, -1, ''
 where not exists (select from onceq.lane_calls where slot = -1 and lane = '')`,
}

// Empty removes every job, key, schedule, limit, pause and line of the audit trail from a schema, for tests that
// share a database. Do not truncate onceq's tables: some have rows without which it stands still. Empty keeps
// these, and puts them back if they are gone. It also keeps the sequence of ids, so that no two tests have a
// job with the same id.
//
// It needs the role that ran the migrations, or one that may delete from all tables. Workers may run meanwhile,
// but no handler: Empty waits until the transaction of a running one has ended.
func Empty(ctx context.Context, conn onceq.DB, schema string) error {
	if b, ok := conn.(interface {
		Begin(context.Context) (pgx.Tx, error)
	}); ok {
		tx, err := b.Begin(ctx)
		if err != nil {
			return fmt.Errorf("queuetest: emptying schema %q: %w", schema, err)
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if err = empty(ctx, tx, schema); err != nil {
			return err
		}
		if err = tx.Commit(ctx); err != nil {
			return fmt.Errorf("queuetest: emptying schema %q: %w", schema, err)
		}
		return nil
	}
	return empty(ctx, conn, schema)
}

func empty(ctx context.Context, conn onceq.DB, schema string) error {
	commands := make([]string, 0, len(emptied)+len(standing))
	for _, table := range emptied {
		commands = append(commands, "delete from onceq."+table)
	}
	for _, command := range append(commands, standing...) {
		if _, err := conn.Exec(ctx, inSchema(command, schema)); err != nil {
			return fmt.Errorf("queuetest: emptying schema %q: %s: %w", schema, command, err)
		}
	}
	return nil
}

// Empty removes every job, key, schedule, limit and pause from the database, and nothing from the application's
// tables. Most tests need no Empty: New gives each a database of its own.
func (db *DB) Empty() {
	db.t.Helper()
	conn, err := pgx.Connect(db.t.Context(), db.URL)
	if err != nil {
		db.t.Fatalf("queuetest: %v", err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	if err := Empty(db.t.Context(), conn, db.Schema); err != nil {
		db.t.Fatal(err)
	}
}
