// Group scans ten thousand pages side by side, and writes one report when the last page is done. Some pages cannot be read.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type page struct {
	Book string `json:"book"`
	N    int    `json:"n"`
}

const pages = 10_000

var (
	open = onceq.Kind[string]{Name: "open"}
	scan = onceq.Kind[page]{Name: "scan", Key: func(p page) string { return fmt.Sprint(p.Book, ":", p.N) }}
	bind = onceq.Kind[string]{Name: "bind", Key: func(book string) string { return book }}
)

var errTorn = errors.New("the page is torn")

var handlers = []onceq.Handler{
	// This job knows how many pages there are. It adds them to its own group with its completion, so "bind" waits for them too.
	open.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, book string) error {
		jobs := make([]onceq.Job, pages)
		for n := range jobs {
			jobs[n] = scan.Job(page{book, n})
		}
		_, err := l.AddMembers(ctx, tx, jobs...)
		return err
	}),
	scan.HandleBatch(100, func(_ context.Context, _ pgx.Tx, items []onceq.Item[page]) error {
		for _, i := range items {
			if i.Payload.N%2500 == 7 {
				return onceq.Fatal(errTorn) // of a batch each job then runs by itself, and only this one is dead
			}
			if err := i.SetResult(i.Payload.N % 10); err != nil { // the words on the page
				return err
			}
		}
		return nil
	}),
	bind.Handle(func(ctx context.Context, l *onceq.Lease, book string) error {
		var bound, torn, words int
		for m, err := range l.Members(ctx) {
			switch {
			case err != nil:
				return err
			case m.State == onceq.StateDead:
				torn++
			case m.Result == nil: // the job that opened the book is a member too
			default:
				var n int
				if err := json.Unmarshal(m.Result, &n); err != nil {
					return err
				}
				bound++
				words += n
			}
		}
		fmt.Println(book, "has", bound, "pages with", words, "words;", torn, "are torn")
		return nil
	}),
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	then := bind.Job("Emma")
	then.IfDead = onceq.DeadRun // the default waits until somebody redrives or discards the dead ones
	group, err := q.EnqueueGroup(ctx, pool, []onceq.Job{open.Job("Emma")}, then)
	example.Check(err)
	example.Drain(ctx, q, handlers...)

	info, err := q.Group(ctx, pool, group.Then.ID)
	example.Check(err)
	fmt.Println(info.Total, "members:", info.Completed, "completed,", info.Dead, "dead")
}

// Output:
// Emma has 9996 pages with 44972 words; 4 are torn
// 10001 members: 9997 completed, 4 dead
