package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func TestErrors_AreGrouped(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	require.Contains(t, fine(t, db.URL, "jobs", "errors"), "No job has failed")
	kill(t, db, 3)
	for n := range 2 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, charges.Job(1000+n))
		require.NoError(t, err)
	}
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"billing": {}}},
		charges.Handle(func(_ context.Context, l *onceq.Lease, order int) error {
			return onceq.RetryAfter(time.Hour, fmt.Errorf("503 for order %d", order))
		}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))

	out := strings.Split(fine(t, db.URL, "jobs", "errors"), "\n")
	require.Len(t, out, 4)
	require.Regexp(t, `^3 +3 +0 +0 +mail .*550 no such address`, strings.TrimSpace(out[1]))
	require.Regexp(t, `^2 +0 +0 +2 +charge .*503 for order 100\d$`, strings.TrimSpace(out[2]))
	require.NotContains(t, out[1], "\x1b")

	v := asJSON(t, db.URL, "jobs", "errors", "--kind", "charge")
	require.Len(t, v["errors"], 1)
	require.Equal(t, 2., v["jobs"])
	require.Equal(t, false, v["more"])
	out = strings.Split(fine(t, db.URL, "jobs", "errors", "--by", "queue"), "\n")
	require.Regexp(t, `JOBS .* QUEUE `, out[0])
	require.Regexp(t, `^2 +0 +0 +2 +billing .*503 for order`, strings.TrimSpace(out[2]))
	require.Contains(t, strings.Join(strings.Fields(fine(t, db.URL, "jobs", "errors", "--by", "lane")), " "), "5 3 0 2 - ")
	require.Equal(t, "billing", asJSON(t, db.URL, "jobs", "errors", "--by", "queue", "--kind", "charge")["errors"].([]any)[0].(map[string]any)["name"])
	refused := do(t, db.URL, "jobs", "errors", "--by", "state")
	require.Equal(t, codeUsage, refused.code)
	require.Contains(t, refused.err, "possible: kind, lane, limit, queue, scope, worker")
	v = asJSON(t, db.URL, "jobs", "errors", "--limit", "1")
	require.Equal(t, true, v["more"])
	require.Equal(t, codeUsage, do(t, db.URL, "jobs", "errors", "--state", "completed").code)
}

// A job is watched from its first attempt to its end.
func TestWatch(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kind := onceq.Kind[int]{Name: "import", Keep: time.Hour}
	attempt := make(chan error)
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Lease: 10 * time.Second}, kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
		if err := l.Progress(7, 9, "rows"); err != nil {
			return err
		}
		return <-attempt
	}))
	require.NoError(t, err)
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	c := command(t, db.URL, "jobs", "watch", fmt.Sprint(r.ID))
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	lines := bufio.NewScanner(out)
	says := func(what string) {
		t.Helper()
		for lines.Scan() {
			if strings.Contains(lines.Text(), what) {
				return
			}
		}
		t.Fatalf("it has not said %q", what)
	}
	says("waiting, 0 of 25 attempts failed")
	drained := make(chan error, 1)
	go func() { drained <- w.Drain(t.Context(), 0) }()
	says("7 of 9 rows")
	attempt <- onceq.RetryAfter(time.Millisecond, errors.New("not yet"))
	says("1 of 25 attempts failed, 2 claims")
	attempt <- nil
	says("completed")
	require.NoError(t, c.Wait())
	require.NoError(t, <-drained)

	kill(t, db, 1)
	dead, err := onceqops.New(db.Queue).List(t.Context(), db.Pool, onceqops.Filter{States: []onceq.State{onceq.StateDead}})
	require.NoError(t, err)
	a := do(t, db.URL, "jobs", "watch", fmt.Sprint(dead[0].ID), "--json")
	require.Equal(t, codeFailed, a.code)
	require.Contains(t, a.out, `"state":"dead"`)
	require.Equal(t, codeNotFound, do(t, db.URL, "jobs", "watch", "4711").code)
}
