package onceqhttp

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"time"
)

// The codes of problems are stable. Clients decide by them, not by the texts.
const (
	CodeKeyMissing         = "IDEMPOTENCY_KEY_MISSING"         // 400
	CodeKeyInvalid         = "IDEMPOTENCY_KEY_INVALID"         // 400
	CodeInFlight           = "IDEMPOTENCY_IN_FLIGHT"           // 409, with Retry-After: the first request is still running
	CodeMismatch           = "IDEMPOTENCY_MISMATCH"            // 422 (Config.MismatchStatus): the key was used for another request
	CodeUncertain          = "IDEMPOTENCY_UNCERTAIN"           // 503, with Retry-After: it is not known yet whether the first request did its work; ask again with the same key
	CodeHeld               = "IDEMPOTENCY_HELD"                // 409: as CodeUncertain, but a person has to decide
	CodeNoPrincipal        = "IDEMPOTENCY_PRINCIPAL_MISSING"   // 403: Config.Principal does not know who is asking
	CodeUnreadable         = "IDEMPOTENCY_REQUEST_UNREADABLE"  // 400: the body ended too early
	CodeRequestTooLarge    = "IDEMPOTENCY_REQUEST_TOO_LARGE"   // 413: the body is larger than Config.MaxRequest
	CodeResponseTooLarge   = "IDEMPOTENCY_RESPONSE_TOO_LARGE"  // 500: the answer is larger than Config.MaxResponse; the work was done, except with HandlerTx
	CodeResponseUnreadable = "IDEMPOTENCY_RESPONSE_UNREADABLE" // 500: the work was done, but what is stored is not an answer
	CodeRolledBack         = "IDEMPOTENCY_ROLLED_BACK"         // 500, HandlerTx only: nothing was done, the key is free
	CodeUnknown            = "IDEMPOTENCY_UNKNOWN"             // 500, HandlerTx only: it is not known whether the request (usually one without a key) was carried out
	CodeUnavailable        = "IDEMPOTENCY_UNAVAILABLE"         // 503, with Retry-After: the database is out of reach; 500: the request cannot be compared, see the log; nothing was run
)

// Problem is the body of a refusal: application/problem+json of RFC 9457, with the extension code.
type Problem struct {
	Type   string `json:"type"` // Config.Docs + "#" + Code
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
	Code   string `json:"code"`
}

func (m *Middleware) problem(w http.ResponseWriter, status int, code, title, detail string) {
	docs, kind := m.cfg.Docs, m.cfg.Docs+"#"+code
	if docs == "" {
		docs, kind = defaultDocs, defaultDocs
	}
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("Content-Language", "en")
	h.Set("Cache-Control", "no-store")
	h.Add("Link", "<"+docs+`>; rel="describedby"; type="text/html"`)
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(Problem{Type: kind, Title: title, Status: status, Detail: detail, Code: code})
}

// soon sets Retry-After to the delay in whole seconds, at least one.
func soon(w http.ResponseWriter, d time.Duration) {
	w.Header().Set("Retry-After", strconv.Itoa(int(max(1, math.Ceil(d.Seconds())))))
}

func (m *Middleware) inFlight(w http.ResponseWriter, after time.Duration) {
	soon(w, after)
	m.problem(w, http.StatusConflict, CodeInFlight, "A request with this Idempotency-Key is being processed",
		"Repeat the request, unchanged and with the same key, after the time in Retry-After.")
}

func (m *Middleware) uncertain(w http.ResponseWriter) {
	soon(w, 0)
	m.problem(w, http.StatusServiceUnavailable, CodeUncertain, "It is not known whether the request was carried out",
		"Repeat the request, unchanged and with the same key, after the time in Retry-After. With another key it might be carried out twice.")
}

// unknown answers a request that has no key to make repeating it safe.
func (m *Middleware) unknown(w http.ResponseWriter) {
	m.problem(w, http.StatusInternalServerError, CodeUnknown, "It is not known whether the request was carried out",
		"Find out before it is repeated: it might be carried out twice.")
}

func (m *Middleware) unavailable(w http.ResponseWriter, keyed bool) {
	soon(w, 0)
	title, detail := "The database is out of reach", "Nothing was done. Repeat the request after the time in Retry-After."
	if keyed {
		title = "Idempotency-Keys cannot be checked at the moment"
		detail = "Nothing was done. Repeat the request, unchanged and with the same key, after the time in Retry-After."
	}
	m.problem(w, http.StatusServiceUnavailable, CodeUnavailable, title, detail)
}

func (m *Middleware) responseTooLarge(w http.ResponseWriter, done string) {
	m.problem(w, http.StatusInternalServerError, CodeResponseTooLarge, "The answer is too large to be stored", done)
}

func (m *Middleware) rolledBack(w http.ResponseWriter, keyed bool) {
	detail := nothingDone
	if keyed {
		detail += " The request can be repeated with the same key."
	}
	m.problem(w, http.StatusInternalServerError, CodeRolledBack, "The request failed and was rolled back", detail)
}
