package onceqhttp

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/calls"
)

// Transport is the client's part. It is for handlers of jobs, and of requests through Middleware.Handler, that call a
// provider:
//
//	provider := &http.Client{Transport: &onceqhttp.Transport{}}
//
//	id, err := onceq.Once(ctx, lease, "charge", func(ctx context.Context, key string) (string, error) {
//		req, err := http.NewRequestWithContext(ctx, "POST", url, body)
//		…
//		resp, err := provider.Do(req) // with Idempotency-Key: key
//		…
//	})
//
// It adds an Idempotency-Key that follows from the request's context. In onceq.Once it is the key of the effect, so fn
// makes one such request. In onceq.Do and Middleware.Handler it is derived from the claim and the request's method and
// URL, and in the rest of a job's handler from the job's lease and the request's method and URL. So "POST /customers"
// and "POST /charges" have two keys. The query belongs to the URL: with a signature, a time or a random part in it, each
// run sends another key, and the provider does the work again. Use onceq.Once there, or set the header. A header that is
// already there is kept: a handler with the policy onceq.Ask sets
// it to FenceLease.IdempotencyKey, which is the key that the policy gets. GET, HEAD, OPTIONS and TRACE pass unchanged,
// and so do requests with any other context. Requests of a HandlerTx handler pass unchanged too, because no key there
// outlives a rollback: call the provider from a job instead.
//
// Answers about the key become errors. A handler can return them, and onceq.Once treats them correctly:
//
//	in flight                          onceq.ErrInFlight: another delivery is running and may succeed, so the effect is
//	                                   uncertain; the job runs again after Retry-After or half a second, and spends no attempt
//	mismatch                           onceq.Fatal: the payload has changed between two attempts
//	held, unknown                      the effect is uncertain: a person at the provider has to find out
//	too large, unreadable              onceq.Fatal: the provider has no answer to give, however often it is asked; the effect
//	                                   is uncertain
//	429 with Retry-After               onceq.RetryAfter, onceq.NotApplied (see below)
//	503 with Retry-After               onceq.RetryAfter; the effect is uncertain
//
// An error before there was a connection is onceq.NotApplied, because nothing was sent: the connection was refused, the
// name was not found, TLS failed, or the time was up. So a provider that is out of reach leaves no effect uncertain.
// Once there was a connection, something may have been sent, also if the connection was reused. Base must report both
// events to net/http/httptrace, as http.Transport does.
//
// onceq.NotApplied speaks for everything that fn has done. So an error before a connection, or a 429, is not NotApplied
// if fn has already sent another request through a Transport that is not GET, HEAD, OPTIONS or TRACE. Transport cannot
// see what fn has done in other ways; fn has to know that. http.Client.Timeout replaces the error by one that is not
// NotApplied: limit the dialer or the effect (onceq.EffectTimeout) instead.
//
// Transport recognises the codes of this package, in problem+json or in {"error": {"code": …}}, and Stripe's
// idempotency_key_in_use and idempotency_error. Each error wraps an *AnswerError. All other answers are returned
// unchanged. (The contract of http.RoundTripper leaves the meaning of an answer to the caller. Transport breaks it on
// purpose, so that no caller can forget to check.)
type Transport struct {
	Base http.RoundTripper // nil means http.DefaultTransport

	// Structured sends the key in quotes, as the draft says. Default false: without quotes, as Stripe and most others
	// expect it.
	Structured bool
}

// AnswerError is a provider's answer, as an error.
type AnswerError struct {
	Status     int
	Code       string // from the body, if it has one
	RetryAfter time.Duration
}

func (e *AnswerError) Error() string {
	if e.Code == "" {
		return fmt.Sprintf("onceqhttp: answered with %d", e.Status)
	}
	return fmt.Sprintf("onceqhttp: answered with %d %s", e.Status, e.Code)
}

const (
	inFlightDelay = 500 * time.Millisecond // if the server sends no Retry-After
	maxProblem    = 64 << 10
)

func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	base := t.Base
	if base == nil {
		base = http.DefaultTransport
	}
	s := sending{run: calls.From(r.Context())}
	keyed := false
	switch r.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
	default:
		s.counts = true
		r, keyed = t.keyed(r)
	}
	r = s.begin(r)
	if err := context.Cause(r.Context()); err != nil && s.run != nil { // base may say so without having asked for a connection
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, s.notApplied(err)
	}
	resp, err := base.RoundTrip(r)
	switch {
	case err != nil && s.asked.Load() && !s.connected.Load():
		return nil, s.notApplied(err)
	case err != nil || !keyed:
		return resp, err
	}
	return judge(resp, &s)
}

// keyed returns the request with its key, and whether it has one.
func (t *Transport) keyed(r *http.Request) (*http.Request, bool) {
	if hasKey(r.Header) {
		return r, true
	}
	key := downstream(r)
	if key == "" {
		return r, false
	}
	if t.Structured {
		key = `"` + key + `"` // the key consists of letters, digits and _: nothing to escape
	}
	r = r.Clone(r.Context())
	if r.Header == nil {
		r.Header = make(http.Header)
	}
	r.Header.Set(keyHeader, key)
	return r, true
}

// sending is what is known about one request.
type sending struct {
	run              *atomic.Int64 // counts the requests of this run of an effect; nil outside of effects
	counts           bool          // this request counts
	asked, connected atomic.Bool   // asked for a connection, and got one; once connected, something may have been sent, even if base retries
}

// begin returns the request to send.
func (s *sending) begin(r *http.Request) *http.Request {
	if s.run == nil {
		return r
	}
	if s.counts {
		s.run.Add(1)
	}
	return r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		GetConn: func(string) { s.asked.Store(true) },
		GotConn: func(httptrace.GotConnInfo) { s.connected.Store(true) },
	}))
}

// notApplied returns the error of a request that certainly did nothing. It is NotApplied only if the effect has sent no
// other request.
func (s *sending) notApplied(err error) error {
	if s.run == nil {
		return err
	}
	others := s.run.Load()
	if s.counts {
		others = s.run.Add(-1)
	}
	if others > 0 {
		return err
	}
	return unsent{onceq.NotApplied(err)}
}

// unsent lets http.Client, which does not unwrap, ask the error for a time-out.
type unsent struct{ error }

func (e unsent) Unwrap() error { return e.error }

func (e unsent) Timeout() bool {
	var t interface{ Timeout() bool }
	return errors.As(e.error, &t) && t.Timeout()
}

// hasKey also finds a name that is not in canonical form, because net/http sends it all the same.
func hasKey(h http.Header) bool {
	for name := range h {
		if strings.EqualFold(name, keyHeader) {
			return true
		}
	}
	return false
}

// downstream returns the key for the request, or "".
func downstream(r *http.Request) string {
	c, l := onceq.FenceLeaseFromContext(r.Context()), onceq.LeaseFromContext(r.Context())
	switch {
	case c != nil && c.Name != "":
		return c.IdempotencyKey()
	case c == nil && l == nil, r.URL == nil: // net/http refuses a request without a URL
		return ""
	}
	u := url.URL{Scheme: r.URL.Scheme, Host: r.URL.Host, Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery}
	request := r.Method + " " + u.String()
	if c == nil {
		return l.IdempotencyKey(request)
	}
	sum := sha256.Sum256([]byte(c.IdempotencyKey() + " " + request))
	return "oq_" + hex.EncodeToString(sum[:20])
}

// judge returns the answer, or the error that it means.
func judge(resp *http.Response, s *sending) (*http.Response, error) {
	switch resp.StatusCode {
	case http.StatusBadRequest, http.StatusConflict, http.StatusUnprocessableEntity, http.StatusTooManyRequests,
		http.StatusInternalServerError, http.StatusServiceUnavailable:
	default:
		return resp, nil
	}
	head, unread := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	if err := meaning(resp, head, s); err != nil {
		_ = resp.Body.Close()
		return nil, err
	}
	rest := io.Reader(resp.Body)
	if unread != nil {
		rest = failing{unread}
	}
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(head), rest), resp.Body}
	return resp, nil
}

// meaning returns the error that an answer means, or nil. head is the beginning of the answer's body.
func meaning(resp *http.Response, head []byte, s *sending) error {
	var body struct {
		Code  string
		Error struct{ Code, Type string }
	}
	_ = json.Unmarshal(head, &body) // a body of another shape leaves the fields empty
	if body.Code == "" {
		body.Code = body.Error.Code
	}
	delay, named := retryAfter(resp)
	e := &AnswerError{Status: resp.StatusCode, Code: body.Code, RetryAfter: delay}
	if resp.StatusCode == http.StatusInternalServerError {
		switch e.Code {
		case CodeUnknown:
			return e
		case CodeResponseTooLarge, CodeResponseUnreadable:
			return onceq.Fatal(e)
		}
		return nil
	}
	switch {
	case e.Code == CodeInFlight, e.Code == "idempotency_key_in_use":
		if !named {
			e.RetryAfter = inFlightDelay
		}
		return inFlight{e}
	case e.Code == CodeMismatch, body.Error.Type == "idempotency_error":
		return onceq.Fatal(e)
	case e.Code == CodeHeld:
		return e
	case resp.StatusCode == http.StatusTooManyRequests && named:
		return s.notApplied(onceq.RetryAfter(e.RetryAfter, e))
	case resp.StatusCode == http.StatusServiceUnavailable && named:
		return onceq.RetryAfter(e.RetryAfter, e)
	}
	return nil
}

// inFlight says that another delivery is running. Waiting for it is not a failure.
type inFlight struct{ *AnswerError }

func (e inFlight) Unwrap() error        { return e.AnswerError }
func (e inFlight) Is(target error) bool { return target == onceq.ErrInFlight }
func (e inFlight) As(target any) bool {
	t, ok := target.(**onceq.InFlightError)
	if ok {
		*t = &onceq.InFlightError{RetryAfter: e.RetryAfter}
	}
	return ok
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// maxRetryAfter is what onceq.DefaultBackoff waits at most. A server that names a longer time means something else, or is mistaken.
const maxRetryAfter = 24 * time.Hour

// retryAfter reads Retry-After (RFC 9110, 10.2.3): seconds, or a date, which is compared with the answer's own Date.
func retryAfter(resp *http.Response) (d time.Duration, named bool) {
	v := resp.Header.Get("Retry-After")
	if s, err := strconv.ParseUint(v, 10, 31); err == nil {
		return min(maxRetryAfter, time.Duration(s)*time.Second), true
	}
	at, err := http.ParseTime(v)
	if err != nil {
		return 0, false
	}
	now, err := http.ParseTime(resp.Header.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return min(maxRetryAfter, max(0, at.Sub(now))), true
}
