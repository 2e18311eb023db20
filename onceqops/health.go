package onceqops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/table"
)

// Finding is something that slows a queue down, or soon will.
type Finding struct {
	What   string // a stable name, one of FindingNames
	Detail string // what was found: where, who, how much
	Advice string // what to do, for somebody who writes code
	Severe bool   // jobs stand still until somebody does something

	// What it is about, for programs that give advice of their own; empty where it is about something else.
	Queue string
	Kind  string
	JobID int64
	Meant string    // the queue or kind that the misspelt one may be meant to be
	Since time.Time // when it began, by the clock of who noticed; zero if that is not known
	Error string    // of the application, or of background work: what Detail ends with; "" for none
}

func (f Finding) String() string { return f.What + ": " + f.Detail + "; " + f.Advice }

// findingNames says beside each name what the finding is about.
var findingNames = [...]string{
	"autovacuum",           // a table that is not vacuumed
	"background",           // work of this process that fails
	"crashes",              // a job that may end its process each time
	"dead_rows",            // more of them than live ones
	"failing",              // a kind of which half of the attempts fail, or more
	"group",                // a job that waits for dead or held members
	"handler",              // handlers that do not return although their context has ended
	"hang",                 // a job that has had a place of a lane or a limit for long
	"index_bloat",          // an index that is far larger than its rows need
	"kind",                 // jobs for which no worker has a handler
	"lane",                 // one that stands still
	"limit",                // one that stands still, or that nobody has set
	"lock",                 // a session that keeps others from the tables
	"missing_rows",         // rows that are always there, of tables that somebody has emptied
	"paused",               // a queue or kind that somebody may have forgotten
	"pool",                 // a worker that waits for connections
	"prepared_transaction", // an old one
	"reaper",               // none runs
	"replication_slot",     // one that holds back vacuum
	"slow_limit",           // a limit for which hours of work wait
	"snapshot",             // an old transaction
	"trigger",              // one of the application on the library's tables
	"versions",             // workers that a deploy has left behind
	"waiting",              // a queue whose jobs have been due for long
}

// FindingNames returns all names that Finding.What can have, sorted. A gauge with a value for each can so be 0 for what is not found.
func FindingNames() []string { return findingNames[:] }

// healthLimits says from where on Health reports something. A busy queue is normally below these limits.
type healthLimits struct {
	snapshot time.Duration // age of a transaction that has a snapshot
	xids     int64         // transactions since a replication slot's snapshot, which has no time
	dead     int64         // dead rows of a table, if there are more of them than live rows
	index    int64         // bytes of an index, if these are ten times what its live rows need
	waiting  time.Duration // how long the oldest job has been due
	hang     time.Duration // how long a job has run for which its lane's or limit's other jobs wait
	question time.Duration // how long a question may take
}

// Health looks for what commonly slows down a queue on Postgres, and returns what it found; an empty result is good.
//
// Work that this Queue's workers and Reapers do in the background, and that is failing, comes first. It is returned even
// together with an error: if the database cannot be reached, Health knows nothing else. Each process knows only its own
// background work.
//
// Otherwise Health reads Postgres's own statistics and locks, what workers have counted in the last hour, and a bounded number of jobs of
// each queue, of lanes and limits (500 of those that jobs wait for, in the order of their names) and of groups (10,000), so it is cheap
// enough to call every minute. Who has just called Stats can give what it returned: then Health does not count again, and looks at
// these queues only.
//
// Each question has five seconds. While somebody has the tables locked, Health names that session first ("lock"), gives the questions one
// second each, and returns what it could find, without an error. Questions that have no answer for another reason are an error, together
// with what was found. Postgres shows the age of another role's transaction only to members of pg_read_all_stats; without that
// role, such sessions are not found.
func (q *Ops) Health(ctx context.Context, stats ...QueueStats) ([]Finding, error) {
	return q.health(ctx, healthLimits{snapshot: time.Minute, xids: 1_000_000, dead: 200_000, index: 64 << 20, waiting: time.Minute, hang: 5 * time.Minute, question: 5 * time.Second}, stats...)
}

func (q *Ops) health(ctx context.Context, limits healthLimits, stats ...QueueStats) ([]Finding, error) {
	x := examination{q: q, limits: limits, stats: stats, live: make(map[string]int64)}
	for _, t := range root.Troubles(q.q) {
		x.found = append(x.found, Finding{
			What: "background", Detail: t.Detail, Advice: t.Advice, Queue: t.Queue, Since: t.Since, Error: t.Error,
		})
	}
	err := x.locks(ctx, lockOld)
	if err != nil {
		return x.found, err
	}
	var unanswered error
	for _, look := range []func(context.Context) error{
		x.rows, x.snapshots, x.keptBack, x.tables, x.indexes, x.triggers, x.queues, x.failing, x.stuck, x.versions, x.pauses, x.lanes, x.slow, x.hangs, x.groups, x.calls,
		x.reaper,
	} {
		switch err := x.within(ctx, look); {
		case err == nil:
		case ctx.Err() != nil || !noAnswer(err):
			return x.found, err
		default:
			unanswered = cmp.Or(unanswered, err)
		}
	}
	x.handlers()
	if unanswered != nil && !x.locked {
		err = x.locks(ctx, 0) // it may have come since
	}
	if x.locked {
		return x.found, err
	}
	return x.found, unanswered
}

// within asks a question within its time. Once it is known that there are locks, each question has a fifth of that: most of them will
// not be answered.
func (x *examination) within(ctx context.Context, look func(context.Context) error) error {
	limit := x.limits.question
	if x.locked || x.late {
		limit /= 5
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := look(ctx)
	x.late = x.late || noAnswer(err)
	return err
}

// noAnswer reports whether a question's time was over, or its wait for a lock.
func noAnswer(err error) bool {
	state := sqlstate.Of(err)
	return errors.Is(err, context.DeadlineExceeded) || state == "55P03" || state == "57014"
}

// examination is one call of Health: each of its methods adds what it finds.
type examination struct {
	q       *Ops
	limits  healthLimits
	found   []Finding
	stats   []QueueStats     // of the queues to look at; if there are none, queues fills it in
	workers []WorkerInfo     // that run: queues fills it in, and versions uses it
	live    map[string]int64 // rows of each table: tables fills it in, and indexes uses it
	locked  bool             // somebody has tables locked, and was named
	late    bool             // a question had no answer
	drained map[string]int   // how many jobs of each queue have ended lately: drains fills it in
	now     time.Time        // the database's, when the latest question was asked
}

func (x *examination) add(what, detail, advice string) {
	x.found = append(x.found, Finding{What: what, Detail: detail, Advice: advice})
}

// ago gives a time by the database's clock, or zero if that was not read.
func (x *examination) ago(d time.Duration) time.Time {
	if x.now.IsZero() {
		return x.now
	}
	return x.now.Add(-d)
}

func (x *examination) each(ctx context.Context, statement string, args []any, scan func(pgx.Rows) error) error {
	by := pg.Reading
	by.Clock = &x.now
	if err := x.q.store.Send(ctx, x.q.store.Pool, by, statement, args, pg.Each(scan)); err != nil {
		return fmt.Errorf("onceq: health: %w", err)
	}
	return nil
}

// locks looks for sessions whose transactions are older than given and that have tables of the schema locked so that others cannot use
// them, or wait for such a lock: then the others wait behind them. It names them before everything else. Those of which the role
// may not see how old their transactions are count as old.
func (x *examination) locks(ctx context.Context, age time.Duration) error {
	const locks = `
select coalesce(l.pid, 0), coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(a.state, ''), a.xact_start,
       pg_catalog.string_agg(distinct c.relname::text, ', '), pg_catalog.min(l.mode), pg_catalog.bool_and(l.granted),
       case when not pg_catalog.bool_and(l.granted) then pg_catalog.array_to_string(pg_catalog.pg_blocking_pids(l.pid), ', ') else '' end
  from pg_locks l
  join pg_class c on c.oid = l.relation
  left join pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'relation' and l.database = (select oid from pg_database where datname = current_database())
   and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
   and c.relkind in ('r', 'p') and c.relnamespace = (select relnamespace from pg_class where oid = 'onceq.jobs'::regclass::oid)
   and l.pid is distinct from pg_backend_pid()
   and (a.xact_start <= statement_timestamp() - $1::bigint::float8 * interval '1 microsecond') is not false
 group by l.pid, a.usename, a.application_name, a.state, a.xact_start
 order by pg_catalog.bool_and(l.granted) desc, a.xact_start, 1
 limit 5`
	var all []Finding
	err := x.each(ctx, locks, []any{age.Microseconds()}, func(rows pgx.Rows) error {
		var pid int
		var user, app, state, tables, mode, blockers string
		var since *time.Time
		var granted bool
		if err := rows.Scan(&pid, &user, &app, &state, &since, &tables, &mode, &granted, &blockers); err != nil {
			return err
		}
		f := Finding{What: "lock", Severe: true, Since: table.OrZero(since)}
		who := fmt.Sprintf("session %d (user %q, application %q, %s)", pid, user, app, state)
		f.Advice = fmt.Sprintf("find out what it does; to end it: select pg_terminate_backend(%d)", pid)
		if pid == 0 {
			who, f.Advice = "a prepared transaction", "commit it or roll it back: pg_prepared_xacts has its name"
		}
		if f.Detail = fmt.Sprintf("%s has locked %s (%s)", who, tables, mode); !granted {
			f.Detail = fmt.Sprintf("%s waits to lock %s (%s), for session %s", who, tables, mode, blockers)
		}
		if since != nil {
			f.Detail += ", in a transaction that began at " + table.Stamp(*since)
		}
		f.Detail += ": who needs these tables waits until it ends"
		all = append(all, f)
		return nil
	})
	x.found, x.locked = slices.Concat(all, x.found), x.locked || len(all) > 0
	return err
}

// snapshots looks for the session with the oldest transaction that keeps vacuum from removing what finished since: it has a
// snapshot, or it has written. At READ COMMITTED one that has written and idles has only the id of its transaction (backend_xid).
// docs/run/operations.md has the same condition.
func (x *examination) snapshots(ctx context.Context) error {
	const snapshot = `
select pid, coalesce(usename, ''), coalesce(application_name, ''), coalesce(state, ''), coalesce(backend_type, ''),
       xact_start, extract(epoch from statement_timestamp() - xact_start)::bigint
  from pg_stat_activity a
 where coalesce(backend_xmin, backend_xid) is not null and xact_start < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
   and (datname = current_database() or backend_type = 'walsender') and pid <> pg_backend_pid()
   and not exists (select from pg_stat_progress_vacuum v where v.pid = a.pid) -- one vacuum keeps no other one from its work
 order by greatest(pg_catalog.age(backend_xmin), pg_catalog.age(backend_xid)) desc, xact_start
 limit 1`
	return x.each(ctx, snapshot, []any{x.limits.snapshot.Microseconds()}, func(rows pgx.Rows) error {
		var pid, seconds int64
		var user, app, state, kind string
		f := Finding{What: "snapshot"}
		if err := rows.Scan(&pid, &user, &app, &state, &kind, &f.Since, &seconds); err != nil {
			return err
		}
		age := time.Duration(seconds) * time.Second
		if kind == "walsender" {
			f.Detail = fmt.Sprintf("a query on standby %q is %s old and, with hot_standby_feedback, keeps vacuum from removing what finished since", app, age)
			f.Advice = "end it, or set max_standby_streaming_delay"
		} else {
			f.Detail = fmt.Sprintf("session %d (user %q, application %q, %s) has been in its transaction for %s and keeps vacuum from removing what finished since", pid, user, app, state, age)
			f.Advice = fmt.Sprintf("end it (select pg_terminate_backend(%d)), and set idle_in_transaction_session_timeout or transaction_timeout for its kind", pid)
		}
		x.found = append(x.found, f)
		return nil
	})
}

// keptBack looks for prepared transactions and replication slots, which do the same and have no session.
func (x *examination) keptBack(ctx context.Context) error {
	const others = `
select 'prepared_transaction', gid, extract(epoch from statement_timestamp() - prepared)::bigint
  from pg_prepared_xacts
 where database = current_database() and prepared < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
union all
select 'replication_slot', slot_name::text, greatest(pg_catalog.age(xmin), pg_catalog.age(catalog_xmin))::bigint
  from pg_replication_slots
 where pg_catalog.age(xmin) > $2::bigint`
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
       pg_catalog.current_setting('autovacuum')::bool and pg_catalog.current_setting('track_counts')::bool
         and not exists (select from pg_catalog.pg_options_to_table(c.reloptions) where option_name = 'autovacuum_enabled' and not option_value::bool)
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
			x.add("autovacuum", fmt.Sprintf("%s.%s is not vacuumed automatically", x.q.q.Schema(), name),
				"turn on autovacuum and track_counts; otherwise the table and its indexes grow without end")
		}
		if dead > x.limits.dead && dead > alive {
			x.add("dead_rows", fmt.Sprintf("%s.%s has %d dead rows and %d live ones", x.q.q.Schema(), name, dead, alive),
				"if an old transaction is named above, end it; otherwise let autovacuum run more often or with less cost delay")
		}
		return nil
	})
}

// triggers looks for triggers on the tables of jobs and keys. The library has none: an error that one raises refuses what the library does.
func (x *examination) triggers(ctx context.Context) error {
	const triggers = `
select c.relname::text, t.tgname::text
  from pg_trigger t join pg_class c on c.oid = t.tgrelid
 where not t.tgisinternal
   and t.tgrelid in ('onceq.jobs'::regclass, 'onceq.job_waits'::regclass, 'onceq.job_history'::regclass, 'onceq.job_fences'::regclass)
 order by 1, 2
 limit 5`
	return x.each(ctx, triggers, nil, func(rows pgx.Rows) error {
		var table, name string
		if err := rows.Scan(&table, &name); err != nil {
			return err
		}
		x.add("trigger", fmt.Sprintf("table %s.%s has the trigger %q", x.q.q.Schema(), table, name),
			"if it can raise an error, drop it: claims and lanes stand still while it refuses a job")
		return nil
	})
}

// indexes looks for indexes that are far larger than their rows need.
func (x *examination) indexes(ctx context.Context) error {
	const indexes = `
select t.relname, c.relname, pg_catalog.pg_relation_size(c.oid)
  from pg_index i join pg_class c on c.oid = i.indexrelid join pg_class t on t.oid = i.indrelid
 where i.indrelid in ('onceq.jobs'::regclass, 'onceq.job_fences'::regclass, 'onceq.job_history'::regclass)
   and pg_catalog.pg_relation_size(c.oid) > $1::bigint
 order by c.relname`
	return x.each(ctx, indexes, []any{x.limits.index}, func(rows pgx.Rows) error {
		var table, name string
		var size int64
		if err := rows.Scan(&table, &name, &size); err != nil {
			return err
		}
		const entry = 100 // bytes, a generous estimate
		if size > 10*entry*x.live[table] {
			x.add("index_bloat", fmt.Sprintf("index %s.%s has %d MB for %d rows", x.q.q.Schema(), name, size>>20, x.live[table]),
				"reindex it concurrently")
		}
		return nil
	})
}

// pauses looks for queues, kinds and limits that somebody may have forgotten to resume.
func (x *examination) pauses(ctx context.Context) error {
	return x.each(ctx, listPauses, []any{x.limits.waiting.Microseconds()}, func(rows pgx.Rows) error {
		var p onceq.Pause
		if err := scanPause(&p, rows); err != nil {
			return err
		}
		advice := "resume it when the reason is over"
		if !p.Until.IsZero() {
			advice = "it ends by itself; resume it if the reason is over before"
		}
		x.found = append(x.found, Finding{
			What: "paused", Detail: p.String(), Advice: advice, Queue: p.Queue, Kind: p.Kind, Since: p.Since,
		})
		return nil
	})
}

// readStill reads the lanes and limits that stand still although jobs wait for them, with the jobs that stop one. Of a family of
// which the limit is 0 it looks at the first 1,000 jobs: it does not find the others behind so many delayed ones.
var readStill = `
select s.lane, s.ids, -1
  from (select lane, (pg_catalog.array_agg(id order by id))[:5] as ids
          from (select s.lane, s.id
                  from (select lane, id from onceq.lane_stops order by lane, id limit 1000) s
                  join onceq.job_history h on h.id = s.id and ` + table.LaneIn("h.lane") + ` = s.lane and h.state in (` + table.JobDead + `, ` + table.JobHeld + `)) h
         group by lane) s
 where exists (select from onceq.job_waits w where w.lane = s.lane offset 0)
union all
select l.lane, '{}', l.n
  from onceq.lane_limits l
 where l.n = 0
   and (exists (select from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                 cross join lateral (
                       select from onceq.job_waits
                        where lane = l.lane and priority = p.priority and run_at < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
                        limit 1) w)
     or ` + table.IsFamilyLine("l.lane") + ` and exists (
               select from (select lane, run_at from onceq.job_waits
                             where lane > l.lane and lane < pg_catalog.left(l.lane, -1) || '0' -- which comes after the slash
                             order by lane, priority, run_at, id
                             limit 1000) w
                where w.run_at < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
                  and not exists (select from onceq.lane_limits o where o.lane = w.lane and o.n is not null offset 0)))
 order by 1
 limit 20`

// raiseLimit is what to do about a limit of 0, for who reads a Finding or an Explanation: it does not say with which tool.
const raiseLimit = "raise its limit; the audit trail may say who set it"

// lanes looks for lanes and limits that stand still until somebody does something, and for which jobs wait.
func (x *examination) lanes(ctx context.Context) error {
	return x.each(ctx, readStill, []any{x.limits.waiting.Microseconds()}, func(rows pgx.Rows) error {
		var lane string
		var ids []int64
		var n int
		if err := rows.Scan(&lane, &ids, &n); err != nil {
			return err
		}
		f := Finding{What: "lane", Severe: true, Advice: raiseLimit}
		switch family, every := strings.CutSuffix(lane, "/"); {
		case strings.HasPrefix(lane, "/"):
			f.What = "limit"
			f.Detail = fmt.Sprintf("limit %q lets no job start, and jobs wait for it", lane[1:])
		case len(ids) > 0:
			f.JobID, f.Advice = ids[0], "redrive, resolve or discard what stops it; the lane then goes on"
			f.Detail = LaneInfo{Lane: lane, StoppedBy: ids}.String() + ", and other jobs wait for it"
		case every:
			f.Detail = fmt.Sprintf("the limit of the lanes of family %q is 0, and jobs wait: those without a limit of their own stand still", family)
		default:
			f.Detail = fmt.Sprintf("lane %q stands still, because its limit is 0, and jobs wait for it", lane)
		}
		x.found = append(x.found, f)
		return nil
	})
}

// handlers looks for handlers of this process that do not return.
func (x *examination) handlers() {
	root.Late(x.q.q, func(kind string, job int64, since time.Time) {
		x.add("handler", fmt.Sprintf("a handler of kind %q has run for %s and does not return although its context has ended; its lease on job %d was given up", kind, time.Since(since).Round(time.Second), job),
			"make it return when its context ends; it occupies one of its queue's slots until it returns or this process ends")
	})
}
