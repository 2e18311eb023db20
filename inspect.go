package onceq

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/jsonb"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
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
	case strings.HasPrefix(line, table.LineSep):
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

	// Who ran it, and how long its handler took: empty if no handler was called.
	Host    string        `json:"host,omitzero"`
	Process int           `json:"process,omitzero"` // its id on the host
	Version string        `json:"version,omitzero"` // of the application: Config.Version
	Took    time.Duration `json:"took,omitzero"`
}

// knownJob is what stmt.ReadJob reads.
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
	err = q.store.Send(ctx, db, pg.Reading, stmt.ReadJob, []any{id, content, scope, key}, func(rows pgx.Rows) error {
		if !rows.Next() {
			return cmp.Or(rows.Err(), pgx.ErrNoRows)
		}
		return k.job.scan(rows, &k.holder, &k.ahead, &timeout, &k.cancelling, &k.scope, &k.key, &k.until, &k.at)
	})
	k.job.Timeout = cmp.Or(k.job.Timeout, ownTimeout(timeout))
	return k, err
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
		i.Token = i.ID<<table.TokenBits | int64(i.Claims)
	}
	i.Scope, i.Key = table.OrZero(scope), table.OrZero(key)
	i.Lane, i.Limit, i.Weight, i.slotted = table.SplitPath(table.OrZero(path))
	if i.line, i.Blocked = table.OrZero(line), line != nil; i.Blocked {
		i.WaitsFor = waitsFor(i.line)
	}
	i.LeasedUntil, i.FinishedAt, i.KeepUntil = table.OrZero(leased), table.OrZero(finished), table.OrZero(keep)
	if payload != nil {
		i.Payload = json.RawMessage(*payload)
	}
	if result != nil {
		i.Result = json.RawMessage(*result)
	}
	if metadata != nil {
		i.Metadata = jsonb.Texts(*metadata)
		i.Timeout = ownTimeout(i.Metadata[table.TimeoutMember])
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
	for range table.SettleTries {
		var state table.FenceState
		var finished *time.Time
		var result string
		args := []any{int16(classJob), scope, key}
		switch err := q.store.QueryRow(ctx, db, stmt.ReadFence, args, &state, &i.Token, nil, &i.CreatedAt, nil, nil, &result, nil, nil, nil, &i.ID, &finished); {
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
		if i.State = State(state.Job(nil)); i.State == 0 {
			continue // the job finished between the two statements; the fence now says how
		}
		if i.FinishedAt = table.OrZero(finished); result != "" {
			i.Result = json.RawMessage(result)
		}
		return i, nil
	}
	return JobInfo{}, fmt.Errorf("%w: job %d, which key %q in scope %q belongs to", ErrNotFound, i.ID, key, scope)
}

// Wait waits until a job is finished or held, and returns it with its State, and with its Result or its Errors. ref names the
// job by its id, as Enqueue returns it, or by its key (Kind.Ref). If ctx ends first, Wait returns the job as it was then, and
// the context's error: an HTTP handler with a time limit answers 202 then.
//
// Where the kind keeps no history (Kind.Keep), the result is that of the job's key, as long as the key is taken. A job
// without a key and a history leaves nothing when it completes: of one that Wait has seen, Wait returns StateCompleted without
// a Result, and of one that was completed before, ErrNotFound.
//
// Wait looks at once when the job ends through this Queue: in a worker of this process, by Lease.Complete or
// Cancel. An end elsewhere sends no notification: Wait looks after 25 ms, and each time twice as late, up to
// a second. It holds no connection between two looks.
func (q *Queue) Wait(ctx context.Context, ref JobRef) (JobInfo, error) {
	if (ref.ID != 0) == (ref.Key != "") {
		return JobInfo{}, invalid("JobRef", "must name a job by its ID, or by its Scope and Key, and not by both")
	}
	const soon = 25 * time.Millisecond
	var job JobInfo // as the latest look saw it
	ended := make(chan struct{}, 1)
	for pause := soon; ; {
		now, err := q.waited(ctx, ref, job)
		switch {
		case err != nil && ctx.Err() != nil:
			return job, ctx.Err()
		case err != nil:
			return job, err
		case now.State.Finished():
			return now, nil
		}
		if job.ID == 0 {
			defer q.waits.Add(now.ID, ended)()
		}
		job = now
		select {
		case <-ctx.Done():
			return job, ctx.Err()
		case <-ended:
			pause = soon // the transaction that ends the job may not have committed yet
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		}
	}
}

// waited is one look of Wait at a job that the look before saw as it is in seen.
func (q *Queue) waited(ctx context.Context, ref JobRef, seen JobInfo) (JobInfo, error) {
	if seen.ID == 0 && ref.ID == 0 {
		return q.GetByKey(ctx, q.store.Pool, ref.Scope, ref.Key)
	}
	id := max(ref.ID, seen.ID)
	switch k, err := q.job(ctx, q.store.Pool, id, false, nil, nil); {
	case err == nil && k.job.State.Finished():
		return q.Get(ctx, q.store.Pool, id) // with its result
	case err == nil:
		return k.job, nil
	case !errors.Is(err, pgx.ErrNoRows):
		return JobInfo{}, fmt.Errorf("onceq: wait: %w", err)
	case seen.ID == 0:
		return JobInfo{}, noJob(id)
	}
	if seen.Key != "" {
		job, err := q.GetByKey(ctx, q.store.Pool, seen.Scope, seen.Key)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return JobInfo{}, err
		}
		if err == nil && job.ID == id && job.State.Finished() {
			return job, nil
		}
	}
	seen.State = StateCompleted // every other end leaves the job in the history
	return seen, nil
}
