package onceqhttp_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

func TestNew_RefusesWhatIsWrong(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for field, cfg := range map[string]onceqhttp.Config{
		"Config.Principal":      {},
		"Config.MismatchStatus": {Principal: tenant, MismatchStatus: 400},
		"Config.MaxRequest":     {Principal: tenant, MaxRequest: -1},
		"Config.MaxResponse":    {Principal: tenant, MaxResponse: 1 << 20},
		"Window":                {Principal: tenant, Window: -5},
		"Lease":                 {Principal: tenant, Lease: 1},
	} {
		_, err := onceqhttp.New(db.Queue, cfg)
		var invalid *onceq.InvalidError
		require.ErrorAs(t, err, &invalid, field)
		require.Equal(t, field, invalid.Field)
	}
	_, err := onceqhttp.New(nil, onceqhttp.Config{Principal: tenant})
	require.Error(t, err)
}

// raw returns an answer as it comes over the wire, without the parts that always differ.
func raw(t *testing.T, addr, request string) string {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, request)
	require.NoError(t, err)
	all, err := io.ReadAll(conn)
	require.NoError(t, err)
	head, body, ok := strings.Cut(string(all), "\r\n\r\n")
	require.True(t, ok)
	lines := slices.DeleteFunc(strings.Split(head, "\r\n"), func(l string) bool { return strings.HasPrefix(l, "Date: ") })
	return strings.Join(lines, "\n") + "\n\n" + body
}

func TestHandler_ReplaysByteForByte(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{})
	ran := newRuns()
	binary := make([]byte, 70_000)
	for i := range binary {
		binary[i] = byte(i * 7)
	}
	for name, h := range map[string]http.HandlerFunc{
		"json": func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["x-Odd"] = []string{"one", "two", "Gr\xfc\xdfe, \"quoted\" \\ \t tabbed"} // Latin-1
			w.Header().Set("Location", "/orders/1")
			w.WriteHeader(201)
			w.Header().Set("Too-Late", "1")
			_, _ = io.WriteString(w, "{\"id\": 1,\r\n \"a\":1.0}\n")
		},
		"binary": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/octet-stream")
			for part := range slices.Chunk(binary, 999) {
				_, _ = w.Write(part)
			}
		},
		"nothing":    func(http.ResponseWriter, *http.Request) {},
		"no content": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) },
		"sniffed":    func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") },
		"a wrong length of its own": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "3")
			_, _ = io.WriteString(w, "four")
		},
		"a 404": func(w http.ResponseWriter, r *http.Request) { http.NotFound(w, r) },
		"not to be sniffed": func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Content-Type"] = nil
			_, _ = io.WriteString(w, "<html>")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			once := newRuns()
			s := serve(t, "POST /", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				ran.next()
				once.next()
				h(w, r)
			})))
			request := "POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: " + name + "\r\nIdempotency-Key: k\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx"
			first := raw(t, s.Listener.Addr().String(), request)
			require.NotContains(t, first, "Idempotent-Replayed")
			for range 2 {
				again := raw(t, s.Listener.Addr().String(), request)
				require.Contains(t, again, "\nIdempotent-Replayed: true\n")
				require.Equal(t, first, strings.Replace(again, "Idempotent-Replayed: true\n", "", 1))
			}
			require.Equal(t, 1, once.count())
			switch name {
			case "not to be sniffed":
				require.NotContains(t, first, "Content-Type")
			case "binary":
				require.Contains(t, first, "\n\n"+string(binary))
			case "json":
				require.Contains(t, first, "Gr\xfc\xdfe")
				require.NotContains(t, first, "Too-Late")
			}
		})
	}
}

func TestHandler_HeadersOfTheMomentAreNotStored(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{StoredHeader: func(name string) bool { return name != "X-Chosen-Not" && name != "X-Raw-Not" }})
	ids := newRuns()
	inner := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for name, value := range map[string]string{
			"Set-Cookie": "session=1", "Date": "Sat, 01 Jan 2000 00:00:00 GMT", "Connection": "X-Mine", "X-Mine": "1", "Keep-Alive": "timeout=5",
			"Proxy-Authenticate": "Basic", "Upgrade": "x", "Te": "x", "Trailer": "X-T", http.TrailerPrefix + "X-T": "1",
			"X-Kept": "1", "X-Chosen-Not": "1", "ETag": `"1"`, "Idempotent-Replayed": "true",
		} {
			w.Header().Set(name, value)
		}
		w.Header()["x-raw-not"] = []string{"1"}
		assert.NotEmpty(t, w.Header().Get("X-Request-Id"), "a handler sees what was set before it")
		w.WriteHeader(201)
	}))
	s := serve(t, "POST /", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Request-Id", fmt.Sprint(ids.next()))
		inner.ServeHTTP(w, r)
	}))
	first, again := post(t, s.URL, "k", ""), post(t, s.URL, "k", "")
	require.False(t, first.replayed(), "another server's replay, passed on, is this one's first answer")
	require.Equal(t, "session=1", first.header.Get("Set-Cookie"))
	require.Equal(t, "1", first.header.Get("X-Chosen-Not"))
	require.Equal(t, "1", first.header.Get("X-Raw-Not"))
	require.Equal(t, "1", first.header.Get("X-Request-Id"))
	require.Equal(t, 201, again.status)
	require.True(t, again.replayed())
	require.Equal(t, "2", again.header.Get("X-Request-Id"), "of this request")
	again.header.Del("Date")
	require.Equal(t, http.Header{
		"X-Kept": {"1"}, "Etag": {`"1"`}, "X-Request-Id": {"2"}, "Idempotent-Replayed": {"true"}, "Content-Length": {"0"},
	}, again.header)
	stored := sqlOne[string](t, db, `select result::text from onceq.job_fences where class = 2`)
	for _, never := range []string{"session", "X-Mine", "2000", "X-Request-Id", "Trailer"} {
		require.NotContains(t, stored, never)
	}
}

func TestHandler_ConcurrentDuplicatesRunOnce(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{})
	ran := newRuns()
	entered, gate := make(chan struct{}, 1), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) }) // even if the test fails: the server waits for its handlers
	defer open()
	s := serve(t, "POST /orders", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		entered <- struct{}{}
		<-gate
		ran.answering(201).ServeHTTP(w, r)
	})))
	const clients = 20
	answers := make(chan answer, clients)
	inFlight := make(chan struct{}, clients)
	for range clients {
		go func() {
			for told := false; ; {
				a, err := ask(t, "POST", s.URL+"/orders", "k", `{"n":1}`)
				if err == nil && a.status == http.StatusConflict {
					assert.Equal(t, onceqhttp.CodeInFlight, a.problem(t).Code)
					assert.Equal(t, "1", a.header.Get("Retry-After"))
					if !told {
						told = true
						inFlight <- struct{}{}
					}
					continue // sooner than it was told, to keep the test short
				}
				answers <- a
				return
			}
		}()
	}
	receive(t, entered)
	for range clients - 1 { // all others have been told at least once
		receive(t, inFlight)
	}
	open()
	first := 0
	for range clients {
		a := receive(t, answers)
		require.Equal(t, 201, a.status, a.body)
		require.Equal(t, `1:{"n":1}`, a.body)
		if !a.replayed() {
			first++
		}
	}
	require.Equal(t, 1, first)
	require.Equal(t, 1, ran.count())
}

func TestHandler_KeysOfOthersHaveNothingToDoWithIt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{})
	ran := newRuns()
	mux := http.NewServeMux()
	for _, pattern := range []string{"POST /a/{id}", "PATCH /a/{id}", "DELETE /a/{id}", "/b"} {
		mux.Handle(pattern, m.Handler(ran.answering(200)))
	}
	s := serve(t, "/", mux)
	seen := make(map[string]bool)
	for _, c := range []struct{ method, path, tenant string }{
		{"POST", "/a/1", "t"}, {"POST", "/a/1", "u"}, {"PATCH", "/a/1", "t"}, {"DELETE", "/a/1", "t"}, {"POST", "/b", "t"}, {"PUT", "/b", "t"},
	} {
		for _, replayed := range []bool{false, true} {
			a, err := ask(t, c.method, s.URL+c.path, "k", "{}", "X-Tenant", c.tenant)
			require.NoError(t, err)
			require.Equal(t, 200, a.status, a.body)
			require.Equal(t, replayed, a.replayed(), "%v", c)
			seen[a.body] = true
		}
	}
	require.Equal(t, 6, ran.count())
	require.Len(t, seen, 6)
	// The same route and another path is another request under the same key.
	refused(t, post(t, s.URL+"/a/2", "k", "{}"), 422, onceqhttp.CodeMismatch)
}

// Below different prefixes that http.StripPrefix removes, the same pattern is not the same route.
func TestHandler_MountsUnderPrefixesHaveTheirOwnKeys(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := newRuns()
	m := middleware(t, db.Queue, onceqhttp.Config{})
	inner, outer := http.NewServeMux(), http.NewServeMux()
	inner.Handle("POST /charges/{id}", m.Handler(ran.answering(201)))
	for _, shop := range []string{"/shopA", "/shopB"} {
		outer.Handle(shop+"/", http.StripPrefix(shop, inner))
	}
	outer.Handle("POST /plain/", http.StripPrefix("/plain", m.Handler(ran.answering(201))))
	outer.Handle("POST /charges/{id}", inner)
	outer.Handle("/c/", http.StripPrefix("/c", inner)) // the beginning of the pattern, but no part of its path
	outer.Handle("POST /tree/{rest...}", http.StripPrefix("/tree/", m.Handler(ran.answering(201))))
	// A router that rewrites paths in another way gets the route of the pattern, but never the answer to another path.
	outer.HandleFunc("/old/", func(w http.ResponseWriter, r *http.Request) {
		r.URL.Path = "/charges/1"
		inner.ServeHTTP(w, r)
	})
	s := serve(t, "/", outer)
	for i, path := range []string{"/shopA/charges/1", "/shopB/charges/1", "/charges/1", "/plain/1", "/c/charges/1", "/tree/charges/1"} {
		require.Equal(t, fmt.Sprintf("%d:{}", i+1), post(t, s.URL+path, "k", "{}").body, path)
		require.True(t, post(t, s.URL+path, "k", "{}").replayed(), path)
	}
	refused(t, post(t, s.URL+"/shopA/charges/2", "k", "{}"), 422, onceqhttp.CodeMismatch)
	refused(t, post(t, s.URL+"/old/1", "k", "{}"), 422, onceqhttp.CodeMismatch)
	require.Equal(t, 6, ran.count())

	for _, route := range []string{"POST /shopA/charges/{id}", "POST /shopB/charges/{id}", "POST /charges/{id}", "POST /plain/", "POST /c/charges/{id}", "POST /tree/{rest...}"} {
		f, err := m.Fence("t", "POST", route, "k")
		require.NoError(t, err)
		c, err := f.Claim(t.Context(), nil) // without a payload: there is no fingerprint to compare
		require.NoError(t, err, route)
		require.True(t, c.Replayed, route)
	}

	// The same request, as a proxy may send it.
	const body = " HTTP/1.1\r\nHost: h\r\nX-Tenant: t\r\nContent-Type: application/json\r\nIdempotency-Key: k\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
	absolute := raw(t, s.Listener.Addr().String(), "POST http://h/shopB/charges/1"+body)
	require.Contains(t, absolute, "Idempotent-Replayed: true")
	require.Contains(t, absolute, "2:{}")
}

func TestHandler_AnotherRequestUnderTheSameKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for _, status := range []int{422, 409} {
		m := middleware(t, db.Queue, onceqhttp.Config{MismatchStatus: status, Docs: "https://example.com/keys"})
		ran := newRuns()
		s := serve(t, "POST /{id}", m.Handler(ran.answering(200)))
		n := 0
		for _, c := range []struct {
			path, body, contentType       string
			otherPath, otherBody, another string
			same                          bool
		}{
			{"/1", `{"a":1,"b":[1.0,"ü"]}`, "application/json", "/1", " {\"b\": [1, \"\\u00fc\"],\n\"a\":1e0}", "application/json", true},
			{"/1", `{"a":1}`, "application/json", "/1", `{"a":1}`, "application/merge-patch+json; charset=utf-8", true},
			{"/1", `{"a":1}`, "application/json", "/1", `{"a":2}`, "application/json", false},
			{"/1", `{"a":1}`, "application/json", "/1", `{"a": 1}`, "text/plain", false},
			{"/1", `{"a":1}`, "application/json", "/1?x=1", `{"a":1}`, "application/json", false},
			{"/1", `{"a":1}`, "application/json", "/2", `{"a":1}`, "application/json", false},
			{"/1?x=\xfe", `{"a":1}`, "application/json", "/1?x=\xff", `{"a":1}`, "application/json", false}, // not UTF-8
			{"/1", `{"a":1}`, "text/plain", "/1", `{"a": 1}`, "text/plain", false},
			{"/1", `{"a":`, "application/json", "/1", `{"a":`, "application/json", true}, // not JSON: compared by its bytes
			{"/1", `{"a":`, "application/json", "/1", `{"a": `, "application/json", false},
			{"/1", `{"a":"\u0000"}`, "application/json", "/1", `{"a":"\u0000"}`, "application/json", true}, // not valid for Postgres
			{"/1", `{"a":"\u0000"}`, "application/json", "/1", `{"a": "\u0000"}`, "application/json", false},
			{"/1", "", "application/json", "/1", "", "application/json", true},
			{"/1", "", "application/json", "/1", "{}", "application/json", false},
		} {
			n++
			key := fmt.Sprintf("%d-%d", status, n)
			require.False(t, post(t, s.URL+c.path, key, c.body, "Content-Type", c.contentType).replayed())
			a := post(t, s.URL+c.otherPath, key, c.otherBody, "Content-Type", c.another)
			if c.same {
				require.True(t, a.replayed(), "%+v", c)
				continue
			}
			refused(t, a, status, onceqhttp.CodeMismatch)
			require.Equal(t, "https://example.com/keys#IDEMPOTENCY_MISMATCH", a.problem(t).Type)
			require.Equal(t, `<https://example.com/keys>; rel="describedby"; type="text/html"`, a.header.Get("Link"))
			require.True(t, post(t, s.URL+c.path, key, c.body, "Content-Type", c.contentType).replayed(), "the first answer is still there")
		}
		require.Equal(t, n, ran.count())
	}
}

func TestHandler_FingerprintIsTheApplications(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Fingerprint: func(r *http.Request, body []byte) any {
		return string(body[:1])
	}}).Handler(newRuns().answering(200)))
	post(t, s.URL, "k", "a1")
	require.True(t, post(t, s.URL+"/?q", "k", "a2").replayed())
	refused(t, post(t, s.URL, "k", "b1"), 422, onceqhttp.CodeMismatch)

	s = serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Fingerprint: func(*http.Request, []byte) any { return nil }}).
		Handler(newRuns().answering(200)))
	post(t, s.URL, "none", "a1")
	require.True(t, post(t, s.URL, "none", "b1").replayed())

	ran := newRuns()
	s = serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Fingerprint: func(*http.Request, []byte) any { return func() {} }}).
		Handler(ran.answering(200)))
	refused(t, post(t, s.URL, "bad", "a1"), 500, onceqhttp.CodeUnavailable)
	require.Zero(t, ran.count())
}

func TestHandler_RefusesBeforeAnythingIsDone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := newRuns()
	s := serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{MaxRequest: 10}).Handler(ran.answering(200)))
	missing := post(t, s.URL, "", "{}")
	refused(t, missing, 400, onceqhttp.CodeKeyMissing)
	require.Contains(t, missing.header.Get("Link"), "docs/use/http.md")
	require.Regexp(t, `docs/use/http\.md$`, missing.problem(t).Type)
	invalid := post(t, s.URL, `"open`, "{}")
	refused(t, invalid, 400, onceqhttp.CodeKeyInvalid)
	require.NotContains(t, invalid.body, "open", "the key is not repeated")
	require.Equal(t, "en", invalid.header.Get("Content-Language"))
	refused(t, post(t, s.URL, "k", "{}", "X-Tenant", ""), 403, onceqhttp.CodeNoPrincipal)
	refused(t, post(t, s.URL, "", "{}", "X-Tenant", ""), 400, onceqhttp.CodeKeyMissing)
	refused(t, post(t, s.URL, `"open`, "{}", "X-Tenant", ""), 400, onceqhttp.CodeKeyInvalid)
	refused(t, post(t, s.URL, "k", "12345678901"), 413, onceqhttp.CodeRequestTooLarge)
	a := raw(t, s.Listener.Addr().String(), "POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: t\r\nIdempotency-Key: a\r\nIdempotency-Key: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
	require.Contains(t, a, "HTTP/1.1 400 ")
	require.Contains(t, a, onceqhttp.CodeKeyInvalid)
	require.Zero(t, ran.count())
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.job_fences`))
	require.Equal(t, 200, post(t, s.URL, "k", "1234567890").status)

	asked := newRuns()
	failing := serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{Principal: func(*http.Request) (string, error) {
		asked.next()
		return "t", errors.New("expired")
	}}).Handler(ran.answering(200)))
	refused(t, post(t, failing.URL, "", ""), 400, onceqhttp.CodeKeyMissing)
	refused(t, post(t, failing.URL, "a b", ""), 400, onceqhttp.CodeKeyInvalid)
	require.Zero(t, asked.count(), "a key that is none is not looked up for anybody")
	refused(t, post(t, failing.URL, "k", ""), 403, onceqhttp.CodeNoPrincipal)
}

func TestHandler_OptionalAndSafeRequestsGoThrough(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := newRuns()
	optional := serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{Optional: true, MaxRequest: 10}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, r.Header.Get("Idempotency-Key") != "", onceqhttp.FromContext(r.Context()) != nil)
		ran.answering(200).ServeHTTP(w, r)
	})))
	require.Equal(t, "1:a long long body", post(t, optional.URL, "", "a long long body", "X-Tenant", "").body)
	require.Equal(t, "2:a long long body", post(t, optional.URL, "", "a long long body").body)
	require.Equal(t, "3:a", post(t, optional.URL, "k", "a").body)
	require.Equal(t, "3:a", post(t, optional.URL, "k", "a").body)
	refused(t, post(t, optional.URL, `"open`, "a"), 400, onceqhttp.CodeKeyInvalid)

	ran = newRuns()
	required := serve(t, "/", middleware(t, db.Queue, onceqhttp.Config{}).Handler(ran.answering(200)))
	for i, method := range []string{"GET", "GET", "OPTIONS", "HEAD"} {
		a, err := ask(t, method, required.URL, "k", "", "X-Tenant", "")
		require.NoError(t, err)
		require.Equal(t, 200, a.status)
		require.False(t, a.replayed())
		require.Equal(t, i+1, ran.count())
	}
}

func TestHandler_WhichStatusesAreStored(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for _, c := range []struct {
		status int
		mark   func(*onceqhttp.Request)
		policy onceq.Policy
		second int // 0: replayed
		runs   int
	}{
		{status: 200, runs: 1}, {status: 201, runs: 1}, {status: 204, runs: 1}, {status: 303, runs: 1},
		{status: 400, runs: 1}, {status: 403, runs: 1}, {status: 404, runs: 1}, {status: 409, runs: 1}, {status: 422, runs: 1},
		{status: 401, second: 401, runs: 2}, {status: 408, second: 408, runs: 2}, {status: 421, second: 421, runs: 2},
		{status: 423, second: 423, runs: 2}, {status: 425, second: 425, runs: 2}, {status: 429, second: 429, runs: 2},
		{status: 408, second: 408, runs: 2, policy: onceq.Hold()}, {status: 429, second: 429, runs: 2, policy: onceq.Hold()},
		{status: 500, second: 500, runs: 2}, {status: 503, second: 503, runs: 2},
		{status: 500, second: 409, runs: 1, policy: onceq.Hold()},
		{status: 500, runs: 1, mark: (*onceqhttp.Request).Committed},
		{status: 500, runs: 1, mark: (*onceqhttp.Request).Committed, policy: onceq.Hold()},
		{status: 429, runs: 1, mark: (*onceqhttp.Request).Committed},
		{status: 500, second: 500, runs: 2, mark: (*onceqhttp.Request).NotApplied, policy: onceq.Hold()},
		{status: 200, runs: 1, mark: (*onceqhttp.Request).NotApplied},
		{status: 500, runs: 1, mark: func(r *onceqhttp.Request) { r.NotApplied(); r.Committed() }, policy: onceq.Hold()},
		{status: 500, runs: 1, mark: func(r *onceqhttp.Request) { r.Committed(); r.NotApplied() }, policy: onceq.Hold()},
	} {
		ran := newRuns()
		s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Policy: c.policy}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if c.mark != nil {
				c.mark(onceqhttp.FromContext(r.Context()))
			}
			ran.answering(c.status).ServeHTTP(w, r)
		})))
		key := s.Listener.Addr().String()
		require.Equal(t, c.status, post(t, s.URL, key, "").status)
		again := post(t, s.URL, key, "")
		require.Equal(t, c.second == 0, again.replayed(), "%+v", c)
		if c.second == 0 {
			c.second = c.status
		}
		require.Equal(t, c.second, again.status, "%+v", c)
		require.Equal(t, c.runs, ran.count(), "%+v", c)
		if c.second != c.status {
			refused(t, again, c.second, onceqhttp.CodeHeld)
		}
	}

	ran := newRuns()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Outcome: func(status int) onceqhttp.Outcome {
		if status == 418 {
			return onceqhttp.Release
		}
		return onceqhttp.Store
	}}).Handler(ran.answering(418)))
	post(t, s.URL, "own", "")
	require.Equal(t, "2:", post(t, s.URL, "own", "").body)
}

func TestHandler_UnknownOutcomeIsDecidedByThePolicy(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	// died stands in for a process that was killed in the handler. TestProcess_Killed… kills a real one.
	died := func(key string) {
		until(t, db, `1 = (select count(*) from onceq.job_fences where key = $1 and state = 1)`, key)
		sqlRun(t, db, `update onceq.job_fences set leased_until = statement_timestamp(), holder = 0 where key = $1`, key)
	}
	for name, policy := range map[string]onceq.Policy{
		"again": {}, "hold": onceq.Hold(),
		"applied": onceq.Ask(func(context.Context, string) (any, bool, error) {
			return onceqhttp.Response{Status: 202, Header: http.Header{"X-Asked": {"1"}}, Body: []byte("asked")}, true, nil
		}),
		"not-applied": onceq.Ask(func(context.Context, string) (any, bool, error) { return nil, false, nil }),
		"no-idea":     onceq.Ask(func(context.Context, string) (any, bool, error) { return nil, false, errors.New("no idea") }),
	} {
		t.Run(name, func(t *testing.T) {
			keys, hang, hangs := make(chan string, 2), make(chan struct{}), newRuns()
			free := sync.OnceFunc(func() { close(hang) }) // even if the test fails: the server waits for its handlers
			defer free()
			m := middleware(t, db.Queue, onceqhttp.Config{Policy: policy})
			s := serve(t, "POST /o/{id}", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				keys <- onceqhttp.FromContext(r.Context()).Lease.IdempotencyKey()
				if hangs.next() == 1 {
					<-hang
				}
				_, _ = io.WriteString(w, "done")
			})))
			first := make(chan answer, 1)
			go func() {
				a, _ := ask(t, "POST", s.URL+"/o/1", name, "")
				first <- a
			}()
			downstream := receive(t, keys)
			died(name)
			if policyAsks := name != "again" && name != "hold"; policyAsks {
				refused(t, post(t, s.URL+"/o/1", name, ""), 409, onceqhttp.CodeInFlight) // the first request may still be running
				sqlRun(t, db, `update onceq.job_fences set leased_until = leased_until - interval '1 minute' where key = $1`, name)
			}
			again := post(t, s.URL+"/o/1", name, "")
			free()
			refused(t, receive(t, first), 409, onceqhttp.CodeInFlight) // it has lost its lease: the other answer counts
			switch name {
			case "again", "not-applied":
				require.Equal(t, "done", again.body)
				require.Equal(t, downstream, receive(t, keys), "the same key goes downstream")
				require.True(t, post(t, s.URL+"/o/1", name, "").replayed())
			case "applied":
				require.Equal(t, "asked", again.body)
				require.Equal(t, 202, again.status)
				require.Equal(t, "1", again.header.Get("X-Asked"))
				require.True(t, again.replayed())
			case "no-idea":
				refused(t, again, 503, onceqhttp.CodeUncertain)
				require.Equal(t, "1", again.header.Get("Retry-After"))
			case "hold":
				refused(t, again, 409, onceqhttp.CodeHeld)
				f, err := m.Fence("t", "POST", "POST /o/{id}", name)
				require.NoError(t, err)
				require.NoError(t, f.Resolve(t.Context(), nil, onceq.Applied(onceqhttp.Response{Body: []byte("by hand")})))
				again = post(t, s.URL+"/o/1", name, "")
				require.True(t, again.replayed())
				require.Equal(t, "by hand", again.body)
				require.Equal(t, 200, again.status)
			}
			require.Empty(t, keys)
		})
	}
}

func TestHandler_ResolvedWithNothing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{Policy: onceq.Hold()})
	s := serve(t, "POST /", m.Handler(newRuns().answering(500)))
	post(t, s.URL, "k", "")
	f, err := m.Fence("t", "POST", "POST /", "k")
	require.NoError(t, err)
	require.NoError(t, f.Resolve(t.Context(), nil, onceq.Applied(nil)))
	a := post(t, s.URL, "k", "")
	require.Equal(t, 200, a.status, a.body)
	require.True(t, a.replayed())
}

// A request whose provider does not answer does not wait for ever.
func TestHandler_AskingEndsByTheDeadlineToo(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{Timeout: 10 * time.Second, Policy: onceq.Ask(func(ctx context.Context, _ string) (any, bool, error) {
		if _, ok := ctx.Deadline(); !assert.True(t, ok) {
			return nil, true, nil
		}
		<-ctx.Done()
		return nil, false, ctx.Err()
	})})
	ran := newRuns()
	s := serve(t, "POST /", m.Handler(ran.answering(500)))
	require.Equal(t, 500, post(t, s.URL, "k", "").status)
	sqlRun(t, db, `update onceq.job_fences set leased_until = leased_until - interval '1 minute'`) // no request is running any more
	refused(t, post(t, s.URL, "k", ""), 503, onceqhttp.CodeUncertain)
	require.Equal(t, 1, ran.count())
}

// What the error of an Ask wraps says nothing about the request.
func TestHandler_AskingThatFails(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, tooMuch := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Queue: strings.Repeat("x", 10_000)})
	for name, failure := range map[string]error{
		"mismatch": onceq.ErrMismatch, "invalid": tooMuch, "held": &onceq.HeldError{}, "in-flight": &onceq.InFlightError{}, "lost": onceq.ErrLeaseLost,
	} {
		t.Run(name, func(t *testing.T) {
			m := middleware(t, db.Queue, onceqhttp.Config{Policy: onceq.Ask(func(context.Context, string) (any, bool, error) {
				return nil, false, fmt.Errorf("asking: %w", failure)
			})})
			s := serve(t, "POST /", m.Handler(newRuns().answering(500)))
			require.Equal(t, 500, post(t, s.URL, name, "").status)
			sqlRun(t, db, `update onceq.job_fences set leased_until = leased_until - interval '1 minute' where key = $1`, name) // no request is running any more
			refused(t, post(t, s.URL, name, ""), 503, onceqhttp.CodeUncertain)
		})
	}
}

func TestHandler_AskingThatLostItsClaimIsInFlight(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	asked := newRuns()
	m := middleware(t, db.Queue, onceqhttp.Config{Policy: onceq.Ask(func(context.Context, string) (any, bool, error) {
		asked.next()
		sqlRun(t, db, `update onceq.job_fences set holder = 0 where key = 'k'`)
		return onceqhttp.Response{}, true, nil
	})})
	s := serve(t, "POST /", m.Handler(newRuns().answering(500)))
	require.Equal(t, 500, post(t, s.URL, "k", "").status)
	sqlRun(t, db, `update onceq.job_fences set leased_until = leased_until - interval '1 minute'`) // no request is running any more
	refused(t, post(t, s.URL, "k", ""), 409, onceqhttp.CodeInFlight)
	require.Equal(t, 1, asked.count())
}

// A stored result that is not an answer is not sent as one, and the client is not told to retry for ever.
func TestHandler_ResolvedWithWhatIsNoAnswer(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{Policy: onceq.Hold()})
	s := serve(t, "POST /", m.Handler(newRuns().answering(500)))
	tx := serve(t, "POST /", m.HandlerTx(db.Pool, status(200)))
	for key, result := range map[string]any{
		"text": "a text", "list": []int{1}, "low": onceqhttp.Response{Status: 101}, "high": onceqhttp.Response{Status: 1000},
		"not a byte": map[string]any{"header": map[string][]string{"X": {"→"}}},
	} {
		key = strings.ReplaceAll(key, " ", "-")
		t.Run(key, func(t *testing.T) {
			post(t, s.URL, key, "")
			f, err := m.Fence("t", "POST", "POST /", key)
			require.NoError(t, err)
			require.NoError(t, f.Resolve(t.Context(), nil, onceq.Applied(result)))
			for _, url := range []string{s.URL, tx.URL} {
				a := post(t, url, key, "")
				refused(t, a, 500, onceqhttp.CodeResponseUnreadable)
				require.Contains(t, a.problem(t).Detail, "was carried out")
			}
		})
	}
}

// A form that was parsed before leaves no body.
func TestHandler_FormsThatWereParsedBefore(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	multi := func(amount, file string) string {
		return "--b\r\nContent-Disposition: form-data; name=\"amount\"\r\n\r\n" + amount +
			"\r\n--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"f\"\r\n\r\n" + file + "\r\n--b--\r\n"
	}
	const form = "application/x-www-form-urlencoded"
	for name, c := range map[string]struct {
		contentType   string
		first, second string
		same          bool
	}{
		"same":                {form, "amount=1", "amount=1", true},
		"another":             {form, "amount=1", "amount=2", false},
		"no UTF-8":            {form, "amount=%fe", "amount=%ff", false},
		"multipart":           {"multipart/form-data; boundary=b", multi("1", "x"), multi("1", "x"), true},
		"another in parts":    {"multipart/form-data; boundary=b", multi("1", "x"), multi("2", "x"), false},
		"another file's size": {"multipart/form-data; boundary=b", multi("1", "x"), multi("1", "xx"), false},
	} {
		for _, where := range []string{"outside", "in Principal"} {
			parse := func(r *http.Request) { _ = r.ParseMultipartForm(1 << 20) }
			m := middleware(t, db.Queue, onceqhttp.Config{Principal: func(r *http.Request) (string, error) {
				if where == "in Principal" {
					parse(r)
				}
				return name + where, nil
			}})
			h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.FormValue("amount")) }))
			s := serve(t, "POST /", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if where == "outside" {
					parse(r)
				}
				h.ServeHTTP(w, r)
			}))
			require.NotEmpty(t, post(t, s.URL, "k", c.first, "Content-Type", c.contentType).body)
			again := post(t, s.URL, "k", c.second, "Content-Type", c.contentType)
			if c.same {
				require.True(t, again.replayed(), name)
				continue
			}
			refused(t, again, 422, onceqhttp.CodeMismatch)
		}
	}
}

// net/http removes the files of a form that was parsed on its own request. The handler's request is a copy.
func TestHandler_LeavesNoFilesOfForms(t *testing.T) {
	db := queuetest.New(t)
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	m := middleware(t, db.Queue, onceqhttp.Config{Optional: true, Principal: func(r *http.Request) (string, error) {
		if r.Header.Get("X-How") != "refused" {
			return "p", nil
		}
		assert.NoError(t, r.ParseMultipartForm(1)) // as one does who finds a token there
		return "", nil
	}})
	parse := func(w http.ResponseWriter, r *http.Request) {
		assert.NoError(t, r.ParseMultipartForm(1))
		files, err := os.ReadDir(dir)
		assert.NoError(t, err)
		assert.Len(t, files, 1, "while it runs")
		switch r.Header.Get("X-How") {
		case "panic":
			panic("bad day")
		case "error":
			w.WriteHeader(500)
		}
	}
	mux := http.NewServeMux()
	mux.Handle("POST /plain", m.Handler(http.HandlerFunc(parse)))
	mux.Handle("POST /tx", m.HandlerTx(db.Pool, func(w http.ResponseWriter, r *http.Request, _ pgx.Tx) error {
		parse(w, r)
		return nil
	}))
	s := serve(t, "/", mux)
	form := "--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"f\"\r\n\r\n" + strings.Repeat("x", 100<<10) + "\r\n--b--\r\n"
	for _, path := range []string{"/plain", "/tx"} {
		for _, how := range []string{"answer", "error", "panic", "refused"} {
			for _, key := range []string{how, ""} {
				if how == "refused" && key == "" {
					continue // nobody asks for the principal
				}
				if how == "panic" && key == "" && path == "/plain" {
					continue // only net/http runs here, and it leaves the files of handlers that panic
				}
				a, err := ask(t, "POST", s.URL+path, key, form, "Content-Type", "multipart/form-data; boundary=b", "X-How", how)
				require.Equal(t, how == "panic", err != nil)
				if err == nil {
					require.Equal(t, how == "answer", a.status == 200, a.body)
				}
				eventually(t, "no file", func() bool { // net/http removes its files after the answer is sent
					files, err := os.ReadDir(dir)
					require.NoError(t, err)
					return len(files) == 0
				})
			}
		}
	}
}

// Requests that were not made by a server: tests and adapters call handlers directly.
func TestHandler_RequestsThatNoServerMade(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{Optional: true})
	reads := func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		assert.NoError(t, err)
		_, _ = fmt.Fprintf(w, "%q", body)
	}
	for name, h := range map[string]http.Handler{
		"plain": m.Handler(http.HandlerFunc(reads)),
		"tx":    m.HandlerTx(db.Pool, func(w http.ResponseWriter, r *http.Request, _ pgx.Tx) error { reads(w, r); return nil }),
	} {
		for _, method := range []string{"POST", "GET"} {
			for _, key := range []string{name, name, ""} {
				r, err := http.NewRequestWithContext(t.Context(), method, "http://h/"+name, nil)
				require.NoError(t, err)
				r.Header.Set("X-Tenant", "t")
				if key != "" {
					r.Header.Set("Idempotency-Key", key)
				}
				w := httptest.NewRecorder()
				h.ServeHTTP(w, r)
				require.Equal(t, `""`, w.Body.String())
			}
		}
	}
	require.Equal(t, 2, sqlOne[int](t, db, `select count(*) from onceq.job_fences`))
}

func TestHandler_WhatAPrincipalParsesIsLimitedToo(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := newRuns()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{MaxRequest: 10, Principal: func(r *http.Request) (string, error) {
		assert.ErrorContains(t, r.ParseForm(), "too large")
		return "t", nil
	}}).Handler(ran.answering(200)))
	refused(t, post(t, s.URL, "large", "amount=12345", "Content-Type", "application/x-www-form-urlencoded"), 413, onceqhttp.CodeRequestTooLarge)
	require.Zero(t, ran.count())
}

func TestHandler_PanicLeavesTheKeyUncertain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for name, policy := range map[string]onceq.Policy{"again": {}, "hold": onceq.Hold()} {
		ran := newRuns()
		s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Policy: policy}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, "nobody sees this")
			if ran.next() == 1 {
				panic("bad day")
			}
		})))
		_, err := ask(t, "POST", s.URL, name, "")
		require.ErrorIs(t, err, io.EOF, "as without the middleware")
		require.Equal(t, 2, sqlOne[int](t, db, `select state from onceq.job_fences where key = $1`, name), "uncertain, at once")
		a := post(t, s.URL, name, "")
		if name == "hold" {
			refused(t, a, 409, onceqhttp.CodeHeld)
		} else {
			require.Equal(t, 200, a.status)
			require.Equal(t, 2, ran.count())
		}
	}
}

func TestHandler_GoesOnWhenTheClientLeaves(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	entered, gate := make(chan *http.Request, 1), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) }) // even if the test fails: the server waits for its handlers
	defer open()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		entered <- r
		<-gate
		assert.NoError(t, r.Context().Err())
		_, _ = io.WriteString(w, "done")
	})))
	r := leave(t, s, entered)
	require.NoError(t, r.Context().Err())
	deadline, ok := r.Context().Deadline()
	require.True(t, ok)
	require.LessOrEqual(t, time.Until(deadline), 30*time.Second)
	open()
	until(t, db, `exists (select from onceq.job_fences where state = 3)`)
	a := post(t, s.URL, "k", "")
	require.Equal(t, "done", a.body)
	require.True(t, a.replayed())
}

func TestHandler_EndsByItsOwnDeadline(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Timeout: 10 * time.Second}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		w.WriteHeader(504)
		_, _ = io.WriteString(w, context.Cause(r.Context()).Error())
	})))
	a := post(t, s.URL, "k", "")
	require.Equal(t, 504, a.status)
	require.Equal(t, context.DeadlineExceeded.Error(), a.body)
	s = serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Timeout: onceq.NoTimeout}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, has := r.Context().Deadline()
		assert.False(t, has)
	})))
	require.Equal(t, 200, post(t, s.URL, "none", "").status)
}

func TestHandler_KeepsItsLeaseAlive(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	entered, gate := make(chan time.Time, 2), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) }) // even if the test fails: the server waits for its handlers
	defer open()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Lease: 15 * time.Second}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		entered <- onceqhttp.FromContext(r.Context()).Lease.Until
		<-gate
	})))
	first := make(chan answer, 1)
	go func() {
		a, _ := ask(t, "POST", s.URL, "k", "")
		first <- a
	}()
	end := receive(t, entered)
	until(t, db, `exists (select from onceq.job_fences where leased_until > $1)`, end)
	refused(t, post(t, s.URL, "k", ""), 409, onceqhttp.CodeInFlight)
	open()
	require.Equal(t, 200, receive(t, first).status)
	require.True(t, post(t, s.URL, "k", "").replayed())
	require.Empty(t, entered)
}

func TestHandler_SlowAndBrokenBodiesTakeNoKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := newRuns()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).Handler(ran.answering(201)))
	const head = "POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: t\r\nIdempotency-Key: k\r\nContent-Type: application/json\r\nContent-Length: 7\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
	slow := func() (*net.TCPConn, *bufio.Reader) {
		conn, err := net.Dial("tcp", s.Listener.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		_, err = io.WriteString(conn, head)
		require.NoError(t, err)
		r := bufio.NewReader(conn)
		line, err := r.ReadString('\n') // the middleware has begun to read
		require.NoError(t, err)
		require.Equal(t, "HTTP/1.1 100 Continue\r\n", line)
		_, err = io.WriteString(conn, `{"a"`)
		require.NoError(t, err)
		return conn.(*net.TCPConn), r
	}
	broken, answers := slow()
	require.NoError(t, broken.CloseWrite())
	rest, err := io.ReadAll(answers)
	require.NoError(t, err)
	require.Contains(t, string(rest), onceqhttp.CodeUnreadable)
	require.Zero(t, ran.count())

	conn, answers := slow()
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.job_fences`))
	quick := post(t, s.URL, "k", `{"a":1}`)
	require.Equal(t, 201, quick.status)
	_, err = io.WriteString(conn, `:1}`)
	require.NoError(t, err)
	rest, err = io.ReadAll(answers)
	require.NoError(t, err)
	require.Contains(t, string(rest), "HTTP/1.1 201 ")
	require.Contains(t, string(rest), "Idempotent-Replayed: true")
	require.Contains(t, string(rest), quick.body)
	require.Equal(t, 1, ran.count())
}

// A client that waits for 100 Continue sends no body before it, so a refusal must not wait for the body.
func TestHandler_RefusesBeforeTheBody(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{MaxRequest: 100, Optional: true})
	ok := func(w http.ResponseWriter, r *http.Request) {
		_, err := io.Copy(w, r.Body)
		assert.NoError(t, err)
	}
	mux := http.NewServeMux()
	mux.Handle("POST /plain", m.Handler(http.HandlerFunc(ok)))
	mux.Handle("POST /tx", m.HandlerTx(db.Pool, func(w http.ResponseWriter, r *http.Request, _ pgx.Tx) error {
		ok(w, r)
		return nil
	}))
	s := serve(t, "/", mux)
	for name, c := range map[string]struct {
		head   string
		length int
		status string
	}{
		"no principal":           {"Idempotency-Key: k\r\n", 5, "403"},
		"a bad key":              {"X-Tenant: t\r\nIdempotency-Key: \r\n", 5, "400"},
		"a body over its limit":  {"X-Tenant: t\r\nIdempotency-Key: k\r\n", 101, "413"},
		"a right one":            {"X-Tenant: t\r\nIdempotency-Key: right\r\n", 5, "100"},
		"too large without keys": {"", 101, "413"},
	} {
		for _, path := range []string{"/plain", "/tx"} {
			if c.head == "" && path == "/plain" {
				continue // the middleware has no part in it
			}
			conn, err := net.Dial("tcp", s.Listener.Addr().String())
			require.NoError(t, err)
			defer conn.Close()
			require.NoError(t, conn.SetDeadline(time.Now().Add(2*time.Minute))) // or it would wait for ever where no answer comes
			_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: h\r\n%sContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", path, c.head, c.length)
			require.NoError(t, err)
			answers := bufio.NewReader(conn)
			line, err := answers.ReadString('\n')
			require.NoError(t, err)
			require.Contains(t, line, " "+c.status+" ", "%s, %s", name, path)
			if c.status != "100" {
				continue
			}
			_, err = io.WriteString(conn, "hello")
			require.NoError(t, err)
			_, err = answers.ReadString('\n')
			require.NoError(t, err)
			resp, err := http.ReadResponse(answers, nil)
			require.NoError(t, err)
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.Equal(t, "hello", string(body), path)
		}
	}
}

func TestHandler_AnswersThatCannotBeStored(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{MaxResponse: 10, Policy: onceq.Hold()})
	ran := newRuns()
	large := serve(t, "POST /large", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		ran.next()
		_, err := io.WriteString(w, "123456")
		assert.NoError(t, err)
		_, err = io.WriteString(w, "78901")
		assert.ErrorIs(t, err, onceqhttp.ErrResponseTooLarge)
		_, err = io.WriteString(w, "7") // refused too: it would come after a gap
		assert.ErrorIs(t, err, onceqhttp.ErrResponseTooLarge)
	})))
	for range 2 { // the first client gets the error too
		refused(t, post(t, large.URL+"/large", "k", ""), 500, onceqhttp.CodeResponseTooLarge)
	}
	require.Equal(t, 1, ran.count())
	require.Equal(t, 3, sqlOne[int](t, db, `select state from onceq.job_fences where scope like 'POST /large %'`), "the work was done")

	// This answer is never stored: the next request decides.
	failed := serve(t, "POST /failed", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(502)
		_, _ = io.WriteString(w, "12345678901")
	})))
	refused(t, post(t, failed.URL+"/failed", "k", ""), 503, onceqhttp.CodeUncertain)
	refused(t, post(t, failed.URL+"/failed", "k", ""), 409, onceqhttp.CodeHeld)

	headers := serve(t, "POST /headers", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		ran.next()
		w.Header().Set("X-Large", strings.Repeat("x", onceq.MaxResultBytes))
	})))
	for range 2 {
		refused(t, post(t, headers.URL+"/headers", "k", ""), 500, onceqhttp.CodeResponseTooLarge)
	}
	require.Equal(t, 2, ran.count())

	// This is the largest answer that Config allows, of the bytes that take the most room.
	m = middleware(t, db.Queue, onceqhttp.Config{MaxResponse: 180 << 10})
	s := serve(t, "POST /max", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, strings.Repeat("\xff", 180<<10))
	})))
	first, again := post(t, s.URL+"/max", "k", ""), post(t, s.URL+"/max", "k", "")
	require.Equal(t, 200, first.status)
	require.True(t, again.replayed())
	require.Equal(t, first.body, again.body)
}

func TestHandler_StreamingAndHijackingAreRefused(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, flusher := w.(http.Flusher)
		assert.False(t, flusher)
		c := http.NewResponseController(w)
		for _, err := range []error{c.Flush(), func() error { _, _, err := c.Hijack(); return err }()} {
			assert.ErrorIs(t, err, http.ErrNotSupported)
			assert.ErrorContains(t, err, "without the middleware")
		}
		assert.ErrorIs(t, c.EnableFullDuplex(), http.ErrNotSupported)
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(201)
		w.WriteHeader(500)
	})))
	require.Equal(t, 201, post(t, s.URL, "k", "").status)

	s = serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(42)
	})))
	_, err := ask(t, "POST", s.URL, "bad-status", "")
	require.ErrorIs(t, err, io.EOF, "net/http panics too")

	s = serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{Policy: onceq.Hold()}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusSwitchingProtocols)
	})))
	_, err = ask(t, "POST", s.URL, "another-protocol", "")
	require.ErrorIs(t, err, io.EOF, "no empty 200")
	refused(t, post(t, s.URL, "another-protocol", ""), 409, onceqhttp.CodeHeld)
}

// Some headers cannot be sent. The first answer and its replay contain what can be sent of them.
func TestHandler_HeadersThatCannotBeSent(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{})
	for path, h := range map[string]http.Handler{
		"/plain": m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _ = odd(w, r, nil) })),
		"/tx":    m.HandlerTx(db.Pool, odd),
	} {
		s := serve(t, "POST "+path, h)
		for _, replayed := range []bool{false, true} {
			a := post(t, s.URL+path, "k", "")
			require.Equal(t, 200, a.status, a.body)
			require.Equal(t, replayed, a.replayed())
			require.Equal(t, "a b", a.header.Get("X-Nul"))
			require.Equal(t, "a b", a.header.Get("X-Line"))
			require.Len(t, a.header, map[bool]int{false: 4, true: 5}[replayed], "%v", a.header)
		}
	}
}

func odd(w http.ResponseWriter, _ *http.Request, _ pgx.Tx) error {
	w.Header().Set("X-Nul", "a\x00b")
	w.Header().Set("X-Line", "a\nb")
	for _, name := range []string{"", "X-\x00", "X Y", "X:", "X-ü", "X-\xff"} {
		w.Header()[name] = []string{"1"}
	}
	return nil
}

// Trailers of a request reach the handler. Trailers of an answer are left out, even of the first answer.
func TestHandler_Trailers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	m := middleware(t, db.Queue, onceqhttp.Config{Optional: true})
	echo := func(w http.ResponseWriter, r *http.Request, _ pgx.Tx) error {
		w.Header().Set("Trailer", "X-Sum")
		_, err := io.WriteString(w, r.Trailer.Get("X-Sum"))
		w.Header().Set("X-Sum", "1")
		w.Header().Set(http.TrailerPrefix+"X-More", "1")
		return err
	}
	for path, h := range map[string]http.Handler{
		"/plain": m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _ = echo(w, r, nil) })),
		"/tx":    m.HandlerTx(db.Pool, echo),
	} {
		s := serve(t, "POST "+path, h)
		keys := []string{"k", "k"}
		if path == "/tx" {
			keys = append(keys, "")
		}
		for i, key := range keys {
			header := "POST " + path + " HTTP/1.1\r\nHost: h\r\nX-Tenant: t\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n"
			if key != "" {
				header += "Idempotency-Key: " + key + "\r\n"
			}
			a := raw(t, s.Listener.Addr().String(), header+"\r\n1\r\nx\r\n0\r\nX-Sum: sum\r\n\r\n")
			require.Equal(t, i == 1, strings.Contains(a, "\nIdempotent-Replayed: true\n"))
			require.Contains(t, a, "HTTP/1.1 200 ")
			require.True(t, strings.HasSuffix(a, "\n\nsum"), a)
			require.NotContains(t, a, "X-Sum")
			require.NotContains(t, a, "X-More")
		}
	}
}

func TestHandler_AfterTheWindowTheKeyIsNew(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := newRuns()
	s := serve(t, "POST /", middleware(t, db.Queue, onceqhttp.Config{}).Handler(ran.answering(200)))
	require.Equal(t, "1:", post(t, s.URL, "k", "").body)
	db.Advance(23 * time.Hour)
	require.Equal(t, "1:", post(t, s.URL, "k", "").body)
	refused(t, post(t, s.URL, "k", "other"), 422, onceqhttp.CodeMismatch)
	db.Advance(2 * time.Hour)
	require.Equal(t, "2:other", post(t, s.URL, "k", "other").body)
}

func TestHandler_WithoutTheDatabaseNothingRuns(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	pool, err := pgxpool.NewWithConfig(t.Context(), db.Pool.Config())
	require.NoError(t, err)
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	ran := newRuns()
	s := serve(t, "POST /", middleware(t, q, onceqhttp.Config{}).Handler(ran.answering(200)))
	pool.Close()
	a := post(t, s.URL, "k", "")
	refused(t, a, 503, onceqhttp.CodeUnavailable)
	require.Equal(t, "1", a.header.Get("Retry-After"))
	require.Zero(t, ran.count())
}

func TestHandler_AnswerThatCannotBeRecordedStillGoesOut(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	owner := conformance.Owner(t, db)
	m := middleware(t, db.Queue, onceqhttp.Config{})
	s := serve(t, "POST /", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := owner.Exec(r.Context(), `alter table job_fences rename to away`)
		assert.NoError(t, err)
		_, _ = io.WriteString(w, "done")
	})))
	a := post(t, s.URL, "k", "")
	_, err := owner.Exec(t.Context(), `alter table away rename to job_fences`)
	require.NoError(t, err)
	require.Equal(t, "done", a.body)
	refused(t, post(t, s.URL, "k", ""), 409, onceqhttp.CodeInFlight)
}

func TestScope_IsReadableAndBounded(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	long := strings.Repeat("/ü", 300)
	m := middleware(t, db.Queue, onceqhttp.Config{Route: func(r *http.Request) string { return long + r.Header.Get("X-Route") }})
	ran := newRuns()
	s := serve(t, "POST /", m.Handler(ran.answering(200)))
	for _, route := range []string{"1", "2"} {
		for _, who := range []string{strings.Repeat("x", 1000), "y\x00"[:1]} {
			require.Equal(t, 200, post(t, s.URL, "k", "", "X-Route", route, "X-Tenant", who).status)
		}
	}
	require.Equal(t, 4, ran.count())
	require.Equal(t, 4, sqlOne[int](t, db, `select count(distinct scope) from onceq.job_fences where scope like 'POST /ü%'`))
}

// Keys of unknown outcome expire, so a client whose requests fail cannot make a table grow for ever. A client that asks
// in time gets the truth for as long as it asks.
func TestHandler_KeysOfUnknownOutcomeEnd(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	reaper, err := onceq.NewReaper(db.Queue, onceq.ReaperConfig{Grace: time.Millisecond})
	require.NoError(t, err)
	reap := func() (keys int) {
		_, err := reaper.RunOnce(t.Context())
		require.NoError(t, err)
		return sqlOne[int](t, db, `select count(*) from onceq.job_fences where class = 2`)
	}
	const day = 24 * time.Hour
	no := onceq.Ask(func(context.Context, string) (any, bool, error) { return nil, false, errors.New("no idea") })
	for name, c := range map[string]struct {
		policy onceq.Policy
		tx     bool
		status int
		code   string
	}{
		"again":     {onceq.Policy{}, false, 409, onceqhttp.CodeHeld},
		"hold":      {onceq.Hold(), false, 409, onceqhttp.CodeHeld},
		"ask":       {no, false, 503, onceqhttp.CodeUncertain},
		"ask in tx": {no, true, 503, onceqhttp.CodeUncertain},
		"in tx":     {onceq.Hold(), true, 409, onceqhttp.CodeHeld},
	} {
		m := middleware(t, db.Queue, onceqhttp.Config{Policy: c.policy})
		ran := newRuns()
		fails := serve(t, "POST /", m.Handler(ran.answering(500)))
		url := fails.URL
		if c.tx {
			url = serve(t, "POST /", m.HandlerTx(db.Pool, func(w http.ResponseWriter, _ *http.Request, _ pgx.Tx) error {
				ran.next()
				return nil
			})).URL
		}
		require.Equal(t, 500, post(t, fails.URL, "k", "").status)
		for range 3 {
			db.Advance(20 * day)
			require.Equal(t, 1, reap(), name)
			refused(t, post(t, url, "k", ""), c.status, c.code)
		}
		require.Equal(t, 1, ran.count())
		db.Advance(32 * day)
		require.Zero(t, reap(), name)
		post(t, url, "k", "")
		require.Equal(t, 2, ran.count(), "the key is new")
		sqlRun(t, db, `delete from onceq.job_fences`)
	}
}

// leave sends a request and hangs up when the handler has said through entered that it runs. It returns the request
// when the server has noticed.
func leave(t *testing.T, s *httptest.Server, entered <-chan *http.Request) *http.Request {
	t.Helper()
	// The server's own context of the request shows when it has noticed that the client has left.
	outer := make(chan context.Context, 1)
	inner := s.Config.Handler
	s.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case outer <- r.Context():
		default:
		}
		inner.ServeHTTP(w, r)
	})
	conn, err := net.Dial("tcp", s.Listener.Addr().String())
	require.NoError(t, err)
	_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: t\r\nIdempotency-Key: k\r\nContent-Length: 0\r\nContent-Type: application/json\r\n\r\n")
	require.NoError(t, err)
	r := receive(t, entered)
	require.NoError(t, conn.Close())
	receive(t, receive(t, outer).Done())
	return r
}
