package tests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// The patterns of docs/use/patterns.md, written as a user of this library would write them. A seed's number is that of the text
// from which the pattern comes.

type patternWelcome struct {
	UserID int    `json:"userId"`
	Email  string `json:"email"`
}

var patternWelcomeKind = onceq.Kind[patternWelcome]{
	Name:    "welcome-email",
	Key:     func(w patternWelcome) string { return fmt.Sprintf("welcome:%d", w.UserID) },
	Backoff: func(int, error) time.Duration { return 0 },
}

// patternMail is an e-mail provider without deduplication: it counts what it sends.
type patternMail struct {
	mu   sync.Mutex
	sent map[string]int
}

func (m *patternMail) send(to string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sent == nil {
		m.sent = map[string]int{}
	}
	m.sent[to]++
}

func patternSQL(t *testing.T, db *queuetest.DB, statements ...string) {
	t.Helper()
	for _, s := range statements {
		_, err := db.Pool.Exec(t.Context(), s)
		require.NoError(t, err, s)
	}
}

func patternEnqueue(t *testing.T, db *queuetest.DB, j onceq.Job) onceq.Result {
	t.Helper()
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, j)
	require.NoError(t, err)
	return r
}

// The worker crashes after it called the e-mail API and before the job is complete. The redelivery sends no second mail.
//
// docs/use/patterns.md, "Keys for providers" (seed 000).
func TestPattern_CrashAfterTheMailAndBeforeTheCompletionSendsNoSecondMail(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	var mail patternMail
	r := patternEnqueue(t, db, patternWelcomeKind.Job(patternWelcome{42, "ada@example.com"}))
	first, second := db.DeliverTwice(patternWelcomeKind.Handle(func(ctx context.Context, l *onceq.Lease, w patternWelcome) error {
		sent, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (map[string]any, error) {
			mail.send(w.Email)
			return map[string]any{"sent": true, "userId": w.UserID}, nil
		})
		return errors.Join(err, l.SetResult(sent))
	}))
	require.True(t, first.Lost(), "%+v", first)
	require.Equal(t, onceq.StateCompleted, second.State)
	require.Equal(t, map[string]int{"ada@example.com": 1}, mail.sent)
	again := patternEnqueue(t, db, patternWelcomeKind.Job(patternWelcome{42, "ada@example.com"}))
	require.Equal(t, r.ID, again.ID)
	require.JSONEq(t, `{"sent": true, "userId": 42}`, string(again.Output))
}

// The application has a table of its own. The record and the completion commit together, so there is nothing to check.
//
// docs/use/patterns.md, "A table of what was done" (seed 000).
func TestPattern_WhatWasDoneIsRecordedInTheHandlersTransaction(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	patternSQL(t, db, `create table outreach_sent (job_id bigint not null, contact_id text not null)`) // not even unique
	k := onceq.Kind[string]{Name: "outreach", Key: func(c string) string { return "outreach:cmp_456:" + c }}
	patternEnqueue(t, db, k.Job("cid_123"))
	ran := db.Race(k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, contact string) error {
		_, err := tx.Exec(ctx, `insert into outreach_sent values ($1, $2)`, l.ID, contact)
		return err
	}))
	require.NotEmpty(t, ran)
	require.Equal(t, 1, enqGet[int](t, db.Pool, `select count(*)::int from outreach_sent`))
}

// "Clean up records older than 24 hours with a scheduled job": the Reaper does, and never removes one within its window.
//
// docs/use/patterns.md, "A replay window" (seed 000).
func TestPattern_KeysArePrunedAfterTheirWindowAndNotBefore(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	reaper, err := onceq.NewReaper(db.Queue, onceq.ReaperConfig{Grace: time.Millisecond})
	require.NoError(t, err)
	patternEnqueue(t, db, patternWelcomeKind.Job(patternWelcome{UserID: 1}))
	db.Drain(patternWelcomeKind.Handle(func(context.Context, *onceq.Lease, patternWelcome) error { return nil }))
	for _, c := range []struct {
		after time.Duration
		gone  int
	}{{23 * time.Hour, 0}, {2 * time.Hour, 1}} {
		db.Advance(c.after)
		reaped, err := reaper.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, c.gone, reaped.Fences)
	}
	require.False(t, patternEnqueue(t, db, patternWelcomeKind.Job(patternWelcome{UserID: 1})).Duplicate)
}

// Pattern 1. It is no longer necessary to check for an existing row, but it does no harm: the job runs twice and sends
// once.
//
// docs/use/patterns.md, "A table of what was done" (seed 001).
func TestPattern_LookingForAnExistingRowFirst(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	patternSQL(t, db, `create table email_log (type text, user_id int)`)
	var mail patternMail
	handler := patternWelcomeKind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, w patternWelcome) error {
		var sent bool
		if err := tx.QueryRow(ctx, `select exists (select from email_log where type = 'welcome' and user_id = $1)`, w.UserID).Scan(&sent); err != nil || sent {
			return err
		}
		if _, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (bool, error) { mail.send(w.Email); return true, nil }); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `insert into email_log values ('welcome', $1)`, w.UserID)
		return err
	})
	t.Run("sends exactly once when the job runs twice", func(t *testing.T) {
		patternEnqueue(t, db, patternWelcomeKind.Job(patternWelcome{1, "one@example.com"}))
		db.DeliverTwice(handler)
		require.Equal(t, map[string]int{"one@example.com": 1}, mail.sent)
	})
	t.Run("handles an already completed job gracefully", func(t *testing.T) {
		patternSQL(t, db, `insert into email_log values ('welcome', 2)`)
		patternEnqueue(t, db, patternWelcomeKind.Job(patternWelcome{2, "two@example.com"}))
		require.Equal(t, onceq.StateCompleted, db.RunOne(handler).State)
		require.NotContains(t, mail.sent, "two@example.com")
	})
	require.Equal(t, 1, enqGet[int](t, db.Pool, `select count(*)::int from email_log where user_id = 1`))
}

// Pattern 2. An upsert, and a row that was deleted after the job was enqueued. Both handlers are plain ones.
//
// docs/use/patterns.md, "Upserts" (seed 001).
func TestPattern_Upsert(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	patternSQL(t, db, `create table products (id int primary key, name text)`, `create table search_index (id int primary key, name text, writes int default 1)`,
		`insert into products values (1, 'anvil')`)
	k := onceq.Kind[int]{Name: "index"}
	handler := k.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, id int) error {
		_, err := tx.Exec(ctx, `insert into search_index (id, name) select id, name from products where id = $1
			on conflict (id) do update set name = excluded.name, writes = search_index.writes + 1`, id)
		return err
	})
	patternEnqueue(t, db, k.Job(1))
	db.DeliverTwice(handler)
	patternEnqueue(t, db, k.Job(2)) // this user is deleted by now
	require.Equal(t, onceq.StateCompleted, db.RunOne(handler).State)
	require.Equal(t, "1 anvil 1", enqGet[string](t, db.Pool, `select string_agg(concat_ws(' ', id, name, writes), ',') from search_index`))
}

// Pattern 3. The provider gets the key and deduplicates. After a charge that timed out, there is one charge.
//
// docs/use/patterns.md, "Keys for providers" (seed 001).
func TestPattern_AProviderThatKnowsTheKeyChargesOnceAfterATimeOut(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	var mu sync.Mutex
	charges, requests := map[string]string{}, 0
	stripe := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		requests++
		key := r.Header.Get("Idempotency-Key")
		if charges[key] == "" {
			charges[key] = fmt.Sprintf("pi_%d", len(charges)+1)
		}
		if requests == 1 { // the charge happens, and its answer gets lost
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(w, charges[key])
	}))
	defer stripe.Close()
	k := onceq.Kind[int]{Name: "charge", Key: func(order int) string { return fmt.Sprintf("order-charge-%d", order) }, Backoff: func(int, error) time.Duration { return 0 }}
	r := patternEnqueue(t, db, k.Job(7))
	ran := db.Drain(k.Handle(func(ctx context.Context, l *onceq.Lease, order int) error {
		id, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (string, error) {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, stripe.URL, strings.NewReader(fmt.Sprint(order)))
			if err != nil {
				return "", onceq.NotApplied(err)
			}
			req.Header.Set("Idempotency-Key", key)
			res, err := http.DefaultTransport.RoundTrip(req)
			if err != nil {
				return "", err
			}
			defer func() { _ = res.Body.Close() }()
			body, err := io.ReadAll(res.Body)
			return string(body), err
		})
		return errors.Join(err, l.SetResult(id))
	}))
	require.Len(t, ran, 2)
	require.ErrorIs(t, ran[0].Err, onceq.ErrUncertain)
	require.Len(t, charges, 1)
	require.Equal(t, 2, requests)
	require.JSONEq(t, `"pi_1"`, string(patternEnqueue(t, db, k.Job(7)).Output))
	require.NotZero(t, r.ID)
}

// "Two different jobs, each handles its own idempotency independently": without a key there is one report for each job, and
// a redelivered job makes no second one.
//
// docs/use/patterns.md, "The job's id as a stable key, and a lock" (seed 001).
func TestPattern_TheJobIsTheKeyOfItsEffects(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	k := onceq.Kind[string]{Name: "report"}
	uploads := map[string]int{}
	handler := k.Handle(func(ctx context.Context, l *onceq.Lease, report string) error {
		_, err := onceq.Once(ctx, l, "upload", func(_ context.Context, key string) (string, error) {
			uploads[key]++
			return "s3://" + report, nil
		})
		return err
	})
	for range 2 {
		patternEnqueue(t, db, k.Job("r_1"))
		db.DeliverTwice(handler)
	}
	require.Len(t, uploads, 2)
	for key, n := range uploads {
		require.Equal(t, 1, n, key)
	}
}

// A key with a random id never deduplicates. A table of the answers shows which keys do.
//
// docs/use/patterns.md, "A deterministic id at enqueueing" (seed 002).
func TestPattern_OneWebhookForEachSourceEventAlsoFromManyProcesses(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids, first := map[int64]bool{}, 0
	for n := range 8 {
		q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		wg.Go(func() {
			r, err := q.EnqueueUnique(context.Background(), db.Pool, onceq.Job{Kind: "webhook", Key: "webhook:evt_1", Delay: time.Duration(n%2) * time.Hour})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			ids[r.ID] = true
			if !r.Duplicate {
				first++
			}
		})
	}
	wg.Wait()
	require.Len(t, ids, 1)
	require.Equal(t, 1, first)
}

// A provider's errors: "in flight" is retried after about half a second, a mismatch is fatal, and anything else is an error
// like any other.
//
// docs/use/patterns.md, "Keys for providers" (seed 003).
func TestPattern_AProvidersRetryableAndFatalErrors(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	answers := []string{"IDEMPOTENCY_IN_FLIGHT", "unknown", "IDEMPOTENCY_MISMATCH"}
	var keys []string
	k := onceq.Kind[int]{Name: "send", Key: func(u int) string { return fmt.Sprintf("welcome:%d", u) }, Backoff: func(int, error) time.Duration { return 0 }}
	handler := k.Handle(func(ctx context.Context, l *onceq.Lease, user int) error {
		_, err := onceq.Once(ctx, l, "send", func(_ context.Context, key string) (string, error) {
			keys = append(keys, key)
			code := answers[len(keys)-1]
			switch err := errors.New(code); code {
			case "IDEMPOTENCY_IN_FLIGHT":
				return "", onceq.RetryAfter(500*time.Millisecond, onceq.NotApplied(err))
			case "IDEMPOTENCY_MISMATCH":
				return "", onceq.Fatal(onceq.NotApplied(err))
			default:
				return "", err
			}
		})
		return err
	})
	r := patternEnqueue(t, db, k.Job(42))
	began := sqlOne[time.Time](t, db, `select clock_timestamp()`)
	ran := db.RunOne(handler)
	require.ErrorContains(t, ran.Err, "IN_FLIGHT")
	require.Equal(t, onceq.StateRetrying, ran.State)
	info, err := db.Queue.Get(t.Context(), db.Pool, r.ID)
	require.NoError(t, err)
	require.Equal(t, 1, info.Attempts, "an error spends an attempt, whatever delay it asks for")
	require.True(t, sqlOne[bool](t, db, `select $1::timestamptz - interval '500 milliseconds' between $2 and clock_timestamp()`, info.RunAt, began))
	db.Advance(time.Second)
	require.Equal(t, onceq.StateRetrying, db.RunOne(handler).State)
	require.Equal(t, onceq.StateDead, db.RunOne(handler).State)
	require.Len(t, keys, 3)
	require.Equal(t, []string{keys[0], keys[0]}, keys[1:])
}

// "The 24h window starts at first send. After that the key is forgotten and replays will double-send": after that, a person
// decides here.
//
// docs/use/patterns.md, "Look before you act" (seed 003).
func TestPattern_AfterTheProvidersWindowAPersonDecides(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	k := onceq.Kind[int]{Name: "send", Backoff: func(int, error) time.Duration { return 0 }}
	calls := 0
	handler := k.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		_, err := onceq.Once(ctx, l, "send", func(context.Context, string) (int, error) {
			calls++
			return 0, errors.New("time-out")
		})
		return err
	})
	r := patternEnqueue(t, db, k.Job(1))
	for range 2 {
		require.Equal(t, onceq.StateRetrying, db.RunOne(handler).State)
		db.Advance(13 * time.Hour)
	}
	require.Equal(t, onceq.StateHeld, db.RunOne(handler).State) // 26 hours after the first
	require.Equal(t, 2, calls)
	require.NoError(t, onceqops.New(db.Queue).Resolve(t.Context(), db.Pool, r.ID, "send", onceq.Applied(0)))
	require.Equal(t, onceq.StateCompleted, db.RunOne(handler).State)
	require.Equal(t, 2, calls)
}

// "Only one concurrent worker wins the insert": Do has one winner, and the others get its outcome.
//
// docs/use/patterns.md, "A record of the intent" (seed 004).
func TestPattern_OfConcurrentWorkersOneActsAndAllHearTheOutcome(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	var wg sync.WaitGroup
	var mu sync.Mutex
	var once sync.Once
	met := make(chan struct{}) // closed when somebody was told that it is in flight
	effects := 0
	for range 8 {
		wg.Go(func() {
			for {
				id, err := onceq.Do(context.Background(), db.Queue, onceq.FenceSpec{Key: "job_completions:7"}, func(context.Context, *onceq.FenceLease) (string, error) {
					mu.Lock()
					effects++
					mu.Unlock()
					<-met
					return "done", nil
				})
				if errors.Is(err, onceq.ErrInFlight) {
					once.Do(func() { close(met) })
					continue
				}
				if err != nil || id != "done" {
					t.Error(id, err)
				}
				return
			}
		})
	}
	wg.Wait()
	require.Equal(t, 1, effects)
}

// "Check for the side effect before taking it", for a provider without keys: here there is no race between the check and
// the act.
//
// docs/use/patterns.md, "Look before you act" (seed 004).
func TestPattern_AskingAProviderWithoutKeysBeforeSendingAgain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	var mail patternMail
	asked := 0
	lost := true
	k := onceq.Kind[string]{Name: "mail", Backoff: func(int, error) time.Duration { return 0 }}
	handler := k.Handle(func(ctx context.Context, l *onceq.Lease, to string) error {
		_, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (bool, error) {
			mail.send(to)
			if lost {
				return false, errors.New("connection reset")
			}
			return true, nil
		}, onceq.OnUncertain(onceq.Ask(func(context.Context, string) (any, bool, error) {
			asked++
			return true, mail.sent[to] > 0, nil // email_already_sent(user, template)
		})))
		return err
	})
	patternEnqueue(t, db, k.Job("ada@example.com"))
	require.ErrorIs(t, db.RunOne(handler).Err, onceq.ErrUncertain)
	lost = false
	db.Advance(time.Minute)
	require.Equal(t, onceq.StateCompleted, db.RunOne(handler).State)
	require.Equal(t, 1, asked)
	require.Equal(t, map[string]int{"ada@example.com": 1}, mail.sent)
}

// "Log it as a distinct event — not a failure, not a success, but a deduplication": it is an event of its own, and counted.
//
// docs/use/patterns.md, "Duplicates are an event of their own" (seed 004).
func TestPattern_ADuplicateIsAnEventOfItsOwn(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	counts := map[onceq.EventType]int{}
	db := queuetest.New(t, queuetest.Config(onceq.Config{
		Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Hook:   onceq.HookFunc(func(_ context.Context, e onceq.Event) { counts[e.Type]++ }),
	}))
	for range 3 {
		patternEnqueue(t, db, patternWelcomeKind.Job(patternWelcome{UserID: 42}))
	}
	require.Equal(t, map[onceq.EventType]int{onceq.EventEnqueued: 1, onceq.EventDuplicate: 2}, counts)
	require.Equal(t, 2, strings.Count(log.String(), `level=DEBUG msg="onceq: duplicate"`))
	require.NotContains(t, log.String(), "WARN")
	require.NotContains(t, log.String(), "ERROR")
	require.Contains(t, log.String(), "key=welcome:42")
}

// "A complex job that does ten things is harder to make safe than ten jobs that each do one thing": the first job enqueues
// the others in its own transaction, once.
//
// docs/use/patterns.md, "Small steps" (seed 004).
func TestPattern_AJobOfTenStepsIsTenJobs(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	step := onceq.Kind[int]{Name: "step"}
	all := onceq.Kind[int]{Name: "all"}
	patternEnqueue(t, db, all.Job(10))
	db.DeliverTwice(all.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
		jobs := make([]onceq.Job, n)
		for i := range jobs {
			jobs[i] = step.Job(i) // they need no key: they commit with this job's completion
		}
		_, err := db.Queue.EnqueueMany(ctx, tx, jobs)
		return err
	}))
	require.Len(t, db.Drain(step.Handle(func(context.Context, *onceq.Lease, int) error { return nil })), 10)
}
