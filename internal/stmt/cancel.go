package stmt

// CancelJobs is the function cancel of the schema, whose comment says what it does.
const CancelJobs = `
select c.cancelled, c.queues, c.kinds, c.scopes, c.keys from onceq.cancel($1::bigint[], $2::bigint, $3::bool, $4::int) c`

// RequestCancels leaves notes for the holders of those of the jobs that are live, and returns how many.
const RequestCancels = `select n from onceq.request_cancels($1::bigint[]) n`

// Unheeded gives jobs after $2 that somebody asked to cancel and that nobody holds, at most $1 of them. A
// holder cannot see a request that is not committed yet when it gives its job back, and a row that a
// transaction has locked may turn out to be one that nobody runs.
const Unheeded = `
select pg_catalog.array_agg(job_id)
  from (select x.job_id from onceq.job_cancels x
         where x.job_id > $2::bigint
           and (exists (select from onceq.jobs j
                         where j.id = x.job_id and j.created_at <= x.requested_at
                           and (j.leased_until is null or j.leased_until <= statement_timestamp()) offset 0)
             or exists (select from onceq.job_waits w where w.id = x.job_id and w.created_at <= x.requested_at offset 0))
         order by x.job_id
         limit $1::int) x`

// RedriveJobs brings jobs back from the history.
const RedriveJobs = `
select r.back, r.taken, r.held, r.early, r.led, r.used_up from onceq.redrive($1::bigint[], $2::smallint[], $3::bigint, $4::bigint[]) r`
