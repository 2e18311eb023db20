package onceq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// A job is enqueued in the transaction that stores the user, twice because the client submitted twice, and runs once.
func Example() {
	ctx, pool, q, done := database() // onceq.New(pool, nil)
	defer done()

	type WelcomeMail struct{ UserID int }
	welcome := onceq.Kind[WelcomeMail]{
		Name: "welcome",
		Key:  func(m WelcomeMail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
	}

	for range 2 {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// insert into users …
			res, err := q.Enqueue(ctx, tx, welcome.Job(WelcomeMail{UserID: 42}))
			fmt.Println("duplicate:", res.Duplicate)
			return err
		}))
	}

	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		welcome.Handle(func(ctx context.Context, l *onceq.Lease, m WelcomeMail) error {
			fmt.Println("mail to user", m.UserID)
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0)) // a service calls Run
	// Output:
	// duplicate: false
	// duplicate: true
	// mail to user 42
}

// Whoever enqueues a key again after the job has finished gets its result.
func ExampleQueue_Enqueue() {
	ctx, pool, q, done := database()
	defer done()

	type Charge struct{ Order, Cents int }
	charge := onceq.Kind[Charge]{
		Name: "charge",
		Key:  func(c Charge) string { return fmt.Sprintf("charge:%d", c.Order) },
	}
	enqueue := func(c Charge) (onceq.Result, error) { return q.Enqueue(ctx, pool, charge.Job(c)) }

	first, err := enqueue(Charge{Order: 7, Cents: 1200})
	check(err)
	fmt.Println(first.State, first.Duplicate)

	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		charge.Handle(func(ctx context.Context, l *onceq.Lease, c Charge) error {
			return l.SetResult(map[string]string{"receipt": "r-1"})
		}))
	check(err)
	check(w.Drain(ctx, 0))

	again, err := enqueue(Charge{Order: 7, Cents: 1200})
	check(err)
	fmt.Println(again.State, again.Duplicate, again.ID == first.ID, string(again.Output))

	_, err = enqueue(Charge{Order: 7, Cents: 9900})
	fmt.Println("another amount under the same key is refused:", errors.Is(err, onceq.ErrMismatch))
	// Output:
	// waiting false
	// completed true true {"receipt": "r-1"}
	// another amount under the same key is refused: true
}

// A thousand jobs are one round trip. All are enqueued or none.
func ExampleQueue_EnqueueMany() {
	ctx, pool, q, done := database()
	defer done()

	var jobs []onceq.Job
	for user := range 1000 {
		jobs = append(jobs, onceq.Job{
			Kind: "newsletter", Key: fmt.Sprintf("2026-11:%d", user), Payload: map[string]int{"user": user},
		})
	}
	results, err := q.EnqueueMany(ctx, pool, jobs)
	check(err)
	fmt.Println(len(results), results[0].ID < results[999].ID)
	// Output: 1000 true
}

// The job travels in the round trip of the application's own statements.
func ExampleQueue_EnqueueInBatch() {
	ctx, pool, q, done := database()
	defer done()
	_, err := pool.Exec(ctx, `create table orders (id int primary key)`)
	check(err)

	batch := &pgx.Batch{}
	batch.Queue(`begin`)
	batch.Queue(`insert into orders values ($1)`, 7)
	pending, err := q.EnqueueInBatch(batch, onceq.Job{Kind: "charge", Key: "order:7"})
	check(err)
	batch.Queue(`commit`)
	check(pool.SendBatch(ctx, batch).Close())

	res, err := pending.Result(ctx, pool)
	check(err)
	fmt.Println(res.State)
	// Output: waiting
}

// What the handler writes through tx commits together with the completion of the job, or not at all.
func ExampleKind_HandleTx() {
	ctx, pool, q, done := database()
	defer done()
	_, err := pool.Exec(ctx, `create table balances (account text primary key, cents int); insert into balances values ('ada', 0)`)
	check(err)

	type Deposit struct {
		Account string
		Cents   int
	}
	deposit := onceq.Kind[Deposit]{Name: "deposit"}
	_, err = q.Enqueue(ctx, pool, deposit.Job(Deposit{"ada", 500}))
	check(err)

	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		deposit.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, d Deposit) error {
			_, err := tx.Exec(ctx, `update balances set cents = cents + $2 where account = $1`, d.Account, d.Cents)
			return err
		}))
	check(err)
	check(w.Drain(ctx, 0))

	var cents int
	check(pool.QueryRow(ctx, `select cents from balances where account = 'ada'`).Scan(&cents))
	fmt.Println(cents)
	// Output: 500
}

// Up to a hundred jobs share a transaction: one statement for what they write, one for their completions.
func ExampleKind_HandleBatch() {
	ctx, pool, q, done := database()
	defer done()
	_, err := pool.Exec(ctx, `create table clicks (page text)`)
	check(err)

	type Click struct{ Page string }
	click := onceq.Kind[Click]{Name: "click"}
	_, err = q.EnqueueMany(ctx, pool, []onceq.Job{click.Job(Click{"/"}), click.Job(Click{"/"}), click.Job(Click{"/about"})})
	check(err)

	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		click.HandleBatch(100, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[Click]) error {
			pages := make([]string, len(jobs))
			for i, job := range jobs {
				pages[i] = job.Payload.Page
			}
			_, err := tx.Exec(ctx, `insert into clicks select unnest($1::text[])`, pages)
			return err
		}))
	check(err)
	check(w.Drain(ctx, 0))

	var n int
	check(pool.QueryRow(ctx, `select count(*) from clicks`).Scan(&n))
	fmt.Println(n)
	// Output: 3
}

// The card is charged, and then the handler fails. When the job runs again, Once replays the receipt.
func ExampleOnce() {
	ctx, pool, q, done := database()
	defer done()

	charge := onceq.Kind[int]{Name: "charge", Backoff: func(int, error) time.Duration { return 0 }}
	_, err := q.Enqueue(ctx, pool, charge.Job(1200))
	check(err)

	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		charge.Handle(func(ctx context.Context, l *onceq.Lease, cents int) error {
			receipt, err := onceq.Once(ctx, l, "card", func(ctx context.Context, key string) (string, error) {
				fmt.Println("charging", cents) // with key in the provider's Idempotency-Key header
				return "r-1", nil
			})
			if err != nil {
				return err
			}
			fmt.Println("attempt", l.Attempt, "receipt", receipt)
			if l.Attempt == 1 {
				return errors.New("the mail server is away")
			}
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0))
	// Output:
	// charging 1200
	// attempt 1 receipt r-1
	// attempt 2 receipt r-1
}

// A provider that cannot deduplicate did not answer. Nobody knows whether the fax was sent, so a person decides.
func ExampleQueue_Resolve() {
	ctx, pool, q, done := database()
	defer done()

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

	// Somebody looked: the fax is there.
	check(q.Resolve(ctx, pool, job.ID, "send", onceq.Applied("page 1 of 1")))
	check(w.Drain(ctx, 0))
	_, err = q.Get(ctx, pool, job.ID)
	fmt.Println("completed, and no history is kept:", errors.Is(err, onceq.ErrNotFound))
	// Output:
	// sending
	// held
	// completed, and no history is kept: true
}

// Work outside of jobs, such as that of a request, is done once for each key.
func ExampleDo() {
	ctx, _, q, done := database()
	defer done()

	for range 2 {
		invoice, err := onceq.Do(ctx, q, onceq.FenceSpec{Key: "invoice:7"}, func(ctx context.Context, c *onceq.FenceLease) (string, error) {
			fmt.Println("making the invoice")
			return "2026-0007", nil
		})
		check(err)
		fmt.Println(invoice)
	}
	// Output:
	// making the invoice
	// 2026-0007
	// 2026-0007
}

// A claim is made for all to see, and completed in the transaction that does the work.
func ExampleFence_Claim() {
	ctx, pool, q, done := database()
	defer done()

	fence, err := q.Fence(onceq.FenceSpec{Scope: "imports", Key: "2026-11-22.csv"})
	check(err)
	claim, err := fence.Claim(ctx, nil)
	check(err)

	_, err = fence.Claim(ctx, nil) // another process, meanwhile
	fmt.Println("in flight:", errors.Is(err, onceq.ErrInFlight))

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// insert the rows …
		return claim.Complete(ctx, tx, map[string]int{"rows": 3})
	}))

	later, err := fence.Claim(ctx, nil)
	check(err)
	fmt.Println("replayed:", later.Replayed, string(later.Result))
	// Output:
	// in flight: true
	// replayed: true {"rows": 3}
}

// What a handler returns decides how its job goes on.
func ExampleFatal() {
	ctx, pool, q, done := database()
	defer done()

	kind := onceq.Kind[string]{Name: "call", Queue: "calls"}
	for _, number := range []string{"no such number", "busy", "asleep"} {
		_, err := q.Enqueue(ctx, pool, kind.Job(number))
		check(err)
	}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		kind.Handle(func(ctx context.Context, l *onceq.Lease, number string) error {
			switch number {
			case "busy": // an attempt is spent, and this one says when the next one is due
				return onceq.RetryAfter(time.Hour, errors.New("busy"))
			case "asleep": // no attempt is spent
				return onceq.Snooze(8 * time.Hour)
			}
			return onceq.Fatal(errors.New("running it again would not help"))
		}))
	check(err)
	check(w.Drain(ctx, 0))

	jobs, err := q.List(ctx, pool, onceq.Filter{Queue: "calls"})
	check(err)
	for _, job := range jobs { // the newest first
		fmt.Println(string(job.Payload), job.State)
	}
	// Output:
	// "asleep" delayed
	// "busy" retrying
	// "no such number" dead
}

// A loop of one's own: claim, work, and complete in the transaction of the work.
func ExampleQueue_Claim() {
	ctx, pool, q, done := database()
	defer done()
	_, err := q.Enqueue(ctx, pool, onceq.Job{Kind: "resize", Payload: json.RawMessage(`"cat.png"`)})
	check(err)

	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 10, Lease: time.Minute})
	check(err)
	for _, lease := range leases {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			fmt.Println(lease.Kind, string(lease.Payload))
			return lease.Complete(ctx, tx) // an error when somebody else has the job by now: nothing commits
		})
		check(err)
	}
	// Output: resize "cat.png"
}

// A dead job runs again after the mistake was mended. It keeps its id, its key and the outcomes of its effects.
func ExampleQueue_Redrive() {
	ctx, pool, q, done := database()
	defer done()

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
	_, err = q.Redrive(ctx, pool, job.ID)
	check(err)
	check(w.Drain(ctx, 0))
	// Output:
	// dead template not found
	// sent weekly
}

// A job that nobody has started is cancelled at once. A running one is told.
func ExampleQueue_Cancel() {
	ctx, pool, q, done := database()
	defer done()

	job, err := q.Enqueue(ctx, pool, onceq.Job{Kind: "reminder", Delay: 24 * time.Hour})
	check(err)
	state, err := q.Cancel(ctx, pool, job.ID)
	check(err)
	fmt.Println(state)
	// Output: cancelled
}

// Who has this key, and how far is it?
func ExampleQueue_GetByKey() {
	ctx, pool, q, done := database()
	defer done()

	_, err := q.Enqueue(ctx, pool, onceq.Job{Kind: "charge", Scope: "tenant-3", Key: "order:7", Priority: onceq.PriorityHigh})
	check(err)
	info, err := q.GetByKey(ctx, pool, "tenant-3", "order:7")
	check(err)
	fmt.Println(info.Kind, info.State, info.Attempts)
	// Output: charge waiting 0
}

// How many jobs wait, and for how long the oldest.
func ExampleQueue_Stats() {
	ctx, pool, q, done := database()
	defer done()

	_, err := q.EnqueueMany(ctx, pool, []onceq.Job{{Kind: "a"}, {Kind: "b"}, {Kind: "c", Delay: time.Hour}})
	check(err)
	stats, err := q.Stats(ctx)
	check(err)
	for _, s := range stats {
		fmt.Println(s.Queue, s.Waiting, s.Delayed, s.Dead)
	}
	// Output: default 2 1 0
}

// A Reaper removes keys whose window is over, and history that was kept long enough. A service runs one with Run.
func ExampleReaper_RunOnce() {
	ctx, pool, q, done := database()
	defer done()

	job := onceq.Job{Kind: "ping", Key: "ping", Window: onceq.UntilFinished}
	_, err := q.Enqueue(ctx, pool, job)
	check(err)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	check(err)
	check(leases[0].Complete(ctx, nil))

	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{Grace: time.Millisecond}) // an hour by default
	check(err)
	removed := 0
	for removed == 0 {
		reaped, err := reaper.RunOnce(ctx)
		check(err)
		removed = reaped.Fences
	}
	fmt.Println("keys removed:", removed)
	// Output: keys removed: 1
}

// A function around a handler sees what goes in and what comes out.
func ExampleHandler_Wrap() {
	ctx, pool, q, done := database()
	defer done()

	kind := onceq.Kind[int]{Name: "double"}
	_, err := q.Enqueue(ctx, pool, kind.Job(21))
	check(err)
	handler := kind.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
		fmt.Println(2 * n)
		return nil
	}).Wrap(func(ctx context.Context, leases []*onceq.Lease, next func(context.Context) error) error {
		fmt.Println("before", leases[0].Kind)
		err := next(ctx)
		fmt.Println("after, failed:", onceq.IsFailure(err))
		return err
	})
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, handler)
	check(err)
	check(w.Drain(ctx, 0))
	// Output:
	// before double
	// 42
	// after, failed: false
}

// A hook hears what happens, for metrics and logs.
func ExampleHookFunc() {
	ctx, pool, _, done := database()
	defer done()

	q, err := onceq.New(pool, &onceq.Config{Hook: onceq.HookFunc(func(ctx context.Context, e onceq.Event) {
		fmt.Println(e.Type, e.Kind, e.Key)
	})})
	check(err)
	for range 2 {
		_, err := q.Enqueue(ctx, pool, onceq.Job{Kind: "ping", Key: "once"})
		check(err)
	}
	// Output:
	// enqueued ping once
	// duplicate ping once
}
