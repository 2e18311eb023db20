package onceq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/executor"
	"github.com/onceq/onceq/internal/fence"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/presence"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/slot"
	"github.com/onceq/onceq/internal/stmt"
)

const defaultConcurrency = 100

// WorkerConfig configures a Worker. With the zero value a Worker works the queues of its handlers' kinds.
type WorkerConfig struct {
	// Queues configures some of the worker's queues; the others have the defaults. The worker's queues are those of its
	// handlers' kinds and those in Also, except those in Without.
	Queues map[string]QueueConfig

	// Also names further queues to work: those to which Job.Queue sends jobs of these kinds.
	Also []string

	// Without names queues of the handlers' kinds that this worker leaves to other workers.
	Without []string

	// Lease is how long a job stays with a process that died, froze or lost the database, before another worker takes it.
	// Default 30 s; 1 s to a week. The worker extends the lease every third of its length while a handler runs, however long
	// that is.
	//
	// The handler's context ends with Kind.Timeout, when the job is cancelled, or when the lease is lost. A handler that
	// has not returned a whole lease after that is given up: the connection of its transaction is closed, its lease is no
	// longer extended and runs out within another lease, and its job counts a lost lease (Kind.MaxLost) and goes to a free
	// worker. The log says so, and Ops.Health does as long as the handler runs, because it occupies its slot.
	//
	// If a process freezes inside a transactional handler while its transaction idles, the server closes its connection after
	// a lease, two seconds at least. While the server has rows to send that the process does not read, only its
	// tcp_user_timeout ends that: see Kind.HandleTx.
	Lease time.Duration

	// PollInterval is the longest time that a worker without work waits until it looks for work again, ±10%. Default 1.1
	// seconds if notifications arrive, which let the worker find new jobs within about a millisecond; a quarter of a second
	// if they do not, as behind PgBouncer in transaction mode, or if jobs that are enqueued in a transaction send none, as
	// on servers that allow prepared transactions. The default grows to a hundred times what looking takes, at most ten
	// seconds: a worker of thousands of queues looks less often. Where nine or more workers with the same queues and kinds
	// wait, two of them look so often and start delayed jobs at their time, and the others look every 4.4 seconds, one after
	// the other. If those two are dead or have become busy, a delayed job may start that much later, for a minute or so. Where
	// ten or more wait, only nine of them listen for new jobs, and the others join them within about three seconds when fewer than four
	// are left. With an interval of your own all listen. At most an hour.
	//
	// A transaction that enqueues while no worker waits for the queue notifies nobody, nor, with the default interval, one that does so while a
	// worker looks for the jobs that come one soon after the other. If it commits when a worker has waited
	// for longer than three seconds, or a tenth of this interval if that is less, its job starts at the worker's next look.
	PollInterval time.Duration

	// ShutdownTimeout is how long Run waits for running handlers after its context has ended, before it cancels their
	// contexts. Default 20 s. If it is negative, they are cancelled at once.
	ShutdownTimeout time.Duration
}

// QueueConfig configures one queue of a worker.
type QueueConfig struct {
	// Concurrency is how many handlers run at once; for batch handlers, how many batches. Default 100, at most 10,000.
	//
	// In a queue that has transactional kinds (HandleTx, HandleBatch) each running handler holds a connection of the pool.
	// There the default is three quarters of the pool's MaxConns, leaves at least one connection free, and is at most 100;
	// a larger value than MaxConns is lowered to MaxConns, with a warning in the log. All such queues of all workers over
	// one pool share these connections, whatever their schemas, so that no worker holds jobs for which there is no
	// connection. The other connections are for what handlers ask of the pool itself: if n such handlers hold all n
	// connections of a pool and each waits for one more, they wait until their timeout. The log then says so and names the
	// handlers.
	//
	// A worker also claims ahead, for handlers that are about to become free: what they do in some hundredths of a second, at most
	// 2,000 jobs of a queue, with at most 16 MiB of payloads. What a claim brings beyond that is given back.
	Concurrency int

	// Keep is how long completed jobs, and jobs that were cancelled while they ran, stay in the history, unless their kind
	// says otherwise (Kind.Keep). Default 0, which means not at all; Forever keeps them until somebody discards them. A
	// cancelled job stays for 24 hours at least.
	Keep time.Duration
}

// Worker runs handlers for the jobs of one or more queues. Any number of workers, in any number of processes and of
// different versions of the application, may work the same queues.
type Worker struct {
	// Only NewWorker writes these.
	q        *Queue
	handlers map[string]*Handler
	kinds    []string
	queues   map[string]QueueConfig
	keeps    map[string]int64
	laned    bool // a kind has lanes
	careful  bool // the first lost lease makes some job dead, so only a job that was started may lose one
	besides  bool // jobs that have lost one lease may start beside each other: each may lose some more
	lease    time.Duration
	poll     time.Duration // 0 for the default
	shutdown time.Duration

	pooledIn  map[string]bool // queues with transactional kinds
	mayHold   int             // how many connections of the pool handlers' transactions may hold
	pipelines bool            // see lazytx.Pipelines

	running atomic.Bool         // Run or Drain is running; a second one is refused
	now     atomic.Pointer[run] // what Run or Drain does, for Ready and Alive
}

// shared is what the workers of a process have in common, and Claim with them.
type shared struct {
	quarantine *quarantine.Turn // of the process: the turn to start a job that has lost a lease
	late       sync.Map         // token → task.Late: handlers that do not return
	far        slot.Distance    // of the database, for the slots of rates
	held       fence.HeldJobs   // jobs that may run again
}

// NewWorker checks the configuration and the handlers; there may be one handler for each kind. Jobs of other kinds are left
// to other workers, with one warning in the log for each kind.
func NewWorker(q *Queue, cfg WorkerConfig, handlers ...Handler) (*Worker, error) {
	if q == nil {
		return nil, errors.New("onceq: NewWorker needs a queue")
	}
	pool := q.store.Pool.Config()
	w := &Worker{
		q: q, handlers: make(map[string]*Handler), queues: make(map[string]QueueConfig), keeps: make(map[string]int64), pooledIn: make(map[string]bool),
		lease: cmp.Or(cfg.Lease, DefaultLease), poll: cfg.PollInterval, shutdown: cmp.Or(cfg.ShutdownTimeout, 20*time.Second),
		pipelines: lazytx.Pipelines(pool.ConnConfig),
	}
	if err := w.addHandlers(handlers); err != nil {
		return nil, err
	}
	w.laned = slices.ContainsFunc(handlers, func(h Handler) bool { return h.laned })
	w.careful = slices.ContainsFunc(handlers, func(h Handler) bool { return h.runs.MaxLost == 1 })
	w.besides = !slices.ContainsFunc(handlers, func(h Handler) bool { return h.runs.MaxLost < DefaultMaxLost })
	if err := w.chooseQueues(&cfg); err != nil {
		return nil, err
	}
	if err := w.tuneQueues(int(pool.MaxConns)); err != nil {
		return nil, err
	}
	if err := checkLease("WorkerConfig.Lease", w.lease, time.Second); err != nil { // shorter, and an extension that comes late would lose jobs
		return nil, err
	}
	if w.poll < 0 || w.poll > time.Hour {
		return nil, invalid("WorkerConfig.PollInterval", "is %s; 0 to an hour is possible", w.poll)
	}
	return w, nil
}

// addHandlers adds the handlers and the queues of their kinds.
func (w *Worker) addHandlers(handlers []Handler) error {
	if len(handlers) == 0 {
		return errors.New("onceq: NewWorker needs at least one handler; make one with Kind.Handle")
	}
	for i := range handlers {
		h := handlers[i]
		if h.err != nil {
			return h.err
		}
		if h.runs.Kind == "" {
			return errors.New("onceq: a zero Handler; make one with Kind.Handle")
		}
		if w.handlers[h.runs.Kind] != nil {
			return fmt.Errorf("onceq: two handlers for kind %q; a worker has one handler for each kind: remove one, or give one of them a kind of another name", h.runs.Kind)
		}
		h.runs.Call = h.call
		w.handlers[h.runs.Kind] = &h
		w.kinds = append(w.kinds, h.runs.Kind)
		w.pooledIn[h.queue] = w.pooledIn[h.queue] || h.runs.InTx
		w.queues[h.queue] = QueueConfig{}
	}
	slices.Sort(w.kinds)
	return nil
}

// chooseQueues decides which queues the worker works: those of its kinds, with Also added and Without taken away.
func (w *Worker) chooseQueues(cfg *WorkerConfig) error {
	for _, name := range cfg.Without {
		if _, ok := w.queues[name]; !ok {
			return invalid("WorkerConfig.Without", "names queue %q, which is the queue of no handler's kind; these are: %q", name, slices.Sorted(maps.Keys(w.queues)))
		}
	}
	for _, name := range cfg.Without {
		delete(w.queues, name)
	}
	for _, name := range cfg.Also {
		if slices.Contains(cfg.Without, name) {
			return invalid("WorkerConfig.Also", "names queue %q, and so does Without; remove it from one of them", name)
		}
		if err := checkName("WorkerConfig.Also", name, MaxNameBytes); err != nil {
			return err
		}
		w.queues[name] = QueueConfig{}
		for _, h := range w.handlers { // jobs of any of these kinds may come
			w.pooledIn[name] = w.pooledIn[name] || h.runs.InTx
		}
	}
	if len(w.queues) == 0 {
		return invalid("WorkerConfig.Without", "leaves the worker no queue, so its handlers would never run")
	}
	for name, c := range cfg.Queues {
		if _, ok := w.queues[name]; !ok {
			return invalid("WorkerConfig.Queues", "names queue %q, which this worker does not work. Its queues are %q: those of its handlers' kinds,"+
				" and WorkerConfig.Also, which names those to which Job.Queue sends jobs of these kinds", name, slices.Sorted(maps.Keys(w.queues)))
		}
		w.queues[name] = c
	}
	return nil
}

// usually is how many connections of a pool of size handlers' transactions hold if the configuration does not say: the others are left
// to the application.
func usually(size int) int { return max(1, size-max(1, size/4)) }

// tuneQueues fills in what the configuration leaves open, for a pool of size connections.
func (w *Worker) tuneQueues(size int) error {
	asked := 0
	for name, c := range w.queues {
		if c.Concurrency < 0 || c.Concurrency > 10_000 {
			return invalid("QueueConfig.Concurrency", "of %q is %d; 1 to 10,000 is possible", name, c.Concurrency)
		}
		switch usual := usually(size); {
		case !w.pooledIn[name]:
			c.Concurrency = cmp.Or(c.Concurrency, defaultConcurrency)
		case c.Concurrency == 0:
			c.Concurrency = min(defaultConcurrency, usual)
			w.mayHold = max(w.mayHold, usual)
		default:
			if c.Concurrency > size {
				w.q.log.Warn("onceq: a queue with transactional handlers has a Concurrency above the pool's MaxConns, and gets MaxConns instead; raise MaxConns, or lower Concurrency",
					slog.String("queue", name), slog.Int("concurrency", c.Concurrency), slog.Int("connections", size))
				c.Concurrency = size
			}
			asked += c.Concurrency
			w.mayHold = max(w.mayHold, usual, min(size, asked))
		}
		keep, err := keepTime("QueueConfig.Keep", c.Keep, nil)
		if err != nil {
			return err
		}
		w.queues[name], w.keeps[name] = c, keep
	}
	return nil
}

// Run works until ctx ends. Then it stops claiming, waits for running handlers, cancels those that take longer
// than ShutdownTimeout, gives unfinished jobs back without spending an attempt, and returns nil. It returns an
// error if the database cannot be reached at the start, if Check returns an error then, if the pool is closed
// meanwhile, and if handlers did not return although they were cancelled, or their transactions could not be
// committed within a lease: the connections of their transactions are closed, and their leases run out.
//
// If all handlers return when their context ends, Run returns when they have returned and their outcomes are stored; it
// tries to store them for as long as a lease. If some do not return, Run returns at most ShutdownTimeout, which counts as 5 s
// at least, and 20 seconds after the end of ctx: 5 s for cancelled handlers to return, 5 s for outcomes, 5 s to withdraw what
// it announced, and 5 s to close its own connections. Then Run gives up. It does not know whether the database has stored the
// last outcomes that it sent; jobs whose outcome is not stored run again when their leases have run out. If the database does
// not answer, or somebody has locked a table, Run can take a lease longer, or 30 s if that is more, because of a statement
// that is under way.
//
// Once Run has started, it does not return because the database is lost: it continues when the database is back. A pool that
// is closed never comes back: Run stops as if ctx had ended, and returns an error.
func (w *Worker) Run(ctx context.Context) error { return w.run(ctx, -1) }

// Drain works like Run until limit jobs have been claimed, or until nothing is due and no handler that could enqueue more is
// running. What is paused (PauseQueue) is left where it is. A limit of 0 means no limit. It returns when every job that it
// claimed has been dealt with. It is for tests, and for work that is started by a schedule. If ctx ends earlier, Drain stops
// as Run does and returns an error that matches the context's error.
func (w *Worker) Drain(ctx context.Context, limit int) error {
	if limit < 0 {
		return invalid("Drain", "has limit %d; use 0 for no limit", limit)
	}
	if limit == 0 {
		limit = math.MaxInt
	}
	return w.run(ctx, limit)
}

// run is Run, or Drain if limit is not negative.
func (w *Worker) run(ctx context.Context, limit int) error {
	if !w.running.CompareAndSwap(false, true) {
		return errors.New("onceq: Run or Drain of this Worker is already running; make another Worker")
	}
	defer w.running.Store(false)
	w.q.pauses.Forget() // what was paused before now counts
	err := w.q.Check(ctx)
	if err == nil {
		err = w.q.identify(ctx, w.q.store.Pool)
	}
	var own *pg.Conns
	if err == nil {
		own, err = pg.Connect(ctx, w.q.store.Pool)
	}
	switch {
	case err != nil && ctx.Err() != nil && limit < 0:
		return nil // it was to end
	case err != nil:
		return err
	}
	r := newRun(ctx, w, own, limit >= 0)
	w.now.Store(r)
	failed, left := r.work(ctx, limit)
	w.now.Store(nil)
	own.Disconnect(left == nil)
	return errors.Join(failed, left)
}

// face is what a run's executor asks of this package, which alone knows leases, errors and events: see
// executor.Face.
type face struct {
	w      *Worker
	db     DB // for what handlers do without a transaction
	limits presence.Limits
}

func (f *face) Lost(h *hold.Hold, op string) error {
	if h == nil {
		return fmt.Errorf("%w: of a job in the batch", ErrLeaseLost)
	}
	return leaseOf(h).lostError(op)
}

func (f *face) Loses(ctx context.Context, h *hold.Hold, stale bool, err error) {
	e := leaseOf(h).event(EventLeaseLost)
	if stale {
		e.Type = EventStale
	}
	e.Err = err
	f.w.q.emit(ctx, e)
}

func (f *face) Failure(h *hold.Hold, err error) finish.Outcome { return leaseOf(h).failure(err) }
func (f *face) Decides(err error) (decides, again bool) {
	return !decidesNothing(err), reschedules(err)
}

func (f *face) Finish(ctx context.Context, db pg.DB, by pg.Way, outcomes []finish.Outcome) (stale []*hold.Hold,
	left []finish.Outcome, err error) {
	return f.w.q.finish(ctx, db, by, outcomes)
}

func (f *face) Wrote(ctx context.Context, o finish.Outcome, ok bool) { f.w.q.wrote(ctx, o, ok) }
func (f *face) Heed(ctx context.Context, db pg.DB, ids []int64)      { f.w.q.heed(ctx, db, ids) }

func (f *face) Read(rows pgx.Rows, n *executor.Next, before []any) (*hold.Hold, error) {
	l := &Lease{
		Queue: n.Queue, origin: origin{q: f.w.q, db: f.db},
		hold: hold.Hold{Queue: n.Queue, Holder: n.Holder, Began: n.Began},
	}
	var place int64
	var cut bool
	if err := l.read(rows, time.Time{}, f.w.lease, &place, &cut, before...); err != nil {
		return nil, err
	}
	f.takes(l)
	return &l.hold, nil
}

func (f *face) Claimed(ctx context.Context, h *hold.Hold) {
	if f.w.q.watched(EventClaimed.Level()) {
		l := leaseOf(h)
		f.w.q.claimed(ctx, l, l.RunAt)
	}
}

// takes prepares a lease for a handler of the worker.
func (f *face) takes(l *Lease) {
	l.h = f.w.handlers[l.Kind]
	l.hold.Timeout = l.timeoutFor(l.h.runs.Timeout)
	if l.Limit != "" {
		f.limits.Meet(l.Limit)
	}
}

// claims is what a run's claimer asks: see claimer.Worker.
type claims struct {
	*executor.Executor
	face *face
}

func (c claims) Claim(ctx context.Context, db pg.Quick, kinds []string, asks []*claimer.Ask) error {
	return claimJobs(ctx, c.face.w.q, db, c.Lease, c.ID, kinds, asks)
}

func (c claims) ClaimOne(ctx context.Context, db pg.Quick, kinds []string, ask *claimer.Ask,
	few []int64) (gone int, err error) {
	all := []*claimer.Ask{ask}
	err = c.face.w.q.claim(ctx, db, c.Lease, c.ID, all, stmt.ClaimOne, few, ask.Queue, kinds)
	if ask.Got() > 0 {
		one := ask.Jobs.(leased)[0]
		gone = DefaultMaxLost - c.face.w.handlers[one.Kind].runs.MaxLost + one.Lost
	}
	return gone, err
}

func (c claims) Accept(queue string, jobs claimer.Jobs, began time.Time) (anyWait bool) {
	holds := make([]*hold.Hold, jobs.Len())
	for i, l := range jobs.(leased) {
		c.face.takes(l)
		holds[i] = &l.hold
	}
	return c.Executor.Accept(queue, holds, began)
}
