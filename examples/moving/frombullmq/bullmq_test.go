package frombullmq

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// A job that is handed over twice, and that a new producer enqueues as well, is one job.
func TestBothSideBySide(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	server := httptest.NewServer(Accept(db.Queue, db.Pool))
	defer server.Close()
	post := func(body string) int {
		response, err := http.Post(server.URL, "application/json", strings.NewReader(body))
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode
	}
	require.Equal(t, http.StatusAccepted, post(`{"userId": 42}`))
	require.Equal(t, http.StatusAccepted, post(`{"userId": 42}`))
	require.Equal(t, http.StatusBadRequest, post(`{`))
	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return enqueueAfter(ctx, db.Queue, tx) }))
	sent := 0
	require.Len(t, db.Drain(handler(func(_ context.Context, user int, _ string) error {
		require.Equal(t, 42, user)
		sent++
		return nil
	})), 1)
	require.Equal(t, 1, sent)
}
