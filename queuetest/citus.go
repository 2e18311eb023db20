package queuetest

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/sqlstate"
)

// If ONCEQ_TEST_DATABASE_URL is the coordinator of a Citus cluster with schema-based sharding (scripts/citus.sh starts one),
// each test's database exists on every node, and its tables are on one of them.

// node is one of a cluster's servers besides the coordinator.
type node struct {
	host string
	port uint16
}

// findNodes sets nodes, which stays empty where the server is no coordinator.
func (s *server) findNodes(ctx context.Context) error {
	return s.admin(ctx, func(conn *pgx.Conn) error {
		var citus bool
		if err := conn.QueryRow(ctx, `select exists (select from pg_extension where extname = 'citus')`).Scan(&citus); err != nil || !citus {
			return err
		}
		rows, err := conn.Query(ctx, `select node_name, node_port::int from citus_get_active_worker_nodes() order by 1, 2`)
		if err != nil {
			return err
		}
		s.nodes, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (n node, err error) {
			return n, row.Scan(&n.host, &n.port)
		})
		return err
	})
}

// everywhere runs a command about databases on the server, and on all of a cluster's nodes at the same time.
func (s *server) everywhere(ctx context.Context, command string) error {
	var all sync.WaitGroup
	failed := make([]error, 1+len(s.nodes))
	for i, n := range s.nodes {
		all.Go(func() { failed[i+1] = s.onNode(ctx, n, "", command) })
	}
	// Postgres waits five seconds for sessions that were told to end. Some may take longer, and Citus looks at each database every
	// now and then.
	for try := 0; ; try++ {
		if failed[0] = s.exec(ctx, command); try == 20 || sqlstate.Of(failed[0]) != "55006" {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	all.Wait()
	return errors.Join(failed...)
}

// onNode runs commands on a node, in a database, or in the maintenance database.
func (s *server) onNode(ctx context.Context, n node, database string, commands ...string) error {
	config, err := pgx.ParseConfig(s.URL())
	if err != nil {
		return err
	}
	config.Host, config.Port, config.Fallbacks = n.host, n.port, nil
	if database != "" {
		config.Database = database
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	for _, command := range commands {
		for try := 0; ; try++ {
			// Citus looks at each database every now and then. It is not kept out when the database is dropped or copied.
			if _, err = conn.Exec(ctx, command); try == 20 || sqlstate.Of(err) != "55006" {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		if err != nil {
			return fmt.Errorf("on the node at port %d: %w", n.port, err)
		}
	}
	return nil
}

// cluster makes a coordinator of a database, and nodes of those of the same name.
func (s *server) cluster(ctx context.Context, database string) error {
	own, err := pgx.ParseConfig(s.URL())
	if err != nil {
		return err
	}
	commands := []string{"create extension citus", fmt.Sprintf("select citus_set_coordinator_host('%s', %d)", own.Host, own.Port)}
	for _, n := range s.nodes {
		if err := s.onNode(ctx, n, database, "create extension citus"); err != nil {
			return err
		}
		commands = append(commands, fmt.Sprintf("select citus_add_node('%s', %d)", n.host, n.port))
	}
	return s.onNode(ctx, node{own.Host, own.Port}, database, commands...)
}

// A timestamptz with an interval depends on the session's time zone, and Citus updates nothing with what depends on that.
var (
	moved = regexp.MustCompile(`(\w+)((?: [+-] (?:\$1::bigint \* )?interval '[^']*')+)`)
	epoch = regexp.MustCompile(`extract\(epoch from (\w+)\)`)
)

func withoutZones(statement string) string {
	statement = epoch.ReplaceAllString(statement, "extract(epoch from timezone('UTC', $1))")
	return moved.ReplaceAllString(statement, "timezone('UTC', timezone('UTC', $1)$2)")
}
