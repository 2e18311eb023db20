package main

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/onceq/onceq/internal/pgserver"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(memberEnv); url != "" {
		if err := memberChild(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// The processes tell of each job once, and their statements are counted.
func TestMembers(t *testing.T) {
	if os.Getenv(pgserver.EnvURL) != "" {
		t.Skip("that server may not count statements")
	}
	ctx := t.Context()
	b := &bench{sizes: quickSizes}
	var err error
	if b.server, err = startServer(ctx, "", false, true); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.server.stop(); err != nil {
			t.Error(err)
		}
	}()
	for _, p := range append([]peer{onceqPeer()}, riverPeers()...) {
		const jobs = 300
		_, err := b.try(ctx, trial{test: "fleet", peer: p, counted: true, measure: func(ctx context.Context, r *room) ([]figure, error) {
			o, err := r.observe(ctx)
			if err != nil {
				return nil, err
			}
			defer o.close()
			var done atomic.Int64
			l := newLoad(jobs, time.Second, func(int, time.Duration) {})
			ms, err := r.join(ctx, 3, order{Starts: true}, func(s said, jobs int) {
				done.Add(int64(jobs))
				l.hear(s, jobs)
			})
			if err != nil {
				return nil, err
			}
			defer ms.stop()
			before, err := o.statements(ctx)
			if err != nil {
				return nil, err
			}
			err = l.run(ctx, ms, func(ctx context.Context, n int) error { return r.session.(enqueuer).put(ctx, nil, n, false) })
			if err != nil {
				return nil, err
			}
			if err := l.wait(ctx, ms, 2*time.Minute); err != nil {
				return nil, err
			}
			if done.Load() != jobs {
				t.Errorf("%s: %d jobs were done, not %d", p, done.Load(), jobs)
			}
			if err := o.none(ctx, p.undone, time.Minute); err != nil {
				return nil, err
			}
			if after, err := o.statements(ctx); err != nil || after-before < jobs {
				t.Errorf("%s: %d statements for %d jobs, %v", p, after-before, jobs, err)
			}
			if n, err := o.connections(ctx); err != nil || n < 3 {
				t.Errorf("%s: 3 processes have %d connections, %v", p, n, err)
			}
			return nil, nil
		}}, nil)
		if err != nil {
			t.Fatalf("%s: %v", p, err)
		}
	}
}

// Our adapter comes through all phases: killed workers, a killed server. Nothing is left.
func TestAdapters(t *testing.T) {
	b := &bench{peers: []peer{onceqPeer()}, sizes: sizes{phase: time.Second, sampleEvery: time.Second}}
	trials := adapterTrials(b)
	if len(trials) != 1 {
		t.Fatalf("%d trials for one peer", len(trials))
	}
	figures, err := trials[0].measure(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, f := range figures {
		switch f.variant {
		case exitsName, leftName:
			seen++
			if f.value != 0 {
				t.Errorf("%s: %v", f.variant, f.value)
			}
		}
	}
	if seen != 2 {
		t.Errorf("of %d figures two are missing", len(figures))
	}
}
