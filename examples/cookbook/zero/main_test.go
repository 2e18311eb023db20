package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// While nothing is due, no statement comes to the database: nobody is connected, and nobody connects.
func TestSleeper_SendsNothing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	enqueue := func(to string, delay time.Duration) {
		job := mail.Job(to)
		job.Delay = delay
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
		require.NoError(t, err)
		db.Pool.Reset() // the test's own connection is none either
	}
	enqueue("ada", 0)
	enqueue("bob", time.Hour)
	mailed, slept := make(chan string, 9), make(chan time.Duration, 9)
	s := &sleeper{url: db.URL, called: make(chan struct{}, 1), sleeps: func(d time.Duration) { slept <- d }, handlers: []onceq.Handler{
		mail.Handle(func(_ context.Context, _ *onceq.Lease, to string) error { mailed <- to; return nil }),
	}}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.Run(ctx) }()
	require.Equal(t, "ada", <-mailed)
	next := <-slept
	require.Greater(t, next, time.Minute)
	require.LessOrEqual(t, next, time.Hour)

	cfg, err := pgx.ParseConfig(db.URL)
	require.NoError(t, err)
	name := cfg.Database
	cfg.Database = "postgres"
	server, err := pgx.ConnectConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer func() { _ = server.Close(context.Background()) }()
	sessions := func() (now, ever int) {
		require.NoError(t, server.QueryRow(t.Context(), `
			select (select count(*) from pg_stat_activity where datname = $1 and backend_type = 'client backend'),
			       (select sessions from pg_stat_database where datname = $1)`, name).Scan(&now, &ever))
		return now, ever
	}
	require.Eventually(t, func() bool { now, _ := sessions(); return now == 0 }, time.Minute, 50*time.Millisecond)
	_, before := sessions()
	require.Positive(t, before)
	for range 20 {
		time.Sleep(time.Second)
		now, ever := sessions()
		require.Zero(t, now)
		require.Equal(t, before, ever)
	}

	enqueue("eve", 0)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", nil))
	require.Equal(t, "eve", <-mailed)
	stop()
	require.NoError(t, <-ended)
	require.Empty(t, mailed)
	require.Len(t, slept, 1)
}
