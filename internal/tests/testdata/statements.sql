-- Every statement, as Postgres gets it. Written by: go test -run TestStatements . -update

-- after.go: CallLater
update onceq.lane_calls set due = statement_timestamp() + interval '1 minute'
 where slot = (pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.decode(pg_catalog.replace(E'\x1f' || pg_catalog.lpad($1::bigint::text, 19, '0'), E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint and due <= statement_timestamp() + interval '1 second'
   and lane = E'\x1f' || pg_catalog.lpad($1::bigint::text, 19, '0');

-- after.go: CancelDead
select c.cancelled, c.queues, c.kinds, c.scopes, c.keys from onceq.cancel_followers($1::bigint[], $2::bigint) c;

-- after.go: InsertMembers
select from onceq.insert_members($1::bigint[], $2::bigint[], $3::bool[], $4::smallint[], $5::text[]) m;

-- after.go: ReadSequence
select coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0);

-- after.go: SweepMembers
select from onceq.sweep_members() m;

-- after.go: refsFrom
select u.n, f.job_id, f.state, coalesce(f.result::text, ''), coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0)
  from (select 0::bigint as n, null::text as scope, null::text as key
        union all
        select n, scope, key from unnest($1::text[], $2::text[]) with ordinality as u(scope, key, n)) u
  left join lateral (
       select job_id, state, result from onceq.job_fences f
        where f.class = 0 and f.scope = u.scope and f.key = u.key offset 0) f on true;

-- after.go: refsFrom apart
select u.n, f.job_id, f.state, coalesce(f.result::text, ''), $3::bigint
  from (select 0::bigint as n, null::text as scope, null::text as key
        union all
        select n, scope, key from unnest($1::text[], $2::text[]) with ordinality as u(scope, key, n)) u
  left join lateral (
       select job_id, state, result from onceq.job_fences f
        where f.class = 0 and f.scope = u.scope and f.key = u.key offset 0) f on true;

-- announce.go: WakeOther
with alone as (update onceq.wakes set looks = 0 where worker = $3::bigint and queue = $1::text and looks > 0 returning 1)
select onceq.wake($1::text, 1, $2::bigint, true) from (select count(*) from alone) a;

-- await.go: BeginAwait
select b.holds, b.state, b.payload from onceq.begin_await($1::bigint, $2::text, $3::text, $4::bigint, $5::int, $6::bigint, $7::bigint) b;

-- await.go: EmitEvent
select e.first from onceq.emit($1::text, $2::text, $3::text::jsonb, $4::bigint, $5::bigint, $6::bool) as e(first);

-- await.go: EndAwait
with ok as materialized (
  select from onceq.jobs where id = $1::bigint and claims = $5::int and holder = $6::bigint
),
free as materialized (
  select a.job_id from onceq.job_awaits a
   where a.job_id = $1::bigint and a.scope = $2::text and a.key = $3::text and a.identity = $4::bigint and a.state = 0
     for update skip locked
),
mine as (
  update onceq.job_awaits a set state = 2
    from ok, free
   where a.job_id = $1::bigint and a.scope = $2::text and a.key = $3::text and a.identity = $4::bigint
  returning a.state
)
select exists (select from ok), exists (select from mine);

-- await.go: read.read
select a.state, (extract(epoch from a.until - statement_timestamp()) * 1e6)::bigint, coalesce(a.payload::text, '')
  from onceq.job_awaits a
 where a.job_id = $1::bigint and a.scope = $2::text and a.key = $3::text and a.identity = $4::bigint;

-- cancel.go: CancelJobs
select c.cancelled, c.queues, c.kinds, c.scopes, c.keys from onceq.cancel($1::bigint[], $2::bigint, $3::bool, $4::int) c;

-- cancel.go: RedriveJobs
select r.back, r.taken, r.held, r.early, r.led, r.used_up from onceq.redrive($1::bigint[], $2::smallint[], $3::bigint, $4::bigint[]) r;

-- cancel.go: RequestCancels
select n from onceq.request_cancels($1::bigint[]) n;

-- cancel.go: Unheeded
select pg_catalog.array_agg(job_id)
  from (select x.job_id from onceq.job_cancels x
         where x.job_id > $2::bigint
           and (exists (select from onceq.jobs j
                         where j.id = x.job_id and j.created_at <= x.requested_at
                           and (j.leased_until is null or j.leased_until <= statement_timestamp()) offset 0)
             or exists (select from onceq.job_waits w where w.id = x.job_id and w.created_at <= x.requested_at offset 0))
         order by x.job_id
         limit $1::int) x;

-- citus.go: CallOfBatch
insert into onceq.lane_calls (slot, due, lane)
values ((pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.decode(pg_catalog.replace($1::text, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint, greatest(statement_timestamp(), statement_timestamp() + $2::bigint::float8 * interval '1 microsecond',
                                               timestamptz 'epoch' + $3::bigint::float8 * interval '1 microsecond'), $1::text);

-- citus.go: ClaimFenceDrawn
select f.holds, f.token, f.until, f.since, f.identity
  from onceq.meta, onceq.claim_fence(null, $1::bigint, $2::int, $3::bigint, $4::smallint, $5::text, $6::text, $7::bigint, $8::bigint, $9::bigint, $10::bytea,
                                     $11::bigint, $12::bool, $13::text, $14::bool, $15::bigint) f;

-- citus.go: ClusterSize
select case when exists (select from pg_dist_partition where logicalrelid = 'onceq.job_fences'::regclass)
            then citus_relation_size('onceq.job_fences'::regclass) else pg_catalog.pg_relation_size('onceq.job_fences'::regclass) end
       / pg_catalog.current_setting('block_size')::bigint, pg_catalog.pg_stat_get_tuples_inserted('onceq.job_fences'::regclass);

-- citus.go: DrawApart
select pg_catalog.set_config('onceq_drawn.id', pg_catalog.nextval('onceq.ids')::text, true);

-- citus.go: FenceApart
insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint, holder)
values (0, $1::text, $2::text, 0, pg_catalog.current_setting('onceq_drawn.id')::bigint, pg_catalog.current_setting('onceq_drawn.id')::bigint << 20,
        statement_timestamp(), $3::bigint, $4::bytea, $5::bigint)
on conflict do nothing;

-- citus.go: OpenApart
select case when $1::text <> '' then pg_catalog.set_config('idle_in_transaction_session_timeout', $1::text, true) end, null, pg_current_xact_id()::text;

-- citus.go: RetakeApart
update onceq.job_fences f
   set job_id = pg_catalog.current_setting('onceq_drawn.id')::bigint, token = pg_catalog.current_setting('onceq_drawn.id')::bigint << 20,
       state = 0, created_at = statement_timestamp(), finished_at = null,
       lifetime = $3::bigint, fingerprint = $4::bytea, result = null, holder = $5::bigint, leased_until = null
 where f.class = 0 and f.scope = $1::text and f.key = $2::text and (f.state in (3, 4, 5) and f.lifetime >= 0
      and (f.lifetime = 0 and f.finished_at is not null
           or pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= statement_timestamp())
      or f.class = 0 and f.state = 5 and f.token = f.token >> 20 << 20)
   and f.token >> 20 < pg_catalog.current_setting('onceq_drawn.id')::bigint and f.job_id < pg_catalog.current_setting('onceq_drawn.id')::bigint;

-- citus.go: WaitOfBatch
update onceq.job_waits set claims = claims where id = pg_catalog.current_setting('onceq_drawn.id')::bigint returning id, run_at > created_at, 1;

-- citus.go: keyedOf
insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload, payload_bytes, metadata, scope, key)
select f.job_id,
       greatest(f.created_at, pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.created_at) + $6::bigint::float8 * interval '1 microsecond'),
                pg_catalog.timezone('UTC', timestamp 'epoch' + $7::bigint::float8 * interval '1 microsecond')),
       f.created_at, $4::smallint, $5::smallint, $1::text, $2::text, $3::text::jsonb, $8::bytea, $9::text::jsonb, f.scope, f.key
  from onceq.job_fences f
 where f.class = 0 and f.scope = $10::text and f.key = $11::text and f.holder = $12::bigint
returning id, run_at > created_at, 1;

-- citus.go: plainOf
insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload, payload_bytes, metadata)
values (pg_catalog.nextval('onceq.ids'),
        greatest(statement_timestamp(), statement_timestamp() + $6::bigint::float8 * interval '1 microsecond',
                 timestamptz 'epoch' + $7::bigint::float8 * interval '1 microsecond'),
        statement_timestamp(), $4::smallint, $5::smallint, $1::text, $2::text, $3::text::jsonb, $8::bytea, $9::text::jsonb)
returning id, run_at > created_at, 1;

-- claim.go: ClaimAny
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
first_alone as materialized (select pg_catalog.min(n) as n from c where alone)
update onceq.jobs j
   set leased_until = statement_timestamp() + $1::bigint::float8 * interval '1 microsecond',
       holder = $2::bigint,
       claims = least(j.claims + 1, 1048575),
       lost   = least(j.lost + (j.leased_until is not null)::int, 32767),
       ahead = null
  from c, first_alone a
 where j.id = any (array[c.id]) and (a.n is null or c.n = 1 or c.n < a.n)
returning j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, j.due_at, c.n, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at), a.n is not null, j.lane, j.lane_rule;

-- claim.go: ClaimAnyBut
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
            and kind <> all ($7::text[])
          order by run_at, id
          limit $8::bigint
            for update skip locked) j
   limit $8::bigint
),
first_alone as materialized (select pg_catalog.min(n) as n from c where alone)
update onceq.jobs j
   set leased_until = statement_timestamp() + $1::bigint::float8 * interval '1 microsecond',
       holder = $2::bigint,
       claims = least(j.claims + 1, 1048575),
       lost   = least(j.lost + (j.leased_until is not null)::int, 32767),
       ahead = null
  from c, first_alone a
 where j.id = any (array[c.id]) and (a.n is null or c.n = 1 or c.n < a.n)
returning j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, j.due_at, c.n, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at), a.n is not null, j.lane, j.lane_rule;

-- claim.go: ClaimInTurn
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
)
update onceq.jobs j
   set leased_until = statement_timestamp() + $1::bigint::float8 * interval '1 microsecond',
       holder = $2::bigint,
       claims = least(j.claims + 1, 1048575),
       lost   = least(j.lost + (j.leased_until is not null)::int, 32767),
       ahead = nullif(c.n > $9::bigint, false)
  from c
 where j.id = any (array[c.id])
returning j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, j.due_at, c.n, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at), false, j.lane, j.lane_rule;

-- claim.go: ClaimJobs
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
   set leased_until = statement_timestamp() + $1::bigint::float8 * interval '1 microsecond',
       holder = $2::bigint,
       claims = least(j.claims + 1, 1048575),
       lost   = least(j.lost + (j.leased_until is not null)::int, 32767),
       ahead = nullif(c.n > $9::bigint, false)
  from c
 where j.id = any (array[c.id])
returning j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, j.due_at, c.n, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at), false, j.lane, j.lane_rule;

-- claim.go: ClaimManyJobs
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
)
update onceq.jobs j
   set leased_until = statement_timestamp() + $1::bigint::float8 * interval '1 microsecond',
       holder = $2::bigint,
       claims = least(j.claims + 1, 1048575),
       lost   = least(j.lost + (j.leased_until is not null)::int, 32767),
       ahead = nullif(c.ahead, false)
  from c
 where j.id = any (array[c.id])
returning j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, j.due_at, c.n, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at), false, j.lane, j.lane_rule;

-- claim.go: ClaimOne
with c as materialized (
  select j.id, u.n
    from pg_catalog.unnest($3::bigint[]) with ordinality as u(id, n)
   cross join lateral (
         select id from onceq.jobs
          where id = u.id and coalesce(queue, '') = $4::text and kind = any ($5::text[]) and run_at <= statement_timestamp()
            and (leased_until <= statement_timestamp() or leased_until is null and lost > 0)
            for update skip locked) j
   limit 1
)
update onceq.jobs j
   set leased_until = statement_timestamp() + $1::bigint::float8 * interval '1 microsecond',
       holder = $2::bigint,
       claims = least(j.claims + 1, 1048575),
       lost   = least(j.lost + (j.leased_until is not null)::int, 32767),
       ahead = null
  from c
 where j.id = any (array[c.id])
returning j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, j.due_at, c.n, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at), false, j.lane, j.lane_rule;

-- conns.go: hears.greet
select pg_catalog.current_setting('max_prepared_transactions') <> '0' from pg_catalog.pg_notify($1::text, '');

-- conns.go: hears
listen …;

-- conns.go: listenForAll
listen …;

-- conns.go: quickly
select statement_timestamp();

-- conns.go: sessionPlans
select pg_catalog.set_config('enable_seqscan', 'off', false), pg_catalog.set_config('enable_hashjoin', 'off', false),
       pg_catalog.set_config('enable_mergejoin', 'off', false), pg_catalog.set_config('enable_bitmapscan', 'off', false), pg_catalog.set_config('jit', 'off', false),
       pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', false),
       pg_catalog.set_config('default_transaction_isolation', 'read committed', false), pg_catalog.set_config('default_transaction_read_only', 'off', false),
       pg_catalog.set_config('statement_timeout', '0', false), pg_catalog.set_config('lock_timeout', '0', false), pg_catalog.set_config('idle_session_timeout', '0', false),
       case when pg_catalog.current_setting('transaction_timeout', true) <> '0' then pg_catalog.set_config('transaction_timeout', '0', false) end;

-- counts.go: ReadDue
with recursive
live (queue) as (
  (select queue from onceq.jobs where queue >= '' order by queue limit 1)
  union all
  select (select j.queue from onceq.jobs j where j.queue > l.queue order by j.queue limit 1)
    from live l where l.queue is not null
),
given as (select $1::int)
select l.queue, pg_catalog.sum(x.due)::bigint,
       pg_catalog.floor(extract(epoch from statement_timestamp() - pg_catalog.min(x.oldest)) * 1e6)::bigint
  from live l
 cross join (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select count(*) as due, pg_catalog.min(j.due_at) as oldest
         from (select coalesce(due_at, run_at) as due_at, leased_until
                 from onceq.jobs
                where queue = l.queue and priority = p.priority and run_at <= statement_timestamp()
                order by run_at, id
                limit $1::int) j
        where j.leased_until is null or j.leased_until <= statement_timestamp()) x
 where l.queue is not null
 group by l.queue
having pg_catalog.sum(x.due) > 0::numeric;

-- counts.go: WriteCounts
select 1 from onceq.add_counts($1::text[], $2::text[], $3::int[], $4::int[], $5::int[], $6::int[], $7::bigint[],
       $8::int[], $9::bigint[], $10::text[], $11::text[]) c;

-- drain.go: FindLost
select q.n, j.ids, j.lost, j.unknown
  from pg_catalog.unnest($1::text[]) with ordinality as q(queue, n)
 cross join lateral (
       select pg_catalog.array_agg(j.id) filter (where j.kind = any ($2::text[])) as ids, pg_catalog.array_agg(j.lost) filter (where j.kind = any ($2::text[])) as lost,
              pg_catalog.array_agg(distinct j.kind) filter (where j.kind <> all ($2::text[])) as unknown
         from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
        cross join lateral (
              select id, kind, leased_until, lost + (leased_until is not null)::int as lost
                from onceq.jobs
               where queue = q.queue and priority = p.priority and run_at <= statement_timestamp()
               order by run_at, id
               limit $3::bigint) j
        where (j.leased_until is null or j.leased_until <= statement_timestamp()) and (j.lost > 0 or j.kind <> all ($2::text[]))) j
 where j.ids is not null or j.unknown is not null;

-- enqueue.go: DrawIDs
select statement_timestamp(), (select pg_catalog.array_agg(pg_catalog.nextval('onceq.ids')) from pg_catalog.generate_series(1, $1::int));

-- enqueue.go: InsertKeyed
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
returning id, false, 1;

-- enqueue.go: InsertKeyedMany
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
       (select pg_catalog.array_agg(job_id) from fence);

-- enqueue.go: InsertPlain
insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload)
values (pg_catalog.nextval('onceq.ids'), statement_timestamp(), statement_timestamp(), $4::smallint, $5::smallint, $1::text, $2::text, $3::text::jsonb)
returning id, false, 1;

-- enqueue.go: InsertPlainMany
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
         where h.jobs > 0), null::bigint[];

-- enqueue.go: ReadTaken
select u.n, coalesce(f.job_id, 0), f.state, f.fingerprint, f.result::text, (f.state in (3, 4, 5) and f.lifetime >= 0
      and (f.lifetime = 0 and f.finished_at is not null
           or pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= statement_timestamp())
      or f.class = 0 and f.state = 5 and f.token = f.token >> 20 << 20),
       greatest(f.token >> 20, f.job_id), case when j.id is null and f.state = 0
            then (select case when w.attempts > 0 or w.lost > 0 then 4 when w.run_at > statement_timestamp() then 2 else 1 end::smallint from onceq.job_waits w where w.id = f.job_id) else case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint end
  from unnest($1::text[], $2::text[]) with ordinality as u(scope, key, n)
 cross join lateral (
       select * from onceq.job_fences f where f.class = 0 and f.scope = u.scope and f.key = u.key offset 0) f
  left join lateral (
       select * from onceq.jobs j where j.id = f.job_id offset 0) j on true;

-- enqueue.go: enqueueJobsFrom
select f.ids, f.delayed, f.woken, f.accepted, f.at
  from onceq.enqueue_jobs('onceq.ids', $1::int[], $2::text[], $3::bytea[], $4::text[], $5::bytea[], $6::bigint[],
                          $7::text[], $8::text[], $9::text[], $10::text[], $11::int[], $12::int[], $13::bigint[], $14::bigint[], $15::bigint[],
                          $16::bigint, $17::bool, $18::text[], $19::smallint[], $20::text[], $21::smallint[], $22::timestamptz, $23::bool) f;

-- enqueue.go: enqueueJobsFrom drawn
select f.ids, f.delayed, f.woken, f.accepted, f.at
  from onceq.enqueue_jobs(null, $1::int[], $2::text[], $3::bytea[], $4::text[], $5::bytea[], $6::bigint[],
                          $7::text[], $8::text[], $9::text[], $10::text[], $11::int[], $12::int[], $13::bigint[], $14::bigint[], $15::bigint[],
                          $16::bigint, $17::bool, $18::text[], $19::smallint[], $20::text[], $21::smallint[], $22::timestamptz, $23::bool) f;

-- enqueue.go: enqueueOneFrom
select f.id, f.delayed, f.who
  from onceq.enqueue_one('onceq.ids', $1::text, $2::text, $3::text, $4::smallint, $5::smallint, $6::text, $7::text, $8::bigint, $9::bytea,
                         $10::bigint, $11::bigint, $12::text, $13::bytea, $14::bigint, $15::bool, $16::text, $17::smallint, $18::text, null) f where f.id is not null;

-- enqueue.go: enqueueOneFrom drawn
select f.id, f.delayed, f.who
  from onceq.meta, onceq.enqueue_one(null, $1::text, $2::text, $3::text, $4::smallint, $5::smallint, $6::text, $7::text, $8::bigint, $9::bytea,
                         $10::bigint, $11::bigint, $12::text, $13::bytea, $14::bigint, $15::bool, $16::text, $17::smallint, $18::text, $19::bigint) f where f.id is not null;

-- fence.go: HoldFence
update onceq.job_fences f set state = 6, detail = coalesce(f.detail, $5::text)
 where f.class = $1::smallint and f.scope = $2::text and f.key = $3::text and f.token = $4::bigint and (f.state = 2 or f.state = 1 and f.leased_until <= statement_timestamp())
returning f.token;

-- fence.go: InsertFence
with ok as materialized (
  select where $1::bigint = 0
      or exists (select from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint)
),
mine as (
  insert into onceq.job_fences (class, scope, key, state, job_id, token, holder, leased_until, created_at, lifetime, fingerprint)
  select $4::smallint, $5::text, $6::text, 1, nullif($1::bigint, 0), pg_catalog.nextval('onceq.ids') << 20, $7::bigint,
         statement_timestamp() + $8::bigint::float8 * interval '1 microsecond', statement_timestamp(), $9::bigint, $10::bytea
    from ok
  on conflict do nothing
  returning token, leased_until, created_at, identity
)
select exists (select from ok), m.token, m.leased_until, m.created_at, m.identity
  from (select) one left join mine m on true;

-- fence.go: ReadFence
select f.state, f.token, f.leased_until, f.created_at, f.identity, f.fingerprint, coalesce(f.result::text, ''), coalesce(f.detail, ''),
       coalesce((f.state in (3, 4, 5) and f.lifetime >= 0
      and (f.lifetime = 0 and f.finished_at is not null
           or pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= statement_timestamp())
      or f.class = 0 and f.state = 5 and f.token = f.token >> 20 << 20), false), statement_timestamp(), coalesce(f.job_id, 0), f.finished_at
  from onceq.job_fences f
 where f.class = $1::smallint and f.scope = $2::text and f.key = $3::text;

-- fence.go: TakeFence
select f.holds, f.token, f.until, f.since, f.identity
  from onceq.claim_fence('onceq.ids', $1::bigint, $2::int, $3::bigint, $4::smallint, $5::text, $6::text, $7::bigint, $8::bigint, $9::bigint, $10::bytea,
                         $11::bigint, $12::bool, $13::text, $14::bool, null) f;

-- fence_lease.go: CompleteFence
with done as (
  update onceq.job_fences f
     set state = 3,
         result = case when f.state = 3 then f.result else nullif($7::text, '')::jsonb end,
         detail = case when f.state = 3 then f.detail else nullif($8::text, '') end,
         finished_at = case when f.state = 3 then f.finished_at when f.class <> 3 then clock.now end,
         lifetime = case when f.state = 3 then f.lifetime
                         when f.state = 1 and (f.leased_until <= clock.now) is not true then $9::bigint else $10::bigint end
    from (select statement_timestamp() as now) clock
   where f.class = $2::smallint and f.scope = $3::text and f.key = $4::text and f.token = $5::bigint and f.holder = $6::bigint
  returning 1)
select case when not exists (select from done) then onceq.lease_lost($1::bigint) end;

-- fence_lease.go: DoubtFence
with done as (
  update onceq.job_fences f set state = 2, detail = $7::text
   where f.class = $2::smallint and f.scope = $3::text and f.key = $4::text and f.token = $5::bigint and f.holder = $6::bigint and f.state in (1, 2)
  returning 1)
select case when not exists (select from done) then onceq.lease_lost($1::bigint) end;

-- fence_lease.go: EffectScope
select f.scope from onceq.job_fences f
 where f.class = 3 and f.key = $1::text and f.token = $2::bigint and f.holder = $3::bigint;

-- fence_lease.go: ExtendFence
with done as (
  update onceq.job_fences f
     set leased_until = statement_timestamp() + $7::bigint::float8 * interval '1 microsecond',
         detail = case when not $8::bool then f.detail end
   where f.class = $2::smallint and f.scope = $3::text and f.key = $4::text and f.token = $5::bigint and f.holder = $6::bigint and f.state = 1
  returning 1)
select case when not exists (select from done) then onceq.lease_lost($1::bigint) end;

-- fence_lease.go: ReleaseFence
with done as (
  update onceq.job_fences f
     set state = case when f.detail is null then 5 else 2 end, holder = null,
         finished_at = case when f.detail is null then clock.now end,
         lifetime = case when f.detail is null then 0 else f.lifetime end
    from (select statement_timestamp() as now) clock
   where f.class = $2::smallint and f.scope = $3::text and f.key = $4::text and f.token = $5::bigint and f.holder = $6::bigint and f.state = 1
  returning 1)
select case when not exists (select from done) then onceq.lease_lost($1::bigint) end;

-- finish.go: CompleteJobs
with u as materialized (
  select * from unnest($1::bigint[], $2::int[], $3::bigint[], $4::text[]) as u(id, claims, holder, result)
),
gone as (
  delete from onceq.jobs j using u
   where j.id = any (array[u.id]) and j.claims = u.claims and j.holder = u.holder
  returning j.id, j.claims, j.scope, j.key, u.result
),
fence as (
  update onceq.job_fences f
     set state = 3, token = g.id << 20 | g.claims::bigint, finished_at = statement_timestamp(), result = nullif(g.result, '')::jsonb
    from gone g
   where g.key is not null and f.key = any (array[g.key]) and f.scope = g.scope and f.class + 0 = 0 and f.job_id = g.id
)
select case when $5::bool and (select count(*) from gone) < pg_catalog.cardinality($1::bigint[]) then onceq.lease_lost(($1::bigint[])[1]) end,
       (select pg_catalog.array_agg(id << 20 | claims::bigint) from gone);

-- finish.go: CompleteOne
with gone as (
  delete from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint
  returning id, scope, key
),
fence as (
  update onceq.job_fences f
     set state = 3, token = $4::bigint, finished_at = statement_timestamp(), result = nullif($5::text, '')::jsonb
    from gone g
   where f.key = any (array[g.key]) and f.scope = g.scope and f.class + 0 = 0 and f.job_id = g.id
)
select case when not exists (select from gone) then onceq.lease_lost($1::bigint) end;

-- finish.go: CompleteOneUnkeyed
with gone as (
  delete from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint
  returning id
)
select case when not exists (select from gone) then onceq.lease_lost($1::bigint) end;

-- finish.go: FinishJobs
select f.tokens
  from onceq.finish($1::bigint[], $2::int[], $3::bigint[], $4::smallint[], $5::text[], $6::text[], $7::int[], $8::bigint[], $9::bool, $10::text::jsonb) as f(tokens);

-- finish.go: GiveBackJobs
select b.tokens, b.cancelled
  from onceq.give_back($1::bigint[], $2::int[], $3::bigint[], $4::text[], $5::int[], $6::bool[], $7::bigint[], $8::int[], $9::bool, $10::text[], $11::text[],
                       $12::text::jsonb) b;

-- finish.go: RetryJobs
with u as materialized (
  select * from unnest($1::bigint[], $2::int[], $3::bigint[], $4::text[], $5::int[], $6::bool[], $7::bigint[], $8::int[])
      as u(id, claims, holder, error, spent, reset, delay, most)
),
ready as (
  update onceq.jobs j
     set run_at = statement_timestamp() + u.delay::float8 * interval '1 microsecond', due_at = null, leased_until = null, holder = null,
         attempts = case when u.reset then 0 else attempts + u.spent end,
         lost     = least(lost, u.most),
         identity = case when u.reset then coalesce(j.identity, (extract(epoch from pg_catalog.timezone('UTC', j.created_at)) * 1e6)::bigint) + 1 else identity end,
         errors   = case when error = '' then errors else
 case when pg_catalog.jsonb_array_length(errors) >= 10 then errors - 0 else coalesce(errors, '[]') end
 || (error::jsonb || pg_catalog.jsonb_build_object('at', statement_timestamp(), 'attempt', attempts + 1)) end
    from u
   where j.id = any (array[u.id]) and j.claims = u.claims and j.holder = u.holder
  returning j.id, j.claims, j.created_at
)
select case when $9::bool and count(*) < pg_catalog.cardinality($1::bigint[]) then onceq.lease_lost(($1::bigint[])[1]) end,
       pg_catalog.array_agg(ready.id << 20 | ready.claims::bigint), pg_catalog.array_agg(x.job_id) filter (where x.job_id is not null)
  from ready left join lateral (select job_id from onceq.job_cancels x where x.job_id = ready.id and x.requested_at >= ready.created_at offset 0) x on true;

-- finish.go: TellMembers
select t.calls from onceq.tell($1::bigint[], $2::smallint[], $3::text[]) as t(calls);

-- group.go: FindCycles
with recursive up (id, root) as (
  select u.id, u.id from pg_catalog.unnest($1::bigint[]) as u(id)
  union
  select w.id, up.root
    from up
   cross join lateral (select group_id from onceq.job_members where job_id + 0 = up.id offset 0) m
   cross join lateral (select id from onceq.job_waits where id = m.group_id and if_dead is not null offset 0) w
),
waits as materialized (
  select id, root from up limit 10000
)
select coalesce(n, -1), coalesce(id, 0), coalesce(root, 0)
  from (select 1) o
  left join lateral (
       select g.n - 1 as n, w.id, w.root
         from unnest($2::bigint[], $3::text[], $4::text[]) with ordinality as g(id, scope, key, n)
        cross join lateral (
              select coalesce(nullif(g.id, 0), (select job_id from onceq.job_fences f where f.class = 0 and f.scope = g.scope and f.key = g.key)) as id offset 0) f
         join waits w on w.id = f.id
        order by g.n limit 1) c on true;

-- group.go: GroupsOf
with ok as materialized (
  select id from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint for no key update
)
select case when not exists (select from ok) then onceq.lease_lost($1::bigint) end,
       array(select group_id from onceq.job_members where job_id + 0 = $1::bigint order by group_id);

-- group.go: ReadGroups
with g as materialized (
  (select id, lane from onceq.job_waits
    where lane > E'\x1f' || pg_catalog.lpad($1::bigint::text, 19, '0') and lane < ' ' and $3::bigint = 0
    order by lane limit $2::int)
  union all
  select $3::bigint, '' where $3::bigint <> 0
)
select g.id,
       coalesce((select case when w.attempts > 0 or w.lost > 0 then 4 when w.run_at > statement_timestamp() then 2 else 1 end::smallint from onceq.job_waits w where w.id = g.id), (select case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint from onceq.jobs j where j.id = g.id),
                (select h.state from onceq.job_history h where h.id = g.id)),
       w.if_dead is not null,
       coalesce(w.if_dead, (select 2 from onceq.job_history h where h.id = g.id and h.if_dead = 3), 0),
       coalesce(extract(epoch from statement_timestamp() - w.created_at) * 1e6, 0)::bigint,
       m.total, m.open, m.completed, m.dead, m.cancelled, m.held,
       array(select job_id from onceq.job_members where $4::bool and group_id = $3::bigint and state = 0 order by job_id limit 10),
       array(select job_id from onceq.job_members where $4::bool and group_id = $3::bigint and state in (6, 8) order by job_id limit 10)
  from g
  left join lateral (select if_dead, created_at from onceq.job_waits where id = g.id and if_dead is not null offset 0) w on true
 cross join lateral (
       select count(*) as total, count(*) filter (where state = 0) as open, count(*) filter (where state = 5) as completed,
              count(*) filter (where state = 6) as dead, count(*) filter (where state = 7) as cancelled,
              count(*) filter (where state = 8) as held
         from onceq.job_members where group_id = g.id) m
 order by g.lane;

-- group.go: ReadMembers
with page as materialized (
  select job_id, nullif(state, 0) as state, case when not $4::boolean then result end as result
    from onceq.job_members
   where group_id = $1::bigint and job_id > $2::bigint
   order by job_id
   limit $3::int
)
select m.job_id, coalesce(m.state, i.state, 5), m.result::text,
       coalesce(case when i.state <> 5 then i.kind end, ''),
       coalesce(case when i.state <> 5 then i.errors -> -1 ->> 'error'::text end, '')
  from page m
  left join lateral (
       select case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint as state, j.kind, j.errors from onceq.jobs j where j.id = m.job_id and m.state is null
        union all
       select case when w.attempts > 0 or w.lost > 0 then 4 when w.run_at > statement_timestamp() then 2 else 1 end::smallint, w.kind, w.errors from onceq.job_waits w where w.id = m.job_id and m.state is null
        union all
       select h.state, h.kind, h.errors from onceq.job_history h where h.id = m.job_id and m.state is distinct from 5
        limit 1) i on true
 order by m.job_id;

-- handle.go: Rollback
rollback to savepoint;

-- inspect.go: ReadJob
select i.*, j.holder, coalesce(j.ahead, false), coalesce(j.timeout, ''), c.requested_at,
       coalesce(a.scope, ''), coalesce(a.key, ''), a.until, statement_timestamp()
  from (select j.id, j.kind, j.queue, j.scope, j.key, case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint as state,
       case when $2::bool then j.payload::text end, case when $2::bool then j.payload_bytes end, case when $2::bool then j.metadata::text end, null::text,
       j.priority, j.attempts, j.max_attempts, j.lost, j.claims, j.run_at, j.created_at,
       j.leased_until, null::timestamptz, null::timestamptz,
       j.errors::text, j.progress::text, j.lane, null::text, coalesce(j.due_at, j.run_at) from onceq.jobs j
         where j.id = $1::bigint and ($3::text is null or j.scope = $3::text and j.key = $4::text)
         union all
        select w.id, w.kind, w.queue, w.scope, w.key, case when w.attempts > 0 or w.lost > 0 then 4 when w.run_at > statement_timestamp() then 2 else 1 end::smallint as state,
       case when $2::bool then w.payload::text end, case when $2::bool then w.payload_bytes end, case when $2::bool then w.metadata::text end, null::text,
       w.priority, w.attempts, w.max_attempts, w.lost, w.claims, w.run_at, w.created_at,
       null::timestamptz, null::timestamptz, null::timestamptz,
       w.errors::text, null::text, coalesce(w.path, w.lane), w.lane, coalesce(w.due_at, w.run_at) from onceq.job_waits w
         where w.id = $1::bigint and ($3::text is null or w.scope = $3::text and w.key = $4::text)
         union all
        select h.id, h.kind, h.queue, h.scope, h.key, h.state,
       case when $2::bool then h.payload::text end, case when $2::bool then h.payload_bytes end, case when $2::bool then h.metadata::text end, case when $2::bool then h.result::text end,
       h.priority, h.attempts, h.max_attempts, h.lost, h.claims, h.run_at, h.created_at,
       null::timestamptz, h.finished_at, h.keep_until,
       h.errors::text, null::text, h.lane, null::text, h.run_at from onceq.job_history h
         where h.id = $1::bigint and ($3::text is null or h.scope = $3::text and h.key = $4::text)) i
  left join lateral (
       select holder, ahead, metadata ->> 'onceq-timeout'::text as timeout from onceq.jobs where id = i.id offset 0) j on true
  left join lateral (select requested_at from onceq.job_cancels where job_id = i.id and requested_at >= i.created_at offset 0) c on true
  left join lateral (
       select scope, key, until from onceq.job_awaits
        where job_id = i.id and claims = i.claims and state = 0 order by until limit 1) a on true;

-- job.go: AskTime
select statement_timestamp();

-- job.go: LacksRows
select (select l.n < 16 or c.n = 0
          from (select count(*) as n from onceq.lane_locks) l
         cross join (select count(*) as n from onceq.lane_calls where slot = -1 and lane = '') c), exists (select from onceq.meta);

-- lane.go: laneLimit
select coalesce((select n from onceq.lane_limits where lane = $1::text),
                 (select n from onceq.lane_limits where lane = pg_catalog.left($1::text, pg_catalog.strpos(pg_catalog.substr($1::text, 2), '/') + 1)), 1);

-- lanes.go: PutBack.call
insert into onceq.lane_calls (due, slot, lane)
values ('infinity', -1, ''), (statement_timestamp(), -1, E'\x1f');

-- lanes.go: PutBack.locks
insert into onceq.lane_locks select pg_catalog.generate_series(0, 15) on conflict do nothing;

-- lazytx.go: Release
rollback;

-- lazytx.go: committed
rollback; select pg_xact_status('…');

-- lazytx.go: share
set local idle_in_transaction_session_timeout to …;

-- lease.go: ExtendLeases
with u as materialized (
  select * from unnest($1::bigint[], $2::int[], $3::bigint[]) with ordinality as u(id, claims, holder, n)
),
free as materialized (
  select j.id, u.n
    from u cross join lateral (
         select id from onceq.jobs
          where id = u.id and claims = u.claims and holder = u.holder
            and leased_until < statement_timestamp() + $4::bigint::float8 * interval '1 microsecond'
            for no key update skip locked) j
),
extended as (
  update onceq.jobs j
     set leased_until = statement_timestamp() + $4::bigint::float8 * interval '1 microsecond',
         ahead = case when ($5::bool[])[free.n] then null else j.ahead end,
         progress = coalesce(nullif(($6::text[])[free.n], '')::jsonb, j.progress)
    from free where j.id = any (array[free.id])
  returning free.n
)
select array(select n from extended),
       array(select u.n from u cross join lateral (
             select from onceq.jobs j
              where j.id = u.id and j.claims = u.claims and j.holder = u.holder offset 0) j),
       array(select u.n from u cross join lateral (
             select from onceq.job_cancels x where x.job_id = u.id
                and exists (select from onceq.jobs j where j.id = x.job_id and j.created_at <= x.requested_at) offset 0) x);

-- lease.go: LengthenLease
with free as materialized (
  select id from onceq.jobs
   where id = $1::bigint and claims = $2::int and holder = $3::bigint
     for no key update skip locked
)
update onceq.jobs j set leased_until = greatest(leased_until, statement_timestamp() + $4::bigint::float8 * interval '1 microsecond')
  from free where j.id = any (array[free.id])
returning true;

-- limit.go: LimitsUnset
select u.name from pg_catalog.unnest($1::text[]) as u(name)
 where not exists (select from onceq.lane_limits s
                    where s.lane = any (array['/' || u.name, pg_catalog.left(('/' || u.name), pg_catalog.strpos(pg_catalog.substr(('/' || u.name), 2), '/') + 1)]) and s.n is not null)
 order by u.name collate "C";

-- limit.go: SetLimit
select f from onceq.set_limit($1::text, $2::int, $3::bigint, $4::bigint, $5::int, $6::bool) f;

-- listen.go: AnnounceRow
with near as materialized (
  select (select count(*)
            from (select from onceq.waiters w
                   where w.serves = $2::bigint and w.worker <> $1::bigint and w.kinds = $10::bigint and w.room >= $4::bigint and w.idle_until > statement_timestamp() and (w.busy is null or w.busy operator(pg_catalog.<@) $5::text[])
                      and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round offset 0)
                   limit $8::int) o) as others,
         (select count(*)
            from (select from onceq.waiters w
                   where w.serves = $2::bigint and w.worker % 1000003::bigint < $1::bigint % 1000003::bigint and w.kinds = $10::bigint and w.room >= $4::bigint and w.idle_until > statement_timestamp() and (w.busy is null or w.busy operator(pg_catalog.<@) $5::text[])
                      and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round offset 0)
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
select exists (select from onceq.waiter_queues where queue = $7::text and serves = $2::bigint), others, before, dormant from said;

-- listen.go: NameQueues
with new as (
  insert into onceq.waiter_queues (queue, serves)
  select u.queue, $2::bigint from pg_catalog.unnest($1::text[]) as u(queue) order by u.queue collate "C"
  on conflict do nothing
)
select 1;

-- listen.go: UnannounceAll.unannounce
with gone as (delete from onceq.waiters where worker = $1::bigint returning 1),
     woken as (delete from onceq.wakes where worker = $1::bigint and round <= $2::bigint returning queue)
select pg_catalog.count(onceq.wake(u.queue, 1, $3::bigint, true))
  from pg_catalog.unnest(case when (select count(*) from gone) >= 0 then array(select distinct queue from woken) end) as u(queue);

-- listen.go: listens
listen;

-- look.go: LookForCalls
with recent as materialized (
  select queue from onceq.queues
   where $7::bool and rescanned_at > statement_timestamp() - $8::bigint::float8 * interval '1 microsecond'
     and rescanned_at <= statement_timestamp() + interval '1 second'
     and not coalesce(left_kinds operator(pg_catalog.&&) $5::text[], false)
),
seen as materialized (
  select q.n,
         least((select run_at from onceq.jobs
                 where queue = q.queue and priority = -1::smallint and run_at >= q.high
                   and case when run_at > statement_timestamp() then true else leased_until is null and lost = 0 and kind = any ($5::text[]) end
                 order by run_at, id
                 limit 1),
               (select run_at from onceq.jobs
                 where queue = q.queue and priority = 0::smallint and run_at >= q.normal
                   and case when run_at > statement_timestamp() then true else leased_until is null and lost = 0 and kind = any ($5::text[]) end
                 order by run_at, id
                 limit 1),
               (select run_at from onceq.jobs
                 where queue = q.queue and priority = 1::smallint and run_at >= q.low
                   and case when run_at > statement_timestamp() then true else leased_until is null and lost = 0 and kind = any ($5::text[]) end
                 order by run_at, id
                 limit 1)) as next,
         case when not $7::bool then false
              when q.queue in (select queue from recent) then null
              else coalesce((select run_at from onceq.jobs where queue = q.queue and priority = -1::smallint order by run_at, id limit 1) <= statement_timestamp() - interval '1 second', false) or
                   coalesce((select run_at from onceq.jobs where queue = q.queue and priority = 0::smallint order by run_at, id limit 1) <= statement_timestamp() - interval '1 second', false) or
                   coalesce((select run_at from onceq.jobs where queue = q.queue and priority = 1::smallint order by run_at, id limit 1) <= statement_timestamp() - interval '1 second', false) end as behind
    from unnest((select $1::text[]), (select $2::timestamptz[]), (select $3::timestamptz[]), (select $4::timestamptz[])) with ordinality as q(queue, high, normal, low, n)
)
select statement_timestamp(), exists (select from seen where behind is null), array(select n from seen where behind),
       array(select n from seen where next <= statement_timestamp() + $6::bigint::float8 * interval '1 microsecond'),
       array(select greatest(0, extract(epoch from next - statement_timestamp()) * 1e6)::bigint
               from seen where next <= statement_timestamp() + $6::bigint::float8 * interval '1 microsecond'),
       array(select what from onceq.pauses where what <> 'limit' and (until is null or until > statement_timestamp()) order by name, what),
       array(select name from onceq.pauses where what <> 'limit' and (until is null or until > statement_timestamp()) order by name, what),
       exists (select from pg_catalog.generate_series(-1, 15) as s(slot)
                cross join lateral (
                      select due from onceq.lane_calls
                       where slot = s.slot::smallint and due > $9::timestamptz and due <= statement_timestamp()
                       order by due limit 1) c)
       or $9::timestamptz < '1970-01-01' and exists (select from onceq.job_members where not told);

-- look.go: LookForJobs
with recent as materialized (
  select queue from onceq.queues
   where $7::bool and rescanned_at > statement_timestamp() - $8::bigint::float8 * interval '1 microsecond'
     and rescanned_at <= statement_timestamp() + interval '1 second'
     and not coalesce(left_kinds operator(pg_catalog.&&) $5::text[], false)
),
seen as materialized (
  select q.n,
         least((select run_at from onceq.jobs
                 where queue = q.queue and priority = -1::smallint and run_at >= q.high
                   and case when run_at > statement_timestamp() then true else leased_until is null and lost = 0 and kind = any ($5::text[]) end
                 order by run_at, id
                 limit 1),
               (select run_at from onceq.jobs
                 where queue = q.queue and priority = 0::smallint and run_at >= q.normal
                   and case when run_at > statement_timestamp() then true else leased_until is null and lost = 0 and kind = any ($5::text[]) end
                 order by run_at, id
                 limit 1),
               (select run_at from onceq.jobs
                 where queue = q.queue and priority = 1::smallint and run_at >= q.low
                   and case when run_at > statement_timestamp() then true else leased_until is null and lost = 0 and kind = any ($5::text[]) end
                 order by run_at, id
                 limit 1)) as next,
         case when not $7::bool then false
              when q.queue in (select queue from recent) then null
              else coalesce((select run_at from onceq.jobs where queue = q.queue and priority = -1::smallint order by run_at, id limit 1) <= statement_timestamp() - interval '1 second', false) or
                   coalesce((select run_at from onceq.jobs where queue = q.queue and priority = 0::smallint order by run_at, id limit 1) <= statement_timestamp() - interval '1 second', false) or
                   coalesce((select run_at from onceq.jobs where queue = q.queue and priority = 1::smallint order by run_at, id limit 1) <= statement_timestamp() - interval '1 second', false) end as behind
    from unnest((select $1::text[]), (select $2::timestamptz[]), (select $3::timestamptz[]), (select $4::timestamptz[])) with ordinality as q(queue, high, normal, low, n)
)
select statement_timestamp(), exists (select from seen where behind is null), array(select n from seen where behind),
       array(select n from seen where next <= statement_timestamp() + $6::bigint::float8 * interval '1 microsecond'),
       array(select greatest(0, extract(epoch from next - statement_timestamp()) * 1e6)::bigint
               from seen where next <= statement_timestamp() + $6::bigint::float8 * interval '1 microsecond'),
       array(select what from onceq.pauses where what <> 'limit' and (until is null or until > statement_timestamp()) order by name, what),
       array(select name from onceq.pauses where what <> 'limit' and (until is null or until > statement_timestamp()) order by name, what);

-- look.go: LookForNew
with new as materialized (
  select queue, kind, run_at, leased_until, lost from onceq.jobs where id > $1::bigint order by id desc limit 1000
)
select coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0),
       array(select distinct queue from new
              where run_at <= statement_timestamp() and leased_until is null and lost = 0 and kind = any ($2::text[]));

-- pause.go: PauseIt
select 1 from onceq.pause($1::text, $2::text, $3::timestamptz, $4::bigint, $5::text, $6::bool) f;

-- pause.go: ReadPauses
select what, name from onceq.pauses where what <> 'limit' and (until is null or until > statement_timestamp());

-- pause.go: ResumeIt
select f from onceq.resume($1::text, $2::text) f;

-- presence.go: Leave.leave
with gone as (delete from onceq.workers where id = $1::bigint) select 1;

-- presence.go: WritePresence
select 1 from onceq.be_present($1::bigint, $2::text, $3::int, $4::text, $5::int, $6::bigint, $7::text::jsonb, $8::text[], $9::text::jsonb, $10::text::jsonb, $11::text) w;

-- promoter.go: AnyCalls
select exists (select from pg_catalog.generate_series(-1, 15) as s(slot)
                cross join lateral (
                      select due from onceq.lane_calls
                       where slot = s.slot::smallint and due > $1::timestamptz and due <= statement_timestamp()
                       order by due limit 1) c);

-- promoter.go: CallFamilies
select f.called, f.settle from onceq.call_families($1::int) f;

-- promoter.go: LockLanes
select count(*) from (select slot from onceq.lane_locks order by slot for update) l;

-- promoter.go: PromoteLines
select f.looked, f.due, f.mine, f.next, f.families, f.calls, f.upto, f.jobs, f.queues, f.cancel,
       j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, j.due_at, 0, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at), false, j.lane, j.lane_rule
  from onceq.promote($1::timestamptz, $2::int, $3::bigint, $4::bigint, $5::bigint, $6::bigint, $7::text, $8::text[]) f
  left join lateral (select (f.leased).* offset 0) j on true;

-- promoter.go: SettleLimits
select 1 from onceq.settle_limits() f;

-- queue.go: Check.tables
select version, oldest_code, pg_catalog.current_setting('server_encoding'),
       pg_catalog.current_setting('citus.version', true) is not null,
       greatest((select pg_catalog.max(id) from onceq.jobs), (select pg_catalog.max(id) from onceq.job_waits), (select pg_catalog.max(id) from onceq.job_history),
                (select pg_catalog.max(token >> 20) from (select token from onceq.job_fences limit 100000) f), 0),
       (select l.n < 16 or c.n = 0
          from (select count(*) as n from onceq.lane_locks) l
         cross join (select count(*) as n from onceq.lane_calls where slot = -1 and lane = '') c)
  from onceq.meta;

-- queue.go: Check
select pg_is_in_recovery();

-- queue.go: NewInstallation.hold
with held as (
  update onceq.job_fences f
     set state = 6, detail = coalesce(f.detail, 'its claim ran out of its lease without an outcome') || '; its idempotency key is another since this copy got an identity of its own'
   where (f.state = 2 or f.state = 1 and f.leased_until <= statement_timestamp())
  returning 1
)
select (select count(*) from onceq.jobs where leased_until > statement_timestamp())
     + (select count(*) from onceq.job_fences where state = 1 and leased_until > statement_timestamp()),
       (select count(*) from onceq.waiters where idle_until > statement_timestamp()), (select count(*) from held);

-- queue.go: NewInstallation.renew
update onceq.meta set installation = $1::uuid returning null;

-- queue.go: identify.read
select installation::text, pg_catalog.current_setting('citus.version', true) is not null from onceq.meta;

-- rate.go: TakeSlots
select f.starts, f.taken, f.waited, f.back, f.ahead from onceq.take_slots($1::text, $2::bigint[], $3::int[], $4::bigint[]) f;

-- reap.go: CallLines
select 1 from onceq.call($1::text[], $2::timestamptz) f;

-- reap.go: FindIdle
with recursive behind as materialized (
  select s.slot from pg_catalog.generate_series(0, 15) as s(slot)
   where exists (select from onceq.lane_calls
                  where slot = s.slot::smallint and due <= statement_timestamp() - interval '10 seconds' offset 0)
),
line (lane, n) as (
  (select lane, 1 from onceq.job_waits where lane > $1::text order by lane limit 1)
  union all
  select (select w.lane from onceq.job_waits w where w.lane > l.lane order by w.lane limit 1), l.n + 1
    from line l where l.lane is not null and l.n < $2::int
)
select array(
       select l.lane from line l
        where l.lane is not null and (pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.decode(pg_catalog.replace(l.lane, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint <> all (array(select slot from behind)::smallint[])
          and case when pg_catalog.starts_with(l.lane, E'\x1f') then exists (
                select from onceq.job_waits w
                 where w.lane = l.lane and not exists (select from (select from onceq.job_members where group_id = w.id and state = 0 order by job_id desc limit 1) m) and not exists (
                       select from onceq.job_members m where m.group_id = w.id and (m.state = 8 or m.state = 6 and w.if_dead = 0) offset 0) offset 0)
              else not exists (select from onceq.lane_stops s where s.lane = l.lane offset 0) and exists (select from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
          cross join lateral (
                select id from onceq.job_waits
                 where lane = l.lane and priority = p.priority and run_at <= statement_timestamp()
                 order by run_at, id
                 limit 1) w
          limit 1 offset 0)
               and coalesce((select n from onceq.lane_limits where lane = l.lane),
                 (select n from onceq.lane_limits where lane = pg_catalog.left(l.lane, pg_catalog.strpos(pg_catalog.substr(l.lane, 2), '/') + 1)), 1) > (select n from (select count(*) as n from onceq.lane_places p where p.lane = l.lane and coalesce((select n from onceq.lane_limits where lane = l.lane),
                 (select n from onceq.lane_limits where lane = pg_catalog.left(l.lane, pg_catalog.strpos(pg_catalog.substr(l.lane, 2), '/') + 1)), 1) < 2147483647 and (exists (select from onceq.jobs where id = p.id and (lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, E'\x1f'))) offset 0)
                  or exists (select from onceq.job_waits where id = p.id and lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || E'\x1f') offset 0)) offset 0) c) end),
       pg_catalog.count(lane), coalesce(pg_catalog.max(lane), ''), statement_timestamp()
  from line;

-- reap.go: ForgetMembers
with page as materialized (
  select group_id, job_id, state, told from onceq.job_members
   where (group_id, job_id) > ($1::bigint, $2::bigint)
   order by group_id, job_id
   limit $3::int
),
gone as (
  update onceq.job_members m set state = 7
    from (select p.group_id, p.job_id from page p
           where p.told and p.state in (0, 6, 8)
             and not exists (select from onceq.jobs j where j.id = p.job_id offset 0)
             and not exists (select from onceq.job_waits o where o.id = p.job_id offset 0)
             and not exists (select from onceq.job_history h where h.id = p.job_id offset 0)
             and exists (select from onceq.job_waits w where w.id = p.group_id and pg_catalog.starts_with(w.lane, E'\x1f') offset 0)
          offset 0) g
   where m.group_id = any (array[g.group_id]) and m.job_id = g.job_id
     and m.told and m.state + 0 in (0, 6, 8)
)
select count(*), coalesce(pg_catalog.max(group_id), 0),
       coalesce((pg_catalog.array_agg(job_id order by group_id desc, job_id desc))[1], 0) from page;

-- reap.go: NoteOrphans
with d as materialized (
  select f.ctid from onceq.job_fences f
   where f.ctid >= $1::text::tid and f.ctid < $2::text::tid and f.job_id is not null and (
           f.class = 3 and f.finished_at is null
           and (f.state in (2, 3, 6) or f.state = 1 and f.leased_until <= $5::timestamptz)
        or f.class = 0 and f.state = 0
           and coalesce(f.finished_at <= $4::timestamptz, true))
     and not exists (select from onceq.jobs j where j.id = f.job_id and (f.class = 0 or coalesce(f.fingerprint = pg_catalog.int8send(coalesce(j.identity, (extract(epoch from pg_catalog.timezone('UTC', j.created_at)) * 1e6)::bigint)), true)))
     and not exists (select from onceq.job_waits w where w.id = f.job_id and (f.class = 0 or coalesce(f.fingerprint = pg_catalog.int8send(coalesce(w.identity, (extract(epoch from pg_catalog.timezone('UTC', w.created_at)) * 1e6)::bigint)), true)))
     and not exists (select from onceq.job_history h where h.id = f.job_id and h.state in (6, 7, 8) and (f.class = 0 or coalesce(f.fingerprint = pg_catalog.int8send(coalesce(h.identity, (extract(epoch from pg_catalog.timezone('UTC', h.created_at)) * 1e6)::bigint)), true)))
   limit $3::int
     for update of f skip locked
),
noted as (
  update onceq.job_fences f
     set state = case when f.finished_at is null then f.state else 5 end, finished_at = $5::timestamptz,
         token = case when f.finished_at is null then f.token else f.token | 1::bigint end
   where f.ctid = any (array (select ctid from d)) and f.job_id is not null and (
           f.class = 3 and f.finished_at is null
           and (f.state in (2, 3, 6) or f.state = 1 and f.leased_until <= $5::timestamptz)
        or f.class = 0 and f.state = 0
           and coalesce(f.finished_at <= $4::timestamptz, true))
  returning f.state
)
select count(*) filter (where state <> 5), count(*) filter (where state = 5) from noted;

-- reap.go: ReadFences
select pg_catalog.pg_relation_size('onceq.job_fences'::regclass) / pg_catalog.current_setting('block_size')::bigint,
       pg_catalog.pg_stat_get_tuples_inserted('onceq.job_fences'::regclass);

-- reap.go: RemoveAwaits
with page as materialized (
  select a.job_id from onceq.job_awaits a where a.job_id > $1::bigint order by a.job_id limit $2::int
),
round as materialized (
  select p.job_id, coalesce(least((select coalesce(j.identity, (extract(epoch from pg_catalog.timezone('UTC', j.created_at)) * 1e6)::bigint) from onceq.jobs j where j.id = p.job_id),
                                  (select coalesce(w.identity, (extract(epoch from pg_catalog.timezone('UTC', w.created_at)) * 1e6)::bigint) from onceq.job_waits w where w.id = p.job_id),
                                  (select coalesce(h.identity, (extract(epoch from pg_catalog.timezone('UTC', h.created_at)) * 1e6)::bigint) from onceq.job_history h where h.id = p.job_id and h.state <> 5)),
                            9223372036854775807) as earliest
    from (select distinct job_id from page) p
),
d as materialized (
  select a.place
    from round r cross join lateral (
         select ctid as place from onceq.job_awaits where job_id = r.job_id and identity < r.earliest for update skip locked) a
),
gone as (
  delete from onceq.job_awaits where ctid = any (array (select place from d))
  returning 1
)
select (select count(*) from gone), (select count(*) from page), (select pg_catalog.max(job_id) from page);

-- reap.go: RemoveHistory
with d as materialized (
  select h.ctid as place, h.state = 7 and exists (
           select from onceq.job_fences f
            where f.class = 3 and f.scope = h.queue and f.key >= h.id::text collate "C" || '/' and f.key < h.id::text collate "C" || '0' and coalesce(f.fingerprint = pg_catalog.int8send(coalesce(h.identity, (extract(epoch from pg_catalog.timezone('UTC', h.created_at)) * 1e6)::bigint)), true) and f.state in (1, 2, 6)) as open
    from onceq.job_history h
   where keep_until <= statement_timestamp()
   order by keep_until
   limit $1::int
     for update of h skip locked
),
stays as (
  update onceq.job_history
     set keep_until = statement_timestamp() + $2::bigint::float8 * interval '1 millisecond'
   where ctid = any (array (select place from d where open)) and keep_until <= statement_timestamp()
  returning id
),
gone as (
  delete from onceq.job_history
   where ctid = any (array (select place from d where not open)) and keep_until <= statement_timestamp()
  returning id
)
select (select count(*) from gone), (select count(*) from stays);

-- reap.go: forgetStops
delete from onceq.lane_stops s
 where not exists (select from onceq.job_history h where h.id = s.id offset 0);

-- reap.go: removeFences
with d as materialized (
  select f.ctid from onceq.job_fences f
   where f.ctid >= $1::text::tid and f.ctid < $2::text::tid and ((f.state in (3, 4, 5) or f.class = 3) and f.lifetime >= 0
     and pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= $4::timestamptz
      or f.class = 2 and f.state in (1, 2, 6) and f.lifetime >= 0
     and pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.leased_until) + (greatest(f.lifetime, $5::bigint) + $6::bigint)::float8 * interval '1 millisecond') <= $7::timestamptz)
   limit $3::int
     for update skip locked
),
gone as (
  delete from onceq.job_fences f
   where f.ctid = any (array (select ctid from d))
  returning f.class, f.state
)
select count(*) filter (where class <> 3 and f.state in (3, 4, 5)), count(*) filter (where class = 3),
       count(*) filter (where class <> 3 and not f.state in (3, 4, 5)) from gone f;

-- reap.go: removeMembers
with recursive page (id, n) as (
  (select group_id, 1 from onceq.job_members where group_id > $1::bigint order by group_id limit 1)
  union all
  select (select m.group_id from onceq.job_members m where m.group_id > p.id order by m.group_id limit 1), p.n + 1
    from page p where p.id is not null and p.n < $2::int
),
lost as materialized (
  select p.id from page p
   where p.id is not null
     and not exists (select from onceq.jobs j where j.id = p.id)
     and not exists (select from onceq.job_waits w where w.id = p.id)
     and not exists (select from onceq.job_history h where h.id = p.id)
),
d as materialized (
  select m.group_id, m.job_id
    from lost l cross join lateral (
         select group_id, job_id from onceq.job_members where group_id = l.id limit $2::int for update skip locked) m
   limit $2::int
),
gone as (
  delete from onceq.job_members m using d
   where m.group_id = any (array[d.group_id]) and m.job_id = d.job_id
  returning 1
)
select (select count(*) from gone), (select pg_catalog.count(id) from page), (select pg_catalog.max(id) from page);

-- reap.go: removeRest
with d as materialized (
  select ctid from onceq.waiters
   where idle_until <= statement_timestamp() - $2::bigint::float8 * interval '1 millisecond'
   limit $1::int
     for update skip locked
),
gone as (
  delete from onceq.waiters
   where ctid = any (array (select ctid from d))
     and idle_until <= statement_timestamp() - $2::bigint::float8 * interval '1 millisecond'
  returning worker
),
sets as (
  delete from onceq.waiter_queues
   where ctid = any (array (
         select s.ctid from onceq.waiter_queues s
          where not exists (select from onceq.waiters w where w.serves = s.serves) for update of s skip locked))
),
wakes as (
  delete from onceq.wakes
   where ctid = any (array (
         select x.ctid from onceq.wakes x
          where not exists (select from onceq.waiters w where w.worker = x.worker and w.round <= x.round) for update of x skip locked))
),
turns as (
  delete from onceq.turns
   where ctid = any (array (
         select ctid from onceq.turns where at <= statement_timestamp() - $2::bigint::float8 * interval '1 millisecond' for update skip locked))
),
pauses as (
  delete from onceq.pauses where until <= statement_timestamp()
),
rates as (
  delete from onceq.limit_rates
   where ctid = any (array (
         select ctid from onceq.limit_rates where free_at <= statement_timestamp() - interval '1 minute' for update skip locked))
),
workers as (
  delete from onceq.workers
   where ctid = any (array (
         select ctid from onceq.workers where seen_at <= statement_timestamp() - $3::bigint::float8 * interval '1 millisecond' limit $1::int for update skip locked))
  returning 1
),
counts as (
  delete from onceq.job_counts
   where ctid = any (array (
         select c.place
           from (values (1, $4::bigint), (10, $4::bigint), (60, $5::bigint)) s (span, kept)
          cross join lateral (
                select ctid as place from onceq.job_counts
                 where span = s.span
                   and minute <= statement_timestamp() - s.kept::float8 * interval '1 millisecond'
                 order by minute limit $1::int for update skip locked) c
          limit $1::int))
  returning 1
),
cancels as (
  delete from onceq.job_cancels
   where ctid = any (array (
         select x.ctid from onceq.job_cancels x
          where not exists (select from onceq.jobs j where j.id = x.job_id and j.created_at <= x.requested_at)
            and not exists (select from onceq.job_waits w where w.id = x.job_id and w.created_at <= x.requested_at)
          limit $1::int for update of x skip locked))
  returning 1
)
select (select count(*) from gone), (select count(*) from workers), (select count(*) from counts), (select count(*) from cancels);

-- replace.go: ReplaceJobs
select c.replaced, c.delayed, c.kept
  from onceq.replace_jobs($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::bytea[], $8::smallint[], $9::bigint[], $10::bigint[], $11::text[], $12::bytea[]) c;

-- rescan.go: AddQueues
insert into onceq.queues (queue, rescanned_at)
select u.queue, 'epoch' from onceq.meta, pg_catalog.unnest($1::text[]) as u(queue) order by u.queue collate "C"
on conflict do nothing;

-- rescan.go: RescanFirst
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
 order by q.n;

-- rescan.go: RescanLeft
update onceq.queues set left_kinds = $2::text[] where queue = $1::text
   and coalesce(left_kinds operator(pg_catalog.<>) $2::text[], (left_kinds is null) <> ($2::text[] is null));

-- rescan.go: RescanPage
with page as materialized (
  select id, run_at, leased_until, lost, kind, row_number() over (order by run_at, id) as n
    from onceq.jobs
   where queue = $1::text and priority = $2::smallint
     and (run_at, id) > ($3::timestamptz, $4::bigint) and (run_at, id) < ($5::timestamptz, $6::bigint)
   order by run_at, id
   limit $8::int
),
ready as materialized (
  select j.id, case when j.slotted then least($5::timestamptz, statement_timestamp() - interval '1 second') else $5::timestamptz end as due
    from page p
   cross join lateral (
         select id, run_at, (pg_catalog.right(lane, 2) = E'\x1f' || '@') is true as slotted
           from onceq.jobs
          where id = p.id and leased_until is null
            for no key update skip locked) j
   where p.leased_until is null and p.lost = 0 and p.kind = any ($7::text[])
     and (not j.slotted or j.run_at < least($5::timestamptz, statement_timestamp() - interval '1 second') - interval '1 second')
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
       (select pg_catalog.array_agg(id) from lost), (select pg_catalog.array_agg(lost) from lost);

-- rescan.go: RescanTurn
select q from onceq.rescan_turn($1::text[], $2::bigint, $3::text[]) r cross join pg_catalog.unnest(r) q;

-- silent.go: whoWorks
select pg_backend_pid(), array(
       select pid from pg_catalog.pg_stat_activity
        where (pid = any ($1::int[]) or pid = any ($2::int[])) and wait_event_type is distinct from 'Client'
           or pid = any ($2::int[]) and wait_event = 'ClientRead' and state = 'active');

-- statement.go: BeginOwn
begin isolation level read committed read write;

-- statement.go: GuardPlans
select statement_timestamp(), pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),
       pg_catalog.set_config('enable_mergejoin', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true), pg_catalog.set_config('jit', 'off', true);

-- statement.go: Hot
select statement_timestamp(), pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),
       pg_catalog.set_config('enable_mergejoin', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true), pg_catalog.set_config('jit', 'off', true), pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true), pg_catalog.set_config('statement_timeout', '0', true), pg_catalog.set_config('lock_timeout', '0', true),
       case when pg_catalog.current_setting('transaction_timeout', true) <> '0' then pg_catalog.set_config('transaction_timeout', '0', true) end;

-- statement.go: HotPlans
select statement_timestamp(), pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),
       pg_catalog.set_config('enable_mergejoin', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true), pg_catalog.set_config('jit', 'off', true), pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true);

-- statement.go: Inside.read
select coalesce(pg_catalog.current_setting('onceq.open', true), '') = 'on';

-- statement.go: Inside.set
select pg_catalog.set_config('onceq.open', 'on', true) = 'on';

-- statement.go: KeepPlans
select pg_catalog.set_config('onceq.plans', pg_catalog.concat_ws(',', pg_catalog.current_setting('enable_seqscan'), pg_catalog.current_setting('enable_hashjoin'),
                  pg_catalog.current_setting('enable_mergejoin'), pg_catalog.current_setting('enable_bitmapscan'), pg_catalog.current_setting('jit')), true),
       pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),
       pg_catalog.set_config('enable_mergejoin', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true), pg_catalog.set_config('jit', 'off', true);

-- statement.go: Rare
select statement_timestamp(), pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),
       pg_catalog.set_config('enable_mergejoin', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true), pg_catalog.set_config('jit', 'off', true), pg_catalog.set_config('statement_timeout', '0', true), pg_catalog.set_config('lock_timeout', '0', true),
       case when pg_catalog.current_setting('transaction_timeout', true) <> '0' then pg_catalog.set_config('transaction_timeout', '0', true) end;

-- statement.go: RestorePlans
select pg_catalog.set_config('enable_seqscan', pg_catalog.split_part(p, ',', 1), true), pg_catalog.set_config('enable_hashjoin', pg_catalog.split_part(p, ',', 2), true),
       pg_catalog.set_config('enable_mergejoin', pg_catalog.split_part(p, ',', 3), true), pg_catalog.set_config('enable_bitmapscan', pg_catalog.split_part(p, ',', 4), true),
       pg_catalog.set_config('jit', pg_catalog.split_part(p, ',', 5), true)
  from pg_catalog.current_setting('onceq.plans') as p;

-- statement.go: askCitus
select pg_catalog.current_setting('citus.version', true) is not null;

-- statement.go: lockTimeout
select pg_catalog.set_config('lock_timeout', $1::text, true) from onceq.meta;

-- statement.go: rollBack
rollback;

-- successors.go: FinishNext
select f.done, f.calls,
       j.id, j.claims, j.lost, j.attempts, j.max_attempts, j.priority, j.run_at, j.created_at, j.leased_until,
          j.kind, coalesce(j.scope, ''), coalesce(j.key, ''), coalesce(j.payload::text, ''), j.payload_bytes,
          coalesce(j.metadata::text, ''), j.identity, j.due_at, 0, (select true from onceq.job_cancels x where x.job_id = j.id and x.requested_at >= j.created_at), false, j.lane, j.lane_rule
  from onceq.finish_next($1::bigint, $2::int, $3::bigint, $4::text, $5::bool, $6::bigint, $7::bigint, $8::text, $9::text[]) f
  left join lateral (select (f.leased).* offset 0) j on true;

-- successors.go: GiveBackFirst
update onceq.jobs j set leased_until = null, holder = null
  from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select id from onceq.jobs
        where queue = $1::text and priority = p.priority and run_at > statement_timestamp() - $2::bigint::float8 * interval '1 microsecond'
          and run_at <= statement_timestamp() and holder = $3::bigint
       offset 0) f
 where j.id = any (array[f.id]) and j.holder = $3::bigint;

-- successors.go: GiveBackNext
update onceq.jobs j set leased_until = null, holder = null
  from onceq.lane_places p
 where p.lane = any ($1::text[]) and j.id = any (array[p.id]) and j.holder = $2::bigint;

-- table.go: DiscardJobs
select n from onceq.discard($1::bigint[], $2::smallint[]) n;

-- table.go: HurryJobs
select n from onceq.hurry($1::bigint[]) n;

-- table.go: MoveJobs
select n from onceq.move($1::bigint[], $2::text, $3::bigint, $4::bool) n;

-- table.go: ResolveEffects
select e.settled, e.held from onceq.resolve_effects($1::bigint[], $2::smallint[], $3::smallint, $4::text, $5::text) e;

-- taken.go: Explain.read
select u.n, p.payload, p.payload_bytes
  from pg_catalog.unnest($1::bigint[]) with ordinality as u(id, n)
 cross join lateral (
       (select j.payload::text as payload, j.payload_bytes from onceq.jobs j where j.id = u.id)
       union all
       (select w.payload::text, w.payload_bytes from onceq.job_waits w where w.id = u.id)
       union all
       (select h.payload::text, h.payload_bytes from onceq.job_history h where h.id = u.id)
       limit 1) p;

-- taken.go: settle
select onceq.next_id('onceq.ids', $1::bigint);

-- turn.go: awaitTurn
select pg_catalog.set_config('lock_timeout', '1s', true), pg_catalog.pg_advisory_xact_lock($1::bigint), pg_catalog.set_config('lock_timeout', '0', true),
       clock_timestamp(), (extract(epoch from clock_timestamp() - statement_timestamp()) * 1e6)::bigint;

-- turn.go: takeTurn
select pg_catalog.pg_try_advisory_xact_lock($1::bigint), statement_timestamp();

-- tx.go: CheckTx
select null,
       case when $1::text <> pg_current_xact_id()::text
            then case when pg_catalog.pg_xact_status($1::text::xid8) = 'committed' then 1 else onceq.lease_lost($2::bigint) end end;

-- tx.go: CommittedLock
select coalesce((select pg_catalog.xideq(xmax, pg_catalog.xid($1::text::xid8)) from onceq.jobs where id = $2::bigint), false),
       (select 1 from onceq.jobs where id = $2::bigint for no key update),
       coalesce(pg_catalog.pg_xact_status($1::text::xid8) = 'committed', false);

-- tx.go: CommittedTx
select coalesce(pg_catalog.pg_xact_status($1::text::xid8) = 'committed', false);

-- tx.go: InTx completeOne
with gone as (
  delete from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint
  returning id, scope, key
),
fence as (
  update onceq.job_fences f
     set state = 3, token = $4::bigint, finished_at = statement_timestamp(), result = nullif($5::text, '')::jsonb
    from gone g
   where f.key = any (array[g.key]) and f.scope = g.scope and f.class + 0 = 0 and f.job_id = g.id
)
select case when not exists (select from gone) then onceq.lease_lost($1::bigint) end,
       case when $6::text <> pg_current_xact_id()::text
            then case when pg_catalog.pg_xact_status($6::text::xid8) = 'committed' then 1 else onceq.lease_lost($1::bigint) end end;

-- tx.go: InTx completeOneUnkeyed
with gone as (
  delete from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint
  returning id
)
select case when not exists (select from gone) then onceq.lease_lost($1::bigint) end,
       case when $4::text <> pg_current_xact_id()::text
            then case when pg_catalog.pg_xact_status($4::text::xid8) = 'committed' then 1 else onceq.lease_lost($1::bigint) end end;

-- tx.go: LockJob
select case when $1::text <> '' then pg_catalog.set_config('idle_in_transaction_session_timeout', $1::text, true) end,
       case when not exists (
         select from onceq.jobs where id = $2::bigint and claims = $3::int and holder = $4::bigint
            for no key update) then onceq.lease_lost($2::bigint) end,
       pg_current_xact_id()::text;

-- tx.go: LockJobs
with u as materialized (
  select * from unnest($2::bigint[], $3::int[], $4::bigint[]) as u(id, claims, holder)
),
locked as materialized (
  select j.id from u cross join lateral (
         select id from onceq.jobs
          where id = u.id and claims = u.claims and holder = u.holder
            for no key update) j
)
select case when $1::text <> '' then pg_catalog.set_config('idle_in_transaction_session_timeout', $1::text, true) end,
       case when (select count(*) from locked) < pg_catalog.cardinality($2::bigint[]) then onceq.lease_lost(($2::bigint[])[1]) end,
       pg_current_xact_id()::text;

-- tx.go: newHandlerTx
begin isolation level serializable read write;

-- tx.go: opBegin
begin;

-- uncertain.go: KeepDoubt
update onceq.job_fences f set leased_until = statement_timestamp()
 where f.class = $1::smallint and f.scope = $2::text and f.key = $3::text and f.token = $4::bigint
   and f.state in (1, 2, 6) and f.leased_until < statement_timestamp()
returning f.token;

-- uncertain.go: ResolveFence
select f from onceq.resolve_fence($1::smallint, $2::text, $3::text, $4::smallint, $5::text, $6::bigint) f;
