// Example runs one job under OpenTelemetry. It prints the spans and their links as they end, and what Prometheus would
// scrape.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqotel"
)

type mail struct {
	To string `json:"to"`
}

var welcome = onceq.Kind[mail]{
	Name: "welcome",
	Key:  func(m mail) string { return "welcome:" + m.To },
}

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	check(err)
	defer pool.Close()
	check(pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return migrations.Up(ctx, c.Conn(), "onceq") }))

	// A real service exports its spans over OTLP.
	registry := prometheus.NewRegistry()
	exporter, err := otelprom.New(otelprom.WithRegisterer(registry), otelprom.WithoutScopeInfo())
	check(err)
	tracing := sdktrace.NewTracerProvider(sdktrace.WithSyncer(printer{}))

	tel, err := onceqotel.New(onceqotel.Config{
		TracerProvider: tracing,
		MeterProvider:  metric.NewMeterProvider(metric.WithReader(exporter)),
	})
	check(err)
	q, err := onceq.New(pool, tel.Config(&onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	check(err)
	_, err = tel.Watch(q)
	check(err)

	// Two requests of the same client.
	for range 2 {
		request, span := tracing.Tracer("app").Start(ctx, "POST /users")
		_, err = q.Enqueue(request, pool, welcome.Job(mail{"ada@example.com"}))
		check(err)
		span.End()
	}

	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, tel.Handlers(
		welcome.Handle(func(ctx context.Context, l *onceq.Lease, m mail) error {
			// Spans that the handler makes with ctx are children of the attempt's span.
			_, span := tracing.Tracer("app").Start(ctx, "smtp")
			span.End()
			return nil
		}))...)
	check(err)
	check(w.Drain(ctx, 0))

	server := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	defer server.Close()
	response, err := http.Get(server.URL)
	check(err)
	body, err := io.ReadAll(response.Body)
	check(err)
	response.Body.Close()
	for line := range strings.Lines(string(body)) {
		if strings.HasPrefix(line, "onceq_jobs") && !strings.HasSuffix(line, " 0\n") {
			fmt.Print(line)
		}
	}
}

// printer stands in for an exporter.
type printer struct{}

func (printer) ExportSpans(_ context.Context, spans []sdktrace.ReadOnlySpan) error {
	for _, s := range spans {
		fmt.Printf("%s %q", s.SpanKind(), s.Name())
		for _, e := range s.Events() {
			fmt.Print(" ", e.Name)
		}
		if len(s.Links()) > 0 {
			fmt.Print(", links: ", len(s.Links()))
		}
		fmt.Println(", has a parent:", s.Parent().IsValid())
	}
	return nil
}

func (printer) Shutdown(context.Context) error { return nil }

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Output:
// producer "send default", has a parent: true
// internal "POST /users", has a parent: false
// producer "send default" onceq.duplicate, has a parent: true
// internal "POST /users", has a parent: false
// internal "smtp", has a parent: true
// consumer "process default", links: 1, has a parent: false
// onceq_jobs_completed_total{onceq_kind="welcome",onceq_queue="default"} 1
// onceq_jobs_duplicates_total{onceq_kind="welcome",onceq_queue="default"} 1
// onceq_jobs_enqueued_total{onceq_kind="welcome",onceq_queue="default"} 1
