package onceq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Each worker has a row in workers, so that people can see who works what, and so that Explain can say that
// nobody works a queue. The worker writes it when it starts and shortly after each full minute, and deletes
// it when it ends. The row of a worker that was killed stays. After three minutes nobody takes it for a live
// one, and the Reaper removes it. Nothing else depends on these rows: without them every job runs. At the
// same times the worker looks for requests to cancel that nobody has heard (unheeded), for held jobs whose
// effects were settled (heldLately), and for limits that nobody has set (limitsMet), and writes what it has
// counted (tally).

// WorkerInfo is what is known about a worker: one Run, or a Drain that takes longer than ten seconds. Times are the
// database's.
type WorkerInfo struct {
	ID      int64          `json:"id"` // random, new for each Run
	Host    string         `json:"host"`
	Process int            `json:"process"` // the process's id on its host
	Version string         `json:"version"` // of this library in its program, "(devel)" if the program does not know
	Schema  int            `json:"schema"`  // the version of the tables that it works with (SchemaVersion)
	Lease   time.Duration  `json:"lease"`   // WorkerConfig.Lease
	Queues  map[string]int `json:"queues"`  // how many jobs of each of its queues it can run at once
	Kinds   []string       `json:"kinds"`   // for which it has handlers, sorted
	Started time.Time      `json:"started"`
	Seen    time.Time      `json:"seen"`  // when it last wrote its row, which it does once a minute
	Stale   bool           `json:"stale"` // it has not for three minutes: it was killed, is frozen, or has lost the database

	Stuck []StuckHandlers `json:"stuck,omitzero"` // what its slots are held by that does not return
	Pool  WorkerPool      `json:"pool"`
}

// StuckHandlers are handlers of one kind in one queue that have not returned for a lease since their context ended. Each holds a slot of its
// queue until it returns or its process ends.
type StuckHandlers struct {
	Queue string    `json:"queue"`
	Kind  string    `json:"kind"`
	Slots int       `json:"slots"` // that they hold
	Job   int64     `json:"job"`   // of the first of them
	Since time.Time `json:"since"` // when the first one's context ended, by the clock of its process
}

// WorkerPool is what a worker knows of the pool that its Queue has, which its handlers' transactions use.
type WorkerPool struct {
	Conns int           `json:"conns"`          // the pool's MaxConns
	Bound []string      `json:"bound,omitzero"` // queues that could run more jobs at once if the pool were larger
	Wait  time.Duration `json:"wait"`           // how long its process has waited for connections of the pool in the minute before Seen, added up; as JSON, in nanoseconds
}

// Trouble says in words which slots are held by handlers that do not return, and that the process waits for connections. It is empty
// if there is nothing to say.
func (w WorkerInfo) Trouble() string {
	var all []string
	for _, s := range w.Stuck {
		all = append(all, fmt.Sprintf("%s of queue %q %s held since %s by handlers of kind %q that do not return although their context has ended",
			numbered(s.Slots, "slot", "slots"), s.Queue, either(s.Slots, "is", "are"), stamp(s.Since), s.Kind))
	}
	if w.starved() {
		all = append(all, fmt.Sprintf("its process waits for connections of its pool of %d: %s in a minute, added up", w.Pool.Conns, w.Pool.Wait.Round(time.Second)))
	}
	return strings.Join(all, "; ")
}

// starved says that at nearly each moment of a minute somebody waited for a connection.
func (w WorkerInfo) starved() bool { return w.Pool.Wait >= presentEvery*9/10 }

// starving reports whether all of the workers are starved: none has a connection for one more handler.
func starving(workers []WorkerInfo) bool {
	return !slices.ContainsFunc(workers, func(w WorkerInfo) bool { return !w.starved() })
}

// stuckIn counts the slots of a queue that are held by handlers that do not return, and names their kinds.
func stuckIn(workers []WorkerInfo, queue string) (slots int, kinds []string) {
	for _, w := range workers {
		for _, s := range w.Stuck {
			if s.Queue == queue {
				slots += s.Slots
				kinds = append(kinds, s.Kind)
			}
		}
	}
	slices.Sort(kinds)
	return slots, slices.Compact(kinds)
}

// bound reports whether workers could run more jobs of a queue at once if their pools were larger, or wait for connections.
func bound(workers []WorkerInfo, queue string) bool {
	return slices.ContainsFunc(workers, func(w WorkerInfo) bool { return w.starved() || slices.Contains(w.Pool.Bound, queue) })
}

// String says where the worker is, how many jobs of each of its queues it can run at once, and whether it is stale.
func (w WorkerInfo) String() string {
	var queues []string
	for _, name := range slices.Sorted(maps.Keys(w.Queues)) {
		queues = append(queues, fmt.Sprintf("%s (%d)", name, w.Queues[name]))
	}
	s := w.Where() + " works " + strings.Join(queues, ", ")
	if w.Stale {
		s += "; not seen since " + stamp(w.Seen)
	}
	if trouble := w.Trouble(); trouble != "" {
		s += "; " + trouble
	}
	return s
}

// Where says in which process the worker is, and on which host.
func (w WorkerInfo) Where() string { return fmt.Sprintf("process %d on %s", w.Process, w.Host) }

const readWorkers = `
select id, host, process, version, schema_version, lease, queues::text, pg_catalog.array_to_json(kinds)::text, started_at, seen_at,
       seen_at < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond', stuck::text, pool::text
  from onceq.workers
 order by host, process, started_at, id`

// Workers lists the workers of all processes, sorted by host and process. A worker deletes its row when it ends. The row of
// one that was killed is Stale after three minutes, and a Reaper removes it after ReaperConfig.Grace. A nil db is the pool.
func (q *Queue) Workers(ctx context.Context, db DB) ([]WorkerInfo, error) {
	if db == nil {
		db = q.pool
	}
	return readAll(ctx, q, db, asIs, "workers", readWorkers, []any{(3 * presentEvery).Microseconds()}, (*WorkerInfo).scan)
}

func (w *WorkerInfo) scan(rows pgx.Rows) error {
	var lease int64
	var queues, kinds, stuck, pool string
	err := rows.Scan(&w.ID, &w.Host, &w.Process, &w.Version, &w.Schema, &lease, &queues, &kinds, &w.Started, &w.Seen,
		&w.Stale, &stuck, &pool)
	if err != nil {
		return err
	}
	w.Lease = time.Duration(lease) * time.Microsecond
	for raw, to := range map[string]any{queues: &w.Queues, kinds: &w.Kinds, stuck: &w.Stuck, pool: &w.Pool} {
		if err := json.Unmarshal([]byte(raw), to); err != nil {
			return err
		}
	}
	if len(w.Stuck) == 0 {
		w.Stuck = nil
	}
	return nil
}

// presence writes the row of one run.
type presence struct {
	q    *Queue
	id   int64 // of the run
	db   DB    // the worker's own
	slow DB    // the same, for what may meet rows that somebody has locked
	args []any // of writePresence: what stays as it is

	tasks  *taskSet
	limits *limitsMet
	watch  *poolWatch
	tally  *tally
	again  chan struct{} // has something when the row is to be written at once

	// Only loop's goroutine uses these, once it runs.
	pool    WorkerPool
	waited  time.Duration // of the pool's, when pool.Wait was computed
	counted time.Time     // when that was

	stop    context.CancelFunc
	writing sync.WaitGroup
	written bool // or tried; only loop's goroutine writes it, and leave reads it after that has ended
}

func newPresence(w *Worker, id int64, db, slow DB, tasks *taskSet, limits *limitsMet, watch *poolWatch, tally *tally) *presence {
	stat := w.q.pool.Stat()
	p := &presence{q: w.q, id: id, db: db, slow: slow, tasks: tasks, limits: limits, watch: watch, tally: tally, again: make(chan struct{}, 1),
		pool: WorkerPool{Conns: int(stat.MaxConns())}, waited: stat.EmptyAcquireWaitTime(), counted: time.Now()}
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

// row gives the arguments of writePresence.
func (p *presence) row() []any {
	if now := time.Now(); now.Sub(p.counted) >= presentEvery/2 { // what is written at once says what the row before it said
		waited := p.q.pool.Stat().EmptyAcquireWaitTime()
		p.pool.Wait, p.waited, p.counted = waited-p.waited, waited, now
	}
	pool := p.pool
	pool.Wait += p.watch.full() // who waits still is not counted yet
	stuck, _ := json.Marshal(append([]StuckHandlers{}, p.tasks.stuck()...))
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

const writePresence = `
select 1 from onceq.be_present($1::bigint, $2::text, $3::int, $4::text, $5::int, $6::bigint, $7::text::jsonb, $8::text[], $9::text::jsonb, $10::text::jsonb) w`

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
	offset := rand.N(countsDelay)
	over := func() time.Time {
		now := time.Now()
		return now.Add(time.Minute - time.Duration(now.Add(-offset).UnixNano()%int64(time.Minute)))
	}
	minute := over()
	for wait := first; sleep(ctx, wait, p.again); wait = time.Until(minute) {
		p.written = true
		err := p.q.guarded(ctx, p.db, writePresence, p.row(), nil)
		if err == nil {
			err = errors.Join(p.q.heedAll(ctx, p.db, p.slow), p.q.unholdAll(ctx, p.slow), p.limits.ask(ctx, p.q, p.db))
		}
		switch {
		case err == nil:
			p.q.works(p.id, workPresence, "")
		case ctx.Err() == nil:
			p.q.fails(p.id, workPresence, "", err)
		}
		if !time.Now().Before(minute) {
			minute = over()
			if err = p.tally.writeAll(); err == nil {
				p.q.works(p.id, workCount, "")
			} else if ctx.Err() == nil {
				p.q.fails(p.id, workCount, "", err)
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
	ctx, cancel := context.WithTimeout(context.Background(), endWithin)
	defer cancel()
	_ = p.q.guarded(ctx, p.db, leave, []any{p.id}, nil)
}
