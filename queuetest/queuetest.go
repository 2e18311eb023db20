// Package queuetest is for tests of handlers. It gives each test its own queue on a real Postgres, in milliseconds.
//
//	func TestCharge(t *testing.T) {
//		t.Parallel()
//		db := queuetest.New(t)
//		_, err := db.Queue.Enqueue(t.Context(), db.Pool, Charge.Job(Order{ID: 7}))
//		require.NoError(t, err)
//
//		ran := db.RunOne(Charge.HandleTx(charge))
//		require.Equal(t, onceq.StateCompleted, ran.State)
//		// db.Pool to look at what it wrote.
//	}
//
// [RequireEnqueued] looks for the job that code under test has enqueued, in its transaction too. [Setup] makes the
// application's own tables once for all tests. [DB.RunOne] and [DB.Drain] run handlers. [DB.DeliverTwice] and [DB.Race] imitate a redelivery and a second worker.
// [DB.Advance] and [DB.ExpireLease] move time in the database. [Empty] is for tests that share a database. [Prove] kills, freezes and cuts off a handler's process
// at every possible step.
//
// queuetest uses the first server that it finds, in this order: the one of ONCEQ_TEST_DATABASE_URL (with a role that
// may create databases), one started from binaries on this machine, or a container. ONCEQ_TEST_PGBIN names a directory
// of binaries, ONCEQ_TEST_IMAGE an image. Containers need the module queuetest/container, which a test file imports
// with a blank import. A server that the package starts belongs to the test process and ends with it, even when the
// process is killed. Its durability is off, so keep nothing of value in it. On your own server the databases are
// dropped at the end, also when the process is killed.
package queuetest

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/bridge"
	"github.com/onceq/onceq/internal/leaks"
)

// DB is one test's database and the queue in it.
type DB struct {
	// Pool is for the test's own SQL. Its sessions have the test's name as application_name. The test's clean-up closes
	// it, and fails the test if a connection was never given back.
	Pool *pgxpool.Pool

	// Queue works in this database, over Pool.
	Queue *onceq.Queue

	// URL is the connection string of this database, for a role that may do everything in it.
	URL string

	// Schema is the schema of the queue's tables, unquoted.
	Schema string

	t             testing.TB
	config        onceq.Config // Queue's
	citus         bool
	returnTimeout time.Duration
}

// Option changes what New returns.
type Option func(*options)

type options struct {
	schema     string
	config     onceq.Config
	poolConfig []func(*pgxpool.Config)
	empty      bool
	noCheck    bool
	setup      *setup
}

// Schema puts the tables into another schema than "onceq". Any name works, even one that needs quoting.
func Schema(name string) Option { return func(o *options) { o.schema = name } }

// NoMigrations leaves the database empty: no schema, no tables, and no check at the end.
func NoMigrations() Option { return func(o *options) { o.empty = true } }

// Setup gives the database the application's own tables and rows. The function is called once in a test process for each
// name, and every test with that name begins with a copy of what it made; so a name stands for one function. If it fails, the next test
// calls it again. SQL makes one of statements; a function that runs the application's migrations is as good.
func Setup(name string, run func(context.Context, *pgxpool.Pool) error) Option {
	return func(o *options) { o.setup = &setup{name, run} }
}

// Config configures the Queue, and the workers of RunOne, Drain, DeliverTwice and Race. The option Schema overrides its
// Schema.
func Config(config onceq.Config) Option { return func(o *options) { o.config = config } }

// PoolConfig changes the pool's configuration before the pool is made. By default the pool has up to 10 connections.
func PoolConfig(change func(*pgxpool.Config)) Option {
	return func(o *options) { o.poolConfig = append(o.poolConfig, change) }
}

// NoCheck skips the check of the tables' invariants at the end, for tests that break them on purpose.
func NoCheck() Option { return func(o *options) { o.noCheck = true } }

// dropTimeout bounds the drop of a test's database. Every session of the server must acknowledge the drop, and a
// session of another test that waits for a copy's data does so only when it has them.
const dropTimeout = 5 * time.Minute

// returnTimeout bounds how long connections may take to come back to the pool.
const returnTimeout = time.Minute

// New returns a migrated, isolated database on a real Postgres, and a Queue over it. When the test ends, New checks the
// invariants and drops the database. The first call of a process takes longer: it may start the server, and it applies
// the migrations to the template that every later database is copied from.
func New(t testing.TB, opts ...Option) *DB {
	t.Helper()
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	if o.schema != "" {
		o.config.Schema = o.schema
	}
	if o.config.Schema == "" {
		o.config.Schema = defaultSchema
		if s := elsewhere(); s != "" && !o.empty {
			o.config.Schema = s
		}
	}

	s, err := processServer()
	if err != nil {
		t.Fatalf("queuetest: %v", err)
	}
	leaks.Watch(t)
	name, err := s.createDatabase(t.Context(), o.config.Schema, o.empty, o.setup)
	if err != nil {
		t.Fatalf("queuetest: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), dropTimeout)
		defer cancel()
		if err := s.dropDatabase(ctx, name); err != nil {
			t.Errorf("queuetest: %v", err)
		}
	})

	db := &DB{URL: s.DatabaseURL(name), Schema: o.config.Schema, t: t, config: o.config, citus: len(s.nodes) > 0, returnTimeout: returnTimeout}
	role := ""
	if !o.empty {
		if role, err = s.runtimeRole(t.Context()); err != nil {
			t.Fatalf("queuetest: %v", err)
		}
	}
	db.openPool(s, append([]func(*pgxpool.Config){func(c *pgxpool.Config) { apply(t, s, c, role) }}, o.poolConfig...))
	db.Queue, err = onceq.New(db.Pool, &o.config)
	if err != nil {
		t.Fatalf("queuetest: %v", err)
	}
	bridge.Alone(db.Queue)
	if db.citus && !o.empty { // so that EnqueueInBatch knows
		if err := db.Queue.Check(t.Context()); err != nil {
			t.Fatalf("queuetest: %v", err)
		}
	}
	if !o.empty && !o.noCheck {
		t.Cleanup(func() {
			if err := db.Check(); err != nil {
				t.Errorf("queuetest: at the end of the test: %v", err)
			}
		})
	}
	return db
}

func (db *DB) openPool(s *server, changes []func(*pgxpool.Config)) {
	db.t.Helper()
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		db.t.Fatalf("queuetest: %v", err)
	}
	config.MaxConns = 10
	config.ConnConfig.RuntimeParams["application_name"] = db.t.Name()
	for _, change := range changes {
		change(config)
	}
	untracked(db.t, s, config.ConnConfig)
	// The test's context ends before the clean-up, which still needs connections.
	db.Pool, err = pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		db.t.Fatalf("queuetest: %v", err)
	}
	db.t.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			db.Pool.Close()
		}()
		select {
		case <-closed:
		case <-time.After(db.returnTimeout):
			db.t.Errorf("queuetest: %d connections of the pool were never given back", db.Pool.Stat().AcquiredConns())
		}
	})
}
