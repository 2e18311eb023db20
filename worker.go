package onceq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
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
	sideConnections    = 6    // claims, completions and effects of one worker
	maxPrefetch        = 2000 // jobs claimed beyond what runs
	prefetchTime       = 25 * time.Millisecond
	conflictTries      = 10 // of a handler's transaction that Postgres wants run again
)

var errShutdown = errors.New("onceq: the worker is shutting down")

// Worker runs handlers for the jobs of one or more queues. Any number of workers, in any number of processes
// and versions, may work the same queues.
type Worker struct {
	q        *Queue
	handlers map[string]*Handler
	kinds    []string
	queues   map[string]QueueConfig
	keeps    map[string]int64
	lease    time.Duration
	poll     time.Duration // 0 for the default
	ahead    time.Duration // jobs are claimed for as long as they take to be worked on
	shutdown time.Duration
	running  atomic.Bool

	pooledIn  map[string]bool // queues with transactional kinds
	mayHold   int             // connections of the pool, for handlers' transactions
	pipelines bool            // see pipelines
}

// NewWorker checks the configuration and the handlers, at most one for each kind. Jobs of other kinds are left
// alone, for other workers, with one warning in the log.
func NewWorker(q *Queue, cfg WorkerConfig, handlers ...Handler) (*Worker, error) {
	w := &Worker{
		q: q, handlers: make(map[string]*Handler), queues: make(map[string]QueueConfig), keeps: make(map[string]int64), pooledIn: make(map[string]bool),
		lease: cfg.Lease, ahead: prefetchTime, poll: cfg.PollInterval, shutdown: cfg.ShutdownTimeout,
	}
	if q == nil {
		return nil, errors.New("onceq: NewWorker needs a queue")
	}
	if len(handlers) == 0 {
		return nil, errors.New("onceq: NewWorker needs at least one handler; make one with Kind.Handle")
	}
	pool := q.pool.Config()
	w.pipelines = pipelines(pool.ConnConfig)
	size := int(pool.MaxConns)
	for i := range handlers {
		h := handlers[i]
		if h.err != nil {
			return nil, h.err
		}
		if h.kind == "" {
			return nil, errors.New("onceq: a zero Handler; make one with Kind.Handle")
		}
		if w.handlers[h.kind] != nil {
			return nil, fmt.Errorf("onceq: two handlers for kind %q", h.kind)
		}
		w.handlers[h.kind] = &h
		w.kinds = append(w.kinds, h.kind)
		w.pooledIn[h.queue] = w.pooledIn[h.queue] || h.tx != nil || h.batch != nil
		w.queues[h.queue] = QueueConfig{}
	}
	slices.Sort(w.kinds)
	for _, name := range cfg.Without {
		if _, ok := w.queues[name]; !ok {
			return nil, invalid("WorkerConfig.Without", "names queue %q, which is the queue of no handler's kind; these are: %q", name, slices.Sorted(maps.Keys(w.queues)))
		}
	}
	for _, name := range cfg.Without {
		delete(w.queues, name)
	}
	for _, name := range cfg.Also {
		if slices.Contains(cfg.Without, name) {
			return nil, invalid("WorkerConfig.Also", "names queue %q, and so does Without", name)
		}
		w.queues[name] = QueueConfig{}
	}
	if len(w.queues) == 0 {
		return nil, invalid("WorkerConfig.Without", "leaves the worker no queue, so its handlers would never run")
	}
	for name, c := range cfg.Queues {
		if _, ok := w.queues[name]; !ok {
			return nil, invalid("WorkerConfig.Queues", "names queue %q, which this worker does not work. Its queues are %q: those of its handlers' kinds,"+
				" and WorkerConfig.Also, which names those to which Job.Queue sends jobs of these kinds", name, slices.Sorted(maps.Keys(w.queues)))
		}
		w.queues[name] = c
	}
	asked := 0
	for name, c := range w.queues {
		if err := checkName("WorkerConfig.Queues", name, MaxNameBytes); err != nil {
			return nil, err
		}
		if c.Concurrency < 0 || c.Concurrency > 10_000 {
			return nil, invalid("QueueConfig.Concurrency", "of %q is %d; 1 to 10,000 is possible", name, c.Concurrency)
		}
		switch usual := max(1, size-max(1, size/4)); {
		case !w.pooledIn[name]:
			c.Concurrency = cmp.Or(c.Concurrency, defaultConcurrency)
		case c.Concurrency == 0:
			c.Concurrency = min(defaultConcurrency, usual)
			w.mayHold = max(w.mayHold, usual)
		default:
			if c.Concurrency > size {
				q.log.Warn("onceq: a queue's Concurrency is above what the pool has connections for its transactional handlers; raise the pool's MaxConns",
					slog.String("queue", name), slog.Int("concurrency", c.Concurrency), slog.Int("connections", size))
				c.Concurrency = size
			}
			asked += c.Concurrency
			w.mayHold = max(w.mayHold, usual, min(size, asked))
		}
		keep, err := keepTime("QueueConfig.Keep", c.Keep, nil)
		if err != nil {
			return nil, err
		}
		w.queues[name], w.keeps[name] = c, keep
	}
	if w.lease == 0 {
		w.lease = DefaultLease
	}
	if w.lease < time.Second {
		return nil, invalid("WorkerConfig.Lease", "is %s; at least a second, so that a beat that comes late loses nothing", w.lease)
	}
	if w.poll < 0 || w.poll > time.Hour {
		return nil, invalid("WorkerConfig.PollInterval", "is %s; 0 to an hour is possible", w.poll)
	}
	if w.shutdown == 0 {
		w.shutdown = defaultShutdown
	}
	return w, nil
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
	// Statements of the library's own never wait for a connection that a handler holds.
	cfg := w.q.pool.Config()
	cfg.MaxConns, cfg.MinConns, cfg.MinIdleConns = sideConnections, 0, 0
	side, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg)
	if err != nil {
		return fmt.Errorf("onceq: the worker's own connections: %w", err)
	}
	// Nor do beats wait for one that waits for a lock: an effect's fence may be locked for long.
	cfg = cfg.Copy()
	cfg.MaxConns = 1
	pulse, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg)
	if err != nil {
		return fmt.Errorf("onceq: the worker's own connections: %w", err)
	}
	var left error // handlers that did not return
	defer func() {
		closed := make(chan struct{})
		go func() {
			side.Close() // waits for whoever has one of its connections
			pulse.Close()
			close(closed)
		}()
		if left == nil {
			<-closed
		} else {
			within(closed, rollbackTimeout)
		}
	}()

	r := &run{Worker: w, side: side, pulse: pulse, id: rand.Int64(), tasks: make(map[int64]*task)}
	var giveUp context.CancelFunc
	r.writing, giveUp = context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	var cancel context.CancelCauseFunc
	r.base, cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(errShutdown)
	r.finisher.ready.L = &r.finisher.mu
	r.finisher.room.L = &r.finisher.mu
	defer w.q.ends(r)

	// Who waits for whom at the end: claimers and the listener end with ctx; handlers end when their channel is
	// closed and drained; the beat ends when they have; the finisher when nothing can come any more.
	var claimers, finishers, beats sync.WaitGroup
	for name, c := range w.queues {
		l := newLane(r, name, c)
		r.lanes = append(r.lanes, l)
		if l.pooled {
			w.q.connections.join(l)
			defer w.q.connections.leave(l)
		}
		for range l.slots {
			r.handling.Go(l.work)
		}
	}
	r.budget, r.drainers, r.resting = limit, len(r.lanes), make(map[*lane]bool)
	failed := make([]error, len(r.lanes))
	for i, l := range r.lanes {
		claimers.Go(func() {
			if limit < 0 {
				l.loop(ctx)
			} else {
				failed[i] = l.drain(ctx)
			}
			close(l.ready)
		})
	}
	if limit < 0 {
		claimers.Go(func() { r.listen(ctx) })
	}
	for range 2 {
		finishers.Go(r.finishLoop)
	}
	stopBeats := make(chan struct{})
	beats.Go(func() { r.beatLoop(stopBeats) })
	if slices.Contains(slices.Collect(maps.Values(w.pooledIn)), true) {
		beats.Go(func() { r.pingLoop(stopBeats) })
	}

	drained := make(chan struct{})
	if limit >= 0 {
		go func() {
			claimers.Wait()
			r.handling.Wait()
			close(drained)
		}()
	}
	select {
	case <-ctx.Done():
	case <-drained:
	}
	r.stopping.Store(true)
	claimers.Wait()
	// What was claimed ahead goes back at once, also where handlers that take their time hold all slots.
	for _, l := range r.lanes {
		for u := range l.ready {
			l.giveBack(u)
		}
	}
	returned := make(chan struct{})
	go func() {
		r.handling.Wait()
		close(returned)
	}()
	if !within(returned, max(0, w.shutdown)) {
		cancel(errShutdown)
		if !within(returned, abandonAfter) {
			if left = r.abandoned(); left != nil {
				time.AfterFunc(rollbackTimeout, giveUp)
			}
		}
	}
	r.finisher.close()
	finishers.Wait()
	close(stopBeats)
	beats.Wait()
	r.unannounceAll()
	if r.cutShort.Load() {
		left = errors.Join(left, fmt.Errorf("onceq: Drain was ended with work left: %w", context.Cause(ctx)))
	}
	return errors.Join(append(failed, left)...)
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

// run is one Run of a worker.
type run struct {
	*Worker
	side     *pgxpool.Pool
	pulse    *pgxpool.Pool   // of the beats alone
	id       int64           // names this run among the waiters
	base     context.Context // of all handlers
	writing  context.Context // of outcomes and beats
	lanes    []*lane
	stopping atomic.Bool
	handling sync.WaitGroup // goroutines that run handlers
	finisher finisher
	draining sync.Mutex     // of Drain: lets one lane claim at a time, and guards what follows
	budget   int            // how many jobs may still be claimed
	drainers int            // lanes that have not given up
	resting  map[*lane]bool // those that found nothing since any found something or a handler ran

	mu    sync.Mutex      // guards tasks and every task's fields
	tasks map[int64]*task // by token; from the claim until the outcome is written or the lease is lost

	cutShort  atomic.Bool // Drain, by its context
	listening atomic.Bool // notifications are known to arrive
	silent    atomic.Bool // but not of jobs that were enqueued in a transaction
	crowd     crowd       // of the beats
	anyLate   atomic.Bool // a handler did not return, ever
	crowded   atomic.Bool // all connections of the pool are in use, and none came free lately
}

// task is the worker's side of one lease.
type task struct {
	lease     *Lease
	h         *Handler
	extended  time.Time       // just before the claim or the latest beat that found it alive
	ctx       *handlerContext // once it runs, or waits for a connection
	tx        *handlerTx      // the transaction that it runs in, nil for none
	since     time.Time       // when its handler was called
	lost      error           // why it must not run, or run on
	finishing bool            // its outcome is on the way: the row may be gone
	late      bool            // its handler did not return, and is not waited for any more
}

// abandoned names the jobs whose handlers ignore their context, and closes their transactions' connections.
func (r *run) abandoned() error {
	var kinds []string
	var open []*handlerTx
	n := 0
	r.mu.Lock()
	for _, t := range r.tasks {
		if t.ctx != nil && !t.finishing {
			n++
			kinds = append(kinds, t.lease.Kind)
			if t.tx != nil {
				open = append(open, t.tx)
			}
		}
	}
	r.mu.Unlock()
	for _, tx := range open {
		tx.giveUp()
	}
	slices.Sort(kinds)
	if n == 0 {
		return nil
	}
	return fmt.Errorf("onceq: %d handlers did not return after their context was cancelled (kinds %q); their leases run out", n, slices.Compact(kinds))
}

// unit is what one handler call gets: one task, or the tasks of a batch.
type unit struct {
	one  *task
	many []*task
}

func (u unit) tasks() []*task {
	if u.one != nil {
		return []*task{u.one}
	}
	return u.many
}

// lane is one queue of a run: one claimer, and slots goroutines that run handlers.
type lane struct {
	*run
	queue     string
	slots     int
	width     int  // jobs that one slot takes at once
	startsAll bool // nothing is claimed ahead: a kind's first lost lease is its last, and only what was started may lose one
	keep      int64
	ready     chan unit
	pooled    bool // it has transactional kinds: each of their running handlers holds a connection of the pool

	outstanding atomic.Int64 // claimed or about to be, and their handler has not returned
	busy        atomic.Int32 // slots that run handlers
	suspected   atomic.Int32 // slots that suspects have
	returned    atomic.Int64 // jobs whose handlers returned, ever
	worked      atomic.Int64 // nanoseconds that they took, one after the other in each slot
	low         atomic.Int64 // outstanding at which the claimer wants to hear
	room        chan struct{}
	wake        chan struct{} // a notification

	// Owned by the claimer.
	reserved   int64      // of outstanding: for the claim that is on its way
	suspects   []int64    // jobs seen that have lost a lease, those first that did so least often
	othersTurn bool       // a suspect was claimed, and nothing else was looked for since
	at         []position // how far it has claimed, by priority
	trails     [PriorityLow - PriorityHigh + 1]trail
	through    [PriorityLow - PriorityHigh + 1]bool // the latest look at that priority came to its end
	round      int
	full       bool      // the last claim was: there is more
	rate       float64   // handlers that return in a second
	workedOn   int64     // jobs and
	workedUpTo int64     // nanoseconds that do not count any more
	counted    int64     // returned, when rate was last taken
	countedAt  time.Time //
	claimedAt  time.Time
	claimedTo  time.Time     // the database's clock just before that
	lookedAt   time.Time     // last claim that looked
	lookTook   time.Duration // and what it cost
	widelyAt   time.Time     // last one over the whole margin
	wideTook   time.Duration
	sweptAt    time.Time
	sweepEnded time.Time
	sweepTook  time.Duration
	found      time.Time // last claim that found something
	announced  time.Time // zero: not announced
	announcing time.Time // the latest try
	unknown    map[string]bool
	claimFails int
}

func newLane(r *run, queue string, c QueueConfig) *lane {
	l := &lane{
		run: r, queue: queue, slots: c.Concurrency, width: 1, keep: r.keeps[queue], at: fromStart(), pooled: r.pooledIn[queue],
		room: make(chan struct{}, 1), wake: make(chan struct{}, 1), unknown: make(map[string]bool),
	}
	for _, h := range r.handlers {
		l.width = max(l.width, h.size)
		l.startsAll = l.startsAll || h.maxLost == 1
	}
	// Never blocks: no more units than jobs, and no more jobs than this are claimed.
	l.ready = make(chan unit, l.slots*l.width+maxPrefetch)
	return l
}

// loop claims and hands out until ctx ends.
func (l *lane) loop(ctx context.Context) {
	pause := time.Millisecond
	for {
		n, suspect := l.waitRoom(ctx)
		var found int
		var err error
		switch {
		case suspect:
			found, err = l.claimSuspect(ctx)
		case n > 0:
			found, err = l.claimSome(ctx, n)
		}
		l.unreserve()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			l.claimFails++
			wait := min(5*time.Second, 50*time.Millisecond<<min(l.claimFails, 10))
			l.q.fails(l.run, workClaim, l.queue, err, slog.Duration("next_try_in", wait))
			l.announced = time.Time{}
			if !sleep(ctx, wait/2+rand.N(wait), nil) {
				return
			}
			continue
		}
		l.claimFails = 0
		l.q.works(l.run, workClaim, l.queue)
		if found > 0 {
			pause = time.Millisecond
		}
		if suspect {
			continue
		}
		if moved := l.lookBehind(ctx); moved || l.full {
			continue
		}
		woken := l.rest(ctx, pause)
		if ctx.Err() != nil {
			return
		}
		if pause *= 2; woken {
			pause = time.Millisecond
		}
	}
}

// drain claims and hands out until the budget is used up, or nothing is due in any lane and nothing runs: what runs for
// one lane may enqueue for another.
func (l *lane) drain(ctx context.Context) error {
	for {
		n, suspect := l.waitRoom(ctx)
		l.draining.Lock()
		if l.budget == 0 || n == 0 {
			l.cutShort.Store(l.cutShort.Load() || l.budget > 0) // by ctx
			l.draining.Unlock()
			l.unreserve()
			return nil
		}
		l.mu.Lock()
		idle := len(l.tasks) == 0
		l.mu.Unlock()
		found, err := l.drainSome(ctx, min(n, l.budget), suspect)
		l.unreserve()
		l.budget -= found
		switch {
		case err != nil:
			l.drainers--
			delete(l.resting, l)
			if ctx.Err() != nil {
				l.cutShort.Store(true) // the error is that of a statement which it ended
			}
		case found > 0 || !idle || len(l.suspects) > 0:
			clear(l.resting)
		default:
			l.resting[l] = true
		}
		done := len(l.resting) == l.drainers
		if done {
			l.budget = 0 // for the others as well
		}
		l.draining.Unlock()
		switch {
		case err != nil && ctx.Err() == nil:
			return err
		case done:
			return nil
		case found == 0:
			sleep(ctx, 2*time.Millisecond, l.room)
		}
	}
}

// drainSome claims for drain: a suspect, where there is one that may start, or up to n other jobs.
func (l *lane) drainSome(ctx context.Context, n int, suspect bool) (found int, err error) {
	if !suspect && len(l.suspects) == 0 {
		if err := l.lookForSuspects(ctx, false); err != nil {
			return 0, err
		}
		suspect = l.suspectDue() && l.outstanding.Load()-l.reserved <= int64((l.slots-1)*l.width)
	}
	if suspect {
		return l.claimSuspect(ctx)
	}
	l.at = fromStart()
	if found, err = l.claimSome(ctx, n); err == nil && found == 0 && len(l.suspects) == 0 {
		err = l.lookForSuspects(ctx, true)
	}
	return found, err
}

// waitRoom waits until it is worth claiming and gives how many jobs, or that it is the turn of a suspect; 0 when ctx has
// ended. While there is more than it can take, it claims for a quarter of its room at a time, or every few milliseconds.
func (l *lane) waitRoom(ctx context.Context) (n int, suspect bool) {
	const patience = 5 * time.Millisecond
	for {
		if ctx.Err() != nil {
			return 0, false
		}
		suspect = l.suspectDue()
		now := time.Now()
		if d := now.Sub(l.countedAt); d > 2*time.Millisecond {
			returned := l.returned.Load()
			rate := float64(returned-l.counted) / d.Seconds()
			l.rate = (l.rate + rate) / 2
			l.counted, l.countedAt = returned, now
		}
		prefetch := min(maxPrefetch, int64(min(l.rate, l.could())*l.ahead.Seconds()))
		if l.startsAll {
			prefetch = 0
		}
		slots := l.slots
		if l.pooled {
			l.q.connections.mu.Lock()
			slots = l.q.connections.allow(l)
		}
		limit, need := int64(slots*l.width)+prefetch, int64(1)
		waited := now.Sub(l.claimedAt)
		switch {
		case suspect:
			limit, need = int64((slots-1)*l.width), 0 // the next slot is the suspect's
		case l.full && waited < patience:
			need = max(1, limit/4)
		}
		free := limit - l.outstanding.Load()
		if n = int(min(free, maxPrefetch)); suspect {
			n = l.width
		}
		enough := free >= need
		if l.pooled {
			if enough {
				l.reserved = int64(n)
				l.outstanding.Add(l.reserved)
			}
			l.q.connections.mu.Unlock()
		}
		if enough {
			return n, suspect
		}
		l.low.Store(limit - need)
		timer := time.NewTimer(max(time.Millisecond, patience-waited))
		switch {
		case l.pooled:
			timer.Reset(20 * time.Millisecond) // the application gives connections back without a word
		case need <= 1:
			timer.Reset(time.Second)
		}
		if limit-l.outstanding.Load() < need {
			select {
			case <-l.room:
			case <-timer.C:
			case <-ctx.Done():
			}
		}
		timer.Stop()
		l.low.Store(-1)
	}
}

// could is how many handlers could return in a second, as long as they took so far on average: some long ones that end
// together are no reason to claim ahead.
func (l *lane) could() float64 {
	worked, returned := l.worked.Load(), l.returned.Load()
	if returned < 100 {
		return 0 // too few to say
	}
	// Of late only.
	if returned-l.workedOn > 1000 {
		l.workedUpTo, l.workedOn = l.workedUpTo+(worked-l.workedUpTo)/2, l.workedOn+(returned-l.workedOn)/2
	}
	return float64(l.slots) * float64(returned-l.workedOn) / (time.Duration(worked-l.workedUpTo) + 1).Seconds()
}

// unreserve gives back what waitRoom reserved: what was claimed is outstanding by now.
func (l *lane) unreserve() {
	if n := l.reserved; n > 0 {
		l.reserved = 0
		l.outstanding.Add(-n)
		l.q.connections.wake()
	}
}

// The margin: jobs whose transaction was open for a while appear behind the position, because a job is due
// from the moment of its statement on and not from its commit. Claims look this far back: always in a priority
// that the worker keeps up with, and at intervals of at least 50 times what it costs where there is a backlog. What
// comes later still is found by lookBehind.
//
// While somebody's snapshot is held, a look steps over every job that was done there. So it goes no further back than the
// trail. It goes over the whole margin at intervals of a second or of 50 times what that costs, unless this worker has just
// looked behind everything.
const margin = 5 * time.Second

// trail knows from which due time on the latest jobs were that a lane claimed in a priority.
type trail struct {
	first  [8]time.Time // of each step of jobs, in turn
	passed int
}

const trailStep = 4096 // jobs

func (t *trail) pass(runAt time.Time) {
	first := &t.first[t.passed/trailStep%len(t.first)]
	if t.passed%trailStep == 0 || first.After(runAt) {
		*first = runAt
	}
	t.passed++
}

// start is that of the latest 7 to 8 steps, zero while there were fewer.
func (t *trail) start() time.Time { return slices.MinFunc(t.first[:], time.Time.Compare) }

// lookFrom gives where a claim begins in each priority, highest first. Where it looks it begins with a due time and never
// within one: jobs that lookBehind has brought forward are the first at theirs.
func (l *lane) lookFrom(look, wide bool) []position {
	from := slices.Clone(l.at)
	for i := range from {
		p := &from[i]
		if !look && !l.through[i] {
			continue
		}
		if p.id = 0; p.runAt.After(beginning) {
			p.runAt = p.runAt.Add(-margin)
			if start := l.trails[i].start(); !wide && start.After(p.runAt) {
				p.runAt = start
			}
		}
	}
	return from
}

// lowestEvery is how often a claim begins with the lowest priority.
const lowestEvery = 8

func (l *lane) claimSome(ctx context.Context, n int) (int, error) {
	l.othersTurn = false
	began := time.Now()
	look := !l.full || began.Sub(l.lookedAt) > max(100*time.Millisecond, 50*l.lookTook)
	wide := look && began.Sub(l.sweepEnded) > 2*sweepEvery && began.Sub(l.widelyAt) > max(time.Second, 50*l.wideTook)
	from := l.lookFrom(look, wide)
	if l.round++; l.round%lowestEvery == 0 {
		slices.Reverse(from)
	}
	c := claim{queue: l.queue, kinds: l.kinds, limit: n, lease: l.lease, from: from}
	// Not cut off by the shutdown: a claim that commits while nobody listens leaves leases to run out.
	unbroken, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.lease)
	leases, err := l.q.claim(unbroken, l.side, &c, claimJobs, append(c.args(), max(0, int64(l.slots*l.width)-l.outstanding.Load()+l.reserved))...)
	cancel()
	l.claimedAt = time.Now()
	if err != nil {
		return 0, err
	}
	l.claimedTo = c.now
	if look {
		l.lookedAt, l.lookTook = l.claimedAt, l.claimedAt.Sub(began)
	}
	if wide {
		l.widelyAt, l.wideTook = l.claimedAt, l.claimedAt.Sub(began)
	}
	l.full = len(leases) == n
	l.advance(&c, leases)
	if len(leases) == 0 {
		return 0, nil
	}
	l.handOut(leases, c.began)
	if l.full || l.claimedAt.Sub(l.found) < 50*time.Millisecond {
		l.unannounce(ctx)
	}
	l.found = l.claimedAt
	return len(leases), nil
}

// advance moves the positions behind what was claimed. Where a priority was looked through to its end, that
// is up to the database's clock just before the claim.
func (l *lane) advance(c *claim, leases []*Lease) {
	exhausted := len(c.from)
	if l.full {
		exhausted = 0
		if len(leases) > 0 {
			last := leases[len(leases)-1]
			exhausted = slices.IndexFunc(c.from, func(p position) bool { return p.priority == last.Priority })
		}
	}
	to := func(p position) {
		at := &l.at[p.priority-PriorityHigh]
		if p.after(*at) {
			*at = p
		}
	}
	for _, lease := range leases {
		to(position{lease.Priority, lease.RunAt, lease.ID})
		l.trails[lease.Priority-PriorityHigh].pass(lease.RunAt)
	}
	for i, p := range c.from {
		switch {
		case i < exhausted:
			to(position{p.priority, c.now, 0})
			l.through[p.priority-PriorityHigh] = true
		case i == exhausted:
			l.through[p.priority-PriorityHigh] = false
		}
	}
	// The database's clock was set back, or another server with another clock took over: what is due is behind.
	for i := range l.at {
		if l.at[i].runAt.Sub(c.now) > time.Second {
			l.at[i].runAt, l.at[i].id = c.now, 0
			l.trails[i] = trail{}
		}
	}
}

func (l *lane) handOut(leases []*Lease, began time.Time) {
	l.outstanding.Add(int64(len(leases)))
	tasks := make([]task, len(leases))
	l.mu.Lock()
	for i, lease := range leases {
		t := &tasks[i]
		*t = task{lease: lease, h: l.handlers[lease.Kind], extended: began}
		lease.keep = t.h.keep
		if lease.keep == math.MinInt64 {
			lease.keep = l.keep
		}
		l.tasks[lease.Token] = t
	}
	l.mu.Unlock()
	var batches map[*Handler][]*task
	for i := range tasks {
		t := &tasks[i]
		if worn := t.lease.wornOut(t.h.maxLost); worn != nil {
			l.left([]*task{t})
			l.end(t, *worn)
			continue
		}
		if t.h.batch == nil || t.suspect() {
			l.ready <- unit{one: t}
			continue
		}
		if batches == nil {
			batches = make(map[*Handler][]*task)
		}
		b := append(batches[t.h], t)
		if len(b) == t.h.size {
			l.ready <- unit{many: b}
			b = nil
		}
		batches[t.h] = b
	}
	for _, b := range batches {
		if len(b) > 0 {
			l.ready <- unit{many: b}
		}
	}
}

// work runs handlers until the claimer has ended and nothing is left.
func (l *lane) work() {
	for u := range l.ready {
		l.busy.Add(1)
		l.workOn(u)
	}
}

var errGoexit = errors.New("onceq: the handler ended its goroutine (runtime.Goexit, which FailNow of a test calls)")

func (l *lane) workOn(u unit) {
	tasks := u.tasks()
	began := time.Now()
	returned := false
	defer func() {
		if !returned {
			// Not a panic, those are errors by now. This goroutine ends here, and another one takes its place.
			for _, t := range tasks {
				if !l.ended(t) {
					l.end(t, t.lease.failure(errGoexit, t.h.backoff))
				}
			}
			l.handling.Go(l.work)
		}
		l.worked.Add(int64(time.Since(began)))
		if l.anyLate.Load() {
			for _, t := range tasks {
				l.q.late.Delete(t.lease.Token)
			}
		}
		l.returned.Add(int64(len(tasks)))
		l.busy.Add(-1)
		l.left(tasks)
	}()
	switch h := tasks[0].h; {
	case l.stopping.Load():
		l.giveBack(u)
	case h.lease != nil:
		l.runLease(tasks[0])
	default:
		l.runTx(tasks, h)
	}
	returned = true
}

// left says that tasks take no room any more.
func (l *lane) left(tasks []*task) {
	n := len(tasks)
	if tasks[0].suspect() {
		n = l.width
		l.suspected.Add(-1)
	}
	if l.outstanding.Add(-int64(n)) <= l.low.Load() {
		l.signal()
	}
	if l.pooled {
		l.q.connections.wake()
	}
}

// signal tells the claimer that there may be room.
func (l *lane) signal() {
	select {
	case l.room <- struct{}{}:
	default:
	}
}

// suspect says whether the job has lost a lease: then it was claimed alone.
func (t *task) suspect() bool { return t.lease.Lost > 0 }

// ended reports whether a task's outcome is on its way or written.
func (l *run) ended(t *task) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return t.finishing || l.tasks[t.lease.Token] != t
}

// giveBack ends tasks that were not started, as if they had not been claimed.
func (l *lane) giveBack(u unit) {
	for _, t := range u.tasks() {
		l.end(t, outcome{lease: t.lease, state: StateWaiting})
	}
}

var errTimeout = errors.New("timeout")

// start gives the context of a handler that is about to run; false where the lease is lost already. Its time begins with
// running, when it has what it needs for that.
func (l *lane) start(tasks []*task, h *Handler) (*handlerContext, bool) {
	ctx := &handlerContext{base: l.base}
	ctx.leases = append(ctx.one[:0], tasks[0].lease)
	for _, t := range tasks[1:] {
		ctx.leases = append(ctx.leases, t.lease)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range tasks {
		if t.lost != nil {
			ctx.cancel(t.lost)
			return ctx, false
		}
	}
	for _, t := range tasks {
		t.ctx = ctx
	}
	return ctx, true
}

func (l *lane) runLease(t *task) {
	t.lease.beats, t.lease.timeout = l.lease, t.h.timeout
	for try := 1; l.tryLease(t, try); try++ {
		sleep(l.base, rand.N(time.Duration(try)*5*time.Millisecond), nil)
	}
}

// tryLease calls a handler and passes on what came of it, or says that it is to be called again: Postgres wants a transaction
// of its own run again whose part the completion was.
func (l *lane) tryLease(t *task, try int) (again bool) {
	ctx, ok := l.start([]*task{t}, t.h)
	if !ok {
		l.end(t, l.judge(t, ctx, ctx.why()))
		return false
	}
	defer ctx.cancel(nil)
	began := l.running([]*task{t}, t.h, ctx, nil)
	err := protect(func() error { return t.h.lease(ctx, t.lease) })
	// Not where that is somebody else's error, and the job is completed.
	if t.lease.conflicts(err) && try < conflictTries && ctx.why() == nil && t.lease.lengthen(ctx) {
		t.lease.startOver()
		return true
	}
	o := l.judge(t, ctx, err)
	o.run = time.Since(began)
	l.end(t, o)
	return false
}

// running says that the handler is called now.
func (l *lane) running(tasks []*task, h *Handler, ctx *handlerContext, tx *handlerTx) (began time.Time) {
	began = time.Now()
	if h.timeout > 0 {
		ctx.until(began.Add(h.timeout))
	}
	l.mu.Lock()
	for _, t := range tasks {
		t.since, t.lease.began, t.tx = began, began, tx
	}
	l.mu.Unlock()
	return began
}

// judge gives the outcome of a handler that returned err.
func (l *lane) judge(t *task, ctx *handlerContext, err error) outcome {
	o := l.outcome(t, ctx, err)
	// Where the handler completed the job in a transaction of its own and committed that, the guard no longer holds
	// and this is refused, quietly. If not, nothing of it happened and the job has to run again.
	if o.unsure = t.lease.completedItself(); o.unsure {
		o.late = err
	}
	return o
}

func (l *lane) outcome(t *task, ctx *handlerContext, err error) outcome {
	lease := t.lease
	cause := ctx.why()
	switch {
	case err == nil && lease.completedItself():
		return lease.failure(errors.New("onceq: the handler called Lease.Complete in a transaction that it did not commit"), t.h.backoff)
	case err == nil:
		return outcome{lease: lease, state: StateCompleted, result: lease.result, keep: lease.keep}
	case errors.Is(cause, ErrCancelled):
		keep := lease.keep
		if keep >= 0 {
			keep = max(keep, CancelledKeep.Milliseconds()) // as for one that nobody held
		}
		return outcome{lease: lease, state: StateCancelled, err: errorText(err.Error()), keep: keep, cause: err}
	case errors.Is(cause, errShutdown):
		return outcome{lease: lease, state: StateWaiting, cause: err}
	case errors.Is(cause, errTimeout) && errors.Is(err, context.DeadlineExceeded):
		crowded := ""
		if l.crowded.Load() {
			crowded = " (all connections of the pool were in use; see the log)"
		}
		err = fmt.Errorf("handler ran longer than %s, its kind's Timeout%s: %w", t.h.timeout, crowded, err)
	}
	return lease.failure(err, t.h.backoff)
}

// end passes an outcome on to be written, unless the lease is known to be lost.
func (l *lane) end(t *task, o outcome) {
	l.mu.Lock()
	lost := t.lost
	t.finishing = true
	if lost != nil && !errors.Is(lost, ErrCancelled) {
		l.forget(t.lease)
		l.mu.Unlock()
		return
	}
	l.mu.Unlock()
	l.finisher.add(o)
}

// forget is for a task that has been dealt with: its outcome is written, or its lease lost. The caller holds mu.
func (l *run) forget(lease *Lease) {
	delete(l.tasks, lease.Token)
	if lease.Lost > 0 {
		l.q.suspects.leave(lease.Token)
	}
}

// runTx runs a transactional handler: one task, or a batch.
func (l *lane) runTx(tasks []*task, h *Handler) {
	for try := 1; ; try++ {
		ctx, ok := l.start(tasks, h)
		if !ok {
			if len(tasks) == 1 {
				l.end(tasks[0], l.judge(tasks[0], ctx, ctx.why()))
				return
			}
			for _, t := range tasks {
				l.runTx([]*task{t}, h)
			}
			return
		}
		sure, err := l.transaction(ctx, tasks, h)
		var refused *refusedError
		var committed *committedError
		if conflicts(err) && try < conflictTries && ctx.why() == nil {
			ctx.cancel(nil)
			sleep(l.base, rand.N(time.Duration(try)*5*time.Millisecond), nil)
			continue
		}
		switch {
		case err == nil:
		case errors.As(err, &committed):
			for _, t := range tasks {
				l.end(t, outcome{lease: t.lease, state: StateDead, spend: true, err: errorText(err.Error()), keep: -1, cause: err, run: time.Since(t.lease.began)})
			}
		case len(tasks) > 1:
			// Somebody in the batch is at fault. Each alone shows who.
			ctx.cancel(nil)
			l.mu.Lock()
			for _, t := range tasks {
				t.ctx, t.tx = nil, nil // until it is its turn
			}
			l.mu.Unlock()
			for _, t := range tasks {
				if l.stopping.Load() && l.base.Err() != nil {
					l.end(t, outcome{lease: t.lease, state: StateWaiting})
				} else {
					l.runTx([]*task{t}, h)
				}
			}
			return
		case errors.As(err, &refused):
			l.lose(tasks[0], refused.op, refused.event)
			l.end(tasks[0], outcome{lease: tasks[0].lease, state: StateWaiting})
		default:
			var notBegun *notBegunError
			if errors.As(err, &notBegun) && ctx.why() == nil {
				err = &retryAfter{d: time.Second, err: err, free: true}
			}
			o := l.judge(tasks[0], ctx, err)
			o.unsure = !sure
			l.end(tasks[0], o)
		}
		ctx.cancel(nil)
		return
	}
}

// refusedError says that the guard of a handler's transaction did not hold. A handler cannot return one.
type refusedError struct {
	op    string
	event EventType
}

func (e *refusedError) Error() string { return "onceq: " + e.op + " refused: the lease is lost" }

// notBegunError is why a handler was not called, or got no further than to its first statement. No attempt is spent on it.
type notBegunError struct{ error }

func (e *notBegunError) Unwrap() error { return e.error }

// conflicts reports whether Postgres wants the handler's own transaction run again. What comes from elsewhere, another
// database mostly, is the handler's business.
func conflicts(err error) bool {
	var own *conflictError
	var notBegun *notBegunError
	return errors.As(err, &own) || errors.As(err, &notBegun) && IsRetryable(err)
}

// transaction runs a handler in a transaction and commits it with the completions. A nil error: committed,
// and everything is said. sure is false where an error may stand for a commit whose answer got lost.
func (l *lane) transaction(ctx *handlerContext, tasks []*task, h *Handler) (sure bool, err error) {
	leases := make([]*Lease, len(tasks))
	slices.SortFunc(tasks, func(a, b *task) int { return int(a.lease.ID - b.lease.ID) })
	for i, t := range tasks {
		leases[i] = t.lease
		t.lease.result, t.lease.inTx = "", true
	}
	tx, err := l.newHandlerTx(ctx, leases, h)
	if err != nil {
		return true, &notBegunError{err}
	}
	defer tx.release()
	l.q.connections.held.Add(1)
	defer l.q.connections.held.Add(-1)
	tx.pinged = time.Now()
	began := l.running(tasks, h, ctx, tx)
	err = protect(func() error {
		if h.tx != nil {
			return h.tx(ctx, &tx.root, leases[0])
		}
		return h.batch(ctx, &tx.root, leases)
	})
	tx.close()
	// Whatever the handler made of it.
	switch {
	case tx.lost:
		return true, &refusedError{"begin", EventLeaseLost}
	case tx.notBegun:
		return true, &notBegunError{tx.failed}
	}
	outcomes := make([]outcome, len(leases))
	for i, lease := range leases {
		outcomes[i] = outcome{lease: lease, state: StateCompleted, result: lease.result, keep: lease.keep, run: time.Since(began)}
	}
	again := err != nil && leases[0].failure(err, nil).reset
	if err == nil || again {
		if unfit := tx.unfit(); unfit != nil {
			err, again = unfit, false
		}
	}
	if err != nil && !again {
		return true, tx.undo(err)
	}
	// The handler is done and wants this, so only the guard decides, and not a context that has just ended.
	unbroken, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.lease)
	defer cancel()
	many := len(leases) > 1 || again
	var last statement
	switch {
	case again:
		for i, lease := range leases {
			outcomes[i] = lease.failure(err, nil)
		}
		last = statement{retryJobs, retryArgs(outcomes, true)}
	case !many:
		last.sql, last.args = leases[0].completion()
	case slices.ContainsFunc(outcomes, func(o outcome) bool { return o.keep != 0 }):
		last = statement{endJobs, endArgs(outcomes, true)}
	default:
		last = statement{completeJobs, completeArgs(outcomes, true)}
	}
	l.mu.Lock()
	for _, t := range tasks {
		t.finishing = true
	}
	l.mu.Unlock()
	sure, err = tx.commit(unbroken, many, last)
	if leaseLost(err) {
		err = &refusedError{"complete", EventStale}
	}
	l.mu.Lock()
	for _, t := range tasks {
		if t.finishing = err == nil; err == nil {
			l.forget(t.lease)
		}
	}
	l.mu.Unlock()
	if err == nil {
		for _, o := range outcomes {
			l.q.finished(ctx, o, false)
		}
	}
	return sure, err
}

// lose gives a task up and says so once. The task stays in tasks until its handler has returned.
func (l *run) lose(t *task, op string, event EventType) {
	lost := t.lease.lostError(op)
	l.mu.Lock()
	first := t.lost == nil
	if first {
		t.lost = lost
	}
	ctx := t.ctx
	l.mu.Unlock()
	if ctx != nil {
		ctx.cancel(lost)
	}
	if first {
		e := t.lease.event(event)
		e.Err = lost
		l.q.emit(l.base, e)
	}
}

// beatLoop extends what is held for longer than a third of the lease, and ends what is lost or cancelled.
func (r *run) beatLoop(stop <-chan struct{}) {
	ticker := time.NewTicker(max(200*time.Millisecond, r.lease/12))
	defer ticker.Stop()
	for {
		select {
		case <-stop:
			return
		case <-ticker.C:
		}
		r.beatOnce()
		r.watchPool()
	}
}

const beatChunk = 5000

func (r *run) beatOnce() {
	now := time.Now()
	var due []*task
	var expired []*task
	var late []lateHandler
	r.mu.Lock()
	for _, t := range r.tasks {
		if over := r.overdue(t, now); over > 0 {
			h := lateHandler{t.lease, t.tx, t.since, over}
			late = append(late, h)
			r.q.late.Store(t.lease.Token, h)
		}
		switch held := now.Sub(t.extended); {
		case t.late && held < r.lease:
		case t.lost != nil && !errors.Is(t.lost, ErrCancelled):
		case held >= r.lease && !t.finishing:
			expired = append(expired, t)
		case held >= r.lease/3:
			due = append(due, t)
		}
	}
	r.mu.Unlock()
	for _, h := range late {
		r.leave(h, now)
	}
	// No beat has come through for a whole lease: the database may have given the jobs away. A clock of this
	// process can only say so much, but handlers that go on would work for nothing.
	for _, t := range expired {
		r.lose(t, "extend", EventLeaseLost)
	}
	slices.SortFunc(due, func(a, b *task) int { return int(a.lease.ID - b.lease.ID) })
	if len(due) == 0 {
		r.q.works(r, workExtend, "")
	}
	for chunk := range slices.Chunk(due, beatChunk) {
		leases, running := make([]*Lease, len(chunk)), make([]bool, len(chunk))
		r.mu.Lock()
		for i, t := range chunk {
			leases[i], running[i] = t.lease, !t.since.IsZero()
		}
		r.mu.Unlock()
		// Not cut off by the shutdown: outcomes are still to be written, and handlers may take a while to return.
		ctx, cancel := context.WithTimeout(r.writing, r.lease/3)
		began := time.Now()
		answers, err := r.q.beat(ctx, r.pulse, leases, running, r.lease)
		cancel()
		if err != nil {
			r.q.fails(r, workExtend, "", err, slog.Int("leases", len(leases)))
			return
		}
		r.q.works(r, workExtend, "")
		for i, t := range chunk {
			a := answers[i]
			r.mu.Lock()
			// Gone also where the handler has completed the job by itself, and goes on.
			byHandler := t.lease.completedItself()
			finishing := t.finishing || byHandler
			var cancelled *handlerContext
			if !a.lost || byHandler {
				t.extended = began
				if a.cancelled && t.lost == nil {
					t.lost = ErrCancelled
					cancelled = t.ctx
				}
			}
			r.mu.Unlock()
			if cancelled != nil {
				cancelled.cancel(ErrCancelled)
			}
			if a.lost && !finishing {
				r.lose(t, "extend", EventLeaseLost)
			}
		}
	}
}

// overdue gives, once, for how long a handler has not returned since its context ended, where that is a lease. From then on
// its own lease is not extended. The caller holds mu.
func (r *run) overdue(t *task, now time.Time) time.Duration {
	if t.ctx == nil || t.since.IsZero() || t.finishing || t.late || now.Sub(t.since) < r.lease {
		return 0
	}
	ended := t.ctx.over()
	if ended.IsZero() || now.Sub(ended) < r.lease {
		return 0
	}
	t.late = true
	r.anyLate.Store(true)
	r.q.suspects.leave(t.lease.Token) // others may start
	return now.Sub(ended)
}

// lateHandler is one that does not return.
type lateHandler struct {
	lease *Lease
	tx    *handlerTx // nil for none
	since time.Time
	over  time.Duration // since its context ended, when that was noticed
}

// leave says that a handler is not waited for any more, and takes what its transaction keeps.
func (r *run) leave(h lateHandler, now time.Time) {
	if h.tx != nil {
		h.tx.giveUp()
	}
	r.q.log.Error("onceq: a handler does not return although its context has ended; it must, or it keeps one of its queue's slots."+
		" Its lease is not extended any more, so its job goes to another worker where it is not done",
		slog.String("kind", h.lease.Kind), slog.Int64("job", h.lease.ID),
		slog.Duration("running", now.Sub(h.since).Round(time.Millisecond)), slog.Duration("context_ended_ago", h.over.Round(time.Millisecond)))
}

// pingLoop keeps live handlers' transactions from being taken for frozen ones, where they last longer than a third
// of the lease. It waits for nobody, so that handlers and beats do not wait for each other.
func (r *run) pingLoop(stop <-chan struct{}) {
	ticker := time.NewTicker(max(200*time.Millisecond, r.lease/12))
	defer ticker.Stop()
	for {
		select {
		case <-stop:
			return
		case <-ticker.C:
		}
		now := time.Now()
		var due []*handlerTx
		r.mu.Lock()
		for _, t := range r.tasks {
			if t.tx != nil && now.Sub(t.tx.pinged) >= r.lease/3 {
				t.tx.pinged = now // once for all tasks of a batch
				due = append(due, t.tx)
			}
		}
		r.mu.Unlock()
		for _, tx := range due {
			tx.ping()
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
