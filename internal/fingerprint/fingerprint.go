// Package fingerprint compares the work of two users of one key, and says where it differs. It imports jsonb.
package fingerprint

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/onceq/onceq/internal/jsonb"
)

// What people are told of a mismatch.
const (
	maxDiffering  = 10 // paths that the text of a mismatch names, and
	maxNameInPath = 60 // bytes of each name in them
)

// mark is what two users of one key must have in common. It is stored as one byte for its version, one for
// the length of the digest, the digest, and the name of the kind.
type mark struct {
	kind   string // of a job; "" if it equals the scope, as it does by default
	digest []byte // of the payload; empty if that is not compared
}

// version is the first byte of a stored fingerprint. A fingerprint of a version that this code does not know
// counts as equal: a rollback must not turn duplicates into mismatches.
const version = 1

// What begins the content of a fingerprint; the payload follows.
const (
	FormJSON  = 'j' // in its canonical form
	FormBytes = 'b'
)

// The size of a digest, and that of a fingerprint without its kind.
const (
	digestBytes = sha256.Size / 2
	Bytes       = 2 + digestBytes // and the kind
)

// Append appends the stored form. The digest is 128 bits of SHA-256 over the content; without content there
// is none. The kind is "" if it equals the scope.
func Append(b []byte, kind string, content []byte) []byte {
	if content == nil {
		return append(append(b, version, 0), kind...)
	}
	digest := sha256.Sum256(content)
	return append(append(append(b, version, digestBytes), digest[:digestBytes]...), kind...)
}

// read takes apart a stored fingerprint; ok is false if there is none, or if this code cannot read it.
func read(b []byte) (f mark, ok bool) {
	if len(b) < 2 || b[0] != version || len(b) < 2+int(b[1]) {
		return f, false
	}
	n := 2 + int(b[1])
	return mark{digest: b[2:n], kind: string(b[n:])}, true
}

// KindOf gives the kind of the job that has a key, from its fence's fingerprint and scope.
func KindOf(stored []byte, scope string) string {
	if f, _ := read(stored); f.kind != "" {
		return f.kind
	}
	return scope
}

// SameKind compares the kinds of a stored fingerprint and a new one, and SamePayload their payloads. What is
// unknown in one of the two counts as equal.
func SameKind(stored, now []byte) bool {
	a, known := read(stored)
	b, ok := read(now)
	return !known || !ok || a.kind == b.kind
}

func SamePayload(stored, now []byte) bool {
	a, known := read(stored)
	b, ok := read(now)
	return !known || !ok || len(a.digest) == 0 || len(b.digest) == 0 || bytes.Equal(a.digest, b.digest)
}

// Difference compares the first job's payload, nil if it is bytes, with the payload of a job that was
// refused: a text, or bytes.
func Difference(first *string, text string, raw []byte, fields []string) (detail string, paths []string) {
	switch {
	case first == nil && raw != nil:
		return "their bytes differ", nil
	case first == nil || raw != nil:
		return "one is bytes and the other JSON", nil
	}
	now, err := canonicalValue(text, fields)
	then, no := canonicalValue(*first, fields)
	switch {
	case err != nil || no != nil: // only the first job's can fail: it is not an object, and Fields names members
		return "", []string{"$"}
	}
	paths = differing("$", then, now, nil)
	switch n := len(paths); {
	case n == 0:
		return "they agree in the members that are compared now, but others were compared when the first job was enqueued", nil
	case n > maxDiffering:
		return "and in other members", paths[:maxDiffering]
	}
	return "", paths
}

// canonicalValue decodes JSON so that equal numbers become equal texts.
func canonicalValue(text string, fields []string) (v any, err error) {
	canonical, err := jsonb.Scan([]byte(text), true, fields)
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(canonical))
	d.UseNumber()
	return v, d.Decode(&v)
}

// differing appends the paths at which two values differ, and stops after maxDiffering.
func differing(path string, a, b any, paths []string) []string {
	if len(paths) > maxDiffering {
		return paths
	}
	switch x := a.(type) {
	case map[string]any:
		if y, ok := b.(map[string]any); ok {
			names := slices.AppendSeq(slices.Collect(maps.Keys(x)), maps.Keys(y))
			slices.Sort(names)
			for _, name := range slices.Compact(names) {
				v, in := x[name]
				w, too := y[name]
				if at := path + "." + pathName(name); in && too {
					paths = differing(at, v, w, paths)
				} else {
					paths = append(paths, at)
				}
			}
			return paths
		}
	case []any:
		if y, ok := b.([]any); ok {
			for i := range min(len(x), len(y)) {
				paths = differing(path+"["+strconv.Itoa(i)+"]", x[i], y[i], paths)
			}
			if len(x) != len(y) { // everything after the end of the shorter one
				paths = append(paths, path+"["+strconv.Itoa(min(len(x), len(y)))+"]")
			}
			return paths
		}
	default:
		if a == b {
			return paths
		}
	}
	return append(paths, path)
}

var plainName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// pathName gives a member's name as it stands in a path: in quotes if it could be misread, and cut if it is
// long.
func pathName(name string) string {
	if len(name) > maxNameInPath {
		name = strings.ToValidUTF8(name[:maxNameInPath], "") + "…"
	}
	if plainName.MatchString(name) {
		return name
	}
	return strconv.Quote(name)
}
