package queuetest_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/exampletb"
	"github.com/onceq/onceq/queuetest"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// A test has its own database, with onceq's tables, a queue and a pool.
func ExampleNew() {
	t := exampletb.New() // a test has its own: func TestWelcome(t *testing.T)
	defer t.Done()

	db := queuetest.New(t)
	res, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "welcome", Key: "welcome:42"})
	fmt.Println(res.State, err)
	// Output: waiting <nil>
}

// RequireEnqueued finds the job that the code under test has enqueued, also before its transaction commits.
func ExampleRequireEnqueued() {
	t := exampletb.New() // a test has its own: func TestSignUp(t *testing.T)
	defer t.Done()
	db := queuetest.New(t)

	type mail struct{ User int }
	welcome := onceq.Kind[mail]{Name: "welcome", Key: func(m mail) string { return fmt.Sprint("welcome:", m.User) }}
	signUp := func(ctx context.Context, tx pgx.Tx, user int) error { // the code under test
		_, err := db.Queue.Enqueue(ctx, tx, welcome.Job(mail{user}))
		return err
	}

	check(pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		err := signUp(t.Context(), tx, 42)
		job, m := queuetest.RequireEnqueued(db, tx, welcome, func(m mail) bool { return m.User == 42 })
		fmt.Println(job.Key, m)
		queuetest.RequireNotEnqueued(db, nil, welcome, nil) // outside, nothing is to be seen yet
		return err
	}))
	queuetest.RequireEnqueued(db, nil, welcome, nil)
	// Output: welcome:42 {42}
}

// Setup makes an application's own tables once, and each test begins with a copy of them.
func ExampleSetup() {
	t := exampletb.New() // a test has its own: func TestOrder(t *testing.T)
	defer t.Done()

	shop := queuetest.Setup("shop", queuetest.SQL(`create table orders (id int); insert into orders values (7)`))
	for range 2 { // two tests
		db := queuetest.New(t, shop)
		tag, err := db.Pool.Exec(t.Context(), `delete from orders`)
		fmt.Println(tag, err)
	}
	// Output:
	// DELETE 1 <nil>
	// DELETE 1 <nil>
}

// RunOne runs one job and says what became of it.
func ExampleDB_RunOne() {
	t := exampletb.New() // a test has its own: func TestWelcome(t *testing.T)
	defer t.Done()
	db := queuetest.New(t)

	welcome := onceq.Kind[string]{Name: "welcome"}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, welcome.Job("not an address"))
	check(err)
	ran := db.RunOne(welcome.Handle(func(ctx context.Context, l *onceq.Lease, to string) error {
		return onceq.Fatal(errors.New("no @ in it"))
	}))
	fmt.Println(ran.Kind, ran.State, ran.Err)
	// Output: welcome dead no @ in it
}

// Drain runs everything that is due, including what handlers enqueue.
func ExampleDB_Drain() {
	t := exampletb.New() // a test has its own: func TestOrder(t *testing.T)
	defer t.Done()
	db := queuetest.New(t)

	order := onceq.Kind[int]{Name: "order"}
	invoice := onceq.Kind[int]{Name: "invoice"}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, order.Job(7))
	check(err)
	ran := db.Drain(
		order.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, id int) error {
			_, err := db.Queue.Enqueue(ctx, tx, invoice.Job(id))
			return err
		}),
		invoice.Handle(func(ctx context.Context, l *onceq.Lease, id int) error { return nil }),
	)
	for _, r := range ran {
		fmt.Println(r.Kind, r.State)
	}
	// Output:
	// order completed
	// invoice completed
}

// Advance lets time pass in the database. Delays, backoffs and windows end, and the test does not wait.
func ExampleDB_Advance() {
	t := exampletb.New() // a test has its own: func TestReminder(t *testing.T)
	defer t.Done()
	db := queuetest.New(t)

	reminder := onceq.Kind[string]{Name: "reminder"}
	job := reminder.Job("invoice 7")
	job.Delay = 14 * 24 * time.Hour
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
	check(err)
	handler := reminder.Handle(func(ctx context.Context, l *onceq.Lease, what string) error { return nil })

	fmt.Println("runs today:", len(db.Drain(handler)))
	db.Advance(14 * 24 * time.Hour)
	fmt.Println("runs in two weeks:", len(db.Drain(handler)))
	// Output:
	// runs today: 0
	// runs in two weeks: 1
}

// DeliverTwice runs a job as if its first worker had been taken for dead. What the handler did outside its lease stays,
// and the second run must cope with it.
func ExampleDB_DeliverTwice() {
	t := exampletb.New() // a test has its own: func TestWelcome(t *testing.T)
	defer t.Done()
	db := queuetest.New(t)

	sent := 0
	welcome := onceq.Kind[string]{Name: "welcome"}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, welcome.Job("ada@example.com"))
	check(err)
	first, second := db.DeliverTwice(welcome.Handle(func(ctx context.Context, l *onceq.Lease, to string) error {
		sent++ // no onceq.Once around it
		return nil
	}))
	fmt.Println("the first run's outcome was refused:", first.Lost())
	fmt.Println("the second one's:", second.State)
	fmt.Println("mails:", sent)
	// Output:
	// the first run's outcome was refused: true
	// the second one's: completed
	// mails: 2
}

// Prove runs the handler under every fault that can be placed between two of its steps, and checks that the customer is
// charged once.
func ExampleProve() {
	t := exampletb.New() // a test has its own: func TestCharge(t *testing.T)
	defer t.Done()

	charge := onceq.Kind[int]{Name: "charge"}
	queuetest.Prove(t, queuetest.Proof{
		Setup: queuetest.SQL(`create table charges (cents int)`),
		Job:   func() onceq.Job { return charge.Job(4200) },
		Handler: func(p *queuetest.Process) onceq.Handler {
			return charge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, cents int) error {
				_, err := onceq.Once(ctx, l, "card", func(ctx context.Context, key string) (bool, error) {
					req, err := http.NewRequestWithContext(ctx, "POST", "https://pay.example/charges", strings.NewReader(fmt.Sprint(cents)))
					if err != nil {
						return false, onceq.NotApplied(err)
					}
					req.Header.Set("Idempotency-Key", key)
					resp, err := p.Client.Do(req)
					if err != nil {
						return false, err
					}
					defer resp.Body.Close() //nolint:errcheck // nothing to do about it
					if resp.StatusCode >= 300 {
						return false, errors.New(resp.Status)
					}
					return true, nil
				})
				if err != nil {
					return err
				}
				_, err = tx.Exec(ctx, `insert into charges values ($1)`, cents)
				return err
			})
		},
		Check: func(o *queuetest.Outcome) {
			if charges, rows := len(o.Effects), o.Count(`select count(*) from charges`); charges != 1 || rows != 1 {
				o.Errorf("%d charges at the provider, %d rows", charges, rows)
			}
		},
	})
	fmt.Println("charged once, whatever goes wrong")
	// Output: charged once, whatever goes wrong
}
