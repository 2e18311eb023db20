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
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// ClaimOptions says what to claim.
type ClaimOptions struct {
	Queue   string        // default DefaultQueue
	Kinds   []string      // default all, which an empty list means too
	Limit   int           // default 1
	Lease   time.Duration // default DefaultLease; a millisecond to a week
	MaxLost int           // default DefaultMaxLost; jobs that have lost this many leases become dead and are not returned
}

// Claim takes up to Limit jobs that are due and that nobody holds: highest priority first, then in the order in which they
// were due. A job whose lease has expired counts as held by nobody. A job that has lost a lease before is the only job of
// its claim, so that a job that kills its process does not take others with it. A job that somebody wants cancelled is
// cancelled and not returned. Of a queue or a kind that is paused (PauseQueue) nothing is returned. Claim runs on the pool,
// in a transaction of its own; an empty result means that nothing is due. It also lets jobs go on that wait for their lane, their
// limit or others: where it finds nothing, and once a second.
//
// The caller must Extend before the lease ends, and finish with Complete, Fail, Snooze or Release. A Worker does all this;
// Claim is for code that drives the loop itself.
func (q *Queue) Claim(ctx context.Context, opts ClaimOptions) ([]*Lease, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	if err := q.identify(ctx, q.store.Pool); err != nil {
		return nil, err
	}
	paused, err := q.pausedNow(ctx, q.store.Pool, pausesOld)
	if err != nil {
		return nil, err
	}
	statement, kinds := opts.open(paused)
	if statement == "" {
		return nil, nil
	}
	if err := q.promoteInTurn(ctx); err != nil {
		return nil, err
	}
	for looked := false; ; {
		c := claim{queue: opts.Queue, limit: opts.Limit, from: fromStart()}
		if err := q.claim(ctx, q.store.Pool, opts.Lease, 0, []*claim{&c}, statement, c.args(kinds)...); err != nil {
			return nil, err
		}
		if len(c.leases) == 0 && !looked {
			looked = true // nobody but this call may be there to let jobs into their lanes
			if n, err := q.promoteFor(ctx); err != nil {
				return nil, err
			} else if n > 0 {
				continue
			}
		}
		alive, ended, err := endExhausted(ctx, q, c.leases, opts.MaxLost)
		if err != nil || len(alive) > 0 || ended == 0 {
			return alive, err
		}
		looked = false // others may go on, now that these have ended
	}
}

// check refuses what cannot be, and sets defaults.
func (o *ClaimOptions) check() error {
	o.Queue, o.Limit = cmp.Or(o.Queue, DefaultQueue), cmp.Or(o.Limit, 1)
	o.Lease, o.MaxLost = cmp.Or(o.Lease, DefaultLease), cmp.Or(o.MaxLost, DefaultMaxLost)
	if err := checkName("ClaimOptions.Queue", o.Queue, MaxNameBytes); err != nil {
		return err
	}
	for _, kind := range o.Kinds {
		if err := checkText("ClaimOptions.Kinds", kind); err != nil {
			return err
		}
	}
	if o.Limit < 0 || o.Limit > 10_000 {
		return invalid("ClaimOptions.Limit", "is %d; 1 to 10,000 is possible", o.Limit)
	}
	if err := checkLease("ClaimOptions.Lease", o.Lease, time.Millisecond); err != nil {
		return err
	}
	if o.MaxLost < 0 || o.MaxLost > maxMaxLost {
		return invalid("ClaimOptions.MaxLost", "is %d; 1 to %d is possible", o.MaxLost, maxMaxLost)
	}
	return nil
}

// open chooses the statement of a claim and its kinds, by what is paused. It is "" if the queue is.
func (o *ClaimOptions) open(p *paused) (statement string, kinds []string) {
	switch {
	case p.queues[o.Queue]:
		return "", nil
	case len(p.kinds) > 0 && len(o.Kinds) == 0:
		return claimAnyBut, p.kinds
	case len(p.kinds) > 0:
		return claimAny, p.open(o.Queue, o.Kinds)
	case len(o.Kinds) == 0:
		return claimAny, nil // an empty list is no kind at all: what is left if all are paused
	}
	return claimAny, o.Kinds
}

// endExhausted ends those jobs of a claim that must not be started again, and returns the others and how many
// it has ended.
func endExhausted(ctx context.Context, q *Queue, leases []*Lease, most int) (alive []*Lease, ended int, err error) {
	alive = leases[:0]
	var dead []outcome
	for _, l := range leases {
		if o := l.exhausted(most); o != nil {
			dead = append(dead, *o)
		} else {
			alive = append(alive, l)
		}
	}
	if alive, err = q.onlyOnTime(ctx, alive); err != nil || len(dead) == 0 {
		return alive, 0, err
	}
	_, left, err := q.finish(ctx, q.store.Pool, pg.Hot, dead)
	switch {
	case err != nil && len(alive) == 0:
		return nil, 0, err
	case err != nil: // the others are the caller's
		q.log.WarnContext(ctx, "onceq: jobs that do not run again could not be ended, and their leases run out",
			slog.Int("jobs", len(left)), slog.Any("error", err))
	}
	return alive, len(dead), nil
}

// exhausted gives the outcome of a job that must not be started again, or nil.
func (l *Lease) exhausted(maxLost int) *outcome {
	var why string
	switch {
	case l.cancelled:
		return &outcome{lease: l, state: StateCancelled, keep: DefaultWindow.Milliseconds()}
	case l.Lost >= maxLost:
		why = table.Numbered(l.Lost, "lease", "leases") + " of this job ran out: each time the worker that had it died, froze or lost the database; look at what these processes logged last, and at their memory"
	case l.claims >= table.ClaimsLimit:
		why = fmt.Sprintf("claimed %d times, more than a token can count", l.claims)
	default:
		return nil
	}
	return &outcome{lease: l, state: StateDead, err: why, keep: -1}
}

// claim says what one claim asks of one queue, what it got, and what that means for the next one.
type claim struct {
	queue string
	limit int
	free  int64      // handlers; jobs beyond that are claimed ahead
	from  []position // one for each priority, in the order in which these are searched
	alone bool       // the statement claims from no other queue
	turn  *pg.Turn   // nil for none
	along *pg.Along  // goes with the claim, if nothing else does; nil for none

	leases    []*Lease
	now       time.Time // the database's clock just before the claim
	outOfTurn bool      // its turn did not come within turnPatience
	cut       bool      // stopped before a job that needs a claim of its own: there may be more
	began     time.Time // this process's clock just before sending: the lease ends no earlier than began + lease
}

func (c *claim) args(kinds []string) []any {
	priorities := make([]int16, len(c.from))
	runAts := make([]time.Time, len(c.from))
	ids := make([]int64, len(c.from))
	for i, p := range c.from {
		priorities[i], runAts[i], ids[i] = int16(p.priority), p.runAt, p.id
	}
	return []any{c.queue, priorities, runAts, ids, kinds, c.limit}
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
const claimAny = claimAnyOf + `($7::text[] is null or kind = any ($7::text[]))` + claimAnyRest

// claimAnyBut is claimAny for all kinds but those in $7.
const claimAnyBut = claimAnyOf + `kind <> all ($7::text[])` + claimAnyRest

const claimAnyOf = `
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
            and `

const claimAnyRest = `
          order by run_at, id
          limit $8::bigint
            for update skip locked) j
   limit $8::bigint
),
first_alone as materialized (select pg_catalog.min(n) as n from c where alone)` + claimThem + `,
       ahead = null
  from c, first_alone a
 where j.id = any (array[c.id]) and (a.n is null or c.n = 1 or c.n < a.n)` + claimed + `, a.n is not null, j.lane, j.lane_rule`

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
)` + claimAhead

// claimInTurn is claimJobs for a claim from a backlog that has its turn (internal/pg/turn.go). In the priority in which the latest claim
// with the same kinds ended, it begins there if this worker's own claims have not come that far: what is before that place has been
// seen to, or is left to whoever looks back next. A place with the id 0 stands for looking back, or for jobs that the rescan has
// brought forward, and stays. If such a claim ends before the latest place, there may be more of these jobs, and all workers go on
// where it ended, however far they have come, until they are back. A claim that ends in another priority leaves that as it is.
//
// The row is written anew after $11 microseconds, because an old snapshot keeps all of its versions, or if a claim has gone back.
// What was written long ago, or seems to come from the future because the database's clock was set back, does not count.
const claimInTurn = `
with row as materialized (
  select ctid as place, priority, run_at, id, coalesce(until_at, run_at) as until_at, coalesce(until_id, id) as until_id, until_at is not null as back,
         run_at <= statement_timestamp() and at <= statement_timestamp() and at > statement_timestamp() - interval '5 seconds' as counts,
         until_at is not null or run_at > statement_timestamp() or at > statement_timestamp() or at <= statement_timestamp() - $11::bigint::float8 * interval '1 microsecond' as old
    from onceq.turns
   where queue = $3::text and kinds = $10::bigint
     for update skip locked
),
place as materialized (
  select p.priority, coalesce(r.run_at, p.run_at) as run_at, coalesce(r.id, p.id) as id
    from unnest($4::smallint[], $5::timestamptz[], $6::bigint[]) with ordinality as p(priority, run_at, id, n)
    left join row r on r.counts and r.priority = p.priority and p.id <> 0 and (r.back or (r.run_at, r.id) > (p.run_at, p.id))
   order by p.n
),
c as materialized (
  select j.id, j.run_at, p.priority, row_number() over () as n
    from place p
   cross join lateral (
         select id, run_at
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
),
last as materialized (select priority, run_at, id from c order by n desc limit 1),
moved as (
  update onceq.turns t
     set priority = l.priority, run_at = l.run_at, id = l.id, at = statement_timestamp(),
         until_at = case when l.before then r.until_at end, until_id = case when l.before then r.until_id end
    from row r
   cross join lateral (
         select *, r.counts and priority = r.priority and (run_at, id) < (r.until_at, r.until_id) as before
           from last
         offset 0) l
   where t.ctid = r.place
     and (r.old or exists (select from place p where p.priority = r.priority and p.id = 0))
     and (r.old or l.before) and (l.priority = r.priority or not (r.back and r.counts))
),
began as (
  insert into onceq.turns (queue, kinds, priority, run_at, id, at)
  select $3::text, $10::bigint, priority, run_at, id, statement_timestamp() from last
   where not exists (select from row)
  on conflict do nothing
)` + claimAhead

// claimOne takes the first of the given jobs that is free and has lost a lease. Since the rescan a job may have been moved, or its
// id may have come again for another one. With coalesce the planner cannot use the index of queues.
const claimOne = `
with c as materialized (
  select j.id, u.n
    from pg_catalog.unnest($3::bigint[]) with ordinality as u(id, n)
   cross join lateral (
         select id from onceq.jobs
          where id = u.id and coalesce(queue, '') = $4::text and kind = any ($5::text[]) and run_at <= statement_timestamp()
            and (leased_until <= statement_timestamp() or leased_until is null and lost > 0)
            for update skip locked) j
   limit 1
)` + claimThem + `,
       ahead = null
  from c
 where j.id = any (array[c.id])` + claimed + `, false, j.lane, j.lane_rule`

// What these have in common: how a job is taken, and which columns are returned. With claimAhead a handler is free for the first
// $9 jobs.
const (
	claimAhead = claimThem + `,
       ahead = nullif(c.n > $9::bigint, false)
  from c
 where j.id = any (array[c.id])` + claimed + `, false, j.lane, j.lane_rule`
	claimThem = `
update onceq.jobs j
   set leased_until = statement_timestamp() + $1::bigint::float8 * interval '1 microsecond',
       holder = $2::bigint,
       claims = least(j.claims + 1, 1048575),
       lost   = least(j.lost + (j.leased_until is not null)::int, 32767)`
	claimed = `
returning ` + claimedJob + `, c.n, ` + cancelSince
	claimedJob = `j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, j.due_at`
	cancelSince = `(select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at)`
)

// claimManyJobs is claimJobs for several queues, whose limits, handlers that are free and places are in columns. What it
// returns as the row's number begins, from bit 32 on, with the place of its queue.
const claimManyJobs = `
with c as materialized (
  select j.id, (q.k - 1) * 4294967296 + j.n as n, j.n > q.free as ahead
    from unnest($3::text[], $4::bigint[], $5::bigint[], $6::smallint[], $7::timestamptz[], $8::bigint[],
                $9::smallint[], $10::timestamptz[], $11::bigint[], $12::smallint[], $13::timestamptz[], $14::bigint[])
         with ordinality as q(queue, room, free, first, first_at, first_id, second, second_at, second_id, third, third_at, third_id, k)
   cross join lateral (
         select j.id, row_number() over () as n
           from (values (q.first, q.first_at, q.first_id), (q.second, q.second_at, q.second_id), (q.third, q.third_at, q.third_id))
                as p(priority, run_at, id)
          cross join lateral (
                select id
                  from onceq.jobs
                 where queue = q.queue and priority = p.priority
                   and (run_at, id) > (p.run_at, p.id)
                   and run_at <= statement_timestamp()
                   and leased_until is null and lost = 0
                   and kind = any ($15::text[])
                 order by run_at, id
                 limit q.room
                   for update skip locked) j
          limit q.room) j
)` + claimThem + `,
       ahead = nullif(c.ahead, false)
  from c
 where j.id = any (array[c.id])` + claimed + `, false, j.lane, j.lane_rule`

// claimJobs claims jobs that have lost no lease, of one queue or several.
func (q *Queue) claimJobs(ctx context.Context, db DB, lease time.Duration, run int64, kinds []string, asks []*claim) error {
	if len(asks) == 1 {
		statement, args := claimJobs, append(asks[0].args(kinds), asks[0].free)
		if t := asks[0].turn; t != nil && t.Others {
			statement, args = claimInTurn, append(args, t.Kinds, turnWritten.Microseconds())
		}
		return q.claim(ctx, db, lease, run, asks, statement, args...)
	}
	var priorities [3][]int16
	var runAts [3][]time.Time
	var ids [3][]int64
	queues, limits, free := make([]string, len(asks)), make([]int64, len(asks)), make([]int64, len(asks))
	for i, c := range asks {
		queues[i], limits[i], free[i] = c.queue, int64(c.limit), c.free
		for n, p := range c.from {
			priorities[n], runAts[n], ids[n] = append(priorities[n], int16(p.priority)), append(runAts[n], p.runAt), append(ids[n], p.id)
		}
	}
	args := []any{queues, limits, free}
	for n := range ids {
		args = append(args, priorities[n], runAts[n], ids[n])
	}
	return q.claim(ctx, db, lease, run, asks, claimManyJobs, append(args, kinds)...)
}

// claim runs one of the statements above. run is the one that claims, and 0 for Queue.Claim.
func (q *Queue) claim(ctx context.Context, db DB, lease time.Duration, run int64, asks []*claim, statement string, args ...any) error {
	holder := newHolder(run)
	later := q.store.Pool // for what the leases' holders do without a transaction
	if k, ok := db.(pg.Quick); ok {
		later = k.Own.Outcomes
	}
	var leases []*Lease
	var order []int64
	var now time.Time
	limit := 0
	for _, c := range asks {
		limit += c.limit
	}
	by := pg.Hot
	by.Clock, by.Along = &now, cmp.Or(q.pauses.along(), asks[0].along)
	by.Turn = asks[0].turn // only a claim of one queue has one
	args = append([]any{lease.Microseconds(), holder}, args...)
	began := time.Now()
	err := q.store.Send(ctx, db, by, statement, args, func(rows pgx.Rows) error {
		if by.Turn != nil {
			began = began.Add(by.Turn.Waited)
		}
		block := make([]Lease, 0, min(limit, 64))
		for rows.Next() {
			if len(block) == cap(block) {
				block = make([]Lease, 0, 64)
			}
			block = append(block, Lease{hold: hold{q: q, db: later, holder: holder, term: lease}, handling: handling{began: began}})
			l := &block[len(block)-1]
			var n int64
			if err := l.read(rows, now, &n, &asks[0].cut); err != nil {
				return err
			}
			l.Queue = asks[n>>32].queue
			leases, order = append(leases, l), append(order, n)
		}
		return rows.Err()
	})
	if err != nil {
		return fmt.Errorf("onceq: claim: %w", err)
	}
	distribute(asks, leases, order)
	for _, c := range asks {
		c.now, c.began = now, began
	}
	if q.watched(EventClaimed.Level()) {
		for _, l := range leases {
			q.claimed(ctx, l, now)
		}
	}
	return nil
}

// distribute gives each ask its leases. order has the place of each lease: that of its ask in the upper half.
func distribute(asks []*claim, leases []*Lease, order []int64) {
	if !slices.IsSorted(order) {
		place := make(map[int64]int64, len(order))
		for i, l := range leases {
			place[l.ID] = order[i]
		}
		slices.SortFunc(leases, func(a, b *Lease) int { return cmp.Compare(place[a.ID], place[b.ID]) })
		slices.Sort(order)
	}
	for i := 0; i < len(leases); {
		k := order[i] >> 32
		first := i
		for i < len(leases) && order[i]>>32 == k {
			i++
		}
		asks[k].leases = leases[first:i:i]
	}
}

// dueAt is since when the job has been due, whatever held it.
func (l *Lease) dueAt() time.Time {
	if !l.due.IsZero() && l.due.Before(l.RunAt) {
		return l.due
	}
	return l.RunAt
}

// claimed reports a claim. now is the database's time.
func (q *Queue) claimed(ctx context.Context, l *Lease, now time.Time) {
	e := l.event(EventClaimed)
	due := l.dueAt()
	e.Wait = max(0, now.Sub(due))
	if e.Held = max(0, min(e.Wait, l.RunAt.Sub(due))); e.Held > 0 {
		switch {
		case l.Limit != "":
			e.HeldBy = "limit"
		case l.Lane != "":
			e.HeldBy = "lane"
		default:
			e.HeldBy = "after"
		}
	}
	q.emit(ctx, e)
}

// newHolder returns a random number for a claim. In a worker its upper half says which one has the job (workers.id), and the
// lower half differs from claim to claim.
func newHolder(run int64) int64 {
	if run == 0 {
		return rand.Int64()
	}
	return run&^math.MaxUint32 | int64(rand.Uint32())
}

// read reads a claimed job from a row, after the columns in before. n and cut are the columns that are the claim's, and now is
// the database's clock just before it.
func (l *Lease) read(rows pgx.Rows, now time.Time, n *int64, cut *bool, before ...any) error {
	var payload, metadata string
	var identity *int64
	var due *time.Time
	var cancelled *bool
	var lane *string
	var rule *int16
	if err := rows.Scan(append(before, &l.ID, &l.claims, &l.Lost, &l.Attempt, &l.MaxAttempts, &l.Priority, &l.RunAt, &l.CreatedAt, &l.Until,
		&l.Kind, &l.Scope, &l.Key, &payload, &l.Bytes, &metadata, &identity, &due, n, &cancelled, cut, &lane, &rule)...); err != nil {
		return err
	}
	l.Token = l.ID<<table.TokenBits | int64(l.claims)
	l.Attempt++
	l.due, l.waited = table.OrZero(due), -1
	if !now.IsZero() {
		l.waited = max(0, now.Sub(l.dueAt()))
	}
	l.Lane, l.member = table.OrZero(lane), table.OrZero(rule)&memberBit != 0
	if strings.Contains(l.Lane, table.LineSep) {
		var slotted bool
		if l.Lane, l.Limit, l.Weight, slotted = table.SplitPath(l.Lane); slotted {
			l.slot = l.began.Add(l.RunAt.Sub(now))
			l.q.far.saw(l.began)
		}
	}
	l.cancelled, l.identity = cancelled != nil, l.CreatedAt.UnixMicro()
	if identity != nil {
		l.identity = *identity
	}
	if payload != "" {
		l.Payload = json.RawMessage(payload)
	}
	if metadata != "" {
		l.Metadata = readMetadata(metadata)
	}
	return nil
}
