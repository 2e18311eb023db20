package queuetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/onceq/onceq"
)

// Effect is something that happened outside the database, at the provider, in a run of Prove.
type Effect struct {
	What  string // "POST api.example.com/charges", or the name given to Process.Effect
	Key   string // the key by which the provider recognises a repetition; "" for none
	Calls int    // the number of calls for it, repetitions included
}

// call is a call that reached the provider.
type call struct {
	Effect
	process string
	job     int64
	attempt int
	token   int64
	once    effect // of onceq.Once, if the call was made in one
	counted bool   // it had an effect: it was not a repetition or a question
	late    bool   // its process had been frozen, and its context (not the handler's) did not stop it
}

// provider is the outside world of one run. What has reached it stays, even if the process dies.
type provider struct {
	handler http.Handler
	dedup   bool

	mu      sync.Mutex
	calls   []call
	effects []Effect
	made    map[string]int       // number of effects, by their What
	answers map[string]*answered // effects by their key, or by what else marks a repetition
	given   []answer             // to the first call of each effect
	other   []string             // keys that came back with another body, once each
	shared  []call               // calls that used another job's key
}

// provider makes the outside world of a run.
func (v *prover) provider() *provider {
	p := &provider{handler: v.Provider, dedup: !v.NoDedup, made: make(map[string]int), answers: make(map[string]*answered)}
	if v.NewProvider != nil {
		p.handler = v.NewProvider()
	}
	return p
}

// answered is an effect's first call and its answer.
type answered struct {
	effect int // index in effects
	job    int64
	sum    string
	answer answer
}

type answer struct {
	code   int
	header http.Header
	body   []byte
}

// take handles a call.
func (v *provider) take(c call, req request) answer {
	v.mu.Lock()
	defer v.mu.Unlock()
	c.Calls = 1
	at := ""
	switch {
	case req.safe:
	case v.dedup && c.Key != "":
		at = c.What + "\x00" + c.Key
	default:
		at = req.same
	}
	first := v.answers[at]
	if first == nil {
		a := v.answer(c, req)
		if c.counted = !req.safe && a.code < 400; c.counted {
			v.effects = append(v.effects, c.Effect)
			v.given = append(v.given, a)
			v.made[c.What]++
			if at != "" {
				v.answers[at] = &answered{len(v.effects) - 1, c.job, req.sum, a}
			}
		}
		v.calls = append(v.calls, c)
		return a
	}
	v.effects[first.effect].Calls++
	v.calls = append(v.calls, c)
	switch {
	case at == req.same && v.handler != nil:
		return v.answer(c, req) // a server carries out a repeatable request again, and answers accordingly
	case at == req.same:
		return first.answer
	case first.job != c.job:
		v.shared = append(v.shared, c)
	}
	if first.sum != req.sum {
		if !slices.Contains(v.other, c.What) {
			v.other = append(v.other, c.What)
		}
		return answer{http.StatusUnprocessableEntity, http.Header{}, []byte("this idempotency key was used with another body")}
	}
	return first.answer
}

// answer asks the proof's own provider, or makes an id that is the same for the same effect in every run.
func (v *provider) answer(c call, req request) answer {
	w := httptest.NewRecorder()
	switch {
	case req.Request == nil:
	case v.handler != nil:
		v.handler.ServeHTTP(w, req.Request)
	case req.about != "":
		i := slices.IndexFunc(v.effects, func(e Effect) bool { return e.Key == req.about || strings.Contains(e.What, req.about) })
		if i >= 0 {
			return v.given[i]
		}
		w.WriteHeader(http.StatusNotFound)
	default:
		w.Header().Set("Content-Type", "application/json")
		n := v.made[c.What] + 1
		if req.safe {
			n = 1
		}
		sum := sha256.Sum256(fmt.Append(nil, c.What, n))
		_, _ = fmt.Fprintf(w, `{"id":"id_%x"}`, sum[:6])
	}
	return answer{w.Code, w.Result().Header, w.Body.Bytes()}
}

// A goroutine of the handler's may make calls after the run has ended, so these return copies.

func (v *provider) happened() []Effect {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.effects)
}

func (v *provider) reached() []call {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.calls)
}

// changed returns what was called again with its key and another body.
func (v *provider) changed() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.other)
}

// mixed returns the calls that used another job's key.
func (v *provider) mixed() []call {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.shared)
}

// refuses reports whether a key came back with another body: such a run never ends.
func (v *provider) refuses() bool { return len(v.changed()) > 0 }

// transport is a process's http.RoundTripper.
type transport struct{ p *Process }

func (t transport) RoundTrip(req *http.Request) (*http.Response, error) {
	var body []byte
	if req.Body != nil {
		var err error
		body, err = io.ReadAll(req.Body)
		_ = req.Body.Close()
		if err != nil {
			return nil, err
		}
	}
	host := req.URL.Host
	if req.Host != "" {
		host = req.Host
	}
	what := req.Method + " " + host + req.URL.Path
	out := req.Clone(context.WithoutCancel(req.Context()))
	out.Body, out.RequestURI = io.NopCloser(bytes.NewReader(body)), req.URL.RequestURI()
	asked := t.p.run.v.read(out, body)
	a, err := t.p.call(req.Context(), what, asked.key, asked)
	if err != nil {
		return nil, err
	}
	return &http.Response{
		Status: fmt.Sprintf("%d %s", a.code, http.StatusText(a.code)), StatusCode: a.code,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: a.header.Clone(), Body: io.NopCloser(bytes.NewReader(a.body)), ContentLength: int64(len(a.body)), Request: req,
	}, nil
}

// Effect is a call to the outside that does not use HTTP. Call it in the test's double of a mailer, a printer or a
// broker. what describes the call, as in "mail to ada@example.com". key is what the outside recognises a repetition by,
// or "". If Effect returns an error, the call was not made or its answer was lost; the double should return that error.
func (p *Process) Effect(ctx context.Context, what, key string) error {
	_, err := p.call(ctx, what, key, request{})
	return err
}

func (p *Process) call(ctx context.Context, what, key string, req request) (answer, error) {
	s := step{text: "call " + what, words: what, what: what, role: roleCall, first: true, http: req.Request != nil}
	s.effect = p.inOnce()
	if s.effect.name != "" {
		s.words += fmt.Sprintf(" in effect %q", s.effect.name)
	}
	steps := []step{s}
	gap, fault := p.pass(steps)
	if fault != nil && gap == 0 {
		fault(nil)
		if p.run.fault.kind == refusing {
			return answer{http.StatusServiceUnavailable, http.Header{}, []byte("nothing was done (Prove)")}, nil
		}
		return answer{}, p.lost("%s: the connection is refused (Prove)", what)
	}
	if err := p.passed(ctx); err != nil {
		return answer{}, err
	}
	c := call{Effect: Effect{What: what, Key: key}, process: p.name, once: s.effect}
	if l := onceq.LeaseFromContext(ctx); l != nil {
		c.job, c.attempt, c.token = l.ID, l.Attempt, l.Token
	} else {
		c.job, c.attempt, c.token = p.lease()
		c.late = p.slept() > 0
	}
	a := p.run.provider.take(c, req)
	if fault != nil {
		fault(nil)
		switch p.run.fault.kind {
		case failing:
			return answer{http.StatusInternalServerError, http.Header{}, []byte("it was done, and then something failed (Prove)")}, nil
		case stopping:
			return a, nil
		}
		return answer{}, p.lost("%s: the answer got lost (Prove)", what)
	}
	return a, nil
}

func (p *Process) lost(format, what string) error {
	if p.isDead() {
		return errDead
	}
	return fmt.Errorf("queuetest: "+format, what)
}

// passed returns an error if a call cannot be made now: the process is dead, or the deadline of the call's context has
// passed. The time for which the process was frozen counts against the deadline.
func (p *Process) passed(ctx context.Context) error {
	if p.isDead() {
		return errDead
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if deadline, ok := ctx.Deadline(); ok && !time.Now().Add(p.slept()).Before(deadline) {
		return context.DeadlineExceeded
	}
	return nil
}

// mistakeOfKeys describes what is wrong with two keys of one call in two runs of one job.
func mistakeOfKeys(a, b call) string {
	what := "the idempotency key differs between the runs of one job"
	switch one, two := differing(a.Key, b.Key); {
	case looksLike(one, int64(a.attempt)) && looksLike(two, int64(b.attempt)):
		what = "the idempotency key contains the attempt"
	case looksLike(one, a.token) && looksLike(two, b.token):
		what = "the idempotency key contains the lease's token"
	case isTime(one) && isTime(two):
		what = "the idempotency key contains a timestamp"
	}
	return fmt.Sprintf("%s: %s had key %q, then %q. A provider recognises a repetition only by an equal key: derive the key from the job, or use the key that onceq.Once gives to its function, or Lease.IdempotencyKey", what, a.What, a.Key, b.Key)
}

// differing returns the parts in which two keys differ. It does not cut numbers apart.
func differing(a, b string) (one, two string) {
	start := 0
	for start < len(a) && start < len(b) && a[start] == b[start] {
		start++
	}
	ea, eb := len(a), len(b)
	for ea > start && eb > start && a[ea-1] == b[eb-1] {
		ea, eb = ea-1, eb-1
	}
	// Take the whole numbers around the difference, including the separators of a written time.
	inNumber := func(c byte) bool { return c >= '0' && c <= '9' || strings.IndexByte(".:", c) >= 0 }
	for start > 0 && inNumber(a[start-1]) {
		start--
	}
	for ea < len(a) && inNumber(a[ea]) && eb < len(b) {
		ea, eb = ea+1, eb+1
	}
	return strings.Trim(a[start:ea], ".:"), strings.Trim(b[start:eb], ".:")
}

func looksLike(s string, n int64) bool { return s == fmt.Sprint(n) }

// isTime reports whether a text is a time near now: a time of day, or the time since 1970 in one of the usual units.
func isTime(s string) bool {
	var whole, parts int
	for _, c := range s {
		switch {
		case c >= '0' && c <= '9':
			whole++
		case c == ':' || c == '.':
			parts++
		default:
			return false
		}
	}
	if parts > 0 && whole >= 4 {
		return true // 12:34:56 or 1795264442.123
	}
	var n int64
	if _, err := fmt.Sscan(s, &n); err != nil {
		return false
	}
	now := time.Now()
	for _, unit := range []int64{now.Unix(), now.UnixMilli(), now.UnixMicro(), now.UnixNano()} {
		if n > unit-unit/1e5 && n < unit+unit/1e5 {
			return true
		}
	}
	for _, layout := range []string{"20060102150405", "150405"} {
		if t, err := time.Parse(layout, s); err == nil && (len(s) > 6 || t.Hour() == now.Hour() || t.Hour() == now.UTC().Hour()) {
			return true
		}
	}
	return false
}

// Happened asks the provider whether an effect with that key has happened: for onceq.Ask.
func (p *Process) Happened(ctx context.Context, key string) (bool, error) {
	if err := p.passed(ctx); err != nil {
		return false, err
	}
	v := p.run.provider
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, e := range v.effects {
		if e.Key == key {
			return true, nil
		}
	}
	return false, nil
}
