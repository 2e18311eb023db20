package onceq

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/jsonb"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// effectMark says which job an effect belongs to, and to which round of that job. It is the job's identity: the job's time
// of creation in microseconds, plus one for each Reschedule. The id would not be enough: after the sequence was set back, a
// new job may get an old one's id.
func (l *Lease) effectMark() []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(l.identity))
}

// FenceSpec names one unit of work outside jobs.
type FenceSpec struct {
	Class Class  // ClassApplication (the default) or ClassRequest
	Scope string // keeps tenants or workspaces apart; default "default"
	Key   string // required; see Job.Key

	// Payload, if not nil, is compared when the key comes back: a different one is a *MismatchError. Only a fingerprint of
	// it is stored. It is encoded as Job.Payload is. Fields names the members that must be equal; default all.
	Payload any
	Fields  []string

	// Window is how long the key stays taken after Complete: see Job.Window. Default DefaultWindow. Work whose outcome was
	// unknown, and that is then found to be done (Applied, or Complete after Uncertain), keeps its key for at least
	// DefaultWindow, so that those who were told that nobody knows get the result when they ask again.
	Window time.Duration

	// Lease is how long a claim lasts without Extend. Default DefaultLease; at least a millisecond. Do extends it by
	// itself.
	Lease time.Duration

	// Policy decides what happens when the outcome of an earlier claim is unknown. Default RunAgain(24 * time.Hour).
	Policy Policy
}

// Fence is a handle on the fence of one key outside jobs. The first caller who claims it may do the work. A Fence holds no
// state: any number of them for one key may exist in any number of processes.
type Fence struct {
	q           *Queue
	db          DB // where statements run if the caller gives no db; never a caller's transaction
	class       Class
	scope, key  string
	fingerprint []byte
	lifetime    int64
	lease       time.Duration
	policy      Policy

	job  *Lease // effects only
	name string // effects only
}

// Fence checks the spec; bad input is an *InvalidError. Nothing is sent to the database.
func (q *Queue) Fence(spec FenceSpec) (*Fence, error) {
	f := &Fence{
		q: q, db: q.store.Pool, class: cmp.Or(spec.Class, ClassApplication), scope: cmp.Or(spec.Scope, "default"), key: spec.Key,
		lease: cmp.Or(spec.Lease, DefaultLease), policy: spec.Policy,
	}
	if f.class != ClassApplication && f.class != ClassRequest {
		return nil, invalid("Class", "is %d; use ClassApplication or ClassRequest", f.class)
	}
	err := cmp.Or(checkName("Key", f.key, MaxKeyBytes), checkName("Scope", f.scope, MaxScopeBytes),
		checkLease("Lease", f.lease, time.Millisecond))
	if err != nil {
		return nil, err
	}
	if spec.Window == UntilStarted {
		return nil, invalid("Window", "is UntilStarted, which is for jobs; use UntilFinished")
	}
	if f.lifetime, err = lifetime("Window", spec.Window); err != nil {
		return nil, err
	}
	if end := max(table.UnknownFor, time.Duration(f.lifetime)*time.Millisecond); f.class == ClassRequest && f.lifetime >= 0 && f.policy.runsAgain() > end {
		return nil, invalid("Policy", "runs again for %s, but a ClassRequest key whose outcome is unknown is forgotten after %s; use a Window that is as long", f.policy.runsAgain(), end)
	}
	if err := f.policy.check(); err != nil {
		return nil, err
	}
	if f.fingerprint, err = spec.fingerprint(); err != nil {
		return nil, err
	}
	return f, nil
}

// fingerprint is that of the payload, or nil without one.
func (spec *FenceSpec) fingerprint() ([]byte, error) {
	if spec.Payload == nil {
		if spec.Fields != nil {
			return nil, invalid("Fields", "are named without a Payload")
		}
		return nil, nil
	}
	raw, isJSON, err := encodePayload("Payload", spec.Payload, json.Marshal)
	switch {
	case err != nil:
		return nil, err
	case isJSON:
		content, err := jsonb.AppendCanonical([]byte{fingerprint.FormJSON}, raw, spec.Fields)
		if err != nil {
			return nil, invalid("Payload", "%v", err)
		}
		return fingerprint.Append(nil, "", content), nil
	case spec.Fields != nil:
		return nil, invalid("Fields", "are named, but the Payload is bytes")
	}
	return fingerprint.Append(nil, "", append([]byte{fingerprint.FormBytes}, raw...)), nil
}

// lifetimeAfterDoubt is the lifetime of work whose outcome was unknown.
func (f *Fence) lifetimeAfterDoubt() int64 {
	if f.lifetime < 0 {
		return f.lifetime
	}
	return max(f.lifetime, DefaultWindow.Milliseconds())
}

// Claim asks for the right to do the work, inside db; a nil db is the pool. The answer is one of:
//
//   - a *FenceLease: the work is yours. Do it, then call Complete, Release or Uncertain, before Until or after Extend.
//   - a *FenceLease with Replayed: the work was done before, and Result is its result.
//   - *InFlightError: somebody else is doing the work. Try again after RetryAfter.
//   - *MismatchError: the key was used with another payload.
//   - *UncertainError: an earlier claim was marked uncertain, or its lease ran out, and the policy is Ask. Claim itself
//     does not ask the provider, because it may run in a transaction: ask yourself and then Resolve, or use Do.
//   - *HeldError: the same under Hold, or after the time that RunAgain allows. Resolve it.
//
// At READ COMMITTED the caller's transaction stays usable after each of them. Above that Postgres itself may answer 40001,
// see IsRetryable.
//
// If you claim inside the transaction that does the work, the claim is rolled back with it, and nobody sees the claim
// before the transaction ends: others who ask wait for that transaction instead of being told "in flight". If they should
// be told, or if the work reaches outside the database, claim on the pool and complete in the transaction.
func (f *Fence) Claim(ctx context.Context, db DB) (*FenceLease, error) {
	if db == nil {
		db = f.db
	}
	return f.claim(ctx, db, false)
}

// by is how a claim is sent. Outside jobs somebody waits for it; an effect is part of a job's run.
func (f *Fence) by() pg.Way {
	if f.job == nil {
		return pg.ForCaller
	}
	return pg.Hot
}

// fenceClaim is an attempt to claim a fence.
type fenceClaim struct {
	*FenceLease
	db   DB
	args []any // of stmt.InsertFence, and the first ones of stmt.TakeFence
}

// claim is Claim. With asking, an uncertain fence whose policy is to ask is claimed too, for perform.
func (f *Fence) claim(ctx context.Context, db DB, asking bool) (*FenceLease, error) {
	if err := f.q.identify(ctx, db); err != nil {
		return nil, err
	}
	c := fenceClaim{FenceLease: &FenceLease{Scope: f.scope, Key: f.key, Name: f.name, f: f, holder: rand.Int64()}, db: db}
	c.args = []any{int64(0), int32(0), int64(0), int16(f.class), f.scope, f.key, c.holder, f.lease.Microseconds(), f.lifetime, f.fingerprint}
	if f.job != nil {
		c.args[0], c.args[1], c.args[2] = f.job.ID, f.job.hold.Claims, f.job.hold.Holder
	}
	for range table.SettleTries {
		if ok, err := c.send(ctx, stmt.InsertFence, c.args...); ok || err != nil {
			return c.FenceLease, err
		}
		// Taken. The statement that met the row may not see it; a new one does.
		r, err := f.read(ctx, db)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			continue // pruned in between
		case err != nil:
			return nil, fmt.Errorf("onceq: reading %s: %w", f, err)
		}
		doubt, err := f.judge(ctx, c.FenceLease, r, asking)
		switch {
		case errors.Is(err, ErrHeld) || errors.Is(err, ErrUncertain):
			return nil, f.remember(ctx, db, r, err)
		case err != nil || c.Replayed:
			return c.FenceLease, err
		case doubt == holding:
			if err := f.hold(ctx, db, r); err != nil {
				return nil, err
			}
		default:
			if ok, err := c.take(ctx, r, doubt); err != nil {
				return nil, err
			} else if ok {
				return c.FenceLease, nil
			}
		}
	}
	return nil, fmt.Errorf("%w (%s)", ErrKeyUnsettled, f)
}

// send sends a statement that claims, and reports whether it did.
func (c *fenceClaim) send(ctx context.Context, statement string, args ...any) (bool, error) {
	f := c.f
	var holds bool
	var token, identity *int64
	var until, since *time.Time
	c.began = time.Now()
	err := f.q.store.Send(ctx, c.db, f.by(), statement, args, pg.Row(&holds, &token, &until, &since, &identity))
	switch {
	case err != nil:
		return false, fmt.Errorf("onceq: claiming %s: %w", f, f.q.store.Told(err))
	case !holds:
		return false, f.job.lostError("effect " + strconv.Quote(f.name))
	case token == nil:
		return false, nil
	}
	c.Token, c.Until, c.Since, c.identity = *token, *until, *since, identity
	return true, nil
}

// take takes over a fence that may be claimed again, if it is still as it was read.
func (c *fenceClaim) take(ctx context.Context, r fenceRow, doubt doubt) (bool, error) {
	args := append(c.args, r.token, doubt == running, r.detail, doubt == strange)
	ok, err := c.send(ctx, stmt.TakeFence, args...)
	if ok && doubt == running {
		c.doubtful = r.detail
		if r.state == table.FenceClaimed { // nobody has reported it yet
			c.f.emit(ctx, EventUncertain, c.Token, c.f.uncertain(r.detail, nil))
		}
	}
	return ok, err
}

// hold has a fence wait for a person, and returns the error that says so, or nil if somebody has decided in
// between.
func (f *Fence) hold(ctx context.Context, db DB, r fenceRow) error {
	var token int64
	err := f.q.store.Send(ctx, db, f.by(), stmt.HoldFence, []any{int16(f.class), f.scope, f.key, r.token, r.detail}, pg.Row(&token))
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("onceq: holding %s: %w", f, err)
	}
	held := f.held(r.detail)
	f.emit(ctx, EventHeld, r.token, held)
	return f.remember(ctx, db, r, held)
}

// fenceRow is the row of a taken fence.
type fenceRow struct {
	state       table.FenceState
	token       int64
	until       time.Time
	since, now  time.Time
	identity    *int64
	fingerprint []byte
	result      string
	detail      string
	free        bool
}

func (f *Fence) read(ctx context.Context, db DB) (r fenceRow, err error) {
	var until *time.Time
	err = f.q.store.Send(ctx, db, f.by(), stmt.ReadFence, []any{int16(f.class), f.scope, f.key}, pg.Row(
		&r.state, &r.token, &until, &r.since, &r.identity, &r.fingerprint, &r.result, &r.detail, &r.free, &r.now, nil, nil))
	if until != nil {
		r.until = *until
	}
	if r.state == table.FenceClaimed && r.detail == "" {
		r.detail = fmt.Sprintf("the claim under token %d ran out of its lease without an outcome", r.token)
	}
	if f.class == classEffect && r.state == table.FenceCompleted {
		r.free = false // its job still runs, so its window has not begun, whatever the row says
	}
	return r, err
}

// subject gives the names by which errors call the fence: users do not know an effect's own key.
func (f *Fence) subject() (scope, key string, jobID int64, effect string) {
	if f.class == classEffect {
		jobID, effect = effectOf(f.key)
		return "", "", jobID, effect
	}
	return f.scope, f.key, 0, ""
}

// String names the fence in an error.
func (f *Fence) String() string { return subject(f.subject()) }

func (f *Fence) held(detail string) *HeldError {
	e := &HeldError{Detail: detail}
	e.Scope, e.Key, e.JobID, e.Effect = f.subject()
	return e
}

func (f *Fence) uncertain(detail string, err error) *UncertainError {
	e := &UncertainError{Detail: detail, Err: err}
	e.Scope, e.Key, e.JobID, e.Effect = f.subject()
	return e
}

func (f *Fence) emit(ctx context.Context, t EventType, token int64, err error) {
	if !f.q.watched(t.Level()) {
		return
	}
	e := Event{Type: t, Scope: f.scope, Key: f.key, Name: f.name, Token: token, Err: err}
	if l := f.job; l != nil {
		e.Queue, e.Kind, e.JobID, e.Attempt = l.Queue, l.Kind, l.ID, l.Attempt
		e.Scope, e.Key = l.Scope, l.Key // users do not know the fence's own
	}
	f.q.emit(ctx, e)
}

// downstream condenses parts to 160 bits of SHA-256, together with the installation's random id. Without that id, keys
// would repeat: ids and tokens occur again in other databases, and in this one after some crash recoveries and failovers.
func (q *Queue) downstream(parts ...string) string {
	id := q.installation.Load()
	if id == nil {
		panic("onceq: IdempotencyKey needs a lease from Queue.Claim, Fence.Claim or a Worker, and this one is none")
	}
	h := sha256.New()
	for _, p := range append([]string{*id}, parts...) {
		_, _ = fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return "oq_" + hex.EncodeToString(h.Sum(nil)[:20])
}
