package queuetest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/migrations"
)

// template is a database with the migrations applied to one schema, and perhaps an application's own set-up. Tests get copies of it.
type template struct {
	mu   sync.Mutex // held while the template is made; guards name
	name string     // empty until the template is complete
}

// setup is what Setup was called with.
type setup struct {
	name string
	run  func(context.Context, *pgxpool.Pool) error
}

// template returns the name of the template for a schema, and for a set-up if it is not nil, and makes it on first use. If a
// test gives up or fails, the next one makes it.
func (s *server) template(ctx context.Context, schema string, own *setup) (string, error) {
	key := schema
	if own != nil {
		key += "\x00" + own.name
	}
	s.mu.Lock()
	t := s.templates[key]
	if t == nil {
		t = new(template)
		s.templates[key] = t
	}
	s.mu.Unlock()

	t.mu.Lock()
	defer t.mu.Unlock()
	if t.name != "" {
		return t.name, nil
	}
	make := s.migrated
	if own != nil {
		make = func(ctx context.Context, schema string) (string, error) { return s.setUp(ctx, schema, own) }
	}
	name, err := make(ctx, schema)
	if err != nil {
		return "", err
	}
	t.name = name
	return name, nil
}

// setUp makes a copy of the schema's template and sets the application's own tables up in it.
func (s *server) setUp(ctx context.Context, schema string, own *setup) (name string, err error) {
	from, err := s.template(ctx, schema, nil)
	if err != nil {
		return "", err
	}
	if name, err = s.copyDatabase(ctx, from); err != nil {
		return "", err
	}
	done := false
	defer func() {
		if !done { // also if the set-up ended its goroutine
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
			defer cancel()
			err = errors.Join(err, s.dropDatabase(ctx, name))
		}
	}()
	config, err := pgxpool.ParseConfig(s.DatabaseURL(name))
	if err != nil {
		return "", err
	}
	role, err := s.granted(ctx, name)
	if err != nil {
		return "", err
	}
	if role != "" { // the tables are the application's, as if the test had made them
		config.ConnConfig.User = role
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return "", err
	}
	defer pool.Close()
	if err := own.run(ctx, pool); err != nil {
		return "", fmt.Errorf("set-up %q: %w", own.name, err)
	}
	pool.Close()
	if err := s.seal(ctx, name); err != nil {
		return "", err
	}
	done = true
	return name, nil
}

// migrated makes a database with the tables in a schema, or an empty one if that is "".
func (s *server) migrated(ctx context.Context, schema string) (string, error) {
	name := s.newName()
	if err := s.everywhere(ctx, "create database "+name+" template template0"); err != nil {
		return "", fmt.Errorf("create the template database: %w", err)
	}
	if len(s.nodes) > 0 {
		if err := s.cluster(ctx, name); err != nil {
			return "", fmt.Errorf("make a cluster of the template database: %w", err)
		}
	}
	if schema != "" {
		if err := s.migrate(ctx, name, schema); err != nil {
			return "", fmt.Errorf("migrate the template database: %w", err)
		}
	}
	return name, s.seal(ctx, name)
}

// seal makes a database one that is only copied. A copy waits for every session in its source to end: from here on there is none.
func (s *server) seal(ctx context.Context, name string) error {
	if err := s.everywhere(ctx, "alter database "+name+" with allow_connections false"); err != nil {
		return fmt.Errorf("close the template database: %w", err)
	}
	if len(s.nodes) > 0 {
		if err := s.everywhere(ctx, "select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = '"+name+"'"); err != nil {
			return fmt.Errorf("close the template database: %w", err)
		}
	}
	return nil
}

func (s *server) migrate(ctx context.Context, database, schema string) error {
	conn, err := pgx.Connect(ctx, s.DatabaseURL(database))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	if err := migrations.Up(ctx, conn, schema); err != nil {
		return err
	}
	if err := migrateLater(ctx, conn, schema); err != nil {
		return err
	}
	role, err := s.runtimeRole(ctx)
	if err != nil {
		return err
	}
	return standIn(ctx, conn, schema, role)
}
