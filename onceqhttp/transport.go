package onceqhttp

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/onceq/onceq"
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
// It adds the Idempotency-Key of what the request's context belongs to: of the effect in onceq.Once, of the claim in onceq.Do
// and in Middleware.Handler, and otherwise of the job's lease, for which the request's method and URL name the effect.
// So there is one such request for an effect, or, outside of effects, one for each method and URL in a job. A header that
// is there stays as it is. GET, HEAD, OPTIONS and TRACE, and requests whose context belongs to none of these, go through as
// they are. So do those of a handler of HandlerTx, which has no key that outlives a rollback: its provider belongs in a job.
//
// Answers about the key become errors, which do the right thing when a handler returns them and which fit Once:
//
//	in flight                          onceq.RetryAfter, the delay from Retry-After or half a second: another delivery is at it
//	                                   and may succeed, so the effect is uncertain
//	mismatch                           onceq.Fatal: the payload has changed between two attempts
//	429 with Retry-After               onceq.RetryAfter, onceq.NotApplied
//	503 with Retry-After               onceq.RetryAfter; the effect is uncertain
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
	switch r.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return base.RoundTrip(r)
	}
	if !hasKey(r.Header) {
		key := downstream(r)
		if key == "" {
			return base.RoundTrip(r)
		}
		if t.Structured {
			key = `"` + key + `"` // of letters, digits and _: there is nothing to escape
		}
		r = r.Clone(r.Context())
		r.Header.Set(keyHeader, key)
	}
	resp, err := base.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	return judge(resp)
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
	ctx := r.Context()
	if c := onceq.ClaimFromContext(ctx); c != nil {
		return c.IdempotencyKey()
	}
	if l := onceq.LeaseFromContext(ctx); l != nil {
		u := url.URL{Scheme: r.URL.Scheme, Host: r.URL.Host, Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery}
		return l.IdempotencyKey(r.Method + " " + u.String())
	}
	return ""
}

// judge gives the answer, or the error that it means.
func judge(resp *http.Response) (*http.Response, error) {
	switch resp.StatusCode {
	case http.StatusBadRequest, http.StatusConflict, http.StatusUnprocessableEntity, http.StatusTooManyRequests, http.StatusServiceUnavailable:
	default:
		return resp, nil
	}
	head, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	var body struct {
		Code  string
		Error struct{ Code, Type string }
	}
	_ = json.Unmarshal(head, &body) // of another shape it says nothing
	if body.Code == "" {
		body.Code = body.Error.Code
	}
	e := &AnswerError{Status: resp.StatusCode, Code: body.Code}
	named := false
	e.RetryAfter, named = retryAfter(resp)
	switch {
	case e.Code == CodeInFlight, e.Code == "idempotency_key_in_use":
		if !named {
			e.RetryAfter = inFlightDelay
		}
		err = onceq.RetryAfter(e.RetryAfter, e)
	case e.Code == CodeMismatch, body.Error.Type == "idempotency_error":
		err = onceq.Fatal(e)
	case resp.StatusCode == http.StatusTooManyRequests && named:
		err = onceq.NotApplied(onceq.RetryAfter(e.RetryAfter, e))
	case resp.StatusCode == http.StatusServiceUnavailable && named:
		err = onceq.RetryAfter(e.RetryAfter, e)
	default:
		rest := io.Reader(resp.Body)
		if err != nil {
			rest = failing{err}
		}
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(head), rest), resp.Body}
		return resp, nil
	}
	_ = resp.Body.Close()
	return nil, err
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
