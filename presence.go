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

// Each worker has a row in workers, so that people can see who works what, and so that Explain can say that nobody works a
// queue. The worker writes it when it starts and once a minute, and deletes it when it ends. The row of a worker that was
// killed stays; after staleAfter nobody takes it for a live one, and the Reaper removes it. Nothing else depends on these
// rows: without them every job runs. At the same times the worker looks for requests to cancel that nobody has heard (unheeded), and
// for held jobs whose effects were settled (heldLately).

const (
	presentEvery = time.Minute
	staleAfter   = 3 * time.Minute  // two rows that did not come, and some time for a busy server
	drainListed  = 10 * time.Second // a shorter Drain leaves no row
)

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
	return s
}

// Where says in which process the worker is, and on which host.
func (w WorkerInfo) Where() string { return fmt.Sprintf("process %d on %s", w.Process, w.Host) }

const readWorkers = `
select id, host, process, version, schema_version, lease, queues::text, array_to_json(kinds)::text, started_at, seen_at,
       seen_at < statement_timestamp() - $1::bigint * interval '1 microsecond'
  from onceq.workers
 order by host, process, started_at, id`

// Workers lists the workers of all processes, sorted by host and process. A worker deletes its row when it ends. The row of
// one that was killed is Stale after three minutes, and a Reaper removes it after ReaperConfig.Grace. A nil db is the pool.
func (q *Queue) Workers(ctx context.Context, db DB) ([]WorkerInfo, error) {
	if db == nil {
		db = q.pool
	}
	var all []WorkerInfo
	err := q.send(ctx, db, asIs, readWorkers, []any{staleAfter.Microseconds()}, each(func(rows pgx.Rows) error {
		var w WorkerInfo
		var lease int64
		var queues, kinds string
		if err := rows.Scan(&w.ID, &w.Host, &w.Process, &w.Version, &w.Schema, &lease, &queues, &kinds, &w.Started, &w.Seen, &w.Stale); err != nil {
			return err
		}
		w.Lease = time.Duration(lease) * time.Microsecond
		if err := json.Unmarshal([]byte(queues), &w.Queues); err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(kinds), &w.Kinds); err != nil {
			return err
		}
		all = append(all, w)
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("onceq: workers: %w", err)
	}
	return all, nil
}

// presence writes the row of one run.
type presence struct {
	q    *Queue
	id   int64 // of the run
	db   DB    // the worker's own
	slow DB    // the same, for what may meet rows that somebody has locked
	args []any // of writePresence

	stop    context.CancelFunc
	writing sync.WaitGroup
	written bool // or tried; only loop's goroutine writes it, and leave reads it after that has ended
}

func newPresence(w *Worker, id int64, db, slow DB) *presence {
	queues := make(map[string]int, len(w.queues))
	for name, c := range w.queues {
		queues[name] = c.Concurrency
	}
	for _, h := range w.handlers {
		for name, c := range w.queues {
			queues[name] = max(queues[name], c.Concurrency*h.size) // a batch handler has several jobs
		}
	}
	raw, _ := json.Marshal(queues) // a map of strings to numbers always encodes
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return &presence{q: w.q, id: id, db: db, slow: slow, args: []any{
		id, host, os.Getpid(), libraryVersion(), SchemaVersion, w.lease.Microseconds(), string(raw), w.kinds,
	}}
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
insert into onceq.workers (id, host, process, version, schema_version, lease, queues, kinds, started_at, seen_at)
values ($1::bigint, $2::text, $3::int, $4::text, $5::int, $6::bigint, $7::text::jsonb, $8::text[], statement_timestamp(), statement_timestamp())
on conflict (id) do update set seen_at = excluded.seen_at
returning 1`

// begin starts to write the row.
func (p *presence) begin(drain bool) {
	var ctx context.Context
	ctx, p.stop = context.WithCancel(context.Background())
	var first time.Duration
	if drain {
		first = drainListed
	}
	p.writing.Go(func() { p.loop(ctx, first) })
}

// loop writes the row once a minute, until ctx ends.
func (p *presence) loop(ctx context.Context, first time.Duration) {
	for wait := first; sleep(ctx, wait, nil); wait = presentEvery + rand.N(presentEvery/10) {
		p.written = true
		err := p.q.guarded(ctx, p.db, writePresence, p.args, nil)
		if err == nil {
			err = errors.Join(p.q.heedAll(ctx, p.db, p.slow), p.q.unholdAll(ctx, p.slow))
		}
		switch {
		case err == nil:
			p.q.works(p.id, workPresence, "")
		case ctx.Err() == nil:
			p.q.fails(p.id, workPresence, "", err)
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
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	_ = p.q.guarded(ctx, p.db, leave, []any{p.id}, nil)
}
