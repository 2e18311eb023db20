// Package trouble makes a database in which something is wrong of every kind that the page shows, for the page's tests and
// screenshots.
package trouble

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// Charge is a payload.
type Charge struct {
	Order  int    `json:"order"`
	Amount int    `json:"amount"`
	Card   string `json:"card"`
}

// The kinds of the application.
var (
	ChargeKind = onceq.Kind[Charge]{Name: "charge", Queue: "payments", Key: func(c Charge) string { return fmt.Sprintf("order:%d", c.Order) },
		MaxAttempts: 3, Backoff: func(int, error) time.Duration { return 0 }}
	MailKind = onceq.Kind[map[string]string]{Name: "welcome", Queue: "mail", MaxAttempts: 3}
)

// Markup is what an attacker would write where it is shown.
const Markup = `</pre><script>document.title="owned"</script><img src=x onerror="document.title='owned'">'"&{{.}}`

// StuckWorker is the id of a worker with handlers that do not return. It is seen once, and so for three minutes after Make.
const StuckWorker = 11

// Database is what Make has made.
type Database struct {
	DB *queuetest.DB

	Held, Held2 int64 // a charge of unknown outcome each
	Uncertain   int64 // a dead job with an uncertain effect, whose provider can be asked
	Dead        []int64
	Retrying    int64
	Delayed     int64
	Waiting     int64
	Running     *onceq.Lease
	Cancelled   int64
	Completed   int64
	Markup      int64
	Fence       string // a key of the application's that is uncertain

	Schedules *onceqcron.Scheduler
}

// Make makes it.
func Make(t testing.TB, db *queuetest.DB) *Database {
	t.Helper()
	ctx, q := t.Context(), db.Queue
	d := &Database{DB: db, Fence: "invoice:77"}
	enqueue := func(j onceq.Job) int64 {
		t.Helper()
		r, err := q.Enqueue(ctx, db.Pool, j)
		require.NoError(t, err)
		return r.ID
	}
	once := func(p onceq.Policy) onceq.Handler {
		return ChargeKind.Handle(func(ctx context.Context, l *onceq.Lease, c Charge) error {
			_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) {
				return "", errors.New("POST https://pay.example/v1/charges: read: connection reset by peer")
			}, onceq.OnUncertain(p), onceq.EffectTimeout(time.Millisecond))
			return err
		})
	}
	drain := func(h onceq.Handler) {
		t.Helper()
		for len(db.Drain(h)) > 0 {
		}
	}
	d.Held = enqueue(ChargeKind.Job(Charge{4711, 1990, "visa-4242"}))
	d.Held2 = enqueue(ChargeKind.Job(Charge{4712, 500, "visa-1881"}))
	drain(once(onceq.Hold()))
	d.Uncertain = enqueue(ChargeKind.Job(Charge{4713, 12900, "visa-0005"}))
	drain(once(onceq.Ask(func(context.Context, string) (any, bool, error) {
		return nil, false, errors.New("GET https://pay.example/v1/charges: 503 Service Unavailable")
	})))
	j, err := q.Get(ctx, db.Pool, d.Uncertain)
	require.NoError(t, err)
	for j.State != onceq.StateDead { // "in flight" does not end it, so let it die
		_, err = db.Pool.Exec(ctx, `update onceq.jobs set attempts = max_attempts - 1, run_at = statement_timestamp() where id = $1`, d.Uncertain)
		require.NoError(t, err)
		drain(ChargeKind.Handle(func(context.Context, *onceq.Lease, Charge) error { return errors.New("the provider is down") }))
		j, err = q.Get(ctx, db.Pool, d.Uncertain)
		require.NoError(t, err)
	}

	refuse := MailKind.Handle(func(context.Context, *onceq.Lease, map[string]string) error {
		return onceq.Fatal(errors.New("550 5.1.1 mailbox unavailable\nRCPT TO:<nobody@example.com>"))
	})
	for i := range 3 {
		d.Dead = append(d.Dead, enqueue(MailKind.Job(map[string]string{"to": fmt.Sprintf("nobody%d@example.com", i)})))
	}
	drain(refuse)
	d.Completed = enqueue(onceq.Job{Kind: "report", Queue: "reports", Payload: map[string]int{"month": 11}, Metadata: map[string]string{"trace": "abc"}})
	keep := onceq.Kind[map[string]int]{Name: "report", Queue: "reports", Keep: onceq.Forever}
	drain(keep.Handle(func(_ context.Context, l *onceq.Lease, _ map[string]int) error {
		return l.SetResult(map[string]int{"sheets": 12})
	}))

	d.Markup = enqueue(onceq.Job{Kind: "<b>kind", Queue: "<i>queue", Key: Markup, Scope: "<u>scope", Payload: map[string]string{"text": Markup}, Metadata: map[string]string{Markup: Markup}, MaxAttempts: 1})
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Queue: "<i>queue"})
	require.NoError(t, err)
	require.NoError(t, leases[0].Fail(ctx, errors.New(Markup)))

	d.Retrying = enqueue(MailKind.Job(map[string]string{"to": "ada@example.com"}))
	leases, err = q.Claim(ctx, onceq.ClaimOptions{Queue: "mail"})
	require.NoError(t, err)
	require.NoError(t, leases[0].Fail(ctx, onceq.RetryAfter(10*time.Minute, errors.New("dial tcp 10.0.0.7:25: i/o timeout"))))
	later := MailKind.Job(map[string]string{"to": "later@example.com"})
	later.Delay = 26 * time.Hour
	d.Delayed = enqueue(later)
	gone := MailKind.Job(map[string]string{"to": "gone@example.com"})
	gone.Delay = time.Hour
	d.Cancelled = enqueue(gone)
	_, err = q.Cancel(ctx, db.Pool, d.Cancelled)
	require.NoError(t, err)
	enqueue(onceq.Job{Kind: "import", Queue: "imports", Key: "2026-11", Payload: map[string]int{"rows": 120000}})
	leases, err = q.Claim(ctx, onceq.ClaimOptions{Queue: "imports", Lease: time.Hour})
	require.NoError(t, err)
	d.Running = leases[0]
	d.Waiting = enqueue(onceq.Job{Kind: "thumbnail", Queue: "thumbnials", Payload: map[string]int{"image": 9}})

	require.NoError(t, q.PauseKind(ctx, db.Pool, "remind", "bob@example.com: the template is wrong"))

	// A worker runs. Another one, which served the mails, was killed five minutes ago. A third one has handlers that do not return, and waits
	// for connections.
	imports := onceq.Kind[map[string]int]{Name: "import", Queue: "imports"}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"imports": {Concurrency: 4}}},
		imports.Handle(func(context.Context, *onceq.Lease, map[string]int) error { return nil }),
		keep.Handle(func(context.Context, *onceq.Lease, map[string]int) error { return nil }))
	require.NoError(t, err)
	running, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(running) }()
	t.Cleanup(func() {
		stop()
		<-ended
	})
	require.Eventually(t, func() bool { list, err := onceqops.New(q).Workers(ctx, db.Pool); return err == nil && len(list) == 1 }, time.Minute, 10*time.Millisecond)
	_, err = db.Pool.Exec(ctx, `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values (7, 60000000, statement_timestamp() - interval '9 hours', statement_timestamp() - interval '5 minutes', 4711, 1, 'web-3', 'v0.1.0', '{"mail": 10}', '{remind,welcome}')`)
	require.NoError(t, err)
	_, err = db.Pool.Exec(ctx, `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds, stuck, pool)
values ($1, 60000000, statement_timestamp() - interval '2 hours', statement_timestamp(), 4715, 1, 'web-6', 'v0.1.0', '{"imports": 4}', '{import}',
        jsonb_build_array(jsonb_build_object('queue', 'imports', 'kind', 'import', 'slots', 2, 'job', $2::bigint, 'since', statement_timestamp() - interval '20 minutes')),
        '{"conns": 8, "wait": 240000000000}')`, StuckWorker, d.Running.ID)
	require.NoError(t, err)

	// What workers and a Reaper have counted, by the minute, by ten of them and by the hour: more by day, failures for some minutes, and a
	// backlog while it was slower.
	_, err = db.Pool.Exec(ctx, `
insert into onceq.job_counts (span, minute, took, started, completed, failed, dead, due, oldest, queue, kind, durations, waits)
select p.span, p.at, 60000000, p.jobs, p.jobs - p.bad, p.bad, p.bad / 20, 0, 0, p.queue, p.kind,
       array(select (p.jobs * exp(-(((i - p.middle) / 5.0::float8) ^ 2)) / 9)::int from generate_series(0, 40) i),
       array(select (p.jobs * exp(-(((i - p.middle + 6 - 14 * p.slow) / 6.0::float8) ^ 2)) / 9)::int from generate_series(0, 60) i)
  from (select s.span, t.at, k.queue, k.kind, k.middle, t.slow, (s.span * k.n * (1.2 + sin(extract(epoch from t.at) / 13750) / 2 + sin(extract(epoch from t.at) / 700) / 4))::int as jobs,
               case when s.span = 1 and t.ago between 4 and 9 or s.span = 10 and t.ago between 40 and 43 then k.n * s.span / 4 else s.span * k.n / 300 end as bad
          from (values (1, 180), (10, 144), (60, 336)) s (span, points)
         cross join (values ('mail', 'welcome', 60, 18), ('mail', 'remind', 20, 16), ('payments', 'charge', 120, 22), ('reports', 'report', 2, 34)) k (queue, kind, n, middle)
         cross join lateral (
               select date_bin(s.span * interval '1 minute', statement_timestamp(), '2000-01-01Z') - n * s.span * interval '1 minute' as at, n as ago,
                      case when n between 20 and 40 then 1 - abs(n - 30) / 10.0::float8 else 0 end as slow
                 from generate_series(1, s.points) n) t) p
 union all
select s.span, date_bin(s.span * interval '1 minute', statement_timestamp(), '2000-01-01Z') - n * s.span * interval '1 minute', 0, 0, 0, 0, 0,
       (2400 * (1 - abs(n - 30) / 10.0))::int, (90000000 * (1 - abs(n - 30) / 10.0))::bigint, 'mail', '', '{}', '{}'
  from (values (1), (10), (60)) s (span) cross join generate_series(21, 39) n
    on conflict do nothing`)
	require.NoError(t, err)

	fence, err := q.Fence(onceq.FenceSpec{Key: d.Fence})
	require.NoError(t, err)
	lease, err := fence.Claim(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, lease.Uncertain(ctx, nil, errors.New("PUT https://books.example: context deadline exceeded")))

	nightly := onceqcron.Schedule{Name: "nightly report", Spec: "0 2 * * *", Zone: "Europe/Berlin", Job: onceq.Job{Kind: "report", Queue: "reports", Payload: map[string]int{}}}
	d.Schedules, err = onceqcron.New(q, db.Pool, onceqcron.Config{Owner: "billing"}, nightly)
	require.NoError(t, err)
	require.NoError(t, d.Schedules.Register(ctx))
	require.NoError(t, d.Schedules.Put(ctx, nil, onceqcron.Schedule{Name: "reminders", Spec: "@every 10m", Job: onceq.Job{Kind: "remind", Queue: "mail", Payload: 1}}))
	now := time.Now()
	_, err = d.Schedules.Backfill(ctx, nil, "reminders", now.Add(-time.Hour), now.Add(-time.Minute))
	require.NoError(t, err)
	return d
}
