package stmt

import "github.com/onceq/onceq/internal/table"

// ClusterSize is reap.ReadFences for a schema on a node, of which the coordinator does not know how many rows
// came; a schema that is not sharded is on the coordinator.
const ClusterSize = `
select case when exists (select from pg_dist_partition where logicalrelid = 'onceq.job_fences'::regclass)
            then citus_relation_size('onceq.job_fences'::regclass) else pg_catalog.pg_relation_size('onceq.job_fences'::regclass) end
       / pg_catalog.current_setting('block_size')::bigint, pg_catalog.pg_stat_get_tuples_inserted('onceq.job_fences'::regclass)`

// EnqueueDrawn is EnqueueJobs for jobs that have ids: the sequence is on the coordinator.
var EnqueueDrawn = enqueueJobsFrom("null")

// EnqueueOneDrawn is EnqueueOne for a job that has an id, on the node.
var EnqueueOneDrawn = enqueueOneFrom("onceq.meta, ", "null", "$19::bigint")

// ClaimFenceDrawn is TakeFence, and without a token InsertFence, with a drawn id.
const ClaimFenceDrawn = `
select f.holds, f.token, f.until, f.since, f.identity
  from onceq.meta, onceq.claim_fence(null, $1::bigint, $2::int, $3::bigint, $4::smallint, $5::text, $6::text, $7::bigint, $8::bigint, $9::bigint, $10::bytea,
                                     $11::bigint, $12::bool, $13::text, $14::bool, $15::bigint) f`

// RefsApart is ReadRefs with what the sequence says, which is on the coordinator.
var RefsApart = refsFrom(`$3::bigint`)

// What EnqueueInBatch sends. No part waits for an answer: the id is in a setting of the transaction, and the
// fence says by a random holder that it was taken just now.
const (
	DrawApart = `select pg_catalog.set_config('onceq_drawn.id', pg_catalog.nextval('onceq.ids')::text, true)`

	FenceApart = `
insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint, holder)
values (` + table.OfJob + `, $1::text, $2::text, ` + table.Queued + `, pg_catalog.current_setting('onceq_drawn.id')::bigint, pg_catalog.current_setting('onceq_drawn.id')::bigint << ` + table.TokenBitsSQL + `,
        statement_timestamp(), $3::bigint, $4::bytea, $5::bigint)
on conflict do nothing`

	RetakeApart = `
update onceq.job_fences f
   set job_id = pg_catalog.current_setting('onceq_drawn.id')::bigint, token = pg_catalog.current_setting('onceq_drawn.id')::bigint << ` + table.TokenBitsSQL + `,
       state = ` + table.Queued + `, created_at = statement_timestamp(), finished_at = null,
       lifetime = $3::bigint, fingerprint = $4::bytea, result = null, holder = $5::bigint, leased_until = null
 where f.class = ` + table.OfJob + ` and f.scope = $1::text and f.key = $2::text and ` + table.FenceFree + `
   and f.token >> ` + table.TokenBitsSQL + ` < pg_catalog.current_setting('onceq_drawn.id')::bigint and f.job_id < pg_catalog.current_setting('onceq_drawn.id')::bigint`
)

// The rows of a job, with a key and without one: of jobs, or with the columns of a lane or a limit of
// job_waits. CallOfBatch is the call of such a one. That comes after the job, so that it is not due before
// it, and is left even if the key is taken: then a promoter looks for nothing. WaitOfBatch has the answer of
// the two. It changes nothing, but only of what changes something Citus evaluates a setting on the
// coordinator.
var (
	PlainApart       = plainOf("jobs", "pg_catalog.nextval('onceq.ids')", "", "")
	WaitApart        = plainOf("job_waits", "pg_catalog.current_setting('onceq_drawn.id')::bigint", ", lane, lane_rule, path", ", $10::text, $11::smallint, $12::text")
	JobApart         = keyedOf("jobs", "", "")
	WaitOfFenceApart = keyedOf("job_waits", ", lane, lane_rule, path", ", $13::text, $14::smallint, $15::text")

	WaitOfBatch = `update onceq.job_waits set claims = claims where id = pg_catalog.current_setting('onceq_drawn.id')::bigint returning id, run_at > created_at, 1`

	CallOfBatch = `
insert into onceq.lane_calls (slot, due, lane)
values (` + table.LaneSlot("$1::text") + `, greatest(statement_timestamp(), statement_timestamp() + $2::bigint::float8 * interval '1 microsecond',
                                               timestamptz 'epoch' + $3::bigint::float8 * interval '1 microsecond'), $1::text)`
)

func plainOf(into, id, columns, values string) string {
	return `
insert into onceq.` + into + ` (id, run_at, created_at, max_attempts, priority, queue, kind, payload, payload_bytes, metadata` + columns + `)
values (` + id + `,
        greatest(statement_timestamp(), statement_timestamp() + $6::bigint::float8 * interval '1 microsecond',
                 timestamptz 'epoch' + $7::bigint::float8 * interval '1 microsecond'),
        statement_timestamp(), $4::smallint, $5::smallint, $1::text, $2::text, $3::text::jsonb, $8::bytea, $9::text::jsonb` + values + `)
returning id, run_at > created_at, 1`
}

func keyedOf(into, columns, values string) string {
	return `
insert into onceq.` + into + ` (id, run_at, created_at, max_attempts, priority, queue, kind, payload, payload_bytes, metadata, scope, key` + columns + `)
select f.job_id,
       greatest(f.created_at, pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.created_at) + $6::bigint::float8 * interval '1 microsecond'),
                pg_catalog.timezone('UTC', timestamp 'epoch' + $7::bigint::float8 * interval '1 microsecond')),
       f.created_at, $4::smallint, $5::smallint, $1::text, $2::text, $3::text::jsonb, $8::bytea, $9::text::jsonb, f.scope, f.key` + values + `
  from onceq.job_fences f
 where f.class = ` + table.OfJob + ` and f.scope = $10::text and f.key = $11::text and f.holder = $12::bigint
returning id, run_at > created_at, 1`
}

// In a handler's transaction the coordinator knows the transaction's id and ends the connection of a client
// that freezes; the node knows neither that client nor the id. On a plain server the same two are columns of
// LockJob and LockJobs.
const OpenApart = `select ` + limitIdling + `, null, pg_current_xact_id()::text`
