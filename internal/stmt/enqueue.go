package stmt

import "github.com/onceq/onceq/internal/table"

// DrawIDs draws so many ids, and says what time it is.
const DrawIDs = `
select statement_timestamp(), (select pg_catalog.array_agg(pg_catalog.nextval('onceq.ids')) from pg_catalog.generate_series(1, $1::int))`

// The statements below take jobs and return the ids of those that were accepted. Without keys no fence is
// touched. A notification is sent only when a worker with a confirmed listener has announced that it waits
// for the queue (package claimer): otherwise commits would queue up behind Postgres's one lock for notifications.
//
// A plain job and a job with a key have statements of their own, for the case that the job says nothing more
// and nobody waits, and so have many of them: each parameter and each expression more costs the server as
// much as a column of the row. All other jobs go through functions of the schema (enqueue_one, enqueue_jobs),
// whose comments say how.
//
// The statements for one job return the id, whether the job is delayed, and whether they woke a worker. Zero
// rows: the key is taken.

const InsertPlain = `
insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload)
values (pg_catalog.nextval('onceq.ids'), statement_timestamp(), statement_timestamp(), $4::smallint, $5::smallint, $1::text, $2::text, $3::text::jsonb)
returning id, false, 1`

const InsertKeyed = `
with fence as (
  insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint)
  select 0, $6::text, $7::text, 0, n.id, n.id << 20, statement_timestamp(), $8::bigint, $9::bytea
    from (select pg_catalog.nextval('onceq.ids') as id offset 0) n
  on conflict do nothing
  returning job_id
)
insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload, scope, key)
select job_id, statement_timestamp(), statement_timestamp(), $4::smallint, $5::smallint, $1::text, $2::text,
       $3::text::jsonb, $6::text, $7::text
  from (select coalesce((select job_id from fence),
                        onceq.take_fence('onceq.ids', $6::text, $7::text, $8::bigint, $9::bytea)) as job_id offset 0) taken
 where job_id is not null
returning id, false, 1`

// EnqueueOne takes any job, and calls enqueue_one. $6 and $7 are null without a key, and $16 to $18 without a
// lane and a limit.
var EnqueueOne = enqueueOneFrom("", "'onceq.ids'", "null")

func enqueueOneFrom(beside, ids, drawn string) string {
	return `
select f.id, f.delayed, f.who
  from ` + beside + `onceq.enqueue_one(` + ids + `, $1::text, $2::text, $3::text, $4::smallint, $5::smallint, $6::text, $7::text, $8::bigint, $9::bytea,
                         $10::bigint, $11::bigint, $12::text, $13::bytea, $14::bigint, $15::bool, $16::text, $17::smallint, $18::text, ` + drawn + `) f where f.id is not null`
}

// Many jobs are sent as arrays. What they have in common (kind, queue, …) is sent once, as a header to which
// each job refers. Ids that $6 does not give are drawn in the caller's order. Keys are taken in the order of
// their bytes, so that two callers with the same keys do not deadlock.
//
// The statements return all ids in the order in which they were drawn, whether each header is delayed, how
// many workers wait for them, and the ids of the accepted jobs that have a key (EnqueueJobs: of all accepted
// jobs, and the time of the call). The ids are not sorted: while somebody sets the sequence back, they do not
// grow, and sorted ones would name the wrong jobs.
//
// In most calls the jobs have all of this in common. The first two statements are for such calls: the columns
// of the one header are evaluated once instead of being joined to each job.

const InsertPlainMany = `
with input as materialized (
  select coalesce(nullif(u.drawn, 0), pg_catalog.nextval('onceq.ids')) as id, u.*
    from unnest($1::int[], $2::text[], $3::bytea[], $4::text[], $5::bytea[], $6::bigint[])
      as u(header, payload, bytes, key, fingerprint, drawn)
),
header as materialized (
  select h.*,
         greatest(statement_timestamp() + h.delay::float8 * interval '1 microsecond',
                  timestamptz 'epoch' + nullif(h.at, 0)::float8 * interval '1 microsecond') as due
    from unnest($7::text[], $8::text[], $9::text[], $10::text[], $11::int[], $12::int[], $13::bigint[], $14::bigint[], $15::bigint[])
         with ordinality
      as h(queue, kind, scope, metadata, priority, max_attempts, at, delay, lifetime, n)
),
job as (
  insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind,
                          payload, payload_bytes, metadata, scope, key)
  select i.id, (select due from header), statement_timestamp(), (select max_attempts from header), (select priority from header), (select queue from header), (select kind from header),
         nullif(i.payload, '')::jsonb, case when i.payload = '' then i.bytes end, nullif((select metadata from header), '')::jsonb,
         nullif((select scope from header), ''), nullif(i.key, '')
    from input i
   where true
)
select (select pg_catalog.array_agg(id) from input),
       (select pg_catalog.array_agg(due > statement_timestamp() order by n) from header),
       (select coalesce(pg_catalog.sum(onceq.wake(h.queue, h.jobs, $16::bigint, $17::bool)), 0)::bigint
          from (select queue, (select count(*) from input) as jobs from header where due < statement_timestamp() + interval '2 seconds') h
         where h.jobs > 0), null::bigint[]`

const InsertKeyedMany = `
with input as materialized (
  select coalesce(nullif(u.drawn, 0), pg_catalog.nextval('onceq.ids')) as id, u.*
    from unnest($1::int[], $2::text[], $3::bytea[], $4::text[], $5::bytea[], $6::bigint[])
      as u(header, payload, bytes, key, fingerprint, drawn)
),
header as materialized (
  select h.*,
         greatest(statement_timestamp() + h.delay::float8 * interval '1 microsecond',
                  timestamptz 'epoch' + nullif(h.at, 0)::float8 * interval '1 microsecond') as due
    from unnest($7::text[], $8::text[], $9::text[], $10::text[], $11::int[], $12::int[], $13::bigint[], $14::bigint[], $15::bigint[])
         with ordinality
      as h(queue, kind, scope, metadata, priority, max_attempts, at, delay, lifetime, n)
),
fence as (
  insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint)
  select 0, (select scope from header), i.key, 0, i.id, i.id << 20, statement_timestamp(), (select lifetime from header), i.fingerprint
    from input i
   where (select scope from header) <> ''
   order by i.key collate "C"
  on conflict do nothing
  returning job_id
),
job as (
  insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind,
                          payload, payload_bytes, metadata, scope, key)
  select i.id, (select due from header), statement_timestamp(), (select max_attempts from header), (select priority from header), (select queue from header), (select kind from header),
         nullif(i.payload, '')::jsonb, case when i.payload = '' then i.bytes end, nullif((select metadata from header), '')::jsonb,
         nullif((select scope from header), ''), nullif(i.key, '')
    from input i
   where (select scope from header) = '' or i.id in (select job_id from fence)
)
select (select pg_catalog.array_agg(id) from input),
       (select pg_catalog.array_agg(due > statement_timestamp() order by n) from header),
       (select coalesce(pg_catalog.sum(onceq.wake(h.queue, h.jobs, $16::bigint, $17::bool)), 0)::bigint
          from (select queue, (select count(*) from fence) as jobs from header where due < statement_timestamp() + interval '2 seconds') h
         where h.jobs > 0),
       (select pg_catalog.array_agg(job_id) from fence)`

// EnqueueJobs takes any jobs, and calls enqueue_jobs.
var EnqueueJobs = enqueueJobsFrom("'onceq.ids'")

func enqueueJobsFrom(ids string) string {
	return `
select f.ids, f.delayed, f.woken, f.accepted, f.at
  from onceq.enqueue_jobs(` + ids + `, $1::int[], $2::text[], $3::bytea[], $4::text[], $5::bytea[], $6::bigint[],
                          $7::text[], $8::text[], $9::text[], $10::text[], $11::int[], $12::int[], $13::bigint[], $14::bigint[], $15::bigint[],
                          $16::bigint, $17::bool, $18::text[], $19::smallint[], $20::text[], $21::smallint[], $22::timestamptz, $23::bool) f`
}

// ReadTaken reads the fences of keys that were taken a moment ago, with the states of their jobs.
const ReadTaken = `
select u.n, coalesce(f.job_id, 0), f.state, f.fingerprint, f.result::text, ` + table.FenceFree + `,
       greatest(f.token >> ` + table.TokenBitsSQL + `, f.job_id), ` + liveState + `
  from unnest($1::text[], $2::text[]) with ordinality as u(scope, key, n)
 cross join lateral (
       select * from onceq.job_fences f where f.class = ` + table.OfJob + ` and f.scope = u.scope and f.key = u.key offset 0) f
  left join lateral (
       select * from onceq.jobs j where j.id = f.job_id offset 0) j on true`
