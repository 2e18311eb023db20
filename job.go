package onceq

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/onceq/onceq/internal/jsonb"
)

// Limits, checked before anything is sent. They keep every index entry well below the size of a btree page.
const (
	MaxKeyBytes      = 512       // of a key
	MaxScopeBytes    = 256       // of a scope
	MaxNameBytes     = 128       // of a queue, a kind and an effect
	MaxPayloadBytes  = 1 << 20   // of an encoded payload
	MaxMetadataBytes = 16 << 10  // of the encoded metadata
	MaxResultBytes   = 256 << 10 // of an encoded result
)

// Special values of a window, which says how long a key stays taken after its work is finished.
const (
	DefaultWindow               = 24 * time.Hour
	UntilFinished time.Duration = -1            // the key is free as soon as the job is finished
	Forever       time.Duration = math.MaxInt64 // the key is never free again
)

// Priority orders the jobs of a queue. Within a priority, jobs are taken in the order in which they are due. Every eighth
// claim of a worker begins with the lowest priority, so that no priority starves.
type Priority int

// The priorities.
const (
	PriorityHigh   Priority = -1
	PriorityNormal Priority = 0
	PriorityLow    Priority = 1
)

func (p Priority) String() string {
	switch p {
	case PriorityHigh:
		return "high"
	case PriorityNormal:
		return "normal"
	case PriorityLow:
		return "low"
	}
	return fmt.Sprintf("Priority(%d)", int(p))
}

// MarshalText returns the priority's name. It is used for JSON too.
func (p Priority) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads a priority's name.
func (p *Priority) UnmarshalText(text []byte) error {
	for _, known := range []Priority{PriorityHigh, PriorityNormal, PriorityLow} {
		if known.String() == string(text) {
			*p = known
			return nil
		}
	}
	return invalid("Priority", "is %q; possible: high, normal or low", text)
}

// DefaultQueue is the queue of a job that names none.
const DefaultQueue = "default"

// DefaultMaxAttempts is how often a job may fail before it is dead. With the default backoff the last attempt comes about
// eleven days after the first.
const DefaultMaxAttempts = 25

// Job is one unit of work to enqueue. Kind.Job makes one from a typed payload; a literal works too.
type Job struct {
	Kind string // required; says which handler runs the job

	// Payload is what the handler gets: json.RawMessage is stored as it is, []byte as bytes that come back unchanged (for
	// signatures), anything else as encoding/json encodes it. JSON is stored as jsonb: white space, the order of members
	// and repeated members are not preserved. At most MaxPayloadBytes.
	Payload any

	Queue string // default DefaultQueue

	// Key names this unit of work within its Scope, so that it is accepted once. Without a key, every Enqueue makes a new
	// job. Build the key from what makes the work unique ("welcome:42"), never from a random number, an attempt or the
	// time.
	Key string

	// Scope keeps the keys of tenants or workspaces apart. Default: the kind's name, so that a kind may move to another
	// queue and each kind has keys of its own. Kinds that share a scope share its keys. A key belongs to one kind: a job of
	// another kind with the same key gets a *MismatchError, whatever the payloads are.
	Scope string

	// Window is how long the key stays taken after the job is finished: a duration, UntilFinished or Forever. Default
	// DefaultWindow. It is rounded up to a whole millisecond.
	Window time.Duration

	RunAt    time.Time     // not before this time; default at once. A time in the past means at once too
	Delay    time.Duration // not before this much time has passed by the database's clock; not together with RunAt
	Priority Priority

	MaxAttempts int // failed attempts until the job is dead; default DefaultMaxAttempts, at most 32,767

	Metadata map[string]string // stored with the job; not compared when a key comes back

	// Fields names the members of the payload that must be equal when a key comes back; the others may differ. By default
	// all must be equal. With IgnorePayload the payload is not compared at all. The kind is always compared.
	Fields        []string
	IgnorePayload bool

	// Strict makes a duplicate an error, a *DuplicateError, instead of a Result with Duplicate set.
	Strict bool

	keyed bool // made by a kind that derives keys, or for EnqueueUnique: an empty key is an error
}

// encoded is a job ready for the database.
type encoded struct {
	kind, queue, scope, key string
	json                    string // "" where bytes are set
	bytes                   []byte
	metadata                string // "" for none
	fingerprint             []byte // with a key
	at                      time.Time
	delay                   time.Duration
	lifetime                int64
	priority, maxAttempts   int
}

// encode checks a job and gives it as the database gets it.
func (j *Job) encode() (encoded, error) {
	e := encoded{
		kind: j.Kind, queue: j.Queue, scope: j.Scope, key: j.Key,
		at: j.RunAt, delay: j.Delay, priority: int(j.Priority), maxAttempts: j.MaxAttempts,
	}
	if e.queue == "" {
		e.queue = DefaultQueue
	}
	if err := checkName("Kind", e.kind, MaxNameBytes); err != nil {
		return e, err
	}
	if err := checkName("Queue", e.queue, MaxNameBytes); err != nil {
		return e, err
	}
	if e.key == "" && !j.keyed {
		if e.scope != "" {
			return e, invalid("Scope", "is set without a Key")
		}
	} else {
		if e.scope == "" {
			e.scope = e.kind
		}
		if err := checkName("Key", e.key, MaxKeyBytes); err != nil {
			return e, err
		}
		if err := checkName("Scope", e.scope, MaxScopeBytes); err != nil {
			return e, err
		}
	}
	if !e.at.IsZero() && e.delay != 0 {
		return e, invalid("RunAt", "and Delay are both set; use one")
	}
	if y := e.at.Year(); !e.at.IsZero() && (y < 1 || y > 9999) {
		return e, invalid("RunAt", "is in the year %d; 1 to 9999 is possible", y)
	}
	if e.delay < 0 {
		return e, invalid("Delay", "is negative")
	}
	if e.priority < int(PriorityHigh) || e.priority > int(PriorityLow) {
		return e, invalid("Priority", "is %d; use PriorityHigh, PriorityNormal or PriorityLow", e.priority)
	}
	switch {
	case e.maxAttempts == 0:
		e.maxAttempts = DefaultMaxAttempts
	case e.maxAttempts < 0 || e.maxAttempts > math.MaxInt16:
		return e, invalid("MaxAttempts", "is %d; 1 to %d is possible", e.maxAttempts, math.MaxInt16)
	}
	var err error
	if e.lifetime, err = lifetime("Window", j.Window); err != nil {
		return e, err
	}
	for name, value := range j.Metadata {
		if !utf8.ValidString(name) || !utf8.ValidString(value) {
			return e, invalid("Metadata", "is not valid UTF-8")
		}
	}
	if len(j.Metadata) > 0 {
		raw, _ := json.Marshal(j.Metadata) // a map of strings always encodes
		if len(raw) > MaxMetadataBytes {
			return e, invalid("Metadata", "has %d bytes; at most %d", len(raw), MaxMetadataBytes)
		}
		if _, err := jsonb.Scan(raw, false, nil); err != nil {
			return e, invalid("Metadata", "%v", err)
		}
		e.metadata = string(raw)
	}
	raw, isJSON, err := encodePayload("Payload", j.Payload)
	if err != nil {
		return e, err
	}
	var mark fingerprint
	if mark.kind = e.kind; e.kind == e.scope {
		mark.kind = ""
	}
	compare := e.key != "" && !j.IgnorePayload
	if isJSON {
		canonical, err := jsonb.Scan(raw, compare, j.Fields)
		if err != nil {
			return e, invalid("Payload", "%v", err)
		}
		if compare {
			mark.digest = digest('j', canonical)
		}
		e.json = string(raw)
	} else {
		if j.Fields != nil {
			return e, invalid("Fields", "are named, but the Payload is bytes")
		}
		if compare {
			mark.digest = digest('b', raw)
		}
		e.bytes = raw
	}
	if e.key != "" {
		e.fingerprint = mark.stored()
	}
	return e, nil
}

// marshalFault says why a value does not encode, without the value, which the error may quote.
func marshalFault(err error) string {
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

// encodePayload gives a payload's bytes, and whether they are JSON.
func encodePayload(field string, payload any) (raw []byte, isJSON bool, err error) {
	isJSON = true
	switch p := payload.(type) {
	case json.RawMessage:
		if raw = p; len(raw) == 0 {
			raw = []byte("null")
		}
	case []byte:
		if raw, isJSON = p, false; raw == nil {
			raw = []byte{}
		}
	default:
		if raw, err = json.Marshal(p); err != nil {
			return nil, false, invalid(field, "does not encode as JSON: %s", marshalFault(err))
		}
	}
	if len(raw) > MaxPayloadBytes {
		return nil, false, invalid(field, "has %d bytes; at most %d: store it elsewhere and pass a reference", len(raw), MaxPayloadBytes)
	}
	return raw, isJSON, nil
}

// fingerprint is what two users of one key must have in common. It is stored as one byte for its version, one for the
// length of the digest, the digest, and the name of the kind.
type fingerprint struct {
	kind   string // of a job; "" if it equals the scope, as it does by default
	digest []byte // of the payload; empty if that is not compared
}

// fingerprintVersion is the first byte of a stored fingerprint. A fingerprint of a version that this code does not know
// counts as equal: a rollback must not turn duplicates into mismatches.
const fingerprintVersion = 1

// digest condenses a payload: 128 bits of SHA-256 over its form (JSON or bytes) and its content.
func digest(form byte, content []byte) []byte {
	h := sha256.New()
	h.Write([]byte{form})
	h.Write(content)
	return h.Sum(make([]byte, 0, sha256.Size))[:16]
}

func (f *fingerprint) stored() []byte {
	b := append(make([]byte, 0, 2+len(f.digest)+len(f.kind)), fingerprintVersion, byte(len(f.digest)))
	return append(append(b, f.digest...), f.kind...)
}

// readFingerprint reads a stored fingerprint; ok is false if there is none, or if this code cannot read it.
func readFingerprint(b []byte) (f fingerprint, ok bool) {
	if len(b) < 2 || b[0] != fingerprintVersion || len(b) < 2+int(b[1]) {
		return f, false
	}
	n := 2 + int(b[1])
	return fingerprint{digest: b[2:n], kind: string(b[n:])}, true
}

// kindOf gives the kind of the job that has a key, from its fence's fingerprint and scope.
func kindOf(stored []byte, scope string) string {
	if f, _ := readFingerprint(stored); f.kind != "" {
		return f.kind
	}
	return scope
}

// sameKind compares the kinds of a stored fingerprint and a new one, and samePayload their payloads. What is unknown in one
// of the two counts as equal.
func sameKind(stored, now []byte) bool {
	a, known := readFingerprint(stored)
	b, ok := readFingerprint(now)
	return !known || !ok || a.kind == b.kind
}

func samePayload(stored, now []byte) bool {
	a, known := readFingerprint(stored)
	b, ok := readFingerprint(now)
	return !known || !ok || len(a.digest) == 0 || len(b.digest) == 0 || bytes.Equal(a.digest, b.digest)
}

// lifetime gives a window as the tables store it: milliseconds, 0 for until finished, -1 for ever.
func lifetime(field string, window time.Duration) (int64, error) {
	switch {
	case window == 0:
		return DefaultWindow.Milliseconds(), nil
	case window == UntilFinished:
		return 0, nil
	case window == Forever:
		return -1, nil
	case window < 0:
		return 0, invalid(field, "is negative; use a duration, UntilFinished or Forever")
	case window%time.Millisecond != 0:
		return window.Milliseconds() + 1, nil // no shorter than asked for
	}
	return window.Milliseconds(), nil
}

// checkName refuses what would fail in the database, or would name nothing.
func checkName(field, name string, limit int) error {
	switch {
	case name == "":
		return invalid(field, "is empty")
	case len(name) > limit:
		return invalid(field, "has %d bytes; at most %d", len(name), limit)
	case strings.TrimSpace(name) == "":
		return invalid(field, "is only white space")
	}
	return checkText(field, name)
}

// checkText is checkName for a text that may be empty, or that is only looked for.
func checkText(field, text string) error {
	switch {
	case !utf8.ValidString(text):
		return invalid(field, "is not valid UTF-8")
	case strings.ContainsRune(text, 0):
		return invalid(field, "contains a NUL character, which Postgres cannot store in a text")
	}
	return nil
}
