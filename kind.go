package onceq

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5"
)

// Kind declares a kind of job once, for those who enqueue it and those who run it. P is its payload: a type
// that encoding/json encodes and decodes, or []byte for bytes that must come back unchanged.
//
//	var Welcome = onceq.Kind[WelcomeMail]{
//		Name: "welcome",
//		Key:  func(m WelcomeMail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
//	}
//
// The first group of fields matters to producers, the second to workers.
type Kind[P any] struct {
	Name          string         // required; stored with each job and with its key, so do not rename a kind that has either
	Queue         string         // default DefaultQueue
	Key           func(P) string // derives the key from the payload; default none
	Scope         func(P) string // derives the scope from the payload; default the kind's name
	Window        time.Duration  // see Job.Window
	Priority      Priority
	MaxAttempts   int      // see Job.MaxAttempts
	Fields        []string // see Job.Fields
	IgnorePayload bool     // see Job.IgnorePayload

	// Timeout ends the handler's context, and the attempt counts as failed. Default one minute; NoTimeout for
	// none. A handler that does not return although its context has ended keeps its job for one to two leases more: see
	// WorkerConfig.Lease.
	Timeout time.Duration

	// Backoff is the wait after the given failed attempt (1 for the first). Default DefaultBackoff.
	Backoff func(attempt int, err error) time.Duration

	// MaxLost is how many leases of one job may run out (its process crashed, hung or lost the database) until
	// the job is dead. Default 5. A worker starts jobs that have lost one in turn, each as soon as it is claimed: the
	// next when the one before is done or has run for 1 s, and for 16, 81 and 256 s with three, two and one life left. So
	// what ends its process is found out, and only a first lease may be charged to a job that was about to start. With 1
	// a worker claims nothing ahead of its start.
	MaxLost int

	// Keep is how long a completed or cancelled job stays in the history: 0 for not at all, Forever until
	// somebody discards it. Default: what QueueConfig.Keep says. Dead and held jobs always stay.
	Keep time.Duration

	// RefuseUnknownFields makes a payload with a member that P does not have an error of its attempt, before the handler
	// is called: where an older worker must not do half of what a newer producer asks for. By default such members are
	// dropped, as encoding/json does.
	RefuseUnknownFields bool

	// Serializable runs handler transactions at SERIALIZABLE in place of READ COMMITTED. Serialization
	// failures are run again at once, up to ten times, before they cost an attempt.
	Serializable bool
}

// NoTimeout lets a handler run as long as it likes. Its job still comes back within a lease when its process dies, freezes
// or loses the database; but for a handler that hangs nobody looks.
const NoTimeout time.Duration = -1

// Job returns the job for a payload, ready for Enqueue; change what differs from the kind before.
func (k *Kind[P]) Job(payload P) Job {
	j := Job{
		Kind: k.Name, Payload: payload, Queue: k.Queue, Window: k.Window, Priority: k.Priority,
		MaxAttempts: k.MaxAttempts, Fields: k.Fields, IgnorePayload: k.IgnorePayload,
	}
	if k.Key != nil {
		j.Key, j.keyed = k.Key(payload), true
		if k.Scope != nil {
			j.Scope = k.Scope(payload)
		}
	}
	return j
}

// decode is the way back of encodePayload. With known, P has to have every member.
func decode[P any](l *Lease, known bool) (P, error) {
	var p P
	if raw, ok := any(&p).(*[]byte); ok && reflect.TypeFor[P]() == reflect.TypeFor[[]byte]() {
		*raw = l.Bytes
		return p, nil
	}
	if l.Payload == nil {
		return p, fmt.Errorf("onceq: job %d of kind %q carries bytes, its handler wants %T", l.ID, l.Kind, p)
	}
	unmarshal := json.Unmarshal
	if known {
		unmarshal = unmarshalKnown
	}
	if err := unmarshal(l.Payload, &p); err != nil {
		return p, fmt.Errorf("onceq: payload of job %d does not decode into %T: %w", l.ID, p, &decodeError{err})
	}
	return p, nil
}

func unmarshalKnown(payload []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(payload))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

// Handler is what a worker runs for the jobs of one kind: see Kind.Handle, HandleTx and HandleBatch.
type Handler struct {
	kind, queue  string
	timeout      time.Duration // 0 for none
	backoff      func(int, error) time.Duration
	maxLost      int
	keep         int64 // milliseconds, 0 for none, -1 until somebody decides; math.MinInt64: the queue decides
	serializable bool

	// One of the three.
	lease func(context.Context, *Lease) error
	tx    func(context.Context, pgx.Tx, *Lease) error
	batch func(context.Context, pgx.Tx, []*Lease) error
	size  int // of a batch

	err error // of the kind's declaration; NewWorker returns it
}

func (k *Kind[P]) handler() Handler {
	h := Handler{
		kind: k.Name, queue: k.Queue, timeout: k.Timeout, backoff: k.Backoff, maxLost: k.MaxLost,
		serializable: k.Serializable, keep: math.MinInt64,
	}
	if h.queue == "" {
		h.queue = DefaultQueue
	}
	switch {
	case h.timeout == 0:
		h.timeout = time.Minute
	case h.timeout == NoTimeout:
		h.timeout = 0
	case h.timeout < 0:
		h.err = invalid("Kind.Timeout", "of %q is negative; use NoTimeout for none", k.Name)
	}
	if h.maxLost == 0 {
		h.maxLost = DefaultMaxLost
	}
	if h.maxLost < 0 || h.maxLost > maxMaxLost {
		h.err = invalid("Kind.MaxLost", "of %q is %d; 1 to %d is possible", k.Name, h.maxLost, maxMaxLost)
	}
	if k.Keep != 0 {
		h.keep, h.err = keepTime("Kind.Keep", k.Keep, h.err)
	}
	if err := checkName("Kind.Name", k.Name, MaxNameBytes); err != nil {
		h.err = err
	}
	return h
}

// keepTime is how long history is kept, as the tables have it.
func keepTime(field string, keep time.Duration, before error) (int64, error) {
	switch {
	case keep == Forever:
		return -1, before
	case keep < 0:
		return 0, invalid(field, "is negative; use Forever to keep history until somebody discards it")
	}
	return keep.Milliseconds(), before
}

// Handle runs fn for each job of the kind. Its lease is kept alive while fn runs; ctx ends with cause
// ErrLeaseLost when it is lost, ErrCancelled when the job is cancelled, and with the kind's timeout. A nil
// return completes the job; an error runs it again after the kind's Backoff, if it is not one of Fatal, RetryAfter,
// Snooze and Reschedule. What fn does outside of the database may happen
// again on a redelivery: use Once. With a transaction of its own fn can complete the job by itself: see Lease.Complete.
func (k *Kind[P]) Handle(fn func(ctx context.Context, l *Lease, payload P) error) Handler {
	h := k.handler()
	if fn == nil {
		h.err = invalid("Handle", "of %q has no function", k.Name)
	}
	known := k.RefuseUnknownFields
	h.lease = func(ctx context.Context, l *Lease) error {
		p, err := decode[P](l, known)
		if err != nil {
			return err
		}
		l.newRun()
		return fn(ctx, l, p)
	}
	return h
}

// HandleTx runs fn for each job of the kind in a transaction. What fn writes through tx and the job's
// completion commit together or not at all, also where the lease was lost meanwhile. The worker ends the
// transaction; tx.Begin gives a savepoint. A serialization failure or deadlock of tx, also of a statement on tx.Conn(), runs
// fn again at once, up to ten times, before it counts as an error.
//
// The transaction begins with fn's first use of tx, in the same round trip. From then on nobody else can have the job,
// however long fn takes; where its lease was lost before, that first statement is not run and its error matches
// ErrLeaseLost. What fn does before may happen again, and spends no attempt where no transaction can be opened.
//
// fn must not commit by itself (a script with a commit, pgx.BeginFunc on tx.Conn()): what it wrote until then would stay
// whatever came of the rest. Where it has, an error of fn makes the job dead, because running it again would repeat that,
// and a good run is completed with an error in the log. Once fn has returned, tx and its savepoints answer
// pgx.ErrTxClosed.
//
// Inside of the transaction fn may idle as long as its context lasts. A process that freezes there is cut off by the server
// after the worker's lease, and the job goes to another one; the worker sees to it that this does not meet one that lives,
// with an empty statement every third of a lease. It cannot while fn has taken tx.Conn() or tx.LargeObjects(), which it uses
// behind the worker's back: from then on the connection may idle for as long as the kind's Timeout, and with NoTimeout as
// the server's idle_in_transaction_session_timeout says, so a job of a process that freezes comes back no earlier.
//
// Each running fn holds one connection of the pool.
func (k *Kind[P]) HandleTx(fn func(ctx context.Context, tx pgx.Tx, l *Lease, payload P) error) Handler {
	h := k.handler()
	if fn == nil {
		h.err = invalid("HandleTx", "of %q has no function", k.Name)
	}
	known := k.RefuseUnknownFields
	h.tx = func(ctx context.Context, tx pgx.Tx, l *Lease) error {
		p, err := decode[P](l, known)
		if err != nil {
			return err
		}
		l.newRun()
		return fn(ctx, tx, l, p)
	}
	return h
}

// Item is one job of a batch.
type Item[P any] struct {
	*Lease
	Payload P
}

// HandleBatch runs fn for up to size jobs of the kind at a time, in one transaction that commits what fn
// wrote together with all completions; the transaction begins as in HandleTx. It does not wait for a batch to fill
// up. When fn fails, or a payload does not decode, nothing is committed and each of the jobs runs again at once
// in a batch of its own, so that only the one at fault spends an attempt.
func (k *Kind[P]) HandleBatch(size int, fn func(ctx context.Context, tx pgx.Tx, jobs []Item[P]) error) Handler {
	h := k.handler()
	if fn == nil {
		h.err = invalid("HandleBatch", "of %q has no function", k.Name)
	}
	if size < 1 || size > 10_000 {
		h.err = invalid("HandleBatch", "of %q has size %d; 1 to 10,000 is possible", k.Name, size)
	}
	h.size = size
	known := k.RefuseUnknownFields
	h.batch = func(ctx context.Context, tx pgx.Tx, leases []*Lease) error {
		items := make([]Item[P], len(leases))
		for i, l := range leases {
			p, err := decode[P](l, known)
			if err != nil {
				return err
			}
			items[i] = Item[P]{l, p}
			l.newRun()
		}
		return fn(ctx, tx, items)
	}
	return h
}

// Wrap puts a function around the handler: for tracing, logging, a tenant in the context. It is called for each
// attempt with the jobs that the handler gets, one, or those of a batch, and calls next, mostly; its error is
// that of the attempt. What it puts into the context that it passes on is there in the handler. A panic of the handler
// goes through it. Of transactional handlers it runs inside the transaction, which commits after it has returned; it runs
// again when Postgres wants that transaction run again, or one of the handler's own with Lease.Complete. Of several the last one is outermost.
func (h Handler) Wrap(around func(ctx context.Context, leases []*Lease, next func(context.Context) error) error) Handler {
	switch lease, tx, batch := h.lease, h.tx, h.batch; {
	case around == nil:
		h.err = invalid("Wrap", "of the handler of %q has no function", h.kind)
	case lease != nil:
		h.lease = func(ctx context.Context, l *Lease) error {
			return around(ctx, []*Lease{l}, func(ctx context.Context) error { return lease(ctx, l) })
		}
	case tx != nil:
		h.tx = func(ctx context.Context, t pgx.Tx, l *Lease) error {
			return around(ctx, []*Lease{l}, func(ctx context.Context) error { return tx(ctx, t, l) })
		}
	case batch != nil:
		h.batch = func(ctx context.Context, t pgx.Tx, leases []*Lease) error {
			return around(ctx, leases, func(ctx context.Context) error { return batch(ctx, t, leases) })
		}
	}
	return h
}

// Kind is the name of the kind that the handler is for.
func (h Handler) Kind() string { return h.kind }

// Queue is the kind's queue; a job may name another.
func (h Handler) Queue() string { return h.queue }

// protect turns a panic of fn into an error.
func protect(fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return fn()
}
