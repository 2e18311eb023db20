package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// A lane that stands still: doctor names it and its dead job, lanes list says what holds it, and a redrive lets it go on.
func TestAStuckLane(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	book := onceq.Kind[int]{Name: "book", Queue: "billing", LaneRule: onceq.StopLane, Lane: func(int) string { return "account-7" }}
	add := func(n int) string {
		r, err := db.Queue.Enqueue(t.Context(), db.Pool, book.Job(n))
		require.NoError(t, err)
		return fmt.Sprint(r.ID)
	}
	require.Equal(t, "No job waits for a lane.\n", fine(t, db.URL, "lanes", "list"))
	dead := add(0)
	db.Drain(book.Handle(func(context.Context, *onceq.Lease, int) error {
		return onceq.Fatal(errors.New("the account is closed"))
	}))
	waits := add(1)

	a := do(t, db.URL, "doctor")
	require.Equal(t, codeFindings, a.code)
	require.Contains(t, a.out, `bad      lane: lane "book/account-7" stands still, because of the dead or held job [`+dead+`]`)
	require.Contains(t, a.out, "onceq jobs redrive")
	queue := asJSON(t, db.URL, "queues", "billing")["queues"].([]any)[0].(map[string]any)
	require.EqualValues(t, 1, queue["blocked"])
	require.EqualValues(t, 0, queue["waiting"])
	require.Contains(t, fine(t, db.URL, "lanes", "list"), "stands still: dead or held "+dead+"\n")
	lane := asJSON(t, db.URL, "lanes", "list", "--family", "book", "--limit", "1")
	require.Equal(t, "book/account-7", lane["next"])
	require.EqualValues(t, 1, lane["lanes"].([]any)[0].(map[string]any)["waiting"])
	require.Equal(t, "No job waits for a lane.\n", fine(t, db.URL, "lanes", "list", "--after", "book/account-7"))
	require.Contains(t, fine(t, db.URL, "jobs", "list", "--state", "waiting"), "in lane book/account-7, due ")
	require.Contains(t, fine(t, db.URL, "jobs", "explain", waits), "stands still")

	require.Equal(t, "The limit of lane \"book/account-7\" is 1.\n", fine(t, db.URL, "lanes", "limit", "book/account-7"))
	require.Equal(t, "The limit of the lanes of family \"book\" is 3 now; it was 1.\n", fine(t, db.URL, "lanes", "limit", "book/", "3", "--why", "many accounts"))
	require.Equal(t, map[string]any{"lane": "book/account-7", "limit": 0.0}, asJSON(t, db.URL, "lanes", "limit", "book/account-7", "0"))
	require.Contains(t, fine(t, db.URL, "actions"), "many accounts")
	fine(t, db.URL, "jobs", "discard", dead, "--yes")
	require.Contains(t, fine(t, db.URL, "lanes", "list"), "stands still: its limit is 0")
	require.Equal(t, "The limit of lane \"book/account-7\" is 3 now; it was 0.\n", fine(t, db.URL, "lanes", "limit", "book/account-7", "--remove", "--why", "it is open again"))
	require.Contains(t, fine(t, db.URL, "actions"), "it is open again")
	require.Equal(t, map[string]any{"lane": "book/", "limit": 1.0}, asJSON(t, db.URL, "lanes", "limit", "book/", "--remove"))
	require.Equal(t, codeUsage, do(t, db.URL, "lanes", "limit", "book/", "2", "--remove").code)
	require.NotContains(t, do(t, db.URL, "doctor").out, "lane:")
}

// What else makes people wake up: a misspelt queue, a job that ends its process, workers that a deploy has left behind.
func TestDoctorNamesTheCause(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	for _, queue := range []string{"imagse", "exports", "onceqcron", "images"} {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "resize", Queue: queue, Payload: 1})
		require.NoError(t, err)
	}
	_, err := db.Pool.Exec(t.Context(), `update onceq.jobs set run_at = now() - interval '5 minutes', lost = case when queue = 'images' then 3 else 0 end, claims = case when queue = 'images' then 3 else 0 end`)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
select n::bigint << 32, 60000000, now() - n * interval '1 hour', now() - stale * interval '1 hour', n, $1, 'web', version, '{"images": 3, "imports": 3}', '{resize}'
  from (values (1, 'v2', 0), (2, 'v1', 0), (3, 'v2', 1)) w (n, version, stale)`, onceq.SchemaVersion)
	require.NoError(t, err)
	out := do(t, db.URL, "doctor").out
	require.Contains(t, out, `is its name a misspelt "images", which workers do serve?`)
	require.NotContains(t, out, `misspelt "imports"`)
	require.Contains(t, out, "these are ticks of schedules")
	require.Regexp(t, `crashes: job \d+ of kind "resize" in queue "images" has lost 3 leases`, out)
	require.Contains(t, out, "0 wait for their first attempt and 1 for another")
	require.Contains(t, out, "versions: workers with version v2 of the library have run for 1h0m0s, and others still have another: process 2 on web (v1)")
	require.NotContains(t, out, "process 3 on web", "others serve its queues")
	_, err = db.Pool.Exec(t.Context(), `update onceq.workers set started_at = now() where version = 'v2'`)
	require.NoError(t, err)
	require.NotContains(t, do(t, db.URL, "doctor").out, "versions:") // a deploy is going on
}

// A handler that hangs holds a lane; and jobs wait for a limit that nobody has set.
func TestDoctorNamesWhatHoldsALane(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	book := onceq.Kind[int]{Name: "book", Timeout: onceq.NoTimeout, Lane: func(int) string { return "7" }}
	call := onceq.Kind[int]{Name: "call", Limit: func(int) string { return "bank" }}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{book.Job(1), book.Job(2), book.Job(3)})
	require.NoError(t, err)
	began := make(chan int64, 3)
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Lease: time.Hour, ShutdownTimeout: time.Millisecond}, book.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		began <- l.ID
		<-ctx.Done()
		return ctx.Err()
	}))
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	id := <-began
	require.NotContains(t, do(t, db.URL, "doctor").out, "hang:", "it has only begun")
	_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set progress = jsonb_build_object('claims', claims, 'since', now() - interval '10 minutes')`)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.job_waits set run_at = now() - interval '5 minutes'`)
	require.NoError(t, err)
	a := do(t, db.URL, "doctor")
	require.Equal(t, codeFindings, a.code)
	require.Regexp(t, fmt.Sprintf(`warning  hang: lane "book/7" is full: job %d has held it since .*, in process \d+ on .*, whose lease goes on, and 2 jobs wait for it`, id), a.out)
	require.Contains(t, a.out, fmt.Sprintf("onceq jobs explain %d says what it does; a handler may hang", id))
	require.Contains(t, a.out, fmt.Sprintf("onceq jobs cancel %d tells the handler to end", id))
	stop()
	require.NoError(t, <-ended)

	_, err = db.Queue.Enqueue(t.Context(), db.Pool, call.Job(1))
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.job_waits set run_at = now() - interval '5 minutes'`)
	require.NoError(t, err)
	out := do(t, db.URL, "doctor").out
	require.Contains(t, out, `warning  limit: jobs wait for limits that nobody has set, and so one job of each runs at a time: "bank" (1 job)`)
	require.Contains(t, out, "onceq limits set sets one;")
	fine(t, db.URL, "limits", "set", "bank", "--at-once", "1")
	require.NotContains(t, do(t, db.URL, "doctor").out, "limit:")
}

// ui serves the page below a secret, for reading unless --act is there, and ends by an interrupt.
func TestUI(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 1)
	for _, act := range []bool{false, true} {
		args := []string{"ui"}
		if act {
			args = append(args, "--act")
		}
		c := command(t, db.URL, args...)
		out, err := c.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		address, err := bufio.NewReader(out).ReadString('\n')
		require.NoError(t, err)
		address = strings.TrimSpace(address)
		require.Regexp(t, `^http://127\.0\.0\.1:\d+/[a-z0-9]{20,}/$`, address)
		get := func(url string) (int, string) {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
			require.NoError(t, err)
			answer, err := http.DefaultClient.Do(r)
			require.NoError(t, err)
			defer func() { _ = answer.Body.Close() }()
			text, err := io.ReadAll(answer.Body)
			require.NoError(t, err)
			return answer.StatusCode, string(text)
		}
		code, text := get(address + "job?id=1")
		require.Equal(t, http.StatusOK, code)
		require.Contains(t, text, "ada@test")
		require.Equal(t, act, strings.Contains(text, `value="redrive"`))
		code, _ = get(address[:strings.Index(address[len("http://"):], "/")+len("http://")] + "/")
		require.Equal(t, http.StatusNotFound, code)
		require.NoError(t, c.Process.Signal(os.Interrupt))
		require.NoError(t, c.Wait())
	}
}
