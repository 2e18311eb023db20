// Package hold is how a process has a job: the guard of its lease, which every statement on the job's behalf
// compares, and what has become of the job while its handler runs. What runs, extends and ends jobs knows
// them as Holds. Handlers get the public Lease, which has one.
package hold

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
)

// Hold is one lease of one job.
type Hold struct {
	// As a claim writes them.
	ID, Token   int64
	Claims      int32
	Holder      int64
	Kind, Queue string
	Keyed       bool // the job has a key
	Lane, Limit string
	Weight      int       // how often the job counts in its limit
	Lost        int       // leases of the job that ran out before this one
	Member      bool      // another job waits for this one: its end must be told
	Cancelled   bool      // somebody asked for that before this claim
	Claimed     time.Time // when, by the database's clock
	TooMany     int64     // bytes of a payload that was not kept: the job is given back
	Slot        time.Time // when the rate of its limit lets it start, by this process's clock; zero without a rate

	// What a worker decides before it calls the handler.
	Began   time.Time     // of the claim, in a worker of the handler's call, by this process's clock
	Waited  time.Duration // how long the job had been due at the claim, by the database's clock; negative: not known
	Keep    int64         // milliseconds in history; 0: not at all, -1: until somebody decides
	InTx    bool          // the handler runs in a transaction that the worker ends
	Beats   time.Duration // how long a worker's beats extend the lease for; else 0, and for a batch
	Timeout time.Duration // of the job, or of its kind; 0 for none, and outside a worker

	// What has become of the job while its handler runs.
	Result  string       // encoded; "" for none. It is cleared before a run in a transaction
	Heavier atomic.Int64 // how much more than it was said to weigh the job weighed: see Lease.SetWeight

	progress atomic.Pointer[report] // the handler's latest report
	noted    atomic.Bool            // a beat has written when the run began

	ByHandler atomic.Bool // completed through Complete or CompleteInBatch, if that commits
	Accepted  atomic.Bool // the statement of one of these ran and was not refused
	Conflict  atomic.Bool // Postgres wants a transaction run again that contains Complete, CompleteInBatch or Lock

	Lease any // the *onceq.Lease that has this Hold
}

// Key is how the context of a handler gives its holds.
type Key struct{}

// From returns the holds of the handler that ctx belongs to.
func From(ctx context.Context) []*Hold {
	holds, _ := ctx.Value(Key{}).([]*Hold)
	return holds
}

// Lined reports whether the job has a lane or a limit.
func (h *Hold) Lined() bool { return h.Lane != "" || h.Limit != "" }

// Slotted reports whether the job must start at its slot.
func (h *Hold) Slotted() bool { return !h.Slot.IsZero() }

// Plain reports whether a completion concerns the job and its key alone: it is kept for no time, nobody waits
// for it, and it has no lane and no limit.
func (h *Hold) Plain(keep int64) bool { return keep == 0 && !h.Member && !h.Lined() }

// StartOver forgets what a run did that was rolled back.
func (h *Hold) StartOver() {
	h.Result = ""
	h.Conflict.Store(false)
	h.ByHandler.Store(false)
	h.Accepted.Store(false)
}

// NewHolder returns a random number for a claim. In a worker its upper half says which one has the job
// (workers.id), and the lower half differs from claim to claim. run is 0 outside a worker.
func NewHolder(run int64) int64 {
	if run == 0 {
		return rand.Int64()
	}
	return run&^math.MaxUint32 | int64(rand.Uint32())
}

// Guards gives the columns that every statement on behalf of a lease compares.
func Guards(holds []*Hold) (ids []int64, claims []int32, holders []int64) {
	ids, claims, holders = make([]int64, len(holds)), make([]int32, len(holds)), make([]int64, len(holds))
	for i, h := range holds {
		ids[i], claims[i], holders[i] = h.ID, h.Claims, h.Holder
	}
	return ids, claims, holders
}

// Lengthen makes the lease last so long that no beat extends it while the handler takes twice the time that
// it took. It reports whether the job still belongs to this lease and no transaction has its row locked.
func (h *Hold) Lengthen(ctx context.Context, store *pg.Store, db pg.DB, took time.Duration) (held bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pg.EndWithin)
	defer cancel()
	args := []any{h.ID, h.Claims, h.Holder, (h.Beats + 2*took).Microseconds()}
	err := store.Guarded(ctx, db, stmt.LengthenLease, args, &held)
	return err == nil && held
}

// Answer is what became of one lease in a beat. Neither extended nor lost means that the row is locked, or
// that the lease already lasts longer. Locked means alive: nobody can claim a row that its holder's
// transaction has locked.
type Answer struct{ Extended, Lost, Cancelled bool }

// Extend extends the leases, which the caller has sorted by id. running says which of their jobs are being
// worked on.
func Extend(ctx context.Context, store *pg.Store, db pg.DB, holds []*Hold, running []bool,
	d time.Duration) ([]Answer, error) {
	ids, claims, holders := Guards(holds)
	var notes []string
	reports := make([]*report, len(holds))
	for i, h := range holds {
		text, report := h.note()
		if text != "" && notes == nil {
			notes = make([]string, len(holds))
		}
		if text != "" {
			notes[i], reports[i] = text, report
		}
	}
	var extended, held, cancelled []int64
	args := []any{ids, claims, holders, d.Microseconds(), running, notes}
	err := store.Guarded(ctx, db, stmt.ExtendLeases, args, &extended, &held, &cancelled)
	if err != nil {
		return nil, fmt.Errorf("onceq: extend: %w", err)
	}
	answers := make([]Answer, len(holds))
	for i := range answers {
		answers[i].Lost = true
	}
	for _, n := range held {
		answers[n-1].Lost = false
	}
	for _, n := range extended {
		answers[n-1].Extended, answers[n-1].Lost = true, false
		if notes != nil && notes[n-1] != "" {
			holds[n-1].wrote(reports[n-1])
		}
	}
	for _, n := range cancelled {
		answers[n-1].Cancelled = true
	}
	return answers, nil
}
