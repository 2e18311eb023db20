package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqops"
)

func (a *app) migrateCommand() *cobra.Command {
	return group("migrate", "Create, update and remove onceq's tables", a.upCommand(), a.downCommand(), a.statusCommand(), a.sqlCommand(), a.grantsCommand())
}

// lockLimit is how long a migration waits for a table. Whoever needs the table next waits behind it, workers too.
const lockLimit = 5 * time.Second

// withConn runs fn on a connection of its own. Its statements have no time limit, because building an index may take long, but they do
// not wait long for tables.
func (a *app) withConn(ctx context.Context, fn func(*pgx.Conn) error) error {
	if err := a.connect(ctx, false); err != nil {
		return err
	}
	c, err := a.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer c.Release()
	limit := min(lockLimit, a.timeout)
	if _, err := c.Exec(ctx, fmt.Sprintf("set lock_timeout = %d", max(limit.Milliseconds(), 1))); err != nil {
		return err
	}
	err = fn(c.Conn())
	var newer *migrations.VersionError
	switch {
	case errors.As(err, &newer):
		return &exit{codeSchema, err}
	case state(err) == "55P03":
		return &exit{codeFailed, fmt.Errorf("%w\nA lock was not free within %v. This step was undone and those before it stay: a migration does not wait longer, because workers would wait behind it.\n%s",
			err, limit, a.lockers(ctx))}
	}
	return err
}

// lockers says who has locks that a migration may wait for, of tables of the schema.
func (a *app) lockers(ctx context.Context) string {
	const read = `
select distinct on (a.xact_start, a.pid) a.pid, coalesce(a.usename, ''), coalesce(a.application_name, ''), coalesce(a.state, ''),
       coalesce(extract(epoch from statement_timestamp() - a.xact_start), 0)::bigint
  from pg_locks l join pg_stat_activity a on a.pid = l.pid
 where l.granted and a.pid <> pg_backend_pid() and l.database = (select oid from pg_database where datname = current_database())
   and l.relation in (select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = $1)
 order by a.xact_start, a.pid
 limit 3`
	ctx, cancel := a.limited(ctx)
	defer cancel()
	var who []string
	var pid, seconds int64
	var user, name, doing string
	rows, err := a.pool.Query(ctx, read, a.schema)
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&pid, &user, &name, &doing, &seconds}, func() error {
			who = append(who, fmt.Sprintf("session %d (user %q, application %q, %s) for %s", pid, user, name, doing, ago(time.Duration(seconds)*time.Second)))
			return nil
		})
	}
	if err != nil || len(who) == 0 {
		return "Run it again. If it fails again, onceq doctor says who has held a snapshot for long."
	}
	return "Locks are held by " + strings.Join(who, ", ") + ". Wait until these transactions end, or end them (select pg_terminate_backend(pid)), and run it again."
}

func (a *app) upCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "up",
		Short: "Create the tables, or bring them to the version of this command",
		Long: `up creates the schema if it is missing and brings its tables to the version of this command. Running it again does nothing. It needs
a role that may create tables. If another migration tool runs the SQL of onceq migrate sql, go on with that tool: it does not see what up applies. Each migration is one transaction, and waits for a table for no longer than 5 s, or --timeout if that is shorter:
workers would wait behind it. Run it again then. While another process migrates, it waits.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
				ctx := cmd.Context()
				applied, err := migrations.Apply(ctx, conn, a.schema)
				if err != nil {
					return err
				}
				version, err := migrations.Current(ctx, conn, a.schema)
				if err != nil {
					return err
				}
				from := version
				if len(applied) > 0 { // by this process: others may run at the same time
					from, version = applied[0].Version-1, applied[len(applied)-1].Version
				}
				switch {
				case a.json:
					return a.printJSON(map[string]any{"schema": a.schema, "from": from, "version": version})
				case from == version:
					a.say("Schema %q is at version %d already.\n", a.schema, version)
				default:
					a.say("Schema %q is at version %d now; it was at %d.\n", a.schema, version, from)
				}
				return nil
			})
		},
	}
}

func (a *app) downCommand() *cobra.Command {
	var to int
	var agree consent
	cmd := &cobra.Command{
		Use:   "down --to VERSION",
		Short: "Undo migrations, and delete their data",
		Long: `down undoes the migrations after --to, and deletes what their tables hold. --to 0 removes everything: every job, every key and all
history. The schema itself stays. Stop all workers first. What another migration tool has applied is better undone by that tool, which counts for itself.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			if !cmd.Flags().Changed("to") {
				return usagef("down to which version? Say --to 0 to remove everything")
			}
			return dried(a.withConn(ctx, func(conn *pgx.Conn) error {
				if to < 0 || to > migrations.Version {
					return usagef("--to is %d; 0 to %d is possible", to, migrations.Version)
				}
				before, err := migrations.Current(ctx, conn, a.schema)
				if err != nil {
					return err
				}
				if before <= to {
					if a.json {
						return a.printJSON(map[string]any{"schema": a.schema, "from": before, "version": before})
					}
					a.say("Schema %q is at version %d already.\n", a.schema, before)
					return nil
				}
				var lines []string
				if a.q.Check(ctx) == nil {
					inner, cancel := a.limited(ctx)
					for _, c := range []struct {
						what   string
						states []onceq.State
					}{{"unfinished", unfinished()}, {"dead", []onceq.State{onceq.StateDead}}, {"held", []onceq.State{onceq.StateHeld}}} {
						n, err := a.ops.Count(inner, a.pool, onceqops.Filter{States: c.states, Limit: countLimit})
						if err != nil {
							cancel()
							return err
						}
						lines = append(lines, fmt.Sprintf("%s %s", atMost(n, c.what+" job"), "and what is known of them"))
					}
					cancel()
				}
				if err := a.agreed(ctx, agree, fmt.Sprintf("Take schema %q of database %q from version %d down to %d. This deletes, and nothing brings it back:",
					a.schema, conn.Config().Database, before, to), append(lines, "every key: work that was done would be done again")...); err != nil {
					return err
				}
				if err := migrations.DownTo(ctx, conn, a.schema, to); err != nil {
					return err
				}
				if a.json {
					return a.printJSON(map[string]any{"schema": a.schema, "from": before, "version": to})
				}
				a.say("Schema %q is at version %d now; it was at %d.\n", a.schema, to, before)
				return nil
			}))
		},
	}
	cmd.Flags().IntVar(&to, "to", 0, "the version to go down to; 0 removes everything")
	agree.flags(cmd)
	return cmd
}

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Say which migrations have run",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			return a.withConn(ctx, func(conn *pgx.Conn) error {
				version, err := migrations.Current(ctx, conn, a.schema)
				if err != nil {
					return err
				}
				tooOld := a.q.Check(ctx)
				if errors.Is(tooOld, onceq.ErrIDTaken) {
					tooOld = nil
				}
				type one struct {
					Version int    `json:"version"`
					Name    string `json:"name"`
					Applied bool   `json:"applied"`
				}
				all := []one{}
				t := newTable("VERSION", "FILE", "STATE")
				for _, m := range migrations.List() {
					all = append(all, one{m.Version, m.Name, m.Version <= version})
					state := "missing"
					if m.Version <= version {
						state = "applied"
					}
					t.add(m.Version, m.Name, state)
				}
				if a.json {
					err = a.printJSON(map[string]any{"schema": a.schema, "version": version, "wanted": migrations.Version, "migrations": all})
				} else {
					a.print(t, "")
				}
				if err == nil && version > migrations.Version && tooOld != nil {
					err = &exit{codeSchema, fmt.Errorf("schema %q is at version %d, newer than this command, which knows %d: install the version of the command that the workers use", a.schema, version, migrations.Version)}
				}
				if err == nil && version < migrations.Version {
					err = &exit{codeSchema, fmt.Errorf("schema %q lacks migrations: onceq migrate up", a.schema)}
				}
				return err
			})
		},
	}
}

// tablesVersion reads the version of tables that Check has found to be right.
func (a *app) tablesVersion(ctx context.Context) (version int, err error) {
	err = a.pool.QueryRow(ctx, `select version from `+pgx.Identifier{a.schema}.Sanitize()+`.meta`).Scan(&version)
	return version, err
}

func (a *app) sqlCommand() *cobra.Command {
	var down bool
	var format string
	cmd := &cobra.Command{
		Use:   "sql [VERSION]",
		Short: "Print the migrations as SQL, for another tool",
		Long: `sql prints the SQL of all migrations, or of one, for psql, or with --format as another tool reads it. Each
migration is a file there, whose name is the first line: onceq migrate sql 1 --format goose > 00001_onceq.sql.
golang-migrate and flyway have a second file, which --down prints. It connects to no database.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if a.json && format != "" {
				return usagef("--json prints the SQL as it is: leave --format out")
			}
			list, err := migrations.SQL(a.schema)
			if err != nil {
				return &exit{codeUsage, err}
			}
			if len(args) == 1 {
				var one []migrations.Migration
				for _, m := range list {
					if fmt.Sprint(m.Version) == args[0] {
						one = append(one, m)
					}
				}
				if list = one; list == nil {
					return usagef("there is no migration %q; 1 to %d is possible", args[0], migrations.Version)
				}
			}
			type one struct {
				Version int    `json:"version"`
				Name    string `json:"name"`
				Up      string `json:"up"`
				Down    string `json:"down"`
			}
			all := []one{}
			for i := range list {
				m := list[i]
				if down { // undone in the other order
					m = list[len(list)-1-i]
				}
				all = append(all, one{m.Version, m.Name, m.Up, m.Down})
				if a.json {
					continue
				}
				name, text, err := inForm(format, m, down)
				if err != nil {
					return err
				}
				a.say("-- %s\n%s", name, trusted(text))
			}
			if a.json {
				return a.printJSON(map[string]any{"migrations": all})
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&down, "down", false, "the SQL that undoes them")
	cmd.Flags().StringVar(&format, "format", "", "goose, golang-migrate, atlas or flyway")
	return cmd
}

// inForm is a migration as another tool reads it, with the name of its file.
func inForm(format string, m migrations.Migration, down bool) (name, text string, err error) {
	text = m.Up
	if down {
		text = m.Down
	}
	switch way := map[bool]string{false: "up", true: "down"}[down]; {
	case format == "":
		return m.Name, text, nil
	case format == "golang-migrate":
		return fmt.Sprintf("%06d_onceq.%s.sql", m.Version, way), text, nil
	case format == "flyway":
		return fmt.Sprintf("%s%d__onceq.sql", map[bool]string{false: "V", true: "U"}[down], m.Version), text, nil
	case down && (format == "goose" || format == "atlas"):
		return "", "", usagef("%s has one file for a migration: leave --down out", format)
	case format == "atlas":
		return fmt.Sprintf("%d_onceq.sql", m.Version), text, nil
	case format == "goose":
		const begin, end = "-- +goose StatementBegin\n", "-- +goose StatementEnd\n"
		text = "-- +goose Up\n" + begin + m.Up + end + "\n-- +goose Down\n" + begin + m.Down + end
		return fmt.Sprintf("%05d_onceq.sql", m.Version), text, nil
	}
	return "", "", usagef("there is no format %q; goose, golang-migrate, atlas and flyway are possible", format)
}

func (a *app) grantsCommand() *cobra.Command {
	var producer bool
	cmd := &cobra.Command{
		Use:   "grants ROLE",
		Short: "Print the grants that a role of workers and producers needs",
		Long: "grants prints SQL, for the owner of the tables to run: onceq migrate grants shop | psql. It connects to no database. Run it after every migration. " +
			"With --producer the role may only enqueue and emit, by the functions enqueue, enqueue_bytes, enqueue_many and emit.",
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			sql := migrations.Grants(a.schema, args[0])
			if producer {
				sql = migrations.ProducerGrants(a.schema, args[0])
			}
			if a.json {
				return a.printJSON(map[string]any{"sql": sql})
			}
			a.say("%s", trusted(sql))
			return nil
		},
	}
	cmd.Flags().BoolVar(&producer, "producer", false, "for a role that only enqueues and emits from SQL")
	return cmd
}

func (a *app) checkCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check",
		Short: "Say whether the tables are there and of the right version, for scripts",
		Long:  "check exits with 0 if workers of this version can work with the tables, with 5 if these are missing, too old, or too new, and with 6 if there is no connection.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.connect(cmd.Context(), false); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			if err := a.intact(ctx); err != nil {
				return err
			}
			version, err := a.tablesVersion(ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"schema": a.schema, "version": version})
			}
			a.say("Schema %q is at version %d, which is right.\n", a.schema, version)
			return nil
		},
	}
}

// missingTables are tables that are not there, in a schema that has others of onceq.
type missingTables struct {
	schema string
	names  []string
}

func (e *missingTables) Error() string {
	are := "tables %s of schema %q are missing"
	if len(e.names) == 1 {
		are = "table %s of schema %q is missing"
	}
	return fmt.Sprintf(are, strings.Join(e.names, ", "), e.schema)
}

func (*missingTables) advice() string {
	return "somebody has dropped what is missing, and onceq migrate up does not bring it back. Stop producers and workers, and restore it from a backup. " +
		"Without one, create it empty, with its indexes and rows, as onceq migrate sql says, and grant the rights again: onceq migrate grants"
}

var creates = regexp.MustCompile(`(?m)^create (?:unlogged )?table \S+\.(\w+) \(`)

// intact is Check, and names tables that are missing while others are there: of these Check looks at some alone, and takes all for missing.
func (a *app) intact(ctx context.Context) error {
	err := a.q.Check(ctx)
	var schema *onceq.SchemaError
	if err != nil && (!errors.As(err, &schema) || schema.Found > 0) {
		return err
	}
	all, problem := migrations.SQL("onceq")
	if problem != nil {
		return problem
	}
	var names []string
	for _, m := range all {
		for _, found := range creates.FindAllStringSubmatch(m.Up, -1) {
			names = append(names, found[1])
		}
	}
	const lacking = `
select coalesce(pg_catalog.array_agg(w.name), '{}') from pg_catalog.unnest($2::text[]) w(name)
 where not exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = $1::text and c.relname = w.name)`
	var missing []string
	problem = a.pool.QueryRow(ctx, lacking, a.schema, names).Scan(&missing)
	switch {
	case problem == nil && len(missing) > 0 && len(missing) < len(names):
		return &missingTables{a.schema, missing}
	case err == nil:
		return problem
	}
	return err
}
