package onceq

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/fence"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// Policy decides what happens to work whose outcome is unknown: its process crashed or lost the database after the intent
// was recorded, or fn returned an error that is not NotApplied. The zero Policy is RunAgain(24 * time.Hour).
type Policy struct {
	again time.Duration
	hold  bool
	mute  bool // Ask without a function
	ask   func(ctx context.Context, key string) (result any, applied bool, err error)
}

func (p Policy) within() time.Duration {
	if p.again == 0 {
		return 24 * time.Hour
	}
	return p.again
}

// runsAgain is within for a policy that runs again at all, otherwise 0.
func (p Policy) runsAgain() time.Duration {
	if p.hold || p.ask != nil {
		return 0
	}
	return p.within()
}

// facts is what the policy says of work whose outcome is unknown.
func (p Policy) facts() fence.Policy {
	return fence.Policy{Ask: p.ask != nil, Hold: p.hold, Again: p.within()}
}

// RunAgain runs the work again under the same IdempotencyKey, for providers that deduplicate, until within has passed since
// the first intent. within should be shorter than the time for which the provider remembers keys; use Forever if it never
// forgets. After that the work is held. It is also held if the first intent lies more than a minute ahead, because the
// database's clock was set back since: how old it is, is not known then. A within that is not positive is Hold.
func RunAgain(within time.Duration) Policy { return Policy{again: within, hold: within <= 0} }

// Ask asks the provider whether the work under the IdempotencyKey was done. If it was (applied), result is stored and
// replayed; if not, the work runs; an error leaves it uncertain. The provider is not asked before the lease of the earlier
// run has ended and 5 s more have passed, because the earlier request may still be under way; until then the work counts as
// in flight (*InFlightError). In Once that is EffectTimeout and 10 s after the effect began, so 40 s by default, even if fn
// returned an error at once. With a shorter EffectTimeout the provider is asked sooner. If ask is nil, every function that
// gets the policy returns an *InvalidError.
func Ask(ask func(ctx context.Context, key string) (result any, applied bool, err error)) Policy {
	return Policy{ask: ask, mute: ask == nil}
}

func (p Policy) check() error {
	if p.mute {
		return invalid("Policy", "is Ask without a function, so nobody can be asked; use Hold to leave the decision to a person")
	}
	return nil
}

// Hold leaves the decision to a person: see Ops.Resolve and Fence.Resolve. It is for effects whose provider neither
// deduplicates nor can be asked.
func Hold() Policy { return Policy{hold: true} }

type notApplied struct{ err error }

func (e *notApplied) Error() string { return e.err.Error() }

func (e *notApplied) Unwrap() error { return e.err }

// NotApplied marks the error of an effect that certainly did not happen: the connection was refused, or the provider
// rejected the request. The effect is then free to run again. The mark is found when the error is wrapped. If an error
// wraps several, as errors.Join does, each of them must be marked. The mark counts for the Once or Do whose fn returns the
// error, but not for one around that: the outer fn must say for itself what else it did. A nil err gives nil.
func NotApplied(err error) error {
	if err == nil {
		return nil
	}
	return &notApplied{err}
}

// settled is an error that was NotApplied for the fn that returned it. It says nothing to a fn around that one.
type settled struct{ err error }

func (e *settled) Error() string { return e.err.Error() }

func (e *settled) Unwrap() error { return e.err }

// saysNotApplied reports whether everything in err says that nothing was applied. Marks behind an *UncertainError belong to
// an inner Once, or to a question about an earlier run.
func saysNotApplied(err error) bool {
	switch e := err.(type) {
	case *notApplied:
		return true
	case *settled, *UncertainError:
		return false
	case interface{ Unwrap() error }:
		return saysNotApplied(e.Unwrap())
	case interface{ Unwrap() []error }:
		all := e.Unwrap()
		return len(all) > 0 && !slices.ContainsFunc(all, func(err error) bool { return !saysNotApplied(err) })
	}
	return false
}

// Resolution is a person's decision about work whose outcome is unknown: Applied, NeverApplied or AskAgain.
type Resolution struct {
	state  table.FenceState
	result any
}

// Applied says that the work was done: result is stored and replayed. A nil result is stored as null. Outside jobs the key stays
// taken from then on for its window, and for at least DefaultWindow, also if that was UntilFinished: otherwise the next caller
// would do again what was done.
func Applied(result any) Resolution { return Resolution{table.FenceCompleted, result} }

// NeverApplied says that the work was not done: it may run again.
func NeverApplied() Resolution { return Resolution{state: table.FenceCancelled} }

// AskAgain leaves the outcome unknown and lets the policy decide once more: under Ask the next run asks the provider, under
// RunAgain it repeats the work if the time that the policy allows has not passed. Otherwise the work is held again. Use it
// after a deploy that gave the kind another policy, or once the provider answers again.
func AskAgain() Resolution { return Resolution{state: table.FenceUncertain} }

func (r Resolution) encode() (string, error) {
	switch r.state {
	case table.FenceCancelled, table.FenceUncertain:
		return "", nil
	case table.FenceCompleted:
		return encodeResult(r.result)
	}
	return "", invalid("Resolution", "is empty; use Applied, NeverApplied or AskAgain")
}

func (f *Fence) resolve(ctx context.Context, db DB, r Resolution) error {
	raw, err := r.encode()
	if err != nil {
		return err
	}
	settled, err := f.f.Resolve(ctx, db, r.state, raw, DefaultWindow)
	if err == nil && !settled {
		err = fmt.Errorf("%w: %s is not uncertain or held", ErrNotFound, f)
	}
	return err
}

// Resolve settles the fence if it is uncertain or held, or if its lease has run out, inside db; a nil db is the pool. If
// there is nothing to resolve, the error is ErrNotFound.
func (f *Fence) Resolve(ctx context.Context, db DB, r Resolution) error {
	if db == nil {
		db = f.f.DB
	}
	return f.resolve(ctx, db, r)
}

// unhold runs jobs again that were written just now as held, if none of their effects is held any more.
func (q *Queue) unhold(ctx context.Context, db DB, ids []int64) {
	if len(ids) == 0 {
		return
	}
	q.held.Add(ids)
	for _, id := range ids {
		if err := q.held.Look(id, unholdOne(ctx, q, db)); err != nil {
			q.log.WarnContext(ctx, "onceq: it is not known whether somebody has settled the effects of a job that is held now; a worker looks again within a minute", "job", id, "error", err)
		}
	}
}

// unholdOne runs a held job again if none of its effects is held. One that somebody has locked waits for the next look.
func unholdOne(ctx context.Context, q *Queue, db DB) func(id int64) (decided bool, err error) {
	return func(id int64) (decided bool, err error) {
		ids, states := []int64{id}, []int16{int16(StateHeld)}
		r, err := finish.Redrive(ctx, q.store, db, pg.Brief, ids, states, DefaultWindow.Milliseconds(), map[int64]bool{})
		if pg.LockedOut(err) || err == nil && len(r.Held) > 0 {
			return false, nil
		}
		return err == nil, err
	}
}
