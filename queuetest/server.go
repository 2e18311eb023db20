package queuetest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/onceq/onceq/internal/pgserver"
)

// server is the one Postgres of this process, with what tests share on it.
type server struct {
	*pgserver.Server

	// tag marks this process's databases and administrative sessions. They show other processes on the same server that
	// it lives.
	tag  string
	last atomic.Int64 // number of the newest database

	// idle holds unused administrative connections. After the first there is always one, because they carry the tag; one that
	// died is replaced by the next use. A pool has a goroutine, which tests for leaked goroutines would find.
	idle chan *pgx.Conn

	mu        sync.Mutex           // guards templates
	templates map[string]*template // by schema, and by set-up

	alive io.Closer // open as long as this process lives; see leaveClean

	nodes []node // of a Citus cluster; see citus.go

	modeState
}

var processServer = sync.OnceValues(func() (*server, error) {
	found, err := pgserver.Start(context.Background(), pgserver.Options{})
	if err != nil {
		return nil, err
	}
	return newServer(context.Background(), found)
})

func newServer(ctx context.Context, found *pgserver.Server) (*server, error) {
	s := &server{
		Server:    found,
		tag:       strings.ToLower(rand.Text()[:12]),
		idle:      make(chan *pgx.Conn, 4),
		templates: make(map[string]*template),
	}
	if found.Ours() {
		return s, nil // no other process has anything on it
	}
	if err := s.findNodes(ctx); err != nil {
		return s, err
	}
	if err := s.dropStale(ctx); err != nil {
		return s, err
	}
	return s, s.leaveClean()
}

// admin runs fn on a connection to the maintenance database.
func (s *server) admin(ctx context.Context, fn func(*pgx.Conn) error) error {
	conn, err := s.connection(ctx)
	if err != nil {
		return err
	}
	err = fn(conn)
	if conn.IsClosed() {
		return err
	}
	select {
	case s.idle <- conn:
		return err
	default:
		return errors.Join(err, conn.Close(ctx))
	}
}

// connection returns an unused connection that lives, or a new one.
func (s *server) connection(ctx context.Context) (*pgx.Conn, error) {
	for {
		select {
		case conn := <-s.idle:
			if alive(ctx, conn) {
				return conn, nil
			}
		default:
			return s.connect(ctx)
		}
	}
}

// alive asks a connection that was unused for a while: the server may have been restarted, or something between may have
// forgotten it. A statement that creates a database is not simply tried again, so this comes before it.
func alive(ctx context.Context, conn *pgx.Conn) bool {
	ctx, cancel := context.WithTimeout(ctx, aliveTimeout)
	defer cancel()
	_ = conn.Ping(ctx) // closes a dead connection, and does nothing if ctx has ended
	return !conn.IsClosed()
}

// aliveTimeout bounds the answer to an empty statement.
const aliveTimeout = 10 * time.Second

func (s *server) connect(ctx context.Context) (*pgx.Conn, error) {
	config, err := pgx.ParseConfig(s.URL())
	if err != nil {
		return nil, err
	}
	config.RuntimeParams["application_name"] = sessionPrefix + s.tag
	// Each of these statements runs once, and poolers do not support prepared ones well.
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	// Between two tests the session may have nothing to do for long. PgBouncer refuses this as a parameter of the start.
	config.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		return conn.Exec(ctx, "set idle_session_timeout = 0").Close()
	}
	return pgx.ConnectConfig(ctx, config)
}

func (s *server) exec(ctx context.Context, sql string) error {
	return s.admin(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, sql)
		return err
	})
}

// These are the names of what this package creates on a shared server. Databases are called onceq_test_<Unix time>_<tag
// of the process>_<number>.
const (
	databasePrefix = "onceq_test_"
	sessionPrefix  = "onceq test "
)

var databasePattern = regexp.MustCompile(`^` + databasePrefix + `(\d+)_([a-z0-9]+)_\d+$`)

func (s *server) newName() string {
	return fmt.Sprintf("%s%d_%s_%d", databasePrefix, time.Now().Unix(), s.tag, s.last.Add(1))
}

// createDatabase creates a database: a copy of the template for the schema and the set-up, which may be nil, or an empty one.
func (s *server) createDatabase(ctx context.Context, schema string, empty bool, own *setup) (name string, err error) {
	from := "template0"
	if empty {
		schema = "" // no schema's
	}
	if !empty || len(s.nodes) > 0 || own != nil {
		if from, err = s.template(ctx, schema, own); err != nil {
			return "", err
		}
	}
	if name, err = s.copyDatabase(ctx, from); err != nil {
		return "", err
	}
	if _, err := s.granted(ctx, name); err != nil {
		return "", err
	}
	return name, nil
}

// granted gives the runtime role, if there is one, its right in a database, and returns it.
func (s *server) granted(ctx context.Context, name string) (role string, err error) {
	if role, err = s.runtimeRole(ctx); role != "" && err == nil {
		err = s.exec(ctx, "grant create on database "+name+" to "+role)
	}
	if err != nil {
		return "", fmt.Errorf("grant the runtime role its rights: %w", err)
	}
	return role, nil
}

// copyDatabase creates a copy of a database.
func (s *server) copyDatabase(ctx context.Context, from string) (string, error) {
	name := s.newName()
	sql := "create database " + name + " template " + from
	if s.Ours() || len(s.nodes) > 0 {
		// Copying files is half the work of copying pages through the log, because the sessions' catalog caches are
		// copied too. It makes checkpoints, which cost little on a server without durability, and much on any other.
		sql += " strategy file_copy"
	}
	if err := s.everywhere(ctx, sql); err != nil {
		return "", fmt.Errorf("create a database: %w", err)
	}
	return name, nil
}

// dropDatabase ends the sessions of a database and drops it.
func (s *server) dropDatabase(ctx context.Context, name string) error {
	if err := s.everywhere(ctx, "drop database if exists "+name+" with (force)"); err != nil {
		return fmt.Errorf("drop the test's database: %w", err)
	}
	return nil
}

// staleAfter is how old a database without a session of its process must be before it is dropped. By then a process
// that lost its connections in a restart of the server has them back.
const staleAfter = time.Hour

// dropStale drops the databases of killed processes. A live process keeps an administrative session open, and so keeps
// its databases however long it runs.
func (s *server) dropStale(ctx context.Context) error {
	return s.admin(ctx, func(conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `
			select d.datname
			from pg_database d
			where starts_with(d.datname, $1)
			  and not exists (
			    select
			    from pg_stat_activity a
			    where a.application_name = $2 || split_part(d.datname, '_', 4)
			  )`, databasePrefix, sessionPrefix)
		if err != nil {
			return fmt.Errorf("look for databases that were left behind: %w", err)
		}
		names, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return fmt.Errorf("look for databases that were left behind: %w", err)
		}
		for _, name := range names {
			match := databasePattern.FindStringSubmatch(name)
			if match == nil {
				continue
			}
			seconds, err := strconv.ParseInt(match[1], 10, 64)
			if err != nil || time.Since(time.Unix(seconds, 0)) < staleAfter {
				continue
			}
			// The drop fails if somebody works in the database after all, if another process was faster, or if another
			// role owns it. None of these matters here.
			_, _ = conn.Exec(ctx, "drop database if exists "+name)
		}
		return nil
	})
}
