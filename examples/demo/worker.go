//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/smtp"
	"net/textproto"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

// places are the addresses of everything. The program passes them to its workers through the environment.
type places struct {
	Database, SMTP, Mail, Bank string
	Verbose                    bool
}

const (
	placesEnv = "ONCEQ_DEMO_PLACES"
	lease     = 2 * time.Second // short: after this time, the job of a worker that died or froze is taken over
)

// runWorker is a worker process. It reports to the parent on its standard output, one line of JSON for each event. It ends
// when its standard input ends, because the parent wants that or has died.
func runWorker() error {
	var p places
	if err := json.Unmarshal([]byte(os.Getenv(placesEnv)), &p); err != nil {
		return fmt.Errorf("%s: %w", placesEnv, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	signal.Ignore(syscall.SIGPIPE)

	pool, err := connect(ctx, p.Database, "worker")
	if err != nil {
		return err
	}
	defer pool.Close()
	w := &worker{places: p, pool: pool, out: json.NewEncoder(os.Stdout)}
	q, err := onceq.New(pool, &onceq.Config{Schema: schema, Logger: logger(p.Verbose), Hook: onceq.HookFunc(w.event)})
	if err != nil {
		return err
	}
	runner, err := onceq.NewWorker(q,
		onceq.WorkerConfig{
			Lease:           lease,
			Queues:          map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 4, Keep: time.Hour}},
			ShutdownTimeout: 5 * time.Second,
		},
		Welcome.Handle(w.welcome),
		Charge.Handle(w.charge),
	)
	if err != nil {
		return err
	}
	return runner.Run(ctx)
}

func connect(ctx context.Context, url, role string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 6
	cfg.ConnConfig.RuntimeParams["application_name"] = "onceq demo " + role
	return pgxpool.NewWithConfig(ctx, cfg)
}

func logger(verbose bool) *slog.Logger {
	if verbose {
		return slog.New(slog.NewTextHandler(os.Stderr, nil)).With("pid", os.Getpid())
	}
	return slog.New(slog.DiscardHandler)
}

type worker struct {
	places
	pool *pgxpool.Pool

	mu  sync.Mutex // guards out
	out *json.Encoder
}

// report is what a worker tells its parent.
type report struct {
	Type   string `json:"type"` // an onceq.EventType, or one of those below
	Job    int64  `json:"job"`
	Effect string `json:"effect,omitempty"`
	Note   string `json:"note,omitempty"`
}

const (
	effectBegun = "effect begun" // the intent is recorded, and the provider is about to be called
	effectEnded = "effect ended" // the outcome is recorded; Note is one of done, not applied and unknown
	asked       = "asked"        // an earlier run's outcome was unknown; Note is what the provider said: accepted or not
	lateSuccess = "late success" // an effect's success was recorded although the job's lease was lost by then
)

func (w *worker) tell(r report) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.out.Encode(r)
}

func (w *worker) event(_ context.Context, e onceq.Event) {
	w.tell(report{Type: string(e.Type), Job: e.JobID, Effect: e.Name})
}

// effect is onceq.Once with two reports to the parent: one when the call begins, and one when its outcome is recorded.
func effect[R any](ctx context.Context, w *worker, l *onceq.Lease, name string, call func(ctx context.Context, key string) (R, error), opts ...onceq.EffectOption) (R, error) {
	called := false
	r, err := onceq.Once(ctx, l, name, func(ctx context.Context, key string) (R, error) {
		called = true
		w.tell(report{Type: effectBegun, Job: l.ID, Effect: name})
		return call(ctx, key)
	}, opts...)
	if called {
		note := "not applied"
		switch {
		case err == nil:
			note = "done"
		case errors.Is(err, onceq.ErrUncertain), errors.Is(err, onceq.ErrLeaseLost):
			note = "unknown"
		}
		w.tell(report{Type: effectEnded, Job: l.ID, Effect: name, Note: note})
		if err == nil && errors.Is(context.Cause(ctx), onceq.ErrLeaseLost) {
			w.tell(report{Type: lateSuccess, Job: l.ID, Effect: name})
		}
	}
	return r, err
}

// finishCall gives a call that has begun its full time, even if the job's lease is lost in between. If the call were cut
// off, nobody would know whether the provider did it. If it ends, its outcome is recorded for the job's next holder.
func finishCall(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, _ := ctx.Deadline()
	return context.WithDeadline(context.WithoutCancel(ctx), deadline)
}

// welcome sends the welcome e-mail. A mail server accepts a message as often as it is sent. So if nobody knows whether an
// earlier run sent it, the handler asks the mail provider about the Message-ID, which depends on the job and not on the
// attempt.
func (w *worker) welcome(ctx context.Context, l *onceq.Lease, u User) error {
	_, err := effect(ctx, w, l, "mail",
		func(ctx context.Context, key string) (string, error) {
			ctx, cancel := finishCall(ctx)
			defer cancel()
			return messageID(key), w.send(ctx, messageID(key), u)
		},
		onceq.EffectTimeout(3*time.Second),
		onceq.OnUncertain(onceq.Ask(func(ctx context.Context, key string) (any, bool, error) {
			accepted, err := w.wasAccepted(ctx, messageID(key))
			if err == nil {
				note := "not accepted"
				if accepted {
					note = "accepted"
				}
				w.tell(report{Type: asked, Job: l.ID, Effect: "mail", Note: note})
			}
			return messageID(key), accepted, err
		})))
	return err
}

func messageID(key string) string { return key + "@signups.example.com" }

// send sends the message. Until the client says that the message is complete, the server cannot have accepted it. After
// that, only the server's answer tells.
func (w *worker) send(ctx context.Context, id string, u User) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", w.SMTP)
	if err != nil {
		return onceq.NotApplied(err)
	}
	defer func() { _ = conn.Close() }()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	c, err := smtp.NewClient(conn, "mail.example.net")
	if err != nil {
		return onceq.NotApplied(err)
	}
	if err := c.Mail("hello@signups.example.com"); err != nil {
		return onceq.NotApplied(err)
	}
	if err := c.Rcpt(u.Email); err != nil {
		return onceq.NotApplied(err)
	}
	body, err := c.Data()
	if err != nil {
		return onceq.NotApplied(err)
	}
	if _, err := fmt.Fprintf(body, "From: hello@signups.example.com\r\nTo: %s <%s>\r\nSubject: Welcome\r\nMessage-ID: <%s>\r\n"+
		"Content-Type: text/plain; charset=utf-8\r\n\r\nHello %s,\r\n\r\nthank you for signing up.\r\n",
		mime.QEncoding.Encode("utf-8", u.Name), u.Email, id, u.Name); err != nil {
		return onceq.NotApplied(err)
	}
	err = body.Close()
	var refused *textproto.Error
	if errors.As(err, &refused) {
		return onceq.NotApplied(err)
	}
	_ = c.Quit()
	return err
}

func (w *worker) wasAccepted(ctx context.Context, id string) (bool, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.Mail+"/messages/"+id, nil)
	if err != nil {
		return false, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false, err
	}
	defer func() { _ = resp.Body.Close() }()
	switch resp.StatusCode {
	case http.StatusOK:
		return true, nil
	case http.StatusNotFound:
		return false, nil
	}
	return false, fmt.Errorf("the mail provider answers %s", resp.Status)
}

// charge takes the money and writes the receipt. The bank deduplicates by Idempotency-Key, so the default policy is right:
// if nobody knows whether an earlier run made the charge, it runs again under the same key. The receipt commits together
// with the job's completion, or not at all: a worker that was taken for dead writes no receipt.
func (w *worker) charge(ctx context.Context, l *onceq.Lease, u User) error {
	id, err := effect(ctx, w, l, "charge",
		func(ctx context.Context, key string) (string, error) {
			ctx, cancel := finishCall(ctx)
			defer cancel()
			return w.pay(ctx, key, order{User: u.ID, Cents: price(u.Plan)})
		},
		onceq.EffectTimeout(4*time.Second))
	if err != nil {
		return err
	}
	// The database decides whether the lease still holds. So this is tried even if the context has ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `insert into demo.receipts (user_id, charge_id, cents) values ($1, $2, $3)`,
			u.ID, id, price(u.Plan)); err != nil {
			return err
		}
		return l.Complete(ctx, tx)
	})
}

func (w *worker) pay(ctx context.Context, key string, o order) (string, error) {
	body, err := json.Marshal(o)
	if err != nil {
		return "", onceq.NotApplied(err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.Bank+"/charges", bytes.NewReader(body))
	if err != nil {
		return "", onceq.NotApplied(err)
	}
	req.Header.Set("Idempotency-Key", key)
	req.Close = true // when a reused connection breaks, net/http would repeat the request by itself; here we want to see that
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err // nobody knows whether it was charged
	}
	defer func() { _ = resp.Body.Close() }()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusServiceUnavailable: // the bank promises that nothing was done
		return "", onceq.NotApplied(fmt.Errorf("the bank answers %s", resp.Status))
	case http.StatusUnprocessableEntity:
		return "", onceq.Fatal(onceq.NotApplied(fmt.Errorf("the bank answers %s", resp.Status)))
	default:
		return "", fmt.Errorf("the bank answers %s", resp.Status)
	}
	var c charge
	if err := json.NewDecoder(resp.Body).Decode(&c); err != nil {
		return "", err
	}
	return c.ID, nil
}
