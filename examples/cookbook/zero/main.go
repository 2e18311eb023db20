// Zero works off jobs where the database sleeps while nobody asks it anything. Between two ticks it sends nothing and holds no
// connection. It ticks when somebody calls it, and when the next job is due.
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

// sleeper works in place of a Worker that runs, and of a Reaper.
type sleeper struct {
	url      string
	handlers []onceq.Handler
	called   chan struct{} // has room for one
	sleeps   func(time.Duration)
}

// ServeHTTP is called after the commit of a transaction that enqueues, and now and then by a cron job, in case such a call is
// lost. On a platform on which programs sleep too, it calls tick itself, and gives what that returns to the platform's scheduler.
func (s *sleeper) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	select {
	case s.called <- struct{}{}:
	default: // the next tick has not begun
	}
	w.WriteHeader(http.StatusAccepted)
}

// Run ticks until ctx ends: it is a part of onceq.Serve.
func (s *sleeper) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		next, err := s.tick(ctx)
		if err != nil {
			log.Print(err)
			next = time.Minute
		}
		s.sleeps(next)
		select {
		case <-ctx.Done():
		case <-s.called:
		case <-time.After(next):
		}
	}
	return nil
}

// tick runs what is due, and returns how long the database may sleep then.
func (s *sleeper) tick(ctx context.Context) (time.Duration, error) {
	pool, err := pgxpool.New(ctx, s.url)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	q, err := onceq.New(pool, nil)
	if err != nil {
		return 0, err
	}
	worker, err := onceq.NewWorker(q, onceq.WorkerConfig{}, s.handlers...)
	if err != nil {
		return 0, err
	}
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{})
	if err != nil {
		return 0, err
	}
	if err := worker.Drain(ctx, 0); err != nil {
		return 0, err
	}
	if _, err := reaper.RunOnce(ctx); err != nil {
		return 0, err
	}
	var seconds float64
	err = pool.QueryRow(ctx, untilNext).Scan(&seconds)
	return time.Duration(seconds * float64(time.Second)), err
}

// untilNext is when the next delayed job, retry or schedule is due, or the next lease of a worker that died runs out. What is due
// and did not start is paused, or waits for a lane or a limit: a minute. Without any job it is a day.
const untilNext = `
select extract(epoch from coalesce(min(case when at > now() then at else now() + interval '1 minute' end), now() + interval '1 day') - now())::float8
  from (select greatest(run_at, leased_until) as at from onceq.v_jobs where state in ('waiting', 'retrying', 'delayed', 'running')) j`

var mail = onceq.Kind[string]{Name: "mail"}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	for to, delay := range map[string]time.Duration{"ada": 0, "bob": 2 * time.Second} {
		job := mail.Job(to)
		job.Delay = delay
		_, err := q.Enqueue(ctx, pool, job)
		example.Check(err)
	}
	pool.Close()

	mailed := make(chan string)
	s := &sleeper{
		url:    os.Getenv("DATABASE_URL"),
		called: make(chan struct{}, 1),
		sleeps: func(d time.Duration) { log.Print("nothing is due for ", d) },
		handlers: []onceq.Handler{
			mail.Handle(func(_ context.Context, _ *onceq.Lease, to string) error { mailed <- to; return nil }),
		},
	}
	server := httptest.NewServer(s)
	defer server.Close()
	ended := make(chan error)
	go func() { ended <- onceq.Serve(ctx, s) }()
	fmt.Println("mailed", <-mailed)
	fmt.Println("mailed", <-mailed) // two seconds later, without a call

	pool, q = example.Open(ctx, "")
	_, err := q.Enqueue(ctx, pool, mail.Job("eve"))
	example.Check(err)
	pool.Close()
	res, err := http.Post(server.URL, "", nil)
	example.Check(err)
	fmt.Println(res.Status)
	fmt.Println("mailed", <-mailed)
	stop()
	example.Check(<-ended)
}

// Output:
// mailed ada
// mailed bob
// 202 Accepted
// mailed eve
