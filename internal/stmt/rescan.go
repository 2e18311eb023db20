package stmt

import "github.com/onceq/onceq/internal/table"

// AddQueues makes queues known: to those who ask for all (Stats), and to those who take turns.
const AddQueues = `
insert into onceq.queues (queue, rescanned_at)
select u.queue, 'epoch' from onceq.meta, pg_catalog.unnest($1::text[]) as u(queue) order by u.queue collate "C"
on conflict do nothing`

// RescanTurn returns those of the given queues that this worker may rescan now, for some interval and these
// kinds: see rescan_turn.
const RescanTurn = `select q from onceq.rescan_turn($1::text[], $2::bigint, $3::text[]) r cross join pg_catalog.unnest(r) q`

// RescanLeft says for which kinds that this worker does not have there is something to do. Without it, a kind
// that few of many workers have would wait until the turn comes to one of these.
const RescanLeft = `
update onceq.queues set left_kinds = $2::text[] where queue = $1::text
   and coalesce(left_kinds operator(pg_catalog.<>) $2::text[], (left_kinds is null) <> ($2::text[] is null))`

// RescanFirst says in which of several queues there may be something for the rescan: among the first jobs of
// a priority before the position is one that nobody holds or whose lease has expired, or there are more than
// these. It returns the places of the queues from 1 on.
const RescanFirst = `
select q.n
  from unnest($1::text[], $2::timestamptz[], $3::bigint[], $4::timestamptz[], $5::bigint[], $6::timestamptz[], $7::bigint[])
       with ordinality as q(queue, high_at, high_id, normal_at, normal_id, low_at, low_id, n)
 where exists (
       select from (values (-1::smallint, q.high_at, q.high_id), (0::smallint, q.normal_at, q.normal_id), (1::smallint, q.low_at, q.low_id))
              as p(priority, run_at, id)
        cross join lateral (
              select count(*) as n, pg_catalog.bool_or(leased_until is null or leased_until <= statement_timestamp()) as found
                from (select leased_until
                        from onceq.jobs
                       where queue = q.queue and priority = p.priority and (run_at, id) < (p.run_at, p.id)
                       order by run_at, id
                       limit 100) j) first
        where first.found or first.n = 100)
 order by q.n`

// RescanPage looks at one page of a priority before a position ($5, $6), starting after ($3, $4). Jobs there
// that nobody holds, because they were committed long after they were due, are moved to the position, where
// this worker's next claim finds them, and other workers' where they begin. It returns the last place of the
// page (null for the last page), how many jobs were moved, the kinds that are not in $7 and those of them
// with jobs for the quarantine, and the jobs for this worker's quarantine, which have lost a lease or whose
// lease has expired, with how many they have lost.
const RescanPage = `
with page as materialized (
  select id, run_at, leased_until, lost, kind, row_number() over (order by run_at, id) as n
    from onceq.jobs
   where queue = $1::text and priority = $2::smallint
     and (run_at, id) > ($3::timestamptz, $4::bigint) and (run_at, id) < ($5::timestamptz, $6::bigint)
   order by run_at, id
   limit $8::int
),
ready as materialized (
  select j.id, case when j.slotted then least($5::timestamptz, ` + table.SlotMissed + `) else $5::timestamptz end as due
    from page p
   cross join lateral (
         select id, run_at, (` + table.HasSlot + `) is true as slotted
           from onceq.jobs
          where id = p.id and leased_until is null
            for no key update skip locked) j
   where p.leased_until is null and p.lost = 0 and p.kind = any ($7::text[])
     and (not j.slotted or j.run_at < least($5::timestamptz, ` + table.SlotMissed + `) - interval '1 second')
   order by j.id
),
forward as (
  update onceq.jobs j set run_at = ready.due
    from ready
   where j.id = any (array[ready.id])
  returning j.id
),
lost as materialized (
  select id, lost + (leased_until is not null)::int as lost
    from page
   where (leased_until <= statement_timestamp() or leased_until is null and lost > 0) and kind = any ($7::text[])
   order by n
)
select (select run_at from page where n = $8::int), coalesce((select id from page where n = $8::int), 0),
       (select count(*) from forward),
       array(select distinct kind from page where kind <> all ($7::text[])),
       array(select distinct kind from page
              where kind <> all ($7::text[]) and (leased_until <= statement_timestamp() or leased_until is null and lost > 0)),
       (select pg_catalog.array_agg(id) from lost), (select pg_catalog.array_agg(lost) from lost)`
