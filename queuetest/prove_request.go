package queuetest

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// request is an HTTP call and what it means.
type request struct {
	*http.Request
	body  []byte
	safe  bool   // it changes nothing
	key   string // the key by which a provider recognises a repetition; "" for none
	about string // the key of onceq that a GET asks about; "" for none
	same  string // for repeatable methods: equal if the same thing is requested
	sum   string // digest of what is requested
}

// These methods change nothing, or may be repeated (IANA's registry of HTTP methods).
var (
	safeMethods       = []string{"GET", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "REPORT", "SEARCH", "QUERY"}
	idempotentMethods = []string{"PUT", "DELETE", "COPY", "MOVE", "MKCOL", "PROPPATCH", "ACL", "BIND", "UNBIND", "LINK", "UNLINK"}
)

// keyHeaders are the names that providers have for an idempotency key.
var keyHeaders = []string{"Idempotency-Key", "X-Idempotency-Key", "Idempotence-Key", "X-Idempotence-Key", "Idempotent-Key", "Paypal-Request-Id"}

// ours matches a key of Once or Lease.IdempotencyKey, anywhere in a request.
var ours = regexp.MustCompile(`oq_[A-Za-z0-9_-]{40}`)

// read finds out what a request means, from the proof or from HTTP.
func (v *prover) read(req *http.Request, body []byte) request {
	r := request{Request: req, body: body, sum: meaning(req.Header, body, false)}
	asked := func() *http.Request { // each reader gets the whole body
		out := req.Clone(req.Context())
		out.Body = io.NopCloser(bytes.NewReader(body))
		return out
	}
	r.safe = slices.Contains(safeMethods, req.Method) || fetchesToken(req, body) || readsGraph(req, body) || v.Safe != nil && v.Safe(asked())
	if req.Method == http.MethodGet || req.Method == http.MethodHead {
		r.about = ours.FindString(req.URL.String())
	}
	if v.Key != nil {
		r.key = v.Key(asked())
	}
	for _, name := range keyHeaders {
		if r.key == "" {
			r.key = req.Header.Get(name)
		}
	}
	if r.key == "" {
		for _, values := range req.Header {
			for _, value := range values {
				if r.key == "" && ours.FindString(value) == value {
					r.key = value
				}
			}
		}
	}
	if r.key == "" {
		r.key = ours.FindString(req.URL.RawQuery + " " + string(body))
	}
	if slices.Contains(idempotentMethods, req.Method) {
		r.same = req.Method + " " + req.URL.String() + " " + meaning(req.Header, body, true)
	}
	return r
}

// fetchesToken reports whether a request asks for an access token (RFC 6749, section 4), which may be repeated at will. The
// grant is in a form, and with some providers in JSON or in the address. A client may leave the form's content type out.
func fetchesToken(req *http.Request, body []byte) bool {
	if req.Method != http.MethodPost {
		return false
	}
	var object struct {
		Grant string `json:"grant_type"`
	}
	if req.URL.Query().Has("grant_type") || json.Unmarshal(body, &object) == nil && object.Grant != "" {
		return true
	}
	if media := mediaType(req.Header); media != "" && media != "application/x-www-form-urlencoded" {
		return false
	}
	form, err := url.ParseQuery(string(body))
	return err == nil && form.Has("grant_type")
}

// readsGraph reports whether a request has queries of GraphQL alone: no mutation and no subscription.
func readsGraph(req *http.Request, body []byte) bool {
	if req.Method != http.MethodPost {
		return false
	}
	if mediaType(req.Header) == "application/graphql" {
		return isGraphQuery(string(body))
	}
	type request struct{ Query string }
	var one request
	var batch []request
	switch {
	case json.Unmarshal(body, &one) == nil:
		return isGraphQuery(one.Query)
	case json.Unmarshal(body, &batch) == nil:
		return len(batch) > 0 && !slices.ContainsFunc(batch, func(r request) bool { return !isGraphQuery(r.Query) })
	}
	return false
}

// In a document of GraphQL these match what may contain any word, and what is inside of an operation.
var (
	graphText   = regexp.MustCompile(`#[^\n\r]*|"""(?s:(?:\\"""|.)*?)"""|"(?:\\.|[^"\\\n])*"`)
	graphInside = regexp.MustCompile(`\{[^{}]*\}|\([^()]*\)`)
	graphStart  = regexp.MustCompile(`^\s*(;|query\b|fragment\b)`)
)

// isGraphQuery reports whether a document of GraphQL has operations that read, and no others.
func isGraphQuery(document string) bool {
	heads := graphText.ReplaceAllString(document, " ") // of its operations, in the end
	for rest := ""; rest != heads; {
		rest, heads = heads, graphInside.ReplaceAllString(heads, ";")
	}
	for head := range strings.SplitSeq(heads, ";") {
		if f := strings.Fields(head); len(f) > 0 && (f[0] == "mutation" || f[0] == "subscription") {
			return false
		}
	}
	return graphStart.MatchString(heads) && strings.Contains(heads, ";")
}

func mediaType(h http.Header) string {
	media, _, _ := mime.ParseMediaType(h.Get("Content-Type"))
	return media
}

// meaning is equal for bodies that say the same, whatever the order of members and fields and the boundary between
// parts. With timeless, times near now count as equal too.
func meaning(h http.Header, body []byte, timeless bool) string {
	media, params, _ := mime.ParseMediaType(h.Get("Content-Type"))
	switch {
	case media == "application/x-www-form-urlencoded":
		form, err := url.ParseQuery(string(body))
		if err != nil {
			break
		}
		for _, values := range form {
			for i := range values {
				if timeless && isNow(values[i]) {
					values[i] = "now"
				}
			}
		}
		return form.Encode()
	case strings.HasPrefix(media, "multipart/"):
		var parts []string
		for r := multipart.NewReader(bytes.NewReader(body), params["boundary"]); ; {
			part, err := r.NextRawPart()
			if err == io.EOF && len(parts) > 0 {
				slices.Sort(parts)
				return strings.Join(parts, "\n")
			}
			if err != nil {
				return string(body)
			}
			content, err := io.ReadAll(part)
			if err != nil {
				return string(body)
			}
			sum := sha256.Sum256([]byte(meaning(http.Header(part.Header), content, timeless)))
			head, _ := json.Marshal(part.Header) // a map of strings: sorted, and never an error
			parts = append(parts, string(head)+string(sum[:]))
		}
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var value any
	if d.Decode(&value) != nil || d.More() {
		return string(body)
	}
	if timeless {
		value = withoutNow(value)
	}
	text, err := json.Marshal(value) // members sorted
	if err != nil {
		return string(body)
	}
	return string(text)
}

// withoutNow replaces each time near now.
func withoutNow(value any) any {
	switch v := value.(type) {
	case map[string]any:
		for name := range v {
			v[name] = withoutNow(v[name])
		}
	case []any:
		for i := range v {
			v[i] = withoutNow(v[i])
		}
	case string:
		if isNow(v) {
			return "now"
		}
	case json.Number:
		if isNow(v.String()) {
			return "now"
		}
	}
	return value
}

// isNow reports whether a text is a date and time within some hours of now.
func isNow(s string) bool {
	const near = 5 * time.Hour
	if n, err := strconv.ParseFloat(s, 64); err == nil {
		return sinceEpoch(n, near)
	}
	if len(s) < len("2006-01-02T15:04") {
		return false
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04:05", "2006-01-02T15:04", time.RFC1123, time.RFC1123Z} {
		text := s
		if layout[4] == '-' && text[10] == ' ' {
			text = text[:10] + "T" + text[11:]
		}
		if t, err := time.Parse(layout, text); err == nil {
			return time.Since(t).Abs() < near+14*time.Hour // in any time zone
		}
	}
	return false
}

// sinceEpoch reports whether a number is a time near now: the time since 1970 in seconds or another usual unit.
func sinceEpoch(n float64, near time.Duration) bool {
	now := float64(time.Now().UnixNano())
	for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond, time.Nanosecond} {
		if t := n * float64(unit); t > now-float64(near) && t < now+float64(near) {
			return true
		}
	}
	return false
}

var temporal = regexp.MustCompile(`^(\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?|\d{2}:\d{2}(:\d{2}.*)?)$`)

// isTemporal reports whether a value is a time, past or future.
func isTemporal(s string) bool {
	if n, err := strconv.ParseFloat(s, 64); err == nil {
		return sinceEpoch(n, 2*365*24*time.Hour)
	}
	_, err := time.ParseDuration(s)
	return err == nil || temporal.MatchString(s) || isNow(s)
}
