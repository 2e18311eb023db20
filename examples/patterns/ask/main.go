// Ask is for providers that take no key. After a time-out nobody knows whether a message was sent. One provider can be
// asked; for the other one a person decides.
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
	"github.com/onceq/onceq/onceqops"
)

var (
	mail = onceq.Kind[string]{Name: "mail", Backoff: func(int, error) time.Duration { return 0 }}
	fax  = onceq.Kind[string]{Name: "fax", Backoff: func(int, error) time.Duration { return 0 }}
)

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	sent := map[string]int{}
	send := func(to string) (bool, error) {
		sent[to]++
		return false, errors.New("time-out") // after it was sent
	}
	_, err := q.Enqueue(ctx, pool, mail.Job("ada"))
	example.Check(err)
	held, err := q.Enqueue(ctx, pool, fax.Job("bob"))
	example.Check(err)

	mailer := mail.Handle(func(ctx context.Context, l *onceq.Lease, to string) error {
		asked := onceq.OnUncertain(onceq.Ask(func(ctx context.Context, key string) (any, bool, error) {
			return true, sent[to] > 0, nil // from its list of sent messages
		}))
		// Ask waits until ten seconds after this, because a slow call may still be under way.
		soon := onceq.EffectTimeout(100 * time.Millisecond)
		ok, err := onceq.Once(ctx, l, "send", func(context.Context, string) (bool, error) { return send(to) }, asked, soon)
		if err == nil {
			fmt.Println("mail to", to, "was sent:", ok)
			stop()
		}
		return err
	})
	faxes := fax.Handle(func(ctx context.Context, l *onceq.Lease, to string) error {
		ok, err := onceq.Once(ctx, l, "send", func(context.Context, string) (bool, error) { return send(to) }, onceq.OnUncertain(onceq.Hold()))
		if err == nil {
			fmt.Println("fax to", to, "was sent:", ok)
		}
		return err
	})
	example.Drain(ctx, q, faxes)
	info, err := q.Get(ctx, pool, held.ID)
	example.Check(err)
	fmt.Println("fax:", info.State)

	// Somebody has looked at the machine's journal.
	example.Check(onceqops.New(q).Resolve(ctx, pool, held.ID, "send", onceq.Applied(true)))
	example.Drain(ctx, q, faxes)

	example.Work(ctx, q, mailer)
	fmt.Println("sent:", sent)
}

// Output:
// fax: held
// fax to bob was sent: true
// mail to ada was sent: true
// sent: map[ada:1 bob:1]
