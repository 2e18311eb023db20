package onceqhttp_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

const urlencoded = "application/x-www-form-urlencoded"

// upload is a form as a client library builds it for each try: with a new boundary.
func upload(t testing.TB, fields ...string) (contentType, body string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i < len(fields); i += 2 {
		part, err := w.CreateFormField(fields[i])
		if name, file := strings.CutPrefix(fields[i], "file:"); file {
			part, err = w.CreateFormFile(name, name+".txt")
		}
		require.NoError(t, err)
		_, err = io.WriteString(part, fields[i+1])
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return w.FormDataContentType(), b.String()
}

// Real clients send these retries, and these other requests, with and without middleware that parses forms first.
func TestHandler_ComparesByValue(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	type request struct{ contentType, query, body string }
	multi := func(fields ...string) request {
		contentType, body := upload(t, fields...)
		return request{contentType, "", body}
	}
	encoded := func(body string) request { return request{urlencoded, "", body} }
	related := func(boundary, parts string) request {
		return request{"multipart/related; boundary=" + boundary, "", strings.ReplaceAll(parts, "--b", "--"+boundary)}
	}
	const two = "--b\r\nContent-Type: text/plain\r\n\r\n1\r\n--b\r\nContent-Type: text/plain\r\n\r\n2\r\n--b--\r\n"
	for name, c := range map[string]struct {
		first, second request
		same          bool
	}{
		"form fields in another order":       {encoded("amount=1&to=a+b"), encoded("to=a%20b&amount=1"), true},
		"other form fields":                  {encoded("amount=1"), encoded("amount=2"), false},
		"one more form field":                {encoded("amount=1"), encoded("amount=1&x="), false},
		"values in another order":            {encoded("amount=1&amount=2"), encoded("amount=2&amount=1"), false},
		"form fields that are no UTF-8":      {encoded("amount=%fe"), encoded("amount=%ff"), false},
		"a query in another order":           {request{"text/plain", "?a=1&b=2", "x"}, request{"text/plain", "?b=2&a=%31", "x"}, true},
		"values of a query in another order": {request{"text/plain", "?a=1&a=2", "x"}, request{"text/plain", "?a=2&a=1", "x"}, false},
		"a broken query":                     {request{"text/plain", "?a=1;b=2", "x"}, request{"text/plain", "?b=2;a=1", "x"}, false},
		"another boundary":                   {multi("amount", "1", "file:f", "x"), multi("amount", "1", "file:f", "x"), true},
		"parts in another order":             {multi("amount", "1", "file:f", "x"), multi("file:f", "x", "amount", "1"), true},
		"values of parts in another order":   {multi("amount", "1", "amount", "2"), multi("amount", "2", "amount", "1"), false},
		"files in another order":             {multi("file:f", "1", "file:f", "2"), multi("file:f", "2", "file:f", "1"), false},
		"another value of a part":            {multi("amount", "1", "file:f", "x"), multi("amount", "2", "file:f", "x"), false},
		"another file of the same size":      {multi("amount", "1", "file:f", "x"), multi("amount", "1", "file:f", "y"), false},
		"another name of a file":             {multi("file:f", "x"), multi("file:g", "x"), false},
		"a file for a value":                 {multi("f", "x"), multi("file:f", "x"), false},
		"another encoding":                   {encoded("amount=1"), multi("amount", "1"), false},
		"parts without names":                {related("one", two), related("two", two), true},
		"parts without names, swapped":       {related("one", two), related("two", "--b\r\nContent-Type: text/plain\r\n\r\n2\r\n--b\r\nContent-Type: text/plain\r\n\r\n1\r\n--b--\r\n"), false},
		"another header of a part":           {related("one", two), related("two", strings.Replace(two, "text/plain", "text/html", 1)), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ran := newRuns()
			m := middleware(t, db.Queue, onceqhttp.Config{Principal: func(r *http.Request) (string, error) {
				if r.Header.Get("X-Parse") == "Principal" {
					_ = r.ParseMultipartForm(1)
				}
				return name, nil
			}})
			h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(200 + ran.next())
				_ = r.ParseMultipartForm(1)
				_, _ = io.WriteString(w, r.FormValue("amount"))
			}))
			s := serve(t, "POST /", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("X-Parse") == "outside" {
					_ = r.ParseMultipartForm(1)
				}
				h.ServeHTTP(w, r)
			}))
			ways := []string{"nobody", "outside", "Principal"}
			if !strings.HasPrefix(c.first.contentType, urlencoded) && !strings.HasPrefix(c.first.contentType, "multipart/form-data") {
				ways = ways[:1]
			}
			for i, before := range ways {
				for j, after := range ways {
					key := fmt.Sprintf("%d-%d", i, j)
					first := post(t, s.URL+c.first.query, key, c.first.body, "Content-Type", c.first.contentType, "X-Parse", before)
					require.Equal(t, 200+ran.count(), first.status, first.body)
					again := post(t, s.URL+c.second.query, key, c.second.body, "Content-Type", c.second.contentType, "X-Parse", after)
					if c.same {
						require.True(t, again.replayed(), "%s %s: %s", before, after, again.body)
						require.Equal(t, first.body, again.body)
					} else {
						refused(t, again, 422, onceqhttp.CodeMismatch)
					}
				}
			}
			require.Equal(t, len(ways)*len(ways), ran.count())
		})
	}
}

// If something has read the body, all requests would look the same.
func TestHandler_RefusesBodiesThatWereReadBefore(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := newRuns()
	ways := map[string]func(*http.Request){
		"all":   func(r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) },
		"some":  func(r *http.Request) { _, _ = r.Body.Read(make([]byte, 1)) },
		"parts": func(r *http.Request) { parts, _ := r.MultipartReader(); _, _ = parts.NextPart() },
		"back": func(r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
		},
		"unpacked": func(r *http.Request) { r.Body = io.NopCloser(strings.NewReader("x")) },
		"not":      func(*http.Request) {},
	}
	read := func(r *http.Request) { ways[r.Header.Get("X-Read")](r) }
	m := middleware(t, db.Queue, onceqhttp.Config{Principal: func(r *http.Request) (string, error) {
		if r.Header.Get("X-Where") == "Principal" {
			read(r)
		}
		return "t", nil
	}})
	h := m.Handler(ran.answering(200))
	s := serve(t, "POST /", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Where") == "outside" {
			read(r)
		}
		h.ServeHTTP(w, r)
	}))
	contentType, body := upload(t, "amount", "1", "file:f", "x")
	for _, where := range []string{"outside", "Principal"} {
		for _, how := range []string{"all", "some", "parts"} {
			refused(t, post(t, s.URL, "k", body, "Content-Type", contentType, "X-Read", how, "X-Where", where), 500, onceqhttp.CodeUnavailable)
		}
		require.Equal(t, 200, post(t, s.URL, "back"+where, body, "X-Read", "back", "X-Where", where).status)
		require.Equal(t, 200, post(t, s.URL, "unpacked"+where, body, "X-Read", "unpacked", "X-Where", where, "Content-Encoding", "gzip").status)
	}
	require.Equal(t, 4, ran.count())

	// The body comes without a length.
	const head = "POST / HTTP/1.1\r\nHost: h\r\nX-Where: outside\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
	chunked := func(how, key, contentType, body string) string {
		return raw(t, s.Listener.Addr().String(), head+"X-Read: "+how+"\r\nIdempotency-Key: "+key+"\r\n"+contentType+"\r\n"+body+"0\r\n\r\n")
	}
	const json = "Content-Type: application/json\r\n"
	require.Contains(t, chunked("all", "c", json, "2\r\n{}\r\n"), onceqhttp.CodeUnavailable)
	require.Contains(t, chunked("not", "c", json, "2\r\n{}\r\n"), "HTTP/1.1 200 ")
	require.Contains(t, chunked("not", "d", "", ""), "HTTP/1.1 200 ")
	require.Equal(t, 6, ran.count())
}

// It makes no difference what parses a form first.
func FuzzFingerprint_OfParsedForms(f *testing.F) {
	f.Add(urlencoded, "a=1&b=2", "x=1")
	for _, body := range []string{
		"--b\r\nContent-Disposition: form-data; name=\"a\"; filename=\"f\"\r\n\r\nx\r\n--b--\r\n",
		"--b\r\nContent-Disposition: form-data; name=\"a\"\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n=41\r\n--b--",
		"--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nno end",
		"--b\r\nContent-Disposition: form-data\r\n\r\nno name\r\n--b--",
		"--b--",
	} {
		f.Add("multipart/form-data; boundary=b", body, "x=1;y")
	}
	f.Add("application/json", `{"a": 1}`, "%")
	f.Fuzz(func(t *testing.T, contentType, body, query string) {
		request := func() *http.Request {
			r := httptest.NewRequest("POST", "http://h/", strings.NewReader(body))
			r.URL.RawQuery = query
			r.Header.Set("Content-Type", contentType)
			return r
		}
		sum := func(r *http.Request, body string) string {
			return fmt.Sprintf("%+v", onceqhttp.Fingerprint(r, []byte(body)))
		}
		unparsed := sum(request(), body)
		require.Equal(t, unparsed, sum(request(), body))
		if parts, err := request().MultipartReader(); err == nil {
			for p, err := parts.NextPart(); err == nil; p, err = parts.NextPart() {
				if p.FormName() == "" {
					return // a parsed form does not contain this
				}
			}
		}
		r := request()
		if err := r.ParseMultipartForm(0); err != nil && !errors.Is(err, http.ErrNotMultipart) {
			return
		}
		if r.MultipartForm != nil {
			defer func() { _ = r.MultipartForm.RemoveAll() }()
		}
		left, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		if len(r.PostForm) == 0 && (r.MultipartForm == nil || len(r.MultipartForm.File) == 0) {
			return // nothing was parsed
		}
		require.Empty(t, left)
		require.Equal(t, unparsed, sum(r, ""))
	})
}
