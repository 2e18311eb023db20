package browsertest

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqweb"
)

var jobs = flag.Int("size", 0, "measure each page over a schema with so many jobs, as 1000000; it takes a kilobyte of disk or memory for each job")

// fill makes $1 jobs in ten queues, of every state, beside each other as ids go: of a hundred, 30 are live, 5 wait for their lane
// or limit, 65 are in the history. Every fifth has a key. The jobs of kind "rare" are the oldest live one and the oldest dead one.
var fill = []string{
	`create temp table job as
select id, id % 100 as part, 'queue-' || (id / 100) % 10 as queue, case when id in (1, 88) then 'rare' else 'kind-' || (id / 700) % 20 end as kind,
       case when id % 5 = 0 then 'tenant-' || (id / 100) % 1000 end as scope, case when id % 5 = 0 then 'order:' || id end as key,
       case (id / 1000) % 10 when 0 then -1 when 1 then 1 else 0 end as priority,
       now() - ($1::bigint - id) * interval '10 milliseconds' - interval '1 minute' as at,
       jsonb_build_object('order', id, 'text', 'a payload of usual size for a job') as payload
  from generate_series(1, $1::bigint) id`,
	`insert into onceq.jobs (id, run_at, created_at, leased_until, holder, claims, attempts, max_attempts, priority, queue, kind, scope, key, payload, errors)
select id, case when part between 20 and 28 then now() + id % 100000 * interval '1 second' + interval '1 hour' else at end, at,
       case when part = 29 and id < 200000 then now() + interval '1 day' end, case when part = 29 and id < 200000 then id % 40 << 32 end,
       (part >= 26)::int, case when part in (26, 27, 28) then 2 else 0 end, 25, priority, queue, kind, scope, key, payload,
       case when part in (26, 27, 28) then '[{"at": "2026-01-01T00:00:00Z", "error": "dial tcp 10.0.0.7:25: i/o timeout", "attempt": 2}]'::jsonb end
  from job where part < 30`,
	// Some thousand lanes of which each is full, one with most of the jobs, and some limits.
	`insert into onceq.job_waits (id, run_at, created_at, max_attempts, priority, lane_rule, lane, path, queue, kind, scope, key, payload)
select id, at, at, 25, priority, 0,
       case when part > 32 then '/provider-' || (id / 100) % 20 when part = 30 then 'book/hot' else 'book/account-' || (id / 100) % 5000 end,
       case when part > 32 then E'\x1f/provider-' || (id / 100) % 20 end, queue, kind, scope, key, payload
  from job where part between 30 and 34`,
	`insert into onceq.lane_places (lane, id)
select 'book/account-' || (id / 100) % 5000, id from job where part = 0 and id < 500000
 union all select '/provider-' || (id / 100) % 20, id from job where part = 1 and id < 2000 union all select 'book/hot', 2`,
	`insert into onceq.lane_limits (lane, n, lowered) select '/provider-' || n, 1, false from generate_series(0, 19) n`,
	`insert into onceq.job_history (id, run_at, created_at, finished_at, keep_until, claims, lost, attempts, max_attempts, priority, state, queue, kind, scope, key,
       payload, result, errors)
select id, at, at, at + interval '1 second', case when part < 85 or part between 94 and 98 then now() + interval '1 day' end, 1, 0, 1, 25, priority,
       case when part < 85 then 5 when part < 94 then 6 when part < 99 then 7 else 8 end, queue, kind, scope, key, payload, case when part < 85 then '"done"'::jsonb end,
       case when part between 85 and 93 then '[{"at": "2026-01-01T00:00:00Z", "error": "550 5.1.1 mailbox unavailable", "attempt": 1}]'::jsonb end
  from job where part >= 35`,
	`insert into onceq.job_fences (job_id, token, created_at, finished_at, lifetime, class, state, scope, key, fingerprint)
select id, id << 20, at, case when part >= 35 then at end, 86400000, 0, case when part < 35 then 0 when part < 85 then 3 when part < 94 then 4 when part < 99 then 5 else 0 end,
       scope, key, int8send(id)
  from job where key is not null`,
	`insert into onceq.job_fences (job_id, token, created_at, leased_until, lifetime, class, state, scope, key, detail, fingerprint)
select id, (id << 20) + 1, at, at, 86400000, 3, case part when 99 then 6 else 2 end, queue, id || '/charge', 'connection reset by peer', int8send((extract(epoch from at) * 1000000)::bigint)
  from job where part in (85, 99)`,
	`insert into onceq.job_fences (token, created_at, finished_at, lifetime, class, state, scope, key)
select 1, now(), now(), 86400000, 2, 3, 'tenant-' || n, 'a key of many' from generate_series(1, 10000) n`,
	`insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
select n << 32, 60000000, now(), now() + interval '1 day', n, 1, 'web-' || n, 'v1', (select jsonb_object_agg('queue-' || m, 100) from generate_series(0, 9) m),
       (select array_agg('kind-' || m) from generate_series(0, 19) m)
  from generate_series(0, 39) n`,
	`insert into onceq.queues select 'queue-' || n, now() from generate_series(0, 9) n`,
	`insert into onceq.job_counts (minute, took, started, completed, failed, dead, queue, kind, durations)
select date_trunc('minute', now()) - m * interval '1 minute', 1000000, 100, 90, 8, 2, 'queue-' || k % 10, 'kind-' || k, '{10,10,10,10,10,10,10,10,10,10,0,0,0,0}'
  from generate_series(0, 1500) m, generate_series(0, 19) k`,
	`insert into onceq.schedules (name, owner, spec, zone, missed, next_at)
select 'schedule-' || n, 'shop', '0 4 * * *', 'UTC', 'latest 24h0m0s', now() + interval '1 hour' from generate_series(1, 200) n`,
	`insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome, job_id)
select 'schedule-' || n, now() - m * interval '1 hour', now() - m * interval '1 hour', 1, 'fired', m from generate_series(1, 200) n, generate_series(1, 1000) m`,
	`insert into onceq.actions (job_id, who, what, about, why, outcome)
select n % 50000, 'ada@example.com', 'redrive', '', 'the cause is mended', 'waiting' from generate_series(1, 100000) n`,
	`select setval('onceq.ids', $1::bigint)`,
	`drop table job`,
	`vacuum (analyze)`,
}

// TestSize measures what each page costs the server, and what a browser needs to show it. It asserts nothing but that the pages come:
// docs/run/web.md has what it printed.
//
//	make page-size SIZE=1000000
func TestSize(t *testing.T) {
	if *jobs == 0 {
		t.Skip("it takes minutes; -args -size 1000000")
	}
	server, err := pgserver.Start(t.Context(), pgserver.Options{Own: true, Settings: map[string]string{
		"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track_planning": "on",
		"max_wal_size": "512MB", "wal_level": "minimal", "max_wal_senders": "0", "maintenance_work_mem": "256MB", "autovacuum": "off",
	}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	_, err = conn.Exec(t.Context(), `create extension pg_stat_statements`)
	require.NoError(t, err)
	for _, statement := range fill {
		began := time.Now()
		var args []any
		if strings.Contains(statement, "$1") {
			args = append(args, *jobs)
		}
		_, err := conn.Exec(t.Context(), statement, args...)
		require.NoError(t, err, statement)
		name, _, _ := strings.Cut(statement, "\n")
		t.Logf("%s: %s", time.Since(began).Round(time.Millisecond), name[:min(len(name), 60)])
	}
	measure(t, conn, server.URL())
}

// sized is a page that is measured.
type sized struct{ name, path string }

func sizedPages() []sized {
	at := func(part int) int { return *jobs/2/1000*1000 + part } // a job in the middle
	pages := []sized{
		{"overview", ""},
		{"jobs", "jobs"},
		{"jobs, a page in the middle", fmt.Sprintf("jobs?after=%d", at(0))},
	}
	for _, state := range []string{"waiting", "delayed", "running", "retrying", "dead", "held", "cancelled", "completed"} {
		pages = append(pages, sized{"jobs: " + state, "jobs?state=" + state},
			sized{"jobs: " + state + ", of a queue", "jobs?queue=queue-3&state=" + state})
	}
	return append(pages, []sized{
		{"jobs of a queue", "jobs?queue=queue-3"},
		{"jobs of a kind", "jobs?kind=kind-7"},
		{"jobs of a scope", "jobs?scope=tenant-77"},
		{"jobs of a time", "jobs?before=" + time.Now().Add(-time.Duration(*jobs/2)*10*time.Millisecond).UTC().Format("2006-01-02T15:04")},
		{"jobs of a rare kind", "jobs?kind=rare"},
		{"jobs of a rare kind, dead", "jobs?kind=rare&state=dead"},
		{"jobs of a kind that is not there", "jobs?kind=none"},
		{"jobs of a queue that is not there", "jobs?queue=none"},
		{"job: waiting", fmt.Sprintf("job?id=%d", at(0))},
		{"job: delayed", fmt.Sprintf("job?id=%d", at(20))},
		{"job: running", "job?id=1029"},
		{"job: retrying", fmt.Sprintf("job?id=%d", at(26))},
		{"job: in a lane", fmt.Sprintf("job?id=%d", at(31))},
		{"job: in the longest lane", fmt.Sprintf("job?id=%d", at(30))},
		{"job: in a limit", fmt.Sprintf("job?id=%d", at(33))},
		{"job: completed", fmt.Sprintf("job?id=%d", at(35))},
		{"job: dead", fmt.Sprintf("job?id=%d", at(85))},
		{"job: held", fmt.Sprintf("job?id=%d", at(99))},
		{"job: none", "job?id=8000000000000"},
		{"effects: held", "effects"},
		{"effects: held, of a queue", "effects?queue=queue-3"},
		{"effects: held, of a rare kind", "effects?kind=rare"},
		{"effects: others", "effects?of=others"},
		{"effects: others, of a rare kind", "effects?of=others&kind=rare"},
		{"key", fmt.Sprintf("keys?key=order:%d", at(35))},
		{"key in 10,000 scopes", "keys?key=a+key+of+many"},
		{"key: none", "keys?key=none"},
		{"lanes and limits", "lanes"},
		{"lanes: a family, the next page", "lanes?family=book&after=book/account-3000"},
		{"limit", "lanes?limit=provider-7"},
		{"schedules", "schedules"},
		{"schedule", "schedule?name=schedule-7"},
		{"audit", "audit"},
		{"audit, a page in the middle", "audit?after=50000"},
		{"confirm: redrive of a queue", "confirm?do=redrive-many&queue=queue-3"},
		{"confirm: cancel of a queue", "confirm?do=cancel-many&queue=queue-3"},
		{"confirm: cancel of a rare kind", "confirm?do=cancel-many&kind=rare"},
		{"confirm: resolve of a kind", "confirm?do=resolve-many&decision=never&kind=kind-7"},
	}...)
}

func measure(t *testing.T, conn *pgx.Conn, to string) {
	var disk string
	require.NoError(t, conn.QueryRow(t.Context(), `select pg_size_pretty(pg_database_size(current_database()))`).Scan(&disk))

	pool, err := pgxpool.New(t.Context(), to)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	open := func() *onceqweb.Handler { // which has nothing in its memory
		h, err := onceqweb.New(q, pool, onceqweb.Config{Viewer: onCall, Prefix: "/onceq", Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		return h
	}

	var out strings.Builder
	table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "%d jobs, %s\tstatus\tmedian ms\tCPU ms\tin Postgres ms\tstatements\tpages of 8 kB\tbrowser ms\t\n", *jobs, disk)
	site := httptest.NewServer(open())
	t.Cleanup(site.Close)
	var ctx context.Context
	if os.Getenv("ONCEQ_TEST_CHROMIUM") != "" {
		ctx = browserFor(t, time.Hour)
	}
	for _, p := range sizedPages() {
		const rounds = 9
		var took []time.Duration
		var status int
		var cpu time.Duration
		for i := range rounds {
			if i == 2 { // warm
				_, err := conn.Exec(t.Context(), `select pg_stat_statements_reset()`)
				require.NoError(t, err)
				cpu = -used(t, conn)
			}
			h, w := open(), httptest.NewRecorder()
			r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/onceq/"+p.path, nil)
			began := time.Now()
			h.ServeHTTP(w, r)
			took = append(took, time.Since(began))
			h.Close()
			status = w.Code
		}
		cpu += used(t, conn)
		var ms float64
		var calls, blocks int64
		require.NoError(t, conn.QueryRow(t.Context(), `
select coalesce(sum(total_exec_time + total_plan_time), 0) / $1::int, (coalesce(sum(calls), 0) / $1)::bigint, (coalesce(sum(shared_blks_hit + shared_blks_read), 0) / $1)::bigint
  from pg_stat_statements where query !~ 'pg_stat_statements'`, rounds-2).Scan(&ms, &calls, &blocks))
		took = took[2:]
		slices.Sort(took)
		shown := "-"
		if ctx != nil {
			var best float64
			for range 3 {
				var ms float64
				run(t, ctx, chromedp.Navigate(site.URL+"/onceq/"+p.path),
					chromedp.Evaluate(`(() => { const n = performance.getEntriesByType("navigation")[0]; return n.domContentLoadedEventEnd - n.startTime; })()`, &ms))
				if best == 0 || ms < best {
					best = ms
				}
			}
			shown = fmt.Sprintf("%.0f", best)
		}
		fmt.Fprintf(table, "%s\t%d\t%.1f\t%.1f\t%.1f\t%d\t%d\t%s\t\n", p.name, status,
			float64(took[len(took)/2].Microseconds())/1000, float64(cpu.Microseconds())/1000/(rounds-2), ms, calls, blocks, shown)
	}
	require.NoError(t, table.Flush())
	t.Log("\n" + out.String())
}

// used is how long this process and its sessions of Postgres have had a processor, which other work on the machine changes little.
func used(t *testing.T, conn *pgx.Conn) time.Duration {
	t.Helper()
	pids := []int{os.Getpid()}
	rows, err := conn.Query(t.Context(), `select pid from pg_stat_activity where backend_type in ('client backend', 'parallel worker') and pid <> pg_backend_pid()`)
	require.NoError(t, err)
	more, err := pgx.CollectRows(rows, pgx.RowTo[int])
	require.NoError(t, err)
	var sum time.Duration
	for _, pid := range append(pids, more...) {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		require.NoError(t, err)
		for _, name := range tasks {
			if text, err := os.ReadFile(name); err == nil {
				nanoseconds, _, _ := strings.Cut(string(text), " ")
				n, err := strconv.ParseInt(nanoseconds, 10, 64)
				require.NoError(t, err)
				sum += time.Duration(n)
			}
		}
	}
	return sum
}
