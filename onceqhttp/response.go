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

// MarshalJSON keeps every byte that can be sent: the body is base64, and each byte of a header's value one character (Latin-1), for
// a value need not be UTF-8. A NUL is a space in a header (RFC 9110, 5.5), and a header whose name is none is left out.
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

// sendable gives the headers that can be sent, as they are sent; net/http sees to line breaks.
func sendable(h http.Header) http.Header {
	all := make(http.Header, len(h))
	for name, values := range h {
		if name == "" || strings.ContainsFunc(name, func(c rune) bool { return c <= ' ' || c > '~' || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, c) }) {
			continue // no token of RFC 9110, 5.6.2
		}
		all[name] = make([]string, 0, len(values)) // none at all says something: no Content-Type is not to be guessed
		for _, v := range values {
			all[name] = append(all[name], strings.ReplaceAll(v, "\x00", " "))
		}
	}
	return all
}

var errUndecodable = errors.New("onceqhttp: a stored response cannot be read")

// UnmarshalJSON is the way back. A Status is 0 or 200 to 999.
func (r *Response) UnmarshalJSON(raw []byte) error {
	var s storedResponse
	if err := json.Unmarshal(raw, &s); err != nil {
		return fmt.Errorf("%w: %w", errUndecodable, err)
	}
	if s.Status != 0 && (s.Status < 200 || s.Status > 999) { // what a handler can answer with
		return fmt.Errorf("%w: its status is %d", errUndecodable, s.Status)
	}
	*r = Response{Status: s.Status, Header: make(http.Header, len(s.Header)), Body: s.Body, lost: s.Lost}
	for name, values := range s.Header {
		r.Header[name] = make([]string, 0, len(values))
		for _, v := range values {
			var b []byte
			for _, c := range v {
				if c > 0xff {
					return fmt.Errorf("%w: its header %s has the character %U, which is no byte", errUndecodable, name, c)
				}
				b = append(b, byte(c))
			}
			r.Header[name] = append(r.Header[name], string(b)) // as it was written
		}
	}
	return nil
}

// send writes the answer. The Content-Type, where there is none, and the Date come from net/http, here as for every answer.
// So does the length of what HEAD does not show, unless the handler named it.
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
		_, _ = w.Write(r.Body) // #nosec G705 -- what the application answered, as it was; a client that has left asks again
	}
}

func bodyAllowed(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified
}

// unstored are never part of a stored answer: they belong to the connection (RFC 9110, 7.6.1), to the moment, or to one client.
var unstored = []string{
	"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade", "Content-Length", "Date", "Set-Cookie", replayedHeader,
}

// errStreaming is what a handler gets that wants more than to write an answer.
var errStreaming = fmt.Errorf("onceqhttp: an answer that is to be stored cannot be streamed or hijacked, or change the protocol; serve this route without the middleware: %w", http.ErrNotSupported)

// ErrResponseTooLarge is what a handler's Write gives beyond Config.MaxResponse.
var ErrResponseTooLarge = errors.New("onceqhttp: the response is larger than Config.MaxResponse, so it cannot be stored")

// recorder takes a handler's answer. It deliberately has no Unwrap: http.ResponseController must not get past it.
type recorder struct {
	limit    int
	outer    http.Header // as set by whoever stands before the middleware, for each request anew
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
	if status < 100 || status > 999 { // as net/http does, but before anything is stored
		panic(fmt.Sprintf("invalid WriteHeader code %v", status))
	}
	if status == http.StatusSwitchingProtocols { // behind it there is no answer that could be stored
		panic(errStreaming)
	}
	if r.status != 0 || status < 200 { // informational answers are for those who stream
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

// FlushError makes http.ResponseController say why. There is no Flush, so that a handler that looks for a http.Flusher
// knows at once.
func (r *recorder) FlushError() error { return errStreaming }

// Hijack is refused too.
func (r *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) { return nil, nil, errStreaming }

// response gives the whole answer, and stored the part of it that others get. chosen may be nil.
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
			delete(whole.Header, name) // there is nothing behind the body
		case canonical == replayedHeader:
			delete(whole.Header, name) // somebody else's replay, passed on: for this client it is the first answer
		case slices.Contains(drop, canonical), before && slices.Equal(values, outer), chosen != nil && !chosen(canonical):
		default:
			stored.Header[name] = values
		}
	}
	return whole, stored
}

// replace is send for an answer that contains the outer headers already.
func (r *Response) replace(w http.ResponseWriter, in *http.Request) {
	clear(w.Header())
	r.send(w, in)
}

// decode gives the answer that a claim replays.
func decode(c *onceq.FenceLease) (*Response, error) {
	if c.Result == nil {
		return nil, &onceq.InvalidError{Field: "result", Reason: "was not stored"}
	}
	var r *Response
	err := json.Unmarshal(c.Result, &r)
	return r, err
}
