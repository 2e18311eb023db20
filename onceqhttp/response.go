package onceqhttp

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/onceq/onceq"
)

// Response is a stored answer. As the result of a fence it is JSON, so Fence.Resolve and a policy that asks can give one:
//
//	err := fence.Resolve(ctx, nil, onceq.Applied(onceqhttp.Response{Status: 201, Body: body}))
type Response struct {
	Status int // 0 is 200
	Header http.Header
	Body   []byte

	lost bool // the answer was too large to be stored
}

type storedResponse struct {
	Status int                 `json:"status"`
	Header map[string][]string `json:"header,omitempty"`
	Body   []byte              `json:"body,omitempty"`
	Lost   bool                `json:"lost,omitempty"`
}

// MarshalJSON keeps every byte that can be sent. The body is base64. Each byte of a header's value becomes one
// character (Latin-1), because a value may be invalid UTF-8. A NUL in a value becomes a space (RFC 9110, 5.5), and a
// header with an invalid name is left out.
func (r Response) MarshalJSON() ([]byte, error) {
	s := storedResponse{Status: r.Status, Header: make(map[string][]string, len(r.Header)), Body: r.Body, Lost: r.lost}
	for name, values := range sendable(r.Header) {
		s.Header[name] = make([]string, 0, len(values))
		for _, v := range values {
			latin := make([]rune, len(v))
			for i := range len(v) {
				latin[i] = rune(v[i])
			}
			s.Header[name] = append(s.Header[name], string(latin))
		}
	}
	return json.Marshal(s)
}

// sendable returns the headers that can be sent, in the form in which they are sent. net/http takes care of line
// breaks.
func sendable(h http.Header) http.Header {
	all := make(http.Header, len(h))
	for name, values := range h {
		if name == "" || strings.ContainsFunc(name, func(c rune) bool { return c <= ' ' || c > '~' || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, c) }) {
			continue // not a token of RFC 9110, 5.6.2
		}
		all[name] = make([]string, 0, len(values)) // keep a header without values: it stops net/http from guessing the Content-Type
		for _, v := range values {
			all[name] = append(all[name], strings.ReplaceAll(v, "\x00", " "))
		}
	}
	return all
}

var errUndecodable = errors.New("onceqhttp: a stored response cannot be read")

// UnmarshalJSON reverses MarshalJSON. A Status is 0 or 200 to 999.
func (r *Response) UnmarshalJSON(raw []byte) error {
	var s storedResponse
	if err := json.Unmarshal(raw, &s); err != nil {
		return fmt.Errorf("%w: %w", errUndecodable, err)
	}
	if s.Status != 0 && (s.Status < 200 || s.Status > 999) { // a handler cannot answer with any other
		return fmt.Errorf("%w: its status is %d", errUndecodable, s.Status)
	}
	*r = Response{Status: s.Status, Header: make(http.Header, len(s.Header)), Body: s.Body, lost: s.Lost}
	for name, values := range s.Header {
		r.Header[name] = make([]string, 0, len(values))
		for _, v := range values {
			var b []byte
			for _, c := range v {
				if c > 0xff {
					return fmt.Errorf("%w: its header %s has the character %U, which is not a byte", errUndecodable, name, c)
				}
				b = append(b, byte(c))
			}
			r.Header[name] = append(r.Header[name], string(b))
		}
	}
	return nil
}

// send writes the answer. As for every answer, net/http adds the Content-Type if there is none, the Date, and, for
// HEAD, the length if the handler did not set it.
func (r *Response) send(w http.ResponseWriter, in *http.Request) {
	status := r.Status
	if status == 0 {
		status = http.StatusOK
	}
	maps.Copy(w.Header(), r.Header)
	if bodyAllowed(status) && in.Method != http.MethodHead {
		w.Header().Set("Content-Length", strconv.Itoa(len(r.Body)))
	}
	w.WriteHeader(status)
	if len(r.Body) > 0 && bodyAllowed(status) {
		_, _ = w.Write(r.Body) // the application's own answer, unchanged; a client that has left asks again
	}
}

func bodyAllowed(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified
}

// unstored headers are never part of a stored answer: they belong to the connection (RFC 9110, 7.6.1), to the moment,
// or to one client.
var unstored = []string{
	"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade", "Content-Length", "Date", "Set-Cookie", replayedHeader,
}

// errStreaming is the error for a handler that tries to do more than write an answer.
var errStreaming = fmt.Errorf("onceqhttp: a handler behind the middleware cannot stream, hijack the connection or change the protocol, because its answer is stored; serve this route without the middleware: %w", http.ErrNotSupported)

// ErrResponseTooLarge is the error of a handler's Write beyond Config.MaxResponse.
var ErrResponseTooLarge = errors.New("onceqhttp: the response is larger than Config.MaxResponse, so it cannot be stored")

// recorder records a handler's answer. It has no Unwrap on purpose, so http.ResponseController cannot bypass it.
type recorder struct {
	limit    int
	outer    http.Header // set before the middleware is called, for each request anew
	header   http.Header // what the handler sees
	status   int         // 0 until WriteHeader
	sent     http.Header // at the time of WriteHeader
	body     bytes.Buffer
	tooLarge bool
}

func newRecorder(outer http.Header, limit int) *recorder {
	return &recorder{limit: limit, outer: outer.Clone(), header: outer.Clone()}
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	if status < 100 || status > 999 { // as in net/http, but before anything is stored
		panic(fmt.Sprintf("invalid WriteHeader code %v", status))
	}
	if status == http.StatusSwitchingProtocols { // there is no answer to store after it
		panic(errStreaming)
	}
	if r.status != 0 || status < 200 { // an informational answer is dropped
		return
	}
	r.status, r.sent = status, sendable(r.header)
}

func (r *recorder) Write(b []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	switch {
	case !bodyAllowed(r.status):
		return 0, http.ErrBodyNotAllowed
	case r.tooLarge || len(b) > r.limit-r.body.Len():
		r.tooLarge = true
		return 0, ErrResponseTooLarge
	}
	return r.body.Write(b)
}

// FlushError makes http.ResponseController report why it cannot flush. There is no Flush, so a handler that looks for
// an http.Flusher finds none.
func (r *recorder) FlushError() error { return errStreaming }

func (r *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) { return nil, nil, errStreaming }

// response returns the whole answer, and stored, the part of it that later requests get. chosen may be nil.
func (r *recorder) response(chosen func(name string) bool) (whole, stored *Response) {
	r.WriteHeader(http.StatusOK)
	whole = &Response{Status: r.status, Header: r.sent, Body: r.body.Bytes()}
	stored = &Response{Status: r.status, Header: make(http.Header), Body: r.body.Bytes()}
	drop := slices.Clone(unstored)
	for _, names := range r.sent.Values("Connection") {
		for name := range strings.SplitSeq(names, ",") {
			drop = append(drop, http.CanonicalHeaderKey(strings.TrimSpace(name)))
		}
	}
	for name, values := range r.sent {
		canonical := http.CanonicalHeaderKey(name)
		outer, before := r.outer[name]
		switch {
		case canonical == "Trailer":
			delete(whole.Header, name) // nothing is sent after the body
		case canonical == replayedHeader:
			delete(whole.Header, name) // the handler has passed on a replay of another server; for this client it is the first answer
		case slices.Contains(drop, canonical), before && slices.Equal(values, outer), chosen != nil && !chosen(canonical):
		default:
			stored.Header[name] = values
		}
	}
	return whole, stored
}

// replace is send for an answer that already contains the outer headers.
func (r *Response) replace(w http.ResponseWriter, in *http.Request) {
	clear(w.Header())
	r.send(w, in)
}

// decode returns the answer that a claim replays.
func decode(c *onceq.FenceLease) (*Response, error) {
	if c.Result == nil {
		return nil, &onceq.InvalidError{Field: "result", Reason: "was not stored"}
	}
	var r *Response
	err := json.Unmarshal(c.Result, &r)
	return r, err
}
