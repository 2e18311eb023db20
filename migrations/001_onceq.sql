-- The tables of onceq, and how work goes through them. The statements are in the library.
--
-- A job's way: Enqueue draws an id and inserts a row into jobs. If the job has a key, the same statement first takes
-- the key: a row of job_fences. A worker claims the job by an update of its row, which gives it a token, a holder and the end of a
-- lease. A beat every third of the lease moves that end. A failed attempt gives the row back with a later run_at. When the
-- job is finished, one statement deletes its row from jobs, writes the outcome into its fence and, if people may
-- want to look at it later, a row into job_history.
--
--   meta         One row. Migrations insert it, Queue.NewInstallation changes it. Queue.Check reads the version; the
--                keys that go to providers contain the installation. It is never deleted.
--   ids          A sequence. New jobs draw their ids from it, and new fences outside jobs their first tokens.
--   jobs         One row for each unfinished job. Enqueue and Redrive insert it. Claims, beats, failures and Retry update it.
--                Claims, Stats, Get and List read it. It is deleted when the job is completed, dead, held or cancelled.
--   job_waits    One row for each job with a lane (Kind.Lane) whose turn it is not yet, or that waits for other jobs (Job.After).
--                Enqueue and Redrive insert it. Claims never see it. The completion of the job before it in its lane, or a
--                worker's promoter, moves it to jobs.
--   job_members  One row for each job that another one waits for: the other one is its follower, and both belong to a group, whose
--                id is the follower's. Enqueue inserts it, and the statement that ends the job writes there how it ended.
--   lane_places  One row for each job with a lane that is in jobs. Who moves the job there inserts it, and who takes it out deletes
--                it, in the same statement. The promoters count the jobs of a lane by it.
--   lane_stops   One row for each dead or held job that stops its lane (StopLane). The statement that ends the job inserts it,
--                Redrive and Discard delete it.
--   lane_calls   One row for each thing that may let a lane go on: a job that was enqueued, one that finished without a
--                successor, another limit. It is written in the same commit. The promoters delete it when they have looked.
--   lane_limits  How many jobs of a lane, or of a limit (Kind.Limit), may be in jobs at once, and how many may start in a time, where
--                that is not one at a time. Queue.SetLaneLimit and SetLimit write it.
--   limit_rates  One row for each limit with a rate that has been used: how much of it. Promoters write it for each batch of
--                jobs to which they give slots, and workers for jobs that missed theirs.
--   lane_locks   A fixed number of rows. A promoter locks one before it counts the jobs of the lanes that belong to it. Queue.Check
--                and promoters put back those that are missing, and the row of lane_calls without a lane, which is always there.
--   job_fences   One row for each taken key: of a job, of an effect of a job (Once), of the application (Do, Fence), of a
--                client's request, or of an event (Emit). Taking the key inserts it, and finishing the work updates it. Duplicates
--                read their answer from it. The Reaper deletes it, a grace time after its window.
--   job_history  One row for each finished job that people may want to see. A dead, held or cancelled job always goes there,
--                a completed one if its kind or queue says so. Get and List read it. Redrive moves it back to
--                jobs; Discard deletes it, and so does the Reaper after keep_until.
--   job_cancels  One row for each request to cancel a job that a worker holds. Cancel inserts it, the worker's next beat and the
--                next claim read it. The Reaper deletes it after the job is gone; a Redrive deletes it at once.
--   job_awaits   One row for each Await and each Sleep of a job, with what came of it. The handler's calls write it, and Emit. The
--                Reaper deletes it when its job is gone. Events themselves are rows of job_fences.
--   queues       One row for each queue that a worker has served. Workers write and read it to take turns at the rescan, the search
--                for jobs before their cursors. It is never deleted.
--   workers      One row for each worker that runs, for people and for Explain. Workers write it once a minute and delete it when
--                they end. The Reaper deletes the rows of killed workers.
--   job_counts   One row for each minute, queue and kind of which a worker has counted something, for plots. All workers add to it,
--                once a minute each. The Reaper deletes it after a day.
--   pauses       One row for each queue or kind that is paused. PauseQueue and PauseKind insert it, ResumeQueue and ResumeKind
--                delete it. Workers read it about twice a second, together with their claims.
--   schedules    One row for each schedule of onceqcron. A tick's handler reads it and writes the next tick's time.
--   schedule_ticks  One row for each tick that was fired, and for each run of missed or paused ones. Ticks insert it, and delete those
--                that were kept long enough.
--   actions      One row for each thing that a person did to jobs through onceqweb or a tool that calls RecordAction. It is
--                never changed or deleted.
--   v_jobs, v_queues, v_effects, v_keys, v_workers, v_pauses, v_schedules, v_actions, v_counts   Views for people; at the end.
--   waiters      One row for each worker that has ever been idle. Workers write it when they begin and cease to wait, and
--                delete it when they end, or where enough others wait. Enqueue reads it to choose whom to wake. The Reaper deletes
--                the rows of a killed worker.
--   waiter_queues  One row for each queue of each set of queues that workers serve, so that a worker announces itself with
--                one row. Workers insert it; the Reaper deletes the sets that nobody serves any more.
--   wakes        One row for each time that a worker was woken for a queue. Enqueue inserts it, beside the notification, and the
--                worker deletes it when it waits again. A worker that never does is woken once. The row also says whether the
--                worker goes on looking, so that jobs which come soon after need nobody else.
--   turns        One row for each queue with a backlog and each set of kinds that is claimed there: how far claims have come.
--                Claims that take turns read and write it. The Reaper deletes rows that are no longer written.
--
-- Locks are taken in one order: rows of jobs or job_history by id, then rows of job_fences. doc.go says more.
--
-- Names compare by bytes (collate "C"), whatever the database's locale. The wide columns of
-- fixed size come first, so that no space is lost to alignment.

-- One row: what Queue.Check reads, and the random part of every downstream idempotency key. A later migration sets version to its
-- own number. Code of an earlier version goes on working while it migrates and afterwards, so it only adds: tables, indexes,
-- functions, columns that may be absent from an insert. One that takes something away from code raises oldest_code to the first
-- version that does without.
create table {{.schema}}.meta (
  only_row     boolean primary key default true check (only_row),
  version      integer not null,
  oldest_code  integer not null default 1,  -- the lowest version of code that works with these tables
  installation uuid    not null default gen_random_uuid()
);
insert into {{.schema}}.meta (version) values (1);

-- Ids of jobs, and the upper 43 bits of every token; the lower 20 bits count the claims.
create sequence {{.schema}}.ids as bigint maxvalue 8796093022207;

-- Live jobs only: waiting, delayed, leased, to be retried. A finished job leaves this table. The columns that a claim
-- changes stand together: the write-ahead log leaves out the start and the end that the new row shares with the old one.
create table {{.schema}}.jobs (
  id            bigint      not null,
  run_at        timestamptz not null,
  created_at    timestamptz not null,
  leased_until  timestamptz,             -- null: not leased
  holder        bigint,                  -- random number of the claim that leased it; a worker's claims share the upper half
  claims        integer     not null default 0,
  lost          smallint    not null default 0,  -- leases that expired
  ahead         boolean,                 -- claimed before a handler was free, and not known to run yet; null: no
  attempts      smallint    not null default 0,  -- reported failures
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
  identity      bigint,                  -- names its effects, see effectMark; null for created_at in microseconds
  progress      jsonb,                   -- of its latest run, if that had a beat: when it began, and what its handler reported
  due_at        timestamptz,             -- of one that was let in after it waited in job_waits, until it is tried again: when it was due; null: at run_at
  lane          text collate "C",        -- family/name of its lane; null for none; with a limit, limit.go says what else
  lane_rule     smallint                 -- 1: a failed job leaves its place, 2: a dead or held one stops the lane, 3: both, 0: neither;
                                         -- and 4: the job is in job_members, so its end must be told; null: no lane, and not told
) with (fillfactor = 45, vacuum_truncate = off);

-- The only index that a claim uses. It contains no column that a claim changes, so a claim is a heap-only update. Its
-- condition holds for every row. It keeps statements that name no queue from using this index: if a full table was
-- analyzed, then drained and vacuumed, the planner would look up a job by its id in it, and read all of it.
create index jobs_claim on {{.schema}}.jobs (queue, priority, run_at, id) where queue is not null;

alter table {{.schema}}.jobs add constraint jobs_pkey primary key (id);

-- Jobs that wait for their lane, or for other jobs; the columns mean what they mean in jobs. run_at is the job's place in the
-- lane, within its priority.
create table {{.schema}}.job_waits (
  id            bigint      not null,
  run_at        timestamptz not null,
  created_at    timestamptz not null,
  claims        integer     not null default 0,
  lost          smallint    not null default 0,
  attempts      smallint    not null default 0,
  max_attempts  smallint    not null,
  priority      smallint    not null,
  lane_rule     smallint    not null,
  if_dead       smallint,                -- of one that waits for other jobs: what a dead one of these means (DeadRule)
  lane          text collate "C" not null, -- what it waits for now: its lane, its limit after a slash, or other jobs: U+001F and its id, 19 digits
  path          text collate "C",        -- of a job with a limit: its lane and its limit, as in jobs.lane. Of one that waits for others:
                                         -- the same, its lane alone, or empty for neither
  queue         text collate "C" not null,
  kind          text collate "C" not null,
  scope         text collate "C",
  key           text collate "C",
  payload       jsonb,
  payload_bytes bytea,
  metadata      jsonb,
  errors        jsonb,
  identity      bigint,
  due_at        timestamptz              -- when it was due, where run_at is only its place; null: at run_at
) with (vacuum_truncate = off);
-- The conditions hold for every row, as that of jobs_claim.
create index job_waits_lane  on {{.schema}}.job_waits (lane, priority, run_at, id) where lane is not null;
create index job_waits_queue on {{.schema}}.job_waits (queue, id) where queue is not null;
alter table {{.schema}}.job_waits add constraint job_waits_pkey primary key (id);

-- The jobs that others wait for. No index has what the end of a job changes here, so that it is a heap-only update.
create table {{.schema}}.job_members (
  group_id bigint   not null,            -- the job that waits
  job_id   bigint   not null,
  state    smallint not null,            -- 0: not finished, else the State in which the job ended. What was discarded counts as cancelled
  told     boolean  not null,            -- the job's lane_rule says that its end must be told; false: a worker had the job, and the
                                         -- promoters look for its end
  result   jsonb,                        -- of a completed job
  primary key (group_id, job_id)
) with (fillfactor = 45, vacuum_truncate = off);
create index job_members_job    on {{.schema}}.job_members ((job_id + 0)); -- the primary key cannot serve job_id + 0, however small the table is
create index job_members_untold on {{.schema}}.job_members (job_id) where not told;

-- The live jobs of the lanes, and the dead and held jobs that stop one. A place whose job is not there any more counts
-- for nothing. These are not indexes of jobs and job_history, because each insert there, of a job without a lane too, would open
-- them, which takes a tenth of its time.
create table {{.schema}}.lane_places (
  lane text collate "C" not null,
  id   bigint not null,
  primary key (lane, id)
) with (vacuum_truncate = off);
create table {{.schema}}.lane_stops (
  lane text collate "C" not null,
  id   bigint not null,
  primary key (lane, id)
) with (vacuum_truncate = off);

-- What may let a lane go on. In slot -1 a lane that ends in '/' stands for all lanes of a family, '?' for all lowered limits,
-- and the row '', which always stays, for all lanes. Behind U+001F comes the lane after which the promoters go on, in a family or,
-- with nothing before it, in all of them.
create table {{.schema}}.lane_calls (
  due  timestamptz not null,
  slot smallint    not null,             -- of lane_locks: a hash of the lane
  lane text collate "C" not null
) with (vacuum_truncate = off);
create index lane_calls_due on {{.schema}}.lane_calls (slot, due);

create table {{.schema}}.lane_limits (
  lane    text collate "C" not null primary key,  -- family/name, or family/ for all lanes of the family that have no row; a limit's name after a slash
  n       integer check (n >= 0),        -- null: the limit was removed, and the row stays until no more jobs are live than before
  lowered boolean not null,              -- more jobs may be live than n: completions admit no successor
  rate    bigint,                        -- so many jobs start in per; null: any number
  per     bigint,                        -- microseconds
  burst   integer
) with (vacuum_truncate = off);
create index lane_limits_lowered on {{.schema}}.lane_limits (lane) where lowered;

create table {{.schema}}.limit_rates (
  lane    text collate "C" not null primary key,
  free_at timestamptz not null,          -- when the whole burst is there again
  gap     double precision not null      -- microseconds between two slots, as free_at was computed
) with (fillfactor = 50, vacuum_truncate = off);

create table {{.schema}}.lane_locks (slot smallint not null primary key);
insert into {{.schema}}.lane_locks select pg_catalog.generate_series(0, 15);

-- Every claim changes these; statistics on them mislead the planner more than they help. And a table without a primary key needs
-- this, or no row could be deleted where a publication has all tables. Citus has no such commands for its tables.
do $statistics$ begin
  if pg_catalog.current_setting('citus.version', true) is null then
    alter table {{.schema}}.jobs
      alter leased_until set statistics 0,
      alter holder       set statistics 0,
      alter claims       set statistics 0,
      alter lost         set statistics 0,
      alter attempts     set statistics 0,
      alter ahead        set statistics 0;
    alter table {{.schema}}.lane_calls replica identity full;
  end if;
end $statistics$;

-- One row per taken (class, scope, key): the only arbiter of uniqueness. States and classes: state.go. Three columns have
-- more than one meaning:
--
--   leased_until  The end of the latest claim's lease, also after that claim has ended: Ask counts from it. For a client's key
--                 (class 2) of unknown outcome it is when somebody last asked, if that was later. Null for a job's key.
--   finished_at   When the work was finished, or the key released: the window counts from it. For an effect (class 3) that was
--                 not released it is null until the Reaper finds that its job can never run again. For a queued job's
--                 key it is when the Reaper first found the job gone. Otherwise null.
--                 Of an event (class 4) that nobody has emitted yet it is until when jobs wait for it.
--   detail        Why the outcome is uncertain or held. In a claimed fence, why that of an earlier claim is, so that a release
--                 makes it uncertain again. In a completed one, why its result could not be stored.
create table {{.schema}}.job_fences (
  job_id       bigint,                   -- the job that the key belongs to; null outside of jobs
  token        bigint      not null,     -- greatest token under which the key was held. Of a cancelled job that no claim had, and whose
                                         -- key stays taken all the same, it counts one claim
  holder       bigint,
  leased_until timestamptz,              -- see above
  created_at   timestamptz not null,
  finished_at  timestamptz,              -- see above
  lifetime     bigint      not null,     -- milliseconds after finished_at; 0 until finished, -1 for ever
  class        smallint    not null,
  state        smallint    not null,
  scope        text collate "C" not null,
  key          text collate "C" not null,
  fingerprint  bytea,                    -- what later users of the key must match: payload.go; for an effect, effectMark
  result       jsonb,
  detail       text,                     -- see above
  identity     bigint,                   -- names work outside of jobs to providers; null for created_at in microseconds
  -- The most selective column first and nothing before it: taking a key costs 7.1 µs of the server's time
  -- instead of 8.2 with (class, scope, key), where each comparison passes two equal columns.
  primary key (key, scope, class)
) with (fillfactor = 50, vacuum_truncate = off);

-- Make some pages that stay (vacuum_truncate). For a table without pages the planner looks one row up by reading the
-- whole table, and keeps that plan when the table has grown.
insert into {{.schema}}.jobs (id, run_at, created_at, max_attempts, priority, queue, kind)
select -n, 'infinity', 'infinity', 0, 0, '', '' from pg_catalog.generate_series(1, 1000) n;
delete from {{.schema}}.jobs;
insert into {{.schema}}.job_waits (id, run_at, created_at, max_attempts, priority, lane_rule, lane, queue, kind)
select -n, 'infinity', 'infinity', 0, 0, 0, n, '', '' from pg_catalog.generate_series(1, 1000) n;
delete from {{.schema}}.job_waits;
insert into {{.schema}}.job_members (group_id, job_id, state, told) select -n, -n, 0, true from pg_catalog.generate_series(1, 5000) n;
delete from {{.schema}}.job_members;
insert into {{.schema}}.lane_places (lane, id) select '', -n from pg_catalog.generate_series(1, 5000) n;
delete from {{.schema}}.lane_places;
insert into {{.schema}}.lane_stops (lane, id) select '', -n from pg_catalog.generate_series(1, 5000) n;
delete from {{.schema}}.lane_stops;
insert into {{.schema}}.lane_calls (due, slot, lane) select 'infinity', n % 16, n from pg_catalog.generate_series(1, 1000) n;
delete from {{.schema}}.lane_calls;
insert into {{.schema}}.lane_limits (lane, n, lowered) select n, 0, false from pg_catalog.generate_series(1, 6000) n;
delete from {{.schema}}.lane_limits;
insert into {{.schema}}.limit_rates select n, 'infinity', 1 from pg_catalog.generate_series(1, 1000) n;
delete from {{.schema}}.limit_rates;
insert into {{.schema}}.lane_calls (due, slot, lane) values ('infinity', -1, '');
insert into {{.schema}}.job_fences (token, created_at, lifetime, class, state, scope, key)
select 0, 'infinity', 0, 0, 0, '', n from pg_catalog.generate_series(1, 2000) n;
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
  identity      bigint,
  lane          text collate "C",
  lane_rule     smallint,
  if_dead       smallint                 -- of one that was cancelled while it waited for other jobs: as in job_waits; 3: DeadCancel, which ended it
) with (vacuum_truncate = off);
create index job_history_state on {{.schema}}.job_history (queue, state, id) where queue is not null; -- as that of jobs_claim
create index job_history_keep  on {{.schema}}.job_history (keep_until) where keep_until is not null;
insert into {{.schema}}.job_history (id, run_at, created_at, finished_at, claims, lost, attempts, max_attempts, priority, state, queue, kind)
select -n, 'infinity', 'infinity', 'infinity', 0, 0, 0, 0, 0, 0, '', pg_catalog.repeat('x', 1800) from pg_catalog.generate_series(1, 200) n; -- pages that stay, as above
delete from {{.schema}}.job_history;

-- Requests to cancel a leased job; its worker reads them with the beat.
create table {{.schema}}.job_cancels (
  job_id       bigint      not null primary key,
  requested_at timestamptz not null
);

-- What jobs wait for in the middle of their handlers, and what came of it.
create table {{.schema}}.job_awaits (
  job_id     bigint      not null,
  identity   bigint      not null,         -- of the job's round; a row of an earlier round does not count
  created_at timestamptz not null,
  until      timestamptz not null,         -- the time-out, or the end of the sleep
  claims     integer     not null default 0, -- of the job when it was last given back to wait for this
  state      smallint    not null,         -- 0: waits, 1: the event came, 2: the time-out came first
  scope      text collate "C" not null,    -- of the event; empty for a sleep
  key        text collate "C" not null,    -- of the event; the name of the sleep
  payload    jsonb,                        -- of the event that came
  primary key (job_id, scope, key)
) with (fillfactor = 70, vacuum_truncate = off);
create index job_awaits_event on {{.schema}}.job_awaits (key, scope) where state = 0 and scope <> '';

-- When each queue was last rescanned for jobs that claims have passed, so that one worker at a time does it.
create table {{.schema}}.queues (
  queue        text collate "C" not null primary key,
  rescanned_at timestamptz not null,
  left_kinds   text[]                            -- of expired leases that rescans have left to workers that have these kinds
);

-- Workers that run, with what they work. No job depends on it.
create table {{.schema}}.workers (
  id             bigint      not null primary key,  -- of the run, random; its upper half is that of its claims' jobs.holder
  lease          bigint      not null,              -- microseconds
  started_at     timestamptz not null,
  seen_at        timestamptz not null,
  process        integer     not null,
  schema_version integer     not null,
  host           text        not null,
  version        text        not null,              -- of the library
  queues         jsonb       not null,              -- queue: how many of its jobs the worker can run at once
  kinds          text[]      not null,
  stuck          jsonb       not null default '[]', -- slots that are held by handlers that do not return, by queue and kind
  pool           jsonb       not null default '{}'  -- how large the pool is, and how long it was waited for
) with (fillfactor = 50);

-- What workers have counted in a minute. No job depends on it.
create table {{.schema}}.job_counts (
  minute    timestamptz not null,
  took      bigint      not null,        -- microseconds that handlers ran, of all that follow but started
  started   integer     not null,
  completed integer     not null,
  failed    integer     not null,        -- attempts after which the job runs again
  dead      integer     not null,
  queue     text collate "C" not null,
  kind      text collate "C" not null,
  durations integer[]   not null,        -- how many of these handlers ran up to 1, 3, 10, 30, 100, 300 ms, 1, 3, 10, 30 s, 2, 10 min, 1 h, longer
  primary key (minute, queue, kind)
) with (fillfactor = 50);

-- Queues and kinds of which workers claim nothing.
create table {{.schema}}.pauses (
  what      text collate "C" not null check (what in ('queue', 'kind')),
  name      text collate "C" not null,
  paused_at timestamptz not null,
  note      text        not null,         -- who paused it, and why
  primary key (name, what)
);

-- Workers with a confirmed listener. These three tables are unlogged because the workers rebuild them: losing them in a
-- crash costs one poll. A worker waits for a queue until idle_until if no row of
-- wakes has that queue and its present round.
create unlogged table {{.schema}}.waiters (
  worker     bigint not null primary key,
  serves     bigint not null,            -- the set of its queues
  round      bigint not null,            -- how often it has said that it waits
  room       bigint not null,            -- for how many jobs
  kinds      bigint not null default 0,  -- the set of its kinds, and how often it looks
  looks      smallint not null default 0,    -- for so many milliseconds it may get the jobs of a queue alone: its handlers are quick, and others wait
  polls      boolean not null default false, -- it polls at the default interval, and so may get those of open transactions too
  busy       text[] collate "C",         -- queues of the set for which it has no room now; null: none
  idle_until timestamptz not null
) with (fillfactor = 50);
create index waiters_serves on {{.schema}}.waiters (serves, worker);

create unlogged table {{.schema}}.waiter_queues (
  queue  text collate "C" not null,
  serves bigint not null,
  primary key (queue, serves)
);

create unlogged table {{.schema}}.wakes (
  worker bigint not null,
  round  bigint not null,
  queue  text collate "C" not null,
  looks  smallint not null default 0, -- for so many milliseconds the worker looks for more jobs, and nobody else is woken
  polls  boolean not null default false,
  at     timestamptz not null default statement_timestamp()
);
create index wakes_worker on {{.schema}}.wakes (worker, round, queue); -- not unique: an insert waits for nobody
create index wakes_queue on {{.schema}}.wakes (queue, at);
create index wakes_looks on {{.schema}}.wakes (queue, at) where looks > 0;

-- Where the latest claim of a queue's backlog ended. Unlogged, because nothing is lost with it.
create unlogged table {{.schema}}.turns (
  queue    text collate "C" not null,
  kinds    bigint      not null,          -- the set of kinds that was claimed
  priority smallint    not null,
  run_at   timestamptz not null,
  id       bigint      not null,
  at       timestamptz not null,          -- when the row was written
  until_at timestamptz,                   -- a claim has gone back from here, and all go on from where it ended until they are
  until_id bigint,                        -- here again; null: the place is only for those who are behind it
  primary key (queue, kinds)
) with (fillfactor = 50);

-- Wakes as many of the workers that wait for a queue as so many jobs need, beginning at a random place of the order of
-- their ids. It returns how many there are, up to that many. Not if that could forbid a two-phase commit: PREPARE
-- TRANSACTION refuses a transaction that notified. own says that the transaction is not the caller's. On a server that
-- cannot prepare transactions, notifying does no harm either. Two transactions may wake the same worker: neither sees the
-- other's row in wakes. A serializable transaction inserts none, because it would conflict with each other one that has looked
-- whether there is one: such transactions may wake a worker again that was woken.
--
-- If single jobs come one soon after the other to workers whose handlers are quick, the worker that is woken is told to
-- look for more for a while (listen.go), and meanwhile nobody else is woken. Otherwise each job would cost
-- a notification, which each process gets that listens, an announcement, and a claim or two. A transaction of the caller's may
-- commit when the worker looks no longer. Then the job is found by what it looks for after that (lookForLeft), or
-- by somebody's poll, so that is only for workers that poll at the default interval.
create function {{.schema}}.wake(queue text, jobs bigint, place bigint, own boolean) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $wake$
#variable_conflict use_column
declare
  may boolean := own or current_setting('max_prepared_transactions') = '0';
  often boolean := false;
  looked boolean;
  n bigint := 0;
  room bigint := 0;
  w record;
begin
  if jobs = 1 then
    select count(*) > 0, coalesce(bool_or(x.at > statement_timestamp() - x.looks::float8 * interval '1 millisecond' and (own or x.polls)), false)
      into often, looked
      from {{.schema}}.wakes x
     where x.queue = wake.queue and x.looks > 0 and x.at > statement_timestamp() - interval '130 milliseconds'
       and x.at > statement_timestamp() - (x.looks + 30)::float8 * interval '1 millisecond' and x.at <= clock_timestamp();
    if looked then
      return 1;
    end if;
    if not often then
      often := exists (select from {{.schema}}.wakes x
                        where x.queue = wake.queue and x.at > statement_timestamp() - interval '30 milliseconds' and x.at <= clock_timestamp());
    end if;
  end if;
  for w in
    select c.worker, c.round, c.room, c.kinds, c.polls, case when often and (own or c.polls) then c.looks else 0 end as looks
      from {{.schema}}.waiter_queues s
     cross join lateral (
           (select w.worker, w.round, w.room, w.kinds, w.looks, w.polls
              from {{.schema}}.waiters w
             where w.serves = s.serves and w.worker >= wake.place and w.idle_until > statement_timestamp()
               and (w.busy is null or wake.queue <> all (w.busy))
               and not exists (select from {{.schema}}.wakes x where x.worker = w.worker and x.round = w.round and x.queue = wake.queue offset 0)
             order by w.worker limit least(wake.jobs, 64))
           union all
           (select w.worker, w.round, w.room, w.kinds, w.looks, w.polls
              from {{.schema}}.waiters w
             where w.serves = s.serves and w.worker < wake.place and w.idle_until > statement_timestamp()
               and (w.busy is null or wake.queue <> all (w.busy))
               and not exists (select from {{.schema}}.wakes x where x.worker = w.worker and x.round = w.round and x.queue = wake.queue offset 0)
             order by w.worker limit least(wake.jobs, 64))) c
     where s.queue = wake.queue
     limit least(wake.jobs, 64)
  loop
    n := n + 1;
    if may then
      if w.looks > 0 and exists (select from {{.schema}}.waiter_queues s join {{.schema}}.waiters v on v.serves = s.serves
                                  where s.queue = wake.queue and v.kinds <> w.kinds and v.idle_until > statement_timestamp()) then
        w.looks := 0; -- the next jobs may be for those alone
      end if;
      if current_setting('transaction_isolation') <> 'serializable' then
        insert into {{.schema}}.wakes (worker, round, queue, looks, polls) values (w.worker, w.round, wake.queue, w.looks, w.polls);
      end if;
      perform pg_notify('onceq_' || w.worker, case when w.looks > 0 then chr(31) || w.looks || chr(31) else '' end || wake.queue);
    end if;
    room := room + w.room;
    exit when room >= jobs;
  end loop;
  return n;
end
$wake$;

-- Writes an event unless it was emitted before, and makes the jobs run that wait for it. It returns whether it was the
-- first. Each statement sees what was committed before it: the first one meets whoever begins to wait for the event, the
-- second whoever just gives its job back, and the third finds the jobs that were given back before that. A job that is
-- leased is left alone: its holder finds the event when it gives the job back. So is one with a slot of a rate, which starts then.
create function {{.schema}}.emit(scope text, key text, payload jsonb, lifetime bigint, place bigint, own boolean) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $emit$
#variable_conflict use_column
declare
  ids bigint[];
  given integer[];
  q record;
begin
  insert into {{.schema}}.job_fences as f (token, created_at, finished_at, lifetime, class, state, scope, key, result)
  values (0, statement_timestamp(), statement_timestamp(), emit.lifetime, 4, 3, emit.scope, emit.key, emit.payload)
  on conflict (key, scope, class) do update
     set state = 3, created_at = excluded.created_at, finished_at = excluded.finished_at, lifetime = excluded.lifetime, result = excluded.result
   where f.state <> 3 or f.finished_at + f.lifetime::float8 * interval '1 millisecond' <= statement_timestamp();
  if not found then
    return false;
  end if;
  with came as (
    update {{.schema}}.job_awaits a set state = 1, payload = emit.payload
     where a.key = emit.key and a.scope = emit.scope and a.state = 0 and a.scope <> ''
    returning a.job_id, a.claims
  )
  select array_agg(c.job_id order by c.job_id), array_agg(c.claims order by c.job_id) into ids, given from came c;
  for q in
    with u as materialized (
      select u.id, u.claims from unnest(ids, given) as u(id, claims) where u.claims > 0
    ),
    due as materialized (
      select j.id from u cross join lateral (
             select id from {{.schema}}.jobs
              where id = u.id and claims = u.claims and leased_until is null and run_at > statement_timestamp()
                and (lane is null or right(lane, 2) <> chr(31) || '@')
                for update) j
    ),
    hurried as (
      update {{.schema}}.jobs j set run_at = statement_timestamp() from due where j.id = any (array[due.id])
      returning j.queue
    ),
    aside as materialized ( -- in a lane that others may overtake in
      select w.id from u cross join lateral (
             select id from {{.schema}}.job_waits
              where id = u.id and claims = u.claims and run_at > statement_timestamp()
                for update) w
    ),
    back as (
      update {{.schema}}.job_waits w set run_at = statement_timestamp() from aside where w.id = any (array[aside.id])
      returning w.lane, w.queue
    ),
    call as (
      insert into {{.schema}}.lane_calls (slot, due, lane)
      select (get_byte(sha256(decode(replace(lane, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint, statement_timestamp(), lane from back
    )
    select queue, count(*) as jobs from (select queue from hurried union all select queue from back) w group by queue
  loop
    perform {{.schema}}.wake(q.queue, q.jobs, emit.place, emit.own);
  end loop;
  return true;
end
$emit$;

-- Tells those that wait for jobs how the jobs ended: the state, and of a completed one the result. It is called in the statement
-- that ends the jobs, or with state 0 in the one that brings them back. Its statements see what was committed before them,
-- also a group that was made after the calling statement began: who made it had the job's row locked, or the promoters look
-- for it. A job that comes back keeps its followers where they are until that is committed. It returns how many groups were
-- called.
create function {{.schema}}.tell(ids bigint[], states smallint[], results text[]) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $tell$
#variable_conflict use_column
declare
  n bigint;
begin
  if ids is null then
    return 0;
  end if;
  if 0 = any (states) then
    perform w.id
       from (select distinct m.group_id from unnest(ids) as u(id) cross join lateral (
                    select group_id from {{.schema}}.job_members where job_id + 0 = u.id) m
              order by m.group_id) g
      cross join lateral (
            select id from {{.schema}}.job_waits where lane = chr(31) || lpad(g.group_id::text, 19, '0') for no key update) w;
  end if;
  with told as (
    update {{.schema}}.job_members m
       set state = g.state, told = true, result = case g.state when 5 then nullif(g.result, '')::jsonb end
      from unnest(ids, states, results) as g(id, state, result)
     where m.job_id + 0 = any (array[g.id])
       and ((m.state = 0) = (g.state <> 0) or g.state = 7 and m.state in (6, 8))
    returning m.group_id
  ),
  line as (
    select distinct chr(31) || lpad(group_id::text, 19, '0') as lane from told
  ),
  call as (
    insert into {{.schema}}.lane_calls (slot, due, lane)
    select (get_byte(sha256(decode(replace(lane, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint, statement_timestamp(), lane from line
    returning 1
  )
  select count(*) into n from call;
  return n;
end
$tell$;

-- Lets those of the given followers go on whose members are done: into jobs, or to their lane or limit. It is for promoters
-- alone. It locks the followers in one statement and looks in the next: a member that somebody brought back meanwhile is not
-- done. A follower that somebody has locked is called again after pause microseconds. One that is to be cancelled, because a
-- member is dead or was cancelled and its rule says so, is returned in cancel and called again after a second. One whose id a live
-- job has, because the sequence was set back, is called again after a second.
create function {{.schema}}.follow(lanes text[], place bigint, pause bigint, out went bigint, out live_queues text[], out cancel bigint[])
language plpgsql strict set search_path = pg_catalog, pg_temp as $follow$
#variable_conflict use_column
declare
  ids bigint[];
begin
  select array_agg(w.id) into ids
    from unnest(lanes) as u(lane)
   cross join lateral (
         select id from {{.schema}}.job_waits where lane = u.lane for update skip locked) w;
  with busy as (
    insert into {{.schema}}.lane_calls (slot, due, lane)
    select (get_byte(sha256(decode(replace(u.lane, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint, statement_timestamp() + pause * interval '1 microsecond', u.lane
      from unnest(lanes) as u(lane)
     cross join lateral (select id from {{.schema}}.job_waits where lane = u.lane) w
     where ids is null or w.id <> all (ids)
  ),
  done as materialized (
    select u.id, w.lane,
           case when s.held or s.dead and w.if_dead = 0 then 'waits'
                when (s.dead or s.cancelled) and w.if_dead = 2 then 'ends'
                when w.path = '' and exists (select from {{.schema}}.jobs where id = u.id) then 'blocked' -- another job has its id
                when w.path = '' then 'lives'
                else 'queues' end as what
      from unnest(ids) as u(id)
     cross join lateral (select lane, path, if_dead from {{.schema}}.job_waits where id = u.id) w
     cross join lateral (
           select bool_or(state = 8) as held, bool_or(state = 6) as dead, bool_or(state = 7) as cancelled
             from {{.schema}}.job_members where group_id = u.id) s
     where not exists (select from (select from {{.schema}}.job_members
                                     where group_id = u.id and state = 0 order by job_id desc limit 1) open)
  ),
  moved as (
    delete from {{.schema}}.job_waits w using (select id from done where what = 'lives' offset 0) d where w.id = any (array[d.id])
    returning w.*
  ),
  job as (
    insert into {{.schema}}.jobs (id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                                  payload, payload_bytes, metadata, errors, identity, lane_rule, due_at)
    select id, greatest(run_at, statement_timestamp()), created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
           payload, payload_bytes, metadata, errors, identity, nullif(lane_rule, 0), coalesce(due_at, run_at)
      from moved
  ),
  passed as (
    update {{.schema}}.job_waits w
       set lane = coalesce(nullif(split_part(w.path, chr(31), 1), ''), split_part(w.path, chr(31), 2)),
           path = nullif(w.path, split_part(w.path, chr(31), 1)), if_dead = null, run_at = greatest(w.run_at, statement_timestamp()),
           due_at = coalesce(w.due_at, w.run_at)
      from (select id from done where what = 'queues' offset 0) d where w.id = any (array[d.id])
    returning w.lane, w.run_at
  ),
  call as (
    insert into {{.schema}}.lane_calls (slot, due, lane)
    select (get_byte(sha256(decode(replace(lane, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint, due, lane
      from (select distinct lane, run_at as due from passed
            union all
            select lane, statement_timestamp() + interval '1 second' from done where what in ('ends', 'blocked')) l
  ),
  woken as (
    select sum({{.schema}}.wake(m.queue, m.jobs, place, true)) as n
      from (select queue, count(*) as jobs from moved where run_at < statement_timestamp() + interval '2 seconds' group by queue) m
     where exists (select from {{.schema}}.waiters w where w.idle_until > statement_timestamp())
  )
  select (select count(*) from moved), (select array_agg(distinct queue) from moved),
         (select array_agg(id) from done where what = 'ends')
    into went, live_queues, cancel
    from woken;
end
$follow$;

-- Schedules (onceqcron). The next tick of each is an ordinary delayed job, whose handler reads and moves this row.
create table {{.schema}}.schedules (
  name       text collate "C" not null primary key,
  owner      text collate "C" not null,    -- which application's code it belongs to
  spec       text        not null,         -- when it is due; for people only, if code decides
  zone       text        not null,
  missed     text        not null,         -- what becomes of ticks that were missed: "latest 24h0m0s", "all 100"
  job        jsonb,                        -- what a tick enqueues; null: code decides
  queue      text        not null default 'onceqcron', -- where the job waits that ticks
  next_at    timestamptz,                  -- the scheduled time of the next tick; null: there is none
  changed_at timestamptz,                  -- when the timetable changed while next_at was overdue; otherwise null
  known_from timestamptz,                  -- ticks before this are removed from the ledger; null: none were
  paused_at  timestamptz,
  created_at timestamptz not null default statement_timestamp(),
  updated_at timestamptz not null default statement_timestamp()
);

-- What became of each tick.
create table {{.schema}}.schedule_ticks (
  schedule text collate "C" not null,
  at       timestamptz not null,           -- scheduled time; of several missed or paused ticks the first one's
  until    timestamptz not null,           -- of several missed or paused ticks the last one's, otherwise at
  ticks    integer     not null,           -- how many
  outcome  text        not null,           -- fired, duplicate, missed, paused, refused
  done_at  timestamptz not null default statement_timestamp(),
  job_id   bigint,                         -- the job that it enqueued or met
  note     text,                           -- why it was refused, or that somebody asked for it
  primary key (schedule, at)
);

-- The audit trail: who did what to jobs, and why.
create table {{.schema}}.actions (
  id      bigint      not null generated always as identity primary key,
  at      timestamptz not null default statement_timestamp(),
  job_id  bigint,                          -- null: not about one job
  who     text        not null,
  what    text        not null,
  about   text        not null,            -- the effect, the schedule, the filter; empty if there is no more to say
  why     text        not null,
  outcome text        not null
);
create index actions_job on {{.schema}}.actions (job_id, id) where job_id is not null;

-- A completion inside the caller's transaction calls this if its lease is gone. An error stops the commit that follows
-- in the same pipeline; an update of no rows would not.
create function {{.schema}}.lease_lost(job bigint) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'onceq: the lease of job % is lost', job using errcode = 'OQ001';
end
$$;

-- Called when a job moves to the history and another job there, which waits for a person, has the same id.
create function {{.schema}}.id_taken(job bigint) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'the history has another job with the id %, which waits for a person and cannot be redriven while this one is live: discard that one', job using errcode = 'OQ002';
end
$$;

-- The next id above a floor: a key's later jobs have larger ids than its earlier ones, even if a crash or a failover
-- made the sequence forget its latest values.
create function {{.schema}}.next_id(ids regclass, above bigint) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
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

-- Takes a job's key that is no longer in force (as fenceFree in fence.go; a test compares them) for a new job, and
-- returns the job's id; null if the key is in force. Plans that read the whole table are off, because a plan may be
-- made while the table is empty.
create function {{.schema}}.take_fence(ids regclass, scope text, key text, lifetime bigint, fingerprint bytea) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $take_fence$
#variable_conflict use_column
declare
  above bigint;
  taken bigint;
begin
  select greatest(f.token >> 20, f.job_id) into above
    from {{.schema}}.job_fences f
   where f.class = 0 and f.scope = take_fence.scope and f.key = take_fence.key
     and (f.state in (3, 4, 5) and f.lifetime >= 0
      and (f.lifetime = 0 and f.finished_at is not null or f.finished_at + f.lifetime::float8 * interval '1 millisecond' <= statement_timestamp())
      or f.class = 0 and f.state = 5 and f.token = f.token >> 20 << 20)
     for update;
  if found then
    taken := {{.schema}}.next_id(ids, above);
    update {{.schema}}.job_fences f
       set job_id = taken, token = taken << 20, state = 0, created_at = statement_timestamp(), finished_at = null,
           lifetime = take_fence.lifetime, fingerprint = take_fence.fingerprint, result = null, holder = null, leased_until = null
     where f.class = 0 and f.scope = take_fence.scope and f.key = take_fence.key;
  else -- in force, or pruned since the caller's statement found it
    insert into {{.schema}}.job_fences as f (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint)
    select 0, take_fence.scope, take_fence.key, 0, n.id, n.id << 20, statement_timestamp(), take_fence.lifetime, take_fence.fingerprint
      from (select nextval(ids) as id offset 0) n
    on conflict do nothing
    returning f.job_id into taken;
  end if;
  return taken;
end
$take_fence$;

-- Views for people with psql, and for dashboards; docs/operations.md shows them in use. Their names, columns and words are
-- stable: a later version may add a view or a column, and changes none. The tables above may change. Statements of onceq itself
-- do not use them.

-- Every job, live or in the history.
create view {{.schema}}.v_jobs as
select j.id, j.queue, j.kind,
       case when j.leased_until > statement_timestamp() then 'running'
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 'retrying'
            when j.run_at > statement_timestamp() then 'delayed'
            else 'waiting' end as state,
       j.scope, j.key, j.priority, j.attempts, j.max_attempts, j.lost, j.run_at, j.created_at, j.leased_until,
       null::timestamptz as finished_at, null::timestamptz as keep_until, j.errors -> -1 ->> 'error'::text as last_error,
       j.payload, j.payload_bytes, j.metadata, null::jsonb as result, j.errors, coalesce(j.due_at, j.run_at) as due_at
  from {{.schema}}.jobs j
union all
select w.id, w.queue, w.kind,
       case when w.attempts > 0 or w.lost > 0 then 'retrying' when w.run_at > statement_timestamp() then 'delayed' else 'waiting' end,
       w.scope, w.key, w.priority, w.attempts, w.max_attempts, w.lost, w.run_at, w.created_at, null,
       null, null, w.errors -> -1 ->> 'error'::text, w.payload, w.payload_bytes, w.metadata, null, w.errors, coalesce(w.due_at, w.run_at)
  from {{.schema}}.job_waits w
union all
select h.id, h.queue, h.kind, case h.state when 5 then 'completed' when 6 then 'dead' when 7 then 'cancelled' when 8 then 'held' end,
       h.scope, h.key, h.priority, h.attempts, h.max_attempts, h.lost, h.run_at, h.created_at, null,
       h.finished_at, h.keep_until, h.errors -> -1 ->> 'error'::text,
       h.payload, h.payload_bytes, h.metadata, h.result, h.errors, h.run_at
  from {{.schema}}.job_history h;

-- Counts for each queue, and since when the job that is due for longest has been due. It reads every job. Queue.Stats and the
-- command stop counting at 10,000.
create view {{.schema}}.v_queues as
select v.queue,
       count(*) filter (where state = 'waiting')   as waiting,
       count(*) filter (where state = 'running')   as running,
       count(*) filter (where state = 'retrying')  as retrying,
       count(*) filter (where state = 'delayed')   as delayed,
       count(*) filter (where state = 'dead')      as dead,
       count(*) filter (where state = 'held')      as held,
       count(*) filter (where state = 'completed') as completed,
       count(*) filter (where state = 'cancelled') as cancelled,
       pg_catalog.min(due_at) filter (where state in ('waiting', 'retrying') and run_at <= statement_timestamp()) as oldest_due
  from {{.schema}}.v_jobs v
 group by v.queue;

-- The jobs that others wait for, with what is known of how they ended; a job that was discarded counts as cancelled. A group's id
-- is that of the job that waits.
create view {{.schema}}.v_members as
select m.group_id, m.job_id,
       case m.state when 0 then 'unfinished' when 5 then 'completed' when 6 then 'dead' when 7 then 'cancelled' when 8 then 'held' end as state,
       m.result
  from {{.schema}}.job_members m;

-- Each group that still waits: the job that waits, what a dead member means for it, and how its members are doing.
create view {{.schema}}.v_groups as
select w.id as group_id, w.queue, w.kind, w.scope, w.key, w.created_at,
       case w.if_dead when 0 then 'wait' when 1 then 'run' when 2 then 'cancel' end as if_dead,
       m.total, m.unfinished, m.completed, m.dead, m.cancelled, m.held
  from {{.schema}}.job_waits w
 cross join lateral (
       select count(*) as total,
              count(*) filter (where state = 'unfinished') as unfinished,
              count(*) filter (where state = 'completed')  as completed,
              count(*) filter (where state = 'dead')       as dead,
              count(*) filter (where state = 'cancelled')  as cancelled,
              count(*) filter (where state = 'held')       as held
         from {{.schema}}.v_members where group_id = w.id) m
 where w.if_dead is not null;

-- What is known of each effect (Once) of a job. Effects of a round before Reschedule are not shown.
create view {{.schema}}.v_effects as
select f.job_id, pg_catalog.substr(f.key, pg_catalog.strpos(f.key, '/') + 1) as name,
       case f.state when 3 then 'completed' when 6 then 'held'
            when 1 then case when f.leased_until > statement_timestamp() then 'in_flight' else 'uncertain' end
            else 'uncertain' end as state,
       f.scope as queue, p.kind, f.created_at as since, f.leased_until as until, f.result, f.detail
  from {{.schema}}.job_fences f
  left join lateral (
       select j.kind, j.created_at, j.identity from {{.schema}}.jobs j where j.id = f.job_id
       union all
       select w.kind, w.created_at, w.identity from {{.schema}}.job_waits w where w.id = f.job_id
       union all
       select h.kind, h.created_at, h.identity from {{.schema}}.job_history h where h.id = f.job_id) p on true
 where f.class = 3 and f.state in (1, 2, 3, 6)
   and (p.kind is null
        or coalesce(f.fingerprint = pg_catalog.int8send(coalesce(p.identity, (extract(epoch from p.created_at) * 1e6)::bigint)), true));

-- Each key that was taken and not removed yet: of jobs, of the application (Do, Fence) and of clients' requests. From free_at on
-- it can be taken again; null: not before its work is finished, or never.
create view {{.schema}}.v_keys as
select case f.class when 0 then 'job' when 1 then 'application' when 2 then 'request' end as class, f.scope, f.key,
       case f.state when 0 then 'queued' when 3 then 'completed' when 4 then 'dead' when 5 then 'cancelled' when 6 then 'held'
            when 1 then case when f.leased_until > statement_timestamp() then 'in_flight' else 'uncertain' end
            else 'uncertain' end as state,
       f.job_id, f.created_at, f.finished_at,
       case when f.class = 0 and f.state = 5 and f.token = f.token >> 20 << 20 then f.finished_at
            when f.state in (3, 4, 5) and f.lifetime >= 0 then f.finished_at + f.lifetime::float8 * interval '1 millisecond' end as free_at,
       f.result, f.detail
  from {{.schema}}.job_fences f
 where f.class < 3;

-- Workers; stale: killed, frozen, or without the database.
create view {{.schema}}.v_workers as
select id, host, process, version, queues, kinds, started_at, seen_at, seen_at < statement_timestamp() - interval '3 minutes' as stale,
       stuck, pool
  from {{.schema}}.workers;

-- What is paused: queues and kinds.
create view {{.schema}}.v_pauses as
select what, name, paused_at, note from {{.schema}}.pauses;

-- Schedules, each with its latest tick.
create view {{.schema}}.v_schedules as
select s.name, s.owner, s.spec, s.zone, s.missed, s.next_at, s.paused_at, t.at as last_at, t.outcome as last_outcome, t.job_id as last_job_id
  from {{.schema}}.schedules s
  left join lateral (
       select at, outcome, job_id from {{.schema}}.schedule_ticks where schedule = s.name order by at desc limit 1) t on true;

-- The audit trail.
create view {{.schema}}.v_actions as
select id, at, who, what, job_id, about, why, outcome from {{.schema}}.actions;

-- What workers have counted by the minute; seconds is the time that the handlers took together.
create view {{.schema}}.v_counts as
select minute, queue, kind, started, completed, failed, dead, took::numeric / 1000000.0 as seconds from {{.schema}}.job_counts;

---- create above / drop below ----

drop view {{.schema}}.v_counts;
drop view {{.schema}}.v_actions;
drop view {{.schema}}.v_schedules;
drop view {{.schema}}.v_pauses;
drop view {{.schema}}.v_workers;
drop view {{.schema}}.v_keys;
drop view {{.schema}}.v_effects;
drop view {{.schema}}.v_groups;
drop view {{.schema}}.v_members;
drop view {{.schema}}.v_queues;
drop view {{.schema}}.v_jobs;
drop function {{.schema}}.follow(text[], bigint, bigint);
drop function {{.schema}}.tell(bigint[], smallint[], text[]);
drop function {{.schema}}.emit(text, text, jsonb, bigint, bigint, boolean);
drop function {{.schema}}.wake(text, bigint, bigint, boolean);
drop function {{.schema}}.take_fence(regclass, text, text, bigint, bytea);
drop function {{.schema}}.next_id(regclass, bigint);
drop function {{.schema}}.id_taken(bigint);
drop function {{.schema}}.lease_lost(bigint);
drop table {{.schema}}.actions;
drop table {{.schema}}.schedule_ticks;
drop table {{.schema}}.schedules;
drop table {{.schema}}.turns;
drop table {{.schema}}.wakes;
drop table {{.schema}}.waiter_queues;
drop table {{.schema}}.waiters;
drop table {{.schema}}.workers;
drop table {{.schema}}.job_counts;
drop table {{.schema}}.pauses;
drop table {{.schema}}.queues;
drop table {{.schema}}.job_awaits;
drop table {{.schema}}.job_cancels;
drop table {{.schema}}.job_history;
drop table {{.schema}}.job_fences;
drop table {{.schema}}.lane_locks;
drop table {{.schema}}.limit_rates;
drop table {{.schema}}.lane_limits;
drop table {{.schema}}.lane_calls;
drop table {{.schema}}.lane_stops;
drop table {{.schema}}.lane_places;
drop table {{.schema}}.job_members;
drop table {{.schema}}.job_waits;
drop table {{.schema}}.jobs;
drop sequence {{.schema}}.ids;
drop table {{.schema}}.meta;
