// Package jsonb says whether Postgres can store a text as jsonb, before it is sent, and which texts are the same value
// there.
package jsonb

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// These limit what goes into a jsonb column. Postgres has wider limits. Within these, nothing can fail there in the middle
// of the caller's transaction.
const (
	MaxDepth        = 500
	MaxNumberLength = 1000
	MaxExponent     = 9999

	// MaxExponents limits the sum of all exponents. numeric writes 1e9999 out in full, and Postgres could not return
	// the text of a megabyte of such numbers.
	MaxExponents = 4 << 20
)

// Scan checks that in is one JSON value (RFC 8259) that jsonb stores: no \u0000, no lone surrogates, no invalid UTF-8,
// no number outside numeric's range. With canonical it also returns the value's canonical form, which is equal for
// equal values: members are sorted by key and the last of equal keys is kept, there is no white space, escapes are the
// shortest, and numbers are written by value (1.0, 1 and 1e0 are the same). If fields is not nil, it keeps only these
// members of the outermost object.
func Scan(in []byte, canonical bool, fields []string) ([]byte, error) {
	if canonical {
		return AppendCanonical(make([]byte, 0, len(in)+16), in, fields)
	}
	s := scanner{in: in}
	return nil, s.all(fields)
}

// AppendCanonical is Scan that appends the canonical form to out.
func AppendCanonical(out, in []byte, fields []string) ([]byte, error) {
	s := scanner{in: in, canonical: true, out: out}
	err := s.all(fields)
	return s.out, err
}

type scanner struct {
	in        []byte
	pos       int
	canonical bool
	out       []byte
	exponents int // of all, without signs
}

func (s *scanner) all(fields []string) error {
	s.space()
	if fields != nil && (s.pos >= len(s.in) || s.in[s.pos] != '{') {
		return errors.New("is not an object, but Fields names members of it")
	}
	if err := s.value(0, fields); err != nil {
		return err
	}
	s.space()
	if s.pos != len(s.in) {
		return s.fail("something follows the value")
	}
	return nil
}

func (s *scanner) fail(what string) error {
	return fmt.Errorf("is not JSON that Postgres can store: %s at byte %d", what, s.pos)
}

func (s *scanner) space() {
	for s.pos < len(s.in) {
		switch s.in[s.pos] {
		case ' ', '\t', '\n', '\r':
			s.pos++
		default:
			return
		}
	}
}

func (s *scanner) write(b ...byte) {
	if s.canonical {
		s.out = append(s.out, b...)
	}
}

// take skips white space and consumes c if it is next.
func (s *scanner) take(c byte) bool {
	s.space()
	if s.pos < len(s.in) && s.in[s.pos] == c {
		s.pos++
		return true
	}
	return false
}

func (s *scanner) value(depth int, fields []string) error {
	if depth > MaxDepth {
		return s.fail(fmt.Sprintf("nesting deeper than %d", MaxDepth))
	}
	s.space()
	if s.pos >= len(s.in) {
		return s.fail("unexpected end")
	}
	switch c := s.in[s.pos]; {
	case c == '{':
		return s.object(depth, fields)
	case c == '[':
		return s.array(depth)
	case c == '"':
		return s.text()
	case c == '-' || c >= '0' && c <= '9':
		return s.number()
	}
	for _, word := range [...]string{"true", "false", "null"} {
		if bytes.HasPrefix(s.in[s.pos:], []byte(word)) {
			s.pos += len(word)
			if s.canonical {
				s.out = append(s.out, word...)
			}
			return nil
		}
	}
	return s.fail("unexpected character")
}

func (s *scanner) array(depth int) error {
	s.pos++
	s.write('[')
	if s.take(']') {
		s.write(']')
		return nil
	}
	for {
		if err := s.value(depth+1, nil); err != nil {
			return err
		}
		if s.take(']') {
			s.write(']')
			return nil
		}
		if !s.take(',') {
			return s.fail("expected , or ]")
		}
		s.write(',')
	}
}

// member says where a member's canonical form is in out: its key from start to colon, all of it to end.
type member struct{ start, colon, end int }

func (s *scanner) object(depth int, fields []string) error {
	s.pos++
	s.write('{')
	begin := len(s.out)
	var few [16]member
	members := few[:0]
	sorted := true
	for first := true; ; first = false {
		if first && s.take('}') {
			break
		}
		s.space()
		if s.pos >= len(s.in) || s.in[s.pos] != '"' {
			return s.fail("expected a key")
		}
		m := member{start: len(s.out)}
		if err := s.text(); err != nil {
			return err
		}
		m.colon = len(s.out)
		if !s.take(':') {
			return s.fail("expected :")
		}
		s.write(':')
		if err := s.value(depth+1, nil); err != nil {
			return err
		}
		if s.canonical {
			m.end = len(s.out)
			if fields != nil && !slices.Contains(fields, unquoted(s.out[m.start:m.colon])) {
				s.out = s.out[:m.start]
			} else {
				if n := len(members); n > 0 {
					last := members[n-1]
					sorted = sorted && bytes.Compare(s.out[last.start:last.colon], s.out[m.start:m.colon]) < 0
				}
				members = append(members, m)
				s.write(',')
			}
		}
		if s.take('}') {
			break
		}
		if !s.take(',') {
			return s.fail("expected , or }")
		}
	}
	if !s.canonical {
		return nil
	}
	if !sorted {
		s.sort(members, begin)
	}
	if len(members) > 0 {
		s.out = s.out[:len(s.out)-1] // the last comma
	}
	s.write('}')
	return nil
}

// sort writes the members of an object, which begin there in out, in the order of their keys. They are copied
// behind themselves, and back from there: sorted they are no longer than before.
func (s *scanner) sort(members []member, begin int) {
	end := len(s.out)
	s.out = append(s.out, s.out[begin:]...)
	old := s.out[end:]
	key := func(m member) []byte { return old[m.start-begin : m.colon-begin] }
	slices.SortStableFunc(members, func(a, b member) int { return bytes.Compare(key(a), key(b)) })
	s.out = s.out[:begin]
	for i, m := range members {
		if i+1 < len(members) && bytes.Equal(key(m), key(members[i+1])) {
			continue // the last of equal keys counts, as in jsonb
		}
		s.out = append(append(s.out, old[m.start-begin:m.end-begin]...), ',')
	}
}

// unquoted returns a canonical string without its quotes and escapes.
func unquoted(b []byte) string {
	if bytes.IndexByte(b, '\\') < 0 {
		return string(b[1 : len(b)-1])
	}
	text, err := strconv.Unquote(string(b)) // canonical escapes are \" \\ and \u00xx, which Go has too
	if err != nil {
		return string(b)
	}
	return text
}

func (s *scanner) text() error {
	s.pos++
	s.write('"')
	for s.pos < len(s.in) {
		// The plain characters from here on are copied at once.
		run := s.pos
		for s.pos < len(s.in) && s.in[s.pos] >= ' ' && s.in[s.pos] != '"' && s.in[s.pos] != '\\' && s.in[s.pos] < utf8.RuneSelf {
			s.pos++
		}
		if s.canonical {
			s.out = append(s.out, s.in[run:s.pos]...)
		}
		if s.pos >= len(s.in) {
			break
		}
		switch c := s.in[s.pos]; {
		case c == '"':
			s.pos++
			s.write('"')
			return nil
		case c == '\\':
			r, err := s.escape()
			if err != nil {
				return err
			}
			s.rune(r)
		case c < ' ':
			return s.fail("unescaped control character in a string")
		default:
			r, n := utf8.DecodeRune(s.in[s.pos:])
			if r == utf8.RuneError && n == 1 {
				return s.fail("invalid UTF-8")
			}
			s.pos += n
			s.rune(r)
		}
	}
	return s.fail("unexpected end of a string")
}

func (s *scanner) rune(r rune) {
	switch {
	case !s.canonical:
	case r == '"' || r == '\\':
		s.out = append(s.out, '\\', byte(r))
	case r < ' ':
		s.out = fmt.Appendf(s.out, `\u%04x`, r)
	default:
		s.out = utf8.AppendRune(s.out, r)
	}
}

func (s *scanner) escape() (rune, error) {
	if s.pos+1 >= len(s.in) {
		return 0, s.fail("unexpected end of a string")
	}
	c := s.in[s.pos+1]
	if c != 'u' {
		i := bytes.IndexByte([]byte(`"\/bfnrt`), c)
		if i < 0 {
			return 0, s.fail("unknown escape")
		}
		s.pos += 2
		return rune("\"\\/\b\f\n\r\t"[i]), nil
	}
	r, ok := s.hex(s.pos)
	if !ok {
		return 0, s.fail(`expected four hexadecimal digits after \u`)
	}
	switch {
	case r == 0:
		return 0, s.fail(`\u0000, which text in Postgres cannot hold,`)
	case utf16.IsSurrogate(r):
		low, ok := s.hex(s.pos + 6)
		if r = utf16.DecodeRune(r, low); !ok || r == utf8.RuneError {
			return 0, s.fail("lone surrogate")
		}
		s.pos += 12
	default:
		s.pos += 6
	}
	return r, nil
}

// hex reads the \uXXXX at byte i.
func (s *scanner) hex(i int) (rune, bool) {
	if i+6 > len(s.in) || s.in[i] != '\\' || s.in[i+1] != 'u' {
		return 0, false
	}
	var r rune
	for _, c := range s.in[i+2 : i+6] {
		switch {
		case c >= '0' && c <= '9':
			r = r<<4 | rune(c-'0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, false
		}
	}
	return r, true
}

func (s *scanner) digits() []byte {
	from := s.pos
	for s.pos < len(s.in) && s.in[s.pos] >= '0' && s.in[s.pos] <= '9' {
		s.pos++
	}
	return s.in[from:s.pos]
}

// exponent reads the exponent of a number, if it has one.
func (s *scanner) exponent() (int, error) {
	if s.pos >= len(s.in) || s.in[s.pos]|0x20 != 'e' {
		return 0, nil
	}
	s.pos++
	sign := 1
	if s.pos < len(s.in) && (s.in[s.pos] == '+' || s.in[s.pos] == '-') {
		if s.in[s.pos] == '-' {
			sign = -1
		}
		s.pos++
	}
	power := s.digits()
	if len(power) == 0 {
		return 0, s.fail("malformed number")
	}
	n, err := strconv.Atoi(string(power))
	if err != nil || n > MaxExponent {
		return 0, s.fail(fmt.Sprintf("exponent beyond %d", MaxExponent))
	}
	if s.exponents += n; s.exponents > MaxExponents {
		return 0, s.fail(fmt.Sprintf("exponents of more than %d in all", MaxExponents))
	}
	return sign * n, nil
}

func (s *scanner) number() error {
	from := s.pos
	negative := s.in[s.pos] == '-'
	if negative {
		s.pos++
	}
	whole := s.digits()
	if len(whole) == 0 || len(whole) > 1 && whole[0] == '0' {
		return s.fail("malformed number")
	}
	var fraction []byte
	if s.pos < len(s.in) && s.in[s.pos] == '.' {
		s.pos++
		if fraction = s.digits(); len(fraction) == 0 {
			return s.fail("malformed number")
		}
	}
	exponent, err := s.exponent()
	if err != nil {
		return err
	}
	if s.pos-from > MaxNumberLength {
		return s.fail(fmt.Sprintf("number longer than %d characters", MaxNumberLength))
	}
	if !s.canonical {
		return nil
	}
	// The value is 0.digits × 10^point, without zeros at either end.
	digits := whole
	if len(fraction) > 0 {
		digits = slices.Concat(whole, fraction)
	}
	point := len(whole) + exponent
	trimmed := bytes.TrimLeft(digits, "0")
	point -= len(digits) - len(trimmed)
	trimmed = bytes.TrimRight(trimmed, "0")
	switch {
	case len(trimmed) == 0:
		s.write('0') // and -0
		return nil
	case negative:
		s.write('-')
	}
	s.out = append(s.out, trimmed...)
	if power := point - len(trimmed); power != 0 {
		s.out = append(s.out, 'e')
		s.out = strconv.AppendInt(s.out, int64(power), 10)
	}
	return nil
}

// Texts reads a job's metadata. What somebody wrote by hand may be something else than texts: of an object, the
// other values become their JSON, and anything else is no metadata. An error would stop all jobs that were
// claimed together.
func Texts(text string) map[string]string {
	var all map[string]string
	if json.Unmarshal([]byte(text), &all) == nil {
		return all
	}
	var values map[string]json.RawMessage
	if json.Unmarshal([]byte(text), &values) != nil {
		return nil
	}
	all = make(map[string]string, len(values))
	for name, value := range values {
		var one string
		if json.Unmarshal(value, &one) != nil {
			one = string(value)
		}
		all[name] = one
	}
	return all
}

// Fault says why a value does not encode, without the value, which the error may quote.
func Fault(err error) string {
	var unsupported *json.UnsupportedTypeError
	var own *json.MarshalerError
	switch {
	case errors.As(err, &unsupported):
		return "it has a " + unsupported.Type.String()
	case errors.As(err, &own):
		return "the encoding of " + own.Type.String() + " failed"
	}
	return "it has a value that JSON cannot hold"
}
