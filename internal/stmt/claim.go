package stmt

// ClaimAny takes jobs that come after the given positions, priority by priority in the given order, up to the
// limit. Rows come back in that order; no row means that nothing is due there.
//
// Both CTEs that lock are materialized: otherwise Postgres may run the subquery again for each row of the
// update and claim more than the limit. Each priority is an equality and so a range of the index of its own.
// Joins are on id alone: if they were on the row's place (ctid), a job that somebody moved since the
// statement began would be locked and not updated, and a claim that returns less than it locked looks as if
// it had come to the end. A job that has lost a lease ("alone") is claimed only if it is the first; the jobs
// after it wait for the next claim. The last column but one says whether somebody wants the job cancelled:
// the request may have come while the job was just being given back.
const ClaimAny = claimAnyOf + `($7::text[] is null or kind = any ($7::text[]))` + claimAnyRest

// ClaimAnyBut is ClaimAny for all kinds but those in $7.
const ClaimAnyBut = claimAnyOf + `kind <> all ($7::text[])` + claimAnyRest

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

// ClaimJobs is the same for jobs that have lost no lease. A worker claims many of those at a time, and the
// others one by one: see package quarantine. A handler is free for the first $9 jobs; the others are claimed
// ahead.
const ClaimJobs = `
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

// ClaimInTurn is ClaimJobs for a claim from a backlog that has its turn (internal/pg/turn.go). In the
// priority in which the latest claim with the same kinds ended, it begins there if this worker's own claims
// have not come that far: what is before that place has been seen to, or is left to whoever looks back next.
// A place with the id 0 stands for looking back, or for jobs that the rescan has brought forward, and stays.
// If such a claim ends before the latest place, there may be more of these jobs, and all workers go on where
// it ended, however far they have come, until they are back. A claim that ends in another priority leaves
// that as it is.
//
// The row is written anew after $11 microseconds, because an old snapshot keeps all of its versions, or if a
// claim has gone back. What was written long ago, or seems to come from the future because the database's
// clock was set back, does not count.
const ClaimInTurn = `
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

// ClaimOne takes the first of the given jobs that is free and has lost a lease. Since the rescan a job may
// have been moved, or its id may have come again for another one. With coalesce the planner cannot use the
// index of queues.
const ClaimOne = `
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

// What these have in common: how a job is taken, and which columns are returned. With claimAhead a handler is
// free for the first $9 jobs.
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

// ClaimManyJobs is ClaimJobs for several queues, whose limits, handlers that are free and places are in
// columns. What it returns as the row's number begins, from bit 32 on, with the place of its queue.
const ClaimManyJobs = `
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
