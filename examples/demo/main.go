//go:build unix

// Command demo is a small application, and everything that can go wrong around one. People sign up over HTTP. Each sign-up
// stores a user and enqueues, in the same transaction, a welcome e-mail and a charge. Four worker processes send the
// e-mails to an SMTP server, and the charges to an HTTP service with an Idempotency-Key. At the same time clients submit
// twice, give up and retry. Providers are slow, refuse, and break connections after they did what they were asked. Workers
// are killed, frozen and cut off from the database. At the end a ledger counts e-mails and charges for each user. There
// must be exactly one of each; otherwise the exit status is not 0.
//
//	go run -C examples ./demo [-seed n] [-signups n] [-workers n] [-ui]
//
// While it runs, a web page shows the queues, on an address that is printed at the start. With -ui it stays at the end, until
// Ctrl-C.
//
// It starts a Postgres of its own, or uses the database of DATABASE_URL, in the schemas onceq_demo and demo.
//
// Where to look: app.go enqueues in a transaction. worker.go has the handlers. provider.go and clients.go are the outside
// world. fleet.go and chaos.go are the processes and their faults. ledger.go counts.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/onceqweb"
)

// demo is everything that runs in this process.
type demo struct {
	seed    uint64
	began   time.Time
	pool    *pgxpool.Pool
	q       *onceq.Queue
	app     *app
	mail    *mailServer
	bank    *bank
	fleet   *fleet
	chaos   *chaos
	ledger  *ledger
	clients *clients

	printing sync.Mutex
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == "worker" {
		if err := runWorker(); err != nil {
			fmt.Fprintln(os.Stderr, "demo worker:", err)
			os.Exit(1)
		}
		return
	}
	seed := flag.Uint64("seed", rand.Uint64()%1_000_000, "of the clients', the providers' and the chaos's choices")
	signups := flag.Int("signups", 0, "how many lines of the file to submit; 0 for all")
	workers := flag.Int("workers", 4, "how many worker processes")
	limit := flag.Duration("duration", 3*time.Minute, "give up after this")
	ui := flag.Bool("ui", false, "keep the web page open at the end, until Ctrl-C")
	verbose := flag.Bool("v", false, "show the workers' logs")
	flag.Parse()

	interrupted, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ctx, cancel := context.WithTimeout(interrupted, *limit)
	stay := func() {}
	if *ui {
		stay = func() { <-interrupted.Done() }
	}
	err := run(ctx, *seed, *signups, *workers, *verbose, stay)
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		err = errors.New("stopped before the end")
	}
	cancel()
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// run runs the demonstration, and calls stay at the end, while the page is still there.
func run(ctx context.Context, seed uint64, n, workers int, verbose bool, stay func()) (err error) {
	d := &demo{seed: seed, began: time.Now(), ledger: newLedger()}
	lines, err := readSignups(n)
	if err != nil {
		return err
	}
	fmt.Printf("onceq's demonstration with seed %d: %d lines of sign-ups, %d worker processes, leases of %s\n", seed, len(lines), workers, lease)

	url, stopServer, err := database(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopServer()) }()
	if err := recreate(ctx, url); err != nil {
		return err
	}
	if d.pool, err = connect(ctx, url, "application"); err != nil {
		return err
	}
	defer d.pool.Close()
	if d.q, err = onceq.New(d.pool, &onceq.Config{Schema: schema, Logger: logger(verbose)}); err != nil {
		return err
	}

	// The outside world, and the application.
	d.mail = &mailServer{seed: seed, handedIn: make(map[string]int), accepted: make(map[string]int), delivered: make(map[string]int)}
	d.bank = &bank{seed: seed, calls: make(map[int64]int), byKey: make(map[string]*charge), charges: make(map[int64]int)}
	d.app = &app{pool: d.pool, q: d.q, seed: seed}
	smtpListener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer func() { _ = smtpListener.Close() }()
	go d.mail.serve(smtpListener)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /signups", d.app)
	mux.Handle("GET /messages/{id}", d.mail)
	mux.Handle("POST /charges", d.bank)
	page, err := onceqweb.New(d.q, d.pool, onceqweb.Config{
		Title: "onceq's demonstration", Logger: logger(verbose),
		Viewer: func(*http.Request) (onceqweb.Viewer, error) { // it listens on this machine alone, and its people are made up
			return onceqweb.Viewer{Name: "you", Act: true, Payloads: true}, nil
		},
	})
	if err != nil {
		return err
	}
	defer page.Close()
	mux.Handle("/onceq/", http.StripPrefix("/onceq", page))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = server.Serve(listener) }()
	defer func() { _ = server.Close() }()
	web := "http://" + listener.Addr().String()
	fmt.Printf("the queues are shown on %s/onceq/\n\n", web)

	// The workers, and their faults.
	where := places{Database: url, SMTP: smtpListener.Addr().String(), Mail: web, Bank: web, Verbose: verbose}
	if d.fleet, err = newFleet(where, d.ledger.hear); err != nil {
		return err
	}
	d.fleet.start(workers)
	d.chaos = &chaos{rng: rand.New(rand.NewPCG(seed, 1)), fleet: d.fleet, pool: d.pool, say: d.say, missing: d.missing}
	chaosCtx, endChaos := context.WithCancel(ctx)
	var background sync.WaitGroup
	background.Go(func() { d.chaos.run(chaosCtx) })
	d.clients = &clients{url: web + "/signups", seed: seed, say: d.say, missing: d.missing}
	showCtx, endShow := context.WithCancel(ctx)
	background.Go(func() { d.show(showCtx) })
	defer func() { // in this order, even if something failed before
		endChaos()
		endShow()
		background.Wait()
		d.fleet.stop(0)
	}()

	wanted := d.clients.submit(ctx, lines)
	endChaos()
	if ctx.Err() == nil {
		d.say("every sign-up was answered, and the chaos is over; the rest of the work")
	}
	if err := d.drain(ctx); err != nil && ctx.Err() == nil {
		return err
	}
	endShow()
	background.Wait()
	d.fleet.stop(10 * time.Second)
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err()
	}

	wrong, err := d.close(context.WithoutCancel(ctx), os.Stdout, wanted)
	if err != nil {
		return err
	}
	defer func() {
		if ctx.Err() == nil {
			fmt.Printf("\nThe queues are shown on %s/onceq/ as long as this runs.\n", web)
			stay()
		}
	}()
	if ctx.Err() != nil {
		wrong = append([]string{"the time was up before all the work was done; -duration gives more"}, wrong...)
	}
	if m := d.missing(); m != "" {
		wrong = append(wrong, "the chaos did not get to show: "+m)
	}
	if d.fleet.fallen > 0 {
		fmt.Printf("\n%d workers ended by themselves and were replaced; see above.\n", d.fleet.fallen)
	}
	if len(wrong) > 0 {
		fmt.Println("\nNOT exactly once:")
		for _, w := range wrong {
			fmt.Println("  " + w)
		}
		return fmt.Errorf("%d things are wrong; run it again with -seed %d", len(wrong), seed)
	}
	fmt.Println("\nExactly one e-mail, one charge and one receipt for each user.")
	return nil
}

// database returns the database to use, and a function to call at the end.
func database(ctx context.Context) (string, func() error, error) {
	if url := os.Getenv("DATABASE_URL"); url != "" {
		fmt.Println("the database of DATABASE_URL, where the schemas onceq_demo and demo are created again and stay")
		return url, func() error { return nil }, nil
	}
	server, err := pgserver.Start(ctx, pgserver.Options{Durable: true})
	if err != nil {
		return "", nil, err
	}
	if server.Ours() {
		fmt.Println("a Postgres of our own, which goes away at the end")
	} else {
		fmt.Printf("the server of %s, where the schemas onceq_demo and demo are created again and stay\n", pgserver.EnvURL)
	}
	return server.URL(), server.Stop, nil
}

// mine marks the schemas of this program, so that no others are dropped.
const mine = "made by onceq's demonstration, which drops it at its next start"

// recreate drops and creates the schemas onceq_demo and demo.
func recreate(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for _, name := range []string{schema, "demo"} {
		var there, ours bool
		if err := conn.QueryRow(ctx, `
			select count(*) > 0, coalesce(bool_and(obj_description(oid, 'pg_namespace') = $2), false)
			  from pg_namespace where nspname = $1`, name, mine).Scan(&there, &ours); err != nil {
			return err
		}
		if there && !ours {
			return fmt.Errorf("there is a schema %s in this database that is not this program's: drop it or use another database", name)
		}
		// Neither the name nor the comment needs quoting beyond this.
		if _, err := conn.Exec(ctx, "drop schema if exists "+name+" cascade; create schema "+name+
			"; comment on schema "+name+" is '"+strings.ReplaceAll(mine, "'", "''")+"'"); err != nil {
			return err
		}
	}
	if err := migrations.Up(ctx, conn, schema); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, tables); err != nil {
		return err
	}
	var version, fsync, commit string
	if err := conn.QueryRow(ctx, `select current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')`).
		Scan(&version, &fsync, &commit); err != nil {
		return err
	}
	fmt.Printf("PostgreSQL %s, fsync %s, synchronous_commit %s\n\n", version, fsync, commit)
	return nil
}

// live counts the jobs that are not finished.
func (d *demo) live(ctx context.Context) (waiting, retrying, running int, err error) {
	stats, err := onceqops.New(d.q).Stats(ctx)
	for _, s := range stats {
		waiting, retrying, running = waiting+s.Waiting+s.Delayed, retrying+s.Retrying, running+s.Running
	}
	return waiting, retrying, running, err
}

// drain waits until no job is left.
func (d *demo) drain(ctx context.Context) error {
	for failures := 0; ; {
		waiting, retrying, running, err := d.live(ctx)
		switch {
		case err == nil && waiting+retrying+running == 0:
			return nil
		case err != nil:
			if failures++; failures > 20 { // a few, until the pool has replaced the sessions that were ended
				return err
			}
		}
		if !pause(ctx, 100*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// show prints a line each second.
func (d *demo) show(ctx context.Context) {
	for pause(ctx, time.Second) {
		waiting, retrying, running, err := d.live(ctx)
		var users int
		if err == nil {
			err = d.pool.QueryRow(ctx, `select count(*) from demo.users`).Scan(&users)
		}
		if err != nil {
			continue // the session was just ended
		}
		d.say("%4d submitted, %3d users, jobs: %3d waiting %2d running %2d to retry %3d done; %d killed, %d taken over, %d refused",
			d.clients.sent.Load(), users, waiting, running, retrying, max(0, 2*users-waiting-retrying-running),
			d.chaos.killed.Load(), d.chaos.takenOver.Load(), d.ledger.count(string(onceq.EventStale)))
	}
}

func (d *demo) say(format string, args ...any) {
	d.printing.Lock()
	defer d.printing.Unlock()
	fmt.Printf("%5.1fs  %s\n", time.Since(d.began).Seconds(), fmt.Sprintf(format, args...))
}
