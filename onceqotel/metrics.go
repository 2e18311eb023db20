package onceqotel

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/onceq/onceq"
)

// Attributes beyond the semantic conventions.
const (
	queueKey   = attribute.Key("onceq.queue")
	kindKey    = attribute.Key("onceq.kind")
	stateKey   = attribute.Key("onceq.state")
	outcomeKey = attribute.Key("onceq.outcome")
	rowsKey    = attribute.Key("onceq.rows")
	attemptKey = attribute.Key("onceq.attempt")
	lostKey    = attribute.Key("onceq.lost")
	tokenKey   = attribute.Key("onceq.token")
	effectKey  = attribute.Key("onceq.effect")
)

// counters has one counter for each type of event.
var counters = map[onceq.EventType]struct{ name, unit, description string }{
	onceq.EventEnqueued:  {"onceq.jobs.enqueued", "{job}", "Jobs accepted; their transaction may still have rolled back."},
	onceq.EventDuplicate: {"onceq.jobs.duplicates", "{job}", "Jobs not accepted because their key was taken."},
	onceq.EventMismatch:  {"onceq.jobs.mismatches", "{job}", "Keys that were taken with another payload."},
	onceq.EventClaimed:   {"onceq.jobs.claimed", "{job}", "Jobs given to a worker."},
	onceq.EventCompleted: {"onceq.jobs.completed", "{job}", "Jobs completed."},
	onceq.EventFailed:    {"onceq.jobs.failed", "{attempt}", "Attempts that failed, of jobs that run again."},
	onceq.EventDeferred:  {"onceq.jobs.deferred", "{attempt}", "Runs that put their job off because of an error, without spending an attempt."},
	onceq.EventSnoozed:   {"onceq.jobs.snoozed", "{attempt}", "Runs that put their job off without having failed."},
	onceq.EventReleased:  {"onceq.jobs.released", "{job}", "Jobs given back as if they had not been claimed."},
	onceq.EventDead:      {"onceq.jobs.dead", "{job}", "Jobs that are out of attempts, fatal, or crashed too often."},
	onceq.EventCancelled: {"onceq.jobs.cancelled", "{job}", "Jobs cancelled."},
	onceq.EventHeld:      {"onceq.jobs.held", "{job}", "Jobs, and work outside of jobs, put before a person."},
	onceq.EventLeaseLost: {"onceq.leases.lost", "{lease}", "Leases that their holder lost."},
	onceq.EventStale:     {"onceq.completions.refused", "{completion}", "Completions refused because somebody else held the job by then."},
	onceq.EventReplayed:  {"onceq.effects.replayed", "{effect}", "Stored outcomes given in place of running again."},
	onceq.EventUncertain: {"onceq.effects.uncertain", "{effect}", "Effects of which it is not known whether they happened."},
	onceq.EventReaped:    {"onceq.rows.reaped", "{row}", "Rows that a reaper removed."},
}

// In seconds. Jobs wait for milliseconds when all is well, and for as long as a backlog or a backoff takes when not.
var (
	waitBuckets = []float64{.002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 6 * 3600, 24 * 3600}
	runBuckets  = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600}
)

type metrics struct {
	counters  map[onceq.EventType]metric.Int64Counter
	wait, run metric.Float64Histogram
	labels    sync.Map // label → *options: an application has few queues and kinds, and each job needs one
	known     atomic.Int64
}

// maxLabels bounds the labels, for an application that lets somebody else name its queues or kinds. OpenTelemetry's SDK
// keeps 2,000 for each metric, unless told otherwise, and counts what comes after them together.
const maxLabels = 10_000

type label struct{ queue, kind, outcome, rows string }

// options are what an instrument wants with one label.
type options struct {
	add    []metric.AddOption
	record []metric.RecordOption
}

func (m *metrics) init(meter metric.Meter) error {
	m.counters = make(map[onceq.EventType]metric.Int64Counter, len(counters))
	var errs []error
	for t, c := range counters {
		counter, err := meter.Int64Counter(c.name, metric.WithUnit(c.unit), metric.WithDescription(c.description))
		m.counters[t] = counter
		errs = append(errs, err)
	}
	var err error
	m.wait, err = meter.Float64Histogram("onceq.job.wait.duration", metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(waitBuckets...),
		metric.WithDescription("From when a job was due to when it was claimed, by the database's clock."))
	errs = append(errs, err)
	m.run, err = meter.Float64Histogram("onceq.job.run.duration", metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(runBuckets...),
		metric.WithDescription("How long a handler took."))
	return errors.Join(append(errs, err)...)
}

func (m *metrics) event(ctx context.Context, e onceq.Event) {
	counter, ok := m.counters[e.Type]
	if !ok || e.Type == onceq.EventHeld && e.Name != "" && e.JobID != 0 { // its job is held with it
		return
	}
	if e.Type == onceq.EventReaped { // its kind is the sort of rows
		counter.Add(ctx, int64(e.Count), m.options(label{rows: e.Kind}).add...)
		return
	}
	l := label{queue: e.Queue, kind: e.Kind}
	o := m.options(l)
	counter.Add(ctx, 1, o.add...)
	if e.Type == onceq.EventClaimed {
		m.wait.Record(ctx, e.Wait.Seconds(), o.record...)
	}
	if e.Run > 0 {
		l.outcome = string(e.Type)
		m.run.Record(ctx, e.Run.Seconds(), m.options(l).record...)
	}
}

func (m *metrics) options(l label) *options {
	if o, ok := m.labels.Load(l); ok {
		return o.(*options)
	}
	var attrs []attribute.KeyValue
	text := func(key attribute.Key, value string) {
		if value != "" {
			attrs = append(attrs, key.String(value))
		}
	}
	text(queueKey, l.queue)
	text(kindKey, l.kind)
	text(outcomeKey, l.outcome)
	text(rowsKey, l.rows)
	set := metric.WithAttributeSet(attribute.NewSet(attrs...))
	o := &options{[]metric.AddOption{set}, []metric.RecordOption{set}}
	if m.known.Add(1) > maxLabels {
		m.labels.Clear() // those that are in use are back at once
		m.known.Store(1)
	}
	m.labels.Store(l, o)
	return o
}
