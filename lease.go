package onceq

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/lazytx"
)

// DefaultLease is how long a lease lasts without an extension.
const DefaultLease = 30 * time.Second

// DefaultMaxLost is how many leases of one job may run out until the job is dead.
const DefaultMaxLost = 5

const maxMaxLost = math.MaxInt16 // the largest number that the column holds

// Lease is the right to work on a job until a time, under a token. A worker passes one to its handler; Queue.Claim returns
// leases to code that drives the loop itself. The fields are as they were at the moment of the claim; do not change them.
type Lease struct {
	ID          int64
	Token       int64 // fencing token: grows with each claim of this work; pass it to systems that compare it
	Kind        string
	Queue       string
	Scope, Key  string          // empty for a job without a key
	Payload     json.RawMessage // nil if the payload is bytes
	Bytes       []byte          // nil if the payload is JSON
	Metadata    map[string]string
	Priority    Priority
	Attempt     int // 1 for the first; counts failures, not lost leases
	MaxAttempts int
	Lost        int       // leases of this job that ran out before this one
	RunAt       time.Time // when the job was due
	CreatedAt   time.Time
	Until       time.Time // end of the lease as claimed, by the database's clock

	q        *Queue
	db       DB // for statements of the library's own, never the handler's transaction
	claims   int32
	holder   int64
	identity int64     // see effectMark
	keep     int64     // milliseconds in history; 0: not at all, -1: until somebody decides
	result   string    // encoded; "" for none
	began    time.Time // when it was claimed, in a worker when its handler was called, by this process's clock

	cancelled bool // somebody asked for that before this claim

	inTx      bool   // the handler runs in a transaction that the worker ends
	byHandler uint32 // atomic; 1: completed through Complete or CompleteInBatch, if that commits
	accepted  uint32 // atomic; 1: the statement of one of these ran and was not refused
	conflict  uint32 // atomic; 1: Postgres wants a transaction run again that contains Complete, CompleteInBatch or Lock

	beats   time.Duration // how long a worker extends the lease for; 0 outside a worker's handler
	timeout time.Duration // of the kind, in a worker; 0 for none

	calls   uint32             // atomic; how often the handler was called. For Once each call is a run of its own
	effects map[effectRun]bool // guarded by Queue.effects: true when done, false while under way
}

// leaseKey is how Enqueue recognises a handler's own keys, and how LeaseFromContext finds the lease.
type leaseKey struct{}

func leasesFrom(ctx context.Context) []*Lease {
	leases, _ := ctx.Value(leaseKey{}).([]*Lease)
	return leases
}

// LeaseFromContext returns the lease of the handler that ctx belongs to, or nil. It is nil for a batch of several jobs too.
func LeaseFromContext(ctx context.Context) *Lease {
	if leases := leasesFrom(ctx); len(leases) == 1 {
		return leases[0]
	}
	return nil
}

// ClaimOptions says what to claim.
type ClaimOptions struct {
	Queue   string        // default DefaultQueue
	Kinds   []string      // default all
	Limit   int           // default 1
	Lease   time.Duration // default DefaultLease
	MaxLost int           // default DefaultMaxLost; jobs that have lost this many leases become dead and are not returned
}

// Claim takes up to Limit jobs that are due and that nobody holds: highest priority first, then in the order in which they
// were due. A job whose lease has expired counts as held by nobody. A job that has lost a lease before is the only job of
// its claim, so that a job that kills its process does not take others with it. A job that somebody wants cancelled is
// cancelled and not returned. Claim runs on the pool, in a transaction of its own; an empty result means that nothing is
// due.
//
// The caller must Extend before the lease ends, and finish with Complete, Fail, Snooze or Release. A Worker does all this;
// Claim is for code that drives the loop itself.
func (q *Queue) Claim(ctx context.Context, opts ClaimOptions) ([]*Lease, error) {
	if opts.Queue == "" {
		opts.Queue = DefaultQueue
	}
	if err := checkName("ClaimOptions.Queue", opts.Queue, MaxNameBytes); err != nil {
		return nil, err
	}
	for _, kind := range opts.Kinds {
		if err := checkText("ClaimOptions.Kinds", kind); err != nil {
			return nil, err
		}
	}
	if opts.Limit == 0 {
		opts.Limit = 1
	}
	if opts.Limit < 0 || opts.Limit > 10_000 {
		return nil, invalid("ClaimOptions.Limit", "is %d; 1 to 10,000 is possible", opts.Limit)
	}
	if opts.Lease == 0 {
		opts.Lease = DefaultLease
	}
	if opts.Lease < time.Millisecond {
		return nil, invalid("ClaimOptions.Lease", "is %s; at least a millisecond", opts.Lease)
	}
	if opts.MaxLost == 0 {
		opts.MaxLost = DefaultMaxLost
	}
	if opts.MaxLost < 0 || opts.MaxLost > maxMaxLost {
		return nil, invalid("ClaimOptions.MaxLost", "is %d; 1 to %d is possible", opts.MaxLost, maxMaxLost)
	}
	if err := q.identify(ctx, q.pool); err != nil {
		return nil, err
	}
	c := claim{queue: opts.Queue, kinds: opts.Kinds, limit: opts.Limit, lease: opts.Lease, from: fromStart()}
	for {
		leases, err := q.claim(ctx, q.pool, &c, claimAny, c.args()...)
		if err != nil {
			return nil, err
		}
		alive := leases[:0]
		var ended []outcome
		for _, l := range leases {
			if dead := l.exhausted(opts.MaxLost); dead != nil {
				ended = append(ended, *dead)
			} else {
				alive = append(alive, l)
			}
		}
		if len(ended) == 0 {
			return alive, nil
		}
		if _, _, err := q.finish(ctx, q.pool, ended); err != nil {
			return nil, err
		}
		if len(alive) > 0 {
			return alive, nil
		}
	}
}

// exhausted gives the outcome of a job that must not be started again, or nil.
func (l *Lease) exhausted(maxLost int) *outcome {
	var why string
	switch {
	case l.cancelled:
		return &outcome{lease: l, state: StateCancelled, keep: CancelledKeep.Milliseconds()}
	case l.Lost >= maxLost:
		why = fmt.Sprintf("%d leases of this job ran out: its process crashed, hung or lost the database each time", l.Lost)
	case l.claims >= claimsLimit:
		why = fmt.Sprintf("claimed %d times, more than a token can count", l.claims)
	default:
		return nil
	}
	return &outcome{lease: l, state: StateDead, err: why, keep: -1}
}

// claim says what one claim asks for, and what its answer means for the next one.
type claim struct {
	queue string
	kinds []string
	limit int
	lease time.Duration
	from  []position // one for each priority, in the order in which these are searched

	now   time.Time // the database's clock just before the claim
	cut   bool      // stopped before a job that needs a claim of its own: there may be more
	began time.Time // this process's clock just before sending: the lease ends no earlier than began + lease
}

func (c *claim) args() []any {
	priorities := make([]int16, len(c.from))
	runAts := make([]time.Time, len(c.from))
	ids := make([]int64, len(c.from))
	for i, p := range c.from {
		priorities[i], runAts[i], ids[i] = int16(p.priority), p.runAt, p.id
	}
	return []any{c.queue, priorities, runAts, ids, c.kinds, c.limit}
}

// claimAny takes jobs that come after the given positions, priority by priority in the given order, up to the limit. Rows
// come back in that order; no row means that nothing is due there.
//
// Both CTEs that lock are materialized: otherwise Postgres may run the subquery again for each row of the update and claim
// more than the limit. Each priority is an equality and so a range of the index of its own. Joins are on id alone: if they
// were on the row's place (ctid), a job that somebody moved since the statement began would be locked and not updated, and
// a claim that returns less than it locked looks as if it had come to the end. A job that has lost a lease ("alone") is
// claimed only if it is the first; the jobs after it wait for the next claim. The last column but one says whether somebody
// wants the job cancelled: the request may have come while the job was just being given back.
const claimAny = `
with place as materialized (
  select * from unnest($4::smallint[], $5::timestamptz[], $6::bigint[]) with ordinality as p(priority, run_at, id, n)
),
c as materialized (
  select j.id, row_number() over () as n, j.alone
    from place p
   cross join lateral (
         select id, (lost > 0 or leased_until is not null) as alone
           from onceq.jobs
          where queue = $3::text and priority = p.priority
            and (run_at, id) > (p.run_at, p.id)
            and run_at <= statement_timestamp()
            and (leased_until is null or leased_until <= statement_timestamp())
            and ($7::text[] is null or kind = any ($7::text[]))
          order by run_at, id
          limit $8::bigint
            for update skip locked) j
   limit $8::bigint
),
first_alone as materialized (select min(n) as n from c where alone)` + claimThem + `,
       ahead = null
  from c, first_alone a
 where j.id = any (array[c.id]) and (a.n is null or c.n = 1 or c.n < a.n)` + claimed + `, a.n is not null`

// claimJobs is the same for jobs that have lost no lease. A worker claims many of those at a time, and the others one by
// one: see quarantine.go. A handler is free for the first $9 jobs; the others are claimed ahead.
const claimJobs = `
with place as materialized (
  select * from unnest($4::smallint[], $5::timestamptz[], $6::bigint[]) with ordinality as p(priority, run_at, id, n)
),
c as materialized (
  select j.id, row_number() over () as n
    from place p
   cross join lateral (
         select id
           from onceq.jobs
          where queue = $3::text and priority = p.priority
            and (run_at, id) > (p.run_at, p.id)
            and run_at <= statement_timestamp()
            and leased_until is null and lost = 0
            and kind = any ($7::text[])
          order by run_at, id
          limit $8::bigint
            for update skip locked) j
   limit $8::bigint
)
update onceq.jobs j
   set leased_until = statement_timestamp() + $1::bigint * interval '1 microsecond',
       holder = $2::bigint,
       claims = least(j.claims + 1, 1048575),
       lost   = least(j.lost + (j.leased_until is not null)::int, 32767),
       ahead = nullif(c.n > $9::bigint, false)
  from c
 where j.id = any (array[c.id])
returning j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, c.n, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at), false`

// claimOne takes the first of the given jobs that is free and has lost a lease.
const claimOne = `
with c as materialized (
  select j.id, u.n
    from unnest($3::bigint[]) with ordinality as u(id, n)
   cross join lateral (
         select id from onceq.jobs
          where id = u.id and run_at <= statement_timestamp()
            and (leased_until <= statement_timestamp() or leased_until is null and lost > 0)
            for update skip locked) j
   limit 1
)` + claimThem + `,
       ahead = null
  from c
 where j.id = any (array[c.id])` + claimed + `, false`

// What claimAny and claimOne have in common with claimJobs: how a job is taken, and which columns are returned.
const (
	claimThem = `
update onceq.jobs j
   set leased_until = statement_timestamp() + $1::bigint * interval '1 microsecond',
       holder = $2::bigint,
       claims = least(j.claims + 1, 1048575),
       lost   = least(j.lost + (j.leased_until is not null)::int, 32767)`
	claimed = `
returning j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, c.n, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at)`
)

// claim runs one of the statements above.
func (q *Queue) claim(ctx context.Context, db *pgxpool.Pool, c *claim, statement string, args ...any) ([]*Lease, error) {
	holder := rand.Int64()
	var leases []*Lease
	var order []int64
	c.cut = false
	by := hot
	by.clock = &c.now
	args = append([]any{c.lease.Microseconds(), holder}, args...)
	c.began = time.Now()
	err := q.send(ctx, db, by, statement, args, func(rows pgx.Rows) error {
		block := make([]Lease, 0, min(c.limit, 64))
		for rows.Next() {
			if len(block) == cap(block) {
				block = make([]Lease, 0, 64)
			}
			block = append(block, Lease{q: q, db: db, Queue: c.queue, holder: holder, began: c.began})
			l := &block[len(block)-1]
			var payload, metadata string
			var identity *int64
			var n int64
			var cancelled *bool
			if err := rows.Scan(&l.ID, &l.claims, &l.Lost, &l.Attempt, &l.MaxAttempts, &l.Priority, &l.RunAt, &l.CreatedAt, &l.Until,
				&l.Kind, &l.Scope, &l.Key, &payload, &l.Bytes, &metadata, &identity, &n, &cancelled, &c.cut); err != nil {
				return err
			}
			l.Token = l.ID<<tokenBits | int64(l.claims)
			l.Attempt++
			l.cancelled, l.identity = cancelled != nil, l.CreatedAt.UnixMicro()
			if identity != nil {
				l.identity = *identity
			}
			if payload != "" {
				l.Payload = json.RawMessage(payload)
			}
			if metadata != "" {
				if err := json.Unmarshal([]byte(metadata), &l.Metadata); err != nil {
					return fmt.Errorf("metadata of job %d: %w", l.ID, err)
				}
			}
			leases, order = append(leases, l), append(order, n)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("onceq: claim: %w", err)
	}
	if !slices.IsSorted(order) {
		place := make(map[int64]int64, len(order))
		for i, l := range leases {
			place[l.ID] = order[i]
		}
		slices.SortFunc(leases, func(a, b *Lease) int { return cmp.Compare(place[a.ID], place[b.ID]) })
	}
	if q.watched(EventClaimed) {
		for _, l := range leases {
			e := l.event(EventClaimed)
			e.Wait = max(0, c.now.Sub(l.RunAt))
			q.emit(ctx, e)
		}
	}
	return leases, nil
}

func (l *Lease) event(t EventType) Event {
	return Event{Type: t, Queue: l.Queue, Kind: l.Kind, JobID: l.ID, Scope: l.Scope, Key: l.Key, Token: l.Token, Attempt: l.Attempt}
}

func (l *Lease) lostError(op string) *LeaseError {
	return &LeaseError{Op: op, JobID: l.ID, Token: l.Token}
}

// Extend makes the lease last for at least d from now, by the database's clock. If the lease is lost, the error is a
// *LeaseError; if somebody wants the job cancelled, it is ErrCancelled. In a worker the leases of all handlers are extended
// automatically, and a lease that lasts longer is left alone. While a transaction on another connection has the job's row
// locked (usually a handler's own), there is nothing to extend and nobody else can claim the job: that is not an error.
func (l *Lease) Extend(ctx context.Context, d time.Duration) error {
	if d < time.Millisecond {
		return invalid("Extend", "by %s; at least a millisecond", d)
	}
	beats, err := l.q.beat(ctx, l.db, []*Lease{l}, []bool{true}, d)
	if err != nil {
		return err
	}
	switch {
	case beats[0].lost:
		e := l.event(EventLeaseLost)
		e.Err = l.lostError("extend")
		l.q.emit(ctx, e)
		return e.Err
	case beats[0].cancelled:
		return ErrCancelled
	}
	return nil
}

// Now returns the database's time, which decides when a job is due and which is stored. Handlers that compare times should
// use it instead of time.Now, which is this machine's.
func (l *Lease) Now(ctx context.Context) (now time.Time, err error) {
	err = l.q.queryRow(ctx, l.db, `select statement_timestamp()`, nil, &now)
	return now, err
}

// Lock keeps the job for db, a transaction of the handler's own, until that transaction ends: nobody else can claim the
// job, even if the lease expires, and no extension of the lease changes its row. If the lease is lost, the statement raises
// an error, so that nothing of the transaction is committed, and Lock returns a *LeaseError. Call Lock first in a
// transaction at repeatable read or serializable that ends with Complete and may take longer than a third of the lease.
//
// In a worker the server ends the transaction when it has been idle for longer than the kind's Timeout, so that a process
// that freezes does not keep the job. HandleTx and HandleBatch lock the job themselves; there Lock returns an error.
func (l *Lease) Lock(ctx context.Context, db DB) error {
	if l.inTx {
		return errInTx
	}
	if db == nil || opener(db) != nil {
		return invalid("Lock", "needs a transaction, in which the job stays locked")
	}
	err := l.q.send(ctx, db, asIs, lockJob, []any{lazytx.IdleLimit(l.timeout), l.ID, l.claims, l.holder}, noRows)
	switch {
	case err == nil:
		return nil
	case leaseLost(err):
		e := l.event(EventLeaseLost)
		e.Err = l.lostError("lock")
		l.q.emit(ctx, e)
		return e.Err
	}
	l.conflicted(ctx, err)
	return fmt.Errorf("onceq: lock: %w", l.q.told(err))
}

// conflicted is called with the error of a statement of this lease in the handler's own transaction. If Postgres wants that
// transaction run again, the cause is usually that a beat changed the job's row after the transaction's snapshot, and it
// would be the same the next time. So the lease is now made to last long enough, and the beats leave it alone meanwhile.
func (l *Lease) conflicted(ctx context.Context, err error) {
	if l.beats == 0 || !IsRetryable(err) {
		return
	}
	atomic.StoreUint32(&l.conflict, 1)
	l.q.log.WarnContext(ctx, "onceq: Postgres wants a handler's own transaction run again; where that is repeatable read or serializable and longer "+
		"than a third of the lease, call Lease.Lock(ctx, tx) first in it", slog.Int64("job", l.ID), slog.String("kind", l.Kind), slog.Any("error", err))
	l.lengthen(ctx)
}

// lengthenLease extends a lease and returns a row. It returns none if the lease is lost, or if a transaction has the job's
// row locked.
const lengthenLease = `
with free as materialized (
  select id from onceq.jobs
   where ` + heldByOne + `
     for no key update skip locked
)
update onceq.jobs j set leased_until = greatest(leased_until, statement_timestamp() + $4::bigint * interval '1 microsecond')
  from free where j.id = any (array[free.id])
returning true`

// lengthen makes the lease last so long that no beat extends it while the handler takes twice the time that it has taken
// until now. It reports whether the job still belongs to this lease and no transaction has its row locked.
func (l *Lease) lengthen(ctx context.Context) (held bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	d := l.beats + 2*time.Since(l.began)
	err := l.q.guarded(ctx, l.db, lengthenLease, []any{l.ID, l.claims, l.holder, d.Microseconds()}, &held)
	return err == nil && held
}

// beatAnswer is what became of one lease in a beat. Neither extended nor lost means that the row is locked, or that the
// lease already lasts longer. Locked means alive: nobody can claim a row that its holder's transaction has locked.
type beatAnswer struct {
	extended, lost, cancelled bool
}

// extendLeases extends many leases. It returns the places of those extended, of those whose guard holds, and of those whose
// jobs somebody wants cancelled. $5 says which of the leases have a handler that is running. It never waits for a lock:
// otherwise one handler's transaction could let the other leases run out.
const extendLeases = `
with u as materialized (
  select * from unnest($1::bigint[], $2::int[], $3::bigint[]) with ordinality as u(id, claims, holder, n)
),
free as materialized (
  select j.id, u.n
    from u cross join lateral (
         select id from onceq.jobs
          where id = u.id and claims = u.claims and holder = u.holder
            and leased_until < statement_timestamp() + $4::bigint * interval '1 microsecond'
            for no key update skip locked) j
),
extended as (
  update onceq.jobs j
     set leased_until = statement_timestamp() + $4::bigint * interval '1 microsecond',
         ahead = case when ($5::bool[])[free.n] then null else j.ahead end
    from free where j.id = any (array[free.id])
  returning free.n
)
select array(select n from extended),
       array(select u.n from u cross join lateral (
             select from onceq.jobs j
              where j.id = u.id and j.claims = u.claims and j.holder = u.holder offset 0) j),
       array(select u.n from u cross join lateral (
             select from onceq.job_cancels x where x.job_id = u.id
                and exists (select from onceq.jobs j where j.id = x.job_id and j.created_at <= x.requested_at) offset 0) x)`

// beat extends the leases, which the caller has sorted by id. running says which of their jobs are being worked on.
func (q *Queue) beat(ctx context.Context, db DB, leases []*Lease, running []bool, d time.Duration) ([]beatAnswer, error) {
	ids, claims, holders := guards(leases)
	var extended, held, cancelled []int64
	err := q.guarded(ctx, db, extendLeases, []any{ids, claims, holders, d.Microseconds(), running}, &extended, &held, &cancelled)
	if err != nil {
		return nil, fmt.Errorf("onceq: extend: %w", err)
	}
	answers := make([]beatAnswer, len(leases))
	for i := range answers {
		answers[i].lost = true
	}
	for _, n := range held {
		answers[n-1].lost = false
	}
	for _, n := range extended {
		answers[n-1].extended, answers[n-1].lost = true, false
	}
	for _, n := range cancelled {
		answers[n-1].cancelled = true
	}
	return answers, nil
}

// guards gives the columns that every statement on behalf of a lease compares.
func guards(leases []*Lease) (ids []int64, claims []int32, holders []int64) {
	ids, claims, holders = make([]int64, len(leases)), make([]int32, len(leases)), make([]int64, len(leases))
	for i, l := range leases {
		ids[i], claims[i], holders[i] = l.ID, l.claims, l.holder
	}
	return ids, claims, holders
}
