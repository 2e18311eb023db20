package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pgserver"
)

// serverSettings are those of a production server on a machine like this: durable, with room to work in.
var serverSettings = map[string]string{
	"shared_buffers":     "1GB",
	"max_wal_size":       "8GB",
	"max_connections":    "1500",  // 200 processes that are idle
	"checkpoint_timeout": "30min", // there is one before each measurement; none is to fall into it
}

// server is the Postgres that all peers share.
type server struct {
	pg         *pgserver.Server
	admin      *pgx.Conn
	socket     string // directory of its socket; "" where it is reached by TCP alone
	postmaster int    // process id; 0 where the server is not on this machine
	settings   []string
	databases  int
	statements bool
	counts     bool // pg_stat_statements is there, for the databases that want it
}

// startServer finds a server by pgserver's rules. It is reached through a socket, because that is how a database on
// the same machine is reached.
//
// With statements it collects what each statement costs, which makes all of them a little slower. With counts it can do so
// for single databases.
func startServer(ctx context.Context, pg string, statements, counts bool) (*server, error) {
	if pg != "" {
		if err := os.Setenv(pgserver.EnvBin, pg); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll("/tmp/onceq-bench", 0o777); err != nil {
		return nil, err
	}
	socket, err := os.MkdirTemp("/tmp/onceq-bench", "s")
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{"/tmp/onceq-bench", socket} { // the server may run as another user
		_ = os.Chmod(dir, 0o777)
	}
	settings := map[string]string{"unix_socket_directories": socket}
	for name, value := range serverSettings {
		settings[name] = value
	}
	if statements {
		settings["shared_preload_libraries"] = "pg_stat_statements"
		settings["pg_stat_statements.track_planning"] = "on"
	} else if counts {
		settings["shared_preload_libraries"] = "pg_stat_statements"
		settings["pg_stat_statements.track"] = "none"
		settings["compute_query_id"] = "off"
	}
	s := &server{socket: socket, statements: statements, counts: counts}
	if s.pg, err = pgserver.Start(ctx, pgserver.Options{Durable: true, Settings: settings}); err != nil {
		return nil, errors.Join(err, os.Remove(socket))
	}
	if files, _ := filepath.Glob(filepath.Join(socket, ".s.PGSQL.*")); len(files) == 0 {
		s.socket = ""
	}
	if s.admin, err = pgx.Connect(ctx, s.url("postgres")); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	for _, name := range []string{"shared_buffers", "fsync", "synchronous_commit", "full_page_writes", "data_checksums", "max_wal_size"} {
		var value string
		if err := s.admin.QueryRow(ctx, "select current_setting($1)", name).Scan(&value); err != nil {
			return nil, errors.Join(err, s.stop())
		}
		if name == "fsync" && value != "on" || name == "synchronous_commit" && value != "on" {
			fmt.Fprintf(os.Stderr, "bench: %s is %s: the figures say nothing about a durable server\n", name, value)
		}
		s.settings = append(s.settings, name+" "+value)
	}
	var backend int
	if err := s.admin.QueryRow(ctx, "select pg_backend_pid()").Scan(&backend); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	if stat, ok := readStat(backend); ok && stat.name == "postgres" {
		s.postmaster = stat.parent
	}
	return s, nil
}

func (s *server) stop() error {
	if s.admin != nil {
		_ = s.admin.Close(context.Background())
	}
	err := s.pg.Stop()
	_ = os.RemoveAll(s.socket)
	return err
}

func (s *server) major() int { return s.pg.Version() / 10000 }

func (s *server) version() string {
	return fmt.Sprintf("%d.%d", s.pg.Version()/10000, s.pg.Version()%10000)
}

func (s *server) url(database string) string {
	u := s.pg.DatabaseURL(database)
	parsed, err := url.Parse(u)
	if err != nil || s.socket == "" {
		return u
	}
	return fmt.Sprintf("postgres://%s@/%s?host=%s&port=%s", parsed.User, database, url.QueryEscape(s.socket), parsed.Port())
}

// database makes an empty database, whose statements may be counted, and gives what ends it.
func (s *server) database(ctx context.Context, counted bool) (dsn string, drop func(), err error) {
	s.databases++
	name := fmt.Sprintf("bench_%d", s.databases)
	if _, err := s.admin.Exec(ctx, "create database "+name); err != nil {
		return "", nil, err
	}
	if counted {
		_, err := s.admin.Exec(ctx, "alter database "+name+" set compute_query_id = on; alter database "+name+" set pg_stat_statements.track = top")
		if err != nil {
			return "", nil, fmt.Errorf("statements cannot be counted: %w", err)
		}
	}
	return s.url(name), func() {
		_, _ = s.admin.Exec(context.Background(), "drop database "+name+" with (force)")
	}, nil
}

// settle makes a clean start for a measurement: the planner knows the tables, as it does in a database that has been
// in use for a minute, and what was written before is on disk.
func (s *server) settle(ctx context.Context, url string, analyze bool) error {
	if analyze {
		conn, err := pgx.Connect(ctx, url)
		if err != nil {
			return err
		}
		_, err = conn.Exec(ctx, "analyze")
		if err = errors.Join(err, conn.Close(ctx)); err != nil {
			return err
		}
	}
	_, err := s.admin.Exec(ctx, "checkpoint")
	return err
}

func (s *server) wal(ctx context.Context) (int64, error) {
	var bytes int64
	err := s.admin.QueryRow(ctx, "select (pg_current_wal_insert_lsn() - '0/0')::bigint").Scan(&bytes)
	return bytes, err
}

// printStatements says which statements took the server's time since resetStatements.
func (s *server) printStatements(ctx context.Context, title string) error {
	rows, err := s.admin.Query(ctx, `
select calls, total_exec_time, total_plan_time, rows, wal_bytes::bigint, left(regexp_replace(query, '\s+', ' ', 'g'), 90)
  from pg_stat_statements order by total_exec_time + total_plan_time desc limit 8`)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "\n%s\n%9s %11s %11s %9s %9s %9s\n", title, "calls", "run ms", "plan ms", "µs/call", "rows/call", "WAL/row")
	var calls, count, wal int64
	var run, plan float64
	var query string
	_, err = pgx.ForEachRow(rows, []any{&calls, &run, &plan, &count, &wal, &query}, func() error {
		fmt.Fprintf(os.Stderr, "%9d %11.1f %11.1f %9.0f %9.1f %9.0f  %s\n",
			calls, run, plan, 1000*(run+plan)/float64(calls), float64(count)/float64(calls), float64(wal)/float64(max(1, count)), query)
		return nil
	})
	return err
}

func (s *server) resetStatements(ctx context.Context) error {
	_, err := s.admin.Exec(ctx, "create extension if not exists pg_stat_statements; select pg_stat_statements_reset()")
	return err
}

// meter measures what a stretch of work costs beside time.
type meter struct {
	s              *server
	extra, clients []int
	wal            int64
	server, client float64
}

// newMeter begins. extra are processes that belong to the server's side (Redis), clients to the peer's beside this one.
func (s *server) newMeter(ctx context.Context, extra, clients []int) (*meter, error) {
	runtime.GC()
	m := &meter{s: s, extra: extra, clients: clients}
	var err error
	m.wal, err = s.wal(ctx)
	m.server, m.client = m.cpu()
	return m, err
}

// stop gives WAL bytes, and CPU seconds of client and server.
func (m *meter) stop(ctx context.Context) (wal int64, client, server float64, err error) {
	server, client = m.cpu()
	wal, err = m.s.wal(ctx)
	return wal - m.wal, client - m.client, server - m.server, err
}

// cpu gives the seconds that the server and the client have used so far. Backends that ended count through the
// postmaster, who waited for them.
func (m *meter) cpu() (server, client float64) {
	if m.s.postmaster != 0 {
		if stat, ok := readStat(m.s.postmaster); ok {
			server = stat.own + stat.waited
		}
		for _, pid := range children(m.s.postmaster) {
			if stat, ok := readStat(pid); ok {
				server += stat.own
			}
		}
	}
	for _, pid := range m.extra {
		if stat, ok := readStat(pid); ok {
			server += stat.own
		}
	}
	for _, pid := range append([]int{os.Getpid()}, m.clients...) {
		if stat, ok := readStat(pid); ok {
			client += stat.own
		}
	}
	return server, client
}

// stat is what /proc says of a process; nothing of it is known on other systems.
type stat struct {
	name        string
	parent      int
	own, waited float64 // CPU seconds, and those of children that were waited for
}

func readStat(pid int) (stat, bool) {
	const ticks = 100 // USER_HZ of every Linux that Go runs on
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, false
	}
	open, end := bytes.IndexByte(raw, '('), bytes.LastIndexByte(raw, ')')
	fields := strings.Fields(string(raw[end+1:]))
	n := func(i int) float64 { v, _ := strconv.ParseFloat(fields[i], 64); return v }
	return stat{
		name: string(raw[open+1 : end]), parent: int(n(1)),
		own: (n(11) + n(12)) / ticks, waited: (n(13) + n(14)) / ticks,
	}, true
}

func children(pid int) []int {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	var pids []int
	for _, field := range strings.Fields(string(raw)) {
		if child, err := strconv.Atoi(field); err == nil {
			pids = append(pids, child)
		}
	}
	return pids
}

// machine describes what the figures were taken on.
func machine() string {
	model, memory := runtime.GOARCH, ""
	if raw, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(raw)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	if raw, err := os.ReadFile("/proc/meminfo"); err == nil {
		var kb int
		if _, err := fmt.Sscanf(string(raw), "MemTotal: %d kB", &kb); err == nil {
			memory = fmt.Sprintf(", %.0f GiB of memory", float64(kb)/(1<<20))
		}
	}
	return fmt.Sprintf("%s, %d cores%s, %s", model, runtime.NumCPU(), memory, runtime.GOOS)
}
