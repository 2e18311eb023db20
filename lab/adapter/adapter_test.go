package main

import (
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/onceq/onceq/queuetest"
)

// The harness expects a descriptor first, then each metric, finished jobs, a rate that follows the control file, and an end
// when it asks for one.
func TestAdapter(t *testing.T) {
	q := queuetest.New(t)
	file := filepath.Join(t.TempDir(), "rate")
	setRate := func(rate string) {
		if err := os.WriteFile(file, []byte(rate), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	setRate("200.0")
	env := map[string]string{
		"DATABASE_URL": q.Pool.Config().ConnString(), "SAMPLE_EVERY_S": "1", "WORKER_COUNT": "8", "PRODUCER_RATE_CONTROL_FILE": file, "BENCH_QUEUE_COUNT": "2",
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, func(name string) string { return env[name] }, strings.NewReader("ENQUEUE 5\n"), w)
		_ = w.Close()
	}()
	lines := json.NewDecoder(r)
	var first struct {
		Kind, System string
		Tables       []string `json:"event_tables"`
	}
	if err := lines.Decode(&first); err != nil {
		t.Fatal(err, <-ended)
	}
	if first.Kind != "descriptor" || first.System != "onceq" || !slices.Contains(first.Tables, "onceq.jobs") {
		t.Fatalf("the first line is %+v", first)
	}
	seen := make(map[string]float64)
	var sample struct {
		Metric string
		Value  float64
	}
	await := func(what string, done func() bool) {
		t.Helper()
		for !done() {
			if err := lines.Decode(&sample); err != nil {
				t.Fatalf("waiting for %s: %v, %v", what, err, <-ended)
			}
			seen[sample.Metric] = sample.Value
		}
	}
	await("all metrics and jobs that are done", func() bool {
		return len(seen) == 7 && seen["completion_rate"] > 0 && seen["enqueue_rate"] > 0 && seen["claim_p99_ms"] > 0
	})
	setRate("0")
	await("the rate to follow the file", func() bool { return seen["producer_target_rate"] == 0 && seen["enqueue_rate"] == 0 })
	cancel()
	go func() { _, _ = io.Copy(io.Discard, r) }()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestSettingsThatAreWrong(t *testing.T) {
	env := map[string]string{"WORKER_COUNT": "none", "SCENARIO": "worker_only"}
	_, err := readSettings(func(name string) string { return env[name] })
	for _, want := range []string{"DATABASE_URL is not set", `WORKER_COUNT is "none"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, without %q", err, want)
		}
	}
}

func TestHistogram(t *testing.T) {
	for range 100_000 {
		us := rand.Int64N(1 << rand.IntN(40))
		d := time.Duration(us) * time.Microsecond
		if up := upper(bucket(d)); up < d || up > d+d/1024+time.Microsecond {
			t.Fatalf("%v is in a bucket up to %v", d, up)
		}
	}
	var h histogram
	now := time.Unix(1000, 0)
	h.addAt(now.Add(-latencyWindow), time.Hour) // too old
	for ms := range 1000 {
		h.addAt(now.Add(-time.Duration(ms%30)*time.Second), time.Duration(ms+1)*time.Millisecond)
	}
	for i, got := range h.quantiles(now, 0.5, 0.95, 0.99) {
		want := []time.Duration{500 * time.Millisecond, 950 * time.Millisecond, 990 * time.Millisecond}[i]
		if got < want || got > want+want/1000 {
			t.Errorf("quantile %d is %v, not %v", i, got, want)
		}
	}
}
