package executor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/task"
)

// timeoutOf is how long a handler may run: as its job says, or its kind. Several jobs have their kind's.
func timeoutOf(holds []*hold.Hold, h *task.Handler) time.Duration {
	if len(holds) == 1 {
		return holds[0].Timeout
	}
	return h.Timeout
}

// start returns the context of a handler that is about to run, and false if the lease is already lost. If the
// handler is called at once, its time counts from now; if it first waits for a connection, its time counts
// from called.
func (x *Executor) start(tasks []*task.Task, h *task.Handler, atOnce bool) (*task.Context, bool) {
	ctx := task.NewContext(x.base, tasks)
	began := time.Now()
	if timeout := timeoutOf(ctx.Holds, h); atOnce && timeout > 0 {
		ctx.Until(began.Add(timeout))
	}
	return ctx, x.Set.Start(tasks, ctx, began, atOnce)
}

// called records that the handler of a transaction is called now.
func (x *Executor) called(tasks []*task.Task, h *task.Handler, ctx *task.Context, tx *lazytx.Tx) {
	began := time.Now()
	if timeout := timeoutOf(ctx.Holds, h); timeout > 0 {
		ctx.Until(began.Add(timeout))
	}
	x.Set.Called(tasks, began, tx)
}

func (x *Executor) runLease(t *task.Task) {
	t.Hold.Beats = x.Lease
	for try := 1; x.tryLease(t, try); try++ {
	}
}

// afterConflict waits before a transaction is run again, longer from time to time. Where such transactions
// take long, so does this, or the same ones would meet again. It returns false if no handler is started any
// more.
func (x *Executor) afterConflict(tasks []*task.Task, try int, took time.Duration) bool {
	x.Set.Rest(tasks)
	longest := min(pg.EndWithin, x.Lease/4)
	longest = min(longest, time.Duration(min(try, 10))*max(5*time.Millisecond, took/2))
	return nap.For(x.base, rand.N(longest), nil) && !x.stopping.Load()
}

// tryLease calls a handler and passes on its outcome. It returns true if the handler has to be called again:
// its own transaction contains the completion, and Postgres wants that transaction run again.
func (x *Executor) tryLease(t *task.Task, try int) (again bool) {
	ctx, ok := x.start([]*task.Task{t}, t.Handler, true)
	if !ok {
		x.end(t, x.judge(t, ctx, ctx.Why()))
		return false
	}
	defer ctx.Cancel(nil)
	err := t.Handler.Call(ctx, nil, ctx.Holds)
	// The handler must not run again if the error comes from elsewhere and the job is completed.
	meets := t.Hold.Conflict.Load() || t.Hold.ByHandler.Load()
	if meets && try < conflictTries && sqlstate.Retryable(err) && !x.decides(err) && ctx.Why() == nil {
		ctx.Cancel(nil)
		took := time.Since(t.Hold.Began)
		if !x.afterConflict([]*task.Task{t}, try, took) {
			x.end(t, finish.Outcome{Hold: t.Hold, State: table.StateWaiting, Unsure: t.Hold.ByHandler.Load()})
			return false
		}
		if t.Hold.Lengthen(ctx, x.Store, x.Own.Outcomes, took) {
			t.Hold.StartOver()
			return true
		}
	}
	o := x.judge(t, ctx, err)
	o.Run = time.Since(t.Hold.Began)
	x.end(t, o)
	return false
}

// decides reports whether err says what becomes of the job.
func (x *Executor) decides(err error) bool {
	decides, _ := x.Face.Decides(err)
	return decides
}

// judge returns the outcome of a handler that returned err.
func (x *Executor) judge(t *task.Task, ctx *task.Context, err error) finish.Outcome {
	o := x.outcome(t, ctx, err)
	// If the handler completed the job in a transaction of its own and committed that, the guard no longer
	// holds and this outcome is refused, quietly. If not, nothing of it happened and the job has to run
	// again.
	if o.Unsure = t.Hold.ByHandler.Load(); o.Unsure {
		o.Late = err
	}
	return o
}

var errNotCommitted = errors.New("onceq: the handler called Lease.Complete in a transaction that it did not commit;" +
	" commit it before you return nil")

func (x *Executor) outcome(t *task.Task, ctx *task.Context, err error) finish.Outcome {
	h := t.Hold
	cause := ctx.Why()
	switch {
	case err == nil && h.ByHandler.Load():
		return x.Face.Failure(h, errNotCommitted)
	case err == nil:
		return finish.Outcome{Hold: h, State: table.StateCompleted, Result: h.Result, Keep: h.Keep}
	case errors.Is(cause, x.Set.Cancelled):
		keep := h.Keep
		if keep >= 0 {
			keep = max(keep, finish.CancelledKept)
		}
		return finish.Outcome{Hold: h, State: table.StateCancelled, Err: finish.Text(err.Error()), Keep: keep, Cause: err}
	case errors.Is(cause, ErrShutdown):
		return finish.Outcome{Hold: h, State: table.StateWaiting, Cause: err}
	case errors.Is(cause, task.ErrTimeout) && errors.Is(err, context.DeadlineExceeded):
		crowded := ""
		if x.Set.PoolFull() > 0 {
			crowded = " (all connections of the pool were in use; see the log)"
		}
		whose := "its kind's"
		timeout := timeoutOf(ctx.Holds, t.Handler)
		if timeout != t.Handler.Timeout {
			whose = "its job's"
		}
		err = fmt.Errorf("handler ran longer than %s, %s Timeout%s: %w", timeout, whose, crowded, err)
	}
	return x.Face.Failure(h, err)
}

// runTx runs a transactional handler: one task, or a batch.
func (x *Executor) runTx(tasks []*task.Task, h *task.Handler) {
	tries := conflictTries
	if len(tasks) > 1 {
		tries /= 3 // then each runs by itself
	}
	for try := 1; x.tryTx(tasks, h, try, try < tries); try++ {
	}
}

// tryTx runs it once. It returns true if the tasks have to run again, together: more says that they may.
func (x *Executor) tryTx(tasks []*task.Task, h *task.Handler, try int, more bool) (again bool) {
	ctx, ok := x.start(tasks, h, false)
	switch {
	case ok:
	case len(tasks) > 1:
		x.runAlone(tasks, h, false)
		return false
	default:
		x.end(tasks[0], x.judge(tasks[0], ctx, ctx.Why()))
		return false
	}
	defer ctx.Cancel(nil)
	sure, err := x.transaction(ctx, tasks, h)
	if err == nil {
		return false
	}
	if more && conflicts(err) && ctx.Why() == nil {
		ctx.Cancel(nil)
		if x.afterConflict(tasks, try, time.Since(tasks[0].Hold.Began)) {
			return true
		}
		x.giveBack(tasks)
		return false
	}
	var committed *committedError
	switch {
	case errors.As(err, &committed):
		for _, t := range tasks {
			o := finish.Outcome{Hold: t.Hold, State: table.StateDead, Spend: true, Keep: -1, Run: time.Since(t.Hold.Began)}
			o.Err, o.Cause = finish.Text(err.Error()), err
			x.end(t, o)
		}
	case len(tasks) > 1:
		// A job in the batch is at fault. Running each by itself shows which.
		ctx.Cancel(nil)
		x.runAlone(tasks, h, true)
	default:
		x.failedTx(ctx, tasks[0], sure, err)
	}
	return false
}

// failedTx ends a task whose transaction was rolled back, or perhaps committed if that is not sure.
func (x *Executor) failedTx(ctx *task.Context, t *task.Task, sure bool, err error) {
	var refused *refusedError
	if errors.As(err, &refused) {
		x.Set.Lose(t, refused.op, refused.stale)
		x.end(t, finish.Outcome{Hold: t.Hold, State: table.StateWaiting})
		return
	}
	var notBegun *notBegunError
	if errors.As(err, &notBegun) && lazytx.PoolClosed(err) {
		x.Halt(ErrPoolClosed)
	}
	var o finish.Outcome
	if errors.As(err, &notBegun) && ctx.Why() == nil { // no attempt is spent
		o = finish.Outcome{Hold: t.Hold, State: table.StateWaiting, Delay: time.Second, Run: time.Since(t.Hold.Began)}
		o.Err, o.Cause = finish.Text(err.Error()), err
	} else {
		o = x.judge(t, ctx, err)
	}
	o.Unsure, o.Doubt, o.Tried = !sure, t.Doubt, t.Tried
	x.end(t, o)
}

// runAlone runs tasks of a batch one by one. called says whether the batch was called.
func (x *Executor) runAlone(tasks []*task.Task, h *task.Handler, called bool) {
	x.Set.Rest(tasks)
	for _, t := range tasks {
		switch {
		case x.stopping.Load() && x.base.Err() != nil:
			x.end(t, finish.Outcome{Hold: t.Hold, State: table.StateWaiting})
		case x.mayRunAlone(t, called):
			x.runTx([]*task.Task{t}, h)
		}
	}
}

// conflicts reports whether Postgres wants the handler's transaction run again. Errors from elsewhere,
// usually from another database, are left to the handler.
func conflicts(err error) bool {
	if err == nil {
		return false
	}
	var own *conflictError
	var notBegun *notBegunError
	return errors.As(err, &own) || errors.As(err, &notBegun) && sqlstate.Retryable(err)
}

// transaction runs a handler in a transaction and commits that with the completions. After a nil error the
// transaction is committed and all events are reported. sure is false if the error may stand for a commit
// whose answer was lost.
func (x *Executor) transaction(ctx *task.Context, tasks []*task.Task, h *task.Handler) (sure bool, err error) {
	holds := make([]*hold.Hold, len(tasks))
	slices.SortFunc(tasks, func(a, b *task.Task) int { return cmp.Compare(a.Hold.ID, b.Hold.ID) })
	for i, t := range tasks {
		holds[i] = t.Hold
		t.Hold.Result, t.Hold.InTx = "", true
	}
	tx, err := x.newHandlerTx(ctx, holds, h)
	if err != nil {
		return true, &notBegunError{err}
	}
	defer tx.Release()
	x.conns.Hold(tx, x.Log, holds[0].Kind, holds[0].ID)
	defer x.conns.Drop(tx)
	x.called(tasks, h, ctx, tx)
	err = h.Call(ctx, tx.Handle(), holds)
	tx.Close()
	// These count whatever the handler returned.
	switch {
	case tx.Refused() != nil:
		return true, &refusedError{opBegin, false}
	case tx.NotBegun() != nil:
		return true, &notBegunError{tx.NotBegun()}
	}
	_, again := x.Face.Decides(err)
	if err == nil || again {
		if unfit := tx.Unfit(); unfit != nil {
			err, again = unfit, false
		}
	}
	if err != nil && !again {
		return true, x.undone(tx, err)
	}
	outcomes := make([]finish.Outcome, len(holds))
	for i, h := range holds {
		outcomes[i] = finish.Outcome{
			Hold: h, State: table.StateCompleted, Result: h.Result, Keep: h.Keep, Run: time.Since(h.Began),
		}
		if again {
			outcomes[i] = x.Face.Failure(h, err)
		}
	}
	return x.commit(ctx, tx, tasks, outcomes)
}

// commit commits a handler's transaction together with the outcomes of its jobs: all are completed, or all
// run again.
func (x *Executor) commit(ctx *task.Context, tx *lazytx.Tx, tasks []*task.Task, outcomes []finish.Outcome) (sure bool, err error) {
	// The handler is done and wants the commit, so only the guard decides, and not a context that has just
	// ended.
	unbroken, cancel := context.WithTimeout(context.WithoutCancel(ctx), x.Lease)
	defer cancel()
	var next *Next
	if len(outcomes) == 1 {
		next = x.next(outcomes[0], 1)
	}
	var last *finish.Last
	if next != nil {
		last = &finish.Last{Statement: stmt.FinishNext, Args: next.args(outcomes[0], true)}
	} else {
		last = finish.InTx(outcomes, x.Store.Citus.Load() == pg.CitusYes)
	}
	x.Set.Commit(tasks)
	sure, err = x.commitTx(unbroken, tx, outcomes[0].Hold, last, next)
	if next != nil {
		defer func(err error) { // also if a hook ends the goroutine
			next.End(err == nil)
			if tasks[0].Doubt = nil; err == nil {
				next.Unheard(unbroken, outcomes[0].Hold)
			} else if !sure {
				tasks[0].Doubt = next
			}
		}(err)
	}
	tasks[0].Tried = !sure && !outcomes[0].Reset
	if sqlstate.LeaseLost(err) {
		err = &refusedError{"complete", true}
	}
	x.Set.Committed(tasks, err == nil)
	if err == nil {
		x.committed(ctx, outcomes, next != nil && next.hold != nil)
		x.Face.Heed(unbroken, x.Own.Outcomes, last.Cancelled)
	}
	return sure, err
}

// committed reports what was committed, and to whom it may matter.
func (x *Executor) committed(ctx context.Context, outcomes []finish.Outcome, leased bool) {
	x.Tally.Ended(outcomes, nil)
	for _, o := range outcomes {
		x.Face.Wrote(ctx, o, true)
		if o.Hold.Lined() && !leased {
			x.Live(o.Hold.Queue)
		}
	}
	if !outcomes[0].Reset && finish.AnyMember(outcomes) {
		x.Told()
	}
}
