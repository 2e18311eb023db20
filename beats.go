package onceq

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// beats keeps what this worker holds: it extends leases, ends handlers whose lease is lost or whose job is cancelled, and
// gives up handlers that do not return.
type beats struct {
	q     *Queue
	id    int64 // of the run
	db    pg.Quick
	lease time.Duration   // how long leases are extended for
	ctx   context.Context // the outbox's: ends when Run has waited long enough
	tasks *taskSet
	watch *poolWatch
}

// tick calls do some twelve times in a lease until stop is closed.
func (b *beats) tick(stop <-chan struct{}, do func()) {
	ticker := time.NewTicker(max(200*time.Millisecond, b.lease/12))
	defer ticker.Stop()
	for {
		select {
		case <-stop:
			return
		case <-ticker.C:
		}
		do()
	}
}

// beat extends each lease a third of a lease after its claim or its latest extension, and ends what is lost or
// cancelled.
func (b *beats) beat() {
	defer b.watch.look()
	now := time.Now()
	var due []*task
	var expired []*task
	var late []lateHandler
	b.tasks.mu.Lock()
	for _, t := range b.tasks.all {
		if over := b.overdue(t, now); over > 0 {
			h := lateHandler{t.hold, t.tx, t.since, over}
			late = append(late, h)
			b.q.late.Store(t.hold.Token, h)
		}
		switch held := now.Sub(t.extended); {
		case t.late && held < b.lease:
		case t.lost != nil && !errors.Is(t.lost, ErrCancelled):
		case held >= b.lease && !t.finishing && !t.hold.ByHandler.Load():
			expired = append(expired, t)
		case held >= b.lease/3:
			due = append(due, t)
		}
	}
	b.tasks.mu.Unlock()
	for _, h := range late {
		b.leave(h, now)
	}
	if len(late) > 0 {
		b.tasks.stuckChanged()
	}
	// No beat has succeeded for a whole lease: the database may have given the jobs to others. This process's clock cannot
	// prove that, but handlers that continue would probably work for nothing.
	for _, t := range expired {
		b.tasks.lose(t, "extend", EventLeaseLost)
	}
	if len(due) == 0 {
		b.q.troubles.Works(b.id, watch.Extend, "")
	}
	b.extend(due)
}

// extend extends the leases of tasks, and ends what is lost or cancelled. The executor calls it as well.
func (b *beats) extend(tasks []*task) {
	slices.SortFunc(tasks, func(a, b *task) int { return cmp.Compare(a.hold.ID, b.hold.ID) })
	for chunk := range slices.Chunk(tasks, table.ChunkRows) {
		holds, running := make([]*hold.Hold, len(chunk)), make([]bool, len(chunk))
		b.tasks.mu.Lock()
		for i, t := range chunk {
			holds[i], running[i] = t.hold, !t.since.IsZero()
		}
		b.tasks.mu.Unlock()
		// The shutdown does not end this: outcomes are still to be written, and handlers may take a while to return. But however
		// long a lease is, a connection that has gone silent ends a beat after pg.SessionLimit.
		ctx, cancel := context.WithTimeout(b.ctx, min(b.lease/3, pg.SessionLimit))
		began := time.Now()
		answers, err := hold.Extend(ctx, b.q.store, b.db, holds, running, b.lease)
		cancel()
		if err != nil {
			b.q.troubles.Fails(b.id, watch.Extend, "", err, slog.Int("leases", len(holds)))
			return
		}
		b.q.troubles.Works(b.id, watch.Extend, "")
		for i, t := range chunk {
			b.heard(t, answers[i], began)
		}
	}
}

// heard takes the answer to a beat that was sent at this time.
func (b *beats) heard(t *task, a hold.Answer, began time.Time) {
	b.tasks.mu.Lock()
	// The row is also gone if the handler has completed the job itself and is still running.
	byHandler := t.hold.ByHandler.Load()
	lost := a.Lost && !byHandler && !t.finishing
	var cancelled *handlerContext
	if !a.Lost || byHandler {
		t.locked = !a.Extended
		if t.extended = began; !a.Extended && !byHandler && t.tx == nil {
			// Most likely the row is locked: the lease may run out, so the next tick tries again.
			t.extended = began.Add(-b.lease / 3)
		}
		if a.Cancelled && t.lost == nil {
			t.lost = ErrCancelled
			cancelled = t.ctx
		}
	}
	b.tasks.mu.Unlock()
	if cancelled != nil {
		cancelled.cancel(ErrCancelled)
	}
	if lost {
		b.tasks.lose(t, "extend", EventLeaseLost)
	}
}

// overdue returns how long ago a handler's context ended if it has not returned for a whole lease since, and otherwise 0.
// It does so only once for a handler; from then on the handler's lease is not extended. The caller holds tasks.mu.
func (b *beats) overdue(t *task, now time.Time) time.Duration {
	if t.ctx == nil || t.since.IsZero() || t.finishing || t.late || now.Sub(t.since) < b.lease {
		return 0
	}
	ended := t.ctx.over()
	if ended.IsZero() || now.Sub(ended) < b.lease {
		return 0
	}
	t.late = true
	b.tasks.anyLate.Store(true)
	b.q.quarantine.Leave(b.q.store, t.hold.Token) // others may start
	return now.Sub(ended)
}

// lateHandler is a handler that does not return.
type lateHandler struct {
	hold  *hold.Hold
	tx    *lazytx.Tx // nil for none
	since time.Time
	over  time.Duration // how long ago its context had ended when this was noticed
}

// leave gives up a handler: it logs that, and closes the connection of its transaction.
func (b *beats) leave(h lateHandler, now time.Time) {
	if h.tx != nil {
		h.tx.GiveUp()
	}
	b.q.log.Error("onceq: a handler does not return although its context has ended; make it return then, because it occupies one of its queue's slots."+
		" Its lease is no longer extended, so if the job is not finished, another worker gets it",
		slog.String("kind", h.hold.Kind), slog.Int64("job", h.hold.ID),
		slog.Duration("running", now.Sub(h.since).Round(time.Millisecond)), slog.Duration("context_ended_ago", h.over.Round(time.Millisecond)))
}

// ping keeps the server from taking live handlers' transactions for frozen ones when they last longer than a
// third of the lease. It has a goroutine of its own, so that pings and beats do not wait for each other.
func (b *beats) ping() {
	now := time.Now()
	var due []*lazytx.Tx
	b.tasks.mu.Lock()
	for _, t := range b.tasks.all {
		if t.tx != nil && t.tx.PingDue(now, b.lease/3) { // once for all tasks of a batch
			due = append(due, t.tx)
		}
	}
	b.tasks.mu.Unlock()
	for _, tx := range due {
		tx.Ping()
	}
}
