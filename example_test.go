package onceq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/exampletb"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// A job is enqueued in the transaction that stores the user. The client submits twice, and the job runs once.
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

// An Enqueue of the same key after the job has finished returns its result.
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

// A request that enqueues waits for its job for a while, and says 202 if the job takes longer.
func ExampleQueue_Wait() {
	ctx, pool, q, done := database()
	defer done()
	report := onceq.Kind[int]{Name: "report", Key: func(month int) string { return fmt.Sprintf("report:%d", month) }}

	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := q.Enqueue(r.Context(), pool, report.Job(11))
		check(err)
		limited, cancel := context.WithTimeout(r.Context(), 100*time.Millisecond)
		defer cancel()
		switch job, err := q.Wait(limited, report.Ref(11)); {
		case errors.Is(err, context.DeadlineExceeded):
			w.WriteHeader(http.StatusAccepted) // with a Location where the client asks again
			fmt.Fprint(w, "not yet")
		case err != nil || job.State != onceq.StateCompleted:
			w.WriteHeader(http.StatusInternalServerError)
		default:
			_, _ = w.Write(job.Result)
		}
	})
	ask := func() {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest("POST", "/reports/11", nil))
		fmt.Println(answer.Code, answer.Body)
	}
	ask()
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, report.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
		return l.SetResult("42 orders")
	}))
	check(err)
	check(w.Drain(ctx, 0))
	ask()
	// Output:
	// 202 not yet
	// 200 "42 orders"
}

// A thousand jobs are one statement. Either all are enqueued or none.
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

// The job travels in the same round trip as the application's own statements.
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

// What the handler writes through tx commits together with the job's completion, or not at all.
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

// Up to a hundred jobs share a transaction: one statement for their writes, and one for their completions.
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

// A handler waits until somebody has approved, for three days at most. Meanwhile nothing of it runs: its job is given back,
// and runs again from the beginning when the event comes.
func ExampleAwait() {
	ctx, pool, q, done := database()
	defer done()

	order := onceq.Kind[string]{Name: "order"}
	_, err := q.Enqueue(ctx, pool, order.Job("o-7"))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		order.Handle(func(ctx context.Context, l *onceq.Lease, id string) error {
			by, approved, err := onceq.Await[string](ctx, l, "approved", id, 72*time.Hour)
			if err != nil {
				fmt.Println(err)
				return err
			}
			fmt.Println("approved:", approved, "by", by)
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0))

	first, err := q.Emit(ctx, pool, "approved", "o-7", "Ada")
	check(err)
	fmt.Println("the first approval:", first)
	check(w.Drain(ctx, 0))
	// Output:
	// onceq: the job waits for event "o-7" in scope "approved"; return this error from the handler
	// the first approval: true
	// approved: true by Ada
}

// A handler sleeps between two steps. A worker has no slot for it meanwhile.
func ExampleSleep() {
	ctx, pool, q, done := database()
	defer done()

	report := onceq.Kind[string]{Name: "report"}
	_, err := q.Enqueue(ctx, pool, report.Job("may"))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		report.Handle(func(ctx context.Context, l *onceq.Lease, month string) error {
			_, err := onceq.Once(ctx, l, "order", func(ctx context.Context, key string) (any, error) {
				fmt.Println("ordering the report of", month)
				return nil, nil
			})
			if err != nil {
				return err
			}
			if err := onceq.Sleep(ctx, l, "until it is ready", 10*time.Millisecond); err != nil { // hours, in a service
				return err
			}
			fmt.Println("fetching it")
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0))
	time.Sleep(20 * time.Millisecond)
	check(w.Drain(ctx, 0))
	// Output:
	// ordering the report of may
	// fetching it
}

// Work outside jobs, such as that of a request, is done once for each key.
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

// A claim commits at once, so that everybody sees it. The transaction that does the work completes it.
func ExampleFence_Claim() {
	ctx, pool, q, done := database()
	defer done()

	fence, err := q.Fence(onceq.FenceSpec{Scope: "imports", Key: "2026-11-22.csv"})
	check(err)
	claim, err := fence.Claim(ctx, nil)
	check(err)

	_, err = fence.Claim(ctx, nil) // another process tries in the meantime
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

// What a handler returns decides what happens to its job.
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
			case "busy": // spends an attempt, and says when the next one is due
				return onceq.RetryAfter(time.Hour, errors.New("busy"))
			case "asleep": // spends no attempt
				return onceq.Snooze(8 * time.Hour)
			}
			return onceq.Fatal(errors.New("running it again would not help"))
		}))
	check(err)
	check(w.Drain(ctx, 0))

	jobs, err := onceqops.New(q).List(ctx, pool, onceqops.Filter{Queue: "calls"})
	check(err)
	for _, job := range jobs { // the newest first
		fmt.Println(string(job.Payload), job.State)
	}
	// Output:
	// "asleep" delayed
	// "busy" retrying
	// "no such number" dead
}

// A loop of your own: claim, work, and complete in the transaction that does the work.
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
			return lease.Complete(ctx, tx) // an error if somebody else holds the job by now: nothing commits
		})
		check(err)
	}
	// Output: resize "cat.png"
}

// A job that nobody has started is cancelled at once. A running job is asked to end.
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

// Which job has this key, and what is its state?
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

// A function around a handler sees the jobs before it and the error after it.
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

// A hook is told what happens, for metrics and logs.
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

// A process makes its Queue once. Check says at the start whether the tables are there.
func ExampleNew() {
	ctx, pool, _, done := database() // pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	defer done()

	q, err := onceq.New(pool, &onceq.Config{Schema: "billing"})
	check(err)
	var schema *onceq.SchemaError
	if err := q.Check(ctx); errors.As(err, &schema) {
		fmt.Println(schema.Schema, "has no tables:", schema.Found == 0) // migrations.Up makes them
	}
	// Output: billing has no tables: true
}

// This job does the same work as others of its kind, but differs in when and how it runs.
func ExampleKind_Job() {
	ctx, pool, q, done := database()
	defer done()

	type Reminder struct{ Invoice int }
	reminder := onceq.Kind[Reminder]{
		Name: "reminder",
		Key:  func(r Reminder) string { return fmt.Sprintf("reminder:%d", r.Invoice) },
	}
	job := reminder.Job(Reminder{Invoice: 7})
	job.Delay = 14 * 24 * time.Hour
	job.Priority = onceq.PriorityLow
	job.Window = onceq.Forever // no second reminder of this invoice, ever
	res, err := q.Enqueue(ctx, pool, job)
	check(err)
	fmt.Println(job.Key, res.State)
	// Output: reminder:7 delayed
}

// A handler that returns nil completes its job. After an error the job runs again.
func ExampleKind_Handle() {
	ctx, pool, q, done := database()
	defer done()

	type Thumbnail struct {
		File  string
		Width int
	}
	thumbnail := onceq.Kind[Thumbnail]{
		Name:    "thumbnail",
		Timeout: 10 * time.Second, // of one attempt
		Backoff: func(attempt int, err error) time.Duration { return 0 },
	}
	_, err := q.Enqueue(ctx, pool, thumbnail.Job(Thumbnail{"cat.png", 64}))
	check(err)

	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		thumbnail.Handle(func(ctx context.Context, l *onceq.Lease, t Thumbnail) error {
			if l.Attempt == 1 {
				return errors.New("the storage is away")
			}
			fmt.Println(t.File, t.Width, "in attempt", l.Attempt)
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0))
	// Output: cat.png 64 in attempt 2
}

// A job that must have a key is refused without one.
func ExampleQueue_EnqueueUnique() {
	ctx, pool, q, done := database()
	defer done()

	for _, event := range []string{"evt_1", "evt_1", ""} {
		res, err := q.EnqueueUnique(ctx, pool, onceq.Job{Kind: "webhook", Key: event})
		fmt.Println(res.Duplicate, err)
	}
	// Output:
	// false <nil>
	// true <nil>
	// false onceq: Key is empty, and each job of kind "webhook" has one (Kind.Key, EnqueueUnique)
}

// With Strict, a key that is taken is an error that says which job has it.
func ExampleDuplicateError() {
	ctx, pool, q, done := database()
	defer done()

	job := onceq.Job{Kind: "order", Key: "order:7", Strict: true}
	for range 2 {
		_, err := q.Enqueue(ctx, pool, job)
		var duplicate *onceq.DuplicateError
		if errors.As(err, &duplicate) {
			fmt.Println("409 Conflict:", duplicate.Key, "is", duplicate.Existing.State)
			continue
		}
		check(err)
		fmt.Println("202 Accepted")
	}
	// Output:
	// 202 Accepted
	// 409 Conflict: order:7 is waiting
}

// The same key for other work is refused. The error names the members that differ.
func ExampleMismatchError() {
	ctx, pool, q, done := database()
	defer done()

	job := onceq.Job{Kind: "charge", Key: "order:7", Payload: map[string]any{"cents": 1200, "currency": "EUR"}}
	_, err := q.Enqueue(ctx, pool, job)
	check(err)

	job.Payload = map[string]any{"cents": 9900, "currency": "EUR"}
	_, err = q.Enqueue(ctx, pool, job)
	var mismatch *onceq.MismatchError
	if errors.As(err, &mismatch) {
		fmt.Println(mismatch.Key, "differs in", mismatch.Differ)
	}
	// Output: order:7 differs in [$.cents]
}

// BeforeEnqueue adds something to every job. Here it is the tenant of the request, which the handler reads again.
func ExampleConfig_beforeEnqueue() {
	ctx, pool, _, done := database()
	defer done()

	type tenant struct{}
	q, err := onceq.New(pool, &onceq.Config{
		BeforeEnqueue: func(ctx context.Context, jobs []onceq.Job) (context.Context, func(error)) {
			if name, ok := ctx.Value(tenant{}).(string); ok {
				for i := range jobs {
					jobs[i].Metadata = map[string]string{"tenant": name}
				}
			}
			return ctx, func(error) {}
		},
	})
	check(err)
	export := onceq.Kind[string]{Name: "export"}
	_, err = q.Enqueue(context.WithValue(ctx, tenant{}, "acme"), pool, export.Job("invoices"))
	check(err)

	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		export.Handle(func(ctx context.Context, l *onceq.Lease, what string) error {
			fmt.Println(what, "of", l.Metadata["tenant"])
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0))
	// Output: invoices of acme
}

// A service runs a worker until it is told to stop.
func ExampleWorker_Run() {
	ctx, pool, q, done := database()
	defer done()
	ctx, stop := context.WithCancel(ctx) // signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()

	mail := onceq.Kind[string]{Name: "mail", Queue: "mails"}
	_, err := q.Enqueue(ctx, pool, mail.Job("ada@example.com"))
	check(err)

	w, err := onceq.NewWorker(q, onceq.WorkerConfig{
		Queues: map[string]onceq.QueueConfig{"mails": {Concurrency: 20}},
	}, mail.Handle(func(ctx context.Context, l *onceq.Lease, to string) error {
		fmt.Println("mail to", to)
		stop() // this example has one job
		return nil
	}))
	check(err)
	fmt.Println(w.Run(ctx)) // by now running handlers have ended, or have given their jobs back
	// Output:
	// mail to ada@example.com
	// <nil>
}

// Drain works until nothing is due, or until it has run a number of jobs. It is for a program that cron starts.
func ExampleWorker_Drain() {
	ctx, pool, q, done := database()
	defer done()

	report := onceq.Kind[int]{Name: "report"}
	_, err := q.EnqueueMany(ctx, pool, []onceq.Job{report.Job(1), report.Job(2), report.Job(3)})
	check(err)
	ran := make(chan int, 3)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		report.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
			ran <- n
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 2))
	fmt.Println(len(ran))
	check(w.Drain(ctx, 0))
	fmt.Println(len(ran))
	// Output:
	// 2
	// 3
}

// A provider that deduplicates gets the same key again and gives its first answer again. RunAgain is the default, for 24
// hours; this provider remembers its keys for an hour.
func ExampleRunAgain() {
	ctx, pool, q, done := database()
	defer done()

	provider := map[string]string{} // receipts by key
	charge := onceq.Kind[int]{Name: "charge", Backoff: func(int, error) time.Duration { return 0 }}
	_, err := q.Enqueue(ctx, pool, charge.Job(1200))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		charge.Handle(func(ctx context.Context, l *onceq.Lease, cents int) error {
			receipt, err := onceq.Once(ctx, l, "card", func(ctx context.Context, key string) (string, error) {
				if _, known := provider[key]; !known {
					provider[key] = fmt.Sprintf("r-%d", len(provider)+1)
				}
				if l.Attempt == 1 {
					return "", errors.New("time-out") // after the charge
				}
				return provider[key], nil
			}, onceq.OnUncertain(onceq.RunAgain(50*time.Minute)))
			fmt.Println("receipt:", receipt, "uncertain:", errors.Is(err, onceq.ErrUncertain))
			return err
		}))
	check(err)
	check(w.Drain(ctx, 0))
	fmt.Println("charges:", len(provider))
	// Output:
	// receipt:  uncertain: true
	// receipt: r-1 uncertain: false
	// charges: 1
}

// A provider that does not deduplicate can often be asked whether it did something.
func ExampleAsk() {
	ctx, db, done := testDatabase()
	defer done()

	outbox := map[string]int{} // what the provider has sent, by our reference
	letter := onceq.Kind[string]{Name: "letter"}
	_, err := db.Queue.Enqueue(ctx, db.Pool, letter.Job("dear Ada"))
	check(err)
	handler := letter.Handle(func(ctx context.Context, l *onceq.Lease, text string) error {
		reference := fmt.Sprintf("letter-%d", l.ID)
		ask := func(ctx context.Context, key string) (result any, applied bool, err error) {
			fmt.Println("asking")
			return "sent before", outbox[reference] > 0, nil
		}
		answer, err := onceq.Once(ctx, l, "send", func(ctx context.Context, key string) (string, error) {
			fmt.Println("sending")
			outbox[reference]++
			return "", errors.New("time-out")
		}, onceq.OnUncertain(onceq.Ask(ask)))
		if err == nil {
			fmt.Println(answer)
		}
		return err
	})

	fmt.Println(db.RunOne(handler).State)
	db.Advance(time.Minute) // Ask waits while the first request may still be under way
	fmt.Println(db.RunOne(handler).State)
	fmt.Println("letters:", len(outbox))
	// Output:
	// sending
	// retrying
	// asking
	// sent before
	// completed
	// letters: 1
}

// This provider can neither deduplicate nor be asked. The job is held, and a person decides: see [Ops.Resolve].
func ExampleHold() {
	ctx, pool, q, done := database()
	defer done()

	fax := onceq.Kind[string]{Name: "fax", Backoff: func(int, error) time.Duration { return 0 }}
	job, err := q.Enqueue(ctx, pool, fax.Job("555-0100"))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		fax.Handle(func(ctx context.Context, l *onceq.Lease, number string) error {
			_, err := onceq.Once(ctx, l, "send", func(ctx context.Context, key string) (bool, error) {
				return false, errors.New("the line went dead")
			}, onceq.OnUncertain(onceq.Hold()))
			fmt.Println("attempt", l.Attempt, "held:", errors.Is(err, onceq.ErrHeld))
			return err
		}))
	check(err)
	check(w.Drain(ctx, 0))

	effects, err := onceqops.New(q).Effects(ctx, pool, job.ID)
	check(err)
	fmt.Println(effects[0].Name, effects[0].State)
	// Output:
	// attempt 1 held: false
	// attempt 2 held: true
	// send held
}

// If it is certain that the effect did not happen, it may run again, whatever the policy is.
func ExampleNotApplied() {
	ctx, pool, q, done := database()
	defer done()

	fax := onceq.Kind[string]{Name: "fax", Backoff: func(int, error) time.Duration { return 0 }}
	_, err := q.Enqueue(ctx, pool, fax.Job("555-0100"))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		fax.Handle(func(ctx context.Context, l *onceq.Lease, number string) error {
			pages, err := onceq.Once(ctx, l, "send", func(ctx context.Context, key string) (int, error) {
				if l.Attempt == 1 {
					return 0, onceq.NotApplied(errors.New("busy")) // nobody answered
				}
				return 2, nil
			}, onceq.OnUncertain(onceq.Hold()))
			if err == nil {
				fmt.Println("sent", pages, "pages in attempt", l.Attempt)
			}
			return err
		}))
	check(err)
	check(w.Drain(ctx, 0))
	// Output: sent 2 pages in attempt 2
}

// It is too early, so the job runs again later and spends no attempt.
func ExampleSnooze() {
	ctx, db, done := testDatabase()
	defer done()

	ready := false
	render := onceq.Kind[string]{Name: "render"}
	_, err := db.Queue.Enqueue(ctx, db.Pool, render.Job("film"))
	check(err)
	handler := render.Handle(func(ctx context.Context, l *onceq.Lease, what string) error {
		fmt.Println("attempt", l.Attempt, "ready:", ready)
		if !ready {
			return onceq.Snooze(time.Minute)
		}
		return nil
	})
	fmt.Println(db.RunOne(handler).State)
	db.Advance(time.Minute)
	ready = true
	fmt.Println(db.RunOne(handler).State)
	// Output:
	// attempt 1 ready: false
	// delayed
	// attempt 1 ready: true
	// completed
}

// A job that repeats itself: each run commits what it wrote and has effects of its own.
func ExampleReschedule() {
	ctx, db, done := testDatabase()
	defer done()

	rollup := onceq.Kind[struct{}]{Name: "rollup", Key: func(struct{}) string { return "rollup" }}
	_, err := db.Queue.Enqueue(ctx, db.Pool, rollup.Job(struct{}{})) // every process may do this when it starts
	check(err)
	handler := rollup.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ struct{}) error {
		fmt.Println("rolling up")
		return onceq.Reschedule(time.Hour)
	})
	for range 2 {
		fmt.Println(db.RunOne(handler).State)
		db.Advance(time.Hour)
	}
	// Output:
	// rolling up
	// delayed
	// rolling up
	// delayed
}

// The provider says when to try again. An attempt is spent.
func ExampleRetryAfter() {
	ctx, db, done := testDatabase()
	defer done()

	call := onceq.Kind[string]{Name: "call"}
	_, err := db.Queue.Enqueue(ctx, db.Pool, call.Job("api"))
	check(err)
	handler := call.Handle(func(ctx context.Context, l *onceq.Lease, what string) error {
		if l.Attempt == 1 {
			return onceq.RetryAfter(30*time.Second, errors.New("429 Too Many Requests"))
		}
		fmt.Println("attempt", l.Attempt)
		return nil
	})
	fmt.Println(db.RunOne(handler).State)
	db.Advance(30 * time.Second)
	fmt.Println(db.RunOne(handler).State)
	// Output:
	// retrying
	// attempt 2
	// completed
}

// A log line or an error report finds the job that its context belongs to.
func ExampleLeaseFromContext() {
	ctx, pool, q, done := database()
	defer done()

	logf := func(ctx context.Context, text string) { // somewhere deep inside the handler
		if l := onceq.LeaseFromContext(ctx); l != nil {
			text += fmt.Sprintf(" kind=%s attempt=%d", l.Kind, l.Attempt)
		}
		fmt.Println(text)
	}
	kind := onceq.Kind[string]{Name: "resize"}
	_, err := q.Enqueue(ctx, pool, kind.Job("cat.png"))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		kind.Handle(func(ctx context.Context, l *onceq.Lease, file string) error {
			logf(ctx, "resizing "+file)
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0))
	logf(ctx, "the end")
	// Output:
	// resizing cat.png kind=resize attempt=1
	// the end
}

// A provider's client finds the key of the effect that called it.
func ExampleFenceLeaseFromContext() {
	ctx, _, q, done := database()
	defer done()

	post := func(ctx context.Context) { // the application's client for the provider
		if c := onceq.FenceLeaseFromContext(ctx); c != nil {
			fmt.Println("with a key of", len(c.IdempotencyKey()), "bytes") // header.Set("Idempotency-Key", …)
		}
	}
	_, err := onceq.Do(ctx, q, onceq.FenceSpec{Key: "invoice:7"}, func(ctx context.Context, _ *onceq.FenceLease) (bool, error) {
		post(ctx)
		return true, nil
	})
	check(err)
	// Output: with a key of 43 bytes
}

// This handler does the slow part first. Then it opens a transaction of its own and completes its job in it.
func ExampleLease_Complete() {
	ctx, pool, q, done := database()
	defer done()
	_, err := pool.Exec(ctx, `create table thumbnails (file text)`)
	check(err)

	resize := onceq.Kind[string]{Name: "resize"}
	_, err = q.Enqueue(ctx, pool, resize.Job("cat.png"))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		resize.Handle(func(ctx context.Context, l *onceq.Lease, file string) error {
			small := "small-" + file // slow, and holds no connection
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, `insert into thumbnails values ($1)`, small); err != nil {
					return err
				}
				return l.Complete(ctx, tx) // an error if somebody else holds the job by now: nothing commits
			})
		}))
	check(err)
	check(w.Drain(ctx, 0))

	var file string
	check(pool.QueryRow(ctx, `select file from thumbnails`).Scan(&file))
	fmt.Println(file)
	// Output: small-cat.png
}

// The completion travels with the application's own statements. If the lease is lost, the commit behind it does not happen.
func ExampleLease_CompleteInBatch() {
	ctx, pool, q, done := database()
	defer done()
	_, err := pool.Exec(ctx, `create table thumbnails (file text)`)
	check(err)
	_, err = q.Enqueue(ctx, pool, onceq.Job{Kind: "resize"})
	check(err)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	check(err)
	lease := leases[0]

	for range 2 { // the second time is a repetition of the first
		batch := &pgx.Batch{}
		batch.Queue(`begin`)
		batch.Queue(`insert into thumbnails values ('cat.png')`)
		check(lease.CompleteInBatch(batch))
		batch.Queue(`commit`)
		err := pool.SendBatch(ctx, batch).Close()
		fmt.Println("lease lost:", onceq.LeaseLost(err))
	}
	var n int
	check(pool.QueryRow(ctx, `select count(*) from thumbnails`).Scan(&n))
	fmt.Println("thumbnails:", n)
	// Output:
	// lease lost: false
	// lease lost: true
	// thumbnails: 1
}

// A loop of your own passes to Fail the error that a handler would return.
func ExampleLease_Fail() {
	ctx, pool, q, done := database()
	defer done()
	job, err := q.Enqueue(ctx, pool, onceq.Job{Kind: "parse", Payload: "{"})
	check(err)

	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	check(err)
	for _, lease := range leases {
		check(lease.Fail(ctx, onceq.Fatal(errors.New("not an invoice"))))
	}
	info, err := q.Get(ctx, pool, job.ID)
	check(err)
	fmt.Println(info.State, info.Errors[0].Error)
	// Output: dead not an invoice
}

// The key for a provider is the same for each delivery of a job: it does not contain the attempt.
func ExampleLease_IdempotencyKey() {
	ctx, pool, q, done := database()
	defer done()

	kind := onceq.Kind[string]{Name: "pay", Backoff: func(int, error) time.Duration { return 0 }}
	_, err := q.Enqueue(ctx, pool, kind.Job("rent"))
	check(err)
	keys := map[string]bool{}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		kind.Handle(func(ctx context.Context, l *onceq.Lease, what string) error {
			keys[l.IdempotencyKey("transfer")] = true
			if l.Attempt < 3 {
				return errors.New("again")
			}
			return nil
		}))
	check(err)
	check(w.Drain(ctx, 0))
	fmt.Println(len(keys))
	// Output: 1
}

// Above READ COMMITTED, lock the job first. Otherwise a beat may change the job's row after the transaction took its
// snapshot.
func ExampleLease_Lock() {
	ctx, pool, q, done := database()
	defer done()

	balance := onceq.Kind[string]{Name: "balance"}
	_, err := q.Enqueue(ctx, pool, balance.Job("ada"))
	check(err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
		balance.Handle(func(ctx context.Context, l *onceq.Lease, account string) error {
			return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
				if err := l.Lock(ctx, tx); err != nil {
					return err
				}
				fmt.Println("adding up", account) // takes longer than a third of the lease
				return l.Complete(ctx, tx)
			})
		}))
	check(err)
	check(w.Drain(ctx, 0))
	// Output: adding up ada
}

// Above READ COMMITTED, Postgres may ask that a transaction is run again.
func ExampleIsRetryable() {
	ctx, pool, q, done := database()
	defer done()

	enqueue := func() error {
		return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
			_, err := q.Enqueue(ctx, tx, onceq.Job{Kind: "charge", Key: "order:7"})
			return err
		})
	}
	err := enqueue()
	for tries := 1; onceq.IsRetryable(err) && tries < 10; tries++ {
		err = enqueue()
	}
	fmt.Println(err)
	// Output: <nil>
}

// For code that logs or traces around handlers: which of a handler's errors are failures?
func ExampleIsFailure() {
	away := errors.New("the provider is away")
	for _, err := range []error{nil, onceq.Snooze(time.Minute), onceq.Reschedule(time.Hour), away, onceq.RetryAfter(time.Minute, away), onceq.Fatal(away)} {
		fmt.Print(onceq.IsFailure(err), " ")
	}
	// Output: false false false true true true
}

// A request that comes while the work is under way is told when to ask again.
func ExampleInFlightError() {
	ctx, _, q, done := database()
	defer done()

	report := onceq.FenceSpec{Scope: "reports", Key: "2026-05"}
	ask := func(fn func(context.Context, *onceq.FenceLease) (string, error)) {
		answer, err := onceq.Do(ctx, q, report, fn)
		var inFlight *onceq.InFlightError
		if errors.As(err, &inFlight) {
			fmt.Println("202 Accepted, Retry-After is there:", inFlight.RetryAfter > 0)
			return
		}
		check(err)
		fmt.Println("200 OK:", answer)
	}
	write := func(context.Context, *onceq.FenceLease) (string, error) { return "2026-05.pdf", nil }
	ask(func(ctx context.Context, c *onceq.FenceLease) (string, error) {
		ask(write) // another request, in the meantime
		return write(ctx, c)
	})
	// Output:
	// 202 Accepted, Retry-After is there: true
	// 200 OK: 2026-05.pdf
}

// Nothing was done, so the key is free at once, for others too.
func ExampleFenceLease_Release() {
	ctx, _, q, done := database()
	defer done()

	fence, err := q.Fence(onceq.FenceSpec{Scope: "imports", Key: "2026-11-22.csv"})
	check(err)
	claim, err := fence.Claim(ctx, nil)
	check(err)
	check(claim.Release(ctx, nil)) // the file has not arrived yet

	again, err := fence.Claim(ctx, nil)
	check(err)
	fmt.Println("the token has grown:", again.Token > claim.Token)
	check(again.Complete(ctx, nil, "done"))
	// Output: the token has grown: true
}

// Nobody knows whether the payment was made. A person finds out and resolves it; the next caller gets that answer.
func ExampleFence_Resolve() {
	ctx, _, q, done := database()
	defer done()

	spec := onceq.FenceSpec{Scope: "payments", Key: "order:7", Policy: onceq.Hold()}
	pay := func(ctx context.Context, c *onceq.FenceLease) (string, error) {
		return "", errors.New("no answer from the bank")
	}
	_, err := onceq.Do(ctx, q, spec, pay)
	fmt.Println("uncertain:", errors.Is(err, onceq.ErrUncertain))
	_, err = onceq.Do(ctx, q, spec, pay)
	fmt.Println("held:", errors.Is(err, onceq.ErrHeld))

	fence, err := q.Fence(spec)
	check(err)
	check(fence.Resolve(ctx, nil, onceq.Applied("transfer 4711")))
	fmt.Println(onceq.Do(ctx, q, spec, pay))
	// Output:
	// uncertain: true
	// held: true
	// transfer 4711 <nil>
}

// What is known of a job: its state, how often it has failed, and why.
func ExampleQueue_Get() {
	ctx, pool, q, done := database()
	defer done()

	job, err := q.Enqueue(ctx, pool, onceq.Job{Kind: "resize", Payload: map[string]string{"file": "cat.png"}})
	check(err)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	check(err)
	check(leases[0].Fail(ctx, errors.New("out of memory")))

	info, err := q.Get(ctx, pool, job.ID)
	check(err)
	fmt.Println(info.Kind, string(info.Payload), info.State)
	fmt.Println("attempts:", info.Attempts, "of", info.MaxAttempts, "latest error:", info.Errors[0].Error)
	// Output:
	// resize {"file": "cat.png"} retrying
	// attempts: 1 of 25 latest error: out of memory
}

// A restored copy of a database gets an identity of its own before its first worker starts. Then no provider takes its
// calls for production's.
func ExampleQueue_NewInstallation() {
	ctx, db, done := testDatabase()
	defer done()
	owner, err := pgxpool.New(ctx, db.URL) // the role that ran the migrations
	check(err)
	defer owner.Close()
	q, err := onceq.New(owner, &onceq.Config{Schema: db.Schema})
	check(err)

	held, err := q.NewInstallation(ctx)
	fmt.Println("work of unknown outcome that is held:", held, err)
	// Cancel the jobs that only production should do.
	cancelled, _, err := onceqops.New(q).CancelMany(ctx, owner, onceqops.Filter{Queue: "mails"})
	fmt.Println("cancelled:", cancelled, err)
	// Output:
	// work of unknown outcome that is held: 0 <nil>
	// cancelled: 0 <nil>
}

// A service runs a Reaper beside its workers.
func ExampleReaper_Run() {
	ctx, _, q, done := database()
	defer done()
	ctx, stop := context.WithTimeout(ctx, 10*time.Millisecond) // signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()

	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{})
	check(err)
	fmt.Println(reaper.Run(ctx))
	// Output: <nil>
}

// database gives an example a database of its own with onceq's tables. A program makes its own pool with pgxpool.New
// and its queue with onceq.New(pool, nil); its tables come from the package migrations.
func database() (ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue, done func()) {
	ctx, db, done := testDatabase()
	return ctx, db.Pool, db.Queue, done
}

// check keeps the examples short. A program returns its errors.
func check(err error) {
	if err != nil {
		panic(err)
	}
}

// testDatabase is database for examples that let time pass, as a test does.
func testDatabase() (context.Context, *queuetest.DB, func()) {
	t := exampletb.New()
	return t.Context(), queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)})), t.Done
}
