package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// finding is a line of doctor. What is a stable word for programs.
type finding struct {
	Level  string `json:"level"` // "ok", "warning" or "bad"
	What   string `json:"what"`
	Detail string `json:"detail"`
	Advice string `json:"advice,omitempty"`

	// What it is about; left out where it is about something else, or where that is not known.
	Queue string    `json:"queue,omitempty"`
	Kind  string    `json:"kind,omitempty"`
	Job   int64     `json:"job,omitempty"`
	Since time.Time `json:"since,omitzero"`

	Schedule string `json:"schedule,omitempty"`
}

// levels are those of findings, the worst first.
var levels = []string{"bad", "warning", "ok"}

func (a *app) doctorCommand() *cobra.Command {
	var all bool
	var level string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what is wrong, and what to do: begin here",
		Long: `doctor looks at the connection, the versions, the tables, the plans, the server's settings and connections, at what slows the queues down,
and at jobs that wait for a person. It says what it finds in words, with what to do. It changes nothing, and may run at any time.
It exits with 7 if something needs attention. With --level bad that is only what keeps jobs from running or loses data, as for an alarm at night.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if level != "bad" && level != "warning" {
				return usagef("--level is %q; it must be warning or bad", level)
			}
			if err := a.connect(cmd.Context(), false); err != nil {
				return err
			}
			x := &examination{a: a}
			err := x.run(cmd.Context())
			troubled := slices.ContainsFunc(x.found, func(f finding) bool { return f.Level == "bad" || f.Level == level })
			switch { // what was found is printed, too, if a question fails
			case a.json:
				said := map[string]any{"ok": !troubled && err == nil, "findings": append([]finding{}, x.found...)}
				if failed := a.printJSON(said); failed != nil {
					return failed
				}
			case troubled || err == nil:
				a.tell(x.found, level, all)
			}
			if err != nil {
				return err
			}
			if troubled {
				return &exit{code: codeFindings}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "print what is fine, too")
	cmd.Flags().StringVar(&level, "level", "warning", "what needs attention: warning and worse, or bad alone")
	return cmd
}

// tell prints what needs attention first, the worst of it on top. What is below the level needs none.
func (a *app) tell(found []finding, level string, all bool) {
	bad, fine, attention := 0, 0, true
	for _, l := range levels {
		for _, f := range found {
			if f.Level != l {
				continue
			}
			if attention {
				bad++
			} else if fine++; !all {
				continue
			}
			a.say("%s  %s\n", a.colored(stateColors[l], fmt.Sprintf("%-7s", l)), a.wrapped(a.out, f.What+": "+f.Detail, 9))
			if f.Advice != "" {
				a.say("         %s\n", a.wrapped(a.out, f.Advice, 9))
			}
		}
		attention = attention && l != level
	}
	fines := fmt.Sprintf("%d things are fine", fine)
	if level == "bad" {
		fines = fmt.Sprintf("%d things are fine or can wait", fine)
	}
	switch {
	case all:
	case bad == 0:
		a.say("Nothing needs attention; %s (--all prints them).\n", fines)
	default:
		a.say("%s attention, %s (--all prints them).\n",
			map[bool]string{true: "1 thing needs", false: fmt.Sprint(bad) + " things need"}[bad == 1], strings.Replace(fines, " things", "", 1))
	}
}

// examination is one call of doctor.
type examination struct {
	a       *app
	found   []finding
	missing bool // some of the tables
}

func (x *examination) add(level, what, detail, advice string) {
	x.put(finding{Level: level, What: what, Detail: detail, Advice: advice})
}

func (x *examination) put(f finding) {
	f.Advice = x.a.typed(f.Advice)
	x.found = append(x.found, f)
}

// run asks all questions, and puts what locks the tables before everything else: it may be why others have no
// answer. Each has a time limit of its own. One that has no answer within it is a finding. Those that follow it,
// or a lock that was found, have a tenth of the limit: what keeps one waiting may keep others waiting too.
func (x *examination) run(ctx context.Context) error {
	defer func() {
		slices.SortStableFunc(x.found, func(a, b finding) int { return cmp.Compare(first(a), first(b)) })
	}()
	limit := x.a.timeout
	for _, q := range []struct {
		about string
		ask   func(context.Context) error
	}{
		{"the server", x.server}, {"connections", x.connections}, {"health", x.health}, {"the tables", x.tables}, {"the plan of a claim", x.plan},
		{"pauses", x.pauses}, {"workers", x.workers}, {"dead and held jobs", x.kept}, {"schedules", x.schedules},
	} {
		inner, cancel := context.WithTimeout(ctx, limit)
		err := q.ask(inner)
		cancel()
		switch {
		case err == nil:
		case errors.Is(err, errNoTables):
			return nil // nothing else can be looked at
		case state(err) == "42P01" && x.missing: // it is named
		case ctx.Err() == nil && (errors.Is(err, context.DeadlineExceeded) || state(err) == "57014" || state(err) == "55P03"):
			x.add("bad", "unanswered", fmt.Sprintf("the question about %s had no answer within %v", q.about, limit),
				"if a lock is named above, end what has it; otherwise the server is slow: look at its load, or give more time with --timeout")
			limit = x.a.timeout / 10
		default:
			return err
		}
		if slices.ContainsFunc(x.found, func(f finding) bool { return f.What == "lock" }) {
			limit = x.a.timeout / 10
		}
	}
	return nil
}

func first(f finding) int {
	if f.What == "lock" {
		return 0
	}
	return 1
}

var errNoTables = errors.New("no tables")

// settings are those of the server that matter, with what is right and what it means if it is not.
var settings = []struct {
	name   string
	wrong  func(value string) bool
	level  string
	means  string
	advice string
}{
	{"fsync", isOff, "bad", "a crash of the machine may corrupt the database and forget jobs", "set fsync = on"},
	{"full_page_writes", isOff, "bad", "a crash of the machine may corrupt the database", "set full_page_writes = on"},
	{"synchronous_commit", isOff, "warning", "a crash forgets the latest commits: work that was done may be done again", "set synchronous_commit = on, at least for workers and producers"},
	{"autovacuum", isOff, "bad", "tables and indexes grow without end, and claims get slower", "set autovacuum = on"},
	{"track_counts", isOff, "bad", "autovacuum does not work without it", "set track_counts = on"},
	{"idle_in_transaction_session_timeout", func(v string) bool { return v == "0" }, "ok",
		"a session that forgets its transaction keeps vacuum from its work until somebody ends it", "set it for the application's role, to some minutes"},
	{"transaction_isolation", func(v string) bool { return v != "read committed" }, "ok", "producers must expect 40001 on enqueueing; onceq's own transactions are not affected", ""},
}

func isOff(v string) bool { return v == "off" }

func (x *examination) server(ctx context.Context) error {
	var version, major, user, database string
	var standby bool
	var address *string
	err := x.a.pool.QueryRow(ctx, `
select pg_catalog.current_setting('server_version'), pg_catalog.current_setting('server_version_num'), current_user::text, current_database()::text, pg_is_in_recovery(), pg_catalog.host(inet_server_addr())`).
		Scan(&version, &major, &user, &database, &standby, &address)
	if err != nil {
		return err
	}
	where := "a socket"
	if address != nil {
		where = *address
	}
	x.add("ok", "connection", fmt.Sprintf("database %q as user %q at %s, schema %q", database, user, where, x.a.schema), "")
	x.add("ok", "command", "version "+versionOf(), "")
	if n, _ := strconv.Atoi(major); n < 150000 {
		x.add("bad", "server", "PostgreSQL "+version+" is older than onceq supports", "use 15 or newer")
	} else {
		x.add("ok", "server", "PostgreSQL "+version, "")
	}
	if standby {
		x.add("bad", "standby", "this server is a standby: workers and producers cannot write here", "connect to the primary")
	}
	for _, s := range settings {
		var value string
		if err := x.a.pool.QueryRow(ctx, `select pg_catalog.current_setting($1::text)`, s.name).Scan(&value); err != nil {
			return err
		}
		switch {
		case s.wrong(value):
			x.add(s.level, "setting", fmt.Sprintf("%s is %s: %s", s.name, value, s.means), s.advice)
		default:
			x.add("ok", "setting", s.name+" is "+value, "")
		}
	}
	return nil
}

func versionOf() string { return strings.Trim(version(), "()") }

func (x *examination) connections(ctx context.Context) error {
	var used, most int
	if err := x.a.pool.QueryRow(ctx, `
select case when pg_catalog.pg_has_role('pg_read_all_stats', 'usage') -- others do not see what other roles' sessions are
            then (select count(*) from pg_stat_activity where backend_type = 'client backend')
            else (select pg_catalog.sum(numbackends) from pg_stat_database) end::int,
       pg_catalog.current_setting('max_connections')::int - pg_catalog.current_setting('superuser_reserved_connections')::int`).Scan(&used, &most); err != nil {
		return err
	}
	detail := fmt.Sprintf("%d of %d connections are in use", used, most)
	if used*10 >= most*9 {
		x.add("bad", "connections", detail, "lower the pools' MaxConns, count each process twice because of deploys, or use PgBouncer; docs/run/production.md says how many a worker needs")
	} else if used*10 >= most*7 {
		x.add("warning", "connections", detail, "a deploy doubles the processes: lower the pools' MaxConns, or use PgBouncer")
	} else {
		x.add("ok", "connections", detail, "")
	}
	const blocked = `
select a.pid, coalesce(a.application_name, ''), extract(epoch from statement_timestamp() - l.waitstart)::bigint, pg_catalog.pg_blocking_pids(a.pid)::int[],
       coalesce((select pg_catalog.string_agg(pg_catalog.format('%s (user %s, application %s, %s)', b.pid, b.usename, b.application_name, coalesce(b.state, 'of another role')), ', ')
                   from pg_stat_activity b where b.pid = any (pg_catalog.pg_blocking_pids(a.pid))), '')
  from pg_locks l join pg_stat_activity a on a.pid = l.pid
 where a.datname = current_database() and not l.granted and l.waitstart < statement_timestamp() - interval '5 seconds'
 order by l.waitstart limit 5`
	rows, err := x.a.pool.Query(ctx, blocked)
	if err != nil {
		return err
	}
	var pid, seconds int64
	var app, who string
	var by []int32
	_, err = pgx.ForEachRow(rows, []any{&pid, &app, &seconds, &by, &who}, func() error {
		end := make([]string, len(by))
		for i, b := range by {
			end[i] = fmt.Sprintf("select pg_terminate_backend(%d)", b)
		}
		x.add("warning", "lock", fmt.Sprintf("session %d of %q has waited for %s for a lock that session %s has", pid, app, ago(time.Duration(seconds)*time.Second), who),
			"find out what that session does; to end it: "+strings.Join(end, "; "))
		return nil
	})
	return err
}

// indexes that claims, lookups and lists need.
var indexes = []string{"jobs_claim", "jobs_pkey", "job_fences_pkey", "job_history_pkey", "job_history_state", "job_history_keep"}

func (x *examination) tables(ctx context.Context) error {
	err := x.a.intact(ctx)
	var schema *onceq.SchemaError
	var gone *missingTables
	switch {
	case errors.As(err, &gone):
		x.missing = true
		x.add("bad", "tables", gone.Error(), gone.advice())
		return nil
	case errors.As(err, &schema):
		advice := "onceq migrate up"
		if schema.Found > schema.Want {
			advice = "install the version of this command that the workers use"
		}
		x.add("bad", "tables", strings.TrimPrefix(err.Error(), "onceq: "), advice)
		return errNoTables
	case errors.Is(err, onceq.ErrIDTaken):
		x.add("bad", "ids", "the sequence of ids is behind ids in use, as after a restore: jobs may fail, or replace others",
			"stop producers and workers, and set the sequence as the documentation of onceq.ErrIDTaken says")
	case state(err) == "42501":
		x.rights(err)
		return errNoTables
	case err != nil && slices.ContainsFunc(x.found, func(f finding) bool { return f.What == "missing_rows" }): // it is named
	case err != nil:
		return err
	default:
		version, err := x.a.tablesVersion(ctx)
		if err != nil {
			return err
		}
		text := fmt.Sprintf("schema %q is at version %d", x.a.schema, version)
		if version > onceq.SchemaVersion {
			text += fmt.Sprintf(", and works with this command of version %d", onceq.SchemaVersion)
		}
		x.add("ok", "tables", text, "")
	}
	rows, err := x.a.pool.Query(ctx, `
select c.relname::text from pg_index i join pg_class c on c.oid = i.indexrelid join pg_namespace n on n.oid = c.relnamespace
 where n.nspname = $1::text and i.indisvalid and i.indisready`, x.a.schema)
	if err != nil {
		return err
	}
	there, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	missing := slices.DeleteFunc(slices.Clone(indexes), func(name string) bool { return slices.Contains(there, name) })
	if len(missing) > 0 {
		x.add("bad", "indexes", "missing or invalid: "+strings.Join(missing, ", "), "create them as onceq migrate sql says, or reindex them")
	} else {
		x.add("ok", "indexes", "all are there and valid", "")
	}
	return nil
}

// rights says once that the role may not read the tables.
func (x *examination) rights(err error) {
	if !slices.ContainsFunc(x.found, func(f finding) bool { return f.What == "rights" }) {
		x.add("bad", "rights", "the role may not read the tables: "+err.Error(), "as the owner of the tables: onceq migrate grants ROLE | psql")
	}
}

// plan looks whether a claim finds its jobs by its index.
func (x *examination) plan(ctx context.Context) error {
	tx, err := x.a.pool.BeginTx(ctx, pgx.TxOptions{AccessMode: pgx.ReadOnly})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := tx.Exec(ctx, `select pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true)`); err != nil {
		return err
	}
	rows, err := tx.Query(ctx, `explain select id from `+pgx.Identifier{x.a.schema}.Sanitize()+`.jobs
 where queue = 'default' and priority = 0 and run_at <= now() and (leased_until is null or leased_until <= now()) order by run_at, id limit 100`)
	if err != nil {
		return err
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	if plan := strings.Join(lines, "\n"); !strings.Contains(plan, "jobs_claim") {
		x.add("bad", "plan", "a claim does not use its index jobs_claim:\n"+plan, "analyze the table jobs, and look whether the index is valid")
	} else {
		x.add("ok", "plan", "a claim finds its jobs by its index", "")
	}
	return nil
}

func (x *examination) health(ctx context.Context) error {
	before := len(x.found)
	found, err := x.a.ops.Health(ctx)
	var schema *onceq.SchemaError
	if errors.As(err, &schema) {
		return nil // the next question says so
	}
	if state(err) == "42501" {
		x.rights(err)
		err = nil
	}
	for _, f := range found {
		if f.What == "paused" { // people says it without delay
			continue
		}
		level := "warning"
		if f.Severe {
			level = "bad"
		}
		x.put(finding{Level: level, What: f.What, Detail: f.Detail, Advice: advice(f), Queue: f.Queue, Kind: f.Kind, Job: f.JobID, Since: f.Since})
	}
	if err == nil && len(x.found) == before {
		x.add("ok", "health", "no old transaction, no bloat, no queue that nobody works", "")
	}
	return err
}

// advice is what to type. What Health itself advises is for people who write code.
func advice(f onceqops.Finding) string {
	list := "onceq jobs list --state waiting,retrying --queue " + quoteArg(f.Queue)
	switch {
	case f.What == "waiting" && f.Queue == "onceqcron":
		return f.Advice + "; onceq schedules list"
	case f.What == "waiting" && f.Meant != "":
		return fmt.Sprintf("is its name a misspelt %q, which workers do serve? Correct it where the jobs are enqueued, and move what waits: onceq jobs move --queue %s --to %s; %s", f.Meant, quoteArg(f.Queue), quoteArg(f.Meant), list)
	case f.What == "waiting" && (strings.Contains(f.Detail, "do not return") || strings.Contains(f.Detail, "pool")):
		return f.Advice
	case f.What == "waiting" && f.Severe && strings.Contains(f.Detail, "no worker"):
		return "start one, or is the queue's name spelt wrong where the jobs are enqueued? onceq workers says what workers serve; " + list
	case f.What == "waiting" && strings.Contains(f.Detail, "paused"):
		return "onceq pauses; " + list
	case f.What == "waiting" && strings.Contains(f.Detail, "although"):
		return "have these a handler for the kinds? Compare onceq workers with " + list
	case f.What == "waiting":
		return f.Advice + ": onceq jobs list --state running --queue " + quoteArg(f.Queue)
	case f.What == "kind":
		return f.Advice + "; onceq workers; " + list + " --kind " + quoteArg(f.Kind)
	case f.What == "failing":
		return fmt.Sprintf("%s lists them; when the cause is mended, onceq jobs retry --kind %s runs what waits for its next attempt now, and onceq jobs redrive --kind %s what is dead",
			"onceq jobs list --state retrying,dead --kind "+quoteArg(f.Kind), quoteArg(f.Kind), quoteArg(f.Kind))
	case f.What == "missing_rows" && strings.Contains(f.Detail, "lane_locks"):
		return "onceq check puts them back, as each worker does when it starts"
	case f.What == "slow_limit":
		return "onceq limits set raises it, if what it protects bears more; onceq actions may say who set it; onceq limits list"
	case f.What == "hang":
		return fmt.Sprintf("onceq jobs explain %d says what it does; a handler may hang: look at what its process logged last; onceq jobs cancel %d tells the handler to end, and if it does not listen, end the process: the others then go on. A time limit of its kind ends such a handler", f.JobID, f.JobID)
	case f.What == "limit" && !f.Severe:
		return "onceq limits set sets one; or is a name spelt wrong, in the code or where the limit was set? onceq limits list"
	case f.What == "limit":
		return "onceq limits set raises it; onceq actions may say who set it; onceq limits list"
	case f.What == "crashes":
		return fmt.Sprintf("look at what its workers logged last, and at their memory (onceq jobs explain %d); by itself it is dead after a few more; onceq jobs cancel %d ends it now", f.JobID, f.JobID)
	case f.What == "versions":
		return "finish the deploy: end these processes, or find out why they were not replaced; onceq workers lists all"
	case f.What == "group":
		return fmt.Sprintf("onceq groups show %d says which; onceq jobs redrive --group %d runs the dead ones again, onceq jobs discard --group %d goes on without them; onceq groups cancel %d ends all of it", f.JobID, f.JobID, f.JobID, f.JobID)
	case f.What == "lane" && f.JobID != 0:
		return "onceq jobs show says why each died; onceq jobs redrive runs it again, onceq jobs discard gives it up, onceq effects resolve is for a held one; onceq lanes list"
	case f.What == "lane" && strings.HasPrefix(f.Advice, "raise its limit"):
		return "onceq lanes limit raises it; onceq actions may say who set it; onceq lanes list"
	}
	return f.Advice
}

func (x *examination) pauses(ctx context.Context) error {
	pauses, err := x.a.ops.Pauses(ctx, x.a.pool)
	for _, p := range pauses {
		text := fmt.Sprintf("onceq resume --%s %s, when the reason is over", whatOf(p), quoteArg(p.Queue+p.Kind+p.Limit))
		x.put(finding{
			Level: "warning", What: "paused", Detail: p.String(), Advice: text,
			Queue: p.Queue, Kind: p.Kind, Since: p.Since,
		})
	}
	return err
}

func (x *examination) workers(ctx context.Context) error {
	workers, err := x.a.ops.Workers(ctx, x.a.pool)
	if err != nil {
		return err
	}
	live, gone := 0, 0
	served := make(map[string]bool)
	for _, w := range workers {
		if w.Stale {
			gone++
			continue
		}
		for queue := range w.Queues {
			served[queue] = true
		}
		if live++; w.Schema != onceq.SchemaVersion {
			x.add("warning", "worker", fmt.Sprintf("%s works with version %d of the tables, and this command knows %d", w.Where(), w.Schema, onceq.SchemaVersion), "finish the deploy, or install the command of that version")
		}
	}
	x.gone(workers, served)
	switch {
	case live > 0:
		x.add("ok", "workers", plural(live, "worker")+" seen in the last three minutes", "")
	default: // one that has ended leaves no row, and may have worked a moment ago
		x.add("warning", "workers", "no worker is there"+map[bool]string{true: " but those that were not seen for three minutes"}[gone > 0], "start one; onceq workers lists them")
	}
	return nil
}

// gone names the queues of workers that were killed and that no live one serves: each by the worker that was seen last. A killed worker
// whose queues others serve is no trouble.
func (x *examination) gone(workers []onceqops.WorkerInfo, served map[string]bool) {
	last := make(map[string]onceqops.WorkerInfo) // by queue
	covered := 0
	for _, w := range workers {
		if !w.Stale {
			continue
		}
		alone := false
		for queue := range w.Queues {
			if !served[queue] {
				alone = true
				if w.Seen.After(last[queue].Seen) {
					last[queue] = w
				}
			}
		}
		if !alone {
			covered++
		}
	}
	if covered > 0 {
		x.add("ok", "worker", plural(covered, "worker")+" not seen for three minutes or more; others serve their queues", "")
	}
	for _, queue := range slices.Sorted(maps.Keys(last)) {
		w := last[queue]
		x.put(finding{
			Level: "warning", What: "worker", Queue: queue, Since: w.Seen,
			Detail: fmt.Sprintf("no live worker serves queue %q; the last one, %s, has not been seen since %s: it was killed, is frozen, or has lost the database", queue, w.Where(), stamp(w.Seen)),
			Advice: "start a worker for the queue, and look at what that process logged last. If nobody needs the queue any more: a Reaper removes the worker's row an hour after it was last seen",
		})
	}
}

// kept looks for jobs that wait for a person.
func (x *examination) kept(ctx context.Context) error {
	stats, err := x.a.ops.Stats(ctx)
	if err != nil {
		return err
	}
	for _, s := range stats {
		plus := func(more bool) string { return map[bool]string{true: "+"}[more] }
		if s.Dead > 0 {
			since, err := x.oldest(ctx, s.Queue, onceq.StateDead)
			if err != nil {
				return err
			}
			x.put(finding{
				Level: "warning", What: "dead", Queue: s.Queue, Since: since, Detail: fmt.Sprintf("queue %q has dead jobs: %s%s", s.Queue, number(s.Dead), plus(s.Dead >= onceqops.StatsCap)),
				Advice: "onceq jobs list --state dead --queue " + quoteArg(s.Queue) + "; then redrive or discard them",
			})
		}
		if s.Held > 0 {
			since, err := x.oldest(ctx, s.Queue, onceq.StateHeld)
			if err != nil {
				return err
			}
			x.put(finding{
				Level: "warning", What: "held", Queue: s.Queue, Since: since,
				Detail: fmt.Sprintf("queue %q has jobs of which nobody knows whether an effect happened: %s%s", s.Queue, number(s.Held), plus(s.Held >= onceqops.StatsCap)),
				Advice: "onceq effects list --queue " + quoteArg(s.Queue) + "; then resolve them",
			})
		}
	}
	if len(stats) == 0 {
		x.add("ok", "queues", "no queue has jobs, a history or workers", "")
	}
	return nil
}

// oldest is when the oldest job of a state was finished, of the first thousand that were enqueued; zero if they are gone meanwhile.
func (x *examination) oldest(ctx context.Context, queue string, s onceq.State) (t time.Time, err error) {
	err = x.a.pool.QueryRow(ctx, `
select coalesce(pg_catalog.min(finished_at), '0001-01-01Z')
  from (select finished_at from `+pgx.Identifier{x.a.schema}.Sanitize()+`.job_history
         where queue = $1::text and state = $2::smallint order by id limit 1000) h`, queue, int16(s)).Scan(&t)
	return t, err
}

func (x *examination) schedules(ctx context.Context) error {
	s, err := x.a.cronOf()
	if err != nil {
		return err
	}
	found, err := s.Health(ctx, nil)
	if err != nil {
		return err
	}
	for _, f := range found {
		name := quoteArg(f.Name)
		before, _, _ := strings.Cut(f.Advice, "back-fill") // what is to be mended first
		do := map[string]string{
			"paused":    "onceq schedules resume " + name + ", if it was forgotten",
			"duplicate": f.Advice + "; onceq schedules ticks " + name + " has the jobs",
			"late":      f.Advice + "; onceq workers says what runs",
			"missed":    before + fmt.Sprintf("if they still matter: onceq schedules backfill %s --from %s --to %s; onceq schedules ticks %s", name, f.From.UTC().Format(time.RFC3339Nano), f.To.UTC().Format(time.RFC3339Nano), name),
		}
		x.put(finding{Level: "warning", What: f.What, Detail: f.Detail, Advice: do[f.What], Schedule: f.Name, Since: f.Since})
	}
	return nil
}
