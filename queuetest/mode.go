package queuetest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/migrations"
)

// The environment lets a whole test suite run in another mode, without a change to any test. onceq's own suite runs in
// each of them (make matrix). An application that uses PgBouncer may want to run its suite through it too.
const (
	// envQueryMode names pgx's query mode for DB.Pool: cache_statement, cache_describe, describe_exec, exec or
	// simple_protocol.
	envQueryMode = "ONCEQ_TEST_QUERY_MODE"

	// envSchema puts the tables into another schema than onceq, for tests that ask for no schema. Views in onceq stand
	// in for its tables and views, so that a test's own statements still find onceq.jobs and onceq.v_jobs.
	envSchema = "ONCEQ_TEST_SCHEMA"

	// envLater is the path of a migration after those of the package: the tables are then newer than the code, as during a
	// deploy of the version after this one.
	envLater = "ONCEQ_TEST_LATER"

	// envRole, when not empty, makes DB.Pool connect as a role with migrations.Grants. The role may also create tables
	// of its own beside onceq's, and no more. For servers that the package starts.
	envRole = "ONCEQ_TEST_ROLE"

	// envPgBouncer is the path of a pgbouncer program. DB.Pool goes through it in transaction mode. The query mode is
	// then exec by default. A test that asks for a mode that prepares in one round trip and executes in another is
	// skipped.
	envPgBouncer = "ONCEQ_TEST_VIA_PGBOUNCER"
)

// defaultSchema is the schema of tests that name none.
const defaultSchema = "onceq"

// elsewhere returns the schema that stands in for the default one, or "".
func elsewhere() string {
	if s := os.Getenv(envSchema); s != defaultSchema {
		return s
	}
	return ""
}

// migrateLater runs the migration of envLater.
func migrateLater(ctx context.Context, conn *pgx.Conn, schema string) error {
	name := os.Getenv(envLater)
	if name == "" {
		return nil
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	up, _, _ := strings.Cut(string(text), "---- create above")
	_, err = conn.Exec(ctx, strings.ReplaceAll(up, "{{.schema}}", pgx.Identifier{schema}.Sanitize()))
	return err
}

// standIn adds to a template what each mode needs beyond the migrations.
func standIn(ctx context.Context, conn *pgx.Conn, schema, role string) error {
	if role != "" {
		more := fmt.Sprintf("grant create on schema public to %[1]s; grant select on all sequences in schema %[2]s to %[1]s", // sequences are for Check at the end
			role, pgx.Identifier{schema}.Sanitize())
		if _, err := conn.Exec(ctx, migrations.Grants(schema, role)+more); err != nil {
			return err
		}
	}
	if schema != elsewhere() || schema == "" {
		return nil
	}
	rows, err := conn.Query(ctx, `
select tablename::text from pg_tables where schemaname = $1
union all select viewname::text from pg_views where schemaname = $1`, schema)
	if err != nil {
		return err
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	views := "create schema onceq;"
	for _, table := range tables {
		views += fmt.Sprintf("create view onceq.%s as select * from %s.%s;", table, pgx.Identifier{schema}.Sanitize(), table)
	}
	if role != "" {
		views += fmt.Sprintf("grant usage on schema onceq to %[1]s; grant all on all tables in schema onceq to %[1]s", role)
	}
	_, err = conn.Exec(ctx, views)
	return err
}

// runtimeRole returns the role of envRole, or "" if the mode is off. The role is created with the server's first
// database.
func (s *server) runtimeRole(ctx context.Context) (string, error) {
	if os.Getenv(envRole) == "" {
		return "", nil
	}
	if !s.Ours() {
		return "", errors.New(envRole + " needs a server that the tests start: on this one the role would be left behind")
	}
	const name = "onceq_runtime"
	s.roleOnce.Do(func() {
		to, err := pgx.ParseConfig(s.URL())
		if err != nil {
			s.roleErr = err
			return
		}
		s.roleErr = s.exec(ctx, "create role "+name+" login nosuperuser nocreatedb nocreaterole noinherit password '"+to.Password+"'")
	})
	return name, s.roleErr
}

// apply changes a pool's configuration as the environment says.
func apply(t testing.TB, s *server, config *pgxpool.Config, role string) {
	t.Helper()
	mode := os.Getenv(envQueryMode)
	if path := os.Getenv(envPgBouncer); path != "" {
		port, err := s.bouncer(path)
		if err != nil {
			t.Fatalf("queuetest: %v", err)
		}
		config.ConnConfig.Host, config.ConnConfig.Port, config.ConnConfig.Fallbacks = "127.0.0.1", port, nil
		if mode == "" {
			mode = "exec"
		}
	}
	if role != "" {
		config.ConnConfig.User = role // with the same password
	}
	if mode == "" {
		return
	}
	for m := pgx.QueryExecModeCacheStatement; m <= pgx.QueryExecModeSimpleProtocol; m++ {
		if strings.ReplaceAll(m.String(), " ", "_") == mode {
			config.ConnConfig.DefaultQueryExecMode = m
			return
		}
	}
	t.Fatalf("queuetest: %s: pgx has no query mode %q", envQueryMode, mode)
}

// untracked moves the settings that PgBouncer refuses at the start of a session into the database's own settings, where
// a session behind PgBouncer finds them too.
func untracked(t testing.TB, s *server, config *pgx.ConnConfig) {
	t.Helper()
	if os.Getenv(envPgBouncer) == "" {
		return
	}
	switch mode := config.DefaultQueryExecMode; mode {
	case pgx.QueryExecModeCacheStatement, pgx.QueryExecModeDescribeExec:
		t.Skipf("queuetest: PgBouncer in transaction mode, before 1.21 at least, has no room for query mode %q", mode)
	}
	for name, value := range config.RuntimeParams {
		switch strings.ToLower(name) {
		case "application_name", "client_encoding", "datestyle", "timezone", "standard_conforming_strings":
			continue // PgBouncer passes these on to the server connection that it uses
		}
		delete(config.RuntimeParams, name)
		err := s.admin(t.Context(), func(conn *pgx.Conn) error {
			return pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
				if _, err := tx.Exec(t.Context(), `select set_config($1, $2, true)`, name, value); err != nil {
					return err
				}
				_, err := tx.Exec(t.Context(), fmt.Sprintf(`alter database %s set %s from current`,
					pgx.Identifier{config.Database}.Sanitize(), pgx.Identifier{name}.Sanitize()))
				return err
			})
		})
		if err != nil {
			t.Fatalf("queuetest: %v", err)
		}
	}
}

// bouncer starts the process's PgBouncer in front of all databases of the server, and returns its port.
func (s *server) bouncer(path string) (uint16, error) {
	s.bouncerOnce.Do(func() { s.bouncerPort, s.bouncerErr = s.startBouncer(path) })
	return s.bouncerPort, s.bouncerErr
}

// superviseBouncer is the program that starts PgBouncer and ends it when its standard input ends, which happens when
// this process ends in any way.
const superviseBouncer = `"$@" & echo started; read -r _; kill -9 $!; rm -rf "$(dirname "$0")"`

func (s *server) startBouncer(path string) (uint16, error) {
	to, err := pgx.ParseConfig(s.URL())
	if err != nil {
		return 0, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	port := listener.Addr().(*net.TCPAddr).Port
	if err := listener.Close(); err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "onceq-pgbouncer-")
	if err != nil {
		return 0, err
	}
	auth := "scram-sha-256"
	if to.Password == "" {
		auth = "trust" // as on the server
	}
	ini := filepath.Join(dir, "pgbouncer.ini")
	err = os.WriteFile(ini, fmt.Appendf(nil, `
[databases]
* = host=%s port=%d
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = %s
auth_file = %s
pool_mode = transaction
default_pool_size = 20
max_client_conn = 1000
logfile =
`, to.Host, to.Port, port, auth, filepath.Join(dir, "users")), 0o600)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "users"), fmt.Appendf(nil, "%q %[2]q\n\"onceq_runtime\" %[2]q\n", to.User, to.Password), 0o600)
	}
	if err == nil {
		err = pgserver.ToNobody(dir) // the user that it runs as
	}
	if err != nil {
		return 0, err
	}
	args := []string{"-c", superviseBouncer, ini, path}
	if os.Getuid() == 0 {
		args = append(args, "-u", "nobody")
	}
	cmd := exec.Command("sh", append(args, "-q", ini)...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return 0, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start pgbouncer: %w", err)
	}
	s.bouncerLifeline = stdin // open as long as the process lives
	if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		return 0, fmt.Errorf("start pgbouncer: %w", err)
	}
	for until := time.Now().Add(10 * time.Second); ; {
		c, err := net.DialTimeout("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), time.Second)
		if err == nil {
			return uint16(port), c.Close()
		}
		if time.Now().After(until) {
			return 0, fmt.Errorf("pgbouncer does not answer: %w", err)
		}
	}
}

// modeState is shared by the modes of a process.
type modeState struct {
	roleOnce sync.Once
	roleErr  error

	bouncerOnce     sync.Once
	bouncerPort     uint16
	bouncerErr      error
	bouncerLifeline io.Closer
}
