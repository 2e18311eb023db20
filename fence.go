package onceq

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/onceq/onceq/internal/fence"
	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/jsonb"
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
	q      *Queue
	f      fence.Fence
	policy Policy

	job  *Lease // effects only
	name string // effects only
}

// Fence checks the spec; bad input is an *InvalidError. Nothing is sent to the database.
func (q *Queue) Fence(spec FenceSpec) (*Fence, error) {
	f := &Fence{q: q, policy: spec.Policy, f: fence.Fence{
		Store: q.store, DB: q.store.Pool, Class: int16(cmp.Or(spec.Class, ClassApplication)), Scope: cmp.Or(spec.Scope, "default"), Key: spec.Key,
		Lease: cmp.Or(spec.Lease, DefaultLease), Policy: spec.Policy.facts(),
	}}
	request := Class(f.f.Class) == ClassRequest
	if !request && Class(f.f.Class) != ClassApplication {
		return nil, invalid("Class", "is %d; use ClassApplication or ClassRequest", f.f.Class)
	}
	err := cmp.Or(checkName("Key", f.f.Key, MaxKeyBytes), checkName("Scope", f.f.Scope, MaxScopeBytes),
		checkLease("Lease", f.f.Lease, time.Millisecond))
	if err != nil {
		return nil, err
	}
	if spec.Window == UntilStarted {
		return nil, invalid("Window", "is UntilStarted, which is for jobs; use UntilFinished")
	}
	if f.f.Lifetime, err = lifetime("Window", spec.Window); err != nil {
		return nil, err
	}
	end := max(table.UnknownFor, time.Duration(f.f.Lifetime)*time.Millisecond)
	if again := f.policy.runsAgain(); request && f.f.Lifetime >= 0 && again > end {
		return nil, invalid("Policy", "runs again for %s, but a ClassRequest key whose outcome is unknown is forgotten after %s; use a Window that is as long", again, end)
	}
	if err := f.policy.check(); err != nil {
		return nil, err
	}
	if f.f.Fingerprint, err = spec.fingerprint(); err != nil {
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
	if f.f.Lifetime < 0 {
		return f.f.Lifetime
	}
	return max(f.f.Lifetime, DefaultWindow.Milliseconds())
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
		db = f.f.DB
	}
	return f.claim(ctx, db, false)
}

// claim is Claim. With asking, an uncertain fence whose policy is to ask is claimed too, for perform.
func (f *Fence) claim(ctx context.Context, db DB, asking bool) (*FenceLease, error) {
	if err := f.q.identify(ctx, db); err != nil {
		return nil, err
	}
	c, v, err := f.f.Claim(ctx, db, asking)
	if v.Is == fence.Held && v.New {
		f.emit(ctx, EventHeld, v.Token, f.held(v.Detail))
	}
	if err != nil {
		return nil, err
	}
	switch v.Is {
	case fence.LeaseLost:
		return nil, f.job.lostError("effect " + strconv.Quote(f.name))
	case fence.InFlight:
		e := &InFlightError{Until: v.Until, RetryAfter: v.Rest, Detail: v.Detail}
		e.Scope, e.Key, e.JobID, e.Effect = f.f.Subject()
		return nil, e
	case fence.Mismatch:
		live := int16(StateRunning)
		err := &MismatchError{
			Scope: f.f.Scope, Key: f.f.Key, Existing: Result{Duplicate: true, State: State(v.State.Job(&live))},
			Detail: "only a fingerprint of the first payload is stored, so what differs is not known",
		}
		f.emit(ctx, EventMismatch, v.Token, err)
		return nil, err
	case fence.Uncertain:
		return nil, f.uncertain(v.Detail, nil)
	case fence.Held:
		return nil, f.held(v.Detail)
	case fence.Replayed:
		c.Token, c.Since, c.Identity = v.Token, v.Since, v.Identity
		f.emit(ctx, EventReplayed, v.Token, nil)
	}
	l := &FenceLease{
		Scope: f.f.Scope, Key: f.f.Key, Name: f.name, Token: c.Token, Since: c.Since, Until: c.Until, f: f, c: c,
	}
	if l.Replayed = v.Is == fence.Replayed; l.Replayed {
		if l.broken = v.Detail; v.Result != "" {
			l.Result = json.RawMessage(v.Result)
		}
	} else if v.New {
		f.emit(ctx, EventUncertain, c.Token, f.uncertain(c.Doubtful, nil))
	}
	return l, nil
}

// String names the fence in an error.
func (f *Fence) String() string { return f.f.String() }

func (f *Fence) held(detail string) *HeldError {
	e := &HeldError{Detail: detail}
	e.Scope, e.Key, e.JobID, e.Effect = f.f.Subject()
	return e
}

func (f *Fence) uncertain(detail string, err error) *UncertainError {
	e := &UncertainError{Detail: detail, Err: err}
	e.Scope, e.Key, e.JobID, e.Effect = f.f.Subject()
	return e
}

func (f *Fence) emit(ctx context.Context, t EventType, token int64, err error) {
	if !f.q.watched(t.Level()) {
		return
	}
	e := Event{Type: t, Scope: f.f.Scope, Key: f.f.Key, Name: f.name, Token: token, Err: err}
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
