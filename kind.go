package onceq

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/guard"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/task"
)

// Kind declares a kind of job once, for the code that enqueues it and the code that runs it. P is its
// payload: a type that encoding/json encodes and decodes, or []byte for bytes that must come back unchanged.
// A Kind is a value: a copy is the same kind.
//
//	var Welcome = onceq.Kind[WelcomeMail]{
//		Name: "welcome",
//		Key:  func(m WelcomeMail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
//	}
//
// The first group of fields matters to producers, the second to workers.
type Kind[P any] struct {
	Name          string         // required; stored with each job and each key, so do not rename a kind while it has any
	Queue         string         // default DefaultQueue
	Key           func(P) string // derives the key from the payload; default none
	Scope         func(P) string // derives the scope from the payload; default the kind's name
	Window        time.Duration  // see Job.Window
	Priority      Priority
	MaxAttempts   int      // see Job.MaxAttempts
	Fields        []string // see Job.Fields
	IgnorePayload bool     // see Job.IgnorePayload

	Lane       func(P) string // derives the lane from the payload, see Job.Lane; default, and where it returns "", none, also with a LaneRule
	LaneFamily string         // see Job.LaneFamily; default the kind's name
	LaneRule   LaneRule       // see Job.LaneRule
	Limit      func(P) string // derives the name of a limit from the payload, see Job.Limit; default, and where it returns "", none
	Weight     func(P) int    // derives how often the job counts in its limit, see Job.Weight; default 1

	// Timeout ends the handler's context, and the attempt counts as failed. Default one minute; NoTimeout means none. A
	// handler that does not return after its context has ended keeps its job for one to two more leases: see
	// WorkerConfig.Lease.
	Timeout time.Duration

	// Backoff is the wait after the given failed attempt (1 for the first). Default DefaultBackoff, also if it panics. It must
	// not block: the outcomes of other jobs may wait for it. It is called in a goroutine of its own.
	Backoff func(attempt int, err error) time.Duration

	// MaxLost is how many leases of one job may run out (because its process crashed, hung or lost the database) until the
	// job is dead. Default 5. All workers of a process, whatever their schemas, take turns to start jobs that have lost a
	// lease: one after the other, each claimed just before it starts, and the next one when the one before is done or has
	// run for 1 s, or for 16, 81 and 256 s if three, two or one more lost leases would make it dead. So a job that ends its
	// process is found out. Jobs that have lost one lease, as all of a process that was killed have, start more and more at
	// once while they end well: each one that does lets one more start beside the others, until a lease is lost again. If one
	// of them ends its process, the others lose a second lease, and start one after the other from then on. That is so in
	// workers in which no kind has a MaxLost below 5. Only the first lost lease can be charged to a job that was merely about to start. A worker that
	// has a kind with MaxLost 1 claims no job before a handler is free for it.
	//
	// They count anew from 0 when the handler comes to its end and asks for another run: with Snooze, Reschedule, Sleep or
	// Await. After an error that is retried one of them stays. A job that is given back, because of a shutdown or before its
	// handler was called, keeps them all. So a job that waits or polls for weeks may lose any number of leases, if less than
	// MaxLost come one after the other. A job that now ends well and now ends its process goes on doing so, and takes a lease
	// from those beside it each time.
	MaxLost int

	// Keep is how long a completed job, or one that was cancelled while it ran, stays in the history; Forever keeps it
	// until somebody discards it. Default QueueConfig.Keep. A cancelled job stays for 24 hours at least. Dead and held
	// jobs always stay.
	Keep time.Duration

	// RefuseUnknownFields makes an attempt fail before the handler is called when the payload has a member that P does not
	// have. Use it where an older worker must not do half of what a newer producer asks for. By default such members are
	// dropped, as encoding/json does.
	RefuseUnknownFields bool

	// LogLevel is the level at which a worker logs how an attempt at a job of the kind ended: EventCompleted, EventFailed,
	// EventDead, EventHeld, EventSnoozed and the like. Default EventType.Level, also if it panics. Config.Hook gets every event.
	LogLevel func(EventType) slog.Level

	// Serializable runs handler transactions at SERIALIZABLE instead of READ COMMITTED. After a serialization failure the
	// handler soon runs again, up to thirty times, before it costs an attempt.
	Serializable bool
}

// NoTimeout lets a handler run as long as it likes. Its job still comes back within a lease when its process dies, freezes
// or loses the database; but nothing ends a handler that hangs.
const NoTimeout time.Duration = -1

// check refuses what no job of the kind could be enqueued with: NewWorker does so, and not only the first Enqueue.
func (k Kind[P]) check() error {
	j := Job{
		Kind: k.Name, Queue: k.Queue, Key: "key", Window: k.Window, Priority: k.Priority, MaxAttempts: k.MaxAttempts,
		LaneFamily: k.LaneFamily, LaneRule: k.LaneRule, Lane: "lane",
	}
	_, err := j.checked()
	switch {
	case err != nil:
	case k.Lane != nil:
		_, err = j.lane()
	case k.LaneFamily != "" || k.LaneRule != 0:
		return invalid("Kind.Lane", "of %q is nil although LaneFamily or LaneRule is set; set Lane, or none of them", k.Name)
	}
	if err == nil && k.Weight != nil && k.Limit == nil {
		return invalid("Kind.Limit", "of %q is nil although Weight is set; set both, or no Weight", k.Name)
	}
	var bad *InvalidError
	if errors.As(err, &bad) {
		if bad.Field == "Kind" {
			bad.Field = "Name"
		}
		return invalid("Kind."+bad.Field, "of %q %s", k.Name, bad.Reason)
	}
	return err
}

// Job returns the job for a payload, ready for Enqueue. Change what should differ from the kind before you enqueue it. If Key, Scope,
// Lane, Limit or Weight panics, Enqueue refuses the job with an error that wraps a *PanicError.
func (k Kind[P]) Job(payload P) Job {
	j := Job{
		Kind: k.Name, Payload: payload, Queue: k.Queue, Window: k.Window, Priority: k.Priority,
		MaxAttempts: k.MaxAttempts, Fields: k.Fields, IgnorePayload: k.IgnorePayload,
	}
	if k.Key == nil && k.Lane == nil && k.Limit == nil && k.Weight == nil {
		return j
	}
	function := "Kind.Key"
	p := guard.Call(func() {
		if k.Key != nil {
			j.Key, j.keyed = k.Key(payload), true
			if k.Scope != nil {
				function = "Kind.Scope"
				j.Scope = k.Scope(payload)
			}
		}
		if k.Lane != nil {
			function = "Kind.Lane"
			if j.Lane = k.Lane(payload); j.Lane != "" {
				j.LaneFamily, j.LaneRule = k.LaneFamily, k.LaneRule
			}
		}
		if k.Limit != nil {
			function = "Kind.Limit"
			j.Limit = k.Limit(payload)
		}
		function = "Kind.Weight"
		j.Weight, j.bad = k.weigh(payload, j.Limit)
	})
	switch {
	case p != nil:
		j.bad = panicked(fmt.Sprintf("%s of kind %q", function, k.Name), p)
	case j.bad != nil:
	case k.Lane != nil && j.Lane == "":
		_, j.bad = laneName("Kind.LaneFamily", cmp.Or(k.LaneFamily, k.Name), "Kind.Lane", "lane") // not only the first job with a lane is refused
	}
	return j
}

// weigh asks for the weight of a job with that limit, or "" for none.
func (k Kind[P]) weigh(payload P, limit string) (n int, err error) {
	if k.Weight == nil || limit == "" && k.Limit != nil {
		return 0, nil
	}
	if n = k.Weight(payload); n == 0 {
		err = invalid("Kind.Weight", "of %q has returned 0; 1 to 1,000,000,000 is possible", k.Name)
	}
	return n, err
}

// decode is the inverse of encodePayload. With known, P must have every member of the payload.
func decode[P any](l *Lease, known bool) (P, error) {
	var p P
	if raw, ok := any(&p).(*[]byte); ok && reflect.TypeFor[P]() == reflect.TypeFor[[]byte]() {
		if l.Bytes == nil {
			return p, fmt.Errorf("onceq: job %d of kind %q carries JSON, its handler wants bytes", l.ID, l.Kind)
		}
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
	runs    task.Handler // what a worker's executor knows of it
	queue   string
	laned   bool // the kind's jobs have lanes or limits
	backoff func(int, error) time.Duration
	level   func(EventType) slog.Level // nil for the default

	run    func(context.Context, pgx.Tx, []*hold.Hold) error // see task.Handler.Call
	decode func(*Lease) error                                // the payload, as the handler gets it

	err error // what is wrong with the kind's declaration; NewWorker returns it
}

func (k Kind[P]) handler() Handler {
	h := Handler{queue: cmp.Or(k.Queue, DefaultQueue), laned: k.Lane != nil || k.Limit != nil, backoff: k.Backoff, level: k.LogLevel}
	h.runs = task.Handler{
		Kind: k.Name, Timeout: k.Timeout, MaxLost: cmp.Or(k.MaxLost, DefaultMaxLost), Keep: math.MinInt64,
		Serializable: k.Serializable, Size: 1,
	}
	h.decode = func(l *Lease) error {
		_, err := decode[P](l, k.RefuseUnknownFields)
		return err
	}
	switch {
	case h.runs.Timeout == 0:
		h.runs.Timeout = time.Minute
	case h.runs.Timeout == NoTimeout:
		h.runs.Timeout = 0
	case h.runs.Timeout < 0:
		h.err = invalid("Kind.Timeout", "of %q is negative; use NoTimeout for none", k.Name)
	}
	if h.runs.MaxLost < 0 || h.runs.MaxLost > maxMaxLost {
		h.err = invalid("Kind.MaxLost", "of %q is %d; 1 to %d is possible", k.Name, h.runs.MaxLost, maxMaxLost)
	}
	if k.Keep != 0 {
		h.runs.Keep, h.err = keepTime("Kind.Keep", k.Keep, h.err)
	}
	if err := k.check(); err != nil {
		h.err = err
	}
	return h
}

// keepTime gives how long history is kept, as the tables store it: milliseconds.
func keepTime(field string, keep time.Duration, before error) (int64, error) {
	switch {
	case keep == Forever:
		return -1, before
	case keep < 0:
		return 0, invalid(field, "is negative; use Forever to keep history until somebody discards it")
	}
	return roundedUp(keep, time.Millisecond).Milliseconds(), before
}

// begin gets the lease and decodes the payload for a handler that is called now.
func begin[P any](h *hold.Hold, known bool) (l *Lease, p P, err error) {
	l = leaseOf(h)
	if p, err = decode[P](l, known); err == nil {
		l.newRun()
	}
	return l, p, err
}

// Handle runs fn for each job of the kind. Its lease is kept alive while fn runs; ctx ends with cause ErrLeaseLost when the
// lease is lost, with cause ErrCancelled when the job is cancelled, and after the kind's Timeout. When fn returns nil, the
// job is completed; after an error it runs again after the kind's Backoff, unless the error is one of Fatal, RetryAfter,
// Snooze and Reschedule. What fn does outside the database may happen again when the job runs again: use Once. In a
// transaction of its own, fn can complete the job itself: see Lease.Complete.
func (k Kind[P]) Handle(fn func(ctx context.Context, l *Lease, payload P) error) Handler {
	h := k.handler()
	if fn == nil {
		h.err = invalid("Handle", "of %q has no function", k.Name)
	}
	h.run = func(ctx context.Context, _ pgx.Tx, holds []*hold.Hold) error {
		l, p, err := begin[P](holds[0], k.RefuseUnknownFields)
		if err != nil {
			return err
		}
		return fn(ctx, l, p)
	}
	return h
}

// HandleTx runs fn for each job of the kind in a transaction. What fn writes through tx and the job's completion commit
// together or not at all, even if the lease was lost in between. The worker ends the transaction; tx.Begin opens a
// savepoint. After a serialization failure or a deadlock in tx, or in a statement on tx.Conn(), fn soon runs again, up
// to thirty times, before it counts as an error.
//
// The transaction begins with fn's first use of tx, in the same round trip. From then on nobody else can get the job,
// however long fn takes. If the lease was lost before, the first statement is not run and its error matches ErrLeaseLost.
// What fn does before its first statement may happen again. If no transaction can be opened, no attempt is spent.
//
// fn must not commit (by a script with a commit, or by pgx.BeginFunc on tx.Conn()): what it wrote until then would stay,
// whatever happens to the rest. If fn does commit and then returns an error, the job is dead, because running it again
// would repeat what was committed; if it returns nil, the job is completed and the log has an error. Once fn has returned,
// tx and its savepoints answer pgx.ErrTxClosed.
//
// Inside the transaction fn may pause for as long as its context lasts. If its process freezes there, the server closes the
// idle connection after the worker's lease, and the job goes to another worker. To keep the connection of a live handler open,
// the worker sends an empty statement every third of a lease. It cannot do so once fn has called tx.Conn() or
// tx.LargeObjects(), because fn then uses the connection without the worker's knowledge. From then on the connection may
// idle for as long as the kind's Timeout, or with NoTimeout for as long as the server's idle_in_transaction_session_timeout
// allows, and the job of a process that freezes comes back no earlier. A server that is just sending rows which a frozen
// process does not read waits for it, and the job with it, unless the server's tcp_user_timeout ends that (0, the default,
// does not; over a Unix socket nothing does).
//
// Each running fn holds one connection of the pool.
func (k Kind[P]) HandleTx(fn func(ctx context.Context, tx pgx.Tx, l *Lease, payload P) error) Handler {
	h := k.handler()
	if fn == nil {
		h.err = invalid("HandleTx", "of %q has no function", k.Name)
	}
	h.runs.InTx = true
	h.run = func(ctx context.Context, tx pgx.Tx, holds []*hold.Hold) error {
		l, p, err := begin[P](holds[0], k.RefuseUnknownFields)
		if err != nil {
			return err
		}
		return fn(ctx, tx, l, p)
	}
	return h
}

// Item is one job of a batch.
type Item[P any] struct {
	*Lease
	Payload P
}

// HandleBatch runs fn for up to size jobs of the kind at a time, in one transaction that commits what fn wrote together
// with all completions; the transaction begins as in HandleTx. It does not wait for a batch to fill up. When fn returns an
// error, or a payload does not decode, nothing is committed and each of the jobs runs again at once in a batch of its own,
// so that only the job at fault spends an attempt. After a serialization failure or a deadlock fn first runs again
// with all of them, up to ten times.
func (k Kind[P]) HandleBatch(size int, fn func(ctx context.Context, tx pgx.Tx, jobs []Item[P]) error) Handler {
	h := k.handler()
	if fn == nil {
		h.err = invalid("HandleBatch", "of %q has no function", k.Name)
	}
	if size < 1 || size > 10_000 {
		h.err = invalid("HandleBatch", "of %q has size %d; 1 to 10,000 is possible", k.Name, size)
	}
	h.runs.InTx, h.runs.Size = true, size
	h.run = func(ctx context.Context, tx pgx.Tx, holds []*hold.Hold) error {
		items := make([]Item[P], len(holds))
		for i := range holds {
			l, p, err := begin[P](holds[i], k.RefuseUnknownFields)
			if err != nil {
				return err
			}
			items[i] = Item[P]{l, p}
		}
		return fn(ctx, tx, items)
	}
	return h
}

// Wrap puts a function around the handler: for tracing, logging, or a tenant in the context. around is called for each
// attempt, with the jobs that the handler gets: one, or those of a batch. It normally calls next, and its error is the
// error of the attempt. The handler sees what around puts into the context that it passes to next. A panic of the handler
// passes through around. For transactional handlers around runs inside the transaction, which commits after it has
// returned. It runs again when Postgres asks to run that transaction again, or to run a transaction of the handler's own
// with Lease.Complete again. When a handler is wrapped several times, the last wrapper is the outermost.
func (h Handler) Wrap(around func(ctx context.Context, leases []*Lease, next func(context.Context) error) error) Handler {
	if around == nil {
		h.err = invalid("Wrap", "of the handler of %q has no function", h.runs.Kind)
		return h
	}
	run := h.run
	h.run = func(ctx context.Context, tx pgx.Tx, holds []*hold.Hold) error {
		return around(ctx, leasesOf(holds), func(ctx context.Context) error { return run(ctx, tx, holds) })
	}
	return h
}

// call calls the handler for jobs that a worker has. It neither panics nor returns an error that does.
func (h *Handler) call(ctx context.Context, tx pgx.Tx, holds []*hold.Hold) error {
	err := protect(func() error { return h.run(ctx, tx, holds) })
	if err == nil {
		for _, one := range holds {
			leaseOf(one).goesOn()
		}
	}
	return err
}

// Kind is the name of the kind that the handler is for.
func (h Handler) Kind() string { return h.runs.Kind }

// Queue is the kind's queue. A single job may name another one (Job.Queue).
func (h Handler) Queue() string { return h.queue }

// protect turns a panic of fn into an error, and tames the error that it returns.
func protect(fn func() error) (err error) {
	if p := guard.Call(func() { err = fn() }); p != nil {
		err = &PanicError{Value: p.Value, Stack: p.Stack}
	}
	return tame(err)
}

// panicked is the error for a function of the application's that panicked.
func panicked(function string, p *guard.Panic) error {
	return fmt.Errorf("onceq: %s panicked: %w", function, &PanicError{Value: p.Value, Stack: p.Stack})
}

// tame makes an error of the application's safe to use where a panic would end the process: its methods may panic, as they do on a nil
// pointer that was returned as an error. A text that is longer than what is stored is cut, and its error is wrapped.
func tame(err error) error {
	if err == nil {
		return nil
	}
	tame, p := guard.Tame(err, finish.MaxText, finish.Text)
	if p != nil {
		return panicked(fmt.Sprintf("a method of the error, a %T,", err), p)
	}
	return tame
}
