package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// importing is a call of onceq import.
type importing struct {
	a      *app
	kinds  []string
	key    string // a template
	window time.Duration

	consent
}

// backlog is what waits in another queue.
type backlog interface {
	// counts says how many jobs of each kind can be taken, and how many stay.
	counts(ctx context.Context, kinds []string) ([]kindCount, error)

	// take moves some jobs, in the order in which they were enqueued, by handing them to put. It returns how many it moved.
	take(ctx context.Context, kinds []string, put func(context.Context, onceq.DB, []onceq.Job) error) (int, error)
}

type kindCount struct {
	Kind  string `json:"kind"`
	Takes int    `json:"takes"`
	Stays int    `json:"stays"` // running, dead, or of a sort that cannot be taken
}

const importText = `It takes the jobs that wait, are scheduled or wait for their next attempt, in the order in which they were enqueued. Those that a worker runs stay, and so do
finished and dead ones, schedules, and jobs that wait for other jobs. Run it again until nothing is left.

A job keeps its kind, queue, time, key, and the attempts that it has left. Its payload stays as it is: check with the new handlers that
it decodes (onceq check-payloads). A higher priority becomes high, a lower one low. --key gives the jobs of one kind the keys that your new
producers use: then work that both have enqueued is done once. If a key is taken by other work, that step changes nothing, and the error names the key.
`

func (a *app) importCommand() *cobra.Command {
	return group("import", "Take over the jobs that wait in another queue",
		a.importFrom("river", "River", river, "schema of River's tables", "public"),
		a.importFrom("pg-boss", "pg-boss", pgBoss, "schema of pg-boss", "pgboss"),
		a.importFrom("graphile", "graphile-worker", graphile, "schema of graphile-worker", "graphile_worker"),
		a.importAsynq())
}

// importFrom is the command for a queue whose tables are in the same database.
func (a *app) importFrom(name, title string, from oldTables, usage, schema string) *cobra.Command {
	i := &importing{a: a}
	cmd := i.command(name, title, "Each step moves up to 1,000 jobs in one transaction, so no job is lost or doubled, whatever happens. "+
		title+"'s tables must be in the database of onceq's.", func() (backlog, error) {
		from.a, from.in = a, pgx.Identifier{schema}.Sanitize()
		return from, nil
	})
	cmd.Flags().StringVar(&schema, "from-schema", schema, usage)
	return cmd
}

func (i *importing) command(name, title, how string, open func() (backlog, error)) *cobra.Command {
	var window string
	cmd := &cobra.Command{
		Use:   name,
		Short: "Take over the jobs that wait in " + title,
		Long:  "import " + name + " takes over the jobs that wait in " + title + ". " + importText + "\n" + how,
		Example: "  onceq import " + name + " --dry-run\n" +
			"  onceq import " + name + " --kind welcome --key 'welcome:{user_id}' --window until_finished",
		Args: cobra.NoArgs,
		PreRunE: func(*cobra.Command, []string) (err error) {
			switch {
			case i.key != "" && len(i.kinds) != 1:
				return usagef("--key is for the jobs of one kind; name it with --kind")
			case i.key != "" && (!member.MatchString(i.key) || strings.ContainsAny(member.ReplaceAllString(i.key, ""), "{}")):
				return usagef("--key is %q; it needs members of the payload in braces, as in 'welcome:{user_id}'", i.key)
			}
			i.window, err = windowOf(window)
			return err
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := i.a.connect(cmd.Context(), true); err != nil {
				return err
			}
			from, err := open()
			if err != nil {
				return err
			}
			return dried(i.run(cmd.Context(), name, title, from))
		},
	}
	i.flags(cmd)
	cmd.Flags().StringSliceVar(&i.kinds, "kind", nil, "only jobs of this kind; may be repeated")
	cmd.Flags().StringVar(&i.key, "key", "", "the new key of each job, with members of its payload in braces: 'welcome:{user_id}'")
	cmd.Flags().StringVar(&window, "window", "24h", "how long a key stays taken after its job is finished: a duration, until_finished or forever")
	return cmd
}

func windowOf(text string) (time.Duration, error) {
	switch text {
	case "until_finished":
		return onceq.UntilFinished, nil
	case "forever":
		return onceq.Forever, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, usagef("--window is %q; use a duration such as 24h, until_finished or forever", text)
	}
	return d, nil
}

// total sums up counts, and says them in lines.
func total(counts []kindCount) (takes, stays int, lines []string) {
	for _, c := range counts {
		takes, stays = takes+c.Takes, stays+c.Stays
		line := fmt.Sprintf("%s: %s", c.Kind, plural(c.Takes, "job"))
		if c.Stays > 0 {
			line += fmt.Sprintf("; %s more stay", number(c.Stays))
		}
		lines = append(lines, line)
	}
	return takes, stays, lines
}

func (i *importing) run(ctx context.Context, name, title string, from backlog) error {
	counts, err := i.counts(ctx, from)
	if err != nil {
		return err
	}
	takes, stays, lines := total(counts)
	if takes == 0 {
		return i.said(counts, 0, 0, fmt.Sprintf("No job waits in %s%s.", title, staying(stays)))
	}
	if err := i.a.agreed(ctx, i.consent, fmt.Sprintf("From %s to onceq: %s.", title, plural(takes, "job")), lines...); err != nil {
		if errors.Is(err, errDry) && i.a.json {
			return errors.Join(err, i.a.printJSON(map[string]any{"kinds": counts}))
		}
		return err
	}
	action := onceqops.Action{What: "import", About: name + " " + strings.Join(i.kinds, " ")}
	if err := i.a.begins(ctx, action); err != nil {
		return err
	}
	moved, known, stopped, err := i.steps(ctx, from, takes)
	text := fmt.Sprintf("%s moved", plural(moved, "job"))
	if known > 0 {
		text += fmt.Sprintf("; %s of them were in onceq already", number(known))
	}
	i.a.ended(ctx, action, text, stopped, err)
	if err != nil {
		i.a.remark("%s before this step.\n", text)
		return err
	}
	if stopped {
		i.a.remark("%s.\n", text)
		return errStoppedBetween
	}
	if counts, err = i.counts(ctx, from); err != nil {
		return err
	}
	_, stays, _ = total(counts)
	return i.said(counts, moved, known, fmt.Sprintf("%s%s.", text, staying(stays)))
}

func staying(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("; %s stay there: they run, are dead, or cannot be taken", plural(n, "job"))
}

func (i *importing) said(counts []kindCount, moved, known int, text string) error {
	if i.a.json {
		return i.a.printJSON(map[string]any{"kinds": counts, "moved": moved, "duplicates": known})
	}
	i.a.say("%s\n", text)
	return nil
}

func (i *importing) counts(ctx context.Context, from backlog) ([]kindCount, error) {
	ctx, cancel := i.a.limited(ctx)
	defer cancel()
	return from.counts(ctx, i.kinds)
}

// steps takes jobs until none waits. Ctrl-c stops it between two steps.
func (i *importing) steps(ctx context.Context, from backlog, all int) (moved, known int, stopped bool, err error) {
	p := i.a.progress()
	defer p.end()
	defer context.AfterFunc(ctx, p.stops)()
	for {
		before := known
		step, cancel := i.a.limited(context.WithoutCancel(ctx))
		n, err := from.take(step, i.kinds, func(ctx context.Context, db onceq.DB, jobs []onceq.Job) error {
			n, err := i.put(ctx, db, jobs)
			known = before + n
			return err
		})
		cancel()
		if err != nil {
			return moved, before, false, err
		}
		if n == 0 {
			return moved, known, false, nil
		}
		moved += n
		p.say("%s of %s", number(moved), plural(max(all, moved), "job"))
		if ctx.Err() != nil {
			return moved, known, true, nil
		}
	}
}

// put enqueues jobs, and returns how many were there already. One call has each key once, so jobs with the same key come in calls of their own.
func (i *importing) put(ctx context.Context, db onceq.DB, jobs []onceq.Job) (known int, err error) {
	for k := range jobs {
		if err := i.dress(&jobs[k]); err != nil {
			return 0, err
		}
	}
	for len(jobs) > 0 {
		var now, later []onceq.Job
		seen := make(map[[2]string]bool)
		for _, j := range jobs {
			if name := [2]string{j.Kind, j.Key}; j.Key != "" && seen[name] {
				later = append(later, j)
			} else {
				now, seen[name] = append(now, j), true
			}
		}
		results, err := i.a.q.EnqueueMany(ctx, db, now)
		if err != nil {
			return 0, which(err, now)
		}
		for _, r := range results {
			if r.Duplicate {
				known++
			}
		}
		jobs = later
	}
	return known, nil
}

// which names the old job that is refused, so that somebody can correct or delete it there.
func which(err error, jobs []onceq.Job) error {
	var invalid *onceq.InvalidError
	if !errors.As(err, &invalid) {
		return err
	}
	k := 0 // of one job its place is not said
	_, _ = fmt.Sscanf(invalid.Field, "jobs[%d]", &k)
	return &exit{codeRefused, fmt.Errorf("%s cannot be a job of onceq: %w", jobs[k].Metadata["imported"], err)}
}

var member = regexp.MustCompile(`\{([^{}]+)\}`)

// dress gives a job its key and its window.
func (i *importing) dress(j *onceq.Job) error {
	if i.key != "" {
		var payload map[string]json.RawMessage
		raw, _ := j.Payload.(json.RawMessage)
		if err := json.Unmarshal(raw, &payload); err != nil {
			return &exit{codeRefused, fmt.Errorf("--key needs payloads that are JSON objects, and one of kind %q is none", j.Kind)}
		}
		var missing error
		j.Key = member.ReplaceAllStringFunc(i.key, func(in string) string {
			name := in[1 : len(in)-1]
			var text string
			value, ok := payload[name]
			if !ok || string(value) == "null" {
				missing = &exit{codeRefused, fmt.Errorf("--key names %q, which a payload of kind %q does not have", name, j.Kind)}
			}
			switch {
			case json.Unmarshal(value, &text) == nil:
			case ok && (value[0] == '{' || value[0] == '['):
				missing = &exit{codeRefused, fmt.Errorf("--key names %q, which is no text and no number in a payload of kind %q", name, j.Kind)}
			default:
				text = string(value)
			}
			return text
		})
		if missing != nil {
			return missing
		}
	}
	if j.Key != "" {
		j.Window = i.window
	}
	return nil
}

// oldTables is a queue in the same database. Its statements have the schema as %[1]s, and $1 is the kinds, or null for all.
type oldTables struct {
	a      *app
	in     string
	names  string // a table that it has, as its documentation calls it
	count  string // kind, how many can be taken, how many stay
	delete string // deletes up to 1,000 jobs and returns kind, queue, payload, key, run_at, priority, attempts left, lane, id
}

var river = oldTables{
	names: "river_job",
	count: `
select kind, count(*) filter (where state in ('available', 'scheduled', 'retryable')), count(*) filter (where state in ('running', 'pending', 'discarded'))
  from %[1]s.river_job where state not in ('completed', 'cancelled') and ($1::text[] is null or kind = any ($1)) group by kind order by kind`,
	delete: `
with gone as (
  delete from %[1]s.river_job
   where id in (select id from %[1]s.river_job
                 where state in ('available', 'scheduled', 'retryable') and ($1::text[] is null or kind = any ($1))
                 order by id limit 1000 for update skip locked)
  returning *
)
select kind, queue, args::text, coalesce(pg_catalog.encode(unique_key, 'hex'), ''), scheduled_at, case when priority > 1 then 1 else 0 end, max_attempts - attempt, '', 'River job ' || id
  from gone order by id`,
}

// pgBossTakes is what can be taken. Later versions have more columns, so they are asked by name in the row.
const pgBossTakes = `state in ('created', 'retry') and pg_catalog.to_jsonb(j) ->> 'blocked' is distinct from 'true' and pg_catalog.to_jsonb(j) ->> 'group_id' is null`

var pgBoss = oldTables{
	names: "job",
	count: `
select name, count(*) filter (where ` + pgBossTakes + `), count(*) filter (where state in ('active', 'failed') or state < 'active' and not (` + pgBossTakes + `))
  from %[1]s.job j where state in ('created', 'retry', 'active', 'failed') and ($1::text[] is null or name = any ($1)) and name not like '\_\_pgboss%%'
 group by name order by name`,
	delete: `
with gone as (
  delete from %[1]s.job
   where (name, id) in (select name, id from %[1]s.job j
                         where ` + pgBossTakes + ` and ($1::text[] is null or name = any ($1)) and name not like '\_\_pgboss%%'
                         order by created_on limit 1000 for update skip locked)
  returning *
)
select name, '', coalesce(data::text, 'null'), coalesce(singleton_key, ''), start_after, -pg_catalog.sign(priority)::int, retry_limit - retry_count + (state = 'created')::int, '', 'pg-boss job ' || id
  from gone order by created_on`,
}

// graphileTakes leaves a named queue alone while one of its jobs runs: the next one would run beside it.
const graphileTakes = `locked_at is null and attempts < max_attempts
       and not exists (select from %[1]s._private_job_queues q where q.id = j.job_queue_id and q.locked_at is not null)`

var graphile = oldTables{
	names: "_private_jobs",
	count: `
select t.identifier, count(*) filter (where ` + graphileTakes + `), count(*) filter (where not (` + graphileTakes + `))
  from %[1]s._private_jobs j join %[1]s._private_tasks t on t.id = j.task_id
 where $1::text[] is null or t.identifier = any ($1) group by t.identifier order by t.identifier`,
	delete: `
with gone as (
  delete from %[1]s._private_jobs
   where id in (select j.id from %[1]s._private_jobs j join %[1]s._private_tasks t on t.id = j.task_id
                 where ` + graphileTakes + ` and ($1::text[] is null or t.identifier = any ($1))
                 order by j.id limit 1000 for update of j skip locked)
  returning *
)
select t.identifier, '', g.payload::text, coalesce(g.key, ''), g.run_at, pg_catalog.sign(g.priority)::int, g.max_attempts - g.attempts, coalesce(q.queue_name, ''), 'graphile-worker job ' || g.id
  from gone g join %[1]s._private_tasks t on t.id = g.task_id
  left join %[1]s._private_job_queues q on q.id = g.job_queue_id
 order by g.id`,
}

func (o oldTables) counts(ctx context.Context, kinds []string) ([]kindCount, error) {
	rows, err := o.a.pool.Query(ctx, fmt.Sprintf(o.count, o.in), kinds)
	if err != nil {
		return nil, o.said(err)
	}
	counts, err := pgx.CollectRows(rows, pgx.RowToStructByPos[kindCount])
	return counts, o.said(err)
}

func (o oldTables) take(ctx context.Context, kinds []string, put func(context.Context, onceq.DB, []onceq.Job) error) (int, error) {
	var jobs []onceq.Job
	err := o.a.inTx(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, fmt.Sprintf(o.delete, o.in), kinds)
		if err != nil {
			return err
		}
		jobs, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (j onceq.Job, err error) {
			var payload, id string
			err = row.Scan(&j.Kind, &j.Queue, &payload, &j.Key, &j.RunAt, &j.Priority, &j.MaxAttempts, &j.Lane, &id)
			j.Payload, j.MaxAttempts, j.Metadata = json.RawMessage(payload), max(1, j.MaxAttempts), map[string]string{"imported": id}
			return j, err
		})
		if err != nil || len(jobs) == 0 {
			return err
		}
		return put(ctx, tx, jobs)
	})
	return len(jobs), o.said(err)
}

// said says what a missing table means.
func (o oldTables) said(err error) error {
	switch state(err) {
	case "42P01", "3F000":
		return &exit{codeRefused, fmt.Errorf("there is no table %s in schema %s of this database; name its schema with --from-schema: %w", o.names, o.in, err)}
	case "42501":
		return &exit{codeRefused, fmt.Errorf("this role may not read and delete the jobs in schema %s: %w", o.in, err)}
	}
	return err
}

// sorted gives counts by kind.
func sorted(counts map[string]*kindCount) []kindCount {
	all := []kindCount{}
	for _, c := range slices.SortedFunc(maps.Values(counts), func(a, b *kindCount) int { return cmp.Compare(a.Kind, b.Kind) }) {
		all = append(all, *c)
	}
	return all
}
