package onceqotel

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/semconv/v1.43.0/messagingconv"

	"github.com/onceq/onceq"
)

// These attributes are not in the semantic conventions.
const (
	queueKey   = attribute.Key("onceq.queue")
	kindKey    = attribute.Key("onceq.kind")
	stateKey   = attribute.Key("onceq.state")
	reasonKey  = attribute.Key("onceq.reason")
	rowsKey    = attribute.Key("onceq.rows")
	workKey    = attribute.Key("onceq.work")
	attemptKey = attribute.Key("onceq.attempt")
	lostKey    = attribute.Key("onceq.lost")
	tokenKey   = attribute.Key("onceq.token")
	effectKey  = attribute.Key("onceq.effect")
)

// counters has a counter for each type of event but a claim, which the histogram of waits counts.
var counters = map[onceq.EventType]struct{ name, unit, description string }{
	onceq.EventEnqueued:  {"onceq.jobs.enqueued", "{job}", "Jobs accepted; their transaction may still have rolled back."},
	onceq.EventDuplicate: {"onceq.jobs.duplicates", "{job}", "Jobs that were not accepted because their key was taken."},
	onceq.EventMismatch:  {"onceq.jobs.mismatches", "{job}", "Jobs that were refused because their key was taken with another payload."},
	onceq.EventCompleted: {"onceq.jobs.completed", "{job}", "Jobs completed."},
	onceq.EventFailed:    {"onceq.jobs.failed", "{attempt}", "Failed attempts of jobs that run again."},
	onceq.EventDeferred:  {"onceq.jobs.deferred", "{attempt}", "Runs that deferred their job because of an error, without spending an attempt."},
	onceq.EventSnoozed:   {"onceq.jobs.snoozed", "{attempt}", "Runs that deferred their job without a failure."},
	onceq.EventReleased:  {"onceq.jobs.released", "{job}", "Jobs given back as if they had not been claimed."},
	onceq.EventDead:      {"onceq.jobs.dead", "{job}", "Jobs that are out of attempts, fatal, or crashed too often."},
	onceq.EventCancelled: {"onceq.jobs.cancelled", "{job}", "Jobs cancelled."},
	onceq.EventHeld:      {"onceq.jobs.held", "{job}", "Jobs, and work outside of jobs, that wait for a person."},
	onceq.EventLeaseLost: {"onceq.leases.lost", "{lease}", "Leases that their holder lost."},
	onceq.EventStale:     {"onceq.completions.refused", "{completion}", "Completions refused because another holder had the job by then."},
	onceq.EventReplayed:  {"onceq.effects.replayed", "{effect}", "Stored outcomes returned instead of running again."},
	onceq.EventUncertain: {"onceq.effects.uncertain", "{effect}", "Effects that may or may not have happened."},
	onceq.EventReaped:    {"onceq.rows.reaped", "{row}", "Rows that a reaper removed."},

	onceq.EventBackground: {"onceq.background.errors", "{error}", "Failures of work in the background, which is tried again."},
}

// Bucket boundaries, in seconds. A healthy queue makes jobs wait for milliseconds; a backlog can take hours.
var (
	buckets = []float64{.01, .05, .25, 1, 5, 30, 300, 3600}

	// These boundaries come from the conventions.
	clientBuckets = []float64{.005, .01, .025, .05, .075, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10}
)

// operation is the name of a messaging operation of the semantic conventions.
type operation string

const (
	send    operation = "send"
	claim   operation = "claim"
	process operation = "process"
)

type metrics struct {
	counters  map[onceq.EventType]metric.Int64Counter
	wait, run metric.Float64Histogram

	// These are the metrics of the conventions, which are nil without conventions.
	conventions         bool
	sent, consumed      metric.Int64Counter
	sending, processing metric.Float64Histogram

	labels sync.Map // label → *options; an application has few queues and kinds, and each job needs one
	known  atomic.Int64
}

// maxLabels bounds the cached labels, for applications whose queues or kinds are named from outside. OpenTelemetry's
// SDK keeps 2,000 for each metric by default, and counts the rest together.
const maxLabels = 10_000

type label struct {
	queue, kind, reason, rows, work string

	// The conventions' metrics use it. They have no kind.
	operation operation
	errorType string
}

// options are the measurement options for one label.
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
	m.wait, err = meter.Float64Histogram("onceq.job.wait.duration", metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(buckets...),
		metric.WithDescription("From when a job was due to when it was claimed, whatever held it, by the database's clock. Its count is the jobs given to a worker."))
	errs = append(errs, err)
	m.run, err = meter.Float64Histogram("onceq.job.run.duration", metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(buckets...),
		metric.WithDescription("How long a handler took."))
	errs = append(errs, err)
	if m.conventions {
		errs = append(errs, m.initConventions(meter))
	}
	m.options(label{})
	return errors.Join(errs...)
}

func (m *metrics) initConventions(meter metric.Meter) error {
	var errs []error
	sent, err := messagingconv.NewClientSentMessages(meter)
	errs = append(errs, err)
	consumed, err := messagingconv.NewClientConsumedMessages(meter)
	errs = append(errs, err)
	sending, err := messagingconv.NewClientOperationDuration(meter, metric.WithExplicitBucketBoundaries(clientBuckets...))
	errs = append(errs, err)
	processing, err := messagingconv.NewProcessDuration(meter, metric.WithExplicitBucketBoundaries(buckets...))
	errs = append(errs, err)
	m.sent, m.consumed, m.sending, m.processing = sent.Inst(), consumed.Inst(), sending.Inst(), processing.Inst()
	return errors.Join(errs...)
}

// zero makes the counters of which one event matters already begin at zero for a label: Prometheus's increase() does not see
// the event with which a counter begins. The others begin with their first event.
func (m *metrics) zero(l label, o *options) {
	begin := func(types ...onceq.EventType) {
		for _, t := range types {
			m.counters[t].Add(context.Background(), 0, o.add...)
		}
	}
	switch l {
	case label{}: // work outside jobs
		begin(onceq.EventHeld, onceq.EventLeaseLost, onceq.EventUncertain)
	case label{queue: l.queue}:
		begin(onceq.EventHeld, onceq.EventLeaseLost)
	case label{queue: l.queue, kind: l.kind}:
		if l.queue != "" { // the histogram of runs has the kind alone
			begin(onceq.EventDead, onceq.EventUncertain)
			m.options(label{queue: l.queue})
		}
	}
}

// hasSent reports jobs that were sent, or that were not because of err.
func (m *metrics) hasSent(ctx context.Context, took time.Duration, jobs []onceq.Job, queue string, err error) {
	if !m.conventions {
		return
	}
	kind := ""
	if err != nil {
		kind, _ = errorType(err)
	}
	m.sending.Record(ctx, took.Seconds(), m.options(label{queue: queue, operation: send, errorType: kind}).record...)
	if unsent := (*onceq.InvalidError)(nil); errors.As(err, &unsent) {
		return
	}
	for n, rest := 0, jobs; len(rest) > 0; rest = rest[n:] {
		queue := queueOf(rest[0])
		for n = 1; n < len(rest) && queueOf(rest[n]) == queue; {
			n++
		}
		m.sent.Add(ctx, int64(n), m.options(label{queue: queue, operation: send, errorType: kind}).add...)
	}
}

// hasProcessed reports an attempt.
func (m *metrics) hasProcessed(ctx context.Context, took time.Duration, queue string, err error) {
	if !m.conventions {
		return
	}
	l := label{queue: queue, operation: process}
	if onceq.IsFailure(err) {
		l.errorType, _ = errorType(err)
	}
	m.processing.Record(ctx, took.Seconds(), m.options(l).record...)
}

func (m *metrics) event(ctx context.Context, e onceq.Event) {
	counter, ok := m.counters[e.Type]
	if !ok && e.Type != onceq.EventClaimed || e.Type == onceq.EventHeld && e.Name != "" && e.JobID != 0 { // the job's own event counts it
		return
	}
	if e.Type == onceq.EventReaped { // the event's kind is the type of rows
		counter.Add(ctx, int64(e.Count), m.options(label{rows: e.Kind}).add...)
		return
	}
	if e.Type == onceq.EventBackground {
		counter.Add(ctx, 1, m.options(label{work: e.Name}).add...)
		return
	}
	o := m.options(label{queue: e.Queue, kind: e.Kind}) // begins the counters, also with a claim
	switch e.Type {
	case onceq.EventHeld, onceq.EventLeaseLost, onceq.EventStale:
		o = m.options(label{queue: e.Queue})
	}
	if ok {
		counter.Add(ctx, 1, o.add...)
	}
	switch e.Type {
	case onceq.EventClaimed:
		m.wait.Record(ctx, e.Wait.Seconds(), m.options(label{queue: e.Queue, reason: reasonOf(e)}).record...)
		if m.conventions {
			m.consumed.Add(ctx, 1, m.options(label{queue: e.Queue, operation: claim}).add...)
		}
	case onceq.EventEnqueued, onceq.EventDuplicate, onceq.EventMismatch:
		if m.conventions && e.Queue != "" && ctx.Value(producing{}) == nil { // jobs in the caller's batch: they are not timed
			sent := label{queue: e.Queue, operation: send}
			if e.Err != nil {
				sent.errorType, _ = errorType(e.Err)
			}
			m.sent.Add(ctx, 1, m.options(sent).add...)
		}
	}
	if e.Run > 0 {
		m.run.Record(ctx, e.Run.Seconds(), m.options(label{kind: e.Kind}).record...)
	}
}

// What jobs wait for, as JobInfo.WaitsFor has it, and for a worker.
const (
	forWorker = "worker"
	forLane   = "lane"
	forLimit  = "limit"
	forJobs   = "jobs"
)

// reasonOf says what a job that was claimed has waited for most of the time.
func reasonOf(e onceq.Event) string {
	if e.Held <= e.Wait/2 {
		return forWorker
	}
	switch e.HeldBy {
	case "lane":
		return forLane
	case "limit":
		return forLimit
	}
	return forJobs
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
	queue := queueKey
	if l.operation != "" {
		queue = semconv.MessagingDestinationNameKey
		attrs = append(attrs, system, semconv.MessagingOperationName(string(l.operation)))
		if l.operation == send {
			attrs = append(attrs, semconv.MessagingOperationTypeSend)
		}
	}
	text(queue, l.queue)
	text(kindKey, l.kind)
	text(reasonKey, l.reason)
	text(rowsKey, l.rows)
	text(workKey, l.work)
	text(semconv.ErrorTypeKey, l.errorType)
	set := metric.WithAttributeSet(attribute.NewSet(attrs...))
	o := &options{[]metric.AddOption{set}, []metric.RecordOption{set}}
	if m.known.Add(1) > maxLabels {
		m.labels.Clear() // labels in use are cached again at once
		m.known.Store(1)
	}
	m.labels.Store(l, o)
	m.zero(l, o)
	return o
}
