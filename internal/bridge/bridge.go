// Package bridge is how the package onceqops reaches what the package onceq does not export.
package bridge

import "time"

// Root is what the package onceq shows. It sets it when it is initialized, before any package that imports it
// is, and nobody changes it after that. onceqops declares which methods it has (library.go there).
var Root any

// A Way is how a statement is sent: see statement.go of the package onceq.
type Way struct {
	How   How
	Clock *time.Time // gets the database's time; nil for none
}

// How is one of these.
type How int

// The ways.
const (
	AsIs          How = iota
	Reading           // with the settings for looking at large tables
	ForCaller         // for what somebody waits for
	ForCallerRare     // the same, for statements that are rare
)

// Job is what is known of a job besides what is shown of it.
type Job struct {
	Line       string     // of a blocked job: what it waits for, as job_waits has it
	Slotted    bool       // its time is a slot of its limit's rate
	Began      time.Time  // when the latest run began, if a beat has written that
	Holder     *int64     // of its lease
	Ahead      bool       // claimed, and not known to run yet
	Cancelling *time.Time // when somebody asked for that
	Scope, Key string     // of the event that it waits for, or the name of its sleep,
	Until      *time.Time // and until when; nil for neither
	At         time.Time  // the database's time
}

// Redriven says what became of the jobs of one statement: see the function redrive of the schema.
type Redriven struct{ Back, Taken, Held, Early, UsedUp []int64 }

// Trouble is work in the background that fails, and what to do about it.
type Trouble struct {
	Queue          string
	Detail, Advice string
	Error          string
	Since          time.Time
}
