package onceqweb_test

import (
	"context"
	"errors"
	"fmt"
	"html"
	"net/http"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqweb"
	"github.com/onceq/onceq/queuetest"
)

// A job's page says who ran the attempts that failed, and draws them from the job's beginning on.
func TestJob_AttemptsAndTimeline(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema, Version: "v1.4.2"})
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{Mask: func(_, field, text string) string {
		if field == "error" {
			return "masked"
		}
		return text
	}})
	kind := onceq.Kind[int]{Name: "failing", MaxAttempts: 3, Backoff: func(int, error) time.Duration { return 0 }}
	result, err := q.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	path := fmt.Sprintf("job?id=%d", result.ID)
	require.NotContains(t, s.get(path, http.StatusOK), `class="timeline"`, "nothing has happened yet")
	fails := kind.Handle(func(context.Context, *onceq.Lease, int) error { return errors.New("a secret") })
	worker, err := onceq.NewWorker(q, onceq.WorkerConfig{}, fails)
	require.NoError(t, err)
	dead := func() bool {
		j, err := q.Get(t.Context(), db.Pool, result.ID)
		require.NoError(t, err)
		return j.State == onceq.StateDead
	}
	for !dead() {
		require.NoError(t, worker.Drain(t.Context(), 10))
	}
	// The times are those of a job that lives for a thousand seconds.
	_, err = db.Pool.Exec(t.Context(), `
update onceq.job_history
   set created_at = '2026-01-01 00:00:00Z', finished_at = '2026-01-01 00:16:40Z', errors = (
       select jsonb_agg(e || jsonb_build_object('at', timestamptz '2026-01-01 00:00:00Z' + n * interval '300 s', 'took', n * 50000000000))
         from jsonb_array_elements(errors) with ordinality as e(e, n))
 where id = $1`, result.ID)
	require.NoError(t, err)
	host, err := os.Hostname()
	require.NoError(t, err)
	page := serve(t, db, onceqweb.Config{}).get(path, http.StatusOK)
	for n, words := range []string{
		"ran for 50 s in process %d on %s, version v1.4.2, after the job had waited for 4 min 10 s",
		"ran for 1 min 40 s in process %d on %s, version v1.4.2, after the job had waited for 3 min 20 s",
		"ran for 2 min 30 s in process %d on %s, version v1.4.2, after the job had waited for 2 min 30 s",
	} {
		require.Contains(t, page, fmt.Sprintf(words, os.Getpid(), host), n+1)
	}
	var bars []string
	for _, bar := range regexp.MustCompile(`<rect class="(\w+)" x="([0-9.]+)" y="2" width="([0-9.]+)"`).FindAllStringSubmatch(page, -1) {
		bars = append(bars, bar[1]+" "+bar[2]+"+"+bar[3])
	}
	require.Equal(t, []string{"failed 250.0+50.0", "failed 500.0+100.0", "failed 750.0+150.0", "dead 996.0+4.0"}, bars)
	require.Contains(t, page, `aria-label="Created at 2026-01-01 00:00:00; attempt 1 failed at 2026-01-01 00:05:00; it ran for 50 s in process`)
	require.Contains(t, page, `dead at 2026-01-01 00:16:40."`)
	require.NotContains(t, s.get(path, http.StatusOK), "a secret")

	// One that runs, and one that waits for its next attempt.
	result, err = q.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "other", Queue: "others"})
	require.NoError(t, err)
	leases, err := q.Claim(t.Context(), onceq.ClaimOptions{Queue: "others"})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	require.NoError(t, leases[0].Fail(t.Context(), onceq.RetryAfter(time.Hour, errors.New("later"))))
	page = s.get(fmt.Sprintf("job?id=%d", result.ID), http.StatusOK)
	require.Contains(t, page, "the job is due at ")
	require.Contains(t, page, `<rect class="due" x="0.`)
}

// A job whose first errors are not kept any more does not say for how long it waited before the first that is.
func TestJob_ManyAttempts(t *testing.T) {
	t.Parallel()
	db := newDB(t, queuetest.Config(onceq.Config{Version: "v2"}))
	id := queuedWithErrors(t, db, 12)
	page := serve(t, db, onceqweb.Config{}).get(fmt.Sprintf("job?id=%d", id), http.StatusOK)
	require.Len(t, regexp.MustCompile(`<rect class="failed"`).FindAllString(page, -1), 10)
	require.Len(t, regexp.MustCompile(`after the job had waited for`).FindAllString(page, -1), 9)
	require.NotContains(t, page, "<strong>Attempt 2</strong>")
	require.Contains(t, page, "<strong>Attempt 3</strong>")
}

// queuedWithErrors makes a job that has failed so many times, each time on a host named web, a minute apart.
func queuedWithErrors(t *testing.T, db *queuetest.DB, failed int) int64 {
	t.Helper()
	result, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "mail"})
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `
update onceq.jobs set attempts = $2::int, created_at = statement_timestamp() - interval '1 hour', errors = (
       select jsonb_agg(jsonb_build_object('at', statement_timestamp() + (n - 30) * interval '1 minute', 'attempt', n, 'error', 'no', 'host', 'web', 'process', 7, 'took', 1000000000))
         from generate_series(greatest(1, $2::int - 9), $2::int) n)
 where id = $1`, result.ID, failed)
	require.NoError(t, err)
	return result.ID
}

// Errors by the process of the latest attempt; an action takes the jobs of one of them alone.
func TestErrors_ByWorker(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	queuedWithErrors(t, db, 2)
	queuedWithErrors(t, db, 3)
	other := queuedWithErrors(t, db, 1)
	unknown := queuedWithErrors(t, db, 1)
	for id, change := range map[int64]string{
		other:   `jsonb_set(errors, '{0,version}', '"v2<b>"')`,
		unknown: `errors #- '{0,host}'`,
	} {
		_, err := db.Pool.Exec(t.Context(), `update onceq.jobs set run_at = run_at + interval '1 hour', errors = `+change+` where id = $1`, id)
		require.NoError(t, err)
	}
	_, err := db.Pool.Exec(t.Context(), `update onceq.jobs set run_at = run_at + interval '1 hour'`)
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, false)})
	rows := regexp.MustCompile(`(?s)<tr>\s*<th scope="row" class="error">.*?</tr>`).
		FindAllString(s.get("errors?by=worker", http.StatusOK), -1)
	require.Len(t, rows, 3)
	require.Contains(t, rows[0], "process 7 on web")
	require.Contains(t, rows[0], "Run now 2 …")
	require.Contains(t, rows[1], "not known")
	require.Contains(t, rows[2], "process 7 on web, version v2&lt;b&gt;")
	link := regexp.MustCompile(`href="\./(confirm[^"]*retry-many[^"]*)"`).FindStringSubmatch(rows[2])
	require.NotNil(t, link)
	s.act(s.confirmed(html.UnescapeString(link[1]), "1")...)
	s.state(db, other, onceq.StateRetrying)
	j, err := db.Queue.Get(t.Context(), db.Pool, other)
	require.NoError(t, err)
	require.False(t, j.RunAt.After(time.Now()), "it runs now")
}
