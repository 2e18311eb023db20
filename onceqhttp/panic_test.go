package onceqhttp_test

import (
	"bytes"
	"context"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

// lockedLog is where a server logs.
type lockedLog struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Write(p)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.String()
}

type badLog struct{ slog.Handler }

func (badLog) Handle(context.Context, slog.Record) error { panic("boom") }

// A panic in a function of the application's is the server's to log, as one of a handler is. Before the handler is called nothing is
// written. After it the key is uncertain, and with HandlerTx nothing was done.
func TestPanics(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for name, c := range map[string]struct {
		cfg     onceqhttp.Config
		late    bool // the handler has run by then
		handler http.Handler
	}{
		"Principal":    {cfg: onceqhttp.Config{Principal: func(*http.Request) (string, error) { panic("boom") }}},
		"Route":        {cfg: onceqhttp.Config{Route: func(*http.Request) string { panic("boom") }}},
		"Fingerprint":  {cfg: onceqhttp.Config{Fingerprint: func(*http.Request, []byte) any { panic("boom") }}},
		"Outcome":      {late: true, cfg: onceqhttp.Config{Outcome: func(int) onceqhttp.Outcome { panic("boom") }}},
		"StoredHeader": {late: true, cfg: onceqhttp.Config{StoredHeader: func(string) bool { panic("boom") }}},
		"Handler":      {late: true, handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("boom") })},
	} {
		t.Run(name, func(t *testing.T) {
			called := newRuns()
			if c.handler == nil {
				c.handler = called.answering(http.StatusOK)
			}
			c.cfg.Policy = onceq.Hold()
			m := middleware(t, db.Queue, c.cfg)
			tx := m.HandlerTx(db.Pool, func(w http.ResponseWriter, r *http.Request, _ pgx.Tx) error {
				c.handler.ServeHTTP(w, r)
				return nil
			})
			for pattern, h := range map[string]http.Handler{"/plain": m.Handler(c.handler), "/tx": tx} {
				var logged lockedLog
				mux := http.NewServeMux()
				mux.Handle(pattern, h)
				s := httptest.NewUnstartedServer(mux)
				s.Config.ErrorLog = log.New(&logged, "", 0)
				s.Start()
				t.Cleanup(s.Close)
				_, err := ask(t, "POST", s.URL+pattern, name, "{}")
				require.Error(t, err)
				eventually(t, "the server has logged it", func() bool { return bytes.Contains([]byte(logged.String()), []byte("panic_test.go")) })
				want := 0
				if c.late && pattern == "/plain" {
					want = 1
				}
				require.Equal(t, want, sqlOne[int](t, db, `select count(*) from onceq.job_fences where key = $1 and scope like '%' || $2 || '%'`, name, pattern), pattern)
			}
			if !c.late {
				require.Zero(t, called.count())
			}
		})
	}
	t.Run("Logger", func(t *testing.T) {
		m := middleware(t, db.Queue, onceqhttp.Config{Logger: slog.New(badLog{slog.DiscardHandler}), Principal: func(*http.Request) (string, error) {
			return "", http.ErrNoCookie
		}})
		s := serve(t, "/", m.Handler(newRuns().answering(http.StatusOK)))
		require.Equal(t, http.StatusForbidden, post(t, s.URL, "key", "{}").status)
	})
}
