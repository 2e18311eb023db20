package stmt

// limitIdling makes the server end the connection of a client that freezes inside the transaction, after $1
// milliseconds of idling, so that the client cannot keep the jobs' rows. A server that waits because the
// client does not read what it sends does not count as idling: then only tcp_user_timeout helps. In a
// worker's transaction $1 is the lease, and a live worker's pings keep its connection from idling that long;
// in Lease.Lock it is the kind's Timeout. Without $1 the server's own setting stays.
const limitIdling = `case when $1::text <> '' then pg_catalog.set_config('idle_in_transaction_session_timeout', $1::text, true) end`

// LockJobs locks the rows of a handler's jobs by their guards, in id order, until the end of its transaction:
// from then on nobody can claim them, expired or not. It raises an error if a guard does not hold. The last
// column is the transaction's id.
const LockJobs = `
with u as materialized (
  select * from unnest($2::bigint[], $3::int[], $4::bigint[]) as u(id, claims, holder)
),
locked as materialized (
  select j.id from u cross join lateral (
         select id from onceq.jobs
          where id = u.id and claims = u.claims and holder = u.holder
            for no key update) j
)
select ` + limitIdling + `,
       case when (select count(*) from locked) < pg_catalog.cardinality($2::bigint[]) then onceq.lease_lost(($2::bigint[])[1]) end,
       pg_current_xact_id()::text`

// LockJob is the same for one job, which needs no planner settings.
const LockJob = `
select ` + limitIdling + `,
       case when not exists (
         select from onceq.jobs where id = $2::bigint and claims = $3::int and holder = $4::bigint
            for no key update) then onceq.lease_lost($2::bigint) end,
       pg_current_xact_id()::text`

// CommittedTx reports whether a transaction that ended was committed.
const CommittedTx = `select coalesce(pg_catalog.pg_xact_status($1::text::xid8) = 'committed', false)`

// CommittedLock reports the same of one that may be unknown to this server, because the server stopped at
// once or is a promoted standby. Then the number is free, or belongs to another transaction by now. What
// shows that it is the same one is its lock on the job's row. Once that row was changed nothing shows it, and
// the answer is no. The columns are computed in their order: the lock is read, then its end is waited for. On
// Citus the lock has another number, so nobody asks there.
const CommittedLock = `
select coalesce((select pg_catalog.xideq(xmax, pg_catalog.xid($1::text::xid8)) from onceq.jobs where id = $2::bigint), false),
       (select 1 from onceq.jobs where id = $2::bigint for no key update),
       coalesce(pg_catalog.pg_xact_status($1::text::xid8) = 'committed', false)`

// sameTx adds a column to a statement that completes jobs after what a handler did in a transaction. If the
// handler has ended that transaction by a statement of its own and is in another one, the column raises an
// error if the first was rolled back, and is 1 if it was committed.
func sameTx(id, job string) string {
	return `,
       case when ` + id + `::text <> pg_current_xact_id()::text
            then case when pg_catalog.pg_xact_status(` + id + `::text::xid8) = 'committed' then 1 else onceq.lease_lost(` + job + `) end end`
}

// InTx are the completions of one job with sameTx.
var InTx = map[string]string{
	CompleteOne:        CompleteOne + sameTx("$6", "$1::bigint"),
	CompleteOneUnkeyed: CompleteOneUnkeyed + sameTx("$4", "$1::bigint"),
}

// CheckTx is the same as a statement of its own, which is sent before the statements for many jobs.
var CheckTx = `select null` + sameTx("$1", "$2::bigint")
