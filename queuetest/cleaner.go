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

// On a shared server, a process's databases must be dropped when the process has ended, however it ended. Tests drop
// their own databases. The templates are shared by tests, and Go has no hook for the end of a process. So a second
// process of the same program waits for the end of its standard input, which this process holds open.
const envCleaner = "ONCEQ_TEST_CLEANER"

func init() {
	if os.Getenv(envCleaner) != "" {
		clean(os.Stdin)
		os.Exit(0)
	}
}

// leaveClean starts the cleaner. Without it, dropStale of a later process does its work.
func (s *server) leaveClean() error {
	if runtime.GOOS == "windows" { // Windows cannot remove a running program, and go test removes this one
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

// clean drops the databases of the process at the other end after that has ended. Errors are ignored: a later process
// drops what is left.
func clean(in io.Reader) {
	signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP) // they are meant for the other process
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
