// Servers spreads tenants over several database servers. Each server has its own tables and its own queue; a tenant lives on
// one of them, and moves with its jobs and their keys. docs/run/growing.md says when this is worth it.
//
//	SERVERS='a=postgres://a/shop b=postgres://b/shop' go run -C examples ./servers
//	SERVERS=… go run -C examples ./servers move acme a b
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/onceqweb"
)

type order struct {
	Tenant string `json:"tenant"`
	ID     int    `json:"id"`
}

// The scope of a job's key is the tenant: so its jobs can be found. A job that moves needs a key.
var ship = onceq.Kind[order]{
	Name:  "ship",
	Scope: func(o order) string { return o.Tenant },
	Key:   func(o order) string { return fmt.Sprint("ship:", o.ID) },
}

// tables are on every server, beside those of the application and of onceq. A deploy makes them.
const tables = `
create table tenants (
  name      text primary key,
  moved_to  text, -- the server on which it lives now; null: this one
  came_from text  -- the server whose keys still count; null: none
);
create table leaving (id bigint primary key, tenant text not null, job jsonb not null); -- taken out of this queue, on the way
create table shipped (tenant text, id int)`

func main() {
	ctx := context.Background()
	f, err := open(ctx, strings.Fields(os.Getenv("SERVERS"))...)
	check(err)
	defer f.close()
	if args := os.Args[1:]; len(args) == 4 && args[0] == "move" {
		begun, err := f.move(ctx, args[1], f.named[args[2]], f.named[args[3]])
		check(err)
		fmt.Println("moved;", begun, "jobs had begun, and end where they are")
		return
	}
	check(f.serve(ctx, "localhost:8080"))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// serve works all servers in one process, and has one page for them.
func (f *fleet) serve(ctx context.Context, address string) error {
	var parts []onceq.Part
	for _, s := range f.servers {
		worker, err := onceq.NewWorker(s.queue, onceq.WorkerConfig{}, s.ships())
		if err != nil {
			return err
		}
		reaper, err := onceq.NewReaper(s.queue, onceq.ReaperConfig{})
		if err != nil {
			return err
		}
		parts = append(parts, worker, reaper)
	}
	site, err := f.site(onceqweb.Everybody)
	if err != nil {
		return err
	}
	server := &http.Server{Addr: address, Handler: site, ReadHeaderTimeout: 5 * time.Second}
	server.RegisterOnShutdown(site.Close)
	return onceq.Serve(ctx, append(parts, onceqhttp.Part(server, 0))...)
}

func (s *server) ships() onceq.Handler {
	return ship.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, o order) error {
		_, err := tx.Exec(ctx, `insert into shipped values ($1, $2)`, o.Tenant, o.ID)
		return err
	})
}

// site has a page that sums up all servers, and below it the page of each.
func (f *fleet) site(viewer func(*http.Request) (onceqweb.Viewer, error)) (*onceqweb.Several, error) {
	pages := make(map[string]*onceqweb.Handler)
	for _, s := range f.servers {
		page, err := onceqweb.New(s.queue, s.pool, onceqweb.Config{Title: "shop", Viewer: viewer})
		if err != nil {
			return nil, err
		}
		pages[s.name] = page
	}
	return onceqweb.NewSeveral("shop", pages)
}

// fleet is all servers. The first one has a row for every tenant.
type fleet struct {
	servers []*server
	named   map[string]*server
}

type server struct {
	name  string
	pool  *pgxpool.Pool
	queue *onceq.Queue
}

// open connects to servers, each of which is given as name=url.
func open(ctx context.Context, servers ...string) (*fleet, error) {
	f := &fleet{named: make(map[string]*server)}
	for _, server := range servers {
		if err := f.add(ctx, server); err != nil {
			f.close()
			return nil, err
		}
	}
	if len(f.servers) == 0 {
		return nil, errors.New("set SERVERS")
	}
	return f, nil
}

func (f *fleet) add(ctx context.Context, given string) error {
	name, url, _ := strings.Cut(given, "=")
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	s := &server{name: name, pool: pool}
	f.servers, f.named[name] = append(f.servers, s), s
	s.queue, err = onceq.New(pool, nil)
	return err
}

func (f *fleet) close() {
	for _, s := range f.servers {
		s.pool.Close()
	}
}
