package queuetest

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// Ran is one run of a job, as its worker reported it.
type Ran struct {
	JobID   int64
	Kind    string
	Attempt int

	// State is what became of the job: StateCompleted, StateDead, StateCancelled, StateHeld, or StateRetrying after a failure, StateDelayed after a
	// snooze or RetryAfter, and StateWaiting where the worker ended. It is 0 where the lease was lost and the outcome refused.
	State onceq.State

	Err error // what the handler returned, or why the outcome was refused
}

// Lost reports whether the outcome was refused because somebody else had taken the job meanwhile.
func (r Ran) Lost() bool { return r.State == 0 }

// RunOne runs the one job that is due first, through whichever handler is for its kind, and returns what became of it.
// The test fails when none is due.
func (db *DB) RunOne(handlers ...onceq.Handler) Ran {
	db.t.Helper()
	ran := db.work(nil, 1, handlers)
	if len(ran) != 1 {
		db.t.Fatalf("queuetest: RunOne: no job of these handlers is due")
	}
	return ran[0]
}

// Drain runs jobs until none is due, also those that handlers enqueue, and returns the runs in the order in which they
// ended. What waits for its time stays: see Advance.
func (db *DB) Drain(handlers ...onceq.Handler) []Ran {
	db.t.Helper()
	return db.work(nil, 0, handlers)
}

// DeliverTwice delivers the one job that is due first two times, as when a worker is taken for dead while it runs and
// another one runs the job again. The first run has lost its lease when it begins: a handler made with Handle runs to
// its end and what it did outside of its lease stays, which is what the second run must cope with. One made with
// HandleTx or HandleBatch is not even called then, for its transaction begins with the lease.
func (db *DB) DeliverTwice(handlers ...onceq.Handler) (first, second Ran) {
	db.t.Helper()
	ran := db.work(func(e onceq.Event) {
		db.exec(`update onceq.jobs set leased_until = null, holder = null, lost = lost + 1 where id = $1`, e.JobID)
	}, 1, handlers)
	if len(ran) != 1 {
		db.t.Fatalf("queuetest: DeliverTwice: no job of these handlers is due")
	}
	return ran[0], db.RunOne(handlers...)
}

// Race runs two workers against each other until no job is due, and returns all runs. The first lease of each job runs
// out as soon as it is given, so that both workers deliver the job at about the same time.
func (db *DB) Race(handlers ...onceq.Handler) []Ran {
	db.t.Helper()
	var mu sync.Mutex
	var ran []Ran
	seen := make(map[int64]bool)
	expire := func(e onceq.Event) {
		mu.Lock()
		again := seen[e.JobID]
		seen[e.JobID] = true
		mu.Unlock()
		if !again {
			db.exec(`update onceq.jobs set leased_until = statement_timestamp() where id = $1`, e.JobID)
		}
	}
	for {
		before := len(ran)
		var workers sync.WaitGroup
		for range 2 {
			workers.Go(func() {
				some := db.work(expire, 0, handlers)
				mu.Lock()
				ran = append(ran, some...)
				mu.Unlock()
			})
		}
		workers.Wait()
		// A job that one worker had locked when the other looked for the last time may be due still.
		if len(ran) == before {
			return ran
		}
	}
}

// ExpireLease makes the lease of a job run out now: the next worker that asks gets the job. It waits while a handler's
// transaction holds the job. The test fails when nobody has it.
func (db *DB) ExpireLease(id int64) {
	db.t.Helper()
	n := db.exec(`update onceq.jobs set leased_until = statement_timestamp() where id = $1 and leased_until is not null`, id)
	if n != 1 {
		db.t.Fatalf("queuetest: ExpireLease: nobody has a lease of job %d", id)
	}
}

// Advance lets d pass for everything that the queue stores: what was to be due, to run out or to be pruned within d is so now.
// columns are those of the application's own tables that hold times a handler looks at, "users.created_at": they are moved
// along, so that what was an hour ago is an hour and d ago. The clock stays, that of Lease.Now, of now() in SQL and of time.Now.
// A job's CreatedAt goes along too, and the keys that go to providers stay what they were.
func (db *DB) Advance(d time.Duration, columns ...string) {
	db.t.Helper()
	if d < 0 {
		db.t.Fatalf("queuetest: Advance: time does not run backwards by %s", -d)
	}
	const by = ` - $1::bigint * interval '1 microsecond'`
	const identity = `coalesce(identity, (extract(epoch from created_at) * 1000000)::bigint)` // as it was before
	for _, name := range columns {
		parts := strings.Split(name, ".")
		if len(parts) != 2 && len(parts) != 3 {
			db.t.Fatalf("queuetest: Advance: %q is no column; name it with its table, and with its schema where that is another one than public", name)
		}
		last := len(parts) - 1
		column := pgx.Identifier(parts[last:]).Sanitize()
		db.own(`update `+pgx.Identifier(parts[:last]).Sanitize()+` set `+column+` = `+column+by, d.Microseconds())
	}
	db.exec(`
with jobs as (
  update onceq.jobs set created_at = created_at`+by+`, run_at = run_at`+by+`, leased_until = leased_until`+by+`, identity = `+identity+`
),
fences as (
  update onceq.job_fences set created_at = created_at`+by+`, leased_until = leased_until`+by+`, finished_at = finished_at`+by+`
),
history as (
  update onceq.job_history set created_at = created_at`+by+`, run_at = run_at`+by+`, identity = `+identity+`, finished_at = finished_at`+by+`, keep_until = keep_until`+by+`
),
cancels as (
  update onceq.job_cancels set requested_at = requested_at`+by+`
),
queues as (
  update onceq.queues set swept_at = swept_at`+by+`
)
update onceq.waiters set idle_until = idle_until`+by, d.Microseconds())
}

// exec runs a statement in which the schema is written as onceq, and returns how many rows it changed.
func (db *DB) exec(statement string, args ...any) int64 {
	db.t.Helper()
	return db.own(strings.ReplaceAll(statement, "onceq.", pgx.Identifier{db.Schema}.Sanitize()+"."), args...)
}

// own runs a statement about the application's tables.
func (db *DB) own(statement string, args ...any) int64 {
	db.t.Helper()
	tag, err := db.Pool.Exec(context.Background(), statement, args...)
	if err != nil {
		db.t.Errorf("queuetest: %v", err)
	}
	return tag.RowsAffected()
}

// work runs a worker until limit jobs were claimed or none is due, and tells claimed of each claim before its handler
// begins.
func (db *DB) work(claimed func(onceq.Event), limit int, handlers []onceq.Handler) []Ran {
	db.t.Helper()
	var mu sync.Mutex
	var ran []Ran
	// By token: a completion that the handler makes and then undoes is followed by what became of the run. By job for a
	// cancellation, which has none.
	byToken, byJob := make(map[int64]int), make(map[int64]int)
	hook := func(_ context.Context, e onceq.Event) {
		if e.Name != "" || e.JobID == 0 {
			return // of an effect or a fence that the handler used
		}
		r := Ran{JobID: e.JobID, Kind: e.Kind, Attempt: e.Attempt, Err: e.Err}
		switch e.Type {
		case onceq.EventClaimed:
			if claimed != nil {
				claimed(e)
			}
			return
		case onceq.EventCompleted:
			r.State = onceq.StateCompleted
		case onceq.EventFailed:
			r.State = onceq.StateRetrying
		case onceq.EventSnoozed, onceq.EventDeferred:
			r.State = onceq.StateDelayed
		case onceq.EventReleased:
			r.State = onceq.StateWaiting
		case onceq.EventDead:
			r.State = onceq.StateDead
		case onceq.EventCancelled:
			r.State = onceq.StateCancelled
		case onceq.EventHeld:
			r.State = onceq.StateHeld
		case onceq.EventStale, onceq.EventLeaseLost:
		default:
			return
		}
		mu.Lock()
		defer mu.Unlock()
		i, again := byToken[e.Token]
		if e.Token == 0 {
			i, again = byJob[e.JobID]
		}
		if again {
			ran[i] = r
			return
		}
		byToken[e.Token], byJob[e.JobID] = len(ran), len(ran)
		ran = append(ran, r)
	}
	q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema, Hook: onceq.HookFunc(hook)})
	if err == nil {
		var w *onceq.Worker
		if w, err = onceq.NewWorker(q, onceq.WorkerConfig{}, handlers...); err == nil {
			err = w.Drain(context.Background(), limit)
		}
	}
	if err != nil {
		db.t.Errorf("queuetest: %v", err)
	}
	mu.Lock()
	defer mu.Unlock()
	return ran
}
