package stmt

import "github.com/onceq/onceq/internal/table"

// GroupsOf reads the groups that a job is a member of, and raises an error if its lease is lost.
const GroupsOf = `
with ok as materialized (
  select id from onceq.jobs where ` + HeldByOne + ` for no key update
)
select case when not exists (select from ok) then onceq.lease_lost($1::bigint) end,
       array(select group_id from onceq.job_members where job_id + 0 = $1::bigint order by group_id)`

// FindCycles looks for jobs that wait for the groups $1, directly or through others, under the ids $2 and the
// names $3 and $4. It gives the place of the first one that it finds, its id, and a group that it waits for.
// It gives up after so many.
const FindCycles = `
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
              select coalesce(nullif(g.id, 0), (select job_id from onceq.job_fences f where f.class = ` + table.OfJob + ` and f.scope = g.scope and f.key = g.key)) as id offset 0) f
         join waits w on w.id = f.id
        order by g.n limit 1) c on true`

// ReadMembers reads a page of a group's members. Of those that have completed it reads nothing but this.
const ReadMembers = `
with page as materialized (
  select job_id, nullif(state, 0) as state, case when not $4::boolean then result end as result
    from onceq.job_members
   where group_id = $1::bigint and job_id > $2::bigint
   order by job_id
   limit $3::int
)
select m.job_id, coalesce(m.state, i.state, ` + table.JobCompleted + `), m.result::text,
       coalesce(case when i.state <> ` + table.JobCompleted + ` then i.kind end, ''),
       coalesce(case when i.state <> ` + table.JobCompleted + ` then i.errors -> -1 ->> 'error'::text end, '')
  from page m
  left join lateral (
       select ` + table.JobState + ` as state, j.kind, j.errors from onceq.jobs j where j.id = m.job_id and m.state is null
        union all
       select ` + table.WaitState + `, w.kind, w.errors from onceq.job_waits w where w.id = m.job_id and m.state is null
        union all
       select h.state, h.kind, h.errors from onceq.job_history h where h.id = m.job_id and m.state is distinct from ` + table.JobCompleted + `
        limit 1) i on true
 order by m.job_id`

// countMembers counts the members of group g.id, and reads the state of the job that waits for them.
const countMembers = `
       coalesce((select ` + table.WaitState + ` from onceq.job_waits w where w.id = g.id), (select ` + table.JobState + ` from onceq.jobs j where j.id = g.id),
                (select h.state from onceq.job_history h where h.id = g.id)),
       w.if_dead is not null,
       coalesce(w.if_dead, (select 2 from onceq.job_history h where h.id = g.id and h.if_dead = 3), 0),
       coalesce(extract(epoch from statement_timestamp() - w.created_at) * 1e6, 0)::bigint,
       m.total, m.open, m.completed, m.dead, m.cancelled, m.held,
       array(select job_id from onceq.job_members where $4::bool and group_id = $3::bigint and state = 0 order by job_id limit 10),
       array(select job_id from onceq.job_members where $4::bool and group_id = $3::bigint and state in (` + table.JobDead + `, ` + table.JobHeld + `) order by job_id limit 10)
  from g
  left join lateral (select if_dead, created_at from onceq.job_waits where id = g.id and if_dead is not null offset 0) w on true
 cross join lateral (
       select count(*) as total, count(*) filter (where state = 0) as open, count(*) filter (where state = ` + table.JobCompleted + `) as completed,
              count(*) filter (where state = ` + table.JobDead + `) as dead, count(*) filter (where state = ` + table.JobCancelled + `) as cancelled,
              count(*) filter (where state = ` + table.JobHeld + `) as held
         from onceq.job_members where group_id = g.id) m`

// ReadGroups gives at most $2 of the groups behind $1 that still wait, by id, or group $3. With $4 it also
// gives that group's first members that are unfinished, and the first ones that wait for a person.
var ReadGroups = `
with g as materialized (
  (select id, lane from onceq.job_waits
    where lane > ` + table.FollowLine("$1::bigint") + ` and lane < ' ' and $3::bigint = 0
    order by lane limit $2::int)
  union all
  select $3::bigint, '' where $3::bigint <> 0
)
select g.id,` + countMembers + `
 order by g.lane`
