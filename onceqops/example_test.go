package onceqops_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/exampletb"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// A mail that failed for good is looked at, and run again.
func Example() {
	ctx, pool, q, done := database() // onceq.New(pool, nil)
	defer done()
	ops := onceqops.New(q)

	broken := true
	mail := onceq.Kind[string]{Name: "mail"}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, mail.Handle(func(_ context.Context, _ *onceq.Lease, to string) error {
		if broken {
			return onceq.Fatal(errors.New("no such mail server"))
		}
		fmt.Println("mail to", to)
		return nil
	}))
	check(err)
	_, err = q.Enqueue(ctx, pool, mail.Job("ada@example.com"))
	check(err)
	check(w.Drain(ctx, 0))

	dead, err := ops.List(ctx, pool, onceqops.Filter{Kind: "mail", States: []onceq.State{onceq.StateDead}})
	check(err)
	for _, job := range dead {
		why, err := ops.Explain(ctx, pool, job.ID)
		check(err)
		fmt.Println(why.Cause(), job.Errors[0].Error)
	}
	broken = false
	redriven, _, err := ops.RedriveMany(ctx, pool, onceqops.Filter{Kind: "mail"})
	check(err)
	fmt.Println(redriven, "run again")
	check(w.Drain(ctx, 0))
	// Output:
	// dead no such mail server
	// 1 run again
	// mail to ada@example.com
}

// Jobs page by page, the newest first.
func ExampleOps_List() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	_, err := q.EnqueueMany(ctx, pool, []onceq.Job{
		{Kind: "mail", Payload: "ada"}, {Kind: "mail", Payload: "bob"}, {Kind: "mail", Payload: "cleo"},
	})
	check(err)
	filter := onceqops.Filter{Kind: "mail", Limit: 2}
	for n := 1; ; n++ {
		page, err := ops.List(ctx, pool, filter)
		check(err)
		if len(page) == 0 {
			break
		}
		for _, job := range page {
			fmt.Println("page", n, string(job.Payload))
		}
		filter.After = page[len(page)-1].ID
	}
	// Output:
	// page 1 "cleo"
	// page 1 "bob"
	// page 2 "ada"
}

// The effects of a job: what it did outside the database, and what the results were.
func ExampleOps_Effects() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	order := onceq.Kind[int]{Name: "order", MaxAttempts: 1}
	job, err := q.Enqueue(ctx, pool, order.Job(7))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		order.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
			for _, name := range []string{"charge", "label"} {
				_, err := onceq.Once(ctx, l, name, func(ctx context.Context, key string) (string, error) {
					return name + " of order 7", nil
				})
				if err != nil {
					return err
				}
			}
			return errors.New("the parcel service is away")
		}))
	check(err)
	check(w.Drain(ctx, 0))

	effects, err := ops.Effects(ctx, pool, job.ID)
	check(err)
	for _, e := range effects {
		fmt.Println(e.Name, e.State, string(e.Result))
	}
	// Output:
	// charge completed "charge of order 7"
	// label completed "label of order 7"
}

// How many jobs wait, and how long has the oldest waited?
func ExampleOps_Stats() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	_, err := q.EnqueueMany(ctx, pool, []onceq.Job{{Kind: "a"}, {Kind: "b"}, {Kind: "c", Delay: time.Hour}})
	check(err)
	stats, err := ops.Stats(ctx)
	check(err)
	for _, s := range stats {
		fmt.Println(s.Queue, s.Waiting, s.Delayed, s.Dead)
	}
	// Output: default 2 1 0
}

// Each finding says what slows the queue down and what to do. No finding is a good sign.
func ExampleOps_Health() {
	ctx, _, q, done := database()
	defer done()
	ops := onceqops.New(q)

	findings, err := ops.Health(ctx)
	for _, f := range findings {
		slog.Warn("queue", "what", f.What, "detail", f.Detail, "advice", f.Advice)
	}
	fmt.Println(err)
	// Output: <nil>
}

// A delayed job runs now.
func ExampleOps_Retry() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	job, err := q.Enqueue(ctx, pool, onceq.Job{Kind: "digest", Delay: 24 * time.Hour})
	check(err)
	fmt.Println(job.State)
	fmt.Println(ops.Retry(ctx, pool, job.ID))
	// Output:
	// delayed
	// waiting <nil>
}

// A dead job runs again after the mistake was corrected. It keeps its id, its key and the outcomes of its effects.
func ExampleOps_Redrive() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	broken := true
	kind := onceq.Kind[string]{Name: "report", MaxAttempts: 1}
	job, err := q.Enqueue(ctx, pool, kind.Job("weekly"))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		kind.Handle(func(ctx context.Context, l *onceq.Lease, name string) error {
			if broken {
				return errors.New("template not found")
			}
			fmt.Println("sent", name)
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0))

	info, err := q.Get(ctx, pool, job.ID)
	check(err)
	fmt.Println(info.State, info.Errors[0].Error)

	broken = false
	_, err = ops.Redrive(ctx, pool, job.ID)
	check(err)
	check(w.Drain(ctx, 0))
	// Output:
	// dead template not found
	// sent weekly
}

// After the mistake was corrected, all jobs that died of it run again.
func ExampleOps_RedriveMany() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	broken := true
	report := onceq.Kind[int]{Name: "report", MaxAttempts: 1}
	_, err := q.EnqueueMany(ctx, pool, []onceq.Job{report.Job(1), report.Job(2)})
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		report.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
			if broken {
				return errors.New("template not found")
			}
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0))

	broken = false
	redriven, taken, err := ops.RedriveMany(ctx, pool, onceqops.Filter{Kind: "report"})
	fmt.Println("redriven:", redriven, "key taken by now:", taken, err)
	check(w.Drain(ctx, 0))
	dead, err := ops.List(ctx, pool, onceqops.Filter{States: []onceq.State{onceq.StateDead}})
	fmt.Println("dead:", len(dead), err)
	// Output:
	// redriven: 2 key taken by now: 0 <nil>
	// dead: 0 <nil>
}

// A user is deleted. The same transaction cancels all of the user's jobs, which have the user as the scope of their keys.
func ExampleOps_CancelMany() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	for _, user := range []string{"ada", "bob"} {
		_, err := q.EnqueueMany(ctx, pool, []onceq.Job{
			{Kind: "digest", Scope: "user:" + user, Key: "digest:2026-11"},
			{Kind: "reminder", Scope: "user:" + user, Key: "reminder:7", Delay: time.Hour},
		})
		check(err)
	}
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// delete from users …
		cancelled, running, err := ops.CancelMany(ctx, tx, onceqops.Filter{Scope: "user:ada"})
		fmt.Println("cancelled:", cancelled, "told to end:", running)
		return err
	}))
	left, err := ops.List(ctx, pool, onceqops.Filter{States: []onceq.State{onceq.StateWaiting, onceq.StateDelayed}})
	check(err)
	fmt.Println("left:", len(left))
	// Output:
	// cancelled: 2 told to end: 0
	// left: 2
}

// A provider that cannot deduplicate did not answer. Nobody knows whether the fax was sent, so a person decides.
func ExampleOps_Resolve() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	fax := onceq.Kind[string]{Name: "fax", Backoff: func(int, error) time.Duration { return 0 }}
	job, err := q.Enqueue(ctx, pool, fax.Job("555-0100"))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		fax.Handle(func(ctx context.Context, l *onceq.Lease, number string) error {
			_, err := onceq.Once(ctx, l, "send", func(ctx context.Context, key string) (string, error) {
				fmt.Println("sending")
				return "", errors.New("no answer")
			}, onceq.OnUncertain(onceq.Hold()))
			return err
		}))
	check(err)
	check(w.Drain(ctx, 0))

	info, err := q.Get(ctx, pool, job.ID)
	check(err)
	fmt.Println(info.State)

	// Somebody has looked: the fax is there.
	check(ops.Resolve(ctx, pool, job.ID, "send", onceq.Applied("page 1 of 1")))
	check(w.Drain(ctx, 0))
	_, err = q.Get(ctx, pool, job.ID)
	fmt.Println("completed, and no history is kept:", errors.Is(err, onceq.ErrNotFound))
	// Output:
	// sending
	// held
	// completed, and no history is kept: true
}

// After an outage, somebody has asked the provider: none of the letters was sent. So all of them are sent now.
func ExampleOps_ResolveMany() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	var sent atomic.Int32
	outage := true
	letter := onceq.Kind[int]{Name: "letter", Backoff: func(int, error) time.Duration { return 0 }}
	_, err := q.EnqueueMany(ctx, pool, []onceq.Job{letter.Job(1), letter.Job(2)})
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		letter.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
			_, err := onceq.Once(ctx, l, "send", func(ctx context.Context, key string) (bool, error) {
				if outage {
					return false, errors.New("no answer")
				}
				sent.Add(1)
				return true, nil
			}, onceq.OnUncertain(onceq.Hold()))
			return err
		}))
	check(err)
	check(w.Drain(ctx, 0))

	outage = false
	resolved, redriven, err := ops.ResolveMany(ctx, pool, onceqops.Filter{Kind: "letter"}, "send", onceq.NeverApplied())
	fmt.Println("resolved:", resolved, "run again:", redriven, err)
	check(w.Drain(ctx, 0))
	fmt.Println("sent:", sent.Load())
	// Output:
	// resolved: 2 run again: 2 <nil>
	// sent: 2
}

// A finished job is forgotten, and its key is free at once.
func ExampleOps_Discard() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	job := onceq.Job{Kind: "import", Key: "2026-11-22.csv"}
	first, err := q.Enqueue(ctx, pool, job)
	check(err)
	fmt.Println("not finished:", errors.Is(ops.Discard(ctx, pool, first.ID), onceqops.ErrUnfinished))
	_, err = q.Cancel(ctx, pool, first.ID)
	check(err)
	check(ops.Discard(ctx, pool, first.ID))
	again, err := q.Enqueue(ctx, pool, job)
	check(err)
	fmt.Println("duplicate:", again.Duplicate)
	// Output:
	// not finished: true
	// duplicate: false
}

// Dead jobs that nobody needs any more are deleted.
func ExampleOps_DiscardMany() {
	ctx, pool, q, done := database()
	defer done()
	ops := onceqops.New(q)

	_, err := q.EnqueueMany(ctx, pool, []onceq.Job{{Kind: "probe"}, {Kind: "probe"}})
	check(err)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 2})
	check(err)
	for _, lease := range leases {
		check(lease.Fail(ctx, onceq.Fatal(errors.New("no such host"))))
	}
	fmt.Println(ops.DiscardMany(ctx, pool, onceqops.Filter{Kind: "probe"}))
	// Output: 2 <nil>
}

// database gives an example a database of its own with onceq's tables, as the examples of package onceq have one.
func database() (ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue, done func()) {
	t := exampletb.New()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	return t.Context(), db.Pool, db.Queue, t.Done
}

// check keeps the examples short. A program returns its errors.
func check(err error) {
	if err != nil {
		panic(err)
	}
}
