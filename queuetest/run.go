package queuetest

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/bridge"
	"github.com/onceq/onceq/internal/pg"
)

// Ran is one run of a job, as its worker reported it.
type Ran struct {
	JobID   int64
	Kind    string
	Attempt int

	// State is the job's state after the run: StateCompleted, StateDead, StateCancelled or StateHeld; StateRetrying
	// after a failure; StateDelayed after a Snooze or RetryAfter; StateWaiting if the worker ended. It is 0 if the
	// lease was lost and the outcome refused.
	State onceq.State

	Err error // what the handler returned, or why the outcome was refused
}

// Lost reports whether the outcome was refused because another holder had taken the job.
func (r Ran) Lost() bool { return r.State == 0 }

// RunOne runs the job that is due first, with the handler for its kind, and returns the run. The test fails if no job
// is due.
//
// The connections that a worker has beside the pool stay open from one run to the next, here and in the functions below,
// until the test ends. What "alter database … set" or "alter role … set" changes meanwhile does not reach them.
func (db *DB) RunOne(handlers ...onceq.Handler) Ran {
	db.t.Helper()
	ran := db.work(nil, 1, handlers)
	if len(ran) != 1 {
		db.noneDue("RunOne", handlers)
	}
	return ran[0]
}

// Drain runs jobs until none is due, including those that handlers enqueue. It returns the runs in the order in which they
// were claimed. Jobs that are not due yet stay: see Advance.
func (db *DB) Drain(handlers ...onceq.Handler) []Ran {
	db.t.Helper()
	return db.work(nil, 0, handlers)
}

// DeliverTwice delivers the job that is due first twice, as if a worker were taken for dead while it runs and another
// one ran the job again. The first run has already lost its lease when it begins. A handler made with Handle runs to
// its end. What it did outside its lease stays, and the second run must cope with that. A handler made with HandleTx or
// HandleBatch is not even called in the first run, because its transaction begins with the lease.
func (db *DB) DeliverTwice(handlers ...onceq.Handler) (first, second Ran) {
	db.t.Helper()
	ran := db.work(func(e onceq.Event) {
		db.exec(`update onceq.jobs set leased_until = null, holder = null, lost = lost + 1 where id = $1`, e.JobID)
	}, 1, handlers)
	if len(ran) != 1 {
		db.noneDue("DeliverTwice", handlers)
	}
	return ran[0], db.RunOne(handlers...)
}

// noneDue fails the test because op found no job, and says what is there instead. It only ends the test if op could not look
// at all, because work has said why.
func (db *DB) noneDue(op string, handlers []onceq.Handler) {
	db.t.Helper()
	if len(handlers) == 0 {
		db.t.FailNow()
	}
	const look = `
select (select format('the next one, of kind %s, in %s s', kind, ceil(extract(epoch from run_at - statement_timestamp())))
          from onceq.jobs where kind = any ($1) and run_at > statement_timestamp() order by run_at limit 1),
       (select string_agg(distinct format('%s in queue %s', kind, queue), ', ')
          from onceq.jobs where kind <> all ($1) and run_at <= statement_timestamp() and leased_until is null)`
	var kinds []string
	for _, h := range handlers {
		kinds = append(kinds, h.Kind())
	}
	var later, others *string
	err := db.Pool.QueryRow(context.Background(), db.named(look), kinds).Scan(&later, &others)
	what := "queuetest: " + op + ": no job of these handlers is due"
	if later != nil {
		what += "; " + *later + " (see Advance)"
	}
	if others != nil {
		what += "; due jobs of kinds without a handler: " + *others
	}
	if err != nil {
		what += "; looking for others: " + err.Error()
	}
	db.t.Fatal(what)
}

// Race runs two workers against each other until no job is due, and returns all runs. The first lease of each job
// expires as soon as it is given, so both workers deliver the job at about the same time.
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
		// A job that one worker had locked during the other's last claim may still be due.
		if len(ran) == before {
			return ran
		}
	}
}

// ExpireLease ends the lease of a job now: the next worker that asks gets the job. It waits while a handler's
// transaction holds the job. The test fails if the job has no lease.
func (db *DB) ExpireLease(id int64) {
	db.t.Helper()
	n := db.exec(`update onceq.jobs set leased_until = statement_timestamp() where id = $1 and leased_until is not null`, id)
	if n != 1 {
		db.t.Fatalf("queuetest: ExpireLease: job %d has no lease", id)
	}
}

// Advance lets d pass for everything that the queue stores: what would be due, expire or be pruned within d does so
// now. columns names columns of the application's own tables with times that a handler looks at, such as
// "users.created_at". They are moved along, so what was an hour ago becomes an hour and d ago. The clock itself does
// not move: Lease.Now, now() in SQL and time.Now stay. A column of type date moves by whole days only: another d fails
// the test. A job's CreatedAt moves too, but the keys that go to providers stay the same. The times of
// schedules (onceqcron) move too, so the next tick is at a time that is not in its timetable, and however many nights pass, the
// ticks of all have the date of one.
func (db *DB) Advance(d time.Duration, columns ...string) {
	db.t.Helper()
	if d < 0 {
		db.t.Fatalf("queuetest: Advance: d is negative: %s", d)
	}
	const by = ` - $1::bigint * interval '1 microsecond'`
	const identity = `coalesce(identity, (extract(epoch from created_at) * 1000000)::bigint)` // the value before the move
	const errors = `(select jsonb_agg(e || jsonb_build_object('at', (e ->> 'at')::timestamptz` + by + `) order by n) from jsonb_array_elements(errors) with ordinality x(e, n))`
	for _, name := range columns {
		parts := strings.Split(name, ".")
		if len(parts) != 2 && len(parts) != 3 {
			db.t.Fatalf("queuetest: Advance: %q is not a column; name it with its table, and with its schema if that is not public", name)
		}
		last := len(parts) - 1
		table, column := pgx.Identifier(parts[:last]).Sanitize(), pgx.Identifier(parts[last:]).Sanitize()
		if d%(24*time.Hour) != 0 && db.own(`select from pg_attribute where attrelid = to_regclass($1) and attname = $2 and atttypid = 'date'::regtype`, table, parts[last]) > 0 {
			db.t.Fatalf("queuetest: Advance: %s is a date, which moves by whole days only, and d is %s", name, d)
		}
		db.own(`update `+table+` set `+column+` = `+column+by, d.Microseconds())
	}
	statement := `
with jobs as (
  update onceq.jobs set created_at = created_at` + by + `, run_at = run_at` + by + `, due_at = due_at` + by + `, leased_until = leased_until` + by + `, identity = ` + identity + `, errors = ` + errors + `
),
waits as (
  update onceq.job_waits set created_at = created_at` + by + `, run_at = run_at` + by + `, due_at = due_at` + by + `, identity = ` + identity + `, errors = ` + errors + `
),
rates as (
  update onceq.limit_rates set free_at = free_at` + by + `
),
calls as (
  update onceq.lane_calls set due = due` + by + `
),
fences as (
  update onceq.job_fences set created_at = created_at` + by + `, leased_until = leased_until` + by + `, finished_at = finished_at` + by + `,
         identity = case when class in (1, 2) then ` + identity + ` end
),
history as (
  update onceq.job_history set created_at = created_at` + by + `, run_at = run_at` + by + `, identity = ` + identity + `, errors = ` + errors + `, finished_at = finished_at` + by + `, keep_until = keep_until` + by + `
),
awaits as (
  update onceq.job_awaits set created_at = created_at` + by + `, until = until` + by + `
),
cancels as (
  update onceq.job_cancels set requested_at = requested_at` + by + `
),
queues as (
  update onceq.queues set rescanned_at = rescanned_at` + by + `
)
update onceq.waiters set idle_until = idle_until` + by
	// Ticks and counts in two steps, because one may move to where another one still is.
	const away = `interval '1000 years'`
	if db.citus {
		statement = strings.ReplaceAll(statement, ", errors = "+errors, "")
	}
	for _, s := range []struct {
		statement string
		args      []any
	}{
		{statement, []any{d.Microseconds()}},
		{`update onceq.pauses set paused_at = paused_at` + by + `, until = until` + by, []any{d.Microseconds()}},
		{`update onceq.workers set started_at = started_at` + by + `, seen_at = seen_at` + by, []any{d.Microseconds()}},
		{`update onceq.job_counts set minute = minute + ` + away, nil},
		{`update onceq.job_counts set minute = minute - ` + away + by, []any{d.Microseconds()}},
		{`update onceq.schedules set next_at = next_at` + by + `, paused_at = paused_at` + by + `, changed_at = changed_at` + by + `, known_from = known_from` + by, []any{d.Microseconds()}},
		{`update onceq.schedule_ticks set at = at + ` + away, nil},
		{`update onceq.schedule_ticks set at = at - ` + away + by + `, until = until` + by + `, done_at = done_at` + by, []any{d.Microseconds()}},
	} {
		if db.citus {
			s.statement = withoutZones(s.statement)
		}
		db.exec(s.statement, s.args...)
	}
}

// exec runs a statement that writes the schema as onceq, and returns how many rows it changed.
func (db *DB) exec(statement string, args ...any) int64 {
	db.t.Helper()
	return db.own(db.named(statement), args...)
}

// named gives a statement the schema's name.
func (db *DB) named(statement string) string {
	return strings.ReplaceAll(statement, "onceq.", pgx.Identifier{db.Schema}.Sanitize()+".")
}

// own runs a statement on the application's tables.
func (db *DB) own(statement string, args ...any) int64 {
	db.t.Helper()
	tag, err := db.Pool.Exec(context.Background(), statement, args...)
	if err != nil {
		db.t.Errorf("queuetest: %v", err)
	}
	return tag.RowsAffected()
}

// work runs a worker until limit jobs were claimed or none is due. It calls claimed for each claim, before the handler
// begins.
func (db *DB) work(claimed func(onceq.Event), limit int, handlers []onceq.Handler) []Ran {
	db.t.Helper()
	var mu sync.Mutex
	var ran []Ran
	var ended []bool
	// Find runs by token, because a completion that the handler makes may be undone and followed by the final outcome.
	// Find a cancelled run by job, because the event has no token.
	byToken, byJob := make(map[int64]int), make(map[int64]int)
	place := func(e onceq.Event) int {
		i, again := byToken[e.Token]
		if e.Token == 0 {
			i, again = byJob[e.JobID]
		}
		if !again {
			i = len(ran)
			byToken[e.Token], byJob[e.JobID] = i, i
			ran, ended = append(ran, Ran{}), append(ended, false)
		}
		return i
	}
	hook := func(_ context.Context, e onceq.Event) {
		if e.Name != "" || e.JobID == 0 {
			return // an event of an effect or a fence that the handler used
		}
		r := Ran{JobID: e.JobID, Kind: e.Kind, Attempt: e.Attempt, Err: e.Err}
		switch e.Type {
		case onceq.EventClaimed:
			if claimed != nil {
				claimed(e)
			}
			mu.Lock()
			defer mu.Unlock()
			place(e) // events of ends come in any order
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
		i := place(e)
		ran[i], ended[i] = r, true
	}
	config := db.config
	config.Schema = db.Schema
	config.Hook = onceq.HookFunc(func(ctx context.Context, e onceq.Event) {
		defer hook(ctx, e) // also if the test's own panics
		if db.config.Hook != nil {
			db.config.Hook.Event(ctx, e)
		}
	})
	q, err := onceq.New(db.Pool, &config)
	var w *onceq.Worker
	if err == nil {
		bridge.Alone(q)
		w, err = onceq.NewWorker(q, onceq.WorkerConfig{}, handlers...)
	}
	if err == nil {
		var release func()
		if release, err = pg.Keep(context.Background(), db.Pool); err == nil {
			db.t.Cleanup(release)
			err = w.Drain(context.Background(), limit)
		}
	}
	if err != nil {
		db.t.Errorf("queuetest: %v", err)
	}
	mu.Lock()
	defer mu.Unlock()
	var all []Ran
	for i, r := range ran {
		if ended[i] {
			all = append(all, r)
		}
	}
	return all
}
