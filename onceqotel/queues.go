package onceqotel

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/onceq/onceq"
)

const (
	statsAge     = 5 * time.Second // how long the figures are reused
	statsTimeout = 5 * time.Second
)

// Watch reports depth and oldest age of the named queues, or of all queues, whenever metrics are collected, until the
// registration is undone. A collection costs one onceq.Queue.Stats, which is cheap at any depth; collections within
// five seconds share one. If that call fails, nothing is reported and the reader gets the error.
func (t *Telemetry) Watch(q *onceq.Queue, queues ...string) (metric.Registration, error) {
	if q == nil {
		return nil, errors.New("onceqotel: Watch needs a queue")
	}
	depth, err := t.meter.Int64ObservableGauge("onceq.queue.depth", metric.WithUnit("{job}"),
		metric.WithDescription("Jobs of a queue by state; counted up to 1,000."))
	if err != nil {
		return nil, err
	}
	oldest, err := t.meter.Float64ObservableGauge("onceq.queue.oldest.age", metric.WithUnit("s"),
		metric.WithDescription("For how long the oldest job has been due that nobody has."))
	if err != nil {
		return nil, err
	}
	w := &watch{q: q, queues: queues}
	return t.meter.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		stats, err := w.read(ctx)
		for _, s := range stats {
			queue := queueKey.String(s.Queue)
			for state, n := range map[string]int{
				onceq.StateWaiting.String(): s.Waiting, onceq.StateDelayed.String(): s.Delayed, onceq.StateRunning.String(): s.Running,
				onceq.StateRetrying.String(): s.Retrying, onceq.StateDead.String(): s.Dead, onceq.StateHeld.String(): s.Held,
				"claimed_ahead": s.Leased - s.Running, "blocked": s.Blocked,
			} {
				o.ObserveInt64(depth, int64(n), metric.WithAttributes(queue, stateKey.String(state)))
			}
			o.ObserveFloat64(oldest, s.Oldest.Seconds(), metric.WithAttributes(queue))
		}
		return err
	}, depth, oldest)
}

// watch keeps the latest figures for several readers.
type watch struct {
	q      *onceq.Queue
	queues []string

	mu    sync.Mutex
	stats []onceq.QueueStats
	at    time.Time
}

func (w *watch) read(ctx context.Context) ([]onceq.QueueStats, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.at.IsZero() && time.Since(w.at) < statsAge {
		return w.stats, nil
	}
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	stats, err := w.q.Stats(ctx, w.queues...)
	if err != nil {
		return nil, err
	}
	w.stats, w.at = stats, time.Now()
	return stats, nil
}
