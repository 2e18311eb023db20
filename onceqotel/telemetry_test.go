package onceqotel_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqotel"
	"github.com/onceq/onceq/queuetest"
)

// bench is one test's database, with a queue whose spans and metrics are recorded.
type bench struct {
	*queuetest.DB
	t     *testing.T
	tel   *onceqotel.Telemetry
	q     *onceq.Queue
	spans *tracetest.InMemoryExporter
	trace *sdktrace.TracerProvider
	read  *metric.ManualReader
}

func newBench(t *testing.T, opts ...queuetest.Option) *bench {
	b := &bench{DB: queuetest.New(t, opts...), t: t, spans: tracetest.NewInMemoryExporter(), read: metric.NewManualReader()}
	b.trace = sdktrace.NewTracerProvider(sdktrace.WithSyncer(b.spans))
	tel, err := onceqotel.New(onceqotel.Config{
		TracerProvider: b.trace,
		MeterProvider:  metric.NewMeterProvider(metric.WithReader(b.read)),
		Propagator:     propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
		Conventions:    true,
	})
	require.NoError(t, err)
	b.tel = tel
	b.q, err = onceq.New(b.Pool, tel.Config(&onceq.Config{Schema: b.Schema}))
	require.NoError(t, err)
	return b
}

func (b *bench) enqueue(ctx context.Context, job onceq.Job) onceq.Result {
	b.t.Helper()
	r, err := b.q.Enqueue(ctx, b.Pool, job)
	require.NoError(b.t, err)
	return r
}

// claim takes the one due job of the queue mail.
func (b *bench) claim() *onceq.Lease {
	b.t.Helper()
	leases, err := b.q.Claim(b.t.Context(), onceq.ClaimOptions{Queue: "mail"})
	require.NoError(b.t, err)
	require.Len(b.t, leases, 1)
	return leases[0]
}

// takeOver gives a leased job to another holder without telemetry. A beat of the first holder may come in between.
func (b *bench) takeOver(id int64) *onceq.Lease {
	b.t.Helper()
	for {
		b.ExpireLease(id)
		leases, err := b.DB.Queue.Claim(context.Background(), onceq.ClaimOptions{Queue: "mail", Lease: time.Minute})
		require.NoError(b.t, err)
		if len(leases) == 1 {
			return leases[0]
		}
	}
}

// drain works until nothing is due, one job at a time.
func (b *bench) drain(handlers ...onceq.Handler) {
	b.t.Helper()
	b.drainLeasing(onceq.DefaultLease, handlers...)
}

// drainLeasing is drain with shorter leases, and so with more beats.
func (b *bench) drainLeasing(lease time.Duration, handlers ...onceq.Handler) {
	b.t.Helper()
	w, err := onceq.NewWorker(b.q, onceq.WorkerConfig{
		Lease: lease, Queues: map[string]onceq.QueueConfig{"mail": {Concurrency: 1}},
	}, b.tel.Handlers(handlers...)...)
	require.NoError(b.t, err)
	require.NoError(b.t, w.Drain(b.t.Context(), 0))
}

// all returns the spans with a name, in the order in which they ended.
func (b *bench) all(name string) []tracetest.SpanStub {
	var found []tracetest.SpanStub
	for _, s := range b.spans.GetSpans() {
		if s.Name == name {
			found = append(found, s)
		}
	}
	return found
}

func (b *bench) one(name string) tracetest.SpanStub {
	b.t.Helper()
	found := b.all(name)
	require.Len(b.t, found, 1, "spans named %s among %v", name, names(b.spans.GetSpans()))
	return found[0]
}

func names(spans tracetest.SpanStubs) (n []string) {
	for _, s := range spans {
		n = append(n, s.Name)
	}
	return n
}

func attrs(s tracetest.SpanStub) map[string]any {
	m := make(map[string]any)
	for _, a := range s.Attributes {
		m[string(a.Key)] = a.Value.AsInterface()
	}
	return m
}

func events(s tracetest.SpanStub) (n []string) {
	for _, e := range s.Events {
		n = append(n, e.Name)
	}
	return n
}

type mail struct {
	To string `json:"to"`
}

var errBoom = errors.New("errBoom")

// welcome does not wait between its attempts.
var welcome = onceq.Kind[mail]{
	Name: "welcome", Queue: "mail", MaxAttempts: 2,
	Key:     func(m mail) string { return "welcome:" + m.To },
	Backoff: func(int, error) time.Duration { return 0 },
}

func pipeline(ctx context.Context, pool interface {
	SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
}, b *pgx.Batch) error {
	if err := pool.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("batch: %w", err)
	}
	return nil
}
