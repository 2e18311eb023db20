// Package pgserver finds a real Postgres for tests and demonstrations, or starts one.
//
// It takes the first of these that exists:
//
//  1. the server that ONCEQ_TEST_DATABASE_URL names, with a role that may create databases. Settings of a pool in it
//     (pool_max_conns) are ignored;
//  2. server binaries on this machine: the directory in ONCEQ_TEST_PGBIN, or the newest of those on PATH and where the
//     distributions put them. The server listens on 127.0.0.1 and requires a random password, which is in its URL;
//  3. a container, if queuetest/container is imported and a Docker daemon answers: the image in ONCEQ_TEST_IMAGE,
//     postgres:18-alpine by default. If ONCEQ_TEST_IMAGE is set, only binaries of ONCEQ_TEST_PGBIN come before it.
//
// A server that it starts ends with the process that started it, even if that is killed.
package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// These environment variables decide which server is used.
const (
	EnvURL   = "ONCEQ_TEST_DATABASE_URL"
	EnvBin   = "ONCEQ_TEST_PGBIN"
	EnvImage = "ONCEQ_TEST_IMAGE"
)

// ErrNotOurs is returned by Restart for a server that this process has not started.
var ErrNotOurs = errors.New("pgserver: the server of " + EnvURL + " was not started by this process and is not restarted by it")

// Options say what kind of server to start. The zero value suits tests.
type Options struct {
	// Durable keeps fsync, synchronous_commit and full_page_writes on, as on a production server. Default false, which
	// is faster and loses the last commits in an immediate Restart. Tests of what survives a crash need it.
	Durable bool

	// Settings are further server settings, for example {"max_prepared_transactions": "20"}; they override the
	// package's own. None by default. A server of ONCEQ_TEST_DATABASE_URL keeps its settings.
	Settings map[string]string

	// Own ignores ONCEQ_TEST_DATABASE_URL, for callers that stop and restart their server. Default false.
	Own bool
}

// A Server is a running Postgres.
type Server struct {
	url     string
	version int
	impl    implementation
}

// implementation stops and restarts a server of one of the three kinds.
type implementation interface {
	stop() error
	restart(ctx context.Context, immediate bool) error
	binDir() string
}

// startTimeout bounds how long a server may take to answer. That includes pulling a container's image.
const startTimeout = 2 * time.Minute

// Start finds or starts a server, by the rules in the package comment. If the machine has none, the error says what to
// install. Start gives up when ctx ends; the server that it has returned lives until Stop or the end of the process.
func Start(ctx context.Context, opts Options) (*Server, error) {
	if u := os.Getenv(EnvURL); u != "" && !opts.Own {
		return newServer(ctx, withoutPool(u), external{})
	}

	binariesWanted := os.Getenv(EnvBin) != ""
	if binariesWanted || binariesStart && os.Getenv(EnvImage) == "" {
		bin, err := findBinaries(ctx)
		if err != nil {
			return nil, err
		}
		if bin != "" {
			return startBinaries(ctx, bin, opts)
		}
	}

	return startContainer(ctx, opts)
}

var errNotFound = errors.New(`pgserver: no Postgres was found on this machine; do one of these:
  Debian, Ubuntu:  apt-get install postgresql
  Fedora, RHEL:    dnf install postgresql-server
  macOS:           brew install postgresql@18
  a directory with initdb and postgres:  set ` + EnvBin + `
  a server that runs already:            set ` + EnvURL + ` (a role that may create databases)
  a container:                           start Docker, and add to a test file
                                         ` + ContainerImport)

// newServer connects once, to learn the version and to make sure that the server answers.
func newServer(ctx context.Context, connString string, impl implementation) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()

	s := &Server{url: connString, impl: impl}
	conn, err := pgx.Connect(ctx, connString)
	if err != nil {
		return nil, fmt.Errorf("pgserver: connect: %w", err)
	}
	defer func() { _ = conn.Close(ctx) }()

	err = conn.QueryRow(ctx, "select current_setting('server_version_num')::int").Scan(&s.version)
	if err != nil {
		return nil, fmt.Errorf("pgserver: ask for the version: %w", err)
	}
	return s, nil
}

// URL is the connection string of the server's maintenance database, for a role that may create databases.
func (s *Server) URL() string { return s.url }

// DatabaseURL is the connection string of another database of this server.
func (s *Server) DatabaseURL(database string) string { return withDatabase(s.url, database) }

// Version is the server's version as in server_version_num: 150018 for 15.18.
func (s *Server) Version() int { return s.version }

// BinDir is the directory of the server's binaries, or "" if the server was not started from binaries of this machine.
func (s *Server) BinDir() string { return s.impl.binDir() }

// Ours reports whether this process started the server, so that everything in it ends with this process.
func (s *Server) Ours() bool { return s.impl != external{} }

// Stop stops the server and removes its data. It does nothing to a server of ONCEQ_TEST_DATABASE_URL.
func (s *Server) Stop() error { return s.impl.stop() }

// Restart stops the server and starts it again with the same data under the same URL. It returns when the server
// answers. For the data, an immediate stop is a crash: the server comes back through recovery, and keeps every
// confirmed commit only if it is Durable. A stop that is not immediate ends the sessions and writes everything first.
func (s *Server) Restart(immediate bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	return s.impl.restart(ctx, immediate)
}

// Standby starts a server that follows this one by streaming replication. name is its application_name and the name of
// its slot, so it consists of letters, digits and underscores. Apart from that it is a server of its own, with its own
// URL and options of the same kind. tablespaces says where the standby keeps the data of tablespaces: an empty
// directory for each directory of this server. It needs server binaries on this machine.
func (s *Server) Standby(ctx context.Context, name string, tablespaces map[string]string, opts Options) (*Server, error) {
	impl, ok := s.impl.(interface {
		standby(ctx context.Context, name string, tablespaces map[string]string, opts Options) (*Server, error)
	})
	if !ok {
		return nil, errors.New("pgserver: a standby needs the server's binaries on this machine")
	}
	return impl.standby(ctx, name, tablespaces, opts)
}

// external is a server that this process has not started.
type external struct{}

func (external) stop() error                         { return nil }
func (external) restart(context.Context, bool) error { return ErrNotOurs }
func (external) binDir() string                      { return "" }

// settings returns the server's arguments for its settings.
func (o Options) settings() []string {
	all := map[string]string{
		"max_connections": "200",
		"shared_buffers":  "128MB",
		"max_wal_size":    "4GB",
	}
	if !o.Durable {
		all["fsync"] = "off"
		all["synchronous_commit"] = "off"
		all["full_page_writes"] = "off"
	}
	maps.Copy(all, o.Settings)
	args := make([]string, 0, 2*len(all))
	for _, name := range slices.Sorted(maps.Keys(all)) {
		args = append(args, "-c", name+"="+all[name])
	}
	return args
}

// AwaitReady connects until the server answers, has ended (exited is closed), or ctx ends.
func AwaitReady(ctx context.Context, connString string, exited <-chan struct{}) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		conn, err := pgx.Connect(attempt, connString)
		if err == nil {
			err = conn.Close(attempt)
		}
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-exited:
			return errExited
		case <-ctx.Done():
			return fmt.Errorf("the server does not answer: %w", err)
		case <-tick.C:
		}
	}
}

var errExited = errors.New("the server ended")

// withDatabase replaces the database of a connection string in either of the two forms that libpq knows.
func withDatabase(connString, database string) string {
	if isURL(connString) {
		u, err := url.Parse(connString)
		if err == nil {
			u.Path, u.RawPath = "/"+database, ""
			u.RawQuery = without(u.RawQuery, func(name string) bool { return name == "dbname" || name == "database" })
			return u.String()
		}
	}
	quoted := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(database)
	return connString + " dbname='" + quoted + "'"
}

func isURL(connString string) bool {
	return strings.HasPrefix(connString, "postgres://") || strings.HasPrefix(connString, "postgresql://")
}

// without removes settings from a URL's query. The others stay as they are written: url.Values would write a space as a
// '+', which pgx and libpq take for itself.
func without(query string, drop func(name string) bool) string {
	return strings.Join(slices.DeleteFunc(strings.Split(query, "&"), func(pair string) bool {
		name, _, _ := strings.Cut(pair, "=")
		return drop(name)
	}), "&")
}

// keywordValue is a setting of a connection string that is not a URL.
var keywordValue = regexp.MustCompile(`\s*([^\s=]+)\s*=\s*('(?:[^'\\]|\\.)*'|(?:[^\s\\]|\\.)*)`)

// withoutPool removes the settings of a pgxpool, such as pool_max_conns, which a single connection would send to the server.
func withoutPool(connString string) string {
	ofPool := func(name string) bool { return strings.HasPrefix(name, "pool_") }
	if isURL(connString) {
		base, query, _ := strings.Cut(connString, "?")
		return strings.TrimSuffix(base+"?"+without(query, ofPool), "?")
	}
	return keywordValue.ReplaceAllStringFunc(connString, func(setting string) string {
		if ofPool(strings.TrimSpace(setting)) {
			return ""
		}
		return setting
	})
}
