package onceq

import (
	"fmt"
	"slices"
	"strings"
)

// This file has the numbers that are stored in the tables, in Go and in SQL. Statements are put together from these. The
// statements that run for every job are written out and contain the numbers themselves; a test compares.

// State says where a job is in its life.
type State int8

// The states of a job. The state of a finished job can be read as long as its key is taken or its history is kept.
const (
	StateWaiting   State = iota + 1 // due, and nobody has it
	StateDelayed                    // not due yet
	StateRunning                    // somebody holds its lease
	StateRetrying                   // failed or lost a lease before; will run again. So is a job whose transactional handler runs for longer than its lease: Ops.Explain knows
	StateCompleted                  // finished
	StateDead                       // out of attempts, fatal, or crashed too often; see Ops.Redrive
	StateCancelled                  // by Queue.Cancel
	StateHeld                       // an effect's outcome waits for a person; see Ops.Resolve
)

var stateNames = [...]string{"unknown", "waiting", "delayed", "running", "retrying", "completed", "dead", "cancelled", "held"}

func (s State) String() string {
	if s < 0 || int(s) >= len(stateNames) {
		return fmt.Sprintf("State(%d)", int8(s))
	}
	return stateNames[s]
}

// MarshalText returns the state's name. It is used for JSON too.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a state's name.
func (s *State) UnmarshalText(text []byte) error {
	i := slices.Index(stateNames[:], string(text))
	if i < 0 {
		return invalid("State", "is %q; possible: %s", text, strings.Join(stateNames[:], ", "))
	}
	*s = State(i)
	return nil
}

// Finished reports whether the job will not run any more, unless somebody redrives it.
func (s State) Finished() bool { return s >= StateCompleted }

// Class keeps keys of different origin apart, so that a key that a client sends can never collide with one of the
// application's own, or with a job's.
type Class int16

const (
	classJob         Class = iota // the keys of jobs
	ClassApplication              // the application's own keys; the default
	ClassRequest                  // keys that clients send, usually in an Idempotency-Key header; see Reaper for how long they stay
	classEffect                   // named effects of jobs, see Once
	classEvent                    // events, see Emit
)

func (c Class) String() string {
	switch c {
	case classJob:
		return "job"
	case ClassApplication:
		return "application"
	case ClassRequest:
		return "request"
	case classEffect:
		return "effect"
	case classEvent:
		return "event"
	}
	return fmt.Sprintf("Class(%d)", int16(c))
}

// MarshalText returns the class's name. It is used for JSON too.
func (c Class) MarshalText() ([]byte, error) { return []byte(c.String()), nil }
