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
	"github.com/onceq/onceq/internal/guard"
)

// Outcome says what happens to a key after its handler has answered.
type Outcome int

const (
	Store   Outcome = iota // the answer is final: it is stored and replayed
	Release                // nothing was done: the answer is sent, and the key is free
	Unsure                 // nobody knows what was done: the answer is sent, and Config.Policy decides at the next request
)

// DefaultOutcome releases 401, 408, 421, 423, 425 and 429. With these statuses HTTP says that the request was not
// carried out and may be repeated unchanged, or with other headers that the fingerprint ignores. DefaultOutcome is
// Unsure of 5xx, and stores everything else. A handler that knows more about its 5xx calls Request.Committed or
// Request.NotApplied. With HandlerTx, Unsure acts as Release, because nothing was committed.
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
	maxMaxResponse     = 180 << 10 // with base64 and some headers the answer stays below onceq.MaxResultBytes
	defaultDocs        = "https://github.com/onceq/onceq/blob/main/docs/use/http.md"
)

// Config configures a Middleware. Principal is required. The defaults of all other fields are meant to be kept. Routes
// that need different settings get a Middleware each: New costs nothing.
//
// A panic of one of these functions goes on to the caller, as one of the handler does, and net/http logs it. Before the handler is
// called nothing is written. After it the key is uncertain, and with HandlerTx all is rolled back.
type Config struct {
	// Principal names who is asking, a tenant or a user, as the application has authenticated it. Keys of different
	// principals are independent. Principal is called for requests with a valid key, before the body is read. An error
	// or an empty name refuses the request with 403; to answer 401, put the authentication in front of this middleware.
	// If anybody may ask, use Public. Principal may parse a form. If it reads the body in another way, it must put it
	// back: r.Body = io.NopCloser(bytes.NewReader(body)). A request with a missing part of the body is refused with
	// 500, whether Principal or something before it has read that part.
	Principal func(*http.Request) (string, error)

	// Optional lets requests without a key through, as if there were no middleware. Default false: they are refused
	// with 400.
	Optional bool

	// Route names the route. A key is bound to the route and the method. The default is the request's Pattern, which
	// http.ServeMux and some other routers set. If http.StripPrefix has removed a prefix that the pattern lacks, the
	// prefix is put in front of the pattern's path: "POST /charges" below "/shop" becomes "POST /shop/charges". Without
	// a pattern it is the path.
	Route func(*http.Request) string

	// Fingerprint returns what must be the same when a key comes back: anything that encodes as JSON. Default
	// Fingerprint. A nil result compares nothing.
	Fingerprint func(r *http.Request, body []byte) any

	// Outcome decides by the status what happens to a key. Default DefaultOutcome.
	Outcome func(status int) Outcome

	// StoredHeader chooses by canonical name which headers of the handler's answer are stored. Default all. Never
	// stored are Set-Cookie, Date, headers of the connection, and headers that had the same value before the middleware
	// was called.
	StoredHeader func(name string) bool

	// MismatchStatus is the status for a key that was used for another request: 422 (the default, as the draft says) or
	// 409.
	MismatchStatus int

	// Docs is the URL, without a fragment, of the application's own documentation of its keys and how long they last,
	// which the draft asks for. Each Problem links to it, and its type is Docs + "#" + code. The default is this
	// project's page, which is then the type of every Problem.
	Docs string

	// Window says how long an answer is replayed, counted from when it was stored. See onceq.Job.Window. Default 24 h.
	// A key with an unknown outcome stays for 30 or 31 days after the last request with it, or for the window if that is
	// longer. An onceq.Reaper removes both.
	Window time.Duration

	// Timeout limits a handler, and a policy that asks before the handler runs. It counts from when the body has been
	// read. Nothing else cancels the handler's context, not even a client that leaves. Default 30 s; onceq.NoTimeout
	// means no limit.
	Timeout time.Duration

	// Lease says how long a key stays in flight after its process has died. It is extended while the handler runs.
	// Default onceq.DefaultLease. With HandlerTx the key is free as soon as Postgres notices that the connection has
	// ended.
	Lease time.Duration

	// Policy decides what happens to a request if the outcome of an earlier one is unknown. Default: the handler runs
	// again, for 24 h, under the same FenceLease.IdempotencyKey. That suits handlers whose effects are deduplicated by
	// that key; use onceq.Hold() for all others. HandlerTx leaves no unknown outcome, except that it holds the key of a
	// handler that ended the transaction. If HandlerTx finds an unknown outcome of Handler, it does not ask. Running
	// again for more than 30 days needs a Window that is as long.
	Policy onceq.Policy

	// MaxRequest and MaxResponse limit the bodies, in bytes. Defaults 512 KiB and 128 KiB; MaxResponse at most 180 KiB.
	MaxRequest, MaxResponse int

	// Logger gets the errors that the client is not told. Default slog.Default().
	Logger *slog.Logger
}

// Public is a Config.Principal for routes where all clients count as one. Anybody who knows a key and sends the same
// request gets its answer.
func Public(*http.Request) (string, error) { return "public", nil }

// Middleware makes requests happen once. It is safe for concurrent use.
type Middleware struct {
	q   *onceq.Queue
	cfg Config
}

// New checks the configuration. If it is invalid, the error is an *onceq.InvalidError.
func New(q *onceq.Queue, cfg Config) (*Middleware, error) {
	invalid := func(field, reason string) (*Middleware, error) {
		return nil, invalidError{&onceq.InvalidError{Field: "Config." + field, Reason: reason}}
	}
	if q == nil {
		return nil, invalidError{&onceq.InvalidError{Field: "Queue", Reason: "is nil"}}
	}
	if cfg.Principal == nil {
		return invalid("Principal", "is nil: set it to say who is asking, or set onceqhttp.Public if anybody may get anybody's answers")
	}
	if cfg.MismatchStatus == 0 {
		cfg.MismatchStatus = http.StatusUnprocessableEntity
	}
	if cfg.MismatchStatus != http.StatusUnprocessableEntity && cfg.MismatchStatus != http.StatusConflict {
		return invalid("MismatchStatus", fmt.Sprintf("is %d; use 422 or 409", cfg.MismatchStatus))
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.Timeout < 0 && cfg.Timeout != onceq.NoTimeout {
		return invalid("Timeout", "is negative; use onceq.NoTimeout for none")
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
		return invalid("MaxResponse", fmt.Sprintf("is %d; it must be between 0 and %d", cfg.MaxResponse, maxMaxResponse))
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
	cfg.Logger = guard.Logger(cfg.Logger)
	m := &Middleware{q, cfg}
	_, err := q.Fence(m.spec("scope", "key")) // checks the rest of the configuration
	var bad *onceq.InvalidError
	if errors.As(err, &bad) {
		err = invalidError{bad}
	}
	return m, err
}

// invalidError is an *onceq.InvalidError that says that this package made it.
type invalidError struct{ *onceq.InvalidError }

func (e invalidError) Error() string { return "onceqhttp: " + e.Field + " " + e.Reason }

func (e invalidError) Unwrap() error { return e.InvalidError }

func route(r *http.Request) string {
	path := requested(r)
	if r.Pattern == "" {
		return path
	}
	// Several muxes below different prefixes may have the same patterns.
	i := strings.IndexByte(r.Pattern, '/')
	prefix, ok := strings.CutSuffix(path, r.URL.EscapedPath())
	if !ok || i < 0 || strings.HasPrefix(r.Pattern[i:]+"/", strings.TrimSuffix(prefix, "/")+"/") {
		return r.Pattern
	}
	return r.Pattern[:i] + prefix + r.Pattern[i:]
}

// requested returns the path that the client asked for. http.StripPrefix and the like change r.URL.
func requested(r *http.Request) string {
	if u, err := url.ParseRequestURI(r.RequestURI); err == nil && u.Path != "" { // a proxy sends an absolute URI
		return u.EscapedPath()
	}
	return r.URL.EscapedPath()
}

// Request is what a handler knows about the key under which it runs.
type Request struct {
	Principal string
	Key       string // the client's key, as ParseKey returns it

	// Scope stands for principal, method and route. A job with this Scope and Key, or with Key and a suffix, is
	// enqueued once for the client's key, whatever happens to the request. Begin a suffix with a character that no key
	// contains, as in Key + "→mail". Keys are printable ASCII, so a client may send "1-mail" as well as "1".
	Scope string

	// Lease is the lease on the key's fence for this run. With Handler its IdempotencyKey is the same in each run, for
	// a provider that the handler calls directly; Transport derives a key from it for each call. With HandlerTx it is
	// good for this run only: a rollback undoes the claim, and the next run has another key. So put calls to a provider
	// into a job there.
	Lease *onceq.FenceLease

	committed, notApplied bool
}

// Committed says that something was done that must not be done again. From then on the answer is stored whatever its
// status, so a 5xx is replayed too. Call it in the handler's own goroutine. It has no meaning with HandlerTx.
func (r *Request) Committed() { r.committed, r.notApplied = true, false }

// NotApplied says that nothing was done. A 5xx then leaves the key free, whatever the policy. Call it in the handler's
// own goroutine. It has no meaning with HandlerTx.
func (r *Request) NotApplied() { r.notApplied = !r.committed }

type requestKey struct{}

// FromContext returns the Request that a handler runs for, or nil if it has no key.
func FromContext(ctx context.Context) *Request {
	r, _ := ctx.Value(requestKey{}).(*Request)
	return r
}

// Fence returns the fence of a client's key, for a person who decides about it: see onceq.Fence.Resolve and Response.
// route is what Config.Route returns; by default that is the registered pattern, as in "POST /orders/{id}", with a
// stripped prefix.
func (m *Middleware) Fence(principal, method, route, key string) (*onceq.Fence, error) {
	return m.q.Fence(m.spec(scope(principal, method, route), key))
}

func (m *Middleware) spec(scope, key string) onceq.FenceSpec {
	return onceq.FenceSpec{
		Class: onceq.ClassRequest, Scope: scope, Key: key,
		Window: m.cfg.Window, Lease: m.cfg.Lease, Policy: m.cfg.Policy,
	}
}

// scope contains a digest of all three. Method and route are also there in readable form.
func scope(principal, method, route string) string {
	h := sha256.New()
	for _, part := range []string{principal, method, route} {
		_, _ = fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	label := method + " " + strings.TrimPrefix(route, method+" ")
	label = strings.ToValidUTF8(strings.ReplaceAll(label[:min(len(label), 200)], "\x00", ""), "")
	return label + " " + hex.EncodeToString(h.Sum(nil)[:16])
}

// admitted is a request that has passed all checks and may run once.
type admitted struct {
	*Request
	r     *http.Request
	body  []byte
	spec  onceq.FenceSpec
	fence *onceq.Fence
}

// in returns the request for the handler, with its body at the beginning.
func (a *admitted) in(ctx context.Context) *http.Request {
	return withBody(a.r.WithContext(context.WithValue(ctx, requestKey{}, a.Request)), a.body)
}

func withBody(r *http.Request, body []byte) *http.Request {
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return r
}

// removeFiles removes the files of a form that the handler has parsed. net/http does that only for its own request,
// outer; in is a copy.
func removeFiles(in, outer *http.Request) {
	if in.MultipartForm != nil && in.MultipartForm != outer.MultipartForm {
		_ = in.MultipartForm.RemoveAll()
	}
}

// copied returns a request whose body the middleware may replace. net/http looks at the body of its own request when the
// answer begins: with another one there it does not know that the client still waits for 100 Continue, and waits for the
// body in its turn.
func copied(r *http.Request) *http.Request {
	if r.Body == nil { // the request was not made by a server
		r.Body = http.NoBody
	}
	return r.WithContext(r.Context())
}

// admit checks everything that needs no database. If a is nil, admit has answered the request, or, if plain is set, the
// request runs as if there were no middleware. r is a copy of the server's request.
func (m *Middleware) admit(w http.ResponseWriter, r *http.Request) (a *admitted, plain bool) {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return nil, true // safe methods (RFC 9110, 9.2.1) have no effect to protect
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
	r.Body = http.MaxBytesReader(w, r.Body, int64(m.cfg.MaxRequest)) // before Principal, which may parse a form
	principal, err := m.cfg.Principal(r)
	if err != nil || principal == "" {
		if err != nil {
			m.log(r, "no principal", err)
		}
		m.problem(w, http.StatusForbidden, CodeNoPrincipal, "The sender of the request is unknown",
			"An Idempotency-Key is bound to its sender, and this request does not say who that is.")
		return nil, false
	}
	body, ok := m.body(w, r, "The body of a request with an Idempotency-Key")
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
		// JSON that jsonb cannot store, or that is too large for it, is compared byte by byte.
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

// body reads the whole body before the request takes a connection or a claim, so a slow client blocks nobody. If it
// fails, it has answered the request. what is the subject of the sentence about the limit.
func (m *Middleware) body(w http.ResponseWriter, r *http.Request, what string) (body []byte, ok bool) {
	err := error(&http.MaxBytesError{})
	if r.ContentLength <= int64(m.cfg.MaxRequest) { // a client that waits for 100 Continue need not send the rest
		body, err = io.ReadAll(r.Body)
	}
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

// deadline returns the context of a handler.
func (m *Middleware) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if m.cfg.Timeout < 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, m.cfg.Timeout)
}

func (m *Middleware) log(r *http.Request, what string, err error) {
	m.cfg.Logger.ErrorContext(r.Context(), "onceqhttp: "+what, "method", r.Method, "route", m.cfg.Route(r), "error", err)
}

// errNotStored tells onceq.Do that the handler's answer is not to be stored.
var errNotStored = errors.New("the handler's answer is not stored")

// Handler runs h once for each key. The package comment says when to use HandlerTx instead.
//
// After a panic the key is uncertain, and the panic goes on to the caller.
func (m *Middleware) Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		own := copied(r)
		defer removeFiles(own, r)
		a, plain := m.admit(w, own)
		if plain {
			h.ServeHTTP(w, r)
		}
		if a == nil {
			return
		}
		var first *Response // the answer of this run
		tooLarge := false
		ctx, cancel := m.deadline(context.WithoutCancel(r.Context())) // limits a policy that asks, too
		defer cancel()
		stored, err := onceq.Do(ctx, m.q, a.spec, func(ctx context.Context, c *onceq.FenceLease) (*Response, error) {
			a.Lease = c
			rec := newRecorder(w.Header(), m.cfg.MaxResponse)
			in := a.in(ctx)
			defer removeFiles(in, own)
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
		case errors.Is(err, onceq.ErrLeaseLost): // another request runs it again, or has: its answer counts
			m.inFlight(w, 0)
		case tooLarge && errors.Is(err, errNotStored): // the key stays uncertain, and the answer is too large for this client too
			m.uncertain(w)
		case tooLarge, errors.As(err, &invalid):
			m.responseTooLarge(w, workDone)
		default:
			if err != nil && !errors.Is(err, errNotStored) {
				m.log(r, "the answer could not be stored", err) // still send it: otherwise the client would repeat the request
			}
			first.replace(w, r)
		}
	})
}

const workDone = "The request was carried out. Do not repeat it with another key."

// answer answers a request whose handler did not run.
func (m *Middleware) answer(w http.ResponseWriter, r *http.Request, stored *Response, err error) {
	var inFlight *onceq.InFlightError
	var invalid *onceq.InvalidError
	switch {
	case err == nil && stored == nil: // resolved by a person, without an answer
		stored = &Response{}
		fallthrough
	case err == nil && !stored.lost:
		w.Header().Set(replayedHeader, "true")
		stored.send(w, r)
	case err == nil:
		m.responseTooLarge(w, workDone)
	case errors.Is(err, onceq.ErrUncertain): // first, because it wraps what an Ask returned
		m.uncertain(w)
	case errors.As(err, &invalid):
		m.responseTooLarge(w, workDone)
	case errors.Is(err, errUndecodable):
		m.log(r, "the stored answer cannot be read", err)
		m.problem(w, http.StatusInternalServerError, CodeResponseUnreadable, "The stored answer cannot be read", workDone)
	case errors.As(err, &inFlight):
		m.inFlight(w, inFlight.RetryAfter)
	case errors.Is(err, onceq.ErrLeaseLost): // another request has the key by now
		m.inFlight(w, 0)
	case errors.Is(err, onceq.ErrMismatch):
		m.problem(w, m.cfg.MismatchStatus, CodeMismatch, "Idempotency-Key was used for another request",
			"A key stands for one request, unchanged. Use a new key for another one.")
	case errors.Is(err, onceq.ErrHeld):
		m.problem(w, http.StatusConflict, CodeHeld, "It is not known whether the request was carried out",
			"Somebody has to find out and decide. With another key it might be carried out twice.")
	default:
		m.log(r, "the key could not be claimed", err)
		m.unavailable(w, true)
	}
}
