// Package table has the words that the tables and the packages share: numbers as SQL has them, conditions and
// parts of statements, statements that more than one package names, and what is said to people about rows.
package table

import (
	"errors"
	"fmt"
	"time"
)

// The states of jobs in job_history, those of fences, and the classes of keys, as job_fences has them. The
// package onceq has the same as types; a test compares.
const (
	JobCompleted = "5"
	JobDead      = "6"
	JobCancelled = "7"
	JobHeld      = "8"

	Queued    = "0"
	Claimed   = "1"
	Uncertain = "2"
	Completed = "3"
	Dead      = "4"
	Cancelled = "5"
	Held      = "6"

	OfJob     = "0"
	OfRequest = "2"
	OfEffect  = "3"
	OfEvent   = "4"
)

// Classes of keys: see onceq.Class.
const (
	ClassJob = iota
	ClassApplication
	ClassRequest
	ClassEffect
	ClassEvent
)

// State says where a job is in its life: see onceq.State, which has the same numbers.
type State int8

// The states of a job.
const (
	StateWaiting State = iota + 1
	StateDelayed
	StateRunning
	StateRetrying
	StateCompleted
	StateDead
	StateCancelled
	StateHeld
)

// Finished reports whether the job will not run any more, unless somebody redrives it.
func (s State) Finished() bool { return s >= StateCompleted }

// What onceq.ErrIDTaken and onceq.ErrKeyUnsettled are, whose comments say what they mean.
var (
	ErrIDTaken      = errors.New("onceq: the sequence of ids is behind the ids in use; set it past them, see onceq.ErrIDTaken")
	ErrKeyUnsettled = errors.New("onceq: key is neither free nor visible; is row security hiding job_fences from this role?")
)

// What came of an Await or a Sleep, as job_awaits.state stores it, and TimeoutMember, the member of the
// metadata with Job.Timeout: milliseconds ("90000ms"), or "none". Its name has no "onceq." in it, which
// stands for the schema in statements.
const (
	AwaitOpen     = `0`
	AwaitCame     = `1`
	AwaitTimedOut = `2`
	TimeoutMember = "onceq-timeout"
)

// The numbers that somebody has chosen and that more than one package uses.
const (
	RepairChunk  = 500                        // jobs that one statement repairs: their rows are locked until it commits
	Remembered   = 1000                       // quiet queues, or held jobs, that a process remembers
	SettleTries  = 10                         // new statements, where another transaction came in between each time
	PresentEvery = time.Minute                // a worker three of whose rows did not come is gone
	MaxDelay     = 100 * 365 * 24 * time.Hour // a longer one is cut: a mistake in units is no reason to fail
	CountsKept   = 25 * time.Hour             // then a Reaper removes the counts of a minute and of ten
	UnknownFor   = 30 * 24 * time.Hour        // so long a client's key of unknown outcome stays, and
	NotedEvery   = 24 * time.Hour             // that much longer: who asks for it is noted so often
	CountsDelay  = 10 * time.Second           // in so long after a full minute workers write counts and rows

	// The most jobs, leases, lanes or rows in one statement, their most bytes, and the most jobs that are
	// claimed ahead: what comes next does not wait for long.
	ChunkRows  = 2000
	ChunkBytes = 16 << 20
)

// LinesLack is what is said where rows are missing (LacksRows).
const LinesLack = "rows of lane_locks or lane_calls are missing, without which no lane, limit or group goes on"

// Statements that call functions of the schema, whose comments say what they do. The package onceq names them
// where it says what runs on which node.
const (
	// HurryJobs makes jobs due that wait for their time, and returns how many.
	HurryJobs = `select n from onceq.hurry($1::bigint[]) n`

	// DiscardJobs removes finished jobs from the history and returns how many.
	DiscardJobs = `select n from onceq.discard($1::bigint[], $2::smallint[]) n`

	// MoveJobs moves jobs into another queue, and returns how many.
	MoveJobs = `select n from onceq.move($1::bigint[], $2::text, $3::bigint, $4::bool) n`

	// ResolveEffects settles effects of jobs.
	ResolveEffects = `
select e.settled, e.held from onceq.resolve_effects($1::bigint[], $2::smallint[], $3::smallint, $4::text, $5::text) e`
)

// Redriven says what became of the jobs of one statement: see the function redrive of the schema.
type Redriven struct{ Back, Taken, Held, Early, UsedUp []int64 }

// Stuck is what a worker writes into its row about slots that are held by handlers of one kind in one queue
// that do not return.
type Stuck struct {
	Queue string    `json:"queue"`
	Kind  string    `json:"kind"`
	Slots int       `json:"slots"`
	Job   int64     `json:"job"` // of the first of them
	Since time.Time `json:"since"`
}

func (s Stuck) String() string {
	return fmt.Sprintf("%s of queue %q %s held since %s by handlers of kind %q that do not return although their context has ended",
		Numbered(s.Slots, "slot", "slots"), s.Queue, Either(s.Slots, "is", "are"), Stamp(s.Since), s.Kind)
}

// Pool is what a worker writes into its row about the pool that its handlers' transactions use.
type Pool struct {
	Conns int           `json:"conns"`
	Bound []string      `json:"bound,omitzero"`
	Wait  time.Duration `json:"wait"`
}

// OrZero reads a column that may be null.
func OrZero[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// Stamp writes a time for people.
func Stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }

// Numbered is a number with its words, for texts that people read.
func Numbered(n int, one, many string) string { return fmt.Sprint(n, " ", Either(n, one, many)) }

// Either gives the word for one, or that for many.
func Either(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}
