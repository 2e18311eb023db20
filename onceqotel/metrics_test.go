package onceqotel_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.yaml.in/yaml/v3"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/onceqotel"
	"github.com/onceq/onceq/queuetest"
)

// everything makes each counted event happen at least once, all on the queue mail with the kind welcome.
func (b *bench) everything() {
	ctx := b.t.Context()
	mismatched := welcome.Job(mail{"other"})
	mismatched.Key = "welcome:ada"
	attempts := 0
	handler := welcome.Handle(func(ctx context.Context, l *onceq.Lease, m mail) error {
		attempts++
		switch m.To {
		case "ada": // uncertain, failed, then completed
			_, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (int, error) {
				if l.Attempt == 1 {
					return 0, errBoom
				}
				return 1, nil
			})
			return err
		case "dead":
			return onceq.Fatal(errBoom)
		case "later":
			return onceq.Snooze(time.Hour)
		case "busy":
			return onceq.RetryAfter(time.Hour, errBoom)
		case "held":
			_, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (int, error) { return 0, errBoom }, onceq.OnUncertain(onceq.Hold()))
			return err
		case "stale": // its completion comes too late; another holder's counts
			taken := b.takeOver(l.ID)
			return taken.Complete(ctx, nil)
		case "lost": // its failure comes too late
			taken := b.takeOver(l.ID)
			require.NoError(b.t, taken.Complete(ctx, nil))
			return errBoom
		}
		return errors.New("who is " + m.To + "?")
	})
	for _, to := range []string{"ada", "dead", "later", "busy", "held", "stale", "lost"} {
		job := welcome.Job(mail{to})
		job.Window = onceq.UntilFinished
		b.enqueue(ctx, job)
		b.enqueue(ctx, job)
		if to == "ada" {
			_, err := b.q.Enqueue(ctx, b.Pool, mismatched)
			require.ErrorIs(b.t, err, onceq.ErrMismatch)
		}
		b.drain(handler)
	}
	for range 2 { // then replayed
		_, err := onceq.Do(ctx, b.q, onceq.FenceSpec{Key: "report"}, func(context.Context, *onceq.FenceLease) (int, error) { return 1, nil })
		require.NoError(b.t, err)
	}
	b.enqueue(ctx, onceq.Job{Kind: "welcome", Queue: "mail"})
	l := b.claim()
	require.NoError(b.t, l.Release(ctx))
	_, err := b.q.Cancel(ctx, b.Pool, l.ID)
	require.NoError(b.t, err)
	gone := b.enqueue(ctx, onceq.Job{Kind: "welcome", Queue: "mail", Payload: mail{}, Delay: time.Hour})
	_, err = b.q.Cancel(ctx, b.Pool, gone.ID)
	require.NoError(b.t, err)
	b.Advance(48 * time.Hour)
	reaper, err := onceq.NewReaper(b.q, onceq.ReaperConfig{})
	require.NoError(b.t, err)
	_, err = reaper.RunOnce(ctx)
	require.NoError(b.t, err)
}

// sums returns the value of each counter over all attributes, and the count of each histogram.
func (b *bench) sums() (map[string]int64, map[string][]string) {
	var data metricdata.ResourceMetrics
	require.NoError(b.t, b.read.Collect(b.t.Context(), &data))
	sums, keys := map[string]int64{}, map[string][]string{}
	for _, s := range data.ScopeMetrics {
		for _, m := range s.Metrics {
			note := func(iter interface {
				Next() bool
			}, key func() string) {
				for iter.Next() {
					if k := key(); !slices.Contains(keys[m.Name], k) {
						keys[m.Name] = append(keys[m.Name], k)
					}
				}
			}
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					sums[m.Name] += p.Value
					i := p.Attributes.Iter()
					note(&i, func() string { return string(i.Attribute().Key) })
				}
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					sums[m.Name] += int64(p.Count)
					i := p.Attributes.Iter()
					note(&i, func() string { return string(i.Attribute().Key) })
				}
			case metricdata.Gauge[int64]:
				for _, p := range d.DataPoints {
					state, _ := p.Attributes.Value("onceq.state")
					queue, _ := p.Attributes.Value("onceq.queue")
					sums[m.Name+" "+queue.AsString()+" "+state.AsString()] += p.Value
				}
			case metricdata.Gauge[float64]:
				for _, p := range d.DataPoints {
					queue, _ := p.Attributes.Value("onceq.queue")
					reason, _ := p.Attributes.Value("onceq.reason")
					sums[m.Name+" "+queue.AsString()+" "+reason.AsString()] = int64(p.Value)
				}
			}
		}
	}
	return sums, keys
}

func TestMetrics_CountWhatHappens(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.everything()
	sums, keys := b.sums()
	require.Positive(t, sums["onceq.rows.reaped"])
	delete(sums, "onceq.rows.reaped")
	for name := range sums {
		if strings.HasPrefix(name, "messaging.") {
			delete(sums, name)
		}
	}
	require.Equal(t, map[string]int64{
		"onceq.jobs.enqueued":       9,
		"onceq.jobs.duplicates":     7,
		"onceq.jobs.mismatches":     1,
		"onceq.jobs.completed":      1,
		"onceq.jobs.failed":         3,
		"onceq.jobs.snoozed":        1,
		"onceq.jobs.released":       1,
		"onceq.jobs.dead":           1,
		"onceq.jobs.cancelled":      2,
		"onceq.jobs.held":           1, // with its effect
		"onceq.leases.lost":         1,
		"onceq.completions.refused": 1,
		"onceq.effects.replayed":    1,
		"onceq.effects.uncertain":   2,
		"onceq.job.wait.duration":   10, // ada and held twice; the other holder claims without telemetry
		"onceq.job.run.duration":    9,  // one was given back before it ran
	}, sums)
	for name, keys := range keys {
		if strings.HasPrefix(name, "messaging.") {
			continue
		}
		slices.Sort(keys)
		want := []string{"onceq.kind", "onceq.queue"}
		switch name {
		case "onceq.job.run.duration":
			want = []string{"onceq.kind"}
		case "onceq.job.wait.duration":
			want = []string{"onceq.queue", "onceq.reason"}
		case "onceq.jobs.held", "onceq.leases.lost", "onceq.completions.refused":
			want = []string{"onceq.queue"}
		case "onceq.rows.reaped":
			want = []string{"onceq.rows"}
		}
		require.Equal(t, want, keys, name)
	}
}

// points returns a metric by its attributes: a counter's value, or the number of a histogram's observations.
func (b *bench) points(name string) map[string]int64 {
	var data metricdata.ResourceMetrics
	require.NoError(b.t, b.read.Collect(b.t.Context(), &data))
	points := map[string]int64{}
	note := func(set attribute.Set, n int64) {
		points[strings.ReplaceAll(set.Encoded(attribute.DefaultEncoder()), "messaging.", "")] += n
	}
	for _, s := range data.ScopeMetrics {
		for _, m := range s.Metrics {
			if m.Name != name {
				continue
			}
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					note(p.Attributes, p.Value)
				}
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					require.Positive(b.t, p.Sum, name)
					note(p.Attributes, int64(p.Count))
				}
			}
		}
	}
	return points
}

// The metrics meet the semantic conventions' requirements for a messaging system, with the attributes that they name.
func TestMetrics_OfTheConventions(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	b.enqueue(ctx, welcome.Job(mail{"ada"}))
	strict := welcome.Job(mail{"ada"})
	strict.Strict = true
	_, err := b.q.Enqueue(ctx, b.Pool, strict)
	require.ErrorIs(t, err, onceq.ErrDuplicate)
	_, err = b.q.Enqueue(ctx, b.Pool, onceq.Job{Queue: "mail"})
	require.ErrorContains(t, err, "Kind")
	_, err = b.q.EnqueueMany(ctx, b.Pool, []onceq.Job{welcome.Job(mail{"bob"}), welcome.Job(mail{"eve"}), {Kind: "k"}})
	require.NoError(t, err)
	for range 2 {
		batch := &pgx.Batch{}
		pending, err := b.q.EnqueueInBatch(batch, welcome.Job(mail{"in a batch"}))
		require.NoError(t, err)
		require.NoError(t, pipeline(ctx, b.Pool, batch))
		_, err = pending.Result(ctx, b.Pool)
		require.NoError(t, err)
	}
	require.Equal(t, map[string]int64{
		"destination.name=mail,operation.name=send,operation.type=send,system=onceq":                                1,
		"error.type=duplicate,destination.name=mail,operation.name=send,operation.type=send,system=onceq":           1,
		"error.type=*onceq.InvalidError,destination.name=mail,operation.name=send,operation.type=send,system=onceq": 1,
		"operation.name=send,operation.type=send,system=onceq":                                                      1, // to two queues at once
	}, b.points("messaging.client.operation.duration"))
	require.Equal(t, map[string]int64{
		"destination.name=mail,operation.name=send,operation.type=send,system=onceq":                      5,
		"destination.name=default,operation.name=send,operation.type=send,system=onceq":                   1,
		"error.type=duplicate,destination.name=mail,operation.name=send,operation.type=send,system=onceq": 1,
	}, b.points("messaging.client.sent.messages"))

	b.drain(welcome.Handle(func(_ context.Context, l *onceq.Lease, m mail) error {
		switch {
		case m.To == "eve":
			return onceq.Snooze(time.Hour)
		case l.Attempt == 1:
			return errBoom
		}
		return nil
	}))
	require.Equal(t, map[string]int64{
		"destination.name=mail,operation.name=claim,system=onceq": 7,
	}, b.points("messaging.client.consumed.messages"))
	require.Equal(t, map[string]int64{
		"destination.name=mail,operation.name=process,system=onceq":                                4, // includes the snooze
		"error.type=*errors.errorString,destination.name=mail,operation.name=process,system=onceq": 3,
	}, b.points("messaging.process.duration"))

	_, err = b.q.EnqueueMany(ctx, b.Pool, []onceq.Job{welcome.Job(mail{"1"}), welcome.Job(mail{"2"})})
	require.NoError(t, err)
	b.drain(welcome.HandleBatch(2, func(context.Context, pgx.Tx, []onceq.Item[mail]) error { return nil }))
	require.EqualValues(t, 9, b.points("messaging.client.consumed.messages")["destination.name=mail,operation.name=claim,system=onceq"])
	require.EqualValues(t, 5, b.points("messaging.process.duration")["destination.name=mail,operation.name=process,system=onceq"], "a batch is one operation")
}

// increase() does not see the event with which a counter begins, so those of which one matters begin before it. The others do
// not: each series costs its keeper something.
func TestMetrics_CountersBeginBeforeAnythingHappens(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	sums, _ := b.sums()
	for _, name := range []string{"onceq.jobs.held", "onceq.effects.uncertain"} { // work outside jobs
		require.Contains(t, sums, name)
	}
	handlers := b.tel.Handlers(welcome.Handle(func(context.Context, *onceq.Lease, mail) error { return onceq.Fatal(errBoom) }))
	const series = "onceq.kind=welcome,onceq.queue=mail"
	require.Equal(t, map[string]int64{series: 0}, b.points("onceq.jobs.dead"))
	require.Equal(t, map[string]int64{series: 0, "": 0}, b.points("onceq.effects.uncertain"))
	for _, name := range []string{"onceq.jobs.held", "onceq.leases.lost"} {
		require.Equal(t, map[string]int64{"onceq.queue=mail": 0, "": 0}, b.points(name), name)
	}
	for _, name := range []string{"enqueued", "duplicates", "mismatches", "completed", "failed", "deferred", "snoozed", "released", "cancelled"} {
		require.Empty(t, b.points("onceq.jobs."+name), name)
	}
	require.Empty(t, b.points("onceq.completions.refused"))

	b.enqueue(t.Context(), welcome.Job(mail{"ada"}))
	w, err := onceq.NewWorker(b.q, onceq.WorkerConfig{}, handlers...)
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	require.EqualValues(t, 1, b.points("onceq.jobs.dead")[series])

	// Counters of a kind without a handler begin with its first event of any type.
	b.enqueue(t.Context(), onceq.Job{Kind: "k"})
	require.Contains(t, b.points("onceq.jobs.dead"), "onceq.kind=k,onceq.queue=default")
}

// The documentation names all work in the background that may fail.
func TestMetrics_BackgroundWorkIsDocumented(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("../internal/watch/troubles.go")
	require.NoError(t, err)
	doc, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	documented := regexp.MustCompile(`onceq\.background\.errors .*`).FindString(string(doc))
	works := regexp.MustCompile(`&Work\{"([a-z]+)"`).FindAllStringSubmatch(string(source), -1)
	require.NotEmpty(t, works)
	for _, m := range works {
		require.Contains(t, documented, m[1])
	}
}

// Jobs that a loop around Claim completes, with Complete or in a batch, are counted like a worker's, with their run
// time.
func TestMetrics_CompletedByHand(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	inBatch := func(l *onceq.Lease) error {
		batch := &pgx.Batch{}
		batch.Queue("begin")
		require.NoError(t, l.CompleteInBatch(batch))
		batch.Queue("commit")
		return pipeline(ctx, b.Pool, batch)
	}
	for n, complete := range []func(*onceq.Lease) error{
		func(l *onceq.Lease) error { return l.Complete(ctx, nil) },
		inBatch,
	} {
		r := b.enqueue(ctx, welcome.Job(mail{strconv.Itoa(n)}))
		old := b.claim()
		b.ExpireLease(r.ID)
		l := b.claim()
		require.True(t, onceq.LeaseLost(complete(old)))
		require.NoError(t, complete(l))
		sums, _ := b.sums()
		require.EqualValues(t, n+1, sums["onceq.jobs.completed"])
		require.EqualValues(t, n+1, sums["onceq.completions.refused"])
		require.EqualValues(t, n+1, sums["onceq.job.run.duration"])
	}
}

// Names that come from outside do not fill the memory, and every event is counted.
func TestMetrics_LabelsAreBounded(t *testing.T) {
	t.Parallel()
	read := metric.NewManualReader()
	tel, err := onceqotel.New(onceqotel.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(read))})
	require.NoError(t, err)
	const n = 3*onceqotel.MaxLabels + 7
	most := 0
	for i := range n {
		tel.Event(t.Context(), onceq.Event{Type: onceq.EventEnqueued, Queue: "q", Kind: strconv.Itoa(i)})
		if i%onceqotel.MaxLabels < 2 || i == n-1 {
			most = max(most, tel.Labels())
		}
	}
	require.LessOrEqual(t, most, onceqotel.MaxLabels)
	require.Less(t, tel.Labels(), 100)
	sums, _ := (&bench{t: t, read: read}).sums()
	require.EqualValues(t, n, sums["onceq.jobs.enqueued"])
}

// queries counts the statements of a pool that read the queues' statistics.
type queries struct{ stats atomic.Int64 }

func (q *queries) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, "live (queue)") {
		q.stats.Add(1)
	}
	return ctx
}
func (q *queries) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (q *queries) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, query := range data.Batch.QueuedQueries {
		if strings.Contains(query.SQL, "live (queue)") {
			q.stats.Add(1)
		}
	}
	return ctx
}
func (q *queries) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (q *queries) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// All gauges of a collection come from one query. Collections that follow soon share it.
func TestWatch_DepthAndAgeFromOneQuery(t *testing.T) {
	t.Parallel()
	var count queries
	b := newBench(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &count }))
	_, err := b.q.EnqueueMany(t.Context(), b.Pool, []onceq.Job{
		{Kind: "k"}, {Kind: "k"}, {Kind: "k", Delay: 10 * time.Hour}, {Kind: "k", Queue: "other"},
	})
	require.NoError(t, err)
	b.Advance(time.Hour)
	registration, err := b.tel.Watch(b.q)
	require.NoError(t, err)
	began := time.Now()
	for range 3 {
		sums, _ := b.sums()
		require.EqualValues(t, 2, sums["onceq.queue.depth default waiting"])
		require.EqualValues(t, 1, sums["onceq.queue.depth default delayed"])
		for _, none := range []string{"depth default running", "depth default dead", "capped default ", "oldest.age default lane"} {
			require.NotContains(t, sums, "onceq.queue."+none)
		}
		require.EqualValues(t, 1, sums["onceq.queue.depth other waiting"])
		require.InDelta(t, 3600, sums["onceq.queue.oldest.age default worker"], 600)
	}
	require.Positive(t, count.stats.Load())
	require.LessOrEqual(t, count.stats.Load(), 1+int64(time.Since(began)/(5*time.Second)))

	require.NoError(t, registration.Unregister())
	sums, _ := b.sums()
	require.NotContains(t, sums, "onceq.queue.depth default waiting")

	only, err := b.tel.Watch(b.q, "other")
	require.NoError(t, err)
	defer func() { require.NoError(t, only.Unregister()) }()
	sums, _ = b.sums()
	require.NotContains(t, sums, "onceq.queue.depth default waiting")
	require.EqualValues(t, 1, sums["onceq.queue.depth other waiting"])
}

// Jobs behind a lane are the depth of their queue too.
func TestWatch_BlockedJobs(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	laned := onceq.Kind[mail]{Name: "laned", Queue: "mail", Lane: func(mail) string { return "x" }}
	for _, to := range []string{"ada", "bob", "eve"} {
		b.enqueue(t.Context(), laned.Job(mail{to}))
	}
	_, err := b.tel.Watch(b.q)
	require.NoError(t, err)
	stats, err := onceqops.New(b.q).Stats(t.Context(), "mail")
	require.NoError(t, err)
	sums, _ := b.sums()
	require.Positive(t, stats[0].Blocked)
	require.EqualValues(t, stats[0].Blocked, sums["onceq.queue.depth mail blocked"])
	require.EqualValues(t, 3, sums["onceq.queue.depth mail blocked"]+sums["onceq.queue.depth mail waiting"])
}

// If the tables cannot be read, the reader gets the error and nothing is reported.
func TestWatch_ErrorIsTheReaders(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	nowhere, err := onceq.New(b.Pool, &onceq.Config{Schema: "nowhere"})
	require.NoError(t, err)
	_, err = b.tel.Watch(nowhere)
	require.NoError(t, err)
	var data metricdata.ResourceMetrics
	require.ErrorContains(t, b.read.Collect(t.Context(), &data), "stats")
	for _, s := range data.ScopeMetrics {
		for _, m := range s.Metrics {
			require.NotContains(t, m.Name, "onceq.queue.")
			require.NotEqual(t, "onceq.workers.stale", m.Name, "an alert rule asks whether it is there")
		}
	}
	_, err = b.tel.Watch(nil)
	require.ErrorContains(t, err, "Watch needs a queue")
}

// After the database is back, the next collection reads it.
func TestWatch_AnErrorIsNotKept(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.enqueue(t.Context(), onceq.Job{Kind: "k"})
	_, err := b.tel.Watch(b.q)
	require.NoError(t, err)
	_, err = b.Pool.Exec(t.Context(), `alter schema onceq rename to away`)
	require.NoError(t, err)
	var data metricdata.ResourceMetrics
	for range 2 {
		require.ErrorContains(t, b.read.Collect(t.Context(), &data), "stats")
	}
	_, err = b.Pool.Exec(t.Context(), `alter schema away rename to onceq`)
	require.NoError(t, err)
	sums, _ := b.sums()
	require.EqualValues(t, 1, sums["onceq.queue.depth default waiting"])
}

// What waits for a lane, a limit or another job is seen: for how long the oldest one has, and how long each one had.
func TestMetrics_WhatJobsWaitFor(t *testing.T) {
	t.Parallel()
	const waits = 27 * time.Minute
	b := newBench(t)
	_, err := b.tel.Watch(b.q)
	require.NoError(t, err)
	ctx := t.Context()
	jobs := map[string][2]onceq.Job{"lane": {{Lane: "f/x"}, {Lane: "f/x"}}, "limit": {{Limit: "l"}, {Limit: "l"}}, "jobs": {}}
	var firsts []*onceq.Lease
	for reason, pair := range jobs {
		for i, job := range pair {
			job.Kind, job.Queue = reason, reason
			if reason == "jobs" && i == 1 {
				job.After = []onceq.JobRef{{ID: firsts[len(firsts)-1].ID}}
			}
			b.enqueue(ctx, job)
			if i == 0 {
				leases, err := b.DB.Queue.Claim(ctx, onceq.ClaimOptions{Queue: reason, Lease: 2 * waits}) // without telemetry
				require.NoError(t, err)
				firsts = append(firsts, leases...)
			}
		}
	}
	require.Len(t, firsts, 3)
	b.Advance(waits)
	sums, _ := b.sums()
	for reason := range jobs {
		require.GreaterOrEqual(t, sums["onceq.queue.oldest.age "+reason+" "+reason], int64(waits.Seconds()))
		require.NotContains(t, sums, "onceq.queue.oldest.age "+reason+" worker")
		require.EqualValues(t, 1, sums["onceq.queue.depth "+reason+" blocked"])
	}
	for _, l := range firsts {
		require.NoError(t, l.Complete(ctx, nil))
	}
	queues := make(map[string]onceq.QueueConfig)
	var handlers []onceq.Handler
	for reason := range jobs {
		queues[reason] = onceq.QueueConfig{}
		handlers = append(handlers, onceq.Kind[any]{Name: reason, Queue: reason}.Handle(func(context.Context, *onceq.Lease, any) error { return nil }))
	}
	w, err := onceq.NewWorker(b.q, onceq.WorkerConfig{Queues: queues}, handlers...)
	require.NoError(t, err)
	require.NoError(t, w.Drain(ctx, 0))
	points := b.points("onceq.job.wait.duration")
	for reason := range jobs {
		require.EqualValues(t, 1, points["onceq.queue="+reason+",onceq.reason="+reason], "%v", points)
	}
}

// scrape returns what Prometheus gets over HTTP after everything has happened.
func scrape(t *testing.T) string {
	b := newBench(t)
	registry := prometheus.NewRegistry()
	exporter, err := otelprom.New(otelprom.WithRegisterer(registry))
	require.NoError(t, err)
	b.tel, err = onceqotel.New(onceqotel.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(exporter))})
	require.NoError(t, err)
	b.q, err = onceq.New(b.Pool, b.tel.Config(nil))
	require.NoError(t, err)
	_, err = b.tel.Watch(b.q)
	require.NoError(t, err)
	b.everything()
	ctx := t.Context()
	b.tel.Event(ctx, onceq.Event{Type: onceq.EventBackground, Name: "claim", Queue: "mail", Err: errBoom})
	b.tel.Event(ctx, onceq.Event{Type: onceq.EventDeferred, Kind: "welcome", Queue: "mail", Err: errBoom})
	b.tel.Event(ctx, onceq.Event{Type: onceq.EventReplayed, Kind: "welcome", Queue: "mail", Name: "mail"})
	require.NoError(t, b.q.SetLimit(ctx, b.Pool, "provider", onceq.Limit{AtOnce: 1}))
	for range 2 {
		b.enqueue(ctx, onceq.Job{Kind: "limited", Limit: "provider"})
	}
	_, err = b.q.EnqueueMany(ctx, b.Pool, slices.Repeat([]onceq.Job{{Kind: "nobody", Queue: "lonely"}}, onceqops.StatsCap+1)) // a severe finding
	require.NoError(t, err)
	b.enqueue(ctx, onceq.Job{Kind: "tick", Queue: "onceqcron"})
	require.NoError(t, b.q.PauseKind(ctx, b.Pool, "welcome", ""))
	require.NoError(t, b.q.PauseQueue(ctx, b.Pool, "mail", ""))
	require.NoError(t, b.q.Pause(ctx, b.Pool, onceq.Pause{Limit: "provider"}))
	b.Advance(time.Hour) // which makes findings of both
	running, err := b.q.Claim(ctx, onceq.ClaimOptions{Queue: "lonely"})
	require.NoError(t, err)
	require.Len(t, running, 1)
	working, stop := context.WithCancel(ctx)
	defer stop()
	w, err := onceq.NewWorker(b.q, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"mail": {}}}, welcome.Handle(func(context.Context, *onceq.Lease, mail) error { return nil }))
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- w.Run(working) }()
	defer func() {
		stop()
		require.NoError(t, <-ended)
	}()
	for workers := 0; workers == 0; time.Sleep(time.Millisecond) {
		all, err := onceqops.New(b.q).Workers(ctx, nil)
		require.NoError(t, err)
		workers = len(all)
	}

	server := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	defer server.Close()
	response, err := http.Get(server.URL)
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, http.StatusOK, response.StatusCode)
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return string(body)
}

var series = regexp.MustCompile(`(?m)^([a-z_]+)(\{[^}]*\})? (\S+)`)
var pair = regexp.MustCompile(`([a-z_]+)(=~|!=|=)"([^"]*)"`)

// exports are the metrics of a scrape: their labels with all values of each.
type exports map[string]map[string]map[string]bool

func read(body string) exports {
	all := make(exports)
	for _, m := range series.FindAllStringSubmatch(body, -1) {
		if all[m[1]] == nil {
			all[m[1]] = make(map[string]map[string]bool)
		}
		for _, p := range pair.FindAllStringSubmatch(m[2], -1) {
			if all[m[1]][p[1]] == nil {
				all[m[1]][p[1]] = make(map[string]bool)
			}
			all[m[1]][p[1]][p[3]] = true
		}
	}
	return all
}

var (
	selector = regexp.MustCompile(`\b((?:onceq|messaging)_[a-z_]+)(\{[^}]*\})?`)
	grouped  = regexp.MustCompile(`\b(?:by|on) \(([^)]*)\)`)
)

// check requires that all metrics, labels and values that an expression asks for are exported, and returns the metrics.
func (e exports) check(t *testing.T, where, expr string) (asked []string) {
	t.Helper()
	labels := map[string]bool{"le": true}
	for _, m := range selector.FindAllStringSubmatch(grouped.ReplaceAllString(expr, ""), -1) {
		require.Contains(t, e, m[1], "%s asks for %s, which is not exported", where, m[1])
		asked = append(asked, m[1])
		for _, p := range pair.FindAllStringSubmatch(m[2], -1) {
			require.Contains(t, e[m[1]], p[1], "%s: %s has no such label", where, m[1])
			if p[2] == "=" {
				require.Contains(t, e[m[1]][p[1]], p[3], "%s: %s has no such value of %s", where, m[1], p[1])
			}
		}
		for label := range e[m[1]] {
			labels[label] = true
		}
	}
	require.NotEmpty(t, asked, where)
	for _, m := range grouped.FindAllStringSubmatch(expr, -1) {
		for label := range strings.SplitSeq(m[1], ", ") {
			require.Contains(t, labels, label, "%s groups by what no metric of it has", where)
		}
	}
	return asked
}

// Every metric is exported to Prometheus, the dashboard shows each, and the dashboard and the alert rules ask for no other
// metric, label or value.
func TestPrometheus_ScrapeDashboardAndAlerts(t *testing.T) {
	t.Parallel()
	body := scrape(t)
	exported := read(body)
	for name := range exported {
		if !strings.HasPrefix(name, "onceq_") {
			require.NotContains(t, name, "messaging_", "only with Config.Conventions")
			delete(exported, name)
		}
	}
	for _, name := range []string{
		"onceq_jobs_enqueued_total", "onceq_jobs_duplicates_total", "onceq_jobs_mismatches_total",
		"onceq_jobs_completed_total", "onceq_jobs_failed_total", "onceq_jobs_deferred_total", "onceq_jobs_snoozed_total", "onceq_jobs_released_total", "onceq_jobs_dead_total",
		"onceq_jobs_cancelled_total", "onceq_jobs_held_total", "onceq_leases_lost_total", "onceq_completions_refused_total",
		"onceq_effects_replayed_total", "onceq_effects_uncertain_total", "onceq_rows_reaped_total", "onceq_background_errors_total",
		"onceq_job_wait_duration_seconds_bucket", "onceq_job_wait_duration_seconds_sum", "onceq_job_wait_duration_seconds_count",
		"onceq_job_run_duration_seconds_bucket", "onceq_job_run_duration_seconds_sum", "onceq_job_run_duration_seconds_count",
		"onceq_queue_depth", "onceq_queue_capped", "onceq_queue_oldest_age_seconds", "onceq_workers", "onceq_workers_slots", "onceq_workers_stale",
		"onceq_paused_age_seconds", "onceq_limit_jobs", "onceq_limit_capacity", "onceq_limit_oldest_age_seconds", "onceq_health_findings",
	} {
		require.Contains(t, exported, name)
	}
	require.Len(t, exported, 34)
	require.Regexp(t, `(?m)^onceq_jobs_completed_total\{[^}]*onceq_kind="welcome",onceq_queue="mail"[^}]*\} 1$`, body)
	require.Regexp(t, `(?m)^onceq_queue_depth\{[^}]*onceq_queue="mail",onceq_state="held"[^}]*\} 1$`, body)
	require.Regexp(t, `(?m)^onceq_workers\{[^}]*onceq_queue="mail"[^}]*\} 1$`, body)
	require.Regexp(t, `(?m)^onceq_workers\{[^}]*onceq_queue="lonely"[^}]*\} 0$`, body)
	require.Regexp(t, `(?m)^onceq_limit_capacity\{[^}]*onceq_limit="provider"[^}]*\} 1$`, body)
	require.Regexp(t, `(?m)^onceq_health_findings\{[^}]*onceq_finding="waiting"[^}]*onceq_severe="true"[^}]*\} [1-9]`, body)
	require.False(t, strings.Contains(body, "welcome:"), "a key is in it")
	require.LessOrEqual(t, strings.Count(body, `onceq_kind="welcome"`), 24, "a kind of job to which everything has happened costs more series than it did")
	for _, m := range series.FindAllStringSubmatch(body, -1) {
		if strings.HasSuffix(m[1], "_total") && m[3] == "0" {
			require.Regexp(t, "dead|held|lost|uncertain", m[1], "a series that says nothing")
		}
	}

	shown := map[string]bool{"onceq_job_wait_duration_seconds_sum": true, "onceq_job_run_duration_seconds_sum": true, "onceq_job_run_duration_seconds_count": true}
	for _, p := range dashboard(t).Panels {
		for _, target := range p.Targets {
			for _, name := range exported.check(t, "panel "+p.Title, target.Expr) {
				shown[name] = true
			}
		}
		if p.Title == "Depth" {
			require.Contains(t, p.Description, "1,000.", "onceqops.StatsCap")
			require.Equal(t, 1_000, onceqops.StatsCap)
		}
	}
	for name := range exported {
		require.True(t, shown[name], "no panel shows %s", name)
	}
	for name, expr := range alerts(t) {
		exported.check(t, name, expr)
		for label := range exported["onceq_paused_age_seconds"] {
			require.True(t, name != "OnceqPaused" || !strings.HasPrefix(label, "onceq_") || strings.Contains(expr, label), label)
		}
	}
}

type board struct {
	Panels []struct {
		Title, Description string
		Targets            []struct{ Expr string }
	}
}

func dashboard(t *testing.T) (d board) {
	raw, err := os.ReadFile("dashboard.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(raw, &d))
	return d
}

// alerts returns the expression of each alert rule.
func alerts(t *testing.T) map[string]string {
	raw, err := os.ReadFile("alerts.yaml")
	require.NoError(t, err)
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr, For string
				Labels           map[string]string
				Annotations      map[string]string
			}
		}
	}
	require.NoError(t, yaml.Unmarshal(raw, &file))
	rules := make(map[string]string)
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			require.Contains(t, []string{"page", "ticket"}, r.Labels["severity"], r.Alert)
			require.NotEmpty(t, r.Annotations["summary"], r.Alert)
			rules[r.Alert] = r.Expr
		}
	}
	require.NotEmpty(t, rules)
	return rules
}
