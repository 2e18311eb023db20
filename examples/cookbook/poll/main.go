// Poll starts slow work at a provider, once, and checks now and then whether it is done. No handler waits in between.
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

var transcribe = onceq.Kind[string]{
	Name: "transcribe",
	Key:  func(file string) string { return file },
}

// handler checks at the interval every, and gives up after patience.
func handler(p *provider, every, patience time.Duration) onceq.Handler {
	return transcribe.Handle(func(ctx context.Context, l *onceq.Lease, file string) error {
		// The first run starts the work. Each later run gets the id from the first.
		id, err := onceq.Once(ctx, l, "start", func(ctx context.Context, key string) (string, error) {
			return p.start(key, file)
		})
		if err != nil {
			return err
		}
		text, done, err := p.look(id)
		if err != nil {
			return err // this spends an attempt, and the next check comes after the backoff
		}
		if done {
			return l.SetResult(text)
		}
		now, err := l.Now(ctx)
		if err != nil {
			return err
		}
		if now.Sub(l.CreatedAt) > patience { // Snooze spends no attempt, so this limit has to end the job
			return onceq.Fatal(errors.New("the provider does not come to an end"))
		}
		return onceq.Snooze(every)
	})
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	defer pool.Close()

	_, err := q.Enqueue(ctx, pool, transcribe.Job("talk.mp3"))
	example.Check(err)
	p := &provider{slow: 3, finished: stop}
	example.Work(ctx, q, handler(p, 10*time.Millisecond, time.Hour)) // a minute and a day, in a real service

	info, err := q.GetByKey(context.Background(), pool, transcribe.Name, "talk.mp3")
	example.Check(err)
	fmt.Println(info.State, string(info.Result), "starts:", p.starts, "looks:", p.looks)
}

// provider stands for a slow provider. Its work is done at check number slow.
type provider struct {
	slow, starts, looks int
	finished            func()
}

func (p *provider) start(_, _ string) (id string, err error) {
	p.starts++
	return "t-1", nil
}

func (p *provider) look(_ string) (text string, done bool, err error) {
	p.looks++
	if p.looks < p.slow {
		return "", false, nil
	}
	p.finished()
	return "Good morning", true, nil
}

// Output:
// completed "Good morning" starts: 1 looks: 3
