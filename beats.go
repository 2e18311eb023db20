package onceq

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/lazytx"
)

// beats keep what this worker holds: they extend leases, end what is lost or cancelled, and give up handlers that do not return.
type beats struct {
	q     *Queue
	id    int64           // of the run
	db    *pgxpool.Pool   // one connection, for beats only
	lease time.Duration   // by which leases are extended
	ctx   context.Context // as for writing outcomes: ends when Run has waited enough
	tasks *taskSet
	watch *poolWatch
}

// loop extends what is held for longer than a third of the lease, and ends what is lost or cancelled.
func (b *beats) loop(stop <-chan struct{}) {
	ticker := time.NewTicker(max(200*time.Millisecond, b.lease/12))
	defer ticker.Stop()
	for {
		select {
		case <-stop:
			return
		case <-ticker.C:
		}
		b.once()
		b.watch.look()
	}
}

const beatChunk = 5000

func (b *beats) once() {
	now := time.Now()
	var due []*task
	var expired []*task
	var late []lateHandler
	b.tasks.mu.Lock()
	for _, t := range b.tasks.all {
		if over := b.overdue(t, now); over > 0 {
			h := lateHandler{t.lease, t.tx, t.since, over}
			late = append(late, h)
			b.q.late.Store(t.lease.Token, h)
		}
		switch held := now.Sub(t.extended); {
		case t.late && held < b.lease:
		case t.lost != nil && !errors.Is(t.lost, ErrCancelled):
		case held >= b.lease && !t.finishing:
			expired = append(expired, t)
		case held >= b.lease/3:
			due = append(due, t)
		}
	}
	b.tasks.mu.Unlock()
	for _, h := range late {
		b.leave(h, now)
	}
	// No beat has come through for a whole lease: the database may have given the jobs away. A clock of this
	// process can only say so much, but handlers that go on would work for nothing.
	for _, t := range expired {
		b.tasks.lose(t, "extend", EventLeaseLost)
	}
	slices.SortFunc(due, func(a, b *task) int { return int(a.lease.ID - b.lease.ID) })
	if len(due) == 0 {
		b.q.works(b.id, workExtend, "")
	}
	for chunk := range slices.Chunk(due, beatChunk) {
		leases, running := make([]*Lease, len(chunk)), make([]bool, len(chunk))
		b.tasks.mu.Lock()
		for i, t := range chunk {
			leases[i], running[i] = t.lease, !t.since.IsZero()
		}
		b.tasks.mu.Unlock()
		// Not cut off by the shutdown: outcomes are still to be written, and handlers may take a while to return.
		ctx, cancel := context.WithTimeout(b.ctx, b.lease/3)
		began := time.Now()
		answers, err := b.q.beat(ctx, b.db, leases, running, b.lease)
		cancel()
		if err != nil {
			b.q.fails(b.id, workExtend, "", err, slog.Int("leases", len(leases)))
			return
		}
		b.q.works(b.id, workExtend, "")
		for i, t := range chunk {
			a := answers[i]
			b.tasks.mu.Lock()
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
			b.tasks.mu.Unlock()
			if cancelled != nil {
				cancelled.cancel(ErrCancelled)
			}
			if a.lost && !finishing {
				b.tasks.lose(t, "extend", EventLeaseLost)
			}
		}
	}
}

// overdue gives, once, for how long a handler has not returned since its context ended, where that is a lease. From then on
// its own lease is not extended. The caller holds tasks.mu.
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
	b.q.quarantine.leave(t.lease.Token) // others may start
	return now.Sub(ended)
}

// lateHandler is one that does not return.
type lateHandler struct {
	lease *Lease
	tx    *lazytx.Tx // nil for none
	since time.Time
	over  time.Duration // since its context ended, when that was noticed
}

// leave says that a handler is not waited for any more, and takes what its transaction keeps.
func (b *beats) leave(h lateHandler, now time.Time) {
	if h.tx != nil {
		h.tx.GiveUp()
	}
	b.q.log.Error("onceq: a handler does not return although its context has ended; it must, or it keeps one of its queue's slots."+
		" Its lease is not extended any more, so its job goes to another worker where it is not done",
		slog.String("kind", h.lease.Kind), slog.Int64("job", h.lease.ID),
		slog.Duration("running", now.Sub(h.since).Round(time.Millisecond)), slog.Duration("context_ended_ago", h.over.Round(time.Millisecond)))
}

// pingLoop keeps live handlers' transactions from being taken for frozen ones, where they last longer than a third
// of the lease. It waits for nobody, so that handlers and beats do not wait for each other.
func (b *beats) pingLoop(stop <-chan struct{}) {
	ticker := time.NewTicker(max(200*time.Millisecond, b.lease/12))
	defer ticker.Stop()
	for {
		select {
		case <-stop:
			return
		case <-ticker.C:
		}
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
}
