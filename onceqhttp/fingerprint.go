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

// Fingerprint is what must be the same, by default, when a key comes back: method, path as the client sent it, query and body,
// by value where there is one.
//
//   - JSON: order of members, white space and spelling do not count, and of members with the same name the last one does.
//   - A query and a form: the order of its names does not count, that of the values of one name does.
//   - A body of several parts: nor does the boundary. The headers of files and of parts without a name count, and the contents
//     of all.
//
// A form that was parsed before, which leaves no body, is the same as one that was not. Everything else, and what is broken, is
// compared byte by byte.
func Fingerprint(r *http.Request, body []byte) any { return fingerprint(r, body, true) }

func fingerprint(r *http.Request, body []byte, asJSON bool) any {
	f := struct {
		Method string          `json:"method"`
		Path   string          `json:"path"`
		Query  []byte          `json:"query"` // need not be UTF-8
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

// unusable is a fingerprint that could not be made. It cannot be encoded, and so refuses the request.
type unusable struct{ err error }

func (u unusable) MarshalJSON() ([]byte, error) { return nil, u.err }

func isJSON(r *http.Request, body []byte) bool {
	t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && (t == "application/json" || strings.HasSuffix(t, "+json")) && json.Valid(body)
}

var errReadBefore = errors.New("onceqhttp: somebody has read the body before the middleware, which cannot tell one request from another then: put the body back (r.Body = io.NopCloser(bytes.NewReader(body))), or only parse a form; where the body was unpacked, delete Content-Encoding and set r.ContentLength to -1")

// readBefore reports whether a part of the body is missing. Of one that came without a length, only that all of it is.
func readBefore(r *http.Request, body []byte) bool {
	switch {
	case parsed(r):
		return false
	case r.ContentLength < 0:
		return len(body) == 0 && r.Header.Get("Content-Type") != ""
	}
	return int64(len(body)) < r.ContentLength && r.Header.Get("Content-Encoding") == "" // somebody may have unpacked it
}

// parsed reports whether a form was parsed, which reads the body. http.Request.MultipartReader leaves an empty form.
func parsed(r *http.Request) bool {
	return len(r.PostForm) > 0 || r.MultipartForm != nil && len(r.MultipartForm.Value)+len(r.MultipartForm.File) > 0
}

// form is the value of a form or of another body of several parts.
type form struct {
	multipart bool
	values    url.Values
	parts     map[string][]part // files, and under "" whatever has no name
}

type part struct {
	header textproto.MIMEHeader
	sha256 []byte
}

// formOf gives the form that a request contains, parsed or not. It is nil where there is none, or a broken one.
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
		if err == io.EOF { // itself: wrapped it says that the last boundary is missing
			return f
		}
		if err != nil {
			return nil
		}
		content, err := io.ReadAll(p)
		if err != nil {
			return nil
		}
		// As multipart.Reader.ReadForm tells them apart.
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
				return nil, fmt.Errorf("a file of the form that was parsed before: %w", err)
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
			_, _ = fmt.Fprintf(h, "%q %q %x\n", name, p.header, p.sha256) // a map is written in the order of its keys
		}
	}
	return h.Sum(nil)
}
