package onceqotel

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

const (
	statsAge  = 5 * time.Second // how long the figures are reused
	healthAge = time.Minute     // how long the findings are

	statsTimeout  = 5 * time.Second // for a collection
	limitsWatched = 50              // how many limits are reported
)

// These attributes belong to what Watch reports.
const (
	limitKey   = attribute.Key("onceq.limit")
	findingKey = attribute.Key("onceq.finding")
	severeKey  = attribute.Key("onceq.severe")
)

// gauges are what Watch reports.
type gauges struct {
	depth, capped, workers, slots, stale, findings, limited, room metric.Int64Observable
	oldest, paused, limitOldest                                   metric.Float64Observable
}

// Watch reports, whenever metrics are collected and until the registration is undone: depth and oldest age of the named queues,
// or of all queues, their live workers, what is paused, the first 50 limits by name, and what onceqops.Ops.Health finds. A
// collection costs one Stats, one Workers, one Pauses and one Limits of onceqops.Ops, and once a minute one Health: each
// reads a bounded number of rows, so it takes some milliseconds a queue at any depth. Collections within five seconds share
// one. What cannot be read is not reported, and the reader gets the error.
//
// All that comes from the database, so one process is enough, and several report the same.
func (t *Telemetry) Watch(q *onceq.Queue, queues ...string) (metric.Registration, error) {
	if q == nil {
		return nil, errors.New("onceqotel: Watch needs a queue")
	}
	var g gauges
	all, err := g.init(t.meter)
	if err != nil {
		return nil, err
	}
	w := &watch{ops: onceqops.New(q), queues: queues}
	return t.meter.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		err := w.read(ctx)
		g.observe(o, w)
		return err
	}, all...)
}

func (g *gauges) init(meter metric.Meter) (all []metric.Observable, err error) {
	var errs []error
	number := func(to *metric.Int64Observable, name, unit, description string) {
		gauge, err := meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
		*to, all, errs = gauge, append(all, gauge), append(errs, err)
	}
	seconds := func(to *metric.Float64Observable, name, description string) {
		gauge, err := meter.Float64ObservableGauge(name, metric.WithUnit("s"), metric.WithDescription(description))
		*to, all, errs = gauge, append(all, gauge), append(errs, err)
	}
	number(&g.depth, "onceq.queue.depth", "{job}", "Jobs of a queue by state; counted up to 1,000.")
	number(&g.capped, "onceq.queue.capped", "", "1 if some depth of the queue may be too small, because counting stopped.")
	seconds(&g.oldest, "onceq.queue.oldest.age", "For how long the oldest job has been due that nobody has, by what it waits for.")
	number(&g.workers, "onceq.workers", "{worker}", "Live workers that serve a queue.")
	number(&g.slots, "onceq.workers.slots", "{job}", "How many jobs of a queue its live workers can run at once.")
	number(&g.stale, "onceq.workers.stale", "{worker}", "Workers that have not been heard of for three minutes and did not end.")
	seconds(&g.paused, "onceq.paused.age", "For how long a queue, a kind or a limit has been paused.")
	number(&g.limited, "onceq.limit.jobs", "{job}", "Jobs of a limit by state; counted up to 1,000.")
	number(&g.room, "onceq.limit.capacity", "{job}", "How many jobs of a limit may be live at once.")
	seconds(&g.limitOldest, "onceq.limit.oldest.age", "For how long the oldest due job has waited for a limit.")
	number(&g.findings, "onceq.health.findings", "{finding}", "What onceqops.Ops.Health finds now.")
	return all, errors.Join(errs...)
}

func (g *gauges) observe(o metric.Observer, w *watch) {
	for _, s := range w.stats {
		queue := queueKey.String(s.Queue)
		for state, n := range map[string]int{
			onceq.StateWaiting.String(): s.Waiting, onceq.StateDelayed.String(): s.Delayed, onceq.StateRunning.String(): s.Running,
			onceq.StateRetrying.String(): s.Retrying, onceq.StateDead.String(): s.Dead, onceq.StateHeld.String(): s.Held,
			"claimed_ahead": s.Leased - s.Running, "blocked": s.Blocked,
		} {
			if n > 0 || state == onceq.StateWaiting.String() { // which says that the queue is there
				o.ObserveInt64(g.depth, int64(n), metric.WithAttributes(queue, stateKey.String(state)))
			}
		}
		if s.Capped {
			o.ObserveInt64(g.capped, 1, metric.WithAttributes(queue))
		}
		for reason, age := range map[string]time.Duration{forWorker: s.Oldest, forLane: s.OldestInLane, forLimit: s.OldestInLimit, forJobs: s.OldestAfter} {
			if age > 0 {
				o.ObserveFloat64(g.oldest, age.Seconds(), metric.WithAttributes(queue, reasonKey.String(reason)))
			}
		}
		live, slots := w.serving(s.Queue)
		o.ObserveInt64(g.workers, live, metric.WithAttributes(queue))
		o.ObserveInt64(g.slots, slots, metric.WithAttributes(queue))
	}
	for what, n := range w.findings {
		o.ObserveInt64(g.findings, n, metric.WithAttributes(findingKey.String(what.what), severeKey.Bool(what.severe)))
	}
	if w.at.IsZero() { // nothing could be read
		return
	}
	stale := int64(0)
	for _, one := range w.workers {
		if one.Stale {
			stale++
		}
	}
	o.ObserveInt64(g.stale, stale)
	for _, p := range w.pauses {
		what := queueKey.String(p.Queue)
		if p.Kind != "" {
			what = kindKey.String(p.Kind)
		} else if p.Limit != "" {
			what = limitKey.String(p.Limit)
		}
		o.ObserveFloat64(g.paused, max(0, time.Since(p.Since)).Seconds(), metric.WithAttributes(what))
	}
	for _, l := range w.limits {
		limit := limitKey.String(l.Name)
		for state, n := range map[string]int{"live": l.Live, onceq.StateWaiting.String(): l.Waiting, onceq.StateDelayed.String(): l.Delayed} {
			if n > 0 {
				o.ObserveInt64(g.limited, int64(n), metric.WithAttributes(limit, stateKey.String(state)))
			}
		}
		if l.Limit.AtOnce > 0 || l.Limit.Rate == 0 && l.Limit.Max == 0 { // a rate alone bounds no number
			o.ObserveInt64(g.room, int64(l.Limit.AtOnce), metric.WithAttributes(limit))
		}
		if l.Oldest > 0 {
			o.ObserveFloat64(g.limitOldest, l.Oldest.Seconds(), metric.WithAttributes(limit))
		}
	}
}

// watch keeps the latest figures for several readers.
type watch struct {
	ops    *onceqops.Ops
	queues []string

	mu       sync.Mutex // guards all that follows
	at       time.Time  // when it was read; zero for never, and after an error
	stats    []onceqops.QueueStats
	workers  []onceqops.WorkerInfo
	pauses   []onceq.Pause
	limits   []onceqops.LimitInfo
	healthAt time.Time
	findings map[finding]int64
}

type finding struct {
	what   string
	severe bool
}

// read reads the figures, if it is time to, and the findings. It leaves no old ones after an error. The caller holds mu.
func (w *watch) read(ctx context.Context) error {
	if !w.at.IsZero() && time.Since(w.at) < statsAge {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	err := w.readFigures(ctx)
	if err != nil {
		w.at, w.stats, w.workers, w.pauses, w.limits = time.Time{}, nil, nil, nil, nil
	} else {
		w.at = time.Now()
	}
	return errors.Join(err, w.readHealth(ctx))
}

func (w *watch) readFigures(ctx context.Context) (err error) {
	if w.stats, err = w.ops.Stats(ctx, w.queues...); err != nil {
		return err
	}
	if w.workers, err = w.ops.Workers(ctx, nil); err != nil {
		return err
	}
	if w.pauses, err = w.ops.Pauses(ctx, nil); err != nil {
		return err
	}
	w.pauses = slices.DeleteFunc(w.pauses, func(p onceq.Pause) bool {
		return p.Queue != "" && len(w.queues) > 0 && !slices.Contains(w.queues, p.Queue)
	})
	w.limits, err = w.ops.Limits(ctx, nil, onceqops.LimitFilter{Limit: limitsWatched})
	return err
}

// readHealth looks for findings. Health returns what this process knows of its own work also with an error.
func (w *watch) readHealth(ctx context.Context) error {
	if !w.healthAt.IsZero() && time.Since(w.healthAt) < healthAge {
		return nil
	}
	found, err := w.ops.Health(ctx, w.stats...)
	w.healthAt, w.findings = time.Now(), make(map[finding]int64)
	if err != nil {
		w.healthAt = time.Time{}
	}
	for _, f := range found {
		w.findings[finding{f.What, f.Severe}]++
	}
	return err
}

// serving returns how many live workers serve a queue, and how many of its jobs they can run at once.
func (w *watch) serving(queue string) (live, slots int64) {
	for _, one := range w.workers {
		if n, ok := one.Queues[queue]; ok && !one.Stale {
			live, slots = live+1, slots+int64(n)
		}
	}
	return live, slots
}
