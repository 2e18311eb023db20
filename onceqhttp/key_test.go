package onceqhttp_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/onceqhttp"
)

func TestParseKey_Accepts(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", onceqhttp.MaxKeyLength)
	for value, want := range map[string]string{
		`"8e03978e-40d5-43e8-bc93-6894a57f9324"`: "8e03978e-40d5-43e8-bc93-6894a57f9324", // from the draft
		`8e03978e-40d5-43e8-bc93-6894a57f9324`:   "8e03978e-40d5-43e8-bc93-6894a57f9324",
		`KG5LxwFBepaKHyUD`:                       "KG5LxwFBepaKHyUD", // from Stripe
		`order:42/retry=no`:                      "order:42/retry=no",
		`1732000000`:                             "1732000000", // an Integer in a structured field; clients mean a plain key
		`1.50`:                                   "1.50",
		`-0`:                                     "-0",
		`*a`:                                     "*a",
		`?2`:                                     "?2", // malformed as a structured field
		`:a`:                                     ":a",
		`@noon`:                                  "@noon",
		`(a)`:                                    "(a)",
		`"a key, with; everything"`:              "a key, with; everything",
		`"a \"b\" \\c"`:                          `a "b" \c`,
		` "k" `:                                  "k",
		"\tk ":                                   "k",
		`"k";v=1`:                                "k", // parameters are ignored
		`" k "`:                                  " k ",
		long:                                     long,
		`"` + long + `"`:                         long,
	} {
		got, err := onceqhttp.ParseKey(http.Header{"Idempotency-Key": {value}})
		require.NoError(t, err, value)
		require.Equal(t, want, got, value)
	}
}

func TestParseKey_Refuses(t *testing.T) {
	t.Parallel()
	for value, why := range map[string]string{
		``:                                   "is empty",
		`  `:                                 "is empty",
		`""`:                                 "is empty",
		`"   "`:                              "is empty",
		`"open`:                              "not a structured-field string",
		`"a" b`:                              "not a structured-field string",
		`"a", "b"`:                           "not a structured-field string", // two headers, joined by a proxy
		`?1`:                                 "not a String",
		`?0`:                                 "not a String",
		`:aGk=:`:                             "not a String",
		`@1659578233`:                        "not a String",
		`%"a"`:                               "at byte 1",
		`("a")`:                              "at byte 1",
		`a, b`:                               "at byte 1",
		`a,b`:                                "at byte 1",
		`a b`:                                "at byte 1",
		`a;b`:                                "at byte 1",
		`a"b`:                                "at byte 1",
		`a\b`:                                "at byte 1",
		"a\x00":                              "at byte 1",
		"a\x7f":                              "at byte 1",
		`schlüssel`:                          "at byte 4",
		"\xff":                               "at byte 0",
		`"schlüssel"`:                        "not a structured-field string",
		`"a\n"`:                              "not a structured-field string",
		"\"a\x00b\"":                         "not a structured-field string",
		`"a";v=`:                             "not a structured-field string",
		`"a";V=1`:                            "not a structured-field string",
		`'"`:                                 "at byte 1",
		`"` + strings.Repeat("k", 256) + `"`: "256 characters",
		strings.Repeat("k", 256):             "256 characters",
	} {
		_, err := onceqhttp.ParseKey(http.Header{"Idempotency-Key": {value}})
		var bad *onceqhttp.KeyError
		require.ErrorAs(t, err, &bad, "%q", value)
		require.Contains(t, err.Error(), why, "%q", value)
	}
	_, err := onceqhttp.ParseKey(http.Header{"Idempotency-Key": {"a", "a"}})
	var bad *onceqhttp.KeyError
	require.ErrorAs(t, err, &bad)
	require.Contains(t, bad.Reason, "2 times")
	_, err = onceqhttp.ParseKey(http.Header{"X": {"a"}})
	require.ErrorIs(t, err, onceqhttp.ErrKeyMissing)
}

func FuzzParseKey(f *testing.F) {
	f.Add(`"a"`, "b")
	f.Add(`a`, "")
	f.Fuzz(func(t *testing.T, value, second string) {
		h := http.Header{"Idempotency-Key": {value}}
		if second != "" {
			h.Add("Idempotency-Key", second)
		}
		key, err := onceqhttp.ParseKey(h)
		if err != nil {
			require.Empty(t, key)
			return
		}
		require.Empty(t, second)
		require.NotEmpty(t, strings.TrimSpace(key))
		require.LessOrEqual(t, len(key), onceqhttp.MaxKeyLength)
		for _, c := range []byte(key) {
			require.True(t, c >= ' ' && c <= '~')
		}
		again, err := onceqhttp.ParseKey(http.Header{"Idempotency-Key": {`"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`}})
		require.NoError(t, err)
		require.Equal(t, key, again)
	})
}
