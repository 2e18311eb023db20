package migrations_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

const odd = `we"ird Schema.ä{{.schema}}`

// connect returns one more connection to a test's database.
func connect(t *testing.T, db *queuetest.DB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.Background())) })
	return conn
}

// empty returns a connection to an empty database.
func empty(t *testing.T) *pgx.Conn {
	t.Helper()
	return connect(t, queuetest.New(t, queuetest.NoMigrations()))
}

func exec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql)
	require.NoError(t, err, sql)
}

func collect(t *testing.T, conn *pgx.Conn, sql string, args ...any) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return list
}

// catalog lists everything in a schema, without the schema's name.
func catalog(t *testing.T, conn *pgx.Conn, schema string) []string {
	t.Helper()
	const everything = `
		with relations as (
		  select c.*
		  from pg_class c
		  join pg_namespace n on n.oid = c.relnamespace
		  where n.nspname = $1
		)
		select 'relation ' || relname || ' ' || relkind::text || ' ' || relpersistence::text || ' ' || coalesce(reloptions::text, '')
		from relations
		union all
		select 'column ' || relname || ' ' || attnum || ' ' || attname || ' ' || format_type(atttypid, atttypmod) || ' ' || attnotnull
		  || ' ' || attcollation::regcollation || ' ' || coalesce(attstattarget, -1) || ' ' || coalesce(pg_get_expr(adbin, adrelid), '')
		from relations r
		join pg_attribute a on a.attrelid = r.oid and not attisdropped and relkind in ('r', 'v', 'p') and attnum > 0
		left join pg_attrdef d on d.adrelid = r.oid and d.adnum = a.attnum
		union all
		select 'index ' || pg_get_indexdef(oid) from relations where relkind = 'i'
		union all
		select 'constraint ' || relname || ' ' || conname || ' ' || pg_get_constraintdef(c.oid)
		from relations r
		join pg_constraint c on c.conrelid = r.oid
		union all
		select 'sequence ' || relname || ' ' || row(seqtypid::regtype, seqstart, seqincrement, seqmax, seqmin, seqcache, seqcycle)::text
		from relations r
		join pg_sequence s on s.seqrelid = r.oid
		union all
		select 'trigger ' || pg_get_triggerdef(t.oid) from relations r join pg_trigger t on t.tgrelid = r.oid where not tgisinternal
		union all
		select 'function ' || pg_get_functiondef(p.oid)
		from pg_proc p
		join pg_namespace n on n.oid = p.pronamespace
		where n.nspname = $1
		union all
		select 'type ' || typname || ' ' || typtype::text
		from pg_type t
		join pg_namespace n on n.oid = t.typnamespace
		where n.nspname = $1
		order by 1`
	list := collect(t, conn, everything, schema)
	require.NotEmpty(t, list)
	for i := range list {
		list[i] = strings.ReplaceAll(list[i], pgx.Identifier{schema}.Sanitize()+".", "SCHEMA.")
		list[i] = strings.ReplaceAll(list[i], schema+".", "SCHEMA.")
	}
	return list
}

func version(t *testing.T, conn *pgx.Conn, schema string) int {
	t.Helper()
	var v int
	require.NoError(t, conn.QueryRow(t.Context(), "select version from "+pgx.Identifier{schema}.Sanitize()+".meta").Scan(&v))
	return v
}

func TestUpTwice(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	first := catalog(t, conn, "onceq")
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	require.Equal(t, first, catalog(t, conn, "onceq"))
	require.Equal(t, migrations.Version, version(t, conn, "onceq"))
}

func TestUpConcurrently(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())
	conns := make([]*pgx.Conn, 8)
	for i := range conns {
		conns[i] = connect(t, db)
	}
	var wg sync.WaitGroup
	applied := make([][]migrations.Migration, len(conns))
	for i, conn := range conns {
		wg.Go(func() {
			var err error
			applied[i], err = migrations.Apply(t.Context(), conn, "onceq")
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	require.Equal(t, migrations.Version, version(t, conns[0], "onceq"))
	require.ElementsMatch(t, migrations.List(), slices.Concat(applied...), "each was applied by one")
}

func TestUpQuotedSchema(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	require.NoError(t, migrations.Up(t.Context(), conn, odd))
	require.NoError(t, migrations.Up(t.Context(), conn, odd))
	require.Equal(t, migrations.Version, version(t, conn, odd))
	require.Equal(t, catalog(t, conn, "onceq"), catalog(t, conn, odd))
}

// Up leaves the session's settings unchanged, and does not depend on them.
func TestUpLeavesSessionAlone(t *testing.T) {
	t.Parallel()
	for _, searchPath := range []string{"''", "public", `"$user", public`, "elsewhere, pg_catalog"} {
		t.Run(searchPath, func(t *testing.T) {
			t.Parallel()
			conn := empty(t)
			exec(t, conn, "create schema elsewhere")
			exec(t, conn, "create table elsewhere.jobs (n int)")
			exec(t, conn, "set search_path = "+searchPath)
			exec(t, conn, "set default_transaction_isolation = serializable")
			exec(t, conn, "set default_transaction_read_only = on")
			exec(t, conn, "set application_name = 'mine'")
			const session = "select name || '=' || setting from pg_settings where source = 'session' order by 1"
			before := collect(t, conn, session)
			require.Len(t, before, 4)

			require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
			require.Equal(t, before, collect(t, conn, session))
			require.Empty(t, collect(t, conn, "select objid::text from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"))
			require.EqualValues(t, 'I', conn.PgConn().TxStatus())
		})
	}
}

func TestUpInEachQueryMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.NoMigrations())
			config, err := pgx.ParseConfig(db.URL)
			require.NoError(t, err)
			config.DefaultQueryExecMode = mode
			conn, err := pgx.ConnectConfig(t.Context(), config)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, conn.Close(context.Background())) })
			require.NoError(t, migrations.Up(t.Context(), conn, odd))
			require.NoError(t, migrations.Up(t.Context(), conn, odd))
		})
	}
}

func TestUpInTransaction(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	require.ErrorIs(t, migrations.Up(t.Context(), conn, "onceq"), migrations.ErrInTransaction)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
}

// role creates a role for one test: roles belong to the server, not to the database.
func role(t *testing.T, admin *pgx.Conn, name string) string {
	t.Helper()
	var database string
	require.NoError(t, admin.QueryRow(t.Context(), "select current_database()").Scan(&database))
	name = pgx.Identifier{name + " " + database}.Sanitize()
	exec(t, admin, "create role "+name)
	t.Cleanup(func() {
		_, err := admin.Exec(context.Background(), "reset role; drop owned by "+name+" cascade; drop role "+name)
		require.NoError(t, err)
	})
	return name
}

func TestUpAsOwnerOfSchemaAlone(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	owner := role(t, conn, "owner")
	exec(t, conn, `create schema onceq authorization `+owner)
	exec(t, conn, "set role "+owner)
	_, err := conn.Exec(t.Context(), "create schema another")
	require.ErrorContains(t, err, "permission denied")

	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	require.ErrorContains(t, migrations.Up(t.Context(), conn, "another"), "permission denied for database")
}

// A server may have Citus loaded, and this database does not have the extension.
func TestUpWhereCitusIsLoadedAndNotInstalled(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	exec(t, conn, "set citus.version = '13.0'")
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
}

// A role that may not migrate learns that there is nothing to do, or what it lacks.
func TestUpWithoutRights(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	shop := role(t, conn, "shop")
	as := func(role string, run func() error) error {
		t.Helper()
		exec(t, conn, "set role "+role)
		defer exec(t, conn, "reset role")
		return run()
	}
	up := func() error { return migrations.Up(t.Context(), conn, odd) }
	schema := pgx.Identifier{odd}.Sanitize()
	var database string
	require.NoError(t, conn.QueryRow(t.Context(), "select current_database()").Scan(&database))
	require.ErrorContains(t, as(shop, up), "role "+shop+" lacks CREATE on the database; as its owner: grant create on database "+
		pgx.Identifier{database}.Sanitize()+" to "+shop+", or: create schema "+schema)
	exec(t, conn, "create schema "+schema)
	require.ErrorContains(t, as(shop, up), "role "+shop+" lacks CREATE on the schema; as its owner: grant create on schema "+schema+" to "+shop)
	require.NoError(t, up())

	exec(t, conn, migrations.Grants(odd, strings.Trim(shop, `"`)))
	require.NoError(t, as(shop, up), "there is nothing to do")
	require.NoError(t, as(shop, func() error {
		v, err := migrations.Current(t.Context(), conn, odd)
		require.Equal(t, migrations.Version, v)
		return err
	}))
	for _, change := range []func() error{
		func() error { return migrations.UpToLater(t.Context(), conn, odd) }, func() error { return migrations.DownTo(t.Context(), conn, odd, 0) },
	} {
		require.ErrorContains(t, as(shop, change), "only the owner of the tables or a member of it may migrate them, with CREATE on the schema; this is role "+shop)
	}
	require.NoError(t, migrations.UpToLater(t.Context(), conn, odd))
	require.NoError(t, as(shop, up), "a newer schema")

	exec(t, conn, "delete from "+schema+".meta")
	require.ErrorContains(t, up(), fmt.Sprintf("the table meta is empty: somebody has emptied the tables; if they are of version %d, as their owner: insert into %s.\"meta\" (version) values (%[1]d)", migrations.Version, schema))
}

func TestUpOfNewerSchema(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	require.NoError(t, migrations.Up(t.Context(), conn, odd))
	require.NoError(t, migrations.UpToLater(t.Context(), conn, odd))
	require.NoError(t, migrations.UpToLater(t.Context(), conn, odd))
	require.Equal(t, migrations.Version+1, version(t, conn, odd))
	require.NoError(t, migrations.Up(t.Context(), conn, odd), "its tables bear this release")
	require.Equal(t, migrations.Version+1, version(t, conn, odd))

	exec(t, conn, "update "+pgx.Identifier{odd}.Sanitize()+".meta set oldest_code = version")
	err := migrations.Up(t.Context(), conn, odd)
	var newer *migrations.VersionError
	require.ErrorAs(t, err, &newer)
	require.Equal(t, migrations.VersionError{Schema: odd, Database: migrations.Version + 1, Code: migrations.Version}, *newer)
	require.Equal(t, migrations.Version+1, version(t, conn, odd))
	require.EqualValues(t, 'I', conn.PgConn().TxStatus())

	require.NoError(t, migrations.DownFromLater(t.Context(), conn, odd))
	require.Equal(t, migrations.Version, version(t, conn, odd))
}

// A transaction of the application has locked a table that a migration changes later, and then wants one that the migration has
// changed already. That would be a deadlock, which may end either. The migration steps back.
func TestUpStepsBackForTheApplication(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())
	conn, app := connect(t, db), connect(t, db)
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	exec(t, conn, "set deadlock_timeout = '10s'") // it steps back after a second
	exec(t, app, "set deadlock_timeout = '9s'")   // it would be the victim
	exec(t, app, "begin")
	exec(t, app, "lock table onceq.workers in row exclusive mode")
	ended := make(chan error, 1)
	go func() { ended <- migrations.UpToLater(context.Background(), conn, "onceq") }()
	const waits = `select relation::regclass::text from pg_locks where mode = 'AccessExclusiveLock' and not granted and database = (select oid from pg_database where datname = current_database())`
	watch := connect(t, db)
	require.Eventually(t, func() bool { return slices.Contains(collect(t, watch, waits), "onceq.workers") }, 5*time.Minute, time.Millisecond)
	exec(t, app, "lock table onceq.jobs in row exclusive mode")
	exec(t, app, "commit")
	require.NoError(t, <-ended)
	require.Equal(t, migrations.Version+1, version(t, conn, "onceq"))

	// A table that is never free.
	exec(t, conn, "reset deadlock_timeout")
	require.NoError(t, migrations.DownFromLater(t.Context(), conn, "onceq"))
	exec(t, app, "begin")
	exec(t, app, "lock table onceq.workers in row exclusive mode")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { ended <- migrations.UpToLater(ctx, conn, "onceq") }()
	tries := make(map[string]bool) // it says so from its second try on
	require.Eventually(t, func() bool {
		for _, began := range collect(t, watch, fmt.Sprint("select xact_start::text from pg_stat_activity where wait_event_type = 'Lock' and pid = ", conn.PgConn().PID())) {
			tries[began] = true
		}
		return len(tries) > 1
	}, 5*time.Minute, time.Millisecond)
	cancel()
	require.ErrorContains(t, <-ended, "look for long ones in pg_stat_activity")
	exec(t, app, "commit")
}

// A role may have time limits for the application's statements. Another process may migrate for longer.
func TestUpWaitsForOthersWhateverTheTimeLimits(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())
	conn, other, watch := connect(t, db), connect(t, db), connect(t, db)
	limits := []string{"lock_timeout", "statement_timeout"}
	if len(collect(t, conn, "select name from pg_settings where name = 'transaction_timeout'")) > 0 {
		limits = append(limits, "transaction_timeout")
	}
	for _, limit := range limits {
		exec(t, conn, "set "+limit+" = '500ms'")
	}
	exec(t, other, "select pg_advisory_lock(9628173550095224)")
	ended := make(chan error, 1)
	go func() { ended <- migrations.Up(context.Background(), conn, "onceq") }()
	pid := fmt.Sprint(conn.PgConn().PID())
	require.Eventually(t, func() bool {
		return len(ended) > 0 || len(collect(t, watch, "select state from pg_stat_activity where wait_event_type = 'Lock' and xact_start < clock_timestamp() - interval '1 second' and pid = "+pid)) > 0
	}, 5*time.Minute, 10*time.Millisecond)
	exec(t, other, "select pg_advisory_unlock(9628173550095224)")
	require.NoError(t, <-ended)
	for _, limit := range limits {
		require.Equal(t, []string{"500ms"}, collect(t, conn, "select current_setting('"+limit+"')"))
	}

	// The context ends the wait.
	exec(t, other, "select pg_advisory_lock(9628173550095224)")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { ended <- migrations.Up(ctx, conn, "onceq") }()
	require.Eventually(t, func() bool {
		return len(ended) > 0 || len(collect(t, watch, "select state from pg_stat_activity where wait_event_type = 'Lock' and pid = "+pid)) > 0
	}, 5*time.Minute, 10*time.Millisecond)
	cancel()
	err := <-ended
	require.ErrorContains(t, err, "wait for other migrations")
	require.ErrorIs(t, err, context.Canceled)
}

// A migration that fails leaves nothing behind.
func TestUpFails(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	exec(t, conn, "create schema onceq")
	exec(t, conn, "create table onceq.job_history ()")
	err := migrations.Up(t.Context(), conn, "onceq")
	require.ErrorContains(t, err, "001_onceq.sql")
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, []string{"job_history"}, collect(t, conn, "select tablename::text from pg_tables where schemaname = 'onceq'"))
}

func TestUpNames(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	for name, part := range map[string]string{
		"":                      "empty",
		strings.Repeat("x", 64): "63 bytes",
		strings.Repeat("ä", 32): "63 bytes",
		"a\x00b":                "NUL",
		"a\xffb":                "UTF-8",
		"pg_onceq":              "pg_",
		"a$emit$b":              "$emit$",
	} {
		require.ErrorContains(t, migrations.Up(t.Context(), conn, name), part, "%q", name)
		_, err := migrations.SQL(name)
		require.ErrorContains(t, err, part, "%q", name)
	}
	require.NoError(t, migrations.Up(t.Context(), conn, strings.Repeat("x", 63)))
	require.NoError(t, migrations.Up(t.Context(), conn, "a$emit b$$ emit$b"))
}

func TestList(t *testing.T) {
	t.Parallel()
	list := migrations.List()
	require.Len(t, list, migrations.Version, "the constant Version must be the number of the newest file")
	for i, m := range list {
		require.Equal(t, i+1, m.Version)
		require.True(t, strings.HasPrefix(m.Name, fmt.Sprintf("%03d_", m.Version)), m.Name)
		require.Empty(t, m.Up+m.Down)
	}
}

// Up runs each file in a transaction.
func TestEachMigrationIsOneTransaction(t *testing.T) {
	t.Parallel()
	list, err := migrations.SQL("onceq")
	require.NoError(t, err)
	for _, m := range list {
		require.NotContains(t, strings.ToLower(m.Up), "concurrently", m.Name)
	}
}

func TestSQLByHand(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"onceq", odd, "it's"} {
		t.Run(schema, func(t *testing.T) {
			t.Parallel()
			byUp, byHand := empty(t), empty(t)
			require.NoError(t, migrations.Up(t.Context(), byUp, schema))
			list, err := migrations.SQL(schema)
			require.NoError(t, err)
			for _, m := range list {
				exec(t, byHand, m.Up)
			}
			applied, err := migrations.Apply(t.Context(), byHand, schema)
			require.NoError(t, err)
			require.Empty(t, applied, "Up sees what another tool has done")
			require.Equal(t, catalog(t, byUp, schema), catalog(t, byHand, schema))

			for i := len(list) - 1; i >= 0; i-- {
				exec(t, byHand, list[i].Down)
			}
			require.Empty(t, collect(t, byHand, `
				select relname::text from pg_class c join pg_namespace n on n.oid = relnamespace where nspname = $1
				union all
				select proname::text from pg_proc p join pg_namespace n on n.oid = pronamespace where nspname = $1
				union all
				select nspname::text from pg_namespace where nspname = $1`, schema))
		})
	}
}

// DownTo leaves nothing but the schema, and Up begins anew from there.
func TestDownTo(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	current := func() int {
		t.Helper()
		v, err := migrations.Current(t.Context(), conn, odd)
		require.NoError(t, err)
		return v
	}
	require.Equal(t, 0, current())
	require.NoError(t, migrations.DownTo(t.Context(), conn, odd, 0), "there is nothing to undo")
	require.NoError(t, migrations.Up(t.Context(), conn, odd))
	require.Equal(t, migrations.Version, current())
	before := catalog(t, conn, odd)
	require.NoError(t, migrations.DownTo(t.Context(), conn, odd, migrations.Version))
	require.Equal(t, before, catalog(t, conn, odd))

	require.NoError(t, migrations.DownTo(t.Context(), conn, odd, 0))
	require.Equal(t, 0, current())
	require.Empty(t, collect(t, conn, `
		select relname::text from pg_class c join pg_namespace n on n.oid = relnamespace where nspname = $1
		union all
		select proname::text from pg_proc p join pg_namespace n on n.oid = pronamespace where nspname = $1`, odd))
	require.NoError(t, migrations.Up(t.Context(), conn, odd))
	require.Equal(t, before, catalog(t, conn, odd))

	require.ErrorContains(t, migrations.DownTo(t.Context(), conn, odd, -1), "no version -1")
	require.ErrorContains(t, migrations.DownTo(t.Context(), conn, odd, migrations.Version+1), "no version")
	exec(t, conn, "update "+pgx.Identifier{odd}.Sanitize()+".meta set version = version + 7")
	var newer *migrations.VersionError
	require.ErrorAs(t, migrations.DownTo(t.Context(), conn, odd, 0), &newer)
	exec(t, conn, "begin")
	require.ErrorIs(t, migrations.DownTo(t.Context(), conn, odd, 0), migrations.ErrInTransaction)
}

func TestGrants(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	runtime := role(t, conn, "run time")
	name := strings.Trim(runtime, `"`)
	require.NoError(t, migrations.Up(t.Context(), conn, odd))
	exec(t, conn, migrations.Grants(odd, name))
	exec(t, conn, migrations.Grants(odd, name))

	got := collect(t, conn, `
		select c.relname || ': ' || string_agg(a.privilege_type, ' ' order by a.privilege_type)
		from pg_class c
		join pg_namespace n on n.oid = c.relnamespace
		cross join aclexplode(c.relacl) a
		join pg_roles r on r.oid = a.grantee
		where n.nspname = $1 and r.rolname = $2
		group by c.relname
		order by c.relname collate "C"`, odd, name)
	var want []string
	for _, relation := range collect(t, conn, `
		select relname || ' ' || relkind::text
		from pg_class c
		join pg_namespace n on n.oid = c.relnamespace
		where nspname = $1 and relkind in ('r', 'S', 'v')
		order by relname collate "C"`, odd) {
		relation, kind, _ := strings.Cut(relation, " ")
		switch {
		case kind == "S":
			want = append(want, relation+": USAGE")
		case relation == "meta" || kind == "v":
			want = append(want, relation+": SELECT")
		case relation == "actions": // the audit trail is only added to
			want = append(want, relation+": INSERT SELECT")
		default:
			want = append(want, relation+": DELETE INSERT SELECT UPDATE")
		}
	}
	require.Equal(t, want, got)

	exec(t, conn, "set role "+runtime)
	schema := pgx.Identifier{odd}.Sanitize()
	exec(t, conn, "select nextval('"+strings.ReplaceAll(schema, "'", "''")+".ids')")
	exec(t, conn, "select * from "+schema+".jobs")
	_, err := conn.Exec(t.Context(), "create table "+schema+".mine ()")
	require.ErrorContains(t, err, "permission denied")
	_, err = conn.Exec(t.Context(), "update "+schema+".meta set version = 2")
	require.ErrorContains(t, err, "permission denied")
}

// Where a publication has all tables, as Debezium makes one by default, Postgres refuses updates and deletes in a table that has neither a
// primary key nor another replica identity.
func TestUp_BesideAPublicationOfAllTables(t *testing.T) {
	t.Parallel()
	conn := empty(t)
	exec(t, conn, `create publication everything for all tables`)
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	require.Empty(t, collect(t, conn, `
		select relname::text from pg_class c
		 where relnamespace = 'onceq'::regnamespace and relkind = 'r' and relpersistence = 'p' and relreplident = 'd'
		   and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary)`))
	require.NoError(t, migrations.DownTo(t.Context(), conn, "onceq", 0))
}
