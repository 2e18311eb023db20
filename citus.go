package onceq

import (
	"context"
	"math/rand/v2"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/reap"
	"github.com/onceq/onceq/internal/table"
)

// Citus sends a statement whole to the node that has the schema's tables, if it has no insert in a "with", no sequence and,
// where it inserts what it selects, no function that is not immutable. Otherwise it takes the statement apart itself, in ways
// that are slow, that need a two-phase commit, or that it does not know. The statements of this package that are not so are
// sent there in other words, which this file has. What these have in common:
//
//   - The sequence is on the coordinator, so ids are drawn first, by a statement that names no table. EnqueueInBatch, which cannot wait
//     for an answer, sends parts.
//   - "from onceq.meta" says where an insert belongs. The table has one row.
//   - Plans are not generic: for one Citus says "could not create distributed plan", or ends with a segmentation fault.
//   - Nobody is notified. A notification from the node does not reach those who listen on the coordinator. Workers poll.
//
// TestCitus_ runs these on a plain server, in make matrix MODES=citus on a cluster.

// onNode makes a call of a function a query on a table, which goes to that table's node, in transactions too.
// A call alone would run on the coordinator in a transaction, and each of its steps would be a hop.
func onNode(statement string) string {
	switch statement {
	case finishJobs, giveBackJobs, cancelJobs, cancelDead, table.HurryJobs, replaceJobs, redriveJobs, table.DiscardJobs, emitEvent, beginAwait,
		promoteLines, callFamilies, settleLimits, takeSlots, setLimit, insertMembers, sweepMembers, tellMembers, enqueueDrawn, reap.CallLines,
		requestCancels, table.MoveJobs, pauseIt, resumeIt, writePresence, writeCounts, rescanTurn, resolveFence, table.ResolveEffects:
		return statement + ", onceq.meta"
	case reap.ReadFences:
		return clusterSize
	}
	return statement
}

// clusterSize is reap.ReadFences for a schema on a node, of which the coordinator does not know how many rows came; a schema that
// is not sharded is on the coordinator.
const clusterSize = `
select case when exists (select from pg_dist_partition where logicalrelid = 'onceq.job_fences'::regclass)
            then citus_relation_size('onceq.job_fences'::regclass) else pg_catalog.pg_relation_size('onceq.job_fences'::regclass) end
       / pg_catalog.current_setting('block_size')::bigint, pg_catalog.pg_stat_get_tuples_inserted('onceq.job_fences'::regclass)`

// drawnAs has what is sent in place of statements that need what the sequence says, which is on the coordinator.
var drawnAs = map[string]string{
	insertKeyed: enqueueOneDrawn, enqueueOne: enqueueOneDrawn, enqueueJobs: enqueueDrawn,
	insertFence: claimFenceDrawn, takeFence: claimFenceDrawn, readRefs: refsApart,
}

// citusParts is the pg.Parts of this package.
type citusParts struct{}

func (citusParts) Draws(statement string) bool { return drawnAs[statement] != "" }

func (citusParts) OnNode(statement string) string { return onNode(statement) }

// draw asks the sequence for what such a statement needs, and returns what is sent in its place.
func (citusParts) Draw(ctx context.Context, q *pg.Store, db pg.DB, statement string, args []any) (string, []any, error) {
	instead := drawnAs[statement]
	var ids []int64
	ask, n, answer := drawIDs, []any{1}, pg.Row(nil, &ids)
	switch statement {
	case enqueueJobs:
		n[0] = len(args[1].([]string))
	case readRefs:
		ids = make([]int64, 1)
		ask, n, answer = readSequence, nil, pg.Row(&ids[0])
	}
	if err := pg.Query(ctx, db, q.SQL(ask), n, answer); err != nil {
		return instead, nil, err
	}
	args = slices.Clone(args)
	switch statement {
	case insertKeyed: // has nine arguments, where enqueueOne has eighteen
		args = append(args, make([]any, 18-len(args))...)
	case insertFence: // has no token to take over
		args = append(args, nil, false, "", false)
	case enqueueJobs:
		slices.Sort(ids)
		for i, id := range args[5].([]int64) { // some have ids already
			if id != 0 {
				ids[i] = id
			}
		}
		args[5] = ids
		return instead, args, nil
	}
	return instead, append(args, ids[0]), nil
}

// enqueueDrawn is enqueueJobs for jobs that have ids: the sequence is on the coordinator.
var enqueueDrawn = enqueueJobsFrom("null")

// enqueueOneDrawn is enqueueOne for a job that has an id, on the node.
var enqueueOneDrawn = enqueueOneFrom("onceq.meta, ", "null", "$19::bigint")

// claimFenceDrawn is takeFence, and without a token insertFence, with a drawn id.
const claimFenceDrawn = `
select f.holds, f.token, f.until, f.since, f.identity
  from onceq.meta, onceq.claim_fence(null, $1::bigint, $2::int, $3::bigint, $4::smallint, $5::text, $6::text, $7::bigint, $8::bigint, $9::bigint, $10::bytea,
                                     $11::bigint, $12::bool, $13::text, $14::bool, $15::bigint) f`

// refsApart is readRefs with what the sequence says, which is on the coordinator.
var refsApart = refsFrom(`$3::bigint`)

// What EnqueueInBatch sends. No part waits for an answer: the id is in a setting of the transaction, and the fence says by a
// random holder that it was taken just now.
const (
	drawApart = `select pg_catalog.set_config('onceq_drawn.id', pg_catalog.nextval('onceq.ids')::text, true)`

	fenceApart = `
insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint, holder)
values (` + table.OfJob + `, $1::text, $2::text, ` + table.Queued + `, pg_catalog.current_setting('onceq_drawn.id')::bigint, pg_catalog.current_setting('onceq_drawn.id')::bigint << ` + table.TokenBitsSQL + `,
        statement_timestamp(), $3::bigint, $4::bytea, $5::bigint)
on conflict do nothing`

	retakeApart = `
update onceq.job_fences f
   set job_id = pg_catalog.current_setting('onceq_drawn.id')::bigint, token = pg_catalog.current_setting('onceq_drawn.id')::bigint << ` + table.TokenBitsSQL + `,
       state = ` + table.Queued + `, created_at = statement_timestamp(), finished_at = null,
       lifetime = $3::bigint, fingerprint = $4::bytea, result = null, holder = $5::bigint, leased_until = null
 where f.class = ` + table.OfJob + ` and f.scope = $1::text and f.key = $2::text and ` + table.FenceFree + `
   and f.token >> ` + table.TokenBitsSQL + ` < pg_catalog.current_setting('onceq_drawn.id')::bigint and f.job_id < pg_catalog.current_setting('onceq_drawn.id')::bigint`
)

// The rows of a job, with a key and without one: of jobs, or with the columns of a lane or a limit of job_waits. callOfBatch is the call of
// such a one. That comes after the job, so that it is not due before it, and is left even if the key is taken: then a promoter looks for
// nothing. waitOfBatch has the answer of the two. It changes nothing, but only of what changes something Citus evaluates a setting on the
// coordinator.
var (
	plainApart       = plainOf("jobs", "pg_catalog.nextval('onceq.ids')", "", "")
	waitApart        = plainOf("job_waits", "pg_catalog.current_setting('onceq_drawn.id')::bigint", ", lane, lane_rule, path", ", $10::text, $11::smallint, $12::text")
	jobApart         = keyedOf("jobs", "", "")
	waitOfFenceApart = keyedOf("job_waits", ", lane, lane_rule, path", ", $13::text, $14::smallint, $15::text")

	waitOfBatch = `update onceq.job_waits set claims = claims where id = pg_catalog.current_setting('onceq_drawn.id')::bigint returning id, run_at > created_at, 1`

	callOfBatch = `
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

// queueParts adds to the caller's batch what comes before its last statement, which it returns.
func queueParts(q *pg.Store, batch *pgx.Batch, e *encoded) (last string, args []any) {
	h := e.header
	var payload, delay, at, metadata any
	if e.bytes == nil {
		payload = e.json
	}
	if h.delay != 0 {
		delay = h.delay.Microseconds()
	}
	if !h.at.IsZero() {
		at = h.at.UnixMicro()
	}
	if h.metadata != "" {
		metadata = h.metadata
	}
	job := []any{h.queue, h.kind, payload, h.maxAttempts, h.priority, delay, at, e.bytes, metadata}
	if e.key == "" && e.lane == "" {
		return plainApart, job
	}
	batch.Queue(q.SQL(drawApart))
	if e.key != "" {
		holder := rand.Int64()
		fence := []any{h.scope, e.key, h.lifetime, e.fingerprint, holder}
		batch.Queue(q.SQL(retakeApart), fence...)
		batch.Queue(q.SQL(fenceApart), fence...)
		job = append(job, h.scope, e.key, holder)
	}
	if e.lane == "" {
		return jobApart, job
	}
	wait := waitApart
	if e.key != "" {
		wait = waitOfFenceApart
	}
	line, path := lineOf(e.lane)
	batch.Queue(q.SQL(wait), append(job, line, int16(h.laneRule), path)...)
	batch.Queue(q.SQL(callOfBatch), line, delay, at)
	return waitOfBatch, nil
}

// In a handler's transaction the coordinator knows the transaction's id and ends the connection of a client that freezes; the
// node knows neither that client nor the id. On a plain server the same two are columns of lockJob and lockJobs.
const openApart = `select ` + limitIdling + `, null, pg_current_xact_id()::text`
