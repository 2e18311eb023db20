package onceq

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
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

// clockStep is how far a database's clock may be set back, by NTP or a failover, before the ages of what it dated count as unknown.
const clockStep = time.Minute

// stillRuns reports whether work that was first claimed at since may run again now. If since lies ahead, the clock was wrong then,
// and how long ago that was is not known.
func (p Policy) stillRuns(since, now time.Time) bool {
	age := now.Sub(since)
	return p.within() == Forever || age > -clockStep && age < p.within()
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

// remember notes that somebody has asked for a client's key and was told that its outcome is unknown, so that a client that
// keeps asking never finds the key new. Once a day is enough (table.NotedEvery). It returns what was told.
func (f *Fence) remember(ctx context.Context, db DB, r fenceRow, told error) error {
	if f.class != ClassRequest || r.now.Sub(r.until) < table.NotedEvery {
		return told
	}
	var token int64
	args := []any{int16(f.class), f.scope, f.key, r.token}
	err := f.q.store.Send(ctx, db, pg.ForCaller, stmt.KeepDoubt, args, pg.Row(&token))
	if err != nil && !errors.Is(err, pgx.ErrNoRows) { // decided in between
		return fmt.Errorf("onceq: keeping key %q: %w", f.key, err)
	}
	return told
}

const (
	// From the end of fn's context to that of its fence's lease, and from there to asking the provider.
	effectGrace = 5 * time.Second

	maxRetryAfter = 500 * time.Millisecond // for a fence outside jobs: its work may end at any time
)

// doubt is what to do with a fence that is not simply taken.
type doubt int

const (
	none    doubt = iota // free: take it
	strange              // of another job, or of an earlier round: take it, unless that job may run again
	running              // uncertain: take it over, to run again or to ask the provider
	holding              // uncertain: a person decides
)

// judge decides from a taken fence's row: it fills in a replay in c, returns an error, or says what to do.
func (f *Fence) judge(ctx context.Context, c *FenceLease, r fenceRow, asking bool) (doubt, error) {
	switch alive := r.state == table.FenceClaimed && r.until.After(r.now); {
	case f.job != nil && len(r.fingerprint) > 0 && !bytes.Equal(r.fingerprint, f.fingerprint):
		return strange, nil
	case r.free || r.state == table.FenceCancelled: // released; the statement that read it may have begun before that
		return none, nil
	case f.job == nil && !fingerprint.SamePayload(r.fingerprint, f.fingerprint):
		live := int16(StateRunning)
		err := &MismatchError{
			Scope: f.scope, Key: f.key, Existing: Result{Duplicate: true, State: State(r.state.Job(&live))},
			Detail: "only a fingerprint of the first payload is stored, so what differs is not known",
		}
		f.emit(ctx, EventMismatch, r.token, err)
		return none, err
	case r.state == table.FenceCompleted:
		c.Token, c.Since, c.identity, c.Replayed, c.broken = r.token, r.since, r.identity, true, r.detail
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
		return none, f.inFlight(r, min(rest, soon))
	case r.state == table.FenceHeld:
		return none, f.held(r.detail)
	}
	return f.judgeDoubt(r, asking)
}

// inFlight says that a fence's work is under way, and when to ask again.
func (f *Fence) inFlight(r fenceRow, rest time.Duration) *InFlightError {
	e := &InFlightError{Until: r.until, RetryAfter: max(0, rest)}
	e.Scope, e.Key, e.JobID, e.Effect = f.subject()
	return e
}

// judgeDoubt is judge for a fence whose outcome is unknown: the policy decides.
func (f *Fence) judgeDoubt(r fenceRow, asking bool) (doubt, error) {
	switch p := f.policy; {
	case p.ask != nil && !asking:
		return none, f.uncertain(r.detail, nil)
	case p.ask != nil:
		// The request of an earlier claim may still be under way: a "no" would prove nothing yet.
		if rest := r.until.Add(effectGrace).Sub(r.now); rest > 0 {
			e := f.inFlight(r, rest)
			if r.state == table.FenceUncertain {
				e.Detail = r.detail
			}
			return none, e
		}
		return running, nil
	case p.hold || !p.stillRuns(r.since, r.now):
		return holding, nil
	}
	return running, nil
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
	var settled bool
	args := []any{int16(f.class), f.scope, f.key, int16(r.state), raw, DefaultWindow.Milliseconds()}
	err = f.q.store.Send(ctx, db, pg.ForCaller, stmt.ResolveFence, args, pg.Row(&settled))
	switch {
	case err != nil:
		return fmt.Errorf("onceq: resolving %s: %w", f, err)
	case !settled:
		return fmt.Errorf("%w: %s is not uncertain or held", ErrNotFound, f)
	}
	return nil
}

// Resolve settles the fence if it is uncertain or held, or if its lease has run out, inside db; a nil db is the pool. If
// there is nothing to resolve, the error is ErrNotFound.
func (f *Fence) Resolve(ctx context.Context, db DB, r Resolution) error {
	if db == nil {
		db = f.db
	}
	return f.resolve(ctx, db, r)
}

// heldLately are jobs that this process has written as held. An effect is held, and reported, before its
// handler ends, so somebody may have settled it when the job was not held yet, or settle it in a transaction
// that is open now. So the process looks at once whether one of its effects is still held, and then once a
// minute for ten minutes.
type heldLately struct {
	mu    sync.Mutex
	until map[int64]time.Time
}

// unhold runs jobs again that were written just now as held, if none of their effects is held any more.
func (q *Queue) unhold(ctx context.Context, db DB, ids []int64) {
	if len(ids) == 0 {
		return
	}
	now := time.Now()
	h := &q.held
	h.mu.Lock()
	maps.DeleteFunc(h.until, func(_ int64, until time.Time) bool { return now.After(until) })
	for _, id := range ids {
		if h.until == nil {
			h.until = make(map[int64]time.Time)
		}
		if len(h.until) < table.Remembered {
			h.until[id] = now.Add(10 * time.Minute)
		}
	}
	h.mu.Unlock()
	for _, id := range ids {
		if err := unholdOne(ctx, q, db, id); err != nil {
			q.log.WarnContext(ctx, "onceq: it is not known whether somebody has settled the effects of a job that is held now; a worker looks again within a minute", "job", id, "error", err)
		}
	}
}

// unholdAll looks again at the jobs that this process has written as held.
func unholdAll(ctx context.Context, q *Queue, db DB) (failed error) {
	h := &q.held
	h.mu.Lock()
	looked := maps.Clone(h.until)
	h.mu.Unlock()
	for id, until := range looked {
		if time.Now().Before(until) {
			if err := unholdOne(ctx, q, db, id); err != nil {
				failed = err
			}
		}
	}
	return failed
}

// unholdOne runs a held job again if none of its effects is held. One that somebody has locked waits for the next look.
func unholdOne(ctx context.Context, q *Queue, db DB, id int64) error {
	h := &q.held
	h.mu.Lock()
	looked := h.until[id]
	h.mu.Unlock()
	r, err := q.redriveBy(ctx, db, pg.Brief, []int64{id}, []int16{int16(StateHeld)}, map[int64]bool{})
	if pg.LockedOut(err) || err == nil && len(r.Held) > 0 {
		return nil
	}
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.until[id].Equal(looked) { // else it ran and was held again since
		delete(h.until, id)
	}
	return nil
}
