// Page serves the web page of a queue, in a process of its own or beside the application's other pages. Whoever has the
// password may act; everybody else may read, without payloads.
//
//	DATABASE_URL=postgres://localhost/shop PAGE_PASSWORD=… go run -C examples ./page -addr localhost:8080
package main

import (
	"context"
	"crypto/subtle"
	"flag"
	"log"
	"net/http"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqweb"
)

func main() {
	addr := flag.String("addr", "localhost:8080", "where to listen")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	check(err)
	defer pool.Close()
	q, err := onceq.New(pool, nil)
	check(err)
	check(q.Check(ctx))

	mux := http.NewServeMux()
	page, err := mount(mux, q, pool, os.Getenv("PAGE_PASSWORD"))
	check(err)
	server := &http.Server{Addr: *addr, Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	server.RegisterOnShutdown(page.Close) // otherwise Shutdown would wait for the streams of live updates
	context.AfterFunc(ctx, func() { _ = server.Shutdown(context.Background()) })
	log.Printf("http://%s/admin/onceq/", *addr)
	if err := server.ListenAndServe(); err != http.ErrServerClosed {
		log.Fatal(err)
	}
}

// mount puts the page into the application's router.
func mount(mux *http.ServeMux, q *onceq.Queue, pool *pgxpool.Pool, password string) (*onceqweb.Handler, error) {
	page, err := onceqweb.New(q, pool, onceqweb.Config{
		Title: "shop, production",
		Viewer: func(r *http.Request) (onceqweb.Viewer, error) {
			// An application has sessions; this program has a password.
			name, given, _ := r.BasicAuth()
			if password == "" || name == "" || subtle.ConstantTimeCompare([]byte(given), []byte(password)) == 0 {
				return onceqweb.Viewer{}, nil
			}
			return onceqweb.Viewer{Name: name, Act: true, Payloads: true}, nil
		},
		Mask: func(_, _, text string) string { return cards.ReplaceAllString(text, "•••• $1") },
	})
	if err != nil {
		return nil, err
	}
	mux.Handle("/admin/onceq/", http.StripPrefix("/admin/onceq", page))
	mux.HandleFunc("/admin/onceq/login", func(w http.ResponseWriter, r *http.Request) {
		if _, _, ok := r.BasicAuth(); !ok {
			w.Header().Set("WWW-Authenticate", `Basic realm="onceq"`)
			http.Error(w, "name and password", http.StatusUnauthorized)
			return
		}
		http.Redirect(w, r, "/admin/onceq/", http.StatusSeeOther)
	})
	return page, nil
}

// cards are the numbers of payment cards, of which the last four digits are shown.
var cards = regexp.MustCompile(`\b(?:\d[ -]?){12}(\d{4})\b`)

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
