// Command adapter is onceq's adapter for hardbyte/postgresql-job-queue-benchmarking, which compares queues inside Postgres.
// It enqueues and runs jobs until SIGTERM, and prints its figures as lines of JSON. See README.md.
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqops"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Getenv, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "onceq-bench:", err)
		os.Exit(1)
	}
}

// settings come from the harness.
type settings struct {
	url, scenario, mode         string
	rate, depth                 int // jobs a second, or waiting jobs
	rateFile                    string
	batch                       int
	batchEvery, sampleEvery     time.Duration
	workers, connections        int
	payload, queues, instanceID int
	work                        time.Duration
}

func readSettings(env func(string) string) (s settings, err error) {
	number := func(name string, otherwise, least int) int {
		text := env(name)
		if text == "" {
			return otherwise
		}
		n, bad := strconv.Atoi(text)
		if bad != nil || n < least {
			err = errors.Join(err, fmt.Errorf("%s is %q, which is not a number of at least %d", name, text, least))
		}
		return n
	}
	text := func(name, otherwise string) string {
		if env(name) != "" {
			return env(name)
		}
		return otherwise
	}
	s = settings{
		url: env("DATABASE_URL"), scenario: text("SCENARIO", "long_horizon"), mode: text("PRODUCER_MODE", "fixed"),
		rate: number("PRODUCER_RATE", 800, 0), depth: number("TARGET_DEPTH", 1000, 0), rateFile: env("PRODUCER_RATE_CONTROL_FILE"),
		batch: number("PRODUCER_BATCH_MAX", 128, 1), batchEvery: time.Duration(number("PRODUCER_BATCH_MS", 10, 1)) * time.Millisecond,
		sampleEvery: time.Duration(number("SAMPLE_EVERY_S", 5, 1)) * time.Second,
		workers:     number("WORKER_COUNT", 32, 1), connections: number("MAX_CONNECTIONS", 20, 2),
		payload: number("JOB_PAYLOAD_BYTES", 256, 0), queues: number("BENCH_QUEUE_COUNT", 1, 1), instanceID: number("BENCH_INSTANCE_ID", 0, 0),
		work: time.Duration(number("JOB_WORK_MS", 1, 0)) * time.Millisecond,
	}
	switch {
	case s.url == "":
		err = errors.Join(err, errors.New("DATABASE_URL is not set"))
	case s.scenario != "long_horizon" && s.scenario != "migrate_only":
		err = errors.Join(err, fmt.Errorf("SCENARIO %q is not known: long_horizon and migrate_only are", s.scenario))
	case s.mode != "fixed" && s.mode != "depth-target":
		err = errors.Join(err, fmt.Errorf("PRODUCER_MODE %q is not known: fixed and depth-target are", s.mode))
	}
	return s, err
}

// payload is the payload of each job.
type payload struct {
	Seq     int64  `json:"seq"`
	Padding string `json:"padding"`
}

// adapter is one process of a run.
type adapter struct {
	settings
	q    *onceq.Queue
	pool *pgxpool.Pool
	kind onceq.Kind[payload]
	out  *json.Encoder

	enqueued, completed atomic.Int64
	waiting             atomic.Int64 // in all queues; only the first instance counts
	target              atomic.Int64 // jobs a second
	latency             histogram
}

// run returns when ctx has ended and everything has stopped.
func run(ctx context.Context, env func(string) string, in io.Reader, out io.Writer) error {
	s, err := readSettings(env)
	if err != nil {
		return err
	}
	cfg, err := pgxpool.ParseConfig(s.url)
	if err != nil {
		return err
	}
	cfg.MaxConns = int32(s.connections)
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	err = pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return migrations.Up(ctx, c.Conn(), "onceq") })
	if err != nil || s.scenario == "migrate_only" {
		return err
	}
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		return err
	}
	a := &adapter{settings: s, q: q, pool: pool, kind: onceq.Kind[payload]{Name: "long_horizon"}, out: json.NewEncoder(out)}
	a.target.Store(int64(s.rate))
	if err := a.describe(); err != nil {
		return err
	}
	go func() { _, _ = io.Copy(io.Discard, in) }() // a harness that paces by standard input must not block on it

	names := a.queueNames()
	config := onceq.WorkerConfig{Also: names, Without: []string{onceq.DefaultQueue}, Queues: make(map[string]onceq.QueueConfig), ShutdownTimeout: 3 * time.Second}
	for _, name := range names {
		config.Queues[name] = onceq.QueueConfig{Concurrency: max(1, s.workers/len(names))}
	}
	w, err := onceq.NewWorker(q, config, a.kind.Handle(a.handle))
	if err != nil {
		return err
	}
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, part := range []func(context.Context){a.produce, a.observe, a.sample} {
		wg.Go(func() { part(ctx) })
	}
	wg.Go(func() { _ = reaper.Run(ctx) })
	err = w.Run(ctx)
	wg.Wait()
	return err
}

func (a *adapter) queueNames() []string {
	names := make([]string, a.queues)
	for i := range names {
		names[i] = fmt.Sprintf("bench_%d", i)
	}
	return names
}

func (a *adapter) handle(_ context.Context, l *onceq.Lease, _ payload) error {
	a.latency.add(time.Since(l.CreatedAt))
	time.Sleep(a.work)
	a.completed.Add(1)
	return nil
}

// produce enqueues at the rate that the control file says, or until so many jobs wait. It paces by the time that has really
// passed, so a slow call does not lower the rate.
func (a *adapter) produce(ctx context.Context) {
	padding, names := strings.Repeat("x", max(0, a.payload-32)), a.queueNames()
	var seq int64
	credit, last := 0.0, time.Now()
	for sleep(ctx, a.batchEvery-time.Since(last)) {
		now := time.Now()
		if a.mode == "depth-target" {
			a.target.Store(0)
			credit = float64(a.depth) - float64(a.waiting.Load())
		} else {
			rate := a.currentRate()
			a.target.Store(int64(rate))
			if credit += rate * now.Sub(last).Seconds(); rate == 0 {
				credit = 0
			}
		}
		last = now
		n := min(int(credit), a.batch)
		if n < 1 {
			continue
		}
		credit -= float64(n)
		jobs := make([]onceq.Job, n)
		for i := range jobs {
			jobs[i] = a.kind.Job(payload{Seq: seq, Padding: padding})
			jobs[i].Queue = names[seq%int64(len(names))]
			seq++
		}
		if _, err := a.q.EnqueueMany(ctx, a.pool, jobs); err != nil {
			if ctx.Err() == nil {
				fmt.Fprintln(os.Stderr, "onceq-bench: enqueue:", err)
				sleep(ctx, 100*time.Millisecond)
			}
			continue
		}
		a.enqueued.Add(int64(n))
		if a.mode == "depth-target" {
			a.waiting.Add(int64(n)) // until it is counted again
		}
	}
}

// currentRate reads the control file, through which the harness changes the rate.
func (a *adapter) currentRate() float64 {
	if a.rateFile == "" {
		return float64(a.rate)
	}
	raw, err := os.ReadFile(a.rateFile)
	if err != nil {
		return float64(a.rate)
	}
	rate, err := strconv.ParseFloat(strings.TrimSpace(string(raw)), 64)
	if err != nil {
		return float64(a.rate)
	}
	return max(0, rate)
}

// observe counts the waiting jobs. Stats stops counting a queue at onceqops.StatsCap.
func (a *adapter) observe(ctx context.Context) {
	names := a.queueNames()
	for a.first() && sleep(ctx, 200*time.Millisecond) {
		all, err := onceqops.New(a.q).Stats(ctx, names...)
		if err != nil {
			continue
		}
		waiting := 0
		for _, s := range all {
			waiting += s.Waiting
		}
		a.waiting.Store(int64(waiting))
	}
}

// first reports whether this instance is the one that reports figures which belong to no single instance.
func (a *adapter) first() bool { return a.instanceID == 0 }

// sample prints the figures at whole multiples of the interval.
func (a *adapter) sample(ctx context.Context) {
	last, enqueued, completed := time.Now(), a.enqueued.Load(), a.completed.Load()
	for sleep(ctx, time.Until(time.Now().Truncate(a.sampleEvery).Add(a.sampleEvery))) {
		now, enqueuedNow, completedNow := time.Now(), a.enqueued.Load(), a.completed.Load()
		took := max(0.001, now.Sub(last).Seconds())
		at := now.UTC().Format("2006-01-02T15:04:05.000Z")
		say := func(metric string, value float64, window time.Duration) {
			_ = a.out.Encode(map[string]any{
				"t": at, "system": "onceq", "kind": "adapter", "subject_kind": "adapter", "subject": "", "instance_id": a.instanceID,
				"metric": metric, "value": value, "window_s": window.Seconds(),
			})
		}
		quantiles := a.latency.quantiles(now, 0.5, 0.95, 0.99)
		for i, metric := range []string{"claim_p50_ms", "claim_p95_ms", "claim_p99_ms"} {
			say(metric, quantiles[i].Seconds()*1000, latencyWindow)
		}
		say("enqueue_rate", float64(enqueuedNow-enqueued)/took, a.sampleEvery)
		say("completion_rate", float64(completedNow-completed)/took, a.sampleEvery)
		if a.first() {
			say("queue_depth", float64(a.waiting.Load()), 0)
			say("producer_target_rate", float64(a.target.Load()), 0)
		}
		last, enqueued, completed = now, enqueuedNow, completedNow
	}
}

//go:embed adapter.json
var manifest []byte

// describe prints the descriptor that the harness compares with adapter.json.
func (a *adapter) describe() error {
	var m map[string]any
	if err := json.Unmarshal(manifest, &m); err != nil {
		return err
	}
	version := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range info.Deps {
			if module.Path == "github.com/onceq/onceq" {
				version = module.Version
			}
		}
	}
	return a.out.Encode(map[string]any{
		"kind": "descriptor", "system": m["system"], "event_tables": m["event_tables"], "event_indexes": m["event_indexes"], "extensions": m["extensions"],
		"version": version, "schema_version": strconv.Itoa(int(migrations.Version)), "db_name": a.pool.Config().ConnConfig.Database,
		"started_at": time.Now().UTC().Format("2006-01-02T15:04:05.000Z"), "instance_id": a.instanceID,
	})
}

// sleep reports whether ctx is still open.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return ctx.Err() == nil
	}
}
