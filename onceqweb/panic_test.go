package onceqweb_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqweb"
)

type badLog struct{ slog.Handler }

func (badLog) Handle(context.Context, slog.Record) error { panic("boom") }

// A panic of Viewer refuses the request, and one of Mask hides the text.
func TestPanics(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: "visa-4242"})
	require.NoError(t, err)
	at := fmt.Sprintf("job?id=%d", r.ID)
	s := serve(t, db, onceqweb.Config{Viewer: func(*http.Request) (onceqweb.Viewer, error) { panic("boom") }})
	s.get("jobs", http.StatusForbidden)
	require.Contains(t, s.log.String(), "panic_test.go")
	s = serve(t, db, onceqweb.Config{Viewer: may(false, true), Mask: func(_, _, _ string) string { panic("boom") }})
	page := s.get(at, http.StatusOK)
	require.NotContains(t, page, "visa-4242")
	require.Contains(t, page, "hidden, because Config.Mask panicked")
	bad, err := onceqweb.New(db.Queue, db.Pool, onceqweb.Config{Logger: slog.New(badLog{slog.DiscardHandler}), Viewer: func(*http.Request) (onceqweb.Viewer, error) {
		return onceqweb.Viewer{}, http.ErrNoCookie
	}})
	require.NoError(t, err)
	answer := httptest.NewRecorder()
	bad.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/jobs", nil))
	require.Equal(t, http.StatusForbidden, answer.Code)
}
