-- Never shipped: what a migration after the first one may look like, for tests of code on tables that are newer than it.

alter table {{.schema}}.jobs add column later integer;
alter table {{.schema}}.job_waits add column later integer;
alter table {{.schema}}.job_history add column later integer;
alter table {{.schema}}.job_fences add column later text not null default 'later', add column latest boolean;
alter table {{.schema}}.schedules add column later text not null default 'later';
alter table {{.schema}}.schedule_ticks add column later text not null default 'later';
alter table {{.schema}}.lane_places add column later text not null default 'later';
alter table {{.schema}}.lane_stops add column later text not null default 'later';
alter table {{.schema}}.lane_calls add column later text not null default 'later';
alter table {{.schema}}.lane_limits add column later text not null default 'later';
alter table {{.schema}}.limit_rates add column later text not null default 'later';
alter table {{.schema}}.job_members add column later text not null default 'later';
alter table {{.schema}}.job_awaits add column later text not null default 'later';
alter table {{.schema}}.workers add column later integer not null default 1;

create table {{.schema}}.laters (
  job_id bigint not null primary key,
  note   text not null default ''
);
create index laters_note on {{.schema}}.laters (note);

create function {{.schema}}.later(ids regclass, above bigint) returns bigint language sql set search_path = pg_catalog, pg_temp as $$ select above $$;

update {{.schema}}.meta set version = 2;

---- create above / drop below ----

update {{.schema}}.meta set version = 1;
drop function {{.schema}}.later(regclass, bigint);
drop table {{.schema}}.laters;
alter table {{.schema}}.workers drop column later;
alter table {{.schema}}.job_awaits drop column later;
alter table {{.schema}}.job_members drop column later;
alter table {{.schema}}.limit_rates drop column later;
alter table {{.schema}}.lane_limits drop column later;
alter table {{.schema}}.lane_calls drop column later;
alter table {{.schema}}.lane_stops drop column later;
alter table {{.schema}}.lane_places drop column later;
alter table {{.schema}}.schedule_ticks drop column later;
alter table {{.schema}}.schedules drop column later;
alter table {{.schema}}.job_fences drop column later, drop column latest;
alter table {{.schema}}.job_history drop column later;
alter table {{.schema}}.job_waits drop column later;
alter table {{.schema}}.jobs drop column later;
