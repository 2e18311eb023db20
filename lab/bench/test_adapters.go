package main

import (
	"bufio"
	"bytes"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/lab/peers"
)

// adapterTrials run programs that speak the protocol of hardbyte/postgresql-job-queue-benchmarking (../adapter is ours)
// through the phases of its scenarios. The server, which is killed on the way, is one of their own.
func adapterTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name == "onceq" && p.settings == "default" {
			trials = append(trials, b.adapterTrial(p, buildAdapter))
		}
	}
	for _, a := range b.adapters {
		p := peer{name: a.name, undone: adapterUndone[a.name]}
		if info, err := buildinfo.ReadFile(a.program); err == nil {
			for _, module := range info.Deps {
				if module.Path == "github.com/riverqueue/river" && a.name == "River" {
					p.version = module.Version
				}
			}
		}
		trials = append(trials, b.adapterTrial(p, func(string) (string, error) { return a.program, nil }))
	}
	return trials
}

// adapterUndone are the queries by which what is left at the end is counted.
var adapterUndone = map[string]string{"River": "select count(*) from river_job where finalized_at is null"}

const (
	exitsName = "processes that ended by themselves"
	leftName  = "at the end, without producers: jobs left"
)

type adapterProgram struct{ name, program string }

// buildAdapter builds ours.
func buildAdapter(dir string) (program string, err error) {
	program = filepath.Join(dir, "adapter")
	cmd := exec.Command("go", "build", "-o", program, ".")
	cmd.Dir = filepath.Join("..", "adapter")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the adapter: %w: %s", err, peers.LastLine(string(out)))
	}
	return program, nil
}

// nothing is the session of an adapter, which has a server of its own.
type nothing struct{ session }

func (nothing) process() int { return 0 }
func (nothing) close()       {}

const (
	adapterReplicas = 2
	adapterRate     = 400 // jobs a second that each replica enqueues
	adapterWorkers  = 32
	pressure        = 1.5 // times the rate
)

// adapterTrial runs the program that find gives, which may make it in the directory.
func (b *bench) adapterTrial(p peer, find func(dir string) (program string, err error)) trial {
	p.settings = "its adapter"
	p.note = fmt.Sprintf("%d processes, each with %d handlers of 1 ms, which enqueues %d jobs/s of 256 bytes; phases of %s", adapterReplicas, adapterWorkers, adapterRate, b.sizes.phase)
	p.open = func(context.Context, env) (session, error) { return nothing{}, nil }
	return trial{test: "adapters", peer: p, measure: func(ctx context.Context, r *room) ([]figure, error) {
		dir, err := os.MkdirTemp("", "onceq-adapter-")
		if err != nil {
			return nil, err
		}
		defer func() { _ = os.RemoveAll(dir) }()
		program, err := find(dir)
		if err != nil {
			return nil, err
		}
		// What differs from the defaults in that benchmark's postgres.conf.
		server, err := pgserver.Start(ctx, pgserver.Options{Own: true, Durable: true, Settings: map[string]string{
			"max_connections": "400", "shared_buffers": "256MB", "work_mem": "8MB", "maintenance_work_mem": "128MB",
		}})
		if err != nil {
			return nil, err
		}
		run := &adapterRun{
			program: program, peer: p, server: server, url: server.DatabaseURL("adapter"),
			phase: b.sizes.phase, every: b.sizes.sampleEvery, rateFile: filepath.Join(dir, "rate"),
		}
		figures, err := run.run(ctx)
		return figures, errors.Join(err, server.Stop())
	}}
}

// adapterRun takes one system through all phases.
type adapterRun struct {
	program      string
	peer         peer
	server       *pgserver.Server
	url          string
	phase, every time.Duration
	rateFile     string

	replicas [adapterReplicas]*replica
	exits    int // of replicas, by themselves
	figures  []figure

	mu      sync.Mutex // with those who read what replicas print
	tables  []string
	samples []sample
}

// sample is a line of an adapter.
type sample struct {
	Kind     string   `json:"kind"`
	Tables   []string `json:"event_tables"`
	Metric   string   `json:"metric"`
	Value    float64  `json:"value"`
	Instance int      `json:"instance_id"`

	at time.Time // when it came
}

type replica struct {
	cmd   *exec.Cmd
	in    io.Closer
	ended chan struct{}
}

func (a *adapterRun) run(ctx context.Context) (_ []figure, err error) {
	if _, err := a.query(ctx, a.server.DatabaseURL("postgres"), "create database adapter"); err != nil {
		return nil, err
	}
	if err := a.setRate(1); err != nil {
		return nil, err
	}
	defer a.stop()
	for i := range a.replicas {
		if err := a.start(ctx, i); err != nil {
			return nil, err
		}
	}
	err = a.phases(ctx)
	return a.figures, err
}

// phases are those of the scenarios for load, for a transaction that stays open, for what is killed and for pressure, one
// after the other.
func (a *adapterRun) phases(ctx context.Context) error {
	none := func() error { return nil }
	var release func()
	var back time.Time
	for _, p := range []struct {
		name         string
		begin, leave func() error
	}{
		{"warm-up", none, none},
		{"clean", none, none},
		{"idle in transaction", func() (err error) { release, err = a.idleInTransaction(ctx); return err }, func() error { release(); return nil }},
		{"after it", none, none},
		{"one of two workers killed", func() error { a.replicas[0].kill(); return nil }, none},
		{"worker back", func() error { back = time.Now(); return a.start(ctx, 0) }, func() error { return a.works(ctx, 0, back) }},
		{"server killed", func() error { return a.server.Restart(true) }, none},
		{"after that", none, none},
		{"sustained pressure", func() error { return a.setRate(pressure) }, func() error { return a.setRate(1) }},
		{"after the pressure", none, none},
	} {
		killed := p.name == "one of two workers killed"
		if !killed && p.name != "worker back" {
			if err := a.revive(ctx); err != nil {
				return err
			}
		}
		began := time.Now()
		if err := p.begin(); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		if err := pause(ctx, time.Until(began.Add(a.phase))); err != nil {
			return err
		}
		if err := p.leave(); err != nil {
			return err
		}
		if p.name == "warm-up" {
			continue
		}
		if err := a.report(ctx, p.name, began); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return a.end(ctx)
}

// works waits until a worker that was started has said that it completes jobs: before that it may not know the server well enough to
// bear its end.
func (a *adapterRun) works(ctx context.Context, instance int, started time.Time) error {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		if slices.ContainsFunc(a.since("completion_rate", started)[instance], func(rate float64) bool { return rate > 0 }) {
			return nil
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	return nil // one that cannot is in the figures
}

// report adds the figures of a phase.
func (a *adapterRun) report(ctx context.Context, name string, began time.Time) error {
	// Percentiles are of the last 30 s: those at the end are the phase's own, or nearly so where it is shorter.
	last := began.Add(a.phase * 4 / 5)
	a.figures = append(a.figures,
		figure{variant: name + ": rate", unit: "jobs/s", value: a.rate(began.Add(a.every))},
		figure{variant: name, unit: "ms", value: a.middle("claim_p50_ms", last), p99: a.middle("claim_p99_ms", last)})
	if name == "worker back" || name == "server killed" {
		if after, ok := a.recovered(began); ok {
			a.figures = append(a.figures, figure{variant: name + ": until 0.9 of the clean rate", unit: "s", value: after.Seconds()})
		}
	}
	a.mu.Lock()
	tables := slices.Clone(a.tables)
	a.mu.Unlock()
	what, unit, sql := "", "", ""
	switch name {
	case "clean", "idle in transaction", "after it":
		what, unit = ": dead rows at its end", "rows"
		sql = "select coalesce(sum(n_dead_tup), 0)::float8 from pg_stat_user_tables where schemaname || '.' || relname = any($1)"
	case "after the pressure":
		what, unit = ": tables at its end", "MiB"
		sql = "select coalesce(sum(pg_total_relation_size(t::regclass)), 0)::float8 / 1048576 from unnest($1::text[]) t"
	default:
		return nil
	}
	value, err := a.query(ctx, a.url, sql, tables)
	a.figures = append(a.figures, figure{variant: name + what, unit: unit, value: value})
	return err
}

// end stops the producers and counts what is not worked off when there was time enough.
func (a *adapterRun) end(ctx context.Context) error {
	if err := a.setRate(0); err != nil {
		return err
	}
	a.figures = append(a.figures, figure{variant: exitsName, unit: "count", value: float64(a.exits)})
	if a.peer.undone == "" {
		return nil
	}
	began := time.Now()
	for {
		left, err := a.query(ctx, a.url, a.peer.undone)
		if err != nil {
			return err
		}
		if took := time.Since(began); left == 0 || took > 2*time.Minute {
			a.figures = append(a.figures,
				figure{variant: "at the end, without producers: time to work off the rest", unit: "s", value: took.Seconds()},
				figure{variant: leftName, unit: "jobs", value: left})
			return nil
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// since gives a metric's values from some time on, by instance.
func (a *adapterRun) since(metric string, from time.Time) map[int][]float64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	values := make(map[int][]float64)
	for _, s := range a.samples {
		if s.Metric == metric && !s.at.Before(from) {
			values[s.Instance] = append(values[s.Instance], s.Value)
		}
	}
	return values
}

// rate is the sum of the instances' median rates of completion.
func (a *adapterRun) rate(from time.Time) (sum float64) {
	for _, values := range a.since("completion_rate", from) {
		sum += median(values)
	}
	return sum
}

// middle is the median of a metric, for the instance where it is highest.
func (a *adapterRun) middle(metric string, from time.Time) (worst float64) {
	for _, values := range a.since(metric, from) {
		worst = max(worst, median(values))
	}
	return worst
}

// recovered is when all instances together were back at 0.9 of the clean rate, in samples that began after that time.
func (a *adapterRun) recovered(from time.Time) (time.Duration, bool) {
	clean := 0.0
	for _, f := range a.figures {
		if f.variant == "clean: rate" {
			clean = f.value
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	latest := make(map[int]float64)
	for _, s := range a.samples {
		if s.Metric != "completion_rate" || s.at.Before(from.Add(a.every)) {
			continue
		}
		latest[s.Instance] = s.Value
		sum := 0.0
		for _, v := range latest {
			sum += v
		}
		if sum >= 0.9*clean {
			return s.at.Sub(from), true
		}
	}
	return 0, false
}

func (a *adapterRun) setRate(times float64) error {
	return os.WriteFile(a.rateFile, []byte(strconv.FormatFloat(adapterRate*times, 'f', 1, 64)), 0o644)
}

// idleInTransaction holds a transaction that has an id.
func (a *adapterRun) idleInTransaction(ctx context.Context) (release func(), err error) {
	conn, err := pgx.Connect(ctx, a.url)
	if err != nil {
		return nil, err
	}
	_, err = conn.Exec(ctx, "begin; select txid_current()")
	return func() { _ = conn.Close(context.WithoutCancel(ctx)) }, err
}

// query asks for one number over a connection of its own, since the server is killed now and then.
func (a *adapterRun) query(ctx context.Context, url, sql string, args ...any) (number float64, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close(ctx) }()
	err = conn.QueryRow(ctx, sql, args...).Scan(&number)
	if errors.Is(err, pgx.ErrNoRows) { // a statement that gives none
		err = nil
	}
	return number, err
}

// start starts an instance and returns when it has said what it is.
func (a *adapterRun) start(ctx context.Context, instance int) error {
	r := &replica{cmd: exec.Command(a.program), ended: make(chan struct{})}
	for name, value := range map[string]string{
		"DATABASE_URL": a.url, "SCENARIO": "long_horizon", "PRODUCER_MODE": "fixed", "PRODUCER_PACING": "adapter",
		"PRODUCER_RATE": strconv.Itoa(adapterRate), "PRODUCER_RATE_CONTROL_FILE": a.rateFile, "WORKER_COUNT": strconv.Itoa(adapterWorkers),
		"JOB_PAYLOAD_BYTES": "256", "JOB_WORK_MS": "1", "SAMPLE_EVERY_S": strconv.Itoa(int(a.every.Seconds())), "BENCH_INSTANCE_ID": strconv.Itoa(instance),
	} {
		r.cmd.Env = append(r.cmd.Env, name+"="+value)
	}
	var complaints bytes.Buffer
	r.cmd.Stderr = &complaints
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if r.in, err = r.cmd.StdinPipe(); err != nil {
		return err
	}
	if err := r.cmd.Start(); err != nil {
		return err
	}
	described := make(chan struct{})
	go func() {
		defer close(r.ended)
		once := sync.OnceFunc(func() { close(described) })
		for lines := bufio.NewScanner(out); lines.Scan(); {
			s := sample{at: time.Now()}
			if json.Unmarshal(lines.Bytes(), &s) != nil {
				continue
			}
			a.mu.Lock()
			if s.Kind == "descriptor" {
				a.tables = s.Tables
				once()
			} else {
				a.samples = append(a.samples, s)
			}
			a.mu.Unlock()
		}
		_ = r.cmd.Wait()
	}()
	a.replicas[instance] = r
	select {
	case <-described:
		return nil
	case <-r.ended:
		return fmt.Errorf("it ended without a descriptor: %s", peers.LastLine(complaints.String()))
	case <-time.After(time.Minute):
		return errors.New("it printed no descriptor within a minute")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// revive starts again what has ended by itself.
func (a *adapterRun) revive(ctx context.Context) error {
	for i, r := range a.replicas {
		select {
		case <-r.ended:
			a.exits++
			if err := a.start(ctx, i); err != nil {
				return err
			}
		default:
		}
	}
	return nil
}

func (r *replica) kill() {
	_ = r.cmd.Process.Kill()
	<-r.ended
}

// stop ends all instances as the protocol says.
func (a *adapterRun) stop() {
	for _, r := range a.replicas {
		if r != nil {
			_ = r.cmd.Process.Signal(syscall.SIGTERM)
			_ = r.in.Close()
		}
	}
	for _, r := range a.replicas {
		if r == nil {
			continue
		}
		select {
		case <-r.ended:
		case <-time.After(10 * time.Second):
			fmt.Fprintf(os.Stderr, "bench: %s's adapter did not stop within 10 s\n", a.peer.name)
			r.kill()
		}
	}
}
