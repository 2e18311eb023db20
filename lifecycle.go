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
)

// run is one Run or Drain of a worker: its parts, and the order in which they end. Only the goroutine of Run uses
// it, except that each claimer's goroutine writes its own place in failed.
//
// A job goes from a claimer to the executor and from there to the outbox. Meanwhile the beats extend its lease:
//
//	claimer, one a queue  ->  slots  ->  executor, one goroutine a slot  ->  outbox, two
//	    ^ listener, one                     ^ beats, one; pings, one
type run struct {
	w        *Worker
	id       int64 // random
	tasks    *taskSet
	outbox   *outbox
	beats    *beats
	exec     *executor
	listener *listener // not run by Drain
	presence *presence
	promoter *promoter
	claimers []*claimer
	drain    *draining // nil for Run
	failed   []error   // errors of Drain's claimers, one for each; each claimer's goroutine writes its own

	cancel context.CancelCauseFunc // of all handlers' contexts
	giveUp context.CancelFunc      // of writing outcomes, and of beats

	claiming, writing, beating sync.WaitGroup
	stopBeats                  chan struct{}
}

func newRun(ctx context.Context, w *Worker, own *ownConns) *run {
	id := rand.Int64()
	writing, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	base, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	r := &run{w: w, id: id, cancel: cancel, giveUp: giveUp, stopBeats: make(chan struct{})}
	r.tasks = &taskSet{q: w.q, base: base, all: make(map[int64]*task)}
	watch := &poolWatch{q: w.q, tasks: r.tasks}
	db := own.outcomes
	r.outbox = newOutbox(w.q, id, db, w.lease, writing, r.tasks)
	r.beats = &beats{q: w.q, id: id, db: quick{own, beatPatience}, lease: w.lease, ctx: writing, tasks: r.tasks, watch: watch}
	r.exec = &executor{
		q: w.q, handlers: w.handlers, lease: w.lease, pipelines: w.pipelines, db: db, base: base,
		tasks: r.tasks, outbox: r.outbox, watch: watch,
	}
	r.listener = newListener(w, id, own, r.woken)
	r.presence = newPresence(w, id, quick{own: own})
	r.promoter = newPromoter(w, id, db, r.listener, r.rouse)
	r.outbox.woken, r.exec.woken = r.rouse, r.rouse
	for name, cfg := range w.queues {
		c := newClaimer(w, id, quick{own: own}, r.exec, r.listener, newSlots(w, name, cfg))
		r.claimers = append(r.claimers, c)
	}
	return r
}

// woken rouses the claimer of a queue, or all.
func (r *run) woken(queue string) {
	r.promoter.rouse()
	r.rouse(queue)
}

// rouse is woken for jobs that are live already.
func (r *run) rouse(queue string) {
	for _, c := range r.claimers {
		if queue == "" || queue == c.feed.queue {
			c.rouse()
		}
	}
}

// work works until ctx has ended or, with a limit that is not negative, until there is nothing left to drain. Then it ends
// everything that it began. failed is what went wrong; left says what has not ended or is not done.
func (r *run) work(ctx context.Context, limit int) (failed, left error) {
	q := r.w.q
	defer r.giveUp()
	defer r.cancel(errShutdown)
	defer q.ends(r.id)
	ctx, r.exec.stop = context.WithCancelCause(ctx)
	defer r.exec.stop(nil)
	for _, c := range r.claimers {
		if s := c.feed.slots; s.pooled {
			q.connections.join(s)
			defer q.connections.leave(s)
		}
	}
	r.start(ctx, limit)
	drained := make(chan struct{})
	if r.drain != nil {
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
	if r.drain != nil && r.drain.cutShort {
		why := ctx.Err()
		if cause := context.Cause(ctx); !errors.Is(cause, why) {
			why = fmt.Errorf("%w: %w", why, cause)
		}
		left = errors.Join(left, fmt.Errorf("onceq: Drain ended with work left: %w", why))
	}
	return errors.Join(r.failed...), left
}

// start starts all goroutines of the run. They end in this order: the claimers and the listener, with ctx; the handlers,
// when their channel is closed and empty; the outbox, when no more outcomes can come; the beats, last, because leases must
// last until the outbox has written their outcomes.
func (r *run) start(ctx context.Context, limit int) {
	for _, c := range r.claimers {
		for range c.feed.slots.count {
			r.exec.handling.Go(func() { r.exec.work(c.feed.slots) })
		}
	}
	if limit >= 0 {
		r.drain, r.failed = newDraining(limit, len(r.claimers), r.promoter), make([]error, len(r.claimers))
	}
	for i, c := range r.claimers {
		r.claiming.Go(func() {
			if r.drain == nil {
				c.loop(ctx)
			} else {
				r.failed[i] = c.drain(ctx, r.drain)
			}
			close(c.feed.slots.ready)
		})
	}
	if r.drain == nil {
		r.listener.db.own.join(r.listener)
		r.claiming.Go(func() { r.promoter.loop(ctx) })
	}
	r.presence.begin(r.drain != nil)
	for range 2 {
		r.writing.Go(r.outbox.loop)
	}
	r.beating.Go(func() { r.beats.loop(r.stopBeats) })
	if slices.Contains(slices.Collect(maps.Values(r.w.pooledIn)), true) {
		r.beating.Go(func() { r.beats.pingLoop(r.stopBeats) })
	}
}

// end ends them in that order, and names the handlers that did not return.
func (r *run) end() (left error) {
	r.exec.stopping.Store(true)
	r.claiming.Wait()
	if r.drain == nil {
		r.listener.unannounceAll()
	}
	// What was claimed ahead is given back at once, even if slow handlers hold all slots.
	for _, c := range r.claimers {
		for u := range c.feed.slots.ready {
			r.exec.giveBack(u)
		}
	}
	returned := make(chan struct{})
	go func() {
		r.exec.handling.Wait()
		close(returned)
	}()
	if !within(returned, max(0, r.w.shutdown)) {
		r.cancel(errShutdown)
		if !within(returned, abandonAfter) {
			if left = r.tasks.abandon(); left != nil {
				time.AfterFunc(rollbackTimeout, r.giveUp)
			}
		}
	}
	var leaving sync.WaitGroup
	leaving.Go(r.presence.leave)
	r.outbox.close()
	r.writing.Wait()
	close(r.stopBeats)
	r.beating.Wait()
	if r.drain == nil {
		r.listener.db.own.leave(r.listener)
	}
	leaving.Wait()
	return left
}
