package stmt

// LengthenLease extends a lease and returns a row. It returns none if the lease is lost, or if a transaction
// has the job's row locked.
const LengthenLease = `
with free as materialized (
  select id from onceq.jobs
   where ` + HeldByOne + `
     for no key update skip locked
)
update onceq.jobs j set leased_until = greatest(leased_until, statement_timestamp() + $4::bigint::float8 * interval '1 microsecond')
  from free where j.id = any (array[free.id])
returning true`

// ExtendLeases extends many leases. It returns the places of those extended, of those whose guard holds, and
// of those whose jobs somebody wants cancelled. $5 says which of the leases have a handler that is running,
// and $6 what is to be noted of a run (internal/hold): null if there is nothing. It never waits for a lock:
// otherwise one handler's transaction could let the other leases run out.
const ExtendLeases = `
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
                and exists (select from onceq.jobs j where j.id = x.job_id and j.created_at <= x.requested_at) offset 0) x)`
