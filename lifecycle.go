package onceq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/executor"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/plan"
	"github.com/onceq/onceq/internal/presence"
	"github.com/onceq/onceq/internal/promoter"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/task"
)

// run is one Run or Drain of a worker: its parts, and the order in which they end. Only the goroutine of Run
// uses it, except that the claimer's goroutine writes what Drain returns. A job goes from the claimer to the
// executor. The promoter lets jobs into lanes, and the presence does the worker's chores.
type run struct {
	w        *Worker
	id       int64 // random
	exec     *executor.Executor
	face     *face
	listener *claimer.Listener // not run by Drain
	presence *presence.Presence
	promoter *promoter.Promoter
	claimer  *claimer.Claimer
	drains   bool
	cutShort bool  // Drain ended with work left, because its context ended
	failed   error // what ended Drain

	halt     context.CancelCauseFunc // ends the run as the end of its context does, and says why
	claiming sync.WaitGroup
}

func newRun(ctx context.Context, w *Worker, own *pg.Conns, drains bool) *run {
	r := &run{w: w, id: rand.Int64(), drains: drains, face: &face{w: w, db: own.Outcomes}}
	q, quick := w.q, pg.Quick{Own: own, Patience: pg.BriefWait}
	live := func(queue string) { r.claimer.Heard(queue, false) }
	cfg := executor.Config{
		Face: r.face, Store: q.store, Troubles: &q.troubles, Log: q.log, Paused: q.pauses, Far: &q.far,
		Own: own, ID: r.id, Handlers: make(map[string]*task.Handler), Kinds: w.kinds, Careful: w.careful, Lease: w.lease,
		Pipelines: w.pipelines, Drains: drains, Live: live, Told: func() { r.promoter.Told() },
		Halt: func(cause error) { r.halt(cause) },
		Suspended: func(h *hold.Hold) {
			r.claimer.Suspended(h.Queue, quarantine.Job{ID: h.ID, Lost: h.Lost}, h.Slot)
		},
	}
	for kind, h := range w.handlers {
		cfg.Handlers[kind] = &h.runs
	}
	for name, c := range w.queues {
		cfg.Queues = append(cfg.Queues, executor.Queue{
			Name: name, Count: c.Concurrency, Pooled: w.pooledIn[name], MayHold: w.mayHold, Keep: w.keeps[name],
		})
	}
	set := task.Config{
		Turn: q.quarantine, Late: &q.late, Cancelled: ErrCancelled, Stuck: func() { r.presence.Rouse() },
	}
	if drains {
		set.Emptied = func() { r.claimer.Rouse() }
	}
	r.exec = executor.New(ctx, cfg, set)
	r.presence = r.newPresence(quick, own.Outcomes)
	if !drains {
		r.face.limits.First = r.presence.Rouse
	}
	r.claimer = claimer.New(claimer.Config{
		Store: q.store, Troubles: &q.troubles, Log: q.log, Paused: q.pauses, Turn: q.quarantine, DB: quick,
		Shares: &own.Shares, Worker: claims{r.exec, r.face}, ID: r.id,
		Config: plan.Config{Kinds: w.kinds, Lease: w.lease, Poll: w.poll, Careful: w.careful, Besides: w.besides},
	}, r.exec.Slots(), r.woken)
	r.listener = r.claimer.Listener
	promotes := q.promotes(own.Outcomes)
	promotes.Woken, promotes.Worker = live, r.exec
	promotes.ID, promotes.Kinds, promotes.Laned, promotes.Listener = r.id, w.kinds, w.laned, r.listener
	r.promoter = promoter.New(promotes)
	r.claimer.Promoter = r.promoter
	return r
}

// newPresence returns what does the worker's chores: it shows the worker, and looks for requests to cancel
// that nobody has heard, for held jobs whose effects were settled, and for limits that nobody has set. slow
// is for what may meet rows that somebody has locked.
func (r *run) newPresence(db, slow DB) *presence.Presence {
	w, q := r.w, r.w.q
	cfg := presence.Config{
		Store: q.store, Troubles: &q.troubles, ID: r.id, DB: db, Set: r.exec.Set, Tally: r.exec.Tally,
		Chores: func(ctx context.Context) error {
			failed := errors.Join(q.canceller().HeedAll(ctx, db, slow), q.held.All(unholdOne(ctx, q, slow)))
			return errors.Join(failed, r.face.limits.Ask(ctx, q.store, db, q.log))
		},
	}
	queues := make(map[string]int, len(w.queues))
	for _, name := range slices.Sorted(maps.Keys(w.queues)) {
		n := w.queues[name].Concurrency
		if w.pooledIn[name] && n >= usually(int(q.store.Pool.Config().MaxConns)) {
			cfg.Bound = append(cfg.Bound, name)
		}
		queues[name] = n
		for _, h := range w.handlers {
			queues[name] = max(queues[name], n*h.runs.Size) // a batch handler has several jobs
		}
	}
	raw, _ := json.Marshal(queues) // a map of strings to numbers always encodes
	cfg.Args = []any{SchemaVersion, w.lease.Microseconds(), string(raw), w.kinds}
	return presence.New(cfg)
}

// woken is the listener's.
func (r *run) woken(queue string) {
	r.claimer.Heard(queue, true)
	r.listener.Waits.Store(false) // after that, or the claimer could set it once more
	r.promoter.Rouse(queue)
}

// work works until ctx has ended or, with a limit that is not negative, until there is nothing left to drain.
// Then it ends everything that it began. failed is what went wrong; left says what has not ended or is not
// done.
func (r *run) work(ctx context.Context, limit int) (failed, left error) {
	q := r.w.q
	defer q.troubles.Ends(r.id)
	ctx, r.halt = context.WithCancelCause(ctx)
	defer r.halt(nil)
	defer context.AfterFunc(r.listener.DB.Own.Closed, func() { r.halt(executor.ErrPoolClosed) })()
	r.start(ctx, limit)
	drained := make(chan struct{})
	if r.drains {
		go func() {
			r.claiming.Wait()
			r.exec.Wait()
			close(drained)
		}()
	}
	select {
	case <-ctx.Done():
	case <-drained:
	}
	left = r.end()
	if errors.Is(context.Cause(ctx), executor.ErrPoolClosed) {
		return executor.ErrPoolClosed, left
	}
	if r.cutShort {
		why := ctx.Err()
		if cause := context.Cause(ctx); !errors.Is(cause, why) {
			why = fmt.Errorf("%w: %w", why, cause)
		}
		left = errors.Join(left, fmt.Errorf("onceq: Drain ended with work left: %w", why))
	}
	return r.failed, left
}

// start starts all goroutines of the run. They end in this order: the claimer, with ctx; the handlers, when
// nothing is left that was claimed; the executor's others, when no more outcomes can come.
func (r *run) start(ctx context.Context, limit int) {
	r.exec.Start()
	if r.drains {
		r.claiming.Go(func() { r.cutShort, r.failed = r.claimer.Drain(ctx, limit) })
	} else {
		r.claiming.Go(func() { r.claimer.Loop(ctx) })
		r.claiming.Go(func() { r.promoter.Loop(ctx) })
		r.listener.DB.Own.Join(&r.listener.Hearer)
	}
	r.presence.Begin(r.drains)
}

// end ends them in that order, and names the handlers that did not return.
func (r *run) end() (left error) {
	ends := time.Now().Add(r.w.shutdown)
	r.exec.Stop()
	r.claiming.Wait()
	if !r.drains {
		r.listener.UnannounceAll()
	}
	left = r.exec.End(ends)
	var leaving sync.WaitGroup
	leaving.Go(r.presence.Leave)
	r.exec.Close()
	if !r.drains {
		r.listener.DB.Own.Leave(&r.listener.Hearer)
	}
	leaving.Wait()
	return left
}
