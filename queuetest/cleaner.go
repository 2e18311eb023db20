package queuetest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// On a server that others use too, a process's databases go when the process has ended, however that was. Tests drop
// their own; the templates, which tests share, belong to none, and Go has no place for what a process does last. So a
// second process of the same program waits for the end of its standard input, which this one holds open.
const envCleaner = "ONCEQ_TEST_CLEANER"

func init() {
	if os.Getenv(envCleaner) != "" {
		clean(os.Stdin)
		os.Exit(0)
	}
}

// leaveClean starts the cleaner. Where there is none, dropStale of a later process does its work.
func (s *server) leaveClean() error {
	if runtime.GOOS == "windows" { // where a program that runs cannot be removed, as go test does
		return nil
	}
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	cmd := exec.Command(program)
	cmd.Dir = os.TempDir()
	cmd.Env = append(os.Environ(), envCleaner+"=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		return fmt.Errorf("start the process that drops databases: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the process that drops databases: %w", err)
	}
	s.alive = in
	if _, err = fmt.Fprintf(in, "%s\n%s\n", s.URL(), s.tag); err != nil {
		return fmt.Errorf("tell the process that drops databases: %w", err)
	}
	return nil
}

// clean drops the databases of the process at the other end, when that has ended. Nobody hears of an error: what stays
// is dropped by a later process.
func clean(in io.Reader) {
	signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP) // meant for that process
	lines := bufio.NewScanner(in)
	var said []string
	for lines.Scan() {
		said = append(said, lines.Text())
	}
	if len(said) < 2 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), dropTimeout)
	defer cancel()
	config, err := pgx.ParseConfig(said[0])
	if err != nil {
		return
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return
	}
	defer func() { _ = conn.Close(ctx) }()
	rows, err := conn.Query(ctx, `select datname from pg_database where starts_with(datname, $1) and split_part(datname, '_', 4) = $2`,
		databasePrefix, said[1])
	if err != nil {
		return
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return
	}
	for _, name := range names {
		_, _ = conn.Exec(ctx, "drop database if exists "+name+" with (force)")
	}
}
