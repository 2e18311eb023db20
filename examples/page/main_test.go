package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

func TestPage(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	job, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "charge", Payload: map[string]string{"card": "4000 0000 0000 4242"}})
	require.NoError(t, err)
	mux := http.NewServeMux()
	page, err := mount(mux, db.Queue, db.Pool, "secret")
	require.NoError(t, err)
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		page.Close()
		server.Close()
	})
	id := strconv.FormatInt(job.ID, 10)
	get := func(name, password string, status int) string {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/admin/onceq/job?id="+id, nil)
		require.NoError(t, err)
		if name != "" {
			r.SetBasicAuth(name, password)
		}
		return send(t, r, status)
	}
	cancel := func(password string, status int) {
		t.Helper()
		form := url.Values{"do": {"cancel"}, "id": {id}, "why": {"asked for"}}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/admin/onceq/act", strings.NewReader(form.Encode()))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.SetBasicAuth("ada", password)
		send(t, r, status)
	}
	for _, given := range [][2]string{{"", ""}, {"", "secret"}, {"ada", ""}, {"ada", "wrong"}} {
		require.Equal(t, "You may not see this page.\n", get(given[0], given[1], http.StatusForbidden))
	}
	require.Contains(t, get("ada", "secret", http.StatusOK), "•••• 4242")
	require.NotContains(t, get("ada", "secret", http.StatusOK), "4000")
	for password, status := range map[string]int{"": http.StatusUnauthorized, "wrong": http.StatusUnauthorized, "secret": http.StatusOK} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/admin/onceq/login", nil)
		require.NoError(t, err)
		r.SetBasicAuth("ada", password)
		send(t, r, status)
	}
	cancel("wrong", http.StatusForbidden)
	cancel("secret", http.StatusOK) // the page that follows
	j, err := db.Queue.Get(t.Context(), db.Pool, job.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateCancelled, j.State)
}

func send(t *testing.T, r *http.Request, status int) string {
	t.Helper()
	answer, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Equal(t, status, answer.StatusCode, string(text))
	return string(text)
}
