package onceqhttp

import (
	"bytes"
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

// Transport is the client's side, for handlers of jobs, and of requests by Middleware.Handler, that call a provider:
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
// It adds the Idempotency-Key of what the request's context belongs to: of the effect in onceq.Once, whose fn makes one such
// request; and otherwise one that is made of the request's method and URL and of the claim in onceq.Do and in
// Middleware.Handler, or of the job's lease. So there is one such request for an effect, or, outside of effects, one for each
// method and URL: two of them, as "POST /customers" and "POST /charges", have two keys. A header that is there stays as it
// is; a handler whose policy is onceq.Ask sets it, to FenceLease.IdempotencyKey, which is what the policy gets. GET, HEAD, OPTIONS
// and TRACE, and requests whose context belongs to none of these, go through as they are. So do those of a handler of
// HandlerTx, which has no key that outlives a rollback: its provider belongs in a job.
//
// Answers about the key become errors, which do the right thing when a handler returns them and which fit Once:
//
//	in flight                          onceq.ErrInFlight: another delivery is at it and may succeed, so the effect is uncertain;
//	                                   the job runs again after Retry-After or half a second, and spends no attempt
//	mismatch                           onceq.Fatal: the payload has changed between two attempts
//	held, unknown                      the effect is uncertain: somebody at the provider has to find out
//	too large, unreadable              onceq.Fatal: the provider has no answer to give, however often it is asked; the effect
//	                                   is uncertain
//	429 with Retry-After               onceq.RetryAfter, onceq.NotApplied (see below)
//	503 with Retry-After               onceq.RetryAfter; the effect is uncertain
//
// An error before a connection was had (it was refused, the name was not found, TLS was not agreed on, the time was up) is
// onceq.NotApplied, for nothing was written: a provider that is out of reach leaves no effect uncertain. A connection that was had
// may have been written to, also one that was used before. Base has to report both to net/http/httptrace, as http.Transport does.
//
// onceq.NotApplied is said of everything that fn has done. So neither that error nor a 429 has it where fn has sent another
// request than GET, HEAD, OPTIONS and TRACE by a Transport before; what fn has done in another way, fn has to know. And
// http.Client.Timeout puts an error without it in its place: limit the dialer or the effect (onceq.EffectTimeout).
//
// They are recognised by the codes of this package, in problem+json or in {"error": {"code": …}}, and by Stripe's
// idempotency_key_in_use and idempotency_error. Each wraps an *AnswerError. All other answers are returned as they are. (That
// a RoundTripper does this is against its contract, which leaves the meaning of an answer to the caller. It is the point here: in no
// call can it be forgotten.)
type Transport struct {
	Base http.RoundTripper // default http.DefaultTransport

	// Structured sends the key as the draft says, in quotes. Default: without, as Stripe and most others expect it.
	Structured bool
}

// AnswerError is a provider's answer that was made an error.
type AnswerError struct {
	Status     int
	Code       string // of the body, where there is one
	RetryAfter time.Duration
}

func (e *AnswerError) Error() string {
	if e.Code == "" {
		return fmt.Sprintf("onceqhttp: answered with %d", e.Status)
	}
	return fmt.Sprintf("onceqhttp: answered with %d %s", e.Status, e.Code)
}

const (
	inFlightDelay = 500 * time.Millisecond // where the server names none
	maxProblem    = 64 << 10
)

// RoundTrip implements http.RoundTripper.
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
	resp, err := base.RoundTrip(s.begin(r))
	switch {
	case err != nil && s.asked.Load() && !s.connected.Load():
		return nil, s.notApplied(err)
	case err != nil || !keyed:
		return resp, err
	}
	return judge(resp, &s)
}

// keyed gives the request with its key, and whether it has one.
func (t *Transport) keyed(r *http.Request) (*http.Request, bool) {
	if hasKey(r.Header) {
		return r, true
	}
	key := downstream(r)
	if key == "" {
		return r, false
	}
	if t.Structured {
		key = `"` + key + `"` // of letters, digits and _: there is nothing to escape
	}
	r = r.Clone(r.Context())
	if r.Header == nil {
		r.Header = make(http.Header)
	}
	r.Header.Set(keyHeader, key)
	return r, true
}

// sending is what is known about a request on its way.
type sending struct {
	run              *atomic.Int64 // counts the requests of this run of an effect; nil where there is none
	counts           bool          // it is one of them
	asked, connected atomic.Bool   // for a connection; each time that was had, in tries of the base too, something may have been written to it
}

// begin gives the request to be sent.
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

// notApplied gives the error of a request that certainly did nothing. It is one of the whole effect where there is no other.
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

// unsent is an error that http.Client, which does not unwrap, can still ask for a time-out.
type unsent struct{ error }

func (e unsent) Unwrap() error { return e.error }

func (e unsent) Timeout() bool {
	var t interface{ Timeout() bool }
	return errors.As(e.error, &t) && t.Timeout()
}

// hasKey sees a name that was not written canonically too: it goes over the wire all the same.
func hasKey(h http.Header) bool {
	for name := range h {
		if strings.EqualFold(name, keyHeader) {
			return true
		}
	}
	return false
}

// downstream gives the key of what the request belongs to, or "".
func downstream(r *http.Request) string {
	c, l := onceq.FenceLeaseFromContext(r.Context()), onceq.LeaseFromContext(r.Context())
	switch {
	case c != nil && c.Name != "":
		return c.IdempotencyKey()
	case c == nil && l == nil, r.URL == nil: // without a URL net/http refuses it
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

// judge gives the answer, or the error that it means.
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

// meaning gives the error that an answer means whose body begins with head, or nil.
func meaning(resp *http.Response, head []byte, s *sending) error {
	var body struct {
		Code  string
		Error struct{ Code, Type string }
	}
	_ = json.Unmarshal(head, &body) // of another shape it says nothing
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

// inFlight is an answer that somebody else is at it: waiting for them is no failure.
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

// retryAfter reads Retry-After (RFC 9110, 10.2.3): seconds, or a date, which counts from the answer's own.
func retryAfter(resp *http.Response) (d time.Duration, named bool) {
	v := resp.Header.Get("Retry-After")
	if s, err := strconv.ParseUint(v, 10, 31); err == nil {
		return time.Duration(s) * time.Second, true
	}
	at, err := http.ParseTime(v)
	if err != nil {
		return 0, false
	}
	now, err := http.ParseTime(resp.Header.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return max(0, at.Sub(now)), true
}
