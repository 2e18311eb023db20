package onceq

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/onceq/onceq/internal/enqueue"
	"github.com/onceq/onceq/internal/guard"
	"github.com/onceq/onceq/internal/jsonb"
	"github.com/onceq/onceq/internal/table"
)

// encoder encodes jobs, one after the other. What a job has in common with the one before is checked once, and what is
// made for them shares its memory.
type encoder struct {
	header  *enqueue.Header // of the latest job
	marshal func(any) ([]byte, error)
	memory  enqueue.Memory
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
func (j *Job) encode() (r enqueue.Row, err error) {
	c := encoder{marshal: json.Marshal}
	err = c.encode(&r, j, nil)
	return r, err
}

// encode encodes a job. before is the one that was encoded before it; nil for the first.
func (c *encoder) encode(r *enqueue.Row, j, before *Job) (err error) {
	if j.bad != nil {
		return j.bad
	}
	if before == nil || !before.sameHeader(j) {
		if c.header, err = j.checked(); err != nil {
			return err
		}
	}
	if r.Key = j.Key; r.Key != "" || j.keyed {
		if r.Key == "" {
			return invalid("Key", "is empty, and each job of kind %q has one (Kind.Key, EnqueueUnique)", j.Kind)
		}
		if err := checkName("Key", r.Key, MaxKeyBytes); err != nil {
			return err
		}
	}
	if j.Replace != 0 {
		if err := j.checkReplace(); err != nil {
			return err
		}
	}
	r.May = int16(j.Replace)
	if j.Window == UntilStarted {
		r.May |= enqueue.MayWait
	}
	if r.Lane, err = j.lane(); err != nil {
		return err
	}
	if err := j.checkAfter(); err != nil {
		return err
	}
	r.Header = c.header
	return c.addPayload(r, j)
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
func (j *Job) checked() (*enqueue.Header, error) {
	h := &enqueue.Header{
		Kind: j.Kind, Queue: cmp.Or(j.Queue, DefaultQueue), Scope: j.Scope,
		LaneRule: int16(j.LaneRule), Follows: j.follows || len(j.After) > 0, IfDead: int16(j.IfDead),
		At: j.RunAt, Delay: j.Delay, Priority: int(j.Priority), MaxAttempts: cmp.Or(j.MaxAttempts, DefaultMaxAttempts),
	}
	if j.member {
		h.LaneRule |= table.MemberBit
	}
	if err := checkName("Kind", h.Kind, MaxNameBytes); err != nil {
		return nil, err
	}
	if err := checkName("Queue", h.Queue, MaxNameBytes); err != nil {
		return nil, err
	}
	if err := j.checkScope(h); err != nil {
		return nil, err
	}
	if !h.At.IsZero() && h.Delay != 0 {
		return nil, invalid("RunAt", "and Delay are both set; use one")
	}
	var err error
	if h.At, err = storedTime("RunAt", h.At); err != nil {
		return nil, err
	}
	if h.Delay < 0 {
		return nil, invalid("Delay", "is negative")
	}
	h.Delay = roundedUp(h.Delay, time.Microsecond)
	if h.Priority < int(PriorityHigh) || h.Priority > int(PriorityLow) {
		return nil, invalid("Priority", "is %d; use PriorityHigh, PriorityNormal or PriorityLow", h.Priority)
	}
	if h.MaxAttempts < 0 || h.MaxAttempts > math.MaxInt16 {
		return nil, invalid("MaxAttempts", "is %d; 1 to %d is possible", h.MaxAttempts, math.MaxInt16)
	}
	if h.Lifetime, err = lifetime("Window", j.Window); err != nil {
		return nil, err
	}
	return h, j.addMetadata(h)
}

// checkScope checks what goes with a key, and refuses it without one.
func (j *Job) checkScope(h *enqueue.Header) error {
	switch {
	case j.Key != "" || j.keyed:
		h.Scope = cmp.Or(h.Scope, h.Kind)
		return checkName("Scope", h.Scope, MaxScopeBytes)
	case h.Scope != "":
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
func (j *Job) addMetadata(h *enqueue.Header) error {
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
	h.Metadata = string(raw)
	return nil
}

// addPayload encodes the payload, and makes the fingerprint of a job with a key.
func (c *encoder) addPayload(r *enqueue.Row, j *Job) error {
	raw, isJSON, err := encodePayload("Payload", j.Payload, c.marshal)
	switch {
	case err != nil:
		return err
	case !isJSON && j.Fields != nil:
		return invalid("Fields", "are named, but the Payload is bytes")
	}
	if err := c.memory.Add(r, raw, isJSON, r.Key != "" && !j.IgnorePayload, j.Fields); err != nil {
		return invalid("Payload", "%v", err)
	}
	return nil
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
			return nil, false, invalid(field, "does not encode as JSON: %s", jsonb.Fault(err))
		}
	}
	if len(raw) > MaxPayloadBytes {
		return nil, false, invalid(field, "has %d bytes; at most %d: store it elsewhere and pass a reference", len(raw), MaxPayloadBytes)
	}
	return raw, isJSON, nil
}

// Replace says what a job changes in the job that has its key already, if nobody has started that one: see Job.Replace.
type Replace uint8

// What can be replaced. Both together: ReplacePayload | ReplaceTime.
const (
	ReplacePayload Replace = 1 << iota // the payload and the metadata, and with them what later jobs with the key are compared with
	ReplaceTime                        // when it is due: RunAt or Delay count from this call, and without them it is due now
)

func (j *Job) checkReplace() error {
	switch {
	case j.Replace > ReplacePayload|ReplaceTime:
		return invalid("Replace", "is %d; use ReplacePayload and ReplaceTime", j.Replace)
	case j.Key == "" && !j.keyed:
		return invalid("Replace", "is set without a Key, by which the other job is found")
	case j.Strict:
		return invalid("Replace", "and Strict are both set; use one")
	}
	return nil
}

// notReplaced says why Replace did not change the job that r describes, if it is set.
func (j *Job) notReplaced(r Result) string {
	switch {
	case j.Replace == 0:
		return ""
	case r.State != StateWaiting && r.State != StateDelayed:
		return fmt.Sprintf("job %d is %s", r.ID, r.State)
	case j.Replace&ReplacePayload == 0:
		return "ReplacePayload is not set"
	}
	return fmt.Sprintf("job %d was started before, has another lane or limit, waits for others, or is being cancelled", r.ID)
}
