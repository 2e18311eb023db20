package jsonb_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/jsonb"
	"github.com/onceq/onceq/queuetest"
)

func TestScan_CanonicalForm(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		` null `: `null`, "\t\r\n true": `true`, `false`: `false`,
		`0`: `0`, `-0`: `0`, `0.000`: `0`, `-0e5`: `0`, `0e-9999`: `0`,
		`1`: `1`, `1.0`: `1`, `1e0`: `1`, `10e-1`: `1`, `0.1e1`: `1`, `1E+0`: `1`, `0.0000001e7`: `1`,
		`10`: `1e1`, `100.0`: `1e2`, `-1200`: `-12e2`, `0.5`: `5e-1`, `-0.050`: `-5e-2`, `123.456`: `123456e-3`, `1e0009`: `1e9`,
		`""`: `""`, `"\u0041\/"`: `"A/"`, `"\b\f\n\r\t"`: `"\u0008\u000c\u000a\u000d\u0009"`, `"\"\\"`: `"\"\\"`,
		`"é\u00e9"`: `"éé"`, `"\ud83d\ude00"`: `"😀"`, `"\uD83D\uDE00\uFFFD"`: "\"😀\ufffd\"", "\"\u007f\u2028\"": "\"\u007f\u2028\"",
		`[]`: `[]`, `[ ]`: `[]`, `[1 , 2.0,[ "a"]]`: `[1,2,["a"]]`,
		`{}`: `{}`, `{ }`: `{}`, `{"b":1,"a":2}`: `{"a":2,"b":1}`, `{"a":1,"a":2}`: `{"a":2}`, `{"b":1,"a":{"d":0,"c":[]},"b":3,"a":4,"b":5}`: `{"a":4,"b":5}`,
		`{"\u0061":1,"a":2}`: `{"a":2}`, `{"":1}`: `{"":1}`, `{"a":{"z":1,"y":{"x":1,"w":2}}}`: `{"a":{"y":{"w":2,"x":1},"z":1}}`,
	} {
		got, err := jsonb.Scan([]byte(in), true, nil)
		require.NoError(t, err, in)
		require.Equal(t, want, string(got), in)
		got, err = jsonb.Scan([]byte(in), false, nil)
		require.NoError(t, err, in)
		require.Empty(t, got, in)
	}
	// More members than a small object has.
	var in, want []string
	for i := range 100 {
		in, want = append(in, fmt.Sprintf(`"%02d":%d`, 99-i, i+1)), append(want, fmt.Sprintf(`"%02d":`, i))
	}
	got, err := jsonb.Scan([]byte("{"+strings.Join(in, " , ")+"}"), true, nil)
	require.NoError(t, err)
	for _, key := range want {
		at := bytes.Index(got, []byte(key))
		require.Positive(t, at)
		got = got[at:]
	}
}

func TestScan_Fields(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in     string
		fields []string
		want   string
	}{
		{`{"a":1,"b":2,"c":3}`, []string{"c", "a"}, `{"a":1,"c":3}`},
		{`{"c":3,"b":2,"a":1.0}`, []string{"c", "a"}, `{"a":1,"c":3}`},
		{` {"a":1}`, []string{}, `{}`},
		{`{"a":1}`, []string{"z"}, `{}`},
		{`{"a":1,"b":2,"a":3}`, []string{"a"}, `{"a":3}`},
		{`{"a":{"b":1,"x":2},"x":3}`, []string{"a"}, `{"a":{"b":1,"x":2}}`},
		{`{"\u00e9\"\\\n":1,"x":2}`, []string{"é\"\\\n"}, `{"é\"\\\u000a":1}`},
	} {
		got, err := jsonb.Scan([]byte(c.in), true, c.fields)
		require.NoError(t, err, c.in)
		require.Equal(t, c.want, string(got), c.in)
	}
	for _, in := range []string{`[]`, `1`, `"a"`, `null`, ``, ` `, `{`} {
		_, err := jsonb.Scan([]byte(in), true, []string{"a"})
		require.Error(t, err, in)
	}
}

func TestScan_Refuses(t *testing.T) {
	t.Parallel()
	for _, in := range []string{
		``, ` `, `nul`, `nulll`, `True`, `NaN`, `Infinity`, `-Infinity`, `+1`, `.5`, `1.`, `01`, `-`, `--1`, `1e`, `1e+`, `0x1`, `1_000`, `1 2`,
		`"`, `"\`, `"\x"`, `"\u12"`, `"\u12G4"`, `"\u"`, `'a'`, "\"\n\"", "\"\x1f\"", "\"\x00\"", "\"a", `"\u0000"`, `"\ud800"`, `"\udc00"`, `"\ud800\ud800"`, `"\ud800a"`,
		`"\ud83d\u0041"`, "\"\xff\"", "\"\xc0\x80\"", "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"", "\"\xe2\x82\"",
		`[`, `[1`, `[1,`, `[1,]`, `[,1]`, `[1 2]`, `]`, `[}`, `{`, `{"a"`, `{"a":`, `{"a":1`, `{"a":1,`, `{"a":1,}`, `{,}`, `{a:1}`, `{1:1}`, `{"a" 1}`, `{"a":1 "b":2}`, `{"a":1]`,
		"\ufeff1", "1\x00", "//\n1", "\v1", "\u00a01",
		`1e10000`, `1e-10000`, `1e99999999999999999999`, strings.Repeat("1", jsonb.MaxNumberLength+1),
		strings.Repeat("[", jsonb.MaxDepth+2) + strings.Repeat("]", jsonb.MaxDepth+2),
		strings.Repeat(`{"a":`, jsonb.MaxDepth+1) + "1" + strings.Repeat("}", jsonb.MaxDepth+1),
		`[` + strings.Repeat(`1e9999,`, jsonb.MaxExponents/jsonb.MaxExponent+1) + `0]`,
	} {
		for _, canonical := range []bool{false, true} {
			_, err := jsonb.Scan([]byte(in), canonical, nil)
			require.Error(t, err, "%.80q", in)
		}
	}
}

// jsonMaker makes JSON texts of every shape, valid and broken, with a small vocabulary, so that equal values in
// different spellings are common.
type jsonMaker struct{ *rand.Rand }

func (m jsonMaker) pick(of ...string) string { return of[m.IntN(len(of))] }

func (m jsonMaker) space() string { return m.pick("", "", "", " ", "\n", "\t \r") }

func (m jsonMaker) text() string {
	var b strings.Builder
	for range m.IntN(3) {
		b.WriteString(m.pick("a", `\u0061`, "b", "é", `\u00e9`, `\u00E9`, "😀", `\ud83d\ude00`, `\n`, `\u000a`, `\/`, "/", `\"`, `\\`, `\u005c`, "\u007f", `\ufffd`, "\ufffd", `\u2028`))
	}
	return `"` + b.String() + `"`
}

func (m jsonMaker) number() string {
	n := m.pick("", "", "-") + m.pick("0", "1", "10", "100", "12", "120", "9007199254740993", "123456789012345678901234567890")
	if m.IntN(2) == 0 {
		n += "." + m.pick("0", "00", "5", "50", "05", "120", "000000000000000000001")
	}
	if m.IntN(2) == 0 {
		n += m.pick("e", "E") + m.pick("", "+", "-") + m.pick("0", "1", "01", "2", "20", "308", "400", "9900")
	}
	return n
}

func (m jsonMaker) value(depth int) string {
	kind := m.IntN(8)
	if depth <= 0 {
		kind = m.IntN(5)
	}
	switch kind {
	case 0:
		return m.pick("null", "true", "false")
	case 1, 2:
		return m.text()
	case 3, 4:
		return m.number()
	case 5:
		parts := make([]string, m.IntN(4))
		for i := range parts {
			parts[i] = m.space() + m.value(depth-1) + m.space()
		}
		return "[" + strings.Join(parts, ",") + "]"
	default:
		parts := make([]string, m.IntN(5))
		for i := range parts {
			parts[i] = m.space() + m.text() + m.space() + ":" + m.space() + m.value(depth-1) + m.space()
		}
		return "{" + strings.Join(parts, ",") + "}"
	}
}

// broken changes a byte or two, which leaves some texts valid.
func (m jsonMaker) broken(s string) string {
	b := []byte(s)
	for range 1 + m.IntN(2) {
		at := m.IntN(len(b) + 1)
		switch noise := m.pick("\x00", "\xff", `\u0000`, `\ud800`, `"`, `\`, ",", ":", "[", "]", "{", "}", "e", ".", "-", "0", "1", " ", "\n", "\xc3", "tru", "\u00a0"); {
		case len(b) > 0 && m.IntN(3) == 0:
			at = min(at, len(b)-1)
			b = append(b[:at], b[at+1:]...)
		default:
			b = append(b[:at], append([]byte(noise), b[at:]...)...)
		}
	}
	return string(b)
}

// Postgres stores what Scan accepts, and two values have the same canonical form exactly if jsonb says that they are
// equal. What Scan refuses, encoding/json or Postgres refuses too: apart from the limits, Scan is not stricter.
func TestTrap_ScanAgreesWithPostgresAndEncodingJSON(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	const seed = 20240607
	t.Logf("seed %d", seed)
	m := jsonMaker{rand.New(rand.NewPCG(seed, 1))}

	var valid, canonical []string
	count := 0
	texts := 20_000
	if testing.Short() {
		texts = 4_000
	}
	for range texts {
		s := m.space() + m.value(3) + m.space()
		if m.IntN(3) == 0 {
			s = m.broken(s)
		}
		c, err := jsonb.Scan([]byte(s), true, nil)
		_, plain := jsonb.Scan([]byte(s), false, nil)
		require.Equal(t, err == nil, plain == nil, "%q", s)
		goValid := json.Valid([]byte(s))
		if err != nil {
			if goValid && utf8.ValidString(s) && !strings.Contains(err.Error(), "exponent") {
				count++
				require.True(t, jsonRefused(t, db.Pool, s), "Scan refuses %q (%v), encoding/json and Postgres do not", s, err)
			}
			continue
		}
		require.True(t, goValid, "%q", s)
		valid, canonical = append(valid, s), append(canonical, string(c))
		again, err := jsonb.Scan(c, true, nil)
		require.NoError(t, err, "%q", c)
		require.Equal(t, string(c), string(again), "the canonical form of %q is not its own", s)
	}
	require.Greater(t, len(valid), texts/2)
	t.Logf("%d valid, %d refused by Postgres and Scan alone", len(valid), count)

	// Postgres stores all of them, each is equal to its canonical form, and the number of distinct values is right.
	var differ []string
	var distinct, forms int
	require.NoError(t, db.Pool.QueryRow(ctx, `
		with v as materialized (select a, a::jsonb as j, c, c::jsonb as k from unnest($1::text[], $2::text[]) as u(a, c))
		select array(select a from v where j <> k limit 10), (select count(distinct j) from v), (select count(distinct c) from v)`,
		valid, canonical).Scan(&differ, &distinct, &forms))
	require.Empty(t, differ)
	require.Equal(t, distinct, forms)
	rows, err := db.Pool.Query(ctx, `
		with v as materialized (select distinct a::jsonb as j, c from unnest($1::text[], $2::text[]) as u(a, c))
		select min(c) || '  ' || max(c) from v group by j having count(distinct c) > 1`, valid, canonical)
	require.NoError(t, err)
	apart, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, apart, "equal in jsonb, with different canonical forms")
}

func jsonRefused(t *testing.T, db *pgxpool.Pool, s string) bool {
	t.Helper()
	rows, err := db.Query(t.Context(), `select $1::text::jsonb is null`, s)
	if err == nil {
		rows.Close()
		err = rows.Err()
	}
	return err != nil
}

// jsonDecode returns what encoding/json decodes, with numbers as they are written.
func jsonDecode(b []byte) (v any, err error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	err = d.Decode(&v)
	return v, err
}

func FuzzScan(f *testing.F) {
	for _, s := range []string{
		`null`, `{"b":[1.0,-0,1e2],"a":"\u0041\ud83d\ude00\n"}`, `{"a":1,"a":2,"":{}}`, `"\ud800"`, `"\u0000"`, "\"\xff\"", `1e10000`, `[[[[]]]]`, ` [ 1 , 2 ] `, `{"a"`, `01`,
	} {
		f.Add([]byte(s), "a")
	}
	f.Fuzz(func(t *testing.T, in []byte, field string) {
		before := bytes.Clone(in)
		c, err := jsonb.Scan(in, true, nil)
		require.Equal(t, before, in, "the input was changed")
		_, plain := jsonb.Scan(in, false, nil)
		require.Equal(t, err == nil, plain == nil)
		if err != nil {
			return
		}
		require.True(t, json.Valid(in))
		require.True(t, utf8.Valid(in))
		require.NotContains(t, string(c), "\x00")
		again, err := jsonb.Scan(c, true, nil)
		if err != nil { // an exponent at the limit is beyond it once zeros are trimmed
			require.ErrorContains(t, err, "exponent")
			return
		}
		require.Equal(t, string(c), string(again))

		// encoding/json sees the same value. Numbers are spelled in another way, so they go through Scan once more.
		want, err := jsonDecode(in)
		require.NoError(t, err)
		got, err := jsonDecode(c)
		require.NoError(t, err)
		spelled, err := json.Marshal(want)
		require.NoError(t, err)
		spelled, err = jsonb.Scan(spelled, true, nil)
		require.NoError(t, err)
		require.Equal(t, string(c), string(spelled))

		object, ok := got.(map[string]any)
		some, err := jsonb.Scan(in, true, []string{field})
		require.Equal(t, ok, err == nil)
		if !ok {
			return
		}
		for name := range object {
			if name != field {
				delete(object, name)
			}
		}
		kept, err := jsonDecode(some)
		require.NoError(t, err)
		require.Equal(t, any(object), kept)
	})
}

// Compares canonical forms with jsonb's own comparison: two values have the same form if and only if Postgres says that
// they are equal.
func FuzzCanonicalForm_AgainstPostgres(f *testing.F) {
	db := queuetest.New(f)
	for _, pair := range [][2]string{
		{`1`, `1.0`}, {`1e2`, `100`}, {`-0`, `0`}, {`{"a":1,"b":2}`, `{"b":2,"a":1}`}, {`{"a":1,"a":2}`, `{"a":2}`}, {`"\u00e9"`, `"é"`},
		{`"e\u0301"`, `"é"`}, {`[]`, `{}`}, {`null`, `"null"`}, {`"\ud83d\ude00"`, `"😀"`}, {`0.1`, `0.10000000000000000000000000000000000001`},
		{`1e-9999`, `0`}, {`[1,[2]]`, `[[1],2]`}, {`{"":{"":""}}`, `{"":{"":null}}`}, {`"\u0001"`, `"\u0002"`}, {`9007199254740993`, `9007199254740992`},
	} {
		f.Add([]byte(pair[0]), []byte(pair[1]))
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		x, err := jsonb.Scan(a, true, nil)
		if err != nil {
			return
		}
		y, err := jsonb.Scan(b, true, nil)
		if err != nil {
			return
		}
		var equal bool
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select $1::text::jsonb = $2::text::jsonb`, string(a), string(b)).Scan(&equal))
		require.Equal(t, equal, string(x) == string(y), "%s and %s, canonical %s and %s", a, b, x, y)
		var form string // as the functions for SQL have it
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select `+pgx.Identifier{db.Schema}.Sanitize()+`.canonical($1::text::jsonb, null, 0)`, string(a)).Scan(&form))
		require.Equal(t, string(x), form, "%s", a)
	})
}
