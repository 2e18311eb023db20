-- Never shipped: what a migration after the first one may look like, for tests of code on tables that are newer than it.

alter table {{.schema}}.jobs add column later integer;
alter table {{.schema}}.job_waits add column later integer;
alter table {{.schema}}.job_history add column later integer;
alter table {{.schema}}.job_fences add column later text not null default 'later', add column latest boolean;
alter table {{.schema}}.workers add column later integer not null default 1;

create table {{.schema}}.laters (
  job_id bigint not null primary key,
  note   text not null default ''
);
create index laters_note on {{.schema}}.laters (note);

update {{.schema}}.meta set version = 2;

---- create above / drop below ----

update {{.schema}}.meta set version = 1;
drop table {{.schema}}.laters;
alter table {{.schema}}.workers drop column later;
alter table {{.schema}}.job_fences drop column later, drop column latest;
alter table {{.schema}}.job_history drop column later;
alter table {{.schema}}.job_waits drop column later;
alter table {{.schema}}.jobs drop column later;
