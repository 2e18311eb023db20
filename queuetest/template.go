package queuetest

import (
	"context"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/migrations"
)

// template is a database with the migrations applied to one schema. Tests get copies of it.
type template struct {
	mu   sync.Mutex // held while the template is made; guards name
	name string     // empty until the template is complete
}

// template returns the name of the schema's template, and makes it on first use. If a test gives up or fails, the next
// one makes it.
func (s *server) template(ctx context.Context, schema string) (string, error) {
	s.mu.Lock()
	t := s.templates[schema]
	if t == nil {
		t = new(template)
		s.templates[schema] = t
	}
	s.mu.Unlock()

	t.mu.Lock()
	defer t.mu.Unlock()
	if t.name != "" {
		return t.name, nil
	}
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
	// A copy waits for every session in its source to end. From here on there is none.
	if err := s.everywhere(ctx, "alter database "+name+" with allow_connections false"); err != nil {
		return "", fmt.Errorf("close the template database: %w", err)
	}
	if len(s.nodes) > 0 {
		if err := s.everywhere(ctx, "select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = '"+name+"'"); err != nil {
			return "", fmt.Errorf("close the template database: %w", err)
		}
	}
	t.name = name
	return name, nil
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
