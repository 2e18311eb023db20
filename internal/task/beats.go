package task

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

// Late is a handler that does not return.
type Late struct {
	Hold  *hold.Hold
	Since time.Time
	tx    *lazytx.Tx    // nil for none
	over  time.Duration // how long ago its context had ended when this was noticed
}

// Tick calls do some twelve times in a lease until stop is closed.
func (s *Set) Tick(stop <-chan struct{}, do func()) {
	ticker := time.NewTicker(max(200*time.Millisecond, s.Lease/12))
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

// Beat extends each lease a third of a lease after its claim or its latest extension, and ends what is lost
// or cancelled.
func (s *Set) Beat() {
	defer s.look()
	now := time.Now()
	var due, expired []*Task
	var late []Late
	s.mu.Lock()
	for _, t := range s.all {
		if over := s.ended(t, now); over > 0 {
			h := Late{t.Hold, t.since, t.tx, over}
			late = append(late, h)
			s.Late.Store(t.Hold.Token, h)
		}
		switch held := now.Sub(t.extended); {
		case t.late && held < s.Lease:
		case t.lost != nil && !errors.Is(t.lost, s.Cancelled):
		case held >= s.Lease && !t.finishing && !t.Hold.ByHandler.Load():
			expired = append(expired, t)
		case held >= s.Lease/3:
			due = append(due, t)
		}
	}
	s.mu.Unlock()
	for _, h := range late {
		s.leave(h, now)
	}
	if len(late) > 0 {
		s.Stuck()
	}
	// No beat has succeeded for a whole lease: the database may have given the jobs to others. This process's
	// clock cannot prove that, but handlers that continue would probably work for nothing.
	for _, t := range expired {
		s.Lose(t, "extend", false)
	}
	if len(due) == 0 {
		s.Troubles.Works(s.ID, watch.Extend, "")
	}
	s.Extend(due)
}

// Extend extends the leases of tasks, and ends what is lost or cancelled. The executor calls it as well.
func (s *Set) Extend(tasks []*Task) {
	slices.SortFunc(tasks, func(a, b *Task) int { return cmp.Compare(a.Hold.ID, b.Hold.ID) })
	for chunk := range slices.Chunk(tasks, table.ChunkRows) {
		holds, running := make([]*hold.Hold, len(chunk)), make([]bool, len(chunk))
		s.mu.Lock()
		for i, t := range chunk {
			holds[i], running[i] = t.Hold, !t.since.IsZero()
		}
		s.mu.Unlock()
		// The shutdown does not end this: outcomes are still to be written, and handlers may take a while to
		// return. But however long a lease is, a connection that has gone silent ends a beat after
		// pg.SessionLimit.
		ctx, cancel := context.WithTimeout(s.Ctx, min(s.Lease/3, pg.SessionLimit))
		began := time.Now()
		answers, err := hold.Extend(ctx, s.Store, s.DB, holds, running, s.Lease)
		cancel()
		if err != nil {
			s.Troubles.Fails(s.ID, watch.Extend, "", err, slog.Int("leases", len(holds)))
			return
		}
		s.Troubles.Works(s.ID, watch.Extend, "")
		for i, t := range chunk {
			s.heard(t, answers[i], began)
		}
	}
}

// heard takes the answer to a beat that was sent at this time.
func (s *Set) heard(t *Task, a hold.Answer, began time.Time) {
	s.mu.Lock()
	// The row is also gone if the handler has completed the job itself and is still running.
	byHandler := t.Hold.ByHandler.Load()
	lost := a.Lost && !byHandler && !t.finishing
	var cancelled *Context
	if !a.Lost || byHandler {
		t.locked = !a.Extended
		if t.extended = began; !a.Extended && !byHandler && t.tx == nil {
			// Most likely the row is locked: the lease may run out, so the next tick tries again.
			t.extended = began.Add(-s.Lease / 3)
		}
		if a.Cancelled && t.lost == nil {
			t.lost = s.Cancelled
			cancelled = t.ctx
		}
	}
	s.mu.Unlock()
	if cancelled != nil {
		cancelled.Cancel(s.Cancelled)
	}
	if lost {
		s.Lose(t, "extend", false)
	}
}

// ended returns how long ago a handler's context ended if it has not returned for a whole lease since, and
// otherwise 0. It does so only once for a handler; from then on the handler's lease is not extended. The
// caller holds mu.
func (s *Set) ended(t *Task, now time.Time) time.Duration {
	if t.ctx == nil || t.since.IsZero() || t.finishing || t.late || now.Sub(t.since) < s.Lease {
		return 0
	}
	ended := t.ctx.over()
	if ended.IsZero() || now.Sub(ended) < s.Lease {
		return 0
	}
	t.late = true
	s.anyLate.Store(true)
	s.Turn.Leave(s.Store, t.Hold.Token) // others may start
	return now.Sub(ended)
}

// leave gives up a handler: it logs that, and closes the connection of its transaction.
func (s *Set) leave(h Late, now time.Time) {
	if h.tx != nil {
		h.tx.GiveUp()
	}
	s.Log.Error("onceq: a handler does not return although its context has ended; make it return then, because it occupies"+
		" one of its queue's slots. Its lease is no longer extended, so if the job is not finished, another worker gets it",
		slog.String("kind", h.Hold.Kind), slog.Int64("job", h.Hold.ID),
		slog.Duration("running", now.Sub(h.Since).Round(time.Millisecond)),
		slog.Duration("context_ended_ago", h.over.Round(time.Millisecond)))
}

// Ping keeps the server from taking live handlers' transactions for frozen ones when they last longer than a
// third of the lease. It has a goroutine of its own, so that pings and beats do not wait for each other.
func (s *Set) Ping() {
	now := time.Now()
	var due []*lazytx.Tx
	s.mu.Lock()
	for _, t := range s.all {
		if t.tx != nil && t.tx.PingDue(now, s.Lease/3) { // once for all tasks of a batch
			due = append(due, t.tx)
		}
	}
	s.mu.Unlock()
	for _, tx := range due {
		tx.Ping()
	}
}
