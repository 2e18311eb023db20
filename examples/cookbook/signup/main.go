// Signup sends a mail, waits three days or until the user has confirmed, and then sends one of two others. It is one
// handler, which may be killed anywhere. While it waits, nothing runs.
package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type user struct {
	ID    int
	Email string
}

func (u user) key() string { return fmt.Sprint("user-", u.ID) }

var signup = onceq.Kind[user]{Name: "signup", Key: user.key}

const threeDays = 3 * 24 * time.Hour

func handler(mail mailer, patience time.Duration) onceq.Handler {
	return signup.Handle(func(ctx context.Context, l *onceq.Lease, u user) error {
		if err := mail.send(ctx, l, "please-confirm", u.Email); err != nil {
			return err
		}
		confirmed, err := l.Await(ctx, "confirmed", u.key(), patience)
		if err != nil {
			return err // the handler runs again when the user has confirmed, or the time is over
		}
		if confirmed {
			return mail.send(ctx, l, "welcome", u.Email)
		}
		return mail.send(ctx, l, "reminder", u.Email)
	})
}

// mailer sends mails through a provider that deduplicates.
type mailer struct {
	client *http.Client
	url    string
}

func (m mailer) send(ctx context.Context, l *onceq.Lease, template, to string) error {
	_, err := onceq.Once(ctx, l, template, func(ctx context.Context, key string) (string, error) {
		return m.post(ctx, key, template, to)
	})
	return err
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, "")
	defer pool.Close()
	p := &provider{wants: 4, enough: stop}
	server := httptest.NewServer(p)
	defer server.Close()

	ada, bob := user{1, "ada@example.com"}, user{2, "bob@example.com"}
	for _, u := range []user{ada, bob} {
		_, err := q.Enqueue(ctx, pool, signup.Job(u))
		example.Check(err)
	}
	// In the service that serves the link in the mail, in the transaction that stores the confirmation:
	_, err := q.Emit(ctx, pool, "confirmed", ada.key(), nil)
	example.Check(err)

	example.Work(ctx, q, handler(mailer{server.Client(), server.URL}, 200*time.Millisecond)) // threeDays, in a real service
	slices.Sort(p.sent)
	for _, mail := range p.sent {
		fmt.Println(mail)
	}
}

func (m mailer) post(ctx context.Context, key, template, to string) (id string, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, m.url+"/"+template, strings.NewReader(to))
	if err != nil {
		return "", err
	}
	r.Header.Set("Idempotency-Key", key)
	answer, err := m.client.Do(r)
	if err != nil {
		return "", err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		return "", fmt.Errorf("the provider answered %s", answer.Status)
	}
	return key, nil
}

// provider stands for one that sends mails.
type provider struct {
	mu     sync.Mutex
	sent   []string
	wants  int
	enough func()
}

func (p *provider) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	to, _ := io.ReadAll(r.Body)
	if p.sent = append(p.sent, string(to)+" "+r.URL.Path); len(p.sent) == p.wants {
		p.enough()
	}
}

// Output:
// ada@example.com /please-confirm
// ada@example.com /welcome
// bob@example.com /please-confirm
// bob@example.com /reminder
