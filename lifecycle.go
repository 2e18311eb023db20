package onceq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/promoter"
	"github.com/onceq/onceq/internal/quarantine"
)

// run is one Run or Drain of a worker: its parts, and the order in which they end. Only the goroutine of Run uses
// it, except that the claimer's goroutine writes what Drain returns.
//
// A job goes from the claimer to the executor and from there to the outbox. Meanwhile the beats extend its lease:
//
//	claimer, one  ->  slots  ->  executor, one goroutine for each slot in use  ->  outbox, two
//	    ^ session, one for a pool           ^ beats, one; pings, one
type run struct {
	w        *Worker
	id       int64 // random
	tasks    *taskSet
	outbox   *outbox
	beats    *beats
	exec     *executor
	listener *claimer.Listener // not run by Drain
	presence *presence
	tally    *count.Tally
	promoter *promoter.Promoter
	claimer  *claimer.Claimer
	drains   bool
	cutShort bool  // Drain ended with work left, because its context ended
	failed   error // what ended Drain

	cancel context.CancelCauseFunc // of all handlers' contexts
	giveUp context.CancelFunc      // of writing outcomes, and of beats

	claiming, writing, beating sync.WaitGroup
	stopBeats                  chan struct{}
}

func newRun(ctx context.Context, w *Worker, own *pg.Conns) *run {
	id := rand.Int64()
	writing, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	base, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	r := &run{w: w, id: id, cancel: cancel, giveUp: giveUp, stopBeats: make(chan struct{})}
	r.tasks = &taskSet{q: w.q, base: base, all: make(map[int64]*task)}
	watch := &poolWatch{q: w.q, tasks: r.tasks, conns: &own.Shares}
	db := own.Outcomes
	r.tally = count.NewTally(w.q.store, db)
	r.outbox = newOutbox(w.q, id, db, w.lease, writing, r.tasks, r.tally)
	r.beats = &beats{q: w.q, id: id, db: pg.Quick{Own: own, Patience: beatPatience}, lease: w.lease, ctx: writing, tasks: r.tasks, watch: watch}
	r.exec = &executor{
		w: w, q: w.q, id: id, kinds: w.kinds, careful: w.careful, slots: make(map[string]*slots), handlers: w.handlers, lease: w.lease, pipelines: w.pipelines, db: db, base: base,
		tasks: r.tasks, outbox: r.outbox, tally: r.tally, watch: watch, conns: &own.Shares,
	}
	r.presence = newPresence(w, id, pg.Quick{Own: own, Patience: pg.BriefWait}, db, r.tasks, &r.exec.limits, watch, r.tally)
	r.tasks.stuckChanged = r.presence.rouse
	var queues []*claimer.Slots
	for name, cfg := range w.queues {
		s := newSlots(w, name, cfg)
		r.exec.slots[name] = s
		queues = append(queues, &s.Slots)
	}
	r.claimer = claimer.New(claimer.Config{
		Store: w.q.store, Troubles: &w.q.troubles, Log: w.q.log, Paused: w.q.pauses, Turn: w.q.quarantine, DB: pg.Quick{Own: own, Patience: pg.BriefWait},
		Shares: &own.Shares, Worker: r.exec, ID: id, Kinds: w.kinds, Lease: w.lease, Poll: w.poll, Careful: w.careful, Besides: w.besides,
	}, queues, r.woken)
	r.listener = r.claimer.Listener
	live := func(queue string) { r.claimer.Heard(queue, false) }
	promotes := w.q.promotes(db)
	promotes.Woken, promotes.Worker = live, r.exec
	promotes.ID, promotes.Kinds, promotes.Laned, promotes.Listener = id, w.kinds, w.laned, r.listener
	r.promoter = promoter.New(promotes)
	r.claimer.Promoter = r.promoter
	r.outbox.woken, r.exec.woken = live, live
	r.outbox.told, r.exec.told = r.promoter.Told, r.promoter.Told
	r.outbox.next = func(o finish.Outcome) *successor { return r.exec.successor(o, 0) }
	r.exec.suspended = func(h *hold.Hold) { r.claimer.Suspended(h.Queue, quarantine.Job{ID: h.ID, Lost: h.Lost}, h.Slot) }
	r.exec.extend = r.beats.extend
	return r
}

// woken is the listener's.
func (r *run) woken(queue string) {
	r.claimer.Heard(queue, true)
	r.listener.Waits.Store(false) // after that, or the claimer could set it once more
	r.promoter.Rouse(queue)
}

// work works until ctx has ended or, with a limit that is not negative, until there is nothing left to drain. Then it ends
// everything that it began. failed is what went wrong; left says what has not ended or is not done.
func (r *run) work(ctx context.Context, limit int) (failed, left error) {
	q := r.w.q
	defer r.giveUp()
	defer r.cancel(errShutdown)
	defer q.troubles.Ends(r.id)
	ctx, r.exec.stop = context.WithCancelCause(ctx)
	defer r.exec.stop(nil)
	defer context.AfterFunc(r.listener.DB.Own.Closed, func() { r.exec.stop(errPoolClosed) })()
	for _, s := range r.exec.slots {
		if s.Pooled {
			r.exec.conns.Join(&s.Slots)
			defer r.exec.conns.Leave(&s.Slots)
		}
	}
	r.start(ctx, limit)
	drained := make(chan struct{})
	if r.drains {
		go func() {
			r.claiming.Wait()
			r.exec.handling.Wait()
			close(drained)
		}()
	}
	select {
	case <-ctx.Done():
	case <-drained:
	}
	left = r.end()
	if errors.Is(context.Cause(ctx), errPoolClosed) {
		return errPoolClosed, left
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

// start starts all goroutines of the run. They end in this order: the claimer, with ctx; the handlers,
// when nothing is left that was claimed; the outbox, when no more outcomes can come; the beats, last, because leases must
// last until the outbox has written their outcomes.
func (r *run) start(ctx context.Context, limit int) {
	r.drains = limit >= 0
	if r.drains {
		r.tasks.emptied = r.claimer.Rouse
		r.exec.careful = true // what completions lease would not count
		r.claiming.Go(func() { r.cutShort, r.failed = r.claimer.Drain(ctx, limit) })
	} else {
		r.exec.limits.first = r.presence.rouse
		r.claiming.Go(func() { r.claimer.Loop(ctx) })
		r.claiming.Go(func() { r.promoter.Loop(ctx) })
		r.listener.DB.Own.Join(&r.listener.Hearer)
	}
	r.presence.begin(r.drains)
	r.outbox.start(&r.writing, r.drains)
	r.beating.Go(func() { r.beats.tick(r.stopBeats, r.beats.beat) })
	if slices.Contains(slices.Collect(maps.Values(r.w.pooledIn)), true) {
		r.beating.Go(func() { r.beats.tick(r.stopBeats, r.beats.ping) })
	}
}

// end ends them in that order, and names the handlers that did not return.
func (r *run) end() (left error) {
	ends := time.Now().Add(r.w.shutdown)
	r.exec.ending.Lock()
	r.exec.stopping.Store(true)
	r.exec.ending.Unlock()
	r.claiming.Wait()
	if !r.drains {
		r.listener.UnannounceAll()
	}
	// What was claimed ahead is given back at once, even if slow handlers hold all slots.
	for _, s := range r.exec.slots {
		for _, u := range s.takeAll() {
			r.exec.giveBack(u.tasks)
		}
	}
	returned := make(chan struct{})
	go func() {
		r.exec.handling.Wait()
		close(returned)
	}()
	if !nap.Within(returned, max(0, time.Until(ends))) {
		r.cancel(errShutdown)
		if !nap.Within(returned, pg.EndWithin) {
			var committing bool
			left, committing = r.tasks.abandon(false)
			for until := time.Now().Add(r.w.lease + pg.EndWithin); left == nil && committing; { // a commit may take as long as a lease
				if nap.Within(returned, time.Second) {
					break
				}
				left, committing = r.tasks.abandon(time.Now().After(until))
			}
			if left != nil {
				time.AfterFunc(pg.EndWithin, r.giveUp)
			}
		}
	}
	var leaving sync.WaitGroup
	leaving.Go(r.presence.leave)
	r.outbox.close()
	r.writing.Wait()
	leaving.Go(func() { _ = r.tally.Write() })
	close(r.stopBeats)
	r.beating.Wait()
	if !r.drains {
		r.listener.DB.Own.Leave(&r.listener.Hearer)
	}
	leaving.Wait()
	return left
}
