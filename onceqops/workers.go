package onceqops

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// WorkerInfo is what is known about a worker: one Run, or a Drain that takes longer than ten seconds. Times are the
// database's.
type WorkerInfo struct {
	ID      int64          `json:"id"` // random, new for each Run
	Host    string         `json:"host"`
	Process int            `json:"process"`      // the process's id on its host
	Version string         `json:"version"`      // of this library in its program, "(devel)" if the program does not know
	App     string         `json:"app,omitzero"` // the application's (Config.Version), if known
	Schema  int            `json:"schema"`       // the version of the tables that it works with (SchemaVersion)
	Lease   time.Duration  `json:"lease"`        // WorkerConfig.Lease
	Queues  map[string]int `json:"queues"`       // how many jobs of each of its queues it can run at once
	Kinds   []string       `json:"kinds"`        // for which it has handlers, sorted
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
			table.Numbered(s.Slots, "slot", "slots"), s.Queue, table.Either(s.Slots, "is", "are"), table.Stamp(s.Since), s.Kind))
	}
	if w.starved() {
		all = append(all, fmt.Sprintf("its process waits for connections of its pool of %d: %s in a minute, added up", w.Pool.Conns, w.Pool.Wait.Round(time.Second)))
	}
	return strings.Join(all, "; ")
}

// starved says that at nearly each moment of a minute somebody waited for a connection.
func (w WorkerInfo) starved() bool { return w.Pool.Wait >= table.PresentEvery*9/10 }

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
		s += "; not seen since " + table.Stamp(w.Seen)
	}
	if trouble := w.Trouble(); trouble != "" {
		s += "; " + trouble
	}
	return s
}

// Where says in which process the worker is, and on which host.
func (w WorkerInfo) Where() string { return fmt.Sprintf("process %d on %s", w.Process, w.Host) }

const readWorkers = `
select id, host, process, version, application, schema_version, lease, queues::text, pg_catalog.array_to_json(kinds)::text, started_at, seen_at,
       seen_at < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond', stuck::text, pool::text
  from onceq.workers
 order by host, process, started_at, id`

// Workers lists the workers of all processes, sorted by host and process. A worker deletes its row when it ends. The row of
// one that was killed is Stale after three minutes, and a Reaper removes it after ReaperConfig.Grace. A nil db is the pool.
func (q *Ops) Workers(ctx context.Context, db onceq.DB) ([]WorkerInfo, error) {
	if db == nil {
		db = q.store.Pool
	}
	return readAll(ctx, q, db, pg.AsIs, "workers", readWorkers, []any{(3 * table.PresentEvery).Microseconds()}, (*WorkerInfo).scan)
}

func (w *WorkerInfo) scan(rows pgx.Rows) error {
	var lease int64
	var queues, kinds, stuck, pool string
	err := rows.Scan(&w.ID, &w.Host, &w.Process, &w.Version, &w.App, &w.Schema, &lease, &queues, &kinds, &w.Started, &w.Seen,
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

// Busy is what a worker has of one of its queues. Its counts stop at StatsCap of each priority, and do not
// have jobs that stand behind as many others.
type Busy struct {
	Queue   string
	Leased  int     // jobs that the worker has
	Running int     // those of them that it has not claimed ahead, while all of its slots were taken
	Jobs    []int64 // the ids of the first 20 that run
}

// readBusy reads what given workers ($2, the upper halves of their ids) have of queues.
const readBusy = `
select q.queue, count(*), count(*) filter (where j.ahead is null),
       (pg_catalog.array_agg(j.id order by j.id) filter (where j.ahead is null))[1:20]
  from pg_catalog.unnest($1::text[]) q (queue)
 cross join (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select id, leased_until, holder, ahead from onceq.jobs
        where queue = q.queue and priority = p.priority and run_at <= statement_timestamp()
        order by run_at, id
        limit $3::int) j
 where j.leased_until > statement_timestamp() and j.holder >> 32 = any ($2::bigint[])
 group by q.queue
 order by q.queue`

// Busy says which jobs a worker has, by queue. Queues of which it has none are left out. A nil db is the
// pool.
func (q *Ops) Busy(ctx context.Context, db onceq.DB, worker WorkerInfo) ([]Busy, error) {
	if db == nil {
		db = q.store.Pool
	}
	for name := range worker.Queues {
		if err := checkText("worker.Queues", name); err != nil {
			return nil, err
		}
	}
	return q.busy(ctx, db, "busy", slices.Collect(maps.Keys(worker.Queues)), []int64{worker.ID >> 32})
}

func (q *Ops) busy(ctx context.Context, db onceq.DB, what string, queues []string, of []int64) ([]Busy, error) {
	return readAll(ctx, q, db, pg.Reading, what, readBusy, []any{queues, of, StatsCap}, (*Busy).scan)
}

func (b *Busy) scan(rows pgx.Rows) error { return rows.Scan(&b.Queue, &b.Leased, &b.Running, &b.Jobs) }
