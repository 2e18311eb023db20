package onceq

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

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
// cancelled and not returned. Of a queue or a kind that is paused (PauseQueue) nothing is returned. Claim runs on the pool, in a transaction of its own; an empty result means that nothing is
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
	paused, err := q.pausedNow(ctx, q.pool)
	if err != nil {
		return nil, err
	}
	c := claim{queue: opts.Queue, kinds: opts.Kinds, limit: opts.Limit, lease: opts.Lease, from: fromStart()}
	statement := claimAny
	switch {
	case paused.queues[opts.Queue]:
		return nil, nil
	case len(paused.kinds) > 0 && opts.Kinds == nil:
		statement, c.kinds = claimAnyBut, paused.kinds
	case len(paused.kinds) > 0:
		c.kinds = paused.open(opts.Queue, opts.Kinds)
	}
	for looked := false; ; {
		leases, err := q.claim(ctx, q.pool, &c, statement, c.args()...)
		if err != nil {
			return nil, err
		}
		if len(leases) == 0 && !looked {
			looked = true // nobody but this call may be there to let jobs into their lanes
			if n, err := q.promoteFor(ctx); err != nil {
				return nil, err
			} else if n > 0 {
				continue
			}
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
	by    int64      // the run that claims; 0 for Queue.Claim
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
 where j.id = any (array[c.id]) and (a.n is null or c.n = 1 or c.n < a.n)` + claimed + `, a.n is not null, coalesce(j.lane, '')`

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
          coalesce(j.metadata::text, ''), j.identity, c.n, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at), false, coalesce(j.lane, '')`

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
 where j.id = any (array[c.id])` + claimed + `, false, coalesce(j.lane, '')`

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
func (q *Queue) claim(ctx context.Context, db DB, c *claim, statement string, args ...any) ([]*Lease, error) {
	holder := rand.Int64()
	if c.by != 0 { // its upper half says which worker has the job (workers.id), and the lower half differs from claim to claim
		holder = c.by&^math.MaxUint32 | int64(rand.Uint32())
	}
	later := q.pool // for what the leases' holders do without a transaction
	if k, ok := db.(quick); ok {
		later = k.own.outcomes
	}
	var leases []*Lease
	var order []int64
	c.cut = false
	by := hot
	by.clock, by.along = &c.now, q.pauses.along()
	args = append([]any{c.lease.Microseconds(), holder}, args...)
	c.began = time.Now()
	err := q.send(ctx, db, by, statement, args, func(rows pgx.Rows) error {
		block := make([]Lease, 0, min(c.limit, 64))
		for rows.Next() {
			if len(block) == cap(block) {
				block = make([]Lease, 0, 64)
			}
			block = append(block, Lease{q: q, db: later, Queue: c.queue, holder: holder, began: c.began, term: c.lease})
			l := &block[len(block)-1]
			var payload, metadata string
			var identity *int64
			var n int64
			var cancelled *bool
			if err := rows.Scan(&l.ID, &l.claims, &l.Lost, &l.Attempt, &l.MaxAttempts, &l.Priority, &l.RunAt, &l.CreatedAt, &l.Until,
				&l.Kind, &l.Scope, &l.Key, &payload, &l.Bytes, &metadata, &identity, &n, &cancelled, &c.cut, &l.Lane); err != nil {
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
