package onceqops

import "time"

// The numbers that somebody has chosen, each with its reason.
const (
	readyLong   = 2 * time.Second  // then a worker that has a connection has taken a job
	failingFrom = 10               // attempts that failed, before a kind is named that also completes some
	deployTime  = 15 * time.Minute // so long workers of two versions are normal
	drainedIn   = 5                // minutes of which it is told how many jobs have ended
	headSize    = 200              // due jobs of each priority that are looked at
	pageRows    = 5_000            // rows of each table that a Page looks at
	maxKeys     = 100              // scopes that Keys looks at
	maxAction   = 4096             // bytes of each text of an Action
)
