package onceqops

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/bridge"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// Cause says why a job is not running, or that it runs.
type Cause string

// The causes. Which fields of a Reason go with a cause is said beside it.
const (
	CauseScheduled   Cause = "scheduled"    // not due yet: Until
	CauseRetry       Cause = "retry"        // failed or lost a lease, and waits for its next try: Until
	CauseDeferred    Cause = "deferred"     // has run, and asked for a later time (Snooze, Reschedule, an effect in flight); CauseRetry if an attempt has failed before: Until
	CauseEvent       Cause = "event"        // waits for an event (Await): Scope, Key, Until
	CauseSleep       Cause = "sleep"        // sleeps in the middle of its handler (Sleep): Key is the sleep's name, Until
	CauseCancelling  Cause = "cancelling"   // somebody asked to cancel it, and no worker has heard of that yet: Since
	CauseQueuePaused Cause = "queue_paused" // Pause, Since
	CauseKindPaused  Cause = "kind_paused"  // Pause, Since
	CauseNoWorker    Cause = "no_worker"    // no live worker has the queue: Worker is the one that was seen last, if any
	CauseNoHandler   Cause = "no_handler"   // live workers have the queue, and none has a handler for the kind
	CauseLane        Cause = "lane"         // waits for its lane: Ahead, Before, Slots, the Worker that has one of them, Until its lease ends or the first is due, and Pause if that keeps jobs Ahead from starting; or a dead job stops the lane: Ahead
	CauseAfter       Cause = "after"        // waits for other jobs (Job.After): Before unfinished ones, Ahead, Dead
	CauseLimit       Cause = "limit"        // waits for its share of a limit: Ahead, Before, Slots, Worker, Until, Pause as for a lane; or for a slot of its rate: Before, Until
	CauseLocked      Cause = "locked"       // a transaction that has been open for a second or more has the job's row locked: Session, Since; or that of one before it in its lane: Ahead
	CauseQuarantine  Cause = "quarantine"   // has lost leases, and such jobs start one at a time, or a few: Lost
	CauseFull        Cause = "workers_full" // Running, Slots
	CauseBehind      Cause = "behind"       // other due jobs come first: Before
	CauseRows        Cause = "rows_missing" // rows of onceq's tables are missing without which no lane, limit or group goes on
	CauseSnapshot    Cause = "snapshot"     // an old transaction makes claims slow
	CauseReady       Cause = "ready"        // nothing is in its way, as far as the tables say. Running: jobs of other queues, which may have the connections
	CauseRunning     Cause = "running"      // Worker, Session, Since, Beat, Until
	CauseHeld        Cause = "held"         // Effects, Since
	CauseDead        Cause = "dead"         // Since
	CauseCompleted   Cause = "completed"    // Since
	CauseCancelled   Cause = "cancelled"    // Since
	CauseUnknown     Cause = "unknown"      // there is no such job
)

// Reason is one cause, with what is known about it. Fields that do not apply are zero. Times are the database's.
type Reason struct {
	Cause  Cause  `json:"cause"`
	Text   string `json:"text"`            // what is so, in words
	Advice string `json:"advice,omitzero"` // what to do; empty for nothing

	Since   time.Time    `json:"since,omitzero"`
	Until   time.Time    `json:"until,omitzero"`   // of the slot of a limit it is the earliest if Before is StatsCap
	Beat    time.Time    `json:"beat,omitzero"`    // when the lease was last extended, or given
	Worker  *WorkerInfo  `json:"worker,omitzero"`  // nil for a process that leaves no row: a loop around Queue.Claim, a short Drain
	Session int          `json:"session,omitzero"` // the server process (pid) whose transaction has the row locked
	Pause   *onceq.Pause `json:"pause,omitzero"`
	Scope   string       `json:"scope,omitzero"`
	Key     string       `json:"key,omitzero"`
	Lost    int          `json:"lost,omitzero"`    // with a lease that ran out just now, which JobInfo.Lost counts from the next claim on
	Running int          `json:"running,omitzero"` // how many jobs of the queue the workers for it have
	Slots   int          `json:"slots,omitzero"`   // how many they can have
	Before  int          `json:"before,omitzero"`  // at most StatsCap
	Ahead   []int64      `json:"ahead,omitzero"`   // jobs that have the places of the lane or the limit, or stop the lane, or that it waits for, or the locked one before it; at most 10
	Dead    []int64      `json:"dead,omitzero"`    // dead and held jobs that it waits for; at most 10
	Effects []EffectInfo `json:"effects,omitzero"` // held ones
}

func (r Reason) String() string {
	if r.Advice == "" {
		return r.Text
	}
	return r.Text + "; " + r.Advice
}

// Explanation is the answer of Explain.
type Explanation struct {
	Job onceq.JobInfo `json:"job"` // without its payload, metadata and result, which Get returns; only its ID if the cause is CauseUnknown
	At  time.Time     `json:"at"`  // the database's time

	// Reasons has at least one. The first one is why the job is not running now. If the job waits, those that follow would
	// keep it waiting after that.
	Reasons []Reason `json:"reasons"`
}

// Cause is the cause of the first reason.
func (e Explanation) Cause() Cause { return e.Reasons[0].Cause }

func (e Explanation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "job %d", e.Job.ID)
	if e.Job.Kind != "" {
		fmt.Fprintf(&b, " of kind %q in queue %q", e.Job.Kind, e.Job.Queue)
	}
	for i, r := range e.Reasons {
		if i == 0 {
			b.WriteString(": ")
		} else {
			b.WriteString("\nand then: ")
		}
		b.WriteString(r.String())
	}
	return b.String()
}

// Explain says why a job is not running, or where it runs, in one answer: as constants and fields for programs, and in words
// that say what to do. It reads, and locks nothing. An id that no job has is CauseUnknown and no error.
//
// What it says of the jobs before one, in its lane, its limit or its group, is of one moment. It knows of workers by their rows
// (Workers), which are up to a minute old: a worker that was killed counts for up to three. Code that loops around Claim leaves none. On
// Citus it does not look for locks.
func (q *Ops) Explain(ctx context.Context, db onceq.DB, id int64) (Explanation, error) {
	return q.whyNot(ctx, db, id, time.Minute)
}

// whyNot is Explain, with the age from which on a snapshot is old.
func (q *Ops) whyNot(ctx context.Context, db onceq.DB, id int64, old time.Duration) (Explanation, error) {
	for range table.SettleTries {
		e := Explanation{Job: onceq.JobInfo{ID: id}}
		known, err := q.job(ctx, db, id, false, nil, nil)
		if e.At = known.At; errors.Is(err, pgx.ErrNoRows) {
			if err := q.store.QueryRow(ctx, db, table.AskTime, nil, &e.At); err != nil {
				return e, fmt.Errorf("onceq: explain: %w", err)
			}
			e.add(Reason{
				Cause: CauseUnknown, Text: "there is no such job: the transaction that enqueued it has not committed or was rolled back, or the job is finished and was not kept",
				Advice: "if it had a key, what became of that may still be known (Queue.GetByKey, onceq keys); a kind can keep completed jobs in the history (Keep)",
			})
			return e, nil
		}
		if err != nil {
			return e, fmt.Errorf("onceq: explain: %w", err)
		}
		e.Job = known.job
		x := explaining{q: q, db: db, e: &e, old: old, Job: known.Job}
		if e.Job.State.Finished() {
			return e, x.finished(ctx)
		}
		x.cancelAsked()
		if !e.Job.Blocked {
			return e, x.live(ctx)
		}
		if still, err := x.blocked(ctx); err != nil || still {
			return e, err
		}
	}
	return Explanation{}, fmt.Errorf("%w: job %d changes too often to say", onceq.ErrNotFound, id)
}

func (e *Explanation) add(r Reason) { e.Reasons = append(e.Reasons, r) }

// explaining is one call of Explain.
type explaining struct {
	q   *Ops
	db  onceq.DB
	e   *Explanation
	old time.Duration // from which age on a snapshot is reported

	bridge.Job
	workers []WorkerInfo
	pauses  []onceq.Pause
	room    int     // the place, from 1 on, of the reason that says that its lane or limit has room; 0 for none
	lock    *Reason // a transaction has the row of the job locked, which waits for its lane, its limit or others
}

func (x *explaining) finished(ctx context.Context) error {
	j := &x.e.Job
	why := ""
	if n := len(j.Errors); n > 0 {
		why = ", with the error: " + j.Errors[n-1].Error
	}
	switch j.State {
	case onceq.StateCompleted:
		x.e.add(Reason{Cause: CauseCompleted, Since: j.FinishedAt, Text: "it was completed at " + table.Stamp(j.FinishedAt)})
	case onceq.StateCancelled:
		if n := len(j.Errors); n > 0 && !j.Errors[n-1].At.Equal(j.FinishedAt) { // that of an attempt before
			why = ""
		}
		x.e.add(Reason{Cause: CauseCancelled, Since: j.FinishedAt, Text: "it was cancelled at " + table.Stamp(j.FinishedAt) + why, Advice: "a redrive runs it again"})
	case onceq.StateDead:
		x.e.add(Reason{
			Cause: CauseDead, Since: j.FinishedAt, Lost: j.Lost,
			Text: fmt.Sprintf("it is dead since %s, after %s of %d and %s%s", table.Stamp(j.FinishedAt),
				table.Numbered(j.Attempts, "failed attempt", "failed attempts"), j.MaxAttempts, table.Numbered(j.Lost, "lost lease", "lost leases"), why),
			Advice: "fix the cause and redrive it, or discard it",
		})
	default:
		r := Reason{Cause: CauseHeld, Since: j.FinishedAt}
		effects, err := x.q.Effects(ctx, x.db, j.ID, Filter{WithoutPayloads: true})
		if err != nil {
			return err
		}
		var names []string
		for _, f := range effects {
			if f.State == "held" {
				r.Effects = append(r.Effects, f)
				names = append(names, fmt.Sprintf("%q since %s (%s)", f.Name, table.Stamp(f.Since), f.Detail))
			}
		}
		r.Text = "it is held since " + table.Stamp(j.FinishedAt) + ", because nobody knows whether these effects happened: " + strings.Join(names, ", ")
		r.Advice = "look each up at the provider under its idempotency key, and say whether it happened (resolve); the job then runs again"
		if len(names) == 0 {
			r.Text, r.Advice = "it is held since "+table.Stamp(j.FinishedAt)+why, "no effect of it is held any more: a redrive runs it again"
		}
		x.e.add(r)
	}
	return nil
}

// cancelAsked says that somebody wants the job cancelled. A worker that runs it hears of that with its next beat, and one that waits is
// cancelled when it would run, or within a minute.
func (x *explaining) cancelAsked() {
	j := &x.e.Job
	if x.Cancelling != nil && j.State != onceq.StateRunning {
		x.e.add(Reason{
			Cause: CauseCancelling, Since: *x.Cancelling,
			Text:   "somebody asked at " + table.Stamp(*x.Cancelling) + " to cancel it, while it was held or locked, and nobody has heard of that yet",
			Advice: fmt.Sprintf("a worker cancels it within a minute; Queue.Cancel does it now, as onceq jobs cancel %d does", j.ID),
		})
	}
}

// live explains a job that is not finished.
func (x *explaining) live(ctx context.Context) (err error) {
	j := &x.e.Job
	if x.workers, err = x.q.Workers(ctx, x.db); err != nil {
		return err
	}
	if x.pauses, err = x.q.Pauses(ctx, x.db); err != nil {
		return err
	}
	age := lockOld
	if !j.LeasedUntil.IsZero() {
		age = 0 // whose transaction it runs in
	}
	lock, locked, err := x.locked(ctx, age, j.ID)
	if err != nil {
		return err
	}
	if j.State == onceq.StateRunning || locked && !j.LeasedUntil.IsZero() {
		x.running(lock)
		return nil
	}
	return x.waiting(ctx, lock, locked)
}

// lockOld is how old a transaction is whose lock Explain reports: claims and promoters have rows locked all the time, for as long as
// a statement takes.
const lockOld = time.Second

// locked looks for a transaction of at least some age that has the row of one of the jobs locked. A row names the transaction that
// locked or changed it last. One of which the role may not see how old it is counts as old.
func (x *explaining) locked(ctx context.Context, age time.Duration, ids ...int64) (r Reason, is bool, err error) {
	const read = `
select j.id, l.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(a.state, ''), a.xact_start,
       coalesce(a.state = 'active' and pg_catalog.strpos(a.query, 'onceq.') > 0, false)
  from (select id, xmax from onceq.jobs where id = any ($1::bigint[])
        union all
        select id, xmax from onceq.job_waits where id = any ($1::bigint[])) j
  join pg_locks l on l.locktype = 'transactionid' and l.transactionid = j.xmax and l.mode = 'ExclusiveLock' and l.granted
  left join pg_stat_activity a on a.pid = l.pid
 where l.pid is distinct from pg_backend_pid()
   and (a.xact_start <= statement_timestamp() - $2::bigint::float8 * interval '1 microsecond') is not false
 order by j.id limit 1`
	switch citus, err := x.q.store.OnCitus(ctx, x.db); {
	case err != nil:
		return r, false, fmt.Errorf("onceq: explain: %w", err)
	case citus:
		return r, false, nil
	}
	var id int64
	var pid *int
	var user, app, state string
	var since *time.Time
	var own bool
	switch err := x.q.store.QueryRow(ctx, x.db, read, []any{ids, age.Microseconds()}, &id, &pid, &user, &app, &state, &since, &own); {
	case errors.Is(err, pgx.ErrNoRows):
		return r, false, nil
	case err != nil:
		return r, false, fmt.Errorf("onceq: explain: %w", err)
	}
	r = Reason{Cause: CauseLocked, Session: table.OrZero(pid), Since: table.OrZero(since)}
	who := fmt.Sprintf("session %d (user %q, application %q, %s)", r.Session, user, app, state)
	switch {
	case pid == nil:
		who = "a prepared transaction"
	case own:
		who = fmt.Sprintf("session %d (user %q, application %q), which runs a statement on the tables of onceq,", r.Session, user, app)
	}
	r.Text = who + " has its row locked"
	if id != x.e.Job.ID {
		r.Ahead = []int64{id}
		r.Text = fmt.Sprintf("%s has the row of job %d locked, which comes before it", who, id)
	}
	if since != nil {
		r.Text += ", in a transaction that began at " + table.Stamp(*since)
	}
	r.Advice = "no worker takes it before that transaction ends; if it hangs, end it (pg_terminate_backend)"
	if own {
		r.Advice = "no worker takes it before that statement ends: look at what it waits for (pg_stat_activity, pg_blocking_pids); the server or its disk may be slow"
	}
	return r, true, nil
}

func (x *explaining) running(lock Reason) {
	j := &x.e.Job
	r := Reason{Cause: CauseRunning, Until: j.LeasedUntil, Session: lock.Session, Lost: j.Lost}
	where := "in a process that leaves no row in workers"
	for i, w := range x.workers {
		if x.Holder != nil && w.ID>>32 == *x.Holder>>32 {
			r.Worker, r.Beat = &x.workers[i], j.LeasedUntil.Add(-w.Lease)
			where = "in " + w.Where()
		}
	}
	r.Text = "it runs " + where
	if x.Ahead {
		r.Text = "it was claimed " + where + ", and runs or waits there for a free handler"
	}
	if lock.Session != 0 {
		r.Text += fmt.Sprintf(", in the transaction of session %d", lock.Session)
	}
	if r.Since = x.Began; r.Since.IsZero() {
		r.Since = r.Beat // no beat has extended its lease yet
	}
	if !r.Since.IsZero() {
		r.Text += " since " + table.Stamp(r.Since)
	}
	if !r.Beat.IsZero() {
		r.Text += "; its last beat was at " + table.Stamp(r.Beat)
	}
	r.Text += "; its lease lasts until " + table.Stamp(r.Until)
	switch {
	case j.Timeout > 0:
		r.Text += fmt.Sprintf("; its own time-out ends its handler after %s", j.Timeout)
	case j.Timeout == onceq.NoTimeout:
		r.Text += "; its handler may run as long as it likes"
	}
	if p := j.Progress; p != nil {
		r.Text += fmt.Sprintf("; its handler reported %d of %d at %s", p.Done, p.Total, table.Stamp(p.At)) // its note may be as secret as a payload
	}
	switch {
	case x.Cancelling != nil:
		r.Advice = "somebody asked at " + table.Stamp(*x.Cancelling) + " to cancel it, and its handler's context ends with the next beat"
	case r.Worker != nil && r.Worker.Stale:
		r.Advice = "its process has not been seen since " + table.Stamp(r.Worker.Seen) + "; if it is gone, another worker takes the job when the lease has run out"
	}
	x.e.add(r)
}

// waiting explains a job that nobody has: first what it waits for itself, then what is in the way of its queue and kind.
func (x *explaining) waiting(ctx context.Context, lock Reason, locked bool) error {
	j, e := &x.e.Job, x.e
	due := !j.RunAt.After(e.At)
	if !due {
		x.notDue()
	}
	x.paused()
	able, kinds := x.able()
	if locked {
		e.add(lock)
	}
	if j.Lost > 0 || !j.LeasedUntil.IsZero() {
		lost := j.Lost
		if !j.LeasedUntil.IsZero() {
			lost++
		}
		e.add(Reason{
			Cause: CauseQuarantine, Lost: lost, Until: time.Time{},
			Text:   fmt.Sprintf("it has lost %s, because its process crashed, hung or lost the database; such jobs start one at a time, and more at once only while they end well; a worker looks for them about once a second", table.Numbered(lost, "lease", "leases")),
			Advice: "if this goes on, look at what its processes logged last, and at their memory",
		})
	}
	if due && len(able) > 0 {
		if err := x.crowd(ctx, able, kinds); err != nil {
			return err
		}
	}
	if len(e.Reasons) == 0 {
		r := Reason{
			Cause: CauseReady, Text: "it has been due since " + table.Stamp(j.RunAt) + ", and nothing is in its way: a worker takes it within its poll interval",
			Advice: "if it stays, the health findings and the workers' logs say what fails",
		}
		if e.At.Sub(j.RunAt) >= readyLong {
			var err error
			if r.Running, err = x.elsewhere(ctx, able); err != nil {
				return err
			}
		}
		if r.Running > 0 {
			r.Text = fmt.Sprintf("it has been due since %s, its queue has room, and %s %s of other queues: if its handler is transactional (HandleTx), it waits for as long as theirs hold all the connections that handlers may hold, three quarters of the pool",
				table.Stamp(j.RunAt), table.Numbered(len(able), "worker for it runs", "workers for it run"), table.Numbered(r.Running, "job", "jobs"))
			r.Advice = "if so, give the queues of the long handlers a Concurrency, or raise the pool's MaxConns; otherwise the health findings and the workers' logs say what fails"
		} else if late := e.At.Sub(j.RunAt).Round(time.Second); late >= readyLong {
			latest := slices.MaxFunc(able, func(a, b WorkerInfo) int { return a.Seen.Compare(b.Seen) })
			r.Text = fmt.Sprintf("it has been due for %s although nothing is in its way, and %s could take it, of which the last was seen %s ago: a worker leaves its row once a minute, so all may be gone",
				late, table.Numbered(len(able), "worker", "workers"), e.At.Sub(latest.Seen).Round(time.Second))
		}
		e.add(r)
	}
	return nil
}

// elsewhere counts the jobs of other queues that the workers have which may take the job.
func (x *explaining) elsewhere(ctx context.Context, able []WorkerInfo) (running int, err error) {
	var ids []int64
	others := make(map[string]bool)
	for _, w := range able {
		ids = append(ids, w.ID>>32)
		for queue := range w.Queues {
			if queue != x.e.Job.Queue && len(others) < 100 {
				others[queue] = true
			}
		}
	}
	if len(others) == 0 {
		return 0, nil
	}
	busy, err := x.q.busy(ctx, x.db, "explain", slices.Collect(maps.Keys(others)), ids)
	for _, b := range busy {
		running += b.Leased
	}
	return running, err
}

// blocked explains a job that waits for its lane, its limit or other jobs, and what is in its way after that. It returns false
// if the job has moved on meanwhile: what was read last may then show it among the jobs that it waits for.
func (x *explaining) blocked(ctx context.Context) (still bool, err error) {
	j := &x.e.Job
	if x.workers, err = x.q.Workers(ctx, x.db); err != nil {
		return false, err
	}
	if x.pauses, err = x.q.Pauses(ctx, x.db); err != nil {
		return false, err
	}
	lock, locked, err := x.locked(ctx, lockOld, j.ID)
	if err != nil {
		return false, err
	}
	if locked {
		x.lock = &lock
	}
	var lacks bool
	if err = x.q.store.QueryRow(ctx, x.db, table.LacksRows, nil, &lacks, nil); err != nil {
		return false, fmt.Errorf("onceq: explain: %w", err)
	}
	if lacks {
		x.e.add(Reason{Cause: CauseRows, Text: table.LinesLack, Advice: linesBack})
	}
	switch j.WaitsFor {
	case "jobs":
		err = x.after(ctx)
	case "limit":
		err = x.limit(ctx)
	default:
		err = x.lane(ctx)
	}
	if err != nil {
		return false, err
	}
	now, err := x.q.job(ctx, x.db, j.ID, false, nil, nil)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return false, fmt.Errorf("onceq: explain: %w", err)
	}
	if locked {
		x.e.add(lock)
	}
	waits := len(x.e.Reasons)
	x.paused()
	x.able()
	if room := x.room - 1; room >= 0 { // then what keeps workers from letting it in comes first
		all := x.e.Reasons
		x.e.Reasons = slices.Concat(all[:room], all[waits:], all[room:waits])
	}
	return now.Line == x.Line && now.job.Claims == j.Claims, nil
}

// holds says whether a pause keeps the jobs of a queue and a kind from starting, and what ends that.
func holds(p onceq.Pause, queue, kind string) (cause Cause, end string) {
	switch {
	case p.Kind != "" && p.Kind == kind:
		return CauseKindPaused, "resuming the kind"
	case p.Queue != "" && p.Queue == queue:
		return CauseQueuePaused, "resuming the queue"
	}
	return "", ""
}

// paused adds the pauses of the job's queue and kind.
func (x *explaining) paused() {
	for i, p := range x.pauses {
		if cause, end := holds(p, x.e.Job.Queue, x.e.Job.Kind); cause != "" {
			x.e.add(Reason{Cause: cause, Pause: &x.pauses[i], Since: p.Since, Text: p.String(), Advice: end + " ends that"})
		}
	}
}

// holders is what is known of the jobs that have the places of a lane or a limit. It is read together with all else that is said of
// that, in one statement, so that an answer does not contradict itself.
type holders struct {
	ids           []int64  // the first ten
	queues, kinds []string // of these; "" for one that somebody has: it goes on, also if it is paused, and gives its place back

	first      int64      // the one whose lease ends first, or the one that is due first if nobody has any; 0 for none
	until, due *time.Time // when that lease ends, nil if nobody has it; when it is due
	holder     *int64
}

// holdersOf is for a lateral join, or behind from: holders for a lane or a limit. The first of them is looked for where a condition
// holds, because that reads them all.
func holdersOf(lane, when string) string {
	return `(
       select pg_catalog.array_agg(id order by place) as ids, pg_catalog.array_agg(queue order by place) as queues, pg_catalog.array_agg(kind order by place) as kinds
         from (select j.id, p.id as place, case when j.leased_until > statement_timestamp() then '' else j.queue end as queue,
                      case when j.leased_until > statement_timestamp() then '' else j.kind end as kind
                 from ` + table.LiveIn(lane) + ` order by p.id limit 10) f) a
  left join lateral (
       select j.id, j.run_at, j.leased_until, j.holder
         from (select j.id, j.run_at, j.holder, case when j.leased_until > statement_timestamp() then j.leased_until end as leased_until
                 from ` + table.LiveIn(lane) + ` and ` + when + ` offset 0) j
        order by j.leased_until, j.run_at, j.id
        limit 1) h on true`
}

// holdersColumns are the columns of holdersOf that dest reads.
const holdersColumns = `a.ids, a.queues, a.kinds, coalesce(h.id, 0), h.leased_until, h.run_at, h.holder`

func (p *holders) dest() []any {
	return []any{&p.ids, &p.queues, &p.kinds, &p.first, &p.until, &p.due, &p.holder}
}

// heldAhead adds to a reason who has one of the jobs that have the places, and until when: the one whose lease ends first. If nobody
// has any, it adds when the first of them is due, unless that is now. Then it adds which of them do not start, because of pauses.
func (x *explaining) heldAhead(r *Reason, p *holders) {
	switch {
	case p.until != nil:
		r.Until = *p.until
		r.Text += "; the first lease among them lasts until " + table.Stamp(r.Until)
		for i, w := range x.workers {
			if p.holder != nil && w.ID>>32 == *p.holder>>32 {
				r.Worker = &x.workers[i]
				r.Text += fmt.Sprintf(": that of job %d, in %s", p.first, w.Where())
			}
		}
	case p.due != nil && p.due.After(x.e.At):
		r.Until = *p.due
		r.Text += fmt.Sprintf("; nobody has one of them, and the first to go on is job %d at %s", p.first, table.Stamp(r.Until))
		r.Advice = fmt.Sprintf("the explanation of job %d says why it waits until then, as after a failed attempt, and Ops.Retry makes it due now; ", p.first) + r.Advice
	}
	x.pausedAhead(r, p)
}

// pausedAhead adds to a reason which of the jobs that have the places do not start, because of pauses.
func (x *explaining) pausedAhead(r *Reason, p *holders) {
	for i := range x.pauses {
		pause := &x.pauses[i]
		var held []int64
		for k, id := range p.ids {
			if cause, _ := holds(*pause, p.queues[k], p.kinds[k]); cause != "" {
				held = append(held, id)
			}
		}
		if held == nil {
			continue
		}
		r.Text += fmt.Sprintf("; of these, %d do not start, because %s", held, pause)
		if r.Pause == nil {
			_, end := holds(*pause, pause.Queue, pause.Kind)
			r.Pause, r.Advice = pause, end+" lets them start; cancelling them gives their places to others"
		}
	}
}

func (x *explaining) notDue() {
	j := &x.e.Job
	if x.Until != nil {
		x.e.add(x.awaits(*x.Until))
		return
	}
	r := Reason{
		Cause: CauseScheduled, Until: j.RunAt, Text: "it is not due before " + table.Stamp(j.RunAt),
		Advice: fmt.Sprintf("Ops.Retry makes it due now, as onceq jobs retry %d does", j.ID),
	}
	switch {
	case x.Slotted:
		r.Cause, r.Text, r.Advice = CauseLimit, fmt.Sprintf("its slot of limit %q is at %s", j.Limit, table.Stamp(j.RunAt)), ""
	case j.Claims > j.Attempts+j.Lost && j.Attempts > 0:
		r.Cause = CauseRetry
		r.Text = fmt.Sprintf("it has failed or asked to run again (Snooze, Reschedule, or an effect that is in flight), and is due at %s; %d of %d attempts %s failed", table.Stamp(j.RunAt), j.Attempts, j.MaxAttempts, table.Either(j.Attempts, "has", "have"))
		if n := len(j.Errors); n > 0 {
			r.Text += fmt.Sprintf(", the latest at %s: %s", table.Stamp(j.Errors[n-1].At), j.Errors[n-1].Error)
		}
	case j.Attempts > 0:
		r.Cause = CauseRetry
		r.Text = fmt.Sprintf("attempt %d of %d failed, and the next one is due at %s", j.Attempts, j.MaxAttempts, table.Stamp(j.RunAt))
		if n := len(j.Errors); n > 0 {
			r.Text += "; the error: " + j.Errors[n-1].Error
		}
	case j.Lost > 0:
		r.Cause = CauseRetry
		r.Text = "it has lost a lease, and is due again at " + table.Stamp(j.RunAt)
	case j.Claims > 0:
		r.Cause = CauseDeferred
		r.Text = "it has run and asked to run again (Snooze, Reschedule, or an effect that is in flight), and is due at " + table.Stamp(j.RunAt)
	}
	x.e.add(r)
}

// awaits explains a job that was given back in an Await or a Sleep.
func (x *explaining) awaits(until time.Time) Reason {
	r := Reason{Scope: x.Scope, Key: x.Key, Until: until, Advice: fmt.Sprintf("Ops.Retry makes it look now, as onceq jobs retry %d does; it then goes on waiting", x.e.Job.ID)}
	if r.Scope == "" {
		r.Cause, r.Text = CauseSleep, fmt.Sprintf("it sleeps (%q) until %s", r.Key, table.Stamp(r.Until))
	} else {
		r.Cause, r.Text = CauseEvent, fmt.Sprintf("it waits for event %q in scope %q, until %s at the latest", r.Key, r.Scope, table.Stamp(r.Until))
		r.Advice = "Emit lets it go on"
	}
	return r
}

// able returns the live workers that may take the job, and the kinds that these take from its queue. If there are none, that
// is a reason.
func (x *explaining) able() (able []WorkerInfo, kinds []string) {
	j := &x.e.Job
	var latest *WorkerInfo // of the queue, gone
	others := 0
	for i, w := range x.workers {
		if _, works := w.Queues[j.Queue]; !works {
			continue
		}
		switch {
		case w.Stale:
			if latest == nil || w.Seen.After(latest.Seen) {
				latest = &x.workers[i]
			}
		case slices.Contains(w.Kinds, j.Kind):
			able, kinds = append(able, w), append(kinds, w.Kinds...)
		default:
			others++
		}
	}
	switch {
	case len(able) > 0:
	case others > 0:
		x.e.add(Reason{
			Cause: CauseNoHandler, Text: fmt.Sprintf("%s queue %q, and none has a handler for kind %q", table.Numbered(others, "worker works", "workers work"), j.Queue, j.Kind),
			Advice: "deploy a worker with a handler for it, or correct the name of the kind if it is misspelt",
		})
	default:
		r := Reason{Cause: CauseNoWorker, Worker: latest, Text: fmt.Sprintf("no live worker works queue %q", j.Queue)}
		if latest != nil {
			r.Text += fmt.Sprintf("; the last one, %s, was seen at %s", latest.Where(), table.Stamp(latest.Seen))
		}
		r.Advice = "start one: a worker works the queues of its handlers' kinds and those that it is told to work also. Code that loops around Claim, and a short Drain, are not counted"
		x.e.add(r)
	}
	kinds = slices.DeleteFunc(kinds, func(kind string) bool {
		return slices.ContainsFunc(x.pauses, func(p onceq.Pause) bool { return p.Kind == kind })
	})
	return able, kinds
}

// lockedRow says, before a list of transactions, of a row j of jobs whose lease has run out that one of these has it locked, as that of
// a transactional handler which runs for longer than the lease: beats cannot extend it, and nobody else can claim it.
const (
	lockedRow = `j.leased_until <= statement_timestamp() and j.xmax = any `
	lockers   = `select transactionid from pg_locks where locktype = 'transactionid' and mode = 'ExclusiveLock' and granted`
)

// readLockers gives the transactions that have locks, for readCrowd. Not on Citus.
const readLockers = `select array(` + lockers + `)::text[]`

// readCrowd counts the jobs of a queue that given workers have ($2, the upper halves of their ids), and those of given kinds ($6) that
// are due and come before a job. Both are over ranges of the claims' index with a limit.
const readCrowd = `
select (select count(*)
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select leased_until, holder, xmax from onceq.jobs
                where queue = $1::text and priority = p.priority and run_at <= statement_timestamp()
                order by run_at, id
                limit $7::int + 1) j
         where (j.leased_until > statement_timestamp() or ` + lockedRow + `($8::text[]::xid[])) and j.holder >> 32 = any ($2::bigint[])),
       (select count(*)
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select from onceq.jobs j
                where queue = $1::text and priority = p.priority and run_at <= statement_timestamp()
                  and (p.priority < $3::smallint or (run_at, id) < ($4::timestamptz, $5::bigint))
                  and (leased_until is null or leased_until <= statement_timestamp() and not (` + lockedRow + `($8::text[]::xid[]))) and kind = any ($6::text[])
                order by run_at, id
                limit $7::int) j
         where p.priority <= $3::smallint)`

// full adds that the workers have no slot for the job, or no connection.
func (x *explaining) full(able []WorkerInfo, running, slots int) {
	j := &x.e.Job
	stuck, kinds := stuckIn(able, j.Queue)
	starved := starving(able) && x.e.At.Sub(j.RunAt) >= readyLong
	if running+stuck < slots && !starved {
		return
	}
	r := Reason{
		Cause: CauseFull, Running: running, Slots: slots,
		Text: fmt.Sprintf("the workers of queue %q are busy: %s %d of its jobs and can run %d at once",
			j.Queue, table.Numbered(len(able), "worker has", "workers have"), running, slots),
		Advice: "start more workers, or raise the concurrency of the queue, if that goes on",
	}
	switch {
	case running+stuck < slots:
		r.Text += ", but " + waitsStarved + ", and handlers that need one do not start"
		r.Advice = endStarved
	case stuck > 0:
		r.Text += fmt.Sprintf("; %s held by handlers of %q that do not return although their context has ended",
			table.Numbered(stuck, "slot is", "slots are"), kinds)
		r.Advice = endStuck
	case bound(able, j.Queue):
		r.Text += ", as their pools allow it"
		r.Advice = "raise the pools' MaxConns, or start more processes, if that goes on: " +
			"more concurrency does not help"
	}
	x.e.add(r)
}

// crowd adds that all workers are busy, that others come first, and that claims are slow.
func (x *explaining) crowd(ctx context.Context, able []WorkerInfo, kinds []string) error {
	j, e := &x.e.Job, x.e
	var running, before, slots int
	var ids []int64
	for _, w := range able {
		ids, slots = append(ids, w.ID>>32), slots+w.Queues[j.Queue]
	}
	lockers := []string{}
	citus, err := x.q.store.OnCitus(ctx, x.db)
	if err == nil && !citus {
		err = x.q.store.QueryRow(ctx, x.db, readLockers, nil, &lockers)
	}
	if err == nil {
		args := []any{j.Queue, ids, int16(j.Priority), j.RunAt, j.ID, kinds, StatsCap, lockers}
		err = x.q.store.Send(ctx, x.db, pg.Reading, readCrowd, args, pg.Row(&running, &before))
	}
	if err != nil {
		return fmt.Errorf("onceq: explain: %w", err)
	}
	before = min(before, StatsCap)
	x.full(able, running, slots)
	if before > 0 {
		count := fmt.Sprint(before)
		if before == StatsCap {
			count += " or more"
		}
		e.add(Reason{Cause: CauseBehind, Before: before, Text: count + table.Either(before, " due job of its queue comes", " due jobs of its queue come") + " before it"})
	}
	if e.At.Sub(j.RunAt) < 5*time.Second {
		return nil
	}
	look := examination{q: x.q, limits: healthLimits{snapshot: x.old}}
	if err := look.snapshots(ctx); err != nil {
		return err
	}
	for _, f := range look.found {
		e.add(Reason{Cause: CauseSnapshot, Text: "claims may be slow: " + f.Detail, Advice: f.Advice})
	}
	return nil
}

// atLeast is numbered for a count that stops at StatsCap.
func atLeast(n int, one, many string) string {
	if n >= StatsCap {
		return fmt.Sprintf("%d or more %s", n, many)
	}
	return table.Numbered(n, one, many)
}

// andOthers goes on after those that stand before a job with how many others do.
func andOthers(n int) string {
	if n == 0 {
		return ""
	}
	return ", and " + atLeast(n, "other", "others")
}
