package onceq

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/onceq/onceq/internal/fence"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/table"
)

// Errors without fields. The typed errors below match theirs with errors.Is.
var (
	// ErrLeaseLost: somebody else may hold the job by now, or it is finished, cancelled or discarded. Whatever was
	// attempted under the old token was refused. Stop working on the job. Nothing that went through the lease's transaction
	// needs to be undone.
	ErrLeaseLost = errors.New("onceq: lease lost")

	// ErrCancelled is the cause with which a running handler's context ends after Queue.Cancel.
	ErrCancelled = errors.New("onceq: job cancelled")

	// ErrNotFound: no such job, key or effect.
	ErrNotFound = errors.New("onceq: not found")

	// ErrOwnKey: a handler enqueued a job with the key of its own job, which is still taken. To run the same job again
	// later, return Reschedule.
	ErrOwnKey = errors.New("onceq: a handler cannot enqueue its own job's key, which is taken until it finishes; return onceq.Reschedule(delay) to run this job again")

	// ErrKeyUnsettled: a key was neither free nor readable in ten tries in a row. Either it is taken and freed very often,
	// or row security hides its row from this role.
	ErrKeyUnsettled = table.ErrKeyUnsettled

	// ErrNameUsed: Once or Sleep was called twice with the same name in one run, or Await again after its time-out, and the second call did nothing.
	ErrNameUsed = errors.New("onceq: name used twice in one run")

	// ErrDuplicate matches every *DuplicateError.
	ErrDuplicate = errors.New("onceq: duplicate key")

	// ErrMismatch matches every *MismatchError.
	ErrMismatch = errors.New("onceq: key taken by another kind or with another payload")

	// ErrInFlight matches every *InFlightError.
	ErrInFlight = errors.New("onceq: in flight")

	// ErrUncertain matches every *UncertainError.
	ErrUncertain = errors.New("onceq: outcome uncertain")

	// ErrHeld matches every *HeldError.
	ErrHeld = errors.New("onceq: held for a person")
)

// ErrIDTaken: the sequence of ids returned one that a live job already has. This can happen after a restore, or on a
// logical replica, when the sequence's value was not copied; a crash or a failover by physical replication cannot cause it.
// The caller's transaction is aborted. Set the sequence past all ids in use, with the name of your schema instead of onceq:
//
//	select setval('onceq.ids', greatest((select max(id) from onceq.jobs), (select max(id) from onceq.job_waits), (select max(id) from onceq.job_history),
//	                                    (select max(token >> 20) from onceq.job_fences)))
//
// It does not repair itself, because ids of finished jobs, which cause no error, would be given out again too. A job with
// such an id replaces a completed job in the history. No Enqueue looks at the jobs that wait for their lane, their limit or others: if
// one of these has the id of a newer job, it waits until that one is gone. If the older job is dead, held or cancelled, the newer one can only
// complete, and then leaves no record; any other end is an ErrIDTaken too, and so is an effect (Once) that the older job has
// too, and a Move to a queue in which another job that had the id has an effect of the same name. The newer job then runs again until somebody has discarded the older one. That one can be redriven when the newer
// one is gone.
var ErrIDTaken = table.ErrIDTaken

// InvalidError says which input was refused before anything was sent to the database, and why.
type InvalidError struct {
	Field  string // by the caller's name for it: "Key", "Payload", "jobs[3].Queue"
	Reason string
}

func (e *InvalidError) Error() string { return "onceq: " + e.Field + " " + e.Reason }

func invalid(field, format string, args ...any) error {
	return &InvalidError{Field: field, Reason: fmt.Sprintf(format, args...)}
}

// SchemaError says that the tables are missing, too old for the code, or too new for it. Queue.Check and Worker.Run return it.
// The errors of other calls wrap one if the tables are missing: find it with errors.As.
type SchemaError struct {
	Schema      string
	Found, Want int // versions of the tables, and of those that the code was written for; Found is 0 if there are no tables
	Oldest      int // the lowest version of code that works with the tables
}

func (e *SchemaError) Error() string {
	switch {
	case e.Found == 0:
		return fmt.Sprintf("onceq: schema %q lacks tables of onceq; run migrations.Up(ctx, conn, %[1]q) or apply migrations.SQL with your own tool", e.Schema)
	case e.Found < e.Want:
		return fmt.Sprintf("onceq: schema %q is at version %d, this code needs %d; migrate the tables: run migrations.Up(ctx, conn, %q)", e.Schema, e.Found, oldestSchema, e.Schema)
	default:
		return fmt.Sprintf("onceq: schema %q is at version %d, which works with code of version %d and later, and this code is of version %d; deploy a newer onceq", e.Schema, e.Found, e.Oldest, e.Want)
	}
}

// DuplicateError is returned for a job with Strict set whose key is taken, and by Redrive. It says which job has the key.
// The caller's transaction stays usable. It matches ErrDuplicate.
type DuplicateError struct {
	Scope, Key string
	Existing   Result
}

func (e *DuplicateError) Error() string {
	return fmt.Sprintf("onceq: key %q in scope %q is taken by job %d (%s)", e.Key, e.Scope, e.Existing.ID, e.Existing.State)
}

// Is makes errors.Is(err, ErrDuplicate) true.
func (e *DuplicateError) Is(target error) bool { return target == ErrDuplicate }

// MismatchError says that a key is taken by different work: of another kind, or with another payload. Nothing was written
// and the caller's transaction stays usable. It matches ErrMismatch.
type MismatchError struct {
	Scope, Key string
	Existing   Result // the job that has the key; ID is 0 for a fence outside jobs

	Kind         string // of the job that was refused; empty for a fence outside jobs
	ExistingKind string // of the job that has the key

	// Differ lists up to ten members in which the payloads differ, as paths that Postgres can read too: $.lines[2].price.
	// It contains no values. It is empty if the kinds differ, or if the members are not known; Detail then says why.
	Differ []string
	Detail string // more about the difference; may be empty

	NotReplaced string // why Job.Replace changed nothing; empty if it was not set
}

func (e *MismatchError) Error() string {
	by := "before"
	if e.Existing.ID != 0 {
		by = fmt.Sprintf("by job %d of kind %q (%s)", e.Existing.ID, e.ExistingKind, e.Existing.State)
	}
	if e.Kind != e.ExistingKind {
		return fmt.Sprintf("onceq: key %q in scope %q was used %s, and this job is of kind %q; give each kind a scope or keys of its own", e.Key, e.Scope, by, e.Kind)
	}
	what := e.Detail
	if len(e.Differ) > 0 {
		if what = "they differ in " + strings.Join(e.Differ, ", "); e.Detail != "" {
			what += ", " + e.Detail
		}
	}
	advice := "use another key, or list in Fields the members that must be equal"
	if e.Existing.ID != 0 {
		advice += ", or set IgnorePayload if none must"
		switch {
		case e.NotReplaced != "":
			advice += "; Replace changed nothing, because " + e.NotReplaced
		case e.Existing.State == StateWaiting || e.Existing.State == StateDelayed:
			advice += ", or Replace to change a job that nobody has started, in the same lane and limit"
		}
	}
	return fmt.Sprintf("onceq: key %q in scope %q was used %s with another payload: %s; %s", e.Key, e.Scope, by, what, advice)
}

// Is makes errors.Is(err, ErrMismatch) true.
func (e *MismatchError) Is(target error) bool { return target == ErrMismatch }

// LeaseError says that an operation was refused because its lease is lost. It matches ErrLeaseLost.
type LeaseError struct {
	Op         string // "complete", "extend", "fail", …
	JobID      int64  // 0 for a fence outside jobs
	Token      int64
	Scope, Key string // of a fence outside jobs
	Effect     string // the name of a job's effect

	// Completed says that this lease had already completed the job. The job is completed, unless the transaction of that
	// completion was rolled back and somebody else has the job by now.
	Completed bool
}

func (e *LeaseError) Error() string {
	if e.Completed {
		return fmt.Sprintf("onceq: %s refused: job %d was already completed under token %d; complete a job only once (or that completion was rolled back, and the lease is lost)", e.Op, e.JobID, e.Token)
	}
	if e.Key != "" || e.Effect != "" {
		return fmt.Sprintf("onceq: %s refused: the lease of %s under token %d is lost", e.Op, fence.Named(e.Scope, e.Key, e.JobID, e.Effect), e.Token)
	}
	return fmt.Sprintf("onceq: %s refused: the lease of job %d under token %d is lost", e.Op, e.JobID, e.Token)
}

// Is makes errors.Is(err, ErrLeaseLost) true.
func (e *LeaseError) Is(target error) bool { return target == ErrLeaseLost }

// InFlightError says that somebody else is doing this work right now, or may still be doing it. Try again after RetryAfter.
// It matches ErrInFlight.
type InFlightError struct {
	Scope, Key string    // of a fence outside jobs
	JobID      int64     // of a job's effect
	Effect     string    // the name of that effect
	Until      time.Time // the holder's lease ends then, by the database's clock
	RetryAfter time.Duration

	// Detail says why the outcome of an earlier call is unknown, if that call has reported it and the policy is Ask: the
	// provider is asked after RetryAfter. Before that the call may still be under way, and a "no" would prove nothing.
	Detail string
}

func (e *InFlightError) Error() string {
	if e.Detail != "" {
		return fmt.Sprintf("onceq: %s: outcome unknown; the provider is asked in %s, when the earlier call can no longer be under way: %s",
			fence.Named(e.Scope, e.Key, e.JobID, e.Effect), e.RetryAfter.Round(100*time.Millisecond), e.Detail)
	}
	return fmt.Sprintf("onceq: %s is in flight; try again after %s", fence.Named(e.Scope, e.Key, e.JobID, e.Effect), e.RetryAfter)
}

// Is makes errors.Is(err, ErrInFlight) true.
func (e *InFlightError) Is(target error) bool { return target == ErrInFlight }

// UncertainError says that an effect may or may not have happened, and why. The policy decides what the next run does. It
// matches ErrUncertain and everything that Err matches.
type UncertainError struct {
	Scope, Key string // of a fence outside jobs
	JobID      int64  // of a job's effect
	Effect     string // the name of that effect
	Detail     string
	Err        error // what fn returned; nil if an earlier run left the outcome unknown
}

func (e *UncertainError) Error() string {
	return fmt.Sprintf("onceq: the outcome of %s is uncertain: %s", fence.Named(e.Scope, e.Key, e.JobID, e.Effect), e.Detail)
}

// Is makes errors.Is(err, ErrUncertain) true.
func (e *UncertainError) Is(target error) bool { return target == ErrUncertain }

// Unwrap returns the cause.
func (e *UncertainError) Unwrap() error { return e.Err }

// HeldError says that an uncertain effect waits for a person: see Ops.Resolve. A handler should return it unchanged; the
// job then waits in the history as StateHeld. It matches ErrHeld.
type HeldError struct {
	Scope, Key string // of a fence outside jobs
	JobID      int64  // of a job's effect
	Effect     string // the name of that effect
	Detail     string
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("onceq: %s is held until somebody resolves it: %s", fence.Named(e.Scope, e.Key, e.JobID, e.Effect), e.Detail)
}

// Is makes errors.Is(err, ErrHeld) true.
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// IsRetryable reports whether err means that Postgres wants the whole transaction run again: a serialization failure
// (40001) or a deadlock (40P01). It understands the errors of any driver that gives their SQLSTATE, as pgx and lib/pq do,
// such as the one that Commit of your own *sql.Tx returns.
func IsRetryable(err error) bool { return sqlstate.Retryable(err) }

// tablesMissing is a SchemaError for the text of another error, with that of Postgres, which names the table.
type tablesMissing struct {
	schema *SchemaError
	err    error
}

func (e *tablesMissing) Error() string {
	return fmt.Sprintf("schema %q lacks a table (%v); if it has none, run migrations.Up(ctx, conn, %[1]q), else restore the table", e.schema.Schema, e.err)
}

func (e *tablesMissing) Unwrap() []error { return []error{e.schema, e.err} }

// noDB is errNoDB for the text of another error.
type noDB struct{}

func (noDB) Error() string { return strings.TrimPrefix(errNoDB.Error(), "onceq: ") }
func (noDB) Unwrap() error { return errNoDB }

// PanicError is the error of an attempt whose handler panicked. It records the panic's value and the stack.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v\n\n%s", e.Value, e.Stack) }

// Unwrap returns the panic's value if that is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// decodeError is an error of encoding/json whose text says where decoding failed but not at which value: values stay out of
// logs and of the job's recorded errors. errors.As finds the original error.
type decodeError struct{ err error }

func (e *decodeError) Unwrap() error { return e.err }

func (e *decodeError) Error() string {
	var wrong *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	switch {
	case errors.As(e.err, &wrong):
		value, _, _ := strings.Cut(wrong.Value, " ") // "number 300"
		if wrong.Field == "" {
			return fmt.Sprintf("%s does not fit into %s", value, wrong.Type)
		}
		return fmt.Sprintf("%s in field %s does not fit into %s", value, wrong.Field, wrong.Type)
	case errors.As(e.err, &syntax):
		return fmt.Sprintf("malformed at byte %d", syntax.Offset)
	}
	if field, unknown := strings.CutPrefix(e.err.Error(), "json: unknown field "); unknown {
		return fmt.Sprintf("it has the field %s, which the type does not have (Kind.RefuseUnknownFields); run a worker that knows the field", field)
	}
	return fmt.Sprintf("refused by a type's own decoding (%T)", e.err)
}

// means turns an error of Postgres into a *SchemaError if the tables are missing, and into an ErrIDTaken if another job with
// the same id is in the way.
func means(schema string, err error) error {
	var known *SchemaError
	if errors.Is(err, pg.ErrNoDB) {
		return noDB{}
	}
	var pgErr *pgconn.PgError
	isTaken := errors.As(err, &pgErr) && (pgErr.Code == "OQ002" || pg.SameID(pgErr))
	if isTaken && !errors.Is(err, ErrIDTaken) {
		return fmt.Errorf("%w (%w)", ErrIDTaken, err)
	}
	if !sqlstate.NoTables(err) || errors.As(err, &known) {
		return err
	}
	return &tablesMissing{&SchemaError{Schema: schema, Want: SchemaVersion}, err}
}
