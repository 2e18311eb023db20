package onceq

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/guard"
	"github.com/onceq/onceq/internal/jsonb"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// encoded is a job ready for the database.
type encoded struct {
	header      *header
	key         string
	lane        string // family/name; "" for none
	json        string // "" where bytes are set
	bytes       []byte
	fingerprint []byte // with a key
}

// header is what jobs in a call to EnqueueMany have in common; usually there is one.
type header struct {
	queue, kind, scope, metadata string // metadata: "" for none
	priority, maxAttempts        int
	at                           time.Time
	delay                        time.Duration
	lifetime                     int64
	laneRule                     LaneRule // with memberBit
	follows                      bool     // the job waits for others
	ifDead                       DeadRule
}

// encoder encodes jobs, one after the other. What a job has in common with the one before is checked once, and what is
// made for them shares its memory.
type encoder struct {
	header  *header // of the latest job
	marshal func(any) ([]byte, error)
	texts   strings.Builder // JSON; the jobs' own strings are parts of it
	marks   []byte          // fingerprints, in the same way
	content []byte          // of the latest fingerprint
}

// newEncoder returns an encoder for many jobs.
func newEncoder() *encoder {
	var text bytes.Buffer
	j := json.NewEncoder(&text)
	return &encoder{marshal: func(v any) ([]byte, error) {
		text.Reset()
		err := j.Encode(v)
		return bytes.TrimSuffix(text.Bytes(), []byte("\n")), err
	}}
}

// encode checks a job and gives it as the database gets it.
func (j *Job) encode() (e encoded, err error) {
	c := encoder{marshal: json.Marshal}
	err = c.encode(&e, j, nil)
	return e, err
}

// encode encodes a job. before is the one that was encoded before it; nil for the first.
func (c *encoder) encode(e *encoded, j, before *Job) (err error) {
	if j.bad != nil {
		return j.bad
	}
	if before == nil || !before.sameHeader(j) {
		if c.header, err = j.checked(); err != nil {
			return err
		}
	}
	if e.key = j.Key; e.key != "" || j.keyed {
		if e.key == "" {
			return invalid("Key", "is empty, and each job of kind %q has one (Kind.Key, EnqueueUnique)", j.Kind)
		}
		if err := checkName("Key", e.key, MaxKeyBytes); err != nil {
			return err
		}
	}
	if j.Replace != 0 {
		if err := j.checkReplace(); err != nil {
			return err
		}
	}
	if e.lane, err = j.lane(); err != nil {
		return err
	}
	if err := j.checkAfter(); err != nil {
		return err
	}
	e.header = c.header
	return c.addPayload(e, j)
}

// sameHeader reports whether checked finds the same in both jobs. It may say no where they are the same.
func (j *Job) sameHeader(o *Job) bool {
	return j.Kind == o.Kind && j.Queue == o.Queue && j.Scope == o.Scope && (j.Key == "") == (o.Key == "") && j.keyed == o.keyed &&
		j.Window == o.Window && j.RunAt == o.RunAt && j.Delay == o.Delay && j.Priority == o.Priority &&
		j.MaxAttempts == o.MaxAttempts && j.Timeout == o.Timeout && j.LaneRule == o.LaneRule &&
		len(j.After)+len(o.After) == 0 && j.IfDead == o.IfDead &&
		j.follows == o.follows && j.member == o.member && len(j.Metadata) == 0 && len(o.Metadata) == 0
}

// checked checks everything but the key and the payload, and fills in what is not set.
func (j *Job) checked() (*header, error) {
	h := &header{
		kind: j.Kind, queue: cmp.Or(j.Queue, DefaultQueue), scope: j.Scope,
		laneRule: j.LaneRule, follows: j.follows || len(j.After) > 0, ifDead: j.IfDead,
		at: j.RunAt, delay: j.Delay, priority: int(j.Priority), maxAttempts: cmp.Or(j.MaxAttempts, DefaultMaxAttempts),
	}
	if j.member {
		h.laneRule |= memberBit
	}
	if err := checkName("Kind", h.kind, MaxNameBytes); err != nil {
		return nil, err
	}
	if err := checkName("Queue", h.queue, MaxNameBytes); err != nil {
		return nil, err
	}
	if err := j.checkScope(h); err != nil {
		return nil, err
	}
	if !h.at.IsZero() && h.delay != 0 {
		return nil, invalid("RunAt", "and Delay are both set; use one")
	}
	var err error
	if h.at, err = storedTime("RunAt", h.at); err != nil {
		return nil, err
	}
	if h.delay < 0 {
		return nil, invalid("Delay", "is negative")
	}
	h.delay = roundedUp(h.delay, time.Microsecond)
	if h.priority < int(PriorityHigh) || h.priority > int(PriorityLow) {
		return nil, invalid("Priority", "is %d; use PriorityHigh, PriorityNormal or PriorityLow", h.priority)
	}
	if h.maxAttempts < 0 || h.maxAttempts > math.MaxInt16 {
		return nil, invalid("MaxAttempts", "is %d; 1 to %d is possible", h.maxAttempts, math.MaxInt16)
	}
	if h.lifetime, err = lifetime("Window", j.Window); err != nil {
		return nil, err
	}
	return h, j.addMetadata(h)
}

// checkScope checks what goes with a key, and refuses it without one.
func (j *Job) checkScope(h *header) error {
	switch {
	case j.Key != "" || j.keyed:
		h.scope = cmp.Or(h.scope, h.kind)
		return checkName("Scope", h.scope, MaxScopeBytes)
	case h.scope != "":
		return invalid("Scope", "is set without a Key")
	case j.Window != 0:
		return invalid("Window", "is set without a Key, and says how long a key stays taken; set a Key, or no Window")
	}
	return nil
}

const noTimeout = "none" // in table.TimeoutMember

// ownTimeout reads table.TimeoutMember: a time, NoTimeout, or 0 where there is none, or something else by hand.
func ownTimeout(text string) time.Duration {
	if text == noTimeout {
		return NoTimeout
	}
	d, _ := time.ParseDuration(cmp.Or(text, "0")) // to parse "" is an error, with allocations
	return max(d, 0)
}

// addMetadata encodes the metadata, with the time-out.
func (j *Job) addMetadata(h *header) error {
	all := j.Metadata
	switch {
	case j.Timeout < 0 && j.Timeout != NoTimeout:
		return invalid("Timeout", "is negative; use NoTimeout for none")
	case j.Timeout != 0:
		text := noTimeout
		if j.Timeout > 0 {
			text = strconv.FormatInt(roundedUp(j.Timeout, time.Millisecond).Milliseconds(), 10) + "ms"
		}
		all = make(map[string]string, len(j.Metadata)+1)
		maps.Copy(all, j.Metadata)
		all[table.TimeoutMember] = text
	case len(all) == 0:
		return nil
	}
	for name, value := range all {
		if !utf8.ValidString(name) || !utf8.ValidString(value) {
			return invalid("Metadata", "is not valid UTF-8")
		}
	}
	raw, _ := json.Marshal(all) // a map of strings always encodes
	if len(raw) > MaxMetadataBytes {
		return invalid("Metadata", "has %d bytes; at most %d", len(raw), MaxMetadataBytes)
	}
	if _, err := jsonb.Scan(raw, false, nil); err != nil {
		return invalid("Metadata", "%v", err)
	}
	h.metadata = string(raw)
	return nil
}

// addPayload encodes the payload, and makes the fingerprint of a job with a key.
func (c *encoder) addPayload(e *encoded, j *Job) error {
	raw, isJSON, err := encodePayload("Payload", j.Payload, c.marshal)
	if err != nil {
		return err
	}
	compare := e.key != "" && !j.IgnorePayload
	var content []byte
	switch {
	case !isJSON && j.Fields != nil:
		return invalid("Fields", "are named, but the Payload is bytes")
	case compare && isJSON:
		c.content = append(slices.Grow(c.content[:0], len(raw)+16), fingerprint.FormJSON)
		content, err = jsonb.AppendCanonical(c.content, raw, j.Fields)
		c.content = content
	case compare:
		content = append(append(c.content[:0], fingerprint.FormBytes), raw...)
		c.content = content
	case isJSON:
		_, err = jsonb.Scan(raw, false, j.Fields)
	}
	if err != nil {
		return invalid("Payload", "%v", err)
	}
	if isJSON {
		e.json = c.text(raw)
	} else {
		e.bytes = raw
	}
	if e.key != "" {
		e.fingerprint = c.mark(e.header, content)
	}
	return nil
}

// newBlock is how large the next part of a memory should be of which need bytes are wanted, and which has had had. It grows
// for many jobs, and is no larger than needed for one.
func newBlock(need, had int) int { return max(need, min(2*had, 32<<10)) }

// text keeps a text. It moves nothing that it has kept before.
func (c *encoder) text(raw []byte) string {
	if had := c.texts.Cap(); had-c.texts.Len() < len(raw) {
		c.texts.Reset()
		c.texts.Grow(newBlock(len(raw), had))
	}
	at := c.texts.Len()
	c.texts.Write(raw)
	return c.texts.String()[at:]
}

// mark makes and keeps a job's fingerprint.
func (c *encoder) mark(h *header, content []byte) []byte {
	kind := h.kind
	if kind == h.scope {
		kind = ""
	}
	if need, had := fingerprint.Bytes+len(kind), cap(c.marks); had-len(c.marks) < need {
		c.marks = make([]byte, 0, newBlock(need, had))
	}
	at := len(c.marks)
	c.marks = fingerprint.Append(c.marks, kind, content)
	return slices.Clip(c.marks[at:])
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

// marshalled calls marshal, and so the value's own MarshalJSON.
func marshalled(field string, v any, marshal func(any) ([]byte, error)) (raw []byte, err error) {
	if p := guard.Call(func() { raw, err = marshal(v) }); p != nil {
		return nil, panicked(fmt.Sprintf("the encoding of %s, a %T,", field, v), p)
	}
	return raw, err
}

func isPanic(err error) bool {
	var p *PanicError
	return errors.As(err, &p)
}

// encodePayload gives a payload's bytes, and whether they are JSON.
func encodePayload(field string, payload any, marshal func(any) ([]byte, error)) (raw []byte, isJSON bool, err error) {
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
		if raw, err = marshalled(field, p, marshal); err != nil {
			if isPanic(err) {
				return nil, false, err
			}
			return nil, false, invalid(field, "does not encode as JSON: %s", marshalFault(err))
		}
	}
	if len(raw) > MaxPayloadBytes {
		return nil, false, invalid(field, "has %d bytes; at most %d: store it elsewhere and pass a reference", len(raw), MaxPayloadBytes)
	}
	return raw, isJSON, nil
}

// A mismatch says what differs. Only for a mismatch is the first job's payload read, if it still exists.

// refusal is a job whose key is taken by different work.
type refusal struct {
	err *MismatchError
	job *encoded
	as  []string // Job.Fields
}

// explain fills in the differences between the jobs that were refused and those that have their keys.
func (q *Queue) explain(ctx context.Context, db DB, refusals []refusal) error {
	const read = `
select u.n, p.payload, p.payload_bytes
  from pg_catalog.unnest($1::bigint[]) with ordinality as u(id, n)
 cross join lateral (
       (select j.payload::text as payload, j.payload_bytes from onceq.jobs j where j.id = u.id)
       union all
       (select w.payload::text, w.payload_bytes from onceq.job_waits w where w.id = u.id)
       union all
       (select h.payload::text, h.payload_bytes from onceq.job_history h where h.id = u.id)
       limit 1) p`
	refusals = slices.DeleteFunc(refusals, func(r refusal) bool { return r.err.Kind != r.err.ExistingKind })
	if len(refusals) == 0 {
		return nil
	}
	ids := make([]int64, len(refusals))
	for n, r := range refusals {
		ids[n] = r.err.Existing.ID
		r.err.Detail = "the first job's payload is no longer stored, so what differs is not known"
		if r.err.Existing.State.Finished() {
			r.err.Detail = "the first job is finished and was not kept, so only a fingerprint of its payload is left; with Kind.Keep this error says what differs, and Ops.Keys says until when the key is taken"
		}
	}
	err := q.store.Send(ctx, db, pg.AsIs, read, []any{ids}, pg.Each(func(rows pgx.Rows) error {
		var n int64
		var payload *string
		var raw []byte
		if err := rows.Scan(&n, &payload, &raw); err != nil {
			return err
		}
		r := refusals[n-1]
		r.err.Detail, r.err.Differ = fingerprint.Difference(payload, r.job.json, r.job.bytes, r.as)
		return nil
	}))
	if err != nil {
		return fmt.Errorf("onceq: reading the payload of a taken key: %w", err)
	}
	return nil
}
