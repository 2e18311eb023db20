-- Every statement, as Postgres gets it. Written by: go test -run TestStatements . -update

-- audit.go: Actions.page
select id, at, who, what, coalesce(job_id, 0), about, why, outcome from onceq.actions
 where id < $1::bigint and ($3::bigint = 0 or job_id = $3::bigint) and ($4::text = '' or who = $4::text)
   and ($5::text = '' or what = $5::text) and at >= $6::timestamptz order by id desc limit $2::int;

-- audit.go: RecordAction.insert
insert into onceq.actions (who, what, job_id, about, why, outcome)
values ($1::text, $2::text, nullif($3::bigint, 0), $4::text, $5::text, $6::text)
returning id;

-- counts.go: readCounts
with t as materialized (
  select pg_catalog.date_bin($6::int::float8 * interval '1 minute',
           statement_timestamp() - $4::bigint::float8 * interval '1 microsecond', timestamptz '2000-01-01 00:00:00Z') as now
)
select t.now - $5::int::float8 * interval '1 minute', c.queue, case when $3::bool then c.kind else '' end,
       (($5::int + pg_catalog.floor(extract(epoch from c.minute - t.now) / 60::numeric)::int) / $6::int)::int,
       c.started, c.completed, c.failed, c.dead, c.took, c.due, c.oldest, c.durations, c.waits
  from t
 cross join lateral (
       select * from onceq.job_counts
        where span = $6::int and minute >= t.now - $5::int::float8 * interval '1 minute' and minute < t.now
          and ($1::text = '' or queue = $1::text) and ($2::text = '' or kind = $2::text)
          and not ($3::bool and kind = '')
       offset 0) c
 order by c.queue, 3;

-- effects.go: readDoubts
with page as materialized (
  select id, queue, created_at, identity from onceq.jobs where id = any ($1::bigint[])
  union all
  select id, queue, created_at, identity from onceq.job_waits where id = any ($1::bigint[])
  union all
  select id, queue, created_at, identity from onceq.job_history where id = any ($1::bigint[])
)
select f.scope, f.key, case f.state when 3 then 'completed' when 6 then 'held'
         when 1 then case when f.leased_until > statement_timestamp() then 'in_flight' else 'uncertain' end
         else 'uncertain' end, f.created_at, f.leased_until,
       case when not $2::boolean then f.result::text end, coalesce(f.detail, ''), f.fingerprint
  from page p
 cross join lateral (select * from onceq.job_fences f
         where f.class = 3 and f.scope = p.queue and f.key >= p.id::text collate "C" || '/' and f.key < p.id::text collate "C" || '0' and coalesce(f.fingerprint = pg_catalog.int8send(coalesce(p.identity, (extract(epoch from pg_catalog.timezone('UTC', p.created_at)) * 1e6)::bigint)), true) and (f.state = 6 or (f.state = 2 or f.state = 1 and f.leased_until <= statement_timestamp())) offset 0) f
 order by p.id desc, f.key;

-- effects.go: readEffects
with place as materialized (
  select queue, created_at, identity from onceq.jobs where id = $1::bigint
  union
  select queue, created_at, identity from onceq.job_waits where id = $1::bigint
  union
  select queue, created_at, identity from onceq.job_history where id = $1::bigint
),
found as (
  select f.* from place p cross join lateral (
         select * from onceq.job_fences f
          where f.class = 3 and f.scope = p.queue and f.key > $3::text and f.key < $4::text and coalesce(f.fingerprint = pg_catalog.int8send(coalesce(p.identity, (extract(epoch from pg_catalog.timezone('UTC', p.created_at)) * 1e6)::bigint)), true) offset 0) f
  union all
  select f.* from onceq.job_fences f
   where f.class = 3 and f.key > $3::text and f.key < $4::text and not exists (select from place)
)
select f.scope, f.key, case f.state when 3 then 'completed' when 6 then 'held'
         when 1 then case when f.leased_until > statement_timestamp() then 'in_flight' else 'uncertain' end
         else 'uncertain' end, f.created_at, f.leased_until,
       case when not $2::boolean then f.result::text end, coalesce(f.detail, ''), f.fingerprint
  from found f
 where f.state in (1, 2, 3, 6) and f.job_id = $1::bigint
 order by f.key limit nullif($5::int, 0);

-- explain.go: locked.read
select j.id, l.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(a.state, ''), a.xact_start,
       coalesce(a.state = 'active' and pg_catalog.strpos(a.query, 'onceq.') > 0, false)
  from (select id, xmax from onceq.jobs where id = any ($1::bigint[])
        union all
        select id, xmax from onceq.job_waits where id = any ($1::bigint[])) j
  join pg_locks l on l.locktype = 'transactionid' and l.transactionid = j.xmax and l.mode = 'ExclusiveLock' and l.granted
  left join pg_stat_activity a on a.pid = l.pid
 where l.pid is distinct from pg_backend_pid()
   and (a.xact_start <= statement_timestamp() - $2::bigint::float8 * interval '1 microsecond') is not false
 order by j.id limit 1;

-- explain.go: readCrowd
select (select count(*)
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select leased_until, holder, xmax from onceq.jobs
                where queue = $1::text and priority = p.priority and run_at <= statement_timestamp()
                order by run_at, id
                limit $7::int + 1) j
         where (j.leased_until > statement_timestamp() or j.leased_until <= statement_timestamp() and j.xmax = any ($8::text[]::xid[])) and j.holder >> 32 = any ($2::bigint[])),
       (select count(*)
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select from onceq.jobs j
                where queue = $1::text and priority = p.priority and run_at <= statement_timestamp()
                  and (p.priority < $3::smallint or (run_at, id) < ($4::timestamptz, $5::bigint))
                  and (leased_until is null or leased_until <= statement_timestamp() and not (j.leased_until <= statement_timestamp() and j.xmax = any ($8::text[]::xid[]))) and kind = any ($6::text[])
                order by run_at, id
                limit $7::int) j
         where p.priority <= $3::smallint);

-- explain.go: readLockers
select array(select transactionid from pg_locks where locktype = 'transactionid' and mode = 'ExclusiveLock' and granted)::text[];

-- failing.go: readFailing
with counted as materialized (
  select queue, kind, minute, completed, failed + dead as bad,
         pg_catalog.max(minute) filter (where completed > failed + dead) over (partition by queue, kind) as good
    from onceq.job_counts
   where span = 1 and minute >= statement_timestamp() - interval '1 hour'
),
failing as materialized (
  select queue, kind, pg_catalog.min(minute) filter (where bad > 0) as since, pg_catalog.max(minute) as latest, pg_catalog.sum(bad)::bigint as bad, pg_catalog.sum(completed)::bigint as completed
    from counted
   where good is null or minute > good
   group by queue, kind
  having pg_catalog.sum(bad) >= case when pg_catalog.sum(completed) = 0 then 3 else $1::int end
   order by pg_catalog.sum(bad) desc, queue, kind
   limit 20
)
select f.queue, f.kind, f.since, f.bad, f.completed, coalesce(e.text, ''), coalesce(e.n, 0), coalesce(e.looked, 0)
  from failing f
  left join lateral (
       select pg_catalog.min(text) as text, count(*) as n, pg_catalog.sum(count(*)) over ()::bigint as looked
         from (select pg_catalog.left(j.errors -> -1 ->> 'error'::text, 300) as text
                 from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                cross join lateral (
                      (select kind, errors from onceq.jobs
                        where queue = f.queue and priority = p.priority and run_at > statement_timestamp() order by run_at, id limit 300)
                      union all
                      (select kind, errors from onceq.jobs
                        where queue = f.queue and priority = p.priority and run_at <= statement_timestamp() order by run_at, id limit 300)) j
                where j.kind = f.kind
               union all
               select pg_catalog.left(h.errors -> -1 ->> 'error'::text, 300)
                 from (select kind, errors from onceq.job_history
                        where queue = f.queue and state = 6 order by id desc limit 300) h
                where h.kind = f.kind) e
        where text <> ''
        group by pg_catalog.regexp_replace(text, '[0-9]+', '#', 'g')
        order by 2 desc, 1
        limit 1) e on true
 where e.n > 0 or f.latest >= statement_timestamp() - interval '10 minutes'
 order by f.bad desc, f.queue, f.kind;

-- findings.go: calls.unanswered
select c.lane, extract(epoch from statement_timestamp() - c.due)::bigint
  from pg_catalog.generate_series(0, 15) s (slot)
 cross join lateral (
       select lane, due from onceq.lane_calls
        where slot = s.slot::smallint and due < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
        order by due limit 1) c
 order by c.due
 limit 1;

-- findings.go: readHangs
with recursive line (lane, k) as (
  (select lane, 1 from onceq.job_waits where lane > ' ' order by lane limit 1)
  union all
  select (select lane from onceq.job_waits where lane > l.lane order by lane limit 1), l.k + 1
    from line l where l.lane is not null and l.k < 500
), hang as materialized (
  select l.lane, h.id, h.since, h.worker
    from line l
   cross join lateral (
         select pg_catalog.sum(case when l.lane like '/%' then onceq.weight(path) else 1 end) as live, (pg_catalog.array_agg(id order by since) filter (where goes_on))[1] as id, pg_catalog.min(since) filter (where goes_on) as since,
                (pg_catalog.array_agg(worker order by since) filter (where goes_on))[1] as worker
           from (select j.id, j.lane as path, j.holder >> 32 as worker, j.leased_until > statement_timestamp() as goes_on,
                        case when (j.progress ->> 'claims'::text)::bigint = j.claims then (j.progress ->> 'since'::text)::timestamptz -- beats write it
                             else j.leased_until - coalesce((select lease from onceq.workers w where w.id >> 32 = j.holder >> 32 limit 1), 0)::float8 * interval '1 microsecond' end as since
                   from onceq.lane_places p
                  cross join lateral (select * from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f'))) offset 0) j
                  where p.lane = l.lane and j.leased_until is not null
                  limit 1000) j) h
   where l.lane is not null and h.since < statement_timestamp() - $2::bigint::float8 * interval '1 microsecond'
     and h.live >= least(1000, coalesce((select n from onceq.lane_limits where lane = l.lane),
                 (select n from onceq.lane_limits where lane = pg_catalog.left(l.lane, pg_catalog.strpos(pg_catalog.substr(l.lane, 2), '/') + 1)), 1))
   limit 20)
select h.lane, h.id, h.since, h.worker, w.waiting
  from hang h
 cross join lateral (select least(count(*) filter (where due), 1000) as waiting, least(count(*) filter (where not due), 1000) as delayed, pg_catalog.min(due_at) filter (where due) as oldest
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select coalesce(due_at, run_at) as due_at, run_at <= statement_timestamp() as due
                 from onceq.job_waits where lane = h.lane and priority = p.priority order by run_at, id limit 1000) w) w
 where w.oldest < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
 order by h.since, h.lane;

-- findings.go: readHead
select n.queue, j.kind, pg_catalog.min(j.id) filter (where j.lost > 1), pg_catalog.max(j.lost), count(*), pg_catalog.min(coalesce(j.due_at, j.run_at)),
       pg_catalog.bool_or(j.run_at < statement_timestamp() - $2::bigint::float8 * interval '1 microsecond' and (j.leased_until is null or j.leased_until <= statement_timestamp()))
  from pg_catalog.unnest($1::text[]) n (queue)
 cross join (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select id, kind, lost, run_at, due_at, leased_until from onceq.jobs
        where queue = n.queue and priority = p.priority and run_at <= statement_timestamp()
        order by run_at, id
        limit $3::int) j
 group by n.queue, j.kind
 order by n.queue, j.kind
 limit 1000;

-- findings.go: readInTransactions
select count(*)
  from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select leased_until, xmax from onceq.jobs
        where queue = $1::text and priority = p.priority and run_at <= statement_timestamp()
        order by run_at, id
        limit $2::int) j
 where j.leased_until <= statement_timestamp() and j.xmax = any (array(select transactionid from pg_locks where locktype = 'transactionid' and mode = 'ExclusiveLock' and granted));

-- findings.go: readSlow
with recursive line (lane, k) as (
  (select lane, 1 from onceq.job_waits where lane > '/' and lane < '0' order by lane limit 1)
  union all
  select (select lane from onceq.job_waits where lane > l.lane and lane < '0' order by lane limit 1), l.k + 1
    from line l where l.lane is not null and l.k < 500
),
took as materialized (
  select kind, pg_catalog.sum(took)::float8
         / nullif(pg_catalog.sum(completed + failed + dead), 0)::float8 / 1e6::float8 as took
    from onceq.job_counts where span = 1 and minute >= statement_timestamp() - interval '1 hour' group by kind
)
select l.lane, w.waiting, m.most, w.oldest, s.n, s.rate, s.per, s.burst, coalesce(c.took, 0)
  from (select greatest(1000, 100000 / greatest(1, count(*))) as most from line) m
 cross join line l
 cross join lateral (select least(count(*) filter (where due), m.most) as waiting, least(count(*) filter (where not due), m.most) as delayed, pg_catalog.min(due_at) filter (where due) as oldest
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select coalesce(due_at, run_at) as due_at, run_at <= statement_timestamp() as due
                 from onceq.job_waits where lane = l.lane and priority = p.priority order by run_at, id limit m.most) w) w
  left join lateral (select s.lane, s.n, s.rate, s.per, s.burst
                 from onceq.lane_limits s
                where s.lane = any (array[l.lane, pg_catalog.left(l.lane, pg_catalog.strpos(pg_catalog.substr(l.lane, 2), '/') + 1)]) and s.n is not null
                order by s.lane desc
                limit 1) s on true
  left join lateral (
       select j.kind
         from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
        cross join lateral (
              select kind from onceq.job_waits
               where lane = l.lane and priority = p.priority and run_at <= statement_timestamp()
               order by run_at, id limit 1) j
        order by p.priority limit 1) j on true
  left join took c on c.kind = any (array[j.kind])
 where l.lane is not null and s.n is distinct from 0 and w.oldest < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
 order by l.lane;

-- findings.go: reaper.left
select minute from onceq.job_counts
 where span = 1
   and minute < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond' - interval '1 hour'
 order by minute
 limit 1;

-- groups.go: readStuck
select w.id, (pg_catalog.array_agg(m.job_id order by m.job_id) filter (where m.state = 8 or m.state = 6 and w.if_dead = 0))[:5], count(*) filter (where m.state = 8 or m.state = 6 and w.if_dead = 0)
  from (select f.id, f.if_dead
          from (select id, if_dead from onceq.job_waits where lane > E'\x1f' and lane < ' ' order by lane limit 10000) f
         where not exists (select from (select from onceq.job_members where group_id = f.id and state = 0 order by job_id desc limit 1) m)
         order by f.id limit 100) w
 cross join lateral (
       select job_id, state from onceq.job_members where group_id = w.id order by job_id limit 10000) m
 group by w.id
having pg_catalog.bool_or(m.state = 8 or m.state = 6 and w.if_dead = 0)
 order by w.id
 limit 20;

-- health.go: indexes.indexes
select t.relname, c.relname, pg_catalog.pg_relation_size(c.oid)
  from pg_index i join pg_class c on c.oid = i.indexrelid join pg_class t on t.oid = i.indrelid
 where i.indrelid in ('onceq.jobs'::regclass, 'onceq.job_fences'::regclass, 'onceq.job_history'::regclass)
   and pg_catalog.pg_relation_size(c.oid) > $1::bigint
 order by c.relname;

-- health.go: keptBack.others
select 'prepared_transaction', gid, extract(epoch from statement_timestamp() - prepared)::bigint
  from pg_prepared_xacts
 where database = current_database() and prepared < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
union all
select 'replication_slot', slot_name::text, greatest(pg_catalog.age(xmin), pg_catalog.age(catalog_xmin))::bigint
  from pg_replication_slots
 where pg_catalog.age(xmin) > $2::bigint;

-- health.go: locks.locks
select coalesce(l.pid, 0), coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(a.state, ''), a.xact_start,
       pg_catalog.string_agg(distinct c.relname::text, ', '), pg_catalog.min(l.mode), pg_catalog.bool_and(l.granted),
       case when not pg_catalog.bool_and(l.granted) then pg_catalog.array_to_string(pg_catalog.pg_blocking_pids(l.pid), ', ') else '' end
  from pg_locks l
  join pg_class c on c.oid = l.relation
  left join pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'relation' and l.database = (select oid from pg_database where datname = current_database())
   and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
   and c.relkind in ('r', 'p') and c.relnamespace = (select relnamespace from pg_class where oid = 'onceq.jobs'::regclass::oid)
   and l.pid is distinct from pg_backend_pid()
   and (a.xact_start <= statement_timestamp() - $1::bigint::float8 * interval '1 microsecond') is not false
 group by l.pid, a.usename, a.application_name, a.state, a.xact_start
 order by pg_catalog.bool_and(l.granted) desc, a.xact_start, 1
 limit 5;

-- health.go: readStill
select s.lane, s.ids, -1
  from (select lane, (pg_catalog.array_agg(id order by id))[:5] as ids
          from (select s.lane, s.id
                  from (select lane, id from onceq.lane_stops order by lane, id limit 1000) s
                  join onceq.job_history h on h.id = s.id and pg_catalog.split_part(h.lane, E'\x1f', 1) = s.lane and h.state in (6, 8)) h
         group by lane) s
 where exists (select from onceq.job_waits w where w.lane = s.lane offset 0)
union all
select l.lane, '{}', l.n
  from onceq.lane_limits l
 where l.n = 0
   and (exists (select from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                 cross join lateral (
                       select from onceq.job_waits
                        where lane = l.lane and priority = p.priority and run_at < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
                        limit 1) w)
     or l.lane = pg_catalog.left(l.lane, pg_catalog.strpos(pg_catalog.substr(l.lane, 2), '/') + 1) and exists (
               select from (select lane, run_at from onceq.job_waits
                             where lane > l.lane and lane < pg_catalog.left(l.lane, -1) || '0' -- which comes after the slash
                             order by lane, priority, run_at, id
                             limit 1000) w
                where w.run_at < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
                  and not exists (select from onceq.lane_limits o where o.lane = w.lane and o.n is not null offset 0)))
 order by 1
 limit 20;

-- health.go: snapshots.snapshot
select pid, coalesce(usename, ''), coalesce(application_name, ''), coalesce(state, ''), coalesce(backend_type, ''),
       xact_start, extract(epoch from statement_timestamp() - xact_start)::bigint
  from pg_stat_activity a
 where coalesce(backend_xmin, backend_xid) is not null and xact_start < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
   and (datname = current_database() or backend_type = 'walsender') and pid <> pg_backend_pid()
   and not exists (select from pg_stat_progress_vacuum v where v.pid = a.pid) -- one vacuum keeps no other one from its work
 order by greatest(pg_catalog.age(backend_xmin), pg_catalog.age(backend_xid)) desc, xact_start
 limit 1;

-- health.go: tables.tables
select c.relname,
       -- Lost with a server that crashed, until it has been vacuumed or analyzed.
       case when coalesce(s.last_vacuum, s.last_autovacuum, s.last_analyze, s.last_autoanalyze) is null
            then greatest(s.n_live_tup, c.reltuples::bigint, 0) else s.n_live_tup end,
       coalesce(s.n_dead_tup, 0),
       pg_catalog.current_setting('autovacuum')::bool and pg_catalog.current_setting('track_counts')::bool
         and not exists (select from pg_catalog.pg_options_to_table(c.reloptions) where option_name = 'autovacuum_enabled' and not option_value::bool)
  from pg_class c
  left join pg_stat_all_tables s on s.relid = c.oid
 where c.oid in ('onceq.jobs'::regclass, 'onceq.job_fences'::regclass, 'onceq.job_history'::regclass)
 order by c.relname;

-- health.go: triggers.triggers
select c.relname::text, t.tgname::text
  from pg_trigger t join pg_class c on c.oid = t.tgrelid
 where not t.tgisinternal
   and t.tgrelid in ('onceq.jobs'::regclass, 'onceq.job_waits'::regclass, 'onceq.job_history'::regclass, 'onceq.job_fences'::regclass)
 order by 1, 2
 limit 5;

-- keys.go: readKeys
select f.class, f.scope, case f.state when 0 then 'queued' when 3 then 'completed' when 6 then 'held'
         when 4 then 'dead' when 5 then 'cancelled' when 2 then 'uncertain'
         else case when f.leased_until > statement_timestamp() then 'in_flight' else 'uncertain' end end,
       coalesce((f.state in (3, 4, 5) and f.lifetime >= 0
      and (f.lifetime = 0 and f.finished_at is not null
           or pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= statement_timestamp())
      or f.class = 0 and f.state = 5 and f.token = f.token >> 20 << 20), false), coalesce(f.job_id, 0), f.token, f.created_at, f.leased_until, f.finished_at, f.lifetime,
       case when not $4::boolean then f.result::text end, coalesce(f.detail, ''), coalesce(f.identity, (extract(epoch from f.created_at) * 1e6)::bigint), f.fingerprint
  from onceq.job_fences f
 where f.key = $2::text and f.class <> 3 and (f.class <> 4 or f.state = 3) and ($1::text = '' or f.scope = $1::text)
 order by f.key, f.scope, f.class
 limit $3::int;

-- lanes.go: readLane
select coalesce((select n from onceq.lane_limits where lane = $1::text),
                 (select n from onceq.lane_limits where lane = pg_catalog.left($1::text, pg_catalog.strpos(pg_catalog.substr($1::text, 2), '/') + 1)), 1),
       (select count(*) from (select from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = $1::text limit coalesce((select n from onceq.lane_limits where lane = $1::text),
                 (select n from onceq.lane_limits where lane = pg_catalog.left($1::text, pg_catalog.strpos(pg_catalog.substr($1::text, 2), '/') + 1)), 1)) l),
       array(select s.id from onceq.lane_stops s where s.lane = $1::text order by s.id limit 10),
       array(select w.id from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
          cross join lateral (
                select id from onceq.job_waits
                 where lane = $1::text and priority = p.priority and run_at <= statement_timestamp()
                 order by run_at, id
                 limit least($3::int, coalesce((select n from onceq.lane_limits where lane = $1::text),
                 (select n from onceq.lane_limits where lane = pg_catalog.left($1::text, pg_catalog.strpos(pg_catalog.substr($1::text, 2), '/') + 1)), 1))) w
          limit least($3::int, coalesce((select n from onceq.lane_limits where lane = $1::text),
                 (select n from onceq.lane_limits where lane = pg_catalog.left($1::text, pg_catalog.strpos(pg_catalog.substr($1::text, 2), '/') + 1)), 1))),
       (select count(*)
          from (select path from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                 cross join lateral (
                       select path from onceq.job_waits
                        where lane = $1::text and priority = p.priority
                          and run_at <= case when p.priority = $4::smallint then least($5::timestamptz, statement_timestamp()) else statement_timestamp() end
                          and (p.priority < $4::smallint or run_at < $5::timestamptz or id < $2::bigint)
                        order by run_at, id
                        limit $3::int) w
                 where p.priority <= $4::smallint
                 limit $3::int) w),
       a.ids, a.queues, a.kinds, coalesce(h.id, 0), h.leased_until, h.run_at, h.holder
  from (
       select pg_catalog.array_agg(id order by place) as ids, pg_catalog.array_agg(queue order by place) as queues, pg_catalog.array_agg(kind order by place) as kinds
         from (select j.id, p.id as place, case when j.leased_until > statement_timestamp() then '' else j.queue end as queue,
                      case when j.leased_until > statement_timestamp() then '' else j.kind end as kind
                 from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = $1::text order by p.id limit 10) f) a
  left join lateral (
       select j.id, j.run_at, j.leased_until, j.holder
         from (select j.id, j.run_at, j.holder, case when j.leased_until > statement_timestamp() then j.leased_until end as leased_until
                 from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = $1::text and true offset 0) j
        order by j.leased_until, j.run_at, j.id
        limit 1) h on true;

-- lanes.go: readLanes
with recursive names (lane, n) as (
  (select coalesce((select lane from onceq.job_waits where lane > greatest($1::text collate "C", $2::text collate "C", ' ') and lane < '/' order by lane limit 1),
                  (select lane from onceq.job_waits where lane > greatest(greatest($1::text collate "C", $2::text collate "C", ' '), '0') order by lane limit 1)), 1)
  union all
  select coalesce((select lane from onceq.job_waits where lane > l.lane and lane < '/' order by lane limit 1),
                  (select lane from onceq.job_waits where lane > greatest(l.lane, '0') order by lane limit 1)), l.n + 1
    from names l where pg_catalog.starts_with(l.lane, $2::text) and l.n < $3::int
)
select l.lane, (select coalesce((select n from onceq.lane_limits where lane = l.lane),
                                (select n from onceq.lane_limits where lane = pg_catalog.split_part(l.lane, '/', 1) || '/'), 1)),
       (select count(*) from (select from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = l.lane limit greatest($4::int, coalesce((select n from onceq.lane_limits where lane = l.lane),
                 (select n from onceq.lane_limits where lane = pg_catalog.left(l.lane, pg_catalog.strpos(pg_catalog.substr(l.lane, 2), '/') + 1)), 1))) j),
       array(select j.id from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = l.lane order by p.id limit 10),
       w.waiting, w.delayed,
       coalesce(extract(epoch from statement_timestamp() - w.oldest) * 1e6, 0)::bigint,
       array(select s.id from onceq.lane_stops s where s.lane = l.lane order by s.id limit 10)
  from names l
 cross join lateral (select least(count(*) filter (where due), $4::int) as waiting, least(count(*) filter (where not due), $4::int) as delayed, pg_catalog.min(due_at) filter (where due) as oldest
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select coalesce(due_at, run_at) as due_at, run_at <= statement_timestamp() as due
                 from onceq.job_waits where lane = l.lane and priority = p.priority order by run_at, id limit $4::int) w) w
 where pg_catalog.starts_with(l.lane, $2::text)
 order by l.n;

-- limits.go: readLimitOf
with x (lane) as (select $1::text collate "C"),
l as (select x.lane,
       s.n, s.rate, s.per, s.burst, coalesce(s.lane = x.lane, false), z.paused_at, z.until, z.note,
       e.live, e.weight,
       array(select j.id from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = x.lane order by p.id limit 10),
       w.waiting, w.delayed, coalesce(extract(epoch from statement_timestamp() - w.oldest) * 1e6, 0)::bigint,
       statement_timestamp() + greatest(0, coalesce(extract(epoch from c.free_at - statement_timestamp())::float8 * 1e6::float8 * s.gap / c.gap, 0)
         + least(0, coalesce(f.weight, 1)::float8 - s.most + least(s.most - 1::float8, 100000::float8 / s.gap)) * s.gap)
         * interval '1 microsecond',
       m.missed, m.weight, coalesce(f.weight, 0)
  from x
  left join lateral (select s.lane, s.n, s.rate, s.per, s.burst,
       s.per::float8 / s.rate::float8 as gap, coalesce(s.burst, 1)::float8 as most
                 from onceq.lane_limits s
                where s.lane = any (array[x.lane, pg_catalog.left(x.lane, pg_catalog.strpos(pg_catalog.substr(x.lane, 2), '/') + 1)]) and s.n is not null
                order by s.lane desc
                limit 1) s on true
  left join lateral (select * from onceq.limit_rates where lane = x.lane offset 0) c on true
  left join lateral (
       select paused_at, until, note from onceq.pauses
        where what = 'limit' and name = pg_catalog.substr(x.lane, 2) and (until is null or until > statement_timestamp()) offset 0) z on true
 cross join lateral (
       select count(*) as live, coalesce(pg_catalog.sum(onceq.weight(j.path)), 0)::bigint as weight
         from (select j.path from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = x.lane limit greatest($3::int, s.n)) j) e
 cross join lateral (
       select count(*) as missed, coalesce(pg_catalog.sum(onceq.weight(u.lane)), 0)::bigint as weight
         from (select j.lane from onceq.lane_places p
                cross join lateral (select leased_until, run_at, lane from onceq.jobs where id = p.id offset 0) j
                where p.lane = x.lane and j.leased_until is null and j.run_at <= statement_timestamp() - 100000::float8 * interval '1 microsecond' and s.gap is not null
                limit $3::int) u) m
  left join lateral (
       select onceq.weight(w.path) as weight
         from (select id from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
          cross join lateral (
                select id from onceq.job_waits
                 where lane = x.lane and priority = p.priority and run_at <= statement_timestamp()
                 order by run_at, id
                 limit 1) w
          limit 1) d
        cross join lateral (select path from onceq.job_waits where id = d.id offset 0) w) f on true
 cross join lateral (select least(count(*) filter (where due), $3::int) as waiting, least(count(*) filter (where not due), $3::int) as delayed, pg_catalog.min(due_at) filter (where due) as oldest
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select coalesce(due_at, run_at) as due_at, run_at <= statement_timestamp() as due
                 from onceq.job_waits where lane = x.lane and priority = p.priority order by run_at, id limit $3::int) w) w)
select l.*,
       (select count(*)
          from (select path from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                 cross join lateral (
                       select path from onceq.job_waits
                        where lane = $1::text and priority = p.priority
                          and run_at <= case when p.priority = $4::smallint then least($5::timestamptz, statement_timestamp()) else statement_timestamp() end
                          and (p.priority < $4::smallint or run_at < $5::timestamptz or id < $2::bigint)
                        order by run_at, id
                        limit $3::int) w
                 where p.priority <= $4::smallint
                 limit $3::int) w),
       (select coalesce(pg_catalog.sum(onceq.weight(w.path)), 0)::bigint
          from (select path from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                 cross join lateral (
                       select path from onceq.job_waits
                        where lane = $1::text and priority = p.priority
                          and run_at <= case when p.priority = $4::smallint then least($5::timestamptz, statement_timestamp()) else statement_timestamp() end
                          and (p.priority < $4::smallint or run_at < $5::timestamptz or id < $2::bigint)
                        order by run_at, id
                        limit $3::int) w
                 where p.priority <= $4::smallint
                 limit $3::int) w),
       a.ids, a.queues, a.kinds, coalesce(h.id, 0), h.leased_until, h.run_at, h.holder
  from l cross join lateral (
       select pg_catalog.array_agg(id order by place) as ids, pg_catalog.array_agg(queue order by place) as queues, pg_catalog.array_agg(kind order by place) as kinds
         from (select j.id, p.id as place, case when j.leased_until > statement_timestamp() then '' else j.queue end as queue,
                      case when j.leased_until > statement_timestamp() then '' else j.kind end as kind
                 from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = $1::text order by p.id limit 10) f) a
  left join lateral (
       select j.id, j.run_at, j.leased_until, j.holder
         from (select j.id, j.run_at, j.holder, case when j.leased_until > statement_timestamp() then j.leased_until end as leased_until
                 from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = $1::text and l.n is distinct from 2147483647 offset 0) j
        order by j.leased_until, j.run_at, j.id
        limit 1) h on true;

-- limits.go: readLimits
with recursive x (lane, k) as (
  select least((select lane from onceq.job_waits where lane > ('/' || $1::text) collate "C" and lane < '0' order by lane limit 1),
              (select lane from onceq.lane_limits where lane > ('/' || $1::text) collate "C" and lane < '0' and n is not null order by lane limit 1)), 1
  union all
  select least((select lane from onceq.job_waits where lane > x.lane and lane < '0' order by lane limit 1),
              (select lane from onceq.lane_limits where lane > x.lane and lane < '0' and n is not null order by lane limit 1)), x.k + 1 from x where x.lane is not null and x.k < $2::int
)
select x.lane,
       s.n, s.rate, s.per, s.burst, coalesce(s.lane = x.lane, false), z.paused_at, z.until, z.note,
       e.live, e.weight,
       array(select j.id from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = x.lane order by p.id limit 10),
       w.waiting, w.delayed, coalesce(extract(epoch from statement_timestamp() - w.oldest) * 1e6, 0)::bigint,
       statement_timestamp() + greatest(0, coalesce(extract(epoch from c.free_at - statement_timestamp())::float8 * 1e6::float8 * s.gap / c.gap, 0)
         + least(0, coalesce(f.weight, 1)::float8 - s.most + least(s.most - 1::float8, 100000::float8 / s.gap)) * s.gap)
         * interval '1 microsecond',
       m.missed, m.weight, coalesce(f.weight, 0)
  from x
  left join lateral (select s.lane, s.n, s.rate, s.per, s.burst,
       s.per::float8 / s.rate::float8 as gap, coalesce(s.burst, 1)::float8 as most
                 from onceq.lane_limits s
                where s.lane = any (array[x.lane, pg_catalog.left(x.lane, pg_catalog.strpos(pg_catalog.substr(x.lane, 2), '/') + 1)]) and s.n is not null
                order by s.lane desc
                limit 1) s on true
  left join lateral (select * from onceq.limit_rates where lane = x.lane offset 0) c on true
  left join lateral (
       select paused_at, until, note from onceq.pauses
        where what = 'limit' and name = pg_catalog.substr(x.lane, 2) and (until is null or until > statement_timestamp()) offset 0) z on true
 cross join lateral (
       select count(*) as live, coalesce(pg_catalog.sum(onceq.weight(j.path)), 0)::bigint as weight
         from (select j.path from onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f')))
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f')
               offset 0) j
         where p.lane = x.lane limit greatest($3::int, s.n)) j) e
 cross join lateral (
       select count(*) as missed, coalesce(pg_catalog.sum(onceq.weight(u.lane)), 0)::bigint as weight
         from (select j.lane from onceq.lane_places p
                cross join lateral (select leased_until, run_at, lane from onceq.jobs where id = p.id offset 0) j
                where p.lane = x.lane and j.leased_until is null and j.run_at <= statement_timestamp() - 100000::float8 * interval '1 microsecond' and s.gap is not null
                limit $3::int) u) m
  left join lateral (
       select onceq.weight(w.path) as weight
         from (select id from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
          cross join lateral (
                select id from onceq.job_waits
                 where lane = x.lane and priority = p.priority and run_at <= statement_timestamp()
                 order by run_at, id
                 limit 1) w
          limit 1) d
        cross join lateral (select path from onceq.job_waits where id = d.id offset 0) w) f on true
 cross join lateral (select least(count(*) filter (where due), $3::int) as waiting, least(count(*) filter (where not due), $3::int) as delayed, pg_catalog.min(due_at) filter (where due) as oldest
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select coalesce(due_at, run_at) as due_at, run_at <= statement_timestamp() as due
                 from onceq.job_waits where lane = x.lane and priority = p.priority order by run_at, id limit $3::int) w) w
 where x.lane is not null
 order by x.k;

-- list.go: Count
select count(*) from (…) page;

-- list.go: bound
with recursive past (queue) as (select $4::text collate "C"),
given as (select $1::bigint, $2::int, $3::smallint[], $4::text, $5::int),
few as materialized (select (select count(*) < $5::int from (select from onceq.jobs where queue = $4::text limit $5::int) q) as few)
select greatest(0,
       case when not few.few then (select id from onceq.jobs where id < $1::bigint order by id desc offset $5::int - 1 limit 1) end,
       (select id from onceq.job_waits where id < $1::bigint order by id desc offset $5::int - 1 limit 1),
       
       (select pg_catalog.max(i.id)
          from past p cross join pg_catalog.unnest($3::smallint[]) s (state)
         cross join lateral (
               select h.id from onceq.job_history h
                where h.queue = any (array[p.queue]) and (h.state, h.id) < (s.state, $1::bigint) and h.state >= s.state
                order by h.queue desc, h.state desc, h.id desc offset greatest(5000 / ((select count(*) from past) * pg_catalog.cardinality($3::smallint[])), 100) - 1 limit 1) i
         where p.queue is not null)), few.few
  from few;

-- list.go: ofGroup
with
given as (select $1::bigint, $2::int, $3::smallint[], $4::text, $5::text, $6::text, $7::smallint[], $8::bigint[],
                 $9::timestamptz, $10::timestamptz, $11::bigint, $12::bool)
select a.*
  from onceq.job_members m
 cross join lateral (
          select j.id, j.kind, j.queue, j.scope, j.key, case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint as state,
       case when $12::bool then j.payload::text end, case when $12::bool then j.payload_bytes end, case when $12::bool then j.metadata::text end, null::text,
       j.priority, j.attempts, j.max_attempts, j.lost, j.claims, j.run_at, j.created_at,
       j.leased_until, null::timestamptz, null::timestamptz,
       j.errors::text, j.progress::text, j.lane, null::text, coalesce(j.due_at, j.run_at) from onceq.jobs j
           where pg_catalog.cardinality($7::smallint[]) > 0 and j.id = any (array[m.job_id]) and j.queue = $4::text
             and case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint = any ($7::smallint[])
          union all
          select w.id, w.kind, w.queue, w.scope, w.key, case when w.attempts > 0 or w.lost > 0 then 4 when w.run_at > statement_timestamp() then 2 else 1 end::smallint as state,
       case when $12::bool then w.payload::text end, case when $12::bool then w.payload_bytes end, case when $12::bool then w.metadata::text end, null::text,
       w.priority, w.attempts, w.max_attempts, w.lost, w.claims, w.run_at, w.created_at,
       null::timestamptz, null::timestamptz, null::timestamptz,
       w.errors::text, null::text, coalesce(w.path, w.lane), w.lane, coalesce(w.due_at, w.run_at) from onceq.job_waits w
           where pg_catalog.cardinality($7::smallint[]) > 0 and w.id = any (array[m.job_id]) and w.queue = $4::text
             and case when w.attempts > 0 or w.lost > 0 then 4 when w.run_at > statement_timestamp() then 2 else 1 end::smallint = any ($7::smallint[])
          union all
          select h.id, h.kind, h.queue, h.scope, h.key, h.state,
       case when $12::bool then h.payload::text end, case when $12::bool then h.payload_bytes end, case when $12::bool then h.metadata::text end, case when $12::bool then h.result::text end,
       h.priority, h.attempts, h.max_attempts, h.lost, h.claims, h.run_at, h.created_at,
       null::timestamptz, h.finished_at, h.keep_until,
       h.errors::text, null::text, h.lane, null::text, h.run_at from onceq.job_history h
           where pg_catalog.cardinality($3::smallint[]) > 0 and h.id = any (array[m.job_id]) and h.queue = $4::text
             and h.state = any ($3::smallint[])
          offset 0) a
 where m.group_id = $11::bigint and m.job_id < $1::bigint
 order by m.job_id desc
 limit $2::int;

-- list.go: readMember
select i.id
  from pg_catalog.unnest($1::bigint[]) i (id)
 cross join lateral (
       select payload, metadata from onceq.jobs where id = i.id
        union all
       select payload, metadata from onceq.job_waits where id = i.id
        union all
       select payload, metadata from onceq.job_history where id = i.id) j
 where case when $3::boolean then j.metadata else j.payload end @> any ($2::text[]::jsonb[]);

-- list.go: statement
with recursive past (queue) as (select $4::text collate "C"),
given as (select $1::bigint, $2::int, $3::smallint[], $4::text, $5::text, $6::text, $7::smallint[], $8::bigint[],
                 $9::timestamptz, $10::timestamptz, $11::bigint, $12::bool),
live as (
  select j.id, j.kind, j.queue, j.scope, j.key, case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint as state,
       case when $12::bool then j.payload::text end, case when $12::bool then j.payload_bytes end, case when $12::bool then j.metadata::text end, null::text,
       j.priority, j.attempts, j.max_attempts, j.lost, j.claims, j.run_at, j.created_at,
       j.leased_until, null::timestamptz, null::timestamptz,
       j.errors::text, j.progress::text, j.lane, null::text, coalesce(j.due_at, j.run_at) from onceq.jobs j
   where pg_catalog.cardinality($7::smallint[]) > 0 and j.id < $1::bigint and j.kind = $5::text and j.scope = $6::text and j.id = any ($8::bigint[]) and j.created_at >= $9::timestamptz and j.created_at < $10::timestamptz and j.queue = $4::text
   order by j.id desc limit $2::int
),
waiting as (
  select w.id, w.kind, w.queue, w.scope, w.key, case when w.attempts > 0 or w.lost > 0 then 4 when w.run_at > statement_timestamp() then 2 else 1 end::smallint as state,
       case when $12::bool then w.payload::text end, case when $12::bool then w.payload_bytes end, case when $12::bool then w.metadata::text end, null::text,
       w.priority, w.attempts, w.max_attempts, w.lost, w.claims, w.run_at, w.created_at,
       null::timestamptz, null::timestamptz, null::timestamptz,
       w.errors::text, null::text, coalesce(w.path, w.lane), w.lane, coalesce(w.due_at, w.run_at) from onceq.job_waits w
   where pg_catalog.cardinality($7::smallint[]) > 0 and w.id < $1::bigint and w.kind = $5::text and w.scope = $6::text and w.id = any ($8::bigint[]) and w.created_at >= $9::timestamptz and w.created_at < $10::timestamptz and w.queue = $4::text
   order by w.id desc limit $2::int
),
finished as (
  select h.id, h.kind, h.queue, h.scope, h.key, h.state,
       case when $12::bool then h.payload::text end, case when $12::bool then h.payload_bytes end, case when $12::bool then h.metadata::text end, case when $12::bool then h.result::text end,
       h.priority, h.attempts, h.max_attempts, h.lost, h.claims, h.run_at, h.created_at,
       null::timestamptz, h.finished_at, h.keep_until,
       h.errors::text, null::text, h.lane, null::text, h.run_at from onceq.job_history h
   where h.state = any ($3::smallint[]) and h.id < $1::bigint and h.kind = $5::text and h.scope = $6::text and h.id = any ($8::bigint[]) and h.created_at >= $9::timestamptz and h.created_at < $10::timestamptz and h.queue = $4::text
   order by h.id desc limit $2::int
)
select * from (select * from live union all select * from waiting union all select * from finished) a
 order by id desc limit $2::int;

-- list.go: statement of a page
with recursive
past (queue) as (
  (select queue from onceq.job_history where queue >= '' order by queue limit 1)
  union all
  select (select h.queue from onceq.job_history h where h.queue > p.queue order by h.queue limit 1)
    from past p where p.queue is not null
),
given as (select $1::bigint, $2::int, $3::smallint[], $4::text, $5::text, $6::text, $7::smallint[], $8::bigint[],
                 $9::timestamptz, $10::timestamptz, $11::bigint, $12::bool),
live as (
  select j.id, j.kind, j.queue, j.scope, j.key, case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint as state,
       case when $12::bool then j.payload::text end, case when $12::bool then j.payload_bytes end, case when $12::bool then j.metadata::text end, null::text,
       j.priority, j.attempts, j.max_attempts, j.lost, j.claims, j.run_at, j.created_at,
       j.leased_until, null::timestamptz, null::timestamptz,
       j.errors::text, j.progress::text, j.lane, null::text, coalesce(j.due_at, j.run_at) from onceq.jobs j
   where pg_catalog.cardinality($7::smallint[]) > 0 and j.id < $1::bigint and j.id >= $11::bigint and j.kind = $5::text and case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint = any ($7::smallint[])
   order by j.id desc limit $2::int
),
waiting as (
  select w.id, w.kind, w.queue, w.scope, w.key, case when w.attempts > 0 or w.lost > 0 then 4 when w.run_at > statement_timestamp() then 2 else 1 end::smallint as state,
       case when $12::bool then w.payload::text end, case when $12::bool then w.payload_bytes end, case when $12::bool then w.metadata::text end, null::text,
       w.priority, w.attempts, w.max_attempts, w.lost, w.claims, w.run_at, w.created_at,
       null::timestamptz, null::timestamptz, null::timestamptz,
       w.errors::text, null::text, coalesce(w.path, w.lane), w.lane, coalesce(w.due_at, w.run_at) from onceq.job_waits w
   where pg_catalog.cardinality($7::smallint[]) > 0 and w.id < $1::bigint and w.id >= $11::bigint and w.kind = $5::text and case when w.attempts > 0 or w.lost > 0 then 4 when w.run_at > statement_timestamp() then 2 else 1 end::smallint = any ($7::smallint[])
   order by w.id desc limit $2::int
),
finished as (
  select i.*
    from past p cross join pg_catalog.unnest($3::smallint[]) s (state)
   cross join lateral (
         select h.id, h.kind, h.queue, h.scope, h.key, h.state,
       case when $12::bool then h.payload::text end, case when $12::bool then h.payload_bytes end, case when $12::bool then h.metadata::text end, case when $12::bool then h.result::text end,
       h.priority, h.attempts, h.max_attempts, h.lost, h.claims, h.run_at, h.created_at,
       null::timestamptz, h.finished_at, h.keep_until,
       h.errors::text, null::text, h.lane, null::text, h.run_at from (
               select * from onceq.job_history h
                where h.queue = any (array[p.queue]) and (h.state, h.id) < (s.state, $1::bigint) and h.state >= s.state
                order by h.queue desc, h.state desc, h.id desc limit 2 * greatest(5000 / ((select count(*) from past) * pg_catalog.cardinality($3::smallint[])), 100)) h
         where h.id >= $11::bigint and h.kind = $5::text
                order by h.queue desc, h.state desc, h.id desc limit $2::int) i
   where p.queue is not null
)
select * from (select * from live union all select * from waiting union all select * from finished) a
 order by id desc limit $2::int;

-- many.go: ids
select id from (…) page;

-- many.go: lockPast
with h as materialized (
  select id, scope, key from onceq.job_history where id = any ($1::bigint[]) order by id for update
),
fence as materialized (
  select from (select * from h where key is not null order by scope, key) s cross join lateral (
         select from onceq.job_fences f where f.key = any (array[s.key]) and f.scope = s.scope
            and f.class + 0 = 0 and f.job_id = s.id for update) f
),
follower as materialized (
  select from (select distinct E'\x1f' || pg_catalog.lpad(m.group_id::text, 19, '0') as lane from h cross join lateral (
                      select group_id from onceq.job_members where job_id + 0 = any (array[h.id])) m
                order by 1) g cross join lateral (
         select from onceq.job_waits where lane = any (array[g.lane]) for no key update) w
)
select array(select id from h order by scope, key, id desc),
       (select count(*) from fence) + (select count(*) from follower);

-- pauses.go: listPauses
select what, name, paused_at, note, until from onceq.pauses
 where (paused_at < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond') is not false and (until is null or until > statement_timestamp())
 order by what desc, name;

-- redrive.go: readFollowers
select u.id, exists (select from onceq.job_members where group_id = u.id offset 0),
       array(select group_id from onceq.job_members where job_id + 0 = u.id order by group_id)
  from pg_catalog.unnest($1::bigint[]) with ordinality as u(id, n)
 order by u.n;

-- stats.go: readStats
with recursive
live (queue) as (
  (select queue from onceq.jobs where queue >= '' order by queue limit 1)
  union all
  select (select j.queue from onceq.jobs j where j.queue > l.queue order by j.queue limit 1)
    from live l where l.queue is not null
),
waits (queue) as (
  (select queue from onceq.job_waits where queue >= '' order by queue limit 1)
  union all
  select (select w.queue from onceq.job_waits w where w.queue > l.queue order by w.queue limit 1)
    from waits l where l.queue is not null
),
past (queue) as (
  (select queue from onceq.job_history where queue >= '' order by queue limit 1)
  union all
  select (select h.queue from onceq.job_history h where h.queue > p.queue order by h.queue limit 1)
    from past p where p.queue is not null
),
names as materialized (
  select pg_catalog.unnest($1::text[]) collate "C" as queue
  union
  select queue from (select queue from live union all select queue from waits union all select queue from past union all select queue from onceq.queues
                      union all select name from onceq.pauses where what = 'queue' and (until is null or until > statement_timestamp())) n
   where $1::text[] is null and queue is not null
)
select n.queue, i.waiting, i.retrying + l.retrying, l.delayed, i.leased, i.running, d.dead, h.held, w.blocked,
       coalesce(extract(epoch from statement_timestamp() - least(o.oldest, i.oldest)) * 1e6, 0)::bigint,
       coalesce(greatest(i.seen, l.seen) > $2::int, false),
       (select p.paused_at from onceq.pauses p where p.what = 'queue' and p.name = n.queue and (until is null or until > statement_timestamp())),
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
         from (select from onceq.job_history where queue = n.queue and state = 6 order by id limit $2::int + 1) x) d
 cross join lateral (
       select count(*) as held
         from (select from onceq.job_history where queue = n.queue and state = 8 order by id limit $2::int + 1) x) h
 cross join lateral (
       select count(*) as blocked, coalesce(pg_catalog.max(due) filter (where of = ''), 0) as in_lane, coalesce(pg_catalog.max(due) filter (where of = '/'), 0) as in_limit,
              coalesce(pg_catalog.max(due) filter (where of = pg_catalog.chr(31)), 0) as after_others
         from (select case when pg_catalog.starts_with(lane, E'\x1f') then pg_catalog.chr(31) when lane like '/%' then '/' else '' end as of,
                      (extract(epoch from statement_timestamp() - coalesce(due_at, run_at)) * 1e6)::bigint as due
                 from onceq.job_waits where queue = n.queue order by id limit $2::int + 1) x) w
 order by n.queue;

-- workers.go: readBusy
select q.queue, count(*), count(*) filter (where j.ahead is null),
       (pg_catalog.array_agg(j.id order by j.id) filter (where j.ahead is null))[1:20]
  from pg_catalog.unnest($1::text[]) q (queue)
 cross join (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select id, leased_until, holder, ahead from onceq.jobs
        where queue = q.queue and priority = p.priority and run_at <= statement_timestamp()
        order by run_at, id
        limit $3::int) j
 where j.leased_until > statement_timestamp() and j.holder >> 32 = any ($2::bigint[])
 group by q.queue
 order by q.queue;

-- workers.go: readWorkers
select id, host, process, version, application, schema_version, lease, queues::text, pg_catalog.array_to_json(kinds)::text, started_at, seen_at,
       seen_at < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond', stuck::text, pool::text
  from onceq.workers
 order by host, process, started_at, id;
