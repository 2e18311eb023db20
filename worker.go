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
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/lazytx"
)

// WorkerConfig configures a Worker. The zero value works the queue of each handler's kind.
type WorkerConfig struct {
	// Queues says how to work some of the worker's queues. Those that are not named here are worked with the defaults. The
	// worker's queues are those of its handlers' kinds, and Also.
	Queues map[string]QueueConfig

	// Also names queues that are worked besides: those to which Job.Queue sends jobs of these kinds.
	Also []string

	// Without names queues of the handlers' kinds that are left to other workers.
	Without []string

	// Lease is how long a job stays with a process that died, froze or lost the database, before another
	// worker takes it. Default 30 s; at least 1 s. It is extended every third of it while a handler runs,
	// however long that is, and until a lease after the end of the handler's context: by Timeout, because the job was
	// cancelled, or because the lease was lost. A handler that has not returned by then has its transaction's connection
	// closed, its lease runs out within another one, and its job counts a lost lease (Kind.MaxLost) and goes to whoever is
	// free. The log says so, and Health of this Queue as long as it lasts: such a handler keeps its slot.
	//
	// A process that freezes inside of a transactional handler is cut off by the server after a lease, two seconds at least.
	Lease time.Duration

	// PollInterval is the longest that a worker without work waits until it looks again, jittered. Default one
	// second where notifications arrive, which make it find new jobs within a millisecond or so; a quarter
	// of one where they cannot, as behind PgBouncer in transaction mode and, for jobs enqueued in a transaction, on servers
	// that allow prepared transactions.
	PollInterval time.Duration

	// ShutdownTimeout is how long Run waits for running handlers after its context has ended, before it
	// cancels theirs. Default 20 s. Negative: they are cancelled at once.
	ShutdownTimeout time.Duration
}

// QueueConfig configures one queue of a worker.
type QueueConfig struct {
	// Concurrency is how many handlers run at once; of batch handlers, how many batches. Default 100. In a queue that has
	// transactional kinds (HandleTx, HandleBatch) each running handler holds a connection of the pool: there it is by
	// default three quarters of the pool's MaxConns, one less at least, and never more than MaxConns. All such queues of a
	// Queue's workers share these connections, so that no worker holds jobs for which there is none. What is left over is
	// for what handlers ask of the pool itself: a pool of n connections with n such handlers running, each of which waits
	// for one more, stands still until their timeout. The log says so and what holds them.
	Concurrency int

	// Keep is how long completed and cancelled jobs stay in the history, where their kind does not say.
	// Default 0, not at all; Forever until somebody discards them.
	Keep time.Duration
}

const (
	defaultConcurrency = 100
	defaultShutdown    = 20 * time.Second
	abandonAfter       = 5 * time.Second // how long a cancelled handler may take to return
	rollbackTimeout    = 5 * time.Second
	ownConnections     = 6    // claims, completions and effects of one worker
	maxPrefetch        = 2000 // jobs claimed beyond what runs
	prefetchTime       = 25 * time.Millisecond
	conflictTries      = 10 // of a handler's transaction that Postgres wants run again
)

var errShutdown = errors.New("onceq: the worker is shutting down")

// Worker runs handlers for the jobs of one or more queues. Any number of workers, in any number of processes
// and versions, may work the same queues.
type Worker struct {
	// Only NewWorker writes these.
	q        *Queue
	handlers map[string]*Handler
	kinds    []string
	queues   map[string]QueueConfig
	keeps    map[string]int64
	lease    time.Duration
	poll     time.Duration // 0 for the default
	ahead    time.Duration // jobs are claimed for as long as they take to be worked on
	shutdown time.Duration

	pooledIn  map[string]bool // queues with transactional kinds
	mayHold   int             // connections of the pool, for handlers' transactions
	pipelines bool            // see lazytx.Pipelines

	running atomic.Bool // Run or Drain is; a second one is refused
}

// NewWorker checks the configuration and the handlers, at most one for each kind. Jobs of other kinds are left
// alone, for other workers, with one warning in the log.
func NewWorker(q *Queue, cfg WorkerConfig, handlers ...Handler) (*Worker, error) {
	if q == nil {
		return nil, errors.New("onceq: NewWorker needs a queue")
	}
	pool := q.pool.Config()
	w := &Worker{
		q: q, handlers: make(map[string]*Handler), queues: make(map[string]QueueConfig), keeps: make(map[string]int64), pooledIn: make(map[string]bool),
		lease: cmp.Or(cfg.Lease, DefaultLease), ahead: prefetchTime, poll: cfg.PollInterval, shutdown: cmp.Or(cfg.ShutdownTimeout, defaultShutdown),
		pipelines: lazytx.Pipelines(pool.ConnConfig),
	}
	if err := w.addHandlers(handlers); err != nil {
		return nil, err
	}
	if err := w.chooseQueues(&cfg); err != nil {
		return nil, err
	}
	if err := w.tuneQueues(int(pool.MaxConns)); err != nil {
		return nil, err
	}
	if w.lease < time.Second {
		return nil, invalid("WorkerConfig.Lease", "is %s; at least a second, so that a beat that comes late loses nothing", w.lease)
	}
	if w.poll < 0 || w.poll > time.Hour {
		return nil, invalid("WorkerConfig.PollInterval", "is %s; 0 to an hour is possible", w.poll)
	}
	return w, nil
}

// addHandlers takes the handlers, and the queues of their kinds.
func (w *Worker) addHandlers(handlers []Handler) error {
	if len(handlers) == 0 {
		return errors.New("onceq: NewWorker needs at least one handler; make one with Kind.Handle")
	}
	for i := range handlers {
		h := handlers[i]
		if h.err != nil {
			return h.err
		}
		if h.kind == "" {
			return errors.New("onceq: a zero Handler; make one with Kind.Handle")
		}
		if w.handlers[h.kind] != nil {
			return fmt.Errorf("onceq: two handlers for kind %q", h.kind)
		}
		w.handlers[h.kind] = &h
		w.kinds = append(w.kinds, h.kind)
		w.pooledIn[h.queue] = w.pooledIn[h.queue] || h.tx != nil || h.batch != nil
		w.queues[h.queue] = QueueConfig{}
	}
	slices.Sort(w.kinds)
	return nil
}

// chooseQueues says which queues the worker works: those of its kinds, as the configuration adds to them and takes away.
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
			return invalid("WorkerConfig.Also", "names queue %q, and so does Without", name)
		}
		w.queues[name] = QueueConfig{}
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

// tuneQueues sets what the configuration leaves open, for a pool of so many connections.
func (w *Worker) tuneQueues(size int) error {
	asked := 0
	for name, c := range w.queues {
		if err := checkName("WorkerConfig.Queues", name, MaxNameBytes); err != nil {
			return err
		}
		if c.Concurrency < 0 || c.Concurrency > 10_000 {
			return invalid("QueueConfig.Concurrency", "of %q is %d; 1 to 10,000 is possible", name, c.Concurrency)
		}
		switch usual := max(1, size-max(1, size/4)); {
		case !w.pooledIn[name]:
			c.Concurrency = cmp.Or(c.Concurrency, defaultConcurrency)
		case c.Concurrency == 0:
			c.Concurrency = min(defaultConcurrency, usual)
			w.mayHold = max(w.mayHold, usual)
		default:
			if c.Concurrency > size {
				w.q.log.Warn("onceq: a queue's Concurrency is above what the pool has connections for its transactional handlers; raise the pool's MaxConns",
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

// Run works until ctx ends, then stops claiming, waits for running handlers, cancels those that take longer
// than ShutdownTimeout, gives unfinished jobs back without spending an attempt, and returns nil. It
// returns an error when the database cannot be reached at the start, when the schema is missing or of another version,
// and when handlers did not return although they were cancelled: their transactions' connections are closed, and their
// leases run out.
//
// Where handlers obey their context it returns when they have, and their outcomes are stored, for which it tries as long
// as a lease. Where some do not, it returns ShutdownTimeout and 20 seconds after the end of ctx at the latest: 5 for
// cancelled handlers to return, 5 for outcomes, and 10 to close its own connections. Outcomes that could not be stored by
// then are lost, and their jobs run again when their leases have run out. Where the database does not answer, add a lease, for
// a claim that is under way.
//
// Once it works, a lost database is no reason to return: the worker goes on when it is back.
func (w *Worker) Run(ctx context.Context) error { return w.run(ctx, -1) }

// Drain works like Run until limit jobs were claimed or nothing is due, in which case it waits for what its
// handlers may still enqueue. A limit of 0 is none. It returns when all that it claimed has been dealt with: for tests,
// and for work that is started by a schedule. Where its context ends before, it stops as Run does and returns an error that
// matches the context's.
func (w *Worker) Drain(ctx context.Context, limit int) error {
	if limit < 0 {
		return invalid("Drain", "has limit %d; 0 is none", limit)
	}
	if limit == 0 {
		limit = math.MaxInt
	}
	return w.run(ctx, limit)
}

// run is Run, or with a limit from 0 on Drain.
func (w *Worker) run(ctx context.Context, limit int) error {
	if !w.running.CompareAndSwap(false, true) {
		return errors.New("onceq: Worker.Run is already running; make a worker for each")
	}
	defer w.running.Store(false)
	if err := w.q.Check(ctx); err != nil {
		if ctx.Err() != nil && limit < 0 {
			return nil
		}
		return err
	}
	if err := w.q.identify(ctx, w.q.pool); err != nil {
		return err
	}
	db, beats, err := w.connect(ctx)
	if err != nil {
		return err
	}
	r := newRun(ctx, w, db, beats)
	failed, left := r.work(ctx, limit)
	disconnect(left == nil, db, beats)
	return errors.Join(failed, left)
}

// connect opens the worker's own pools: statements of the library's own never wait for a connection that a handler holds.
// Nor do beats wait for one that waits for a lock: an effect's fence may be locked for long.
func (w *Worker) connect(ctx context.Context) (db, beats *pgxpool.Pool, err error) {
	cfg := w.q.pool.Config()
	cfg.MaxConns, cfg.MinConns, cfg.MinIdleConns = ownConnections, 0, 0
	if db, err = pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg); err == nil {
		cfg = cfg.Copy()
		cfg.MaxConns = 1
		if beats, err = pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg); err == nil {
			return db, beats, nil
		}
		db.Close()
	}
	return nil, nil, fmt.Errorf("onceq: the worker's own connections: %w", err)
}

// disconnect closes the worker's own pools, which waits for whoever has one of their connections; where handlers did not
// return, not for long.
func disconnect(returned bool, pools ...*pgxpool.Pool) {
	closed := make(chan struct{})
	go func() {
		for _, pool := range pools {
			pool.Close()
		}
		close(closed)
	}()
	if returned {
		<-closed
	} else {
		within(closed, rollbackTimeout)
	}
}

func within(done <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		select {
		case <-done:
			return true
		default:
			return false
		}
	}
}

// sleep waits for d, or until wake or ctx; false when ctx has ended.
func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-wake:
	case <-ctx.Done():
		return false
	}
	return true
}
