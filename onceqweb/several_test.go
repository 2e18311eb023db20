package onceqweb_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqweb"
	"github.com/onceq/onceq/queuetest"
)

// several serves pages below a prefix.
func several(t *testing.T, pages map[string]*onceqweb.Handler) *site {
	t.Helper()
	all, err := onceqweb.NewSeveral("shop & co", pages)
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/admin/onceq/", http.StripPrefix("/admin/onceq", all))
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		all.Close()
		server.Close()
	})
	return &site{t: t, base: server.URL + "/admin/onceq/"}
}

func pageOf(t *testing.T, db *queuetest.DB, pool *pgxpool.Pool, viewer func(*http.Request) (onceqweb.Viewer, error)) *onceqweb.Handler {
	t.Helper()
	page, err := onceqweb.New(db.Queue, pool, onceqweb.Config{Viewer: viewer, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	page.Patient()
	return page
}

func TestSeveral(t *testing.T) {
	t.Parallel()
	eu, us := newDB(t), newDB(t)
	for range 3 {
		_, err := eu.Queue.Enqueue(t.Context(), eu.Pool, onceq.Job{Kind: "mail", Payload: 1})
		require.NoError(t, err)
	}
	r, err := us.Queue.Enqueue(t.Context(), us.Pool, onceq.Job{Kind: "charge", Payload: 1, Delay: time.Hour})
	require.NoError(t, err)
	onlyUS := func(r *http.Request) (onceqweb.Viewer, error) {
		if r.Header.Get("X-User") != "" {
			return onceqweb.Viewer{}, errors.New("not yours")
		}
		return onceqweb.Viewer{Name: "ada@example.com", Act: true}, nil
	}
	s := several(t, map[string]*onceqweb.Handler{"eu-1": pageOf(t, eu, eu.Pool, onceqweb.Everybody), "us": pageOf(t, us, us.Pool, onlyUS)})

	page := s.get("", http.StatusOK)
	require.Contains(t, page, `<a href="./eu-1/jobs?state=waiting">3</a>`)
	require.Contains(t, page, `<a href="./us/jobs?state=delayed">1</a>`)
	require.Contains(t, page, "shop &amp; co")
	page = s.get("us/jobs", http.StatusOK)
	require.Contains(t, page, "charge")
	require.NotContains(t, page, "mail")
	require.Contains(t, page, `<a href="./../eu-1/">eu-1</a>`)
	require.NotContains(t, page, `<a href="./../us/">`)
	s.get("static/style.css", http.StatusOK)
	s.get("eu-1/static/style.css", http.StatusOK)
	for _, path := range []string{"asia/", "asia", "jobs", "static/nothing"} {
		s.get(path, http.StatusNotFound)
	}

	// An action on one of them, and its trail.
	below := &site{t: t, base: s.base + "us/"}
	below.act("do", "cancel", "id", fmt.Sprint(r.ID))
	require.Contains(t, below.get("audit", http.StatusOK), "ada@example.com")

	// Without the slash at the end the browser is sent to the page.
	asked, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.base+"us", nil)
	require.NoError(t, err)
	answer, _ := s.do(asked)
	to, err := answer.Request.URL.Parse(answer.Header.Get("Location"))
	require.NoError(t, err)
	require.Equal(t, s.base+"us/", to.String())

	// Who may not see one of them does not learn its name.
	for _, path := range []string{"", "eu-1/", "eu-1/jobs"} {
		asked, err = http.NewRequestWithContext(t.Context(), http.MethodGet, s.base+path, nil)
		require.NoError(t, err)
		asked.Header.Set("X-User", "bob")
		answer, page = s.do(asked)
		require.Equal(t, http.StatusOK, answer.StatusCode)
		require.Contains(t, page, "eu-1")
		require.NotContains(t, page, "us/")
	}
	none := func(*http.Request) (onceqweb.Viewer, error) { return onceqweb.Viewer{}, errors.New("no") }
	several(t, map[string]*onceqweb.Handler{"eu": pageOf(t, eu, eu.Pool, none)}).get("", http.StatusForbidden)
	asked, err = http.NewRequestWithContext(t.Context(), http.MethodPost, s.base, strings.NewReader("x=1"))
	require.NoError(t, err)
	answer, _ = s.do(asked)
	require.Equal(t, http.StatusMethodNotAllowed, answer.StatusCode)
}

// A database that accepts connections and says nothing, and one that is gone: the page comes, and says so.
func TestSeveral_OneIsDown(t *testing.T) {
	t.Parallel()
	db, gone := newDB(t), newDB(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	pool, err := pgxpool.New(t.Context(), "postgres://u@"+silent.Addr().String()+"/d?sslmode=disable&connect_timeout=3600")
	require.NoError(t, err)
	hangs := pageOf(t, db, pool, onceqweb.Everybody)
	hangs.Reads(time.Hour) // the overview does not wait for it
	t.Cleanup(func() {
		require.NoError(t, silent.Close()) // which ends the connections
		pool.Close()
	})
	lost, err := pgxpool.NewWithConfig(t.Context(), gone.Pool.Config())
	require.NoError(t, err)
	fails := pageOf(t, gone, lost, onceqweb.Everybody)
	fails.ShowsState(0)
	s := several(t, map[string]*onceqweb.Handler{"up": pageOf(t, db, db.Pool, onceqweb.Everybody), "hangs": hangs, "fails": fails})
	for range 2 {
		page := s.get("", http.StatusOK)
		require.Contains(t, page, `<a href="./up/jobs?state=waiting">0</a>`)
		require.Contains(t, page, "It has not answered yet")
		require.Equal(t, 1, strings.Count(page, "does not answer"))
	}
	require.Contains(t, s.get("", http.StatusOK), `<a href="./fails/jobs?state=waiting">0</a>`)
	lost.Close()
	require.Eventually(t, func() bool { return strings.Count(s.get("", http.StatusOK), "does not answer") == 2 }, time.Minute, 50*time.Millisecond)
	require.Contains(t, s.get("", http.StatusOK), `<a href="./fails/jobs?state=waiting">0</a>`, "the last figures")
}

// A database of which Health does not know all yet is not said to be good.
func TestSeveral_HealthTakesLong(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := several(t, map[string]*onceqweb.Handler{"eu": pageOf(t, db, db.Pool, onceqweb.Everybody)})
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `lock table onceq.job_members`) // Health reads it, and the figures do not
	require.NoError(t, err)
	require.Eventually(t, func() bool { return strings.Contains(s.get("", http.StatusOK), ">not all asked yet</td>") }, time.Minute, time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Eventually(t, func() bool { return strings.Contains(s.get("", http.StatusOK), ">good</td>") }, time.Minute, time.Millisecond)
}

func TestSeveral_RefusesWhatCannotWork(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	page := pageOf(t, db, db.Pool, onceqweb.Everybody)
	prefixed, err := onceqweb.New(db.Queue, db.Pool, onceqweb.Config{Viewer: onceqweb.Everybody, Prefix: "/a"})
	require.NoError(t, err)
	for _, pages := range []map[string]*onceqweb.Handler{nil, {"": page}, {"a/b": page}, {"..": page}, {"static": page}, {"a b": page}, {"a": nil}, {"a": prefixed}} {
		_, err := onceqweb.NewSeveral("shop", pages)
		require.ErrorContains(t, err, "onceqweb: ")
	}
}
