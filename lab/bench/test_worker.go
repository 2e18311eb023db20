package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

// childEnv makes this program a worker process for the database that it names.
const childEnv = "ONCEQ_BENCH_WORKER"

// fat is a job with about 1 kB of payload.
type fat struct {
	N    int    `json:"n"`
	Text string `json:"text"`
}

// childJobs is what the child works off before it is idle.
type childJobs struct {
	Jobs int     `json:"jobs"`
	Idle float64 `json:"idle"` // seconds
}

type childReport struct {
	PeakMiB, RestMiB float64
	Leaked           int     // goroutines
	IdlePercent      float64 // of one core
}

// workerTrials run a worker in a process of its own, with 1,000 handlers at once.
func workerTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name != "onceq" {
			continue
		}
		jobs := b.sizes.drained
		trials = append(trials, trial{
			test: "worker", peer: p,
			prepare: func(ctx context.Context, r *room) error {
				text := strings.Repeat("once and only once ", 52)
				kind := onceq.Kind[fat]{Name: "fat"}
				return ours(r).enqueue(ctx, 0, jobs, func(n int) onceq.Job { return kind.Job(fat{n, text}) })
			},
			measure: func(ctx context.Context, r *room) ([]figure, error) {
				self, err := os.Executable()
				if err != nil {
					return nil, err
				}
				order, err := json.Marshal(childJobs{jobs, b.sizes.idle.Seconds()})
				if err != nil {
					return nil, err
				}
				cmd := exec.CommandContext(ctx, self)
				cmd.Env = append(os.Environ(), childEnv+"="+r.url)
				cmd.Stdin, cmd.Stderr = bytes.NewReader(order), os.Stderr
				out, err := cmd.Output()
				if err != nil {
					return nil, fmt.Errorf("the worker process: %w", err)
				}
				var report childReport
				if err := json.Unmarshal(out, &report); err != nil {
					return nil, err
				}
				return []figure{
					{variant: "resident, peak", unit: "MiB", value: report.PeakMiB},
					{variant: "resident, idle", unit: "MiB", value: report.RestMiB},
					{variant: "goroutines leaked", unit: "count", value: float64(report.Leaked)},
					{variant: "CPU when idle", unit: "% of a core", value: report.IdlePercent},
				}, nil
			},
		})
	}
	return trials
}

// workerChild is the worker process.
func workerChild(url string) error {
	var order childJobs
	if err := json.NewDecoder(os.Stdin).Decode(&order); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	q, err := onceq.New(pool, &onceq.Config{Logger: quiet})
	if err != nil {
		return err
	}
	if err := q.Check(ctx); err != nil { // the pool's own goroutines start here
		return err
	}
	var done atomic.Int64
	kind := onceq.Kind[fat]{Name: "fat"}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 1000}}},
		kind.Handle(func(context.Context, *onceq.Lease, fat) error {
			time.Sleep(20 * time.Millisecond)
			done.Add(1)
			return nil
		}))
	if err != nil {
		return err
	}
	before := runtime.NumGoroutine()
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	for done.Load() < int64(order.Jobs) {
		select {
		case err := <-ended:
			return fmt.Errorf("the worker ended: %w", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	var report childReport
	report.PeakMiB = memoryOf(os.Getpid(), "VmHWM")
	time.Sleep(2 * time.Second)
	used := cpuTime()
	time.Sleep(time.Duration(order.Idle * float64(time.Second)))
	report.IdlePercent = 100 * (cpuTime() - used).Seconds() / order.Idle
	report.RestMiB = memoryOf(os.Getpid(), "VmRSS")
	cancel()
	if err := <-ended; err != nil {
		return err
	}
	for range 20 { // connections close in the background
		if report.Leaked = runtime.NumGoroutine() - before; report.Leaked <= 0 {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	report.Leaked = max(0, report.Leaked)
	return json.NewEncoder(os.Stdout).Encode(report)
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// memoryOf reads a line of a process's status, in MiB; 0 where there is none.
func memoryOf(pid int, line string) float64 {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for l := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(l, line+":"); ok {
			var kb float64
			_, _ = fmt.Sscan(rest, &kb)
			return kb / 1024
		}
	}
	return 0
}
