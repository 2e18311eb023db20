package onceqhttp

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/onceq/onceq"
)

// Outcome is what becomes of a key when its handler has answered.
type Outcome int

const (
	Store   Outcome = iota // the answer is the answer: it is stored and replayed
	Release                // nothing was done: the answer goes out, and the key is free
	Unsure                 // nobody knows what was done: the answer goes out, and Config.Policy decides at the next request
)

// DefaultOutcome releases the statuses by which HTTP says that the request was not carried out and may be repeated as it is, or
// with headers that do not count: 401, 408, 421, 423, 425 and 429. It is unsure of 5xx, and stores everything else. A handler
// that knows better about its 5xx says so: Request.Committed, Request.NotApplied. With HandlerTx unsure is released, for nothing
// was committed.
func DefaultOutcome(status int) Outcome {
	switch status {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusMisdirectedRequest, http.StatusLocked, http.StatusTooEarly, http.StatusTooManyRequests:
		return Release
	}
	if status >= 500 {
		return Unsure
	}
	return Store
}

const (
	defaultTimeout     = 30 * time.Second
	defaultMaxRequest  = 512 << 10
	defaultMaxResponse = 128 << 10
	maxMaxResponse     = 180 << 10 // base64 and some headers beside it stay below onceq.MaxResultBytes
	defaultDocs        = "https://github.com/onceq/onceq/blob/main/docs/http.md"
)

// Config configures a Middleware. Principal is required; the rest has defaults that are meant to be left alone. Routes that
// differ get a Middleware each: New costs nothing.
type Config struct {
	// Principal names who is asking, a tenant or a user, as the application's authentication found out: keys of
	// different principals have nothing to do with each other. It is called for requests that have a valid key, before the
	// body is read. An error or an empty name refuses the request with 403: whoever should get a 401 must get it
	// from the authentication that stands before this. Where everybody may ask, say so with Public. It may parse a form. What it
	// reads of the body in another way it puts back, as r.Body = io.NopCloser(bytes.NewReader(body)): a request of whose
	// body a part is missing is refused with 500, here and where somebody else has read it before.
	Principal func(*http.Request) (string, error)

	// Optional lets requests without a key through, as if there were no middleware. Default: they are refused with 400.
	Optional bool

	// Route names the route, which a key is bound to together with the method. Default: the request's Pattern, which
	// http.ServeMux and some other routers set, with what http.StripPrefix took before that in front of its path, where it
	// is not there already: with "POST /charges" below "/shop", it is "POST /shop/charges". Where there is no pattern it is
	// the path.
	Route func(*http.Request) string

	// Fingerprint gives what must be the same when a key comes back: anything that encodes as JSON. Default Fingerprint. nil
	// compares nothing.
	Fingerprint func(r *http.Request, body []byte) any

	// Outcome decides by the status what becomes of a key. Default DefaultOutcome.
	Outcome func(status int) Outcome

	// StoredHeader chooses the headers of the handler's answer that are stored, by canonical name. Default all. Never stored
	// are Set-Cookie, Date, those of the connection, and those that are as they were before the middleware was called.
	StoredHeader func(name string) bool

	// MismatchStatus answers a key that was used for another request: 422 as the draft says, the default, or 409.
	MismatchStatus int

	// Docs is the URL, without a fragment, of the application's own words about keys and for how long they last, which the draft
	// asks for. Each Problem links to it, and its type is Docs + "#" + code. Default: this project's, which is the type of all.
	Docs string

	// Window is for how long an answer is replayed, from when it was stored. See onceq.Job.Window. Default 24 h. A key whose outcome is
	// unknown stays for 30 days after somebody has asked for it, or for the window where that is longer. An onceq.Reaper removes both.
	Window time.Duration

	// Timeout ends the context of a handler, and before it that of a policy that asks, counted from when the body has been
	// read. Nothing else does: also not a client that leaves. Default 30 s; onceq.NoTimeout for none.
	Timeout time.Duration

	// Lease is for how long a key stays in flight when its process has died. It is extended while the handler runs. Default
	// onceq.DefaultLease. With HandlerTx the key is free as soon as Postgres has seen the connection end.
	Lease time.Duration

	// Policy decides what a request gets whose predecessor's outcome is unknown. Default: it runs again, for 24 h, under the
	// same FenceLease.IdempotencyKey, for handlers whose effects are deduplicated by that; onceq.Hold() for all others. HandlerTx
	// leaves no such outcome, and holds what a handler did that ended its transaction; where it finds an outcome of Handler's that
	// is unknown, it does not ask. To run again for more than 30 days wants a Window that is as long.
	Policy onceq.Policy

	// MaxRequest and MaxResponse limit the bodies, in bytes. Defaults 512 KiB and 128 KiB; MaxResponse at most 180 KiB.
	MaxRequest, MaxResponse int

	// Logger receives what the client is not told. Default slog.Default().
	Logger *slog.Logger
}

// Public is a Config.Principal for routes where everybody is the same: whoever knows a key and sends the same request gets
// its answer.
func Public(*http.Request) (string, error) { return "public", nil }

// Middleware makes requests happen once. It is safe for concurrent use.
type Middleware struct {
	q   *onceq.Queue
	cfg Config
}

// New checks the configuration; what is wrong with it is an *onceq.InvalidError.
func New(q *onceq.Queue, cfg Config) (*Middleware, error) {
	invalid := func(field, reason string) (*Middleware, error) {
		return nil, &onceq.InvalidError{Field: "Config." + field, Reason: reason}
	}
	if q == nil {
		return nil, &onceq.InvalidError{Field: "Queue", Reason: "is nil"}
	}
	if cfg.Principal == nil {
		return invalid("Principal", "is nil: say who is asking, or onceqhttp.Public where everybody may have everybody's answers")
	}
	if cfg.MismatchStatus == 0 {
		cfg.MismatchStatus = http.StatusUnprocessableEntity
	}
	if cfg.MismatchStatus != http.StatusUnprocessableEntity && cfg.MismatchStatus != http.StatusConflict {
		return invalid("MismatchStatus", fmt.Sprintf("is %d; 422 and 409 are possible", cfg.MismatchStatus))
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.MaxRequest == 0 {
		cfg.MaxRequest = defaultMaxRequest
	}
	if cfg.MaxResponse == 0 {
		cfg.MaxResponse = defaultMaxResponse
	}
	if cfg.MaxRequest < 0 {
		return invalid("MaxRequest", "is negative")
	}
	if cfg.MaxResponse < 0 || cfg.MaxResponse > maxMaxResponse {
		return invalid("MaxResponse", fmt.Sprintf("is %d; up to %d is possible", cfg.MaxResponse, maxMaxResponse))
	}
	if cfg.Route == nil {
		cfg.Route = route
	}
	if cfg.Outcome == nil {
		cfg.Outcome = DefaultOutcome
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	m := &Middleware{q, cfg}
	_, err := q.Fence(m.spec("scope", "key")) // the rest of the configuration
	return m, err
}

func route(r *http.Request) string {
	path := requested(r)
	if r.Pattern == "" {
		return path
	}
	// Several muxes may lie below prefixes, with the same patterns.
	i := strings.IndexByte(r.Pattern, '/')
	prefix, ok := strings.CutSuffix(path, r.URL.EscapedPath())
	if !ok || i < 0 || strings.HasPrefix(r.Pattern[i:], prefix) {
		return r.Pattern
	}
	return r.Pattern[:i] + prefix + r.Pattern[i:]
}

// requested gives the path that the client asked for: http.StripPrefix and the like change r.URL.
func requested(r *http.Request) string {
	if u, err := url.ParseRequestURI(r.RequestURI); err == nil && u.Path != "" { // it may be absolute, from a proxy
		return u.EscapedPath()
	}
	return r.URL.EscapedPath()
}

// Request is what a handler can know about the key under which it runs.
type Request struct {
	Principal string
	Key       string // the client's, as ParseKey gives it

	// Scope stands for principal, method and route. A job with this Scope and Key, or with Key and a suffix, is enqueued
	// once for the client's key, whatever becomes of the request. A suffix begins with a character that no key has, as in
	// Key + "→mail": keys are printable ASCII, and a client may send "1-mail" beside "1".
	Scope string

	// Claim is the fence of this run. With Handler its IdempotencyKey, the same in each run, is for a provider that is called
	// at once; Transport makes one of it for each call. With HandlerTx it is good for this run only: a rollback undoes the claim, and the next run has another key. There
	// a provider belongs in a job.
	Claim *onceq.FenceLease

	committed, notApplied bool
}

// Committed says that something was done that must not be done again: from here on the answer is stored whatever its status,
// so that a 5xx is replayed too. Call it in the handler's own goroutine. It has no meaning with HandlerTx.
func (r *Request) Committed() { r.committed, r.notApplied = true, false }

// NotApplied says that nothing was done: a 5xx leaves the key free, whatever the policy. Call it in the handler's own
// goroutine. It has no meaning with HandlerTx.
func (r *Request) NotApplied() { r.notApplied = !r.committed }

type requestKey struct{}

// FromContext returns the Request that a handler runs for, or nil for one without a key.
func FromContext(ctx context.Context) *Request {
	r, _ := ctx.Value(requestKey{}).(*Request)
	return r
}

// Fence is the fence of a client's key, for the person who has to decide about it: see onceq.Fence.Resolve, Response. route
// is what Config.Route gives, by default the pattern as it was registered: "POST /orders/{id}"; see there for prefixes.
func (m *Middleware) Fence(principal, method, route, key string) (*onceq.Fence, error) {
	return m.q.Fence(m.spec(scope(principal, method, route), key))
}

func (m *Middleware) spec(scope, key string) onceq.FenceSpec {
	return onceq.FenceSpec{
		Class: onceq.ClassRequest, Scope: scope, Key: key,
		Window: m.cfg.Window, Lease: m.cfg.Lease, Policy: m.cfg.Policy,
	}
}

// scope contains all three in a digest, and method and route once more, to be read.
func scope(principal, method, route string) string {
	h := sha256.New()
	for _, part := range []string{principal, method, route} {
		_, _ = fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	label := method + " " + strings.TrimPrefix(route, method+" ")
	label = strings.ToValidUTF8(strings.ReplaceAll(label[:min(len(label), 200)], "\x00", ""), "")
	return label + " " + hex.EncodeToString(h.Sum(nil)[:16])
}

// admitted is a request that may run, once.
type admitted struct {
	*Request
	r     *http.Request
	body  []byte
	spec  onceq.FenceSpec
	fence *onceq.Fence
}

// in gives the request for the handler, with its body from the beginning.
func (a *admitted) in(ctx context.Context) *http.Request {
	return withBody(a.r.WithContext(context.WithValue(ctx, requestKey{}, a.Request)), a.body)
}

func withBody(r *http.Request, body []byte) *http.Request {
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return r
}

// removeFiles removes the files of a form that the handler has parsed. net/http does so for its own request, outer, and in
// is a copy.
func removeFiles(in, outer *http.Request) {
	if in.MultipartForm != nil && in.MultipartForm != outer.MultipartForm {
		_ = in.MultipartForm.RemoveAll()
	}
}

// admit checks everything that needs no database. A nil a is a request that was answered, or, where plain is set, one that
// runs as if there were no middleware.
func (m *Middleware) admit(w http.ResponseWriter, r *http.Request) (a *admitted, plain bool) {
	if r.Body == nil { // no server made it
		r.Body = http.NoBody
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return nil, true // safe (RFC 9110, 9.2.1): there is nothing to happen once
	}
	key, keyErr := ParseKey(r.Header)
	if m.cfg.Optional && errors.Is(keyErr, ErrKeyMissing) {
		return nil, true
	}
	var bad *KeyError
	switch {
	case errors.As(keyErr, &bad):
		m.problem(w, http.StatusBadRequest, CodeKeyInvalid, "Idempotency-Key is invalid", keyHeader+" "+bad.Reason+".")
		return nil, false
	case keyErr != nil:
		m.problem(w, http.StatusBadRequest, CodeKeyMissing, "Idempotency-Key is missing",
			`This operation needs a key that is unique to it, such as Idempotency-Key: "8e03978e-40d5-43e8-bc93-6894a57f9324".`)
		return nil, false
	}
	r.Body = http.MaxBytesReader(w, r.Body, int64(m.cfg.MaxRequest)) // for a Principal that parses a form, too
	principal, err := m.cfg.Principal(r)
	if err != nil || principal == "" {
		if err != nil {
			m.log(r, "no principal", err)
		}
		m.problem(w, http.StatusForbidden, CodeNoPrincipal, "The request belongs to nobody",
			"An Idempotency-Key is bound to who sends it, and this request does not say.")
		return nil, false
	}
	body, ok := m.body(w, r, "With an Idempotency-Key its body")
	if !ok {
		return nil, false
	}
	a = &admitted{Request: &Request{Principal: principal, Key: key, Scope: scope(principal, r.Method, m.cfg.Route(r))}, r: r, body: body}
	a.spec = m.spec(a.Scope, key)
	switch {
	case readBefore(r, body):
		err = errReadBefore
	case m.cfg.Fingerprint != nil:
		a.spec.Payload = m.cfg.Fingerprint(r, body)
		a.fence, err = m.q.Fence(a.spec)
	default:
		a.spec.Payload = Fingerprint(r, body)
		// JSON that jsonb does not store, or too much of it, is compared byte by byte.
		var invalid *onceq.InvalidError
		if a.fence, err = m.q.Fence(a.spec); errors.As(err, &invalid) {
			a.spec.Payload = fingerprint(r, body, false)
			a.fence, err = m.q.Fence(a.spec)
		}
	}
	if err != nil {
		m.log(r, "the fingerprint cannot be used", err)
		m.problem(w, http.StatusInternalServerError, CodeUnavailable, "The request could not be recorded", "Nothing was done.")
		return nil, false
	}
	return a, false
}

// body reads the whole body, before anything is taken for it: a slow client keeps nothing from anybody. Where that is not
// possible it has answered. what begins the sentence about the limit.
func (m *Middleware) body(w http.ResponseWriter, r *http.Request, what string) (body []byte, ok bool) {
	body, err := io.ReadAll(r.Body)
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		m.problem(w, http.StatusRequestEntityTooLarge, CodeRequestTooLarge, "The request is too large",
			fmt.Sprintf("%s has at most %d bytes.", what, m.cfg.MaxRequest))
		return nil, false
	case err != nil:
		m.problem(w, http.StatusBadRequest, CodeUnreadable, "The request could not be read", "Its body ended too early.")
		return nil, false
	}
	return body, true
}

// deadline gives the context of a request.
func (m *Middleware) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if m.cfg.Timeout < 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, m.cfg.Timeout)
}

func (m *Middleware) log(r *http.Request, what string, err error) {
	m.cfg.Logger.ErrorContext(r.Context(), "onceqhttp: "+what, "method", r.Method, "route", m.cfg.Route(r), "error", err)
}

// errNotStored is how a handler's answer that is not to be stored goes through onceq.Do.
var errNotStored = errors.New("the handler's answer is not stored")

// Handler runs h once for each key. See the package for when to use HandlerTx in its place.
//
// A panic goes on to whoever stands before the middleware, and the key is uncertain.
func (m *Middleware) Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, plain := m.admit(w, r)
		if plain {
			h.ServeHTTP(w, r)
		}
		if a == nil {
			return
		}
		var first *Response // this run's
		tooLarge := false
		ctx, cancel := m.deadline(context.WithoutCancel(r.Context())) // also of a policy that asks
		defer cancel()
		stored, err := onceq.Do(ctx, m.q, a.spec, func(ctx context.Context, c *onceq.FenceLease) (*Response, error) {
			a.Claim = c
			rec := newRecorder(w.Header(), m.cfg.MaxResponse)
			in := a.in(ctx)
			defer removeFiles(in, r)
			h.ServeHTTP(rec, in)
			var stored *Response
			first, stored = rec.response(m.cfg.StoredHeader)
			tooLarge = rec.tooLarge
			outcome := m.cfg.Outcome(first.Status)
			switch {
			case a.committed:
				outcome = Store
			case a.notApplied && outcome == Unsure:
				outcome = Release
			}
			switch {
			case outcome == Release:
				return nil, onceq.NotApplied(errNotStored)
			case outcome == Unsure:
				return nil, fmt.Errorf("%w: %d", errNotStored, first.Status)
			case tooLarge:
				return &Response{lost: true}, nil
			}
			return stored, nil
		})
		var invalid *onceq.InvalidError
		switch {
		case first == nil:
			m.answer(w, r, stored, err)
		case errors.Is(err, onceq.ErrLeaseLost): // somebody else runs it again, or has: that answer is the one
			m.inFlight(w, 0)
		case tooLarge && errors.Is(err, errNotStored): // not even this client can have it
			m.uncertain(w)
		case tooLarge, errors.As(err, &invalid):
			m.responseTooLarge(w, workDone)
		default:
			if err != nil && !errors.Is(err, errNotStored) {
				m.log(r, "the answer could not be stored", err) // true all the same: better than to make the client repeat it
			}
			first.replace(w, r)
		}
	})
}

const workDone = "The request was carried out. Do not repeat it with another key."

// answer is for a request whose handler did not run.
func (m *Middleware) answer(w http.ResponseWriter, r *http.Request, stored *Response, err error) {
	var inFlight *onceq.InFlightError
	var invalid *onceq.InvalidError
	switch {
	case err == nil && stored == nil: // resolved by hand, with nothing
		stored = &Response{}
		fallthrough
	case err == nil && !stored.lost:
		w.Header().Set(replayedHeader, "true")
		stored.send(w, r)
	case err == nil, errors.As(err, &invalid):
		m.responseTooLarge(w, workDone)
	case errors.Is(err, errUndecodable):
		m.log(r, "the stored answer cannot be read", err)
		m.problem(w, http.StatusInternalServerError, CodeResponseUnreadable, "The stored answer cannot be read", workDone)
	case errors.As(err, &inFlight):
		m.inFlight(w, inFlight.RetryAfter)
	case errors.Is(err, onceq.ErrLeaseLost): // somebody else decides by now
		m.inFlight(w, 0)
	case errors.Is(err, onceq.ErrMismatch):
		m.problem(w, m.cfg.MismatchStatus, CodeMismatch, "Idempotency-Key was used for another request",
			"A key stands for one request, unchanged. Use a new key for another one.")
	case errors.Is(err, onceq.ErrHeld):
		m.problem(w, http.StatusConflict, CodeHeld, "It is not known whether the request was carried out",
			"Somebody has to find out and decide. With another key it might be carried out twice.")
	case errors.Is(err, onceq.ErrUncertain):
		m.uncertain(w)
	default:
		m.log(r, "the key could not be claimed", err)
		m.unavailable(w, true)
	}
}
