package onceqcron

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/guard"
)

// Schedule says what to enqueue, and when.
type Schedule struct {
	Name string // required; at most 200 bytes, and 118 for a schedule in code

	Spec string // when it is due: see Parse
	Zone string // an IANA time zone, and not "Local" or "localtime"; default UTC

	// Timetable says when it is due, in place of Spec and Zone. For schedules in code only.
	Timetable Timetable

	// Job is enqueued at each tick. Its Delay, if any, counts from the tick; RunAt must be zero. A key is rarely needed: a
	// tick happens once without one. If the key is taken, nothing is enqueued, and the ledger says "duplicate".
	Job onceq.Job

	// JobFor makes the job of a tick, in place of Job. For schedules in code only. If it fails or panics, the ledger says "refused".
	JobFor func(Tick) (onceq.Job, error)

	// Missed says what becomes of ticks that could not happen in time, because no worker ran or the database was down.
	// Default Latest(24 * time.Hour).
	Missed Missed

	loc *time.Location // of the ticks that JobFor gets
}

// Tick is one time at which a schedule is due. Its times are in the schedule's Zone, and in UTC for a Timetable.
type Tick struct {
	Schedule string
	At       time.Time // scheduled time
	Now      time.Time // by the database's clock; later than At by how late the tick is
}

const (
	defaultMissed = 24 * time.Hour
	othersKeep    = 365 * 24 * time.Hour
	maxTicks      = 10_000 // that one statement of a person, or one tick after a long time, enqueues or counts
	maxName       = 200
	maxCodeName   = onceq.MaxNameBytes - len(tableKind+":") // it is part of its kind's name: see codeKind
)

// jobFor is the job of a tick. A panic is an error of this tick, and no reason for the schedule to stop.
func (s *Schedule) jobFor(t Tick) (job onceq.Job, err error) {
	if s.JobFor == nil {
		return s.Job, nil
	}
	err = protect(func() error {
		job, err = s.JobFor(t)
		return err
	})
	return job, err
}

// protect makes an error of a panic in a function of the application's: in JobFor, in a Timetable, or in a method of their errors.
func protect(fn func() error) (err error) {
	p := guard.Call(func() {
		if err = fn(); err != nil {
			_ = err.Error()
		}
	})
	if p != nil {
		return &onceq.PanicError{Value: p.Value, Stack: p.Stack}
	}
	return err
}

func (s *Schedule) check(inTable bool) (err error) {
	switch {
	case strings.TrimSpace(s.Name) == "":
		return invalid("Name", "is empty")
	case !storableText(s.Name):
		return invalid("Name", "%q is not valid UTF-8, or contains a NUL, which Postgres cannot store", s.Name)
	case len(s.Name) > maxName:
		return invalid("Name", "has %d bytes; at most %d", len(s.Name), maxName)
	case !inTable && len(s.Name) > maxCodeName:
		return invalid("Name", "has %d bytes; at most %d for a schedule in code", len(s.Name), maxCodeName)
	case s.Timetable != nil && (s.Spec != "" || s.Zone != ""):
		return invalid("Timetable", "of %q stands beside Spec or Zone; use one of them", s.Name)
	case inTable && (s.Timetable != nil || s.JobFor != nil):
		return invalid("Put", "stores schedule %q in the table, which cannot hold a Timetable or JobFor; use Spec and Job, or give the schedule to New", s.Name)
	case s.JobFor != nil && s.Job.Kind != "":
		return invalid("JobFor", "of %q stands beside Job; use one of them", s.Name)
	case s.JobFor == nil && s.Job.Kind == "":
		return invalid("Job", "of %q has no Kind", s.Name)
	case !s.Job.RunAt.IsZero():
		return invalid("Job.RunAt", "of %q is set; the timetable says when", s.Name)
	}
	s.loc = time.UTC
	if s.Timetable == nil {
		if s.Timetable, err = parse(s.Spec, s.Zone); err != nil {
			return invalid("Spec", "of %q: %v", s.Name, err)
		}
		if c, ok := s.Timetable.(*calendar); ok {
			s.loc = c.loc
		} else if s.loc, err = time.LoadLocation(s.Zone); err != nil {
			return invalid("Zone", "of %q: %v", s.Name, err)
		}
		if s.Zone == "" {
			s.Zone = "UTC"
		}
	} else {
		s.Spec = fmt.Sprintf("%T", s.Timetable)
		switch t := s.Timetable.(type) { // the first two are from Parse
		case *calendar:
		case every:
			s.Spec, s.Zone = "@every "+time.Duration(t).String(), "UTC"
		default:
			s.Timetable = stored{s.Timetable}
		}
	}
	if s.Missed == (Missed{}) {
		s.Missed = Latest(defaultMissed)
	}
	return s.Missed.check()
}

// storableText reports whether Postgres can store a text. An error of Postgres would end the caller's transaction.
func storableText(s string) bool { return utf8.ValidString(s) && !strings.Contains(s, "\x00") }

func invalid(field, format string, args ...any) error {
	return invalidError{&onceq.InvalidError{Field: field, Reason: fmt.Sprintf(format, args...)}}
}

// invalidError is an *onceq.InvalidError that says that this package made it.
type invalidError struct{ *onceq.InvalidError }

func (e invalidError) Error() string { return "onceqcron: " + e.Field + " " + e.Reason }

func (e invalidError) Unwrap() error { return e.InvalidError }

// storedJob is a job in the table.
type storedJob struct {
	Kind        string            `json:"kind"`
	Payload     json.RawMessage   `json:"payload"`
	Queue       string            `json:"queue,omitempty"`
	Key         string            `json:"key,omitempty"`
	Scope       string            `json:"scope,omitempty"`
	Window      time.Duration     `json:"window_ns,omitempty"`
	Delay       time.Duration     `json:"delay_ns,omitempty"`
	Priority    onceq.Priority    `json:"priority,omitempty"`
	MaxAttempts int               `json:"max_attempts,omitempty"`
	Timeout     time.Duration     `json:"timeout_ns,omitempty"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	Lane        string            `json:"lane,omitempty"`
	LaneFamily  string            `json:"lane_family,omitempty"`
	LaneRule    onceq.LaneRule    `json:"lane_rule,omitempty"`
	Limit       string            `json:"limit,omitempty"`
	Weight      int               `json:"weight,omitempty"`
}

func storeJob(j onceq.Job) (string, error) {
	if _, isBytes := j.Payload.([]byte); isBytes {
		return "", invalid("Job.Payload", "is bytes; a schedule in the table needs JSON")
	}
	if j.Fields != nil || j.IgnorePayload || j.Strict {
		return "", invalid("Job", "has Fields, IgnorePayload or Strict, which a schedule in the table cannot have")
	}
	if j.After != nil || j.Replace != 0 {
		return "", invalid("Job", "has After or Replace, which a schedule in the table cannot have")
	}
	payload, err := json.Marshal(j.Payload)
	if err != nil {
		return "", invalid("Job.Payload", "does not encode as JSON: %v", err)
	}
	stored, err := json.Marshal(storedJob{j.Kind, payload, j.Queue, j.Key, j.Scope, j.Window, j.Delay, j.Priority, j.MaxAttempts, j.Timeout,
		j.Metadata,
		j.Lane, j.LaneFamily, j.LaneRule, j.Limit, j.Weight})
	return string(stored), err
}

func readJob(stored string) (j onceq.Job, err error) {
	var s storedJob
	err = json.Unmarshal([]byte(stored), &s)
	return onceq.Job{
		Kind: s.Kind, Payload: s.Payload, Queue: s.Queue, Key: s.Key, Scope: s.Scope, Window: s.Window, Delay: s.Delay,
		Priority: s.Priority, MaxAttempts: s.MaxAttempts, Timeout: s.Timeout, Metadata: s.Metadata,
		Lane: s.Lane, LaneFamily: s.LaneFamily, LaneRule: s.LaneRule, Limit: s.Limit, Weight: s.Weight,
	}, err
}
