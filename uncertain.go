package onceq

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
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

// RunAgain runs the work again under the same IdempotencyKey, for providers that deduplicate, until within has passed since
// the first intent. within should be shorter than the time for which the provider remembers keys; use Forever if it never
// forgets. After that the work is held. A within that is not positive is Hold.
func RunAgain(within time.Duration) Policy { return Policy{again: within, hold: within <= 0} }

// Ask asks the provider whether the work under the IdempotencyKey was done. If it was (applied), result is stored and
// replayed; if not, the work runs; an error leaves it uncertain. The provider is not asked before the lease of the earlier
// run has ended and 5 s more have passed, because the earlier request may still be under way; until then the work counts as
// in flight (*InFlightError). In Once that is EffectTimeout and 10 s after the effect began, so 40 s by default, also if fn
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

// Hold leaves the decision to a person: see Queue.Resolve and Fence.Resolve. It is for effects whose provider neither
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

// inDoubt says that the outcome of the fence f is unknown and not yet decided.
const inDoubt = `(f.state = ` + sqlUncertain + ` or f.state = ` + sqlClaimed + ` and f.leased_until <= statement_timestamp())`

// unknownFor is how long a client's key of unknown outcome stays if nobody asks for it.
const unknownFor = 30 * 24 * time.Hour

const keepDoubt = `
update onceq.job_fences f set leased_until = statement_timestamp()
 where f.class = $1::smallint and f.scope = $2::text and f.key = $3::text and f.token = $4::bigint
   and ` + fenceUnknown + ` and f.leased_until < statement_timestamp()
returning f.token`

// remember notes that somebody has asked for a client's key and was told that its outcome is unknown, so that a client that
// keeps asking never finds the key new. Once a day is enough. It returns what was told.
func (f *Fence) remember(ctx context.Context, db DB, r fenceRow, told error) error {
	if f.class != ClassRequest || r.now.Sub(r.until) < 24*time.Hour {
		return told
	}
	var token int64
	err := f.q.guarded(ctx, db, keepDoubt, []any{int16(f.class), f.scope, f.key, r.token}, &token)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) { // decided in between
		return fmt.Errorf("onceq: keeping key %q: %w", f.key, err)
	}
	return told
}

// doubt is what to do with a fence that is not simply taken.
type doubt int

const (
	none    doubt = iota // free: take it
	strange              // of another job, or of an earlier round: take it
	running              // uncertain: take it over, to run again or to ask the provider
	holding              // uncertain: a person decides
)

// judge decides from a taken fence's row: it fills in a replay in c, returns an error, or says what to do.
func (f *Fence) judge(ctx context.Context, c *FenceLease, r fenceRow, asking bool) (doubt, error) {
	alive := r.state == fenceClaimed && r.until.After(r.now)
	inFlight := func(rest time.Duration) *InFlightError {
		e := &InFlightError{Until: r.until, RetryAfter: max(0, rest)}
		e.Scope, e.Key, e.JobID, e.Effect = f.subject()
		return e
	}
	switch {
	case f.job != nil && len(r.fingerprint) > 0 && !bytes.Equal(r.fingerprint, f.fingerprint):
		return strange, nil
	case r.free || r.state == fenceCancelled: // released; the statement that read it may have begun before that
		return none, nil
	case f.job == nil && !samePayload(r.fingerprint, f.fingerprint):
		live := int16(StateRunning)
		err := &MismatchError{
			Scope: f.scope, Key: f.key, Existing: Result{Duplicate: true, State: r.state.job(&live)},
			Detail: "only a fingerprint of the first payload is stored, so what differs is not known",
		}
		f.emit(ctx, EventMismatch, r.token, err)
		return none, err
	case r.state == fenceCompleted:
		c.Token, c.Since, c.Replayed, c.broken = r.token, r.since, true, r.detail
		if r.result != "" {
			c.Result = json.RawMessage(r.result)
		}
		f.emit(ctx, EventReplayed, r.token, nil)
		return none, nil
	case alive:
		rest := r.until.Sub(r.now)
		soon := maxRetryAfter
		if f.job != nil { // each try of a waiting job costs a claim, so it waits for half of what is left
			soon = max(soon, rest/2)
		}
		return none, inFlight(min(rest, soon))
	case r.state == fenceHeld:
		return none, f.held(r.detail)
	}
	switch p := f.policy; {
	case p.ask != nil && !asking:
		return none, f.uncertain(r.detail, nil)
	case p.ask != nil:
		// The request of an earlier claim may still be under way: a "no" would prove nothing yet.
		if rest := r.until.Add(effectGrace).Sub(r.now); rest > 0 {
			e := inFlight(rest)
			if r.state == fenceUncertain {
				e.Detail = r.detail
			}
			return none, e
		}
		return running, nil
	case p.hold || r.now.Sub(r.since) >= p.within():
		return holding, nil
	}
	return running, nil
}
