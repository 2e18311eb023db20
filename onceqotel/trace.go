package onceqotel

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/onceq/onceq"
)

var system = semconv.MessagingSystemKey.String("onceq")

// carry returns the propagator in use. A propagator that does nothing would silently end each trace at the job.
func (t *Telemetry) carry() propagation.TextMapPropagator {
	if t.propagator != nil {
		return t.propagator
	}
	if p := otel.GetTextMapPropagator(); len(p.Fields()) > 0 {
		return p
	}
	return propagation.TraceContext{}
}

// producing marks the context of a producer span. Its value says whether the span is for a single job.
type producing struct{}

// BeforeEnqueue begins a producer span and puts its context into the jobs. Config sets it as
// onceq.Config.BeforeEnqueue.
func (t *Telemetry) BeforeEnqueue(ctx context.Context, jobs []onceq.Job) (context.Context, func(error)) {
	if len(jobs) == 0 {
		return ctx, func(error) {}
	}
	queue, kind := queueOf(jobs[0]), jobs[0].Kind
	for _, j := range jobs[1:] {
		if queueOf(j) != queue {
			queue = ""
		}
		if j.Kind != kind {
			kind = ""
		}
	}
	attrs := []attribute.KeyValue{system, semconv.MessagingOperationTypeSend, semconv.MessagingOperationName("send")}
	name := "send"
	if queue != "" {
		name += " " + queue
		attrs = append(attrs, semconv.MessagingDestinationName(queue))
	}
	if kind != "" {
		attrs = append(attrs, kindKey.String(kind))
	}
	if len(jobs) > 1 {
		attrs = append(attrs, semconv.MessagingBatchMessageCount(len(jobs)))
	}
	ctx, span := t.tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(attrs...))
	carrier := propagation.MapCarrier{}
	t.carry().Inject(ctx, carrier)
	for i := range jobs {
		jobs[i].Metadata = added(jobs[i].Metadata, carrier)
	}
	ctx = context.WithValue(ctx, producing{}, len(jobs) == 1)
	began := time.Now()
	return ctx, func(err error) {
		t.metrics.hasSent(ctx, time.Since(began), jobs, queue, err)
		fail(span, err)
		span.End()
	}
}

// Inject returns the job with the context of the span in ctx. It is for onceq.Queue.EnqueueInBatch, which takes no
// context.
func (t *Telemetry) Inject(ctx context.Context, job onceq.Job) onceq.Job {
	carrier := propagation.MapCarrier{}
	t.carry().Inject(ctx, carrier)
	job.Metadata = added(job.Metadata, carrier)
	return job
}

// added returns the metadata with the carrier's values. It leaves them out if they might make the metadata too large:
// no job fails because it is traced.
func added(metadata map[string]string, carrier propagation.MapCarrier) map[string]string {
	if len(carrier) == 0 {
		return metadata
	}
	all := make(map[string]string, len(metadata)+len(carrier))
	size := 2
	put := func(values map[string]string) {
		for k, v := range values {
			all[k] = v
			size += len(strconv.Quote(k)) + len(strconv.Quote(v)) + 2
		}
	}
	put(metadata)
	put(carrier)
	if size > onceq.MaxMetadataBytes*3/4 { // the size in JSON differs a little because of quoting
		return metadata
	}
	return all
}

func queueOf(j onceq.Job) string {
	if j.Queue == "" {
		return onceq.DefaultQueue
	}
	return j.Queue
}

// Handlers returns the handlers with a consumer span around each attempt. The counters of their kinds begin here.
func (t *Telemetry) Handlers(handlers ...onceq.Handler) []onceq.Handler {
	wrapped := make([]onceq.Handler, len(handlers))
	for i, h := range handlers {
		wrapped[i] = h.Wrap(t.process)
		t.metrics.options(label{queue: h.Queue(), kind: h.Kind()}) // begins the counters
	}
	return wrapped
}

// process runs an attempt in a consumer span.
func (t *Telemetry) process(ctx context.Context, leases []*onceq.Lease, next func(context.Context) error) (err error) {
	ctx, end := t.Start(ctx, leases...)
	err = errNotReturned
	defer func() { end(err) }()
	err = next(ctx)
	return err
}

// errNotReturned stands for a panic, and for a handler that ended its goroutine.
var errNotReturned = errors.New("panic")

// Start begins the consumer span of an attempt in a loop of your own around Queue.Claim; for the handlers of a worker,
// Handlers does that. Call end once, with the error that a handler would have returned:
//
//	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
//	for _, l := range leases {
//		ctx, end := tel.Start(ctx, l)
//		err := work(ctx, l)
//		…                 // Complete, Fail or another end of the lease
//		end(err)
//	}
//
// Several leases are a batch.
func (t *Telemetry) Start(ctx context.Context, leases ...*onceq.Lease) (_ context.Context, end func(error)) {
	if len(leases) == 0 {
		return ctx, func(error) {}
	}
	first := leases[0]
	attrs := []attribute.KeyValue{
		system, semconv.MessagingOperationTypeProcess, semconv.MessagingOperationName("process"),
		semconv.MessagingDestinationName(first.Queue), kindKey.String(first.Kind),
	}
	carry := t.carry()
	var links []trace.Link
	for _, l := range leases {
		sent := carry.Extract(context.Background(), propagation.MapCarrier(l.Metadata))
		if sc := trace.SpanContextFromContext(sent); sc.IsValid() {
			link := trace.Link{SpanContext: sc}
			if len(leases) > 1 {
				link.Attributes = message(l)
			}
			links = append(links, link)
		}
		if b := baggage.FromContext(sent); len(leases) == 1 && b.Len() > 0 {
			ctx = baggage.ContextWithBaggage(ctx, b)
		}
	}
	if len(leases) == 1 {
		attrs = append(attrs, message(first)...)
	} else {
		attrs = append(attrs, semconv.MessagingBatchMessageCount(len(leases)))
	}
	ctx, span := t.tracer.Start(ctx, "process "+first.Queue, trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithNewRoot(), trace.WithAttributes(attrs...), trace.WithLinks(links...))
	t.attempts.begin(leases, span)
	began := time.Now()
	return ctx, func(err error) {
		failed := onceq.IsFailure(err)
		t.metrics.hasProcessed(ctx, time.Since(began), first.Queue, err)
		if failed {
			fail(span, err)
		}
		t.attempts.end(leases, failed)
		span.End()
	}
}

// message returns attributes that say which job a span or a link is about.
func message(l *onceq.Lease) []attribute.KeyValue {
	return []attribute.KeyValue{
		semconv.MessagingMessageID(strconv.FormatInt(l.ID, 10)), attemptKey.Int(l.Attempt), lostKey.Int(l.Lost), tokenKey.Int64(l.Token),
	}
}

// ours is the prefix of onceq's own error texts, wherever it stands in an error's text.
const ours = "onceq: "

// fail records an error in a span. Of onceq's own errors, and of errors whose text contains theirs, it records only the
// type: the text may name a key and a scope.
func fail(span trace.Span, err error) {
	if err == nil || !span.IsRecording() {
		return
	}
	kind, known := errorType(err)
	span.SetAttributes(semconv.ErrorTypeKey.String(kind))
	text := err.Error()
	if known || strings.Contains(text, ours) {
		span.SetStatus(codes.Error, kind)
		return
	}
	span.RecordError(err)
	span.SetStatus(codes.Error, text)
}

// errorType returns one of few values: the name of onceq's error, the SQLSTATE of a Postgres error, or the type of the
// innermost error.
func errorType(err error) (kind string, known bool) {
	for _, known := range []struct {
		err  error
		name string
	}{
		{onceq.ErrNotFound, "not_found"}, {onceq.ErrKeyUnsettled, "key_unsettled"},
		{onceq.ErrLeaseLost, "lease_lost"}, {onceq.ErrCancelled, "cancelled"}, {onceq.ErrHeld, "held"}, {onceq.ErrUncertain, "uncertain"},
		{onceq.ErrMismatch, "mismatch"}, {onceq.ErrDuplicate, "duplicate"}, {onceq.ErrInFlight, "in_flight"},
		{context.DeadlineExceeded, "timeout"}, {context.Canceled, "context_canceled"}, {errNotReturned, "panic"},
	} {
		if errors.Is(err, known.err) {
			return known.name, true
		}
	}
	var postgres interface{ SQLState() string }
	if errors.As(err, &postgres) {
		return postgres.SQLState(), false
	}
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return semconv.ErrorType(err).Value.AsString(), false
		}
		err = inner
	}
}

// trace adds an event to its span: the span of its context, or of the attempt with its token.
func (t *Telemetry) trace(ctx context.Context, e onceq.Event) {
	span := trace.SpanFromContext(ctx)
	switch e.Type {
	case onceq.EventEnqueued:
		if one, _ := ctx.Value(producing{}).(bool); one && span.IsRecording() {
			span.SetAttributes(semconv.MessagingMessageID(strconv.FormatInt(e.JobID, 10)))
		}
	case onceq.EventDuplicate:
		add(span, "onceq.duplicate", e)
	case onceq.EventMismatch:
		add(span, "onceq.mismatch", e)
	case onceq.EventReplayed:
		add(span, "onceq.replayed", e)
	case onceq.EventUncertain:
		add(span, "onceq.uncertain", e)
	case onceq.EventCompleted, onceq.EventFailed, onceq.EventDeferred, onceq.EventSnoozed, onceq.EventReleased, onceq.EventDead,
		onceq.EventCancelled:
		if well := t.attempts.settled(e.Token); well.IsSampled() && onceq.IsFailure(e.Err) {
			t.refused(well, e) // the handler succeeded, but its transaction was not committed or its result not stored
		}
	case onceq.EventHeld:
		if e.Name == "" {
			t.attempts.settled(e.Token)
			return
		}
		add(span, "onceq.held", e)
	case onceq.EventLeaseLost, onceq.EventStale:
		if e.JobID == 0 || e.Name != "" { // a fence's event comes with the context of its work
			add(span, "onceq.lease_lost", e)
			return
		}
		running, over := t.attempts.lost(e.Token)
		if running != nil {
			add(running, "onceq.lease_lost", e)
		}
		if over.IsSampled() {
			t.refused(over, e)
		}
	}
}

// refused makes a span for an outcome that was refused after its attempt's span had ended.
func (t *Telemetry) refused(attempt trace.SpanContext, e onceq.Event) {
	_, span := t.tracer.Start(trace.ContextWithSpanContext(context.Background(), attempt), "settle "+e.Queue,
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(
			system, semconv.MessagingOperationTypeSettle, semconv.MessagingOperationName("settle"), semconv.MessagingDestinationName(e.Queue),
			semconv.MessagingMessageID(strconv.FormatInt(e.JobID, 10)), kindKey.String(e.Kind), attemptKey.Int(e.Attempt), tokenKey.Int64(e.Token)))
	if e.Type == onceq.EventLeaseLost || e.Type == onceq.EventStale {
		add(span, "onceq.lease_lost", e)
	}
	fail(span, e.Err)
	span.End()
}

func add(span trace.Span, name string, e onceq.Event) {
	if !span.IsRecording() {
		return
	}
	var attrs []attribute.KeyValue
	if e.JobID != 0 {
		attrs = append(attrs, semconv.MessagingMessageID(strconv.FormatInt(e.JobID, 10)))
	}
	if e.Kind != "" {
		attrs = append(attrs, kindKey.String(e.Kind))
	}
	if e.Name != "" {
		attrs = append(attrs, effectKey.String(e.Name))
	}
	span.AddEvent(name, trace.WithAttributes(attrs...))
}

// attempts finds the span of an attempt by its token, because the beat that notices a lost lease does not have the
// attempt's context. An attempt is kept from its begin until its outcome is reported.
type attempts struct {
	mu   sync.Mutex
	all  map[int64]*attempt
	over int // how many of them have a handler that has returned
}

type attempt struct {
	span   trace.Span
	over   bool
	failed bool // the handler failed, and the span says so
	lost   bool
}

// maxOver bounds the attempts whose outcome is never reported, for example because the database was gone for too long.
const maxOver = 20_000

func (a *attempts) begin(leases []*onceq.Lease, span trace.Span) {
	if !span.SpanContext().IsSampled() {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.all == nil {
		a.all = make(map[int64]*attempt)
	}
	if a.over > maxOver {
		for token, at := range a.all {
			if at.over {
				delete(a.all, token)
			}
		}
		a.over = 0
	}
	for _, l := range leases {
		a.remove(l.Token) // of an earlier try
		a.all[l.Token] = &attempt{span: span}
	}
}

func (a *attempts) end(leases []*onceq.Lease, failed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, l := range leases {
		switch at := a.all[l.Token]; {
		case at == nil:
		case at.lost:
			a.remove(l.Token) // the loss was reported; nothing more will be
		default:
			at.over, at.failed = true, failed
			a.over++
		}
	}
}

// settled returns the span context of an attempt whose handler returned without an error.
func (a *attempts) settled(token int64) (well trace.SpanContext) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if at := a.all[token]; at != nil && at.over && !at.failed {
		well = at.span.SpanContext()
	}
	a.remove(token)
	return well
}

// lost returns the span of a running attempt, or the span context of one that is over.
func (a *attempts) lost(token int64) (running trace.Span, over trace.SpanContext) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := a.all[token]
	switch {
	case at == nil:
	case at.over:
		over = at.span.SpanContext()
		a.remove(token)
	default:
		at.lost = true
		running = at.span
	}
	return running, over
}

func (a *attempts) remove(token int64) {
	if at := a.all[token]; at != nil {
		if at.over {
			a.over--
		}
		delete(a.all, token)
	}
}
