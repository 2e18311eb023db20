package onceq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Result is the answer to an Enqueue.
type Result struct {
	ID        int64 // of the new job, or of the one that has the key
	Duplicate bool  // the key was taken: nothing was written
	State     State // of that job, now

	// Output is the stored result of a job that is completed, where its handler set one.
	Output json.RawMessage
}

// Enqueue accepts a job inside db: it commits and rolls back with the caller's transaction.
//
// A key that is taken is no error: the answer has Duplicate set and says which job has it, in which state
// and, when finished, with which result. With Job.Strict it is a *DuplicateError. The same key with another
// payload is a *MismatchError. In all three cases nothing was written and the transaction stays usable.
// A job that cannot be stored is an *InvalidError, before anything is sent.
//
// While another transaction that took the same key is open, Enqueue waits for its end. Above READ COMMITTED
// Postgres may answer with a serialization failure, and with two keys taken in opposite orders with a
// deadlock; IsRetryable recognises both, and the whole transaction has to run again.
func (q *Queue) Enqueue(ctx context.Context, db DB, job Job) (Result, error) {
	e, err := job.encode("")
	if err != nil {
		return Result{}, err
	}
	var id int64
	statement, args := q.insertOne(&e, false)
	var quiet bool // nobody was notified
	switch err := q.queryRow(ctx, db, statement, args, &id, &quiet); {
	case err == nil:
		q.enqueued(ctx, &e, id)
		return Result{ID: id, State: e.state()}, nil
	case !errors.Is(err, pgx.ErrNoRows):
		return Result{}, fmt.Errorf("onceq: enqueue: %w", err)
	}
	results := make([]Result, 1)
	err = q.settle(ctx, db, []Job{job}, []encoded{e}, results, []int{0})
	return results[0], err
}

// EnqueueUnique is Enqueue for jobs that must have a key: an empty one is an *InvalidError.
func (q *Queue) EnqueueUnique(ctx context.Context, db DB, job Job) (Result, error) {
	job.keyed = true
	return q.Enqueue(ctx, db, job)
}

// enqueueChunk is how many jobs go in one statement.
const enqueueChunk = 2000

// EnqueueMany accepts any number of jobs, in one round trip per 2,000, all or nothing: outside of a
// transaction it opens one. Results come in the order of jobs, and ids grow in that order. A key that stands
// twice in jobs is an *InvalidError that names both places, before anything is written.
//
// Where keys are taken with another payload (or at all, for strict jobs), the error joins one *MismatchError
// or *DuplicateError for each, and results are complete. In the caller's own transaction the other jobs are
// then enqueued: it is the caller's to commit or roll back.
func (q *Queue) EnqueueMany(ctx context.Context, db DB, jobs []Job) ([]Result, error) {
	all := make([]encoded, len(jobs))
	type name struct{ scope, key string }
	seen := make(map[name]int)
	for i := range jobs {
		at := fmt.Sprintf("jobs[%d].", i)
		var err error
		if all[i], err = jobs[i].encode(at); err != nil {
			return nil, err
		}
		if all[i].key == "" {
			continue
		}
		n := name{all[i].scope, all[i].key}
		if first, repeated := seen[n]; repeated {
			return nil, invalid(at+"Key", "%q repeats that of jobs[%d]", n.key, first)
		}
		seen[n] = i
	}
	results := make([]Result, len(jobs))
	if len(jobs) == 0 {
		return results, nil
	}
	err := atomically(ctx, db, func(db DB) error {
		var refused []error
		for from := 0; from < len(jobs); from += enqueueChunk {
			to := min(from+enqueueChunk, len(jobs))
			part := make([]int, 0, to-from)
			for i := from; i < to; i++ {
				part = append(part, i)
			}
			left, err := q.insertMany(ctx, db, all, results, part, false)
			if err == nil && len(left) > 0 {
				err = q.settle(ctx, db, jobs, all, results, left)
			}
			if errors.Is(err, ErrMismatch) || errors.Is(err, ErrDuplicate) {
				refused = append(refused, err)
			} else if err != nil {
				return err
			}
		}
		return errors.Join(refused...)
	})
	if err != nil && !errors.Is(err, ErrMismatch) && !errors.Is(err, ErrDuplicate) {
		return nil, err
	}
	return results, err
}

// Pending is the answer to an enqueueing that stands in a batch.
type Pending struct {
	q    *Queue
	job  Job
	e    encoded
	id   int64
	sent bool
}

// EnqueueInBatch adds the enqueueing to the caller's own batch, so that it costs no round trip. Once the batch
// is read or closed, Pending.Result has the answer. Bad input is an *InvalidError at once.
//
// A key that is taken lets the batch go on: if it ends with a commit, a mismatch is only learned after it.
func (q *Queue) EnqueueInBatch(batch *pgx.Batch, job Job) (*Pending, error) {
	e, err := job.encode("")
	if err != nil {
		return nil, err
	}
	p := &Pending{q: q, job: job, e: e}
	statement, args := q.insertOne(&e, true)
	batch.Queue(q.sql(statement), args...).Query(func(rows pgx.Rows) error {
		p.sent = true
		if rows.Next() {
			var quiet bool
			if err := rows.Scan(&p.id, &quiet); err != nil {
				return err
			}
		}
		rows.Close()
		return rows.Err()
	})
	return p, nil
}

// Result gives the answer as Enqueue does. It asks the database only when the key was taken, in db: the same
// transaction, or the pool once that is committed.
func (p *Pending) Result(ctx context.Context, db DB) (Result, error) {
	switch {
	case !p.sent:
		return Result{}, errors.New("onceq: Pending.Result before the batch was sent and read, or its statement failed")
	case p.id != 0:
		p.q.enqueued(ctx, &p.e, p.id)
		return Result{ID: p.id, State: p.e.state()}, nil
	}
	results := make([]Result, 1)
	err := p.q.settle(ctx, db, []Job{p.job}, []encoded{p.e}, results, []int{0})
	return results[0], err
}

// The statements take jobs in, and give the ids of those that were accepted. Two things vary: without keys
// no fence is touched, and with taking an expired fence is taken over under its row lock in the same
// statement. A first attempt does without the latter, which costs an index probe for each job.
//
// A notification is sent only when a worker with a confirmed listener has announced that it waits for a
// queue (wake.go): otherwise committing would queue up behind Postgres's one lock for them.

const dueOne = `case when $6::bigint = 0 then statement_timestamp() + $7::bigint * interval '1 microsecond'
            else timestamptz 'epoch' + $6::bigint * interval '1 microsecond' end`

const notifyOne = `(select pg_notify($10::text, $1::text) from onceq.waiters w
           where w.queue = $1::text and w.idle_until > statement_timestamp() and $7::bigint < 2000000 limit 1)`

const jobOne = `
  insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind,
                          payload, payload_bytes, metadata`

const insertPlainOne = `
with job as (` + jobOne + `)
  values (nextval('onceq.ids'), ` + dueOne + `, statement_timestamp(),
          $4::int, $5::int, $1::text, $2::text, nullif($3::text, '')::jsonb, $9::bytea, nullif($8::text, '')::jsonb)
  returning id
)
select id, ` + notifyOne + ` is null from job`

const fenceOne = `
fence as (
  insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint)
  select 0, $11::text, $12::text, 0, n.id, n.id << 20, statement_timestamp(), $13::bigint, $14::bytea
    from n`

const keyedOne = `
  on conflict do nothing
  returning job_id
),
job as (` + jobOne + `, scope, key)
  select a.job_id, ` + dueOne + `, statement_timestamp(),
         $4::int, $5::int, $1::text, $2::text, nullif($3::text, '')::jsonb, $9::bytea, nullif($8::text, '')::jsonb,
         $11::text, $12::text
    from accepted a
  returning id
)
select id, ` + notifyOne + ` is null from job`

var insertKeyedOne = `
with n as materialized (select nextval('onceq.ids') as id),` + fenceOne +
	strings.Replace(keyedOne, "accepted", "fence", 1)

var insertTakingOne = `
with n as materialized (select nextval('onceq.ids') as id),
taken as (
  update onceq.job_fences f
     set job_id = n.id, token = n.id << 20, state = 0, created_at = statement_timestamp(), finished_at = null,
         lifetime = $13::bigint, fingerprint = $14::bytea, result = null, holder = null, leased_until = null
    from n
   where f.class = 0 and f.scope = $11::text and f.key = $12::text
     and ` + fenceFree + `
     and f.token >> 20 < n.id and f.job_id < n.id
  returning f.job_id
),` + fenceOne + `
   where not exists (select from taken)` +
	strings.Replace(keyedOne, "accepted a", "(select job_id from taken union all select job_id from fence) a", 1)

// insertOne gives the statement for one job. Zero rows: the key is taken.
func (q *Queue) insertOne(e *encoded, taking bool) (string, []any) {
	var at int64
	if !e.at.IsZero() {
		at = e.at.UnixMicro()
	}
	args := []any{e.queue, e.kind, e.json, e.maxAttempts, e.priority, at, e.delay.Microseconds(), e.metadata, e.bytes, q.channel()}
	if e.key == "" {
		return insertPlainOne, args
	}
	args = append(args, e.scope, e.key, e.lifetime, e.fingerprint)
	if taking {
		return insertTakingOne, args
	}
	return insertKeyedOne, args
}

// Many jobs are sent as arrays: what they have in common (kind, queue, …) once, as a header that each
// refers to. Ids are drawn in the caller's order, keys are taken in sorted order, so that two callers with
// the same keys do not deadlock.
const manyInput = `
with input as materialized (
  select nextval('onceq.ids') as id, u.*
    from unnest($1::int[], $2::text[], $3::bytea[], $4::text[], $5::text[], $6::bytea[])
      as u(header, payload, bytes, scope, key, fingerprint)
),
header as materialized (
  select h.*,
         case when h.at = 0 then statement_timestamp() + h.delay * interval '1 microsecond'
              else timestamptz 'epoch' + h.at * interval '1 microsecond' end as due
    from unnest($7::text[], $8::text[], $9::int[], $10::int[], $11::bigint[], $12::bigint[], $13::bigint[], $14::text[])
         with ordinality
      as h(queue, kind, priority, max_attempts, at, delay, lifetime, metadata, n)
),`

const manyJobs = `
job as (
  insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind,
                          payload, payload_bytes, metadata, scope, key)
  select i.id, h.due, statement_timestamp(), h.max_attempts, h.priority, h.queue, h.kind,
         nullif(i.payload, '')::jsonb, case when i.payload = '' then i.bytes end, nullif(h.metadata, '')::jsonb,
         nullif(i.scope, ''), nullif(i.key, '')
    from input i join header h on h.n = i.header
   where `

const manyAnswer = `
)
select (select array_agg(id order by id) from input),
       (select count(pg_notify($15::text, w.queue)) from (
          select distinct w.queue from onceq.waiters w join header h on h.queue = w.queue
           where w.idle_until > statement_timestamp() and h.delay < 2000000) w)`

const insertPlainMany = manyInput + manyJobs + `true` + manyAnswer + `, null::bigint[]`

const manyFence = `
fence as (
  insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint)
  select 0, i.scope, i.key, 0, i.id, i.id << 20, statement_timestamp(), h.lifetime, nullif(i.fingerprint, '')
    from input i join header h on h.n = i.header
   where i.key <> ''`

const manyConflict = `
   order by i.scope, i.key
  on conflict do nothing
  returning job_id
),`

const insertKeyedMany = manyInput + manyFence + manyConflict + manyJobs +
	`i.key = '' or i.id in (select job_id from fence)` + manyAnswer + `,
       (select array_agg(job_id) from fence)`

const insertTakingMany = manyInput + `
free as materialized (
  select i.id, i.fingerprint, h.lifetime, f.class, f.scope, f.key
    from (select * from input order by scope, key) i
    join header h on h.n = i.header
   cross join lateral (
         select f.class, f.scope, f.key
           from onceq.job_fences f
          where f.class = 0 and f.scope = i.scope and f.key = i.key
            and ` + fenceFree + `
            and f.token >> 20 < i.id and f.job_id < i.id
            for update) f
),
taken as (
  update onceq.job_fences f
     set job_id = n.id, token = n.id << 20, state = 0, created_at = statement_timestamp(), finished_at = null,
         lifetime = n.lifetime, fingerprint = nullif(n.fingerprint, ''), result = null, holder = null,
         leased_until = null
    from free n
   where f.class = 0 and f.scope = n.scope and f.key = n.key
  returning f.job_id
),` + manyFence + `
     and i.id not in (select id from free)` + manyConflict + manyJobs +
	`i.id in (select job_id from fence union all select job_id from taken)` + manyAnswer + `,
       (select array_agg(job_id) from (select job_id from fence union all select job_id from taken) a)`

// insertMany sends the jobs at the places in part and fills in the results of those that were accepted. It
// returns the places of the others.
func (q *Queue) insertMany(ctx context.Context, db DB, all []encoded, results []Result, part []int, taking bool) ([]int, error) {
	type header struct {
		queue, kind, metadata string
		priority, maxAttempts int
		at                    time.Time
		delay                 time.Duration
		lifetime              int64
	}
	var (
		n            = len(part)
		refs         = make([]int32, 0, n)
		payloads     = make([]string, 0, n)
		scopes, keys []string
		bytes, marks [][]byte
		known        = make(map[header]int32)

		queues, kinds, metadata []string
		priorities, attempts    []int32
		ats, delays, lifetimes  []int64
		keyed, raw              bool
	)
	for _, i := range part {
		keyed = keyed || all[i].key != ""
		raw = raw || all[i].bytes != nil
	}
	for _, i := range part {
		e := &all[i]
		h := header{e.queue, e.kind, e.metadata, e.priority, e.maxAttempts, e.at, e.delay, e.lifetime}
		ref, ok := known[h]
		if !ok {
			ref = int32(len(known) + 1)
			known[h] = ref
			queues, kinds, metadata = append(queues, e.queue), append(kinds, e.kind), append(metadata, e.metadata)
			priorities, attempts = append(priorities, int32(e.priority)), append(attempts, int32(e.maxAttempts))
			var at int64
			if !e.at.IsZero() {
				at = e.at.UnixMicro()
			}
			ats, delays, lifetimes = append(ats, at), append(delays, e.delay.Microseconds()), append(lifetimes, e.lifetime)
		}
		refs, payloads = append(refs, ref), append(payloads, e.json)
		if raw {
			bytes = append(bytes, append([]byte{}, e.bytes...))
		}
		if keyed {
			scopes, keys = append(scopes, e.scope), append(keys, e.key)
			marks = append(marks, append([]byte{}, e.fingerprint...))
		}
	}
	statement := insertPlainMany
	if keyed {
		statement = insertKeyedMany
	}
	if taking {
		statement = insertTakingMany
	}
	var ids, accepted []int64
	var notified int64
	err := q.queryRow(ctx, db, statement, []any{
		refs, payloads, bytes, scopes, keys, marks,
		queues, kinds, priorities, attempts, ats, delays, lifetimes, metadata, q.channel(),
	}, &ids, &notified, &accepted)
	if err != nil {
		return nil, fmt.Errorf("onceq: enqueue: %w", err)
	}
	if len(ids) != n {
		return nil, fmt.Errorf("onceq: enqueue: %d jobs sent, %d came back", n, len(ids))
	}
	slices.Sort(accepted)
	var left []int
	for k, i := range part {
		if all[i].key != "" {
			if _, ok := slices.BinarySearch(accepted, ids[k]); !ok {
				left = append(left, i)
				continue
			}
		}
		results[i] = Result{ID: ids[k], State: all[i].state()}
		q.enqueued(ctx, &all[i], ids[k])
	}
	return left, nil
}

// settleTries bounds how often a key is tried that is neither free nor visible, each time in new statements.
const settleTries = 10

// settle answers for the jobs at the places in left, whose keys were taken a moment ago. It must run in new
// statements: the one that met the key may not see its row.
func (q *Queue) settle(ctx context.Context, db DB, jobs []Job, all []encoded, results []Result, left []int) error {
	const read = `
select u.n, coalesce(f.job_id, 0), f.state, f.fingerprint, f.result::text, ` + fenceFree + `,
       greatest(f.token >> 20, f.job_id), ` + jobState + `
  from unnest($1::text[], $2::text[]) with ordinality as u(scope, key, n)
 cross join lateral (
       select * from onceq.job_fences f where f.class = 0 and f.scope = u.scope and f.key = u.key offset 0) f
  left join lateral (
       select * from onceq.jobs j where j.id = f.job_id offset 0) j on true`
	holder := leaseFrom(ctx)
	var refused []error
	for try := 0; len(left) > 0; try++ {
		if try == settleTries {
			return fmt.Errorf("%w (key %q in scope %q)", ErrKeyUnsettled, all[left[0]].key, all[left[0]].scope)
		}
		scopes, keys := make([]string, len(left)), make([]string, len(left))
		for k, i := range left {
			scopes[k], keys[k] = all[i].scope, all[i].key
		}
		rows, err := db.Query(ctx, q.sql(read), scopes, keys)
		if err != nil {
			return fmt.Errorf("onceq: reading a taken key: %w", err)
		}
		answered := make([]bool, len(left))
		behind := int64(0) // the sequence has to pass this id
		for rows.Next() {
			var n, floor int64
			var state int16
			var mark []byte
			var output *string
			var free bool
			var live *int16
			var r Result
			if err := rows.Scan(&n, &r.ID, &state, &mark, &output, &free, &floor, &live); err != nil {
				rows.Close()
				return fmt.Errorf("onceq: reading a taken key: %w", err)
			}
			if free {
				behind = max(behind, floor)
				continue
			}
			k := n - 1
			i := left[k]
			e := &all[i]
			answered[k] = true
			r.Duplicate, r.State = true, fenceState(state).job(live)
			if output != nil {
				r.Output = json.RawMessage(*output)
			}
			results[i] = r
			event := Event{Type: EventDuplicate, Queue: e.queue, Kind: e.kind, JobID: r.ID, Scope: e.scope, Key: e.key}
			switch {
			case holder != nil && holder.q == q && holder.ID == r.ID:
				refused = append(refused, ErrOwnKey)
			case !sameFingerprint(mark, e.fingerprint):
				err := &MismatchError{Scope: e.scope, Key: e.key, Existing: r}
				event.Type, event.Err = EventMismatch, err
				refused = append(refused, err)
			case jobs[i].Strict:
				refused = append(refused, &DuplicateError{Scope: e.scope, Key: e.key, Existing: r})
			}
			q.emit(ctx, event)
		}
		rows.Close()
		if err := rows.Err(); err != nil {
			return fmt.Errorf("onceq: reading a taken key: %w", err)
		}
		var again []int
		for k, i := range left {
			if !answered[k] {
				again = append(again, i)
			}
		}
		if len(again) == 0 {
			break
		}
		if behind > 0 {
			// Normally no step at all: ids above the old one are what the sequence gives anyway.
			var id int64
			if err := q.queryRow(ctx, db, `select onceq.next_id('onceq.ids', $1::bigint)`, []any{behind}, &id); err != nil {
				return fmt.Errorf("onceq: drawing an id: %w", err)
			}
		}
		if left, err = q.insertMany(ctx, db, all, results, again, true); err != nil {
			return err
		}
	}
	if len(refused) == 1 {
		return refused[0]
	}
	return errors.Join(refused...)
}

func (e *encoded) state() State {
	if e.delay > 0 || !e.at.IsZero() && e.at.After(time.Now()) {
		return Delayed
	}
	return Waiting
}

func (q *Queue) enqueued(ctx context.Context, e *encoded, id int64) {
	if q.watched(EventEnqueued) {
		q.emit(ctx, Event{Type: EventEnqueued, Queue: e.queue, Kind: e.kind, JobID: id, Scope: e.scope, Key: e.key})
	}
}

// atomically runs fn in one transaction: the caller's, where db is one, else a new one.
func atomically(ctx context.Context, db DB, fn func(DB) error) error {
	var begin interface {
		Begin(context.Context) (pgx.Tx, error)
	}
	switch db := db.(type) {
	case *pgxpool.Pool:
		begin = db
	case *pgxpool.Conn:
		if db.Conn().PgConn().TxStatus() == 'I' {
			begin = db
		}
	case *pgx.Conn:
		if db.PgConn().TxStatus() == 'I' {
			begin = db
		}
	}
	if begin == nil {
		return fn(db)
	}
	tx, err := begin.Begin(ctx)
	if err != nil {
		return fmt.Errorf("onceq: begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if err := fn(tx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("onceq: commit: %w", err)
	}
	return nil
}
