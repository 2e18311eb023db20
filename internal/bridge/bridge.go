// Package bridge is how the package onceqops, and queuetest, reach what the package onceq does not export.
package bridge

import "time"

// Root is what the package onceq shows. It sets it when it is initialized, before any package that imports it
// is, and nobody changes it after that. onceqops declares which methods it has (library.go there).
var Root any

// Alone gives an *onceq.Queue a turn of its own for jobs that have lost leases, as if its workers were a
// process of their own. So one test does not wait for another, and a test may stand for several processes.
// The package onceq sets it.
var Alone func(queue any)

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
