package onceq

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"
)

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
