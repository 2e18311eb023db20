package onceqhttp

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
)

// Fingerprint is the default for what must be the same when a key comes back: the method, the path as the client sent
// it, the query and the body. Where it can, it compares values instead of bytes:
//
//   - JSON: the order of members, white space and spelling do not count. Of members with the same name the last one counts.
//   - A query or a form: the order of the names does not count. The order of the values of one name does.
//   - A multipart body: the boundary does not count. The contents of all parts count, and so do the headers of files and of
//     parts without a name.
//
// It makes no difference whether a form was parsed before, although parsing consumes the body. Everything else, and
// every body that is malformed, is compared byte by byte.
func Fingerprint(r *http.Request, body []byte) any { return fingerprint(r, body, true) }

func fingerprint(r *http.Request, body []byte, asJSON bool) any {
	f := struct {
		Method string          `json:"method"`
		Path   string          `json:"path"`
		Query  []byte          `json:"query"` // may be invalid UTF-8
		JSON   json.RawMessage `json:"json,omitempty"`
		SHA256 []byte          `json:"sha256,omitempty"`
		Form   []byte          `json:"form,omitempty"`
	}{Method: r.Method, Path: requested(r), Query: []byte(r.URL.RawQuery)}
	if q, err := url.ParseQuery(r.URL.RawQuery); err == nil {
		f.Query = []byte(q.Encode())
	}
	form, err := formOf(r, body)
	switch {
	case err != nil:
		return unusable{err}
	case form != nil:
		f.Form = form.digest()
	case asJSON && isJSON(r, body):
		f.JSON = body
	default:
		sum := sha256.Sum256(body)
		f.SHA256 = sum[:]
	}
	return f
}

// unusable is a fingerprint that could not be computed. It fails to encode, and so the request is refused.
type unusable struct{ err error }

func (u unusable) MarshalJSON() ([]byte, error) { return nil, u.err }

func isJSON(r *http.Request, body []byte) bool {
	t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && (t == "application/json" || strings.HasSuffix(t, "+json")) && json.Valid(body)
}

var errReadBefore = errors.New("onceqhttp: something read the body before the middleware, so the middleware cannot compare the request: put the body back (r.Body = io.NopCloser(bytes.NewReader(body))), or only parse a form; if the body was decompressed, delete Content-Encoding and set r.ContentLength to -1")

// readBefore reports whether part of the body has been read already. If the body came without a length, it notices only
// when all of it has.
func readBefore(r *http.Request, body []byte) bool {
	switch {
	case parsed(r):
		return false
	case r.ContentLength < 0:
		return len(body) == 0 && r.Header.Get("Content-Type") != ""
	}
	return int64(len(body)) < r.ContentLength && r.Header.Get("Content-Encoding") == "" // middleware may have decompressed it
}

// parsed reports whether a form was parsed, which consumes the body. http.Request.MultipartReader leaves an empty form.
func parsed(r *http.Request) bool {
	return len(r.PostForm) > 0 || r.MultipartForm != nil && len(r.MultipartForm.Value)+len(r.MultipartForm.File) > 0
}

// form is the value of a form or of another multipart body.
type form struct {
	multipart bool
	values    url.Values
	parts     map[string][]part // files, and under "" the parts without a name
}

type part struct {
	header textproto.MIMEHeader
	sha256 []byte
}

// formOf returns the form that a request contains, parsed or not. It is nil if there is no form, or a malformed one.
func formOf(r *http.Request, body []byte) (*form, error) {
	if len(body) == 0 && parsed(r) {
		return parsedForm(r)
	}
	t, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch {
	case err != nil:
	case t == "application/x-www-form-urlencoded":
		if values, err := url.ParseQuery(string(body)); err == nil {
			return &form{values: values}, nil
		}
	case strings.HasPrefix(t, "multipart/") && params["boundary"] != "":
		return multipartForm(multipart.NewReader(bytes.NewReader(body), params["boundary"])), nil
	}
	return nil, nil
}

func multipartForm(r *multipart.Reader) *form {
	f := &form{multipart: true, values: make(url.Values), parts: make(map[string][]part)}
	for {
		p, err := r.NextPart()
		if err == io.EOF { // compared with ==: a wrapped io.EOF means that the last boundary is missing
			return f
		}
		if err != nil {
			return nil
		}
		content, err := io.ReadAll(p)
		if err != nil {
			return nil
		}
		// multipart.Reader.ReadForm tells values from files in the same way.
		if name := p.FormName(); name != "" && p.FileName() == "" {
			f.values.Add(name, string(content))
		} else {
			sum := sha256.Sum256(content)
			f.parts[name] = append(f.parts[name], part{p.Header, sum[:]})
		}
	}
}

func parsedForm(r *http.Request) (*form, error) {
	if r.MultipartForm == nil {
		return &form{values: r.PostForm}, nil
	}
	f := &form{multipart: true, values: r.MultipartForm.Value, parts: make(map[string][]part)}
	for name, files := range r.MultipartForm.File {
		for _, file := range files {
			sum, err := contentOf(file)
			if err != nil {
				return nil, fmt.Errorf("reading a file of the parsed form: %w", err)
			}
			f.parts[name] = append(f.parts[name], part{file.Header, sum})
		}
	}
	return f, nil
}

func contentOf(file *multipart.FileHeader) ([]byte, error) {
	content, err := file.Open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = content.Close() }()
	h := sha256.New()
	_, err = io.Copy(h, content)
	return h.Sum(nil), err
}

func (f *form) digest() []byte {
	h := sha256.New()
	_, _ = fmt.Fprintln(h, f.multipart, f.values.Encode())
	for _, name := range slices.Sorted(maps.Keys(f.parts)) {
		for _, p := range f.parts[name] {
			_, _ = fmt.Fprintf(h, "%q %q %x\n", name, p.header, p.sha256) // fmt prints a map in the order of its keys
		}
	}
	return h.Sum(nil)
}
