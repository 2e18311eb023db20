package onceq

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Finding is something that slows a queue down, or soon will.
type Finding struct {
	What   string // a stable name: "snapshot", "prepared_transaction", "replication_slot", "dead_rows", "index_bloat", "autovacuum", "waiting", "background" or "handler"
	Detail string // what was found: where, who, how much
	Advice string // what to do
}

func (f Finding) String() string { return f.What + ": " + f.Detail + "; " + f.Advice }

// healthLimits says from where on Health reports something. A busy queue is normally below these limits.
type healthLimits struct {
	snapshot time.Duration // age of a transaction that has a snapshot
	xids     int64         // transactions since a replication slot's snapshot, which has no time
	dead     int64         // dead rows of a table, if there are more of them than live rows
	index    int64         // bytes of an index, if these are ten times what its live rows need
	waiting  time.Duration // how long the oldest job has been due
}

// Health looks for what commonly slows down a queue on Postgres, and returns what it found; an empty result is good.
//
// Work that this Queue's workers and Reapers do in the background, and that is failing, comes first. It is also returned
// together with an error: if the database cannot be reached, it is all there is to know. Each process knows only its own
// background work.
//
// Otherwise Health reads Postgres's own statistics and a bounded number of jobs of each queue, so it is cheap enough to
// call every minute. Postgres shows the age of another role's snapshot only to members of pg_read_all_stats; without that
// role, such sessions are not found.
func (q *Queue) Health(ctx context.Context) ([]Finding, error) {
	return q.health(ctx, healthLimits{snapshot: time.Minute, xids: 1_000_000, dead: 200_000, index: 64 << 20, waiting: time.Minute})
}

func (q *Queue) health(ctx context.Context, limits healthLimits) ([]Finding, error) {
	x := examination{q: q, limits: limits, found: q.troubles.findings(), live: make(map[string]int64)}
	for _, look := range []func(context.Context) error{x.snapshots, x.keptBack, x.tables, x.indexes, x.queues} {
		if err := look(ctx); err != nil {
			return x.found, err
		}
	}
	x.handlers()
	return x.found, nil
}

// examination is one call of Health: each of its methods adds what it finds.
type examination struct {
	q      *Queue
	limits healthLimits
	found  []Finding
	live   map[string]int64 // rows of each table: tables fills it in, and indexes uses it
}

func (x *examination) add(what, detail, advice string) {
	x.found = append(x.found, Finding{what, detail, advice})
}

func (x *examination) each(ctx context.Context, statement string, args []any, scan func(pgx.Rows) error) error {
	if err := x.q.send(ctx, x.q.pool, asIs, statement, args, each(scan)); err != nil {
		return fmt.Errorf("onceq: health: %w", err)
	}
	return nil
}

// snapshots looks for the session with the oldest snapshot, which keeps vacuum from removing what finished since.
func (x *examination) snapshots(ctx context.Context) error {
	const snapshot = `
select pid, coalesce(usename, ''), coalesce(application_name, ''), coalesce(state, ''), coalesce(backend_type, ''),
       extract(epoch from statement_timestamp() - xact_start)::bigint
  from pg_stat_activity
 where backend_xmin is not null and xact_start < statement_timestamp() - $1::bigint * interval '1 microsecond'
   and (datname = current_database() or backend_type = 'walsender')
 order by age(backend_xmin) desc, xact_start
 limit 1`
	return x.each(ctx, snapshot, []any{x.limits.snapshot.Microseconds()}, func(rows pgx.Rows) error {
		var pid, seconds int64
		var user, app, state, kind string
		if err := rows.Scan(&pid, &user, &app, &state, &kind, &seconds); err != nil {
			return err
		}
		age := time.Duration(seconds) * time.Second
		if kind == "walsender" {
			x.add("snapshot", fmt.Sprintf("a query on standby %q is %s old and, with hot_standby_feedback, keeps vacuum from removing what finished since", app, age),
				"end it, or set max_standby_streaming_delay")
			return nil
		}
		x.add("snapshot", fmt.Sprintf("session %d (user %q, application %q, %s) has had its snapshot for %s and keeps vacuum from removing what finished since", pid, user, app, state, age),
			fmt.Sprintf("end it (select pg_terminate_backend(%d)), and set idle_in_transaction_session_timeout or transaction_timeout for its kind", pid))
		return nil
	})
}

// keptBack looks for prepared transactions and replication slots, which do the same and have no session.
func (x *examination) keptBack(ctx context.Context) error {
	const others = `
select 'prepared_transaction', gid, extract(epoch from statement_timestamp() - prepared)::bigint
  from pg_prepared_xacts
 where database = current_database() and prepared < statement_timestamp() - $1::bigint * interval '1 microsecond'
union all
select 'replication_slot', slot_name::text, greatest(age(xmin), age(catalog_xmin))::bigint
  from pg_replication_slots
 where age(xmin) > $2::bigint`
	return x.each(ctx, others, []any{x.limits.snapshot.Microseconds(), x.limits.xids}, func(rows pgx.Rows) error {
		var what, name string
		var n int64
		if err := rows.Scan(&what, &name, &n); err != nil {
			return err
		}
		if what == "replication_slot" {
			x.add(what, fmt.Sprintf("%q holds back vacuum for %d transactions", name, n), "bring its standby back, or drop the slot")
			return nil
		}
		x.add(what, fmt.Sprintf("%q has been prepared for %s and keeps vacuum from removing what finished since", name, time.Duration(n)*time.Second),
			"commit it or roll it back")
		return nil
	})
}

// tables looks for many dead rows, and for tables from which nothing removes them.
func (x *examination) tables(ctx context.Context) error {
	const tables = `
select c.relname,
       -- Lost with a server that crashed, until it has been vacuumed or analyzed.
       case when coalesce(s.last_vacuum, s.last_autovacuum, s.last_analyze, s.last_autoanalyze) is null
            then greatest(s.n_live_tup, c.reltuples::bigint, 0) else s.n_live_tup end,
       coalesce(s.n_dead_tup, 0),
       current_setting('autovacuum')::bool and current_setting('track_counts')::bool
         and not exists (select from pg_options_to_table(c.reloptions) where option_name = 'autovacuum_enabled' and not option_value::bool)
  from pg_class c
  left join pg_stat_all_tables s on s.relid = c.oid
 where c.oid in ('onceq.jobs'::regclass, 'onceq.job_fences'::regclass, 'onceq.job_history'::regclass)
 order by c.relname`
	return x.each(ctx, tables, nil, func(rows pgx.Rows) error {
		var name string
		var alive, dead int64
		var vacuumed bool
		if err := rows.Scan(&name, &alive, &dead, &vacuumed); err != nil {
			return err
		}
		x.live[name] = alive
		if !vacuumed {
			x.add("autovacuum", fmt.Sprintf("%s.%s is not vacuumed automatically", x.q.schema, name),
				"turn on autovacuum and track_counts; otherwise the table and its indexes grow without end")
		}
		if dead > x.limits.dead && dead > alive {
			x.add("dead_rows", fmt.Sprintf("%s.%s has %d dead rows and %d live ones", x.q.schema, name, dead, alive),
				"if an old snapshot is named above, end it; otherwise let autovacuum run more often or with less cost delay")
		}
		return nil
	})
}

// indexes looks for indexes that are far larger than their rows need.
func (x *examination) indexes(ctx context.Context) error {
	const indexes = `
select t.relname, c.relname, pg_relation_size(c.oid)
  from pg_index i join pg_class c on c.oid = i.indexrelid join pg_class t on t.oid = i.indrelid
 where i.indrelid in ('onceq.jobs'::regclass, 'onceq.job_fences'::regclass, 'onceq.job_history'::regclass)
   and pg_relation_size(c.oid) > $1::bigint
 order by c.relname`
	return x.each(ctx, indexes, []any{x.limits.index}, func(rows pgx.Rows) error {
		var table, name string
		var size int64
		if err := rows.Scan(&table, &name, &size); err != nil {
			return err
		}
		const entry = 100 // bytes, a generous estimate
		if size > 10*entry*x.live[table] {
			x.add("index_bloat", fmt.Sprintf("index %s.%s has %d MB for %d rows", x.q.schema, name, size>>20, x.live[table]),
				"reindex it concurrently")
		}
		return nil
	})
}

// queues looks for jobs that have been due for long and that nobody has.
func (x *examination) queues(ctx context.Context) error {
	stats, err := x.q.Stats(ctx)
	if err != nil {
		return err
	}
	for _, s := range stats {
		if s.Oldest > x.limits.waiting {
			x.add("waiting", fmt.Sprintf("the oldest job of queue %q has been due for %s", s.Queue, s.Oldest.Round(time.Second)),
				"check that workers are running, have a handler for its kind, and keep up")
		}
	}
	return nil
}

// handlers looks for handlers of this process that do not return.
func (x *examination) handlers() {
	x.q.late.Range(func(_, v any) bool {
		h := v.(lateHandler)
		x.add("handler", fmt.Sprintf("a handler of kind %q has run for %s and does not return although its context has ended; its lease on job %d was given up", h.lease.Kind, time.Since(h.since).Round(time.Second), h.lease.ID),
			"make it return when its context ends; it occupies one of its queue's slots until it returns or this process ends")
		return true
	})
}
