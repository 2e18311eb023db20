// Lane books payments: one at a time for each account, in their order, and any number of accounts at once.
package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type payment struct{ Account, Cents int }

var book = onceq.Kind[payment]{
	Name:    "book",
	Lane:    func(p payment) string { return fmt.Sprint("account-", p.Account) },
	Backoff: func(int, error) time.Duration { return 20 * time.Millisecond }, // seconds, in a real service
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	const accounts, each = 3, 5
	for n := range accounts * each {
		_, err := q.Enqueue(ctx, pool, book.Job(payment{Account: n % accounts, Cents: 100 + n/accounts}))
		example.Check(err)
	}

	l := &ledger{booked: map[int][]int{}, at: map[int]bool{}}
	var processes sync.WaitGroup
	for range 3 {
		processes.Go(func() {
			example.Work(ctx, q, book.Handle(func(ctx context.Context, lease *onceq.Lease, p payment) error {
				if lease.Attempt == 1 && p.Cents == 102 {
					return errors.New("the bank does not answer") // the account's other payments wait for this one
				}
				if l.book(p) == accounts*each {
					stop()
				}
				return nil
			}))
		})
	}
	processes.Wait()
	for account := range accounts {
		fmt.Println("account", account, "booked", l.booked[account], "in order:", slices.IsSorted(l.booked[account]))
	}
	fmt.Println("two at once for one account:", l.overlap)
}

// ledger notices when two payments of one account are booked at once.
type ledger struct {
	mu      sync.Mutex
	booked  map[int][]int
	at      map[int]bool
	n       int
	overlap bool
}

func (l *ledger) book(p payment) (n int) {
	l.mu.Lock()
	l.overlap = l.overlap || l.at[p.Account]
	l.at[p.Account] = true
	l.mu.Unlock()
	time.Sleep(5 * time.Millisecond) // booking takes a while
	l.mu.Lock()
	defer l.mu.Unlock()
	l.at[p.Account] = false
	l.booked[p.Account] = append(l.booked[p.Account], p.Cents)
	l.n++
	return l.n
}

// Output:
// account 0 booked [100 101 102 103 104] in order: true
// account 1 booked [100 101 102 103 104] in order: true
// account 2 booked [100 101 102 103 104] in order: true
// two at once for one account: false
