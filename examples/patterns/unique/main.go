// Unique enqueues the same work again and again: at once and delayed, and through two handles on the queue, as two
// processes would. It is accepted once, and each caller gets the same id.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type signUp struct {
	UserID int `json:"user_id"`
}

var welcome = onceq.Kind[signUp]{
	Name: "welcome",
	Key:  func(s signUp) string { return fmt.Sprintf("welcome:user:%d", s.UserID) },
}

func main() {
	ctx := context.Background()
	pool, one := example.Open(ctx, "")
	defer pool.Close()
	other, err := onceq.New(pool, nil)
	example.Check(err)

	delayed := welcome.Job(signUp{42})
	delayed.Delay = time.Hour
	first, err := one.Enqueue(ctx, pool, delayed)
	example.Check(err)
	for _, q := range []*onceq.Queue{one, other} {
		again, err := q.Enqueue(ctx, pool, welcome.Job(signUp{42}))
		example.Check(err)
		fmt.Println("same id:", again.ID == first.ID, "duplicate:", again.Duplicate, "state:", again.State)
	}

	for _, key := range []string{"", " \t"} {
		_, err = one.EnqueueUnique(ctx, pool, onceq.Job{Kind: "welcome", Key: key})
		fmt.Println(err)
	}
}

// Output:
// same id: true duplicate: true state: delayed
// same id: true duplicate: true state: delayed
// onceq: Key is empty, and each job of kind "welcome" has one (Kind.Key, EnqueueUnique)
// onceq: Key is only white space
