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
--                Redrive and Discard delete it. And one for each heavy job that waits for room in its limit (Job.Weight): until it
--                comes in completions let nobody in. Promoters write these.
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
--   job_counts   One row for each minute, ten minutes and hour, queue and kind of which a worker has counted something, for plots. All
--                workers add to it, once a minute each. The Reaper deletes it after a day, hours after a month, and adds what is due.
--   pauses       One row for each queue, kind or limit that is paused. Pause and LimitFull insert it; Resume, or the Reaper after
--                its end, deletes it. Workers read it about twice a second, together with their claims.
--   schedules    One row for each schedule of onceqcron. A tick's handler reads it and writes the next tick's time.
--   schedule_ticks  One row for each tick that was fired, and for each run of missed or paused ones. Ticks insert it, and delete those
--                that were kept long enough.
--   actions      One row for each thing that a person did to jobs through onceqweb or a tool that calls RecordAction. It is
--                never changed or deleted.
--   v_jobs, v_queues, v_backlog, v_effects, v_keys, v_workers, v_pauses, v_schedules, v_actions, v_counts   Views for people; at the end.
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
-- functions, columns that may be absent from an insert. A function that is to mean something else gets another name: code of before
-- calls the one that it knows. One that takes something away from code raises oldest_code to the first version that does without.
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
  errors        jsonb,                   -- of the latest failed attempts, oldest first: at, attempt, error, and who ran it
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
  burst   integer                        -- null: of a limit with Max, whose per is longer by 100 ms; it is 1
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
  application    text        not null default '',   -- its version, if it is known
  queues         jsonb       not null,              -- queue: how many of its jobs the worker can run at once
  kinds          text[]      not null,
  stuck          jsonb       not null default '[]', -- slots that are held by handlers that do not return, by queue and kind
  pool           jsonb       not null default '{}'  -- how large the pool is, and how long it was waited for
) with (fillfactor = 50);

-- What workers have counted in a minute, in ten or in sixty. No job depends on it.
create table {{.schema}}.job_counts (
  minute    timestamptz not null,        -- the first one
  took      bigint      not null,        -- microseconds that handlers ran, of all that follow but started
  started   integer     not null,
  completed integer     not null,
  failed    integer     not null,        -- attempts after which the job runs again
  dead      integer     not null,
  due       integer     not null default 0, -- at most, as a Reaper saw it of a queue; the kind is empty then
  span      smallint    not null default 1, -- how many minutes
  oldest    bigint      not null default 0, -- microseconds for which the oldest of these had been due
  queue     text collate "C" not null,
  kind      text collate "C" not null,
  durations integer[]   not null,           -- how many of these handlers ran up to each bound of counts.go, and longer
  waits     integer[]   not null default '{}', -- for how long jobs had been due when they started, likewise
  primary key (span, minute, queue, kind)
) with (fillfactor = 50);

-- Queues and kinds of which workers claim nothing, and limits into which nobody lets a job.
create table {{.schema}}.pauses (
  what      text collate "C" not null check (what in ('queue', 'kind', 'limit')),
  name      text collate "C" not null,
  paused_at timestamptz not null,
  note      text        not null,         -- who paused it, and why
  until     timestamptz,                  -- when it ends by itself; null: never. The row stays a while
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
-- look for more for a while (internal/claimer), and meanwhile nobody else is woken. Otherwise each job would cost
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
-- first. Each statement sees what was committed before it: the first one meets whoever begins to wait for the event (begin_await), the
-- second whoever just gives its job back (give_back), and the others find the jobs that were given back before that. A job that is
-- leased is left alone: its holder finds the event when it gives the job back. So is one with a slot of a rate, which starts then.
create function {{.schema}}.emit(scope text, key text, payload jsonb, lifetime bigint, place bigint, own boolean) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $emit$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  ids    bigint[];
  given  integer[]; -- how often each was claimed when it was given back
  hurry  bigint[];
  queues text[];
  lines  text[];
  more   text[];
  q      record;
begin
  insert into {{.schema}}.job_fences as f (token, created_at, finished_at, lifetime, class, state, scope, key, result)
  values (0, now, now, emit.lifetime, 4, 3, emit.scope, emit.key, emit.payload)
  on conflict (key, scope, class) do update
     set state = 3, created_at = excluded.created_at, finished_at = excluded.finished_at, lifetime = excluded.lifetime, result = excluded.result
   where f.state <> 3 or timezone('UTC', timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= excluded.finished_at;
  if not found then
    return false;
  end if;

  with came as (
    update {{.schema}}.job_awaits a set state = 1, payload = emit.payload
     where a.key = emit.key and a.scope = emit.scope and a.state = 0 and a.scope <> ''
    returning a.job_id, a.claims
  )
  select array_agg(c.job_id order by c.job_id), array_agg(c.claims order by c.job_id) into ids, given from came c where c.claims > 0;
  if ids is null then
    return true;
  end if;

  select array_agg(j.id), array_agg(j.queue) into hurry, queues
    from unnest(ids, given) as u(id, claims)
   cross join lateral (
         select id, queue from {{.schema}}.jobs
          where id = u.id and claims = u.claims and leased_until is null and run_at > now and (lane is null or right(lane, 2) <> chr(31) || '@')
            for update) j;
  if hurry is not null then update {{.schema}}.jobs set run_at = now where id = any (hurry); end if; -- with null the planner may read all of an index

  -- In a lane that others may overtake in, and for a limit.
  select array_agg(w.id), array_agg(w.lane), array_agg(w.queue) into hurry, lines, more
    from unnest(ids, given) as u(id, claims)
   cross join lateral (
         select id, lane, queue from {{.schema}}.job_waits where id = u.id and claims = u.claims and run_at > now for update) w;
  if hurry is not null then
    update {{.schema}}.job_waits set run_at = now where id = any (hurry);
    perform {{.schema}}.call(lines, now);
  end if;

  for q in select w.queue, count(*) as jobs from unnest(queues || more) as w(queue) group by w.queue loop
    perform {{.schema}}.wake(q.queue, q.jobs, emit.place, emit.own);
  end loop;
  return true;
end
$emit$;

-- Begins a wait of a job for an event, or with an empty scope a sleep of that name, for so many microseconds, if the job's lease holds.
-- The fence of an event that was not emitted counts as free and stays until the time-out: there the wait meets emit, which writes
-- that row first, too. state is what comes of the wait: 0 it is open, 1 the event was emitted before; null if there is a row of it already.
create function {{.schema}}.begin_await(job bigint, scope text, key text, identity bigint, claims integer, holder bigint, wait bigint,
                                        out holds boolean, out state smallint, out payload text)
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $begin_await$
#variable_conflict use_column
declare
  now   timestamptz := statement_timestamp();
  until timestamptz := now + wait::float8 * interval '1 microsecond';
  stays timestamptz := now + least(wait, 2592000000000)::float8 * interval '1 microsecond';
  emitted boolean := false;
  answer  jsonb;
  mine    record;
begin
  payload := '';
  holds := exists (select from {{.schema}}.jobs j where j.id = job and j.claims = begin_await.claims and j.holder = begin_await.holder);
  if not holds then
    return;
  end if;
  if begin_await.scope <> '' then
    insert into {{.schema}}.job_fences as f (token, created_at, finished_at, lifetime, class, state, scope, key)
    values (0, now, stays, 0, 4, 5, begin_await.scope, begin_await.key)
    on conflict (key, scope, class) do update
       set state = 5, lifetime = 0, finished_at = greatest(f.finished_at, excluded.finished_at)
     where f.state <> 3 or f.lifetime = 0 and f.finished_at is not null
        or f.lifetime >= 0 and timezone('UTC', timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= excluded.created_at;
    if not found then -- it was emitted
      emitted := true;
      select f.result into answer from {{.schema}}.job_fences f where f.class = 4 and f.scope = begin_await.scope and f.key = begin_await.key;
    end if;
  end if;
  insert into {{.schema}}.job_awaits as a (job_id, identity, created_at, until, state, scope, key, payload)
  values (job, begin_await.identity, now, until, emitted::integer, begin_await.scope, begin_await.key, answer)
  on conflict (job_id, scope, key) do update
     set identity = excluded.identity, created_at = excluded.created_at, until = excluded.until, claims = 0, state = excluded.state, payload = excluded.payload
   where a.identity <> excluded.identity
  returning a.state, a.payload::text into mine;
  state := mine.state;
  payload := coalesce(mine.payload, '');
end
$begin_await$;

-- What a job weighs in its limit, if it has one: the third part of its path.
create function {{.schema}}.weight(path text) returns integer
language sql immutable
return coalesce(nullif(nullif(pg_catalog.split_part(path, E'\x1f', 3), ''), '@')::integer, 1);

-- Calls lanes, limits and groups: a promoter looks at them when the calls are due (internal/promoter).
create function {{.schema}}.call(lines text[], due timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $call$
#variable_conflict use_column
begin
  insert into {{.schema}}.lane_calls (slot, due, lane)
  select (get_byte(sha256(decode(replace(l.lane, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint, call.due, l.lane
    from (select distinct lane from unnest(lines) as u(lane)) l;
end
$call$;

-- Tells those that wait for jobs how the jobs ended: the state, and of a completed one the result. It is called in the statement
-- that ends the jobs, or with state 0 in the one that brings them back. Its statements see what was committed before them,
-- also a group that was made after the calling statement began: who made it had the job's row locked, or the promoters look
-- for it. A job that comes back keeps its followers where they are until that is committed. It returns how many groups were
-- called.
create function {{.schema}}.tell(ids bigint[], states smallint[], results text[]) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $tell$
#variable_conflict use_column
declare
  now   timestamptz := statement_timestamp();
  lines text[];
begin
  if ids is null then
    return 0;
  end if;
  if 0 = any (states) then
    perform w.id
       from (select distinct m.group_id from unnest(ids) as u(id) cross join lateral (
                    select group_id from {{.schema}}.job_members where job_id + 0 = u.id and state >= 0 offset 0) m -- no other index has the state
              order by m.group_id) g
      cross join lateral (
            select id from {{.schema}}.job_waits where lane = chr(31) || lpad(g.group_id::text, 19, '0') for no key update) w;
  end if;
  with told as (
    update {{.schema}}.job_members m
       set state = g.state, told = true, result = case when g.state = 5 then nullif(g.result, '')::jsonb end
      from unnest(ids, states, results) as g(id, state, result)
     where m.job_id + 0 = any (array[g.id])
       and ((m.state = 0) = (g.state <> 0) or g.state = 7 and m.state in (6, 8))
    returning m.group_id
  )
  select array_agg(distinct chr(31) || lpad(group_id::text, 19, '0')) into lines from told;
  perform {{.schema}}.call(lines, now);
  return coalesce(cardinality(lines), 0);
end
$tell$;

-- Makes jobs live that wait and are locked: they leave job_waits for jobs, where claims find them from those times on. slots says which
-- times are slots of a rate; null for none. With until, the jobs are leased to a holder until then. Otherwise workers that wait are woken, the one at
-- place first (wake), and the queues of the jobs are returned.
create function {{.schema}}.go_live(ids bigint[], times timestamptz[], slots boolean[], until timestamptz, next_holder bigint, place bigint, own boolean) returns text[]
language plpgsql set search_path = pg_catalog, pg_temp as $go_live$
#variable_conflict use_column
declare
  queues text[]  := '{}';
  wakes  boolean := exists (select from {{.schema}}.waiters w where w.idle_until > statement_timestamp());
  came   record;
begin
  insert into {{.schema}}.jobs (id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                                payload, payload_bytes, metadata, errors, identity, lane, lane_rule, due_at, leased_until, holder)
  select w.id, u.at, w.created_at, case when until is null then w.claims else least(w.claims + 1, 1048575) end,
         w.lost, w.attempts, w.max_attempts, w.priority, w.queue, w.kind, w.scope, w.key, w.payload, w.payload_bytes, w.metadata, w.errors, w.identity,
         case when w.path = '' then null when w.path is null then w.lane when u.slot then w.path || chr(31) || '@' else w.path end,
         nullif(w.lane_rule, case when w.path = '' then 0 end), coalesce(w.due_at, w.run_at), until, next_holder
    from unnest(ids, times, slots) as u(id, at, slot) cross join lateral (select * from {{.schema}}.job_waits where id = u.id offset 0) w;
  delete from {{.schema}}.job_waits w where w.id = any (ids);
  if until is null then
    for came in
      select j.queue, count(*) filter (where j.run_at < statement_timestamp() + interval '2 seconds') as soon
        from unnest(ids) as u(id) cross join lateral (select queue, run_at from {{.schema}}.jobs where id = u.id offset 0) j
       group by j.queue
    loop
      queues := queues || came.queue;
      if wakes and came.soon > 0 then
        perform {{.schema}}.wake(came.queue, came.soon, place, own);
      end if;
    end loop;
  end if;
  return queues;
end
$go_live$;

-- Hands the places of jobs that have left the table jobs over to the next ones of their lanes and limits, which become live. It is for
-- finish and give_back, whose planner settings it uses. lanes are those of the jobs, as in jobs.lane. Where keeps is true, a job
-- leaves its limit and keeps the place of its lane; where stops is true, its lane stands still from now on. used has the jobs that weighed
-- something else than was said (Lease.SetWeight), and how much more: promoters hear that in a call, which nobody waits for.
--
-- Each step sees what the steps before it did, and what was committed before it began. So a job of a lane that goes on to the line
-- of its limit may get the place there that became free with it. What comes in is never more than what has left, so no step counts
-- what is live, and none needs a lock of the lane. Where fewer come in, a call has a promoter look (internal/promoter): nobody waits, or
-- somebody has locked one of the first ones, or the lane stands still, or a limit has a rate or was lowered, or the job that leaves it, or
-- the next one, weighs more than 1, or a promoter has noted in lane_stops that a heavy one waits for room, which nobody passes. Above READ COMMITTED the
-- steps do not see what others have done since the transaction began, and all is left to calls.
create function {{.schema}}.hand_over(ids bigint[], lanes text[], keeps boolean[], stops boolean[], used jsonb) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $hand_over$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  line   text;
  lines  text[]   := '{}'; -- the lanes and limits that have lost a job, each as often
  owners bigint[] := '{}'; -- and that job
  limited boolean := false; -- some of them are limits
  heavy  text[]   := '{}'; -- those that have lost a job which weighs more than 1
  came   text[]   := '{}'; -- those into which one has come, each as often
  comes  bigint[] := '{}'; -- and that job
  found  bigint[];
  froms  text[];
  paths  text[];
  live   bigint[] := '{}'; -- the jobs that become live, as they follow each other in their lines
  goes   bigint[] := '{}'; -- those that go on to the lines of their limits
  limits text[]   := '{}'; -- and these
  times  timestamptz[];
begin
  -- The places are given back, and a lane stands still that a dead or held job stops.
  for i in 1 .. cardinality(ids) loop
    line := split_part(lanes[i], chr(31), 1);
    if line <> '' and keeps[i] is not true then
      lines := lines || line; owners := owners || ids[i];
    end if;
    line := split_part(lanes[i], chr(31), 2);
    if line <> '' then
      lines := lines || line; owners := owners || ids[i]; limited := true;
      if {{.schema}}.weight(lanes[i]) > 1 then
        heavy := heavy || line;
      end if;
      if used ? ids[i]::text then
        insert into {{.schema}}.lane_calls (slot, due, lane)
        values ((get_byte(sha256(decode(replace(line, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint, now, line || chr(31) || (used ->> ids[i]::text));
      end if;
    end if;
  end loop;
  if lines = '{}' then
    return;
  end if;
  delete from {{.schema}}.lane_places p using unnest(lines, owners) as l(lane, id) where p.lane = any (array[l.lane]) and p.id = l.id;
  if true = any (stops) then
    insert into {{.schema}}.lane_stops (lane, id)
    select split_part(u.lane, chr(31), 1), u.id
      from unnest(ids, lanes, stops) as u(id, lane, stops)
     where u.stops and split_part(u.lane, chr(31), 1) <> ''
    on conflict do nothing;
  end if;

  if current_setting('transaction_isolation') = 'read committed' then
    -- Of each lane as many as have left it, its first ones. They are chosen before they are locked: for one that somebody else has
    -- locked no other one comes.
    select array_agg(w.id), array_agg(w.path), array_agg(l.lane) into found, paths, froms
      from (select lane, count(*) as n from unnest(lines) as l(lane) where lane not like '/%' group by lane order by lane) l
     cross join lateral (
           select f.id
             from (values (-1::smallint), (0::smallint), (1::smallint)) as p(priority)
            cross join lateral (
                  select id from {{.schema}}.job_waits
                   where lane = l.lane and priority = p.priority and run_at <= now
                   order by run_at, id
                   limit l.n) f
            limit l.n) f
     cross join lateral (
           select id, path from {{.schema}}.job_waits
            where id = f.id and lane is not distinct from l.lane and run_at <= now and not exists (select from {{.schema}}.jobs where id = f.id offset 0)
              for update skip locked) w
     where not exists (select from {{.schema}}.lane_stops s where s.lane = l.lane offset 0)
       and not exists (select from {{.schema}}.lane_limits s where s.lane = any (array[l.lane, split_part(l.lane, '/', 1) || '/']) and s.lowered offset 0);
    for i in 1 .. coalesce(cardinality(found), 0) loop
      came := came || froms[i]; comes := comes || found[i];
      if paths[i] is null then
        live := live || found[i];
      else
        goes := goes || found[i]; limits := limits || split_part(paths[i], chr(31), 2);
      end if;
    end loop;

    -- One that has a limit, too, goes on to the end of the limit's line, with its place in the lane. The clock says the end: this
    -- statement may have waited, and the one before it in the lane has gone on meanwhile.
    if goes <> '{}' then
      now := clock_timestamp();
      times := array(select now - n * interval '1 microsecond' from generate_series(cardinality(goes) - 1, 0, -1) as n);
      update {{.schema}}.job_waits w set lane = u.line, run_at = u.at, due_at = coalesce(w.due_at, w.run_at)
        from unnest(goes, limits, times) as u(id, line, at) where w.id = any (array[u.id]);
    end if;

    -- Of those that wait for a limit, as many as have left it, the first ones that nobody has locked: limits have no order to keep. Those
    -- that have just left it are not among them.
    if limited then
      select array_agg(w.id), array_agg(l.lane) into found, froms
        from (select lane, count(*) as n from unnest(lines) as l(lane) where lane like '/%' and lane <> all (heavy) group by lane order by lane) l
       cross join lateral (
             select w.id, w.path
               from (values (-1::smallint), (0::smallint), (1::smallint)) as p(priority)
              cross join lateral (
                    select id, path from {{.schema}}.job_waits
                     where lane = l.lane and priority = p.priority and run_at <= now and id <> all (ids)
                     order by run_at, id
                     limit l.n
                       for update skip locked) w
              where not exists (select from {{.schema}}.jobs where id = w.id offset 0)
              limit l.n) w
       where not exists (select from {{.schema}}.lane_limits s
                          where s.lane = any (array[l.lane, left(l.lane, strpos(substr(l.lane, 2), '/') + 1)]) and (s.lowered or s.rate is not null) offset 0)
         and not exists (select from {{.schema}}.pauses p
                          where p.what = 'limit' and p.name = substr(l.lane, 2) and (p.until is null or p.until > now) offset 0)
         and not exists (select from {{.schema}}.lane_stops s where s.lane = l.lane offset 0)
         and {{.schema}}.weight(w.path) = 1;
      came := came || froms; comes := comes || found; live := live || found;
    end if;
  end if;

  -- They become live. Claims take jobs of one time by their ids, so each is a microsecond earlier than the one behind it.
  if comes <> '{}' then
    insert into {{.schema}}.lane_places (lane, id) select p.lane, p.id from unnest(came, comes) as p(lane, id) on conflict do nothing;
  end if;
  if live <> '{}' then
    now := clock_timestamp();
    times := array(select now - n * interval '1 microsecond' from generate_series(cardinality(live) - 1, 0, -1) as n);
    perform {{.schema}}.go_live(live, times, null, null, null, (random() * 9223372036854775000)::bigint, false);
  end if;

  -- Promoters look at the lines into which fewer came than have left, and at those of the limits for which jobs wait now.
  if goes <> '{}' or cardinality(came) < cardinality(lines) then
    perform {{.schema}}.call(limits || array(
      select l.lane
        from (select lane, 1 as n from unnest(lines) as l(lane) union all select lane, -1 from unnest(came) as c(lane)) l
       group by l.lane having sum(l.n) > 0), now);
  end if;
end
$hand_over$;

-- Writes jobs that are about to leave jobs, or job_waits, into the history, for so many milliseconds (keeps; -1: until somebody decides,
-- 0: not at all). notes are what is added to their errors. Their rows are locked. It is for finish and cancel, whose planner settings it uses.
--
-- If another job has the id there, because the sequence was set back, a completed one makes room. For one that waits for a person
-- this one cannot end, unless it is completed, and then it leaves no record.
create function {{.schema}}.keep_history(ids bigint[], states smallint[], results text[], spents integer[], keeps bigint[], notes jsonb[], waits boolean) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $keep_history$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  untils timestamptz[] := array(select case when k.keep > 0 then now + k.keep::float8 * interval '1 millisecond' end from unnest(keeps) as k(keep));
  written bigint;
begin
  insert into {{.schema}}.job_history as h (id, run_at, created_at, finished_at, keep_until, claims, lost, attempts, max_attempts,
         priority, state, queue, kind, scope, key, payload, payload_bytes, metadata, identity, result, errors, lane, lane_rule, if_dead)
  select j.id, j.run_at, j.created_at, now, g.until,
         j.claims, j.lost, j.attempts + g.spent, j.max_attempts, j.priority, g.state, j.queue, j.kind, j.scope, j.key,
         j.payload, j.payload_bytes, j.metadata, j.identity, nullif(g.result, '')::jsonb,
         case when g.note is null then j.errors when jsonb_array_length(j.errors) >= 10 then j.errors - 0 || g.note
              else coalesce(j.errors, '[]') || g.note end, j.lane, j.lane_rule, j.if_dead
    from unnest(ids, states, results, spents, keeps, notes, untils) as g(id, state, result, spent, keep, note, until)
   cross join lateral (
         select id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                payload, payload_bytes, metadata, identity, errors, lane, lane_rule, null::smallint as if_dead
           from {{.schema}}.jobs where id = g.id and not keep_history.waits
         union all
         select id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                payload, payload_bytes, metadata, identity, errors, nullif(coalesce(path, lane), ''), lane_rule, if_dead
           from {{.schema}}.job_waits where id = g.id and keep_history.waits
         offset 0) j
   where g.keep <> 0
  on conflict (id) do update
     set (run_at, created_at, finished_at, keep_until, claims, lost, attempts, max_attempts, priority, state,
          queue, kind, scope, key, payload, payload_bytes, metadata, identity, result, errors, lane, lane_rule, if_dead)
       = row(excluded.run_at, excluded.created_at, excluded.finished_at, excluded.keep_until, excluded.claims, excluded.lost,
             excluded.attempts, excluded.max_attempts, excluded.priority, excluded.state, excluded.queue, excluded.kind,
             excluded.scope, excluded.key, excluded.payload, excluded.payload_bytes, excluded.metadata, excluded.identity,
             excluded.result, excluded.errors, excluded.lane, excluded.lane_rule, excluded.if_dead)
   where h.state = 5;
  get diagnostics written = row_count;
  if written < (select count(*) from unnest(keeps) as k(keep) where k.keep <> 0) then
    perform {{.schema}}.id_taken(g.id)
       from unnest(ids, states, keeps) as g(id, state, keep)
      cross join lateral (select finished_at, created_at from {{.schema}}.job_history where id = g.id offset 0) h
      cross join lateral (
            select created_at from {{.schema}}.jobs where id = g.id and not keep_history.waits
            union all
            select created_at from {{.schema}}.job_waits where id = g.id and keep_history.waits
            offset 0) j
      where g.keep <> 0 and g.state <> 5 and (h.finished_at, h.created_at) <> (now, j.created_at);
  end if;
end
$keep_history$;

-- Ends jobs whose guards (claims, holder) hold, which the arrays have in the order of their ids: they leave the table jobs in a finished
-- state each, their fences say so, those that are kept (for so many milliseconds, -1 for ever, 0 not at all) go to the history, the next
-- ones of their lanes and limits go on, and who waits for them is told. It returns the tokens of the jobs that were ended. If must is
-- true and a guard does not hold, it raises OQ001. errors: see give_back. used: see hand_over. Locks: the jobs by id, their fences, what waits.
create function {{.schema}}.finish(ids bigint[], claims integer[], holders bigint[], states smallint[], results text[], errors text[], spents integer[], keeps bigint[], must boolean, used jsonb default null)
returns bigint[]
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
                 set jit = off set plan_cache_mode = force_generic_plan as $finish$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  ns     integer[];  -- the places in the arrays of the jobs whose guards hold
  tokens bigint[];
  scopes text[];
  keys   text[];
  lanes  text[];
  rules  smallint[];
  told   boolean;
  stops  boolean[];
  notes  jsonb[];    -- of the errors
begin
  -- The jobs whose guards hold are locked. From here on the arrays have these alone. For a single one it needs no arrays.
  if cardinality(ids) = 1 then
    select array[1], array[j.id << 20 | j.claims::bigint], array[j.scope], array[j.key], array[j.lane], array[j.lane_rule], j.lane_rule & 4::smallint = 4
      into ns, tokens, scopes, keys, lanes, rules, told
      from {{.schema}}.jobs j where j.id = ids[1] and j.claims = finish.claims[1] and j.holder = holders[1] for update;
  else
    select array_agg(u.n::integer), array_agg(j.id << 20 | u.claims::bigint), array_agg(j.scope), array_agg(j.key), array_agg(j.lane), array_agg(j.lane_rule), bool_or(j.lane_rule & 4::smallint = 4)
      into ns, tokens, scopes, keys, lanes, rules, told
      from unnest(ids, finish.claims, holders) with ordinality as u(id, claims, holder, n)
     cross join lateral (
           select id, scope, key, lane, lane_rule from {{.schema}}.jobs
            where id = u.id and claims = u.claims and holder = u.holder
              for update) j;
  end if;
  if ns is null or cardinality(ns) < cardinality(ids) then
    if must then
      perform {{.schema}}.lease_lost(ids[1]);
    elsif ns is null then
      return null;
    end if;
    select array_agg(ids[n]), array_agg(states[n]), array_agg(results[n]), array_agg(errors[n]), array_agg(spents[n]), array_agg(keeps[n])
      into ids, states, results, errors, spents, keeps from unnest(ns) as n;
  end if;

  -- Each fence must still be its job's: another job may have taken the key of a dead one.
  if array_remove(keys, null) <> '{}' then
    update {{.schema}}.job_fences f
       set state = case when g.state = 5 then 3 when g.state = 6 then 4 when g.state = 7 then 5 else 6 end, token = g.token,
           finished_at = case when g.state < 8 then now end, result = nullif(g.result, '')::jsonb
      from unnest(ids, tokens, scopes, keys, states, results) as g(id, token, scope, key, state, result)
     where f.key = any (array[g.key]) and f.scope = g.scope and f.class + 0 = 0 and f.job_id = g.id;
  end if;

  if 0 <> any (keeps) then
    if '' <> any (errors) then
      notes := array(select case when g.error <> '' then jsonb_build_object('at', now, 'attempt', j.attempts + 1) || g.error::jsonb end
                       from unnest(ids, errors) as g(id, error) cross join lateral (select attempts from {{.schema}}.jobs where id = g.id offset 0) j);
    end if;
    perform {{.schema}}.keep_history(ids, states, results, spents, keeps, notes, false);
  end if;
  delete from {{.schema}}.jobs j where j.id = any (ids);

  if array_remove(lanes, null) <> '{}' then
    if states && '{6,8}' then
      stops := array(select g.rule & 2::smallint = 2 and g.state in (6, 8) from unnest(rules, states) as g(rule, state));
    end if;
    perform {{.schema}}.hand_over(ids, lanes, null, stops, used);
  end if;
  if told then
    perform {{.schema}}.tell(array_agg(g.id), array_agg(g.state), array_agg(g.result))
       from unnest(ids, rules, states, results) as g(id, rule, state, result) where g.rule & 4::smallint = 4;
  end if;
  return tokens;
end
$finish$;

-- Completes one job of a lane, if its guard holds, and leases the next job to the holder, for so many microseconds, if one becomes live,
-- has lost no lease, and is of this queue and one of these kinds. It does for one job what finish and hand_over do for many, step by
-- step and with no arrays: a lane waits for it. It is not for a job that weighs more than 1 in its limit. calls says that lines were called of which nobody hears otherwise. If must is true and
-- the guard does not hold, it raises OQ001; if it is false, done is null.
create function {{.schema}}.finish_next(id bigint, claims integer, holder bigint, result text, must boolean,
                                        lease bigint, next_holder bigint, next_queue text, next_kinds text[],
                                        out done bigint, out calls boolean, out leased {{.schema}}.jobs)
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
                 set jit = off set plan_cache_mode = force_generic_plan as $finish_next$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  hands  boolean := current_setting('transaction_isolation') = 'read committed';
  gone   record;
  line   text;
  came   bigint; -- the job that comes into the line
  went   text;   -- its lane and its limit, if it has a limit
  comes  timestamptz;
  until  timestamptz;
  job    {{.schema}}.jobs;
  called text[] := '{}';
  wakes  text;   -- the queue of one that is live and not leased
begin
  calls := false;
  delete from {{.schema}}.jobs j where j.id = finish_next.id and j.claims = finish_next.claims and j.holder = finish_next.holder
    returning scope, key, lane into gone;
  if not found then
    if must then
      perform {{.schema}}.lease_lost(finish_next.id);
    end if;
    return;
  end if;
  done := finish_next.id;
  if gone.key is not null then
    update {{.schema}}.job_fences f
       set state = 3, token = finish_next.id << 20 | finish_next.claims::bigint, finished_at = now, result = nullif(finish_next.result, '')::jsonb
     where f.key = gone.key and f.scope = gone.scope and f.class + 0 = 0 and f.job_id = finish_next.id;
  end if;

  for part in 1 .. 2 loop -- its lane, and its limit
    line := split_part(gone.lane, chr(31), part);
    continue when coalesce(line, '') = '';
    delete from {{.schema}}.lane_places p where p.lane = line and p.id = finish_next.id;
    came := null;
    if not hands then
      null;
    elsif part = 1 then
      -- The first one of the lane. For one that somebody else has locked no other one comes.
      select w.id, w.path into came, went
        from (select f.id
                from (values (-1::smallint), (0::smallint), (1::smallint)) as p(priority)
               cross join lateral (
                     select id from {{.schema}}.job_waits
                      where lane = line and priority = p.priority and run_at <= now
                      order by run_at, id limit 1) f
               limit 1) f
       cross join lateral (
             select id, path from {{.schema}}.job_waits
              where id = f.id and lane is not distinct from line and run_at <= now and not exists (select from {{.schema}}.jobs where id = f.id offset 0)
                for update skip locked) w
       where not exists (select from {{.schema}}.lane_stops where lane = line offset 0)
         and not exists (select from {{.schema}}.lane_limits where lane = any (array[line, split_part(line, '/', 1) || '/']) and lowered offset 0);
    else
      -- The first one that waits for the limit and that nobody has locked.
      select w.id, null into came, went
        from (values (-1::smallint), (0::smallint), (1::smallint)) as p(priority)
       cross join lateral (
             select id, path from {{.schema}}.job_waits w
              where lane = line and priority = p.priority and run_at <= now and not exists (select from {{.schema}}.jobs j where j.id = w.id offset 0)
              order by run_at, id limit 1
                for update skip locked) w
       where not exists (select from {{.schema}}.lane_limits
                          where lane = any (array[line, left(line, strpos(substr(line, 2), '/') + 1)]) and (lowered or rate is not null) offset 0)
         and not exists (select from {{.schema}}.pauses p
                          where p.what = 'limit' and p.name = substr(line, 2) and (p.until is null or p.until > statement_timestamp()) offset 0)
         and not exists (select from {{.schema}}.lane_stops where lane = line offset 0)
         and {{.schema}}.weight(w.path) = 1
       limit 1;
    end if;
    if came is null then
      called := called || line;
      calls := calls or part = 2 and exists (select from {{.schema}}.job_waits where lane = line);
      continue;
    end if;
    insert into {{.schema}}.lane_places (lane, id) values (line, came) on conflict do nothing;
    comes := clock_timestamp(); -- as in hand_over
    if went is not null then
      -- It has a limit, too, and goes on to the end of that line.
      line := split_part(went, chr(31), 2);
      update {{.schema}}.job_waits set lane = line, run_at = comes, due_at = coalesce(due_at, run_at) where id = came;
      now := comes; -- it may be the one that comes next there
      called := called || line;
      calls := calls or line <> split_part(gone.lane, chr(31), 2);
      continue;
    end if;
    until := comes + lease::float8 * interval '1 microsecond';
    with moved as (
      delete from {{.schema}}.job_waits w where w.id = came
      returning w.*, leased.id is null and w.lost = 0 and w.queue = next_queue and w.kind = any (next_kinds) as next
    )
    insert into {{.schema}}.jobs as j (id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                                       payload, payload_bytes, metadata, errors, identity, lane, lane_rule, due_at, leased_until, holder)
    select m.id, comes, m.created_at, case when m.next then least(m.claims + 1, 1048575) else m.claims end,
           m.lost, m.attempts, m.max_attempts, m.priority, m.queue, m.kind, m.scope, m.key,
           m.payload, m.payload_bytes, m.metadata, m.errors, m.identity, coalesce(m.path, m.lane), m.lane_rule, coalesce(m.due_at, m.run_at),
           case when m.next then until end, case when m.next then next_holder end
      from moved m
    returning j.* into job;
    if job.holder is not null then
      leased := job;
    else
      wakes := job.queue;
    end if;
  end loop;

  if called <> '{}' then
    perform {{.schema}}.call(called, now);
  end if;
  if wakes is not null and exists (select from {{.schema}}.waiters w where w.idle_until > now) then
    perform {{.schema}}.wake(wakes, 1, (random() * 9223372036854775000)::bigint, false);
  end if;
end
$finish_next$;

-- Gives jobs back whose guards hold: they run again after their delays, in microseconds. One with a limit, and one in a lane that others
-- may overtake in, waits in job_waits until then, and the next ones go on: see hand_over. errors are noted: texts of JSON objects, an empty one is none. spents
-- are attempts that count; reset counts from none again, as another round with new effects; at most so many lost leases go on counting
-- (most). scope and key are the event that a job waits for, or an empty scope and the name of a sleep; null for neither: then its row
-- in job_awaits says for how long. tokens are those of the jobs that were given back, and cancelled those among them that somebody
-- wants cancelled. If must is true and a guard does not hold, it raises OQ001. used: see hand_over. Locks: the rows of job_awaits, the jobs by id, what waits.
create function {{.schema}}.give_back(ids bigint[], claims integer[], holders bigint[], errors text[], spents integer[], resets boolean[], delays bigint[], most integer[], must boolean,
                                      scopes text[], keys text[], used jsonb default null, out tokens bigint[], out cancelled bigint[])
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
                 set jit = off set plan_cache_mode = force_generic_plan as $give_back$
#variable_conflict use_column
declare
  now   timestamptz := statement_timestamp();
  asked bigint[] := ids;
  noted bigint[];  -- the jobs whose rows of job_awaits are locked
  moves bigint[];  -- those that go to job_waits
  lanes text[];    -- their lanes and limits,
  keeps boolean[]; -- and whether they keep the places of their lanes
  notes jsonb[];
  times timestamptz[]; -- when they run again
  rounds bigint[]; -- their identities
  calls record;
  forever timestamptz := now + interval '36000 days'; -- who ends such a wait leaves the call
begin
  -- The row of job_awaits stays locked until the job is given back. So Emit, which writes that row before it looks for the job,
  -- finds the job. If Emit has the row, the job comes again after its delay. A worker that has lost its lease must not undo what a
  -- later one has noted, hence greatest.
  if array_remove(keys, null) <> '{}' then
    select array_agg(w.job_id),
           array_agg(case when w.state = 0 then greatest(0, (extract(epoch from w.until - now) * 1e6)::bigint)
                          when w.state is not null then 0 else u.delay end)
      into noted, delays
      from unnest(ids, scopes, keys, delays) as u(id, scope, key, delay)
      left join lateral (
           select job_id, state, until from {{.schema}}.job_awaits
            where job_id = u.id and scope = u.scope and key = u.key
              for update skip locked) w on true;
    update {{.schema}}.job_awaits a set claims = greatest(a.claims, u.claims)
      from unnest(noted, give_back.claims, scopes, keys) as u(id, claims, scope, key)
     where a.job_id = any (array[u.id]) and a.scope = u.scope and a.key = u.key;
  end if;

  -- The jobs whose guards hold are locked. From here on the arrays have these alone. One whose id another job has in job_waits, because
  -- the sequence was set back, stays in jobs.
  select array_agg(j.id), array_agg(j.id << 20 | u.claims::bigint), array_agg(u.spent), array_agg(u.reset), array_agg(u.delay), array_agg(u.most),
         array_agg(case when u.error <> '' then jsonb_build_object('at', now, 'attempt', j.attempts + 1) || u.error::jsonb end),
         array_agg(case when u.delay <= 0 and j.moves then j.created_at else now + u.delay::float8 * interval '1 microsecond' end),
         array_agg(case when u.reset then coalesce(j.identity, (extract(epoch from j.created_at) * 1e6)::bigint) + 1 else j.identity end),
         array_agg(j.id) filter (where j.moves), array_agg(j.lane) filter (where j.moves), array_agg(j.keeps) filter (where j.moves)
    into ids, tokens, spents, resets, delays, most, notes, times, rounds, moves, lanes, keeps
    from (select * from unnest(ids, give_back.claims, holders, give_back.errors, spents, resets, delays, most)
              as u(id, claims, holder, error, spent, reset, delay, most)
           order by id) u
   cross join lateral (
         select id, attempts, created_at, identity, lane, coalesce(split_part(lane, chr(31), 1) <> '' and not (lane_rule & 1::smallint = 1 and u.delay > 0), false) as keeps,
                coalesce(split_part(lane, chr(31), 2) <> '' or lane_rule & 1::smallint = 1 and u.delay > 0, false)
                and not exists (select from {{.schema}}.job_waits w where w.id = u.id offset 0) as moves
           from {{.schema}}.jobs
          where id = u.id and claims = u.claims and holder = u.holder
            for update) j;
  if must and cardinality(asked) > coalesce(cardinality(ids), 0) then
    perform {{.schema}}.lease_lost(asked[1]);
  end if;
  if ids is null then
    return;
  end if;

  -- Those that stay in jobs.
  update {{.schema}}.jobs j
     set run_at = u.at, due_at = null, leased_until = null, holder = null, attempts = case when u.reset then 0 else j.attempts + u.spent end,
         lost = least(j.lost, u.most), identity = u.round,
         errors = case when u.note is null then j.errors when jsonb_array_length(j.errors) >= 10 then j.errors - 0 || u.note
                       else coalesce(j.errors, '[]') || u.note end
    from unnest(ids, times, spents, resets, most, rounds, notes) as u(id, at, spent, reset, most, round, note)
   where j.id = any (array[u.id]) and u.id <> all (coalesce(moves, '{}'));

  -- Those that wait. With a limit and no delay one was only given back, and goes before those that have come since.
  if moves is not null then
    insert into {{.schema}}.job_waits (id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                                       payload, payload_bytes, metadata, errors, identity, lane, lane_rule, due_at, path)
    select j.id, u.at, j.created_at, j.claims, least(j.lost, u.most), case when u.reset then 0 else j.attempts + u.spent end,
           j.max_attempts, j.priority, j.queue, j.kind, j.scope, j.key, j.payload, j.payload_bytes, j.metadata,
           case when u.note is null then j.errors when jsonb_array_length(j.errors) >= 10 then j.errors - 0 || u.note
                else coalesce(j.errors, '[]') || u.note end, u.round,
           case when m.keeps or split_part(j.lane, chr(31), 1) = '' then split_part(j.lane, chr(31), 2) else split_part(j.lane, chr(31), 1) end, j.lane_rule,
           case when u.delay <= 0 then now end, nullif(replace(j.lane, chr(31) || '@', ''), split_part(j.lane, chr(31), 1))
      from unnest(ids, times, spents, resets, delays, most, rounds, notes) as u(id, at, spent, reset, delay, most, round, note)
      join unnest(moves, keeps) as m(id, keeps) on m.id = u.id
     cross join lateral (select * from {{.schema}}.jobs where id = u.id offset 0) j;
    delete from {{.schema}}.jobs j where j.id = any (moves);
    perform {{.schema}}.hand_over(moves, lanes, keeps, null, used);
    for calls in
      select array_agg(w.lane) as lines, w.due
        from unnest(moves) as m(id)
       cross join lateral (select lane, greatest(run_at, now) as due from {{.schema}}.job_waits where id = m.id and run_at < forever offset 0) w
       group by w.due
    loop
      perform {{.schema}}.call(calls.lines, calls.due); -- not in the query: Citus refuses that
    end loop;
  end if;

  select array_agg(x.job_id) into cancelled
    from unnest(ids) as u(id)
   cross join lateral (select id, created_at from {{.schema}}.jobs where id = u.id union all select id, created_at from {{.schema}}.job_waits where id = u.id offset 0) j
   cross join lateral (select job_id from {{.schema}}.job_cancels where job_id = u.id and requested_at >= j.created_at offset 0) x;
end
$give_back$;

-- Cancels those of the jobs that nobody has leased, and returns them: they go to the history for keep milliseconds, and who waits for
-- them is told. It waits for no lock, so not for a handler's transaction either. If asked is true it takes only those that somebody
-- asked to cancel before. counts is 1 if their keys stay taken for their windows in any case: then the fence of a job that no claim had
-- counts one. What waits for its lane may become live meanwhile, so job_waits comes first. Promoters hear of the places that became free, and
-- where a heavy job waited that may have kept others from their limit.
create function {{.schema}}.cancel(ids bigint[], keep bigint, asked boolean, counts integer,
                                   out cancelled bigint[], out queues text[], out kinds text[], out scopes text[], out keys text[])
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
                 set jit = off set plan_cache_mode = force_generic_plan as $cancel$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  waits  bigint[];  -- those that were in job_waits
  lines  text[];    -- of each job: its lane and its limit, as in jobs.lane, of which it has places
  tokens bigint[];
  rules  smallint[];
  waiting boolean;
begin
  select array_agg(w.id), array_agg(case when w.lane not like '/%' then null when {{.schema}}.weight(w.path) > 1 then w.path else split_part(w.path, chr(31), 1) end), array_agg(w.queue), array_agg(w.kind), array_agg(coalesce(w.scope, '')),
         array_agg(coalesce(w.key, '')), array_agg(w.id << 20 | greatest(w.claims, counts)::bigint), array_agg(w.lane_rule)
    into waits, lines, queues, kinds, scopes, keys, tokens, rules
    from (select id from unnest(ids) as u(id) order by id) u
   cross join lateral (
         select id, lane, path, queue, kind, scope, key, claims, lane_rule from {{.schema}}.job_waits w
          where id = u.id and (not asked or exists (select from {{.schema}}.job_cancels x where x.job_id = u.id and x.requested_at >= w.created_at offset 0))
            for update of w skip locked) w;
  select waits || array_agg(j.id), lines || array_agg(j.lane), queues || array_agg(j.queue), kinds || array_agg(j.kind), scopes || array_agg(coalesce(j.scope, '')),
         keys || array_agg(coalesce(j.key, '')), tokens || array_agg(j.id << 20 | greatest(j.claims, counts)::bigint), rules || array_agg(coalesce(j.lane_rule, 0::smallint))
    into cancelled, lines, queues, kinds, scopes, keys, tokens, rules
    from (select id from unnest(ids) as u(id) where id <> all (coalesce(waits, '{}')) order by id) u
   cross join lateral (
         select id, lane, queue, kind, scope, key, claims, lane_rule from {{.schema}}.jobs j
          where id = u.id and (leased_until is null or leased_until <= now)
            and (not asked or exists (select from {{.schema}}.job_cancels x where x.job_id = u.id and x.requested_at >= j.created_at offset 0))
            for update of j skip locked) j;
  if cancelled is null then
    return;
  end if;

  update {{.schema}}.job_fences f set state = 5, token = greatest(f.token, g.token), finished_at = now
    from unnest(cancelled, tokens, scopes, keys) as g(id, token, scope, key)
   where g.key <> '' and f.key = any (array[g.key]) and f.scope = g.scope and f.class + 0 = 0 and f.job_id = g.id;
  for waiting in select unnest(array[true, false]) loop
    perform {{.schema}}.keep_history(array_agg(g.id), array_agg(7::smallint), array_agg(''::text), array_agg(0), array_agg(keep), null, waiting)
       from unnest(cancelled) as g(id) where (g.id = any (coalesce(waits, '{}'))) = waiting having count(*) > 0;
  end loop;
  delete from {{.schema}}.job_cancels x where x.job_id = any (cancelled);
  delete from {{.schema}}.job_waits w where w.id = any (waits);
  delete from {{.schema}}.jobs j using unnest(cancelled) as g(id) where j.id = any (array[g.id]) and g.id <> all (coalesce(waits, '{}'));

  if array_remove(lines, null) <> '{}' then
    delete from {{.schema}}.lane_places p using unnest(cancelled, lines) as u(id, lane)
     where p.lane = any (string_to_array(u.lane, chr(31))) and p.id = u.id;
    perform {{.schema}}.call(array(
      select l from unnest(lines) as u(lane) cross join lateral unnest(string_to_array(u.lane, chr(31))) as l where l like '%/%'), now);
  end if;
  perform {{.schema}}.tell(array_agg(g.id), array_agg(7::smallint), null)
     from unnest(cancelled, rules) as g(id, rule) where g.rule & 4::smallint = 4;
end
$cancel$;

-- Cancels those of the followers whose members are all finished, one of them dead or cancelled, where the rule says so: as cancel, and notes why, for people, and for
-- Group and redrive. A promoter has found them, and since then somebody may have brought their members back: so it looks again, with the followers' rows
-- locked, which redrive needs too. One that somebody has locked is left to the next call.
create function {{.schema}}.cancel_followers(ids bigint[], keep bigint,
                                             out cancelled bigint[], out queues text[], out kinds text[], out scopes text[], out keys text[])
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $cancel_followers$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  locked bigint[];
  gone   record;
  notes  jsonb[];
begin
  select array_agg(w.id) into locked
    from (select id from unnest(ids) as u(id) order by id) u
   cross join lateral (select id from {{.schema}}.job_waits where id = u.id and if_dead = 2 for update skip locked) w;
  select array_agg(g.id) into locked
    from unnest(locked) as g(id)
   where exists (select from {{.schema}}.job_members where group_id = g.id and state in (6, 7))
     and not exists (select from {{.schema}}.job_members where group_id = g.id and state in (0, 8));
  if locked is null then
    return;
  end if;
  gone := {{.schema}}.cancel(locked, keep, false, 0);
  cancelled := gone.cancelled; queues := gone.queues; kinds := gone.kinds; scopes := gone.scopes; keys := gone.keys;
  notes := array(select jsonb_build_array(jsonb_build_object('at', now, 'attempt', h.attempts, 'error', 'a job that it waited for is dead or was cancelled (DeadCancel)'::text))
                   from unnest(cancelled) as u(id) cross join lateral (select attempts from {{.schema}}.job_history where id = u.id offset 0) h);
  update {{.schema}}.job_history h set errors = coalesce(h.errors, '[]') || u.note, if_dead = 3
    from unnest(cancelled, notes) as u(id, note) where h.id = any (array[u.id]) and h.state = 7;
end
$cancel_followers$;

-- Leaves notes for the holders of those of the jobs that are live, and returns how many. It looks once: what waits may be let in meanwhile.
create function {{.schema}}.request_cancels(ids bigint[], out n bigint)
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $request_cancels$
#variable_conflict use_column
begin
  -- A note that is there stays: who has cancelled its job deletes it, and may wait for another one of these.
  with live as materialized (
    select id, created_at from {{.schema}}.jobs where id = any (ids)
    union all
    select id, created_at from {{.schema}}.job_waits where id = any (ids)
  ), noted as (
    insert into {{.schema}}.job_cancels (job_id, requested_at)
    select l.id, greatest(statement_timestamp(), l.created_at) from live l
     where not exists (select from {{.schema}}.job_cancels x
                        where x.job_id = l.id and x.requested_at >= l.created_at offset 0)
     order by l.id on conflict (job_id) do update set requested_at = excluded.requested_at
  ) select count(*) into n from live;
end
$request_cancels$;

-- Moves jobs that nobody has into another queue, with their effects, and returns how many. What waits for its lane may become live meanwhile, so
-- job_waits comes first: such a job keeps its place there. A live one that is due is due from now on, because the new queue's claims have passed the
-- times before; since when it has been due stays known. One that missed its slot of a rate stays late, so that it gets another one.
create function {{.schema}}.move(ids bigint[], queue text, place bigint, own boolean) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $move$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  waits  bigint[];
  lives  bigint[];
  dues   timestamptz[];
  queues text[];  -- where they were
  more   text[];
  firsts bytea[]; -- what names the effects of their first rounds
  lasts  bytea[]; -- and of their last
  begins bytea[];
  ends   bytea[];
  soon   bigint;
begin
  select array_agg(w.id), array_agg(w.queue), array_agg(int8send((extract(epoch from w.created_at) * 1e6)::bigint)),
         array_agg(int8send(coalesce(w.identity, (extract(epoch from w.created_at) * 1e6)::bigint)))
    into waits, queues, firsts, lasts
    from (select id from unnest(ids) as u(id) order by id) u
   cross join lateral (
         select id, queue, created_at, identity from {{.schema}}.job_waits where id = u.id and queue <> move.queue for update skip locked) w;
  if waits is not null then
    update {{.schema}}.job_waits set queue = move.queue where id = any (waits);
  end if;
  select array_agg(j.id), array_agg(j.queue), array_agg(int8send((extract(epoch from j.created_at) * 1e6)::bigint)),
         array_agg(int8send(coalesce(j.identity, (extract(epoch from j.created_at) * 1e6)::bigint))),
         array_agg(case when right(j.lane, 2) = chr(31) || '@' then now - interval '1 second' else now end)
    into lives, more, begins, ends, dues
    from (select id from unnest(ids) as u(id) order by id) u
   cross join lateral (
         select id, queue, created_at, identity, lane from {{.schema}}.jobs
          where id = u.id and leased_until is null and queue <> move.queue
            for update skip locked) j;
  update {{.schema}}.jobs j
     set queue = move.queue, run_at = greatest(j.run_at, u.due), due_at = coalesce(j.due_at, case when j.run_at < u.due then j.run_at end)
    from unnest(lives, dues) as u(id, due) where j.id = any (array[u.id]);
  update {{.schema}}.job_fences f set scope = move.queue
    from unnest(waits || lives, queues || more, firsts || begins, lasts || ends) as g(id, queue, first, last)
   where f.class = 3 and f.scope = g.queue and f.key >= g.id::text collate "C" || '/' and f.key < g.id::text collate "C" || '0'
     and coalesce(f.fingerprint between g.first and g.last, true);
  select count(*) into soon
    from unnest(lives) as u(id) cross join lateral (select run_at from {{.schema}}.jobs where id = u.id offset 0) j where j.run_at <= now;
  if soon > 0 and exists (select from {{.schema}}.waiters w where w.idle_until > now) then
    perform {{.schema}}.wake(move.queue, soon, place, own);
  end if;
  return coalesce(cardinality(waits || lives), 0);
end
$move$;

-- Writes the row of a worker.
create function {{.schema}}.be_present(id bigint, host text, process integer, version text, schema_version integer, lease bigint, queues jsonb, kinds text[], stuck jsonb, pool jsonb, application text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $be_present$
#variable_conflict use_column
declare
  now timestamptz := statement_timestamp();
begin
  insert into {{.schema}}.workers (id, host, process, version, schema_version, lease, queues, kinds, stuck, pool, application, started_at, seen_at)
  values (be_present.id, be_present.host, be_present.process, be_present.version, be_present.schema_version, be_present.lease,
          be_present.queues, be_present.kinds, be_present.stuck, be_present.pool, be_present.application, now, now)
  on conflict (id) do update set seen_at = excluded.seen_at, stuck = excluded.stuck, pool = excluded.pool;
end
$be_present$;

-- Adds two arrays, number by number. The result is as long as the longer one.
create function {{.schema}}.add_each(a integer[], b integer[]) returns integer[]
language plpgsql immutable set search_path = pg_catalog, pg_temp as $add_each$
begin
  return array(select coalesce(u.a, 0) + coalesce(u.b, 0) from unnest(add_each.a, add_each.b) with ordinality as u(a, b, n) order by u.n);
end
$add_each$;

-- Adds what a worker has counted to the rows of the minute that most of the time since the last time belongs to, of its ten minutes and of its hour.
-- Rows are locked in the order of their keys.
create function {{.schema}}.add_counts(queues text[], kinds text[], started integer[], completed integer[], failed integer[], dead integer[], took bigint[],
                                       due integer[], oldest bigint[], durations text[], waits text[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $add_counts$
#variable_conflict use_column
declare
  at timestamptz := statement_timestamp() - interval '30 seconds';
begin
  insert into {{.schema}}.job_counts as c (span, minute, queue, kind, started, completed, failed, dead, took, due, oldest, durations, waits)
  select s.span, date_bin(s.span * interval '1 minute', at, timestamptz '2000-01-01 00:00:00Z'), u.queue, u.kind, u.started, u.completed, u.failed, u.dead, u.took, u.due, u.oldest,
         string_to_array(u.durations, ',')::integer[], string_to_array(u.waits, ',')::integer[]
    from unnest(array[1, 10, 60]::smallint[]) as s(span)
   cross join unnest(queues, kinds, add_counts.started, add_counts.completed, add_counts.failed, add_counts.dead, add_counts.took, add_counts.due,
                     add_counts.oldest, add_counts.durations, add_counts.waits)
      as u(queue, kind, started, completed, failed, dead, took, due, oldest, durations, waits)
   order by s.span, u.queue collate "C", u.kind collate "C"
  on conflict (span, minute, queue, kind) do update
     set started = c.started + excluded.started, completed = c.completed + excluded.completed, failed = c.failed + excluded.failed,
         dead = c.dead + excluded.dead, took = c.took + excluded.took, due = greatest(c.due, excluded.due), oldest = greatest(c.oldest, excluded.oldest),
         durations = {{.schema}}.add_each(c.durations, excluded.durations), waits = {{.schema}}.add_each(c.waits, excluded.waits);
end
$add_counts$;

-- Returns those of the queues that a worker may rescan now: where no other one has in so many microseconds, or one has left jobs of these kinds, or
-- the clock was set back. Others may be asking at the same time.
create function {{.schema}}.rescan_turn(names text[], every bigint, kinds text[]) returns text[]
language plpgsql set search_path = pg_catalog, pg_temp as $rescan_turn$
#variable_conflict use_column
declare
  now  timestamptz := statement_timestamp();
  mine text[];
begin
  select array_agg(q.queue) into mine
    from (select queue from {{.schema}}.queues
           where queue = any (names)
             and (rescanned_at <= now - every::float8 * interval '1 microsecond' or left_kinds && kinds or rescanned_at > now + interval '1 second')
           order by queue
             for update skip locked) q;
  if mine is not null then
    update {{.schema}}.queues set rescanned_at = now, left_kinds = (select array_agg(k) from unnest(left_kinds) as k where k <> all (kinds))
     where queue = any (mine);
  end if;
  return mine;
end
$rescan_turn$;

-- Takes a key outside of jobs, or of an effect: where seen is null an absent one, and else one whose fence, under that token, is still free, or still in
-- doubt (doubtful), or that is of another job or round (strange). Of one in doubt the time of the first intent stays, and the reason or else why: that
-- tells a release that an earlier claim's effect may have happened. holds is false if the job's lease is lost, and token null if the key is not to be had.
-- The guard is read without a lock: the handler's own transaction, on another connection, has the job's row locked.
--
-- An effect of another job that is in the history and may be redriven is not taken, unless nothing of it was applied: a redrive would do it again.
create function {{.schema}}.claim_fence(ids regclass, job bigint, claims integer, holder bigint, class smallint, scope text, key text, claimer bigint, lease bigint, lifetime bigint,
                                        mark bytea, seen bigint, doubtful boolean, why text, strange boolean, drawn bigint,
                                        out holds boolean, out token bigint, out until timestamptz, out since timestamptz, out identity bigint)
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $claim_fence$
#variable_conflict use_column
declare
  now   timestamptz := statement_timestamp();
  ends  timestamptz := now + lease::float8 * interval '1 microsecond';
  fresh bigint;
begin
  holds := job = 0 or exists (select from {{.schema}}.jobs j where j.id = job and j.claims = claim_fence.claims and j.holder = claim_fence.holder);
  if not holds then
    return;
  end if;
  fresh := coalesce(drawn, nextval(ids)) << 20;
  if seen is null then
    insert into {{.schema}}.job_fences (class, scope, key, state, job_id, token, holder, leased_until, created_at, lifetime, fingerprint)
    values (claim_fence.class, claim_fence.scope, claim_fence.key, 1, nullif(job, 0), fresh, claimer, ends, now, claim_fence.lifetime, mark)
    on conflict do nothing;
    if found then
      token := fresh; until := ends; since := now;
    end if;
    return;
  end if;
  if strange then
    perform {{.schema}}.id_taken(h.id)
       from {{.schema}}.job_fences f
      cross join lateral (select id, created_at, identity from {{.schema}}.job_history where id = job and state <> 5 offset 0) h
      where f.class = claim_fence.class and f.scope = claim_fence.scope and f.key = claim_fence.key and seen = f.token and f.state <> 5
        and coalesce(f.fingerprint between int8send((extract(epoch from h.created_at) * 1e6)::bigint)
                                       and int8send(coalesce(h.identity, (extract(epoch from h.created_at) * 1e6)::bigint)), true);
  end if;
  update {{.schema}}.job_fences f
     set state = 1, job_id = nullif(job, 0), token = greatest(f.token + 1, fresh), holder = claimer, leased_until = ends,
         created_at = case when doubtful then f.created_at else now end, identity = case when doubtful then f.identity end,
         fingerprint = case when doubtful then f.fingerprint else mark end, detail = case when doubtful then coalesce(f.detail, why) end,
         lifetime = claim_fence.lifetime, finished_at = null, result = null
   where f.class = claim_fence.class and f.scope = claim_fence.scope and f.key = claim_fence.key and f.token = seen
     and case when doubtful then f.state = 2 or f.state = 1 and f.leased_until <= now
              else strange or (f.state in (3, 4, 5) and f.lifetime >= 0
                               and (f.lifetime = 0 and f.finished_at is not null or timezone('UTC', timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= now)
                               or f.class = 0 and f.state = 5 and f.token = f.token >> 20 << 20) end
  returning f.token, f.leased_until, f.created_at, f.identity into token, until, since, identity;
end
$claim_fence$;

-- Settles a fence that is uncertain or held, or gives a completed one the result that could not be stored, and returns whether there was anything to
-- settle. Token and holder stay, so that a late success is still accepted while nobody has run the work again. The window of a completed effect
-- begins only when the Reaper finds that its job is over. What is completed so has a lifetime of at least at_least.
create function {{.schema}}.resolve_fence(class smallint, scope text, key text, state smallint, result text, at_least bigint) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $resolve_fence$
#variable_conflict use_column
declare
  now timestamptz := statement_timestamp();
begin
  update {{.schema}}.job_fences f
     set state = resolve_fence.state, result = nullif(resolve_fence.result, '')::jsonb, detail = case when resolve_fence.state = 2 then f.detail end,
         finished_at = case when resolve_fence.state <> 2 and (f.class <> 3 or resolve_fence.state = 5) then now end,
         lifetime = case when resolve_fence.state = 5 then 0
                         when resolve_fence.state = 3 and f.lifetime >= 0 then greatest(f.lifetime, resolve_fence.at_least) else f.lifetime end
   where f.class = resolve_fence.class and f.scope = resolve_fence.scope and f.key = resolve_fence.key
     and (f.state in (2, 6) or f.state = 1 and f.leased_until <= now or f.state = 3 and f.detail is not null and resolve_fence.state = 3);
  return found;
end
$resolve_fence$;

-- Settles the uncertain and held effects, of one name or with an empty name all, of jobs in one of these states in the history. It returns how many it
-- settled, and the held jobs among them.
create function {{.schema}}.resolve_effects(ids bigint[], states smallint[], state smallint, result text, name text, out settled bigint, out held bigint[])
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $resolve_effects$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  jobs   bigint[];
  queues text[];
  keys   text[];
  ends   smallint[];
begin
  select array_agg(h.id), array_agg(h.queue), array_agg(h.key), array_agg(h.state) into jobs, queues, keys, ends
    from (select u.id from unnest(ids) as u(id) order by u.id) u
   cross join lateral (select * from {{.schema}}.job_history where id = u.id and state = any (states) for update) a
   cross join lateral (
         select a.id, a.queue, a.state, f.key from {{.schema}}.job_fences f
          where f.class = 3 and f.scope = a.queue and f.key >= a.id::text collate "C" || '/' and f.key < a.id::text collate "C" || '0'
            and coalesce(f.fingerprint = int8send(coalesce(a.identity, (extract(epoch from a.created_at) * 1e6)::bigint)), true)
            and (resolve_effects.name = '' or f.key = a.id::text || '/' || resolve_effects.name) offset 0) h;
  with done as (
    update {{.schema}}.job_fences f
       set state = resolve_effects.state, result = nullif(resolve_effects.result, '')::jsonb, detail = case when resolve_effects.state = 2 then f.detail end,
           finished_at = case when resolve_effects.state = 5 then now end, lifetime = case when resolve_effects.state = 5 then 0 else f.lifetime end
      from unnest(jobs, queues, keys, ends) as g(id, queue, key, state)
     where f.key = any (array[g.key]) and f.scope = g.queue and f.class + 0 = 3 and (f.state in (2, 6) or f.state = 1 and f.leased_until <= now)
    returning g.id, g.state
  )
  select count(*), array_agg(distinct d.id) filter (where d.state = 8) into settled, held from done d;
end
$resolve_effects$;

-- Makes the jobs run now that wait for their time, and returns how many. One whose row somebody has locked is left as it is, and so is one with a slot
-- of a rate, which starts then. What waits for its lane may become live meanwhile, so job_waits comes first.
create function {{.schema}}.hurry(ids bigint[]) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $hurry$
#variable_conflict use_column
declare
  now   timestamptz := statement_timestamp();
  lives bigint[];
  waits bigint[];
  lines text[];
begin
  select array_agg(w.id), array_agg(w.lane) into waits, lines
    from (select id from unnest(ids) as u(id) order by id) u
   cross join lateral (select id, lane from {{.schema}}.job_waits where id = u.id and run_at > now for update skip locked) w;
  if waits is not null then
    update {{.schema}}.job_waits set run_at = now where id = any (waits);
    perform {{.schema}}.call(lines, now);
  end if;
  select array_agg(j.id) into lives
    from (select id from unnest(ids) as u(id) order by id) u
   cross join lateral (
         select id from {{.schema}}.jobs
          where id = u.id and run_at > now and (leased_until is null or leased_until <= now) and (right(lane, 2) = chr(31) || '@') is not true
            for update skip locked) j;
  if lives is not null then
    update {{.schema}}.jobs set run_at = now where id = any (lives);
  end if;
  return coalesce(cardinality(waits), 0) + coalesce(cardinality(lives), 0);
end
$hurry$;

-- What a key's job does when its key is enqueued again (replace.go). parts says so: bit 1 changes the payload and what belongs to it, bit 2 the time, of a job that nobody
-- has started. Without bit 1 its payload must still be the one that was read (marks). With bit 4 a job that nobody has (kept) starts after the caller's commit, and one that
-- somebody has leaves its key, which is free then: its end finds that the fence is another job's, and leaves it alone. job_waits comes first: what waits there may become live
-- meanwhile. A job in a line must have the same lane and limit (paths). One that they have let go on, in part or live, keeps its time.
create function {{.schema}}.replace_jobs(ids bigint[], scopes text[], keys text[], payloads text[], bytes bytea[], metas text[], fingerprints bytea[],
                                         parts smallint[], ats bigint[], delays bigint[], paths text[], marks bytea[], out replaced bigint[], out delayed boolean[], out kept bigint[])
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $replace_jobs$
#variable_conflict use_column
declare
  now   timestamptz := statement_timestamp();
  ns    bigint[]; -- the places of the jobs in the arrays
  waits bigint[];
  lines text[];   -- where those wait
  lives bigint[];
  dues  timestamptz[]; -- null: the time stays
  leave bigint[]; -- those that leave their keys
  calls record;
begin
  select array_agg(u.n) filter (where w.lane is not null), array_agg(w.lane) filter (where w.lane is not null), array_agg(k.id) filter (where k.id is not null) into waits, lines, kept
    from (select * from unnest(ids, scopes, keys, parts, paths) with ordinality as u(id, scope, key, part, path, n) order by u.id) u
    left join lateral (
         select lane from {{.schema}}.job_waits w
          where u.path <> '' and u.part & 3::smallint > 0 and id = u.id and scope = u.scope and key = u.key and claims = 0
            and (string_to_array(coalesce(path, lane), chr(31)))[:2] = (string_to_array(u.path, chr(31)))[:2] and lane = any (string_to_array(u.path, chr(31)))
            and (u.part & 1::smallint > 0 or lane = coalesce(nullif(split_part(u.path, chr(31), 1), ''), split_part(u.path, chr(31), 2)))
            and not exists (select from {{.schema}}.job_cancels x where x.job_id = u.id and x.requested_at >= w.created_at offset 0)
            for update of w) w on true
    left join lateral (select id from {{.schema}}.job_waits where id = u.id and u.part & 4::smallint > 0 and w.lane is null for share) k on true;
  select array_agg(u.n) filter (where j.id is not null), kept || array_agg(k.id) filter (where k.id is not null) into lives, kept
    from (select * from unnest(ids, scopes, keys, parts, paths) with ordinality as u(id, scope, key, part, path, n)
           where u.n <> all (coalesce(waits, '{}')) and u.id <> all (coalesce(kept, '{}')) order by u.id) u
    left join lateral (
         select id from {{.schema}}.jobs j
          where u.part & 3::smallint > 0 and id = u.id and scope = u.scope and key = u.key and claims = 0 and leased_until is null
            and case when u.path = '' then lane is null else (string_to_array(lane, chr(31)))[:2] = (string_to_array(u.path, chr(31)))[:2] and u.part & 1::smallint > 0 end
            and not exists (select from {{.schema}}.job_cancels x where x.job_id = u.id and x.requested_at >= j.created_at offset 0)
            for update of j) j on true
    left join lateral (select id from {{.schema}}.jobs where id = u.id and u.part & 4::smallint > 0 and j.id is null and leased_until is null for share) k on true;
  select array_agg(u.n) filter (where u.change), array_agg(u.n) filter (where not u.change) into ns, leave
    from (select *, n = any (coalesce(waits || lives, '{}')) as change
            from unnest(ids, scopes, keys, parts, marks) with ordinality as u(id, scope, key, part, mark, n) order by scope, key) u
   cross join lateral (
         select from {{.schema}}.job_fences f
          where f.key = any (array[u.key]) and f.scope = u.scope and f.class + 0 = 0 and f.job_id = u.id and f.state = 0
            and case when u.change then u.part & 1::smallint > 0 or f.fingerprint is not distinct from u.mark else u.part & 4::smallint > 0 and u.id <> all (coalesce(kept, '{}')) end
            for update) f;
  update {{.schema}}.job_fences f set state = 5, lifetime = 0, finished_at = now from unnest(ids, scopes, keys) with ordinality as u(id, scope, key, n)
   where u.n = any (leave) and f.key = any (array[u.key]) and f.scope = u.scope and f.class + 0 = 0 and f.job_id = u.id;
  if ns is null then
    return;
  end if;

  update {{.schema}}.job_fences f set fingerprint = u.fingerprint
    from unnest(ids, scopes, keys, parts, fingerprints) with ordinality as u(id, scope, key, part, fingerprint, n)
   where u.n = any (ns) and u.part & 1::smallint > 0 and f.key = any (array[u.key]) and f.scope = u.scope and f.class + 0 = 0 and f.job_id = u.id;
  dues := array(select case when u.part & 2::smallint > 0 and case when w.line is null then u.path = '' else w.line = coalesce(nullif(split_part(u.path, chr(31), 1), ''), split_part(u.path, chr(31), 2)) end
                            then greatest(now + u.delay::float8 * interval '1 microsecond', timestamptz 'epoch' + nullif(u.at, 0)::float8 * interval '1 microsecond') end
                  from unnest(parts, ats, delays, paths) with ordinality as u(part, at, delay, path, n)
                  left join unnest(waits, lines) as w(n, line) on w.n = u.n
                 order by u.n);
  update {{.schema}}.job_waits w
     set payload       = case when u.part & 1::smallint > 0 then nullif(u.payload, '')::jsonb else w.payload end,
         payload_bytes = case when u.part & 1::smallint = 0 then w.payload_bytes when u.payload = '' then u.bytes end,
         metadata      = case when u.part & 1::smallint > 0 then nullif(u.metadata, '')::jsonb else w.metadata end,
         path          = case when u.part & 1::smallint > 0 and w.path is not null then u.path else w.path end,
         run_at        = case when u.due > now then u.due else least(w.run_at, u.due) end,
         due_at        = case when u.due is null then w.due_at end
    from unnest(ids, payloads, bytes, metas, parts, dues, paths) with ordinality as u(id, payload, bytes, metadata, part, due, path, n)
   where u.n = any (ns) and u.n = any (waits) and w.id = any (array[u.id]);
  update {{.schema}}.jobs j
     set payload       = case when u.part & 1::smallint > 0 then nullif(u.payload, '')::jsonb else j.payload end,
         payload_bytes = case when u.part & 1::smallint = 0 then j.payload_bytes when u.payload = '' then u.bytes end,
         metadata      = case when u.part & 1::smallint > 0 then nullif(u.metadata, '')::jsonb else j.metadata end,
         run_at        = case when u.due > now then u.due else least(j.run_at, u.due) end,
         due_at        = case when u.due is null then j.due_at end
    from unnest(ids, payloads, bytes, metas, parts, dues) with ordinality as u(id, payload, bytes, metadata, part, due, n)
   where u.n = any (ns) and u.n = any (lives) and j.id = any (array[u.id]);
  select array_agg(j.id), array_agg(j.run_at > now) into replaced, delayed
    from unnest(ids) with ordinality as u(id, n)
   cross join lateral (
         select id, run_at from {{.schema}}.job_waits where id = u.id
         union all
         select id, run_at from {{.schema}}.jobs where id = u.id offset 0) j
   where u.n = any (ns);
  for calls in
    select array_agg(w.lane) as lines, greatest(w.run_at, now) as due
      from unnest(ids, dues) with ordinality as u(id, due, n)
     cross join lateral (select lane, run_at from {{.schema}}.job_waits where id = u.id offset 0) w
     where u.n = any (ns) and u.due is not null
     group by 2
  loop
    perform {{.schema}}.call(calls.lines, calls.due);
  end loop;
  -- A heavy job that becomes lighter, or is due later, may have kept others from their limit.
  perform {{.schema}}.call(array(
    select w.lane
      from unnest(ids) with ordinality as u(id, n) cross join lateral (select lane from {{.schema}}.job_waits where id = u.id offset 0) w
     where u.n = any (ns) and w.lane like '/%'), now);
end
$replace_jobs$;

-- Removes jobs in one of these states from the history, and returns how many. A fence that is still the job's becomes free and stays, so that the key's next
-- job gets a larger token; the fences of its effects are deleted. Lanes that it stopped are called. Those that wait for it are told, also where nobody else tells its
-- end: the next sweep finds no trace of it.
create function {{.schema}}.discard(ids bigint[], states smallint[]) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $discard$
#variable_conflict use_column
declare
  now     timestamptz := statement_timestamp();
  gone    bigint[];
  ends    smallint[];
  results text[];
  scopes  text[];
  keys    text[];
  tokens  bigint[];
  queues  text[];
  firsts  bytea[]; -- what names the effects of its first round
  lasts   bytea[]; -- and of its last
  lanes   text[];
  rules   smallint[];
begin
  select array_agg(h.id), array_agg(case when h.state = 5 then h.state else 7::smallint end), array_agg(h.result::text),
         array_agg(h.scope), array_agg(h.key), array_agg(h.id << 20 | h.claims::bigint), array_agg(h.queue),
         array_agg(int8send((extract(epoch from h.created_at) * 1e6)::bigint)), array_agg(int8send(coalesce(h.identity, (extract(epoch from h.created_at) * 1e6)::bigint))),
         array_agg(split_part(h.lane, chr(31), 1)), array_agg(h.lane_rule)
    into gone, ends, results, scopes, keys, tokens, queues, firsts, lasts, lanes, rules
    from (select id from unnest(ids) as u(id) order by id) u
   cross join lateral (select * from {{.schema}}.job_history where id = u.id and state = any (states) for update) h;
  if gone is null then
    return 0;
  end if;
  update {{.schema}}.job_fences f
     set state = 5, lifetime = 0, finished_at = now, token = greatest(f.token, g.token), fingerprint = null, result = null, detail = null
    from (select * from unnest(gone, scopes, keys, tokens) as g(id, scope, key, token) order by scope, key) g
   where f.key = any (array[g.key]) and f.scope = g.scope and f.class + 0 = 0 and f.job_id = g.id;
  select array_agg(f.key), array_agg(g.queue) into keys, queues
    from unnest(gone, queues, firsts, lasts) as g(id, queue, first, last)
   cross join lateral (
         select key from {{.schema}}.job_fences
          where class = 3 and scope = g.queue and key >= g.id::text collate "C" || '/' and key < g.id::text collate "C" || '0'
            and coalesce(fingerprint between g.first and g.last, true) offset 0) f;
  delete from {{.schema}}.job_fences f using unnest(keys, queues) as e(key, queue) where f.key = any (array[e.key]) and f.scope = e.queue and f.class + 0 = 3;
  delete from {{.schema}}.job_history h where h.id = any (gone);
  if array_remove(array_remove(lanes, null), '') <> '{}' then
    delete from {{.schema}}.lane_stops s using unnest(gone, lanes) as g(id, lane) where s.lane = any (array[g.lane]) and s.id = g.id;
    perform {{.schema}}.call(array_remove(array_remove(lanes, null), ''), now);
  end if;
  select array_agg(g.id), array_agg(g.state), array_agg(g.result) into ids, ends, results
    from unnest(gone, ends, results, rules) as g(id, state, result, rule)
   where g.rule & 4::smallint = 4 or exists (select from {{.schema}}.job_members m where m.job_id = g.id and not m.told offset 0);
  perform {{.schema}}.tell(ids, ends, results);
  return cardinality(gone);
end
$discard$;

-- Brings jobs in one of these states back from the history; Ops.Redrive says what that means. A job's key must still be the job's, or have no fence any
-- more. If it has no fence, it gets a lifetime, and from then on any payload counts as equal, because only the fence knew. If a later job has taken the
-- key, the job stays where it is, even if the later job is finished and the key free: running the older job would repeat the work, under smaller tokens. The claim
-- that the fence of a cancelled job may count for nobody (take_fence) ends here.
--
-- A job with a held effect would be held again at once, and a dead one whose claims are used up would be dead again at once. Both stay where they are.
--
-- A job with a lane waits for it again, at the place that it had when it was enqueued. One that was cancelled before its time, and that no claim had, is delayed until
-- then; a slot of a rate is no such time.
--
-- One that somebody cancelled while it waited for others waits for them again, by its rule: a promoter looks at them, as at first. One that its own rule has cancelled,
-- and one that had gone on, waits only if members are unfinished or come back in the same call, or have come back in one of the same RedriveMany (came are
-- such groups): who redrives it beside a dead one, and nothing else, wants it to run. While the former waits, its rule holds again. The rule of the latter is not known
-- any more, and dead members do not count for it.
--
-- It returns the jobs that came back, those whose key belongs to another job, those with a held effect, those that came back delayed, the groups of which
-- members came back, and the jobs whose claims are used up. Locks: the jobs by id, then the fences that are there, then absent ones, which are made; both by scope and key.
create function {{.schema}}.redrive(ids bigint[], states smallint[], lifetime bigint, came bigint[],
                                    out back bigint[], out taken bigint[], out held bigint[], out early bigint[], out led bigint[], out used_up bigint[])
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $redrive$
#variable_conflict use_column
declare
  now     timestamptz := statement_timestamp();
  asked   bigint[];
  keyed   bigint[];   -- those that need their keys
  scopes  text[];
  keys    text[];
  tokens  bigint[];
  marks   bytea[];    -- of fences that are made
  lives   bigint[];   -- those that come back into jobs
  waits   bigint[];   -- and into job_waits
  lanes   text[];     -- of these, as in jobs.lane
  follows boolean[];  -- that wait for others
  own     text[];     -- the lanes of those that do
  members bigint[];
  calls   record;
begin
  select array_agg(a.id), array_agg(a.id) filter (where a.state = 6 and a.claims >= 1048574) into asked, used_up
    from (select id from unnest(ids) as u(id) order by id) u
   cross join lateral (select id, state, claims from {{.schema}}.job_history where id = u.id and state = any (states) for update) a;
  if asked is null then
    return;
  end if;
  select array_agg(u.id) into held
    from unnest(asked) as u(id)
   cross join lateral (select queue, identity, created_at from {{.schema}}.job_history where id = u.id offset 0) a
   where u.id <> all (coalesce(used_up, '{}'))
     and exists (select from {{.schema}}.job_fences f
                  where f.class = 3 and f.scope = a.queue and f.key >= u.id::text collate "C" || '/' and f.key < u.id::text collate "C" || '0' and f.state = 6
                    and coalesce(f.fingerprint = int8send(coalesce(a.identity, (extract(epoch from a.created_at) * 1e6)::bigint)), true) offset 0);

  select array_agg(u.id) filter (where h.key is null), array_agg(u.id order by h.scope, h.key, u.id desc) filter (where h.key is not null),
         array_agg(h.scope order by h.scope, h.key, u.id desc) filter (where h.key is not null), array_agg(h.key order by h.scope, h.key, u.id desc) filter (where h.key is not null),
         array_agg(u.id << 20 | h.claims::bigint order by h.scope, h.key, u.id desc) filter (where h.key is not null),
         array_agg(decode('0100', 'hex') || case when h.kind <> h.scope then convert_to(h.kind, 'UTF8') else '' end order by h.scope, h.key, u.id desc) filter (where h.key is not null)
    into back, keyed, scopes, keys, tokens, marks
    from unnest(asked) as u(id)
   cross join lateral (select scope, key, kind, claims from {{.schema}}.job_history where id = u.id offset 0) h
   where u.id <> all (coalesce(used_up || held, '{}'));
  if keyed is not null then
    update {{.schema}}.job_fences f
       set state = 0, job_id = s.id, token = greatest(f.token >> 20 << 20, s.token), finished_at = null, result = null, holder = null, leased_until = null, detail = null
      from unnest(keyed, scopes, keys, tokens) as s(id, scope, key, token)
     where f.key = any (array[s.key]) and f.scope = s.scope and f.class + 0 = 0
       and (f.job_id = s.id or f.token >> 20 < s.id and f.job_id < s.id
        and (f.state in (3, 4, 5) and f.lifetime >= 0
         and (f.lifetime = 0 and f.finished_at is not null or timezone('UTC', timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= now)
         or f.state = 5 and f.token = f.token >> 20 << 20));
    -- Where there is one, none is tried: that would wait for its holder, out of this order.
    insert into {{.schema}}.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint)
    select 0, s.scope, s.key, 0, s.id, s.token, now, redrive.lifetime, s.mark
      from unnest(keyed, scopes, keys, tokens, marks) with ordinality as s(id, scope, key, token, mark, n)
     where not exists (select from {{.schema}}.job_fences f where f.key = any (array[s.key]) and f.scope = s.scope and f.class + 0 = 0 offset 0)
     order by s.n
    on conflict do nothing;
    select back || array_agg(s.id), array_agg(s.id) filter (where not s.ours) into back, taken
      from (select s.id, exists (select from {{.schema}}.job_fences f where f.key = s.key and f.scope = s.scope and f.class + 0 = 0 and f.job_id = s.id and f.state = 0 offset 0) as ours
              from unnest(keyed, scopes, keys) as s(id, scope, key)) s;
    back := array(select id from unnest(back) as u(id) where id <> all (coalesce(taken, '{}')));
  end if;
  if back is null or back = '{}' then
    back := null;
    return;
  end if;

  select array_agg(distinct m.group_id) into led
    from unnest(back) as u(id) cross join lateral (select group_id from {{.schema}}.job_members where job_id + 0 = u.id and state >= 0 offset 0) m; -- no other index has the state
  select array_agg(d.id) filter (where d.early), array_agg(d.id) filter (where d.member),
         array_agg(d.id) filter (where d.lane is null and not d.follows), array_agg(d.id) filter (where d.lane is not null or d.follows),
         array_agg(d.lane) filter (where d.lane is not null or d.follows), array_agg(d.follows) filter (where d.lane is not null or d.follows)
    into early, members, lives, waits, lanes, follows
    from (select u.id, h.lane, h.lane_rule & 4::smallint = 4 as member, h.run_at > now and h.state = 7 and h.claims = 0 and (right(h.lane, 2) = chr(31) || '@') is not true as early,
                 coalesce(h.if_dead < 3, false) or coalesce(u.id = any (led || came), false)
                   or exists (select from (select from {{.schema}}.job_members where group_id = u.id and state = 0 order by job_id desc limit 1) m) as follows
            from unnest(back) as u(id) cross join lateral (select * from {{.schema}}.job_history where id = u.id offset 0) h) d;
  insert into {{.schema}}.jobs (id, run_at, created_at, claims, max_attempts, priority, queue, kind, scope, key,
                                payload, payload_bytes, metadata, errors, identity, lane_rule)
  select h.id, case when h.id = any (early) then h.run_at else now end, h.created_at, h.claims, h.max_attempts, h.priority, h.queue, h.kind, h.scope, h.key,
         h.payload, h.payload_bytes, h.metadata, h.errors, h.identity, nullif(h.lane_rule, 0)
    from unnest(lives) as u(id) cross join lateral (select * from {{.schema}}.job_history where id = u.id offset 0) h;
  if waits is not null then
    insert into {{.schema}}.job_waits (id, run_at, created_at, claims, max_attempts, priority, queue, kind, scope, key,
                                       payload, payload_bytes, metadata, errors, identity, lane_rule, lane, path, if_dead)
    select h.id, case when h.id = any (early) then h.run_at else h.created_at end, h.created_at, h.claims, h.max_attempts, h.priority, h.queue, h.kind, h.scope, h.key,
           h.payload, h.payload_bytes, h.metadata, h.errors, h.identity, coalesce(h.lane_rule, 0::smallint),
           case when u.follows then chr(31) || lpad(h.id::text, 19, '0') else coalesce(nullif(split_part(h.lane, chr(31), 1), ''), split_part(h.lane, chr(31), 2)) end,
           case when u.follows then coalesce(replace(h.lane, chr(31) || '@', ''), '') else nullif(replace(h.lane, chr(31) || '@', ''), split_part(h.lane, chr(31), 1)) end,
           case when u.follows then least(coalesce(h.if_dead, 1::smallint), 2::smallint) end
      from unnest(waits, follows) as u(id, follows) cross join lateral (select * from {{.schema}}.job_history where id = u.id offset 0) h;
    delete from {{.schema}}.lane_stops s using unnest(waits, lanes) as u(id, lane) where s.lane = any (array[split_part(u.lane, chr(31), 1)]) and s.id = u.id;
    for calls in
      select array_agg(w.lane) as lines, case when u.follows then now else greatest(w.run_at, now) end as due
        from unnest(waits, follows) as u(id, follows) cross join lateral (select lane, run_at from {{.schema}}.job_waits where id = u.id offset 0) w
       group by 2
    loop
      perform {{.schema}}.call(calls.lines, calls.due);
    end loop;
    own := array(select split_part(u.lane, chr(31), 1) from unnest(lanes, follows) as u(lane, follows) where u.follows and split_part(u.lane, chr(31), 1) <> '');
    perform {{.schema}}.call(own, now);
  end if;
  delete from {{.schema}}.job_history h where h.id = any (back);
  delete from {{.schema}}.job_cancels x where x.job_id = any (back);
  perform {{.schema}}.tell(members, array_fill(0::smallint, array[coalesce(cardinality(members), 0)]), null);
end
$redrive$;

-- Looks at jobs that others wait for. Those that nobody has leased and whose rows nobody has locked are marked, so that their ends are told.
-- They are written even if they have the mark: above READ COMMITTED who ends them must notice. Of each job it returns the state, 0 if it is not
-- finished, and null if it could not be marked; whether there is no trace of it that may still be told of (gone); and the result, if one is kept.
create function {{.schema}}.mark_members(ids bigint[], out states smallint[], out gone boolean[], out results jsonb[])
language plpgsql set search_path = pg_catalog, pg_temp as $mark_members$
#variable_conflict use_column
declare
  lives bigint[];
  waits bigint[];
  past  bigint[];
begin
  -- All in one look: a job may go from one table to another meanwhile.
  select array_agg(coalesce(h.state, case when j.id is not null or w.id is not null then 0::smallint end) order by u.n),
         array_agg(not exists (select from {{.schema}}.jobs where id = u.id offset 0) and not exists (select from {{.schema}}.job_waits where id = u.id offset 0)
               and not exists (select from {{.schema}}.job_history where id = u.id and state <> 5 offset 0) order by u.n),
         array_agg(k.result order by u.n), array_agg(j.id) filter (where j.id is not null), array_agg(w.id) filter (where w.id is not null),
         array_agg(h.id) filter (where h.id is not null)
    into states, gone, results, lives, waits, past
    from unnest(ids) with ordinality as u(id, n)
    left join lateral (
         select id from {{.schema}}.jobs where id = u.id and holder is null and leased_until is null for update skip locked) j on true
    left join lateral (
         select id from {{.schema}}.job_waits where id = u.id for update skip locked) w on true
    left join lateral (
         select id, state from {{.schema}}.job_history where id = u.id and state + 0 in (6, 7, 8) for update skip locked) h on true
    left join lateral (
         select result from {{.schema}}.job_history where id = u.id and state + 0 = 5 offset 0) k on true;
  if lives is not null then
    update {{.schema}}.jobs set lane_rule = coalesce(lane_rule, 0::smallint) | 4::smallint where id = any (lives);
  end if;
  if waits is not null then
    update {{.schema}}.job_waits set lane_rule = lane_rule | 4::smallint where id = any (waits);
  end if;
  if past is not null then
    update {{.schema}}.job_history set lane_rule = coalesce(lane_rule, 0::smallint) | 4::smallint where id = any (past);
  end if;
end
$mark_members$;

-- Writes rows of job_members: of jobs that were enqueued in this transaction, with the mark (fresh), and of others, which are marked. Of a
-- job of which there is no trace, its key may know how it ended (state, result); otherwise it has completed. Above READ COMMITTED it may only
-- be too new to be seen, and so the promoters look for it.
create function {{.schema}}.insert_members(groups bigint[], jobs bigint[], fresh boolean[], states smallint[], results text[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $insert_members$
#variable_conflict use_column
declare
  certain boolean := current_setting('transaction_isolation') = 'read committed';
  look    record;
begin
  select array_agg(u.group_id), array_agg(u.job_id), array_agg(u.fresh), array_agg(u.state), array_agg(u.result) into groups, jobs, fresh, states, results
    from (select distinct on (job_id, group_id) *
            from unnest(groups, jobs, fresh, states, results) as u(group_id, job_id, fresh, state, result)
           order by job_id, group_id) u;
  look := {{.schema}}.mark_members(array(select case when not u.fresh then u.job_id end from unnest(jobs, fresh) as u(job_id, fresh)));
  insert into {{.schema}}.job_members (group_id, job_id, state, told, result)
  select u.group_id, u.job_id, case when u.fresh then 0::smallint when u.now is not null then u.now when o.over then coalesce(nullif(u.state, 0::smallint), 5::smallint) else 0::smallint end,
         u.fresh or u.now is not null or o.over, case when o.over then coalesce(u.kept, nullif(u.result, '')::jsonb) end
    from unnest(groups, jobs, fresh, states, results, look.states, look.gone, look.results) as u(group_id, job_id, fresh, state, result, now, gone, kept)
   cross join lateral (select not u.fresh and u.gone and (u.state <> 0 or certain) as over) o
  on conflict do nothing;
end
$insert_members$;

-- Looks for the ends of members that nobody tells: their jobs were claimed before somebody waited for them. Those that nobody has any more are
-- told from now on.
create function {{.schema}}.sweep_members() returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $sweep_members$
#variable_conflict use_column
declare
  groups bigint[];
  jobs   bigint[];
  lines  text[];
  look   record;
begin
  select array_agg(m.group_id), array_agg(m.job_id) into groups, jobs
    from (select group_id, job_id from {{.schema}}.job_members where not told order by job_id for update skip locked) m;
  if jobs is null then
    return;
  end if;
  look := {{.schema}}.mark_members(jobs);
  with found as (
    update {{.schema}}.job_members m set state = coalesce(u.state, 5::smallint), told = true, result = u.result
      from unnest(groups, jobs, look.states, look.gone, look.results) as u(group_id, job_id, state, gone, result)
     where m.group_id = any (array[u.group_id]) and m.job_id = u.job_id and not m.told and (u.state is not null or u.gone)
    returning m.group_id, m.state
  )
  select array_agg(distinct chr(31) || lpad(group_id::text, 19, '0')) into lines from found where state <> 0;
  perform {{.schema}}.call(lines, statement_timestamp());
end
$sweep_members$;

-- Lets those of the given followers go on whose members are done: into jobs, or to their lane or limit. It is for promoters
-- alone. It locks the followers in one step and looks in the next: a member that somebody brought back meanwhile is not
-- done. A follower that somebody has locked is called again after pause microseconds. One that is to be cancelled, because a
-- member is dead or was cancelled and its rule says so, is returned in cancel and called again after a second. So is one whose id a live
-- job has, because the sequence was set back.
create function {{.schema}}.follow(lines text[], place bigint, pause bigint, out went bigint, out queues text[], out cancel bigint[])
language plpgsql set search_path = pg_catalog, pg_temp as $follow$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  ids    bigint[];
  again  text[]; -- lines of followers that are looked at again
  live   bigint[];
  times  timestamptz[];
  goes   bigint[]; -- the followers that go on to their lane or limit
  others text[];   -- and these
  dues   timestamptz[];
begin
  select array_agg(w.id) into ids
    from unnest(lines) as u(line)
   cross join lateral (
         select id from {{.schema}}.job_waits where lane = u.line for update skip locked) w;
  select array_agg(u.line) into again
    from unnest(lines) as u(line)
   cross join lateral (select id from {{.schema}}.job_waits where lane = u.line offset 0) w
   where ids is null or w.id <> all (ids);
  if again is not null then
    perform {{.schema}}.call(again, now + pause::float8 * interval '1 microsecond');
  end if;

  select array_agg(d.id) filter (where d.what = 'lives'), array_agg(d.at) filter (where d.what = 'lives'),
         array_agg(d.id) filter (where d.what = 'queues'), array_agg(d.line) filter (where d.what = 'queues'), array_agg(d.at) filter (where d.what = 'queues'),
         array_agg(d.id) filter (where d.what = 'ends'), array_agg(d.lane) filter (where d.what in ('ends', 'blocked'))
    into live, times, goes, others, dues, cancel, again
    from (select u.id, w.lane, greatest(w.run_at, now) as at, coalesce(nullif(split_part(w.path, chr(31), 1), ''), split_part(w.path, chr(31), 2)) as line,
                 case when s.held or s.dead and w.if_dead = 0 then 'waits'
                      when (s.dead or s.cancelled) and w.if_dead = 2 then 'ends'
                      when w.path = '' and exists (select from {{.schema}}.jobs where id = u.id) then 'blocked'
                      when w.path = '' then 'lives'
                      else 'queues' end as what
            from unnest(ids) as u(id)
           cross join lateral (select lane, path, run_at, if_dead from {{.schema}}.job_waits where id = u.id offset 0) w
           cross join lateral (
                 select bool_or(state = 8) as held, bool_or(state = 6) as dead, bool_or(state = 7) as cancelled
                   from {{.schema}}.job_members where group_id = u.id) s
           where not exists (select from (select from {{.schema}}.job_members
                                           where group_id = u.id and state = 0 order by job_id desc limit 1) open)) d;
  went := coalesce(cardinality(live), 0);
  if went > 0 then
    queues := {{.schema}}.go_live(live, times, null, null, null, place, true);
  end if;
  if goes is not null then
    update {{.schema}}.job_waits w
       set lane = u.line, path = nullif(w.path, split_part(w.path, chr(31), 1)), if_dead = null, run_at = u.at, due_at = coalesce(w.due_at, w.run_at)
      from unnest(goes, others, dues) as u(id, line, at) where w.id = any (array[u.id]);
    for i in 1 .. cardinality(goes) loop
      perform {{.schema}}.call(others[i : i], dues[i]);
    end loop;
  end if;
  if again is not null then
    perform {{.schema}}.call(again, now + interval '1 second');
  end if;
end
$follow$;

-- The rate that holds for a limit, as the generic cell rate algorithm has it. All is in microseconds: gap is the time between two slots, null for
-- a limit without a rate, and debt is how far ahead of now the time is at which all of the burst is there again, -infinity if nothing has started yet. kept
-- is the part of the burst that is for starts that are late. Where the rate was changed, the slots that were given count at the new
-- one, so that nobody gets a second burst. Those that were given ahead of time count for no more than that time: else a much lower
-- rate would let nothing start for hours.
create function {{.schema}}.rate_of(line text, now timestamptz, out gap float8, out burst float8, out kept float8, out debt float8)
language plpgsql set search_path = pg_catalog, pg_temp as $rate_of$
#variable_conflict use_column
declare
  was  float8; -- the gap of the time when the slots were given
  owed float8;
begin
  select s.per::float8 / s.rate::float8, coalesce(s.burst, 1)::float8 into gap, burst
    from {{.schema}}.lane_limits s
   where s.lane = any (array[line, left(line, strpos(substr(line, 2), '/') + 1)]) and s.n is not null
   order by s.lane desc limit 1;
  if gap is null then
    return;
  end if;
  kept := least(burst - 1::float8, 100000::float8 / gap);
  select r.gap, extract(epoch from r.free_at - now)::float8 * 1e6::float8 into was, owed from {{.schema}}.limit_rates r where r.lane = line;
  debt := case when was is null then '-infinity' when was = gap then owed
               else least(owed * gap / was, greatest(owed, (burst - kept) * gap + 500000::float8)) end;
end
$rate_of$;

-- Writes the debt of a limit (rate_of), of at most 1,000 years.
create function {{.schema}}.owe(line text, now timestamptz, debt float8, gap float8) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $owe$
begin
  insert into {{.schema}}.limit_rates as r (lane, free_at, gap)
  values (line, now + ceil(greatest(0, least(debt, 31536000000000000))) * interval '1 microsecond', owe.gap)
  on conflict (lane) do update set free_at = excluded.free_at, gap = excluded.gap;
end
$owe$;

-- What a promoter does (internal/promoter): it handles the calls that have been due since a time, up to most of each slot, and lets as many jobs into the
-- lanes and limits that were called as these have room for. It locks the slots first: nobody else counts then what is live there.
-- Each step sees what was committed before it. So the calls are taken before anything is looked at: what is committed in between has left a
-- call that was not taken.
--
-- Where the next job is locked, or where there may be more than it takes, a new call is left, due after again microseconds. If one job alone
-- comes in, becomes live, and is of next_queue and one of next_kinds, it is leased to next_holder for so many microseconds (lease).
--
-- It returns the time at which it looked; how many slots have calls (due), and how many of them were not locked by others (mine); the microseconds
-- until the next call is due, 0 if there is none; whether a whole family has to be looked at; how many calls were handled, and up to
-- which time, null for all of them; how many jobs became live or went on to the line of their limit, and in which queues; followers that are to be cancelled; and the job that was leased.
create function {{.schema}}.promote(since timestamptz, most integer, place bigint, again bigint, lease bigint, next_holder bigint, next_queue text, next_kinds text[],
                                    out looked timestamptz, out due bigint, out mine bigint, out next bigint, out families boolean,
                                    out calls bigint, out upto timestamptz, out jobs bigint, out queues text[], out cancel bigint[], out leased {{.schema}}.jobs)
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
                 set jit = off set plan_cache_mode = force_generic_plan as $promote$
#variable_conflict use_column
declare
  now     timestamptz := statement_timestamp();
  slots   smallint[];
  lines   text[];        -- the lanes and limits that were called
  line    text;
  ids     bigint[];      -- the jobs that come in
  froms   text[];        -- the line of each
  paths   text[];        -- its lane and its limit, if it has a limit
  times   timestamptz[]; -- from when on it is live, or when it begins to wait for its limit
  slotted boolean[];     -- that is a slot of a rate
  busy    text[];        -- the lanes and limits whose next job is locked
  more    text[];        -- those that may have room for more
  room    bigint;
  takes   bigint;
  taken   bigint;
  found   bigint[];
  ways    text[];
  owed    jsonb;         -- of limits: how much more than they were said to weigh the jobs weighed that ended
  weighs  bigint;        -- what the live jobs of a limit weigh
  weight  bigint;        -- of a job
  used    bigint;        -- what those weigh that come in
  crowded boolean;       -- the next job has no room
  late    float8;        -- or its slot is too far ahead: this far
  rate    record;
  tokens  float8;        -- how much may start at once, and in time
  debt    float8;
  rested  boolean;
  short   boolean;
  ahead   float8;
  ready   bigint;
  wait    float8;
  recall  timestamptz;
  goes    bigint[];
  limits  text[];
  starts  timestamptz[];
  until   timestamptz;
  f       record;
begin
  looked := now; mine := 0; calls := 0; jobs := 0;
  select array_agg(s.slot::smallint) filter (where s.slot >= 0), coalesce(bool_or(s.slot = -1), false) into slots, families
    from generate_series(-1, 15) as s(slot)
   cross join lateral (
         select from {{.schema}}.lane_calls c where c.slot = s.slot::smallint and c.due > since and c.due <= now limit 1) c;
  due := coalesce(cardinality(slots), 0);
  select coalesce(extract(epoch from min(c.due) filter (where c.due < 'infinity') - now) * 1e6, 0)::bigint into next
    from generate_series(-1, 15) as s(slot)
   cross join lateral (
         select c.due from {{.schema}}.lane_calls c where c.slot = s.slot::smallint and c.due > now order by c.due limit 1) c;
  if due > 0 then
    select array_agg(l.slot), count(*) into slots, mine
      from unnest(slots) as s(slot) cross join lateral (select slot from {{.schema}}.lane_locks where slot = s.slot for update skip locked) l;
  end if;
  if mine = 0 then
    return;
  end if;

  with call as materialized (
    select c.place, c.lane, s.slot, c.due
      from unnest(slots) as s(slot)
     cross join lateral (
           select c.ctid as place, c.lane, c.due from {{.schema}}.lane_calls c
            where c.slot = s.slot and c.due > since and c.due <= now
            order by c.due
            limit most) c
  ), heard as (
    delete from {{.schema}}.lane_calls where ctid = any (array(select place from call))
  )
  select (select count(*) from call), array(select distinct case when lane like '/%' then split_part(lane, chr(31), 1) else lane end from call order by 1),
         (select jsonb_object_agg(c.lane, c.n)
            from (select split_part(lane, chr(31), 1) as lane, sum(split_part(lane, chr(31), 2)::bigint) as n from call where lane like '/%' || chr(31) || '%' group by 1) c),
         (select min(e.due) from (select max(due) as due from call group by slot having count(*) = most) e)
    into calls, lines, owed, upto;
  if calls = 0 then
    return;
  end if;

  -- Of each lane as many as it has room for, its first ones. They are chosen before they are locked: for one that somebody else has
  -- locked no other one comes. Claims take jobs of one time by their ids, so each is a microsecond earlier than the one behind it. For one job a lane is
  -- asked for its first one, which it is in nearly all cases, before each priority is looked through for one that is not delayed.
  with room as materialized (
    select l.lane, least(1000, o.n - live.n) as n
      from unnest(lines) as l(lane)
     cross join lateral (
           select coalesce((select n from {{.schema}}.lane_limits where lane = l.lane),
                           (select n from {{.schema}}.lane_limits where lane = left(l.lane, strpos(substr(l.lane, 2), '/') + 1)), 1) as n offset 0) o
     cross join lateral (
           select count(*) as n from {{.schema}}.lane_places p
            where p.lane = l.lane and o.n < 2147483647
              and (exists (select from {{.schema}}.jobs where id = p.id and (lane = p.lane or p.lane = any (string_to_array(lane, chr(31)))) offset 0)
                or exists (select from {{.schema}}.job_waits where id = p.id and lane is distinct from p.lane and starts_with(path, p.lane || chr(31)) offset 0)) offset 0) live
     where l.lane not like '/%' and l.lane not like chr(31) || '%'
  ), head as materialized (
    select w.id, r.lane, r.n
      from (select lane, n from room where n > 0 and not exists (select from {{.schema}}.lane_stops s where s.lane = room.lane offset 0) offset 0) r
     cross join lateral (
           select id
             from (select id, run_at from {{.schema}}.job_waits where lane = r.lane order by priority, run_at, id limit 1) w
            where r.n = 1 and run_at <= now
           union all
           select w.id
             from (values (-1::smallint), (0::smallint), (1::smallint)) as p(priority)
            cross join lateral (
                  select id from {{.schema}}.job_waits
                   where lane = r.lane and priority = p.priority and run_at <= now
                   order by run_at, id
                   limit r.n) w
            limit r.n) w
  ), ours as materialized (
    select h.id, h.lane, w.path, w.priority, w.run_at
      from head h
     cross join lateral (
           select path, priority, run_at from {{.schema}}.job_waits
            where id = h.id and lane is not distinct from h.lane and run_at <= now and not exists (select from {{.schema}}.jobs where id = h.id offset 0)
              for update skip locked) w
  )
  select o.*, h.*
    into ids, froms, paths, times, busy, more
    from (select array_agg(id), array_agg(lane), array_agg(path), array_agg(now - place * interval '1 microsecond')
            from (select id, lane, path, row_number() over (partition by lane order by priority desc, run_at desc, id desc) - 1 as place from ours) o) o
   cross join (
          select array_agg(lane) filter (where got < wanted), array_agg(lane) filter (where got = wanted)
            from (select lane, count(n) as wanted, count(*) - count(n) as got
                    from (select lane, n from head union all select lane, null from ours) h group by lane) h
           where got < wanted or wanted = 1000) h;
  slotted := array_fill(false, array[coalesce(cardinality(ids), 0)]);

  -- Of each limit as many as it has room and slots for, the first ones that nobody has locked: limits have no order to keep. Slots are given for
  -- half a second ahead. What is not claimed yet (ready) counts against that. If that is all of it, nobody looks until half of it may have
  -- started. To find it is to read all live jobs of the limit, and each of them that ends has somebody look. So they are read only if a job
  -- waits, and no slots are given as long as those that were given last for half of that time (short): the next slot is the same one
  -- later. The newest ones are read first, of which fewer are claimed, and no more than fill it. The burst is there at once if nothing has
  -- started for a while (rested).
  --
  -- A job counts as often as it weighs. The first one that does not fit ends the look, so that lighter ones
  -- do not pass it for ever. One that weighs more than may be live comes in when nothing is. One that weighs
  -- more than the burst starts when the whole burst is there, and the jobs after it wait for the rest.
  foreach line in array lines loop
    continue when line not like '/%';
    if owed ? line then
      rate := {{.schema}}.rate_of(line, now);
      debt := greatest(rate.debt, 0) + (owed ->> line)::float8 * rate.gap;
      if rate.debt > 0 or debt > 0 then
        perform {{.schema}}.owe(line, now, debt, rate.gap);
      end if;
    end if;
    continue when exists (select from {{.schema}}.pauses p -- whose end has its own call
                           where p.what = 'limit' and p.name = substr(line, 2) and (p.until is null or p.until > now));
    select o.n - live.n, live.n into room, weighs
      from (select coalesce((select n from {{.schema}}.lane_limits where lane = line),
                            (select n from {{.schema}}.lane_limits where lane = left(line, strpos(substr(line, 2), '/') + 1)), 1) as n offset 0) o
     cross join lateral (
           select coalesce(sum({{.schema}}.weight(j.lane)), 0) as n from {{.schema}}.lane_places p
            cross join lateral (select lane from {{.schema}}.jobs where id = p.id and (lane = p.lane or p.lane = any (string_to_array(lane, chr(31)))) offset 0) j
            where p.lane = line and o.n < 2147483647 offset 0) live;
    continue when room <= 0 or not exists (
      select from (values (-1::smallint), (0::smallint), (1::smallint)) as p(priority)
       cross join lateral (select id from {{.schema}}.job_waits where lane = line and priority = p.priority and run_at <= now order by run_at, id limit 1) w);
    rate := {{.schema}}.rate_of(line, now);
    takes := least(1000, room);
    if rate.gap is not null then
      tokens := rate.burst - rate.kept;
      debt := greatest(rate.debt, 0);
      rested := rate.debt <= -100000::float8;
      short := rate.debt + (1::float8 - tokens) * rate.gap <= 250000::float8;
      ahead := greatest(rate.burst, ceil(500000::float8 / rate.gap));
      ready := 0;
      if short then
        select coalesce(sum({{.schema}}.weight(u.lane)), 0) into ready
          from (select j.lane from {{.schema}}.lane_places p cross join lateral (select leased_until, lane from {{.schema}}.jobs where id = p.id offset 0) j
                 where p.lane = line and j.leased_until is null order by p.id desc limit ahead) u;
      end if;
      takes := least(takes::float8, greatest(0, ahead - ready::float8),
        case when not short then 0
             when rested then greatest(rate.burst, floor(500000::float8 / rate.gap + tokens))
             else greatest(0, floor((500000::float8 - debt) / rate.gap + tokens)) end)::bigint;
    end if;
    taken := 0; used := 0; crowded := false; late := null;
    if takes > 0 then
      select array_agg(w.id order by w.priority, w.run_at, w.id), array_agg(w.path order by w.priority, w.run_at, w.id) into found, ways
        from (select w.*
                from (values (-1::smallint), (0::smallint), (1::smallint)) as p(priority)
               cross join lateral (
                     select id, path, priority, run_at from {{.schema}}.job_waits
                      where lane = line and priority = p.priority and run_at <= now
                      order by run_at, id
                      limit takes
                        for update skip locked) w
               where not exists (select from {{.schema}}.jobs where id = w.id offset 0)
               limit takes) w;
      for i in 1 .. coalesce(cardinality(found), 0) loop
        weight := {{.schema}}.weight(ways[i]);
        crowded := weight > room - used and weighs + used > 0;
        exit when crowded;
        wait := case when rate.gap is null or rested and (used + weight)::float8 <= rate.burst then 0
                     else greatest(0, ceil(debt + (used::float8 + least(weight::float8, tokens) - tokens) * rate.gap)) end;
        if wait > 500001 then
          late := wait;
          exit;
        end if;
        taken := i; used := used + weight;
        ids := ids || found[i]; froms := froms || line; paths := paths || ways[i]; slotted := slotted || (rate.gap is not null);
        times := times || now + case when wait > 0 then wait else i - cardinality(found) end * interval '1 microsecond';
      end loop;
      if taken > 0 and rate.gap is not null then
        perform {{.schema}}.owe(line, now, debt + used::float8 * rate.gap, rate.gap);
      end if;
    end if;
    if crowded then
      insert into {{.schema}}.lane_stops (lane, id) values (line, found[taken + 1]) on conflict do nothing;
    else
      delete from {{.schema}}.lane_stops s where s.lane = line;
    end if;
    if not crowded and (used < room or taken = 1000) and taken < (
         select count(*)
           from (select
                   from (values (-1::smallint), (0::smallint), (1::smallint)) as p(priority)
                  cross join lateral (select id from {{.schema}}.job_waits where lane = line and priority = p.priority and run_at <= now order by run_at, id limit taken + 1) w
                  limit taken + 1) w) then
      recall := now + least(31536000000000000, case when taken = 1000 then 0
                           when late is not null then greatest(20000, late - 250000)
                           when rate.gap is null or taken < takes then again::float8
                           when ready::float8 >= ahead then least(2000000, greatest(20000, ready::float8 * rate.gap / 2, case when rate.debt > '-infinity' then -rate.debt / 2 else 0 end))
                           when rested and taken::float8 < rate.burst then 20000
                           else greatest(20000, debt + ((used + 1)::float8 - tokens) * rate.gap - 250000) end) * interval '1 microsecond';
      if not exists (select from {{.schema}}.lane_calls c
                      where c.slot = (get_byte(sha256(decode(replace(line, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint and c.due > now and c.due <= recall and c.lane = line offset 0) then
        perform {{.schema}}.call(array[line], recall);
      end if;
    end if;
  end loop;

  -- They get the places of their lanes and limits. Those that become live leave job_waits. One of a lane that has a limit, too, goes on to the
  -- end of the limit's line.
  jobs := coalesce(cardinality(ids), 0);
  if jobs = 1 and not slotted[1] and (paths[1] is null or froms[1] like '/%') then
    select now + lease::float8 * interval '1 microsecond' into until
      from {{.schema}}.job_waits where id = ids[1] and lost = 0 and queue = next_queue and kind = any (next_kinds);
  end if;
  if until is null then
    -- This waits for no disk and no standby. If a crash undoes it, the calls are there again, and so are the waiting jobs. It is never
    -- undone alone: the claim of such a job waits for its own commit, and so for all before it. With a job that was leased it waits: or a token
    -- could come twice.
    perform set_config('synchronous_commit', 'off', true);
  end if;
  if jobs > 0 then
    insert into {{.schema}}.lane_places (lane, id)
    select l.lane, u.id
      from unnest(ids, froms, paths) as u(id, line, path)
     cross join lateral (values (u.line), (case when u.line like '/%' then split_part(u.path, chr(31), 1) end)) as l(lane)
     where l.lane <> ''
    on conflict do nothing;
    select array_agg(u.id) filter (where u.goes), array_agg(split_part(u.path, chr(31), 2)) filter (where u.goes), array_agg(u.at) filter (where u.goes),
           array_agg(u.id) filter (where not u.goes), array_agg(u.at) filter (where not u.goes), array_agg(u.slot) filter (where not u.goes)
      into goes, limits, starts, ids, times, slotted
      from (select id, path, at, slot, line not like '/%' and path is not null as goes from unnest(ids, froms, paths, times, slotted) as u(id, line, path, at, slot)) u;
    if goes is not null then
      update {{.schema}}.job_waits w set lane = u.line, run_at = u.at, due_at = coalesce(w.due_at, w.run_at)
        from unnest(goes, limits, starts) as u(id, line, at) where w.id = any (array[u.id]);
      more := more || limits;
    end if;
    if ids is not null then
      queues := {{.schema}}.go_live(ids, times, slotted, until, case when until is not null then next_holder end, place, true);
      if until is not null then
        select j.* into leased from {{.schema}}.jobs j where j.id = ids[1];
      end if;
    end if;
  end if;
  if busy is not null then
    perform {{.schema}}.call(busy, now + again::float8 * interval '1 microsecond');
  end if;
  if more is not null then
    perform {{.schema}}.call(more, now);
  end if;

  lines := array(select l.lane from unnest(lines) as l(lane) where l.lane like chr(31) || '%');
  if lines <> '{}' then
    f := {{.schema}}.follow(lines, place, again);
    jobs := jobs + f.went; queues := queues || f.queues; cancel := f.cancel;
  end if;
end
$promote$;

-- Answers the calls for whole families: each of their lanes that has waiting jobs gets a call, so many of them at a time (most). It
-- locks no slots, because a call says only that somebody has to look. What is left gets a call of the family that has the last
-- of these lanes behind a separator, in the same commit, so any promoter goes on from there. The end of a family is looked at after the limit of
-- 1: within it, a family without waiting jobs would step over all those of the families after it. The family without a name
-- is that of all lines (putBack). It returns how many lanes it has called, and whether settle_limits has something to do.
create function {{.schema}}.call_families(most integer, out called bigint, out settle boolean)
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $call_families$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  heard  text[];
  firsts text[]; -- the families
  afters text[]; -- behind which lane each is looked at
  lasts  text[]; -- and up to which
  lines  text[]; -- their lanes
  owners text[]; -- and the family of each
begin
  with heard as materialized (
    select ctid as place, lane from {{.schema}}.lane_calls
     where slot = -1 and due <= now and lane not in ('', '?')
     order by due limit 1000 for update skip locked
  ), gone as (
    delete from {{.schema}}.lane_calls where ctid = any (array(select place from heard))
  )
  select array_agg(lane) into heard from heard;
  select array_agg(f.first), array_agg(f.after), array_agg(case when f.first <> '' then left(f.first, -1) || '0' end)
    into firsts, afters, lasts
    from (select h.first, min(h.after collate "C") as after
            from (select split_part(lane, chr(31), 1) as first,
                         case when strpos(lane, chr(31)) > 0 then substr(lane, strpos(lane, chr(31)) + 1) else lane end as after
                    from unnest(heard) as u(lane)) h
           where h.first = '' or h.first = left(h.first, strpos(substr(h.first, 2), '/') + 1)
           group by h.first) f;
  with recursive lane (lane, first, last) as (
    select w.lane, f.first, f.last
      from unnest(firsts, afters, lasts) as f(first, after, last)
     cross join lateral (
           select lane from {{.schema}}.job_waits where lane > f.after order by lane limit 1) w
     where f.last is null or w.lane < f.last
    union all
    select w.lane, l.first, l.last
      from lane l cross join lateral (
           select lane from {{.schema}}.job_waits where lane > l.lane order by lane limit 1) w
     where l.last is null or w.lane < l.last
  )
  select array_agg(p.lane), array_agg(p.first), count(distinct p.lane) into lines, owners, called from (select lane, first from lane limit most) p;
  if called > 0 then
    perform {{.schema}}.call(lines, now);
  end if;
  if cardinality(lines) = most then
    insert into {{.schema}}.lane_calls (slot, due, lane)
    select -1, now, f.first || chr(31) || coalesce((select max(u.lane collate "C") from unnest(lines, owners) as u(lane, first) where u.first = f.first), f.after)
      from unnest(firsts, afters) as f(first, after);
  end if;
  settle := exists (select from {{.schema}}.lane_calls where slot = -1 and due <= now and lane = '?');
end
$call_families$;

-- Lets completions hand over again where a limit was lowered and no more jobs are live than it allows. It locks all slots, so that nobody
-- counts. Where a lowered limit is still exceeded, this is asked again in a second.
create function {{.schema}}.settle_limits() returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $settle_limits$
#variable_conflict use_column
declare
  now     timestamptz := statement_timestamp();
  lowered text[];
  reached text[];
begin
  perform l.slot from (select slot from {{.schema}}.lane_locks order by slot for update) l;
  delete from {{.schema}}.lane_calls where slot = -1 and due <= now and lane = '?';
  select array_agg(l.lane) into lowered from (select lane from {{.schema}}.lane_limits where lowered order by lane for update skip locked) l;
  select array_agg(l.lane) into reached
    from (select s.lane, s.n, s.lane = left(s.lane, strpos(substr(s.lane, 2), '/') + 1) as family
            from unnest(lowered) as u(lane) cross join lateral (select lane, n from {{.schema}}.lane_limits where lane = u.lane offset 0) s) l
   where case when l.family
              then not exists (
                     select from {{.schema}}.lane_places p
                      cross join lateral (
                            select lane as path from {{.schema}}.jobs where id = p.id and (lane = p.lane or p.lane = any (string_to_array(lane, chr(31))))
                            union all
                            select null from {{.schema}}.job_waits where id = p.id and lane is distinct from p.lane and starts_with(path, p.lane || chr(31)) offset 0) j
                      where p.lane > l.lane and p.lane < left(l.lane, -1) || '0'
                        and not exists (select from {{.schema}}.lane_limits o where o.lane = p.lane and o.n is not null)
                      group by p.lane having sum(case when p.lane like '/%' then {{.schema}}.weight(j.path) else 1 end) > coalesce(l.n, 1))
              else (select coalesce(sum(case when p.lane like '/%' then {{.schema}}.weight(j.path) else 1 end), 0)
                      from {{.schema}}.lane_places p
                     cross join lateral (
                           select lane as path from {{.schema}}.jobs where id = p.id and (lane = p.lane or p.lane = any (string_to_array(lane, chr(31))))
                           union all
                           select null from {{.schema}}.job_waits where id = p.id and lane is distinct from p.lane and starts_with(path, p.lane || chr(31)) offset 0) j
                     where p.lane = l.lane and coalesce(l.n, 1) < 2147483647)
                   <= coalesce(l.n, (select n from {{.schema}}.lane_limits where lane = left(l.lane, strpos(substr(l.lane, 2), '/') + 1)), 1) end;
  update {{.schema}}.lane_limits set lowered = false where lane = any (reached) and n is not null;
  delete from {{.schema}}.lane_limits where lane = any (reached) and n is null;
  if exists (select from {{.schema}}.lane_limits where lowered)
     and not exists (select from {{.schema}}.lane_calls where slot = -1 and lane = '?' and due > now) then
    insert into {{.schema}}.lane_calls (slot, due, lane) values (-1, now + interval '1 second', '?');
  end if;
end
$settle_limits$;

-- Gives new slots to leased jobs of one limit, of which each missed its own. It locks the line's slot first, as promoters do. A job that would have to
-- wait takes the slot of another one, which nobody has claimed and whose time has just come, and that one gets the new slot: the
-- handlers are slower than the rate, so it would miss its own. Both must weigh the same. A job in quarantine keeps its slot, which a claimer knows
-- (claimer.suspended). It returns the ids of the jobs that may start at once, of those that have another's slot and may start too, and the
-- microseconds that passed until the slots were given. The others (back) wait for their slots, as if they had not been claimed, for so many microseconds
-- (ahead). ids are in order, and so is back.
create function {{.schema}}.take_slots(line text, ids bigint[], claims integer[], holders bigint[],
                                       out starts bigint[], out taken bigint[], out waited bigint, out back bigint[], out ahead bigint[])
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $take_slots$
#variable_conflict use_column
declare
  began   timestamptz := clock_timestamp();
  now     timestamptz;
  mine    bigint[];
  weights integer[];
  used    bigint    := 0;
  rate    record;
  tokens  float8;
  debt    float8;
  wait    float8;
  late    bigint[]  := '{}'; -- those of mine that would have to wait
  weigh   integer[] := '{}'; -- and what they weigh
  waits   float8[]  := '{}'; -- and for how long
  others  bigint[];          -- jobs whose slots they take
  changed bigint[]  := '{}'; -- those that get the new slots
  times   timestamptz[];     -- and these
begin
  perform slot from {{.schema}}.lane_locks where slot = (get_byte(sha256(decode(replace(line, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint for update;
  now := clock_timestamp();
  starts := '{}'; taken := '{}'; back := '{}'; ahead := '{}';
  waited := (extract(epoch from now - began) * 1e6)::bigint;
  select array_agg(j.id order by u.n), array_agg({{.schema}}.weight(j.lane) order by u.n) into mine, weights
    from unnest(ids, claims, holders) with ordinality as u(id, claims, holder, n)
   cross join lateral (select id, lane from {{.schema}}.jobs where id = u.id and claims = u.claims and holder = u.holder for no key update) j;
  if mine is null then
    return;
  end if;
  rate := {{.schema}}.rate_of(line, now);
  if rate.gap is null then
    starts := mine;
    return;
  end if;
  tokens := rate.burst - rate.kept;
  debt := greatest(0, rate.debt);
  for i in 1 .. cardinality(mine) loop
    wait := greatest(0, least(31536000000000000, ceil(debt + (used::float8 + least(weights[i]::float8, tokens) - tokens) * rate.gap)));
    used := used + weights[i];
    if wait = 0 then
      starts := starts || mine[i];
    else
      late := late || mine[i]; waits := waits || wait; weigh := weigh || weights[i];
    end if;
  end loop;
  perform {{.schema}}.owe(line, now, debt + rate.gap * used::float8, rate.gap);
  if late = '{}' then
    return;
  end if;
  select array_agg(j.id order by j.id) into others
    from (select j.id
            from {{.schema}}.lane_places p
           cross join lateral (
                 select id from {{.schema}}.jobs
                  where id = p.id and leased_until is null and lost = 0 and run_at <= now and run_at > now - interval '50 milliseconds' and right(lane, 2) = chr(31) || '@'
                    and {{.schema}}.weight(lane) = all (weigh)
                    for update skip locked) j
           where p.lane = line
           limit cardinality(late)) j;
  for i in 1 .. cardinality(late) loop
    changed := changed || coalesce(others[i], late[i]);
    times := times || now + waits[i] * interval '1 microsecond';
    if others[i] is not null then
      taken := taken || late[i];
    else
      back := back || late[i]; ahead := ahead || waits[i]::bigint;
    end if;
  end loop;
  update {{.schema}}.jobs j set run_at = u.at, leased_until = null, holder = null
    from unnest(changed, times) as u(id, at) where j.id = any (array[u.id]);
end
$take_slots$;

-- Sets the limit of a line, or of a family of them, and calls it. With null for n it is removed: then it stays as a row without n as long as more
-- jobs may be live than the limit allows that holds then (settle_limits). With unset it changes nothing if the limit is set. It returns
-- whether it did anything.
create function {{.schema}}.set_limit(line text, n integer, rate bigint, per bigint, burst integer, unset boolean) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $set_limit$
#variable_conflict use_column
declare
  now timestamptz := statement_timestamp();
begin
  if set_limit.n is null then
    update {{.schema}}.lane_limits set n = null, rate = null, per = null, burst = null, lowered = true where lane = line;
  else
    insert into {{.schema}}.lane_limits (lane, n, rate, per, burst, lowered) values (line, set_limit.n, set_limit.rate, set_limit.per, set_limit.burst, true)
    on conflict (lane) do update set n = excluded.n, rate = excluded.rate, per = excluded.per, burst = excluded.burst, lowered = true
      where not set_limit.unset or lane_limits.n is null;
    if not found then
      return false;
    end if;
  end if;
  if line = left(line, strpos(substr(line, 2), '/') + 1) then
    insert into {{.schema}}.lane_calls (slot, due, lane) values (-1, now, line);
  else
    perform {{.schema}}.call(array[line], now);
  end if;
  insert into {{.schema}}.lane_calls (slot, due, lane) values (-1, now, '?');
  return true;
end
$set_limit$;

-- Pauses a queue, a kind or a limit, until a time or for so many microseconds (delay), or until somebody resumes it. With longer it only
-- makes a pause longer that has an end. When the pause of a limit ends, promoters look at it.
create function {{.schema}}.pause(what text, name text, until timestamptz, delay bigint, note text, longer boolean) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $pause$
#variable_conflict use_column
declare
  now timestamptz := statement_timestamp();
  ends timestamptz := coalesce(pause.until, now + delay::float8 * interval '1 microsecond');
begin
  insert into {{.schema}}.pauses as p (what, name, paused_at, note, until) values (pause.what, pause.name, now, pause.note, ends)
  on conflict (name, what) do update
    set paused_at = case when p.until <= now then now else p.paused_at end, note = excluded.note, until = excluded.until
    where not longer or p.until < excluded.until;
  if pause.what = 'limit' and ends < 'infinity' then
    perform {{.schema}}.call(array['/' || pause.name], ends);
  end if;
end
$pause$;

-- Ends a pause, and returns whether there was one.
create function {{.schema}}.resume(what text, name text) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $resume$
#variable_conflict use_column
declare
  now timestamptz := statement_timestamp();
  was boolean;
begin
  delete from {{.schema}}.pauses p where p.what = resume.what and p.name = resume.name returning coalesce(p.until > now, true) into was;
  if resume.what = 'limit' and was then
    perform {{.schema}}.call(array['/' || resume.name], now);
  end if;
  return coalesce(was, false);
end
$resume$;

-- Enqueues one job that says more than a plain one, or that somebody may wait for, with a new id of the sequence ids or one that was drawn: with a key, its fence is taken first, or taken over if it
-- is no longer in force (take_fence; not with an id that was drawn). A job without a line is live at once. One with a lane or a limit waits in line, and the line is called: it writes
-- nothing that another transaction of the lane could wait for. A job is never due before it is enqueued: claims do not look that far before
-- the positions that they have reached. It returns the id, null if the key is taken; whether the job is delayed; and whether workers waited (who):
-- 0 if one was woken or it may not say, 1 for none of this queue, 2 for none at all. wake comes last: it sees workers that have announced themselves while the fence was waited for.
create function {{.schema}}.enqueue_one(ids regclass, queue text, kind text, payload text, max_attempts smallint, priority smallint, scope text, key text, lifetime bigint, fingerprint bytea,
                                        at bigint, delay bigint, metadata text, payload_bytes bytea, place bigint, own boolean, line text, rule smallint, path text, drawn bigint,
                                        out id bigint, out delayed boolean, out who integer)
language plpgsql set search_path = pg_catalog, pg_temp as $enqueue_one$
#variable_conflict use_variable
declare
  now timestamptz := statement_timestamp();
  due timestamptz := greatest(now, now + delay::float8 * interval '1 microsecond', timestamptz 'epoch' + at::float8 * interval '1 microsecond');
begin
  id := coalesce(drawn, nextval(ids));
  if key is not null then
    insert into {{.schema}}.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint)
    values (0, scope, key, 0, id, id << 20, now, lifetime, fingerprint)
    on conflict do nothing;
    if not found then
      id := case when drawn is null then {{.schema}}.take_fence(ids, scope, key, lifetime, fingerprint) end;
      if id is null then
        return;
      end if;
    end if;
  end if;
  if line is null then
    insert into {{.schema}}.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload, payload_bytes, metadata, scope, key)
    values (id, due, now, max_attempts, priority, queue, kind, payload::jsonb, payload_bytes, metadata::jsonb, scope, key);
  else
    insert into {{.schema}}.job_waits (id, run_at, created_at, max_attempts, priority, queue, kind, payload, payload_bytes, metadata, scope, key, lane, lane_rule, path)
    values (id, due, now, max_attempts, priority, queue, kind, payload::jsonb, payload_bytes, metadata::jsonb, scope, key, line, rule, path);
    perform {{.schema}}.call(array[line], due);
  end if;
  delayed := due > now;
  who := case when due >= now + interval '2 seconds' then 1
              when {{.schema}}.wake(queue, 1, place, own) > 0 then 0
              when current_setting('transaction_isolation') <> 'read committed' then 0
              when not exists (select from {{.schema}}.waiters w where w.idle_until > now) then 2
              else 1 end;
end
$enqueue_one$;

-- Enqueues many jobs, which the arrays from payloads to drawn and lines and paths have in the caller's order. What jobs have in common is in
-- the arrays from queues to lifetimes and in rules and if_deads, once for each header, and headers says which one is a job's (null: the first). Ids that
-- drawn does not give are drawn in that order, from the sequence ids. Absent fences are taken in the order of scope and key, so that two callers
-- with the same keys do not deadlock. With taking, those that are no longer in force are taken over before that: only a second try does it, so that every call takes
-- absent keys first. Then jobs become live, or wait in line: for others (if_deads), for a lane or a limit. These count as enqueued at one time
-- (since), so that their ids decide who is first. It may be past, because claims never look there.
--
-- It returns all ids in the order of the jobs, whether each header is delayed, how many workers wait for them, the ids of the accepted jobs, and that time. The
-- ids are not sorted: while somebody sets the sequence back, they do not grow, and sorted ones would name the wrong jobs.
create function {{.schema}}.enqueue_jobs(sequence regclass, headers integer[], payloads text[], bytes bytea[], keys text[], fingerprints bytea[], drawn bigint[],
                                         queues text[], kinds text[], scopes text[], metadatas text[], priorities integer[], attempts integer[], ats bigint[], delays bigint[], lifetimes bigint[],
                                         place bigint, own boolean, lines text[], rules smallint[], paths text[], if_deads smallint[], since timestamptz, taking boolean,
                                         out ids bigint[], out delayed boolean[], out woken bigint, out accepted bigint[], out at timestamptz)
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off set plan_cache_mode = force_generic_plan as $enqueue_jobs$
#variable_conflict use_column
declare
  now    timestamptz := statement_timestamp();
  dues   timestamptz[]; -- by header
  starts timestamptz[]; -- the same in job_waits
  took   record;
begin
  at := coalesce(since, now);
  headers := coalesce(headers, array_fill(1, array[cardinality(payloads)]));
  select array_agg(i.id) into ids
    from (select coalesce(nullif(u.drawn, 0), nextval(sequence)) as id from unnest(payloads, drawn) as u(payload, drawn)) i;
  select array_agg(h.due order by h.n), array_agg(h.due > now order by h.n) into dues, delayed
    from (select u.n, greatest(now, now + u.delay::float8 * interval '1 microsecond', timestamptz 'epoch' + nullif(u.at, 0)::float8 * interval '1 microsecond') as due
            from unnest(ats, delays) with ordinality as u(at, delay, n)) h;

  accepted := array(select u.id from unnest(ids, headers) as u(id, header) join unnest(scopes) with ordinality as h(scope, n) on h.n = u.header where h.scope = '');
  if cardinality(accepted) < cardinality(ids) then
    if taking then
      -- They are found one by one and updated by their place: a row that somebody changed meanwhile is no longer there, and its job is not accepted.
      for took in
        with free as materialized (
          select u.id, u.fingerprint, u.lifetime, f.place
            from (select u.id, h.scope, u.key, u.fingerprint, h.lifetime
                    from unnest(ids, headers, keys, fingerprints) as u(id, header, key, fingerprint)
                    join unnest(scopes, lifetimes) with ordinality as h(scope, lifetime, n) on h.n = u.header
                   where h.scope <> ''
                   order by h.scope collate "C", u.key collate "C") u
           cross join lateral (
                 select f.ctid as place
                   from {{.schema}}.job_fences f
                  where f.class = 0 and f.scope = u.scope and f.key = u.key
                    and (f.state in (3, 4, 5) and f.lifetime >= 0
                     and (f.lifetime = 0 and f.finished_at is not null or f.finished_at + f.lifetime::float8 * interval '1 millisecond' <= now)
                     or f.class = 0 and f.state = 5 and f.token = f.token >> 20 << 20)
                    and f.token >> 20 < u.id and f.job_id < u.id
                    for update) f
        )
        update {{.schema}}.job_fences f
           set job_id = n.id, token = n.id << 20, state = 0, created_at = now, finished_at = null,
               lifetime = n.lifetime, fingerprint = n.fingerprint, result = null, holder = null, leased_until = null
          from free n
         where f.ctid = n.place
        returning f.job_id
      loop
        accepted := accepted || took.job_id;
      end loop;
    end if;
    for took in
      insert into {{.schema}}.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint)
      select 0, h.scope, u.key, 0, u.id, u.id << 20, now, h.lifetime, u.fingerprint
        from unnest(ids, headers, keys, fingerprints) as u(id, header, key, fingerprint)
        join unnest(scopes, lifetimes) with ordinality as h(scope, lifetime, n) on h.n = u.header
       where h.scope <> ''
       order by h.scope collate "C", u.key collate "C"
      on conflict do nothing
      returning job_id
    loop
      accepted := accepted || took.job_id;
    end loop;
  end if;
  if accepted = '{}' then
    woken := 0;
    return;
  end if;

  insert into {{.schema}}.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload, payload_bytes, metadata, scope, key, lane_rule)
  select u.id, h.due, now, h.max_attempts, h.priority, h.queue, h.kind, nullif(u.payload, '')::jsonb, case when u.payload = '' then u.bytes end, nullif(h.metadata, '')::jsonb,
         nullif(h.scope, ''), nullif(u.key, ''), nullif(h.rule, 0)
    from unnest(ids, headers, payloads, bytes, keys, lines) as u(id, header, payload, bytes, key, line)
    join unnest(queues, kinds, scopes, metadatas, priorities, attempts, dues, rules) with ordinality as h(queue, kind, scope, metadata, priority, max_attempts, due, rule, n) on h.n = u.header
    join unnest(accepted) as a(id) on a.id = u.id
   where coalesce(u.line, '') = '';
  if lines is not null then
    -- One that waits for others has a line of its own until then.
    starts := array(
      select greatest(at + h.delay::float8 * interval '1 microsecond', timestamptz 'epoch' + nullif(h.fixed, 0)::float8 * interval '1 microsecond')
        from unnest(ats, delays) with ordinality as h(fixed, delay, n) order by h.n);
    lines := array(
      select case when u.line <> '' and h.if_dead is not null then chr(31) || lpad(u.id::text, 19, '0') else u.line end
        from unnest(ids, headers, lines) with ordinality as u(id, header, line, n)
        join unnest(if_deads) with ordinality as h(if_dead, n) on h.n = u.header
       order by u.n);
    insert into {{.schema}}.job_waits (id, run_at, created_at, max_attempts, priority, queue, kind, payload, payload_bytes, metadata, scope, key, lane, lane_rule, path, if_dead)
    select u.id, h.start, at, h.max_attempts, h.priority, h.queue, h.kind, nullif(u.payload, '')::jsonb, case when u.payload = '' then u.bytes end, nullif(h.metadata, '')::jsonb,
           nullif(h.scope, ''), nullif(u.key, ''), u.line, h.rule, case when h.if_dead is null then nullif(u.path, '') else u.path end, h.if_dead
      from unnest(ids, headers, payloads, bytes, keys, lines, paths) as u(id, header, payload, bytes, key, line, path)
      join unnest(queues, kinds, scopes, metadatas, priorities, attempts, starts, rules, if_deads) with ordinality
        as h(queue, kind, scope, metadata, priority, max_attempts, start, rule, if_dead, n) on h.n = u.header
      join unnest(accepted) as a(id) on a.id = u.id
     where u.line <> '';
    for took in
      select array_agg(distinct l.line) as lines, l.due
        from (select u.line, case when h.if_dead is null then greatest(now, h.start) else now end as due
                from unnest(ids, headers, lines) as u(id, header, line)
                join unnest(starts, if_deads) with ordinality as h(start, if_dead, n) on h.n = u.header
                join unnest(accepted) as a(id) on a.id = u.id
               where u.line <> '') l
       group by l.due
    loop
      perform {{.schema}}.call(took.lines, took.due);
    end loop;
  end if;

  woken := 0;
  for took in
    select h.queue, count(*) as jobs
      from unnest(ids, headers) as u(id, header)
      join unnest(queues, dues) with ordinality as h(queue, due, n) on h.n = u.header
      join unnest(accepted) as a(id) on a.id = u.id
     where h.due < now + interval '2 seconds'
     group by h.queue
  loop
    woken := woken + {{.schema}}.wake(took.queue, took.jobs, place, own);
  end loop;
end
$enqueue_jobs$;

-- On Citus these run on the node that has the tables, in a query on a table there: all that they do is in the transaction of that query.
-- It makes no generic plan of an insert that selects.
do $citus$
declare
  f record;
begin
  if pg_catalog.to_regclass('pg_catalog.pg_dist_partition') is null then
    return;
  end if;
  for f in
    select p.oid::regprocedure as signature
      from pg_catalog.pg_proc p join pg_catalog.pg_type t on t.typnamespace = p.pronamespace
     where t.oid = pg_catalog.pg_typeof(null::{{.schema}}.jobs) and p.proname in ('call', 'emit', 'begin_await', 'tell', 'finish', 'give_back', 'cancel',
                                                                          'promote', 'call_families', 'settle_limits', 'take_slots', 'set_limit', 'enqueue_one', 'enqueue_jobs', 'sweep_members', 'insert_members', 'cancel_followers', 'hurry', 'replace_jobs', 'discard', 'redrive',
                                                                          'request_cancels', 'move', 'pause', 'resume', 'be_present', 'add_counts', 'rescan_turn', 'claim_fence', 'resolve_fence', 'resolve_effects')
  loop
    execute 'alter function ' || f.signature || ' set plan_cache_mode = force_custom_plan';
    execute 'alter function ' || f.signature || ' set citus.allow_nested_distributed_execution = on';
  end loop;
end $citus$;

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

-- Takes a job's key that is no longer in force (as FenceFree in internal/table; a test compares them) for a new job, and
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

-- Views for people with psql, and for dashboards; docs/run/operations.md shows them in use. Their names, columns and words are
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
       j.payload, j.payload_bytes, j.metadata, null::jsonb as result, j.errors, coalesce(j.due_at, j.run_at) as due_at,
       j.metadata ->> 'onceq-timeout'::text as timeout
  from {{.schema}}.jobs j
union all
select w.id, w.queue, w.kind,
       case when w.attempts > 0 or w.lost > 0 then 'retrying' when w.run_at > statement_timestamp() then 'delayed' else 'waiting' end,
       w.scope, w.key, w.priority, w.attempts, w.max_attempts, w.lost, w.run_at, w.created_at, null,
       null, null, w.errors -> -1 ->> 'error'::text, w.payload, w.payload_bytes, w.metadata, null, w.errors, coalesce(w.due_at, w.run_at),
       w.metadata ->> 'onceq-timeout'::text
  from {{.schema}}.job_waits w
union all
select h.id, h.queue, h.kind, case h.state when 5 then 'completed' when 6 then 'dead' when 7 then 'cancelled' when 8 then 'held' end,
       h.scope, h.key, h.priority, h.attempts, h.max_attempts, h.lost, h.run_at, h.created_at, null,
       h.finished_at, h.keep_until, h.errors -> -1 ->> 'error'::text,
       h.payload, h.payload_bytes, h.metadata, h.result, h.errors, h.run_at, h.metadata ->> 'onceq-timeout'::text
  from {{.schema}}.job_history h;

-- Counts for each queue, and since when the job that is due for longest has been due. It reads every job. Ops.Stats and the
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

-- What an autoscaler asks: for each queue with unfinished jobs, how many a worker could start now (due, and neither their queue nor their kind is
-- paused), how many have a lease, and how many are due but wait for a lane, a limit or others. It reads all live jobs.
create view {{.schema}}.v_backlog as
select j.queue,
       count(*) filter (where not j.blocked and j.run_at <= statement_timestamp() and (j.leased_until is null or j.leased_until <= statement_timestamp())
                          and not exists (select from {{.schema}}.pauses p
                                           where (p.what = 'queue' and p.name = j.queue or p.what = 'kind' and p.name = j.kind)
                                             and (p.until is null or p.until > statement_timestamp()))) as due,
       count(*) filter (where j.leased_until > statement_timestamp()) as running,
       count(*) filter (where j.blocked and j.run_at <= statement_timestamp()) as blocked
  from (select queue, kind, run_at, leased_until, false as blocked from {{.schema}}.jobs
        union all
        select queue, kind, run_at, null, true from {{.schema}}.job_waits) j
 group by j.queue;

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
       stuck, pool, application
  from {{.schema}}.workers;

-- What is paused: queues, kinds and limits.
create view {{.schema}}.v_pauses as
select what, name, paused_at, note, until from {{.schema}}.pauses where until is null or until > statement_timestamp();

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
select minute, queue, kind, started, completed, failed, dead, took::numeric / 1000000.0 as seconds from {{.schema}}.job_counts where span = 1 and kind <> '';

-- Functions for SQL and other languages; docs/use/sql.md shows them in use. Their names, arguments, columns and the codes of their errors are stable, as
-- those of the views are: OQ010 for bad input, OQ011 for a key that other work has, OQ012 for a strict job whose key is taken, OQ013 for a key that is
-- neither free nor visible. They run with the rights of the schema's owner, and only who was granted them may call them (migrations.Grants, ProducerGrants).

-- What two values have in common that are equal as jsonb: members in the order of their names' bytes, no white space, the shortest escapes, and
-- numbers by their value (internal/jsonb; a test compares). With fields only these members of the outermost object count.
create function {{.schema}}.canonical(value jsonb, fields text[], depth integer) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $canonical$
declare
  plain  constant text := E'^([tfn].*|"[^\\\\]*"|-?[0-9]*[1-9]|0)$'; -- what is canonical as jsonb writes it
  digits text;
  power  integer;
begin
  if depth > 500 then
    raise exception 'onceq: payload is nested deeper than 500' using errcode = 'OQ010', hint = 'Nest it less, or pass it as bytes.';
  end if;
  case jsonb_typeof(value)
  when 'object' then
    return '{' || coalesce((select string_agg(m.name || ':' || m.text, ',' order by m.name collate "C")
                              from (select case when strpos(to_json(e.key)::text, chr(92)) = 0 then to_json(e.key)::text else {{.schema}}.canonical_text(e.key) end as name,
                                           case when jsonb_typeof(e.value) not in ('object', 'array') and e.value::text ~ plain then e.value::text
                                                else {{.schema}}.canonical(e.value, null, depth + 1) end as text
                                      from jsonb_each(value) e where fields is null or e.key = any (fields)) m), '') || '}';
  when 'array' then
    return '[' || coalesce((select string_agg(case when jsonb_typeof(e.value) not in ('object', 'array') and e.value::text ~ plain then e.value::text
                                                   else {{.schema}}.canonical(e.value, null, depth + 1) end, ',' order by e.n)
                              from jsonb_array_elements(value) with ordinality as e(value, n)), '') || ']';
  when 'string' then
    return {{.schema}}.canonical_text(value #>> '{}');
  when 'number' then
    digits := ltrim(value #>> '{}', '-');
    power := -length(split_part(digits, '.', 2));
    digits := replace(digits, '.', '');
    power := power + length(digits) - length(rtrim(digits, '0'));
    digits := ltrim(rtrim(digits, '0'), '0');
    if digits = '' then
      return '0';
    end if;
    return case when left(value #>> '{}', 1) = '-' then '-' else '' end || digits || case when power <> 0 then 'e' || power::text else '' end;
  else
    return value::text;
  end case;
end
$canonical$;

create function {{.schema}}.canonical_text(value text) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $canonical_text$
begin
  value := replace(replace(value, chr(92), chr(92) || chr(92)), '"', chr(92) || '"');
  if value ~ E'[\\x01-\\x1f]' then
    for i in 1 .. 31 loop
      value := replace(value, chr(i), chr(92) || 'u' || lpad(to_hex(i), 4, '0'));
    end loop;
  end if;
  return '"' || value || '"';
end
$canonical_text$;

-- Refuses a name that names nothing or is too long, as Enqueue does.
create function {{.schema}}.check_name(what text, name text, most integer) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $check_name$
begin
  if coalesce(name, '') = '' then
    raise exception 'onceq: % is empty', what using errcode = 'OQ010', hint = 'Pass one that is not empty. To have none, leave it out, or pass null.';
  elsif octet_length(name) > most then
    raise exception 'onceq: % has % bytes; at most %', what, octet_length(name), most using errcode = 'OQ010', hint = 'Use a shorter one, or a hash of it.';
  elsif btrim(name, E' \t\n\v\f\r' || chr(133) || chr(160) || chr(5760) || chr(8192) || chr(8193) || chr(8194) || chr(8195) || chr(8196) || chr(8197) || chr(8198) || chr(8199)
                    || chr(8200) || chr(8201) || chr(8202) || chr(8232) || chr(8233) || chr(8239) || chr(8287) || chr(12288)) = '' then
    raise exception 'onceq: % is only white space', what using errcode = 'OQ010', hint = 'Pass one with other characters.';
  end if;
end
$check_name$;

-- Refuses a value that is nested too deep, or too large, or that has a number whose text would be too large.
create function {{.schema}}.check_payload(payload jsonb, most integer) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $check_payload$
begin
  if jsonb_path_exists(payload, 'strict $.**{501 to last}') then
    raise exception 'onceq: payload is nested deeper than 500' using errcode = 'OQ010', hint = 'Nest it less, or pass it as bytes.';
  elsif jsonb_path_exists(payload, 'strict $.** ? (@.type() == "number" && @ != 0 && (@.abs() >= 1e10000 || @.abs() < 1e-9999))') then
    raise exception 'onceq: payload has a number with an exponent beyond 9999' using errcode = 'OQ010', hint = 'Pass the number as a string.';
  elsif octet_length(payload::text) > most then
    raise exception 'onceq: payload has more than % bytes', most using errcode = 'OQ010', hint = 'Store it elsewhere and pass a reference.';
  end if;
end
$check_payload$;

-- Checks a job that is to be enqueued, and gives it as the tables have it.
create function {{.schema}}.job_of(kind text, payload jsonb, bytes bytea, key text, options jsonb,
                                   out queue text, out scope text, out priority smallint, out attempts smallint, out at bigint, out delay bigint, out lifetime bigint, out metadata text,
                                   out line text, out path text, out rule smallint, out fingerprint bytea, out strictly boolean, out fields text[],
                                   out replacing smallint, out after bigint[], out if_dead smallint)
language plpgsql stable set search_path = pg_catalog, pg_temp as $job_of$
#variable_conflict use_variable
declare
  name text;
  kinds constant jsonb := '{"queue": "string", "scope": "string", "priority": "string", "run_at": "string", "delay": "string", "lane": "string", "lane_family": "string",
    "overtake": "boolean", "stop_lane": "boolean", "limit": "string", "weight": "number", "max_attempts": "number", "timeout": "string", "metadata": "object", "window": "string", "strict": "boolean",
    "fields": "array", "ignore_payload": "boolean", "replace": "array", "after": "array", "if_dead": "string"}';
begin
  options := coalesce(options, '{}');
  if jsonb_typeof(options) <> 'object' then
    raise exception 'onceq: options is a JSON %, and not an object', jsonb_typeof(options) using errcode = 'OQ010', hint = 'Pass an object, as {"queue": "mail"}.';
  end if;
  for name in select jsonb_object_keys(options) loop
    if kinds -> name is null then
      raise exception 'onceq: option % is not known', to_json(name) using errcode = 'OQ010',
        hint = 'Possible: ' || (select string_agg(k, ', ' order by k) from jsonb_object_keys(kinds) k) || '.';
    elsif jsonb_typeof(options -> name) <> kinds ->> name then
      raise exception 'onceq: option % is a JSON %, and not %', name, jsonb_typeof(options -> name), kinds ->> name using errcode = 'OQ010', hint = 'Pass it as that.';
    end if;
  end loop;
  perform {{.schema}}.check_name('kind', kind, 128);
  queue := coalesce(options ->> 'queue', 'default');
  perform {{.schema}}.check_name('queue', queue, 128);
  perform {{.schema}}.check_payload(payload, 1048576);
  if octet_length(bytes) > 1048576 then
    raise exception 'onceq: payload has more than 1048576 bytes' using errcode = 'OQ010', hint = 'Store it elsewhere and pass a reference.';
  end if;

  strictly := coalesce((options ->> 'strict')::boolean, false);
  if key is null then
    foreach name in array array['scope', 'window', 'strict', 'fields', 'ignore_payload', 'replace'] loop
      if options -> name is not null then
        raise exception 'onceq: option % is set without a key', name using errcode = 'OQ010', hint = 'Pass a key, or leave the option out.';
      end if;
    end loop;
  else
    perform {{.schema}}.check_name('key', key, 512);
    scope := coalesce(options ->> 'scope', kind);
    perform {{.schema}}.check_name('scope', scope, 256);
    if options -> 'fields' is not null then
      if bytes is not null or jsonb_typeof(payload) <> 'object' then
        raise exception 'onceq: fields names members of the payload, which is no object' using errcode = 'OQ010', hint = 'Leave fields out, or pass an object as the payload.';
      end if;
      if exists (select from jsonb_array_elements(options -> 'fields') e where jsonb_typeof(e) <> 'string') then
        raise exception 'onceq: fields has something else than names' using errcode = 'OQ010', hint = 'Pass an array of strings, as ["customer"].';
      end if;
      fields := array(select jsonb_array_elements_text(options -> 'fields'));
    end if;
    fingerprint := convert_to(case when kind = scope then '' else kind end, 'UTF8');
    if coalesce((options ->> 'ignore_payload')::boolean, false) then
      fingerprint := decode('0100', 'hex') || fingerprint;
    elsif bytes is not null then
      fingerprint := decode('0110', 'hex') || substring(sha256(convert_to('b', 'UTF8') || bytes) from 1 for 16) || fingerprint;
    else
      fingerprint := decode('0110', 'hex') || substring(sha256(convert_to('j' || {{.schema}}.canonical(payload, fields, 0), 'UTF8')) from 1 for 16) || fingerprint;
    end if;
  end if;

  case coalesce(options ->> 'priority', 'normal')
  when 'high' then priority := -1;
  when 'normal' then priority := 0;
  when 'low' then priority := 1;
  else raise exception 'onceq: priority is %; possible: high, normal, low', options -> 'priority' using errcode = 'OQ010', hint = 'Leave it out for normal.';
  end case;
  if coalesce((options ->> 'max_attempts')::numeric, 1) not between 1 and 32767 or (options ->> 'max_attempts')::numeric % 1 <> 0 then
    raise exception 'onceq: max_attempts is %; 1 to 32767 is possible', options -> 'max_attempts' using errcode = 'OQ010', hint = 'Leave it out for 25.';
  end if;
  attempts := coalesce((options ->> 'max_attempts')::numeric, 25);

  begin
    at := ceil(extract(epoch from (options ->> 'run_at')::timestamptz) * 1000000);
    delay := ceil(extract(epoch from (options ->> 'delay')::interval) * 1000000);
    lifetime := case options ->> 'window' when 'until_finished' then 0 when 'until_started' then 0 when 'forever' then -1
                else coalesce(ceil(extract(epoch from (options ->> 'window')::interval) * 1000), 86400000) end;
  exception when data_exception or feature_not_supported then
    raise exception 'onceq: run_at is no time, or delay or window is no interval: %', sqlerrm using errcode = 'OQ010',
      hint = 'As in {"run_at": "2030-01-31T08:00:00Z"}, {"delay": "90 seconds"}, {"window": "7 days"}; window may be until_finished, until_started or forever, too.';
  end;
  if at is not null and delay is not null then
    raise exception 'onceq: run_at and delay are both set; use one' using errcode = 'OQ010', hint = 'Leave one of them out.';
  elsif delay < 0 then
    raise exception 'onceq: delay is negative' using errcode = 'OQ010', hint = 'Leave it out for now.';
  elsif at not between -62135596800000000 and 253402300799999000 or delay > 9223372036854775 then
    raise exception 'onceq: run_at or delay is beyond the year 9999' using errcode = 'OQ010', hint = 'Use an earlier time.';
  elsif lifetime > 9223372036854 then
    raise exception 'onceq: window is longer than 292 years' using errcode = 'OQ010', hint = 'Use forever.';
  elsif lifetime < -1 or lifetime = -1 and options ->> 'window' <> 'forever' or lifetime = 0 and options ->> 'window' not in ('until_finished', 'until_started') then
    raise exception 'onceq: window is not positive; use an interval, until_finished, until_started or forever' using errcode = 'OQ010', hint = 'Leave it out for a day.';
  end if;

  if options -> 'metadata' is not null then
    if exists (select from jsonb_each(options -> 'metadata') m where jsonb_typeof(m.value) <> 'string') then
      raise exception 'onceq: metadata has a member that is no string' using errcode = 'OQ010', hint = 'Write numbers and other values as strings.';
    end if;
    metadata := nullif(options ->> 'metadata', '{}');
  end if;
  if options -> 'timeout' is not null then -- Job.Timeout, which the metadata has
    begin
      name := case options ->> 'timeout' when 'none' then 'none'
              else ceil(extract(epoch from (options ->> 'timeout')::interval) * 1000) || 'ms' end;
    exception when data_exception or feature_not_supported then
      name := '';
    end;
    if name !~ '^[1-9][0-9]{0,11}ms$' and name <> 'none' then
      raise exception 'onceq: timeout is %, and no positive interval, nor none', options -> 'timeout' using errcode = 'OQ010',
        hint = 'As in {"timeout": "5 minutes"}.';
    end if;
    metadata := coalesce(metadata::jsonb, '{}') || jsonb_build_object('onceq-timeout', name);
  end if;
  if metadata is not null then
    if octet_length(metadata) > 16384 then
      raise exception 'onceq: metadata has % bytes; at most 16384', octet_length(metadata) using errcode = 'OQ010', hint = 'Put what is long into the payload.';
    end if;
  end if;

  rule := coalesce((options ->> 'overtake')::boolean, false)::integer | coalesce((options ->> 'stop_lane')::boolean, false)::integer * 2;
  if options -> 'lane' is null and (rule <> 0 or options -> 'lane_family' is not null) then
    raise exception 'onceq: lane_family, overtake or stop_lane is set without a lane' using errcode = 'OQ010', hint = 'Pass a lane, or leave these out.';
  end if;
  if options -> 'lane' is not null then
    name := coalesce(options ->> 'lane_family', kind);
    perform {{.schema}}.check_name('lane_family', name, 128);
    perform {{.schema}}.check_name('lane', options ->> 'lane', 256);
    if strpos(name, '/') > 0 or strpos(name || (options ->> 'lane'), chr(31)) > 0 then
      raise exception 'onceq: lane_family contains a slash, or the lane a unit separator' using errcode = 'OQ010', hint = 'Use another character.';
    end if;
    line := name || '/' || (options ->> 'lane');
  end if;
  if options -> 'limit' is not null then
    name := options ->> 'limit';
    perform {{.schema}}.check_name('limit', name, 256);
    if left(name, 1) = '/' or right(name, 1) = '/' or strpos(name, chr(31)) > 0 then
      raise exception 'onceq: limit begins or ends with a slash, or contains a unit separator' using errcode = 'OQ010', hint = 'Use another name.';
    end if;
    path := coalesce(line, '') || chr(31) || '/' || name;
    line := coalesce(line, '/' || name);
  end if;
  if options -> 'weight' is not null then
    if path is null then
      raise exception 'onceq: weight is set without a limit' using errcode = 'OQ010', hint = 'Pass a limit, or leave weight out.';
    elsif (options ->> 'weight')::numeric not between 1 and 1000000000 or (options ->> 'weight')::numeric % 1 <> 0 then
      raise exception 'onceq: weight is %; 1 to 1000000000 is possible', options -> 'weight' using errcode = 'OQ010', hint = 'Leave it out for 1.';
    end if;
    path := path || case when (options ->> 'weight')::numeric > 1 then chr(31) || (options ->> 'weight')::numeric::integer else '' end;
  end if;

  if exists (select from jsonb_array_elements_text(options -> 'replace') e where (e in ('payload', 'time')) is not true) then
    raise exception 'onceq: replace has something else than payload and time' using errcode = 'OQ010', hint = 'Pass an array with one of them, or both.';
  end if;
  replacing := coalesce((options -> 'replace') ? 'payload', false)::integer | coalesce((options -> 'replace') ? 'time', false)::integer * 2
               | coalesce(options ->> 'window' = 'until_started', false)::integer * 4;
  if jsonb_array_length(options -> 'after') > 0 then
    if exists (select from jsonb_array_elements_text(options -> 'after') e where (e ~ '^[1-9][0-9]{0,17}$') is not true) then
      raise exception 'onceq: after has something else than ids of jobs' using errcode = 'OQ010', hint = 'Pass ids, as enqueue returns them.';
    end if;
    after := array(select e::bigint from jsonb_array_elements_text(options -> 'after') e order by 1 desc);
    if after[1] > coalesce(pg_sequence_last_value((select tableoid from {{.schema}}.ids)), 0) then
      raise exception 'onceq: after names job %, and no job has had that id yet', after[1] using errcode = 'OQ010', hint = 'Enqueue that job first.';
    end if;
    if_dead := array_position(array['wait', 'run', 'cancel'], coalesce(options ->> 'if_dead', 'wait')) - 1;
    if if_dead is null then
      raise exception 'onceq: if_dead is %; possible: wait, run, cancel', options -> 'if_dead' using errcode = 'OQ010', hint = 'Leave it out for wait.';
    end if;
    path := coalesce(path, line, '');
    line := chr(31);
  elsif options -> 'if_dead' is not null then
    raise exception 'onceq: if_dead is set without after' using errcode = 'OQ010', hint = 'Pass after, or leave if_dead out.';
  end if;
  if replacing & 3::smallint > 0 and (strictly or after is not null) then
    raise exception 'onceq: replace is set together with strict or after; use one' using errcode = 'OQ010', hint = 'Leave one of them out.';
  end if;
end
$job_of$;

-- Enqueues a job in the caller's transaction: see Queue.Enqueue. A key that is taken is no error: the answer has the job that has it, in which state that is, and its
-- result once it is completed.
create function {{.schema}}.enqueue(kind text, payload jsonb default 'null', key text default null, options jsonb default '{}',
                                    out id bigint, out duplicate boolean, out state text, out output jsonb)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $enqueue$
#variable_conflict use_variable
begin
  select e.* into id, duplicate, state, output from {{.schema}}.enqueue_either(kind, coalesce(payload, 'null'), null, key, options) e;
end
$enqueue$;

-- The same for a payload of bytes.
create function {{.schema}}.enqueue_bytes(kind text, payload bytea, key text default null, options jsonb default '{}',
                                          out id bigint, out duplicate boolean, out state text, out output jsonb)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $enqueue_bytes$
#variable_conflict use_variable
begin
  select e.* into id, duplicate, state, output from {{.schema}}.enqueue_either(kind, null, coalesce(payload, ''), key, options) e;
end
$enqueue_bytes$;

-- Takes the key and enqueues the job. If the key is taken, it answers with the job that has it, which it replaces if that is asked for, or with an error if that is other work.
create function {{.schema}}.enqueue_either(kind text, payload jsonb, bytes bytea, key text, options jsonb,
                                           out id bigint, out duplicate boolean, out state text, out output jsonb)
language plpgsql set search_path = pg_catalog, pg_temp as $enqueue_either$
#variable_conflict use_variable
declare
  j     record := {{.schema}}.job_of(kind, payload, bytes, key, options);
  e     record;
  fence record;
  known boolean; -- what has the key; an unknown version of its fingerprint, or a payload that is not compared, counts as equal
  other text;    -- the kind of the job that has the key
  words text;
  part  smallint; -- what replace_jobs is asked for,
  tried bigint;   -- and for which job
begin
  for try in 1 .. 10 loop
    if j.after is null then
      e := {{.schema}}.enqueue_one((select tableoid from {{.schema}}.ids), j.queue, kind, payload::text, j.attempts, j.priority, j.scope, key, j.lifetime, j.fingerprint,
                                   j.at, j.delay, j.metadata, bytes, (random() * 9223372036854775000)::bigint, false, j.line, j.rule, j.path, null);
      id := e.id; state := case when e.delayed then 'delayed' else 'waiting' end;
    else
      e := {{.schema}}.enqueue_jobs((select tableoid from {{.schema}}.ids), null, array[coalesce(payload::text, '')], array[bytes], array[coalesce(key, '')], array[j.fingerprint], null,
                                    array[j.queue], array[kind], array[coalesce(j.scope, '')], array[coalesce(j.metadata, '')], array[j.priority::integer], array[j.attempts::integer],
                                    array[coalesce(j.at, 0)], array[coalesce(j.delay, 0)], array[j.lifetime], (random() * 9223372036854775000)::bigint, false,
                                    array[j.line], array[j.rule], array[j.path], array[j.if_dead], null, true);
      id := e.accepted[1]; state := case when e.delayed[1] then 'delayed' else 'waiting' end;
      perform {{.schema}}.insert_members(array_agg(id), array_agg(a.id), array_agg(false), array_agg(0::smallint), array_agg(''::text)) from unnest(j.after) as a(id) where id is not null having count(*) > 0;
    end if;
    if id is not null then
      duplicate := false;
      return;
    end if;

    -- One look: the job may end meanwhile.
    select f.*, v.state as live, v.payload as payload, v.payload_bytes as bytes into fence
      from {{.schema}}.job_fences f
      left join lateral (select l.state, l.payload, l.payload_bytes from {{.schema}}.v_jobs l where l.id = f.job_id limit 1) v on true
     where f.class = 0 and f.scope = j.scope and f.key = enqueue_either.key
       and not (f.state in (3, 4, 5) and f.lifetime >= 0
                and (f.lifetime = 0 and f.finished_at is not null or f.finished_at + f.lifetime::float8 * interval '1 millisecond' <= statement_timestamp())
                or f.class = 0 and f.state = 5 and f.token = f.token >> 20 << 20);
    continue when not found;
    id := fence.job_id; duplicate := true; output := fence.result;
    state := case fence.state when 3 then 'completed' when 4 then 'dead' when 5 then 'cancelled' when 6 then 'held' else coalesce(fence.live, 'waiting') end;
    known := coalesce(get_byte(fence.fingerprint, 0) = 1, false);
    other := case when known then convert_from(substring(fence.fingerprint from 3 + get_byte(fence.fingerprint, 1)), 'UTF8') end;
    words := case when other <> convert_from(substring(j.fingerprint from 3 + get_byte(j.fingerprint, 1)), 'UTF8')
                  then format('of the kind %s', to_json(case when other = '' then j.scope else other end))
                  when known and get_byte(fence.fingerprint, 1) > 0 and get_byte(j.fingerprint, 1) > 0
                       and substring(fence.fingerprint from 3 for get_byte(fence.fingerprint, 1)) <> substring(j.fingerprint from 3 for get_byte(j.fingerprint, 1))
                  then 'with another payload' end;
    part := j.replacing & case when fence.state <> 0 or words <> 'with another payload' then 0
                               when state in ('waiting', 'delayed') and (words is null or j.replacing & 1::smallint > 0) then 7 else 4 end::smallint;
    if id is distinct from tried and part > 0 then
      e := {{.schema}}.replace_jobs(array[id], array[j.scope], array[key], array[coalesce(payload::text, '')], array[bytes], array[coalesce(j.metadata, '')], array[j.fingerprint],
                                    array[part], array[coalesce(j.at, 0)], array[coalesce(j.delay, 0)], array[coalesce(j.path, j.line, '')], array[fence.fingerprint]);
      if e.replaced is not null then
        state := case when e.delayed[1] then 'delayed' else 'waiting' end;
        return;
      end if;
      tried := id;
      continue when e.kept is null; -- it has left its key, or ends just now
    end if;
    if words is not null then
      select 'Members that differ: ' || string_agg(d.name, ', ' order by d.name) into other
        from (select left(coalesce(a.key, b.key), 60) as name
                from jsonb_each(case when jsonb_typeof(payload) = 'object' then payload else '{}' end) a
                full join jsonb_each(case when jsonb_typeof(fence.payload) = 'object' then fence.payload else '{}' end) b on a.key = b.key
               where a.value is distinct from b.value and (j.fields is null or coalesce(a.key, b.key) = any (j.fields))
               order by 1 limit 10) d
       where fence.payload is not null and bytes is null and words = 'with another payload';
      raise exception 'onceq: the key % in the scope % belongs to job % %', to_json(key), to_json(j.scope), id, words using errcode = 'OQ011', detail = coalesce(other, ''),
        hint = 'The same work needs the same payload, and other work another key.';
    elsif j.strictly then
      raise exception 'onceq: the key % in the scope % is taken by job %, which is %', to_json(key), to_json(j.scope), id, state using errcode = 'OQ012', hint = 'Without strict, that job is returned as a duplicate.';
    end if;
    return;
  end loop;
  raise exception 'onceq: the key % in the scope % is neither free nor visible here', to_json(key), to_json(j.scope) using errcode = 'OQ013',
    hint = 'Try it again in a new transaction, at READ COMMITTED.';
end
$enqueue_either$;

-- Enqueues many jobs, all or none: an array of objects with kind, payload, key and the options. The answers are in the order of the jobs. Keys are taken in the order of scope and
-- key, so that two callers with the same keys do not deadlock.
create function {{.schema}}.enqueue_many(jobs jsonb) returns table (id bigint, duplicate boolean, state text, output jsonb)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $enqueue_many$
#variable_conflict use_variable
declare
  a jsonb;
  j record;
  e record;
  n integer := 0;
  kinds text[] := '{}'; payloads text[] := '{}'; keys text[] := '{}'; fingerprints bytea[] := '{}';
  queues text[] := '{}'; scopes text[] := '{}'; metadatas text[] := '{}'; priorities integer[] := '{}'; attempts integer[] := '{}';
  ats bigint[] := '{}'; delays bigint[] := '{}'; lifetimes bigint[] := '{}'; lines text[] := '{}'; rules smallint[] := '{}'; paths text[] := '{}';
  if_deads smallint[] := '{}'; followers integer[] := '{}'; members bigint[] := '{}'; details jsonb[] := '{}'; duplicates boolean[]; states text[]; outputs jsonb[]; ids bigint[]; hint text;
begin
  if jsonb_typeof(jobs) is distinct from 'array' then
    raise exception 'onceq: jobs is no JSON array' using errcode = 'OQ010', hint = 'Pass an array, as [{"kind": "mail", "payload": {}}].';
  end if;
  for a in select jsonb_array_elements(jobs) loop
    n := n + 1;
    begin
      if jsonb_typeof(a) <> 'object' or jsonb_typeof(coalesce(a -> 'kind', '""')) <> 'string' or jsonb_typeof(coalesce(a -> 'key', '""')) not in ('string', 'null') then
        raise exception 'onceq: it is no object with a kind, and a key that is a string' using errcode = 'OQ010', hint = 'Pass an object, as {"kind": "mail", "key": "7", "payload": {}}.';
      end if;
      j := {{.schema}}.job_of(a ->> 'kind', coalesce(a -> 'payload', 'null'), null, a ->> 'key', a - 'kind' - 'payload' - 'key');
    exception when sqlstate 'OQ010' then
      get stacked diagnostics hint = pg_exception_hint;
      raise exception 'onceq: job %: %', n, substr(sqlerrm, 8) using errcode = 'OQ010', hint = hint;
    end;
    kinds := kinds || (a ->> 'kind'); payloads := payloads || coalesce(a -> 'payload', 'null')::text; keys := keys || coalesce(a ->> 'key', ''); fingerprints := fingerprints || j.fingerprint;
    queues := queues || j.queue; scopes := scopes || coalesce(j.scope, ''); metadatas := metadatas || coalesce(j.metadata, ''); priorities := priorities || j.priority::integer;
    attempts := attempts || j.attempts::integer; ats := ats || coalesce(j.at, 0); delays := delays || coalesce(j.delay, 0); lifetimes := lifetimes || j.lifetime;
    lines := lines || coalesce(j.line, ''); rules := rules || j.rule; paths := paths || coalesce(j.path, '');
    if_deads := if_deads || j.if_dead;
    if j.after is not null then
      followers := followers || array_fill(n, array[cardinality(j.after)]); members := members || j.after;
    end if;
    details := details || (a - 'kind' - 'payload' - 'key');
  end loop;
  if n = 0 then
    return;
  end if;
  if exists (select from unnest(scopes, keys) as u(scope, key) where u.scope <> '' group by u.scope, u.key having count(*) > 1) then
    raise exception 'onceq: a key is twice in jobs: %', (select to_json(min(d.key)) from (select u.key from unnest(scopes, keys) as u(scope, key) where u.scope <> '' group by u.scope, u.key having count(*) > 1) d)
      using errcode = 'OQ010', hint = 'Leave one of the two out.';
  end if;
  e := {{.schema}}.enqueue_jobs((select tableoid from {{.schema}}.ids), array(select generate_series(1, n)), payloads, null, keys, fingerprints, null,
                                queues, kinds, scopes, metadatas, priorities, attempts, ats, delays, lifetimes, (random() * 9223372036854775000)::bigint, false,
                                lines, rules, paths, if_deads, null, false);
  ids := e.ids; duplicates := array_fill(false, array[n]); outputs := array_fill(null::jsonb, array[n]);
  states := array(select case when d then 'delayed' else 'waiting' end from unnest(e.delayed) with ordinality as u(d, n) order by n);
  perform {{.schema}}.insert_members(array_agg(u.id), array_agg(f.member), array_agg(false), array_agg(0::smallint), array_agg(''::text))
     from unnest(followers, members) as f(n, member)
     join unnest(ids) with ordinality as u(id, n) on u.n = f.n
     join unnest(e.accepted) as a(id) on a.id = u.id
   having count(*) > 0;
  for n in
    select u.n from unnest(ids, scopes, keys) with ordinality as u(id, scope, key, n) left join unnest(e.accepted) as a(id) on a.id = u.id
     where a.id is null order by u.scope collate "C", u.key collate "C"
  loop
    j := {{.schema}}.enqueue_either(kinds[n], payloads[n]::jsonb, null, keys[n], details[n]);
    ids[n] := j.id; duplicates[n] := j.duplicate; states[n] := j.state; outputs[n] := j.output;
  end loop;
  return query select * from unnest(ids, duplicates, states, outputs);
end
$enqueue_many$;

-- Emits an event in the caller's transaction: see Queue.Emit. It returns whether it was the first one of that scope and key.
create function {{.schema}}.emit(scope text, key text, payload jsonb default 'null') returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $emit_event$
begin
  perform {{.schema}}.check_name('scope', scope, 256);
  perform {{.schema}}.check_name('key', key, 512);
  perform {{.schema}}.check_payload(payload, 262144);
  return {{.schema}}.emit(scope, key, coalesce(payload, 'null'), 2592000000, (random() * 9223372036854775000)::bigint, false);
end
$emit_event$;

-- Citus sends a revoke on without quotes around the schema's name, so it gets none: clients talk to the coordinator.
do $revoke$
declare
  citus boolean := pg_catalog.to_regclass('pg_catalog.pg_dist_partition') is not null;
begin
  if citus then
    perform pg_catalog.set_config('citus.enable_ddl_propagation', 'off', true);
  end if;
  revoke execute on function {{.schema}}.enqueue(text, jsonb, text, jsonb) from public;
  revoke execute on function {{.schema}}.enqueue_bytes(text, bytea, text, jsonb) from public;
  revoke execute on function {{.schema}}.enqueue_many(jsonb) from public;
  revoke execute on function {{.schema}}.emit(text, text, jsonb) from public;
  if citus then
    perform pg_catalog.set_config('citus.enable_ddl_propagation', 'on', true);
  end if;
end $revoke$;

-- Ends a job in the caller's transaction: see Queue.Cancel. It returns the job's state after that, or null if there is no trace of it. It is for who may write the tables.
create function {{.schema}}.cancel(id bigint) returns text
language plpgsql set search_path = pg_catalog, pg_temp as $cancel_job$
begin
  if (select c.cancelled from {{.schema}}.cancel(array[id], 86400000, false, 0) c) is not null then
    return 'cancelled';
  end if;
  -- Somebody has it. Its holder may have looked for a request just before, and may have given it back since.
  insert into {{.schema}}.job_cancels (job_id, requested_at)
  select v.id, greatest(statement_timestamp(), v.created_at) from {{.schema}}.v_jobs v where v.id = cancel.id and v.finished_at is null
  on conflict (job_id) do update set requested_at = excluded.requested_at;
  perform {{.schema}}.cancel(array[id], 86400000, false, 0);
  return (select case when v.finished_at is null then 'running' else v.state end from {{.schema}}.v_jobs v where v.id = cancel.id order by v.finished_at desc nulls first limit 1);
end
$cancel_job$;

-- A job, for who may read the views.
create function {{.schema}}.job(id bigint) returns setof {{.schema}}.v_jobs
language sql stable set search_path = pg_catalog, pg_temp as $job$
select v.* from {{.schema}}.v_jobs v where v.id = $1
$job$;

---- create above / drop below ----

drop function {{.schema}}.job(bigint);
drop function {{.schema}}.cancel(bigint);
drop function {{.schema}}.emit(text, text, jsonb);
drop function {{.schema}}.enqueue_many(jsonb);
drop function {{.schema}}.enqueue_bytes(text, bytea, text, jsonb);
drop function {{.schema}}.enqueue(text, jsonb, text, jsonb);
drop function {{.schema}}.enqueue_either(text, jsonb, bytea, text, jsonb);
drop function {{.schema}}.job_of(text, jsonb, bytea, text, jsonb);
drop function {{.schema}}.check_payload(jsonb, integer);
drop function {{.schema}}.check_name(text, text, integer);
drop function {{.schema}}.canonical(jsonb, text[], integer);
drop function {{.schema}}.canonical_text(text);
drop view {{.schema}}.v_counts;
drop view {{.schema}}.v_actions;
drop view {{.schema}}.v_schedules;
drop view {{.schema}}.v_pauses;
drop view {{.schema}}.v_workers;
drop view {{.schema}}.v_keys;
drop view {{.schema}}.v_effects;
drop view {{.schema}}.v_groups;
drop view {{.schema}}.v_members;
drop view {{.schema}}.v_backlog;
drop view {{.schema}}.v_queues;
drop view {{.schema}}.v_jobs;
drop function {{.schema}}.follow(text[], bigint, bigint);
drop function {{.schema}}.sweep_members();
drop function {{.schema}}.redrive(bigint[], smallint[], bigint, bigint[]);
drop function {{.schema}}.discard(bigint[], smallint[]);
drop function {{.schema}}.replace_jobs(bigint[], text[], text[], text[], bytea[], text[], bytea[], smallint[], bigint[], bigint[], text[], bytea[]);
drop function {{.schema}}.hurry(bigint[]);
drop function {{.schema}}.resolve_effects(bigint[], smallint[], smallint, text, text);
drop function {{.schema}}.resolve_fence(smallint, text, text, smallint, text, bigint);
drop function {{.schema}}.claim_fence(regclass, bigint, integer, bigint, smallint, text, text, bigint, bigint, bigint, bytea, bigint, boolean, text, boolean, bigint);
drop function {{.schema}}.rescan_turn(text[], bigint, text[]);
drop function {{.schema}}.add_counts(text[], text[], integer[], integer[], integer[], integer[], bigint[], integer[], bigint[], text[], text[]);
drop function {{.schema}}.add_each(integer[], integer[]);
drop function {{.schema}}.be_present(bigint, text, integer, text, integer, bigint, jsonb, text[], jsonb, jsonb, text);
drop function {{.schema}}.move(bigint[], text, bigint, boolean);
drop function {{.schema}}.request_cancels(bigint[]);
drop function {{.schema}}.cancel_followers(bigint[], bigint);
drop function {{.schema}}.insert_members(bigint[], bigint[], boolean[], smallint[], text[]);
drop function {{.schema}}.mark_members(bigint[]);
drop function {{.schema}}.cancel(bigint[], bigint, boolean, integer);
drop function {{.schema}}.keep_history(bigint[], smallint[], text[], integer[], bigint[], jsonb[], boolean);
drop function {{.schema}}.give_back(bigint[], integer[], bigint[], text[], integer[], boolean[], bigint[], integer[], boolean, text[], text[], jsonb);
drop function {{.schema}}.finish_next(bigint, integer, bigint, text, boolean, bigint, bigint, text, text[]);
drop function {{.schema}}.finish(bigint[], integer[], bigint[], smallint[], text[], text[], integer[], bigint[], boolean, jsonb);
drop function {{.schema}}.promote(timestamptz, integer, bigint, bigint, bigint, bigint, text, text[]);
drop function {{.schema}}.call_families(integer);
drop function {{.schema}}.settle_limits();
drop function {{.schema}}.take_slots(text, bigint[], integer[], bigint[]);
drop function {{.schema}}.owe(text, timestamptz, float8, float8);
drop function {{.schema}}.rate_of(text, timestamptz);
drop function {{.schema}}.set_limit(text, integer, bigint, bigint, integer, boolean);
drop function {{.schema}}.resume(text, text);
drop function {{.schema}}.pause(text, text, timestamptz, bigint, text, boolean);
drop function {{.schema}}.go_live(bigint[], timestamptz[], boolean[], timestamptz, bigint, bigint, boolean);
drop function {{.schema}}.hand_over(bigint[], text[], boolean[], boolean[], jsonb);
drop function {{.schema}}.call(text[], timestamptz);
drop function {{.schema}}.weight(text);
drop function {{.schema}}.tell(bigint[], smallint[], text[]);
drop function {{.schema}}.begin_await(bigint, text, text, bigint, integer, bigint, bigint);
drop function {{.schema}}.emit(text, text, jsonb, bigint, bigint, boolean);
drop function {{.schema}}.wake(text, bigint, bigint, boolean);
drop function {{.schema}}.enqueue_jobs(regclass, integer[], text[], bytea[], text[], bytea[], bigint[], text[], text[], text[], text[], integer[], integer[], bigint[], bigint[], bigint[],
                                       bigint, boolean, text[], smallint[], text[], smallint[], timestamptz, boolean);
drop function {{.schema}}.enqueue_one(regclass, text, text, text, smallint, smallint, text, text, bigint, bytea, bigint, bigint, text, bytea, bigint, boolean, text, smallint, text, bigint);
drop function {{.schema}}.take_fence(regclass, text, text, bigint, bytea);
drop function {{.schema}}.next_id(regclass, bigint);
drop function {{.schema}}.id_taken(bigint);
drop function {{.schema}}.lease_lost(bigint);
drop table {{.schema}}.actions, {{.schema}}.schedule_ticks, {{.schema}}.schedules, {{.schema}}.turns, {{.schema}}.wakes, {{.schema}}.waiter_queues, {{.schema}}.waiters, {{.schema}}.workers,
           {{.schema}}.job_counts, {{.schema}}.pauses, {{.schema}}.queues, {{.schema}}.job_awaits, {{.schema}}.job_cancels, {{.schema}}.job_history, {{.schema}}.job_fences, {{.schema}}.lane_locks,
           {{.schema}}.limit_rates, {{.schema}}.lane_limits, {{.schema}}.lane_calls, {{.schema}}.lane_stops, {{.schema}}.lane_places, {{.schema}}.job_members, {{.schema}}.job_waits, {{.schema}}.jobs;
drop sequence {{.schema}}.ids;
drop table {{.schema}}.meta;
