package onceq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/calls"
	"github.com/onceq/onceq/internal/fence"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
)

// FenceLease is the answer to Fence.Claim: the right to do the work or, with Replayed set, the result of the work that was
// done before. The fields are as they were at the moment of the claim; do not change them.
type FenceLease struct {
	Scope, Key string

	Name string // of the effect, in Once; empty outside jobs

	// Token is a fencing token: it grows with each claim of the key, even after a release and after the Reaper has removed
	// the key. Pass it to systems that compare it (Kleppmann 2016, "How to do distributed locking").
	Token int64

	Since    time.Time       // when the work was first claimed; a claim that takes over uncertain work keeps it
	Until    time.Time       // end of the lease, as claimed, by the database's clock
	Replayed bool            // the work was done before: Result is its result, and there is nothing to do
	Result   json.RawMessage // nil unless Replayed

	f      *Fence
	c      *fence.Claim
	broken string // why the result could not be stored, although the work is completed
}

type claimKey struct{}

func withFenceLease(ctx context.Context, c *FenceLease) context.Context {
	return context.WithValue(calls.With(ctx), claimKey{}, c)
}

// FenceLeaseFromContext returns the lease of the innermost Once or Do whose fn got ctx, or nil. A client of a provider that
// deduplicates finds its IdempotencyKey there.
func FenceLeaseFromContext(ctx context.Context) *FenceLease {
	c, _ := ctx.Value(claimKey{}).(*FenceLease)
	return c
}

// IdempotencyKey names this work for systems outside the database that deduplicate, usually in an Idempotency-Key header
// (draft-ietf-httpapi-idempotency-key-header). A later claim that takes over after an unknown outcome has the same key; new
// work, after a release or after the window, has another. It is 43 bytes of ASCII.
func (c *FenceLease) IdempotencyKey() string {
	if c.f.job != nil {
		return c.f.job.IdempotencyKey(c.f.name)
	}
	identity := c.Since.UnixMicro()
	if c.c.Identity != nil {
		identity = *c.c.Identity
	}
	return c.f.q.downstream("fence", strconv.Itoa(int(c.c.Class)), c.Scope, c.Key, strconv.FormatInt(identity, 10))
}

func (c *FenceLease) run(ctx context.Context, db DB, op, statement string, more ...any) error {
	lost, err := c.c.Run(ctx, db, op, statement, more...)
	if lost {
		return c.lost(op)
	}
	return err
}

func (c *FenceLease) lost(op string) *LeaseError {
	e := &LeaseError{Op: op, Token: c.Token}
	e.Scope, e.Key, e.JobID, e.Effect = c.c.Subject()
	return e
}

// Complete records that the work is done, and its result, inside db; a nil db is the pool. Even after the end of the lease
// it is accepted, until somebody else has claimed the work. After Uncertain, or when the work is held, the key then stays taken
// for at least DefaultWindow. Once somebody else has claimed it, and after a Release, Complete returns a *LeaseError:
// the statement raises an error, so that a commit after it in the same pipeline fails.
//
// The result is encoded as JSON; an empty json.RawMessage is null. One that cannot be stored (see MaxResultBytes) is an *InvalidError, and nothing is sent.
func (c *FenceLease) Complete(ctx context.Context, db DB, result any) error {
	raw, err := encodeResult(result)
	if err != nil {
		return err
	}
	return c.complete(ctx, db, raw, "")
}

func (c *FenceLease) complete(ctx context.Context, db DB, raw, broken string) error {
	err := c.run(ctx, db, "complete", stmt.CompleteFence, raw, broken, c.c.Lifetime, c.f.lifetimeAfterDoubt())
	if errors.Is(err, ErrLeaseLost) {
		c.f.emit(ctx, EventStale, c.Token, err)
	}
	return err
}

// CompleteInBatch adds the completion to the caller's own batch, as Lease.CompleteInBatch does. A completion that is
// refused there is reported as EventStale in the same way.
func (c *FenceLease) CompleteInBatch(batch *pgx.Batch, result any) error {
	raw, err := encodeResult(result)
	if err != nil {
		return err
	}
	batch.Queue(c.f.q.store.SQL(stmt.CompleteFence), c.c.Guard(raw, "", c.c.Lifetime, c.f.lifetimeAfterDoubt())...).Fn = func(results pgx.BatchResults) error {
		_, err := results.Exec()
		if sqlstate.LeaseLost(err) {
			c.f.emit(context.Background(), EventStale, c.Token, c.lost("complete"))
		}
		return err
	}
	return nil
}

// Release says that nothing was done: the key is free at once. If this claim took over uncertain work, the work is
// uncertain again, because this failure says nothing about what the earlier claim did. If the claim is no longer yours, or
// no longer open, the error is a *LeaseError. A nil db is the pool.
func (c *FenceLease) Release(ctx context.Context, db DB) error {
	return c.run(ctx, db, "release", stmt.ReleaseFence)
}

// Uncertain says that the work may or may not have been done, and why. The policy of the next caller who claims decides;
// Complete is still possible until then. A nil db is the pool.
func (c *FenceLease) Uncertain(ctx context.Context, db DB, cause error) error {
	if cause == nil {
		return invalid("Uncertain", "needs an error that says why")
	}
	cause = tame(cause)
	err := c.run(ctx, db, "uncertain", stmt.DoubtFence, finish.Text(cause.Error()))
	if err == nil {
		c.f.emit(ctx, EventUncertain, c.Token, cause)
	}
	return err
}

// Extend makes the lease last for d from now, a millisecond to a week, by the database's clock. It runs on the pool: a claim that was made in a
// transaction can be extended only after its commit.
func (c *FenceLease) Extend(ctx context.Context, d time.Duration) error {
	if err := checkLease("Extend", d, time.Millisecond); err != nil {
		return err
	}
	return c.run(ctx, nil, "extend", stmt.ExtendFence, d.Microseconds(), false)
}

// perform settles an earlier doubt, runs fn and records the outcome. If the provider said that an earlier run was applied,
// c is Replayed afterwards.
func (c *FenceLease) perform(ctx context.Context, fn func(context.Context) (any, error)) error {
	work, stop := c.keep(ctx)
	returned := false
	defer func() {
		stop()
		if returned {
			return
		}
		p := recover()
		if p == nil { // runtime.Goexit
			_ = c.doubt(ctx, errors.New("its goroutine ended"))
			return
		}
		_ = c.doubt(ctx, fmt.Errorf("panic: %v", p))
		panic(p)
	}()
	if c.c.Doubtful != "" && c.f.policy.ask != nil {
		var result any
		applied := false
		err := protect(func() (err error) {
			result, applied, err = c.f.policy.ask(work, c.IdempotencyKey())
			return err
		})
		if err == nil && applied {
			returned = true
			stop()
			if err = c.succeed(ctx, result); err == nil {
				c.Replayed = true
				c.f.emit(ctx, EventReplayed, c.Token, nil)
			}
			return err
		}
		if err == nil {
			// It was certainly not applied: from here on this is a first run.
			stop()
			c.c.Began = time.Now()
			err = c.record(ctx, func(ctx context.Context) error {
				return c.run(ctx, nil, "extend", stmt.ExtendFence, c.c.Lease.Microseconds(), true)
			})
			work, stop = c.keep(ctx)
		}
		if err != nil {
			returned = true
			stop()
			return c.doubt(ctx, fmt.Errorf("%s; asking failed: %w", strings.SplitN(c.c.Doubtful, "; asking failed", 2)[0], err))
		}
	}
	result, err := fn(work)
	returned = true
	stop()
	err = tame(err)
	switch {
	case err == nil:
		return c.succeed(ctx, result)
	case saysNotApplied(err):
		// If this cannot be recorded, the lease runs out and the outcome is uncertain, which is on the safe side.
		_ = c.record(ctx, func(ctx context.Context) error { return c.Release(ctx, nil) })
		return &settled{err}
	}
	return c.doubt(ctx, err)
}

func unstorable(why string) error {
	return Fatal(&InvalidError{Field: "result", Reason: why + " (the effect happened and is recorded as completed)"})
}

// succeed records a success.
func (c *FenceLease) succeed(ctx context.Context, result any) error {
	var why string
	raw, bad := encodeResult(result)
	if bad != nil {
		var e *InvalidError
		if raw, why = "", finish.Text(bad.Error()); errors.As(bad, &e) {
			why = e.Reason
		}
	}
	err := c.record(ctx, func(ctx context.Context) error { return c.complete(ctx, nil, raw, why) })
	switch {
	case errors.Is(err, ErrLeaseLost):
		return err
	case err != nil:
		return c.uncertain(ctx, "it succeeded, but that could not be recorded: ", err)
	case bad != nil:
		return unstorable(why)
	}
	c.Result = json.RawMessage(raw)
	return nil
}

// doubt records that the outcome is unknown, and returns the error that says so.
func (c *FenceLease) doubt(ctx context.Context, cause error) error {
	err := c.record(ctx, func(ctx context.Context) error { return c.Uncertain(ctx, nil, cause) })
	switch {
	case errors.Is(err, ErrLeaseLost):
		return fmt.Errorf("%w; this run ended with: %w", err, cause) // somebody else has claimed the work and decides
	case err != nil:
		return c.uncertain(ctx, "", errors.Join(cause, err)) // the lease runs out, which means the same
	}
	return c.f.uncertain(finish.Text(cause.Error()), cause)
}

func (c *FenceLease) uncertain(ctx context.Context, what string, err error) error {
	u := c.f.uncertain(what+finish.Text(err.Error()), err)
	c.f.emit(ctx, EventUncertain, c.Token, u)
	return u
}

// record writes an outcome in a context that outlives the work's context, because the work often ends with
// its context. After a lost connection it tries again, three times.
func (c *FenceLease) record(ctx context.Context, write func(context.Context) error) (err error) {
	ctx = context.WithoutCancel(ctx)
	for try := range 4 {
		if try > 0 {
			time.Sleep(50 * time.Millisecond << try)
		}
		one, cancel := context.WithTimeout(ctx, pg.EndWithin)
		err = write(one)
		cancel()
		if err == nil || errors.Is(err, ErrLeaseLost) || pg.BadData(err) {
			return err
		}
	}
	return err
}

// keep gives the context for the work, and keeps the claim until stop is called: see fence.Claim.Keep.
func (c *FenceLease) keep(ctx context.Context) (work context.Context, stop func()) {
	return c.c.Keep(ctx, &c.f.q.troubles, func() error {
		lost := c.lost("extend")
		c.f.emit(ctx, EventLeaseLost, c.Token, lost)
		return lost
	})
}
