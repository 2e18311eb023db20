// Page serves the web page of a queue, in a process of its own or beside the application's other pages. Whoever has the
// password may read and act; nobody else sees anything.
//
//	DATABASE_URL=postgres://localhost/shop PAGE_PASSWORD=… go run -C examples ./page -addr localhost:8080
package main

import (
	"context"
	"crypto/subtle"
	"errors"
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
	log.Printf("http://%s/admin/onceq/login", *addr)
	if err := server.ListenAndServe(); err != http.ErrServerClosed {
		log.Fatal(err)
	}
}

// mount puts the page into the application's router.
func mount(mux *http.ServeMux, q *onceq.Queue, pool *pgxpool.Pool, password string) (*onceqweb.Handler, error) {
	// An application has sessions, and people with rights; this program has one password.
	signedIn := func(r *http.Request) (name string, ok bool) {
		name, given, _ := r.BasicAuth()
		return name, name != "" && password != "" && subtle.ConstantTimeCompare([]byte(given), []byte(password)) == 1
	}
	page, err := onceqweb.New(q, pool, onceqweb.Config{
		Title: "shop, production",
		Viewer: func(r *http.Request) (onceqweb.Viewer, error) {
			name, ok := signedIn(r)
			if !ok {
				return onceqweb.Viewer{}, errors.New("no name, or not the password")
			}
			return onceqweb.Viewer{Name: name, Payloads: true, Act: true}, nil
		},
		Mask: func(_, _, text string) string { return cards.ReplaceAllString(text, "•••• $1") },
	})
	if err != nil {
		return nil, err
	}
	mux.Handle("/admin/onceq/", http.StripPrefix("/admin/onceq", page))
	mux.HandleFunc("/admin/onceq/login", func(w http.ResponseWriter, r *http.Request) {
		if _, ok := signedIn(r); !ok { // also with a wrong password: the browser asks again
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
