// Command citus shows that with schema-based sharding no transaction of onceq leaves its node, and prints the table of
// docs/run/growing.md. It takes the URL of a coordinator (scripts/citus.sh starts a cluster), makes schemas there, and removes
// them at the end:
//
//	go run . [-for 20s] URL
//
// Producers insert a row and enqueue a job for it in one transaction, half of the jobs with a key. A worker for each schema
// changes the row in the transaction of the handler. In each schema a job also waits for two others, of one lane, that await an event,
// and at the end a job is discarded. All of it goes over one pool.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqops"
)

func main() {
	length := flag.Duration("for", 20*time.Second, "how long each row of the table takes")
	flag.Parse()
	if err := run(context.Background(), flag.Arg(0), *length); err != nil {
		fmt.Fprintln(os.Stderr, "citus:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, url string, length time.Duration) error {
	admin, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer admin.Close(ctx)
	fmt.Println("| schemas | on each node | statements on one node | on several | two-phase commits | transactions on several nodes | commits on each node | transactions a second |")
	fmt.Println("|---|---|---|---|---|---|---|---|")
	left := false
	for _, n := range []int{1, 4, 16} {
		r, err := measure(ctx, admin, url, n, length)
		if err != nil {
			return fmt.Errorf("%d schemas: %w", n, err)
		}
		rate := func(n int) float64 { return float64(n) / length.Seconds() }
		fmt.Printf("| %d | %s | %d | %d | %d | %d | %s | %.0f enqueue, %.0f work |\n",
			n, r.placed, r.single, r.multi, r.prepared, r.crossed, r.committed, rate(r.orders), rate(r.shipped))
		left = left || r.multi+r.prepared+r.crossed > 0
	}
	// What has counted nothing must be able to count.
	r, err := cross(ctx, admin, url)
	switch {
	case err != nil:
		return err
	case r.crossed != 1 || r.prepared != 2:
		return fmt.Errorf("of a transaction that wrote on two nodes this has seen %d, and %d prepared ones", r.crossed, r.prepared)
	case left:
		return errors.New("a transaction has left its node")
	}
	fmt.Println("\nNo transaction has left its node. One that was made to was seen.")
	return nil
}

// result is a row of the table.
type result struct {
	placed, committed string // on each node
	single, multi     int    // statements, by citus_stat_counters
	prepared, crossed int    // transactions, by what Citus says that it sends
	orders, shipped   int
}

type order struct{ ID int }

func name(i int) string { return "lab_citus_" + strconv.Itoa(i) }

// prepare makes schemas with the tables of onceq and one of the application.
func prepare(ctx context.Context, admin *pgx.Conn, n int) error {
	for i := range n {
		err := migrations.Up(ctx, admin, name(i))
		if err == nil {
			_, err = admin.Exec(ctx, "create table "+name(i)+".orders (id int primary key, shipped boolean not null default false)")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// remove removes them, and those of a run that was stopped.
func remove(ctx context.Context, admin *pgx.Conn) error {
	for i := range 16 {
		if _, err := admin.Exec(ctx, "drop schema if exists "+name(i)+" cascade"); err != nil {
			return err
		}
	}
	return nil
}

func measure(ctx context.Context, admin *pgx.Conn, url string, n int, length time.Duration) (r result, err error) {
	if err := remove(ctx, admin); err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, remove(ctx, admin)) }()
	if err := prepare(ctx, admin, n); err != nil {
		return r, err
	}
	seen := newRemote()
	pool, err := seen.pool(ctx, url)
	if err != nil {
		return r, err
	}
	defer pool.Close()
	single, multi, err := counters(ctx, admin)
	if err != nil {
		return r, err
	}
	if err := load(ctx, pool, n, length); err != nil {
		return r, err
	}
	pool.Close()
	for gone := false; !gone; { // then all of them have counted
		const read = `select not exists (select from pg_stat_activity where datname = current_database() and application_name = 'lab/citus')`
		if err := admin.QueryRow(ctx, read).Scan(&gone); err != nil {
			return r, err
		}
		time.Sleep(10 * time.Millisecond)
	}
	if r.single, r.multi, err = counters(ctx, admin); err != nil {
		return r, err
	}
	r.single, r.multi = r.single-single, r.multi-multi
	for i := range n {
		var orders, shipped int
		if err := admin.QueryRow(ctx, "select count(*), count(*) filter (where shipped) from "+name(i)+".orders").Scan(&orders, &shipped); err != nil {
			return r, err
		}
		r.orders, r.shipped = r.orders+orders, r.shipped+shipped
	}
	return r, seen.report(ctx, admin, &r)
}

// counters reads how many statements the coordinator has sent to one node, and to several.
func counters(ctx context.Context, admin *pgx.Conn) (single, multi int, err error) {
	const read = `select query_execution_single_shard, query_execution_multi_shard from citus_stat_counters where name = current_database()`
	return single, multi, admin.QueryRow(ctx, read).Scan(&single, &multi)
}

// load runs a worker for each schema, and four producers for all of them.
func load(ctx context.Context, pool *pgxpool.Pool, n int, length time.Duration) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	kind := onceq.Kind[order]{Name: "ship"}
	queues := make([]*onceq.Queue, n)
	var running sync.WaitGroup
	failed := make(chan error, 2*n+5)
	part, whole := onceq.Kind[int]{Name: "part", Lane: func(int) string { return "one" }}, onceq.Kind[int]{Name: "whole"}
	var groups atomic.Int64
	for i := range queues {
		q, err := onceq.New(pool, &onceq.Config{Schema: name(i), Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))})
		if err != nil {
			return err
		}
		ship := kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, o order) error {
			_, err := tx.Exec(ctx, "update "+name(i)+".orders set shipped = true where id = $1", o.ID)
			return err
		})
		await := part.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			_, _, err := onceq.Await[int](ctx, l, "event", "one", time.Hour)
			return err
		})
		last := whole.Handle(func(context.Context, *onceq.Lease, int) error { groups.Add(1); return nil })
		w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, ship, await, last)
		if err != nil {
			return err
		}
		queues[i] = q
		running.Go(func() { failed <- w.Run(ctx) })
		running.Go(func() { failed <- wait(ctx, pool, q, part.Job(1), part.Job(2), whole.Job(0)) })
	}
	end := time.Now().Add(length)
	for p := range 4 {
		running.Go(func() {
			for id := p; time.Now().Before(end); id += 4 {
				i := id / 4 % n
				err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, "insert into "+name(i)+".orders (id) values ($1)", id); err != nil {
						return err
					}
					job := kind.Job(order{id})
					if id/4/n%2 == 0 {
						job.Key = strconv.Itoa(id)
					}
					_, err := queues[i].Enqueue(ctx, tx, job)
					return err
				})
				if err != nil {
					failed <- err
					return
				}
			}
		})
	}
	var err error
	for after := time.After(time.Until(end)); err == nil; {
		select {
		case err = <-failed:
			continue
		case <-after:
		}
		for _, q := range queues {
			err = errors.Join(err, discard(ctx, pool, q, kind.Job(order{})))
		}
		break
	}
	time.AfterFunc(time.Second, stop) // the producers' last transactions
	running.Wait()
	if n == 1 && groups.Load() == 0 { // with many there may be no time
		failed <- errors.New("no job has run that waits for others")
	}
	close(failed)
	for e := range failed {
		err = errors.Join(err, e)
	}
	return err
}

// wait enqueues a group, of two jobs and the one that waits for them, and emits what they await.
func wait(ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue, first, second, then onceq.Job) error {
	_, err := q.EnqueueGroup(ctx, pool, []onceq.Job{first, second}, then)
	if err != nil {
		return err
	}
	time.Sleep(time.Second)
	_, err = q.Emit(ctx, pool, "event", "one", 1)
	return err
}

// discard enqueues a job with a key, cancels it and discards it, in one transaction.
func discard(ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue, job onceq.Job) error {
	job.Key = "discarded"
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		r, err := q.Enqueue(ctx, tx, job)
		if err == nil {
			_, err = q.Cancel(ctx, tx, r.ID)
		}
		if err == nil {
			err = onceqops.New(q).Discard(ctx, tx, r.ID)
		}
		return err
	})
}

// remote counts what Citus sends to the nodes, of which it tells the client.
type remote struct {
	mu                sync.Mutex
	open              map[*pgconn.PgConn]string // the node of a transaction
	commits           map[string]int            // by node
	prepared, crossed int
}

func newRemote() *remote {
	return &remote{open: map[*pgconn.PgConn]string{}, commits: map[string]int{}}
}

func (r *remote) pool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 16
	cfg.ConnConfig.OnNotice = r.heard
	params := cfg.ConnConfig.RuntimeParams
	params["application_name"], params["citus.log_remote_commands"], params["client_min_messages"] = "lab/citus", "on", "notice"
	return pgxpool.NewWithConfig(ctx, cfg)
}

func (r *remote) heard(conn *pgconn.PgConn, n *pgconn.Notice) {
	command, ok := strings.CutPrefix(n.Message, "issuing ")
	if !ok {
		return
	}
	_, node, _ := strings.Cut(n.Detail, "@") // on server postgres@127.0.0.1:25611 connectionId: 1
	node, _, _ = strings.Cut(node, " ")
	r.mu.Lock()
	defer r.mu.Unlock()
	switch verb, _, _ := strings.Cut(command, " '"); {
	case strings.HasPrefix(verb, "BEGIN"):
		if before := r.open[conn]; before != "" && before != node {
			r.crossed++
		}
		r.open[conn] = node
	case verb == "COMMIT":
		r.commits[node]++
		delete(r.open, conn)
	case verb == "PREPARE TRANSACTION":
		r.prepared++
		delete(r.open, conn)
	case verb == "ROLLBACK":
		delete(r.open, conn)
	}
}

// report says what was on each node.
func (r *remote) report(ctx context.Context, admin *pgx.Conn, to *result) error {
	const nodes = `
select n.nodename || ':' || n.nodeport,
       (select count(*) from pg_dist_placement p join pg_dist_shard s using (shardid) join pg_class c on c.oid = s.logicalrelid
         where p.groupid = n.groupid and c.relname = 'orders' and c.relnamespace::regnamespace::text like 'lab\_citus\_%')
  from pg_dist_node n
 where n.groupid > 0
 order by n.nodeport`
	rows, err := admin.Query(ctx, nodes)
	if err != nil {
		return err
	}
	var placed, committed []string
	var node string
	var schemas int
	_, err = pgx.ForEachRow(rows, []any{&node, &schemas}, func() error {
		placed, committed = append(placed, strconv.Itoa(schemas)), append(committed, strconv.Itoa(r.commits[node]))
		return nil
	})
	to.placed, to.committed = strings.Join(placed, " and "), strings.Join(committed, " and ")
	to.prepared, to.crossed = r.prepared, r.crossed
	return err
}

// cross runs a transaction that writes on two nodes.
func cross(ctx context.Context, admin *pgx.Conn, url string) (r result, err error) {
	defer func() { err = errors.Join(err, remove(ctx, admin)) }()
	if err := prepare(ctx, admin, 2); err != nil {
		return r, err
	}
	seen := newRemote()
	pool, err := seen.pool(ctx, url)
	if err != nil {
		return r, err
	}
	defer pool.Close()
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for i := range 2 {
			if _, err := tx.Exec(ctx, "insert into "+name(i)+".orders (id) values ($1)", i); err != nil {
				return err
			}
		}
		return nil
	})
	return result{prepared: seen.prepared, crossed: seen.crossed}, err
}
