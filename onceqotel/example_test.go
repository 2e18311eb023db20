package onceqotel_test

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/exampletb"
	"github.com/onceq/onceq/onceqotel"
	"github.com/onceq/onceq/queuetest"
)

// database gives an example its own pool to a database with onceq's tables.
func database() (ctx context.Context, pool *pgxpool.Pool, done func()) {
	t := exampletb.New()
	return t.Context(), queuetest.New(t).Pool, t.Done
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// Each attempt of a job is a span with a link to the span in which the job was enqueued. Jobs that a handler enqueues,
// and spans that it makes, belong to the attempt.
func ExampleTelemetry_Handlers() {
	ctx, pool, done := database()
	defer done()

	spans := tracetest.NewInMemoryExporter() // a service exports over OTLP
	tel, err := onceqotel.New(onceqotel.Config{TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))})
	must(err)
	q, err := onceq.New(pool, tel.Config(&onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	must(err)

	welcome := onceq.Kind[string]{Name: "welcome", Queue: "mails"}
	_, err = q.Enqueue(ctx, pool, welcome.Job("ada@example.com"))
	must(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, tel.Handlers(
		welcome.Handle(func(ctx context.Context, l *onceq.Lease, to string) error { return nil }),
	)...)
	must(err)
	must(w.Drain(ctx, 0))

	for _, s := range spans.GetSpans() {
		fmt.Println(s.SpanKind, s.Name, "links:", len(s.Links))
	}
	// Output:
	// producer send mails links: 0
	// consumer process mails links: 1
}

// Watch reports how deep the queues are whenever metrics are collected.
func ExampleTelemetry_Watch() {
	ctx, pool, done := database()
	defer done()

	reader := metric.NewManualReader() // a service uses one of Prometheus or OTLP
	tel, err := onceqotel.New(onceqotel.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(reader))})
	must(err)
	q, err := onceq.New(pool, tel.Config(&onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	must(err)
	watch, err := tel.Watch(q)
	must(err)
	defer func() { must(watch.Unregister()) }()

	_, err = q.EnqueueMany(ctx, pool, []onceq.Job{{Kind: "mail"}, {Kind: "mail"}})
	must(err)
	var collected metricdata.ResourceMetrics
	must(reader.Collect(ctx, &collected))
	for _, scope := range collected.ScopeMetrics {
		for _, m := range scope.Metrics {
			if depth, ok := m.Data.(metricdata.Gauge[int64]); ok && m.Name == "onceq.queue.depth" {
				for _, point := range depth.DataPoints {
					if point.Value > 0 {
						queue, _ := point.Attributes.Value("onceq.queue")
						state, _ := point.Attributes.Value("onceq.state")
						fmt.Println(queue.AsString(), state.AsString(), point.Value)
					}
				}
			}
		}
	}
	// Output: default waiting 2
}
