package onceq

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// DefaultLease is how long a lease lasts without an extension.
const DefaultLease = 30 * time.Second

// DefaultMaxLost is how many leases of one job may run out until the job is dead.
const DefaultMaxLost = 5

const maxMaxLost = math.MaxInt16 // the largest number that the column holds

// Lease is the right to work on a job until a time, under a token. A worker passes one to its handler; Queue.Claim returns
// leases to code that drives the loop itself. The fields are as they were at the moment of the claim; do not change them.
type Lease struct {
	ID          int64
	Token       int64 // fencing token: grows with each claim of this work; pass it to systems that compare it
	Kind        string
	Queue       string
	Scope, Key  string          // empty for a job without a key
	Lane        string          // family/name; empty for a job without a lane
	Limit       string          // empty for a job without a limit
	Weight      int             // how often it counts in its limit; 0 without one
	Payload     json.RawMessage // nil if the payload is bytes
	Bytes       []byte          // nil if the payload is JSON
	Metadata    map[string]string
	Priority    Priority
	Attempt     int // 1 for the first; counts failures, not lost leases
	MaxAttempts int
	Lost        int       // leases of this job that ran out before this one, as Kind.MaxLost counts them
	RunAt       time.Time // when the job was due; of one that waited for its lane, its limit or other jobs: when it was let in
	CreatedAt   time.Time
	Until       time.Time // end of the lease as claimed, by the database's clock

	hold hold.Hold
	origin
	flow
}

// origin is where the lease comes from, and whose it is.
type origin struct {
	q        *Queue
	db       DB        // for statements of the library's own, never the handler's transaction
	h        *Handler  // from when a worker gets the lease; nil outside a worker
	identity int64     // see effectMark
	due      time.Time // when the job was due that was let in at RunAt; zero for one that waited for nothing but its time
}

// flow is how Await, Sleep and Once go on in each run of the handler.
type flow struct {
	calls   atomic.Uint32        // how often the handler was called. For Once each call is a run of its own
	stopped atomic.Pointer[stop] // the latest

	mu      sync.Mutex         // guards effects
	effects map[effectRun]bool // true when done, false while under way
}

// stop is an Await or a Sleep that has returned an error which the handler is to return.
type stop struct {
	call  uint32 // of the handler
	waits finish.Wait
}

// timeoutFor is how long the handler may run: as its job says, or its kind; 0 for as long as it likes.
func (l *Lease) timeoutFor(kind time.Duration) time.Duration {
	switch own := ownTimeout(l.Metadata[table.TimeoutMember]); own {
	case 0:
		return kind
	case NoTimeout:
		return 0
	default:
		return own
	}
}

// leaseOf returns the lease that has h.
func leaseOf(h *hold.Hold) *Lease { return h.Lease.(*Lease) }

func leasesOf(holds []*hold.Hold) []*Lease {
	leases := make([]*Lease, len(holds))
	for i, h := range holds {
		leases[i] = leaseOf(h)
	}
	return leases
}

// LeaseFromContext returns the lease of the handler that ctx belongs to, or nil. It is nil for a batch of several jobs too.
func LeaseFromContext(ctx context.Context) *Lease {
	if holds := hold.From(ctx); len(holds) == 1 {
		return leaseOf(holds[0])
	}
	return nil
}

func (l *Lease) event(t EventType) Event {
	return Event{Type: t, Queue: l.Queue, Kind: l.Kind, JobID: l.ID, Scope: l.Scope, Key: l.Key, Token: l.Token, Attempt: l.Attempt}
}

func (l *Lease) lostError(op string) *LeaseError {
	return &LeaseError{Op: op, JobID: l.ID, Token: l.Token}
}

// Extend makes the lease last for at least d from now, a millisecond to a week, by the database's clock. If the lease is lost, the error is a
// *LeaseError; if somebody wants the job cancelled, it is ErrCancelled. In a worker the leases of all handlers are extended
// automatically, and a lease that lasts longer is left alone. While a transaction on another connection has the job's row
// locked (usually a handler's own), there is nothing to extend and nobody else can claim the job: that is not an error.
func (l *Lease) Extend(ctx context.Context, d time.Duration) error {
	if err := checkLease("Extend", d, time.Millisecond); err != nil {
		return err
	}
	beats, err := hold.Extend(ctx, l.q.store, l.db, []*hold.Hold{&l.hold}, []bool{true}, d)
	if err != nil {
		return err
	}
	switch {
	case beats[0].Lost:
		e := l.event(EventLeaseLost)
		e.Err = l.lostError("extend")
		l.q.emit(ctx, e)
		return e.Err
	case beats[0].Cancelled:
		return ErrCancelled
	}
	return nil
}

// Now returns the database's time, which decides when a job is due and which is stored. Handlers that compare times should
// use it instead of time.Now, which is this machine's.
func (l *Lease) Now(ctx context.Context) (now time.Time, err error) {
	err = l.q.store.QueryRow(ctx, l.db, table.AskTime, nil, &now)
	return now, err
}

// Lock keeps the job for db, a transaction of the handler's own, until that transaction ends: nobody else can claim the
// job, even if the lease expires, and no extension of the lease changes its row. If the lease is lost, the statement raises
// an error, so that nothing of the transaction is committed, and Lock returns a *LeaseError. Call Lock first in a
// transaction at repeatable read or serializable that ends with Complete and may take longer than a third of the lease.
//
// In a worker the server ends the transaction when it has idled for longer than the job's Timeout, so that a
// process that freezes does not keep the job. HandleTx and HandleBatch lock the job themselves; there Lock returns an error.
func (l *Lease) Lock(ctx context.Context, db DB) error {
	if l.hold.InTx {
		return errInTx
	}
	errNoTx := invalid("Lock", "needs a transaction, in which the job stays locked")
	if db == nil {
		return errNoTx
	}
	switch begin, err := pg.Opener(ctx, db); {
	case err != nil:
		return err
	case begin != nil:
		return errNoTx
	}
	idle := lazytx.IdleLimit(l.hold.Timeout)
	var err error
	if l.q.store.Citus.Load() == pg.CitusYes { // it is the coordinator that is to end the connection
		err = l.q.store.Send(ctx, db, pg.AsIs, stmt.OpenApart, []any{idle}, pg.NoRows)
		idle = ""
	}
	if err == nil {
		err = l.q.store.Send(ctx, db, pg.AsIs, stmt.LockJob, []any{idle, l.ID, l.hold.Claims, l.hold.Holder}, pg.NoRows)
	}
	switch {
	case err == nil:
		return nil
	case sqlstate.LeaseLost(err):
		e := l.event(EventLeaseLost)
		e.Err = l.lostError("lock")
		l.q.emit(ctx, e)
		return e.Err
	}
	l.conflicted(ctx, err)
	return fmt.Errorf("onceq: lock: %w", l.q.store.Told(err))
}

// conflicted is called with the error of a statement of this lease in the handler's own transaction. If Postgres wants that
// transaction run again, the cause is usually that a beat changed the job's row after the transaction's snapshot, and it
// would be the same the next time. So the lease is now made to last long enough that no beat touches it in the next run.
func (l *Lease) conflicted(ctx context.Context, err error) {
	if l.hold.Beats == 0 || !IsRetryable(err) {
		return
	}
	l.hold.Conflict.Store(true)
	l.q.log.WarnContext(ctx, "onceq: Postgres wants a handler's own transaction run again; if that is repeatable read or serializable and takes longer "+
		"than a third of the lease, call Lease.Lock(ctx, tx) first in it", slog.Int64("job", l.ID), slog.String("kind", l.Kind), slog.Any("error", err))
	l.hold.Lengthen(ctx, l.q.store, l.db, time.Since(l.hold.Began))
}

// Progress is how far a handler says that it has come.
type Progress struct {
	Done  int64     `json:"done"`
	Total int64     `json:"total,omitzero"` // 0 if it is not known
	Note  string    `json:"note,omitzero"`
	At    time.Time `json:"at"` // when the handler said so, by the database's clock
}

// MaxProgressBytes is how long the note of Lease.Progress may be.
const MaxProgressBytes = 1000

// Progress says how far the job has come, for people who look at it (JobInfo.Progress). It sends nothing by itself: the next
// beat writes the latest report, a third of WorkerConfig.Lease after the one before, and so does Extend. So it may be called
// for every row of a file. A job that ends before its first beat leaves none. What an earlier run reported is shown until the
// job is claimed again, or until it waits in line for its lane or its limit, as after an Await.
//
// A total of 0 means that it is not known. In HandleTx and HandleBatch it returns an error, because nobody can change the
// job's row while their transaction is open.
func (l *Lease) Progress(done, total int64, note string) error {
	switch {
	case l.hold.InTx:
		return invalid("Progress", "is not possible in HandleTx and HandleBatch, whose transaction has the job's row locked; use Handle")
	case done < 0 || total < 0:
		return invalid("Progress", "is %d of %d; neither may be negative", done, total)
	case len(note) > MaxProgressBytes:
		return invalid("note", "has %d bytes; at most %d", len(note), MaxProgressBytes)
	}
	if err := checkText("note", note); err != nil {
		return err
	}
	l.hold.Report(hold.Progress{Done: done, Total: total, Note: note})
	return nil
}

// noted fills in what the column says of the job's latest run.
func (i *JobInfo) noted(text *string) error {
	if text == nil {
		return nil
	}
	var n hold.Note
	if err := json.Unmarshal([]byte(*text), &n); err != nil {
		return err
	}
	if int(n.Claims) == i.Claims {
		if i.since = n.Since; n.Progress != nil && !n.Progress.At.IsZero() {
			i.Progress = (*Progress)(n.Progress)
		}
	}
	return nil
}

// alone is for statements that do not depend on the handler's transaction.
func (l *Lease) alone() pg.ForEffects { return pg.ForEffects{Pool: l.q.store.Pool, DB: l.db} }
