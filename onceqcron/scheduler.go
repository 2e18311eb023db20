package onceqcron

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/sqlstate"
)

// Config configures a Scheduler. The zero value is a good start.
type Config struct {
	// Owner names the application whose schedules these are. Register and Prune change no schedule of another owner.
	// Default "default".
	Owner string

	// Queue is where the jobs that tick wait. Default "onceqcron", which a worker with Handlers serves by itself. Register and Put
	// move them there if it has changed. Let the workers that bring the change serve the old queue too (WorkerConfig.Also) until
	// no process of before runs any more: a job that ticks in that moment moves after its tick, and a process of before that is
	// restarted moves all of them back.
	Queue string

	// Keep is how long the ledger keeps a tick. Default 90 days. A worker that fires a schedule of another Owner, which is in the table,
	// removes nothing that is younger than a year.
	Keep time.Duration
}

// Scheduler keeps schedules. It holds no state but the schedules in the code, and whether it has registered them: any number of them
// may exist in any number of processes.
type Scheduler struct {
	q      *onceq.Queue
	pool   *pgxpool.Pool
	cfg    Config
	code   map[string]*Schedule
	order  []string
	schema *strings.Replacer

	registered atomic.Bool
}

// ErrNotFound: no such schedule.
var ErrNotFound = errors.New("onceqcron: no such schedule")

// ErrElsewhere: the schedule is in the code of other processes, and only these know its jobs and its timetable. See Ask.
var ErrElsewhere = errors.New("onceqcron: schedule of other processes")

// OwnerError says that a schedule belongs to another owner.
type OwnerError struct{ Schedule, Owner string }

func (e *OwnerError) Error() string {
	return fmt.Sprintf("onceqcron: schedule %q belongs to %q; choose another name, or have its owner remove it", e.Schedule, e.Owner)
}

// New returns a Scheduler over the queue's tables and pool, with the schedules of this process's code. A bad schedule is an
// *onceq.InvalidError. Nothing is sent to the database.
func New(q *onceq.Queue, pool *pgxpool.Pool, cfg Config, schedules ...Schedule) (*Scheduler, error) {
	if q == nil || pool == nil {
		return nil, invalid("New", "needs a queue and its pool")
	}
	if cfg.Owner == "" {
		cfg.Owner = "default"
	}
	if cfg.Queue == "" {
		cfg.Queue = "onceqcron"
	}
	if cfg.Keep == 0 {
		cfg.Keep = 90 * 24 * time.Hour
	}
	if !storableText(cfg.Owner) || !storableText(cfg.Queue) {
		return nil, invalid("Config", "has an Owner or a Queue that is not valid UTF-8, or contains a NUL, which Postgres cannot store")
	}
	if cfg.Keep < 0 {
		return nil, invalid("Config.Keep", "is negative")
	}
	s := &Scheduler{
		q: q, pool: pool, cfg: cfg, code: make(map[string]*Schedule),
		schema: strings.NewReplacer("onceq.", pgx.Identifier{q.Schema()}.Sanitize()+"."),
	}
	for _, one := range schedules {
		if err := one.check(false); err != nil {
			return nil, err
		}
		if err := s.possible(&one); err != nil {
			return nil, err
		}
		if s.code[one.Name] != nil {
			return nil, invalid("Name", "%q is used by two schedules", one.Name)
		}
		s.code[one.Name] = &one
		s.order = append(s.order, one.Name)
	}
	return s, nil
}

// possible refuses a Job that no tick could enqueue. Nothing is sent. What the job waits for, and what it replaces, is only known at the tick.
func (s *Scheduler) possible(one *Schedule) error {
	if one.JobFor != nil {
		return nil
	}
	job := one.Job
	if len(job.After) > 0 {
		job.After, job.IfDead = nil, 0
	}
	job.Replace = 0
	job.Metadata = tickMetadata(job.Metadata, Tick{Schedule: one.Name, At: time.Unix(0, 999_999_000)})
	_, err := s.q.EnqueueInBatch(&pgx.Batch{}, job)
	var bad *onceq.InvalidError
	if errors.As(err, &bad) {
		return invalid("Job."+bad.Field, "of %q: %s", one.Name, bad.Reason)
	}
	return err
}

// The kind of the job that ticks for a schedule. Those of the code have a kind each, so that only workers whose code knows
// the schedule claim it.
const tableKind = "onceqcron"

func codeKind(name string) string { return tableKind + ":" + name }

// tickingKind is the kind of the job that ticks for a schedule of the code, or of the table.
func tickingKind(name string, code bool) string {
	if code {
		return codeKind(name)
	}
	return tableKind
}

// maxAttempts is how often a tick may fail before its job is dead and the schedule stands still: the most that there is.
const maxAttempts = 32767

func (s *Scheduler) kind(name string) onceq.Kind[string] {
	return onceq.Kind[string]{
		Name: name, Queue: s.cfg.Queue, Key: func(schedule string) string { return schedule }, Window: onceq.UntilFinished, IgnorePayload: true,
		MaxAttempts: maxAttempts, MaxLost: maxAttempts,
		Timeout: onceq.NoTimeout, // ten thousand ticks may take long, and would be begun again and again
		Backoff: func(attempt int, _ error) time.Duration { return min(time.Minute, time.Second<<min(attempt, 6)) },
	}
}

// Handlers returns the handlers that a worker needs to fire the schedules of the code and of the table. Call Register first: without it
// nothing fires those of the code, unless another process has registered them. The queue's log has a warning then.
func (s *Scheduler) Handlers() []onceq.Handler {
	if len(s.order) > 0 && !s.registered.Load() {
		s.q.Logger().Warn("onceqcron: Handlers was called before Register has written the schedules of the code, and what is not registered never fires; call Register first", "schedules", s.order)
	}
	handlers := []onceq.Handler{s.kind(tableKind).HandleTx(s.tick)}
	for _, name := range s.order {
		handlers = append(handlers, s.kind(codeKind(name)).HandleTx(s.tick))
	}
	return handlers
}

func (s *Scheduler) sql(statement string) string { return s.schema.Replace(statement) }

// told turns an error of Postgres into an *onceq.SchemaError if the tables are missing, as onceq's own calls do.
func (s *Scheduler) told(err error) error {
	if !sqlstate.NoTables(err) {
		return err
	}
	return fmt.Errorf("%w (%w)", &onceq.SchemaError{Schema: s.q.Schema(), Want: onceq.SchemaVersion}, err)
}

// within runs fn in a transaction of its own, or in a savepoint of the caller's, which stays usable after an error.
func (s *Scheduler) within(ctx context.Context, tx pgx.Tx, do func(pgx.Tx) error) error {
	fn := func(tx pgx.Tx) error { return protect(func() error { return do(tx) }) }
	if tx != nil {
		return pgx.BeginFunc(ctx, tx, fn)
	}
	for try := 1; ; try++ { // a schedule and a key of its job may be locked in the other order by a tick
		err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, fn)
		if err == nil || try == 3 || !onceq.IsRetryable(err) {
			return err
		}
	}
}

// row is a schedule in the table.
type row struct {
	owner, spec, zone, missed string
	queue                     string // where the job waits that ticks: the owner's processes may have another one than this
	job                       *string
	next, paused              *time.Time
	changed                   *time.Time // when the timetable changed while next was overdue, of a timetable that nobody knew then
	known                     *time.Time // ticks before this are removed from the ledger; nil: none were
	now                       time.Time
	fired                     []time.Time // the ticks that have happened from next or now on, up to maxTicks: the database's clock was set back
}

// unfired is the first tick of a timetable from next on that has not happened.
func (r *row) unfired(t Timetable, next time.Time) time.Time {
	for r.happened(next) {
		next = t.Next(next)
	}
	return next
}

// happened reports whether a tick is in r.fired, which is in order.
func (r *row) happened(at time.Time) bool {
	_, found := slices.BinarySearchFunc(r.fired, at, time.Time.Compare)
	return found
}

// lock reads a schedule and locks it until the transaction ends. A tick locks its job first and then this; nothing else
// that holds this waits for a job.
func (s *Scheduler) lock(ctx context.Context, tx pgx.Tx, name string) (r *row, err error) {
	return s.read(ctx, tx, name, `
   for update`)
}

// lockName locks the name of a schedule that is new or not there, until the transaction ends: either its job still finds the new row,
// or the new schedule finds that its job is gone.
func (s *Scheduler) lockName(ctx context.Context, tx pgx.Tx, name string) error {
	const lock = `select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended($1, 'onceq.schedules'::regclass::oid::bigint))`
	if _, err := tx.Exec(ctx, s.sql(lock), name); err != nil {
		return fmt.Errorf("onceqcron: schedule %q: %w", name, err)
	}
	return nil
}

const readSchedule = `
select owner, spec, zone, missed, queue, job::text, next_at, changed_at, paused_at, known_from, clock_timestamp(),
       array(select at from onceq.schedule_ticks where schedule = name and at >= least(next_at, statement_timestamp()) and outcome in ('fired', 'duplicate') order by at limit 10000)
  from onceq.schedules where name = $1`

func (s *Scheduler) read(ctx context.Context, db onceq.DB, name, lock string) (r *row, err error) {
	if !storableText(name) {
		return nil, fmt.Errorf("%w: %q", ErrNotFound, name)
	}
	rows, err := db.Query(ctx, s.sql(readSchedule+lock), name)
	if err == nil {
		r, err = pgx.CollectOneRow(rows, func(c pgx.CollectableRow) (*row, error) {
			r := new(row)
			return r, c.Scan(&r.owner, &r.spec, &r.zone, &r.missed, &r.queue, &r.job, &r.next, &r.changed, &r.paused, &r.known, &r.now, &r.fired)
		})
	}
	if errors.Is(err, pgx.ErrNoRows) {
		if s.code[name] != nil {
			return nil, fmt.Errorf("%w: %q is in this code but not registered; call Register", ErrNotFound, name)
		}
		return nil, fmt.Errorf("%w: %q", ErrNotFound, name)
	}
	if err != nil {
		return nil, fmt.Errorf("onceqcron: reading schedule %q: %w", name, s.told(err))
	}
	return r, nil
}

// schedule is the one that a row stands for: the code's, or the table's. When ticks come is in the row in either case, unless it
// is a Timetable of the code: this process may have another version of the code than the one that has registered last.
func (s *Scheduler) schedule(name string, r *row) (*Schedule, error) {
	if r.job == nil {
		if one := s.code[name]; one != nil && r.owner == s.cfg.Owner {
			return one.as(r)
		}
		return nil, fmt.Errorf("%w: %q is in the code of %q; call this there, or let such a process do it with Ask", ErrElsewhere, name, r.owner)
	}
	one := &Schedule{Name: name, Spec: r.spec, Zone: r.zone}
	var err error
	if one.Job, err = readJob(*r.job); err == nil {
		if one.Missed, err = parseMissed(r.missed); err == nil {
			err = one.check(true)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("onceqcron: schedule %q in the table cannot be read: %w", name, err)
	}
	return one, nil
}

// as is a schedule of the code with the times of its row.
func (s *Schedule) as(r *row) (*Schedule, error) {
	if r.zone == "" || r.spec == s.Spec && r.zone == s.Zone && r.missed == s.Missed.String() {
		return s, nil
	}
	one := *s
	one.Spec, one.Zone, one.Timetable = r.spec, r.zone, nil
	var err error
	if one.Missed, err = parseMissed(r.missed); err == nil {
		err = one.check(false)
	}
	if err != nil {
		return nil, fmt.Errorf("onceqcron: schedule %q in the table cannot be read: %w", s.Name, err)
	}
	return &one, nil
}

// renewAfter is how often a job may be claimed before another one ticks in its place. After a million claims, which is twelve
// days of a tick a second, it would be dead.
const renewAfter = 1_000_000

// renews reports whether it is time for that. A token ends with 20 bits that count the claims.
func renews(l *onceq.Lease) bool { return l.Token&(1<<20-1) >= renewAfter }

// renew is asked for by the job that ticks, as a job with the same key cannot exist beside it.
const renew = "renew"

// ticking locks a schedule, and returns nil for one that has no next tick: it was removed or is paused, or its timetable has
// ended.
func (s *Scheduler) ticking(ctx context.Context, tx pgx.Tx, name string) (*row, error) {
	r, err := s.lock(ctx, tx, name)
	if errors.Is(err, ErrNotFound) { // a schedule of this name may have come in place of the removed one, for which this job ticks too
		if err = s.lockName(ctx, tx, name); err == nil {
			r, err = s.lock(ctx, tx, name)
		}
	}
	switch {
	case errors.Is(err, ErrNotFound):
		return nil, nil
	case err == nil && (r.paused != nil || r.next == nil):
		return nil, nil // Resume and Put make a new job
	}
	return r, err
}

// tick is the handler of the job that ticks for a schedule.
func (s *Scheduler) tick(ctx context.Context, tx pgx.Tx, l *onceq.Lease, name string) error {
	if request := l.Metadata[metadataRequest]; request != "" {
		return s.answer(ctx, tx, name, request)
	}
	r, err := s.ticking(ctx, tx, name)
	if err != nil || r == nil {
		return err
	}
	one, err := s.schedule(name, r)
	if err != nil {
		return err
	}
	p, err := one.Missed.plan(ctx, one.Timetable, *r.next, r.changed, r.now, r.now)
	if err != nil {
		return err
	}
	marks, err := s.happen(ctx, tx, one, p, r)
	if err != nil {
		return err
	}
	var next *time.Time
	if !p.next.IsZero() {
		next = &p.next
	}
	const move = `
with old as (
  delete from onceq.schedule_ticks -- at as well, which is in the index
   where schedule = $1 and at < statement_timestamp() - $3::bigint::float8 * interval '1 microsecond'
     and done_at < statement_timestamp() - $3::bigint::float8 * interval '1 microsecond'
  returning 1
)
update onceq.schedules
   set next_at = $2, changed_at = null,
       known_from = case when exists (select from old) then greatest(known_from, statement_timestamp() - $3::bigint::float8 * interval '1 microsecond') else known_from end
 where name = $1 returning least(next_at - clock_timestamp(), '36500 days')` // Go counts up to 292 years
	var wait time.Duration // not from r.now: JobFor may have taken long since
	batch := s.notes(name, marks)
	keep := s.cfg.Keep
	if r.owner != s.cfg.Owner { // any worker may fire a schedule of the table, and does not know what its owner's Keep is
		keep = max(keep, othersKeep)
	}
	batch.Queue(s.sql(move), name, next, keep.Microseconds()).QueryRow(func(r pgx.Row) error { return r.Scan(&wait) })
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("onceqcron: moving schedule %q: %w", name, err)
	}
	if next == nil {
		return nil
	}
	if renews(l) || l.Queue != r.queue {
		_, err := s.ask(ctx, tx, l.Kind, r.queue, name, renew)
		return err
	}
	return onceq.Reschedule(max(0, wait))
}

// happen enqueues the jobs of a plan, and returns its lines of the ledger.
func (s *Scheduler) happen(ctx context.Context, tx pgx.Tx, one *Schedule, p plan, r *row) (marks []mark, err error) {
	if p.missed > 0 {
		marks = append(marks, mark{at: p.first, until: p.last, ticks: p.missed, outcome: "missed"})
	}
	for _, at := range p.fire {
		if r.happened(at) {
			continue
		}
		m, err := s.fire(ctx, tx, one, Tick{Schedule: one.Name, At: at, Now: r.now})
		if err != nil {
			return nil, err
		}
		marks = append(marks, m)
	}
	return marks, nil
}

// mark is a line of the ledger.
type mark struct {
	at, until time.Time
	ticks     int
	outcome   string
	job       *int64
	taken     bool // another job has its key, and was not replaced
	note      string
}

const (
	metadataSchedule = "onceqcron.schedule"
	metadataAt       = "onceqcron.at"
)

// tickMetadata is a job's metadata, and what ScheduledAt reads.
func tickMetadata(of map[string]string, t Tick) map[string]string {
	all := maps.Clone(of)
	if all == nil {
		all = make(map[string]string, 2)
	}
	all[metadataSchedule], all[metadataAt] = t.Schedule, t.At.UTC().Format(time.RFC3339Nano)
	return all
}

// fire enqueues the job of a tick. What makes the job impossible goes into the ledger, and the schedule goes on.
func (s *Scheduler) fire(ctx context.Context, tx pgx.Tx, one *Schedule, t Tick) (mark, error) {
	t.At, t.Now = t.At.In(one.loc), t.Now.In(one.loc)
	m := mark{at: t.At, until: t.At, ticks: 1, outcome: "refused"}
	job, err := one.jobFor(t)
	var panicked *onceq.PanicError
	if errors.As(err, &panicked) {
		s.q.Logger().ErrorContext(ctx, "onceqcron: JobFor panicked", "schedule", one.Name, "tick", t.At, "panic", panicked.Value, "stack", string(panicked.Stack))
	}
	if err != nil {
		m.note = storable(err)
		return m, nil
	}
	job.Metadata = tickMetadata(job.Metadata, t)
	r, err := s.q.Enqueue(ctx, tx, job)
	var bad *onceq.InvalidError
	var other *onceq.MismatchError
	var taken *onceq.DuplicateError
	switch {
	case errors.As(err, &bad) || errors.As(err, &other) || errors.As(err, &taken) || errors.As(err, &panicked):
		m.note = storable(err)
		return m, nil
	case err != nil:
		return m, fmt.Errorf("onceqcron: tick of %q: %w", one.Name, err)
	}
	m.outcome, m.job, m.taken = "fired", &r.ID, r.Duplicate && !r.Replaced
	if r.Duplicate {
		m.outcome = "duplicate"
	}
	if m.taken && r.State.Finished() && r.State != onceq.StateHeld { // a held one has its key whatever the Window says
		m.note = fmt.Sprintf("%s%d, which is %s", takenBy, r.ID, r.State)
	}
	return m, nil
}

// takenBy begins the note of a tick whose job's key is still taken by one that has finished.
const takenBy = "its key is still taken by job "

// storable is an error's text as Postgres can store it, and short enough for a line of a table.
func storable(err error) string {
	text, where := err.Error(), ""
	var panicked *onceq.PanicError
	if errors.As(err, &panicked) {
		text, where = fmt.Sprintf("panic: %v", panicked.Value), panicPlace(panicked.Stack)
	}
	const most, mostWhere = 700, 250
	if len(text) > most {
		text = text[:most] + " …"
	}
	if len(where) > mostWhere { // the end has the file and the line
		where = "… " + where[len(where)-mostWhere:]
	}
	if where != "" {
		text += "\n\n" + where
	}
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}

// panicPlace is where a stack panicked: a function, the file and the line.
func panicPlace(stack []byte) string {
	lines := strings.Split(string(stack), "\n")
	at := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "panic(") })
	for at += 2; at > 1 && at+1 < len(lines); at += 2 { // each frame has two lines
		if strings.HasPrefix(lines[at], "runtime.") { // as a nil pointer has
			continue
		}
		function := lines[at]
		if i := strings.LastIndexByte(function, '('); i > 0 { // its arguments are addresses
			function = function[:i]
		}
		file, _, _ := strings.Cut(strings.TrimSpace(lines[at+1]), " +0x")
		return function + " at " + file
	}
	return ""
}

// note writes lines of the ledger.
func (s *Scheduler) note(ctx context.Context, tx pgx.Tx, name string, marks []mark) error {
	if len(marks) == 0 {
		return nil
	}
	if err := tx.SendBatch(ctx, s.notes(name, marks)).Close(); err != nil {
		return fmt.Errorf("onceqcron: writing the ledger of %q: %w", name, err)
	}
	return nil
}

// notes makes a batch of what writes lines of the ledger. What has happened stays there: a tick that the database's clock came to
// before it was set back is not missed.
func (s *Scheduler) notes(name string, marks []mark) *pgx.Batch {
	const write = `
insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome, job_id, note) values ($1, $2, $3, $4, $5, $6, nullif($7, ''))
on conflict (schedule, at) do update set outcome = excluded.outcome, job_id = excluded.job_id, note = excluded.note, done_at = excluded.done_at
 where schedule_ticks.outcome not in ('fired', 'duplicate')`
	batch := &pgx.Batch{}
	for _, m := range marks {
		batch.Queue(s.sql(write), name, m.at, m.until, m.ticks, m.outcome, m.job, m.note)
	}
	return batch
}

// ScheduledAt returns the scheduled time of the tick that enqueued a job, in UTC, and false for a job that no tick enqueued.
func ScheduledAt(l *onceq.Lease) (at time.Time, ok bool) {
	at, err := time.Parse(time.RFC3339Nano, l.Metadata[metadataAt])
	return at, err == nil
}
