package onceq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
)

// executor runs the handlers of one Run, for all of its queues. It has each job from its claim until its outcome is in the
// outbox.
type executor struct {
	w         *Worker
	q         *Queue
	id        int64             // of the run
	kinds     []string          // of the handlers
	careful   bool              // one of these has MaxLost 1
	slots     map[string]*slots // by queue
	handlers  map[string]*Handler
	lease     time.Duration
	pipelines bool            // see lazytx.Pipelines
	db        *pgxpool.Pool   // the worker's own
	base      context.Context // of all handlers
	tasks     *taskSet
	outbox    *outbox
	tally     *count.Tally
	watch     *poolWatch
	conns     *pg.Shares         // of the application's pool, for the transactions of handlers
	woken     func(queue string) // called after jobs with a lane: the next one may be live
	told      func()             // called after the end of jobs that others wait for
	limits    limitsMet
	suspended func(*hold.Hold)        // called for a job in quarantine that was given back until its slot
	extend    func([]*task)           // extends leases at once
	stop      context.CancelCauseFunc // ends the run as the end of Run's context does, and says why

	ending   sync.Mutex     // guards the change of stopping: handling grows before it, or in goroutines that it counts
	stopping atomic.Bool    // no handler is started any more; set once, by Run when it ends
	handling sync.WaitGroup // goroutines that run handlers
}

// accept takes what was claimed for a queue, and has each job run as soon as a slot is free.
func (x *executor) accept(s *slots, holds []*hold.Hold, began time.Time) {
	s.Outstanding.Add(int64(len(holds)))
	tasks, all := make([]task, len(holds)), make([]*task, len(holds))
	x.tasks.mu.Lock()
	for i, h := range holds {
		t := &tasks[i]
		all[i] = t
		*t = task{hold: h, h: x.handlers[h.Kind], extended: began}
		if h.Keep = t.h.keep; h.Keep == math.MinInt64 {
			h.Keep = s.keep
		}
		x.tasks.all[h.Token] = t
		if h.Limit != "" {
			x.limits.meet(h.Limit)
		}
	}
	x.tasks.mu.Unlock()
	units := make([]unit, 0, len(tasks))
	var batches map[*Handler][]*task
	for i, t := range all {
		if done := finish.Exhausted(t.hold, t.h.maxLost); done != nil {
			x.left(s, []*task{t})
			x.end(t, *done)
			continue
		}
		if t.h.size == 1 || t.quarantined() {
			units = append(units, unit{tasks: all[i : i+1 : i+1]})
			continue
		}
		if batches == nil {
			batches = make(map[*Handler][]*task)
		}
		b := append(batches[t.h], t)
		if len(b) == t.h.size {
			units = append(units, unit{tasks: b})
			b = nil
		}
		batches[t.h] = b
	}
	for _, b := range batches {
		if len(b) > 0 {
			units = append(units, unit{tasks: b})
		}
	}
	x.begin(s, s.put(units, false))
}

// begin begins n goroutines that run handlers.
func (x *executor) begin(s *slots, n int) {
	for range n {
		x.handling.Go(func() { x.work(s) })
	}
}

// work runs handlers until nothing waits.
func (x *executor) work(s *slots) {
	for {
		u, ok, ask := s.take()
		if ask {
			x.handling.Go(func() { x.renew(s) })
		}
		if !ok {
			return
		}
		x.workOn(s, u.tasks, false)
	}
}

var errGoexit = errors.New("onceq: the handler ended its goroutine (by runtime.Goexit, which a test's FailNow calls); it must return instead")

// workOn runs the handler of tasks, of each by itself if alone says so.
func (x *executor) workOn(s *slots, tasks []*task, alone bool) {
	s.Busy.Add(1)
	began := time.Now()
	returned := false
	defer func() {
		if !returned {
			// This is not a panic, because panics have become errors by now. This goroutine ends here, and another one
			// takes its place.
			var rest []*task
			tasks, rest = x.exited(tasks)
			x.handling.Go(func() {
				if len(rest) > 0 {
					x.workOn(s, rest, true)
				}
				x.work(s)
			})
		}
		s.Worked.Add(int64(time.Since(began)))
		back := false
		if x.tasks.anyLate.Load() {
			for _, t := range tasks {
				_, late := x.q.late.LoadAndDelete(t.hold.Token)
				back = back || late
			}
		}
		s.Returned.Add(int64(len(tasks)))
		s.Busy.Add(-1)
		if len(tasks) > 0 {
			x.left(s, tasks)
		}
		if back {
			x.tasks.stuckChanged()
		}
	}()
	h := tasks[0].h
	switch {
	case alone:
		x.runAlone(tasks, h, true)
	case x.stopping.Load():
		x.giveBack(tasks)
	case !h.inTx:
		x.tally.Started(tasks[0].hold)
		x.runLease(tasks[0])
	default:
		for _, t := range tasks {
			x.tally.Started(t.hold)
		}
		x.runTx(tasks, h)
	}
	returned = true
}

// exited is for a handler that ended its goroutine. A task that it was called for alone ends, as those do that have ended already. If
// it was called for several, each of them runs by itself, as after a panic, and so does the rest of a batch.
func (x *executor) exited(tasks []*task) (ended, rest []*task) {
	var called []*task
	var ctx *handlerContext
	x.tasks.mu.Lock()
	for _, t := range tasks {
		switch {
		case t.finishing || x.tasks.all[t.hold.Token] != t:
			ended = append(ended, t)
		case t.ctx != nil || len(tasks) == 1:
			called, ctx = append(called, t), t.ctx
		default:
			rest = append(rest, t)
		}
	}
	x.tasks.mu.Unlock()
	if ctx != nil {
		ctx.cancel(nil)
	}
	if len(called) != 1 {
		return ended, append(called, rest...)
	}
	x.end(called[0], leaseOf(called[0].hold).failure(errGoexit))
	return append(ended, called[0]), rest
}

// left records that tasks no longer occupy a slot.
func (x *executor) left(s *slots, tasks []*task) {
	n := len(tasks)
	if tasks[0].quarantined() {
		n = s.Width
		s.Quarantined.Add(-1)
	}
	s.Left(int64(n))
	if s.Pooled {
		x.conns.Wake()
	}
}

// Taken reports whether no slot is free, and how many jobs' handlers have ever returned. Anybody may call it.
func (x *executor) Taken() (all bool, returned int64) {
	all = true
	for _, s := range x.slots {
		all = all && s.Outstanding.Load() >= int64(s.Count)*int64(s.Width)
		returned += s.Returned.Load()
	}
	return all, returned
}

// giveBack ends tasks that were not started, as if they had not been claimed.
func (x *executor) giveBack(tasks []*task) {
	for _, t := range tasks {
		x.end(t, finish.Outcome{Hold: t.hold, State: finish.Waiting})
	}
}

var errTimeout = errors.New("timeout")

// timeoutOf is how long a handler may run: as its job says, or its kind. Several jobs have their kind's.
func timeoutOf(holds []*hold.Hold, h *Handler) time.Duration {
	if len(holds) == 1 {
		return holds[0].Timeout
	}
	return h.timeout
}

// start returns the context of a handler that is about to run, and false if the lease is already lost. If the handler is
// called at once, its time counts from now; if it first waits for a connection, its time counts from called.
func (x *executor) start(tasks []*task, h *Handler, atOnce bool) (*handlerContext, bool) {
	ctx := &handlerContext{base: x.base}
	ctx.holds = append(ctx.one[:0], tasks[0].hold)
	for _, t := range tasks[1:] {
		ctx.holds = append(ctx.holds, t.hold)
	}
	began := time.Now()
	if timeout := timeoutOf(ctx.holds, h); atOnce && timeout > 0 {
		ctx.until(began.Add(timeout))
	}
	if began.Sub(tasks[0].hold.Began) >= x.lease { // otherwise no lease can have passed since the claim
		for _, t := range x.tasks.overdue(tasks, began, x.lease) { // this process stood still, and no beat has said so yet
			x.tasks.lose(t, "start", EventLeaseLost)
		}
	}
	x.tasks.mu.Lock()
	defer x.tasks.mu.Unlock()
	for _, t := range tasks {
		if t.lost != nil {
			ctx.cancel(t.lost)
			return ctx, false
		}
	}
	for _, t := range tasks {
		if t.ctx = ctx; atOnce {
			t.since, t.hold.Began = began, began
		}
	}
	return ctx, true
}

// called records that the handler of a transaction is called now.
func (x *executor) called(tasks []*task, h *Handler, ctx *handlerContext, tx *lazytx.Tx) {
	began := time.Now()
	if timeout := timeoutOf(ctx.holds, h); timeout > 0 {
		ctx.until(began.Add(timeout))
	}
	x.tasks.mu.Lock()
	defer x.tasks.mu.Unlock()
	for _, t := range tasks {
		t.since, t.hold.Began, t.tx = began, began, tx
	}
}

func (x *executor) runLease(t *task) {
	t.hold.Beats = x.lease
	for try := 1; x.tryLease(t, try); try++ {
	}
}

// afterConflict waits before a transaction is run again, longer from time to time. Where such transactions take long, so does this, or
// the same ones would meet again. It returns false if no handler is started any more.
func (x *executor) afterConflict(tasks []*task, try int, took time.Duration) bool {
	x.rest(tasks)
	longest := min(pg.EndWithin, x.lease/4)
	return nap.For(x.base, rand.N(min(longest, time.Duration(min(try, 10))*max(5*time.Millisecond, took/2))), nil) && !x.stopping.Load()
}

// tryLease calls a handler and passes on its outcome. It returns true if the handler has to be called again: its own
// transaction contains the completion, and Postgres wants that transaction run again.
func (x *executor) tryLease(t *task, try int) (again bool) {
	ctx, ok := x.start([]*task{t}, t.h, true)
	if !ok {
		x.end(t, x.judge(t, ctx, ctx.why()))
		return false
	}
	defer ctx.cancel(nil)
	err := t.h.call(ctx, nil, ctx.holds)
	// The handler must not run again if the error comes from elsewhere and the job is completed.
	if (t.hold.Conflict.Load() || t.hold.ByHandler.Load()) && IsRetryable(err) && decidesNothing(err) && try < conflictTries && ctx.why() == nil {
		ctx.cancel(nil)
		took := time.Since(t.hold.Began)
		if !x.afterConflict([]*task{t}, try, took) {
			x.end(t, finish.Outcome{Hold: t.hold, State: finish.Waiting, Unsure: t.hold.ByHandler.Load()})
			return false
		}
		if t.hold.Lengthen(ctx, x.q.store, x.db, took) {
			t.hold.StartOver()
			return true
		}
	}
	o := x.judge(t, ctx, err)
	o.Run = time.Since(t.hold.Began)
	x.end(t, o)
	return false
}

// judge returns the outcome of a handler that returned err.
func (x *executor) judge(t *task, ctx *handlerContext, err error) finish.Outcome {
	o := x.outcome(t, ctx, err)
	// If the handler completed the job in a transaction of its own and committed that, the guard no longer holds and this
	// outcome is refused, quietly. If not, nothing of it happened and the job has to run again.
	if o.Unsure = t.hold.ByHandler.Load(); o.Unsure {
		o.Late = err
	}
	return o
}

func (x *executor) outcome(t *task, ctx *handlerContext, err error) finish.Outcome {
	h := t.hold
	cause := ctx.why()
	switch {
	case err == nil && h.ByHandler.Load():
		return leaseOf(h).failure(errors.New("onceq: the handler called Lease.Complete in a transaction that it did not commit; commit it before you return nil"))
	case err == nil:
		return finish.Outcome{Hold: h, State: finish.Completed, Result: h.Result, Keep: h.Keep}
	case errors.Is(cause, ErrCancelled):
		keep := h.Keep
		if keep >= 0 {
			keep = max(keep, finish.CancelledKept)
		}
		return finish.Outcome{Hold: h, State: finish.Cancelled, Err: finish.Text(err.Error()), Keep: keep, Cause: err}
	case errors.Is(cause, errShutdown):
		return finish.Outcome{Hold: h, State: finish.Waiting, Cause: err}
	case errors.Is(cause, errTimeout) && errors.Is(err, context.DeadlineExceeded):
		crowded := ""
		if x.watch.crowded.Load() {
			crowded = " (all connections of the pool were in use; see the log)"
		}
		whose := "its kind's"
		timeout := timeoutOf(ctx.holds, t.h)
		if timeout != t.h.timeout {
			whose = "its job's"
		}
		err = fmt.Errorf("handler ran longer than %s, %s Timeout%s: %w", timeout, whose, crowded, err)
	}
	return leaseOf(h).failure(err)
}

// end passes an outcome to the outbox, unless the lease is known to be lost.
func (x *executor) end(t *task, o finish.Outcome) {
	x.tasks.mu.Lock()
	lost := t.lost
	t.finishing = true
	if lost != nil && !errors.Is(lost, ErrCancelled) {
		x.tasks.forget(t.hold)
		x.tasks.mu.Unlock()
		return
	}
	x.tasks.mu.Unlock()
	x.outbox.add(o)
}

// runTx runs a transactional handler: one task, or a batch.
func (x *executor) runTx(tasks []*task, h *Handler) {
	tries := conflictTries
	if len(tasks) > 1 {
		tries /= 3 // then each runs by itself
	}
	for try := 1; x.tryTx(tasks, h, try, try < tries); try++ {
	}
}

// tryTx runs it once. It returns true if the tasks have to run again, together: more says that they may.
func (x *executor) tryTx(tasks []*task, h *Handler, try int, more bool) (again bool) {
	ctx, ok := x.start(tasks, h, false)
	switch {
	case ok:
	case len(tasks) > 1:
		x.runAlone(tasks, h, false)
		return false
	default:
		x.end(tasks[0], x.judge(tasks[0], ctx, ctx.why()))
		return false
	}
	defer ctx.cancel(nil)
	sure, err := x.transaction(ctx, tasks, h)
	if err == nil {
		return false
	}
	if more && conflicts(err) && ctx.why() == nil {
		ctx.cancel(nil)
		if x.afterConflict(tasks, try, time.Since(tasks[0].hold.Began)) {
			return true
		}
		x.giveBack(tasks)
		return false
	}
	var committed *committedError
	switch {
	case errors.As(err, &committed):
		for _, t := range tasks {
			x.end(t, finish.Outcome{Hold: t.hold, State: finish.Dead, Spend: true, Err: finish.Text(err.Error()), Keep: -1, Cause: err, Run: time.Since(t.hold.Began)})
		}
	case len(tasks) > 1:
		// A job in the batch is at fault. Running each by itself shows which.
		ctx.cancel(nil)
		x.runAlone(tasks, h, true)
	default:
		x.failedTx(ctx, tasks[0], sure, err)
	}
	return false
}

// failedTx ends a task whose transaction was rolled back, or perhaps committed if that is not sure.
func (x *executor) failedTx(ctx *handlerContext, t *task, sure bool, err error) {
	var refused *refusedError
	if errors.As(err, &refused) {
		x.tasks.lose(t, refused.op, refused.event)
		x.end(t, finish.Outcome{Hold: t.hold, State: finish.Waiting})
		return
	}
	var notBegun *notBegunError
	if errors.As(err, &notBegun) && lazytx.PoolClosed(err) {
		x.stop(errPoolClosed)
	}
	if errors.As(err, &notBegun) && ctx.why() == nil {
		err = &retryAfter{d: time.Second, err: err, free: true}
	}
	o := x.judge(t, ctx, err)
	o.Unsure, o.Doubt, o.Tried = !sure, t.doubt, t.tried
	x.end(t, o)
}

// runAlone runs tasks of a batch one by one. called says whether the batch was called.
func (x *executor) runAlone(tasks []*task, h *Handler, called bool) {
	x.rest(tasks)
	for _, t := range tasks {
		switch {
		case x.stopping.Load() && x.base.Err() != nil:
			x.end(t, finish.Outcome{Hold: t.hold, State: finish.Waiting})
		case x.mayRunAlone(t, called):
			x.runTx([]*task{t}, h)
		}
	}
}

// rest is for tasks whose transaction was rolled back and whose handler runs again later. Until then they have no context, for a
// handler that rests is none that does not return. If the transaction was so long that a beat found the rows locked, the leases may
// have run out, and now that the rows are free, others may take the jobs for lost. So the leases are extended before anything else.
func (x *executor) rest(tasks []*task) {
	var behind []*task
	soon := time.Now().Add(-x.lease / 3)
	x.tasks.mu.Lock()
	for _, t := range tasks {
		if t.ctx, t.tx = nil, nil; t.locked && !t.late && t.lost == nil {
			behind = append(behind, t)
			if t.extended.After(soon) {
				t.extended = soon // if this fails, the next tick tries again
			}
		}
	}
	x.tasks.mu.Unlock()
	if len(behind) > 0 {
		x.extend(behind)
	}
}

// conflicts reports whether Postgres wants the handler's transaction run again. Errors from elsewhere, usually from another
// database, are left to the handler.
func conflicts(err error) bool {
	if err == nil {
		return false
	}
	var own *conflictError
	var notBegun *notBegunError
	return errors.As(err, &own) || errors.As(err, &notBegun) && IsRetryable(err)
}

// transaction runs a handler in a transaction and commits that with the completions. After a nil error the transaction is
// committed and all events are reported. sure is false if the error may stand for a commit whose answer was lost.
func (x *executor) transaction(ctx *handlerContext, tasks []*task, h *Handler) (sure bool, err error) {
	holds := make([]*hold.Hold, len(tasks))
	slices.SortFunc(tasks, func(a, b *task) int { return cmp.Compare(a.hold.ID, b.hold.ID) })
	for i, t := range tasks {
		holds[i] = t.hold
		t.hold.Result, t.hold.InTx = "", true
	}
	tx, err := x.newHandlerTx(ctx, holds, h)
	if err != nil {
		return true, &notBegunError{err}
	}
	defer tx.Release()
	x.conns.Hold(tx, x.q.log, holds[0].Kind, holds[0].ID)
	defer x.conns.Drop(tx)
	x.called(tasks, h, ctx, tx)
	err = h.call(ctx, tx.Handle(), holds)
	tx.Close()
	// These count whatever the handler returned.
	switch {
	case tx.Refused() != nil:
		return true, &refusedError{"begin", EventLeaseLost}
	case tx.NotBegun() != nil:
		return true, &notBegunError{tx.NotBegun()}
	}
	again := reschedules(err)
	if err == nil || again {
		if unfit := tx.Unfit(); unfit != nil {
			err, again = unfit, false
		}
	}
	if err != nil && !again {
		return true, undone(tx, err)
	}
	outcomes := make([]finish.Outcome, len(holds))
	for i, h := range holds {
		outcomes[i] = finish.Outcome{Hold: h, State: finish.Completed, Result: h.Result, Keep: h.Keep, Run: time.Since(h.Began)}
		if again {
			outcomes[i] = leaseOf(h).failure(err)
		}
	}
	return x.commit(ctx, tx, tasks, outcomes)
}

// commit commits a handler's transaction together with the outcomes of its jobs: all are completed, or all run again.
func (x *executor) commit(ctx *handlerContext, tx *lazytx.Tx, tasks []*task, outcomes []finish.Outcome) (sure bool, err error) {
	// The handler is done and wants the commit, so only the guard decides, and not a context that has just ended.
	unbroken, cancel := context.WithTimeout(context.WithoutCancel(ctx), x.lease)
	defer cancel()
	var next *successor
	if len(outcomes) == 1 {
		next = x.successor(outcomes[0], 1)
	}
	var last *finish.Last
	if next != nil {
		last = &finish.Last{Statement: stmt.FinishNext, Args: next.args(outcomes[0], true)}
	} else {
		last = finish.InTx(outcomes, x.q.store.Citus.Load() == pg.CitusYes)
	}
	x.tasks.mu.Lock()
	for _, t := range tasks {
		t.finishing, t.commits = true, true
	}
	x.tasks.mu.Unlock()
	sure, err = x.q.commitTx(unbroken, tx, outcomes[0].Hold, last, next)
	if next != nil {
		defer func(err error) { // also if a hook ends the goroutine
			next.End(err == nil)
			if tasks[0].doubt = nil; err == nil {
				next.Unheard(unbroken, outcomes[0].Hold)
			} else if !sure {
				tasks[0].doubt = next
			}
		}(err)
	}
	tasks[0].tried = !sure && !outcomes[0].Reset
	if leaseLost(err) {
		err = &refusedError{"complete", EventStale}
	}
	x.tasks.mu.Lock()
	for _, t := range tasks {
		if t.finishing, t.commits = err == nil, false; err == nil {
			x.tasks.forget(t.hold)
		}
	}
	x.tasks.mu.Unlock()
	if err == nil {
		x.committed(ctx, outcomes, next != nil && next.hold != nil)
		x.q.heed(unbroken, x.db, last.Cancelled)
	}
	return sure, err
}

// committed reports what was committed, and to whom it may matter.
func (x *executor) committed(ctx context.Context, outcomes []finish.Outcome, leased bool) {
	x.tally.Ended(outcomes, nil, nil)
	for _, o := range outcomes {
		x.q.finished(ctx, o, false)
		if o.Hold.Lined() && !leased {
			x.woken(o.Hold.Queue)
		}
	}
	if !outcomes[0].Reset && finish.AnyMember(outcomes) {
		x.told()
	}
}
