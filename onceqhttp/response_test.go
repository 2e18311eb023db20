package onceqhttp_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/onceqhttp"
)

var token = regexp.MustCompile("^[0-9A-Za-z!#$%&'*+.^_`|~-]+$") // RFC 9110, 5.6.2

// A handler's answer comes back unchanged, byte for byte.
func FuzzResponse_ComesBack(f *testing.F) {
	for _, value := range []string{"", "a", "Gr\xfc\xdfe", "\x00\xff", "\u2028é", "a\r\nb: c", `"\`} {
		f.Add(200, "X-A", value, "second", []byte(value))
		f.Add(0, value, "", value, []byte(nil))
		f.Add(999, "x-a", "first", value, []byte("<html>"))
	}
	f.Fuzz(func(t *testing.T, status int, name, first, second string, body []byte) {
		if status != 0 && (status < 200 || status > 999) || !token.MatchString(name) {
			return
		}
		space := func(v string) string { return strings.ReplaceAll(v, "\x00", " ") }
		in := onceqhttp.Response{Status: status, Header: http.Header{name: {first, second}, "Content-Type": {}}, Body: body}
		raw, err := json.Marshal(in)
		require.NoError(t, err)
		var out onceqhttp.Response
		require.NoError(t, json.Unmarshal(raw, &out))
		require.Equal(t, in.Status, out.Status)
		require.Equal(t, http.Header{name: {space(first), space(second)}, "Content-Type": in.Header["Content-Type"]}, out.Header)
		require.True(t, bytes.Equal(in.Body, out.Body), "%q and %q", in.Body, out.Body)
	})
}

// An answer that a person or a provider gives is stored and stays the same, or is refused.
func FuzzResponse_ReadsOrRefuses(f *testing.F) {
	for _, raw := range []string{
		`{}`, `null`, `[]`, `"a text"`, `{"status":201,"header":{"X":["a","\u00ff"]},"body":"AQI="}`, `{"status":101}`, `{"status":1000}`,
		`{"header":{"X":["→"]}}`, `{"header":{"X":null}}`, `{"header":null,"body":null}`, `{"body":"no base64"}`, `{"lost":true}`, `{"STATUS":200,"status":404}`,
		`{"header":{"a":["1"],"A":["2"]}}`, "{\"header\":{\"\xff\":[\"\xff\"]}}",
	} {
		f.Add([]byte(raw))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var read, again onceqhttp.Response
		if err := json.Unmarshal(raw, &read); err != nil {
			return
		}
		require.True(t, read.Status == 0 || read.Status >= 200 && read.Status <= 999)
		stored, err := json.Marshal(read)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(stored, &again))
		twice, err := json.Marshal(again)
		require.NoError(t, err)
		require.Equal(t, string(stored), string(twice))
	})
}
