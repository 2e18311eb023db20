package onceq

import (
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"
)

// Limits, checked before anything is sent. They keep every index entry well below the size of a btree page.
const (
	MaxKeyBytes      = 512       // of a key
	MaxScopeBytes    = 256       // of a scope
	MaxNameBytes     = 128       // of a queue, a kind and an effect
	MaxPayloadBytes  = 1 << 20   // of an encoded payload
	MaxMetadataBytes = 16 << 10  // of the encoded metadata
	MaxResultBytes   = 256 << 10 // of an encoded result, and of an event's payload (Emit)
)

// Special values of a window, which says how long a key stays taken after its work is finished.
const (
	DefaultWindow               = 24 * time.Hour // if nothing else is said; a cancelled job is kept for as long
	UntilFinished time.Duration = -1             // the key is free as soon as the work is finished; outside jobs see FenceSpec.Window
	UntilStarted  time.Duration = -2             // only for jobs: see Job.Window
	Forever       time.Duration = math.MaxInt64  // the key is never free again
)

// Priority orders the jobs of a queue. Within a priority, jobs are taken in the order in which they are due; one that was given back
// before it started is due from then on. Every eighth claim of a worker begins with the lowest priority or with the normal one, in
// turns, so that none starves.
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

	// Window is how long the key stays taken after the job is finished: a duration, UntilFinished,
	// UntilStarted or Forever. Default DefaultWindow. It is rounded up to a whole millisecond. Without a key
	// it is an *InvalidError. The key of a job that is cancelled before any worker had it is free at once
	// (onceqops.Filter.KeepKeys).
	//
	// With UntilStarted a job that somebody has leaves its key when it is enqueued again. The new job may run
	// beside it; a Lane keeps them apart. One that nobody has, also before its next attempt, is not started
	// before the transaction that enqueues it again ends, and so sees what that one has written.
	Window time.Duration

	RunAt    time.Time     // not before this time, in whole microseconds; default at once, as for a time in the past
	Delay    time.Duration // not before this much time has passed by the database's clock; not together with RunAt
	Priority Priority

	// Timeout is Kind.Timeout for this job alone, or NoTimeout; default the kind's. Several jobs of one batch
	// have their kind's. The metadata has it, as "onceq-timeout", and so Replace changes it with the payload.
	Timeout time.Duration

	MaxAttempts int // failed attempts until the job is dead; default DefaultMaxAttempts, at most 32,767

	// Lane puts the job in a line: of the jobs of one lane, one is live at a time, or as many as Queue.SetLaneLimit says, in
	// the order of priority, due time and id. The others wait outside of the table that workers search. Lanes of different
	// families are different. LaneFamily is the kind's name by default; kinds with the same family share its lanes and
	// limits. LaneRule says what a failed, dead or held job does to its lane. At most MaxLaneBytes, and MaxNameBytes for the
	// family.
	Lane       string
	LaneFamily string
	LaneRule   LaneRule

	// Limit names a limit that holds for all jobs with this name, of any kinds and lanes, without an order: how many are live
	// at once, how many start in a time, or both. Queue.SetLimit says; without that it is one at a time. A job may have a lane
	// and a limit. It then waits for its lane first, and the lanes take turns in the limit. At most MaxLaneBytes.
	Limit string

	// Weight is how often the job counts in its limit: tokens of a model, megabytes. Default 1, at most
	// MaxWeight. If its handler learns that it was another number, it says so with Lease.SetWeight. A job
	// that weighs more than the limit lets live at once starts when no other job of the limit is live, and
	// runs alone. One that weighs more than the limit's Burst, or 1 with Max, starts when nothing of what
	// started before is left to wait for, and the jobs after it wait that much longer. Lighter jobs behind it
	// do not pass it.
	Weight int

	// After names jobs that must be finished before this one starts: enqueued in the same transaction or long before. IfDead says
	// what a dead one means; one that was cancelled counts as finished. The job waits outside of the table that workers search,
	// and after that for its time, its lane and its limit. Its handler reads what came of the others with Lease.Members. A job
	// that is not known any more counts as completed, also one of a transaction that is not committed. An ID that was never
	// drawn and a key that no job has are an *InvalidError, before anything is written. In EnqueueMany a key may be that of an
	// earlier job of the same call. See EnqueueGroup for jobs that are made together with the one that waits for them. Not
	// together with Replace.
	After  []JobRef
	IfDead DeadRule

	Metadata map[string]string // stored with the job; not compared when a key comes back

	// Fields names the members of the payload that must be equal when a key comes back; the others may differ. By default
	// all must be equal. With IgnorePayload the payload is not compared at all. The kind is always compared.
	Fields        []string
	IgnorePayload bool

	// Strict makes a duplicate an error, a *DuplicateError, instead of a Result with Duplicate set.
	Strict bool

	// Replace changes the job that has the key already, if that is of the same kind and nobody has ever claimed it: its
	// payload, its time or both, with its key's fingerprint. Its id and everything else stay, the Result has Duplicate and
	// Replaced set, and this job's other fields count for nothing. With ReplaceTime and a Delay the job runs when no further
	// call has come for that long (a debounce); use UntilFinished as the Window if the key is to be free after that.
	//
	// A job with a Lane or a Limit changes only one with the same Lane and Limit. Once they have let that one
	// go on, it keeps its time and its weight, and ReplaceTime alone changes nothing. Before that the weight
	// changes with the payload.
	//
	// If the job was started before, has another lane or limit, waits for others, or is finished and its key still taken, nothing is
	// changed and the answer is as without Replace: the same payload is a duplicate with that job's State, and another one is a
	// *MismatchError, so that no change is lost silently. A job that failed or was given back counts as started, also after a Redrive. Enqueue
	// waits while a claim of the job is under way, or a transaction that moves it or lets it into its lane. A worker finds a job that became due earlier with its next poll. Not together with Strict; and a job
	// with an After cannot replace another, which is an *InvalidError. Nor can one in a batch (EnqueueInBatch).
	Replace Replace

	follows, member bool // of a group that is made in this call: EnqueueGroup, AddMembers

	bad   error // why no such job can be made: a function of its kind's panicked
	keyed bool  // made by a kind that derives keys, or for EnqueueUnique: an empty key is an error
}

// lifetime gives a window as the tables store it: milliseconds, 0 for until finished or started, -1 for ever.
func lifetime(field string, window time.Duration) (int64, error) {
	switch {
	case window == 0:
		return DefaultWindow.Milliseconds(), nil
	case window == UntilFinished, window == UntilStarted:
		return 0, nil
	case window == Forever:
		return -1, nil
	case window < 0:
		return 0, invalid(field, "is negative; use a duration, UntilFinished, UntilStarted or Forever")
	}
	return roundedUp(window, time.Millisecond).Milliseconds(), nil // no shorter than asked for, if a duration can say that
}

// roundedUp rounds up to whole units, except where a duration cannot say that.
func roundedUp(d, unit time.Duration) time.Duration {
	if over := d % unit; over > 0 && d <= math.MaxInt64-unit {
		return d + unit - over
	}
	return d
}

// latestTime is the latest time that is stored. Later ones have a year of five digits, which does not encode as JSON, or get one in SQL,
// which counts in floating point: microseconds so far from 1970 are rounded to some thirty.
var latestTime = time.Date(9999, 12, 31, 23, 59, 59, 999_000_000, time.UTC)

// storedTime gives a time as the tables store it, in whole microseconds and not before t. The zero time stays.
func storedTime(field string, t time.Time) (time.Time, error) {
	if t.IsZero() {
		return t, nil
	}
	stored := t.Round(0).Truncate(time.Microsecond)
	if stored.Before(t) {
		stored = stored.Add(time.Microsecond)
	}
	if year := t.UTC().Year(); year < 1 || year > 9999 || stored.After(latestTime) { // After overflows
		return t, invalid(field, "is in the year %d of UTC, or in its last millisecond; 1 to 9999 is possible", year)
	}
	return stored, nil
}

// checkLease refuses a lease, or what makes one, that is too short or too long.
func checkLease(field string, d, least time.Duration) error {
	if d < least || d > 7*24*time.Hour { // a longer one would keep the work of a process that died
		return invalid(field, "is %s; %s to a week is possible", d, least)
	}
	return nil
}

// checkName refuses what would fail in the database, or would name nothing.
func checkName(field, name string, limit int) error {
	switch {
	case name == "":
		return invalid(field, "is empty")
	case len(name) > limit:
		advice := "choose a shorter one"
		if field == "Key" {
			advice = "use a hash of it instead, such as SHA-256 in hex"
		}
		return invalid(field, "has %d bytes; at most %d: %s", len(name), limit, advice)
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
