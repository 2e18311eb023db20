// Package presence writes the row by which people see that a worker lives, and what it works: shortly after
// each full minute, and at once when a handler was given up or has returned after that. At the same times the
// worker does its other chores. It deletes the row when it ends. The row of a worker that was killed stays.
// After three minutes nobody takes it for a live one, and the Reaper removes it. Nothing else depends on
// these rows: without them every job runs.
package presence

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/program"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/task"
	"github.com/onceq/onceq/internal/watch"
)

// Config is what a presence works with.
type Config struct {
	Store    *pg.Store
	Troubles *watch.Troubles
	ID       int64 // of the run
	DB       pg.DB // the worker's own
	Set      *task.Set
	Tally    *count.Tally // is written when a minute is over
	Args     []any        // of stmt.WritePresence, after those of the program
	Bound    []string     // the queues whose handlers may hold as many connections as the pool has for them
	Chores   func(ctx context.Context) error
}

// Presence writes the row of one run.
type Presence struct {
	Config
	again   chan struct{} // has something when the row is to be written at once
	stop    context.CancelFunc
	writing sync.WaitGroup
	written bool // or tried; only loop's goroutine writes it, and Leave reads it after that has ended

	// Only loop's goroutine uses these, once it runs.
	pool    table.Pool
	waited  time.Duration // of the pool's, when pool.Wait was computed
	counted time.Time     // when that was
}

// New returns one that Begin starts.
func New(cfg Config) *Presence {
	cfg.Args = append([]any{cfg.ID, program.Host(), os.Getpid(), program.Library()}, cfg.Args...)
	stat := cfg.Store.Pool.Stat()
	return &Presence{
		Config: cfg, again: make(chan struct{}, 1), pool: table.Pool{Conns: int(stat.MaxConns()), Bound: cfg.Bound},
		waited: stat.EmptyAcquireWaitTime(), counted: time.Now(),
	}
}

// Rouse has the row written at once.
func (p *Presence) Rouse() {
	select {
	case p.again <- struct{}{}:
	default:
	}
}

// row gives the arguments of stmt.WritePresence.
func (p *Presence) row() []any {
	if now := time.Now(); now.Sub(p.counted) >= table.PresentEvery/2 { // what is written at once says what the row before it said
		waited := p.Store.Pool.Stat().EmptyAcquireWaitTime()
		p.pool.Wait, p.waited, p.counted = waited-p.waited, waited, now
	}
	pool := p.pool
	pool.Wait += p.Set.PoolFull() // who waits still is not counted yet
	stuck, _ := json.Marshal(append([]table.Stuck{}, p.Set.Given()...))
	raw, _ := json.Marshal(pool) // such types always encode
	return append(slices.Clone(p.Args), string(stuck), string(raw), p.Store.Version)
}

// Begin starts to write the row.
func (p *Presence) Begin(drain bool) {
	var ctx context.Context
	ctx, p.stop = context.WithCancel(context.Background())
	var first time.Duration
	if drain {
		first = 10 * time.Second // a shorter Drain leaves no row
	}
	p.writing.Go(func() { p.loop(ctx, first) })
}

// loop is the worker's chore, once a minute until ctx ends. The counts of a minute are written only when it
// is over.
func (p *Presence) loop(ctx context.Context, first time.Duration) {
	offset := rand.N(table.CountsDelay)
	over := func() time.Time {
		now := time.Now()
		return now.Add(time.Minute - time.Duration(now.Add(-offset).UnixNano()%int64(time.Minute)))
	}
	minute := over()
	for wait := first; nap.For(ctx, wait, p.again); wait = time.Until(minute) {
		p.written = true
		err := p.Store.Guarded(ctx, p.DB, stmt.WritePresence, p.row(), nil)
		if err == nil {
			err = p.Chores(ctx)
		}
		p.says(ctx, watch.Presence, err)
		if !time.Now().Before(minute) {
			minute = over()
			p.says(ctx, watch.Count, p.Tally.Write())
		}
	}
}

// says reports how a chore went.
func (p *Presence) says(ctx context.Context, work *watch.Work, err error) {
	switch {
	case err == nil:
		p.Troubles.Works(p.ID, work, "")
	case ctx.Err() == nil:
		p.Troubles.Fails(p.ID, work, "", err)
	}
}

// Leave ends loop and deletes the row. A row that it cannot delete becomes stale.
func (p *Presence) Leave() {
	const leave = `with gone as (delete from onceq.workers where id = $1::bigint) select 1`
	p.stop()
	p.writing.Wait()
	if !p.written {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), pg.EndWithin)
	defer cancel()
	_ = p.Store.Guarded(ctx, p.DB, leave, []any{p.ID}, nil)
}
