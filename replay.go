package onceq

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/onceq/onceq/internal/fence"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// IdempotencyKey names the job's effect for systems outside the database that deduplicate. It is the same each time the job
// runs, even after a crash and after a redrive. After Reschedule, which asks for the effects to be done again, it is
// another one. It does not depend on the attempt. The job's id would not be enough: ids occur again in other installations,
// and after a crash recovery or failover that lost the sequence's latest values. So the key is derived from the
// installation's random id and the job's time of creation too. It is 43 bytes of ASCII.
func (l *Lease) IdempotencyKey(name string) string {
	return l.q.effectIdempotencyKey(l.ID, l.identity, name)
}

func (q *Queue) effectIdempotencyKey(job, identity int64, name string) string {
	return q.downstream("effect", strconv.FormatInt(job, 10), strconv.FormatInt(identity, 10), name)
}

// EffectOption changes how Once treats an effect.
type EffectOption func(*Fence)

// OnUncertain sets what to do when the outcome of an earlier run is unknown. Default RunAgain(24 * time.Hour).
func OnUncertain(p Policy) EffectOption {
	return func(f *Fence) { f.policy, f.f.Policy = p, p.facts() }
}

// EffectTimeout sets when fn's context ends. Default 30 s; a millisecond to a week. If the process dies, the effect counts
// as in flight for 5 s longer. Under the policy Ask it counts as in flight for 10 s longer, even after an error: by default
// until 40 s after it began. With a shorter EffectTimeout the provider is asked sooner.
func EffectTimeout(d time.Duration) EffectOption {
	return func(f *Fence) { f.f.Lease = d }
}

// Once does an effect outside the database at most once for a job, as far as that can be known: it records the intent,
// calls fn, and records the outcome. Each record is committed on its own, never in the handler's transaction. When the job
// runs again, a recorded success is replayed and fn is not called. fn must pass key, which is l.IdempotencyKey(name), to a
// provider that deduplicates. name is the effect's name within its job.
//
// After Reschedule the next run has effects of its own: they are done again, under other keys. Retries of a run replay.
//
// A name is for one effect of a run. A second call with the same name, usually in a loop, would get the outcome of the
// first; it is refused with ErrNameUsed, even while the first is under way. A call that returned an error may be made
// again. With Queue.Claim a run is everything that happens under one lease.
//
// What fn returns decides. After no error the effect is completed. After an error that is NotApplied, that error is
// returned, and the effect runs again when the job does. After any other error, and after a time-out, a cancelled context
// or a panic, nobody knows whether the effect happened: Once returns an *UncertainError (a panic goes on once that is
// recorded), and the next run decides by OnUncertain. Other errors of Once are *InFlightError (another run is doing the effect: returned from a handler it spends
// no attempt), *HeldError (returned from a handler it makes the job StateHeld) and *LeaseError (the job's lease is lost and
// fn was not called; or somebody ran the effect again before this success could be recorded).
//
// fn's context ends with the EffectTimeout and with the handler's context, and therefore also when the job's lease is lost.
// An answer that arrives after that is still worth returning: a success is recorded as long as nobody has run the effect
// again.
//
// A result that cannot be stored (see MaxResultBytes) does not undo the effect: it is recorded as completed, without a
// result. This run and each replay then return an error that is Fatal and wraps an *InvalidError, so that no code goes on
// without the result unnoticed. Ops.Resolve can add a smaller result.
//
// The statements need a connection in addition to that of a handler's transaction. Workers provide one; with Queue.Claim
// the pool must have one to spare, otherwise Once fails after 10 s, before fn is called. A nil fn is an *InvalidError, and
// nothing is recorded.
func Once[R any](ctx context.Context, l *Lease, name string, fn func(ctx context.Context, key string) (R, error), opts ...EffectOption) (R, error) {
	var none R
	if fn == nil {
		return none, errNoFunction
	}
	leave, err := l.enter(name)
	if err != nil {
		return none, err
	}
	done := false
	defer func() { leave(done) }()
	c, err := l.claimEffect(ctx, name, opts)
	if err != nil {
		return none, err
	}
	r, err := perform(ctx, c, func(ctx context.Context) (R, error) { return fn(withFenceLease(ctx, c), c.IdempotencyKey()) })
	done = err == nil
	return r, err
}

// errNoFunction comes before anything is written: a call of nil would leave the outcome of an effect uncertain that nobody
// has begun.
var errNoFunction = invalid("fn", "is nil, so there is nothing to do once; pass a function")

// effectRun is an effect in one run.
type effectRun struct {
	run  uint32
	name string
}

// newRun records that a handler is called with this lease.
func (l *Lease) newRun() { l.calls.Add(1) }

// enter refuses a bad name, and a name that was used in this run: Once would replay the first effect instead of doing the
// second. leave says whether the effect was done; if not, the run may try again.
func (l *Lease) enter(name string) (leave func(done bool), err error) {
	if err := checkName("name", name, MaxNameBytes); err != nil {
		return nil, err
	}
	return l.use(name, name)
}

// use records that something is used that has a name of its own in each run.
func (l *Lease) use(what, name string) (leave func(done bool), err error) {
	e := effectRun{l.calls.Load(), what}
	l.mu.Lock()
	defer l.mu.Unlock()
	if done, used := l.effects[e]; used {
		how := "is under way"
		if done {
			how = "was done"
		}
		return nil, fmt.Errorf("%w: %q %s, and this call was not made; give each effect and each sleep of a job a name of its own, such as %q", ErrNameUsed, name, how, name+":<what differs>")
	}
	if l.effects == nil {
		l.effects = make(map[effectRun]bool)
	}
	l.effects[e] = false
	return func(done bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if done {
			l.effects[e] = true
		} else {
			delete(l.effects, e)
		}
	}, nil
}

func (l *Lease) claimEffect(ctx context.Context, name string, opts []EffectOption) (*FenceLease, error) {
	f := &Fence{q: l.q, job: l, name: name, f: fence.Fence{
		Store: l.q.store, DB: l.alone(), Class: int16(classEffect), Scope: l.Queue, Key: fence.EffectKey(l.ID, name), Fingerprint: l.effectMark(),
		Lease: DefaultLease, Lifetime: DefaultWindow.Milliseconds(), Policy: Policy{}.facts(), Job: &l.hold,
	}}
	for _, o := range opts {
		o(f)
	}
	if err := cmp.Or(checkLease("EffectTimeout", f.f.Lease, time.Millisecond), f.policy.check()); err != nil {
		return nil, err
	}
	f.f.Lease += fence.Grace
	return f.claimAlone(ctx)
}

// claimAlone claims for perform: the claim commits on its own, whatever the database's default isolation level is.
func (f *Fence) claimAlone(ctx context.Context) (c *FenceLease, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.AnswerWithin)
	defer cancel()
	for range table.SettleTries {
		if c, err = f.claim(ctx, f.f.DB, true); !IsRetryable(err) {
			break
		}
	}
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("%w (an open transaction has this key, or open transactions hold every connection of the pool)", err)
	}
	return c, err
}

// Do does a unit of work outside jobs once: it claims the fence in a transaction of its own, calls fn, and records the
// outcome. While fn runs, Do extends the lease. If the lease is lost, fn's context ends with a cause that matches
// ErrLeaseLost. fn passes c.IdempotencyKey() to providers that deduplicate, and does not call Complete, Release or
// Uncertain on c.
//
// If the work was done before, Do returns the stored result. Otherwise its errors are those of Fence.Claim, except that Do
// asks the provider if the policy is Ask. Errors of fn count as in Once: after NotApplied the key is free, after any other
// error the outcome is uncertain and Do returns an *UncertainError. Results that cannot be stored are treated as in Once
// too; Fence.Resolve adds one. A nil fn is an *InvalidError, as in Once.
func Do[R any](ctx context.Context, q *Queue, spec FenceSpec, fn func(ctx context.Context, c *FenceLease) (R, error)) (R, error) {
	var none R
	if fn == nil {
		return none, errNoFunction
	}
	f, err := q.Fence(spec)
	if err != nil {
		return none, err
	}
	c, err := f.claimAlone(ctx)
	if err != nil {
		return none, err
	}
	return perform(ctx, c, func(ctx context.Context) (R, error) { return fn(withFenceLease(ctx, c), c) })
}

// perform runs the work under a claim and returns its result, or that of an earlier run.
func perform[R any](ctx context.Context, c *FenceLease, fn func(context.Context) (R, error)) (R, error) {
	var none, r R
	if !c.Replayed {
		err := c.perform(ctx, func(ctx context.Context) (v any, err error) {
			r, err = fn(ctx)
			return r, err
		})
		switch {
		case err != nil:
			return none, err
		case !c.Replayed:
			return r, nil
		}
	}
	if c.broken != "" {
		return none, unstorable(c.broken)
	}
	if err := protect(func() error { return json.Unmarshal(c.Result, &r) }); err != nil {
		return none, fmt.Errorf("onceq: stored result of %s does not decode into %T: %w", c.f, none, &decodeError{err})
	}
	return r, nil
}
