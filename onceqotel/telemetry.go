package onceqotel

import (
	"context"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/onceq/onceq"
)

const scope = "github.com/onceq/onceq/onceqotel"

// Config says where spans and metrics go. The zero value takes OpenTelemetry's global providers.
type Config struct {
	TracerProvider trace.TracerProvider // default otel.GetTracerProvider()
	MeterProvider  metric.MeterProvider // default otel.GetMeterProvider()

	// Propagator writes a span's context into a job's metadata and reads it there. Default otel.GetTextMapPropagator(),
	// or propagation.TraceContext if none is set.
	Propagator propagation.TextMapPropagator

	// Conventions reports the metrics of OpenTelemetry's semantic conventions (messaging.*) as well. They say again, in the
	// names of all messaging systems, what the metrics of onceq say.
	Conventions bool
}

// Telemetry makes spans and metrics of what happens to the jobs of one queue. It is an onceq.Hook. It is safe for
// concurrent use.
type Telemetry struct {
	tracer     trace.Tracer
	meter      metric.Meter
	propagator propagation.TextMapPropagator
	metrics    metrics
	attempts   attempts
}

// New returns a Telemetry. Use one for each onceq.Queue. Its only errors are the meter provider's.
func New(cfg Config) (*Telemetry, error) {
	if cfg.TracerProvider == nil {
		cfg.TracerProvider = otel.GetTracerProvider()
	}
	if cfg.MeterProvider == nil {
		cfg.MeterProvider = otel.GetMeterProvider()
	}
	t := &Telemetry{
		tracer:     cfg.TracerProvider.Tracer(scope, trace.WithSchemaURL(semconv.SchemaURL)),
		meter:      cfg.MeterProvider.Meter(scope, metric.WithSchemaURL(semconv.SchemaURL)),
		propagator: cfg.Propagator,
	}
	t.metrics.conventions = cfg.Conventions
	return t, t.metrics.init(t.meter)
}

// Config returns a copy of cfg in which this Telemetry sees every event and every enqueueing. cfg may be nil. Its Hook
// and BeforeEnqueue are still called.
func (t *Telemetry) Config(cfg *onceq.Config) *onceq.Config {
	var c onceq.Config
	if cfg != nil {
		c = *cfg
	}
	c.Hook = t
	if cfg != nil && cfg.Hook != nil {
		c.Hook = onceq.HookFunc(func(ctx context.Context, e onceq.Event) {
			t.Event(ctx, e)
			cfg.Hook.Event(ctx, e)
		})
	}
	c.BeforeEnqueue = t.BeforeEnqueue
	if cfg != nil && cfg.BeforeEnqueue != nil {
		c.BeforeEnqueue = func(ctx context.Context, jobs []onceq.Job) (context.Context, func(error)) {
			ctx, done := cfg.BeforeEnqueue(ctx, jobs)
			ctx, end := t.BeforeEnqueue(ctx, jobs)
			return ctx, func(err error) {
				end(err)
				done(err)
			}
		}
	}
	return &c
}

// Event counts an event and adds it to the span that it belongs to. It makes a Telemetry an onceq.Hook; Config sets it.
func (t *Telemetry) Event(ctx context.Context, e onceq.Event) {
	t.metrics.event(ctx, e)
	t.trace(ctx, e)
}
