package onceq

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// JobInfo is what is known about a job. Times are the database's. In JSON, empty fields are left out.
type JobInfo struct {
	ID          int64             `json:"id"`
	Kind        string            `json:"kind,omitzero"`
	Queue       string            `json:"queue,omitzero"`
	Scope       string            `json:"scope,omitzero"` // empty for a job without a key
	Key         string            `json:"key,omitzero"`
	State       State             `json:"state"`
	Payload     json.RawMessage   `json:"payload,omitzero"` // nil if the payload is bytes
	Bytes       []byte            `json:"bytes,omitzero"`   // nil if the payload is JSON
	Metadata    map[string]string `json:"metadata,omitzero"`
	Priority    Priority          `json:"priority"`
	Attempts    int               `json:"attempts"` // failed attempts
	MaxAttempts int               `json:"max_attempts"`
	Timeout     time.Duration     `json:"timeout,omitzero"` // Job.Timeout; 0: its kind's, or unread
	Lost        int               `json:"lost"`             // leases that ran out, as Kind.MaxLost counts them: each from the next claim on
	Claims      int               `json:"claims"`
	Token       int64             `json:"token,omitzero"` // of the latest claim; 0 before the first
	RunAt       time.Time         `json:"run_at,omitzero"`
	DueAt       time.Time         `json:"due_at,omitzero"` // RunAt, or if it was due before and its lane, its limit, other jobs or a Move put that off, since when
	CreatedAt   time.Time         `json:"created_at,omitzero"`
	LeasedUntil time.Time         `json:"leased_until,omitzero"` // end of the latest lease, which may have passed; zero if nobody has the job
	FinishedAt  time.Time         `json:"finished_at,omitzero"`  // zero if the job is not finished
	KeepUntil   time.Time         `json:"keep_until,omitzero"`   // when the job leaves the history; zero if it does not leave by itself
	Result      json.RawMessage   `json:"result,omitzero"`       // nil for none
	Lane        string            `json:"lane,omitzero"`         // family/name; empty for a job without a lane
	Limit       string            `json:"limit,omitzero"`        // empty for a job without a limit
	Weight      int               `json:"weight,omitzero"`       // how often it counts in its limit; 0 without one
	Blocked     bool              `json:"blocked,omitzero"`      // the job waits for its lane, its limit or other jobs
	WaitsFor    string            `json:"waits_for,omitzero"`    // which of these a blocked job waits for now: "lane", "limit" or "jobs"
	Errors      []AttemptError    `json:"errors,omitzero"`       // of the latest failed attempts, oldest first
	Progress    *Progress         `json:"progress,omitzero"`     // what the handler of the latest run last reported; nil for nothing, and for a finished job

	line    string // of a blocked job: what it waits for, as job_waits has it
	slotted bool   // RunAt is a slot of its limit's rate

	since time.Time // when the latest run began, if a beat has written that
}

// waitsFor says what sort of line a line of job_waits is.
func waitsFor(line string) string {
	switch {
	case strings.HasPrefix(line, lineSep):
		return "jobs"
	case strings.HasPrefix(line, "/"):
		return "limit"
	}
	return "lane"
}

// AttemptError is one failed attempt.
type AttemptError struct {
	At      time.Time `json:"at"`
	Attempt int       `json:"attempt"` // 1 for the first
	Error   string    `json:"error"`
}

// jobColumns are what is read of a job j of jobs, w of job_waits and h of job_history. The content is read if a parameter says so: it is
// in pages of its own (TOAST), and may be a megabyte of each job.
func jobColumns(content string) (live, waiting, past string) {
	read := func(columns ...string) string {
		return `case when ` + content + ` then ` + strings.Join(columns, ` end, case when `+content+` then `) + ` end`
	}
	return `j.id, j.kind, j.queue, j.scope, j.key, ` + jobState + ` as state,
       ` + read(`j.payload::text`, `j.payload_bytes`, `j.metadata::text`) + `, null::text,
       j.priority, j.attempts, j.max_attempts, j.lost, j.claims, j.run_at, j.created_at,
       j.leased_until, null::timestamptz, null::timestamptz,
       j.errors::text, j.progress::text, j.lane, null::text, coalesce(j.due_at, j.run_at)`,
		`w.id, w.kind, w.queue, w.scope, w.key, ` + waitState + ` as state,
       ` + read(`w.payload::text`, `w.payload_bytes`, `w.metadata::text`) + `, null::text,
       w.priority, w.attempts, w.max_attempts, w.lost, w.claims, w.run_at, w.created_at,
       null::timestamptz, null::timestamptz, null::timestamptz,
       w.errors::text, null::text, coalesce(w.path, w.lane), w.lane, coalesce(w.due_at, w.run_at)`,
		`h.id, h.kind, h.queue, h.scope, h.key, h.state,
       ` + read(`h.payload::text`, `h.payload_bytes`, `h.metadata::text`, `h.result::text`) + `,
       h.priority, h.attempts, h.max_attempts, h.lost, h.claims, h.run_at, h.created_at,
       null::timestamptz, h.finished_at, h.keep_until,
       h.errors::text, null::text, h.lane, null::text, h.run_at`
}

// readJob reads job $1, with its content if $2 says so, and only if it has scope $3 and key $4 unless these are null: after the
// sequence was set back, a later job may have the id. It also reads who has the job, since when somebody wants it cancelled, and
// for what it waits in an Await or a Sleep, and of a live one its time-out.
var readJob = func() string {
	live, waiting, past := jobColumns(`$2::bool`)
	where := func(alias string) string {
		return fmt.Sprintf(`
         where %[1]s.id = $1::bigint and ($3::text is null or %[1]s.scope = $3::text and %[1]s.key = $4::text)`, alias)
	}
	return `
select i.*, j.holder, coalesce(j.ahead, false), coalesce(j.timeout, ''), c.requested_at,
       coalesce(a.scope, ''), coalesce(a.key, ''), a.until, statement_timestamp()
  from (select ` + live + ` from onceq.jobs j` + where("j") + `
         union all
        select ` + waiting + ` from onceq.job_waits w` + where("w") + `
         union all
        select ` + past + ` from onceq.job_history h` + where("h") + `) i
  left join lateral (
       select holder, ahead, metadata ->> '` + timeoutMember + `'::text as timeout from onceq.jobs where id = i.id offset 0) j on true
  left join lateral (select requested_at from onceq.job_cancels where job_id = i.id and requested_at >= i.created_at offset 0) c on true
  left join lateral (
       select scope, key, until from onceq.job_awaits
        where job_id = i.id and claims = i.claims and state = ` + sqlOpen + ` order by until limit 1) a on true`
}()

// knownJob is what readJob reads.
type knownJob struct {
	job        JobInfo
	holder     *int64
	ahead      bool       // claimed, and not known to run yet
	cancelling *time.Time // when somebody asked for that
	scope, key string     // of the event that it waits for, or the name of its sleep,
	until      *time.Time // and until when; nil for neither
	at         time.Time
}

// job reads a job. The error is pgx.ErrNoRows if there is none.
func (q *Queue) job(ctx context.Context, db DB, id int64, content bool, scope, key *string) (k knownJob, err error) {
	var timeout string
	err = q.send(ctx, db, reading, readJob, []any{id, content, scope, key}, func(rows pgx.Rows) error {
		if !rows.Next() {
			return cmp.Or(rows.Err(), pgx.ErrNoRows)
		}
		return k.job.scan(rows, &k.holder, &k.ahead, &timeout, &k.cancelling, &k.scope, &k.key, &k.until, &k.at)
	})
	k.job.Timeout = cmp.Or(k.job.Timeout, ownTimeout(timeout))
	return k, err
}

// readMetadata reads a job's metadata. What somebody wrote by hand may be something else than texts: of an object, the other
// values become their JSON, and anything else is no metadata. An error would stop all jobs that were claimed together.
func readMetadata(text string) map[string]string {
	var all map[string]string
	if json.Unmarshal([]byte(text), &all) == nil {
		return all
	}
	var values map[string]json.RawMessage
	if json.Unmarshal([]byte(text), &values) != nil {
		return nil
	}
	all = make(map[string]string, len(values))
	for name, value := range values {
		var one string
		if json.Unmarshal(value, &one) != nil {
			one = string(value)
		}
		all[name] = one
	}
	return all
}

func (i *JobInfo) scan(rows pgx.Rows, more ...any) error {
	var scope, key, payload, metadata, result, errs, note, path, line *string
	var leased, finished, keep *time.Time
	dest := []any{&i.ID, &i.Kind, &i.Queue, &scope, &key, &i.State, &payload, &i.Bytes, &metadata, &result, &i.Priority,
		&i.Attempts, &i.MaxAttempts, &i.Lost, &i.Claims, &i.RunAt, &i.CreatedAt, &leased, &finished, &keep, &errs, &note, &path, &line, &i.DueAt}
	if err := rows.Scan(append(dest, more...)...); err != nil {
		return err
	}
	if i.RunAt.Year() > 9999 { // east of UTC, in the last hours of 9999; JSON has no text for it
		i.RunAt, i.DueAt = i.RunAt.UTC(), i.DueAt.UTC()
	}
	if i.Claims > 0 {
		i.Token = i.ID<<tokenBits | int64(i.Claims)
	}
	i.Scope, i.Key = orZero(scope), orZero(key)
	i.Lane, i.Limit, i.Weight, i.slotted = splitPath(orZero(path))
	if i.line, i.Blocked = orZero(line), line != nil; i.Blocked {
		i.WaitsFor = waitsFor(i.line)
	}
	i.LeasedUntil, i.FinishedAt, i.KeepUntil = orZero(leased), orZero(finished), orZero(keep)
	if payload != nil {
		i.Payload = json.RawMessage(*payload)
	}
	if result != nil {
		i.Result = json.RawMessage(*result)
	}
	if metadata != nil {
		i.Metadata = readMetadata(*metadata)
		i.Timeout = ownTimeout(i.Metadata[timeoutMember])
	}
	if err := i.noted(note); err != nil {
		return fmt.Errorf("progress of job %d: %w", i.ID, err)
	}
	if errs != nil {
		if err := json.Unmarshal([]byte(*errs), &i.Errors); err != nil {
			return fmt.Errorf("errors of job %d: %w", i.ID, err)
		}
	}
	return nil
}

func orZero[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// noJob is the error for an id that is neither live nor in the history.
func noJob(id int64) error {
	return fmt.Errorf("%w: job %d: it never was, or it completed and its kind keeps no history (Kind.Keep), or somebody discarded it", ErrNotFound, id)
}

// Get returns a job by its id: a live one, or one in the history. A completed job that is not kept in the history is
// ErrNotFound; GetByKey may still know it.
func (q *Queue) Get(ctx context.Context, db DB, id int64) (JobInfo, error) {
	switch k, err := q.job(ctx, db, id, true, nil, nil); {
	case errors.Is(err, pgx.ErrNoRows):
		return JobInfo{}, noJob(id)
	case err != nil:
		return JobInfo{}, fmt.Errorf("onceq: get: %w", err)
	default:
		return k.job, nil
	}
}

// GetByKey returns the job that has a key, or that had it last: as long as the key is taken, and after its window until a
// Reaper has removed it. The scope is the kind's name by default, see Job.Scope. Of a finished job that is not in the
// history, only ID, Scope, Key, State, CreatedAt, FinishedAt, Token and Result are known. A key that no job has is
// ErrNotFound.
func (q *Queue) GetByKey(ctx context.Context, db DB, scope, key string) (JobInfo, error) {
	if err := cmp.Or(checkText("scope", scope), checkText("key", key)); err != nil {
		return JobInfo{}, err
	}
	i := JobInfo{Scope: scope, Key: key}
	for range settleTries {
		var state fenceState
		var finished *time.Time
		var result string
		args := []any{int16(classJob), scope, key}
		switch err := q.queryRow(ctx, db, readFence, args, &state, &i.Token, nil, &i.CreatedAt, nil, nil, &result, nil, nil, nil, &i.ID, &finished); {
		case errors.Is(err, pgx.ErrNoRows):
			return JobInfo{}, fmt.Errorf("%w: key %q in scope %q: it was never taken, or it is free and a Reaper has removed it", ErrNotFound, key, scope)
		case err != nil:
			return JobInfo{}, fmt.Errorf("onceq: get by key: %w", err)
		}
		k, err := q.job(ctx, db, i.ID, true, &scope, &key)
		if err == nil && k.job.Result == nil && result != "" {
			k.job.Result = json.RawMessage(result)
		}
		if err == nil {
			return k.job, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return JobInfo{}, fmt.Errorf("onceq: get by key: %w", err)
		}
		if i.State = state.job(nil); i.State == 0 {
			continue // the job finished between the two statements; the fence now says how
		}
		if i.FinishedAt = orZero(finished); result != "" {
			i.Result = json.RawMessage(result)
		}
		return i, nil
	}
	return JobInfo{}, fmt.Errorf("%w: job %d, which key %q in scope %q belongs to", ErrNotFound, i.ID, key, scope)
}

// Filter chooses jobs. A field with its zero value does not restrict.
type Filter struct {
	Queue  string
	Kind   string
	Scope  string // of jobs with a key
	States []State
	IDs    []int64
	Group  int64 // members of this group, see EnqueueGroup
	After  int64 // the last id of the previous page; only smaller ids are chosen, by Members larger ones
	Limit  int   // List: default 100, at most 1,000; other methods: default no limit

	// WithoutPayloads leaves Payload, Bytes, Metadata and Result of the jobs of List, Page and Doubts empty, and does not read
	// them: a job may have more than a megabyte of these. So it is with Result of Keys, Effects and Members.
	WithoutPayloads bool

	// All says that a filter without Queue, Kind, Scope, IDs and Group is meant. Without it, such a filter is an *InvalidError of
	// CancelMany, RetryMany, RedriveMany, MoveMany, DiscardMany and ResolveMany, because it is more often a mistake.
	All bool

	// KeepKeys is for CancelMany alone, and an *InvalidError elsewhere: the key of a job that no worker ever had stays taken for
	// its window too, so that an Enqueue of the key is a duplicate of the cancelled job. Use it where a sender repeats what it
	// has sent. By default such a key is free at once.
	KeepKeys bool

	// CreatedFrom and CreatedBefore choose by the time of the enqueueing, the second without the time itself.
	CreatedFrom, CreatedBefore time.Time

	// Progress, if not nil, is called by CancelMany, RetryMany, RedriveMany, MoveMany, DiscardMany and ResolveMany after
	// each of their statements, with how many jobs have been tried so far. If it returns an error, no further statement is
	// sent, and that error is returned. In a transaction of the caller's these methods choose all jobs
	// first, and two such transactions lock them in the same order.
	Progress func(tried int) error

	floor int64 // only ids that are not smaller are chosen; 0 for all
	few   bool  // the queue has few live jobs, which are read through jobs_claim
}

// states returns the filter's states, each once.
func (f *Filter) states() (live, past []int16) {
	for _, s := range slices.Compact(slices.Sorted(slices.Values(f.States))) {
		if s.Finished() {
			past = append(past, int16(s))
		} else {
			live = append(live, int16(s))
		}
	}
	if f.States == nil {
		live = []int16{int16(StateWaiting), int16(StateDelayed), int16(StateRunning), int16(StateRetrying)}
		past = []int16{int16(StateCompleted), int16(StateDead), int16(StateCancelled), int16(StateHeld)}
	}
	return live, past
}

// byDefault chooses these states if the filter names none.
func (f *Filter) byDefault(states ...State) {
	if f.States == nil {
		f.States = states
	}
}

// orNone is a Filter that need not be given.
func orNone(given []Filter) Filter { return append(slices.Clip(given), Filter{})[0] }

func (f *Filter) check() error {
	for _, s := range f.States {
		if s < StateWaiting || s > StateHeld {
			return invalid("Filter.States", "has %d, which is not a state", s)
		}
	}
	if f.KeepKeys {
		return invalid("Filter.KeepKeys", "is set, and only CancelMany frees keys")
	}
	var from, before error
	f.CreatedFrom, from = storedTime("Filter.CreatedFrom", f.CreatedFrom)
	f.CreatedBefore, before = storedTime("Filter.CreatedBefore", f.CreatedBefore)
	return cmp.Or(from, before, checkText("Filter.Queue", f.Queue), checkText("Filter.Kind", f.Kind), checkText("Filter.Scope", f.Scope))
}

// List returns a page of jobs, newest (greatest id) first, both live jobs and those in the history. For the next page set
// Filter.After to the last id of this one. In the history, indexes serve Queue and States. All other conditions are checked
// row by row: a page of jobs that are rare among many live jobs reads all live jobs. Page reads few rows at a time.
// Unless Filter.WithoutPayloads is set, a page of 1,000 jobs may be a gigabyte.
func (q *Queue) List(ctx context.Context, db DB, filter Filter) ([]JobInfo, error) {
	if err := filter.page(); err != nil {
		return nil, err
	}
	return filter.read(ctx, q, db, "list")
}

// read reads a page. what begins its error.
func (f *Filter) read(ctx context.Context, q *Queue, db DB, what string) ([]JobInfo, error) {
	statement, args := f.statement()
	return readAll(ctx, q, db, reading, what, statement, args, func(i *JobInfo, rows pgx.Rows) error { return i.scan(rows) })
}

func (f *Filter) page() error {
	if err := f.check(); err != nil {
		return err
	}
	return pageSize("Filter.Limit", &f.Limit, 100)
}

// Page is List for people who wait for an answer: however many jobs there are, it looks at some 5,000 of the live ones, of
// those that wait for their lane, limit or other jobs, and of those in the history, newest first. So a page may have fewer jobs than
// Filter.Limit, or none, and not be the last one. To go on, set Filter.After to next; it is 0 after the last page. The jobs
// of all pages are those of List, in its order. All live jobs of a queue that has fewer than 5,000 are looked at at once,
// and so are chosen IDs.
func (q *Queue) Page(ctx context.Context, db DB, filter Filter) (jobs []JobInfo, next int64, err error) {
	if err := filter.page(); err != nil {
		return nil, 0, err
	}
	if statement, args := filter.bound(); statement != "" {
		if err := q.send(ctx, db, reading, statement, args, row(&filter.floor, &filter.few)); err != nil {
			return nil, 0, fmt.Errorf("onceq: page: %w", err)
		}
	}
	if jobs, err = filter.read(ctx, q, db, "page"); err != nil {
		return nil, 0, err
	}
	if len(jobs) == filter.Limit {
		return jobs, jobs[len(jobs)-1].ID, nil
	}
	return jobs, filter.floor, nil
}

// pastRange is a range of job_history_state, from its end: the jobs of queue p.queue in state s.state. It names the columns in
// this odd way so that only that index serves it, in its order, and so that the scan ends where the state does. With plain
// equalities the planner may read the primary key, once for each queue and state, and with whole rows on both sides the scan
// goes on through all other states of the queue.
const (
	pastRange = `h.queue = any (array[p.queue]) and (h.state, h.id) < (s.state, $1::bigint) and h.state >= s.state`
	pastOrder = `
                order by h.queue desc, h.state desc, h.id desc`
)

// pastRows is how many rows a Page looks at of each such range.
const pastRows = `greatest(5000 / ((select count(*) from past) * pg_catalog.cardinality($3::smallint[])), 100)`

// rows reports whether the filter chooses by what is in no index, so that rows are looked at that it does not choose.
func (f *Filter) rows() bool {
	return f.Kind != "" || f.Scope != "" || !f.CreatedFrom.IsZero() || !f.CreatedBefore.IsZero()
}

// wide reports whether a Page looks at the history as it stands, by id, and not at ranges of it.
func (f *Filter) wide(past []int16) bool {
	return f.rows() && f.Queue == "" && f.IDs == nil && len(past) == 4
}

// bound builds the statement that finds Filter.floor and Filter.few: how far down a page goes, so that it looks at no more
// than pageRows rows of a table, or at no more than that of all the ranges of job_history_state together. It is empty if
// every row that a page looks at is chosen. Every statement takes all arguments.
func (f *Filter) bound() (string, []any) {
	if f.IDs != nil || f.Group != 0 {
		return "", nil
	}
	live, past := f.states()
	rows := f.rows()
	table := func(name string) string {
		return `(select id from onceq.` + name + ` where id < $1::bigint order by id desc offset $5::int - 1 limit 1)`
	}
	few, floors := `false`, []string{`0`}
	if len(live) > 0 && (rows || f.Queue != "" || len(live) < 4) {
		if f.Queue != "" {
			few = `(select count(*) < $5::int from (select from onceq.jobs where queue = $4::text limit $5::int) q)`
		}
		floors = append(floors, `case when not few.few then `+table("jobs")+` end`, table("job_waits"))
	}
	queues := ` past (queue) as (select $4::text collate "C"),`
	switch {
	case !rows || len(past) == 0:
	case f.wide(past):
		floors = append(floors, table("job_history"))
	default:
		if f.Queue == "" {
			queues = pastQueues
		}
		floors = append(floors, `
       (select pg_catalog.max(i.id)
          from past p cross join pg_catalog.unnest($3::smallint[]) s (state)
         cross join lateral (
               select h.id from onceq.job_history h
                where `+pastRange+pastOrder+` offset `+pastRows+` - 1 limit 1) i
         where p.queue is not null)`)
	}
	if len(floors) == 1 {
		return "", nil
	}
	return `
with recursive` + queues + `
given as (select $1::bigint, $2::int, $3::smallint[], $4::text, $5::int),
few as materialized (select ` + few + ` as few)
select greatest(` + strings.Join(floors, `,
       `) + `), few.few
  from few`, []any{cmp.Or(f.After, math.MaxInt64), f.Limit, nonNil(past), f.Queue, pageRows}
}

// Count returns how many jobs the filter chooses, in the same states as List by default. It stops counting at Filter.Limit.
// It reads the row of every job that it counts.
func (q *Queue) Count(ctx context.Context, db DB, filter Filter) (n int, err error) {
	if err := filter.check(); err != nil {
		return 0, err
	}
	if filter.Limit < 0 {
		return 0, invalid("Filter.Limit", "is negative")
	}
	filter.Limit, filter.WithoutPayloads = cmp.Or(filter.Limit, math.MaxInt32), true
	statement, args := filter.statement()
	if err := q.send(ctx, db, reading, `select count(*) from (`+statement+`) page`, args, row(&n)); err != nil {
		return 0, fmt.Errorf("onceq: count: %w", err)
	}
	return n, nil
}

// statement builds the statement for a page. It compares and orders whole rows of an
// index of the history: with "queue = … and state = …" and an order by id, the planner reads the primary key where it
// believes that nearly every row has that state, and reads all of it if none has. It reads the history queue by queue and
// state by state, each of which is a range of one index with a limit. Conditions that do not restrict are left out, so that
// a plan that is made once for all values stays good. Every statement takes all arguments.
func (f *Filter) statement() (string, []any) {
	if f.Group != 0 {
		return f.ofGroup()
	}
	live, past := f.states()
	liveJob, waitingJob, pastJob := jobColumns(`$12::bool`)
	where := func(alias, id string) string {
		if f.floor > 0 {
			return id + ` < $1::bigint and ` + id + ` >= $11::bigint` + f.others(alias)
		}
		return id + ` < $1::bigint` + f.others(alias)
	}
	liveID, liveQueue, waitQueue, queues := "j.id", "", "", pastQueues
	if f.Queue != "" {
		queues = ` past (queue) as (select $4::text collate "C"),`
		liveQueue, waitQueue = ` and j.queue = $4::text`, ` and w.queue = $4::text`
		switch {
		case f.few: // through jobs_claim
			liveID = "j.id + 0"
		case f.floor > 0: // through the primary key
			liveQueue = ` and j.queue || '' = $4::text`
		}
	}
	states, waitStates := "", ""
	if len(live) < 4 {
		states, waitStates = ` and `+jobState+` = any ($7::smallint[])`, ` and `+waitState+` = any ($7::smallint[])`
	}
	return `
with recursive` + queues + givenFilter + `,
live as (
  select ` + liveJob + ` from onceq.jobs j
   where pg_catalog.cardinality($7::smallint[]) > 0 and ` + where("j", liveID) + liveQueue + states + `
   order by ` + liveID + ` desc limit $2::int
),
waiting as (
  select ` + waitingJob + ` from onceq.job_waits w
   where pg_catalog.cardinality($7::smallint[]) > 0 and ` + where("w", "w.id") + waitQueue + waitStates + `
   order by w.id desc limit $2::int
),
` + f.finished(pastJob, where("h", "h.id"), past) + `
)
select * from (select * from live union all select * from waiting union all select * from finished) a
 order by id desc limit $2::int`, f.args(live, past, f.floor)
}

// givenFilter names all arguments of such a statement, or those that it does not use would have no type.
const givenFilter = `
given as (select $1::bigint, $2::int, $3::smallint[], $4::text, $5::text, $6::text, $7::smallint[], $8::bigint[],
                 $9::timestamptz, $10::timestamptz, $11::bigint, $12::bool)`

func (f *Filter) args(live, past []int16, bound int64) []any {
	return []any{cmp.Or(f.After, math.MaxInt64), f.Limit, nonNil(past), f.Queue, f.Kind, f.Scope, nonNil(live), f.IDs,
		f.CreatedFrom, f.CreatedBefore, bound, !f.WithoutPayloads}
}

// ofGroup is statement for the members of a group. It goes through these, and no further than the page.
func (f *Filter) ofGroup() (string, []any) {
	live, past := f.states()
	liveJob, waitingJob, pastJob := jobColumns(`$12::bool`)
	where := func(alias, state, states string) string {
		queue := ""
		if f.Queue != "" {
			queue = ` and ` + alias + `.queue = $4::text`
		}
		return `
           where pg_catalog.cardinality(` + states + `::smallint[]) > 0 and ` + alias + `.id = any (array[m.job_id])` + f.others(alias) + queue + `
             and ` + state + ` = any (` + states + `::smallint[])`
	}
	return `
with` + givenFilter + `
select a.*
  from onceq.job_members m
 cross join lateral (
          select ` + liveJob + ` from onceq.jobs j` + where("j", jobState, "$7") + `
          union all
          select ` + waitingJob + ` from onceq.job_waits w` + where("w", waitState, "$7") + `
          union all
          select ` + pastJob + ` from onceq.job_history h` + where("h", "h.state", "$3") + `
          offset 0) a
 where m.group_id = $11::bigint and m.job_id < $1::bigint
 order by m.job_id desc
 limit $2::int`, f.args(live, past, f.Group)
}

// others are the filter's conditions besides the group, queue and states.
func (f *Filter) others(alias string) string {
	var s strings.Builder
	if f.Kind != "" {
		s.WriteString(" and " + alias + ".kind = $5::text")
	}
	if f.Scope != "" {
		s.WriteString(" and " + alias + ".scope = $6::text")
	}
	if f.IDs != nil {
		s.WriteString(" and " + alias + ".id = any ($8::bigint[])")
	}
	if !f.CreatedFrom.IsZero() {
		s.WriteString(" and " + alias + ".created_at >= $9::timestamptz")
	}
	if !f.CreatedBefore.IsZero() {
		s.WriteString(" and " + alias + ".created_at < $10::timestamptz")
	}
	return s.String()
}

// finished builds the part of the statement that reads the history: by id, or range by range.
func (f *Filter) finished(pastJob, where string, past []int16) string {
	if f.IDs != nil || f.floor > 0 && f.wide(past) {
		if f.Queue != "" {
			where += ` and h.queue = $4::text`
		}
		return `finished as (
  select ` + pastJob + ` from onceq.job_history h
   where h.state = any ($3::smallint[]) and ` + where + `
   order by h.id desc limit $2::int`
	}
	// No plain condition on the id, which would let the planner read the primary key.
	rows := `onceq.job_history h
         where ` + pastRange + f.others("h")
	if f.floor > 0 {
		most := `$2::int` // all of them are chosen
		if f.rows() {
			most = `2 * ` + pastRows // bound has found half of these; jobs finish meanwhile
		}
		rows = `(
               select * from onceq.job_history h
                where ` + pastRange + pastOrder + ` limit ` + most + `) h
         where h.id >= $11::bigint` + f.others("h")
	}
	return `finished as (
  select i.*
    from past p cross join pg_catalog.unnest($3::smallint[]) s (state)
   cross join lateral (
         select ` + pastJob + ` from ` + rows + pastOrder + ` limit $2::int) i
   where p.queue is not null`
}

func nonNil(s []int16) []int16 {
	if s = slices.Compact(slices.Sorted(slices.Values(s))); s == nil {
		s = []int16{}
	}
	return s
}

// StatsCap is where Stats stops counting.
const StatsCap = 1_000

// QueueStats says how a queue is doing. Each count stops at StatsCap. A job that was claimed ahead counts as Running only
// when its lease is first extended after its start, a third of WorkerConfig.Lease after the claim. If its handler runs in a
// transaction, it is not counted as Running at all.
type QueueStats struct {
	Queue    string
	Waiting  int // jobs that are due for the first time and that nobody has
	Retrying int // jobs that failed or lost a lease before; due now or later
	Delayed  int // jobs that are not due yet, for the first time
	Leased   int // jobs that somebody has now
	Running  int // leased jobs except those that a worker has claimed ahead and that wait there for a free handler
	Dead     int
	Held     int
	Blocked  int // jobs that wait for their lane, their limit or other jobs; the other counts of unfinished jobs do not contain them

	// For how long the oldest job that waits for its lane, for its limit and for other jobs has been due, by the database's
	// clock; 0 for none. Of the blocked jobs the 1,001 with the lowest ids are looked at.
	OldestInLane, OldestInLimit, OldestAfter time.Duration

	Paused time.Time // since when the queue itself has been paused (PauseQueue). A kind that is paused does not show here: Pauses lists it

	// Oldest is how long the oldest job that nobody has has been due, by the database's clock. It may be too short if
	// 10,000 jobs of one priority are leased.
	Oldest time.Duration

	// More says that there are jobs that were not looked at, so that each of Waiting, Retrying, Delayed, Leased and Running
	// says "at least". Of the due jobs of each priority, the first 500 and the last 500 are looked at, because leased jobs are
	// mostly the first. Of the jobs that are due later, the first 1,000 are looked at.
	More bool

	// Capped says that some count of the queue may be too small: More, or one of them stopped at StatsCap.
	Capped bool
}

// liveQueues and pastQueues find the names of queues by stepping through an index from one name to the next. No name is
// empty; saying so lets the planner use jobs_claim, a partial index.
const liveQueues = `
live (queue) as (
  (select queue from onceq.jobs where queue >= '' order by queue limit 1)
  union all
  select (select j.queue from onceq.jobs j where j.queue > l.queue order by j.queue limit 1)
    from live l where l.queue is not null
),`

const pastQueues = `
past (queue) as (
  (select queue from onceq.job_history where queue >= '' order by queue limit 1)
  union all
  select (select h.queue from onceq.job_history h where h.queue > p.queue order by h.queue limit 1)
    from past p where p.queue is not null
),`

const waitingQueues = `
waits (queue) as (
  (select queue from onceq.job_waits where queue >= '' order by queue limit 1)
  union all
  select (select w.queue from onceq.job_waits w where w.queue > l.queue order by w.queue limit 1)
    from waits l where l.queue is not null
),`

// readStats counts per queue: the queues in $1, or all if it is null; $2 is StatsCap. Every count is over a range of an index
// with a limit. The rows of live jobs have to be read, because no index says who has a job, so it looks at both ends of the
// due jobs of each priority: the half of the cap from the first, and one more than that from the last. The ends meet if there
// are not more due jobs than the cap. Of the jobs that are due later, the next
// ones of the three priorities are merged by their time, so that mostly no more than the cap are read.
const readStats = `
with recursive` + liveQueues + waitingQueues + pastQueues + `
names as materialized (
  select pg_catalog.unnest($1::text[]) collate "C" as queue
  union
  select queue from (select queue from live union all select queue from waits union all select queue from past union all select queue from onceq.queues
                      union all select name from onceq.pauses where what = 'queue' and ` + inForce + `) n
   where $1::text[] is null and queue is not null
)
select n.queue, i.waiting, i.retrying + l.retrying, l.delayed, i.leased, i.running, d.dead, h.held, w.blocked,
       coalesce(extract(epoch from statement_timestamp() - least(o.oldest, i.oldest)) * 1e6, 0)::bigint,
       coalesce(greatest(i.seen, l.seen) > $2::int, false),
       (select p.paused_at from onceq.pauses p where p.what = 'queue' and p.name = n.queue and ` + inForce + `),
       w.in_lane, w.in_limit, w.after_others
  from names n
 cross join lateral (
       select pg_catalog.sum(x.waiting)::bigint as waiting, pg_catalog.sum(x.retrying)::bigint as retrying, pg_catalog.sum(x.leased)::bigint as leased, pg_catalog.sum(x.running)::bigint as running,
              pg_catalog.min(x.oldest) as oldest, pg_catalog.max(x.seen) as seen
         from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
        cross join lateral (
              select count(*) filter (where j.free and j.fresh) as waiting, count(*) filter (where j.free and not j.fresh) as retrying,
                     count(*) filter (where not j.free) as leased, count(*) filter (where not j.free and j.ahead is null) as running,
                     pg_catalog.min(j.due_at) filter (where j.free) as oldest, count(*) as seen
                from ((select id, coalesce(due_at, run_at) as due_at, ahead, leased_until is null or leased_until <= statement_timestamp() as free,
                              attempts = 0 and lost = 0 and leased_until is null as fresh
                         from onceq.jobs
                        where queue = n.queue and priority = p.priority and run_at <= statement_timestamp()
                        order by run_at, id
                        limit $2::int / 2)
                      union
                      (select id, coalesce(due_at, run_at) as due_at, ahead, leased_until is null or leased_until <= statement_timestamp() as free,
                              attempts = 0 and lost = 0 and leased_until is null as fresh
                         from onceq.jobs
                        where queue = n.queue and priority = p.priority and run_at <= statement_timestamp()
                        order by run_at desc, id desc
                        limit $2::int / 2 + 1)) j) x) i
 cross join lateral (
       select pg_catalog.min(f.due_at) as oldest -- the first job of each priority that nobody has; leased ones stand before it
         from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
        cross join lateral (
              select j.due_at
                from (select coalesce(due_at, run_at) as due_at, leased_until
                        from onceq.jobs
                       where queue = n.queue and priority = p.priority and run_at <= statement_timestamp()
                       order by run_at, id
                       limit 10000) j
               where j.leased_until is null or j.leased_until <= statement_timestamp()
               limit 1) f) o
 cross join lateral (
       select count(*) filter (where fresh) as delayed, count(*) filter (where not fresh) as retrying, count(*) as seen
         from ((select id, run_at, attempts = 0 and lost = 0 and leased_until is null as fresh
                  from onceq.jobs
                 where queue = n.queue and priority = -1 and run_at > statement_timestamp()
                 order by run_at, id
                 limit $2::int + 1)
               union all
               (select id, run_at, attempts = 0 and lost = 0 and leased_until is null as fresh
                  from onceq.jobs
                 where queue = n.queue and priority = 0 and run_at > statement_timestamp()
                 order by run_at, id
                 limit $2::int + 1)
               union all
               (select id, run_at, attempts = 0 and lost = 0 and leased_until is null as fresh
                  from onceq.jobs
                 where queue = n.queue and priority = 1 and run_at > statement_timestamp()
                 order by run_at, id
                 limit $2::int + 1)
               order by run_at, id
               limit $2::int + 1) x) l
 cross join lateral (
       select count(*) as dead
         from (select from onceq.job_history where queue = n.queue and state = ` + sqlJobDead + ` order by id limit $2::int + 1) x) d
 cross join lateral (
       select count(*) as held
         from (select from onceq.job_history where queue = n.queue and state = ` + sqlJobHeld + ` order by id limit $2::int + 1) x) h
 cross join lateral (
       select count(*) as blocked, coalesce(pg_catalog.max(due) filter (where of = ''), 0) as in_lane, coalesce(pg_catalog.max(due) filter (where of = '/'), 0) as in_limit,
              coalesce(pg_catalog.max(due) filter (where of = pg_catalog.chr(31)), 0) as after_others
         from (select case when pg_catalog.starts_with(lane, ` + sqlSep + `) then pg_catalog.chr(31) when lane like '/%' then '/' else '' end as of,
                      (extract(epoch from statement_timestamp() - coalesce(due_at, run_at)) * 1e6)::bigint as due
                 from onceq.job_waits where queue = n.queue order by id limit $2::int + 1) x) w
 order by n.queue`

// Stats returns the figures of the named queues, or of every queue that has jobs, a history or workers, sorted by name.
// However many jobs there are, it reads of a queue some 1,000 rows of each priority that has due jobs, and some 1,000 of the
// delayed ones, besides leased ones at the front, because it stops counting at StatsCap: some milliseconds a queue. It runs on
// the pool, with its own planner settings, because with stale statistics the planner would read whole ranges and sort them.
func (q *Queue) Stats(ctx context.Context, queues ...string) ([]QueueStats, error) {
	for _, name := range queues {
		if err := checkText("queues", name); err != nil {
			return nil, err
		}
	}
	return readAll(ctx, q, q.pool, reading, "stats", readStats, []any{queues, StatsCap}, (*QueueStats).scan)
}

func (s *QueueStats) scan(rows pgx.Rows) error {
	var oldest, inLane, inLimit, after int64
	var paused *time.Time
	err := rows.Scan(&s.Queue, &s.Waiting, &s.Retrying, &s.Delayed, &s.Leased, &s.Running, &s.Dead, &s.Held, &s.Blocked, &oldest,
		&s.More, &paused, &inLane, &inLimit, &after)
	age := func(micros int64) time.Duration { return max(0, time.Duration(micros)*time.Microsecond) } // less than 0: not due yet
	s.OldestInLane, s.OldestInLimit, s.OldestAfter = age(inLane), age(inLimit), age(after)
	s.Oldest, s.Paused, s.Capped = time.Duration(oldest)*time.Microsecond, orZero(paused), s.More
	for _, n := range []*int{&s.Waiting, &s.Retrying, &s.Delayed, &s.Leased, &s.Running, &s.Dead, &s.Held, &s.Blocked} {
		if *n > StatsCap {
			*n, s.Capped = StatsCap, true
		}
	}
	return err
}
