package onceq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/jsonb"
)

// These measure what a job costs in this process, without the database. Compare with benchstat. lab/bench measures the
// whole.
//
//	go test -run - -bench . -count 10

type benchPayload struct {
	UserID int      `json:"user_id"`
	Email  string   `json:"email"`
	Tags   []string `json:"tags"`
}

var (
	benchOf    = benchPayload{42, "ada@example.com", []string{"new", "trial"}}
	benchPlain = Kind[benchPayload]{Name: "bench"}
	benchKeyed = Kind[benchPayload]{Name: "bench", Key: func(p benchPayload) string { return fmt.Sprintf("welcome:%d", p.UserID) }}
)

// deadDB refuses every statement that it is given.
type deadDB struct{}

var errDeadDB = errors.New("no database")

func (deadDB) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errDeadDB
}
func (deadDB) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, errDeadDB }

// benchQueue never connects: its pool opens connections only when somebody needs one.
func benchQueue(b *testing.B) *Queue {
	pool, err := pgxpool.New(b.Context(), "postgres://nobody@127.0.0.1:1/none")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	q, err := New(pool, nil)
	if err != nil {
		b.Fatal(err)
	}
	return q
}

func BenchmarkEncode(b *testing.B) {
	for _, c := range []struct {
		name string
		kind Kind[benchPayload]
	}{{"plain", benchPlain}, {"keyed", benchKeyed}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				job := c.kind.Job(benchOf)
				if _, err := job.encode(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkCanonical(b *testing.B) {
	raw, err := json.Marshal(map[string]any{"z": benchOf, "a": []float64{1.5, 2e10, -3}, "text": "naïve \"quotes\"\n"})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(raw)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := jsonb.Scan(raw, true, nil); err != nil {
			b.Fatal(err)
		}
	}
}

// Everything that EnqueueMany does before it sends its statement, for 1,000 jobs.
func BenchmarkEnqueueMany(b *testing.B) {
	q := benchQueue(b)
	for _, c := range []struct {
		name string
		kind Kind[benchPayload]
	}{{"plain", benchPlain}, {"keyed", benchKeyed}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				jobs := make([]Job, 1000)
				for i := range jobs {
					p := benchOf
					p.UserID = i
					jobs[i] = c.kind.Job(p)
				}
				if _, err := q.EnqueueMany(b.Context(), deadDB{}, jobs); !errors.Is(err, errDeadDB) {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1000, "ns/job")
		})
	}
}

func benchLeases(q *Queue, n int) []*Lease {
	payload, _ := json.Marshal(benchOf)
	leases := make([]*Lease, n)
	for i := range leases {
		id := int64(i + 1)
		leases[i] = &Lease{q: q, ID: id, Token: id<<tokenBits | 1, Kind: "bench", Queue: DefaultQueue, Payload: payload, Attempt: 1, MaxAttempts: 25, claims: 1, holder: 7}
	}
	return leases
}

// Everything between the claim of 1,000 jobs and their outcomes: handing out, decoding, running and collecting.
func BenchmarkDispatch(b *testing.B) {
	q := benchQueue(b)
	w, err := NewWorker(q, WorkerConfig{}, benchPlain.Handle(func(context.Context, *Lease, benchPayload) error { return nil }))
	if err != nil {
		b.Fatal(err)
	}
	base, cancel := context.WithCancelCause(b.Context())
	defer cancel(nil)
	tasks := &taskSet{q: q, base: base, all: make(map[int64]*task)}
	out := newOutbox(q, 1, nil, w.lease, base, tasks)
	x := &executor{q: q, handlers: w.handlers, lease: w.lease, base: base, tasks: tasks, outbox: out}
	s := newSlots(w, DefaultQueue, w.queues[DefaultQueue])
	for range s.count {
		go x.work(s)
	}
	defer close(s.ready)
	leases := benchLeases(q, 1000)
	b.ReportAllocs()
	for b.Loop() {
		x.accept(s, leases, time.Now())
		for left := len(leases); left > 0; {
			batch := out.take()
			left -= len(batch)
			tasks.mu.Lock()
			for _, o := range batch {
				delete(tasks.all, o.lease.Token)
			}
			tasks.mu.Unlock()
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(leases)), "ns/job")
}

// Everything that writing 1,000 completions takes before the statement is sent.
func BenchmarkFinish(b *testing.B) {
	q := benchQueue(b)
	leases := benchLeases(q, 1000)
	outcomes := make([]outcome, len(leases))
	b.ReportAllocs()
	for b.Loop() {
		for i, l := range leases {
			outcomes[i] = outcome{lease: l, state: StateCompleted}
		}
		if _, _, err := q.finish(b.Context(), deadDB{}, outcomes); !errors.Is(err, errDeadDB) {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(leases)), "ns/job")
}
