package onceqhttp_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

// seen is a provider that records the keys it gets and gives the answers that the test wants.
type seen struct {
	*httptest.Server
	keys   chan string // "" for none
	status int
	body   string
	header http.Header
}

func provider(t testing.TB) *seen {
	p := &seen{keys: make(chan string, 10), status: 200}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		p.keys <- r.Header.Get("Idempotency-Key")
		for name, values := range p.header {
			w.Header()[name] = values
		}
		w.WriteHeader(p.status)
		_, _ = io.WriteString(w, p.body)
	}))
	t.Cleanup(p.Close)
	return p
}

func (p *seen) call(ctx context.Context, t *onceqhttp.Transport, method, path string, header ...string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, method, p.URL+path, strings.NewReader("{}"))
	if err != nil {
		return "", err
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := (&http.Client{Transport: t}).Do(r)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

func TestTransport_SendsTheKeyOfWhatItWorksFor(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	p := provider(t)
	tr := &onceqhttp.Transport{}
	kind := onceq.Kind[int]{Name: "charge"}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	sent := func(ctx context.Context, tr *onceqhttp.Transport, method, path string, header ...string) string {
		t.Helper()
		_, err := p.call(ctx, tr, method, path, header...)
		require.NoError(t, err)
		return receive(t, p.keys)
	}
	require.Empty(t, sent(t.Context(), tr, "POST", "/"), "nobody's")

	ran := db.RunOne(kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		require.Equal(t, l.IdempotencyKey("POST "+p.URL+"/a?x=1"), sent(ctx, tr, "POST", "/a?x=1"))
		require.Equal(t, sent(ctx, tr, "POST", "/a"), sent(ctx, tr, "POST", "/a"))
		require.NotEqual(t, sent(ctx, tr, "POST", "/a"), sent(ctx, tr, "POST", "/b"))
		require.NotEqual(t, sent(ctx, tr, "POST", "/a"), sent(ctx, tr, "DELETE", "/a"))
		for _, safe := range []string{"GET", "HEAD", "OPTIONS"} {
			require.Empty(t, sent(ctx, tr, safe, "/a"))
		}
		require.Equal(t, "mine", sent(ctx, tr, "POST", "/a", "Idempotency-Key", "mine"))
		_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (string, error) {
			require.Equal(t, key, sent(ctx, tr, "POST", "/a"))
			require.Equal(t, `"`+key+`"`, sent(ctx, &onceqhttp.Transport{Structured: true}, "POST", "/a"), "as the draft says")
			parsed, err := onceqhttp.ParseKey(http.Header{"Idempotency-Key": {`"` + key + `"`}})
			require.Equal(t, key, parsed)
			return "", err
		})
		return err
	}))
	require.Equal(t, onceq.StateCompleted, ran.State, ran.Err)

	// An effect's key is the same without the lease in the context.
	own, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(2))
	require.NoError(t, err)
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 1})
	require.NoError(t, err)
	require.Equal(t, own.ID, leases[0].ID)
	_, err = onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "outer"}, func(ctx context.Context, _ *onceq.FenceLease) (int, error) {
		return onceq.Once(ctx, leases[0], "charge", func(ctx context.Context, key string) (int, error) {
			require.Equal(t, key, sent(ctx, tr, "POST", "/a"))
			return 1, nil
		})
	})
	require.NoError(t, err)
	require.NoError(t, leases[0].Complete(t.Context(), nil))
}

// Outside effects each call has a key of its own, and keeps it when the work runs again.
func TestTransport_EachCallOfARequestHasItsKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	p := provider(t)
	calls := func(ctx context.Context) (keys [4]string) {
		for i, c := range [4][2]string{{"POST", "/customers"}, {"POST", "/charges"}, {"POST", "/charges?x=1"}, {"DELETE", "/customers"}} {
			_, err := p.call(ctx, &onceqhttp.Transport{}, c[0], c[1])
			assert.NoError(t, err)
			keys[i] = receive(t, p.keys)
		}
		return keys
	}
	var sent [][4]string
	m := middleware(t, db.Queue, onceqhttp.Config{})
	s := serve(t, "POST /", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent = append(sent, calls(r.Context()))
		w.WriteHeader(502) // so it is run again
	})))
	for range 2 {
		require.Equal(t, 502, post(t, s.URL, "k", "").status)
	}
	require.Equal(t, 502, post(t, s.URL, "another", "").status)
	for range 2 {
		_, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "k"}, func(ctx context.Context, c *onceq.FenceLease) (int, error) {
			sent = append(sent, calls(ctx))
			require.NotContains(t, sent[len(sent)-1], c.IdempotencyKey())
			return 1, errors.New("bad day")
		})
		require.ErrorIs(t, err, onceq.ErrUncertain)
	}
	require.Len(t, sent, 5)
	require.Equal(t, sent[0], sent[1])
	require.Equal(t, sent[3], sent[4])
	different := make(map[string]bool)
	for _, run := range [][4]string{sent[0], sent[2], sent[3]} {
		for _, key := range run {
			require.Regexp(t, `^oq_[0-9a-f]{40}$`, key)
			different[key] = true
		}
	}
	require.Len(t, different, 12)
}

func TestTransport_TakesARequestWithoutHeaders(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	p := provider(t)
	_, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "k"}, func(ctx context.Context, _ *onceq.FenceLease) (int, error) {
		u, err := url.Parse(p.URL)
		require.NoError(t, err)
		r := (&http.Request{Method: "POST", URL: u}).WithContext(ctx)
		resp, err := (&onceqhttp.Transport{}).RoundTrip(r)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.NotEmpty(t, receive(t, p.keys))
		require.Nil(t, r.Header, "the caller's stays as it was")
		_, err = (&onceqhttp.Transport{}).RoundTrip((&http.Request{Method: "POST"}).WithContext(ctx))
		require.ErrorContains(t, err, "nil Request", "of net/http")
		return 1, nil
	})
	require.NoError(t, err)
}

// A claim that a rollback may undo sends no key to a provider: a second run would send another key, and charge again.
func TestTransport_SendsNoKeyOfATransaction(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	p := provider(t)
	claims := make(chan string, 2)
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).HandlerTx(db.Pool, func(w http.ResponseWriter, r *http.Request, _ pgx.Tx) error {
		claims <- onceqhttp.FromContext(r.Context()).Lease.IdempotencyKey()
		_, err := p.call(r.Context(), &onceqhttp.Transport{}, "POST", "/charge")
		assert.NoError(t, err)
		w.WriteHeader(502)
		return nil
	}))
	for range 2 {
		require.Equal(t, 502, post(t, s.URL, "k", "").status)
		require.Empty(t, receive(t, p.keys))
	}
	require.NotEqual(t, receive(t, claims), receive(t, claims))
}

func TestTransport_LeavesAKeyThatIsThere(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "k"}, func(ctx context.Context, _ *onceq.FenceLease) (int, error) {
		r, err := http.NewRequestWithContext(ctx, "POST", "http://provider.example/", nil)
		require.NoError(t, err)
		r.Header["idempotency-key"] = []string{"mine"} // as some libraries write it
		_, err = (&onceqhttp.Transport{Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			require.Equal(t, http.Header{"idempotency-key": {"mine"}}, r.Header)
			return nil, io.ErrUnexpectedEOF
		})}).RoundTrip(r)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		return 1, nil
	})
	require.NoError(t, err)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestTransport_WhatAnswersMean(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	problem := func(code string) string {
		b, err := json.Marshal(onceqhttp.Problem{Code: code, Title: "x"})
		require.NoError(t, err)
		return string(b)
	}
	const day = 24 * time.Hour
	for i, c := range []struct {
		status     int
		body       string
		retryAfter string
		code       string // of the AnswerError; "-" for none: the answer is returned
		delay      time.Duration
		fatal      bool
		uncertain  bool
	}{
		{409, problem(onceqhttp.CodeInFlight), "7", onceqhttp.CodeInFlight, 7 * time.Second, false, true},
		{409, problem(onceqhttp.CodeInFlight), "", onceqhttp.CodeInFlight, 500 * time.Millisecond, false, true},
		{409, problem(onceqhttp.CodeInFlight), "Thu, 01 Jan 2026 00:00:09 GMT", onceqhttp.CodeInFlight, 9 * time.Second, false, true},
		{409, `{"error": {"code": "IDEMPOTENCY_IN_FLIGHT", "message": "x"}}`, "", onceqhttp.CodeInFlight, 500 * time.Millisecond, false, true},
		{409, `{"error": {"code": "idempotency_key_in_use", "type": "idempotency_error"}}`, "", "idempotency_key_in_use", 500 * time.Millisecond, false, true},
		{422, problem(onceqhttp.CodeMismatch), "", onceqhttp.CodeMismatch, 0, true, true},
		{409, `{"error": {"code": "IDEMPOTENCY_MISMATCH"}}`, "", onceqhttp.CodeMismatch, 0, true, true},
		{400, `{"error": {"type": "idempotency_error"}}`, "", "", 0, true, true},
		{429, "slowly", "86400", "", day, false, false},
		{429, "slowly", "2147483647", "", day, false, false},
		{503, "", "Fri, 31 Dec 9999 23:59:59 GMT", "", day, false, true},
		{409, problem(onceqhttp.CodeHeld), "", onceqhttp.CodeHeld, 0, false, true},
		{500, problem(onceqhttp.CodeUnknown), "", onceqhttp.CodeUnknown, 0, false, true},
		{500, problem(onceqhttp.CodeResponseTooLarge), "", onceqhttp.CodeResponseTooLarge, 0, true, true},
		{500, problem(onceqhttp.CodeResponseUnreadable), "", onceqhttp.CodeResponseUnreadable, 0, true, true},
		{503, problem(onceqhttp.CodeUncertain), "1", onceqhttp.CodeUncertain, time.Second, false, true},
		{503, "", "Thu, 01 Jan 2026 00:00:00 GMT", "", 0, false, true},
		{429, "slowly", "", "-", 0, false, false},
		{503, "down", "soon", "-", 0, false, false},
		{409, `{"error": "taken"}`, "", "-", 0, false, false},
		{422, strings.Repeat("long ", 50_000), "", "-", 0, false, false},
		{400, problem(onceqhttp.CodeKeyInvalid), "", "-", 0, false, false},
		{500, problem(onceqhttp.CodeInFlight), "1", "-", 0, false, false},
		{500, problem(onceqhttp.CodeRolledBack), "", "-", 0, false, false},
		{500, strings.Repeat("long ", 50_000), "", "-", 0, false, false},
		{409, problem(onceqhttp.CodeResponseTooLarge), "", "-", 0, false, false},
		{201, problem(onceqhttp.CodeMismatch), "", "-", 0, false, false},
	} {
		t.Run(fmt.Sprint(i, " ", c.status, c.code), func(t *testing.T) {
			p := provider(t)
			p.status, p.body, p.header = c.status, c.body, http.Header{"Date": {"Thu, 01 Jan 2026 00:00:00 GMT"}}
			if c.retryAfter != "" {
				p.header.Set("Retry-After", c.retryAfter)
			}
			kind := onceq.Kind[int]{Name: "charge"}
			id, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(i))
			require.NoError(t, err)
			before := sqlOne[time.Time](t, db, `select statement_timestamp()`)
			var got error
			ran := db.RunOne(kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
				_, got = onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (string, error) {
					body, err := p.call(ctx, &onceqhttp.Transport{}, "POST", "/")
					if err == nil {
						require.Equal(t, c.body, body, "unread")
					}
					return "", err
				})
				return got
			}))
			var answered *onceqhttp.AnswerError
			if c.code == "-" {
				require.NoError(t, got)
				require.Equal(t, onceq.StateCompleted, ran.State)
				return
			}
			require.ErrorAs(t, got, &answered)
			require.Equal(t, onceqhttp.AnswerError{Status: c.status, Code: c.code, RetryAfter: c.delay}, *answered)
			require.Equal(t, c.uncertain, errors.Is(got, onceq.ErrUncertain))
			if c.fatal {
				require.Equal(t, onceq.StateDead, ran.State)
				return
			}
			info, err := db.Queue.Get(t.Context(), db.Pool, id.ID)
			require.NoError(t, err)
			if errors.Is(got, onceq.ErrInFlight) {
				require.Zero(t, info.Attempts, "no attempt is spent")
				require.Equal(t, 409, c.status)
			} else {
				require.Equal(t, 1, info.Attempts, "it failed")
			}
			require.GreaterOrEqual(t, info.RunAt.Sub(before), c.delay)
			require.Less(t, info.RunAt.Sub(before), c.delay+time.Minute)
			sqlRun(t, db, `update onceq.jobs set run_at = run_at + interval '1 year' where id = $1`, id.ID)
		})
	}
}

// A request without a key is left as it is: its answer does not become an error.
func TestTransport_LeavesOthersAlone(t *testing.T) {
	t.Parallel()
	p := provider(t)
	p.status, p.body = 409, `{"code": "IDEMPOTENCY_IN_FLIGHT"}`
	body, err := p.call(t.Context(), &onceqhttp.Transport{}, "POST", "/")
	require.NoError(t, err)
	require.Equal(t, p.body, body)
	_, err = p.call(t.Context(), &onceqhttp.Transport{}, "POST", "/", "Idempotency-Key", "mine")
	var answered *onceqhttp.AnswerError
	require.ErrorAs(t, err, &answered)
	require.NotContains(t, err.Error(), "mine")
	_, err = p.call(t.Context(), &onceqhttp.Transport{Base: failing{}}, "POST", "/", "Idempotency-Key", "mine")
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

type failing struct{}

func (failing) RoundTrip(*http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF }

// The client against the middleware, over the wire: first in flight, then the answer of the first request.
func TestTransport_AgainstTheMiddleware(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran, entered, gate := newRuns(), make(chan struct{}, 1), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) }) // even if the test fails: the server waits for its handlers
	defer open()
	s := serve(t, "POST /charges", middleware(t, db.Queue, onceqhttp.Config{Principal: onceqhttp.Public}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		entered <- struct{}{}
		<-gate
		ran.answering(201).ServeHTTP(w, r)
	})))
	charge := onceq.Kind[string]{Name: "charge"}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, charge.Job("{}"))
	require.NoError(t, err)
	client := &http.Client{Transport: &onceqhttp.Transport{Structured: true}}
	call := func(ctx context.Context, payload string) (string, error) {
		r, err := http.NewRequestWithContext(ctx, "POST", s.URL+"/charges", strings.NewReader(payload))
		if err != nil {
			return "", err
		}
		resp, err := client.Do(r)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return string(b) + resp.Header.Get("Idempotent-Replayed"), err
	}
	due := func() { sqlRun(t, db, `update onceq.jobs set run_at = statement_timestamp()`) } // does not let a lease expire
	impatient := make(chan context.CancelFunc, 3)
	payload := "{}"
	handler := charge.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		result, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (string, error) {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			impatient <- cancel
			return call(ctx, payload)
		})
		if err != nil {
			return err
		}
		return l.SetResult(result)
	})
	// The client of the first delivery hangs up before the answer.
	go func() {
		<-entered
		(<-impatient)()
	}()
	ended := make(chan queuetest.Ran, 1)
	go func() { ended <- db.RunOne(handler) }()
	first := receive(t, ended)
	require.ErrorIs(t, first.Err, onceq.ErrUncertain)
	due()
	second := db.RunOne(handler)
	require.ErrorContains(t, second.Err, onceqhttp.CodeInFlight)
	open()
	until(t, db, `exists (select from onceq.job_fences where class = 2 and state = 3)`)
	due()
	third := db.RunOne(handler)
	require.Equal(t, onceq.StateCompleted, third.State, third.Err)
	require.Equal(t, 1, ran.count())

	// The payload changes between two attempts.
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, charge.Job("{}"))
	require.NoError(t, err)
	failOnce := charge.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (string, error) {
			_, err := call(ctx, payload)
			return "", errors.Join(err, errors.New("lost the answer"))
		})
		return err
	})
	require.Equal(t, onceq.StateRetrying, db.RunOne(failOnce).State)
	receive(t, entered)
	payload = `{"changed": 1}`
	due()
	require.Equal(t, onceq.StateDead, db.RunOne(failOnce).State)
}
