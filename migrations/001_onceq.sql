-- The tables of onceq, and how work goes through them. The library holds the statements; here is the map.
--
-- The way of a job. Enqueue draws an id and inserts a row into jobs. If the job has a key, the same statement first takes
-- the key: a row of job_fences. A worker claims the job by an update of its row, which gives it a token, a holder and the end of a
-- lease. A beat every third of the lease moves that end. A failed attempt gives the row back with a later run_at. When the
-- job is finished, one statement deletes its row from jobs, writes the outcome into its fence and, if people may
-- want to look at it later, a row into job_history.
--
--   meta         One row. Migrations insert it, Queue.NewInstallation changes it. Queue.Check reads the version; the
--                keys that go to providers contain the installation. It never leaves.
--   ids          A sequence. New jobs draw their ids from it, and new fences outside jobs their first tokens.
--   jobs         One row for each unfinished job. Enqueue and Redrive insert it. Claims, beats, failures and Retry update it.
--                Claims, Stats, Get and List read it. It leaves when the job is completed, dead, held or cancelled.
--   job_fences   One row for each taken key: of a job, of an effect of a job (Once), of the application (Do, Fence), or of a
--                client's request. Taking the key inserts it, and finishing the work updates it. Duplicates
--                read their answer from it. It leaves by the Reaper, a grace time after its window.
--   job_history  One row for each finished job that people may want to see. A dead, held or cancelled job always goes there,
--                a completed one if its kind or queue says so. Get and List read it. It leaves by Redrive, which moves it back to
--                jobs, by Discard, or by the Reaper after keep_until.
--   job_cancels  One row for each request to cancel a job that a worker holds. Cancel inserts it, the worker's next beat and the
--                next claim read it. The Reaper removes it when the job is gone, a Redrive at once.
--   queues       One row for each queue that a worker has served. Workers write and read it to take turns at the rescan, the search
--                for what is behind their cursors. It never leaves.
--   waiters      One row for each idle worker and queue. Workers insert and delete it, and Enqueue reads it to decide
--                whether to notify. What a killed worker left is removed by the Reaper.
--
-- Locks are taken in one order: rows of jobs or job_history by id, then rows of job_fences. doc.go says more.
--
-- Names compare by bytes (collate "C"), whatever the database's locale. A column's place is chosen so that
-- the wide fixed columns come first and nothing is lost to alignment.

-- One row: what Queue.Check reads, and the random part of every downstream idempotency key.
create table {{.schema}}.meta (
  only_row     boolean primary key default true check (only_row),
  version      integer not null,
  installation uuid    not null default gen_random_uuid()
);
insert into {{.schema}}.meta (version) values (1);

-- Ids of jobs, and the upper 43 bits of every token; the lower 20 bits count the claims.
create sequence {{.schema}}.ids as bigint maxvalue 8796093022207;

-- Live jobs only: waiting, delayed, leased, to be retried. A finished job leaves this table. What a claim changes stands
-- together: the write-ahead log leaves out what an update has in common with the row before it, at its start and its end.
create table {{.schema}}.jobs (
  id            bigint      not null,
  run_at        timestamptz not null,
  created_at    timestamptz not null,
  leased_until  timestamptz,             -- null: nobody has it
  holder        bigint,                  -- random number of the claim that has it
  claims        integer     not null default 0,
  lost          smallint    not null default 0,  -- leases that ran out
  ahead         boolean,                 -- claimed before a handler was free, and not known to run yet; null: no
  attempts      smallint    not null default 0,  -- failures that were reported
  max_attempts  smallint    not null,
  priority      smallint    not null,
  queue         text collate "C" not null,
  kind          text collate "C" not null,
  scope         text collate "C",        -- scope and key of its fence; null without a key
  key           text collate "C",
  payload       jsonb,                   -- one of payload and payload_bytes
  payload_bytes bytea,
  metadata      jsonb,
  errors        jsonb,                   -- of the latest failed attempts, oldest first
  identity      bigint                   -- names its effects, see effectMark; null for created_at in microseconds
) with (fillfactor = 45, vacuum_truncate = off);

-- The one index of a claim. Nothing that a claim changes is in it, so that a claim is a heap-only update. Its condition
-- holds for every row and keeps the planner from looking a job up by its id in it, which reads all of it: a statement
-- that names no queue cannot use it. Where a full table was analyzed, then drained and vacuumed, the planner would.
create index jobs_claim on {{.schema}}.jobs (queue, priority, run_at, id) where queue is not null;

alter table {{.schema}}.jobs add constraint jobs_pkey primary key (id);

-- Every claim changes these; statistics on them mislead the planner more than they help.
alter table {{.schema}}.jobs alter leased_until set statistics 0;
alter table {{.schema}}.jobs alter holder       set statistics 0;
alter table {{.schema}}.jobs alter claims       set statistics 0;
alter table {{.schema}}.jobs alter lost         set statistics 0;
alter table {{.schema}}.jobs alter attempts     set statistics 0;
alter table {{.schema}}.jobs alter ahead        set statistics 0;

-- One row per taken (class, scope, key): the only arbiter of uniqueness. States and classes: state.go.
create table {{.schema}}.job_fences (
  job_id       bigint,                   -- the job that the key belongs to; null outside of jobs
  token        bigint      not null,     -- greatest token under which the key was held
  holder       bigint,
  leased_until timestamptz,
  created_at   timestamptz not null,
  finished_at  timestamptz,
  lifetime     bigint      not null,     -- milliseconds after finished_at; 0 until finished, -1 for ever
  class        smallint    not null,
  state        smallint    not null,
  scope        text collate "C" not null,
  key          text collate "C" not null,
  fingerprint  bytea,                    -- what later users of the key must have in common: job.go; of an effect, effectMark
  result       jsonb,
  detail       text,                     -- why it is uncertain or held
  -- The most selective column first and nothing before it: taking a key costs 7.1 µs of the server's time in
  -- place of 8.2 with (class, scope, key), for which each comparison walks over two equal columns.
  primary key (key, scope, class)
) with (fillfactor = 50, vacuum_truncate = off);

-- Some pages that stay (vacuum_truncate): on a table that is believed to have none, a plan that looks one row up
-- reads the whole table, and is kept when that has grown.
insert into {{.schema}}.jobs (id, run_at, created_at, max_attempts, priority, queue, kind)
select -n, 'infinity', 'infinity', 0, 0, '', '' from generate_series(1, 1000) n;
delete from {{.schema}}.jobs;
insert into {{.schema}}.job_fences (token, created_at, lifetime, class, state, scope, key)
select 0, 'infinity', 0, 0, 0, '', n from generate_series(1, 2000) n;
delete from {{.schema}}.job_fences;

-- Finished jobs for people to look at: dead and held ones until somebody decides, others until keep_until.
create table {{.schema}}.job_history (
  id            bigint      not null primary key,
  run_at        timestamptz not null,
  created_at    timestamptz not null,
  finished_at   timestamptz not null,
  keep_until    timestamptz,             -- null: until somebody decides
  claims        integer     not null,
  lost          smallint    not null,
  attempts      smallint    not null,
  max_attempts  smallint    not null,
  priority      smallint    not null,
  state         smallint    not null,
  queue         text collate "C" not null,
  kind          text collate "C" not null,
  scope         text collate "C",
  key           text collate "C",
  payload       jsonb,
  payload_bytes bytea,
  metadata      jsonb,
  result        jsonb,
  errors        jsonb,
  identity      bigint
);
create index job_history_state on {{.schema}}.job_history (queue, state, id);
create index job_history_keep  on {{.schema}}.job_history (keep_until) where keep_until is not null;

-- Requests to cancel a job that somebody holds; its holder reads them with the beat.
create table {{.schema}}.job_cancels (
  job_id       bigint      not null primary key,
  requested_at timestamptz not null
);

-- One row per queue that a worker has rescanned: when, so that one worker at a time does, for what claims have passed.
create table {{.schema}}.queues (
  queue    text collate "C" not null primary key,
  swept_at timestamptz not null
);

-- Workers that wait with a confirmed listener. Enqueue notifies only when there is one. Rebuilt by the
-- workers themselves, hence unlogged: a crash may lose it and costs one poll.
create unlogged table {{.schema}}.waiters (
  queue      text collate "C" not null,
  worker     bigint not null,
  idle_until timestamptz not null,
  primary key (queue, worker)
) with (fillfactor = 50);

-- What a completion inside somebody's transaction calls when its lease is gone: an error stops the commit
-- that stands behind it in the same pipeline; an update of no rows would not.
create function {{.schema}}.lease_lost(job bigint) returns bigint
language plpgsql as $$
begin
  raise exception 'onceq: the lease of job % is lost', job using errcode = 'OQ001';
end
$$;

-- What a job calls that leaves for a history where another job, which waits for a person, has its id.
create function {{.schema}}.id_taken(job bigint) returns bigint
language plpgsql as $$
begin
  raise exception 'the history has another job with the id %, which waits for a person: redrive or discard that one', job using errcode = 'OQ002';
end
$$;

-- The next id above a floor: ids of a key's later jobs stay above those of its earlier ones even where a
-- crash or a failover made the sequence forget its latest values.
create function {{.schema}}.next_id(ids regclass, above bigint) returns bigint
language plpgsql as $$
declare
  id bigint;
begin
  loop
    id := nextval(ids);
    exit when id > above;
  end loop;
  return id;
end
$$;

-- Takes a job's key that is no longer in force (fenceFree in fence.go says which, and a test compares) for a new job,
-- and gives its id; null where the key is in force. Plans that read the whole table are off, as one may be made while it is empty.
create function {{.schema}}.take_fence(ids regclass, scope text, key text, lifetime bigint, fingerprint bytea) returns bigint
language plpgsql set enable_seqscan = off set enable_bitmapscan = off as $take_fence$
#variable_conflict use_column
declare
  above bigint;
  taken bigint;
begin
  select greatest(f.token >> 20, f.job_id) into above
    from {{.schema}}.job_fences f
   where f.class = 0 and f.scope = take_fence.scope and f.key = take_fence.key
     and f.state in (3, 4, 5) and f.lifetime >= 0
     and f.finished_at + f.lifetime * interval '1 millisecond' <= statement_timestamp()
     for update;
  if found then
    taken := {{.schema}}.next_id(ids, above);
    update {{.schema}}.job_fences f
       set job_id = taken, token = taken << 20, state = 0, created_at = statement_timestamp(), finished_at = null,
           lifetime = take_fence.lifetime, fingerprint = take_fence.fingerprint, result = null, holder = null, leased_until = null
     where f.class = 0 and f.scope = take_fence.scope and f.key = take_fence.key;
  else -- in force, or pruned since the caller's statement met it
    insert into {{.schema}}.job_fences as f (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint)
    select 0, take_fence.scope, take_fence.key, 0, n.id, n.id << 20, statement_timestamp(), take_fence.lifetime, take_fence.fingerprint
      from (select nextval(ids) as id offset 0) n
    on conflict do nothing
    returning f.job_id into taken;
  end if;
  return taken;
end
$take_fence$;

---- create above / drop below ----

drop function {{.schema}}.take_fence(regclass, text, text, bigint, bytea);
drop function {{.schema}}.next_id(regclass, bigint);
drop function {{.schema}}.id_taken(bigint);
drop function {{.schema}}.lease_lost(bigint);
drop table {{.schema}}.waiters;
drop table {{.schema}}.queues;
drop table {{.schema}}.job_cancels;
drop table {{.schema}}.job_history;
drop table {{.schema}}.job_fences;
drop table {{.schema}}.jobs;
drop sequence {{.schema}}.ids;
drop table {{.schema}}.meta;
