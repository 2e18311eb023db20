package onceq

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// Each worker has a row in workers, so that people can see who works what, and so that Explain can say that
// nobody works a queue. The worker writes it when it starts and shortly after each full minute, and deletes
// it when it ends. The row of a worker that was killed stays. After three minutes nobody takes it for a live
// one, and the Reaper removes it. Nothing else depends on these rows: without them every job runs. At the
// same times the worker looks for requests to cancel that nobody has heard (unheeded), for held jobs whose
// effects were settled (heldLately), and for limits that nobody has set (limitsMet), and writes what it has
// counted (package count).

// presence writes the row of one run.
type presence struct {
	q    *Queue
	id   int64 // of the run
	db   DB    // the worker's own
	slow DB    // the same, for what may meet rows that somebody has locked
	args []any // of stmt.WritePresence: what stays as it is

	tasks  *taskSet
	limits *limitsMet
	watch  *poolWatch
	tally  *count.Tally
	again  chan struct{} // has something when the row is to be written at once

	// Only loop's goroutine uses these, once it runs.
	pool    table.Pool
	waited  time.Duration // of the pool's, when pool.Wait was computed
	counted time.Time     // when that was

	stop    context.CancelFunc
	writing sync.WaitGroup
	written bool // or tried; only loop's goroutine writes it, and leave reads it after that has ended
}

func newPresence(w *Worker, id int64, db, slow DB, tasks *taskSet, limits *limitsMet, watch *poolWatch, tally *count.Tally) *presence {
	stat := w.q.store.Pool.Stat()
	p := &presence{q: w.q, id: id, db: db, slow: slow, tasks: tasks, limits: limits, watch: watch, tally: tally, again: make(chan struct{}, 1),
		pool: table.Pool{Conns: int(stat.MaxConns())}, waited: stat.EmptyAcquireWaitTime(), counted: time.Now()}
	queues := make(map[string]int, len(w.queues))
	for _, name := range slices.Sorted(maps.Keys(w.queues)) {
		n := w.queues[name].Concurrency
		if w.pooledIn[name] && n >= usually(p.pool.Conns) {
			p.pool.Bound = append(p.pool.Bound, name)
		}
		queues[name] = n
		for _, h := range w.handlers {
			queues[name] = max(queues[name], n*h.size) // a batch handler has several jobs
		}
	}
	raw, _ := json.Marshal(queues) // a map of strings to numbers always encodes
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	p.args = []any{id, host, os.Getpid(), libraryVersion(), SchemaVersion, w.lease.Microseconds(), string(raw), w.kinds}
	return p
}

// rouse has the row written at once, because a handler was given up, or has returned after it was.
func (p *presence) rouse() {
	select {
	case p.again <- struct{}{}:
	default:
	}
}

// row gives the arguments of stmt.WritePresence.
func (p *presence) row() []any {
	if now := time.Now(); now.Sub(p.counted) >= table.PresentEvery/2 { // what is written at once says what the row before it said
		waited := p.q.store.Pool.Stat().EmptyAcquireWaitTime()
		p.pool.Wait, p.waited, p.counted = waited-p.waited, waited, now
	}
	pool := p.pool
	pool.Wait += p.watch.full() // who waits still is not counted yet
	stuck, _ := json.Marshal(append([]table.Stuck{}, p.tasks.stuck()...))
	raw, _ := json.Marshal(pool) // such types always encode
	return append(slices.Clone(p.args), string(stuck), string(raw))
}

// libraryVersion is the version of this package that the program was built with.
func libraryVersion() string {
	const unknown, path = "(devel)", "github.com/onceq/onceq"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return unknown
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == path && m.Replace == nil && m.Version != "" {
			return m.Version
		}
	}
	return unknown
}

// begin starts to write the row.
func (p *presence) begin(drain bool) {
	var ctx context.Context
	ctx, p.stop = context.WithCancel(context.Background())
	var first time.Duration
	if drain {
		first = 10 * time.Second // a shorter Drain leaves no row
	}
	p.writing.Go(func() { p.loop(ctx, first) })
}

// loop is the worker's chore, once a minute until ctx ends. The counts of a minute are written only when it is over.
func (p *presence) loop(ctx context.Context, first time.Duration) {
	offset := rand.N(table.CountsDelay)
	over := func() time.Time {
		now := time.Now()
		return now.Add(time.Minute - time.Duration(now.Add(-offset).UnixNano()%int64(time.Minute)))
	}
	minute := over()
	for wait := first; nap.For(ctx, wait, p.again); wait = time.Until(minute) {
		p.written = true
		err := p.q.store.Guarded(ctx, p.db, stmt.WritePresence, p.row(), nil)
		if err == nil {
			err = errors.Join(heedAll(ctx, p.q, p.db, p.slow), unholdAll(ctx, p.q, p.slow), p.limits.ask(ctx, p.q, p.db))
		}
		switch {
		case err == nil:
			p.q.troubles.Works(p.id, watch.Presence, "")
		case ctx.Err() == nil:
			p.q.troubles.Fails(p.id, watch.Presence, "", err)
		}
		if !time.Now().Before(minute) {
			minute = over()
			if err = p.tally.Write(); err == nil {
				p.q.troubles.Works(p.id, watch.Count, "")
			} else if ctx.Err() == nil {
				p.q.troubles.Fails(p.id, watch.Count, "", err)
			}
		}
	}
}

// leave ends loop and deletes the row. A row that it cannot delete becomes stale.
func (p *presence) leave() {
	const leave = `with gone as (delete from onceq.workers where id = $1::bigint) select 1`
	p.stop()
	p.writing.Wait()
	if !p.written {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), pg.EndWithin)
	defer cancel()
	_ = p.q.store.Guarded(ctx, p.db, leave, []any{p.id}, nil)
}
