package stmt

// waitsToo says of a row of waiters that its worker waits for all that this one does, and has room for as
// many jobs.
const waitsToo = ` and w.kinds = $10::bigint and w.room >= $4::bigint and w.idle_until > statement_timestamp() and (w.busy is null or w.busy operator(pg_catalog.<@) $5::text[])
                      and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round offset 0)`

// AnnounceRow writes the row of a worker that waits, or finds that it is dormant: it becomes so with $14 if
// $8 come before it, and stays so with $11 if so many others wait.
const AnnounceRow = `
with near as materialized (
  select (select count(*)
            from (select from onceq.waiters w
                   where w.serves = $2::bigint and w.worker <> $1::bigint` + waitsToo + `
                   limit $8::int) o) as others,
         (select count(*)
            from (select from onceq.waiters w
                   where w.serves = $2::bigint and w.worker % 1000003::bigint < $1::bigint % 1000003::bigint` + waitsToo + `
                   limit $8::int) o) as before
),
said as materialized (
  select others, before, case when $11::int > 0 then others >= $11::int when $14::bool then before >= $8::int else false end as dormant from near
),
woken as (
  delete from onceq.wakes where worker = $1::bigint and round < $3::bigint and (looks = 0 or queue <> all (coalesce($13::text[], '{}')))
),
gone as (
  delete from onceq.waiters using (select from said where dormant offset 0) s where worker = $1::bigint
),
row as (
  insert into onceq.waiters (worker, serves, round, room, kinds, looks, polls, busy, idle_until)
  select $1::bigint, $2::bigint, $3::bigint, $4::bigint, $10::bigint, $9::smallint, $12::bool, $5::text[], statement_timestamp() + $6::bigint::float8 * interval '1 microsecond'
    from said where not dormant and $11::int = 0
  on conflict (worker) do update set round = excluded.round, looks = excluded.looks, busy = excluded.busy, idle_until = excluded.idle_until
)
select exists (select from onceq.waiter_queues where queue = $7::text and serves = $2::bigint), others, before, dormant from said`

const NameQueues = `
with new as (
  insert into onceq.waiter_queues (queue, serves)
  select u.queue, $2::bigint from pg_catalog.unnest($1::text[]) as u(queue) order by u.queue collate "C"
  on conflict do nothing
)
select 1`
