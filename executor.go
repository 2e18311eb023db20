package onceq

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

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

// slotsUsed is how many of its slots a lane uses, or has claimed for.
func (l *lane) slotsUsed() int {
	jobs := int(l.outstanding.Load())
	return min(l.slots, max((jobs+l.width-1)/l.width, int(l.busy.Load())))
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
