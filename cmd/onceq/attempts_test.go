package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// A job says who ran the attempts that failed, and where it runs now.
func TestJobsShow_SaysWhoRunsIt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema(), queuetest.Config(onceq.Config{Version: "v1.4.2"}))
	host, err := os.Hostname()
	require.NoError(t, err)
	failing := onceq.Kind[int]{Name: "failing", MaxAttempts: 1}
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, failing.Job(1))
	require.NoError(t, err)
	db.Drain(failing.Handle(func(context.Context, *onceq.Lease, int) error { return errors.New("no") }))
	who := fmt.Sprintf("in process %d on %s, version v1.4.2: no", os.Getpid(), host)
	out := fine(t, db.URL, "jobs", "show", "1", "--wide")
	require.Regexp(t, `error +attempt 1, \S+ \S+( \S+)?, ran for [0-9.µms]+ `, out)
	require.Contains(t, out, who)
	job := asJSON(t, db.URL, "jobs", "show", "1")
	require.NotContains(t, job, "runs")
	failed := job["errors"].([]any)[0].(map[string]any)
	require.Equal(t, []any{host, float64(os.Getpid()), "v1.4.2"}, []any{failed["host"], failed["process"], failed["version"]})
	require.Positive(t, failed["took"])

	_, err = db.Queue.Enqueue(t.Context(), db.Pool, failing.Job(1))
	require.NoError(t, err)
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "default"})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	require.Regexp(t, `(?m)^runs +it runs in a process that leaves no row in workers`, fine(t, db.URL, "jobs", "show", "2", "--wide"))
	runs := asJSON(t, db.URL, "jobs", "show", "2")["runs"].(map[string]any)
	require.Equal(t, "running", runs["cause"])
}

// Errors by the process of the latest attempt, with its version of the application.
func TestJobsErrors_ByWorker(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema(), queuetest.Config(onceq.Config{Version: "v1.4.2"}))
	host, err := os.Hostname()
	require.NoError(t, err)
	failing := onceq.Kind[int]{Name: "failing", MaxAttempts: 1}
	for n := range 2 {
		_, err = db.Queue.Enqueue(t.Context(), db.Pool, failing.Job(n))
		require.NoError(t, err)
	}
	db.Drain(failing.Handle(func(context.Context, *onceq.Lease, int) error { return errors.New("no") }))
	kill(t, db, 1)
	groups := asJSON(t, db.URL, "jobs", "errors", "--by", "worker")["errors"].([]any)
	require.Len(t, groups, 2)
	require.Equal(t, fmt.Sprintf("process %d on %s, version v1.4.2", os.Getpid(), host), groups[0].(map[string]any)["name"])
	require.EqualValues(t, 2, groups[0].(map[string]any)["jobs"])
	require.NotContains(t, groups[1], "name", "who ran that attempt is not known")
	require.Regexp(t, `WORKER`, fine(t, db.URL, "jobs", "errors", "--by", "worker"))
}
