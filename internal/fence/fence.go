// Package fence is who may do the work of a key, outside jobs or for an effect of a job: claims, outcomes, and
// work whose outcome nobody knows; and the events that jobs wait for. It returns facts, of which the package
// onceq makes errors and events.
package fence

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

const (
	// Grace is from the end of an effect's context to that of its fence's lease, and from there to asking the
	// provider.
	Grace = 5 * time.Second

	maxRetryAfter = 500 * time.Millisecond // outside jobs: the work may end at any time
	clockStep     = time.Minute            // if the clock was set back by more, by NTP or a failover, ages are not known
)

// Fence is one key.
type Fence struct {
	Store       *pg.Store
	DB          pg.DB // where statements run if the caller gives no db; never a caller's transaction
	Class       int16
	Scope, Key  string
	Fingerprint []byte
	Lifetime    int64 // in milliseconds: see onceq.FenceSpec.Window
	Lease       time.Duration
	Policy      Policy
	Job         *hold.Hold // effects only
}

// Policy decides about work whose outcome is unknown: see onceq.Policy.
type Policy struct {
	Ask, Hold bool
	Again     time.Duration // for so long after the first claim the work runs again, with neither of these
}

// stillRuns reports whether work that was first claimed at since may run again now. If since lies ahead, the
// clock was wrong then, and how long ago that was is not known.
func (p Policy) stillRuns(since, now time.Time) bool {
	age := now.Sub(since)
	return p.Again == math.MaxInt64 || age > -clockStep && age < p.Again
}

// EffectKey is the key of a job's effect, and EffectOf its inverse.
func EffectKey(job int64, name string) string { return strconv.FormatInt(job, 10) + "/" + name }

// EffectOf says which effect of which job has a key.
func EffectOf(key string) (job int64, name string) {
	id, name, _ := strings.Cut(key, "/")
	job, _ = strconv.ParseInt(id, 10, 64)
	return job, name
}

// Subject gives the names by which errors call the fence: users do not know an effect's own key.
func (f *Fence) Subject() (scope, key string, job int64, effect string) {
	if f.effect() {
		job, effect = EffectOf(f.Key)
		return "", "", job, effect
	}
	return f.Scope, f.Key, 0, ""
}

func (f *Fence) effect() bool { return f.Class == table.ClassEffect }

// String names the fence in an error.
func (f *Fence) String() string { return Named(f.Subject()) }

// Named names what an error is about: a named effect of a job, or a key.
func Named(scope, key string, job int64, effect string) string {
	if effect != "" {
		return fmt.Sprintf("effect %q of job %d", effect, job)
	}
	return fmt.Sprintf("key %q in scope %q", key, scope)
}

// by is how a claim is sent. Outside jobs somebody waits for it; an effect is part of a job's run.
func (f *Fence) by() pg.Way {
	if f.Job == nil {
		return pg.ForCaller
	}
	return pg.Hot
}

// Claim is an attempt to claim a fence, and the claim.
type Claim struct {
	*Fence
	Token    int64
	Since    time.Time // when the work was first claimed
	Until    time.Time // end of the lease, by the database's clock
	Identity *int64    // names the work in its IdempotencyKey; nil for Since
	Began    time.Time // this process's clock just before asking: the lease ends no earlier than this + Lease
	Doubtful string    // why an earlier claim's outcome is unknown; "" if there was no such claim

	holder int64
	db     pg.DB
	args   []any // of stmt.InsertFence, and the first ones of stmt.TakeFence
}

// Is says what a claim has found.
type Is int

// What a claim finds.
const (
	Mine      Is = iota // the claim is made
	Replayed            // the work was done before
	InFlight            // somebody else is doing it, or may be
	Mismatch            // the key was used with another payload
	Uncertain           // the policy is to ask, and this claim does not
	Held                // a person decides
	LeaseLost           // that of the job
)

// Verdict is the answer to a claim, with the row of a taken fence.
type Verdict struct {
	Is
	Row
	Rest time.Duration // in flight: when to ask again
	New  bool          // that the outcome is unknown, or held, was not reported before
}

// Row is the row of a taken fence.
type Row struct {
	State          table.FenceState
	Token          int64
	Until          time.Time
	Since, now     time.Time
	Identity       *int64
	fingerprint    []byte
	Result, Detail string
	free           bool
}

// Claim claims the fence. With asking, an uncertain fence whose policy is to ask is claimed too.
func (f *Fence) Claim(ctx context.Context, db pg.DB, asking bool) (*Claim, Verdict, error) {
	c := &Claim{Fence: f, holder: rand.Int64(), db: db}
	c.args = []any{int64(0), int32(0), int64(0), f.Class, f.Scope, f.Key, c.holder, f.Lease.Microseconds(), f.Lifetime, f.Fingerprint}
	if f.Job != nil {
		c.args[0], c.args[1], c.args[2] = f.Job.ID, f.Job.Claims, f.Job.Holder
	}
	for range table.SettleTries {
		if done, v, err := c.send(ctx, stmt.InsertFence, c.args...); done || err != nil {
			return c, v, err
		}
		// Taken. The statement that met the row may not see it; a new one does.
		r, err := f.read(ctx, db)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			continue // pruned in between
		case err != nil:
			return nil, Verdict{}, fmt.Errorf("onceq: reading %s: %w", f, err)
		}
		doubt, v := f.judge(r, asking)
		switch doubt {
		case decided:
			return c, v, f.remember(ctx, db, v)
		case holding:
			held, err := f.hold(ctx, db, r)
			if err != nil {
				return nil, Verdict{}, err
			}
			if held {
				v.Is, v.New = Held, true
				return c, v, f.remember(ctx, db, v)
			}
		default:
			args := append(c.args, r.Token, doubt == running, r.Detail, doubt == strange)
			if done, v, err := c.send(ctx, stmt.TakeFence, args...); done || err != nil {
				if done && v.Is == Mine && doubt == running {
					c.Doubtful = r.Detail
					v.New = r.State == table.FenceClaimed // nobody has reported it yet
				}
				return c, v, err
			}
		}
	}
	return nil, Verdict{}, fmt.Errorf("%w (%s)", table.ErrKeyUnsettled, f)
}

// send sends a statement that claims. It is done if that has claimed, or if the job's lease is lost.
func (c *Claim) send(ctx context.Context, statement string, args ...any) (done bool, v Verdict, err error) {
	var holds bool
	var token, identity *int64
	var until, since *time.Time
	c.Began = time.Now()
	err = c.Store.Send(ctx, c.db, c.by(), statement, args, pg.Row(&holds, &token, &until, &since, &identity))
	switch {
	case err != nil:
		return false, v, fmt.Errorf("onceq: claiming %s: %w", c.Fence, c.Store.Told(err))
	case !holds:
		return true, Verdict{Is: LeaseLost}, nil
	case token == nil:
		return false, v, nil
	}
	c.Token, c.Until, c.Since, c.Identity = *token, *until, *since, identity
	return true, v, nil
}

// hold has a fence wait for a person. It is not held if somebody has decided in between.
func (f *Fence) hold(ctx context.Context, db pg.DB, r Row) (held bool, err error) {
	var token int64
	err = f.Store.Send(ctx, db, f.by(), stmt.HoldFence, []any{f.Class, f.Scope, f.Key, r.Token, r.Detail}, pg.Row(&token))
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return false, fmt.Errorf("onceq: holding %s: %w", f, err)
	}
	return err == nil, nil
}

func (f *Fence) read(ctx context.Context, db pg.DB) (r Row, err error) {
	var until *time.Time
	err = f.Store.Send(ctx, db, f.by(), stmt.ReadFence, []any{f.Class, f.Scope, f.Key}, pg.Row(
		&r.State, &r.Token, &until, &r.Since, &r.Identity, &r.fingerprint, &r.Result, &r.Detail, &r.free, &r.now, nil, nil))
	r.Until = table.OrZero(until)
	if r.State == table.FenceClaimed && r.Detail == "" {
		r.Detail = fmt.Sprintf("the claim under token %d ran out of its lease without an outcome", r.Token)
	}
	if f.effect() && r.State == table.FenceCompleted {
		r.free = false // its job still runs, so its window has not begun, whatever the row says
	}
	return r, err
}

// remember notes that somebody asks for a client's key whose outcome is unknown, so that who keeps asking
// never finds the key new. Once a day is enough (table.NotedEvery).
func (f *Fence) remember(ctx context.Context, db pg.DB, v Verdict) error {
	doubt := v.Is == Uncertain || v.Is == Held
	if !doubt || f.Class != table.ClassRequest || v.now.Sub(v.Until) < table.NotedEvery {
		return nil
	}
	var token int64
	err := f.Store.Send(ctx, db, pg.ForCaller, stmt.KeepDoubt, []any{f.Class, f.Scope, f.Key, v.Token}, pg.Row(&token))
	if err != nil && !errors.Is(err, pgx.ErrNoRows) { // decided in between
		return fmt.Errorf("onceq: keeping key %q: %w", f.Key, err)
	}
	return nil
}

// doubt is what to do with a fence that is not simply taken.
type doubt int

const (
	decided doubt = iota // the verdict says what was found
	free                 // take it
	strange              // of another job, or of an earlier round: take it, unless that job may run again
	running              // uncertain: take it over, to run again or to ask the provider
	holding              // uncertain: a person decides
)

// judge decides from a taken fence's row.
func (f *Fence) judge(r Row, asking bool) (doubt, Verdict) {
	v := Verdict{Row: r}
	switch alive := r.State == table.FenceClaimed && r.Until.After(r.now); {
	case f.Job != nil && len(r.fingerprint) > 0 && !bytes.Equal(r.fingerprint, f.Fingerprint):
		return strange, v
	case r.free || r.State == table.FenceCancelled: // released; the statement that read it may have begun before that
		return free, v
	case f.Job == nil && !fingerprint.SamePayload(r.fingerprint, f.Fingerprint):
		v.Is = Mismatch
	case r.State == table.FenceCompleted:
		v.Is = Replayed
	case alive:
		v.Is, v.Rest = InFlight, r.Until.Sub(r.now)
		soon := maxRetryAfter
		if f.Job != nil { // each try of a waiting job costs a claim, so it waits for half of what is left
			soon = max(soon, v.Rest/2)
		}
		v.Rest, v.Detail = max(0, min(v.Rest, soon)), ""
	case r.State == table.FenceHeld:
		v.Is = Held
	default:
		return f.judgeDoubt(v, asking)
	}
	return decided, v
}

// judgeDoubt is judge for a fence whose outcome is unknown: the policy decides.
func (f *Fence) judgeDoubt(v Verdict, asking bool) (doubt, Verdict) {
	switch p := f.Policy; {
	case p.Ask && !asking:
		v.Is = Uncertain
		return decided, v
	case p.Ask:
		// The request of an earlier claim may still be under way: a "no" would prove nothing yet.
		if v.Rest = v.Until.Add(Grace).Sub(v.now); v.Rest > 0 {
			if v.Is = InFlight; v.State != table.FenceUncertain {
				v.Detail = ""
			}
			return decided, v
		}
	case p.Hold || !p.stillRuns(v.Since, v.now):
		return holding, v
	}
	return running, v
}

// Resolve settles the fence. It is not settled if there was nothing to decide.
func (f *Fence) Resolve(ctx context.Context, db pg.DB, to table.FenceState, result string, window time.Duration) (settled bool, err error) {
	args := []any{f.Class, f.Scope, f.Key, int16(to), result, window.Milliseconds()}
	err = f.Store.Send(ctx, db, pg.ForCaller, stmt.ResolveFence, args, pg.Row(&settled))
	if err != nil {
		return false, fmt.Errorf("onceq: resolving %s: %w", f, err)
	}
	return settled, nil
}

// Guard is the arguments of a statement on behalf of the claim.
func (c *Claim) Guard(more ...any) []any {
	var job int64
	if c.Job != nil {
		job = c.Job.ID
	}
	return append([]any{job, c.Class, c.Scope, c.Key, c.Token, c.holder}, more...)
}

// Run sends such a statement; a nil db is the pool. lost says that the claim is.
func (c *Claim) Run(ctx context.Context, db pg.DB, op, statement string, more ...any) (lost bool, err error) {
	own := db == nil
	if own {
		db = c.DB
	}
	args := c.Guard(more...)
	err = c.Store.Guarded(ctx, db, statement, args, nil)
	for own && c.Job != nil && sqlstate.LeaseLost(err) { // its job may have moved
		var scope string
		switch failed := c.Store.Guarded(ctx, db, stmt.EffectScope, []any{c.Key, c.Token, c.holder}, &scope); {
		case errors.Is(failed, pgx.ErrNoRows) || failed == nil && scope == args[2]:
			return true, nil
		case failed != nil:
			err = failed
		default:
			args[2] = scope
			err = c.Store.Guarded(ctx, db, statement, args, nil)
		}
	}
	switch {
	case err == nil:
		return false, nil
	case sqlstate.LeaseLost(err):
		return true, nil
	}
	return false, fmt.Errorf("onceq: %s of %s: %w", op, c.Fence, c.Store.Told(err))
}

// Keep gives the context for the work. The context of an effect ends well before its lease does. Outside jobs
// the lease is extended until stop is called, or it is lost, of which lost gives the cause. stop may be called
// more than once, and returns when nothing of this is running any more.
func (c *Claim) Keep(ctx context.Context, troubles *watch.Troubles, lost func() error) (work context.Context, stop func()) {
	if c.Job != nil {
		return context.WithDeadline(ctx, c.Began.Add(c.Lease-Grace))
	}
	work, cancel := context.WithCancelCause(ctx)
	beats, end := context.WithCancel(context.WithoutCancel(ctx)) // the work may go on after ctx has ended
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer troubles.Ends(c)
		until := c.Began.Add(c.Lease)
		wait := time.NewTimer(c.Lease / 3)
		defer wait.Stop()
		for {
			select {
			case <-beats.Done():
				return
			case <-wait.C:
			}
			began := time.Now()
			// The network may have lost the connection.
			one, cancelOne := context.WithTimeout(beats, min(pg.EndWithin, time.Until(until)))
			gone, err := c.Run(one, nil, "extend", stmt.ExtendFence, c.Lease.Microseconds(), false)
			cancelOne()
			next := c.Lease / 3
			switch {
			case beats.Err() != nil:
				return
			case gone || !time.Now().Before(until) && err != nil:
				cancel(lost())
				return
			case err == nil:
				until = began.Add(c.Lease)
				troubles.Works(c, watch.Extend, "")
			default:
				next = min(next/4, time.Until(until)) // the database cannot be reached: try while there is time
				troubles.Fails(c, watch.Extend, "", err)
			}
			wait.Reset(next)
		}
	}()
	return work, func() {
		end()
		<-done
		cancel(nil)
	}
}
